"""One tree of several shards: a process's own spans, and those that others wrote and it follows.

A prefix may go on from one span to another, whoever wrote them. For windows that several processes
stored, nodes view this one's own copy: what it stored depends on nobody else's. It evicts, purges
and rewrites only its own spans. Another's leaves the tree once its writer has deleted it; others'
with the same windows (a repacked copy, one stored at the same time) take its place first. If none
does, what hung from it goes: own spans are orphans, to be deleted; others' wait for another place.

    put ─admit─> in the tree ─withdraw─> out, what hung below: orphans (own), waiting (others')
         └─ its end is here already, or its ancestors are not: it waits, even where nodes view a
            part of it; `retry` when the tree has changed
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from impress.blockhash import chain
from impress.errors import FormatError, StoreFailed
from impress.spans.format import SpanRecord, decode_index, extents_of, place_of, split_index
from impress.tree.catalog import Catalog
from impress.tree.eviction import BATCH, Dead, Score, crowned
from impress.tree.places import Short
from impress.tree.radix import Match, Walker
from impress.tree.waiting import Waiting
from tiers.base import Extent


class MergedCatalog(Catalog):
    """`own`: ids of the spans this process writes."""

    def __init__(self, window: int, own: range) -> None:
        super().__init__(window, own)
        self.waiting = Waiting()  # under the lock, except `n_chances`
        self._unplaced: set[int] = set()  # own spans to be kept, though they hang from nothing

    # ---- following -------------------------------------------------------------------------

    def publish(self, record: SpanRecord, prefix: bytes) -> int:
        added = super().publish(record, prefix)
        with self.lock:
            self._find(record, prefix)
            if added > 0 and self.waiting:  # it may be what they hang from
                self.waiting.n_chances += 1
        return added

    def knows(self, span: int, value: bytes | None = None) -> bool:
        """Whether it still owns space (by this index value), as far as this process followed."""
        with self.lock:
            kept = self._kept.get(span)
        return kept is not None and (value is None or value.startswith(kept))

    def admit(self, span: int, value: bytes, before: bytes, gone: Collection[int] = ()) -> bool:
        """Show another's span, or one of one's own that was unplaced. `before`: the labels before
        it. False: it waits. Raises FormatError.

        It waits where its last window is stored in another span (it may be wanted when that goes),
        or where its ancestors are not here. It takes the places of those spans that are `gone`.
        """
        kept, labels = split_index(value, self.window)
        record, prefix = decode_index(span, kept, labels), before + labels
        with self.lock:
            if span in self.own and span not in self._unplaced:
                return True  # evicted, or purged, a moment ago
            self._keep(span, kept)
            self._find(record, prefix)
            self._show(record, prefix)  # the rest of it, where nodes view a part already
            if gone:
                on_the_way = self._tree.match(record.root, prefix)
                self._inherit(record, on_the_way, lambda other: other in gone)
            match = self._tree.match(record.root, prefix)
            if span in self.own:
                self._claim(record, match)
            if span in self.own and span in self._views:
                self._unplaced.discard(span)
                return True
            whole = match.n_windows == record.end_window
            if whole and self._tree.view(match.nodes[-1]).span == span:
                return True
            self._wait(span, before)
            return False

    def admit_stray(self, span: int, value: bytes) -> None:
        """Another's span for which no place is known. Raises FormatError."""
        kept, _ = split_index(value, self.window)
        with self.lock:
            self._keep(span, kept)
            self._stray(span)

    def _stray(self, span: int) -> None:
        self.waiting.stray(span, place_of(self._kept[span])[2])

    def _find(self, record: SpanRecord, prefix: bytes) -> None:
        """Find strays that begin after windows of this span. `prefix`: labels from the root to its
        end."""
        size, first = 4 * self.window, record.first_window
        keys = chain(record.key_before, prefix[first * size :], self.window)
        self.waiting.find(keys, prefix, first, size)

    def _inherit(
        self, record: SpanRecord, match: Match, takes_from: Callable[[int], bool]
    ) -> list[int]:
        """Nodes on the way to a span's end that view one it `takes_from` are made to view it, as
        far as it reaches, and cut where needed; what hangs from them stays. Returns those nodes."""
        tree, given = self._tree, []
        for node in match.nodes:
            span, first, n_windows = tree.view(node)
            start = tree.end[node] - n_windows
            high = start + (match.last_count if node == match.nodes[-1] else n_windows)
            low = max(start, record.first_window)
            if low >= high or not takes_from(span):
                continue
            if low > start:  # `node` is the lower part from here on
                self._views.end_at(tree, node, first + low - start - 1)
            upper = self._views.end_at(tree, node, first + high - start - 1)
            self._give_all(upper, record)
            given.append(upper)
        return given

    def _claim(self, record: SpanRecord, match: Match) -> list[int]:
        """For windows others' spans have too, nodes view one's own; the others' wait. Else each
        of two processes could take its own for superfluous, or lose them when the other evicts."""
        theirs = {}
        for node in match.nodes:
            span = self._tree.view(node).span
            if span not in self.own and self._tree.end[node] > record.first_window:
                theirs[span] = self._before(node)
        given = self._inherit(record, match, lambda span: span in theirs)
        for span, before in theirs.items():
            self._wait(span, before)
        return given

    def _share(self, short: list[Short], heat: dict[int, tuple[int, int]]) -> None:
        """Others' spans that another one covers wait; those that hang from nothing are strays."""
        for above, span, labels in short:
            if span in self.own:
                match = self._tree.match_below(above, labels)
                for node in self._claim(self._record(span), match):
                    self._warm(node, heat.get(span, (0, 0)))
        for above, span, labels in short:
            last = self._tree.match_below(above, labels).nodes[-1]
            if span not in self.own and self._tree.view(last).span != span:
                self._wait(span, b"".join(map(self._tree.label, self._tree.path(above))))
        for span in self._views.retired:
            if span not in self.own and span not in self.waiting:
                self._stray(span)

    def _give_all(self, node: int, record: SpanRecord) -> bool:
        """As `_give`, to a span that has all of the node's windows."""
        _, first, n_windows = self._tree.view(node)
        start = self._tree.end[node] - n_windows
        return self._give(node, record, first - (start - record.first_window))

    def withdraw(self, spans: Collection[int], gone: list[int] | None = None) -> list[int]:
        """Take spans, held or not, out of the tree; where one has no heir, all that hangs from it.

        Returns own spans that are in no node any more, each added to `gone` as it goes.
        """
        gone = [] if gone is None else gone
        with self.lock:
            children = self._tree.walker()
            theirs = {s for s in self._views.dead if s not in self.own and s not in spans}
            for node in self._tree.of_spans(spans).tolist():
                span = self._tree.view(node).span
                if span not in spans:
                    continue  # it went with an earlier subtree
                heir = self._heir(node, theirs, children)
                if heir is None:
                    self._cut(node, spans, children, gone)
                elif self._give_all(node, heir) and span in self.own:
                    gone.append(span)
        return gone

    def _heir(self, node: int, theirs: Collection[int], children: Walker) -> SpanRecord | None:
        """A span of `theirs` (others' with dead windows) below a node, if it has the node's windows
        too. (Where one's own span has such windows, nodes view it already.)"""
        start = self._tree.end[self._tree.parent(node)]
        for below in self._tree.subtree(node, children) if theirs else ():
            span = self._tree.view(below).span
            if span in theirs and place_of(self._kept[span])[0] <= start:
                return self._record(span)
        return None

    def n_heirs(self, spans: Collection[int]) -> int:
        """How many of others' wait and may be heirs; 0 if none of one's own hangs from these."""
        with self.lock:
            nodes = self._tree.of_spans(spans).tolist() if self.waiting else []
            children = self._tree.walker()
            below = (n for node in nodes for n in self._tree.subtree(node, children))
            mine = any(self._tree.view(node).span in self.own for node in below)
            return len(self.waiting) if mine else 0

    def _cut(self, node: int, spans: Collection[int], children: Walker, gone: list[int]) -> None:
        """Remove a subtree; adds one's own spans retired by that to `gone`."""
        for below in self._tree.subtree(node, children):
            span = self._let_wait(below, spans)
            if self._remove(below) and span in self.own:
                gone.append(span)

    def _let_wait(self, node: int, spans: Collection[int]) -> int:
        """The span of a node that is to go; if it is another's and not one of `spans`, it waits,
        even where a node further up still views it."""
        span = self._tree.view(node).span
        if span not in spans and span not in self.own and span not in self.waiting:
            self._wait(span, self._before(node))
        return span

    def before(self, spans: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Those of these spans that are in the tree or wait, with labels from the root to each."""
        wanted = set(spans)
        with self.lock:
            found = [(self._tree.view(n).span, n) for n in self._tree.of_spans(wanted).tolist()]
            waiting = self.waiting.labels(wanted)
        yield from waiting
        for span, node in dict(found).items():
            with self.lock:
                if self._tree.view(node).span == span:
                    yield span, self._before(node)

    def labels_to(self, span: int, window: int) -> bytes | None:
        """Labels from the root to a window at or before a span's first one in the tree; None: the
        span is not in the tree."""
        with self.lock:
            nodes = self._tree.of_span(span)
            if not nodes:
                return None
            first = min(nodes, key=lambda node: self._tree.view(node).first)
            labels = b"".join(self._tree.label(above) for above in self._tree.path(first)[:-1])
        return labels[: window * 4 * self.window]

    def _remove(self, node: int) -> bool:
        self.waiting.n_chances += 1
        return super()._remove(node)

    def _before(self, node: int) -> bytes:
        """Labels from the root to the first window of a node's span."""
        labels = b"".join(self._tree.label(above) for above in self._tree.path(node)[:-1])
        view = self._tree.view(node)
        return labels[: len(labels) - view.first * 4 * self.window]

    def retry(
        self, n: int, value_of: Callable[[int], bytes | None], gone: Collection[int] = ()
    ) -> int:
        """Try the n spans that waited longest again, and strays that were found; returns how many
        are shown now. `gone`: see admit. Raises StoreFailed; then those not tried wait on."""
        shown, tried, todo, left = 0, 0, list[tuple[int, bytes]](), list[tuple[int, bytes]]()
        try:
            with self.lock:
                self.waiting.take(n, todo)
            for span, before in todo:
                value = None
                try:
                    value = value_of(span)
                    if value is not None and self.knows(span, value):
                        shown += self.admit(span, value, before, gone)
                except FormatError:  # in the index: it waits on; in the value: nobody finds it
                    left += [(span, before)] * (value is None)
                tried += 1
        finally:
            with self.lock:
                self.waiting.n_chances += shown
                for span, before in left + todo[tried:]:
                    if span in self._kept:
                        self._wait(span, before)
        return shown

    def _wait(self, span: int, before: bytes) -> None:
        self.waiting.put(span, before, place_of(self._kept[span])[2])

    def quarantine(self, span: int) -> list[int]:
        """Take everything at and below a bad span out of the tree; returns spans this retired.
        Others' that hang from it wait for one that fills its place, but the bad one does not."""
        retired = []
        with self.lock:
            children = self._tree.walker()
            for node in self._tree.of_span(span):
                if self._tree.view(node).span != span:
                    continue  # it went with an earlier subtree
                for below in self._tree.subtree(node, children):
                    gone = self._let_wait(below, [span])
                    if self._remove(below):
                        retired.append(gone)
            self.waiting.forget(span)
        return retired

    def forget_waiting(self, spans: Iterable[int]) -> None:
        with self.lock:
            for span in spans:
                self.waiting.forget(span)

    def held_after(self, spans: range) -> list[int]:
        """Those of these spans that their writer has taken out and that are still held here."""
        with self.lock:
            return [span for span in self._gone if span in spans]

    def known(self, spans: range) -> dict[int, bytes | None]:
        """Those of these spans that it `knows` -> index value without labels; None: it is gone."""
        with self.lock:
            return {s: None if s in self._gone else v for s, v in self._kept.items() if s in spans}

    # ---- one's own -------------------------------------------------------------------------

    def evict(self, n_bytes: int, score: Score, spare: Iterable[int] = ()) -> list[int]:
        """As `Catalog.evict`, for own spans; where only others' hang from one, they go too."""
        retired = super().evict(n_bytes, score, spare := {*spare})
        n_bytes -= sum(r.owned_bytes for r in self.retired_records(retired))
        if n_bytes <= 0 or not len(self.own):
            return retired
        with self.lock:
            children = self._tree.walker()
            held = {*self._pins, *spare}
            for node in crowned(self._tree, held, score, self.own, children):
                if n_bytes <= 0:
                    break
                self._cut(node, (), children, mine := list[int]())
                retired += mine
                n_bytes -= sum(self._record(span).owned_bytes for span in mine)
        return retired

    def keep_unplaced(self, spans: Iterable[int]) -> None:
        """Keep these spans, which `load` retired as what they hang from could not be read: they are
        found when it can be, and by a purge, and are the first to be evicted."""
        with self.lock:
            for span in spans:
                if span in self._kept and span in self.own:
                    self._unplaced.add(span)
                    self._stray(span)

    def evict_unplaced(self, n_bytes: int) -> list[int]:
        """Take out unplaced spans of n_bytes; returns them, to be deleted."""
        gone = []
        with self.lock:
            while n_bytes > 0 and self._unplaced:
                gone.append(span := self._unplaced.pop())
                self.waiting.forget(span)
                n_bytes -= self._record(span).owned_bytes
        return gone

    def purge(self, roots: Collection[bytes]) -> list[int]:
        """Take one's own spans under these root keys out of the tree, held or not; returns them and
        unplaced ones. Raises StoreFailed."""
        gone, before = list[int](), set[int]()
        # In a loop: a repack may put a copy in a span's place after they are listed.
        while spans := {r.span_id for r in self.own_records() if r.root in roots}:
            if spans == before:  # what Ctrl-C cut off left spans without a node
                raise StoreFailed("purge: the tree is torn: open the store again, then purge")
            before, todo = spans, sorted(spans)
            for at in range(0, len(todo), BATCH):  # the lock is released between batches
                gone += self.withdraw({*todo[at : at + BATCH]})
        with self.lock:
            unplaced = {s for s in self._unplaced if place_of(self._kept[s])[1] in roots}
            self._unplaced -= unplaced
            for span in unplaced:
                self.waiting.forget(span)
        return [*gone, *unplaced]

    def retired_bytes(self, spans: Iterable[int] | None = None) -> int:
        """Bytes held until reclaimed by own spans (of these) that are in no node any more; unplaced
        ones stay."""
        with self.lock:
            retired = self._views.retired - self._unplaced
            these = retired if spans is None else retired.intersection(spans)
            return sum(self._record(span).owned_bytes for span in these if span in self.own)

    def untold(self) -> list[int]:
        """One's own spans that are in no node, that nobody holds and that are not yet deleted."""
        with self.lock:
            left = self._views.retired - self._unplaced - self._gone
            return [span for span in left if span in self.own and span not in self._pins]

    def own_records(self) -> list[SpanRecord]:
        """Records of one's own spans in the tree."""
        return self._decoded(lambda: (span for span in self._views if span in self.own))

    def own_dead(self) -> list[Dead]:
        """As `dead`, for one's own spans."""
        return [dead for dead in self.dead() if dead.span in self.own]

    def extents(self, spans: range | None = None) -> tuple[list[Extent], int]:
        """All space that one's own spans, or these, own, and their largest id; 0: none."""
        these = self.own if spans is None else spans
        with self.lock:
            found = {span: kept for span, kept in self._kept.items() if span in these}
        return [e for kept in found.values() for e in extents_of(kept)], max(found, default=0)

    def views_of(self, spans: range) -> dict[int, int]:
        """Those of these spans that are in the tree -> how many of their windows are in it."""
        with self.lock:
            dead, these = self._views.dead, [span for span in self._views if span in spans]
            rows = [(span, self._kept[span], dead.get(span, 0)) for span in these]
        return {span: decode_index(span, kept).n_windows - n for span, kept, n in rows}
