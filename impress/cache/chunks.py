"""Copies of chunks in a fast tier: which are there, and which go when room is needed.

A copy is found by (span, layer, window). Entries are rows of arrays, so a layer's worth of
windows is looked up and pinned without a Python loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from impress.cache.heap import MinHeap
from impress.cache.sums import CopySums
from tiers.base import Bytes, Cache, Extent, Slot, Sums
from tiers.dram import DramTier

Ids = npt.NDArray[np.int64]
Ranks = npt.NDArray[np.float64]
Shares = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
_ABSENT = -1

#: A newcomer's rank (log2 of its score or its uses) must beat what it drives out by this, 9 % of
#: a score: of equals taking turns, the first to come stays until it has not been used for long.
MARGIN: Final = 0.125


class ChunkCache:
    """A byte budget of chunk copies. Thread-safe; eviction is a drop, home always has the bytes.

    The copy of least rank goes first (under `lru` none has a rank), then that of the oldest last
    use. A heap holds exactly the copies that may go: ready, not pinned.
    Entry i is bytes [i·chunk, (i+1)·chunk) of the arena: the pieces of each of `planes`, one
    plane after the other. Filling -> ready -> (pinned while copied out) -> dropped.
    """

    def __init__(
        self,
        budget_bytes: int,
        planes: Mapping[int, int],
        n_layers: int,
        name: str = "dram",
        eviction: str = "lru",
        medium: Callable[[int, str], Cache] = DramTier,
    ) -> None:
        """`planes`: bytes a chunk has in each, by plane number. `eviction`: as in `Config`.

        `medium`: makes the tier of its bytes and name, which is one arena.
        """
        self.planes = tuple(planes)
        sizes = list(planes.values())
        self._offs = {plane: sum(sizes[:i]) for i, plane in enumerate(planes)}
        self.chunk_bytes = sum(sizes)
        self.capacity = budget_bytes // self.chunk_bytes
        self.tier = medium(self.capacity * self.chunk_bytes, name)
        self.by_rank = eviction != "lru"
        self._margin = MARGIN if eviction in ("importance", "lfu") else 0.0
        self.sums = CopySums(self.capacity, planes)
        self._n_layers = n_layers
        self._lock = threading.Lock()
        self._maps: dict[int, Ids] = {}  # span -> [n_layers, n_windows] entry or _ABSENT
        self._n_entries: dict[int, int] = {}  # span -> how many there are
        self._used = np.zeros(self.capacity, dtype=np.int64)  # tick of the last use
        self._pins = np.zeros(self.capacity, dtype=np.int32)
        self._ready = np.zeros(self.capacity, dtype=bool)
        self._rank = np.zeros(self.capacity)
        self._share = np.full(self.capacity, np.nan)  # of important rows; nan: not known
        self._owner = np.full((self.capacity, 3), _ABSENT, dtype=np.int64)
        self._heap = MinHeap(self.capacity)
        self._tick = 0
        self.evictions = 0

    def pin(
        self, span: int, layer: int, first: int, count: int, used: Mask | None = None,
        noted: list[Ids] | None = None,
    ) -> Ids:  # fmt: skip
        """Entries of windows [first, first + count), _ABSENT (-1) where there is no copy.

        Those found are pinned until `unpin`; those of `used` [count] (None: all) count as used.
        `noted`: the array returned is added as it is pinned, so that Ctrl-C leaves no pins that
        nobody knows of.
        """
        with self._lock:
            table = self._maps.get(span)
            if table is None:
                found = np.full(count, _ABSENT, dtype=np.int64)
                if noted is not None:
                    noted += [found]
                return found
            found = table[layer, first : first + count].copy()
            there = found[found >= 0]
            found[found >= 0] = np.where(self._ready[there], there, _ABSENT)
            there = found[found >= 0]
            self._tick += 1
            self._used[there if used is None else found[used & (found >= 0)]] = self._tick
            self._pins[there] += 1
            if noted is not None:  # no signal comes between: they are looked for after calls
                noted += [found]
            self._heap.discard(there)
            return found

    def unpin(self, entries: Ids, which: Mask | None = None, *, drop: bool = False) -> None:
        """Unpin all of these, or `which` of them; they become _ABSENT, so that the next call with
        the same array does what an exception cut off. `drop`: they are elsewhere, too; the last
        reader frees them."""
        if not (entries >= 0).any():  # most of a cold prefix: no lock for that
            return
        with self._lock:
            mine = entries >= 0 if which is None else which & (entries >= 0)
            ids = entries[mine]
            if drop:
                self._forget(ids[self._owner[ids, 0] >= 0])
            idle = ids[self._pins[ids] == 1]
            self._file(idle[self._owner[idle, 0] >= 0])
            dropped = idle[self._owner[idle, 0] < 0]  # while being read: its last reader frees it
            self._pins[ids] -= 1
            entries[mine] = _ABSENT  # no signal comes between
            self._free_or_file(dropped)

    def slot(self, entry: int) -> Slot:
        """Where an entry's bytes are."""
        return Slot((Extent(0, entry * self.chunk_bytes, self.chunk_bytes),))

    def plane_at(self, plane: int, entries: Ids) -> Ids:
        """Where in the arena a plane's pieces begin in these entries."""
        return entries * self.chunk_bytes + self._offs.get(plane, 0)

    def has(self, span: int, layer: int, windows: Ids) -> Mask:
        """Which of these windows have an entry, ready or being filled."""
        with self._lock:
            table = self._maps.get(span)
            if table is None:
                return np.zeros(len(windows), dtype=bool)
            return np.asarray(table[layer, windows] != _ABSENT)

    def held_of(self, span: int, first: int, count: int) -> int:
        """Entries of windows [first, first + count), of all layers; nothing is pinned or used."""
        with self._lock:
            table = self._maps.get(span)
            return 0 if table is None else int((table[:, first : first + count] >= 0).sum())

    def room(self, ranks: Ranks) -> int:
        """How many newcomers with these ranks, highest first, `admit` would grant now. Pure."""
        with self._lock:
            free, n = self.tier.usage().free // self.chunk_bytes, len(ranks)
            if not self.by_rank or n <= free:
                return int(min(n, free + len(self._heap)))
            least = self._rank[self._heap.items()]
        # Without the lock: for a large cache it takes milliseconds, and requests need it to pin.
        if n - free < len(least):
            least = np.partition(least, n - free)[: n - free]
        least = np.sort(least)
        return free + int((ranks[free : free + len(least)] > least + self._margin).sum())

    def admit(
        self, span: int, n_windows: int, layer: int, windows: Ids, ranks: Ranks | None = None,
        noted: list[Ids] | None = None,
    ) -> tuple[Ids, Ids]:  # fmt: skip
        """Take entries for these windows of a layer; (windows, entries) granted, to be filled.

        Windows that have an entry are left out. Makes room by dropping the least of those that
        nobody reads, by rank only those that a newcomer's of `ranks` beats; when there is not
        enough, grants fewer, those of the highest ranks. `publish` or `abandon` follows. `noted`:
        the entries are added as they are taken, so that Ctrl-C leaves none that nobody knows of.
        """
        if ranks is None:
            ranks = np.zeros(len(windows))
        taken = list[int]()
        try:
            with self._lock:
                return self._admit(span, n_windows, layer, windows, ranks, taken, noted)
        except BaseException:  # no memory, Ctrl-C: nobody else knows of these
            if not noted:
                self.abandon(np.array(taken, dtype=np.int64))
            with self._lock:
                self._refile()
            raise

    def judge(self, span: int, layer: int, ranks: Ranks, shares: Shares | None) -> None:
        """What the chunks of a layer are worth now, by window of the span.

        A rank that is nan stays as it was. shares None: unknown.
        """
        with self._lock:
            table = self._maps.get(span)
            if table is None:
                return
            windows = np.flatnonzero(table[layer] >= 0)
            entries = table[layer, windows]
            self._share[entries] = np.nan if shares is None else shares[windows]
            now = ranks[windows]
            self._rank[entries] = np.where(np.isnan(now), self._rank[entries], now)
            if self.by_rank:
                self._file(entries[self._ready[entries] & (self._pins[entries] == 0)])

    def important_share(self) -> float | None:
        """Mean share of important rows of the chunks here; None where none is known."""
        with self._lock:
            shares = self._share[self._owner[:, 0] >= 0]
            shares = shares[~np.isnan(shares)]
            return float(shares.mean()) if len(shares) else None

    def publish(self, entries: Ids) -> None:
        """Filled: from now on they are found, and become _ABSENT in the caller's array. Those
        dropped with their span meanwhile are freed. If an exception comes in between, all are
        abandoned, here or by the caller."""
        try:
            with self._lock:
                self._tick += 1
                mine = entries[entries >= 0]
                owned = self._owner[mine, 0] >= 0
                kept, gone = mine[owned], mine[~owned]
                self._used[kept] = self._tick
                self._file(kept)
                self._ready[mine] = True  # ready without an owner: yet to be freed
                entries[:] = _ABSENT  # no signal came between
                self._free_or_file(gone)
        except BaseException:  # no memory, Ctrl-C
            self.abandon(entries)
            raise

    def abandon(self, entries: Ids) -> None:
        """Never filled: take them out again. They become _ABSENT, so that the next call with the
        same array does what an exception cut off."""
        try:
            with self._lock:
                mine = entries[entries >= 0]
                self._forget(mine[self._owner[mine, 0] >= 0])
                self._ready[mine] = True  # ready without an owner: yet to be freed
                entries[:] = _ABSENT  # no signal came between
                self._free_or_file(mine)
        except BaseException:  # no memory, Ctrl-C
            with self._lock:
                self._refile()
            raise

    def fill(self, entry: int, plane: int, data: Bytes, pieces: Sums) -> None:
        """Copy one plane of a chunk in. The entry is this caller's until published. `pieces`: the
        sums, [pieces], that data has been compared with; nobody else may write to data."""
        self.tier.write(self.slot(entry), self._offs[plane], data)
        self.sums.keep(entry, plane, data, pieces)

    def drop_span(self, span: int) -> None:
        """Its copies are found no more. Pinned and filling ones are freed by their last user."""
        with self._lock:
            table = self._maps.get(span)
            if table is not None:
                self._drop(table[table >= 0])

    def drop_windows(self, span: int, layer: int, windows: Ids) -> None:
        """These windows of a layer are elsewhere now. Pinned copies go with their last reader."""
        with self._lock:
            table = self._maps.get(span)
            if table is not None:
                entries = table[layer, windows]
                self._drop(entries[entries >= 0])

    def clear(self) -> None:
        """Drop everything that nobody reads."""
        with self._lock:
            self._drop(self._heap.items())

    def close(self) -> None:
        """Let the tier's memory go: nobody reads or fills copies any more. They still count."""
        self.tier.close()

    def occupancy(self) -> dict[int, int]:
        """Span -> its chunks here."""
        with self._lock:
            return dict(self._n_entries)

    def check(self) -> None:
        """Assert that maps, owners and the arena agree."""
        self.tier.check()
        with self._lock:
            found = [table[table >= 0] for table in self._maps.values()]
            mapped = np.sort(np.concatenate([np.empty(0, np.int64), *found]))
            assert len(np.unique(mapped)) == len(mapped), "two windows share an entry"
            assert np.array_equal(mapped, np.flatnonzero(self._owner[:, 0] >= 0)), "owners are off"
            counts = {span: int((table >= 0).sum()) for span, table in self._maps.items()}
            assert counts == self._n_entries and all(counts.values()), "entries are miscounted"
            assert (self._pins >= 0).all(), "unpinned twice"
            self._heap.check()
            idle = self._ready & (self._pins == 0) & (self._owner[:, 0] >= 0)
            assert np.array_equal(self._heap.items(), np.flatnonzero(idle)), "the heap is off"
            for entry in mapped.tolist():
                span, layer, window = self._owner[entry].tolist()
                assert self._maps[span][layer, window] == entry, "owner and map disagree"

    # ---- inside, under the lock ------------------------------------------------------------

    def _admit(
        self, span: int, n_windows: int, layer: int, windows: Ids, ranks: Ranks, taken: list[int],
        noted: list[Ids] | None,
    ) -> tuple[Ids, Ids]:  # fmt: skip
        table = self._maps.get(span)
        if table is not None:
            absent = table[layer, windows] == _ABSENT
            windows, ranks = windows[absent], ranks[absent]
        entries, kept = self._take(ranks, taken)
        windows, ranks = windows[kept], ranks[kept]
        table = self._maps.get(span)  # again: the last copy of it may have been driven out
        if table is None:
            table = np.full((self._n_layers, n_windows), _ABSENT, dtype=np.int64)
        owners = np.empty((len(windows), 3), dtype=np.int64)
        owners[:, 0], owners[:, 1], owners[:, 2] = span, layer, windows
        n_entries = self._n_entries.get(span, 0) + len(entries)
        if len(entries):  # no signal comes between here and the end
            self._rank[entries], self._share[entries] = ranks, np.nan
            self._owner[entries] = owners
            table[layer, windows] = entries
            self._maps[span], self._n_entries[span] = table, n_entries
            if noted is not None:
                noted += [entries]
        return windows, entries

    def _take(self, ranks: Ranks, taken: list[int]) -> tuple[Ids, Ids]:
        """Entries for newcomers, noted in `taken` too, and which of them (ascending) get one."""
        n = min(len(ranks), self.capacity)
        free = min(n, self.tier.usage().free // self.chunk_bytes)
        kept = np.argsort(-ranks, kind="stable")[:n]
        # Those worth most, against those worth least: once one is not beaten, no other is.
        below = ranks[kept[free:]] - self._margin if self.by_rank else None
        victims = self._heap.take(n - free, below)
        kept = kept[: free + len(victims)]
        self._drop(victims)
        self.evictions += len(victims)
        self._reserve(len(kept), taken)
        return np.array(taken, dtype=np.int64), np.sort(kept[: len(taken)])

    def _reserve(self, most: int, taken: list[int]) -> None:
        """Add up to `most` free entries to `taken`; together, as each call goes over all holes."""
        slot = None
        try:
            slot = self.tier.reserve_each(self.chunk_bytes, most)
            found = [part.off // self.chunk_bytes for part in slot.parts]
        except BaseException:  # Ctrl-C: nobody else knows of them
            if slot is not None:
                self.tier.free(slot)
            raise
        taken += found  # no signal came between

    def _file(self, entries: Ids) -> None:
        """These may go; filed under what they are worth now."""
        ranks = self._rank[entries] if self.by_rank else 0.0
        self._heap.put(entries, ranks, self._used[entries])

    def _drop(self, entries: Ids) -> None:
        try:
            self._forget(entries)
            idle = entries[self._ready[entries] & (self._pins[entries] == 0)]
            self._free(idle)
        except BaseException:  # no memory, Ctrl-C
            self._refile()
            raise

    def _free_or_file(self, entries: Ids) -> None:
        try:
            self._free(entries)
        except BaseException:  # no memory, Ctrl-C; and nobody will ask for them again
            self._refile()
            raise

    def _refile(self) -> None:
        """Finish what was cut off: copies that are still found may go later, the rest is freed."""
        idle, owned = self._ready & (self._pins == 0), self._owner[:, 0] >= 0
        self._file(np.setdiff1d(np.flatnonzero(idle & owned), self._heap.items()))
        self._free(np.flatnonzero(idle & ~owned))

    def _forget(self, entries: Ids) -> None:
        for span in np.unique(self._owner[entries, 0]).tolist():
            mine = entries[self._owner[entries, 0] == span]
            table = self._maps[span]
            left = self._n_entries[span] - len(mine)
            self._heap.discard(mine)
            table[self._owner[mine, 1], self._owner[mine, 2]] = _ABSENT
            self._n_entries[span] = left
            if not left:
                del self._maps[span], self._n_entries[span]
            self._owner[mine] = _ABSENT  # no signal came between

    def _free(self, entries: Ids) -> None:
        if not len(entries):
            return
        self._heap.discard(entries)
        self._ready[entries] = True  # ready without an owner: yet to be freed
        before = self.tier.usage().used
        try:  # together: each call goes over all holes
            self.tier.free(Slot(tuple(self.slot(e).parts[0] for e in entries.tolist())))
            self._ready[entries] = False  # no signal came between
        except BaseException:  # all are free, or none: only the tier knows
            if self.tier.usage().used < before:
                self._ready[entries] = False
            raise
