"""vLLM's CPU attention, for batches in which some requests have chosen rows of their prefix.

    per layer:  query of the new rows ─choose─> k rows of the prefix, copied to the first k places
                new rows                         to the places behind them
                the stock kernel                 with sequence lengths shorter by n − k

How many rows are chosen differs from layer to layer, so each forward has its own copy of the
batch's metadata; the shared one, which says how long prompts really are, is never touched.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

_chooser: Chooser | None = None


class Chooser(Protocol):
    """Whoever knows which requests of a batch are sparse."""

    def compact(
        self,
        layer_name: str,
        scale: float,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: Any,
    ) -> Any:
        """This layer's metadata of the batch, once its chosen and new rows stand in their places.

        query [tokens, n_heads, head_dim], key and value [tokens, n_kv_heads, head_dim].
        """


def serve(chooser: Chooser | None) -> None:
    """Whom the layers of this process ask; None: nobody, all requests are whole."""
    global _chooser
    _chooser = chooser


class ChoosingImpl(CPUAttentionBackendImpl):  # type: ignore[misc]  # the base is untyped
    """The stock kernel over compact rows."""

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
            attn_metadata = _chooser.compact(
                layer.layer_name, self.scale, query, key, value, attn_metadata
            )
        result: torch.Tensor = super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output,
            output_scale=output_scale, output_block_scale=output_block_scale,
        )  # fmt: skip
        return result


class ChoosingBackend(CPUAttentionBackend):  # type: ignore[misc]  # the base is untyped
    """CPU_ATTN by name and layout, so that everything else of vLLM takes it for that."""

    @staticmethod
    def get_impl_cls() -> type[ChoosingImpl]:
        return ChoosingImpl
