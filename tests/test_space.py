"""Whose space it is: after close, after a fork, while a write hangs, in however many parts."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import (
    MIB,
    assert_serves,
    elsewhere,
    everything_in,
    kv_of,
    prompt,
    put_prompt,
    said_by_a_child,
)
from test_isolation import rows_of

import impress
import impress.write.admission
import impress.write.batches
import impress.write.home
import impress.write.leaving
import impress.write.reclaim
from impress.read.session import Lease
from impress.spans.tables import read_header
from impress.upkeep.verify import verify_store
from impress.write.commit import Committer
from impress.write.index import Index
from impress.write.writer import Writer
from tiers.base import PAGE, Bytes, Slot
from tiers.iopool import IoPool, Lane
from tiers.slots import Buffer
from tiers.ssd import SsdTier

Open = Callable[..., impress.PrefixStore]
#: Nothing runs by itself, and every read goes to the disk.
QUIET = {"follow_every_s": 0, "repack_every_s": 0, "dram_bytes": 0, "io_threads": 4}


class Hang:
    """The next write to a segment, or each from here on, hangs until `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, all_of_them: bool = False) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        first, write = threading.Lock(), SsdTier.write

        def hanging(ssd: SsdTier, slot: Slot, off: int, data: Bytes) -> None:
            if all_of_them or first.acquire(blocking=False):
                self.begun.set()
                assert self.go.wait(60)
            write(ssd, slot, off, data)

        monkeypatch.setattr(SsdTier, "write", hanging)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write is soon given up, and home then soon tries again."""
    monkeypatch.setattr(impress.write.batches, "WRITE_TIMEOUT_S", 0.05)
    monkeypatch.setattr("impress.write.health.RETRY_S", 0.0)


def written(store: impress.PrefixStore, tokens: np.ndarray) -> Writer:
    """A writer that was given all of a prompt's KV."""
    writer = store.writer(tokens, wait_s=60)
    for layer, (k, v) in enumerate(zip(*kv_of(tokens, store.geometry), strict=True)):
        writer.put(layer, 0, k, v)
    return writer


def assert_all_comes_back(store: impress.PrefixStore) -> None:
    store.flush()
    store.check()
    store.evict(1 << 30)
    assert store.ssd.usage().used == 0


# ---- after close, after a fork -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["purge", "quarantine"])
def test_a_lease_that_ends_after_close_touches_nothing(
    open_store: Open, geometry: impress.Geometry, how: str
) -> None:
    """It zeroed the header and, after a purge, punched the rows: by then another's."""
    before, old, new = open_store(geometry, **QUIET), prompt(256, 1), prompt(256, 2)
    assert put_prompt(before, old).wait(60)
    lease = before.lease(old)
    if how == "purge":
        assert before.purge() == (1, 1)
    else:
        before._home.leaving.quarantine(lease.sources[0].held.record.span_id)
    before.close()
    after = open_store(geometry, **QUIET)
    assert put_prompt(after, new).wait(60)
    there = lease.sources[0].held.record.parts
    assert after.catalog.records()[0].parts == there, "not in its place"
    lease.release()
    assert_serves(after, new, 256)
    assert_all_comes_back(after)
    after.close()
    assert not verify_store(after.path).problems


@pytest.mark.parametrize("holder", ["lease", "writer"])
def test_what_was_purged_and_is_still_held_is_erased_by_close(
    open_store: Open, geometry: impress.Geometry, holder: str
) -> None:
    """Erasing was left to the holder, who may never let go: a rebuild found what was purged."""
    store, tokens = open_store(geometry, **QUIET), prompt(256, 3)
    assert put_prompt(store, tokens[:128]).wait(60)
    held = store.lease(tokens) if holder == "lease" else store.writer(tokens, start=128)
    assert store.purge() == (1, 1)
    mark = rows_of(tokens, geometry)
    assert mark in everything_in(store.path / "shards/main/segments")
    store.close()
    left = everything_in(store.path / "shards/main/segments")
    assert mark not in left and tokens[:64].tobytes() not in left
    if isinstance(held, Lease):
        with held.session() as session, pytest.raises(impress.PrefixLost):
            session.retrieve(0, None)
        held.release()


def test_a_forked_child_that_lets_go_of_a_lease_touches_nothing(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """The child erased rows that its parent was reading."""
    store, tokens = open_store(geometry, **QUIET), prompt(256, 4)
    assert put_prompt(store, tokens).wait(60)
    with store.lease(tokens) as lease:
        assert store.purge() == (1, 1)
        child = os.fork()
        if child == 0:
            try:
                lease.release()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        with lease.session() as session:
            k, _, _ = session.retrieve(0, None)
            assert np.array_equal(k.numpy(), kv_of(tokens, geometry)[0][0])
    store.flush()
    assert rows_of(tokens, geometry) not in everything_in(store.path / "shards/main/segments")
    store.check()


def test_a_forked_child_lets_go_whatever_locks_came_along_taken(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """A thread of the parent's had one of them as another forked: the child waited for ever."""
    store, tokens = open_store(geometry, **QUIET), prompt(256, 4)
    assert put_prompt(store, tokens).wait(60)
    writer = store.writer(tokens)  # all of it is stored
    with store.lease(tokens) as lease, lease.session() as session:
        session.prefetch()

        def leave() -> None:
            session.close()
            lease.release()
            writer.__exit__(None, None, None)

        for lock in (store.catalog.lock, store._leases._lock, store._pool._lock):
            with lock:
                assert said_by_a_child(leave, 10) == "returned"
        for layer in range(geometry.n_layers):
            session.retrieve(layer, None)
    writer.__exit__(None, None, None)
    store.check()


# ---- once it is another's ----------------------------------------------------------------------


def test_an_eviction_that_a_close_overtook_deletes_no_segment_of_the_next(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gave empty segments back at its very end, by outdated accounts: the next owner's rows
    went, and its index was all that was left of them."""
    one, trim = open_store(geometry, **QUIET), SsdTier.trim
    assert put_prompt(one, prompt(256, 1)).wait(60)
    opened: list[impress.PrefixStore] = []

    def late(ssd: SsdTier) -> int:
        if not opened:
            elsewhere(one.close)
            opened.append(open_store(geometry, shard=0, **QUIET))
            assert put_prompt(opened[0], prompt(256, 2)).wait(60)
        return trim(ssd)

    monkeypatch.setattr(SsdTier, "trim", late)
    one.evict(1 << 30)
    (two,) = opened
    assert_serves(two, prompt(256, 2), 256)
    two.close()
    assert_serves(open_store(geometry, shard=0, **QUIET), prompt(256, 2), 256)


def test_a_store_that_a_close_overtook_makes_no_segment_in_the_way_of_the_next(
    open_store: Open, geometry: impress.Geometry
) -> None:
    one = open_store(geometry, **QUIET)
    one.close()
    two = open_store(geometry, shard=0, **QUIET)
    assert one.ssd.reserve(2 * MIB) is None and one.ssd.trim() == 0
    for seed in range(4):  # each needs one more segment
        assert put_prompt(two, prompt(512, seed)).wait(60), seed
    two.check()


def test_an_open_that_fails_as_an_erasing_hangs_keeps_the_shard(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Close kept the lock, but the open let it go: the hung write was to land on the next one's."""
    a, b = open_store(geometry, **QUIET), open_store(geometry, **QUIET)
    assert put_prompt(a, prompt(512)[:256]).wait(60)
    b.follow()
    assert put_prompt(b, prompt(512), start=256).wait(60)
    b.close()
    a.evict(1 << 40)
    a.close()
    go, begun, write = threading.Event(), threading.Event(), SsdTier.write

    def hangs(ssd: SsdTier, slot: Slot, off: int, data: Bytes) -> None:
        begun.set()
        assert go.wait(60)
        write(ssd, slot, off, data)

    with monkeypatch.context() as patch:
        patch.setattr(SsdTier, "write", hangs)
        patch.setattr(impress.write.home, "COMMIT_TIMEOUT_S", 0.05)
        patch.setattr(impress.write.reclaim, "WRITE_TIMEOUT_S", 0.05)
        patch.setattr(impress.write.batches, "WRITE_TIMEOUT_S", 0.05)
        with pytest.raises(impress.StoreFailed):
            open_store(geometry, shard=1, **QUIET)
        assert begun.wait(60)
        with pytest.raises(impress.StoreLocked):
            open_store(geometry, shard=1, **QUIET)
    go.set()


@pytest.mark.usefixtures("impatient")
def test_an_open_that_fails_and_is_cut_off_as_it_closes_keeps_the_shard(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, and once more in the wait for the committer: the lock was let go while that ran, and
    its writes then landed on the next owner's rows."""
    open_store(geometry, **QUIET).close()

    def cut_off(*_args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(impress.store, "serve_metrics", cut_off)
        patch.setattr(Committer, "close", cut_off)
        with pytest.raises(KeyboardInterrupt):
            open_store(geometry, shard=0, **QUIET)
    with pytest.raises(impress.StoreLocked):
        open_store(geometry, shard=0, **QUIET)


def test_an_open_that_fails_and_closes_lets_the_shard_go(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_args: object) -> None:
        raise impress.StoreFailed("no port")

    with monkeypatch.context() as patch:
        patch.setattr(impress.store, "serve_metrics", fails)
        with pytest.raises(impress.StoreFailed, match="no port"):
            open_store(geometry, shard=0, **QUIET)
    open_store(geometry, shard=0, **QUIET)


def test_parameters_that_are_being_changed_keep_the_shard(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """A purge whose disk hung there wrote its accounts over the next owner's."""
    store = open_store(geometry, **{**QUIET, "read_timeout_s": 0.05})
    with store._reading.params._turn:
        store.close()
    with pytest.raises(impress.StoreLocked):
        open_store(geometry, shard=0, **QUIET)
    store._shard.unlock()
    open_store(geometry, shard=0, **QUIET)


# ---- while a write hangs -------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("keep", [True, False])
def test_a_write_that_hangs_never_lands_on_what_was_stored_since(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    """Its space was free as soon as its store was given up, and another's by the time it landed."""
    store, hang = open_store(geometry, **QUIET), Hang(monkeypatch)
    writer = written(store, prompt(256, 1))
    assert hang.begun.wait(60)
    writer.close(keep=keep)
    if keep:
        with pytest.raises(impress.StoreFailed, match="did not end"):
            store.flush()
    else:
        store.flush()
    assert writer.stored._end.is_set()
    monkeypatch.setattr(impress.write.batches, "WRITE_TIMEOUT_S", 60.0)  # the next write is to end
    assert put_prompt(store, prompt(256, 2)).wait(60)
    store.check()
    hang.go.set()
    assert store._pool.idle(60)
    assert_serves(store, prompt(256, 2), 256)
    assert_all_comes_back(store)


@pytest.mark.usefixtures("impatient")
def test_a_shard_stays_locked_while_a_write_to_it_hangs(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The next process to open it would store where that write is still to land."""
    store = open_store(geometry, **{**QUIET, "read_timeout_s": 0.05})
    hang = Hang(monkeypatch)
    stored = put_prompt(store, prompt(256, 1))
    store.close()
    with pytest.raises(impress.StoreFailed, match="did not end"):
        stored.wait(60)
    with pytest.raises(impress.StoreLocked, match="shard main is open for writing"):
        open_store(geometry, shard=0)
    assert "shard main stays locked until this process ends" in caplog.text
    hang.go.set()
    assert store._pool.close(60)
    store._shard.unlock()


@pytest.mark.usefixtures("impatient")
def test_a_close_waits_for_no_second_write_where_one_hangs(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It knew that a write hung, and went on to wipe what a lease had held, on its own thread: it
    never returned."""
    store = open_store(geometry, **{**QUIET, "read_timeout_s": 0.05})
    assert put_prompt(store, prompt(256, 1)).wait(60)
    lease = store.lease(prompt(256, 1))
    assert lease.n_tokens == 256 and store.purge() == (1, 1)
    hang = Hang(monkeypatch, all_of_them=True)
    stored = put_prompt(store, prompt(256, 2))
    closing = threading.Thread(target=store.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    with pytest.raises(impress.StoreFailed, match="did not end"):
        stored.wait(60)
    assert "shard main stays locked until this process ends" in caplog.text
    hang.go.set()
    assert store._pool.close(60)
    store._shard.unlock()

    def is_there() -> bool:
        rows = rows_of(prompt(256, 1), geometry)
        return any(rows in path.read_bytes() for path in store.path.rglob("*.seg"))

    assert is_there()
    with open_store(geometry, shard=0, **QUIET) as again:
        assert again.lookup(prompt(256, 1)) == 0 and not is_there()
        again.check()


def test_a_full_disk_has_no_say_in_who_holds_a_shard(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process's number was to be written where there had been room for it before it was cut
    off: the store could not be opened, not even to evict."""
    open_store(geometry, **QUIET, shard=1).close()

    def fails(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fails)
        store = open_store(geometry, **QUIET, shard=1)
    with pytest.raises(impress.StoreLocked):
        open_store(geometry, **QUIET, shard=1)
    assert put_prompt(store, prompt(64, 1)).wait(60)


def test_a_shard_that_could_not_be_opened_is_not_locked_after_it(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk this process kept the lock: "open for writing by process unknown"."""
    path = open_store(geometry, **QUIET).path
    open_store(geometry, **QUIET, shard=1).close()

    def fails(*args: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (path / "shards/1/index.gone").mkdir()  # left by a purge that was cut off
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fails)
        with pytest.raises(impress.StoreFailed, match="No space left on device"):
            open_store(geometry, **QUIET, shard=1)
    open_store(geometry, **QUIET, shard=1)


def test_a_commit_that_is_cut_short_is_told_to_be_of_a_full_disk_perhaps(tmp_path: Path) -> None:
    """XFS takes the beginning of what does not fit, and LMDB calls that an I/O error: a purge on a
    full disk seemed to be on a failing one. A file-size limit cuts off a write in the same way."""
    index = Index(tmp_path / "index", create=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = (tmp_path / "index" / "data.mdb").stat().st_size + 6 * PAGE + 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        with pytest.raises(impress.StoreFailed, match="which may be a full disk"):
            index.commit({1: bytes(64 * PAGE)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        index.close()


def test_a_hanging_read_does_not_keep_the_shard_locked(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store, go = open_store(geometry, **{**QUIET, "read_timeout_s": 0.05}), threading.Event()
    assert put_prompt(store, prompt(256, 1)).wait(60)
    store._pool.submit(Lane.DEMAND, [partial(go.wait, 60)])
    store.close()
    assert_serves(open_store(geometry, shard=0), prompt(256, 1), 256)
    go.set()


def test_rows_put_after_a_close_wait_for_nothing(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Nobody ran their write, and nobody was told: it counted as under way for good, its buffer was
    never given back, and once these had run out the next put waited for one for half a minute."""
    store = open_store(geometry, **QUIET)
    tokens = prompt(256, 1)
    keys, values = kv_of(tokens, geometry)
    writer = store.writer(tokens)
    writer.put(0, 0, keys[0], values[0])
    store.close()
    draft, left = writer.draft, list[int]()
    with pytest.raises(impress.StoreFailed, match="the store is closed"), writer:
        writer.put(1, 0, keys[1], values[1])
        left.append(store.write_buffers.used_bytes)
    assert draft is not None and not draft.writing and left == [0]


def test_rows_put_while_their_writer_is_given_up_are_not_written(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers come from several threads: one that waited for a slot wrote when all was over."""
    store, tokens = open_store(geometry, **QUIET), prompt(256, 1)
    writer = store.writer(tokens)
    keys, values = kv_of(tokens, geometry)
    acquire, waits, go = writer._acquire, threading.Event(), threading.Event()

    def late(n_bytes: int) -> object:
        buffer = acquire(n_bytes)
        waits.set()
        assert go.wait(60)
        return buffer

    monkeypatch.setattr(writer, "_acquire", late)
    other = threading.Thread(target=writer.put, args=(0, 0, keys[0], values[0]))
    other.start()
    assert waits.wait(60)
    writer.close(keep=False)
    store.flush()
    assert put_prompt(store, prompt(256, 2)).wait(60)
    go.set()
    other.join(60)
    assert store._pool.idle(60)
    assert_serves(store, prompt(256, 2), 256)
    assert_all_comes_back(store)


@pytest.mark.parametrize(
    "error", [impress.StoreFailed("no commit within 150 s"), KeyboardInterrupt()]
)
def test_what_was_reserved_is_given_back_whatever_the_wait_for_the_rest_ends_in(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:  # fmt: skip
    """Only a medium's error was handled: the rows' space was nobody's until the next open."""
    store = open_store(geometry, **QUIET, daily_write_bytes=4 * MIB)
    left, reserve = store.stats()["writes_left_bytes"], store._home.leaving.reserve

    def interrupted(n_bytes: int, *more: int) -> Slot | None:
        if more[1:]:  # the header's, after the rows'
            raise error
        return reserve(n_bytes, *more)

    monkeypatch.setattr(store._home.leaving, "reserve", interrupted)
    if isinstance(error, impress.StoreFailed):
        assert store.writer(prompt(256, 1)).stored.refused == "read-only: no commit within 150 s"
    else:
        with pytest.raises(KeyboardInterrupt):
            store.writer(prompt(256, 1))
    assert store.ssd.usage().used == 0 and store.stats()["writes_left_bytes"] == left
    store.check()


def test_a_refused_store_gives_its_space_back_where_there_is_no_memory_to_wipe_its_header(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its space was nobody's until the next open, as was that of spans to be buried with it."""
    store = open_store(geometry, **QUIET)

    def short(*_args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(SsdTier, "write", short)
        with store.writer(prompt(256, 1)) as writer:
            pass
        assert not writer.stored.wait(60)
        store.flush()
    assert store.ssd.usage().used == 0
    store.check()


def test_the_rest_of_a_window_put_while_its_writer_closes_gives_its_buffer_back(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The closed writer kept it for good, and `close` met a dictionary that changed under it."""
    store, tokens = open_store(geometry, **QUIET), prompt(256, 1)
    writer = store.writer(tokens)
    keys, values = kv_of(tokens[:64], geometry)
    for layer in (0, 1):
        writer.put(layer, 0, keys[layer][:, :5], values[layer][:, :5])
    pool, acquire = store.write_buffers, store.write_buffers.acquire
    waits, go = threading.Event(), threading.Event()

    def late(*asked: Any) -> Buffer | None:
        buffer = acquire(*asked)
        waits.set()
        assert go.wait(60)
        return buffer

    monkeypatch.setattr(pool, "acquire", late)
    other = threading.Thread(target=writer.put, args=(1, 5, keys[1][:, 5:], values[1][:, 5:]))
    other.start()
    assert waits.wait(60) and pool.used_bytes
    writer.close(keep=False)
    go.set()
    other.join(60)
    assert not other.is_alive() and store._pool.idle(60) and not pool.used_bytes
    assert_all_comes_back(store)


def test_layers_put_first_at_once_keep_their_importance(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each put made the array of all layers' scores, and the one that was made first was lost."""
    store, tokens, full = open_store(geometry, **QUIET), prompt(256, 1), np.full
    keys, values = kv_of(tokens, geometry)
    scores = np.random.default_rng(0).random((geometry.n_layers, 256), dtype=np.float32)
    writer = store.writer(tokens)

    def put(layer: int) -> None:
        writer.put(layer, 0, keys[layer], values[layer], scores[layer])

    def meanwhile(*args: Any, **named: Any) -> Any:
        monkeypatch.setattr(np, "full", full)
        other = threading.Thread(target=put, args=(1,))
        other.start()
        other.join(60)
        return full(*args, **named)

    with writer:
        monkeypatch.setattr(np, "full", meanwhile)
        put(0)
        assert np.full is full
    assert writer.stored.wait(60)
    (record,) = store.catalog.records()
    importance = read_header(store.ssd, record).importance
    assert importance is not None and np.isfinite(importance).all()
    assert np.allclose(importance, scores, atol=0.01)


def test_a_write_that_fails_for_whatever_reason_is_told(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a disk's errors were told: rows that there was no memory for were READY, unwritten."""
    store, write = open_store(geometry, **QUIET), SsdTier.write

    def failing(ssd: SsdTier, slot: Slot, off: int, data: Bytes) -> None:
        monkeypatch.setattr(SsdTier, "write", write)
        raise MemoryError

    monkeypatch.setattr(SsdTier, "write", failing)
    stored = put_prompt(store, prompt(256, 1))
    with pytest.raises(impress.StoreFailed, match="MemoryError"):
        store.flush()
    assert not stored.ready and store.lookup(prompt(256, 1)) == 0
    assert_all_comes_back(store)


def test_a_put_that_is_interrupted_holds_up_no_other_store(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C in the wait for the pool's lock, a write was counted that nobody ran, and every
    store, purge and flush waited two minutes for it."""
    store, queue = open_store(geometry, **QUIET), IoPool._queue

    def interrupted(pool: IoPool, lane: Lane, *rest: Any) -> None:
        if lane is Lane.STORE:
            raise KeyboardInterrupt
        queue(pool, lane, *rest)

    monkeypatch.setattr(IoPool, "_queue", interrupted)
    with pytest.raises(KeyboardInterrupt):
        put_prompt(store, prompt(256, 1))
    monkeypatch.undo()
    assert not store._admission.writing
    assert put_prompt(store, prompt(256, 2)).wait(60)
    store.flush()
    assert not store._admission.drafts()
    assert_all_comes_back(store)


# ---- in however many parts -----------------------------------------------------------------------


def test_a_store_on_a_fragmented_disk_is_ready_in_hundreds_of_parts(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header was sized for 64 parts: the commit broke off, and its waiters waited on."""
    monkeypatch.setattr(impress.write.leaving, "SMALL_PART", PAGE)  # otherwise it takes 40 MiB
    store, tokens = open_store(geometry, **QUIET, disk_bytes=8 * MIB), prompt(640, 1)
    pages = [store.ssd.reserve(PAGE) for _ in range(8 * MIB // PAGE)]
    free = [*range(0, 1400, 2), *range(1800, len(pages))]
    for at in free:
        store.ssd.free(pages[at])
    importance = np.random.default_rng(1).random((geometry.n_layers, 640), dtype=np.float32)
    stored = put_prompt(store, tokens, importance=importance, wait_s=60)
    store.flush()
    assert stored.ready
    (record,) = store.catalog.records()
    assert len(record.parts) > 600
    assert_serves(store, tokens, 640)
    for at in set(range(len(pages))) - set(free):
        store.ssd.free(pages[at])
    store.close()
    again = open_store(geometry, **QUIET)
    assert_serves(again, tokens, 640)
    assert_all_comes_back(again)


def test_a_header_that_outgrows_its_place_fails_its_own_store_only(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stores committed with it were abandoned: their waiters hung, their space was gone."""
    store, hang = open_store(geometry, **QUIET), Hang(monkeypatch)
    first = put_prompt(store, prompt(128, 1))  # the others wait behind it, for one commit
    with monkeypatch.context() as patch:
        patch.setattr(impress.write.admission, "meta_bytes", lambda *_: PAGE)
        bad = put_prompt(store, prompt(128, 2))
    good = put_prompt(store, prompt(128, 3))
    hang.go.set()
    with pytest.raises(impress.StoreFailed, match="header"):
        store.flush()
    assert first.ready and good.ready and isinstance(bad.error, impress.StoreFailed)
    assert_all_comes_back(store)


def test_a_prompt_whose_header_no_segment_holds_is_refused_by_the_setting(open_store: Open) -> None:
    """The reason given was a full disk, and all else had been evicted for its rows."""
    deep = impress.Geometry(1024, 1, 1, 1, "float16")  # a MiB of header for every 200 tokens
    store = open_store(deep, disk_bytes=40 * MIB)
    for seed in range(2):
        assert put_prompt(store, prompt(64, seed), wait_s=30).wait(60)
    with store.writer(prompt(256, 9)) as writer:
        pass
    assert re.fullmatch(
        r"segments too small: a header of \d+ bytes must fit in one; raise segment_bytes",
        writer.stored.refused,
    )
    assert store.stats()["refused"] == {"segments_too_small": 1}
    assert store.lookup(prompt(64, 0)) == store.lookup(prompt(64, 1)) == 64
    store.check()
    store.close()
    store = open_store(deep, segment_bytes=4 * MIB, disk_bytes=80 * MIB)
    assert put_prompt(store, prompt(256, 9), wait_s=30).wait(60)


@pytest.mark.parametrize("segments", [(1, 4), (4, 1)], ids=["raised", "lowered"])
def test_a_long_prompt_empties_no_home_whose_segments_are_of_another_size(
    open_store: Open, segments: tuple[int, int]
) -> None:
    """A full home has no room for one of the size that the refusal advises: everything was evicted
    for the header, and the disk was blamed. A lowered setting finds larger ones."""
    deep, before = impress.Geometry(1024, 1, 1, 1, "float16"), segments[0] * MIB
    store = open_store(deep, disk_bytes=96 * MIB, segment_bytes=before, disk_high=1.0)
    for seed in range(200):
        if not put_prompt(store, prompt(64, seed), wait_s=30).wait(60):
            break
        if store.stats()["evicted_spans"]:
            break
    store.flush()
    there = [seed for seed in range(200) if store.lookup(prompt(64, seed))]
    assert len(there) > 6
    store.close()
    after = segments[1] * MIB
    store = open_store(deep, disk_bytes=96 * MIB, segment_bytes=after, disk_high=1.0)
    stored = put_prompt(store, prompt(256, 999), wait_s=30)
    left = [seed for seed in there if store.lookup(prompt(64, seed))]
    if stored.wait(60):
        assert segments == (4, 1) and left
    else:
        assert segments == (1, 4) and left == there
        assert "raise segment_bytes, or, where that was done, disk_bytes" in stored.refused
    store.check()


def test_a_prompt_too_long_with_what_it_hangs_from_evicts_nothing(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Each turn of a chat longer than home evicted everybody else's prompts, and was refused."""
    store = open_store(geometry, disk_bytes=8 * MIB, disk_high=1.0, **QUIET)
    first = prompt(1280, 1)  # 4 KiB a token
    assert put_prompt(store, first, wait_s=30).wait(60)
    for seed in range(2, 5):
        assert put_prompt(store, prompt(128, seed), wait_s=30).wait(60)
    longer = np.concatenate([first, prompt(1024, 9)])
    stored = put_prompt(store, longer, wait_s=30)
    assert not stored.wait(60) and stored.refused.startswith("disk full")
    assert store.stats()["evicted_spans"] == 0 and not store.stats()["ssd_read_only"]
    assert [store.lookup(prompt(128, seed)) for seed in range(2, 5)] == [128] * 3
    assert store.lookup(longer) == len(first)
    store.check()


def test_numbers_of_segments_that_were_given_back_are_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only numbers above the highest one were given out: after 2^20 segments, most of them given
    back, a store could not grow any more, and said that the file system was full."""
    monkeypatch.setattr("tiers.segments.SEGMENTS", 4)
    tier = SsdTier(tmp_path / "segments", MIB, 3 * MIB)
    kept = tier.reserve(MIB)
    for _ in range(9):
        assert kept is not None
        before, kept = kept, tier.reserve(MIB)
        tier.free(before)
        assert tier.trim() == MIB
    assert kept is not None and not tier.no_room and len([*tier.folder.iterdir()]) == 1
    tier.check()
    tier.close()
