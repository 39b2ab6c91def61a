"""What every queue of reads does: many runs under way at once, given back in order.

A queue serves one thread. It only speeds things up: whatever does not go through it is reported,
and read again with preadv.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from tiers.base import PAGE, Bytes, Read
from tiers.coalesce import RUN_BYTES, Run

log = logging.getLogger("impress.ssd")

#: Requests that one thread has under way at a time.
DEPTH: Final = 256
#: Runs of a batch: two batches can be under way.
BATCH: Final = DEPTH // 2
#: Bytes that one thread has under way at a time, where they belong to several batches.
MOST_UNDER_WAY: Final = 3 << 20
#: The same at least, so that a medium always has requests enough.
LEAST_UNDER_WAY: Final = RUN_BYTES
#: Most struct iovec entries of one batch.
MOST_VIEWS: Final = 4096


class SegmentFile(NamedTuple):
    """An open segment. `path` is for engines that must open it for themselves."""

    fd: int
    path: Path


class _File(Protocol):
    def fileno(self) -> int: ...

    def close(self) -> object: ...


F = TypeVar("F", bound=_File)


class OwnFiles(Generic[F]):
    """Files an engine opens for itself, by path. For one thread.

    A segment that was given back may be made again under its name, so a file kept here is compared
    with the one the tier has open. Two open files have two inodes: comparing those is enough.
    """

    def __init__(self, opened: Callable[[Path], F]) -> None:
        """`opened`: opens a file to be read."""
        self._opened = opened
        self._files: dict[Path, F] = {}

    def of(self, file: SegmentFile) -> F:
        """This segment's file, opened if need be: then those of deleted segments, whose space they
        hold, are closed. Raises what `opened` does."""
        mine = self._files.get(file.path)
        if mine is None or os.fstat(mine.fileno()).st_ino != os.fstat(file.fd).st_ino:
            self._close_gone()
            mine = self._files[file.path] = self._opened(file.path)
        return mine

    def _close_gone(self) -> None:
        gone = [path for path, mine in self._files.items() if not os.fstat(mine.fileno()).st_nlink]
        for path in gone:
            self._files.pop(path).close()

    def close(self) -> None:
        """Close all of them."""
        while self._files:
            self._files.popitem()[1].close()


#: A segment's file, by its number.
FileOf = Callable[[int], SegmentFile]
#: Runs, and whether each is there.
Completions = Generator[tuple[Run, bool], None, None]


def at_once(reads: Sequence[Read]) -> int:
    """How many bytes of these to have under way: half of them, within bounds. Pure.

    A virtual disk may hand back all that it has been sent at once, when the last of it is read:
    then one part is verified while the next is read. (3.3 MiB in 69 places, in batches of a MiB:
    0.86 of the time that three at once and the rest behind them took.)
    """
    if len(reads) * PAGE >= 2 * MOST_UNDER_WAY:
        return MOST_UNDER_WAY
    half = sum([len(read.dest) for read in reads]) // 2
    return max(LEAST_UNDER_WAY, min(MOST_UNDER_WAY, half))


class ReadQueue(ABC):
    """One thread's way to many reads at once."""

    name: ClassVar[str]

    @abstractmethod
    def read(
        self, batches: Iterable[list[Run]], file_of: FileOf, most: int = MOST_UNDER_WAY
    ) -> Completions:
        """Read these runs, at most BATCH in each batch; yield each in order, when it is complete.
        `most`: bytes of several batches that may be under way at a time.

        With False: it was refused, failed or fell short, and nothing of it counts. Go on to the
        end, or close the generator, which returns once nothing writes to any view any more.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what the kernel lent. No read may be under way."""


class KernelQueue(ReadQueue):
    """A queue that the kernel serves: requests are written to memory it reads, then submitted."""

    def __init__(self) -> None:
        self._vectors = np.zeros((MOST_VIEWS, 2), dtype=np.int64)  # struct iovec
        self._vectors_at = self._vectors.ctypes.data
        self._under_way = 0  # submitted, and not ended as far as `_wait` knows

    @abstractmethod
    def _write(self, rows: list[tuple[int, int, int, int, int]]) -> None:
        """Write requests: (index, fd, address of the iovecs, their number, offset)."""

    @abstractmethod
    def _submit(self, n: int) -> int:
        """Send the first n requests written; return how many the kernel took. Count these at once
        as `_under_way`: after that memory may run out, and all of them are to be waited for."""

    @abstractmethod
    def _wait(self, least: int, most: int) -> list[tuple[int, int]]:
        """(index, bytes or -errno) of requests that have ended: from `least` to `most`. These
        leave `_under_way` as soon as the kernel has told, whatever is raised after that."""

    def read(
        self, batches: Iterable[list[Run]], file_of: FileOf, most: int = MOST_UNDER_WAY
    ) -> Completions:
        """Write a batch down before waiting for anything, and send it before giving back what has
        come: the medium reads on while that is verified."""
        todo = iter(batches)
        sent: deque[Run] = deque()  # and not given back yet
        ended: dict[int, int] = {}  # index -> bytes or -errno
        n_given = bytes_under_way = 0
        batch, n_written, n_bytes = self._next(todo, file_of, 0)
        try:
            while batch or sent:
                fits = self._under_way + len(batch) <= DEPTH
                fits &= bytes_under_way + n_bytes <= most
                if batch and (fits or not self._under_way):
                    first, n_taken = n_given + len(sent), self._submit(n_written)
                    bytes_under_way += sum(run.n_bytes for run in batch[:n_taken])
                    ended.update((first + i, -1) for i in range(n_taken, len(batch)))
                    sent += batch
                    batch, n_written, n_bytes = self._next(todo, file_of, first + len(batch))
                elif n_given in ended:
                    run = sent.popleft()
                    n_given += 1
                    yield run, ended.pop(n_given - 1) == run.n_bytes
                else:
                    for i, result in self._wait(1, self._under_way):
                        bytes_under_way -= sent[i - n_given].n_bytes
                        ended[i] = result
        finally:
            while self._under_way:
                try:
                    self._wait(self._under_way, self._under_way)
                except MemoryError:  # for the list of ended requests, which nobody wants
                    continue

    def _next(
        self, todo: Iterator[list[Run]], file_of: FileOf, first: int
    ) -> tuple[list[Run], int, int]:
        """Write the next batch's requests, numbered from `first`: (its runs; how many of them were
        written, as many as have room; bytes of all)."""
        runs = next(todo, [])
        if not runs:
            return [], 0, 0
        fds = {number: file_of(number).fd for number in {run.segment for run in runs}}
        vectors: list[tuple[int, int]] = []
        rows = []
        for i, run in enumerate(runs, first):
            if len(vectors) + len(run.views) > MOST_VIEWS:
                break
            at = self._vectors_at + 16 * len(vectors)
            rows.append((i, fds[run.segment], at, len(run.views), run.off))
            vectors += [(_address(view), len(view)) for view in run.views]
        self._vectors[: len(vectors)] = vectors
        self._write(rows)
        return runs, len(rows), sum(run.n_bytes for run in runs)


def _address(view: Bytes) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def close_all(queues: Iterable[ReadQueue]) -> None:
    """Close each queue. None may have anything under way.

    For each the kernel waits until no core can still see it, some 20 ms: so all at once. (Not by an
    executor: at the interpreter's end there are none any more.)
    """
    at_once = []
    for queue in queues:
        thread = threading.Thread(target=_close, args=(queue,))
        try:
            thread.start()
        except RuntimeError:  # no more threads; at the end of Python 3.12.0 to 3.12.2, none at all
            _close(queue)
        else:
            at_once.append(thread)
    for thread in at_once:
        thread.join()


def _close(queue: ReadQueue) -> None:
    """Close a queue, whatever it raises: other queues, the files and a lock still have to go."""
    try:
        queue.close()
    except Exception as err:
        log.warning("ssd: a queue of %s does not close: %s", queue.name, err)
