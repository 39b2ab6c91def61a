"""Time to the first token of every system on the same requests, request by request.

A base cell, then one factor varied at a time. Where a CUDA device can be used compute is real
(experiments/systems/cuda.py). Elsewhere it is emulated (experiments/systems/clock.py): the emulator
is checked first where compute is real, and withdrawn where it is off.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from experiments.common import Row, Unable, check_once, console, print_rows
from experiments.harness import Cell, Experiment, Figures, Options, main
from experiments.systems.catalogue import chosen
from experiments.systems.paired import say, times, worst_of, worst_without_one
from experiments.systems.sizes import Verdict, arguments, checked, how, is_real, meta
from experiments.systems.sweep import Plan, by_cell, cell, check_cell, line, ratio

#: One factor at a time. in_a_row: requests with no pause between them, in which the work one leaves
#: behind could end before the next. zipf None: prefixes in turn, shuffled. Both take the base
#: cell's data, and so come first.
VARIED: Final[dict[str, tuple[Any, ...]]] = {
    "in_a_row": (8,),
    "zipf": (0.6, 1.2, None),
    "ratio": (65, 260, 400),
    "shape": ("opt-13b", "opt-30b", "llama-3-8b"),
    "agreement": (0.95, 0.6, 0.45, 0.3, 0.1),
}
#: Requests measured in the base cell (1,000 and more give a p99) and in the others. In a row: more,
#: since a slow one delays those after it, and what is chosen depends on what was seen.
N_BASE: Final = {False: 1000, True: 40}
N_IN_A_ROW: Final = {False: 200, True: 40}
N_OTHER: Final = {False: 100, True: 40}


def cells(options: Options) -> list[Cell]:
    verdict = Verdict(options)
    names = _names(options)
    plan = Plan(options, verdict, names)
    if options.quick:
        plan = Plan(options, verdict, names, n_warm=24, most_windows=3)
    few = options.quick and not is_real(options)  # a device has time for all of them
    varied = {"in_a_row": VARIED["in_a_row"]} if few else VARIED
    n_of = {"in_a_row": N_IN_A_ROW[options.quick]}
    asked = _requests(options)
    only: Row = {}
    if (prefixes := getattr(options.more, "prefixes", None)) is not None:
        if prefixes < 2:
            raise Unable(f"--prefixes: at least 2 are asked for in turn, got {prefixes}")
        only["asked_prefixes"] = prefixes
    if (layers := getattr(options.more, "layers", None)) is not None:
        if layers < 1:
            raise Unable(f"--layers: at least 1, got {layers}")
        only["asked_layers"] = layers
    planned: list[tuple[str, int, Row]] = [("base", asked or N_BASE[options.quick], {})]
    for name, values in varied.items():
        n = asked or n_of.get(name, N_OTHER[options.quick])
        if name == "in_a_row":  # whole rows
            n += -n % max(values)
        planned += [(f"{name} {value}", n, {name: value}) for value in values]
    found, left_out = [check_cell(verdict)], list[tuple[str, Unable]]()
    for label, n, factors in planned:
        try:
            found.append(cell(plan, label, n, **factors, **only))
        except Unable as err:
            left_out.append((label, err))
    if len(left_out) == len(planned):
        raise left_out[0][1]
    for label, why in left_out:
        console.print(f"{label} is left out: {why}")
    return found


def _arguments(parser: argparse.ArgumentParser) -> None:
    arguments(parser)
    parser.add_argument("--systems", metavar="A,B", help="only these, by name (default: all)")
    parser.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="measured of each system in every cell, 40 at least (default: 1,000 in the "
        "base cell, 100 or 200 in others; 40 with --quick)",
    )
    parser.add_argument(
        "--prefixes",
        type=int,
        metavar="N",
        help="in every cell (default: 4 to 24, as many as fit the machine with these systems; "
        "2 to 24 where --layers are more than by default)",
    )
    parser.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="of each model (default: 4; 2 with --quick)",
    )


def _requests(options: Options) -> int | None:
    """How many were asked for. Raises Unable for too few."""
    asked: int | None = getattr(options.more, "requests", None)
    if asked is not None and asked < N_OTHER[True]:
        raise Unable(
            f"--requests: at least {N_OTHER[True]}, or percentiles say little; got {asked}"
        )
    return asked


def _names(options: Options) -> tuple[str, ...] | None:
    """The systems asked for, None for all. Raises Unable for one that does not exist."""
    asked = getattr(options.more, "systems", None)
    if asked is None:
        return None
    names = tuple(name.strip() for name in asked.split(","))
    check_once("--systems", names)
    try:
        chosen(names)
    except KeyError as err:
        known = ", ".join(system.name for system in chosen(None))
        raise Unable(f"--systems: {err} is none of {known}") from None
    return names


def figures(rows: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
    said, withdrawn = checked(rows)
    if withdrawn:
        return said, rows
    cells_of = by_cell(rows)
    for label, systems in cells_of.items():
        print_rows(
            f"{label}: ms to the first token, {how(rows)}",
            [line(r) for r in systems.values()],
        )
    base = cells_of.get("base", {})
    for name, (one, other, what) in _RATIOS.items():
        if all(what in base.get(system, ()) for system in (one, other)):
            say(said, name, times(base[other], base[one], what))
    stored = [base[name]["p50_ms"] for name in BASELINES if name in base]
    if stored and "impress" in base:
        said["p50_vs_best_baseline"] = ratio(min(stored), base["impress"]["p50_ms"])
    for label, systems in cells_of.items():
        if label != "base" and {"impress", "as_h2o_lfu"} <= systems.keys():
            found = times(systems["as_h2o_lfu"], systems["impress"])
            say(said, f"{label}.p50_vs_as_h2o_lfu", found)
    for name, of in (("worst", "p50_ms"), ("worst_mean", "mean_ms")):
        each = [worst_of(systems, of) for systems in cells_of.values()]
        worst = [one for one in each if one is not None]
        if worst:  # no interval: that of the largest of several is not its own
            said[f"{name}_vs_best_of_three"] = max(worst).ratio
            without = [worst_without_one(systems, of) for systems in cells_of.values()]
            said[f"{name}_without_one_vs_best_of_three"] = max(one for one in without if one)
        highs = [one.high for one in worst if one.high is not None]
        if highs:  # a bar within an interval is not shown to be met
            said[f"{name}_high_vs_best_of_three"] = max(highs)
    for row in base.values():
        if "p99_ms" in row:
            said[f"p99_ms.{row['system']}"] = row["p99_ms"]
    late = [_late_share(row) for row in base.values() if "stated_ms" in row]
    if late:
        said["late_share_worst"] = max(late)
    if "impress" in base:
        said["fallback_share"] = base["impress"]["fell_back"]
        for name in ("map_share", "map_cpu_share", "map_beside_share"):
            if name in base["impress"]:
                said[f"{name}_of_ttft"] = base["impress"][name]
    return said, rows


def _late_share(row: Row) -> float:
    """The share of a system's p50 by which its waits went beyond what was stated: threads that read
    hold the interpreter, and no accelerator waits for that."""
    return float((row["emulated_ms"] - row["stated_ms"]) / row["p50_ms"])


#: How often the paper's selector falls back at its gate in the lookup models at 25 % kept, over all
#: tasks: the models with least and most (`accuracy`, *.all.25.paper.fallback_share).
TRAINED: Final = (0.56, 0.91)
#: The paper's baselines that store: Fig 16 compares with the best of them.
BASELINES: Final = ("as", "as_h2o_lru", "as_h2o_lfu")
#: figure -> (system, its rival, which time): how many times less the system takes.
_RATIOS: Final = {
    "p50_vs_as_h2o_lfu": ("impress", "as_h2o_lfu", "p50_ms"),
    "p50_vs_recompute": ("impress", "recompute", "p50_ms"),
    "p50_vs_as_int4": ("impress", "as_int4", "p50_ms"),
    "mean_vs_as_h2o_lfu": ("impress", "as_h2o_lfu", "mean_ms"),
    "p99_vs_as_h2o_lfu": ("impress", "as_h2o_lfu", "p99_ms"),
    "p99_vs_recompute": ("impress", "recompute", "p99_ms"),
    "io_time_vs_as_h2o_lfu": ("impress", "as_h2o_lfu", "io_ms"),
    "quality_p50_vs_paper": ("quality", "impress", "p50_ms"),
}


# ---- plots -------------------------------------------------------------------------------------


def draw_systems(figure: Any, _figures: Figures, rows: list[Row]) -> None:
    """p50 of every system in the base cell, split into reads and the rest."""
    base = [row for row in rows if row.get("cell") == "base"]
    axes = figure.subplots()
    names = [row["system"] for row in base]
    axes.barh(names, [row["p50_ms"] for row in base], color="#9bb8d3", label="p50")
    axes.barh(names, [row["io_ms"] for row in base], color="#2f5d8a", height=0.4, label="I/O")
    axes.invert_yaxis()
    axes.set_xlabel(f"ms to the first token (slice of the layers, {how(rows)})")
    axes.legend()


def draw_fallback(figure: Any, _figures: Figures, rows: list[Row]) -> None:
    """IMPRESS against its rivals, over the share of layers that really fell back."""
    cells = [row for row in rows if row.get("part") == "cell"
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
    axes.axvspan(*TRAINED, alpha=0.12, color="red", label="trained small models': 56-91 %")
    axes.set_xlim(0, 1)
    axes.set_xlabel("measured share of layers that fell back")
    axes.set_ylabel(f"p50, ms ({how(rows)})")
    axes.legend()


EXPERIMENT: Final = Experiment(
    "ttft", "Time to the first token, all systems interleaved.", cells, figures,
    {"systems": draw_systems, "fallback": draw_fallback}, _arguments, meta, uses_disk=True,
)  # fmt: skip


def run(argv: Sequence[str] | None = None) -> int:
    return main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(run())
