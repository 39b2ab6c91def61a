"""What every queue of reads does: many runs sent at once and given back in order.

A queue serves one thread. It only speeds things up: whatever does not go through it is told so,
and read again with preadv.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from tiers.base import Bytes
from tiers.coalesce import Run

log = logging.getLogger("impress.ssd")

#: Requests of one thread under way at a time.
DEPTH: Final = 64
#: struct iovec of one batch.
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
    """What an engine opens for itself, by path. For one thread.

    A segment that was given back may be made again under its name, so what is kept is compared with
    what the tier has open. Two that are open have two inodes: it is enough to compare these.
    """

    def __init__(self, opened: Callable[[Path], F]) -> None:
        """`opened`: opens a file to be read."""
        self._opened = opened
        self._files: dict[Path, F] = {}

    def of(self, file: SegmentFile) -> F:
        """This segment's, opened if need be: then those of deleted segments, whose space they hold,
        are closed. Raises what `opened` does."""
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


class ReadQueue(ABC):
    """One thread's way to many reads at once."""

    name: ClassVar[str]

    @abstractmethod
    def read(self, runs: Sequence[Run], files: Sequence[SegmentFile]) -> Generator[int, None, None]:
        """Start up to DEPTH reads at once; yield their indices in order, each when it is complete.

        ~index (negative): this one was refused, failed or fell short, nothing of it counts. Go on
        to the end, or close the generator: it returns when nothing writes to any view any more.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what the kernel lent. No read may be under way."""


class KernelQueue(ReadQueue):
    """A queue the kernel works off: requests are written to memory it reads, then submitted."""

    def __init__(self) -> None:
        self._vectors = np.zeros((MOST_VIEWS, 2), dtype=np.int64)  # struct iovec
        self._vectors_at = self._vectors.ctypes.data

    @abstractmethod
    def _write(self, rows: list[tuple[int, int, int, int, int]]) -> None:
        """Write requests: (index, fd, address of the iovecs, their number, offset)."""

    @abstractmethod
    def _submit(self, n: int) -> int:
        """Send the first n requests written; how many the kernel took."""

    @abstractmethod
    def _wait(self, least: int, most: int) -> list[tuple[int, int]]:
        """(index, bytes or -errno) of requests that have ended: from `least` to `most` of them."""

    def read(self, runs: Sequence[Run], files: Sequence[SegmentFile]) -> Generator[int, None, None]:
        n = self._fill(runs, files)
        got: dict[int, int] = {}
        n_sent = self._submit(n) if n else 0
        left = n_sent
        try:
            for i, run in enumerate(runs):
                while i < n_sent and i not in got:
                    events = self._wait(1, left)
                    left -= len(events)
                    got.update(events)
                yield i if got.get(i) == run.n_bytes else ~i
        finally:
            while left:
                left -= len(self._wait(left, left))

    def _fill(self, runs: Sequence[Run], files: Sequence[SegmentFile]) -> int:
        """Write the requests; how many of `runs` they are (those that have room)."""
        vectors: list[tuple[int, int]] = []
        rows = []
        for i, (run, file) in enumerate(zip(runs[:DEPTH], files, strict=False)):
            if len(vectors) + len(run.views) > MOST_VIEWS:
                break
            at = self._vectors_at + 16 * len(vectors)
            rows.append((i, file.fd, at, len(run.views), run.off))
            vectors += [(_address(view), len(view)) for view in run.views]
        self._vectors[: len(vectors)] = vectors
        self._write(rows)
        return len(rows)


def _address(view: Bytes) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def close_all(queues: Iterable[ReadQueue]) -> None:
    """Each once nothing of it is under way.

    For each the kernel waits until no core can still see it, some 20 ms: all at once. (Not by an
    executor: at the interpreter's end there are none any more.)
    """
    at_once = []
    for queue in queues:
        thread = threading.Thread(target=_close, args=(queue,))
        try:
            thread.start()
        except RuntimeError:  # at the end of Python 3.12.0 to 3.12.2 there are no threads, either
            _close(queue)
        else:
            at_once.append(thread)
    for thread in at_once:
        thread.join()


def _close(queue: ReadQueue) -> None:
    """Whatever it raises: the others, the files and a lock are still to be let go of."""
    try:
        queue.close()
    except Exception as err:
        log.warning("ssd: a queue of %s does not close: %s", queue.name, err)
