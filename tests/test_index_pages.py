"""Damage to the index's own pages is one line that says what to do, and never ends a process."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.faults.content import GEOMETRY, NAMESPACE, config, judge, open_store, put
from impress import PrefixStore
from impress.errors import FormatError, StoreFailed
from impress.write.env import MAP_BYTES, compact
from impress.write.index import Index
from impress.write.pages import damage_of

ROOT = Path(__file__).parent.parent


def filled(folder: str, drawn: random.Random) -> Path:
    """An index's file as LMDB leaves it after transactions of all kinds, looked at after each."""
    path = Path(folder) / "data.mdb"
    with lmdb.open(folder, map_size=1 << 30, max_dbs=8, sync=False) as env:
        assert damage_of(env, path) == ""
        dbs = [env.open_db(b"a"), env.open_db(b"b"), env.open_db(b"none")]
        for _ in range(drawn.randint(1, 20)):
            reader = env.begin() if drawn.random() < 0.2 else None  # what it sees is not used again
            with env.begin(write=True) as txn:
                for _ in range(drawn.choice([1, 10, 300])):
                    key, db = b"%d" % drawn.randrange(300), dbs[drawn.randrange(2)]
                    if drawn.random() < 0.6:
                        txn.put(key, FULL[: drawn.choice([0, 3, 600, 2100, 9000])], db=db)
                    else:
                        txn.delete(key, db=db)
                if drawn.random() < 0.1:
                    txn.drop(dbs[0], delete=False)
                if drawn.random() < 0.1:
                    txn.abort()
            assert damage_of(env, path) == ""
            if reader is not None:
                reader.abort()
    return path


FULL = bytes([1]) * 9000


@given(seed=st.integers(0, 2**32))
@settings(max_examples=20)
def test_an_index_is_whole_exactly_as_far_as_its_pages_reach(seed: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = filled(name, random.Random(seed))
        n_pages, said = path.stat().st_size // 4096, ""
        while not said and n_pages > 2:  # free pages at the end
            n_pages -= 1
            os.truncate(path, n_pages * 4096)
            with lmdb.open(name, max_dbs=8, readonly=True, lock=False) as env:
                said = damage_of(env, path)
        assert said.startswith("cut short: ") or n_pages == 2
        path.unlink()
        path = filled(name, random.Random(seed))
        os.truncate(path, (n_pages + bool(said)) * 4096)
        with lmdb.open(name, max_dbs=8, readonly=True, lock=False) as env:
            for known in (b"a", b"b"):
                db = env.open_db(known, create=False)
                with env.begin() as txn:  # every byte of it is there: else SIGBUS
                    assert all(value in FULL for _, value in txn.cursor(db))


@pytest.mark.parametrize("is_damaged", [False, True])
def test_an_index_that_is_written_to_while_it_is_looked_at_is_told_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    """Between a look at its size and one at its pages, its writer may commit: a sound index with a
    live writer was then said to need a rebuild. And of a damaged one a look began again with each
    commit: the command that was to tell hung."""
    preadv, n_looks = os.preadv, 0
    with lmdb.open(str(tmp_path), map_size=1 << 30, max_dbs=2) as env:
        db, other = env.open_db(b"a"), env.open_db(b"b")

        def commit(n: int) -> None:
            with env.begin(write=True) as txn:
                for i in range(60):
                    txn.put(b"%d" % (n * i), bytes(600), db=db)
                    txn.delete(b"%d" % (n * i + 60 * n), db=db)

        def meanwhile(*args: Any) -> int:
            nonlocal n_looks
            n_looks += 1
            assert n_looks < 10_000
            commit(n_looks % 7)
            return preadv(*args)

        with env.begin(write=True) as txn:
            for i in range(400):
                txn.put(b"%d" % i, bytes(600), db=other)
        for n in range(7):
            commit(n)
        monkeypatch.setattr(os, "preadv", meanwhile)
        if is_damaged:
            raw, data = (tmp_path / "data.mdb").read_bytes(), tmp_path / "data.mdb"
            first = next(
                at for at in range(2 * 4096, len(raw), 4096) if raw[at + 10] == 2  # a leaf
                and b"399" in raw[at : at + 4096]
            )  # fmt: skip
            with data.open("r+b") as file:
                file.seek(first + 10)
                file.write(bytes(2))
        for _ in range(5):
            assert damage_of(env, tmp_path / "data.mdb").startswith("damaged: ") == is_damaged
        assert n_looks > 20


@pytest.mark.parametrize("name", ["EMFILE", "ENFILE", "ENOMEM", "EIO"])
def test_a_look_that_lacks_something_calls_no_index_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A process one descriptor short was told that its sound index is damaged and wants a rebuild:
    NumPy opens files of its own at the first look."""
    Index(tmp_path / "index", create=True).close()
    said = os.strerror(getattr(errno, name))

    def fails(_walk: object) -> None:
        raise OSError(getattr(errno, name), said)

    monkeypatch.setattr("impress.write.pages._Walk.run", fails)
    with pytest.raises(FormatError if name == "EIO" else StoreFailed, match=said) as raised:
        Index(tmp_path / "index", create=True)
    assert ("rebuild" in str(raised.value)) == (name == "EIO")


def test_a_copy_without_what_was_freed_loses_nothing_behind_a_damaged_key(tmp_path: Path) -> None:
    """LMDB sorts nothing in that is appended: what came behind it, all of other tenants, was gone,
    and the purge said that all was well."""
    index = Index(tmp_path / "index", create=True)
    index.commit({span: bytes(40) for span in range(1, 51)})
    index.close()
    data = tmp_path / "index/data.mdb"
    raw = data.read_bytes()
    key = (3).to_bytes(8, "big")
    assert raw.count(key + bytes(40)) >= 1
    data.write_bytes(raw.replace(key + bytes(40), b"\x80" + key[1:] + bytes(40)))
    with pytest.raises(StoreFailed, match=r"keys out of order; impress rebuild"):
        compact(tmp_path / "index")
    index = Index(tmp_path / "index", create=False)
    assert len(dict(index.spans())) == 50
    index.close()


def test_whoever_may_open_an_index_may_copy_it(tmp_path: Path) -> None:
    """A copy asked for as many addresses again: beside `ulimit -v` a purge erased the rows, left
    token ids in the index, and said to raise a limit that was above what it named."""
    index = Index(tmp_path / "index", create=True)
    index.commit({span: bytes(9000) for span in range(1, 501)})
    index.close()
    script = "import resource, sys; from pathlib import Path; from impress.write.env import compact"
    script += "; resource.setrlimit(resource.RLIMIT_AS, (96 << 30,) * 2); "
    script += "compact(Path(sys.argv[1]))"
    command = [sys.executable, "-c", script, str(tmp_path / "index")]
    subprocess.run(command, check=True, timeout=60, cwd=ROOT)
    index = Index(tmp_path / "index", create=False)
    assert len(dict(index.spans())) == 500
    assert index._env.info()["map_size"] == MAP_BYTES  # it may grow beyond what the copy had
    index.close()


def test_damage_of_a_writers_own_index_is_not_taken_for_another_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another shard's index was made anew, a writer opened its own once more: of damage that
    had come to that meanwhile it said it was the other's, and served nothing new of it."""
    with open_store(tmp_path, shard=1) as theirs:
        put(theirs, 1)
        theirs.flush()
    settings = config(follow_every_s=0)
    with PrefixStore.open(tmp_path, GEOMETRY, NAMESPACE, settings) as own:
        put(own, 0)
        own.flush()
        compact(tmp_path / "shards/1/index")
        with open_store(tmp_path, shard=1) as theirs:
            put(theirs, 2)
            theirs.flush()

        def damaged(_shared: Any, folder: Path) -> None:
            if folder == tmp_path / "shards/main/index":
                raise FormatError("damaged")

        monkeypatch.setattr("impress.write.index.check_sound", damaged)
        own.follow()
        assert not judge(own, (0, 1, 2)).missed


@pytest.mark.parametrize("where", ["free", "used", "inside a large value"])
def test_a_sector_that_cannot_be_read_is_damage_unless_nothing_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The whole file was read in order, for speed, and an error on a free page was the open's. Of
    one that mattered the line did not say what to do, or it was SIGBUS in LMDB."""
    index = Index(tmp_path / "index", create=True)
    index.commit({span: bytes([span]) * 9000 for span in range(1, 50)})  # on pages of their own
    index.commit({}, [*range(10, 40)])
    index.close()
    raw, preadv = (tmp_path / "index/data.mdb").read_bytes(), os.preadv
    value = {"free": 20, "used": 45, "inside a large value": 45}[where]
    bad = raw.rindex(bytes([value]) * 4096) // 4096  # the second of its three pages
    bad -= where == "used"  # the first

    def in_order(fd: int, buffers: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def by_page(fd: int, buffers: Any, off: int) -> int:
        if off // 4096 == bad:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(fd, buffers, off)

    monkeypatch.setattr(os, "readv", in_order)
    monkeypatch.setattr(os, "preadv", by_page)
    if where == "free":
        index = Index(tmp_path / "index", create=False)
        assert len(dict(index.spans())) == 19
        index.close()
    else:
        with pytest.raises(FormatError, match=r"Input/output error; impress rebuild"):
            Index(tmp_path / "index", create=False)


_FLIPPED = """
import collections, os, random, shutil, sys
from pathlib import Path

from experiments.faults.content import GEOMETRY, NAMESPACE, config, judge, open_store, put
from impress import PrefixStore
from impress.errors import FormatError
from impress.upkeep.hanging import index_values
from impress.write.directory import Shard
from impress.write.index import Index

here, meta = Path(sys.argv[1]), sys.argv[2] == "meta"
spans, ledgers = range(1, 401), {bytes([i]) * 32: bytes(300) for i in range(100)}
shard = Shard(here)
shard.path.mkdir(parents=True)
index = Index(shard.index, create=True)
index.commit({span: bytes(40) for span in spans})
index.commit({span: bytes(9000) for span in range(500, 520)})  # on pages of their own
index.save_history({span: bytes(200) for span in spans}, 1, ledgers, {})
index.commit({}, [*range(100, 200), *range(505, 510)])
index.close()
data = shard.index / "data.mdb"
sound, ends = data.read_bytes(), collections.Counter()

def look():
    try:
        index_values(shard)
        index = Index(shard.index, create=False)
    except FormatError as err:
        return 1 if "impress rebuild" in str(err) else 3
    index.commit({}, spans)
    index.commit({span: bytes(9000) for span in range(600, 650)})
    index.save_history({}, 2, ledgers, {})
    index.commit({span: bytes(90) for span in range(600, 650)}, range(500, 600))
    return 0

for seed in range(120):
    drawn, raw = random.Random(seed), bytearray(sound)
    page = drawn.randrange(2) if meta else drawn.randrange(2, len(sound) // 4096)
    # The head of a page and what is behind it lead LMDB; what formats a meta page may have is its.
    at = drawn.choice([*range(40, 152)]) if meta else drawn.randrange(drawn.choice([16, 64, 4096]))
    raw[page * 4096 + at] ^= drawn.choice([1 << drawn.randrange(8), drawn.randrange(1, 256)])
    data.write_bytes(raw)
    if not os.fork():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            os._exit(look())
        except BaseException as err:
            print(seed, repr(err), flush=True)
            os._exit(3)
    end = os.waitstatus_to_exitcode(os.wait()[1])
    ends[end] += 1
    if end not in (0, 1):
        print(seed, "ended with", end)
print(ends[0], ends[1])
"""


@pytest.mark.parametrize("what", ["meta", "trees"])
def test_a_flip_in_any_page_is_noticed_or_does_not_matter(tmp_path: Path, what: str) -> None:
    """It ended one process in a hundred (an assertion of LMDB's, SIGSEGV, SIGBUS); in four more an
    index that could be read, and was sound to `impress verify`, took no commit."""
    done = subprocess.run(
        [sys.executable, "-c", _FLIPPED, str(tmp_path), what], capture_output=True, text=True,
        timeout=300, check=True, cwd=ROOT,
    )  # fmt: skip
    *said, counts = done.stdout.splitlines()
    sound, damaged = map(int, counts.split())
    assert sound + damaged == 120 and min(sound, damaged) > 10, (said, counts)


_BY_PAGE = """
import collections, logging, os, shutil, sys
from pathlib import Path

import torch  # here once, not in each child

logging.getLogger("impress").setLevel(logging.CRITICAL)
here = Path(sys.argv[1])
AT, OTHER = 10, bytes(2)  # of a page: what kind it is

def by_page(data, look):
    # A child for each page of this index of the store `sound`, on a copy in which it is damaged:
    # `look` ends it, with 3 where it raises. Prints how many ended with 0 to 2, and how many else.
    seen, under_way = collections.Counter(), 0
    pages = range(2, (here / "sound" / data).stat().st_size // 4096)
    for page in pages:
        if under_way == (os.cpu_count() or 1):
            seen[os.waitstatus_to_exitcode(os.wait()[1])] += 1
            under_way -= 1
        under_way += 1
        if not os.fork():
            try:
                copy = shutil.copytree(here / "sound", here / str(page))
                with (copy / data).open("r+b") as file:
                    file.seek(page * 4096 + AT)
                    file.write(OTHER)
                look(copy)
            except BaseException as err:
                print(page, repr(err), flush=True)
                os._exit(3)
    for _ in range(under_way):
        seen[os.waitstatus_to_exitcode(os.wait()[1])] += 1
    print(seen[0], seen[1], seen[2], len(pages) - seen[0] - seen[1] - seen[2])
"""
_FILLED = """
from experiments.faults.content import judge, open_store, put
from experiments.faults.content import GEOMETRY, NAMESPACE, config, judge, open_store, put
from impress import PrefixStore
from impress.errors import FormatError

with open_store(here / "sound") as store:
    for seed in range(3):
        put(store, seed)
    store.flush()
"""
_ALONE = """
def look(copy):
    try:
        with open_store(copy) as store:
            os._exit(2 * bool(judge(store, range(3)).wrong))
    except FormatError as err:
        os._exit(1 if "impress rebuild" in str(err) else 3)

by_page("shards/main/index/data.mdb", look)
"""


_VERIFIED = """
from impress.upkeep.verify import verify_store

def look(copy):
    said = verify_store(copy).problems
    try:
        open_store(copy).close()
    except FormatError:
        os._exit(1 if said else 2)
    os._exit(0)

by_page("shards/main/index/data.mdb", look)
"""


def by_page(script: str, folder: Path, *args: str) -> list[int]:
    """How often each of a script's outcomes came, page by page (`_BY_PAGE`), in a process of its
    own: LMDB answers some damage by ending the process, which is one more that fails the test."""
    done = subprocess.run(
        [sys.executable, "-c", _BY_PAGE + script, str(folder), *args], capture_output=True,
        text=True, timeout=300, check=True, cwd=ROOT,
    )  # fmt: skip
    *said, counts = done.stdout.splitlines()
    seen = [*map(int, counts.split())]
    assert not seen[2] and not seen[3], (said, seen, done.stderr)  # wrong; another end
    return seen[:2]


def test_damage_that_lmdb_notices_is_one_line_wherever_it_does(tmp_path: Path) -> None:
    """Bit flips found it: the error of the third database that is read came out as LMDB's own."""
    served, refused = by_page(_FILLED + _ALONE, tmp_path)
    assert served and refused


def test_what_keeps_a_store_from_being_opened_is_not_sound_to_verify(tmp_path: Path) -> None:
    """It looked at what the index says of spans, and at none of its other pages."""
    opened, noticed = by_page(_FILLED + _VERIFIED, tmp_path)
    assert opened and noticed


_BESIDE = """
from experiments.faults.content import GEOMETRY, NAMESPACE, config, judge, open_store, put
from impress import PrefixStore

for shard in (0, 1):
    with open_store(here / "sound", shard=shard) as store:
        for seed in range(2 * shard, 2 * shard + 2):
            put(store, seed)
        store.flush()

def look(copy):
    settings = config(follow_every_s=0)
    with PrefixStore.open(copy, GEOMETRY, NAMESPACE, settings, sys.argv[2]) as store:
        store.follow()
        store.follow()
        own, all = judge(store, (0, 1)), judge(store, range(4))
        store.check()
        os._exit(2 if own.missed or all.wrong else 1 if all.missed else 0)

by_page("shards/1/index/data.mdb", look)
"""


@pytest.mark.parametrize("mode", ["rw", "r"])
def test_damage_in_one_shards_index_leaves_the_others_to_be_opened_and_read(
    tmp_path: Path, mode: str
) -> None:
    """A page that cannot be read kept out every writer of another shard, and every reader."""
    whole, less = by_page(_BESIDE, tmp_path, mode)
    assert whole and less
