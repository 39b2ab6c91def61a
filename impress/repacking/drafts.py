"""Copies under way: space that no span owns yet. Each is the repacker's, then the committer's.

reserved ─add→ here ─hand→ the committer's ─over→ a span's, or free
                └─give_back→ free
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from impress.spans.format import SpanRecord
from impress.write.jobs import SwapJob


class Drafts:
    """For the thread of a pass; but `over`, which the committer calls, and `records`."""

    def __init__(self, scrap: Callable[[SpanRecord], None]) -> None:
        """`scrap`: erases a draft's bytes and gives its space back."""
        self._scrap = scrap
        self._drafts: dict[int, SpanRecord] = {}
        # What the committer takes a draft from: empty, it has it.
        self._handed: dict[int, Iterator[SwapJob]] = {}

    def add(self, draft: SpanRecord) -> None:
        self._drafts[draft.span_id] = draft

    def records(self) -> list[SpanRecord]:
        return list(self._drafts.values())

    def hand(self, job: SwapJob) -> Iterator[SwapJob]:
        """For the committer to take it from, which owns it from then on."""
        jobs = iter((job,))
        self._handed[job.header.record.span_id] = jobs
        return jobs

    def over(self, span: int) -> None:
        """Its space is a span's, or free."""
        del self._drafts[span]  # first: see `give_back_rest`
        self._handed.pop(span, None)

    def give_back(self, draft: SpanRecord) -> None:
        try:
            self._scrap(draft)
        finally:  # cut off, too: what was begun of it others finish, and it may be begun but once
            self.over(draft.span_id)

    def give_back_rest(self) -> None:
        """Those that the committer was not given: an exception (Ctrl-C) came between."""
        for span, draft in [*self._drafts.items()]:
            jobs = self._handed.get(span)
            mine = span in self._drafts if jobs is None else next(jobs, None) is not None
            if mine:
                self.give_back(draft)
