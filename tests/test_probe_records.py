"""Probe records as they lie on the disk: their bytes are pinned, and docs/FORMAT.md says them."""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
import torch

from impress.selection import products
from impress.selection.probes import OWN, codec_of, fitted
from impress.types import Geometry

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = 64
#: Head dims that fill no byte, that take two blocks of PCA, and of several query heads a KV head.
GEOMETRIES = (
    Geometry(1, 3, 3, 13, "float32"),
    Geometry(1, 6, 3, 256, "bfloat16"),
    Geometry(1, 8, 2, 32, "float16"),
)
#: Ranks of the PCA codecs, as shares of a block's dimensions.
SHARES = {"pca37-v1": (3, 8), "pca25-v1": (1, 4), "pca12-v1": (1, 8)}
#: Of a window's records in each of these geometries. A digest never changes, and neither do those
#: of codecs that nobody writes any more: a codec that must change takes a new name.
DIGESTS = {
    "heads3-v1": "9eb803974058ad286709ccacc1a0fa76",
    "int1-v1": "737bc33f2d11b2abae29f2d9902bfc90",
    "int2-v1": "457ad7053ed33aefb875d22141273db7",
    "int2-v2": "d0874db86aec6a3fa76928ad7b349e67",
    "int3-v1": "1fb353dfc9f21e63d5ebb46c07b646bb",
    "int3-v2": "6c7660c9dc7397da461cc472a161349d",
    "int4-v1": "db84bbad5435bdedb6fc1c21e4b6e1b8",
    "int4-v2": "fcf4bc6708e8800db0e781aec035da65",
    "pages16-v1": "0ba043aaa9ce03a79f57b771f7a99555",
    "pca12-v1": "7ca66d460a6b09925e364057cece6712",
    "pca25-v1": "b7fcb4367596667de93700180ad32649",
    "pca37-v1": "76c5f47c2dc86ac905e6402d1176f448",
}


def keys_of(geometry: Geometry) -> np.ndarray:
    """A window's keys in float32, [n_kv_heads, WINDOW, head_dim].

    Quarters with a largest value of 52.5, times a power of two: scales are float16 numbers at every
    number of bits, and no value is near a border between two codes, however it is rounded. In
    float32 some have bits that float16 has not.
    """
    shape = (geometry.n_kv_heads, WINDOW, geometry.head_dim)
    i = np.arange(np.prod(shape), dtype=np.int64)
    mixed = ((i * 7919 + i // 11 * 104729) % 50021).reshape(shape)
    quarters = mixed % 210 * 2 - 209
    for head, token in np.ndindex(shape[:2]):
        quarters[head, token, (5 * token + head) % shape[2]] = 210 if token % 2 else -210
    keys = quarters / 4
    if geometry.dtype == "float32":
        keys += np.where(np.abs(quarters) < 210, mixed % 3 - 1, 0) / 4096
    head, token, _ = np.ogrid[: shape[0], : shape[1], :1]
    return (keys * np.exp2((head + token) % 3 - 1.0)).astype(np.float32)


def words_of(keys: np.ndarray, dtype: str) -> np.ndarray:
    """The same as a store's raw words; nothing is rounded."""
    if dtype == "bfloat16":
        return (keys.view(np.uint32) >> 16).astype(np.uint16)
    return keys.astype(dtype)


def blocks_of(geometry: Geometry, share: tuple[int, int]) -> list[tuple[int, int]]:
    """(KV heads, rank) of each of a PCA codec's blocks, as docs/FORMAT.md has them."""
    most = max(1, min(geometry.n_kv_heads, 512 // geometry.head_dim))
    heads = [min(most, geometry.n_kv_heads - at) for at in range(0, geometry.n_kv_heads, most)]
    return [(n, max(1, n * geometry.head_dim * share[0] // share[1])) for n in heads]


def basis_of(
    geometry: Geometry, share: tuple[int, int]
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Means, and each block's axes and spreads: sums of these with keys are exact in any order."""
    dims = geometry.n_kv_heads * geometry.head_dim
    mean = (np.arange(dims) % 7 - 3).reshape(-1, geometry.head_dim).astype(np.float32)
    blocks = []
    for n_heads, rank in blocks_of(geometry, share):
        axes, j = np.zeros((n_heads * geometry.head_dim, rank), dtype=np.float32), np.arange(rank)
        axes[3 * j % len(axes), j] = 1
        axes[(3 * j + 1) % len(axes), j] += 0.5
        blocks.append((axes, np.exp2(j % 3 - 1.0).astype(np.float32)))
    return mean, blocks


def params_of(name: str, geometry: Geometry) -> bytes | None:
    """A fitted codec's parameters for one layer, by the table in docs/FORMAT.md; else None."""
    codec = fitted(codec_of(name))
    if codec is None:
        return None
    mean, blocks = basis_of(geometry, SHARES[name])
    residual = np.full(geometry.n_kv_heads, 0.25, dtype=np.float32)
    body = b"".join(a.tobytes() for a in (mean, residual, *(a for pair in blocks for a in pair)))
    sizes = (geometry.n_kv_heads, geometry.head_dim, *SHARES[name])
    return b"impPCA1\0" + blake2b(body, digest_size=16).digest() + struct.pack("<4I", *sizes) + body


def records_of(name: str, geometry: Geometry) -> np.ndarray:
    keys = words_of(keys_of(geometry), geometry.dtype)
    return codec_of(name).encode(keys, geometry, params_of(name, geometry))


@pytest.mark.parametrize("name", sorted(OWN | DIGESTS.keys()))
def test_the_records_of_each_codec_are_the_bytes_they_were(name: str) -> None:
    """Encoding and decoding changed alike passed all tests: records in the field then meant other
    keys. Only a golden store's two codecs were held to their bytes, and no default among them."""
    digest = blake2b(digest_size=16)
    for geometry in GEOMETRIES:
        digest.update(records_of(name, geometry).tobytes())
    assert digest.hexdigest() == DIGESTS.get(name), "see DIGESTS"


# ---- docs/FORMAT.md, read word by word: none of the codecs' own code below ----------------------


def codes_in(packed: bytes, n: int, bits: int) -> list[int]:
    """n codes out of the bytes they are packed in."""
    codes, at, low = [0] * n, 0, 0
    for width in {1: [1], 2: [2], 3: [2, 1], 4: [4]}[bits]:
        m = -(-n * width // 8)
        for j in range(n):
            byte = packed[at + j % m] ^ (0x80 if width == 4 else 0)
            codes[j] |= (byte >> (j // m * width) & (1 << width) - 1) << low
        at, low = at + m, low + width
    assert at == len(packed)
    return codes


def turn_of(dim: int, token: int) -> float:
    """What was added to a dimension of a window's token, in scales."""
    mask, outputs = (1 << 64) - 1, []
    for number in range(16 * dim, 16 * dim + 16):
        z = (number + 1) * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        outputs.append(z ^ z >> 31)
    rank = sorted(outputs).index(outputs[token % 16])
    return (rank + 0.5) / 16 - 0.5


def keys_in_int(name: str, record: bytes, token: int, geometry: Geometry) -> np.ndarray:
    """Keys [n_kv_heads, head_dim] in an int codec's record."""
    bits, heads, dim = int(name[3]), geometry.n_kv_heads, geometry.head_dim
    size = {1: -(-dim // 8), 2: -(-dim // 4), 3: -(-dim // 4) - (-dim // 8), 4: -(-dim // 2)}[bits]
    assert len(record) == (heads * (2 + size) + 1) // 2 * 2
    keys = np.empty((heads, dim))
    for head, scale in enumerate(struct.unpack_from(f"<{heads}e", record)):
        at = 2 * heads + head * size
        for d, u in enumerate(codes_in(record[at : at + size], dim, bits)):
            t = turn_of(d, token) if name.endswith("-v2") else 0
            keys[head, d] = (u + 0.5 - 2 ** (bits - 1) - t) * scale
    return keys


def keys_in_pca(name: str, record: bytes, geometry: Geometry) -> np.ndarray:
    mean, blocks = basis_of(geometry, SHARES[name])
    keys, at = [], 0
    for axes, spreads in blocks:
        rank, scales = len(spreads), -(-len(spreads) // 32)
        size = 2 * scales + -(-rank // 2)
        by_group = struct.unpack_from(f"<{scales}e", record, at)
        codes = codes_in(record[at + 2 * scales : at + size], rank, 4)
        z = np.array([(u - 7.5) * by_group[j // 32] for j, u in enumerate(codes)])
        keys.append(axes.astype(np.float64) @ (z * spreads))
        at += (size + 1) // 2 * 2
    assert at == len(record)
    return np.concatenate(keys).reshape(mean.shape) + mean


def scores_of(name: str, records: np.ndarray, queries: torch.Tensor, geometry: Geometry) -> Any:
    params = params_of(name, geometry)
    scores = codec_of(name).score(records, queries, geometry, 1.0, params)
    return torch.cat([part.scores.clone() for part in scores]).numpy()


def by_dimension(geometry: Geometry) -> torch.Tensor:
    """Queries whose scores are a key's dimensions, one by one."""
    return torch.eye(geometry.head_dim).expand(geometry.n_heads, -1, -1)


@pytest.mark.parametrize("name", [*(n for n in sorted(OWN) if n.startswith("int")), *SHARES])
def test_keys_are_found_in_a_record_by_what_the_format_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "integer_products", lambda device: False)  # they round queries
    geometry = GEOMETRIES[0]
    records = records_of(name, geometry)
    found = scores_of(name, records, by_dimension(geometry), geometry)
    for token, record in enumerate(records):
        if name in SHARES:
            keys = keys_in_pca(name, record.tobytes(), geometry)
        else:
            keys = keys_in_int(name, record.tobytes(), token, geometry)
        np.testing.assert_allclose(found[:, :, token], keys, rtol=1e-4, atol=1e-4)


def test_the_bounds_of_a_page_are_found_in_its_record_by_what_the_format_says() -> None:
    geometry = GEOMETRIES[0]
    heads, dim, keys = geometry.n_kv_heads, geometry.head_dim, keys_of(geometry)
    records = records_of("pages16-v1", geometry)
    assert len(records) == WINDOW // 16
    above = scores_of("pages16-v1", records, by_dimension(geometry), geometry)
    below = -scores_of("pages16-v1", records, -by_dimension(geometry), geometry)
    for page, record in enumerate(records):
        halves = np.array(struct.unpack(f"<{2 * heads * dim}e", record.tobytes()))
        least, most = halves.reshape(2, heads, dim)
        assert np.array_equal(below[:, :, page], least) and np.array_equal(above[:, :, page], most)
        rows = keys[:, 16 * page : 16 * page + 16]
        assert (least <= rows.min(axis=1)).all() and (rows.max(axis=1) <= most).all()
        assert (least < rows.min(axis=1)).any() and (rows.max(axis=1) < most).any()  # outwards


def test_the_keys_in_a_record_of_heads3_are_those_the_format_says() -> None:
    for geometry in GEOMETRIES:
        last = (min(3, geometry.n_heads) - 1) * geometry.n_kv_heads // geometry.n_heads
        words = words_of(keys_of(geometry), geometry.dtype)[: last + 1]
        for token, record in enumerate(records_of("heads3-v1", geometry)):
            assert record.tobytes() == words[:, token].tobytes()
