"""Repacking under load: what it writes, and how much it slows requests down meanwhile.

A store learns which rows requests choose, then repacks in the background while the same kind of
requests goes on. Compute is a wait of the stated roofline (emulated); reads and writes are real.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from experiments.common import Row, print_rows
from experiments.harness import Cell, Experiment, Figures, Options, main
from experiments.systems.catalogue import System
from experiments.systems.cell import Load, order_of
from experiments.systems.clock import A100, Clock, Compute
from experiments.systems.data import NAMESPACE, WINDOW, Data
from experiments.systems.generate import Knobs
from experiments.systems.serve import Asking, Server
from experiments.systems.shapes import SHAPES
from experiments.systems.sizes import LAYERS, dilation, meta
from impress.config import Config
from impress.policy import Paper
from impress.store import PrefixStore

POLICY: Final = Paper(0.25)
#: Least requests before and during repacking, by `quick`.
N: Final = {False: 1000, True: 100}
N_PREFIXES: Final = {False: 8, True: 4}


def cells(options: Options) -> list[Cell]:
    seconds = 30 + 3 * N[options.quick] * 0.12
    return [Cell({"part": "repack"}, partial(measure, options), seconds)]


def measure(options: Options) -> list[Row]:
    torch.set_num_threads(1)
    knobs, n = Knobs(), N[options.quick]
    data = Data.of(
        SHAPES["opt-6.7b"], LAYERS[options.quick], N_PREFIXES[options.quick],
        options.folder / "data", knobs, options.seed,
    )  # fmt: skip
    asked = order_of(Load(zipf=0.9, seed=options.seed), len(data.prefixes), 4 * n)
    # Choices are asked for again and again: a queue of as many as fit the time.
    pool = sorted({(prefix, request % 12) for prefix, request in asked})
    choices = data.prepare(["plain"], [POLICY], pool, knobs)
    config = Config(
        window=WINDOW, dram_bytes=data.n_bytes * 16 // 130, probes=("heads3-v1",), durable=False,
        segment_bytes=128 << 20, repack_every_s=0.0, lease_timeout_s=3600,
    )  # fmt: skip
    clock = Clock(dilation(options))
    with PrefixStore.open(data.folder / "plain", data.geometry, NAMESPACE, config) as store:
        server = Server(
            System("impress", "", "plain", POLICY), Compute(data.shape, A100), data.geometry, clock,
            store, choices,
        )  # fmt: skip
        queue = iter(asked)
        said = _phases(server, data, store, queue, n)
    return [said]


def _phases(server: Server, data: Data, store: PrefixStore, queue: Any, n: int) -> Row:
    """Requests before, during and after a pass of the repacker."""

    def one() -> float:
        prefix, request = next(queue)
        served = server.serve(Asking(prefix, data.prefixes[prefix].tokens, request % 12))
        server.settle()
        return served.ttft_s

    for _ in range(max(12, n // 8)):
        one()  # learning, and warm caches
    before = [one() for _ in range(n)]
    reports: list[Any] = []
    thread = threading.Thread(target=lambda: reports.append(store.repack()), daemon=True)
    begin = time.perf_counter()
    thread.start()
    during: list[float] = []
    while thread.is_alive() and len(during) < 2 * n:
        during.append(one())
    thread.join(600)
    took = time.perf_counter() - begin
    maps, maps_cpu, ttft, after = 0.0, 0.0, 0.0, []
    for _ in range(n // 4):
        prefix, request = next(queue)
        asking = Asking(prefix, data.prefixes[prefix].tokens, request % 12)
        served = server.serve(asking)
        server.settle()
        after.append(served.ttft_s)
        maps, maps_cpu = maps + served.map_s, maps_cpu + served.map_cpu_s
        ttft += served.ttft_s
    (report,) = reports
    row: Row = {
        "spans": len(report.spans), "moved": report.moved, "moved_bytes": report.moved_bytes,
        "data_bytes": data.n_bytes, "took_s": took, "n_before": len(before),
        "n_during": len(during), "map_share_of_ttft": maps / ttft,
        "map_cpu_share_of_ttft": maps_cpu / ttft,
    }  # fmt: skip
    for name, times in (("before", before), ("during", during), ("after", after)):
        for q in (50, 90, 99):
            row[f"p{q}_ms_{name}"] = float(np.percentile(times, q)) * 1e3 if times else None
    return row


def figures(rows: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
    said: Figures = {}
    for row in rows:
        print_rows(
            "Repacking under load: ms to the first token",
            [
                {"": name, **{f"p{q}": row[f"p{q}_ms_{name}"] or "" for q in (50, 90, 99)}}
                for name in ("before", "during", "after")
            ],
        )
        if row["p99_ms_during"]:
            for q in (50, 99):
                slow = row[f"p{q}_ms_during"] / row[f"p{q}_ms_before"] - 1
                said[f"repack_p{q}_slowdown"] = slow
        for name in ("map_share_of_ttft", "map_cpu_share_of_ttft"):
            said[name] = row[name]
        said["moved_share"] = row["moved_bytes"] / row["data_bytes"]
        said["p50_after_vs_before"] = row["p50_ms_after"] / row["p50_ms_before"]
    return said, rows


EXPERIMENT: Final = Experiment(
    "repack", "Repacking under load; compute emulated.", cells, figures, meta=meta, uses_disk=True,
    arguments=lambda parser: parser.set_defaults(unchecked=True),
)  # fmt: skip


def run(argv: Sequence[str] | None = None) -> int:
    return main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(run())
