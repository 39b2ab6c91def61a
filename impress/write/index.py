"""The index on disk: LMDB, one value per span, written only by the committer thread.

An index, not a chunk store: values are small, data never passes through it.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import time
from typing import Any, Final, NamedTuple

import lmdb

from impress.errors import FormatError
from impress.spans.format import SpanRecord, encode_extents, encode_index, extents_of, split_index
from impress.write.changes import Change, decode, encode
from impress.write.env import (
    check_sound,
    close_env,
    commit_failed,
    error_of,
    folder_of,
    inode_of,
    open_dbs,
    open_env,
)
from tiers.files import make_folder, spare_of

#: How many ids are noted as given out at a time.
IDS: Final = 1024
_HEAT = struct.Struct("<QQ")
#: No store counts this far: the disk gave other bytes, and counting begins at 0 again.
_MOST_COUNT: Final = 1 << 62
#: How much the log keeps: a follower that is further behind reads the whole index again.
LOG_ENTRIES: Final = 1024
#: Bytes of it; on a small file system an eighth of what segments leave there for the index.
LOG_BYTES: Final = 8 << 20
#: In `history`, where every other key is a span id: requests noted, what budget.py dumps, and the
#: highest id that a header may bear.
_TICK: Final = b"tick"
_WEAR: Final = b"wear"
_LAST: Final = b"last"


class News(NamedTuple):
    """What a look at the log found. `values`: of the spans put, those still there."""

    version: int
    generation: int
    changes: list[Change]
    values: dict[int, bytes]


class Index:
    """Spans, heat and history by span id, names of roots; space that is still to be erased.

    Raises FormatError where LMDB finds its file damaged, StoreFailed on its other errors.
    """

    def __init__(self, folder: Path, *, create: bool) -> None:
        self._folder = folder_of(folder)
        self._erased: set[int] = set()  # spans erased and still noted
        self.last_span = 0  # the highest id the log knows to have been given out
        try:
            if create:
                make_folder(self._folder)
            self._shared, self._key = open_env(self._folder, create=create)
            self._env, self._open = self._shared.env, True
        except (lmdb.Error, OSError) as err:
            raise error_of(self._folder, err) from err
        try:
            self._shared.check_uncut(*self._key)  # first: others may have had it open for long
            check_sound(self._shared, self._folder)
            open_dbs(self._shared, create=create)
            self._dbs = self._shared.dbs
            self._log_bytes = min(LOG_BYTES, spare_of(self._folder) // 8 or LOG_BYTES)
            self._log = self._read_log()
            last = self._get("history", _LAST) or b""
            self.last_id = self._last_noted = int.from_bytes(last, "little")
        except (lmdb.Error, OSError) as err:
            close_env(self._key)
            raise error_of(self._folder, err, counted=self._shared.counted) from err
        except BaseException:  # what `_read` raises, and Ctrl-C
            close_env(self._key)  # kept open, it would be what the rebuilt index's path gives
            raise

    def spans(self) -> Iterator[tuple[int, bytes]]:
        """(span id, value) of every span, in id order. Holds a read transaction."""
        with self._read() as txn, txn.cursor(self._dbs["spans"]) as cursor:
            for key, value in cursor:
                yield int.from_bytes(key, "big"), value

    def heat(self) -> dict[int, tuple[int, int]]:
        """Span id -> (leases, lease counter at the last one), as last committed."""
        heat = {
            int.from_bytes(key, "big"): _HEAT.unpack(value)
            for key, value in self.items("heat")
            if len(value) == _HEAT.size
        }
        return {span: counts for span, counts in heat.items() if max(counts) < _MOST_COUNT}

    def history(self, span: int) -> bytes | None:
        """What requests have shown of a span (impress.usage.remembered), as last committed."""
        return self._get("history", _id(span))

    def history_tick(self) -> int:
        """Requests noted, as last committed."""
        tick = int.from_bytes(self._get("history", _TICK) or b"", "little")
        return tick if tick < _MOST_COUNT else 0

    def ledger(self, key: bytes) -> bytes | None:
        """A guard's ledger (impress.quality.ledgers), as last committed."""
        return self._get("guard", key)

    def ledgers(self) -> list[tuple[bytes, bytes]]:
        """Every guard's ledger, by key."""
        return list(self.items("guard"))

    def wear(self) -> bytes:
        """What the write budget said of itself (impress.write.budget), as last committed."""
        return self._get("history", _WEAR) or b""

    def names(self) -> dict[bytes, str]:
        """Root key -> what its namespace is called."""
        return {key: value.decode(errors="replace") for key, value in self.items("names")}

    def save_history(
        self, values: Mapping[int, bytes], tick: int, ledgers: Mapping[bytes, bytes],
        heat: Mapping[int, tuple[int, int]],
    ) -> None:  # fmt: skip
        """Save what requests have shown of spans still indexed and of policies; and heat.

        One transaction. Only the committer calls this. Raises StoreFailed.
        """
        with self._write() as txn:
            self._put_history(txn, values, tick)
            self._put_heat(txn, heat)
            for key, ledger in ledgers.items():
                txn.put(key, ledger, db=self._dbs["guard"])

    def _put_history(self, txn: Any, values: Mapping[int, bytes], tick: int) -> None:
        spans, history = self._dbs["spans"], self._dbs["history"]
        for span, value in values.items():
            if txn.get(_id(span), db=spans) is not None:
                txn.put(_id(span), value, db=history)
        txn.put(_TICK, tick.to_bytes(8, "little"), db=history)

    def _put_heat(self, txn: Any, heat: Mapping[int, tuple[int, int]]) -> None:
        for span, counts in heat.items():
            txn.put(_id(span), _HEAT.pack(*counts), db=self._dbs["heat"])

    def version(self) -> int:
        """Grows with every commit, by any process."""
        self._shared.check_uncut(*self._key)
        return int(self._env.info()["last_txnid"])

    def commit(
        self,
        put: Mapping[int, bytes],
        delete: Iterable[int] = (),
        heat: Mapping[int, tuple[int, int]] | None = None,
        names: Mapping[bytes, str] | None = None,
        wear: bytes = b"",
        changes: Sequence[Change] = (),
        *,
        history: Mapping[int, bytes] | None = None,
        tick: int = 0,
        forget: bool = False,
        erase: Container[int] = (),
        intend: Iterable[SpanRecord] = (),
        unname: Iterable[bytes] = (),
        last: bool = False,
    ) -> None:
        """One durable transaction: on return it survives a power cut. Only the committer calls it.

        `history`: what requests have shown of spans in `put`, as of `tick`.
        `changes`: what followers are told of it; `forget`: the log keeps nothing from before.
        `erase`: the space of spans in both this and `delete` is noted, until they are `erased`.
        `intend`: the space of these is noted, too, unless the index has them; a span in `put` is
        no longer to be erased.
        `unname`: roots whose names go, except those in `names`.
        `last`: no header is written after it; ids go on where they ended.
        """
        before, log, erased = self.generation, self._log.copy(), self._erased.copy()
        with self._write() as txn:
            if changes or forget:
                self._write_log(txn, before, log, changes, forget=forget)
            for span, value in put.items():
                txn.put(_id(span), value, db=self._dbs["spans"])
                txn.delete(_id(span), db=self._dbs["erase"])
            for record in intend:
                if txn.get(_id(record.span_id), db=self._dbs["spans"]) is None:
                    self._note_erasure(txn, record.span_id, encode_index(record))
            if history:
                self._put_history(txn, history, tick)
            for root in unname:
                txn.delete(root, db=self._dbs["names"])
            for root, name in (names or {}).items():
                txn.put(root, name.encode(), db=self._dbs["names"])
            self._put_heat(txn, heat or {})
            if last and self._last_noted > self.last_id:
                txn.put(_LAST, self.last_id.to_bytes(8, "little"), db=self._dbs["history"])
            if wear:
                txn.put(_WEAR, wear, db=self._dbs["history"])
            for span in delete:
                if span in erase:
                    self._note_erasure(txn, span, txn.get(_id(span), db=self._dbs["spans"]))
                txn.delete(_id(span), db=self._dbs["spans"])
                txn.delete(_id(span), db=self._dbs["heat"])
                txn.delete(_id(span), db=self._dbs["history"])
            for span in erased:
                txn.delete(_id(span), db=self._dbs["erase"])
        self._log = log
        self._erased -= erased

    def only(self, ids: range) -> None:
        """Ignore those ids given out that are not among these: their shard was renamed."""
        given = self.last_id, self._last_noted, self.last_span
        mine = (span if span in ids else 0 for span in given)
        self.last_id, self._last_noted, self.last_span = mine

    def keep_id(self, span: int) -> None:
        """Call before a header with this id is written: no other span gets it, crash or not.

        Only the committer calls it, mostly to no effect: ids are noted ahead. Raises StoreFailed.
        """
        noted = self._last_noted
        if span > noted:
            noted = span + IDS
            with self._write() as txn:
                txn.put(_LAST, noted.to_bytes(8, "little"), db=self._dbs["history"])
        self.last_id, self._last_noted = max(self.last_id, span), noted

    def _note_erasure(self, txn: Any, span: int, value: bytes | None) -> None:
        """Note the space that a span's index value names, without its labels."""
        with suppress(FormatError):  # damaged: it never had space of its own
            if value is not None:
                note = encode_extents(extents_of(split_index(bytes(value))[0]))
                txn.put(_id(span), note, db=self._dbs["erase"])

    def to_erase(self) -> dict[int, bytes]:
        """Spans that were deleted and are not erased yet -> what is noted of them."""
        return {int.from_bytes(key, "big"): note for key, note in self.items("erase")}

    def carry(self, notes: Mapping[int, bytes], last: int, wear: bytes) -> None:
        """Carry over what the old index had still to erase, the highest id of a header, `wear`.

        Raises StoreFailed.
        """
        with self._write() as txn:
            txn.put(_LAST, last.to_bytes(8, "little"), db=self._dbs["history"])
            if wear:
                txn.put(_WEAR, wear, db=self._dbs["history"])
            for span, note in notes.items():
                txn.put(_id(span), note, db=self._dbs["erase"])

    def erased(self, spans: Iterable[int]) -> None:
        """Nothing is left of these: the next commit deletes their notes. Any thread may call."""
        self._erased.update(spans)

    # ---- following -------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """That of the spans, as this process last wrote or read them: grows with every change.

        An index made anew continues above the one before it. 0: empty; 1: spans without a log.
        """
        if self._log:
            return self._log[-1][0]
        return 1 if self.n_spans() else 0

    def replaced(self) -> bool:
        """Whether another index has taken this one's place."""
        return inode_of(self._folder) != self._key[1]

    def refresh(self) -> int:
        """Look at what is committed now; the generation."""
        if "log" not in self._dbs:  # its writer may have made one since
            open_dbs(self._shared, create=False)
        self._log = self._read_log()
        return self.generation

    def changes(self, after: int) -> News | None:
        """What was changed since a generation; None: the log does not reach back so far."""
        if "log" not in self._dbs:
            return None
        found: list[Change] = []
        with self._read() as txn, txn.cursor(self._dbs["log"]) as cursor:
            ok = cursor.set_range(_id(after + 1))
            while ok:
                try:
                    entry = decode(bytes(cursor.value()))
                except FormatError:
                    return None
                if entry.before != after:
                    return None
                after = int.from_bytes(cursor.key(), "big")
                found += entry.changes
                ok = cursor.next()
            if not after and txn.stat(self._dbs["spans"])["entries"]:
                return None  # an index made anew has no log of what it began with
            version = int(txn.id())  # `version` may be ahead of it by a commit just ending
            new = {change.new for change in found if change.new}
            values = {span: txn.get(_id(span), db=self._dbs["spans"]) for span in new}
        there = {span: value for span, value in values.items() if value is not None}
        return News(version, after, found, there)

    def value(self, span: int) -> bytes | None:
        """A span's index value; None: it is not there."""
        return self._get("spans", _id(span))

    def n_spans(self) -> int:
        """How many there are."""
        with self._read() as txn:
            return int(txn.stat(self._dbs["spans"])["entries"])

    def _read_log(self) -> deque[tuple[int, int]]:
        """(generation, bytes) of what the log holds."""
        self.last_span = 0
        if "log" not in self._dbs:
            return deque()
        with self._read() as txn, txn.cursor(self._dbs["log"]) as cursor:
            log = deque((int.from_bytes(key, "big"), len(value)) for key, value in cursor)
            if log:
                with suppress(FormatError):
                    cursor.last()
                    self.last_span = decode(bytes(cursor.value())).last_span
        return log

    def _write_log(
        self, txn: Any, before: int, log: deque[tuple[int, int]], changes: Sequence[Change], *,
        forget: bool,
    ) -> None:  # fmt: skip
        """Add an entry to the transaction and to `log`; the oldest go where there are too many.

        The first is numbered by the clock, so that it is above those of an index before this one.
        """
        self.last_span = max([self.last_span, *(change.new for change in changes)])
        raw = encode(before, self.last_span, changes)
        log.append((max(before + 1, 0 if before > 1 else int(time() * 1e6)), len(raw)))
        txn.put(_id(log[-1][0]), raw, db=self._dbs["log"])
        n_bytes = sum(size for _, size in log)
        while len(log) > 1 and (forget or n_bytes > self._log_bytes or len(log) > LOG_ENTRIES):
            generation, size = log.popleft()
            txn.delete(_id(generation), db=self._dbs["log"])
            n_bytes -= size

    def close(self) -> None:
        """Idempotent."""
        is_open, self._open = self._open, False
        if is_open:
            close_env(self._key)

    def _get(self, db: str, key: bytes) -> bytes | None:
        """Also None where the index was written before there was such a database."""
        if db not in self._dbs:
            return None
        with self._read() as txn:
            value: bytes | None = txn.get(key, db=self._dbs[db])
            return value

    def items(self, db: str) -> Iterator[tuple[bytes, bytes]]:
        """All of a database, by key; nothing where there is none. Holds a read transaction."""
        if db in self._dbs:
            with self._read() as txn, txn.cursor(self._dbs[db]) as cursor:
                yield from cursor

    @contextmanager
    def _read(self) -> Iterator[Any]:
        """A read transaction. Raises FormatError where the file is damaged."""
        self._shared.check_uncut(*self._key)
        try:
            with self._env.begin() as txn:
                yield txn
        except lmdb.Error as err:
            raise error_of(self._folder, err, counted=self._shared.counted) from err

    @contextmanager
    def _write(self) -> Iterator[Any]:
        """A write transaction, committed at its end. Raises StoreFailed."""
        try:
            self._shared.check_uncut(*self._key)
            self._env.reader_check()  # a reader killed since would for ever hold what is freed
            with self._env.begin(write=True) as txn:
                yield txn
        except (lmdb.Error, OSError, FormatError) as err:
            raise commit_failed(self._folder, err) from err


def _id(span: int) -> bytes:
    return span.to_bytes(8, "big")
