"""KV rows of requests in contiguous virtual buffers: reserved for the longest, backed as they grow.

    attach ── reserve 2N ranges
    rent   ── neighbouring idle slots, memory behind the prompt's rows ──> RowsCache writes there
    reach  ── rows to come: memory is there (no lock) │ a stall: back it now │ no: copy to the pool
      └─ few rows left ──> thread: back the next page, before it is needed
    release── slots idle, memory stays for the next request; thread: beyond keep_bytes it goes

One lock guards the slots; it is held while memory for one growth is added, never across I/O.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any, Final, TypeGuard

import torch

from impress.engines.virtual import Sizes, Slot, Usage, Use, Virtual, choose, device_of, reclaim
from impress.errors import BadInput, Unsupported
from impress.types import Geometry
from tiers.errors import MediumError
from tiers.ranges import HostRanges, Range, RangeRefused, Ranges
from tiers.ranges_cuda import CudaRanges
from tiers.threads import Worker

log = logging.getLogger("impress")

#: With fewer rows left than this the next page is asked for: a few steps of decoding, each of
#: which takes longer than backing a page.
AHEAD_ROWS: Final = 16


class Rental:
    """Slots of one request. `reach` is for its own thread; `release` for any.

    One no longer referenced but never released (a signal's exception came between) is over.
    """

    def __init__(self, buffers: VirtualBuffers, slots: range, n_most: int, number: int) -> None:
        self.slots = slots
        self.number = number  # of the slots' renter
        self.n_most = n_most
        self.room = 0  # rows backed by memory in every slot; written under the buffers' lock
        self.is_left = False  # it could not grow: its request has moved to ordinary memory
        self.untouched: Callable[[], bool] = lambda: True
        """Whether nothing but its request writes here; a stuck read may do so even after it."""
        self._buffers = buffers
        self._planes = buffers.planes  # what it rented stays its own, even after `close`
        self._asked = -1  # the room at which more was last asked for
        self.is_over = False

    @property
    def device(self) -> torch.device:
        return self._buffers.device

    def planes(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's rows, k and v [batch, context, n_kv_heads, head_dim]; `reach` before use."""
        k, v = self._planes[layer]
        return k[self.slots.start : self.slots.stop], v[self.slots.start : self.slots.stop]

    def reach(self, n_rows: int) -> bool:
        """Whether the first n_rows rows have memory now. Waits only where it must be added."""
        if n_rows > self.room and (self.is_left or not self._buffers.grow(self, n_rows)):
            self.is_left = True
            return False
        room = self.room
        if n_rows + AHEAD_ROWS > room and room < self.n_most and self._asked != room:
            self._asked = room
            self._buffers.ask(self)
        return True

    def release(self) -> None:
        """Nobody looks at the rows any more; slots are rented again once untouched. Idempotent."""
        self._buffers.take_back(self)

    def __del__(self) -> None:
        if not getattr(self, "is_over", True):  # no lock: the collector may run while it is held
            self._buffers.lost.append(self)


class VirtualBuffers:
    """2N buffers of an engine. Where the machine refuses them, `rent` says so and gives nothing.

    Views of the buffers keep their addresses reserved, even after `close`.
    """

    def __init__(self, geometry: Geometry, settings: Virtual, context: int, ranges: Ranges) -> None:
        """context: tokens per slot. Effects: reserves addresses, no memory."""
        self.sizes = Sizes.of(geometry, settings.batch, context, ranges.page_bytes)
        self.device = torch.device(ranges.device)
        self.said = "virtual"
        """Where the latest request's rows were, and why if that is not here."""
        self.planes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._settings = settings
        self._ranges = ranges
        self.areas: list[tuple[Range, Range]] = []  # K's and V's, by layer
        self._touched: list[Rental] = []  # over, but a stuck read may still write there
        self.lost: deque[Rental] = deque()  # never released, and nobody can any more
        self._uses = 0  # a clock for last_use
        self._n_rentals = 0
        self._lock = threading.Lock()
        self._counts = Usage(0, 0, 0)
        self._asked: queue.SimpleQueue[Rental | threading.Event | None] = queue.SimpleQueue()
        self._thread: Worker | None = None
        self._refused = self._reserve(geometry)
        # Only for buffers that exist: a batch that was refused may be of more than memory holds.
        self._slots = [] if self._refused else [Slot() for _ in range(settings.batch)]

    def _reserve(self, geometry: Geometry) -> str:
        """Why they were refused, "" when all 2N are there."""
        sizes, areas = self.sizes, self.areas
        try:
            for _ in range(sizes.n_layers):
                k, v = (self._ranges.reserve(n_bytes) for n_bytes in sizes.buffer_bytes)
                areas.append((k, v))
            dims = geometry.head_dim, geometry.v_dim
            for pair in areas:
                planes = [
                    self._tensor(area, geometry, dim, slot_bytes)
                    for area, dim, slot_bytes in zip(pair, dims, sizes.slot_bytes, strict=True)
                ]
                self.planes.append((planes[0], planes[1]))
            return ""
        except RangeRefused as err:
            why = (
                f"{sizes.total_bytes:,} bytes of addresses ({sizes.n_buffers} × {err.n_bytes:,}) "
                f"were refused: {err.limit}"
            )
        except MediumError as err:  # a device that has no page free to make a tensor by
            why = str(err)
        self.planes.clear()
        areas.clear()
        log.warning("virtual KV buffers: %s; rows are kept in ordinary memory", why)
        return why

    @torch.inference_mode(False)  # else only requests in that mode could write there
    def _tensor(self, area: Range, geometry: Geometry, dim: int, slot_bytes: int) -> torch.Tensor:
        """A buffer as [batch, context, n_kv_heads, dim]."""
        dtype: torch.dtype = getattr(torch, geometry.dtype)
        if self.device.type == "cpu":
            flat = torch.from_numpy(area.memory)
        else:  # torch asks the driver whose the first address is: a page has to be there
            self._ranges.back(area, 0, self.sizes.page_bytes)
            flat = torch.as_tensor(area.memory, device=self.device)
            self._ranges.unback(area, 0, self.sizes.page_bytes)
        heads = geometry.n_kv_heads
        shape = (self.sizes.batch, self.sizes.context, heads, dim)
        strides = (slot_bytes // dtype.itemsize, heads * dim, dim, 1)
        return flat.view(dtype).as_strided(shape, strides)

    # ---- renting ---------------------------------------------------------------------------

    def rent(self, batch: int, n_rows: int, n_most: int) -> Rental | None:
        """Slots for `batch` prompts, the first n_rows rows backed; None: `said` says why.

        n_most: rows they will have at most, as far as is known.
        """
        if n_rows > self.sizes.context:
            self.decline(self._refused or f"{n_rows} tokens, {self.sizes.context} are reserved")
            return None
        with self._lock:
            self._regain()
            first = None if self._refused else choose(self._slots, batch, n_rows)
            if first is not None:
                slots = range(first, first + batch)
                self._n_rentals += 1
                rental = Rental(self, slots, min(n_most, self.sizes.context), self._n_rentals)
                reused = all(self._slots[i].n_rows for i in slots)
                for i in slots:
                    self._slots[i].renter, self._slots[i].use = rental.number, Use.RENTED
                rental.room = min(self._slots[i].n_rows for i in slots)
        if first is None:
            n, so = self.sizes.batch, "taken" if batch <= self.sizes.batch else "too many"
            self.decline(self._refused or f"{batch} neighbouring slots of {n} are {so}")
            return None
        self.said = "virtual"
        if n_rows > rental.room and not self.grow(rental, n_rows, stalls=False):
            rental.release()
            return None
        with self._lock:
            self._count(n_rented=1, n_reused=int(reused))
        return rental

    def grow(self, rental: Rental, n_rows: int, *, stalls: bool = True) -> bool:
        """Put memory behind n_rows rows of a rental, now; False: `said` says why."""
        begin = perf_counter()
        with self._lock:
            why = self._grow(rental, n_rows) if n_rows > rental.room else ""
            if stalls and not why:
                self._count(n_stalls=1, stall_s=perf_counter() - begin)
        if why:
            self.decline(why)
        return not why

    def _grow(self, rental: Rental, n_rows: int) -> str:
        """Under the lock. Why there is no memory, "" when it is there."""
        sizes, slots, budget = self.sizes, self._slots, self._settings.budget_bytes
        if self._refused or rental.is_over:
            return self._refused or "the request is over"
        if n_rows > sizes.context:
            return f"{n_rows} tokens, {sizes.context} are reserved"
        wanted = sizes.held_bytes(n_rows)
        need = sum(max(0, wanted - sizes.held_bytes(slots[i].n_rows)) for i in rental.slots)
        over = 0 if budget is None else self._held() + need - budget
        if over > 0:
            self._regain()
            if over > self._idle():  # what is kept for other requests would go for nothing
                return f"budget_bytes is {budget:,}"
            self._reclaim(over, rental.slots)
        try:
            for i in rental.slots:
                if n_rows > slots[i].n_rows:
                    self._back(i, n_rows)
        except MediumError as err:
            return str(err)
        finally:
            rental.room = min(slots[i].n_rows for i in rental.slots)
        return ""

    def _back(self, i: int, n_rows: int) -> None:
        """Put memory behind n_rows rows of slot i in all buffers; on any error none is added."""
        old, new = self.sizes.backed(self._slots[i].n_rows), self.sizes.backed(n_rows)
        done: list[tuple[Range, int, int]] = []
        try:
            for pair in self.areas:
                for area, slot, off, end in zip(pair, self.sizes.slot_bytes, old, new, strict=True):
                    if end > off:
                        self._ranges.back(area, i * slot + off, end - off)
                        done.append((area, i * slot + off, end - off))
        except BaseException:
            for area, off, n_bytes in done:
                self._ranges.unback(area, off, n_bytes)
            raise
        self._slots[i].n_rows = self.sizes.room(n_rows)

    def take_back(self, rental: Rental) -> None:
        """A rental is over."""
        with self._lock:
            self._end(rental)
            self._regain()
            too_much = self._idle() + self._ranges.kept_bytes > self._settings.keep_bytes
        if too_much:
            self.ask(rental)

    def _end(self, rental: Rental) -> None:
        """Under the lock. Idempotent; once it is among the touched, Ctrl-C may come anywhere."""
        if rental.is_over:
            return
        rental.is_over = True
        self._touched.append(rental)
        self._uses += 1
        for slot in self._of(rental):
            slot.use, slot.last_use = Use.TOUCHED, self._uses

    def _regain(self) -> None:
        """Under the lock: slots at which no read is stuck any more become idle."""
        while self.lost:
            self._end(self.lost[0])
            self.lost.popleft()
        for rental in [rental for rental in self._touched if rental.untouched()]:
            for slot in self._of(rental):
                slot.use = Use.IDLE
            self._touched.remove(rental)

    def _of(self, rental: Rental) -> list[Slot]:
        """Its slots, as far as they are its own: it may have been cut off before it took them."""
        slots = (self._slots[i] for i in rental.slots)
        return [slot for slot in slots if slot.renter == rental.number]

    def decline(self, why: str) -> None:
        """Note that a request's rows are, or have moved, elsewhere."""
        self.said = f"pooled: {why}"
        with self._lock:
            self._count(n_fallbacks=1)

    # ---- memory ahead of need, and back --------------------------------------------------------

    def ask(self, rental: Rental) -> None:
        """Have the thread see to a rental: its next page, or, where it is over, idle memory."""
        if not _begun(self._thread):
            with self._lock:
                if self._refused:
                    return
                if not _begun(self._thread):
                    self._thread = Worker(self._run, "impress-rows")
                    try:
                        self._thread.start()
                    except MediumError as err:  # requests then back their own pages
                        log.warning("no memory is added ahead of need: %s", err)
                        return
        self._asked.put(rental)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            if isinstance(asked, threading.Event):
                asked.set()
            elif asked.is_over:
                with self._lock:
                    self._reclaim(self._idle() - self._settings.keep_bytes, range(0))
            else:
                self._grow_ahead(asked)
            del asked  # else a lost rental stays referenced here until the next

    def _grow_ahead(self, rental: Rental) -> None:
        """Back a rental's next page, and fill it. The rental may end meanwhile."""
        with self._lock:
            before = rental.room
            if before >= self.sizes.context or self._grow(rental, before + 1):
                return  # the request will hear of it if it comes to need it
            self._count(n_ahead=1)
            after, areas = rental.room, list(self.areas)
        old, new = self.sizes.backed(before), self.sizes.backed(after)
        for pair in areas:
            for area, slot, off, end in zip(pair, self.sizes.slot_bytes, old, new, strict=True):
                for i in rental.slots if end > off else ():
                    self._ranges.fill(area, i * slot + off, end - off)

    def _reclaim(self, n_bytes: int, spared: range) -> None:
        """Under the lock: take memory from idle slots, at least n_bytes if there is that much."""
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)  # what was queued may still read it
        for i in reclaim(self._slots, self.sizes, n_bytes, spared):
            ends = self.sizes.backed(self._slots[i].n_rows)
            self._slots[i].n_rows = 0  # first: if cut off, it never has less memory than this
            for pair in self.areas:
                for area, slot, end in zip(pair, self.sizes.slot_bytes, ends, strict=True):
                    self._ranges.unback(area, i * slot, end)
        self._ranges.trim(max(0, self._settings.keep_bytes - self._idle()))

    def _held(self) -> int:
        return sum(self.sizes.held_bytes(slot.n_rows) for slot in self._slots)

    def _idle(self) -> int:
        idle = (slot for slot in self._slots if slot.use is Use.IDLE)
        return sum(self.sizes.held_bytes(slot.n_rows) for slot in idle)

    def _count(self, **more: Any) -> None:
        """Add to the counts, under the lock."""
        now = {name: getattr(self._counts, name) + value for name, value in more.items()}
        self._counts = replace(self._counts, **now)

    def usage(self) -> Usage:
        reserved = 0 if self._refused else self.sizes.total_bytes
        with self._lock:
            held, idle = (n + self._ranges.kept_bytes for n in (self._held(), self._idle()))
            return replace(self._counts, reserved_bytes=reserved, held_bytes=held, idle_bytes=idle)

    def settle(self) -> None:
        """Wait until the thread has seen to everything asked so far."""
        if _begun(self._thread):
            done = threading.Event()
            self._asked.put(done)
            done.wait()

    def close(self) -> None:
        """End the thread and let the buffers go. Idempotent.

        Remaining rentals keep the memory they have, and fall back when they need more.
        """
        with self._lock:  # no growth goes on meanwhile, and none begins any more
            self._refused = "the engine is closed"
            self.planes, self.areas = [], []
        if _begun(self._thread):
            self._asked.put(None)
            self._thread.ended(-1)
            self._thread = None  # last: if cut off, a second call waits for it
        with self._lock:
            self._ranges.trim(0)


def _begun(thread: Worker | None) -> TypeGuard[Worker]:
    return thread is not None and thread.begun


def buffers_of(model: Any, geometry: Geometry, settings: Virtual) -> VirtualBuffers:
    """Virtual buffers on the model's device. Raises Unsupported or BadInput, saying why."""
    if not isinstance(settings, Virtual):
        raise BadInput(f"virtual: want Virtual(batch=...), got {type(settings).__name__}")
    context = settings.context or getattr(model.config, "max_position_embeddings", None)
    if context is None:
        raise BadInput("virtual buffers: say context, since the model names no longest prompt")
    device = device_of(model)
    ranges: Ranges = HostRanges(settings.page_bytes)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # so that torch has made the context
        try:
            ranges = CudaRanges(device.index or 0, settings.page_bytes)
        except MediumError as err:
            raise Unsupported(str(err)) from None
    elif device.type != "cpu":
        raise Unsupported(f"virtual buffers: on cpu and cuda only, the model is on {device.type}")
    return VirtualBuffers(geometry, settings, context, ranges)
