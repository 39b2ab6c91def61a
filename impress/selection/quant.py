"""Low-bit codes of vectors, and the bytes they are packed in. Pure.

A vector's dimensions share a scale in groups. Codes are mid-rise: with b bits, code u stands for (u
+ 1/2 − 2^(b−1)) × scale, so that all 2^b levels are used and none is zero. Where `turns_of` was
added to the vectors, it has to be taken off again. A byte holds dimensions m apart (m = bytes of
the field), so that unpacking writes runs, not single elements. The high half of a byte of two 4-bit
codes has its top bit flipped: read as int8, the byte is then 16·(high − 8) + low, which a product
can take as it is (impress.selection.products).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from impress.spans.rows import Words, torch_module
from tiers.base import Bytes

if TYPE_CHECKING:
    import torch

Floats = npt.NDArray[np.float32]

#: Bit fields a code is cut into, lowest first: each divides a byte.
_FIELDS: Final = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
#: The largest value in units of scale; at 2 to 8 bits it is the outermost level. Were it clipped,
#: for a smaller squared error, a dimension in which all keys are large would come back smaller in
#: all of them: no noise, but a bias that makes the whole prefix look lighter beside new tokens.
#: (15/16 of it in 4 bits: where such a dimension adds 10 to scores, .065 was missed for .050.)
#: See `turns_of` for the dimensions that are small beside it.
_MOST_STEPS: Final = {1: 1 / 0.6, 2: 1.5, 3: 3.5, 4: 7.5, 8: 127.5}
#: Squared error in units of scale² (1/12: uniform over a step), for Gaussians of 32..128 dims.
ERROR_OF_BITS: Final = {1: 1.8 / 12, 2: 1 / 12, 3: 1 / 12, 4: 1 / 12}
#: Rows after which `turns_of` come again: a window has a multiple of them.
TURNS: Final = 16
_FLIP: Final = 0x80
_MOST_SCALE: Final = 65504.0  # of float16
_LEAST_SCALE: Final = 2.0**-24


def floats_of(words: Words, dtype: str) -> Floats:
    """Elements given as raw words of a store's dtype, in float32. Same shape; a copy."""
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return words.view(np.float16 if dtype == "float16" else np.float32).astype(np.float32)


def packed_bytes(length: int, bits: int) -> int:
    """Bytes of `length` codes."""
    return sum(_field_bytes(length, width) for width in _FIELDS[bits])


def n_scales(length: int, group: int) -> int:
    """Scales of a vector of `length` dimensions, one to `group` of them."""
    return -(-length // group)


def quantise(
    values: Floats, bits: int, group: int, turns: Floats | None = None
) -> tuple[Bytes, npt.NDArray[np.float16]]:
    """Codes uint8 [..., length] and scales float16 [..., n_scales] of values [..., length].

    Error: at most half a scale, except at 1 bit, and where scales are beyond float16's range.
    `turns` [TURNS, length]: in scales, what is added to values [..., m, length] before they become
    codes, row by row in turn; who reads the codes takes it off again.
    """
    length, half = values.shape[-1], 1 << (bits - 1)
    n = n_scales(length, group)
    starts = np.arange(n) * group
    most = np.maximum.reduceat(np.abs(values), starts, axis=-1) if n > 1 else None
    if most is None:
        most = np.abs(values).max(axis=-1, keepdims=True)
    wanted = np.clip(most * np.float32(1 / _MOST_STEPS[bits]), _LEAST_SCALE, _MOST_SCALE)
    scales = wanted.astype(np.float16)
    inverse = np.float32(1.0) / scales.astype(np.float32)
    steps = values * (inverse if n == 1 else np.repeat(inverse, group, axis=-1)[..., :length])
    if turns is not None:
        steps += np.resize(turns, steps.shape[-2:])
    np.floor(steps, out=steps)
    steps += half
    np.clip(steps, 0, 2 * half - 1, out=steps)
    return steps.astype(np.uint8), scales


@lru_cache(8)
def turns_of(length: int) -> Floats:
    """[TURNS, length] in scales: in each column evenly between −1/2 and 1/2, in its own order.

    Part of what codes mean. Each value then errs evenly over a step, whatever it is, and a
    dimension's mean over TURNS rows by 1/32 of a scale at most, also where all its values are alike
    or far smaller than a step.
    """
    # SplitMix64 of 0, 1, …: column d is the order of the TURNS from TURNS·d on.
    z = np.arange(1, TURNS * length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    ranks = z.reshape(length, TURNS).argsort(axis=1).argsort(axis=1).T
    turns = np.ascontiguousarray(ranks, dtype=np.float32)
    turns += np.float32(0.5)
    turns /= np.float32(TURNS)
    turns -= np.float32(0.5)
    turns.flags.writeable = False  # all share it
    return turns


def pack_codes(codes: Bytes, bits: int, dest: Bytes) -> None:
    """Write codes [..., length] as dest [..., packed_bytes]."""
    length, at, shift = codes.shape[-1], 0, 0
    for width in _FIELDS[bits]:
        n_bytes, mask = _field_bytes(length, width), (1 << width) - 1
        field = dest[..., at : at + n_bytes]
        field[...] = 0
        for slot in range(8 // width):
            part = codes[..., slot * n_bytes : (slot + 1) * n_bytes]
            field[..., : part.shape[-1]] |= ((part >> shift) & mask) << (width * slot)
        if width == 4:
            field ^= _FLIP
        at, shift = at + n_bytes, shift + width


def unpack_codes(packed: torch.Tensor, length: int, bits: int, out: torch.Tensor) -> None:
    """The inverse of pack_codes: packed uint8 [n, packed_bytes] to out uint8 [n, length]."""
    module = torch_module()
    at, shift = 0, 0
    for width in _FIELDS[bits]:
        n_bytes, mask = _field_bytes(length, width), (1 << width) - 1
        field = packed[:, at : at + n_bytes]
        for slot in range(8 // width):
            dest = out[:, slot * n_bytes : (slot + 1) * n_bytes]
            source = field[:, : dest.shape[1]]
            part = source >> (width * slot) if slot else source
            if width == 4 and slot:
                part = part ^ (_FLIP >> 4)
            if shift:
                dest.bitwise_or_((part & mask) << shift)
            else:
                module.bitwise_and(part, mask, out=dest)
        at, shift = at + n_bytes, shift + width


def dequantise(codes: torch.Tensor, scales: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Values float32 [n, length] of codes uint8 [n, length] and scales [n, n_scales]."""
    values: torch.Tensor = codes.to(torch_module().float32)
    values += 0.5 - (1 << (bits - 1))
    for i in range(scales.shape[1]):
        values[:, i * group : (i + 1) * group] *= scales[:, i : i + 1]
    return values


def records_tensor(records: Any, device: torch.device) -> torch.Tensor:
    """Probe records uint8 [groups, probe_bytes] on a device; no copy of host memory.

    A NumPy array must be writeable memory (torch warns otherwise); it is not written to.
    """
    module = torch_module()
    tensor = module.from_numpy(records) if isinstance(records, np.ndarray) else records
    moved: torch.Tensor = tensor.to(device)
    return moved


def _field_bytes(length: int, width: int) -> int:
    return -(-length * width // 8)
