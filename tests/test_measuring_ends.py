"""A program that experiments measure with fails: a line says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments import fio, load
from experiments.common import Unable


@pytest.mark.parametrize(
    ("ends", "said"),
    [(subprocess.CompletedProcess([], -9, "", ""), "fio failed: exit status -9"),
     (subprocess.CompletedProcess([], 1, "", "a\nno room\n"), "fio failed: no room"),
     (subprocess.TimeoutExpired("fio", 1), "fio took more than")],
)  # fmt: skip
def test_a_fio_that_ends_without_a_word_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Any, said: str
) -> None:
    """A fio ended by a signal was an IndexError."""

    def run(*_args: Any, **_named: Any) -> Any:
        if isinstance(ends, Exception):
            raise ends
        return ends

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(Unable, match=said):
        fio.write(tmp_path / "file", 1 << 20, 1)


@pytest.mark.parametrize(
    ("program", "said"), [("exit(3)", "exit status 3"), ("import time; time.sleep(60)", "within")]
)
def test_a_reading_process_that_dies_or_hangs_is_a_line(
    monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    """The error was json's, about empty input."""
    monkeypatch.setattr(load, "_LEFT_S", 0.1 if said == "within" else 60.0)
    reader = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        with pytest.raises(Unable, match=said):
            load._row(reader)
    finally:
        reader.kill()
        reader.communicate()
