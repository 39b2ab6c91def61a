"""Space, buffers and I/O threads: the parts every medium is made of."""

from __future__ import annotations

import signal
import threading
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impress.cache.chunks import ChunkCache
from impress.cache.heap import MinHeap
from impress.read.tickets import when_all
from tiers import iopool
from tiers.base import PAGE, Extent, Read, Slot
from tiers.coalesce import coalesce
from tiers.errors import Cancelled, ReadFailed
from tiers.iopool import IoPool, Lane
from tiers.slots import BufferPool, aligned, size_class
from tiers.space import LEAST_PART, Space, outside
from tiers.ticket import Ticket, until


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=60))
def test_space_agrees_with_a_bitmap(steps: list[tuple[bool, int]]) -> None:
    """Model: one byte per page of three 4 MiB segments."""
    space, size = Space(), 4 << 20
    for segment in range(3):
        space.add(segment, size)
    taken = np.zeros((3, size // PAGE), dtype=np.int32)
    owned: list[tuple] = []
    for give, n in steps:
        if give and owned:
            parts = owned.pop(n % len(owned))
            space.give(parts)
            change = -1
        else:
            parts = space.take(n * PAGE)
            if parts is None:
                assert (taken == 0).sum() < n or _largest_run(taken) < n
                continue
            assert sum(p.length for p in parts) == n * PAGE
            assert all(p.length >= LEAST_PART for p in parts[:-1])
            owned.append(parts)
            change = 1
        for segment, off, length in parts:
            taken[segment, off // PAGE : (off + length) // PAGE] += change
        assert taken.min() >= 0 and taken.max() <= 1
        assert space.free_bytes == (taken == 0).sum() * PAGE
        space.check()
    again = Space()
    for segment in range(3):
        again.add(segment, size)
    again.claim_all([part for parts in owned for part in parts])
    again.check()
    assert again.free_bytes == space.free_bytes


@settings(max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=40), st.integers(1, 3))
def test_extents_taken_together_are_given_back_in_any_grouping(
    steps: list[tuple[bool, int]], pages: int
) -> None:
    """As a cache does with its chunks. Model: a set of pages."""
    space, owned = Space(), list[Extent]()
    for segment in range(2):
        space.add(segment, 32 * PAGE)
    for give, n in steps:
        if give:
            owned, back = owned[n:], owned[:n]
            space.give(back[::-1])
        else:
            there = space.free_bytes
            found = space.take_each(pages * PAGE, n)
            assert len(found) == n or not space.take_each(pages * PAGE, 1)
            assert space.free_bytes == there - len(found) * pages * PAGE
            owned = sorted([*owned, *found], key=lambda one: one.off * 7919 % 104729)
        taken = {(one.segment, one.off + at) for one in owned for at in range(0, one.length, PAGE)}
        assert len(taken) == len(owned) * pages and space.free_bytes == (64 - len(taken)) * PAGE
        space.check()


def test_newcomers_that_lose_cost_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """For as many as came, the worst of a cache were taken out of its heap and filed again, one by
    one, while every request waited: a second for a long prompt that nobody asked for again."""
    cache = ChunkCache(64 * 2 * PAGE, {0: PAGE, 1: PAGE}, 1, eviction="importance")
    windows = np.arange(64)
    cache.publish(cache.admit(7, 64, 0, windows, np.full(64, 5.0))[1])
    filed, refile = list[int](), MinHeap._refile
    monkeypatch.setattr(MinHeap, "_refile", lambda *args: (filed.append(1), refile(*args))[1])
    assert len(cache.admit(8, 64, 0, windows, np.full(64, 4.0))[1]) == 0
    assert not filed and cache.occupancy() == {7: 64}
    ranks = np.full(64, 4.0)
    ranks[[3, 60]] = 6.0
    won, entries = cache.admit(8, 64, 0, windows, ranks)
    cache.publish(entries)
    assert won.tolist() == [3, 60] and cache.occupancy() == {7: 62, 8: 2}
    cache.check()


def test_chunks_that_go_together_go_in_one_step() -> None:
    """Each chunk's space was given back, and taken, by itself, for which all holes of the cache
    were copied: with 16,000 chunks of a prefix and 14,000 holes requests waited for seconds."""
    cache = ChunkCache(64 * 2 * PAGE, {0: PAGE, 1: PAGE}, 1)
    calls = list[str]()

    def counted(name: str) -> None:
        real = getattr(cache.tier._space, name)
        setattr(cache.tier._space, name, lambda *args: (calls.append(name), real(*args))[1])

    for name in ("_with", "_without"):
        counted(name)
    for window in range(32):  # two spans' chunks in turns
        for span in (7, 8):
            cache.publish(cache.admit(span, 32, 0, np.array([window]))[1])
    calls.clear()
    cache.drop_span(7)
    assert calls == ["_with"] and cache.tier.usage().free == 32 * 2 * PAGE
    cache.publish(cache.admit(9, 32, 0, np.arange(32))[1])
    assert calls == ["_with", "_without"] and cache.occupancy() == {8: 32, 9: 32}
    cache.check()


@pytest.mark.parametrize(
    "extent",
    [
        Extent(0, 2 * PAGE, 2 * PAGE),  # begins where something is
        Extent(0, 4 * PAGE, PAGE),  # lies in it
        Extent(0, PAGE, 3 * PAGE),  # ends in it
        Extent(0, 0, 8 * PAGE),
        Extent(0, 7 * PAGE, 2 * PAGE),  # ends after the segment
        Extent(0, 8 * PAGE, PAGE),
        Extent(0, PAGE, 0),  # of no size: it would cut the free space there in two
        Extent(0, PAGE, -PAGE),
        Extent(1, 0, PAGE),
    ],
)
def test_only_what_is_wholly_free_may_be_claimed(extent: Extent) -> None:
    """A scan claims what headers say of themselves: two that overlap are not both whole."""
    space = Space()
    space.add(0, 8 * PAGE)
    space.claim([Extent(0, 2 * PAGE, 4 * PAGE)])
    with pytest.raises(ValueError, match="are not free"):
        space.claim([extent])
    space.check()
    assert space.free_bytes == 4 * PAGE
    assert space.free_parts([Extent(0, 0, 8 * PAGE)]) == [
        Extent(0, 0, 2 * PAGE),
        Extent(0, 6 * PAGE, 2 * PAGE),
    ]
    assert space.free_parts([Extent(0, 2 * PAGE, 4 * PAGE)]) == []


def test_a_read_behind_the_end_of_its_slot_is_refused() -> None:
    """The last part's length was subtracted, and what was left fitted into that part again."""
    slot = Slot((Extent(0, 4 * PAGE, 4 * PAGE),))
    with pytest.raises(AssertionError, match="outside its slot"):
        coalesce([Read(slot, 5 * PAGE, aligned(PAGE), None, PAGE)])


_PLACES = st.sets(st.tuples(st.integers(0, 1), st.integers(0, 11)), max_size=16)


@given(_PLACES, _PLACES)
@settings(max_examples=200, deadline=None)
def test_what_of_some_extents_is_in_none_of_others(
    parts: set[tuple[int, int]], others: set[tuple[int, int]]
) -> None:
    found = outside(_extents(parts), sorted(_extents(others)))
    assert [place for extent in found for place in _places(extent)] == sorted(parts - others)


def _extents(places: set[tuple[int, int]]) -> list[Extent]:
    """One for each run of pages."""
    merged: list[Extent] = []
    for segment, page in sorted(places):
        if merged and (merged[-1].segment, sum(merged[-1][1:])) == (segment, page * PAGE):
            merged[-1] = merged[-1]._replace(length=merged[-1].length + PAGE)
        else:
            merged.append(Extent(segment, page * PAGE, PAGE))
    return merged


def _places(extent: Extent) -> list[tuple[int, int]]:
    first, n = extent.off // PAGE, extent.length // PAGE
    return [(extent.segment, page) for page in range(first, first + n)]


def _largest_run(taken: np.ndarray) -> int:
    runs = [len(run) for row in taken for run in "".join("x" if t else "." for t in row).split("x")]
    return max(runs)


def test_buffers_are_aligned_reused_and_counted() -> None:
    pool = BufferPool(64 * 1024)
    a = pool.acquire(10_000)
    assert a is not None and a.array.ctypes.data % PAGE == 0 and len(a.array) == 10_000
    a.retain()
    a.release()
    assert pool.used_bytes == 12288
    assert pool.acquire(60_000) is None
    address = a.array.ctypes.data
    a.release()
    b = pool.acquire(9_000)
    assert b is not None and b.array.ctypes.data == address
    with pytest.raises(AssertionError):
        a.release()


def test_large_buffers_begin_at_huge_pages_and_are_of_whole_ones() -> None:
    """Direct reads into small pages took a quarter longer for rows of 1 KiB: at 1.8 MiB a plane was
    too small for huge pages to be asked for, and what got them began anywhere."""
    huge = 2 << 20
    for n_bytes in (huge, huge + PAGE, 5 * huge - 1):
        assert aligned(n_bytes).ctypes.data % huge == 0 and len(aligned(n_bytes)) >= n_bytes
    pool = BufferPool(None)
    one = pool.acquire(huge * 4 // 5)
    assert one.array.ctypes.data % huge == 0 and pool.used_bytes == huge
    address = one.array.ctypes.data
    one.release()
    assert pool.acquire(huge * 9 // 10).array.ctypes.data == address
    assert size_class(huge * 9 // 20) < huge  # no huge page where much would be wasted
    assert size_class(huge * 11 // 10) < 2 * huge


def test_a_buffer_is_granted_as_soon_as_another_is_released() -> None:
    pool = BufferPool(PAGE)
    held = pool.acquire(PAGE)
    assert held is not None and pool.acquire(PAGE) is None
    waiting = threading.Thread(target=lambda: granted.append(pool.acquire(PAGE, wait_s=60)))
    granted: list[object] = []
    waiting.start()
    held.release()
    waiting.join(60)
    assert granted and granted[0] is not None


def test_more_than_the_budget_is_never_granted() -> None:
    assert BufferPool(PAGE).acquire(2 * PAGE, wait_s=60) is None


def test_lent_memory_comes_back_when_nobody_looks_at_it() -> None:
    """A tensor may outlive the session it came from: its bytes must not become another's."""
    pool = BufferPool(None)
    array = pool.acquire(10_000).lent()
    address = array.ctypes.data
    array[:] = 7
    view = torch.frombuffer(array, dtype=torch.uint8)[100:200]
    del array
    other = pool.acquire(10_000)
    assert other.array.ctypes.data != address
    other.array[:] = 9
    assert pool.used_bytes == size_class(10_000)  # the other's: what was lent is not rented
    assert (view == 7).all()
    del view
    assert pool.acquire(9_500).array.ctypes.data == address


def test_the_system_may_take_what_was_lent_last_before_anybody_asks_again(monkeypatch) -> None:
    """Only the next request marked it so: in idle stores it stayed the process's own, half a
    gigabyte each, and a machine with sixteen of them ran out of memory."""
    marked: list[int] = []
    monkeypatch.setattr("tiers.slots._may_be_taken", lambda m: marked.append(m.ctypes.data))
    pool = BufferPool(None, keep_bytes=4 * PAGE)
    arrays = [pool.acquire(3 * PAGE).lent() for _ in range(2)]
    first, second = (array.ctypes.data for array in arrays)
    del arrays[0]
    assert marked == [first]  # more than the pool keeps for itself
    del arrays[0]
    assert marked == [first, second]
    assert pool.acquire(3 * PAGE).array.ctypes.data == second
    few = BufferPool(None, keep_bytes=4 * PAGE).acquire(3 * PAGE).lent()
    del few
    assert marked == [first, second]


def test_sizes_are_few_and_waste_little() -> None:
    sizes = {size_class(n) for n in range(1, 8 << 20, 999)}
    assert len(sizes) < 90
    for n in range(1, 8 << 20, 999):
        most = n * 1.14 + PAGE
        if size_class(n) % (2 << 20) == 0:
            most *= 2 if size_class(n) == 2 << 20 else 4 / 3
        assert n <= size_class(n) <= most and size_class(n) % PAGE == 0
        assert size_class(size_class(n)) == size_class(n)


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The clock by which a pool decides what is recent."""
    clock = [0.0]
    monkeypatch.setattr("tiers.slots.monotonic", lambda: clock[0])
    return clock


def test_what_came_back_longest_ago_is_let_go_first(now) -> None:
    """Buffers of whole layers once filled all that may be kept: the others were fresh memory."""
    pool = BufferPool(None, keep_bytes=6 * PAGE)
    large, small = pool.acquire(5 * PAGE), [pool.acquire(PAGE) for _ in range(3)]
    kept = {buffer.array.ctypes.data for buffer in small}
    large.release()
    for buffer in small[:2]:
        buffer.release()
    now[0] += 1000
    small[2].release()
    assert {pool.acquire(PAGE).array.ctypes.data for _ in range(3)} == kept
    assert pool.kept_bytes == 0


def test_as_much_is_kept_as_was_out_at_once() -> None:
    """Fresh memory for every layer that was read whole cost a request up to half a second: a pool
    kept 256 MiB, and three layers of rows in flight are more."""
    pool = BufferPool(None, keep_bytes=PAGE)
    rented = [pool.acquire(3 * PAGE) for _ in range(2)]
    lent = pool.acquire(3 * PAGE).lent()
    used = {lent.ctypes.data, *(buffer.array.ctypes.data for buffer in rented)}
    for buffer in rented:
        buffer.release()
    del lent
    again = [pool.acquire(3 * PAGE) for _ in range(3)]
    assert {buffer.array.ctypes.data for buffer in again} == used


def test_a_seldom_large_request_finds_its_memory(now) -> None:
    """Thousands of small buffers came back between two layers that were read whole, and a pool that
    went by their number had forgotten the large ones: one request in a hundred took a quarter of a
    second longer, in which the system found 270 MB for it."""
    pool = BufferPool(None, keep_bytes=PAGE)
    for _ in range(3):
        large = [pool.acquire(16 * PAGE) for _ in range(4)]
        where = {buffer.array.ctypes.data for buffer in large}
        for buffer in large:
            buffer.release()
        for _ in range(5_000):
            pool.acquire(PAGE).release()
            now[0] += 0.01
    again = [pool.acquire(16 * PAGE) for _ in range(4)]
    assert {buffer.array.ctypes.data for buffer in again} == where


def test_requests_of_another_size_leave_a_large_one_its_memory(now) -> None:
    """What is kept is of all sizes: as much as was out at once is too little for two sizes."""
    pool = BufferPool(None, keep_bytes=PAGE)
    places: dict[int, list[set[int]]] = {16: [], 4: []}
    for n_pages in (16, 4, 16, 4):
        held = [pool.acquire(n_pages * PAGE) for _ in range(64 // n_pages)]
        places[n_pages].append({buffer.array.ctypes.data for buffer in held})
        for buffer in held:
            buffer.release()
    assert all(first == again for first, again in places.values())


def test_what_a_burst_needed_is_forgotten(now) -> None:
    """The process must not hold for good what one rush needed."""
    pool = BufferPool(None, keep_bytes=PAGE)
    rush = [pool.acquire(16 * PAGE) for _ in range(8)]
    for buffer in rush:
        buffer.release()
    assert pool.kept_bytes == 128 * PAGE
    for _ in range(1_000):
        pool.acquire(PAGE).release()
        now[0] += 1
    assert pool.kept_bytes <= 2 * PAGE


def test_what_is_kept_and_what_is_out_are_at_most_twice_what_was_out_before(now) -> None:
    pool, rng = BufferPool(None, keep_bytes=PAGE), np.random.default_rng(0)
    held: list = []
    most = 0
    for _ in range(2_000):
        if held and rng.random() < 0.5:
            held.pop(int(rng.integers(len(held)))).release()
        else:
            held.append(pool.acquire(int(rng.integers(1, 40)) * PAGE))
        most = max(most, pool.used_bytes)
        assert pool.used_bytes + pool.kept_bytes <= 2 * most


def test_a_pool_that_gets_no_more_memory_lets_go_of_what_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under `ulimit -v` requests missed beside buffers of another size that nobody used."""
    live, most, mib = [0], 40, 1 << 20

    def freed(n_bytes: int) -> None:
        live[0] -= n_bytes

    def short(n_bytes: int) -> np.ndarray:
        if live[0] + n_bytes > most * mib:
            raise ReadFailed("shortage", "memory: no more")
        memory = aligned(n_bytes)
        live[0] += len(memory)
        weakref.finalize(memory, freed, len(memory))
        return memory

    monkeypatch.setattr("tiers.slots.aligned", short)
    pool = BufferPool(None)
    pool.acquire(24 * mib).release()
    assert pool.kept_bytes == 24 * mib
    held = pool.acquire(32 * mib)
    assert len(held.array) == 32 * mib and pool.kept_bytes == 0
    with pytest.raises(ReadFailed):  # nothing is kept: the rest is in use
        pool.acquire(16 * mib)
    assert pool.used_bytes == 32 * mib
    held.release()


def test_a_write_comes_to_its_turn_beside_reads_that_never_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waited for all of them, and as it did not end, home was read-only after two minutes."""
    monkeypatch.setattr(iopool, "STORE_WAITS_S", 0.0)
    pool, left = IoPool(1), [100_000]
    stored: list[Ticket] = []

    def read() -> None:
        left[0] -= 1
        if left[0] and not (stored and stored[0].done):
            pool.submit(Lane.DEMAND, [read])

    pool.submit(Lane.DEMAND, [read])
    stored.append(pool.submit(Lane.STORE, [lambda: None]))
    assert stored[0].wait(60) and pool.idle(60)
    assert left[0]
    assert pool.close(60)


def test_writes_that_have_waited_take_one_thread_and_not_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a disk that takes longer for a write than writes are to wait, every thread that came free
    took the next write: reads waited for all of them, longer than requests do."""
    monkeypatch.setattr(iopool, "STORE_WAITS_S", 0.0)
    pool, gate, begun, order = IoPool(2), threading.Event(), threading.Event(), list[str]()

    def write() -> None:
        begun.set()
        assert gate.wait(60)
        order.append("write")

    stored = pool.submit(Lane.STORE, [write])
    assert begun.wait(60)
    held, free = threading.Event(), threading.Event()
    other = pool.submit(Lane.DEMAND, [lambda: (held.set(), free.wait(60))])
    assert held.wait(60)
    more = pool.submit(Lane.STORE, [write, write])
    read = pool.submit(Lane.DEMAND, [lambda: order.append("read")])
    free.set()  # one thread comes free, and the other is at a write
    assert other.wait(60) and read.wait(60) and order == ["read"]
    gate.set()
    assert stored.wait(60) and more.wait(60)
    assert pool.close(60)


def test_urgent_lanes_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iopool, "PROMOTE_WAITS_S", 600.0)
    pool, begun, gate, order = IoPool(1), threading.Event(), threading.Event(), []

    def held() -> None:
        begun.set()
        assert gate.wait(60)

    first = pool.submit(Lane.REPACK, [held])
    assert begun.wait(60)  # else it takes one of those below, the first that is queued by then
    tickets = [pool.submit(lane, [lambda lane=lane: order.append(lane)]) for lane in reversed(Lane)]
    gate.set()
    assert first.wait(60) and all(ticket.wait(60) for ticket in tickets)
    assert order == [Lane.DEMAND, Lane.AHEAD, Lane.STORE, Lane.PROMOTE, Lane.REPACK]
    assert pool.close(60)


def test_copies_wait_for_no_medium_and_few_run_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight threads that copied on two processors held each other up. And where all eight threads
    were reading, copies waited for the reads: a prefix of which a quarter was cold took as long as
    if one came after the other."""
    monkeypatch.setattr(iopool, "COPIERS", 2)
    pool, gates = IoPool(3), [threading.Event() for _ in range(8)]
    began = [threading.Event() for _ in range(8)]

    def held(i: int) -> None:
        began[i].set()
        assert gates[i].wait(60)

    jobs = [partial(held, i) for i in range(8)]
    tickets = [pool.submit(Lane.DEMAND, jobs[:3])]
    assert all(one.wait(60) for one in began[:3])  # all that may wait for a medium
    tickets.append(pool.submit(Lane.DEMAND, jobs[3:4]))
    tickets.append(pool.submit(Lane.AHEAD, jobs[4:7], copies=True))
    assert all(one.wait(60) for one in began[4:6])  # behind the reads, and all that may copy
    tickets.append(pool.submit(Lane.DEMAND, jobs[7:], copies=True))
    assert pool.depth()[:2] == [2, 1]
    gates[0].set()
    assert began[3].wait(60)  # by the thread that read: a copy would be one too many
    assert pool.depth()[:2] == [1, 1]
    gates[4].set()
    assert began[7].wait(60)  # the more urgent one
    gates[5].set()
    assert began[6].wait(60)
    for gate in gates:
        gate.set()
    assert all(ticket.wait(60) for ticket in tickets) and pool.close(60)


def test_beside_copies_that_wait_nothing_runs_that_nobody_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads that may not copy took chunks that climb instead, which are copied, too."""
    monkeypatch.setattr(iopool, "COPIERS", 1)
    monkeypatch.setattr(iopool, "PROMOTE_WAITS_S", 600.0)
    pool, gate, began, ran = IoPool(3), threading.Event(), threading.Event(), list[str]()

    def held() -> None:
        began.set()
        assert gate.wait(60)

    first = pool.submit(Lane.DEMAND, [held, lambda: ran.append("copy")], copies=True)
    assert began.wait(60)
    behind = pool.submit(Lane.PROMOTE, [lambda: ran.append("behind")])
    stored = pool.submit(Lane.STORE, [lambda: ran.append("store")])
    assert stored.wait(60) and ran == ["store"]
    assert not pool.is_stuck(60)
    gate.set()
    assert first.wait(60) and behind.wait(60)
    assert ran == ["store", "copy", "behind"] and pool.close(60)


@pytest.mark.parametrize("copies", [False, True])
def test_under_requests_that_never_pause_promotions_have_a_tenth_of_a_thread(
    monkeypatch: pytest.MonkeyPatch, copies: bool
) -> None:
    """They had nothing: what lay in the caches as the load began lay there as long as it lasted,
    none of it after a restart."""
    monkeypatch.setattr(iopool, "COPIERS", 1)
    now, ran = [1000.0], list[str]()
    monkeypatch.setattr(iopool, "monotonic", lambda: now[0])
    pool, began, gate = IoPool(1), threading.Event(), threading.Event()

    def held() -> None:
        began.set()
        assert gate.wait(60)

    def took(what: str, seconds: float) -> None:
        ran.append(what)
        now[0] += seconds

    first = pool.submit(Lane.DEMAND, [held], copies=copies)
    assert began.wait(60)
    demands = pool.submit(Lane.DEMAND, [partial(took, "d", 0.125)] * 40, copies=copies)
    behind = pool.submit(Lane.PROMOTE, [partial(took, "p", 0.25)] * 3, copies=copies)
    last = pool.submit(Lane.REPACK, [partial(took, "r", 0.125)], copies=copies)
    gate.set()
    assert first.wait(60) and demands.wait(60) and behind.wait(60) and last.wait(60)
    # The first after half a second, each other after a rest of nine times what one takes.
    assert "".join(ran) == "dddd" + "p" + 18 * "d" + "p" + 18 * "d" + "p" + "r"
    assert pool.close(60)


def test_promotions_wait_no_longer_where_others_threads_are_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies that always wait kept those from their turn that read, beside threads with nothing to
    do: they are woken."""
    monkeypatch.setattr(iopool, "COPIERS", 1)
    now, ran = [1000.0], threading.Event()
    monkeypatch.setattr(iopool, "monotonic", lambda: now[0])
    pool, began, gate = IoPool(1), threading.Event(), threading.Event()

    def held() -> None:
        began.set()
        assert gate.wait(60)

    def sees() -> None:
        assert ran.wait(60), "a read waits for copies that never end"

    tickets = [pool.submit(Lane.DEMAND, [held, sees, sees], copies=True)]
    assert began.wait(60)
    tickets.append(pool.submit(Lane.PROMOTE, [ran.set]))
    now[0] += 1
    gate.set()
    assert all(ticket.wait(60) for ticket in tickets) and pool.close(60)


def test_where_all_that_may_copy_hang_no_read_could_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all threads could hang in copies, so leases were hits, and each waited out its limit."""
    monkeypatch.setattr(iopool, "COPIERS", 1)
    pool, gate, began = IoPool(3), threading.Event(), threading.Event()
    ticket = pool.submit(
        Lane.DEMAND, [lambda: began.set() or (gate.wait(60) and None)], copies=True
    )
    assert began.wait(60)
    now = iopool.monotonic()
    monkeypatch.setattr(iopool, "monotonic", lambda: now + 10)
    assert pool.is_stuck(5) and pool.n_stuck(5) == 1 and not pool.is_stuck(15)
    gate.set()
    assert ticket.wait(60) and pool.idle(60) and not pool.is_stuck(5)
    assert pool.close(60)


def test_what_nobody_waits_for_keeps_to_one_thread_and_all_of_it_comes_to_its_turn() -> None:
    """Eight threads copying at once cost the next demand its processors. When that one thread is
    called to something urgent, it must not take along the turn of what waits behind it."""
    pool, gates, ran = IoPool(3), [threading.Event() for _ in range(3)], []
    began = [threading.Event() for _ in range(3)]

    def held(i: int) -> None:
        began[i].set()
        assert gates[i].wait(60)
        ran.append(i)

    first = pool.submit(Lane.PROMOTE, [lambda: held(0)])
    assert began[0].wait(60)
    second = pool.submit(Lane.REPACK, [lambda: held(1)])
    urgent = pool.submit(Lane.DEMAND, [lambda: ran.append("d"), lambda: ran.append("d")])
    assert urgent.wait(60) and ran == ["d", "d"] and not began[1].is_set()
    pool.submit(Lane.DEMAND, [lambda: held(2)])
    assert began[2].wait(60)
    gates[0].set()
    assert first.wait(60) and began[1].wait(60)  # while one is still held at a demand
    gates[1].set(), gates[2].set()
    assert second.wait(60) and pool.close(60)
    assert sorted(map(str, ran)) == ["0", "1", "2", "d", "d"]


def test_what_waits_for_that_thread_need_not_be_of_its_kind() -> None:
    """A read that nobody waited for ended, and its thread was called to something urgent: a copy
    that nobody waited for stayed where it was, beside threads that had nothing to do."""
    pool, gates = IoPool(1), [threading.Event() for _ in range(2)]
    began = [threading.Event() for _ in range(2)]

    def held(i: int) -> None:
        began[i].set()
        assert gates[i].wait(60)

    tickets = [pool.submit(Lane.PROMOTE, [partial(held, 0)])]
    assert began[0].wait(60)
    tickets.append(pool.submit(Lane.DEMAND, [partial(held, 1)]))
    behind = pool.submit(Lane.PROMOTE, [lambda: None], copies=True)
    gates[0].set()
    assert began[1].wait(60) and behind.wait(60)
    gates[1].set()
    assert all(ticket.wait(60) for ticket in tickets) and pool.close(60)


def test_closing_runs_what_is_queued_behind_one_thread_and_ends_them_all() -> None:
    pool, gate, ran = IoPool(3), threading.Event(), []
    pool.submit(Lane.PROMOTE, [lambda: gate.wait(60) and None])
    pool.submit(Lane.PROMOTE, [lambda i=i: ran.append(i) for i in range(5)])
    closing = threading.Thread(target=pool.close, args=(60,))
    closing.start()
    gate.set()
    closing.join(60)
    assert ran == list(range(5)) and not closing.is_alive()


def test_ctrl_c_in_close_does_not_make_a_thread_count_as_ended() -> None:
    """CPython before 3.13 takes a thread for ended when a signal has cut off a `join` of it: a
    second close said that all had ended, files were closed and a shard unlocked during a write, and
    the write landed in the next store's rows."""
    pool, gate, ran = IoPool(2), threading.Event(), list[int]()
    pool.submit(Lane.STORE, [lambda: gate.wait(60) and ran.append(1)])
    main = threading.main_thread().ident

    over = threading.Event()

    def ctrl_c() -> None:
        until(lambda: any(thread._ended._gates for thread in pool._threads), 10)
        while not over.wait(0.05):  # again: Python misses one that comes just before it waits
            signal.pthread_kill(main or 0, signal.SIGINT)

    def once(*_: object) -> None:
        if not over.is_set():
            over.set()
            raise KeyboardInterrupt

    struck, before = threading.Thread(target=ctrl_c), signal.signal(signal.SIGINT, once)
    try:
        with pytest.raises(KeyboardInterrupt):
            struck.start()
            pool.close(60)
    finally:
        over.set()
        struck.join()
        signal.signal(signal.SIGINT, before)
    assert not pool.close(0.0) and not ran
    gate.set()
    assert pool.close(60) and ran == [1]


def test_what_a_caller_cannot_wait_for_it_runs_itself() -> None:
    """It runs only tasks of its own that no thread has begun."""
    pool, gate, begun, ran = IoPool(1), threading.Event(), threading.Event(), []

    def held() -> None:
        begun.set()
        assert gate.wait(60)
        ran.append(threading.current_thread())

    mine = [pool.submit(Lane.PROMOTE, [held])]
    others = pool.submit(Lane.PROMOTE, [lambda: ran.append("another's")])
    note = [lambda: ran.append(threading.current_thread())]
    mine.append(pool.submit(Lane.PROMOTE, note * 2))
    assert begun.wait(60)
    pool.run_here(Lane.PROMOTE, mine)
    assert ran == [threading.current_thread()] * 2 and mine[1].done and not mine[0].done
    gate.set()
    assert mine[0].wait(60) and others.wait(60)
    assert ran[2] in [thread._thread for thread in pool._threads] and ran[3:] == ["another's"]
    assert pool.close(60)


def test_ctrl_c_in_what_a_caller_runs_itself_leaves_the_rest_to_the_threads() -> None:
    """It was kept for the one that waits: the caller went on, and each later close raised it."""
    pool, gate, begun, ran = IoPool(1), threading.Event(), threading.Event(), list[object]()

    def held() -> None:
        begun.set()
        assert gate.wait(60)

    def interrupted() -> None:
        raise KeyboardInterrupt

    pool.submit(Lane.PROMOTE, [held])
    others = pool.submit(Lane.PROMOTE, [lambda: ran.append("another's")])
    tasks = [interrupted, lambda: ran.append(1), lambda: ran.append(2)]
    mine = [pool.submit(Lane.PROMOTE, [task]) for task in tasks]
    assert begun.wait(60)
    with pytest.raises(KeyboardInterrupt):
        pool.run_here(Lane.PROMOTE, mine)
    assert mine[0].done and not ran
    gate.set()
    assert all(ticket.over(60) for ticket in (*mine, others))
    assert pool.close(60)
    assert ran == [1, 2, "another's"]


def test_a_callback_that_raises_takes_no_thread_with_it(caplog: pytest.LogCaptureFixture) -> None:
    """The thread was gone but counted as busy: what comes last got no turn any more."""
    pool, gate, ran = IoPool(1), threading.Event(), []

    def broken() -> None:
        raise ValueError("not thought of")

    ticket = pool.submit(Lane.PROMOTE, [lambda: gate.wait(60) and None])
    ticket.then(broken)
    ticket.then(lambda: ran.append("the other one"))
    gate.set()
    assert pool.submit(Lane.PROMOTE, [lambda: ran.append("the next one")]).wait(60)
    ticket.then(broken)  # called at once: no affair of the caller's either
    assert ran == ["the other one", "the next one"]
    assert pool.idle(60) and pool.close(60)
    assert caplog.text.count("ValueError: not thought of") == 2


def test_many_tickets_are_waited_for_as_few_are() -> None:
    """Where some hundreds had ended, each was called from within the one before it."""
    called = []
    when_all([], lambda: called.append("of none"))
    when_all([Ticket(0)] * 5000, lambda: called.append("of all that are done"))
    left = [Ticket(1) for _ in range(3)]
    when_all([*left, Ticket(0)], lambda: called.append("of all"))
    for ticket in reversed(left):
        assert called == ["of none", "of all that are done"]
        ticket.run(lambda: None)
    assert called[2:] == ["of all"]


def test_idle_waits_for_what_runs_and_for_what_that_queues() -> None:
    """Copies of one request ran beside the next one's reads: a free thread had taken what was to
    wait for the busy thread."""
    pool, going_on, ran = IoPool(2), threading.Event(), []

    def slow() -> None:
        assert going_on.wait(60)
        pool.submit(Lane.PROMOTE, [lambda: ran.append("queued by it")])

    assert pool.idle(0)
    pool.submit(Lane.PROMOTE, [slow])
    assert not pool.idle(0)
    going_on.set()
    assert pool.idle(60) and ran
    assert pool.close(60)


def test_a_failed_task_fails_its_ticket_and_the_rest_of_it_is_skipped() -> None:
    pool, ran = IoPool(1), []

    def broken() -> None:
        raise OSError("no")

    ticket = pool.submit(Lane.DEMAND, [broken, lambda: ran.append(1)])
    with pytest.raises(OSError, match="no"):
        ticket.wait(60)
    assert not ran
    pool.close(60)


def test_cancelled_tasks_do_not_run_and_callbacks_come_once() -> None:
    pool, gate, ran, called = IoPool(1), threading.Event(), [], []
    blocker = pool.submit(Lane.DEMAND, [lambda: gate.wait(60) and None])
    ticket = pool.submit(Lane.DEMAND, [lambda: ran.append(1)] * 3)
    ticket.then(lambda: called.append("ended"))
    ticket.cancel()
    assert not ticket.wait(0)
    gate.set()
    assert blocker.wait(60)
    with pytest.raises(Cancelled):
        ticket.wait(60)
    pool.close(60)
    ticket.then(lambda: called.append("late"))
    assert (ran, called) == ([], ["ended", "late"])


def test_a_closed_pool_cancels_what_comes() -> None:
    pool, ran = IoPool(2), []
    pool.close(60)
    with pytest.raises(Cancelled):  # never "done": nobody may take what was not read
        pool.submit(Lane.DEMAND, [lambda: ran.append(1)]).wait(60)
    assert not ran


def test_a_thread_that_finds_no_memory_between_tasks_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread ended; once the last one had, every read was late and every close waited."""
    turns, next_one = [], IoPool._next

    def short_of_memory(pool: IoPool, copies: bool) -> object:
        turns.append(1)
        if len(turns) % 2:
            raise MemoryError
        return next_one(pool, copies)

    monkeypatch.setattr(IoPool, "_next", short_of_memory)
    pool, ran = IoPool(1), []
    for _ in range(3):
        assert pool.submit(Lane.PROMOTE, [lambda: ran.append(1)]).wait(60)
    assert len(ran) == 3 and pool.idle(60) and pool.close(60)
