"""What commit a measurement says it is of."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from experiments import cells as module
from experiments.cells import Cells
from impress import report


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one file of code, taken for this one."""
    (tmp_path / "impress").mkdir()
    (tmp_path / "impress/code.py").write_text("A = 1\n")
    for command in (
        ("init", "-q"), ("add", "."),
        ("-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "first"),
    ):  # fmt: skip
        subprocess.run(("git", "-C", str(tmp_path), *command), check=True)
    monkeypatch.setattr(report, "_ROOT", tmp_path)
    return tmp_path


def test_new_files_of_code_are_edits_too(clone: Path) -> None:
    """Figures of a module that git did not know yet were published under a clean commit."""

    def now() -> str:
        report._commit_of.cache_clear()  # another process's first question
        return report.commit()

    clean = now()
    assert "dirty" not in clean
    (clone / "notes.txt").write_text("no code")
    assert now() == clean
    said = []
    for text in ("B = 1\n", "B = 2\n"):
        (clone / "impress/new.py").write_text(text)
        assert report.commit() == (said[-1] if said else clean)  # of the code that runs
        said.append(now())
    assert all(one.startswith(f"{clean}-dirty-") for one in said) and said[0] != said[1]


def test_a_cell_is_of_the_commit_its_run_began_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was committed while a cell was measured was taken for what had measured it."""
    monkeypatch.setattr(module, "commit", lambda: "before")
    cells = Cells(tmp_path / "x.json", resume=False)
    monkeypatch.setattr(module, "commit", lambda: "after")
    cells.add({"cell": "a"}, [{"x": 1}], 1.0)
    assert cells.commits([{"cell": "a"}]) == ["before"]
