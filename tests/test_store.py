"""What a store promises, seen from outside."""

from __future__ import annotations

import errno
import gc
import itertools
import mmap
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import (
    MIB,
    SMALL,
    assert_serves,
    flip_a_bit,
    kv_of,
    prompt,
    put_prompt,
    read_limit,
    wait_for_promotions,
)
from test_cli_verify import index_values

import impress
import tiers.slots
from impress.policy import AllHeads, Exact, StaticH2O
from impress.stats import _guards
from impress.write import directory, env, folders
from impress.write.draft import Draft
from tiers import files
from tiers.engines import ENGINES, why_not
from tiers.iopool import Lane
from tiers.slots import BufferPool
from tiers.ssd import SsdTier

Open = Callable[..., impress.PrefixStore]


def test_what_is_stored_is_served_bit_for_bit(open_store: Open, geometry: impress.Geometry) -> None:
    store = open_store(geometry)
    tokens = prompt(300)
    stored = put_prompt(store, tokens)
    assert (stored.n_tokens, stored.n_new, stored.refused) == (256, 256, "")
    store.flush()
    assert stored.ready and store.lookup(tokens) == 256
    assert store.lookup(tokens.tolist()) == 256
    assert_serves(store, tokens, 256)
    store.check()


def test_padded_rows_of_unequal_width_are_served(
    open_store: Open, padded: impress.Geometry
) -> None:
    store = open_store(padded)
    tokens = prompt(200)
    put_prompt(store, tokens).wait(60)
    assert_serves(store, tokens, 192)
    assert_serves(store, tokens, 192)  # and again from DRAM


def test_everything_ready_is_there_after_a_restart(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry)
    a, b = prompt(320), prompt(320)
    b[130:] = prompt(190, seed=2)
    for tokens in (a, b):
        put_prompt(store, tokens)
    store.flush()
    store.close()
    again = open_store(geometry)
    again.check()
    for tokens in (a, b):
        assert_serves(again, tokens, 320)
    assert_serves(open_store(geometry, mode="r"), b, 320)


def test_shared_prefixes_are_written_once(open_store: Open, geometry: impress.Geometry) -> None:
    store = open_store(geometry)
    a = prompt(256)
    b = np.concatenate([a[:128], prompt(128, seed=3)])
    put_prompt(store, a).wait(60)
    used = store.stats()["tiers"]["ssd"]["used"]
    stored = put_prompt(store, b)
    stored.wait(60)
    assert stored.n_new == 128
    data = 128 * geometry.token_bytes
    assert data <= store.stats()["tiers"]["ssd"]["used"] - used < 2 * data
    counts = store.stats()
    assert (counts["spans"], counts["nodes"], counts["tokens"]) == (2, 3, 384)
    for tokens in (a, b):
        assert_serves(store, tokens, 256)
    assert put_prompt(store, a).wait(60) and store.stats()["spans"] == 2
    store.check()


def test_a_store_may_go_on_from_what_is_stored(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry)
    tokens = prompt(320)
    put_prompt(store, tokens[:128]).wait(60)
    assert put_prompt(store, tokens, start=100).wait(60)
    assert_serves(store, tokens, 320)
    with pytest.raises(impress.BadInput, match="beyond what is stored"):
        put_prompt(store, prompt(320, seed=9), start=64)


def test_rows_may_come_in_any_order_and_any_pieces(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry)
    tokens = prompt(330)
    keys, values = kv_of(tokens, geometry)
    cuts = [0, 1, 63, 64, 70, 200, 256, 257, 330]
    runs = [(layer, a, b) for layer in (1, 0) for a, b in itertools.pairwise(cuts)]
    with store.writer(tokens) as writer:
        for i in np.random.default_rng(0).permutation(len(runs)).tolist():
            layer, a, b = runs[i]
            k, v = keys[layer][:, a:b].copy(), values[layer][:, a:b].copy()
            writer.put(layer, a, k, v)
            k[:], v[:] = np.nan, np.nan  # the tensors are the caller's again
    assert writer.stored.wait(60)
    assert_serves(store, tokens, 320)


def test_all_layers_or_nothing(open_store: Open, geometry: impress.Geometry) -> None:
    store = open_store(geometry)
    tokens = prompt(192)
    keys, values = kv_of(tokens, geometry)
    with store.writer(tokens) as writer:
        writer.put(0, 0, keys[0], values[0])
        writer.put(1, 0, keys[1][:, :100], values[1][:, :100])
    assert writer.stored.refused.startswith("incomplete: rows missing from layer 1")
    assert not writer.stored.wait(60)
    with pytest.raises(ZeroDivisionError), store.writer(tokens) as writer:
        writer.put(0, 0, keys[0], values[0])
        raise ZeroDivisionError
    assert writer.stored.refused == "abandoned"
    store.flush()
    assert store.lookup(tokens) == 0
    store.close()
    again = open_store(geometry)
    assert again.stats()["tiers"]["ssd"]["used"] == 0


def test_rows_that_are_not_finite_never_become_visible(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry)
    for seed, poison in enumerate((np.nan, np.inf, -np.inf)):
        tokens = prompt(128, seed)
        keys, values = kv_of(tokens, geometry)
        values[1][1, 77, 5] = poison
        stored = store.store(tokens, keys, values)
        with pytest.raises(impress.StoreFailed, match="layer 1 holds NaN or infinite"):
            stored.wait(60)
        with pytest.raises(impress.StoreFailed, match="NaN"):
            store.flush()
        assert store.lookup(tokens) == 0
    store.flush()  # told once
    assert store.stats()["tiers"]["ssd"]["used"] == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_torch_tensors_of_every_dtype(tmp_path: Path, dtype: str) -> None:
    geometry = impress.Geometry(2, 4, 2, 64, dtype)
    tokens, generator = prompt(130), torch.Generator().manual_seed(0)

    def rows() -> list[torch.Tensor]:  # strided, as engines hold them
        made = [torch.randn(130, 2, 64, generator=generator) for _ in range(2)]
        return [t.to(getattr(torch, dtype)).transpose(0, 1) for t in made]

    keys, values = rows(), rows()
    with impress.PrefixStore.open(tmp_path, geometry, "t", impress.Config(**SMALL)) as store:
        store.store(tokens, keys, values).wait(60)
        with store.lease(tokens) as lease, lease.session() as session:
            for layer in range(2):
                k, v, _ = session.retrieve(layer, torch.zeros(4, 1, 64))
                assert k.dtype == keys[layer].dtype
                assert torch.equal(k, keys[layer][:, :128])
                assert torch.equal(v, values[layer][:, :128])


@pytest.mark.parametrize("text", ["\udcff", "a\ud800"])
def test_a_name_that_has_no_utf_8_is_bad_input(
    open_store: Open, geometry: impress.Geometry, text: str
) -> None:
    store = open_store(geometry)
    with pytest.raises(impress.BadInput, match=r"tenant: .* no UTF-8"):
        store.lookup(prompt(64), tenant=text)
    store.close()
    with pytest.raises(impress.BadInput, match=r"namespace: .* no UTF-8"):
        open_store(geometry, namespace=text)


def test_of_stores_that_fail_while_nobody_asks_one_is_kept(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Each error held its rows' sums and labels for as long as nobody called `flush`."""
    store = open_store(geometry)
    others = [found for found in gc.get_objects() if type(found) is Draft]  # of earlier tests
    for seed in range(5):
        keys, values = kv_of(prompt(64, seed), geometry)
        keys[0][:] = np.nan
        with pytest.raises(impress.StoreFailed, match="NaN"):
            store.store(prompt(64, seed), keys, values).wait(60)
    gc.collect()
    assert sum(type(found) is Draft for found in gc.get_objects()) <= len(others) + 1
    with pytest.raises(impress.StoreFailed, match=r"NaN or infinite.* \(and 4 more\)"):
        store.flush()
    store.flush()


def test_what_a_new_store_lies_in_is_durable(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may take the name of a folder that nobody synced, and all that is in it: nothing
    that was READY was found, and an empty store began."""
    synced: set[Path] = set()
    for module in (files, env, directory, folders):
        monkeypatch.setattr(module, "sync_path", synced.add)
    path = open_store(geometry).path
    index = path / "shards/main/index"
    assert {path.parent, path, path / "shards", path / "shards/main", index} <= synced


def test_namespaces_tenants_and_extras_never_meet(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry)
    tokens = prompt(192)
    put_prompt(store, tokens).wait(60)
    assert store.lookup(tokens, tenant="other") == 0
    assert store.lookup(tokens, extra={70: b"image"}) == 64
    put_prompt(store, tokens, tenant="other").wait(60)
    put_prompt(store, tokens, extra={70: b"image"}).wait(60)
    assert store.lookup(tokens, extra={70: b"image"}) == 192
    assert store.lookup(tokens, extra={70: b"another"}) == 64
    assert_serves(store, tokens, 192, tenant="other")
    assert_serves(store, tokens, 192, extra={70: b"image"})
    store.close()
    assert open_store(geometry, namespace="else").lookup(tokens) == 0


def test_a_lease_keeps_its_prefix_through_eviction(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry, dram_bytes=0)
    a, b = prompt(256), prompt(256, seed=1)
    for tokens in (a, b):
        put_prompt(store, tokens).wait(60)
    with store.lease(a):
        assert store.evict(1 << 40) > 0
        store.flush()
        assert store.lookup(b) == 0
        assert_serves(store, a, 256)
    store.evict(1 << 40)
    store.flush()
    assert store.lookup(a) == 0
    assert store.stats()["tiers"]["ssd"]["used"] == 0
    store.check()


def test_a_full_disk_evicts_the_least_recently_used_first(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry, disk_bytes=4 * MIB, dram_bytes=0)
    prompts = [prompt(192, seed) for seed in range(12)]  # 768 KiB of KV each
    for tokens in prompts:
        put_prompt(store, tokens).wait(60)
        store.lease(prompts[0]).release()
    assert store.lookup(prompts[0]) == 192 and store.lookup(prompts[-1]) == 192
    assert store.lookup(prompts[1]) == 0
    assert store.stats()["evicted_spans"] > 0
    assert_serves(store, prompts[0], 192)
    store.check()


def test_more_than_the_disk_is_refused_and_its_space_freed(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry, disk_bytes=2 * MIB)
    stored = put_prompt(store, prompt(1024))
    assert stored.refused.endswith("raise disk_bytes") and not stored.wait(60)
    assert store.stats()["refused"] == {"disk_full": 1}
    assert put_prompt(store, prompt(128)).wait(60)


def test_a_put_that_finds_no_slot_refuses_the_whole_store(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, write = threading.Event(), SsdTier.write

    def slow(*args: Any) -> None:
        assert go.wait(60)
        write(*args)

    store = open_store(geometry, write_buffer_bytes=MIB)
    tokens = prompt(64 * 12)
    keys, values = kv_of(tokens, geometry)
    with monkeypatch.context() as patch:
        patch.setattr(SsdTier, "write", slow)
        try:
            with store.writer(tokens, wait_s=0) as writer:
                for at in range(0, 64 * 12, 64):  # each is on its way to a disk that hangs
                    writer.put(0, at, keys[0][:, at : at + 64], values[0][:, at : at + 64])
        finally:
            go.set()
    assert writer.stored.refused == "no free write slot"
    store.flush()
    assert store.lookup(tokens) == 0
    assert put_prompt(store, tokens, wait_s=60).wait(60)
    assert_serves(store, tokens, 768)


def test_windows_begun_in_more_layers_than_there_are_slots_for_are_stored(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Each held a slot until its last row came. Prompts computed 100 tokens at a time begin a
    window in every layer: with OPT-30B's 48 of 1.75 MiB, the default 64 MiB were gone, `put` waited
    its 30 seconds for itself, and refused the store; so it did every time."""
    store = open_store(geometry, write_buffer_bytes=MIB)
    tokens = prompt(64 * 12)
    keys, values = kv_of(tokens, geometry)
    halves = [*range(0, 64 * 12, 64), *range(32, 64 * 12, 64)]
    with store.writer(tokens, wait_s=60) as writer:
        for at in halves:
            for layer in range(geometry.n_layers):
                rows = slice(at, at + 32)
                writer.put(layer, at, keys[layer][:, rows], values[layer][:, rows])
    assert writer.stored.wait(60), writer.stored.refused
    assert_serves(store, tokens, 768)


def test_a_prompt_larger_than_the_write_buffers_is_stored_by_the_readmes_call(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default a store waited for no write buffer: every prompt beyond `write_buffer_bytes` (512
    tokens of the README's geometry) was refused if the disk was slower than the copying."""
    go, write, acquire = threading.Event(), SsdTier.write, BufferPool.acquire

    def slow(*args: Any) -> None:
        assert go.wait(60)
        write(*args)

    def asked(pool: BufferPool, n_bytes: int, wait_s: float = 0.0) -> Any:
        buffer = acquire(pool, n_bytes)
        if buffer is None and wait_s:
            go.set()  # the disk goes on once somebody waits for it
            buffer = acquire(pool, n_bytes, wait_s)
        return buffer

    monkeypatch.setattr(SsdTier, "write", slow)
    monkeypatch.setattr(BufferPool, "acquire", asked)
    store, tokens = open_store(geometry, write_buffer_bytes=MIB), prompt(1024)
    keys, values = kv_of(tokens, geometry)
    try:
        stored = store.store(tokens, keys, values)
        assert go.is_set() and stored.wait(60), stored.refused
    finally:
        go.set()
    assert_serves(store, tokens, 1024)


def test_reads_come_from_dram_once_promoted(open_store: Open, geometry: impress.Geometry) -> None:
    store = open_store(geometry)
    tokens = prompt(256)
    put_prompt(store, tokens).wait(60)
    for expected in ("ssd", "dram"):
        with store.lease(tokens) as lease, lease.session() as session:
            for layer in range(2):
                session.retrieve(layer, None)
            report = session.report()
        wait_for_promotions(store)
        assert report.rows_by_tier == {expected: 512}
        assert report.bytes_by_tier == {expected: 256 * geometry.token_bytes}
    store.drop_caches()
    assert store.stats()["tiers"]["dram"]["used"] == 0
    assert_serves(store, tokens, 256)


def tiers_of(store: impress.PrefixStore, tokens: np.ndarray) -> dict[str, int]:
    """Rows by tier of one exact read; promotions have ended when it returns."""
    with store.lease(tokens) as lease, lease.session() as session:
        for layer in range(store.geometry.n_layers):
            session.retrieve(layer, None)
        report = session.report()
    wait_for_promotions(store)
    store.check()
    return report.rows_by_tier


def test_chunks_climb_one_tier_a_use_and_stand_in_one_at_a_time(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry, hbm_bytes=MIB // 2, hbm_device="cpu")
    tokens = prompt(256)
    put_prompt(store, tokens).wait(60)
    assert tiers_of(store, tokens) == {"ssd": 512}
    assert tiers_of(store, tokens) == {"dram": 512}
    # Half of it fits. What made room was dropped, not sent down: home has it.
    rows = tiers_of(store, tokens)
    assert rows["hbm"] == 256 and sum(rows.values()) == 512
    stats = store.stats()
    assert stats["emulated"] == ["hbm"]
    assert stats["tiers"]["hbm"]["used"] == MIB // 2
    chunks = 256 * geometry.token_bytes
    assert stats["tiers"]["hbm"]["used"] + stats["tiers"]["dram"]["used"] <= chunks
    assert_serves(store, tokens, 256)


def test_lfu_keeps_what_is_used_often_and_lru_what_was_used_last(
    open_store: Open, geometry: impress.Geometry
) -> None:
    often, last, newcomer = (prompt(128, seed) for seed in range(3))
    budget = 20 * MIB // 16  # two prompts of 512 KiB, and the share of the tables
    for eviction, kept in (("lru", last), ("lfu", often)):
        store = open_store(geometry, dram_bytes=budget, eviction=eviction)
        for tokens in (often, last, newcomer):
            put_prompt(store, tokens).wait(60)
        for tokens in (often, often, often, last, newcomer):
            tiers_of(store, tokens)
        assert tiers_of(store, kept) == {"dram": 256}, eviction
        store.close()


def test_a_device_that_is_not_there_is_refused_with_the_setting_to_change(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("impress.cache.copies.why_not", lambda: "no CUDA driver")
    with pytest.raises(impress.Unsupported, match='no CUDA driver; hbm_device = "cpu"'):
        open_store(geometry, hbm_bytes=MIB)
    with pytest.raises(impress.ConfigError, match="cannot hold one chunk"):
        open_store(geometry, hbm_bytes=4096, hbm_device="cpu")


def test_a_dram_budget_that_cannot_hold_one_chunk_is_refused(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """It was accepted, but nothing was ever kept: every request read the disk."""
    chunk = 64 * geometry.n_kv_heads * geometry.head_dim * 2 * 4
    with pytest.raises(impress.ConfigError, match=rf"dram_bytes {chunk} cannot hold one chunk"):
        open_store(geometry, dram_bytes=chunk)
    assert open_store(geometry, dram_bytes=2 * chunk).stats()["tiers"]["dram"]["total"] >= chunk


def test_a_dram_budget_holds_and_the_answers_stay_right(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry, dram_bytes=MIB, eviction="lru")
    prompts = [prompt(256, seed) for seed in range(5)]
    for tokens in prompts:
        put_prompt(store, tokens).wait(60)
    for _ in range(3):
        for tokens in prompts:
            assert_serves(store, tokens, 256)
            wait_for_promotions(store)
            assert store.stats()["tiers"]["dram"]["total"] <= MIB
            store.check()
    assert store.stats()["evictions"]["dram"] > 0


def test_prefetch_reads_straight_into_the_callers_tensors(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry)
    tokens = prompt(256)
    keys, values = kv_of(tokens, geometry)
    put_prompt(store, tokens).wait(60)

    def out() -> torch.Tensor:
        buffer = store.buffers.acquire(256 * geometry.k_row_bytes)
        return torch.frombuffer(buffer.array, dtype=torch.float32).view(256, 2, 128).transpose(0, 1)

    for make in (out, lambda: torch.empty(2, 256, 128)):  # token-major, then not
        outs = [(make(), make()) for _ in range(2)]
        with store.lease(tokens) as lease, lease.session() as session:
            session.prefetch(outs)
            for layer in (1, 0):
                k, _, _ = session.retrieve(layer, None)
                assert k.data_ptr() == outs[layer][0].data_ptr()
                assert np.array_equal(outs[layer][0].numpy(), keys[layer])
                assert np.array_equal(outs[layer][1].numpy(), values[layer])
            assert session.close()


def test_a_session_outlives_its_lease_once_all_is_retrieved(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry)
    tokens = prompt(128)
    put_prompt(store, tokens).wait(60)
    with store.lease(tokens) as lease:
        session = lease.session()
        k, _, _ = session.retrieve(0, None)
    assert np.array_equal(k.numpy(), kv_of(tokens, geometry)[0][0])
    with pytest.raises(impress.ImpressError, match="lease has ended"):
        session.retrieve(1, None)
    session.close()
    with pytest.raises(impress.ImpressError, match="closed"):
        session.retrieve(0, None)


def test_a_closed_store_serves_nothing_rather_than_what_is_in_the_buffers(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Tasks that had never run used to count as done: a session handed out unread memory."""
    store = open_store(geometry)
    tokens = prompt(128)
    put_prompt(store, tokens).wait(60)
    session = store.lease(tokens).session()
    store.close()
    with pytest.raises(impress.PrefixLost) as lost:
        session.retrieve(0, None)
    assert lost.value.reason == "io"


def test_an_expired_lease_is_a_lost_prefix(open_store: Open, geometry: impress.Geometry) -> None:
    store = open_store(geometry, lease_timeout_s=1e-9)
    tokens = prompt(128)
    put_prompt(store, tokens).wait(60)
    with store.lease(tokens) as lease, pytest.raises(impress.PrefixLost) as lost:
        lease.session()
    assert lost.value.reason == "expired"


@pytest.mark.parametrize("cached", [False, True])
def test_a_flipped_bit_is_a_loss_then_a_miss_never_an_answer(
    open_store: Open, geometry: impress.Geometry, cached: bool
) -> None:
    store = open_store(geometry)
    tokens = prompt(256)
    put_prompt(store, tokens).wait(60)
    if cached:  # sums tables in memory: the rows themselves must give the flip away
        assert_serves(store, tokens, 256)
        wait_for_promotions(store)
        store._copies.clear()
    flip_a_bit(store.path, store.catalog.records()[0].parts[0], 100_001)
    with store.lease(tokens) as lease, lease.session() as session:
        with pytest.raises(impress.PrefixLost) as lost:
            for layer in range(2):
                session.retrieve(layer, None)
    assert lost.value.reason == "checksum"
    assert store.lookup(tokens) == 0 and store.stats()["lost"] == {"checksum": 1}
    assert store.stats()["quarantined_spans"] == 1
    store.flush()
    store.check()
    assert put_prompt(store, tokens).wait(60)
    assert_serves(store, tokens, 256)


def test_a_flipped_bit_in_dram_costs_the_copy_not_the_prefix(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry)
    tokens = prompt(128)
    put_prompt(store, tokens).wait(60)
    assert_serves(store, tokens, 128)
    wait_for_promotions(store)
    store._copies.chunks[0].tier._arena[70_000] ^= 1
    with store.lease(tokens) as lease, lease.session() as session:
        with pytest.raises(impress.PrefixLost, match="dram"):
            for layer in range(2):
                session.retrieve(layer, None)
    assert_serves(store, tokens, 128)  # from home


def test_a_damaged_header_shortens_the_lease(open_store: Open, geometry: impress.Geometry) -> None:
    store = open_store(geometry)
    tokens = prompt(256)
    put_prompt(store, tokens[:128]).wait(60)
    put_prompt(
        store,
        tokens,
        start=128,
    ).wait(60)
    assert store.stats()["quarantined_spans"] == 0
    bad = max(store.catalog.records(), key=lambda record: record.first_window)
    flip_a_bit(store.path, bad.meta, 40)
    assert_serves(store, tokens, 128)
    assert store.lookup(tokens) == 128 and store.stats()["quarantined_spans"] == 1
    store.flush()
    store.check()


def test_a_span_that_goes_bad_is_counted_with_what_hangs_from_it(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """An alert counts them; no test had seen the count at anything but 0."""
    store = open_store(geometry)
    tokens = prompt(256)
    put_prompt(store, tokens[:128]).wait(60)
    put_prompt(store, tokens, start=128).wait(60)
    first = min(store.catalog.records(), key=lambda record: record.first_window)
    flip_a_bit(store.path, first.meta, 40)
    assert_serves(store, tokens, 0)
    assert store.lookup(tokens) == 0 and store.stats()["quarantined_spans"] == 2


def test_a_late_read_is_a_loss_and_its_buffer_waits_for_it(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry, io_threads=2)
    tokens = prompt(128)
    put_prompt(store, tokens).wait(60)
    with store.lease(tokens) as lease, lease.session() as session:
        stuck = threading.Event()
        blockers = store._pool.submit(Lane.DEMAND, [lambda: stuck.wait(60) and None] * 2)
        with read_limit(store, 0.05), pytest.raises(impress.PrefixLost) as lost:
            session.retrieve(0, None)
        assert lost.value.reason == "late"
        assert store.buffers.used_bytes > 0
        stuck.set()
        blockers.wait(60)
    wait_for_promotions(store)
    assert store.buffers.used_bytes == 0
    assert_serves(store, tokens, 128)


def test_ctrl_c_while_a_lease_waits_for_the_disk_pins_nothing(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was about to hold could not be evicted, purged or repacked until the store closed:
    there was no lease to give it back."""
    store = open_store(geometry)
    tokens = prompt(128)
    put_prompt(store, tokens).wait(60)
    store.drop_caches()
    interrupted, met, read = threading.Event(), threading.Event(), store.ssd.read

    def once(*_: object) -> None:
        if not met.is_set():
            met.set()
            raise KeyboardInterrupt

    def slow(*reads: Any) -> Any:
        # Again and again, as a user would: Python misses a signal that comes just before it waits.
        while not interrupted.wait(0.05):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return read(*reads)

    with monkeypatch.context() as patched:
        patched.setattr(store.ssd, "read", slow)
        before = signal.signal(signal.SIGINT, once)
        try:
            with pytest.raises(KeyboardInterrupt):
                store.lease(tokens)
        finally:
            interrupted.set()
            assert store._pool.idle(60)
            signal.signal(signal.SIGINT, before)
    assert_serves(store, tokens, 128)
    assert store.stats()["leases"] == 0
    assert store.purge() == (1, 0)  # one span, which nobody holds
    store.check()


@contextmanager
def no_more_files(store: impress.PrefixStore) -> Iterator[None]:
    """The process has as many files open as it may, and none of the store's segments."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    store.ssd.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def no_permission(store: impress.PrefixStore) -> Iterator[None]:
    """Somebody took away the right to read the store's segments; none is open."""

    def refused(_path: Path) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    store.ssd.close()
    with patch.object(store.ssd._files, "_open", refused):
        yield


@pytest.mark.parametrize(
    ("without", "said", "reason"),
    [
        (no_more_files, "Too many open files", "shortage"),
        (no_permission, "Permission denied", "permission"),
    ],
)
def test_a_process_without_files_or_permission_misses_and_loses_nothing(
    open_store: Open, geometry: impress.Geometry, without: Any, said: str, reason: str
) -> None:
    """The medium does not fail, but what was stored was deleted, with all that hangs from it."""
    store = open_store(geometry, dram_bytes=0)
    tokens = prompt(128)
    scores = np.random.default_rng(0).random((2, 128), dtype=np.float32)
    put_prompt(store, tokens, importance=scores).wait(60)
    with without(store), store.lease(tokens) as lease:
        assert lease.miss_reason == "lost"
    for policy in (Exact(), StaticH2O(keep=0.5)):
        with store.lease(tokens) as lease, lease.session(policy) as session, without(store):
            with pytest.raises(impress.PrefixLost, match=said) as lost:
                session.retrieve(0, torch.zeros(geometry.n_heads, 1, geometry.head_dim))
            assert lost.value.reason == reason
    with without(store):
        assert [span.outcome for span in store.repack().spans] == ["failed"]
    assert store.stats()["quarantined_spans"] == 0
    assert_serves(store, tokens, 128)
    store.flush()
    store.check()


def read_only(n_bytes: int) -> mmap.mmap:
    """Memory that nobody may write to, like that of a file mapped for reading."""
    return mmap.mmap(-1, n_bytes, prot=mmap.PROT_READ)


def pages_gone(n_bytes: int) -> mmap.mmap:
    """Shared memory that was cut short after it was mapped: touching it is a fault."""
    fd = os.memfd_create("gone")
    os.ftruncate(fd, n_bytes)
    area = mmap.mmap(fd, n_bytes)
    os.ftruncate(fd, 0)
    os.close(fd)
    return area


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("memory", [read_only, pages_gone])
@pytest.mark.parametrize("engine", ENGINES)
def test_memory_that_takes_no_rows_is_not_blamed_on_the_disk(
    open_store: Open,
    geometry: impress.Geometry,
    engine: str,
    memory: Callable[[int], mmap.mmap],
) -> None:
    """The kernel's "Bad address" counted as an error of the disk: the healthy span was dropped for
    good, with all that hangs from it."""
    if why_not(engine):
        pytest.skip(f"{engine}: {why_not(engine)}")
    store, tokens = open_store(geometry, dram_bytes=0, io_engine=engine), prompt(256)
    put_prompt(store, tokens).wait(60)
    n_bytes = 256 * geometry.k_row_bytes
    outs = [torch.frombuffer(memory(n_bytes), dtype=torch.float32) for _ in "kv"]
    k, v = (out.view(256, 2, 128).transpose(0, 1) for out in outs)
    with store.lease(tokens) as lease, lease.session() as session:
        with pytest.raises(impress.PrefixLost, match="Bad address") as lost:
            session.retrieve(0, None, out=(k, v))
        assert lost.value.reason == "shortage"
    assert store.stats()["quarantined_spans"] == 0
    assert_serves(store, tokens, 256)


def test_a_table_that_cannot_be_read_for_want_of_memory_is_a_miss(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The MemoryError came out of `lease`, which promises never to raise for a miss."""
    store = open_store(geometry, dram_bytes=0)
    tokens = prompt(128)
    put_prompt(store, tokens).wait(60)
    store.drop_caches()

    def short(*_args: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("impress.spans.tables.decode_header", short)
        with store.lease(tokens) as lease:
            assert (lease.n_tokens, lease.miss_reason) == (0, "lost")
    assert store.stats()["quarantined_spans"] == 0
    assert_serves(store, tokens, 128)
    store.check()


@contextmanager
def no_more_memory(store: impress.PrefixStore, after: int = 0) -> Iterator[None]:
    """The system grants `after` more mappings, and the store keeps no buffer to use again."""
    store.buffers._kept.clear()
    left = iter(range(after))

    def mapped(*args: Any, **options: Any) -> mmap.mmap:
        if next(left, None) is None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return mmap.mmap(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers.slots, "mmap", SimpleNamespace(**{**vars(mmap), "mmap": mapped}))
        yield


@pytest.mark.parametrize("after", range(9))
def test_a_process_out_of_memory_misses_and_keeps_nothing_pinned(
    open_store: Open, after: int
) -> None:
    """An OSError went through the engine, which would have computed the prompt instead, and the
    copies it had been about to read could never be evicted again."""
    geometry = impress.Geometry(4, 4, 2, 128, "float32")
    store = open_store(geometry, dram_bytes=1 << 20)
    tokens = prompt(128)
    scores = np.random.default_rng(0).random((4, 128), dtype=np.float32)
    put_prompt(store, tokens, importance=scores).wait(60)
    assert_serves(store, tokens, 128)
    wait_for_promotions(store)
    query = torch.zeros(geometry.n_heads, 1, geometry.head_dim)
    for policy in (Exact(), StaticH2O(keep=0.5), AllHeads(keep=0.5)):
        lost = 0
        for ahead in (False, True):
            with store.lease(tokens) as lease, lease.session(policy) as session:
                with no_more_memory(store, after), suppress(impress.PrefixLost):
                    lost += 1
                    if ahead:
                        session.prefetch()
                    for layer in range(4):
                        session.retrieve(layer, query, suffix_lse=torch.zeros(geometry.n_heads, 1))
                    lost -= 1
        assert lost or after
    wait_for_promotions(store)  # and for reads that were given up
    assert store.buffers.used_bytes == 0
    assert not any(cache._pins.any() for cache in store._copies.chunks)
    store.drop_caches()
    with no_more_memory(store), store.lease(tokens) as lease:
        assert lease.miss_reason == "lost"
    assert_serves(store, tokens, 128)
    store.check()


@pytest.mark.parametrize("begun", [0, 32], ids=["whole windows", "the rest of a window"])
def test_a_put_that_is_given_no_memory_refuses_the_whole_store(
    open_store: Open, geometry: impress.Geometry, begun: int
) -> None:
    """It raised what only a read may fail with: not an ImpressError, nor what `put` documents."""
    store = open_store(geometry)
    tokens = prompt(192)
    keys, values = kv_of(tokens, geometry)
    with store.writer(tokens) as writer:
        writer.put(0, 0, keys[0][:, :begun], values[0][:, :begun])
        with no_more_memory(store):
            writer.put(0, begun, keys[0][:, begun:], values[0][:, begun:])
        for layer in range(geometry.n_layers):
            writer.put(layer, 0, keys[layer], values[layer])
    assert "Cannot allocate memory" in writer.stored.refused
    store.flush()
    assert store.stats()["refused"] == {"shortage": 1}
    assert store.lookup(tokens) == 0
    assert put_prompt(store, tokens).wait(60)
    assert_serves(store, tokens, 192)
    store.check()


def test_importance_that_cannot_be_read_in_time_is_a_loss(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """It is read like everything else, by a thread that may hang: the caller does not."""
    store = open_store(geometry, io_threads=1)
    tokens = prompt(128)
    scores = np.random.default_rng(0).random((2, 128), dtype=np.float32)
    put_prompt(store, tokens, importance=scores).wait(60)
    query = torch.zeros(geometry.n_heads, 1, geometry.head_dim)
    with store.lease(tokens) as lease, lease.session(StaticH2O(keep=0.5)) as session:
        stuck = threading.Event()
        blocker = store._pool.submit(Lane.DEMAND, [lambda: stuck.wait(60) and None])
        said = pytest.raises(impress.PrefixLost, match=r"header took more than 0\.05 s")
        with read_limit(store, 0.05), said as lost:
            session.retrieve(0, query)
        assert lost.value.reason == "late" and store.stats()["lost"] == {"late": 1}
        stuck.set()
        blocker.wait(60)
        session.retrieve(0, query)
    assert_serves(store, tokens, 128)


def test_importance_is_kept_in_the_header(open_store: Open, geometry: impress.Geometry) -> None:
    store = open_store(geometry)
    tokens = prompt(130)
    scores = np.random.default_rng(0).random((2, 130), dtype=np.float32)
    put_prompt(store, tokens, importance=scores).wait(60)
    from impress.spans.tables import read_header

    header = read_header(store.ssd, store.catalog.records()[0])
    assert np.array_equal(header.importance, scores[:, :128])


def test_two_writers_of_the_same_prompt_leave_one_copy(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry)
    tokens = prompt(256)
    keys, values = kv_of(tokens, geometry)
    with store.writer(tokens) as first, store.writer(tokens[:200]) as second:
        for layer in (0, 1):
            second.put(layer, 0, keys[layer][:, :200], values[layer][:, :200])
            first.put(layer, 0, keys[layer], values[layer])
    assert first.stored.wait(60) and second.stored.wait(60)
    store.flush()
    store.check()
    assert_serves(store, tokens, 256)
    store.close()
    again = open_store(geometry)
    again.check()
    assert_serves(again, tokens, 256)


def test_threads_store_and_read_side_by_side(open_store: Open, geometry: impress.Geometry) -> None:
    store = open_store(geometry, dram_bytes=MIB, disk_bytes=12 * MIB, write_buffer_bytes=4 * MIB)
    failures: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            for turn in range(6):
                tokens = np.concatenate(
                    [prompt(128, worker % 2), prompt(128, 10 * worker + turn % 3)]
                )
                put_prompt(store, tokens, wait_s=60).wait(60)
                assert store.lookup(tokens) in (0, 128, 256)
                with store.lease(tokens) as lease:
                    n = lease.n_tokens
                    if not n:
                        continue
                    with lease.session() as session:
                        keys, values = kv_of(tokens, geometry)
                        for layer in (0, 1):
                            k, v, _ = session.retrieve(layer, None)
                            assert np.array_equal(k.numpy(), keys[layer][:, :n])
                            assert np.array_equal(v.numpy(), values[layer][:, :n])
        except BaseException as err:
            failures.append(err)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    store.flush()
    store.check()
    assert store.stats()["hits"]
    assert store.stats()["leases"] == 0 and store.stats()["pinned_spans"] == 0


def test_counters_and_metrics_tell_what_happened(
    open_store: Open, geometry: impress.Geometry
) -> None:
    import urllib.request

    store = open_store(geometry, metrics_port=0)
    tokens = prompt(128)
    store.lease(tokens).release()
    store.lease(tokens[:10]).release()
    put_prompt(store, tokens).wait(60)
    assert_serves(store, tokens, 128)
    stats = store.stats()
    assert stats["misses"] == {"not_stored": 1, "too_short": 1}
    assert (stats["hits"], stats["hit_tokens"], stats["stored_tokens"]) == (1, 128, 128)
    assert stats["load_latency"]["count"] == 2
    text = urllib.request.urlopen(f"http://127.0.0.1:{store.metrics_port}/metrics").read().decode()
    for line in (
        'impress_misses_total{reason="not_stored"} 1.0',
        "impress_hits_total 1.0",
        f'impress_read_bytes_total{{tier="ssd"}} {128.0 * geometry.token_bytes}',
        "impress_layer_load_seconds_count 2.0",
        "impress_spans 1.0",
    ):
        assert line in text, text


def test_every_metric_of_the_guard_is_what_it_says() -> None:
    """A test by name and kind alone would not see two of them swapped."""
    wanted = ("shadows", "exceeded", "understated", "dropped", "sent_back", "bound",
              "worst_missing_mass", "reruns", "flips")  # fmt: skip
    ledger = {key: float(i) for i, key in enumerate(wanted, 2)}
    named = {"namespace": "ab" * 16, "policy": "P()"}
    for state, trusted in (("trusted", 1.0), ("earning", 0.0)):
        families = list(_guards([{**ledger, **named, "state": state}]))
        found = {family.name: family.samples[0] for family in families}
        assert {s.labels["policy"] for s in found.values()} == {"P()"}
        values = {name.removeprefix("impress_guard_"): s.value for name, s in found.items()}
        assert values == {**ledger, "trusted": trusted}


def test_a_flush_that_the_disk_holds_up_ends_and_can_be_repeated(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, go, sync = open_store(geometry), threading.Event(), SsdTier.sync

    def held(tier: SsdTier, slots: Any) -> None:
        assert go.wait(60)
        sync(tier, slots)

    monkeypatch.setattr(SsdTier, "sync", held)
    stored = put_prompt(store, prompt(128))
    with pytest.raises(impress.StoreFailed, match=r"flush: not done within 0\.05 s"):
        store.flush(0.05)
    assert not stored.ready
    go.set()
    store.flush()
    assert stored.ready
    assert_serves(store, prompt(128), 128)


def test_a_damaged_index_value_is_counted_and_costs_its_prompt_alone(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry)
    for seed in (1, 2):
        put_prompt(store, prompt(128, seed)).wait(60)
    store.close()
    with index_values(store.path) as values:
        values[min(values)][30] ^= 1
    again = open_store(geometry)
    assert again.stats()["damaged_spans"] == 1
    assert [again.lookup(prompt(128, seed)) for seed in (1, 2)] == [0, 128]
    assert_serves(again, prompt(128, 2), 128)
    put_prompt(again, prompt(128, 1)).wait(60)
    assert_serves(again, prompt(128, 1), 128)
    again.flush()
    again.check()
