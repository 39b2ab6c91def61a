"""Attention arithmetic on a prefix: scores, column sums, missing mass. Pure; no I/O.

On the host scores are made and consumed one KV head at a time, so that scratch memory is bounded by
one head's keys and scores, never a layer's: [query rows of its group, n tokens] float32. On a
device, which would wait for the launches of a kernel for each head, as many heads at a time as
`MOST_BYTES` hold.

    column sums: c[h, t] = Σ over query rows r of exp(s[h, r, t] − log Z[h, r])
    log Z[h, r]  = logaddexp(lse over the prefix, suffix_lse[h, r])       (prefix and new tokens)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from impress.selection.quant import Floats
from impress.selection.scratch import Take, scratch
from impress.spans.rows import torch_module

if TYPE_CHECKING:
    import torch

#: Query rows scored at once: bounds the scores of one KV head.
MOST_ROWS = 256
#: Bytes of scores of several KV heads made at once, on a device (an H200 took 30 ms a layer head by
#: head, while eight threads copied: some 200 launches).
MOST_BYTES = 64 << 20
#: Keys converted to float32 at once where the processor has no product of their dtype.
BLOCK_TOKENS = 2048
#: Weights end here, at e^−60 of their row's largest: far below it, exp() of a float32 leaves the
#: normal range and runs a hundred times slower.
LEAST_EXPONENT = -60.0
#: Variance of a sketch so bad that everything is loaded: the least weight is raised to the largest.
#: More would overflow in sums over tokens, rows and heads.
MOST_NOISE = -LEAST_EXPONENT


class Scored(NamedTuple):
    """Scores of some consecutive query heads, the taker's to overwrite until it takes the next.

    `scores` float32 [heads, q, n], scaled; `noise` float32 [heads, q]: the variance of their error
    (a sketch's) as it is made up for, mean over tokens, None for scores of the stored keys.
    `uneven` float32 [n] or [heads, n]: by what share of that mean a token's own variance exceeds
    it, 0 where it is less; None where only the mean is known.
    """

    scores: torch.Tensor
    noise: torch.Tensor | None
    uneven: torch.Tensor | None = None


#: query [heads, q, head_dim] -> the scores of its heads, in order.
Scorer = Callable[["torch.Tensor"], Iterator[Scored]]


def key_scores(
    query: torch.Tensor, keys: torch.Tensor, scaling: float, heads_per_kv: int
) -> Iterator[Scored]:
    """Scores of query [heads, q, dim] on keys [kv_heads, n, dim], some KV heads at a time.

    Query heads from i·heads_per_kv on, as many as there are, read KV head i. Any strides; same
    device. The product is made in the keys' dtype where the processor has it (16-bit scores are
    then rounded to that dtype), else in float32, block by block.
    """
    # A power of two goes into the query, exactly; the rest waits until the scores are float32.
    mantissa, exponent = math.frexp(scaling)
    rows, n = (query * 2.0**exponent).to(keys.dtype), keys.shape[1]
    at_once = heads_at_once(keys.device, heads_per_kv * rows.shape[1] * n)
    if at_once > 1 and len(rows) % heads_per_kv == 0:
        for first in range(0, len(rows) // heads_per_kv, at_once):
            some = keys[first : first + at_once]
            mine = rows[first * heads_per_kv : (first + len(some)) * heads_per_kv]
            products = mine.reshape(len(some), -1, mine.shape[-1]) @ some.transpose(1, 2)
            scores = products.float().mul_(mantissa)
            yield Scored(scores.view(-1, mine.shape[1], n), None)
        return
    with scratch(keys.device) as take:
        multiply = Product(heads_per_kv * rows.shape[1], n, keys, take)
        for kv in range(-(-len(rows) // heads_per_kv)):
            group = rows[kv * heads_per_kv : (kv + 1) * heads_per_kv]
            scores = multiply(group.reshape(-1, group.shape[-1]), keys[kv])
            yield Scored(scores.mul_(mantissa).view(*group.shape[:2], n), None)


def heads_at_once(device: torch.device, n_scores: int) -> int:
    """KV heads whose scores are made at once: of n_scores each, or as many floats beside them."""
    return 1 if device.type == "cpu" else max(1, MOST_BYTES // (4 * max(n_scores, 1)))


class Product:
    """rows [r ≤ most_rows, dim] · keys [n, dim] as float32 [r, n], overwritten by the next call.

    16-bit products are taken keys first, which reads token-major keys as they lie, where rows
    first would copy them.
    """

    def __init__(self, most_rows: int, n: int, like: torch.Tensor, take: Take) -> None:
        module = torch_module()
        self._converts = like.device.type == "cpu" and not native(str(like.dtype))
        self._dots = take((most_rows * n,), module.float32)
        narrow = not self._converts and like.dtype != module.float32
        self._narrow = take((most_rows * n,), like.dtype) if narrow else None

    def __call__(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        module = torch_module()
        r, n = len(rows), len(keys)
        dots: torch.Tensor = self._dots[: r * n].view(r, n)
        if self._converts:
            left = rows.to(module.float32)
            for at in range(0, n, BLOCK_TOKENS):
                block = keys[at : at + BLOCK_TOKENS].to(module.float32)
                module.mm(left, block.t(), out=dots[:, at : at + BLOCK_TOKENS])
        elif self._narrow is not None:
            dots.copy_(module.mm(keys, rows.t(), out=self._narrow[: r * n].view(n, r)).t())
        else:
            module.mm(rows, keys.t(), out=dots)
        return dots


@cache
def native(dtype: str) -> bool:
    """Whether this processor multiplies matrices of a torch dtype as fast as float32 or faster.

    From what it can do, not from a timing, so that every run on a machine decides alike.
    """
    short = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}.get(dtype)
    if short is None:
        return True
    ask = getattr(torch_module().ops.mkldnn, f"_is_mkldnn_{short}_supported", None)
    return ask is not None and bool(ask())


def sketch_dtype(device_type: str, stored: str) -> Any:
    """The torch dtype in which a sketch of keys stored as `stored` is multiplied: deterministic.

    bfloat16 where the processor has it and float32 was not asked for; its rounding is far below a
    sketch's own error.
    """
    module = torch_module()
    narrow = stored != "float32" and (device_type != "cpu" or native("torch.bfloat16"))
    return module.bfloat16 if narrow else module.float32


def column_sums(score: Scorer, query: torch.Tensor, suffix_lse: torch.Tensor) -> Floats:
    """Column sums float32 [heads, n] of the softmax over prefix and new tokens, on the host.

    query [heads, q, dim]; suffix_lse [heads, q], taken as float32, −inf where there are no new
    tokens. Each row's weights are raised by e^variance where the scores carry noise: see `_fold`,
    `_raised`.
    """
    suffix_lse, total = suffix_lse.float(), None
    for at in range(0, query.shape[1], MOST_ROWS):
        rows = slice(at, at + MOST_ROWS)
        parts, head = [], 0
        with _as_written(query.device):
            for scores, noise, uneven in score(query[:, rows]):
                lse = suffix_lse[head : head + len(scores), rows].to(scores.device)
                sums = _fold(scores, noise, lse)
                if noise is not None and uneven is not None:
                    sums = _raised(sums, noise, uneven)
                parts.append(sums)
                head += len(scores)
        sums = torch_module().cat(parts)
        total = sums if total is None else total.add_(sums)
    assert total is not None, "a query without rows"
    host: Floats = total.cpu().numpy()
    return host


def _as_written(device: torch.device) -> AbstractContextManager[None]:
    """A block whose products are made in their own dtype: a caller's torch.autocast would round
    scores to 16 bits. Takes 3 µs."""
    context: AbstractContextManager[None] = torch_module().autocast(device.type, enabled=False)
    return context


def _fold(
    scores: torch.Tensor, noise: torch.Tensor | None, suffix_lse: torch.Tensor
) -> torch.Tensor:
    """Column sums [heads, n] of scores [heads, q, n], which are overwritten.

    With noise of variance σ² on every score, the weight of tokens that look unimportant is too
    low by about e^σ² on average (those chosen were chosen for their noise too): raising by that
    much makes the estimate of what is left out a cautious one (docs/SELECTION.md).
    """
    module = torch_module()
    most = scores.amax(dim=-1, keepdim=True)
    scores.sub_(most).clamp_(min=LEAST_EXPONENT).exp_()
    most = most[..., 0]
    prefix_lse = scores.sum(dim=-1).log_().add_(most)
    weights = most.sub(module.logaddexp(prefix_lse, suffix_lse))
    weights.masked_fill_(suffix_lse == math.inf, math.nan)  # overflowed: no share is known
    if noise is not None:
        weights += noise.clamp(max=MOST_NOISE)
    sums: torch.Tensor = module.bmm(weights.exp_()[:, None], scores)[:, 0]
    return sums


def _raised(sums: torch.Tensor, noise: torch.Tensor, uneven: torch.Tensor) -> torch.Tensor:
    """Column sums [heads, n], which are overwritten: those of tokens that a sketch knows less well
    than the mean are raised by what they are short of, for rows of the mean noise.

    With keys a tenth of which were three times as large, a choice by the mean alone missed .058
    where it said .048. Never lowered: where tokens differ little, this is the mean's estimate.
    """
    left = (MOST_NOISE - noise.amax(dim=-1)).clamp_(min=0)  # what `_fold` has not raised by
    more = noise.mean(dim=-1)[:, None] * uneven
    return sums.mul_(more.minimum(left[:, None]).exp_())


def suffix_lse_of(query: torch.Tensor, new_keys: torch.Tensor, scaling: float) -> torch.Tensor:
    """Log-sum-exp of the scores on the new tokens' keys: float32 [n_heads, q], for `retrieve`.

    query [n_heads, q, dim]; new_keys [n_kv_heads, m, dim], m ≥ q, the query's own tokens last:
    row i sees the first m − q + i + 1. In float32: a score of hundreds, rounded to 16
    bits, makes this weight wrong by a factor, and the true missing mass with it.
    """
    module = torch_module()
    query, new_keys = (given.detach().to(module.float32) for given in (query, new_keys))
    q, m = query.shape[1], new_keys.shape[1]
    blocks = []
    for at in range(0, max(q, 1), MOST_ROWS):  # for all rows at once, scores take the square of q
        rows = query[:, at : at + MOST_ROWS]
        seen = m - q + at + rows.shape[1]
        future = module.ones(rows.shape[1], seen, dtype=module.bool, device=query.device)
        future.triu_(seen - rows.shape[1] + 1)
        parts = []
        with _as_written(query.device):
            for scores, *_ in key_scores(
                rows, new_keys[:, :seen], scaling, len(query) // len(new_keys)
            ):
                scores.masked_fill_(future, -math.inf)
                parts.append(module.logsumexp(scores, dim=-1))
        blocks.append(module.cat(parts))
    lse: torch.Tensor = module.cat(blocks, dim=1)
    return lse


def true_missing_mass(
    query: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    suffix_lse: torch.Tensor,
    positions: Any,
) -> npt.NDArray[np.float64]:
    """Softmax weight on the rows not in `positions`, mean over query rows, per query head [heads].

    The reference that estimates are judged by: all keys [n_kv_heads, n, dim], in float32. A
    layer's missing mass is its mean over heads, or its largest. positions None: all, so 0.
    """
    module = torch_module()
    n = keys.shape[1]
    left = np.ones(n, dtype=bool)
    left[slice(None) if positions is None else np.asarray(positions)] = False
    wide, heads_per_kv = query.to(module.float32), len(query) // len(keys)
    missing = []
    for kv in range(len(keys)):
        part = slice(kv * heads_per_kv, (kv + 1) * heads_per_kv)

        def score(rows: torch.Tensor, kv: int = kv) -> Iterator[Scored]:
            head_keys = keys[kv : kv + 1].to(module.float32)
            return key_scores(rows, head_keys, scaling, heads_per_kv)

        sums = column_sums(score, wide[part], suffix_lse[part])
        missing.append(sums[:, left].sum(axis=1, dtype=np.float64) / query.shape[1])
    return np.concatenate(missing)
