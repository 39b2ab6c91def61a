"""Reads a whole store and compares everything with its checksums and invariants. Writes nothing.

index values → headers → every piece of every span. Beside a live writer: a span whose index value
is gone or replaced by the end was evicted meanwhile, and whatever was found about it is dropped.
A span that hangs in the air is reported only where no shard, read again, has what is before it; it
is no problem where another shard's writer may have evicted that: the next writer of its own shard
will delete it. Nor where a shard's index cannot be read: what is before it may be named there.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Final

import numpy as np

from impress.errors import FormatError, StoreFailed
from impress.spans.format import (
    SpanHeader,
    SpanRecord,
    decode_header,
    decode_index,
    layout_of,
    split_index,
)
from impress.spans.layout import K, SpanLayout, V
from impress.spans.params import NONE, Params
from impress.spans.records import wrong_record
from impress.upkeep.hanging import hanging_of, index_values
from impress.write.directory import Identity, Shard, read_identity, shards_of
from impress.write.strays import said_of_strays
from tiers.base import Read, Slot, Sums, round_up, sums_of
from tiers.coalesce import locate
from tiers.errors import MediumError
from tiers.iopool import IoPool, Lane
from tiers.slots import BufferPool, aligned
from tiers.ssd import SsdTier
from tiers.ticket import Ticket

#: Bytes one task reads and sums; a chunk that is larger is read whole.
PART_BYTES: Final = 4 << 20
_BATCH: Final = 32  # tasks a ticket
_THREADS: Final = 8
_TIMEOUT_S: Final = 600.0  # of one batch: a disk that takes longer is stuck

Progress = Callable[[int, int], None]  # bytes read so far, of so many


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong; `span` or `segment` is None where it is not about one."""

    what: str
    span: int | None = None
    segment: int | None = None


@dataclass(slots=True)
class Verdict:
    """What was read and what is wrong with it."""

    spans: int = 0
    pieces: int = 0
    n_bytes: int = 0  # of rows; headers not counted
    gone: int = 0  # spans evicted while this ran
    orphans: int = 0  # spans that hang from what another shard's writer evicted
    waiting: int = 0  # spans that hang in the air while a shard's index cannot be read
    problems: list[Problem] = field(default_factory=list)

    def add(self, other: Verdict) -> None:
        for name in ("spans", "pieces", "n_bytes", "gone", "orphans", "waiting"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.problems += other.problems


@dataclass(slots=True)
class _Bad:
    """Pieces of one span in one segment that do not match."""

    n_pieces: int
    first: str


@dataclass(frozen=True, slots=True)
class _Part:
    """Windows [first, first + count) of one plane of a span: one task."""

    record: SpanRecord
    layout: SpanLayout
    sums: Sums
    layer: int
    plane: int
    first: int
    count: int

    @property
    def n_bytes(self) -> int:
        return self.count * self.layout.planes[self.plane].chunk_bytes


def verify_store(path: Path, progress: Progress | None = None) -> Verdict:
    """Check a store from end to end. Raises FormatError (no store), StoreFailed (no access,
    no threads)."""
    identity, total = read_identity(path), Verdict()
    shards = shards_of(path)
    values = {shard.number: _values(shard, total) for shard in shards}
    everything = {span: value for by_span in values.values() for span, value in by_span.items()}
    shared, unread = len(shards) > 1, bool(total.problems)
    total.problems += map(Problem, said_of_strays(path))
    try:
        pool = IoPool(_THREADS, "impress-verify")
    except MediumError as err:
        raise StoreFailed(str(err)) from None
    try:
        for shard in shards:
            if values[shard.number] or _misnamed(shard):
                mine = values[shard.number]
                one = _Verification(
                    path, identity, shard, mine, everything, pool, shared=shared, unread=unread
                )
                total.add(one.run(progress or (lambda done, of: None)))
    finally:
        pool.close(0.1)  # its threads are daemons: one stuck in a read does not hold the process
    return total


def _misnamed(shard: Shard) -> int:
    try:
        return shard.n_misnamed()
    except OSError:  # that it cannot be read is reported where it is read
        return 0


def _values(shard: Shard, total: Verdict) -> dict[int, bytes]:
    """A shard's index values; what keeps them from being read is a problem. Raises StoreFailed."""
    why = ""
    for _ in range(2):  # between the renames of an index made anew there is none for a moment
        try:
            return index_values(shard)
        except FormatError as err:
            why = str(err)
    total.problems.append(Problem(why))
    return {}


class _Verification:
    """One run over one shard."""

    def __init__(
        self, path: Path, identity: Identity, shard: Shard, values: dict[int, bytes],
        everything: dict[int, bytes], pool: IoPool, *, shared: bool, unread: bool,
    ) -> None:  # fmt: skip
        """`values`: read before the segments are listed, so all they name exist; `everything`: of
        all shards that could be read, as a prefix may go from one to another; `shared`: there are
        several shards; `unread`: one of their indexes could not be read."""
        self._path = path
        self._identity = identity
        self._shard = shard
        self._values = values
        self._everything = everything
        self._shared = shared
        self._unread = unread
        self._hanging: set[int] = set()  # those that are no problem
        try:
            self._ssd = SsdTier(
                shard.segments, PART_BYTES, None, read_only=True, number=shard.number
            )
        except MediumError as err:
            raise StoreFailed(str(err)) from None
        self._params = Params(
            shard.params, write=False, others=lambda: [other.params for other in shards_of(path)]
        )
        self._pool = pool
        self._buffers = BufferPool(None)
        self._verdict = Verdict()
        self._bad: dict[tuple[int, int], _Bad] = {}

    def run(self, progress: Progress) -> Verdict:
        try:
            records = self._read_index()
            self._check_space(records)
            self._check_tree(records)
            self._read_rows(records, progress)
        finally:
            if self._pool.idle(0.1):  # a read that hangs would hold whoever closes its queue
                self._ssd.close()
        for (span, segment), bad in sorted(self._bad.items()):
            what = "1 piece does not match its checksum"
            if bad.n_pieces > 1:
                what = f"{bad.n_pieces} pieces do not match their checksums"
            self._report(f"{what}, first: {bad.first}", span, segment)
        self._drop_evicted()
        return self._verdict

    def _report(self, what: str, span: int | None = None, segment: int | None = None) -> None:
        self._verdict.problems.append(Problem(what, span, segment))

    # ---- the index -------------------------------------------------------------------------

    def _read_index(self) -> list[SpanRecord]:
        """Spans whose index values are sound."""
        records = []
        for span, value in self._values.items():
            try:
                kept, labels = split_index(value)
                record = decode_index(span, kept, labels)
            except (FormatError, ValueError, struct.error) as err:
                self._report(str(err), span)
                continue
            wrong = wrong_record(record, self._identity.geometry, self._identity.window)
            if wrong:
                self._report(f"index value: {wrong}", span)
            else:
                records.append(record)
        self._verdict.spans = len(self._values)
        strange = sum(span not in self._shard.spans for span in self._values)
        misnamed = _misnamed(self._shard)  # even when a writer has let go of the spans in them
        if strange or misnamed:
            self._report(
                f"shard {self._shard.name}: {strange} spans are numbered as another folder's, and "
                f"{misnamed} segments, so that nobody is served them: {Shard.RENAMED}"
            )
        return records

    def _check_space(self, records: list[SpanRecord]) -> None:
        """No byte of a segment belongs to two spans."""
        owned = sorted((e, r.span_id) for r in records for e in (r.meta, *r.parts))
        for (before, one), (extent, other) in pairwise(owned):
            if before.segment == extent.segment and before.off + before.length > extent.off:
                what = f"its space at byte {extent.off} is also span {one}'s"
                self._report(what, other, extent.segment)

    def _check_tree(self, records: list[SpanRecord]) -> None:
        """The tree these spans make is sound, and no span hangs in the air."""
        sound = {record.span_id for record in records}
        wrong = self._values.keys() - sound
        others = {s: v for s, v in self._everything.items() if s not in wrong}
        try:
            hanging, damaged = hanging_of(sound, others, self._identity, self._path)
        except AssertionError as err:
            self._report(f"tree: {err}")
            return
        if self._unread or (self._shared and not wrong and not damaged):
            self._hanging.update(hanging)
            return
        for span in hanging:
            self._report("the windows before it are not stored, so it is never found", span)

    # ---- the segments ----------------------------------------------------------------------

    def _read_rows(self, records: list[SpanRecord], progress: Progress) -> None:
        """Read every header and every piece, a batch ahead of the slowest."""
        total = sum(record.data_bytes for record in records)
        parts = (part for record in records for part in self._parts(record))
        under_way: deque[tuple[Ticket, int]] = deque()
        done = 0
        progress(0, total)
        try:
            while batch := list(islice(parts, _BATCH)):
                tasks = [lambda part=part: self._read_part(part) for part in batch]
                ticket = self._pool.submit(Lane.DEMAND, tasks)
                under_way.append((ticket, sum(part.n_bytes for part in batch)))
                if len(under_way) > 1:
                    done += self._settled(*under_way.popleft())
                    progress(done, total)
            while under_way:
                done += self._settled(*under_way.popleft())
                progress(done, total)
        finally:
            for ticket, _ in under_way:
                ticket.cancel()

    def _settled(self, ticket: Ticket, n_bytes: int) -> int:
        if not ticket.wait(_TIMEOUT_S):
            raise StoreFailed(f"verify: a read took more than {_TIMEOUT_S:g} s")
        return n_bytes

    def _parts(self, record: SpanRecord) -> Iterator[_Part]:
        """What to read of a span; nothing when its header, where the sums are, is not sound."""
        header = self._read_header(record)
        if header is None:
            return
        layout, sums = header.layout, header.sums
        for probe in header.probes:
            if probe.params != NONE and self._params.layers(probe.params) is None:
                what = f"{probe.codec} parameters {probe.params.hex()[:12]}…: missing or damaged"
                self._report(what, record.span_id)
        self._verdict.pieces += layout.n_sums
        self._verdict.n_bytes += layout.data_bytes
        for layer in range(layout.n_layers):
            for plane in range(len(layout.planes)):
                step = max(1, PART_BYTES // layout.planes[plane].chunk_bytes)
                for first in range(0, record.n_windows, step):
                    count = min(step, record.n_windows - first)
                    yield _Part(record, layout, sums, layer, plane, first, count)

    def _read_header(self, record: SpanRecord) -> SpanHeader | None:
        """The header, when it is sound and says what the index says."""
        segment = record.meta.segment
        raw = aligned(record.meta.length)[: record.meta.length]
        read = Read(Slot((record.meta,)), 0, raw, None, round_up(len(raw)))
        try:  # not on this thread: if the disk hangs, or a signal comes, that waits for ever
            self._settled(self._pool.submit(Lane.DEMAND, [lambda: self._ssd.read([read])]), 0)
            header = decode_header(raw, record.meta)
        except (FormatError, MediumError, ValueError, struct.error) as err:
            _check_medium(err)
            self._report(f"header: {err}", record.span_id, segment)
            return None
        differs = [
            name
            for name in ("span_id", "namespace", "root", "key_before", "key_after",
                         "first_window", "n_windows", "window", "parts", "labels", "order")
            if getattr(header.record, name) != getattr(record, name)
        ]  # fmt: skip
        if header.store_uuid != self._identity.uuid:
            differs.append("store_uuid")
        if header.geometry != self._identity.geometry:
            differs.append("geometry")
        shape = (self._identity.geometry, self._identity.window, record.n_windows)
        if len(header.sums) != layout_of(*shape, header.probes).n_sums:
            differs.append("sums")
        if differs:
            what = f"header: not what the index says ({', '.join(differs)})"
            self._report(what, record.span_id, segment)
            return None
        return header

    def _read_part(self, part: _Part) -> None:
        """Read one part and compare its pieces with their sums; on a pool thread."""
        shape = part.layout.planes[part.plane]
        slot = Slot(part.record.parts)
        off = part.layout.chunk_off(part.layer, part.plane, part.first)
        at = part.layout.sums_at(part.layer, part.plane, part.first)
        wanted = part.sums[at : at + part.count * shape.pieces]
        buffer = self._buffers.acquire(part.n_bytes)
        assert buffer is not None, "the pool has no budget"
        try:
            dest = buffer.array
            self._ssd.read([Read(slot, off, dest, None, shape.piece_bytes)])
            bad = np.flatnonzero(sums_of(dest, shape.piece_bytes) != wanted)
        except MediumError as err:
            _check_medium(err)
            segment = locate(slot, off, part.n_bytes)[0].segment
            self._report(f"cannot be read: {err}", part.record.span_id, segment)
            return
        finally:
            buffer.release()
        for piece in bad.tolist():
            self._note(part, slot, off + piece * shape.piece_bytes, piece // shape.pieces)

    def _note(self, part: _Part, slot: Slot, off: int, window: int) -> None:
        """Count a bad piece. On pool threads: one whose count a race loses is still a problem."""
        segment, start, _ = locate(slot, off, 1)[0]
        plane = {K: "keys", V: "values"}.get(part.plane, "probes")
        first = f"layer {part.layer} {plane}, window {part.first + window}, segment byte {start}"
        bad = self._bad.setdefault((part.record.span_id, segment), _Bad(0, first))
        bad.n_pieces += 1

    # ---- a live writer ---------------------------------------------------------------------

    def _drop_evicted(self) -> None:
        """Forget what was found about spans that a writer removed while this ran."""
        if not self._values:  # none to be evicted; that the index cannot be read is reported
            return
        evicted: set[int] = set()
        again = Verdict()
        now = _values(self._shard, again)
        if again.problems:  # it cannot be told
            self._verdict.add(again)
            return
        found = {p.span for p in self._verdict.problems if p.span is not None}
        for span in found | self._hanging:
            if now.get(span) != self._values[span]:
                evicted.add(span)
        self._verdict.gone = len(evicted)
        n_hanging = len(self._hanging - evicted)
        if self._unread:
            self._verdict.waiting = n_hanging
        else:
            self._verdict.orphans = n_hanging
        self._verdict.problems = [p for p in self._verdict.problems if p.span not in evicted]
        self._verdict.problems.sort(key=lambda p: (p.span or 0, p.segment or 0, p.what))


def _check_medium(err: Exception) -> None:
    """Raises StoreFailed on an error that says nothing about what is stored."""
    if isinstance(err, MediumError) and err.harmless:
        raise StoreFailed(f"verify: {err}") from None
