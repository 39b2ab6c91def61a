"""A program that experiments measure with fails: a line says so."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments import fio, load
from experiments.common import Unable


@pytest.mark.parametrize(
    ("ends", "said"),
    [(subprocess.CompletedProcess([], -9, "", ""), "fio failed: exit status -9"),
     (subprocess.CompletedProcess([], 1, "", "a\nno room\n"), "fio failed: no room"),
     (subprocess.TimeoutExpired("fio", 1), "fio took more than"),
     (FileNotFoundError(2, "No such file or directory", "fio"), "fio is not installed: apt-get")],
)  # fmt: skip
def test_a_fio_that_ends_without_a_word_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Any, said: str
) -> None:
    """A fio ended by a signal was an IndexError; where there is none, `overhead` and `load`, which
    go on without it, ended."""

    def run(*_args: Any, **_named: Any) -> Any:
        if isinstance(ends, Exception):
            raise ends
        return ends

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(Unable, match=said):
        fio.write(tmp_path / "file", 1 << 20, 1)


def test_load_goes_on_without_fio_and_not_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a full disk half of its prompts were evicted as they came: requests for these took no
    time, the others came from memory, and the report said nothing of it."""
    (tmp_path / "shards/main/segments").mkdir(parents=True)
    (tmp_path / "shards/main/segments/000001.seg").write_bytes(bytes(4096))

    def missing(*_args: Any, **_named: Any) -> Any:
        raise Unable(fio.MISSING)

    monkeypatch.setattr(fio, "read", missing)
    row = {"missed": 0, "wrong": 0, "left": 0, "SSD GB/s": 1.0, "GB/s": 1.25}
    found = load._beside_fio(tmp_path, row, math.nan)
    assert math.isnan(found["of fio"]) and found["elsewhere"] == pytest.approx(0.2)
    assert "no rate to compare with: fio is not installed" in capsys.readouterr().out
    with pytest.raises(Unable, match="7 requests found no prompt"):
        load._beside_fio(tmp_path, {**row, "missed": 7}, 1.0)
    usage = SimpleNamespace(free=1 << 30)
    monkeypatch.setattr("shutil.disk_usage", lambda _folder: usage)
    options: Any = SimpleNamespace(folder=tmp_path, quick=False)
    with pytest.raises(Unable, match=r"takes some 10\.7 GB, and .* has 1\.1 free"):
        load._filled(options)


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
