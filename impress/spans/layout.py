"""Where a span's rows lie: planes, chunks, pieces. Pure arithmetic (docs/FORMAT.md).

A span's data is one logical space: for each layer its K plane, then its V plane; after them any
probe records. A plane is one chunk per window; a chunk is whole pieces; a piece is whole rows,
padded to a multiple of 4 KiB. A probe record's chunk is one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from impress.types import Geometry
from tiers.base import PAGE, round_up

K: Final = 0
V: Final = 1
#: Padding a piece may carry, as a share of its bytes, before more rows are put in it.
MOST_PADDING: Final = 0.02


@dataclass(frozen=True, slots=True)
class PlaneLayout:
    """Pieces of one plane: `piece_rows` rows in `piece_bytes`, `pieces` of them to a chunk."""

    row_bytes: int
    piece_rows: int
    piece_bytes: int
    pieces: int

    @classmethod
    def of(cls, row_bytes: int, window: int) -> PlaneLayout:
        """Fewest rows a piece, a power of two, with ≥ 4 KiB and ≤ 2 % padding; at most a window."""
        rows = 1
        while rows < window:
            padded = round_up(rows * row_bytes)
            if rows * row_bytes >= PAGE and padded - rows * row_bytes <= MOST_PADDING * padded:
                break
            rows *= 2
        return cls(row_bytes, rows, round_up(rows * row_bytes), window // rows)

    @property
    def chunk_bytes(self) -> int:
        return self.piece_bytes * self.pieces

    @property
    def dense(self) -> bool:
        """No padding: rows follow each other without gaps."""
        return self.piece_rows * self.row_bytes == self.piece_bytes


@dataclass(frozen=True, slots=True)
class SpanLayout:
    """Offsets in the data space of a span of `n_windows`, and places in its sums table.

    `planes` are K, V, then one per probe record. K and V alternate layer by layer; each probe
    record follows after them as a run of layers of its own.
    """

    planes: tuple[PlaneLayout, ...]
    n_layers: int
    n_windows: int

    @classmethod
    def of(
        cls, geometry: Geometry, window: int, n_windows: int, probe_bytes: Sequence[int] = ()
    ) -> SpanLayout:
        """`probe_bytes`: of each probe record, the bytes of one window."""
        rows = (geometry.k_row_bytes, geometry.v_row_bytes)
        kv = [PlaneLayout.of(row_bytes, window) for row_bytes in rows]
        probes = [PlaneLayout(n, 1, round_up(n), 1) for n in probe_bytes]
        return cls((*kv, *probes), geometry.n_layers, n_windows)

    @property
    def data_bytes(self) -> int:
        n_bytes = sum(plane.chunk_bytes for plane in self.planes)
        return self.n_layers * self.n_windows * n_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk, K and V."""
        return self.planes[K].chunk_bytes + self.planes[V].chunk_bytes

    @property
    def n_sums(self) -> int:
        return self.n_layers * self.n_windows * sum(plane.pieces for plane in self.planes)

    def chunk_off(self, layer: int, plane: int, window: int) -> int:
        """Data-space offset of one chunk of a plane."""
        return self._place(layer, plane, window, [p.chunk_bytes for p in self.planes])

    def sums_at(self, layer: int, plane: int, window: int) -> int:
        """Index of one chunk's first piece in the sums table, which is in data-space order."""
        return self._place(layer, plane, window, [p.pieces for p in self.planes])

    def _place(self, layer: int, plane: int, window: int, sizes: list[int]) -> int:
        if plane in (K, V):
            at = layer * (sizes[K] + sizes[V]) + (sizes[K] if plane == V else 0)
        else:
            at = self.n_layers * sum(sizes[:plane]) + layer * sizes[plane]
        return at * self.n_windows + window * sizes[plane]
