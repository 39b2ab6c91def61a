"""Single flight: a second request for bytes that are on their way from home takes them from there.

The follower gets bytes of its own: copied when the first one's reads have ended, and verified as
any read is. What does not match (the first one gave up, failed, or its owner wrote to its memory)
is read from home after all. So nobody shares memory with a stranger, and nothing is believed.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from tiers.base import Bytes, Home, Read, verify
from tiers.errors import ReadFailed
from tiers.iopool import Ticket


@dataclass(frozen=True, slots=True)
class Flight:
    """Planes being read whole into `dests`, until `ended`."""

    dests: Sequence[Bytes]
    ended: Ticket


class Flights:
    """What is on its way, by what it is. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._going: dict[Hashable, Flight] = {}

    def under_way(self, key: Hashable) -> Flight | None:
        with self._lock:
            return self._going.get(key)

    def begin(self, key: Hashable, flight: Flight) -> None:
        """Others may follow it until it has ended."""
        with self._lock:
            self._going[key] = flight
        flight.ended.then(lambda: self._land(key, flight))

    def _land(self, key: Hashable, flight: Flight) -> None:
        with self._lock:
            if self._going.get(key) is flight:
                del self._going[key]


def take(home: Home, reads: Sequence[Read], whole: Sequence[Bytes], flight: Flight) -> int:
    """Fill reads, whose dests are parts of `whole`, from the flight's; the bytes that came so.

    What it cannot give is read from home. Raises ReadFailed, MediumError as home does.
    """
    left: list[Read] = []
    n_bytes = 0
    for read in reads:
        assert read.sums is not None, "what carries no sums is not shared"
        read.dest[:] = _same_place(read.dest, whole, flight.dests)
        try:
            verify(read, "a read under way")
            n_bytes += len(read.dest)
        except ReadFailed:
            left.append(read)
    if left:
        home.read(left)
    return n_bytes


def _same_place(part: Bytes, whole: Sequence[Bytes], others: Sequence[Bytes]) -> Bytes:
    """The part of one of `others` that lies where `part` lies in that of `whole`."""
    at = part.__array_interface__["data"][0]
    for mine, other in zip(whole, others, strict=True):
        off = at - mine.__array_interface__["data"][0]
        if 0 <= off < len(mine):
            return other[off : off + len(part)]
    raise AssertionError("a read into strange memory")
