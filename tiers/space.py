"""Which bytes of which segments are taken. Pure bookkeeping, no I/O, not thread-safe."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from tiers.base import Extent

#: A slot is one extent wherever there is one large enough. Else it is cut into parts, of which all
#: but the last have at least this many bytes, or as many as the caller says.
LEAST_PART = 1 << 20


class Space:
    """Free extents of a set of segments, merged and sorted; everything else is used."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._free: dict[int, list[tuple[int, int]]] = {}  # segment -> sorted (off, length)
        self.free_bytes = 0
        # Extents that were in use while all that was free was erased (`sweep`). Where their owner
        # never writes, they still hold what lay there before: they are erased when given back.
        self._stale: list[Extent] = []
        self._swept: tuple[Extent, ...] = ()  # claimed by `sweep`

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values())

    @property
    def largest(self) -> int:
        """Bytes of the largest segment."""
        return max(self.sizes.values(), default=0)

    def add(self, segment: int, n_bytes: int) -> None:
        """A new segment, all free."""
        assert segment not in self.sizes
        self.sizes[segment] = n_bytes
        self._free[segment] = [(0, n_bytes)]
        self.free_bytes += n_bytes

    def missing(self, n_bytes: int, least: int = LEAST_PART) -> int:
        """Bytes short for n_bytes, counting only extents that may be parts; 0 when it fits."""
        usable = sum(n for free in self._free.values() for _, n in free if n >= least)
        whole = any(n >= n_bytes for free in self._free.values() for _, n in free)
        return 0 if whole else max(0, n_bytes - usable)

    def take(self, n_bytes: int, least: int = LEAST_PART) -> tuple[Extent, ...] | None:
        """One extent where one is large enough (first fit), else several; None when full.

        Of several all but the last have at least `least` bytes.
        """
        for segment in sorted(self._free):
            for off, length in self._free[segment]:
                if length >= n_bytes:
                    whole = (Extent(segment, off, n_bytes),)
                    self.claim(whole)
                    return whole
        if self.missing(n_bytes, least):
            return None
        found: list[Extent] = []
        for segment in sorted(self._free):
            for off, length in self._free[segment]:
                if length >= least and n_bytes:
                    found.append(Extent(segment, off, min(length, n_bytes)))
                    n_bytes -= found[-1].length
        parts = tuple(found)
        self.claim(parts)
        return parts

    def take_each(self, n_bytes: int, most: int) -> tuple[Extent, ...]:
        """Up to `most` extents of n_bytes each (first fit): fewer where there is no room."""
        found: list[Extent] = []
        for segment in sorted(self._free):
            for off, length in self._free[segment]:
                n = min(length // n_bytes, most - len(found))
                found += [Extent(segment, off + i * n_bytes, n_bytes) for i in range(n)]
                if len(found) == most:
                    break
        parts = tuple(found)
        self.claim(parts)
        return parts

    def claim(self, extents: Iterable[Extent]) -> None:
        """Mark extents as used. Raises ValueError when one is not wholly free; whatever is raised,
        Ctrl-C too, none is marked then."""
        changed, n_bytes = self._without(extents)
        # No signal comes between: Python looks for them after calls. Nor is memory wanted: these
        # segments are there.
        self._free |= changed
        self.free_bytes -= n_bytes

    def _without(self, extents: Iterable[Extent]) -> tuple[dict[int, list[tuple[int, int]]], int]:
        """What is free without these extents, of segments of which they are; and their bytes.
        Raises as `claim` does."""
        changed: dict[int, list[tuple[int, int]]] = {}
        n_bytes = 0
        for segment, some in groupby(sorted(extents), itemgetter(0)):
            free, left, done = self._free.get(segment, []), list[tuple[int, int]](), 0
            for _, off, length in some:
                end = bisect.bisect_right(free, (off, 1 << 62), done)
                left += free[done:end]
                done = end
                start, size = left.pop() if left else (0, 0)  # what it begins in is the last
                if off < start or start + size < off + length or length <= 0:
                    raise ValueError(f"segment {segment} bytes {off}+{length} are not free")
                rest = [(start, off - start), (off + length, start + size - off - length)]
                left += [piece for piece in rest if piece[1]]
                n_bytes += length
            changed[segment] = left + free[done:]
        return changed, n_bytes

    def claim_all(self, extents: Iterable[Extent]) -> None:
        """Claim many extents of wholly free segments at once, in any order: one sort, one pass.

        Raises ValueError when two overlap or one lies outside its segment.
        """
        by_segment: dict[int, list[tuple[int, int]]] = {segment: [] for segment in self.sizes}
        for segment, off, length in extents:
            if segment not in by_segment:
                raise ValueError(f"segment {segment} is missing: is its disk mounted?")
            by_segment[segment].append((off, length))
        self.free_bytes = 0
        for segment, taken in by_segment.items():
            end, free = 0, []
            for off, length in [*sorted(taken), (self.sizes[segment], 0)]:
                if off < end or length < 0:
                    raise ValueError(f"segment {segment} byte {off} is taken twice or outside")
                if off > end:
                    free.append((end, off - end))
                end = off + length
            self._free[segment] = free
            self.free_bytes += sum(n for _, n in free)

    def give(self, extents: Iterable[Extent], owed: list[Any] | None = None) -> None:
        """Mark used extents as free again and merge neighbours; all of them or, whatever is raised,
        none. `owed`: its first item is then removed from it."""
        changed, n_bytes = self._with(extents)
        # No signal comes between, as in `claim`.
        self._free |= changed
        self.free_bytes += n_bytes
        if owed:
            del owed[0]

    @property
    def swept_bytes(self) -> int:
        """Bytes claimed while they are erased: as good as free."""
        return sum(part.length for part in self._swept)

    def unsweep(self) -> None:
        """Make what was swept free again."""
        changed, n_bytes = self._with(self._swept)
        self._free |= changed  # no signal comes between, as in `claim`
        self.free_bytes += n_bytes
        self._swept = ()

    def _with(self, extents: Iterable[Extent]) -> tuple[dict[int, list[tuple[int, int]]], int]:
        """What is free together with these used extents, of their segments; and their bytes."""
        changed: dict[int, list[tuple[int, int]]] = {}
        n_bytes = 0
        for segment, some in groupby(sorted(extents), itemgetter(0)):
            free, more, done = self._free[segment], list[tuple[int, int]](), 0
            for _, off, length in some:
                at = bisect.bisect_left(free, (off, 0), done)
                more += free[done:at]
                after = at < len(free) and free[at][0] == off + length
                assert at == len(free) or free[at][0] >= off + length, "freed twice"
                assert not more or sum(more[-1]) <= off, "freed twice"
                start = more.pop()[0] if more and sum(more[-1]) == off else off
                end = sum(free[at]) if after else off + length
                more.append((start, end - start))
                done = at + after
                n_bytes += length
            changed[segment] = more + free[done:]
        return changed, n_bytes

    def free_parts(self, extents: Iterable[Extent]) -> list[Extent]:
        """The parts of these extents that are free; of a segment that is gone, none."""
        found = []
        for segment, off, length in extents:
            for start, size in self._free.get(segment, ()):
                first, end = max(off, start), min(off + length, start + size)
                if first < end:
                    found.append(Extent(segment, first, end - first))
        return found

    def sweep(self, within: Extent, kept: Sequence[Extent]) -> tuple[Extent, ...]:
        """Claim what is free in `within`, to be erased, until `unsweep`. The rest of `within` is
        stale from now on, except for `kept` (sorted), which its owners have written whole."""
        self.unsweep()  # what an exception left
        found = tuple(self.free_parts([within]))
        changed, n_bytes = self._without(found)
        stale = outside(outside([within], kept), found)
        stale = sorted([*outside(self._stale, [within]), *stale])
        self._free |= changed  # no signal comes between, as in `claim`
        self.free_bytes -= n_bytes
        self._stale, self._swept = stale, found
        return found

    def stale_parts(self, extents: Iterable[Extent]) -> list[Extent]:
        """The parts of these used extents that are stale: to be erased before `give`."""
        if not self._stale:
            return []
        parts = sorted(extents)
        return outside(parts, outside(parts, self._stale))

    def cleaned(self, extents: Iterable[Extent]) -> None:
        """These have been erased."""
        self._stale = outside(self._stale, sorted(extents))

    def drop(self, segment: int) -> int:
        """Forget a segment that is wholly free; return the bytes it had."""
        assert self.is_empty(segment), "segment in use"
        self.cleaned([Extent(segment, 0, self.sizes[segment])])
        n_bytes = self.sizes[segment]
        # No signal comes between, as in `claim`.
        del self.sizes[segment]
        del self._free[segment]
        self.free_bytes -= n_bytes
        return n_bytes

    def is_empty(self, segment: int) -> bool:
        """Whether it holds nothing."""
        return self._free[segment] == [(0, self.sizes[segment])]

    def check(self) -> None:
        """Assert that free extents are sorted, disjoint, merged, inside, and add up."""
        total = 0
        for segment, free in self._free.items():
            end = -1
            for off, length in free:
                assert length > 0 and off > end, f"segment {segment}: free list broken at {off}"
                end = off + length
                total += length
            assert end <= self.sizes[segment], f"segment {segment}: free past the end"
        assert total == self.free_bytes, f"free bytes {self.free_bytes}, counted {total}"


def outside(parts: Iterable[Extent], others: Sequence[Extent]) -> list[Extent]:
    """What of these parts is in none of the others, which are sorted and disjoint. Pure."""
    found = []
    for segment, begin, length in parts:
        off, end = begin, begin + length
        at = bisect.bisect_right(others, Extent(segment, off, 1 << 62))
        at -= at > 0 and others[at - 1].segment == segment  # it may reach into the part
        while at < len(others) and (others[at].segment, others[at].off) < (segment, end):
            other, at = others[at], at + 1
            if other.off > off:
                found.append(Extent(segment, off, other.off - off))
            off = max(off, other.off + other.length)
        if off < end:
            found.append(Extent(segment, off, end - off))
    return found
