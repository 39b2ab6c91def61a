"""Tables of spans in use: read with the lease, kept within a share of the DRAM budget."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from impress.errors import FormatError
from impress.spans.format import ProbeRecord, SpanHeader, SpanRecord, decode_header
from impress.spans.order import RowOrder
from tiers.base import Read, Slot, Sums, round_up
from tiers.errors import Cancelled, ReadFailed
from tiers.iopool import IoPool, Lane
from tiers.slots import aligned
from tiers.ssd import SsdTier


@dataclass(frozen=True, slots=True)
class Tables:
    """What reading a span takes besides its record: every piece's sum, probe records, row order."""

    sums: Sums
    probes: tuple[ProbeRecord, ...]
    order: RowOrder | None = None  # None: rows lie in position order

    @classmethod
    def of(cls, header: SpanHeader) -> Tables:
        return cls(header.sums, header.probes, header.order)

    @property
    def n_bytes(self) -> int:
        return self.sums.nbytes + (self.order.n_bytes if self.order else 0)


class TableCache:
    """Least recently used tables go first. Thread-safe; no lock is held while reading."""

    def __init__(self, ssd: SsdTier, pool: IoPool, budget_bytes: int) -> None:
        self._ssd = ssd
        self._pool = pool
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._tables: OrderedDict[int, Tables] = OrderedDict()
        self.used_bytes = 0

    def of(self, records: Sequence[SpanRecord], timeout_s: float) -> dict[int, Tables | ReadFailed]:
        """One table per span, read together where they are not cached; or why it cannot be had."""
        found: dict[int, Tables | ReadFailed] = {}
        with self._lock:
            for record in records:
                if record.span_id in self._tables:
                    self._tables.move_to_end(record.span_id)
                    found[record.span_id] = self._tables[record.span_id]
        lacking = {record.span_id: record for record in records if record.span_id not in found}
        if not lacking:
            return found
        missing = list(lacking.values())  # each once, however often it is held
        results: dict[int, Tables | ReadFailed] = {}

        def load(record: SpanRecord) -> None:
            results[record.span_id] = self._load(record)

        with contextlib.suppress(Cancelled):  # the store was closed: `late` says so
            self._pool.submit(Lane.DEMAND, [partial(load, r) for r in missing]).wait(timeout_s)
        late = ReadFailed("late", f"ssd: a sums table took more than {timeout_s:g} s")
        for record in missing:
            table = results.get(record.span_id, late)
            found[record.span_id] = table
            if not isinstance(table, ReadFailed):
                self._keep(record.span_id, table)
        return found

    def drop(self, span: int) -> None:
        with self._lock:
            table = self._tables.pop(span, None)
            self.used_bytes -= 0 if table is None else table.n_bytes

    def clear(self) -> None:
        with self._lock:
            self._tables.clear()
            self.used_bytes = 0

    def check(self) -> None:
        """Assert that the account of bytes is right."""
        with self._lock:
            assert self.used_bytes == sum(table.n_bytes for table in self._tables.values())

    def _keep(self, span: int, table: Tables) -> None:
        with self._lock:
            if span in self._tables or table.n_bytes > self._budget_bytes:
                return
            self._tables[span] = table
            self.used_bytes += table.n_bytes
            while self.used_bytes > self._budget_bytes:
                self.used_bytes -= self._tables.popitem(last=False)[1].n_bytes

    def _load(self, record: SpanRecord) -> Tables | ReadFailed:
        try:
            return Tables.of(read_header(self._ssd, record))
        except ReadFailed as err:
            return err
        except MemoryError:  # a miss, as where rows are read
            return ReadFailed("shortage", "memory: too little to read with")


def read_header(ssd: SsdTier, record: SpanRecord) -> SpanHeader:
    """Read a span's header record and check that it is this span's. Raises ReadFailed."""
    raw = aligned(record.meta.length)[: record.meta.length]
    ssd.read([Read(Slot((record.meta,)), 0, raw, None, round_up(len(raw)))])
    try:
        header = decode_header(raw, record.meta)
    except FormatError as err:
        raise ReadFailed("checksum", f"ssd: span {record.span_id}: {err}") from None
    same = (
        "span_id", "root", "key_before", "key_after", "first_window", "n_windows", "parts", "order",
    )  # fmt: skip
    if any(getattr(header.record, name) != getattr(record, name) for name in same):
        raise ReadFailed("checksum", f"ssd: span {record.span_id}: another span's header")
    return header
