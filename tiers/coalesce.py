"""Pure plans for reads: which bytes go in one system call, and which calls to one thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from tiers.base import Bytes, Extent, Read, Slot

#: One preadv reads at most this much: more gains nothing, and a slice stays cache-sized.
RUN_BYTES = 1 << 20
#: Most views of one call. Linux allows 1,024; fewer keep the call's set-up small.
RUN_VIEWS = 256
#: A slice of reads for one thread is at least this, so that small reads do not drown in hand-offs.
#: (84 MB, a quarter of it not in memory, two cores: 16 to 18 ms; 18.5 with half of this.)
LEAST_SLICE: Final = 512 << 10
#: The same where every thread already has work: more slices would bring nothing sooner.
LARGE_SLICE: Final = RUN_BYTES
#: The same for chosen rows, where one thread has many requests under way: rows that have come are
#: verified while the next are read, and no thread waits for another to release the interpreter.
STREAM: Final = 16 << 20
MOST_SLICE: Final = 2 << 20
#: Slices per thread, for reads from a disk. A disk shares its throughput among all requests: with
#: one slice each, all came at once and was verified only then, a tenth of a sparse read's time.
TURNS: Final = 2


@dataclass(slots=True)
class Run:
    """One system call: contiguous segment bytes from `off` into views, in order.

    `ends`: the reads that it completes, where runs are read in order. `done`: how many bytes of all
    reads, counted in their order, are there after it; 0 where those are not just the first ones.
    """

    segment: int
    off: int
    views: list[Bytes]
    n_bytes: int
    ends: list[Read]
    done: int = 0


def locate(slot: Slot, off: int, n_bytes: int) -> list[Extent]:
    """Where slot bytes [off, off + n_bytes) lie, in order. Pure."""
    found = []
    for part in slot.parts:
        if off < part.length:
            take = min(part.length - off, n_bytes)
            found.append(Extent(part.segment, part.off + off, take))
            n_bytes -= take
            off = 0
            if not n_bytes:
                return found
        else:
            off -= part.length
    raise AssertionError("range outside its slot")


def coalesce(reads: Iterable[Read]) -> list[Run]:
    """The fewest runs for these reads: neighbours on the medium merge, in medium order. Pure."""
    places: list[tuple[int, int, Bytes, Read]] = []
    for read in reads:
        n_bytes, off = len(read.dest), read.off
        for part in read.slot.parts:
            if off < part.length:
                break
            off -= part.length
        else:
            raise AssertionError("range outside its slot")
        if n_bytes <= RUN_BYTES and off + n_bytes <= part.length:
            places.append((part.segment, part.off + off, read.dest, read))
        else:
            places += _places(read)
    places.sort(key=itemgetter(0, 1))
    runs: list[Run] = []
    last: dict[int, tuple[Run, Read]] = {}  # for reads in several places
    run = Run(-1, 0, [], 0, [])
    for segment, off, view, read in places:
        n_bytes = len(view)
        if (
            off == run.off + run.n_bytes
            and segment == run.segment
            and run.n_bytes + n_bytes <= RUN_BYTES
            and len(run.views) < RUN_VIEWS
        ):
            run.views.append(view)
            run.n_bytes += n_bytes
        else:
            run = Run(segment, off, [view], n_bytes, [])
            runs.append(run)
        if view is read.dest:
            run.ends.append(read)
        else:
            last[id(read)] = (run, read)
    for run, read in last.values():
        run.ends.append(read)
    return runs


def batches(reads: Sequence[Read], most: int) -> Iterator[list[Run]]:
    """Runs for these reads, RUN_BYTES or `most` runs at a time: each batch is made when wanted."""
    done = 0
    for some in slices(reads, RUN_BYTES):
        runs = coalesce(some)
        runs[-1].done = done = done + sum(run.n_bytes for run in runs)
        for at in range(0, len(runs), most):
            yield runs[at : at + most]


def _places(read: Read) -> Iterator[tuple[int, int, Bytes, Read]]:
    """A read, cut where its slot is cut, and every RUN_BYTES."""
    at = 0
    for segment, off, length in locate(read.slot, read.off, len(read.dest)):
        for start in range(0, length, RUN_BYTES):
            size = min(RUN_BYTES, length - start)
            yield segment, off + start, read.dest[at + start : at + start + size], read
        at += length


def slice_bytes(n_bytes: int, n_threads: int, *, turns: int = 1, few: bool = False) -> int:
    """How much of n_bytes a thread takes in a turn; `few`: at least LARGE_SLICE. Pure."""
    most = min(MOST_SLICE, n_bytes // (turns * n_threads))
    return max(LARGE_SLICE if few else LEAST_SLICE, most)


def slices(reads: Sequence[Read], slice_bytes: int) -> list[list[Read]]:
    """Cut reads into thread slices of about slice_bytes, long reads at piece borders. Pure."""
    cut: list[list[Read]] = [[]]
    room = slice_bytes
    for read in reads:
        n_bytes, at = len(read.dest), 0
        if n_bytes <= room:  # most reads, where rows were chosen
            cut[-1].append(read)
            room -= n_bytes
            continue
        while at < n_bytes:
            if room < read.piece_bytes and cut[-1]:
                cut.append([])
                room = slice_bytes
            pieces = max(1, room // read.piece_bytes)
            part = _part(read, at, pieces)
            cut[-1].append(part)
            at += len(part.dest)
            room -= len(part.dest)
    return cut if cut[-1] else []


def _part(read: Read, at: int, n_pieces: int) -> Read:
    n_bytes = min(n_pieces * read.piece_bytes, len(read.dest) - at)
    if n_bytes == len(read.dest):
        return read
    first = at // read.piece_bytes
    sums = None if read.sums is None else read.sums[first : first + n_pieces]
    return Read(read.slot, read.off + at, read.dest[at : at + n_bytes], sums, read.piece_bytes)
