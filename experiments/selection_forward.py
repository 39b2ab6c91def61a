"""A forward pass over any rows of a prefix, for OPT and Llama, independent of the engine's.

    question ─embed→ [ norm → q, k, v → rows of the prefix for q → attention → mlp ]* → logits

It uses the model's own modules and calls a session as docs/ARCHITECTURE.md says an engine does, so
that what the policies choose is measured without generate(); experiments.selection compares some of
its answers with the engine's. experiments.probes hands it rows without a store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from impress.engines.hf_modules import CACHE
from impress.policy import Policy
from impress.read.access import AccessReport
from impress.read.session import Lease
from impress.selection.scores import suffix_lse_of, true_missing_mass

#: Rows at the start of OPT's position table that no token uses.
POSITION_OFFSET: Final = 2

Heads = tuple[Tensor, Tensor, Tensor]
#: (layer, query, scaling, suffix_lse) -> K and V [kv heads, m, head_dim] of the prefix, and which.
Rows = Callable[[int, Tensor, float, Tensor], tuple[Tensor, Tensor, Any]]


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a dense forward made of a document: keys and values [kv heads, n, head_dim] by layer."""

    keys: list[Tensor]
    values: list[Tensor]

    @property
    def n_tokens(self) -> int:
        return int(self.keys[0].shape[1])


@dataclass(slots=True)
class Answered:
    """One question answered on the rows a policy chose.

    `logits` float32 [words], after the question's last token. Lists are by layer: the true softmax
    weight on the prefix rows left out, mean over heads and of the worst head.
    """

    logits: Tensor
    report: AccessReport
    missing: list[float] = field(default_factory=list)
    missing_worst: list[float] = field(default_factory=list)


class Family(Protocol):
    """The parts of a model before and after attention. x: [q, hidden]."""

    scaling: float  # of scores

    @property
    def n_layers(self) -> int:
        """Layers of the model."""

    def embedded(self, tokens: Sequence[int], n_prefix: int) -> Tensor:
        """x of words, at positions from n_prefix on."""

    def projected(self, i: int, x: Tensor, n_prefix: int) -> Heads:
        """Query, keys and values [heads, q, head_dim] of the new tokens, after RoPE."""

    def mixed(self, i: int, x: Tensor, seen: Tensor) -> Tensor:
        """x after layer i, whose attention gave `seen` [q, hidden]."""

    def logits(self, x: Tensor) -> Tensor:
        """float32 [words] after the last token."""


class Opt:
    """OPT's stock attention scales the query itself and does not scale the scores."""

    def __init__(self, model: Any) -> None:
        self.scaling = 1.0
        self._head, self._decoder = model.lm_head, model.model.decoder

    @property
    def n_layers(self) -> int:
        return len(self._decoder.layers)

    def embedded(self, tokens: Sequence[int], n_prefix: int) -> Tensor:
        at = torch.arange(n_prefix, n_prefix + len(tokens)) + POSITION_OFFSET
        words: Tensor = self._decoder.embed_tokens(torch.tensor(tokens))
        return words + F.embedding(at, self._decoder.embed_positions.weight)

    def projected(self, i: int, x: Tensor, n_prefix: int) -> Heads:
        layer = self._decoder.layers[i]
        attention = layer.self_attn
        y = layer.self_attn_layer_norm(x)
        parts = attention.q_proj(y) * attention.scaling, attention.k_proj(y), attention.v_proj(y)
        q, k, v = (part.view(len(x), attention.num_heads, -1).transpose(0, 1) for part in parts)
        return q, k, v

    def mixed(self, i: int, x: Tensor, seen: Tensor) -> Tensor:
        layer = self._decoder.layers[i]
        x = x + layer.self_attn.out_proj(seen)
        hidden = F.relu(layer.fc1(layer.final_layer_norm(x)))
        mixed: Tensor = x + layer.fc2(hidden)
        return mixed

    def logits(self, x: Tensor) -> Tensor:
        made: Tensor = self._head(self._decoder.final_layer_norm(x[-1:]))[0]
        return made.float()


class Llama:
    """Llama, with positions rotated into queries and keys, and KV heads shared by query heads."""

    def __init__(self, model: Any) -> None:
        self._head, self._base = model.lm_head, model.model
        self._dim = model.config.hidden_size // model.config.num_attention_heads
        self.scaling = self._dim**-0.5

    @property
    def n_layers(self) -> int:
        return len(self._base.layers)

    def embedded(self, tokens: Sequence[int], n_prefix: int) -> Tensor:
        words: Tensor = self._base.embed_tokens(torch.tensor(tokens))
        return words

    def projected(self, i: int, x: Tensor, n_prefix: int) -> Heads:
        layer = self._base.layers[i]
        y = layer.input_layernorm(x)
        made = [f(y) for f in (layer.self_attn.q_proj, layer.self_attn.k_proj,
                               layer.self_attn.v_proj)]  # fmt: skip
        q, k, v = (part.view(len(x), -1, self._dim).transpose(0, 1) for part in made)
        at = torch.arange(n_prefix, n_prefix + len(x))[None]
        cos, sin = (part[0] for part in self._base.rotary_emb(x[None], at))
        return _turned(q, cos, sin), _turned(k, cos, sin), v

    def mixed(self, i: int, x: Tensor, seen: Tensor) -> Tensor:
        layer = self._base.layers[i]
        x = x + layer.self_attn.o_proj(seen)
        mixed: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return mixed

    def logits(self, x: Tensor) -> Tensor:
        made: Tensor = self._head(self._base.norm(x[-1:]))[0]
        return made.float()


def _turned(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = rows.chunk(2, dim=-1)
    return rows * cos + torch.cat([-right, left], dim=-1) * sin


def family_of(model: Any) -> Family:
    """The family of a Transformers model, by its config."""
    return Llama(model) if model.config.model_type == "llama" else Opt(model)


@torch.no_grad()
def prefill(model: Any, tokens: Sequence[int]) -> tuple[Prefix, Any]:
    """The rows of a document by the stock forward, and the stock cache that holds them."""
    cache = model(torch.tensor([tokens]), use_cache=True)[CACHE]
    layers = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
    return Prefix([k for k, _ in layers], [v for _, v in layers]), cache


@torch.no_grad()
def walk(model: Any, n_prefix: int, tokens: Sequence[int], rows: Rows) -> Tensor:
    """Logits float32 [words] of `tokens` after a prefix, on the rows that `rows` brings."""
    family = family_of(model)
    x = family.embedded(tokens, n_prefix)
    for i in range(family.n_layers):
        query, new_k, new_v = family.projected(i, x, n_prefix)
        lse = suffix_lse_of(query, new_k, family.scaling)
        k, v, _ = rows(i, query, family.scaling, lse)
        keys, values = torch.cat([k, new_k], 1), torch.cat([v, new_v], 1)
        x = family.mixed(i, x, _attended(query, keys, values, family.scaling))
    return family.logits(x)


def answer(
    model: Any, lease: Lease, policy: Policy, tokens: Sequence[int], truth: Prefix | None = None
) -> Answered:
    """Run `tokens` after a leased prefix under a policy. Raises PrefixLost.

    `truth`: the prefix's rows as computed, to measure what was left out; None measures nothing.
    """
    missing: list[float] = []
    worst: list[float] = []
    with lease.session(policy) as session:
        session.prefetch()

        def rows(layer: int, query: Tensor, scaling: float, lse: Tensor) -> Heads:
            k, v, pos = session.retrieve(layer, query, scaling, lse)
            if truth is not None:
                left = _left_out(query, truth.keys[layer], scaling, lse, pos)
                missing.append(float(left.mean()))
                worst.append(float(left.max()))
            return k, v, pos

        logits = walk(model, lease.n_tokens, tokens, rows)
        report = session.report()
    return Answered(logits, report, missing, worst)


def _attended(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """[q, hidden]. Each new token sees every prefix row brought, and new ones up to itself."""
    q, n = query.shape[1], keys.shape[1]
    seen = torch.ones(q, n, dtype=torch.bool).tril(n - q)
    out = F.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=seen, scale=scaling,
        enable_gqa=len(query) != len(keys),
    )  # fmt: skip
    return out[0].transpose(0, 1).flatten(1)


def _left_out(
    query: Tensor, keys: Tensor, scaling: float, suffix_lse: Tensor, positions: Tensor
) -> Any:
    """Softmax weight by head on the rows not brought, mean over the query's rows."""
    if len(positions) == keys.shape[1]:
        return np.zeros(len(query))
    return true_missing_mass(query, keys, scaling, suffix_lse, positions.numpy())
