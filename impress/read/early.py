"""Rows read before they are asked for: a guess at the next layer, made while this one is computed.

layer l: select → its own reads queued ─plan→ in, computing ─start→ reads of layer l + 1, lane AHEAD
layer l + 1: select ─take→ no more are begun; what is there is copied, the rest is read

Only what would come from home is read ahead: a copy from a fast tier costs no more later. One layer
ahead, no more. A read that fails or hangs is as if it had not been made: nobody waits for it, and
if its bytes are wanted they are read again, which finds out what the disk says of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from impress.read.ahead import Floats, Mask, Places, Positions, preferred, within
from impress.read.parts import Part, Source, parts_of
from impress.read.plan import Gather, gather, home_reads
from impress.read.reading import Reading
from tiers.base import Bytes, Read
from tiers.coalesce import slices
from tiers.iopool import Lane
from tiers.slots import Buffer, release_all
from tiers.ticket import Ticket

log = logging.getLogger("impress")

#: One thread's share: small, so that a demand read soon has its thread, and little is lost when the
#: selection comes while it is under way.
SLICE: Final = 256 << 10


class Early:
    """Rows of one layer, read ahead from home. `release` ends it, whatever has happened."""

    def __init__(
        self, reading: Reading, sources: Sequence[Source], layer: int, planes: Sequence[int],
        positions: Positions,
    ) -> None:  # fmt: skip
        """`positions`: ascending. Nothing is read before `start`."""
        self.layer = layer
        self.buffers: list[Buffer] = []
        self._reading = reading
        self._planes = tuple(planes)
        self._shapes = [sources[0].layout.planes[plane] for plane in planes]
        self._parts = parts_of(sources, layer, positions)
        gap = reading.config.read_gap_bytes
        gathers = [gather(self._parts, plane, gap) for plane in planes]
        try:
            self._dests = [
                self._rent(g.n_pieces * shape.piece_bytes)
                for g, shape in zip(gathers, self._shapes, strict=True)
            ]
        except BaseException:  # no memory for the second buffer: nobody else knows of the first
            self._give_back()
            raise
        self._runs = [g.runs for g in gathers]
        self._begun = [np.zeros(g.n_pieces, dtype=bool) for g in gathers]  # pieces of dest
        self._there = [np.zeros(g.n_pieces, dtype=bool) for g in gathers]  # read and verified
        self._at = [self._places(i, g) for i, g in enumerate(gathers)]
        self._ticket: Ticket | None = None

    def _rent(self, n_bytes: int) -> Bytes:
        buffer = self._reading.rent(n_bytes)
        self.buffers.append(buffer)
        return buffer.array

    def _places(self, i: int, found: Gather) -> list[Positions]:
        """For each part, the piece of dest that holds each piece of its chunks; -1: none does."""
        shape, at = self._shapes[i], 0
        places = []
        assert found.rows is not None
        for part in self._parts:
            assert part.ordinals is not None
            where = np.full(part.count * shape.pieces, -1, dtype=np.int64)
            rows = found.rows[at : at + len(part.ordinals)]
            where[part.ordinals // shape.piece_rows] = rows // shape.piece_rows
            places.append(where)
            at += len(part.ordinals)
        return places

    def start(self) -> None:
        """Begin to read. Call it once."""
        tasks = [
            partial(self._read, i, first, some)
            for i in range(len(self._planes))
            for first, some in self._slices(i)
        ]
        self._reading.pool.submit(Lane.AHEAD, tasks, note=self._note)

    def _note(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def _slices(self, i: int) -> list[tuple[int, list[Read]]]:
        """One plane's reads in slices, in the order of dest, and the piece each slice begins at."""
        reads = [
            read
            for part, runs in zip(self._parts, self._runs[i], strict=True)
            for read in home_reads(part, self.layer, self._planes[i], runs, self._dests[i])
        ]
        found, first = [], 0
        for some in slices(reads, SLICE):
            found.append((first, some))
            first += sum(len(read.dest) for read in some) // self._shapes[i].piece_bytes
        return found

    def _read(self, i: int, first: int, reads: list[Read]) -> None:
        n_bytes = sum(len(read.dest) for read in reads)
        pieces = slice(first, first + n_bytes // self._shapes[i].piece_bytes)
        self._begun[i][pieces] = True
        self._reading.counters.add("ahead_bytes", n_bytes)
        self._reading.ssd.read(reads)
        self._there[i][pieces] = True

    # ---- taking it -------------------------------------------------------------------------

    def stop(self) -> None:
        """Begin no more reads: from now on others may need the medium."""
        if self._ticket is not None:
            self._ticket.cancel()

    @property
    def asked_bytes(self) -> int:
        """Bytes of the reads that were begun, padding and gaps included."""
        found = zip(self._begun, self._shapes, strict=True)
        return sum(int(begun.sum()) * shape.piece_bytes for begun, shape in found)

    def pieces(self, i: int, plane: int, part: Part) -> Mask | None:
        """Which pieces of the chunks of source i's part have been begun; None: not this plane."""
        if plane not in self._planes:
            return None
        at = self._planes.index(plane)
        shape, mine = self._shapes[at], self._parts[i]
        where = self._at[at][i]
        begun = (where >= 0) & self._begun[at][where]
        found = np.zeros(part.count * shape.pieces, dtype=bool)
        moved = (mine.first - part.first) * shape.pieces
        lo = max(0, moved)
        hi = max(lo, min(len(found), moved + len(begun)))
        found[lo:hi] = begun[lo - moved : hi - moved]
        return found

    def copy(self, i: int, plane: int, piece: int, dest: Bytes) -> bool:
        """Copy the pieces of source i's span from this one on; False where not all are here."""
        at = self._planes.index(plane)
        shape = self._shapes[at]
        first = int(self._at[at][i][piece - self._parts[i].first * shape.pieces])
        end = first + len(dest) // shape.piece_bytes
        if not self._there[at][first:end].all():
            return False
        np.copyto(dest, self._dests[at][first * shape.piece_bytes : end * shape.piece_bytes])
        return True

    def release(self) -> None:
        """Give the buffers back when the last read under way has ended. Call it once."""
        self.stop()
        if self._ticket is None:
            self._give_back()
            return
        self._ticket.then(self._give_back)
        # Reads not begun end here: queued behind requests that never pause, they would keep them.
        self._reading.pool.run_here(Lane.AHEAD, [self._ticket])

    def _give_back(self) -> None:
        release_all(self.buffers)  # a load that took some has references of its own


class Foresight:
    """What a session reads ahead: at any time one layer's rows."""

    def __init__(self, reading: Reading, sources: Sequence[Source]) -> None:
        self._reading = reading
        self._sources = sources
        self._cap_bytes = reading.config.prefetch_bytes
        self._averages: list[Floats | None] | None = None  # by source [n_layers, n_rows]
        self._now: Early | None = None

    def plan(
        self, layer: int, chosen: Positions | None, planes: Sequence[int], *, is_known: bool = False
    ) -> None:
        """Choose what to read of a layer when the one before it chose these rows; None: all.

        `is_known`: it will choose the same rows, and no others are read.
        What was read ahead before is let go of: a load that took some holds its buffers itself.
        """
        self.close()
        if not self._cap_bytes or layer >= self._reading.geometry.n_layers:
            return
        try:
            average = None if is_known else self._average(layer)
            positions = self._guess(layer, chosen, planes, average)
            if len(positions):
                self._now = Early(self._reading, self._sources, layer, planes, positions)
        except Exception:  # nobody waits for it, and the cache may forget
            log.exception("reading ahead failed")

    def start(self) -> None:
        """Begin to read what was planned, now that the layer before it is in."""
        try:
            if self._now is not None:
                self._now.start()
        except Exception:  # as in `plan`; what it began to read ends by itself
            log.exception("reading ahead failed")
            self.close()

    def take(self, layer: int) -> Early | None:
        """What was read ahead of a layer; valid until the next `plan` or `close`."""
        if self._now is None or self._now.layer != layer:
            return None
        self._now.stop()
        return self._now

    def close(self) -> None:
        """Let go of what was read ahead."""
        if self._now is not None:
            self._now.release()
            self._now = None

    # ---- inside ----------------------------------------------------------------------------

    def _guess(
        self, layer: int, chosen: Positions | None, planes: Sequence[int], average: Floats | None
    ) -> Positions:
        lie = [self._lie(source, layer) for source in self._sources]
        there = [self._there(s, layer, at) for s, at in zip(self._sources, lie, strict=True)]
        order = preferred(chosen, average, np.concatenate(there))
        return within(order, self._places(planes, lie), self._cap_bytes)

    def _lie(self, source: Source, layer: int) -> Positions:
        """Where the rows held of a source lie in the order of its span's chunks."""
        held, window = source.held, source.held.record.window
        rows = np.arange(held.first * window, (held.first + held.count) * window)
        return source.ordinals(layer, rows)

    def _there(self, source: Source, layer: int, lie: Positions) -> Mask:
        """Which of these rows have a copy in a fast tier."""
        record = source.held.record
        chunks = np.arange(record.n_windows)
        found = np.zeros(len(chunks), dtype=bool)
        for cache in self._reading.copies.chunks:
            found |= cache.has(source.span, layer, chunks)
        return np.asarray(found[lie // record.window])

    def _average(self, layer: int) -> Floats | None:
        """How often requests chose each row of the prefix; None where nothing is known."""
        if self._averages is None:
            history = self._reading.history
            self._averages = [history.average(source.span) for source in self._sources]
        if all(found is None for found in self._averages):
            return None
        parts = []
        for source, found in zip(self._sources, self._averages, strict=True):
            held, window = source.held, source.held.record.window
            rows = slice(held.first * window, (held.first + held.count) * window)
            n = held.count * window
            parts.append(np.zeros(n, dtype=np.float32) if found is None else found[layer, rows])
        return np.concatenate(parts)

    def _places(self, planes: Sequence[int], lie: Sequence[Positions]) -> list[Places]:
        """Where the prefix's rows lie in each plane, spans far apart."""
        gap_bytes = self._reading.config.read_gap_bytes
        made: dict[int, Positions] = {}  # by rows of a piece
        places = []
        for plane in planes:
            shape = self._sources[0].layout.planes[plane]
            gap = gap_bytes // shape.piece_bytes
            if shape.piece_rows not in made:
                parts, begin = [], 0
                for source, ordinals in zip(self._sources, lie, strict=True):
                    parts.append(begin + ordinals // shape.piece_rows)
                    record = source.held.record
                    begin += record.n_windows * shape.pieces + gap_bytes // shape.piece_bytes + 2
                made[shape.piece_rows] = np.concatenate(parts)
            places.append(Places(made[shape.piece_rows], shape.piece_rows, shape.piece_bytes, gap))
        return places
