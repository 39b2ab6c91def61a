"""The repacker: rows that are chosen often move together, span by span, behind everything else.

decide (packing.py) → copy on lane REPACK → one transaction swaps the spans (commit.py) → the tree
shows the new one, and the old one is reclaimed after its last lease (home.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic

import numpy as np

from impress.budget import Clock, Pace, WriteBudget
from impress.catalog import Held
from impress.commit import SwapJob, Swapped
from impress.config import Config
from impress.errors import StoreFailed
from impress.format import ORDER_PACKED, SpanHeader, SpanRecord, meta_bytes
from impress.home import COMMIT_TIMEOUT_S, Home
from impress.layout import K, SpanLayout, V
from impress.order import RowOrder, Rows
from impress.packing import Cost, Repacking, likely_chosen, plan_repack, tiled
from impress.rows import move_rows
from impress.stats import Counters
from impress.tables import read_header
from impress.types import Geometry
from tiers.base import Read, Slot, Sums, sums_of
from tiers.errors import Cancelled, MediumError, ReadFailed
from tiers.iopool import IoPool, Lane, Task
from tiers.slots import aligned

log = logging.getLogger("impress")

#: One read or write: a demand never waits longer for a thread than this takes.
SLICE_BYTES = 1 << 20
#: Longest that a slice stands back for requests under way, and how often it looks: where there is
#: always one, a pass goes on at some 4 MiB a second.
PATIENCE_S = 0.25
NAP_S = 0.002
#: Leases a span must have had since it was last looked at for the background to look again.
LEAST_LEASES = 8


@dataclass(frozen=True, slots=True)
class SpanReport:
    """What packing a span anew would take and save; costs are a request's, by an estimate."""

    span: int
    n_tokens: int
    move_bytes: int  # to be written, and as many read
    before: Cost
    after: Cost
    gain: float  # see Repacking
    outcome: str


@dataclass(slots=True)
class RepackReport:
    """One pass. Spans of which nothing is known are not in it."""

    dry_run: bool
    spans: list[SpanReport] = field(default_factory=list)

    @property
    def moved(self) -> int:
        """Spans moved."""
        return sum(span.outcome == Swapped.YES.value for span in self.spans)

    @property
    def moved_bytes(self) -> int:
        return sum(s.move_bytes for s in self.spans if s.outcome == Swapped.YES.value)


@dataclass(frozen=True, slots=True)
class _Move:
    """A held span and the order it might be given."""

    held: Held
    header: SpanHeader
    layout: SpanLayout
    plan: Repacking

    @property
    def n_bytes(self) -> int:
        return self.layout.data_bytes + self.held.record.meta.length

    def report(self, outcome: str) -> SpanReport:
        record, plan = self.held.record, self.plan
        n_tokens = record.n_windows * record.window
        return SpanReport(
            record.span_id, n_tokens, self.n_bytes, plan.before, plan.after, plan.gain, outcome
        )


class _Stopped(Exception):
    """The store is closing."""


class _Gone(Exception):
    """The span left the tree."""


class Repacker:
    """One pass at a time, one span at a time. Thread-safe."""

    def __init__(
        self, home: Home, pool: IoPool, geometry: Geometry, config: Config, counters: Counters,
        busy: Callable[[], bool], clock: Clock = monotonic,
    ) -> None:  # fmt: skip
        """`busy`: whether requests are being served, whose turn comes first."""
        self._home = home
        self._pool = pool
        self._geometry = geometry
        self._config = config
        self._counters = counters
        self._stop = threading.Event()
        self._busy = busy
        self._clock = clock
        self._pace = Pace(config.repack_bytes_per_s, clock, self._stop.wait)
        self._budget = WriteBudget(config.daily_write_bytes, clock)
        self._pass = threading.Lock()  # held for a whole pass; only passes take it
        self._looked: dict[int, int] = {}  # span -> its leases when the background last looked
        self._draft: SpanRecord | None = None  # space that no span owns yet
        self._thread: threading.Thread | None = None
        if config.repack_every_s:
            self._thread = threading.Thread(target=self._work, name="impress-repack", daemon=True)
            self._thread.start()

    def run(self, *, dry_run: bool, max_bytes: int | None = None) -> RepackReport:
        """A pass over every span, hottest first; writes at most max_bytes. Waits for another's."""
        with self._pass:
            heat = self._home.catalog.heat()
            spans = [record.span_id for record in self._home.catalog.records()]
            spans.sort(key=lambda span: -heat.get(span, (0, 0))[0])
            return self._run(spans, dry_run, max_bytes)

    def run_leased(self) -> RepackReport:
        """A pass over the spans leased often enough since they were last looked at."""
        with self._pass:
            heat = {span: hits for span, (hits, _) in self._home.catalog.heat().items()}
            known = {span: n for span, n in self._looked.items() if span in heat}
            due = [s for s, hits in heat.items() if hits - known.get(s, 0) >= LEAST_LEASES]
            self._looked = known | {span: heat[span] for span in due}
            return self._run(sorted(due, key=lambda span: -heat[span]), False, None)

    def drafts(self) -> list[SpanRecord]:
        """The copy under way: space that no span owns yet."""
        draft = self._draft
        return [] if draft is None else [draft]

    def close(self, timeout_s: float) -> None:
        """Stop after the slice under way; what is half copied is given back."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._pass.acquire(timeout=timeout_s):  # a pass that someone else runs
            self._pass.release()

    # ---- a pass ----------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._stop.wait(self._config.repack_every_s):
            try:
                self.run_leased()
            except Exception:
                log.exception("a repack pass failed; the next one tries again")

    def _run(self, spans: list[int], dry_run: bool, max_bytes: int | None) -> RepackReport:
        report = RepackReport(dry_run)
        for span in spans:
            found = self._home.catalog.hold_span(span)
            if self._stop.is_set() or found is None:
                continue
            held, views = found
            try:
                move = self._examine(held, [(view.first, view.n_windows) for view in views])
                if move is not None:
                    left = None if max_bytes is None else max_bytes - report.moved_bytes
                    report.spans.append(move.report(self._deal_with(move, dry_run, left)))
            except _Stopped:
                break
            finally:
                self._home.release([held])
        return report

    def _examine(self, held: Held, views: list[tuple[int, int]]) -> _Move | None:
        """The order for a span; None where nothing is known of its rows, or it cannot be read."""
        found: list[SpanHeader] = []
        try:
            self._do(lambda: found.append(read_header(self._home.ssd, held.record)))
        except ReadFailed:
            self._home.quarantine(held.record.span_id)
            return None
        (header,) = found
        worth = chosen = self._home.history.average(held.record.span_id)
        if worth is None and header.importance is not None:
            worth = np.nan_to_num(header.importance, nan=0.0)
            chosen = likely_chosen(worth)
        if worth is None or chosen is None:
            return None
        window = held.record.window
        probe_bytes = [probe.window_bytes(window) for probe in header.probes]
        layout = SpanLayout.of(self._geometry, window, held.record.n_windows, probe_bytes)
        groups = [(a * window, n * window) for a, n in tiled(views, held.record.n_windows)]
        gap, planes = self._config.read_gap_bytes, [layout.planes[plane] for plane in (K, V)]
        plan = plan_repack(worth, chosen, header.order, groups, planes, window, gap)
        return _Move(held, header, layout, plan)

    def _deal_with(self, move: _Move, dry_run: bool, left: int | None) -> str:
        """Move it, or say why not."""
        if not move.plan.worth_it:
            return "lies well"
        if move.n_bytes > self._config.repack_space_bytes:
            return "larger than repack_space_bytes"
        if left is not None and move.n_bytes > left:
            return "over this pass's bytes"
        if dry_run:
            return "would move"
        draft = self._reserve(move)
        if draft is None:
            return "no room for a copy"
        if not self._budget.allow(move.n_bytes):
            self._give_back(draft)
            return "daily_write_bytes are spent"
        outcome = self._move(move, draft)
        self._counters.add(f"repacks/{outcome.name.lower()}")
        if outcome is Swapped.YES:  # with its leases, which it keeps
            self._looked[draft.span_id] = self._looked.get(move.held.record.span_id, 0)
        return outcome.value

    # ---- a move ----------------------------------------------------------------------------

    def _reserve(self, move: _Move) -> SpanRecord | None:
        """Room for the copy where there is some; nothing is evicted for it."""
        ssd, record = self._home.ssd, move.header.record
        with suppress(MediumError):
            data = ssd.reserve(move.layout.data_bytes)
            if data is None:
                return None
            size = meta_bytes(
                len(data.parts), record.n_windows, record.window, self._geometry.n_layers,
                move.layout.n_sums,
            )  # fmt: skip
            meta = ssd.reserve(size)
            if meta is not None and len(meta.parts) == 1:  # a header is one extent, for scans
                self._draft = replace(
                    record, span_id=next(self._home.span_ids), meta=meta.parts[0],
                    parts=data.parts, order=ORDER_PACKED,
                )  # fmt: skip
                return self._draft
            for slot in (data, meta):
                if slot is not None:
                    ssd.free(slot)
        return None

    def _give_back(self, draft: SpanRecord) -> None:
        self._home.spoil(draft.span_id)
        self._home.reclaim([draft])
        self._draft = None

    def _move(self, move: _Move, draft: SpanRecord) -> Swapped:
        """Copy, then commit. Raises _Stopped; whatever happens, the space is somebody's."""
        try:
            sums = self._copy(move, draft)
            epoch = move.header.order.epoch if move.header.order else 0
            order = RowOrder.of(move.plan.slots, epoch + 1)
            header = replace(move.header, record=draft, sums=sums, order=order)
        except MediumError as err:
            if isinstance(err, ReadFailed):
                self._home.quarantine(move.held.record.span_id)
            log.warning("span %d was not repacked: %s", move.held.record.span_id, err)
            self._give_back(draft)
            return Swapped.FAILED
        except _Gone:
            self._give_back(draft)
            return Swapped.GONE
        except BaseException:
            self._give_back(draft)
            raise
        return self._commit(move.held.record.span_id, header)

    def _commit(self, old: int, header: SpanHeader) -> Swapped:
        """Hand the copy to the committer, which owns it from here on."""
        assert self._home.committer is not None
        ended, outcomes = threading.Event(), [Swapped.FAILED]

        def done(outcome: Swapped) -> None:
            outcomes.append(outcome)
            self._draft = None
            ended.set()

        try:
            self._home.committer.swap(SwapJob(old, header, self._home.spoil, done))
        except StoreFailed:  # closed
            self._give_back(header.record)
            raise _Stopped from None
        ended.wait(COMMIT_TIMEOUT_S)
        return outcomes[-1]

    def _copy(self, move: _Move, draft: SpanRecord) -> Sums:
        """Every plane of every layer, K and V in their new order; the sums of what was written."""
        order, layout = move.header.order, move.layout
        sums = np.zeros(layout.n_sums, dtype=np.uint64)
        for layer in range(layout.n_layers):
            if self._home.catalog.heat_of(move.held.record.span_id) is None:
                raise _Gone
            slots = move.plan.slots[layer]
            rows = slots if order is None else order.at(layer, slots)  # slot now, by slot to be
            for plane in range(len(layout.planes)):
                to_be = rows if plane in (K, V) else None
                self._copy_plane(move, Slot(draft.parts), layer, plane, to_be, sums)
        return sums

    def _copy_plane(
        self, move: _Move, to: Slot, layer: int, plane: int, rows: Rows | None, sums: Sums
    ) -> None:
        """Read a plane of a layer whole, verified; write it with these rows in its slots."""
        layout, record, shape = move.layout, move.held.record, move.layout.planes[plane]
        ssd, n = self._home.ssd, shape.chunk_bytes
        data = aligned(record.n_windows * n)[: record.n_windows * n]
        step = max(1, SLICE_BYTES // n)
        runs = [(w, min(step, record.n_windows - w)) for w in range(0, record.n_windows, step)]
        for first, count in runs:
            part = data[first * n : (first + count) * n]
            at = layout.sums_at(layer, plane, first)
            want = move.header.sums[at : at + count * shape.pieces]
            off = layout.chunk_off(layer, plane, first)
            read = Read(Slot(record.parts), off, part, want, shape.piece_bytes)
            self._slice(len(part), partial(ssd.read, [read]))
        for first, count in runs:
            part = data[first * n : (first + count) * n]
            if rows is not None:
                part = aligned(count * n)[: count * n]
                some = rows[first * record.window : (first + count) * record.window]
                move_rows(data, some, shape, part)
            at, off = layout.sums_at(layer, plane, first), layout.chunk_off(layer, plane, first)
            sums[at : at + count * shape.pieces] = sums_of(part, shape.piece_bytes)
            self._slice(len(part), partial(ssd.write, to, off, part))

    def _slice(self, n_bytes: int, task: Callable[[], None]) -> None:
        """One read or write in its turn and at its pace. Raises _Stopped, MediumError."""
        if not self._pace.go(n_bytes):
            raise _Stopped
        give_up_s = self._clock() + PATIENCE_S
        while self._busy() and self._clock() < give_up_s:
            if self._stop.wait(NAP_S):
                raise _Stopped
        self._do(task)

    def _do(self, task: Task) -> None:
        """On lane REPACK, to its end: a write given up while it runs could land on another's."""
        ticket = self._pool.submit(Lane.REPACK, [task])
        try:
            while not ticket.wait(60.0):
                log.warning("repack: a read or write has taken a minute so far")
        except Cancelled:
            raise _Stopped from None
        finally:  # Ctrl-C too
            while not ticket.done:
                with suppress(MediumError):
                    ticket.wait(60.0)
