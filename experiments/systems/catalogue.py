"""The systems compared, as data: what each reads, how it chooses, what goes first from its caches.

All are served by the same sessions, threads, caches and checksums, with keys and values apart. What
the paper's baselines lack is off. One whose parts this version lacks is named and left out.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from impress.config import Config
from impress.errors import ConfigError
from impress.policy import AllHeads, Exact, Paper, Policy, Quality

#: Our own selector, as it is by default.
OURS: Final = Quality()

#: Of those that read ahead: most bytes of a layer, about what a quarter of its rows takes.
AHEAD: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class System:
    """`data`: which of the data sets it reads ("" none: it recomputes). `bits`: of quantised rows.

    `prefetch_bytes`: most of a layer's rows read ahead. `lacks`: why it cannot run here, "" where
    it can.
    """

    name: str
    about: str
    data: str = "plain"
    policy: Policy | None = None
    eviction: str = "lru"
    bits: int = 16
    auto: bool = False
    prefetch_bytes: int = 0
    lacks: str = ""


def _policy(name: str, *arguments: Any) -> tuple[Policy | None, str]:
    """A policy of impress by name, and what is lacking where there is none."""
    kind = getattr(importlib.import_module("impress.policy"), name, None)
    return (kind(*arguments), "") if kind else (None, f"no policy {name}")


def _eviction(name: str) -> str:
    try:
        Config(eviction=name)
    except ConfigError:
        return f"no eviction {name!r}"
    return ""


def _reordering() -> str:
    found = importlib.util.find_spec("impress.spans.order")
    return "" if found else "rows cannot be reordered"


def systems(keep: float = 0.25) -> tuple[System, ...]:
    """All of them, for systems that keep this share of the rows."""
    h2o, paper = AllHeads(keep), Paper(keep)
    pages, no_pages = _policy("Pages", keep)
    window, no_window = _policy("SnapWindow", keep)
    contiguous, no_contiguous = _policy("Contiguous", keep)
    worth, order = _eviction("importance"), _reordering()
    best = "lru" if worth else "importance"
    return (
        System("recompute", "ReComp: no store", data=""),
        System("as", "AS: everything, LRU", policy=Exact()),
        System("as_h2o_lru", "AS+H2O+LRU: all keys, then chosen values", policy=h2o),
        System("as_h2o_lfu", "AS+H2O+LFU", policy=h2o, eviction="lfu"),
        System("impress", "IMPRESS: identification, reordering, caching", "packed", paper,
               "importance", lacks=worth or order),
        System("impress_no_identification", "IMPRESS that reads all keys to choose", "packed", h2o,
               "importance", lacks=worth or order),
        System("impress_no_reordering", "IMPRESS with rows in position order", "plain", paper,
               "importance", lacks=worth),
        System("impress_no_caching", "IMPRESS with LRU", "packed", paper, "lru", lacks=order),
        System("contiguous", "ContiguousKV-like: 16-token units, periods of layers", "plain",
               contiguous, "importance", lacks=no_contiguous or worth),
        System("as_int8", "AS-int8: everything in 8 bits", "int8", Exact(), bits=8),
        System("as_int4", "AS-int4: everything in 4 bits", "int4", Exact(), bits=4),
        System("quest", "Quest: pages", "paged", pages, lacks=no_pages),
        System("snapkv", "SnapKV: the prompt's last window", "plain", window, lacks=no_window),
        System("quality", "impress: chosen by a sketch of all heads", "sketched", OURS, best),
        System("exact", "impress: everything", "sketched", Exact(), best),
        System("auto", "impress: chosen, or everything, or recomputed", "sketched", OURS, best,
               auto=True),
    )  # fmt: skip


def reading_ahead(keep: float = 0.25) -> tuple[System, ...]:
    """Two of them that read the next layer's rows ahead; only where they are asked for by name."""
    plain = {system.name: system for system in systems(keep)}
    return tuple(
        replace(plain[name], name=f"{name}_prefetch", about=f"{name} that reads ahead",
                prefetch_bytes=AHEAD)
        for name in ("impress", "quality")
    )  # fmt: skip


#: The systems of the paper's own figures.
PAPERS: Final = ("recompute", "as", "as_h2o_lru", "as_h2o_lfu", "impress")


def chosen(names: Sequence[str] | None, keep: float = 0.25) -> list[System]:
    """Systems by name, None for `systems`: those that can run here."""
    every = systems(keep)
    known = {system.name: system for system in (*every, *reading_ahead(keep))}
    wanted = names or [system.name for system in every]
    return [known[name] for name in wanted if not known[name].lacks]


def lacking(names: Sequence[str] | None = None) -> dict[str, str]:
    """Systems that cannot run here, and why."""
    return {s.name: s.lacks for s in systems() if s.lacks and (names is None or s.name in names)}
