"""The systems compared, as data: what each reads, how it chooses, what its caches evict first.

All are served by the same sessions, threads, caches and checksums, with keys and values apart.
Features that the paper's baselines lack are off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from impress.policy import AllHeads, Contiguous, Exact, Pages, Paper, Policy, Quality, SnapWindow

#: Our own selector, as it is by default.
OURS: Final = Quality()

#: The most bytes of a layer that some systems read ahead: about what a quarter of its rows takes.
AHEAD: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class System:
    """`data`: which of the data sets it reads ("" none: it recomputes). `bits`: of quantised rows.

    `prefetch_bytes`: most of a layer's rows read ahead.
    """

    name: str
    about: str
    data: str = "plain"
    policy: Policy | None = None
    eviction: str = "lru"
    bits: int = 16
    auto: bool = False
    prefetch_bytes: int = 0


def systems(keep: float = 0.25) -> tuple[System, ...]:
    """All systems; those that keep a share of the rows keep this one."""
    h2o, paper = AllHeads(keep), Paper(keep)
    return (
        System("recompute", "ReComp: no store", data=""),
        System("as", "AS: everything, LRU", policy=Exact()),
        System("as_h2o_lru", "AS+H2O+LRU: all keys, then chosen values", policy=h2o),
        System("as_h2o_lfu", "AS+H2O+LFU", policy=h2o, eviction="lfu"),
        System("impress", "IMPRESS: identification, reordering, caching", "packed", paper,
               "importance"),
        System("impress_no_identification", "IMPRESS that reads all keys to choose", "packed", h2o,
               "importance"),
        System("impress_no_reordering", "IMPRESS with rows in position order", "plain", paper,
               "importance"),
        System("impress_no_caching", "IMPRESS with LFU", "packed", paper, "lfu"),
        System("contiguous", "ContiguousKV-like: 16-token units, periods of layers", "plain",
               Contiguous(keep), "importance"),
        System("as_int8", "AS-int8: everything in 8 bits", "int8", Exact(), "lfu", bits=8),
        System("as_int4", "AS-int4: everything in 4 bits", "int4", Exact(), "lfu", bits=4),
        System("quest", "Quest: pages", "paged", Pages(keep), "lfu"),
        System("snapkv", "SnapKV: the prompt's last window", "plain", SnapWindow(keep), "lfu"),
        System("quality", "impress: chosen by a sketch of all heads", "sketched", OURS,
               "importance"),
        System("exact", "impress: everything, of prefixes that no rows are chosen from", "plain",
               Exact(), "importance"),
        System("exact_packed", "impress: everything, of prefixes that rows are chosen from",
               "sketched", Exact(), "importance"),
        System("auto", "impress: chosen, or everything, or recomputed", "sketched", OURS,
               "importance", auto=True),
    )  # fmt: skip


def reading_ahead(keep: float = 0.25) -> tuple[System, ...]:
    """Three systems that read the next layer's rows ahead, included only where asked for by name:
    none is faster that way (experiments.prefetch)."""
    plain = {system.name: system for system in systems(keep)}
    return tuple(
        replace(plain[name], name=f"{name}_prefetch", about=f"{name} that reads ahead",
                prefetch_bytes=AHEAD)
        for name in ("impress", "quality", "contiguous")
    )  # fmt: skip


def identified(keep: float = 0.25) -> System:
    """The best of the paper's baselines with the first of the paper's techniques and no other,
    included only where asked for by name (experiments.ablation)."""
    return System("as_h2o_lfu_identified", "AS+H2O+LFU that reads three heads' keys to choose",
                  policy=Paper(keep), eviction="lfu")  # fmt: skip


#: The systems of the paper's own figures.
PAPERS: Final = ("recompute", "as", "as_h2o_lru", "as_h2o_lfu", "impress")


def chosen(names: Sequence[str] | None, keep: float = 0.25) -> list[System]:
    """Systems by name, None for `systems`."""
    every = systems(keep)
    known = {system.name: system for system in (*every, *reading_ahead(keep), identified(keep))}
    return [known[name] for name in names or [system.name for system in every]]


def choosing(some: Sequence[System]) -> list[Policy]:
    """Policies by which these systems choose rows, each once."""
    policies = dict.fromkeys(system.policy for system in some)
    return [policy for policy in policies if policy is not None and policy.name != "exact"]
