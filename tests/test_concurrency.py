"""Many users at once: answers compared, reads shared, leases that nobody gives back."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from conftest import assert_serves, kv_of, prompt, put_prompt, wait_for_promotions

import impress
import impress.read.reading
from impress.engines.hf_request import totals
from impress.policy import Exact, Policy, Recency
from impress.read.flights import Flight, take
from impress.spans.format import decode_index
from tiers.base import Read, sums_of
from tiers.iopool import Lane
from tiers.slots import aligned
from tiers.ticket import Ticket

Open = Callable[..., impress.PrefixStore]
N_PROMPTS = 8


@pytest.fixture
def small() -> impress.Geometry:
    return impress.Geometry(2, 2, 2, 32, "float32")


def in_threads(tasks: Sequence[Callable[[], None]]) -> None:
    """Run all at once; raises the first one's error."""
    errors: list[BaseException] = []

    def run(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as err:
            errors.append(err)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def prompts() -> list[np.ndarray]:
    """Every second one begins like the one before it."""
    made: list[np.ndarray] = []
    for seed in range(N_PROMPTS):
        tokens = prompt(128 + 64 * (seed % 3), seed)
        if seed % 2:
            tokens[:64] = made[-1][:64]
        made.append(tokens)
    return made


def read_and_compare(store: impress.PrefixStore, tokens: np.ndarray) -> None:
    """Whatever the store has of the prompt is right."""
    keys, values = kv_of(tokens, store.geometry)
    with store.lease(tokens) as lease:
        n = lease.n_tokens
        if not n:
            return
        with lease.session() as session:
            session.prefetch()
            for layer in range(store.geometry.n_layers):
                k, v, _ = session.retrieve(layer, None)
                assert np.array_equal(k.numpy(), keys[layer][:, :n])
                assert np.array_equal(v.numpy(), values[layer][:, :n])


def assert_nothing_is_left(store: impress.PrefixStore) -> None:
    """No lease, pin or buffer outlives its user."""
    store.flush()
    stats = store.stats()
    assert (stats["leases"], stats["pinned_spans"]) == (0, 0)
    store.close()
    assert store.buffers.used_bytes == 0


@pytest.mark.parametrize("dram_bytes", [0, 1 << 20])
def test_many_threads_store_read_evict_and_repack(
    open_store: Open, small: impress.Geometry, dram_bytes: int
) -> None:
    store = open_store(small, dram_bytes=dram_bytes, disk_bytes=3 << 20, io_threads=4)
    made = prompts()

    def client(number: int) -> Callable[[], None]:
        rng = np.random.default_rng(number)

        def work() -> None:
            for _ in range(30):
                tokens = made[int(rng.integers(N_PROMPTS))]
                what = rng.random()
                if what < 0.3:
                    importance = None
                    if rng.random() < 0.5:
                        importance = rng.random((2, len(tokens)), dtype=np.float32)
                    put_prompt(store, tokens, importance=importance, wait_s=30)
                elif what < 0.35:
                    store.evict(1 << 18)
                elif what < 0.4:
                    store.drop_caches()
                elif what < 0.5:
                    assert store.lookup(tokens) <= len(tokens)
                else:
                    read_and_compare(store, tokens)

        return work

    def repacker() -> None:
        for _ in range(4):
            store.repack()

    in_threads([*(client(i) for i in range(6)), repacker])
    store.flush()
    assert store.stats()["hits"]
    for tokens in made:
        put_prompt(store, tokens, wait_s=30).wait(60)
        assert_serves(store, tokens, len(tokens))
    store.flush()
    store.check()
    assert_nothing_is_left(store)


# ---- one read for many ---------------------------------------------------------------------------


class Gate:
    """Reads from home wait here; `n_bytes` counts those let through."""

    def __init__(self, store: impress.PrefixStore) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.n_bytes = 0
        self._lock = threading.Lock()
        read = store.ssd.read

        def waiting(reads: Sequence[Read], *then: Any) -> None:
            self.reached.set()
            assert self.opened.wait(60)
            with self._lock:
                self.n_bytes += sum(len(r.dest) for r in reads)
            read(reads, *then)

        store.ssd.read = waiting  # type: ignore[method-assign]


@contextmanager
def cold_sessions(
    store: impress.PrefixStore, tokens: np.ndarray, n: int
) -> Iterator[list[impress.read.session.Session]]:
    """n sessions on one prefix, whose sums have been read already."""
    leases = [store.lease(tokens) for _ in range(n)]
    sessions = [lease.session() for lease in leases]
    yield sessions
    for session, lease in zip(sessions, leases, strict=True):
        session.close()
        lease.release()


def assert_right(session: impress.read.session.Session, tokens: np.ndarray, geometry: Any) -> None:
    keys, values = kv_of(tokens, geometry)
    for layer in range(geometry.n_layers):
        k, v, _ = session.retrieve(layer, None)
        assert np.array_equal(k.numpy(), keys[layer]) and np.array_equal(v.numpy(), values[layer])


def filled(open_store: Open, geometry: impress.Geometry, **config: Any) -> impress.PrefixStore:
    store = open_store(geometry, dram_bytes=0, io_threads=2, **config)
    put_prompt(store, prompt(256)).wait(60)
    return store


def page_aligned_outs(geometry: impress.Geometry, n_tokens: int) -> list[tuple[Any, Any]]:
    """The caller's own memory, which a prefix is read into directly."""
    shape = n_tokens, geometry.n_kv_heads, geometry.head_dim
    planes = [
        torch.from_numpy(aligned(n_tokens * geometry.k_row_bytes)).view(torch.float32).view(shape)
        for _ in range(2 * geometry.n_layers)
    ]
    rows = [plane.transpose(0, 1) for plane in planes]
    return list(zip(rows[::2], rows[1::2], strict=True))


@pytest.mark.parametrize("direct", [False, True])
def test_what_is_on_its_way_is_read_once(
    open_store: Open, small: impress.Geometry, direct: bool
) -> None:
    store = filled(open_store, small)
    with cold_sessions(store, prompt(256), 3) as sessions:
        gate = Gate(store)
        for session in sessions:
            session.prefetch(page_aligned_outs(small, 256) if direct else None)
        gate.opened.set()
        for session in sessions:
            assert_right(session, prompt(256), small)
        whole = 256 * small.token_bytes
        assert gate.n_bytes == whole
        assert store.stats()["shared_bytes"] == 2 * whole
    assert_nothing_is_left(store)


def test_bytes_out_of_anothers_read_are_told_apart_from_those_read(
    open_store: Open, small: impress.Geometry
) -> None:
    """Every report counted them as read from the SSD: three times what was read from it."""
    store, whole = filled(open_store, small), 256 * small.token_bytes
    with cold_sessions(store, prompt(256), 3) as sessions:
        gate = Gate(store)
        for session in sessions:
            session.prefetch()
        gate.opened.set()
        for session in sessions:
            assert_right(session, prompt(256), small)
        reports = [session.report() for session in sessions]
    assert [report.bytes_by_tier for report in reports] == [{"ssd": whole}] * 3
    assert [report.shared_bytes for report in reports] == [0, whole, whole]
    said = totals(reports, small)
    assert said["bytes_by_tier"]["ssd"] - said["shared_bytes"] == gate.n_bytes == whole


@pytest.mark.parametrize("importance", [False, True])
def test_who_follows_one_that_gave_up_reads_for_itself(
    open_store: Open, small: impress.Geometry, importance: bool
) -> None:
    store = open_store(small, dram_bytes=0, io_threads=1)
    scores = np.random.default_rng(1).random((2, 256), dtype=np.float32) if importance else None
    put_prompt(store, prompt(256), importance=scores).wait(60)
    with cold_sessions(store, prompt(256), 2) as (first, second):
        gate = Gate(store)
        first.prefetch()
        assert gate.reached.wait(60)  # its first read is under way, the others wait
        second.prefetch()
        closing = threading.Thread(target=first.close)
        closing.start()
        while not first._closed:  # the reads it has queued are cancelled
            pass
        gate.opened.set()
        closing.join(60)
        assert_right(second, prompt(256), small)
    assert_nothing_is_left(store)


def test_memory_that_was_taken_back_is_not_looked_at_by_who_follows(
    open_store: Open, small: impress.Geometry
) -> None:
    """A caller told that nothing touches its memory may unmap it: looking at it is then a fault."""
    store = filled(open_store, small)
    with cold_sessions(store, prompt(256), 2) as (first, second):
        gate = Gate(store)
        first.prefetch(page_aligned_outs(small, 256))
        second.prefetch()
        busy = threading.Event()  # the follower gets no thread yet
        hogs = store._pool.submit(Lane.DEMAND, [lambda: busy.wait(60) and None] * 2)
        gate.opened.set()
        assert_right(first, prompt(256), small)
        assert first.close()
        busy.set()
        hogs.wait(60)
        assert_right(second, prompt(256), small)
        assert store.stats()["shared_bytes"] == 0
        assert gate.n_bytes == 2 * 256 * small.token_bytes
    assert_nothing_is_left(store)


def test_close_waits_for_who_copies_out_of_the_callers_memory(
    open_store: Open, small: impress.Geometry
) -> None:
    store = filled(open_store, small)
    order: list[object] = []
    with cold_sessions(store, prompt(256), 1) as (session,):
        session.prefetch(page_aligned_outs(small, 256))
        assert_right(session, prompt(256), small)
        flight = session._begun._loads[0].flight
        closing = threading.Thread(target=lambda: order.append(session.close()))
        with flight.looked_at() as there:
            assert there
            closing.start()
            while not flight._is_over:
                pass
            order.append("copied")
        closing.join(60)
    assert order == ["copied", True]
    assert_nothing_is_left(store)


def test_close_does_not_wait_for_stores_to_let_promotions_have_their_turn(
    open_store: Open, small: impress.Geometry
) -> None:
    """Copies up from the caller's memory come last in the pool: after a bulk store on a slow disk,
    so close waited until its time limit, and the caller had to give up its memory for lost."""
    store = open_store(small, io_threads=1, read_timeout_s=5.0)
    put_prompt(store, prompt(256)).wait(60)
    with cold_sessions(store, prompt(256), 1) as (session,):
        session.prefetch(page_aligned_outs(small, 256))
        store._pool.submit(Lane.DEMAND, [lambda: None]).wait(60)  # all of it is read
        busy, begun = threading.Event(), threading.Event()
        hog = store._pool.submit(Lane.STORE, [lambda: begun.set() or (busy.wait(60) and None)])
        assert begun.wait(60)  # it has the only thread
        assert_right(session, prompt(256), small)
        assert session.close()
    busy.set()
    hog.wait(60)
    wait_for_promotions(store)
    assert store.stats()["promotions"] == {"dram": 8}, "they climb all the same"
    assert_nothing_is_left(store)


def test_of_a_packed_prefix_two_that_hold_other_windows_read_each_for_itself(
    open_store: Open,
) -> None:
    """Their rows lie in the same chunks, some of which are in memory: each reads from home only the
    rows it holds itself, and so has them at places of its own. The second one's copy ended in a
    ValueError, and its pins stayed."""
    wide = impress.Geometry(1, 8, 8, 128, "float32")  # a row is a page, and a piece
    store = open_store(wide, dram_bytes=2 << 20, io_threads=2)
    scores = np.random.default_rng(1).random((1, 512), dtype=np.float32)
    put_prompt(store, prompt(512), importance=scores).wait(60)
    read_and_compare(store, prompt(512))
    wait_for_promotions(store)
    assert 0 < sum(placed.chunks["dram"] for placed in store.placement()) < 8
    leases = [store.lease(prompt(512)[: 64 * n]) for n in (5, 6, 8, 8)]
    sessions = [lease.session(first=64 * (i == 3)) for i, lease in enumerate(leases)]
    gate = Gate(store)
    for session in sessions:
        session.prefetch()
    gate.opened.set()
    keys, values = kv_of(prompt(512), wide)
    for i, (session, lease) in enumerate(zip(sessions, leases, strict=True)):
        k, v, _ = session.retrieve(0, None)
        held = slice(64 * (i == 3), lease.n_tokens)
        assert np.array_equal(k.numpy(), keys[0][:, held])
        assert np.array_equal(v.numpy(), values[0][:, held])
        session.close()
        lease.release()
    assert_nothing_is_left(store)


def test_a_flight_whose_memory_is_shorter_is_not_copied() -> None:
    """Whatever made two loads look alike, bytes that are not there are read."""
    right = np.random.default_rng(0).integers(0, 256, 8192, dtype=np.uint8)
    mine = aligned(8192)
    slot: Any = type("Slot", (), {"parts": [type("Part", (), {"segment": 0})]})
    reads = [Read(slot, 0, mine[:8192], sums_of(right, 4096), 4096)]

    class Home:
        def read(self, reads: Sequence[Read]) -> None:
            mine[:] = right

    home: Any = Home()
    assert take(home, reads, [mine], Flight([right[:4096]], Ticket(0))) == 0
    assert np.array_equal(mine, right)


def test_a_load_that_ends_in_any_error_leaves_nothing_behind(
    open_store: Open, small: impress.Geometry
) -> None:
    """An unforeseen error left the load's copies pinned and its buffers taken."""
    store = open_store(small, io_threads=1)
    put_prompt(store, prompt(256)).wait(60)
    with cold_sessions(store, prompt(256), 1) as (session,):
        read = store.ssd.read

        def broken(reads: Sequence[Read], then: Any = None) -> None:
            raise ValueError("not thought of")

        store.ssd.read = broken  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="not thought of"):
            session.retrieve(0, None)
        store.ssd.read = read  # type: ignore[method-assign]
        assert store.buffers.used_bytes == 0
    assert_serves(store, prompt(256), 256)
    assert_nothing_is_left(store)


def test_memory_of_another_is_verified_like_any_medium() -> None:
    """Its owner may have written to it meanwhile; the bytes then come from home."""
    right = np.random.default_rng(0).integers(0, 256, 16384, dtype=np.uint8)
    theirs, mine = right.copy(), aligned(16384)
    theirs[9000] ^= 1
    sums = sums_of(right, 4096)
    slot: Any = type("Slot", (), {"parts": [type("Part", (), {"segment": 0})]})
    reads = [Read(slot, at, mine[at : at + 8192], sums[at // 4096 :][:2], 4096) for at in (0, 8192)]
    asked: list[Read] = []

    class Home:
        def read(self, reads: Sequence[Read]) -> None:
            asked.extend(reads)
            for read in reads:
                read.dest[:] = right[read.off : read.off + len(read.dest)]

    home: Any = Home()
    assert take(home, reads, [mine], Flight([theirs], Ticket(0))) == 8192
    assert asked == reads[1:] and np.array_equal(mine, right)


def test_promotions_that_pile_up_behind_requests_hold_little_memory(
    open_store: Open, small: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run last: under load their buffers once added up to everything that was read."""
    layer = 64 * small.token_bytes // small.n_layers
    monkeypatch.setattr(impress.read.reading, "MOST_WAITING", 3 * layer)
    store = open_store(small, io_threads=1)
    for seed in range(4):
        put_prompt(store, prompt(64, seed))
    store.flush()
    leases = [store.lease(prompt(64, seed)) for seed in range(4)]
    sessions = [lease.session() for lease in leases]
    for session in sessions:
        session.prefetch()
    store._pool.submit(Lane.DEMAND, [lambda: None]).wait(60)  # all of it is read
    busy, begun = threading.Event(), threading.Event()
    hog = store._pool.submit(Lane.DEMAND, [lambda: begun.set() or (busy.wait(60) and None)])
    assert begun.wait(60)  # it has the only thread: nothing more is copied up
    for seed, session in enumerate(sessions):
        assert_right(session, prompt(64, seed), small)
        session.close()
        leases[seed].release()
    assert store.buffers.used_bytes == 3 * layer, "of 8 that were read"
    assert store.stats()["promotions_skipped"] == 5
    busy.set()
    hog.wait(60)
    store._pool.submit(Lane.REPACK, [lambda: None]).wait(60)  # after all promotions
    assert_nothing_is_left(store)


def outs_of_ones_own(geometry: impress.Geometry) -> tuple[list[tuple[torch.Tensor, ...]], list]:
    """K and V by layer for 256 rows, as a caller brings them; and weak references to the memory."""
    memory = [aligned(256 * geometry.k_row_bytes) for _ in range(2 * geometry.n_layers)]
    tensors = [
        torch.frombuffer(raw, dtype=torch.float32).view(256, 2, 32).transpose(0, 1)
        for raw in memory
    ]
    outs = list(zip(tensors[::2], tensors[1::2], strict=True))
    return outs, [weakref.ref(raw) for raw in memory]


def test_what_waits_to_be_learnt_keeps_nobodys_memory(
    open_store: Open, small: impress.Geometry
) -> None:
    """Queued after a bulk store, it held each request's keys and values, even the caller's, and no
    limit knew of them."""
    store = open_store(small, io_threads=1)
    put_prompt(store, prompt(256)).wait(60)
    outs, alive = outs_of_ones_own(small)
    with cold_sessions(store, prompt(256), 1) as (session,):
        session.prefetch(outs)
        assert_right(session, prompt(256), small)
        busy, begun = threading.Event(), threading.Event()
        hog = store._pool.submit(Lane.STORE, [lambda: begun.set() or (busy.wait(60) and None)])
        assert begun.wait(60)  # it has the only thread
        assert session.close()
    assert store._pool.depth()[Lane.PROMOTE] > 0, "it waits"
    del session, outs
    gc.collect()
    assert all(raw() is None for raw in alive)
    busy.set()
    hog.wait(60)
    wait_for_promotions(store)
    assert store.stats()["rows_from"] == {"dram": 0, "ssd": 512}, "and is learnt all the same"
    assert_nothing_is_left(store)


def test_what_waits_to_climb_keeps_no_memory_of_whom_it_followed(
    open_store: Open, small: impress.Geometry
) -> None:
    """A load that took its bytes from another request's read kept that request's memory, even the
    caller's own, until what climbs from it had its turn."""
    store = open_store(small, io_threads=1)
    put_prompt(store, prompt(256)).wait(60)
    outs, alive = outs_of_ones_own(small)
    with cold_sessions(store, prompt(256), 2) as (first, second):
        gate = Gate(store)
        first.prefetch(outs)
        second.prefetch()
        gate.opened.set()
        for session in (first, second):
            assert_right(session, prompt(256), small)
        assert store.stats()["shared_bytes"] == 256 * small.token_bytes
        busy, begun = threading.Event(), threading.Event()
        hog = store._pool.submit(Lane.STORE, [lambda: begun.set() or (busy.wait(60) and None)])
        assert begun.wait(60)  # it has the only thread
        assert first.close() and second.close()
    assert store._pool.depth()[Lane.PROMOTE] > 0, "the second's waits"
    del first, second, session, outs
    gc.collect()
    assert all(raw() is None for raw in alive)
    busy.set()
    hog.wait(60)
    wait_for_promotions(store)
    assert_nothing_is_left(store)


# ---- leases that nobody gives back ---------------------------------------------------------------


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


def with_clock(store: impress.PrefixStore) -> Clock:
    clock = Clock()
    store._leases.clock = clock
    return clock


def test_an_expired_lease_loses_its_next_read_and_pins_until_released(
    open_store: Open, small: impress.Geometry
) -> None:
    store = filled(open_store, small, lease_timeout_s=60.0, read_timeout_s=5.0)
    clock = with_clock(store)
    with store.lease(prompt(256)) as lease, lease.session() as session:
        session.prefetch()
        session.retrieve(0, None)
        clock.s += 60.0
        session.retrieve(1, None)  # at its limit, not over it
        clock.s += 1.0
        with pytest.raises(impress.PrefixLost) as lost:
            session.retrieve(1, None)
        assert lost.value.reason == "expired"
        assert store.evict(1 << 30) == 0, "reads begun in time may still be under way"
    assert store.evict(1 << 30) > 0
    assert_nothing_is_left(store)


@pytest.mark.parametrize("by", ["evict", "lease", "store"])
def test_a_holder_that_vanished_does_not_pin_for_ever(
    open_store: Open, small: impress.Geometry, by: str
) -> None:
    limits = {"lease_timeout_s": 60.0, "read_timeout_s": 5.0}
    store = open_store(small, dram_bytes=0, disk_bytes=1 << 20, **limits)
    put_prompt(store, prompt(640)).wait(60)
    clock = with_clock(store)
    vanished = store.lease(prompt(640))
    session = vanished.session()
    assert store.stats()["oldest_lease_s"] == 0.0
    clock.s += 65.1
    assert store.stats()["oldest_lease_s"] > 65
    if by == "evict":
        assert store.evict(1 << 30) > 0
        assert store.lookup(prompt(640)) == 0
    elif by == "lease":
        store.lease(prompt(64, 9)).release()
    else:  # the only way to find room
        assert put_prompt(store, prompt(640, 1), wait_s=30).wait(60)
    assert store.stats()["leases"] == 0 and store.stats()["pinned_spans"] == 0
    assert store.stats()["expired_leases"] == 1
    with pytest.raises(impress.PrefixLost) as lost:
        session.retrieve(0, None)
    assert lost.value.reason == "expired"
    session.close()
    vanished.release()  # it comes back after all: nothing is unpinned twice
    assert_nothing_is_left(store)


@pytest.mark.parametrize("policy", [Exact(), Recency(keep=0.2)], ids=lambda policy: policy.name)
@pytest.mark.parametrize("by", ["release", "expiry"])
def test_the_end_of_a_lease_ends_what_its_sessions_read_ahead(
    open_store: Open, small: impress.Geometry, by: str, policy: Policy
) -> None:
    """A caller that failed between prefetch and retrieve gave back only its lease: its copies in
    DRAM stayed pinned until the store was closed, and what was to climb never did."""
    store = open_store(small, dram_bytes=4 << 20, lease_timeout_s=60.0, read_timeout_s=5.0)
    put_prompt(store, prompt(256)).wait(60)
    read_and_compare(store, prompt(128))
    wait_for_promotions(store)
    (cache,) = store._reading.copies.chunks
    clock = with_clock(store)
    lease = store.lease(prompt(256))
    session = lease.session(policy)
    session.prefetch()
    k, _, pos = session.retrieve(0, None)
    assert store._reading.waiting._held > 0
    if by == "release":
        lease.release()
    else:
        clock.s += 65.1
        store._leases.reap()
    wait_for_promotions(store)
    assert not cache._pins.any() and store._reading.waiting._held == 0
    keys, _ = kv_of(prompt(256), small)
    assert np.array_equal(k.numpy(), keys[0][:, pos]), "what was retrieved is the holder's"
    lost = impress.PrefixLost if by == "expiry" else impress.ImpressError
    with pytest.raises(lost, match="expired" if by == "expiry" else "its lease has ended"):
        session.retrieve(1, None)
    assert session.close()
    wait_for_promotions(store)
    assert_nothing_is_left(store)


def test_a_lease_that_ends_beside_its_session_ends_every_load_once(
    open_store: Open, small: impress.Geometry
) -> None:
    """Any thread may take the lease back while its holder prefetches, retrieves or closes."""
    store = open_store(small, io_threads=2)
    put_prompt(store, prompt(256)).wait(60)
    (cache,) = store._reading.copies.chunks
    for turn in range(40):
        lease = store.lease(prompt(256))
        session = lease.session(Recency(keep=0.5) if turn % 2 else None)

        def use(session: Any = session) -> None:
            with suppress(impress.ImpressError), session:
                session.prefetch()
                for layer in range(small.n_layers):
                    session.retrieve(layer, None)

        in_threads([use, lease.release])
        wait_for_promotions(store)
        assert not cache._pins.any() and store._reading.waiting._held == 0
        store.check()
    assert_nothing_is_left(store)


def test_a_lease_in_time_is_left_alone(open_store: Open, small: impress.Geometry) -> None:
    store = filled(open_store, small, lease_timeout_s=60.0, read_timeout_s=5.0)
    clock = with_clock(store)
    old = store.lease(prompt(256))
    clock.s += 30.0
    with store.lease(prompt(256)) as young:
        clock.s += 36.0
        assert store.evict(1 << 30) == 0 and not old.active and young.active
        with young.session() as session:
            assert_right(session, prompt(256), small)
    assert_serves(store, prompt(256), 256)
    assert_nothing_is_left(store)


@pytest.mark.parametrize("n_layers", [1, 2], ids=["rows missing", "whole"])
def test_who_waits_for_a_store_that_ends_after_its_store_was_closed_is_told(
    open_store: Open, small: impress.Geometry, n_layers: int
) -> None:
    """Its writer raised, and another thread's wait for it never came to an end."""
    store, tokens = open_store(small), prompt(128)
    keys, values = kv_of(tokens, small)
    with pytest.raises(impress.StoreFailed, match="the store is closed"):
        with store.writer(tokens, wait_s=60) as writer:
            for layer in range(n_layers):
                writer.put(layer, 0, keys[layer], values[layer])
            store.close()
    with pytest.raises(impress.StoreFailed, match="the store is closed"):
        writer.stored.wait(0)
    assert not writer.stored.ready


def test_nobody_waits_while_spans_are_decoded(
    open_store: Open, small: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a hundred thousand spans, a purge of two decoded them six times over, half a second each
    in which no request got its lease."""
    with open_store(small) as store:
        put_prompt(store, prompt(64)).wait(60)
        catalog, decode = store.catalog, decode_index
        (span,) = [record.span_id for record in catalog.records()]

        def decoding(span: int, value: bytes) -> Any:
            assert not catalog.lock.locked()
            return decode(span, value)

        monkeypatch.setattr("impress.tree.catalog.decode_index", decoding)
        for found in (
            catalog.records(), catalog.own_records(), catalog.all_records(),
            catalog.retired_records([span, span + 1]),
        ):  # fmt: skip
            assert [record.span_id for record in found] == [span]
