"""What a request leaves to Python's garbage collector: nothing of ours."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from conftest import MIB, kv_of, prompt, put_prompt

import impress
from impress.policy import AllHeads, Contiguous, Exact, Paper, Policy, Quality, Recency

#: A row is a piece: chosen rows are brought from memory straight to where they are looked at.
GEOMETRY = impress.Geometry(2, 32, 32, 64)
CHUNK = 2 * 64 * 32 * 64 * 2
N = 1280

Open = Callable[..., impress.PrefixStore]


@contextmanager
def left_over() -> Iterator[list[str]]:
    """Types of our objects, made in the block, that only the collector would find."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    found: list[str] = []
    try:
        yield found
        gc.collect()
        kinds = (type(one) for one in gc.garbage)
        ours = ("impress.", "tiers.")
        found += sorted({k.__qualname__ for k in kinds if k.__module__.startswith(ours)})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def serve(store: impress.PrefixStore, tokens: np.ndarray, policy: Policy) -> None:
    query, lse = torch.ones(32, 2, 64), torch.zeros(32, 2)
    with store.lease(tokens) as lease, lease.session(policy) as session:
        session.prefetch()
        for layer in range(GEOMETRY.n_layers):
            session.retrieve(layer, query, suffix_lse=lse)
    assert store._pool.idle(60)


@pytest.mark.parametrize(
    "policy",
    [Exact(), Paper(), Quality(), AllHeads(0.25), Recency(0.25), Contiguous(0.25)],
    ids=lambda policy: policy.name,
)
def test_a_request_leaves_no_memory_to_the_collector(open_store: Open, policy: Policy) -> None:
    """Tickets held what was to follow them, which held the tickets: rows that came straight from
    memory stayed out until the collector ran, gigabytes of them with a large model."""
    store = open_store(GEOMETRY, dram_bytes=8 * CHUNK + MIB, probes=("heads3-v1", "int4-v2"))
    tokens = prompt(N)
    assert put_prompt(store, tokens, wait_s=30).wait(60)
    serve(store, tokens, policy)  # makes what is made only once
    with left_over() as found:
        for _ in range(2):
            serve(store, tokens, policy)
    assert found == []


def test_a_store_leaves_nothing_to_the_collector(open_store: Open) -> None:
    store = open_store(GEOMETRY)
    assert put_prompt(store, prompt(N), wait_s=30).wait(60)
    other = prompt(N, seed=2)
    kv = kv_of(other, GEOMETRY)
    with left_over() as found:
        assert store.store(other, *kv, wait_s=30).wait(60)
        store.flush()
    assert found == []
