"""All rows of packed spans: in the prompt's order, or as they lie."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import kv_of, prompt, put_prompt, wait_for_promotions
from test_direct import OUTS

import impress
from impress.policy import Paper, Policy, Random, StaticH2O
from impress.read import load
from impress.spans.layout import SpanLayout

Open = Callable[..., impress.PrefixStore]
N = 640
#: SHARED: several rows share a piece. ALONE: a row is a piece.
SHARED = impress.Geometry(2, 16, 2, 64, "float32", 128)
ALONE = impress.Geometry(2, 16, 16, 64, "float32", 128)


def read_all(
    store: impress.PrefixStore, tokens: np.ndarray, n: int, policy: Policy | None = None,
    first: int = 0, outs: list | None = None, *, in_order: bool = True,
) -> bool:  # fmt: skip
    """Check that every row of the first n tokens is there once, where `pos` says; return whether in
    the prompt's order, as it always is from a session that is `in_order`."""
    keys, values = kv_of(tokens, store.geometry)
    every, ordered = np.arange(first, n), True
    asked = torch.ones(16, 2, 64), torch.zeros(16, 2)
    with store.lease(tokens[:n]) as lease:
        assert lease.n_tokens == n
        with lease.session(policy, first, in_order=in_order) as session:
            session.prefetch(outs)
            for layer in range(store.geometry.n_layers):
                k, v, pos = session.retrieve(layer, asked[0], suffix_lse=asked[1])
                if outs is not None:
                    assert k.data_ptr() == outs[layer][0].data_ptr()
                at = pos.numpy()
                assert np.array_equal(np.sort(at), every)
                assert np.array_equal(k.numpy(), keys[layer][:, at])
                assert np.array_equal(v.numpy(), values[layer][:, at])
                ordered = ordered and np.array_equal(at, every)
    assert ordered or not in_order
    return ordered


def test_what_is_cold_of_a_packed_span_that_is_held_in_part_is_what_is_read(
    open_store: Open,
) -> None:
    """Chunks were counted by where windows would lie in order: all were said to be warm where most
    came from the SSD, and the chosen mode learnt the SSD's seconds as those of memory."""
    store = open_store(ALONE, dram_bytes=64 << 20)
    tokens = prompt(N)
    importance = np.random.default_rng(1).random((2, N)).astype(np.float32)
    put_prompt(store, tokens, importance=importance).wait(60)
    with store.lease(tokens) as lease, lease.session(StaticH2O(0.25)) as session:
        for layer in range(2):  # the most important rows, in a quarter of the chunks, climb
            session.retrieve(layer, torch.ones(16, 2, 64))
    wait_for_promotions(store)
    with store.lease(tokens[:128]) as lease:
        cold, every = lease.cold_bytes(), 128 * ALONE.token_bytes
        assert 0.5 * every < cold < every
    store._copies.clear()
    with store.lease(tokens[:128]) as lease:
        assert lease.cold_bytes() == every


@pytest.mark.parametrize("geometry", [SHARED, ALONE], ids=["shared pieces", "a piece a row"])
@pytest.mark.parametrize("hbm_chunks", [0, 4])
def test_packed_rows_come_in_order_from_home_and_from_memory(
    geometry: impress.Geometry, hbm_chunks: int, open_store: Open
) -> None:
    """From one span and from two, held whole or in part, in no cache, in some, and mixed."""
    chunk = SpanLayout.of(geometry, 64, 1).chunk_bytes
    store = open_store(
        geometry, hbm_bytes=hbm_chunks * chunk, hbm_device="cpu", dram_bytes=9 * chunk
    )
    tokens, rng = prompt(N), np.random.default_rng(3)
    for n in (256, N):
        worth = rng.random((2, n))
        assert put_prompt(store, tokens[:n], importance=worth, wait_s=30).wait(60)
    for turn in range(4):
        for n in (128, 256, 512, N):
            read_all(store, tokens, n)
            wait_for_promotions(store)
        with store.lease(tokens) as lease, lease.session(Random(0.3, turn)) as session:
            session.retrieve(0, None)
        wait_for_promotions(store)
        store.check()
    rows = store.stats()["rows_from"]
    assert rows["ssd"] and rows["dram"] and bool(rows.get("hbm")) == bool(hbm_chunks)
    assert store.buffers.used_bytes == 0


@pytest.mark.parametrize("geometry", [SHARED, ALONE], ids=["shared pieces", "a piece a row"])
@pytest.mark.parametrize(
    "packed", [(True, True), (True, False), (False, True)],
    ids=["packed", "packed and by position", "by position and packed"],
)  # fmt: skip
def test_who_needs_no_order_gets_rows_as_they_lie(
    geometry: impress.Geometry, packed: tuple[bool, bool], open_store: Open
) -> None:
    """From home and from memory, into the caller's memory and the session's, from some token on;
    alongside sessions that want the same rows in order, whose reads they may share."""
    chunk = SpanLayout.of(geometry, 64, 1).chunk_bytes
    store = open_store(geometry, hbm_bytes=4 * chunk, hbm_device="cpu", dram_bytes=9 * chunk)
    tokens, rng = prompt(N), np.random.default_rng(3)
    for n, is_packed in zip((256, N), packed, strict=True):
        worth = rng.random((2, n)) if is_packed else None
        assert put_prompt(store, tokens[:n], importance=worth, wait_s=30).wait(60)
    for turn in range(6):
        in_order = bool(turn % 3)
        for n, first in ((256, 0), (N, 0), (N, 64), (N, 320), (128, 0)):
            came = read_all(store, tokens, n, first=first, in_order=in_order)
            whole = (not first and n >= 256, n == N and first <= 256)
            asked = (first < 256, n > 256)
            spans = list(zip(packed, asked, whole, strict=True))
            apart = any(lies and some and not every for lies, some, every in spans)  # among others
            assert came == (
                in_order or apart or not any(lies and every for lies, _, every in spans)
            )
            wait_for_promotions(store)
        outs = OUTS[turn % 3](geometry)
        assert read_all(store, tokens, N, outs=outs, in_order=in_order) == in_order
        wait_for_promotions(store)
        store.check()
    rows = store.stats()["rows_from"]
    assert all(rows[tier] for tier in ("ssd", "dram", "hbm"))
    assert store.buffers.used_bytes == 0


def given_outs(geometry: impress.Geometry, n_rows: int) -> list:
    """The caller's memory, which holds something else so far."""
    return [
        [torch.full((n_rows, geometry.n_kv_heads, dim), 7.0).transpose(0, 1) for dim in (64, 128)]
        for _ in range(geometry.n_layers)
    ]


@pytest.mark.parametrize("geometry", [SHARED, ALONE], ids=["shared pieces", "a piece a row"])
@pytest.mark.parametrize("into", [False, True], ids=["to the session's memory", "to the caller's"])
def test_what_is_held_of_a_packed_span_may_fill_other_chunks_than_its_own(
    geometry: impress.Geometry, into: bool, open_store: Open
) -> None:
    """Rising importance puts a span's first windows into its last chunks, which they fill. Beside a
    span whose rows lie among others' they come in order: placed by their chunks' number and not by
    their own, they were other windows' rows, or what the memory held from another request."""
    chunk = SpanLayout.of(geometry, 64, 1).chunk_bytes
    store = open_store(geometry, dram_bytes=9 * chunk)
    tokens = prompt(N)
    fork = np.concatenate((tokens[:128], prompt(N, 1)[128:]))
    rising = np.tile(np.arange(256.0), (2, 1))
    assert put_prompt(store, tokens[:256], importance=rising, wait_s=30).wait(60)
    spread = np.random.default_rng(3).random((2, N))
    assert put_prompt(store, fork, importance=spread, wait_s=30).wait(60)
    for turn in range(6):
        for n, first in ((128, 0), (256, 0), (N, 0), (256, 64), (N, 64)):
            outs = given_outs(geometry, n - first) if into else None
            read_all(store, fork, n, first=first, outs=outs, in_order=bool(turn % 3))
            wait_for_promotions(store)
    for first in (64, 128):  # a span alone, whose beginning is not asked for
        read_all(store, tokens, 256, first=first, in_order=False)
    wait_for_promotions(store)
    rows = store.stats()["rows_from"]
    assert rows["ssd"] and rows["dram"] and store.buffers.used_bytes == 0


#: How important rows are: [layers, rows].
WORTHS: dict[str, Callable[[np.random.Generator], np.ndarray | None]] = {
    "no order": lambda rng: None,
    "scattered": lambda rng: rng.random((2, N)),
    "rising": lambda rng: np.tile(np.arange(float(N)), (2, 1)),
    "by windows": lambda rng: np.repeat(rng.random((2, N // 64)), 64, axis=1),
    "nearly by windows": lambda rng: (
        np.repeat(rng.random((2, N // 64)), 64, axis=1) + 0.05 * rng.random((2, N))
    ),
}


@pytest.mark.parametrize("seed", range(6))
def test_any_part_of_any_packed_prefix_comes_right(seed: int, open_store: Open) -> None:
    """Prompts that fork, packed in any order, from any window to any other, in any tier."""
    rng = np.random.default_rng(seed)
    geometry = (SHARED, ALONE)[seed % 2]
    store = open_store(geometry, dram_bytes=9 * SpanLayout.of(geometry, 64, 1).chunk_bytes)
    prompts = [prompt(N, 100 * seed)]
    for i in (1, 2, 3):
        at = int(rng.integers(1, N // 64)) * 64
        prompts.append(np.concatenate((prompts[rng.integers(i)][:at], prompt(N, seed + i)[at:])))
    for tokens in prompts:
        worth = list(WORTHS.values())[rng.integers(len(WORTHS))](rng)
        n = int(rng.integers(N // 128, N // 64 + 1)) * 64
        for end in (n, N):
            given = None if worth is None else worth[:, :end]
            put_prompt(store, tokens[:end], importance=given, wait_s=30).wait(60)
    for _ in range(24):
        tokens, n = prompts[rng.integers(4)], int(rng.integers(1, N // 64 + 1)) * 64
        first = int(rng.integers(n // 64)) * 64
        outs = given_outs(geometry, n - first) if rng.integers(2) else None
        read_all(store, tokens, n, first=first, outs=outs, in_order=bool(rng.integers(2)))
        wait_for_promotions(store)
    store.check()
    assert store.buffers.used_bytes == 0


@pytest.mark.parametrize("probe", ["heads3-v1", "int4-v2"], ids=["by records", "by all keys"])
def test_a_layer_that_falls_back_comes_as_it_lies_but_not_beside_its_keys(
    probe: str, open_store: Open
) -> None:
    """The keys used to look at it are in order: its values must not come in another one."""
    store = open_store(SHARED, hbm_device="cpu", probes=(probe,))
    tokens, policy = prompt(N), Paper(alpha=0.0)  # which looks at records of three heads
    worth = np.random.default_rng(3).random((2, N))
    assert put_prompt(store, tokens, importance=worth, wait_s=30).wait(60)
    for _ in range(2):
        assert read_all(store, tokens, N, policy)
        assert read_all(store, tokens, N, policy, in_order=False) == (probe == "int4-v2")
        wait_for_promotions(store)


def test_rows_that_need_no_order_are_not_put_in_one(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ordering was a pass over all bytes: all of a prefix that rows are chosen from took 1.3 times
    as long to read as all of one that is read whole (Llama-3-8B, two cores)."""
    store = open_store(SHARED, dram_bytes=0)
    tokens = prompt(N)
    worth = np.random.default_rng(3).random((2, N))
    assert put_prompt(store, tokens, importance=worth, wait_s=30).wait(60)
    monkeypatch.setattr(load, "take_rows", None)  # which puts them in order
    monkeypatch.setattr(load, "direct_of", lambda *_args, **_options: None)
    assert not read_all(store, tokens, N, in_order=False)
    assert not read_all(store, tokens, N, outs=OUTS[1](SHARED), in_order=False)
    with pytest.raises(TypeError):
        read_all(store, tokens, N)


@pytest.mark.parametrize("outs", [True, False], ids=["into memory given", ""])
def test_rows_as_they_lie_beside_rows_among_others_cost_no_more_than_in_order(
    outs: bool, open_store: Open
) -> None:
    """From a span held whole and one held in part: all chunks with a wanted row were read whole,
    and all rows put in order from there, whereas rows asked for in order are read in runs."""
    store, tokens, moved = open_store(ALONE, dram_bytes=0, read_gap_bytes=0), prompt(N), [0]
    for n, seed in ((256, 1), (N, 2)):
        worth = np.random.default_rng(seed).random((2, n))
        assert put_prompt(store, tokens[:n], importance=worth, wait_s=30).wait(60)
    for in_order in (True, False):
        given = [[out[:, :448] for out in pair] for pair in OUTS[1](ALONE)] if outs else None
        assert read_all(store, tokens, 448, outs=given, in_order=in_order)
        moved.append(store.stats()["read_bytes"]["ssd"])
    assert moved[2] - moved[1] == moved[1]
