"""Questions about long documents to vLLM's OpenAI server: plain, exact, sparse twice.

    .venv-vllm/bin/python -m experiments.vllm_serve      (make test-vllm makes that environment)

Every document is asked about once, which stores it. Then all servers are restarted, and other
questions come, first one at a time and then eight at a time: eight documents to each server by
turns, in an order that is drawn. Before each turn vLLM's own prefix cache is emptied, and in it a
way asks about each document once: hits come from the store (from its DRAM tier from the second time
on). The model is the trained lookup model, so answers can be right.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from experiments.common import Options, Row, Unable, print_rows, run
from experiments.systems.paired import say, times
from impress.demo.lookup import tasks
from impress.demo.lookup.tasks import Question

N_TOKENS: Final = 1024  # of a document: eight of vLLM's blocks on the CPU
DTYPE: Final = "float32"
CHECKPOINT: Final = "agreeing"
TASKS: Final = ("rte", "copa")
CONCURRENCIES: Final = (1, 8)
#: Documents of a turn: the most that are asked about at once.
TURN: Final = max(CONCURRENCIES)
EXACT: Final = {"name": "exact"}
KEEP_ALL: Final = {"name": "keep_all"}


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, and which answer is right."""

    prompt: list[int]
    question: Question


@dataclass(frozen=True, slots=True)
class Answered:
    token: int
    ttft_ms: float


class Arm(NamedTuple):
    """A server, and the policy its requests ask for; None: the server's own."""

    name: str
    server: Any
    policy: dict[str, Any] | None = None


def experiment(options: Options) -> tuple[dict[str, float], list[Row]]:
    try:
        import openai  # noqa: F401
        from vllm.version import __version__
    except ImportError:
        raise Unable(
            "needs vLLM's environment: make test-vllm, then "
            ".venv-vllm/bin/python -m experiments.vllm_serve"
        ) from None
    from experiments.vllm_serve_server import Way, make_model

    model = make_model(options.folder / "model", CHECKPOINT)
    n = 6 if options.quick else 24
    ways = (
        Way("plain", None),
        Way("exact", EXACT, floor=KEEP_ALL),
        Way("sparse paper", {"name": "paper", "keep": 0.25}),
        Way("sparse quality", {"name": "quality", "max_missing_mass": 0.1}),
    )
    rows = _measure(model, ways, options, n)
    _compare(rows)
    shown = [{key: row[key] for key in row if key not in _UNSHOWN} for row in rows]
    print_rows(f"vLLM {__version__}, {n} documents of {N_TOKENS} tokens, {CHECKPOINT}", shown)
    said = [{"way": row["way"], "says": row["bench"]} for row in rows if row["bench"]]
    print_rows("vllm bench serve --dataset-name prefix_repetition", said)
    shown += said
    return _figures(rows), shown


def documents(seed: int, n: int) -> list[tuple[Asked, Asked]]:
    """Two questions about each of n documents: one to store it by, one to measure."""
    found = []
    for i in range(n):
        document = tasks.document("test", 1000 * seed + i, N_TOKENS)
        first, second = tasks.questions(document, TASKS[i % len(TASKS)], 2)
        found.append(
            (
                Asked([*document.tokens, *first.tokens], first),
                Asked([*document.tokens, *second.tokens], second),
            )
        )
    return found


def _measure(model: Path, ways: Sequence[Any], options: Options, n: int) -> list[Row]:
    """Each way stores; all servers restart; then they are asked by turns."""
    from experiments.vllm_serve_server import Server, bench

    asked = documents(options.seed, n)

    def made(way: Any) -> Any:
        folder = options.folder
        return Server(model, way, folder / f"store {way.name}", folder / f"{way.name}.log", DTYPE)

    for way in ways:
        if way.policy is not None:
            with made(way) as server:
                _ask(server, [first for first, _ in asked], 1)
                server.settled()
    rows: list[Row] = []
    with ExitStack() as running:
        servers = [running.enter_context(made(way)) for way in ways]
        for server in servers:
            _ask(server, [_warm_up()], 1)
        for concurrency in CONCURRENCIES:
            rows += _by_turns(servers, asked, concurrency, options.seed)
        for server in servers:
            says = _said(bench(server, model, 8 if options.quick else 32))
            next(row for row in rows if row["way"] == server.way.name)["bench"] = says
    return rows


def _by_turns(
    servers: Sequence[Any], asked: Sequence[tuple[Asked, Asked]], concurrency: int, seed: int
) -> list[Row]:
    """A row for each arm. A server's own arms keep their order: the first reads from the SSD."""
    from experiments.vllm_serve_server import since

    arms = [
        [Arm(one.way.name, one), *([Arm("all rows kept", one, KEEP_ALL)] if one.way.floor else [])]
        for one in servers
    ]
    answers: dict[str, list[Answered]] = {arm.name: [] for of in arms for arm in of}
    grown = {name: Counter[str]() for name in answers}
    rng = np.random.default_rng([seed, concurrency])
    for first in range(0, len(asked), TURN):
        some = [second for _, second in asked[first : first + TURN]]
        for at in rng.permutation(len(arms)).tolist():
            for arm in arms[at]:
                arm.server.forget()
                with since(arm.server) as more:
                    answers[arm.name] += _ask(arm.server, some, concurrency, arm.policy)
                grown[arm.name].update(more)
    rows = [_row(name, concurrency, asked, answers[name], grown[name]) for name in answers]
    for of in arms:
        leases = of[0].server.settled().get("impress_leases", 0.0)
        for arm in of:  # the server's count, once
            row = next(row for row in rows if row["way"] == arm.name)
            row["leases"] = int(leases) if arm is of[0] else 0
    return rows


def _warm_up() -> Asked:
    """A prompt that nothing measures: a process's first request pays for what is made then."""
    document = tasks.document("calibration", 0, N_TOKENS)
    (question,) = tasks.questions(document, "rte", 1)
    return Asked([*document.tokens, *question.tokens], question)


def _ask(
    server: Any, asked: Sequence[Asked], concurrency: int, policy: dict[str, Any] | None = None
) -> list[Answered]:
    """Ask through the OpenAI client, `concurrency` at a time. Raises Unable."""
    from openai import OpenAI

    from experiments.vllm_serve_server import told

    client = OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0)
    body: dict[str, Any] = {"return_token_ids": True}
    if policy is not None:
        body["kv_transfer_params"] = {"impress": {"policy": policy}}

    def one(item: Asked) -> Answered:
        begin = time.perf_counter()
        stream = client.completions.create(
            model="lookup", prompt=item.prompt, max_tokens=1, temperature=0, stream=True,
            extra_body=body,
        )  # fmt: skip
        first_ms, token = 0.0, -1
        for chunk in stream:
            ids = getattr(chunk.choices[0], "token_ids", None) if chunk.choices else None
            if ids and token < 0:
                first_ms, token = (time.perf_counter() - begin) * 1e3, int(ids[0])
        if token < 0:  # else it would have taken no time
            raise Unable("an answer came without a token")
        return Answered(token, first_ms)

    with told(server), ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, asked))


def _row(
    name: str, concurrency: int, documents: Sequence[tuple[Asked, Asked]],
    answers: Sequence[Answered], grown: Counter[str],
) -> Row:  # fmt: skip
    ttft = [answer.ttft_ms for answer in answers]
    right = [
        a.token == second.question.answer for (_, second), a in zip(documents, answers, strict=True)
    ]
    bytes_read = sum(n for key, n in grown.items() if key.startswith("vllm:impress_read_bytes"))
    rows_read = sum(n for key, n in grown.items() if key.startswith("vllm:impress_read_rows"))
    return {
        "way": name,
        "at once": concurrency,
        "ttft p50 ms": float(np.percentile(ttft, 50)),
        "ttft p95 ms": float(np.percentile(ttft, 95)),
        "hit tokens": int(grown.get("vllm:external_prefix_cache_hits_total", 0)),
        "rows read": int(rows_read),
        "MB read": bytes_read / 1e6,
        "right": float(np.mean(right)),
        "bench": "",
        "answers": [answer.token for answer in answers],
        "p50_ms": float(np.percentile(ttft, 50)),
        "each_ms": " ".join(f"{one:.3f}" for one in ttft),
    }


#: Keys of a row that its table leaves out.
_UNSHOWN: Final = ("answers", "bench", "p50_ms", "each_ms")


def _said(found: dict[str, Any]) -> str:
    """What vLLM's own benchmark said, on one line."""
    if "error" in found:
        return f"failed: {found['error'][:60]}"
    return f"{found['completed']} done, ttft p50 {found['median_ttft_ms']:.1f} ms"


def _compare(rows: Sequence[Row]) -> None:
    """Adds each row's agreement with plain's answers at the same concurrency."""
    plain = {row["at once"]: row["answers"] for row in rows if row["way"] == "plain"}
    for row in rows:
        same = [a == b for a, b in zip(row["answers"], plain[row["at once"]], strict=True)]
        row["as plain"] = float(np.mean(same))


def _figures(rows: Sequence[Row]) -> dict[str, float]:
    of = {(row["way"], row["at once"]): row for row in rows}
    plain, exact = of["plain", 1], of["exact", 1]
    paper, quality = of["sparse paper", 1], of["sparse quality", 1]
    every = [row for row in rows if row["way"] == "exact"]
    kept = [row for row in rows if row["way"] == "all rows kept"]
    share = {row["way"]: row["rows read"] / exact["rows read"] for row in (paper, quality)}
    ratios: dict[str, float] = {}
    say(ratios, "exact_ttft_ratio", times(plain, exact))
    say(ratios, "sparse_ttft_ratio.paper", times(plain, paper))
    say(ratios, "sparse_ttft_ratio.quality", times(plain, quality))
    return {
        **ratios,
        # No interval: eight at once wait for each other, and there are few turns of eight.
        "exact_ttft_ratio.8": times(of["plain", 8], of["exact", 8]).ratio,
        "exact_identical": float(all(row["as plain"] == 1.0 for row in every)),
        "sparse_full_identical": float(
            all(row["answers"] == of["exact", row["at once"]]["answers"] for row in kept)
        ),
        "sparse_rows_share": share["sparse quality"],
        "sparse_rows_share.paper": share["sparse paper"],
        "leaked_leases": float(sum(row["leases"] for row in rows)),
        "accuracy.plain": plain["right"],
        "accuracy.paper": paper["right"],
        "accuracy.quality": quality["right"],
    }


def _estimate(quick: bool) -> str:
    return "4 min on an idle machine" if quick else "8 min"


if __name__ == "__main__":
    sys.exit(run(__doc__.splitlines()[0], experiment, _estimate, dtype=DTYPE, model=CHECKPOINT))
