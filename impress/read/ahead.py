"""Which rows of the next layer to read before they are asked for. Pure: data in, positions out.

this layer's selection + averages ─preferred→ most likely first ─within→ as many as fit a cap
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


class Places(NamedTuple):
    """Where the rows of a prefix lie in one plane."""

    pieces: Positions  # the piece of each row, in position order; those of two spans lie far apart
    piece_rows: int
    piece_bytes: int
    gap: int  # up to so many pieces between two wanted ones are read through


def preferred(chosen: Positions | None, average: Floats | None, there: Mask) -> Positions:
    """Rows worth a guess, the likeliest first.

    First those that were `chosen` (ascending; None: all) in the previous layer, then those that
    earlier requests chose (`average` [n]; None where nothing is known of it); within each group by
    that average, ties by position. Rows that are `there` already, in a fast tier, are left out.
    """
    named = np.zeros(len(there), dtype=bool)
    named[slice(None) if chosen is None else chosen] = True
    worth = np.zeros(len(there), dtype=np.float32) if average is None else average
    rows = np.flatnonzero(~there & (named | (worth > 0)))
    return rows[np.lexsort((-worth[rows], ~named[rows]))]  # a stable sort


def within(order: Positions, planes: Sequence[Places], cap_bytes: int) -> Positions:
    """As many of the first rows of `order` as cost at most cap_bytes to read, ascending."""
    most = cap_bytes // sum(p.piece_bytes for p in planes) * max(p.piece_rows for p in planes)
    order = order[:most]
    counts = range(1, len(order) + 1)
    n = bisect.bisect_right(counts, cap_bytes, key=lambda n: cost(order[:n], planes))
    return np.sort(order[:n])


def cost(rows: Positions, planes: Sequence[Places]) -> int:
    """Bytes moved to read these rows, whole pieces and gaps included. More rows never cost less."""
    total = 0
    known: dict[tuple[int, int], int] = {}  # planes whose rows lie alike share the sum
    for place in planes:
        alike = id(place.pieces), place.gap
        n = known.get(alike)
        if n is None:
            steps = np.diff(np.unique(place.pieces[rows]))
            n = int(np.where(steps <= place.gap + 1, steps, 1).sum()) + (len(rows) > 0)
            known[alike] = n
        total += n * place.piece_bytes
    return total
