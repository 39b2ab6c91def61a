"""Another's shard as a process that follows it has it open."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from impress.errors import ImpressError
from impress.write.directory import Shard
from impress.write.index import Index
from impress.write.readers import Presence

log = logging.getLogger("impress")

Stamp = tuple[int, ...]


class Neighbour:
    """Another's shard, open for reading."""

    def __init__(self, shard: Shard) -> None:
        """Raises ImpressError."""
        shard.check_index()
        self.shard = shard
        self.presence: Presence | None = None
        unsaid = ""
        try:
            self.presence = Presence(shard.readers)  # before the first look: all of it may be read
        except OSError as err:
            unsaid = err.strerror or str(err)
        try:
            self.index = Index(shard.index, create=False)
        except ImpressError:
            self.close_presence()
            raise
        if unsaid:
            log.warning(
                "%s: shard %s is read, but its writer cannot be told so (%s): a lease here is not "
                "waited for, and what it holds may be lost", shard.readers, shard.name, unsaid,
            )  # fmt: skip
        self._replaced: list[Index] = []  # that somebody here may be reading at this moment
        self.version = -1  # LMDB's, of the last look
        self.generation = 0  # up to which all of it has been taken over
        self.whole = False  # it is to be read whole: the log says nothing of what is missing

    def read(self) -> tuple[int, dict[int, bytes]]:
        """Everything it holds now, and the generation of that: to be noted once it has been taken
        over."""
        self.version = -1  # what is committed from here on is found by the next look
        generation = self.index.refresh()
        return generation, dict(spans_in(self.index, self.shard))

    def heat(self) -> dict[int, tuple[int, int]]:
        """Leases of its spans, as its writer saved them."""
        heat = self.index.heat()
        return {span: counts for span, counts in heat.items() if span in self.shard.spans}

    def reopen(self) -> None:
        """The index was made anew. Raises ImpressError; then the old one is still the index."""
        fresh, old = Index(self.shard.index, create=False), self.index
        self.whole = True
        self.index, self.version = fresh, -1
        self._replaced.append(old)

    def let_go(self) -> None:
        """Of indexes that were replaced before: what was purged goes with the last that has one."""
        while self._replaced:
            self._replaced.pop().close()

    def close_presence(self) -> None:
        if self.presence is not None:
            self.presence.close()

    def close(self) -> None:
        self.close_presence()
        self.let_go()
        self.index.close()


def spans_in(index: Index, shard: Shard) -> Iterator[tuple[int, bytes]]:
    """What a shard's index holds, but for ids that are not its own: it was copied or renamed."""
    return ((span, value) for span, value in index.spans() if span in shard.spans)


def stamp_of(shard: Shard) -> Stamp:
    """Of an index's file: another once it was written to."""
    try:
        stat = (shard.index / "data.mdb").stat()
    except OSError:
        return (-1, -1, -1)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
