"""Choosing rows by units of several tokens in a row, and by importance smoothed over neighbours.

Pure NumPy, as choices.py. Units are counted from the prefix's start, all of one size.
"""

from __future__ import annotations

import math

import numpy as np

from impress.selection.choices import Selection, n_kept, top_k, whole
from impress.selection.quant import Floats


def unit_choice(scores: Floats, n_tokens: int, keep: float) -> Selection:
    """All tokens of the best share `keep` of the units, by scores [n units]; n_tokens in all.

    Its scores bound or stand for attention, so nothing is said of the mass left out.
    """
    if not np.isfinite(scores).all():
        return whole("not finite", fell_back=True)
    n_units = len(scores)
    kept = top_k(scores, n_kept(keep, n_units))
    if kept.all():
        return whole("given", fell_back=False)
    positions = np.flatnonzero(np.repeat(kept, n_tokens // n_units)).astype(np.int64)
    positions.flags.writeable = False
    return Selection(positions, math.nan, math.nan, False, "units")


def pooled(values: Floats, width: int) -> Floats:
    """For each of values [n] the largest of the `width` (odd) around it; fewer at the ends."""
    half = min(width // 2, len(values) - 1)  # one that reaches past both ends is as wide as any
    width = 2 * half + 1
    most = np.pad(values.astype(np.float32), half, constant_values=-np.inf)
    span = 1  # most[i] is the largest of `span` values from i on
    while 2 * span <= width:
        most = np.maximum(most[:-span], most[span:])
        span *= 2
    found: Floats = np.maximum(most[: len(values)], most[width - span :])
    return found
