"""The checksums that copies of whole chunks are compared with."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from conftest import kv_of, prompt, put_prompt, wait_for_promotions
from hypothesis import given
from hypothesis import strategies as st
from test_direct import CHUNK, GEOMETRY, Open, token_major
from test_direct import N as N_TOKENS
from tier_contract import aligned, noise

from impress.cache.chunks import ChunkCache
from tiers.base import PAGE, Bytes, Pieces, Read, Sums, sums_of, verify
from tiers.errors import ReadFailed

N = 4  # pieces of a chunk's plane
#: Chunks in a prompt.
N_CHUNKS = N_TOKENS // 64
PLANES = {0: N * PAGE, 1: N * PAGE}


def pieces_of(data: Bytes) -> Sums:
    return sums_of(data, PAGE)[None]


def filled(cache: ChunkCache, plane: int, chunk: Bytes) -> None:
    cache.fill(0, plane, chunk, pieces_of(chunk)[0])


def read(cache: ChunkCache, plane: int, entry: int, as_one_of: Sums) -> Bytes:
    entries, dest = np.array([entry]), aligned(N * PAGE)[: N * PAGE]
    sums = cache.sums.of(plane, entries, as_one_of)
    at = cache.plane_at(plane, entries)
    cache.tier.read_pieces(Pieces(at, dest, np.array([0]), sums, N * PAGE))
    return dest


@given(st.permutations(range(N)), st.integers(0, 1), st.integers(0, 1))
def test_an_entry_s_bytes_pass_for_no_other_chunk_s(
    mixed: list[int], plane: int, other: int
) -> None:
    """Whatever the cause, a wrong map or an entry given to somebody else: with sums only of what
    the entry holds, any chunk's bytes would pass."""
    cache = ChunkCache(2 * sum(PLANES.values()), PLANES, 1)
    chunk = noise(N * PAGE, seed=7)
    filled(cache, plane, chunk)
    assert np.array_equal(read(cache, plane, 0, pieces_of(chunk)), chunk)
    swapped = chunk.reshape(N, PAGE)[mixed].reshape(-1)  # the same pieces in another order, too
    for not_it in (noise(N * PAGE, seed=8), *([swapped] if mixed != sorted(mixed) else [])):
        with pytest.raises(ReadFailed, match="1 bad piece"):
            read(cache, plane, 0, pieces_of(not_it))
    if other != plane:
        with pytest.raises(ReadFailed, match="1 bad piece"):
            read(cache, other, 0, pieces_of(chunk))


@given(st.integers(0, N * PAGE - 1), st.integers(0, 7))
def test_a_bit_that_flips_in_a_copy_is_found(byte: int, bit: int) -> None:
    cache, chunk = ChunkCache(sum(PLANES.values()), PLANES, 1), noise(N * PAGE, seed=7)
    filled(cache, 1, chunk)
    cache.tier._arena[N * PAGE + byte] ^= 1 << bit  # type: ignore[attr-defined]
    with pytest.raises(ReadFailed, match="1 bad piece"):
        read(cache, 1, 0, pieces_of(chunk))


@pytest.mark.parametrize("own", [False, True], ids=["the store's", "the caller's"])
def test_what_a_caller_writes_once_its_rows_are_compared_gets_into_no_copy_s_sum(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """The sum was taken of the caller's memory, after the comparison: one time in a dozen an
    engine with one pair of tensors for all layers had written there in between, and the next
    request lost its prefix although each of its bytes was right."""
    out = tuple(token_major()[0]) if own else None
    looked_at, compared, go_on = list[Any](), list[Any](), threading.Event()

    def overwritten(read: Read, *args: Any) -> None:
        assert go_on.wait(60)
        verify(read, *args)
        compared.append(read)
        if len(compared) == 2 * N_CHUNKS:
            for tensor in looked_at:
                tensor.zero_()

    monkeypatch.setattr("impress.read.climb.verify", overwritten)
    store, tokens = open_store(GEOMETRY, dram_bytes=64 * CHUNK), prompt(N_TOKENS)
    assert put_prompt(store, tokens, wait_s=30).wait(60)
    keys, values = kv_of(tokens, GEOMETRY)
    for _ in range(2):
        with store.lease(tokens) as lease, lease.session() as session:
            looked_at[:] = session.retrieve(0, None, out=out)[:2]
            k, v = looked_at
            assert np.array_equal(k.numpy(), keys[0]) and np.array_equal(v.numpy(), values[0])
            go_on.set()
        wait_for_promotions(store)
    assert len(compared) == 2 * N_CHUNKS
    assert store.stats()["promotions"] == {"dram": N_CHUNKS}
