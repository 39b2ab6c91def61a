"""Every page of a shard's segments looked at for span headers, and what was found on the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final

import numpy as np

from impress.errors import FormatError
from impress.spans.format import MAGIC, SpanHeader, decode_header, header_page_length
from tiers.base import PAGE, Extent
from tiers.files import read_pages, segment_paths

_BLOCK_BYTES: Final = 8 << 20
_MAGIC_WORD: Final = np.frombuffer(MAGIC, dtype=np.uint64)[0]

Progress = Callable[[str, int, int], None]  # what, bytes done, of so many


@dataclass(slots=True)
class Rebuilt:
    """What was found in the segments. Nothing that counts in `torn` or `damaged` is served."""

    spans: int = 0
    windows: int = 0
    n_bytes: int = 0  # of the spans kept, rows and headers
    superseded: int = 0  # older copies, or space or an id that is another span's now
    purged: int = 0  # still to be erased when a purge or a repack was cut off
    torn: int = 0  # headers that do not read back whole: a store that a crash cut off
    damaged: int = 0  # sound headers whose rows do not match: cut off, or gone bad
    foreign: int = 0  # headers of another store
    unreadable: int = 0  # pages: what they held is not looked at
    busy_shards: list[str] = field(default_factory=list)  # open for writing: left alone
    failed_shards: list[str] = field(default_factory=list)  # not rebuilt: left as they were
    notes: list[str] = field(default_factory=list)

    def add(self, other: Rebuilt) -> None:
        """Add what was found in another shard."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


def scan(folder: Path, found: Rebuilt, say: Progress) -> Iterator[SpanHeader]:
    """Every header record that reads back whole, in no particular order."""
    paths = segment_paths(folder)
    total, done = sum(p.stat().st_size for p in paths), 0
    for path in paths:
        lost = 0
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size // PAGE * PAGE
            for start in range(0, size, _BLOCK_BYTES):
                say("scanning", done + start, total)
                block, n_lost = read_pages(fd, min(_BLOCK_BYTES, size - start), start)
                lost += n_lost
                firsts = np.frombuffer(block, dtype=np.uint64)[:: PAGE // 8]
                for page in np.flatnonzero(firsts == _MAGIC_WORD).tolist():
                    header = _header_at(fd, int(path.stem), start + page * PAGE)
                    if header is None:
                        found.torn += 1
                    else:
                        yield header
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        done += size
        if lost:
            found.unreadable += lost
            found.notes.append(f"{path}: {lost} pages unreadable")
    say("scanning", total, total)


def _header_at(fd: int, segment: int, off: int) -> SpanHeader | None:
    try:
        length = header_page_length(read_pages(fd, PAGE, off)[0])
        if length > os.fstat(fd).st_size - off:
            return None
        return decode_header(read_pages(fd, length, off)[0], Extent(segment, off, length))
    except FormatError:
        return None
