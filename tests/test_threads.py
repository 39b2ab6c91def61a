"""Where the system starts no more threads: one error says what to do, and nothing is left."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL, assert_serves, prompt, put_prompt
from console import two_prompts
from tier_contract import MIB, noise
from typer.testing import CliRunner

import impress
from impress.cli.main import app
from impress.write.directory import locked_shard
from tiers.base import PAGE, Read, sums_of
from tiers.errors import MediumError
from tiers.iopool import COPIERS, IoPool
from tiers.slots import aligned
from tiers.ssd import SsdTier
from tiers.threads import start

#: An open with this starts every thread that it may.
CONFIG = impress.Config(**SMALL, shard=0, io_threads=3, metrics_port=0, repack_every_s=60)
#: Threads for I/O, and for copies.
N_POOL = CONFIG.io_threads + min(COPIERS, CONFIG.io_threads)

#: prometheus_client leaves the socket of a server that lacks its thread to Python's refcounts.
NO_SERVER = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


class Threads:
    """Lets `left` more threads be started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 1 << 20
        real = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if not self.left:
                raise RuntimeError("can't start new thread")
            self.left -= 1
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def running() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate())


@NO_SERVER
def test_an_open_without_threads_is_refused_and_leaves_none_and_no_lock(
    geometry: impress.Geometry, tmp_path: Path, threads: Threads
) -> None:
    """A RuntimeError came out of the middle: the committer and the I/O threads that had been
    started went on, with the index open, in a shard whose lock had been let go of."""
    path, tokens = tmp_path / "s", prompt(128, 1)
    with impress.PrefixStore.open(path, geometry, "test", CONFIG) as store:
        assert put_prompt(store, tokens, wait_s=60).wait(60)
    before, n_files, n_started, opened = running(), open_files(), 0, None
    while opened is None:
        threads.left = n_started
        try:
            opened = impress.PrefixStore.open(path, geometry, "test", CONFIG)
        except impress.StoreFailed as err:
            assert "no more threads can be started: raise `ulimit -u`" in str(err)
            assert running() == before, n_started
            assert open_files() == n_files, n_started
            locked_shard(path, 0).unlock()  # raises StoreLocked where somebody holds it
            n_started += 1
    with opened:  # a committer, the pool's, one each for metrics, followers, repacking
        assert n_started == 1 + N_POOL + 3
        assert_serves(opened, tokens, 128)


@NO_SERVER
def test_an_open_to_read_without_threads_leaves_none(
    geometry: impress.Geometry, tmp_path: Path, threads: Threads
) -> None:
    path = tmp_path / "s"
    impress.PrefixStore.open(path, geometry, "test", CONFIG).close()
    before, n_files = running(), open_files()
    for threads.left in range(N_POOL + 2):  # the pool's, metrics, followers
        with pytest.raises(impress.StoreFailed, match="no more threads"):
            impress.PrefixStore.open(path, geometry, "test", CONFIG, "r")
        assert (running(), open_files()) == (before, n_files)
    threads.left = N_POOL + 2
    impress.PrefixStore.open(path, geometry, "test", CONFIG, "r").close()


def test_a_pool_that_lacks_a_thread_ends_those_it_has(threads: Threads) -> None:
    before, threads.left = running(), 2
    with pytest.raises(MediumError, match=r"lower Config\.io_threads"):
        IoPool(3)
    assert running() == before


def test_an_error_that_is_not_want_of_threads_is_not_called_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the interpreter's end no thread can be started, whatever the limits are."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="at interpreter shutdown"):
        IoPool(1)


def test_ctrl_c_as_a_thread_is_waited_for_is_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own wait for the thread releases a lock that is not taken: that error came out."""

    def cut_off(_thread: threading.Thread) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise RuntimeError("release unlocked lock")  # noqa: B904 - as it happens there

    monkeypatch.setattr(threading.Thread, "start", cut_off)
    with pytest.raises(KeyboardInterrupt):
        start(threading.Thread())


@pytest.mark.parametrize("command", ["verify", "rebuild", "repack", "doctor"])
@pytest.mark.parametrize("n", [0, 1])
def test_a_command_without_threads_says_so_in_one_line(
    command: str, n: int, tmp_path: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended in a traceback and exit status 1, as if the store were not sound."""
    monkeypatch.setattr("impress.upkeep.doctor.TEST_BYTES", 8 << 20)
    path, before = two_prompts(tmp_path / "store"), running()
    threads.left = n
    done = CliRunner().invoke(app, [command, "--store", str(path)])
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1, done.output
    assert done.stderr.startswith("impress: no more threads can be started: raise `ulimit -u`")
    assert running() == before
    assert [one.name for one in tmp_path.iterdir()] == ["store"]  # doctor's test data has gone
    locked_shard(path, 0).unlock()


def test_a_progress_bar_without_its_thread_is_one_line(
    tmp_path: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal the bar has a thread of its own, the first that is started."""
    path = two_prompts(tmp_path / "store")
    monkeypatch.setattr("impress.terminal.err._force_terminal", True)
    threads.left = 0
    done = CliRunner().invoke(app, ["verify", "--store", str(path)])
    assert done.exit_code == 2 and "impress: no more threads can be started" in done.stderr


def test_aiofiles_without_its_thread_is_read_with_preadv(tmp_path: Path, threads: Threads) -> None:
    """The read failed with the executor's error, which no request expects."""
    tier, data = SsdTier(tmp_path / "segments", MIB, MIB, engine="aiofiles"), noise(PAGE)
    slot, out = tier.reserve(PAGE), aligned(PAGE)
    assert slot is not None
    tier.write(slot, 0, data)
    for threads.left in (0, 1):  # then one can be had again, and is used
        out[:] = 0
        tier.read([Read(slot, 0, out, sums_of(data, PAGE), PAGE)])
        assert np.array_equal(out[:PAGE], data)
    assert threads.left == 0
    tier.close()


def test_a_store_that_a_program_forgets_to_close_ends_with_it(tmp_path: Path) -> None:
    """Python has stopped its threads by the time it closes a store that a suspended generator or a
    `__del__` holds: each thread was waited for until its time limit, or for ever."""
    code = f"""
import impress
def opened():
    with impress.PrefixStore.open({str(tmp_path / "s")!r}, impress.Geometry(2, 2, 2, 16, "float32"),
                                  b"n" * 32, impress.Config(segment_bytes=4 << 20,
                                  write_buffer_bytes=8 << 20, dram_bytes=1 << 20)) as store:
        yield store
class Held:
    def __init__(self):
        self.store = next(opened_once)
    def __del__(self):
        self.store.close()
opened_once = opened()
held = Held()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and "hangs" not in done.stderr, done.stderr
