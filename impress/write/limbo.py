"""Spans that are out of the index, and whose space other processes may still read.

out of tree and index ─add→ limbo ─take→ no reader may read it, or the limit is over → free
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from impress.spans.format import SpanRecord
from impress.write.readers import Seen


@dataclass(frozen=True, slots=True)
class InLimbo:
    """Taken out by the transaction of `generation`, in limbo since `since_s`."""

    record: SpanRecord
    generation: int
    since_s: float


class Limbo:
    """Thread-safe. A reader that hangs holds a span for `limit_s` at most.

    Its next read of that span then meets bytes of another checksum: a miss.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._waiting: deque[InLimbo] = deque()  # oldest first
        self._leaving: list[list[SpanRecord]] = []  # taken: off these once their space is free

    def __len__(self) -> int:
        """How many wait to be taken."""
        return len(self._waiting)

    def records(self) -> list[SpanRecord]:
        """All whose space is not free, those being erased at this moment too."""
        with self._lock:
            leaving = [record for some in self._leaving for record in [*some]]
            return [*(one.record for one in self._waiting), *leaving]

    def add(self, record: SpanRecord, generation: int, now_s: float) -> None:
        with self._lock:
            self._waiting.append(InLimbo(record, generation, now_s))

    def take(self, readers: Sequence[Seen], now_s: float, free: list[SpanRecord]) -> None:
        """Add to `free` those whose space may be given to others now: the caller takes each off
        that list once it is free, or must `put_back` it, whatever is raised from here on.

        `now_s`: taken before the readers were listed. What came since stays: a reader that began in
        between may have it, and is not among those listed.
        """
        with self._lock:
            kept, mine = deque[InLimbo](), list[SpanRecord]()
            for one in self._waiting:
                late = now_s - one.since_s > self._limit_s
                span, generation = one.record.span_id, one.generation
                held = any(reader.may_read(span, generation) for reader in readers)
                if (held and not late) or one.since_s > now_s:
                    kept.append(one)
                    continue
                mine.append(one.record)
            leaving = [*(some for some in self._leaving if some), free]
            # No signal comes between: Python looks for one after calls.
            free += mine
            self._leaving, self._waiting = leaving, kept

    def put_back(self, records: list[SpanRecord]) -> None:
        """These were taken and not freed, as an exception came between: they leave the list, and
        the next `take` gets them."""
        with self._lock:
            waiting = deque([*(InLimbo(r, 0, -math.inf) for r in records), *self._waiting])
            # No signal comes between, as in `take`.
            self._waiting = waiting
            del records[:]
