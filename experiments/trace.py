"""A trace of requests, replayed on metadata alone: what is found, and where, by policy and size.

    python -m experiments.trace --trace conversation_trace.jsonl      Mooncake's format
    python -m experiments.trace                                       made-up conversations

It goes through the real tree, caches and evictions (trace_replay.py), one request after the other.
Also measured: the hash-table pool, which evicts single blocks where the tree evicts whole leaves,
and a home of unlimited size. Hit rates count blocks of 512 tokens, as the traces do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from experiments.common import Row, Unable, console, print_rows
from experiments.harness import Cell, Experiment, Figures, Options, main
from experiments.trace_file import BLOCK_TOKENS, Request, Trace, load, synthetic
from experiments.trace_replay import Replay
from impress.lineage.hashpool import HashPool

POLICIES: Final = ("lru", "lfu", "importance", "prefix-lru")
POOL: Final = "hash-table pool"
#: Where a block is found; ssd is home, the pool is a tier of its own.
TIERS: Final = ("hbm", "dram", "ssd", "pool")
#: Blocks at home, and in the pool; then the size that the figures are for.
SIZES: Final = {False: (1_000, 3_000, 10_000, 30_000, 100_000), True: (1_000, 10_000)}
FIGURE_SIZE: Final = 10_000
#: Sizes of the fast tiers relative to home: the paper's 10 GB and 32 GB over 130 GB.
FAST: Final = {"hbm": 10 / 130, "dram": 32 / 130}
N_QUICK: Final = 2_000
N_SYNTHETIC: Final = 12_000
#: KV of a token: Llama-3-8B in 16 bits.
TOKEN_BYTES: Final = 32 * 2 * 8 * 128 * 2
#: Seconds for a thousand requests on one busy core, for the estimate.
_THOUSAND_S: Final = 2.0


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="JSONL in Mooncake's format (default: made up)")
    add("--strict", action="store_true", help="stop at a bad line instead of leaving it out")
    add(
        "--token-bytes", type=int, default=TOKEN_BYTES, metavar="N",
        help=f"KV of a token, for the bytes by tier (default {TOKEN_BYTES}: Llama-3-8B, 16 bits)",
    )  # fmt: skip


def trace_of(options: Options) -> Trace:
    """The file named, or a synthetic one, which says so. Raises Unable."""
    strict = options.more.strict
    if options.more.trace is not None:
        path = options.more.trace
        return load(path, path.name, strict=strict, tell=console.print)
    path = options.folder / "synthetic.jsonl"
    path.write_text("".join(f"{line}\n" for line in synthetic(N_SYNTHETIC, options.seed)))
    return load(path, "synthetic: nobody's requests", strict=strict, tell=console.print)


def cells(options: Options) -> list[Cell]:
    token_bytes = options.more.token_bytes
    if token_bytes < 1:
        raise Unable(f"--token-bytes must be at least 1, got {token_bytes}")
    trace = trace_of(options)
    console.print(f"trace: {trace.source}, {len(trace.requests):,} requests")
    requests = trace.requests[: N_QUICK if options.quick else None]
    common = {
        "trace": trace.source, "digest": trace.digest, "n": len(requests),
        "token_bytes": token_bytes,
    }  # fmt: skip
    seconds = len(requests) / 1000 * _THOUSAND_S
    wanted = [("lru", 0), *((p, s) for s in SIZES[options.quick] for p in (*POLICIES, POOL))]
    return [
        Cell({**common, "size": size, "policy": policy},
             partial(measure, requests, policy, size, token_bytes), seconds)
        for policy, size in wanted
    ]  # fmt: skip


def measure(requests: Sequence[Request], policy: str, size: int, token_bytes: int) -> list[Row]:
    """One row. size 0: unlimited, and without fast tiers."""
    if policy == POOL:
        asked, found = pooled(requests, size)
        evicted = refused = 0
    else:
        fast = {tier: int(size * share) for tier, share in FAST.items()} if size else {}
        replay = Replay(policy, size or None, fast)
        for request in requests:
            replay.serve(request)
        replay.check()
        tally = replay.tally
        asked, found, evicted, refused = tally.asked, tally.found, tally.evicted, tally.refused
    n_found = sum(found.values())
    tib = BLOCK_TOKENS * token_bytes / (1 << 40)
    return [{
        "hit": n_found / asked,
        **{f"{tier}_tib": found.get(tier, 0) * tib for tier in TIERS},
        "computed_tib": (asked - n_found) * tib, "evicted_spans": evicted, "refused": refused,
    }]  # fmt: skip


def pooled(requests: Sequence[Request], size: int) -> tuple[int, dict[str, int]]:
    """Blocks asked for, and found in one pool of `size`. A trace's numbers are its keys."""
    pool = HashPool[None](size)
    asked = found = 0
    for request in requests:
        keys = [number.to_bytes(4, "little") for number in request.blocks.tolist()]
        n_found = len(pool.acquire(keys))
        pool.release(keys, [None] * len(keys), n_found)
        asked, found = asked + len(keys), found + n_found
    return asked, {"pool": found}


def figures(rows: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
    shown = ("size", "policy", "hit", *(f"{tier}_tib" for tier in TIERS), "computed_tib")
    print_rows(
        f"{rows[0]['trace']}: blocks found, and TiB of KV by where they were (size 0: no end)",
        [{name: row[name] for name in shown} for row in rows],
    )
    said: Figures = {}
    for row in rows:
        if row["size"] == 0:
            said["hit_infinite"] = row["hit"]
        if row["size"] == FIGURE_SIZE:
            name = {POOL: "hashpool"}.get(row["policy"], row["policy"].replace("-", "_"))
            said[f"hit_{name}_10k"] = row["hit"]
    said["n_refused"] = float(sum(row["refused"] for row in rows))
    return said, rows


def draw(figure: Any, said: Figures, rows: list[Row]) -> None:
    """Hit rate over the size of home, by policy; the rate at unlimited size as a line."""
    axes = figure.subplots()
    for policy in (*POLICIES, POOL):
        mine = [row for row in rows if row["policy"] == policy and row["size"]]
        if mine:
            x, y = [row["size"] for row in mine], [row["hit"] for row in mine]
            axes.plot(x, y, "o-", label=policy)
    if "hit_infinite" in said:
        axes.axhline(said["hit_infinite"], color="grey", linestyle="--", label="no end")
    axes.set_xscale("log")
    axes.set_xlabel("blocks of 512 tokens at home")
    axes.set_ylabel("blocks found")
    axes.set_title(rows[0]["trace"])
    axes.legend()


def draw_tiers(figure: Any, _said: Figures, rows: list[Row]) -> None:
    """Where the blocks that were found lay, at the size of the figures."""
    axes = figure.subplots()
    mine = [row for row in rows if row["size"] == FIGURE_SIZE and row["policy"] != POOL]
    names, below = [row["policy"] for row in mine], [0.0] * len(mine)
    for tier in TIERS[:-1]:
        heights = [row[f"{tier}_tib"] for row in mine]
        axes.bar(names, heights, bottom=below, label=tier)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.set_ylabel("TiB of KV found")
    axes.set_title(rows[0]["trace"])
    axes.legend()


EXPERIMENT: Final = Experiment(
    "trace", "A trace of requests on metadata alone.", cells, figures,
    {"hits": draw, "tiers": draw_tiers}, arguments,
    lambda options: {
        "metadata only": True, "token_bytes": options.more.token_bytes,
        "synthetic": options.more.trace is None,
    },
)  # fmt: skip


def run(argv: Sequence[str] | None = None) -> int:
    return main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(run())
