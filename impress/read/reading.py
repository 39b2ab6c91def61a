"""What everything that reads from a store shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from impress.cache.chunks import ChunkCache
from impress.cache.copies import Copies
from impress.config import Config
from impress.errors import FORKED, ImpressError, PrefixLost
from impress.read.flights import Flights
from impress.read.parts import Source, sources_of
from impress.read.tickets import within_memory
from impress.spans.params import Params
from impress.spans.tables import TableCache
from impress.stats import Counters
from impress.tree.catalog import Held
from impress.types import Geometry
from impress.usage.history import History
from tiers.errors import MediumError, ReadFailed
from tiers.iopool import IoPool, Lane
from tiers.slots import Allowance, Buffer, BufferPool
from tiers.ssd import SsdTier

T = TypeVar("T")

#: What follows requests is skipped while more of it is queued than this: the cache may forget.
MOST_PROMOTIONS: Final = 1024
#: Bytes of read buffers that promotions may keep from being reused.
MOST_WAITING: Final = 256 << 20
#: Bytes of what requests used that may wait to be learnt from: where requests never pause, those
#: that chose rows of long prefixes would fill gigabytes before MOST_PROMOTIONS of them waited.
MOST_LESSONS: Final = 128 << 20


@dataclass(frozen=True, slots=True)
class Reading:
    """What sessions of a store read with; the same for all."""

    geometry: Geometry
    config: Config
    ssd: SsdTier
    copies: Copies
    pool: IoPool
    buffers: BufferPool
    counters: Counters
    quarantine: Callable[[int], None]  # told of a span that is bad at home
    history: History
    save_history: Callable[[], None]  # asks the committer; does nothing where none writes
    params: Params  # of fitted probe codecs
    kept: Callable[[int], bool] = lambda _span: True  # whether a span at home is somebody's
    flights: Flights = field(default_factory=Flights)
    #: Buffers that wait to be copied up: requests come first, and these would pile up behind them.
    waiting: Allowance = field(default_factory=lambda: Allowance(MOST_WAITING))
    lessons: Allowance = field(default_factory=lambda: Allowance(MOST_LESSONS))
    pid: int = field(default_factory=os.getpid)

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that opened the store. It touches nothing of it:
        locks may have come along taken, and then nobody opens them."""
        return os.getpid() != self.pid

    def check_here(self) -> None:
        """Raises ImpressError where this is such a child: no thread would read here."""
        if self.forked:
            raise ImpressError(f"session: {FORKED}")

    @contextmanager
    def lost_for(self) -> Iterator[None]:
        """Raise PrefixLost, counted, for what a medium or memory cannot give to this thread."""
        try:
            yield
        except MediumError as err:
            self.counters.add(f"lost/{err.reason}")
            raise PrefixLost(err.reason, str(err)) from None
        except MemoryError:
            self.counters.add("lost/shortage")
            raise PrefixLost("shortage", "memory: too little to plan with") from None

    def sources(self, held: Sequence[Held], tables: TableCache) -> list[Source]:
        """What these can be read by, as far as their tables can be had; what cannot is counted, and
        never again a hit where that is not only for now."""
        read = tables.of([one.record for one in held], self.config.read_timeout_s)
        sources, lost = sources_of(held, read, self.geometry)
        if lost is not None:
            self.counters.add(f"lost/{lost.reason}")
            if not lost.harmless:
                self.quarantine(held[len(sources)].record.span_id)
        return sources

    @property
    def crowded(self) -> bool:
        """Whether so much waits behind requests that more is to be skipped."""
        return self.pool.depth()[Lane.PROMOTE] > MOST_PROMOTIONS

    def forget_gone(self, spans: Iterable[int]) -> None:
        """Call after copies or notes of these are made: where a span has left home, none stay.

        What follows a request comes after its lease. The thread that takes a span out of home
        forgets it then, so that one of the two sees what the other did.
        """
        for span in set(spans):
            if not self.kept(span):
                self.copies.drop_span(span)
                self.history.forget(span)

    def went_bad(self, span: int, medium: str, caches: Sequence[ChunkCache]) -> None:
        """A span did not read back from a medium: no copy of it is trusted any more, and where the
        medium is home the span is never a hit again."""
        for cache in caches:
            cache.drop_span(span)
        if medium == "ssd":
            self.quarantine(span)

    def fetched(self, lane: Lane, call: Callable[[], T], what: str) -> T:
        """What a call that reads returns, made by a thread and waited for in time. Raises
        ReadFailed ("late", "shortage"), and what it raises."""
        found: list[T] = []
        limit_s = self.config.read_timeout_s
        read = partial(within_memory, lambda: found.append(call()))
        if not self.pool.submit(lane, [read]).wait(limit_s):
            raise ReadFailed("late", f"{what} took more than {limit_s:g} s")
        return found[0]

    def rent(self, n_bytes: int) -> Buffer:
        """A buffer to read into, page-aligned; released by whoever used it last.

        Raises ReadFailed where the process gets no more memory.
        """
        buffer = self.buffers.acquire(n_bytes)
        assert buffer is not None, "the pool of read buffers has no budget"
        return buffer
