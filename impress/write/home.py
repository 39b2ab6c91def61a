"""Home: what lies on the SSD, and who may take it away.

Segments, index, catalog and committer of a shard, and what the directory's other shards hold. A
span comes in READY through the committer, and goes out evicted or quarantined: tree first, then
index, then space, once its last holder, in this process or another, lets go.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from time import monotonic
from time import time as wall_clock

from impress.config import Config
from impress.errors import FormatError, ImpressError, StoreFailed
from impress.quality.ledgers import Ledgers
from impress.spans.format import SpanRecord
from impress.stats import Counters
from impress.tree.catalog import Held, Leave
from impress.tree.merged import MergedCatalog
from impress.usage.history import History, budget_of
from impress.write.budget import WriteBudget, boot_clock
from impress.write.commit import Committer
from impress.write.directory import Identity, Shard
from impress.write.env import NothingYet, check_fork
from impress.write.follow import Follower
from impress.write.health import Health
from impress.write.index import Index
from impress.write.jobs import Duties
from impress.write.leaving import COMMIT_TIMEOUT_S, Leaving
from impress.write.reclaim import Reclaim
from tiers.base import PAGE
from tiers.errors import MediumError
from tiers.ssd import SsdTier

log = logging.getLogger("impress")

#: Longest wait for the write that shows whether a medium in trouble takes writes again.
TRIAL_TIMEOUT_S = 10.0


class Home:
    """Thread-safe. `forget(span)` is called when a span's copies elsewhere are to go."""

    _own_index: Index | None = None  # until it is open; None: all are only read

    def __init__(
        self, path: Path, identity: Identity, config: Config, counters: Counters,
        forget: Callable[[int], None], shard: Shard | None,
    ) -> None:  # fmt: skip
        """`shard`: locked, to be written; None: all are only read."""
        self._path = path
        self._shard = shard
        self._config = config
        self._counters = counters
        self._forget = forget
        self._pid = os.getpid()
        check_fork(path)
        if shard is not None:
            shard.check_index()
            if shard.number and config.shard is None:
                log.warning(
                    "%s: this process writes shard %s, with disk_bytes and daily_write_bytes of "
                    "its own: others have those before it (main: process %s)",
                    path, shard.name, Shard(path).holder(),
                )  # fmt: skip
        self.place = place = shard or Shard(path)
        self.ssd = SsdTier(
            place.segments, config.segment_bytes, config.disk_bytes, read_only=shard is None,
            engine=config.io_engine, number=place.number,
        )  # fmt: skip
        self.catalog = MergedCatalog(identity.window, range(0) if shard is None else shard.spans)
        try:
            self.others = Follower(
                path, shard, self.catalog, self.ssd, config.read_timeout_s, forget,
                self._orphaned, self._own_value, lambda: self._own_values([]),
            )  # fmt: skip
        except BaseException:
            self.ssd.close()
            raise
        self.committer: Committer | None = None
        self.reclaimer: Reclaim | None = None
        try:
            self._open(config, identity)
        except BaseException:
            self.others.close()  # else their writers would wait for a reader that is not there
            self.ssd.close()  # and these files would be open for as long as the process lives
            if self._own_index is not None:
                self._own_index.close()
            raise
        if shard is not None:
            shard.is_kept = True  # from here on `close` lets go of it, or keeps it

    def _open(self, config: Config, identity: Identity) -> None:
        if self._shard is not None:
            self._own_index = Index(self._shard.index, create=True)
        self.n_layers = identity.geometry.n_layers
        self.history = History(
            identity.geometry.n_layers, identity.window, budget_of(config.dram_bytes),
            self._history_of, self.index.history_tick(), self._ahead_of,
            self.catalog.own.__contains__,
        )  # fmt: skip
        self.ledgers = Ledgers(self._ledger, self.save_history)
        # Wall-clock time, to count across restarts, but not set back or forward while this runs.
        begun_s = wall_clock() - boot_clock()
        self.budget = WriteBudget(
            config.daily_write_bytes, lambda: begun_s + boot_clock(), self.index.wear(), wall_clock
        )
        self.health = Health(self._path, self._try_writing, monotonic)
        self._superfluous, last_span = self._load()
        self.others.say()
        self.span_ids = itertools.count(last_span + 1)  # next() of it is atomic
        if self._shard is not None:
            limit_s = config.lease_timeout_s + config.read_timeout_s
            self.reclaimer = Reclaim(self._shard, self.ssd, self.index, self._counters, limit_s)
            self.reclaimer.wait_for_readers(self.index.generation)
            self.reclaimer.finish()
        self.leaving = Leaving(
            self._path, config, self.catalog, self.ssd, self.history, self._counters,
            self.reclaimer,
        )  # fmt: skip
        if self.reclaimer is not None:
            self.committer = self.leaving.committer = Committer(
                self.index, self.ssd, self.catalog, self._counters, identity.geometry,
                identity.uuid,
                Duties(
                    self.reclaim, self.scrap, self.leaving.overfull, self.health.trouble,
                    self.budget.dump, self.reclaimer.spoilt, self.reclaimer.spoil,
                ),
                self.history, self.ledgers, durable=config.durable,
            )  # fmt: skip

    @property
    def index(self) -> Index:
        """One's own; for a reader, that of the first shard there is, as it is now: a purge or a
        rebuild may put another in its place at any look."""
        if self._own_index is not None:
            return self._own_index
        if not self.others.neighbours:
            raise self.others.error or NothingYet(f"{self._path}: nothing has been stored here yet")
        return next(iter(self.others.neighbours.values())).index

    def tidy(self) -> None:
        """Delete what the index held in vain, and follow the other shards from here on.

        Called once everything that `forget` needs is there.
        """
        if self.committer is not None and self._superfluous:
            if self.others.error is None:
                # Erased, as what they hung from may have been purged; except another shard's.
                own = self.catalog.own
                self.leaving.spoil(span for span in self._superfluous if span in own)
                self.committer.delete_now(self._superfluous, COMMIT_TIMEOUT_S)
            else:  # what hangs from a shard that could not be read only seems to be in vain
                self.catalog.keep_unplaced(self._superfluous)
            self._superfluous = []
        self.others.start(self._config.follow_every_s, self._settle)

    def follow(self) -> bool:
        """Take over what the other shards' writers changed; whether anything was."""
        changed = self.others.look()
        self._settle()
        return changed

    def _load(self) -> tuple[list[int], int]:
        """Fill the tree and the space accounts from the index; (spans to delete, the last id)."""
        collecting = gc.isenabled()
        gc.disable()  # a million short-lived tuples would be walked again and again
        try:
            strange: list[int] = []
            values = chain(self._own_values(strange), self.others.values())
            heat = self.others.heat() if self._shard is None else self.index.heat()
            superfluous, damaged = self.catalog.load(values, heat)
            extents, last = self.catalog.extents()
            self.ssd.claim(extents)
        except ValueError as err:
            raise FormatError(
                f"{self._path}: index and segments do not agree ({err}); "
                "impress rebuild makes the index again from the segments"
            ) from None
        finally:
            if collecting:
                gc.enable()
        if damaged:
            log.warning("%s: %d damaged index values passed over", self._path, len(damaged))
            self._counters.add("damaged_spans", len(damaged))
        ids = self.catalog.own
        mine = [span for span in superfluous + damaged if span in ids] + strange
        if self._shard is not None:
            self.index.only(ids)
        # No new span may get an id still noted as to be erased: the note goes when that is erased.
        known = [*mine, self.index.last_id, self.index.last_span, *self.index.to_erase()]
        return mine, max([last, ids.start, *(span for span in known if span in ids)])

    def _own_values(self, strange: list[int]) -> Iterator[tuple[int, bytes]]:
        """Those of the shard that is written; ids that are not its own are added to `strange`."""
        if self._shard is not None:
            for span, value in self.index.spans():
                if span in self._shard.spans:
                    yield span, value
                else:
                    strange.append(span)

    def _own_value(self, span: int) -> bytes | None:
        return self.index.value(span)

    def _history_of(self, span: int) -> bytes | None:
        own = self.catalog.own
        return self.index.history(span) if span in own else self.others.history(span)

    def _ahead_of(self, span: int) -> int:
        """Requests noted here beyond those that the shard of a span has counted."""
        theirs = None if span in self.catalog.own else self.others.history_tick(span)
        return 0 if theirs is None else self.history.tick - theirs

    def _ledger(self, key: bytes) -> bytes | None:
        """One's own. A process that only reads has none and saves none: at each restart it would
        find a writer's trust again, whatever it had seen itself."""
        return None if self._shard is None else self.index.ledger(key)

    def names(self) -> dict[bytes, str]:
        """Root key -> what its namespace is called."""
        return {**self.others.names(), **self.index.names()}

    def saved_ledgers(self) -> list[tuple[bytes, bytes]]:
        """Every guard's ledger, by key: one's own first."""
        own = [] if self._shard is None else self.index.ledgers()
        return [*own, *self.others.ledgers()]

    @property
    def shard_name(self) -> str:
        """Name of the shard this writes; empty: none."""
        return "" if self._shard is None else self._shard.name

    def _try_writing(self) -> None:
        """Does the medium take writes again? Raises MediumError, StoreFailed."""
        assert self.committer is not None
        slot = self.leaving.reserve(PAGE)
        if slot is None:
            raise MediumError(self.ssd.no_room or "ssd: no room")
        self.committer.try_writing(slot, TRIAL_TIMEOUT_S)

    def quarantine(self, span: int) -> None:
        """A span went bad: never again a hit, nor what hangs from it. But another's that its writer
        has moved or taken out meanwhile is only gone: the next look says so, and what hangs from
        it, one's own too, stays where the copy takes its place."""
        if span in self.catalog.own or not self.others.is_gone(span):
            self.leaving.quarantine(span)
        elif not self._config.follow_every_s:  # nobody else looks, and it would be a hit each time
            with suppress(ImpressError):  # then the next read that misses it looks again
                self.follow()

    def _orphaned(self, spans: Iterable[int]) -> None:
        self.leaving.orphaned(spans)

    def release(self, held: list[Held], keep: int = 0) -> None:
        """A lease or a writer lets go, as `Catalog.release`. The committer reclaims what is then
        nobody's: a request does not wait while a span is erased. In a forked child nothing is
        touched: its parent's locks may have come along taken, and then nobody opens them."""
        if os.getpid() != self._pid or not self.catalog.release(held, keep):
            return
        try:
            self._let_go(self.catalog.unheld)
        finally:
            if self.committer is not None:
                self.committer.settle()

    def reclaim(self, leave: Leave) -> None:
        """Nobody here views or holds any more what `leave` takes out of the catalog: its copies go,
        and its space in due time."""
        self._let_go(leave)
        self._settle()

    def _let_go(self, leave: Leave) -> None:
        """One's own of such spans go into limbo, then copies go, which may take a while."""
        free: list[SpanRecord] = []
        try:
            if self.reclaimer is None:
                leave(free)
            else:
                self.reclaimer.take_over(leave, free)
            for record in free:
                self._forget(record.span_id)
        except BaseException:  # Ctrl-C: nobody else knows of these
            for record in free:
                self._forget(record.span_id)
            raise

    def scrap(self, left: list[SpanRecord]) -> None:
        """These spans were never visible: their space is freed at once, each leaving the list with
        it. What an exception (Ctrl-C) leaves on the list is still the caller's."""
        for record in [*left]:
            self._forget(record.span_id)
        if self.reclaimer is not None:
            self.reclaimer.bury(left)

    def _settle(self) -> None:
        if self.reclaimer is not None:
            self.reclaimer.settle()

    def flush(self, timeout_s: float = COMMIT_TIMEOUT_S) -> None:
        """Wait until all that was stored is READY. Raises StoreFailed for what failed since."""
        if self.committer is None:
            return
        if not self.committer.barrier(timeout_s):
            raise StoreFailed(f"flush: not done within {timeout_s:g} s")
        if (failure := self.committer.take_failure()) is not None:
            raise failure

    def save_history(self) -> None:
        """Save it soon, in the background; does nothing where this process may not write."""
        if self.committer is not None:
            self.committer.save_history()

    def settle(self) -> None:
        """Finish what is queued; what failed is only logged. No store comes after this."""
        if self.committer is not None:
            self.committer.close(COMMIT_TIMEOUT_S)
            if (failure := self.committer.take_failure()) is not None:
                log.warning("%s: a store failed before close: %s", self._path, failure)
        self.others.stop()

    def close(self, *, files: bool, writing: bool) -> None:
        """Save history, let go of index, segments and lock. No read begins any more.

        `files`: no thread uses segments; `writing`: one is stuck and may still write there: then
        all stay this process's.
        """
        if self.committer is not None:
            try:
                self.committer.save_last()
            except StoreFailed as err:
                log.warning("%s: %s", self._path, err)
            writing |= not self.committer.ended
        if self.reclaimer is not None:  # what is held here is not kept beyond this
            self.reclaimer.take_over(self.catalog.let_go, [])
            writing |= not self.reclaimer.close(hangs=writing)
        ended = self.others.close()  # else a look may read on: files and index stay open
        if self._shard is not None:
            writing |= not self.ssd.retire(COMMIT_TIMEOUT_S)
        if files and ended and not writing:
            self.ssd.close()
        if self._shard is not None and writing:
            said = "%s: a write hangs: shard %s stays locked until this process ends"
            log.error(said, self._path, self.shard_name)
            self._shard.is_kept = True
        elif self._shard is not None:
            if ended and files:
                self.index.close()
            self._shard.unlock()

    def check(self, drafts: Iterable[SpanRecord]) -> None:
        """Assert that tree and space agree. `drafts`: stores under way, which own space too."""
        self.catalog.check()
        if self.committer is None or self.reclaimer is None:
            return  # of a reader: the writer may have given back segments that it saw at its open
        self.ssd.check()

        def look() -> tuple[int, int]:
            records = [*self.catalog.all_records(), *self.leaving.in_limbo, *drafts]
            return self.ssd.usage().used, sum(record.owned_bytes for record in records)

        used, owned = self.reclaimer.at_rest(look)
        assert used == owned, f"ssd: {used} bytes used, spans own {owned}"
