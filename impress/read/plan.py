"""Which reads bring a layer's rows to where they are wanted. Pure: data in, data out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from impress.cache.chunks import ChunkCache, Ids
from impress.cache.levels import levels_of
from impress.read.copying import ChunksOf, Copies, PiecesOf
from impress.read.parts import Mask, Part, Positions, used_chunks
from tiers.base import Bytes, Read


class Run(NamedTuple):
    """Pieces [first, first + n_pieces) of a part's plane, and the piece of dest they begin at."""

    first: int
    n_pieces: int
    to: int


class Runs(NamedTuple):
    """Runs of a part's plane, ascending, as columns: a scattered choice makes thousands."""

    firsts: Positions
    counts: Positions  # of pieces
    tos: Positions

    @classmethod
    def of(cls, wanted: Mask, moves: Positions | int) -> Runs:
        """Each run of True in `wanted`; a piece goes `moves` ([pieces], or one) further on."""
        edges = np.flatnonzero(np.diff(wanted, prepend=False, append=False))
        firsts, ends = edges[::2], edges[1::2]
        by = moves if isinstance(moves, int) else moves[firsts]
        return cls(firsts, ends - firsts, firsts + by)

    def each(self) -> Iterator[Run]:
        """One by one."""
        return map(Run, self.firsts.tolist(), self.counts.tolist(), self.tos.tolist())


_NONE: Final = Runs(*[np.empty(0, dtype=np.int64)] * 3)


@dataclass(slots=True)
class ReadPlan:
    """One layer's reads: from home, from copies by tier; and what they cost."""

    home: list[tuple[Part, list[Read]]]
    copies: Copies

    @property
    def n_bytes(self) -> dict[str, int]:
        """Bytes moved, by medium, padding and gaps included."""
        home = sum(len(read.dest) for _, reads in self.home for read in reads)
        copies = {
            tier: sum(pieces.n_bytes for _, pieces in by_part)
            for tier, by_part in self.copies.items()
        }
        return {**copies, "ssd": home}


def whole(parts: Sequence[Part], plane: int) -> list[Runs]:
    """Runs of the chunks that hold wanted rows, in lease order: for most parts one run, of all."""
    n = parts[0].source.layout.planes[plane].pieces
    return [_whole(part, n) for part in parts]


def _whole(part: Part, n: int) -> Runs:
    if part.is_whole or (used := used_chunks(part)).all():
        return _all(part.count * n, part.to * n)
    return Runs.of(np.repeat(used, n), part.to * n)


@lru_cache(256)  # every layer of a prefix asks for the same
def _all(count: int, to: int) -> Runs:
    """One run of `count` pieces; nobody writes to it."""
    return Runs(*np.array([[0], [count], [to]]))


def rows_of_whole(parts: Sequence[Part]) -> Positions | None:
    """Where each wanted row lies in a dest of all chunks; None when it holds just those, in order.

    Pure.
    """
    if all(part.ordinals is None for part in parts):
        return None
    window = parts[0].source.held.record.window
    rows = [
        part.to * window
        + (np.arange(part.count * window) if part.ordinals is None else part.ordinals)
        for part in parts
    ]
    return np.concatenate(rows)


class Gather(NamedTuple):
    """Wanted rows of a plane: the runs that hold them, and where each row lands in dest."""

    runs: list[Runs]  # for each part
    n_pieces: int  # of dest
    rows: Positions | None  # for each wanted position, its row in dest; None: all, as they lie
    read: list[Runs]  # of the pieces of `runs`, those to be read
    taken: list[Runs]  # and those that were read ahead


def gather(
    parts: Sequence[Part], plane: int, gap_bytes: int, ahead: Sequence[Mask] | None = None
) -> Gather:
    """Runs of pieces that hold the wanted rows of these parts, in the order they lie in.

    Gaps of at most gap_bytes are read through: a request saved is worth that many bytes.
    `ahead`: for each part, the pieces of its chunks that were read ahead. They are taken, except
    those in a gap that is read through.
    """
    shape = parts[0].source.layout.planes[plane]
    gap = gap_bytes // shape.piece_bytes
    bits = shape.piece_rows.bit_length() - 1  # a power of two
    runs: list[Runs] = []
    read: list[Runs] = []
    taken: list[Runs] = []
    places: list[Positions] = []
    n_pieces = 0
    for i, part in enumerate(parts):
        ordinals = _some(part)
        pieces = ordinals >> bits if bits else ordinals
        wanted = np.zeros(part.count * shape.pieces, dtype=bool)
        wanted[pieces] = True
        if ahead is None:
            found = _merged(wanted.nonzero()[0], gap, n_pieces)
        else:
            reads, takes = _divided(wanted, ahead[i], gap)
            found = _merged((reads | takes).nonzero()[0], 0, n_pieces)
        runs.append(found)
        moves = _moves(found, len(wanted), bits)
        places.append(ordinals + moves.take(pieces))
        n_pieces = int(found.tos[-1] + found.counts[-1]) if len(found.tos) else n_pieces
        if ahead is not None:
            read.append(Runs.of(reads, moves >> bits))
            taken.append(Runs.of(takes, moves >> bits))
    rows = places[0] if len(places) == 1 else np.concatenate(places)
    if ahead is None:
        return Gather(runs, n_pieces, rows, runs, [_NONE] * len(runs))
    return Gather(runs, n_pieces, rows, read, taken)


def _some(part: Part) -> Positions:
    """Where its wanted rows lie, which are not all as they lie."""
    assert part.ordinals is not None, "all rows of chunks are no chosen rows"
    return part.ordinals


def _moves(runs: Runs, n: int, bits: int) -> Positions:
    """[n]: how far on each piece in `runs` goes, in rows (1 << bits to a piece); for other pieces
    anything."""
    if not len(runs.firsts):
        return np.zeros(n, dtype=np.int64)
    by = runs.tos - runs.firsts
    if bits:
        by <<= bits
    along = np.empty_like(by)  # each piece up to the next run goes with the run before it
    along[:-1] = runs.firsts[1:]
    along[-1] = n
    along[1:] -= runs.firsts[1:]
    return by.repeat(along)


def gather_whole(
    parts: Sequence[Part], plane: int, gap_bytes: int, ahead: Sequence[Mask] | None = None
) -> Gather:
    """The wanted rows of these parts, and all chunks that hold some; see `gather`."""
    shape = parts[0].source.layout.planes[plane]
    gap = gap_bytes // shape.piece_bytes
    runs, rows = whole(parts, plane), rows_of_whole(parts)
    n_pieces = sum(part.count for part in parts) * shape.pieces
    if ahead is None:
        return Gather(runs, n_pieces, rows, runs, [_NONE] * len(runs))
    read, taken = [], []
    for part, there in zip(parts, ahead, strict=True):
        to = part.to * shape.pieces
        wanted = np.repeat(used_chunks(part), shape.pieces)
        reads, takes = _divided(wanted, there, gap)
        read.append(Runs.of(reads, to))
        taken.append(Runs.of(takes, to))
    return Gather(runs, n_pieces, rows, read, taken)


def gather_chunks(
    chunks: Sequence[Positions], parts: Sequence[Part], plane: int, _gap_bytes: int = 0,
    _ahead: Sequence[Mask] | None = None,
) -> Gather:  # fmt: skip
    """Some chunks of each part, whole, one after the other: their rows as they lie. Pure."""
    n = parts[0].source.layout.planes[plane].pieces
    runs: list[Runs] = []
    to = 0
    for wanted in chunks:
        firsts, counts, tos = _merged(wanted, 0, to)
        runs.append(Runs(firsts * n, counts * n, tos * n))
        to += len(wanted)
    return Gather(runs, to * n, None, runs, [_NONE] * len(runs))


def _divided(wanted: Mask, ahead: Mask, gap: int) -> tuple[Mask, Mask]:
    """Pieces to be read, gaps read through, and pieces that were read ahead and need not be."""
    read = np.zeros(len(wanted) + 1, dtype=np.int8)
    found = _merged(np.flatnonzero(wanted & ~ahead), gap, 0)
    read[found.firsts] = 1
    read[found.firsts + found.counts] -= 1
    reads = np.cumsum(read[:-1]).astype(bool)
    return reads, wanted & ahead & ~reads


def _merged(pieces: Positions, gap: int, to: int) -> Runs:
    """Ascending pieces as runs that go one after the other, from `to` on."""
    if not len(pieces):
        return _NONE
    begins = np.empty(len(pieces) + 1, dtype=bool)  # and, one further on, ends
    begins[0] = begins[-1] = True
    np.greater(pieces[1:] - pieces[:-1], gap + 1, out=begins[1:-1])
    firsts = pieces[begins[:-1]]
    counts = pieces[begins[1:]] - firsts
    counts += 1
    tos = counts.cumsum()
    tos -= counts
    if to:
        tos += to
    return Runs(firsts, counts, tos)


def plan_reads(
    parts: Sequence[Part],
    layer: int,
    planes: Sequence[int],
    runs: Sequence[Sequence[Runs]],
    cached: Sequence[Sequence[Ids]],
    caches: Sequence[ChunkCache],
    dests: Sequence[Bytes],
) -> ReadPlan:
    """Reads of `runs[plane][part]` into `dests[plane]`.

    `cached[cache][part]` holds pinned entries, -1 where that cache has no copy; a window is in
    at most one. Windows side by side at home become one read per plane; the medium merges further.
    """
    plan = ReadPlan([], {cache.tier.name: [] for cache in caches})
    for i, part in enumerate(parts):
        entries = [by_part[i] for by_part in cached]
        is_cached = any((ids >= 0).any() for ids in entries)
        home: list[Read] = []
        known: Runs | None = None  # planes with the same pieces share theirs
        for plane, plane_runs, dest in zip(planes, runs, dests, strict=True):
            if not is_cached:
                home += home_reads(part, layer, plane, plane_runs[i], dest)
                continue
            if plane_runs[i] is not known:
                known, n = plane_runs[i], part.source.layout.planes[plane].pieces
                at_home, copied, kind = _apart(known, part.count, n, entries)
            home += home_reads(part, layer, plane, at_home, dest)
            for (some, to), cache, ids in zip(copied, caches, entries, strict=True):
                if len(some):
                    found = kind(part, layer, plane, some, to, cache, ids, dest)
                    plan.copies[cache.tier.name].append((part, found))
        if home:
            plan.home.append((part, home))
    return plan


def _apart(
    runs: Runs, n_chunks: int, n: int, cached: Sequence[Ids]
) -> tuple[Runs, list[tuple[Positions, Positions]], type[ChunksOf | PiecesOf]]:
    """Runs of chunks of n pieces divided by who has them: home's, and for each cache the chunks or
    pieces that it has, and where they go."""
    if len(runs.firsts) == 1 and runs.counts[0] == n_chunks * n and runs.tos[0] % n == 0:  # all
        of_chunk, to = levels_of(cached), runs.tos[0]
        firsts, counts, _ = Runs.of(of_chunk == len(cached), 0)
        chunks = [(of_chunk == level).nonzero()[0] for level in range(len(cached))]
        copied = [(some, some + to // n) for some in chunks]
        return Runs(firsts * n, counts * n, firsts * n + to), copied, ChunksOf
    cut, levels = _cut(runs, n, cached)
    copied = [
        _each(Runs(*(column[levels == level] for column in cut))) for level in range(len(cached))
    ]
    return Runs(*(column[levels < 0] for column in cut)), copied, PiecesOf


def _cut(runs: Runs, pieces: int, cached: Sequence[Ids]) -> tuple[Runs, Positions]:
    """Runs cut where their bytes lie apart, and for each the cache that has it, -1: home.

    Cut at both ends of every cached chunk (of `pieces`): each has a place of its own.
    """
    at = np.full(len(cached[0]), -1, dtype=np.int64)
    for level, entries in enumerate(cached):
        at[entries >= 0] = level
    inner = (at[1:] >= 0) | (at[:-1] >= 0)
    edges = (np.flatnonzero(inner) + 1) * pieces
    own = np.searchsorted(runs.firsts, edges, side="right") - 1  # the run an edge may lie in
    edges, own = edges[own >= 0], own[own >= 0]
    ends = runs.firsts + runs.counts
    edges = edges[(edges > runs.firsts[own]) & (edges < ends[own])]
    firsts = np.sort(np.concatenate((runs.firsts, edges)))
    own = np.searchsorted(runs.firsts, firsts, side="right") - 1
    counts = np.minimum(np.append(firsts[1:], np.iinfo(np.int64).max), ends[own]) - firsts
    return Runs(firsts, counts, runs.tos[own] + firsts - runs.firsts[own]), at[firsts // pieces]


def home_reads(part: Part, layer: int, plane: int, runs: Runs, dest: Bytes) -> list[Read]:
    """Runs of pieces from home, to where they go in dest."""
    layout, sums, slot = part.source.layout, part.source.sums, part.source.slot
    size = layout.planes[plane].piece_bytes
    offs = layout.chunk_off(layer, plane, part.first) + runs.firsts * size
    at = layout.sums_at(layer, plane, part.first) + runs.firsts
    columns = (offs, runs.tos * size, (runs.tos + runs.counts) * size, at, at + runs.counts)
    return [
        Read(slot, off, dest[to:to_end], sums[first:end], size)
        for off, to, to_end, first, end in zip(*map(np.ndarray.tolist, columns), strict=True)
    ]


def _each(runs: Runs) -> tuple[Positions, Positions]:
    """The pieces of runs one by one, and where they go."""
    before = np.repeat(np.cumsum(runs.counts) - runs.counts, runs.counts)
    along = np.arange(runs.counts.sum()) - before
    return np.repeat(runs.firsts, runs.counts) + along, np.repeat(runs.tos, runs.counts) + along


def runs_of(wanted: Mask) -> list[tuple[int, int]]:
    """(first, count) of each run of True. Pure."""
    runs = Runs.of(wanted, 0)
    return list(zip(runs.firsts.tolist(), runs.counts.tolist(), strict=True))


def rows_by_tier(
    parts: Sequence[Part], cached: Sequence[Sequence[Ids]], caches: Sequence[ChunkCache]
) -> dict[str, int]:
    """How many of the wanted rows come from each cache, and how many from home. Pure."""
    window = parts[0].source.held.record.window
    chunks = [None if p.is_whole else _some(p) // window for p in parts]
    n_rows = sum(p.count * window if p.is_whole else len(_some(p)) for p in parts)
    rows = {}
    for cache, entries in zip(caches, cached, strict=True):
        n = 0
        for ids, which in zip(entries, chunks, strict=True):
            copies = ids >= 0
            n += int(copies.sum()) * window if which is None else int(copies[which].sum())
        rows[cache.tier.name] = n
    rows["ssd"] = n_rows - sum(rows.values())
    return rows
