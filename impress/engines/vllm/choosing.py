"""What attention backends that read chosen rows have in common; each kernel has its own module.

    per layer:  query of the new rows ─choose─> k rows of the prefix, copied to the first k places
                new rows                         to the places behind them
                the stock kernel                 with sequence lengths shorter by n − k

How many rows are chosen differs from layer to layer, so each forward has its own copy of the
batch's metadata; the shared one, which says how long prompts really are, is never touched.
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
    """Whoever knows which requests of a batch are sparse."""

    def compact(self, call: Call, metadata: Any, shorten: Shorten) -> Any:
        """This layer's metadata of the batch, once its chosen and new rows stand in their places.

        That given where every row of every request is kept.
        """


_chooser: Chooser | None = None


def serve(chooser: Chooser | None) -> None:
    """Whom the layers of this process ask; None: nobody, all requests are whole."""
    global _chooser
    _chooser = chooser


class Choosing:
    """Before one of vLLM's attention implementations: its stock kernel, over compact rows."""

    scale: float

    def __init__(self, *args: Any, **named: Any) -> None:
        begins()
        super().__init__(*args, **named)

    def shortened(
        self, layer: Any, dtype: torch.dtype, metadata: Any, seq_lens: torch.Tensor
    ) -> Any:
        """A copy of the metadata with these lengths, for this kernel. `dtype`: of the KV cache."""
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
        result: torch.Tensor = super().forward(  # type: ignore[misc]  # vLLM's, beside us
            layer, query, key, value, kv_cache, attn_metadata, output,
            output_scale=output_scale, output_block_scale=output_block_scale,
        )  # fmt: skip
        return result
