"""What the weight files of a model directory hold: a digest of every byte.

Files used to be sampled: models that differed by an attention head then shared a name, and answered
from each other's rows. The digest is kept in the user's cache directory until a file changes.
Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from impress.config import cache_dir
from impress.errors import BadInput, ConfigError

#: What reading a JSON file may raise; the last if thousands of brackets are open.
_UNREADABLE = (OSError, ValueError, RecursionError)

_SMALL_BYTES = 1 << 20  # larger data gets a sum of its own, which is ten times as fast
_HEAD_BYTES = 64 << 10
_CHUNK_BYTES = 4 << 20  # read at once: stays in a processor's cache
_MAX_HEADER_BYTES = 100 << 20  # what the safetensors library accepts
_RULES = 3  # of digests; those cached under other rules are made again

#: For each file: name, inode, size, mtime and ctime.
Stamp = list[tuple[str, int, int, int, int]]


class StoredTensor(NamedTuple):
    """One tensor in a safetensors file that is open."""

    name: str
    dtype: str  # safetensors code
    shape: tuple[int, ...]
    n_bytes: int
    file: FileIO
    at: int  # of its first byte in the file

    def read(self, first: int, end: int) -> bytes:
        """Bytes of its data. Raises BadInput where the file does not have them."""
        try:
            piece = os.pread(self.file.fileno(), end - first, self.at + first)
        except OSError as err:
            raise BadInput(f"namespace: cannot read {self.file.name}: {err}") from None
        if len(piece) != end - first:
            raise BadInput(f"namespace: {self.file.name}: {self.name} ends past the file")
        return piece


def weights_of(directory: Path, files: Sequence[Path] | None = None) -> bytes:
    """The digest of a directory's weights, from the user's cache where the files are unchanged.

    `files`: those in it that hold the weights, where these are not a model's. Raises BadInput where
    one cannot be read.
    """
    try:
        return _weights_of(directory, weight_files(directory) if files is None else files)
    except OSError as err:
        where = err.filename or directory
        raise BadInput(f"namespace: cannot read {where}: {err.strerror}") from None


def _weights_of(directory: Path, files: Sequence[Path]) -> bytes:
    stamp: list[list[Any]] = [["rules", _RULES]]
    is_clocked = True
    for path in files:
        stat = path.stat()
        # ctime reveals a copy that kept size and mtime; but not in an image, where it is what the
        # image's maker set, in whole seconds.
        stamp.append([path.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns])
        is_clocked &= stat.st_ctime_ns % 10**9 > 0
    cached = _cache_path(directory) if is_clocked else None
    known = None if cached is None else _read_cached(cached, stamp)
    if known is not None:
        return known
    digest = hashlib.blake2b(digest_size=32, person=b"impress-wts-v1")
    for path in files:
        if path.suffix == ".safetensors":
            for tensor in stored_tensors(path):
                name, dtype, shape, n_bytes, *_ = tensor
                add_tensor(digest, name, dtype, shape, n_bytes, tensor.read)
        else:
            _add_file(digest, path)
    if cached is not None:
        _write_cached(cached, stamp, digest.digest())
    return digest.digest()


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights, in a fixed order. Raises BadInput when there are none.

    Indexed shards and a single file beside them are both read: an engine loads one or the other.
    Transformers ignores an index of torch.save's shards where it finds either.
    """
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    files = _indexed_files(index) if index.is_file() else []
    if single.is_file() and single not in files:
        files.append(single)
    index, single = directory / "pytorch_model.bin.index.json", directory / "pytorch_model.bin"
    if not files and index.is_file():
        files = _indexed_files(index)
        if single.is_file() and single not in files:
            files.append(single)
    if files:
        return files
    for pattern in ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth"):
        found = sorted(path for path in directory.glob(pattern) if path.is_file())
        if found and single.is_file() and single not in found:
            found.append(single)  # beside an adapter's safetensors, say
        if found:
            return found
    raise BadInput(f"namespace: {directory} holds no weights")


def stamp_of(directory: Path) -> Stamp:
    """A stamp that changes once a model's files are replaced. Raises BadInput and OSError."""
    stats = [(path, path.stat()) for path in [directory / "config.json", *weight_files(directory)]]
    return [(p.name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for p, s in stats]


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [index.parent / name for name in names]
    except (*_UNREADABLE, KeyError, TypeError, AttributeError) as err:
        raise BadInput(f"namespace: cannot read {index}: {err!r}") from None
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise BadInput(f"namespace: {index.parent} lacks {missing[0]}, which its index names")
    return files


def stored_tensors(path: Path) -> Iterator[StoredTensor]:
    """Every tensor of a safetensors file, by name; each can be read until the next is asked for.

    Raises BadInput on a broken file.
    """
    try:
        with path.open("rb", buffering=0) as file:
            size = path.stat().st_size
            (n_header,) = struct.unpack("<Q", file.read(8))
            if n_header > min(size, _MAX_HEADER_BYTES):
                raise ValueError(f"header of {n_header} bytes")
            header = json.loads(file.read(n_header))
            header.pop("__metadata__", None)
            for name in sorted(header):
                entry = header[name]
                first, end = (operator.index(at) for at in entry["data_offsets"])
                at = 8 + n_header + first
                if not 0 <= first <= end or at + end - first > size:
                    raise ValueError(f"{name} ends past the file")
                shape = tuple(entry["shape"])
                yield StoredTensor(name, entry["dtype"], shape, end - first, file, at)
    except (*_UNREADABLE, KeyError, TypeError, AttributeError, struct.error) as err:
        raise BadInput(f"namespace: {path} is no readable safetensors file: {err}") from None


def chunks(n_bytes: int) -> Iterator[tuple[int, int]]:
    """The byte ranges (first, end) in which a tensor's data in row-major order are read."""
    for first in range(0, n_bytes, _CHUNK_BYTES):
        yield first, min(first + _CHUNK_BYTES, n_bytes)


def add_tensor(
    digest: hashlib.blake2b, name: str, dtype: str, shape: tuple[int, ...], n_bytes: int,
    read: Callable[[int, int], bytes],
) -> None:  # fmt: skip
    """Add a tensor's title and its data, read(first, end), to a digest."""
    title = json.dumps([name, dtype, list(shape), n_bytes]).encode()
    digest.update(struct.pack("<Q", len(title)) + title)
    _add_data(digest, n_bytes, read)


def _add_data(digest: hashlib.blake2b, n_bytes: int, read: Callable[[int, int], bytes]) -> None:
    if n_bytes <= _SMALL_BYTES:
        digest.update(read(0, n_bytes) if n_bytes else b"")
        return
    data = xxhash.xxh3_128()
    for first, end in chunks(n_bytes):
        data.update(read(first, end))
    digest.update(data.digest())


def _add_file(digest: hashlib.blake2b, path: Path) -> None:
    """Name, size and data of a file of any format."""
    size = path.stat().st_size
    digest.update(json.dumps([path.name, size]).encode())
    with path.open("rb", buffering=0) as file:

        def read(first: int, end: int) -> bytes:
            return os.pread(file.fileno(), end - first, first)

        if size > _HEAD_BYTES:
            _add_data(digest, size, read)
        else:  # twice, as it always was: stores depend on it
            digest.update(read(0, size) * 2)


# --- the cached digest ----------------------------------------------------------------------------


def _cache_path(directory: Path) -> Path | None:
    """None where this user has no place for it: the digest is computed each time."""
    name = hashlib.blake2b(os.fsencode(directory), digest_size=16).hexdigest()
    try:
        return cache_dir() / "weights" / f"{name}.json"
    except ConfigError:
        return None


def _read_cached(path: Path, stamp: list[list[Any]]) -> bytes | None:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["files"] != stamp:
            return None
        digest = bytes.fromhex(known["digest"])
    except (*_UNREADABLE, KeyError, TypeError):
        return None
    return digest if len(digest) == 32 else None


def _write_cached(path: Path, stamp: list[list[Any]], digest: bytes) -> None:
    """Replace the cached digest in one step. Without a writable cache it is computed each time."""
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh.unlink(missing_ok=True)  # left by a killed process: in containers process ids recur
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(fresh, flags, 0o600), "w", encoding="utf-8") as file:
            json.dump({"files": stamp, "digest": digest.hex()}, file)
        fresh.replace(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
