"""Host memory as a tier: one arena, touched page by page as slots are used."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Final

import numpy as np

from tiers.arena import Arena, units_of
from tiers.base import Bytes, Pieces, Slot, digest
from tiers.coalesce import locate
from tiers.errors import MediumError

#: Bytes gathered at once, to be verified and scattered. Smaller blocks fit a core's own cache, but
#: threads then hand the interpreter to each other more often, three times a block: on two cores 18
#: MB in pieces of 8 KiB took 1.9 ms in blocks of 512 KiB, 1.4 in 2 MiB; in parts of 2 KiB, 126 MB
#: took 45 ms with 1,800 hand-offs, 32 with 700.
_BLOCK: Final = 2 << 20
#: Pieces at least this long are brought one by one, straight to their places, and compared while a
#: core has them in its cache (two cores, 128 KiB, every second place: 17.9 GB/s; in blocks 11).
_LONG: Final = 64 << 10
#: Advice that Python has no name for: a fork's child finds zeros. It would be left with every page
#: as it was before its parent wrote to it: as much memory again.
_WIPE_ON_FORK: Final = 18


class DramTier(Arena):
    """An anonymous mapping of budget_bytes. What is read is verified, as on any other medium."""

    def __init__(self, budget_bytes: int, name: str = "dram") -> None:
        """`name`: that of the medium it is, or stands in for."""
        super().__init__(budget_bytes)
        self.name = name
        self._arena = _mapped(self.n_bytes, name) if self.n_bytes else np.empty(0, np.uint8)

    def write(self, slot: Slot, off: int, data: Bytes) -> None:
        for _, start, length in locate(slot, off, len(data)):
            np.copyto(self._arena[start : start + length], data[:length])
            data = data[length:]

    def read_pieces(self, pieces: Pieces) -> None:
        """Bring long pieces one by one, others block by block, verified while the processor has
        them in its cache.

        Many short ones share a call instead of one call each: threads that copy some KiB at a time
        spend more on handing the interpreter to each other than on copying.
        """
        if pieces.piece_bytes >= _LONG and pieces.to.ndim == 1:
            self._read_long(pieces)
            return
        for some in _blocks(pieces):
            straight = to = some.straight()
            if to is None:
                to = np.empty(some.n_bytes, dtype=np.uint8)
            size, at = units_of(some.starts, some.piece_bytes)
            # "clip": with "raise" NumPy fills a copy of its own first. All of `at` is in range.
            units = self._arena[: len(self._arena) // size * size].reshape(-1, size)
            units.take(at, axis=0, out=to.reshape(-1, size), mode="clip")
            some.verify(to, self.name)
            if straight is None:
                dest, of, places = some.places()
                dest[places] = to.reshape(-1, dest.shape[1])[of]

    def _read_long(self, pieces: Pieces) -> None:
        size, found = pieces.piece_bytes, list[int]()
        for at, to in zip(pieces.starts.tolist(), pieces.to.tolist(), strict=True):
            place = pieces.dest[to * size : (to + 1) * size]
            np.copyto(place, self._arena[at : at + size])
            found.append(digest(place))
        pieces.compare(found, self.name)


def _blocks(pieces: Pieces) -> list[Pieces]:
    """What is brought at once: all of it if it goes to neighbouring places, else blocks. Pure."""
    return [pieces] if pieces.straight() is not None else pieces.cut(_BLOCK)


def _mapped(n_bytes: int, name: str) -> Bytes:
    """Memory that costs nothing until it is touched. Raises MediumError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        area = mmap.mmap(-1, n_bytes, flags=flags)
    except OSError as err:
        raise MediumError(
            f"{name}: {n_bytes:,} bytes of memory asked for: {err.strerror}: lower {name}_bytes"
        ) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # only advice: a kernel may not know it
            area.madvise(mmap.MADV_HUGEPAGE)  # measured: a first copy at a quarter of the CPU
    with suppress(OSError):  # as above
        area.madvise(_WIPE_ON_FORK)
    return np.frombuffer(area, dtype=np.uint8)
