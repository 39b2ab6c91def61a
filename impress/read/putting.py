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
        self._places, self._reads, self._dests = places, reads, dests
        # (plane, its first byte left, its end); found once something is there: reads are on their
        # way to the medium sooner.
        self._left: list[tuple[int, int, int]] | None = None
        self._n_put = 0

    def _by_plane(self) -> list[tuple[int, int, int]]:
        reads, begin, found = self._reads, 0, []
        for i, dest in enumerate(self._dests):
            at, n_bytes = address_of(dest), len(dest)

            def beyond(j: int, at: int = at, n_bytes: int = n_bytes) -> bool:
                return not 0 <= address_of(reads[j].dest) - at < n_bytes

            end = bisect_left(range(len(reads)), True, begin, key=beyond)
            if end > begin:
                first, last = reads[begin].dest, reads[end - 1].dest
                found.append((i, address_of(first) - at, address_of(last) - at + len(last)))
            begin = end
        return found

    def __call__(self, n_bytes: int) -> None:
        """The first n_bytes of the reads, in their order, are there."""
        if (left := self._left) is None:
            left = self._left = self._by_plane()
        room = n_bytes - self._n_put
        self._n_put = n_bytes
        while room:
            i, first, end = left[0]
            until = min(end, first + room)
            self._places.put(i, self._dests[i], first, until)
            room -= until - first
            left[0] = i, until, end
            if until == end:
                del left[0]
