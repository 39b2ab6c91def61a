"""Larger and smaller models, and more data for the same caches (Figs 16, 24, 25).

IMPRESS, its best baseline, recomputing and int4 of everything, by model and by the ratio of data to
HBM + DRAM. Compute is emulated (experiments/systems/clock.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

from experiments.common import Row, print_rows
from experiments.harness import Cell, Experiment, Figures, Options, main
from experiments.systems.paired import say, times
from experiments.systems.sizes import Verdict, arguments, checked, how, meta
from experiments.systems.sweep import Plan, by_cell, cell, check_cell, line

NAMES: Final = ("recompute", "as_h2o_lfu", "impress", "as_int4", "quality")
SHAPES: Final = {
    False: ("opt-6.7b", "opt-13b", "opt-30b", "llama-3-8b"), True: ("opt-30b", "llama-3-8b"),
}  # fmt: skip
RATIOS: Final = {False: (65, 260, 400), True: (400,)}


def cells(options: Options) -> list[Cell]:
    verdict = Verdict(options)
    quick = options.quick
    plan, n = Plan(options, verdict, NAMES), 100
    if quick:
        plan, n = Plan(options, verdict, NAMES, 16, 2), 40
    planned = [check_cell(verdict)]
    planned += [cell(plan, shape, n, shape=shape) for shape in SHAPES[quick]]
    planned += [cell(plan, f"10:32:{data}", n, ratio=data) for data in RATIOS[quick]]
    return planned


def figures(rows: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
    said, withdrawn = checked(rows)
    if withdrawn:
        return said, rows
    for label, systems in by_cell(rows).items():
        print_rows(f"{label}: {how(rows)}", [line(row) for row in systems.values()])
        one = systems.get("impress")
        for other in ("recompute", "as_h2o_lfu", "as_int4"):
            if one and other in systems:
                say(said, f"{label}.p50_vs_{other}", times(systems[other], one))
    return said, rows


def draw(figure: Any, _said: Figures, rows: list[Row]) -> None:
    """p50 by cell, one line a system."""
    axes = figure.subplots()
    found = by_cell(rows)
    for name in NAMES:
        cells_of = {label: systems[name] for label, systems in found.items() if name in systems}
        axes.plot(list(cells_of), [row["p50_ms"] for row in cells_of.values()], "o-", label=name)
    axes.set_ylabel(f"p50, ms (slice of the layers, {how(rows)})")
    axes.set_yscale("log")
    axes.legend()


EXPERIMENT: Final = Experiment(
    "scale", "By model and by how much data there is to the caches.", cells,
    figures, {"p50": draw}, arguments, meta, uses_disk=True,
)  # fmt: skip


def run(argv: Sequence[str] | None = None) -> int:
    return main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(run())
