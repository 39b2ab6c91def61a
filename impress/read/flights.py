"""Single flight: a second request for bytes on their way from home copies them from the first one.

Only where both read the very same windows whole (`key_of`): what leases have in common is not cut
out of reads of more or fewer windows, and chosen rows are not shared.

The follower gets bytes of its own: copied when the first one's reads have ended, and verified as
any read is. What does not match (the first one gave up, failed, or its owner wrote to its memory)
is read from home after all, and so is what its owner has taken back. So nobody shares memory with a
stranger, and nothing is taken on trust.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

from impress.cache.chunks import Ids
from impress.read.parts import Part
from impress.read.tickets import nothing
from impress.spans.rows import address_of
from tiers.base import Bytes, Home, Read, verify
from tiers.errors import ReadFailed
from tiers.ticket import Ticket


class Flight:
    """Planes being read whole into `dests`, until `ended`; others may copy them until `over`."""

    def __init__(self, dests: Sequence[Bytes], ended: Ticket) -> None:
        self.dests = dests
        self.ended = ended
        self._lock = threading.Lock()
        self._n_users = 1  # its owner, and those who copy right now
        self._is_over = False
        self._left = Ticket(1)

    @contextmanager
    def looked_at(self) -> Iterator[bool]:
        """Whether its bytes may be looked at; if so, they may until the block ends."""
        with self._lock:
            may = not self._is_over
            self._n_users += may
        try:
            yield may
        finally:
            if may:
                self._leave()

    def over(self) -> Ticket:
        """Its owner takes the memory back: nobody begins to look at it any more. Done when those
        looking at it have ended; they copy, and wait for no medium. Idempotent, even if cut off."""
        with self._lock:
            mine, self._is_over = not self._is_over, True
            self._n_users -= mine
            is_last = not self._n_users
        if is_last:
            self._end()
        return self._left

    def _leave(self) -> None:
        with self._lock:
            self._n_users -= 1
            is_last = not self._n_users
        if is_last:
            self._end()

    def _end(self) -> None:
        with self._lock:
            if not self._left.done:
                self._left.run(nothing)


class Flights:
    """Flights under way, by key. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._going: dict[Hashable, Flight] = {}

    def under_way(self, key: Hashable) -> Flight | None:
        with self._lock:
            return self._going.get(key)

    def begin(self, key: Hashable, flight: Flight) -> None:
        """Others may follow it until it has ended, or until `end` is called."""
        with self._lock:
            self._going[key] = flight
        flight.ended.then(lambda: self.end(key, flight))

    def end(self, key: Hashable, flight: Flight) -> None:
        """Nobody begins to follow it any more: it has ended, or its owner gave it up, perhaps
        because its reads hang. Those who follow it already wait on for it."""
        with self._lock:
            if self._going.get(key) is flight:
                del self._going[key]


def key_of(
    layer: int, planes: Sequence[int], parts: Sequence[Part], entries: Sequence[Sequence[Ids]], *,
    direct: bool,
) -> Hashable:  # fmt: skip
    """What a whole load brings from home. Equal keys: equal bytes at equal places.

    `entries[cache][part]`: for each of its chunks. `direct`: rows, only of those that home gives.
    Which bytes these are also depends on the windows held, where chunks hold rows of others.
    """
    spans = tuple((part.span, part.first, part.count) for part in parts)
    cached = tuple(by_part.tobytes() for by_cache in entries for by_part in by_cache)
    held = tuple((part.source.held.first, part.source.held.count) for part in parts)
    return layer, tuple(planes), spans, cached, held, direct


def take(
    home: Home, reads: Sequence[Read], whole: Sequence[Bytes], flight: Flight,
    then: Callable[[int], None] | None = None,
) -> int:  # fmt: skip
    """Fill reads, whose dests are parts of `whole`, from the flight's; returns the bytes so copied.

    What it cannot give is read from home. `then`: as home's, called once, at the end. Raises
    ReadFailed, MediumError as home does.
    """
    with flight.looked_at() as there:
        left = [read for read in reads if not (there and _copied(read, whole, flight))]
    if left:
        home.read(left)
    n_bytes = sum(len(read.dest) for read in reads)
    if then is not None:
        then(n_bytes)
    return n_bytes - sum(len(read.dest) for read in left)


def _copied(read: Read, whole: Sequence[Bytes], flight: Flight) -> bool:
    assert read.sums is not None, "what carries no sums is not shared"
    theirs = _same_place(read.dest, whole, flight.dests)
    if len(theirs) != len(read.dest):
        return False
    read.dest[:] = theirs
    try:
        verify(read, lambda *_: "a read under way")
    except ReadFailed:
        return False
    return True


def _same_place(part: Bytes, whole: Sequence[Bytes], others: Sequence[Bytes]) -> Bytes:
    """The part of one of `others` that lies where `part` lies in its counterpart in `whole`."""
    at = address_of(part)
    for mine, other in zip(whole, others, strict=True):
        off = at - address_of(mine)
        if 0 <= off < len(mine):
            return other[off : off + len(part)]
    raise AssertionError("a read into strange memory")
