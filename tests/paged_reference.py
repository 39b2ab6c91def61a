"""What FlashAttention's paged kernels do, in torch: the reference for metadata and layouts."""

from __future__ import annotations

from typing import Any

import torch


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    cu_seqlens_q: torch.Tensor, seqused_k: torch.Tensor, block_table: torch.Tensor,
    softmax_scale: float, **rest: Any,
) -> None:  # fmt: skip
    """Causal attention of a batch, request by request, in float32.

    q, out [tokens, n_heads, dim]; k, v [blocks, block_size, n_kv_heads, dim]; the last query of a
    request sees all its keys.
    """
    starts, n_groups = cu_seqlens_q.tolist(), q.shape[1] // k.shape[2]
    for i, n in enumerate(seqused_k.tolist()):
        new = slice(starts[i], starts[i + 1])
        blocks = block_table[i, : -(-n // k.shape[1])].long()
        keys, values = (
            t[blocks].flatten(0, 1)[:n].float().repeat_interleave(n_groups, 1) for t in (k, v)
        )
        out[new] = dense(q[new], keys, values, softmax_scale).to(out.dtype)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last rows: q [m, heads, dim], k and v [n, heads, dim] in float32."""
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", shares, v)


def write_rows(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slot_mapping: torch.Tensor, *rest: Any,
) -> None:  # fmt: skip
    """What vLLM does with new rows; the caches are [blocks, block_size, n_kv_heads, dim]."""
    size, n = key_cache.shape[1], len(slot_mapping)
    at = slot_mapping // size, slot_mapping % size
    key_cache[at], value_cache[at] = key[:n], value[:n]
