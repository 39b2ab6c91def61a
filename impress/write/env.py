"""An index's file as this process has it open: LMDB's environment and its databases.

One environment per file and process (LMDB's rule), shared by reference count, so a reader beside a
writer works.
"""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import lmdb

from impress.errors import FormatError, ImpressError, StoreFailed
from impress.write.directory import GONE, OLD
from tiers.files import give_blocks, give_to_owner, make_folder, sync_path

#: Address space, not disk: the file grows as it fills. Fixed, because growing a map under a live
#: reader is not refused by LMDB and corrupts it.
MAP_BYTES: Final = 64 << 30

#: Of LMDB's table of readers: 126 of them, LMDB's default.
LOCK_BYTES: Final = 8 << 10

#: What LMDB says of a file that is not sound, as opposed to one that may not be opened or is full.
_DAMAGE: Final = (
    lmdb.BadDbiError, lmdb.BadTxnError, lmdb.CorruptedError, lmdb.InvalidError, lmdb.NotFoundError,
    lmdb.PageNotFoundError, lmdb.VersionMismatchError,
)  # fmt: skip

#: Databases of an index.
NAMES: Final = ("spans", "heat", "names", "history", "guard", "log", "erase")
LATER: Final = ("history", "guard", "log", "erase")  # stores written before these existed lack them
Key = tuple[Path, int]  # and the inode: another file in its place is another index


class NothingYet(FormatError):
    """An index whose first writer has not made its databases, or was cut off before it had."""


@dataclass(slots=True)
class Env:
    """What this process has open of an index, shared by everybody who does."""

    env: Any
    users: int = 0
    dbs: dict[str, Any] = field(default_factory=dict)


envs: dict[Key, Env] = {}
envs_lock = threading.Lock()  # also of opening databases: LMDB takes one at a time


def open_env(folder: Path, *, create: bool) -> tuple[Env, Key]:
    with envs_lock:
        shared = envs.get((folder, inode_of(folder)))
        if shared is None:
            writable = create or os.access(folder / "data.mdb", os.W_OK)
            if writable:
                _make_table(folder / "lock.mdb")
            env = lmdb.open(
                os.fsencode(folder), map_size=MAP_BYTES, max_dbs=8, mode=0o600, create=create,
                readonly=not writable, lock=writable, readahead=False,
            )  # fmt: skip
            for name in ("data.mdb", "lock.mdb"):  # the second is made by a reader too
                give_to_owner(folder / name)
            env.reader_check()  # slots of killed readers would hold old pages forever
            shared = Env(env)
        key = (folder, inode_of(folder))
        envs[key] = shared
        shared.users += 1
        return shared, key


def _make_table(path: Path) -> None:
    """LMDB maps its table of readers as a file of holes, and to touch one on a disk that is full is
    SIGBUS. Raises OSError. (None of this process has it open: closing it drops LMDB's lock.)"""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        give_blocks(fd, LOCK_BYTES)
    except OSError:
        if not os.fstat(fd).st_blocks:  # else it has the slots of the first readers
            raise
    finally:
        os.close(fd)


def open_dbs(shared: Env, *, create: bool) -> None:
    """Those there are. Once a process and index: it takes LMDB's write lock for a moment.

    Raises NothingYet where there are none.
    """
    with envs_lock:
        names = [name for name in NAMES if name not in shared.dbs]
        if create:  # at once: who reads beside its first writer finds all of them, or none
            with shared.env.begin(write=True) as txn:
                made = {name: shared.env.open_db(name.encode(), txn=txn) for name in names}
            shared.dbs.update(made)
            return
        for name in names:
            try:
                shared.dbs[name] = shared.env.open_db(name.encode(), create=False)
            except lmdb.NotFoundError:
                folder = Path(os.fsdecode(shared.env.path()))
                stored = any(folder.parent.glob("segments/*.seg"))
                if not stored and not shared.env.stat()["entries"]:
                    said = f"index: {folder}: nothing has been stored here yet"
                    raise NothingYet(said) from None
                if name not in LATER:
                    raise


def close_env(key: Key) -> None:
    with envs_lock:
        shared = envs[key]
        shared.users -= 1
        if not shared.users:
            del envs[key]
            shared.env.close()


def inode_of(folder: Path) -> int:
    """Of an index's file; -1: there is none."""
    try:
        return (folder / "data.mdb").stat().st_ino
    except OSError:
        return -1


def compact(folder: Path) -> None:
    """Write the index anew without what it has freed, and put it in the old one's place.

    One that a rebuild set aside goes: token ids stand in it too. For whoever holds the writer's
    lock, with no `Index` of this process open on it. Another process that reads the old one goes
    on with that. Raises StoreFailed.
    """
    folder = folder.resolve()
    draft, gone = folder.with_name("index.new"), folder.with_name(GONE)
    try:
        for stale in (draft, gone, folder.with_name(OLD)):
            shutil.rmtree(stale, ignore_errors=True)
        make_folder(draft)
        shared, key = open_env(folder, create=False)
        try:
            shared.env.copy(os.fsencode(draft), compact=True)
        finally:
            close_env(key)
        (draft / "data.mdb").chmod(0o600)
        give_to_owner(draft / "data.mdb")
        sync_path(draft / "data.mdb")
        sync_path(draft)
        # The whole folder: with the old lock file a reader's table would speak of other pages.
        folder.rename(gone)
        draft.rename(folder)
        sync_path(folder.parent)  # else a power cut could bring back what was erased
        shutil.rmtree(gone)
    except (lmdb.Error, OSError) as err:
        raise _failed(folder, err) from err


def error_of(folder: Path, err: Exception) -> ImpressError:
    """What is raised for an error of LMDB's or of the system."""
    if isinstance(err, _DAMAGE):
        again = "impress rebuild makes it again from the segments"
        return FormatError(f"index: {folder}: {err}; {again}")
    return _failed(folder, err)


def _failed(folder: Path, err: Exception) -> StoreFailed:
    """With the folder once: LMDB says it of an index that it cannot open."""
    said = (err.strerror if isinstance(err, OSError) else None) or str(err)
    return StoreFailed(f"index: {folder}: {said.removeprefix(f'{folder}: ')}")


def check_whole(env: Any, folder: Path) -> None:
    """Raises FormatError when the file is shorter than its pages: a touch would be SIGBUS."""
    want = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    size = (folder / "data.mdb").stat().st_size
    if size < want:
        raise FormatError(
            f"index: {folder / 'data.mdb'} is cut short: {size} of {want} bytes; "
            "impress rebuild makes it again from the segments"
        )
