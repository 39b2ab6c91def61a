"""What several shards stored at once: each keeps its own copy, and nobody loses both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import assert_serves, elsewhere, prompt, put_prompt
from test_shards import APART, Pair, check, look, pair, ready, stored_between
from test_shards_moved import at_once

import impress
import impress.write.index

__all__ = ["pair"]  # the fixture
Open = Callable[..., impress.PrefixStore]


def test_of_what_two_stored_at_once_neither_deletes_its_own_for_the_other_s(
    pair: Pair, open_store: Open
) -> None:
    """Each tree hung its own spans from the other's; the process that opened last deleted those it
    found covered, the other those that hung from them: what flush had returned for was gone."""
    a, b = pair
    tokens = prompt(256)
    ready(a, tokens[:64])
    look(b)
    ready(b, tokens[:128])
    look(a)
    at_once(a, tokens, lambda: ready(b, tokens[:192]))
    look(b, a)
    for store in pair:
        store.close()
    again = [open_store(a.geometry, **APART, shard=n) for n in (0, 1)]
    for store in again:
        assert len(store.catalog.own_records()) == 2
    for store in (*again, *again):
        store.follow()
        store.flush()
    with open_store(a.geometry, mode="r") as reader:
        for store in (*again, reader):
            assert_serves(store, tokens, 256)
    check(*again)


def test_two_commits_at_once_leave_a_copy(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writer saw the other's copy before its own was in its tree, and dropped its own copy."""
    a, b = pair
    tokens, others = prompt(256), []
    commits = {store: store.index.commit for store in pair}

    def a_commits(*args: Any, **named: Any) -> None:
        commits[a](*args, **named)
        monkeypatch.setattr(a.index, "commit", commits[a])
        others.append(put_prompt(b, tokens))
        others[0].wait(60)

    def b_commits(*args: Any, **named: Any) -> None:
        commits[b](*args, **named)
        monkeypatch.setattr(b.index, "commit", commits[b])
        elsewhere(lambda: look(a, b))

    monkeypatch.setattr(a.index, "commit", a_commits)
    monkeypatch.setattr(b.index, "commit", b_commits)
    ready(a, tokens)
    assert others[0].ready
    look(a, b)
    for store in pair:
        store.flush()
    look(a, b)
    for store in pair:
        assert_serves(store, tokens, 256)
    check(*pair)


@pytest.mark.parametrize("how", ["opened", "compared"])
@pytest.mark.parametrize("away", ["purge", "evict"])
def test_a_copy_that_was_there_before_a_process_opened_takes_the_other_s_place(
    pair: Pair, open_store: Open, monkeypatch: pytest.MonkeyPatch, how: str, away: str
) -> None:
    """Only a copy that came later was remembered: a third process erased what it had stored after
    the first copy, and found neither."""
    a, b = pair
    tokens = prompt(512)
    if how == "compared":
        c = open_store(a.geometry, **APART)
        monkeypatch.setattr(impress.write.index, "LOG_ENTRIES", 1)
        for store in (a, b):
            ready(store, tokens[:128])
            ready(store, tokens[:256], start=128)
    else:
        for store in (a, b):
            ready(store, tokens[:256])
        c = open_store(a.geometry, **APART)
    look(c)
    ready(c, tokens, start=256)
    look(a, b)
    (a.purge if away == "purge" else lambda: a.evict(1 << 30))()
    for _ in range(2):
        look(c, b)
        c.flush()
    assert len(c.catalog.own_records()) == 1
    with open_store(a.geometry, mode="r") as reader:
        for store in (b, c, reader):
            assert_serves(store, tokens, 512)
    check(*pair, c)


def test_what_hangs_from_an_index_that_comes_back_is_found(pair: Pair, open_store: Open) -> None:
    """A process that opened meanwhile saw that index's own spans, and nothing after them."""
    a, b = pair
    tokens = prompt(768)
    ready(a, tokens[:256])
    look(b)
    ready(b, tokens[:512], start=256)
    ready(b, tokens, start=512)
    for store in pair:
        store.close()
    index = a.path / "shards/main/index"
    index.rename(index.with_name("elsewhere"))
    reader = open_store(a.geometry, mode="r", **APART)
    assert_serves(reader, tokens, 0)
    index.with_name("elsewhere").rename(index)
    look(reader, reader)
    assert_serves(reader, tokens, 768)
    reader.check()


def test_what_was_stored_across_shards_while_a_process_opened_is_found(
    pair: Pair, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Indexes are read one after the other: the process saw the end of a prompt before its
    beginning, and never served more than it did then."""
    (a, b), tokens = pair, prompt(512)
    stored_between(a, b, tokens, monkeypatch)
    reader = open_store(a.geometry, mode="r", **APART)
    assert_serves(reader, tokens, 0)
    look(reader)
    assert_serves(reader, tokens, 512)
    check(*pair, reader)


def test_what_waits_for_another_that_waits_is_shown_after_it(pair: Pair, open_store: Open) -> None:
    """A span that hung from an evicted one was tried again before the span that took that one's
    place, and then not again until something else happened."""
    a, b = pair
    tokens = prompt(768)
    for n in (256, 512, 768):
        ready(b, tokens[:n], start=n - 256)
    ready(a, tokens[:256])
    look(a)
    a.evict(1 << 30)
    look(a, a)
    assert_serves(a, tokens, 768)
    check(*pair)
