"""Rows that lie in memory: from a cache to where the caller sees them.

    wanted rows ─┬─ of chunks that a cache has ─pieces→ their places among the rows given
                 └─ of all others: left for `gather`, from home, in runs ─a buffer→ their places

Chosen rows, and rows of packed spans that lie among others'. (All rows of packed chunks:
`whole.py`.) Rows of home are read with their neighbours, and so through a buffer; memory has no use
for that. Who reads them puts them in their places, while the next are under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from impress.cache.chunks import ChunkCache, Ids, levels_of
from impress.read.parts import Part, Positions
from impress.read.plan import Copies, Unfound, pieces_of
from impress.read.whole import Whole
from impress.spans.layout import PlaneLayout
from impress.spans.rows import scatter_rows
from tiers.base import Bytes, Pieces

Levels = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Direct:
    """`left`: the parts, with only those rows that home has to give; `at`: where these go, among
    all n_rows wanted. `levels`: of each part's wanted rows, which cache has them (home: behind the
    last); None: home has all.

    `given`: by plane, the wanted rows in order; theirs who look at them. `spare`: behind these is
    room for one more, where rows go that nobody wants: to leave them out takes a pass of its own.
    """

    parts: Sequence[Part]
    levels: Sequence[Levels | None]
    left: list[Part]
    at: Positions
    n_rows: int
    spare: bool
    given: list[Bytes] = field(default_factory=list)
    _lie: Sequence[Positions | None] = ()  # by plane, where in dest rows of home lie
    _to: dict[int, Positions] = field(default_factory=dict)  # by plane: see `_places`

    def copies(
        self, entries: Sequence[Sequence[Ids]], layer: int, planes: Sequence[int],
        caches: Sequence[ChunkCache],
    ) -> Copies:  # fmt: skip
        """What is copied among the rows given: which pieces, is found by who copies them."""
        found: Copies = {cache.tier.name: [] for cache in caches}
        begin = 0
        for i, (part, levels) in enumerate(zip(self.parts, self.levels, strict=True)):
            assert part.ordinals is not None, "what goes directly is rows"
            counts = [] if levels is None else np.bincount(levels, minlength=len(caches)).tolist()
            for level, (cache, n) in enumerate(zip(caches, counts, strict=False)):
                for number, plane in enumerate(planes if n else ()):
                    some = Some(
                        self, i, begin, level, layer, plane, number, cache, entries[level][i], n,
                        (0, len(part.ordinals)),
                    )  # fmt: skip
                    found[cache.tier.name].append((part, some))
            begin += len(part.ordinals)
        return found

    @property
    def n_places(self) -> int:
        """Rows there must be room for."""
        return self.n_rows + self.spare

    def rows(self, i: int) -> Bytes:
        """Plane number i, once all is read."""
        return self.given[i][: len(self.given[i]) // self.n_places * self.n_rows]

    def lie(self, rows: Sequence[Positions | None]) -> None:
        """By plane, where in its dest each row of home will lie."""
        self._lie = rows

    def put(self, i: int, dest: Bytes, first: int, end: int) -> None:
        """Bytes [first, end) of dest, rows of plane number i with their neighbours, to their
        places."""
        size = len(self.given[i]) // self.n_places
        to = self._places(i, len(dest) // size)[first // size : end // size]
        rows = None if self.spare else (to >= 0).nonzero()[0]
        scatter_rows(dest[first:end], rows, size, self.given[i], to)

    def _places(self, i: int, n_rows: int) -> Positions:
        """[n_rows]: where each row of a plane's dest goes, -1: nowhere. Found by whoever needs it
        first; where two do, they find the same."""
        found = self._to.get(i)
        if found is None:
            rows = self._lie[i]
            assert rows is not None, "what goes directly is rows"
            alike = [self._to.get(j) for j, others in enumerate(self._lie) if others is rows]
            found = next((to for to in alike if to is not None), None)
        if found is None:
            found = np.full(n_rows, -1, dtype=np.int64)
            found[rows] = self.at
        self._to[i] = found
        return found


def direct_of(
    parts: Sequence[Part], entries: Sequence[Sequence[Ids]], shapes: Sequence[PlaneLayout], *,
    chosen: bool, into_place: bool,
) -> Direct | Whole | None:  # fmt: skip
    """Wanted rows by who has them, where that is best; None: all go one way. Pure.

    Dense rows. `into_place`: there is memory for all of them. Else they have some from the start,
    beside what is read of home: where all rows are wanted, of many layers at once, only where
    memory has some of them.
    """
    cached = any((ids >= 0).any() for of_cache in entries for ids in of_cache)
    if not all(shape.dense for shape in shapes) or not (cached or into_place or chosen):
        return None
    if all(part.is_whole for part in parts):
        return Whole(parts, entries) if any(part.is_packed for part in parts) else None
    if any(part.ordinals is None for part in parts):
        return None
    return divided(parts, entries, spare=not into_place)


def divided(
    parts: Sequence[Part], entries: Sequence[Sequence[Ids]], *, spare: bool
) -> Direct:  # fmt: skip
    """Wanted rows by who has them. `entries[cache][part]`: of its chunks, -1 where it has none.

    Pure.
    """
    levels: list[Levels | None] = []
    left: list[Part] = []
    home: list[Positions] = []
    begin = 0
    for i, part in enumerate(parts):
        assert part.ordinals is not None, "all rows are not chosen rows"
        n = len(part.ordinals)
        of_cache = [by_part[i] for by_part in entries]
        if not any((ids >= 0).any() for ids in of_cache):  # of a cold one, all
            levels.append(None)
            left.append(part)
            home.append(np.arange(begin, begin + n))
        else:
            window = part.source.held.record.window
            of_chunk = levels_of(of_cache)
            of_row = of_chunk.repeat(window).take(part.ordinals)  # by bytes: to divide is dearer
            levels.append(of_row)
            at = (of_row == len(entries)).nonzero()[0]
            ordinals = part.ordinals.take(at)
            left.append(Part(part.source, part.first, part.count, part.to, ordinals))
            home.append(begin + at if begin else at)
        begin += n
    at = home[0] if len(home) == 1 else np.concatenate(home)
    return Direct(parts, levels, left, at, begin, spare)


@dataclass(frozen=True, slots=True)
class Some:
    """Wanted rows of a part's plane, the one of `number` among those read, that the cache of a
    level has: of `rows` (first, end), and of every n-th chunk, `turn` (i, n) says which. The part's
    rows go from `begin` on.

    Which pieces, and where they go, is found beside other copies: who asks for a layer waits for
    the interpreter as often as for a disk meanwhile, and had a tenth of a request for it.
    """

    direct: Direct
    part: int
    begin: int
    level: int
    layer: int
    plane: int
    number: int
    cache: ChunkCache
    entries: Ids
    n_rows: int  # that this cache has: about, of a slice
    rows: tuple[int, int]
    turn: tuple[int, int] = (0, 1)

    @property
    def _shape(self) -> PlaneLayout:
        return self.direct.parts[self.part].source.layout.planes[self.plane]

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self._shape.row_bytes

    def cut(self, most_bytes: int) -> Sequence[Unfound]:
        """In slices of about most_bytes: by rows, or where these share pieces by chunks, by turns:
        the first of a packed span hold most of the wanted rows."""
        n = max(1, -(-self.n_bytes // most_bytes))
        each = -(-self.n_rows // n)
        if self._shape.piece_rows > 1:
            return [replace(self, turn=(i, n), n_rows=each) for i in range(n)]
        first, end = self.rows
        edges = [first + (end - first) * i // n for i in range(n + 1)]
        return [replace(self, rows=cut, n_rows=each) for cut in pairwise(edges)]

    def found(self) -> Pieces:
        """The pieces, and where they go. There may be none."""
        direct, shape, (first, end) = self.direct, self._shape, self.rows
        part, levels = direct.parts[self.part], direct.levels[self.part]
        assert part.ordinals is not None and levels is not None, "a cache has some of its rows"
        mine, ordinals = levels[first:end] == self.level, part.ordinals[first:end]
        i, n = self.turn
        if n > 1:
            mine &= ordinals // part.source.held.record.window % n == i
        at = mine.nonzero()[0]
        pieces, to = pieces_with(ordinals.take(at), at + (self.begin + first), part.count, shape)
        return pieces_of(
            part, self.layer, self.plane, pieces, to, self.cache, self.entries,
            direct.given[self.number], spare=direct.spare,
        )  # fmt: skip


def pieces_with(
    ordinals: Positions, to: Positions, n_chunks: int, shape: PlaneLayout
) -> tuple[Positions, Positions]:
    """The pieces that hold these rows of a part of n_chunks, which go to places `to`; and where
    they go: [pieces], or where a piece has several rows [pieces, rows of a piece], -1 for those not
    wanted. Pure.
    """
    if shape.piece_rows == 1:
        return ordinals, to
    places = np.full((n_chunks * shape.pieces, shape.piece_rows), -1, dtype=np.int64)
    places.reshape(-1)[ordinals] = to
    pieces = np.flatnonzero((places >= 0).any(axis=1))
    return pieces, places.take(pieces, axis=0)
