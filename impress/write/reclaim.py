"""Space of spans that are out of the index: given to others once no process may be reading it.

out of the index ─take_over→ limbo ─settle→ no process reads it → erased where asked, buried, free

The index notes what is to be erased when it deletes a span, until a commit after the erasure: a
crash on the way is made good at the next open, before space is given out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Final, TypeVar

from impress.errors import FormatError, StoreFailed
from impress.spans.format import SpanRecord, decode_extents
from impress.stats import Counters
from impress.tree.catalog import Leave
from impress.write.batches import WRITE_TIMEOUT_S
from impress.write.directory import Shard
from impress.write.index import Index
from impress.write.limbo import Limbo
from impress.write.readers import ANYBODY, Seen, present
from tiers.base import PAGE, Extent, Slot
from tiers.errors import MediumError
from tiers.slots import aligned
from tiers.ssd import SsdTier
from tiers.ticket import LOOK_S, until

log = logging.getLogger("impress")

#: Longest wait for other processes to let go of space that is wanted, and how often this looks for
#: it; they look every Config.follow_every_s.
YIELD_TIMEOUT_S: Final = 1.0
YIELD_LOOK_S: Final = 0.01
_BLANK: Final = aligned(PAGE)

Found = TypeVar("Found")


class Reclaim:
    """For the shard that this process writes. Thread-safe.

    After `close` and in a fork's child it touches nothing: the space is the next open's, or the
    parent's.
    """

    def __init__(
        self, shard: Shard, ssd: SsdTier, index: Index, counters: Counters, limit_s: float
    ) -> None:
        """`limit_s`: longest that a reader is waited for; see Limbo."""
        self._shard = shard
        self._ssd = ssd
        self._index = index
        self._counters = counters
        self.spoilt: set[int] = set()  # purged, repacked: their bytes go before their space does
        self.limbo = Limbo(limit_s)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._open = True
        self._busy = set[object]()  # one for each thread that writes or frees
        self._said = False  # whether it was logged that readers cannot be listed

    def spoil(self, spans: Iterable[int]) -> None:
        """Erase these spans' bytes before their space is free."""
        self.spoilt.update(spans)

    def take_over(self, leave: Leave, free: list[SpanRecord]) -> None:
        """`leave` takes spans, already out of the index, out of the catalog and notes them in
        `free`; one's own go into limbo. `at_rest` finds each of these in one of the two places."""
        if os.getpid() != self._pid:  # as in `_if_ours`
            leave(free)
            return
        with self._lock:
            try:
                leave(free)
                self._add(free)
            except BaseException:  # Ctrl-C: nobody else knows of those that did not get so far
                there = {record.span_id for record in self.limbo.records()}
                self._add(record for record in free if record.span_id not in there)
                raise

    def _add(self, records: Iterable[SpanRecord]) -> None:
        for record in records:
            if record.span_id in self._shard.spans:
                self.limbo.add(record, self._index.generation, monotonic())

    def settle(self) -> None:
        """Give back what no other process may be reading any more."""
        if self.limbo:
            self._if_ours(lambda: self._let_go(self._readers))

    def _let_go(self, readers: Callable[[], Sequence[Seen]]) -> None:
        """Give back what none of these may be reading."""
        now_s, free = monotonic(), list[SpanRecord]()  # before readers are listed: see take
        try:
            self.limbo.take(readers(), now_s, free)
            self._bury(free)
        except BaseException:  # Ctrl-C: nobody else knows of these
            self.limbo.put_back(free)
            raise

    def wait_for(self, spans: Collection[int]) -> None:
        """Wait, for a while, until these spans' space is free."""
        wanted = set(spans)
        self._wait(lambda: not any(r.span_id in wanted for r in self.limbo.records()))

    def wait_for_readers(self, generation: int) -> None:
        """Wait, for a while, until others have followed so far and hold nothing from before.

        At opening: nobody owns that space any more, but it may still be read.
        """
        self._wait(lambda: not any(r.generation < generation or r.held for r in self._readers()))

    def close(self, *, hangs: bool) -> bool:
        """Wait for other readers a last time, then bury what is left: the first page of each header
        is wiped, so that no scan finds it again; token ids and rows stay on the disk, except those
        to be erased. False: a thread is stuck in a write, and may still write. Then, and where that
        is known before (`hangs`), this thread writes nothing: it would be stuck, too, and what is
        left is the next open's."""
        if not hangs:
            self.settle()
            self.wait_for([record.span_id for record in self.limbo.records()])
        with self._lock:
            self._open = False
        if hangs or not until(lambda: not self._busy, WRITE_TIMEOUT_S):
            return False
        self._let_go(list)
        return True

    def bury(self, left: list[SpanRecord]) -> None:
        """Wipe the first page of these spans' headers, so that no scan finds them again, and give
        their space back: once off the list it is free, or in limbo; where this may not write, it is
        nobody's."""
        if not self._if_ours(lambda: self._bury(left)):
            left.clear()

    def erase_free(self, kept: Sequence[Extent]) -> None:
        """Erase what is nobody's, in parts so small that `close` does not wait long; and what is
        somebody's once it is given back, except what is `kept` (sorted: spans that are READY).

        Raises MediumError; StoreFailed where the store was closed meanwhile.
        """
        for turn in self._ssd.turns():
            if not self._if_ours(partial(self._ssd.erase_free, turn, kept)):
                raise StoreFailed(f"{self._shard.path}: closed before what is free was erased")

    def _readers(self) -> list[Seen]:
        """Who reads here; where that cannot be told, a reader who may read anything."""
        try:
            found = present(self._shard.readers)
        except OSError as err:
            if not self._said:
                said = "%s: %s: whoever may be reading here is waited for as long as a lease lasts"
                log.warning(said, self._shard.readers, err.strerror)
            self._said = True
            return [ANYBODY]
        self._said = False
        return found

    def _if_ours(self, act: Callable[[], object]) -> bool:
        """Call `act` where this process may write; whether it may. `close` waits for its end.

        Not a context manager: an exception that a signal raises on the way into one leaves it open
        for as long as somebody holds the traceback.
        """
        if os.getpid() != self._pid:  # before any lock: in a child nobody may ever open it
            return False
        mine, ours = object(), False
        try:
            with self._lock:
                ours = self._open
                if ours:
                    self._busy.add(mine)
            if ours:
                act()
            return ours
        finally:
            self._busy.discard(mine)  # one call of C: no lock that a signal could interrupt

    def settled(self, count: Callable[[], Found]) -> Found:
        """As `at_rest`, but waits for no erasing: what is being erased is in limbo meanwhile."""
        with self._lock:
            return count()

    def at_rest(self, look: Callable[[], Found]) -> Found:
        """What `look` finds while nothing is given back or taken over, even by half."""
        late_s = monotonic() + WRITE_TIMEOUT_S
        while True:
            with self._lock:
                if not self._busy or monotonic() > late_s:
                    return look()
            threading.Event().wait(LOOK_S)

    def _bury(self, left: list[SpanRecord]) -> None:
        """Takes them off the list, one by one: what is left on it, if something is raised, still
        has its space, and goes back into limbo."""
        spoilt: set[int] = set()
        try:
            spoilt |= self.spoilt.intersection([record.span_id for record in left])
            self._wipe(left)
            while left:
                # On a failing disk, or without memory for a call, the header's generation and its
                # rows' sums still give it away.
                with contextlib.suppress(MediumError, MemoryError):
                    self._ssd.write(Slot((left[0].meta,)), 0, _BLANK)
                self._ssd.free(Slot((left[0].meta, *left[0].parts)), left)  # off it as it is free
        except BaseException:
            self.spoilt.update(spoilt.intersection(record.span_id for record in left))
            self.limbo.put_back(left)
            raise

    def finish(self) -> None:
        """At opening: erase what was still to be erased, where nothing else lies now."""
        slots, lost = {}, []
        for span, note in self._index.to_erase().items():
            if span not in self._shard.spans:
                continue  # the shard was copied or renamed: erased under the name that wrote it
            try:
                slots[span] = Slot(tuple(self._ssd.free_parts(decode_extents(note))))
            except FormatError as err:
                log.warning("%s: %s: all that is free is erased", self._shard.path, err)
                lost.append(span)
        self._erase(slots)
        if lost:
            self._erase_lost(lost)

    def _erase_lost(self, spans: Collection[int]) -> None:
        """At opening: nobody knows where these lay, so all that is free is erased."""
        try:
            self._ssd.erase_now(Slot(tuple(self._ssd.free_parts(self._ssd.turns()))))
        except (MediumError, MemoryError) as err:
            self._unerased(spans, err)
        else:
            self._index.erased(spans)

    def _wipe(self, records: Sequence[SpanRecord]) -> None:
        """Overwrite, for good, those of them that are spoilt."""
        mine = {r.span_id: Slot((r.meta, *r.parts)) for r in records if r.span_id in self.spoilt}
        self.spoilt.difference_update(mine)
        self._erase(mine)

    def _erase(self, slots: Mapping[int, Slot]) -> None:
        """Erase these, by span. On the committer's thread: nothing may be raised there."""
        done, before = [], self._ssd.sync_failures
        for span, slot in slots.items():
            try:
                self._ssd.erase(slot)
                done.append(span)
            except (MediumError, MemoryError) as err:
                self._unerased([span], err)
        if not done:
            return
        try:
            self._ssd.sync([slots[span] for span in done])
            self._ssd.check_synced(before)
        except (MediumError, MemoryError) as err:
            self._unerased(done, err)
            return
        self._index.erased(done)

    def _unerased(self, spans: Collection[int], err: Exception) -> None:
        for span in spans:
            log.error("%s: span %d could not be erased: %s", self._shard.path, span, err)
        self._counters.add("unerased_spans", len(spans))

    def _wait(self, done: Callable[[], bool]) -> None:
        until_s = monotonic() + YIELD_TIMEOUT_S
        while not done() and monotonic() < until_s:
            threading.Event().wait(YIELD_LOOK_S)
            self.settle()
