"""What all media made of one allocation share: the accounting of their space."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from tiers.base import PAGE, Extent, Slot, Usage, round_up
from tiers.space import Space


class Arena:
    """Slots of one contiguous allocation, numbered segment 0. Thread-safe."""

    least_copy = PAGE

    def __init__(self, budget_bytes: int) -> None:
        """The budget is rounded down to pages; 0 gives no slots."""
        self.n_bytes = budget_bytes // PAGE * PAGE
        self._space = Space()
        self._lock = threading.Lock()
        if self.n_bytes:
            self._space.add(0, self.n_bytes)

    def reserve(self, n_bytes: int) -> Slot | None:
        parts = None
        try:
            with self._lock:
                parts = self._space.take(round_up(n_bytes))
            return None if parts is None else Slot(parts)
        except BaseException:  # Ctrl-C: nobody else knows of this space
            if parts is not None:
                self.free(Slot(parts))
            raise

    def reserve_each(self, n_bytes: int, most: int) -> Slot:
        """Take up to `most` extents of n_bytes each, rounded up to pages: the parts of what is
        returned; as many as there is room for."""
        parts: tuple[Extent, ...] = ()
        try:
            with self._lock:
                parts = self._space.take_each(round_up(n_bytes), most)
            return Slot(parts)
        except BaseException:  # Ctrl-C: nobody else knows of this space
            self.free(Slot(parts))
            raise

    def free(self, slot: Slot) -> None:
        """See Tier: all of it or, whatever is raised, none."""
        with self._lock:
            self._space.give(slot.parts)

    def close(self) -> None:
        """Nothing to do for host memory: it is freed once nobody holds it any more."""

    def usage(self) -> Usage:
        with self._lock:
            free = self._space.free_bytes
        return Usage(self.n_bytes, self.n_bytes - free, free)

    def check(self) -> None:
        with self._lock:
            self._space.check()


def units_of(starts: npt.NDArray[np.int64], piece_bytes: int) -> tuple[int, npt.NDArray[np.int64]]:
    """Bytes of the largest unit (a power of two) that divides these pieces and their starts, and
    their numbers in such units. With 128 KiB, two cores copy a sixth more than with pages. Pure.
    """
    bits = int(np.bitwise_or.reduce(starts)) | piece_bytes
    size = bits & -bits
    at = starts // size
    if piece_bytes > size:
        at = (at[:, None] + np.arange(piece_bytes // size)).ravel()
    return size, at
