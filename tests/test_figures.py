"""Figures and plots of every experiment from the rows of one cell, as `--cells` leaves them."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.common import Row
from experiments.harness import Disk, Experiment, Options

RESULTS = Path(__file__).parent.parent / "docs" / "results"
#: The columns that tell apart the cells in a report's rows.
CELLS = {
    "ablation": ("part", "cell"), "chunks": ("row_kib", "mix"), "hashpool": ("p",),
    "hits": ("ratio", "zipf"), "repack": ("part",), "scale": ("part", "cell"),
    "reliability/load": ("threads", "processes", "engine"), "reliability/overhead": ("part",),
    "trace": ("size", "policy"), "ttft": ("part", "cell"),
    "vbuffers": ("part", "page_bytes", "context", "batch"),
    "zero_hit": ("hit", "storing", "policy", "layers"),
}  # fmt: skip
#: The same for reports whose rows are not those of cells: plots only.
LINES = {"accuracy": ("group",), "threshold": ("model",)}


def _one_by_one(wanted: dict[str, tuple[str, ...]]) -> list[Any]:
    """(Experiment, rows of one of its cells in docs/results), for every cell."""
    params = []
    for name, keys in wanted.items():
        found: dict[tuple[object, ...], list[Row]] = {}
        for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]:
            found.setdefault(tuple(row[key] for key in keys if key in row), []).append(row)
        params += [
            pytest.param(name, rows, id=" ".join(map(str, (name, *label))))
            for label, rows in found.items()
            if label and "all" not in label  # a table of its own; never without the others
        ]
    return params


def _experiment(name: str) -> Experiment:
    made: Experiment = import_module(f"experiments.{Path(name).name}").EXPERIMENT
    return made


def _options(folder: Path, *, quick: bool) -> Options:
    more = argparse.Namespace(unchecked=False)
    return Options(quick, None, None, False, folder, 1, Disk(1.5, "given"), more, ExitStack())


def _plot(experiment: Experiment, said: dict[str, float], rows: list[Row]) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    for draw in experiment.plots.values():
        figure = Figure()
        draw(figure, said, rows)
        for line in (line for axes in figure.axes for line in axes.lines):
            np.asarray(line.get_ydata(orig=True), dtype=float)  # a bare format is drawn as a word


@pytest.mark.parametrize(("name", "rows"), _one_by_one(CELLS))
def test_a_cell_alone_has_figures_and_plots(name: str, rows: list[Row], tmp_path: Path) -> None:
    """`--cells` measured for an hour, then ended in a traceback, without a report: a figure was
    taken from rows of other cells. A curve without points became the word "o-" on its axis."""
    experiment = _experiment(name)
    quick = json.loads((RESULTS / f"{name}.json").read_text())["meta"]["quick"]
    said, lines = experiment.figures(rows, _options(tmp_path, quick=quick))
    assert lines
    assert all(np.isfinite(value) for value in said.values())
    _plot(experiment, said, lines)


@pytest.mark.parametrize(("name", "rows"), _one_by_one(LINES))
def test_a_group_alone_has_plots(name: str, rows: list[Row]) -> None:
    _plot(_experiment(name), {}, rows)


def test_an_engine_that_this_machine_has_not_leaves_a_load_without_rows(tmp_path: Path) -> None:
    """`--cells io_uring` without io_uring skipped the cell and ended in an IndexError."""
    options = _options(tmp_path, quick=True)
    assert _experiment("load").figures([], options) == ({}, [])
