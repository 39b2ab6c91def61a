"""Experiments: cells are measured once, kept when a run stops, and taken up again by --resume."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from conftest import soon

from experiments import bench_control, fio, harness, reliability_table, results_table, zero_hit
from experiments import figures as plotting
from experiments.cells import SKIPPED, state_file
from experiments.common import Row, Unable
from experiments.harness import Cell, Experiment, Figures, Options, _chosen, main
from experiments.rounds import Rounds
from experiments.systems.data import Data
from experiments.systems.generate import Knobs
from experiments.systems.shapes import SHAPES
from impress.report import host


class Doubling:
    """An experiment whose cells double a number, and which may be stopped at one of them."""

    def __init__(
        self, numbers: Sequence[int], stop_at: int | None = None, *, nothing: bool = False
    ) -> None:
        """`nothing`: no cell except the first, which is a check, gives rows."""
        self.measured: list[int] = []
        self._numbers = numbers
        self._stop_at = stop_at
        self._nothing = nothing
        self.check: int | None = None

    def _cells(self, options: Options) -> list[Cell]:
        return [
            Cell({"number": n}, lambda n=n: self._double(n), 30, again=n == self.check)
            for n in self._numbers
        ]

    def _double(self, number: int) -> list[Row]:
        if number == self._stop_at:
            raise KeyboardInterrupt
        self.measured.append(number)
        return [] if self._nothing and number != self.check else [{"twice": 2 * number}]

    def _figures(self, rows: list[Row], options: Options) -> tuple[Figures, list[Row]]:
        return {f"of{row['number']}": float(row["twice"]) for row in rows}, rows

    def _draw(self, figure: Any, figures: Figures, rows: list[Row]) -> None:
        figure.subplots().plot([row["number"] for row in rows], list(figures.values()))

    def run(self, folder: Path, *args: str, uses_disk: bool = False) -> int:
        made = Experiment("doubling", "Doubles.", self._cells, self._figures, {"line": self._draw},
                          uses_disk=uses_disk or "--disk-gb-s" in args)  # fmt: skip
        return main(made, ["--dir", str(folder), *args])


@pytest.fixture
def report(tmp_path: Path) -> Path:
    return tmp_path / "doubling.json"


def test_a_report_has_figures_rows_and_conditions(tmp_path: Path, report: Path) -> None:
    assert Doubling([1, 2]).run(tmp_path, "--json", str(report), "--disk-gb-s", "1.5") == 0
    said = json.loads(report.read_text())
    assert said["figures"] == {"of1": 2.0, "of2": 4.0}
    meta = said["meta"]
    assert said["rows"] == [{"number": n, "twice": 2 * n, "commit": meta["commit"]} for n in (1, 2)]
    assert {"commit", "host", "cpus", "date", "seed", "quick"} <= meta.keys()
    assert meta["disk"] == {"gb_s": 1.5, "by": "given", "runs_gb_s": [], "after_gb_s": 1.5}
    assert meta["cells"]["n"] == 2 and meta["cells"]["kept"] == 0
    assert not list(tmp_path.glob("impress-bench-*"))


def test_a_disk_that_changes_under_a_run_is_said(
    tmp_path: Path, report: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """An hour's run once relied on one fio reading, a third of what the disk then gave."""
    rates = iter([0.5, 0.9, 0.4, 0.5, 0.1, *[1.5, 1.4, 1.6, 1.5, 0.3]])
    monkeypatch.setattr(fio, "version", lambda: "fio-3")
    monkeypatch.setattr(fio, "write", lambda file, *_: file.touch())
    monkeypatch.setattr(fio, "read", lambda *_, **__: fio.FioResult(10**9, 1 / next(rates), 0.0))
    assert Doubling([1]).run(tmp_path, "--json", str(report), uses_disk=True) == 0
    disk = json.loads(report.read_text())["meta"]["disk"]
    assert disk["gb_s"] == pytest.approx(0.5) and disk["after_gb_s"] == pytest.approx(1.5)
    assert "0.50 GB/s before and 1.50 after" in " ".join(capsys.readouterr().out.split())


def test_a_stopped_run_keeps_its_cells_and_resume_measures_the_rest(
    tmp_path: Path, report: Path
) -> None:
    assert Doubling([1, 2, 3], stop_at=3).run(tmp_path, "--json", str(report)) == 130
    assert not report.exists()
    again = Doubling([1, 2, 3])
    assert again.run(tmp_path, "--json", str(report), "--resume") == 0
    assert again.measured == [3]
    said = json.loads(report.read_text())
    assert said["figures"] == {"of1": 2.0, "of2": 4.0, "of3": 6.0}
    assert said["meta"]["cells"]["kept"] == 2


def test_a_withdrawn_run_is_measured_again_by_resume_and_checked_again(
    tmp_path: Path, report: Path
) -> None:
    """On a busy machine the emulator was off; the run's cells were kept as finished, without a row,
    and every resume withdrew them again."""
    for nothing, measured in ((True, [1, 2, 3]), (False, [1, 2, 3]), (False, [])):
        again = Doubling([1, 2, 3], nothing=nothing)
        again.check = 1
        assert again.run(tmp_path, "--json", str(report), "--resume") == nothing
        assert again.measured == measured
        assert json.loads(report.read_text())["meta"]["cells"]["empty"] == 2 * nothing
    assert json.loads(report.read_text())["figures"] == {"of1": 2.0, "of2": 4.0, "of3": 6.0}


def test_what_says_whether_others_can_be_believed_is_measured_with_any_of_them(
    tmp_path: Path, report: Path
) -> None:
    """`ttft --cells base` left the emulator's check out without saying so."""
    made = Doubling([1, 2, 3])
    made.check = 1
    assert made.run(tmp_path, "--json", str(report), "--cells", "2") == 0
    assert made.measured == [1, 2]


def test_a_report_on_stdout_is_all_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Estimates and tables came before it, and no JSON reader accepted that."""
    assert Doubling([1]).run(tmp_path, "--json", "-") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["figures"] == {"of1": 2.0}
    assert "Estimated time" in said.err
    assert Doubling([1]).run(tmp_path) == 0
    assert "Estimated time" in capsys.readouterr().out


def test_a_run_that_is_stopped_before_it_kept_anything_names_no_file(
    tmp_path: Path, report: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Stopped while fio ran, say, it named a file of finished cells that was not there, and later
    one of an earlier run's: --resume would have reported those."""

    def stopped() -> str:
        raise KeyboardInterrupt

    def said(*args: str, stop_at: int | None = None) -> str:
        command = ["--json", str(report), *args]
        assert Doubling([1], stop_at).run(tmp_path, *command, uses_disk=stop_at is None) == 130
        return " ".join(capsys.readouterr().out.split())

    monkeypatch.setattr(fio, "version", stopped)
    assert said().endswith("stopped before anything was kept; the temporary data is gone")
    assert "before anything was kept" in said(stop_at=1)  # its file is there, and empty
    assert Doubling([1]).run(tmp_path, "--json", str(report)) == 0
    state = tmp_path / "doubling.cells.jsonl"
    before = state.read_text()
    assert said().endswith("cells.jsonl is of an earlier run)")
    assert "what was measured is kept" in said("--resume")
    assert state.read_text() == before


def test_a_run_that_is_stopped_in_its_first_cell_names_the_rounds_of_it(
    tmp_path: Path, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It named the file of cells, in which there was nothing yet."""
    for n_kept in (0, 1):

        def measure(n_kept: int = n_kept) -> list[Row]:
            rounds = Rounds(report, {"part": 1}, resume=False)
            for _ in range(n_kept):
                rounds.add({"as": [1]})
            raise KeyboardInterrupt

        cell = Cell({"part": 1}, measure)
        made = Experiment("rounds", "In rounds.", lambda _, cell=cell: [cell], lambda *_: ({}, []))
        assert main(made, ["--dir", str(tmp_path), "--json", str(report)]) == 130
        said = "".join(capsys.readouterr().out.split())
        assert ("doubling.rounds.jsonl):--resumegoeson" in said) == n_kept
        assert "cells.jsonl" not in said


_WAITS_ON_A_TERMINAL = """
import fcntl, signal, sys, termios
from pathlib import Path
from experiments.harness import Cell, Experiment, main
signal.signal(signal.SIGHUP, getattr(signal, sys.argv[2]))
fcntl.ioctl(0, termios.TIOCSCTTY, 0)

def measured(options):
    (options.folder / "data").touch()
    while not Path(sys.argv[1], "closed").exists():
        pass
    return [{"n": 1.0}]

cells = lambda options: [Cell({"part": 1}, lambda: measured(options))]
made = Experiment("waits", "Waits.", cells, lambda rows, _options: ({}, rows))
main(made, ["--dir", sys.argv[1], "--json", sys.argv[1] + "/waits.json"])
"""


@pytest.mark.parametrize("how", ["SIG_DFL", "SIG_IGN"])
def test_a_terminal_that_is_closed_leaves_no_data_behind(tmp_path: Path, how: str) -> None:
    """Gigabytes stayed, on tmpfs in memory: SIGHUP was no signal that anything was done about. And
    nothing can be printed by then. Under nohup it is ignored, and the run goes on."""
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", _WAITS_ON_A_TERMINAL, str(tmp_path), how], start_new_session=True,
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=Path(harness.__file__).parent.parent,
    ) as process:  # fmt: skip
        try:
            os.close(theirs)
            assert soon(lambda: any(tmp_path.glob("impress-bench-*/data")))
            os.close(ours)
            if how == "SIG_IGN":
                (tmp_path / "closed").touch()
            process.wait(60)
        finally:
            process.kill()
    assert not list(tmp_path.glob("impress-bench-*"))
    assert (tmp_path / "waits.cells.jsonl").read_text().count("\n") == (how == "SIG_IGN")


def test_what_could_not_be_measured_here_is_tried_again_and_is_no_failure(
    tmp_path: Path, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without mounts, or an I/O engine, the run is to end well, and a later one to measure them."""
    able = iter([False, True])

    def cells(_options: Options) -> list[Cell]:
        one = Cell({"part": 1}, lambda: [{"n": 1.0}])
        return [one, Cell({"part": 2}, lambda: [{"n": 2.0} if next(able) else {SKIPPED: "why"}])]

    def figures(rows: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
        return {f"of{row['part']}": row["n"] for row in rows}, rows

    args = ["--dir", str(tmp_path), "--json", str(report)]
    for found in ({"of1": 1.0}, {"of1": 1.0, "of2": 2.0}):
        assert main(Experiment("able", "Able.", cells, figures), [*args, "--resume"]) == 0
        assert json.loads(report.read_text())["figures"] == found
    assert "gave nothing" not in capsys.readouterr().out


def test_a_cell_of_which_a_part_could_not_be_measured_is_tried_again(
    tmp_path: Path, report: Path
) -> None:
    """It counted as measured for the rows that it had. What it gave holds until it is whole, and
    then in place of what it gave before."""
    given = iter([[{"n": 1.0}, {SKIPPED: "why"}], [{"n": 2.0}, {SKIPPED: "why"}], [{"n": 3.0}]])

    def cells(_options: Options) -> list[Cell]:
        return [Cell({"part": 1}, lambda: next(given))]

    made = Experiment("parts", "In parts.", cells, lambda rows, _options: ({}, rows))
    args = ["--dir", str(tmp_path), "--json", str(report), "--resume"]
    for n in (1.0, 2.0, 3.0, 3.0):
        assert main(made, args) == 0
        assert [row["n"] for row in json.loads(report.read_text())["rows"]] == [n]


def test_a_cell_that_finds_no_room_is_left_out_and_others_are_measured(
    tmp_path: Path, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hours into a run, a cell's data found no room: the run ended without a report, --resume ended
    at the same cell, and those after it, which would have fitted, were never measured."""
    full = iter([True, False])

    def second() -> list[Row]:
        if next(full):
            raise Unable("no room for 14 GB")
        return [{"n": 2.0}]

    def cells(_options: Options) -> list[Cell]:
        of = [lambda: [{"n": 1.0}], second, lambda: [{"n": 3.0}]]
        return [Cell({"part": part}, measure) for part, measure in enumerate(of, 1)]

    def figures(rows: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
        return {f"of{row['part']}": row["n"] for row in rows}, rows

    made, args = Experiment("full", "Full.", cells, figures), ["--dir", str(tmp_path)]
    args += ["--json", str(report), "--resume"]
    assert main(made, args) == 1
    assert json.loads(report.read_text())["figures"] == {"of1": 1.0, "of3": 3.0}
    out = capsys.readouterr().out
    assert "2 is left out: no room for 14 GB" in out and "1 of 3 cells gave nothing" in out
    assert main(made, args) == 0
    assert json.loads(report.read_text())["figures"] == {"of1": 1.0, "of2": 2.0, "of3": 3.0}


def test_where_no_cell_can_be_measured_the_first_says_why(
    tmp_path: Path, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure() -> list[Row]:
        raise Unable("no room for 14 GB")

    made = Experiment("full", "Full.", lambda _: [Cell({"part": 1}, measure)], lambda *_: ({}, []))
    assert main(made, ["--dir", str(tmp_path), "--json", str(report)]) == 2
    assert not report.exists() and "error: no room for 14 GB" in capsys.readouterr().err


def test_a_disk_that_is_full_at_the_end_leaves_what_was_measured(
    tmp_path: Path, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fio was run again at the end, found no room for its file, and all rows were thrown away."""
    asked = iter([harness.Disk(2.0, "fio")])

    def disk(*_: object) -> harness.Disk:
        if (found := next(asked, None)) is None:
            raise Unable("fio: no room")
        return found

    monkeypatch.setattr(harness, "_disk", disk)
    assert Doubling([1]).run(tmp_path, "--json", str(report), uses_disk=True) == 0
    said = json.loads(report.read_text())
    assert said["figures"] == {"of1": 2.0} and said["meta"]["disk"]["after_gb_s"] is None


def test_the_check_of_every_run_is_kept(tmp_path: Path, report: Path) -> None:
    """Cells measured after a check that was nearly off stood in a report as checked by the next
    run's check, made on a quiet machine."""
    errors = iter([0.149, 0.01])

    def cells(_options: Options) -> list[Cell]:
        check = Cell({"part": "check"}, lambda: [{"error": next(errors)}], again=True)
        return [check, *(Cell({"part": part}, lambda: [{"error": 0.0}]) for part in "ab")]

    def figures(rows: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
        return {"worst": max(row["error"] for row in rows)}, rows

    made = Experiment("checked", "Checked.", cells, figures)
    args = ["--dir", str(tmp_path), "--json", str(report)]
    assert main(made, [*args, "--cells", "check", "a"]) == 0
    assert main(made, [*args, "--resume"]) == 0
    said = json.loads(report.read_text())
    assert [row["error"] for row in said["rows"]] == [0.149, 0.01, 0.0, 0.0]
    assert said["figures"] == {"worst": 0.149}


def test_each_cell_keeps_what_fio_said_before_it(
    tmp_path: Path, report: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A report gave one rate, the last command's, but its cells came from many: fio had found 2.77
    GB/s where the rounds of the cell after it had 2.29, and nobody could see how much the ratios
    depended on which rate was used."""
    rates = iter([2.77] * 10 + [2.3] * 10 + [9.0] * 5)  # five before, five after; nothing new
    monkeypatch.setattr(fio, "version", lambda: "fio-3")
    monkeypatch.setattr(fio, "write", lambda file, *_: file.touch())
    monkeypatch.setattr(fio, "read", lambda *_, **__: fio.FioResult(10**9, 1 / next(rates), 0.0))

    def cells(_options: Options) -> list[Cell]:
        unread = {"system": "recompute", "mb": 0.0, "disk_gb_s": 5.0}
        rows = [unread, {"system": "as", "mb": 1.0, "disk_gb_s": 2.29}]
        return [Cell({"part": "cell", "cell": name}, lambda: rows) for name in ("base", "zipf")]

    made = Experiment("doubling", "Reads.", cells, lambda rows, _: ({}, rows), uses_disk=True)
    args = ["--dir", str(tmp_path), "--json", str(report), "--resume"]
    for name in ("base", "zipf"):
        assert main(made, [*args, "--cells", name]) == 0
    capsys.readouterr()
    assert main(made, args) == 0
    rows = json.loads(report.read_text())["rows"]
    assert [row["fio_gb_s"] for row in rows] == pytest.approx([2.77, 2.77, 2.3, 2.3])
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("before the rounds") == 1
    assert "cell base: the disk gave 2.29 GB/s before the rounds and 2.77 by fio" in said
    assert "ratios to recompute would be 1.21 times as large by fio's" in said


@pytest.mark.parametrize("change", [["--seed", "2"], ["--quick"]])
def test_other_parameters_are_measured_again(
    tmp_path: Path, report: Path, change: list[str]
) -> None:
    assert Doubling([1, 2]).run(tmp_path, "--json", str(report)) == 0
    again = Doubling([2, 5])
    assert again.run(tmp_path, "--json", str(report), "--resume") == 0
    assert again.measured == [5]
    other = Doubling([2, 5])
    assert other.run(tmp_path, "--json", str(report), "--resume", *change) == 0
    assert other.measured == [2, 5]


def test_a_rate_that_was_given_is_part_of_a_cell(tmp_path: Path, report: Path) -> None:
    """`--resume` took cells with compute stretched by one given rate for those of another rate."""
    for rate, measured in (("1.5", [1]), ("1.5", []), ("2", [1])):
        again = Doubling([1])
        given = ["--json", str(report), "--resume", "--disk-gb-s", rate]
        assert again.run(tmp_path, *given) == 0
        assert again.measured == measured


def test_some_cells_are_measured_by_their_parameters_and_the_rest_later(
    tmp_path: Path, report: Path
) -> None:
    """The base cell of a sweep may take half an hour, the whole sweep hours."""
    some = Doubling([1, 2, 3])
    assert some.run(tmp_path, "--json", str(report), "--cells", "1", "3") == 0
    assert some.measured == [1, 3]
    assert json.loads(report.read_text())["figures"] == {"of1": 2.0, "of3": 6.0}
    rest = Doubling([1, 2, 3])
    assert rest.run(tmp_path, "--json", str(report), "--resume") == 0
    assert rest.measured == [2]
    assert json.loads(report.read_text())["figures"] == {"of1": 2.0, "of2": 4.0, "of3": 6.0}


def test_a_cell_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Doubling([1, 2]).run(tmp_path, "--cells", "1", "7") == 2
    assert "--cells 7: no cell has that; there are: 1, 2" in capsys.readouterr().err


def test_the_cells_there_are_fit_on_a_line() -> None:
    """All 900 words, even those that every cell has, were listed after a mistyped one."""
    params = [
        {"model": model, "seed": 7, "item": item, "rows": 4 * item + 1000, "digest": "007"}
        for model in ("b", "a") for item in range(300)
    ]  # fmt: skip
    with pytest.raises(Unable) as told:
        _chosen([Cell(one, list) for one in params], ["x"])
    said = str(told.value).partition("there are: ")[2]
    assert said.startswith("b, a, 0, 1000, 1, 1004, ") and said.endswith(", 14 and 571 more")
    with pytest.raises(Unable, match=r"there are: 7, 007$"):
        _chosen([Cell({"seed": 7, "digest": "007"}, list)], ["x"])


@pytest.mark.parametrize("uses_disk", [False, True])
def test_a_rate_is_asked_for_where_it_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], uses_disk: bool
) -> None:
    """Experiments that use no disk rate accepted one, and said nothing."""
    with pytest.raises(SystemExit):
        Doubling([1]).run(tmp_path, "--help", uses_disk=uses_disk)
    assert ("--disk-gb-s" in capsys.readouterr().out) == uses_disk


def test_a_refused_command_leaves_what_was_measured(tmp_path: Path, report: Path) -> None:
    """After one mistyped cell name, hours of finished cells were gone."""
    assert Doubling([1]).run(tmp_path, "--json", str(report)) == 0
    assert Doubling([1]).run(tmp_path, "--json", str(report), "--cells", "7") == 2
    again = Doubling([1])
    assert again.run(tmp_path, "--json", str(report), "--resume") == 0
    assert again.measured == []


def test_without_resume_everything_is_measured_again(
    tmp_path: Path, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the earlier cells are not lost: hours went into them, and only one word was forgotten."""
    assert Doubling([1]).run(tmp_path, "--json", str(report)) == 0
    state = tmp_path / "doubling.cells.jsonl"
    before = state.read_text()
    again = Doubling([1], stop_at=1)
    assert again.run(tmp_path, "--json", str(report)) == 130
    assert not state.read_text()
    aside = tmp_path / "before.doubling.cells.jsonl"
    assert aside.read_text() == before and aside.name in capsys.readouterr().err
    assert again.run(tmp_path, "--json", str(report)) == 130
    assert aside.read_text() == before  # there was nothing new to set aside
    again = Doubling([1])
    assert again.run(tmp_path, "--json", str(report)) == 0
    assert again.measured == [1]


def test_quick_runs_leave_the_cells_of_a_full_run_to_a_later_resume(
    tmp_path: Path, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second of two quick runs set the first one's cells aside over those of a full run."""
    assert Doubling([1, 2, 3]).run(tmp_path, "--json", str(report)) == 0
    state = tmp_path / "doubling.cells.jsonl"
    full = state.read_text()
    said = ""
    for _ in range(3):
        assert Doubling([1]).run(tmp_path, "--json", str(report), "--quick") == 0
        said += capsys.readouterr().err
    asides = sorted(tmp_path.glob("before*.cells.jsonl"))
    assert len(asides) == 3 and all(str(aside) in said for aside in asides)
    (aside,) = (aside for aside in asides if aside.read_text() == full)
    aside.replace(state)
    again = Doubling([1, 2, 3])
    assert again.run(tmp_path, "--json", str(report), "--resume") == 0
    assert again.measured == []


def test_cells_that_a_report_leaves_out_are_counted(
    tmp_path: Path, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With fewer --cells it replaced the report of all: the worst of some passed for the worst."""
    assert Doubling([1, 2, 3]).run(tmp_path, "--json", str(report)) == 0
    assert "the report leaves" not in capsys.readouterr().out
    args = ("--json", str(report), "--resume", "--cells", "2")
    assert Doubling([1, 2, 3]).run(tmp_path, *args) == 0
    assert "2 finished cells are not among these" in capsys.readouterr().out


def test_a_line_cut_short_is_measured_again(tmp_path: Path, report: Path) -> None:
    assert Doubling([1, 2]).run(tmp_path, "--json", str(report)) == 0
    state = tmp_path / "doubling.cells.jsonl"
    state.write_text(state.read_text()[:-20])
    again = Doubling([1, 2])
    assert again.run(tmp_path, "--json", str(report), "--resume") == 0
    assert again.measured == [2]


@pytest.mark.parametrize(
    "line",
    [
        b'{"params": {}}',
        b"\0\0",
        b"\xff",
        b'{"params": {}, "rows": 5, "commit": "x"}',
        b"[]",
        b'{"params": {}, "rows": [1], "commit": "x"}',
    ],
)
def test_a_line_that_is_no_cell_is_named(
    tmp_path: Path, report: Path, capsys: pytest.CaptureFixture[str], line: bytes
) -> None:
    """Bytes that are not text, as a power cut may leave them, ended in a traceback."""
    state = tmp_path / "doubling.cells.jsonl"
    state.write_bytes(line + b"\n")
    assert Doubling([1]).run(tmp_path, "--json", str(report), "--resume") == 2
    assert f"{state} line 1" in capsys.readouterr().err


def test_a_kept_cell_that_lacks_what_a_figure_is_made_of_is_said(
    tmp_path: Path, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One from before a column was added gave a traceback after all was measured, and no report."""
    assert Doubling([1, 2]).run(tmp_path, "--json", str(report)) == 0
    state = tmp_path / "doubling.cells.jsonl"
    state.write_text(state.read_text().replace('"twice": 2', '"thrice": 3'))
    assert Doubling([1, 2]).run(tmp_path, "--json", str(report), "--resume") == 2
    assert "kept has no 'twice'" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("of", ["elsewhere", f"{host()}, 100000 processors"])
def test_cells_of_another_machine_are_not_resumed(
    tmp_path: Path, report: Path, capsys: pytest.CaptureFixture[str], of: str
) -> None:
    """Processors are counted: a machine with two and one with sixteen often name theirs alike."""
    assert Doubling([1]).run(tmp_path, "--json", str(report)) == 0
    state = state_file(report)
    assert state is not None
    cell = json.loads(state.read_text())
    assert cell["host"].startswith(host())
    state.write_text(json.dumps({**cell, "host": of}) + "\n")
    assert Doubling([1, 2]).run(tmp_path, "--json", str(report), "--resume") == 2
    assert f"another machine ({of})" in capsys.readouterr().err


def test_the_estimate_counts_only_what_is_left(
    tmp_path: Path, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Doubling([1, 2]).run(tmp_path, "--json", str(report)) == 0
    assert "Estimated time: 60 s (2 of 2 cells" in capsys.readouterr().out
    assert Doubling([1, 2, 3]).run(tmp_path, "--json", str(report), "--resume") == 0
    assert "Estimated time: 30 s (1 of 3 cells" in capsys.readouterr().out


def test_the_disk_that_compute_goes_by_is_said_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An hour's run used a rate that was a third of the disk's; only its report said so."""
    assert Doubling([1]).run(tmp_path, "--disk-gb-s", "1.5") == 0
    assert "; the disk reads 1.50 GB/s (given)." in capsys.readouterr().out


def test_plots_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert Doubling([1, 2]).run(tmp_path, "--plot", str(tmp_path / "plots")) == 0
    assert (tmp_path / "plots" / "doubling.line.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--resume"], "--json"),
        (["--json", "nowhere/at/all.json"], "no such directory"),
        (["--dir", "nowhere/at"], "--dir nowhere/at: no such directory"),
        (["--disk-gb-s", "0"], "above 0"),
        (["--disk-gb-s", "inf"], "above 0"),
        (["--seed", "-1"], "--seed must be at least 0 and below 2^63, got -1"),
        (["--json", "/"], "--json / is a directory: name a file in it"),
        (["--plot", f"{__file__}/plots"], f"{__file__} is a file: name a directory"),
        (["--json", "-", "--resume"], "name that file"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    tmp_path: Path, args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Doubling([1])
    assert made.run(tmp_path, *args) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
    assert not made.measured


def test_a_report_to_stdout_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Doubling([1]).run(tmp_path, "--json", "-") == 0
    out = capsys.readouterr().out
    assert json.loads(out[out.index("{") :])["figures"] == {"of1": 2.0}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("full", ["report", "cells", "data"])
def test_a_full_disk_is_named(
    tmp_path: Path, report: Path, full: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """ "No space left on device" did not say which of three file systems was full."""
    made, device = Doubling([1]), Path("/dev/full")
    where = {"report": report, "cells": state_file(report), "data": tmp_path}[full]
    assert where is not None

    def fill(_number: int) -> list[Row]:
        if full == "data":
            device.write_text("rows")
        where.unlink(missing_ok=True)
        where.symlink_to(device)
        return [{"twice": 2}]

    made._double = fill  # type: ignore[method-assign]
    assert made.run(tmp_path, "--json", str(report)) == 2
    err = capsys.readouterr().err
    assert f"No space left on device: '{where}'" in err and err.count("\n") == 1


def test_an_experiment_that_draws_nothing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It demanded matplotlib, made the folder and left it empty."""
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)
    made = Experiment("plain", "Draws nothing.", Doubling([1])._cells, Doubling([1])._figures)
    plots = tmp_path / "plots"
    assert main(made, ["--dir", str(tmp_path), "--plot", str(plots)]) == 0
    assert "plain draws nothing" in capsys.readouterr().out and not plots.exists()


def test_plots_without_matplotlib_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)
    made = Doubling([1])
    assert made.run(tmp_path, "--plot", str(tmp_path)) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not made.measured


@pytest.mark.parametrize("folder", ["closed", "closed/plots"])
def test_plots_that_cannot_be_written_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    """It was said only after everything was measured: hours later."""
    pytest.importorskip("matplotlib")
    closed = tmp_path / "closed"
    closed.mkdir()
    real = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed and real(path, mode))
    made = Doubling([1])
    assert made.run(tmp_path, "--plot", str(tmp_path / folder)) == 2
    assert f"{closed} cannot be written" in capsys.readouterr().err
    assert not made.measured


def test_a_disk_without_room_for_the_data_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store on a full disk evicts: the run ended hours later in an assertion of the harness."""
    data = Data.of(SHAPES["opt-6.7b"], 1, 4, tmp_path / "data", Knobs(), 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1 << 29))
    with pytest.raises(Unable, match=r"takes some 0\.\d GB, and .* 0\.5 free: name another --dir"):
        data.prepare(["plain", "int4"], [], [], Knobs())
    assert not data.folder.exists()


@pytest.mark.parametrize(("refused", "hit"), [("no room", 384), ("", 0)])
def test_what_was_not_hit_or_not_stored_is_no_row_of_zero_hit(refused: str, hit: int) -> None:
    """On a full disk the row "37 %, storing" came from prompts that hit and stored nothing."""
    zero_hit._check(SimpleNamespace(refused="", hit_tokens=384), 384)
    with pytest.raises(Unable, match="not stored: no room" if refused else "0 tokens were hit"):
        zero_hit._check(SimpleNamespace(refused=refused, hit_tokens=hit), 384)


@pytest.mark.parametrize("word", ["--help", "--no-such"])
@pytest.mark.parametrize(
    ("tables", "n_pages"), [(results_table, len(results_table.PAGES)), (reliability_table, 1)]
)
def test_tables_fill_no_page_when_asked_for_something_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str,
    tables: ModuleType, n_pages: int,
) -> None:  # fmt: skip
    """`--help` rewrote the pages and said nothing, as any misspelt option did; later the `--help`
    of one was a bare line, and a failure."""
    filled: list[Path] = []
    monkeypatch.setattr(tables, "fill", lambda page, _folder: filled.append(page))
    with pytest.raises(SystemExit) as ended:
        tables.main([word])
    assert not filled and ended.value.code == (0 if word == "--help" else 2)
    assert f"usage: python -m {tables.__name__}" in "".join(capsys.readouterr())
    assert tables.main([]) == 0 and len(filled) == n_pages


def test_an_experiments_help_says_how_it_is_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said `usage: bench_control.py`, which is not a command here."""
    monkeypatch.setattr(sys, "argv", [bench_control.__file__, "--help"])
    with pytest.raises(SystemExit):
        bench_control.main()
    assert capsys.readouterr().out.startswith("usage: python -m experiments.bench_control [")
