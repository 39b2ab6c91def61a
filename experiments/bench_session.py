"""What choosing rows costs beside the bare score product and top-k, on one layer of OPT-6.7B.

The floor is the least that ranking tokens by attention costs: the product of the query with the
keys of the heads concerned, in the store's dtype, summed over the query's rows, and a top-k. The
best of three ways counts (by the median): keys token-major as a session holds them (batched, or
head by head), and keys head-major, copied so before the clock starts. The paper's identifier is
set against three heads with a top-k each, the quality one against all heads with one top-k.

Ratios are of processor time: one thread that never waits, so that other load on the machine counts
less. Ratios of wall time are given beside them.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

import impress
from experiments.common import Options, Row, print_rows, run, spread
from impress.policy import Paper, Policy, Quality
from impress.selection.identify import Asked, select
from impress.selection.probes import PROBE_HEADS, codec_of
from impress.selection.scores import suffix_lse_of
from impress.selection.scratch import drop_scratch

N_TOKENS: Final = 8192
N_ROWS: Final = 16
DTYPES: Final = ("float16", "bfloat16", "float32")
POLICIES: Final[tuple[Policy, ...]] = (
    Paper(0.25, gate=False),  # always votes: the dearer branch
    Quality(0.1),
    Quality(0.1, per="head"),
)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's keys, a query whose heads look hard at some tokens, and what they need."""

    geometry: impress.Geometry
    keys: torch.Tensor  # [heads, n, dim], token-major memory
    query: torch.Tensor  # [heads, q, dim]
    suffix_lse: torch.Tensor

    @classmethod
    def of(cls, dtype: str, seed: int) -> Layer:
        geometry = impress.Geometry(1, 32, 32, 128, dtype)
        make = torch.Generator().manual_seed(seed)
        kind = getattr(torch, dtype)
        keys = torch.randn(N_TOKENS, 32, 128, generator=make)
        query = torch.randn(32, N_ROWS, 128, generator=make)
        shared = torch.randint(N_TOKENS, (400,), generator=make)
        keys[shared] += 0.8 * query.mean(dim=1) * N_ROWS**0.5
        query += 2.0 * query.mean(dim=1, keepdim=True)
        new = torch.randn(32, N_ROWS, 128, generator=make).to(kind)
        query = query.to(kind)
        return cls(
            geometry, keys.to(kind).transpose(0, 1), query, suffix_lse_of(query, new, 128**-0.5)
        )

    def asked(self, policy: Policy) -> Asked:
        """The layer with the records this policy reads."""
        codec = codec_of(policy.probe) if policy.probe else None
        records = codec.encode(self.keys, self.geometry) if codec else None
        return Asked(
            0, N_TOKENS, self.geometry, 64, self.query, 128**-0.5, self.suffix_lse, codec, records
        )


def floors(layer: Layer, policy: Policy, k: int) -> dict[str, Callable[[], Any]]:
    """Bare products and top-k for the heads a policy ranks by."""
    heads = PROBE_HEADS if isinstance(policy, Paper) else layer.geometry.n_heads
    query, head_major = layer.query[:heads], layer.keys[:heads].contiguous()
    keys = head_major.transpose(0, 1).contiguous().transpose(0, 1)

    def top(scores: torch.Tensor) -> Any:
        over = 1 if isinstance(policy, Paper) else (0, 1)
        return torch.topk(scores.sum(dim=over), k, dim=-1)

    def by_head() -> Any:
        sums = torch.stack([(query[h] @ keys[h].t()).sum(dim=0) for h in range(heads)])
        return torch.topk(sums if isinstance(policy, Paper) else sums.sum(dim=0), k, dim=-1)

    return {
        "head-major": lambda: top(query @ head_major.transpose(1, 2)),
        "head by head": by_head,
        "token-major": lambda: top(query @ keys.transpose(1, 2)),
    }


Times = dict[str, list[tuple[float, float]]]  # call -> (processor ms, wall ms) of each round


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> Times:
    """Each call once a round, the order reversed every other round.

    An untimed call comes right before each timed one, so each finds its own data in the caches.
    """
    times: Times = {name: [] for name in calls}
    names = list(calls)
    for i in range(rounds):
        for name in names if i % 2 else names[::-1]:
            calls[name]()
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            calls[name]()
            cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - wall_s
            times[name].append((cpu_s * 1e3, wall_s * 1e3))
    return times


def median(times: Sequence[tuple[float, float]], clock: int) -> float:
    return float(spread([each[clock] for each in times])["median"])


def measure(layer: Layer, policy: Policy, rounds: int) -> Row:
    """One policy on one layer, and its floors."""
    asked = layer.asked(policy)
    chosen = select(policy, asked).n_rows(N_TOKENS)
    ways = floors(layer, policy, N_TOKENS // 4)
    if _once_ms(ways["token-major"]) > 4 * _once_ms(ways["head-major"]):
        del ways["token-major"]  # it copies all keys first: never the cheapest
    times = interleaved({"select": lambda: select(policy, asked), **ways}, rounds)
    ours = times.pop("select")
    way = min(times, key=lambda name: median(times[name], 0))
    pairs = list(zip(ours, times[way], strict=True))
    ratio = spread([a[0] / b[0] for a, b in pairs])
    per = f", per {policy.per}" if isinstance(policy, Quality) else ""
    return {
        "policy": f"{policy.name}{per}", "dtype": layer.geometry.dtype, "rows": chosen,
        "ms": median(ours, 0), "floor ms": median(times[way], 0), "floor": way,
        "ratio": ratio["median"], "least": ratio["min"], "most": ratio["max"],
        "wall ms": median(ours, 1), "wall ratio": spread([a[1] / b[1] for a, b in pairs])["median"],
    }  # fmt: skip


def _once_ms(call: Callable[[], Any]) -> float:
    call()
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def peak_bytes(layer: Layer, policy: Policy) -> int:
    """Memory a selection takes at its peak, beyond its inputs: torch's allocations and NumPy's."""
    asked = layer.asked(policy)
    select(policy, asked)
    drop_scratch()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiled:
        select(policy, asked)
    held = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    tracemalloc.start()
    select(policy, asked)
    _, on_numpy = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most + on_numpy


def experiment(options: Options) -> tuple[dict[str, float], list[Row]]:
    torch.set_num_threads(1)
    rows: list[Row] = []
    most = 0
    for dtype in DTYPES:
        layer = Layer.of(dtype, options.seed)
        for policy in POLICIES:
            rows.append(measure(layer, policy, 15 if options.quick else 60))
            peak = peak_bytes(layer, policy)
            rows[-1]["peak MB"] = peak / 1e6
            most = max(most, peak)
    print_rows(f"Selection, {N_TOKENS:,} prefix tokens, {N_ROWS} query rows, 32 heads x 128", rows)
    return {**_figures(rows), "peak_mb": most / 1e6}, rows


def _figures(rows: Sequence[Row]) -> dict[str, float]:
    """By policy the worst dtype's median ratio; and the default policies' time in bfloat16."""
    worst = {name: max(row["ratio"] for row in rows if row["policy"] == name)
             for name in ("paper", "quality, per mean", "quality, per head")}  # fmt: skip
    narrow = {row["policy"]: row["ms"] for row in rows if row["dtype"] == "bfloat16"}
    return {
        "paper_vs_floor": worst["paper"],
        "quality_vs_floor": worst["quality, per mean"],
        "quality_head_vs_floor": worst["quality, per head"],
        "ms_per_layer_bf16": narrow["paper"],
        "quality_ms_per_layer_bf16": narrow["quality, per mean"],
    }


_MEANING: Final[dict[str, Any]] = {
    "ratio": "select / the bare product and top-k of the same round; median of rounds",
    "paper_vs_floor": "worst dtype; floor: 3 heads, a top-k each",
    "quality_vs_floor": "worst dtype; floor: all heads, one top-k; int4 sketch of all heads",
    "peak_mb": "largest of all: memory beyond the inputs; a copy of the keys would be 67 or 134",
    "ms": "of processor time: one thread, which never waits",
}


def main() -> int:
    return run(
        "Choosing rows beside the bare score product and top-k.", experiment,
        lambda quick: "40 s" if quick else "2 minutes", definitions=_MEANING,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
