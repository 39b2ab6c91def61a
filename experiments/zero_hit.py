"""What a store costs a prompt that hits nothing, and one of which a part is hit.

The Transformers engine with a small trained model, beside the same model without a store, a few
prompts each in turn: nothing hits (storing on and off), and 37 % and 49 % of a prompt's tokens hit,
as in vLLM V1's table. Where nothing hits, also an engine whose policy chooses rows: it then reads
nothing, but watches the attention of the prompt's last rows inside the forward, and stores
importance and probes. And a model of ordinary depth: checks take time by the module, of which the
trained one has few; its weights are random, as times do not hang on them.

Of the time before the forward, "share" is checks, lookup and choosing a mode; `before_share` is all
that the store adds to the model's own, on a hit with planning and sending of reads. Neither
includes what is watched or waited for inside the forward; the whole time to the first token
(`ttft_ratio`) and the throughput do. All is real.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

import impress
from experiments.common import Row, Unable, print_rows
from experiments.harness import Cell, Experiment, Figures, Options, main
from experiments.systems.cell import interval
from impress.demo.lookup.tasks import document
from impress.engines import hf, hf_mode, hf_models, hf_weights
from impress.policy import Exact, Policy, Quality

CHECKPOINT: Final = "specialised"
N_TOKENS: Final = 1024
#: Tokens hit, in whole windows: 6 and 8 of 16 (.375 and .5), the nearest to vLLM's 37 and 49 %.
HITS: Final = {0: 0, 37: 6 * 64, 49: 8 * 64}
#: Answer tokens. The engine decodes faster than the model alone; storing must not gain from that.
N_NEW: Final = 1
#: Prompts in a row, with a store or without.
BLOCK: Final = 4
#: The percentage hit, whether it stores, its policy.
_CELLS: Final[tuple[tuple[int, bool, Policy], ...]] = (
    (0, True, Exact()), (0, False, Exact()), (37, True, Exact()), (49, True, Exact()),
    (0, True, Quality()),
)  # fmt: skip
#: Layers of the trained model, and of a deep one; and which percentages of the latter's are hit.
LAYERS: Final = 4
DEEP: Final = 32
_DEEP_HITS: Final = (0, 37, 49)
#: More than any cell stores (the deep model's prompts 1 GiB): nothing is to be evicted meanwhile.
_DISK: Final = 2 << 30


def cells(options: Options) -> list[Cell]:
    n = 12 if options.quick else 60
    return [
        Cell(
            {"hit": hit, "storing": storing, "policy": policy.name, "n_new": N_NEW},
            partial(measure, options, hit, storing, policy, n), n * 0.7,
        )
        for hit, storing, policy in _CELLS
    ] + [
        Cell(
            {"hit": hit, "storing": True, "policy": "exact", "n_new": N_NEW, "layers": DEEP},
            partial(measure, options, hit, True, Exact(), n, layers=DEEP), n * 2.0,
        )
        for hit in _DEEP_HITS
    ]  # fmt: skip


def _model(layers: int) -> Any:
    """The trained model; a deep one of its vocabulary and random weights, the same every time."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = Path(impress.__file__).parent / "demo" / "lookup" / CHECKPOINT
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval()
    if layers == LAYERS:
        return model
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=model.config.vocab_size, hidden_size=256, intermediate_size=512,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=1,
        max_position_embeddings=2 * N_TOKENS,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def measure(
    options: Options, hit: int, storing: bool, policy: Policy, n: int, layers: int = LAYERS
) -> list[Row]:
    torch.set_num_threads(1)
    model = _model(layers)
    mode: Literal["auto", "exact"] = "exact" if hit else "auto"  # else some would be recomputed
    config = impress.Config(
        dram_bytes=64 << 20, segment_bytes=64 << 20, disk_bytes=_DISK, repack_every_s=0.0,
        mode=mode,
    )  # fmt: skip
    folder = options.folder / f"zero-{hit}-{storing}-{policy.name}-{layers}"
    engine = hf.attach(model, folder, policy, config=config, store_new=storing)
    try:
        shared = list(document("calibration", 10_000, 512).tokens)[: HITS[hit]]
        if shared:
            engine.generate(torch.tensor([shared]), max_new_tokens=1)
            engine.flush()
        row = _compared(engine, model, [_prompt(shared, i) for i in range(n + BLOCK)])
        _check(engine.last_request, HITS[hit])
        if engine.store.stats()["evicted_spans"]:
            raise Unable("spans were evicted: what that took is not what a store costs")
        return [{**row, "hit_share": HITS[hit] / N_TOKENS, "mode": mode}]
    finally:
        engine.close()


def _check(request: Any, hit_tokens: int) -> None:
    """Raises Unable where the last request found or stored something other than its row says."""
    if request.refused:
        raise Unable(f"not stored: {request.refused}")
    if request.hit_tokens != hit_tokens:
        raise Unable(f"{request.hit_tokens} tokens were hit, not {hit_tokens}: see what was logged")


def _prompt(shared: list[int], i: int) -> torch.Tensor:
    """The shared head, and tokens that nobody asked before."""
    return torch.tensor([[*shared, *document("calibration", i, N_TOKENS).tokens[len(shared) :]]])


class Timed(NamedTuple):
    """Seconds of one prompt, from its call: to the first token's logits; of these, what the store
    takes to check, look up and choose a mode; and to the forward."""

    ttft_s: float
    store_s: float
    to_forward_s: float


def _compared(engine: hf.Engine, model: Any, prompts: list[torch.Tensor]) -> Row:
    """Blocks of prompts with a store and without, in turn; the first two do not count.

    A block ends when all of it is stored: work that goes on after its requests falls into its own
    time, and into no other block's.
    """
    ours: list[tuple[float, float, float]] = []  # seconds: a block; its flush; without a store
    firsts: list[Timed] = []
    plain_firsts: list[Timed] = []
    for turn in range(0, len(prompts), BLOCK):
        block = prompts[turn : turn + BLOCK]
        took: dict[int, tuple[float, float]] = {}
        for way in (0, 1) if turn // BLOCK % 2 else (1, 0):
            begin = time.perf_counter()
            for prompt in block:
                if way:
                    plain_firsts.append(_plain(model, prompt))
                else:
                    firsts.append(_stored(engine, prompt))
            done = time.perf_counter()
            if not way:
                engine.flush()
            took[way] = (time.perf_counter() - begin, time.perf_counter() - done)
        ours.append((*took[0], took[1][0]))
    block_s, flush_s, plain_s = np.median(np.array(ours[1:]), axis=0)
    # During a block's first prompt nothing is still being stored: it is left out.
    told = [at for at in range(BLOCK, len(firsts)) if at % BLOCK]
    mine, plain = np.array(firsts)[told], np.array(plain_firsts)[told]  # of the same prompts
    first, before, to_forward = np.median(mine, axis=0)
    more = mine[:, 2] - plain[:, 2]
    request = engine.last_request
    assert request is not None
    return {
        "n": len(told), "hit_tokens": request.hit_tokens, "ttft_ms": first * 1e3,
        "plain_ttft_ms": float(np.median(plain[:, 0])) * 1e3,
        "before_first_token_ms": before * 1e3, "share": float(np.median(mine[:, 1] / mine[:, 0])),
        "to_forward_ms": to_forward * 1e3, "more_to_forward_ms": float(np.median(more)) * 1e3,
        **_median("before_share", list(more / mine[:, 0]), BLOCK - 1),
        **_median("ttft_ratio", list(mine[:, 0] / plain[:, 0]), BLOCK - 1),
        **_median("throughput_share", [plain / mine for mine, _, plain in ours[1:]]),
        "block_s": block_s, "plain_block_s": plain_s, "flush_s": flush_s,
    }  # fmt: skip


def _median(name: str, values: Sequence[float], in_a_row: int = 1) -> Row:
    """A median and its interval of 95 %, drawn in rows of values that are alike."""
    low, high = interval(values, 50, in_a_row=in_a_row)
    return {name: float(np.median(values)), f"{name}_low": low, f"{name}_high": high}


def _stored(engine: hf.Engine, prompt: torch.Tensor) -> Timed:
    """With a store."""
    with _timed() as calls, _forwards() as forwards:
        begin = time.perf_counter()
        engine.generate(prompt, max_new_tokens=N_NEW, do_sample=False)
    request = engine.last_request
    assert request is not None
    ttft_s = request.ttft_ms / 1e3
    mine = sum(took for at, took in calls if at < begin + ttft_s)
    return Timed(ttft_s, mine, forwards[0] - begin)


def _plain(model: Any, prompt: torch.Tensor) -> Timed:
    """The model alone."""
    first: list[float] = []

    def note(_ids: Any, scores: Any) -> Any:
        if not first:
            first.append(time.perf_counter() - begin)
        return scores

    with _forwards() as forwards:
        begin = time.perf_counter()
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=N_NEW, do_sample=False,
            logits_processor=[note],
        )  # fmt: skip
    return Timed(first[0], 0.0, forwards[0] - begin)


@contextmanager
def _forwards() -> Iterator[list[float]]:
    """When forwards began, by their first module. The class is patched: an engine refuses a module
    with a hook."""
    begun: list[float] = []
    real = torch.nn.Embedding.forward

    def forward(module: torch.nn.Embedding, *args: Any, **options: Any) -> Any:
        begun.append(time.perf_counter())
        return real(module, *args, **options)

    setattr(torch.nn.Embedding, "forward", forward)  # noqa: B010 - mypy knows its type
    try:
        yield begun
    finally:
        setattr(torch.nn.Embedding, "forward", real)  # noqa: B010


@contextmanager
def _timed() -> Iterator[list[tuple[float, float]]]:
    """When the engine checks, looks up and chooses a mode, and the seconds it takes for each."""
    calls: list[tuple[float, float]] = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                calls.append((begin, time.perf_counter() - begin))

        return timing

    parts = (
        (hf, "find_prefix"), (hf_models, "check_request"), (hf_weights.Weights, "check"),
        (hf_mode.Modes, "way"),
    )  # fmt: skip
    before = [getattr(where, name) for where, name in parts]
    for (where, name), call in zip(parts, before, strict=True):
        setattr(where, name, timed(call))
    try:
        yield calls
    finally:
        for (where, name), call in zip(parts, before, strict=True):
            setattr(where, name, call)


def figures(rows: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
    print_rows("A prompt with a store and without", [
        {
            "hit": f"{row['hit']} %", "storing": row["storing"], "policy": _policy(row),
            "layers": _layers(row),
            "TTFT ms": row["ttft_ms"],
            "without": row["plain_ttft_ms"], "ratio": row["ttft_ratio"],
            "checks, ms": row["before_first_token_ms"], "share": row["share"],
            "before": row.get("before_share", ""), "throughput": row["throughput_share"],
        }
        for row in rows
    ])  # fmt: skip
    said: Figures = {}
    for row in rows:
        label = f"{row['hit']}{'' if row['storing'] else '_not_storing'}"
        label += "" if _policy(row) == "exact" else f"_{_policy(row)}"
        label += "" if _layers(row) == LAYERS else f"_{_layers(row)}_layers"
        for name in ("throughput_share", "ttft_ratio", "before_share"):
            for end in ("", "_low", "_high"):
                if name + end in row:  # older reports lack it
                    said[f"{name}{end}.{label}"] = row[name + end]
    for policy, name in (("exact", "zero_hit"), ("quality", "zero_hit_quality")):
        nothing = [row for row in rows if row["hit"] == 0 and _policy(row) == policy
                   and _layers(row) == LAYERS]  # fmt: skip
        if nothing:
            said[f"{name}_share"] = max(row["share"] for row in nothing)
        stored = [row["throughput_share"] for row in nothing if row["storing"]]
        if stored:
            said[f"{name}_throughput_share"] = stored[0]
    return said, rows


def _policy(row: Row) -> str:
    """Reports from before there was another policy name none."""
    policy: str = row.get("policy", "exact")
    return policy


def _layers(row: Row) -> int:
    """Rows of the trained model name none."""
    layers: int = row.get("layers", LAYERS)
    return layers


EXPERIMENT: Final = Experiment(
    "zero_hit", "What a store costs where nothing, or a part, hits.", cells, figures,
    uses_disk=True,  # the throughput's time ends when all is stored
    meta=lambda _options: {
        "layers": f"of the model: the trained one has {LAYERS}, others have random weights",
        "policy": "the engine's; one that chooses rows watches attention inside the forward, and "
        "stores importance and probes",
        "share": "checks, lookup and choosing a mode, ÷ time to first token; of the weights, where "
        "something hits: else they are looked at behind the answer, in the throughput's time",
        "before_share": "time from the call to the forward with a store less without, ÷ time to "
        "first token: the share, and where something hits the planning and sending of reads; "
        "median and interval of 95 %",
        "ttft_ratio": "time to first token with a store ÷ without, of the same prompt, what is "
        "watched inside the forward included; median and interval of 95 %",
        "throughput_share": f"time of {BLOCK} prompts without a store ÷ with one, until all is "
        f"stored; answers of {N_NEW} token, so that no decoding is in it; median",
    },
)  # fmt: skip


def run(argv: Sequence[str] | None = None) -> int:
    return main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(run())
