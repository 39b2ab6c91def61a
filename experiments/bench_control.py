"""The control plane at a million windows: lookup, insertion, opening, memory. No rows are moved.

Each store is made as real index values on the disk (experiments.forest), then opened and asked in
a process of its own, with the index out of the page cache. Every node of its tree forks, and each
timed lookup also makes containers that live a while, so that passes of the garbage collector,
which stays on, fall inside the timing.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import impress
from experiments.common import Options, Row, console, print_rows, run
from experiments.forest import OPT_6_7B, PROMPT_TOKENS, Shape, plant
from impress.blockhash import key_after, labels_of, root_key
from impress.spans.format import SpanRecord
from impress.spans.layout import SpanLayout
from impress.write.directory import Shard
from tiers.base import Extent

#: Containers made in a timed lookup, and how many of them live at a time.
CHURN: Final = 50
ALIVE: Final = 100_000
_NEW_TOKENS: Final = 1024  # of an inserted span

Measured = dict[str, Any]


def measure(folder: Path, shape: Shape, n_lookups: int, n_inserts: int) -> Measured:
    """Open the planted store and use it. Needs a fresh process: memory is the process's."""
    empty = shape.open(folder.with_name(folder.name + "-empty"))  # makes threads and arenas
    labels_of(shape.prompt(0), shape.window)
    forget_pages(Shard(folder).index / "data.mdb")
    before = anonymous_bytes()
    cpu_s, begin = time.process_time(), time.perf_counter()
    store = shape.open(folder)
    open_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_s
    grown = anonymous_bytes() - before
    counts = store.catalog.counts()
    assert counts["windows"] == shape.n_windows // shape.span_windows * shape.span_windows
    looked, looked_cpu, passes = lookups(store, shape, n_lookups)
    inserted = insertions(store, shape, n_inserts)
    begin = time.perf_counter()
    gc.collect()
    pass_ms = (time.perf_counter() - begin) * 1e3
    for opened in (store, empty):
        opened.close()
    return {
        "spans": counts["spans"], "nodes": counts["nodes"], "open_s": open_s, "open_cpu_s": cpu_s,
        "bytes": grown, "lookup_ms": looked, "lookup_cpu_ms": looked_cpu,
        "gc_passes": passes, "gc_pass_ms": pass_ms, "insert_ms": inserted,
    }  # fmt: skip


def lookups(
    store: impress.PrefixStore, shape: Shape, n: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], list[int]]:
    """Milliseconds of n lookups of whole prompts in random order: elapsed, and of this thread's CPU
    (the difference is other work on the machine). Also GC passes by generation."""
    rng = np.random.default_rng(shape.seed)
    took, cpu = np.empty(n), np.empty(n)
    alive: deque[list[int]] = deque(maxlen=ALIVE)
    with counted_passes() as passes:
        for i in range(n):
            prompt = shape.prompt(int(rng.integers(shape.n_paths)))
            cpu_begin, begin = time.thread_time(), time.perf_counter()
            found = store.lookup(prompt)
            alive.extend([[i] for _ in range(CHURN)])
            took[i], cpu[i] = time.perf_counter() - begin, time.thread_time() - cpu_begin
            assert found == PROMPT_TOKENS, f"found {found} of {PROMPT_TOKENS} tokens"
    return took * 1e3, cpu * 1e3, passes


def insertions(store: impress.PrefixStore, shape: Shape, n: int) -> npt.NDArray[np.float64]:
    """Milliseconds to make n spans visible, each after another whole prompt (a match included)."""
    rng = np.random.default_rng((shape.seed, 7))
    root = root_key(store.namespace, OPT_6_7B, shape.window, "")
    took = np.empty(n)
    nowhere = Extent(0, 0, SpanLayout.of(OPT_6_7B, shape.window, 1).data_bytes)
    for i in range(n):
        prompt = shape.prompt(int(rng.integers(shape.n_paths)))
        more = rng.integers(0, 50_000, _NEW_TOKENS, dtype=np.int32)
        old, new = (labels_of(tokens, shape.window) for tokens in (prompt, more))
        before = key_after(root, old, shape.window)
        record = SpanRecord(
            (1 << 40) + i, store.namespace, root, before, key_after(before, new, shape.window),
            shape.path_windows, _NEW_TOKENS // shape.window, shape.window, nowhere, (nowhere,), new,
        )  # fmt: skip
        prefix = old + new
        begin = time.perf_counter()
        added = store.catalog.publish(record, prefix)
        took[i] = time.perf_counter() - begin
        assert added == record.n_windows, "not inserted"
    return took * 1e3


@contextmanager
def counted_passes() -> Iterator[list[int]]:
    """Passes of the garbage collector by generation while the block runs. It must be on."""
    assert gc.isenabled(), "the garbage collector is off"
    passes = [0, 0, 0]

    def count(phase: str, info: dict[str, int]) -> None:
        passes[info["generation"]] += phase == "stop"

    gc.callbacks.append(count)
    try:
        yield passes
    finally:
        gc.callbacks.remove(count)


def anonymous_bytes() -> int:
    """Memory of this process that no file backs, after giving back what can be given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def forget_pages(file: Path) -> None:
    """Out of the page cache, as after a restart of the machine."""
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def row_of(shape: Shape, m: Measured) -> Row:
    token_layers = shape.n_windows * shape.window * OPT_6_7B.n_layers
    p50, p999 = np.percentile(m["lookup_ms"], [50, 99.9])
    path = PROMPT_TOKENS // shape.window
    through = path if shape.span_windows == 1 else 2 * path // shape.span_windows
    return {
        "tokens a window": shape.window, "windows a span": shape.span_windows,
        "spans": m["spans"], "nodes": m["nodes"], "nodes of a lookup": through,
        "lookup ms p50": float(p50), "lookup ms p99.9": float(p999),
        "lookup CPU ms p99.9": float(np.percentile(m["lookup_cpu_ms"], 99.9)),
        "lookup ms most": float(m["lookup_ms"].max()),
        "GC passes meanwhile": "/".join(map(str, m["gc_passes"])),
        "full GC pass ms": m["gc_pass_ms"], "insert ms p50": float(np.median(m["insert_ms"])),
        "open s": m["open_s"], "open CPU s": m["open_cpu_s"],
        "metadata B/token-layer": m["bytes"] / token_layers,
    }  # fmt: skip


def experiment(options: Options) -> tuple[dict[str, float], list[Row]]:
    n_windows = 100_000 if options.quick else 1_000_000
    n_lookups, n_inserts = (1000, 100) if options.quick else (5000, 500)
    shapes = {
        "typical": Shape(64, 16, n_windows, options.seed),
        "512": Shape(64, 1, n_windows, options.seed),
        "2048": Shape(16, 1, n_windows, options.seed),
    }
    rows: dict[str, Row] = {}
    spawn = multiprocessing.get_context("spawn")
    for name, shape in shapes.items():
        console.print(f"{n_windows:,} windows of {shape.window}, {shape.span_windows} a span …")
        folder = options.folder / name
        plant(folder, shape)
        with ProcessPoolExecutor(1, mp_context=spawn) as process:
            measured = process.submit(measure, folder, shape, n_lookups, n_inserts).result()
        rows[name] = row_of(shape, measured)
    first, *_ = rows.values()
    print_rows(  # a column for each store: more fits a screen that way
        f"A store of {n_windows:,} windows; {n_lookups:,} lookups of {PROMPT_TOKENS:,} tokens",
        [{"": key, **{name: row[key] for name, row in rows.items()}} for key in first],
    )
    figures = {
        "lookup_ms_p50_512": rows["512"]["lookup ms p50"],
        "lookup_ms_p50_2048": rows["2048"]["lookup ms p50"],
        "lookup_ms_p999": max(rows["512"]["lookup ms p99.9"], rows["2048"]["lookup ms p99.9"]),
        "insert_ms_p50": max(row["insert ms p50"] for row in rows.values()),
        "open_s": rows["typical"]["open s"],
        "metadata_bytes_per_token_layer": rows["512"]["metadata B/token-layer"],
    }
    return figures, list(rows.values())


_MEANING: Final = {
    "open_s": "16 windows a span (the rows have 1 a span), index not in the page cache",
    "metadata_bytes_per_token_layer": "anonymous memory that opening adds / (windows x window x 32 "
    "layers), the worst of 64-token windows: 1 a span, every node forks; 16-token windows take "
    "three times as much (the row of 2,048 nodes)",
    "lookup_ms_p999": "the worse of the stores with 512 and 2,048 nodes",
    "insert_ms_p50": "the worst of all stores",
    "geometry": str(OPT_6_7B),
}


def main() -> int:
    return run(
        "The control plane at a million windows.", experiment,
        lambda quick: "20 s" if quick else "2 minutes", definitions=_MEANING,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
