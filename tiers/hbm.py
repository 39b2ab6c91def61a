"""A GPU's memory as a tier: one arena on the device, copies through pinned host memory.

    write   data ─memcpy─> pinned ─up stream─> arena                     returns when it is there
    pieces  dest <─memcpy─ verified <─ pinned <─down stream─ gathered <─ arena

Copies of more than a stage are cut, and each thread's two stages take turns: one is on the bus
while the processor copies the other. Pieces from all over share a stage. Memory that the device
reaches by itself (`page_lock`) needs no stage: measured on an H200, 53 GB/s on the bus, against 6.4
copied by a thread (16 processors of a virtual machine, 2026-11-27).

The sums cover what has come to the host, and so everything that happened to it since it was packed,
on the bus and in the device's memory too. They do not cover what is done with it afterwards, such
as the caller's own copy to a device.

The device is reached through torch, imported when a tier is made: whoever has a GPU for an engine
has torch, and one process then has one CUDA context.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tiers.arena import Arena, units_of
from tiers.base import Bytes, Pieces, Slot, digest
from tiers.coalesce import locate
from tiers.cuda import no_device
from tiers.errors import MediumError, ReadFailed

#: Bytes of a stage: some 80 µs of PCIe 5 x16. Queueing a copy took as long as moving 2 MB, and much
#: longer where eight threads queued them: hence few, long ones.
STAGE_BYTES: Final = 4 << 20
_N_STAGES: Final = 2
#: Most places of a stage that are worth a copy each; to more, the processor moves the pieces.
_MOST_PLACES: Final = 4


class Event(Protocol):
    """Something queued on a stream."""

    def synchronize(self) -> None:
        """Return when it has happened."""


class Memory(Protocol):
    """Bytes on a device. Copies are queued and happen in order; their host side is `pinned`, or
    memory that the device reaches."""

    def reaches(self, host: Bytes) -> bool:
        """Whether the device can copy from and to this memory by itself."""

    def pinned(self, n_bytes: int) -> Bytes:
        """Host memory the device can reach."""

    def up(self, at: int, data: Bytes) -> Event:
        """Queue a copy of pinned data to [at, at + len(data))."""

    def gather(self, at: npt.NDArray[np.int64], size: int, dest: Bytes) -> Event:
        """Queue a copy of each [at[i], at[i] + size) to pinned dest, one after the other. Each
        begins at a page."""


class _Stage(NamedTuple):
    """Pieces under way: `event` says when they are in `pinned` or, if that is None, in place."""

    event: Event
    pinned: Bytes | None
    pieces: Pieces


class HbmTier(Arena):
    """A device arena of budget_bytes. A slot's bytes are there when `write` has returned."""

    #: One stage is on the bus while the other is put in place. (18 MB in pieces of 8 KiB by two
    #: threads of an H200's machine: 5.1 ms; 6.8 in calls for 2 MiB each.)
    least_copy = _N_STAGES * STAGE_BYTES

    def __init__(self, budget_bytes: int, name: str = "hbm", memory: Memory | None = None) -> None:
        """`memory`: at least budget_bytes; None: memory of the current CUDA device.

        Raises MediumError when the device does not have that much.
        """
        super().__init__(budget_bytes)
        self.name = name
        self._memory: Memory | None = CudaMemory(self.n_bytes) if memory is None else memory
        self._stages = threading.local()

    def write(self, slot: Slot, off: int, data: Bytes) -> None:
        under_way: deque[Event] = deque()
        try:
            memory = self._there()  # kept to the end: a close meanwhile must not give it to others
            direct = memory.reaches(data)
            for i, (at, host) in enumerate(_stages(slot, off, data)):
                if len(under_way) == _N_STAGES:
                    under_way.popleft().synchronize()
                staged = host if direct else self._pinned(i)[: len(host)]
                if not direct:
                    np.copyto(staged, host)
                under_way.append(memory.up(at, staged))
            for event in under_way:
                event.synchronize()
        except RuntimeError as err:  # what torch raises for whatever CUDA reports
            raise MediumError(f"{self.name}: a copy to the device failed: {err}") from None
        finally:
            _settle(under_way)

    def read_pieces(self, pieces: Pieces) -> None:
        """Read a stage at a time: its pieces are gathered on the device and come in one copy, or in
        one copy for each of a few places that the device reaches."""
        under_way: deque[_Stage] = deque()
        queued: list[Event] = []  # all of them: one of a stage's copies may be refused
        try:
            reached = pieces.to.ndim == 1 and self._there().reaches(pieces.dest)
            for i, some in enumerate(pieces.cut(STAGE_BYTES)):
                if len(under_way) == _N_STAGES:
                    self._put(under_way.popleft())
                runs = _neighbours(some.to, 1) if reached else []
                if reached and len(runs) <= _MOST_PLACES:
                    pinned = None
                    self._into_place(some, runs, queued)
                else:
                    pinned = self._pinned(i, some.n_bytes)[: some.n_bytes]
                    queued.append(self._there().gather(some.starts, some.piece_bytes, pinned))
                under_way.append(_Stage(queued[-1], pinned, some))
            while under_way:
                self._put(under_way.popleft())
        except RuntimeError as err:
            raise ReadFailed("io", f"{self.name}: a copy from the device failed: {err}") from None
        finally:
            _settle(queued)

    def close(self) -> None:
        """See Cache. Copies still wanted fail."""
        self._memory = None

    def _there(self) -> Memory:
        if self._memory is None:
            raise RuntimeError("the tier is closed")
        return self._memory

    def _into_place(self, pieces: Pieces, runs: list[tuple[int, int]], queued: list[Event]) -> None:
        """Queue a copy for each run of neighbouring places; the last one done, all are."""
        size = pieces.piece_bytes
        for first, end in runs:
            to = int(pieces.to[first]) * size
            place = pieces.dest[to : to + (end - first) * size]
            queued.append(self._there().gather(pieces.starts[first:end], size, place))

    def _put(self, stage: _Stage) -> None:
        """Verify pieces that have come, and put those that are not in their places there."""
        stage.event.synchronize()
        pinned, pieces = stage.pinned, stage.pieces
        if pinned is None:
            straight, size = pieces.straight(), pieces.piece_bytes
            if straight is not None:
                pieces.verify(straight, self.name)
                return
            places = (pieces.dest[to * size : (to + 1) * size] for to in pieces.to.tolist())
            pieces.compare([digest(place) for place in places], self.name)
            return
        pieces.verify(pinned, self.name)
        dest, of, to = pieces.places()
        dest[to] = pinned.reshape(-1, dest.shape[1])[of]

    def _pinned(self, i: int, n_bytes: int = STAGE_BYTES) -> Bytes:
        """This thread's stages, in turn. A piece longer than they are makes them longer."""
        stages: list[Bytes] = getattr(self._stages, "of_thread", [])
        if not stages or len(stages[i % _N_STAGES]) < n_bytes:
            longer = max(n_bytes, STAGE_BYTES)
            stages = [self._there().pinned(longer) for _ in range(_N_STAGES)]
            self._stages.of_thread = stages
        return stages[i % _N_STAGES]


def _neighbours(at: npt.NDArray[np.int64], size: int) -> list[tuple[int, int]]:
    """[first, end) of the runs in which each begins `size` after the one before it. Pure."""
    ends = [*(np.flatnonzero(np.diff(at) != size) + 1).tolist(), len(at)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _settle(events: Iterable[Event]) -> None:
    """Wait for copies that nobody takes any more: this thread uses their stages next."""
    for event in events:
        with suppress(RuntimeError):
            event.synchronize()


def _stages(slot: Slot, off: int, host: Bytes) -> Iterator[tuple[int, Bytes]]:
    """(place in the arena, its part of host), none longer than a stage. Pure."""
    done = 0
    for _, start, length in locate(slot, off, len(host)):
        for at in range(0, length, STAGE_BYTES):
            n = min(STAGE_BYTES, length - at)
            yield start + at, host[done + at : done + at + n]
        done += length


# ---- the device ----------------------------------------------------------------------------------


def why_not() -> str:
    """Why there can be no tier on CUDA here, in one line; "" when there can."""
    lacking = no_device()
    if lacking:
        return lacking
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    with warnings.catch_warnings(record=True) as said:  # about a driver too old for torch, say
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable:
        return ""
    why = " ".join(str(said[0].message).split()) if said else "install a build for CUDA"
    return f"torch {torch.__version__} cannot use the device: {why}"


class CudaMemory:
    """One allocation on the current CUDA device, with a stream for each direction."""

    def __init__(self, n_bytes: int) -> None:
        """Raises MediumError when the device does not have that much."""
        import torch

        self._torch: Any = torch
        try:
            device = torch.device("cuda", torch.cuda.current_device())
            # Made in inference mode it could be written only there, where our threads never are.
            with torch.inference_mode(False):
                self._arena = torch.empty(n_bytes, dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)  # whoever had this memory before may still be using it
            self._up: Any = self._torch.cuda.Stream(device)
            self._down: Any = self._torch.cuda.Stream(device)
        except RuntimeError as err:  # OutOfMemoryError is one; without a context yet there is none
            said = str(err).splitlines() or [type(err).__name__]
            raise MediumError(
                f"hbm: {n_bytes:,} bytes asked of the CUDA device: {said[0]}: lower hbm_bytes, or "
                "see who else uses it"
            ) from None

    def reaches(self, host: Bytes) -> bool:
        return (
            bool(len(host))
            and host.flags.writeable
            and bool(self._torch.from_numpy(host[:1]).is_pinned())
        )

    def pinned(self, n_bytes: int) -> Bytes:
        # The array keeps the tensor, and so the page lock, alive.
        memory: Bytes = self._torch.empty(
            n_bytes, dtype=self._torch.uint8, device="cpu", pin_memory=True
        ).numpy()
        return memory

    def up(self, at: int, data: Bytes) -> Event:
        there = self._arena[at : at + len(data)]
        return self._queue(self._up, there, self._torch.from_numpy(data))

    def gather(self, at: npt.NDArray[np.int64], size: int, dest: Bytes) -> Event:
        runs = _neighbours(at, size)
        if len(runs) > 1:
            with suppress(self._torch.OutOfMemoryError):  # an engine may have left no memory
                return self._gathered(at, size, dest)
        queued: list[Event] = []
        try:
            for first, end in runs:
                begin, n_bytes = int(at[first]), (end - first) * size
                there = self._arena[begin : begin + n_bytes]
                place = self._torch.from_numpy(dest[first * size :][:n_bytes])
                queued.append(self._queue(self._down, place, there))
        except BaseException:
            _settle(queued)
            raise
        return queued[-1]

    def _gathered(self, at: npt.NDArray[np.int64], size: int, dest: Bytes) -> Event:
        """As `gather`, in one copy of pieces that are first put together on the device."""
        unit, which = units_of(at, size)
        # In words: byte by byte, a device copies at a fraction of its memory's speed.
        words = self._arena[: len(self._arena) // unit * unit].view(self._torch.int64)
        with self._torch.cuda.stream(self._down):
            chosen = self._torch.from_numpy(which).to(self._arena.device)
            found = words.view(-1, unit // 8).index_select(0, chosen)
            return self._queue(
                self._down, self._torch.from_numpy(dest), found.view(self._torch.uint8).view(-1)
            )

    def _queue(self, stream: Any, to: Any, of: Any) -> Event:
        with self._torch.cuda.stream(stream):
            to.copy_(of, non_blocking=True)
            event: Event = stream.record_event()
        return event


#: cudaHostRegisterPortable: for every device of the process; cudaErrorHostMemoryAlreadyRegistered.
_PORTABLE: Final = 1
_THERE_ALREADY: Final = 712


def page_lock(memory: Bytes, device: int = -1) -> None:
    """Let devices copy from and to this memory by themselves, as long as it is there: no copy then
    goes through the driver's own memory (measured on an H200: 53 instead of 6.7 GB/s to the device,
    2 ms to lock 43 MB).

    Done through the CUDA runtime that torch has loaded for everybody. Where there is none, or the
    system locks no more, memory stays as it was, and copies stay as slow. `device`: the one whose
    context is made if there is none yet; below 0: the calling thread's.
    """
    process = ctypes.CDLL(None)
    if not hasattr(process, "cudaHostRegister"):
        return
    import torch

    at = memory.ctypes.data
    where = (ctypes.c_void_p(at), ctypes.c_size_t(len(memory)), ctypes.c_uint(_PORTABLE))
    # Before it is locked: otherwise memory locked as a signal cuts this off would stay locked, and
    # be taken for whatever comes to lie at this address next.
    gone = weakref.finalize(memory, _unlock, at, os.getpid())
    with torch.cuda.device(device):
        error = process.cudaHostRegister(*where)
        if error == _THERE_ALREADY:
            process.cudaGetLastError()  # a call that succeeds does not clear the error
            _unlock(at, os.getpid())
            error = process.cudaHostRegister(*where)
        if error:
            gone.detach()
            process.cudaGetLastError()  # or torch takes it for an error of its own next call


def _unlock(at: int, of_process: int) -> None:
    if os.getpid() != of_process:  # a fork's child, whose driver is not to be touched
        return
    process = ctypes.CDLL(None)
    if process.cudaHostUnregister(ctypes.c_void_p(at)):
        process.cudaGetLastError()


def for_current_device() -> Callable[[Bytes], None]:
    """`page_lock` for the device that is current now, whatever thread calls it."""
    import torch

    if not torch.cuda.is_available():
        return page_lock
    return partial(page_lock, device=torch.cuda.current_device())
