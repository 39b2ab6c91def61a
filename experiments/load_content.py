"""Prompts for `experiments.load`, users who ask for them at random, and what they were given.

`python -m experiments.load_content DIR SECONDS THREADS SEED PROMPTS` is one process of several: it
reads what all shards hold, writes to one of its own, and prints what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

import impress
from impress.config import MIB
from impress.errors import ImpressError

#: OPT-6.7B's rows (pieces of 8 KiB) in four layers: 16 MiB a prompt.
GEOMETRY: Final = impress.Geometry(4, 32, 32, 128, "float16")
N_TOKENS: Final = 256
PROMPT_BYTES: Final = N_TOKENS * GEOMETRY.token_bytes
NAMESPACE: Final = "load"
#: One answer in this many is compared, in one of its layers: each in its turn.
SAMPLE: Final = 8
#: Prompts a writer keeps at a time.
WRITTEN: Final = 4
_BASE: Final = np.random.default_rng(7).integers(0, 1 << 14, (32, N_TOKENS, 128), dtype=np.uint16)


def prompt(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 20, N_TOKENS, dtype=np.int32)


def plane(seed: int, layer: int, which: int) -> np.ndarray:
    """K or V of a layer, float16 [32, 256, 128]: finite, different in every prompt and layer."""
    mark = np.uint16((seed * 2654435761 + layer * 977 + which * 131) % (1 << 14))
    return (_BASE ^ mark).view(np.float16)


def put(store: impress.PrefixStore, seed: int, tenant: str = "") -> None:
    """Store a prompt. Raises ImpressError when it is refused."""
    layers = range(GEOMETRY.n_layers)
    keys, values = ([plane(seed, layer, which) for layer in layers] for which in (0, 1))
    stored = store.store(prompt(seed), keys, values, wait_s=60, tenant=tenant)
    if stored.refused:
        raise ImpressError(f"refused: {stored.refused}")


def config(dram_bytes: int, engine: str = "auto") -> impress.Config:
    return impress.Config(
        dram_bytes=dram_bytes, io_engine=engine, repack_every_s=0, write_buffer_bytes=64 * MIB
    )


@dataclass(slots=True)
class Seen:
    """What users were given. `ms`: each request's, from lease to last layer."""

    ms: list[float] = field(default_factory=list)
    compared: int = 0
    wrong: int = 0
    lost: int = 0
    missed: int = 0
    rss_mb: list[float] = field(default_factory=list)  # without what the DRAM tier holds
    oldest_lease_s: float = 0.0


def rss_mb() -> float:
    """Resident memory of this process."""
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def ask(store: impress.PrefixStore, seed: int, seen: Seen, *, compare: bool) -> None:
    """One request: everything stored of a prompt, in layer order."""
    begin_s = time.perf_counter()
    try:
        with store.lease(prompt(seed)) as lease:
            if lease.n_tokens < N_TOKENS:
                seen.missed += 1
                return
            with lease.session() as session:
                session.prefetch()
                rows = [session.retrieve(layer, None)[:2] for layer in range(GEOMETRY.n_layers)]
                seen.ms.append((time.perf_counter() - begin_s) * 1e3)
                if compare:
                    layer = seen.compared % GEOMETRY.n_layers
                    seen.compared += 1
                    seen.wrong += any(
                        not np.array_equal(
                            got.numpy().view(np.uint16), plane(seed, layer, which).view(np.uint16)
                        )
                        for which, got in enumerate(rows[layer])
                    )
    except impress.PrefixLost:
        seen.lost += 1


def users(
    store: impress.PrefixStore, n_threads: int, seconds: float, n_prompts: int, seed: int
) -> Seen:
    """Let n_threads ask without pause for `seconds`; memory and leases are watched meanwhile.

    Raises what a thread raised, other than a miss; such a thread asks no more.
    """
    seen = [Seen() for _ in range(n_threads)]
    until = time.perf_counter() + seconds

    def work(i: int) -> None:
        rng = np.random.default_rng([seed, i])
        asked = 0
        while time.perf_counter() < until:
            asked += 1
            ask(store, int(rng.integers(n_prompts)), seen[i], compare=asked % SAMPLE == 1)

    total = Seen()
    with ThreadPoolExecutor(n_threads) as threads:
        asking = [threads.submit(work, i) for i in range(n_threads)]
        while not all(user.done() for user in asking):
            stats = store.stats()  # the DRAM tier touches its memory as it fills
            total.rss_mb.append(rss_mb() - stats["tiers"]["dram"]["used"] / 1e6)
            total.oldest_lease_s = max(total.oldest_lease_s, stats["oldest_lease_s"])
            wait(asking, timeout=seconds / 40)
        for user in asking:
            user.result()
    for one in seen:
        total.ms += one.ms
        for name in ("compared", "wrong", "lost", "missed"):
            setattr(total, name, getattr(total, name) + getattr(one, name))
    return total


class Writer:
    """Stores prompts that nobody reads, and purges them again, while it is entered. Leaving it
    raises the error that it ended with, if any."""

    def __init__(self, store: impress.PrefixStore, first: int) -> None:
        self.written = 0
        self._store = store
        self._first = first
        self._done = threading.Event()
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Writer:
        self._writing = self._thread.submit(self._write)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.shutdown()
        self._writing.result()

    def _write(self) -> None:
        while not self._done.is_set():
            put(self._store, self._first + self.written % 1000, tenant="writer")
            self.written += 1
            if self.written % WRITTEN == 0:
                self._store.flush()
                self._store.purge("writer")


def left_behind(store: impress.PrefixStore) -> int:
    """Leases, pinned spans and bytes of buffers in use after the last request; closes the store."""
    store.flush()
    stats = store.stats()
    store.close()
    return int(stats["leases"] + stats["pinned_spans"] + store.buffers.used_bytes)


def figures_of(seen: Seen, read_bytes: int, seconds: float, left: int) -> dict[str, Any]:
    """A row's numbers. `read_bytes`: from the SSD."""
    n = len(seen.rss_mb)
    growth = float(np.median(seen.rss_mb[-(n // 4) :]) - np.median(seen.rss_mb[n // 4 : n // 2]))
    return {
        "requests/s": len(seen.ms) / seconds, "p50 ms": _percentile(seen.ms, 50),
        "p99 ms": _percentile(seen.ms, 99), "GB/s": len(seen.ms) * PROMPT_BYTES / seconds / 1e9,
        "SSD GB/s": read_bytes / seconds / 1e9, "RSS growth MB": growth,
        "oldest lease s": seen.oldest_lease_s, "compared": seen.compared, "wrong": seen.wrong,
        "lost": seen.lost, "missed": seen.missed, "left": left,
    }  # fmt: skip


def _percentile(ms: list[float], q: float) -> float:
    return float(np.percentile(ms, q)) if ms else float("nan")


def measured(
    store: impress.PrefixStore, n_threads: int, seconds: float, n_prompts: int, seed: int,
    beside: AbstractContextManager[Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Users on a store, which is closed at the end; `beside` is entered while they ask.

    The DRAM tier is emptied first.
    """
    ask(store, 0, Seen(), compare=True)  # the first request imports torch
    store.drop_caches()
    before = store.stats()
    begin_s = time.perf_counter()
    with beside or nullcontext():
        seen = users(store, n_threads, seconds, n_prompts, seed)
        took_s, after = time.perf_counter() - begin_s, store.stats()
    read = after["read_bytes"].get("ssd", 0) - before["read_bytes"].get("ssd", 0)
    shared = after["shared_bytes"] - before["shared_bytes"]
    return figures_of(seen, read - shared, took_s, left_behind(store))


def main() -> int:
    """One process of several."""
    folder, seconds, n_threads, seed, n_prompts = sys.argv[1:6]
    with impress.PrefixStore.open(folder, GEOMETRY, NAMESPACE, config(0)) as store:
        ask(store, 0, Seen(), compare=True)
        print("open", flush=True)
        sys.stdin.readline()
        beside = Writer(store, int(n_prompts) + 1000 * int(seed))  # prompts of its own
        row = measured(store, int(n_threads), float(seconds), int(n_prompts), int(seed), beside)
    print(json.dumps({**row, "written": beside.written}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
