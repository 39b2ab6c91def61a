"""kill -9 during writes, then reopen: flushed prompts are served, nothing else is wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import forks
import pytest
from conftest import SMALL, assert_serves, prompt, put_prompt

import impress
from impress.upkeep.rebuild import rebuild_store

GEOMETRY = impress.Geometry(2, 4, 2, 128, "float32")

WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from conftest import SMALL, prompt, put_prompt
import impress
store = impress.PrefixStore.open(sys.argv[1], impress.Geometry(2, 4, 2, 128, "float32"), "test",
                                 impress.Config(**SMALL))
first = int(sys.argv[3])
for seed in range(first, first + 1000):
    put_prompt(store, prompt(256, seed), wait_s=60)
    if seed % 3 == 0:
        store.flush()
        print(seed, flush=True)
"""


BEFORE_THE_COMMIT = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from conftest import SMALL, prompt, put_prompt
import impress
store = impress.PrefixStore.open(sys.argv[1], impress.Geometry(2, 4, 2, 128, "float32"), "test",
                                 impress.Config(**SMALL))
put_prompt(store, prompt(128, 1)).wait(60)
assert store.ssd.reserve(1 << 18) and store.ssd.reserve(1 << 19)  # free after the kill
store.index.commit = lambda *args, **named: os.kill(os.getpid(), signal.SIGKILL)
put_prompt(store, prompt(128, 2)).wait(60)
"""


def write_until_killed(folder: Path, first: int, acknowledged: int) -> int:
    """The last seed that was flushed before the writer was killed in the middle of its work."""
    here = str(Path(__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), here, str(first)], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        last = -1
        for _ in range(acknowledged):
            last = int(writer.stdout.readline())
        os.kill(writer.pid, signal.SIGKILL)
    return last


def test_what_was_flushed_survives_kill_minus_9(tmp_path: Path) -> None:
    folder, flushed, first = tmp_path / "store", [], 0
    for acknowledged in (1, 3, 2):
        last = write_until_killed(folder, first, acknowledged)
        flushed += range(first, last + 1)
        with impress.PrefixStore.open(
            folder, GEOMETRY, "test", impress.Config(**SMALL)
        ) as store:  # the dead writer's lock is gone with it
            store.check()
            for seed in flushed:
                assert_serves(store, prompt(256, seed), 256)
            for seed in range(last + 1, last + 10):  # unacknowledged: whole and right, or absent
                n = store.lookup(prompt(256, seed))
                assert n in (0, 256)
                assert_serves(store, prompt(256, seed), n)
        first = last + 10


def test_an_id_in_a_header_that_no_commit_named_is_not_given_out_again(tmp_path: Path) -> None:
    """A rebuild found two sound spans with the same id, and kept the one it came to first."""
    folder = tmp_path / "store"
    done = forks.python(BEFORE_THE_COMMIT, str(folder), str(Path(__file__).parent))
    assert done.returncode == -signal.SIGKILL, done.stderr
    with impress.PrefixStore.open(folder, GEOMETRY, "test", impress.Config(**SMALL)) as store:
        assert store.lookup(prompt(128, 1)) == 128 and store.lookup(prompt(128, 2)) == 0
        put_prompt(store, prompt(128, 3)).wait(60)  # in the free room before the uncommitted span
    assert rebuild_store(folder).spans == 3
    with impress.PrefixStore.open(folder, GEOMETRY, "test", impress.Config(**SMALL)) as store:
        store.check()
        for seed in (1, 2, 3):
            assert_serves(store, prompt(128, seed), 128)


def test_a_second_writer_of_a_shard_is_refused_in_one_line(tmp_path: Path) -> None:
    config = impress.Config(shard=0, **SMALL)
    with impress.PrefixStore.open(tmp_path / "s", GEOMETRY, "test", config):
        with pytest.raises(impress.StoreLocked, match=f"process {os.getpid()}"):
            impress.PrefixStore.open(tmp_path / "s", GEOMETRY, "test", config)
        code = (
            "import impress, sys\n"
            "g = impress.Geometry(2, 4, 2, 128, 'float32')\n"
            "try: impress.PrefixStore.open(sys.argv[1], g, 't', impress.Config(shard=0))\n"
            "except impress.StoreLocked as err: print(err)"
        )
        out = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "s")],
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stderr == "" and f"open for writing by process {os.getpid()}" in out.stdout
        assert out.stdout.count("\n") == 1
    impress.PrefixStore.open(tmp_path / "s", GEOMETRY, "test", config).close()
