"""The hash-table pool: hit rate and requests a second against how often prompts recur.

Prompts of 15 random words; with probability p one of a few frequent ones. The lookup model computes
what is not found, and the KV of whole blocks goes into the pool when the request ends. All is real
here: model, KV, pool. Each prompt is served with the pool and without, in turn, on one thread; the
seconds are that thread's own, so that other work on the machine counts little. What a smaller pool
finds needs no model, and is counted beside them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, thread_time
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from experiments import selection
from experiments.common import Row, print_rows
from experiments.harness import Cell, Experiment, Figures, Options, main
from impress.blockhash import as_tokens, chain, labels_of, namespace_digest
from impress.demo.lookup.tokenizer import N_TOKENS, START_ID
from impress.engines.hf_modules import CACHE
from impress.lineage.hashpool import HashPool

CHECKPOINT: Final = "grouped"
PROMPT_TOKENS: Final = 15
BLOCK_TOKENS: Final = 4
N_FREQUENT: Final = 20
N_REQUESTS: Final = {False: 1000, True: 200}  # by `quick`
#: Capacity of the pool in blocks: more than 1,000 prompts have; and of a smaller one: what 64 have.
MOST_BLOCKS: Final = 4096
FEW_BLOCKS: Final = 192
POOL: Final = f"pool of {MOST_BLOCKS:,}"
NO_CACHE: Final = "no cache"
#: Seconds per request and arm on one busy core, for the estimate.
_REQUEST_S: Final = 0.008

#: One block's KV: [n_kv_heads, BLOCK_TOKENS, head_dim] keys and values of every layer.
Block = list[tuple[torch.Tensor, torch.Tensor]]
#: Logits of the last token, and tokens found.
Answer = tuple[torch.Tensor, int]


def cells(options: Options) -> list[Cell]:
    torch.set_num_threads(1)
    n = N_REQUESTS[options.quick]
    seconds = n * 2 * _REQUEST_S
    shares = (0.1, 0.5, 1.0) if options.quick else tuple(i / 10 for i in range(1, 11))
    weights = selection.digest_of(CHECKPOINT)
    return [
        Cell({"p": p, "weights": weights}, partial(measure, p, n, options.seed), seconds)
        for p in shares
    ]


def prompts(p: float, n: int, seed: int) -> list[np.ndarray]:
    """n prompts of PROMPT_TOKENS words, a share p of them from N_FREQUENT that recur. Pure."""
    rng = np.random.default_rng(seed)

    def words(n_prompts: int) -> np.ndarray:
        return rng.integers(START_ID + 1, N_TOKENS, (n_prompts, PROMPT_TOKENS), dtype=np.int32)

    frequent = words(N_FREQUENT)
    again, which = rng.random(n) < p, rng.integers(0, N_FREQUENT, n)
    fresh = words(n)
    return [frequent[which[i]] if again[i] else fresh[i] for i in range(n)]


def measure(p: float, n: int, seed: int) -> list[Row]:
    """A row for each arm. A found block must give the same next word as computing it."""
    model = _model()
    arms: dict[str, Callable[[np.ndarray], Answer]] = {
        NO_CACHE: partial(_computed, model),
        POOL: partial(_pooled, model, HashPool[Block](MOST_BLOCKS)),
    }
    for tokens in prompts(0.0, 20, seed + 1):
        _computed(model, tokens)
    spent, waited = dict.fromkeys(arms, 0.0), dict.fromkeys(arms, 0.0)
    found, same = dict.fromkeys(arms, 0), dict.fromkeys(arms, 0)
    for i, tokens in enumerate(prompts(p, n, seed)):
        words = {}
        for name in sorted(arms, reverse=bool(i % 2)):
            begin_s, begin_wall_s = thread_time(), perf_counter()
            logits, n_found = arms[name](tokens)
            spent[name] += thread_time() - begin_s
            waited[name] += perf_counter() - begin_wall_s
            found[name] += n_found
            words[name] = int(logits.argmax())
        for name, word in words.items():
            same[name] += word == words[NO_CACHE]
    blocks = n * (PROMPT_TOKENS // BLOCK_TOKENS)
    untimed = dict.fromkeys(("items_per_s", "vs_no_cache", "items_per_wall_s", "same_word"))
    few = {"arm": f"pool of {FEW_BLOCKS:,}", "n": n, "hit": _found(p, n, seed) / blocks, **untimed}
    return [
        {"arm": name, "n": n, "hit": found[name] / BLOCK_TOKENS / blocks,
         "items_per_s": n / spent[name], "vs_no_cache": spent[NO_CACHE] / spent[name],
         "items_per_wall_s": n / waited[name], "same_word": same[name] / n}
        for name in arms
    ] + [few]  # fmt: skip


def _found(p: float, n: int, seed: int) -> int:
    """Blocks that a pool of FEW_BLOCKS finds for the same prompts."""
    pool, found = HashPool[None](FEW_BLOCKS), 0
    for tokens in prompts(p, n, seed):
        keys = _keys(tokens)
        n_found = len(pool.acquire(keys))
        pool.release(keys, [None] * len(keys), n_found)
        found += n_found
    return found


def _keys(tokens: np.ndarray) -> list[bytes]:
    labels = labels_of(as_tokens(tokens), BLOCK_TOKENS)
    return list(chain(namespace_digest(CHECKPOINT), labels, BLOCK_TOKENS))


def _model() -> Any:
    logging.disable_progress_bar()
    folder = selection.LOOKUP / CHECKPOINT
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def _computed(model: Any, tokens: np.ndarray) -> Answer:
    """Compute the whole prompt."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    return model(ids, **{CACHE: DynamicCache()}, use_cache=True).logits[0, -1], 0


@torch.inference_mode()
def _pooled(model: Any, pool: HashPool[Block], tokens: np.ndarray) -> Answer:
    """Compute what the pool lacks of the prompt; its whole blocks go in at the end."""
    keys = _keys(tokens)
    got = pool.acquire(keys)
    n_found = len(got) * BLOCK_TOKENS  # less than the prompt: its last three are no whole block
    cache = DynamicCache()
    for layer, rows in enumerate(zip(*got, strict=True)):
        k, v = (torch.cat(planes, dim=1)[None] for planes in zip(*rows, strict=True))
        cache.update(k, v, layer)
    ids = torch.from_numpy(tokens[n_found:].astype(np.int64))[None]
    logits = model(ids, **{CACHE: cache}, use_cache=True).logits[0, -1]
    new = [_block(cache, i) for i in range(len(got), len(keys))]
    pool.release(keys, got + new, len(got))
    return logits, n_found


def _block(cache: DynamicCache, index: int) -> Block:
    rows = slice(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS)
    return [(one.keys[0, :, rows].clone(), one.values[0, :, rows].clone()) for one in cache.layers]


def figures(rows: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
    shown = [{name: row[name] for name in row if name != "weights"} for row in rows]
    print_rows("Random prompts of which a share p comes again", shown)
    large = [row for row in rows if row["arm"] == POOL]
    hits = {row["p"]: row["hit"] for row in large}
    said = {name: hits[p] for name, p in (("hit_p01", 0.1), ("hit_p10", 1.0)) if p in hits}
    if len(hits) > 2:  # any two lie on a line
        said["linear_r2"] = linear_r2(hits)
    said |= {f"vs_no_cache_p{10 * row['p']:02.0f}": row["vs_no_cache"] for row in large}
    said["same_word_least"] = min(row["same_word"] for row in large)
    return said, rows


def linear_r2(points: dict[float, float]) -> float:
    """How much of the variance of y a straight line over x explains. Pure."""
    return float(np.corrcoef(list(points), list(points.values()))[0, 1] ** 2)


def draw(figure: Any, _said: Figures, rows: list[Row]) -> None:
    """Hit rate, and requests a second, over p."""
    left, right = figure.subplots(1, 2)
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == arm]
        x = [row["p"] for row in mine]
        if arm != NO_CACHE:
            left.plot(x, [row["hit"] for row in mine], "o-", label=arm)
        if mine[0]["items_per_s"] is not None:
            right.plot(x, [row["items_per_s"] for row in mine], "o-", label=arm)
    left.set_ylabel("whole blocks found")
    right.set_ylabel("requests a second of a core")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("p: share of prompts that come again")
        axes.legend()


def meta(_options: Options) -> dict[str, Any]:
    return {
        "weights": {CHECKPOINT: selection.digest_of(CHECKPOINT)}, "prompt_tokens": PROMPT_TOKENS,
        "block_tokens": BLOCK_TOKENS, "n_frequent": N_FREQUENT,
    }  # fmt: skip


EXPERIMENT: Final = Experiment(
    "hashpool", "The hash-table pool on random prompts.", cells, figures, {"p": draw}, meta=meta,
)  # fmt: skip


def run(argv: Sequence[str] | None = None) -> int:
    return main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(run())
