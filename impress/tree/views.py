"""How many nodes view each span, and how many of its windows no node views: the tree's accounts.

add ─> retired ─view─> in the tree ─last unview─> retired ─forget─> unknown
                       └─ view, split: one node more; unview: one less, and its windows are dead
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from impress.tree.nodes import NONE, Graft
from impress.tree.radix import RadixTree, View


class Views:
    """As a collection: the spans in the tree. Not thread-safe: the catalog's lock guards it.

    Told of every change to a node, it knows what a walk over all of them would find. Where an
    exception (Ctrl-C, no memory) comes between a change and its account, it takes that walk.
    """

    def __init__(self, length: Callable[[int], int]) -> None:
        """`length`: a span's windows."""
        self._length = length
        self._nodes: dict[int, int] = {}  # span in the tree -> nodes that view it
        self.retired: set[int] = set()  # no node views it; the index may still hold it
        self.dead: dict[int, int] = {}  # span in the tree -> its windows that no node views

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[int]:
        return iter(self._nodes)

    def __contains__(self, span: int) -> bool:
        return span in self._nodes

    def add(self, span: int) -> None:
        """Keep a span from now on: retired until a node views it. Nothing new if one does."""
        if span not in self._nodes:
            self.retired.add(span)

    # ---- nodes and their account, together -------------------------------------------------

    def graft(
        self, tree: RadixTree, above: int, labels: bytes, span: int, start: int, of: int
    ) -> Graft:
        """As `RadixTree.graft`, for a span of `of` windows."""
        try:
            graft = tree.graft(above, labels, span, start)
            if graft.added:
                self.view(span, graft.added, of)
            self.split(graft.split)
            return graft
        except BaseException:
            self._recount(tree, span)
            raise

    def end_at(self, tree: RadixTree, node: int, window: int) -> int:
        """As `RadixTree.end_at`."""
        try:
            end, split = tree.end_at(node, window)
            self.split(split)
            return end
        except BaseException:
            self._recount(tree)
            raise

    def give(self, tree: RadixTree, node: int, by: int, skip: int, of: int) -> bool:
        """As `RadixTree.replace`, by a span of `of` windows; True: that retired the one before."""
        span, _, n_windows = tree.view(node)
        try:
            tree.replace(node, by, skip)
            self.view(by, n_windows, of)
            return self.unview(span, n_windows)
        except BaseException:
            self._recount(tree, span, by)
            raise

    def remove(self, tree: RadixTree, node: int) -> bool:
        """As `RadixTree.remove`; True when that retired its span."""
        span, _, n_windows = tree.view(node)
        try:
            tree.remove(node)
            return self.unview(span, n_windows)
        except BaseException:
            self._recount(tree, span)
            raise

    def _recount(self, tree: RadixTree, *touched: int) -> None:
        known = {*self._nodes, *self.retired, *touched}
        self._nodes, self.retired, self.dead = {}, known, {}
        for span, _, n_windows in map(tree.view, tree.nodes().tolist()):
            self.view(span, n_windows, self._length(span))

    # ---- the account alone -----------------------------------------------------------------

    def view(self, span: int, n_windows: int, of: int) -> None:
        """One more node views `n_windows` of a span's `of` windows, which none viewed until now."""
        n_dead = self.dead.pop(span, 0)
        if span not in self._nodes:
            self.retired.discard(span)
            self._nodes[span] = 0
            n_dead = of
        self._nodes[span] += 1
        self._note_dead(span, n_dead - n_windows)

    def split(self, span: int) -> None:
        """A node of this span (NONE: of none) was cut into two that view what it viewed."""
        if span != NONE:
            self._nodes[span] += 1

    def unview(self, span: int, n_windows: int) -> bool:
        """A node no longer views these windows of a span; True when that retired the span."""
        self._nodes[span] -= 1
        if self._nodes[span]:
            self._note_dead(span, n_windows)
            return False
        del self._nodes[span]
        self.dead.pop(span, None)
        self.retired.add(span)
        return True

    def forget(self, span: int) -> None:
        """A retired span is no longer kept."""
        self.retired.discard(span)

    def _note_dead(self, span: int, n_windows: int) -> None:
        if n_windows:
            self.dead[span] = self.dead.get(span, 0) + n_windows

    def check(self, views: Iterable[View]) -> None:
        """Assert that nodes with these views account for everything."""
        nodes, viewed = Counter[int](), Counter[int]()
        for span, first, n_windows in views:
            assert first >= 0 and first + n_windows <= self._length(span), "a view beyond its span"
            nodes[span] += 1
            viewed[span] += n_windows
        dead = {span: self._length(span) - n for span, n in viewed.items()}
        assert {span: n for span, n in dead.items() if n} == self.dead, "dead windows miscounted"
        assert dict(nodes) == self._nodes, "views miscounted"
        assert self.retired.isdisjoint(nodes), "retired, and in the tree"
