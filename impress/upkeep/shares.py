"""The shards of a directory, what lies in each, and who has them open. Locks nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from impress.tree.merged import MergedCatalog
from impress.write.directory import Shard, shards_of
from tiers.files import numbered


@dataclass(frozen=True, slots=True)
class Share:
    """One shard. `writer`: the process that writes it, None: nobody does; `readers`: how many."""

    name: str
    spans: int
    windows: int  # in the tree
    total: int  # bytes of its segments
    used: int  # of them, what spans own
    writer: int | None
    readers: int


def shares_of(path: Path, catalog: MergedCatalog) -> list[Share]:
    """Of every shard; `catalog`: all of them, as they stand."""
    locks = locked_by()
    return [_share(shard, catalog, locks) for shard in shards_of(path)]


def _share(shard: Shard, catalog: MergedCatalog, locks: dict[int, int]) -> Share:
    used = sum(extent.length for extent in catalog.extents(shard.spans)[0])
    views = catalog.views_of(shard.spans)
    total = sum(path.stat().st_size for path in numbered(shard.segments, ".seg"))
    readers = sum(inode in locks for inode in map(_inode, shard.readers.glob("*")))
    writer = locks.get(_inode(shard.path / "lock"))
    return Share(shard.name, len(views), sum(views.values()), total, used, writer, readers)


def locked_by() -> dict[int, int]:
    """Inode -> the process that has a lock on it, as the kernel lists them; none where it does not.

    Trying the lock instead would keep it from whoever tries at that moment.
    """
    found: dict[int, int] = {}
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK":
            found[int(fields[5].rpartition(":")[2])] = int(fields[4])
    return found


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1
