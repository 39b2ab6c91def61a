"""An index's file as this process has it open: LMDB's environment and its databases.

One environment per file and process (LMDB's rule), shared by reference count, so a reader beside a
writer works.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import lmdb

from impress.errors import FORKED, FormatError, ImpressError, StoreFailed
from impress.write.directory import GONE, OLD, shards_of
from impress.write.pages import damage_of, unopenable
from impress.write.prepare import READERS, check_unwritten, make_data, make_table
from tiers.files import (
    give_to_owner,
    make_folder,
    said_of_link,
    sync_path,
)

#: Address space, not disk: the file grows as it fills. Fixed, because growing a map under a live
#: reader is not refused by LMDB and corrupts it.
MAP_BYTES: Final = 64 << 30

#: Bytes of values that one transaction of a copy takes.
_COPIED_BYTES: Final = 16 << 20

#: LMDB's errors for a file that is not sound, as opposed to one it may not open or that is full.
_DAMAGE: Final = (
    lmdb.BadDbiError, lmdb.BadTxnError, lmdb.CorruptedError, lmdb.InvalidError, lmdb.NotFoundError,
    lmdb.PageNotFoundError, lmdb.VersionMismatchError,
)  # fmt: skip

_REBUILD: Final = "impress rebuild makes it again from the segments"

#: Databases of an index.
NAMES: Final = ("spans", "heat", "names", "history", "guard", "log", "erase")
LATER: Final = ("history", "guard", "log", "erase")  # stores written before these existed lack them
Key = tuple[Path, int]  # with the inode: another file in its place is another index


class NothingYet(FormatError):
    """An index whose first writer has not made its databases, or was cut off before it had."""


@dataclass(slots=True)
class Env:
    """An index as this process has it open, shared by everybody here who uses it."""

    env: Any
    users: int = 0
    dbs: dict[str, Any] = field(default_factory=dict)
    #: For opening these: LMDB takes one at a time. Not `envs_lock`: it may wait for a writer who
    #: was stopped, and other indexes are opened and closed meanwhile.
    opening: Any = field(default_factory=threading.Lock)
    pid: int = field(default_factory=os.getpid)
    counted: bool = True  # its readers are in LMDB's table
    n_bytes: int = 0  # of its file, when it was last looked at

    def check_uncut(self, folder: Path, inode: int) -> None:
        """Raises FormatError when the file is shorter than it was: LMDB never shortens it. Somebody
        has copied over it, say, and touching what is gone would be SIGBUS."""
        path, n_bytes = folder / "data.mdb", self.n_bytes  # before the look: meanwhile it may grow
        try:
            stat = path.stat()
        except OSError:  # what is open is whole, whoever took its name away
            return
        if stat.st_ino != inode:
            return
        if stat.st_size < n_bytes:
            said = f"{path} was cut short while it was open: {stat.st_size} of {n_bytes} bytes"
            raise FormatError(f"index: {said}; {_REBUILD}")
        self.n_bytes = max(self.n_bytes, stat.st_size)


envs: dict[Key, Env] = {}
#: Its holder may take it again: what is garbage is collected in any call, and may close a store.
envs_lock = threading.RLock()


def _in_a_child() -> None:
    """After a fork: the lock's holder stayed behind. What is open stays noted, to be refused."""
    global envs_lock
    envs_lock = threading.RLock()


os.register_at_fork(after_in_child=_in_a_child)


def check_fork(path: Path) -> None:
    """Raises StoreFailed where an index of a store was open when this process was forked: it
    cannot be opened here, and nothing in it would be a hit in another shard taken instead."""
    theirs = {folder for (folder, _), one in list(envs.items()) if one.pid != os.getpid()}
    for shard in shards_of(path) if theirs else ():
        if (folder := Path(os.path.realpath(shard.index))) in theirs:
            raise StoreFailed(f"index: {folder}: {FORKED}")


def open_env(folder: Path, *, create: bool) -> tuple[Env, Key]:
    """Raises FormatError, StoreFailed, LMDB's errors, OSError."""
    pid = os.getpid()
    with envs_lock:
        key = (folder, inode := inode_of(folder))
        try:
            shared = envs[key]
            if shared.pid == pid:
                shared.users += 1  # no call comes between: one may close it
                return shared, key
        except KeyError:
            pass
        else:  # LMDB forbids its use here
            raise StoreFailed(f"index: {folder}: {FORKED}")
        data = folder / "data.mdb"
        if data.is_symlink():
            raise StoreFailed(f"index: {folder}: {said_of_link(data)}")
        if said := unopenable(data, MAP_BYTES):
            raise FormatError(f"index: {data} is damaged: {said}; {_REBUILD}")
        if create and inode == -1:
            make_data(data)
        writable = create or os.access(data, os.W_OK)
        if writable:
            writable = make_table(folder / "lock.mdb", needed=create)
        else:
            check_unwritten(folder)
        env = lmdb.open(
            os.fsencode(folder), map_size=MAP_BYTES, max_dbs=8, mode=0o600, create=create,
            readonly=not writable, lock=writable, readahead=False,
        )  # fmt: skip
        try:
            for name in ("data.mdb", "lock.mdb"):  # the second is made by a reader too
                give_to_owner(folder / name)
            env.reader_check()  # slots of killed readers would hold old pages forever
            before, inode = inode, inode_of(folder)
            if before == -1 and writable:  # made just now
                sync_path(folder)
            if before not in (-1, inode):  # taken for the new one, it would never be let go
                said = "another was put in its place as it was opened: try again"
                raise StoreFailed(f"index: {folder}: {said}")
        except BaseException:  # Ctrl-C: its traceback keeps this open, which LMDB allows once
            env.close()
            raise
        shared = Env(env, counted=writable)
        envs[key := (folder, inode)] = shared
        shared.users += 1
        return shared, key


def open_dbs(shared: Env, *, create: bool) -> None:
    """Open those there are. Once per process and index: it takes LMDB's write lock for a moment,
    and waits for a stopped writer: in py-lmdb only a write transaction keeps the names.

    Raises NothingYet where there are none.
    """
    with shared.opening:
        names = [name for name in NAMES if name not in shared.dbs]
        if not names:
            return
        if create:  # at once: a reader beside its first writer finds all of them, or none
            with shared.env.begin(write=True) as txn:
                made = {name: shared.env.open_db(name.encode(), txn=txn) for name in names}
            shared.dbs.update(made)
            return
        found = {}
        # A transaction that `open_db` begins would block all threads here, and Ctrl-C too.
        with shared.env.begin(write=True) if shared.counted else nullcontext() as txn:
            for name in names:
                try:
                    found[name] = shared.env.open_db(name.encode(), txn=txn, create=False)
                except lmdb.NotFoundError:
                    folder = Path(os.fsdecode(shared.env.path()))
                    stored = any(folder.parent.glob("segments/*.seg"))
                    if not stored and not shared.env.stat()["entries"]:
                        said = f"index: {folder}: nothing has been stored here yet"
                        raise NothingYet(said) from None
                    if name not in LATER:
                        raise
        shared.dbs.update(found)  # after its end: until then they belong to the transaction


def close_env(key: Key) -> None:
    with envs_lock:
        shared = envs[key]
        shared.users -= 1  # no call comes between, as above
        if not shared.users:
            del envs[key]
            shared.env.close()


def inode_of(folder: Path) -> int:
    """The inode of an index's file; -1: there is none."""
    try:
        return (folder / "data.mdb").stat().st_ino
    except OSError:
        return -1


def folder_of(folder: Path) -> Path:
    """An index's folder, by a path without links. Raises StoreFailed where it is one itself: a
    purge or a rebuild puts another in its place, and deletes what of its own lies beside it."""
    if folder.is_symlink():
        raise StoreFailed(f"index: {folder.parent}: {said_of_link(folder, 'folder')}")
    try:
        return folder.resolve()
    except (OSError, RuntimeError) as err:  # the second: a link to itself (before Python 3.13)
        said = "a folder of this name is a link that leads to itself"
        raise StoreFailed(f"index: {folder}: {getattr(err, 'strerror', None) or said}") from None


def compact(folder: Path) -> None:
    """Rewrite the index without what it has freed, and put it in the old one's place.

    An index that a rebuild set aside is deleted: it holds token ids too. For whoever holds the
    writer's lock, with no `Index` of this process open on it. Another process that reads the old
    one goes on with that one. Raises StoreFailed.
    """
    folder = folder_of(folder)
    draft, gone = folder.with_name("index.new"), folder.with_name(GONE)
    try:
        for stale in (draft, gone, folder.with_name(OLD)):
            with suppress(FileNotFoundError):  # no other error: token ids are in there
                shutil.rmtree(stale)
        make_folder(draft)
        shared, key = open_env(folder, create=False)
        try:
            open_dbs(shared, create=False)
            _copy(shared, draft)
        finally:
            close_env(key)
        (draft / "data.mdb").chmod(0o600)
        give_to_owner(draft / "data.mdb")
        sync_path(draft / "data.mdb")
        sync_path(draft)
        # The whole folder: with the old lock file a reader's table would speak of other pages.
        folder.rename(gone)
        draft.rename(folder)
        sync_path(folder.parent)
        shutil.rmtree(gone)
        sync_path(folder.parent)  # else a power cut could bring back what was erased
    except (lmdb.Error, OSError) as err:
        raise _failed(folder, err) from err
    finally:  # what came to nothing takes no room, least of all on a disk that is full
        shutil.rmtree(draft, ignore_errors=True)


def _copy(shared: Env, draft: Path) -> None:
    """Every value into a new environment. LMDB's own compacting copy takes pages of large values as
    they are, and behind a value there may be what the page had before: the end of a deleted one."""
    n_bytes = shared.env.info()["last_pgno"] * shared.env.stat()["psize"]
    # Addresses for what comes to less than that: whoever may open an index, beside `ulimit -v`, may
    # copy it.
    addresses = min(MAP_BYTES, (1 << 30) + 2 * n_bytes)
    make_data(draft / "data.mdb")
    with (
        lmdb.open(
            os.fsencode(draft), map_size=addresses, max_dbs=8, mode=0o600, lock=False, sync=False
        ) as env,
        shared.env.begin() as old,
    ):
        for name, db in shared.dbs.items():
            made = env.open_db(name.encode())
            with old.cursor(db) as cursor:
                found = cursor.first()
                while found:
                    n_bytes = 0
                    with env.begin(db=made, write=True) as new:
                        while found and n_bytes < _COPIED_BYTES:  # what one transaction holds
                            n_bytes += len(cursor.value())
                            if not new.put(cursor.key(), cursor.value(), append=True):
                                raise lmdb.CorruptedError("keys out of order")
                            found = cursor.next()
        env.sync(True)


def error_of(folder: Path, err: Exception, *, counted: bool = True) -> ImpressError:
    """What is raised for an error of LMDB's or of the system. `counted`: as of the Env."""
    if isinstance(err, _DAMAGE):
        return _damaged(_said(folder, err), counted=counted)
    return _failed(folder, err)


def check_sound(shared: Env, folder: Path) -> None:
    """Raises FormatError where pages of the index's file are damaged or not there: LMDB answers
    some of that by ending the process. Raises LMDB's errors, OSError."""
    data = folder / "data.mdb"
    if said := damage_of(shared.env, data, pinned=shared.counted):
        raise _damaged(f"{data} is {said}", counted=shared.counted)


def _damaged(said: str, *, counted: bool) -> FormatError:
    again = _REBUILD
    if not counted:  # what looks damaged may be what a writer that came since has written
        again = "it may not be written here, so a writer knows nothing of this reader: mount it "
        again += "writable and try again"
    return FormatError(f"index: {said}; {again}")


def commit_failed(folder: Path, err: Exception) -> StoreFailed:
    """What is raised for a commit that failed."""
    said = f"index: commit to {folder}: {err}"
    if os.strerror(errno.EIO) in said:  # what LMDB makes of a write that was cut short
        said += ", which may be a full disk"
    return StoreFailed(f"{said}; {_REBUILD}" if isinstance(err, _DAMAGE) else said)


def _failed(folder: Path, err: Exception) -> StoreFailed:
    said = _said(folder, err)
    if isinstance(err, lmdb.MemoryError):
        said += f"; it maps {MAP_BYTES >> 30} GiB of addresses: raise `ulimit -v`"
    if isinstance(err, lmdb.ReadersFullError):  # LMDB says to call it otherwise
        said = f"{folder}: {READERS} readers have it open, and LMDB has room for no more: "
        said += "let fewer processes use this directory at once"
    if isinstance(err, lmdb.PanicError):  # after a failed write of its first pages
        said += "; LMDB writes no more in this process: close the store, and open it again"
    if isinstance(err, _DAMAGE):
        said += f"; {_REBUILD}"
    return StoreFailed(f"index: {said}")


def _said(folder: Path, err: Exception) -> str:
    """The error, naming the folder once: LMDB names it where it cannot open an index. Pure."""
    said = (err.strerror if isinstance(err, OSError) else None) or str(err)
    return f"{folder}: {said.removeprefix(f'{folder}: ')}"
