"""What one generate() call did: the numbers a caller may refuse an answer by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from impress.read.access import AccessReport
from impress.types import Geometry


@dataclass(frozen=True, slots=True)
class Request:
    """What one generate() call did. Bytes and rows are those of the prefix, by tier.

    The shares and masses are of the prefix that was reused, over its layers: 0 where none was.
    """

    n_tokens: int  # of the prompt, in each batch row
    hit_tokens: int  # taken from the store, in each batch row
    n_new: int  # generated
    mode: str  # "exact": a prefix was reused; "sparse": chosen rows of it; "recompute": none
    ttft_ms: float  # from the call to the first token's logits
    bytes_by_tier: dict[str, int]
    rows_by_tier: dict[str, int]
    per_layer: tuple[dict[str, Any], ...]  # layer by layer, one batch row after the other
    lost: str  # why a prefix that was found could not be read, "" when nothing was lost
    stored_tokens: int = 0  # accepted by the store so far; durable after engine.flush()
    refused: str = ""  # why the store did not take, or keep, all of the new part
    policy: str = "exact"  # the name of the policy asked for
    why: str = ""  # why the mode was taken, with the estimated cost of each
    guard: str = "off"  # what the guard said: "trusted", how much of that is earned, or why none is
    memory: str = "pooled"  # of its rows: "virtual", or "pooled" and why, if virtual was asked for
    chosen_rows_share: float = 0.0  # rows brought ÷ rows of the prefix
    fallback_share: float = 0.0  # layers whose identifier did not decide ÷ layers
    bytes_share: float = 0.0  # (chosen rows + what they were chosen by) ÷ exact's bytes
    transferred_share: float = 0.0  # bytes that moved, amplification included ÷ exact's bytes
    shared_bytes: int = 0  # of the SSD's: taken from reads under way for others, not read again
    ahead_bytes: int = 0  # of those that moved: read on a guess, before they were asked for
    estimated_missing_mass: float = 0.0  # of the worst layer; nan where a layer has no estimate
    missing_mass_worst_head: float = 0.0  # of the worst head of any layer; nan likewise


def totals(reports: Sequence[AccessReport], geometry: Geometry) -> dict[str, Any]:
    """The fields of a Request that sum up its reads; none without reports."""
    if not reports:
        return {"bytes_by_tier": {}, "rows_by_tier": {}, "per_layer": ()}
    n_tokens = reports[0].n_tokens
    lines = [dict(line) for report in reports for line in report.per_layer]
    exact_bytes = n_tokens * (geometry.k_row_bytes + geometry.v_row_bytes)
    n_layers = max(len(lines), 1)
    # A session that brings every row says nothing about choosing.
    chosen = sum(line.get("chosen", n_tokens) for line in lines)
    wanted = sum(line.get("wanted_bytes", exact_bytes) for line in lines)
    moved = sum(sum(line["bytes"].values()) for line in lines)
    return {
        "bytes_by_tier": _by_tier([report.bytes_by_tier for report in reports]),
        "rows_by_tier": _by_tier([report.rows_by_tier for report in reports]),
        "per_layer": tuple(lines),
        "chosen_rows_share": chosen / (n_layers * n_tokens),
        "fallback_share": sum(line.get("fell_back", False) for line in lines) / n_layers,
        "bytes_share": wanted / (n_layers * exact_bytes),
        "transferred_share": moved / (n_layers * exact_bytes),
        "shared_bytes": sum(report.shared_bytes for report in reports),
        "ahead_bytes": sum(line.get("ahead_bytes", 0) for line in lines),
        "estimated_missing_mass": _largest(lines, "estimated_missing_mass"),
        "missing_mass_worst_head": _largest(lines, "missing_mass_worst_head"),
    }


def _by_tier(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    tiers = {tier for count in counts for tier in count}
    return {tier: sum(count.get(tier, 0) for count in counts) for tier in sorted(tiers)}


def _largest(lines: Sequence[dict[str, Any]], name: str) -> float:
    """nan as soon as one layer's is, as the largest is then not known."""
    return float(np.max([line.get(name, 0.0) for line in lines])) if lines else 0.0
