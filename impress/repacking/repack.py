"""The repacker: rows that are chosen often move together, span by span, giving way to all else.
And where a span is mostly dead, its other windows evicted, the live part is rewritten.

decide (packing.py) → copy on lane REPACK (span_copy.py) → one transaction swaps the spans
(swap.py) → the tree shows the new one; the old one is reclaimed after its last lease (home.py).
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from time import monotonic

from impress.config import Config
from impress.errors import StoreFailed
from impress.repacking.drafts import Drafts
from impress.repacking.packing import known_of, plan_repack
from impress.repacking.report import (
    LATER,
    LINGERING,
    NO_ROOM,
    READ_ONLY,
    REWRITTEN,
    SPENT,
    WOULD,
    Move,
    Pass,
    RepackReport,
    unmoved,
)
from impress.repacking.span_copy import Copier, Gone, SpanPart, Stopped
from impress.spans.format import SpanHeader, SpanRecord
from impress.spans.layout import K, V
from impress.stats import Counters
from impress.tree.catalog import Held
from impress.types import an_int
from impress.write.budget import Pace
from impress.write.home import Home
from impress.write.jobs import SwapJob, Swapped
from impress.write.leaving import COMMIT_TIMEOUT_S, SMALL_PART
from tiers.base import Slot
from tiers.errors import MediumError, ReadFailed
from tiers.iopool import IoPool
from tiers.threads import Worker
from tiers.ticket import Signal, until

log = logging.getLogger("impress")

#: Longest that a slice stands back for requests under way, and how often it looks: where there is
#: always one, a pass goes on at some 4 MiB a second (not at all where their reads always queue).
PATIENCE_S = 0.25
NAP_S = 0.002
#: Leases a span must have had since it was last looked at for a background pass to look again.
LEAST_LEASES = 8
#: A span of which more than this share is dead is rewritten without it.
DEAD_SHARE = 0.5


class Repacker:
    """One pass at a time, one span at a time. Thread-safe."""

    def __init__(
        self, home: Home, pool: IoPool, config: Config, counters: Counters,
        busy: Callable[[], bool],
    ) -> None:  # fmt: skip
        """`busy`: whether requests are being served; their turn comes first. Raises MediumError
        where no thread can be started."""
        assert home.committer is not None, "what is only read is not repacked"
        self._home, self._committer = home, home.committer
        self._config = config
        self._counters = counters
        self._stop = Signal()
        pace = Pace(config.repack_bytes_per_s, monotonic, self._stop.wait)
        self._copier = Copier(home.ssd, pool, pace, partial(self._stand_back, busy))
        self._pass = threading.Lock()  # held for a whole pass; only passes take it
        self._looked: dict[int, int] = {}  # span -> its leases when a background pass last looked
        self._moved: set[int] = set()  # out of the tree, perhaps not reclaimed yet
        self._drafts = Drafts(self._scrap, lambda: self._copier.under_way)
        self._reserving = 0  # bytes of a copy that is not a draft yet
        home.leaving.copies_bytes = self._copies_bytes
        home.leaving.cut_off = self.cut_off
        self._sync_failures = 0  # the tier's, when the copy was reserved
        self._thread: Worker | None = None
        if config.repack_every_s:
            thread = Worker(self._work, "impress-repack")
            thread.start()
            self._thread = thread  # last: `close` joins it

    def run(self, *, dry_run: bool, max_bytes: int | None = None) -> RepackReport:
        """A pass over every span, hottest first; writes at most max_bytes. Waits for another pass.
        Spans that are mostly dead come before all others: they give space back."""
        max_bytes = None if max_bytes is None else an_int(max_bytes, "repack: max_bytes")
        with self._pass:
            heat = self._home.catalog.heat()
            spans = [record.span_id for record in self._home.catalog.own_records()]
            spans.sort(key=lambda span: -heat.get(span, (0, 0))[0])
            return self._run(spans, dry_run, max_bytes, {})

    def run_leased(self) -> RepackReport:
        """A pass over spans that are mostly dead, or leased often since it last looked at them."""
        with self._pass:
            heat = {span: hits for span, (hits, _) in self._home.catalog.heat().items()}
            known = {span: n for span, n in self._looked.items() if span in heat}
            due = {s: hits for s, hits in heat.items() if hits - known.get(s, 0) >= LEAST_LEASES}
            self._looked = known
            return self._run(sorted(due, key=lambda span: -due[span]), False, None, due)

    def drafts(self) -> list[SpanRecord]:
        """Copies under way, and those whose commit is late: space that no span owns yet."""
        return self._drafts.records()

    @property
    def writing(self) -> bool:
        """Whether a copy is under way."""
        return bool(self._drafts.records())

    def cut_off(self) -> list[SpanRecord]:
        """Give back copies of a pass cut off during a write; returns those still written to."""
        if self._pass.locked():
            return []  # a pass is under way
        with self._pass:  # taken otherwise, Ctrl-C could leave it taken
            self._drafts.give_back_rest()
            return self._drafts.records() if self._copier.under_way else []

    def _copies_bytes(self) -> int:
        return self._reserving + sum(draft.owned_bytes for draft in self._drafts.records())

    def close(self, timeout_s: float) -> None:
        """Stop after the slice under way; what is half copied is given back."""
        self._stop.set()
        if self._thread is not None:
            self._thread.ended(timeout_s)
        until(lambda: not self._pass.locked(), timeout_s)  # a pass that someone else runs
        self.cut_off()

    # ---- a pass ----------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                if not self._stop.wait(self._config.repack_every_s):
                    self._attempt()
            except Exception:  # a log handler that fails, no memory to wait with
                continue

    def _attempt(self) -> None:
        try:
            self.run_leased()
        except Exception:
            log.exception("a repack pass failed; the next one tries again")

    def _mostly_dead(self) -> dict[int, None]:
        """Spans to rewrite, as an ordered set."""
        dead = self._home.catalog.own_dead()
        return dict.fromkeys(d.span for d in dead if d.n_dead > DEAD_SHARE * d.n_windows)

    def _run(
        self, spans: list[int], dry_run: bool, max_bytes: int | None, due: Mapping[int, int]
    ) -> RepackReport:
        """`due`: spans, with the leases to note for each once the pass comes to it."""
        report, so_far = RepackReport(dry_run), Pass(dry_run, max_bytes)
        self._drafts.give_back_rest()  # of a pass that was cut off during a write
        dead = self._mostly_dead()
        for span in [*dead, *(span for span in spans if span not in dead)]:
            if self._stop.is_set():
                break
            if span in due:  # in its turn: whatever ends a pass leaves those after it due
                self._looked[span] = due[span]
            pinned: list[Held] = []
            try:
                views = self._home.catalog.hold_span(span, pinned)
                if not views:
                    continue
                header = self._copier.header(pinned[0].record)
                runs = [(view.first, view.n_windows) for view in views]
                move = self._examine(pinned[0], header, runs, rewrite=span in dead)
                if move is not None:
                    outcome = self._deal_with(move, so_far)
                    report.spans.append(move.report(outcome))
                    so_far.count(move, outcome)
                    if outcome in LATER and span in due:  # due again with its next lease
                        self._looked[span] = due[span] - LEAST_LEASES + 1
            except ReadFailed as err:
                if not err.harmless and not dry_run:
                    self._home.leaving.quarantine(span)
                report.spans.append(unmoved(pinned[0].record, err))
            except MemoryError as err:  # a large one's, each time: those after it have their turn
                report.spans += [unmoved(held.record, err) for held in pinned]
            except Stopped:
                break
            finally:
                self._tidy(pinned)
            if span in self._moved:
                with suppress(StoreFailed):  # its space is given back by then; or it is closed
                    self._committer.barrier(COMMIT_TIMEOUT_S)
                if self._home.reclaimer is not None:  # or will be soon, by another thread
                    self._home.reclaimer.at_rest(lambda: None)
        return report

    def _tidy(self, pinned: list[Held]) -> None:
        """Whatever ended a span's turn, nothing of it stays taken."""
        try:
            self._drafts.give_back_rest()
            self._home.release(pinned)
        except BaseException:
            self._home.release(pinned)
            raise

    def _examine(
        self, held: Held, header: SpanHeader, views: list[tuple[int, int]], *, rewrite: bool
    ) -> Move | None:
        """What to do with a span; None where nothing is known of its rows."""
        first, end = min(first for first, _ in views), max(first + n for first, n in views)
        # Dead windows between two live ones stay: another pass would only copy them again.
        if rewrite and held.record.n_windows - (end - first) > DEAD_SHARE * held.record.n_windows:
            part = SpanPart.as_it_lies(header, first, end - first)
            return Move(held, part, None)
        return self._order(held, header, views)

    def _order(self, held: Held, header: SpanHeader, views: list[tuple[int, int]]) -> Move | None:
        """The order a span should have; None where nothing is known of its rows."""
        history, span = self._home.history, held.record.span_id
        average, halves = history.average(span, of_any_size=True), history.halves(span)
        known = known_of(average, halves, header.importance, header.order)
        if known is None:
            return None
        window, n_windows = held.record.window, held.record.n_windows
        rows = [(first * window, n * window) for first, n in views]
        gap, planes = self._config.read_gap_bytes, [header.layout.planes[plane] for plane in (K, V)]
        plan = plan_repack(*known, header.order, rows, planes, window, gap)
        return Move(held, SpanPart(header, 0, n_windows, plan.slots), plan)

    def _deal_with(self, move: Move, so_far: Pass) -> str:
        """Move it, or say why not."""
        health, most = self._home.health, so_far.most_bytes
        if move.plan is not None and not move.plan.worth_it:
            return "lies well"
        if move.n_bytes > self._config.repack_space_bytes:
            return "larger than repack_space_bytes"
        if most is not None and so_far.n_bytes + move.n_bytes > most:
            return "over this pass's bytes"
        if health.failing if so_far.dry_run else health.refusal(0):  # it may write, to find out
            return READ_ONLY
        if so_far.dry_run:
            return self._would(move, so_far)
        if self._lingers(move.n_bytes):
            return LINGERING
        # Before room is reserved: to give that back, it would have to be erased and synced.
        if not self._home.budget.allow(move.n_bytes):
            return SPENT
        draft = self._reserve(move)
        if draft is None:
            return NO_ROOM
        outcome = self._move(move, draft)
        if outcome is not Swapped.YES:  # YES is counted once it is known, which may be later
            self._counters.add(f"repacks/{outcome.name.lower()}")
        else:  # the new span keeps the leases
            self._looked[draft.span_id] = self._looked.get(move.held.record.span_id, 0)
            if move.plan is None:
                return REWRITTEN
        return str(outcome.value)

    def _lingers(self, n_bytes: int) -> bool:
        """Whether n_bytes more are too many, besides copies whose commit is late and what moved
        spans still take because somebody holds them. Other processes get a while to let go.
        """
        home = self._home
        for patient in (False, True):
            if patient and home.reclaimer is not None:
                home.reclaimer.wait_for([*self._moved])
            moved = {*self._moved}  # a late commit may add to it at any moment

            def look(moved: set[int] = moved) -> list[SpanRecord]:
                return [*home.catalog.retired_records(moved), *home.leaving.in_limbo]

            # Both together: else one on its way into limbo is in neither.
            found = look() if home.reclaimer is None else home.reclaimer.settled(look)
            left = {r.span_id: r.owned_bytes for r in found if r.span_id in moved}
            self._moved -= moved - left.keys()
            late = sum(draft.owned_bytes for draft in self._drafts.records())
            if late + sum(left.values()) + n_bytes <= self._config.repack_space_bytes:
                return False
        return True

    def _would(self, move: Move, so_far: Pass) -> str:
        """What would come of it after the moves before it, if nobody holds what they leave."""
        ssd, left = self._home.ssd, self._home.budget.left_bytes
        if left is not None and so_far.n_bytes + move.n_bytes > left:
            return SPENT
        usage, capacity = ssd.usage(), ssd.capacity_bytes
        growth = math.inf if capacity is None else max(0, capacity - usage.total)
        if ssd.no_room:  # the file system is full
            growth = 0
        data = move.part.layout.data_bytes
        holed = ssd.missing(max(0, so_far.taken + data), SMALL_PART) > growth
        header = move.header_bytes(1)  # in any hole
        if holed or so_far.taken + data + header > usage.free + growth:
            return NO_ROOM
        return WOULD[0] if move.plan is not None else WOULD[1]

    # ---- a move ----------------------------------------------------------------------------

    def _reserve(self, move: Move) -> SpanRecord | None:
        """Reserve room for the copy, in parts as small as a store's; nothing is evicted for it. On
        None, or an error, its part of the day's writes is given back."""
        ssd, layout = self._home.ssd, move.part.layout
        self._sync_failures, self._copier.n_written = ssd.sync_failures, 0
        data = meta = draft = None
        self._reserving = move.n_bytes
        try:
            with suppress(MediumError):
                data = ssd.reserve(layout.data_bytes, SMALL_PART)
                if data is not None:
                    size = move.header_bytes(len(data.parts))
                    meta = ssd.reserve(size, size)
            # A header is one extent, for scans.
            if data is not None and meta is not None and len(meta.parts) == 1:
                draft = move.part.record(next(self._home.span_ids), meta.parts[0], data.parts)
                self._drafts.add(draft)
        finally:  # there is no room, no memory for it, Ctrl-C
            if draft is None or draft not in self._drafts.records():
                self._home.budget.refund(move.n_bytes)
                for slot in (data, meta):
                    if slot is not None:
                        ssd.free(slot)
            self._reserving = 0  # last: it may count twice, but never not at all
        return draft

    def _scrap(self, left: list[SpanRecord]) -> None:
        self._home.leaving.spoil([draft.span_id for draft in left])
        self._home.scrap(left)

    def _move(self, move: Move, draft: SpanRecord) -> Swapped:
        """Copy, then commit. Raises Stopped; whatever happens, the space is somebody's."""

        def alive() -> bool:
            return self._home.catalog.heat_of(move.held.record.span_id) is not None

        try:
            self._committer.intend(draft, COMMIT_TIMEOUT_S)
            sums = self._copier.copy(move.part, Slot(draft.parts), alive)
            header = move.part.header_of(draft, sums)
        except (StoreFailed, MediumError, MemoryError) as err:
            self._drafts.give_back(draft)
            short = isinstance(err, MemoryError) or getattr(err, "reason", "") == "shortage"
            if short:  # of memory, for a large span in each pass: that would spend the day's writes
                self._home.budget.refund(move.n_bytes - self._copier.n_written)
            span, why = move.held.record.span_id, str(err) or "no memory"
            if isinstance(err, ReadFailed):
                if not err.harmless:
                    self._home.leaving.quarantine(span)
            elif isinstance(err, MediumError):
                self._home.health.trouble(why)
            log.warning("span %d was not repacked: %s", span, why)
            return Swapped.FAILED
        except Gone:
            self._drafts.give_back(draft)
            return Swapped.GONE
        except BaseException:
            self._drafts.give_back(draft)
            raise
        return self._commit(move, header)

    def _commit(self, move: Move, header: SpanHeader) -> Swapped:
        """Hand the copy to the committer, which owns it from here on."""
        ended, outcomes = Signal(), [Swapped.LATE]

        def done(outcome: Swapped) -> None:
            outcomes.append(outcome)
            self._drafts.over(header.record.span_id)  # the next copy may be under way by now
            if outcome is Swapped.YES:
                self._moved.add(old)
                self._counters.add("repacks/yes")
            ended.set()

        old, skip = move.held.record.span_id, move.part.first
        job = SwapJob(old, header, done, skip, self._sync_failures)
        try:
            self._committer.queue(self._drafts.hand(job))
        except StoreFailed:  # closed
            self._drafts.give_back(header.record)
            raise Stopped from None
        ended.wait(COMMIT_TIMEOUT_S)
        return outcomes[-1]

    def _stand_back(self, busy: Callable[[], bool]) -> bool:
        """Let requests under way go first, for a while; False when the store is closing."""
        give_up_s = monotonic() + PATIENCE_S
        while busy() and monotonic() < give_up_s:
            if self._stop.wait(NAP_S):
                return False
        return True
