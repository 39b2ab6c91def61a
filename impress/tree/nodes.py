"""Nodes of the prefix tree: rows of parallel arrays, each there whole or not at all.

Not objects: a million rows cost some 400 MB less and leave the garbage collector nothing to walk
(measured: a full pass over a million slotted objects stops every thread for 1.28 s, over a list of
a million labels for .03 s, over an array of them not at all).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

NONE: Final = -1
_FIRST_ROWS: Final = 64


class Graft(NamedTuple):
    """What an insertion did: the new node, windows added, and the span whose node was cut."""

    node: int
    added: int
    split: int


class Nodes:
    """What `RadixTree` knows of each node, by its row. Free rows are used again."""

    def __init__(self, size: int) -> None:
        """`size`: bytes of a window's labels."""
        self._size = size
        self._labels = np.empty(_FIRST_ROWS, dtype=object)  # bytes; not a list: see above
        self._parent = array("q")
        self._child = array("q")  # NONE, the first child, or MANY: see radix.py
        self._next = array("q")  # NONE, or the next child in the same list
        self._span = array("q")  # NONE for a root, -2 for a free row
        self._first = array("q")
        self.end = array("q")  # windows from the root to the node's end
        self._n_children = array("q")
        self.used = array("q")  # lease counter at the last lease through the node, or at its birth
        self.hits = array("q")  # leases through the node
        self._columns = (
            self._parent, self._child, self._next, self._span, self._first, self.end,
            self._n_children, self.used, self.hits,
        )  # fmt: skip
        self._free: list[int] = []

    def nodes(self) -> Ids:
        """Ids of all nodes except roots, in no particular order. Pure."""
        return np.flatnonzero(np.array(self._span) >= 0)

    def columns(self, nodes: Ids) -> tuple[Ids, Ids, Ids, Ids]:
        """Span, hits, `used` and windows from the root to the end of these nodes."""
        span, hits, used, end = map(np.array, (self._span, self.hits, self.used, self.end))
        return span[nodes], hits[nodes], used[nodes], end[nodes]

    def of_span(self, span: int) -> list[int]:
        """Nodes that view this span. Vectorised over all nodes."""
        found: list[int] = np.flatnonzero(np.array(self._span) == span).tolist()
        return found

    def of_spans(self, spans: Collection[int]) -> Ids:
        """Nodes that view any of these spans. Vectorised over all nodes."""
        nodes = self.nodes()
        found = self.columns(nodes)[0]
        return nodes[np.isin(found, np.fromiter(spans, dtype=np.int64, count=len(spans)))]

    def _new(self, label: bytes, parent: int, span: int, first: int) -> int:
        """Make a row; if an exception interrupts this, none is made."""
        end = 0 if parent == NONE else self.end[parent] + len(label) // self._size
        if self._free:
            node = self._free[-1]
            self._parent[node], self._child[node], self._next[node] = parent, NONE, NONE
            self._span[node], self._first[node], self._n_children[node] = span, first, 0
            self.used[node] = self.hits[node] = 0
            self._labels[node], self.end[node] = label, end
            del self._free[-1]
            return node
        node = len(self._parent)
        if node == len(self._labels):
            labels = np.empty(node + node // 2, dtype=object)
            labels[:node] = self._labels
            self._labels = labels
        try:
            # One by one: a loop over the columns takes four times as long, at every insertion.
            self._parent.append(parent)
            self._child.append(NONE)
            self._next.append(NONE)
            self._span.append(span)
            self._first.append(first)
            self.end.append(end)
            self._n_children.append(0)
            self.used.append(0)
            self.hits.append(0)
        except BaseException:
            for column in self._columns:
                del column[node:]
            raise
        self._labels[node] = label
        return node

    def _unmake(self, node: int) -> None:
        """Free a new row that nothing points at; NONE: there was none."""
        if node != NONE:
            self._labels[node], self._span[node] = b"", -2
            self._free += [node]
