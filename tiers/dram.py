"""Host memory as a tier: one arena, touched page by page as slots are used."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

from tiers.arena import Arena
from tiers.base import Bytes, Read, Slot, verify
from tiers.coalesce import locate


class DramTier(Arena):
    """An anonymous mapping of budget_bytes. Reads verify like any other medium's."""

    def __init__(self, budget_bytes: int, name: str = "dram") -> None:
        """`name`: of the medium it is, or stands for."""
        super().__init__(budget_bytes)
        self.name = name
        self._arena = _mapped(self.n_bytes) if self.n_bytes else np.empty(0, dtype=np.uint8)

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


def _mapped(n_bytes: int) -> Bytes:
    """Memory that costs nothing until it is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    area = mmap.mmap(-1, n_bytes, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)  # measured: a first copy at a quarter of the CPU
    return np.frombuffer(area, dtype=np.uint8)
