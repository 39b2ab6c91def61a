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

from impress.cache.chunks import ChunkCache, Ids, Ranks
from impress.read.load import Load
from impress.read.parts import Part, Source
from impress.read.placement import Mask, chunks_by_tier, levels_of, used_chunks, whole_at
from impress.read.plan import plan_reads, runs_of, whole
from impress.read.reading import Reading
from impress.read.worth import judge, ranks_if_used
from impress.spans.layout import K, V
from impress.usage.history import Note, Worth
from tiers.base import Bytes
from tiers.errors import MediumError
from tiers.iopool import Lane, Ticket
from tiers.slots import Buffer

log = logging.getLogger("impress")

#: Promotions queued beyond this are skipped: the cache may forget.
MOST_PROMOTIONS: Final = 1024
#: Bytes that one background read brings at most, unless a chunk is larger: a demand may be waiting
#: for its thread.
MOST_FETCH: Final = 2 << 20


@dataclass(frozen=True, slots=True)
class Looked:
    """One layer of one request: which rows of the lease it used, int64 ascending; None: all.

    `decided`: an identifier chose them by the request's own query. `load`: what brought them.
    """

    positions: Ids | None
    decided: bool
    load: Load

    @property
    def layer(self) -> int:
        return self.load.layer


# ---- a layer has been read ---------------------------------------------------------------------


def climb(load: Load, after: Ticket | None = None) -> Ticket | None:
    """Copy the used chunks that were read whole one tier up, behind everything else.

    Not before `after` is done. None if nothing goes. Costs the caller only the queueing: what to
    do is found out there.
    """
    levels = _levels(load)
    if not levels or all((by_part >= 0).all() for by_part in load.entries[0]):
        return None
    n_bytes = sum(len(buffer.array) for buffer in load.buffers)
    full = load.reading.pool.depth()[Lane.PROMOTE] > MOST_PROMOTIONS
    if full or not load.reading.waiting.take(n_bytes):
        load.reading.counters.add("promotions_skipped")
        return None
    for buffer in load.buffers:
        buffer.retain()
    ticket = load.reading.pool.submit(Lane.PROMOTE, [partial(_climb, load, levels)], after)
    for buffer in load.buffers:
        ticket.then(buffer.release)
    ticket.then(partial(load.reading.waiting.give, n_bytes))
    return ticket


def _levels(load: Load) -> list[ChunkCache]:
    """Caches that a load's chunks may climb into, fastest first; a copy has all planes."""
    levels = [cache for cache in load.caches if cache.capacity]
    return levels if levels and load.planes == levels[0].planes else []


def _climb(load: Load, levels: Sequence[ChunkCache]) -> None:
    try:
        for i, part in enumerate(load.parts):
            places = _places(load, i)
            ready = _ready(part, places)
            at = levels_of([by_part[i] for by_part in load.entries])
            for upper, lower in zip(levels, [*levels[1:], None], strict=True):
                level = len(load.caches) if lower is None else load.caches.index(lower)
                for first, count in runs_of(ready & (at == level)):
                    where = [place[first : first + count] for place in places]
                    _copy_up(load, part, first, where, upper, lower)
    except Exception:  # nobody waits for it, and the cache may forget
        log.exception("a promotion failed")


def _places(load: Load, i: int) -> list[Ids]:
    """By plane: where in its dest each chunk of part i begins, -1 where it was not read whole."""
    part = load.parts[i]
    return [
        whole_at(runs[i], shape, part.count)
        for runs, shape in zip(load.runs, load.shapes, strict=True)
    ]


def _ready(part: Part, places: Sequence[Ids]) -> Mask:
    """[part.count]: chunks that were used, and read whole."""
    ready = used_chunks(part)
    for at in places:
        ready &= at >= 0
    return ready


def _copy_up(
    load: Load, part: Part, first: int, places: list[Ids], cache: ChunkCache,
    below: ChunkCache | None,
) -> None:  # fmt: skip
    """Chunks from `first` of a part on; `places`: by plane, where in its dest each begins."""
    wanted = part.first + first + np.arange(len(places[0]))
    ranks = None
    if cache.by_rank:
        ranks = ranks_if_used(load.reading, part.source, load.layer, wanted)
    n_windows = part.source.held.record.n_windows
    granted, entries = cache.admit(part.span, n_windows, load.layer, wanted, ranks)
    try:
        at = [where[granted - wanted[0]] for where in places]
        dests = [load.pieces(i) for i in range(len(at))]
        _fill(load.reading, cache, entries, load.planes, dests, at)
    except BaseException:
        cache.abandon(entries)
        raise
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
        count(reading, looked)
        learn(reading, sources, looked)
        worths = [_judged(reading, sources, one) for one in looked]
        fetch(reading, sources, looked, worths)
    except Exception:  # nobody waits for it, and the cache may forget
        log.exception("what follows a request failed")


def count(reading: Reading, looked: Sequence[Looked]) -> None:
    """Where the rows were that a request wanted, and the chunks they lie in."""
    found: dict[str, int] = {}
    for one in looked:
        load = one.load
        chunks = chunks_by_tier(load.parts, load.entries, load.caches)
        for kind, by_tier in (("rows", load.rows_by_tier), ("chunks", chunks)):
            for tier, n in by_tier.items():
                name = f"{kind}_from/{tier}"
                found[name] = found.get(name, 0) + n
    for name, n in found.items():
        reading.counters.add(name, n)


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


def _judged(reading: Reading, sources: Sequence[Source], looked: Looked) -> list[Worth | None]:
    """What each source's chunks of a layer are worth now; the caches are told."""
    used = [part.first + np.flatnonzero(used_chunks(part)) for part in looked.load.parts]
    return [
        judge(reading, source, looked.layer, chunks)
        for source, chunks in zip(sources, used, strict=True)
    ]


def fetch(
    reading: Reading, sources: Sequence[Source], looked: Sequence[Looked],
    worths: Sequence[Sequence[Worth | None]],
) -> None:  # fmt: skip
    """Queue reads of the chunks that were used, were not read whole, and deserve a faster tier."""
    levels = [cache for cache in reading.copies.chunks if cache.capacity]
    if not levels:
        return
    if reading.pool.depth()[Lane.PROMOTE] > MOST_PROMOTIONS:
        reading.counters.add("promotions_skipped")
        return
    wanted: list[list[_Wanted]] = [[] for _ in levels]  # by where they are to go
    for one, by_source in zip(looked, worths, strict=True):
        for i, (source, worth) in enumerate(zip(sources, by_source, strict=True)):
            found = _wanted(source, one, i, worth, levels)
            for to, some in zip(wanted, found, strict=True):
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
    source: Source, looked: Looked, i: int, worth: Worth | None, levels: Sequence[ChunkCache]
) -> list[_Wanted]:
    """For each level, the used chunks of source i that lie just below it and did not climb."""
    load, part = looked.load, looked.load.parts[i]
    used = used_chunks(part)
    if _levels(load):
        used &= ~_ready(part, _places(load, i))
    chunks = part.first + np.flatnonzero(used)
    ranks = np.zeros(source.held.record.n_windows)
    if worth is not None and levels[0].by_rank:
        ranks = worth.ranks
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
    buffers: list[Buffer] = []
    try:
        sizes = [cache.plane_bytes(plane) for plane in (K, V)]
        for n in sizes:
            buffers.append(reading.rent(n * len(granted)))
        dests = [buffer.array for buffer in buffers]
        _read(reading, source, layer, granted, below, dests)
        places = [np.arange(len(granted)) * n for n in sizes]
        _fill(reading, cache, entries, (K, V), dests, places)
    except BaseException as err:
        cache.abandon(entries)
        if not isinstance(err, MediumError):
            raise
        reading.counters.add("promotions_failed")  # the next request to want it will find out
    else:
        if below is not None:
            below.drop_windows(source.span, layer, granted)
        cache.publish(entries)
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
    pinned = [[cache.pin(p.span, layer, p.first, p.count) for p in parts] for cache in caches]
    try:
        runs = [whole(parts, plane) for plane in (K, V)]
        plan = plan_reads(parts, layer, (K, V), runs, pinned, caches, dests)
        for _, reads in plan.home:
            reading.ssd.read(reads)
        for cache in caches:
            for _, pieces in plan.copies[cache.tier.name]:
                cache.tier.read_pieces(pieces)
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
