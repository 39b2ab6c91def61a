"""What a pass of the repacker did, or would do: one line per span, with its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from impress.repacking.packing import Cost, Repacking
from impress.repacking.span_copy import SpanPart
from impress.spans.format import SpanRecord, meta_bytes
from impress.spans.order import order_bytes
from impress.tree.catalog import Held
from impress.write.jobs import Swapped
from tiers.base import round_up
from tiers.errors import ReadFailed

#: Outcomes of a span that is left for another time, in a dry run too.
NO_ROOM = "no room for a copy"
SPENT = "daily_write_bytes are spent"
#: Not in a dry run, which holds nothing.
LINGERING = "repack_space_bytes are held: spans that moved are still read, or a commit is late"
READ_ONLY = "read-only"
LATER = (NO_ROOM, SPENT, LINGERING, READ_ONLY)
#: Outcomes by which a copy took a span's place.
REWRITTEN = "rewritten"
DONE = (Swapped.YES.value, REWRITTEN)
#: And those of a dry run that stand for them.
WOULD = ("would move", "would rewrite")
#: Outcomes of a span for which nothing is begun: its header is bad, or memory is short.
UNREADABLE = "does not read back"
NO_MEMORY = "no memory"
#: Outcomes of copies that were begun, whatever came of them: they wrote.
WRITTEN = (*(outcome.value for outcome in Swapped), REWRITTEN)


@dataclass(frozen=True, slots=True)
class SpanReport:
    """What repacking a span would take and save; costs are estimates for one request.

    None: not known. Nothing is estimated for a rewrite, which leaves rows in their order, for a
    span that cannot be read, or, but for `gain`, for one that has an order and of which too little
    is known for another.
    """

    span: int
    n_tokens: int
    move_bytes: int  # to be written, and as many read
    outcome: str
    before: Cost | None = None
    after: Cost | None = None
    gain: float | None = None  # see Repacking
    dead_share: float | None = None  # of a rewrite: of the windows, those it leaves behind


@dataclass(frozen=True, slots=True)
class Move:
    """A held span and what might take its place."""

    held: Held
    part: SpanPart
    plan: Repacking | None  # None: a rewrite, for the sake of the windows that are dead

    @property
    def n_bytes(self) -> int:
        """The copy's, about: its header has an order where the span's has none; it may lie in more
        parts, each of which takes some bytes there."""
        part, order = self.part, 0
        if part.slots is not None and part.header.order is None:
            order = round_up(order_bytes(*part.slots.shape))
        return part.layout.data_bytes + self.held.record.meta.length + order

    def header_bytes(self, n_parts: int) -> int:
        """Room that the copy's header takes until it is written."""
        layout, window = self.part.layout, self.held.record.window
        return meta_bytes(n_parts, layout.n_windows, window, layout.n_layers, layout.n_sums)

    def report(self, outcome: str) -> SpanReport:
        record, plan = self.held.record, self.plan
        n_tokens = record.n_windows * record.window
        told = SpanReport(record.span_id, n_tokens, self.n_bytes, outcome)
        if plan is None:
            return replace(told, dead_share=1 - self.part.count / record.n_windows)
        return replace(told, before=plan.before, after=plan.after, gain=plan.gain)


@dataclass(slots=True)
class Pass:
    """What a pass wrote so far, or would have. `most_bytes` it may write; None: no bound."""

    dry_run: bool
    most_bytes: int | None
    n_bytes: int = 0
    taken: int = 0  # by a dry run: of the disk, less what the spans that would move give back

    def count(self, move: Move, outcome: str) -> None:
        if outcome in WRITTEN + WOULD:
            self.n_bytes += move.n_bytes
        if outcome in WOULD:
            self.taken += move.n_bytes - move.held.record.owned_bytes


@dataclass(slots=True)
class RepackReport:
    """One pass. Spans about which nothing is known are not in it."""

    dry_run: bool
    spans: list[SpanReport] = field(default_factory=list)

    @property
    def moved(self) -> int:
        """Spans moved or rewritten."""
        return sum(span.outcome in DONE for span in self.spans)

    @property
    def moved_bytes(self) -> int:
        return sum(s.move_bytes for s in self.spans if s.outcome in DONE)

    @property
    def picked(self) -> list[SpanReport]:
        """Spans moved or rewritten; of a dry run, those that would be."""
        return [span for span in self.spans if span.outcome in DONE + WOULD]

    @property
    def picked_bytes(self) -> int:
        return sum(span.move_bytes for span in self.picked)


def unmoved(record: SpanRecord, err: ReadFailed | MemoryError) -> SpanReport:
    """For a span whose header cannot be read, or for which there is no memory."""
    n_tokens = record.n_windows * record.window
    outcome = NO_MEMORY
    if isinstance(err, ReadFailed):
        outcome = Swapped.FAILED.value if err.harmless else UNREADABLE
    return SpanReport(record.span_id, n_tokens, 0, outcome)
