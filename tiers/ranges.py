"""Reserved ranges of addresses, with memory behind only the pages in use.

    reserve: |. . . . . . . . . . . . . .|   addresses: touching them is a fault
    back:    |# # # . . . . # # # # . . .|   # memory, and only that is held

A range stays where it is while memory comes and goes behind it, so whoever holds its address never
moves. On the host a range is PROT_NONE; `back` makes pages of it readable and writable, `unback`
gives them up. It is anonymous memory, not pages of a memfd mapped in: measured for 2 MiB on Linux
6.18, fresh memory from the kernel takes .52 ms (.27 as one huge page), while mapping in pages that
exist takes .61, all of it for page table entries, and those pages are never huge.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from tiers.base import PAGE, Bytes
from tiers.errors import MediumError

#: Bytes of a page that the kernel backs by one entry, where it is asked to.
HUGE: Final = 2 << 20
#: More bytes of addresses than a process has, even with five levels of page tables; most have 2^47.
_ADDRESSES: Final = 1 << 56
# Linux's numbers that not every version of the mmap module names; the last is from 5.14 on.
_PROT_NONE: Final = 0
_MAP_NORESERVE: Final = 0x4000
_MADV_POPULATE_WRITE: Final = 23


class RangeRefused(MediumError):
    """The machine gives no such range. `limit` says what stands in the way."""

    def __init__(self, n_bytes: int, limit: str) -> None:
        super().__init__(f"a range of {n_bytes:,} bytes of addresses was refused: {limit}")
        self.n_bytes = n_bytes
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Range:
    """Addresses [address, address + n_bytes), as long as `memory` or a view of it is held.

    `memory`: uint8 [n_bytes] on the host, else an object with `__cuda_array_interface__`.
    """

    address: int
    n_bytes: int
    memory: Any


class Ranges(Protocol):
    """Where ranges come from. Offsets and lengths are multiples of `page_bytes`.

    Not thread-safe for calls on the same pages; which of them are backed is the caller's to know.
    """

    page_bytes: int
    device: str  # "cpu" or "cuda:0"

    def reserve(self, n_bytes: int) -> Range:
        """n_bytes > 0 of addresses, nothing behind them. Raises RangeRefused."""

    def back(self, at: Range, off: int, n_bytes: int) -> None:
        """Put memory, of any content, behind [off, off + n_bytes), where there was none.

        Raises MediumError; then there is none behind it. Host memory is filled when it is touched.
        """

    def fill(self, at: Range, off: int, n_bytes: int) -> None:
        """Fill backed memory now, so that touching it costs nothing. May do nothing."""

    def unback(self, at: Range, off: int, n_bytes: int) -> None:
        """Take the memory away again. Whoever touches a view of it now faults."""

    @property
    def kept_bytes(self) -> int:
        """Memory behind no address, taken away and kept for the next `back`."""

    def trim(self, n_bytes: int) -> None:
        """Give back what is kept, except for n_bytes."""


class HostRanges:
    """Host memory. Linux."""

    device = "cpu"
    kept_bytes = 0

    def __init__(self, page_bytes: int) -> None:
        assert page_bytes > 0 and not page_bytes % PAGE, "a page is made of the machine's pages"
        self.page_bytes = page_bytes
        self._libc = _libc()

    def reserve(self, n_bytes: int) -> Range:
        huge = HUGE if self.page_bytes % HUGE == 0 else 0  # room to begin at a huge page
        size = n_bytes + huge
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        if n_bytes >= _ADDRESSES:  # and the call would take it modulo 2^64
            raise RangeRefused(n_bytes, refused_by(n_bytes, errno.ENOMEM))
        begin = self._libc.mmap(None, size, _PROT_NONE, flags, -1, 0)
        if begin is None or begin == ctypes.c_void_p(-1).value:
            raise RangeRefused(n_bytes, refused_by(n_bytes, ctypes.get_errno()))
        address = -(-begin // huge) * huge if huge else begin
        owner = (ctypes.c_uint8 * n_bytes).from_address(address)
        weakref.finalize(owner, self._libc.munmap, begin, size).atexit = False
        if huge:
            self._libc.madvise(address, n_bytes, mmap.MADV_HUGEPAGE)
        memory: Bytes = np.frombuffer(owner, dtype=np.uint8)
        return Range(address, n_bytes, memory)

    def back(self, at: Range, off: int, n_bytes: int) -> None:
        address = at.address + off
        if self._libc.mprotect(address, n_bytes, mmap.PROT_READ | mmap.PROT_WRITE):
            code = ctypes.get_errno()
            raise MediumError(f"no memory behind {n_bytes:,} bytes: {refused_by(n_bytes, code)}")

    def fill(self, at: Range, off: int, n_bytes: int) -> None:
        self._libc.madvise(at.address + off, n_bytes, _MADV_POPULATE_WRITE)

    def unback(self, at: Range, off: int, n_bytes: int) -> None:
        # In this order: a `fill` in between would put pages back that nobody counts any more.
        self._libc.mprotect(at.address + off, n_bytes, _PROT_NONE)
        self._libc.madvise(at.address + off, n_bytes, mmap.MADV_DONTNEED)

    def trim(self, n_bytes: int) -> None:
        """Nothing to do: the system got it back when it was taken away."""


def refused_by(n_bytes: int, code: int) -> str:
    """Which limit refuses addresses or memory here, in words. Reads the machine's settings."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    data, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if code == errno.ENOMEM and n_bytes >= 1 << 47:
        return "a process has not so many addresses (2^47 as a rule)"
    if code == errno.ENOMEM and soft != resource.RLIM_INFINITY:
        return f"RLIMIT_AS is {soft:,} bytes (ulimit -v)"
    if code == errno.ENOMEM and data != resource.RLIM_INFINITY:
        return f"RLIMIT_DATA is {data:,} bytes (ulimit -d)"
    if code == errno.ENOMEM and _setting("overcommit_memory") == "2":
        return "vm.overcommit_memory is 2: CommitLimit in /proc/meminfo"
    if code == errno.ENOMEM:
        return f"{os.strerror(code)}; vm.max_map_count is {_setting('max_map_count')}"
    return os.strerror(code)


def _setting(name: str) -> str:
    try:
        return Path(f"/proc/sys/vm/{name}").read_text().strip()
    except OSError:
        return "unknown"


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = (pointer, size, number, number, number, ctypes.c_long)
    for name in ("mprotect", "madvise"):
        getattr(libc, name).argtypes = (pointer, size, number)
    libc.munmap.argtypes = (pointer, size)
    return libc
