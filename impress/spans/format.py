"""Span records v1: the bytes of a header record on disk and of an index value (docs/FORMAT.md).

Pure encode and decode. Everything is little-endian and carries its checksum; bytes that do not
decode raise FormatError, never a guess.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from impress.errors import FormatError
from impress.spans.layout import SpanLayout
from impress.spans.order import RowOrder, order_bytes
from impress.types import Geometry
from tiers.base import PAGE, Bytes, Extent, Read, Slot, Sums, round_up

VERSION: Final = 1
MAGIC: Final = b"IMPRSPAN"
ROW_CODEC_KV: Final = 1  # K plane and V plane apart, rows as the engine made them
ORDER_POSITION: Final = 0  # rows in position order
ORDER_PACKED: Final = 1  # rows permuted by an order section (impress/spans/order.py)
SUM_XXH3_64: Final = 1
SUM_NONE: Final = 0  # the second sum of an entry, for one a GPU can compute

#: Section kinds of a header record. Unknown kinds are skipped by readers.
PARTS, LABELS, IMPORTANCE, SUMS, NAME, ORDER, PROBES = 1, 2, 3, 4, 5, 6, 7
# 8 probe parameters: reserved for later writers of v1.

_FIXED = struct.Struct("<8sHHI16s32s32s32s32sQIII12sHHHHIIQ")
_SECTION = struct.Struct("<HHIQQQ")
_PART = struct.Struct("<IIQQ")
_INDEX = struct.Struct("<HHHHIIII32s32s32s32sIIQQ")
_META = struct.Struct("<152xI4xQQ")  # the last three of _INDEX
_PLACE = struct.Struct("<8xI12x32x32s32s32s")  # the four fields of _INDEX that opening needs
_PROBE = struct.Struct("<32sII32s")
_MOST_SECTIONS = 64
_ORDERS: Final = {ORDER_POSITION: (), ORDER_PACKED: (ORDER,)}  # and the sections each needs


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """What the index keeps about a span: its place in a prefix and on the medium."""

    span_id: int  # also its generation: ids only ever grow
    namespace: bytes
    root: bytes
    key_before: bytes  # key of everything before its first window
    key_after: bytes
    first_window: int  # on the absolute grid
    n_windows: int
    window: int  # tokens
    meta: Extent  # the header record
    parts: tuple[Extent, ...]  # the data space
    labels: bytes = b""  # 4·window bytes per window; empty where the tree holds them
    order: int = ORDER_POSITION

    @property
    def data_bytes(self) -> int:
        return sum(part.length for part in self.parts)

    @property
    def owned_bytes(self) -> int:
        """Bytes of segments that it owns, its header's included."""
        return self.data_bytes + self.meta.length

    @property
    def end_window(self) -> int:
        """One past its last window, on the absolute grid."""
        return self.first_window + self.n_windows


@dataclass(frozen=True, slots=True)
class ProbeRecord:
    """What one probe codec made of a span's keys, in all layers; see impress.selection.probes."""

    codec: str  # ASCII, at most 32 bytes
    group: int  # tokens in a group; divides the window
    group_bytes: int
    params: bytes = bytes(32)  # digest of the parameters it was made with; zeros: none

    def window_bytes(self, window: int) -> int:
        """Bytes of one window's groups, before padding."""
        return window // self.group * self.group_bytes


@dataclass(frozen=True, slots=True)
class SpanHeader:
    """A decoded header record: everything a scan needs to rebuild an index value."""

    store_uuid: bytes
    geometry: Geometry
    record: SpanRecord
    sums: Sums
    importance: npt.NDArray[np.float32] | None
    name: str
    probes: tuple[ProbeRecord, ...] = ()
    order: RowOrder | None = None  # None: position order

    @property
    def layout(self) -> SpanLayout:
        """Where its rows and probe records lie."""
        record = self.record
        return layout_of(self.geometry, record.window, record.n_windows, self.probes)

    def read_of(self, layer: int, plane: int, first: int, dest: Bytes) -> Read:
        """A read of a plane's chunks, from `first` on, with their sums: as many as dest holds."""
        layout = self.layout
        shape = layout.planes[plane]
        at = layout.sums_at(layer, plane, first)
        sums = self.sums[at : at + len(dest) // shape.piece_bytes]
        off = layout.chunk_off(layer, plane, first)
        return Read(Slot(self.record.parts), off, dest, sums, shape.piece_bytes)


def layout_of(
    geometry: Geometry, window: int, n_windows: int, probes: Sequence[ProbeRecord]
) -> SpanLayout:
    """Where rows and probe records of a span of `n_windows` lie."""
    probe_bytes = tuple([probe.window_bytes(window) for probe in probes])
    return _layout_of(geometry, window, n_windows, probe_bytes)


_layout_of = lru_cache(1024)(SpanLayout.of)  # asked by every lease, for each of its spans


def meta_bytes(n_parts: int, n_windows: int, window: int, n_layers: int, n_sums: int) -> int:
    """An upper bound on a header record's bytes, known when a writer opens."""
    n_rows = n_windows * window
    body = n_parts * _PART.size + n_windows * 4 * window + n_rows * n_layers * 4
    body += order_bytes(n_layers, n_rows)
    return PAGE + round_up(body + 1024) + round_up(16 * n_sums)


def encode_header(header: SpanHeader) -> bytes:
    """The header record: one fixed page, small sections, then the sums table on its own pages."""
    record = header.record
    sections: list[tuple[int, bytes]] = [
        (PARTS, b"".join(_PART.pack(p.segment, 0, p.off, p.length) for p in record.parts)),
        (LABELS, record.labels),
        (NAME, header.name.encode()[:256]),
    ]
    if header.importance is not None:
        sections.append((IMPORTANCE, header.importance.astype("<f4").tobytes()))
    if header.order is not None:
        sections.append((ORDER, header.order.encode()))
    if header.probes:
        sections.append((PROBES, b"".join(_packed(probe) for probe in header.probes)))
    table = np.zeros((len(header.sums), 2), dtype="<u8")
    table[:, 0] = header.sums
    sections.append((SUMS, table.tobytes()))
    body, entries = bytearray(), []
    for kind, raw in sections:
        if kind == SUMS:
            body.extend(bytes(round_up(len(body)) - len(body)))
        digest = xxhash.xxh3_64_intdigest(raw)
        entries.append(_SECTION.pack(kind, 0, 0, PAGE + len(body), len(raw), digest))
        body.extend(raw)
    total = round_up(PAGE + len(body))
    page = bytearray(PAGE)
    _FIXED.pack_into(
        page, 0, MAGIC, VERSION, PAGE, 0, header.store_uuid, record.namespace, record.root,
        record.key_before, record.key_after, record.span_id, record.first_window,
        record.n_windows, record.window, header.geometry.pack(), ROW_CODEC_KV, record.order,
        SUM_XXH3_64, SUM_NONE, len(entries), header.order.epoch if header.order else 0, total,
    )  # fmt: skip
    table_raw = b"".join(entries)
    page[_FIXED.size : _FIXED.size + len(table_raw)] = table_raw
    page[-8:] = xxhash.xxh3_64_digest(bytes(page[:-8]))[::-1]
    return bytes(page) + bytes(body) + bytes(total - PAGE - len(body))


def _packed(probe: ProbeRecord) -> bytes:
    return _PROBE.pack(probe.codec.encode(), probe.group, probe.group_bytes, probe.params)


def header_page_length(page: bytes) -> int:
    """Bytes of the whole header record that begins with this page; FormatError if none does."""
    if page[:8] != MAGIC:
        raise FormatError("no span header here")
    if xxhash.xxh3_64_digest(page[: PAGE - 8])[::-1] != page[PAGE - 8 : PAGE]:
        raise FormatError("span header: bad checksum")
    fields = _FIXED.unpack_from(page)
    if fields[1] > VERSION:
        raise FormatError(f"span header: format {fields[1]}, this version reads up to {VERSION}")
    return int(fields[-1])


def decode_header(raw: bytes | Bytes, meta: Extent) -> SpanHeader:
    """Decode a whole header record read from `meta`. Raises FormatError on anything unsound."""
    try:
        return _decode_header(bytes(raw), meta)
    except (struct.error, ValueError) as err:
        raise FormatError(f"span header: {err}") from None


def _decode_header(raw: bytes, meta: Extent) -> SpanHeader:
    total = header_page_length(raw[:PAGE])
    if total > len(raw):
        raise FormatError(f"span header: {total} bytes announced, {len(raw)} there")
    (_, _, _, _, uuid, namespace, root, before, after, span_id, first, n_windows, window,
     packed, codec, order, sum_a, _, n_sections, epoch, _) = _FIXED.unpack_from(raw)  # fmt: skip
    if codec != ROW_CODEC_KV or order not in _ORDERS or sum_a != SUM_XXH3_64:
        raise FormatError(f"span header: codec {codec}, order {order}, sum {sum_a} not known")
    found = _sections(raw, n_sections)
    if not {PARTS, LABELS, SUMS, *_ORDERS[order]} <= found.keys():
        raise FormatError("span header: a section is missing")
    parts = tuple(Extent(s, off, n) for s, _, off, n in _PART.iter_unpack(found[PARTS]))
    geometry = Geometry.unpack(packed)
    importance = None
    if IMPORTANCE in found:
        rows = np.frombuffer(found[IMPORTANCE], dtype="<f4")
        importance = rows.reshape(geometry.n_layers, -1)
    probes = tuple(
        ProbeRecord(codec.rstrip(b"\0").decode(errors="replace"), group, group_bytes, params)
        for codec, group, group_bytes, params in _PROBE.iter_unpack(found.get(PROBES, b""))
    )
    if not (window and n_windows) or not all(
        probe.group and probe.group_bytes and window % probe.group == 0 for probe in probes
    ):
        raise FormatError("span header: a window or a probe group of no size, or that do not fit")
    sums = np.frombuffer(found[SUMS], dtype="<u8").reshape(-1, 2)[:, 0].copy()
    record = SpanRecord(
        span_id, namespace, root, before, after, first, n_windows, window, meta, parts,
        found[LABELS], order,
    )  # fmt: skip
    row_order = None
    if order == ORDER_PACKED:
        n_rows = n_windows * window
        row_order = RowOrder.decode(found[ORDER], geometry.n_layers, n_rows, epoch)
    name = found.get(NAME, b"").decode(errors="replace")
    return SpanHeader(uuid, geometry, record, sums, importance, name, probes, row_order)


def _sections(raw: bytes, n_sections: int) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    if n_sections > _MOST_SECTIONS:
        raise FormatError(f"span header: {n_sections} sections")
    for i in range(n_sections):
        entry = _SECTION.unpack_from(raw, _FIXED.size + i * _SECTION.size)
        kind, _, _, off, length, digest = entry
        body = raw[off : off + length]
        if len(body) != length or xxhash.xxh3_64_intdigest(body) != digest:
            raise FormatError(f"span header: section {kind} does not match its checksum")
        found[kind] = body
    return found


def encode_index(record: SpanRecord) -> bytes:
    """The index value of a span: fixed fields, parts, labels, xxh3_64 of all before it."""
    fixed = _INDEX.pack(
        VERSION, ROW_CODEC_KV, record.order, 0, record.first_window, record.n_windows,
        record.window, len(record.parts), record.namespace, record.root, record.key_before,
        record.key_after, record.meta.segment, 0, record.meta.off, record.meta.length,
    )  # fmt: skip
    parts = b"".join(_PART.pack(p.segment, 0, p.off, p.length) for p in record.parts)
    body = fixed + parts + record.labels
    return body + xxhash.xxh3_64_digest(body)


def split_index(raw: bytes, window: int | None = None) -> tuple[bytes, bytes]:
    """An index value as (what stays in memory, labels). Verifies the checksum and the version.

    `window`: the store's, where the value comes from outside; then all its sizes must agree too.
    """
    if len(raw) < _INDEX.size + 8 or xxhash.xxh3_64_digest(raw[:-8]) != raw[-8:]:
        raise FormatError("index value: bad checksum")
    fields = _INDEX.unpack_from(raw)
    if fields[0] > VERSION or fields[1] != ROW_CODEC_KV or fields[2] not in _ORDERS:
        raise FormatError(
            f"index value: format {fields[0]}, codec {fields[1]}, order {fields[2]}: not known"
        )
    cut = _INDEX.size + fields[7] * _PART.size
    if window is not None:
        n_windows, labels = fields[5], len(raw) - 8 - cut
        if fields[6] != window or not n_windows or labels != 4 * window * n_windows:
            raise FormatError(f"index value: {n_windows} windows of {fields[6]}, {labels} bytes")
    return raw[:cut], raw[cut:-8]


def place_of(kept: bytes) -> tuple[int, bytes, bytes, bytes]:
    """(first window, root key, key before, key after) of a kept index value; cheap, for opening."""
    place: tuple[int, bytes, bytes, bytes] = _PLACE.unpack_from(kept)
    return place


def extents_of(kept: bytes) -> list[Extent]:
    """The space a span owns, from a kept index value; cheap, for opening."""
    segment, off, length = _META.unpack_from(kept)
    rest = kept[_INDEX.size :]
    if len(rest) == _PART.size:  # nearly always so, and takes a third as long as the general way
        part_segment, _, part_off, part_length = _PART.unpack(rest)
        return [Extent(segment, off, length), Extent(part_segment, part_off, part_length)]
    parts = [Extent(s, off, n) for s, _, off, n in _PART.iter_unpack(rest)]
    return [Extent(segment, off, length), *parts]


def encode_extents(extents: Iterable[Extent]) -> bytes:
    """What the index notes about a span that is to be erased: its space and nothing else."""
    raw = b"".join(_PART.pack(each.segment, 0, each.off, each.length) for each in extents)
    return raw + xxhash.xxh3_64_digest(raw)


def decode_extents(raw: bytes) -> list[Extent]:
    """The inverse of `encode_extents`. Raises FormatError."""
    if xxhash.xxh3_64_digest(raw[:-8]) != raw[-8:] or (len(raw) - 8) % _PART.size:
        raise FormatError("index: a damaged note of what is to be erased")
    return [Extent(segment, off, n) for segment, _, off, n in _PART.iter_unpack(raw[:-8])]


def decode_index(span_id: int, kept: bytes, labels: bytes = b"") -> SpanRecord:
    """The record of a span from what `split_index` kept."""
    (_, _, order, _, first, n_windows, window, _, namespace, root, before, after, segment, _, off,
     length) = _INDEX.unpack_from(kept)  # fmt: skip
    parts = tuple(Extent(s, o, n) for s, _, o, n in _PART.iter_unpack(kept[_INDEX.size :]))
    meta = Extent(segment, off, length)
    return SpanRecord(
        span_id, namespace, root, before, after, first, n_windows, window, meta, parts, labels,
        order,
    )  # fmt: skip
