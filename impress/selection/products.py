"""Products of a query with low-bit codes, as fast as the processor allows. Pure; memory reused.

Codes stand for (u + 1/2 − 2^(b−1)) × scale (impress.selection.quant), so with c = 2^(b−1) − 1/2

    rows · keys = (rows · u − c Σ rows) × scale
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, Protocol

from impress.selection.quant import unpack_codes
from impress.selection.scores import Product, sketch_dtype
from impress.selection.scratch import Take
from impress.spans.rows import torch_module

if TYPE_CHECKING:
    import torch


#: Keeps int32 sums in range (127 · 15 · ratio · head_dim / 2) for heads of up to 2,048.
_MOST_RATIO: Final = 1024.0
#: Up to this many rows, products are made codes first.
_FEW_ROWS: Final = 32
#: Least head_dim for integer products: over one dimension, half of two, torch's are garbage.
_LEAST_DIM: Final = 3
#: A row's channels of less than this share of its largest are some two of 127 steps at most, so
#: rounding takes a large part of each, the same from all tokens; where more than _MOST_SMALL of a
#: row's are such, they may together matter more than the largest.
_SMALL: Final = 1 / 64
_MOST_SMALL: Final = 1 / 4


class CodeProduct(Protocol):
    """Products of one KV head after the other, made for the rows [n_kv, r, dim] of all of them."""

    def __call__(self, kv: int, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Rows of a KV head on its packed codes uint8 [n, bytes] with scales float32 [n].

        float32 [r, n], overwritten by the next call.
        """


def code_product(rows: torch.Tensor, n: int, bits: int, dtype: str, take: Take) -> CodeProduct:
    """The best this device has, for rows float32 [n_kv, r, dim] and n tokens of codes.

    `dtype` is the store's: where products are made in floats, a float32 store's are in float32.
    """
    whole = rows.shape[-1] >= _LEAST_DIM and integer_products(rows.device.type)
    if not whole or _too_uneven(rows):
        return FloatProduct(rows.to(sketch_dtype(rows.device.type, dtype)), n, bits, take)
    if bits == 4 and rows.shape[-1] % 2 == 0:
        return HalvesProduct(rows, n, take)
    return IntegerProduct(rows, n, bits, take)


def device_products(
    rows: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bits: int, dtype: str
) -> torch.Tensor:
    """As FloatProduct, for some KV heads at once: rows float32 [heads, r, dim] on packed codes
    uint8 [n, heads, bytes] with scales float32 [heads, n]; float32 [heads, r, n]."""
    n, heads, dim = len(packed), len(rows), rows.shape[-1]
    rows = rows.to(sketch_dtype(rows.device.type, dtype))
    codes = torch_module().empty(n * heads, dim, dtype=packed.dtype, device=packed.device)
    unpack_codes(packed.reshape(n * heads, -1), dim, bits, codes)
    wide = codes.to(rows.dtype).view(n, heads, dim).permute(1, 2, 0)
    scores = (rows @ wide).float().sub_(_centres(rows, bits)).mul_(scales[:, None])
    made: torch.Tensor = scores
    return made


class FloatProduct:
    """Products of codes made floats of the rows' dtype, on their device: runs everywhere."""

    def __init__(self, rows: torch.Tensor, n: int, bits: int, take: Take) -> None:
        module = torch_module()
        self._rows, self._bits = rows, bits
        self._centres = _centres(rows, bits)
        shape = (n, rows.shape[-1])
        self._codes = take(shape, module.uint8)
        self._wide = take(shape, rows.dtype)
        self._multiply = Product(rows.shape[1], n, rows, take)

    def __call__(self, kv: int, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        unpack_codes(packed, self._codes.shape[1], self._bits, self._codes)
        scores = self._multiply(self._rows[kv], self._wide.copy_(self._codes))
        return scores.sub_(self._centres[kv]).mul_(scales)


class IntegerProduct:
    """int8 products on the host; rows are rounded to 8 bits, finer than the codes are except where
    they are `_too_uneven`."""

    def __init__(self, rows: torch.Tensor, n: int, bits: int, take: Take) -> None:
        module = torch_module()
        self._bits = bits
        whole, steps = _rounded(rows)
        self._rows, self._steps = whole.to(module.int8).unbind(), steps.unbind()
        self._centres = (steps * _centres(whole, bits)).unbind()
        self._codes = take((n, rows.shape[-1]), module.uint8)
        self._dots = _Dots(rows.shape[1], n, 1, take)

    def __call__(self, kv: int, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        unpack_codes(packed, self._codes.shape[1], self._bits, self._codes)
        self._dots.multiply(0, self._rows[kv], self._codes)
        return self._dots.floats(self._steps[kv]).sub_(self._centres[kv]).mul_(scales)


class HalvesProduct:
    """As IntegerProduct, for 4-bit codes, without unpacking the high halves.

    A byte read as int8 is x = 16·(hi − 8) + lo, so that

        q_hi·hi + q_lo·lo = (q_hi / 16)·x + (q_lo − q_hi / 16)·lo + 8 Σ q_hi

    The two products are made with steps whose ratio is whole, so they add up as integers. The ratio
    is the same for all rows of a head, which are first scaled to one size.
    """

    def __init__(self, rows: torch.Tensor, n: int, take: Take) -> None:
        module = torch_module()
        half = rows.shape[-1] // 2
        peaks = _peaks(rows)
        rows = rows / peaks
        most = rows.abs().amax(dim=1, keepdim=True)
        most_low = most[..., :half].amax(dim=-1, keepdim=True)
        most_high = most[..., half:].amax(dim=-1, keepdim=True)
        steps = module.maximum(most_high / 16, most_low / (_MOST_RATIO - 1)) / 127
        steps.clamp_(min=1e-30)
        high = (rows[..., half:] / (16 * steps)).round_()
        left = rows[..., :half] - high * steps
        ratios = (left.abs().amax(dim=(1, 2), keepdim=True) / (127.0 * steps)).ceil_()
        ratios.nan_to_num_(nan=1.0).clamp_(1, 2 * _MOST_RATIO)  # a query of nan scores nan
        low = (left / (ratios * steps)).round_().clamp_(-127, 127)
        by_row = steps * peaks
        self._steps, self._ratios = by_row.unbind(), ratios.flatten().to(module.int64).tolist()
        self._high, self._low = high.to(module.int8).unbind(), low.to(module.int8).unbind()
        # In steps, q_hi = 16 high and q_lo = low × ratio + high: 8 Σ q_hi − 7.5 Σ (q_hi + q_lo)
        tops = high.sum(dim=-1, keepdim=True)
        centres = 8 * tops - 7.5 * (low.sum(dim=-1, keepdim=True) * ratios + tops)
        self._centres = (by_row * centres).unbind()
        self._bytes = take((n, half), module.uint8)
        self._dots = _Dots(rows.shape[1], n, 2, take)

    def __call__(self, kv: int, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        # In place throughout: what one head takes then stays in a core's own cache.
        raw, dots = self._bytes.copy_(packed), self._dots
        dots.multiply(0, self._high[kv], raw)
        dots.multiply(1, self._low[kv], raw.bitwise_and_(15))
        dots.add(self._ratios[kv])
        return dots.floats(self._steps[kv]).add_(self._centres[kv]).mul_(scales)


class _Dots:
    """Integer products of rows int8 [r, k] with codes [n, k] as float32 [r, n], reused.

    With few rows, codes come first: they are then read as they lie, where rows first would
    rearrange them, and a product with the identity turns the result the way softmax wants it.
    """

    def __init__(self, r: int, n: int, n_parts: int, take: Take) -> None:
        module = torch_module()
        self._turns = r <= _FEW_ROWS
        shape = (n_parts, n, r) if self._turns else (n_parts, r, n)
        self._parts = take(shape, module.int32).unbind()
        self._floats = self._parts[0].view(module.float32)
        if self._turns:
            # A caller's torch.set_default_device is not asked.
            self._identity = module.eye(r, dtype=module.float32, device=self._parts[0].device)
            self._turned = take((r, n), module.float32) if n_parts == 1 else self._second(r, n)

    def _second(self, r: int, n: int) -> torch.Tensor:
        """The second part's memory, which is free once it has been added to the first."""
        return self._parts[1].view(-1).view(torch_module().float32).view(r, n)

    def multiply(self, part: int, rows: torch.Tensor, codes: torch.Tensor) -> None:
        module = torch_module()
        signed = codes.view(module.int8)
        pair = (signed, rows.t()) if self._turns else (rows, signed.t())
        module._int_mm(*pair, out=self._parts[part])

    def add(self, ratio: int) -> None:
        """Add the second part, times a whole number, to the first."""
        self._parts[0].add_(self._parts[1], alpha=ratio)

    def floats(self, steps: torch.Tensor) -> torch.Tensor:
        """The first part times `steps` [r, 1], to be overwritten."""
        floats = self._floats.copy_(self._parts[0])
        if not self._turns:
            return floats.mul_(steps)
        module = torch_module()
        turned: torch.Tensor = module.mm(self._identity * steps, floats.t(), out=self._turned)
        return turned


@cache
def integer_products(device_type: str) -> bool:
    """Whether int8 matrix products are there and fast: a processor with VNNI, through oneDNN."""
    module = torch_module()
    ask = getattr(module.cpu, "_is_vnni_supported", None)
    usable = device_type == "cpu" and module.backends.mkldnn.is_available()
    return usable and ask is not None and hasattr(module, "_int_mm") and bool(ask())


def _rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [n_kv, r, dim] as whole numbers up to 127, in float32, and their steps [n_kv, r, 1]."""
    steps = _peaks(rows) / 127.0
    return (rows / steps).round_(), steps


def _too_uneven(rows: torch.Tensor) -> bool:
    """Whether in a row many channels are small beside its largest one, but not zero."""
    sizes = rows.abs()
    least = sizes.amax(dim=-1, keepdim=True).mul_(_SMALL)
    most = _MOST_SMALL * rows.shape[-1]
    small = sizes < least
    if not bool((small.sum(dim=-1) > most).any()):
        return False
    return bool((small.logical_and_(sizes > 0).sum(dim=-1) > most).any())


def _peaks(rows: torch.Tensor) -> torch.Tensor:
    """The largest of each row, [n_kv, r, 1]: by the largest of all, a small row would be rounded
    away, and no estimate would tell of it."""
    return rows.abs().amax(dim=-1, keepdim=True).clamp_(min=1e-30)


def _centres(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """c Σ rows, float32 [n_kv, r, 1]."""
    module = torch_module()
    sums: torch.Tensor = rows.sum(dim=-1, keepdim=True, dtype=module.float32)
    return sums * ((1 << (bits - 1)) - 0.5)
