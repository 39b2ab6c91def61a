"""The training-time twin of `OPTForCausalLM`: same parameters by name, same function.

Separate from transformers, as training needs what a served model does not: positions offset per
sequence, attention mass on chosen keys (the hint), and the hidden state after the first layer.
export.py compares both models' logits before it writes a checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

POSITION_OFFSET = 2  # OPT's table starts with two rows that no token uses


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model. `max_positions` bounds prefix plus question."""

    n_words: int
    n_layers: int = 4
    n_heads: int = 8
    n_kv_heads: int = 8  # OPT has no other choice
    hidden: int = 256
    max_positions: int = 2304

    @property
    def gated_width(self) -> int:  # three gated matrices for OPT's two of width 4 x hidden
        return self.hidden * 11 // 4

    @property
    def head_dim(self) -> int:
        return self.hidden // self.n_heads


@dataclass(frozen=True, slots=True)
class Visible:
    """Which tokens see which in sequences of one document and many questions after it.

    The first `n_document` tokens are causal. `rows` [batch, n - n_document, n] bool tells what the
    others see: the document and their own question so far, as if each question were alone.
    """

    n_document: int
    rows: Tensor
    charged: (
        Tensor  # [batch, n - n_document] bool: question tokens whose attention should be sparse
    )

    def bias(self, dtype: torch.dtype) -> Tensor:
        """[batch, 1, n - n_document, n], 0 or -inf."""
        return torch.zeros((), dtype=dtype).where(self.rows, -math.inf)[:, None]


def attention(q: Tensor, k: Tensor, v: Tensor, see: Visible) -> tuple[Tensor, Tensor]:
    """Attention under `see`, [batch, heads, tokens, dim] each; and the mean entropy of the charged
    rows, in nats.

    torch's CPU kernel has a slow backward pass and ignores a mask's sparsity: plain products are
    faster for question rows, and for documents below about 256 tokens.
    """
    n = see.n_document
    p = probabilities(q[:, :, n:], k, see.bias(q.dtype))
    asked = p.to(v.dtype) @ v
    each = -(p * (p + 1e-9).log()).sum(-1).mean(1)  # [batch, n - n_document]
    entropy = (each * see.charged).sum() / see.charged.sum().clamp(min=1)
    q, k, v = q[:, :, :n], k[:, :, :n], v[:, :, :n]
    if n > 256:
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        future = torch.full((n, n), -math.inf, dtype=q.dtype).triu(1)
        read = probabilities(q, k, future).to(v.dtype) @ v
    return torch.cat([read, asked], dim=2), entropy


def probabilities(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """[batch, heads, queries, keys] float32."""
    score = (q * q.shape[-1] ** -0.5) @ k.mT + bias
    p: Tensor = score.float().softmax(-1)
    return p


@dataclass(frozen=True, slots=True)
class Look:
    """What one layer's attention leaves behind for the losses."""

    queries: Tensor  # [batch, heads, tokens, head_dim]
    keys: Tensor  # likewise, repeated under grouped-query attention
    entropy: Tensor  # mean over the charged rows and all heads, nats


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.n_heads, self.head_dim = shape.n_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.hidden)
        self.k_proj = nn.Linear(shape.hidden, shape.hidden)
        self.v_proj = nn.Linear(shape.hidden, shape.hidden)
        self.out_proj = nn.Linear(shape.hidden, shape.hidden)

    def heads(self, x: Tensor) -> Tensor:  # [batch, tokens, hidden] -> [batch, heads, tokens, dim]
        return x.view(*x.shape[:2], self.n_heads, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor, see: Visible) -> tuple[Tensor, Look]:
        q, k, v = (self.heads(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        out, entropy = attention(q, k, v, see)
        return self.out_proj(out.transpose(1, 2).flatten(2)), Look(q, k, entropy)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(shape.hidden)
        self.self_attn = Attention(shape)
        self.final_layer_norm = nn.LayerNorm(shape.hidden)
        self.fc1 = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.fc2 = nn.Linear(4 * shape.hidden, shape.hidden)

    @torch.no_grad()
    def start(self, n_layers: int) -> None:
        """W_k = W_q, so that equal words find each other; quiet outputs, as in GPT-2."""
        self.self_attn.k_proj.load_state_dict(self.self_attn.q_proj.state_dict())
        for p in (self.self_attn.out_proj.weight, self.fc2.weight):
            p.mul_((2 * n_layers) ** -0.5)

    def forward(self, x: Tensor, see: Visible) -> tuple[Tensor, Look]:
        mixed, look = self.self_attn(self.self_attn_layer_norm(x), see)
        x = x + mixed
        return x + self.fc2(F.relu(self.fc1(self.final_layer_norm(x)))), look


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.n_words, shape.hidden)
        self.embed_positions = nn.Embedding(shape.max_positions + POSITION_OFFSET, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.n_layers))
        self.final_layer_norm = nn.LayerNorm(shape.hidden)


@dataclass(frozen=True, slots=True)
class Trace:
    """What one forward pass leaves behind for the losses."""

    final: Tensor  # [batch, tokens, hidden], after the last norm
    first: Tensor  # [batch, tokens, hidden], after layer 0
    looks: tuple[Look, ...]  # by layer


class LookupOPT(nn.Module):
    """Parameters named as in OPTForCausalLM's state_dict, without the leading `model.`."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        assert shape.n_layers >= 2, "the lookup happens in layer 1"
        torch.manual_seed(seed)
        self.shape = shape
        self.decoder = Decoder(shape)
        self._initialise()

    def _initialise(self) -> None:
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif "proj" in name or "fc" in name:
                nn.init.normal_(p, std=p.shape[1] ** -0.5)
        for layer in self.decoder.layers:
            assert isinstance(layer, Layer)
            layer.start(self.shape.n_layers)
        nn.init.normal_(self.decoder.embed_tokens.weight, std=EMBEDDING_STD)
        self.decoder.embed_positions.weight.data = sinusoids(
            self.decoder.embed_positions.num_embeddings, self.shape.hidden
        )

    def forward(self, tokens: Tensor, positions: Tensor, see: Visible) -> Trace:
        """tokens, positions [batch, n]."""
        at = self.decoder.embed_positions(positions + POSITION_OFFSET)
        x = self.decoder.embed_tokens(tokens) + at
        first, looks = x, []
        for i, layer in enumerate(self.decoder.layers):
            x, look = layer(x, see)
            looks.append(look)
            if i == 0:
                first = x
        return Trace(self.decoder.final_layer_norm(x), first, tuple(looks))

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.decoder.embed_tokens.weight.T


EMBEDDING_STD = 0.02


def sinusoids(n: int, dim: int) -> Tensor:
    """[n, dim] sines and cosines of geometric wavelengths, as loud as the word embeddings."""
    rate = torch.exp(torch.arange(0, dim, 2) / dim * -math.log(10000.0))
    angle = torch.arange(n)[:, None] * rate[None]
    return torch.cat([angle.sin(), angle.cos()], dim=1) * (EMBEDDING_STD * 2**0.5)


def hint_log_mass(trace: Trace, see: Visible, rows: Tensor, at: Tensor, targets: Tensor) -> Tensor:
    """[n, heads] log attention mass that layer 1 puts on `targets`.

    rows, at [n]: sequence and token of each answer position; targets [n, tokens] bool.
    """
    q = trace.looks[1].queries[rows, :, at].float()  # [n, heads, dim]
    k = trace.looks[1].keys[rows].float()  # [n, heads, tokens, dim]
    score = torch.einsum("nhd,nhtd->nht", q, k) * q.shape[-1] ** -0.5
    seen = see.rows[rows, at - see.n_document]
    score = score.masked_fill(~seen[:, None], -math.inf)
    wanted = score.masked_fill(~targets[:, None], -math.inf)
    log_mass: Tensor = wanted.logsumexp(-1) - score.logsumexp(-1)
    return log_mass
