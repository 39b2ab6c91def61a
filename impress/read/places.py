"""All rows of packed spans: from the order of their chunks to the one they are given in.

    slice read and verified ─rows→ their places among those given

By the thread that read them, while the core's cache still has them, and beside the reads that are
under way. Put in order by who waits for the layer, once all of it is there, they cost it twice the
time: the disk had nothing to do meanwhile, and no other thread had the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from impress.read.direct import Direct
from impress.read.parts import Positions
from impress.spans.layout import PlaneLayout
from impress.spans.rows import address_of
from tiers.base import Bytes, Pieces, Read

#: Bytes put at once: while it copies, a thread holds the interpreter.
_BLOCK = 256 << 10


class Places:
    """Where rows of `dests` go, by plane; `given`: there, in order, once all are read."""

    def __init__(
        self, shapes: Sequence[PlaneLayout], dests: Sequence[Bytes], given: Sequence[Bytes],
        rows: Sequence[Positions], at: Positions | None = None,
    ) -> None:  # fmt: skip
        """`rows`: of each plane's dest, dense; they go to these rows `at` of `given`, None: to as
        many as there are, in this order."""
        self.given = list(given)
        self._dests = [
            dest.reshape(-1, shape.row_bytes) for dest, shape in zip(dests, shapes, strict=True)
        ]
        self._starts = [address_of(dest) for dest in dests]
        self._to: list[Positions] = []  # by row of dest: where it goes, -1: nobody wants it
        for dest, mine in zip(self._dests, rows, strict=True):
            if self._to and mine is rows[0] and len(dest) == len(self._to[0]):
                self._to.append(self._to[0])  # planes that lie alike
                continue
            to = np.full(len(dest), -1, dtype=np.int64)
            to[mine] = np.arange(len(mine)) if at is None else at
            self._to.append(to)

    def put(self, reads: Sequence[Read]) -> None:
        """What these have brought, to its places."""
        for i, first, end in self._runs(reads):
            dest, to = self._dests[i], self._to[i]
            given = self.given[i].reshape(-1, dest.shape[1])
            step = max(1, _BLOCK // dest.shape[1])
            for at in range(first, end, step):
                some = slice(at, min(at + step, end))
                wanted = to[some] >= 0
                if wanted.all():
                    given[to[some]] = dest[some]
                else:
                    given[to[some][wanted]] = dest[some][wanted]

    def put_pieces(self, pieces: Pieces) -> None:
        """The same of pieces that were copied into a dest."""
        i = self._starts.index(address_of(pieces.dest))
        dest, to = self._dests[i], self._to[i]
        given, n = self.given[i].reshape(-1, dest.shape[1]), pieces.piece_bytes // dest.shape[1]
        step = max(1, _BLOCK // pieces.piece_bytes)
        for at in range(0, len(pieces.to), step):
            rows = (pieces.to[at : at + step, None] * n + np.arange(n)).ravel()
            rows = rows[to[rows] >= 0]
            given[to[rows]] = dest[rows]

    def _runs(self, reads: Sequence[Read]) -> Iterator[tuple[int, int, int]]:
        """(plane, first row, end) of what was read into each dest; neighbours together."""
        ends: list[list[int]] = []  # [begin, end) in memory
        for read in reads:
            begin = address_of(read.dest)
            if ends and ends[-1][1] == begin:
                ends[-1][1] += len(read.dest)
            else:
                ends.append([begin, begin + len(read.dest)])
        for begin, end in ends:
            yield from self._within(begin, end)

    def _within(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Of memory [begin, end): dests of two planes may lie side by side."""
        for i, (start, dest) in enumerate(zip(self._starts, self._dests, strict=True)):
            row = dest.shape[1]
            first, last = max(begin - start, 0) // row, min(end - start, dest.nbytes) // row
            if first < last:
                yield i, first, last


def in_places(
    shapes: Sequence[PlaneLayout], dests: Sequence[Bytes], rows: Sequence[Positions | None],
    direct: Direct | None, given: Callable[[int, int], Bytes],
) -> Places | None:  # fmt: skip
    """For planes whose dests hold `rows` in this order; None: as they lie, or with padding.

    `direct`: has places for them already, beside those of memory; else `given(plane, n_rows)`.
    """
    mine = [one for one in rows if one is not None]
    if not mine or not all(shape.dense for shape in shapes):
        return None
    if direct is not None:
        return Places(shapes, dests, direct.given, mine, direct.at)
    return Places(shapes, dests, [given(i, len(one)) for i, one in enumerate(mine)], mine)
