"""What a request tells of the rows it looked at, and what is told of chunks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Note:
    """One request looked at rows [first, first + count) of one layer of a span, in whole windows.

    `chosen`: those it chose, numbered within the span, int64 ascending; None: all of them,
    without an identifier's decision (exact, fallback). `ordinals`: where the rows used (chosen,
    or all looked at) lie in the order of the span's chunks; None: in position order.
    """

    span: int
    n_rows: int  # of the span
    layer: int
    first: int
    count: int
    chosen: Ids | None
    ordinals: Ids | None = None
    whole: bool = False  # every row looked at was needed, and used
    every_layer: bool = False  # it had been decided to read every layer so, and will be again


class Worth(NamedTuple):
    """What the chunks of a span's layer are worth, [n_chunks] each.

    A chunk's score is uses × share of rows needed. Uses are by recent requests, fading with each
    new one. For requests that choose, the share is the mean of the chunk's rows' averages (the
    paper's share of important rows), 1 while nothing was decided about them; others need every row.
    """

    ranks: npt.NDArray[np.float64]
    """log2 of the scores, as they compare with others at any later time: all fade alike, so a rank
    never needs an update for that. -inf: never used."""
    shares: Floats | None
    """Among rows that something was decided about; nan: a chunk has none, None: none has any."""
