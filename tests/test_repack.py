"""Repacking: the same answers from fewer reads, old or new after any failure, never both."""

from __future__ import annotations

import errno
import json
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import numpy as np
import pytest
import torch
from conftest import (
    MIB,
    SMALL,
    Told,
    assert_serves,
    elsewhere,
    failing_log,
    flip_a_bit,
    kv_of,
    look,
    prompt,
    put_prompt,
    soon,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_order import orders_of, scores_of, unpacked_and_packed
from test_sparse import N_TOKENS, POLICIES, SHAPES, retrieve_all

import impress
from impress.cli.repack import _repacked
from impress.policy import Exact, Policy
from impress.repacking.packing import (
    Trial,
    expected,
    known_of,
    likely_chosen,
    plan_repack,
    tiled,
    trials_of,
)
from impress.repacking.repack import Repacker
from impress.repacking.report import LINGERING, RepackReport
from impress.repacking.span_copy import Gone, SpanPart
from impress.spans.layout import PlaneLayout
from impress.spans.order import RowOrder
from impress.spans.tables import read_header
from impress.tree.catalog import Held
from impress.upkeep.verify import verify_store
from impress.usage.remembered import Remembered, decode
from impress.write.budget import DAY_S, Bucket, Pace, WriteBudget
from impress.write.directory import read_identity, shards_of
from impress.write.leaving import SMALL_PART
from tiers.base import PAGE, Slot, Usage
from tiers.errors import MediumError
from tiers.iopool import Lane
from tiers.ticket import Signal, Ticket, until

Open = Callable[..., impress.PrefixStore]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass beside a lease that is held does not wait before each slice."""
    monkeypatch.setattr(impress.repacking.repack, "PATIENCE_S", 0.0)


WINDOW = 16


# ---- deciding ------------------------------------------------------------------------------


def test_groups_tile_a_span_whatever_is_viewed_of_it() -> None:
    assert tiled([(0, 4)], 4) == [(0, 4)]
    assert tiled([(5, 2), (0, 3)], 9) == [(0, 3), (3, 2), (5, 2), (7, 2)]
    assert tiled([], 3) == [(0, 3)]


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(0, 99))
def test_expected_reads_are_what_independent_choices_read(log_rows: int, seed: int) -> None:
    plane = PlaneLayout(100, 1 << log_rows, 4096, 16 >> log_rows)
    rng = np.random.default_rng(seed)
    chosen = rng.choice([0.0, 0.1, 0.7, 1.0], 48).astype(np.float32)
    drawn = rng.random((20_000, 48)) < chosen
    pieces = drawn.reshape(20_000, -1, plane.piece_rows).any(axis=2)
    starts = pieces & ~np.pad(pieces, ((0, 0), (1, 0)))[:, :-1]
    cost = expected(chosen, plane)
    assert cost.pieces == pytest.approx(pieces.sum(axis=1).mean(), abs=0.1)
    assert cost.requests == pytest.approx(starts.sum(axis=1).mean(), abs=0.1)
    assert cost.n_bytes == cost.pieces * 4096


@settings(max_examples=60)
@given(st.integers(1, 3), st.integers(1, 6), st.integers(0, 99), st.booleans())
def test_a_plan_keeps_rows_in_their_group_and_the_next_plan_moves_nothing(
    layers: int, windows: int, seed: int, packed: bool
) -> None:
    rng, n_rows = np.random.default_rng(seed), windows * WINDOW
    worth = rng.integers(0, 5, (layers, n_rows)).astype(np.float32) / 5
    cut = int(rng.integers(0, windows + 1))
    groups = [(0, cut * WINDOW), (cut * WINDOW, n_rows - cut * WINDOW)]
    order = None
    if packed:
        order = RowOrder.of(np.stack([rng.permutation(n_rows) for _ in range(layers)]))
    planes = [PlaneLayout.of(1024, WINDOW)]
    trials = [Trial(worth, worth)]
    plan = plan_repack(worth, trials, order, groups, planes, WINDOW, 0)
    for layer, slots in enumerate(plan.slots):
        for first, count in groups:
            part = slots[first : first + count]
            assert sorted(part.tolist()) == list(range(first, first + count))
            assert (np.diff(worth[layer, part]) <= 0).all()
    again = plan_repack(worth, trials, RowOrder.of(plan.slots), groups, planes, WINDOW, 0)
    assert np.array_equal(again.slots, plan.slots)
    assert again.gain == 0 and not again.worth_it


@pytest.mark.parametrize("alive", ["well packed", "scattered"])
def test_what_an_order_saves_is_counted_of_rows_that_live(alive: str) -> None:
    """Rows of evicted windows counted as if requests still chose them: a span was moved, and lost
    its copies in the caches, for reads that nobody makes; or stayed, as they hid what it saved."""
    rows, live, gap = 12 * WINDOW, 8 * WINDOW, 4 * PAGE
    worth, plane = np.zeros((1, rows), dtype=np.float32), PlaneLayout.of(PAGE, WINDOW)
    scattered = slice(0, live, 2) if alive == "scattered" else slice(live, rows, 2)
    worth[0, : live // 4] = alive == "well packed"
    worth[0, scattered] = 1
    if alive == "scattered":
        worth[0, live:] = 1  # all of them were chosen: nothing to save
    planned = [
        plan_repack(some, [Trial(some, some)], None, [(0, live)], [plane], WINDOW, gap)
        for some in (worth, worth[:, :live])
    ]
    assert (
        planned[0].gain == planned[1].gain == (0.0 if alive == "well packed" else planned[1].gain)
    )
    assert planned[0].worth_it == (alive == "scattered")
    assert planned[0].before == planned[1].before
    assert sorted(planned[0].slots[0].tolist()) == list(range(rows))


@pytest.mark.parametrize("row_bytes", [256, 1024])
@pytest.mark.parametrize("stable", [0.0, 0.05])
def test_no_order_is_made_from_chance_again_and_again(row_bytes: int, stable: float) -> None:
    """An order's saving was counted on the requests it was made from. Where these choose by chance,
    or always alike but for chance, each pass found 10 to 30 % more to save on the last one's order,
    where nothing was, and wrote the span again: forty times its bytes in forty passes."""
    rng, plane, n_rows = np.random.default_rng(3), PlaneLayout.of(row_bytes, 64), 2048
    law = np.where(rng.random(n_rows) < stable, 0.8, 0.02 if stable else 0.05)  # never changes
    known, order, said = Remembered.empty(1, n_rows // 64, 64), None, []
    for tick in range(1000):
        known.chose(0, 0, rng.random(n_rows) < law, tick)
        if tick % 25 == 24:
            trials = trials_of(known.halves.astype(np.float32))
            plan = plan_repack(known.average(), trials, order, [(0, n_rows)], [plane], 64, 16 << 10)
            if plan.worth_it:
                said.append(plan.gain)
                order = RowOrder.of(plan.slots)
    assert len(said) == (1 if stable else 0)
    if order is not None:  # and what it said is true
        own = law[None].astype(np.float32)
        costs = [expected(own[0][slots], plane) for slots in (np.arange(n_rows), order.slots(0))]
        before, after = (cost.n_bytes + cost.requests * (16 << 10) for cost in costs)
        assert said[0] == pytest.approx(1 - after / before, abs=0.05)


def test_what_one_request_alone_chose_is_no_order(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Nothing tells which of its choices are chance."""
    store = open_store(geometry)
    put_prompt(store, prompt(256)).wait(60)
    look(store, prompt(256), times=1)
    assert not store.repack().spans
    look(store, prompt(256), times=1)
    assert store.repack().moved == 1


def test_importance_that_is_known_is_used_though_one_request_has_chosen(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Rows that arrived in parts lay in position order, and their importance was used until the
    first request chose: then the span was left out, as if nothing were known of it."""
    store = open_store(geometry)
    tokens, keys, values = prompt(256), *kv_of(prompt(256), geometry)
    with store.writer(tokens) as writer:
        for layer, scores in enumerate(scores_of(geometry.n_layers, 256)):
            for rows in (slice(0, 128), slice(128, 256)):
                k, v = keys[layer][:, rows], values[layer][:, rows]
                writer.put(layer, rows.start, k, v, scores[rows])
    assert writer.stored.wait(60)
    (record,) = store.catalog.records()
    assert read_header(store.ssd, record).order is None
    look(store, tokens, times=1)
    assert [span.outcome for span in store.repack(dry_run=True).spans] == ["would move"]
    assert store.repack().moved == 1
    assert [span.outcome for span in store.repack().spans] == ["lies well"]
    assert_serves(store, tokens, 256)


def test_what_one_request_alone_chose_is_no_order_where_others_chose_elsewhere() -> None:
    """As soon as one window had two decisions, single ones ordered all others."""
    rng, known = np.random.default_rng(4), Remembered.empty(1, 4, WINDOW)
    for tick in range(6):
        known.chose(0, 0, rng.random(2 * WINDOW) < 0.5, tick)
    known.chose(0, 2 * WINDOW, np.arange(2 * WINDOW) >= WINDOW, 6)  # once
    halves = known.compared()
    assert halves is not None
    found = known_of(known.average(), halves, None, None)
    assert found is not None
    plan = plan_repack(*found, None, [(0, 4 * WINDOW)], [PlaneLayout.of(PAGE, WINDOW)], WINDOW, 0)
    slots = plan.slots[0]
    assert slots[slots >= 2 * WINDOW].tolist() == [*range(2 * WINDOW, 4 * WINDOW)]
    assert (np.diff(known.average()[0, slots[slots < 2 * WINDOW]]) <= 0).all()


def test_what_was_moved_by_what_requests_chose_does_not_go_back_to_its_first_order(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """An older index had one half of what is known: the importance given at the first store seemed
    to be all there was, and spans were written back to that order."""
    store = open_store(geometry)
    importance = np.random.default_rng(9).random((geometry.n_layers, 256)).astype(np.float32)
    put_prompt(store, prompt(256), importance=importance).wait(60)
    look(store, prompt(256), times=16)
    assert store.repack().moved == 1
    (known,) = store.history._spans.values()
    known.halves[1], known.seen[1] = 0, 0
    assert [span.outcome for span in store.repack().spans] == ["lies well"]


def test_the_most_important_rows_are_taken_to_be_chosen() -> None:
    chosen = likely_chosen(np.array([[3, 1, 2, 0], [0, 0, 0, 9]], dtype=np.float32))
    assert chosen.tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]


def test_a_repack_says_that_the_slice_it_is_at_takes_its_time(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    store, late = open_store(geometry), list[bool]()
    put_prompt(store, prompt(256)).wait(60)
    look(store, prompt(256))
    wait = Ticket.wait

    def slow(ticket: Ticket, timeout_s: float) -> bool:
        if timeout_s == 60.0 and not late:  # the first of a repack's
            late.append(wait(ticket, timeout_s))
            return False
        return wait(ticket, timeout_s)

    monkeypatch.setattr(Ticket, "wait", slow)
    assert store.repack().moved == 1 and late
    assert re.search(r"a read or write has taken \d+ s so far", caplog.text)
    assert_serves(store, prompt(256), 256)


def test_a_repack_whose_turn_has_not_come_says_so_and_can_be_interrupted(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It was said to take a minute over a slice that had not begun, as of a bad disk; and Ctrl-C
    waited until requests left it a turn."""
    store, begun, go = open_store(geometry), threading.Event(), threading.Event()
    assert store._repacker is not None
    copier, told, ran = store._repacker._copier, list[str](), list[bool]()
    wait, over, this = Ticket.wait, Ticket.over, threading.current_thread()

    def held() -> None:
        begun.set()
        assert go.wait(60)

    def interrupted(ticket: Ticket, timeout_s: float) -> bool:
        if threading.current_thread() is not this:
            return wait(ticket, timeout_s)
        if not told:
            told.append("a minute is over")
            return False
        raise KeyboardInterrupt

    def freed(ticket: Ticket, timeout_s: float) -> bool:
        if threading.current_thread() is this and not ticket.done:
            go.set()
        return over(ticket, timeout_s)

    monkeypatch.setattr(Ticket, "wait", interrupted)
    monkeypatch.setattr(Ticket, "over", freed)
    others = store._pool.submit(Lane.PROMOTE, [held])  # before it, as under endless requests
    assert begun.wait(60)
    with pytest.raises(KeyboardInterrupt):
        copier.do(lambda: ran.append(True))
    is_free = not go.is_set()  # nobody had to let it go first
    monkeypatch.undo()
    go.set()
    assert others.wait(60) and store._pool.idle(60)
    assert is_free and not ran and not copier.under_way
    assert "a read or write waits for its turn behind requests" in caplog.text


def test_bytes_are_spread_over_time_and_days() -> None:
    now, waits = [0.0], []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        now[0] += seconds
        return False

    pace = Pace(1000, lambda: now[0], wait)
    assert all(pace.go(100) for _ in range(50))
    assert now[0] == pytest.approx(4.9)  # the first 100 were there
    now[0] += 60
    assert pace.go(100) and waits[-1] == 0  # what was saved up in a minute is bounded
    assert pace.go(200) and waits[-1] == pytest.approx(0.2)
    assert not Pace(1000, lambda: now[0], lambda seconds: True).go(1)
    daily = WriteBudget(1000, lambda: now[0])
    assert daily.allow(600) and not daily.allow(600) and daily.allow(400)
    now[0] += DAY_S / 2
    assert daily.allow(500) and not daily.allow(10)
    assert WriteBudget(None, lambda: 0.0).allow(1 << 60)
    assert not Bucket(1, 10, lambda: 0.0).try_take(11)


# ---- moving --------------------------------------------------------------------------------


def sound(store: impress.PrefixStore) -> None:
    store.flush()
    store.check()
    assert not verify_store(store.path).problems


def test_the_order_of_a_copy_is_counted_before_it_is_made(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """What a pass and a day may write went by the span's old header, which had no order yet."""
    store = open_store(geometry)
    tokens = prompt(2048)  # an order of two pages
    put_prompt(store, tokens, wait_s=30).wait(60)
    look(store, tokens)
    (record,) = store.catalog.records()
    (would,) = store.repack(dry_run=True).spans
    report = store.repack()
    (moved,) = store.catalog.records()
    assert report.moved_bytes == would.move_bytes
    assert moved.meta.length > record.meta.length
    assert moved.owned_bytes <= report.moved_bytes < moved.owned_bytes + 8192


def test_a_span_moves_once_and_is_served_as_before(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry)
    tokens = prompt(256)
    put_prompt(store, tokens).wait(60)
    assert store.repack().spans == []  # nothing is known
    look(store, tokens)
    (record,) = store.catalog.records()
    before = store.stats()
    (would,) = store.repack(dry_run=True).spans
    assert would.outcome == "would move" and would.gain > 0.5
    assert would.after.n_bytes < would.before.n_bytes
    assert store.catalog.records() == [record]
    report = store.repack()
    assert report.moved == 1 and report.moved_bytes == would.move_bytes
    (moved,) = store.catalog.records()
    assert moved.span_id > record.span_id
    (order,) = orders_of(store)
    assert order is not None and order.epoch == 1
    average = store.history.average(moved.span_id)
    assert average is not None
    for layer in range(2):
        assert (np.diff(average[layer, order.slots(layer)]) <= 0).all()
    assert_serves(store, tokens, 256)
    (again,) = store.repack().spans
    assert again.outcome == "lies well" and again.gain == 0
    assert {k: store.stats()[k] for k in ("nodes", "spans", "tokens")} == {
        k: before[k] for k in ("nodes", "spans", "tokens")
    }
    used = [stats["tiers"]["ssd"]["used"] for stats in (before, store.stats())]
    assert used[1] - used[0] <= 8192  # the row order; the old span's space came back
    sound(store)
    look(store, tokens, seed=5, times=40)  # a change of heart: a second epoch
    assert store.repack().moved == 1
    assert orders_of(store)[0].epoch == 2
    store.close()
    reopened = open_store(geometry)
    assert_serves(reopened, tokens, 256)
    assert reopened.stats()["spans"] == 1
    sound(reopened)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_policy_answers_as_before(open_store: Open, shape: str) -> None:
    """Split spans, packed and not, and their probe records."""
    store = open_store(SHAPES[shape], probes=("heads3-v1", "int4-v2"))
    unpacked_and_packed(store)
    fork = np.concatenate([prompt(N_TOKENS)[:320], prompt(128, seed=9)])
    put_prompt_torch(store, fork)
    tokens = prompt(N_TOKENS)
    policies: list[Policy] = [*POLICIES, Exact()]
    want = []
    with store.lease(tokens) as lease:
        want = [retrieve_all(lease, policy)[0] for policy in policies]
    look(store, tokens, times=60)
    report = store.repack()
    assert report.moved >= 2, report
    for _ in range(2):
        with store.lease(tokens) as lease:
            for policy, wanted in zip(policies, want, strict=True):
                got, _ = retrieve_all(lease, policy)
                for ours, theirs in zip(got, wanted, strict=True):
                    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    sound(store)


def put_prompt_torch(store: impress.PrefixStore, tokens: np.ndarray) -> None:
    g = store.geometry
    start = store.lookup(tokens)
    shape = (g.n_kv_heads, len(tokens) - start, g.head_dim)
    rows = [torch.randn(shape).to(getattr(torch, g.dtype)) for _ in range(g.n_layers)]
    assert store.store(tokens, rows, rows, start=start).wait(60)


def test_fewer_bytes_are_read_after_than_before(open_store: Open) -> None:
    store = open_store(SHAPES["mha"], probes=("heads3-v1",), dram_bytes=0, read_gap_bytes=0)
    tokens = prompt(N_TOKENS)
    unpacked_and_packed(store)
    policy = impress.policy.Paper(keep=0.1, gate=False)

    def read_bytes() -> int:
        with store.lease(tokens, tenant="plain") as lease:
            _, lines = retrieve_all(lease, policy)
        return sum(line["bytes"]["ssd"] for line in lines)

    for _ in range(4):
        before = read_bytes()
    store.repack()
    probe_bytes = 2 * N_TOKENS * 3 * 32 * 2
    assert read_bytes() - probe_bytes < (before - probe_bytes) / 2


@pytest.mark.parametrize("known", ["nothing", "one request", "one half of many", "many"])
def test_a_split_node_finds_its_rows_in_its_own_chunks_after_a_repack(
    open_store: Open, geometry: impress.Geometry, known: str
) -> None:
    """Where requests had shown too little to make an order from, split nodes were ignored, too."""
    store = open_store(geometry, window=WINDOW, dram_bytes=0)
    a = prompt(256)
    b = np.concatenate([a[:112], prompt(144, seed=3)])
    put_prompt(store, a, importance=scores_of(2, 256)).wait(60)
    look(store, a, times={"nothing": 0, "one request": 1}.get(known, 16))
    if known == "one half of many":  # as in an older index
        (one,) = store.history._spans.values()
        one.halves[1], one.seen[1] = 0, 0
    put_prompt(store, b, importance=scores_of(2, 256)).wait(60)
    with store.lease(a[:112]) as lease, lease.session() as session:
        session.retrieve(0, None)
        scattered = session.report().bytes_by_tier["ssd"]
    store.repack()
    (first,) = [record for record in store.catalog.records() if record.n_windows == 16]
    order = read_header(store.ssd, first).order
    assert order is not None
    assert sorted(order.at(0, np.arange(112)).tolist()) == list(range(112))
    for tokens, n in ((a, 256), (b, 256), (a[:112], 112)):
        assert_serves(store, tokens, n)
    with store.lease(a[:112]) as lease, lease.session() as session:
        session.retrieve(0, None)
        own = session.report().bytes_by_tier["ssd"]
    assert own == 112 * geometry.token_bytes // 2 < scattered
    sound(store)


def test_what_cut_a_node_leaves_no_second_read_of_a_packed_span(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Each part of a node that was cut was read by itself: with a packed span, all of it each time,
    even when what had cut it was gone."""
    store = open_store(geometry, window=WINDOW, dram_bytes=0)
    a = prompt(256)
    others = [np.concatenate([a[:n], prompt(256 - n, seed=n)]) for n in (64, 128, 192)]
    put_prompt(store, a, importance=scores_of(2, 256)).wait(60)
    for tokens in others:
        put_prompt(store, tokens).wait(60)
    assert store.stats()["nodes"] == 7
    with store.lease(a) as lease, lease.session() as session:
        assert lease.n_tokens == 256 and len(lease.sources) == 1
        assert store.stats()["pinned_spans"] == 1
        session.retrieve(0, None)
        assert session.report().bytes_by_tier["ssd"] == 256 * geometry.token_bytes // 2
    assert store.stats()["pinned_spans"] == 0
    for tokens in (a, *others):
        assert_serves(store, tokens, 256)
    sound(store)


def test_of_a_packed_span_only_chunks_that_hold_wanted_rows_are_read(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """A prompt that shares a part read everything between its rows' first and last chunk."""
    store = open_store(geometry, window=WINDOW, dram_bytes=0)
    a = prompt(256)
    put_prompt(store, a, importance=scores_of(2, 256)).wait(60)
    with store.lease(a[:16]) as lease, lease.session() as session:
        (source,) = lease.sources
        chunks = [np.unique(source.ordinals(layer, np.arange(16)) // WINDOW) for layer in (0, 1)]
        assert all(np.ptp(own) + 1 > len(own) for own in chunks)
        for layer in range(2):
            k, v, _ = session.retrieve(layer, None)
            keys, values = kv_of(a, geometry)
            assert np.array_equal(k.numpy(), keys[layer][:, :16])
            assert np.array_equal(v.numpy(), values[layer][:, :16])
        n_chunks = sum(map(len, chunks))
        assert (
            session.report().bytes_by_tier["ssd"] == n_chunks * WINDOW * geometry.token_bytes // 2
        )
    sound(store)


def test_a_node_cut_off_near_the_end_of_a_span_is_no_reason_to_move_it() -> None:
    """Its chunks were counted by themselves, though nobody reads them except after the rest."""
    rng, planes = np.random.default_rng(0), [PlaneLayout.of(1024, WINDOW)] * 2
    rows = rng.permutation(10 * WINDOW)
    order = RowOrder.of(np.stack([rows] * 2))
    nothing = np.zeros((2, 10 * WINDOW), dtype=np.float32)

    def gain(*groups: tuple[int, int]) -> float:
        by_rows = [(first * WINDOW, count * WINDOW) for first, count in groups]
        return plan_repack(
            nothing, [Trial(nothing, nothing)], order, by_rows, planes, WINDOW, 0
        ).gain

    assert gain((0, 10)) == 0
    assert gain((0, 9), (9, 1)) == pytest.approx(1 / 20)
    assert gain((0, 2), (2, 8)) == pytest.approx(8 / 20)


def test_what_requests_chose_is_saved_with_the_swap(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was saved later, and lost if the process ended or later spans pushed it out before."""
    prompts = [prompt(256, seed) for seed in range(4)]
    store = open_store(geometry)
    for tokens in prompts:
        put_prompt(store, tokens).wait(60)
        look(store, tokens)
    known = {r.key_after: store.history.average(r.span_id) for r in store.catalog.records()}
    store.close()
    (one, *_) = known.values()
    monkeypatch.setattr("impress.write.home.budget_of", lambda dram_bytes: 5 * one.size)
    store = open_store(geometry)  # the histories of at most two spans are in memory
    tick = store.index.history_tick()
    store.history.request([])
    assert store.repack().moved == 4
    store.history.check()
    store.flush()
    for record in store.catalog.records():  # as a process finds it after a kill
        value = store.index.history(record.span_id)
        assert value is not None
        assert np.array_equal(decode(value).average(), known[record.key_after])
    assert store.index.history_tick() == tick + 1
    store.close()
    again = open_store(geometry)
    assert [span.outcome for span in again.repack().spans] == ["lies well"] * 4


def test_a_lease_held_across_a_repack_reads_the_old_rows_to_the_end(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry, dram_bytes=0)
    tokens = prompt(256)
    put_prompt(store, tokens).wait(60)
    look(store, tokens)
    (old,) = store.catalog.records()
    with store.lease(tokens) as lease, lease.session() as session:
        session.retrieve(0, None)
        assert store.repack().moved == 1
        assert store.stats()["retired_spans"] == 1
        store.check()
        for layer in range(2):
            k, v, _ = session.retrieve(layer, None)
            keys, values = kv_of(tokens, geometry)
            assert np.array_equal(k.numpy(), keys[layer])
            assert np.array_equal(v.numpy(), values[layer])
        store.evict(1 << 40)
        assert store.lookup(tokens) == 256, "what a lease holds is not evicted, moved or not"
    assert store.stats()["retired_spans"] == 0
    assert old.span_id not in [r.span_id for r in store.catalog.all_records()]
    store.evict(1 << 40)
    assert store.lookup(tokens) == 0
    sound(store)


def test_who_ends_the_last_lease_of_what_moved_erases_nothing(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That thread, an engine's at the end of a request, erased and synced the span."""
    store, by = open_store(geometry, dram_bytes=0, follow_every_s=0), []
    put_prompt(store, prompt(256)).wait(60)
    look(store, prompt(256))
    erase = store.ssd.erase

    def watched(slot: Slot) -> None:
        by.append(threading.current_thread().name)
        erase(slot)

    monkeypatch.setattr(store.ssd, "erase", watched)
    with store.lease(prompt(256)):
        assert store.repack().moved == 1
        assert not by
    store.flush()
    assert by == ["impress-commit"]
    (record,) = store.catalog.records()
    assert store.ssd.usage().used == record.owned_bytes
    sound(store)


def test_what_moved_is_erased_where_it_was(open_store: Open, geometry: impress.Geometry) -> None:
    """A purge that comes later must not leave the older copy of somebody's rows behind."""
    store = open_store(geometry)
    put_prompt(store, prompt(256)).wait(60)
    look(store, prompt(256))
    (old,) = store.catalog.records()
    with store.lease(prompt(256)):
        assert store.repack().moved == 1
        assert store.purge() == (1, 2)  # still held: it, and the copy it moved from
    store.flush()
    for part in (old.meta, *old.parts):
        raw = (store.ssd.folder / f"{part.segment:08d}.seg").read_bytes()
        assert not any(raw[part.off : part.off + part.length])
    assert store.ssd.usage().used == 0
    sound(store)


def test_a_copy_that_finds_no_memory_leaves_no_space_taken(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(geometry, daily_write_bytes=64 * MIB, repack_every_s=0)
    put_prompt(store, prompt(256)).wait(60)
    look(store, prompt(256))
    before, left = store.ssd.usage().used, store._home.budget.left_bytes

    def no_memory(*_args: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(SpanPart, "record", no_memory)
        assert [span.outcome for span in store.repack().spans] == ["no memory"]
    assert store.ssd.usage().used == before
    assert store._home.budget.left_bytes >= left
    assert store.repack().moved == 1
    sound(store)


def test_heat_and_children_stay_with_a_moved_span(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry)
    a = prompt(256)
    put_prompt(store, a[:128]).wait(60)
    put_prompt(store, a).wait(60)
    look(store, a[:128])
    assert_serves(store, a, 256)
    hits = store.catalog.hottest(1)[0].hits
    assert store.repack().moved == 1  # the parent: its id is now above its child's
    assert store.catalog.hottest(1)[0].hits == hits
    parent = max(record.span_id for record in store.catalog.records())
    assert store.index.heat()[parent][0] > 0
    store.close()
    again = open_store(geometry)
    assert_serves(again, a, 256)
    assert again.stats()["spans"] == 2
    sound(again)


# ---- bounds --------------------------------------------------------------------------------


def test_what_a_pass_leaves_for_later_is_due_with_its_next_lease(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """It was noted as looked at: once the day's writes, or room, were there again, a span waited
    for eight leases more."""
    store = open_store(geometry, daily_write_bytes=2 * 256 * geometry.token_bytes)
    put_prompt(store, prompt(256)).wait(60)
    look(store, prompt(256))
    for _ in range(8):
        assert_serves(store, prompt(256), 256)
    repacker = store._repacker
    assert repacker is not None
    (report,) = repacker.run_leased().spans
    assert report.outcome == "daily_write_bytes are spent"
    assert repacker.run_leased().spans == []  # nobody asked for it since
    store._home.budget.refund(256 * geometry.token_bytes)
    assert_serves(store, prompt(256), 256)
    (report,) = repacker.run_leased().spans
    assert report.outcome == "moved"
    sound(store)


def test_a_pass_keeps_to_its_bounds_and_says_so(
    tmp_path: Path, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the day's writes spent, each pass erased and synced the room it had found for a copy."""
    data = 256 * geometry.token_bytes
    cases: list[tuple[dict[str, int], str]] = [
        ({"repack_space_bytes": data}, "larger than repack_space_bytes"),
        ({"daily_write_bytes": 2 * data}, "daily_write_bytes are spent"),
        ({"disk_bytes": 2 * MIB}, "no room for a copy"),
        ({"disk_bytes": 2 * MIB, "daily_write_bytes": 8 * MIB}, "no room for a copy"),
        ({"disk_bytes": 2 * MIB, "daily_write_bytes": 2 * data}, "daily_write_bytes are spent"),
        ({}, "over this pass's bytes"),
    ]
    for i, (bounds, outcome) in enumerate(cases):
        config = impress.Config(**{**SMALL, **bounds})
        with impress.PrefixStore.open(tmp_path / str(i), geometry, "test", config) as store:
            put_prompt(store, prompt(256)).wait(60)
            look(store, prompt(256))
            left, touched = store._home.budget.left_bytes or 0, []
            for name in ("write", "erase"):
                monkeypatch.setattr(store.ssd, name, lambda *args, seen=touched: seen.append(args))
            for dry_run in (True, False):
                report = store.repack(dry_run=dry_run, max_bytes=None if bounds else data)
                assert [span.outcome for span in report.spans] == [outcome]
                assert (report.moved, report.moved_bytes) == (0, 0)
            monkeypatch.undo()
            assert not touched and (store._home.budget.left_bytes or 0) >= left
            assert_serves(store, prompt(256), 256)
            sound(store)


def test_spans_that_moved_and_are_still_read_count_as_space_of_the_repacker(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only single copies were held against repack_space_bytes: under long leases they added up."""
    monkeypatch.setattr("impress.write.reclaim.YIELD_TIMEOUT_S", 0.0)
    store = open_store(geometry, repack_space_bytes=3 * 128 * geometry.token_bytes)
    leases = []
    for seed in range(4):
        put_prompt(store, prompt(128, seed)).wait(60)
        look(store, prompt(128, seed))
        leases.append(store.lease(prompt(128, seed)))
    assert sorted(span.outcome for span in store.repack().spans) == [
        "moved", "moved", *[LINGERING] * 2,
    ]  # fmt: skip
    for lease in leases:
        lease.release()
    store.flush()  # the committer reclaims what they held
    assert store.repack().moved == 2
    sound(store)


def test_what_is_dead_between_two_windows_that_live_is_no_reason_to_copy_the_rest(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """The copy left nothing out, and every pass copied the span again."""
    store = open_store(geometry, window=WINDOW)
    put_prompt(store, prompt(256)).wait(60)
    (record,) = store.catalog.records()
    pinned, header = list[Held](), read_header(store.ssd, record)
    assert store.catalog.hold_span(record.span_id, pinned)
    (held,) = pinned
    examine = store._repacker._examine
    assert examine(held, header, [(0, 2), (14, 2)], rewrite=True) is None
    rewritten = examine(held, header, [(3, 2), (6, 1)], rewrite=True)
    assert rewritten is not None and (rewritten.part.first, rewritten.part.count) == (3, 4)
    store._home.release(pinned)


def in_holes(store: impress.PrefixStore) -> tuple[np.ndarray, int]:
    """Fills a store with a prompt that a pass would move, and leaves only free holes too small for
    a copy of it, or for a part of a megabyte. Returns (the prompt, its span)."""
    large = prompt(192, seed=99)
    put_prompt(store, large).wait(60)
    for seed in range(12):
        put_prompt(store, prompt(64, seed), tenant=f"t{seed % 2}").wait(60)
    look(store, large)
    store.purge(tenant="t0")
    (span,) = (r.span_id for r in store.catalog.records() if r.n_windows == 192 // store.window)
    return large, span


def test_a_copy_fits_into_the_holes_that_a_store_would_take(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """It wanted parts of a megabyte: on a full disk of holes no dead space came back."""
    store = open_store(geometry, dram_bytes=0, disk_bytes=4 * MIB, disk_high=1.0, disk_low=1.0)
    large, span = in_holes(store)
    assert store.stats()["evicted_spans"] == 0
    (moved,) = store.repack().spans
    assert (moved.span, moved.outcome) == (span, "moved")
    copy = max(store.catalog.records(), key=lambda record: record.span_id)
    assert copy.n_windows == 192 // store.window and len(copy.parts) > 1
    assert_serves(store, large, 192)
    sound(store)


def test_nothing_is_evicted_for_a_copy_under_way(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy's room counted as filled: a flush meanwhile evicted prompts down to the low mark."""
    marks = {"disk_bytes": 4 * MIB, "disk_high": 0.8, "disk_low": 0.5}
    store = open_store(geometry, dram_bytes=0, **marks)
    for seed in range(6):
        put_prompt(store, prompt(128, seed)).wait(60)
    look(store, prompt(128, 0))
    assert store._repacker is not None
    copier, filled = store._repacker._copier, []
    copy = copier._copy_plane

    def flushed(*args: Any) -> None:
        elsewhere(store.flush)  # the committer looks after every batch, an empty one too
        filled.append(store.ssd.usage().used)
        copy(*args)

    monkeypatch.setattr(copier, "_copy_plane", flushed)
    assert store.repack().moved == 1
    assert min(filled) > 0.8 * 4 * MIB
    assert store.stats()["evicted_spans"] == 0 and store.stats()["spans"] == 6
    sound(store)


@pytest.fixture
def nearly_full(open_store: Open, geometry: impress.Geometry) -> impress.PrefixStore:
    """A store that one more prompt takes to its high mark; a copy beside it would be over that."""
    marks = {"disk_bytes": 4 * MIB, "disk_high": 0.8, "disk_low": 0.5}
    store = open_store(geometry, dram_bytes=0, **marks)
    for seed in range(5):
        put_prompt(store, prompt(128, seed)).wait(60)
    look(store, prompt(128, 0))
    return store


def assert_a_store_evicts_nothing(store: impress.PrefixStore) -> None:
    put_prompt(store, prompt(128, 5)).wait(60)
    store.flush()
    assert store.stats()["evicted_spans"] == 0 and store.stats()["spans"] == 6


@pytest.mark.parametrize("when", ["copies", "leaving", "used"])
def test_a_span_that_leaves_while_it_is_counted_has_no_other_leave(
    nearly_full: impress.PrefixStore, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A span that went from one list of the leaving to the next was on neither as they were read:
    it counted as filled, and a store at the end of a lease had most of the others evicted."""
    store, over = nearly_full, list[bool]()
    lease = store.lease(prompt(128, 0))
    assert store.repack().moved == 1  # the old span goes when that lease ends
    of, name = {
        "copies": (store._home.leaving, "copies_bytes"),
        "leaving": (store._home.leaving, "_gone_bytes"),
        "used": (store.ssd, "usage"),
    }[when]
    look, ends, waits = getattr(of, name), threading.Thread(target=lease.release), threading.Event()
    reclaimer = store._home.reclaimer
    assert reclaimer is not None
    monkeypatch.setattr(reclaimer, "_lock", Told(reclaimer._lock, waits))

    def looked() -> Any:
        found = look()
        if not over and threading.current_thread().name == "impress-commit":
            ends.start()
            if when == "leaving":  # it has to wait
                assert waits.wait(60)
            else:
                ends.join(60)
            over.append(not ends.is_alive())
        return found

    monkeypatch.setattr(of, name, looked)
    assert_a_store_evicts_nothing(store)
    ends.join()
    assert over == [when != "leaving"]  # it is never half gone as that is counted


def test_a_copy_that_comes_to_nothing_while_it_is_counted_has_no_span_leave(
    nearly_full: impress.PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is used was asked for first, and then its owners: by then the copy's space had none."""
    store, under_way, ends = nearly_full, threading.Event(), threading.Event()
    assert store._repacker is not None
    leaving = store._home.leaving

    def copied(*_: Any) -> None:
        under_way.set()
        ends.wait(60)
        raise Gone

    def used(look: Callable[[], Usage] = store.ssd.usage) -> Usage:
        found = look()
        if under_way.is_set() and threading.current_thread().name == "impress-commit":
            ends.set()
            passing.join(60)
        return found

    monkeypatch.setattr(store._repacker._copier, "copy", copied)
    monkeypatch.setattr(store.ssd, "usage", used)
    passing = threading.Thread(target=store.repack)
    passing.start()
    assert under_way.wait(60)
    assert_a_store_evicts_nothing(store)
    assert ends.is_set() and leaving.copies_bytes() == 0


def test_a_copy_that_begins_while_it_is_counted_has_no_span_leave(
    nearly_full: impress.PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is used was asked for last: it included the copy's space, which had no owner yet."""
    store, begins, ends = nearly_full, [1], threading.Event()
    assert store._repacker is not None
    leaving = store._home.leaving
    look = leaving._gone_bytes

    def copied(*_: Any) -> None:
        ends.wait(60)
        raise Gone

    def gone() -> int:
        found = look()
        if begins and threading.current_thread().name == "impress-commit":
            begins.pop()
            passing.start()
            assert until(lambda: leaving.copies_bytes() > MIB // 8, 60)
        return found

    monkeypatch.setattr(store._repacker._copier, "copy", copied)
    monkeypatch.setattr(store._repacker, "_lingers", lambda _: False)  # asked before: it waits
    monkeypatch.setattr(leaving, "_gone_bytes", gone)
    passing = threading.Thread(target=store.repack)
    try:
        assert_a_store_evicts_nothing(store)
    finally:
        ends.set()
        passing.join()
    assert not begins


def test_a_command_with_little_memory_keeps_what_a_server_learnt_of_a_long_prefix(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`impress repack` has 4 MiB for histories: it knew nothing of a span whose history takes more,
    moved it back to the order of its first store, and deleted what requests had shown."""
    store = open_store(geometry, window=WINDOW)
    put_prompt(store, prompt(256), importance=scores_of(2, 256)).wait(60)
    look(store, prompt(256), seed=9, times=16)
    assert store.repack().moved == 1
    store.close()
    with monkeypatch.context() as little:
        little.setattr("impress.usage.history.LEAST_BYTES", 1 << 10)
        store = open_store(geometry, window=WINDOW, dram_bytes=0)
        assert [span.outcome for span in store.repack().spans] == ["lies well"]
        store.close()
    store = open_store(geometry, window=WINDOW)
    (record,) = store.catalog.own_records()
    assert store.history.average(record.span_id) is not None


def test_a_copy_whose_space_is_just_being_found_has_no_span_leave(
    nearly_full: impress.PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows had their space; its header, which may need a new segment, did not yet."""
    store, reserve, n = nearly_full, nearly_full.ssd.reserve, [0]

    def reserved(*args: int) -> Slot | None:
        if threading.current_thread() is threading.main_thread():
            n[0] += 1
            if n[0] == 2:
                stores = threading.Thread(target=assert_a_store_evicts_nothing, args=(store,))
                stores.start()
                stores.join()
        return reserve(*args)

    monkeypatch.setattr(store.ssd, "reserve", reserved)
    store.repack()
    assert n[0] >= 2
    assert store.stats()["evicted_spans"] == 0 and store.stats()["spans"] == 6


def test_a_copy_that_came_to_nothing_counts_in_a_passs_bytes(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Only copies that took their place were counted: a pass of bad spans wrote without a bound."""
    store = open_store(geometry, dram_bytes=0)
    for seed in range(3):
        put_prompt(store, prompt(256, seed)).wait(60)
        look(store, prompt(256, seed))
    for record in store.catalog.records():  # in the second layer: the first is written by then
        flip_a_bit(store.path, record.parts[0], record.parts[0].length - 70_000)
    outcomes = [span.outcome for span in store.repack(max_bytes=3 * MIB // 2).spans]
    assert outcomes == ["failed", *["over this pass's bytes"] * 2]
    store.check()


def test_a_pass_of_a_store_that_closes_lets_go_of_its_spans(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """It held every span that it no longer looked at, and gave none of them back."""
    store = open_store(geometry)
    put_prompt(store, prompt(256)).wait(60)
    look(store, prompt(256))
    repacker = store._repacker
    assert repacker is not None
    repacker.close(60)
    assert store.repack().spans == []
    assert store.purge() == (1, 0) and store.ssd.usage().used == 0


@pytest.mark.parametrize("bound", ["max_bytes", "daily_write_bytes"])
def test_a_dry_run_stops_where_the_run_does(
    open_store: Open, geometry: impress.Geometry, bound: str
) -> None:
    """What would have moved earlier was not counted: all three would move, and one did."""
    daily = 8 * MIB if bound == "daily_write_bytes" else None
    store = open_store(geometry, daily_write_bytes=daily)
    for seed in range(3):
        put_prompt(store, prompt(256, seed)).wait(60)
        look(store, prompt(256, seed))
    if daily is not None:
        store._home.budget.allow(store.stats()["writes_left_bytes"] - 3 * MIB // 2)
    most = 3 * MIB // 2 if bound == "max_bytes" else None
    would = store.repack(dry_run=True, max_bytes=most)
    report = store.repack(max_bytes=most)
    as_said = {"would move": "moved"}
    outcomes = [span.outcome for span in report.spans]
    assert [as_said.get(span.outcome, span.outcome) for span in would.spans] == outcomes
    assert outcomes.count("moved") == 1 and len(outcomes) == 3
    assert would.picked_bytes == report.picked_bytes == report.moved_bytes > would.moved_bytes == 0
    sound(store)


def test_a_dry_run_sees_the_holes_and_a_disk_that_takes_no_writes(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """It added up bytes, and did not ask whether the disk takes writes: it promised moves for which
    the run then had no room, or was refused."""
    store = open_store(geometry, dram_bytes=0, disk_bytes=4 * MIB, disk_high=1.0, disk_low=1.0)
    large, _ = in_holes(store)
    taken = []
    while (slot := store.ssd.reserve(SMALL_PART // 2, 4096)) is not None:
        taken.append(slot)
    for slot in taken[::2]:
        store.ssd.free(slot)
    assert store.ssd.usage().free > 1.01 * 192 * geometry.token_bytes
    for dry_run in (True, False):
        assert [s.outcome for s in store.repack(dry_run=dry_run).spans] == ["no room for a copy"]
    for slot in taken[1::2]:
        store.ssd.free(slot)
    assert [span.outcome for span in store.repack(dry_run=True).spans] == ["would move"]
    store._home.health.trouble("ssd: injected")
    for dry_run in (True, False):
        assert [span.outcome for span in store.repack(dry_run=dry_run).spans] == ["read-only"]
    store._home.health.reason = ""  # as if the disk had been tried again
    assert [span.outcome for span in store.repack().spans] == ["moved"]
    assert_serves(store, large, 192)
    sound(store)


def test_a_dry_run_on_a_full_file_system_counts_on_no_new_segment(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without disk_bytes every copy seemed to have room, though the run had just been refused."""
    store = open_store(geometry, dram_bytes=0)
    put_prompt(store, prompt(256)).wait(60)
    look(store, prompt(256))
    rest = store.ssd.reserve(store.ssd.usage().free)
    assert rest is not None

    def full(*_args: Any) -> None:
        raise OSError(errno.ENOSPC, "injected")

    monkeypatch.setattr("tiers.segments.make_full", full)
    for dry_run in (False, True):
        report = store.repack(dry_run=dry_run)
        assert [span.outcome for span in report.spans] == ["no room for a copy"]
    store.ssd.free(rest)


def test_headers_are_read_at_the_pace_too(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run over all spans read as fast as the disk could, beside requests being served."""
    store, gone = open_store(geometry), []
    for seed in range(2):
        put_prompt(store, prompt(256, seed)).wait(60)
        look(store, prompt(256, seed))
    assert store._repacker is not None
    pace = store._repacker._copier._pace
    monkeypatch.setattr(pace, "go", lambda n_bytes: not gone.append(n_bytes))
    assert len(store.repack(dry_run=True).picked) == 2
    assert gone == [record.meta.length for record in store.catalog.records()]


def test_the_background_looks_at_what_was_leased_since(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry)
    for seed in range(2):
        put_prompt(store, prompt(256, seed)).wait(60)
        look(store, prompt(256, seed))
    repacker = store._repacker
    assert repacker is not None and repacker.run_leased().spans == []
    for _ in range(8):
        assert_serves(store, prompt(256, 1), 256)
    (report,) = repacker.run_leased().spans
    assert report.outcome == "moved"
    assert repacker.run_leased().spans == []
    sound(store)


@pytest.mark.parametrize("fails", ["saying what failed", "waiting"])
def test_the_repackers_thread_outlives_what_it_cannot_say(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A handler of the log that raised, or no memory to wait with, ended it for good."""
    passes, again, wait, first = [], threading.Event(), Signal.wait, threading.Event()

    def leased(_repacker: Any) -> None:
        passes.append(threading.current_thread().name)
        if len(passes) == 2:
            again.set()
        elif fails == "saying what failed":
            raise RuntimeError("a bug")

    def waits(signal: Signal, timeout_s: float | None = None) -> bool:
        if threading.current_thread().name == "impress-repack" and not first.is_set():
            first.set()
            raise MemoryError
        return wait(signal, timeout_s)

    monkeypatch.setattr(Repacker, "run_leased", leased)
    if fails == "waiting":
        monkeypatch.setattr(Signal, "wait", waits)
    with failing_log():
        store = open_store(geometry, repack_every_s=0.001)
        assert again.wait(60)
        store.close()
    assert set(passes) == {"impress-repack"}


def test_what_ends_a_pass_leaves_those_behind_it_due(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All were noted as looked at before the pass began: they waited for eight leases more."""
    store = open_store(geometry)
    for seed in range(2):
        put_prompt(store, prompt(256, seed)).wait(60)
        look(store, prompt(256, seed))
        for _ in range(8 + seed):
            assert_serves(store, prompt(256, seed), 256)
    cooler, _ = sorted(record.span_id for record in store.catalog.records())
    repacker = store._repacker
    assert repacker is not None

    def fails(*_: Any) -> Any:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a bug"):
        patch.setattr("impress.repacking.repack.plan_repack", fails)
        repacker.run_leased()
    (report,) = repacker.run_leased().spans
    assert (report.span, report.outcome) == (cooler, "moved")
    sound(store)


def test_a_reader_cannot_repack(open_store: Open, geometry: impress.Geometry) -> None:
    put_prompt(open_store(geometry), prompt(256)).wait(60)
    with pytest.raises(impress.ImpressError, match="open for writing"):
        open_store(geometry, mode="r").repack()


# ---- what goes wrong -----------------------------------------------------------------------


def test_a_fault_at_any_step_leaves_the_old_span_and_no_space_taken(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(geometry, dram_bytes=0)
    tokens = prompt(256)
    put_prompt(store, tokens).wait(60)
    look(store, tokens)
    (record,) = store.catalog.records()
    used = store.ssd.usage().used
    steps = [
        (store.ssd, "write", MediumError("ssd: injected")),
        (store.ssd, "sync", MediumError("ssd: injected")),
        (store.index, "commit", impress.StoreFailed("index: injected")),
    ]
    for where, name, error in steps:
        real, calls = getattr(where, name), 0
        fail_at = 0
        while True:
            calls = 0

            def faulty(
                *args: Any, real: Any = real, at: int = fail_at, error: Any = error, **named: Any
            ) -> Any:
                nonlocal calls
                calls += 1
                if calls == at + 1:
                    raise error
                return real(*args, **named)

            store._home.health.reason = ""  # as if the disk had been tried again
            monkeypatch.setattr(where, name, faulty)
            report = store.repack()
            monkeypatch.setattr(where, name, real)
            if report.moved:
                break
            assert [span.outcome for span in report.spans] == ["failed"]
            assert store.catalog.records() == [record] and store.ssd.usage().used == used
            store.check()
            fail_at += 1
        assert fail_at > 0
        assert_serves(store, tokens, 256)
        look(store, tokens, seed=fail_at + len(name), times=60)
        (record,) = store.catalog.records()
        used = store.ssd.usage().used
    sound(store)


def test_a_span_that_goes_bad_while_it_is_copied_is_left_alone(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry, dram_bytes=0)
    put_prompt(store, prompt(256)).wait(60)
    look(store, prompt(256))
    (record,) = store.catalog.records()
    flip_a_bit(store.path, record.parts[0], 70_000)
    assert [span.outcome for span in store.repack().spans] == ["failed"]
    assert store.lookup(prompt(256)) == 0
    sound(store)


def test_a_header_without_room_gives_back_the_room_for_rows(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Where no segment can be made (out of files, say) a megabyte had no owner until reopening."""
    store = open_store(geometry, dram_bytes=0)
    put_prompt(store, prompt(256)).wait(60)
    look(store, prompt(256))
    rest = store.ssd.reserve(store.ssd.usage().free)
    data = store.ssd.reserve(256 * geometry.token_bytes)
    assert rest is not None and data is not None and store.ssd.usage().free == 0
    store.ssd.free(data)  # room for the rows, and a new segment for the header
    taken = store.ssd.folder / f"{data.parts[0].segment + 1:08d}.seg"
    taken.touch()
    assert [span.outcome for span in store.repack().spans] == ["no room for a copy"]
    assert store.ssd.usage().free == data.n_bytes
    taken.unlink()
    store.ssd.free(rest)
    assert store.repack().moved == 1
    assert_serves(store, prompt(256), 256)
    sound(store)


def test_a_commit_that_outlasts_the_wait_is_told_apart_from_the_next_copy(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said to have failed. When it landed, the next copy, half written, had no owner."""
    store = open_store(geometry, dram_bytes=0)
    for seed in range(2):
        put_prompt(store, prompt(256, seed)).wait(60)
        look(store, prompt(256, seed))
    repacker, committer, land = store._repacker, store._home.committer, threading.Event()
    assert repacker is not None and committer is not None
    intend, commit = committer.intend, store.index.commit
    intended: list[Any] = []
    seen: list[tuple[int, bool]] = []

    def late(put: Any, *args: Any, **named: Any) -> None:
        assert not put or land.wait(60)  # the swap's commit waits
        commit(put, *args, **named)

    def second(record: Any, _timeout_s: float) -> None:
        intended.append(record)
        if len(intended) == 2:  # its space is reserved
            seen.append((len(repacker.drafts()), repacker.writing))
            land.set()
            assert committer.barrier(60)
            seen.append((len(repacker.drafts()), repacker.writing))
        intend(record, 60)

    monkeypatch.setattr(impress.repacking.repack, "COMMIT_TIMEOUT_S", 0.0)
    monkeypatch.setattr(store.index, "commit", late)
    monkeypatch.setattr(committer, "intend", second)
    report = store.repack()
    monkeypatch.undo()
    assert len(report.spans) == 2 and report.spans[0].outcome == "not committed yet"
    store.flush()
    assert seen == [(2, True), (1, True)]
    assert repacker.drafts() == [] and not repacker.writing
    assert all(order is not None and order.epoch == 1 for order in orders_of(store))
    for seed in range(2):
        assert_serves(store, prompt(256, seed), 256)
    sound(store)


def repack_late(
    store: impress.Store, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> RepackReport:
    """A pass that waits for none of its commits: they land after it."""
    committer, land, commit = store._home.committer, threading.Event(), store.index.commit
    assert committer is not None
    intend = committer.intend

    def late(put: Any, *args: Any, **named: Any) -> None:
        assert not put or land.wait(60)  # the swap's commit waits
        commit(put, *args, **named)

    with monkeypatch.context() as slow:
        slow.setattr(impress.repacking.repack, "COMMIT_TIMEOUT_S", 0.0)
        slow.setattr(store.index, "commit", late)
        slow.setattr(committer, "intend", lambda record, _timeout_s: intend(record, 60))
        report = store.repack(**options)
        land.set()
        store.flush()
    return report


def test_a_copy_that_takes_its_place_late_counts_as_moved(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as late and nothing else: not as moved, and the span it had left, which somebody
    still read, did not count as space of the repacker."""
    monkeypatch.setattr("impress.write.reclaim.YIELD_TIMEOUT_S", 0.0)
    store = open_store(geometry, repack_space_bytes=3 * 128 * geometry.token_bytes // 2)
    leases = []
    for seed in range(2):
        put_prompt(store, prompt(128, seed)).wait(60)
        look(store, prompt(128, seed))
        leases.append(store.lease(prompt(128, seed)))
    report = repack_late(store, monkeypatch, max_bytes=3 * 128 * geometry.token_bytes // 2)
    outcomes = [span.outcome for span in report.spans]
    assert outcomes == ["not committed yet", "over this pass's bytes"]
    assert store.counters.grouped("repacks") == {"late": 1, "yes": 1}
    assert sorted(span.outcome for span in store.repack().spans) == ["lies well", LINGERING]
    for lease in leases:
        lease.release()
    store.flush()
    # What it left is given back behind the flush.
    assert soon(lambda: bool(store.repack().moved) or store.counters["repacks/yes"] == 2)
    assert store.counters["repacks/yes"] == 2
    sound(store)


def test_a_copy_whose_commit_is_late_counts_in_the_repackers_space(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(geometry, repack_space_bytes=3 * 128 * geometry.token_bytes // 2)
    for seed in range(2):
        put_prompt(store, prompt(128, seed)).wait(60)
        look(store, prompt(128, seed))
    report = repack_late(store, monkeypatch)
    assert [span.outcome for span in report.spans] == ["not committed yet", LINGERING]
    sound(store)


@pytest.mark.parametrize("spare", [0, 16 << 10, 1 << 20])
def test_a_dry_run_asks_for_the_room_that_the_copy_takes(
    open_store: Open, geometry: impress.Geometry, spare: int
) -> None:
    """The new header was taken to be as long as the old one: promised moves had no room."""
    store = open_store(geometry, segment_bytes=8 << 20, disk_bytes=8 << 20, disk_high=1.0,
                       disk_low=1.0)  # fmt: skip
    put_prompt(store, prompt(512)).wait(60)
    look(store, prompt(512))
    (record,) = store.catalog.records()
    usage = store.ssd.usage()
    rest = usage.total - usage.used - record.owned_bytes - spare
    assert store.ssd.reserve(rest // PAGE * PAGE) is not None
    (would,) = store.repack(dry_run=True).spans
    (did,) = store.repack().spans
    assert did.outcome == would.outcome.replace("would move", "moved")


@pytest.mark.parametrize("what", ["quarantine", "purge", "split", "lease", "close"])
def test_what_happens_while_a_span_is_copied(
    open_store: Open, geometry: impress.Geometry, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(geometry, window=WINDOW, dram_bytes=0)
    tokens = prompt(256)
    fork = np.concatenate([tokens[:112], prompt(144, seed=3)])
    put_prompt(store, tokens).wait(60)
    look(store, tokens)
    (record,) = store.catalog.records()
    real, leases = store.ssd.write, []

    def write(*args: Any) -> None:
        monkeypatch.setattr(store.ssd, "write", real)
        if what == "quarantine":
            store._home.leaving.quarantine(record.span_id)
        elif what == "purge":
            assert elsewhere(store.purge) == (1, 1)  # the repacker holds it
        elif what == "lease":
            leases.append(store.lease(tokens))
        elif what == "close":
            assert store._repacker is not None
            store._repacker._stop.set()
        real(*args)

    if what == "split":  # stored in full before the copy is read to its end
        seen = store._repacker._copier._copy_plane

        def copy(*args: Any) -> None:
            if store.catalog.counts()["nodes"] == 1:
                put_prompt(store, fork).wait(60)
            seen(*args)

        monkeypatch.setattr(store._repacker._copier, "_copy_plane", copy)
    else:
        monkeypatch.setattr(store.ssd, "write", write)
    report = store.repack()
    store.flush()
    store.check()
    if what in ("quarantine", "purge"):
        assert [s.outcome for s in report.spans] == ["the span left the tree meanwhile"]
        assert store.lookup(tokens) == 0 and store.ssd.usage().used == 0
    elif what == "close":
        assert report.spans == [] and store.catalog.records() == [record]
    else:
        assert report.moved == 1
        assert_serves(store, tokens, 256)
    if what == "split":
        assert store.stats()["nodes"] == 3
        assert_serves(store, fork, 256)
        assert_serves(store, tokens[:112], 112)
    for lease in leases:
        with lease, lease.session() as session:
            assert np.array_equal(
                session.retrieve(1, None)[0].numpy(), kv_of(tokens, geometry)[0][1]
            )
    sound(store)


def test_requests_and_passes_at_the_same_time(open_store: Open, geometry: impress.Geometry) -> None:
    store = open_store(geometry, window=WINDOW)
    prompts = [np.concatenate([prompt(96), prompt(160, seed)]) for seed in range(1, 4)]
    for tokens in prompts:
        put_prompt(store, tokens).wait(60)
    over = threading.Event()

    def serve(tokens: np.ndarray) -> None:
        while not over.is_set():
            assert_serves(store, tokens, 256)

    moved = 0
    with ThreadPoolExecutor(len(prompts)) as pool:
        serving = [pool.submit(serve, tokens) for tokens in prompts]
        try:
            for seed in range(6):
                for tokens in prompts:
                    look(store, tokens, seed, times=40)
                moved += store.repack().moved
        finally:
            over.set()
        for one in serving:
            one.result(60)
    assert moved >= 6
    sound(store)


# ---- the command ---------------------------------------------------------------------------


def run_repack(*args: str | Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys\n"
        "from impress.cli.main import app\n"
        "try: app()\n"
        "finally: assert 'torch' not in sys.modules"
    )
    return forks.python(code, "repack", *map(str, args), has=forks.LIGHT)


def test_the_command_says_what_would_move_and_moves_it(
    tmp_path: Path, geometry: impress.Geometry
) -> None:
    folder = tmp_path / "store"
    sizes = {**SMALL, "segment_bytes": 4 * MIB, "daily_write_bytes": 20 * MIB}
    config = impress.Config(**sizes)
    with impress.PrefixStore.open(folder, geometry, "test", config) as store:
        put_prompt(store, prompt(256)).wait(60)
        look(store, prompt(256))
        left = store.stats()["writes_left_bytes"]
        held = run_repack("--store", folder, "--dry-run")
        assert held.returncode == 2 and "open for writing by process" in held.stderr
    would = run_repack("--store", folder, "--dry-run")
    assert would.returncode == 0 and "1 would move" in would.stdout, would
    done = run_repack("--store", folder, "--json", tmp_path / "report.json")
    assert done.returncode == 0 and "1 moved" in done.stdout, done
    report = json.loads((tmp_path / "report.json").read_text())
    (span,) = report["spans"]
    assert report["moved"] == 1 and span["outcome"] == "moved"
    assert span["after"]["n_bytes"] < span["before"]["n_bytes"]
    assert "1 span looked at, 0 moved" in run_repack("--store", folder).stdout
    with impress.PrefixStore.open(folder, geometry, "test", config) as store:
        assert store.stats()["writes_left_bytes"] < left - MIB // 2  # it was once a new day's bytes
        assert_serves(store, prompt(256), 256)
        sound(store)
    missing = run_repack("--store", tmp_path / "none")
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1


def test_the_command_adds_no_segment_to_a_full_shard(
    tmp_path: Path, geometry: impress.Geometry
) -> None:
    """It does not know the server's disk_bytes: it left 3 MiB of segments in a shard of 2."""
    folder, config = tmp_path / "store", impress.Config(**SMALL, disk_bytes=2 * MIB)
    with impress.PrefixStore.open(folder, geometry, "test", config) as store:
        put_prompt(store, prompt(256)).wait(60)
        look(store, prompt(256))
        assert [span.outcome for span in store.repack().spans] == ["no room for a copy"]
        segments = store.ssd.folder
    for options, said in ((["--dry-run"], "0 would move (0 B)"), ([], "0 moved (0 B)")):
        done = run_repack("--store", folder, *options)
        assert done.returncode == 0 and said in done.stdout, done
        assert sum(path.stat().st_size for path in segments.iterdir()) == 2 * MIB
    with impress.PrefixStore.open(folder, geometry, "test", config) as store:
        assert_serves(store, prompt(256), 256)
        sound(store)


def test_the_command_moves_a_span_of_any_size(
    tmp_path: Path, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None above 4 GiB, the default of a setting that the command has no option for, however much
    its server allows."""
    with impress.PrefixStore.open(tmp_path, geometry, "test", impress.Config(**SMALL)) as store:
        put_prompt(store, prompt(256)).wait(60)
        look(store, prompt(256))
        store.ssd.reserve(MIB)  # a segment more: room for the copy
    small = {"repack_space_bytes": MIB >> 4}  # stands for the 4 GiB
    monkeypatch.setattr(
        "impress.cli.repack.Config", lambda **given: impress.Config(**{**small, **given})
    )
    (shard,) = shards_of(tmp_path)
    (done,) = _repacked(tmp_path, shard, read_identity(tmp_path), dry_run=True).spans
    assert done.outcome == "would move"


def test_a_span_that_does_not_read_back_is_named_and_a_dry_run_leaves_it(
    tmp_path: Path, geometry: impress.Geometry
) -> None:
    """Both dropped it without a word and ended as if all was well."""
    folder = tmp_path / "store"
    with impress.PrefixStore.open(folder, geometry, "test", impress.Config(**SMALL)) as store:
        put_prompt(store, prompt(256)).wait(60)
        look(store, prompt(256))
        (record,) = store.catalog.records()
        flip_a_bit(folder, record.meta, 200)
    for options in (["--dry-run"], []):
        done = run_repack("--store", folder, "--json", "-", *options)
        (span,) = json.loads(done.stdout)["spans"]
        assert done.returncode == 1 and span["outcome"] == "does not read back"
        assert span["span"] == record.span_id and span["move_bytes"] == 0
        assert (span["before"], span["gain"]) == (None, None)
    done = run_repack("--store", folder, "--json", "-")
    assert done.returncode == 0 and json.loads(done.stdout)["spans"] == []
    assert not verify_store(folder).problems


REPACKER = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from conftest import SMALL, look, prompt, put_prompt
import impress
from impress.write.index import Index
from tiers.ssd import SsdTier
store = impress.PrefixStore.open(sys.argv[1], impress.Geometry(2, 4, 2, 128, "float32"), "test",
                                 impress.Config(**SMALL, repack_every_s=0))
for seed in range(3):
    put_prompt(store, prompt(256, seed), wait_s=60)
store.flush()
for seed in range(3):
    look(store, prompt(256, seed), times=40)
where, what = {"write": SsdTier, "sync": SsdTier, "erase": SsdTier, "commit": Index}, sys.argv[3]
real, left = getattr(where[what], what), [1] * int(sys.argv[4])
def struck(*args, **named):
    if left:
        left.pop()
        return real(*args, **named)
    if sys.argv[5] == "behind":
        real(*args, **named)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(where[what], what, struck)
store.repack()
store.flush()
"""


@pytest.mark.parametrize("when", ["before", "behind"])
@pytest.mark.parametrize(("what", "n"), [("write", 0), ("sync", 0), ("commit", 1), ("erase", 0)])
def test_a_repack_killed_at_any_moment_leaves_old_or_new(
    tmp_path: Path, what: str, n: int, when: str
) -> None:
    """It is about to write, sync, commit or erase, or just has."""
    folder, here = tmp_path / "store", str(Path(__file__).parent)
    geometry = impress.Geometry(2, 4, 2, 128, "float32")
    done = forks.python(REPACKER, str(folder), here, what, str(n), when)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not verify_store(folder).problems
    with impress.PrefixStore.open(folder, geometry, "test", impress.Config(**SMALL)) as store:
        store.check()
        assert store.stats()["spans"] == 3
        for seed in range(3):
            assert_serves(store, prompt(256, seed), 256)
        headers = [read_header(store.ssd, record) for record in store.catalog.records()]
        moved = [header.record.span_id for header in headers if header.order is not None]
        assert all(store.history.average(span) is not None for span in moved)
        assert moved or (what, n, when) != ("commit", 1, "behind")
        store.evict(1 << 30)
        store.flush()
        assert store.ssd.usage().used == 0


def test_a_pass_stands_back_while_requests_are_served(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Copying beside a request nearly doubled its time: now a slice is copied if nobody waits."""
    store = open_store(geometry, dram_bytes=0)
    put_prompt(store, prompt(256)).wait(60)
    look(store, prompt(256))
    assert store._repacker is not None
    naps: list[float] = []
    lease = store.lease(prompt(256))

    def nap(seconds: float) -> bool:
        naps.append(seconds)
        if len(naps) == 5:
            lease.release()
        return False

    store._repacker._copier._pace._wait = lambda seconds: False
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(impress.repacking.repack, "PATIENCE_S", 60.0)
        patched.setattr(store._repacker, "_stop", SimpleNamespace(wait=nap, is_set=lambda: False))
        assert store.repack().moved == 1
    assert len(naps) == 5  # as soon as the request has ended it goes on
    assert_serves(store, prompt(256), 256)
