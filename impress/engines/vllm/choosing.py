"""The common part of attention backends that read chosen rows; each kernel has its own module.

    per layer:  query of the new rows ─choose─> k rows of the prefix, copied to the first k places
                new rows                         to the places after them
                the stock kernel                 with sequence lengths shorter by n − k

The number of chosen rows differs from layer to layer, so each forward has its own copy of the
batch's metadata; the shared one, which has the true lengths of prompts, is never touched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from impress.engines.vllm.loading import begins

#: A batch's metadata for a kernel, from the metadata of whole prompts and lengths int32 [requests].
Shorten = Callable[[Any, torch.Tensor], Any]


class Call(NamedTuple):
    """One layer's forward over a batch's new rows."""

    layer_name: str
    scale: float
    query: torch.Tensor  # [tokens, n_heads, head_dim] after RoPE
    key: torch.Tensor  # [tokens, n_kv_heads, head_dim]
    value: torch.Tensor  # [tokens, n_kv_heads, head_dim]


class Chooser(Protocol):
    """Knows which requests of a batch are sparse."""

    def compact(self, call: Call, metadata: Any, shorten: Shorten) -> Any:
        """The batch's metadata for this layer, once its chosen and new rows are in their places.

        Returns `metadata` itself where every row of every request is kept.
        """


_chooser: Chooser | None = None


def serve(chooser: Chooser | None) -> None:
    """Set the chooser that this process's layers ask; None: none, all requests are whole."""
    global _chooser
    _chooser = chooser


class Choosing:
    """Mixin before one of vLLM's attention implementations: its stock kernel, over compact rows."""

    scale: float

    def __init__(self, *args: Any, **named: Any) -> None:
        begins()
        super().__init__(*args, **named)

    def shortened(
        self, layer: Any, dtype: torch.dtype, metadata: Any, seq_lens: torch.Tensor
    ) -> Any:
        """A copy of the metadata with these lengths, for this kernel. `dtype`: the KV cache's."""
        raise NotImplementedError

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if _chooser is not None and attn_metadata is not None:
            call = Call(layer.layer_name, self.scale, query, key, value)
            shorten = partial(self.shortened, layer, kv_cache.dtype)
            attn_metadata = _chooser.compact(call, attn_metadata, shorten)
        result: torch.Tensor = super().forward(  # type: ignore[misc]  # in vLLM's class
            layer, query, key, value, kv_cache, attn_metadata, output,
            output_scale=output_scale, output_block_scale=output_block_scale,
        )  # fmt: skip
        return result
