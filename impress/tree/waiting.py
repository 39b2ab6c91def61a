"""Spans that the tree does not show, or not in full, and that may find their place later: others',
and one's own where what they hang from could not be read.

For most, the labels before them are known. For a *stray* only the key is: what it hangs from could
not be read, or was not there yet when the stray came.

    put ─take─> tried again      stray ─find─> it is known now: it waits, before all others
     └─ too many: the oldest become strays
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import Final

#: Labels before spans that wait; beyond this the oldest are found again only by reading it all.
MOST_BYTES: Final = 64 << 20


class Waiting:
    """Not thread-safe: the catalog's lock guards it."""

    def __init__(self) -> None:
        self._labels: OrderedDict[int, bytes] = OrderedDict()  # span -> labels before it
        self._keys: dict[int, bytes] = {}  # span, a stray or not -> the key that it begins after
        self._n_bytes = 0
        self._strays: dict[bytes, set[int]] = {}  # key -> spans
        self._n_found = 0  # former strays, at the head of what waits
        self.n_chances = 0
        """Grows when one may find a place: a stray was found, a node removed, a span shown."""

    def __len__(self) -> int:
        """How many wait; strays not counted."""
        return len(self._labels)

    def __contains__(self, span: int) -> bool:
        """Whether it waits; a stray does not."""
        return span in self._labels

    def put(self, span: int, before: bytes, key: bytes) -> None:
        """Let a span wait. `before`: the labels before it, which `key` stands for."""
        self.forget(span)
        self._labels[span], self._keys[span] = before, key
        self._n_bytes += len(before)
        while self._n_bytes > MOST_BYTES:
            late, labels = self._labels.popitem(last=False)
            if not labels:  # it begins at the root, takes no memory, and no key would find it
                self._labels[late] = labels
                continue
            self._n_bytes -= len(labels)
            self.stray(late, self._keys[late])

    def stray(self, span: int, key: bytes) -> None:
        """Note a span of which only the key before it is known."""
        self._keys[span] = key
        self._strays.setdefault(key, set()).add(span)

    def find(self, keys: Iterable[bytes], labels: bytes, first: int, size: int) -> None:
        """Find strays that begin after windows of this span: `keys` after each of its windows;
        `labels` from the root, where `first` windows of `size` bytes come before the span."""
        for i, key in enumerate(keys if self._strays else (), first + 1):
            for span in list(self._strays.get(key, ())):
                self.put(span, labels[: i * size], key)
                if span in self._labels:
                    self._labels.move_to_end(span, last=False)
                    self._n_found += 1
                    self.n_chances += 1

    def take(self, n: int, taken: list[tuple[int, bytes]]) -> None:
        """Take out those found and the n that waited longest, with the labels before each.

        Noted in `taken` first, so that the caller can put back what Ctrl-C cuts off.
        """
        n, self._n_found = max(n, self._n_found), 0
        taken += islice(self._labels.items(), n)
        for span, _ in taken:
            self.forget(span)

    def labels(self, spans: Iterable[int]) -> list[tuple[int, bytes]]:
        """(span, labels before it) for those of these spans that wait."""
        return [(span, self._labels[span]) for span in spans if span in self._labels]

    def forget(self, span: int) -> None:
        """It no longer waits, nor is it a stray."""
        self._n_bytes -= len(self._labels.pop(span, b""))
        key = self._keys.pop(span, None)
        if key in self._strays:
            self._strays[key].discard(span)
            if not self._strays[key]:
                del self._strays[key]
