"""What follows a read, behind its back: history learns, and what was used climbs one tier.

layer read ─climb→ chunks that were read whole: copied from the buffers they were read into
session closed ─after→ learn: notes → History
                       judge: copies' worth, in every cache
                       fetch: chunks used but read in part: read from below, in the background
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np

from impress.chunks import ChunkCache, Ids, Ranks
from impress.history import Note
from impress.layout import K, V
from impress.load import Load, Reading
from impress.placement import levels_of, used_chunks, whole_at
from impress.plan import Part, Source, plan_reads, runs_of, whole
from tiers.base import Bytes, Tier
from tiers.errors import MediumError
from tiers.iopool import Lane, Ticket

log = logging.getLogger("impress")

#: Promotions queued beyond this are skipped: the cache may forget.
MOST_PROMOTIONS: Final = 1024
#: Bytes that one background read brings at most, unless a chunk is larger: a demand may be waiting
#: for its thread.
MOST_FETCH: Final = 2 << 20


@dataclass(frozen=True, slots=True)
class Looked:
    """One layer of one request: which rows of the lease it used, int64 ascending; None: all.

    `decided`: an identifier chose them by the request's own query. `climbed`: by source, chunks
    of its span that `climb` has seen to.
    """

    layer: int
    positions: Ids | None
    decided: bool
    climbed: Sequence[Ids]


# ---- a layer has been read ---------------------------------------------------------------------


def climb(load: Load) -> tuple[Ticket | None, list[Ids]]:
    """Copy the used chunks that were read whole one tier up, behind everything else.

    (The ticket, None if nothing goes; by source, the chunks this has seen to, though it may have
    judged that they are not worth their room.)
    """
    levels = [cache for cache in load.caches if cache.capacity]
    if not levels or load.planes != levels[0].planes:
        return None, [np.empty(0, dtype=np.int64) for _ in load.parts]
    tasks, seen = [], []
    for i, part in enumerate(load.parts):
        places = [
            whole_at(runs[i], shape, part.count)
            for runs, shape in zip(load.runs, load.shapes, strict=True)
        ]
        ready = used_chunks(part) & np.all([at >= 0 for at in places], axis=0)
        seen.append(part.first + np.flatnonzero(ready))
        at = levels_of([by_part[i] for by_part in load.entries])
        for upper, lower in pairwise([*levels, None]):
            assert upper is not None
            level = len(load.caches) if lower is None else load.caches.index(lower)
            for first, count in runs_of(ready & (at == level)):
                copy = partial(
                    _copy_up, load, part, first, [p[first : first + count] for p in places]
                )
                tasks.append(partial(copy, upper, lower))
    return _submitted(load, tasks), seen


def _submitted(load: Load, tasks: Sequence[partial[None]]) -> Ticket | None:
    """The tasks queued, the load's buffers kept for them; None when there are none, or too many."""
    if not tasks:
        return None
    if load.reading.pool.depth()[Lane.PROMOTE] > MOST_PROMOTIONS:
        load.reading.counters.add("promotions_skipped")
        return None
    for buffer in load.buffers:
        buffer.retain()
    ticket = load.reading.pool.submit(Lane.PROMOTE, tasks)
    for buffer in load.buffers:
        ticket.then(buffer.release)
    return ticket


def _copy_up(
    load: Load, part: Part, first: int, places: list[Ids], cache: ChunkCache,
    below: ChunkCache | None,
) -> None:  # fmt: skip
    """Chunks from `first` of a part on; `places`: by plane, where in its dest each begins."""
    wanted = part.first + first + np.arange(len(places[0]))
    ranks = None
    if cache.by_rank:
        ranks = _ranks_if_used(load.reading, part.source, load.layer, wanted)[wanted]
    n_windows = part.source.held.record.n_windows
    granted, entries = cache.admit(part.span, n_windows, load.layer, wanted, ranks)
    at = [where[granted - wanted[0]] for where in places]
    _fill(load.reading, cache, entries, load.planes, [load.pieces(i) for i in range(len(at))], at)
    if below is not None:
        below.drop_windows(part.span, load.layer, granted)
    cache.publish(entries)


def _fill(
    reading: Reading, cache: ChunkCache, entries: Ids, planes: Sequence[int],
    dests: Sequence[Bytes], places: Sequence[Ids],
) -> None:  # fmt: skip
    """Copy chunks into their entries; by plane, from the bytes of a dest that begin at `places`."""
    for plane, dest, at in zip(planes, dests, places, strict=True):
        n = cache.plane_bytes(plane)
        for entry, off in zip(entries.tolist(), at.tolist(), strict=True):
            cache.fill(entry, plane, dest[off : off + n])
    reading.counters.add(f"promoted_bytes/{cache.tier.name}", len(entries) * cache.chunk_bytes)
    reading.counters.add(f"promotions/{cache.tier.name}", len(entries))


# ---- a session has been closed -----------------------------------------------------------------


def after(reading: Reading, sources: Sequence[Source], looked: Sequence[Looked]) -> None:
    """Learn from a request, judge the copies by it, fetch what it used and had read in part."""
    try:
        learn(reading, sources, looked)
        for one in looked:
            for source in sources:
                judge(reading, source, one.layer)
        fetch(reading, sources, looked)
    except Exception:  # nobody waits for it, and the cache may forget
        log.exception("what follows a request failed")


def learn(reading: Reading, sources: Sequence[Source], looked: Sequence[Looked]) -> None:
    """Give history one request's notes, and ask for a save when enough have come together."""
    reading.history.request(note for one in looked for note in notes_of(sources, one))
    if reading.history.due:
        reading.save_history()


def notes_of(sources: Sequence[Source], looked: Looked) -> Iterator[Note]:
    """A layer's notes, one a span. Pure."""
    for source in sources:
        held, window = source.held, source.held.record.window
        rows = _rows_of(source, looked.positions)
        yield Note(
            source.span, held.record.n_windows * window, looked.layer, held.first * window,
            held.count * window, rows if looked.decided else None,
            source.ordinals(looked.layer, rows),
        )  # fmt: skip


def judge(reading: Reading, source: Source, layer: int) -> None:
    """Tell every cache what the chunks of a layer are worth now."""
    worth = reading.history.worth(source.span, layer, _ordinals(source, layer))
    if worth is not None:
        for cache in reading.copies.chunks:
            cache.judge(source.span, layer, worth.ranks, worth.shares)


def fetch(reading: Reading, sources: Sequence[Source], looked: Sequence[Looked]) -> None:
    """Queue reads of the chunks that were used, were not read whole, and deserve a faster tier."""
    levels = [cache for cache in reading.copies.chunks if cache.capacity]
    if not levels:
        return
    if reading.pool.depth()[Lane.PROMOTE] > MOST_PROMOTIONS:
        reading.counters.add("promotions_skipped")
        return
    wanted: list[list[_Wanted]] = [[] for _ in levels]  # by where they are to go
    for one in looked:
        for source, climbed in zip(sources, one.climbed, strict=True):
            for to, some in zip(
                wanted, _wanted(reading, source, one, climbed, levels), strict=True
            ):
                if len(some.chunks):
                    to.append(some)
    tasks = []
    for level, cache in enumerate(levels):
        below = levels[level + 1] if level + 1 < len(levels) else None
        most = max(1, MOST_FETCH // cache.chunk_bytes)
        for some in _affordable(wanted[level], cache):
            for first, count in _runs(some.chunks, most):
                ranks = some.ranks[first : first + count]
                chunks = some.chunks[first : first + count]
                tasks.append(partial(_fetch, reading, some, chunks, ranks, cache, below))
    if tasks:
        reading.pool.submit(Lane.PROMOTE, tasks)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Chunks of one span's layer, ascending, that should climb, and what they are worth."""

    source: Source
    layer: int
    chunks: Ids
    ranks: Ranks


def _wanted(
    reading: Reading, source: Source, looked: Looked, climbed: Ids, levels: Sequence[ChunkCache]
) -> list[_Wanted]:
    """For each level, the used chunks that lie just below it."""
    window, n_windows = source.held.record.window, source.held.record.n_windows
    used = np.zeros(n_windows, dtype=bool)
    rows = _rows_of(source, looked.positions)
    used[source.ordinals(looked.layer, rows) // window] = True
    used[climbed] = False
    chunks = np.flatnonzero(used)
    ranks = np.zeros(n_windows)
    if levels[0].by_rank and len(chunks):
        worth = reading.history.worth(source.span, looked.layer, _ordinals(source, looked.layer))
        ranks = np.full(n_windows, -np.inf) if worth is None else worth.ranks
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
    """Neighbouring chunks into `cache`, from the one below or from home.

    Nothing pins them at home by now: where the space has been given to others their sums do not
    match, and they stay where they are.
    """
    source, layer = some.source, some.layer
    n_windows = source.held.record.n_windows
    granted, entries = cache.admit(source.span, n_windows, layer, chunks, ranks)
    if not len(granted):
        return
    sizes = [cache.plane_bytes(plane) for plane in (K, V)]
    buffers = [reading.buffers.acquire(n * len(granted)) for n in sizes]
    dests = [buffer.array for buffer in buffers if buffer is not None]
    try:
        _read(reading, source, layer, granted, below, dests)
        places = [np.arange(len(granted)) * n for n in sizes]
        _fill(reading, cache, entries, (K, V), dests, places)
        if below is not None:
            below.drop_windows(source.span, layer, granted)
        cache.publish(entries)
    except MediumError:  # the next request to want it will find out
        cache.abandon(entries)
        reading.counters.add("promotions_failed")
    finally:
        for buffer in buffers:
            if buffer is not None:
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
    pinned = [[cache.pin(p.span, layer, p.first, p.count) for p in parts] for cache in caches]
    media: dict[str, Tier] = {cache.tier.name: cache.tier for cache in caches}
    try:
        runs = [whole(parts, plane) for plane in (K, V)]
        plan = plan_reads(parts, layer, (K, V), runs, pinned, caches, dests)
        for medium, by_part in plan.reads.items():
            for _, reads in by_part:
                media.get(medium, reading.ssd).read(reads)
        for medium, n in plan.n_bytes.items():
            reading.counters.add(f"promotion_read_bytes/{medium}", n)
    finally:
        for cache, entries in zip(caches, pinned, strict=True):
            for ids in entries:
                cache.unpin(ids)


# ---- parts -------------------------------------------------------------------------------------


def _rows_of(source: Source, positions: Ids | None) -> Ids:
    """Rows of the span, in position order, that stand at these positions of the lease."""
    window, held = source.held.record.window, source.held
    if positions is None:
        return np.arange(held.first * window, (held.first + held.count) * window, dtype=np.int64)
    cuts = np.searchsorted(positions, (source.at * window, (source.at + held.count) * window))
    return positions[cuts[0] : cuts[1]] + (held.first - source.at) * window


def _ordinals(source: Source, layer: int) -> Ids | None:
    """Where every row of the span lies; None: in position order."""
    if source.order is None:
        return None
    record = source.held.record
    return source.ordinals(layer, np.arange(record.n_windows * record.window))


def _ranks_if_used(reading: Reading, source: Source, layer: int, used: Ids) -> Ranks:
    """[chunks of the span]: their ranks once this request's use of `used` will have been noted."""
    n_chunks = source.held.record.n_windows
    return reading.history.ranks_if_used(
        source.span, layer, n_chunks, used, _ordinals(source, layer)
    )
