"""What makes a directory a store: its identity file, its shard, the writer's lock.

STORE/impress.json              format, uuid, geometry, window: written once, atomically
STORE/shards/main/lock          held by the one writer of the shard (flock)
STORE/shards/main/index/        LMDB
STORE/shards/main/segments/     NNNNNNNN.seg
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from impress.errors import BadInput, FormatError, StoreFailed, StoreLocked, StoreMismatch
from impress.spans.format import VERSION
from impress.types import Geometry
from tiers.files import write_whole

log = logging.getLogger("impress")

IDENTITY: Final = "impress.json"


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
        geometry = Geometry(**raw["geometry"])
        return Identity(version, bytes.fromhex(raw["uuid"]), geometry, raw["window"])
    except (ValueError, KeyError, TypeError, BadInput) as err:
        raise FormatError(f"{path / IDENTITY}: not a store's identity ({err})") from None


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
        raise FormatError(f"{path}: no store here (no {IDENTITY})") from None
    except NotADirectoryError:
        raise FormatError(f"{path}: not a directory") from None
    except PermissionError as err:
        raise StoreFailed(f"{file}: {err.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise FormatError(f"{file}: not a store's identity ({err})") from None


def make_identity(path: Path, geometry: Geometry, window: int) -> Identity:
    """Make an empty directory a store. A directory with foreign files is refused, untouched."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        foreign = [p.name for p in path.iterdir() if not p.name.startswith(f".{IDENTITY}")]
        if foreign:
            raise FormatError(
                f"{path}: holds {foreign[0]!r} and is no store; name an empty directory"
            )
        identity = Identity(VERSION, secrets.token_bytes(16), geometry, window)
        restore_identity(path, identity)
    except OSError as err:
        raise StoreFailed(f"{path}: {err.strerror}") from None
    return identity


def restore_identity(path: Path, identity: Identity) -> None:
    """Write the identity file. Raises OSError."""
    names = ("n_layers", "n_heads", "n_kv_heads", "head_dim", "dtype", "v_head_dim")
    raw = {
        "format": identity.format,
        "uuid": identity.uuid.hex(),
        "geometry": {name: getattr(identity.geometry, name) for name in names},
        "window": identity.window,
    }
    write_whole(path / IDENTITY, (json.dumps(raw, indent=1) + "\n").encode())


def matching_identity(path: Path, geometry: Geometry, window: int, *, create: bool) -> Identity:
    """The directory's identity, made if `create` and empty; StoreMismatch names both values."""
    if create and not (path / IDENTITY).exists():
        if path.exists() and not path.is_dir():
            raise FormatError(f"{path}: not a directory")
        return make_identity(path, geometry, window)
    if create and (old := _read_raw(path)[0]) < VERSION:
        return _set_aside(path, old, geometry, window)
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


def _set_aside(path: Path, old: int, geometry: Geometry, window: int) -> Identity:
    """Move what an older format wrote out of the way, and begin an empty store in its place.

    Raises StoreLocked while somebody still writes it. A crash on the way is made good by the next
    open: the identity says the older format until all the rest is done.
    """
    identity = Identity(VERSION, secrets.token_bytes(16), geometry, window)
    shard = Shard(path)
    try:
        if shard.path.parent.is_dir():
            shard.lock()
            names = [f"set-aside-format-{old}", *(f"set-aside-format-{old}-{n}" for n in range(99))]
            aside = next(path / name for name in names if not (path / name).exists())
            shard.path.parent.rename(aside)
            log.warning(
                "%s: format %d is no longer read: set aside in %s, delete it when you like; an "
                "empty store begins", path, old, aside.name,
            )  # fmt: skip
        restore_identity(path, identity)
    except OSError as err:
        raise StoreFailed(f"{path}: {err.strerror}") from None
    finally:
        shard.unlock()
    return identity


class Shard:
    """One writer's part of a directory. `lock` it before writing anything in it."""

    def __init__(self, path: Path, name: str = "main") -> None:
        self.path = path / "shards" / name
        self.index = self.path / "index"
        self.segments = self.path / "segments"
        self.params = self.path / "params"
        self._fd = -1

    def lock(self) -> None:
        """Become the writer. Raises StoreLocked at once when somebody is."""
        try:
            for folder in (self.path.parent, self.path):  # parents=True would ignore the mode
                folder.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as err:
            raise StoreFailed(f"{self.path}: {err.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "another process"
            os.close(fd)
            raise StoreLocked(
                f"{self.path.parent.parent}: open for writing by process {holder}; "
                'close it, or open with mode="r"'
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def unlock(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
