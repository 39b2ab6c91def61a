"""The HBM tier: its copies on a device that does nothing until it is waited for, and on a real one.

Where there is no device, only the device is a stand-in: a queue of copies that happen, in order,
when somebody waits for one of them. A tier that looks at bytes too early, or gives a stage to the
next copy too early, gets the wrong bytes.
"""

from __future__ import annotations

import ctypes
import gc
import re
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from conftest import MIB, assert_serves, prompt, put_prompt, wait_for_promotions
from tier_contract import CacheContract, fetch, noise

import impress
from tiers.base import PAGE, Bytes, Cache, Pieces, Tier, sums_of
from tiers.cuda import no_device
from tiers.errors import MediumError, ReadFailed
from tiers.hbm import STAGE_BYTES, HbmTier, page_lock, why_not
from tiers.slots import aligned

Open = Callable[..., impress.PrefixStore]


class Queued:
    """A copy that has not happened yet."""

    def __init__(self, memory: QueuedMemory, to: Bytes, of: Bytes | Callable[[], Bytes]) -> None:
        self.memory, self.to, self.of = memory, to, of

    def synchronize(self) -> None:
        with self.memory.lock:
            while self in self.memory.queue:
                copy = self.memory.queue.pop(0)
                if self.memory.broken:
                    raise RuntimeError("an error of the device's")
                copy.to[:] = copy.of() if callable(copy.of) else copy.of


class QueuedMemory:
    """Host memory that stands in for a device's, with one stream. `direct`: the device reaches all
    of the host's memory."""

    def __init__(self, n_bytes: int, *, direct: bool = False) -> None:
        self.bytes = np.zeros(n_bytes, dtype=np.uint8)
        self.direct = direct
        self.queue: list[Queued] = []
        self.lock = threading.Lock()
        self.broken = False

    def reaches(self, host: Bytes) -> bool:
        return self.direct

    def pinned(self, n_bytes: int) -> Bytes:
        return aligned(n_bytes)[:n_bytes]

    def up(self, at: int, data: Bytes) -> Queued:
        return self._add(self.bytes[at : at + len(data)], data)

    def gather(self, at: npt.NDArray[np.int64], size: int, dest: Bytes) -> Queued:
        return self._add(dest, lambda: np.concatenate([self.bytes[i : i + size] for i in at]))

    def _add(self, to: Bytes, of: Bytes | Callable[[], Bytes]) -> Queued:
        copy = Queued(self, to, of)
        with self.lock:
            self.queue.append(copy)
        return copy


def queued_tier(n_bytes: int, name: str = "hbm", *, direct: bool = False) -> HbmTier:
    return HbmTier(n_bytes, name, QueuedMemory(n_bytes, direct=direct))


def of_stages(n: int, like: Any) -> HbmTier:
    """A tier of n stages and a few pages."""
    return queued_tier(n * STAGE_BYTES + 8 * PAGE, direct=like._memory.direct)


class TestHbm(CacheContract):
    @pytest.fixture(params=["staged", "direct"])
    def tier(self, tmp_path: Path, request: pytest.FixtureRequest) -> Tier:
        return queued_tier(4 * MIB, direct=request.param == "direct")

    def test_pieces_that_lie_together_and_go_apart_are_copies_of_their_own(
        self, tier: Tier
    ) -> None:
        slot, data = tier.reserve(4 * PAGE), noise(4 * PAGE)
        tier.write(slot, 0, data)
        starts = slot.parts[0].off + np.arange(4) * PAGE
        out, to = aligned(8 * PAGE), np.array([1, 2, 4, 7])
        tier.read_pieces(Pieces(starts, out, to, sums_of(data, PAGE), PAGE))
        assert np.array_equal(out[: 8 * PAGE].reshape(8, -1)[to], data.reshape(4, -1))
        tier._memory.bytes[starts[2]] ^= 1  # type: ignore[attr-defined]
        with pytest.raises(ReadFailed, match=rf"first at byte {starts[2]}\b"):
            tier.read_pieces(Pieces(starts, out, to, sums_of(data, PAGE), PAGE))

    def test_copies_longer_than_the_stages_are_whole(self, tier: Tier) -> None:
        n, tier = 3 * STAGE_BYTES + 5 * PAGE, of_stages(3, tier)
        slot, data = tier.reserve(n), noise(n)
        tier.write(slot, 0, data)
        out = aligned(n)[:n]
        fetch(tier, slot, 0, out, sums_of(data, PAGE), PAGE)
        assert np.array_equal(out, data)

    def test_what_flips_on_the_device_fails_the_read(self, tier: Tier) -> None:
        slot, data = tier.reserve(MIB), noise(MIB)
        tier.write(slot, 0, data)
        tier._memory.bytes[slot.parts[0].off + 5 * PAGE] ^= 1  # type: ignore[attr-defined]
        with pytest.raises(ReadFailed, match=rf"hbm.* first at byte {5 * PAGE}\b"):
            fetch(tier, slot, 0, aligned(MIB), sums_of(data, PAGE), PAGE)

    def test_a_failed_read_leaves_no_copy_under_way(self, tier: Tier) -> None:
        """The second stage's copy went on into memory where this thread stages its next write."""
        n, tier = 2 * STAGE_BYTES, of_stages(2, tier)
        slot, data = tier.reserve(n), noise(n)
        tier.write(slot, 0, data)
        tier._memory.bytes[slot.parts[0].off] ^= 1  # type: ignore[attr-defined]
        with pytest.raises(ReadFailed, match=r"hbm.* 1 bad piece"):
            fetch(tier, slot, 0, aligned(n)[:n], sums_of(data, PAGE), PAGE)
        assert not tier._memory.queue  # type: ignore[attr-defined]

    def test_pieces_from_all_over_come_in_one_copy(self, tier: Tier) -> None:
        """Each run of neighbours was a copy of its own: a layer's chosen rows made hundreds, and
        asking the device for them took longer than asking the disk."""
        slot, data = tier.reserve(MIB), noise(MIB)
        tier.write(slot, 0, data)
        asked, gather = [], tier._memory.gather

        def counting(at: npt.NDArray[np.int64], size: int, dest: Bytes) -> Queued:
            asked.append(len(at))
            return gather(at, size, dest)

        tier._memory.gather = counting
        fetch(tier, slot, 0, aligned(MIB), sums_of(data, PAGE), PAGE)
        assert asked == [MIB // PAGE]
        chosen = np.array([0, 2, 1, 7, 9, 10, 200])
        starts, sums = slot.parts[0].off + chosen * PAGE, sums_of(data, PAGE)[chosen]
        out = aligned(7 * PAGE)
        tier.read_pieces(Pieces(starts, out, np.arange(7), sums, PAGE))
        assert asked[1:] == [7]
        assert np.array_equal(out.reshape(7, -1), data.reshape(-1, PAGE)[chosen])

    def test_a_few_places_are_copied_to_and_many_are_put_there(self, tier: Tier) -> None:
        slot, data = tier.reserve(MIB), noise(MIB)
        tier.write(slot, 0, data)
        asked, gather = [], tier._memory.gather
        tier._memory.gather = lambda *where: asked.append(len(where[0])) or gather(*where)
        for n, apart in ((4, 60), (60, 4)):
            at = np.arange(n)
            starts, to = slot.parts[0].off + at * PAGE, at * apart
            out = aligned(n * apart * PAGE)
            sums = sums_of(data, PAGE)[:n]
            tier.read_pieces(Pieces(starts, out, to, sums, PAGE))
            assert np.array_equal(out[: n * apart * PAGE].reshape(-1, PAGE)[to],
                                  data.reshape(-1, PAGE)[:n])  # fmt: skip
        assert asked == ([1, 1, 1, 1, 60] if tier._memory.direct else [4, 60])

    def test_a_copy_that_cannot_be_queued_leaves_none_under_way(self, tier: Tier) -> None:
        """The copies before it went on into memory that had been given back."""
        slot, data = tier.reserve(MIB), noise(MIB)
        tier.write(slot, 0, data)
        memory, gather = tier._memory, tier._memory.gather
        asked: list[int] = []

        def refusing(at: npt.NDArray[np.int64], size: int, dest: Bytes) -> Queued:
            asked.append(len(at))
            if len(asked) > 1:
                raise RuntimeError("out of memory")
            return gather(at, size, dest)

        memory.gather = refusing
        starts, to = slot.parts[0].off + np.arange(3) * PAGE, np.array([0, 2, 4])
        pieces = Pieces(starts, aligned(8 * PAGE), to, sums_of(data, PAGE)[:3], PAGE)
        if not memory.direct:  # this is one copy; the next read's is refused
            tier.read_pieces(pieces)
        with pytest.raises(ReadFailed, match="out of memory"):
            tier.read_pieces(pieces)
        assert len(asked) == 2 and not memory.queue

    def test_an_error_of_the_device_is_a_failed_copy(self, tier: Tier) -> None:
        slot = tier.reserve(PAGE)
        tier._memory.broken = True  # type: ignore[attr-defined]
        with pytest.raises(ReadFailed, match="hbm: a copy from the device failed") as failed:
            fetch(tier, slot, 0, aligned(PAGE), np.zeros(1, dtype=np.uint64), PAGE)
        assert failed.value.reason == "io"
        with pytest.raises(MediumError, match="hbm: a copy to the device failed"):
            tier.write(slot, 0, noise(PAGE))

    def test_closed_it_reads_and_writes_nothing_and_still_counts(self, tier: Cache) -> None:
        slot, data = tier.reserve(PAGE), noise(PAGE)
        tier.write(slot, 0, data)
        tier.close()
        with pytest.raises(ReadFailed, match="copy from the device failed: the tier is closed"):
            fetch(tier, slot, 0, aligned(PAGE), sums_of(data, PAGE), PAGE)
        with pytest.raises(MediumError, match="copy to the device failed: the tier is closed"):
            tier.write(slot, 0, data)
        tier.check()
        assert tier.usage().used == PAGE
        tier.free(slot)
        assert tier.usage().used == 0


@pytest.mark.gpu
class TestHbmOnCuda(CacheContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return HbmTier(4 * MIB)

    def test_more_than_the_device_has_is_refused_with_the_setting(self) -> None:
        with pytest.raises(MediumError, match="lower hbm_bytes"):
            HbmTier(1 << 46)

    @pytest.mark.parametrize("apart", [1, 3], ids=["a few places", "many places"])
    def test_pieces_from_all_over_into_memory_that_the_device_reaches(self, apart: int) -> None:
        import torch

        n = 3 * STAGE_BYTES
        tier, data, out = HbmTier(2 * n), noise(n), aligned(apart * n)
        for memory in (data, out):
            page_lock(memory)
            assert torch.from_numpy(memory[:1]).is_pinned()
        tier.reserve(5 * PAGE)
        slot = tier.reserve(n)
        tier.write(slot, 0, data)
        pages = np.random.default_rng(1).permutation(n // PAGE)
        to = np.arange(len(pages)) * apart
        starts, sums = slot.parts[0].off + pages * PAGE, sums_of(data, PAGE)[pages]
        tier.read_pieces(Pieces(starts, out, to, sums, PAGE))
        assert np.array_equal(out[: apart * n].reshape(-1, PAGE)[to], data.reshape(-1, PAGE)[pages])

    def test_memory_that_is_gone_is_no_longer_locked(self) -> None:
        """Fresh memory at the same place could not be locked, and the error was raised by the next
        call to torch."""
        import torch

        for _ in range(20):
            memory = aligned(8 * MIB)
            page_lock(memory)
            view = torch.from_numpy(memory[PAGE:])
            del memory
            assert view.is_pinned()
            del view
        torch.zeros(1, device="cuda").item()

    def test_closed_it_gives_the_device_its_memory_back(self, tier: Cache) -> None:
        import torch

        before = torch.cuda.memory_allocated()
        tier.close()
        assert torch.cuda.memory_allocated() <= before - 4 * MIB


@pytest.fixture(params=["queued", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a store with hbm_device = "cuda" finds."""
    if request.param == "queued":
        monkeypatch.setattr("impress.cache.copies.why_not", lambda: "")
        monkeypatch.setattr("impress.cache.copies.HbmTier", queued_tier)


@pytest.mark.usefixtures("device")
def test_a_store_serves_the_same_bits_from_a_device(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry, hbm_bytes=2 * MIB, hbm_device="cuda")
    tokens = prompt(256)
    put_prompt(store, tokens).wait(60)
    rows: list[dict[str, Any]] = []
    for _ in range(4):  # SSD, DRAM, the device, the device
        assert_serves(store, tokens, 256)
        wait_for_promotions(store)
        with store.lease(tokens) as lease, lease.session() as session:
            session.retrieve(0, None)
            rows.append(session.report().rows_by_tier)
        wait_for_promotions(store)
    assert rows[-1] == {"hbm": 256}
    assert store.stats()["emulated"] == []
    store.check()


def served_until_it_climbed(store: impress.PrefixStore) -> Any:
    """The tokens of a stored prompt that has copies on the device."""
    tokens = prompt(256)
    put_prompt(store, tokens).wait(60)
    for _ in range(3):
        assert_serves(store, tokens, 256)
        wait_for_promotions(store)
    return tokens


@pytest.mark.usefixtures("device")
def test_a_bad_copy_on_a_device_is_a_lost_prefix_and_then_read_from_home(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(geometry, hbm_bytes=2 * MIB, hbm_device="cuda")
    tokens = served_until_it_climbed(store)
    hbm = store._copies.chunks[0].tier
    hbm.write(hbm_slot(store), 0, noise(PAGE))
    with store.lease(tokens) as lease, lease.session() as session:
        with pytest.raises(impress.PrefixLost, match="checksum"):
            for layer in range(geometry.n_layers):
                session.retrieve(layer, None)
    assert_serves(store, tokens, 256)


def test_a_closed_store_lets_go_of_the_device(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While something still referred to the closed store, or to the engine over it, the next store
    to be opened found the device full: "lower hbm_bytes"."""
    made: list[weakref.ref[QueuedMemory]] = []

    def tier(n_bytes: int, name: str) -> HbmTier:
        memory = QueuedMemory(n_bytes)
        made.append(weakref.ref(memory))
        return HbmTier(n_bytes, name, memory)

    monkeypatch.setattr("impress.cache.copies.why_not", lambda: "")
    monkeypatch.setattr("impress.cache.copies.HbmTier", tier)
    store = open_store(geometry, hbm_bytes=2 * MIB, hbm_device="cuda")
    served_until_it_climbed(store)
    used = store.stats()["tiers"]["hbm"]
    assert used["used"]
    store.close()
    gc.collect()
    (memory,) = made
    assert memory() is None
    assert store.stats()["tiers"]["hbm"] == used
    store.check()
    store.drop_caches()


def hbm_slot(store: impress.PrefixStore) -> Any:
    """Where the first chunk on the device is."""
    cache = store._copies.chunks[0]
    return cache.slot(int(np.flatnonzero(cache._ready)[0]))


@pytest.mark.parametrize(
    ("error", "n_devices", "said"),
    [
        (0, 1, ""),
        (0, 0, "the CUDA driver finds no device"),
        (100, 0, "the CUDA driver finds no device"),
        (3, 0, "error 3: .* start it by spawn"),
        (802, 0, "error 802: start the fabric manager"),
        (803, 0, "error 803: .* reboot"),
        (999, 0, "error 999: see dmesg"),
        (719, 0, "error 719: see nvidia-smi"),
    ],
)
def test_a_device_that_cannot_be_used_is_not_one_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, error: int, n_devices: int, said: str
) -> None:
    """Whatever the driver failed with, it was said to find no device, and nobody looked further."""

    class Driver:
        def cuInit(self, flags: int) -> int:
            return error

        def cuDeviceGetCount(self, count: Any) -> int:
            count._obj.value = n_devices
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert re.search(said, no_device())
    assert bool(no_device()) == bool(said) and "\n" not in no_device()


def test_what_torch_warns_of_is_why_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch warns of a driver too old: pytest makes warnings errors, and ended before any test."""

    def is_available() -> bool:
        warnings.warn("The NVIDIA driver is\n too old", stacklevel=2)
        return False

    monkeypatch.setattr("tiers.hbm.no_device", lambda: "")
    monkeypatch.setattr("torch.cuda.is_available", is_available)
    assert why_not().endswith("cannot use the device: The NVIDIA driver is too old")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert why_not().endswith("cannot use the device: install a build for CUDA")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert not why_not()
