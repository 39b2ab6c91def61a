"""The nouns everything else speaks: the geometry of a store, and what its calls return.

Pure data, no I/O; imports nothing heavier than the standard library.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final

from impress.errors import BadInput

#: Bytes of one element, by dtype name. The order is the code in the file format: never reorder.
DTYPES: Final = {"float16": 2, "bfloat16": 2, "float32": 4}

#: Tokens in a window: a store uses one of these sizes.
WINDOWS: Final = (16, 32, 64, 128, 256)

#: Some thirty years: a longer time limit is none, and locks do not accept much larger numbers.
LONGEST_S: Final = 1e9


def an_int(value: Any, what: str) -> int:
    """The value as an int, if it is one (NumPy's are too). Raises BadInput."""
    if not isinstance(value, Integral):
        raise BadInput(f"{what} must be an int, got {value!r}")
    return int(value)


def a_number(value: Any, what: str) -> Any:
    """The value, if it is a number; NumPy's as Python's, which do not wrap. Raises BadInput."""
    if not isinstance(value, Real) or value != value:  # NaN is not itself
        raise BadInput(f"{what} must be a number, got {value!r}")
    return value.item() if hasattr(value, "item") else value


def a_time(value: Any, what: str) -> float:
    """The value in seconds, at most what a lock can wait for. Raises BadInput."""
    try:
        seconds = float(a_number(value, what))
    except OverflowError:  # an int of hundreds of digits
        seconds = math.inf if value > 0 else 0.0
    return min(seconds, LONGEST_S)


def check_layer(layer: object, n_layers: int, what: str) -> None:
    """Raises BadInput. True is refused: NumPy takes it for a mask over every layer's entries."""
    if type(layer) is not int or not 0 <= layer < n_layers:
        raise BadInput(f"{what}: layer {layer!r} is not in 0..{n_layers - 1}")


def layers_of(layers: object, n_layers: int, what: str) -> list[int]:
    """These layers, each once (None: every one). Raises BadInput."""
    if layers is None:
        return list(range(n_layers))
    if not isinstance(layers, Sequence) or isinstance(layers, str | bytes):
        raise BadInput(f"{what}: want a list of layers, got {type(layers).__name__}")
    for layer in layers:
        check_layer(layer, n_layers, what)
    return list(dict.fromkeys(layers))


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of one token's keys and values, the same in every layer.

    `n_heads` counts query heads, `n_kv_heads` stored ones (fewer under grouped-query attention).
    `v_head_dim` defaults to `head_dim`. Raises BadInput on sizes that are not positive or a dtype
    that is not one of float16, bfloat16, float32.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    dtype: str = "float16"
    v_head_dim: int | None = None

    def __post_init__(self) -> None:
        for name in ("n_layers", "n_heads", "n_kv_heads", "head_dim", "v_head_dim"):
            value = getattr(self, name)
            if value is None and name == "v_head_dim":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 16:
                raise BadInput(f"geometry: {name} must be an int in 1..65535, got {value!r}")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise BadInput(
                f"geometry: dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}"
            )
        if self.n_heads % self.n_kv_heads:
            raise BadInput(
                f"geometry: n_heads {self.n_heads} is not a multiple of "
                f"n_kv_heads {self.n_kv_heads}"
            )
        if self.v_head_dim == self.head_dim:  # one spelling, so that equal geometries compare equal
            object.__setattr__(self, "v_head_dim", None)

    @property
    def k_row_bytes(self) -> int:
        """Bytes of one token's keys in one layer."""
        return self.n_kv_heads * self.head_dim * DTYPES[self.dtype]

    @property
    def v_row_bytes(self) -> int:
        """Bytes of one token's values in one layer."""
        return self.n_kv_heads * self.v_dim * DTYPES[self.dtype]

    @property
    def v_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.n_layers * (self.k_row_bytes + self.v_row_bytes)

    def pack(self) -> bytes:
        """Fixed-width form, for digests and file headers (docs/FORMAT.md)."""
        code = list(DTYPES).index(self.dtype)
        sizes = (self.n_layers, self.n_heads, self.n_kv_heads, self.head_dim, self.v_dim)
        return struct.pack("<6H", *sizes, code)

    @classmethod
    def unpack(cls, raw: bytes) -> Geometry:
        """The inverse of `pack`. Raises BadInput on a dtype code this version does not know."""
        *sizes, code = struct.unpack("<6H", raw)
        if code >= len(DTYPES):
            raise BadInput(f"geometry: unknown dtype code {code}")
        layers, heads, kv_heads, k_dim, v_dim = sizes
        return cls(layers, heads, kv_heads, k_dim, list(DTYPES)[code], v_dim)

    def __str__(self) -> str:
        v = f"/{self.v_head_dim}" if self.v_head_dim else ""
        return (
            f"{self.n_layers} layers x {self.n_kv_heads} KV heads (of {self.n_heads}) "
            f"x {self.head_dim}{v} {self.dtype}"
        )


@dataclass(frozen=True, slots=True)
class Prefix:
    """One leaf path, for people: how long, how hot, how it begins."""

    root: bytes
    n_windows: int
    hits: int
    labels: bytes
