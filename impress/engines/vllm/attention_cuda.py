"""vLLM's FlashAttention on CUDA, for batches in which some requests have chosen rows.

Its kernels use the keys' lengths and the block table as they are given, so a layer only has to pass
its own lengths. Python runs in every forward, so attention must stay outside CUDA graphs: vLLM
calls that piecewise (settings.py refuses the rest).

Not yet run on a GPU; tests run it over a kernel written in torch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

from impress.engines.vllm.choosing import Choosing


class ChoosingFlashImpl(Choosing, FlashAttentionImpl):  # type: ignore[misc]  # untyped base
    """The stock kernel over compact rows."""

    def shortened(
        self, layer: Any, dtype: torch.dtype, metadata: Any, seq_lens: torch.Tensor
    ) -> Any:
        """Drops FA3's plan, made ahead for the lengths of whole prompts: the kernel makes its own.

        `max_seq_len` stays as it was: the kernel takes it as an upper bound.
        """
        return dataclasses.replace(metadata, seq_lens=seq_lens, scheduler_metadata=None)


class ChoosingFlashBackend(FlashAttentionBackend):  # type: ignore[misc]  # the base is untyped
    """FLASH_ATTN by name and layout, so that the rest of vLLM takes it for that backend."""

    @staticmethod
    def get_impl_cls() -> type[ChoosingFlashImpl]:
        return ChoosingFlashImpl
