"""What a session read: one line per layer, and their sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from impress.read.load import Load

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AccessReport:
    """What a session read. Rows are tokens of one layer; bytes as moved, padding included.

    `shared_bytes`: those of the SSD's bytes that came out of a read under way for another request.
    """

    policy: str
    n_tokens: int
    rows_by_tier: dict[str, int]
    bytes_by_tier: dict[str, int]
    shared_bytes: int
    wait_ms: float
    per_layer: list[Line] = field(default_factory=list)


def line_of(rows: Load, used: Sequence[Load], wait_ms: float, ahead_bytes: int = 0) -> Line:
    """A layer's line: `rows` is the load that brought its rows, `used` all loads made for it."""
    moved = {"ssd": ahead_bytes}  # some of these were read for nothing
    for load in used:
        for tier, n in load.bytes_by_tier.items():
            moved[tier] = moved.get(tier, 0) + n
    return {
        "layer": rows.layer,
        "rows": {tier: n for tier, n in rows.rows_by_tier.items() if n},
        "bytes": {tier: n for tier, n in moved.items() if n},
        "shared_bytes": sum(sum(load.shared) for load in used),
        "wait_ms": wait_ms,
        "map_ms": sum(load.map_spent.ms for load in used),
        "map_cpu_ms": sum(load.map_spent.cpu_ms for load in used),
        "map_beside_ms": sum(spent.ms for load in used for spent in load.found_spent),
    }


def report_of(policy: str, n_tokens: int, lines: list[Line]) -> AccessReport:
    """The report that sums up these lines."""
    total: dict[str, dict[str, int]] = {"rows": {}, "bytes": {}}
    for line in lines:
        for kind, by_tier in total.items():
            for tier, n in line[kind].items():
                by_tier[tier] = by_tier.get(tier, 0) + n
    shared_bytes = sum(line["shared_bytes"] for line in lines)
    wait_ms = sum(line["wait_ms"] for line in lines)
    return AccessReport(
        policy, n_tokens, total["rows"], total["bytes"], shared_bytes, wait_ms, lines
    )
