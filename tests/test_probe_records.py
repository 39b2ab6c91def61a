"""Probe records as they lie on the disk: their bytes are pinned."""

from __future__ import annotations

import struct
from hashlib import blake2b

import numpy as np
import pytest

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
    """(KV heads, rank) of each of a PCA codec's blocks."""
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
    """A fitted codec's parameters for one layer; else None."""
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
