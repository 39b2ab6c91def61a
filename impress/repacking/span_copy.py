"""Rows of a span copied to another place on home: verified as they are read, in turn, at a pace.

decide (repack.py) ─> SpanPart: which windows, in which order ─> Copier ─> sums of what is there
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Final

import numpy as np

from impress.blockhash import key_after
from impress.spans.format import (
    ORDER_PACKED,
    ORDER_POSITION,
    SpanHeader,
    SpanRecord,
    layout_of,
)
from impress.spans.layout import K, SpanLayout, V
from impress.spans.order import RowOrder, Rows
from impress.spans.rows import move_rows
from impress.spans.tables import read_header
from impress.write.budget import Pace
from tiers.base import Bytes, Extent, Slot, Sums, sums_of
from tiers.errors import Cancelled
from tiers.iopool import IoPool, Lane
from tiers.slots import aligned
from tiers.ssd import SsdTier
from tiers.ticket import Task, Ticket

log = logging.getLogger("impress")

#: Bytes of one read or write: a demand never waits longer for a thread than these take.
SLICE_BYTES: Final = 1 << 20


class Stopped(Exception):
    """The store is closing."""


class Gone(Exception):
    """The span left the tree."""


@dataclass(frozen=True, slots=True)
class SpanPart:
    """Windows [first, first + count) of a span, as a span of their own.

    `slots` int64 [n_layers, count * window]: the row in each slot, counted from the part's first
    row; None: the rows lie in position order and stay so.
    """

    header: SpanHeader
    first: int
    count: int
    slots: Rows | None

    @classmethod
    def as_it_lies(cls, header: SpanHeader, first: int, count: int) -> SpanPart:
        """In the span's own order: a row stays inside what was its group."""
        if header.order is None:
            return cls(header, first, count, None)
        low, n_rows = first * header.record.window, count * header.record.window
        lying = [header.order.slots(layer) - low for layer in range(header.geometry.n_layers)]
        slots = np.stack([rows[(rows >= 0) & (rows < n_rows)] for rows in lying])
        return cls(header, first, count, slots)

    @property
    def layout(self) -> SpanLayout:
        """The copy's."""
        header = self.header
        return layout_of(header.geometry, header.record.window, self.count, header.probes)

    def record(self, span_id: int, meta: Extent, parts: tuple[Extent, ...]) -> SpanRecord:
        """The copy's: the same keys and labels for the same windows."""
        old = self.header.record
        size = 4 * old.window
        labels = old.labels[self.first * size : (self.first + self.count) * size]
        before = key_after(old.key_before, old.labels[: self.first * size], old.window)
        return replace(
            old, span_id=span_id, meta=meta, parts=parts, labels=labels, key_before=before,
            key_after=key_after(before, labels, old.window), n_windows=self.count,
            first_window=old.first_window + self.first,
            order=ORDER_POSITION if self.slots is None else ORDER_PACKED,
        )  # fmt: skip

    def header_of(self, record: SpanRecord, sums: Sums) -> SpanHeader:
        """The copy's header."""
        rows = slice(self.first * record.window, (self.first + self.count) * record.window)
        old, order = self.header, None
        if self.slots is not None:
            order = RowOrder.of(self.slots, (old.order.epoch if old.order else 0) + 1)
        importance = None if old.importance is None else old.importance[:, rows]
        return replace(old, record=record, sums=sums, importance=importance, order=order)


class Copier:
    """One copy at a time."""

    def __init__(self, ssd: SsdTier, pool: IoPool, pace: Pace, turn: Callable[[], bool]) -> None:
        self._ssd = ssd
        self._pool = pool
        self._pace = pace
        self._turn = turn  # waits for those that go first; False when the store is closing
        self._tickets: list[Ticket] = []  # those not known to be over
        self.n_written = 0
        """Bytes of copies written since this was set to 0, as whoever begins one does."""

    @property
    def under_way(self) -> bool:
        """Whether a read or write of a copy may not be over: a second Ctrl-C came during the wait
        for it."""
        return not all(ticket.done for ticket in self._tickets)

    def header(self, record: SpanRecord) -> SpanHeader:
        """A span's, at the pace; too short a read to stand back. Raises Stopped, ReadFailed."""
        if not self._pace.go(record.meta.length):
            raise Stopped
        found: list[SpanHeader] = []
        self.do(lambda: found.append(read_header(self._ssd, record)))
        return found[0]

    def copy(self, part: SpanPart, to: Slot, alive: Callable[[], bool]) -> Sums:
        """Every plane of every layer; the sums of what was written. Raises Stopped, MediumError.

        Raises Gone when `alive()`, asked before each layer, is False.
        """
        new = part.layout
        low, order = part.first * part.header.record.window, part.header.order
        sums = np.zeros(new.n_sums, dtype=np.uint64)
        for layer in range(new.n_layers):
            if not alive():
                raise Gone
            rows = None  # slot in the old span, by slot of the copy
            if part.slots is not None:
                rows = part.slots[layer] + low
                rows = rows if order is None else order.at(layer, rows)
            for plane in range(len(new.planes)):
                to_be = rows if plane in (K, V) else None
                self._copy_plane(part, to, new, layer, plane, to_be, sums)
        return sums

    def _copy_plane(
        self, part: SpanPart, to: Slot, new: SpanLayout, layer: int, plane: int,
        rows: Rows | None, sums: Sums,
    ) -> None:  # fmt: skip
        """Read what is wanted of a layer's plane, verified; write it with these rows in place. What
        stays as it lies goes slice by slice, without the plane in memory."""
        window, shape = part.header.record.window, new.planes[plane]
        n = shape.chunk_bytes
        if rows is not None:
            low, high = int(rows.min()) // window, int(rows.max()) // window + 1
            data = self._read_plane(part.header, layer, plane, low, high)
        for first, count in _runs(0, part.count, n):
            if rows is None:
                at = part.first + first
                some = self._read_plane(part.header, layer, plane, at, at + count)
            else:
                some = aligned(count * n)[: count * n]
                wanted = rows[first * window : (first + count) * window] - low * window
                move_rows(data, wanted, shape, some)
            at, off = new.sums_at(layer, plane, first), new.chunk_off(layer, plane, first)
            sums[at : at + count * shape.pieces] = sums_of(some, shape.piece_bytes)
            self.n_written += len(some)
            self._slice(len(some), partial(self._ssd.write, to, off, some))

    def _read_plane(self, header: SpanHeader, layer: int, plane: int, low: int, high: int) -> Bytes:
        """Chunks [low, high) of a plane."""
        n = header.layout.planes[plane].chunk_bytes
        data = aligned((high - low) * n)[: (high - low) * n]
        for first, count in _runs(low, high, n):
            part = data[(first - low) * n : (first - low + count) * n]
            read = header.read_of(layer, plane, first, part)
            self._slice(len(part), partial(self._ssd.read, [read]))
        return data

    def _slice(self, n_bytes: int, task: Callable[[], None]) -> None:
        """One read or write in its turn and at its pace. Raises Stopped, MediumError."""
        if not self._pace.go(n_bytes) or not self._turn():
            raise Stopped
        self.do(task)

    def do(self, task: Task) -> None:
        """Run it on lane REPACK, to its end: a write given up midway could land on another's."""
        tickets: list[Ticket] = []
        begun: list[float] = []
        self._tickets = [ticket for ticket in self._tickets if not ticket.done]

        def run() -> None:
            begun.append(monotonic())
            task()

        try:
            # Noted before it is queued: Ctrl-C may come between that and the return of `submit`.
            self._pool.submit(Lane.REPACK, [run], note=tickets.append)
            while not tickets[0].wait(60.0):
                said = "waits for its turn behind requests"
                if begun:
                    said = f"has taken {monotonic() - begun[0]:.0f} s so far"
                log.warning("repack: a read or write %s", said)
        except Cancelled:
            raise Stopped from None
        finally:  # Ctrl-C too
            self._tickets += tickets
            for ticket in tickets:
                ticket.cancel()
            self._pool.run_here(Lane.REPACK, tickets)  # not begun: it ends here, not in its turn
            for ticket in tickets:
                while not ticket.over(60.0):
                    pass


def _runs(low: int, high: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """(first, count) of windows that make a slice."""
    step = max(1, SLICE_BYTES // chunk_bytes)
    return [(w, min(step, high - w)) for w in range(low, high, step)]
