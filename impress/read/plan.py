"""Which reads bring a layer's rows to where they are wanted. Pure: data in, data out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from impress.cache.chunks import ChunkCache, Ids
from impress.spans.format import ProbeRecord
from impress.spans.layout import PlaneLayout, SpanLayout
from impress.spans.order import RowOrder
from impress.tree.catalog import Held
from tiers.base import Bytes, Read, Slot, Sums

Positions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Source:
    """A held run of windows with what reading it takes. `at`: its first window on the lease."""

    held: Held
    layout: SpanLayout
    slot: Slot
    sums: Sums
    probes: tuple[ProbeRecord, ...]
    at: int
    order: RowOrder | None = None  # None: rows lie in position order

    @property
    def span(self) -> int:
        return self.held.record.span_id

    @property
    def count(self) -> int:
        """Windows held."""
        return self.held.count

    def ordinals(self, layer: int, rows: Positions) -> Positions:
        """Where rows of the span, counted in position order, lie in the order of its chunks."""
        return rows if self.order is None else self.order.at(layer, rows)


@dataclass(frozen=True, slots=True)
class Part:
    """What one layer's read looks at of a source: chunks [first, first + count) of its span.

    Those that hold the wanted rows: of a packed span not the windows held, but where these lie.
    """

    source: Source
    first: int
    count: int
    to: int  # where its first chunk goes in a dest that takes them all
    ordinals: Positions | None  # of the wanted rows, in position order, 0 where `first` begins;
    # None: every row of these chunks, in the order they lie in

    @property
    def span(self) -> int:
        return self.source.span


class Run(NamedTuple):  # not a dataclass: a scattered choice makes thousands
    """Pieces [first, first + n_pieces) of a part's plane, and the piece of dest they begin at."""

    first: int
    n_pieces: int
    to: int


@dataclass(slots=True)
class ReadPlan:
    """One layer's reads by medium, and what they cost."""

    reads: dict[str, list[tuple[Part, list[Read]]]]

    @property
    def n_bytes(self) -> dict[str, int]:
        """Bytes moved, by medium, padding and gaps included."""
        return {
            medium: sum(len(read.dest) for _, reads in by_part for read in reads)
            for medium, by_part in self.reads.items()
        }


def parts_of(sources: Sequence[Source], layer: int, positions: Positions | None) -> list[Part]:
    """For each source, where the rows at these positions (ascending, on the lease) lie.

    None: all rows. Pure.
    """
    parts: list[Part] = []
    to = 0
    for source in sources:
        held, window = source.held, source.held.record.window
        begin, end = held.first * window, (held.first + held.count) * window
        if positions is not None:
            at = source.at * window
            cuts = np.searchsorted(positions, (at, at + end - begin))
            rows = positions[cuts[0] : cuts[1]] - at + begin
        elif source.order is not None:
            rows = np.arange(begin, end)
        else:
            parts.append(Part(source, held.first, held.count, to, None))
            to += held.count
            continue
        ordinals = source.ordinals(layer, rows)
        first, count = held.first, 0
        if len(rows):
            first = int(ordinals.min()) // window
            count = int(ordinals.max()) // window + 1 - first
        parts.append(Part(source, first, count, to, ordinals - first * window))
        to += count
    return parts


def whole(parts: Sequence[Part], plane: int) -> list[list[Run]]:
    """Runs of all chunks, in lease order: for each part, one."""
    shape = parts[0].source.layout.planes[plane]
    return [[Run(0, p.count * shape.pieces, p.to * shape.pieces)] for p in parts]


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


@dataclass(frozen=True, slots=True)
class Gather:
    """Wanted rows of a plane: the runs that hold them, and where each row lands in dest."""

    runs: list[list[Run]]  # for each part
    n_pieces: int  # of dest
    rows: Positions | None  # for each wanted position, its row in dest; None: all, as they lie
    read: list[list[Run]]  # of the pieces of `runs`, those to be read
    taken: list[list[Run]]  # and those that were read ahead


def gather(
    parts: Sequence[Part], plane: int, gap_bytes: int, ahead: Sequence[Mask] | None = None
) -> Gather:
    """Runs of pieces that hold the wanted rows of these parts, in the order they lie in.

    Pieces closer than gap_bytes are read through: a request saved is worth that many bytes.
    `ahead`: for each part, the pieces of its chunks that were read ahead. They are taken, but for
    those in a gap that is read through.
    """
    shape = parts[0].source.layout.planes[plane]
    gap = gap_bytes // shape.piece_bytes
    runs: list[list[Run]] = []
    read: list[list[Run]] = []
    taken: list[list[Run]] = []
    places: list[Positions] = []
    n_pieces = 0
    for i, part in enumerate(parts):
        assert part.ordinals is not None, "gather wants chosen rows"
        pieces, rows = np.divmod(part.ordinals, shape.piece_rows)
        wanted = np.zeros(part.count * shape.pieces, dtype=bool)
        wanted[pieces] = True
        if ahead is None:
            firsts, counts, tos = _merged(np.flatnonzero(wanted), gap, n_pieces)
        else:
            reads, takes = _divided(wanted, ahead[i], gap)
            firsts, counts, tos = _merged(np.flatnonzero(reads | takes), 0, n_pieces)
        runs.append([*map(Run, firsts.tolist(), counts.tolist(), tos.tolist())])
        moves = np.zeros(len(wanted), dtype=np.int64)  # how far a piece moves, by differences
        moves[firsts] = np.diff(tos - firsts, prepend=0)
        moves = np.cumsum(moves)
        places.append((pieces + moves[pieces]) * shape.piece_rows + rows)
        n_pieces += int(counts.sum())
        if ahead is not None:
            read.append([Run(first, n, first + int(moves[first])) for first, n in runs_of(reads)])
            taken.append([Run(first, n, first + int(moves[first])) for first, n in runs_of(takes)])
    rows = np.concatenate(places)
    if ahead is None:
        return Gather(runs, n_pieces, rows, runs, [[] for _ in runs])
    return Gather(runs, n_pieces, rows, read, taken)


def gather_whole(
    parts: Sequence[Part], plane: int, gap_bytes: int, ahead: Sequence[Mask] | None = None
) -> Gather:
    """Every row of these parts' chunks, or the wanted ones of them; see `gather`."""
    shape = parts[0].source.layout.planes[plane]
    gap = gap_bytes // shape.piece_bytes
    runs, rows = whole(parts, plane), rows_of_whole(parts)
    n_pieces = sum(run.n_pieces for by_part in runs for run in by_part)
    if ahead is None:
        return Gather(runs, n_pieces, rows, runs, [[] for _ in runs])
    read: list[list[Run]] = []
    taken: list[list[Run]] = []
    for part, there in zip(parts, ahead, strict=True):
        to = part.to * shape.pieces
        for found, some in zip(
            (read, taken), _divided(~np.zeros_like(there), there, gap), strict=True
        ):
            found.append([Run(first, n, to + first) for first, n in runs_of(some)])
    return Gather(runs, n_pieces, rows, read, taken)


def _divided(wanted: Mask, ahead: Mask, gap: int) -> tuple[Mask, Mask]:
    """Pieces to be read, gaps read through, and pieces that were read ahead and need not be."""
    read = np.zeros(len(wanted) + 1, dtype=np.int8)
    firsts, counts, _ = _merged(np.flatnonzero(wanted & ~ahead), gap, 0)
    read[firsts] = 1
    read[firsts + counts] -= 1
    reads = np.cumsum(read[:-1]).astype(bool)
    return reads, wanted & ahead & ~reads


def _merged(pieces: Positions, gap: int, to: int) -> tuple[Positions, Positions, Positions]:
    """Ascending pieces as runs: their first pieces, lengths, and where each goes, from `to` on."""
    if not len(pieces):
        return pieces, pieces, pieces
    cuts = np.flatnonzero(np.diff(pieces) > gap + 1)
    firsts = pieces[np.concatenate(([0], cuts + 1))]
    counts = pieces[np.concatenate((cuts, [len(pieces) - 1]))] - firsts + 1
    return firsts, counts, to + np.cumsum(counts) - counts


def plan_reads(
    parts: Sequence[Part],
    layer: int,
    planes: Sequence[int],
    runs: Sequence[Sequence[Sequence[Run]]],
    cached: Sequence[Sequence[Ids]],
    caches: Sequence[ChunkCache],
    dests: Sequence[Bytes],
) -> ReadPlan:
    """Reads of `runs[plane][part]` into `dests[plane]`.

    `cached[cache][part]` holds pinned entries, -1 where that cache has no copy; a window is in
    at most one. Windows side by side at home become one read a plane; the medium merges further.
    """
    media = [*(cache.tier.name for cache in caches), "ssd"]
    plan = ReadPlan({medium: [] for medium in media})
    for i, part in enumerate(parts):
        levels = list(zip(caches, (entries[i] for entries in cached), strict=True))
        found: dict[str, list[Read]] = {medium: [] for medium in media}
        for plane, plane_runs, dest in zip(planes, runs, dests, strict=True):
            for run in plane_runs[i]:
                for medium, read in _split(part, layer, plane, run, levels, dest):
                    found[medium].append(read)
        for medium, reads in found.items():
            if reads:
                plan.reads[medium].append((part, reads))
    return plan


def _split(
    part: Part,
    layer: int,
    plane: int,
    run: Run,
    levels: Sequence[tuple[ChunkCache, Ids]],
    dest: Bytes,
) -> Iterator[tuple[str, Read]]:
    """One run as reads: each cached window from its copy, what lies between from home."""
    source, shape = part.source, part.source.layout.planes[plane]
    begin, end = run.first // shape.pieces, -(-(run.first + run.n_pieces) // shape.pieces)
    cached = there(part, [entries for _, entries in levels])[begin:end]
    for first, count in runs_of(~cached):
        lo = max(run.first, (begin + first) * shape.pieces)
        hi = min(run.first + run.n_pieces, (begin + first + count) * shape.pieces)
        window, piece = divmod(lo, shape.pieces)
        off = source.layout.chunk_off(layer, plane, part.first + window)
        place = (source.slot, off + piece * shape.piece_bytes)
        yield "ssd", _read(part, layer, plane, place, lo, hi, run, dest)
    for cache, entries in levels:
        for window in (begin + np.flatnonzero(entries[begin:end] >= 0)).tolist():
            lo = max(run.first, window * shape.pieces)
            hi = min(run.first + run.n_pieces, (window + 1) * shape.pieces)
            off = cache.plane_off(plane) + lo % shape.pieces * shape.piece_bytes
            place = (cache.slot(int(entries[window])), off)
            yield cache.tier.name, _read(part, layer, plane, place, lo, hi, run, dest)


def home_read(part: Part, layer: int, plane: int, run: Run, dest: Bytes) -> Read:
    """One run of pieces from home, to where it goes in dest."""
    source, shape = part.source, part.source.layout.planes[plane]
    off = source.layout.chunk_off(layer, plane, part.first) + run.first * shape.piece_bytes
    end = run.first + run.n_pieces
    return _read(part, layer, plane, (source.slot, off), run.first, end, run, dest)


def _read(
    part: Part, layer: int, plane: int, place: tuple[Slot, int], lo: int, hi: int, run: Run,
    dest: Bytes,
) -> Read:  # fmt: skip
    """Pieces [lo, hi) of a part's plane from `place` to where its run puts them."""
    source = part.source
    shape: PlaneLayout = source.layout.planes[plane]
    to = (run.to + lo - run.first) * shape.piece_bytes
    at = source.layout.sums_at(layer, plane, part.first) + lo
    n_bytes = (hi - lo) * shape.piece_bytes
    return Read(
        place[0], place[1], dest[to : to + n_bytes], source.sums[at : at + hi - lo],
        shape.piece_bytes,
    )  # fmt: skip


def runs_of(wanted: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(first, count) of each run of True. Pure."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], wanted, [False])).astype(np.int8)))
    return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def there(part: Part, cached: Sequence[Ids]) -> npt.NDArray[np.bool_]:
    """Which chunks of a part have a copy in any of the caches. Pure."""
    found = np.zeros(part.count, dtype=bool)
    for entries in cached:
        found |= entries >= 0
    return found


def rows_by_tier(
    parts: Sequence[Part], cached: Sequence[Sequence[Ids]], caches: Sequence[ChunkCache]
) -> dict[str, int]:
    """How many of the wanted rows come from each cache, and how many from home. Pure."""
    window = parts[0].source.held.record.window
    chunks = [None if p.ordinals is None else p.ordinals // window for p in parts]
    n_rows = sum(p.count * window if p.ordinals is None else len(p.ordinals) for p in parts)
    rows = {}
    for cache, entries in zip(caches, cached, strict=True):
        n = 0
        for ids, which in zip(entries, chunks, strict=True):
            copies = ids >= 0
            n += int(copies.sum()) * window if which is None else int(copies[which].sum())
        rows[cache.tier.name] = n
    rows["ssd"] = n_rows - sum(rows.values())
    return rows
