"""Who may write, and where: from a prompt to a draft with space reserved, and back when refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from impress.blockhash import Tokens, key_after
from impress.errors import BadInput, StoreFailed
from impress.spans.format import ProbeRecord, SpanRecord, layout_of, meta_bytes
from impress.spans.layout import SpanLayout
from impress.spans.tables import TableCache
from impress.stats import Counters
from impress.tree.catalog import Held
from impress.types import Geometry, a_time, an_int
from impress.write.commit import Committer
from impress.write.draft import Draft, Media, Stored, label_of
from impress.write.fitting import Fitter
from impress.write.home import Home
from impress.write.jobs import GiveUp, Job, StoreJob
from impress.write.leaving import COMMIT_TIMEOUT_S, Wanted
from impress.write.writer import Writer
from tiers.base import Extent, Slot
from tiers.errors import MediumError, ReadFailed
from tiers.space import LEAST_PART

#: Longest wait for the header of the span a new one hangs from; most leases read it anyway.
HEADER_TIMEOUT_S: Final = 10.0


class Admission:
    """Opens writers and takes them back. Thread-safe."""

    def __init__(
        self, geometry: Geometry, window: int, namespace: bytes, name: str, home: Home,
        committer: Committer, media: Media, counters: Counters, tables: TableCache, fitter: Fitter,
    ) -> None:  # fmt: skip
        self._geometry = geometry
        self._window = window
        self._namespace = namespace
        self._name = name
        self._home = home
        self._committer = committer
        self._media = media
        self._counters = counters
        self._tables = tables
        self.fitter = fitter
        # Stores begun that have no writer yet, with their root keys.
        self._begun: dict[Stored, bytes] = {}
        # Space reserved, not yet READY or given back.
        self._drafts: dict[int, tuple[Draft, Stored]] = {}
        home.leaving.refuse = self._refuse
        home.leaving.drafts = self.drafts

    def writer(
        self, root: bytes, labels: bytes, tokens: Tokens, start: int, wait_s: float
    ) -> Writer:
        """A writer for the windows of this prompt that are not stored; see PrefixStore.writer."""
        wait_s = a_time(wait_s, "store: wait_s")
        if not 0 <= (start := an_int(start, "store: start")) <= len(tokens):
            raise BadInput(f"store: start {start!r} is not in 0..{len(tokens)}")
        stored = Stored(len(labels) // (4 * self._window) * self._window, 0)
        self._begun[stored] = root  # a purge may come while it waits for its space
        try:
            # In this order: a purge that begins after this look finds it in `_begun`.
            if any(wanted(self._namespace, root) for wanted in [*self._home.leaving.purging]):
                stored.refused = "purged"
            return self._begin(stored, root, labels, start, wait_s)
        finally:
            del self._begun[stored]

    def _begin(
        self, stored: Stored, root: bytes, labels: bytes, start: int, wait_s: float
    ) -> Writer:
        held = self._home.catalog.hold(root, labels, count=False)  # ancestors stay until the commit
        draft, n_purges = None, self._home.leaving.n_purges
        try:
            last, first = list[Job](), sum(h.count for h in held)
            n_windows = stored.n_tokens // self._window
            stored.n_new = (n_windows - first) * self._window
            if start > first * self._window:
                raise BadInput(
                    f"store: start {start} is beyond what is stored ({first * self._window} tokens)"
                )
            if n_windows > first and not stored.refused:
                found = self._draft(root, labels, first, n_windows - first, held)
                if isinstance(found, Draft):
                    draft = found
                else:
                    stored.refused = stored.refused or found
            writer = Writer(
                stored, self._geometry, self._window, draft, self._media, wait_s,
                partial(self._finish, held, last, iter(last)),
            )  # fmt: skip
        except BaseException:
            if draft is not None:
                self._give_back(draft.record.owned_bytes, draft.slot, Slot((draft.record.meta,)))
            self._home.release(held)
            raise
        if draft is not None:
            self._drafts[draft.record.span_id] = draft, stored
            if n_purges != self._home.leaving.n_purges:
                self._note(writer, draft.record)
        return writer

    def _note(self, writer: Writer, record: SpanRecord) -> None:
        """A purge ran while this store had its space but was in no list: note it, so that a crash
        is made good for it too, or refuse it."""
        try:
            self._home.leaving.note_begun([record])
        except StoreFailed:
            writer.stored.refused = writer.stored.refused or "purged"
        except BaseException:  # Ctrl-C: nobody else has the writer
            writer.close(keep=False)
            raise

    def drafts(self) -> list[SpanRecord]:
        """Records of stores under way: space that no span owns yet."""
        return [draft.record for draft, _ in list(self._drafts.values())]

    @property
    def writing(self) -> bool:
        """Whether a write of any of these stores is under way."""
        return any(draft.writing for draft, _ in list(self._drafts.values()))

    def _refuse(self, wanted: Wanted) -> list[SpanRecord]:
        """For a purge: no store under way of what is `wanted` becomes READY. Returns the records of
        all stores under way, whoever's: they are erased before their space is free, as evicted rows
        may have lain there.

        One that the committer is working on at this moment may become READY all the same.
        """
        for stored, root in list(self._begun.items()):  # first: from here they move to the drafts
            if wanted(self._namespace, root):
                stored.refused = stored.refused or "purged"
        records = []
        for draft, stored in list(self._drafts.values()):
            self._home.leaving.spoil([draft.record.span_id])
            if wanted(draft.record.namespace, draft.record.root):
                stored.refused = stored.refused or "purged"
            records.append(draft.record)
        return records

    def _done(self, draft: Draft, held: list[Held]) -> None:
        """The committer is through with a draft."""
        del self._drafts[draft.record.span_id]
        self._home.release(held)
        if self._home.catalog.knows(draft.record.span_id):  # else it is not READY
            self.fitter.poke(draft.record.n_windows * self._window)

    def _before(self, held: Sequence[Held]) -> tuple[ProbeRecord, ...]:
        """Probe records of the span that the next one hangs from, where they matter."""
        if not held or not self._media.fits:
            return ()
        last = held[-1].record
        table = self._tables.of([last], HEADER_TIMEOUT_S)[last.span_id]
        return () if isinstance(table, ReadFailed) else table.probes

    def _draft(
        self, root: bytes, labels: bytes, first: int, n_windows: int, held: Sequence[Held]
    ) -> Draft | str:
        """Reserve space for a span of n_windows from window `first`; or why there is none."""
        sketches = self._media.sketches(self._before(held))
        records = [sketch.record for sketch in sketches]
        layout = layout_of(self._geometry, self._window, n_windows, records)
        stay = {h.record.span_id: h.record.owned_bytes for h in held}  # what it hangs from
        mine = sum(n for span, n in stay.items() if span in self._home.catalog.own)
        reserved = self._reserve_both(n_windows, layout, mine)
        if isinstance(reserved, str):
            return reserved
        meta, slot = reserved
        cut = first * 4 * self._window
        own = labels[cut:]
        try:
            before = key_after(root, labels[:cut], self._window)
            record = SpanRecord(
                next(self._home.span_ids), self._namespace, root, before,
                key_after(before, own, self._window), first, n_windows, self._window, meta,
                slot.parts, own,
            )  # fmt: skip
            return Draft(record, self._geometry, layout, slot, labels, self._media, sketches)
        except BaseException:  # no memory for its sums, Ctrl-C
            self._give_back(meta.length + layout.data_bytes, slot, Slot((meta,)))
            raise

    def _reserve_both(
        self, n_windows: int, layout: SpanLayout, stay_bytes: int
    ) -> tuple[Extent, Slot] | str:
        """Room for a header and for rows, within the day's writes; or why there is none.
        `stay_bytes`: of spans at home that cannot go for it, as it hangs from them."""
        home, ssd = self._home, self._media.ssd
        sizes = (n_windows, self._window, self._geometry.n_layers, layout.n_sums)
        header = meta_bytes(1 + layout.data_bytes // LEAST_PART, *sizes)
        n_bytes = header + layout.data_bytes
        if not ssd.in_one(header):  # first: nothing is evicted for a store that cannot fit
            why = f"a header of {header} bytes must fit in one; raise segment_bytes"
            if header <= ssd.segment_bytes:
                why += ", or, where that was done, disk_bytes: there is no room for one so large"
            return f"segments too small: {why}"
        # Also where it finds room, in segments of a larger limit: later commits would evict it.
        wanted, most = n_bytes + stay_bytes, home.leaving.most_bytes
        if most is not None and wanted > most:
            why = f"{wanted} bytes, with what they hang from, are more than disk_high * disk_bytes"
            return f"disk full: {why} = {most}; raise disk_bytes"
        refused = home.health.refusal(layout.data_bytes)
        if refused:
            return refused
        if not home.budget.allow(n_bytes):
            return "daily write budget"
        reserved = list[Slot]()
        try:
            if self._reserve_each(header, layout.data_bytes, sizes, reserved):
                home.health.found_room(layout.data_bytes)
                if home.budget.is_due:
                    self._committer.save_wear(COMMIT_TIMEOUT_S)
                meta, slot = reserved
                return meta.parts[0], slot
        except (StoreFailed, MediumError) as err:
            home.health.trouble(str(err))
        except BaseException:  # Ctrl-C in the wait: nobody else knows of this space
            self._give_back(n_bytes, *reserved)
            raise
        self._give_back(n_bytes, *reserved)
        # In an empty store no size is to blame. What readers hold up becomes free by itself.
        fits = home.leaving.could_hold(n_bytes + stay_bytes) or not ssd.usage().total
        if ssd.no_room and fits and not home.leaving.held_up(layout.data_bytes):
            home.health.trouble(ssd.no_room, layout.data_bytes)
        refused = home.health.refusal(layout.data_bytes)
        return refused or ": ".join(filter(None, ("disk full", ssd.no_room)))

    def _reserve_each(
        self, header: int, data: int, sizes: tuple[int, int, int, int], reserved: list[Slot]
    ) -> bool:
        """Room for a header and for rows, in `reserved`, where what was found of it is put as it
        is. The header first: it lies in one extent, for scans, and rows take what holes there are.
        """
        reserve, ssd = self._home.leaving.reserve, self._media.ssd
        for n_bytes, least in ((header, header), (data, None)):
            slot = reserve(n_bytes, header + data, least)
            if slot is None:
                return False
            reserved.append(slot)
        meta, slot = reserved
        (at,) = meta.parts
        needed = meta_bytes(len(slot.parts), *sizes)
        rest = at._replace(off=at.off + needed, length=at.length - needed)
        if rest.length < 0:  # rows in very small parts, of which it tells
            larger = reserve(needed, header + data, needed)
            if larger is None:
                return False
            reserved[:] = [meta, larger, slot]
            ssd.free(meta, reserved)
        elif rest.length:
            reserved[:] = [Slot((rest,)), Slot((at._replace(length=needed),)), slot]
            ssd.free(reserved[0], reserved)
        return True

    def _give_back(self, n_bytes: int, *reserved: Slot) -> None:
        """Free what was reserved for a store that came to nothing, and refund its day's writes."""
        for slot in reserved:
            self._media.ssd.free(slot)
        self._home.budget.refund(n_bytes)

    def _finish(
        self, held: list[Held], last: list[Job], jobs: Iterator[Job], writer: Writer
    ) -> None:
        """A writer's with-block has ended: commit what is whole, give back what is not.

        Called again where an exception cut it off: `jobs`, an iterator over `last`, is empty once
        the draft's last job is queued, whichever it was.
        """
        stored, draft = writer.stored, writer.draft
        try:
            if draft is not None:
                done, refused = partial(self._done, draft, held), stored.refused
                job = GiveUp(draft, done) if refused else StoreJob(draft, stored, self._name, done)
                last[:] = [job]
                self._committer.queue(jobs)
                if not refused:
                    return
            else:
                self._home.release(held)
        except StoreFailed as err:  # closed meanwhile: else a waiter would wait for ever
            stored.settle(stored.refused, err)
            raise
        if stored.refused:
            self._counters.add(f"refused/{label_of(stored.refused)}")
        stored.settle(refused=stored.refused)
