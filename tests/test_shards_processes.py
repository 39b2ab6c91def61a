"""Shards with real processes: read by all, killed, stopped, taken over."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
from conftest import assert_serves, prompt, put_prompt

import impress
from impress.upkeep.verify import verify_store
from impress.write import env, prepare
from impress.write.index import Index

HERE = Path(__file__).parent
FAST = {"follow_every_s": 0.005, "dram_bytes": 0, "repack_every_s": 0}


class Process:
    """A store in a process of its own (shard_worker.py)."""

    def __init__(self, folder: Path, mode: str, config: dict[str, Any]) -> None:
        command = [sys.executable, str(HERE / "shard_worker.py"), str(folder), mode,
                   json.dumps({**FAST, **config})]  # fmt: skip
        self.popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self._answer() == "open"

    def __call__(self, *words: object) -> Any:
        self.tell(*words)
        return self._answer()

    def tell(self, *words: object) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(" ".join(map(str, words)) + "\n")
        self.popen.stdin.flush()

    def _answer(self) -> Any:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, "the process ended"
        return json.loads(line)

    def until(self, want: Any, *words: object) -> None:
        """Ask until it answers so; the suite's time limit ends it."""
        while self(*words) != want:
            pass

    def kill(self, how: int = signal.SIGKILL) -> None:
        os.kill(self.popen.pid, how)
        if how == signal.SIGKILL:
            self.popen.wait()

    def close(self) -> None:
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            pipe.close()
        assert self.popen.wait(60) in (0, -signal.SIGKILL)


Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(mode, **config) on one directory."""
    running: list[Process] = []

    def starter(mode: str = "rw", **config: Any) -> Process:
        running.append(Process(tmp_path / "store", mode, config))
        return running[-1]

    yield starter
    for process in running:
        if process.popen.poll() is None:
            process.kill(signal.SIGCONT)
        process.close()


def test_two_writers_and_a_reader_read_what_all_stored(start: Start) -> None:
    a, b = start(), start()
    assert (a("stat", "shard"), b("stat", "shard")) == ("main", "1")
    assert a("put", 256, 1) and b("put", 256, 2)
    reader = start("r")
    assert a("put", 256, 3)
    for process in (a, b, reader):
        for seed in (1, 2, 3):
            process.until(256, "get", 256, seed)
    assert a("check") and b("check")


def test_where_an_index_has_room_for_no_more_readers_a_line_says_what_to_do(
    open_store: Callable[..., impress.PrefixStore], geometry: impress.Geometry
) -> None:
    """It said "Please use a larger Environment(max_readers=) parameter", which nobody can."""
    store = open_store(geometry, **FAST)
    assert put_prompt(store, prompt(256)).wait(60)
    store.close()
    fill = f"""if True:
        import lmdb, sys
        env = lmdb.open({str(store.path / "shards/main/index")!r}, readonly=True)
        held = [env.begin() for _ in range(126)]
        print("full", flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", fill], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as others:
        assert others.stdout is not None
        assert others.stdout.readline() == "full\n"
        for mode in ("rw", "r"):
            with pytest.raises(impress.StoreFailed, match=r"main/index: 126 readers.* let fewer"):
                open_store(geometry, mode, **FAST)
        others.communicate()
    assert_serves(open_store(geometry, **FAST), prompt(256), 256)


def test_answers_are_right_while_both_evict_under_pressure(start: Start) -> None:
    """Each keeps two prompts of the six; the other reads along. A miss is fine, a wrong row not."""
    small = {"disk_bytes": 3 << 20, "disk_high": 1.0, "disk_low": 0.5}
    a, b = start(**small), start(**small)
    reader = start("r")
    right = 0
    for turn in range(40):
        a.tell("put", 256, turn % 6)
        b.tell("put", 256, 10 + turn % 6)
        for seed in (turn % 6, (turn - 1) % 6, 10 + turn % 6):
            got = reader("get", 256, seed)
            assert got in (0, 256) or str(got).startswith("lost"), got
            right += got == 256
        for writer in (a, b):
            assert writer._answer() in (True, False)
        assert a("get", 256, 10 + (turn - 1) % 6) in (0, 256, "lost checksum")
    assert right > 10
    assert a("check") and b("check")


def test_a_killed_reader_holds_nothing_back(start: Start) -> None:
    a, b = start(), start("r")
    assert a("put", 256, 1)
    b.until(256, "hold", 256, 1)
    assert a("evict", 1 << 30) > 0 and a("stat", "limbo_bytes") > 0
    assert b("read") == "right"
    b.kill()
    a.until(0, "stat", "limbo_bytes")
    assert a("check")


def test_a_reader_that_is_stopped_is_waited_for_within_the_limit(start: Start) -> None:
    """A writer whose time limits are short goes on; the reader, woken, meets a miss."""
    a = start(lease_timeout_s=0.2, read_timeout_s=0.2)
    b = start("r")
    assert a("put", 256, 1)
    b.until(256, "hold", 256, 1)
    b.kill(signal.SIGSTOP)
    assert a("evict", 1 << 30) > 0
    a.until(0, "stat", "limbo_bytes")
    for seed in range(2, 6):  # written over what it held
        assert a("put", 256, seed)
    b.kill(signal.SIGCONT)
    assert b("read") in ("lost checksum", "lost short", "lost io")
    assert b("free")
    b.until(256, "get", 256, 5)


_STOPPED = """
import sys, lmdb
env = lmdb.open(sys.argv[1], max_dbs=8, map_size=64 << 30)
with env.begin(write=True):
    print("begun", flush=True)
    sys.stdin.read()
"""
_BESIDE = """
import subprocess, sys, threading
from pathlib import Path
from impress.write.index import Index

index, stopped = sys.argv[1:]
command = [sys.executable, "-c", stopped, index]
writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
writer.stdout.readline()
found = []
opening = threading.Thread(target=lambda: found.append(Index(Path(index), create=False)))
opening.start()
opening.join(.5)
writer.stdin.close()  # this thread goes on, and lets it go
opening.join()
writer.wait()
print(len(list(found[0].spans())), "spans")
"""


_READING = """
import sys, lmdb
env = lmdb.open(sys.argv[1], max_dbs=8, map_size=64 << 30)
with env.begin():
    print("begun", flush=True)
    sys.stdin.read()
"""


def test_a_reader_killed_as_it_read_an_index_does_not_make_it_grow(tmp_path: Path) -> None:
    """What was freed after it began was used again only once a thousand more spans were stored: a
    server that only answered wrote new pages with each commit, until the file system was full."""
    folder = tmp_path / "index"
    index = Index(folder, create=True)
    command = [sys.executable, "-c", _READING, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == b"begun\n"
        reader.kill()
    for turn in range(50):
        index.save_history({}, turn, {b"ledger": bytes(200_000)}, {})
    assert (folder / "data.mdb").stat().st_size < 3 << 20  # of 10 MB that were written
    index.close()


def test_who_waits_for_a_writer_that_is_stopped_in_a_commit_waits_alone(
    open_store: Callable[..., impress.PrefixStore], geometry: impress.Geometry
) -> None:
    """A process that opened the writer's index stood still: none of its threads could run."""
    with open_store(geometry) as store:
        assert put_prompt(store, prompt(128)).wait(60)
    index = str(store.path / "shards/main/index")
    done = subprocess.run(
        [sys.executable, "-c", _BESIDE, index, _STOPPED], capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("1 spans\n", "")


@pytest.fixture
def unwritable(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may not write to an index, as on a read-only mount."""
    access = os.access

    def refused(path: Path, mode: int) -> bool:
        return access(path, mode) and not (path.name == "data.mdb" and mode & os.W_OK)

    monkeypatch.setattr(os, "access", refused)


@pytest.mark.usefixtures("unwritable")
def test_who_may_not_write_reads_where_nobody_does(
    start: Start, open_store: Callable[..., impress.PrefixStore], geometry: impress.Geometry,
    tmp_path: Path,
) -> None:  # fmt: skip
    """A writer knows nothing of such a reader, and used pages of the index again that it was
    reading: the reader said that the index is damaged, and to rebuild it."""
    a = start()
    assert a("put", 256, 1)
    with pytest.raises(impress.StoreFailed, match=r"a process writes here.*: mount it writable"):
        open_store(geometry, "r")
    assert a("put", 256, 2), "its lock was not touched"
    a.kill()
    reader = open_store(geometry, "r", follow_every_s=0)
    assert_serves(reader, prompt(256, 2), 256)
    mine = tmp_path.resolve()
    (shared,) = (one for (index, _), one in env.envs.items() if index.is_relative_to(mine))
    said = env.error_of(tmp_path, lmdb.CorruptedError("used again"), counted=shared.counted)
    assert "mount it writable" in str(said) and "rebuild" not in str(said)


def test_an_index_that_writes_no_more_says_what_to_do(tmp_path: Path) -> None:
    """After a failed write of its first pages LMDB refuses everything, even if the disk is well:
    the store said for good that it tries again."""
    said = env.error_of(tmp_path, lmdb.PanicError("mdb_txn_begin: MDB_PANIC"))
    assert "close the store, and open it again" in str(said)


@pytest.mark.usefixtures("unwritable")
def test_a_file_system_that_went_read_only_under_a_writer_is_read_from(
    start: Start, open_store: Callable[..., impress.PrefixStore], geometry: impress.Geometry,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Nobody writes there, though its writer has its lock for as long as it lives."""
    a = start()
    assert a("put", 256, 1)
    mounts = prepare.MOUNTS.read_text()
    (tmp_path / "mounts").write_text(re.sub(r" rw(\S*)$", r" ro\1", mounts, flags=re.MULTILINE))
    monkeypatch.setattr(prepare, "MOUNTS", tmp_path / "mounts")
    assert verify_store(tmp_path / "store").spans == 1
    reader = open_store(geometry, "r", follow_every_s=0)
    assert_serves(reader, prompt(256, 1), 256)


def test_a_killed_writers_shard_is_read_and_taken_over(start: Start) -> None:
    a, b = start(), start()
    assert a("put", 256, 1)
    b.until(256, "get", 256, 1)
    a.kill()
    assert b("get", 256, 1) == 256
    c = start()
    assert c("stat", "shard") == "main"
    assert c("get", 256, 1) == 256 and c("put", 256, 2)
    b.until(256, "get", 256, 2)
    assert c("evict", 1 << 30) > 0
    c.until(0, "stat", "limbo_bytes")
    b.until(0, "lookup", 256, 2)
    assert c("check")
