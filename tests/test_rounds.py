"""Cells that take long: what a stopped run measured is kept, and the next goes on from there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from experiments import rounds as module
from experiments.cells import Cells
from experiments.rounds import Rounds
from experiments.systems import sweep
from experiments.systems.catalogue import chosen
from experiments.systems.cell import Bench, Load
from experiments.systems.data import Data
from experiments.systems.generate import Knobs
from experiments.systems.serve import Asking, Served, Server
from experiments.systems.shapes import Shape

PARAMS: dict[str, Any] = {"cell": "base", "zipf": None, "n": 4}
LOAD = Load(n_measured=4, n_warm=2, most_windows=1)


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Data]:
    made = Data.of(
        Shape("tiny", 2, 8, 4, 32, 128), 2, 2, tmp_path / "data", Knobs(), 1, tokens=(256, 384)
    )
    yield made
    made.remove()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(system, prefix, request) as they are served."""
    seen: list[tuple[str, int, int]] = []
    serve = Server.serve

    def seeing(self: Server, asking: Asking, question: Any = None) -> Served:
        seen.append((self.system.name, asking.prefix, asking.request))
        return serve(self, asking, question)

    monkeypatch.setattr(Server, "serve", seeing)
    return seen


def _measured(data: Data, rounds: Rounds | None) -> dict[str, list[Served]]:
    with Bench(chosen(["as", "impress"]), data, LOAD, 0.0) as bench:
        return bench.measure(rounds)


def test_a_cell_that_was_stopped_goes_on_with_the_round_it_was_in(
    data: Data, tmp_path: Path, served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base cell of `ttft` was cut off after 67 minutes, and all of it had to be measured
    again."""
    _measured(data, None)
    whole = served.copy()
    served.clear()
    report = tmp_path / "ttft.json"

    with monkeypatch.context() as patch:
        settle = Server.settle

        def stopped(self: Server) -> None:
            settle(self)
            if len(served) == 5:  # the first system of the third round
                raise KeyboardInterrupt

        patch.setattr(Server, "settle", stopped)
        with pytest.raises(KeyboardInterrupt):
            _measured(data, Rounds(report, PARAMS, resume=False))
    first = Rounds(report, PARAMS, resume=True)
    assert len(first.kept) == 2 and first.n_runs == 1

    served.clear()
    found = _measured(data, first)
    assert served == whole[4:]  # the same systems in the same order, from that round on
    assert first.n_runs == 2
    for name, of in found.items():
        assert len(of) == 4
        assert [asdict(one) for one in of[:2]] == [kept[name][0] for kept in first.kept]


def _kept(report: Path, params: dict[str, Any] = PARAMS, *, resume: bool = True) -> list[Any]:
    return Rounds(report, params, resume=resume).kept


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """The report of a run that measured two rounds."""
    made = Rounds(tmp_path / "ttft.json", PARAMS, resume=False)
    made.add({"as": [1]})
    made.add({"as": [2]})
    return tmp_path / "ttft.json"


def test_rounds_of_another_cell_or_commit_are_not_gone_on_with(
    report: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was said where the code had been edited meanwhile, and half an hour was gone. Later
    a line said so, and the rounds of a cell of hours were gone after any commit."""
    assert _kept(report) == [{"as": [1]}, {"as": [2]}]
    path = report.with_name("ttft.rounds.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(module, "commit", lambda: "another")
        assert _kept(report) == []
    aside = path.with_name(f"before.{path.name}")
    said = f"2 rounds of another commit are measured again: {aside} (renamed to {path.name}, "
    assert said + "--resume takes them up with that commit)" in capsys.readouterr().out
    assert _kept(report) == []  # the file is the other commit's now
    assert not capsys.readouterr().out  # which had no round
    aside.replace(path)
    assert _kept(report) == [{"as": [1]}, {"as": [2]}]


@pytest.mark.parametrize("n", [4, 2], ids=["unfinished", "finished"])
def test_rounds_of_a_cell_that_another_takes_the_place_of_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], n: int
) -> None:
    """Forty minutes of a cell went without a word where another was measured first, later with one.
    A cell that was finished is kept elsewhere."""
    made = Rounds(tmp_path / "ttft.json", {**PARAMS, "n": n}, resume=False)
    for i in range(2):
        made.add({"as": [i]})
    assert _kept(tmp_path / "ttft.json", {**PARAMS, "cell": "zipf 0.6"}) == []
    said = capsys.readouterr().out.splitlines()
    asides = [*tmp_path.glob("before*")]
    assert len(said) == len(asides) == (n == 4)
    for line, aside in zip(said, asides, strict=True):
        assert f"2 rounds of base, begun before, are put aside: {aside} " in line
        aside.replace(tmp_path / "ttft.rounds.jsonl")
        assert len(_kept(tmp_path / "ttft.json", {**PARAMS, "n": n})) == 2


@pytest.mark.parametrize("change", [{"params": PARAMS | {"n": 5}}, {"resume": False}])
def test_a_cell_begins_anew_where_it_is_another_or_nobody_asks_to_go_on(
    report: Path, change: dict[str, Any]
) -> None:
    assert _kept(report, **change) == []


def test_a_round_that_was_half_written_is_measured_again(report: Path) -> None:
    path = report.with_name("ttft.rounds.jsonl")
    path.write_text(path.read_text()[:-5])
    assert _kept(report) == [{"as": [1]}]
    again = Rounds(report, PARAMS, resume=True)
    again.add({"as": [3]})
    assert _kept(report) == [{"as": [1]}, {"as": [3]}]
    assert again.n_runs == 2


def test_without_resume_rounds_are_put_aside_with_the_cells(
    report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cells of before could be taken up again, and the cell that was under way could not."""
    path = report.with_name("ttft.rounds.jsonl")
    before = path.read_text()
    Cells(report, resume=False)
    aside = path.with_name("before.ttft.rounds.jsonl")
    assert not path.exists() and aside.read_text() == before
    assert f"rounds of before: {aside}" in capsys.readouterr().err
    aside.rename(path)
    assert len(_kept(report)) == 2


def test_a_cell_of_several_runs_is_no_better_checked_than_the_worst_of_them(tmp_path: Path) -> None:
    """It had the check, and fio's rate, of the run that ended it: 900 rounds behind a check of
    14.5 % were behind one of 3."""

    def run(**knows: float | None) -> Rounds:
        rounds = Rounds(tmp_path / "ttft.json", PARAMS, resume=True, knows=knows)
        rounds.add({"as": [1]})
        return rounds

    rounds = run(emulator_error=0.145, fio_gb_s=3.0)
    rounds.add({"as": [2]})
    rounds = run(emulator_error=0.03, fio_gb_s=2.0)
    assert sweep._known(rounds) == {"emulator_error": 0.145, "fio_gb_s": 3.0}
    assert sweep._known(run(emulator_error=None)) == {"emulator_error": None}


def test_without_a_report_nothing_is_kept(tmp_path: Path) -> None:
    rounds = Rounds(None, PARAMS, resume=False)
    rounds.add({"as": [1]})
    assert rounds.n_runs == 1 and not list(tmp_path.iterdir())
