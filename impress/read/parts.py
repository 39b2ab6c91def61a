"""What a read looks at: sources on a lease, and the parts that hold a layer's wanted rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from impress.cache.copies import Copies
from impress.spans.format import ProbeRecord, layout_of
from impress.spans.layout import SpanLayout
from impress.spans.order import RowOrder
from impress.spans.tables import Tables
from impress.tree.catalog import Held
from impress.types import Geometry
from tiers.base import Slot, Sums
from tiers.errors import ReadFailed

Positions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Source:
    """A held run of windows with what it takes to read it. `at`: its first window on the lease."""

    held: Held
    layout: SpanLayout
    slot: Slot
    sums: Sums
    probes: tuple[ProbeRecord, ...]
    at: int
    order: RowOrder | None = None  # None: rows lie in position order
    in_order: bool = True  # False: where all rows are wanted, they may come as they lie

    @property
    def span(self) -> int:
        return self.held.record.span_id

    @property
    def count(self) -> int:
        """Windows held."""
        return self.held.count

    def sums_of(self, layer: int, plane: int, chunks: Positions) -> Sums:
        """[chunks, pieces]: the sums of these chunks of the span."""
        n, at = self.layout.planes[plane].pieces, self.layout.sums_at(layer, plane, 0)
        return self.sums[at : at + n * self.layout.n_windows].reshape(-1, n)[chunks]

    def ordinals(self, layer: int, rows: Positions) -> Positions:
        """Where rows of the span, counted in position order, lie in the order of its chunks."""
        return rows if self.order is None else self.order.at(layer, rows)


def sources_of(
    held: Sequence[Held], tables: Mapping[int, Tables | ReadFailed], geometry: Geometry
) -> tuple[list[Source], ReadFailed | None]:
    """Sources of the runs before the first whose tables cannot be had, and why not. Pure."""
    sources: list[Source] = []
    at = 0
    for h in held:
        table = tables[h.record.span_id]
        if isinstance(table, ReadFailed):
            return sources, table
        sources.append(source_of(h, table, geometry, at))
        at += h.count
    return sources, None


def source_of(held: Held, tables: Tables, geometry: Geometry, at: int) -> Source:
    """A held run with what it takes to read it. `at`: its first window on the lease. Pure."""
    record = held.record
    layout = layout_of(geometry, record.window, record.n_windows, tables.probes)
    return Source(held, layout, Slot(record.parts), tables.sums, tables.probes, at, tables.order)


def as_they_lie(sources: Sequence[Source]) -> tuple[Source, ...]:
    """For callers that need no order of rows, or make one themselves: see `rows_of`. Pure."""
    return tuple(replace(source, in_order=False) for source in sources)


def in_position_order(sources: Sequence[Source]) -> list[Source]:
    """Sources for planes whose rows packing does not reorder: probe records. Pure."""
    return [replace(source, order=None) for source in sources]


@dataclass(slots=True)
class Part:
    """What one layer's read looks at of a source: chunks [first, first + count) of its span.

    Those among which the wanted rows lie: in a packed span these are not the windows held. Nobody
    writes to it, but frozen it took 2 us more to make, and each layer makes some.
    """

    source: Source
    first: int
    count: int
    to: int  # where its first chunk goes in a dest that takes them all
    _ordinals: Positions | None
    layer: int = 0  # for a packed span
    is_packed: bool = False  # all rows of its chunks are wanted, and do not lie in order

    @property
    def ordinals(self) -> Positions | None:
        """Ordinals of the wanted rows, by position, from `first`; None: all, as they lie.

        Those of all rows of a packed span are found when first asked for: the thread that asks for
        all layers need not find them.
        """
        if self._ordinals is None and self.is_packed:
            held, order = self.source.held, self.source.order
            window = held.record.window
            assert order is not None, "only rows with an order are packed"
            # Those held: where a span is held in part they fill as many chunks, but other ones.
            found = order.run(self.layer, held.first * window, held.count * window)
            found -= self.first * window
            self._ordinals = found  # last: another thread may be doing the same
        return self._ordinals

    @property
    def found(self) -> Positions | None:
        """What was found of `ordinals` so far."""
        return self._ordinals

    @property
    def is_whole(self) -> bool:
        """Whether all rows of its chunks are wanted."""
        return self.is_packed or self._ordinals is None

    @property
    def as_it_lies(self) -> bool:
        """Whether all rows of its chunks are wanted, and come in another order than by position."""
        source = self.source
        anyhow = not source.in_order and source.order is not None
        return anyhow and not self.is_packed and self._ordinals is None

    @property
    def span(self) -> int:
        return self.source.span


def parts_of(sources: Sequence[Source], layer: int, positions: Positions | None) -> list[Part]:
    """For each source, where the rows at these positions (ascending, on the lease) lie.

    None: all rows. Pure.
    """
    parts: list[Part] = []
    to = 0
    for source in sources:
        held, window = source.held, source.held.record.window
        begin, end = held.first * window, (held.first + held.count) * window
        if positions is not None:
            at = source.at * window
            rows = positions
            if len(sources) > 1:  # else all of them
                cuts = positions.searchsorted((at, at + end - begin)).tolist()
                rows = positions[cuts[0] : cuts[1]]
            if begin != at:
                rows = rows + (begin - at)
        else:
            parts.append(_all_of(source, layer, to))
            to += parts[-1].count
            continue
        ordinals = source.ordinals(layer, rows)
        first, count = _chunks_of(source, ordinals)
        parts.append(
            Part(source, first, count, to, ordinals - first * window if first else ordinals)
        )
        to += count
    if positions is None and not all(part.is_whole for part in parts):
        for part in parts:  # then rows are put in order anyway, and all go the same way
            part.is_packed = part.is_packed or part.as_it_lies
    return parts


def _all_of(source: Source, layer: int, to: int) -> Part:
    """All rows held; in a packed span those fill as many chunks, or lie among others' rows."""
    held, window = source.held, source.held.record.window
    if source.order is None:
        return Part(source, held.first, held.count, to, None)
    if held.count == held.record.n_windows:
        return Part(source, 0, held.count, to, None, layer, is_packed=source.in_order)
    ordinals = source.order.run(layer, held.first * window, held.count * window)
    first, count = _chunks_of(source, ordinals)
    if count == held.count and not source.in_order:
        return Part(source, first, count, to, None, layer)
    if first:
        ordinals -= first * window
    return Part(source, first, count, to, ordinals, layer, is_packed=count == held.count)


def rows_of(parts: Sequence[Part]) -> Positions | None:
    """Which row of the lease each row of these parts is, as they come; None: in order. Pure.

    Where a span is held in part, and its rows lie among others', all come in order.
    """
    if not any(part.as_it_lies for part in parts):
        return None
    return np.concatenate([_rows(part) for part in parts])


def _rows(part: Part) -> Positions:
    source, window = part.source, part.source.held.record.window
    begin = source.at * window
    if not part.as_it_lies:
        return np.arange(begin, begin + source.count * window)
    assert source.order is not None, "what lies in another order has one"
    rows = source.order.slots(part.layer)[part.first * window : (part.first + part.count) * window]
    return rows + (begin - source.held.first * window)


def _chunks_of(source: Source, ordinals: Positions) -> tuple[int, int]:
    """The chunks (first, count) among which these rows lie; all if a packed span is held whole."""
    held, window = source.held, source.held.record.window
    if not len(ordinals):
        return held.first, 0
    if source.order is None:
        first, last = ordinals[0], ordinals[-1]
    elif held.count == held.record.n_windows:  # to find the least would cost more than it saves
        return 0, held.count
    else:
        first, last = np.minimum.reduce(ordinals), np.maximum.reduce(ordinals)
    chunk = int(first) // window
    return chunk, int(last) // window + 1 - chunk


def used_chunks(part: Part) -> Mask:
    """[part.count]: which chunks hold a wanted row."""
    if part.is_whole:
        return np.ones(part.count, dtype=bool)
    assert part.ordinals is not None
    used = np.zeros(part.count, dtype=bool)
    used[part.ordinals // part.source.held.record.window] = True
    return used


def behind(sources: Sequence[Source], n_windows: int) -> tuple[Source, ...]:
    """What is held after the first n_windows of a lease, as a lease of its own. Pure."""
    left = []
    for source in sources:
        skipped = min(max(n_windows - source.at, 0), source.count)
        if skipped < source.count:
            held = source.held
            rest = replace(held, first=held.first + skipped, count=held.count - skipped)
            left.append(replace(source, held=rest, at=source.at + skipped - n_windows))
    return tuple(left)


def chunks_here(source: Source, copies: Copies) -> int:
    """Chunks of its windows that a cache has a copy of. Where a packed span is held in part, its
    rows lie in all of the span's chunks: then it is their share of the copies of these."""
    held, record = source.held, source.held.record
    if source.order is None or held.count == record.n_windows:
        return copies.held_of(record.span_id, held.first, held.count)
    n_all = copies.held_of(record.span_id, 0, record.n_windows)
    return n_all * held.count // record.n_windows


def miss(*, off: bool, lost: bool, short: bool) -> str:
    """Why a lease has nothing. `off`: all threads that read, or that copy, are stuck."""
    return "tier off" if off else "lost" if lost else "too short" if short else "not stored"
