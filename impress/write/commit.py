"""The committer: one thread that owns every write to the index.

put ─> queue ─(turn: all that waits)─> Batches: stores, deletes, swaps ─> those who wait are told
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Collection, Iterable

from impress.errors import FORKED, StoreFailed
from impress.quality.ledgers import Ledgers
from impress.spans.format import SpanRecord
from impress.stats import Counters
from impress.tree.merged import MergedCatalog
from impress.types import Geometry
from impress.usage.history import History
from impress.write.batches import Batches
from impress.write.headers import Headers
from impress.write.index import Index
from impress.write.jobs import Batch, Duties, Erase, Intent, Job, SaveWear, Trial
from impress.write.swap import failed
from tiers.base import Slot
from tiers.ssd import SsdTier
from tiers.threads import Worker
from tiers.ticket import Signal

log = logging.getLogger("impress")


class Committer:
    """Queues jobs from any thread; works on a thread of its own."""

    def __init__(
        self, index: Index, ssd: SsdTier, catalog: MergedCatalog, counters: Counters,
        geometry: Geometry, uuid: bytes, duties: Duties, history: History, ledgers: Ledgers,
        *, durable: bool,
    ) -> None:  # fmt: skip
        """Raises MediumError where no thread can be started."""
        self._index = index
        self._catalog = catalog
        self._duties = duties
        headers = Headers(index, ssd, uuid, geometry, duties.trouble, durable=durable)
        self._batches = Batches(index, ssd, headers, catalog, counters, duties, history, self.fail)
        self._history = history
        self._ledgers = ledgers
        self._heat_tick = -1  # heat up to this lease is saved
        self._jobs: deque[Job] = deque()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        # Always notify_all, though only one thread waits: Ctrl-C in `notify` leaves a thread that
        # was woken among the waiters, and the next `notify` would go to that one.
        self._wake = threading.Condition(self._lock)
        self._open = True
        self._save_asked = False
        self._settle_asked = False
        self._failure: Exception | None = None  # the first since somebody asked
        self._n_failures = 0
        self._thread = Worker(self._work, "impress-commit")
        self._thread.start()

    @property
    def names(self) -> dict[bytes, str]:
        """Root key -> what its namespace is called, in the index."""
        return self._batches.names

    @property
    def undone(self) -> str:
        """Why spans that were deleted are still in the index; empty: none are."""
        return self._batches.undone

    @property
    def undeleted(self) -> list[int]:
        """Spans that are `undone`."""
        return self._batches.undeleted

    def delete(self, spans: list[int]) -> None:
        """Take retired spans out of the index; they are reclaimed when nobody holds them.

        Where that fails, `undone` says so, and it is tried again with every batch.
        """
        if spans:
            self._put(spans)

    def delete_now(self, spans: list[int], timeout_s: float) -> str:
        """As `delete`, and waits; why these, or earlier ones, are `undone`. Raises StoreFailed."""
        self.delete(spans)
        if not self.barrier(timeout_s):
            raise StoreFailed(f"index: no commit within {timeout_s:g} s")
        return self.undone

    def erase(self, spans: list[int], roots: Collection[bytes], records: list[SpanRecord]) -> None:
        """As `delete`; the log of changes forgets all it says, and these roots lose their names.
        The space of `records`, no longer or not yet in the index, is noted until it is erased."""
        for root in roots:  # until a store brings its name again
            self.names.pop(root, None)
        self._put(Erase(spans, roots, records))

    def intend(self, record: SpanRecord, timeout_s: float) -> None:
        """A copy is about to be written here: if a crash cuts it off, the next open erases it.

        Call this before its first byte is written. Raises StoreFailed.
        """
        self._ask(Intent(record), timeout_s)

    def save_history(self) -> None:
        """Save soon what requests have shown since it was last saved, and heat. Never raises."""
        with self._lock:
            self._save_asked = True
            self._wake.notify_all()

    def settle(self) -> None:
        """Reclaim soon what was let go. Never raises, even in a fork's child."""
        if os.getpid() != self._pid:  # the thread stayed behind, perhaps with the lock
            return
        with self._lock:
            self._settle_asked = True
            self._wake.notify_all()

    def try_writing(self, slot: Slot, timeout_s: float) -> None:
        """Write to a reserved slot, sync and commit; takes the slot. Raises what is in the way."""
        self._ask(Trial(slot), timeout_s)

    def save_wear(self, timeout_s: float) -> None:
        """Save what is spent of the day's writes, before more is. Raises StoreFailed."""
        self._ask(SaveWear(), timeout_s)

    def _ask(self, job: Trial | Intent | SaveWear, timeout_s: float) -> None:
        """Queue a job and wait for its end. Raises the error it ended with."""
        self._put(job)
        if not job.ended.wait(timeout_s):
            raise StoreFailed(f"a write has not ended within {timeout_s:g} s")
        if job.error is not None:
            raise job.error

    def barrier(self, timeout_s: float) -> bool:
        """True when all that was queued before has been dealt with."""
        event = Signal()
        self._put(event)
        return event.wait(timeout_s)

    def fail(self, error: Exception) -> None:
        """Keep an error for the next flush to raise."""
        with self._lock:
            self._failure = self._failure or error  # one: each holds its rows, and nobody may ask
            self._n_failures += 1

    def take_failure(self) -> StoreFailed | None:
        """What failed since this was last asked: the first error, and how many more there were."""
        with self._lock:
            first, n = self._failure, self._n_failures
            self._failure, self._n_failures = None, 0
        if first is None:
            return None
        failed = StoreFailed(f"{first}{f' (and {n - 1} more)' if n > 1 else ''}")
        failed.__cause__ = first
        return failed

    def close(self, timeout_s: float) -> None:
        """Finish what is queued, record heat, stop."""
        with self._lock:
            self._open = False
            self._wake.notify_all()
        self._thread.ended(timeout_s)

    @property
    def ended(self) -> bool:
        """After `close`; False: it is stuck, and the index with it."""
        return self._thread.ended(0.0)

    def save_last(self) -> None:
        """After `close`: save the history of requests that ended meanwhile. Raises StoreFailed."""
        if self.ended:
            while self._save_history() and self._history.unsaved:
                pass

    def _put(self, job: Job) -> None:
        self.queue((job,))

    def queue(self, jobs: Iterable[Job]) -> None:
        """However this ends, what it has taken from `jobs` is queued, and the rest is not.

        Raises StoreFailed.
        """
        if os.getpid() != self._pid:  # the thread stayed behind, perhaps with the lock
            raise StoreFailed(f"store: {FORKED}")
        with self._lock:
            if not self._open:
                raise StoreFailed("the store is closed")
            self._jobs.extend(jobs)  # no signal comes between taking and queueing
            self._wake.notify_all()

    def _work(self) -> None:
        working = True
        while working:
            try:
                working = self._turn()
            except MemoryError:  # what was not drawn is still queued (suppress wants memory too)
                continue
        for last in (self._batches.retry, self._settle, self._save_heat):
            self._batches.attempt(last)

    def _turn(self) -> bool:
        """Deal with all that waits; False when that was the last of it."""
        with self._lock:
            self._wake.wait_for(self._is_wanted)
            if not self._jobs and not self._open:
                return False
            batch = Batch()
            with contextlib.suppress(MemoryError):  # the rest waits for the next turn
                while self._jobs:
                    batch.add(self._jobs[0])
                    self._jobs.popleft()
            save, self._save_asked = self._save_asked, False
        try:
            self._batches.deal_with(batch)
            self._batches.attempt(self._settle)
            if save:
                self._batches.attempt(self._save_history)
        finally:
            for event in batch.barriers:
                event.set()
        return True

    def _is_wanted(self) -> bool:
        return bool(self._jobs) or self._save_asked or self._settle_asked or not self._open

    def _settle(self) -> None:
        """Reclaim what was let go, in this turn too."""
        if self._settle_asked:
            self._settle_asked = False
            self._duties.reclaim(self._catalog.unheld)

    def _save_heat(self) -> None:
        """At the end, with the day's writes: what came to nothing was written, too."""
        if self.undone:
            log.warning("%d deleted spans are back at the next open", len(self.undeleted))
        heat, wear = self._catalog.heat(), self._duties.wear()
        self._index.commit({}, heat=heat, wear=wear, last=True)

    def _save_history(self) -> bool:
        """Save some of it; whether that worked. However it ends, what is not saved now is saved the
        next time, which is soon where there is more. Raises StoreFailed for an error that neither
        the disk nor the index raised."""
        tick, is_saved = self._history.tick, False
        try:
            values, ledgers = self._history.dump(), self._ledgers.dump()
            leases = self._catalog.tick  # first: what is leased meanwhile is saved twice
            warmer = self._catalog.heat(self._heat_tick)
            if values or ledgers or warmer:
                self._index.save_history(values, tick, ledgers, warmer)
                self._heat_tick = leases
            self._history.saved()
            is_saved = True
            if self._history.more:  # not what was noted meanwhile: that would never end
                self.save_history()
        except StoreFailed as err:  # stores need no room in the index for this: they may go on
            if not self._history.failing:
                log.warning("what requests have shown is not saved: %s", err)
        except Exception as err:
            raise failed(err, "what requests have shown is not saved: ") from err
        finally:
            if not is_saved:
                self._history.not_saved()
                self._ledgers.not_saved()
        return is_saved
