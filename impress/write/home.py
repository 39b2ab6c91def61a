"""Home: what lies on the SSD, and who may take it away.

Segments, index, catalog and committer of one shard. A span comes in READY through the committer,
and goes out evicted or quarantined: tree first, then index, then space, when its last holder ends.
"""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import monotonic
from time import time as wall_clock

from impress.config import Config
from impress.errors import FormatError, ImpressError, StoreFailed
from impress.quality.ledgers import Ledgers
from impress.spans.format import SpanRecord
from impress.stats import Counters
from impress.tree.catalog import Catalog, Held
from impress.tree.eviction import Score, score_of
from impress.usage.history import History, budget_of
from impress.write.budget import WriteBudget
from impress.write.commit import Committer, bury
from impress.write.directory import Identity, Shard
from impress.write.health import Health
from impress.write.index import Index
from impress.write.jobs import Duties
from tiers.base import PAGE, Slot
from tiers.errors import MediumError
from tiers.ssd import SsdTier

log = logging.getLogger("impress")

#: Longest wait for the committer: a disk that takes longer is stuck.
COMMIT_TIMEOUT_S = 150.0
#: Longest wait for the write that shows whether a medium in trouble takes writes again.
TRIAL_TIMEOUT_S = 10.0


class Home:
    """Thread-safe. `forget(span)` is called when a span's copies elsewhere are to go."""

    def __init__(
        self, path: Path, identity: Identity, config: Config, counters: Counters,
        forget: Callable[[int], None], *, write: bool,
    ) -> None:  # fmt: skip
        self._path = path
        self._config = config
        self._counters = counters
        self._forget = forget
        self.before_evict: Callable[[], None] = lambda: None  # makes more of it evictable
        self._erase: set[int] = set()  # purged, repacked: their bytes go before their space does
        shard = Shard(path)
        if not write and not shard.index.is_dir():
            raise FormatError(f"{path}: nothing has been stored here yet")
        if not shard.index.is_dir() and any(shard.segments.glob("*.seg")):
            raise FormatError(
                f"{path}: its index is missing; impress rebuild makes it again from the segments"
            )
        self.ssd = SsdTier(
            shard.segments, config.segment_bytes, config.disk_bytes, read_only=not write,
            engine=config.io_engine,
        )  # fmt: skip
        self.index = Index(shard.index, create=write)
        self.n_layers = identity.geometry.n_layers
        self.catalog = Catalog(identity.window)
        self.history = History(
            identity.geometry.n_layers, identity.window, budget_of(config.dram_bytes),
            self.index.history, self.index.history_tick(),
        )  # fmt: skip
        self.ledgers = Ledgers(self.index.ledger, self.save_history)
        self.budget = WriteBudget(config.daily_write_bytes, wall_clock, self.index.wear())
        self.health = Health(path, self._try_writing, monotonic)
        self._superfluous, last_span = self._load()
        self.span_ids = itertools.count(last_span + 1)  # next() of it is atomic
        self.committer: Committer | None = None
        if write:
            self.committer = Committer(
                self.index, self.ssd, self.catalog, counters, identity.geometry, identity.uuid,
                Duties(self.reclaim, self._overfull, self.health.trouble, self.budget.dump),
                self.history, self.ledgers, durable=config.durable,
            )  # fmt: skip

    def tidy(self) -> None:
        """Delete what the index held in vain; once everything that `forget` needs is there."""
        if self.committer is not None and self._superfluous:
            self._delete(self._superfluous)
            self._superfluous = []

    def _load(self) -> tuple[list[int], int]:
        """Fill the tree and the space accounts from the index; (spans to delete, the last id)."""
        collecting = gc.isenabled()
        gc.disable()  # a million short-lived tuples would be walked again and again
        try:
            superfluous, damaged = self.catalog.load(self.index.spans(), self.index.heat())
            extents, last = self.catalog.extents()
            self.ssd.claim(extents)
        except ValueError as err:
            raise FormatError(
                f"{self._path}: two spans claim the same space ({err}); "
                "impress rebuild makes the index again from the segments"
            ) from None
        finally:
            if collecting:
                gc.enable()
        if damaged:
            log.warning("%s: %d damaged index values passed over", self._path, len(damaged))
            self._counters.add("damaged_spans", len(damaged))
        return superfluous + damaged, max([last, *(span for span in damaged if not span >> 62)])

    def _delete(self, spans: list[int]) -> None:
        assert self.committer is not None
        self.committer.delete(spans)
        if not self.committer.barrier(COMMIT_TIMEOUT_S):
            raise StoreFailed(f"{self._path}: no commit within {COMMIT_TIMEOUT_S:g} s")

    def evict(self, n_bytes: int) -> int:
        """Drop what is worth least (Config.eviction), leaves first, never held ones; bytes freed.

        Returns when they are out of the index and their space is free.
        """
        if self.committer is None:
            raise ImpressError('store: opened with mode="r"')
        spans, freed = self._take_out(n_bytes)
        self._delete(spans)
        return freed

    def _take_out(self, n_bytes: int, spare: Iterable[int] = ()) -> tuple[list[int], int]:
        """Spans of about n_bytes leave the tree: (they, for the committer to delete; bytes)."""
        self.before_evict()
        spans = self.catalog.evict(n_bytes, self._score(), spare)
        self._counters.add("evicted_spans", len(spans))
        return spans, sum(r.data_bytes + r.meta.length for r in self.catalog.retired_records(spans))

    def _score(self) -> Score:
        by_worth = self._config.eviction == "importance"
        return score_of(self._config.eviction, self.history.known_shares() if by_worth else {})

    def _overfull(self, new: Iterable[int]) -> list[int]:
        """What leaves because home is filled above its high watermark, but for what is new."""
        capacity = self.ssd.capacity_bytes
        if capacity is None:
            return []
        used = self.ssd.usage().used
        if used <= self._config.disk_high * capacity:
            return []
        return self._take_out(used - int(self._config.disk_low * capacity), new)[0]

    def _try_writing(self, n_bytes: int) -> None:
        """Does the medium take writes again, n_bytes of them? Raises MediumError, StoreFailed."""
        assert self.committer is not None
        n_bytes = max(n_bytes, PAGE)
        slot = self.ssd.reserve(n_bytes)
        if slot is None and self.make_room(n_bytes):
            slot = self.ssd.reserve(n_bytes)
        if slot is None:
            raise MediumError(self.ssd.no_room or "ssd: no room")
        self.committer.try_writing(slot, TRIAL_TIMEOUT_S)

    def purge(self, roots: Iterable[bytes]) -> tuple[int, int]:
        """Erase everything under these root keys: (spans, those of them still held).

        Their bytes are overwritten on the medium before the space is free; what a lease still
        holds, when it ends.
        """
        if self.committer is None:
            raise ImpressError('store: opened with mode="r"')
        spans = [span for root in roots for span in self.catalog.purge(root)]
        self._erase.update(spans)
        self._counters.add("purged_spans", len(spans))
        failed = self._counters["unerased_spans"]
        self._delete(spans)
        if self._counters["unerased_spans"] > failed:
            raise StoreFailed(
                f"{self._path}: purged, but not all could be overwritten; see the log"
            )
        return len(spans), len(self.catalog.retired_records(spans))

    def spoil(self, span: int) -> None:
        """Erase this span's bytes before its space is free: they are a copy of what lives on."""
        self._erase.add(span)

    def make_room(self, n_bytes: int) -> bool:
        """Evict until n_bytes more are free; False when nothing can go."""
        return self.evict(n_bytes) > 0

    def quarantine(self, span: int) -> None:
        """A span went bad: never again a hit, nor what hangs from it."""
        retired = self.catalog.quarantine(span)
        if retired:
            log.warning(
                "%s: span %d does not read back; dropped, with what follows it", self._path, span
            )
            self._counters.add("quarantined_spans", len(retired))
            if self.committer is not None:
                self.committer.delete(retired)

    def release(self, held: Sequence[Held]) -> None:
        """A lease or a writer lets go."""
        self.reclaim(self.catalog.release(h.record.span_id for h in held))

    def reclaim(self, records: Iterable[SpanRecord]) -> None:
        """Nobody views or holds these spans any more: copies and space go."""
        for record in records:
            self._forget(record.span_id)
            if self.committer is not None:
                if record.span_id in self._erase:
                    self._wipe(record)
                bury(self.ssd, record)

    def _wipe(self, record: SpanRecord) -> None:
        """Overwrite a purged span. On the committer's thread: nothing may be raised there."""
        self._erase.discard(record.span_id)
        try:
            self.ssd.erase(Slot((record.meta, *record.parts)))
        except MediumError as err:
            log.error("%s: span %d could not be erased: %s", self._path, record.span_id, err)
            self._counters.add("unerased_spans")

    def flush(self, timeout_s: float = COMMIT_TIMEOUT_S) -> None:
        """Wait until all that was stored is READY. Raises StoreFailed for what failed since."""
        if self.committer is None:
            return
        if not self.committer.barrier(timeout_s):
            raise StoreFailed(f"flush: not done within {timeout_s:g} s")
        failures = self.committer.take_failures()
        if failures:
            more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
            raise StoreFailed(f"{failures[0]}{more}") from failures[0]

    def save_history(self) -> None:
        """Soon, in the background; nothing where this process may not write."""
        if self.committer is not None:
            self.committer.save_history()

    def settle(self) -> None:
        """Finish what is queued; what failed is only logged. No store comes after this."""
        if self.committer is not None:
            self.committer.close(COMMIT_TIMEOUT_S)
            for error in self.committer.take_failures():
                log.warning("%s: a store failed before close: %s", self._path, error)

    def close(self, *, files: bool) -> None:
        """Save history, let the index go; the segments too unless a stuck thread may use them."""
        if self.committer is not None:
            try:
                self.committer.save_last()
            except StoreFailed as err:
                log.warning("%s: %s", self._path, err)
        if files:
            self.ssd.close()
        self.index.close()

    def check(self, drafts: Iterable[SpanRecord]) -> None:
        """Assert that tree and space agree. `drafts`: stores under way, which own space too."""
        self.catalog.check()
        self.ssd.check()
        if self.committer is not None:
            records = [*self.catalog.all_records(), *drafts]
            owned = sum(r.data_bytes + r.meta.length for r in records)
            used = self.ssd.usage().used
            assert used == owned, f"ssd: {used} bytes used, spans own {owned}"
