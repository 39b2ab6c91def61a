"""Spans that hang in the air: nothing that is stored reaches the window they begin after."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from impress.blockhash import chain
from impress.errors import FormatError
from impress.spans.format import SpanRecord, decode_index, split_index
from impress.spans.records import wrong_record
from impress.tree.eviction import ALL
from impress.tree.merged import MergedCatalog
from impress.write.directory import Identity, Shard, shards_of
from impress.write.env import NothingYet
from impress.write.index import Index


def index_values(shard: Shard) -> dict[int, bytes]:
    """Span -> what a shard's index holds of it. Raises FormatError (none, damaged, the shard's disk
    is not mounted), StoreFailed."""
    if said := shard.unmounted():
        raise FormatError(said)
    if not shard.has_index():  # LMDB would begin one in an empty file
        raise FormatError(f"index: {shard.index} is missing")
    try:
        index = Index(shard.index, create=False)
    except NothingYet:
        return {}
    try:
        return dict(index.spans())
    finally:
        index.close()


def hanging_of(
    mine: Collection[int], values: Mapping[int, bytes], identity: Identity, path: Path
) -> tuple[list[int], list[int]]:
    """Those spans of `mine` that hang in the air, and the damaged ones of all spans.

    `values`: of all shards, as a prefix may go from one to another; read a moment ago, so every
    shard is read again before a span is said to hang. Raises AssertionError where the tree that
    they make is not sound.
    """
    catalog = MergedCatalog(identity.window, ALL)
    loose, damaged = catalog.load(values.items(), {})
    catalog.check()
    found = catalog.retired_records(span for span in loose if span in mine)
    hanging = [record for record in found if record.first_window]
    # One that repeats what other spans hold is only waiting to be reclaimed.
    loose_ends = {(record.root, record.key_before) for record in hanging}
    loose_ends = _unreached(loose_ends, _decoded(values, identity))
    # Shards are read one after the other: one may go on from what another stored meanwhile.
    for shard in shards_of(path) if loose_ends else ():
        with suppress(FormatError):
            loose_ends = _unreached(loose_ends, _decoded(index_values(shard), identity))
    return [r.span_id for r in hanging if (r.root, r.key_before) in loose_ends], damaged


def _decoded(values: Mapping[int, bytes], identity: Identity) -> Iterator[SpanRecord]:
    """Records, where they are sound."""
    for span, value in values.items():
        with suppress(FormatError, ValueError, struct.error):
            record = decode_index(span, *split_index(value))
            if not wrong_record(record, identity.geometry, identity.window):
                yield record


def _unreached(
    loose_ends: set[tuple[bytes, bytes]], records: Iterable[SpanRecord]
) -> set[tuple[bytes, bytes]]:
    """Those (root key, key after a window) whose window none of these spans has."""
    left, roots = loose_ends.copy(), {root for root, _ in loose_ends}
    for record in records if left else ():
        if record.root in roots:
            ends = chain(record.key_before, record.labels, record.window)
            left.difference_update((record.root, key) for key in ends)
    return left
