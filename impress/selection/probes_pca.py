"""The PCA sketch: all KV heads' keys on their joint principal axes, then in four bits.

Heads are taken together in blocks of at most 512 dimensions (all of a small model's), because
neighbouring heads share structure and a block's product costs no more than the plain one.

    keys of a block [dims] − mean ─axes [dims, rank], ÷ spread→ z ─int4, a scale per 32→ record
    score of head h = q·mean_h + (q · axes_h × spread) · z

Coefficients are divided by their standard deviations, so that sharing a scale costs the small ones
nothing.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from impress.errors import BadInput, ImpressError
from impress.selection.quant import (
    Floats,
    dequantise,
    floats_of,
    n_scales,
    pack_codes,
    packed_bytes,
    quantise,
    records_tensor,
    unpack_codes,
)
from impress.selection.scores import Product, Scored, sketch_dtype
from impress.selection.scratch import scratch
from impress.spans.rows import host_words, torch_module
from impress.types import Geometry
from tiers.base import Bytes

if TYPE_CHECKING:
    import torch

#: Dimensions taken together.
MOST_DIMS: Final = 512
#: Coefficients that share a scale.
GROUP: Final = 32
BITS: Final = 4
#: Tokens a fit looks at, spread over those given; and tokens encoded at once.
FIT_TOKENS: Final = 4096
_BLOCK_TOKENS: Final = 512

_MAGIC: Final = b"impPCA1\0"
#: Magic, digest of what follows, sizes. Nothing reads this digest: one digest names all layers'
#: parameters together (impress.spans.params).
_HEADER: Final = struct.Struct("<8s16s4I")


class Basis(NamedTuple):
    """Parameters of one layer, read from bytes without a copy."""

    mean: Floats  # [n_kv_heads, head_dim]
    residual: Floats  # [n_kv_heads]: mean squared error of a dimension, quantisation included
    axes: list[Floats]  # of each block [heads * head_dim, rank]
    spreads: list[Floats]  # of each block [rank]: standard deviation along each axis


@dataclass(frozen=True, slots=True)
class Pca:
    """Joint PCA at `num`/`den` of the rank, four bits a coefficient. Needs params; see `fit`.

    A record is, block after block, [scales][codes], each block padded to an even size.
    """

    name: str
    num: int
    den: int
    group: int = 1
    fallback: str = "int4-v2"
    all_heads: bool = True

    def probe_bytes(self, geometry: Geometry) -> int:
        return sum(self._block_bytes(rank) for _, rank in self._shape(geometry))

    def encode(self, keys: Any, geometry: Geometry, params: bytes | None = None) -> Bytes:
        basis = self._basis(params, geometry)
        words = host_words(keys, geometry)
        m = words.shape[1]
        records = np.zeros((m, self.probe_bytes(geometry)), dtype=np.uint8)
        for at in range(0, m, _BLOCK_TOKENS):
            rows = slice(at, at + _BLOCK_TOKENS)
            values = floats_of(words[:, rows], geometry.dtype) - basis.mean[:, None]
            first = byte = 0
            for n_heads, rank in self._shape(geometry):
                block = first // self._heads(geometry)
                end = byte + self._block_bytes(rank)
                z = _joint(values[first : first + n_heads]) @ basis.axes[block]
                z /= basis.spreads[block]
                self._encode_block(z, records[rows, byte:end])
                first, byte = first + n_heads, end
        return records

    def score(
        self, records: Any, query: torch.Tensor, geometry: Geometry, scaling: float,
        params: bytes | None = None,
    ) -> Iterator[Scored]:  # fmt: skip
        module = torch_module()
        basis = self._basis(params, geometry)
        raw = records_tensor(records, query.device)
        kind = sketch_dtype(raw.device.type, geometry.dtype)
        per_kv, dim = geometry.n_heads // geometry.n_kv_heads, geometry.head_dim
        most_rows = self._heads(geometry) * per_kv * query.shape[1]
        like = module.empty(0, dtype=kind, device=raw.device)
        with scratch(raw.device) as take:
            multiply = Product(most_rows, len(raw), like, take)
            first = byte = 0
            axes = [a * spread for a, spread in zip(basis.axes, basis.spreads, strict=True)]
            for (n_heads, rank), wide in zip(self._shape(geometry), axes, strict=True):
                heads = slice(first, first + n_heads)
                part = (
                    query[first * per_kv : (first + n_heads) * per_kv].to(module.float32) * scaling
                )
                rows = part.reshape(n_heads, -1, dim)  # [kv heads, query heads of one * q, dim]
                on = module.tensor(wide, device=raw.device).view(n_heads, dim, rank)
                z = self._decode_block(raw[:, byte : byte + self._block_bytes(rank)], rank)
                flat = module.bmm(rows, on).reshape(-1, rank)
                scores = multiply(flat.to(kind), z.to(kind))
                mean, residual = (
                    module.tensor(values[heads], device=raw.device)
                    for values in (basis.mean, basis.residual)
                )
                scores += module.bmm(rows, mean[:, :, None]).reshape(-1, 1)
                noise = rows.square().sum(dim=-1) * residual[:, None]
                shape = part.shape[:2]
                yield Scored(scores.view(*shape, -1), noise.view(shape))
                first, byte = first + n_heads, byte + self._block_bytes(rank)

    def fit(self, keys: Any, geometry: Geometry) -> bytes:
        """Mean, axes and residuals of one layer's keys [n_kv_heads, m, head_dim].

        Deterministic. Wants some hundreds of tokens: axes beyond the m-th are arbitrary. Takes
        about 0.1 s per 512 dimensions.
        """
        words = host_words(keys, geometry)
        if not words.shape[1]:
            raise BadInput(f"{self.name}: no keys to fit to")
        step = -(-words.shape[1] // FIT_TOKENS)
        values = floats_of(words[:, ::step], geometry.dtype)
        mean = values.mean(axis=1)
        values -= mean[:, None]
        residual = np.empty(geometry.n_kv_heads, dtype=np.float32)
        blocks, first = [], 0
        for n_heads, rank in self._shape(geometry):
            part = _joint(values[first : first + n_heads])
            axes, spread = _principal(part, rank)
            error = part - (self._coarse(part @ axes / spread) * spread) @ axes.T
            by_head = error.reshape(len(part), n_heads, -1)
            residual[first : first + n_heads] = np.square(by_head).mean(axis=(0, 2))
            blocks += [axes, spread]
            first += n_heads
        body = b"".join(a.tobytes() for a in (mean, residual, *blocks))
        sizes = (geometry.n_kv_heads, geometry.head_dim, self.num, self.den)
        return _HEADER.pack(_MAGIC, _digest(body), *sizes) + body

    # ---- inside ----------------------------------------------------------------------------

    def _heads(self, geometry: Geometry) -> int:
        """KV heads of a block; the last may have fewer."""
        return max(1, min(geometry.n_kv_heads, MOST_DIMS // geometry.head_dim))

    def _shape(self, geometry: Geometry) -> list[tuple[int, int]]:
        """(KV heads, rank) of each block."""
        per, total = self._heads(geometry), geometry.n_kv_heads
        heads = [min(per, total - first) for first in range(0, total, per)]
        return [(n, max(1, n * geometry.head_dim * self.num // self.den)) for n in heads]

    def _block_bytes(self, rank: int) -> int:
        size = 2 * n_scales(rank, GROUP) + packed_bytes(rank, BITS)
        return size + size % 2

    def _encode_block(self, z: Floats, dest: Bytes) -> None:
        codes, scales = quantise(z, BITS, GROUP)
        split = 2 * scales.shape[-1]
        dest[:, :split] = scales.view(np.uint8)
        pack_codes(codes, BITS, dest[:, split : split + packed_bytes(z.shape[-1], BITS)])

    def _decode_block(self, record: torch.Tensor, rank: int) -> torch.Tensor:
        module = torch_module()
        split = 2 * n_scales(rank, GROUP)
        codes = module.empty(len(record), rank, dtype=module.uint8, device=record.device)
        unpack_codes(record[:, split:], rank, BITS, codes)
        scales = record[:, :split].view(module.float16).to(module.float32)
        return dequantise(codes, scales, BITS, GROUP)

    def _coarse(self, z: Floats) -> Floats:
        """z as it comes back from a record."""
        codes, scales = quantise(z, BITS, GROUP)
        wide = np.repeat(scales.astype(np.float32), GROUP, axis=-1)[:, : z.shape[-1]]
        back: Floats = (codes.astype(np.float32) + np.float32(0.5 - (1 << (BITS - 1)))) * wide
        return back

    def _basis(self, params: bytes | None, geometry: Geometry) -> Basis:
        """Views into params. Raises ImpressError when they are missing or not this codec's."""
        sizes = (geometry.n_kv_heads, geometry.head_dim, self.num, self.den)
        shape = self._shape(geometry)
        n_heads, dim = geometry.n_kv_heads, geometry.head_dim
        n = n_heads * (dim + 1) + sum((heads * dim + 1) * rank for heads, rank in shape)
        if params is None:
            raise ImpressError(f"{self.name}: no parameters (until they are fitted use int4-v2)")
        if len(params) != _HEADER.size + 4 * n or _HEADER.unpack_from(params)[2:] != sizes:
            raise ImpressError(f"{self.name}: the parameters given are another codec's or model's")
        flat = np.frombuffer(params, dtype=np.float32, offset=_HEADER.size)
        mean, at = flat[: n_heads * dim].reshape(n_heads, dim), n_heads * (dim + 1)
        basis = Basis(mean, flat[n_heads * dim : n_heads * (dim + 1)], [], [])
        for heads, rank in shape:
            end = at + heads * dim * rank
            basis.axes.append(flat[at:end].reshape(heads * dim, rank))
            basis.spreads.append(flat[end : end + rank])
            at = end + rank
        return basis


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()


def _joint(values: Floats) -> Floats:
    """[heads, m, dim] as [m, heads * dim]."""
    return np.ascontiguousarray(values.transpose(1, 0, 2)).reshape(values.shape[1], -1)


def _principal(centred: Floats, rank: int) -> tuple[Floats, Floats]:
    """The first axes [dims, rank], largest variance first, signs fixed, and their spreads."""
    covariance = centred.T.astype(np.float64) @ centred / len(centred)
    variances, axes = np.linalg.eigh(covariance)
    first = axes[:, ::-1][:, :rank]
    peaks = np.abs(first).argmax(axis=0)
    signs = np.where(first[peaks, np.arange(first.shape[1])] < 0, -1.0, 1.0)
    spread = np.sqrt(np.maximum(variances[::-1][:rank], 1e-8 * variances[-1] + 1e-30))
    return np.ascontiguousarray(first * signs, dtype=np.float32), spread.astype(np.float32)
