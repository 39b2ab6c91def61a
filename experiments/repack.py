"""Repacking under load: what it writes, and how much it slows requests down meanwhile.

A store learns which rows requests choose, then repacks in the background while the same kind of
requests goes on, one after the other:

    learning ─> the same requests, by turns with the repacker held and running ─> after the pass

By turns, so that a disk that gets slower or faster meanwhile affects both alike; the same requests,
since the tail depends on which prefixes are asked for and which layers fall back. Whichever is
first in one pair is second in the next, since the second finds its rows cached. Compute is emulated
by waits that follow the stated roofline; reads and writes are real.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any, Final

import numpy as np
import torch

from experiments.common import Row, Unable, print_rows
from experiments.harness import Cell, Experiment, Figures, Options, main
from experiments.systems.catalogue import System
from experiments.systems.cell import Load, order_of
from experiments.systems.clock import A100, Clock, Compute
from experiments.systems.data import NAMESPACE, Data
from experiments.systems.device import Emulated
from experiments.systems.generate import Knobs
from experiments.systems.serve import Asking, Served, Server
from experiments.systems.shapes import SHAPES, WINDOW
from experiments.systems.sizes import (
    LAYERS,
    Verdict,
    checked,
    dilation,
    meta,
    unchecked_argument,
)
from experiments.systems.sweep import check_cell
from impress.config import Config
from impress.policy import Paper
from impress.repacking.span_copy import Copier
from impress.store import PrefixStore

POLICY: Final = Paper(0.25)
#: Requests with the repacker held, and at most as many with it running, by `quick`.
N: Final = {False: 4500, True: 100}
#: Requests in a turn.
TURN: Final = 25
#: Seconds of the requests in two turns: with the repacker held, and with it running.
Pair = tuple[list[float], list[float]]
_WAYS: Final = ("held", "during")
#: Requests of each way that a percentile is told from: as elsewhere, p99 wants a thousand.
_LEAST: Final = {50: 1, 90: 1, 99: 1000}
N_PREFIXES: Final = {False: 8, True: 4}
#: Requests on a prefix before, during and after the pass, each asked again and again. The store
#: learns from those during it, too; no order is made from those after it.
_BEFORE, _BESIDE, _BEHIND = range(24), range(24, 48), range(48, 60)


def cells(options: Options) -> list[Cell]:
    seconds = 60 + 2.25 * N[options.quick] * 0.12
    # Cells from before any of these are measured again: turns after a move count as "during", the
    # pass's part under load is apart, both ways have the same requests, these come with the first
    # token of the one before, and those after the pass are other ones.
    params = {"part": "repack", "n": N[options.quick], "behind": "during", "pass": "apart",
              "requests": "the same", "clock": "from the first token before",
              "after": "others"}  # fmt: skip
    verdict = Verdict(options)
    return [check_cell(verdict), Cell(params, partial(measure, options, verdict), seconds)]


def measure(options: Options, verdict: Verdict) -> list[Row]:
    if verdict.withdrawn:
        return []
    torch.set_num_threads(1)
    knobs, n = Knobs(), N[options.quick]
    data = Data.of(
        SHAPES["opt-6.7b"], LAYERS[options.quick], N_PREFIXES[options.quick],
        options.folder / "data", knobs, options.seed,
    )  # fmt: skip
    load = Load(zipf=0.9, n_measured=3 * n, most_windows=0, seed=options.seed)
    asked = order_of(load, len(data.prefixes))
    # Choices are asked for again and again: a queue of as many as fit the time.
    prefixes = sorted({prefix for prefix, _ in asked})
    pool = [(prefix, request) for prefix in prefixes for request in range(_BEHIND.stop)]
    choices = data.prepare(["plain"], [POLICY], pool, knobs)
    config = Config(
        window=WINDOW, dram_bytes=data.n_bytes * 16 // 130, probes=("heads3-v1",), durable=False,
        segment_bytes=128 << 20, repack_every_s=0.0, lease_timeout_s=3600,
    )  # fmt: skip
    stretch = dilation(options)
    with PrefixStore.open(data.folder / "plain", data.geometry, NAMESPACE, config) as store:
        waits = Emulated(Compute(data.shape, A100), data.geometry, Clock(stretch), choices)
        server = Server(System("impress", "", "plain", POLICY), waits, data.geometry, store)
        queue = iter(asked)
        said = _phases(server, data, store, queue, n, stretch)
    return [{**said, "emulator_error": verdict.error}]


def _next(queue: Any, n: int, of: range) -> list[tuple[int, int]]:
    """Requests on the next n prefixes asked for, with request numbers from `of`."""
    return [(prefix, of[request % len(of)]) for prefix, request in islice(queue, n)]


def _one(server: Server, data: Data, asked: tuple[int, int]) -> Served:
    """Serve a request, and wait for the work that goes on after it."""
    served = server.serve(Asking(asked[0], data.prefixes[asked[0]].tokens, asked[1]))
    server.settle()
    return served


def _in_a_row(server: Server, data: Data, some: Sequence[tuple[int, int]]) -> list[float]:
    """Seconds of requests that each come with the first token of the one before.

    There is no wait between two: it would keep them out of the way of what the repacker has under
    way.
    """
    asked = [Asking(prefix, data.prefixes[prefix].tokens, request) for prefix, request in some]
    served = [server.serve(one) for one in asked]
    free = [served[0].began_s, *(s.began_s + s.ttft_s for s in served[:-1])]
    return [s.began_s + s.ttft_s - begin for s, begin in zip(served, free, strict=True)]


def _phases(
    server: Server, data: Data, store: PrefixStore, queue: Any, n: int, stretch: float
) -> Row:
    """Requests before, by turns during, and after a pass of the repacker: milliseconds as on the
    paper's disk (divided by the dilation). A turn after a move counts as during it. Those after
    are not comparable with the others: there, work that goes on after a request is waited for."""
    one, in_a_row = partial(_one, server, data), partial(_in_a_row, server, data)
    for asked in _next(queue, max(12, n // 8), _BEFORE):
        one(asked)  # learning, and warm caches
    reports: list[Any] = []
    pairs: list[Pair] = []
    n_behind = n_moved = 0  # turns of requests after a move, with the repacker held; moves
    running_s = 0.0  # of turns with the repacker running
    with _gate() as running:
        thread = threading.Thread(target=lambda: reports.append(store.repack()), daemon=True)
        thread.start()
        while len(pairs) * TURN < n:
            same = _next(queue, TURN, _BESIDE)
            turns: dict[str, list[float]] = {}
            behind = False
            for way in _WAYS if len(pairs) % 2 else reversed(_WAYS):
                running.set() if way == "during" else running.clear()
                begin = time.perf_counter()
                turns[way] = in_a_row(same)
                if way == "during":
                    running_s += time.perf_counter() - begin
                else:  # after a move a span is erased, and the next finds no cache of it
                    before, n_moved = n_moved, store.counters["repacks/yes"]
                    behind = n_moved > before
            if not thread.is_alive():
                break  # some of these had no repacker beside them
            n_behind += behind
            held, during = turns["held"], turns["during"]
            pairs.append(([], held + during) if behind else (held, during))
        n_loaded, begin = store.counters["repacks/yes"], time.perf_counter()
        running.set()
        thread.join(600)  # the rest of the pass, without requests
        alone_s = time.perf_counter() - begin
    times = {way: list(chain.from_iterable(pair[i] for pair in pairs))
             for i, way in enumerate(_WAYS)}  # fmt: skip
    _check_compared(times, reports)
    served = [one(asked) for asked in _next(queue, max(25, n // 12), _BEHIND)]
    times["after"] = [s.ttft_s for s in served]
    ttft_s = sum(times["after"])
    (report,) = reports
    row: Row = {
        "spans": len(report.spans), "moved": report.moved, "moved_bytes": report.moved_bytes,
        "data_bytes": data.n_bytes, "dilation": stretch, "turns_behind": n_behind,
        "moved_loaded": n_loaded, "running_s": running_s, "alone_s": alone_s,
        "map_share_of_ttft": sum(s.map_s for s in served) / ttft_s,
        "map_cpu_share_of_ttft": sum(s.map_cpu_s for s in served) / ttft_s,
    }  # fmt: skip
    for name, seconds in times.items():
        row[f"n_{name}"] = len(seconds)
        for q in (50, 90, 99):
            few = len(seconds) < _LEAST[q]
            row[f"p{q}_ms_{name}"] = (
                None if few else float(np.percentile(seconds, q)) / stretch * 1e3
            )
    for q in (50, 99):
        if min(len(times[way]) for way in _WAYS) >= _LEAST[q]:
            row[f"p{q}_slowdown"], row[f"p{q}_low"], row[f"p{q}_high"] = _slowdown(pairs, q)
    return row


def _check_compared(times: dict[str, list[float]], reports: Sequence[Any]) -> None:
    """Raises Unable where there is no pass to report, or one of the ways has no requests."""
    if not reports:
        raise Unable("the repacker failed, or was not through ten minutes after the requests")
    for name, what in (("held", "held"), ("during", "running")):
        if not times[name]:
            raise Unable(f"no turn of requests went by with the repacker {what}: nothing to tell")


@contextmanager
def _gate() -> Iterator[threading.Event]:
    """While the event is not set, the repacker waits before its next read or write."""
    running, go_on = threading.Event(), Copier._slice

    def waiting(self: Copier, n_bytes: int, task: Any) -> None:
        running.wait()
        go_on(self, n_bytes, task)

    Copier._slice = waiting  # type: ignore[method-assign]
    try:
        yield running
    finally:
        running.set()
        Copier._slice = go_on  # type: ignore[method-assign]


def _slowdown(pairs: Sequence[Pair], q: int) -> tuple[float, float, float]:
    """How much longer a percentile is with the repacker running, and its interval of 95 %: whole
    pairs of turns are drawn, since successive requests are alike, and the two turns of a pair have
    the same."""
    rng = np.random.default_rng(0)

    def of(some: Sequence[Pair]) -> float:
        held, during = (np.percentile(np.concatenate(way), q) for way in zip(*some, strict=True))
        return float(during / held) - 1

    turns = rng.integers(len(pairs), size=(1000, len(pairs))).tolist()
    draws = ([pairs[i] for i in some] for some in turns)
    drawn = [of(some) for some in draws if any(held for held, _ in some)]
    low, high = np.percentile(drawn, (2.5, 97.5))
    return of(pairs), float(low), float(high)


def figures(rows: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
    said, withdrawn = checked(rows)
    for row in rows if not withdrawn else ():
        if row.get("part") == "check":
            continue
        print_rows(
            "Repacking under load: ms to the first token",
            [
                {"": name, **{f"p{q}": row[f"p{q}_ms_{name}"] or "" for q in (50, 90, 99)}}
                for name in ("held", "during", "after")
            ],
        )
        for q in (50, 99):
            for end, figure in (("slowdown", ""), ("low", "_low"), ("high", "_high")):
                if f"p{q}_{end}" in row:
                    said[f"repack_p{q}_slowdown{figure}"] = row[f"p{q}_{end}"]
        for name in ("map_share", "map_cpu_share"):  # `ttft` says it of a request's whole caches
            said[f"repack_{name}_of_ttft"] = row[f"{name}_of_ttft"]
        said["moved_share"] = row["moved_bytes"] / row["data_bytes"]
    return said, rows


def _arguments(parser: argparse.ArgumentParser) -> None:
    unchecked_argument(parser)
    parser.set_defaults(compute="emulated")


EXPERIMENT: Final = Experiment(
    "repack", "Repacking under load; compute emulated.", cells, figures, uses_disk=True,
    meta=lambda options: meta(options, "measured by fio, once before the run"),
    arguments=_arguments,
)  # fmt: skip


def run(argv: Sequence[str] | None = None) -> int:
    return main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(run())
