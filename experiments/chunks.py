"""What a sparse read costs before and after packing: bytes, requests, I/O time (Figs 5, 20, 23).

Rows are of 1, 4 and 16 KiB, and choices follow the average order more or less (the overlap is
measured). Each request is read once from rows in position order and once from packed ones, beside a
sequential read of everything, and beside an earlier packed read's disk requests, sent alone. Their
order is drawn for each request: data just read may be quicker to read, and in a fixed cycle a way
would always come after the same one. All is real: no compute is in it. Where the small trained
models' choices lie on the curve is measured, too (experiments/overlap.py).
"""

from __future__ import annotations

import shutil
import sys
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from experiments.common import Row, print_rows
from experiments.harness import Cell, Experiment, Figures, Options, main
from experiments.overlap import measure as measure_models
from experiments.selection import CHECKPOINTS, digest_of
from experiments.systems.rows import Plan, Positions, Rows, choices, measured_overlap

ROW_KIB: Final = (1, 4, 16)
KEEP: Final = 0.25
#: Knobs of the mix; the overlap they make is measured.
MIXES: Final = {False: (0.3, 0.6, 0.8, 0.9, 0.96, 0.99, 1.0), True: (0.6, 0.9, 0.99)}
UNITS: Final = (16, 32, 64, 128, 256)


class Alone(NamedTuple):
    """A packed read's disk requests, sent alone by `n_threads`: of the read `back` requests ago."""

    n_threads: int
    back: int


#: Neither is quicker everywhere. Between two of the ways that ask for the same bytes comes all that
#: one request reads, and more.
ALONE: Final = {"by_eight": Alone(8, 2), "by_one": Alone(1, 4)}
#: What is read for each request.
WAYS: Final = ("before", "after", "all", *ALONE)
#: Where one figure stands for the whole curve, it is at the measured overlap nearest to this. The
#: paper's recall of a static order is "over 80 %".
TYPICAL: Final = 0.85
_ALONE: Final = "io_vs_floor_alone"
#: From this overlap on a packed read is to cost at most 1.3 of the floor.
PACKED_FROM: Final = 0.9


def cells(options: Options) -> list[Cell]:
    reads = [
        Cell(  # alone: older cells had reads of the same request, some by eight threads only
            {"row_kib": kib, "mix": mix, "alone": "an earlier request's, by the quicker"},
            partial(measure, options, kib, mix), 2.0 + 0.8 * kib,
        )
        for kib in ROW_KIB for mix in MIXES[options.quick]
    ]  # fmt: skip
    models = [  # last: nothing is timed after computing
        Cell(
            {"part": "models", "checkpoint": name, "weights": digest_of(name)},
            partial(measure_models, options, name),
            5.0 if options.quick else 30.0,
        )
        for name in CHECKPOINTS
    ]
    return reads + models


def measure(options: Options, kib: int, mix: float) -> list[Row]:
    n = 8 if options.quick else 24
    asked, earlier = choices(n, mix, KEEP, options.seed)
    folder = options.folder / f"rows-{kib}-{mix}"
    rows = Rows.of(folder, kib << 10, earlier, options.seed)
    try:
        read: dict[str, list[Row]] = {way: [] for way in WAYS}
        rng = np.random.default_rng([options.seed, 13])
        plans: deque[Plan] = deque(maxlen=max(one.back for one in ALONE.values()))
        for chosen in asked:
            for at in rng.permutation(len(WAYS)).tolist():
                if (took := _read(rows, WAYS[at], chosen, plans)) is not None:
                    read[WAYS[at]].append(took)
            plans.append(rows.plans["after"])
        units = {
            f"{name}_unit_{unit}": float(np.mean([rows.chunks(c, name, unit) for c in asked[:4]]))
            for name in ("before", "after") for unit in UNITS
        }  # fmt: skip
    finally:
        rows.close()
        shutil.rmtree(folder, ignore_errors=True)
    rate = float(np.median([r["moved"] / r["io_s"] for r in read["all"]]))
    line: Row = {"n": n, "overlap": measured_overlap(asked, earlier), "sequential_gb_s": rate / 1e9}
    for name in ("before", "after", *ALONE):
        times = [r["io_s"] / (r["selected"] / rate) for r in read[name]]
        line[f"io_vs_floor_{name}"] = float(np.median(times))
    line[_ALONE] = min(line[f"io_vs_floor_{name}"] for name in ALONE)
    for name in ("before", "after"):
        line[f"amplification_{name}"] = float(
            np.mean([r["moved"] / r["selected"] for r in read[name]])
        )
        line[f"requests_{name}"] = float(np.mean([r["requests"] for r in read[name]]))
        line[f"io_ms_{name}"] = float(np.median([r["io_s"] for r in read[name]])) * 1e3
    return [{**line, **units}]


def _read(
    rows: Rows, way: str, chosen: Sequence[Positions], plans: Sequence[Plan]
) -> Row | None:  # fmt: skip
    """`plans`: of earlier requests' packed reads. Returns None while there are too few."""
    if way == "all":
        return rows.read_all("before")
    if way in ALONE:
        n_threads, back = ALONE[way]
        return rows.read_alone("after", plans[-back], n_threads) if len(plans) >= back else None
    return rows.read(way, chosen)


def figures(rows: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
    said = _overlaps([row for row in rows if row.get("others") is not None])
    reads = [row for row in rows if "row_kib" in row]
    if reads:
        said |= _of_reads(reads)
    return said, rows


def _overlaps(models: Sequence[Row]) -> Figures:
    """overlap.CHECKPOINT.POLICY, and the same with .stored appended for the order at storing; both
    over layers in which rows were chosen."""
    if models:
        print_rows("Share of a choice that is first in an average order, trained models", [
            {
                "model": r["checkpoint"], "policy": r["policy"],
                "by the other questions": f"{r['others']:.2f}",
                "by the importance at storing": f"{r['stored']:.2f}",
                "rows kept": f"{r['kept']:.2f}", "loaded whole": f"{r['whole']:.2f}",
            }
            for r in models
        ])  # fmt: skip
    said: Figures = {}
    for row in models:
        name = f"overlap.{row['checkpoint']}.{row['policy']}"
        said |= {name: row["others"], f"{name}.stored": row["stored"]}
    return said


def _of_reads(rows: Sequence[Row]) -> Figures:
    print_rows("A sparse read of 25 % of the rows: in position order -> packed", [
        {
            "row": f"{r['row_kib']} KiB", "overlap": f"{r['overlap']:.2f}",
            "moved/chosen": _pair(r, "amplification"), "requests": _pair(r, "requests"),
            "I/O ms": _pair(r, "io_ms"), "I/O / floor": _pair(r, "io_vs_floor"),
            "disk alone / floor": f"{r[_ALONE]:.3g}",
        }
        for r in rows
    ])  # fmt: skip
    said: Figures = {}
    high = [row for row in rows if row["overlap"] >= PACKED_FROM]
    for kib in ROW_KIB:
        mine = [row for row in high if row["row_kib"] == kib]
        if mine:
            said[f"io_time_vs_sequential_floor.{kib}"] = max(r["io_vs_floor_after"] for r in mine)
            said[f"disk_alone_vs_sequential_floor.{kib}"] = max(r[_ALONE] for r in mine)
    if high:
        said["io_time_vs_sequential_floor"] = max(r["io_vs_floor_after"] for r in high)
    paper = [row for row in rows if row["row_kib"] == 4]
    if paper:
        typical = min(paper, key=lambda row: abs(row["overlap"] - TYPICAL))
        said["overlap"] = typical["overlap"]
        for name in ("before", "after"):
            said[f"amplification_{name}"] = typical[f"amplification_{name}"]
            said[f"chunk_amplification_{name}"] = typical[f"{name}_unit_64"]
        for unit in UNITS:
            fewer = typical[f"before_unit_{unit}"] / typical[f"after_unit_{unit}"]
            said[f"chunks_times_fewer.{unit}"] = fewer
    return said


def _pair(row: Row, name: str) -> str:
    return f"{row[f'{name}_before']:.3g} -> {row[f'{name}_after']:.3g}"


def draw_curve(figure: Any, _said: Figures, rows: list[Row]) -> None:
    """I/O time over the floor, against the measured overlap."""
    axes = figure.subplots()
    reads = [row for row in rows if "row_kib" in row]
    lines = (("io_vs_floor_after", "o-", "packed, rows of"),
             ("io_vs_floor_before", "x:", "in position order,"),
             (_ALONE, ".--", "the packed one's requests alone,"))  # fmt: skip
    for kib in dict.fromkeys(row["row_kib"] for row in reads):
        for name, style, label in lines:
            mine = sorted((r["overlap"], r[name]) for r in reads if r["row_kib"] == kib)
            axes.plot(*np.array(mine).T, style, label=f"{label} {kib} KiB")
    chosen = [row for row in rows if row.get("policy") == "paper" and row["others"] is not None]
    for row, style in zip(chosen, ("--", "-.", ":"), strict=False):
        label = f"the paper's selector, model {row['checkpoint']}"
        axes.axvline(row["others"], color="tab:red", linestyle=style, label=label)
    axes.axhline(1.3, color="grey", linewidth=0.8)
    axes.axvspan(0.9, 1.0, alpha=0.1, color="green")
    axes.axvline(0.8, color="black", linestyle="--", label="the paper's recall of a static order")
    axes.set_xlabel("measured overlap of a request's choice with the average order")
    axes.set_ylabel("I/O time ÷ (selected bytes ÷ sequential rate)")
    axes.set_yscale("log")
    axes.legend(fontsize=6, ncols=2, loc="lower left")  # where there is no line


def draw_units(figure: Any, _said: Figures, rows: list[Row]) -> None:
    """Rows of touched chunks over rows chosen, by chunk size (computed)."""
    axes = figure.subplots()
    for row in rows:
        if row.get("row_kib") == 4:
            for name, style in (("before", "x:"), ("after", "o-")):
                y = [row[f"{name}_unit_{unit}"] for unit in UNITS]
                axes.plot(UNITS, y, style, label=f"{name}, overlap {row['overlap']:.2f}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("rows of a chunk")
    axes.set_ylabel("rows read ÷ rows chosen, whole chunks (computed)")
    if axes.lines:
        axes.legend(fontsize=7)


EXPERIMENT: Final = Experiment(
    "chunks", "A sparse read before and after packing, in rows of 1, 4 and 16 KiB.", cells, figures,
    {"curve": draw_curve, "units": draw_units}, uses_disk=True,
    meta=lambda _options: {
        "io_s": "from asking for a layer's rows to having them in memory, verified; sum of layers",
        "floor": "selected bytes ÷ the rate at which the same session reads everything",
        "alone": "requests of a packed read of two or four requests before, sent by eight threads "
                 "or by one, whichever is the quicker, neither planned nor verified nor put in "
                 "order",
        "order": "of the ways, drawn for each request",
        "models": "what trained models' questions choose by the paper's selector without its gate, "
                  "and by ours: share of it first by what the document's others chose (others), or "
                  "by the importance at storing (stored); mean over documents, layers, questions",
        "units": "computed from where rows lie; the store reads pieces, not whole chunks",
    },
)  # fmt: skip


def run(argv: Sequence[str] | None = None) -> int:
    return main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(run())
