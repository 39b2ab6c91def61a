"""An index whose file somebody makes shorter while it is open: a line, and no SIGBUS."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
#: Prints what is served, of two prompts stored before; and what becomes of a third.
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
_READER = """
store = impress.PrefixStore.open(here, GEOMETRY, NAMESPACE, config(follow_every_s=0), "r")
cut()
store.follow()
print(judge(store, (0, 1)))
store.close()
"""


def ended(script: str, path: Path, n_pages: int) -> str:
    """What a process of its own prints: a touch beyond the end of a map ends it."""
    command = [sys.executable, "-c", _BEGIN + script, str(path), str(n_pages)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("n_pages", [0, 1, 2, 4])
def test_a_writer_whose_index_is_cut_short_serves_on_and_stores_no_more(
    tmp_path: Path, n_pages: int
) -> None:
    """A copy written over it, say: every process that had it open was ended by SIGBUS."""
    served, third = ended(_WRITER, tmp_path / "s", n_pages).splitlines()
    assert served == "Judged(served=512, missed=0, wrong=0)"
    assert "cut short while it was open" in third and "impress rebuild" in third


@pytest.mark.parametrize("n_pages", [0, 2])
def test_who_only_reads_serves_on_too(tmp_path: Path, n_pages: int) -> None:
    fill = "with open_store(here) as store:\n    [put(store, seed) for seed in (0, 1)]\n"
    ended(fill, tmp_path / "s", n_pages)
    found = ended(_READER, tmp_path / "s", n_pages)
    assert found == "Judged(served=512, missed=0, wrong=0)\n"
