"""Rows that lie in memory: from a cache to where the caller sees them.

    wanted rows ─┬─ of chunks that a cache has ─pieces→ their places among the rows given
                 └─ of all others: left for `gather`, from home, in runs ─a buffer→ their places

Chosen rows, and rows of packed spans that lie among others'. (All rows of packed chunks:
`whole.py`.) Rows of home are read with their neighbours, and so through a buffer; rows in memory
need none. The thread that reads from home puts rows in their places while the next are under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from impress.cache.chunks import ChunkCache, Ids
from impress.cache.levels import levels_of
from impress.read.copying import Copies, PiecesOf
from impress.read.parts import Part, Positions
from impress.read.whole import Whole
from impress.spans.layout import PlaneLayout
from impress.spans.rows import scatter_rows
from tiers.base import Bytes


@dataclass(frozen=True, slots=True)
class Mine:
    """Rows of a part, by ordinal, that this level's cache has; `to`: places among all wanted."""

    part: int
    level: int
    ordinals: Positions
    to: Positions


@dataclass(slots=True)
class Direct:
    """`mine`: what comes from memory. `left`: the parts, with only those rows that home has to
    give; `at`: where these go, among all n_rows wanted.

    `given`: by plane, the wanted rows in order; it belongs to those who look at it. `spare`: after
    them is room for one more, where home's unwanted rows go: skipping those is one more pass.
    """

    mine: list[Mine]
    left: list[Part]
    at: Positions
    n_rows: int
    spare: bool
    given: list[Bytes] = field(default_factory=list)
    _lie: Sequence[Positions | None] = ()  # by plane, where in dest rows of home lie
    _to: dict[int, Positions] = field(default_factory=dict)  # by which of `_lie`: see `_places`

    def copies(
        self, parts: Sequence[Part], entries: Sequence[Sequence[Ids]], layer: int,
        planes: Sequence[int], caches: Sequence[ChunkCache],
    ) -> Copies:  # fmt: skip
        """What is copied from caches into `given`; `parts`: with all wanted rows."""
        found: Copies = {cache.tier.name: [] for cache in caches}
        for one in self.mine:
            part, cache = parts[one.part], caches[one.level]
            alike: dict[PlaneLayout, tuple[Positions, Positions]] = {}  # K and V may be alike
            for plane, dest in zip(planes, self.given, strict=True):
                mine = entries[one.level][one.part]
                shape = part.source.layout.planes[plane]
                if shape not in alike:
                    alike[shape] = pieces_with(one, part.count, shape)
                pieces = PiecesOf(part, layer, plane, *alike[shape], cache, mine, dest)
                found[cache.tier.name].append((part, pieces))
        return found

    @property
    def n_places(self) -> int:
        """Rows there must be room for."""
        return self.n_rows + self.spare

    def rows(self, i: int) -> Bytes:
        """Plane number i, once all is read."""
        return self.given[i][: len(self.given[i]) // self.n_places * self.n_rows]

    def lie(self, rows: Sequence[Positions | None]) -> None:
        """Note, by plane, where in its dest each row of home will lie."""
        self._lie = rows

    def put(self, i: int, dest: Bytes, first: int, end: int) -> None:
        """Put bytes [first, end) of dest, rows of plane number i with their neighbours, in their
        places."""
        size = len(self.given[i]) // self.n_places
        to = self._places(i, len(dest) // size)[first // size : end // size]
        rows = None if self.spare else (to >= 0).nonzero()[0]
        scatter_rows(dest[first:end], rows, size, self.given[i], to)

    def _places(self, i: int, n_rows: int) -> Positions:
        """[n_rows]: where each row of a plane's dest goes, -1: nowhere. Found by the first thread
        that needs it; where two do, they find the same."""
        rows = self._lie[i]
        assert rows is not None, "what goes directly is rows"
        found = self._to.get(id(rows))
        if found is None:
            found = np.full(n_rows, -1, dtype=np.int64)
            found[rows] = self.at
            self._to[id(rows)] = found
        return found


def direct_of(
    parts: Sequence[Part], entries: Sequence[Sequence[Ids]], shapes: Sequence[PlaneLayout], *,
    chosen: bool, into_place: bool,
) -> Direct | Whole | None:  # fmt: skip
    """Wanted rows divided by who has them, where that is best; None: all go one way. Pure.

    Only dense rows; but not `chosen` ones that share pieces with unwanted rows, where memory has
    some: putting these in order from a buffer is quicker. `into_place`: the caller gave memory for
    all of them. Otherwise they take some from the start, beside the buffers of what is read from
    home: where all rows are wanted, of many layers at once, only where memory has some of them.
    """
    if not all(shape.dense for shape in shapes):
        return None
    if all(part.is_whole for part in parts):
        if not any(part.is_packed for part in parts):
            return None
        wanted = chosen or into_place or _cached(entries)
        return Whole(parts, entries) if wanted else None
    if any(part.ordinals is None for part in parts):
        return None
    if chosen:
        if any(shape.piece_rows > 1 for shape in shapes) and _cached(entries):
            return None
    elif not into_place and not _cached(entries):
        return None
    return divided(parts, entries, spare=not into_place)


_NONE: Final = np.empty(0, dtype=np.int64)


def _cached(entries: Sequence[Sequence[Ids]]) -> bool:
    return any((ids >= 0).any() for of_cache in entries for ids in of_cache)


def divided(
    parts: Sequence[Part], entries: Sequence[Sequence[Ids]], *, spare: bool
) -> Direct:  # fmt: skip
    """Wanted rows divided by who has them. `entries[cache][part]`: by chunk, -1 where it has none.

    Pure.
    """
    mine: list[Mine] = []
    left: list[Part] = []
    home: list[Positions] = []
    begin = 0
    for i, part in enumerate(parts):
        assert part.ordinals is not None, "all rows are not chosen rows"
        n = len(part.ordinals)
        of_part = [by_part[i] for by_part in entries]
        levels = levels_of(of_part) if entries else np.empty(0, dtype=np.uint8)
        n_of_level = [*map(levels.tobytes().count, range(len(entries) + 1))]
        if n_of_level[-1] == len(levels):  # a cold part: all are home's
            left.append(part)
            home.append(np.arange(begin, begin + n))
            begin += n
            continue
        window = part.source.held.record.window
        of_row = levels.repeat(window).take(part.ordinals)  # of bytes: cheaper than dividing
        for level, n_chunks in enumerate(n_of_level):
            at = (of_row == level).nonzero()[0] if n_chunks else _NONE
            ordinals = part.ordinals.take(at)
            if begin:
                at = at + begin
            if level < len(entries):
                if len(at):
                    mine.append(Mine(i, level, ordinals, at))
                continue
            left.append(Part(part.source, part.first, part.count, part.to, ordinals))
            home.append(at)
        begin += n
    at = home[0] if len(home) == 1 else np.concatenate(home)
    return Direct(mine, left, at, begin, spare)


def pieces_with(rows: Mine, n_chunks: int, shape: PlaneLayout) -> tuple[Positions, Positions]:
    """The pieces that hold these rows of a part of n_chunks, and where they go among those given:
    [pieces], or [pieces, rows of a piece] where a piece has several, -1 for those not wanted. Pure.
    """
    if shape.piece_rows == 1:
        return rows.ordinals, rows.to
    to = np.full((n_chunks * shape.pieces, shape.piece_rows), -1, dtype=np.int64)
    to.reshape(-1)[rows.ordinals] = rows.to
    pieces = np.flatnonzero((to >= 0).any(axis=1))
    return pieces, to.take(pieces, axis=0)
