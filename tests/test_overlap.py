"""How far trained models' choices follow an average order, which `chunks` marks on its curve."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

import pytest

from experiments import chunks, overlap
from experiments.harness import Disk, Options
from experiments.selection import CHECKPOINTS
from impress.policy import Random, StaticH2O


def test_rows_first_by_importance_overlap_wholly_and_drawn_ones_by_chance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(
        True, None, None, False, tmp_path, 1, Disk(None, "not measured"), argparse.Namespace(),
        ExitStack(),
    )  # fmt: skip
    monkeypatch.setattr(overlap, "POLICIES", {"first": StaticH2O(0.25), "drawn": Random(0.25)})
    monkeypatch.setattr(overlap, "N_DOCUMENTS", {True: 1})
    monkeypatch.setattr(overlap, "N_ASKED", 1)
    first, drawn = overlap.measure(options, "grouped")
    assert (first["stored"], first["others"], first["whole"]) == (1.0, 1.0, 0.0)
    assert first["kept"] == drawn["kept"] == 0.25
    assert drawn["others"] == 1.0  # the same for every question
    assert 0.15 < drawn["stored"] < 0.35


def test_the_curve_marks_each_trained_model() -> None:
    """Only the paper's own figure was marked: nobody could tell where on the curve a model is."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    rows = [
        {"part": "models", "checkpoint": name, "policy": policy, "n": 4, "whole": 0.0,
         "others": 0.6 + 0.1 * i, "stored": 0.5, "kept": 0.25}
        for i, name in enumerate(CHECKPOINTS) for policy in overlap.POLICIES
    ]  # fmt: skip
    said, lines = chunks.figures(rows, None)  # type: ignore[arg-type]
    assert [said[f"overlap.{name}.paper"] for name in CHECKPOINTS] == [0.6, 0.7, pytest.approx(0.8)]
    figure = Figure()
    chunks.draw_curve(figure, said, lines)
    marked = {str(line.get_label()): line.get_xdata()[0] for line in figure.axes[0].lines}
    for i, name in enumerate(CHECKPOINTS):
        assert marked[f"the paper's selector, model {name}"] == pytest.approx(0.6 + 0.1 * i)


def test_a_model_that_loads_everything_whole_is_no_point() -> None:
    row = {"part": "models", "checkpoint": "grouped", "policy": "paper", "n": 0, "whole": 1.0,
           "others": None, "stored": None, "kept": None}  # fmt: skip
    said, lines = chunks.figures([row], None)  # type: ignore[arg-type]
    assert said == {}
    assert lines == [row]
