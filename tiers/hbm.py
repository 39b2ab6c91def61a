"""A GPU's memory as a tier: one arena on the device, copies through pinned host memory.

    write   data ─memcpy─> pinned ─up stream─> arena           returns when it is there
    pieces  dest <─memcpy─ pinned <─down stream─ arena         then what is in dest is verified

Copies of more than a stage are cut, and two stages a thread take turns: one is on the bus while the
other is copied by the processor. Pieces from all over share a stage.

What the sums cover: the bytes of `dest`, so everything that happened to them since they were
packed, on the bus and in the device's memory too. What is done with dest afterwards, such as the
caller's own copy to a device, they do not.

The device is reached through torch, imported when a tier is made: whoever has a GPU for an engine
has torch, and one process then has one CUDA context. Written, not yet run on a GPU.
"""

from __future__ import annotations

import importlib.util
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from tiers.arena import Arena
from tiers.base import Bytes, Pieces, Slot
from tiers.coalesce import locate
from tiers.cuda import no_device
from tiers.errors import MediumError, ReadFailed

#: Bytes of a stage: some 40 µs of PCIe 4 x16 by its rating; not measured.
STAGE_BYTES: Final = 1 << 20
_N_STAGES: Final = 2


class Event(Protocol):
    """Something queued on a stream."""

    def synchronize(self) -> None:
        """Return when it has happened."""


class Memory(Protocol):
    """Bytes on a device. Copies are queued and happen in order; their host side is `pinned`."""

    def pinned(self, n_bytes: int) -> Bytes:
        """Host memory the device can reach."""

    def up(self, at: int, data: Bytes) -> Event:
        """Queue a copy of pinned data to [at, at + len(data))."""

    def down(self, at: int, dest: Bytes) -> Event:
        """Queue a copy of [at, at + len(dest)) to pinned dest."""


class _Stage(NamedTuple):
    """A copy under way: `host` is the caller's memory, `event` says when `pinned` is done with."""

    event: Event
    pinned: Bytes
    host: Bytes


class HbmTier(Arena):
    """A device arena of budget_bytes. A slot's bytes are there when `write` has returned."""

    def __init__(self, budget_bytes: int, name: str = "hbm", memory: Memory | None = None) -> None:
        """`memory`: at least budget_bytes; None: of the current CUDA device.

        Raises MediumError when the device has not that much.
        """
        super().__init__(budget_bytes)
        self.name = name
        self._memory: Memory | None = CudaMemory(self.n_bytes) if memory is None else memory
        self._stages = threading.local()

    def write(self, slot: Slot, off: int, data: Bytes) -> None:
        under_way: deque[_Stage] = deque()
        try:
            for i, (at, host) in enumerate(_stages(slot, off, data)):
                if len(under_way) == _N_STAGES:
                    under_way.popleft().event.synchronize()
                pinned = self._pinned(i)[: len(host)]
                np.copyto(pinned, host)
                under_way.append(_Stage(self._there().up(at, pinned), pinned, host))
            for stage in under_way:
                stage.event.synchronize()
        except RuntimeError as err:  # what torch raises for whatever CUDA reports
            raise MediumError(f"{self.name}: a copy to the device failed: {err}") from None
        finally:
            _settle(stage.event for stage in under_way)

    def read_pieces(self, pieces: Pieces) -> None:
        """A stage at a time: its pieces are queued one behind the other and awaited together."""
        under_way: deque[tuple[Event, Bytes, Pieces]] = deque()
        try:
            for i, some in enumerate(pieces.cut(STAGE_BYTES)):
                if len(under_way) == _N_STAGES:
                    self._put(*under_way.popleft())
                pinned = self._pinned(i, some.n_bytes)[: some.n_bytes]
                under_way.append((self._down(some, pinned), pinned, some))
            while under_way:
                self._put(*under_way.popleft())
        except RuntimeError as err:
            raise ReadFailed("io", f"{self.name}: a copy from the device failed: {err}") from None
        finally:
            _settle(event for event, _, _ in under_way)

    def close(self) -> None:
        """See Cache. Copies still wanted fail."""
        self._memory = None

    def _there(self) -> Memory:
        if self._memory is None:
            raise RuntimeError("the tier is closed")
        return self._memory

    def _down(self, pieces: Pieces, pinned: Bytes) -> Event:
        """Queue a copy of each run of neighbours; the last one's event, which is all of theirs."""
        size, apart = pieces.piece_bytes, np.diff(pieces.starts) != pieces.piece_bytes
        ends = [*(np.flatnonzero(apart) + 1).tolist(), len(pieces.starts)]
        first = 0
        for end in ends:
            place = pinned[first * size : end * size]
            event = self._there().down(int(pieces.starts[first]), place)
            first = end
        return event

    def _put(self, event: Event, pinned: Bytes, pieces: Pieces) -> None:
        """Pieces that have come, to their places; what lies there is verified, and with it the
        parts of a piece that go nowhere."""
        event.synchronize()
        dest, of, to = pieces.places()
        parts = pinned.reshape(-1, dest.shape[1])
        dest[to] = parts[of]
        there = dest[to]
        if len(there) < len(parts):
            there, parts = parts.copy(), there
            there[of] = parts
        pieces.verify(there.reshape(-1), self.name)

    def _pinned(self, i: int, n_bytes: int = STAGE_BYTES) -> Bytes:
        """This thread's stages, in turn. A piece longer than they are makes them longer."""
        stages: list[Bytes] = getattr(self._stages, "of_thread", [])
        if not stages or len(stages[i % _N_STAGES]) < n_bytes:
            longer = max(n_bytes, STAGE_BYTES)
            stages = [self._there().pinned(longer) for _ in range(_N_STAGES)]
            self._stages.of_thread = stages
        return stages[i % _N_STAGES]


def _settle(events: Iterable[Event]) -> None:
    """Wait for copies nobody takes any more: their stages are this thread's next ones."""
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

    with warnings.catch_warnings(record=True) as said:  # of a driver too old for it, say
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable:
        return ""
    why = " ".join(str(said[0].message).split()) if said else "install a build for CUDA"
    return f"torch {torch.__version__} cannot use the device: {why}"


class CudaMemory:
    """One allocation on the current CUDA device, with a stream for each direction."""

    def __init__(self, n_bytes: int) -> None:
        """Raises MediumError when the device has not that much."""
        import torch

        self._torch: Any = torch
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            # Under inference mode it would be writable only there, and threads of ours never are.
            with torch.inference_mode(False):
                self._arena = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            free = torch.cuda.mem_get_info(device)[0]
            raise MediumError(
                f"hbm: {n_bytes:,} bytes asked of {device}, which has {free:,} free: "
                "lower hbm_bytes"
            ) from None
        torch.cuda.synchronize(device)  # whoever had this memory before may still be using it
        self._up: Any = self._torch.cuda.Stream(device)
        self._down: Any = self._torch.cuda.Stream(device)

    def pinned(self, n_bytes: int) -> Bytes:
        # The array keeps the tensor, and so the page lock, alive.
        memory: Bytes = self._torch.empty(
            n_bytes, dtype=self._torch.uint8, device="cpu", pin_memory=True
        ).numpy()
        return memory

    def up(self, at: int, data: Bytes) -> Event:
        there = self._arena[at : at + len(data)]
        return self._queue(self._up, there, self._torch.from_numpy(data))

    def down(self, at: int, dest: Bytes) -> Event:
        there = self._arena[at : at + len(dest)]
        return self._queue(self._down, self._torch.from_numpy(dest), there)

    def _queue(self, stream: Any, to: Any, of: Any) -> Event:
        with self._torch.cuda.stream(stream):
            to.copy_(of, non_blocking=True)
            event: Event = stream.record_event()
        return event
