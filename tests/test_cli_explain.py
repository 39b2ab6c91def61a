"""`impress explain`: how far a prompt matches, where it stops, what a request chose."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from conftest import flip_a_bit
from console import (
    CONFIG,
    FORK,
    GEOMETRY,
    PROMPT,
    assert_refused,
    ended,
    opened,
    put,
    records_of,
    rows_of,
    run,
    two_prompts,
    whole_numbers,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import impress
from impress.tree.radix import RadixTree
from impress.tree.trace import traces


@pytest.fixture
def path(tmp_path):
    return two_prompts(tmp_path / "store")


def explained(path, tokens, *args):
    """What it says about a prompt: (the process, the JSON object it wrote)."""
    ids, told = path.parent / "ids.json", path.parent / "told.json"
    ids.write_text(json.dumps(list(map(int, tokens))))
    done = run("explain", "--store", path, "--prefix", ids, "--json", told, *args)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done, json.loads(told.read_text())


def first_of(path, tokens):
    done, found = explained(path, tokens)
    return done, found["found"][0]


# --- where a prompt stops matching ----------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@given(stored=st.lists(TOKENS, max_size=8), asked=TOKENS)
@settings(max_examples=300)
def test_the_nearest_stored_prompt_is_the_one_that_agrees_longest(stored, asked):
    """Checked against every stored prompt, compared token by token; windows of two tokens."""

    def windows(tokens):
        return np.array(tokens[: len(tokens) // 2 * 2], dtype="<i4").tobytes()

    def agree(a, b):
        a, b = a[: len(a) // 2 * 2], b[: len(b) // 2 * 2]
        pairs = zip(a, b, strict=False)
        return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))

    tree = RadixTree(8)
    for span, tokens in enumerate(stored):
        tree.graft(tree.root(b"root"), windows(tokens), span, 0)
    found = traces(tree, [b"root"], windows(asked), 8, 0)[b"root"]
    want = max((agree(asked, tokens) for tokens in stored), default=0)
    assert found.n_windows == want // 2
    assert found.n_windows == sum(step.view.n_windows for step in found.steps)
    if found.near is not None:
        assert found.n_windows * 2 + found.near.same_tokens == want
        assert found.near.n_windows > found.n_windows < len(asked) // 2
    else:
        assert want == len(asked) // 2 * 2 or found.n_ways == 0


def test_a_whole_hit_says_which_nodes_hold_it_and_what_it_costs(path):
    with opened(path) as store:
        store.lease(FORK).release()
        store.lease(PROMPT[:128]).release()
    done, row = first_of(path, [*FORK, 7])
    assert (row["windows"], row["tokens"], row["stop"]["reason"]) == (5, 320, "end of prompt")
    held = [(h["span"], h["first_window"], h["n_windows"], h["leases"]) for h in row["held"]]
    assert held == [(1, 0, 2, 2), (2, 2, 3, 1)]
    assert [h["leases_ago"] for h in row["held"]] == [0, 1]
    assert row["chunks"] == 2 * 5
    # 5 windows, 2 layers, K and V: 64 rows of 128 bytes.
    assert row["cost"]["bytes"] == 5 * 2 * 2 * 64 * 128
    assert "hit: 5 of 5 windows" in done.stdout and "last token is" in done.stdout


def test_a_span_in_two_nodes_is_one_line_and_the_next_ones_leases_are_its_own(path):
    """Lines went by node, holds by span: the next span was given the leases of this one's rest."""
    longer = [*PROMPT, *range(9000, 9064)]
    with opened(path) as store:
        for _ in range(2):
            store.lease(PROMPT).release()
        store.lease(PROMPT[:128]).release()
        put(store, longer)
    _, row = first_of(path, longer)
    held = [(h["span"], h["first_window"], h["n_windows"], h["leases"]) for h in row["held"]]
    assert held == [(1, 0, 5, 3), (3, 5, 1, 0)]
    assert [h["leases_ago"] for h in row["held"]] == [0, None]


def test_planned_requests_are_those_of_whole_layers(path):
    _, row = first_of(path, FORK)
    # In each of 2 layers: a part of span 1's K and one of its V, and all of span 2's layer at once.
    assert row["cost"]["requests"] == 2 * (2 + 1)


def test_the_first_other_token_is_named_and_the_nearest_stored_prompt(path):
    done, row = first_of(path, [*PROMPT[:200], *range(9000, 9100)])
    stop = row["stop"]
    assert (row["windows"], stop["reason"], stop["window"], stop["position"]) == (
        3, "other tokens", 3, 200,
    )  # fmt: skip
    assert stop["nearest"] == {"span": 1, "tokens": 320, "leases": 0, "ways": 1}
    assert "window 3 (tokens 192–255)" in done.stdout and "position 200" in done.stdout


def test_a_fork_counts_the_ways_on(path):
    _, row = first_of(path, [*PROMPT[:130], *range(9000, 9100)])
    assert row["stop"]["position"] == 130
    assert row["stop"]["nearest"]["ways"] == 2 and row["stop"]["nearest"]["span"] == 1


def test_a_longer_prompt_than_the_stored_one_says_that_it_ends(path):
    done, row = first_of(path, [*PROMPT, *range(64)])
    assert (row["windows"], row["stop"]["reason"], row["stop"]["window"]) == (5, "not stored", 5)
    assert "the stored prompt ends there" in done.stdout


def test_less_than_a_window_is_too_short(path):
    done, row = first_of(path, PROMPT[:63])
    assert row["stop"]["reason"] == "too short" and "whole windows of 64" in done.stdout


def test_an_empty_store_is_a_miss(tmp_path):
    opened(tmp_path / "store").close()
    done, found = explained(tmp_path / "store", PROMPT)
    assert found["found"] == [] and "the store is empty" in done.stdout


def test_windows_with_extra_keys_are_named(tmp_path):
    with opened(tmp_path / "store") as store:
        store.store(PROMPT, rows_of(320), rows_of(320, 1), extra={70: b"an image"})
        store.flush()
    _, row = first_of(tmp_path / "store", PROMPT)
    assert (row["windows"], row["stop"]["reason"], row["stop"]["position"]) == (1, "extra keys", 64)


def test_other_namespaces_and_tenants_are_told_apart(path):
    other = impress.PrefixStore.open(path, GEOMETRY, "another test", CONFIG)
    with other as store:
        put(store, PROMPT[:192])
        store.store(PROMPT[:64], rows_of(64), rows_of(64, 1), tenant="someone")
        store.flush()
    done, found = explained(path, PROMPT)
    assert [(row["name"], row["windows"]) for row in found["found"]] == [
        ("a test", 5), ("another test", 3), ("another test", 1),
    ]  # fmt: skip
    assert len({row["namespace"] for row in found["found"]}) == 2
    assert "another namespace, another test" in done.stdout and "--model DIR tells" in done.stdout


def test_a_span_that_does_not_read_back_is_where_the_prefix_ends(path):
    flip_a_bit(path, records_of(path)[1].meta, 20)
    done, row = first_of(path, FORK)
    assert (row["windows"], row["stop"]["reason"]) == (2, "lost")
    assert row["stop"]["span"] == 2 and "does not read back" in done.stdout


def test_rows_are_not_read(path):
    for record in records_of(path):
        for part in record.parts:
            flip_a_bit(path, part)
    assert first_of(path, FORK)[1]["windows"] == 5


def test_a_store_in_use_is_explained_and_no_token_printed(path):
    more = list(range(7000, 7128))
    with opened(path) as store:
        put(store, more)
        done, row = first_of(path, [*more[:70], *[3] * 64])
        put(store, list(range(9500, 9564)))
    assert (row["windows"], row["stop"]["position"]) == (1, 70)
    assert whole_numbers(done, path).isdisjoint(more)


def test_json_to_stdout_is_all_that_is_printed(path, tmp_path):
    np.save(tmp_path / "ids.npy", np.array(PROMPT))
    done = run("explain", "--store", path, "--prefix", tmp_path / "ids.npy", "--json", "-")
    assert json.loads(done.stdout)["found"][0]["windows"] == 5


def test_wrong_input_is_one_line_and_2(path, tmp_path):
    text = tmp_path / "text"
    text.write_text("a long text")
    args = ["explain", "--store", path, "--prefix", text]
    assert_refused(run(*args), "text needs --model DIR")
    assert_refused(run(*args, "--query", "what?"), "--query needs --model")
    assert_refused(run(*args, "--model", tmp_path / "none"), "config.json")
    assert_refused(run("explain", "--store", path), "Missing option '--prefix'; see ")
    assert_refused(run("explain", "--prefix", text, "--store", tmp_path), "no store here")
    text.write_text("[1, 2]")
    assert_refused(run(*args, "--json", tmp_path / "no" / "file"), "no such folder")


def test_without_a_model_it_imports_neither_torch_nor_transformers(path, tmp_path):
    ids = tmp_path / "ids"
    ids.write_text(json.dumps(PROMPT))
    code = f"""if True:
        import sys
        from impress.cli.explain import explain
        explain(prefix=__import__("pathlib").Path({str(ids)!r}),
                store=__import__("pathlib").Path({str(path)!r}))
        assert not {{"torch", "transformers", "tokenizers"}} & set(sys.modules)
    """
    done = ended([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
