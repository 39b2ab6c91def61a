"""Another writer's shard as a follower has it open, and which of them cannot be read."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

from impress.errors import StoreFailed
from impress.write.directory import Shard
from impress.write.folders import said_of_no_segments
from impress.write.index import Index
from impress.write.readers import Presence
from tiers.files import segment_paths

log = logging.getLogger("impress")

#: A shard that could not be read in so many looks in a row, its index unchanged, is left alone for
#: so long: each look may read all of it in vain.
TRIES: Final = 3
RETRY_S: Final = 30.0

Stamp = tuple[int, ...]


class NoSegments(StoreFailed):
    """None of what a shard's index names is there: the disk of its segments is not mounted."""


class Neighbour:
    """Another's shard, open for reading."""

    def __init__(self, shard: Shard) -> None:
        """Raises ImpressError."""
        shard.check_index()
        self.shard = shard
        self.presence: Presence | None = None
        self._unsaid = ""  # why its writer cannot be told of this process
        self._tried_s = monotonic()
        try:
            self.presence = Presence(shard.readers)  # before the first look: all of it may be read
        except OSError as err:
            self._unsaid = err.strerror or str(err)
        try:
            self.index = self._opened()
            if self._unsaid:
                log.warning(
                    "%s: shard %s is read, but its writer cannot be told so (%s): a lease here is "
                    "not waited for, and what it holds may be lost",
                    shard.readers, shard.name, self._unsaid,
                )  # fmt: skip
        except BaseException:  # Ctrl-C: its writer would wait for a reader that is not there
            self.close_presence()
            raise
        # Replaced indexes, and since when: somebody here may be reading one at this moment.
        self._replaced: list[tuple[float, Index]] = []
        self.version = -1  # LMDB's, as of the last look
        self.generation = 0  # up to which all of it has been taken over
        self.whole = False  # it is to be read whole: the log says nothing of what is missing
        self.late = set[int]()  # ids of earlier spans that are not out of the catalog yet

    def _opened(self) -> Index:
        """Raises ImpressError; NoSegments: all that hangs from its spans seemed to hang in the air,
        once a read of one had failed."""
        index = Index(self.shard.index, create=False)
        try:
            if said := said_of_no_segments(self.shard.segments, index.n_spans()):
                raise NoSegments(said)
        except OSError as err:
            index.close()
            raise StoreFailed(f"{self.shard.segments}: {err.strerror}") from None
        except BaseException:
            index.close()
            raise
        return index

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
        fresh, old = self._opened(), self.index
        self.whole = True
        self.index, self.version = fresh, -1
        self._replaced.append((monotonic(), old))
        with suppress(OSError):  # before a look at it; where it cannot be said, it is not said
            if self.presence is not None and self.presence.is_lost():
                self.presence, lost = Presence(self.shard.readers), self.presence
                lost.close()

    def let_go(self, grace_s: float) -> None:
        """Close indexes that were replaced so long ago: what was purged goes once the last process
        that has one open closes it."""
        while self._replaced and monotonic() - self._replaced[0][0] > grace_s:
            self._replaced[0][1].close()
            del self._replaced[0]

    def say(self, held: Collection[int]) -> None:
        """Tell its writer how far this process has followed, and what it still holds; also where
        the disk was full before."""
        with suppress(OSError):
            if self._unsaid and monotonic() > self._tried_s + RETRY_S:
                self._tried_s = monotonic()
                self.presence, self._unsaid = Presence(self.shard.readers), ""
            if self.presence is not None:
                self.presence.say(self.generation, held)

    def absent(self) -> None:
        """Nothing of it is read from here on: its writer need not wait."""
        self.close_presence()
        self.presence, self._unsaid = None, ""

    def close_presence(self) -> None:
        if self.presence is not None:
            self.presence.close()

    def close(self) -> None:
        self.close_presence()
        for index in (*(old for _, old in self._replaced), self.index):
            index.close()


class _Failed(NamedTuple):
    shard: Shard
    stamp: Stamp
    times: int  # with this stamp
    at_s: float
    said: bool
    why: str
    holds: bool  # something, whatever its folder looks like


class Unread:
    """Shards that cannot be read at present."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed: dict[int, _Failed] = {}

    def rests(self, shard: Shard, stamp: Stamp) -> bool:
        """Whether it is not to be tried now: in its present state it has failed often enough."""
        last = self._failed.get(shard.number)
        if last is None or last.stamp != stamp or last.times < TRIES:
            return False
        return monotonic() < last.at_s + RETRY_S

    def failed(self, shard: Shard, stamp: Stamp, err: Exception) -> None:
        """`stamp`: from before it was tried. Logged the second time, and then no more: an index
        that is just being made is whole by then."""
        last = self._failed.get(shard.number)
        times = last.times + 1 if last is not None and last.stamp == stamp else 1
        again = last is not None
        self._failed[shard.number] = _Failed(
            shard, stamp, times, monotonic(), again, str(err), isinstance(err, NoSegments)
        )
        if last is not None and not last.said:
            log.warning("%s: shard %s is left out: %s", self._path, shard.name, err)

    def left_out(self) -> dict[str, str]:
        """Name of each that holds something, and why not read. One being made holds nothing."""
        failed = [f for f in [*self._failed.values()] if f.holds or _holds_any(f.shard)]
        return {last.shard.name: last.why for last in failed}

    def has(self, shard: Shard) -> bool:
        """Whether it is one of them, by the last look; nothing is listed."""
        return shard.number in self._failed

    def read(self, shard: Shard) -> bool:
        """It can be read: what fails from here on is logged again. Whether it could not before."""
        return self._failed.pop(shard.number, None) is not None


def _holds_any(shard: Shard) -> bool:
    try:
        return bool(shard.unmounted() or segment_paths(shard.segments))
    except OSError:  # it may belong to another user: opening it will say so
        return True


def spans_in(index: Index, shard: Shard) -> Iterator[tuple[int, bytes]]:
    """What a shard's index holds, without ids that are not its own (it was copied or renamed)."""
    return ((span, value) for span, value in index.spans() if span in shard.spans)


def stamp_of(shard: Shard) -> Stamp:
    """Stamp of an index's file: differs once it was written to, or given to others to read.

    The time of its last status change is left out: opening it as root is one.
    """
    try:
        stat = (shard.index / "data.mdb").stat()
    except OSError:
        return ()
    its = stat.st_ino, stat.st_size, stat.st_mtime_ns
    return (*its, stat.st_mode, stat.st_uid, stat.st_gid)
