"""A shard's folder that was deleted and begun anew: its ids stand for other spans from then on."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import numpy as np
import pytest
from conftest import MIB, assert_serves, elsewhere, prompt, wait_for_promotions
from test_shards import APART, Pair, check, look, pair, ready, unreadable

import impress
from impress.upkeep.rebuild import rebuild_store
from impress.upkeep.scan import Rebuilt
from impress.write.readers import present

__all__ = ["pair"]  # the fixture
Open = Callable[..., impress.PrefixStore]


def begun_anew(pair: Pair, open_store: Open) -> impress.PrefixStore:
    """Shard 1 is deleted, the other looks, and it is opened again, empty."""
    a, b = pair
    b.close()
    shutil.rmtree(a.path / "shards/1")
    look(a)
    return open_store(a.geometry, **APART, shard=1)


def places(store: impress.PrefixStore) -> list[tuple[object, ...]]:
    return [(r.span_id, r.meta, r.parts, r.n_windows) for r in store.catalog.own_records()]


@pytest.mark.parametrize("first", ["look", "lease"])
def test_what_was_followed_never_answers_with_what_a_shard_begun_anew_has_in_its_place(
    pair: Pair, open_store: Open, first: str
) -> None:
    """A span of the same size has the same id and place, and headers were not compared by the one
    field that stands for the tokens: a prompt was answered with the rows of another."""
    a, b = pair
    ready(b, prompt(256, 1))
    look(a)
    assert a.lookup(prompt(256, 1)) == 256
    old = places(b)
    again = begun_anew(pair, open_store)
    ready(again, prompt(256, 2))
    assert places(again) == old
    if first == "lease":
        assert_serves(a, prompt(256, 1), 0)
    look(a, again)
    assert_serves(a, prompt(256, 1), 0)
    assert_serves(a, prompt(256, 2), 256)
    check(a, again)


def test_what_bears_the_id_of_a_span_that_is_held_comes_once_that_is_let_go(
    pair: Pair, open_store: Open
) -> None:
    """And only once: whoever let go of the old span also let go of the one shown under its id."""
    (a, b), tokens = pair, prompt(512, 2)
    ready(b, prompt(256, 1))
    look(a)
    with a.lease(prompt(256, 1)) as held:
        assert held.n_tokens == 256
        again = begun_anew(pair, open_store)
        ready(again, tokens[:256])
        ready(again, tokens, start=256)
        look(a, again)
        assert a.lookup(prompt(256, 1)) == a.lookup(tokens) == 0
        assert not a.follow(), "it is not read whole by every look"
        check(a)
    look(a, again)
    assert_serves(a, prompt(256, 1), 0)
    assert_serves(a, tokens, 512)
    assert not a.follow()
    check(a, again)


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_what_is_stored_after_a_rebuild_is_found_by_who_holds_what_left_before_it(
    pair: Pair, open_store: Open, index: str
) -> None:
    """A rebuild gave out the id of an evicted span again. Who still held that took the new span,
    told of by the log, for the one it knew, and showed neither it nor what hung from it for good.
    """
    (a, b), tokens = pair, prompt(256, 3)
    ready(b, prompt(256, 1))
    ready(b, prompt(128, 2))
    look(a)
    with a.lease(prompt(128, 2)) as held:
        assert held.n_tokens == 128
        b.lease(prompt(256, 1)).release()  # so that it stays
        assert b.evict(1) > 0 and b.lookup(prompt(128, 2)) == 0
        b.close()
        if index == "lost":
            shutil.rmtree(a.path / "shards/1/index")
        rebuild_store(a.path, found=(found := Rebuilt()))
        assert (found.spans, found.busy_shards) == (1, ["main"])
        again = open_store(a.geometry, **APART, shard=1)
        look(a, again)
        ready(again, tokens[:128])
        ready(again, tokens, start=128)
        its = {record.span_id for record in again.catalog.own_records()}
        assert (held.sources[0].span in its) == (index == "lost")
        look(a, again)
    look(a, again)
    look(a, again)
    assert_serves(a, tokens, 256)
    assert_serves(a, prompt(256, 1), 256)
    assert not a.follow()
    check(a, again)


def test_nothing_of_a_span_is_left_when_another_is_shown_under_its_id(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever lets go of the last of several spans forgets their copies one by one. A look that
    came between showed the next span of an id whose tables and copies were still there: a prompt
    was answered with the rows of another, which matched their sums."""
    geometry = impress.Geometry(2, 2, 2, 32, "float32")
    pair = a, b = (
        open_store(geometry, **{**APART, "dram_bytes": MIB}),
        open_store(geometry, **APART),
    )
    ready(b, prompt(256, 1))
    look(a)
    held = a.lease(prompt(256, 1))
    with held.session() as session:
        for layer in range(a.geometry.n_layers):
            session.retrieve(layer, None)
    wait_for_promotions(a)
    again = begun_anew(pair, open_store)
    ready(again, prompt(256, 2))
    look(a, again)
    forget, looked = a._home._forget, list[int]()

    def between(span: int) -> None:
        if not looked:
            looked.append(span)
            elsewhere(a.follow)
            assert_serves(a, prompt(256, 2), 256)
        forget(span)

    monkeypatch.setattr(a._home, "_forget", between)
    held.release()
    assert len(looked) == 1
    assert_serves(a, prompt(256, 2), 256)
    check(a, again)


def test_what_waits_for_a_place_is_not_shown_in_it_by_the_value_of_another(
    pair: Pair, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was, where the look at the new index failed: under the labels before the old span, with
    the rows of the new one, which were computed after other tokens."""
    a, b = pair
    one, other = ([np.concatenate([prompt(256, head), prompt(256, tail)]) for head in (1, 2)]
                  for tail in (3, 4))  # fmt: skip
    for tokens in one:
        ready(a, tokens[:256])
    look(b)
    for store in pair:
        ready(store, one[0], start=256)
    look(a)
    again = begun_anew(pair, open_store)
    ready(again, other[1], start=256)
    a.lease(one[1]).release()
    assert a.evict(1) > 0 and a.lookup(one[0]) == 256
    with monkeypatch.context() as patch:
        unreadable(patch, "1")
        a.follow()
    assert_serves(a, other[0], 256)
    look(a, again)
    assert_serves(a, other[0], 256)
    assert_serves(a, other[1], 512)
    check(a, again)


def test_who_reads_a_shard_begun_anew_is_known_to_its_writer(pair: Pair, open_store: Open) -> None:
    """The reader's file went with the old folder: what the reader held was not waited for."""
    a, b = pair
    ready(b, prompt(256, 1))
    look(a)
    again = begun_anew(pair, open_store)
    ready(again, prompt(256, 2))
    look(a)
    (seen,) = present(a.path / "shards/1/readers")
    assert seen.generation == again.index.generation
    a.close()
    assert not present(a.path / "shards/1/readers")
