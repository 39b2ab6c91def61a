"""The committer: one thread that owns every write to the index.

A store becomes READY here and nowhere else: its rows and header are on stable storage, then one
index transaction names it, then the tree shows it. Stores that wait together commit together.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection

from impress.errors import FORKED, StoreFailed
from impress.quality.ledgers import Ledgers
from impress.spans.format import SpanRecord, encode_index
from impress.stats import Counters
from impress.tree.merged import MergedCatalog
from impress.types import Geometry
from impress.usage.history import History
from impress.write.changes import Change
from impress.write.draft import Draft
from impress.write.headers import Headers
from impress.write.index import Index
from impress.write.jobs import Batch, Duties, Erase, GiveUp, Intent, Job, StoreJob, SwapJob, Trial
from impress.write.swap import Swaps, failed
from tiers.base import PAGE, Slot
from tiers.errors import MediumError
from tiers.slots import aligned
from tiers.ssd import SsdTier

log = logging.getLogger("impress")

#: A write that takes longer than this is stuck; its store fails.
WRITE_TIMEOUT_S = 120.0


class Committer:
    """Queues jobs from any thread; works on its own."""

    def __init__(
        self, index: Index, ssd: SsdTier, catalog: MergedCatalog, counters: Counters,
        geometry: Geometry, uuid: bytes, duties: Duties, history: History, ledgers: Ledgers,
        *, durable: bool,
    ) -> None:  # fmt: skip
        self._index = index
        self._ssd = ssd
        self._catalog = catalog
        self._counters = counters
        self._headers = Headers(index, ssd, uuid, geometry, duties.trouble, durable=durable)
        self._duties = duties
        self._swaps = Swaps(index, self._headers, catalog, history, duties, self._delete)
        self._history = history
        self._ledgers = ledgers
        self._heat: dict[int, tuple[int, int]] = {}  # as last saved
        self.names: dict[bytes, str] = index.names()
        """Root key -> what its namespace is called, in the index."""
        self._jobs: deque[Job] = deque()
        self._pid = os.getpid()
        self._wake = threading.Condition()
        self._open = True
        self._save_asked = False
        self._settle_asked = False
        self._failures: list[Exception] = []
        self._undone = Batch()  # deletes that failed
        self.undone = ""
        """Why spans that were deleted are still in the index; empty: none are."""
        self._thread = threading.Thread(target=self._work, name="impress-commit", daemon=True)
        self._thread.start()

    def store(self, job: StoreJob) -> None:
        self._put(job)

    def delete(self, spans: list[int]) -> None:
        """Retired spans: out of the index, then reclaimed when nobody holds them.

        Where that fails, `undone` says so, and it is tried again with every batch.
        """
        if spans:
            self._put(spans)

    def delete_now(self, spans: list[int], timeout_s: float) -> str:
        """As `delete`, and waits: why they, or earlier ones, are `undone`. Raises StoreFailed."""
        self.delete(spans)
        if not self.barrier(timeout_s):
            raise StoreFailed(f"index: no commit within {timeout_s:g} s")
        return self.undone

    def erase(self, spans: list[int], roots: Collection[bytes]) -> None:
        """As `delete`; the log of changes forgets all it says, and these roots have no name."""
        for root in roots:  # until a store brings it again
            self.names.pop(root, None)
        self._put(Erase(spans, roots))

    @property
    def undeleted(self) -> list[int]:
        """Spans that are `undone`."""
        return self._undone.deletes

    def give_up(self, draft: Draft, done: Callable[[], None]) -> None:
        """A refused store: its space is free again when its last write has ended."""
        self._put(GiveUp(draft, done))

    def intend(self, record: SpanRecord, timeout_s: float) -> None:
        """A copy is about to be written here: where a crash cuts it off, the next open erases it.

        Before its first byte. Raises StoreFailed.
        """
        self._ask(Intent(record), timeout_s)

    def swap(self, job: SwapJob) -> None:
        """A repacked span: one transaction puts it in and takes the old one out."""
        self._put(job)

    def save_history(self) -> None:
        """Soon: what requests have shown since it was last saved, and heat. Never raises."""
        with self._wake:
            self._save_asked = True
            self._wake.notify()

    def settle(self) -> None:
        """Soon: what was let go is reclaimed. Never raises, nor in a fork's child."""
        if os.getpid() != self._pid:  # the thread stayed behind, perhaps with the lock
            return
        with self._wake:
            self._settle_asked = True
            self._wake.notify()

    def try_writing(self, slot: Slot, timeout_s: float) -> None:
        """Write to a reserved slot, sync and commit; takes the slot. Raises what is in the way."""
        self._ask(Trial(slot), timeout_s)

    def _ask(self, job: Trial | Intent, timeout_s: float) -> None:
        """Wait for what comes of it, and raise that."""
        self._put(job)
        if not job.ended.wait(timeout_s):
            raise StoreFailed(f"a write has not ended within {timeout_s:g} s")
        if job.error is not None:
            raise job.error

    def barrier(self, timeout_s: float) -> bool:
        """True when all that was queued before has been dealt with."""
        event = threading.Event()
        self._put(event)
        return event.wait(timeout_s)

    def fail(self, error: Exception) -> None:
        """Keep an error for the next flush to raise."""
        with self._wake:
            self._failures.append(error)

    def take_failures(self) -> list[Exception]:
        with self._wake:
            failures, self._failures = self._failures, []
            return failures

    def close(self, timeout_s: float) -> None:
        """Finish what is queued, record heat, stop."""
        with self._wake:
            self._open = False
            self._wake.notify()
        self._thread.join(timeout_s)

    @property
    def ended(self) -> bool:
        """After `close`; False: it is stuck, and the index with it."""
        return not self._thread.is_alive()

    def save_last(self) -> None:
        """After `close`: the history of requests that ended meanwhile. Raises StoreFailed."""
        if self.ended:
            self._save_history()

    def _put(self, job: Job) -> None:
        if os.getpid() != self._pid:  # the thread stayed behind, perhaps with the lock
            raise StoreFailed(f"store: {FORKED}")
        with self._wake:
            if not self._open:
                raise StoreFailed("the store is closed")
            self._jobs.append(job)
            self._wake.notify()

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(self._is_wanted)
                if not self._jobs and not self._open:
                    break
                save, self._save_asked = self._save_asked, False
                batch = Batch()
                while self._jobs:
                    batch.add(self._jobs.popleft())
            try:
                self._deal_with(batch)
                self._settle()
                if save:
                    self._save_history()
            except Exception as err:  # a bug, no memory: told by flush, and nobody is left waiting
                self._abandon(batch, failed(err, "the committer failed: "))
            for event in batch.barriers:
                event.set()
        try:
            self._retry()
            self._settle()
            if self.undone:
                log.warning("%d deleted spans are back at the next open", len(self.undeleted))
            wear = self._duties.wear()  # also of what came to nothing
            self._index.commit({}, heat=self._catalog.heat(), wear=wear, last=True)
        except StoreFailed as err:
            self.fail(err)

    def _is_wanted(self) -> bool:
        return bool(self._jobs) or self._save_asked or self._settle_asked or not self._open

    def _settle(self) -> None:
        """What was let go, in this turn too."""
        if self._settle_asked:
            self._settle_asked = False
            self._duties.settle()

    def _save_history(self) -> None:
        tick = self._history.tick
        values, ledgers = self._history.dump(), self._ledgers.dump()
        heat = self._catalog.heat()
        warmer = dict(heat.items() - self._heat.items())
        if values or ledgers or warmer:
            try:
                self._index.save_history(values, tick, ledgers, warmer)
                self._heat = heat
            except StoreFailed as err:  # forgotten; requests will show it again
                self._duties.trouble(str(err))

    def _deal_with(self, batch: Batch) -> None:
        self._retry()
        self._commit(batch)
        for job in batch.given_up:
            with contextlib.suppress(StoreFailed):  # a write that failed has ended too
                job.draft.settle(WRITE_TIMEOUT_S)
            self._give_back(job)
        for intent in batch.intents:
            self._swaps.intend(intent)
        for swap in batch.swaps:
            swap.done(self._swaps.swap(swap))
        for trial in batch.trials:
            self._try(trial)
        if self.undone:
            return  # nothing more leaves the tree in vain
        surplus = self._duties.overfull([job.draft.record.span_id for job in batch.stores])
        if surplus:
            self._delete(surplus)

    def _try(self, trial: Trial) -> None:
        try:
            self._ssd.write(trial.slot, 0, aligned(PAGE))
            self._ssd.sync([trial.slot])
            self._index.commit({}, wear=self._duties.wear())
        except (StoreFailed, MediumError) as err:
            trial.error = err
        self._ssd.free(trial.slot)
        trial.ended.set()

    def _abandon(self, batch: Batch, err: StoreFailed) -> None:
        """Whoever waits for these is told. How far each came nobody knows: space that it has stays
        its own until the next open, and what was to be deleted is deleted again."""
        self.fail(err)
        if batch.deletes or batch.forget:
            self._keep(batch, str(err))
        for job in batch.stores:
            job.stored.settle(job.stored.refused, err)  # of those READY nothing changes
        waiting: list[Intent | Trial] = [*batch.intents, *batch.trials]
        for asked in waiting:
            asked.error = asked.error or err
            asked.ended.set()

    def _retry(self) -> None:
        """Delete what could not be deleted before, in a transaction of its own."""
        if self.undone:
            self._commit(self._undone)

    def _delete(self, spans: list[int]) -> None:
        self._commit(Batch(deletes=spans))

    # ---- one batch -------------------------------------------------------------------------

    def _commit(self, batch: Batch) -> None:
        written = [job for job in batch.stores if self._write_header(job)]
        puts = {job.draft.record.span_id: encode_index(job.draft.record) for job in written}
        names = {
            job.draft.record.root: job.name
            for job in written
            if job.name and self.names.get(job.draft.record.root) != job.name
        }
        try:
            self._headers.sync((job.draft.record, job.draft.sync_failures) for job in written)
            if puts or batch.deletes or batch.forget:
                born = dict.fromkeys(puts, (0, self._catalog.tick))
                wear = self._duties.wear()
                changes = [
                    *(Change(job.draft.record.span_id, 0, job.draft.prefix) for job in written),
                    *(Change(0, span) for span in batch.deletes),
                ]
                self._index.commit(
                    puts, batch.deletes, born, names, wear, changes, forget=batch.forget,
                    erase=self._duties.spoilt,
                    unname=[root for root in batch.roots if root not in self.names],
                )  # fmt: skip
        except Exception as err:  # the transaction is whole or nothing, memory or none
            told = failed(err)
            if isinstance(err, StoreFailed | MediumError):
                self._duties.trouble(str(told))
            for job in written:
                self._drop(job, told)
            if batch.deletes or batch.forget:
                self._keep(batch, str(told))
            if written:
                self._retry()  # alone: it may have been the stores that did not go
            return
        if batch is self._undone:
            self._undone, self.undone = Batch(), ""
        self.names.update(names)
        added = {job.draft.record.span_id: self._publish(job) for job in written}
        superfluous = [span for span, n in added.items() if n <= 0]
        if superfluous:
            # What was before them may have been purged: nothing is left of these, nor in the log.
            lost = [span for span, n in added.items() if n < 0]
            self._duties.spoil(lost)
            self._commit(Batch(deletes=superfluous, forget=bool(lost)))
        own = self._catalog.own  # an index that was copied names another shard's, too
        self._duties.reclaim(self._catalog.deleted(span for span in batch.deletes if span in own))

    def _keep(self, batch: Batch, why: str) -> None:
        """These deletes are to be tried again: their spans would come back with the next open."""
        if batch is not self._undone:
            self.fail(StoreFailed(why))
            undone = self._undone
            deletes = [*dict.fromkeys(undone.deletes + batch.deletes)]
            forget, roots = undone.forget or batch.forget, undone.roots | batch.roots
            self._undone = Batch(deletes=deletes, forget=forget, roots=roots)
        self.undone = why

    def _write_header(self, job: StoreJob) -> bool:
        """Wait for the rows, then write the header. False when there is nothing to commit."""
        draft = job.draft
        try:
            draft.settle(WRITE_TIMEOUT_S)
            stored = self._catalog.lookup(draft.record.root, draft.prefix)
            # Else purged, or another store of the same tokens was first.
            is_new = not job.stored.refused and stored != draft.record.end_window
            if is_new:
                self._headers.write(draft, job.name)
        except Exception as err:
            told = failed(err)
            if isinstance(err, MediumError) or isinstance(
                err.__cause__, MediumError | TimeoutError
            ):
                self._duties.trouble(str(err.__cause__ or err))
            self._drop(job, told)
            return False
        if not is_new:  # not above: what fails in giving its space back must not give it back again
            self._drop(job, None)
        return is_new

    def _publish(self, job: StoreJob) -> int:
        """Windows it added to the tree; not above 0: its span is retired."""
        record = job.draft.record
        added = self._catalog.publish(record, job.draft.prefix)
        lost = None
        if added < 0:
            lost = StoreFailed("store: the prefix before these rows went bad meanwhile")
            self.fail(lost)
        job.done()
        job.stored.settle(error=lost)
        self._counters.add("stored_tokens", max(added, 0) * record.window)
        self._counters.add("stored_bytes", record.data_bytes if added > 0 else 0)
        return added

    def _give_back(self, job: StoreJob | GiveUp) -> None:
        """Its space, once none of its writes can land there any more: one may be stuck."""

        def free() -> None:
            self._duties.scrap([job.draft.record])
            job.done()

        job.draft.give_up(free)

    def _drop(self, job: StoreJob, error: Exception | None) -> None:
        self._give_back(job)
        job.stored.settle(job.stored.refused, error)
        if error is not None:
            self._counters.add("refused/failed")
            self.fail(error)
        elif job.stored.refused:
            self._counters.add(f"refused/{job.stored.refused}")
