"""Prefixes whose keys and queries are made from seeds, with knobs.

Keys are independent normal numbers, smooth over a few neighbouring tokens in the dimensions that
queries look at; half of the dimensions are equal in all heads. Everything else is in the query: for
head h in request r

    q = sharpness · √dim · [ √a · (o·e + √(1−o²)·u_r)  |  √(1−a) · (o·e + √(1−o²)·u_rh) ]
                            shared by the heads           the head's own dimensions

e is one fixed direction, the popularity of the prefix's rows, whose ranks follow Zipf's law; u are
directions drawn for each request. Query heads that share keys (GQA) have dimensions of their own in
these: trained ones do not look at the same rows either. a is how much heads agree, o how far a
request's choices follow the average order, sharpness the exponent of the law. Their effect on the
gate is measured: rows of a report have `fell_back`. A test checks that overlaps follow o
(`overlap_with_average`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from experiments.systems.shapes import Shape
from impress.selection.scores import suffix_lse_of

Floats = npt.NDArray[np.float32]
#: Dimensions besides the popular one that requests may look at, shared and own: the topics.
N_TOPICS: Final = 15
#: New tokens of a request: a question.
N_NEW: Final = 16
#: Takes the exponent's highest bit from each 16-bit float of a word: finite, whatever the rest is.
_FINITE: Final = np.uint64(0xBFFF_BFFF_BFFF_BFFF)


@dataclass(frozen=True, slots=True)
class Knobs:
    """How requests look at a prefix. Defaults: about the paper's fallback share and overlap.

    agreement: share of a head's view that all heads have in common, mean over layers and requests;
    `spread` its standard deviation over them. `overlap`: correlation of a request's view with the
    prefix's popularity. `smooth`: tokens that are important together.
    """

    agreement: float = 0.75
    spread: float = 0.2
    overlap: float = 0.95
    sharpness: float = 1.5
    smooth: int = 64


class Prefix:
    """One prefix: tokens, and keys and values of a layer on request.

    Keys are kept, once made, until `forget`.
    """

    def __init__(self, shape: Shape, n_tokens: int, seed: int, smooth: int) -> None:
        self.shape = shape
        self.n_tokens = n_tokens
        self.seed = seed
        self.smooth = smooth
        self._kept: dict[int, torch.Tensor] = {}
        rng = np.random.default_rng([seed, 0])
        self.tokens = rng.integers(0, 50_000, n_tokens, dtype=np.int32)

    def keys(self, layer: int) -> torch.Tensor:
        """[n_kv_heads, n_tokens, head_dim] in the shape's dtype, token-major memory."""
        if layer not in self._kept:
            self._kept[layer] = self._keys(layer)
        return self._kept[layer]

    def forget(self) -> None:
        """Let go of the keys."""
        self._kept.clear()

    def _keys(self, layer: int) -> torch.Tensor:
        s, n = self.shape, self.n_tokens
        rng = np.random.default_rng([self.seed, 1, layer])
        half = s.head_dim // 2
        made = np.empty((n, s.n_kv_heads, s.head_dim), dtype=np.float32)
        made[:, :, :half] = rng.standard_normal((n, 1, half), dtype=np.float32)
        made[:, :, half:] = rng.standard_normal((n, s.n_kv_heads, half), dtype=np.float32)
        shared = self._views(rng, 1)
        width = shared.shape[2]
        made[:, :, :width] = shared
        own = self._views(rng, s.n_heads).reshape(n, s.n_kv_heads, -1)
        made[:, :, half : half + own.shape[2]] = own
        return torch.from_numpy(made).to(getattr(torch, s.dtype)).transpose(0, 1)

    def _views(self, rng: Any, n_views: int) -> Floats:
        """[n_tokens, n_views, 1 + topics]: popularity first; smooth over neighbours.

        Runs of rows that are important together begin anywhere: if they began where chunks do,
        position order would be packed already.
        """
        n, smooth = self.n_tokens, self.smooth
        shape = (n_views, 1 + topics_of(self.shape))
        alone = rng.standard_normal((n, *shape), dtype=np.float32)
        runs = rng.standard_normal((n // smooth + 2, *shape), dtype=np.float32)
        run_of = (np.arange(n)[:, None] + rng.integers(smooth, size=n_views)) // smooth
        together = runs[run_of, np.arange(n_views)]
        weight = 0.9 if smooth > 1 else 0.0
        views: Floats = math.sqrt(weight) * together + math.sqrt(1 - weight) * alone
        # A score that falls with the logarithm of the rank is a weight that follows Zipf's law.
        ranks = np.argsort(np.argsort(-views[:, :, 0], axis=0), axis=0) + 1
        views[:, :, 0] = -np.log(ranks / n) - 1
        return views

    def values(self, layer: int) -> torch.Tensor:
        """[n_kv_heads, n_tokens, head_dim]: incompressible and finite."""
        s, rng = self.shape, np.random.default_rng([self.seed, 2, layer])
        return incompressible(rng, s.n_kv_heads, self.n_tokens, s.head_dim, s.dtype)

    def query(self, request: int, layer: int, k: Knobs) -> torch.Tensor:
        """[n_heads, N_NEW, head_dim] of a request's new tokens in a layer."""
        s = self.shape
        rng = np.random.default_rng([self.seed, 3, request, layer])
        topics, half = topics_of(s), s.head_dim // 2
        agree = float(np.clip(rng.normal(k.agreement, k.spread), 0.0, 1.0))
        along, across = k.overlap, math.sqrt(1 - k.overlap**2)
        view = np.zeros((s.n_heads, s.head_dim), dtype=np.float32)
        view[:, 0] = along
        view[:, 1 : 1 + topics] = across * _unit(rng, 1, topics)
        heads = np.arange(s.n_heads)
        own = half + heads % (s.n_heads // s.n_kv_heads) * (1 + topics)  # where each head's begin
        view[heads, own] = along
        at = own[:, None] + np.arange(1, 1 + topics)
        view[heads[:, None], at] = across * _unit(rng, s.n_heads, topics)
        view[:, :half] *= math.sqrt(agree)
        view[:, half:] *= math.sqrt(1 - agree)
        rows = view[:, None] + 0.02 * rng.standard_normal(
            (s.n_heads, N_NEW, s.head_dim), dtype=np.float32
        )
        rows *= k.sharpness * math.sqrt(s.head_dim)
        return torch.from_numpy(rows).to(getattr(torch, s.dtype))

    def suffix_lse(self, request: int, layer: int, query: torch.Tensor) -> torch.Tensor:
        """The part of the softmax that the request's own tokens take."""
        s = self.shape
        rng = np.random.default_rng([self.seed, 4, request, layer])
        keys = rng.standard_normal((s.n_kv_heads, N_NEW, s.head_dim), dtype=np.float32)
        return suffix_lse_of(query, torch.from_numpy(keys).to(query.dtype), s.head_dim**-0.5)


def incompressible(
    rng: Any, n_heads: int, n_tokens: int, head_dim: int, dtype: str = "float16"
) -> torch.Tensor:
    """[n_heads, n_tokens, head_dim] finite 16-bit floats, token-major memory."""
    n_words = n_heads * n_tokens * head_dim // 4
    words = rng.integers(0, 1 << 64, n_words, dtype=np.uint64) & _FINITE
    flat = torch.from_numpy(words.view(np.int16)).view(getattr(torch, dtype))
    return flat.view(n_tokens, n_heads, head_dim).transpose(0, 1)


def topics_of(shape: Shape) -> int:
    """Fewer where heads are small, or many share a key's."""
    return min(N_TOPICS, shape.head_dim // 2 // (shape.n_heads // shape.n_kv_heads) - 1)


def _unit(rng: Any, n: int, dims: int) -> Floats:
    """n directions [n, dims] of length 1."""
    made = rng.standard_normal((n, dims)).astype(np.float32)
    unit: Floats = made / np.linalg.norm(made, axis=1, keepdims=True)
    return unit


# ---- what the knobs made ---------------------------------------------------------------------


def overlap_with_average(chosen: list[npt.NDArray[np.int64]], n_tokens: int) -> float:
    """Mean share of each choice that is among as many top rows of the average order.

    The average order ranks rows by how many of the choices hold them: the order that repacking
    uses. Needs at least two choices.
    """
    counts = np.zeros(n_tokens, dtype=np.int64)
    for positions in chosen:
        counts[positions] += 1
    shares = []
    for positions in chosen:
        mine = np.zeros(n_tokens, dtype=bool)
        mine[positions] = True
        order = np.argsort(-(counts - mine), kind="stable")  # by what the others chose
        shares.append(float(mine[order[: len(positions)]].mean()))
    return float(np.mean(shares))


def density(positions: npt.NDArray[np.int64], chunk: int) -> float:
    """Share of the rows of touched chunks that were chosen (the paper's Fig 5a)."""
    return len(positions) / (len(np.unique(positions // chunk)) * chunk)
