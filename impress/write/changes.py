"""What a writer's transaction did to its spans, for processes that follow it. Pure encode, decode.

 0  8 generation before this one (0: there was nothing before; 1: there was, but no log of it)
 8  8 the highest span id given out so far
16  4 changes, 4 zero
24  … for each: 8 span put (0: none), 8 span taken out (0: none; both: the new one takes its
      place), 4 bytes of prefix, 4 zero, then the prefix: labels from the root to the new one's end
-8  8 xxh3_64 of all before
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import xxhash

from impress.errors import FormatError

_HEAD: Final = struct.Struct("<QQI4x")
_CHANGE: Final = struct.Struct("<QQI4x")


class Change(NamedTuple):
    """A span put (`new`), taken out (`old`), or one put in the other's place."""

    new: int
    old: int
    prefix: bytes = b""  # labels from the root to the new one's end: where it hangs


class Entry(NamedTuple):
    """One transaction. `before`: the generation it follows."""

    before: int
    last_span: int
    changes: list[Change]


def encode(before: int, last_span: int, changes: Sequence[Change]) -> bytes:
    body = [_HEAD.pack(before, last_span, len(changes))]
    for change in changes:
        body += [_CHANGE.pack(change.new, change.old, len(change.prefix)), change.prefix]
    raw = b"".join(body)
    return raw + xxhash.xxh3_64_digest(raw)


def decode(raw: bytes) -> Entry:
    """The inverse. Raises FormatError on anything unsound."""
    if len(raw) < _HEAD.size + 8 or xxhash.xxh3_64_digest(raw[:-8]) != raw[-8:]:
        raise FormatError("index: a damaged entry of the log")
    before, last_span, n_changes = _HEAD.unpack_from(raw)
    changes, at = [], _HEAD.size
    for _ in range(n_changes):
        if at + _CHANGE.size > len(raw) - 8:
            raise FormatError("index: an entry of the log is cut short")
        new, old, n_bytes = _CHANGE.unpack_from(raw, at)
        at += _CHANGE.size
        changes.append(Change(new, old, raw[at : at + n_bytes]))
        at += n_bytes
    if at != len(raw) - 8:
        raise FormatError("index: an entry of the log of another length")
    return Entry(before, last_span, changes)
