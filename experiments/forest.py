"""A made-up store of many windows: real index values and sparse segments, no rows.

`n_paths` prompts of PROMPT_TOKENS tokens, each cut into spans of `span_windows` windows; from every
span's middle (its start, where it is one window) another span branches off, so every node of a path
has a sibling or a cut. That is the tree at its largest: nothing is shared, everything forks.

    path    |--span 0--|--span 1--|--span 2-- …        one prompt
    side         |-----x     |-----x     |-----x       one other continuation a span
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

import impress
from impress.blockhash import chain, namespace_digest, root_key
from impress.spans.format import SpanRecord, encode_index
from impress.spans.layout import SpanLayout
from impress.write.directory import Shard
from impress.write.index import Index
from tiers.base import Extent

PROMPT_TOKENS: Final = 32_768
NAMESPACE: Final = "bench"
OPT_6_7B: Final = impress.Geometry(32, 32, 32, 128, "float16")
#: Sparse files, so their size costs nothing; few, because opening looks at each.
SEGMENT_BYTES: Final = 64 << 30
META_BYTES: Final = 1 << 20
_VOCABULARY = 50_000
_BATCH = 100_000


@dataclass(frozen=True, slots=True)
class Shape:
    """What the store looks like: `n_windows` in all, spans of `span_windows`."""

    window: int  # tokens
    span_windows: int
    n_windows: int
    seed: int

    @property
    def path_windows(self) -> int:
        return PROMPT_TOKENS // self.window

    @property
    def n_paths(self) -> int:
        """Whole prompts; the windows left over begin one more."""
        return self.n_windows // (2 * self.path_windows)

    @property
    def config(self) -> impress.Config:
        return impress.Config(window=self.window, segment_bytes=SEGMENT_BYTES)

    def prompt(self, path: int, n_tokens: int = PROMPT_TOKENS) -> npt.NDArray[np.int32]:
        """A prompt's tokens: the first PROMPT_TOKENS are stored (if path < n_paths)."""
        rng = np.random.default_rng((self.seed, path))
        return rng.integers(0, _VOCABULARY, n_tokens, dtype=np.int32)

    def open(self, folder: Path) -> impress.PrefixStore:
        return impress.PrefixStore.open(folder, OPT_6_7B, NAMESPACE, self.config)


def plant(folder: Path, shape: Shape) -> int:
    """Fill an empty directory with this store. Returns the number of spans."""
    shape.open(folder).close()
    shard = Shard(folder)
    index = Index(shard.index, create=True)
    batch: dict[int, bytes] = {}
    n_spans = segment = 0
    try:
        for record in _records(shape):
            batch[record.span_id] = encode_index(record)
            n_spans, segment = n_spans + 1, record.meta.segment
            if len(batch) == _BATCH:
                index.commit(batch)
                batch.clear()
        index.commit(batch)
    finally:
        index.close()
    for i in range(segment + 1):
        with (shard.segments / f"{i:08d}.seg").open("wb") as file:
            os.truncate(file.fileno(), SEGMENT_BYTES)
    return n_spans


def _records(shape: Shape) -> Iterator[SpanRecord]:
    """Spans in the order in which they could have been stored, ids from 1."""
    namespace = namespace_digest(NAMESPACE)
    root = root_key(namespace, OPT_6_7B, shape.window, "")
    n, size = shape.span_windows, 4 * shape.window
    extents = _space(SpanLayout.of(OPT_6_7B, shape.window, n).data_bytes)
    span, left = 0, shape.n_windows
    for path in range(shape.n_paths + 1):
        labels = shape.prompt(path).tobytes()
        side = _token_ids(np.random.default_rng((shape.seed, path, 1)).bytes(len(labels)))
        keys = [root, *chain(root, labels, shape.window)]
        for first in range(0, shape.path_windows, n):
            for begin, own in ((first, labels), (first + n // 2, side)):
                if left < n:
                    return
                span, left = span + 1, left - n
                label = own[first * size : (first + n) * size]
                after = keys[first + n] if own is labels else keys[0]
                meta, data = next(extents)
                yield SpanRecord(
                    span, namespace, root, keys[begin], after, begin, n, shape.window, meta,
                    (data,), label,
                )  # fmt: skip


def _token_ids(raw: bytes) -> bytes:
    """Random bytes as ids: top bits clear."""
    return (np.frombuffer(raw, dtype="<u4") & np.uint32(0x7FFFFFFF)).tobytes()


def _space(data_bytes: int) -> Iterator[tuple[Extent, Extent]]:
    """(header, data) extents, one after the other through as many segments as it takes."""
    segment = off = 0
    while True:
        if off + META_BYTES + data_bytes > SEGMENT_BYTES:
            segment, off = segment + 1, 0
        yield Extent(segment, off, META_BYTES), Extent(segment, off + META_BYTES, data_bytes)
        off += META_BYTES + data_bytes
