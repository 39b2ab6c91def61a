"""What follows a request, in the background: history learns, and what was used climbs one tier.

layer read ─climb→ chunks that were read whole (climb.py)
session closed ─count→ counters
session closed ─after→ learn: notes → History
                       judge: copies' worth, in every cache
                       fetch: chunks used but read in part: read from below, in the background
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Final, Literal

import numpy as np

from impress.cache.chunks import ChunkCache, Ids, Ranks
from impress.read.climb import levels_above, places_of, publish, ready_of
from impress.read.parts import Part, Source, used_chunks
from impress.read.placement import Brought, counts_of
from impress.read.plan import plan_reads, whole
from impress.read.reading import MOST_PROMOTIONS, Reading
from impress.read.tickets import nothing, when_all
from impress.read.worth import judge
from impress.spans.layout import K, V
from impress.usage.notes import Note, Worth
from tiers.base import Bytes
from tiers.errors import MediumError
from tiers.iopool import Lane
from tiers.slots import Buffer
from tiers.ticket import Task, Ticket

log = logging.getLogger("impress")

#: Which rows a request was to have: of each layer some, as chosen there; or all, and so will those
#: to come; or all "once": they will choose again.
Need = Literal["some", "all", "once"]

#: Bytes that one background read brings at most, unless a chunk is larger: a demand read may be
#: waiting for its thread.
MOST_FETCH: Final = 2 << 20
#: At most this many such reads follow one request. What else it used climbs with its next use: with
#: thousands of reads, nothing would be learnt from the requests right after it.
MOST_FETCHES: Final = MOST_PROMOTIONS // 2


@dataclass(frozen=True, slots=True)
class Looked:
    """One layer of one request: which rows of the lease it used, int64 ascending; None: all.

    `decided`: an identifier chose them by the request's own query. `brought`: what was read,
    without the bytes: this waits until nothing else is left to do.
    """

    positions: Ids | None
    decided: bool
    brought: Brought

    @property
    def layer(self) -> int:
        return self.brought.layer


def hand_over(
    reading: Reading, sources: Sequence[Source], looked: Sequence[Looked], need: Need,
    copies: Sequence[Ticket],
) -> None:  # fmt: skip
    """Count what a request used, and queue what is to be learnt from it after its copies: these are
    judged as if this use were noted, so it must not be yet."""
    for name, n in counts_of(one.brought for one in looked).items():
        reading.counters.add(name, n)  # here: what follows may be skipped
    tasks: list[Task] = [partial(after, reading, sources, looked, need)]
    taken = list[int]()
    over = partial(reading.lessons.give, taken)
    try:
        if reading.lessons.take(bytes_of(looked), taken):
            when_all(list(copies), partial(_queue, reading, tasks, over))
        else:
            reading.counters.add("lessons_skipped")
    except BaseException:  # Ctrl-C: perhaps nobody else calls it
        over()
        raise


def bytes_of(looked: Sequence[Looked]) -> int:
    """Bytes of what these keep, but for their objects. Pure."""
    arrays = [array for one in looked for array in one.brought.arrays()]
    arrays += [one.positions for one in looked if one.positions is not None]
    return sum({id(array): array.nbytes for array in arrays}.values())


def pass_by(reading: Reading, sources: Sequence[Source]) -> None:
    """A request asked for a prefix that was not read: recomputing seemed cheaper. It counts as a
    use: else a prefix that lies in no cache would never be worth a place in one."""
    _queue(reading, [partial(_passed_by, reading, sources)])


def _passed_by(reading: Reading, sources: Sequence[Source]) -> None:
    with _behind(reading, sources):
        every = [(source, _rows_of(source, None)) for source in sources]
        layers = range(reading.geometry.n_layers)
        reading.history.request(
            _note(source, layer, rows, whole=False) for layer in layers for source, rows in every
        )
        for layer in layers:
            for source, rows in every:
                window = source.held.record.window
                judge(reading, source, layer, np.unique(source.ordinals(layer, rows) // window))
        _save(reading)


@contextmanager
def _behind(reading: Reading, sources: Sequence[Source]) -> Iterator[None]:
    """Around what follows a request: what is known of spans that are gone by then is forgotten."""
    try:
        yield
    except Exception:  # nobody waits for it, and the cache may forget
        log.exception("what follows a request failed")
    finally:
        reading.forget_gone(source.span for source in sources)


def _save(reading: Reading) -> None:
    """Save history, where it is due. Not before chunks are judged: a span is saved with its
    score."""
    if reading.history.due:
        reading.save_history()


def _queue(reading: Reading, tasks: list[Task], over: Callable[[], object] = nothing) -> None:
    """Queue them behind requests; where too much waits there already, they are skipped. What is
    queued is taken out of `tasks`, so that it is learnt only once. Then `over` is called."""

    def note(ticket: Ticket) -> None:
        ticket.then(over)
        tasks.clear()

    if not tasks:
        return
    if reading.crowded:
        reading.counters.add("lessons_skipped")
    elif reading.pool.closing:  # its copies were the last that the store did
        tasks.pop()()
    else:
        try:
            reading.pool.submit(Lane.PROMOTE, tasks, note=note)
            return
        except BaseException:  # perhaps nobody else calls it
            over()
            raise
    over()


def after(
    reading: Reading, sources: Sequence[Source], looked: Sequence[Looked], need: Need
) -> None:
    """Learn from a request, judge the copies by it, fetch what it used but read only in part."""
    with _behind(reading, sources):
        learn(reading, sources, looked, need)
        worths = [_judged(reading, sources, one) for one in looked]
        _save(reading)
        if not reading.pool.closing:
            fetch(reading, sources, looked, worths)


def learn(
    reading: Reading, sources: Sequence[Source], looked: Sequence[Looked], need: Need
) -> None:
    """Give history one request's notes."""
    once = by_layer(looked)
    if need == "all" and len(once) < reading.geometry.n_layers:  # it was cut off
        need = "some"
    reading.history.request(note for one in once for note in notes_of(sources, one, need))


def by_layer(looked: Sequence[Looked]) -> list[Looked]:
    """One for each layer: a layer retrieved more than once counts as one use, of the rows of every
    time. Pure."""
    found: dict[int, Looked] = {}
    for one in looked:
        before = found.get(one.layer)
        found[one.layer] = one if before is None else _joined(before, one)
    return list(found.values())


def notes_of(sources: Sequence[Source], looked: Looked, need: Need) -> Iterator[Note]:
    """A layer's notes, one for each span. Pure."""
    for source in sources:
        rows = _rows_of(source, looked.positions)
        yield _note(
            source, looked.layer, rows, looked.decided,
            whole=looked.positions is None and need != "once", every_layer=need == "all",
        )  # fmt: skip


def _note(
    source: Source, layer: int, rows: Ids, decided: bool = False, *, whole: bool,
    every_layer: bool = False,
) -> Note:  # fmt: skip
    """`rows`: those used, numbered within the span. The rest as in Looked and Note."""
    held, window = source.held, source.held.record.window
    return Note(
        source.span, held.record.n_windows * window, layer, held.first * window,
        held.count * window, rows if decided else None, source.ordinals(layer, rows), whole,
        every_layer,
    )  # fmt: skip


def _judged(reading: Reading, sources: Sequence[Source], looked: Looked) -> list[Worth]:
    """What each source's chunks of a layer are worth now; the caches are told."""
    used = [part.first + np.flatnonzero(used_chunks(part)) for part in looked.brought.parts]
    return [
        judge(reading, source, looked.layer, chunks)
        for source, chunks in zip(sources, used, strict=True)
    ]


def fetch(
    reading: Reading, sources: Sequence[Source], looked: Sequence[Looked],
    worths: Sequence[Sequence[Worth]],
) -> None:  # fmt: skip
    """Queue reads of the chunks that were used, were not read whole, and deserve a faster tier."""
    levels = [cache for cache in reading.copies.chunks if cache.capacity]
    if not levels:
        return
    if reading.crowded:
        reading.counters.add("promotions_skipped")
        return
    wanted: list[list[_Wanted]] = [[] for _ in levels]  # by the level they are to go to
    for one, by_source in zip(looked, worths, strict=True):
        for i, (source, worth) in enumerate(zip(sources, by_source, strict=True)):
            found = _wanted(source, one, i, worth, levels)
            for to, some in zip(wanted, found, strict=True):
                if len(some.chunks):
                    to.append(some)
    tasks, highest = [], list[float]()
    for level, cache in enumerate(levels):
        below = levels[level + 1] if level + 1 < len(levels) else None
        most = max(1, MOST_FETCH // cache.chunk_bytes)
        for some in _affordable(wanted[level], cache):
            for first, count in _runs(some.chunks, most):
                ranks = some.ranks[first : first + count]
                chunks = some.chunks[first : first + count]
                tasks.append(partial(_fetch, reading, some, chunks, ranks, cache, below))
                highest.append(float(ranks.max()))
    best = np.argsort(-np.array(highest), kind="stable")[:MOST_FETCHES]
    if tasks:
        reading.pool.submit(Lane.PROMOTE, [tasks[i] for i in np.sort(best).tolist()])


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Chunks of one span's layer, ascending, that should climb, and what they are worth."""

    source: Source
    layer: int
    chunks: Ids
    ranks: Ranks


def _wanted(
    source: Source, looked: Looked, i: int, worth: Worth, levels: Sequence[ChunkCache]
) -> list[_Wanted]:
    """For each level, the used chunks of source i that lie just below it and did not climb."""
    part = looked.brought.parts[i]
    used = used_chunks(part)
    if levels_above(looked.brought):
        used &= ~ready_of(part, places_of(looked.brought, i))
    chunks = part.first + np.flatnonzero(used)
    ranks = worth.ranks if levels[0].by_rank else np.zeros(source.held.record.n_windows)
    there = [cache.has(source.span, looked.layer, chunks) for cache in levels]
    found = []
    for level in range(len(levels)):
        above = np.any(there[: level + 1], axis=0)
        below = there[level + 1] if level + 1 < len(levels) else np.ones(len(chunks), dtype=bool)
        mine = chunks[~above & below]
        found.append(_Wanted(source, looked.layer, mine, ranks[mine]))
    return found


def _affordable(wanted: Sequence[_Wanted], cache: ChunkCache) -> list[_Wanted]:
    """Of everything wanted, as much as the cache would take now: the highest ranks."""
    if not wanted:
        return []
    ranks = np.concatenate([some.ranks for some in wanted])
    best = np.argsort(-ranks, kind="stable")
    kept = np.zeros(len(ranks), dtype=bool)
    kept[best[: cache.room(ranks[best])]] = True
    parts = np.split(kept, np.cumsum([len(some.chunks) for some in wanted])[:-1])
    return [
        _Wanted(some.source, some.layer, some.chunks[mine], some.ranks[mine])
        for some, mine in zip(wanted, parts, strict=True)
    ]


def _runs(chunks: Ids, most: int) -> Iterator[tuple[int, int]]:
    """(first, count) of runs of neighbours, of at most `most`."""
    cuts = np.flatnonzero(np.diff(chunks) > 1) + 1
    for begin, end in pairwise([0, *cuts.tolist(), len(chunks)]):
        for first in range(begin, end, most):
            yield first, min(most, end - first)


def _fetch(
    reading: Reading, some: _Wanted, chunks: Ids, ranks: Ranks, cache: ChunkCache,
    below: ChunkCache | None,
) -> None:  # fmt: skip
    """Copy neighbouring chunks into `cache`, from the one below or from home.

    Nothing pins them at home any more: where their space has been given to others, the sums do not
    match, and they stay where they are.
    """
    if reading.pool.closing:
        return
    source, layer = some.source, some.layer
    n_windows = source.held.record.n_windows
    granted, entries = cache.admit(source.span, n_windows, layer, chunks, ranks)
    if not len(granted):
        return
    buffers: list[Buffer] = []
    try:
        shapes = [source.layout.planes[plane] for plane in (K, V)]
        for shape in shapes:
            buffers.append(reading.rent(shape.chunk_bytes * len(granted)))
        dests = [buffer.array for buffer in buffers]
        _read(reading, source, layer, granted, below, dests)
        for plane, dest in zip((K, V), dests, strict=True):  # compared as it was read
            sums, data = source.sums_of(layer, plane, granted), dest.reshape(len(granted), -1)
            for entry, pieces, of_pieces in zip(entries.tolist(), data, sums, strict=True):
                cache.fill(entry, plane, pieces, of_pieces)
        if below is not None:
            below.drop_windows(source.span, layer, granted)
    except BaseException as err:
        cache.abandon(entries)
        if not isinstance(err, Exception):
            raise
        reading.counters.add("promotions_failed")  # the next request to want it will find out
        if not isinstance(err, MediumError | MemoryError):  # nobody waits for it
            log.exception("a copy to %s failed", cache.tier.name)
    else:
        publish(reading, cache, entries)
        reading.forget_gone([source.span])
    finally:
        for buffer in buffers:
            buffer.release()


def _read(
    reading: Reading, source: Source, layer: int, chunks: Ids, below: ChunkCache | None,
    dests: Sequence[Bytes],
) -> None:  # fmt: skip
    """K and V of whole chunks, ascending, one after the other into dests. Raises MediumError."""
    parts = [
        Part(source, int(chunks[first]), count, first, None)
        for first, count in _runs(chunks, len(chunks))
    ]
    caches = [] if below is None else [below]
    pinned: list[list[Ids]] = [[] for _ in caches]
    try:
        for cache, entries in zip(caches, pinned, strict=True):
            for p in parts:
                cache.pin(p.span, layer, p.first, p.count, noted=entries)
        runs = [whole(parts, plane) for plane in (K, V)]
        plan = plan_reads(parts, layer, (K, V), runs, pinned, caches, dests)
        for _, reads in plan.home:
            reading.ssd.read(reads)
        for cache in caches:
            for _, some in plan.copies[cache.tier.name]:
                cache.tier.read_pieces(some.found())
        for medium, n in plan.n_bytes.items():
            reading.counters.add(f"promotion_read_bytes/{medium}", n)
    finally:
        for cache, entries in zip(caches, pinned, strict=True):
            for ids in entries:
                cache.unpin(ids)


# ---- parts -------------------------------------------------------------------------------------


def _joined(one: Looked, other: Looked) -> Looked:
    rows = None
    if one.positions is not None and other.positions is not None:
        rows = np.union1d(one.positions, other.positions)
    return replace(other, positions=rows, decided=one.decided and other.decided)


def _rows_of(source: Source, positions: Ids | None) -> Ids:
    """Rows of the span, in position order, that are at these positions of the lease."""
    window, held = source.held.record.window, source.held
    if positions is None:
        return np.arange(held.first * window, (held.first + held.count) * window, dtype=np.int64)
    cuts = np.searchsorted(positions, (source.at * window, (source.at + held.count) * window))
    return positions[cuts[0] : cuts[1]] + (held.first - source.at) * window
