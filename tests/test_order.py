"""Packed spans: rows lie by importance, and nobody who reads them can tell."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import assert_serves, flip_a_bit, kv_of, prompt, put_prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sparse import N_TOKENS, POLICIES, SHAPES, asked, fill, kv, retrieve_all

import impress
from impress.errors import BadInput
from impress.policy import Exact, Paper, Policy, StaticH2O
from impress.spans.order import RowOrder, by_worth, order_bytes
from impress.spans.tables import read_header
from impress.upkeep.verify import verify_store
from tiers.slots import BufferPool

Open = Callable[..., impress.PrefixStore]


def scores_of(n_layers: int, n: int, seed: int = 0) -> np.ndarray:
    """Importance with ties, different in every layer."""
    return np.random.default_rng(seed).integers(0, 40, (n_layers, n)).astype(np.float32)


def orders_of(store: impress.PrefixStore) -> list[RowOrder | None]:
    return [read_header(store.ssd, record).order for record in store.catalog.records()]


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(1, 200), st.integers(0, 9))
def test_an_order_and_its_inverse_agree_and_survive_encoding(
    layers: int, rows: int, epoch: int
) -> None:
    rng = np.random.default_rng(rows)
    slots = np.stack([rng.permutation(rows) for _ in range(layers)])
    order = RowOrder.of(slots, epoch)
    raw = order.encode()
    assert len(raw) == order.n_bytes == order_bytes(layers, rows)
    back = RowOrder.decode(raw, layers, rows, epoch)
    for layer in range(layers):
        assert np.array_equal(back.slots(layer), slots[layer])
        assert np.array_equal(back.at(layer, slots[layer]), np.arange(rows))


def test_spans_beyond_64_ki_rows_take_four_bytes_a_row() -> None:
    rows = 65_537
    order = RowOrder.of(np.roll(np.arange(rows), 1)[None])
    assert order.n_bytes == 4 * rows
    assert np.array_equal(RowOrder.decode(order.encode(), 1, rows, 0).ordinals, order.ordinals)
    assert RowOrder.of(np.arange(65_536)[None]).n_bytes == 2 * 65_536


def test_what_is_no_permutation_is_refused() -> None:
    good = RowOrder.of(np.array([[2, 0, 1]])).encode()
    words = np.frombuffer(good, "<u2")
    for bad in ([2, 0, 2], [3, 0, 1], [65535, 0, 1]):
        with pytest.raises(impress.FormatError, match="row order"):
            RowOrder.decode(np.array(bad, "<u2").tobytes(), 1, 3, 0)
    with pytest.raises(impress.FormatError, match="row order"):
        RowOrder.decode(words[:2].tobytes(), 1, 3, 0)


def test_rows_go_by_worth_inside_their_group_and_equals_stay_as_they_lie() -> None:
    worth = np.array([1, 5, 5, 0, 9, 9, 2, 2], dtype=np.float32)
    place = np.arange(8)
    assert by_worth(worth, [(0, 8)], place).tolist() == [4, 5, 1, 2, 6, 7, 0, 3]
    first = by_worth(worth, [(0, 4), (4, 4)], place)
    assert first.tolist() == [1, 2, 0, 3, 4, 5, 6, 7]
    now = np.empty(8, dtype=np.int64)
    now[[4, 2, 1, 5, 7, 6, 3, 0]] = place
    again = by_worth(worth, [(0, 8)], now)
    assert again.tolist() == [4, 5, 2, 1, 7, 6, 0, 3]
    now[again] = place
    assert np.array_equal(by_worth(worth, [(0, 8)], now), again)


def test_a_store_with_importance_lies_in_its_order_and_is_served_in_position_order(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry)
    tokens, scores = prompt(300), scores_of(2, 300)
    put_prompt(store, tokens, importance=scores).wait(60)
    (order,) = orders_of(store)
    assert order is not None and order.epoch == 0
    for layer in range(2):
        want = np.argsort(-scores[layer, :256], kind="stable")
        assert np.array_equal(order.slots(layer), want)
    for _ in range(2):
        assert_serves(store, tokens, 256)
    header = read_header(store.ssd, store.catalog.records()[0])
    assert header.importance is not None
    assert np.array_equal(header.importance, scores[:, :256])
    store.check()
    store.close()
    assert not verify_store(store.path).problems
    again = open_store(geometry)
    assert_serves(again, tokens, 256)
    again.check()


def test_padded_rows_are_packed_too(open_store: Open, padded: impress.Geometry) -> None:
    store = open_store(padded)
    tokens = prompt(200)
    put_prompt(store, tokens, importance=scores_of(3, 200)).wait(60)
    assert orders_of(store)[0] is not None
    for _ in range(2):
        assert_serves(store, tokens, 192)


def test_prefixes_that_share_part_of_a_packed_span_are_served(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """A split leaves views whose rows lie in chunks of the whole span."""
    store = open_store(geometry, window=16)
    a = prompt(256)
    b = np.concatenate([a[:112], prompt(144, seed=3)])
    for tokens in (a, b):
        put_prompt(store, tokens, importance=scores_of(2, 256)).wait(60)
    assert store.stats()["nodes"] == 3 and store.stats()["spans"] == 2
    for _ in range(3):  # from home, from DRAM, from both
        for tokens, n in ((b, 256), (a, 256), (a[:40], 32), (b[:130], 128)):
            assert_serves(store, tokens, n)
        store.check()


@pytest.mark.parametrize("packed", [False, True])
def test_a_session_may_begin_behind_windows_its_caller_has(
    open_store: Open, geometry: impress.Geometry, packed: bool
) -> None:
    """Across a split, in packed spans and plain ones, from home and from DRAM."""
    store = open_store(geometry, window=16)
    a = prompt(256)
    b = np.concatenate([a[:112], prompt(144, seed=3)])
    for tokens in (a, b):
        scores = scores_of(2, 256) if packed else None
        put_prompt(store, tokens, importance=scores).wait(60)
    for _ in range(2):
        for first in (0, 16, 112, 128, 240):
            with store.lease(b) as lease, lease.session(first=first) as session:
                session.prefetch()
                for layer in range(geometry.n_layers):
                    k, v, pos = session.retrieve(layer, None)
                    want_k, want_v = (plane[layer] for plane in kv_of(b, geometry))
                    assert np.array_equal(k.numpy(), want_k[:, first:])
                    assert np.array_equal(v.numpy(), want_v[:, first:])
                    assert pos.tolist() == list(range(first, 256))
                rows = sum(session.report().rows_by_tier.values())
                assert rows == (256 - first) * geometry.n_layers
    store.check()


def test_only_whole_windows_are_skipped_and_only_where_all_rows_are_brought(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry)
    put_prompt(store, prompt(256)).wait(60)
    with store.lease(prompt(256)) as lease:
        for first in (-64, 32, 256):
            with pytest.raises(BadInput, match="whole windows of 64"):
                lease.session(first=first)
        with pytest.raises(BadInput, match="cannot skip 64"):
            lease.session(Paper(), first=64)


def test_importance_that_comes_in_pieces_keeps_position_order(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry)
    tokens, scores = prompt(256), scores_of(2, 256)
    keys, values = kv_of(tokens, geometry)
    with store.writer(tokens) as writer:
        writer.put(0, 0, keys[0], values[0], scores[0])  # whole: packed
        for rows in (slice(0, 100), slice(100, 256)):
            writer.put(1, rows.start, keys[1][:, rows], values[1][:, rows], scores[1, rows])
    writer.stored.wait(60)
    (order,) = orders_of(store)
    assert order is not None
    assert np.array_equal(order.slots(0), np.argsort(-scores[0], kind="stable"))
    assert np.array_equal(order.slots(1), np.arange(256))
    assert_serves(store, tokens, 256)
    with store.writer(prompt(256, seed=1)) as writer:
        for layer, rows in ((0, slice(0, 64)), (0, slice(0, 256)), (1, slice(0, 256))):
            importance = None if layer else scores[0, rows]
            k, v = kv_of(prompt(256, seed=1), geometry)
            writer.put(layer, rows.start, k[layer][:, rows], v[layer][:, rows], importance)
    writer.stored.wait(60)
    assert orders_of(store)[1] is None
    assert_serves(store, prompt(256, seed=1), 256)


def test_equal_importance_keeps_position_order_and_costs_nothing(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry)
    put_prompt(store, prompt(256), importance=np.ones((2, 256), np.float32)).wait(60)
    assert orders_of(store) == [None]
    with store.lease(prompt(256)):
        bare = store.stats()["tables_bytes"]
    put_prompt(store, prompt(256, 1), importance=scores_of(2, 256)).wait(60)
    with store.lease(prompt(256, 1)):
        assert store.stats()["tables_bytes"] == 2 * bare + 2 * 256 * 2


def unpacked_and_packed(store: impress.PrefixStore) -> None:
    """Store one prompt twice: for a tenant in position order, without one as `fill` packs it."""
    keys, values = kv(store.geometry)
    scores = np.random.default_rng(0).random((2, N_TOKENS), dtype=np.float32)
    with store.writer(prompt(N_TOKENS), tenant="plain") as writer:
        for first in range(0, N_TOKENS, 32):
            rows = slice(first, first + 32)
            for layer in range(2):
                k, v = keys[layer][:, rows], values[layer][:, rows]
                writer.put(layer, first, k, v, scores[layer, rows])
    assert writer.stored.wait(60)
    fill(store)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_policy_chooses_and_brings_the_same_rows_from_packed_spans(
    open_store: Open, shape: str
) -> None:
    store = open_store(SHAPES[shape], probes=("heads3-v1", "int4-v2"))
    unpacked_and_packed(store)
    assert [order is None for order in orders_of(store)] == [True, False, False, False]
    tokens = prompt(N_TOKENS)
    policies: list[Policy] = [*POLICIES, Exact()]
    with store.lease(tokens) as packed, store.lease(tokens, tenant="plain") as plain:
        for policy in policies * 2:
            got, lines = retrieve_all(packed, policy)
            want, _ = retrieve_all(plain, policy)
            for line, ours, theirs in zip(lines, got, want, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
                assert sum(line["rows"].values()) == len(ours[2])
    store.check()


def test_rows_that_matter_lie_together(open_store: Open) -> None:
    """The purpose of it all: fewer bytes for the rows that importance names."""
    store = open_store(SHAPES["mha"], dram_bytes=0, read_gap_bytes=0)
    unpacked_and_packed(store)
    policy = StaticH2O(keep=0.2)
    with store.lease(prompt(N_TOKENS)) as packed:
        _, dense = retrieve_all(packed, policy)
    with store.lease(prompt(N_TOKENS), tenant="plain") as plain:
        _, scattered = retrieve_all(plain, policy)
    for line, other in zip(dense, scattered, strict=True):
        least = line["chosen"] * store.geometry.token_bytes // 2
        assert line["bytes"]["ssd"] <= least + 3 * 2 * 2 * 4096  # a piece's end in each span
        assert line["bytes"]["ssd"] < other["bytes"]["ssd"] / 2


def test_a_prefetch_into_given_tensors_fills_them_in_position_order(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry)
    tokens = prompt(256)
    put_prompt(store, tokens[:128], importance=scores_of(2, 128)).wait(60)
    put_prompt(store, tokens).wait(60)  # a second span, in position order
    keys, values = kv_of(tokens, geometry)
    buffers = BufferPool(None)
    outs = []
    for _ in range(2):
        pair = []
        for _ in range(2):
            buffer = buffers.acquire(256 * 1024)
            flat = torch.frombuffer(buffer.array, dtype=torch.float32)
            pair.append(flat.view(256, 2, 128).transpose(0, 1))
        outs.append((pair[0], pair[1]))
    with store.lease(tokens) as lease, lease.session() as session:
        session.prefetch(outs)
        for layer in range(2):
            k, v, _ = session.retrieve(layer, None)
            assert k.data_ptr() == outs[layer][0].data_ptr()
            assert np.array_equal(k.numpy(), keys[layer])
            assert np.array_equal(v.numpy(), values[layer])


def test_a_damaged_row_order_is_a_loss(open_store: Open, geometry: impress.Geometry) -> None:
    store = open_store(geometry)
    put_prompt(store, prompt(256), importance=scores_of(2, 256)).wait(60)
    (record,) = store.catalog.records()
    order = read_header(store.ssd, record).order
    assert order is not None
    raw = (store.ssd.folder / f"{record.meta.segment:08d}.seg").read_bytes()
    flip_a_bit(store.path, record.meta, raw.index(order.encode()) - record.meta.off + 100)
    with store.lease(prompt(256)) as lease:
        assert lease.n_tokens == 0 and lease.miss_reason == "lost"
    store.flush()
    assert store.lookup(prompt(256)) == 0
    store.check()


def test_map_work_is_in_every_line(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake clocks: each reading moves the wall clock by two ticks, the processor's by one."""
    monkeypatch.setattr("impress.stats.monotonic", itertools.count(0, 2 / 1024).__next__)
    monkeypatch.setattr("impress.stats.thread_time", itertools.count(0, 1 / 1024).__next__)
    store = open_store(SHAPES["mha"], probes=("heads3-v1",))
    fill(store)
    with store.lease(prompt(N_TOKENS)) as lease, lease.session(Paper(keep=0.1)) as session:
        query, lse = asked(store.geometry, 0)
        session.retrieve(0, query, suffix_lse=lse)
        (line,) = session.report().per_layer
        assert line["map_ms"] == 2 * line["map_cpu_ms"] > 0
