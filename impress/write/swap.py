"""Copies that take a span's place: noted before their first byte, swapped in by one transaction.

intend ─> erase note ─(repacking/ copies)─> swap: new span in, its note and the old one out

Whatever a crash cuts off in between is noted as to be erased: the next open does that, and no
rebuild brings it back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from impress.errors import ImpressError, StoreFailed
from impress.spans.format import SpanRecord, encode_index
from impress.tree.merged import MergedCatalog
from impress.usage.history import History
from impress.write.changes import Change
from impress.write.headers import Headers
from impress.write.index import Index
from impress.write.jobs import Duties, Intent, SwapJob, Swapped
from tiers.errors import MediumError

log: Final = logging.getLogger("impress")

_SPEECHLESS: Final = StoreFailed("the committer failed, and could not say of what")


class Swaps:
    """Those of one shard; for the committer's thread."""

    def __init__(
        self, index: Index, headers: Headers, catalog: MergedCatalog, history: History,
        duties: Duties, delete: Callable[[list[int]], None], unseen: dict[int, SpanRecord],
    ) -> None:  # fmt: skip
        """`delete`: deletes retired spans, now. `unseen`: what the index may name and the tree not
        yet show."""
        self._index = index
        self._headers = headers
        self._catalog = catalog
        self._history = history
        self._duties = duties
        self._delete = delete
        self._unseen = unseen

    def intend(self, intent: Intent) -> None:
        """Note a copy, and what it takes of the day's writes. Raises StoreFailed."""
        try:
            self._index.commit({}, wear=self._duties.wear(), intend=[intent.record])
        except StoreFailed as err:
            self._duties.trouble(str(err))
            raise

    def swap(self, job: SwapJob) -> Swapped:
        """Old or new is in the index at any moment, never both and never neither."""
        record = job.header.record
        heat = self._catalog.heat_of(job.old)
        if heat is None:
            return self._spoilt(record, Swapped.GONE)
        try:
            record = self._headers.put(job.header)
            self._headers.sync([(record, job.sync_failures)])
            before = self._catalog.labels_to(job.old, record.first_window)
            if before is not None:  # else it left the tree since heat_of looked
                change = Change(record.span_id, job.old, before + record.labels)
                known = self._history.carry(job.old, record.span_id, job.skip, record.n_windows)
                self._unseen[record.span_id] = record
                self._index.commit(
                    {record.span_id: encode_index(record)}, [job.old], {record.span_id: heat},
                    wear=self._duties.wear(), changes=[change], history=known,
                    tick=self._history.tick, erase=(job.old,),
                )  # fmt: skip
        except Exception as err:
            self._unseen.pop(record.span_id, None)
            why = str(failed(err))
            if isinstance(err, StoreFailed | MediumError) and not getattr(err, "harmless", False):
                self._duties.trouble(why)
            log.warning("span %d was not repacked: %s", job.old, why)
            return self._spoilt(record, Swapped.FAILED)  # what history carried is forgotten
        if before is None:
            return self._spoilt(record, Swapped.GONE)
        try:
            is_shown = self._catalog.replace(job.old, record)
        except Exception:  # the index no longer names the old one: what shows it is taken back
            for old in self._catalog.retired_records([job.old]):
                self._unseen[job.old] = old
            raise
        if not is_shown:  # it left since labels_to looked
            self._duties.spoil([record.span_id])
            self._delete([record.span_id])
        self._unseen.pop(record.span_id, None)
        if not is_shown:
            return Swapped.GONE
        self._duties.spoil([job.old])
        self._duties.reclaim(lambda free: self._catalog.deleted([job.old], free))
        return Swapped.YES

    def _spoilt(self, record: SpanRecord, outcome: Swapped) -> Swapped:
        """Nothing came of the copy, which was never visible: erased, and its space given back."""
        self._duties.spoil([record.span_id])
        self._duties.scrap([record])
        return outcome


def failed(err: Exception, what: str = "") -> StoreFailed:
    """What a store is told of an error; one that neither disk nor index raised is logged whole.

    Never raises: there may be no memory for words either, or a log handler that fails.
    """
    try:
        if not isinstance(err, ImpressError | MediumError):
            log.error("the committer goes on after an error", exc_info=err)
        told = StoreFailed(what + (str(err) or type(err).__name__))
        told.__cause__ = err
        return told
    except Exception:
        return _SPEECHLESS
