"""What chunks are worth to a cache that evicts by rank, under `Config.eviction`.

    importance: uses × share of rows that requests needed (history.py)
    lfu:        uses alone, remembered like these: even while a chunk is in no cache
    prefix-lru: the last request that used it, then where in the prompt it lies (prefix_lru.py)

All count time in requests noted, never by a clock.
"""

from __future__ import annotations

import numpy as np

from impress.cache.chunks import Ids, Ranks
from impress.read.parts import Source
from impress.read.reading import Reading
from impress.usage.notes import Worth
from impress.usage.prefix_lru import prefix_lru
from impress.usage.remembered import HALF_LIFE


def judge(reading: Reading, source: Source, layer: int, used: Ids) -> Worth:
    """Tell every cache what the chunks of a layer are worth now.

    `used`: chunks of the span that the last request noted has used. Where nothing is known, because
    the span is too large for history, that use is all they are judged by.
    """
    by_uses = reading.config.eviction == "lfu"
    worth = reading.history.worth(source.span, layer, _ordinals(source, layer), by_uses=by_uses)
    if reading.config.eviction == "prefix-lru":
        ranks = np.full(source.held.record.n_windows, np.nan)  # what was not used stays as it was
        ranks[used] = _by_prefix(source, used, reading.history.tick)
        worth = Worth(ranks, None if worth is None else worth.shares)
    elif worth is None:
        ranks = np.full(source.held.record.n_windows, np.nan)
        ranks[used] = reading.history.tick / HALF_LIFE
        worth = Worth(ranks, None)
    for cache in reading.copies.chunks:
        cache.judge(source.span, layer, worth.ranks, worth.shares)
    return worth


def ranks_if_used(reading: Reading, source: Source, layer: int, used: Ids) -> Ranks:
    """The ranks of these chunks of a span once this request's use of them has been noted."""
    if reading.config.eviction == "prefix-lru":
        return _by_prefix(source, used, reading.history.tick + 1)
    n_chunks = source.held.record.n_windows
    ranks = reading.history.ranks_if_used(
        source.span, layer, n_chunks, used, _ordinals(source, layer),
        by_uses=reading.config.eviction == "lfu",
    )  # fmt: skip
    return ranks[used]


def _by_prefix(source: Source, chunks: Ids, tick: int) -> Ranks:
    return prefix_lru(tick, source.held.record.first_window + chunks + 1)


def _ordinals(source: Source, layer: int) -> Ids | None:
    """Where every row of the span lies; None: in position order."""
    if source.order is None:
        return None
    record = source.held.record
    return source.ordinals(layer, np.arange(record.n_windows * record.window))
