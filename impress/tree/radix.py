"""The radix tree of prefixes: which windows are stored, and in which span each lies.

Knows spans by number only; knows nothing of media.

A node's children are a list linked by `_next`: few, and the first is nearly always the right one.
More than _FEW hang in `_many` under a hash of parent and first window; equal hashes form a list.

    _child[node] → child → child → NONE              _many[hash] → child → NONE

Not thread-safe: the store calls it under its metadata lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import starmap
from operator import setitem
from typing import Final, NamedTuple

import numpy as np

from impress.tree.nodes import NONE, Graft, Ids, Nodes

MANY: Final = -2
#: Children a node may have before they are found by hash: until then a lookup tries each in turn.
_FEW: Final = 4

#: Gives the children of a node: see RadixTree.walker.
Walker = Callable[[int], list[int]]


class View(NamedTuple):
    """Windows [first, first + count) of a span, as one node holds them."""

    span: int
    first: int
    n_windows: int


class Match(NamedTuple):
    """The longest stored prefix of a prompt: its nodes, and windows matched in the last one."""

    nodes: list[int]
    last_count: int
    n_windows: int


class RadixTree(Nodes):
    """Labels are `size` bytes a window; a node's label is those of its windows, end to end."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.roots: dict[bytes, int] = {}
        self._many: dict[int, int] = {}  # _hash -> first child with it
        self.n_nodes = 0  # roots not counted
        self.n_windows = 0

    # ---- reading -------------------------------------------------------------------------

    def match(self, root: bytes, labels: bytes) -> Match:
        """The longest stored prefix. Pure."""
        node = self.roots.get(root, NONE)
        return Match([], 0, 0) if node == NONE else self.match_below(node, labels)

    def match_below(self, node: int, labels: bytes) -> Match:
        """The longest stored prefix of `labels` from a node on. Pure."""
        nodes: list[int] = []
        off, end, size = 0, len(labels), self._size
        child_of, next_of, label_of = self._child, self._next, self._labels
        starts, append = labels.startswith, nodes.append
        while off < end:
            child = child_of[node]
            if child == MANY:
                child = self._many.get(hash((node, labels[off : off + size])), NONE)
                if child != NONE and self._parent[child] != node:  # never another's, whatever broke
                    break
            while child >= 0:
                label = label_of[child]
                if starts(label, off):
                    break
                if len(label) > size and starts(label[:size], off):
                    append(child)
                    count = self._common(label, labels, off)
                    return Match(nodes, count, off // size + count)
                child = next_of[child]
            else:
                break
            append(child)
            node = child
            off += len(label)
        last = len(label_of[nodes[-1]]) // size if nodes else 0
        return Match(nodes, last, off // size)

    def _common(self, label: bytes, labels: bytes, off: int) -> int:
        """Windows of `label` that `labels` continues with from `off`: a binary search."""
        size = self._size
        low, high = 0, min(len(label), len(labels) - off) // size
        while low < high:
            mid = (low + high + 1) // 2
            if labels.startswith(label[: mid * size], off):
                low = mid
            else:
                high = mid - 1
        return low

    def views(self, match: Match) -> list[View]:
        """The windows of spans that a match covers, in order. Pure."""
        views = [self.view(node) for node in match.nodes]
        if views:
            views[-1] = views[-1]._replace(n_windows=match.last_count)
        return views

    def view(self, node: int) -> View:
        """What one node holds. Pure."""
        return View(self._span[node], self._first[node], len(self._labels[node]) // self._size)

    def label(self, node: int) -> bytes:
        """The labels of a node's windows, end to end; for a root, its key."""
        label: bytes = self._labels[node]
        return label

    def parent(self, node: int) -> int:
        return self._parent[node]

    def leaves(self) -> Ids:
        """All nodes without children. Vectorised."""
        return np.flatnonzero((np.array(self._span) >= 0) & (np.array(self._n_children) == 0))

    def is_leaf(self, node: int) -> bool:
        """Whether this node is not a root and has no children."""
        return self._span[node] >= 0 and self._n_children[node] == 0

    def hottest(self, limit: int) -> Ids:
        """At most `limit` leaves, most leased first. Vectorised."""
        leaves = self.leaves()
        return leaves[np.argsort(-np.array(self.hits)[leaves], kind="stable")[:limit]]

    def leased(self, since: int = -1) -> list[tuple[int, int, int]]:
        """(span, hits, used) of every node ever leased, least leased first; or of the nodes of
        spans leased later than `since`. Vectorised."""
        span, hits = np.array(self._span), np.array(self.hits)
        rows = np.flatnonzero((span >= 0) & (hits > 0))
        if since >= 0:
            warmer = np.unique(span[rows[np.array(self.used)[rows] > since]])
            rows = rows[np.isin(span[rows], warmer)]
        rows = rows[np.argsort(hits[rows], kind="stable")]
        return list(zip(*(column.tolist() for column in self.columns(rows)[:3]), strict=True))

    def children(self, node: int) -> list[int]:
        """A node's children. Vectorised over all nodes where there are many."""
        if self._child[node] != MANY:
            return list(self._list(self._child[node]))
        mine = (np.array(self._parent) == node) & (np.array(self._span) >= 0)
        found: list[int] = np.flatnonzero(mine).tolist()
        return found

    def walker(self) -> Walker:
        """`children`, for walks while nodes are only removed: looks at all nodes at most once."""
        looked: list[tuple[Ids, Ids]] = []

        def children(node: int) -> list[int]:
            if self._child[node] != MANY:
                return list(self._list(self._child[node]))
            if not looked:
                looked.append(self._scattered())
            parents, nodes = looked[0]
            low, high = np.searchsorted(parents, (node, node + 1))
            return [child for child in nodes[low:high].tolist() if self._span[child] >= 0]

        return children

    def _scattered(self) -> tuple[Ids, Ids]:
        """All nodes that are found by hash: (their parents, sorted; the nodes)."""
        nodes = self.nodes()
        parents = np.array(self._parent)[nodes]
        by_hash = np.array(self._child)[parents] == MANY
        nodes, parents = nodes[by_hash], parents[by_hash]
        order = np.argsort(parents, kind="stable")
        return parents[order], nodes[order]

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to this one."""
        path = []
        while self._span[node] != NONE:
            path.append(node)
            node = self._parent[node]
        return path[::-1]

    # ---- changing ------------------------------------------------------------------------

    def root(self, key: bytes) -> int:
        """The root node of a key, made if there is none."""
        node = self.roots.get(key, NONE)
        if node == NONE:
            node = self.roots[key] = self._new(key, NONE, NONE, 0)
        return node

    def graft(self, above: int, labels: bytes, span: int, start: int) -> Graft:
        """Hang the part of a span that is not stored yet somewhere below node `above`.

        `labels` continues from the end of `above`; its first `start` windows come before the
        span. Adds nothing if all is stored, if those first windows are not, or if an exception
        (no memory, Ctrl-C) cuts it off.
        """
        match = self.match_below(above, labels)
        if match.n_windows < start or match.n_windows * self._size == len(labels):
            return Graft(NONE, 0, NONE)
        split = NONE
        if match.nodes:
            above = match.nodes[-1]
            if match.last_count * self._size < len(self._labels[above]):
                split = self._span[above]
                above = self._split(above, match.last_count)
        label, node = labels[match.n_windows * self._size :], NONE
        try:
            node = self._new(label, above, span, match.n_windows - start)
            graft = Graft(node, len(label) // self._size, split)
            self._link(above, node)
        except BaseException:
            self._unmake(node)
            raise
        # No signal comes between here and the end: signals are looked for after calls.
        self.n_nodes += 1
        self.n_windows += graft.added
        return graft

    def end_at(self, node: int, window: int) -> tuple[int, int]:
        """The node that ends right after a window of a span, from one at or below that window.

        Cuts where it must; returns (the node, the span that was cut or NONE).
        """
        while self._first[node] > window:
            node = self._parent[node]  # the same span's: a cut leaves the upper part as parent
        count = window - self._first[node] + 1
        if count * self._size == len(self._labels[node]):
            return node, NONE
        return self._split(node, count), self._span[node]

    def touch(self, match: Match, tick: int) -> None:
        """Count a lease through these nodes."""
        used, hits = self.used, self.hits
        for node in match.nodes:
            used[node] = tick
            hits[node] += 1

    def replace(self, node: int, by: int, skip: int) -> None:
        """Make a node view another span, which lacks the first `skip` windows of the one before."""
        self._span[node] = by
        self._first[node] -= skip

    def remove(self, node: int) -> None:
        """Take a leaf out. If Ctrl-C cuts this off, it stays in."""
        assert self._n_children[node] == 0 and self._span[node] >= 0, "only leaves go"
        parent, n_windows = self._parent[node], len(self._labels[node]) // self._size
        self._relink(node, self._next[node])
        # No signal comes from here on: signals are looked for after calls, and as loops turn.
        self._n_children[parent] -= 1
        self.n_windows -= n_windows
        self.n_nodes -= 1
        self._labels[node], self._span[node], self._parent[node] = b"", -2, NONE
        self._free += [node]
        if self._n_children[parent] == 0:
            self._child[parent] = NONE
            if self._span[parent] == NONE:  # a root: there may be one for each user who ever came
                del self.roots[self._labels[parent]]
                self._labels[parent], self._span[parent] = b"", -2
                self._free += [parent]

    def subtree(self, node: int, children: Walker | None = None) -> list[int]:
        """A node and all below it, children before parents: removable in the order given.

        `children`: of a `walker` that serves several such calls.
        """
        found, todo, children = [], [node], children or self.walker()
        while todo:
            found.append(todo.pop())
            todo.extend(children(found[-1]))
        return found[::-1]

    # ---- inside --------------------------------------------------------------------------

    def _hash(self, node: int) -> int:
        return hash((self._parent[node], self._labels[node][: self._size]))

    def _list(self, node: int) -> Iterator[int]:
        """A list of children from one of them on; nothing from NONE."""
        while node != NONE:
            yield node
            node = self._next[node]

    def _link(self, parent: int, node: int) -> None:
        """Hang a new node after its parent's other children. If cut off, it has done nothing."""
        if self._n_children[parent] == _FEW and self._child[parent] != MANY:
            self._scatter(parent)
        if self._child[parent] == MANY:
            key = self._hash(node)
            head = self._many.get(key, NONE)
            if head == NONE:
                self._many[key] = node
        else:
            head = self._child[parent]
            if head == NONE:
                self._child[parent] = node
        if head != NONE:
            *_, last = self._list(head)
            self._next[last] = node
        self._n_children[parent] += 1  # no signal came since it hangs there

    def _scatter(self, parent: int) -> None:
        """Find a node's children by hash from now on. All is looked up before anything changes."""
        few, heads, links = list(self._list(self._child[parent])), dict[int, int](), []
        lasts: dict[int, int] = {}
        for child in few:
            key = self._hash(child)
            head = self._many.get(key, NONE)
            if key in lasts or head != NONE:
                *_, last = self._list(head) if key not in lasts else [lasts[key]]
                links.append((last, child))
            else:
                heads[key] = child
            lasts[key] = child
        links = [*((child, NONE) for child in few), *links]
        todo = [*((self._next, at, to) for at, to in links), (self._child, parent, MANY)]
        changes = starmap(setitem, todo)
        self._many |= heads  # no signal comes from here until after the next call: no loop turns
        deque(changes, maxlen=0)

    def _relink(self, node: int, heir: int) -> None:
        """Make what points at `node` in its list of children point at `heir` (or NONE) instead."""
        parent = self._parent[node]
        many = self._child[parent] == MANY
        key = self._hash(node) if many else 0
        head = self._many[key] if many else self._child[parent]
        if head != node:
            while self._next[head] != node:
                head = self._next[head]
            self._next[head] = heir
        elif not many:
            self._child[parent] = heir
        elif heir == NONE:
            del self._many[key]
        else:
            self._many[key] = heir

    def _split(self, node: int, count: int) -> int:
        """Cut a node after `count` windows: a new upper node takes its place. No span changes."""
        cut = count * self._size
        label, parent, upper = self._labels[node], self._parent[node], NONE
        lower = label[cut:]
        try:
            upper = self._new(label[:cut], parent, self._span[node], self._first[node])
            self.used[upper], self.hits[upper] = self.used[node], self.hits[node]
            self._next[upper] = self._next[node]
            self._relink(node, upper)
        except BaseException:
            self._unmake(upper)
            raise
        # No signal comes between here and the end.
        self._next[node] = NONE
        self._labels[node] = lower
        self._first[node] += count
        self._parent[node] = upper
        self._child[upper] = node
        self._n_children[upper] = 1
        self.n_nodes += 1
        return upper

    def check(self) -> None:
        """Assert that links, counts and labels agree."""
        windows = nodes = 0
        for node, children in self._walk():
            label = self._labels[node]
            assert self._n_children[node] == len(children), f"node {node}: children miscounted"
            firsts = {self._labels[child][: self._size] for child in children}
            assert len(firsts) == len(children), f"node {node}: two children begin alike"
            assert all(self._parent[child] == node for child in children), f"node {node}: orphan"
            for child in children:
                head = self._child[node]
                head = self._many.get(self._hash(child), NONE) if head == MANY else head
                assert child in self._list(head), f"node {child}: cannot be found"
            if self._span[node] != NONE:
                assert label and self._span[node] >= 0, f"node {node}: empty"
                assert len(label) % self._size == 0, f"node {node}: cut inside a window"
                nodes += 1
                windows += (own := len(label) // self._size)
                assert self.end[node] - self.end[self._parent[node]] == own, "an end is off"
        assert (nodes, windows) == (self.n_nodes, self.n_windows), "tree: counts are off"
        assert len(self._parent) == nodes + len(self.roots) + len(self._free), "tree: rows leaked"

    def _walk(self) -> Iterator[tuple[int, list[int]]]:
        children: dict[int, list[int]] = {}
        for node, (parent, span) in enumerate(zip(self._parent, self._span, strict=True)):
            if span >= 0:
                children.setdefault(parent, []).append(node)
        todo = list(self.roots.values())
        for node in todo:  # `todo` grows
            todo += children.get(node, [])
            yield node, children.get(node, [])
