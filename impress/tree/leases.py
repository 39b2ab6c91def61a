"""Leases that are out. None pins for ever: the store takes back what a holder never released."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import Protocol

log = logging.getLogger("impress")

Clock = Callable[[], float]


class Expirable(Protocol):
    """What a registry needs of a lease."""

    started_s: float
    is_kept: bool

    def expire(self) -> bool:
        """Unpin for the holder; False when the holder has done so itself."""


class Leases:
    """Thread-safe. A lease is taken back `grace_s` after it expires at `timeout_s`.

    Reads begin only before a lease expires, and take at most `grace_s`: none is under way on space
    that is then reclaimed. (One that is stuck for longer meets bytes of another checksum: a miss.)
    """

    def __init__(self, timeout_s: float, grace_s: float, count: Callable[[int], None]) -> None:
        """`count` is told how many were taken back."""
        self.clock: Clock = monotonic
        """The clock that leases age by, in seconds."""
        self._count = count
        self._limit_s = timeout_s + grace_s
        self._lock = threading.Lock()
        self._out: dict[Expirable, None] = {}  # oldest first

    def add(self, lease: Expirable) -> None:
        with self._lock:
            self._out[lease] = None

    def discard(self, lease: Expirable) -> None:
        with self._lock:
            self._out.pop(lease, None)

    def busy(self) -> bool:
        """Whether any is out that is still read for a request."""
        with self._lock:
            return any(not lease.is_kept for lease in self._out)

    def reap(self) -> None:
        """Take back leases that have been out too long. Costs nothing when there are none.

        Those that are only kept beside their request are not said to be leaks.
        """
        late: list[Expirable] = []
        with self._lock:
            for lease in self._out:
                if self.clock() - lease.started_s <= self._limit_s:
                    break
                late.append(lease)
        n = sum(lease.expire() and not lease.is_kept for lease in late)
        if n:
            log.warning("%d leases were never released; taken back after their time limit", n)
            self._count(n)

    def ages(self) -> tuple[int, float]:
        """(leases out, seconds the oldest has been out)."""
        with self._lock:
            oldest = next(iter(self._out), None)
            return len(self._out), self.clock() - oldest.started_s if oldest else 0.0
