"""What a load takes of rows that were read before they were asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from impress.read.early import Early
from impress.read.parts import Mask, Part, Positions
from impress.read.plan import Run, Runs, home_reads
from impress.spans.layout import PlaneLayout
from tiers.base import Bytes, Read

ReadHome = Callable[[list[Read], int], None]  # some reads of a span

#: Bytes that one thread copies in a turn.
MOST_COPY: Final = 2 << 20


def promised(ahead: Early | None, parts: Sequence[Part], plane: int) -> list[Mask] | None:
    """For each part, the pieces of a plane that were read ahead; None: nothing was."""
    if ahead is None:
        return None
    found = [ahead.pieces(i, plane, part) for i, part in enumerate(parts)]
    there = [mask for mask in found if mask is not None]
    return there if len(there) == len(found) else None


class Takes:
    """Pieces of a load's dests that come from `ahead`, and those that had to be read after all."""

    def __init__(
        self, ahead: Early, planes: Sequence[int], shapes: Sequence[PlaneLayout],
        dests: Sequence[Bytes],
    ) -> None:  # fmt: skip
        self.ahead = ahead
        self._planes, self._shapes, self._dests = planes, shapes, dests
        sizes = [len(dest) // s.piece_bytes for dest, s in zip(dests, shapes, strict=True)]
        self._taken = [np.zeros(n_pieces, dtype=bool) for n_pieces in sizes]  # by plane
        self._reread: list[int] = []  # bytes that had been promised

    def tasks(
        self, layer: int, parts: Sequence[Part], runs: Sequence[Sequence[Runs]], read: ReadHome
    ) -> list[Callable[[], None]]:
        """Copies of `runs[plane][part]`, in turns of MOST_COPY; `read` brings what is not there."""
        tasks: list[Callable[[], None]] = []
        for i, part in enumerate(parts):
            takes = [(at, run) for at, by_part in enumerate(runs) for run in by_part[i].each()]
            room = 0
            for at, run in takes:
                if room <= 0:
                    group: list[tuple[int, Run]] = []
                    tasks.append(partial(self._copy, layer, i, part, group, read))
                    room = MOST_COPY
                group.append((at, run))
                room -= run.n_pieces * self._shapes[at].piece_bytes
        return tasks

    def _copy(
        self, layer: int, i: int, part: Part, takes: Sequence[tuple[int, Run]], read: ReadHome
    ) -> None:
        missing: list[Read] = []
        for at, run in takes:
            shape, dest, plane = self._shapes[at], self._dests[at], self._planes[at]
            first, end = part.first * shape.pieces + run.first, run.to + run.n_pieces
            to = dest[run.to * shape.piece_bytes : end * shape.piece_bytes]
            if self.ahead.copy(i, plane, first, to):
                self._taken[at][run.to : end] = True
            else:
                one = Runs(*np.array([[run.first], [run.n_pieces], [run.to]]))
                missing += home_reads(part, layer, plane, one, dest)
                self._reread.append(len(to))
        if missing:
            read(missing, part.span)

    @property
    def reread_bytes(self) -> int:
        """Bytes that were not there after all; once all tasks are done."""
        return sum(self._reread)

    @property
    def used_bytes(self) -> int:
        """Bytes taken; once all tasks are done."""
        pairs = zip(self._taken, self._shapes, strict=True)
        return sum(int(one.sum()) * shape.piece_bytes for one, shape in pairs)

    def hit_rows(self, rows: Sequence[Positions | None]) -> int:
        """Wanted rows taken in every plane; `rows`: of each plane's dest, None: all of it."""
        hits = [
            np.repeat(one, s.piece_rows) for one, s in zip(self._taken, self._shapes, strict=True)
        ]
        wanted = [hit if at is None else hit[at] for hit, at in zip(hits, rows, strict=True)]
        return int(np.logical_and.reduce(wanted).sum())
