"""Requests a second whose first token comes in time: plain vLLM, with this store, with a peer's.

    .venv-vllm/bin/python -m experiments.goodput      (make test-vllm makes that environment)

Questions about documents of 1,024 tokens, each of which was asked about once before, come to vLLM's
OpenAI server at random times, whether or not earlier ones are answered. Only so many are let in at
once, and the time spent at that gate counts. All servers run all the time. Each cell asks them the
same questions at the same times, one server after the other, in a drawn order. Before a server's
turn vLLM's own prefix cache is emptied, so a hit is the connector's. Goodput is the number answered
in time, per second, at the best of the arrival rates. The peer is vLLM's ExampleConnector, the only
one that serves a CPU (LMCache 0.5.6 says "No supported cpu connector found", vLLM's
OffloadingConnector asks for a GPU).
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

import numpy as np

from experiments.common import Row, Unable, print_rows
from experiments.harness import Cell, Experiment, Figures, Options, main
from experiments.vllm_serve import CHECKPOINT, DTYPE, EXACT, Asked, documents
from experiments.vllm_serve_server import Server, Way, make_model, told

QUALITY: Final = {"name": "quality", "max_missing_mass": 0.1}
PLAIN, MIXED, PEER = "plain", "impress mixed", "example"
WAYS: Final = (
    Way(PLAIN, None),
    Way("impress exact", EXACT, floor=QUALITY),
    Way(MIXED, EXACT, floor=QUALITY),
    Way(
        PEER, None, folder_key="shared_storage_path",
        connector={"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
    ),
)  # fmt: skip
_WAYS: Final = [way.name for way in WAYS]
#: Requests let in at once, and arrivals a second.
LEVELS: Final = {False: (8, 32, 64), True: (8,)}
RATES: Final[dict[bool, tuple[int, ...]]] = {False: (8, 16, 24, 32, 48), True: (8, 32)}
REQUESTS: Final = {False: 128, True: 16}
#: Keys whose values are the same in all rows.
_ALIKE: Final = ("experiment", "seed", "quick", "ttft_ms")
#: The level at which the figures are taken.
_LEVEL: Final = {False: 32, True: 8}
_TOKENS: Final = 8  # of an answer


def cells(options: Options) -> list[Cell]:
    try:
        import openai  # noqa: F401
        from vllm.version import __version__  # noqa: F401
    except ImportError:
        raise Unable(
            "needs vLLM's environment: make test-vllm, then "
            ".venv-vllm/bin/python -m experiments.goodput"
        ) from None
    if not 0 < options.more.ttft_ms < math.inf:
        raise Unable(f"--ttft-ms must be a time above 0, got {options.more.ttft_ms:g}")
    field = Field(options)
    n = len(WAYS) * REQUESTS[options.quick]
    return [
        Cell(
            {"at once": level, "arrive/s": rate, "ttft_ms": options.more.ttft_ms},
            partial(field.measure, level, rate),
            10 + n / rate,
        )
        for level in LEVELS[options.quick] for rate in RATES[options.quick]
    ]  # fmt: skip


class Field:
    """The servers of all ways, started for the first cell: each cell asks them all, in turn."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._n = REQUESTS[options.quick]
        self._servers: list[Server] = []

    def measure(self, level: int, rate: int) -> list[Row]:
        if not self._servers:
            self._start()
        draw = np.random.default_rng([self._options.seed, level, rate])
        order = draw.permutation(self._n)
        times = np.cumsum(draw.exponential(1 / rate, self._n))
        limit_s = self._options.more.ttft_ms / 1e3
        rows: list[Row] = []
        asked = [self._again[i] for i in order]
        for at in draw.permutation(len(self._servers)).tolist():
            server = self._servers[at]
            server.forget()
            took = _ask(server, asked, times.tolist(), level)
            rows.append({"way": server.way.name, **_row(took, limit_s)})
        return rows

    def _start(self) -> None:
        """Start servers and have each hold every document, in both its tiers and the page cache."""
        options = self._options
        asked = documents(options.seed, self._n)
        self._again = [second for _, second in asked]
        folder = Path(mkdtemp(dir=options.folder))  # after a start that failed, another
        model = make_model(folder / "model", CHECKPOINT)
        at_once, servers = [0.0] * self._n, list[Server]()
        with ExitStack() as started:
            for way in WAYS:
                store, log = folder / f"store {way.name}", folder / f"{way.name}.log"
                store.mkdir()
                server = Server(model, way, store, log, DTYPE, max_seqs=max(LEVELS[False]))
                servers.append(started.enter_context(server))
                _ask(server, [first for first, _ in asked], at_once, 4)
                server.forget()
                _ask(server, self._again, at_once, 8)
            options.exits.enter_context(started.pop_all())
        self._servers = servers  # all of them, or none: cells compare them


def _ask(
    server: Server, asked: Sequence[Asked], times: Sequence[float], level: int
) -> list[tuple[float, float, bool]]:
    """Ask each at its time, at most `level` at once: [(TTFT, end, right)], seconds.

    TTFT counts from the request's time, the end from the first of all. Raises Unable.
    """
    from openai import AsyncOpenAI

    async def every() -> list[tuple[float, float, bool]]:
        gate = asyncio.Semaphore(level)
        begin = time.perf_counter()
        async with AsyncOpenAI(
            base_url=f"{server.base}/v1", api_key="none", max_retries=0
        ) as client:

            async def one(i: int) -> tuple[float, float, bool]:
                await asyncio.sleep(begin + times[i] - time.perf_counter())
                async with gate:
                    first_s, token = 0.0, -1
                    stream = await client.completions.create(
                        model="lookup", prompt=asked[i].prompt, max_tokens=_TOKENS, temperature=0,
                        stream=True, extra_body=_body(server.way, i),
                    )  # fmt: skip
                    async for chunk in stream:
                        ids = getattr(chunk.choices[0], "token_ids", None) if chunk.choices else ()
                        if ids and token < 0:
                            first_s, token = time.perf_counter() - begin, int(ids[0])
                if token < 0:  # else it would have come before it was asked for: in time
                    raise Unable(f"{server.way.name}: an answer came without a token")
                right = token == asked[i].question.answer
                return first_s - times[i], time.perf_counter() - begin, right

            return list(await asyncio.gather(*(one(i) for i in range(len(asked)))))

    with told(server):
        return asyncio.run(every())


def _body(way: Way, i: int) -> dict[str, Any]:
    """Every other request of the mixed way is sparse."""
    body: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}
    if way.name == MIXED:
        body["kv_transfer_params"] = {"impress": {"policy": QUALITY if i % 2 else EXACT}}
    return body


def _row(took: Sequence[tuple[float, float, bool]], limit_s: float) -> Row:
    ttft = np.array([first_s for first_s, _, _ in took])
    elapsed_s = max(end_s for _, end_s, _ in took)
    return {
        "done/s": len(took) / elapsed_s,
        "in time": float((ttft <= limit_s).mean()),
        "in time/s": float((ttft <= limit_s).sum()) / elapsed_s,
        "ttft p50 ms": float(np.percentile(ttft, 50)) * 1e3,
        "ttft p95 ms": float(np.percentile(ttft, 95)) * 1e3,
        "right": float(np.mean([right for _, _, right in took])),
    }


def figures(rows: list[Row], options: Options) -> tuple[Figures, list[Row]]:
    limit_ms = options.more.ttft_ms
    first = ("way", "at once", "arrive/s")
    rows = sorted(rows, key=lambda row: _WAYS.index(row["way"]))
    lines = [
        {key: row[key] for key in (*first, *row) if key not in _ALIKE}
        for row in rows
    ]  # fmt: skip
    print_rows(f"Open-loop arrivals, a first token within {limit_ms:g} ms", lines)
    best: dict[tuple[str, int], float] = {}
    for row in rows:
        key = row["way"], row["at once"]
        best[key] = max(best.get(key, 0.0), row["in time/s"])
    said = {
        f"goodput.{way.replace(' ', '_')}.{level}": value for (way, level), value in best.items()
    }
    level = _LEVEL[options.quick]
    for name, way in (("plain", PLAIN), ("peer", PEER)):
        if best.get((way, level)):
            said[f"goodput_vs_{name}"] = best[MIXED, level] / best[way, level]
    return said, lines


def draw(figure: Any, _said: Figures, rows: list[Row]) -> None:
    """Answers in time over arrivals, one panel per level."""
    levels = list(dict.fromkeys(row["at once"] for row in rows))
    for axes, level in zip(figure.subplots(1, len(levels), squeeze=False)[0], levels, strict=True):
        for way in dict.fromkeys(row["way"] for row in rows):
            mine = [row for row in rows if (row["way"], row["at once"]) == (way, level)]
            axes.plot(
                [row["arrive/s"] for row in mine], [row["in time/s"] for row in mine],
                "o-", label=way,
            )  # fmt: skip
        axes.set_title(f"{level} at once")
        axes.set_xlabel("arrivals a second")
        axes.set_ylabel("answered in time, a second")
    axes.legend()


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ttft-ms", type=float, default=1000.0, metavar="X", help="the limit (default 1000)"
    )


EXPERIMENT: Final = Experiment(
    "goodput", "Requests a second within a TTFT limit, open-loop, through vLLM's server.",
    cells, figures, {"goodput": draw}, _arguments,
    lambda options: {"dtype": DTYPE, "model": CHECKPOINT, "ttft_ms": options.more.ttft_ms},
)  # fmt: skip


def run(argv: Sequence[str] | None = None) -> int:
    return main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(run())
