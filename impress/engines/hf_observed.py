"""Which rows of a prompt matter, by what its own last rows attended to: importance for the store.

    prefill: attention ─copies─> last query rows of every layer   (a few rows; nothing computed)
    storing: those rows · cached keys ─softmax─> importance of every row, off the request's path

The model runs its stock sdpa attention with the stock mask, under another name for the length of
one request: the same calls on the same tensors, so the logits do not change by a bit. The paper
orders a prefix's rows at first store by that attention; SnapKV (arXiv 2404.14469) chooses by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from impress.selection.scores import key_scores

ATTENTION_NAME = "impress_observed_sdpa"
#: How many of the prompt's last rows are asked; SnapKV asks 16 to 64.
OBSERVED_ROWS: Final = 16

_observing: ContextVar[Any] = ContextVar("impress_observed")  # the request's cache


class Observed:
    """The last query rows of one prompt, layer by layer, as attention got them."""

    def __init__(self, n_prompt: int, n_rows: int = OBSERVED_ROWS) -> None:
        """Keeps n_rows, at least those that importance is made of."""
        self.n_prompt = n_prompt
        self._n_rows = max(n_rows, OBSERVED_ROWS)
        # By layer, with the scaling, and how many keys there were: where the rows end.
        self._rows: dict[int, tuple[torch.Tensor, float, int]] = {}

    def note(self, layer: int, query: torch.Tensor, n_keys: int, scaling: float | None) -> None:
        """Keep the last rows of query [batch, n_heads, q, head_dim], a pass over the prompt; where
        it has too few, with those of the pass before (a prompt may come in chunks)."""
        if n_keys > self.n_prompt:
            return
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q = query.shape[2]
        before, _, end = self._rows.get(layer, (None, 0.0, -1))
        if before is not None and q < self._n_rows and end == n_keys - q:
            query = torch.cat([before, query], 2)  # a copy, as the other is
            self._rows[layer] = query[:, :, -self._n_rows :], scale, n_keys
        else:
            self._rows[layer] = query[:, :, -self._n_rows :].clone(), scale, n_keys

    def rows(self, layer: int, batch_row: int) -> tuple[torch.Tensor, float] | None:
        """The rows [n_heads, r, head_dim] and their scaling; None where the layer was not seen."""
        if layer not in self._rows:
            return None
        rows, scaling, _ = self._rows[layer]
        return rows[batch_row], scaling

    @torch.no_grad()
    def importance(
        self, layer: int, batch_row: int, keys: torch.Tensor, n_rows: int
    ) -> npt.NDArray[np.float32] | None:
        """Mean attention, over heads and the last rows, on each of the first n_rows rows.

        keys [n_kv_heads, n_prompt, head_dim] of that batch row. Rows after the prompt, which none
        of its rows could see, get the mean. None where the layer was not seen, or is not finite.
        """
        if layer not in self._rows:
            return None
        rows, scaling, _ = self._rows[layer]
        query = rows[batch_row, :, -OBSERVED_ROWS:].to(keys.device)
        n_asked, n = query.shape[1], keys.shape[1]
        future = torch.ones(n_asked, n, dtype=torch.bool, device=keys.device).triu_(n - n_asked + 1)
        total = torch.zeros(n, dtype=torch.float32, device=keys.device)
        for scores, *_ in key_scores(query, keys, scaling, len(query) // len(keys)):
            total += scores.masked_fill_(future, -math.inf).softmax(dim=-1).sum(dim=(0, 1))
        seen: npt.NDArray[np.float32] = (total / (len(query) * n_asked)).cpu().numpy()
        if not np.isfinite(seen).all():
            return None
        return np.pad(seen, (0, max(0, n_rows - n)), constant_values=seen.mean())[:n_rows]


def observe(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The stock sdpa attention; notes the last rows of a query over an observed request's keys."""
    cache = _observing.get(None)
    if cache is not None and cache.layer_of(module.layer_idx, key) is not None:
        cache.observed.note(module.layer_idx, query, key.shape[2], options.get("scaling"))
    result: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, **options
    )
    return result


AttentionInterface.register(ATTENTION_NAME, observe)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


@contextmanager
def observing(model: Any, cache: Any) -> Iterator[None]:
    """Have a request's attention noted in its cache's `observed`; the model's own is put back
    afterwards. With `observed` None nothing is done.

    Only sdpa is observed: under eager attention nothing is noted.
    """
    before = model.config._attn_implementation
    if cache.observed is None or before != "sdpa":
        yield
        return
    token = _observing.set(cache)
    try:
        model.set_attn_implementation(ATTENTION_NAME)
        yield
    finally:
        _observing.reset(token)
        if model.config._attn_implementation in (ATTENTION_NAME, before):  # else the caller's
            model.set_attn_implementation(before)
