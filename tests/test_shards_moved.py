"""Spans that their writer moved or left out of a rewrite: what others hung from them stays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from conftest import assert_serves, kv_of, prompt
from conftest import look as lease_some
from test_shards import APART, check, look, ready

import impress
import impress.write.reclaim
from impress.spans.format import SpanRecord
from impress.usage.notes import Note

Open = Callable[..., impress.PrefixStore]
Pair = tuple[impress.PrefixStore, impress.PrefixStore]


@pytest.fixture
def stores(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], impress.PrefixStore]:
    """Each call opens one more shard of one directory; they follow when told."""
    monkeypatch.setattr(impress.write.reclaim, "YIELD_TIMEOUT_S", 0)
    return lambda: open_store(geometry, **APART)


@pytest.fixture
def pair(stores: Callable[[], impress.PrefixStore]) -> Pair:
    return stores(), stores()


@pytest.fixture(params=["log", "index"])
def trimmed(request: pytest.FixtureRequest) -> Callable[[impress.PrefixStore], None]:
    """Makes a writer forget its log, or not: if so, a follower reads its index whole."""

    def trim(store: impress.PrefixStore) -> None:
        if request.param == "index":
            ready(store, prompt(64, 90), tenant="passing")
            ready(store, prompt(64, 91), tenant="passing")
            store.purge("passing")

    return trim


def at_once(store: impress.PrefixStore, late: np.ndarray, early: Callable[[], object]) -> None:
    """Store a prompt as two writers do: `early` shows its head, so that only its end is new."""
    keys, values = kv_of(late, store.geometry)
    with store.writer(late) as writer:
        early()
        for layer in range(store.geometry.n_layers):
            writer.put(layer, 0, keys[layer], values[layer])
    assert writer.stored.wait(60)


def forked(seed: int) -> np.ndarray:
    """768 tokens, of which the first 384 are those of any other seed."""
    return np.concatenate([prompt(384), prompt(384, seed)])


def rewrite(store: impress.PrefixStore) -> None:
    assert store.repack().spans[0].outcome == "rewritten"


def assert_own(store: impress.PrefixStore, n_spans: int) -> None:
    store.flush()
    assert len(store.catalog.own_records()) == len(list(store.index.spans())) == n_spans


def test_a_rewrite_leaves_what_another_stored_behind_it(
    pair: Pair, trimmed: Callable[[impress.PrefixStore], None]
) -> None:
    """The copy lacked the dead head; the follower cut off all below, and erased its own spans."""
    a, b = pair
    at_once(a, forked(1)[:640], lambda: ready(a, prompt(384)))
    look(b)
    ready(b, forked(1), start=640)
    look(a)
    with b.lease(forked(1)):
        heat = b.catalog.heat()
    rewrite(a)
    trimmed(a)
    look(b, a)
    assert_own(b, 1)
    assert b.catalog.heat() == heat
    for store in pair:
        assert_serves(store, forked(1), 768)
    check(a, b)


def test_a_repack_that_is_found_by_comparing_leaves_what_hangs_from_it(
    pair: Pair, trimmed: Callable[[impress.PrefixStore], None]
) -> None:
    a, b = pair
    ready(a, prompt(512)[:256])
    look(b)
    ready(b, prompt(512), start=256)
    look(a)
    (record,) = a.catalog.own_records()
    for layer in range(a.geometry.n_layers):
        for _ in range(8):
            a.history.request([Note(record.span_id, 256, layer, 0, 256, np.arange(0, 256, 16))])
    assert a.repack().moved == 1
    trimmed(a)
    look(b, a)
    assert_own(b, 1)
    for store in pair:
        assert_serves(store, prompt(512), 512)
    check(a, b)


def test_of_a_rewritten_span_only_what_its_writer_evicted_goes(
    pair: Pair, trimmed: Callable[[impress.PrefixStore], None]
) -> None:
    """Others hear of evicted windows when their span is rewritten, or when all of it goes."""
    a, b = pair
    ready(a, prompt(640))
    for tail in (prompt(64, 7), np.concatenate([prompt(192), prompt(64, 2)])):
        ready(a, tail)
        assert_serves(a, tail, len(tail))
    look(b)
    stays = np.concatenate([prompt(128), prompt(128, 3)])
    ready(b, stays, start=128)
    goes = np.concatenate([prompt(640), prompt(64, 4)])
    ready(b, goes, start=640)
    a.evict(1)
    assert a.lookup(prompt(640)) == 192
    rewrite(a)
    trimmed(a)
    look(b, a)
    assert_own(b, 1)
    for store in pair:
        assert_serves(store, stays, 256)
        assert_serves(store, goes, 192)
    check(a, b)


def test_windows_that_a_rewrite_left_to_its_writers_other_span_are_found_there(
    stores: Callable[[], impress.PrefixStore], trimmed: Callable[[impress.PrefixStore], None]
) -> None:
    """A tree made by ids, not in the order of commits, views the other of two equal heads."""
    a = stores()
    at_once(a, forked(2)[:640], lambda: ready(a, forked(1)))
    b = stores()
    assert a.catalog.views_of(a.catalog.own) != b.catalog.views_of(a.catalog.own)
    longer = [np.concatenate([of, prompt(64, 5)]) for of in (forked(1), forked(2)[:640])]
    for tokens in longer:
        ready(b, tokens, start=640)
    look(a)
    rewrite(a)
    trimmed(a)
    look(b, a)
    assert_own(b, 2)
    for store in (a, b):
        for tokens in longer:
            assert_serves(store, tokens, len(tokens))
    check(a, b)


def test_windows_that_another_stored_too_are_found_where_they_stay(
    pair: Pair,
    stores: Callable[[], impress.PrefixStore],
    trimmed: Callable[[impress.PrefixStore], None],
) -> None:
    """Their writer saw them only in the other's span: when that went, it had nothing to keep them
    by, and erased what it had stored after them."""
    (a, b), c = pair, stores()
    tokens = forked(1)
    at_once(a, tokens[:640], lambda: (ready(c, prompt(384)), a.follow()))
    look(b)
    assert b.catalog.views_of(a.catalog.own) and not b.catalog.views_of(c.catalog.own)
    ready(b, tokens, start=640)
    look(a, c)
    assert not a.repack().spans, "none of its windows is left to the other"
    assert c.evict(1 << 30) > 0
    trimmed(c)
    look(a, b, c)
    assert_own(a, 1)
    assert_own(b, 1)
    for store in (a, b, c):
        assert_serves(store, tokens, 768)
    check(a, b, c)


@pytest.mark.parametrize("end", [640, 384], ids=["to its end", "and it goes on"])
def test_what_took_a_place_in_part_is_found_whole_when_the_rest_goes_too(
    pair: Pair,
    stores: Callable[[], impress.PrefixStore],
    trimmed: Callable[[impress.PrefixStore], None],
    end: int,
) -> None:
    """It was no longer remembered, and its rest was a miss until the store was opened again."""
    (a, b), c = pair, stores()
    tokens = prompt(640)
    ready(a, tokens[:256])
    look(b)
    ready(b, tokens[:end], start=256)
    ready(c, tokens)
    look(b)
    a.evict(1 << 30)
    trimmed(a)
    look(b)
    assert_own(b, 1)
    assert_serves(b, tokens, 640)
    check(b)
    assert b.evict(1 << 30) > 0
    look(b)
    assert_own(b, 0)
    for store in (a, b):
        look(store)
        assert_serves(store, tokens, 640)
    check(a, b, c)


def test_what_took_a_place_in_part_takes_the_rest_from_another_too(
    pair: Pair,
    stores: Callable[[], impress.PrefixStore],
    trimmed: Callable[[impress.PrefixStore], None],
) -> None:
    """The follower's own span after them was erased with the second of the two."""
    (a, b), c, d = pair, stores(), stores()
    tokens = prompt(768)
    ready(a, tokens[:256])
    look(c)
    ready(c, tokens[:640], start=256)
    look(b)
    ready(b, tokens, start=640)
    ready(d, tokens[:640])
    for goes in (a, c):
        look(b)
        goes.evict(1 << 30)
        trimmed(goes)
        look(b)
        assert_own(b, 1)
        assert_serves(b, tokens, 768)
        check(b)
    look(a, c, d)
    for store in (a, b, c, d):
        assert_serves(store, tokens, 768)
    check(a, b, c, d)


def test_what_took_a_place_in_part_and_is_bad_stays_out(
    pair: Pair, stores: Callable[[], impress.PrefixStore]
) -> None:
    (a, b), c = pair, stores()
    tokens = prompt(640)
    ready(a, tokens[:256])
    look(b)
    ready(b, tokens, start=256)
    ready(c, tokens)
    look(b)
    a.evict(1 << 30)
    look(b)
    with b.lease(tokens[:256]) as lease:
        held = lease.sources[0].held
    assert held.record.span_id in c.catalog.own
    b._home.leaving.quarantine(held.record.span_id)
    ready(a, prompt(64, 6))
    look(b)
    assert b.lookup(tokens) == 0
    check(a, b, c)


def behind_a_system_prompt(pair: Pair) -> tuple[np.ndarray, np.ndarray, int]:
    """(a document after the system prompt, the document alone, the span of the first's rows).

    Only the beginning of the document alone is stored.
    """
    a, b = pair
    document = prompt(384, 2)
    chat = np.concatenate([prompt(128, 1), document])
    ready(a, chat[:128])
    ready(a, chat, start=128)
    ready(a, document[:128])
    lease_some(a, chat)
    look(b)
    (span,) = [r.span_id for r in a.catalog.own_records() if r.first_window]
    return chat, document, span


def test_a_copy_whose_span_left_the_tree_before_its_commit_is_told_nobody_in_a_wrong_place(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followers were told that it began at the root: they served its rows after no prompt."""
    a, b = pair
    chat, document, span = behind_a_system_prompt(pair)
    committer = a._home.committer
    assert committer is not None
    sync, commit = committer._batches._headers.sync, a.index.commit
    served = []

    def synced(spans: Iterable[tuple[SpanRecord, int]]) -> None:
        spans = list(spans)
        sync(spans)
        if any(record.first_window for record, _ in spans):
            a._home.leaving.quarantine(span)

    def committed(*args: Any, **named: Any) -> None:
        commit(*args, **named)
        b.follow()
        served.append(b.lookup(document))

    monkeypatch.setattr(committer._batches._headers, "sync", synced)
    monkeypatch.setattr(a.index, "commit", committed)
    assert "the span left the tree meanwhile" in [s.outcome for s in a.repack().spans]
    a.flush()
    assert set(served) == {128}, "rows computed behind another prompt"
    look(b)
    assert_serves(b, document, 128)
    assert_serves(b, chat, 128)
    check(a, b)


def test_a_span_that_a_log_puts_in_a_wrong_place_is_not_taken(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key says what comes before it."""
    a, b = pair
    chat, document, _ = behind_a_system_prompt(pair)
    monkeypatch.setattr(a.catalog, "labels_to", lambda *_: b"")
    assert a.repack().moved == 2
    look(b)
    assert_serves(b, document, 128)
    assert_serves(b, chat, 128)
    check(a, b)
