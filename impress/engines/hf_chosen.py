"""Sparse requests: each layer's attention chooses rows of the stored prefix by its own query.

    a layer's forward: update(new rows) → attend(query) ─choose→ | chosen prefix rows | new rows |

How many rows were chosen differs from layer to layer, so the model's own mask and kernel dispatch
do not fit: for one request the model runs an attention function of ours, which makes the mask from
the rows that are there and leaves the arithmetic to the stock sdpa function. The compact rows are
appended to in place. Keys computed here saw only a part of the prefix: they are never stored and
never handed out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from impress.config import Config
from impress.engines import hf_models
from impress.engines.buffers import Rental
from impress.engines.hf_cache import RequestCache, RowsLayer
from impress.engines.hf_compiled import untraced
from impress.engines.hf_models import Prompt
from impress.engines.hf_observed import ATTENTION_NAME as OBSERVED_NAME
from impress.engines.hf_settings import setting
from impress.engines.rounding import fpmath
from impress.errors import BadInput, ImpressError, Unsupported
from impress.policy import Exact, KeepAll, Policy, SnapWindow, StaticH2O
from impress.selection.identify import check_fits, select
from impress.selection.probes import codec_of
from impress.types import Geometry
from tiers.slots import BufferPool

_MASKS: Final = {"sdpa": sdpa_mask, "eager": eager_mask}  # for all of hf_models.ATTENTION
#: Name of our attention during a request, by the model's own.
ATTENTION_NAMES: Final = {own: f"impress_chosen_rows_{own}" for own in _MASKS}

_serving: ContextVar[ChosenCache] = ContextVar("impress_chosen_cache")


class ChoosingPrefix(Protocol):
    """The stored prefix of a request, which gives the rows that matter to a query."""

    n_tokens: int

    def choose(
        self, layer: int, query: torch.Tensor, new_keys: torch.Tensor, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v [n_kv_heads, m, head_dim] of a layer, in any order. Raises PrefixLost.

        query [n_heads, q, head_dim] after RoPE; new_keys [n_kv_heads, q, head_dim].
        """

    def close(self) -> bool:
        """Give back what was read. Idempotent."""


def chooses(policy: Policy) -> bool:
    """Whether rows are brought by the layer's query, in a sparse request."""
    return not isinstance(policy, Exact)


def by_importance(policy: Policy) -> bool:
    """Whether it chooses by what was given when the rows were stored."""
    return isinstance(policy, SnapWindow | StaticH2O)


def check_policy(policy: Any, geometry: Geometry, window: int) -> None:
    """Raises, in one line, for a policy this engine cannot serve on such rows.

    Unsupported where nothing implements it, ImpressError on an unknown probe codec, BadInput where
    it is not a policy, or can never be kept to on such rows (check_fits).
    """
    kind = type(policy)
    lacks = [n for n in ("name", "probe", "needs_suffix_lse") if not hasattr(policy, n)]
    if isinstance(policy, type) or lacks:
        got = f"the class {policy.__name__}" if isinstance(policy, type) else kind.__name__
        meant = ": pass it as config=" if isinstance(policy, Config) else ""
        if 0 < len(lacks) < 3:
            meant = f", which has no {' and no '.join(lacks)}"
        raise BadInput(f"policy: want a policy such as impress.Quality(), got {got}{meant}")
    if not isinstance(policy, Exact | KeepAll) and (kind is object or kind not in select.registry):
        raise Unsupported(f"policy {kind.__name__} is not supported by this engine")
    if policy.probe is not None:
        codec_of(policy.probe)
    check_fits(policy, geometry, window)


def check_choosing(model: Any, prompt: Prompt, policy: Policy) -> None:
    """Raises Unsupported for a request that a policy that chooses rows cannot serve."""
    if len(prompt.rows) != 1:
        raise Unsupported(
            f"batches under policy {policy.name} are not supported: "
            f"pass one prompt at a time, got {len(prompt.rows)}"
        )
    for name, why in {
        "prefill_chunk_size": "its rows are chosen by the whole query",
        "output_attentions": "its attention gives no weights",
    }.items():
        if setting(model, prompt.options, name):
            raise Unsupported(f"{name} under policy {policy.name} is not supported: {why}")
    # What set_attn_implementation reaches: each attention goes by its own config.
    reached = {id(m.config) for m in prompt.found.modules if isinstance(m, PreTrainedModel)}
    for module in prompt.found.modules:
        own = module.__dict__
        if "layer_idx" in own and "config" in own and id(own["config"]) not in reached:
            raise Unsupported(
                f"layer {own['layer_idx']} attends by a config of its own, as a copied layer does, "
                f"and policy {policy.name} does not reach that: give its attention the model's "
                "config, or the call policy=impress.Exact()"
            )
    if (hf_models.is_rounded() or fpmath()) and _rounds_scores(model, prompt):
        raise Unsupported(
            f"float16 on a CPU under policy {policy.name}: torch or oneDNN may round the float32 "
            "matrices that scores are made of: call torch.set_float32_matmul_precision('highest') "
            "and unset ONEDNN_DEFAULT_FPMATH_MODE (or DNNL_…)"
        )


def _rounds_scores(model: Any, prompt: Prompt) -> bool:
    """Whether scores would change where float32 is rounded: a CPU rounds it to bfloat16, of which a
    score of 149 was .67 off; a GPU to as many bits as float16 has."""
    is_half = any(tensor.dtype == torch.float16 for tensor in prompt.found.tensors)
    return is_half and model.device.type == "cpu"


class ChosenLayer(RowsLayer):
    """One layer: the chosen rows of the prefix, then the new ones, in one growing buffer.

    The length it reports is the logical one, rows not chosen included: it drives positions.
    """

    def __init__(
        self, geometry: Geometry, n_prefix: int, n_new: int, pool: BufferPool,
        rental: Rental | None, index: int,
    ) -> None:  # fmt: skip
        """Room for n_new new tokens; that for chosen rows is added when they are known."""
        super().__init__(
            geometry, 1, n_new, pool, n_prefix=0, contiguous=False, rental=rental, index=index
        )
        self.is_chosen = False
        self._n_left_out = n_prefix
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, once rows were chosen; before, only keep what `lay_down` will append."""
        if self.is_chosen:
            return super().update(key_states, value_states)
        if self.begun is not None:
            self.begun()
        self._check(key_states)
        self._new = key_states, value_states
        return self._new

    def owns(self, key: torch.Tensor) -> bool:
        if self._new is not None:
            return key.data_ptr() == self._new[0].data_ptr()
        return super().owns(key)

    def lay_down(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy chosen rows [n_kv_heads, m, head_dim] and append the new ones; returns all."""
        assert self._new is not None, "rows are chosen after the first update"
        n_chosen = k.shape[1]
        self._capacity += n_chosen
        super().update(k[None], v[None])
        self._n_left_out -= n_chosen
        self.is_chosen = True
        new, self._new = self._new, None
        return super().update(*new)

    def get_seq_length(self) -> int:
        return self.length + self._n_left_out

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class ChosenCache(RequestCache):
    """The layers of one sparse request. Serves one generate() call under `attending`."""

    def __init__(
        self, geometry: Geometry, prefix: ChoosingPrefix, n_new: int, pool: BufferPool,
        rental: Rental | None = None,
    ) -> None:  # fmt: skip
        """n_new: most tokens that come after the prefix, in the prompt or generated.

        `rental`: room in virtual buffers, the cache's to give back.
        """
        self._prefix = prefix
        self._rental = rental
        self._all_chosen = False
        super().__init__(
            layers=[
                ChosenLayer(geometry, prefix.n_tokens, n_new, pool, rental, index)
                for index in range(geometry.n_layers)
            ]
        )

    @untraced
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx and not self.layers[layer_idx - 1].is_chosen:
            raise _other_attention(layer_idx - 1)
        if not self._all_chosen and self.layers[layer_idx].is_chosen:
            self._all_chosen = True
            self._prefix.close()  # decoding begins: what was read has been copied
        k, v = self.layers[layer_idx].update(key_states, value_states)
        return k, v

    def choose(
        self, layer_idx: int, query: torch.Tensor, scaling: float, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring a layer's rows for query [1, n_heads, q, head_dim]; its keys and values so far."""
        k, v = self._prefix.choose(layer_idx, query[0], key[0], scaling)
        rows: tuple[torch.Tensor, torch.Tensor] = self.layers[layer_idx].lay_down(k, v)
        return rows

    def check_attended(self) -> None:
        """Raises Unsupported after a first pass in which a layer did not attend by `attend`."""
        for index, layer in enumerate(self.layers):
            if not layer.is_chosen:
                raise _other_attention(index)

    def release(self) -> None:
        """Give all memory back to the pool. Idempotent."""
        for layer in self.layers:
            layer.release()
        if self._rental is not None:
            self._rental.release()


def _other_attention(layer: int) -> Unsupported:
    """It saw no prefix: an answer must not come of it."""
    return Unsupported(f"layer {layer} ran another attention than ours")


@untraced
def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention [1, q, n_heads, head_dim] over chosen and new rows; the first call chooses.

    query [1, n_heads, q, head_dim]. Each new token sees all chosen rows, and the new ones up to
    itself. Keys that are not the request's get their model's own function and mask: the caller's
    processor, criterion or streamer may run the model meanwhile. Raises PrefixLost, and
    ImpressError where no request is under way in this thread.
    """
    cache = _serving.get(None)
    if cache is None:
        raise ImpressError("the model serves a sparse request in another thread")
    result: tuple[torch.Tensor, torch.Tensor | None]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = cache.layer_of(module.layer_idx, key)
    if layer is None:
        result = _own_attention(module)(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scale, **options
        )
        return result
    if not layer.is_chosen:
        key, value = cache.choose(module.layer_idx, query, scale, key)
    q, n = query.shape[2], key.shape[2]
    mask = None
    if q > 1:
        mask = torch.ones(q, n, dtype=torch.bool, device=query.device).tril_(n - q)[None, None]
    result = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling
    )
    return result


def _own_attention(module: Any) -> Any:
    """The function a module runs outside of a request: eager's is in the file of its class."""
    if module.config._attn_implementation != ATTENTION_NAMES["eager"]:
        return sdpa_attention_forward
    files = [sys.modules.get(kind.__module__) for kind in type(module).__mro__]
    found = (getattr(file, "eager_attention_forward", None) for file in files)
    return next((function for function in found if function), sdpa_attention_forward)


for _own, _name in ATTENTION_NAMES.items():
    AttentionInterface.register(_name, attend)
    # The stock mask, for code that runs the model meanwhile: `attend` makes a request's own.
    AttentionMaskInterface.register(_name, _MASKS[_own])


def put_back(model: Any) -> None:
    """Put back a model's own attention where it has ours: Ctrl-C came as a request did so."""
    found = model.config._attn_implementation
    for own, ours in (*ATTENTION_NAMES.items(), ("sdpa", OBSERVED_NAME)):
        if found == ours:
            model.set_attn_implementation(own)


@contextmanager
def attending(model: Any, cache: ChosenCache) -> Iterator[None]:
    """Have the model attend to a sparse request's rows; its own attention is back afterwards.

    Raises Unsupported where the model does not let its attention be set.
    """
    before = model.config._attn_implementation
    ours = ATTENTION_NAMES[before]
    serving = _serving.set(cache)
    try:
        model.set_attn_implementation(ours)
        if model.config._attn_implementation != ours:
            raise Unsupported(f"{type(model).__name__} does not let its attention be set")
        yield
    finally:
        _serving.reset(serving)
        if model.config._attn_implementation in (ours, before):  # else the caller's
            model.set_attn_implementation(before)
