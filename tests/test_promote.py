"""What climbs to faster tiers, what makes way for it, and that all tiers give the same answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MIB, flip_a_bit, kv_of, prompt, put_prompt
from hypothesis import given, settings
from hypothesis import strategies as st

import impress
from impress.cache.chunks import MARGIN, ChunkCache
from impress.cache.levels import only_fastest
from impress.policy import AllHeads, Contiguous, Exact, Pages, Paper, Policy, Quality, Recency
from impress.read import promote
from impress.read.parts import Source
from impress.read.promote import Looked, by_layer, bytes_of
from impress.read.reading import Reading
from impress.read.shadow import Seen, ShadowSession
from impress.read.worth import judge, ranks_if_used
from impress.selection.choices import Selection
from impress.selection.identify import Asked, select
from impress.usage.notes import Note
from impress.usage.remembered import HALF_LIFE
from tiers.iopool import Lane
from tiers.slots import aligned
from tiers.ticket import until

Open = Callable[..., impress.PrefixStore]
Answer = list[tuple[np.ndarray, np.ndarray, np.ndarray]]

GEOMETRY = impress.Geometry(2, 4, 4, 64, "float32")
CHUNK = 64 * 2 * 4 * 64 * 4  # bytes of K and V
N = 384  # six chunks per layer
EVICTIONS = ("importance", "lru", "lfu", "prefix-lru")


def settled(store: impress.PrefixStore) -> impress.PrefixStore:
    """Wait until everything that follows requests has run."""
    assert store._pool.idle(60)
    store.check()
    return store


def ask(store: impress.PrefixStore, tokens: np.ndarray, policy: Policy) -> tuple[Answer, dict]:
    """The answer of every layer under a policy, always with the same query; rows by tier."""
    g = store.geometry
    query = torch.randn(g.n_heads, 5, g.head_dim, generator=torch.Generator().manual_seed(1))
    answer = []
    with store.lease(tokens) as lease, lease.session(policy) as session:
        for layer in range(g.n_layers):
            k, v, pos = session.retrieve(layer, query, suffix_lse=torch.zeros(g.n_heads, 5))
            answer.append((k.numpy().copy(), v.numpy().copy(), pos.numpy()))
        rows = session.report().rows_by_tier
    settled(store)
    return answer, rows


def assert_same(one: Answer, other: Answer) -> None:
    for a, b in zip(one, other, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def in_tier(store: impress.PrefixStore, tier: str = "dram") -> int:
    return sum(placed.chunks[tier] for placed in store.placement())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "policy",
    [
        Paper(keep=0.1, gate=False), Quality(max_missing_mass=0.3), AllHeads(0.05),
        Contiguous(keep=0.1), Exact(),
    ],
    ids=lambda policy: policy.name,
)  # fmt: skip
def test_selections_and_answers_are_the_same_from_every_tier(
    open_store: Open, policy: Policy, packed: bool
) -> None:
    store = open_store(
        GEOMETRY, probes=("heads3-v1", "int4-v2", "pages16-v1"), hbm_bytes=2 * MIB,
        hbm_device="cpu",
    )  # fmt: skip
    tokens = prompt(N)
    order = np.random.default_rng(0).random((2, N)) if packed else None
    put_prompt(store, tokens, importance=order).wait(60)
    cold, from_home = ask(store, tokens, policy)
    warm, from_dram = ask(store, tokens, policy)
    hot, from_hbm = ask(store, tokens, policy)
    assert_same(cold, warm)
    assert_same(cold, hot)
    assert set(from_home) == {"ssd"} and set(from_dram) == {"dram"} and set(from_hbm) == {"hbm"}
    assert store.stats()["promotions_failed"] == 0
    assert in_tier(store) == 0  # one copy, in the tier above
    assert store._copies.chunks[1].tier.usage().used == 0  # and nobody has it pinned


def test_a_store_that_closes_reads_no_more_for_its_caches(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read all that was queued for caches that were about to go: on a slow disk for longer than
    `close` waits, and then files and memory stayed open."""
    store, begun, go = open_store(GEOMETRY), threading.Event(), threading.Event()
    fetch = promote._fetch
    put_prompt(store, prompt(N)).wait(60)

    def slow(*args: Any) -> None:
        begun.set()
        assert go.wait(60)
        fetch(*args)

    monkeypatch.setattr(promote, "_fetch", slow)
    query = torch.zeros(GEOMETRY.n_heads, 1, GEOMETRY.head_dim)
    with store.lease(prompt(N)) as lease, lease.session(Recency(keep=0.2)) as session:
        for layer in range(GEOMETRY.n_layers):
            session.retrieve(layer, query, suffix_lse=torch.zeros(GEOMETRY.n_heads, 1))
    assert begun.wait(60)
    closing = threading.Thread(target=store.close)
    closing.start()
    assert until(lambda: store._pool.closing, 60)
    go.set()
    closing.join(60)
    assert not closing.is_alive()
    assert store.stats()["promotion_read_bytes"].get("ssd", 0) == 0


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_what_a_sparse_request_used_climbs_whole_and_nothing_else_does(
    open_store: Open, eviction: str
) -> None:
    store = open_store(GEOMETRY, eviction=eviction, read_gap_bytes=0)
    tokens = prompt(N)
    put_prompt(store, tokens).wait(60)
    _, rows = ask(store, tokens, Recency(keep=0.2))  # 77 rows: the last chunk, a part of one before
    assert rows == {"ssd": 2 * 77}
    stats = store.stats()
    assert in_tier(store) == 4
    assert stats["chunks_from"] == {"dram": 0, "ssd": 4}
    # The last chunk was read whole by the request; the one before is read for the copy.
    assert stats["promotion_read_bytes"] == {"ssd": 2 * CHUNK}
    assert stats["promotions"] == {"dram": 4} and stats["promoted_bytes"] == {"dram": 4 * CHUNK}
    _, rows = ask(store, tokens, Recency(keep=0.2))
    assert rows == {"dram": 2 * 77}
    assert store.stats()["chunks_from"] == {"dram": 4, "ssd": 4}
    assert store.stats()["rows_from"] == {"dram": 2 * 77, "ssd": 2 * 77}


def test_a_chunk_that_was_read_in_part_climbs_from_the_tier_below_and_leaves_it(
    open_store: Open,
) -> None:
    store = open_store(GEOMETRY, read_gap_bytes=0, hbm_bytes=2 * MIB, hbm_device="cpu")
    tokens = prompt(N)
    put_prompt(store, tokens).wait(60)
    ask(store, tokens, Recency(keep=0.2))
    assert (in_tier(store), in_tier(store, "hbm")) == (4, 0)
    ask(store, tokens, Recency(keep=0.2))
    assert (in_tier(store), in_tier(store, "hbm")) == (0, 4)
    moved = store.stats()["promotion_read_bytes"]  # one chunk of each layer, in each climb
    assert moved == {"ssd": 2 * CHUNK, "dram": 2 * CHUNK}


@pytest.mark.parametrize("policy", [Exact(), Recency(keep=0.2)], ids=lambda policy: policy.name)
def test_a_copy_that_fails_takes_no_place(open_store: Open, policy: Policy) -> None:
    """A chunk being copied when memory ran out could not be found, though its place was taken,
    until the store was closed."""
    store = open_store(GEOMETRY, read_gap_bytes=0)
    put_prompt(store, prompt(N)).wait(60)
    (cache,) = store._reading.copies.chunks
    write = cache.tier.write

    def fails(*_: object) -> None:
        raise MemoryError("no more")

    cache.tier.write = fails  # type: ignore[method-assign]
    ask(store, prompt(N), policy)
    assert in_tier(store) == 0 and cache.tier.usage().used == 0
    assert store.buffers.used_bytes == 0
    cache.tier.write = write  # type: ignore[method-assign]
    ask(store, prompt(N), policy)
    assert in_tier(store) == (12 if isinstance(policy, Exact) else 4)


def test_a_copy_that_fails_for_no_known_reason_is_told_and_stops_no_other(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for it: its error was kept where nobody looks, and the copies of one request's
    other chunks were left out."""
    store, real, calls = open_store(GEOMETRY, read_gap_bytes=0), promote._read, count()

    def read(*given: Any) -> None:
        if next(calls) == 0:
            raise TypeError("not foreseen")
        real(*given)

    monkeypatch.setattr(promote, "_read", read)
    put_prompt(store, prompt(N)).wait(60)
    ask(store, prompt(N), Recency(keep=0.2))  # one chunk of each layer is read for the copy
    assert in_tier(store) == 3
    assert store.stats()["promotions_failed"] == 1
    assert "a copy to dram failed" in caplog.text and "not foreseen" in caplog.text
    assert store.buffers.used_bytes == 0


def test_copies_that_a_caller_spoilt_failed_and_were_not_promoted(open_store: Open) -> None:
    """Copies were counted as they were made, before they were compared with their sums: those that
    were thrown away stood among the promoted."""
    store = open_store(GEOMETRY, io_threads=1)
    put_prompt(store, prompt(N)).wait(60)
    outs: list[Any] = [[rows_of_a_plane() for _ in range(2)] for _ in range(2)]
    busy, begun = threading.Event(), threading.Event()
    with store.lease(prompt(N)) as lease, lease.session() as session:
        session.prefetch(outs)
        settled(store)  # all of it is read
        hog = store._pool.submit(Lane.DEMAND, [lambda: begun.set() or (busy.wait(60) and None)])
        assert begun.wait(60)  # it holds the only thread: the copies are made at the close
        for layer in range(2):
            session.retrieve(layer, None)
        outs[1][0][:, 100] = 0
        session.close()
    busy.set()
    hog.wait(60)
    stats = settled(store).stats()
    assert in_tier(store) == 6, "the other layer's"
    assert stats["promotions"] == {"dram": 6} and stats["promoted_bytes"] == {"dram": 6 * CHUNK}
    assert stats["promotions_failed"] == 1


def rows_of_a_plane() -> torch.Tensor:
    """Memory that K or V of a layer is read straight into."""
    flat = torch.frombuffer(aligned(N * 4 * 64 * 4), dtype=torch.float32)
    return flat.view(N, 4, 64).transpose(0, 1)


def test_what_chunks_are_worth_is_asked_once_a_layer_however_they_lie(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is work on the whole span, and was done for every run: for a long prompt with every second
    chunk in DRAM, as many times as it has pairs of chunks."""
    store, asked = open_store(GEOMETRY), []
    put_prompt(store, prompt(N)).wait(60)
    ask(store, prompt(N), Exact())
    (cache,) = store._reading.copies.chunks
    (record,) = store.catalog.records()
    for layer in range(2):
        cache.drop_windows(record.span_id, layer, np.arange(0, 6, 2))
    assert in_tier(store) == 6

    def counted(reading: Reading, source: Source, layer: int, used: np.ndarray) -> np.ndarray:
        asked.append(layer)
        return ranks_if_used(reading, source, layer, used)

    monkeypatch.setattr("impress.read.climb.ranks_if_used", counted)
    ask(store, prompt(N), Exact())
    assert sorted(asked) == [0, 1] and in_tier(store) == 12


def copied_bytes(store: impress.PrefixStore) -> int:
    tiers = settled(store).stats()["tiers"]
    return int(tiers["dram"]["used"] + tiers["hbm"]["used"])


@pytest.mark.parametrize("how", ["purge", "evict"])
@pytest.mark.parametrize("warm", [False, True], ids=["from home", "from dram"])
@pytest.mark.parametrize("policy", [Exact(), Recency(keep=0.2)], ids=lambda policy: policy.name)
def test_what_leaves_home_while_a_request_is_on_its_way_leaves_no_copy(
    open_store: Open, policy: Policy, warm: bool, how: str
) -> None:
    """The work that follows a request came after its span was forgotten: purged rows lay in memory
    until the close."""
    store = open_store(
        GEOMETRY, read_gap_bytes=0, segment_bytes=4 * MIB, hbm_bytes=2 * MIB, hbm_device="cpu",
        follow_every_s=0,
    )  # fmt: skip
    for tokens, tenant in ((prompt(N), ""), (prompt(64), "his")):
        put_prompt(store, tokens, tenant=tenant).wait(60)
    if warm:
        ask(store, prompt(N), policy)
    kept, lease = store.lease(prompt(64), tenant="his"), store.lease(prompt(N))
    with kept, lease.session(policy) as session:  # the segment stays, evicted rows and all
        for layer in range(2):
            session.retrieve(layer, torch.zeros(4, 1, 64))
        if how == "purge":
            assert store.purge("") == (1, 1)
        lease.release()
        store.flush()
        if how == "evict":
            assert store.evict(1) > 0
        assert copied_bytes(store) == 0
    assert copied_bytes(store) == 0 and store.history.used_bytes == 0


def budget(n_chunks: int) -> int:
    """DRAM that leaves n_chunks for chunks; the sixteenth for tables comes on top."""
    return -(-n_chunks * CHUNK * 16 // 15) + 4096


def test_by_prefix_the_beginning_stays_in_every_layer(open_store: Open) -> None:
    """Room for one and a half prompts: what goes for the second is the first's later half."""
    a, b = prompt(N, 1), prompt(N, 2)
    store = open_store(GEOMETRY, eviction="prefix-lru", dram_bytes=budget(18), io_threads=1)
    for tokens in (a, b):
        put_prompt(store, tokens).wait(60)
    for tokens in (a, b):
        ask(store, tokens, Exact())
    _, rows = ask(store, a[: N // 2], Exact())
    assert rows == {"dram": N}
    ask(store, a[: N // 4], Exact())  # used again: b's tail is older now
    _, rows = ask(store, b[: N // 2], Exact())
    assert rows == {"dram": N}


def test_a_prompt_too_long_for_the_cache_leaves_its_beginning_in_every_layer(
    open_store: Open,
) -> None:
    store = open_store(GEOMETRY, eviction="prefix-lru", dram_bytes=budget(6), io_threads=1)
    put_prompt(store, prompt(N)).wait(60)
    ask(store, prompt(N), Exact())
    _, rows = ask(store, prompt(N)[: N // 2], Exact())
    assert rows == {"dram": N}


def test_of_equals_that_take_turns_the_first_to_come_stays(open_store: Open) -> None:
    a, b = prompt(N, 1), prompt(N, 2)
    for eviction, hits in (("importance", 3 * 2 * N), ("lfu", 3 * 2 * N), ("lru", 0)):
        store = open_store(GEOMETRY, eviction=eviction, dram_bytes=budget(12), io_threads=1)
        for tokens in (a, b):
            put_prompt(store, tokens).wait(60)
        for tokens in (a, b) * 4:
            ask(store, tokens, Exact())
        assert store.stats()["rows_from"]["dram"] == hits, eviction
        store.close()


@dataclass(frozen=True)
class Named:
    """Chooses one row of each of these chunks."""

    chunks: tuple[int, ...]
    name: str = "named"
    needs_suffix_lse: bool = False
    probe: str | None = None


@select.register
def _(policy: Named, asked: Asked) -> Selection:
    return Selection(np.array(policy.chunks) * 64, 0.1, 0.1, False, "given")


def test_by_last_use_only_the_chunks_that_hold_wanted_rows_are_used(open_store: Open) -> None:
    """All from the first to the last of them counted as used: the one truly used last went."""
    store = open_store(GEOMETRY, eviction="lru", dram_bytes=budget(6), io_threads=1)
    put_prompt(store, prompt(N)).wait(60)
    for chunks in ((0,), (1,), (2,), (1,), (0, 2), (5,)):
        ask(store, prompt(N), Named(chunks))
    (span,) = (record.span_id for record in store.catalog.records())
    (cache,) = store._copies.chunks
    for layer in range(2):
        assert np.flatnonzero(cache.has(span, layer, np.arange(6))).tolist() == [0, 2, 5]


def test_lfu_remembers_uses_of_what_is_in_no_cache(open_store: Open) -> None:
    """A new copy began at one use, and any was let in: with more prompts than fit a cache, none was
    ever there for its second use, however often it was asked for."""
    often, *others = (prompt(N, seed) for seed in range(1, 5))
    store = open_store(GEOMETRY, eviction="lfu", dram_bytes=budget(12), io_threads=1)
    for tokens in (often, *others):
        put_prompt(store, tokens).wait(60)
    for seldom in others:
        ask(store, often, Exact())
        ask(store, seldom, Exact())
    assert ask(store, often, Exact())[1] == {"dram": 2 * N}
    assert store.stats()["evictions"] == {"dram": 0}


@pytest.mark.parametrize("policy", [Contiguous(keep=0.25, period=1), Pages(keep=0.25)])
def test_what_a_query_chose_by_units_is_learnt(open_store: Open, policy: Policy) -> None:
    """Such a choice does not say what mass it misses, and was taken for one that no query made."""
    store = open_store(GEOMETRY, probes=("pages16-v1",))
    put_prompt(store, prompt(N)).wait(60)
    answer, _ = ask(store, prompt(N), policy)
    (span,) = (record.span_id for record in store.catalog.records())
    average = store.history.average(span)
    assert average is not None
    for layer, (_, _, positions) in enumerate(answer):
        assert np.array_equal(np.flatnonzero(average[layer]), positions)


def test_a_layer_retrieved_twice_is_one_use_of_all_its_rows(open_store: Open) -> None:
    store = open_store(GEOMETRY)
    put_prompt(store, prompt(N)).wait(60)
    with store.lease(prompt(N)) as lease, lease.session(Named((1, 3))) as session:
        session.retrieve(0, torch.zeros(4, 1, 64))
        session.policy = Named((3, 4))
        session.retrieve(0, torch.zeros(4, 1, 64))
    settled(store)
    (span,) = (record.span_id for record in store.catalog.records())
    worth = store.history.worth(span, 0)
    average = store.history.average(span)
    assert worth is not None and average is not None
    assert np.flatnonzero(average[0] == 1).tolist() == [64, 192, 256]
    assert np.exp2(worth.ranks - 1 / HALF_LIFE)[[1, 3, 4]] == pytest.approx(1 / 64)


def test_a_layer_retrieved_twice_is_decided_about_only_where_both_times_were() -> None:
    """All its rows are used where either retrieval took all."""

    def looked(rows: list[int] | None, decided: bool) -> Looked:
        positions = None if rows is None else np.array(rows, dtype=np.int64)
        return Looked(positions, decided, SimpleNamespace(layer=1))  # type: ignore[arg-type]

    few, every, blind = looked([1, 5], True), looked(None, False), looked([2], False)
    for pair in ([few, every], [every, few], [few, blind], [blind, few]):
        (both,) = by_layer(pair)
        assert not both.decided
        assert (both.positions is None) == any(one is every for one in pair)


def test_what_is_used_more_drives_out_what_is_used_less(open_store: Open) -> None:
    store = open_store(GEOMETRY, dram_bytes=budget(12), io_threads=1)
    seldom, often = prompt(N, 1), prompt(N, 2)
    for tokens in (seldom, often):
        put_prompt(store, tokens).wait(60)
    ask(store, seldom, Exact())
    ask(store, often, Exact())
    assert ask(store, seldom, Exact())[1] == {"dram": 2 * N}
    for _ in range(3):
        ask(store, often, Exact())
    assert ask(store, often, Exact())[1] == {"dram": 2 * N}
    assert store.stats()["evictions"] == {"dram": 12}


def test_chunks_whose_rows_matter_more_drive_out_those_whose_rows_matter_less(
    open_store: Open,
) -> None:
    store = open_store(GEOMETRY, dram_bytes=budget(3), io_threads=1)  # layers climb in turn
    tokens = prompt(N)
    put_prompt(store, tokens).wait(60)
    (span,) = (record.span_id for record in store.catalog.records())
    everything = np.arange(N, dtype=np.int64)
    often = everything[(everything < 128) | (everything % 8 == 0)]  # chunks 0, 1; a few elsewhere
    store.history.request([])
    store.history.note(Note(span, N, 0, 0, N, often))
    store.history.note(Note(span, N, 1, 0, N, np.arange(64, 128)))
    ask(store, tokens, Exact())
    kept = store._copies.chunks[0]
    assert [kept.has(span, layer, np.arange(6)).tolist().count(True) for layer in (0, 1)] == [2, 1]
    assert kept.has(span, 0, np.arange(2)).all() and kept.has(span, 1, np.array([1])).all()
    stats = store.stats()
    share = {tier: use["important_share"] for tier, use in stats["tiers"].items()}
    assert share["dram"] == pytest.approx(1)
    assert share["ssd"] == pytest.approx((2 + 4 / 8 + 1) / 12, rel=1e-3)
    (placed,) = store.placement()
    assert placed.chunks == {"dram": 3} and placed.share == share["ssd"]
    assert placed.score > 0


def test_what_requests_need_every_row_of_stays_though_few_rows_were_once_chosen(
    open_store: Open,
) -> None:
    """A prefix read whole ten times gave way to one read twice: two of its rows had been chosen
    before, so its chunks were worth next to nothing."""
    store = open_store(GEOMETRY, dram_bytes=budget(12), io_threads=1)
    often, seldom = prompt(N, 1), prompt(N, 2)
    for tokens in (often, seldom):
        put_prompt(store, tokens).wait(60)
    with store.lease(often) as lease:
        (span,) = (source.span for source in lease.sources)
    store.history.request(Note(span, N, layer, 0, N, np.array([0, 100])) for layer in (0, 1))
    for _ in range(10):
        ask(store, often, Exact())
    for _ in range(2):
        ask(store, seldom, Exact())
    assert ask(store, often, Exact())[1] == {"dram": 2 * N}


def test_of_chunks_read_in_part_those_that_are_worth_most_are_fetched(open_store: Open) -> None:
    """As many as there is room for, over all layers together."""
    store = open_store(GEOMETRY, dram_bytes=budget(6), io_threads=1, read_gap_bytes=0)
    tokens = prompt(N)
    put_prompt(store, tokens).wait(60)
    (span,) = (record.span_id for record in store.catalog.records())
    rows = np.arange(N, dtype=np.int64)
    often = rows[(rows >= 192) | (rows % 64 == 0)]  # chunks 3 to 5; a row of each other one
    store.history.request(Note(span, N, layer, 0, N, often) for layer in (0, 1))
    ask(store, tokens, Named((0, 1, 2, 3, 4, 5)))
    (cache,) = store._copies.chunks
    for layer in (0, 1):
        assert np.flatnonzero(cache.has(span, layer, np.arange(6))).tolist() == [3, 4, 5]
    assert store.stats()["promotion_read_bytes"] == {"ssd": 6 * CHUNK}


def test_placement_tells_of_a_span_that_nothing_is_known_of(open_store: Open) -> None:
    store = open_store(GEOMETRY)
    put_prompt(store, prompt(128)).wait(60)
    (placed,) = store.placement()
    assert placed[1:] == (2, {"dram": 0}, None, None)
    assert {use["important_share"] for use in store.stats()["tiers"].values()} == {None}


def test_bytes_that_went_bad_at_home_are_not_promoted(open_store: Open) -> None:
    store = open_store(GEOMETRY, read_gap_bytes=0)
    tokens = prompt(N)
    put_prompt(store, tokens).wait(60)
    (record,) = store.catalog.records()
    with store.lease(tokens) as lease, lease.session(Recency(keep=0.01)) as session:
        for layer in range(2):
            session.retrieve(layer, torch.zeros(4, 1, 64))
        # Rows that the request did not read, of a chunk that it used.
        flip_a_bit(store.path, record.parts[0], 5 * CHUNK // 2)
    settled(store)
    assert store.stats()["promotions_failed"] == 1
    assert in_tier(store) == 1
    assert store.lookup(tokens) == N  # a request for those rows will find out
    keys, _ = kv_of(tokens, GEOMETRY)
    assert np.array_equal(ask(store, tokens, Recency(keep=0.01))[0][0][0], keys[0][:, -4:])


@pytest.mark.parametrize("policy", [Exact(), Recency(keep=1.0)], ids=["exact", "chosen"])
def test_copies_begin_when_the_request_has_its_rows(open_store: Open, policy: Policy) -> None:
    store = open_store(GEOMETRY)
    tokens = prompt(N)
    put_prompt(store, tokens).wait(60)
    with store.lease(tokens) as lease, lease.session(policy) as session:
        for layer in range(2):
            session.retrieve(layer, torch.zeros(4, 1, 64))
        settled(store)
        assert in_tier(store) == 0
    settled(store)
    assert in_tier(store) == 12


def test_a_request_that_holds_too_much_does_not_wait_with_its_copies(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(impress.read.climb, "MOST_HELD", 5 * CHUNK)  # less than a layer
    store = open_store(GEOMETRY)
    tokens = prompt(N)
    put_prompt(store, tokens).wait(60)
    with store.lease(tokens) as lease, lease.session(Exact()) as session:
        session.retrieve(0, None)
        settled(store)
        assert in_tier(store) == 6


def test_two_requests_that_want_the_same_chunks_make_one_copy(open_store: Open) -> None:
    store = open_store(GEOMETRY)
    tokens = prompt(N)
    put_prompt(store, tokens).wait(60)
    with store.lease(tokens) as lease:
        sessions = [lease.session(Recency(keep=0.5)) for _ in range(4)]
        for session in sessions:
            for layer in range(2):
                session.retrieve(layer, torch.zeros(4, 1, 64))
        for session in sessions:
            session.close()
    settled(store)
    assert store.stats()["promotions"] == {"dram": 6} and in_tier(store) == 6


# ---- the cache by itself ---------------------------------------------------------------------

CAPACITY, LAYERS, WINDOWS = 6, 2, 5
some = st.sets(st.integers(0, WINDOWS - 1), max_size=WINDOWS).map(
    lambda s: np.array(sorted(s), int)
)
at = st.tuples(st.integers(1, 3), st.integers(0, LAYERS - 1))
ranks = st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 0.05, 1.0, 3.0]), min_size=5, max_size=5)
steps = st.one_of(
    st.tuples(st.just("admit"), at, some, ranks),
    st.tuples(st.just("pin"), at, some, ranks),
    st.tuples(st.just("unpin"), at, some, ranks),
    st.tuples(st.just("unpin and drop"), at, some, ranks),
    st.tuples(st.just("judge"), at, some, ranks),
    st.tuples(st.just("drop"), at, some, ranks),
)


@pytest.mark.parametrize("eviction", EVICTIONS)
@settings(max_examples=60)
@given(done=st.lists(steps, max_size=40))
def test_a_cache_keeps_its_accounts_and_what_is_worth_most(eviction: str, done: list) -> None:
    cache = ChunkCache(CAPACITY * 8192, {0: 4096, 1: 4096}, LAYERS, eviction=eviction)
    pinned: list[np.ndarray] = []
    for step, (span, layer), windows, worth in done:
        here = np.array(worth)
        if step == "admit":
            absent = windows[~cache.has(span, layer, windows)]
            before = {int(e): cache._rank[e] for e in cache._heap.items()}
            room = cache.room(np.sort(here[absent])[::-1])
            granted, entries = cache.admit(span, WINDOWS, layer, windows, here[windows])
            assert len(granted) == len(entries) == room
            assert set(granted.tolist()) <= set(absent.tolist())
            if cache.by_rank and len(granted):
                gone = [rank for e, rank in before.items() if e not in cache._heap.items()]
                margin = MARGIN if eviction in ("importance", "lfu") else 0
                assert all(here[granted].max() > rank + margin for rank in gone)
                refused = np.setdiff1d(absent, granted)
                assert all(here[granted].min() >= here[window] for window in refused)
            cache.publish(entries)
        elif step == "pin":
            pinned.append(cache.pin(span, layer, 0, WINDOWS))
        elif step.startswith("unpin") and pinned:
            cache.unpin(pinned.pop(), drop=step.endswith("drop"))
        elif step == "judge":
            cache.judge(span, layer, here, None)
            entries = cache._maps.get(span, np.full((LAYERS, WINDOWS), -1))[layer]
            assert np.array_equal(cache._rank[entries[entries >= 0]], here[entries >= 0])
        elif step == "drop":
            cache.drop_windows(span, layer, windows)
        cache.check()
    for entries in pinned:
        cache.unpin(entries)
    cache.check()
    cache.clear()
    assert cache.tier.usage().used == 0


def test_the_guards_reads_are_no_use_of_what_they_read(open_store: Open) -> None:
    """The prefix of a weighed answer stayed in DRAM, and prefixes that requests used later went."""
    store = open_store(GEOMETRY, eviction="lru", dram_bytes=budget(24), io_threads=1)
    weighed, after, new = (prompt(N, seed) for seed in (1, 2, 3))
    for tokens in (weighed, after, new):
        put_prompt(store, tokens).wait(60)
    for tokens in (weighed, after):
        ask(store, tokens, Exact())
    chosen = Selection(np.arange(32), 0.1, 0.1, fell_back=False, reason="given")
    seen = Seen(torch.zeros(4, 1, 64), 1.0, torch.zeros(4, 1), chosen)
    with store.lease(weighed) as lease, ShadowSession(lease, Named((0,))) as session:
        for layer in range(2):
            assert session.weigh(layer, seen) is not None
    settled(store)
    ask(store, new, Exact())
    assert ask(store, after, Exact())[1] == {"dram": 2 * N}
    assert ask(store, weighed, Exact())[1] == {"ssd": 2 * N}


def test_all_rows_given_one_by_one_are_no_evidence(open_store: Open) -> None:
    """A policy that kept 512 rows of each prefix was trusted after hits of no more, none of which
    it had chosen from; and then answered one of thousands."""
    store = open_store(GEOMETRY)
    put_prompt(store, prompt(N, 1)).wait(60)
    chosen = Selection(np.arange(N), 0.0, 0.0, fell_back=False, reason="given")
    seen = Seen(torch.zeros(4, 1, 64), 1.0, torch.zeros(4, 1), chosen)
    with store.lease(prompt(N, 1)) as lease, ShadowSession(lease, Named((0,))) as session:
        assert lease.n_tokens == N
        assert session.weigh(0, seen) is None


def test_a_chunk_in_two_tiers_leaves_the_slower_one() -> None:
    """Two overlapping requests had it copied to DRAM and to HBM; each later one gave back its pin
    in DRAM, which made it the last to go there."""
    caches = [ChunkCache(CAPACITY * 8192, {0: 4096, 1: 4096}, LAYERS, name) for name in "ab"]
    for cache in caches:
        cache.publish(cache.admit(1, WINDOWS, 0, np.arange(3))[1])
    read_before = caches[1].pin(1, 0, 0, 2)
    found = [[cache.pin(1, 0, 0, WINDOWS)] for cache in caches]
    only_fastest(caches, found)
    assert [(ids >= 0).sum() for (ids,) in found] == [3, 0]
    assert [int(cache.has(1, 0, np.arange(WINDOWS)).sum()) for cache in caches] == [3, 0]
    assert caches[1].tier.usage().used == 2 * 8192  # until they have been read
    caches[1].unpin(read_before)
    caches[0].unpin(found[0][0])
    for cache, n in zip(caches, (3, 0), strict=True):
        cache.check()
        assert cache.tier.usage().used == n * 8192


def test_a_request_pins_while_it_is_found_out_how_many_copies_may_climb(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All idle copies were put in order under the lock: with a large cache, milliseconds in which
    every request that came to pin its copies waited."""
    cache = ChunkCache(CAPACITY * 8192, {0: 4096, 1: 4096}, LAYERS, eviction="importance")
    cache.publish(cache.admit(1, CAPACITY, 0, np.arange(CAPACITY), np.arange(6.0))[1])
    pinned, real = list[np.ndarray](), {name: getattr(np, name) for name in ("sort", "partition")}

    def beside(name: str) -> Callable[..., np.ndarray]:
        def ordered(*args: object) -> np.ndarray:
            request = threading.Thread(
                target=lambda: pinned.append(cache.pin(1, 0, 0, 1)), daemon=True
            )
            request.start()
            request.join(10)
            assert pinned, "it waits"
            return real[name](*args)

        return ordered

    for name in real:
        monkeypatch.setattr(np, name, beside(name))
    assert cache.room(np.array([9.0, 8.0, 1.5, 1.0])) == 2
    monkeypatch.undo()
    for entries in pinned:
        cache.unpin(entries)
    cache.check()


def test_chunks_of_a_span_too_large_for_history_are_judged_by_their_last_use() -> None:
    """Chunks that had climbed kept the rank they came with, and those read in part got that of a
    use at request 0: neither was ever worth more for being used."""
    cache = ChunkCache(CAPACITY * 8192, {0: 4096, 1: 4096}, LAYERS, eviction="importance")
    cache.publish(cache.admit(1, WINDOWS, 0, np.arange(3), np.zeros(3))[1])
    reading = SimpleNamespace(
        config=SimpleNamespace(eviction="importance"), copies=SimpleNamespace(chunks=[cache]),
        history=SimpleNamespace(worth=lambda *_, **__: None, tick=5120),
    )  # fmt: skip
    source = SimpleNamespace(
        span=1, order=None, held=SimpleNamespace(record=SimpleNamespace(n_windows=WINDOWS))
    )
    worth = judge(reading, source, 0, np.array([1, 4]))
    assert worth.ranks[[1, 4]].tolist() == [10.0, 10.0]
    assert sorted(cache._rank[cache._heap.items()].tolist()) == [0.0, 0.0, 10.0]


def test_what_is_to_be_learnt_does_not_pile_up(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies after requests had a bound, the lessons from them had none: under load each closed
    session left its arrays in a queue that nobody came to."""
    store = open_store(GEOMETRY)
    put_prompt(store, prompt(N))
    store.flush()
    ask(store, prompt(N), Exact())
    assert store.stats()["lessons_skipped"] == 0
    learnt = store._reading.history.tick
    monkeypatch.setattr("impress.read.reading.MOST_PROMOTIONS", -1)
    ask(store, prompt(N), Exact())
    stats = store.stats()
    assert stats["lessons_skipped"] == 1
    assert stats["promotions_skipped"] == 0, "all of it is in DRAM: there was nothing to copy"
    assert store._reading.history.tick == learnt
    # The metrics of where rows were lacked a request from which nothing was learnt.
    assert stats["rows_from"] == {"ssd": 2 * N, "dram": 2 * N}
    assert stats["chunks_from"] == {"ssd": 12, "dram": 12}


def test_lessons_that_wait_are_bounded_in_bytes(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only their number had a bound: under requests that never paused, those that chose rows of
    long prefixes filled gigabytes with which rows these were."""
    store = open_store(GEOMETRY, io_threads=1)
    put_prompt(store, prompt(N)).wait(60)
    begun, go, looked = threading.Event(), threading.Event(), list[list[Looked]]()

    def held() -> None:
        begun.set()
        assert go.wait(60)

    def request() -> None:
        with store.lease(prompt(N)) as lease, lease.session(Recency(keep=0.5)) as session:
            for layer in range(GEOMETRY.n_layers):
                session.retrieve(layer, None)
            looked.append(session._looked)

    request()
    settled(store)
    each, learnt = bytes_of(looked[0]), store.history.tick
    assert each >= GEOMETRY.n_layers * N // 2 * 8  # which rows
    monkeypatch.setattr(store._reading.lessons, "_most", 3 * each + each // 2)
    store._pool.submit(Lane.PROMOTE, [held])
    assert begun.wait(60)  # one thread at a time does such work: nothing is learnt now
    try:
        for n in range(1, 7):
            request()
            assert store._reading.lessons._held == min(n, 3) * each
        queued = [task.args[2] for _, task in store._pool._queues[0][Lane.PROMOTE]]
        assert sum(map(bytes_of, queued)) == 3 * each
    finally:
        go.set()
    settled(store)
    assert store.stats()["lessons_skipped"] == 3
    assert store.history.tick == learnt + 3 and store._reading.lessons._held == 0


def test_a_lesson_that_cannot_be_queued_keeps_no_room_from_others(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes counted as waiting for as long as the process lived: after enough of them nothing
    was learnt any more."""
    store = open_store(GEOMETRY, dram_bytes=0)
    put_prompt(store, prompt(N)).wait(60)
    ask(store, prompt(N), Exact())
    learnt, submit = store.history.tick, store._pool.submit

    def no_memory(lane: Lane, *given: Any, **named: Any) -> Any:
        if lane is Lane.PROMOTE:
            raise MemoryError
        return submit(lane, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(store._pool, "submit", no_memory)
        ask(store, prompt(N), Exact())
    settled(store)
    assert store.history.tick == learnt and store._reading.lessons._held == 0
    ask(store, prompt(N), Exact())
    settled(store)
    assert store.history.tick > learnt


def test_the_last_request_before_a_store_closes_is_learnt_from(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is learnt follows a request's copies, and a store that had begun to close took no more:
    commands that serve one request (`impress run`) showed nothing of it afterwards."""
    store = open_store(GEOMETRY)
    put_prompt(store, prompt(N)).wait(60)
    (span,) = (record.span_id for record in store.catalog.records())
    (cache,) = store._copies.chunks
    fill = cache.fill

    late = list[bool]()

    def filling(*args: object) -> None:
        late.append(until(lambda: not store._pool._open, 60))
        fill(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "fill", filling)
    with store.lease(prompt(N)) as lease, lease.session(Exact()) as session:
        for layer in (0, 1):
            session.retrieve(layer, None)
    store.close()
    assert late and all(late) and not caplog.records
    store = open_store(GEOMETRY)
    assert store.history.tick == 1 and store.history.summary(span) is not None


def test_one_request_does_not_crowd_out_what_the_next_ones_show(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a cold sparse request for a long prompt, thousands of reads were queued at once: from
    the requests right after it nothing was learnt. Chunks left out climb at their next uses."""
    monkeypatch.setattr("impress.read.reading.MOST_PROMOTIONS", 8)
    monkeypatch.setattr("impress.read.promote.MOST_FETCHES", 4)
    monkeypatch.setattr("impress.read.promote.MOST_FETCH", 1)  # each chunk is a read
    store = open_store(GEOMETRY, io_threads=1, read_gap_bytes=0)
    put_prompt(store, prompt(N)).wait(60)
    (span,) = (record.span_id for record in store.catalog.records())
    rows = np.arange(N, dtype=np.int64)
    often = rows[((rows >= 128) & (rows < 256)) | (rows % 64 == 0)]
    store.history.request(Note(span, N, layer, 0, N, often) for layer in (0, 1))
    crowded, submit = list[bool](), store._pool.submit

    def watched(*args: object, **named: object) -> object:  # the only thread is in here
        made = submit(*args, **named)  # type: ignore[arg-type]
        crowded.append(store._reading.crowded)
        return made

    monkeypatch.setattr(store._pool, "submit", watched)
    ask(store, prompt(N), Named((0, 1, 2, 3, 4, 5)))
    assert crowded and not any(crowded)
    (cache,) = store._copies.chunks
    for layer in (0, 1):  # the chunks of the highest ranks first
        assert np.flatnonzero(cache.has(span, layer, np.arange(6))).tolist() == [2, 3]
    for n_there in (8, 12):
        ask(store, prompt(N), Named((0, 1, 2, 3, 4, 5)))
        assert in_tier(store) == n_there
    assert store.stats()["lessons_skipped"] == 0
