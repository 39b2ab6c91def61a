"""vLLM's CPU attention, for batches in which some requests have chosen rows of their prefix."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm import envs
from vllm._custom_ops import cpu_attn_get_scheduler_metadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from impress.engines.vllm.choosing import Choosing


class ChoosingImpl(Choosing, CPUAttentionBackendImpl):  # type: ignore[misc]  # the base is untyped
    """The stock kernel over compact rows."""

    def shortened(
        self, layer: Any, dtype: torch.dtype, metadata: Any, seq_lens: torch.Tensor
    ) -> Any:
        """It also has a new plan of how the kernel divides this batch among its threads."""
        plan = cpu_attn_get_scheduler_metadata(
            num_reqs=len(seq_lens),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            seq_lens=seq_lens,
            dtype=dtype,
            query_start_loc=metadata.query_start_loc,
            causal=metadata.causal,
            sliding_window_size=-1,
            isa=layer.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            dynamic_causal=metadata.dynamic_causal,
            kv_cache_dtype="auto",
        )
        return dataclasses.replace(metadata, seq_lens=seq_lens, scheduler_metadata=plan)


class ChoosingBackend(CPUAttentionBackend):  # type: ignore[misc]  # the base is untyped
    """CPU_ATTN by name and layout, so that the rest of vLLM takes it for that backend."""

    @staticmethod
    def get_impl_cls() -> type[ChoosingImpl]:
        return ChoosingImpl
