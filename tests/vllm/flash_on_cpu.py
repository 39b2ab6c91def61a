"""FlashAttention without a GPU: vLLM's own backend, ours over it, and only the kernels in torch.

vLLM on the CPU takes this backend in place of CPU_ATTN, so blocks, metadata and forward passes
are those of FLASH_ATTN. There are no streams and no graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from vllm.v1.attention import selector
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from impress.engines import vllm as plugin
from impress.engines.vllm import settings
from impress.engines.vllm.attention_cuda import ChoosingFlashBackend, ChoosingFlashImpl
from tests.paged_reference import attend, write_rows

PATH = f"{__name__}.FlashOnCpu"


def kernel(**asked: Any) -> None:
    """Checks what our backend must leave as it was, then runs the reference."""
    assert asked["causal"] is True and asked["window_size"] == [-1, -1]
    assert asked["scheduler_metadata"] is None and asked["softcap"] == 0
    assert int(asked["seqused_k"].max()) <= asked["max_seqlen_k"]
    assert int(asked["seqused_k"].min()) > 0
    attend(**asked)


class FlashOnCpuImpl(ChoosingFlashImpl):
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.vllm_flash_attn_version = 2  # of a GPU's kernels; there are none here
        self.supports_quant_query_input = False


class FlashOnCpu(ChoosingFlashBackend):
    @staticmethod
    def get_impl_cls() -> type[FlashOnCpuImpl]:
        return FlashOnCpuImpl


@contextmanager
def flash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines made here run this backend."""
    monkeypatch.setattr(flash_attn.FA4DenseAttentionKernel, "kernel", staticmethod(kernel))
    monkeypatch.setattr(flash_attn, "reshape_and_cache_flash", write_rows, raising=False)
    monkeypatch.setattr(settings, "BACKEND", PATH)
    monkeypatch.setattr(plugin, "BACKEND", PATH)
    register_backend(AttentionBackendEnum.CPU_ATTN, PATH)
    selector._cached_get_attn_backend.cache_clear()  # vLLM chooses once per process
    try:
        yield
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()
        selector._cached_get_attn_backend.cache_clear()


def strides_of(served: Any) -> tuple[int, ...]:
    """[blocks, heads, rows, K|V] of the first layer's KV cache."""
    cache: torch.Tensor = served.worker.caches[0]
    return cache.stride()
