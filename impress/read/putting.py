"""Puts rows of home from the buffer they are read into in their places, while others are read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from impress.read.direct import Direct
from impress.read.whole import Whole
from impress.spans.rows import address_of
from tiers.base import Bytes, Read


class Putting:
    """Puts what one thread has read and verified in its places; called with how much that is."""

    def __init__(
        self, places: Direct | Whole, reads: Sequence[Read], dests: Sequence[Bytes]
    ) -> None:
        """`reads`: plane by plane, each plane's one after the other in its dest."""
        self._places = places
        self._dests = dests
        self._left: list[tuple[int, int, int]] = []  # (plane, its first byte left, its end)
        self._n_put = 0
        begin = 0
        for i, dest in enumerate(dests):
            at, n_bytes = address_of(dest), len(dest)

            def beyond(j: int, at: int = at, n_bytes: int = n_bytes) -> bool:
                return not 0 <= address_of(reads[j].dest) - at < n_bytes

            end = bisect_left(range(len(reads)), True, begin, key=beyond)
            if end > begin:
                first, last = reads[begin].dest, reads[end - 1].dest
                self._left.append((i, address_of(first) - at, address_of(last) - at + len(last)))
            begin = end

    def __call__(self, n_bytes: int) -> None:
        """The first n_bytes of the reads, in their order, are there."""
        room = n_bytes - self._n_put
        self._n_put = n_bytes
        while room:
            i, first, end = self._left[0]
            until = min(end, first + room)
            self._places.put(i, self._dests[i], first, until)
            room -= until - first
            self._left[0] = i, until, end
            if until == end:
                del self._left[0]
