"""Memory that a device reaches by itself: locked when it is made, unlocked when it is gone.

The CUDA runtime is a stand-in that keeps what is registered; tests/test_hbm.py runs on a device.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import impress
from impress.engines.hf_prefix import lock_pages
from tiers import hbm
from tiers.base import PAGE, Bytes
from tiers.hbm import CudaMemory, page_lock
from tiers.slots import BufferPool, aligned

N = 3 * PAGE


class Runtime:
    """The calls of the CUDA runtime that are used, as ctypes makes them."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.refuses = 0  # the error that registering gives
        self.error = 0  # as torch would find it

    def cudaHostRegister(self, at: Any, n_bytes: Any, _flags: Any) -> int:
        error = self.refuses or (712 if at.value in self.locked else 0)
        if not error:
            self.locked[at.value] = n_bytes.value
        self.error = error or self.error  # a call that succeeds clears no error
        return error

    def cudaHostUnregister(self, at: Any) -> int:
        error = 0 if self.locked.pop(at.value, 0) else 713
        self.error = error or self.error
        return error

    def cudaGetLastError(self) -> int:
        error, self.error = self.error, 0
        return error


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(hbm.ctypes, "CDLL", lambda _name: made)
    return made


def test_memory_is_unlocked_when_the_last_view_of_it_is_gone(runtime: Runtime) -> None:
    memory = aligned(N)
    page_lock(memory)
    view = torch.from_numpy(memory[PAGE:])
    assert [*runtime.locked.values()] == [len(memory)]
    del memory
    gc.collect()
    assert runtime.locked
    del view
    gc.collect()
    assert not runtime.locked


def test_memory_that_is_not_locked_is_used_all_the_same_and_no_error_stays(
    runtime: Runtime,
) -> None:
    runtime.refuses = 2
    memory = aligned(N)
    page_lock(memory)
    assert runtime.error == 0 and not runtime.locked
    runtime.locked[memory.ctypes.data] = 1  # another's, as far as this memory knows
    del memory
    gc.collect()
    assert runtime.locked


def test_what_stayed_locked_where_other_memory_lay_is_locked_anew(runtime: Runtime) -> None:
    """A device would have copied to pages that no longer belonged to anybody."""
    memory = aligned(N)
    runtime.locked[memory.ctypes.data] = PAGE
    page_lock(memory)
    assert runtime.locked == {memory.ctypes.data: len(memory)} and runtime.error == 0


def test_a_forked_child_touches_no_driver(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = aligned(N)
    page_lock(memory)
    mine = os.getpid()
    monkeypatch.setattr(hbm.os, "getpid", lambda: mine + 1)
    del memory
    gc.collect()
    assert runtime.locked


def test_without_a_runtime_nothing_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hbm.ctypes, "CDLL", lambda _name: SimpleNamespace())
    page_lock(aligned(N))


def test_a_pool_prepares_fresh_memory_once() -> None:
    seen: list[int] = []
    pool = BufferPool(None)
    pool.prepare = lambda memory: seen.append(memory.ctypes.data)
    for _ in range(3):  # the same memory again
        buffer = pool.acquire(N)
        assert buffer is not None and buffer.array.ctypes.data == seen[-1]
        buffer.release()
    assert len(seen) == 1


@pytest.mark.parametrize(("hbm_bytes", "where"), [(0, "cuda"), (1 << 20, "cpu"), (1 << 20, "cuda")])
def test_a_store_locks_what_it_reads_into_where_a_device_has_copies(
    hbm_bytes: int, where: str, open_store: Callable[..., impress.PrefixStore],
    geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("impress.cache.copies.why_not", lambda: "")
    monkeypatch.setattr("impress.cache.copies.HbmTier", Stand)
    store = open_store(geometry, hbm_bytes=hbm_bytes, hbm_device=where)
    locks = bool(hbm_bytes) and where == "cuda"
    assert (store.buffers.prepare is not None) == locks
    model = SimpleNamespace(device=torch.device("cpu"))
    lock_pages(store, model)
    assert (store.buffers.prepare is not None) == locks
    model.device = torch.device("cuda:1")
    lock_pages(store, model)
    assert store.buffers.prepare.keywords == {"device": 1}  # type: ignore[union-attr]


class Stand(hbm.HbmTier):
    def __init__(self, n_bytes: int, name: str = "hbm") -> None:
        super().__init__(n_bytes, name, SimpleNamespace())  # type: ignore[arg-type]


# ---- what is gathered on a device, in memory that stands for it ----------------------------------


class Torch:
    """torch without streams: what is queued happens at once."""

    def __init__(self) -> None:
        self.cuda = SimpleNamespace(stream=lambda _stream: nullcontext())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def memory_of(data: Bytes) -> CudaMemory:
    memory = CudaMemory.__new__(CudaMemory)
    memory._torch, memory._arena = Torch(), torch.from_numpy(data)
    event = SimpleNamespace(synchronize=lambda: None)
    memory._down = SimpleNamespace(record_event=lambda: event)
    return memory


@pytest.mark.parametrize("full", [False, True], ids=["room", "full"])
@pytest.mark.parametrize("n_pages", [1, 2, 3])
@pytest.mark.parametrize(
    "at", [[0], [5, 6, 7], [0, 2, 1, 3], [9, 2, 3, 12, 0]], ids=["one", "run", "mixed", "apart"]
)
def test_pieces_are_gathered_in_the_order_they_are_asked_for(
    at: list[int], n_pages: int, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds even where an engine has left the device no memory to gather in: a hit in HBM was
    then a lost prefix, and all its copies were dropped."""
    data = aligned(50 * PAGE)
    data[:] = np.random.default_rng(1).integers(0, 256, len(data), dtype=np.uint8)
    size = n_pages * PAGE
    starts = np.array(at) * size + PAGE  # not in units of its own size
    dest = aligned(len(at) * size)[: len(at) * size]

    def refused(*_args: Any) -> None:
        raise torch.OutOfMemoryError("none left")

    if full:
        monkeypatch.setattr(torch.Tensor, "index_select", refused)
    memory_of(data).gather(starts, size, dest).synchronize()
    assert np.array_equal(dest, np.concatenate([data[i : i + size] for i in starts]))
