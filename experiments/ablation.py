"""What each of the paper's three techniques is worth: IMPRESS without each, and the best baseline
with one after the other (Fig 18).

    as_h2o_lfu ─identification→ …_identified ─reordering→ impress_no_caching ─caching→ impress

The three losses, each with one left out, sum to more than the whole gain: without identification
all keys are read, which at the median suits neither packed chunks nor caching by importance.

Compute is emulated (experiments/systems/clock.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from experiments.common import Row, print_rows
from experiments.harness import Cell, Experiment, Figures, Options, main
from experiments.systems.paired import say, shares_added, times
from experiments.systems.sizes import Verdict, arguments, checked, how, meta
from experiments.systems.sweep import Plan, by_cell, cell, check_cell, draw_p50, line

#: Technique -> IMPRESS without it.
WITHOUT: Final = {
    "identification": "impress_no_identification",
    "reordering": "impress_no_reordering",
    "caching": "impress_no_caching",
}
#: The same, added in the paper's order to the best of its baselines.
STEPS: Final = ("as_h2o_lfu", "as_h2o_lfu_identified", "impress_no_caching", "impress")
NAMES: Final = tuple(dict.fromkeys((*STEPS, *WITHOUT.values())))

#: Which time a share of the gain is taken from -> that share's name in the figures.
_SHARE: Final = {"p50_ms": "share", "mean_ms": "mean_share"}


def cells(options: Options) -> list[Cell]:
    verdict = Verdict(options)
    plan, n, shapes = Plan(options, verdict, NAMES), 100, ["opt-6.7b", "opt-13b", "opt-30b"]
    if options.quick:
        plan, n, shapes = Plan(options, verdict, NAMES, 24, 3), 40, ["opt-6.7b"]
    return [check_cell(verdict), *(cell(plan, shape, n, shape=shape) for shape in shapes)]


def figures(rows: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
    said, withdrawn = checked(rows)
    if withdrawn:
        return said, rows
    for label, systems in by_cell(rows).items():
        print_rows(f"{label}: {how(rows)}", [line(row) for row in systems.values()])
        whole = systems.get("impress")
        if whole is None:
            continue
        without = {name: systems[arm] for name, arm in WITHOUT.items() if arm in systems}
        for name, row in without.items():
            say(said, f"{label}.{name}.times", times(row, whole))
            say(said, f"{label}.{name}.mean_times", times(row, whole, "mean_ms"))
        if {"impress_no_identification", "as_h2o_lfu"} <= systems.keys():
            arm, base = systems["impress_no_identification"], systems["as_h2o_lfu"]
            for of in ("p50_ms", "mean_ms", "p90_ms"):  # the other two alone, on their baseline
                name = f"no_identification_{of.removesuffix('_ms')}_vs_as_h2o_lfu"
                say(said, f"{label}.{name}", times(arm, base, of))
        steps = [systems[arm] for arm in STEPS if arm in systems]
        for of in ("p50_ms", "mean_ms") if len(steps) == len(STEPS) else ():
            for name, share in zip(WITHOUT, shares_added(steps, of), strict=False):
                say(said, f"{label}.{name}.{_SHARE[of]}", share)
    return said, rows


EXPERIMENT: Final = Experiment(
    "ablation", "IMPRESS without each of its techniques.", cells, figures,
    {"p50": draw_p50}, arguments, meta, uses_disk=True,
)  # fmt: skip


def run(argv: Sequence[str] | None = None) -> int:
    return main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(run())
