"""All rows of packed chunks: from where the chunks lie to the rows' places among those given.

    chunks ─┬─ that a cache has ─pieces→ places
            └─ of home ─read, verified→ a buffer → places

Planned by chunks alone. The threads that bring rows find which row lies where: beside threads that
copy, the thread asking for all layers took 10 ms of a request for 1.5 ms of work, and takes 0.4 now
(Llama-3-8B, two cores). There the request takes as long: both cores have rows to copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from impress.cache.chunks import ChunkCache, Ids
from impress.cache.levels import levels_of
from impress.read.copying import ChunksOf, Copies
from impress.read.parts import Part, Positions
from tiers.base import Bytes


class Whole:
    """Parts all of whose rows are wanted, divided by who has their chunks. `left`: these parts.

    `chunks`: of each part, those that home gives. `given`: by plane, all rows in order; it belongs
    to those who look at it.
    """

    def __init__(self, parts: Sequence[Part], entries: Sequence[Sequence[Ids]]) -> None:
        """`entries[cache][part]`: for each of its chunks, -1 where the cache has none."""
        self.left = parts
        self.given: list[Bytes] = []
        self.chunks: list[Ids] = []
        self._copied: list[list[Ids]] = []  # of each part, by cache
        for i, part in enumerate(parts):
            levels = np.zeros(part.count, dtype=np.uint8)
            if entries:
                levels = levels_of([by_part[i] for by_part in entries])
            self.chunks.append((levels == len(entries)).nonzero()[0])
            self._copied.append([(levels == at).nonzero()[0] for at in range(len(entries))])
        self._window = parts[0].source.held.record.window
        ends = np.cumsum([part.count * self._window for part in parts]).tolist()
        self._begins = [0, *ends[:-1]]
        self.n_places: int = ends[-1]  # rows there must be room for: all of them
        # Made by the first thread that needs them; where two do, they make the same.
        self._places: list[Positions | None] = [None] * len(parts)
        self._at_home: Positions | None = None

    def places(self, i: int) -> Positions:
        """Where each row of a part's chunks goes, in the order they lie in."""
        found = self._places[i]
        if found is None:
            part, begin = self.left[i], self._begins[i]
            rows = np.arange(begin, begin + part.count * self._window)
            found, ordinals = rows, part.ordinals
            if ordinals is not None:
                found = np.empty_like(rows)
                found[ordinals] = rows
            self._places[i] = found
        return found

    def copies(
        self, _parts: Sequence[Part], entries: Sequence[Sequence[Ids]], layer: int,
        planes: Sequence[int], caches: Sequence[ChunkCache],
    ) -> Copies:  # fmt: skip
        """What is copied from caches into `given`."""
        found: Copies = {cache.tier.name: [] for cache in caches}
        for i, part in enumerate(self.left):
            for level, cache in enumerate(caches):
                chunks = self._copied[i][level]
                to, mine = partial(self._places_of, i), entries[level][i]
                for plane, dest in zip(planes, self.given, strict=True) if len(chunks) else ():
                    some = ChunksOf(part, layer, plane, chunks, to, cache, mine, dest)
                    found[cache.tier.name].append((part, some))
        return found

    def _places_of(self, i: int, chunks: Positions) -> Positions:
        """[chunks, rows]: where each row of these chunks of a part goes."""
        return self.places(i).reshape(-1, self._window).take(chunks, axis=0)

    def rows(self, i: int) -> Bytes:
        """Plane number i, once all is read."""
        return self.given[i]

    def lie(self, rows: Sequence[Positions | None]) -> None:
        """Nothing to note: rows of home lie in dest as they do in their chunks."""

    def put(self, i: int, dest: Bytes, first: int, end: int) -> None:
        """Put bytes [first, end) of dest, rows of home of plane number i, in their places."""
        if self._at_home is None:
            rows = np.arange(self._window)
            of_parts = [
                self.places(part).take((chunks[:, None] * self._window + rows).ravel())
                for part, chunks in enumerate(self.chunks)
            ]
            self._at_home = of_parts[0] if len(of_parts) == 1 else np.concatenate(of_parts)
        size = len(self.given[i]) // self.n_places
        places = self._at_home[first // size : end // size]
        self.given[i].reshape(-1, size)[places] = dest[first:end].reshape(-1, size)
