"""Rows that lie in memory: from a cache to where the caller sees them.

    wanted rows ─┬─ of chunks that a cache has ─pieces→ their places among the rows given
                 └─ of all others: from home, in runs and through a buffer

Chosen rows, and all rows of packed spans, which do not lie in the order they are given in. Rows of
home are read with their neighbours, and so through a buffer; memory has no use for that.

All rows are planned by chunks, in the order they lie in, and those of home are put in their places
by whoever reads them: planned by rows and put in order by the one who waits for them, it took a
fifth longer than in position order (Llama-3-8B; the interpreter was waited for at every step).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from impress.cache.chunks import ChunkCache, Ids, levels_of
from impress.read.parts import Part, Positions
from impress.read.plan import pieces_of
from impress.spans.layout import PlaneLayout
from impress.spans.rows import address_of, scatter_rows
from tiers.base import Bytes, Pieces, Read


@dataclass(frozen=True, slots=True)
class Mine:
    """Rows of a part, by ordinal, that the cache of this level has; `to`: among all wanted.

    `in_chunks`: of whole chunks, as they lie there.
    """

    part: int
    level: int
    ordinals: Positions
    to: Positions
    in_chunks: bool = False


@dataclass(slots=True)
class Direct:
    """`mine`: what comes from memory. `left`: the parts, with only those rows that home has to
    give; `at`: where these go, among all n_rows wanted.

    `given`: by plane, the wanted rows in order; theirs who look at them.
    """

    mine: list[Mine]
    left: list[Part]
    at: Positions
    n_rows: int
    given: list[Bytes] = field(default_factory=list)
    chunks: list[Ids] | None = None  # of each part, those of home; None: it is planned by rows
    _whole: set[int] = field(default_factory=set)  # planes whose rows of home are there too

    def put(
        self, reads: Sequence[Read], dests: Sequence[Bytes], shapes: Sequence[PlaneLayout]
    ) -> None:
        """Rows of whole chunks, read into parts of dests and verified, to their places."""
        if self.chunks is None:
            return
        begins = [address_of(dest) for dest in dests]
        for read in reads:
            at = address_of(read.dest)
            i = next(i for i, dest in enumerate(dests) if 0 <= at - begins[i] < len(dest))
            size = shapes[i].row_bytes
            rows, first = read.dest.reshape(-1, size), (at - begins[i]) // size
            self.given[i].reshape(-1, size)[self.at[first : first + len(rows)]] = rows

    def rows(
        self, i: int, dest: Bytes, rows: Positions | None, shape: PlaneLayout
    ) -> Bytes:  # fmt: skip
        """Plane number i of what is given, once all is read: with `rows` of dest, home's; None:
        who read them put them there."""
        if rows is not None and i not in self._whole:
            scatter_rows(dest, rows, shape, self.given[i], self.at)
            self._whole.add(i)
        return self.given[i]


def direct_of(
    parts: Sequence[Part], entries: Sequence[Sequence[Ids]], shapes: Sequence[PlaneLayout], *,
    chosen: bool,
) -> Direct | None:  # fmt: skip
    """Wanted rows by who has them, where that is best; None: all go one way. Pure.

    Dense rows; but not `chosen` ones that share pieces with rows nobody wants: those are put in
    order as fast from a buffer.
    """
    if not chosen and all(shape.dense for shape in shapes) and _in_chunks(parts):
        return by_chunks(parts, entries)
    alone = all(shape.piece_rows == 1 for shape in shapes)
    if not all(shape.dense for shape in shapes) or (chosen and not alone):
        return None
    if any(part.ordinals is None for part in parts):
        return None
    if not any((ids >= 0).any() for of_cache in entries for ids in of_cache):
        return None
    found = divided(parts, entries)
    return found if found.mine else None


def divided(parts: Sequence[Part], entries: Sequence[Sequence[Ids]]) -> Direct:
    """Wanted rows by who has them. `entries[cache][part]`: of its chunks, -1 where it has none.

    Pure.
    """
    mine: list[Mine] = []
    left: list[Part] = []
    home: list[Positions] = []
    begin = 0
    for i, part in enumerate(parts):
        assert part.ordinals is not None, "all rows are not chosen rows"
        levels = levels_of([by_part[i] for by_part in entries])
        window = part.source.held.record.window
        of_row = levels.repeat(window).take(part.ordinals)  # by bytes: cheaper than to divide
        for level in range(len(entries)):
            at = (of_row == level).nonzero()[0]
            if len(at):
                mine.append(Mine(i, level, part.ordinals.take(at), begin + at if begin else at))
        at = (of_row == len(entries)).nonzero()[0]
        ordinals = part.ordinals.take(at)
        left.append(Part(part.source, part.first, part.count, part.to, ordinals))
        home.append(begin + at if begin else at)
        begin += len(part.ordinals)
    return Direct(mine, left, home[0] if len(home) == 1 else np.concatenate(home), begin)


def _in_chunks(parts: Sequence[Part]) -> bool:
    """Whether all rows of these chunks are wanted, and some do not lie in order."""
    return any(part.is_whole for part in parts) and all(
        part.is_whole or part.ordinals is None for part in parts
    )


def by_chunks(parts: Sequence[Part], entries: Sequence[Sequence[Ids]]) -> Direct:
    """All rows of the chunks of these parts, by who has the chunks; see `divided`. Pure."""
    mine: list[Mine] = []
    chunks: list[Ids] = []
    home: list[Positions] = []
    begin = 0
    for i, part in enumerate(parts):
        window = part.source.held.record.window
        n = part.count * window
        to = np.arange(begin, begin + n)
        if part.ordinals is not None:
            to[part.ordinals] = np.arange(begin, begin + n)
        levels = np.zeros(part.count, dtype=np.uint8)
        if entries:
            levels = levels_of([by_part[i] for by_part in entries])
        for level in range(len(entries)):
            if (here := levels == level).any():
                rows = here.repeat(window).nonzero()[0]
                mine.append(Mine(i, level, rows, to.take(rows), in_chunks=True))
        at_home = levels == len(entries)
        chunks.append(at_home.nonzero()[0])
        home.append(to if at_home.all() else to[at_home.repeat(window)])
        begin += n
    at = home[0] if len(home) == 1 else np.concatenate(home)
    return Direct(mine, list(parts), at, begin, chunks=chunks)


def pieces_with(rows: Mine, n_chunks: int, shape: PlaneLayout) -> tuple[Positions, Positions]:
    """The pieces that hold these rows of a part of n_chunks, and where they go among those given:
    [pieces], or where a piece has several [pieces, rows of a piece], -1 for those not wanted. Pure.
    """
    if rows.in_chunks:
        first_of_piece = rows.ordinals[:: shape.piece_rows]
        return first_of_piece // shape.piece_rows, rows.to.reshape(-1, shape.piece_rows)
    if shape.piece_rows == 1:
        return rows.ordinals, rows.to
    to = np.full((n_chunks * shape.pieces, shape.piece_rows), -1, dtype=np.int64)
    to.reshape(-1)[rows.ordinals] = rows.to
    pieces = np.flatnonzero((to >= 0).any(axis=1))
    return pieces, to.take(pieces, axis=0)


def copies_of(
    direct: Direct, parts: Sequence[Part], entries: Sequence[Sequence[Ids]], layer: int,
    planes: Sequence[int], caches: Sequence[ChunkCache],
) -> dict[str, list[tuple[Part, Pieces]]]:  # fmt: skip
    """By tier, what is copied among the rows given."""
    found: dict[str, list[tuple[Part, Pieces]]] = {cache.tier.name: [] for cache in caches}
    for one in direct.mine:
        part, cache = parts[one.part], caches[one.level]
        whole: dict[PlaneLayout, tuple[Positions, Positions]] = {}  # K and V may be alike
        for plane, dest in zip(planes, direct.given, strict=True):
            mine = entries[one.level][one.part]
            shape = part.source.layout.planes[plane]
            if shape not in whole:
                whole[shape] = pieces_with(one, part.count, shape)
            pieces = pieces_of(part, layer, plane, *whole[shape], cache, mine, dest)
            found[cache.tier.name].append((part, pieces))
    return found
