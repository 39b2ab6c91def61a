"""Folders beside a store's shards that hold what a shard does, under no name of one."""

from __future__ import annotations

from pathlib import Path

from impress.write.directory import is_number, names_in


def strays_of(path: Path) -> list[str]:
    """Their names: copies and renamed shards, in which nobody looks for what is to be read, checked
    or erased. Raises StoreFailed where that cannot be told."""
    folder = path / "shards"
    names = [name for name in sorted(names_in(folder)) if name != "main" and not is_number(name)]
    return [
        name for name in names
        if names_in(folder / name / "segments") or names_in(folder / name / "index")
    ]  # fmt: skip


def said_of_stray(path: Path, name: str) -> str:
    """That one lies there, and what to do."""
    return (
        f"{path / 'shards' / name} holds what a shard does, under no name of one, and nobody looks "
        "there: give it its name back, or delete it"
    )
