"""An index whose file somebody shortens while it is open: one line, and no SIGBUS."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import forks
import pytest

from impress.errors import FormatError
from impress.write.env import Env

ROOT = Path(__file__).parents[1]
_BEGIN = """
import os, sys
from pathlib import Path

import impress
from experiments.faults.content import GEOMETRY, NAMESPACE, config, judge, open_store, put

here = Path(sys.argv[1])
data = here / "shards/main/index/data.mdb"

def cut():
    pages = int(sys.argv[2])  # of LMDB's: the first two say where all others are
    os.truncate(data, 4096 * pages)
"""
#: Prints what is served of two prompts stored before, and what becomes of a third.
_WRITER = """
with open_store(here, repack_every_s=0) as store:
    for seed in (0, 1):
        put(store, seed)
    store.flush()
    cut()
    print(judge(store, (0, 1)))
    try:
        stored = put(store, 2)
        stored.wait(30)
        print(stored.refused)
    except impress.StoreFailed as err:
        print(err)
"""
#: The same process looks at the index again, as when another shard's log was overrun.
_AGAIN = """
with open_store(here, repack_every_s=0) as store:
    put(store, 0)
    store.flush()
    cut()
    try:
        impress.PrefixStore.open(here, GEOMETRY, NAMESPACE, config(), "r")
    except impress.FormatError as err:
        print(err)
    print(judge(store, (0,)))
"""
_READER = """
store = impress.PrefixStore.open(here, GEOMETRY, NAMESPACE, config(follow_every_s=0), "r")
cut()
store.follow()
print(judge(store, (0, 1)))
store.close()
"""


def ended(script: str, path: Path, n_pages: int) -> str:
    """The output of a separate process: a touch beyond the end of a map would end the process."""
    done = forks.python(_BEGIN + script, str(path), str(n_pages), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("n_pages", [0, 1, 2, 4])
def test_a_writer_whose_index_is_cut_short_serves_on_and_stores_no_more(
    tmp_path: Path, n_pages: int
) -> None:
    """By a copy written over it, say: SIGBUS ended every process that had it open."""
    served, third = ended(_WRITER, tmp_path / "s", n_pages).splitlines()
    assert served == "Judged(served=512, missed=0, wrong=0)"
    assert "cut short while it was open" in third and "impress rebuild" in third


@pytest.mark.parametrize("n_pages", [0, 1, 2])
def test_one_that_is_cut_short_is_not_opened_again_beside_who_has_it_open(
    tmp_path: Path, n_pages: int
) -> None:
    """LMDB keeps what it can say about it in its map: asking was a SIGBUS."""
    refused, served = ended(_AGAIN, tmp_path / "s", n_pages).splitlines()
    assert "impress rebuild makes it again" in refused
    assert served == "Judged(served=256, missed=0, wrong=0)"


def test_one_that_grows_between_two_looks_is_not_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two threads, the first to look compared its size with what the other had seen since."""
    (tmp_path / "data.mdb").write_bytes(bytes(100))
    shared, look = Env(None, n_bytes=50), Path.stat

    def slow(path: Path, **named: Any) -> os.stat_result:
        found = look(path, **named)
        shared.n_bytes = 200
        return found

    inode = (tmp_path / "data.mdb").stat().st_ino
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", slow)
        shared.check_uncut(tmp_path, inode)
    assert shared.n_bytes == 200
    with pytest.raises(FormatError, match="cut short while it was open: 100 of 200 bytes"):
        shared.check_uncut(tmp_path, inode)


@pytest.mark.parametrize("n_pages", [0, 2])
def test_who_only_reads_serves_on_too(tmp_path: Path, n_pages: int) -> None:
    fill = "with open_store(here) as store:\n    [put(store, seed) for seed in (0, 1)]\n"
    ended(fill, tmp_path / "s", n_pages)
    found = ended(_READER, tmp_path / "s", n_pages)
    assert found == "Judged(served=512, missed=0, wrong=0)\n"
