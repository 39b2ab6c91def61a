"""All rows of packed spans: put in the prompt's order by whoever reads them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from conftest import kv_of, prompt, put_prompt, wait_for_promotions

import impress
from impress.policy import Exact, Random
from impress.read import load
from impress.read.places import Places
from impress.spans.layout import SpanLayout
from tiers.base import Pieces, Read, Slot
from tiers.slots import aligned

Open = Callable[..., impress.PrefixStore]
N = 640
#: Several rows share a piece; a row is a piece.
SHARED = impress.Geometry(2, 16, 2, 64, "float32", 128)
ALONE = impress.Geometry(2, 16, 16, 64, "float32", 128)


def read_all(store: impress.PrefixStore, tokens: np.ndarray, n: int) -> None:
    """Every row of the first n tokens is there, in the prompt's order."""
    keys, values = kv_of(tokens, store.geometry)
    with store.lease(tokens[:n]) as lease, lease.session(Exact()) as session:
        assert lease.n_tokens == n
        for layer in range(store.geometry.n_layers):
            k, v, _ = session.retrieve(layer, None)
            assert np.array_equal(k.numpy(), keys[layer][:, :n])
            assert np.array_equal(v.numpy(), values[layer][:, :n])


@pytest.mark.parametrize("geometry", [SHARED, ALONE], ids=["shared pieces", "a piece a row"])
@pytest.mark.parametrize("hbm_chunks", [0, 4])
def test_packed_rows_come_in_order_from_home_and_from_memory(
    geometry: impress.Geometry, hbm_chunks: int, open_store: Open
) -> None:
    """Of one span and of two, held whole or in part, in no cache, in some, and mixed."""
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
    rows = store.stats()["rows_from"]
    assert rows["ssd"] and rows["dram"] and bool(rows.get("hbm")) == bool(hbm_chunks)
    assert store.buffers.used_bytes == 0


def test_who_waits_for_a_packed_layer_moves_no_row(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once all was there it put 80 MB a layer in order, with nothing under way meanwhile: all rows
    of a packed prefix took longer than of one that was not, whatever came from the disk."""
    store = open_store(ALONE)
    tokens = prompt(N)
    worth = np.random.default_rng(1).random((2, N))
    assert put_prompt(store, tokens, importance=worth, wait_s=30).wait(60)

    def moved(*_: object) -> None:
        raise AssertionError("rows moved by who waits")

    monkeypatch.setattr(load, "take_rows", moved)
    read_all(store, tokens, N)


def test_rows_of_neighbouring_memory_go_to_their_own_planes() -> None:
    """Two dests may lie side by side, and one slice reads the end of one and the start of the
    other; rows that nobody wants stay out."""
    shapes = [SpanLayout.of(SHARED, 64, 1).planes[0]] * 2
    row = shapes[0].row_bytes
    memory = aligned(16 * row)
    memory[:] = np.repeat(np.arange(16, dtype=np.uint8), row)
    dests = [memory[: 8 * row], memory[8 * row :]]
    given = [np.full(6 * row, 99, dtype=np.uint8) for _ in dests]
    order = np.array([5, 0, 7, 2, 1, 6])
    places = Places(shapes, dests, given, [order, order])
    slot = Slot(())
    places.put([Read(slot, 0, memory[at * row : end * row], None, row) for at, end in
                ((0, 3), (3, 5), (5, 12))])  # fmt: skip
    assert given[0][::row].tolist() == order.tolist()
    assert given[1][::row].tolist() == [99, 8, 99, 10, 9, 99]
    two = np.array([1])  # pieces of two rows: rows 2 and 3 of the second
    places.given[1][:] = 99
    places.put_pieces(Pieces(two, dests[1], two, np.zeros(1, dtype=np.uint64), 2 * row))
    assert places.given[1][::row].tolist() == [99, 99, 99, 10, 99, 99]
