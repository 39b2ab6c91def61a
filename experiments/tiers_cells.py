"""What experiments.tiers is made of: one directory opened for each tier, and cells in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

import impress
from experiments.common import Unable, console

TIERS: Final = ("hbm", "dram", "ssd")
SHOWN: Final = {"hbm": "hbm (emulated)", "dram": "dram", "ssd": "ssd"}
PROBES: Final = ("heads3-v1", "int4-v2")
WARM_S: Final = 60.0

Cells = dict[str, Callable[[], Any]]


@dataclass(slots=True)
class Samples:
    """What the rounds of one cell gave."""

    ms: list[float] = field(default_factory=list)
    gb_s: list[float] = field(default_factory=list)
    moved: int = 0  # bytes of one request
    rows_share: float = 1.0


def budgets(tier: str, n_bytes: int) -> dict[str, Any]:
    """Settings that let a prefix set of n_bytes live in this tier, with its probe records."""
    dram = 0 if tier == "ssd" else 2 * n_bytes
    hbm = 2 * n_bytes if tier == "hbm" else 0
    return {"dram_bytes": dram, "hbm_bytes": hbm, "hbm_device": "cpu"}


@contextmanager
def opened(
    path: Path, geometry: impress.Geometry, namespace: str | bytes, n_bytes: int
) -> Iterator[dict[str, impress.PrefixStore]]:
    """The same directory opened read-only, once for each tier."""
    with ExitStack() as closing:
        yield {
            tier: closing.enter_context(impress.PrefixStore.open(
                path, geometry, namespace,
                impress.Config(probes=PROBES, mode="sparse", **budgets(tier, n_bytes)), mode="r",
            ))
            for tier in TIERS
        }  # fmt: skip


def warm(tier: str, request: Callable[[], dict[str, int]]) -> None:
    """Repeat a request until all its rows come from the tier. Raises Unable when they never do."""
    deadline = time.monotonic() + WARM_S
    while set(rows := request()) != {tier}:
        if time.monotonic() > deadline:
            raise Unable(f"{tier}: not warm after {WARM_S:g} s, rows come from {rows}")
        time.sleep(0.01)  # promotions go on after the request


def rotated(cells: Cells, rounds: int, seed: int) -> None:
    """Run every cell once a round, in an order drawn for each round."""
    order = np.random.default_rng(seed)
    for at in range(rounds):
        for i in order.permutation(len(cells)).tolist():
            list(cells.values())[i]()
        if at and at % 10 == 0:
            console.print(f"{at} of {rounds} rounds")
