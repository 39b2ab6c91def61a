"""What leaves home: what is evicted, purged or goes bad, and everything that hung from it.

tree ─→ committer: out of the index ─→ Home.reclaim: space, once nobody reads it
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from impress.blockhash import namespace_digest
from impress.config import Config
from impress.errors import ImpressError, StoreFailed
from impress.spans.format import SpanRecord
from impress.stats import Counters
from impress.tree.eviction import Score, score_of
from impress.tree.merged import MergedCatalog
from impress.usage.history import History
from impress.write.commit import Committer
from impress.write.reclaim import Reclaim
from tiers.base import Extent, Slot
from tiers.errors import MediumError
from tiers.files import sync_path
from tiers.ssd import SsdTier

log = logging.getLogger("impress")

#: Longest wait for the committer: a disk that takes longer is stuck.
COMMIT_TIMEOUT_S = 150.0

#: Bytes that leave in one turn of the committer at least, where home is too full, besides as many
#: as have come with it: a thirty-second of what is to leave, if that is more.
AT_ONCE = 1 << 30

#: Smallest part where home is full: the hole that a window of a small model leaves.
SMALL_PART = 64 << 10

#: Whether what is stored in a namespace under a root key is to be purged.
Wanted = Callable[[bytes, bytes], bool]


class Leaving:
    """Thread-safe. A process that only reads quarantines for itself alone; the rest it refuses."""

    def __init__(
        self, path: Path, config: Config, catalog: MergedCatalog, ssd: SsdTier, history: History,
        counters: Counters, reclaimer: Reclaim | None,
    ) -> None:  # fmt: skip
        """`reclaimer`: of the shard that is written; None: all are only read."""
        self._path = path
        self._config = config
        self._catalog = catalog
        self._ssd = ssd
        self._history = history
        self._counters = counters
        self._reclaimer = reclaimer
        self.committer: Committer | None = None
        """Of that shard; set once, before anything leaves."""
        self.before_evict: Callable[[], None] = lambda: None  # makes more evictable
        self.copies_bytes: Callable[[], int] = lambda: 0  # of repacks, under way
        self.cut_off: Callable[[], list[SpanRecord]] = list  # of these, what a purge has to erase
        self.drafts: Callable[[], list[SpanRecord]] = list  # stores under way
        # For a purge: records of stores under way, which may write where evicted rows lie.
        self.refuse: Callable[[Wanted], list[SpanRecord]] = lambda wanted: []
        self.purging: list[Wanted] = []
        """What purges are taking out of the tree: a store of it that begins now is refused."""
        self._thinning = False  # from the high watermark down to the low one
        self._n_taken_out = 0  # purges, by what they want
        self.n_purges = 0
        """How many purges have erased what was free."""

    @property
    def in_limbo(self) -> list[SpanRecord]:
        """Spans out of the index whose space other processes may still read."""
        return [] if self._reclaimer is None else self._reclaimer.limbo.records()

    def evict(self, n_bytes: int) -> int:
        """Drop what is worth least (Config.eviction), leaves first, never held ones; bytes that go.

        Returns when they are out of the index and their space is free, or will be once another
        process has moved on (waited for a second at most); 0 where the index takes no writes.
        """
        if self.committer is None:
            raise ImpressError('store: opened with mode="r"')
        spans = self.committer.undeleted
        freed = self._catalog.retired_bytes(spans)
        if self.committer.undone and self.committer.delete_now([], COMMIT_TIMEOUT_S):
            return 0  # nothing more leaves the tree in vain
        more, n_more = self._take_out(n_bytes - freed)
        freed += 0 if self.committer.delete_now(more, COMMIT_TIMEOUT_S) else n_more
        if self._reclaimer is not None:
            self._reclaimer.wait_for([*spans, *more])
        return freed

    def _take_out(self, n_bytes: int, spare: Iterable[int] = ()) -> tuple[list[int], int]:
        """Take out spans of about n_bytes: (they, for the committer to delete; their bytes)."""
        self.before_evict()
        # The committer was not told of these, after Ctrl-C or an error in an earlier eviction; or
        # they are on their way to it, so that they are no reason to evict less.
        untold = self._catalog.untold()
        spans = self._catalog.evict_unplaced(n_bytes)
        self.spoil(spans)  # what they hung from may have been purged
        n_bytes -= self._catalog.retired_bytes(spans)
        spans += self._catalog.evict(n_bytes, self._score(), spare)
        self._counters.add("evicted_spans", len(spans))
        return untold + spans, self._catalog.retired_bytes(untold + spans)

    def _score(self) -> Score:
        by_worth = self._config.eviction == "importance"
        return score_of(self._config.eviction, self._history.known_shares() if by_worth else {})

    def overfull(self, new: Sequence[SpanRecord]) -> list[int]:
        """What leaves because home is filled above its high watermark, except what is new. Of much
        a part, and more with each commit until the low one is reached: no store is READY before.
        Each part is larger than what has come."""
        surplus = self.surplus(goes_on=self._thinning)
        come = sum(record.owned_bytes for record in new)
        some = min(surplus, max(AT_ONCE + come, surplus // 32))
        self._thinning = surplus > some
        return self._take_out(some, [record.span_id for record in new])[0] if some else []

    def surplus(self, *, goes_on: bool = False) -> int:
        """Bytes down to the low watermark, where home is filled above the high one (above the low
        one, where this `goes_on`); else 0."""
        capacity = self._ssd.capacity_bytes
        if capacity is None:
            return 0
        # What is out of the tree is free once nobody reads it: no reason for more to go. Nor is a
        # repack's copy: its span goes for it. Asked in the order in which bytes move: those on
        # their way count twice, but never not at all, which would make as much leave as lies
        # between the marks.
        copies, gone = self.copies_bytes(), 0
        if self._reclaimer is not None:
            gone = self._reclaimer.settled(self._gone_bytes)
        used = self._ssd.usage().used - gone
        used -= max(copies, self.copies_bytes())  # one that has just begun is in what is used
        mark = self._config.disk_low if goes_on else self._config.disk_high
        if used <= mark * capacity:
            return 0
        return used - int(self._config.disk_low * capacity)

    def _gone_bytes(self) -> int:
        return self._catalog.retired_bytes() + self._limbo_bytes()

    def purges(self) -> int:
        """How many purges have taken what they want out of the tree. Rows that were computed or
        leased before this count rose must not be stored after it."""
        return self._n_taken_out

    def purge(self, wanted: Wanted) -> tuple[int, int]:
        """Erase everything under the root keys of what is `wanted`: (spans, how many still held).

        Their bytes are overwritten on the medium before the space is free; what a lease still
        holds, when it ends, or at `close`; what a crash leaves, at the next open. Stores of it that
        began before it was out of the tree are refused, and erased when they end. Whatever is free
        is erased too: what was evicted, and what a crash cut off, whoever's; and what stores under
        way give back. Raises StoreFailed where the index takes no writes, or the disk takes no
        erasing; ImpressError where this process only reads.
        """
        if self.committer is None:
            raise ImpressError('store: opened with mode="r"')
        failed = self._counters["unerased_spans"]
        self.cut_off()
        undeleted = self._catalog.retired_records(self.committer.undeleted)
        late = [record.span_id for record in undeleted if wanted(record.namespace, record.root)]
        self.spoil(late)
        try:
            self.purging.append(wanted)  # in here: after it, Ctrl-C had every later store refused
            drafts, roots, gone = self._take_out_all(wanted, self.committer)
        finally:
            self._n_taken_out += 1  # first: until the next line, stores of it are refused
            self.purging.remove(wanted)
        spans = late + gone
        held = {r.span_id: r for r in self._owning() if wanted(r.namespace, r.root)}
        self.spoil(held)
        # Out of the tree: no longer in the index, or, after an error, with nobody to delete them.
        out = held.keys() - {record.span_id for record in self._catalog.records()} - {*gone}
        left = [held[span] for span in out if span in self._catalog.own]
        names = self.committer.names.copy()  # also of what was evicted before
        named = {r for r, name in names.items() if name and wanted(namespace_digest(name), r)}
        gone += [record.span_id for record in left]
        self.committer.erase(gone, roots | named, left + drafts)
        if undone := self.committer.delete_now([], COMMIT_TIMEOUT_S):
            raise StoreFailed(f"{self._path}: not purged: {undone}; purge again, or it comes back")
        self._counters.add("purged_spans", len(spans))
        if self._reclaimer is not None:
            self._reclaimer.wait_for(held)
        if self._counters["unerased_spans"] > failed:
            raise StoreFailed(
                f"{self._path}: purged, but not all could be overwritten; see the log"
            )
        self._ssd.trim()
        try:
            sync_path(self._ssd.folder)  # else a power cut brings back what was evicted there
            if self._reclaimer is not None:
                self._reclaimer.erase_free(self._ready())
        except (MediumError, OSError) as err:
            why = err.strerror if isinstance(err, OSError) else err
            raise StoreFailed(f"{self._path}: purged, but not what is free: {why}") from err
        self.n_purges += 1  # first: a store that is not a draft yet sees it once it is
        before = {record.span_id for record in drafts}
        self.note_begun(r for r in self.refuse(lambda *_: False) if r.span_id not in before)
        copies = [copy for copy in self.cut_off() if wanted(copy.namespace, copy.root)]
        return len(spans), self._n_left(held) + len(copies)

    def _take_out_all(
        self, wanted: Wanted, committer: Committer
    ) -> tuple[list[SpanRecord], set[bytes], list[int]]:
        """For a purge: (stores under way, root keys of what was there, spans out of the tree)."""
        drafts = self.refuse(wanted)
        if not committer.barrier(COMMIT_TIMEOUT_S):  # what it has finished is in the tree
            raise StoreFailed(f"{self._path}: not purged: no commit within {COMMIT_TIMEOUT_S:g} s")
        known = {(record.namespace, record.root) for record in self._catalog.all_records()}
        roots = {root for namespace, root in known if wanted(namespace, root)}
        return drafts, roots, self._catalog.purge(roots)

    def _owning(self) -> list[SpanRecord]:
        """One's own spans that have space, even evicted or bad ones held here or elsewhere."""
        assert self._reclaimer is not None
        # Else one on its way into limbo is in neither.
        return self._reclaimer.at_rest(lambda: [*self._catalog.all_records(), *self.in_limbo])

    def _n_left(self, spans: Iterable[int]) -> int:
        """How many of these still have space."""
        assert self._reclaimer is not None
        left = self._reclaimer.at_rest(  # as in `_owning`
            lambda: [*self._catalog.retired_records(spans), *self.in_limbo]
        )
        return len({record.span_id for record in left}.intersection(spans))

    def _ready(self) -> list[Extent]:
        """Where one's own spans that have been READY lie, sorted: every byte there is theirs."""
        records = {r.span_id: r for r in (*self._catalog.all_records(), *self.in_limbo)}
        mine = (record for span, record in records.items() if span in self._catalog.own)
        return sorted(part for record in mine for part in (record.meta, *record.parts))

    def note_begun(self, records: Iterable[SpanRecord]) -> None:
        """For a purge: note stores that began beside it, before all that is free was erased: a
        crash is made good for these, too. Raises StoreFailed."""
        assert self.committer is not None
        new = list(records)
        if not new:
            return
        self.committer.erase([], (), new)
        if undone := self.committer.delete_now([], COMMIT_TIMEOUT_S):
            raise StoreFailed(f"{self._path}: purged, but not all is noted: {undone}; purge again")

    @property
    def most_bytes(self) -> int | None:
        """Most that can stay, up to the high watermark; None: home has no limit."""
        capacity = self._ssd.capacity_bytes
        return None if capacity is None else int(self._config.disk_high * capacity)

    def could_hold(self, n_bytes: int) -> bool:
        """Whether so much would fit, and stay, if all else went: below home's high watermark, and
        within what a full file system has given it."""
        ssd, most = self._ssd, self.most_bytes
        too_much = bool(ssd.no_room) and n_bytes > ssd.usage().total
        return not too_much and (most is None or n_bytes <= most)

    def _fits(self, n_bytes: int) -> bool:
        """Whether so much would fit if all went that can go: not what is leased or under way.

        Raises StoreFailed where what has ended is not committed in time: the disk may hang.
        """
        self.before_evict()
        under_way = self.drafts()  # first: one may become READY meanwhile
        if self.could_hold(n_bytes + self._staying_bytes()):
            return True
        if self.committer is None or not under_way or not self.could_hold(n_bytes):
            return False
        # Of stores under way, those that have ended can go as soon as they are committed.
        self.committer.delete_now([], COMMIT_TIMEOUT_S)
        return self.could_hold(n_bytes + self._staying_bytes())

    def _staying_bytes(self) -> int:
        drafts = (draft for draft in self.drafts() if not self._catalog.knows(draft.span_id))
        return self._catalog.pinned_bytes() + sum(draft.owned_bytes for draft in drafts)

    def reserve(self, n_bytes: int, whole: int = 0, least: int | None = None) -> Slot | None:
        """Space at home, in parts of at least `least` bytes (None: SMALL_PART); None: no room.

        Where there is none, spans on their way out are waited for, then spans are evicted for what
        is missing. `whole`: bytes of the store this is for (0: of none); nothing is evicted for one
        that would not fit beside what is leased, what it hangs from included, or under way. Where
        evicted spans leave only holes that are too small, more go: of about n_bytes + `whole` at
        most. Raises MediumError, StoreFailed.
        """
        least = SMALL_PART if least is None else least
        slot = self._ssd.reserve(n_bytes, least)
        if slot is not None or (whole and not self._fits(whole)):
            return slot
        if not self._ssd.in_one(least) or (self._ssd.no_room and least > self._ssd.largest_bytes):
            return None
        if self._reclaimer is not None and self._short(n_bytes, least) <= 0:
            self._reclaimer.wait_for([record.span_id for record in self.in_limbo])
            # With room in hand nothing is waited for: Ctrl-C there would lose it.
            if (slot := self._ssd.reserve(n_bytes, least)) is not None:
                return slot
        left = whole + n_bytes
        asked = short = self._short(n_bytes, least)
        while asked > 0 and self.evict(asked) > 0:
            if (slot := self._ssd.reserve(n_bytes, least)) is not None:
                return slot
            left -= asked
            before, short = short, self._short(n_bytes, least)
            asked = min(left, short if short < before else 2 * asked)  # in vain: more at once
        return None

    def _short(self, n_bytes: int, least: int) -> int:
        """Bytes to evict for that. What is in limbo counts as free already: a reader that is
        stopped holds up all that leaves, which is no reason for everything to leave."""
        leaving = self._limbo_bytes()
        return self._ssd.missing(n_bytes, least) - leaving

    def held_up(self, n_bytes: int) -> bool:
        """Whether so much would have room, were it not for what other processes still read."""
        leaving = self._limbo_bytes()
        return 0 < self._ssd.missing(n_bytes, SMALL_PART) <= leaving

    def _limbo_bytes(self) -> int:
        return sum(record.owned_bytes for record in self.in_limbo)

    def quarantine(self, span: int) -> None:
        """A span went bad: never again a hit, nor what hangs from it."""
        retired = self._catalog.quarantine(span)
        if retired:
            log.warning(
                "%s: span %d does not read back; dropped, with what follows it", self._path, span
            )
            self._counters.add("quarantined_spans", len(retired))
            self._delete_soon(retired)

    def orphaned(self, spans: Iterable[int]) -> None:
        """What hung from spans that are gone: one's own of these leave the index too.

        And are erased: what they hung from may have been purged.
        """
        mine = [span for span in spans if span in self._catalog.own]
        self.spoil(mine)
        self._delete_soon(mine)

    def _delete_soon(self, spans: Iterable[int]) -> None:
        """Those of one's own leave the index."""
        mine = [span for span in spans if span in self._catalog.own]
        if mine and self.committer is not None:
            with suppress(StoreFailed):  # closed: only the next open would find them again
                self.committer.delete(mine)

    def spoil(self, spans: Iterable[int]) -> None:
        """Erase these spans' bytes before their space is free."""
        if self._reclaimer is not None:
            self._reclaimer.spoil(spans)
