"""What makes a directory a store: its identity file, its shards, the writers' locks.

STORE/impress.json              format, uuid, geometry, window: written once, atomically
STORE/shards/main/, 1/, 2/ …    one writer each:
    lock                        held by it (flock)
    index/                      LMDB
    segments/                   NNNNNNNN.seg
    readers/                    one file, locked, for each other process that reads here
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from impress.errors import BadInput, FormatError, StoreFailed, StoreLocked, StoreMismatch
from impress.spans.format import VERSION
from impress.types import WINDOWS, Geometry
from impress.write.folders import is_dir, locked_in, names_in, said_of_empty, unmounted
from tiers.files import (
    Locked,
    said_of_no_folder,
    segment_paths,
    sync_path,
    turn_at,
    unlock_file,
    write_whole,
)
from tiers.segments import SEGMENTS

log = logging.getLogger("impress")

IDENTITY: Final = "impress.json"
#: Beginnings of names beside which a directory counts as empty: its drafts, what `impress doctor`
#: measures with, and what is in every new ext4, which may be mounted as the store.
_OURS: Final = (f".{IDENTITY}", ".impress-doctor-", "lost+found")
_UUID_BYTES: Final = 16
#: Ids a shard may give its spans; shard n's begin at n times this.
SPANS: Final = 1 << 40
#: With 2^20 segments each, their numbers fill 32 bits.
MOST_SHARDS: Final = 1 << 12
#: Where an index lies for the moment in which a purge puts another in its place.
GONE: Final = "index.gone"
#: The index that a rebuild has set aside, and the one, whole, that is to take its place.
OLD: Final = "index.old"
MADE: Final = "index.made"
_NUMBER: Final = re.compile("[1-9][0-9]{0,3}")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a directory was made for; never changes."""

    format: int
    uuid: bytes
    geometry: Geometry
    window: int


def read_identity(path: Path) -> Identity:
    """Raises FormatError where there is no store, or one this version cannot read."""
    version, raw = _read_raw(path)
    if version > VERSION:
        raise FormatError(
            f"{path}: format {version}, this version reads up to {VERSION}; upgrade impress-kv"
        )
    if version < VERSION:
        raise FormatError(
            f"{path}: format {version} is older than this version reads ({VERSION}); opened for "
            "writing it is set aside and an empty store begins"
        )
    try:
        geometry, window = Geometry(**raw["geometry"]), raw["window"]
        if type(window) is not int or window not in WINDOWS:
            raise ValueError(f"window {window!r}")
        uuid = bytes.fromhex(raw["uuid"])
        if len(uuid) != _UUID_BYTES:
            raise ValueError(f"uuid {raw['uuid']!r}")
        return Identity(version, uuid, geometry, window)
    except (ValueError, KeyError, TypeError, BadInput) as err:
        raise _no_identity(path / IDENTITY, err) from None


def _no_identity(file: Path, err: Exception) -> FormatError:
    what = f"not a store's identity ({err}); move it away, then impress rebuild"
    return FormatError(f"{file}: {what}")


def _read_raw(path: Path) -> tuple[int, dict[str, Any]]:
    """(format, everything) of the identity file, whatever the format."""
    file = path / IDENTITY
    try:
        raw: dict[str, Any] = json.loads(file.read_text())
        version = raw["format"]
        if type(version) is not int or version < 1:
            raise TypeError(f"format {version!r}")
        return version, raw
    except FileNotFoundError:
        _check_lost(path)
        raise FormatError(
            f"{path}: no store here (no {IDENTITY}): nothing is stored yet, or name it by --store "
            "or IMPRESS_STORE"
        ) from None
    except NotADirectoryError:
        raise FormatError(f"{path}: not a directory") from None
    except OSError as err:  # no permission, no more files for this process
        raise StoreFailed(f"{file}: {err.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise _no_identity(file, err) from None


def _check_lost(path: Path) -> None:
    """Raises FormatError where a directory without an identity holds a store's segments."""
    if any(shard.has_segments() for shard in shards_of(path)):
        raise FormatError(
            f"{path}: {IDENTITY} is missing; impress rebuild makes it again from the segments"
        )


def make_identity(path: Path, geometry: Geometry, window: int) -> None:
    """Make an empty directory a store. A directory with foreign files is refused, untouched.

    Where another process makes it a store meanwhile, what that process wrote stays: read it.
    """
    try:
        new = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in new:
            with suppress(PermissionError):  # a folder that may be written but not read
                sync_path(folder.parent)
        foreign = [p.name for p in path.iterdir() if not p.name.startswith(_OURS)]
        if foreign and not (path / IDENTITY).exists():
            _check_lost(path)
            raise FormatError(
                f"{path}: holds {foreign[0]!r} and is no store; name an empty directory"
            )
        identity = Identity(VERSION, secrets.token_bytes(_UUID_BYTES), geometry, window)
        with suppress(FileExistsError):
            restore_identity(path, identity, replace=False)
    except OSError as err:
        raise StoreFailed(f"{path}: {err.strerror}") from None


def restore_identity(path: Path, identity: Identity, *, replace: bool = True) -> None:
    """Write the identity file. Raises OSError."""
    names = ("n_layers", "n_heads", "n_kv_heads", "head_dim", "dtype", "v_head_dim")
    raw = {
        "format": identity.format,
        "uuid": identity.uuid.hex(),
        "geometry": {name: getattr(identity.geometry, name) for name in names},
        "window": identity.window,
    }
    said = (json.dumps(raw, indent=1) + "\n").encode()
    write_whole(path / IDENTITY, said, replace=replace)


def matching_identity(path: Path, geometry: Geometry, window: int, *, create: bool) -> Identity:
    """The directory's identity, made if `create` and empty; StoreMismatch names both values."""
    try:
        new = create and not (path / IDENTITY).exists()
        if new and path.exists() and not path.is_dir():
            raise FormatError(f"{path}: not a directory")
    except OSError as err:  # a directory that may not be looked into, a name too long
        raise StoreFailed(f"{path}: {err.strerror}") from None
    if new:
        make_identity(path, geometry, window)
    if create and _read_raw(path)[0] < VERSION:
        try:
            with turn_at(path):  # of the folder itself: its other locks are in what is moved
                fresh = Identity(VERSION, secrets.token_bytes(_UUID_BYTES), geometry, window)
                if (old := _read_raw(path)[0]) < VERSION:  # else another was first
                    _set_aside(path, old, fresh)
        except OSError as err:
            raise StoreFailed(f"{path}: {err.strerror}") from None
    identity = read_identity(path)
    if identity.geometry.dtype != geometry.dtype:
        raise StoreMismatch(
            f"{path}: the store holds {identity.geometry.dtype}, asked for {geometry.dtype}; "
            "use another directory"
        )
    if identity.geometry != geometry:
        raise StoreMismatch(
            f"{path}: the store's geometry is {identity.geometry}, asked for {geometry}; "
            "use another directory"
        )
    if identity.window != window:
        raise StoreMismatch(
            f"{path}: the store's window is {identity.window} tokens, asked for {window}; "
            f"set Config(window={identity.window}) or use another directory"
        )
    return identity


def _set_aside(path: Path, old: int, identity: Identity) -> None:
    """Move what an older format wrote out of the way, and begin an empty store in its place.

    Raises StoreLocked while somebody still writes it, OSError. A crash on the way is made good by
    the next open: the identity says the older format until all the rest is done.
    """
    shards = shards_of(path) or [Shard(path)]
    try:
        if (path / "shards").is_dir():
            for shard in shards:
                shard.lock()
            names = [f"set-aside-format-{old}", *(f"set-aside-format-{old}-{n}" for n in range(99))]
            aside = next(path / name for name in names if not (path / name).exists())
            (path / "shards").rename(aside)
            log.warning(
                "%s: format %d is no longer read: set aside in %s, delete it when you like; an "
                "empty store begins", path, old, aside.name,
            )  # fmt: skip
        restore_identity(path, identity)
    finally:
        for shard in shards:
            shard.unlock()


class Shard:
    """One writer's part of a directory. `lock` it before writing anything in it.

    Shard 0 is called main. A shard's number is part of all its span ids and segment numbers, so
    that no two shards have one in common.
    """

    def __init__(self, path: Path, number: int = 0) -> None:
        self.number = number
        self.name = str(number) if number else "main"
        self.path = path / "shards" / self.name
        self.index = self.path / "index"
        self.segments = self.path / "segments"
        self.params = self.path / "params"
        self.readers = self.path / "readers"
        self.spans = range(number * SPANS, (number + 1) * SPANS)
        self.is_kept = False
        """Whether it stays locked until the process ends: something hangs that may write there."""
        self._fd: Locked | None = None

    def lock(self) -> None:
        """Become the writer. Raises StoreLocked at once when somebody else is; StoreFailed, also
        where its disk is not mounted: what is begun in its place gives out the same ids."""
        if said := said_of_empty(self.path):
            raise StoreFailed(said)
        try:
            self._fd = locked_in(self.path, "lock")
            if self._fd is None:
                raise StoreLocked(
                    f"{self.path.parent.parent}: shard {self.name} is open for writing by process "
                    f'{self.holder()}; close it, name another shard, or open with mode="r"'
                )
            with suppress(OSError):  # for a message; truncated first, it would want a new block
                os.ftruncate(self._fd, os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0))
            gone = self.index.with_name(GONE)
            if gone.is_dir():  # a purge was cut off
                if self.index.is_dir():
                    shutil.rmtree(gone)  # what it holds was to be erased
                else:
                    gone.rename(self.index)
            made = self.index.with_name(MADE)
            if made.is_dir():  # a rebuild was cut off
                if self.index.is_dir():
                    shutil.rmtree(made)
                else:
                    made.rename(self.index)
        except OSError as err:
            self.unlock()
            raise StoreFailed(f"{self.path}: {err.strerror}") from None
        except BaseException:
            self.unlock()
            raise

    def n_misnamed(self) -> int:
        """Segments here that are numbered as another folder's: this one was renamed, or is a copy,
        and nobody writes to them. Raises OSError."""
        numbers = (int(path.stem) // SEGMENTS for path in segment_paths(self.segments))
        return sum(number != self.number for number in numbers)

    RENAMED: Final = (
        "give a folder that was renamed its name back, or, where there are others beside them, "
        f"move them to that of their number (N.seg to shards/M/segments, M = N // {SEGMENTS}, "
        "for 0 main), and run impress rebuild; or delete a copy"
    )
    """What to do where some segments are misnamed."""

    def check_index(self) -> None:
        """Raises FormatError where segments lie here without an index, or a purge was cut off;
        StoreFailed where that cannot be told, or its disk is not mounted."""
        if said := self.unmounted():
            raise StoreFailed(said)
        if self.is_purged() and not is_dir(self.index):
            raise FormatError(
                f"{self.path.parent.parent}: a purge of shard {self.name} was cut off: repeat it"
            )
        # A new, empty index would take all that the segments hold for free space.
        if not self.has_index() and self.has_segments():
            raise FormatError(
                f"{self.path.parent.parent}: the index of shard {self.name} is missing; "
                "impress rebuild makes it again from the segments"
            )

    def has_index(self) -> bool:
        """Whether its file is there and holds anything; True where that cannot be told.

        A folder alone was left by an open that was cut off, or has lost its file.
        """
        try:
            return (self.index / "data.mdb").stat().st_size > 0
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # LMDB says what is wrong with it
            return True

    def has_segments(self) -> bool:
        """Whether there are any. Raises StoreFailed: what cannot be listed may hold some."""
        return any(name.endswith(".seg") for name in names_in(self.segments))

    def is_purged(self) -> bool:
        """Whether a purge is under way here, or was cut off. Raises StoreFailed."""
        return is_dir(self.path / GONE)

    def unmounted(self) -> str:
        """See impress.write.folders."""
        return unmounted(self.path, self.segments)

    def unlock(self) -> None:
        if self._fd is not None:
            unlock_file(self._fd)
            self._fd = None

    def holder(self) -> str:
        """The process that has it open for writing, or had it last; "unknown" where none says."""
        try:
            return (self.path / "lock").read_text().strip() or "unknown"
        except (OSError, UnicodeDecodeError):
            return "unknown"


@contextmanager
def writing(shard: Shard) -> Iterator[None]:
    """Where a shard is locked and no other can be named, says what helps. Raises StoreLocked;
    StoreFailed where its disk is not mounted: a command begins nothing in its place."""
    if said := shard.unmounted():
        raise StoreFailed(said)
    try:
        yield
    except StoreLocked:
        raise StoreLocked(
            f"{shard.path.parent.parent}: shard {shard.name} is open for writing by process "
            f"{shard.holder()}: stop that process, then repeat"
        ) from None


def shards_of(path: Path) -> list[Shard]:
    """Every shard of a directory in which something was ever stored, by number.

    Even one in which a purge was cut off, leaving only the index it was to replace, counts, and one
    on a disk that is not mounted: what hangs from it does not hang in the air, and is not all that
    a purge has to erase. Raises StoreFailed where that cannot be told.
    """
    folder = path / "shards"
    if said := said_of_no_folder(folder):
        raise StoreFailed(f"{path}/{said}")
    names = names_in(folder)
    numbers = [0 if n == "main" else int(n) for n in names if n == "main" or is_number(n)]
    shards = [Shard(path, n) for n in sorted(numbers)]
    return [
        s for s in shards if s.has_index() or s.unmounted() or s.is_purged() or s.has_segments()
    ]


def is_number(name: str) -> bool:
    return _NUMBER.fullmatch(name) is not None and int(name) < MOST_SHARDS


def locked_shard(path: Path, number: int | None) -> Shard:
    """The shard of that number, locked; None: the first that nobody has, and whose disk is mounted.
    Raises StoreLocked, StoreFailed."""
    if number is not None:
        shard = Shard(path, number)
        shard.lock()
        return shard
    for n in range(MOST_SHARDS):
        shard = Shard(path, n)
        if shard.unmounted():  # it is left out, and named, as others' that cannot be read
            continue
        try:
            shard.lock()
        except StoreLocked:
            continue
        return shard
    raise StoreLocked(f"{path}: all of {MOST_SHARDS} shards are open for writing")
