"""Chosen rows that lie in memory, one to a piece: from a cache to where the caller sees them.

    wanted rows ─┬─ of chunks that a cache has ─pieces→ their places among the rows given
                 └─ of all others: left for `gather`, from home, in runs and through a buffer

Rows of home are read with their neighbours, and so through a buffer; memory has no use for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from impress.cache.chunks import ChunkCache, Ids
from impress.read.parts import Part, Positions
from impress.read.placement import levels_of
from impress.read.plan import pieces_of
from tiers.base import Bytes, Pieces


@dataclass(frozen=True, slots=True)
class Mine:
    """Rows of a part, by ordinal, that the cache of this level has; `to`: among all wanted."""

    part: int
    level: int
    ordinals: Positions
    to: Positions


@dataclass(frozen=True, slots=True)
class Direct:
    """`mine`: what comes from memory. `left`: the parts, with only those rows that home has to
    give; `at`: where these go, among all wanted rows."""

    mine: list[Mine]
    left: list[Part]
    at: Positions


def divided(parts: Sequence[Part], entries: Sequence[Sequence[Ids]]) -> Direct:
    """Wanted rows by who has them. `entries[cache][part]`: of its chunks, -1 where it has none.

    Pure.
    """
    mine: list[Mine] = []
    left: list[Part] = []
    home: list[Positions] = []
    begin = 0
    for i, part in enumerate(parts):
        assert part.ordinals is not None, "all rows are not chosen rows"
        levels = levels_of([by_part[i] for by_part in entries])
        window = part.source.held.record.window
        of_row = levels[part.ordinals // window] if part.count else np.empty(0, dtype=np.int64)
        for level in range(len(entries)):
            at = np.flatnonzero(of_row == level)
            if len(at):
                mine.append(Mine(i, level, part.ordinals[at], begin + at))
        at = np.flatnonzero(of_row == len(entries))
        left.append(replace(part, ordinals=part.ordinals[at]))
        home.append(begin + at)
        begin += len(part.ordinals)
    return Direct(mine, left, np.concatenate(home))


def copies_of(
    direct: Direct, parts: Sequence[Part], entries: Sequence[Sequence[Ids]], layer: int,
    planes: Sequence[int], caches: Sequence[ChunkCache], dests: Sequence[Bytes],
) -> dict[str, list[tuple[Part, Pieces]]]:  # fmt: skip
    """By tier, what is copied into `dests`: a plane's wanted rows, in order."""
    found: dict[str, list[tuple[Part, Pieces]]] = {cache.tier.name: [] for cache in caches}
    for one in direct.mine:
        part, cache = parts[one.part], caches[one.level]
        for plane, dest in zip(planes, dests, strict=True):
            mine = entries[one.level][one.part]
            pieces = pieces_of(part, layer, plane, one.ordinals, one.to, cache, mine, dest)
            found[cache.tier.name].append((part, pieces))
    return found
