"""One layer of a prefix on its way from the tiers to memory, and its copies back up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from impress.chunks import ChunkCache, Ids
from impress.config import Config
from impress.layout import K, V
from impress.plan import Missing, Source, plan_layer
from impress.rows import as_tensor, dense_bytes, unpack
from impress.stats import Counters
from impress.types import Geometry
from tiers.base import PAGE, Bytes, Read, Tier
from tiers.coalesce import slices
from tiers.errors import MediumError
from tiers.iopool import IoPool, Lane, Ticket
from tiers.slots import Buffer, BufferPool
from tiers.ssd import SsdTier

if TYPE_CHECKING:
    import torch

    Tensors = tuple[torch.Tensor, torch.Tensor]

#: A slice of reads for one thread: at least this, so that small layers do not drown in hand-offs.
LEAST_SLICE = 256 << 10
MOST_SLICE = 2 << 20
#: Promotions queued beyond this are skipped: the cache may forget.
MOST_PROMOTIONS = 1024


@dataclass(frozen=True, slots=True)
class Reading:
    """What sessions of a store read with; the same for all."""

    geometry: Geometry
    config: Config
    ssd: SsdTier
    cache: ChunkCache
    pool: IoPool
    buffers: BufferPool
    counters: Counters
    quarantine: Callable[[int], None]  # span at home is bad


class Load:
    """A layer's reads under way, started by the constructor.

    `tickets` are by medium, in the order of `media`. Exactly one of `abandon`, or `unpin` and
    later `give_back`, ends it.
    """

    media = ("dram", "ssd")

    def __init__(
        self, reading: Reading, sources: Sequence[Source], layer: int, outs: Tensors | None
    ) -> None:
        self.layer = layer
        self.outs = outs  # the caller's tensors, or None
        self.started_s = monotonic()
        self.bad_span: dict[str, int] = {}  # medium -> span whose read failed
        self._r = reading
        self._n_windows = sum(source.held.count for source in sources)
        self._planes = sources[0].layout.planes
        self._window = sources[0].held.record.window
        self._buffers: list[Buffer] = []  # rented
        self._dests = (self._dest(K), self._dest(V))
        cache = reading.cache
        self._entries: list[Ids] = [
            cache.pin(s.span, layer, s.held.first, s.held.count) for s in sources
        ]
        self.plan = plan_layer(sources, layer, self._entries, cache, self._dests)
        self.tickets = [
            self._submit(cache.tier, self.plan.dram),
            self._submit(reading.ssd, self.plan.ssd),
        ]

    def _dest(self, plane: int) -> Bytes:
        """Straight into a dense page-aligned out; else a rented buffer, in pieces."""
        shape = self._planes[plane]
        if self.outs is not None and shape.dense:
            direct = dense_bytes(self.outs[plane])
            if direct is not None and direct.__array_interface__["data"][0] % PAGE == 0:
                return direct
        buffer = self._r.buffers.acquire(self._n_windows * shape.chunk_bytes)
        assert buffer is not None, "the pool of read buffers has no budget"
        self._buffers.append(buffer)
        return buffer.array

    def _submit(self, tier: Tier, by_source: list[tuple[Source, list[Read]]]) -> Ticket:
        n_bytes = sum(len(read.dest) for _, reads in by_source for read in reads)
        size = max(LEAST_SLICE, min(MOST_SLICE, n_bytes // self._r.pool.n_threads))
        tasks = [
            partial(self._read, tier, part, source.span)
            for source, reads in by_source
            for part in slices(reads, size)
        ]
        return self._r.pool.submit(Lane.DEMAND, tasks)

    def _read(self, tier: Tier, reads: list[Read], span: int) -> None:
        try:
            tier.read(reads)
        except MediumError:
            self.bad_span[tier.name] = span
            raise

    def tensors(self) -> Tensors:
        """What was read as [n_kv_heads, n_tokens, head_dim], in `outs` where they were given."""
        g, n_tokens = self._r.geometry, self._n_windows * self._window
        made = []
        for plane, dim in ((K, g.head_dim), (V, g.v_dim)):
            shape, data = self._planes[plane], self._dests[plane]
            if not shape.dense:
                dense = np.empty(n_tokens * shape.row_bytes, dtype=np.uint8)
                unpack(data, dense, shape)
                data = dense
            rows = as_tensor(data, g, n_tokens, dim)
            if self.outs is not None:
                out = self.outs[plane]
                if out.data_ptr() != rows.data_ptr():
                    out.copy_(rows)
                rows = out
            made.append(rows)
        return made[K], made[V]

    def promote(self) -> Ticket | None:
        """Copy what came from home into DRAM, behind everything else; None if nothing did."""
        if not self.plan.missing or not self._r.cache.capacity:
            return None
        if self._r.pool.depth()[Lane.PROMOTE] > MOST_PROMOTIONS:
            self._r.counters.add("promotions_skipped")
            return None
        for buffer in self._buffers:
            buffer.retain()
        tasks = [partial(self._copy_up, missing) for missing in self.plan.missing]
        ticket = self._r.pool.submit(Lane.PROMOTE, tasks)
        for buffer in self._buffers:
            ticket.then(buffer.release)
        return ticket

    def _copy_up(self, missing: Missing) -> None:
        source, cache = missing.source, self._r.cache
        start = source.held.first + missing.first
        wanted = np.arange(start, start + missing.count, dtype=np.int64)
        windows, entries = cache.admit(
            source.span, source.held.record.n_windows, self.layer, wanted
        )
        sizes = [shape.chunk_bytes for shape in self._planes]
        for window, entry in zip(windows.tolist(), entries.tolist(), strict=True):
            at = source.at + window - source.held.first
            k, v = (self._dests[p][at * sizes[p] : (at + 1) * sizes[p]] for p in (K, V))
            cache.fill(entry, k, v)
        cache.publish(entries)
        self._r.counters.add("promoted_bytes/dram", len(entries) * source.layout.chunk_bytes)

    def abandon(self) -> None:
        """Nobody will take it: its buffers and pins go when its last read has ended."""
        for ticket in self.tickets:
            ticket.cancel()

        def ended() -> None:
            self.unpin()
            self.give_back()

        when_all(self.tickets, ended)

    def unpin(self) -> None:
        """Its DRAM copies have been copied out."""
        for entries in self._entries:
            self._r.cache.unpin(entries)

    def give_back(self) -> None:
        """The session is done with the tensors."""
        for buffer in self._buffers:
            buffer.release()


def when_all(tickets: Sequence[Ticket], callback: Callable[[], None]) -> None:
    """Call back once, when every ticket is done."""
    if tickets:
        tickets[0].then(partial(when_all, tickets[1:], callback))
    else:
        callback()


def ended(tickets: Sequence[Ticket], timeout_s: float) -> bool:
    """Wait for tickets whatever their outcome; False when one outlasts timeout_s."""
    deadline = monotonic() + timeout_s
    for ticket in tickets:
        try:
            if not ticket.wait(max(0.0, deadline - monotonic())):
                return False
        except MediumError:
            continue
    return True
