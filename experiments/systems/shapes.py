"""Shapes of the models whose prefixes are served: enough to count operations and bytes.

Weights never exist here. Keys and values are made per layer (`generate.py`), so an experiment may
take fewer layers than the model has; it then says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from impress.types import DTYPES, Geometry

#: Tokens of a window, for every prefix.
WINDOW: Final = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """One decoder: `ffn` is the width of its MLP, `gated` whether that has three matrices."""

    name: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    gated: bool = False
    dtype: str = "float16"

    @property
    def hidden(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def layer_params(self) -> int:
        """Weights of one layer that every token is multiplied with."""
        kv = self.n_kv_heads * self.head_dim
        attention = 2 * self.hidden * (self.hidden + kv)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    def geometry(self, n_layers: int) -> Geometry:
        """The geometry of a store of `n_layers` of it."""
        return Geometry(n_layers, self.n_heads, self.n_kv_heads, self.head_dim, self.dtype)

    @property
    def row_bytes(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.n_kv_heads * self.head_dim * DTYPES[self.dtype]


SHAPES: Final = {
    shape.name: shape
    for shape in (
        Shape("opt-6.7b", 32, 32, 32, 128, 16384),
        Shape("opt-13b", 40, 40, 40, 128, 20480),
        Shape("opt-30b", 48, 56, 56, 128, 28672),
        Shape("llama-3-8b", 32, 32, 8, 128, 14336, gated=True, dtype="bfloat16"),
    )
}
