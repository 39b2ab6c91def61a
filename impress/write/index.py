"""The index on disk: LMDB, one value per span, written only by the committer thread.

An index, not a chunk store: values are small, data never passes through it. One environment per
path and process (LMDB's rule), shared by reference count, so a reader beside a writer works.
"""

from __future__ import annotations

import os
import shutil
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lmdb

from impress.errors import FormatError, ImpressError, StoreFailed
from tiers.files import sync_path

#: Address space, not disk: the file grows as it fills. Fixed, because growing a map under a live
#: reader is not refused by LMDB and corrupts it.
MAP_BYTES: Final = 64 << 30

#: What LMDB says of a file that is not sound, as opposed to one that may not be opened or is full.
_DAMAGE: Final = (
    lmdb.BadDbiError, lmdb.BadTxnError, lmdb.CorruptedError, lmdb.InvalidError, lmdb.NotFoundError,
    lmdb.PageNotFoundError, lmdb.VersionMismatchError,
)  # fmt: skip

_HEAT = struct.Struct("<QQ")
_NAMES: Final = ("spans", "heat", "names", "history", "guard")
_LATER: Final = ("history", "guard")  # stores written before these existed lack them
#: In `history`, where every other key is a span id: requests noted, and what budget.py dumps.
_TICK: Final = b"tick"
_WEAR: Final = b"wear"
_envs: dict[Path, tuple[Any, int]] = {}
_envs_lock = threading.Lock()


def _open_env(folder: Path, *, create: bool) -> Any:
    with _envs_lock:
        env, count = _envs.get(folder, (None, 0))
        if env is None:
            writable = create or os.access(folder / "data.mdb", os.W_OK)
            env = lmdb.open(
                str(folder), map_size=MAP_BYTES, max_dbs=8, mode=0o600, create=create,
                readonly=not writable, lock=writable, readahead=False,
            )  # fmt: skip
            env.reader_check()  # slots of killed readers would hold old pages forever
        _envs[folder] = (env, count + 1)
        return env


def _close_env(folder: Path) -> None:
    with _envs_lock:
        env, count = _envs[folder]
        if count > 1:
            _envs[folder] = (env, count - 1)
        else:
            del _envs[folder]
            env.close()


class Index:
    """Spans, heat and history by span id, names of roots.

    Raises FormatError where LMDB finds its file damaged, StoreFailed on its other errors.
    """

    def __init__(self, folder: Path, *, create: bool) -> None:
        self._folder = folder.resolve()
        try:
            if create:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._env = _open_env(self._folder, create=create)
        except (lmdb.Error, OSError) as err:
            raise _said(self._folder, err) from err
        try:
            _check_whole(self._env, self._folder)
            self._dbs = {name: self._open_db(name, create=create) for name in _NAMES}
        except (lmdb.Error, OSError) as err:
            _close_env(self._folder)
            raise _said(self._folder, err) from err
        except FormatError:
            _close_env(self._folder)  # kept open, it would be what the rebuilt index's path gives
            raise

    def spans(self, after: int = -1) -> Iterator[tuple[int, bytes]]:
        """(span id, value) of every span with id > after, in id order. Holds a read transaction."""
        with self._read() as txn, txn.cursor(self._dbs["spans"]) as cursor:
            if cursor.set_range(_id(after + 1)):
                for key, value in cursor:
                    yield int.from_bytes(key, "big"), value

    def heat(self) -> dict[int, tuple[int, int]]:
        """Span id -> (leases, lease counter at the last one), as last committed."""
        with self._read() as txn, txn.cursor(self._dbs["heat"]) as cursor:
            return {
                int.from_bytes(key, "big"): _HEAT.unpack(value)
                for key, value in cursor
                if len(value) == _HEAT.size
            }

    def history(self, span: int) -> bytes | None:
        """What requests have shown of a span (impress.usage.remembered), as last committed."""
        if self._dbs["history"] is None:
            return None
        with self._read() as txn:
            value: bytes | None = txn.get(_id(span), db=self._dbs["history"])
            return value

    def history_tick(self) -> int:
        """Requests noted, as last committed."""
        if self._dbs["history"] is None:
            return 0
        with self._read() as txn:
            return int.from_bytes(txn.get(_TICK, b"", db=self._dbs["history"]), "little")

    def ledger(self, key: bytes) -> bytes | None:
        """A guard's ledger (impress.quality.ledgers), as last committed."""
        if self._dbs["guard"] is None:
            return None
        with self._read() as txn:
            value: bytes | None = txn.get(key, db=self._dbs["guard"])
            return value

    def ledgers(self) -> list[tuple[bytes, bytes]]:
        """Every guard's ledger, by key."""
        if self._dbs["guard"] is None:
            return []
        with self._read() as txn, txn.cursor(self._dbs["guard"]) as cursor:
            return [(bytes(key), bytes(value)) for key, value in cursor]

    def wear(self) -> bytes:
        """What the write budget said of itself (impress.write.budget), as last committed."""
        if self._dbs["history"] is None:
            return b""
        with self._read() as txn:
            return bytes(txn.get(_WEAR, b"", db=self._dbs["history"]))

    def names(self) -> dict[bytes, str]:
        """Root key -> what its namespace is called."""
        with self._read() as txn, txn.cursor(self._dbs["names"]) as cursor:
            return {bytes(key): value.decode(errors="replace") for key, value in cursor}

    def save_history(
        self, values: Mapping[int, bytes], tick: int, ledgers: Mapping[bytes, bytes]
    ) -> None:
        """What requests have shown, of spans that are still indexed, and of policies.

        One transaction. Only the committer calls. Raises StoreFailed.
        """
        spans, history = self._dbs["spans"], self._dbs["history"]
        try:
            with self._env.begin(write=True) as txn:
                for span, value in values.items():
                    if txn.get(_id(span), db=spans) is not None:
                        txn.put(_id(span), value, db=history)
                txn.put(_TICK, tick.to_bytes(8, "little"), db=history)
                for key, ledger in ledgers.items():
                    txn.put(key, ledger, db=self._dbs["guard"])
        except (lmdb.Error, OSError) as err:
            raise StoreFailed(f"index: commit to {self._folder}: {err}") from err

    def version(self) -> int:
        """Grows with every commit, by any process."""
        return int(self._env.info()["last_txnid"])

    def commit(
        self,
        put: Mapping[int, bytes],
        delete: Iterable[int] = (),
        heat: Mapping[int, tuple[int, int]] | None = None,
        names: Mapping[bytes, str] | None = None,
        wear: bytes = b"",
    ) -> None:
        """One durable transaction: on return it survives a power cut. Only the committer calls."""
        try:
            with self._env.begin(write=True) as txn:
                for span, value in put.items():
                    txn.put(_id(span), value, db=self._dbs["spans"])
                for root, name in (names or {}).items():
                    txn.put(root, name.encode(), db=self._dbs["names"])
                for span, counts in (heat or {}).items():
                    txn.put(_id(span), _HEAT.pack(*counts), db=self._dbs["heat"])
                if wear:
                    txn.put(_WEAR, wear, db=self._dbs["history"])
                for span in delete:
                    txn.delete(_id(span), db=self._dbs["spans"])
                    txn.delete(_id(span), db=self._dbs["heat"])
                    txn.delete(_id(span), db=self._dbs["history"])
        except (lmdb.Error, OSError) as err:
            raise StoreFailed(f"index: commit to {self._folder}: {err}") from err

    def close(self) -> None:
        _close_env(self._folder)

    def _open_db(self, name: str, *, create: bool) -> Any:
        """None for one that a store written before it existed does not have."""
        try:
            return self._env.open_db(name.encode(), create=create)
        except lmdb.NotFoundError:
            if name in _LATER:
                return None
            raise

    @contextmanager
    def _read(self) -> Iterator[Any]:
        """A read transaction. Raises FormatError where LMDB finds damage on the way."""
        try:
            with self._env.begin() as txn:
                yield txn
        except lmdb.Error as err:
            raise _said(self._folder, err) from err


def compact(folder: Path) -> None:
    """Write the index anew without what it has freed, and put it in the old one's place.

    For whoever holds the writer's lock, with no `Index` open on it. Raises StoreFailed.
    """
    folder = folder.resolve()
    draft = folder / "compact"
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        env = _open_env(folder, create=False)
        try:
            env.copy(str(draft), compact=True)
        finally:
            _close_env(folder)
        (draft / "data.mdb").chmod(0o600)
        sync_path(draft / "data.mdb")
        (draft / "data.mdb").replace(folder / "data.mdb")
        sync_path(folder)  # else a power cut could bring back what was erased
        shutil.rmtree(draft)
    except (lmdb.Error, OSError) as err:
        raise StoreFailed(f"index: {folder}: {err}") from err


def _said(folder: Path, err: Exception) -> ImpressError:
    """What is raised for an error of LMDB's or of the system."""
    if isinstance(err, _DAMAGE):
        again = "impress rebuild makes it again from the segments"
        return FormatError(f"index: {folder}: {err}; {again}")
    return StoreFailed(f"index: {folder}: {err}")


def _check_whole(env: Any, folder: Path) -> None:
    """Raises FormatError when the file is shorter than its pages: a touch would be SIGBUS."""
    want = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    size = (folder / "data.mdb").stat().st_size
    if size < want:
        raise FormatError(
            f"index: {folder / 'data.mdb'} is cut short: {size} of {want} bytes; "
            "impress rebuild makes it again from the segments"
        )


def _id(span: int) -> bytes:
    return span.to_bytes(8, "big")
