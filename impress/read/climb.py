"""Chunks that a layer's read brought whole climb one tier, in the background.

    buffers a layer was read into ─chunks that were used→ entries of the cache above

Bytes that the caller saw there are copied out of its reach and compared with their sums: what it
wrote to them stays out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from impress.cache.chunks import ChunkCache, Ids, Ranks
from impress.cache.levels import levels_of
from impress.read.load import Load
from impress.read.parts import Mask, Part, used_chunks
from impress.read.placement import Brought, whole_at
from impress.read.plan import runs_of
from impress.read.reading import Reading
from impress.read.tickets import nothing
from impress.read.worth import ranks_if_used
from tiers.base import Read, verify
from tiers.errors import MediumError
from tiers.iopool import Lane
from tiers.slots import Buffer, release_all
from tiers.ticket import Ticket

log = logging.getLogger("impress")

#: Bytes of buffers that one request keeps from being reused until it has all its rows.
MOST_HELD: Final = 64 << 20


class Climbs:
    """What one session brought, on its way up. It starts once the request has its rows, so that
    copies and reads do not share the processor; what lies in the caller's memory starts at once."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.leaving: list[Ticket] = []  # those that climb from the caller's memory
        self._gate = Ticket(1)  # the others begin when it is done
        self._lock = threading.Lock()
        self._held_bytes = 0  # of buffers that wait for the gate

    def add(self, load: Load) -> None:
        """Have a load climb, if anything of it does."""

        def note(ticket: Ticket) -> None:  # before it is queued: it may read the caller's memory
            if load.outs is not None:
                self.leaving.append(ticket)
            self.tickets.append(ticket)

        if climb(load, note, None if load.outs is not None else self._gate):
            self._held_bytes += sum(len(buffer.array) for buffer in load.buffers)
            if self._held_bytes > MOST_HELD:
                self.begin()

    def begin(self) -> None:
        """Let those that wait begin. From any thread."""
        with self._lock:
            if not self._gate.done:  # first: what waits for a lost gate would wait for ever
                self._gate.run(nothing)
            self._gate = Ticket(1)
        self._held_bytes = 0


def climb(load: Load, told: Callable[[Ticket], object], after: Ticket | None = None) -> bool:
    """Queue, behind everything else, copies one tier up of the used chunks that were read whole.

    They begin only when `after` is done. False if nothing climbs. Costs the caller only the
    queueing: the task itself finds out what to do. `told`: called with the ticket, before queueing.
    """
    brought = load.brought()
    levels = levels_above(brought)
    if not levels or all((by_part >= 0).all() for by_part in load.entries[0]):
        return False
    if not any(len(load.pieces(i)) for i in range(len(load.planes))):
        return False  # all was copied from memory to its place: there is no buffer to copy from
    n_bytes = sum(len(buffer.array) for buffer in load.buffers)
    noted: list[Ticket] = []
    held: list[Buffer] = []
    taken: list[int] = []

    def give_back() -> None:
        load.reading.waiting.give(taken)
        release_all(held)

    def note(ticket: Ticket) -> None:
        for buffer in load.buffers:
            buffer.retain()
            held.append(buffer)
        ticket.then(give_back)
        noted.append(ticket)
        told(ticket)

    tasks = [partial(_climb, load, brought, levels)]
    try:
        if load.reading.crowded or not load.reading.waiting.take(n_bytes, taken):
            load.reading.counters.add("promotions_skipped")
            return False
        load.reading.pool.submit(Lane.PROMOTE, tasks, after, note)
        return True
    except BaseException:
        if not noted:
            try:
                give_back()
            except BaseException:  # Ctrl-C: nobody calls it again
                give_back()
                raise
        raise


def levels_above(brought: Brought) -> list[ChunkCache]:
    """Caches that a load's chunks may climb into, fastest first; a copy has all planes."""
    levels = [cache for cache in brought.caches if cache.capacity]
    return levels if levels and brought.planes == levels[0].planes else []


def _climb(load: Load, brought: Brought, levels: Sequence[ChunkCache]) -> None:
    try:
        for i, part in enumerate(load.parts):
            if load.reading.pool.closing:
                break
            places = places_of(brought, i)
            at = levels_of([by_part[i] for by_part in load.entries])
            ready = ready_of(part, places) & (at > load.caches.index(levels[0]))
            if not ready.any():
                continue
            ranks = _ranks(load, part, ready) if levels[0].by_rank else None
            for upper, lower in zip(levels, [*levels[1:], None], strict=True):
                level = len(load.caches) if lower is None else load.caches.index(lower)
                for first, count in runs_of(ready & (at == level)):
                    where = [place[first : first + count] for place in places]
                    worth = None if ranks is None else ranks[first : first + count]
                    _copy_up(load, part, first, where, worth, upper, lower)
    except Exception:  # nobody waits for it, and the cache may forget
        log.exception("a promotion failed")
    finally:
        load.reading.forget_gone(part.span for part in load.parts)


def _ranks(load: Load, part: Part, ready: Mask) -> Ranks:
    """[part.count]: ranks of its chunks that are ready, as they will be after this use of them.

    For all at once: it is work on the whole span, however few are asked for.
    """
    ranks, used = np.zeros(part.count), part.first + np.flatnonzero(ready)
    ranks[ready] = ranks_if_used(load.reading, part.source, load.layer, used)
    return ranks


def places_of(brought: Brought, i: int) -> list[Ids]:
    """By plane: where in its dest each chunk of part i begins, -1 where it was not read whole."""
    part = brought.parts[i]
    return [
        whole_at(runs[i], shape, part.count)
        for runs, shape in zip(brought.runs, brought.shapes, strict=True)
    ]


def ready_of(part: Part, places: Sequence[Ids]) -> Mask:
    """[part.count]: chunks that were used, and read whole."""
    ready = used_chunks(part)
    for at in places:
        ready &= at >= 0
    return ready


def _copy_up(
    load: Load, part: Part, first: int, places: list[Ids], ranks: Ranks | None,
    cache: ChunkCache, below: ChunkCache | None,
) -> None:  # fmt: skip
    """Chunks from `first` of a part on; `places`: by plane, where in its dest each begins; `ranks`:
    what each is worth."""
    wanted = part.first + first + np.arange(len(places[0]))
    n_windows = part.source.held.record.n_windows
    noted: list[Ids] = []  # this may run on the thread that signals come to
    try:
        granted, entries = cache.admit(part.span, n_windows, load.layer, wanted, ranks, noted)
        if not len(granted):
            return
        _copy(load, part, granted, [where[granted - wanted[0]] for where in places], cache, entries)
        if below is not None:
            below.drop_windows(part.span, load.layer, granted)
        publish(load.reading, cache, entries)
    except BaseException as err:
        try:
            _abandon(cache, noted)
        except BaseException:  # Ctrl-C, maybe the first
            _abandon(cache, noted)
            raise
        if not isinstance(err, MediumError):
            raise
        # For example, the caller wrote to what it was given, and should not have.
        load.reading.counters.add("promotions_failed")


def _abandon(cache: ChunkCache, noted: list[Ids]) -> None:
    for entries in noted:
        cache.abandon(entries)


def _copy(
    load: Load, part: Part, which: Ids, places: list[Ids], cache: ChunkCache, entries: Ids
) -> None:
    """Copy these chunks into their entries; `places`: by plane, where in its dest each begins. Each
    is compared in a buffer that the caller cannot reach. Raises ReadFailed.

    All rows of a layer are shown to the caller where they were read into, and chosen ones have
    waited for their turn. The bytes compared have to be those that are copied and whose sum is
    kept: between one look at the caller's memory and the next, the caller may write there.
    """
    own = load.reading.rent(max(shape.chunk_bytes for shape in load.shapes))
    try:
        for i, (plane, shape) in enumerate(zip(load.planes, load.shapes, strict=True)):
            mine, dest = own.array[: shape.chunk_bytes], load.pieces(i)
            sums = part.source.sums_of(load.layer, plane, which)
            for entry, at, of_pieces in zip(
                entries.tolist(), places[i].tolist(), sums, strict=True
            ):
                np.copyto(mine, dest[at : at + shape.chunk_bytes])
                read = Read(part.source.slot, 0, mine, of_pieces, shape.piece_bytes)
                verify(read, lambda *_: "memory a caller saw")
                cache.fill(entry, plane, mine, of_pieces)
    finally:
        own.release()


def publish(reading: Reading, cache: ChunkCache, entries: Ids) -> None:
    """These copies are whole and correct: from now on they are found, and are counted."""
    cache.publish(entries)
    reading.counters.add(f"promoted_bytes/{cache.tier.name}", len(entries) * cache.chunk_bytes)
    reading.counters.add(f"promotions/{cache.tier.name}", len(entries))
