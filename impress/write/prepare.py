"""What is seen to before LMDB opens an index: blocks of its files' own, and who writes there."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

from impress.errors import StoreFailed
from tiers.base import PAGE
from tiers.files import give_blocks, keep_in_place, open_or_make, shares_blocks

#: Readers that LMDB's table has room for, its default, and the table's size. Whoever opens an index
#: first makes it; made larger beside a process that has it open, that one would read past its own.
READERS: Final = 126
LOCK_BYTES: Final = 8 << 10
MOUNTS: Final = Path("/proc/self/mountinfo")


def make_data(data: Path) -> None:
    """An empty file for an index, which where files are copied as they are written (btrfs) takes no
    new blocks for what it overwrites: on a full disk nothing could be evicted. Raises OSError."""
    fd = open_or_make(data)
    try:
        keep_in_place(fd)
    finally:
        os.close(fd)


def make_table(path: Path, *, needed: bool) -> bool:
    """LMDB maps its table of readers as a sparse file, and touching a hole on a full disk is
    SIGBUS; so is touching it again where the file system copies on write, or where a copy of the
    store was made by links to its blocks. Gives it blocks of its own.
    (Nothing in this process has it open: closing it drops LMDB's lock.) Raises OSError.

    False where it is not `needed` and the file system went read-only by itself: nobody writes.
    """
    try:
        fd = open_or_make(path)
    except OSError as err:
        if needed or err.errno != errno.EROFS:
            raise
        return False
    try:
        if not os.fstat(fd).st_size:
            keep_in_place(fd)
        give_blocks(fd, LOCK_BYTES)
        for at in range(PAGE - 1, LOCK_BYTES, PAGE):  # behind the last slot's fields: nobody's byte
            os.pwrite(fd, os.pread(fd, 1, at), at)  # a copy's blocks are replaced here, or refused
    except OSError:
        # Else it has blocks for the slots of the first readers.
        if not os.fstat(fd).st_blocks or shares_blocks(fd):
            raise
    finally:
        os.close(fd)
    return True


def check_unwritten(folder: Path) -> None:
    """A reader that may not write is not in LMDB's table: a writer would reuse pages under it.

    Raises StoreFailed where there is a writer, unless the whole file system takes no writes, like
    one that went read-only by itself: its writer has the lock for as long as it lives.
    """
    try:
        fd = os.open(folder.parent / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return  # nobody wrote here, or it cannot be told
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        if not _takes_no_writes(fd):
            raise StoreFailed(
                f"index: {folder}: a process writes here, and must know who reads: mount it "
                "writable here, or give this user the right to write"
            ) from None
    finally:
        os.close(fd)


def _takes_no_writes(fd: int) -> bool:
    """Whether an open file's file system is read-only for all, not by its mount here alone; False
    where that cannot be told."""
    try:
        about = Path(f"/proc/self/fdinfo/{fd}").read_text().split()
        mount = about[about.index("mnt_id:") + 1]
        lines = [line.split() for line in MOUNTS.read_text().splitlines()]
    except (OSError, ValueError):
        return False
    return any(fields[0] == mount and "ro" in fields[-1].split(",") for fields in lines)
