"""Probe codecs: small records of a layer's keys, by which rows are chosen without reading rows.

A record is `probe_bytes` per group of `group` tokens, group-major, made from whole windows as they
are put. A codec's name is stored with the records: what it means never changes, a new layout
takes a new name. torch is imported only to score.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from impress.errors import ImpressError
from impress.selection.probes_pages import MinMax
from impress.selection.probes_pca import Pca
from impress.selection.products import code_product, device_products
from impress.selection.quant import (
    ERROR_OF_BITS,
    TURNS,
    floats_of,
    pack_codes,
    packed_bytes,
    quantise,
    records_tensor,
    turns_of,
)
from impress.selection.scores import Scored, heads_at_once, key_scores
from impress.selection.scratch import scratch
from impress.spans.rows import host_words, torch_module
from impress.types import DTYPES, Geometry
from tiers.base import Bytes

if TYPE_CHECKING:
    import torch

#: Query heads whose keys the paper probes (section 4.3).
PROBE_HEADS: Final = 3
#: Most bytes of a codec's name, in a span's header.
MOST_NAME: Final = 32
#: Tokens encoded at once: bounds the float32 scratch.
_BLOCK_TOKENS: Final = 256


class ProbeCodec(Protocol):
    """A way of making probe records and of scoring queries on them. Stateless."""

    @property
    def name(self) -> str:
        """As stored on disk."""

    @property
    def group(self) -> int:
        """Tokens of a record; divides the window."""

    @property
    def all_heads(self) -> bool:
        """Whether it scores every query head, by the keys of every KV head."""

    def probe_bytes(self, geometry: Geometry) -> int:
        """Bytes of one group's record."""

    def encode(self, keys: Any, geometry: Geometry, params: bytes | None = None) -> Bytes:
        """Records uint8 [m / group, probe_bytes] of one layer's keys [n_kv_heads, m, head_dim].

        keys: torch tensor or NumPy array of the store's dtype, or its raw words; m whole groups.
        params: what the codec's `fit` made (see `fitted`), None for other codecs.
        """

    def score(
        self, records: Any, query: torch.Tensor, geometry: Geometry, scaling: float,
        params: bytes | None = None,
    ) -> Iterator[Scored]:  # fmt: skip
        """Scores of the first query heads, as many as the codec covers, some heads at a time.

        records uint8 [groups, probe_bytes], contiguous, NumPy (writeable) or torch; query
        [n_heads, q, head_dim] of all heads. The caller may overwrite what is yielded.
        """


@dataclass(frozen=True, slots=True)
class Heads3:
    """The keys of the KV heads that query heads 0–2 use, as stored: [n, heads, head_dim]."""

    name: str = "heads3-v1"
    group: int = 1
    all_heads: bool = False

    def n_kv_heads(self, geometry: Geometry) -> int:
        """KV heads in a record: query heads 0–2 share them under grouped-query attention."""
        last = min(PROBE_HEADS, geometry.n_heads) - 1
        return last // (geometry.n_heads // geometry.n_kv_heads) + 1

    def probe_bytes(self, geometry: Geometry) -> int:
        return self.n_kv_heads(geometry) * geometry.head_dim * DTYPES[geometry.dtype]

    def encode(self, keys: Any, geometry: Geometry, params: bytes | None = None) -> Bytes:
        words = host_words(keys, geometry)[: self.n_kv_heads(geometry)]
        rows = np.ascontiguousarray(words.transpose(1, 0, 2))
        return rows.reshape(words.shape[1], -1).view(np.uint8)

    def keys(self, records: Any, geometry: Geometry, device: torch.device) -> torch.Tensor:
        """The probe heads' keys [heads, n, head_dim], a view of the records."""
        module = torch_module()
        flat = records_tensor(records, device).view(getattr(module, geometry.dtype))
        rows: torch.Tensor = flat.view(len(flat), -1, geometry.head_dim).transpose(0, 1)
        return rows

    def score(
        self, records: Any, query: torch.Tensor, geometry: Geometry, scaling: float,
        params: bytes | None = None,
    ) -> Iterator[Scored]:  # fmt: skip
        keys = self.keys(records, geometry, query.device)
        heads_per_kv = geometry.n_heads // geometry.n_kv_heads
        return key_scores(query[:PROBE_HEADS], keys, scaling, heads_per_kv)


@dataclass(frozen=True, slots=True)
class LowBit:
    """All KV heads' keys in a few bits, a float16 scale per (token, head).

    A record is [scales of the heads][codes of head 0][codes of head 1] …, padded to an even size.
    `turns`: codes are of keys to which `turns_of` was added, by the token's number in its window.
    """

    name: str
    bits: int
    group: int = 1
    all_heads: bool = True
    turns: bool = True

    def probe_bytes(self, geometry: Geometry) -> int:
        size = geometry.n_kv_heads * (2 + packed_bytes(geometry.head_dim, self.bits))
        return size + size % 2

    def encode(self, keys: Any, geometry: Geometry, params: bytes | None = None) -> Bytes:
        words = host_words(keys, geometry)
        n_heads, m, dim = words.shape
        records = np.zeros((m, self.probe_bytes(geometry)), dtype=np.uint8)
        scales = records[:, : 2 * n_heads].view(np.float16)
        codes, turns = self._codes(records, geometry), turns_of(dim) if self.turns else None
        for at in range(0, m, _BLOCK_TOKENS):
            block = slice(at, at + _BLOCK_TOKENS)
            values = floats_of(words[:, block], geometry.dtype)
            made, by_head = quantise(values, self.bits, dim, turns)
            scales[block] = by_head[..., 0].T
            pack_codes(made.transpose(1, 0, 2), self.bits, codes[block])
        return records

    def _codes(self, records: Any, geometry: Geometry) -> Any:
        """The codes [n, n_kv_heads, bytes], a view of NumPy or torch records."""
        n_bytes = packed_bytes(geometry.head_dim, self.bits)
        first = 2 * geometry.n_kv_heads
        flat = records[:, first : first + geometry.n_kv_heads * n_bytes]
        shape = (len(flat), geometry.n_kv_heads, n_bytes)
        return flat.reshape(shape) if isinstance(flat, np.ndarray) else flat.view(shape)

    def score(
        self, records: Any, query: torch.Tensor, geometry: Geometry, scaling: float,
        params: bytes | None = None,
    ) -> Iterator[Scored]:  # fmt: skip
        module = torch_module()
        raw = records_tensor(records, query.device)
        n_kv, n = geometry.n_kv_heads, len(raw)
        codes = self._codes(raw, geometry)
        scales = raw[:, : 2 * n_kv].view(module.float16).t().to(module.float32).contiguous()
        scales *= scaling
        rows = query.to(module.float32).reshape(n_kv, -1, geometry.head_dim)
        squares = scales.square()
        mean = squares.mean(dim=-1, keepdim=True)
        shape = (n_kv, geometry.n_heads // n_kv, query.shape[1])
        noise = (rows.square().sum(dim=-1) * mean * self._error()).view(shape)
        uneven = squares.div_(mean).sub_(1).clamp_(min=0)  # no scale is 0
        added = self._added(rows)  # what `turns` added to each score, in scales
        at_once = heads_at_once(raw.device, (rows.shape[1] + geometry.head_dim) * n)
        if at_once > 1:
            for first in range(0, n_kv, at_once):
                some = slice(first, first + at_once)
                scores = device_products(rows[some], codes[:, some], scales[some], self.bits,
                                         geometry.dtype)  # fmt: skip
                _take_off(scores, added[some], scales[some])
                of_heads = noise[some].flatten(0, 1)
                by_head = uneven[some].repeat_interleave(shape[1], dim=0)
                yield Scored(scores.view(-1, shape[2], n), of_heads, by_head)
            return
        with scratch(raw.device) as take:
            multiply = code_product(rows, n, self.bits, geometry.dtype, take)
            each = (codes.unbind(dim=1), scales.unbind(), noise.unbind(), uneven.unbind())
            for kv, (head, its_scales, *its_noise) in enumerate(zip(*each, strict=True)):
                scores = multiply(kv, head, its_scales)
                _take_off(scores, added[kv], its_scales)
                yield Scored(scores.view(*shape[1:], n), *its_noise)

    def _error(self) -> float:
        """Variance of a dimension, in units of scale², as it is made up for.

        With `turns` twice what it is, except at 2 bits, where it is large: tokens that come out
        heavy do so for their error, too, which makes all others look lighter. Without, what is
        largest comes back exactly.
        """
        return ERROR_OF_BITS[self.bits] * (2 if self.turns and self.bits > 2 else 1)

    def _added(self, rows: torch.Tensor) -> torch.Tensor:
        """[n_kv, r, TURNS]."""
        module, dim = torch_module(), rows.shape[-1]
        turns = turns_of(dim) if self.turns else np.zeros((TURNS, dim), dtype=np.float32)
        added: torch.Tensor = rows @ module.tensor(turns, device=rows.device).t()
        return added


def _take_off(scores: torch.Tensor, added: torch.Tensor, scales: torch.Tensor) -> None:
    """From scores [..., r, n] of tokens from the beginning of a window on: added [..., r, TURNS] by
    their number, times scales [..., n]."""
    n, rest, by = scores.shape[-1], scores.shape[-1] % TURNS, scales.unsqueeze(-2)
    if n > rest:
        in_turn, by_turn = (
            part[..., : n - rest].view(*part.shape[:-1], -1, TURNS) for part in (scores, by)
        )
        in_turn.addcmul_(added.unsqueeze(-2), by_turn, value=-1)
    if rest:
        scores[..., n - rest :].addcmul_(added[..., :rest], by[..., n - rest :], value=-1)


_CODECS: Final[dict[str, ProbeCodec]] = {
    codec.name: codec
    for codec in (
        Heads3(),
        LowBit("int4-v2", 4),
        LowBit("int3-v2", 3),
        LowBit("int2-v2", 2),
        LowBit("int4-v1", 4, turns=False),
        LowBit("int3-v1", 3, turns=False),
        LowBit("int2-v1", 2, turns=False),
        LowBit("int1-v1", 1, turns=False),
        Pca("pca37-v1", 3, 8),
        Pca("pca25-v1", 1, 4),
        Pca("pca12-v1", 1, 8),
        MinMax("pages16-v1", 16),
    )
}

#: Names of impress's own codecs, before anybody registers others.
OWN: Final = frozenset(_CODECS)


def codec_of(name: str) -> ProbeCodec:
    """The codec of a stored name. Raises ImpressError on one this version does not know."""
    codec = _CODECS.get(name)
    if codec is None:
        raise ImpressError(f"probe codec {name!r} is not known here ({', '.join(_CODECS)} are)")
    return codec


def encoded(codec: ProbeCodec, keys: Any, geometry: Geometry, params: bytes | None = None) -> Bytes:
    """Records of one layer's keys, as `ProbeCodec.encode` specifies them. Raises ImpressError on
    others: read as if they were such, they would be those of other tokens."""
    made = codec.encode(keys, geometry, params)
    wanted = (keys.shape[1] // codec.group, codec.probe_bytes(geometry))
    if not isinstance(made, np.ndarray) or made.dtype != np.uint8 or made.shape != wanted:
        got = f"{getattr(made, 'dtype', type(made).__name__)} {getattr(made, 'shape', '')}".strip()
        raise ImpressError(
            f"probe codec {codec.name!r}: encode must return an array of uint8 {wanted}, got {got}"
        )
    return made


def register(codec: ProbeCodec) -> None:
    """Make a codec known by its name. Raises ImpressError when the name is taken, or cannot be
    stored with the records, or a group has no tokens."""
    if not codec.name.isascii() or not 0 < len(codec.name) <= MOST_NAME:
        raise ImpressError(f"probe codec {codec.name!r}: its name wants 1 to 32 ASCII characters")
    if codec.group < 1:
        raise ImpressError(f"probe codec {codec.name!r}: group must be at least 1 token")
    if codec.name in _CODECS:
        raise ImpressError(f"probe codec {codec.name!r} is already known")
    _CODECS[codec.name] = codec


def fitted(codec: ProbeCodec) -> Pca | None:
    """The codec again if it has parameters to fit, else None."""
    return codec if isinstance(codec, Pca) else None
