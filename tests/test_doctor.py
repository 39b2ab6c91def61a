"""`impress doctor` tells the truth about engines, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

import pytest
from conftest import soon
from console import SCRIPT, assert_refused, ended
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
        assert (engine["random_gbps"] is None) == (engine["why_not"] != "")
        assert engine["random_gbps"] is None or engine["random_gbps"] > 0
    assert found["folder"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_is_a_mount_point_is_measured_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent was measured instead, and so another disk: for /mnt/nvme, that of /mnt."""
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


def test_the_disk_that_the_segments_lie_on_is_measured(tmp_path: Path) -> None:
    """The store's was, though a store's segments may lie on another: what was said to be free, and
    how fast it is, were of a disk from which no row is read."""
    folder = Path(mkdtemp(dir="/dev/shm"))
    store = tmp_path / "store"
    (store / "shards/main").mkdir(parents=True)
    if folder.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system at /dev/shm")
    (folder / "segments").mkdir()
    (store / "shards/main/segments").symlink_to(folder / "segments")
    done = CliRunner().invoke(app, ["doctor", "--store", str(store), "--json", "--no-measure"])
    shutil.rmtree(folder)
    assert json.loads(done.stdout)["folder"] == str(folder)


def test_a_store_whose_parent_is_roots_is_measured_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service's user was told to name another --store: /var/lib/impress is its own, /var/lib
    is not."""
    store, real = tmp_path / "store", os.access
    store.mkdir()
    monkeypatch.setattr(impress.upkeep.doctor, "TEST_BYTES", 8 << 20)
    monkeypatch.setattr(os, "access", lambda at, how: at != tmp_path and real(at, how))
    done = CliRunner().invoke(app, ["doctor", "--store", str(store), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["folder"] == str(store)
    assert list(store.iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_a_doctor_that_is_told_to_stop_takes_its_test_data_with_it(
    tmp_path: Path, how: signal.Signals
) -> None:
    """It left 256 MiB behind: if the store was an empty mount point, the next open refused it."""
    # Processes under nohup ignore SIGHUP, and so would those that tests start there.
    code = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, str(SCRIPT), "doctor", "--store", str(tmp_path / "s")]
    for _ in range(10):  # on a busy machine it may finish before the signal
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert soon(lambda: any(tmp_path.glob(".impress-doctor-*/*.seg")))
            process.send_signal(how)
            shown, said = process.communicate(timeout=60)
        if process.returncode:
            break
    assert (process.returncode, shown, said) == (2, b"", b"impress: interrupted\n")
    assert not list(tmp_path.iterdir())


def assert_data_is_refused(done: subprocess.CompletedProcess[str], folder: Path, why: str) -> None:
    assert_refused(done, f"test data cannot be written and read in {folder}: {why}")
    assert done.stderr.endswith("; name another --store, or --no-measure\n")


def test_a_folder_that_takes_no_test_data_is_named(tmp_path: Path) -> None:
    """The folder named was a hidden one of doctor's own, which is gone when the line is read."""
    folder = Path("/proc/self")  # where not even root can make a folder
    done = ended([str(SCRIPT), "doctor", "--store", str(folder / "store")])
    assert_data_is_refused(done, folder, "No such file or directory")
    limited = ["bash", "-c", 'ulimit -f 1024; exec "$@"', "", str(SCRIPT)]
    done = ended([*limited, "doctor", "--store", str(tmp_path / "store")])
    assert_data_is_refused(done, tmp_path, "File too large")
    assert not list(tmp_path.iterdir())


def test_test_data_that_no_file_is_left_to_read_with_goes_all_the_same(tmp_path: Path) -> None:
    """The data stayed: the call that removes a whole folder has to open it."""
    code = """if True:
        import resource, sys
        import impress.cli.main
        import impress.upkeep.doctor as doctor

        class Tier(doctor.SsdTier):
            def __init__(self, *args, read_only=False, **named):
                super().__init__(*args, read_only=read_only, **named)
                if read_only:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))

        doctor.SsdTier, doctor.TEST_BYTES = Tier, 8 << 20
        sys.argv[1:] = ["doctor", "--store", sys.argv[1]]
        impress.cli.main.run()
    """
    done = ended([sys.executable, "-c", code, str(tmp_path / "store")])
    assert_data_is_refused(done, tmp_path, "Too many open files")
    assert not list(tmp_path.iterdir())


def test_a_signal_that_is_ignored_stops_no_command(tmp_path: Path) -> None:
    """As under nohup."""
    code = """if True:
        import signal, sys
        from pathlib import Path
        import impress.cli.main
        import impress.upkeep.doctor
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

        def examine(folder, measure):
            signal.raise_signal(signal.SIGHUP)
            yield impress.upkeep.doctor.Finding("preadv", "", True)

        impress.cli.doctor.examine = examine
        sys.argv[1:] = ["doctor", "--store", sys.argv[1]]
        impress.cli.main.run()
    """
    done = ended([sys.executable, "-c", code, str(tmp_path / "store")])
    assert done.returncode == 0 and "preadv" in done.stdout, done.stderr


def test_without_measuring_nothing_is_written(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--store", str(tmp_path / "s"), "--no-measure"])
    assert done.exit_code == 0 and "auto takes it" in done.stdout
    assert "preadv" in done.stdout and list(tmp_path.iterdir()) == []
    asked = ["doctor", "--store", str(tmp_path / "s"), "--no-measure", "--json"]
    for engine in json.loads(CliRunner().invoke(app, asked).stdout)["engines"]:
        measured = {key: value for key, value in engine.items() if key not in ("name", "why_not")}
        assert len(measured) == 4 and set(measured.values()) == {None}  # not: buffered, at 0 GB/s


def test_an_engine_that_does_not_go_is_one_line_at_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiers.engines.why_not", lambda name: "no CUDA driver")
    geometry = impress.Geometry(1, 1, 1, 64, "float16")
    with pytest.raises(impress.StoreFailed, match="kvikio cannot be used here: no CUDA driver"):
        impress.PrefixStore.open(tmp_path / "s", geometry, "n", impress.Config(io_engine="kvikio"))
