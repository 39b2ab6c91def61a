"""Cells of experiments that compare systems: some of them, by factors that vary from the base."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median_low
from typing import Any, Final

import torch

from experiments.common import Row, console
from experiments.harness import Cell, Figures, Options
from experiments.rounds import Rounds
from experiments.systems.catalogue import System, choosing, chosen
from experiments.systems.cell import LEAST_WINDOWS, Bench, Load, summary
from experiments.systems.clock import A100, Compute
from experiments.systems.data import N_EARLIER, ordered_by
from experiments.systems.generate import Knobs
from experiments.systems.shapes import SHAPES, Shape
from experiments.systems.sizes import (
    MEAN_TOKENS,
    Verdict,
    computed_by,
    data_of,
    dilation,
    how,
    is_real,
    layers_of,
    n_prefixes,
    stretch,
)

#: The base cell: OPT-6.7B, the middle of the paper's cache ratios, requests by Zipf's law.
BASE: Final[dict[str, Any]] = {
    "shape": "opt-6.7b", "ratio": 130, "zipf": 0.9, "agreement": Knobs().agreement,
    "overlap": Knobs().overlap, "keep": 0.25, "in_a_row": 1,
}  # fmt: skip
#: Rough seconds, by what eight cells of `ttft` took. For a layer of a request while caches are
#: warmed; for one policy's choice in it, before the clock; for a measured request, and for a layer
#: of it on the paper's disk, which is dilated; for writing a layer of one prefix in one form.
_WARM_S: Final = 0.02
_CHOICE_S: Final = 0.012
_REQUEST_S: Final = 0.05
_LAYER_S: Final = 0.01
_PREFIX_S: Final = 0.4


@dataclass(frozen=True, slots=True)
class Plan:
    """What an experiment's cells have in common."""

    options: Options
    verdict: Verdict
    names: tuple[str, ...] | None = None  # None: every system
    n_warm: int = 48
    most_windows: int = 8


def check_cell(verdict: Verdict) -> Cell:
    """The emulator's check: first of all cells."""
    return Cell({"part": "check"}, verdict.check, 25.0, again=True)


def cell(plan: Plan, label: str, n: int, **factors: Any) -> Cell:
    """Systems under BASE with these factors changed."""
    factor = {**BASE, **factors}
    computed = computed_by(plan.options)
    shape = SHAPES[factor["shape"]]
    if shape.n_kv_heads < shape.n_heads:  # earlier, heads sharing keys looked at the same rows
        computed = {**computed, "heads": "apart"}
    if factor["in_a_row"] > 1:  # earlier, it ran from when the server was free
        computed = {**computed, "clock": "from the first token before"}
    if plan.names is not None:
        computed = {**computed, "systems": ",".join(plan.names)}
    params = {"part": "cell", "cell": label, "n": n, **factor, **computed}
    return Cell(
        params,
        partial(_measure, plan, factor, n, params),
        _seconds(plan, factor, n),
    )  # fmt: skip


def _seconds(plan: Plan, factor: Row, n: int) -> float:
    systems, layers = chosen(plan.names), layers_of(plan.options)
    size = n_prefixes(
        factor["shape"], factor["ratio"], len(systems), quick=plan.options.quick,
        asked=factor.get("asked_prefixes"), layers=layers,
    )  # fmt: skip
    load = Load(n_measured=n, n_warm=plan.n_warm, most_windows=plan.most_windows)
    return estimate(systems, SHAPES[factor["shape"]], layers, size, load, dilation(plan.options))


def estimate(
    systems: Sequence[System], shape: Shape, n_layers: int, n_prefixes: int, load: Load,
    times: float,
) -> float:  # fmt: skip
    """Rough seconds of a cell: writing its data in an order that earlier choices gave, choosing
    rows for all requests, warming caches, measuring requests, with compute `times` as long."""
    kinds = {system.data for system in systems} - {""}
    layers = n_layers * max(shape.row_bytes / SHAPES[BASE["shape"]].row_bytes, 0.4)
    n_warmed = load.n_warm * min(load.most_windows, LEAST_WINDOWS + 1)  # most are flat by then
    on_the_clock = _REQUEST_S + layers * _LAYER_S * times
    n_chosen = len(choosing(systems)) * (n_warmed + load.n_measured)
    ordered = sum(ordered_by(kind, BASE["keep"]) is not None for kind in kinds)
    n_chosen += ordered * n_prefixes * N_EARLIER
    reading = n_warmed * layers * _WARM_S + load.n_measured * on_the_clock
    # A system that recomputes does nothing while others' caches are warmed.
    forward = Compute(shape, A100).layer(MEAN_TOKENS, 0) * n_layers * times
    recomputing = load.n_measured * (_REQUEST_S + forward)
    served = sum(reading if system.data else recomputing for system in systems)
    modes = sum(system.auto for system in systems) * n_warmed * on_the_clock
    prepared = n_prefixes * len(kinds) * layers * _PREFIX_S + n_chosen * layers * _CHOICE_S
    return prepared + served + modes


def _measure(plan: Plan, factor: Row, n: int, params: Row) -> list[Row]:
    if plan.verdict.withdrawn:
        return []
    systems = chosen(plan.names, factor["keep"])
    knobs = replace(Knobs(), agreement=factor["agreement"], overlap=factor["overlap"])
    data = data_of(
        plan.options, factor["shape"], factor["ratio"], len(systems), knobs, factor["keep"],
        factor.get("asked_prefixes"),
    )  # fmt: skip
    load = Load(
        factor["ratio"], factor["zipf"], knobs, n, plan.n_warm, plan.most_windows,
        plan.options.seed, factor["in_a_row"],
    )  # fmt: skip
    torch.set_num_threads(os.cpu_count() or 1)  # choices are made before the clock starts
    rounds = _rounds(plan, params)
    real = is_real(plan.options)
    dilated = 1.0 if real else stretch(plan.options)
    on, rate = ("cuda", plan.options.disk.gb_s) if real else ("", None)
    with Bench(systems, data, load, dilated, on=on, disk_gb_s=rate) as bench:
        if not real:  # then nothing but reads and copies takes a processor
            torch.set_num_threads(1)
        bench.warm()
        found = bench.measure(rounds)
        follow = {system.name: bench.overlap(system.policy) for system in systems}
    more = {"prefixes": len(data.prefixes), "layers": data.n_layers, **_known(rounds)}
    return [
        {"system": name, **summary(s, load.in_a_row), "follows_average": follow[name], **more,
         **bench.warmed[name]._asdict(), "runs": rounds.n_runs}
        for name, s in found.items()
    ]  # fmt: skip


def _known(rounds: Rounds) -> Row:
    """What the runs that measured a cell's rounds had found out before: the worst check of the
    emulator, None where one had none, and the rate that fio gave for most rounds."""
    errors, rates = rounds.known("emulator_error"), rounds.known("fio_gb_s")
    worst = None if None in errors else max(errors, default=None)
    by_fio = {} if None in rates else {"fio_gb_s": median_low(rates)}
    return {"emulator_error": worst, **by_fio}


def _rounds(plan: Plan, params: Row) -> Rounds:
    """Where the rounds of a cell are kept, and how far earlier runs got with it."""
    options = plan.options
    run: Row = {"seed": options.seed, "quick": options.quick}
    if options.disk.by == "given":
        run["disk_gb_s"] = options.disk.gb_s
    knows: Row = {"emulator_error": plan.verdict.error}
    if options.disk.by == "fio":
        knows["fio_gb_s"] = options.disk.gb_s
    rounds = Rounds(options.json, {**params, **run}, resume=options.resume, knows=knows)
    if n := len(rounds.kept) * params["in_a_row"]:
        console.print(f"{params['cell']}: {n} of {params['n']} requests were measured before")
    return rounds


def by_cell(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """cell -> system -> its row."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.get("part") == "cell":
            found.setdefault(row["cell"], {})[row["system"]] = row
    return found


def line(row: Row) -> Row:
    """A row for people."""
    return {
        "system": row["system"],
        "p50 [95 %]": f"{row['p50_ms']:.1f} [{row['p50_low']:.1f}, {row['p50_high']:.1f}]",
        "p90": row["p90_ms"], "p99": row.get("p99_ms", ""), "I/O": row["io_ms"],
        "waits": row["emulated_ms"], "MB": row["mb"], "SSD": row["ssd_mb"],
        "HBM": f"{row['hbm']:.2f}", "DRAM": f"{row['dram']:.2f}", "rows": f"{row['rows']:.2f}",
        "fell": f"{row['fell_back']:.2f}",
    }  # fmt: skip


def ratio(other: float, one: float) -> float:
    """How many times less `one` takes."""
    return float(other / one) if one else float("inf")


def draw_p50(figure: Any, _figures: Figures, rows: list[Row]) -> None:
    """p50 of each system, one line a cell."""
    axes = figure.subplots()
    for label, systems in by_cell(rows).items():
        axes.plot(list(systems), [row["p50_ms"] for row in systems.values()], "o-", label=label)
    axes.set_ylabel(f"p50, ms ({how(rows)})")
    axes.tick_params(axis="x", rotation=20)
    axes.set_ylim(bottom=0)
    if axes.lines:  # none where the emulator was withdrawn
        axes.legend()
