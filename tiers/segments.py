"""Segment files of one folder, and of others that are read with it: a descriptor of each in use."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Final
from weakref import WeakSet

from tiers.base import Slot
from tiers.coalesce import locate
from tiers.errors import ReadFailed, read_failed
from tiers.files import check_room, give_blocks, let_open, make_full, segment_paths, size_of
from tiers.queues import SegmentFile

log = logging.getLogger("impress.ssd")

#: Segments of folder n are numbered from n times this on: no two folders read together share any.
SEGMENTS: Final = 1 << 20
#: How long the number of a deleted segment's descriptor stays taken: longer than any read lasts.
_LATE_S: Final = 600.0
#: What opening a file gives where its disk is not mounted, or its folder was moved.
_AWAY: Final = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ESTALE)


def _identity(folder: Path) -> tuple[int, int] | None:
    """A folder's device and number; None where it cannot be looked at."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


class SegmentFiles:
    """Files `NNNNNNNN.seg`, opened when first used and open until deleted. Thread-safe."""

    def __init__(self, folder: Path, number: int, *, read_only: bool) -> None:
        """`number`: this folder's."""
        self.folder = folder
        self.numbers = range(number * SEGMENTS, (number + 1) * SEGMENTS)
        self._buffered: set[Path] = set()  # folders whose file systems refuse O_DIRECT
        self._read_only = read_only
        self._folders = {number: folder}
        self._identity: tuple[int, int] | None = None  # the folder's, as its files were found
        self._files: dict[int, SegmentFile] = {}
        self._deleted: list[tuple[float, int]] = []  # of deleted files: when to close, fd
        self._lock = threading.Lock()
        _all.add(self)

    @property
    def direct(self) -> bool:
        """Whether this folder's files go past the page cache, as far as is known."""
        return self.folder not in self._buffered

    def found(self) -> Iterator[tuple[int, int]]:
        """Number and bytes of each segment there is. Where this folder is written, only those with
        its own numbers: other numbers name another folder's files. Raises OSError."""
        self._identity = _identity(self.folder)
        paths = segment_paths(self.folder)
        mine = [path for path in paths if self._read_only or int(path.stem) in self.numbers]
        if n_others := len(paths) - len(mine):
            log.warning(
                "ssd: %s: %d segments numbered as another folder's are left alone: give a renamed "
                "one its name back and run impress rebuild, delete a copy", self.folder, n_others,
            )  # fmt: skip
        for path in mine:
            if not self._read_only:
                _fill(path)
            yield int(path.stem), size_of(path, kept=not self._read_only)

    def join(self, number: int, folder: Path) -> None:
        """From now on, segments of the folder with that number are read in `folder`."""
        self._folders[number] = folder

    def path(self, segment: int) -> Path:
        return self._folders.get(segment // SEGMENTS, self.folder) / f"{segment:08d}.seg"

    def where(self, slot: Slot, off: int) -> str:
        """The file that a byte of a slot lies in, as an error says it."""
        return f"ssd: {self.path(locate(slot, off, 1)[0].segment)}"

    def fd(self, segment: int) -> int:
        """Raises OSError."""
        return self._opened(segment).fd

    def file(self, segment: int) -> SegmentFile:
        """Raises ReadFailed."""
        try:
            return self._opened(segment)
        except OSError as err:
            raise self.failed(segment, err) from err

    def failed(self, segment: int, err: OSError) -> ReadFailed:
        """The error of a failed read. Where a file is not there, nor the folder that was opened,
        nothing is known of the file: the disk is not mounted, or the store was moved."""
        path = self.path(segment)
        mine = err.errno in _AWAY and path.parent == self.folder
        if mine and _identity(self.folder) != self._identity:
            said = f"ssd: {path}: its folder is not the one that was opened: mount its disk"
            return ReadFailed("unmounted", said)
        return read_failed(path, err)

    def _opened(self, segment: int) -> SegmentFile:
        if (file := self._files.get(segment)) is not None:
            return file
        with self._lock:
            if segment not in self._files:
                path = self.path(segment)
                self._files[segment] = SegmentFile(self._open(path), path)
                let_open(self._files[segment].fd + 1)  # they stay open: threads read at any time
            return self._files[segment]

    def _open(self, path: Path) -> int:
        theirs = self._read_only or path.parent != self.folder
        mode = (os.O_RDONLY if theirs else os.O_RDWR) | os.O_CLOEXEC
        folder = path.parent
        if folder not in self._buffered:
            try:
                return os.open(path, mode | os.O_DIRECT)
            except OSError as err:
                if err.errno != errno.EINVAL:
                    raise
                self._buffered.add(folder)
                log.warning("ssd: %s refuses O_DIRECT; reading and writing buffered", folder)
        return os.open(path, mode)

    def make(self, segment: int, n_bytes: int, more: int = 0) -> None:
        """See files.make_full. A file that had its number before is closed. Raises OSError, also
        where the folder is on another disk by now: its own is not mounted any more."""
        now, then = _identity(self.folder), self._identity
        if now and then and now[0] != then[0]:  # on overlayfs its number may change
            raise OSError(
                errno.ENODEV, "its folder is on another disk than it was: mount that again"
            )
        make_full(self.path(segment), n_bytes, more)
        self._forget(segment)  # a late read may have opened it: rows would go to a deleted file

    def delete(self, segment: int) -> None:
        """Delete a segment's file, which nobody writes to. Raises OSError."""
        self.path(segment).unlink(missing_ok=True)
        self._forget(segment)  # after: a late read may open it until then and keep its blocks

    def _forget(self, segment: int) -> None:
        """Its blocks are free at once. Its descriptor's number stays taken for a while, and stands
        for nothing: a read that nobody waits for any more may yet use it, and would else read from
        whatever the process opened next, a socket perhaps."""
        with self._lock:  # whoever opened it just before has noted it
            file = self._files.pop(segment, None)
        if file is not None:
            try:
                _vacate(file.fd)
            except OSError:  # not even one more descriptor
                os.close(file.fd)
            else:
                with self._lock:
                    self._deleted.append((monotonic() + _LATE_S, file.fd))
        self._close_deleted()

    def drop_deleted(
        self, grace_s: float, *, by_name: bool = True, folder: int | None = None
    ) -> None:  # fmt: skip
        """Let go of files that their writers have deleted; closed once no read can be on its way.

        `by_name`: even if a link to it is left somewhere, which takes a look at each name.
        `folder`: looks only at those of the folder of that number (`join`).
        Until then the file system keeps their blocks, and a new file of that name is another one.
        """
        due_s = monotonic() + grace_s
        theirs = [s for s in [*self._files] if self._read_only or s not in self.numbers]
        if folder is not None:
            theirs = [segment for segment in theirs if segment // SEGMENTS == folder]
        for segment in theirs:  # without the lock: others' reads do not wait for a file system
            file = self._files.get(segment)
            if file is not None and _is_gone(file, by_name=by_name):
                with self._lock:
                    if self._files.get(segment) is file:
                        self._deleted.append((due_s, self._files.pop(segment).fd))
        self._close_deleted()

    def _close_deleted(self) -> None:
        now = monotonic()
        while True:
            with self._lock:
                if not (due := [one for one in self._deleted if one[0] < now]):
                    return
                self._deleted.remove(due[0])
            os.close(due[0][1])

    def close(self) -> None:
        """No read or write may be under way."""
        with self._lock:  # forgotten first: closed twice, a number may be another file's by then
            while self._files:
                os.close(self._files.popitem()[1].fd)
            while self._deleted:
                os.close(self._deleted.pop()[1])

    def leave(self) -> None:
        """In a fork's child, which reads none of them: it would keep the blocks of what its parent
        deletes. Without the lock, which may be taken. Forgotten first: right at the fork a number
        is still this file's, but by the time that the child forks, too, it may be another's."""
        while self._files:
            _leave(self._files.popitem()[1].fd)
        while self._deleted:
            _leave(self._deleted.pop()[1])


_all: WeakSet[SegmentFiles] = WeakSet()


def _in_a_child() -> None:
    for files in [*_all]:
        files.leave()


os.register_at_fork(after_in_child=_in_a_child)


def _fill(path: Path) -> None:
    """Give a segment that was copied with holes (`rsync -S`) its blocks back: else, on a full file
    system, writes failed where the space account said that there is room, and nothing was evicted.
    Says so, and takes none, where there is no room for all of them. Raises OSError."""
    n_bytes, n_blocks = (at := path.stat()).st_size, at.st_blocks
    if (n_missing := n_bytes - n_blocks * 512) <= 0:
        return
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        check_room(path.parent, n_missing)  # a call that found none would keep what it was given
        give_blocks(fd, n_bytes)
    except OSError as err:
        log.warning(
            "ssd: %s has holes, and there is no room for its blocks (%s): what is stored there may "
            "fail; make room for %d bytes and open it again", path, err.strerror, n_missing,
        )  # fmt: skip
    finally:
        os.close(fd)


def _vacate(fd: int) -> None:
    """Have a descriptor stand for the null device, where nothing is read; the file it was of is
    closed."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.dup2(nothing, fd, inheritable=False)
    finally:
        os.close(nothing)


def _leave(fd: int) -> None:
    with suppress(OSError):  # closed meanwhile, or not even one more descriptor
        _vacate(fd)


def _is_gone(file: SegmentFile, *, by_name: bool) -> bool:
    """Whether another file, or none, has its name: a copy made of links may keep other names."""
    mine = os.fstat(file.fd)
    if not mine.st_nlink or not by_name:
        return not mine.st_nlink
    try:
        return file.path.stat().st_ino != mine.st_ino
    except FileNotFoundError:
        return True
    except OSError:  # cannot be told
        return False
