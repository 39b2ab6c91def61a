"""Prompts whose keys and values follow from their tokens, so that any answer can be judged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

import impress
from experiments.common import Row
from impress.config import MIB

GEOMETRY: Final = impress.Geometry(2, 4, 2, 64, "float32")
N_TOKENS: Final = 256
NAMESPACE: Final = "faults"


def counts_of(fault: str, tried: int) -> Row:
    """A row of a fault, nothing counted yet."""
    return {
        "fault": fault, "tried": tried, "acknowledged": 0, "lost": 0, "wrong": 0, "hangs": 0,
        "missed": 0, "refused": 0, "ended": 0,
    }  # fmt: skip


def config(**more: Any) -> impress.Config:
    """Small segments, so that a store has several; no DRAM, so that every answer is read."""
    settings: dict[str, Any] = {
        "segment_bytes": 4 * MIB, "write_buffer_bytes": 8 * MIB, "dram_bytes": 0,
        "read_timeout_s": 5.0, "io_threads": 4,
    }  # fmt: skip
    return impress.Config(**{**settings, **more})


def open_store(path: Path, **more: Any) -> impress.PrefixStore:
    return impress.PrefixStore.open(path, GEOMETRY, NAMESPACE, config(**more))


def prompt(seed: int) -> np.ndarray:
    """256 tokens; an odd seed's begin like those of the seed before it."""
    tokens = np.random.default_rng(seed).integers(0, 1 << 20, N_TOKENS, dtype=np.int32)
    if seed % 2:
        tokens[: N_TOKENS // 2] = prompt(seed - 1)[: N_TOKENS // 2]
    return tokens


@lru_cache(64)
def rows(seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Keys and values by layer [n_kv_heads, 256, head_dim]: each row depends on all before it."""
    mixed = np.cumsum((prompt(seed).astype(np.int64) + 1) * 2654435761 % 1000003) % 9973
    heads, dim = GEOMETRY.n_kv_heads, GEOMETRY.head_dim
    base = np.arange(heads * dim).reshape(heads, 1, dim)
    made = [
        np.sin(base + mixed[None, :, None] + 31 * i).astype(np.float32)
        for i in range(2 * GEOMETRY.n_layers)
    ]
    return made[::2], made[1::2]


def put(store: impress.PrefixStore, seed: int) -> impress.write.writer.Stored:
    """Store a prompt; every third with importance, so that its rows are packed."""
    importance = None
    if seed % 3 == 0:
        shape = (GEOMETRY.n_layers, N_TOKENS)
        importance = np.random.default_rng(seed).random(shape, dtype=np.float32)
    return store.store(prompt(seed), *rows(seed), importance=importance, wait_s=30)


@dataclass(slots=True)
class Judged:
    """What became of prompts: tokens served right; prompts not served whole; prompts wrong."""

    served: int = 0
    missed: int = 0
    wrong: int = 0


def judge(store: impress.PrefixStore, seeds: Iterable[int]) -> Judged:
    """Read every prompt, whatever of it is a hit, and compare with what was put."""
    found = Judged()
    for seed in seeds:
        n = 0
        try:
            with store.lease(prompt(seed)) as lease:
                n = lease.n_tokens
                if n:
                    with lease.session() as session:
                        for layer, pair in enumerate(zip(*rows(seed), strict=True)):
                            k, v, _ = session.retrieve(layer, None)
                            same = np.array_equal(k.numpy(), pair[0][:, :n]) and np.array_equal(
                                v.numpy(), pair[1][:, :n]
                            )
                            if not same:
                                found.wrong += 1
                                break
        except impress.PrefixLost:
            n = 0
        found.served += n
        found.missed += n < N_TOKENS
    return found
