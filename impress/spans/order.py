"""The row order of a packed span: in each layer, which row lies where (the paper's mapping list).

A packed span's rows are permuted inside *groups*, runs of whole windows that one tree node viewed
when it was packed (the whole span at its first store); so a node's rows lie in its own chunks.
On disk the order is slot -> row, in memory row -> ordinal (the slot it lies in), both counted from
the span's first row. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from impress.errors import FormatError

Rows = npt.NDArray[np.int64]
Packed = npt.NDArray[np.unsignedinteger[Any]]  # uint16, uint32 from 65,537 rows on


@dataclass(frozen=True, slots=True)
class RowOrder:
    """`ordinals` [n_layers, n_rows]: where each row lies. `epoch`: how often it was remade."""

    ordinals: Packed
    epoch: int = 0

    @classmethod
    def of(cls, slots: npt.NDArray[Any], epoch: int = 0) -> RowOrder:
        """From `slots` [n_layers, n_rows]: the row in each slot. FormatError: not a permutation."""
        ordinals = np.zeros(slots.shape, dtype=_word(slots.shape[1]))
        if slots.size and slots.max() >= slots.shape[1]:
            raise FormatError("row order: a row that the span does not have")
        n_layers, n_rows = slots.shape
        layers = np.arange(n_layers)[:, None]
        found = np.zeros(slots.shape, dtype=bool)
        found[layers, slots] = True
        if not found.all():
            raise FormatError("row order: a row is there twice")
        ordinals[layers, slots] = np.arange(n_rows, dtype=ordinals.dtype)
        return cls(ordinals, epoch)

    @property
    def n_bytes(self) -> int:
        return self.ordinals.nbytes

    def at(self, layer: int, rows: Rows) -> Rows:
        """Where these rows lie."""
        found: Rows = self.ordinals[layer].take(rows).astype(np.int64)
        return found

    def run(self, layer: int, first: int, count: int) -> Rows:
        """Where `count` rows from `first` on lie; a copy, the caller's own."""
        return self.ordinals[layer, first : first + count].astype(np.int64)

    def slots(self, layer: int) -> Rows:
        """The row in each slot: the inverse."""
        rows = np.empty(self.ordinals.shape[1], dtype=np.int64)
        rows[self.ordinals[layer]] = np.arange(len(rows))
        return rows

    def encode(self) -> bytes:
        """Slot -> row, layer by layer, as it is on disk."""
        layers = [self.slots(layer) for layer in range(len(self.ordinals))]
        return np.stack(layers).astype(_word(self.ordinals.shape[1]).newbyteorder("<")).tobytes()

    @classmethod
    def decode(cls, raw: bytes, n_layers: int, n_rows: int, epoch: int) -> RowOrder:
        """The inverse of `encode`. Raises FormatError."""
        if len(raw) != n_layers * n_rows * _word(n_rows).itemsize:
            raise FormatError(f"row order: {len(raw)} bytes for {n_layers} layers, {n_rows} rows")
        slots = np.frombuffer(raw, dtype=_word(n_rows).newbyteorder("<"))
        return cls.of(slots.reshape(n_layers, n_rows), epoch)


def order_bytes(n_layers: int, n_rows: int) -> int:
    """Bytes of a row order, on disk and in memory."""
    return n_layers * n_rows * _word(n_rows).itemsize


def by_worth(
    worth: npt.NDArray[np.floating[Any]], groups: Sequence[tuple[int, int]], ordinals: Rows
) -> Rows:
    """The row for each slot: inside each group the most worthy first. Pure.

    `worth` [n_rows]; `groups`: (first row, rows), which tile the span in order; `ordinals`: where
    the rows lie now. Equals keep the order they lie in, so packing twice moves nothing.
    """
    slots = np.empty(len(worth), dtype=np.int64)
    for first, count in groups:
        part = slice(first, first + count)
        slots[part] = first + np.lexsort((ordinals[part], -worth[part]))
    return slots


def _word(n_rows: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if n_rows <= 1 << 16 else np.uint32)
