"""A forward pass of OPT over any rows of its prefix, written apart from the engine's.

    question ─embed→ [ norm → q, k, v → rows of the prefix for q → attention → mlp ]* → logits

It uses the model's own modules and calls a session as docs/ARCHITECTURE.md says an engine does, so
that what the policies choose is measured without generate(); experiments.selection compares some of
its answers with the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from impress.policy import Policy
from impress.scores import suffix_lse_of, true_missing_mass
from impress.session import AccessReport, Lease

#: OPT's stock attention scales the query itself, and the scores by nothing.
SCALING: Final = 1.0
#: Rows at the start of OPT's position table that no token uses.
POSITION_OFFSET: Final = 2


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a dense forward made of a document: keys and values [heads, n, head_dim] by layer."""

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


@torch.no_grad()
def prefill(model: Any, tokens: Sequence[int]) -> tuple[Prefix, Any]:
    """The rows of a document by the stock forward, and the stock cache that holds them."""
    cache = model(torch.tensor([tokens]), use_cache=True).past_key_values
    layers = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
    return Prefix([k for k, _ in layers], [v for _, v in layers]), cache


@torch.no_grad()
def answer(
    model: Any, lease: Lease, policy: Policy, tokens: Sequence[int], truth: Prefix | None = None
) -> Answered:
    """Run `tokens` behind a leased prefix under a policy. Raises PrefixLost.

    `truth`: the prefix's rows as computed, to measure what was left out; None measures nothing.
    """
    decoder = model.model.decoder
    x = _embedded(decoder, tokens, lease.n_tokens)
    missing: list[float] = []
    worst: list[float] = []
    with lease.session(policy) as session:
        session.prefetch()
        for i, layer in enumerate(decoder.layers):
            query, new_k, new_v = _projected(layer, x)
            lse = suffix_lse_of(query, new_k, SCALING)
            k, v, pos = session.retrieve(i, query, SCALING, lse)
            if truth is not None:
                left = _left_out(query, truth.keys[i], lse, pos)
                missing.append(float(left.mean()))
                worst.append(float(left.max()))
            seen = _attended(query, torch.cat([k, new_k], 1), torch.cat([v, new_v], 1))
            x = _mixed(layer, x, seen)
        report = session.report()
    last = decoder.final_layer_norm(x[-1:])
    return Answered(model.lm_head(last)[0].float(), report, missing, worst)


def _embedded(decoder: Any, tokens: Sequence[int], n_prefix: int) -> Tensor:
    """[q, hidden]: words and positions n_prefix and on."""
    at = torch.arange(n_prefix, n_prefix + len(tokens)) + POSITION_OFFSET
    words: Tensor = decoder.embed_tokens(torch.tensor(tokens))
    return words + F.embedding(at, decoder.embed_positions.weight)


def _projected(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values [heads, q, head_dim] of the new tokens; the query scaled."""
    attention = layer.self_attn
    y = layer.self_attn_layer_norm(x)
    parts = attention.q_proj(y) * attention.scaling, attention.k_proj(y), attention.v_proj(y)
    q, k, v = (part.view(len(x), attention.num_heads, -1).transpose(0, 1) for part in parts)
    return q, k, v


def _attended(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[q, hidden]. Each new token sees every prefix row brought, and new ones up to itself."""
    q, n = query.shape[1], keys.shape[1]
    seen = torch.ones(q, n, dtype=torch.bool).tril(n - q)
    out = F.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=seen, scale=SCALING
    )
    return out[0].transpose(0, 1).flatten(1)


def _mixed(layer: Any, x: Tensor, seen: Tensor) -> Tensor:
    x = x + layer.self_attn.out_proj(seen)
    hidden = F.relu(layer.fc1(layer.final_layer_norm(x)))
    mixed: Tensor = x + layer.fc2(hidden)
    return mixed


def _left_out(query: Tensor, keys: Tensor, suffix_lse: Tensor, positions: Tensor) -> Any:
    """Softmax weight by head on the rows not brought, mean over the query's rows."""
    if len(positions) == keys.shape[1]:
        return np.zeros(len(query))
    return true_missing_mass(query, keys, SCALING, suffix_lse, positions.numpy())
