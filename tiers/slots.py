"""Page-aligned host buffers, pooled under a byte budget and counted by reference."""

from __future__ import annotations

import bisect
import ctypes
import mmap
import platform
import re
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

import numpy as np

from tiers.base import PAGE, Bytes, round_up
from tiers.errors import ReadFailed

_HUGE = 2 << 20
#: Whether pages may be marked as free for the system to take (MADV_FREE). Before Linux 5.18 a
#: direct read into a page that was just being taken could bring zeros, and its checksum then blamed
#: the disk.
_MAY_BE_TAKEN = hasattr(mmap, "MADV_FREE") and [
    int(n) for n in re.findall(r"\d+", platform.release())[:2]
] >= [5, 18]
#: A pool remembers the most bytes that were out at once for this long, for at most twice as long.
_LATELY_S = 300.0
#: A pool keeps this multiple of that maximum: a buffer of one size is of no use for another.
_TIMES = 2


def aligned(n_bytes: int) -> Bytes:
    """Fresh zeroed page-aligned memory of at least n_bytes, in whole pages.

    Private memory, since shared memory gets huge pages on few systems only (measured: first touch
    of 16 MiB at 9.4 instead of 1.7 GB/s). Where it is large enough for a huge page it begins at
    one: a direct read then has fewer pages to look up (measured: rows of 1 and 2 KiB, 1.7 and 3 MiB
    a plane, in .72 and .80 of the time that small pages took).

    A forked child keeps seeing what was here at the fork. A direct read that was under way then
    still lands in the parent's pages, as nobody writes to them meanwhile (open(2), under O_DIRECT);
    its checksum is compared afterwards anyway.

    Raises ReadFailed("shortage") where the system grants no more.
    """
    size = max(PAGE, round_up(n_bytes))
    huge = size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE")
    mapped = size + _HUGE if huge else size  # addresses to begin at a huge page; never touched
    try:
        area = mmap.mmap(-1, mapped, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as err:  # OverflowError: more than an address can tell
        why = getattr(err, "strerror", None) or err
        raise ReadFailed("shortage", f"memory: no {size:,} bytes more: {why}") from None
    if not huge:
        return np.frombuffer(area, dtype=np.uint8)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(area)) % _HUGE
    with suppress(OSError):  # only advice: a kernel may have no huge pages, or no mappings left
        if size % _HUGE:  # the rest is not to be huge
            area.madvise(mmap.MADV_HUGEPAGE, begin, size // _HUGE * _HUGE)
        else:  # all of it, so that adjacent mappings become one
            area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, dtype=np.uint8, count=size, offset=begin)


def copied(data: Bytes) -> Bytes:
    """A copy of these bytes in memory from `aligned`, of their length."""
    copy = aligned(len(data))[: len(data)]
    np.copyto(copy, data)
    return copy


def size_class(n_bytes: int) -> int:
    """Bytes to rent for n_bytes: the next of eight sizes an octave, so that a buffer can serve all
    requests that round up to its size. Rounded up further to whole huge pages where that costs at
    most a third more, or to a single one where it at most doubles the size: rows of 1 KiB took up
    to twice as long in small pages. Pure."""
    step = max(PAGE, 1 << max((n_bytes - 1).bit_length() - 4, 0))
    size = round_up(max(n_bytes, 1), step)
    huge = round_up(size, _HUGE)
    return huge if huge - size <= (size if huge == _HUGE else size // 3) else size


class Buffer:
    """A rented buffer. `array` is n_bytes of page-aligned uint8, the renter's until released.

    Starts with one reference; whoever still touches it (a read under way) retains it, and it goes
    back to the pool when the last reference is released. One that was dropped without a release,
    because a signal's exception came between, only stops being counted as rented: somebody may
    still look at its memory, so that is not reused, and is freed with the last view of it.
    """

    __slots__ = ("_memory", "_pool", "_refs", "array")

    def __init__(self, pool: BufferPool, memory: Bytes, n_bytes: int) -> None:
        self._pool = pool
        self._memory = memory
        self._refs = 0
        self.array = memory[:n_bytes]

    def retain(self) -> None:
        with self._pool.lock:
            assert self._refs > 0, "retain of a released buffer"
            self._refs += 1

    def release(self) -> None:
        with self._pool.lock:
            assert self._refs > 0, "buffer released twice"
            if self._refs > 1:
                self._refs -= 1
                return
            size = len(self._memory)
            self._refs = 0
            self._pool.used_bytes -= size  # no signal comes between: Python looks for them at calls
            self._pool.take_back(self._memory)

    def __del__(self) -> None:
        if getattr(self, "_refs", 0):  # no lock: see _Lent
            self._pool.lost.append(len(self._memory))

    def lent(self) -> Bytes:
        """Hand its bytes over as an array whose memory goes back to the pool once neither that
        array nor any view of it exists. From here on it no longer counts as rented."""
        with self._pool.lock:
            assert self._refs == 1, "lent while others touch it"
            size = len(self._memory)
            self._refs = 0
            self._pool.used_bytes -= size  # as in `release`
            self._pool.lend()
        return np.asarray(_Lent(self._pool, self._memory, len(self.array)))


class _Lent:
    """Lends a buffer's bytes to an array; whoever looks at them, tensors too, keeps it alive."""

    __slots__ = ("__array_interface__", "_memory", "_pool")

    def __init__(self, pool: BufferPool, memory: Bytes, n_bytes: int) -> None:
        self._pool = pool
        self._memory = memory
        self.__array_interface__ = memory[:n_bytes].__array_interface__

    def __del__(self) -> None:
        self._pool.drop(self._memory)


class Allowance:
    """Bytes that may be held back at once, for something that can do without. Thread-safe."""

    def __init__(self, n_bytes: int) -> None:
        self._most = n_bytes
        self._held = 0
        self._lock = threading.Lock()

    def take(self, n_bytes: int, taken: list[int]) -> bool:
        """False if that would be too much, which one alone never is. Else noted in `taken`."""
        with self._lock:
            if self._held and self._held + n_bytes > self._most:
                return False
            self._held += n_bytes
            taken += [n_bytes]  # no signal comes between: Python looks for them after calls
            return True

    def give(self, taken: list[int]) -> None:
        """Give these back and empty the list; what an exception cut off, the next call does."""
        with self._lock:
            while taken:
                self._held -= taken[-1]
                del taken[-1]


class BufferPool:
    """Buffers under a budget. Released ones are kept for reuse, up to `keep_bytes`; or, if that is
    more, up to what makes, with those that are out, twice the most that was out at once in the last
    minutes.

    The reason: no read should wait for fresh memory, which a virtual machine was seen to give at
    .4 GB/s, against 20 for memory used before. The system may take what is kept beyond `keep_bytes`
    when it runs short (MADV_FREE: .1 ms for 48 MiB), unless `prepare` locked it.

    Thread-safe. A request for more than the whole budget is never granted.
    """

    def __init__(self, budget_bytes: int | None, keep_bytes: int = 256 << 20) -> None:
        self.prepare: Callable[[Bytes], None] | None = None
        """What is done to fresh memory before it is rented: `page_lock`, for a device."""
        self.lock = threading.RLock()  # entered bare, as in IoPool
        self._freed = threading.Condition(self.lock)
        self._fresh: Bytes | None = None  # what `_take` made, until it is a buffer's
        self._dropped: deque[Bytes] = deque()  # lent, and looked at no more
        self.lost: deque[int] = deque()  # bytes of buffers that nobody released, and nobody can
        self.budget_bytes = budget_bytes
        self.used_bytes = 0  # rented
        self._out_bytes = 0  # rented or lent, and not back yet
        self._most_out = [0, 0]  # at once: since `_since_s`, and in the _LATELY_S before
        self._since_s = monotonic()
        self._keep_bytes = keep_bytes if budget_bytes is None else budget_bytes
        self._kept: list[tuple[int, int, Bytes]] = []  # size, when it came back; sorted
        self._n_back = 0
        self.kept_bytes = 0  # for whoever asks next

    def acquire(self, n_bytes: int, wait_s: float = 0.0) -> Buffer | None:
        """Rent n_bytes; waits at most wait_s for others to release, then None."""
        need = size_class(n_bytes) if self.budget_bytes is None else max(PAGE, round_up(n_bytes))
        if self.budget_bytes is not None and need > self.budget_bytes:
            return None
        deadline = monotonic() + wait_s
        with self.lock:
            self._collect()
            while (memory := self._take(need)) is None:
                left = deadline - monotonic()
                if left <= 0:
                    return None
                self._freed.wait(left)
                self._collect()
            size, buffer = len(memory), Buffer(self, memory, n_bytes)
            buffer._refs = 1  # what is dropped from here on is `lost`: no signal comes between,
            self.used_bytes += size  # as Python looks for them after calls
            self._out_bytes += size
            self._most_out[0] = max(self._most_out[0], self._out_bytes)
            self._trim()
            is_fresh = memory is self._fresh
            self._fresh = None
        if is_fresh and self.prepare is not None:  # not under the lock: it touches every page
            self.prepare(memory)
        return buffer

    def _take(self, need: int) -> Bytes | None:
        """A kept buffer of need..2·need bytes, else a new one if the budget allows.

        Of the smallest size that does, the one that came back last: the others are the first to be
        let go of.
        """
        budget = self.budget_bytes
        at = bisect.bisect_left(self._kept, (need, 0))
        if at < len(self._kept):
            size = self._kept[at][0]
            if size <= 2 * need and (budget is None or self.used_bytes + size <= budget):
                return self._pop(bisect.bisect_left(self._kept, (size + 1, 0)) - 1)
        if budget is not None and self.used_bytes + need > budget:
            return None
        while (
            budget is not None and self._kept and self.used_bytes + self.kept_bytes + need > budget
        ):
            self._pop(len(self._kept) - 1)  # kept memory counts: drop the largest
        try:
            self._fresh = aligned(need)
        except ReadFailed:
            if not self._kept:
                raise
            # What is kept is the pool's own, and the process may have no more beside it.
            self._kept, self.kept_bytes = [], 0
            self._fresh = aligned(need)
        return self._fresh

    def _pop(self, at: int) -> Bytes:
        size, _, memory = self._kept[at]
        self.kept_bytes -= size
        del self._kept[at]
        return memory

    def take_back(self, memory: Bytes) -> None:
        """Called by Buffer under `lock` when its last reference goes and it no longer counts."""
        try:
            self._keep(memory)
            if self.kept_bytes > self._keep_bytes:
                _may_be_taken(memory)
        finally:  # kept or not, for want of memory: it is no longer in use
            self._freed.notify_all()

    def lend(self) -> None:
        """Called by Buffer under `lock`: it is no longer rented."""
        self._freed.notify_all()

    def drop(self, memory: Bytes) -> None:
        """Called when nobody looks at lent memory any more. This may come anywhere, with the lock
        held, since the collector may run at any time; so `_collect` keeps the memory later.

        Which may be never, if this was the last request for long: so what the system may take of it
        is marked here, and not then.
        """
        if self._out_bytes + self.kept_bytes > self._keep_bytes:
            _may_be_taken(memory)
        self._dropped.append(memory)

    def _collect(self) -> None:
        while self._dropped:
            self._keep(self._dropped.popleft())
        while self.lost:
            n_bytes = self.lost.popleft()
            self.used_bytes -= n_bytes
            self._out_bytes -= n_bytes

    def _keep(self, memory: Bytes) -> None:
        """Keep it for whoever asks next; what came back longest ago makes room.

        Otherwise a few large buffers, wanted once, would take up all that may be kept, and every
        small one would be fresh memory.
        """
        self._out_bytes -= len(memory)
        self._n_back += 1
        self._forget()
        bisect.insort(self._kept, (len(memory), self._n_back, memory))
        self.kept_bytes += len(memory)
        self._trim()

    def _forget(self) -> None:
        """Forget the most that was out at once, when that is long ago. By time, not by requests:
        after some thousand small ones the pool had let go of large buffers that are asked for now
        and then, and their memory was fresh each time."""
        since_s = monotonic() - self._since_s
        if since_s >= _LATELY_S:
            before = self._most_out[0] if since_s < 2 * _LATELY_S else 0
            self._most_out = [self._out_bytes, before]
            self._since_s += since_s

    def _trim(self) -> None:
        """Free kept buffers beyond what may be kept, those that came back longest ago first."""
        most = max(self._keep_bytes, _TIMES * max(self._most_out) - self._out_bytes)
        while self.kept_bytes > most:
            self._pop(min(range(len(self._kept)), key=lambda at: self._kept[at][1]))


def _may_be_taken(memory: Bytes) -> None:
    """Let the system have these pages when it is short of memory, until they are written to."""
    area = getattr(memory.base, "obj", None)  # from `aligned`
    if isinstance(area, mmap.mmap) and _MAY_BE_TAKEN:
        with suppress(OSError):  # locked in memory, or a kernel that has no such advice
            area.madvise(mmap.MADV_FREE)


def release_all(buffers: list[Buffer]) -> None:
    """Empty the list, and release each buffer once, whoever else is at it; what is cut off, the
    next call does."""
    while buffers:
        with suppress(IndexError):  # another thread had the last
            buffers.pop().release()
