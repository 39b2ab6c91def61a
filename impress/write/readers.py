"""Which processes read a shard that another writes, and what they may still be reading of it.

    shards/NAME/readers/<16 hex>     locked by its process; deleted by it, or by the writer once the
                                     lock is free: killed processes leave nothing behind

 0  8 generation up to which it has followed; of what was taken out before, it holds only:
 8  4 spans held, 4 zero, then their ids, 8 each
16 + 8·spans  8 xxh3_64 of all before; anything after it is left of an earlier, longer one

Anything else, an empty file too, says that it may read whatever was ever there.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from tiers.files import Locked, give_blocks, keep_in_place, lock_file, make_folder, unlock_file

_HEAD: Final = struct.Struct("<QI4x")
#: Most spans one says it holds; with more it stays at its generation, and so holds everything.
MOST_HELD: Final = 500
_MOST_BYTES: Final = _HEAD.size + 8 * MOST_HELD + 8


class Seen(NamedTuple):
    """A reader, as the writer sees it."""

    name: str
    generation: int
    held: frozenset[int]

    def may_read(self, span: int, generation: int) -> bool:
        """Whether it may read a span that the transaction of this generation took out."""
        return self.generation < generation or span in self.held


#: Somebody of whom nothing is known: may read whatever was ever there.
ANYBODY: Final = Seen("", 0, frozenset())


class Presence:
    """This process, as a reader of one shard."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError, where nothing may be written there, or the file system is full: then
        nobody waits for its reads."""
        make_folder(folder)
        self._fd: Locked | None = None
        while self._fd is None:  # None: the writer had it, looking whether it was anybody's
            # Not by process number: one in another container may have the same.
            self._path = folder / secrets.token_hex(8)
            self._fd = lock_file(self._path)
        self._said = b""
        try:  # while nothing is said there, the writer gives back nothing that it takes out
            keep_in_place(self._fd)
            give_blocks(self._fd, _MOST_BYTES)
        except BaseException:
            self.close()
            raise

    def say(self, generation: int, held: Collection[int]) -> None:
        """Followed up to here; of what was taken out before, only these are held."""
        if self._fd is None or len(held) > MOST_HELD:
            return
        raw = _HEAD.pack(generation, len(held)) + struct.pack(f"<{len(held)}Q", *sorted(held))
        raw += xxhash.xxh3_64_digest(raw)
        if raw != self._said:
            os.pwrite(self._fd, raw, 0)
            self._said = raw

    def is_lost(self) -> bool:
        """Whether its file went with its folder: nobody waits for this reader. Raises OSError."""
        return not self._path.exists()

    def close(self) -> None:
        """Idempotent. Nothing of the shard may be read any more."""
        if self._fd is not None:
            with suppress(OSError):  # a file system that takes no writes; the writer does it
                self._path.unlink(missing_ok=True)
            unlock_file(self._fd)
            self._fd = None


def present(folder: Path) -> list[Seen]:
    """Who reads now; for the shard's writer. Clears away those that were killed.

    Raises OSError where the folder cannot be listed: that means not nobody, but anybody.
    """
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = (_seen(folder / name) for name in names)
    return [seen for seen in found if seen is not None]


def _seen(path: Path) -> Seen | None:
    """None: it is gone."""
    try:
        if not path.exists():
            return None
        fd = lock_file(path)
        if fd is not None:  # nobody's any more
            try:
                path.unlink(missing_ok=True)
            finally:  # else this process's own lock would be taken for a reader's from here on
                unlock_file(fd)
            return None
        raw = path.read_bytes()[:_MOST_BYTES]
    except OSError:
        return Seen(path.name, 0, frozenset())
    return decode(path.name, raw)


def decode(name: str, raw: bytes) -> Seen:
    """What a reader says. Pure. Bytes that do not decode, as while being written, say nothing."""
    nothing = Seen(name, 0, frozenset())
    if len(raw) < _HEAD.size + 8:
        return nothing
    generation, n_held = _HEAD.unpack_from(raw)
    end = _HEAD.size + 8 * n_held
    if n_held > MOST_HELD or end + 8 > len(raw):
        return nothing
    if xxhash.xxh3_64_digest(raw[:end]) != raw[end : end + 8]:
        return nothing
    return Seen(name, generation, frozenset(struct.unpack_from(f"<{n_held}Q", raw, _HEAD.size)))
