"""Late reads: when the limit begins, and who waits for one that hangs. Mostly on our own clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import assert_serves, kv_of, prompt, put_prompt, read_limit, wait_for_promotions

import impress
import impress.read.load
import impress.read.session
import impress.read.sparse
import impress.read.tickets
import tiers.ticket
from impress.engines.hf_prefix import find_prefix
from impress.policy import Exact, Quality, Random, SnapWindow
from impress.read.shadow import Seen, ShadowSession
from impress.selection.choices import Selection
from tiers.base import Read
from tiers.errors import ReadFailed
from tiers.iopool import Lane
from tiers.slots import aligned
from tiers.ssd import SsdTier
from tiers.ticket import Ticket

Open = Callable[..., impress.PrefixStore]

DEEP = impress.Geometry(5, 4, 2, 128, "float32")
LIMIT_S = 10.0
N = 128


class SlowDisk:
    """Every read is held until this thread waits for one; with `hangs`, for good, and waiting for
    it takes all the time that the caller gives it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: impress.PrefixStore) -> None:
        self.now_s, self.hangs = 0.0, False
        self._turns = threading.Semaphore(0)
        self._caller = threading.current_thread()
        self._read, self._wait = store.ssd.read, Ticket.over
        monkeypatch.setattr(store.ssd, "read", self._slowly)

        def over(ticket: Ticket, limit_s: float) -> bool:  # a method: bound to the ticket
            return self._waited(ticket, limit_s)

        monkeypatch.setattr(Ticket, "over", over)
        for module in (impress.read.load, impress.read.session, impress.read.tickets):
            monkeypatch.setattr(module, "monotonic", lambda: self.now_s)

    def _slowly(self, reads: Sequence[Read], *then: Any) -> None:
        self._turns.acquire()
        self._read(reads, *then)

    def _waited(self, ticket: Ticket, limit_s: float) -> bool:
        if threading.current_thread() is not self._caller or ticket.done:
            return self._wait(ticket, limit_s)
        if limit_s and not self.hangs:
            self._turns.release()
            return self._wait(ticket, 60)
        self.now_s += limit_s
        return self._wait(ticket, 0)

    def go_on(self) -> None:
        self._turns.release(1000)


@pytest.fixture
def store(open_store: Open) -> impress.PrefixStore:
    """A store of two prompts, with one I/O thread."""
    made = open_store(DEEP, io_threads=1, read_timeout_s=LIMIT_S)
    for seed in (0, 1):
        put_prompt(made, prompt(N, seed)).wait(60)
    return made


@pytest.fixture
def disk(store: impress.PrefixStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    slow = SlowDisk(monkeypatch, store)
    yield slow
    slow.go_on()
    monkeypatch.undo()


def memory() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.empty(2, N, 128), torch.empty(2, N, 128)) for _ in range(DEEP.n_layers)]


def test_a_layer_has_the_whole_limit_once_the_one_before_it_is_in(
    store: impress.PrefixStore, disk: SlowDisk
) -> None:
    """It began for all layers at once: if all together took a slow disk longer, they were lost."""
    keys, _ = kv_of(prompt(N), DEEP)
    with store.lease(prompt(N)) as lease, lease.session() as session:
        session.prefetch()
        for layer in range(DEEP.n_layers - 1):
            disk.now_s += 0.6 * LIMIT_S
            k, _, _ = session.retrieve(layer, None)
            assert np.array_equal(k.numpy(), keys[layer])
        disk.hangs, before_s = True, disk.now_s
        with pytest.raises(impress.PrefixLost, match="took more than"):
            session.retrieve(DEEP.n_layers - 1, None)
        assert disk.now_s - before_s == LIMIT_S  # if the disk hangs from then on, one limit more


def test_who_lost_a_late_read_does_not_wait_for_it_once_more(
    store: impress.PrefixStore, disk: SlowDisk
) -> None:
    """The session's close gave the same reads another full limit."""
    with store.lease(prompt(N)) as lease:
        disk.hangs = True
        session = lease.session()
        session.prefetch(memory())
        with pytest.raises(impress.PrefixLost, match="took more than"):
            session.retrieve(0, None)
        assert not session.close()
    assert disk.now_s == LIMIT_S


def test_the_prompts_of_a_batch_wait_for_a_disk_that_hangs_together(
    store: impress.PrefixStore, disk: SlowDisk
) -> None:
    """Each prompt's reads were given a limit of their own, one after the other."""
    prefix, _ = find_prefix(
        store, [np.append(prompt(N, seed), 1).astype(np.int32) for seed in (0, 1)]
    )
    assert prefix is not None
    disk.hangs = True
    prefix.open(Exact())
    prefix.start([memory(), memory()])
    with pytest.raises(impress.PrefixLost, match="took more than"):
        prefix.wait(0)
    assert not prefix.close()
    assert disk.now_s == LIMIT_S


def test_what_a_layer_is_chosen_by_has_the_whole_limit_once_the_one_before_it_is_in(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of all layers are begun at once, and those of the last layers were late by a clock
    that began with the first. The disk gives what is waited for, in 0.6 of the limit each."""
    store = open_store(
        DEEP, probes=("int4-v2",), io_threads=8, dram_bytes=0, read_timeout_s=LIMIT_S
    )
    put_prompt(store, prompt(N)).wait(60)
    now_s, caller, at = [0.0], threading.current_thread(), threading.local()
    asked: dict[Ticket, threading.Event] = {}
    read, run, over = store.ssd.read, Ticket.run, Ticket.over

    def running(ticket: Ticket, *more: Any) -> None:
        at.ticket = ticket
        run(ticket, *more)

    def slowly(reads: Sequence[Read], *then: Any) -> None:
        assert asked.setdefault(at.ticket, threading.Event()).wait(60)
        read(reads, *then)

    def waited(ticket: Ticket, limit_s: float) -> bool:
        if threading.current_thread() is not caller or ticket.done:
            return over(ticket, limit_s)
        now_s[0] += min(limit_s, 0.6 * LIMIT_S)
        if limit_s < 0.6 * LIMIT_S:
            return over(ticket, 0)
        asked.setdefault(ticket, threading.Event()).set()
        return over(ticket, 60)

    query = torch.zeros(DEEP.n_heads, 1, DEEP.head_dim)
    lse = torch.zeros(DEEP.n_heads, 1)
    with store.lease(prompt(N)) as lease, lease.session(Quality()) as session:
        monkeypatch.setattr(store.ssd, "read", slowly)
        monkeypatch.setattr(Ticket, "run", running)
        monkeypatch.setattr(Ticket, "over", waited)
        for module in (impress.read.load, impress.read.session, impress.read.sparse):
            monkeypatch.setattr(module, "monotonic", lambda: now_s[0])
        session.prefetch()
        for layer in range(DEEP.n_layers):
            session.retrieve(layer, query, suffix_lse=lse)
    assert now_s[0] > DEEP.n_layers * LIMIT_S


def test_what_a_layer_took_ends_with_its_reads(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended when the engine came for the layer: with all layers begun at once, the last one's
    load took as long as the forward. On our own clock."""
    store = open_store(geometry, io_threads=1)
    put_prompt(store, prompt(128)).wait(60)
    now_s, read, n_reads = [1000.0], store.ssd.read, list[int]()

    def slowly(reads: Sequence[Read], *then: Any) -> None:
        now_s[0] += 0.05
        n_reads.append(1)
        read(reads, *then)

    for module in (impress.read.load, tiers.ticket):
        monkeypatch.setattr(module, "monotonic", lambda: now_s[0])
    with store.lease(prompt(128)) as lease, lease.session() as session:
        monkeypatch.setattr(store.ssd, "read", slowly)
        session.retrieve(0, None)
        assert n_reads
        assert store.stats()["load_latency"]["sum_ms"] == pytest.approx(50 * len(n_reads))
        monkeypatch.setattr(store.ssd, "read", read)
        session.prefetch()
        wait_for_promotions(store)  # all of it is read
        now_s[0] += 60  # of the forward
        session.retrieve(1, None)
    load = store.stats()["load_latency"]
    assert load["count"] == 2 and load["sum_ms"] == pytest.approx(50 * len(n_reads))


# ---- on the real clock ---------------------------------------------------------------------------


def test_a_read_that_came_too_late_still_keeps_the_callers_memory(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Close did not ask the layer given up: it said that nothing reads into it any more."""
    store = open_store(geometry, io_threads=2)
    put_prompt(store, prompt(128)).wait(60)
    going_on, read = threading.Event(), SsdTier.read
    memory = [aligned(128 * geometry.k_row_bytes) for _ in range(4)]  # K, V by layer
    keys, *others = [
        torch.frombuffer(raw, dtype=torch.float32).view(128, 2, 128).transpose(0, 1)
        for raw in memory
    ]

    def hangs(ssd: SsdTier, reads: Sequence[Read], *then: Any) -> None:
        if any(np.may_share_memory(each.dest, memory[0]) for each in reads):
            going_on.wait(60)
        read(ssd, reads, *then)

    monkeypatch.setattr(SsdTier, "read", hangs)
    with store.lease(prompt(128)) as lease, read_limit(store, 0.05):
        session = lease.session()
        session.prefetch([(keys, others[0]), (others[1], others[2])])
        with pytest.raises(impress.PrefixLost, match="took more than"):
            session.retrieve(0, None)
        assert not session.close()
    going_on.set()


def test_a_read_that_was_given_up_is_followed_by_nobody(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one read hung, every later request for its rows waited for it beside idle threads, and
    was late too."""
    store = open_store(geometry, io_threads=2, dram_bytes=0)
    put_prompt(store, prompt(128)).wait(60)
    first, read = threading.Lock(), SsdTier.read
    begun, going_on = threading.Event(), threading.Event()

    def hangs_once(ssd: SsdTier, reads: Sequence[Read], *then: Any) -> None:
        if first.acquire(blocking=False):
            begun.set()
            going_on.wait(60)
        read(ssd, reads, *then)

    with store.lease(prompt(128)) as lease, read_limit(store, 0.05), lease.session() as session:
        monkeypatch.setattr(SsdTier, "read", hangs_once)
        session.prefetch()
        assert begun.wait(60)
        with pytest.raises(impress.PrefixLost, match="took more than"):
            for layer in range(geometry.n_layers):  # which one hangs is up to the threads
                session.retrieve(layer, None)
    assert_serves(store, prompt(128), 128)
    going_on.set()


def test_a_shadow_that_is_late_is_no_lost_request(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """It reads after everything else: beside a bulk store its losses were counted as requests'."""
    store = open_store(geometry, io_threads=1, dram_bytes=0)
    put_prompt(store, prompt(128)).wait(60)
    chosen = Selection(np.arange(32), 0.1, 0.1, fell_back=False, reason="ungated")
    seen = Seen(torch.zeros(4, 1, 128), 1.0, torch.zeros(4, 1), chosen)
    busy, begun = threading.Event(), threading.Event()
    with store.lease(prompt(128)) as lease:
        hog = store._pool.submit(Lane.STORE, [lambda: begun.set() or (busy.wait(60) and None)])
        assert begun.wait(60)  # the only thread
        with read_limit(store, 0.05), ShadowSession(lease, Random()) as session:
            with pytest.raises(impress.PrefixLost, match="took more than"):
                session.weigh(0, seen)
    busy.set()
    hog.wait(60)
    assert store.stats()["lost"] == {}


def test_a_shadow_whose_header_is_late_is_no_lost_request(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read ahead of requests, and an ordinary late read came out as a logged traceback."""
    store = open_store(geometry, dram_bytes=0)
    put_prompt(store, prompt(128)).wait(60)
    asked = Seen(torch.zeros(4, 1, 128), 1.0, torch.zeros(4, 1))
    lanes, submit = list[Lane](), store._pool.submit

    def noted(lane: Lane, *args: Any, **named: Any) -> Any:
        lanes.append(lane)
        return submit(lane, *args, **named)

    def late(*_args: object) -> None:
        raise ReadFailed("late", "told to be")

    monkeypatch.setattr("impress.read.importance.read_header", late)
    with store.lease(prompt(128)) as lease, ShadowSession(lease, SnapWindow()) as session:
        monkeypatch.setattr(store._pool, "submit", noted)
        with pytest.raises(impress.PrefixLost, match="told to be"):
            session.weigh(0, asked)
    assert lanes and Lane.DEMAND not in lanes
    assert store.stats()["lost"] == {}


def test_while_every_thread_is_stuck_requests_are_told_to_compute(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """A disk that hangs takes the I/O threads with it; requests must not queue up behind them."""
    store = open_store(geometry, io_threads=2)
    put_prompt(store, prompt(128)).wait(60)
    stuck, begun = threading.Event(), threading.Barrier(3)

    def hang() -> None:
        begun.wait(60)
        stuck.wait(60)

    blockers = store._pool.submit(Lane.DEMAND, [hang, hang])
    begun.wait(60)
    with read_limit(store, 0.05):
        while store.stats()["stuck_threads"] < 2:  # it takes the time limit to be sure
            pass
        with store.lease(prompt(128)) as lease:
            assert lease.n_tokens == 0 and lease.miss_reason == "tier off"
    assert store.stats()["misses"]["tier_off"] == 1
    stuck.set()
    blockers.wait(60)
    assert_serves(store, prompt(128), 128)
