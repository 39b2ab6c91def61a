"""Whole engines on a GPU: FlashAttention, piecewise CUDA graphs, copies on streams.

experiments/gpu_recipe.md has the commands. Answers are compared with those of plain vLLM that
computes as much: its own prefix cache gives it the same tokens, so kernels see the same shapes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM has an environment of its own: gpu_recipe.md")

import torch

from tests.vllm.served import Served, tokens, words

pytestmark = pytest.mark.gpu

Serve = Callable[..., Served]

HALF = {"name": "recency", "keep": 0.5}
HIT = 704
DOCUMENT = words(HIT, seed=1)
QUESTIONS = [DOCUMENT + words(20 + i, seed=10 + i) for i in range(8)]
OPTIONS: dict[str, Any] = {
    "attention_backend": "FLASH_ATTN", "async_scheduling": False, "gpu_memory_utilization": 0.2,
    "extra": {"floor": HALF},
    # What a connector makes of it; plain vLLM would decode in full graphs, which divide the keys
    # among FlashAttention's blocks differently, and so round differently.
    "compilation_config": {"cudagraph_mode": "PIECEWISE"},
}  # fmt: skip
GRAPHS = [pytest.param(False, id="graphs"), pytest.param(True, id="eager")]


@pytest.fixture(autouse=True)
def free() -> Iterator[None]:
    """An engine's memory goes when nothing refers to it any more."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def _plain(serve: Serve, model: str, **named: Any) -> list[list[int]]:
    """vLLM's own answers, with the document in its own cache."""
    plain = serve(model, "bfloat16", store=False, **{**OPTIONS, "extra": None}, **named)
    plain.ask([DOCUMENT + words(30, seed=99)])
    answers = plain.ask(QUESTIONS)
    assert [answer.n_cached for answer in answers] == [HIT] * 8
    plain.close()
    return tokens(answers)


def _stored(serve: Serve, model: str, **named: Any) -> Served:
    """An engine whose store holds the document, and whose own cache is empty."""
    served = serve(model, "bfloat16", **OPTIONS, **named)
    served.ask([DOCUMENT + words(30, seed=99)])
    served.forget()
    return served


@pytest.mark.parametrize("eager", GRAPHS)
@pytest.mark.parametrize("model", ["opt", "llama"])
def test_exact_answers_are_plain_ones_across_a_restart(
    serve: Serve, model: str, eager: bool
) -> None:
    expected = _plain(serve, model, enforce_eager=eager)
    _stored(serve, model, enforce_eager=eager).close()
    served = serve(model, "bfloat16", **OPTIONS, enforce_eager=eager)
    together = served.ask(QUESTIONS)
    assert together[0].said["hit_tokens"] == HIT
    assert tokens(together) == expected
    served.forget()
    alone = [served.ask([question], policy={"name": "exact"})[0] for question in QUESTIONS]
    assert [answer.n_cached for answer in alone] == [HIT] * 8
    served.settle()
    assert served.used_blocks() == 0 and served.store.stats()["leases"] == 0


@pytest.mark.parametrize("eager", GRAPHS)
@pytest.mark.parametrize("model", ["opt", "llama"])
def test_keeping_everything_is_exact(serve: Serve, model: str, eager: bool) -> None:
    served = _stored(serve, model, enforce_eager=eager)
    exact = [served.ask([question])[0] for question in QUESTIONS]
    served.forget()
    sparse = [served.ask([question], policy={"name": "keep_all"})[0] for question in QUESTIONS]
    assert [answer.said["mode"] for answer in sparse] == ["sparse"] * 8
    assert tokens(sparse) == tokens(exact)


def test_sparse_and_exact_requests_share_a_batch(serve: Serve) -> None:
    """Kernels may round differently in another batch: compared with the same batch again."""
    served = _stored(serve, "llama", enforce_eager=False)
    policies = [HALF if i % 2 else None for i in range(8)]
    mixed = served.ask_each(QUESTIONS, 100, policies)
    assert [answer.said["mode"] for answer in mixed[1::2]] == ["sparse"] * 4
    assert [answer.said["chosen_rows_share"] for answer in mixed[1::2]] == [0.5] * 4
    assert "sparse" not in [answer.said.get("mode") for answer in mixed[::2]]
    served.forget()
    assert tokens(served.ask_each(QUESTIONS, 100, policies)) == tokens(mixed)
    served.settle()
    assert served.used_blocks() == 0 and served.store.stats()["leases"] == 0


def test_what_was_stored_is_what_the_device_computed(serve: Serve) -> None:
    """Blocks are read after the step that fills them, while the next steps run."""
    served = serve("llama", "bfloat16", **OPTIONS, enforce_eager=False)
    prompts = [words(460, seed=100 + i) for i in range(20)]  # both caches hold 448 tokens of each
    for prompt in prompts:
        served.ask([prompt], n=2)
    served.settle()
    served.store.check()
    plain = [served.ask([prompt])[0] for prompt in prompts]  # from vLLM's own cache
    served.forget()
    loaded = [served.ask([prompt])[0] for prompt in prompts]
    assert [answer.said.get("mode") for answer in plain + loaded] == [None] * 20 + ["exact"] * 20
    assert [answer.n_cached for answer in plain] == [answer.n_cached for answer in loaded]
    assert tokens(loaded) == tokens(plain)
