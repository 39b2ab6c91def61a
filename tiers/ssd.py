"""Segment files as a tier: fallocated whole, read and written past the page cache.

A segment is `NNNNNNNN.seg` in one directory, mode 0600. O_DIRECT where the file system takes it;
where it refuses (some network and memory file systems), buffered, and the log says so once.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any, Final

from tiers.base import PAGE, Bytes, Extent, Read, Slot, Usage, round_up, verify
from tiers.coalesce import RUN_BYTES, Run, batches, locate
from tiers.engines import engine_named, new_queue
from tiers.errors import MediumError
from tiers.files import emptied, make_folder
from tiers.onebyone import OneByOne
from tiers.queues import BATCH, ReadQueue, at_once, close_all
from tiers.segments import SegmentFiles
from tiers.slots import aligned, copied
from tiers.space import LEAST_PART, Space
from tiers.ticket import until

log = logging.getLogger("impress.ssd")

#: Zeros written at once, where a file system has no holes.
ZERO_BYTES: Final = 1 << 20
#: Free space is erased this much at a time: stores find the rest meanwhile.
ERASE_BYTES: Final = 64 << 20


class SsdTier:
    """All segments of one directory. One process writes; any number may open it read-only.

    What other processes write in folders of their own can be read too (`join`).
    """

    name = "ssd"

    def __init__(
        self, folder: Path, segment_bytes: int, limit_bytes: int | None, *,
        read_only: bool = False, engine: str = "auto", number: int = 0,
    ) -> None:  # fmt: skip
        """`engine`: of tiers.engines, to read with. `number`: this folder's. Raises MediumError."""
        self.engine = engine_named(engine)
        self.folder = folder
        self.no_room = ""  # why the file system gave no more when last asked; empty: it did
        self.sync_failures = 0
        """Syncs that failed. What was written before one may be lost: the kernel says so once."""
        self.segment_bytes = segment_bytes
        self._limit_bytes = limit_bytes
        self._read_only = read_only
        self._space = Space()
        self._lock = threading.Lock()  # for the space; nothing waits for a file under it
        self._growing = threading.Lock()  # held to make or delete segments, taken before others
        self._retired = False
        self._n_erasing = 0  # threads that erase what they give back
        self._files = SegmentFiles(folder, number, read_only=read_only)
        self._one_by_one = OneByOne(self._files)
        self._local = threading.local()  # each thread's queue
        self._made: list[ReadQueue] = []
        self._queues = self.engine != "preadv"  # whether threads still get them
        try:
            if not read_only:
                make_folder(folder)
            for segment, n_bytes in self._files.found():
                self._space.add(segment, n_bytes // PAGE * PAGE)
        except OSError as err:
            raise MediumError(f"ssd: {folder}: {err.strerror}") from err

    def join(self, number: int, folder: Path) -> None:
        """From now on, segments of the folder with that number are read in `folder`."""
        self._files.join(number, folder)

    def drop_deleted(
        self, grace_s: float, *, by_name: bool = True, folder: int | None = None
    ) -> None:  # fmt: skip
        """Let go of files that other writers have deleted, once no read can be on its way."""
        self._files.drop_deleted(grace_s, by_name=by_name, folder=folder)

    @property
    def direct(self) -> bool:
        """Whether it goes past the page cache, as far as is known."""
        return self._files.direct

    @property
    def sends_many(self) -> bool:
        """Whether one thread has many reads under way at once, as far as is known."""
        return self.engine in ("aio", "io_uring") and self._queues and self.direct

    def claim(self, extents: Iterable[Extent]) -> None:
        """At open: mark what an index says is in use. Raises ValueError when two overlap."""
        with self._lock:
            self._space.claim_all(extents)

    def free_parts(self, extents: Iterable[Extent]) -> list[Extent]:
        """The parts of these that are nobody's."""
        with self._lock:
            return self._space.free_parts(extents)

    def reserve(self, n_bytes: int, least: int = LEAST_PART) -> Slot | None:
        """`least`: bytes of a part; below LEAST_PART only where there is no room for a segment."""
        n_bytes, large, taken = round_up(n_bytes), max(least, LEAST_PART), list[Extent]()
        try:
            self._take(n_bytes, large, taken)
            if not taken and min(n_bytes, large) <= self.segment_bytes:  # else none holds it
                with self._growing:  # whoever waited for another's segment may find room in it
                    with self._lock:
                        self._space.unsweep()  # what Ctrl-C left of an erasing
                    while not self._take(n_bytes, large, taken) and self._grow():
                        pass
            return Slot(tuple(taken)) if taken or self._take(n_bytes, least, taken) else None
        except BaseException:  # Ctrl-C: nobody else knows of this space
            self.free(Slot(tuple(taken)))
            raise

    def _take(self, n_bytes: int, least: int, taken: list[Extent]) -> list[Extent]:
        with self._lock:
            taken += self._space.take(n_bytes, least) or ()  # no signal comes between
        return taken

    def missing(self, n_bytes: int, least: int) -> int:
        """Bytes that have to go before n_bytes find room in parts of at least `least`."""
        with self._growing, self._lock:
            return self._space.missing(round_up(n_bytes), least)

    def in_one(self, n_bytes: int) -> bool:
        """Whether one segment can hold n_bytes: an existing one, or the next to be made, unless the
        limit leaves no room for that."""
        with self._lock:
            if n_bytes <= self._space.largest:
                return True
            return n_bytes <= self.segment_bytes and self._may_grow()

    @property
    def largest_bytes(self) -> int:
        """Of a segment."""
        with self._lock:
            return self._space.largest

    def free(self, slot: Slot, owed: list[Any] | None = None) -> None:
        """See Tier. Stale parts of it (see Space) are erased first. `owed`: see Space.give."""
        while True:
            counted = False  # `retire` waits for it
            try:
                with self._lock:
                    stale = [] if self._retired else self._space.stale_parts(slot.parts)
                    if not stale:
                        self._space.give(slot.parts, owed)
                        return
                    self._n_erasing, counted = self._n_erasing + 1, True
                self.erase_now(Slot(tuple(stale)))
            except MediumError as err:  # it is free all the same, and the next erasing finds it
                log.error("ssd: %s: free, and not erased as it was to be: %s", self.folder, err)
                with self._lock:
                    self._space.give(slot.parts, owed)
                return
            finally:
                if counted:
                    with self._lock:
                        self._n_erasing -= 1
            with self._lock:
                self._space.cleaned(stale)

    def write(self, slot: Slot, off: int, data: Bytes) -> None:
        for segment, start, length in locate(slot, off, len(data)):
            self._write_at(segment, start, data[:length])
            data = data[length:]

    def read(self, reads: Sequence[Read], then: Callable[[int], None] | None = None) -> None:
        with closing(self._runs(reads)) as runs:
            for run in runs:  # at once, while the bytes are in the CPU's cache, and in short turns:
                for read in run.ends:  # hashing holds the interpreter, and others wait for it
                    verify(read, self._files.where)
                if run.done and then is not None:
                    then(run.done)

    def _runs(self, reads: Sequence[Read]) -> Generator[Run, None, None]:
        """Read them in runs; each is given back in its turn, when its views are filled.

        Closed early, it returns when nothing writes to any view any more.
        """
        todo, queue = batches(reads, BATCH), self._queue() if self._suits(reads) else None
        if queue is None:
            for run in chain.from_iterable(todo):
                self._read_run(run)
                yield run
            return
        with closing(queue.read(todo, self._files.file, at_once(reads))) as ended:
            for run, is_there in ended:
                if not is_there:
                    self._read_run(run)
                yield run

    def _suits(self, reads: Sequence[Read]) -> bool:
        """The kernel's queues are for several direct reads; the other engines take everything."""
        several = len(reads) > 1 or any(len(read.dest) > RUN_BYTES for read in reads)
        return self.engine in ("aiofiles", "kvikio") or (several and self.direct)

    def _queue(self) -> ReadQueue | None:
        """This thread's queue; None where there is none to be had."""
        mine: ReadQueue | None = getattr(self._local, "queue", None)
        if mine is None and self._queues:
            try:
                mine = self._local.queue = new_queue(self.engine)
                if mine is not None:
                    self._made.append(mine)
            except OSError as err:
                self._queues = False
                log.warning("ssd: %s; from here on threads without one read by preadv", err)
        return mine

    def sync(self, slots: Iterable[Slot]) -> None:
        """Return when every byte written to these slots is on stable storage."""
        for segment in sorted({part.segment for slot in slots for part in slot.parts}):
            try:
                os.fdatasync(self._files.fd(segment))
            except OSError as err:
                self.sync_failures += 1
                raise MediumError(f"ssd: fdatasync of {self._files.path(segment)}: {err}") from err

    def erase(self, slot: Slot) -> None:
        """Give the slot's blocks back to the medium and take empty ones in their place.

        What was there is out of reach of whoever reads the files, and stays so after a power cut
        once the slot is synced. Raises MediumError.
        """
        for part in slot.parts:
            try:
                if emptied(self._files.file(part.segment).fd, part.off, part.length):
                    continue
            except OSError as err:
                raise MediumError(f"ssd: {self._files.path(part.segment)}: {err.strerror}") from err
            for off in range(0, part.length, ZERO_BYTES):  # a file system without holes
                size = min(ZERO_BYTES, part.length - off)
                self._write_at(part.segment, part.off + off, aligned(size)[:size])

    def turns(self) -> list[Extent]:
        """All space there is, in the parts that `erase_free` is called with one after the other."""
        sizes = list(self._space.sizes.items())
        return [Extent(s, off, ERASE_BYTES) for s, n in sizes for off in range(0, n, ERASE_BYTES)]

    def erase_free(self, within: Extent, kept: Sequence[Extent] = ()) -> None:
        """Erase what is free within this extent, and sync that: rows that were evicted, or that a
        crash cut off. What is in use there is erased when it is given back, except for `kept`
        (sorted), which is known to be written whole.

        A `reserve` that finds no room meanwhile waits, as for a new segment. Raises MediumError.
        """
        with self._growing:
            try:
                with self._lock:
                    swept = self._space.sweep(within, kept)
                self.erase_now(Slot(swept))
            finally:
                with self._lock:
                    self._space.unsweep()

    def erase_now(self, slot: Slot) -> None:
        """Erased for good on return: synced, too. Raises MediumError."""
        before = self.sync_failures
        self.erase(slot)
        self.sync([slot])
        self.check_synced(before)

    def check_synced(self, failures_before: int) -> None:
        """Raises MediumError if a sync has failed since, even another thread's: nobody can tell
        whose pages it lost."""
        if self.sync_failures != failures_before:
            raise MediumError(f"ssd: {self.folder}: the disk lost writes meanwhile")

    @property
    def capacity_bytes(self) -> int | None:
        """Most bytes it may hold, in whole segments; None: as much as the file system gives."""
        if (limit := self._limit_bytes) is None:
            return None
        there = self._space.total_bytes  # of whatever size: segments keep theirs
        there = there if there <= limit else 0
        return limit - (limit - there) % self.segment_bytes

    def usage(self) -> Usage:
        with self._lock:
            total, free = self._space.total_bytes, self._space.free_bytes + self._space.swept_bytes
        return Usage(total, total - free, free)

    def check(self) -> None:
        with self._lock:
            self._space.check()
            for segment, n_bytes in self._space.sizes.items():
                assert self._files.path(segment).stat().st_size == n_bytes, f"{segment}: resized"

    def trim(self) -> int:
        """Delete segments that hold nothing; return the bytes given back to the file system."""
        with self._growing:  # a new file must not meet an old one of its number
            return sum(self._delete(segment) for segment in list(self._space.sizes))

    def retire(self, timeout_s: float) -> bool:
        """The folder is to be another's, who keeps its own accounts: nothing is made, deleted or
        erased there any more, whatever is given back. False: some of that is still under way."""
        self._retired = True  # first: whoever begins after this does nothing
        return until(lambda: not self._growing.locked() and not self._erasing(), timeout_s)

    def _erasing(self) -> int:
        with self._lock:
            return self._n_erasing

    def _delete(self, segment: int) -> int:
        """Delete a segment if it holds nothing; return the bytes that came back."""
        n_bytes, path = 0, self._files.path(segment)
        try:
            with self._lock:
                if self._space.is_empty(segment) and not self._retired:
                    n_bytes = self._space.sizes[segment]
                    self._space.drop(segment)
            if n_bytes:
                self._files.delete(segment)
            return n_bytes
        except OSError as err:
            log.warning("ssd: %s is not deleted: %s", path, err.strerror)
            return 0
        finally:  # after Ctrl-C, too: what stays is to be filled or tried again
            if n_bytes and path.exists():
                with self._lock:
                    if segment not in self._space.sizes:
                        self._space.add(segment, n_bytes)

    def close(self) -> None:
        """Give back what the system lent. No read or write may be under way."""
        with self._growing:
            made, self._made = self._made, []
            close_all(made)
            self._local = threading.local()
            self._files.close()

    def _may_grow(self) -> bool:
        """Whether the limit leaves room for one more segment."""
        limit = self._limit_bytes
        return limit is None or self._space.total_bytes + self.segment_bytes <= limit

    def _grow(self) -> bool:
        """Make one more segment; False when limit or file system says no. Under `_growing`."""
        sizes, total = self._space.sizes, self._space.total_bytes
        if self._retired:
            return False
        if not self._may_grow():
            return False
        numbers = self._files.numbers
        segment = max(sizes, default=numbers.start - 1) + 1
        if segment not in numbers:  # some of before it may be free by now
            segment = next((number for number in numbers if number not in sizes), -1)
        if segment < 0:
            return self._outgrown(OSError(errno.ENOSPC, "no number is left for it"))
        path = self._files.path(segment)
        try:
            self._files.make(segment, self.segment_bytes, total // 512)  # the index grows with it
            with self._lock:
                self._space.add(segment, self.segment_bytes)
        except OSError as err:
            if err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                return self._outgrown(err)
            raise MediumError(f"ssd: {path}: {err.strerror}") from err
        except BaseException:  # Ctrl-C: a file not accounted for keeps the next from its name
            if segment not in sizes:
                path.unlink(missing_ok=True)
            raise
        self.no_room = ""
        return True

    def _outgrown(self, err: OSError) -> bool:
        """The file system is full: False, and logged once."""
        if not self.no_room:
            log.warning("ssd: no room for another segment in %s (%s)", self.folder, err.strerror)
        self.no_room = f"ssd: {self.folder}: {err.strerror}"
        return False

    def _write_at(self, segment: int, off: int, data: Bytes) -> None:
        data = data if data.ctypes.data % PAGE == 0 or not self.direct else copied(data)
        try:
            fd, done = self._files.fd(segment), 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], off + done)
        except OSError as err:
            raise MediumError(f"ssd: write to {self._files.path(segment)}: {err.strerror}") from err

    def _read_run(self, run: Run) -> None:
        self._one_by_one.read(run)
