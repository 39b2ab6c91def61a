"""What can be told of a store's folders, and which of them are on a disk that is not mounted."""

from __future__ import annotations

from pathlib import Path

from impress.errors import StoreFailed
from tiers.files import said_of_no_folder, segment_paths


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
    disk is not mounted, or it is lost. Empty: nothing, or it was deleted with its name.

    Whoever began a shard left a lock in it at least, so an empty one is the place of a mount.
    """
    for folder in (shard, segments):
        if said := said_of_no_folder(folder):
            return f"{folder.parent}/{said}"
    try:
        is_empty = not any(True for _ in shard.iterdir())
    except OSError:  # it is not there, or may not be listed: that is said where it is opened
        is_empty = False
    if is_empty:
        return (
            f"{shard} is empty: is its disk mounted? If nothing of it is missed, delete the folder"
        )
    return ""


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
