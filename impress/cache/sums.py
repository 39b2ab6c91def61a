"""What a copy is compared with where all of it is wanted: one sum per plane, not one per piece.

    filled      xxh3_64(a plane's bytes) ^ key(sums of its pieces) ─kept─┐
    read whole  what its bytes must come to <─ key(sums of its pieces) ^ ┘

The sums of its pieces come from its span: bytes that are another chunk's come to something else.
Thousands of small digests cost more than copying the bytes: the interpreter is handed from
thread to thread for each (Llama-3-8B, pieces of 4 KiB, two cores: 11.5 and 19 GB/s, copied and
compared).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tiers.base import Bytes, Sums, digest

Ids = npt.NDArray[np.int64]


class CopySums:
    """The sum of each entry, by plane. Only code that fills or has pinned an entry may ask."""

    def __init__(self, capacity: int, planes: Iterable[int]) -> None:
        self._kept = {plane: np.zeros(capacity, dtype=np.uint64) for plane in planes}

    def keep(self, entry: int, plane: int, data: Bytes, pieces: Sums) -> None:
        """Note that these bytes are in the entry. `pieces`: the sums of their pieces, [pieces],
        that they have been compared with."""
        self._kept[plane][entry] = np.uint64(digest(data)) ^ _key(pieces[None])[0]

    def of(self, plane: int, entries: Ids, pieces: Sums) -> Sums:
        """What the bytes of each entry must come to, if it is the chunk whose pieces have these
        sums, [entries, pieces]."""
        return self._kept[plane][entries] ^ _key(pieces)


def _key(pieces: Sums) -> Sums:
    """One number for the sums of a chunk's pieces, [chunks, pieces], in this order."""
    weights = np.arange(1, 2 * pieces.shape[1], 2, dtype=np.uint64)
    return np.asarray((pieces * weights).sum(axis=1, dtype=np.uint64))
