"""What a store costs a prompt that hits nothing, and one that hits a part of itself.

The Transformers engine with a small trained model, beside the same model without a store, prompt by
prompt in turn: nothing hits (storing on and off), and 37 % and 49 % of a prompt's tokens hit, as in
vLLM V1's table. All is real.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import impress
from experiments.common import Row, print_rows
from experiments.harness import Cell, Experiment, Figures, Options, main
from impress.demo.lookup.tasks import document
from impress.engines import hf, hf_mode

CHECKPOINT: Final = "specialised"
N_TOKENS: Final = 1024
#: Of a prompt, in whole windows: 6 and 8 of 16 (.375 and .5), the nearest to vLLM's 37 and 49 %.
HITS: Final = {0: 0, 37: 6 * 64, 49: 8 * 64}
N_NEW: Final = 8
_CELLS: Final = ((0, True), (0, False), (37, True), (49, True))


def cells(options: Options) -> list[Cell]:
    n = 12 if options.quick else 60
    return [
        Cell({"hit": hit, "storing": storing}, partial(measure, options, hit, storing, n), n * 1.2)
        for hit, storing in _CELLS
    ]  # fmt: skip


def measure(options: Options, hit: int, storing: bool, n: int) -> list[Row]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    where = Path(impress.__file__).parent / "demo" / "lookup" / CHECKPOINT
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval()
    config = impress.Config(
        dram_bytes=64 << 20, segment_bytes=64 << 20, disk_bytes=1 << 30, repack_every_s=0.0,
        mode="exact",
    )  # fmt: skip
    folder = options.folder / f"zero-{hit}-{storing}"
    engine = hf.attach(model, folder, config=config, store_new=storing)
    try:
        shared = list(document("calibration", 10_000, 512).tokens)[: HITS[hit]]
        if shared:
            engine.generate(torch.tensor([shared]), max_new_tokens=1)
            engine.flush()
        return [_compared(engine, model, [_prompt(shared, i) for i in range(n + 1)])]
    finally:
        engine.close()


def _prompt(shared: list[int], i: int) -> torch.Tensor:
    """The shared head, and what nobody asked before."""
    return torch.tensor([[*shared, *document("calibration", i, N_TOKENS).tokens[len(shared) :]]])


def _compared(engine: hf.Engine, model: Any, prompts: list[torch.Tensor]) -> Row:
    """Each prompt with a store and without, in turn; the first does not count."""
    ours: list[tuple[float, float, float]] = []  # to the first token, in all, of it the store's
    plain: list[tuple[float, float]] = []
    for turn, prompt in enumerate(prompts):
        for way in (0, 1) if turn % 2 else (1, 0):
            if way:
                plain.append(_plain(model, prompt))
                continue
            with _timed() as spent:
                begin = time.perf_counter()
                engine.generate(prompt, max_new_tokens=N_NEW, do_sample=False)
                took = time.perf_counter() - begin
            request = engine.last_request
            assert request is not None
            ours.append((request.ttft_ms / 1e3, took, sum(spent)))
    begin = time.perf_counter()
    engine.flush()
    behind = time.perf_counter() - begin
    first, total, share = np.median(np.array(ours[1:]), axis=0)
    plain_first, plain_total = np.median(np.array(plain[1:]), axis=0)
    return {
        "n": len(prompts) - 1, "hit_tokens": request.hit_tokens, "ttft_ms": first * 1e3,
        "plain_ttft_ms": plain_first * 1e3, "ttft_ratio": first / plain_first,
        "before_first_token_ms": share * 1e3, "share": share / first,
        "throughput_share": plain_total / total, "flush_after_s": behind,
    }  # fmt: skip


def _plain(model: Any, prompt: torch.Tensor) -> tuple[float, float]:
    """The model alone: seconds to the first token's logits, and in all."""
    begin = time.perf_counter()
    first: list[float] = []

    def note(_ids: Any, scores: Any) -> Any:
        if not first:
            first.append(time.perf_counter() - begin)
        return scores

    model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=N_NEW, do_sample=False,
        logits_processor=[note],
    )  # fmt: skip
    return first[0], time.perf_counter() - begin


@contextmanager
def _timed() -> Iterator[list[float]]:
    """Seconds the engine spends before the forward: checking, looking up, choosing a mode."""
    spent: list[float] = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                spent.append(time.perf_counter() - begin)

        return timing

    before = hf.find_prefix, hf.hf_models.check_request, hf_mode.Modes.way
    hf.find_prefix = timed(before[0])
    hf.hf_models.check_request = timed(before[1])
    hf_mode.Modes.way = timed(before[2])
    try:
        yield spent
    finally:
        hf.find_prefix, hf.hf_models.check_request, hf_mode.Modes.way = before


def figures(rows: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
    print_rows("A prompt with a store and without", [
        {
            "hit": f"{row['hit']} %", "storing": row["storing"], "TTFT ms": row["ttft_ms"],
            "without": row["plain_ttft_ms"], "ratio": row["ttft_ratio"],
            "before, ms": row["before_first_token_ms"], "share": row["share"],
            "throughput": row["throughput_share"],
        }
        for row in rows
    ])  # fmt: skip
    said: Figures = {}
    for row in rows:
        label = f"{row['hit']}{'' if row['storing'] else '_not_storing'}"
        said[f"throughput_share.{label}"] = row["throughput_share"]
        said[f"ttft_ratio.{label}"] = row["ttft_ratio"]
    nothing = [row for row in rows if row["hit"] == 0]
    said["zero_hit_share"] = max(row["share"] for row in nothing)
    said["zero_hit_throughput_share"] = min(row["throughput_share"] for row in nothing)
    return said, rows


EXPERIMENT: Final = Experiment(
    "zero_hit", "What a store costs where nothing, or a part, hits.", cells, figures,
    meta=lambda _options: {
        "share": "checking, lookup and choosing a mode before the forward ÷ time to first token",
        "throughput_share": "time without a store ÷ time with one, whole request; median",
    },
)  # fmt: skip


def run(argv: Sequence[str] | None = None) -> int:
    return main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(run())
