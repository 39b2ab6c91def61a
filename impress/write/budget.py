"""How fast and how much a background job may write, on a clock that is handed in."""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

DAY_S: Final = 86_400.0
_SPENT: Final = struct.Struct("<dd")  # bytes spent, the latest time seen: wall-clock seconds
_FAR: Final = struct.Struct("<ddd")  # and the time of the dump, where the latest is far ahead of it
#: How much of a day's writes a crash may forget: the lesser of this and a 64th of them.
UNSAVED_BYTES: Final = 256 << 20

#: Clock: seconds since some moment. Wait: waits so many seconds; True when it is to end at once.
Clock = Callable[[], float]
Wait = Callable[[float], bool]


def boot_clock() -> float:
    """Seconds since the machine was started, in a suspend too, where the system counts those."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Bucket:
    """Bytes that may go now: filled at a rate, holds at most `burst_bytes`. Thread-safe."""

    def __init__(self, bytes_per_s: float, burst_bytes: float, clock: Clock) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = burst_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._level = burst_bytes
        self._filled_s = clock()

    def take(self, n_bytes: int) -> float:
        """Take n_bytes, in advance if need be; the seconds to wait until they are there."""
        with self._lock:
            self._fill()
            self._level -= n_bytes
            return max(0.0, -self._level / self._bytes_per_s)

    def try_take(self, n_bytes: int) -> bool:
        """Take n_bytes if they are there; else nothing."""
        with self._lock:
            self._fill()
            if n_bytes > self._level:
                return False
            self._level -= n_bytes
            return True

    def give(self, n_bytes: int) -> None:
        """Put back what was taken."""
        with self._lock:
            self._fill()
            self._level = min(self._burst_bytes, self._level + n_bytes)

    def state(self) -> tuple[float, float, float]:
        """(bytes there, bytes missing, the time now)."""
        with self._lock:
            self._fill()
            return max(0.0, self._level), self._burst_bytes - self._level, self._filled_s

    def resume(self, missing_bytes: float, at_s: float) -> None:
        """Begin as a bucket that lacked missing_bytes (at most all that it holds) at at_s."""
        with self._lock:
            self._level = max(0.0, self._burst_bytes - missing_bytes)
            self._filled_s = at_s
            self._fill()

    def _fill(self) -> None:
        now_s = self._clock()
        more = max(0.0, now_s - self._filled_s) * self._bytes_per_s  # clocks are set back too
        self._level = min(self._burst_bytes, self._level + more)
        self._filled_s = now_s


class Pace:
    """Spreads bytes over time. `wait`: how to wait, and whether to stop."""

    def __init__(self, bytes_per_s: int, clock: Clock, wait: Wait) -> None:
        self._bucket = Bucket(bytes_per_s, bytes_per_s / 10, clock)
        self._wait = wait

    def go(self, n_bytes: int) -> bool:
        """Return when n_bytes may go; False when the job is to stop."""
        return not self._wait(self._bucket.take(n_bytes))


class WriteBudget:
    """Bytes that may be written in a day, for the sake of the disk. Thread-safe.

    A bucket that holds a day's bytes and is filled over a day. None: no limit; what is spent is
    counted for the next process, which may have one. `clock`: wall-clock seconds, because what was
    spent before a restart counts: `dump` is handed in again as `saved`. `wall`: what the wall clock
    says now, where it was set right while `clock` went on as it had begun.
    """

    def __init__(
        self, daily_bytes: int | None, clock: Clock, saved: bytes = b"", wall: Clock | None = None
    ) -> None:
        self._clock = clock
        self._wall = wall or clock
        self._lock = threading.Lock()  # guards what is spent where there is no limit
        self._unsaved = 0  # allowed since the last dump
        self._most_unsaved = min((daily_bytes or 0) / 64, UNSAVED_BYTES)
        now_s = clock()
        self._spent, self._newest_s, at_s = _spent(saved) or (0.0, now_s, now_s)
        # Between processes nothing fills up to the latest time seen: else setting right a clock
        # that was behind would add a day that never was. Where that time is far ahead it may have
        # been wrong, and this clock counts. What fills while this runs is in what is spent.
        self._at_s = min(now_s, at_s if self._is_far(now_s) else self._newest_s)
        self._bucket = None
        if daily_bytes is not None:
            self._bucket = Bucket(daily_bytes / DAY_S, daily_bytes, clock)
            self._bucket.resume(self._spent, self._at_s)

    def allow(self, n_bytes: int) -> bool:
        """Whether n_bytes may be written today; if so they are counted."""
        if self._bucket is not None:
            allowed = self._bucket.try_take(n_bytes)
            with self._lock:
                self._unsaved += n_bytes * allowed
            return allowed
        self._count(n_bytes)
        return True

    def refund(self, n_bytes: int) -> None:
        """These bytes were allowed and not written."""
        if self._bucket is not None:
            self._bucket.give(n_bytes)
            with self._lock:
                self._unsaved = max(0, self._unsaved - n_bytes)
        else:
            self._count(-n_bytes)

    @property
    def is_due(self) -> bool:
        """Whether so much was allowed since the last dump that a crash now would forget more than a
        small part of a day's writes: what is spent is to be saved before these are written."""
        return self._unsaved > self._most_unsaved

    @property
    def left_bytes(self) -> int | None:
        """What may be written now; None: no limit."""
        return None if self._bucket is None else int(self._bucket.state()[0])

    def dump(self) -> bytes:
        """What is spent, and as of when, to go on from after a restart."""
        with self._lock:
            self._unsaved = 0  # first: what is allowed from here on may not be in the dump
            spent, at_s = self._spent, self._at_s
            if self._bucket is not None:
                _, spent, at_s = self._bucket.state()
            at_s += max(0.0, self._wall() - self._clock())  # else the time between counts twice
            if self._is_far(at_s):
                return _FAR.pack(spent, self._newest_s, at_s)
            return _SPENT.pack(spent, max(at_s, self._newest_s))

    def _is_far(self, now_s: float) -> bool:
        """Whether the latest time is so far ahead that nothing may wait for it."""
        return self._newest_s > now_s + DAY_S

    def _count(self, n_bytes: int) -> None:
        """Without a limit, so without a rate to fill at: what was spent fades over a day.

        Never faster than a bucket fills from which it was taken; and it settles at a day's bytes
        where that much is written every day.
        """
        with self._lock:
            now_s = self._clock()
            left = self._spent * math.exp(-max(0.0, now_s - self._at_s) / DAY_S)
            self._spent, self._at_s = max(0.0, left + n_bytes), now_s


def _spent(saved: bytes) -> tuple[float, float, float] | None:
    """(bytes, the latest time, the time of the dump) as `dump` packed them; None: not a dump."""
    if len(saved) not in (_SPENT.size, _FAR.size):
        return None
    spent, newest_s, *own = struct.unpack(f"<{len(saved) // 8}d", saved)
    found = (spent, newest_s, *own, newest_s)[:3]
    return found if all(map(math.isfinite, found)) and spent >= 0 else None
