"""The lookup model's commands: which runs go on from the state in --work, and what is refused."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from experiments.lookup_model import evaluate, train
from experiments.lookup_model.batches import Batch
from experiments.lookup_model.train import Losses, Run, arguments, main
from impress.demo import lookup

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (["specialised"], "is of variant agreeing, not specialised"),
        (["agreeing", "--layers", "3"], "is of layers 2, not 3"),
        (["agreeing", "--seed", "1"], "is of seed 0, not 1"),
        (["agreeing", "--lr", "0.01"], "is of lr 0.02, not 0.01"),
        (["agreeing", "--steps", "-1"], "is at step 0, beyond --steps"),
    ],
)
def test_a_state_of_another_run_is_refused(
    tmp_path: Path, other: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It used to be trained further, and exported under the name that was asked for."""
    work, out = tmp_path / "work", tmp_path / "out"
    given = ["--work", str(work), "--out", str(out), "--steps", "0", "--layers", "2"]
    Run(arguments([*given, "agreeing"])).save()
    assert main([*given, *other]) == 2
    err = capsys.readouterr().err
    assert f"{work}" in err and says in err and err.count("\n") == 1
    assert not out.exists()
    assert main([*given, "agreeing"]) == 0
    assert "resumed at" in capsys.readouterr().out and out.exists()


def test_a_run_that_is_stopped_keeps_its_step_and_goes_on_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C was a traceback and lost up to 199 steps; and of the lengths that documents take turns
    with, a run that went on began with the first: other weights, of the same command."""
    kinds: list[int] = []

    def step(self: Run, batch: Batch) -> Losses:
        kinds.append(batch.see.n_document)
        if self.at.step == 1 and len(kinds) == 2:
            signal.raise_signal(signal.SIGINT)
        return Losses(*[torch.zeros(())] * 4)

    monkeypatch.setattr(Run, "step", step)
    monkeypatch.setattr(train, "STAGES", (((512, 256), 4, 0.0),))
    given = ["agreeing", "--work", str(tmp_path), "--layers", "2", "--tokens-per-step", "600"]
    before = signal.getsignal(signal.SIGINT)
    assert main([*given, "--steps", "5"]) == 130
    assert "goes on from" in capsys.readouterr().err and signal.getsignal(signal.SIGINT) == before
    assert main([*given, "--steps", "5"]) == 0
    assert kinds == [512, 256, 512, 256, 512]
    assert '"step": 2' in capsys.readouterr().out

    (tmp_path / "state.pt").write_bytes((tmp_path / "state.pt").read_bytes()[:100])
    assert main([*given, "--steps", "5"]) == 2
    assert "state.pt is damaged: remove it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nope"], "nope: no config.json there: name a checkpoint's folder"),
        (["agreeing", "--lengths", "512", "99999"], "--lengths 99999: want 64 to 2298 for this"),
        (["agreeing", "--lengths", "2299"], "--lengths 2299: want 64 to 2298 for this"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(
    monkeypatch: pytest.MonkeyPatch, args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing folder was looked for on the network, and each of these ended in a traceback."""
    monkeypatch.chdir(Path(lookup.__file__).parent)
    assert evaluate.main(args) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {says}") and err.count("\n") == 1


def test_questions_have_room_behind_the_longest_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(lookup.__file__).parent)
    assert evaluate.main(["agreeing", "--lengths", "2298", "--docs", "1", "--questions", "1"]) == 0
    assert capsys.readouterr().out.count("own") == 3


def test_a_folder_that_cannot_be_made_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """It ended in a traceback."""
    assert main(["agreeing", "--work", "/proc/nope"]) == 2
    err = capsys.readouterr().err
    assert "/proc/nope" in err and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize("command", [evaluate.main, main])
def test_help_tells_the_command_and_every_option(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """It said evaluate.py, which is not a command here, and nothing about most options."""
    with pytest.raises(SystemExit):
        command(["--help"])
    usage, options = capsys.readouterr().out.split("options:")
    name = command.__module__.rpartition(".")[2]
    assert usage.startswith(f"usage: python -m experiments.lookup_model.{name} ")
    for option in re.split(r"\n  (?=--)", options)[1:]:
        assert re.search(r"\s\s\w", option), option
