"""Time to the first token of every system on the same requests, request by request.

A base cell, then one factor varied at a time. Compute is emulated (experiments/systems/clock.py):
the emulator is checked first where compute is real, and withdrawn where it is off.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from experiments.common import Row, console, print_rows
from experiments.harness import Cell, Experiment, Figures, Options, main
from experiments.systems.catalogue import chosen, lacking
from experiments.systems.cell import Load, run_bench
from experiments.systems.generate import Knobs
from experiments.systems.sizes import (
    Verdict,
    arguments,
    checked,
    data_of,
    dilation,
    meta,
    n_prefixes,
)

BASE: Final[dict[str, Any]] = {
    "shape": "opt-6.7b", "ratio": 130, "zipf": 0.9, "agreement": Knobs().agreement,
}  # fmt: skip
#: One factor at a time; None: prefixes in turn, shuffled.
VARIED: Final[dict[str, tuple[Any, ...]]] = {
    "ratio": (65, 260, 400),
    "zipf": (0.6, 1.2, None),
    "shape": ("opt-13b", "opt-30b", "llama-3-8b"),
    "agreement": (0.95, 0.6, 0.45, 0.3, 0.1),
}
#: Requests measured in the base cell (1,000 and more give a p99) and in the others.
N_BASE: Final = {False: 1000, True: 40}
N_OTHER: Final = 40
#: Seconds a system takes for one request, about, and for writing one prefix in every form.
_REQUEST_S: Final = 0.12
_PREFIX_S: Final = 6.0


def cells(options: Options) -> list[Cell]:
    verdict = Verdict(options)
    planned = [Cell({"part": "check"}, verdict.check, 20.0)]
    factors = [("base", BASE)]
    if not options.quick:
        factors += [
            (f"{name} {value}", {**BASE, name: value})
            for name, values in VARIED.items() for value in values
        ]  # fmt: skip
    for label, factor in factors:
        n = N_BASE[options.quick] if label == "base" else N_OTHER
        measure = partial(_measure, options, verdict, factor, n)
        planned.append(
            Cell({"part": "ttft", "cell": label, **factor}, measure, _seconds(options, factor, n))
        )
    return planned


def _seconds(options: Options, factor: Row, n: int) -> float:
    systems = len(chosen(None))
    prefixes = n_prefixes(factor["shape"], factor["ratio"], systems, quick=options.quick)
    return prefixes * _PREFIX_S + (n + 100) * systems * _REQUEST_S


def _measure(options: Options, verdict: Verdict, factor: Row, n: int) -> list[Row]:
    if verdict.withdrawn:
        return []
    torch.set_num_threads(1)
    systems = chosen(None)
    knobs = Knobs(agreement=factor["agreement"])
    # Rows on disk do not depend on how much heads agree; the order they were packed in does.
    data = data_of(options, factor["shape"], factor["ratio"], len(systems), knobs)
    load = Load(factor["ratio"], factor["zipf"], knobs, n, seed=options.seed)
    if options.quick:
        load = Load(factor["ratio"], factor["zipf"], knobs, n, 32, 3, options.seed)
    rows = list(run_bench(systems, data, load, dilation(options)))
    return [{**row, "prefixes": len(data.prefixes), "layers": data.n_layers} for row in rows]


def figures(rows: list[Row], options: Options) -> tuple[Figures, list[Row]]:
    for name, why in lacking().items():
        console.print(f"{name}: not available ({why})")
    said, withdrawn = checked(rows)
    if withdrawn:
        return said, rows
    measured = [row for row in rows if row["part"] == "ttft"]
    by_cell: dict[str, dict[str, Row]] = {}
    for row in measured:
        by_cell.setdefault(row["cell"], {})[row["system"]] = row
    for label, systems in by_cell.items():
        print_rows(
            f"{label}: ms to the first token, compute emulated",
            [_line(r) for r in systems.values()],
        )
    base = by_cell.get("base", {})
    for name, (one, other, what) in _RATIOS.items():
        if one in base and other in base:
            said[name] = _ratio(base[other][what], base[one][what])
    worst = [found for systems in by_cell.values() if (found := _worst(systems)) is not None]
    if worst:
        said["worst_vs_best_of_three"] = max(worst)
    for row in base.values():
        if "p99_ms" in row:
            said[f"p99_ms.{row['system']}"] = row["p99_ms"]
    if "impress" in base:
        said["fallback_share"] = base["impress"]["fell_back"]
    return said, rows


#: figure -> (system, the one it is set against, of what): how many times less the first takes.
_RATIOS: Final = {
    "p50_vs_as_h2o_lfu": ("impress", "as_h2o_lfu", "p50_ms"),
    "p50_vs_recompute": ("impress", "recompute", "p50_ms"),
    "p50_vs_as_int4": ("impress", "as_int4", "p50_ms"),
    "io_time_vs_as_h2o_lfu": ("impress", "as_h2o_lfu", "io_ms"),
    "quality_p50_vs_paper": ("quality", "impress", "p50_ms"),
}


def _ratio(other: float, one: float) -> float:
    return float(other / one) if one else float("inf")


def _worst(systems: dict[str, Row]) -> float | None:
    """The chosen mode's time over the best of recomputing, exact and sparse."""
    rivals = [systems[name]["p50_ms"] for name in ("recompute", "exact", "quality")
              if name in systems]  # fmt: skip
    if "auto" not in systems or len(rivals) < 3:
        return None
    return float(systems["auto"]["p50_ms"] / min(rivals))


def _line(row: Row) -> Row:
    return {
        "system": row["system"],
        "p50 [95 %]": f"{row['p50_ms']:.1f} [{row['p50_low']:.1f}, {row['p50_high']:.1f}]",
        "p90": row["p90_ms"], "p99": row.get("p99_ms", ""), "I/O": row["io_ms"],
        "waits": row["emulated_ms"], "MB": row["mb"], "SSD MB": row["ssd_mb"],
        "HBM": f"{row['hbm']:.2f}", "DRAM": f"{row['dram']:.2f}", "rows": f"{row['rows']:.2f}",
        "fell back": f"{row['fell_back']:.2f}",
    }  # fmt: skip


# ---- plots -------------------------------------------------------------------------------------


def draw_systems(figure: Any, _figures: Figures, rows: list[Row]) -> None:
    """p50 of every system in the base cell, split into reads and the rest."""
    base = [row for row in rows if row.get("cell") == "base"]
    axes = figure.subplots()
    names = [row["system"] for row in base]
    axes.barh(names, [row["p50_ms"] for row in base], color="#9bb8d3", label="p50")
    axes.barh(names, [row["io_ms"] for row in base], color="#2f5d8a", height=0.4, label="I/O")
    axes.invert_yaxis()
    axes.set_xlabel("ms to the first token (slice of the layers, compute emulated)")
    axes.legend()


def draw_fallback(figure: Any, _figures: Figures, rows: list[Row]) -> None:
    """IMPRESS against its rivals, over the share of layers that really fell back."""
    cells = [row for row in rows if row.get("part") == "ttft"
             and (row["cell"] == "base" or row["cell"].startswith("agreement"))]  # fmt: skip
    axes = figure.subplots()
    share = {row["cell"]: row["fell_back"] for row in cells if row["system"] == "impress"}
    for name in ("recompute", "as_h2o_lfu", "impress", "as_int4", "quality"):
        points = sorted((share[row["cell"]], row["p50_ms"]) for row in cells
                        if row["system"] == name and row["cell"] in share)  # fmt: skip
        if points:
            x, y = np.array(points).T
            axes.plot(x, y, marker="o", label=name)
    axes.axvspan(0, 0.2, alpha=0.12, color="green", label="the paper's: under 20 %")
    axes.axvspan(0.8, 0.96, alpha=0.12, color="red", label="trained small models': 80-96 %")
    axes.set_xlim(0, 1)
    axes.set_xlabel("measured share of layers that fell back")
    axes.set_ylabel("p50, ms (compute emulated)")
    axes.legend()


EXPERIMENT: Final = Experiment(
    "ttft", "Time to the first token, all systems interleaved; compute emulated.", cells, figures,
    {"systems": draw_systems, "fallback": draw_fallback}, arguments, meta, uses_disk=True,
)  # fmt: skip


def run(argv: Sequence[str] | None = None) -> int:
    return main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(run())
