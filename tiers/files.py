"""Small files written whole, large ones made at full size, new names that survive a power cut,
owners of new files, files named by numbers, holes, locks, how many may be open, and what can be
read of a file that cannot be read whole."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import secrets
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tiers.base import PAGE

#: See `spare_of`.
MOST_SPARE: Final = 64 << 20
#: Of a file's attributes (FS_IOC_GETFLAGS, FS_IOC_SETFLAGS); the flag: overwriting copies nothing.
_GET_FLAGS: Final = 0x80086601
_SET_FLAGS: Final = 0x40086602
_NO_COPY: Final = 0x00800000
#: What a file's blocks are (FS_IOC_FIEMAP): a question, an extent of the answer (where in the file,
#: bytes, flags), extents asked for at a time.
_GET_EXTENTS: Final = 0xC020660B
_EXTENTS: Final = struct.Struct("QQIIII")
_EXTENT: Final = struct.Struct("Q8xQ16xI12x")
_N_EXTENTS: Final = 64
_IS_LAST, _IS_SHARED = 1, 0x2000
#: Mode of fallocate: blocks shared with another file are replaced by others.
_UNSHARE: Final = 0x40


class Locked(int):
    """The descriptor of a file that this process holds a lock on. Compared by identity: another of
    the same number, even one of the same file, is another object."""

    file: tuple[int, int]  # device, inode


_locked: dict[int, Locked] = {}


def sync_path(path: Path) -> None:
    """Return when a file's bytes, or a folder's names, are on stable storage. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Make a folder for its owner alone where there is none, and its parents too. A new one is on
    stable storage on return: what is durable in it has to be found. Raises OSError."""
    if not path.parent.exists():
        make_folder(path.parent)
    is_new = not path.exists()
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError as err:
        said = said_of_no_folder(path) or err.strerror
        raise FileExistsError(err.errno, said, str(path)) from None
    if is_new:
        sync_path(path.parent)
    give_to_owner(path)


def give_to_owner(path: Path) -> None:
    """Give what is root's to the owner of the folder it is in; do nothing unless run by root.

    Otherwise what root makes in a directory would lock out the service that owns the directory.
    """
    if os.geteuid() != 0:
        return
    with suppress(OSError):  # deleted meanwhile, or a file system where owners cannot be changed
        owner, its = path.parent.stat(), path.lstat()
        # A file with names elsewhere may be any file: the folder's owner may have linked it here.
        if its.st_uid == 0 and (stat.S_ISDIR(its.st_mode) or its.st_nlink == 1):
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def segment_paths(folder: Path) -> list[Path]:
    """The files NUMBER.seg of a folder, by name; none where there is no folder. Raises OSError.

    Anything else somebody put there, such as a copy under a name of its own (1.seg beside
    00000001.seg), is not among them. Not by `glob`: it takes a folder it may not list for empty.
    """
    found = []
    with suppress(FileNotFoundError, NotADirectoryError):
        found = [path for path in folder.iterdir() if path.suffix == ".seg"]
    numbered = (path for path in found if path.stem.isascii() and path.stem.isdigit())
    return sorted(path for path in numbered if path.stem == f"{int(path.stem):08d}")


def size_of(path: Path, *, kept: bool = False) -> int:
    """Bytes of a file; 0 where somebody has deleted it, an error if `kept`. Raises OSError."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        if kept:
            raise
        return 0


def punch(fd: int, off: int, n_bytes: int) -> bool:
    """Make a hole (fallocate, PUNCH_HOLE | KEEP_SIZE); False where the file system has none."""
    return _fallocate(fd, 3, off, n_bytes) == 0


def give_blocks(fd: int, n_bytes: int) -> None:
    """Make a file n_bytes long at least, blocks taken and content kept, whoever writes meanwhile.
    Blocks that a copy made by links to them (XFS) has, too, are replaced by others.

    Does nothing where the file system takes no blocks ahead. Raises OSError where it is full.
    """
    err = _fallocate(fd, 0, 0, n_bytes)  # not posix_fallocate, which may write bytes instead
    if not err and shares_blocks(fd):
        err = _fallocate(fd, _UNSHARE, 0, n_bytes)
    if err in (errno.ENOSPC, errno.EDQUOT):
        raise OSError(err, os.strerror(err))


def shares_blocks(fd: int) -> bool:
    """Whether another file has some of a file's blocks, too: overwriting them takes new ones. False
    where that cannot be told."""
    at = 0
    with suppress(OSError):
        while True:
            asked = bytearray(_EXTENTS.pack(at, (1 << 64) - 1 - at, 0, 0, _N_EXTENTS, 0))
            asked += bytes(_N_EXTENTS * _EXTENT.size)
            fcntl.ioctl(fd, _GET_EXTENTS, asked)
            n = _EXTENTS.unpack_from(asked)[3]
            extents = [*_EXTENT.iter_unpack(asked[_EXTENTS.size :])][:n]
            if any(flags & _IS_SHARED for *_, flags in extents):
                return True
            if not extents or extents[-1][-1] & _IS_LAST:
                return False
            at = extents[-1][0] + extents[-1][1]
    return False


def keep_in_place(fd: int) -> None:
    """For an empty file: overwriting it takes no new blocks, even where the file system copies on
    write (btrfs). Does nothing where there are no such files."""
    with suppress(OSError):
        (flags,) = struct.unpack("i4x", fcntl.ioctl(fd, _GET_FLAGS, bytes(8)))
        fcntl.ioctl(fd, _SET_FLAGS, struct.pack("i4x", flags | _NO_COPY))


def _fallocate(fd: int, mode: int, off: int, n_bytes: int) -> int:
    """0, or the error's number."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if call is None:
        return errno.ENOSYS
    long = ctypes.c_longlong
    return ctypes.get_errno() if call(fd, mode, long(off), long(n_bytes)) else 0


def emptied(fd: int, off: int, n_bytes: int) -> bool:
    """Give blocks back to the file system and take empty ones in their place.

    False where the file system has no holes: nothing was done. Raises OSError: blocks may then have
    been given back without others in their place.
    """
    if not punch(fd, off, n_bytes):
        return False
    os.posix_fallocate(fd, off, n_bytes)
    return True


def write_whole(path: Path, raw: bytes, *, replace: bool = True) -> None:
    """Write all or nothing, for its owner alone, on stable storage on return. Raises OSError.

    Without `replace` an existing file stays, whoever made it and when: FileExistsError.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        give_to_owner(draft)
        with os.fdopen(fd, "wb") as out:
            out.write(raw)
            out.flush()
            os.fsync(out.fileno())
        if replace:
            draft.replace(path)
        else:
            path.hardlink_to(draft)
    finally:
        draft.unlink(missing_ok=True)
    sync_path(path.parent)


def spare_of(folder: Path) -> int:
    """Bytes of a file system that files of full size leave to what else is written there, and
    grows: a sixteenth, at most MOST_SPARE; 0 where its size is not known. Raises OSError."""
    stat = os.statvfs(folder)
    return min(stat.f_blocks * stat.f_frsize // 16, MOST_SPARE)


def check_room(folder: Path, n_bytes: int, more: int = 0) -> None:
    """Raises OSError where n_bytes would not leave what is spare, and `more`."""
    stat, spare = os.statvfs(folder), spare_of(folder)
    free = stat.f_bavail * stat.f_frsize
    if spare and free < n_bytes + spare + more:
        said = f"{os.strerror(errno.ENOSPC)}: {n_bytes:,} bytes are wanted, {free:,} are free, and "
        said += f"{spare + more:,} of these are left to what grows there, such as an index"
        raise OSError(errno.ENOSPC, said)


def make_full(path: Path, n_bytes: int, more: int = 0) -> None:
    """A new file for its owner alone, all its blocks taken, on stable storage on return.

    `more`: bytes to leave besides what is spare. Raises OSError; however it ends, no partial file
    stays.
    """
    check_room(path.parent, n_bytes, more)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        give_to_owner(path)
        keep_in_place(fd)
        os.posix_fallocate(fd, 0, n_bytes)
        os.fsync(fd)
        sync_path(path.parent)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def open_or_make(path: Path) -> int:
    """A descriptor of a file, made for its owner alone if need be. Raises OSError, even where it is
    a symbolic link: what is written there is meant for no other file."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as err:
        if err.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.ELOOP, said_of_link(path)) from None
        raise


def said_of_link(path: Path, kind: str = "file") -> str:
    """What is wrong with a symbolic link in place of one of a store's files. Pure."""
    return (
        f"{path.name} is a symbolic link, which is not followed: put the {kind} itself in its place"
    )


def said_of_no_folder(path: Path) -> str:
    """What is wrong where something that is no folder has the name of one; empty: nothing has, or a
    folder, or that cannot be told."""
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            return ""
    except OSError as err:
        if err.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return ""
    if path.is_symlink():
        return f"{path.name} is a link that leads to no folder: is its disk mounted?"
    return f"{path.name} is a file where a folder is to be" if os.path.lexists(path) else ""


def lock_file(path: Path) -> Locked | None:
    """Create a file if need be and lock it for this process alone; None at once if another has it.

    The kernel lets go of the lock when the process ends, however it ends: a forked child does not
    inherit it. Pass the descriptor to `unlock_file`. Raises OSError.
    """
    while True:
        fd = Locked(open_or_make(path))
        fd.file = _file_of(fd)
        _locked[fd] = fd
        try:
            give_to_owner(path)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _still_there(path, fd):
                return fd
        except BlockingIOError:
            unlock_file(fd)
            return None
        except BaseException:  # Ctrl-C: it would stay locked until this process ends
            unlock_file(fd)
            raise
        unlock_file(fd)  # deleted before we had the lock: once more


def unlock_file(fd: Locked) -> None:
    """Idempotent. A second call does what was cut off; its number may be another file's by then."""
    if _locked.get(fd) is not fd:
        return
    with suppress(OSError):  # already closed, and its number is nobody's
        if _file_of(fd) == fd.file:
            os.close(fd)
    if _locked.get(fd) is fd:
        del _locked[fd]


def _file_of(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


@contextmanager
def turn_at(folder: Path) -> Iterator[None]:
    """Let one process at a time have its turn at this folder; others wait. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _still_there(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _in_a_child() -> None:
    """A lock belongs to the open file, which a fork shares: it would outlive its owner."""
    for fd in [*_locked.values()]:
        unlock_file(fd)


os.register_at_fork(after_in_child=_in_a_child)


def read_pages(fd: int, n_bytes: int, off: int) -> tuple[bytes, int]:
    """n_bytes of a file that is long enough, with zeros for pages that the disk does not give, and
    the number of those. Raises OSError where memory is short: that says nothing about the disk."""
    found = _readable(fd, n_bytes, off)
    if len(found) == n_bytes:
        return found, 0
    end, pages, lost = off + n_bytes, [], 0
    for at in range(off, end, PAGE):
        size = min(PAGE, end - at)
        page = _readable(fd, size, at)
        lost += len(page) < size
        pages.append(page if len(page) == size else bytes(size))
    return b"".join(pages), lost


def _readable(fd: int, n_bytes: int, off: int) -> bytes:
    """The bytes before the first page that cannot be read: the kernel gives that much."""
    try:
        return os.pread(fd, n_bytes, off)
    except OSError as err:
        if err.errno == errno.ENOMEM:
            raise
        return b""


def let_open(n_files: int) -> None:
    """Raise this process's limit of open files fourfold, as far as the system lets it, where
    n_files are a quarter of it or more. So many are open by then: a new file gets the lowest number
    that is free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or 4 * n_files < soft:
        return
    more = 4 * soft if hard == resource.RLIM_INFINITY else min(4 * soft, hard)
    with suppress(OSError, ValueError):  # the system says so itself, when one more is refused
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
