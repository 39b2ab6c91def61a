"""Chained digests over windows of tokens: the names under which prefixes are found.

A window's label is what must be equal for two windows to match: its token ids, or, where images,
embeddings or adapters take part, a digest over the ids and theirs. A window's key chains the
labels from the root, so one key names a whole prefix, in every store and on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

from impress.errors import BadInput
from impress.types import Geometry, an_int

Tokens = npt.NDArray[np.int32]
Extra = Mapping[int, bytes]

KEY_BYTES: Final = 32


def as_tokens(token_ids: Sequence[int] | npt.NDArray[np.integer] | object) -> Tokens:
    """A one-dimensional int32 array of ids in 0..2^31-1; not copied where it already is one.

    Raises BadInput on an empty prompt, another shape, or an id out of range.
    """
    try:
        array = np.asarray(token_ids)
    except (ValueError, TypeError, RuntimeError) as err:  # RuntimeError: a tensor with a gradient
        raise BadInput(f"token_ids: {err}") from None
    if array.ndim != 1 or array.size == 0:
        raise BadInput(f"token_ids: want a non-empty list or 1-d array, got shape {array.shape}")
    if array.dtype.kind not in "iu" and _are_large(token_ids):
        raise BadInput("token_ids: an id is outside 0..2147483647")
    if array.dtype.kind not in "iu":
        raise BadInput(f"token_ids: want integers, got {array.dtype}")
    if int(array.min()) < 0 or (array.dtype.itemsize >= 4 and int(array.max()) >= 1 << 31):
        raise BadInput("token_ids: an id is outside 0..2147483647")
    return np.ascontiguousarray(array, dtype=np.int32)


def _are_large(token_ids: object) -> bool:
    """Whether it is a list of integers, of which NumPy makes others where one is too large."""
    return isinstance(token_ids, list) and all(type(each) is int for each in token_ids)


def namespace_digest(namespace: str | bytes) -> bytes:
    """32 bytes that stand for a namespace given as text or bytes."""
    if not isinstance(namespace, str | bytes) or not namespace:
        raise BadInput("namespace: want a non-empty str or bytes")
    if isinstance(namespace, str):
        kind, raw = b"t", _utf8(namespace, "namespace")
    else:
        kind, raw = b"b", namespace
    return blake2b(kind + raw, digest_size=KEY_BYTES, person=b"impress-ns").digest()


def is_name(name: str, namespace: bytes) -> bool:
    """Whether a namespace of this digest was given by this name: a header keeps only the beginning
    of a long one, and an index's has no checksum. Pure."""
    return bool(name) and namespace_digest(name) == namespace


def root_key(
    namespace: bytes, geometry: Geometry, window: int, tenant: str, secret: bytes = b""
) -> bytes:
    """The key before the first window: everything that must agree before any token does.

    `secret`: the server's own 16 to 64 bytes, mixed in as a MAC key: without them nobody can tell
    whose a key is, or make another tenant's.
    """
    if not isinstance(tenant, str):
        raise BadInput("tenant: want a str")
    digest = blake2b(namespace, digest_size=KEY_BYTES, person=b"impress-root", key=secret)
    digest.update(geometry.pack() + window.to_bytes(4, "little"))
    digest.update(_utf8(tenant, "tenant"))
    return digest.digest()


def _utf8(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a character: a str that is not text
        raise BadInput(f"{what}: {text!r} is not text, it has no UTF-8") from None


def labels_of(tokens: Tokens, window: int, extra: Extra | None = None) -> bytes:
    """The labels of all whole windows, 4·window bytes each; a shorter tail is left out.

    A plain window's label is its ids, little-endian; ids have their top bit clear. A window with
    extras gets a digest with every top bit set, so the two kinds can never be equal.
    """
    n_windows = len(tokens) // window
    raw = tokens[: n_windows * window].astype("<i4", copy=False).tobytes()
    if not extra:
        return raw
    if not isinstance(extra, Mapping):
        raise BadInput(f"extra: want positions and their digests, got {type(extra).__name__}")
    if window % 16:
        raise BadInput(f"extra: wants windows of a multiple of 16 tokens, got {window}")
    by_window: dict[int, list[tuple[int, bytes]]] = {}
    for at, digest in extra.items():
        position = an_int(at, "extra: a position")
        if not 0 <= position < len(tokens):
            raise BadInput(
                f"extra: position {position} is not in the prompt of {len(tokens)} tokens"
            )
        if not isinstance(digest, bytes) or not digest:
            raise BadInput(f"extra: the digest at {position} must be non-empty bytes")
        by_window.setdefault(position // window, []).append((position % window, digest))
    sealed = bytearray(raw)
    size = 4 * window
    for index, items in by_window.items():
        if index < n_windows:
            at = index * size
            sealed[at : at + size] = _sealed(raw[at : at + size], sorted(items))
    return bytes(sealed)


def _sealed(ids: bytes, items: list[tuple[int, bytes]]) -> bytes:
    digest = blake2b(ids, person=b"impress-extra")
    for off, item in items:
        digest.update(off.to_bytes(2, "little") + len(item).to_bytes(8, "little") + item)
    blocks = np.frombuffer(digest.digest() * (len(ids) // 64), dtype="<u4") | np.uint32(1 << 31)
    return blocks.tobytes()


def chain(key: bytes, labels: bytes, window: int) -> Iterator[bytes]:
    """The key after each window of `labels`, given the key before them."""
    size = 4 * window
    for at in range(0, len(labels), size):
        label = labels[at : at + size]
        key = blake2b(label, digest_size=KEY_BYTES, key=key, person=b"impress-window").digest()
        yield key


def key_after(key: bytes, labels: bytes, window: int) -> bytes:
    """The key after the last window of `labels`; `key` itself where there is none."""
    for after in chain(key, labels, window):
        key = after
    return key
