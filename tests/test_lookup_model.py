"""Training of the lookup model: who goes on from what stands in --work."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.lookup_model.train import Run, arguments, main

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
    """It was trained on, and exported under the name of what was asked for."""
    work, out = tmp_path / "work", tmp_path / "out"
    given = ["--work", str(work), "--out", str(out), "--steps", "0", "--layers", "2"]
    Run(arguments([*given, "agreeing"])).save()
    assert main([*given, *other]) == 2
    err = capsys.readouterr().err
    assert f"{work}" in err and says in err and err.count("\n") == 1
    assert not out.exists()
    assert main([*given, "agreeing"]) == 0
    assert "resumed at" in capsys.readouterr().out and out.exists()
