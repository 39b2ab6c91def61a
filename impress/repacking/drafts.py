"""Copies under way: space that no span owns yet. Each is the repacker's, then the committer's.

reserved ─add→ here ─hand→ the committer's ─over→ a span's, or free
                └─give_back→ free
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from impress.spans.format import SpanRecord
from impress.write.jobs import SwapJob


class Drafts:
    """For the thread of a pass, except `over`, which the committer calls, and `records`."""

    def __init__(
        self, scrap: Callable[[list[SpanRecord]], None], writes: Callable[[], bool]
    ) -> None:
        """`scrap`: erases drafts' bytes and gives their space back; once off the list it is free,
        or somebody else's to free. `writes`: whether something may still be written to one; then
        none is given back before the next call of `give_back_rest`."""
        self._scrap = scrap
        self._writes = writes
        self._drafts: dict[int, list[SpanRecord]] = {}  # one each; or none, once its space is free
        # What the committer takes a draft from: once empty, the committer has it.
        self._handed: dict[int, Iterator[SwapJob]] = {}

    def add(self, draft: SpanRecord) -> None:
        self._drafts[draft.span_id] = [draft]

    def records(self) -> list[SpanRecord]:
        return [draft for left in [*self._drafts.values()] for draft in [*left]]

    def hand(self, job: SwapJob) -> Iterator[SwapJob]:
        """What the committer takes the job from; it owns the draft from then on."""
        jobs = iter((job,))
        self._handed[job.header.record.span_id] = jobs
        return jobs

    def over(self, span: int) -> None:
        """Its space is a span's, or free."""
        self._drafts.pop(span, None)  # first: see `give_back_rest`
        self._handed.pop(span, None)

    def give_back(self, draft: SpanRecord) -> None:
        """Give its space back. If cut off, `give_back_rest` goes on with what is left of it."""
        self._end(draft.span_id)

    def give_back_rest(self) -> None:
        """Give back those that the committer was not given: an exception (Ctrl-C) came between."""
        for span in [*self._drafts]:
            for _ in self._handed.get(span, ()):
                del self._handed[span]  # taken from it: no signal comes between
            if span in self._handed or span not in self._drafts:  # in this order: see `over`
                continue
            self._end(span)

    def _end(self, span: int) -> None:
        if left := self._drafts[span]:
            if self._writes():
                return
            self._scrap(left)
        self.over(span)
