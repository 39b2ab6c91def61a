"""Ctrl-C, and whatever else a signal raises, in the middle of a request: nothing stays taken.

The moment at which it comes is chosen here by having one call raise.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MIB, SMALL, assert_serves, kv_of, prompt, put_prompt, wait_for_promotions

import impress
import impress.write.index
from impress.cache.chunks import ChunkCache
from impress.engines.hf_prefix import find_prefix
from impress.policy import Exact, Policy, Random
from impress.read import load as loads
from impress.read.begun import Begun
from impress.read.climb import Climbs
from impress.read.early import Early
from impress.read.load import Load
from impress.read.reading import Reading
from impress.read.session import Session
from impress.read.tickets import nothing
from impress.tree.catalog import Catalog
from impress.tree.leases import Leases
from impress.write import env
from impress.write.admission import Admission
from impress.write.commit import Committer
from impress.write.directory import Shard
from impress.write.draft import Draft
from impress.write.home import Home
from impress.write.index import Index
from impress.write.leaving import Leaving
from impress.write.writer import Writer
from tiers import files
from tiers.base import PAGE, Slot
from tiers.dram import DramTier
from tiers.errors import Cancelled, ReadFailed
from tiers.iopool import IoPool, Lane
from tiers.slots import Buffer, BufferPool, aligned
from tiers.ssd import SsdTier
from tiers.ticket import Ticket

Open = Callable[..., impress.PrefixStore]
TOKENS = prompt(256, 1)


@pytest.fixture
def store(open_store: Open, geometry: impress.Geometry) -> impress.PrefixStore:
    """Half of the prompt is in memory, half on the disk alone."""
    store = open_store(geometry, dram_bytes=MIB, read_timeout_s=5, repack_every_s=0)
    assert put_prompt(store, TOKENS, wait_s=60).wait(60)
    assert_serves(store, TOKENS, 256)
    wait_for_promotions(store)
    return store


def taken(store: impress.PrefixStore) -> tuple[int, int, int]:
    """Bytes of buffers, pins of copies, bytes that wait to climb."""
    assert store._pool.idle(60)
    pins = sum(int(cache._pins.sum()) for cache in store._copies.chunks)
    return store.buffers.used_bytes, pins, store._reading.waiting._held


def once(
    real: Callable[..., Any], n: int = 0, armed: Callable[[], bool] = lambda: True
) -> Callable[..., Any]:
    """`real`, except that call n while it is armed is interrupted before it does anything."""
    calls: list[int] = []

    def interrupted(*args: Any, **named: Any) -> Any:
        if armed():
            calls.append(1)
            if len(calls) == n + 1:
                raise KeyboardInterrupt
        return real(*args, **named)

    return interrupted


def test_what_waits_for_a_session_to_end_goes_on_though_the_end_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gate that copies up wait at was replaced first, and then nobody opened it: the buffers
    held for them stayed held until the store was closed, and nothing more was copied."""
    climbs, gone_on = Climbs(), list[int]()
    climbs._gate.then(lambda: gone_on.append(1))
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(Ticket, "run", once(Ticket.run))
        climbs.begin()
    climbs.begin()
    assert gone_on == [1]


def test_a_copy_from_the_callers_memory_is_known_as_soon_as_it_is_queued(
    store: impress.PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noted only once it was queued, it was unknown to a close after Ctrl-C: that said that nothing
    touched that memory, and virtual buffers took the copy's pages away. The process ended."""
    store._copies.clear()
    submit, queued = IoPool.submit, list[Ticket]()

    def interrupted(pool: IoPool, lane: Lane, *args: Any, **named: Any) -> Ticket:
        ticket = submit(pool, lane, *args, **named)
        if lane is Lane.PROMOTE:
            queued.append(ticket)
            raise KeyboardInterrupt
        return ticket

    g = store.geometry
    outs = [
        tuple(torch.empty(g.n_kv_heads, 256, g.head_dim, dtype=torch.float32) for _ in "kv")
        for _ in range(g.n_layers)
    ]
    with store.lease(TOKENS) as lease:
        session = lease.session()
        session.prefetch(outs)
        with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
            patched.setattr(IoPool, "submit", interrupted)
            session.retrieve(0, None)
        assert queued and set(queued) <= set(session._climbs.leaving)
        assert session.close() and all(ticket.done for ticket in queued)


@pytest.mark.parametrize("freed", [False, True])
def test_copies_that_were_dropped_while_they_were_read_are_freed_though_it_is_cut_off(
    freed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their room was lost: nobody had the copies, and nobody could have the room."""
    cache = ChunkCache(4 * 2 * PAGE, {0: PAGE, 1: PAGE}, 1)
    windows = np.arange(4)
    cache.publish(cache.admit(7, 4, 0, windows)[1])
    ids = cache.pin(7, 0, 0, 4)
    cache.drop_span(7)
    free = cache.tier.free

    def interrupted(slot: Slot) -> None:
        if freed:
            free(slot)
        patched.undo()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(cache.tier, "free", interrupted)
        cache.unpin(ids)
    cache.unpin(ids)
    cache.check()
    assert cache.tier.usage().used == 0
    assert len(cache.admit(8, 4, 0, windows)[1]) == 4


@pytest.mark.parametrize("way", ["take_back", "lend"])
def test_a_buffer_that_comes_back_as_it_is_cut_off_is_not_counted_for_ever(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That much of the write buffers was gone until the store was closed."""
    pool = BufferPool(4 * PAGE)
    buffer = pool.acquire(PAGE)
    assert buffer is not None
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(BufferPool, way, once(getattr(BufferPool, way)))
        buffer.release() if way == "take_back" else buffer.lent()
    del buffer
    assert pool.used_bytes == 0
    assert pool.acquire(4 * PAGE) is not None


@pytest.mark.parametrize("policy", [Exact(), Random(0.3)], ids=lambda policy: policy.name)
@pytest.mark.parametrize(
    ("where", "what", "n"),
    [
        *[(IoPool, "_queue", n) for n in range(2)],  # of reads: later ones are for what climbs
        *[(loads, what, n) for what in ("rows_by_tier", "plan_reads") for n in range(2)],
        *[(loads.Load, "_unpin", n) for n in range(2)],
        *[(loads.Load, what, n) for what in ("brought", "_tensor") for n in range(3)],
    ],
    ids=lambda of: getattr(of, "__name__", str(of)),
)
def test_an_interrupted_request_leaves_nothing_taken(
    store: impress.PrefixStore, where: Any, what: str, n: int, policy: Policy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A read that was noted and never queued was waited for without end; an interrupt between the
    end of a read and its session's note of it left buffers and pins taken for good."""
    store._copies.clear()
    before = taken(store)
    with store.lease(TOKENS) as lease:
        with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
            with lease.session(policy) as session:
                patched.setattr(where, what, once(getattr(where, what), n))
                session.prefetch()
                for layer in range(store.geometry.n_layers):
                    session.retrieve(layer, None)
    assert taken(store) == before
    assert_serves(store, TOKENS, 256)


@pytest.mark.parametrize(
    ("where", "what", "n", "policy"),
    [
        *[(IoPool, "_queue", n, Exact()) for n in range(2)],  # of what climbs
        *[(loads.Load, "give_back", n, Exact()) for n in range(2)],  # chosen rows went back earlier
        *[(Session, "_hand_over", 0, policy) for policy in (Exact(), Random(0.3))],
    ],
    ids=lambda of: getattr(of, "__name__", getattr(of, "name", str(of))),
)
def test_an_interrupted_close_leaves_nothing_taken(
    store: impress.PrefixStore, where: Any, what: str, n: int, policy: Policy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Nobody closes a session twice: what it had not given back by then never was, and nothing
    queued after it climbed."""
    store._copies.clear()
    before = taken(store)
    closing: list[int] = []
    with store.lease(TOKENS) as lease, pytest.raises(KeyboardInterrupt):
        with monkeypatch.context() as patched:
            real = getattr(where, what)
            patched.setattr(where, what, once(real, n, lambda: bool(closing)))
            with lease.session(policy) as session:
                for layer in range(store.geometry.n_layers):
                    session.retrieve(layer, None)
                closing.append(1)
    assert taken(store) == before
    assert_serves(store, TOKENS, 256)


@pytest.mark.parametrize("what", ["abandon", "_unpin", "__init__"])
def test_layers_that_were_begun_and_not_taken_are_given_up_though_it_is_cut_off(
    store: impress.PrefixStore, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer being given up was no longer in any list, and one just begun was not yet in any: its
    copies in memory stayed pinned until a restart."""
    before, real = taken(store), getattr(loads.Load, what)

    def behind(*args: Any, **named: Any) -> None:
        real(*args, **named)
        raise KeyboardInterrupt

    with store.lease(TOKENS) as lease, pytest.raises(KeyboardInterrupt):
        with monkeypatch.context() as patched, lease.session() as session:
            if what == "__init__":
                patched.setattr(loads.Load, what, behind)
            session.prefetch()
            assert store._pool.idle(60)  # else the thread that ends them unpins
            patched.setattr(loads.Load, what, once(real))
    assert taken(store) == before
    assert_serves(store, TOKENS, 256)


def test_an_interrupted_close_of_an_engines_prefix_releases_its_leases(
    store: impress.PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off in a wait for reads: what they pinned could not be evicted until their time limit."""
    prefix, _ = find_prefix(store, [np.append(TOKENS, 1).astype(np.int32)] * 2)
    assert prefix is not None
    prefix.open(Exact())
    monkeypatch.setattr(Session, "close", once(Session.close))
    with pytest.raises(KeyboardInterrupt):
        prefix.close()
    assert (store.stats()["leases"], store.stats()["pinned_spans"]) == (0, 0)
    assert prefix.close()


def test_whatever_was_to_follow_a_ticket_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt in the first of several callbacks left out the others; one in the queueing of
    tasks that waited for a ticket left them neither run nor cancelled."""
    pool, gate = IoPool(1), Ticket(1)
    late = [pool.submit(Lane.PROMOTE, [nothing], gate) for _ in range(3)]
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(pool, "_lock", Struck(pool._lock))
        gate.run(nothing)
    with pytest.raises(Cancelled):
        late[0].wait(60)
    assert all(ticket.wait(60) for ticket in late[1:]) and pool.close(60)


@pytest.mark.parametrize("done", [False, True], ids=["later", "at once"])
def test_what_follows_a_ticket_is_called_again_where_a_signal_cut_it_off(done: bool) -> None:
    """Cut off at its first step it has done nothing yet, and nobody else calls it."""
    calls: list[int] = []

    def cut_off() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt

    ticket, others = Ticket(0 if done else 1), list[int]()
    with pytest.raises(KeyboardInterrupt):
        ticket.then(cut_off)
        ticket.then(lambda: others.append(1))
        ticket.run(nothing)
    assert len(calls) == 2 and len(others) == (not done)


class Struck:
    """A lock at which a signal comes when it is taken for the first time."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._comes = True

    def __enter__(self) -> bool:
        if self._comes and threading.current_thread() is threading.main_thread():
            self._comes = False
            raise KeyboardInterrupt
        return bool(self._lock.__enter__())

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)


def test_a_signal_behind_the_taking_of_a_lock_does_not_leave_it_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Condition.__enter__ is Python code: an error raised in it by a signal, with the lock just
    taken, left all I/O threads waiting in Buffer.release, and the store a miss until a restart."""

    def struck(condition: threading.Condition) -> bool:
        condition.acquire()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        pool, threads = BufferPool(1 << 20), IoPool(2)
        patched.setattr(threading.Condition, "__enter__", struck)
        for _ in range(2):
            buffer = pool.acquire(PAGE)
            assert buffer is not None
            buffer.retain()
            buffer.release()
            array = buffer.lent()
            del buffer, array
            assert threads.submit(Lane.DEMAND, [lambda: None]).wait(60)
            threads.run_here(Lane.DEMAND, [])
            threads.depth()
    assert threads.idle(60) and threads.close(60)
    assert pool.acquire(1 << 20) is not None


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "incomplete"])
@pytest.mark.parametrize(
    ("where", "what", "behind"),
    [
        (Writer, "_end", False),
        (Admission, "_finish", False),
        *[(Committer, "queue", behind) for behind in (False, True)],
        (Admission, "_finish", True),
    ],
    ids=lambda of: getattr(of, "__name__", str(of)),
)
def test_an_interrupted_end_of_a_store_ends_it(
    store: impress.PrefixStore, where: Any, what: str, behind: bool, whole: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Nobody closes a writer twice: its space and the spans it hangs from stayed taken until a
    restart, and whoever waited for the store waited for ever."""
    tokens, layers = np.concatenate([TOKENS, prompt(256, 2)]), store.geometry.n_layers
    keys, values = kv_of(tokens, store.geometry, 256)
    real, comes = getattr(where, what), [1]

    def interrupted(*args: Any) -> None:
        if behind or not comes:
            real(*args)
        if comes:
            comes.pop()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(where, what, interrupted)
        with store.writer(tokens, start=256) as writer:
            for layer in range(layers if whole else 1):
                writer.put(layer, 256, keys[layer], values[layer])
    assert writer.stored.wait(60) == whole
    store.flush()
    store.check()
    assert_serves(store, tokens, 512 if whole else 256)
    store.evict(1 << 30)
    assert store.ssd.usage().used == 0


def test_an_interrupted_end_of_a_store_that_adds_nothing_lets_go_of_what_it_found(
    store: impress.PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(Admission, "_finish", once(Admission._finish))
        with store.writer(TOKENS) as writer:
            pass
    assert writer.stored.wait(60)
    store.evict(1 << 30)
    assert store.ssd.usage().used == 0


@pytest.mark.parametrize(
    ("where", "what"), [(Writer, "_pack"), (Draft, "write"), (Buffer, "release")]
)
def test_an_interrupted_put_leaves_no_slot_taken(
    store: impress.PrefixStore, where: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each left up to 4 MiB taken for good, until every store was refused: no free write slot."""
    tokens = prompt(256, 2)
    keys, values = kv_of(tokens, store.geometry)
    with pytest.raises(KeyboardInterrupt), store.writer(tokens) as writer:
        with monkeypatch.context() as patched:
            patched.setattr(where, what, once(getattr(where, what)))
            if what == "release":  # while giving back what another exception left
                patched.setattr(Writer, "_pack", once(Writer._pack))
            writer.put(0, 0, keys[0], values[0])
    assert store._pool.idle(60)
    store.flush()
    slots = store.write_buffers
    assert slots.acquire(slots.budget_bytes or 0) is not None


class StruckBehind:
    """A lock with a signal after its release number `n` in the main thread, counted from 0."""

    def __init__(self, lock: Any, n: int = 0) -> None:
        self._lock = lock
        self._left = n

    def __enter__(self) -> bool:
        return bool(self._lock.__enter__())

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)
        if threading.current_thread() is threading.main_thread():
            self._left -= 1
            if self._left == -1:
                raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def test_an_interrupt_as_a_write_is_counted_does_not_hold_up_the_committer(
    store: impress.PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write was counted and never sent: the committer waited two minutes for its end, and every
    store with it."""
    tokens = prompt(256, 2)
    keys, values = kv_of(tokens, store.geometry)
    with pytest.raises(KeyboardInterrupt), store.writer(tokens) as writer:
        assert writer.draft is not None
        monkeypatch.setattr(writer.draft, "_lock", StruckBehind(writer.draft._lock))
        writer.put(0, 0, keys[0], values[0])
    assert not writer.stored.wait(60) and writer.stored.refused == "abandoned"
    store.flush(30)
    store.check()


def test_a_purge_that_is_interrupted_as_it_begins_refuses_no_later_store(
    store: impress.PrefixStore,
) -> None:
    """All stores of its prompts were refused until a restart: a purge was said to be at work."""
    purging = store._home.leaving.purging = InterruptedList()
    with pytest.raises(KeyboardInterrupt):
        store.purge()
    assert not purging
    assert put_prompt(store, prompt(128, 2), wait_s=60).wait(60)


def test_a_purge_of_a_tree_that_an_interrupt_tore_ends(store: impress.PrefixStore) -> None:
    """A span that had left the tree and was still counted in it was looked for without end."""
    put_prompt(store, prompt(128, 2), wait_s=60).wait(60)
    tree = store.catalog._tree
    tree.remove(int(tree.leaves()[0]))  # the interrupt came right after this
    with pytest.raises(impress.StoreFailed, match="the tree is torn: open the store again"):
        store.purge()


class InterruptedList(list[Any]):
    """A list with a signal after each append."""

    def append(self, one: Any) -> None:
        super().append(one)
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("where", "what"),
    [(Committer, "delete_now"), (Committer, "queue"), (Catalog, "retired_records"),
     (Leaving, "_delete_soon")],
    ids=lambda of: getattr(of, "__name__", str(of)),
)  # fmt: skip
def test_what_an_interrupted_eviction_took_out_goes_with_the_next(
    store: impress.PrefixStore, where: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The span was in no tree, and nobody told the committer: it kept its space until a restart."""
    (record,) = store.catalog.records()
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(where, what, once(getattr(where, what)))
        if what == "_delete_soon":
            store._home.leaving.quarantine(record.span_id)
        store.evict(1 << 30)
    assert store.lookup(TOKENS) == 0
    assert store.evict(1) == record.owned_bytes
    assert store.ssd.usage().used == 0 and not [*store.index.spans()]
    store.check()


def test_room_that_an_eviction_made_is_taken_without_another_wait(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an eviction it asked again how much was missing, under a lock that may be held for
    seconds: Ctrl-C there lost the space it already had, until a restart."""
    store = open_store(geometry, dram_bytes=0, disk_bytes=4 * MIB, disk_high=1.0, disk_low=1.0)
    seeds = iter(range(100))
    while not store.stats()["evicted_spans"]:
        assert put_prompt(store, prompt(256, next(seeds)), wait_s=60).wait(60)
    before, real = store.stats()["evicted_spans"], SsdTier.missing

    def missing(*args: Any) -> int:
        if store.counters["evicted_spans"] > before:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(SsdTier, "missing", missing)
        while store.counters["evicted_spans"] == before:
            assert put_prompt(store, prompt(256, next(seeds)), wait_s=60).wait(60)
    store.check()


def test_an_open_that_is_interrupted_lets_go_of_its_shard(
    geometry: impress.Geometry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard stayed locked by nobody: the next open in this process began an empty shard beside
    it, and no other process could write to it before this one ended."""
    config = impress.Config(**SMALL, shard=0)
    impress.PrefixStore.open(tmp_path / "s", geometry, "test", config).close()
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(files, "_still_there", once(files._still_there))
        Shard(tmp_path / "s").lock()
    impress.PrefixStore.open(tmp_path / "s", geometry, "test", config).close()


@pytest.mark.parametrize(
    ("where", "what", "n"),
    [
        (Catalog, "_record", 1),  # the first of two spans is pinned
        (Catalog, "hold", 0),
        (Catalog, "release", 0),  # of what is not served, then of the lease
        (Catalog, "release", 1),
        (Leases, "add", 0),
    ],
    ids=str,
)
def test_an_interrupted_lease_pins_nothing(
    store: impress.PrefixStore, where: Any, what: str, n: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What it had pinned could not be evicted, nor erased by a purge, until a restart."""
    tokens = np.concatenate([TOKENS, prompt(256, 2)])
    assert put_prompt(store, tokens, wait_s=60).wait(60)
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(where, what, once(getattr(where, what), n))
        with store.lease(tokens):
            pass
    stats = store.stats()
    assert (stats["leases"], stats["pinned_spans"]) == (0, 0)
    assert_serves(store, tokens, 512)
    store.evict(1 << 30)
    assert store.ssd.usage().used == 0


@pytest.mark.parametrize("n", range(4))
def test_an_interrupt_behind_any_step_of_a_lease_pins_nothing(
    store: impress.PrefixStore, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal comes after the release of a lock: what is done under the lock is done by then."""
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(store.catalog, "lock", StruckBehind(store.catalog.lock, n))
        with store.lease(TOKENS):
            pass
        with store.writer(TOKENS[:64]):  # adds nothing, and pins what it found
            pass
    assert store.stats()["pinned_spans"] == 0
    store.check()


def test_an_interrupt_as_a_buffer_is_rented_leaves_the_budget_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was counted before anybody had it: so much of write buffers was gone until a restart."""
    pool = BufferPool(MIB)
    for where, what in ((BufferPool, "_trim"), (Buffer, "__init__")):
        with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
            patched.setattr(where, what, once(getattr(where, what)))
            pool.acquire(MIB)
        whole = pool.acquire(MIB)
        assert whole is not None
        whole.release()
    assert pool.used_bytes == 0


def test_an_interrupt_behind_what_may_wait_to_climb_holds_none_of_it_back(
    store: impress.PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request's bytes stayed counted; once 256 MiB were, nothing climbed until a restart."""
    store._copies.clear()
    before, waiting = taken(store), store._reading.waiting
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(waiting, "_lock", StruckBehind(waiting._lock))
        with store.lease(TOKENS) as lease, lease.session() as session:
            session.retrieve(0, None)
    assert taken(store) == before


@pytest.mark.parametrize(
    ("where", "what"),
    [(Committer, "close"), (IoPool, "close"), (Home, "close"), (SsdTier, "close"),
     (Shard, "unlock")],
    ids=lambda of: getattr(of, "__name__", str(of)),
)  # fmt: skip
def test_a_close_that_was_interrupted_can_be_repeated(
    store: impress.PrefixStore, where: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A close waits for a slow disk, so Ctrl-C comes there; closing again did nothing: the shard
    stayed locked until the process ended, and an open beside it began an empty one."""
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(where, what, once(getattr(where, what)))
        store.close()
    store.close()
    store.close()
    config = impress.Config(**SMALL, shard=0)
    with impress.PrefixStore.open(store.path, store.geometry, "test", config) as again:
        assert_serves(again, TOKENS, 256)


@pytest.mark.parametrize("what", ["a segment", "the lock"])
def test_a_close_that_was_cut_off_closes_no_number_twice(
    store: impress.PrefixStore, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A signal comes as the call that closes a file returns. Closed again, its number belonged to
    nobody, and the shard stayed locked for good, or by then to another file of the process."""
    shard, real = store._home._shard, os.close
    assert shard is not None
    files = [shard._fd] if what == "the lock" else [f.fd for f in store.ssd._files._files.values()]
    armed = [1]

    def close(fd: int) -> None:
        real(fd)
        if armed and fd in files:
            armed.clear()
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "close", close)
    with pytest.raises(KeyboardInterrupt):
        store.close()
    mine = [(tmp_path / f"mine{i}").open("w") for i in range(8)]
    assert {file.fileno() for file in mine} & {*files}
    store.close()
    for file in mine:
        file.write("mine")
        file.close()
    config = impress.Config(**SMALL, shard=0)
    with impress.PrefixStore.open(store.path, store.geometry, "test", config) as again:
        assert_serves(again, TOKENS, 256)


def test_a_close_that_was_cut_off_leaves_the_next_stores_lock_alone(
    store: impress.PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next store's lock had the same number and file: two processes could write the shard."""
    shard, real = store._home._shard, os.close
    assert shard is not None
    lock, armed = shard._fd, [1]

    def close(fd: int) -> None:
        real(fd)
        if armed and fd is lock:
            armed.clear()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(os, "close", close)
        store.close()
    config = impress.Config(**SMALL, shard=0)
    with impress.PrefixStore.open(store.path, store.geometry, "test", config) as again:
        assert again._home._shard is not None and again._home._shard._fd == lock
        store.close()
        with pytest.raises(impress.StoreLocked):
            impress.PrefixStore.open(store.path, store.geometry, "test", config)
        assert_serves(again, TOKENS, 256)


def test_an_open_that_is_interrupted_lets_go_of_its_index(
    store: impress.PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB opens a file once per process: as long as anybody kept the traceback (an interpreter
    keeps the last one), every further open was refused."""
    store.close()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt) as kept:
        patched.setattr(env, "give_to_owner", once(env.give_to_owner))
        Index(Shard(store.path).index, create=True)
    assert kept.traceback
    Index(Shard(store.path).index, create=True).close()


@pytest.mark.parametrize("error", [impress.StoreFailed("no more readers"), KeyboardInterrupt()])
def test_an_open_that_fails_on_the_way_lets_go_of_its_index(
    store: impress.PrefixStore, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Where LMDB had no room for one more reader, the index stayed open until the process ended."""
    store.close()
    before = dict(env.envs)

    def refused(*_args: Any) -> None:
        raise error

    with monkeypatch.context() as patched, pytest.raises(type(error)):
        patched.setattr(impress.write.index, "check_sound", refused)
        Index(Shard(store.path).index, create=False)
    assert env.envs == before


@pytest.mark.parametrize("where", [
    (Load, "abandon"), (Session, "give_up"), (Session, "_hand_over"), (Begun, "over"),
])  # fmt: skip
def test_a_close_that_is_cut_off_twice_is_finished_by_the_next(
    store: impress.PrefixStore, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str]
) -> None:
    """It counted as closed from the first cut on: copies in memory stayed pinned, and buffers
    rented, until the process ended."""
    for _ in range(2):
        assert_serves(store, TOKENS, len(TOKENS))
    wait_for_promotions(store)
    before, n_cuts, real = taken(store), 0, getattr(*where)

    def cut(*args: Any, **named: Any) -> Any:
        nonlocal n_cuts
        n_cuts += 1
        if n_cuts <= 2:
            raise KeyboardInterrupt
        return real(*args, **named)

    lease = store.lease(TOKENS)
    session = lease.session()
    session.prefetch()
    monkeypatch.setattr(*where, cut)
    with pytest.raises(KeyboardInterrupt):
        session.close()
    assert n_cuts == 2
    assert session.close()
    assert taken(store) == before
    lease.release()


def test_a_guess_that_finds_no_memory_gives_back_what_it_had(
    store: impress.PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was room for the keys and none for the values: a MiB was lost with every session."""
    reading, rent, rented = store._reading, Reading.rent, list[int]()

    def short(reading: Reading, n_bytes: int) -> Any:
        rented.append(n_bytes)
        if len(rented) == 2:
            raise ReadFailed("shortage", "memory: no more")
        return rent(reading, n_bytes)

    monkeypatch.setattr(Reading, "rent", short)
    with store.lease(TOKENS) as lease:
        with pytest.raises(ReadFailed):
            Early(reading, lease.sources, 0, (0, 1), np.arange(0, 256, 3))
    assert len(rented) == 2 and taken(store) == (0, 0, 0)


def test_advice_that_a_kernel_refuses_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large buffers ask for huge pages; where there are none, every read of 2 MiB failed."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)
    assert len(aligned(3 * MIB)) >= 3 * MIB and len(aligned(2 * MIB + PAGE)) >= 2 * MIB + PAGE
    assert DramTier(4 * MIB).reserve(MIB) is not None


@pytest.mark.parametrize("n", range(4))
def test_space_on_its_way_back_that_is_cut_off_comes_back_later(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """The space counted as free and never was, so nothing more was evicted, and every later store
    was refused, until a restart."""
    # Only the interrupted call gives it back: no thread follows.
    limits = {"disk_bytes": 8 * MIB, "disk_high": 1, "disk_low": 1, "dram_bytes": 0}
    store = open_store(geometry, follow_every_s=0, **limits)
    for seed in (1, 2, 3):
        assert put_prompt(store, prompt(256, seed)).wait(60)
    with open_store(geometry, follow_every_s=0) as reader:  # has yet to hear of it
        assert store.evict(2 * MIB) and store.stats()["limbo_bytes"]
        reader.follow()
    where, name = (SsdTier, "write") if n < 2 else (SsdTier, "free")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(where, name, once(getattr(where, name), n % 2))
        store.follow()
    store.follow()
    assert store.stats()["limbo_bytes"] == 0
    assert put_prompt(store, prompt(512, 9)).wait(60)
    if n < 2:  # cut off in between, a span's space may be taken until a restart
        store.check()
