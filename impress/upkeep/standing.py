"""A store's present state: what `PrefixStore.stats` says."""

from __future__ import annotations

from typing import Any

from impress.cache.copies import Copies
from impress.spans.tables import TableCache
from impress.stats import Counters
from impress.write.home import Home
from tiers.base import Usage


def standing(
    home: Home, copies: Copies, tables: TableCache, counters: Counters,
    leases: tuple[int, float], n_stuck: int,
) -> dict[str, Any]:  # fmt: skip
    """Counters since open, occupancy now. `leases`: how many, age of the oldest in seconds."""
    counts = home.catalog.counts()
    # A reader has no space of its own; what it found at open would pass for free.
    usage = {**copies.usage(), "ssd": home.ssd.usage() if home.shard_name else Usage(0, 0, 0)}
    important = {**copies.important_share(), "ssd": home.history.important_share()}
    return {
        **counts,
        "tokens": counts["windows"] * home.catalog.window,
        "tiers": {
            tier: {**use._asdict(), "important_share": important[tier]}
            for tier, use in usage.items()
        },
        "emulated": list(copies.emulated),
        "chunks": {**copies.held(), "ssd": counts["windows"] * home.n_layers},
        "dead_bytes": sum(dead.n_bytes for dead in home.catalog.own_dead()),
        "ssd_read_only": home.health.reason,
        "shard": home.shard_name,
        "other_shards": len(home.others.neighbours),
        "limbo_bytes": sum(r.owned_bytes for r in home.leaving.in_limbo),
        "writes_left_bytes": home.budget.left_bytes,
        "tables_bytes": tables.used_bytes,
        "stuck_threads": n_stuck,
        "leases": leases[0],
        "oldest_lease_s": leases[1],
        **counters.snapshot(),
        "guard": home.ledgers.snapshot(),
        "evictions": copies.evictions(),
        "direct_io": home.ssd.direct,
    }
