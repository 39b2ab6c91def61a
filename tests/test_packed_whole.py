"""All rows of packed spans come in the prompt's order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from conftest import kv_of, prompt, put_prompt, wait_for_promotions

import impress
from impress.policy import Exact, Random
from impress.spans.layout import SpanLayout

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
