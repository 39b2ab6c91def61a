"""How much of what is wanted is in the fast tiers, by eviction: LRU, LFU, importance (Fig 21).

The paper's identifier over packed rows; three evictions on the same requests; by bytes, rows and
chunks. Hit rates do not depend on compute: nothing is waited for, and only HBM is emulated.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch

from experiments.common import Row, print_rows
from experiments.harness import Cell, Experiment, Figures, Options, main
from experiments.systems.catalogue import System
from experiments.systems.cell import Bench, Load, hit_rate, row_hit_rate
from experiments.systems.generate import Knobs
from experiments.systems.sizes import data_of
from experiments.systems.sweep import BASE
from impress.policy import Paper

EVICTIONS: Final = ("lru", "lfu", "importance")


def cells(options: Options) -> list[Cell]:
    ratios = [130] if options.quick else [65, 130, 260, 400]
    return [
        Cell({"ratio": ratio, "zipf": zipf}, partial(measure, options, ratio, zipf), 90.0)
        for ratio in ratios for zipf in ([0.9] if options.quick else [0.6, 0.9, 1.2])
    ]  # fmt: skip


def measure(options: Options, ratio: int, zipf: float) -> list[Row]:
    torch.set_num_threads(1)
    systems = [System(name, name, "packed", Paper(0.25), name) for name in EVICTIONS]
    data = data_of(options, BASE["shape"], ratio, len(systems) + 6, Knobs())
    n, windows = (60, 3) if options.quick else (200, 6)
    load = Load(ratio, zipf, Knobs(), n, 32, windows, options.seed)
    with Bench(systems, data, load, 0.0) as bench:
        bench.warm()
        before = {s.system.name: _chunks(s.store) for s in bench.servers}
        found = bench.measure()
        after = {s.system.name: _chunks(s.store) for s in bench.servers}
    rows = []
    for name, served in found.items():
        chunks = {tier: n - before[name].get(tier, 0) for tier, n in after[name].items()}
        total = sum(chunks.values())
        rows.append({
            "eviction": name, "n": len(served), **bench.warmed[name]._asdict(),
            **{f"{tier}_bytes": hit_rate(served, tier) for tier in ("hbm", "dram")},
            **{f"{tier}_rows": row_hit_rate(served, tier) for tier in ("hbm", "dram")},
            **{f"{tier}_chunks": chunks.get(tier, 0) / total if total else None
               for tier in ("hbm", "dram")},
        })  # fmt: skip
    return rows


def _chunks(store: Any) -> dict[str, int]:
    """Chunks that requests wanted so far, by where they were."""
    counts: dict[str, int] = store.counters.grouped("chunks_from")
    return counts


def figures(rows: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
    print_rows("Share of what was wanted that was in each tier", rows)
    said: Figures = {}
    for row in rows:
        if (row["ratio"], row["zipf"]) == (130, 0.9):
            name = row["eviction"]
            said[f"hbm_hit_{name}"] = row["hbm_rows"]
            said[f"dram_hit_{name}"] = row["dram_rows"]
            if row["hbm_chunks"] is not None:
                said[f"hbm_chunk_hit_{name}"] = row["hbm_chunks"]
    return said, rows


def draw(figure: Any, _said: Figures, rows: list[Row]) -> None:
    """HBM and DRAM hit rates by eviction."""
    axes = figure.subplots()
    base = [row for row in rows if (row["ratio"], row["zipf"]) == (130, 0.9)]
    names = [row["eviction"] for row in base]
    hbm = [row["hbm_rows"] for row in base]
    axes.bar(names, hbm, label="HBM (emulated)")
    axes.bar(names, [row["dram_rows"] for row in base], bottom=hbm, label="DRAM")
    axes.set_ylabel("share of the rows wanted")
    axes.set_ylim(0, 1)
    axes.legend()


EXPERIMENT: Final = Experiment(
    "hits", "Hit rates of the fast tiers by eviction.", cells, figures, {"hits": draw},
    meta=lambda _options: {"hbm": "emulated in host memory"},
)  # fmt: skip


def run(argv: Sequence[str] | None = None) -> int:
    return main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(run())
