"""Which of several caches, the fastest first, has a copy of a chunk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from impress.cache.chunks import ChunkCache, Ids

Levels = npt.NDArray[np.uint8]


def levels_of(entries: Sequence[Ids]) -> Levels:
    """For each chunk the first cache that has it; as many as there are caches: none has. Pure.

    `entries`: for each cache, of these chunks, -1 where it has no copy.
    """
    found = np.full(len(entries[0]), len(entries), dtype=np.uint8)
    for level in reversed(range(len(entries))):
        found[entries[level] >= 0] = level
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
