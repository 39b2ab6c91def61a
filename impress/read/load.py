"""One layer's planes on their way from the tiers to memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final

from impress.cache.chunks import ChunkCache, Ids
from impress.cache.levels import only_fastest
from impress.errors import PrefixLost
from impress.read.copying import Find, Unfound, found
from impress.read.direct import Direct, direct_of
from impress.read.early import Early
from impress.read.flights import Flight, key_of, take
from impress.read.mapping import gathers_of
from impress.read.outs import Outs
from impress.read.parts import Part, Positions, Source, parts_of, used_chunks
from impress.read.placement import Brought
from impress.read.plan import ReadPlan, Runs, plan_reads, rows_by_tier
from impress.read.putting import Putting
from impress.read.reading import Reading
from impress.read.takes import Takes
from impress.read.tickets import when_all, within_memory
from impress.read.whole import Whole
from impress.spans.layout import K, V
from impress.spans.rows import address_of, as_tensor, take_rows, unpack
from impress.stats import Spent
from tiers.base import PAGE, Bytes, Read
from tiers.coalesce import LARGE_SLICE, STREAM, TURNS, slice_bytes, slices
from tiers.errors import HARMLESS, MediumError
from tiers.iopool import Lane
from tiers.slots import Buffer, release_all
from tiers.ticket import Task, Ticket

if TYPE_CHECKING:
    import torch

    from impress.read.outs import Tensors

#: Names among a load's tickets: copies of what was read ahead, and what puts V's rows in order.
_AHEAD, _ORDER = "ahead", "order"
#: Slices of a copy per thread that copies: if one thread is held up, the others take its second.
_COPIES: Final = 2


class Load:
    """Some planes of a layer being read, whole or chosen rows; started by the constructor.

    `abandon`, or `wait` and later `give_back`, ends it; the first of these counts.
    """

    def __init__(
        self,
        reading: Reading,
        note: Callable[[Load], object],
        sources: Sequence[Source],
        layer: int,
        caches: Sequence[ChunkCache],
        planes: Sequence[int],
        positions: Positions | None = None,
        outs: Outs | None = None,
        ahead: Early | None = None,
        lane: Lane = Lane.DEMAND,
    ) -> None:
        """`note`: called with it before it takes anything. `sources`: for probe records in position
        order. Under a lane other than DEMAND it is not a request's read, and not counted as one."""
        self.layer, self._lane = layer, lane
        self.planes = tuple(planes)
        self.positions = positions  # None: every row
        # The caller's memory: read into where possible; copied to where given once under way.
        self.into = self.outs = outs
        self.started_s = monotonic()
        self.reading = reading
        self.caches = caches
        self.shapes = [sources[0].layout.planes[plane] for plane in planes]
        self._ahead = ahead
        self._bad_span: dict[str, int] = {}  # medium -> span that is bad there
        self.buffers: list[Buffer] = []  # rented, or held until the reads have ended
        self.map_spent = Spent()  # finding where the rows lie
        self.found_spent: list[Spent] = []  # the same, by the threads that copy: one per slice
        with self.map_spent:
            self.parts = parts_of(sources, layer, positions)
        self.entries: list[list[Ids]] = []  # by cache, of each part's chunks
        self._pinned: list[list[Ids]] = [[] for _ in caches]  # the same, -1 once unpinned
        self.is_over = False
        self.flight: Flight | None = None  # others may copy what it brings
        self._followed: Flight | None = None  # whose bytes it copies
        self.shared: list[int] = []  # bytes it copied from there, one per task; not read itself
        self._direct: Direct | Whole | None = None  # what comes from memory
        self.tickets: dict[str, Ticket] = {}  # by medium
        note(self)
        try:
            for part in self.parts if caches else ():
                used = None if part.is_whole else used_chunks(part)
                if lane is not Lane.DEMAND:
                    used = used_chunks(part) & False  # not a request's use of them
                for cache, noted in zip(caches, self._pinned, strict=True):
                    cache.pin(part.span, layer, part.first, part.count, used, noted)
            self._begin()
        except BaseException:  # no memory to read into, say
            self.abandon()
            raise

    def _begin(self) -> None:
        """Find where everything lies, and ask for it."""
        ahead = self._ahead
        if len(self.caches) > 1:
            only_fastest(self.caches, self._pinned)
        self.entries = [[ids.copy() for ids in of_cache] for of_cache in self._pinned]
        with self.map_spent:
            self._direct = self._divided()
            gathers = gathers_of(
                self.parts, self.planes, self.shapes, self.reading.config.read_gap_bytes,
                chosen=self.positions is not None, direct=self._direct, ahead=ahead,
            )  # fmt: skip
        self.runs = [g.runs for g in gathers]  # of pieces, by plane and part
        self._rows = [g.rows for g in gathers]  # of dest, by plane; None: all, as they lie
        if self._direct is not None:
            self._direct.lie(self._rows)
        self._n_pieces = [g.n_pieces for g in gathers]
        self._dests = [self._dest(i) for i in range(len(self.planes))]
        plan = self._plan([g.read for g in gathers])
        self._key = self._shared_key()
        self._followed = None if self._key is None else self.reading.flights.under_way(self._key)
        self.bytes_by_tier = plan.n_bytes
        if plan.home:  # first: it takes longest
            self._submit_home(plan.home, self.bytes_by_tier["ssd"])
        for cache in self.caches:
            if copies := plan.copies[cache.tier.name]:
                self._submit(cache, copies)
        self._takes: Takes | None = None
        if ahead is not None:
            self._take(ahead, [g.taken for g in gathers])
        self.rows_by_tier: dict[str, int] = {}  # once `wait` returned

    def _divided(self) -> Direct | Whole | None:
        """Scattered rows, divided by who has them; None: all go one way."""
        outs = None if self.outs is None else self.outs.memory
        if self._ahead is not None or (outs is not None and any(out is None for out in outs)):
            return None
        how = {"chosen": self.positions is not None, "into_place": outs is not None}
        return direct_of(self.parts, self.entries, self.shapes, **how)

    def _plan(self, runs: Sequence[Sequence[Runs]]) -> ReadPlan:
        """Reads of these runs, and of the rows that come from memory directly."""
        direct, cached, caches = self._direct, self.entries, self.caches
        if direct is None:
            where = self.parts, self.layer, self.planes
            return plan_reads(*where, runs, cached, caches, self._dests)
        direct.given = [self._rows_given(i, direct.n_places) for i in range(len(self.planes))]
        plan = plan_reads(direct.left, self.layer, self.planes, runs, (), (), self._dests)
        with self.map_spent:
            plan.copies = direct.copies(self.parts, cached, self.layer, self.planes, caches)
        return plan

    def _rows_given(self, i: int, n_rows: int) -> Bytes:
        """Where n_rows of a plane go, one after the other: the caller's memory, or some lent."""
        dense = None if self.outs is None else self.outs.memory[i]
        if dense is None:
            return self.reading.rent(n_rows * self.shapes[i].row_bytes).lent()
        return dense

    def _dest(self, i: int) -> Bytes:
        """Straight into a dense page-aligned out; else a rented buffer, in pieces."""
        shape = self.shapes[i]
        if self._rows[i] is None and self._direct is None and self.outs is not None and shape.dense:
            memory = self.outs.memory[i]
            if memory is not None and address_of(memory) % PAGE == 0:
                return memory
        self.buffers.append(self.reading.rent(self._n_pieces[i] * shape.piece_bytes))
        return self.buffers[-1].array

    def _queue(
        self, name: str, tasks: Sequence[Task], after: Ticket | None = None, *, copies: bool = False
    ) -> None:
        """Noted before it is queued: `abandon` must know of it whatever comes between."""
        guarded = [partial(within_memory, task) for task in tasks]
        note = partial(self.tickets.__setitem__, name)
        self.reading.pool.submit(self._lane, guarded, after, note, copies=copies)

    def _submit_home(self, by_part: list[tuple[Part, list[Read]]], n_bytes: int) -> None:
        if self.positions is not None and self.reading.ssd.sends_many:
            size = STREAM
        else:
            size = self._slice_bytes(n_bytes, self.reading.pool.n_threads, TURNS)
        tasks = [
            partial(self._read, some, part.span)
            for part, reads in by_part
            for some in slices(reads, size)
        ]
        followed = self._followed
        self._queue("ssd", tasks, None if followed is None else followed.ended)
        alone = self._lane is not Lane.DEMAND or self._ahead is not None  # others do not follow it
        if self._key is not None and followed is None and not alone:
            self.flight = Flight(self._dests, self.tickets["ssd"])
            self.reading.flights.begin(self._key, self.flight)

    def _submit(self, cache: ChunkCache, by_part: list[tuple[Part, Unfound]]) -> None:
        n_bytes = sum(pieces.n_bytes for _, pieces in by_part)
        size = self._slice_bytes(n_bytes, self.reading.pool.n_copiers, _COPIES)
        tasks = [
            partial(self._read_copies, cache, some, part.span)
            for part, pieces in by_part
            for some in pieces.cut(max(size, cache.tier.least_copy))
        ]
        self._queue(cache.tier.name, tasks, copies=True)

    def _slice_bytes(self, n_bytes: int, n_threads: int, turns: int = 1) -> int:
        few = self.reading.pool.depth()[self._lane] > 0
        return slice_bytes(n_bytes, n_threads, turns=turns, few=few)

    def _shared_key(self) -> Hashable | None:
        """Key of reads of the same planes of the same windows; None where rows were chosen."""
        if self.positions is not None:
            return None
        where = self.layer, self.planes, self.parts, self.entries
        return key_of(*where, direct=self._direct is not None)

    def _read(self, reads: list[Read], span: int) -> None:
        try:
            put = None if self._direct is None else Putting(self._direct, reads, self._dests)
            if self._followed is None:
                self.reading.ssd.read(reads, put)
            else:
                self.shared.append(take(self.reading.ssd, reads, self._dests, self._followed, put))
        except MediumError as err:
            if not err.harmless:
                self._bad_span["ssd"] = span
            raise

    def _read_copies(self, cache: ChunkCache, some: Find, span: int) -> None:
        try:
            cache.tier.read_pieces(found(some, self.found_spent))
        except MediumError as err:
            if not err.harmless:
                self._bad_span[cache.tier.name] = span
            raise

    def _take(self, ahead: Early, runs: Sequence[Sequence[Runs]]) -> None:
        """Queue, after the reads, copies of what was read ahead: by then more of it is there."""
        self._takes = takes = Takes(ahead, self.planes, self.shapes, self._dests)
        for buffer in takes.ahead.buffers:
            buffer.retain()
            self.buffers.append(buffer)
        tasks = takes.tasks(self.layer, self.parts, runs, self._read)
        self._queue(_AHEAD, tasks)

    # ---- taking it -------------------------------------------------------------------------

    def wait(self, since_s: float = 0.0) -> None:
        """Return when every read is in. Raises PrefixLost; then, and whatever else is raised, the
        load has been abandoned.

        `since_s`: when its turn came, if that was after its start: the time limit begins there.
        """
        try:
            self._wait(max(self.started_s, since_s))
        except BaseException:
            self.abandon()
            raise

    def _wait(self, begin_s: float) -> None:
        lost = self._failure(begin_s)
        if lost is not None:
            # What is read behind requests need not be in time, and costs no request anything.
            if self._lane is Lane.DEMAND or lost.reason not in HARMLESS:
                self.reading.counters.add(f"lost/{lost.reason}")
            raise lost
        self._unpin()
        if self._takes is not None:
            self.bytes_by_tier["ssd"] += self._takes.reread_bytes
        # Not earlier: it would keep the threads that are to read waiting for the interpreter.
        self.rows_by_tier = rows_by_tier(self.parts, self.entries, self.caches)
        if self._lane is not Lane.DEMAND:
            return
        self.reading.counters.add("ahead_used_bytes", self.ahead_used_bytes)
        self.reading.counters.add("shared_bytes", sum(self.shared))
        self.reading.counters.load_ms((self._ready_s() - self.started_s) * 1e3)
        for tier, n in self.bytes_by_tier.items():
            self.reading.counters.add(f"read_bytes/{tier}", n)

    def _ready_s(self) -> float:
        """When the last read was in: the layer may be taken much later."""
        ends = (ticket.ended_s for ticket in self.tickets.values())
        return min(max(ends, default=self.started_s), monotonic())

    def _failure(self, begin_s: float) -> PrefixLost | None:
        """None when all is in; a bad span is dropped where it is bad."""
        limit_s = self.reading.config.read_timeout_s
        for name, ticket in self.tickets.items():
            medium = "ssd" if name == _AHEAD else name
            try:
                if not ticket.wait(max(begin_s + limit_s - monotonic(), 0.0)):
                    return PrefixLost("late", f"layer {self.layer} took more than {limit_s:g} s")
            except MediumError as err:
                if medium in self._bad_span:  # else none is to blame
                    self.reading.went_bad(self._bad_span[medium], medium, self.caches)
                return PrefixLost(err.reason, str(err))
        return None

    @property
    def ahead_used_bytes(self) -> int:
        """Bytes that were read ahead and taken; once `wait` returned."""
        return 0 if self._takes is None else self._takes.used_bytes

    @property
    def ahead_hit_rows(self) -> int:
        """Wanted rows of which nothing was left to read; once `wait` returned."""
        return 0 if self._takes is None else self._takes.hit_rows(self._rows)

    def brought(self) -> Brought:
        """What it brought, to learn from or to copy up; once `wait` returned."""
        return Brought(
            self.layer, self.planes, self.parts, self.caches, self.entries, self.shapes, self.runs,
            self.rows_by_tier,
        )  # fmt: skip

    def pieces(self, i: int) -> Bytes:
        """Plane number i of `planes` as it was read, padding included; once `wait` returned."""
        return self._dests[i]

    def tensors(self) -> Tensors:
        """K and V as [n_kv_heads, m, head_dim], in `outs` where they were given.

        Where many rows are put in order, another thread does V's; but not in a caller's memory,
        which may have been given too late for a session to know who writes to it.
        """
        assert self.planes == (K, V)
        beside: list[Bytes] = []
        own = self._direct is None and (self.outs is None or self.outs.memory[1] is None)
        rows = self._rows[1] if own else None
        if rows is not None and len(rows) * self.shapes[1].row_bytes >= LARGE_SLICE:
            self._queue(_ORDER, [lambda: beside.append(self._ordered(1))])
        k = self._tensor(self._ordered(0), 0)
        if _ORDER in self.tickets:
            self.reading.pool.run_here(self._lane, [self.tickets[_ORDER]])  # if all are busy
            self.tickets[_ORDER].wait(-1)
        return k, self._tensor(beside[0] if beside else self._ordered(1), 1)

    def tensor(self, at: Positions | None = None) -> torch.Tensor:
        """The only plane, K or V, as [n_kv_heads, m, head_dim]; `at`: only these of its rows."""
        assert len(self.planes) == 1
        return self._tensor(self._ordered(0, at), 0)

    def _ordered(self, i: int, at: Positions | None = None) -> Bytes:
        """Plane number i as dense rows, in order; `at`: some of them."""
        shape, data, chosen = self.shapes[i], self._dests[i], self._rows[i]
        if self._direct is not None:
            data, chosen = self._direct.rows(i), at
        elif at is not None:
            chosen = at if chosen is None else chosen[at]
        if chosen is not None:
            return take_rows(data, chosen, shape, self._rows_given(i, len(chosen)))
        if not shape.dense:
            dense = self._rows_given(i, self._n_pieces[i] * shape.piece_rows)
            unpack(data, dense, shape)
            return dense
        return data

    def _tensor(self, data: Bytes, i: int) -> torch.Tensor:
        g, n_rows = self.reading.geometry, len(data) // self.shapes[i].row_bytes
        dim = g.head_dim if self.planes[i] == K else g.v_dim
        rows = partial(as_tensor, data, g, n_rows, dim)
        return rows() if self.outs is None else self.outs.filled(i, data, rows)

    # ---- ending it -------------------------------------------------------------------------

    def abandon(self) -> None:
        """Nobody will take it: its buffers and pins go when its last read has ended."""
        if self.is_over:
            return
        if self.flight is not None:
            self.reading.flights.end(self._key, self.flight)
        for ticket in self.tickets.values():
            ticket.cancel()

        def ended() -> None:
            self._unpin()
            self.give_back()

        when_all(list(self.tickets.values()), ended)

    def _unpin(self) -> None:
        """The copies have been copied out."""
        for cache, of_cache in zip(self.caches, self._pinned, strict=True):
            for ids in of_cache:
                cache.unpin(ids)

    def give_back(self) -> None:
        """Nobody looks at the pieces, or at tensors of all rows, any more."""
        if self.is_over:
            return
        self._followed = None  # what waits to climb holds the load, which must keep no other's rows
        if self._direct is not None:
            self._direct.given.clear()
        release_all(self.buffers)  # the thread that ended the last read may be at it, too
        self.is_over = True  # last, so that what Ctrl-C cut off is done again
