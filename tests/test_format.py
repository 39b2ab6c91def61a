"""Layout arithmetic and the bytes of records."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import impress
from impress.blockhash import as_tokens, chain, key_after, labels_of, namespace_digest, root_key
from impress.spans.format import (
    ORDER_PACKED,
    ProbeRecord,
    SpanHeader,
    SpanRecord,
    decode_header,
    decode_index,
    encode_header,
    encode_index,
    extents_of,
    meta_bytes,
    place_of,
    split_index,
)
from impress.spans.layout import K, PlaneLayout, SpanLayout, V
from impress.spans.order import RowOrder
from tiers.base import PAGE, Extent


@pytest.mark.parametrize(
    ("row_bytes", "rows", "piece_bytes"),
    [
        (8192, 1, 8192),  # OPT-6.7B fp16
        (10240, 2, 20480),  # OPT-13B fp16
        (14336, 2, 28672),  # OPT-30B fp16
        (1536, 8, 12288),  # OPT-125m fp16
        (2048, 2, 4096),  # Llama-3-8B bf16
        (64, 64, 4096),
        (16, 64, 4096),  # at most a window, padded or not
        (100, 64, 8192),
    ],
)
def test_pieces_are_whole_rows_with_little_padding(
    row_bytes: int, rows: int, piece_bytes: int
) -> None:
    plane = PlaneLayout.of(row_bytes, 64)
    assert (plane.piece_rows, plane.piece_bytes) == (rows, piece_bytes)
    assert plane.pieces * plane.piece_rows == 64


@settings(max_examples=60)
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 300),
    st.integers(1, 300),
    st.integers(1, 9),
)
def test_chunks_tile_the_data_space_and_the_sums(
    layers: int, heads: int, k_dim: int, v_dim: int, windows: int
) -> None:
    geometry = impress.Geometry(layers, heads, heads, k_dim, "float16", v_dim)
    layout = SpanLayout.of(geometry, 64, windows, [5000, 64])
    order = [(layer, plane) for layer in range(layers) for plane in (K, V)]
    order += [(layer, probe) for probe in (2, 3) for layer in range(layers)]
    off = at = 0
    for layer, plane in order:
        for window in range(windows):
            assert layout.chunk_off(layer, plane, window) == off
            assert layout.sums_at(layer, plane, window) == at
            off += layout.planes[plane].chunk_bytes
            at += layout.planes[plane].pieces
    assert (off, at) == (layout.data_bytes, layout.n_sums)


def record(n_windows: int = 3) -> tuple[SpanRecord, impress.Geometry]:
    geometry = impress.Geometry(2, 4, 2, 128, "float32")
    labels = labels_of(np.arange(n_windows * 16, dtype=np.int32), 16)
    return SpanRecord(
        41, b"n" * 32, b"r" * 32, b"b" * 32, b"a" * 32, 5, n_windows, 16,
        Extent(0, 8192, 16384), (Extent(0, 65536, 1 << 20), Extent(2, 0, 4096)), labels,
    ), geometry  # fmt: skip


def header(importance: bool = True, packed: bool = False) -> SpanHeader:
    rec, geometry = record()
    sums = np.arange(SpanLayout.of(geometry, 16, 3).n_sums, dtype=np.uint64) ** 3
    scores = np.linspace(0, 1, 2 * 48, dtype=np.float32).reshape(2, 48) if importance else None
    order = None
    if packed:
        rng = np.random.default_rng(3)
        order = RowOrder.of(np.stack([rng.permutation(48) for _ in range(2)]), epoch=7)
        rec = replace(rec, order=ORDER_PACKED)
    return SpanHeader(b"u" * 16, geometry, rec, sums, scores, "a model", (), order)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("importance", [True, False])
def test_a_header_record_decodes_to_what_was_encoded(importance: bool, packed: bool) -> None:
    made = header(importance, packed)
    raw = encode_header(made)
    assert len(raw) % PAGE == 0
    assert len(raw) <= meta_bytes(64, 3, 16, 2, len(made.sums))
    back = decode_header(raw, made.record.meta)
    assert (back.record, back.geometry, back.name) == (made.record, made.geometry, made.name)
    assert back.store_uuid == made.store_uuid
    assert np.array_equal(back.sums, made.sums)
    assert (back.order is None) is (not packed)
    if made.order is not None and back.order is not None:
        assert back.order.epoch == 7
        assert np.array_equal(back.order.ordinals, made.order.ordinals)
    assert (back.importance is None) is (not importance)
    if importance:
        assert np.array_equal(back.importance, made.importance)


def test_an_index_value_decodes_to_what_was_encoded() -> None:
    rec, _ = record()
    kept, labels = split_index(encode_index(rec))
    assert decode_index(41, kept, labels) == rec
    packed = replace(rec, order=ORDER_PACKED)
    assert decode_index(41, *split_index(encode_index(packed))) == packed
    assert place_of(kept) == (5, rec.root, rec.key_before, rec.key_after)
    assert extents_of(kept) == [rec.meta, *rec.parts]


def test_any_flipped_bit_is_noticed() -> None:
    rec, _ = record()
    value, raw = encode_index(rec), encode_header(header(packed=True))
    rng = np.random.default_rng(1)
    for at in rng.integers(0, len(value), 300).tolist():
        bad = bytearray(value)
        bad[at] ^= 1 << int(rng.integers(8))
        with pytest.raises(impress.FormatError):
            split_index(bytes(bad))
    good = decode_header(raw, rec.meta)
    for at in rng.integers(0, len(raw), 300).tolist():
        bad = bytearray(raw)
        bad[at] ^= 1 << int(rng.integers(8))
        try:
            back = decode_header(bytes(bad), rec.meta)
        except impress.FormatError:
            continue
        # Only padding between sections is not covered; what was decoded is unharmed.
        assert back.record == good.record and np.array_equal(back.sums, good.sums)


@pytest.mark.parametrize("n_bytes", [0, 1, 100, 175])
def test_an_index_value_too_short_for_its_fields_is_damaged_whatever_its_sum(n_bytes: int) -> None:
    """With any error but a FormatError, opening would not say which span it passes over."""
    body = encode_index(record()[0])[:n_bytes]
    with pytest.raises(impress.FormatError, match="checksum"):
        split_index(body + xxhash.xxh3_64_digest(body))


def test_what_has_no_size_is_refused_whatever_its_sum() -> None:
    """Opening and a scan divide by these sizes."""
    rec = replace(record()[0], n_windows=0, labels=b"")
    with pytest.raises(impress.FormatError, match="0 windows"):
        split_index(encode_index(rec), 16)
    for group, group_bytes in ((0, 8), (4, 0), (5, 8)):  # 5 do not fit into a window of 16
        probes = (ProbeRecord("x", group, group_bytes),)
        with pytest.raises(impress.FormatError, match="no size, or that do not fit"):
            decode_header(encode_header(replace(header(), probes=probes)), rec.meta)


def test_a_newer_format_is_refused_by_number() -> None:
    raw = bytearray(encode_header(header()))
    struct.pack_into("<H", raw, 8, 2)
    raw[PAGE - 8 : PAGE] = xxhash.xxh3_64_digest(bytes(raw[: PAGE - 8]))[::-1]
    with pytest.raises(impress.FormatError, match="format 2"):
        decode_header(bytes(raw), record()[0].meta)


@settings(max_examples=300)
@given(st.binary(max_size=9000))
def test_noise_is_never_a_record(raw: bytes) -> None:
    with pytest.raises(impress.FormatError):
        split_index(raw)
    with pytest.raises(impress.FormatError):
        decode_header(raw, Extent(0, 0, PAGE))


def test_keys_chain_and_depend_on_everything_before() -> None:
    geometry = impress.Geometry(2, 4, 2, 128)
    ns = namespace_digest("m")
    root = root_key(ns, geometry, 64, "")
    tokens = as_tokens(list(range(192)))
    keys = list(chain(root, labels_of(tokens, 64), 64))
    assert len(set(keys)) == 3 and key_after(root, labels_of(tokens, 64), 64) == keys[-1]
    other = tokens.copy()
    other[0] += 1
    assert not set(keys) & set(chain(root, labels_of(other, 64), 64))
    roots = {
        root,
        root_key(ns, geometry, 64, "tenant"),
        root_key(ns, geometry, 32, ""),
        root_key(namespace_digest(b"m"), geometry, 64, ""),
        root_key(ns, impress.Geometry(2, 4, 2, 128, "bfloat16"), 64, ""),
    }
    assert len(roots) == 5


def test_keys_are_the_same_on_every_machine() -> None:
    """Golden: a change here orphans every store ever written."""
    root = root_key(namespace_digest("golden"), impress.Geometry(2, 4, 2, 128), 64, "t")
    key = key_after(root, labels_of(np.arange(128, dtype=np.int32), 64, {70: b"image"}), 64)
    assert key.hex() == GOLDEN_KEY


GOLDEN_KEY = "3840236ac276f889bafde2b98c35a9213658ecefbbe5c98978694f0f2eabf4f7"


def test_extras_are_part_of_their_window_and_never_look_like_tokens() -> None:
    tokens = np.arange(192, dtype=np.int32)
    plain, marked = labels_of(tokens, 64), labels_of(tokens, 64, {64: b"img"})
    assert plain[:256] == marked[:256] and plain[512:] == marked[512:]
    assert plain[256:512] != marked[256:512]
    assert (np.frombuffer(marked[256:512], "<u4") >> 31).all()
    moved = labels_of(tokens, 64, {65: b"img"})
    joined = labels_of(tokens, 64, {64: b"im", 65: b"g"})
    assert len({marked, moved, joined}) == 3
    assert labels_of(tokens[:100], 64, {99: b"x"}) == plain[:256]  # in the tail: not stored
