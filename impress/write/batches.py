"""What the committer does with jobs that waited together.

A store becomes READY here and nowhere else: its rows and header are on stable storage, then one
index transaction names it, then the tree shows it. Stores that wait together commit together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

from impress.errors import StoreFailed
from impress.spans.format import SpanRecord, encode_index
from impress.stats import Counters
from impress.tree.merged import MergedCatalog
from impress.usage.history import History
from impress.write.changes import Change
from impress.write.draft import label_of
from impress.write.headers import Headers
from impress.write.index import Index
from impress.write.jobs import (
    Asked,
    Batch,
    Duties,
    GiveUp,
    SaveWear,
    StoreJob,
    SwapJob,
    Swapped,
    Trial,
)
from impress.write.swap import Swaps, failed
from tiers.base import PAGE
from tiers.errors import MediumError
from tiers.slots import aligned
from tiers.ssd import SsdTier

#: A write that takes longer than this is stuck; its store fails.
WRITE_TIMEOUT_S: Final = 120.0
_NOT_FOUND: Final = "an error came before all that was stored could be found"
#: What `Stored.refused` says where another process's eviction, say, came first. Nothing failed.
_PREFIX_GONE: Final = (
    "prefix gone: what these rows follow went bad, or the process that wrote it took it out"
)


class Batches:
    """For the committer's thread alone; whoever waits for a job of a batch is told, come what may.

    An error that neither the disk nor the index raised (a bug, no memory) fails only the job that
    met it, and flush raises it. Nobody knows how far that job got: the space it took is given to
    nobody else before the next open.
    """

    def __init__(
        self, index: Index, ssd: SsdTier, headers: Headers, catalog: MergedCatalog,
        counters: Counters, duties: Duties, history: History, fail: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        """`fail` is told what the next flush is to raise."""
        self._index = index
        self._ssd = ssd
        self._headers = headers
        self._catalog = catalog
        self._counters = counters
        self._duties = duties
        self._fail = fail
        # Spans in the index, or about to be, that are not yet in the tree, nor out of both again.
        self._unseen: dict[int, SpanRecord] = {}
        self._strays: list[SpanRecord] = []  # of these, those that never came into the tree
        self._swaps = Swaps(index, headers, catalog, history, duties, self._delete, self._unseen)
        self.names: dict[bytes, str] = index.names()
        """Root key -> what its namespace is called, in the index."""
        self._keeper = dict[str, bytes]()  # name -> the bare root that keeps it
        # Where others' spans went last, no delete of one's own saw the root become bare. (A span
        # that `load` found no place for is still to be deleted, or kept: its root is not bare yet.)
        alive = catalog.roots() | catalog.bare_roots(catalog.untold())
        self._unnamed = self._nameless(self.names.keys() - alive)  # in the index until a commit
        for root in self._unnamed:
            del self.names[root]
        self._undone = Batch()  # deletes that failed
        self._left: list[Batch] = []  # batches whose deletes are to be added to `_undone`
        self.undone = ""
        """Why spans that were deleted are still in the index; empty: none are."""

    @property
    def undeleted(self) -> list[int]:
        """Spans that are `undone`."""
        return self._undone.deletes

    def deal_with(self, batch: Batch) -> None:
        """Do all of a batch's jobs except the barriers."""
        for wear in batch.wears:  # first: a store waits for it; the rest may wait for a disk
            self._answer(wear, self._save_wear)
        self.attempt(self.retry)
        err = self.attempt(self._commit, batch)
        if err is not None:
            self.attempt(self._abandon, batch, err)
        for job in batch.given_up:
            self.attempt(self._give_up, job)
        for intent in batch.intents:
            self._answer(intent, self._swaps.intend)
        for swap in batch.swaps:
            self.attempt(self._swap, swap)
        for trial in batch.trials:
            self._answer(trial, self._try)
        self.attempt(self._thin_out, batch)

    def attempt(self, act: Callable[..., object], *args: Any) -> StoreFailed | None:
        """Call `act`; the error it fails with is returned, and kept for flush."""
        try:
            act(*args)
        except Exception as err:
            told = err if isinstance(err, StoreFailed) else failed(err, "the committer failed: ")
            self._tell(told)
            return told
        return None

    def _tell(self, error: Exception) -> None:
        """Tell the next flush. Whoever waits for the job is told all the same."""
        with contextlib.suppress(MemoryError):
            self._fail(error)

    def retry(self) -> None:
        """Delete what could not be deleted before, in a transaction of its own."""
        if self._unseen or self._left:
            self.undone = self.undone or _NOT_FOUND  # until that is done, a purge fails
        while self._left:
            self._add_undone(self._left[-1])
            self._left.pop()
        self.attempt(self._take_back)
        if self.undone:
            self._commit(self._undone)

    def _take_back(self) -> None:
        """Take the `_unseen` out of the index, and out of the tree what it shows of them: were they
        left in the index alone, a purge would not find them."""
        for span, record in [*self._unseen.items()]:
            below = self._catalog.quarantine(span)
            spans = [span, *(one for one in below if one != span and one in self._catalog.own)]
            is_stray = not self._catalog.knows(span)
            self._duties.spoil(spans)
            self._add_undone(Batch(deletes=spans))
            if is_stray:
                self._strays.append(record)
            del self._unseen[span]

    def _answer(self, job: Asked, act: Callable[[Any], None]) -> None:
        try:
            act(job)
        except (StoreFailed, MediumError) as err:
            job.error = err
        except Exception as err:
            job.error = failed(err, "the committer failed: ")
        finally:
            job.ended.set()

    def _give_up(self, job: GiveUp) -> None:
        with contextlib.suppress(StoreFailed):  # a write that failed has ended too
            job.draft.settle(WRITE_TIMEOUT_S)
        self._give_back(job)

    def _swap(self, job: SwapJob) -> None:
        outcome = Swapped.FAILED
        try:
            outcome = self._swaps.swap(job)
        finally:
            job.done(outcome)

    def _save_wear(self, _job: SaveWear) -> None:
        self._index.commit({}, wear=self._duties.wear())

    def _try(self, trial: Trial) -> None:
        try:
            self._ssd.write(trial.slot, 0, aligned(PAGE))
            self._ssd.sync([trial.slot])
            self._index.commit({}, wear=self._duties.wear())
        finally:
            self._ssd.free(trial.slot)

    def _thin_out(self, batch: Batch) -> None:
        """Delete what is above home's high watermark, except for what has just been stored."""
        if self.undone:
            return  # nothing more leaves the tree in vain
        surplus = self._duties.overfull([job.draft.record for job in batch.stores])
        if surplus:
            self._delete(surplus)

    def _abandon(self, batch: Batch, err: StoreFailed) -> None:
        """Tell whoever waits for its stores; what was to be deleted is tried again."""
        try:
            if batch.deletes or batch.forget:
                self.undone = self.undone or _NOT_FOUND
                self._left.append(batch)
        finally:
            for job in batch.stores:
                self._not_kept(job, err)  # changes nothing for those READY

    def _delete(self, spans: list[int]) -> None:
        self._commit(Batch(deletes=spans))

    # ---- one batch -------------------------------------------------------------------------

    def _commit(self, batch: Batch) -> None:
        written: list[StoreJob] = []
        for job in batch.stores:
            if err := self.attempt(self._write_header, job, written):
                self._not_kept(job, err)
        puts = {job.draft.record.span_id: encode_index(job.draft.record) for job in written}
        names = {
            job.draft.record.root: job.name
            for job in written
            if job.name and self.names.get(job.draft.record.root) != job.name
        }
        stored = {job.draft.record.root for job in written}
        bare = self._nameless(self._catalog.bare_roots(batch.deletes) - stored)
        self._unseen.update((job.draft.record.span_id, job.draft.record) for job in written)
        try:
            self._headers.sync((job.draft.record, job.draft.sync_failures) for job in written)
            if puts or batch.deletes or batch.forget:
                born = dict.fromkeys(puts, (0, self._catalog.tick))
                wear = self._duties.wear()
                changes = [
                    *(Change(job.draft.record.span_id, 0, job.draft.prefix) for job in written),
                    *(Change(0, span) for span in batch.deletes),
                ]
                old = (root for root in batch.roots | self._unnamed if root not in self.names)
                self._index.commit(
                    puts, batch.deletes, born, names, wear, changes, forget=batch.forget,
                    erase=self._duties.spoilt, intend=batch.records, unname=bare.union(old),
                )  # fmt: skip
                self._unnamed = set()
        except Exception as err:  # the transaction is all or nothing, even without memory
            for span in puts:
                self._unseen.pop(span, None)
            told = failed(err)
            if isinstance(err, StoreFailed | MediumError):
                self._duties.trouble(str(told))
            for job in written:
                self.attempt(self._drop, job, told)
            if batch.deletes or batch.forget:
                self._keep(batch, str(told))
            if written:
                self.retry()  # the deletes alone: it may have been the stores that failed
            return
        if batch is self._undone:
            self._undone = Batch()
            self.undone = _NOT_FOUND if self._unseen or self._left else ""
            strays, self._strays = self._strays, []
            # Processes that follow this index may have read them.
            self._duties.reclaim(lambda free: free.extend(strays))
        for root in bare:
            self.names.pop(root, None)
        self.names.update(names)
        added: dict[int, int] = {}
        for job in written:
            self.attempt(self._publish, job, added)
        superfluous = {span: n for span, n in added.items() if n <= 0}
        if superfluous:
            # What was before them may have been purged: nothing is left of these, even in the log.
            lost = [span for span, n in superfluous.items() if n < 0]
            self._duties.spoil(lost)
            self._commit(Batch(deletes=[*superfluous], forget=bool(lost)))
            for span in superfluous:
                self._unseen.pop(span, None)
        own = self._catalog.own  # an index that was copied names another shard's spans, too
        mine = [span for span in batch.deletes if span in own]
        self._duties.reclaim(lambda free: self._catalog.deleted(mine, free))

    def _nameless(self, bare: set[bytes]) -> set[bytes]:
        """Those of these bare roots whose name goes: users come and go. One root of each name keeps
        it, so that a purge by that name erases what is left of it in free space."""
        gone = set()
        for root in bare:
            if not (name := self.names.get(root)):
                continue
            keeper = self._keeper.get(name, root)
            if keeper == root or keeper not in self.names:
                self._keeper[name] = root
            else:
                gone.add(root)
        return gone

    def _keep(self, batch: Batch, why: str) -> None:
        """Have these deletes tried again: else their spans would come back with the next open."""
        if batch is not self._undone:
            self._tell(StoreFailed(why))
            self._add_undone(batch)
        self.undone = why

    def _add_undone(self, batch: Batch) -> None:
        undone = self._undone
        deletes = [*dict.fromkeys(undone.deletes + batch.deletes)]
        forget, roots = undone.forget or batch.forget, undone.roots | batch.roots
        records = undone.records + batch.records
        self._undone = Batch(deletes=deletes, forget=forget, roots=roots, records=records)

    def _write_header(self, job: StoreJob, written: list[StoreJob]) -> None:
        """Wait for the rows, then write the header and add the job to `written`."""
        draft = job.draft
        try:
            draft.settle(WRITE_TIMEOUT_S)
            stored = self._catalog.lookup(draft.record.root, draft.prefix)
            if not job.stored.refused and stored < draft.record.first_window:
                # Found here as a rule, not in `_publish`: what is not committed needs no log that
                # forgets it, without which every follower would compare the whole index.
                self._duties.spoil([draft.record.span_id])  # what was before it may be purged
                job.stored.refused = _PREFIX_GONE
            # Else purged, or another store of the same tokens was first.
            is_new = not job.stored.refused and stored != draft.record.end_window
            if is_new:
                self._headers.write(draft, job.name)
        except Exception as err:
            told = failed(err)
            cause = err.__cause__ or err
            blames = isinstance(cause, MediumError | TimeoutError) or isinstance(err, MediumError)
            if blames and not getattr(cause, "harmless", False):  # short of memory: not the disk's
                self._duties.trouble(str(cause))
            self._drop(job, told)
            return
        if is_new:
            written.append(job)
        else:  # not above: a failure to give its space back must not give it back twice
            self._drop(job, None)

    def _publish(self, job: StoreJob, added: dict[int, int]) -> None:
        """Show a span in the tree, and note how many windows it `added` (0 or less: it is retired).
        Not noted where that failed: then what there is of it is taken back in the next turn."""
        record, n_windows, lost = job.draft.record, 0, None
        try:
            n_windows = added[record.span_id] = self._catalog.publish(record, job.draft.prefix)
            if n_windows > 0:
                self._unseen.pop(record.span_id, None)
        except Exception as err:
            lost = failed(err, "the committer failed: ")
        if lost is not None:
            self._tell(lost)
        try:
            job.done()
        finally:
            if lost is not None:
                self._not_kept(job, lost)
            elif n_windows < 0:
                job.stored.settle(job.stored.refused or _PREFIX_GONE)
                self._counters.add(f"refused/{label_of(job.stored.refused)}")
            job.stored.settle()
        if n_windows > 0:
            self._counters.add("stored_tokens", n_windows * record.window)
            self._counters.add("stored_bytes", record.data_bytes)

    def _not_kept(self, job: StoreJob, error: Exception) -> None:
        """Its store has failed, if nothing else has come of it before."""
        if job.stored.settle(job.stored.refused, error):
            self._counters.add("refused/failed")

    def _give_back(self, job: StoreJob | GiveUp) -> None:
        """Free its space, once none of its writes can land there any more: one may be stuck."""

        def free() -> None:
            self._duties.scrap([job.draft.record])
            job.done()

        job.draft.give_up(free)

    def _drop(self, job: StoreJob, error: Exception | None) -> None:
        try:
            self._give_back(job)
        finally:
            job.stored.settle(job.stored.refused, error)
        if error is not None:
            self._counters.add("refused/failed")
            self._tell(error)
        elif job.stored.refused:
            self._counters.add(f"refused/{label_of(job.stored.refused)}")
