"""What several shards stored at once: each keeps its own copy, and nobody loses both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import assert_serves, prompt, put_prompt
from test_shards import APART, Pair, check, look, pair, ready
from test_shards_moved import at_once

import impress

__all__ = ["pair"]  # the fixture
Open = Callable[..., impress.PrefixStore]


def test_of_what_two_stored_at_once_neither_deletes_its_own_for_the_other_s(
    pair: Pair, open_store: Open
) -> None:
    """Each tree hung its own from the other's; the one that opened last deleted what it found
    covered, and the other what had hung from that: what flush had returned for was gone."""
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
    """Each writer saw the other's before its own was in its tree, and dropped its own for it."""
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
        look(a, b)

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
