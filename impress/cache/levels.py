"""Which of several caches, the fastest first, has a copy of a chunk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from impress.cache.chunks import ChunkCache, Ids

Levels = npt.NDArray[np.uint8]


def levels_of(entries: Sequence[Ids]) -> Levels:
    """For each chunk, which cache is the first that has it; the number of caches: none has. Pure.

    `entries`: for each cache, its entries of these chunks, -1 where it has no copy.
    """
    absent = entries[0] < 0
    found = absent.view(np.uint8)
    for ids in entries[1:]:  # few and simple calls: a processor's caches have none of them by now
        absent = absent & (ids < 0)
        found = found + absent
    return found


def only_fastest(caches: Sequence[ChunkCache], entries: Sequence[Sequence[Ids]]) -> None:
    """A chunk being copied up may be in two caches for a moment, or for long where two requests
    that overlapped had it copied to both: give the slower one's pin back, and drop it.

    `entries[cache][part]`: as pinned, fastest cache first; those given back become -1.
    """
    for of_part in zip(*entries, strict=True):
        found = of_part[0] >= 0
        for cache, ids in zip(caches[1:], of_part[1:], strict=True):
            twice = found & (ids >= 0)
            if twice.any():
                cache.unpin(ids, twice, drop=True)
            found |= ids >= 0
