"""A min-heap of numbered items whose keys change all the time; see `MinHeap`."""

from __future__ import annotations

import heapq
from typing import Final

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]
#: Score, tie, item, serial.
Entry = tuple[float, int, int, int]

#: Stale entries are swept out when there are more than twice as many entries as valid ones, and
#: this many more.
_SLACK: Final = 64
_NONE: Final = -1


class MinHeap:
    """Which of the items 0 … capacity - 1 that are in it has the least (score, tie).

    Lazy, so that whole arrays of items come, go and rise without a Python loop. An item has at
    most one valid entry in the heap, filed under a key that the item once had and that is never
    above its key now: a fall files a new entry, a rise or a departure only changes the arrays, and
    the entry is put right when it comes to the top. It stays valid while its item is out: most come
    back. Not thread-safe.
    """

    def __init__(self, capacity: int) -> None:
        self._in = np.zeros(capacity, dtype=bool)
        self._score = np.zeros(capacity)
        self._tie = np.zeros(capacity, dtype=np.int64)
        self._filed = np.full(capacity, _NONE, dtype=np.int64)  # serial of the valid entry
        self._filed_score = np.zeros(capacity)
        self._filed_tie = np.zeros(capacity, dtype=np.int64)
        self._entries: list[Entry] = []
        self._serial = 0
        self._n = 0
        self._n_valid = 0  # entries; roughly, after an exception: it only says when to sweep

    def __len__(self) -> int:
        return self._n

    def items(self) -> Ids:
        """Those in it, ascending."""
        return np.flatnonzero(self._in)

    def put(self, items: Ids, scores: Scores | float, ties: Ids) -> None:
        """Take items in, or give new keys to those that are in. Each at most once."""
        self._score[items] = scores
        self._tie[items] = ties
        score, filed = self._score[items], self._filed_score[items]
        lower = (score < filed) | ((score == filed) & (self._tie[items] < self._filed_tie[items]))
        for item in items[lower | (self._filed[items] == _NONE)].tolist():
            self._refile(item)
        n_new = len(items) - int(self._in[items].sum())
        self._in[items] = True  # no signal comes between
        self._n += n_new
        if len(self._entries) > 2 * self._n_valid + _SLACK:
            self._sweep()

    def discard(self, items: Ids) -> None:
        """Take items out, where they are in."""
        self._n -= int(self._in[items].sum())
        self._in[items] = False

    def take(self, n: int, below: Scores | None = None) -> Ids:
        """Take out and return the n least (fewer when there are not so many), in order; up to the
        first whose score is not below its number in `below`."""
        taken: list[int] = []
        most = [] if below is None else below.tolist()
        while len(taken) < n and self._settle():
            score, _, item, _ = self._entries[0]
            if below is not None and score >= most[len(taken)]:
                break
            self._filed[item] = _NONE  # first: an item is never filed without its entry
            self._n_valid -= 1
            self._in[item] = False
            self._n -= 1
            taken.append(heapq.heappop(self._entries)[2])
        return np.array(taken, dtype=np.int64)

    def check(self) -> None:
        """Assert that every item can be found, and not too late."""
        assert self._n == self._in.sum(), "heap: items miscounted"
        valid = {e[2]: e for e in self._entries if e[3] == self._filed[e[2]]}
        for item in self.items().tolist():
            assert valid[item][:2] <= (self._score[item], self._tie[item]), "heap: filed too high"

    # ---- inside ----------------------------------------------------------------------------

    def _settle(self) -> bool:
        """Put the top right; False when the heap is empty."""
        entries = self._entries
        while entries:
            score, tie, item, serial = entries[0]
            if serial != self._filed[item]:
                heapq.heappop(entries)
            elif not self._in[item]:
                self._filed[item] = _NONE
                self._n_valid -= 1
            elif (self._score[item], self._tie[item]) != (score, tie):
                self._refile(item)
            else:
                return True
        return False

    def _refile(self, item: int) -> None:
        """File a valid entry of the item as it is now; the one before is stale."""
        score, tie = float(self._score[item]), int(self._tie[item])
        serial = self._serial + 1
        heapq.heappush(self._entries, (score, tie, item, serial))  # first: there may be no memory
        self._serial = serial
        self._n_valid += self._filed[item] == _NONE
        self._filed[item] = self._serial  # no signal comes between this and the next
        self._filed_score[item], self._filed_tie[item] = score, tie

    def _sweep(self) -> None:
        """Drop the stale ones, but not those of items that are out: while a request has most of a
        cache pinned, each of its layers that came back would be filed again, chunk by chunk."""
        items = np.flatnonzero(self._filed != _NONE)
        score, tie = self._filed_score[items], self._filed_tie[items]
        order = np.lexsort((items, tie, score))  # ascending, they are a heap
        columns = (column[order].tolist() for column in (score, tie, items, self._filed[items]))
        entries: list[Entry] = list(zip(*columns, strict=True))
        n_valid = len(entries)
        self._entries, self._n_valid = entries, n_valid
