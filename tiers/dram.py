"""Host memory as a tier: one arena, touched page by page as slots are used."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence

import numpy as np

from tiers.base import PAGE, Bytes, Read, Slot, Usage, round_up, verify
from tiers.coalesce import locate
from tiers.space import Space


class DramTier:
    """An anonymous mapping of budget_bytes. Reads verify like any other medium's."""

    def __init__(self, budget_bytes: int, name: str = "dram") -> None:
        """`name`: of the medium it is, or stands for."""
        self.name = name
        size = budget_bytes // PAGE * PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._arena: Bytes = (
            np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=np.uint8)
            if size
            else np.empty(0, dtype=np.uint8)
        )
        self._space = Space()
        self._lock = threading.Lock()
        if size:
            self._space.add(0, size)

    def reserve(self, n_bytes: int) -> Slot | None:
        with self._lock:
            parts = self._space.take(round_up(n_bytes))
        return None if parts is None else Slot(parts)

    def free(self, slot: Slot) -> None:
        with self._lock:
            self._space.give(slot.parts)

    def write(self, slot: Slot, off: int, data: Bytes) -> None:
        for _, start, length in locate(slot, off, len(data)):
            np.copyto(self._arena[start : start + length], data[:length])
            data = data[length:]

    def read(self, reads: Sequence[Read]) -> None:
        for read in reads:
            at = 0
            for _, start, length in locate(read.slot, read.off, len(read.dest)):
                np.copyto(read.dest[at : at + length], self._arena[start : start + length])
                at += length
            verify(read, self.name)

    def usage(self) -> Usage:
        with self._lock:
            total, free = len(self._arena), self._space.free_bytes
        return Usage(total, total - free, free)

    def check(self) -> None:
        with self._lock:
            self._space.check()
