"""Span headers: made of what was written, put on the disk, and synced with their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from impress.errors import StoreFailed
from impress.spans.format import ORDER_PACKED, SpanHeader, SpanRecord, encode_header
from impress.types import Geometry
from impress.write.draft import Draft
from impress.write.index import Index
from tiers.base import Extent, Slot
from tiers.slots import aligned
from tiers.ssd import SsdTier


class Headers:
    """Those of one shard; for the committer's thread."""

    def __init__(
        self, index: Index, ssd: SsdTier, uuid: bytes, geometry: Geometry,
        trouble: Callable[[str], None], *, durable: bool,
    ) -> None:  # fmt: skip
        """`trouble` is told of an index that takes no writes. Not `durable`: nothing is synced."""
        self._index = index
        self._ssd = ssd
        self._uuid = uuid
        self._geometry = geometry
        self._trouble = trouble
        self._durable = durable

    def write(self, draft: Draft, name: str) -> None:
        """Write the header of a draft whose rows are written; its record is then final.

        Raises StoreFailed, FormatError, MediumError.
        """
        order = draft.order()
        if order is not None:
            draft.record = replace(draft.record, order=ORDER_PACKED)
        draft.record = self.put(
            SpanHeader(
                self._uuid, self._geometry, draft.record, draft.sums, draft.importance, name,
                draft.probes, order,
            )
        )  # fmt: skip
        self._check_synced(draft.sync_failures)

    def put(self, header: SpanHeader) -> SpanRecord:
        """Write a header record; returns the span's record, the space it did not need given back.

        Raises StoreFailed, MediumError.
        """
        try:
            self._index.keep_id(header.record.span_id)
        except StoreFailed as err:
            self._trouble(str(err))
            raise
        raw, record, meta = encode_header(header), header.record, header.record.meta
        if len(raw) > meta.length:
            raise StoreFailed(f"store: a header of {len(raw)} bytes, reserved were {meta.length}")
        memory = aligned(len(raw))
        memory[:] = np.frombuffer(raw, dtype=np.uint8)
        self._ssd.write(Slot((record.meta,)), 0, memory)
        rest = Extent(meta.segment, meta.off + len(raw), meta.length - len(raw))
        final = replace(record, meta=meta._replace(length=len(raw)))
        if rest.length:  # nothing fails after this: what a record has is given back once
            self._ssd.free(Slot((rest,)))
        return final

    def sync(self, spans: Iterable[tuple[SpanRecord, int]]) -> None:
        """Headers and rows of these spans are on stable storage on return.

        With each: the tier's `sync_failures` as of its first byte. Raises MediumError, StoreFailed.
        """
        spans = list(spans)
        if self._durable and spans:
            self._ssd.sync([Slot((record.meta,)) for record, _ in spans])
            self._ssd.sync([Slot(record.parts) for record, _ in spans])
        for _, failures_before in spans:  # after: another thread may be told of their pages
            self._check_synced(failures_before)

    def _check_synced(self, failures_before: int) -> None:
        """Raises StoreFailed where a sync failed since: nobody can tell whose pages it lost."""
        if self._ssd.sync_failures != failures_before:
            raise StoreFailed("store: the disk lost writes while this one was under way")
