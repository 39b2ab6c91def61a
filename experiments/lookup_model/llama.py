"""The training-time twin of a small `LlamaForCausalLM` with grouped-query attention.

Like model.py's for OPT. Positions are rotations of queries and keys, so only the differences of
positions matter; one KV head serves several query heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.lookup_model.model import EMBEDDING_STD, Look, Shape, Trace, Visible, attention

ROPE_BASE = 10000.0
NORM_EPS = 1e-5


def rotations(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [batch, 1, tokens, head_dim], both halves alike (the layout of Llama)."""
    rate = ROPE_BASE ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = (positions[..., None] * rate).repeat(1, 1, 2)[:, None]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """x [batch, heads, tokens, head_dim] turned by its position; same dtype."""
    cos, sin = turn
    left, right = x.float().chunk(2, dim=-1)
    turned: Tensor = x.float() * cos + torch.cat([-right, left], dim=-1) * sin
    return turned.to(x.dtype)


class GroupedAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim, self.group = shape.head_dim, shape.n_heads // shape.n_kv_heads
        kv_width = shape.n_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    @torch.no_grad()
    def start(self) -> None:
        """Each KV head's keys start as its first query head's queries."""
        heads = self.q_proj.weight.unflatten(0, (-1, self.group, self.head_dim))  # type: ignore[no-untyped-call]
        self.k_proj.weight.copy_(heads[:, 0].flatten(0, 1))

    def heads(self, x: Tensor) -> Tensor:  # [batch, tokens, width] -> [batch, heads, tokens, dim]
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], see: Visible) -> tuple[Tensor, Look]:
        q, k, v = (self.heads(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, turn), rotate(k, turn)
        k, v = (t.repeat_interleave(self.group, dim=1) for t in (k, v))
        out, entropy = attention(q, k, v, see)
        return self.o_proj(out.transpose(1, 2).flatten(2)), Look(q, k, entropy)


class GatedLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.self_attn = GroupedAttention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(shape.hidden, shape.gated_width, bias=False),
                "up_proj": nn.Linear(shape.hidden, shape.gated_width, bias=False),
                "down_proj": nn.Linear(shape.gated_width, shape.hidden, bias=False),
            }
        )

    @torch.no_grad()
    def start(self, n_layers: int) -> None:
        self.self_attn.start()
        for p in (self.self_attn.o_proj.weight, *self.mlp["down_proj"].parameters()):
            p.mul_((2 * n_layers) ** -0.5)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], see: Visible) -> tuple[Tensor, Look]:
        mixed, look = self.self_attn(self.input_layernorm(x), turn, see)
        x = x + mixed
        y = self.post_attention_layernorm(x)
        gated = F.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y)
        return x + self.mlp["down_proj"](gated), look


class LookupLlama(nn.Module):
    """Parameters named as in LlamaForCausalLM's state_dict, without the leading `model.`."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.n_words, shape.hidden)
        self.layers = nn.ModuleList(GatedLayer(shape) for _ in range(shape.n_layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        for name, p in self.named_parameters():
            if "proj" in name:
                nn.init.normal_(p, std=p.shape[1] ** -0.5)
        for layer in self.layers:
            assert isinstance(layer, GatedLayer)
            layer.start(shape.n_layers)
        nn.init.normal_(self.embed_tokens.weight, std=EMBEDDING_STD)

    def forward(self, tokens: Tensor, positions: Tensor, see: Visible) -> Trace:
        """tokens, positions [batch, n]."""
        turn = rotations(positions, self.shape.head_dim)
        x = self.embed_tokens(tokens)
        first, looks = x, []
        for i, layer in enumerate(self.layers):
            x, look = layer(x, turn, see)
            looks.append(look)
            if i == 0:
                first = x
        return Trace(self.norm(x), first, tuple(looks))

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embed_tokens.weight.T
