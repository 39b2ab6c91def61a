"""The page of results is filled from reports; the experiments run one after another."""

from __future__ import annotations

import argparse
import errno
import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import all as everything
from experiments import fio, repack, results_table, ttft
from experiments.harness import Disk, Options
from experiments.results_lines import LINES
from experiments.systems import emulator, sizes
from experiments.systems.clock import PAPER_DISK_GB_S
from experiments.systems.sweep import BASE
from impress.types import Geometry

PAGE = "before\n<!-- table: NAME -->\nold\n<!-- end -->\nafter\n"
META = {
    "date": "2030-01-02T03:04:05+00:00", "commit": "abc", "quick": True,
    "cells": {"commits": ["abc"]}, "host": "Linux 6.2 x86_64, AMD EPYC",
}  # fmt: skip


def _filled(tmp_path: Path, name: str, reports: dict) -> str:
    page, folder = tmp_path / "page.md", tmp_path / "results"
    folder.mkdir()
    for report, content in reports.items():
        (folder / f"{report}.json").write_text(json.dumps({"meta": META, "rows": [], **content}))
    page.write_text(PAGE.replace("NAME", name))
    results_table.fill(page, folder)
    return page.read_text()


@pytest.mark.parametrize("text", ['{"figures": ', "[]"])
def test_a_file_that_is_no_report_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """A traceback named neither the file nor what to do, at the very end of `experiments.all`."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "ttft.json").write_text(text)
    assert results_table.fill_all(tmp_path) == 2
    assert f"{tmp_path}/results/ttft.json is no report" in capsys.readouterr().err


def test_a_page_for_which_there_is_no_room_stays_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of hours on a disk that had filled, RESULTS.md was left empty."""
    page = tmp_path / "RESULTS.md"
    page.write_text("hours of prose\n<!-- table: runs -->\n<!-- end -->\n")
    before = page.read_text()
    write = Path.write_text

    def full(self: Path, text: str, *args: Any, **named: Any) -> int:
        if self.parent != tmp_path:
            return write(self, text, *args, **named)
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert results_table.fill_all(tmp_path) == 2
    assert page.read_text() == before and [*tmp_path.glob(".*")] == []
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "RESULTS.md" in err and err.count("\n") == 1


def test_a_figure_stands_beside_the_papers(tmp_path: Path) -> None:
    text = _filled(tmp_path, "paper", {"ttft": {"figures": {"p50_vs_as_h2o_lfu": 1.75}}})
    (line,) = [row for row in text.splitlines() if "p50 against AS+H2O+LFU" in row]
    assert "1.2–2.8×" in line
    assert "1.75×" in line
    assert "emulated" in line
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert text.count("not yet run") >= len(LINES) / 2


def test_figures_of_cells_stand_in_the_lines_they_are_for(tmp_path: Path) -> None:
    """`experiments.all` measured OPT-30B and requests in a row, and the page said "not yet run"."""
    text = _filled(tmp_path, "paper", {
        "ttft": {"figures": {
            "in_a_row 8.p50_vs_as_h2o_lfu": 1.25,
            "worst_vs_best_of_three": 1.25, "worst_mean_vs_best_of_three": 1.125,
            "p50_vs_as_int4": 0.5, "p50_vs_as_int4_low": 0.25, "p50_vs_as_int4_high": 0.75,
            "shape opt-30b.p50_vs_as_h2o_lfu": 1.5, "ratio 400.p50_vs_as_h2o_lfu": 1.75,
        }},
        "ttft_modes": {"figures": {"worst_mean_vs_best_of_three": 1.0625}},
    })  # fmt: skip
    lines = text.splitlines()
    assert [row for row in lines if "OPT-30B" in row and "| 1.50×; " in row]
    assert [row for row in lines if "400 GB" in row and "| 1.75×; " in row]
    assert [row for row in lines if "eight requests in a row" in row and " 1.25× " in row]
    (line,) = [row for row in lines if "the chosen mode" in row]
    assert "| p50 1.25×; mean 1.12× |" in line
    (line,) = [row for row in lines if "with nothing but these systems" in row]
    assert "| p50 not yet run; mean 1.06× |" in line
    assert [row for row in lines if "int4" in row and "| 0.50× [0.25×, 0.75×] |" in row]


def test_real_work_in_a_stretched_time_weighs_more_with_the_papers_disk(tmp_path: Path) -> None:
    """The mapping list's share was given as measured, under the paper's 2 %: on a disk a quarter as
    fast, its own time was compared with a total whose waits and reads are four times as long. (Of
    80 ms here 32 are these, and would be 8.)"""
    base = {"part": "cell", "cell": "base", "system": "impress", "map_share": 0.0175,
            "map_cpu_share": 0.015, "map_beside_share": 0.01, "dilation": 4.0,
            "mean_ms": 20.0, "stated_ms": 2.0, "ssd_floor_ms": 6.0}  # fmt: skip
    text = _filled(tmp_path, "paper", {"ttft": {"figures": {}, "rows": [base]}})
    (line,) = [row for row in text.splitlines() if "mapping list" in row]
    shares = "waited 1.75%; computed 1.50%; with a disk of 5 GB/s waited 2.5%; computed 2.1%"
    assert f"| {shares}; beside, by threads that copy, 1.00% | emulated |" in line


def test_a_figure_of_the_papers_without_one_of_ours_has_its_line(tmp_path: Path) -> None:
    """The page said that it sets every figure beside ours; figures that nobody measured, or that
    only a report's rows tell, had no line."""
    base = {"part": "cell", "cell": "base", "system": "as", "io_ms": 30.0, "p50_ms": 40.0}
    text = _filled(tmp_path, "paper", {
        "ttft": {"figures": {}, "rows": [base]},
        "repack": {"figures": {}, "rows": [{"spans": 8, "moved_loaded": 3, "alone_s": 90.4}]},
    })  # fmt: skip
    a_pass = (
        "spans 8; moved beside requests 3; of this machine's clock: not yet run; the rest, "
        "without requests, in 90 s"
    )
    for what, ours in (("I/O as a share", "AS 75%"), ("a pass", a_pass), ("alike", "not measured")):
        (line,) = [row for row in text.splitlines() if what in row]
        assert f"| {ours} |" in line


def test_a_withdrawn_experiment_gives_no_figure(tmp_path: Path) -> None:
    text = _filled(tmp_path, "paper", {"ttft": {"figures": {"emulator_error": 0.3}}})
    (line,) = [row for row in text.splitlines() if "p50 against AS+H2O+LFU" in row]
    assert "withdrawn" in line


def test_what_was_emulated_without_a_check_says_so_and_every_commit_is_named(
    tmp_path: Path,
) -> None:
    """A resumed run was listed under its last commit alone, and a run of some cells as checked."""
    meta = {
        **META, "emulated": "compute", "cells": {"commits": ["old", "new"]},
        "host": "Linux 6.1 x86_64, Intel(R) Xeon(R) Processor",
    }  # fmt: skip
    text = _filled(tmp_path, "runs", {
        "ttft": {"figures": {}, "meta": meta},
        "scale": {"figures": {"emulator_error": 0.05}, "meta": meta},
        "hits": {"figures": {}},
    })  # fmt: skip
    assert "| ttft | 2030-01-02 | `old`, `new` | quick | Intel Xeon | not checked |" in text
    assert "| scale | 2030-01-02 | `old`, `new` | quick | Intel Xeon | 5.0% |" in text
    assert "| hits | 2030-01-02 | `abc` | quick | AMD EPYC |  |" in text


def test_a_report_of_an_experiment_without_cells_has_its_line(tmp_path: Path) -> None:
    """With such a report in the folder, `experiments.all` ended in a KeyError, hours later."""
    meta = {name: value for name, value in META.items() if name != "cells"}
    text = _filled(tmp_path, "runs", {"tiers": {"figures": {}, "meta": meta}})
    assert "| tiers | 2030-01-02 | `abc` | quick | AMD EPYC |  |" in text


def test_checks_that_failed_are_said_beside_those_behind_which_cells_were_measured(
    tmp_path: Path,
) -> None:
    """A run withdrawn and measured again until it passed was listed as if it had never been off."""

    def check(*errors: float) -> list[dict]:
        return [{"part": "check", "mode": mode, "error": error}
                for mode, error in zip("ab", errors, strict=True)]  # fmt: skip

    rows = [*check(0.02, 0.19), *check(0.03, 0.01), *check(0.05, 0.04)]
    text = _filled(tmp_path, "runs", {"ttft": {"figures": {"emulator_error": 0.05}, "rows": rows}})
    assert "| 5.0% (1 of 3 checks failed, by 19.0% at most) |" in text


def test_rows_are_printed_by_the_names_they_have(tmp_path: Path) -> None:
    row = {"model": "m", "threshold": 0.31112, "rows": 0.5, "right": 1.0, "exact": 1.0,
           "fell_back": 0.25}  # fmt: skip
    text = _filled(tmp_path, "threshold", {"threshold": {"figures": {}, "rows": [row]}})
    assert "| m | 0.311 | 0.5 | 1 | 1 | 0.25 |" in text


def test_a_table_none_of_whose_columns_were_measured_says_so(tmp_path: Path) -> None:
    """The table was a head without rows, as if there had been nothing to say."""
    row = {"model": "m", "threshold": 0.3, "share": 0.5}
    text = _filled(tmp_path, "threshold", {"threshold": {"figures": {}, "rows": [row]}})
    assert "not yet run" in text and "| model |" not in text


def test_cells_stand_side_by_side_and_the_base_cell_in_full(tmp_path: Path) -> None:
    def rows(cell: str, **ms: float) -> list[dict]:
        rest = {
            "p90_ms": 0,
            "ssd_floor_ms": 0,
            "io_ms": 0,
            "mb": 0,
            "ssd_mb": 0,
            "behind_mb": 0,
            "hbm": 0,
            "dram": 0,
            "rows": 1,
            "dilation": 2.5,
        }
        return [{"part": "cell", "cell": cell, "system": name, "p50_ms": n, "mean_ms": 1.5 * n,
                 "fell_back": 0.25, **rest} for name, n in ms.items()]  # fmt: skip

    report = {"figures": {}, "rows": [
        *({**row, "commit": "abc", "fio_gb_s": 3.0} for row in rows(
            "base", recompute=30.0, as_h2o_lfu=20.0, impress=10.0, quality=12.0, exact=40.0)),
        *rows("zipf 1.2", recompute=30.0, quality=10.0, exact=40.0, auto=11.0),
    ]}  # fmt: skip
    text = _filled(tmp_path, "ttft.cells", {"ttft": report})
    assert "| base | 0.25 | 2 | 3 | abc | 30 | 20 | 10 | 12 | 40 |  | 2 | 2 |  |  |" in text
    assert "| zipf 1.2 |  | 2 |  |  | 30 |  |  | 10 | 40 | 11 |  |  | 1.1 | 1.1 |" in text
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("NAME", "ttft"))
    results_table.fill(page, tmp_path / "results")
    assert page.read_text().count("| base |") == 5
    assert "zipf 1.2" not in page.read_text()


def test_a_table_across_cells_has_the_systems_that_were_measured(tmp_path: Path) -> None:
    made = {"part": "cell", "cell": "zipf 1.2", "dilation": 2.5}
    ms = {"recompute": 30.0, "quality": 10.0, "exact": 40.0, "auto": 11.0}
    rows = [{**made, "system": name, "p50_ms": n, "mean_ms": n} for name, n in ms.items()]
    text = _filled(tmp_path, "ttft_modes.cells", {"ttft_modes": {"figures": {}, "rows": rows}})
    assert "| cell | disk GB/s | fio GB/s | commit | recompute | quality | exact | auto |" in text
    assert "| zipf 1.2 | 2 |  |  | 30 | 10 | 40 | 11 | 1.1 | 1.1 |" in text


def test_waits_that_end_late_beside_readers_are_said(tmp_path: Path) -> None:
    """Readers hold the interpreter, so an emulated wait ends late: that was 22 % of the time of
    int4 of everything, and no table showed it."""
    rest = dict.fromkeys(
        ("p50_low", "p50_high", "p90_ms", "mean_ms", "io_ms", "ssd_floor_ms", "mb", "ssd_mb",
         "behind_mb", "hbm", "dram", "rows", "fell_back"), 0.5
    )  # fmt: skip
    ms = {"as_int4": (11.1, 4.35, 1.95), "exact": (46.0, 3.33, 1.63), "impress": (26.2, 2.36, 1.97)}
    rows = [
        {"part": "cell", "cell": "base", "system": name, **rest, "p50_ms": p50,
         "emulated_ms": waited, "stated_ms": stated}
        for name, (p50, waited, stated) in ms.items()
    ]  # fmt: skip
    said, _ = ttft.figures(rows, _options(tmp_path, quick=True))
    assert said["late_share_worst"] == pytest.approx((4.35 - 1.95) / 11.1)
    before = {**rows[1], "system": "as"}
    del before["stated_ms"]
    said, _ = ttft.figures([before], _options(tmp_path, quick=True))
    assert "late_share_worst" not in said
    text = _filled(tmp_path, "ttft", {"ttft": {"figures": {}, "rows": [*rows, before]}})
    assert "| I/O ms | waits ms | stated ms |" in text
    assert "| as_int4 | 11.1 | 0.5 | 0.5 | 0.5 | 4.35 | 1.95 |" in text
    assert "| as | 46 | 0.5 | 0.5 | 0.5 | 3.33 | – |" in text


def test_filling_twice_changes_nothing(tmp_path: Path) -> None:
    once = _filled(tmp_path, "runs", {"hits": {"figures": {}}})
    results_table.fill(tmp_path / "page.md", tmp_path / "results")
    assert (tmp_path / "page.md").read_text() == once
    assert "| hits | 2030-01-02 | `abc` | quick | AMD EPYC |  |" in once


def test_one_that_fails_does_not_stop_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(everything, "NAMES", ("no_such", "results_table_no"))
    args = argparse.Namespace(out=tmp_path, dir=tmp_path, quick=True, resume=False)
    ran = [everything.one(name, args) for name in everything.NAMES]
    assert [r.status for r in ran] == [1, 1]
    everything._say(ran)
    assert capfd.readouterr().out.count("FAILED") == 2


@pytest.mark.parametrize("out", ["docs/results", "docs/../docs/results/", "docs/other"])
def test_pages_are_filled_from_their_reports_however_the_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    """`--out docs/results` replaced the reports and left the pages as they were."""
    filled: list[str] = []
    monkeypatch.setattr(everything, "_ROOT", tmp_path)
    monkeypatch.setattr(everything, "one", lambda name, _args: everything.Ran(name, 0, 0.0))
    monkeypatch.setattr(results_table, "fill", lambda page, _out: filled.append(page.name))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    assert everything.main(["--only", "hits", "--out", out]) == 0
    assert filled == ([] if "other" in out else [*results_table.PAGES])


def test_an_experiment_that_is_there_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ran twice. Of two times `trace` one was left out where its report is of a file, and the
    other one replaced that report."""
    monkeypatch.setattr(everything, "one", lambda name, _args: everything.Ran(name, 0, 0.0))
    assert everything.main(["--only", "trace", "trace", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: --only: trace more than once\n"


@pytest.mark.parametrize("given", [False, True])
def test_made_up_conversations_never_replace_the_report_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *,
    given: bool,
) -> None:  # fmt: skip
    """The command that does all again replaced a trace's table with one of nobody's requests."""
    ran: list[str] = []

    def one(name: str, *_: Any) -> everything.Ran:
        ran.append(name)
        return everything.Ran(name, 0, 0.0)

    monkeypatch.setattr(everything, "one", one)
    command = ["--only", "hashpool", "trace", "--out", str(tmp_path)]
    if given:
        (tmp_path / "a.jsonl").touch()
        command += ["--trace", str(tmp_path / "a.jsonl")]
    assert everything.main(command) == 0
    for synthetic, skipped in ((True, False), (False, not given)):
        assert ran == ["hashpool", "trace"]
        ran.clear()
        capsys.readouterr()
        report = {"meta": {**META, "synthetic": synthetic}, "rows": [{"trace": "b.jsonl"}]}
        (tmp_path / "trace.json").write_text(json.dumps(report))
        assert everything.main(command) == 0
        assert ("trace: left as it is" in capsys.readouterr().out) == skipped
        assert ("trace" not in ran) == skipped


def test_a_run_that_is_stopped_and_gone_on_with_takes_no_cell_of_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the experiment under way had put its cells aside: --resume reported those of an older
    commit for all that came after it. What is not run keeps its own."""
    names = ("hits", "hashpool", "trace", "threshold")
    kept = [tmp_path / f"{name}.{what}.jsonl" for name in names for what in ("cells", "rounds")]
    for path in kept:
        path.write_text("older")
    report = {"meta": {**META, "synthetic": False}, "rows": []}  # so it is left as it is
    (tmp_path / "trace.json").write_text(json.dumps(report))
    begun: list[str] = []

    def one(name: str, *_: Any) -> everything.Ran:
        begun.append(name)
        if len(begun) == 1:
            raise KeyboardInterrupt
        return everything.Ran(name, 0, 0.0)

    monkeypatch.setattr(everything, "one", one)
    command = ["--only", "hits", "hashpool", "trace", "--out", str(tmp_path)]
    assert everything.main(command) == 130
    (tmp_path / "hits.cells.jsonl").write_text("newer")
    assert everything.main([*command, "--resume"]) == 0
    assert begun == ["hits", "hits", "hashpool"]
    assert (tmp_path / "hits.cells.jsonl").read_text() == "newer"
    left = {path.name.split(".")[0] for path in kept if path.exists()}
    assert left == {"hits", "trace", "threshold"}
    assert all((tmp_path / f"before.{path.name}").exists() for path in kept[:4])


def test_a_run_that_nothing_can_come_of_leaves_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without matplotlib each experiment refused, one after the other, and all of their cells had
    been put aside before."""
    kept = tmp_path / "hits.cells.jsonl"
    kept.write_text("older")
    monkeypatch.setattr("experiments.figures.find_spec", lambda _name: None)
    monkeypatch.setattr(everything, "one", lambda *_: pytest.fail("it began"))
    assert everything.main(["--only", "hits", "--out", str(tmp_path)]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert kept.read_text() == "older"


def test_what_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everything, "_LIMIT_S", {True: 0})
    args = argparse.Namespace(out=tmp_path, dir=tmp_path, quick=True, resume=False)
    assert everything.one("hits", args).status == 124


_STOPPED_BY_ITS_CHILD = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
from experiments import all as everything
sys.executable, *args = sys.argv[1:]
sys.exit(everything.main(args))
"""
_CHILD = f"""#!{sys.executable}
import os, signal
from pathlib import Path
term = {{signal.SIGTERM}}
signal.pthread_sigmask(signal.SIG_BLOCK, term)
os.kill(os.getppid(), int(Path(__file__).with_name("how").read_text()))
if signal.sigtimedwait(term, 60):
    Path(__file__).with_name("ended").touch()
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_experiment_under_way_too(tmp_path: Path, how: signal.Signals) -> None:
    """A scheduler ended `experiments.all`, and its child went on for hours; a closed terminal ended
    both, and the child's data stayed."""
    (tmp_path / "how").write_text(str(how.value))
    child = tmp_path / "child.py"
    child.write_text(_CHILD)
    child.chmod(0o755)
    args = ["--quick", "--only", "hits", "--out", str(tmp_path), "--dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", _STOPPED_BY_ITS_CHILD, str(child), *args], check=False,
        cwd=Path(everything.__file__).parent.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert (tmp_path / "ended").exists()
    assert done.returncode == 130 and "stopped; --resume goes on" in done.stdout


_NOTES_WHAT_IT_IS_TOLD = f"""#!{sys.executable}
import sys
from pathlib import Path
Path(__file__).with_name("told").write_text(" ".join(sys.argv))
"""


@pytest.mark.parametrize("given", [(), ("--disk-gb-s", "1.5")])
def test_no_rate_but_a_given_one_stands_for_a_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...]
) -> None:
    """The command that does all again passed fio's one reading on as if a user had given it:
    compute was stretched by it for hours, whatever the disk gave by then."""
    child = tmp_path / "child.py"
    child.write_text(_NOTES_WHAT_IT_IS_TOLD)
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    monkeypatch.setattr(fio, "version", lambda: "fio-3")
    args = ["--only", "ttft", "--out", str(tmp_path), "--dir", str(tmp_path), *given]
    assert everything.main(args) == 0
    told = (tmp_path / "told").read_text().partition("--disk-gb-s")[1:]
    assert told == (("--disk-gb-s", " 1.5") if given else ("", ""))


def test_a_path_that_cannot_be_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace.json in the folder of reports that was not a report gave a traceback."""
    (tmp_path / "trace.json").touch()
    for out, said in ((tmp_path / "trace.json" / "out", "directory"), (tmp_path, "no report")):
        assert everything.main(["--only", "trace", "--out", str(out)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "trace.json" in line and said in line


def test_a_folder_for_reports_is_made_where_its_parent_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped path was made in full, and hours of reports went there."""
    monkeypatch.setattr(everything, "one", lambda name, _args: everything.Ran(name, 0, 0.0))
    for out, made in ((tmp_path / "no" / "out", False), (tmp_path / "out", True)):
        assert everything.main(["--only", "hits", "--out", str(out)]) == (0 if made else 2)
        told = f"--out {out}: no such directory to make it in"
        assert (out.exists(), told in capsys.readouterr().err) == (made, not made)
    assert not (tmp_path / "no").exists()


def test_every_option_of_the_command_that_does_all_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        everything.main(["--help"])
    options = " ".join(capsys.readouterr().out.split("options:")[1].split())
    for word in ("these: accuracy, threshold", "(default: all)", "from which alone the tables"):
        assert word in options


@pytest.mark.parametrize("given", ["--dir", "--trace"])
def test_what_is_not_there_is_said_once_and_not_by_each_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    missing = tmp_path / "missing"
    assert everything.main(["--quick", "--out", str(tmp_path), given, str(missing)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{given} {missing}: no such" in line


def test_the_pages_have_a_table_for_every_report() -> None:
    docs = Path(everything.__file__).parent.parent / "docs"
    pages = "".join((docs / page).read_text() for page in results_table.PAGES)
    for name in ("ttft.cells", *results_table._COLUMNS):
        assert pages.count(f"<!-- table: {name} -->") == 1, name


def _options(tmp_path: Path, *, quick: bool, unchecked: bool = False) -> Options:
    more = argparse.Namespace(unchecked=unchecked)
    return Options(quick, None, None, False, tmp_path, 1, Disk(1.0, "given"), more, ExitStack())


CHECK = {"part": "check", "mode": "exact", "real_ms": 10.0, "emulated_ms": 14.0, "error": 0.4}


def test_an_emulator_that_is_off_is_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulator, "check", lambda _folder, _rounds: [CHECK])
    options = _options(tmp_path, quick=True)
    rows = [dict(row) for cell in ttft.cells(options) for row in cell.measure()]
    assert [row["part"] for row in rows] == ["check"]
    assert ttft.figures(rows, options)[0] == {"emulator_error": 0.4}


@pytest.mark.parametrize(
    ("behind", "said"),
    [((0.01, 0.149), {"emulator_error": 0.149}), ((0.01, None), {}), ((), {"emulator_error": 0.4})],
)
def test_the_worst_check_that_a_cell_was_measured_behind_is_reported(
    behind: tuple[float | None, ...], said: dict[str, float]
) -> None:
    """A run that was off gave no cell: a later run, on a quiet machine, is not withdrawn by it. A
    run that was not checked makes the whole unchecked."""
    cells = [{"part": "cell", "emulator_error": error} for error in behind]
    assert sizes.checked([CHECK, *cells]) == (said, not behind)


def test_a_report_says_when_the_disk_was_measured(tmp_path: Path) -> None:
    """The report of `repack`, which goes by one rate, said "before each round of requests"."""
    options = replace(_options(tmp_path, quick=True), disk=Disk(1.0, "fio"))
    said = [one.EXPERIMENT.meta(options)["emulated"] for one in (ttft, repack)]
    assert ["before each round" in words for words in said] == [True, False]


def test_more_requests_are_another_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--resume` took 40 requests in a row for the 200 that were by then asked for."""

    def in_a_row() -> Mapping[str, Any]:
        cells = ttft.cells(_options(tmp_path, quick=False))
        return next(cell.params for cell in cells if cell.params.get("in_a_row") == 8)

    before = in_a_row()
    monkeypatch.setattr(ttft, "N_IN_A_ROW", {False: 40})
    assert in_a_row() != before


def test_the_base_cell_is_what_the_others_depart_from(tmp_path: Path) -> None:
    check, base, *others = ttft.cells(_options(tmp_path, quick=False))
    assert check.params == {"part": "check"}
    assert len(others) == sum(len(values) for values in ttft.VARIED.values())
    for cell in others:
        changed = [name for name in BASE if cell.params[name] != base.params[name]]
        assert len(changed) == 1
    assert len({json.dumps(cell.params) for cell in others}) == len(others)


def test_figures_set_the_papers_system_against_its_rivals(tmp_path: Path) -> None:
    made = {"p50_low": 0.0, "p50_high": 0.0, "p90_ms": 0.0, "emulated_ms": 0.0, "mb": 0.0,
            "ssd_mb": 0.0, "hbm": 0.0, "dram": 0.0, "rows": 0.0, "fell_back": 0.1}  # fmt: skip
    ms = {"impress": 10, "as_h2o_lfu": 20, "recompute": 30, "as_int4": 8, "quality": 12,
          "exact": 40, "auto": 12.3}  # fmt: skip
    rows = [
        {"part": "cell", "cell": "base", "system": name, "p50_ms": float(n), "io_ms": n / 2, **made}
        for name, n in ms.items()
    ]
    said, _ = ttft.figures(rows, _options(tmp_path, quick=True))
    assert said["p50_vs_as_h2o_lfu"] == 2.0
    assert said["p50_vs_recompute"] == 3.0
    assert said["p50_vs_as_int4"] == 0.8
    assert said["worst_vs_best_of_three"] == pytest.approx(1.025)
    assert said["fallback_share"] == 0.1


README_ROWS = {
    "| Llama-3-8B on": "shape llama-3-8b", "| OPT-30B": "shape opt-30b", "| OPT-6.7B": "base",
}  # fmt: skip


@pytest.mark.parametrize("begin", README_ROWS)
def test_the_readme_has_the_reports_figures_and_says_what_caches_gave(begin: str) -> None:
    """Hits served half from caches were listed as "read from the SSD": OPT-6.7B's 0.70 of
    recomputing is more than 1 where the SSD gives all. And of two machines that it was measured on,
    the slower one's 0.28 was left out beside the other's 0.17."""
    root = Path(everything.__file__).parents[1]
    (line,) = [ln for ln in (root / "README.md").read_text().splitlines() if ln.startswith(begin)]
    _, hit, said, _, _ = line.split("|")
    ratios, alone = [], []
    for name in ("ttft", "ttft_xeon"):
        report = json.loads((root / f"docs/results/{name}.json").read_text())
        if report["meta"]["quick"]:
            pytest.skip("a quick run stands in place of the full one's report")
        of = [row for row in report["rows"] if row.get("cell") == README_ROWS[begin]]
        rows = {row["system"]: row for row in of}
        if not rows:
            continue
        exact, again_ms = rows["exact"], rows["recompute"]["p50_ms"]
        assert f"{round(100 * (1 - exact['ssd_mb'] / exact['mb']))} %" in hit
        ratios.append(f"{exact['p50_ms'] / again_ms:.2f}")
        alone.append(f"{exact['mb'] / PAPER_DISK_GB_S / again_ms:.2f}")
    assert re.findall(r"\d\.\d\d", said) == [*ratios, alone[0]]


def test_the_readme_says_what_storing_costs_beside_restoring() -> None:
    """It gave only the processor time of a restore, and nothing on what stores write in a day:
    where everything is stored at its first use, storing is what a busy server pays for."""
    root = Path(everything.__file__).parents[1]
    cpu: dict[str, list[list[float]]] = {"ours": [], "peers": []}
    for line in (root / "docs/VLLM.md").read_text().splitlines():
        ours = line.startswith("| impress, ")
        if ours or line.startswith(("| the same, `use_odirect`", "| vLLM 0.32.0, file tier")):
            _, _, store, _, restore, *_ = line.split("|")
            figures = re.findall(r"\((\.\d+)\)", store + restore)
            cpu["ours" if ours else "peers"].append([float(figure) for figure in figures])
    assert [len(rows) for rows in cpu.values()] == [3, 2]
    said = " ".join((root / "README.md").read_text().split())
    spans = {
        who: [f"{min(way):.2f} to {max(way):.2f}" for way in zip(*rows, strict=True)]
        for who, rows in cpu.items()
    }
    assert "Storing takes {} seconds a GB, and restoring {}.".format(*spans["ours"]) in said
    assert "take {} and {}, and check".format(*spans["peers"]) in said
    llama = Geometry(n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, dtype="bfloat16")
    assert f"needs {llama.token_bytes >> 10} KiB for each token" in said
    a_day = 1_000 * 86_400 * llama.token_bytes
    assert f"1,000 new tokens a second are {a_day / 1e12:.0f} TB a day" in said


def test_no_round_of_a_published_cell_was_divided_by_the_rate_of_a_disk_that_stood_still() -> None:
    """Eleven of a cell's hundred rounds were, and all its systems took 2 ms in them: nobody looked
    at the rates that its rows say."""
    seen, full = 0, False
    for path in (Path(__file__).parents[1] / "docs/results").glob("*.json"):
        report = json.loads(path.read_text())
        if report["meta"]["quick"] and path.stem in everything.NAMES:
            continue  # it stands in place of the full one's
        full |= path.stem == "ttft"
        for row in report["rows"]:
            if "disk_gb_s_low" in row and row["disk_gb_s"]:
                seen += 1
                assert row["disk_gb_s_low"] > row["disk_gb_s"] / 2, (path.name, row["cell"])
    assert seen > (400 if full else 0)
