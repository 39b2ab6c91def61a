"""Parameters of fitted probe codecs: records of their own, named by the digest of their bytes.

    STORE/shards/NAME/params/<64 hex digits>    all layers of one fit; written once, never changed
    STORE/shards/NAME/params/current.json       for the writer: (namespace, codec) -> digest

A span's header names the digest of the parameters its records were made with. A reader of those
records reads the file of that name and compares its digest: a file that is missing or does not
match gives no parameters, never wrong ones. Layouts are in docs/FORMAT.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from impress.errors import StoreFailed
from tiers.files import check_room, make_folder, write_whole
from tiers.ticket import until

log = logging.getLogger("impress")

Layers = tuple[bytes, ...]

DIGEST_BYTES: Final = 32
NONE: Final = bytes(DIGEST_BYTES)  # in a header: made without parameters
#: Most bytes of one record; and of all records of a store together, on disk and in memory.
MOST_RECORD_BYTES: Final = 256 << 20
MOST_BYTES: Final = 1 << 30

_MAGIC: Final = b"IMPPARM1"
_HEAD: Final = struct.Struct("<8sI4x")  # magic, number of layers; then the byte size of each as u64
_CURRENT: Final = "current.json"
_RECORD: Final = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


def encode_params(layers: Sequence[bytes]) -> bytes:
    """One record of all layers' parameters."""
    sizes = struct.pack(f"<{len(layers)}Q", *(len(layer) for layer in layers))
    return _HEAD.pack(_MAGIC, len(layers)) + sizes + b"".join(layers)


def decode_params(raw: bytes) -> Layers | None:
    """The layers of a record; None when it is not a record."""
    if len(raw) < _HEAD.size:
        return None
    magic, n = _HEAD.unpack_from(raw)
    at = _HEAD.size + 8 * n
    if magic != _MAGIC or at > len(raw):
        return None
    sizes = struct.unpack_from(f"<{n}Q", raw, _HEAD.size)
    if at + sum(sizes) != len(raw):
        return None
    layers = []
    for size in sizes:
        layers.append(raw[at : at + size])
        at += size
    return tuple(layers)


def digest_of(raw: bytes) -> bytes:
    """The digest that names a record."""
    return hashlib.blake2b(raw, digest_size=DIGEST_BYTES, person=b"impress-params").digest()


class Params:
    """The records of one shard. Thread-safe; only `forget` raises on disk errors."""

    def __init__(
        self, folder: Path, *, write: bool, others: Callable[[], Iterable[Path]] = tuple
    ) -> None:
        """`others`: folders of other shards, where records may be too: their names are digests."""
        self._folder = folder
        self._others = others
        self._write = write
        self._turn = threading.Lock()  # held while files change
        self._retired = False
        self._lock = threading.Lock()
        self._cached: OrderedDict[bytes, Layers] = OrderedDict()
        self._current = self._read_current()
        # Nothing new is made with these: they are not here, or do not match their name.
        self._missing = {d for d in self._current.values() if not (folder / d.hex()).exists()}
        self._damaged = set[bytes]()  # everywhere: not read again, a hundred megabytes a request
        self.n_forgets = 0
        """Calls of `forget` so far."""

    def current(self, namespace: bytes, codec: str) -> bytes | None:
        """Digest of the parameters that new spans are made with; None until there are any."""
        with self._lock:
            digest = self._current.get(_key(namespace, codec))
            return None if digest in self._missing else digest

    def namespaces(self) -> set[bytes]:
        """Namespaces to which something kept here was fitted."""
        found = set()
        with self._lock:
            for key in self._current:
                with suppress(ValueError):
                    found.add(bytes.fromhex(key.partition("/")[0]))
        return found

    def known(self, digest: bytes) -> Layers | None:
        """The parameters of that name, by layer, where they have been read; reads nothing."""
        with self._lock:
            if digest in self._cached:
                self._cached.move_to_end(digest)
            return self._cached.get(digest)

    def layers(self, digest: bytes) -> Layers | None:
        """The parameters of that name, by layer; None where they cannot be had. Reads once."""
        if (known := self.known(digest)) is not None:
            return known
        with self._lock:
            if digest in self._damaged:
                return None
        found = self._read(digest)
        if found is not None:
            self._keep(digest, found)
        return found

    def add(
        self, namespace: bytes, codec: str, layers: Sequence[bytes], n_forgets: int
    ) -> bytes | None:
        """Keep a fit under its digest, returned once it is on stable storage; None if it will not.

        `n_forgets`: as when the fit began. What it was fitted to may have been forgotten since.
        Raises StoreFailed where the disk, or the system, does not take it now.
        """
        raw = encode_params(layers)
        if not self._write or len(raw) > MOST_RECORD_BYTES or self._used() + len(raw) > MOST_BYTES:
            log.warning(
                "probe parameters of %s: %d bytes are too many: a record may have %d, all of a "
                "shard %d; impress purge --namespace frees those of a model that is gone",
                codec, len(raw), MOST_RECORD_BYTES, MOST_BYTES,
            )  # fmt: skip
            return None
        digest = digest_of(raw)
        with self._turn:
            if n_forgets != self.n_forgets or self._retired:
                return None
            key = _key(namespace, codec)
            known = self._current or self._read_current()  # there may have been no file to open
            current, before = {**known, key: digest}, known.get(key)
            try:
                make_folder(self._folder)
                check_room(self._folder, len(raw))
                if before in self._missing and before not in current.values():
                    self._erase(before)  # what could not be erased when it was forgotten
                self._say(current)  # first: by its name `forget` finds what a crash leaves of it
                write_whole(self._folder / digest.hex(), raw)
            except OSError as err:
                raise StoreFailed(f"{codec}: {err}") from None
            with self._lock:
                self._current = current
                self._missing.discard(digest)
                self._damaged.discard(digest)
            self._keep(digest, tuple(layers))
        return digest

    def forget(self, namespaces: Iterable[bytes]) -> None:
        """Delete what was fitted to these namespaces' keys; their next fit starts afresh.

        It is overwritten first: a basis tells something of the tokens it was fitted to. One that
        another namespace has as well, as its first prompts had the same keys, stays for that one.
        Raises StoreFailed where the disk refuses this: the next call still finds them.
        """
        begins = tuple(f"{namespace.hex()}/" for namespace in namespaces)
        with self._turn:
            self.n_forgets += 1
            current = self._current or self._read_current(must=True)
            kept = self._kept() if self._write else set()
            with self._lock:
                gone = {key: d for key, d in current.items() if key.startswith(begins)}
                left = {key: d for key, d in current.items() if key not in gone}
                # Records no entry names, as that file was damaged: nobody knows whose they are.
                lost = {*gone.values(), *kept} - set(left.values())
                self._missing |= lost  # used for nothing new, whatever comes of this
                for digest in lost:
                    self._cached.pop(digest, None)
            if not (gone or lost) or not self._write:
                return
            if self._retired:
                raise StoreFailed(f"probe parameters: {self._folder}: closed before; purge again")
            try:
                mine = {*gone.values()}
                for digest in sorted(lost, key=lambda digest: digest not in mine):
                    self._erase(digest)
                self._say(left)
            except OSError as err:
                why = err.strerror or err
                raise StoreFailed(
                    f"probe parameters: {self._folder}: not erased: {why}; purge again"
                ) from None
            with self._lock:
                self._current = left
                self._missing -= lost

    def retire(self, timeout_s: float) -> bool:
        """The folder is to be another's: nothing changes there any more. False: something does."""
        self._retired = True  # first: a call that begins after this does nothing
        return until(lambda: not self._turn.locked(), timeout_s)

    def _erase(self, digest: bytes) -> None:
        """Erase a record, and what a crash left of it while it was written. Raises OSError."""
        for path in self._folder.glob(f"*{digest.hex()}*"):
            with path.open("r+b") as file:
                file.write(bytes(path.stat().st_size))
                file.flush()
                os.fsync(file.fileno())
            path.unlink()

    def _kept(self) -> set[bytes]:
        """Digests of the records that lie here, even in part. Raises StoreFailed."""
        names = list[str]()
        try:
            with suppress(FileNotFoundError):
                names = [path.name for path in self._folder.iterdir()]
        except OSError as err:
            said = f"probe parameters: {self._folder}: {err.strerror}; purge again"
            raise StoreFailed(said) from None
        return {bytes.fromhex(found[0]) for name in names if (found := _RECORD.search(name))}

    def _say(self, current: dict[str, bytes]) -> None:
        said = {key: digest.hex() for key, digest in current.items()}
        write_whole(self._folder / _CURRENT, json.dumps(said, indent=1).encode())

    def _keep(self, digest: bytes, layers: Layers) -> None:
        with self._lock:
            self._cached[digest] = layers
            while sum(len(one) for each in self._cached.values() for one in each) > MOST_BYTES:
                self._cached.popitem(last=False)

    def _read(self, digest: bytes) -> Layers | None:
        damaged = False
        for folder in (self._folder, *self._others()):
            raw = _read_in(folder / digest.hex())
            if raw is None:
                continue
            if digest_of(raw) == digest:
                return decode_params(raw)
            log.warning("%s: does not match its name; not used", folder / digest.hex())
            damaged = True
        if damaged:
            with self._lock:
                self._damaged.add(digest)
                self._missing.add(digest)
        return None

    def _used(self) -> int:
        try:
            return sum(path.stat().st_size for path in self._folder.iterdir())
        except OSError:
            return 0

    def _read_current(self, *, must: bool = False) -> dict[str, bytes]:
        """The digests in use; empty if the file is missing, damaged or unreadable: parameters are
        then fitted again. `must`: StoreFailed where the file is there and cannot be read."""
        path = self._folder / _CURRENT
        try:
            said = json.loads(path.read_text())
            found = {str(key): bytes.fromhex(value) for key, value in said.items()}
        except OSError as err:
            if must and not isinstance(err, FileNotFoundError | NotADirectoryError):
                raise StoreFailed(
                    f"probe parameters: {path}: {err.strerror}; purge again"
                ) from None
            return {}
        except (ValueError, TypeError, AttributeError, RecursionError):
            return {}
        return {key: digest for key, digest in found.items() if len(digest) == DIGEST_BYTES}


def _read_in(path: Path) -> bytes | None:
    try:
        return None if path.stat().st_size > MOST_RECORD_BYTES else path.read_bytes()
    except OSError:
        return None


def _key(namespace: bytes, codec: str) -> str:
    return f"{namespace.hex()}/{codec}"
