"""Which reads bring a layer's rows to where they are wanted. Pure: data in, data out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from impress.catalog import Held
from impress.chunks import ChunkCache, Ids
from impress.format import ProbeRecord
from impress.layout import PlaneLayout, SpanLayout
from tiers.base import Bytes, Read, Slot, Sums


@dataclass(frozen=True, slots=True)
class Source:
    """A held run of windows with what reading it takes. `at`: its first window on the lease."""

    held: Held
    layout: SpanLayout
    slot: Slot
    sums: Sums
    probes: tuple[ProbeRecord, ...]
    at: int

    @property
    def span(self) -> int:
        return self.held.record.span_id

    @property
    def count(self) -> int:
        """Windows held."""
        return self.held.count

    def ordinals(self, layer: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where rows of the span, counted in position order, lie in the order of its chunks."""
        del layer  # rows lie in position order
        return rows


@dataclass(frozen=True, slots=True)
class Run:
    """Pieces [first, first + count) of a source's plane, and the piece of dest they begin at."""

    first: int
    count: int
    to: int


@dataclass(frozen=True, slots=True)
class Missing:
    """Windows [first, first + count) of a source's held run, read whole from home."""

    source: Source
    first: int
    count: int


@dataclass(slots=True)
class ReadPlan:
    """One layer's reads by medium, and what they cost."""

    reads: dict[str, list[tuple[Source, list[Read]]]]
    missing: list[Missing] = field(default_factory=list)

    @property
    def n_bytes(self) -> dict[str, int]:
        """Bytes moved, by medium, padding and gaps included."""
        return {
            medium: sum(len(read.dest) for _, reads in by_source for read in reads)
            for medium, by_source in self.reads.items()
        }


def whole(sources: Sequence[Source], plane: int) -> list[list[Run]]:
    """Runs of all windows, in lease order: for each source, one."""
    shape = sources[0].layout.planes[plane]
    return [[Run(0, s.count * shape.pieces, s.at * shape.pieces)] for s in sources]


@dataclass(frozen=True, slots=True)
class Gather:
    """Chosen rows of a plane: the runs that hold them, and where each row lands in dest."""

    runs: list[list[Run]]  # for each source
    n_pieces: int  # of dest
    rows: npt.NDArray[np.int64]  # for each chosen position, its row in dest


def gather(
    sources: Sequence[Source], plane: int, positions: npt.NDArray[np.int64], gap_bytes: int
) -> Gather:
    """Runs of pieces that hold these positions (ascending, on the lease).

    Pieces closer than gap_bytes are read through: a request saved is worth that many bytes.
    """
    shape, window = sources[0].layout.planes[plane], sources[0].held.record.window
    gap = gap_bytes // shape.piece_bytes
    runs: list[list[Run]] = []
    places = np.empty(len(positions), dtype=np.int64)
    n_pieces = 0
    for source in sources:
        begin, end = (
            int(np.searchsorted(positions, at * window))
            for at in (source.at, source.at + source.count)
        )
        rows = positions[begin:end] - source.at * window
        pieces = rows // shape.piece_rows
        found, to = _merged(pieces, gap, n_pieces)
        runs.append(found)
        firsts = np.array([run.first for run in found], dtype=np.int64)
        which = np.searchsorted(firsts, pieces, side="right") - 1
        starts = np.array([run.to for run in found], dtype=np.int64)
        if len(rows):
            dest_piece = starts[which] + pieces - firsts[which]
            places[begin:end] = dest_piece * shape.piece_rows + rows % shape.piece_rows
        n_pieces = to
    return Gather(runs, n_pieces, places)


def _merged(pieces: npt.NDArray[np.int64], gap: int, to: int) -> tuple[list[Run], int]:
    """Ascending pieces (repeats allowed) as runs; the next free piece of dest."""
    if not len(pieces):
        return [], to
    cuts = np.flatnonzero(np.diff(pieces) > gap + 1)
    firsts = pieces[np.concatenate(([0], cuts + 1))]
    counts = pieces[np.concatenate((cuts, [len(pieces) - 1]))] - firsts + 1
    starts = to + np.concatenate(([0], np.cumsum(counts[:-1])))
    rows = zip(firsts.tolist(), counts.tolist(), starts.tolist(), strict=True)
    return [Run(*row) for row in rows], to + int(counts.sum())


def plan_reads(
    sources: Sequence[Source],
    layer: int,
    planes: Sequence[int],
    runs: Sequence[Sequence[Sequence[Run]]],
    cached: Sequence[Sequence[Ids]],
    caches: Sequence[ChunkCache],
    dests: Sequence[Bytes],
) -> ReadPlan:
    """Reads of `runs[plane][source]` into `dests[plane]`.

    `cached[cache][source]` holds pinned entries, -1 where that cache has no copy; a window is in
    at most one. Windows side by side at home become one read a plane; the medium merges further.
    """
    media = [*(cache.tier.name for cache in caches), "ssd"]
    plan = ReadPlan({medium: [] for medium in media})
    for i, source in enumerate(sources):
        levels = list(zip(caches, (entries[i] for entries in cached), strict=True))
        found: dict[str, list[Read]] = {medium: [] for medium in media}
        for plane, plane_runs, dest in zip(planes, runs, dests, strict=True):
            for run in plane_runs[i]:
                for medium, read in _split(source, layer, plane, run, levels, dest):
                    found[medium].append(read)
        for medium, reads in found.items():
            if reads:
                plan.reads[medium].append((source, reads))
        nowhere = ~there(source, [entries for _, entries in levels])
        plan.missing += [Missing(source, first, count) for first, count in runs_of(nowhere)]
    return plan


def _split(
    source: Source,
    layer: int,
    plane: int,
    run: Run,
    levels: Sequence[tuple[ChunkCache, Ids]],
    dest: Bytes,
) -> Iterator[tuple[str, Read]]:
    """One run as reads: each cached window from its copy, what lies between from home."""
    shape = source.layout.planes[plane]
    begin, end = run.first // shape.pieces, -(-(run.first + run.count) // shape.pieces)
    cached = there(source, [entries for _, entries in levels])[begin:end]
    for first, count in runs_of(~cached):
        lo = max(run.first, (begin + first) * shape.pieces)
        hi = min(run.first + run.count, (begin + first + count) * shape.pieces)
        window, piece = divmod(lo, shape.pieces)
        off = source.layout.chunk_off(layer, plane, source.held.first + window)
        place = (source.slot, off + piece * shape.piece_bytes)
        yield "ssd", _read(source, layer, plane, place, lo, hi, run, dest)
    for cache, entries in levels:
        for window in (begin + np.flatnonzero(entries[begin:end] >= 0)).tolist():
            lo = max(run.first, window * shape.pieces)
            hi = min(run.first + run.count, (window + 1) * shape.pieces)
            off = cache.plane_off(plane) + lo % shape.pieces * shape.piece_bytes
            place = (cache.slot(int(entries[window])), off)
            yield cache.tier.name, _read(source, layer, plane, place, lo, hi, run, dest)


def _read(
    source: Source, layer: int, plane: int, place: tuple[Slot, int], lo: int, hi: int, run: Run,
    dest: Bytes,
) -> Read:  # fmt: skip
    """Pieces [lo, hi) of a source's plane from `place` to where its run puts them."""
    shape: PlaneLayout = source.layout.planes[plane]
    to = (run.to + lo - run.first) * shape.piece_bytes
    at = source.layout.sums_at(layer, plane, source.held.first) + lo
    n_bytes = (hi - lo) * shape.piece_bytes
    return Read(
        place[0], place[1], dest[to : to + n_bytes], source.sums[at : at + hi - lo],
        shape.piece_bytes,
    )  # fmt: skip


def runs_of(wanted: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(first, count) of each run of True. Pure."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], wanted, [False])).astype(np.int8)))
    return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def there(source: Source, cached: Sequence[Ids]) -> npt.NDArray[np.bool_]:
    """Which windows of a source have a copy in any of the caches. Pure."""
    found = np.zeros(source.count, dtype=bool)
    for entries in cached:
        found |= entries >= 0
    return found


def rows_by_tier(
    sources: Sequence[Source],
    cached: Sequence[Sequence[Ids]],
    caches: Sequence[ChunkCache],
    positions: npt.NDArray[np.int64] | None,
) -> dict[str, int]:
    """How many of the chosen rows (None: all) come from each cache, and how many from home."""
    window = sources[0].held.record.window
    n_rows = sum(s.count for s in sources) * window if positions is None else len(positions)
    rows = {}
    for cache, entries in zip(caches, cached, strict=True):
        copies = np.concatenate([ids >= 0 for ids in entries])
        n = copies.sum() * window if positions is None else copies[positions // window].sum()
        rows[cache.tier.name] = int(n)
    rows["ssd"] = n_rows - sum(rows.values())
    return rows
