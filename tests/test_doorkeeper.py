"""The doorkeeper admits what was used before and refuses the rest, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_serves, prompt, put_prompt
from hypothesis import given, settings
from hypothesis import strategies as st

import impress
from impress.errors import ConfigError
from impress.usage.doorkeeper import BITS, CAPACITY, Doorkeeper

Open = Callable[..., impress.PrefixStore]


def keys(*numbers: int) -> list[bytes]:
    return [blake2b(str(n).encode(), digest_size=32).digest() for n in numbers]


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 30), max_size=6), max_size=30))
def test_it_answers_as_a_set_does(uses: list[list[int]]) -> None:
    door, known = Doorkeeper(), set()
    for use in uses:
        want = next((i for i, n in enumerate(use) if n not in known), len(use))
        assert door.admit(keys(*use)) == want
        known.update(use)


def test_it_forgets_what_is_old_and_not_what_is_new() -> None:
    door = Doorkeeper(capacity=100, bits=1 << 14)
    for n in range(1000):
        assert door.admit(keys(n)) == 0, n
        assert door.admit(keys(*range(max(0, n - 99), n + 1))) == min(n + 1, 100)
    assert door.admit(keys(0)) == 0
    assert door.n_bytes == 2 * (1 << 14) // 8


def test_a_window_in_use_is_not_forgotten() -> None:
    door = Doorkeeper(capacity=10, bits=1 << 12)
    door.admit(keys(0))
    for n in range(1, 100):
        door.admit(keys(n))
        assert n % 5 or door.admit(keys(0)) == 1


def test_few_new_windows_pass_for_known_when_it_is_full() -> None:
    scale = 1 << 8
    door = Doorkeeper(CAPACITY // scale, BITS // scale)
    n = CAPACITY // scale
    for start in range(0, 2 * n - 2, 64):
        door.admit(keys(*range(start, min(start + 64, 2 * n - 2))))
    new = np.random.default_rng(0).bytes(32 * 20_000)
    wrong = sum(bool(Doorkeeper.admit(door, [new[i : i + 32]])) for i in range(0, 32 * 500, 32))
    assert wrong <= 12  # .5 % of 500 is 2.5


def test_it_takes_four_mebibytes() -> None:
    assert Doorkeeper().n_bytes == 4 << 20


def test_first_admits_all_second_what_was_used(
    open_store: Open, geometry: impress.Geometry
) -> None:
    tokens = prompt(200)
    with open_store(geometry) as store:
        assert store.admitted(tokens) == 192
    store = open_store(geometry, admit="second")
    assert store.admitted(tokens[:150]) == 0
    assert store.admitted(tokens) == 128
    assert store.admitted(tokens) == 192
    assert store.admitted(tokens, tenant="another") == 0
    assert store.admitted(tokens[:10]) == 0


def test_a_store_that_is_asked_for_is_always_admitted(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry, admit="second")
    put_prompt(store, prompt(128)).wait(60)
    assert_serves(store, prompt(128), 128)


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="admit"):
        impress.Config(admit="third")


def test_an_engine_stores_at_the_second_use(tmp_path: Path) -> None:
    from test_engine_hf import prompts, tiny

    from impress.engines.hf import attach

    model, ids = tiny(), prompts(40)
    config = impress.Config(window=16, admit="second", mode="exact", segment_bytes=1 << 20)
    with attach(model, tmp_path / "store", config=config) as engine:
        lookups, refused = [], []
        for _ in range(3):
            engine.generate(ids, max_new_tokens=2)
            engine.flush()
            lookups.append(engine.store.lookup(ids[0].numpy()))
            assert engine.last_request is not None
            refused.append(engine.last_request.refused)
        assert lookups == [0, 32, 32]
        assert refused == ['Config.admit is "second", and this is the first use', "", ""]
        engine.generate(ids[:, :8], max_new_tokens=2)
        assert engine.last_request.refused == "it has no whole window of 16 tokens"
        engine.generate(ids, max_new_tokens=2)
        assert engine.last_request is not None and engine.last_request.hit_tokens == 32
    # After a restart every use is a first one: what is stored up to a prompt's end was refused.
    with attach(model, tmp_path / "store", config=config) as engine:
        engine.generate(ids[:, :32], max_new_tokens=1)
        assert engine.last_request is not None
        assert (engine.last_request.hit_tokens, engine.last_request.refused) == (16, "")
