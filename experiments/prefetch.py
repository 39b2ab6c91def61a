"""Does reading the next layer's rows ahead bring the first token sooner? With and without, in turn.

real     the Transformers engine on the model that looks things up, cold from the SSD
10:32:…  the big shapes under cache ratios, compute emulated (experiments/systems/clock.py)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

import impress
from experiments.common import Row, print_rows
from experiments.harness import Cell, Experiment, Figures, Options, main
from experiments.systems.sizes import Verdict, arguments, checked, how, meta
from experiments.systems.sweep import Plan, by_cell, cell, check_cell, draw_p50, line, ratio
from impress.demo.lookup.tasks import document
from impress.engines import hf
from impress.policy import Exact, Paper, Quality

#: Systems that do not read ahead, and the same ones reading ahead.
NAMES: Final = tuple(
    name for one in ("impress", "quality", "contiguous") for name in (one, f"{one}_prefetch")
)
#: For the real engine: its model's folder, tokens per document, documents, and bytes read ahead per
#: layer (about a quarter and all of its rows).
CHECKPOINT: Final = Path(impress.__file__).parent / "demo" / "lookup" / "specialised"
N_TOKENS: Final = 1536
N_DOCUMENTS: Final = 4
CAPS: Final = (0, 1 << 20, 4 << 20)
#: Exact never reads on a guess: how far apart its report rows are shows what chance does.
_POLICIES: Final = (Exact(), Paper(0.25), Quality())


def cells(options: Options) -> list[Cell]:
    verdict = Verdict(options)
    plan = Plan(options, verdict, NAMES)
    if options.quick:
        plan = Plan(options, verdict, NAMES, 16, 2)
    ratios = (130,) if options.quick else (65, 130, 400)
    found = [cell(plan, f"10:32:{ratio}", 40, ratio=ratio) for ratio in ratios]
    rounds = 3 if options.quick else 15
    real = Cell({"part": "real"}, partial(_real, options.folder / "real", rounds), 4.0 * rounds)
    return [real, check_cell(verdict), *found]


def _real(folder: Path, rounds: int) -> list[Row]:
    """A row for each policy and cap; every request is asked of each cap in turn."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    documents = [list(document("calibration", i, N_TOKENS).tokens) for i in range(N_DOCUMENTS)]
    found: dict[tuple[str, int], list[Any]] = {(p.name, cap): [] for p in _POLICIES for cap in CAPS}
    with ExitStack() as exits:
        engines = {}
        for cap in CAPS:
            config = impress.Config(
                probes=("heads3-v1", "int4-v2"), dram_bytes=0, mode="sparse", durable=False,
                segment_bytes=64 << 20, prefetch_bytes=cap, repack_every_s=0,
            )  # fmt: skip
            engines[cap] = hf.attach(model, folder / str(cap), config=config)
            exits.callback(engines[cap].close)
            for tokens in documents:
                engines[cap].generate(torch.tensor([tokens]), max_new_tokens=1)
            engines[cap].flush()
        for turn in range(rounds):
            question = list(document("calibration", N_DOCUMENTS + turn, 512).tokens[:32])
            for i, tokens in enumerate(documents):
                prompt = torch.tensor([[*tokens, *question]])
                for policy in _POLICIES:
                    for cap in CAPS[(turn + i) % 3 :] + CAPS[: (turn + i) % 3]:
                        engine = engines[cap]
                        engine.generate(prompt, max_new_tokens=1, do_sample=False, policy=policy)
                        found[policy.name, cap].append(engine.last_request)
                        time.sleep(0.02)  # work after a request is not in the next one's time
    return [_real_row(policy, cap, requests) for (policy, cap), requests in found.items()]


def _real_row(policy: str, cap: int, requests: Sequence[Any]) -> Row:
    requests = requests[len(requests) // 10 :]  # the first ones warm up, and history learns
    lines = [line for request in requests for line in request.per_layer]
    return {
        "policy": policy, "cap": cap, "n": len(requests),
        "p50_ms": float(np.median([r.ttft_ms for r in requests])),
        "p90_ms": float(np.percentile([r.ttft_ms for r in requests], 90)),
        "wait_ms": float(np.median([sum(x["wait_ms"] for x in r.per_layer) for r in requests])),
        "moved": float(np.mean([r.transferred_share for r in requests])),
        "ahead_kb": float(np.mean([r.ahead_bytes for r in requests])) / 1e3,
        "used_share": _share(lines, "ahead_used_bytes", "ahead_bytes"),
        "hit_rows": _share(lines, "ahead_hit_rows", "chosen"),
    }  # fmt: skip


def _share(lines: Sequence[dict[str, Any]], one: str, other: str) -> float:
    total = sum(line.get(other, 0) for line in lines)
    return sum(line.get(one, 0) for line in lines) / total if total else 0.0


def figures(rows: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
    real = [row for row in rows if row["part"] == "real"]
    if real:
        print_rows(f"Transformers, {N_TOKENS} tokens, cold from the SSD: real", real)
    said, withdrawn = checked(rows)
    for row in real:
        said[f"real.{row['policy']}.{row['cap']}.p50_ms"] = row["p50_ms"]
    if withdrawn:
        return said, rows
    for label, systems in by_cell(rows).items():
        shown = [
            {**line(row), "ahead MB": row["ahead_mb"], "used MB": row["ahead_used_mb"]}
            for row in systems.values()
        ]
        print_rows(f"{label}: {how(rows)}", shown)
        for name in NAMES[::2]:
            without, ahead = systems[name], systems[f"{name}_prefetch"]
            for what in ("p50_ms", "io_ms", "mb"):
                said[f"{label}.{name}.{what}.times"] = ratio(without[what], ahead[what])
    return said, rows


EXPERIMENT: Final = Experiment(
    "prefetch", "The next layer's rows read ahead, or not.", cells, figures,
    {"p50": draw_p50}, arguments, meta, uses_disk=True,
)  # fmt: skip


def run(argv: Sequence[str] | None = None) -> int:
    return main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(run())
