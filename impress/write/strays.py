"""Folders beside a store's shards that hold what a shard does, under no shard's name."""

from __future__ import annotations

from pathlib import Path

from impress.errors import StoreFailed
from impress.write.directory import is_number
from impress.write.folders import names_in


def strays_of(path: Path) -> list[str]:
    """Their names: copies and renamed shards, in which nobody looks for what is to be read, checked
    or erased; any that may not be looked into, too. Raises StoreFailed where `shards` may not."""
    folder = path / "shards"
    others = [name for name in names_in(folder) if name != "main" and not is_number(name)]
    return [name for name in sorted(others) if name != "lost+found" and _holds(folder / name)]


def said_of_strays(path: Path) -> list[str]:
    """For each, a line saying that it lies there, and what to do. Raises as `strays_of`."""
    return [
        f"{path / 'shards' / name} holds what a shard does, or may not be looked into, and has no "
        "shard's name, so that nobody looks there: give it its name back, or delete it"
        for name in strays_of(path)
    ]


def _holds(folder: Path) -> bool:
    try:
        return bool(names_in(folder / "segments") or names_in(folder / "index"))
    except StoreFailed:
        return True
