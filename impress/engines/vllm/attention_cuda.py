"""vLLM's FlashAttention on CUDA, for batches in which some requests have chosen rows.

Its kernels take the keys' lengths and the block table as they are, so a layer's own lengths are all
it needs. Python runs in every forward: attention must stay outside of CUDA graphs, which is
what vLLM calls piecewise (settings.py refuses the rest).

Written, not yet run on a GPU; tests run it over a kernel written in torch.
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
        """FA3's plan, made ahead for the lengths of whole prompts, is left to the kernel to make.

        `max_seq_len` stays what it was: to the kernel it is an upper bound.
        """
        return dataclasses.replace(metadata, seq_lens=seq_lens, scheduler_metadata=None)


class ChoosingFlashBackend(FlashAttentionBackend):  # type: ignore[misc]  # the base is untyped
    """FLASH_ATTN by name and layout, so that everything else of vLLM takes it for that."""

    @staticmethod
    def get_impl_cls() -> type[ChoosingFlashImpl]:
        return ChoosingFlashImpl
