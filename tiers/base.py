"""The one interface every medium serves, and the frozen data it speaks.

A slot is space on a medium, reserved whole and addressed from 0; where it lies (its parts) is the
medium's business. Bytes are written once per place and read in pieces that carry their checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from tiers.errors import ReadFailed

#: Alignment of everything on a medium: O_DIRECT's unit, and a page.
PAGE: Final = 4096

Bytes = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint64]


class Extent(NamedTuple):
    """Bytes [off, off + length) of one segment; both multiples of PAGE."""

    segment: int
    off: int
    length: int


@dataclass(frozen=True, slots=True)
class Slot:
    """Reserved space: the concatenation of its parts, addressed from 0."""

    parts: tuple[Extent, ...]

    @property
    def n_bytes(self) -> int:
        return sum(part.length for part in self.parts)


class Read(NamedTuple):
    """One contiguous read: slot bytes [off, off + len(dest)) into dest.

    `dest` is contiguous uint8; `sums` holds one xxh3_64 per piece of `piece_bytes` (the last may
    be shorter), or None for bytes that carry their own check. A tuple, since it is made in a third
    of the time and a scattered choice makes thousands.
    """

    slot: Slot
    off: int
    dest: Bytes
    sums: Sums | None
    piece_bytes: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces from all over an arena, each with its sum and its place in dest: as columns, since a
    scattered choice makes thousands.

    Piece i: arena bytes [starts[i], starts[i] + piece_bytes), a multiple of PAGE, go to piece
    `to[i]` of dest; `to` is ascending. Where `to` is [pieces, k], each of the k equal parts of a
    piece has a place of its own, counted in parts of that size, or -1: nowhere.
    """

    starts: npt.NDArray[np.int64]
    dest: Bytes
    to: npt.NDArray[np.int64]
    sums: Sums
    piece_bytes: int

    @property
    def n_bytes(self) -> int:
        return len(self.starts) * self.piece_bytes

    def cut(self, most_bytes: int) -> list[Pieces]:
        """Cut into slices of about most_bytes. Pure."""
        n = max(1, most_bytes // self.piece_bytes)
        return [self._some(slice(at, at + n)) for at in range(0, len(self.starts), n)]

    def straight(self) -> Bytes | None:
        """The part of dest the pieces fill, in order without gaps; None where they do not. Pure."""
        if self.to.ndim > 1:
            return None
        first, last = int(self.to[0]), int(self.to[-1])
        if last - first + 1 != len(self.to):
            return None
        return self.dest[first * self.piece_bytes : (last + 1) * self.piece_bytes]

    def _some(self, which: slice | npt.NDArray[np.bool_]) -> Pieces:
        return Pieces(
            self.starts[which], self.dest, self.to[which], self.sums[which], self.piece_bytes
        )

    def places(self) -> tuple[Bytes, slice | npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(dest, of, to): dest[to] = parts[of] puts everything where it goes. Pure.

        `parts`, the pieces one after the other, and `dest` are [n, bytes of what has one place].
        """
        to, size = self.to.reshape(-1), self.piece_bytes * len(self.to) // self.to.size
        dest = self.dest[: len(self.dest) // size * size].reshape(-1, size)
        if self.to.ndim == 1 or (some := to >= 0).all():
            return dest, slice(None), to
        return dest, some.nonzero()[0], to[some]

    def verify(self, found: Bytes, where: str) -> None:
        """Compare pieces, one after the other, with their sums. Raises ReadFailed("checksum")."""
        self.compare(_digests(found, self.piece_bytes), where)

    def compare(self, digests: list[int], where: str) -> None:
        """Compare the pieces' digests, one each, with their sums. Raises ReadFailed("checksum")."""
        want = self.sums.tolist()
        if digests != want:
            bad = _unlike(digests, want)
            raise ReadFailed(
                "checksum", f"{where}: {_bad(bad)}, first at byte {self.starts[bad[0]]}"
            )


class Usage(NamedTuple):
    """Bytes of a medium; total == used + free."""

    total: int
    used: int
    free: int


class Tier(Protocol):
    """A medium. All methods may be called from any thread; none is held up by another's I/O.

    It is read either as `Home`, in contiguous reads, or as `Cache`, in pieces from all over.
    """

    name: str

    def reserve(self, n_bytes: int) -> Slot | None:
        """Take space for n_bytes (> 0), rounded up to pages; None, taking nothing, when full."""

    def free(self, slot: Slot) -> None:
        """Give a slot back whole. Its bytes may be overwritten at once."""

    def write(self, slot: Slot, off: int, data: Bytes) -> None:
        """Put data at slot bytes [off, off + len(data)). Raises MediumError."""

    def usage(self) -> Usage:
        """How much is taken and how much is not."""

    def check(self) -> None:
        """Assert that the accounts add up."""


class Home(Tier, Protocol):
    """A medium where bytes lie in few places, and the number of requests is what counts."""

    def read(self, reads: Sequence[Read], then: Callable[[int], None] | None = None) -> None:
        """Fill every dest and verify every piece. Raises ReadFailed; then no dest may be used.

        `then`: called now and then, on this thread, with how many of the reads' bytes, counted in
        their order, are there so far; the last time, all of them.
        """


class Cache(Tier, Protocol):
    """Memory: one arena, every page of which is as near as the next."""

    @property
    def least_copy(self) -> int:
        """The fewest bytes worth a call of `read_pieces`; any number may be asked for."""

    def reserve_each(self, n_bytes: int, most: int) -> Slot:
        """Take up to `most` extents of n_bytes each, rounded up to pages: the parts of what is
        returned; as many as there is room for. They may be given back in any grouping."""

    def read_pieces(self, pieces: Pieces) -> None:
        """Bring and verify pieces. Raises ReadFailed; then dest must not be used."""

    def close(self) -> None:
        """Let go of memory that others may wait for: nothing is read or written any more, but its
        space is counted as before."""


def round_up(n: int, unit: int = PAGE) -> int:
    """The least multiple of `unit` that is >= n."""
    return -(-n // unit) * unit


#: The xxh3_64 of one buffer.
digest: Final = xxhash.xxh3_64_intdigest


def sums_of(data: Bytes, piece_bytes: int) -> Sums:
    """One xxh3_64 per piece. Pure. (xxh3_64: 31.8 GB/s a core, the fastest of those measured.)"""
    return np.array(_digests(data, piece_bytes), dtype=np.uint64)


def _digests(data: Bytes, piece_bytes: int) -> list[int]:
    whole = len(data) // piece_bytes
    if whole >= 4 and whole * piece_bytes == len(data):  # a tenth less time than slicing, once hot
        return list(map(digest, data.reshape(whole, piece_bytes)))
    view = memoryview(data)
    return [digest(view[at : at + piece_bytes]) for at in range(0, len(view), piece_bytes)]


def _unlike(found: Sequence[int], want: Sequence[int]) -> list[int]:
    """Indices at which two lists of digests, of the same length, differ."""
    return [i for i, pair in enumerate(zip(found, want, strict=True)) if pair[0] != pair[1]]


def _bad(pieces: Sequence[int]) -> str:
    return f"{len(pieces)} bad piece{'s' * (len(pieces) > 1)}"


def verify(read: Read, where: Callable[[Slot, int], str]) -> None:
    """Compare dest with its sums. Raises ReadFailed("checksum") naming the first bad piece.

    `where`: names, for the error, a slot and the byte in it at which the piece begins.
    """
    if read.sums is None:
        return
    if len(read.sums) == 1:  # as in chosen rows: three times as fast as by lists, once it is hot
        found, want = [digest(read.dest)], [read.sums.item()]
    else:  # lists: a read's few pieces are compared in a third of the time an array takes
        found, want = _digests(read.dest, read.piece_bytes), read.sums.tolist()
    if found != want:
        bad = _unlike(found, want)
        off = read.off + bad[0] * read.piece_bytes
        raise ReadFailed(
            "checksum",
            f"{where(read.slot, off)}: {_bad(bad)}, first at slot byte {off}",
        )
