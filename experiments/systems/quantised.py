"""Everything of a prefix in 8 or 4 bits, read in sequence: the rival that chooses nothing.

Rows are quantised per token and head, with a float16 scale per 32 dimensions, written to a segment
of their own and read by the same sessions, caches and threads that serve full rows. Only the width
of a row differs, and prefixes are found by number, so no look-up is paid. Dequantising is the
device's work: emulated (`Compute.dequantise`).
"""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import Any, Final

import numpy as np

from experiments.common import Unable
from experiments.systems.shapes import WINDOW
from impress.cache.copies import Copies
from impress.config import Config
from impress.read.parts import Source
from impress.read.reading import Reading
from impress.read.session import Lease, Session
from impress.selection.quant import (
    floats_of,
    n_scales,
    pack_codes,
    packed_bytes,
    quantise,
)
from impress.spans.format import SpanRecord
from impress.spans.layout import K, PlaneLayout, SpanLayout, V
from impress.spans.params import Params
from impress.spans.rows import host_words, pack
from impress.stats import Counters
from impress.tree.catalog import Held
from impress.types import Geometry
from impress.usage.history import History, budget_of
from tiers.base import Extent, sums_of
from tiers.iopool import IoPool
from tiers.slots import aligned
from tiers.ssd import SsdTier

#: Dimensions that share a float16 scale: int4 is then .281 of 16 bits.
GROUP: Final = 32
#: Tokens quantised at once.
_BLOCK: Final = 512


def row_geometry(geometry: Geometry, bits: int) -> Geometry:
    """Rows of codes and scales, as rows of one head of 16-bit words.

    They fill the padding of their pieces: without padding they are read into place.
    """
    dim = geometry.head_dim
    n_bytes = geometry.n_kv_heads * (2 * n_scales(dim, GROUP) + packed_bytes(dim, bits))
    pieces = PlaneLayout.of(-(-n_bytes // 2) * 2, WINDOW)
    return Geometry(
        geometry.n_layers, 1, 1, pieces.piece_bytes // pieces.piece_rows // 2, "float16"
    )


def quantised_rows(rows: Any, geometry: Geometry, bits: int) -> Any:
    """uint16 [1, n, words] of rows [n_kv_heads, n, head_dim]: scales of all heads, then codes."""
    words = host_words(rows, geometry)
    heads, n, dim = words.shape
    made = np.zeros((n, 2 * row_geometry(geometry, bits).head_dim), dtype=np.uint8)
    of_scales, of_codes = n_scales(dim, GROUP), packed_bytes(dim, bits)
    scales = made[:, : 2 * heads * of_scales].view(np.float16)
    for at in range(0, n, _BLOCK):
        block = slice(at, at + _BLOCK)
        values = floats_of(words[:, block], geometry.dtype)
        codes, by_head = quantise(values, bits, GROUP)
        scales[block] = by_head.transpose(1, 0, 2).reshape(-1, heads * of_scales)
        part = np.zeros((codes.shape[1], heads, of_codes), dtype=np.uint8)
        pack_codes(codes.transpose(1, 0, 2), bits, part)
        first = 2 * heads * of_scales
        made[block, first : first + heads * of_codes] = part.reshape(len(part), -1)
    return made.view(np.uint16)[None]


class QuantisedStore:
    """Prefixes by number, in one directory. Written once; sessions are impress's own."""

    def __init__(
        self, folder: Path, geometry: Geometry, bits: int, config: Config,
        sources: dict[int, Source] | None = None,
    ) -> None:  # fmt: skip
        """`sources`: of an earlier one in this folder, which is then only read."""
        self.geometry = row_geometry(geometry, bits)
        self.bits = bits
        self._wide = geometry
        self._window = config.window
        self.sources: dict[int, Source] = {} if sources is None else sources
        self.ssd = SsdTier(folder, config.segment_bytes, None, read_only=sources is not None)
        self.pool = IoPool(config.io_threads)
        self.copies = Copies(config, self.geometry, config.window, [])
        self._reading = Reading(
            self.geometry, config, self.ssd, self.copies, self.pool, self.copies.buffers(),
            Counters(), lambda _span: None,
            History(geometry.n_layers, config.window, budget_of(config.dram_bytes)), lambda: None,
            Params(folder / "params", write=False),
        )  # fmt: skip

    def begin(self, number: int, n_tokens: int) -> None:
        """Make room for a prefix, whole windows of it; `put` its layers next."""
        n_windows = n_tokens // self._window
        layout = SpanLayout.of(self.geometry, self._window, n_windows)
        slot = self.ssd.reserve(layout.data_bytes)
        if slot is None:
            raise Unable(f"{self.ssd.folder}: no room on the disk")
        nothing = Extent(0, 0, 0)
        record = SpanRecord(
            number, b"", b"", b"", b"", 0, n_windows, self._window, nothing, slot.parts
        )
        sums = np.zeros(layout.n_sums, dtype=np.uint64)
        held = Held(record, 0, n_windows)
        self.sources[number] = Source(held, layout, slot, sums, (), 0)

    def put(self, number: int, layer: int, keys: Any, values: Any) -> None:
        """Quantise and write a layer [n_kv_heads, n, head_dim]."""
        source = self.sources[number]
        n = source.count * self._window
        for plane, rows in ((K, keys), (V, values)):
            shape = source.layout.planes[plane]
            words = quantised_rows(rows[:, :n], self._wide, self.bits)
            data = aligned(source.count * shape.chunk_bytes)
            pack(words, data, shape)
            at = source.layout.sums_at(layer, plane, 0)
            pieces = source.count * shape.pieces
            source.sums[at : at + pieces] = sums_of(data, shape.piece_bytes)
            self.ssd.write(source.slot, source.layout.chunk_off(layer, plane, 0), data)

    def lease(self, number: int) -> Lease:
        """The whole prefix."""
        return Lease(
            [self.sources[number]], self._window, "", self._reading,
            lambda lease, policy, first, in_order: Session(
                lease, policy, self._reading, first, in_order
            ),
            lambda _lease: None, monotonic,
        )  # fmt: skip

    def close(self) -> None:
        self.pool.close(10.0)
        self.ssd.close()

    def __enter__(self) -> QuantisedStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
