"""What can be told of a store's folders, and which of them are on a disk that is not mounted."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from impress.errors import StoreFailed
from tiers.files import (
    Locked,
    give_to_owner,
    lock_file,
    make_folder,
    said_of_no_folder,
    segment_paths,
    sync_path,
    unlock_file,
)


def names_in(folder: Path) -> list[str]:
    """Names of what lies there; none where there is no such folder. Raises StoreFailed.

    Not by `glob`, which passes over a folder that it may not list.
    """
    try:
        return [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as err:  # no permission, no more files for this process
        raise StoreFailed(f"{folder}: {err.strerror}") from None


def is_dir(path: Path) -> bool:
    """Raises StoreFailed where that cannot be told."""
    try:
        return path.is_dir()
    except OSError as err:
        raise StoreFailed(f"{path}: {err.strerror}") from None


def unmounted(shard: Path, segments: Path) -> str:
    """What is wrong where a shard's folder, or that of its segments, only has its name there: its
    disk is not mounted, or it is lost. Empty: nothing, or it was deleted with its name."""
    for folder in (shard, segments):
        if said := said_of_no_folder(folder):
            return f"{folder.parent}/{said}"
    return said_of_empty(shard)


def said_of_empty(shard: Path) -> str:
    """What is wrong where a shard's folder is empty and nothing is mounted there: as every shard
    begins with a lock in it, that is the place of a mount. Empty: it is not, or it may not be
    listed, which is said where it is opened."""
    try:
        is_empty = not any(True for _ in shard.iterdir())
        if not is_empty or os.path.ismount(os.path.realpath(shard)):
            return ""
    except OSError:
        return ""
    return (
        f"{shard} is empty: is its disk mounted? If nothing of it is missed, delete the folder, or "
        "make an empty file named lock in it"
    )


def locked_in(folder: Path, lock: str) -> Locked | None:
    """Lock a file of that name in a folder, as `lock_file` does. Where there is none, the folder is
    made for its owner alone, with that file in it, locked, or not at all: whoever looks meanwhile,
    and however it ends, nobody sees an empty one. Raises OSError."""
    if not os.path.lexists(folder) and (fd := _begun(folder, lock)) is not None:
        return fd
    make_folder(folder)
    return lock_file(folder / lock)


def _begun(folder: Path, lock: str) -> Locked | None:
    """None where another was first."""
    make_folder(folder.parent)
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd: Locked | None = None
    try:
        draft.mkdir(mode=0o700)
        give_to_owner(draft)
        fd = lock_file(draft / lock)
        sync_path(draft)  # before it has its name: with that alone it would be an empty one
        draft.rename(folder)
        sync_path(folder.parent)
        return fd
    except BaseException as err:
        if fd is not None:
            unlock_file(fd)
        if isinstance(err, OSError) and draft.exists() and os.path.lexists(folder):
            return None
        raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def said_of_no_segments(segments: Path, n_spans: int) -> str:
    """What is wrong where a shard has no segments, while its index names so many spans; empty:
    nothing. The index is to be asked first: its writer may take out its last span at any time, and
    then its last segment. Raises OSError."""
    if not n_spans or segment_paths(segments):
        return ""
    return (
        f"{segments} is empty, but the index beside it names {n_spans} spans: mount its disk, or "
        f"if its files are lost, delete {segments.parent}"
    )
