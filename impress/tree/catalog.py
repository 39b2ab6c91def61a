"""Metadata of a store under one short lock: the tree, its spans, who holds them.

Decides nothing about media and does no I/O; every method returns soon.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from impress.spans.format import SpanRecord, decode_index, encode_index, place_of, split_index
from impress.tree.eviction import Dead, Score, least
from impress.tree.places import Places, Short, split_all
from impress.tree.radix import Match, RadixTree, View
from impress.tree.trace import Branch, Trace, path_of, traces, walk
from impress.tree.views import Views
from impress.types import Prefix

#: Takes spans out of a catalog, and notes each in the list that it is given.
Leave = Callable[[list[SpanRecord]], None]


@dataclass(frozen=True, slots=True)
class Held:
    """A pinned run of a span's windows, [first, first + count), on a lease."""

    record: SpanRecord
    first: int
    count: int


class Catalog:
    """Thread-safe. A span lives while a node views it or a holder pins it."""

    def __init__(self, window: int, own: range) -> None:
        """`own`: ids of the spans that may be evicted."""
        self.lock = threading.Lock()
        self.own = own
        self.window = window
        self._tree = RadixTree(4 * window)
        self._kept: dict[int, bytes] = {}  # span -> index value without labels
        self._views = Views(lambda span: self._record(span).n_windows)
        self._pins: dict[int, int] = {}
        self._heirs: dict[int, int] = {}  # span replaced while pinned -> the new one, pinned for it
        self._gone: set[int] = set()  # retired, its index value deleted: reclaim when unpinned
        self._tick = 0

    # ---- a request ------------------------------------------------------------------------

    @property
    def tick(self) -> int:
        """Leases so far."""
        return self._tick

    def lookup(self, root: bytes, labels: bytes) -> int:
        """How many windows of this prefix are stored. Pure."""
        with self.lock:
            return self._tree.match(root, labels).n_windows

    def hold(self, root: bytes, labels: bytes, *, count: bool) -> list[Held]:
        """Match and pin, in prefix order. `count`: it counts as a use, for heat and eviction."""
        held: list[Held] = []
        try:
            with self.lock:
                match = self._tree.match(root, labels)
                if count:
                    self._tick += 1
                    self._tree.touch(match, self._tick)
                for view in self._tree.views(match):
                    if held and held[-1].record.span_id == view.span:  # cut: one read takes both
                        held[-1] = replace(held[-1], count=held[-1].count + view.n_windows)
                        continue
                    one = Held(self._record(view.span), view.first, view.n_windows)
                    self._pins[view.span] = self._pins.get(view.span, 0) + 1
                    held += [one]  # no signal comes between: signals are looked for after calls
            return held
        except BaseException:
            self.release(held)
            raise

    def release(self, held: list[Held], keep: int = 0) -> bool:
        """Unpin all but the first `keep`, which stay in the list; returns whether space may be
        reclaimed now. If an exception cuts this off, the next call with this list does the rest."""
        with self.lock:
            while len(held) > keep:
                self._unpin(held[-1].record.span_id)
                del held[-1]  # no signal comes between
            while free := [span for span in self._heirs if span not in self._pins]:
                self._unpin(self._heirs[free[0]])
                del self._heirs[free[0]]
            return not self._gone <= self._pins.keys()

    def unheld(self, free: list[SpanRecord]) -> None:
        """Spans out of tree and index that nobody holds any more: the caller reclaims their space.
        Noted in `free` one by one; those an exception cuts off are left for the next call."""
        with self.lock:
            for span in self._gone - self._pins.keys():
                self._forget(span, free)

    # ---- a commit -------------------------------------------------------------------------

    def publish(self, record: SpanRecord, prefix: bytes) -> int:
        """Make a READY span visible; returns the windows it added to the tree.

        `prefix`: labels from the root to the span's end. 0 when all of it is stored already, -1
        when its ancestors have left the tree meanwhile: then the span is retired.
        """
        with self.lock:
            self._keep(record.span_id, split_index(encode_index(record))[0])
            added = self._show(record, prefix)
            if added < record.n_windows:
                for node in self._claim(record, self._tree.match(record.root, prefix)):
                    self._tree.used[node] = self._tick
                    added += self._tree.view(node).n_windows
            if added:
                return added
            is_stored = self._tree.match(record.root, prefix).n_windows >= record.end_window
            return 0 if is_stored else -1

    def evict(self, n_bytes: int, score: Score, spare: Iterable[int] = ()) -> list[int]:
        """Take out leaves of least score until spans of n_bytes are retired; returns their ids.
        Never those of a span that is held or spared. The lock is released between batches."""
        retired, progress = list[int](), True
        while n_bytes > 0 and progress:
            with self.lock:
                progress = False
                for leaf in least(self._tree, {*self._pins, *spare}, score, own=self.own):
                    progress = True
                    span = self._tree.view(leaf).span
                    if self._remove(leaf):
                        retired.append(span)
                        n_bytes -= self._record(span).owned_bytes
                    if n_bytes <= 0:
                        break
        return retired

    def deleted(self, spans: Iterable[int], free: list[SpanRecord]) -> None:
        """The index values of `spans` are gone for good. Takes out those nobody holds: `unheld`."""
        with self.lock:
            for span in spans:
                if span not in self._kept:
                    continue  # damaged: it never had space of its own here
                self._gone.add(span)
                if span not in self._pins:
                    self._forget(span, free)

    def roots(self) -> set[bytes]:
        """Root keys that have something in the tree."""
        with self.lock:
            return {*self._tree.roots}

    def bare_roots(self, spans: Iterable[int]) -> set[bytes]:
        """Of these retired spans' root keys, those with nothing in the tree any more."""
        with self.lock:
            roots = {place_of(self._kept[span])[1] for span in spans if span in self._kept}
            return roots - self._tree.roots.keys()

    def let_go(self, free: list[SpanRecord]) -> None:
        """At the end: take out own spans that left the index, held or not, to be reclaimed."""
        with self.lock:
            for span in [span for span in self._gone if span in self.own]:
                self._forget(span, free)

    def pinned_bytes(self) -> int:
        """Bytes of own spans that somebody holds, in the tree or out of it."""
        held = self._decoded(lambda: (span for span in self._pins if span in self.own))
        return sum(record.owned_bytes for record in held)

    # ---- a repack -------------------------------------------------------------------------

    def hold_span(self, span: int, held: list[Held]) -> list[View]:
        """Pin all of a span in the tree and note it in `held`; returns how nodes view it. []: it is
        not there, and nothing is pinned."""
        with self.lock:
            if span not in self._views:
                return []
            one = Held(record := self._record(span), 0, record.n_windows)
            self._pins[span] = self._pins.get(span, 0) + 1
            held += [one]  # no signal comes between
            return [self._tree.view(node) for node in self._tree.of_span(span)]

    def heat_of(self, span: int) -> tuple[int, int] | None:
        """(leases, lease counter at the last) of its most leased node; None: not in the tree."""
        with self.lock:
            nodes = self._tree.of_span(span)
            return max(((self._tree.hits[n], self._tree.used[n]) for n in nodes), default=None)

    def replace(self, old: int, record: SpanRecord) -> bool:
        """Make nodes that view `old` view this READY span of all their windows; retires old.

        Holders of old keep its bytes, and keep the new span from eviction, until they release it.
        False when old has left the tree: then the new one is retired.
        """
        new = record.span_id
        with self.lock:
            self._keep(new, split_index(encode_index(record))[0])
            nodes = self._tree.of_span(old)
            if not nodes:
                return False
            skip = record.first_window - place_of(self._kept[old])[0]
            for node in nodes:
                self._give(node, record, skip)
            if old in self._pins:
                self._heirs[old] = new
                self._pins[new] = self._pins.get(new, 0) + 1
            return True

    # ---- opening --------------------------------------------------------------------------

    def load(
        self, values: Iterable[tuple[int, bytes]], heat: dict[int, tuple[int, int]]
    ) -> tuple[list[int], list[int]]:
        """Fill an empty catalog from index values in id order.

        Returns ids of the spans that added nothing (retired), and of damaged ones (passed over).
        Spans hang from keys: where a span begins after a window, that window's place is noted
        when its own span is grafted. So only what really overlaps is compared. Ids only grow, so
        a span comes after those it hangs from; one that does not is left to the end. (By id, not
        by depth, so that a path's nodes lie near each other in memory.)
        """
        self._kept, labels, damaged = split_all(values, self.window)
        early, retired = list[tuple[int, int, bytes]](), list[int]()
        with self.lock:
            places = Places(self._kept.values())
            for span, own in zip(self._kept, labels, strict=True):
                first, _, before, _ = place_of(self._kept[span])
                if first and before not in places.of:
                    early.append((first, span, own))
                elif not self._replant(span, own, places, heat):
                    retired.append(span)
            for _, span, own in sorted(early):
                if not self._replant(span, own, places, heat):
                    retired.append(span)
            self._share(places.short, heat)  # last: places refer to the views before it
        return [span for span in retired if span not in self._views], damaged

    def _replant(
        self, span: int, labels: bytes, places: Places, heat: dict[int, tuple[int, int]]
    ) -> bool:
        """Hang a loaded span where it belongs; False when it adds nothing or can hang nowhere."""
        first, root, before, after = place_of(self._kept[span])
        self._views.add(span)
        if not first:
            above = self._tree.root(root)
        elif before in places.of:
            above = self._views.end_at(self._tree, *places.of[before])
        else:
            return False
        n_windows = len(labels) // (4 * self.window)
        graft = self._views.graft(self._tree, above, labels, span, 0, n_windows)
        if graft.added < n_windows:
            places.short.append((above, span, labels))
        if not graft.added:
            if places.lacks(after):  # spans that follow it hang from where its end lies
                match = self._tree.match_below(above, labels)
                last = self._tree.view(match.nodes[-1]).first + match.last_count - 1
                places.of[after] = match.nodes[-1], last
            return False
        if span in heat:
            self._warm(graft.node, heat[span])
        places.note(graft.node, before, labels, after, self.window)
        return True

    def _share(self, short: list[Short], heat: dict[int, tuple[int, int]]) -> None:
        """Hook for loaded spans whose windows other spans have too. `short`: see Places."""

    def _warm(self, node: int, heat: tuple[int, int]) -> None:
        self._tree.hits[node], self._tree.used[node] = heat
        self._tick = max(self._tick, heat[1])

    # ---- looking --------------------------------------------------------------------------

    def heat(self, since: int = -1) -> dict[int, tuple[int, int]]:
        """Own span -> (leases, lease counter at the last) of its most leased node; leased ones
        only."""
        with self.lock:
            rows = self._tree.leased(since)
        return {span: (hits, used) for span, hits, used in rows if span in self.own}

    def hottest(self, n: int) -> list[Prefix]:
        """The n most leased leaves, as paths."""
        with self.lock:
            leaves = self._tree.hottest(n)
            return [path_of(self._tree, leaf, 4 * self.window) for leaf in leaves.tolist()]

    def traces(self, roots: Iterable[bytes], labels: bytes) -> dict[bytes, Trace]:
        """How far a prefix matches, and what is stored where it stops. Pins and counts nothing."""
        with self.lock:
            return traces(self._tree, roots, labels, 4 * self.window, self._tick)

    def walk(self) -> list[Branch]:
        """Every node, parents before children, for printing a tree."""
        with self.lock:
            return walk(self._tree)

    def records(self) -> list[SpanRecord]:
        """Every span in the tree."""
        return self._decoded(lambda: self._views)

    def all_records(self) -> list[SpanRecord]:
        """Own spans that still own space: in the tree, or retired and not yet reclaimed."""
        return self._decoded(lambda: (span for span in self._kept if span in self.own))

    def retired_records(self, spans: Iterable[int]) -> list[SpanRecord]:
        """Those of these spans that are not reclaimed yet."""
        return self._decoded(lambda: (span for span in spans if span in self._kept))

    def counts(self) -> dict[str, int]:
        with self.lock:
            return {
                "spans": len(self._views),
                "nodes": self._tree.n_nodes,
                "windows": self._tree.n_windows,
                "pinned_spans": len(self._pins),
                "retired_spans": len(self._views.retired),
            }

    def dead(self) -> list[Dead]:
        """What spans in the tree own for windows no longer in it: kept for their other windows."""
        with self.lock:
            rows = [(span, self._kept[span], n) for span, n in self._views.dead.items()]
        return [Dead.of(decode_index(span, kept), n) for span, kept, n in rows]

    def check(self) -> None:
        """Assert that tree, views, pins and retirements account for every span."""
        with self.lock:
            self._tree.check()
            views = map(self._tree.view, self._tree.nodes().tolist())
            self._views.check(views)
            retired = self._views.retired
            assert set(self._kept) == {*self._views, *retired}, "a span is nobody's"
            assert self._gone <= retired, "reclaimable but not retired"
            assert set(self._pins) <= set(self._kept), "a pinned span is gone"
            assert set(self._heirs) <= set(self._pins) & retired, "an heir too early"
            assert set(self._heirs.values()) <= set(self._pins), "an heir is not kept"

    # ---- inside ---------------------------------------------------------------------------

    def _unpin(self, span: int) -> None:
        left = self._pins[span] - 1
        if left:
            self._pins[span] = left
        else:
            del self._pins[span]

    def _decoded(self, spans: Callable[[], Iterable[int]]) -> list[SpanRecord]:
        """Copied under the lock and decoded without it: for 100,000 that takes half a second."""
        with self.lock:
            rows = [(span, self._kept[span]) for span in spans()]
        return [decode_index(span, kept) for span, kept in rows]

    def _record(self, span: int) -> SpanRecord:
        return decode_index(span, self._kept[span])

    def _keep(self, span: int, kept: bytes) -> None:
        """A span owns space from now on; `kept`: its index value without labels."""
        self._kept[span] = kept
        self._views.add(span)

    def _show(self, record: SpanRecord, prefix: bytes) -> int:
        """Hang the part of a span not stored yet into the tree; returns the windows this added."""
        if record.first_window and record.root not in self._tree.roots:
            return 0  # its ancestors are gone: a root made for it would stay, and so would its name
        above = self._tree.root(record.root)
        first, n_windows = record.first_window, record.n_windows
        graft = self._views.graft(self._tree, above, prefix, record.span_id, first, n_windows)
        if graft.added:
            self._tree.used[graft.node] = self._tick  # new is not the same as never wanted
        return graft.added

    def _claim(self, record: SpanRecord, match: Match) -> list[int]:
        """Nodes on the way to a span's end that now view it instead of what they viewed."""
        return []

    def _give(self, node: int, record: SpanRecord, skip: int) -> bool:
        """Make a node view this span, which lacks the first `skip` windows of the one it viewed;
        True when that retired the one it viewed."""
        return self._views.give(self._tree, node, record.span_id, skip, record.n_windows)

    def _remove(self, node: int) -> bool:
        """Take a leaf out; True when that retired its span."""
        return self._views.remove(self._tree, node)

    def _forget(self, span: int, free: list[SpanRecord]) -> None:
        if span in self._kept:  # else an exception cut this off before
            record = self._record(span)
            del self._kept[span]
            free += [record]  # no signal comes between
        self._views.forget(span)
        self._gone.discard(span)
