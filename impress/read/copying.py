"""What caches bring of a layer: planned by which of them has it, found by the threads that copy.

    plan ─Unfound─ cut in slices ─▶ threads that copy: found ─Pieces─▶ read_pieces

Finding where each piece lies, and its checksum, beforehand held up reads of home, which take
longest, by 0.1 ms a layer of rows from two caches (OPT-6.7B, two cores).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from impress.cache.chunks import ChunkCache, Ids
from impress.read.parts import Part, Positions
from impress.spans.layout import PlaneLayout
from impress.stats import Spent
from tiers.base import Bytes, Pieces

#: Finds out what some pieces are.
Find = Callable[[], Pieces]


class Unfound(Protocol):
    """Pieces whose places are found by the thread that reads them."""

    @property
    def n_bytes(self) -> int: ...

    def cut(self, most_bytes: int) -> Sequence[Find]:
        """In slices of about most_bytes."""

    def found(self) -> Pieces:
        """All of them."""


def found(some: Find, noted: list[Spent]) -> Pieces:
    """The pieces that `some` finds; the time that took is noted."""
    noted.append(spent := Spent())
    with spent:
        return some()


#: By tier, what is copied from it.
Copies = dict[str, list[tuple[Part, Unfound]]]


@dataclass(frozen=True, slots=True)
class _Some(ABC):
    """Some of a part's plane, all of it in one cache. `entries`: one for each chunk of the part."""

    part: Part
    layer: int
    plane: int
    some: Positions  # which pieces, or chunks
    #: Their places in dest, or [some, rows] where each row has its own; or what finds those.
    to: Positions | Callable[[Positions], Positions]
    cache: ChunkCache
    entries: Ids
    dest: Bytes

    @property
    def shape(self) -> PlaneLayout:
        """The plane's layout."""
        return self.part.source.layout.planes[self.plane]

    @property
    @abstractmethod
    def one_bytes(self) -> int:
        """Bytes of each of them."""

    @property
    def n_bytes(self) -> int:
        return len(self.some) * self.one_bytes

    def cut(self, most_bytes: int) -> Sequence[Find]:
        """In slices of about most_bytes."""
        n = max(1, most_bytes // self.one_bytes)
        return [partial(self.found, at, at + n) for at in range(0, len(self.some), n)]

    @abstractmethod
    def found(self, first: int = 0, end: int | None = None) -> Pieces:
        """What they are, from the first of these to the end."""

    def places(self, first: int, end: int | None) -> Positions:
        """Where these go."""
        if isinstance(self.to, np.ndarray):
            return self.to[first:end]
        return self.to(self.some[first:end])


class PiecesOf(_Some):
    """Pieces of the part's chunks."""

    __slots__ = ()

    @property
    def one_bytes(self) -> int:
        return self.shape.piece_bytes

    def found(self, first: int = 0, end: int | None = None) -> Pieces:
        part, shape, entries = self.part, self.shape, self.entries
        pieces = self.some[first:end]
        # Where chunk c begins, less the chunks before it: piece p of the part is p pieces further.
        begins = self.cache.plane_at(self.plane, entries)
        begins -= np.arange(len(entries)) * shape.chunk_bytes
        starts = begins.take(pieces // shape.pieces if shape.pieces > 1 else pieces)
        starts += pieces * shape.piece_bytes
        at = part.source.layout.sums_at(self.layer, self.plane, part.first)
        sums = part.source.sums[at : at + len(entries) * shape.pieces].take(pieces)
        return Pieces(starts, self.dest, self.places(first, end), sums, shape.piece_bytes)


class ChunksOf(_Some):
    """Whole chunks, as pieces of that size."""

    __slots__ = ()

    @property
    def one_bytes(self) -> int:
        return self.shape.chunk_bytes

    def found(self, first: int = 0, end: int | None = None) -> Pieces:
        part, plane, chunks = self.part, self.plane, self.some[first:end]
        entries, to = self.entries[chunks], self.places(first, end)
        known = part.source.sums_of(self.layer, plane, chunks + part.first)
        sums = self.cache.sums.of(plane, entries, known)
        return Pieces(self.cache.plane_at(plane, entries), self.dest, to, sums, self.one_bytes)
