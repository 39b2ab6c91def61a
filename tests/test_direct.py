"""Rows that come from memory straight to the place where they are used."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MIB, kv_of, prompt, put_prompt, wait_for_promotions
from test_order import scores_of

import impress
from impress.policy import AllHeads, Exact, Policy, Random, Recency
from impress.read.copying import PiecesOf
from impress.read.direct import Direct
from impress.read.flights import key_of
from impress.read.parts import parts_of
from impress.read.whole import Whole
from impress.spans.layout import K, V
from impress.spans.rows import take_rows
from tiers.base import Pieces
from tiers.iopool import Lane
from tiers.slots import Buffer, aligned

Open = Callable[..., impress.PrefixStore]

#: A row of K is a piece, and a row of V is a piece of twice the size.
GEOMETRY = impress.Geometry(2, 16, 16, 64, "float32", 128)
#: Four rows of K share a piece, and two of V.
SHARED = impress.Geometry(2, 16, 4, 64, "float32", 128)
N = 640


def chunk_bytes(geometry: impress.Geometry) -> int:
    return 64 * geometry.n_kv_heads * (64 + 128) * 4


CHUNK = chunk_bytes(GEOMETRY)


def token_major(geometry: impress.Geometry = GEOMETRY) -> list:
    """Tensors that rows are read into directly."""
    return [
        [
            torch.frombuffer(aligned(N * geometry.n_kv_heads * dim * 4), dtype=torch.float32)
            .view(N, geometry.n_kv_heads, dim)
            .transpose(0, 1)
            for dim in (64, 128)
        ]
        for _ in range(2)
    ]


def head_major(geometry: impress.Geometry = GEOMETRY) -> list:
    return [[torch.empty(geometry.n_kv_heads, N, dim) for dim in (64, 128)] for _ in range(2)]


#: Where whole rows go: to the session's tensors, or to the caller's, of two kinds.
OUTS = (lambda geometry: None, token_major, head_major)


def ask(
    store: impress.PrefixStore, tokens: np.ndarray, policy: Policy, outs: list | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray, dict]]:
    """Every layer's rows, what they should be, and where they came from."""
    keys, values = kv_of(tokens, store.geometry)
    query, lse = torch.ones(16, 2, 64), torch.zeros(16, 2)
    with store.lease(tokens) as lease, lease.session(policy) as session:
        if outs is not None:
            session.prefetch(outs)
        for layer in range(store.geometry.n_layers):
            k, v, at = session.retrieve(layer, query, suffix_lse=lse)
            assert outs is None or (k.data_ptr(), v.data_ptr()) == tuple(
                out.data_ptr() for out in outs[layer]
            )
            line = session.report().per_layer[-1]["rows"]
            yield k, keys[layer][:, at.numpy()], line
            yield v, values[layer][:, at.numpy()], line


def test_what_memory_has_is_found_by_those_who_copy_once_home_was_asked(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request itself found it, and sent no read to home before that: 0.1 ms a layer ahead of
    the reads that take longest. What finding it beside them takes is in each line."""
    store = open_store(GEOMETRY, dram_bytes=9 * CHUNK)
    tokens = prompt(N)
    assert put_prompt(store, tokens, importance=scores_of(2, N), wait_s=30).wait(60)
    for _ in ask(store, tokens, Exact()):
        pass
    wait_for_promotions(store)
    read, found, asked = store.ssd.read, PiecesOf.found, threading.Event()
    threads, mixed = set[int](), False

    def reading(*given: Any) -> None:
        asked.set()
        read(*given)

    def finding(pieces: PiecesOf, *which: int) -> Pieces:
        assert asked.wait(60), "before home was asked"
        threads.add(threading.get_ident())
        return found(pieces, *which)

    monkeypatch.setattr(store.ssd, "read", reading)
    monkeypatch.setattr(PiecesOf, "found", finding)
    for got, want, by_tier in ask(store, tokens, Random(0.5, 1)):
        assert np.array_equal(got.numpy(), want)
        mixed |= set(by_tier) == {"dram", "ssd"}
    assert mixed and threads and threading.get_ident() not in threads
    with store.lease(tokens) as lease, lease.session(Random(0.5, 1)) as session:
        session.retrieve(0, torch.ones(16, 2, 64), suffix_lse=torch.zeros(16, 2))
        (line,) = session.report().per_layer
    assert line["map_beside_ms"] > 0


@pytest.mark.parametrize("geometry", [GEOMETRY, SHARED], ids=["a row a piece", "rows share one"])
@pytest.mark.parametrize(
    "packed", [(False, False), (True, True), (True, False)],
    ids=["by position", "packed", "packed and by position"],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(3))
def test_rows_are_the_same_whoever_has_them(
    open_store: Open, geometry: impress.Geometry, packed: tuple[bool, bool], seed: int
) -> None:
    """Some chunks on the device, some in memory, some at home only; one prefix of two spans, or
    its first part, whose rows may lie among those of the rest."""
    chunk = chunk_bytes(geometry)
    store = open_store(
        geometry, hbm_bytes=5 * chunk, hbm_device="cpu", dram_bytes=9 * chunk, read_gap_bytes=16384
    )
    rng = np.random.default_rng(seed)
    tokens = prompt(N, seed)
    for n, is_packed in zip((256, N), packed, strict=True):
        order = rng.random((2, n)) if is_packed else None
        assert put_prompt(store, tokens[:n], importance=order, wait_s=30).wait(60)
    ways = set()
    for _ in range(16):
        keep = float(rng.choice([0.003, 0.05, 0.3, 0.9]))
        policies = (Random(keep, int(rng.integers(99))), Recency(keep), AllHeads(keep), Exact())
        policy = policies[rng.choice(4, p=(0.5, 0.15, 0.1, 0.25))]
        n = int(rng.choice((N, 448), p=(0.8, 0.2)))
        into = rng.choice(OUTS) if isinstance(policy, Exact) and n == N else OUTS[0]
        for got, want, by_tier in ask(store, tokens[:n], policy, into(geometry)):
            assert np.array_equal(got.numpy(), want)
            ways.add((isinstance(policy, Exact), frozenset(by_tier)))
        wait_for_promotions(store)
        store.check()
    assert any(way == {"ssd"} for _, way in ways)
    for whole in (False, True):  # mixed in one read
        assert any(way > {"ssd"} for was_whole, way in ways if was_whole == whole)
    assert store.buffers.used_bytes == 0


def test_two_requests_for_a_packed_prefix_have_the_same_rows(open_store: Open) -> None:
    """The second takes from the first what comes from home: its rows lie in the same places."""
    store = open_store(GEOMETRY, dram_bytes=4 * CHUNK, io_threads=2)
    tokens = prompt(N)
    order = np.random.default_rng(1).random((2, N))
    assert put_prompt(store, tokens, importance=order, wait_s=30).wait(60)
    for _ in range(3):
        both = zip(*(ask(store, tokens, Exact(), into(GEOMETRY)) for into in OUTS[:2]), strict=True)
        for (mine, want, _), (theirs, _, _) in both:
            assert np.array_equal(mine.numpy(), want) and np.array_equal(theirs.numpy(), want)
        wait_for_promotions(store)
    assert store.stats()["rows_from"]["dram"] and store.buffers.used_bytes == 0


def packed_store(open_store: Open, **config: Any) -> impress.PrefixStore:
    """A store with a packed prefix, in pieces that hold several rows each, all of it in DRAM."""
    store = open_store(SHARED, dram_bytes=32 * chunk_bytes(SHARED), io_threads=1, **config)
    put_prompt(store, prompt(N), importance=scores_of(2, N), wait_s=30).wait(60)
    for got, want, by_tier in ask(store, prompt(N), Exact()):
        assert np.array_equal(got.numpy(), want) and by_tier == {"ssd": N}
    wait_for_promotions(store)
    return store


def forget_a_chunk(store: impress.PrefixStore) -> None:
    """Drop one chunk of each layer from memory: home has to give it again."""
    (record,) = store.catalog.records()
    for layer in range(2):
        store._copies.chunks[-1].drop_windows(record.span_id, layer, np.array([4]))


def takes(clock: list[float], seconds: float, real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, made to take that many seconds by a clock of ours."""

    def slow(*args: Any) -> Any:
        clock[0] += seconds
        return real(*args)

    return slow


def test_putting_rows_in_order_is_in_the_wait(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's line was written before its rows were put in order, so no number had that time in
    it. Here by a clock of ours; V's rows are put in order by another thread."""
    store, waited = packed_store(open_store), [1000.0]
    monkeypatch.setattr("impress.read.session.monotonic", lambda: waited[0])
    monkeypatch.setattr("impress.read.load.take_rows", takes(waited, 0.05, take_rows))
    with store.lease(prompt(N)) as lease, lease.session() as session:
        for layer, outs in enumerate(head_major(SHARED)):
            session.retrieve(layer, None, out=tuple(outs))
        lines = session.report().per_layer
    assert [line["wait_ms"] for line in lines] == [pytest.approx(100)] * 2, "of K and of V"


def test_rows_are_put_in_order_though_every_thread_is_at_work(open_store: Open) -> None:
    """V's are left to another thread; where none comes to it, to the one that waits for them."""
    store = packed_store(open_store)
    outs = head_major(SHARED)
    with store.lease(prompt(N)) as lease, lease.session() as session:
        session.prefetch(outs)
        wait_for_promotions(store)  # all of it is read
        with busy_thread(store):
            assert_right(session)
    assert store.buffers.used_bytes == 0


@pytest.mark.parametrize("n", [N, 448], ids=["all of a span", "a part of one"])
def test_finding_rows_in_memory_is_in_the_map(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """Where the rows in memory go was found out off the clock: that time was in no number."""
    store, mapped = packed_store(open_store), [1000.0]
    monkeypatch.setattr("impress.stats.monotonic", lambda: mapped[0])
    for way in (Direct, Whole):
        monkeypatch.setattr(way, "copies", takes(mapped, 0.02, way.copies))
    with store.lease(prompt(N)[:n]) as lease, lease.session() as session:
        for layer in range(2):
            session.retrieve(layer, None)
        lines = session.report().per_layer
    for line in lines:
        assert line["rows"] == {"dram": n}
        assert line["map_ms"] == pytest.approx(20)


def test_rows_are_not_there_twice_before_they_are_asked_for(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a packed prefix that no cache has, each layer, as it was begun, took memory for its rows
    in order beside what they are read into, and kept it until the end: twice the prefix."""
    store = packed_store(open_store)
    store.drop_caches()
    alive = rows_lent(monkeypatch)
    with store.lease(prompt(N)) as lease, lease.session() as session:
        session.prefetch()
        assert store._pool.idle(60) and not alive
        assert_right(session)


def test_nobody_else_writes_to_memory_given_late(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V's rows were put in order by another thread straight in the caller's memory. A session does
    not know of memory given to a layer under way: after Ctrl-C it said that nothing wrote there
    any more."""
    store, threads = packed_store(open_store), []
    store.drop_caches()

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread())
        if threads[-1] is threading.main_thread():
            assert store._pool.idle(60)  # whatever was left to others is done by them
        return take_rows(*args)

    monkeypatch.setattr("impress.read.load.take_rows", noted)
    monkeypatch.setattr("impress.read.load.LARGE_SLICE", 1)
    with store.lease(prompt(N)[:448]) as lease, lease.session() as session:
        session.prefetch()
        for layer, outs in enumerate(token_major(SHARED)):
            session.retrieve(layer, None, out=tuple(out[:, :448] for out in outs))
    assert threads == [threading.current_thread()] * 4


def test_rows_of_a_request_are_not_kept_by_what_waits_to_climb(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was to climb from a layer's buffers kept all its rows, which lie beside them: those of
    up to 1,024 layers, long after their caller had let them go, and no limit knew of them."""
    store, alive = packed_store(open_store), rows_lent(monkeypatch)
    forget_a_chunk(store)
    with store.lease(prompt(N)) as lease, lease.session() as session:
        session.prefetch()
        wait_for_promotions(store)  # all of it is read
        with busy_thread(store):
            assert_right(session)
            session.close()
            assert store._pool.depth()[Lane.PROMOTE] == 2, "a layer's chunk each"
            gc.collect()
            assert alive and not any(rows() is not None for rows in alive)
    wait_for_promotions(store)
    assert store.stats()["promotions"] == {"dram": 22}, "they climb all the same"
    assert store.buffers.used_bytes == 0


def test_what_came_straight_from_memory_has_nothing_to_climb_from(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer of a packed prefix that was wholly in DRAM queued a task that had nothing to do
    and kept the layer's rows. What is to climb is read again, after everything else."""
    store = packed_store(open_store, hbm_bytes=32 * chunk_bytes(SHARED), hbm_device="cpu")
    alive = rows_lent(monkeypatch)
    with store.lease(prompt(N)) as lease, lease.session() as session:
        session.prefetch()
        wait_for_promotions(store)
        with busy_thread(store):
            assert_right(session)
            session.close()
            assert store._pool.depth()[Lane.PROMOTE] == 1, "only what the request showed"
            gc.collect()
            assert alive and not any(rows() is not None for rows in alive)
    wait_for_promotions(store)
    assert store.stats()["promotions"] == {"dram": 20, "hbm": 20}
    assert store.buffers.used_bytes == 0


def rows_lent(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[np.ndarray]]:
    """The rows that requests are given from here on, as weak references."""
    lent, found = Buffer.lent, list[weakref.ref[np.ndarray]]()

    def noted(buffer: Buffer) -> np.ndarray:
        rows = lent(buffer)
        found.append(weakref.ref(rows))
        return rows

    monkeypatch.setattr(Buffer, "lent", noted)
    return found


@contextmanager
def busy_thread(store: impress.PrefixStore) -> Iterator[None]:
    """Within the block, the only I/O thread is busy."""
    go_on, begun = threading.Event(), threading.Event()
    hog = store._pool.submit(Lane.DEMAND, [lambda: begun.set() or (go_on.wait(60) and None)])
    try:
        assert begun.wait(60)
        yield
    finally:
        go_on.set()
        hog.wait(60)


def assert_right(session: Any) -> None:
    """Every layer has its rows; after this nothing holds them."""
    keys, values = kv_of(prompt(N), SHARED)
    for layer in range(2):
        k, v, _ = session.retrieve(layer, None)
        assert np.array_equal(k.numpy(), keys[layer]) and np.array_equal(v.numpy(), values[layer])


def test_rows_outlive_their_session(open_store: Open) -> None:
    """They lie in pooled memory: rows still looked at must not become another request's."""
    store = open_store(GEOMETRY, dram_bytes=4 * MIB)
    tokens = prompt(N)
    assert put_prompt(store, tokens, wait_s=30).wait(60)
    kept = []
    for seed in range(8):
        kept += [(got, want) for got, want, _ in ask(store, tokens, Random(0.2, seed))]
        wait_for_promotions(store)
    for got, want in kept:
        assert np.array_equal(got.numpy(), want)


def test_damage_in_memory_is_a_loss_and_the_next_request_reads_home(open_store: Open) -> None:
    store = open_store(GEOMETRY, dram_bytes=4 * MIB)
    tokens, policy = prompt(256), Recency(0.5)
    put_prompt(store, tokens).wait(60)
    for _ in range(2):
        tiers = [by_tier for _, _, by_tier in ask(store, tokens, policy)]
        wait_for_promotions(store)
    assert tiers == [{"dram": 128}] * 4
    arena = store._copies.chunks[0].tier._arena
    arena[: 8 * CHUNK : 4096] ^= 1
    with pytest.raises(impress.PrefixLost, match="checksum: dram"):
        list(ask(store, tokens, policy))
    for got, want, by_tier in ask(store, tokens, policy):
        assert np.array_equal(got.numpy(), want)
        assert by_tier == {"ssd": 128}


@pytest.mark.parametrize("own", [False, True], ids=["the store's", "the caller's"])
@pytest.mark.parametrize("packed", [False, True], ids=["by position", "packed"])
def test_what_a_caller_does_to_tensors_never_gets_into_a_cache(
    open_store: Open, packed: bool, own: bool
) -> None:
    """An engine used one pair of tensors for all layers, or scaled the keys it got in place: chunks
    climbed from there, and the next request for them lost its prefix to their checksums."""
    store = open_store(GEOMETRY, dram_bytes=64 * CHUNK)
    tokens = prompt(N)
    order = np.random.default_rng(1).random((2, N)) if packed else None
    assert put_prompt(store, tokens, importance=order, wait_s=30).wait(60)
    keys, values = kv_of(tokens, GEOMETRY)
    k_out, v_out = token_major()[0]
    for _ in range(3):
        with store.lease(tokens) as lease, lease.session() as session:
            for layer in range(GEOMETRY.n_layers):
                k, v, _ = session.retrieve(layer, None, out=(k_out, v_out) if own else None)
                assert np.array_equal(k.numpy(), keys[layer])
                assert np.array_equal(v.numpy(), values[layer])
                for tensor in (k, v):
                    tensor.zero_()
        wait_for_promotions(store)
        store.check()
    assert store.buffers.used_bytes == 0


def test_loads_share_a_flight_only_where_bytes_lie_alike(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """For a packed span, loads that bring rows straight and loads that bring chunks had one key."""
    store = open_store(geometry, window=16)
    put_prompt(store, prompt(128), importance=scores_of(2, 128)).wait(60)
    keys = set()
    for n, direct in ((128, True), (128, False), (112, True), (112, False)):
        with store.lease(prompt(128)[:n]) as lease:
            parts = parts_of(lease.sources, 0, None)
        keys.add(key_of(0, (K, V), parts, [], direct=direct))
        assert key_of(0, (K, V), parts, [], direct=direct) in keys
    assert len(keys) == 4
