"""Reading ahead: what it guesses; rows come out the same as without it; nothing is left over."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch
from conftest import flip_a_bit, prompt, said_by_a_child, wait_for_promotions
from hypothesis import given
from hypothesis import strategies as st
from test_sparse import N_TOKENS, SHAPES, asked, fill, kv

import impress
from impress.policy import AllHeads, Contiguous, Paper, Policy, Quality, Random
from impress.read import tickets
from impress.read.ahead import Places, cost, preferred, within
from impress.read.early import Early
from impress.read.parts import Part
from impress.read.plan import home_reads
from impress.read.session import Lease
from impress.spans.layout import K, V
from impress.usage.notes import Note
from tiers.base import Read
from tiers.errors import ReadFailed
from tiers.iopool import Lane
from tiers.ticket import Ticket

Open = Callable[..., impress.PrefixStore]
MIB = 1 << 20
DEEP = {name: replace(shape, n_layers=3) for name, shape in SHAPES.items()}
POLICIES: list[Policy] = [
    Paper(keep=0.25, gate=False), Paper(keep=0.25), Quality(max_missing_mass=0.1),
    Contiguous(keep=0.2, period=2), AllHeads(keep=0.15), Random(keep=0.3),
]  # fmt: skip


# ---- the guess ---------------------------------------------------------------------------------


@given(st.data())
def test_preferred_rows_are_those_chosen_before_then_those_chosen_most(data: Any) -> None:
    n = data.draw(st.integers(1, 12))
    rows = st.lists(st.integers(0, n - 1), unique=True).map(sorted)
    chosen = data.draw(st.none() | rows)
    there = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    shares = st.lists(st.sampled_from([0.0, 0.25, 0.5]), min_size=n, max_size=n)
    average = data.draw(st.none() | shares)
    worth = average or [0.0] * n
    named = set(range(n) if chosen is None else chosen)
    want = sorted(
        (row for row in range(n) if not there[row] and (row in named or worth[row] > 0)),
        key=lambda row: (row not in named, -worth[row], row),
    )
    found = preferred(
        None if chosen is None else np.array(chosen, dtype=np.int64),
        None if average is None else np.array(average, dtype=np.float32), np.array(there),
    )  # fmt: skip
    assert found.tolist() == want


def moved(pieces: set[int], gap: int) -> int:
    """Pieces read, counted one by one: those wanted, and those in a gap that is read through."""
    near = {
        piece for a in pieces for b in pieces if 0 < b - a <= gap + 1 for piece in range(a, b)
    }  # fmt: skip
    return len(pieces | near)


@given(st.data())
def test_as_many_as_fit_the_cap_by_what_is_really_moved(data: Any) -> None:
    n = data.draw(st.integers(1, 24))
    order = np.array(data.draw(st.permutations(range(n))), dtype=np.int64)
    lies = np.array(data.draw(st.permutations(range(n))), dtype=np.int64)
    places = [
        Places(lies // rows, rows, 4096 * size, gap)
        for rows, size, gap in data.draw(
            st.lists(
                st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 2), st.integers(0, 3)),
                min_size=1, max_size=2,
            )
        )
    ]  # fmt: skip
    cap = data.draw(st.integers(0, 4096 * 2 * 2 * n))

    def brute(rows: np.ndarray) -> int:
        return sum(moved(set(p.pieces[rows].tolist()), p.gap) * p.piece_bytes for p in places)

    assert cost(order, places) == brute(order)
    fits = max(k for k in range(n + 1) if brute(order[:k]) <= cap)
    assert within(order, places, cap).tolist() == sorted(order[:fits].tolist())


def test_planes_that_share_their_pieces_have_gaps_of_their_own() -> None:
    """Gaps in values of half the width are read through over twice as many of their smaller pieces.
    The cap was exceeded twofold, as they were counted like those of the keys."""
    lies = np.arange(32)
    keys, values = Places(lies, 1, 8192, 1), Places(lies, 1, 4096, 3)
    rows = np.arange(0, 32, 4)
    assert cost(rows, [keys, values]) == cost(rows, [keys]) + cost(rows, [values])
    assert cost(rows, [values]) == 29 * 4096 and cost(rows, [keys]) == 8 * 8192


# ---- sessions ----------------------------------------------------------------------------------


def ended(session: Any) -> None:
    """Let the read-ahead end, whether or not it succeeds."""
    now = session._foresight._now
    if now is not None and now._ticket is not None:
        tickets.ended([now._ticket], 60)


def bring(
    lease: Lease, policy: Policy, between: Callable[[Any], object] = ended
) -> tuple[list[Any], list[dict[str, Any]]]:
    """(k, v, pos) of every layer, and the report's lines. `between` is called after each layer."""
    geometry = lease.reading.geometry
    with lease.session(policy) as session:
        got = []
        for layer in range(geometry.n_layers):
            query, lse = asked(geometry, layer % 2)  # every other layer asks the same
            k, v, pos = session.retrieve(layer, query, suffix_lse=lse)
            got.append((k.clone(), v.clone(), pos.clone()))
            between(session)
        return got, session.report().per_layer


def fill_deep(store: impress.PrefixStore) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """One prompt in three spans; the middle one is packed, and a second prompt splits the last."""
    tokens = prompt(N_TOKENS)
    keys, values = kv(store.geometry)
    n_layers = store.geometry.n_layers
    scores = np.random.default_rng(0).random((n_layers, N_TOKENS), dtype=np.float32)
    for end in (192, 256, N_TOKENS):
        rows = slice(store.lookup(tokens), end)
        store.store(
            tokens[:end], [k[:, rows] for k in keys], [v[:, rows] for v in values],
            start=rows.start, importance=scores[:, rows] if end != 192 else None,
        ).wait(60)  # fmt: skip
    other = tokens.copy()
    other[-64:] += 1
    store.store(other, keys, values).wait(60)
    return keys, values


def same(found: list[Any], want: list[Any]) -> bool:
    return all(
        torch.equal(a, b)
        for mine, other in zip(found, want, strict=True)
        for a, b in zip(mine, other, strict=True)
    )


#: Bytes of the cap, of DRAM and of an emulated HBM.
TIERS = ((8192, 0, 0), (64 * MIB, 0, 0), (100_000, 200_000, 0), (64 * MIB, 4 * MIB, MIB))
CASES = [("mha", policy) for policy in POLICIES]
CASES += [(shape, policy) for shape in ("gqa", "padded") for policy in POLICIES[:4:3]]


@pytest.mark.parametrize("shape, policy", CASES)
def test_rows_come_out_as_without_reading_ahead(
    open_store: Open, shape: str, policy: Policy
) -> None:
    """From home and from every tier; position order and packed; spans seen whole and in part."""
    common = {"probes": ("heads3-v1", "int4-v2"), "read_gap_bytes": 4096, "durable": False}
    store = open_store(DEEP[shape], **common, dram_bytes=0)
    keys, values = fill_deep(store)
    prompts, want = [prompt(N_TOKENS), prompt(N_TOKENS)[:320]], []
    for tokens in prompts:
        with store.lease(tokens) as lease:
            got, lines = bring(lease, policy)
            assert all(line["ahead_bytes"] == 0 for line in lines)
            want.append(got)
    store.close()
    for cap, dram, hbm in TIERS:
        one = open_store(
            DEEP[shape], **common, prefetch_bytes=cap, dram_bytes=dram, hbm_bytes=hbm,
            hbm_device="cpu", eviction="lru", io_threads=2,
        )  # fmt: skip
        for between, tokens in itertools.product((ended, lambda session: None), prompts):
            with one.lease(tokens) as lease:
                got, lines = bring(lease, policy, between)
            assert same(got, want[tokens is prompts[1]])
            for line, (_, _, pos) in zip(lines, got, strict=True):
                assert sum(line["rows"].values()) == len(pos)
                assert line["ahead_used_bytes"] <= line["ahead_bytes"] <= cap
                assert line["ahead_bytes"] <= line["bytes"].get("ssd", 0)
        if cap == 64 * MIB and not dram:
            assert one.counters["ahead_used_bytes"] > 0
        wait_for_promotions(one)
        one.check()
        assert one.buffers.used_bytes == 0
        one.close()
    for layer, (k, v, pos) in enumerate(want[0]):
        assert torch.equal(k, keys[layer][:, pos]) and torch.equal(v, values[layer][:, pos])


def test_what_was_chosen_before_is_read_ahead_and_not_again(open_store: Open) -> None:
    """Layers that share a selection: all but the first find their rows already read."""
    geometry = replace(SHAPES["mha"], n_layers=4)
    store = open_store(geometry, dram_bytes=0, prefetch_bytes=64 * MIB, read_gap_bytes=0)
    store.store(prompt(N_TOKENS), *kv(geometry)).wait(60)
    with store.lease(prompt(N_TOKENS)) as lease:
        got, lines = bring(lease, Random(keep=1.0))  # a choice of everything, without probes
        (source,) = lease.sources
        for layer in range(4):  # rows that earlier requests chose and these layers will not
            rows = np.arange(N_TOKENS)
            store.history.note(Note(source.span, N_TOKENS, layer, 0, N_TOKENS, rows))
        _, shared = bring(lease, Contiguous(keep=0.25, period=4))
    for line, (_, _, pos) in zip(lines[1:], got[1:], strict=True):
        assert line["ahead_hit_rows"] == len(pos)
        assert line["ahead_used_bytes"] == line["ahead_bytes"] == line["bytes"]["ssd"]
    assert lines[0]["ahead_bytes"] == lines[0]["ahead_hit_rows"] == 0
    # The second layer's keys were not: the first had read all of its own.
    assert [line["ahead_hit_rows"] for line in shared] == [0, 112, 112, 112]
    assert all(line["ahead_used_bytes"] == line["ahead_bytes"] for line in shared)
    wait_for_promotions(store)
    stats = store.stats()
    assert stats["ahead_bytes"] == sum(line["ahead_bytes"] for line in lines + shared)
    assert stats["ahead_used_bytes"] == sum(line["ahead_used_bytes"] for line in lines + shared)


def test_no_keys_are_read_ahead_of_a_layer_that_reads_them_all(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ahead of the layer that begins a period, keys took half of the cap."""
    store = open_store(DEEP["mha"], dram_bytes=0, prefetch_bytes=64 * MIB, read_gap_bytes=0)
    fill_deep(store)
    planes: dict[int, set[int]] = {}

    def noted(part: Part, layer: int, plane: int, *more: Any) -> list[Read]:
        planes.setdefault(layer, set()).add(plane)
        return home_reads(part, layer, plane, *more)

    monkeypatch.setattr("impress.read.early.home_reads", noted)
    with store.lease(prompt(N_TOKENS)) as lease:
        _, lines = bring(lease, Contiguous(keep=0.25, period=2))
    assert planes == {1: {K, V}, 2: {V}}
    assert 0 < lines[2]["ahead_used_bytes"] <= lines[2]["ahead_bytes"]


def test_what_requests_chose_is_read_ahead_where_this_one_did_not(open_store: Open) -> None:
    geometry = impress.Geometry(4, 4, 4, 256, "float32")  # a piece is a row
    store = open_store(geometry, dram_bytes=0, prefetch_bytes=64 * MIB, read_gap_bytes=0)
    fill_deep(store)
    policy = Random(keep=0.1)  # other rows in each layer, the same in every request
    hits = []
    for _ in range(2):
        with store.lease(prompt(N_TOKENS)) as lease:
            # History learns what a query decided: it is told here, as an identifier would tell it.
            got, lines = bring(lease, policy)
            hits.append(sum(line["ahead_hit_rows"] for line in lines))
            wait_for_promotions(store)
            for layer, (_, _, pos) in enumerate(got):
                for source in lease.sources:
                    n_rows = source.held.record.n_windows * store.window
                    first, count = source.held.first * 64, source.count * 64
                    mine = pos.numpy() - source.at * 64 + first
                    mine = mine[(mine >= first) & (mine < first + count)]
                    store.history.note(Note(source.span, n_rows, layer, first, count, mine))
    assert hits[0] < 45 and hits[1] == 3 * 45


def test_what_is_in_a_fast_tier_is_not_read_ahead(open_store: Open) -> None:
    store = open_store(SHAPES["mha"], dram_bytes=64 * MIB, prefetch_bytes=64 * MIB)
    fill(store)
    with store.lease(prompt(N_TOKENS)) as lease:
        with lease.session() as session:
            for layer in range(2):
                session.retrieve(layer, None)
        wait_for_promotions(store)
        _, lines = bring(lease, Random(keep=0.5))
    assert all(line["ahead_bytes"] == 0 and "ssd" not in line["bytes"] for line in lines)


# ---- failures and ends -------------------------------------------------------------------------


def test_a_read_ahead_that_fails_is_as_if_it_had_not_been_made(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(DEEP["mha"], dram_bytes=0, prefetch_bytes=64 * MIB)
    fill_deep(store)
    policy, real = Random(keep=0.6), Early._read

    def fails(self: Early, i: int, first: int, reads: Any) -> None:
        real(self, i, first, reads[:-1])
        self._begun[i][first:] = True
        raise ReadFailed("checksum", "made up")

    with store.lease(prompt(N_TOKENS)) as lease:
        want, _ = bring(lease, policy)
        monkeypatch.setattr(Early, "_read", fails)
        got, lines = bring(lease, policy)
    assert same(got, want)
    assert sum(line["ahead_bytes"] for line in lines) > 0
    assert not store.counters.grouped("lost") and not store.counters["quarantined_spans"]
    wait_for_promotions(store)
    assert store.buffers.used_bytes == 0
    assert store.lookup(prompt(N_TOKENS)) == N_TOKENS


def test_nobody_waits_for_a_read_ahead_that_hangs(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(DEEP["mha"], dram_bytes=0, prefetch_bytes=64 * MIB, io_threads=4)
    fill_deep(store)
    policy, real, under_way = Random(keep=0.6), Early._read, []
    go, begun = threading.Event(), threading.Event()

    def hangs(self: Early, i: int, first: int, reads: Any) -> None:
        if len(under_way) >= 2:  # leave threads for demand reads
            return real(self, i, first, reads)
        self._begun[i][first:] = True
        under_way.append(threading.current_thread())
        begun.set()
        assert go.wait(60)
        return real(self, i, first, reads)

    with store.lease(prompt(N_TOKENS)) as lease:
        want, _ = bring(lease, policy)
        monkeypatch.setattr(Early, "_read", hangs)
        # The real selection cancels reads that have not begun: with slow threads, perhaps all.
        got, _ = bring(lease, policy, between=lambda _session: begun.wait(60))
        assert same(got, want)
        assert store.buffers.used_bytes > 0  # the hung reads still own their buffers
        go.set()
    wait_for_promotions(store)
    assert store.buffers.used_bytes == 0


def test_damage_found_ahead_is_a_loss_only_where_it_is_wanted(open_store: Open) -> None:
    store = open_store(SHAPES["mha"], dram_bytes=0, prefetch_bytes=64 * MIB, read_gap_bytes=0)
    fill(store)
    record = store.catalog.records()[0]
    layout_bytes = record.parts[0].length // 2
    flip_a_bit(store.path, record.parts[0], layout_bytes + 100)  # keys of layer 1
    with store.lease(prompt(N_TOKENS)) as lease:
        with lease.session(Random(keep=1.0)) as session:
            session.retrieve(0, None)
            ended(session)
            with pytest.raises(impress.PrefixLost):
                session.retrieve(1, None)
    assert store.lookup(prompt(N_TOKENS)) < N_TOKENS
    wait_for_promotions(store)
    assert store.buffers.used_bytes == 0


def test_a_session_closed_in_the_middle_leaves_nothing(open_store: Open) -> None:
    store = open_store(DEEP["mha"], dram_bytes=MIB, prefetch_bytes=64 * MIB)
    fill_deep(store)
    with store.lease(prompt(N_TOKENS)) as lease:
        for layers in ((0,), (0, 2), (1, 0, 0), (2,)):
            with lease.session(Random(keep=0.5)) as session:
                for layer in layers:
                    session.retrieve(layer, None)
    wait_for_promotions(store)
    assert store.buffers.used_bytes == 0
    store.check()


def test_a_session_closed_in_a_forks_child_waits_for_no_lock(open_store: Open) -> None:
    """It let go of what was read ahead first, by locks that a thread of the parent may have had."""
    store = open_store(DEEP["mha"], dram_bytes=0, prefetch_bytes=64 * MIB)
    fill_deep(store)
    with store.lease(prompt(N_TOKENS)) as lease, lease.session(Random(keep=0.5)) as session:
        session.retrieve(0, None)
        ended(session)
        with session._foresight._now._ticket._lock:
            assert said_by_a_child(session.close, limit_s=10) == "returned"


def test_a_guess_of_which_nothing_was_begun_is_in_at_once() -> None:
    """Its ticket had no end, so that a layer's load was timed until somebody waited for it."""
    assert Ticket(0).done and Ticket(0).ended_s <= monotonic()


def test_reads_that_were_not_begun_are_never_begun(open_store: Open) -> None:
    """A busy medium: the selection comes first."""
    store = open_store(DEEP["mha"], dram_bytes=0, prefetch_bytes=64 * MIB, io_threads=2)
    fill_deep(store)
    go = threading.Event()
    with store.lease(prompt(N_TOKENS)) as lease, lease.session(Random(keep=1.0)) as session:
        session.retrieve(0, None)
        ended(session)
        session.retrieve(1, None)
        ended(session)
        before = store.counters["ahead_bytes"]
        plan = session._foresight
        plan.plan(1, None, (0, 1))
        blockers = store._pool.submit(Lane.DEMAND, [lambda: go.wait(60) and None] * 2)
        plan.start()
        early = plan.take(1)
        assert early is not None
        go.set()
        assert blockers.wait(60)
        tickets.ended([early._ticket], 60)
        assert early.asked_bytes == 0 and store.counters["ahead_bytes"] == before


def test_a_guess_let_go_of_keeps_no_buffers_behind_requests(open_store: Open) -> None:
    """Its reads that were not begun stayed queued, with their buffers, until no request had a read
    to make: under requests that never paused, one layer's after the other piled up."""
    store = open_store(DEEP["mha"], dram_bytes=0, prefetch_bytes=64 * MIB, io_threads=1)
    fill_deep(store)
    begun, go = threading.Event(), threading.Event()

    def held() -> None:
        begun.set()
        assert go.wait(60)

    with store.lease(prompt(N_TOKENS)) as lease:
        requests = store._pool.submit(Lane.DEMAND, [held, lambda: None])
        assert begun.wait(60)
        early = Early(lease.reading, lease.sources, 1, (K, V), np.arange(N_TOKENS))
        early.start()
        assert store.buffers.used_bytes > 0 and store._pool.depth()[Lane.AHEAD] > 0
        early.release()
        kept = store.buffers.used_bytes, store._pool.depth()[Lane.AHEAD]
        go.set()
        assert requests.wait(60) and kept == (0, 0)


def test_what_was_read_ahead_is_counted(open_store: Open) -> None:
    from prometheus_client import CollectorRegistry

    from impress.stats import _Collector

    store = open_store(DEEP["mha"], dram_bytes=0, prefetch_bytes=64 * MIB)
    fill_deep(store)
    with store.lease(prompt(N_TOKENS)) as lease:
        bring(lease, Random(keep=0.5))
    registry = CollectorRegistry()
    registry.register(_Collector(store.stats, b""))
    for name in ("ahead_bytes", "ahead_used_bytes"):
        shown = registry.get_sample_value(f"impress_{name}_total")
        assert shown == store.counters[name] == store.stats()[name]
    assert store.counters["ahead_used_bytes"] > 0


def test_reading_ahead_that_cannot_begin_costs_the_request_nothing(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guess that no memory was left for came out of `retrieve` as a MemoryError."""
    store = open_store(DEEP["mha"], dram_bytes=0, prefetch_bytes=64 * MIB)
    fill(store)
    keys, _ = kv(store.geometry)
    tried = []

    def start(early: Early) -> None:
        tried.append(early.layer)
        raise MemoryError

    monkeypatch.setattr(Early, "start", start)
    with store.lease(prompt(N_TOKENS)) as lease, lease.session(Random(keep=0.3)) as session:
        for layer in range(store.geometry.n_layers):
            query, lse = asked(store.geometry, layer)
            k, _, pos = session.retrieve(layer, query, suffix_lse=lse)
            assert torch.equal(k, keys[layer][:, pos])
    assert tried == [1, 2]
    assert store._pool.idle(60) and store.buffers.used_bytes == 0
    store.check()
