"""`impress doctor` tells the truth about engines, and leaves nothing behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

import impress.upkeep.doctor
from impress.cli.main import app
from tiers.engines import ENGINES, why_not


def test_every_engine_is_named_with_a_rate_or_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(impress.upkeep.doctor, "TEST_BYTES", 8 << 20)
    done = CliRunner().invoke(app, ["doctor", "--store", str(tmp_path / "none" / "yet"), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [engine["name"] for engine in found["engines"]] == list(ENGINES)
    for engine in found["engines"]:
        assert engine["why_not"] == why_not(engine["name"])
        assert (engine["random_gbps"] > 0) == (engine["why_not"] == "")
    assert found["folder"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_is_a_mount_point_is_measured_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent was, and with it another disk: that of /mnt for /mnt/nvme."""
    disk = Path("/dev/shm")
    if not os.path.ismount(disk) or not os.access(disk, os.W_OK):
        pytest.skip("no mount point to write to")
    monkeypatch.setattr(impress.upkeep.doctor, "TEST_BYTES", 8 << 20)
    before = set(disk.glob(".impress-doctor-*"))
    done = CliRunner().invoke(app, ["doctor", "--store", str(disk), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["folder"] == str(disk)
    assert not set(disk.glob(".impress-doctor-*")) - before
    below = ["doctor", "--store", str(disk / "store"), "--json", "--no-measure"]
    assert json.loads(CliRunner().invoke(app, below).stdout)["folder"] == str(disk)


def test_without_measuring_nothing_is_written(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--store", str(tmp_path / "s"), "--no-measure"])
    assert done.exit_code == 0 and "auto takes it" in done.stdout
    assert "preadv" in done.stdout and list(tmp_path.iterdir()) == []


def test_an_engine_that_does_not_go_is_one_line_at_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiers.engines.why_not", lambda name: "no CUDA driver")
    geometry = impress.Geometry(1, 1, 1, 64, "float16")
    with pytest.raises(impress.StoreFailed, match="kvikio cannot be used here: no CUDA driver"):
        impress.PrefixStore.open(tmp_path / "s", geometry, "n", impress.Config(io_engine="kvikio"))
