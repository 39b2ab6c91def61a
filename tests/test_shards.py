"""Several writers in one directory: each reads what all stored, and nobody reads what is gone."""

from __future__ import annotations

import errno
import json
import os
import pkgutil
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from conftest import (
    MIB,
    SMALL,
    assert_serves,
    elsewhere,
    everything_in,
    flip_a_bit,
    kv_of,
    prompt,
    put_prompt,
)
from console import run_json
from test_erasure import damage_notes
from test_isolation import rows_of
from typer.testing import CliRunner

import impress
import impress.upkeep.shares
import impress.write.index
import impress.write.reclaim
from impress.cli.main import app
from impress.upkeep.rebuild import rebuild_store
from impress.upkeep.verify import verify_store
from impress.usage.notes import Note
from impress.usage.remembered import HALF_LIFE
from impress.write import follow, readers
from impress.write.directory import make_identity
from impress.write.index import Index
from impress.write.readers import Presence, present
from tiers.base import Slot
from tiers.files import lock_file, make_folder, unlock_file
from tiers.ssd import SsdTier

Open = Callable[..., impress.PrefixStore]
Pair = tuple[impress.PrefixStore, impress.PrefixStore]
#: Stores that look at each other only when told.
APART = {"follow_every_s": 0, "repack_every_s": 0, "dram_bytes": 0}


@pytest.fixture
def small() -> impress.Geometry:
    return impress.Geometry(2, 2, 2, 32, "float32")


@pytest.fixture
def pair(open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr(impress.write.reclaim, "YIELD_TIMEOUT_S", 0)
    return open_store(geometry, **APART), open_store(geometry, **APART)


def ready(store: impress.PrefixStore, tokens: np.ndarray, **named: Any) -> None:
    assert put_prompt(store, tokens, **named).wait(60)


def stored_between(
    a: impress.PrefixStore, b: impress.PrefixStore, tokens: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """While all indexes are next read, these 512 tokens are stored between two, half by each."""
    read = Index.spans
    ready(a, prompt(128, 8))
    ready(b, prompt(128, 9))

    def stored_before(index: Index) -> Iterator[tuple[int, bytes]]:
        if index._folder.parent.name == "1":  # main has been read
            monkeypatch.undo()
            ready(a, tokens[:256])
            b.follow()
            ready(b, tokens, start=256)
        return read(index)

    monkeypatch.setattr(Index, "spans", stored_before)


def look(*stores: impress.PrefixStore) -> None:
    """Each sees what all the others did, and then which of them have seen it."""
    for store in (*stores, *stores):
        store.follow()


def check(*stores: impress.PrefixStore) -> None:
    for store in stores:
        store.flush()
        store.check()


def limbo(store: impress.PrefixStore) -> int:
    n_bytes: int = store.stats()["limbo_bytes"]
    return n_bytes


def test_a_reader_that_holds_more_than_it_can_say_holds_all_of_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It then says nothing of what it holds, and nothing that it has not followed is reused."""
    a, b = pair
    for seed in (1, 2):
        ready(a, prompt(256, seed))
    b.follow()
    monkeypatch.setattr(readers, "MOST_HELD", 1)
    with b.lease(prompt(256, 1)) as one:
        with b.lease(prompt(256, 2)) as two:
            assert (one.n_tokens, two.n_tokens) == (256, 256)
            a.evict(1 << 40)
            look(a, b)
            both = limbo(a)
            for lease, seed in ((one, 1), (two, 2)):
                keys, _ = kv_of(prompt(256, seed), a.geometry)
                with lease.session() as session:
                    k, _, _ = session.retrieve(0, None)
                    assert np.array_equal(k.numpy(), keys[0])
        look(a, b)
        assert 0 < limbo(a) < both
    look(a, b)
    assert limbo(a) == 0


# ---- what the others stored ----------------------------------------------------------------------


def test_each_writer_reads_what_the_other_stored(pair: Pair) -> None:
    a, b = pair
    assert [p.name for p in sorted((a.path / "shards").iterdir())] == ["1", "main"]
    ready(a, prompt(256, 1))
    ready(b, prompt(256, 2))
    assert a.lookup(prompt(256, 2)) == 0
    assert a.follow() and b.follow() and not a.follow()
    for store in pair:
        assert_serves(store, prompt(256, 1), 256)
        assert_serves(store, prompt(256, 2), 256)
    check(*pair)


def stored_by_turns(a: impress.PrefixStore, b: impress.PrefixStore) -> None:
    """A prompt of three spans: a stores the first and the last, b the one between."""
    ready(a, prompt(512, 1)[:192])
    b.follow()
    ready(b, prompt(512, 1)[:384], start=192)
    a.follow()
    ready(a, prompt(512, 1), start=384)


def test_a_prompt_goes_on_in_another_shard(pair: Pair, open_store: Open) -> None:
    """A conversation's turns may be served by one replica after another."""
    a, b = pair
    stored_by_turns(a, b)
    b.follow()
    for store in pair:
        assert_serves(store, prompt(512, 1), 512)
        store.close()
    for mode in ("rw", "r"):
        with open_store(a.geometry, mode) as again:
            assert_serves(again, prompt(512, 1), 512)
    run = CliRunner().invoke
    verified = run(app, ["verify", "--store", str(a.path)])
    assert verified.exit_code == 0 and "3 spans" in verified.stdout, verified.output


def test_what_hung_from_a_span_that_another_shard_evicted_is_no_problem_of_the_store(
    pair: Pair, open_store: Open
) -> None:
    """Nothing was wrong, but `verify` ended with 1 until a writer of that shard came again."""
    a, b = pair
    ready(a, prompt(512, 1)[:192])
    b.follow()
    ready(b, prompt(512, 1), start=192)
    b.close()
    assert a.evict(1 << 40) > 0
    a.close()
    done, found = run_json("verify", "--store", a.path)
    assert (done.returncode, found["sound"], found["spans"], found["orphans"]) == (0, True, 1, 1)
    said = CliRunner().invoke(app, ["verify", "--store", str(a.path)]).stdout
    assert "1 behind what another shard evicted" in " ".join(said.split())
    with open_store(a.geometry, shard=1):
        pass
    done, found = run_json("verify", "--store", a.path)
    assert (done.returncode, found["spans"], found["orphans"]) == (0, 0, 0)


def test_what_goes_on_from_a_shard_that_cannot_be_read_is_no_problem_of_its_own(pair: Pair) -> None:
    """`verify` said of each such span that it is never found: the line that named the index, which
    a rebuild mends, was among a thousand of these."""
    a, b = pair
    stored_by_turns(a, b)
    for store in pair:
        store.close()
    os.truncate(a.path / "shards/1/index/data.mdb", 8192)
    done, found = run_json("verify", "--store", a.path)
    (problem,) = found["problems"]
    assert done.returncode == 1 and "shards/1/index" in problem["what"]
    assert (found["spans"], found["waiting"], found["orphans"]) == (2, 1, 0)
    said = CliRunner().invoke(app, ["verify", "--store", str(a.path)]).stdout
    assert "1 behind what cannot be read" in " ".join(said.split())
    rebuild_store(a.path)
    done, found = run_json("verify", "--store", a.path)
    assert (done.returncode, found["spans"], found["waiting"]) == (0, 3, 0)


def test_a_server_that_begins_beside_its_predecessor_says_so(
    open_store: Open, geometry: impress.Geometry, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing said that it wrote a part of its own, beside one that nobody writes any more and that
    may hold all of the room."""
    predecessor = open_store(geometry)
    assert not caplog.records
    open_store(geometry)
    (said,) = [record.message for record in caplog.records]
    assert "this process writes shard 1" in said and f"main: process {os.getpid()}" in said
    caplog.clear()
    open_store(geometry, shard=2)  # as asked for
    open_store(geometry, mode="r")
    predecessor.close()
    open_store(geometry)
    assert not caplog.records


def test_readers_follow_by_themselves(open_store: Open, geometry: impress.Geometry) -> None:
    writer = open_store(geometry)
    ready(writer, prompt(128, 1))
    reader = open_store(geometry, mode="r", follow_every_s=0.001)
    other = open_store(geometry, follow_every_s=0.001)
    ready(writer, prompt(128, 2))
    ready(other, prompt(128, 3))
    for store in (reader, other, writer):
        while store.lookup(prompt(128, 2)) + store.lookup(prompt(128, 3)) < 256:
            pass  # the suite's time limit ends it
        assert_serves(store, prompt(128, 3), 128)


def test_a_reader_never_waits_for_one_of_the_same_process_number(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Of two readers in separate containers, both with number 7, the second hung in `open`."""
    writer = open_store(geometry)
    ready(writer, prompt(128))
    folder = writer.path / "shards/main/readers"
    folder.mkdir(exist_ok=True)
    fds = [lock_file(folder / f"{os.getpid()}.{n}") for n in range(1000)]
    try:
        assert_serves(open_store(geometry, mode="r"), prompt(128), 128)
    finally:
        for fd in fds:
            assert fd is not None
            unlock_file(fd)


def test_the_log_holds_no_more_bytes_than_it_may(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry has all tokens of its prefix: a thousand entries alone would be no bound."""
    monkeypatch.setattr(impress.write.index, "LOG_BYTES", 4096)
    a, b = (open_store(geometry, **APART) for _ in range(2))
    for seed in range(12):
        ready(a, prompt(192, seed))
    sizes = [len(value) for _, value in a.index.items("log")]
    assert 1 < len(sizes) < 12 and sum(sizes) <= 4096
    look(b, a)
    for seed in range(12):
        assert_serves(b, prompt(192, seed), 192)


@pytest.mark.parametrize("trimmed", [False, True])
def test_who_is_far_behind_reads_the_whole_index(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, trimmed: bool
) -> None:
    a, b = pair
    if trimmed:
        monkeypatch.setattr(impress.write.index, "LOG_ENTRIES", 2)
    for seed in range(6):
        ready(a, prompt(128, seed))
    b.follow()
    assert a.evict(1 << 30) > 0
    for seed in range(4, 9):
        ready(a, prompt(192, seed)[:128])
        ready(a, prompt(192, seed), start=128)
    look(b, a)
    assert [b.lookup(prompt(192, seed)) for seed in range(9)] == [0] * 4 + [192] * 5
    for seed in range(9):
        assert_serves(b, prompt(192, seed), b.lookup(prompt(192, seed)))
    assert limbo(a) == 0
    check(a, b)


def test_a_store_whose_prefix_another_shard_evicts_meanwhile_is_refused_not_failed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where processes share a nearly full directory that is normal work, but it was counted as a
    failed store, and the next flush raised it."""
    (a, b), tokens = pair, prompt(256)
    ready(a, tokens[:128])
    b.follow()
    a.follow()
    compared, compare = list[int](), follow.Follower._compare
    monkeypatch.setattr(
        follow.Follower, "_compare", lambda *args: compared.append(1) or compare(*args)
    )
    keys, values = kv_of(tokens, b.geometry)
    with b.writer(tokens, 128) as writer:
        assert a.evict(1 << 30) > 0
        b.follow()
        for layer in range(b.geometry.n_layers):
            writer.put(layer, 128, keys[layer][:, 128:], values[layer][:, 128:])
    assert not writer.stored.wait(60) and writer.stored.error is None
    assert writer.stored.refused.startswith("prefix gone: ")
    b.flush()
    assert b.stats()["refused"] == {"prefix_gone": 1}
    a.follow()
    assert not compared  # its log was cut for it, and all who follow compared the whole index
    ready(b, tokens)  # by now it is stored from its beginning
    assert_serves(b, tokens, 256)
    check(*pair)


def test_both_stored_the_same_and_one_evicts_it(pair: Pair) -> None:
    a, b = pair
    for store in pair:
        ready(store, prompt(256, 1))
    look(a, b)
    check(a, b)
    assert a.evict(1 << 30) > 0
    look(a, b)
    for store in pair:
        assert_serves(store, prompt(256, 1), 256)
    assert b.evict(1 << 30) > 0
    look(a, b)
    assert a.lookup(prompt(256, 1)) == b.lookup(prompt(256, 1)) == 0
    check(a, b)


@pytest.mark.parametrize("how", ["opened again", "read", "compared"])
def test_what_hangs_from_within_a_span_stays_where_another_stored_that_part_too(
    pair: Pair, open_store: Open, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The other's span ends with that part and adds nothing: nobody looked for its end any more,
    and the next open took what hangs there for an orphan and erased it."""
    a, b = pair
    head = prompt(256, 1)
    whole, forked = (np.concatenate([head, prompt(256, seed)]) for seed in (2, 3))
    stores = [a, b]
    if how == "compared":
        monkeypatch.setattr(impress.write.index, "LOG_ENTRIES", 1)
        stores.append(open_store(a.geometry, **APART))
    ready(a, whole)
    ready(b, head)
    ready(a, forked, start=256)
    if how == "read":
        stores = [open_store(a.geometry, mode="r")]
    elif how != "compared":
        for store in pair:
            store.close()
        stores = [open_store(a.geometry, **APART) for _ in pair]
    look(*stores)
    for store in stores:
        for tokens in (whole, forked):
            assert_serves(store, tokens, 512)
    check(*stores)


def test_one_that_nobody_uses_here_goes_though_another_hung_from_it(pair: Pair) -> None:
    """Otherwise a writer whose every span is continued elsewhere could not make room."""
    a, b = pair
    ready(a, prompt(512, 1)[:256])
    look(b)
    ready(b, prompt(512, 1), start=256)
    look(a)
    assert a.evict(1) > 0
    assert a.lookup(prompt(512, 1)) == 0
    look(b, a)
    check(a, b)
    look(b, a)
    assert b.lookup(prompt(512, 1)) == 0 and b.ssd.usage().used == 0, "nobody would find it again"


def test_a_repack_is_followed_without_losing_what_hangs_from_it(pair: Pair) -> None:
    a, b = pair
    tokens = prompt(512, 1)
    ready(a, tokens[:256])
    look(b)
    ready(b, tokens, start=256)
    look(a)
    for layer in range(a.geometry.n_layers):
        for _ in range(8):
            chosen = np.arange(0, 256, 16)
            a.history.request(
                [Note(a.catalog.own_records()[0].span_id, 256, layer, 0, 256, chosen)]
            )
    with b.lease(tokens) as held, held.session() as session:
        report = a.repack()
        b.follow()
        keys, _ = kv_of(tokens, b.geometry)
        k, _, _ = session.retrieve(0, None)
        assert np.array_equal(k.numpy(), keys[0])
    assert report.moved == 1, report
    look(a, b)
    for store in pair:
        assert_serves(store, tokens, 512)
    check(a, b)


@pytest.mark.parametrize("name", ["make_identity", "secrets.token_bytes"])
def test_two_that_open_an_empty_directory_at_once_make_one_store(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One opens between the other's looks: it was refused as foreign, or later its spans were."""
    where = f"impress.write.directory.{name}"
    goes_on, first = pkgutil.resolve_name(where), []

    def another_comes(*args: Any) -> Any:
        monkeypatch.undo()
        first.append(open_store(geometry, **APART))
        ready(first[0], prompt(128, 1))
        return goes_on(*args)

    monkeypatch.setattr(where, another_comes)
    late = open_store(geometry, **APART)
    ready(late, prompt(128, 2))
    assert [p.name for p in late.path.iterdir() if p.name.startswith(".")] == []
    for store in (*first, late):
        store.close()
    assert len(first) == 1 and not verify_store(late.path).problems
    found = rebuild_store(late.path)
    assert (found.spans, found.foreign) == (2, 0)
    make_identity(late.path, geometry, 32)
    with pytest.raises(impress.StoreMismatch):  # what the first open said holds
        open_store(geometry, window=32)
    with open_store(geometry) as again:
        for seed in (1, 2):
            assert_serves(again, prompt(128, seed), 128)


def test_a_reader_of_an_index_that_is_just_being_made_is_told_of_no_damage(
    open_store: Open, geometry: impress.Geometry, tmp_path: Path
) -> None:
    """An index's databases were made one after the other, and a reader that came in between, or
    after a kill there, was told to rebuild the index."""
    make_identity(tmp_path / "store", geometry, 64)
    index = tmp_path / "store" / "shards" / "main" / "index"
    make_folder(index)
    lmdb.open(str(index), max_dbs=8).close()
    with pytest.raises(impress.FormatError, match="nothing has been stored here yet"):
        open_store(geometry, mode="r")
    made = Index(index, create=True)
    assert made.version() == 1, "all by one transaction"
    made.close()
    assert open_store(geometry, mode="r").lookup(prompt(64)) == 0


def test_a_stopped_writer_of_one_store_holds_up_no_other(
    tmp_path: Path, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opened its index waited with a lock that opening and closing any other one takes."""
    config = impress.Config(**SMALL)
    for name in ("theirs", "ours"):
        with impress.PrefixStore.open(tmp_path / name, geometry, "test", config) as store:
            ready(store, prompt(128))
    index = tmp_path / "theirs" / "shards" / "main" / "index"
    hold = f"import lmdb; e = lmdb.open({str(index)!r}, max_dbs=8); t = e.begin(write=True); "
    stopped = subprocess.Popen(
        [sys.executable, "-c", hold + "print(flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    begun, done, open_dbs = threading.Event(), threading.Event(), impress.write.index.open_dbs

    def opening(*args: Any, **named: Any) -> None:
        if threading.current_thread() is waiting:
            begun.set()
        open_dbs(*args, **named)

    def beside() -> None:
        with impress.PrefixStore.open(tmp_path / "ours", geometry, "test", config) as store:
            assert_serves(store, prompt(128), 128)
        done.set()

    monkeypatch.setattr(impress.write.index, "open_dbs", opening)
    waiting = threading.Thread(target=lambda: Index(index, create=False).close(), daemon=True)
    try:
        assert stopped.stdout is not None and stopped.stdout.readline()
        waiting.start()
        assert begun.wait(60)
        threading.Thread(target=beside, daemon=True).start()
        assert done.wait(60) and waiting.is_alive()
    finally:
        stopped.communicate(b"\n")
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_reader_that_came_to_a_full_disk_is_waited_for_once_there_is_room(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Its file was made and stayed empty, so that it might read anything: for as long as a lease
    may last the writer got nothing back of what it took out, and nobody was told."""
    store = open_store(geometry, **APART)
    ready(store, prompt(128))
    folder = store.path / "shards" / "main" / "readers"

    def full(_fd: object, _n_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(readers, "give_blocks", full)
        reader = open_store(geometry, mode="r", **APART)
    assert caplog.text.count("(No space left on device): a lease here is not waited for") == 1
    assert present(folder) == [] == [*folder.iterdir()]
    assert_serves(reader, prompt(128), 128)
    reader.follow()
    assert present(folder) == []  # not with every look: each would make and remove a file
    monkeypatch.setattr("impress.write.neighbours.RETRY_S", 0)
    reader.follow()
    (seen,) = present(folder)
    assert seen.generation > 0 and not seen.held
    reader.close()
    assert present(folder) == []


def read_only(*_args: object, **_named: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_file_system_that_went_read_only_by_itself_is_read_from(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ext4 does so after an error, and still says that its files may be written: verify and inspect
    could not be run just when the disk had begun to fail."""
    store = open_store(geometry)
    assert put_prompt(store, prompt(128)).wait(60)
    store.close()
    opened = os.open

    def refused(path: Any, flags: int, *args: Any, **named: Any) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            read_only()
        return opened(path, flags, *args, **named)

    monkeypatch.setattr(os, "open", refused)
    assert verify_store(store.path).spans == 1
    assert_serves(open_store(geometry, mode="r"), prompt(128), 128)
    with pytest.raises(impress.StoreFailed, match="Read-only file system"):
        open_store(geometry)


def test_a_reader_that_cannot_take_its_file_away_is_gone_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that had become read-only a store's close raised the system's own error."""
    reader = Presence(tmp_path / "readers")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", read_only)
        reader.close()
    assert [path.is_file() for path in (tmp_path / "readers").iterdir()] == [True]
    assert present(tmp_path / "readers") == []


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()], ids=repr)
def test_a_killed_readers_file_that_could_not_be_removed_once_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Who had looked kept it locked, and took its own lock for a living reader's until it ended:
    no space that the reader might read was given back before its time."""

    def fails(*_: object, **__: object) -> None:
        raise error

    folder = tmp_path / "readers"
    killed = Presence(folder)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", read_only)
        killed.close()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fails)
        with suppress(KeyboardInterrupt):
            assert len(present(folder)) == 1  # not known to be gone
    assert present(folder) == [] and not any(folder.iterdir())


@pytest.mark.parametrize("left", ["folder", "index"])
def test_a_shard_whose_first_open_was_cut_off_does_no_harm_to_the_others(
    open_store: Open, geometry: impress.Geometry, left: str
) -> None:
    """It was killed, or short of files, while its index was made: the whole store could not be
    verified until somebody wrote that shard, and what hung in the air was not deleted."""
    store = open_store(geometry, **APART)
    ready(store, prompt(128, 1))
    index = store.path / "shards" / "1" / "index"
    make_folder(index)
    if left == "index":
        lmdb.open(str(index), max_dbs=8).close()
    assert not verify_store(store.path).problems
    store.follow()
    assert store._home.others.error is None
    with open_store(geometry, mode="r") as reader:
        assert_serves(reader, prompt(128, 1), 128)
    ready(open_store(geometry, **APART), prompt(128, 2))
    store.follow()
    assert_serves(store, prompt(128, 2), 128)


def test_a_reader_calls_no_space_its_own(open_store: Open, geometry: impress.Geometry) -> None:
    """It told all segments that it found when it opened as free, for as long as it ran: an alert on
    free space never went off."""
    ready(store := open_store(geometry), prompt(128, 1))
    with open_store(geometry, mode="r") as reader:
        assert reader.stats()["tiers"]["ssd"]["free"] == 0
        assert reader.stats()["chunks"]["ssd"] == store.stats()["chunks"]["ssd"] > 0
    assert store.stats()["tiers"]["ssd"]["used"] > 0


def test_segments_without_the_file_of_their_index_are_not_written_over(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """The index's folder was enough: an empty index was made, and all that was stored was free."""
    ready(store := open_store(geometry, **APART), prompt(128, 1))
    store.close()
    (store.path / "shards" / "main" / "index" / "data.mdb").unlink()
    for mode in ("rw", "r"):
        with pytest.raises(impress.FormatError, match="impress rebuild makes it again"):
            open_store(geometry, mode=mode)
    rebuild_store(store.path)
    assert_serves(open_store(geometry, **APART), prompt(128, 1), 128)


def test_a_process_that_may_open_no_more_files_is_told_so(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error was raised as it came, and not as StoreFailed."""
    open_store(geometry, **APART)

    def refused(path: Path, *_args: Any, **_named: Any) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(impress.StoreFailed, match="Too many open files"):
        open_store(geometry, mode="r")


@pytest.mark.parametrize("mode", ["rw", "r"])
@pytest.mark.parametrize(
    ("what", "name", "number"),
    [
        ("iterdir", "segments", errno.EMFILE),
        ("iterdir", "shards", errno.EMFILE),
        ("is_dir", "index.gone", errno.EACCES),
    ],
)
def test_a_store_of_which_it_cannot_be_told_what_is_there_is_not_opened(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, mode: str,
    what: str, name: str, number: int,
) -> None:  # fmt: skip
    """The system's own error was raised; where shards could not be listed, it was said that there
    are none."""
    store, real = open_store(geometry, **APART), getattr(Path, what)
    ready(store, prompt(128, 1))
    store.close()
    if name == "segments":
        (store.path / "shards/main/index/data.mdb").unlink()

    def refused(path: Path) -> Any:
        if path.name == name:
            raise OSError(number, os.strerror(number), str(path))
        return real(path)

    monkeypatch.setattr(Path, what, refused)
    with pytest.raises(impress.StoreFailed, match=f": {os.strerror(number)}$"):
        open_store(geometry, mode, **APART)


def test_those_it_knows_are_followed_where_no_others_can_be_looked_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    ready(a, prompt(128, 1))

    def refused(path: Path) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(Path, "iterdir", refused)
    assert b.follow() and b.lookup(prompt(128, 1)) == 128


def test_a_bad_piece_is_said_to_be_in_the_file_it_is_in(pair: Pair) -> None:
    """The error named the folder of the reading process, whichever shard the segment was in."""
    a, b = pair
    ready(a, prompt(128, 1))
    b.follow()
    flip_a_bit(a.path, next(iter(a.catalog.records())).parts[0])
    with b.lease(prompt(128, 1)) as lease, lease.session() as session:
        with pytest.raises(impress.PrefixLost, match=r"shards/main/segments/00000000\.seg: 1 bad"):
            session.retrieve(0, None)


def test_verify_finds_what_was_stored_across_shards_while_it_read_them(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shards' indexes are read one after the other: verify called the store unsound."""
    a, b = pair
    stored_between(a, b, prompt(512, 1), monkeypatch)
    found = verify_store(a.path)
    assert found.spans == 3 and not found.problems


# ---- what they take out --------------------------------------------------------------------------


def test_space_that_another_process_reads_is_not_given_away(pair: Pair) -> None:
    a, b = pair
    ready(a, prompt(256, 1))
    look(b, a)
    with b.lease(prompt(256, 1)) as lease, lease.session() as session:
        assert a.evict(1 << 30) > 0 and limbo(a) > 0
        look(b, a)  # b has seen that, and holds it still
        held = limbo(a)
        assert held > 0 and b.lookup(prompt(256, 1)) == 0
        for seed in range(2, 6):
            ready(a, prompt(256, seed))
        assert limbo(a) == held
        keys, values = kv_of(prompt(256, 1), b.geometry)
        for layer in range(b.geometry.n_layers):
            k, v, _ = session.retrieve(layer, None)
            assert np.array_equal(k.numpy(), keys[layer])
            assert np.array_equal(v.numpy(), values[layer])
    look(b, a)
    assert limbo(a) == 0
    check(a, b)


def test_a_reader_that_hangs_is_waited_for_a_while_and_then_meets_a_miss(pair: Pair) -> None:
    a, b = pair
    ready(a, prompt(256, 1))
    look(b, a)
    with b.lease(prompt(256, 1)) as lease, lease.session() as session:
        session.retrieve(0, None)
        assert a.evict(1 << 30) > 0 and limbo(a) > 0
        a._home.reclaimer.limbo._limit_s = -1.0  # type: ignore[union-attr]
        a.follow()
        assert limbo(a) == 0
        ready(a, prompt(256, 2))  # in its place
        with pytest.raises(impress.PrefixLost) as lost:
            session.retrieve(1, None)
        assert lost.value.reason == "checksum"
    look(b, a)
    assert_serves(b, prompt(256, 2), 256)
    check(a, b)


@pytest.mark.parametrize("why", ["behind", "holding"])
def test_a_writer_that_opens_waits_for_who_may_read_what_went_before(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Nobody owns that space any more: without the wait the first store could be written where a
    lease still reads, and what the lease then misses is computed again."""
    monkeypatch.setattr(impress.write.reclaim, "YIELD_TIMEOUT_S", 0)
    a = open_store(geometry, **APART)
    ready(a, prompt(256, 1))
    b = open_store(geometry, "r", **APART)
    lease = b.lease(prompt(256, 1))
    assert a.evict(1 << 30) > 0
    if why == "holding":
        b.follow()
    a.close()
    present, seen = impress.write.reclaim.present, []

    def asked(folder: Path) -> list[Any]:
        seen.append(present(folder))
        lease.release()
        b.follow()
        return seen[-1]

    monkeypatch.setattr(impress.write.reclaim, "YIELD_TIMEOUT_S", 60)
    monkeypatch.setattr(impress.write.reclaim, "present", asked)
    again = open_store(geometry, **APART)
    (before,), (after,) = seen[0], seen[-1]
    assert before.held if why == "holding" else before.generation < again.index.generation
    assert not after.held and after.generation == again.index.generation
    check(again, b)


@pytest.mark.parametrize("why", ["a reader behind", "a lease here"])
def test_what_is_on_its_way_out_is_not_made_up_for_by_more(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Above the mark each store evicted again until others had looked: a burst left nothing."""
    monkeypatch.setattr(impress.write.reclaim, "YIELD_TIMEOUT_S", 0)
    marks = {"disk_bytes": 8 * MIB, "disk_high": 0.75, "disk_low": 0.5}
    a, seeds = open_store(geometry, **APART, **marks), iter(range(100))
    if why == "a reader behind":
        b = open_store(geometry, **APART)
        while not limbo(a):
            ready(a, prompt(128, next(seeds)))
            a.flush()
    else:
        ready(a, prompt(640, 99), tenant="alice")  # 2.5 MiB that a purge takes out of the tree
        lease = a.lease(prompt(640, 99), tenant="alice")
        assert a.purge("alice") == (1, 1)
        while a.ssd.usage().used < 6 * MIB:
            ready(a, prompt(128, next(seeds)))
            a.flush()
    for _ in range(2):
        ready(a, prompt(128, next(seeds)))
        a.flush()
    held = sum(r.owned_bytes for r in a.catalog.own_records())
    assert held > 3.4 * MIB, "below the low mark, by more than one span"
    assert a.ssd.usage().used > 6 * MIB, "none of it was free yet"
    if why == "a reader behind":
        look(b, a)
    else:
        lease.release()
        a.flush()
    assert limbo(a) == 0 and a.ssd.usage().used == held
    check(a)


def full_beside_a_stopped_reader(
    open_store: Open, geometry: impress.Geometry
) -> tuple[impress.PrefixStore, impress.PrefixStore]:
    """A writer with 6 prompts, while a reader holds up the place of one more; and that reader."""
    marks = {"disk_bytes": 8 * MIB, "disk_high": 1, "disk_low": 1}
    a = open_store(geometry, **APART, **marks)
    for seed in range(7):
        ready(a, prompt(256, seed))
    b = open_store(geometry, "r", **APART)
    a.evict(1)
    assert limbo(a) > MIB and a.stats()["spans"] == 6
    return a, b


def test_a_reader_that_is_stopped_does_not_cost_all_that_is_stored(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each store evicted as much again, which the reader also held up, and was then refused."""
    monkeypatch.setattr(impress.write.reclaim, "YIELD_TIMEOUT_S", 0)
    a, b = full_beside_a_stopped_reader(open_store, geometry)
    for seed in range(10, 20):
        assert put_prompt(a, prompt(256, seed)).refused == "disk full"
    assert a.stats()["spans"] == 6
    assert put_prompt(a, prompt(512, 20)).refused == "disk full"  # what limbo does not cover goes
    assert a.stats()["spans"] == 5
    look(b, a)
    ready(a, prompt(512, 20))
    assert a.stats()["spans"] == 6
    check(a)


@pytest.mark.parametrize("lost", [False, True], ids=["ours", "another store takes it"])
def test_room_that_is_on_its_way_is_waited_for(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(impress.write.reclaim, "YIELD_TIMEOUT_S", 0)
        a, b = full_beside_a_stopped_reader(open_store, geometry)
    reclaimer = a._home.reclaimer
    assert reclaimer is not None
    settle, taken = reclaimer.settle, []

    def goes_on() -> None:
        b.follow()
        settle()
        if lost and not taken:
            taken.append(a.ssd.reserve(MIB))

    monkeypatch.setattr(reclaimer, "settle", goes_on)
    ready(a, prompt(256, 10))
    assert a.stats()["spans"] == 7 - lost
    for slot in taken:
        a.ssd.free(slot)
    check(a)


def deleted_under(
    reader: impress.PrefixStore, writer: impress.PrefixStore, link: Path | None = None
) -> None:
    """Has the writer delete a segment that the reader has read. `link`: a name it keeps."""
    ready(writer, prompt(128, 1))
    look(reader, writer)
    assert_serves(reader, prompt(128, 1), 128)
    if link is not None:
        (segment,) = (writer.path / "shards/main/segments").iterdir()
        os.link(segment, link)
    writer.evict(1 << 30)
    look(reader, writer)
    writer.evict(1)  # gives the empty segment back


@pytest.mark.parametrize("linked", [False, True], ids=["gone", "in a backup of links"])
def test_a_file_that_was_deleted_and_made_again_is_read_anew(
    pair: Pair, tmp_path: Path, linked: bool
) -> None:
    """A file was recognised only by its number of names: with one more in a backup, another's good
    spans were taken for damaged, and one's own spans behind them were deleted."""
    a, b = pair
    deleted_under(b, a, tmp_path / "backup.seg" if linked else None)
    ready(a, prompt(128, 2))
    assert [p.name for p in (a.path / "shards/main/segments").iterdir()] == ["00000000.seg"]
    look(b)
    assert_serves(b, prompt(128, 2), 128)


def test_a_reader_lets_go_of_segments_that_were_deleted_though_nothing_else_happens(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments go after the commit that takes their spans out, and no other commit need follow: the
    file system kept their blocks for as long as the reader lived."""
    a, b = pair
    monkeypatch.setattr(b._home.others, "_grace_s", 0)
    monkeypatch.setattr(follow, "DROP_EVERY_S", 0.0)
    b._home.others._drop_due_s = 0.0
    deleted_under(b, a)
    assert not list((a.path / "shards/main/segments").iterdir())
    look(b)
    look(b)
    links = [entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert not [link for link in links if str(a.path) in str(link) and "(deleted)" in str(link)]


def test_what_hung_from_a_span_that_went_bad_is_found_once_its_place_is_filled(
    pair: Pair,
) -> None:
    """Another shard's span was hidden as long as the process lived, and was stored again by it."""
    a, b = pair
    tokens = prompt(256, 1)
    ready(b, tokens[:128])
    ready(b, tokens, start=128)
    look(a)
    assert_serves(a, tokens, 256)
    head = min(a.catalog.records(), key=lambda record: record.first_window)
    a._home.leaving.quarantine(head.span_id)
    assert a.lookup(tokens) == 0
    look(a)
    ready(a, tokens[:128])
    look(a)
    assert_serves(a, tokens, 256)
    assert len(a.catalog.own_records()) == 1


def test_a_look_at_which_nothing_has_changed_asks_for_no_file_by_name(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did so 20 times a second for each segment of each other shard: 5 % of a CPU at 200 GiB."""
    a, b = pair
    ready(a, prompt(128, 1))
    look(b)
    assert_serves(b, prompt(128, 1), 128)
    asked, stat = [], Path.stat

    def counted(self: Path, **options: Any) -> Any:
        asked.append(self.suffix)
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", counted)
    look(b)
    assert ".seg" not in asked


def test_a_purge_leaves_no_byte_in_any_shard(pair: Pair) -> None:
    """Nor in what hung from the purged spans elsewhere, nor in the logs that tell followers of the
    purge. What hung elsewhere went as that shard was opened, and the command did not count it."""
    a, b = pair
    hers, his = prompt(512, 1), prompt(256, 2)
    ready(a, hers[:256], tenant="alice")
    ready(b, his, tenant="bob")
    look(b)
    ready(b, hers, start=256, tenant="alice")
    root = a.catalog.own_records()[0].root
    there = [r for s in pair for r in s.catalog.own_records() if r.root == root]
    path = a.path
    purge = ["purge", "--store", str(path), "--tenant", "alice"]
    busy = CliRunner().invoke(app, purge)
    assert busy.exit_code == 2 and "shard main is open for writing by" in busy.stderr
    assert f"process {os.getpid()}: stop that process, then repeat" in busy.stderr
    assert "another shard" not in busy.stderr  # no option of the command names one
    a.close()
    busy = CliRunner().invoke(app, purge)
    assert busy.exit_code == 2 and "shard 1 is open for writing by" in busy.stderr
    b.close()
    marks = [hers[:64].tobytes(), hers[-64:].tobytes(), rows_of(hers, a.geometry)]
    kept = [his.tobytes()[:256], rows_of(his, a.geometry)]
    held = everything_in(path)
    assert all(mark in held for mark in marks + kept)
    done = CliRunner().invoke(app, [*purge, "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["spans"] == len(there) == 2
    assert said["freed_bytes"] == sum(record.owned_bytes for record in there)
    held = everything_in(path)
    assert not any(mark in held for mark in marks) and all(mark in held for mark in kept)


@pytest.mark.parametrize("name", ["index.gone", "elsewhere"])
def test_what_hangs_from_a_shard_whose_index_is_missing_for_the_moment_stays(
    pair: Pair, open_store: Open, name: str
) -> None:
    """The index was lost, or a purge was killed while putting another in its place: what hung from
    that shard was taken for orphans and erased."""
    a, b = pair
    ready(a, prompt(512, 1)[:256])
    look(b)
    ready(b, prompt(512, 1), start=256)
    for store in pair:
        store.close()
    index = a.path / "shards/main/index"
    index.rename(index.with_name(name))
    with open_store(a.geometry, **APART, shard=1) as alone:
        assert_serves(alone, prompt(512, 1), 0)
    if name == "elsewhere":
        assert rebuild_store(a.path).spans == 2
    again = open_store(a.geometry, **APART, shard=0), open_store(a.geometry, **APART, shard=1)
    look(*again)
    for store in again:
        assert_serves(store, prompt(512, 1), 512)
    check(*again)


def test_a_purge_reaches_what_hangs_from_a_shard_that_cannot_be_read(
    pair: Pair, open_store: Open
) -> None:
    """It is in no tree but stays in the index: it came back when that shard did."""
    a, b = pair
    hers = prompt(512, 1)
    ready(a, hers[:256], tenant="alice")
    look(b)
    ready(b, hers, start=256, tenant="alice")
    for store in pair:
        store.close()
    index = a.path / "shards/main/index"
    index.rename(index.with_name("index.gone"))
    with open_store(a.geometry, **APART, shard=1) as alone:
        assert alone.purge("bob") == (0, 0)
        assert alone.purge("alice") == (1, 0)
        assert alone.purge("alice") == (0, 0)
        check(alone)
    rows = kv_of(hers, a.geometry, 256)[0][0].transpose(1, 0, 2)[:5].tobytes()
    assert rows not in everything_in(a.path) and rows_of(hers, a.geometry) in everything_in(a.path)
    again = open_store(a.geometry, **APART, shard=0), open_store(a.geometry, **APART, shard=1)
    look(*again)
    for store in again:
        assert_serves(store, hers, 256, tenant="alice")
    check(*again)


def without_main(pair: Pair, tokens: np.ndarray) -> Path:
    """Shard 1 holds the rest of what main begins; moves main's index away; returns its path."""
    a, b = pair
    ready(a, tokens[:256])
    look(b)
    for end in range(512, len(tokens) + 1, 256):
        ready(b, tokens[:end], start=end - 256)
    for store in pair:
        store.close()
    index = a.path / "shards/main/index"
    return index.rename(index.with_name("elsewhere"))


def test_what_hangs_from_a_shard_is_served_once_that_one_can_be_read(
    pair: Pair, open_store: Open
) -> None:
    """A process that had opened without that shard gave it no place for as long as it lived."""
    tokens = prompt(1024)
    away = without_main(pair, tokens)
    with open_store(pair[0].geometry, **APART, shard=1) as alone:
        assert_serves(alone, tokens, 0)
        away.rename(away.with_name("index"))
        look(alone, alone)
        assert_serves(alone, tokens, 1024)
        check(alone)
        assert alone.evict(1 << 30) > 0
        assert_serves(alone, tokens, 256)
        assert alone.stats()["retired_spans"] == 0
        check(alone)


def unreadable(monkeypatch: pytest.MonkeyPatch, shard: str) -> None:
    """LMDB finds a page of this shard's spans damaged."""
    spans = Index.spans

    def damaged(index: Index) -> Iterator[tuple[int, bytes]]:
        if index._folder.parent.name == shard:
            raise impress.FormatError("page was wrong type")
        return spans(index)

    monkeypatch.setattr(Index, "spans", damaged)


def test_what_hangs_from_a_shard_with_a_damaged_page_is_served_once_that_one_is_whole(
    pair: Pair, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then no other shard could open. Nor may a look that fails count as one that read."""
    (a, b), tokens = pair, prompt(512)
    monkeypatch.setattr(impress.write.index, "LOG_ENTRIES", 1)
    ready(a, prompt(256, 9))
    ready(a, tokens[:256])
    look(b)
    ready(b, tokens, start=256)
    for store in pair:
        store.close()
    with monkeypatch.context() as patch:
        unreadable(patch, "main")
        alone = open_store(a.geometry, **APART, shard=1)
        assert_serves(alone, tokens, 0)
        look(alone)
    assert_serves(alone, tokens, 0)
    look(alone)
    assert_serves(alone, tokens, 512)
    check(alone)


def test_a_shard_is_followed_beside_one_with_a_damaged_page(
    pair: Pair, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To compare one shard, all of them were read, and it was left out if another was damaged."""
    a, b = pair
    monkeypatch.setattr(impress.write.index, "LOG_ENTRIES", 1)
    reader = open_store(a.geometry, mode="r", **APART)
    for seed in (1, 2):
        ready(b, prompt(256, seed))
    with monkeypatch.context() as patch:
        unreadable(patch, "main")
        look(reader)
        for seed in (1, 2):
            assert_serves(reader, prompt(256, seed), 256)
    check(a, b, reader)


def test_what_hangs_from_a_shard_that_cannot_be_read_makes_room_for_what_is_stored(
    pair: Pair, open_store: Open
) -> None:
    """It could not be evicted, and kept its shard full for good."""
    tokens = prompt(1024)
    away = without_main(pair, tokens)
    with open_store(pair[0].geometry, **APART, shard=1, disk_bytes=4 * MIB) as alone:
        for seed in (2, 3):
            ready(alone, prompt(512, seed))
            alone.flush()
        assert_serves(alone, prompt(512, 3), 512)
        assert alone.evict(1 << 30) > 0
        assert alone.ssd.usage().used == 0
        away.rename(away.with_name("index"))
        look(alone)
        assert_serves(alone, tokens, 256)
        check(alone)


def test_a_shard_that_was_rebuilt_beside_a_running_process_is_followed(
    pair: Pair, open_store: Open
) -> None:
    """An index that is made again has no log: to a process that had not read it before, nothing
    seemed to have happened until it was written to."""
    a, b = pair
    ready(b, prompt(256, 1))
    for store in pair:
        store.close()
    shutil.rmtree(a.path / "shards/1/index")
    server = open_store(a.geometry, **APART, shard=0)
    assert rebuild_store(a.path).spans == 1
    look(server)
    assert_serves(server, prompt(256, 1), 256)
    assert not server.follow(), "it is read once"
    check(server)


def test_an_index_made_anew_is_followed(pair: Pair) -> None:
    a, b = pair
    ready(a, prompt(256, 1))
    look(b)
    a.close()
    done = CliRunner().invoke(app, ["rebuild", "--store", str(a.path)])
    assert done.exit_code == 1 and "left alone" in done.stdout  # all but b's shard is rebuilt
    again = impress.PrefixStore.open(a.path, a.geometry, "test", a.config)
    with again:
        ready(again, prompt(256, 2))
        assert again.stats()["shard"] == "main"
        look(b, again)
        for seed in (1, 2):
            assert_serves(b, prompt(256, seed), 256)
        again.evict(1 << 30)
        look(b, again)
        assert limbo(again) == 0 and b.lookup(prompt(256, 2)) == 0


def test_a_reader_outlives_the_index_that_it_opened(
    open_store: Open, small: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on asking the index that a purge had replaced, which was closed."""
    monkeypatch.setattr(impress.write.reclaim, "YIELD_TIMEOUT_S", 0)
    a = open_store(small, **APART)
    ready(a, prompt(128, 1))
    reader = open_store(small, mode="r", **APART)
    a.close()
    done = CliRunner().invoke(app, ["purge", "--store", str(a.path), "--namespace", "test"])
    assert done.exit_code == 0, done.output
    with open_store(small, **APART) as again:
        ready(again, prompt(128, 2))
        look(reader)
        assert reader.names() == again.names()
        assert reader.index.ledgers() == []
        assert reader.ledgers.open(b"another namespace", impress.Quality(), reader.config)
        assert_serves(reader, prompt(128, 2), 128)


@pytest.mark.parametrize("running", [False, True], ids=["closed", "running"])
def test_a_copy_of_a_shard_under_another_number_does_that_shard_no_harm(
    open_store: Open, geometry: impress.Geometry, running: bool
) -> None:
    """The copy's writer gave out and deleted the other shard's files, and told that shard's own
    process that its spans were deleted."""
    a, mine = open_store(geometry, **APART, shard=0), prompt(256, 1)
    ready(a, mine)
    a.close()
    shards = a.path / "shards"
    shutil.copytree(shards / "main", shards / "1")
    files = {path: path.read_bytes() for path in (shards / "main/segments").iterdir()}
    stores = [open_store(geometry, **APART, shard=0)] if running else []
    b = open_store(geometry, **APART, shard=1)
    stores.append(b)
    ready(b, prompt(128, 2))
    look(*stores)
    for store in stores:
        assert_serves(store, mine, 256)
        assert_serves(store, prompt(128, 2), 128)
    check(*stores)
    assert b.evict(1 << 30) > 0
    for store in stores:
        store.close()
    assert {path: path.read_bytes() for path in files} == files
    for again in (open_store(geometry, mode="r"), open_store(geometry, **APART, shard=0)):
        assert_serves(again, mine, 256)
    check(again)


def test_a_shard_that_was_renamed_for_a_while_is_rebuilt_under_its_own_name(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Meanwhile it gave out ids and segments of the other number, and erased what was there."""
    a, b = open_store(geometry, **APART, shard=1), prompt(128, 2)
    ready(a, prompt(256, 1))
    a.close()
    shards = a.path / "shards"
    (shards / "1").rename(shards / "main")
    with open_store(geometry, **APART, shard=0) as renamed:
        ready(renamed, b)
        assert [r.span_id for r in renamed.catalog.own_records()] == [1]
        check(renamed)
        assert_serves(renamed, prompt(256, 1), 0)
    with open_store(geometry, **APART, shard=0) as renamed:  # and what was noted meanwhile?
        assert_serves(renamed, b, 128)
    (shards / "main").rename(shards / "1")
    rebuild_store(a.path)
    with open_store(geometry, **APART, shard=1) as again:
        assert_serves(again, prompt(256, 1), 256)
        assert_serves(again, b, 0)
        check(again)


@pytest.mark.parametrize("note", ["whole", "damaged"])
def test_what_a_purge_left_to_be_erased_outlives_a_while_under_another_name(
    open_store: Open, geometry: impress.Geometry, tmp_path: Path, note: str
) -> None:
    """A kill cut the purge off. The renamed shard found nothing of its number to erase, which
    counted as done: back under its own name, a rebuild served what had been purged."""
    a, tokens, killed = open_store(geometry, **APART, shard=1), prompt(256, 1), tmp_path / "killed"
    ready(a, tokens)
    with a.lease(tokens):
        assert a.purge() == (1, 1)
        shutil.copytree(a.path, killed)

    def opened(number: int) -> impress.PrefixStore:
        config = impress.Config(**{**SMALL, **APART, "shard": number})
        return impress.PrefixStore.open(killed, geometry, "test", config)

    (killed / "shards/1").rename(killed / "shards/main")
    if note == "damaged":
        damage_notes(killed)
    with opened(0) as renamed:
        ready(renamed, prompt(128, 2))
        assert renamed.counters["unerased_spans"] == 0
        assert_serves(renamed, prompt(128, 2), 128)
    (killed / "shards/main").rename(killed / "shards/1")
    assert rows_of(tokens, geometry) in everything_in(killed / "shards/1/segments")
    rebuild_store(killed)
    with opened(1) as again:
        assert_serves(again, tokens, 0)
        assert rows_of(tokens, geometry) not in everything_in(killed / "shards/1/segments")
        ready(again, prompt(128, 3))
        check(again)


def test_a_shard_renamed_to_a_lower_number_gives_no_id_out_twice(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """The last id noted as given out was the higher number's, and no id of the shard's own came up
    to that: after a restart another span got the last one's id."""
    a = open_store(geometry, **APART, shard=1)
    ready(a, prompt(256, 1))
    a.close()
    shards = a.path / "shards"
    (shards / "1").rename(shards / "main")
    with open_store(geometry, **APART, shard=0) as renamed:
        for seed in (2, 3):
            ready(renamed, prompt(128, seed))
        last = max(record.span_id for record in renamed.catalog.own_records())
        renamed.lease(prompt(128, 2)).release()
        assert renamed.evict(1) > 0 and not renamed.lookup(prompt(128, 3))
    with open_store(geometry, **APART, shard=0) as again:
        assert again.index.last_id in again.catalog.own
        ready(again, prompt(128, 4))
        assert max(record.span_id for record in again.catalog.own_records()) > last
        check(again)


def test_inspect_shows_the_shards_in_use(pair: Pair) -> None:
    a, b = pair
    ready(a, prompt(256, 1))
    look(b)
    ready(b, prompt(512, 2))
    run = CliRunner().invoke
    main, one = run_json("inspect", "--store", a.path)[1]["shards"]
    assert (main["name"], main["windows"], main["readers"]) == ("main", 4, 1)  # b, not inspect
    assert (one["name"], one["windows"], one["writer"]) == ("1", 8, os.getpid())
    assert main["used"] == a.ssd.usage().used > 0
    assert "Shards" in run(app, ["inspect", "--store", str(a.path)]).stdout
    repacked = run(app, ["repack", "--store", str(a.path)])
    assert repacked.exit_code == 2 and repacked.stderr.count("is open for writing by") == 2
    assert repacked.stderr.count("stop that process, then repeat") == 2


def test_a_lock_on_another_file_system_is_none_of_the_shards(
    open_store: Open, geometry: impress.Geometry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that locked a file of the same inode number was shown as the store's writer."""
    with open_store(geometry) as store:
        ready(store, prompt(256, 1))
    inode = (store.path / "shards/main/lock").stat().st_ino
    locks = tmp_path / "locks"
    locks.write_text(f"1: FLOCK  ADVISORY  WRITE 4242 ff:ffff:{inode} 0 EOF\n")
    monkeypatch.setattr(impress.upkeep.shares, "LOCKS", locks)
    shown = CliRunner().invoke(app, ["inspect", "--store", str(store.path), "--json"])
    assert [shard["writer"] for shard in json.loads(shown.stdout)["shards"]] == [None]


def test_inspect_counts_the_same_shards_beside_a_running_process(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """The SSD's bytes shown were those of that process's shard, but the chunks of all shards."""
    settings = {**APART, "metrics_port": 0}
    a, b = open_store(geometry, **settings), open_store(geometry, **APART)
    ready(a, prompt(256, 1))
    ready(b, prompt(512, 2))
    look(a)
    seen = []
    for live in ([], ["--metrics", str(a.metrics_port)]):
        shown = CliRunner().invoke(app, ["inspect", "--store", str(a.path), "--json", *live])
        assert shown.exit_code == 0, shown.output
        ssd = json.loads(shown.stdout)["tiers"]["ssd"]
        seen.append({key: ssd[key] for key in ("total", "used", "free", "chunks")})
    assert seen[0] == seen[1]
    assert seen[0]["used"] == a.ssd.usage().used + b.ssd.usage().used


def test_inspect_counts_the_leases_of_every_shard(pair: Pair, open_store: Open) -> None:
    """Only those of the first shard were read: in another no prompt seemed ever leased."""
    a, b = pair
    for store, tokens, n in ((a, prompt(128, 1), 5), (b, prompt(256, 2), 3)):
        ready(store, tokens)
        for _ in range(n):
            store.lease(tokens).release()
    for store in pair:
        store.close()
    _, found = run_json("inspect", "--store", a.path)
    assert [(row["tokens"], row["leases"]) for row in found["hottest"]] == [(128, 5), (256, 3)]
    reader = open_store(a.geometry, "r", **APART)
    for tokens in (prompt(128, 1), prompt(256, 2)):  # both the last of their shard
        root, labels, _ = reader._names_of(tokens, None, "")
        seen = reader.catalog.traces([root], labels)[root]
        assert seen.steps[-1].used == seen.tick


@pytest.mark.parametrize("busy", [0, 1], ids=["main", "1"])
def test_what_requests_used_fades_with_the_requests_of_its_own_shard(
    pair: Pair, open_store: Open, busy: int
) -> None:
    """Each shard counts its own requests. By the first shard's count, what had just been used in
    another was as good as forgotten, or what was used there long ago was new."""
    notes, want = [], [1.0, 1.0]
    for store, tokens in zip(pair, (prompt(128, 1), prompt(192, 2)), strict=True):
        ready(store, tokens)
        (record,) = store.catalog.own_records()
        n = len(tokens)
        notes.append([Note(record.span_id, n, layer, 0, n, None) for layer in range(2)])
        store.history.request(notes[-1])
    for _ in range(10 * HALF_LIFE):
        pair[busy].history.request([])
    want[busy] = 2**-10
    for store in pair:
        store.close()
    _, found = run_json("inspect", "--store", pair[0].path)
    scores = {row["tokens"]: row["score"] for row in found["hottest"]}
    assert [scores[128], scores[192]] == pytest.approx(want, rel=1e-3)
    reader = open_store(pair[0].geometry, "r", **APART)
    for used, score in zip(notes, want, strict=True):
        reader.history.request(used)
        summary = reader.history.summary(used[0].span)
        assert summary is not None and summary[0] == pytest.approx(1 + score, rel=1e-3)


# ---- at random -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_whatever_three_writers_do_answers_are_right(
    open_store: Open, small: impress.Geometry, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """And when all have looked, who followed finds what an open does, and all space is accounted
    for."""
    monkeypatch.setattr(impress.write.reclaim, "YIELD_TIMEOUT_S", 0)
    monkeypatch.setattr(impress.write.index, "LOG_ENTRIES", 6)
    rng = np.random.default_rng(seed)
    made = [prompt(64 * int(rng.integers(1, 8)), n) for n in range(6)]
    made += [np.concatenate([made[n][: 64 * int(rng.integers(1, 4))], prompt(192, 50 + n)])
             for n in range(6)]  # fmt: skip
    settings = {**APART, "disk_bytes": 2 << 20, "io_threads": 2}
    stores = [open_store(small, **settings) for _ in range(3)]
    reader = open_store(small, mode="r", **APART)
    leases: list[tuple[impress.PrefixStore, np.ndarray, Any]] = []

    n_closed = n_lost = n_read = 0

    def read(store: impress.PrefixStore, tokens: np.ndarray, lease: Any) -> None:
        nonlocal n_read, n_lost
        keys, values = kv_of(tokens, small)
        n = lease.n_tokens
        try:
            with lease, lease.session() as session:
                for layer in range(small.n_layers):
                    k, v, _ = session.retrieve(layer, None)
                    assert np.array_equal(k.numpy(), keys[layer][:, :n])
                    assert np.array_equal(v.numpy(), values[layer][:, :n])
            n_read += 1
        except impress.PrefixLost:
            # A shard that closes waits for others, here not at all, then erases what was purged or
            # repacked. On a busy machine that comes before the reader has looked: lost, not wrong.
            n_lost += 1
            assert n_closed

    for _ in range(150):
        store, tokens = stores[rng.integers(3)], made[rng.integers(len(made))]
        what = rng.random()
        if what < 0.35:
            scores = rng.random((2, len(tokens)), dtype=np.float32) if what < 0.15 else None
            put_prompt(store, tokens, importance=scores, wait_s=30)
        elif what < 0.65:
            (reader if what < 0.4 else store).follow()
        elif what < 0.75:
            lease = store.lease(tokens)
            if lease.n_tokens:
                leases.append((store, tokens, lease))
        elif what < 0.9 and leases:
            read(*leases.pop(int(rng.integers(len(leases)))))
        elif what < 0.94:
            store.evict(int(rng.integers(1, 1 << 19)))
        elif what < 0.96:
            store.repack()
        elif what < 0.97:
            store.purge()
        elif what > 0.98:
            at = stores.index(store)
            leases = [held for held in leases if held[0] is not store]
            store.close()
            n_closed += 1
            stores[at] = open_store(small, **settings)
    while leases:
        read(*leases.pop())
    assert n_read
    for store in stores * 4:  # what one deletes orphans another's, and that is deleted in turn
        with suppress(impress.StoreFailed):  # what it hung from left meanwhile
            store.flush()
        look(*stores, reader)
    opened = open_store(small, mode="r", **APART)
    for tokens in made:
        assert reader.lookup(tokens) == opened.lookup(tokens)
        for store in (*stores, reader):
            assert_serves(store, tokens, store.lookup(tokens))
    assert [limbo(store) for store in stores] == [0, 0, 0]
    check(*stores)


def test_space_is_not_free_while_somebody_else_still_erases_it(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that follows other shards had taken the span: a purge ended before its erasing."""
    store = open_store(geometry, **APART)
    ready(store, prompt(256))
    begun, going_on, erase = threading.Event(), threading.Event(), SsdTier.erase

    def slowly(ssd: SsdTier, slot: Slot) -> None:
        begun.set()
        assert going_on.wait(60)
        erase(ssd, slot)

    lease = store.lease(prompt(256))
    assert store.purge() == (1, 1)
    monkeypatch.setattr(SsdTier, "erase", slowly)
    lease.release()  # the committer erases
    assert begun.wait(60)
    assert limbo(store) > 0
    going_on.set()
    store.flush()
    assert limbo(store) == 0 and store.stats()["tiers"]["ssd"]["used"] == 0
    store.check()


def test_an_index_that_cannot_be_opened_names_its_folder_once(tmp_path: Path) -> None:
    """Both the store and LMDB named it."""
    with pytest.raises(impress.StoreFailed) as told:
        Index(tmp_path / "index", create=False)
    assert str(told.value) == f"index: {tmp_path / 'index'}: No such file or directory"


@pytest.mark.parametrize("what", ["names", "saved_ledgers", "history_of"])
def test_an_index_that_is_replaced_as_it_is_asked_answers_still(
    pair: Pair, open_store: Open, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A purge or a rebuild replaces it: a look closed it meanwhile, and LMDB's error came out."""
    a, b = pair
    ready(a, prompt(256))
    look(b)
    span = next(iter(a.catalog.records())).span_id
    a.close()
    rebuild_store(a.path)
    asked = {"names": "names", "saved_ledgers": "ledgers", "history_of": "history"}[what]
    answer = [] if what == "saved_ledgers" else b.names()
    assert what != "names" or len(answer) == 1
    real = getattr(Index, asked)

    def replaced(index: Index, *args: Any) -> Any:
        if index._folder.parent.name == "main":
            elsewhere(b.follow)
        return real(index, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Index, asked, replaced)
        if what == "history_of":
            assert b._home.others.history(span) is None
        else:
            assert getattr(b, what)() == answer
    b.follow()
    check(b)
    assert_serves(b, prompt(256), 256)
