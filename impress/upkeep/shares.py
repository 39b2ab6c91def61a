"""The shards of a directory, what lies in each, and who has them open. Locks nothing."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from impress.tree.merged import MergedCatalog
from impress.write.directory import Shard, shards_of
from tiers.files import segment_paths, size_of

LOCKS: Final = Path("/proc/locks")
_File = tuple[int, int, int]  # device's major and minor number, inode


@dataclass(frozen=True, slots=True)
class Share:
    """One shard. `writer`: the process that writes it, None: nobody does; `readers`: how many."""

    name: str
    spans: int  # that its index names
    windows: int  # in the tree
    total: int  # bytes of its segments
    used: int  # what spans own
    missing: int  # of that, what lies in no segment
    repeated: int  # of `used`, that of spans whose windows other spans all have too
    behind: int  # of `used`, that of spans behind windows that are not stored, or cannot be read
    writer: int | None
    readers: int


def shares_of(path: Path, catalog: MergedCatalog) -> list[Share]:
    """One for every shard; `catalog`: all of them, as they stand."""
    locks = _locked_by()
    return [_share(shard, catalog, locks) for shard in shards_of(path)]


def _share(shard: Shard, catalog: MergedCatalog, locks: dict[_File, int]) -> Share:
    owned = catalog.extents(shard.spans)[0]
    views = catalog.views_of(shard.spans)
    sizes: dict[int, int] = {}
    with suppress(OSError):  # another user's, which may not be listed
        sizes = {int(path.stem): size_of(path) for path in segment_paths(shard.segments)}
    missing = sum(
        extent.length - min(max(sizes.get(extent.segment, 0) - extent.off, 0), extent.length)
        for extent in owned
    )
    writer, readers = None, 0
    with suppress(OSError):  # where there is no folder (a link to itself), nobody has a file open
        device = _device(shard.path)
        holders = (locks.get((*device, _inode(path))) for path in shard.readers.glob("*"))
        readers = sum(holder not in (None, os.getpid()) for holder in holders)  # not this process
        writer = locks.get((*device, _inode(shard.path / "lock")))
    total, used = sum(sizes.values()), sum(extent.length for extent in owned)
    repeated, behind = _not_shown(catalog, catalog.known(shard.spans).keys() - views.keys())
    return Share(
        shard.name, len(views) + len(repeated) + len(behind), sum(views.values()), total, used,
        missing, sum(repeated), sum(behind), writer, readers,
    )  # fmt: skip


def _not_shown(catalog: MergedCatalog, spans: Collection[int]) -> tuple[list[int], list[int]]:
    """The bytes that each of these spans owns, none of which the tree shows: of those that repeat
    what others have, and of those behind windows that it does not have.

    A span of which `Waiting` has only the key counts as behind: beyond 64 MiB of labels, so may
    one that repeats others.
    """
    before = dict(catalog.before(spans))
    repeated, behind = list[int](), list[int]()
    for record in catalog.retired_records(spans):
        found = catalog.lookup(record.root, before.get(record.span_id, b""))
        (repeated if found == record.first_window else behind).append(record.owned_bytes)
    return repeated, behind


def _locked_by() -> dict[_File, int]:
    """File -> the process that has a lock on it, as the kernel lists them; none where it does not.

    Trying the lock instead would keep it from whoever tries at that moment.
    """
    found: dict[_File, int] = {}
    try:
        lines = LOCKS.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK":
            major, minor, inode = fields[5].split(":")
            found[int(major, 16), int(minor, 16), int(inode)] = int(fields[4])
    return found


def _device(folder: Path) -> tuple[int, int]:
    """(major, minor) of a folder's file system, as the kernel lists it with its locks.

    That of its mount: where a file system holds several volumes (btrfs), st_dev is another.
    """
    stat = folder.stat()
    fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        about = Path(f"/proc/self/fdinfo/{fd}").read_text().split()
        mount = about[about.index("mnt_id:") + 1]
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            if fields[0] == mount:
                major, minor = fields[2].split(":")
                return int(major), int(minor)
    except (OSError, ValueError):
        pass  # no /proc: no locks are listed either
    finally:
        os.close(fd)
    return os.major(stat.st_dev), os.minor(stat.st_dev)


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1
