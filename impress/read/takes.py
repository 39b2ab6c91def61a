"""What a load takes of rows that were read before they were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from impress.read.parts import Mask, Part, Positions
from impress.spans.layout import PlaneLayout
from tiers.base import Bytes
from tiers.slots import Buffer


class Ahead(Protocol):
    """What was read ahead of a layer (impress.read.early)."""

    @property
    def buffers(self) -> Sequence[Buffer]:
        """Where it lies: retained by whoever may still copy."""

    def pieces(self, i: int, plane: int, part: Part) -> Mask | None:
        """Which pieces of the chunks of part i are here or under way; None: none of the plane."""

    def copy(self, i: int, plane: int, piece: int, dest: Bytes) -> bool:
        """Copy what lies in part i's span from this piece on; False where it is not all here."""


def used_bytes(taken: Sequence[Mask], shapes: Sequence[PlaneLayout]) -> int:
    """Bytes taken, by the pieces of each plane. Pure."""
    return sum(int(one.sum()) * s.piece_bytes for one, s in zip(taken, shapes, strict=True))


def hit_rows(
    taken: Sequence[Mask], shapes: Sequence[PlaneLayout], rows: Sequence[Positions | None]
) -> int:
    """Wanted rows that were taken in every plane; `rows`: of each plane's dest, None: all. Pure."""
    hits = [np.repeat(one, s.piece_rows) for one, s in zip(taken, shapes, strict=True)]
    wanted = [hit if at is None else hit[at] for hit, at in zip(hits, rows, strict=True)]
    return int(np.logical_and.reduce(wanted).sum())
