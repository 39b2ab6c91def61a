"""vLLM's order of giving blocks up: the one used longest ago, then the longest prefix. Pure.

In vLLM a request's blocks go to the end of a queue, last one first (vLLM V1's free queue, pull
request 9668); here the order is a key, so that a heap or a sort has it however they come.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: Longest prefix that is told apart, in the units of `end`: 67 million tokens in windows of 64.
_MOST: Final = 1 << 20


def prefix_lru(used: npt.ArrayLike, end: npt.ArrayLike) -> Floats:
    """How much each is worth keeping; the least goes first. One number, to be the key of a heap.

    `used`: a counter at the last use, exact below 2^33. `end`: where in its prompt it ends, in
    blocks or windows; what ends at or beyond 2^20 is taken to end there.
    """
    ends = np.minimum(np.asarray(end, dtype=np.float64), _MOST - 1)
    worth: npt.NDArray[Any] = np.asarray(used, dtype=np.float64) - ends / _MOST
    return worth
