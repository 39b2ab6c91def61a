"""Tests of the vLLM plug-ins, in vLLM's own environment: `make test-vllm`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("vllm"):  # elsewhere the other tests' processes would run with these
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--aborts", type=int, default=60, help="requests of the abort test (1000: the full one)"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:  # warnings of vLLM and torch are theirs
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random models: "opt" saved in float32, "llama" with grouped queries in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

    where = {name: tmp_path_factory.mktemp(name) for name in ("opt", "llama")}
    torch.manual_seed(0)
    OPTForCausalLM(
        OPTConfig(
            vocab_size=512, hidden_size=128, ffn_dim=256, num_hidden_layers=3,
            num_attention_heads=4, max_position_embeddings=2048, word_embed_proj_dim=128,
            init_std=0.06, dtype="float32",
        )
    ).save_pretrained(where["opt"])  # fmt: skip
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=3,
            num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=2048,
            initializer_range=0.06, dtype="bfloat16",
        )
    ).to(torch.bfloat16).save_pretrained(where["llama"])  # fmt: skip
    return where


@pytest.fixture
def serve(models: dict[str, Path], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """serve(model, dtype, store=True, extra={…}, **engine arguments): a Served, closed at the end.

    All that have a store are given the same directory.
    """
    from tests.vllm.served import Served

    opened: list[Any] = []

    def opener(
        model: str = "opt", dtype: str = "float32", *, store: bool = True, **named: Any
    ) -> Any:
        path = Path(model) if "/" in model else models[model]
        served = Served(path, dtype, tmp_path / "store" if store else None, **named)
        opened.append(served)
        return served

    yield opener
    for served in opened:
        served.close()
