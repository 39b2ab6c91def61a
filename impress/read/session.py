"""One request's reads: a lease on a prefix, and a session that brings its layers.

lease ─session→ prefetch (optional: start all layers) → retrieve(layer) … → close
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING

from impress.errors import BadInput, ImpressError, PrefixLost
from impress.policy import Exact, Policy
from impress.read.access import AccessReport, Line, line_of, report_of
from impress.read.begun import Begun
from impress.read.climb import Climbs
from impress.read.load import Load
from impress.read.outs import Outs, check_beside, outs_of, outs_of_all
from impress.read.parts import Source, as_they_lie, behind, chunks_here, rows_of
from impress.read.promote import Looked, Need, hand_over
from impress.read.reading import Reading
from impress.read.tickets import ended, give_way
from impress.spans.layout import K, V
from impress.spans.rows import torch_module
from impress.tree.leases import Clock
from impress.types import an_int, check_layer, layers_of
from tiers.iopool import Lane
from tiers.ticket import Ticket

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


class Lease:
    """A pinned prefix. `n_tokens` is 0 on a miss, and `miss_reason` says why.

    Home keeps every byte of it until `release` (the end of the with-block), or its store's `close`.
    """

    def __init__(
        self, sources: Sequence[Source], window: int, miss_reason: str, reading: Reading,
        make_session: Callable[[Lease, Policy, int, bool], Session],
        release: Callable[[Lease], None], clock: Clock,
    ) -> None:  # fmt: skip
        self.sources = tuple(sources)
        self.n_tokens = sum(source.held.count for source in sources) * window
        self._window = window
        self._window_bytes = window * reading.geometry.token_bytes
        self.miss_reason = miss_reason
        self.started_s = clock()
        self.active = True
        self.is_kept = False  # its request has read all, and will only be weighed by it
        self._clock = clock
        self._taken = False  # taken back by the store: nobody released it in time
        self.reading = reading
        self._make_session, self._release = make_session, release
        self._lock = threading.Lock()
        self._sessions: set[Session] = set()  # not closed yet

    def cold_bytes(self) -> int:
        """Bytes of its keys and values in chunks that no cache holds now, so home has to."""
        n_layers, copies = self.reading.geometry.n_layers, self.reading.copies
        here = sum(chunks_here(source, copies) for source in self.sources)
        n_cold = self.n_tokens // self._window * n_layers - here
        return max(n_cold, 0) * (self._window_bytes // n_layers)

    def span_bytes(self) -> list[tuple[bytes, int]]:
        """The spans it lies in, each by the key of all tokens to its end, and its bytes in each."""
        held = [source.held for source in self.sources]
        return [(one.record.key_after, one.count * self._window_bytes) for one in held]

    def cache_bytes(self) -> int:
        """Most bytes of keys and values that the caches can hold."""
        return sum(one.capacity * one.chunk_bytes for one in self.reading.copies.chunks)

    def session(
        self, policy: Policy | None = None, first: int = 0, *, in_order: bool = True
    ) -> Session:
        """A session that reads this prefix under a policy, from token `first` on: the caller has
        the whole windows before it. `first` can be above 0 only where all rows are brought.

        in_order=False: for callers that put rows where `retrieve`'s pos says, or need no order.
        All rows of packed prefixes then come as they lie, with nothing to put in order. Raises
        PrefixLost when the lease is too old, ImpressError on a miss or after release, BadInput.
        """
        if not self.n_tokens:
            raise ImpressError("lease: a miss has nothing to read (check n_tokens first)")
        at = an_int(first, "session: first")
        self._sessions.add(session := self._make_session(self, policy or Exact(), at, in_order))
        return session

    def forget(self, session: Session) -> None:
        """The session is closed."""
        self._sessions.discard(session)

    def check_active(self) -> None:
        """Raises PrefixLost when expired, ImpressError when released, and as `check_age`."""
        self.check_age()
        if not self.active:
            raise ImpressError("session: its lease has ended before every layer was retrieved")

    def check_age(self) -> None:
        """Raises PrefixLost when expired, ImpressError in a fork's child."""
        self.reading.check_here()
        limit_s = self.reading.config.lease_timeout_s
        if self._taken or self._clock() - self.started_s > limit_s:
            self.reading.counters.add("lost/expired")
            raise PrefixLost("expired", f"the lease is older than {limit_s:g} s")

    def expire(self) -> bool:
        """Release for a holder that has not: reads are lost from now on. False: it already was."""
        self._taken = True
        return self._end()

    def release(self) -> None:
        """Unpin. Layers that were being read ahead and were not retrieved yet are given up; those
        that were retrieved stay valid until their session closes. Idempotent."""
        self._end()

    def _end(self) -> bool:
        if self.reading.forked:
            return False
        try:
            return self._let_go()
        except BaseException:  # Ctrl-C: nobody ends it again
            self._let_go()
            raise

    def _let_go(self) -> bool:
        with self._lock:
            was_active, self.active = self.active, False
        self._release(self)
        for session in [*self._sessions]:  # which their holder may have forgotten
            session.give_up()
            self.forget(session)
        return was_active

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_error: object) -> None:
        self.release()


class Session:
    """Brings a leased prefix layer by layer. For one thread; close it when done."""

    _lane = Lane.DEMAND  # of all its reads, including those it chooses by

    def __init__(
        self, lease: Lease, policy: Policy, reading: Reading, first: int = 0, in_order: bool = True
    ) -> None:
        """`first`, `in_order`: see Lease.session. Raises BadInput."""
        lease.check_active()
        self._window = lease.sources[0].held.record.window
        if not 0 <= first < lease.n_tokens or first % self._window:
            raise BadInput(
                f"session: first must be whole windows of {self._window} and below "
                f"{lease.n_tokens} tokens, got {first}"
            )
        self.n_tokens = lease.n_tokens - first
        self.policy = policy
        self._lease, self._first = lease, first
        self._sources = behind(lease.sources, first // self._window) if first else lease.sources
        if not in_order:
            self._sources = as_they_lie(self._sources)
        self._r = reading
        self._loads: dict[int, Load] = {}  # under way
        self._untaken = [self._loads]  # whoever takes a load out of these ends it
        self._given: dict[int, list[Load]] = {}  # retrieved, still valid
        self._came_s = 0.0  # when the last layer came in: the turn of the next
        self._begun = Begun()
        self._copied: list[Ticket] = []  # others may copy from `outs` until these are done
        self._climbs = Climbs()
        self._looked: list[Looked] = []  # by layers retrieved, for history
        self._layers: list[Line] = []
        self._positions: torch.Tensor | None = None  # of all rows
        self._closed = self._ended = False
        self.need: Need = "all" if isinstance(policy, Exact) else "some"

    @property
    def needs_suffix_lse(self) -> bool:
        """Whether retrieve must be given suffix_lse."""
        return self.policy.needs_suffix_lse

    def prefetch(
        self, outs: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Start reading these layers (None: every one), in order; retrieve(layer) then waits for
        what is left.

        `outs`: per layer (k, v) [n_kv_heads, n_tokens, head_dim]. Token-major, page-aligned ones
        are read into directly. Keep them, unchanged, until `close`. They are of all layers, so they
        cannot be given beside `layers`. Raises as `retrieve` does.
        """
        if self._closed:
            raise ImpressError("session: closed")
        self._lease.check_active()
        n_layers = self._r.geometry.n_layers
        given: dict[int, Outs | None] = dict.fromkeys(layers_of(layers, n_layers, "prefetch"))
        if outs is not None:
            if layers is not None:
                raise BadInput("prefetch: outs are of every layer: give outs, or layers")
            pairs = dict(enumerate(outs_of_all(outs, self._r.geometry, self.n_tokens)))
            check_beside(pairs, self._into())
            given |= pairs
            self._check_free()
        with self._r.lost_for():
            for layer, pair in given.items():
                if (load := self._loads.get(layer)) is None:  # its lease may end at any moment
                    self._loads[layer] = self._start(layer, pair)
                elif pair is not None:
                    load.outs = pair  # under way to elsewhere: copied
                give_way()
        self._check_ended()

    def retrieve(
        self, layer: int, query: torch.Tensor | None, scaling: float | None = None,
        suffix_lse: torch.Tensor | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """(k, v, pos) of a layer: k, v [n_kv_heads, m, head_dim], pos int64 [m].

        On the query's device, in position order unless the session is not `in_order`; not to be
        written to before `close`. For all rows in order, pos is one tensor shared by all layers.
        out: as prefetch's outs, for this layer alone.

        query [n_heads, q, head_dim] after RoPE; scaling defaults to head_dim^-0.5; suffix_lse
        float32 [n_heads, q]. Exact ignores all three. Valid until this layer's next retrieve or
        let_go, or close. Raises PrefixLost when the read failed, was short or late; BadInput;
        ImpressError once the session is closed, or without a suffix_lse that the policy needs.
        """
        torch = torch_module()
        check_layer(layer, self._r.geometry.n_layers, "retrieve")
        if query is not None and not isinstance(query, torch.Tensor):
            raise BadInput(f"retrieve: query wants a tensor or None, got {type(query).__name__}")
        if self._closed:
            raise ImpressError("session: closed")
        self._lease.check_age()
        if self.needs_suffix_lse and suffix_lse is None:
            raise ImpressError(f"retrieve: policy {self.policy.name} needs suffix_lse")
        with self._r.lost_for():
            k, v, positions = self._bring(layer, query, scaling, suffix_lse, out)
        if query is not None and query.device != v.device:
            v = v.to(query.device)
            if k.shape[1] == v.shape[1]:  # else all keys: whoever asked for these has them there
                k = k.to(query.device)
        if positions is None:
            return k, v, self._every_position(v.device)
        return k, v, torch.tensor(positions + self._first, dtype=torch.int64, device=v.device)

    def _every_position(self, device: torch.device) -> torch.Tensor:
        """For all rows: the same tensor for every layer, made once."""
        if self._positions is None or self._positions.device != device:
            end = self._first + self.n_tokens
            self._positions = torch_module().arange(self._first, end, device=device)
        return self._positions

    def _bring(
        self, layer: int, query: torch.Tensor | None, scaling: float | None,
        suffix_lse: torch.Tensor | None, out: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, npt.NDArray[np.int64] | None]:  # fmt: skip
        """The layer's K and V on the host, and which rows they are (None: all, in order)."""
        pair: Outs | None = None
        if out is not None:  # before the load is taken: whoever takes it ends it
            others = [load.outs for at, load in list(self._loads.items()) if at != layer]
            pair = outs_of(out, self._r.geometry, self.n_tokens, others)
            check_beside({layer: pair}, self._into())
            self._check_free()
        begin_s = monotonic()
        load = self._loads.pop(layer, None)
        if load is None:
            self._lease.check_active()
            load = self._start(layer, pair)
        elif pair is not None:
            load.outs = pair  # read ahead into a buffer: copied out below
        try:
            load.wait(self._came_s)  # all may have been begun at once, and come one after the other
            self._came_s = monotonic()
            k, v = load.tensors()  # may put rows in order: that is part of the wait
            self._account(load, begin_s)
            self._keep(layer, [load])
            return k, v, rows_of(load.parts)
        except BaseException:
            load.abandon()
            raise

    def _keep(self, layer: int, loads: list[Load]) -> None:
        """Hold what the caller now looks at; let go of what it looked at before."""
        self.let_go(layer)
        self._given[layer] = loads

    def let_go(self, layer: int) -> None:
        """Nobody looks at what `retrieve` gave of a layer any more: others may have its memory."""
        for load in self._given.pop(layer, []):
            load.give_back()

    def report(self) -> AccessReport:
        """What has been retrieved so far."""
        return report_of(self.policy.name, self.n_tokens, self._layers)

    def close(self) -> bool:
        """Stop reading ahead, give buffers back. True when nothing touches `outs` any more.

        False when a read is stuck past the time limit: then drop the tensors, and reuse none before
        `is_untouched`. What has yet to climb from `outs` is copied now: its turn may be far off.
        """
        if self._r.forked:
            return True
        if not self._ended:
            self._closed = True
            try:
                self._end()
            except BaseException:  # Ctrl-C: mostly nobody closes it again
                self._end()
                raise
        limit_s = self._r.config.read_timeout_s
        until_s = max(self._begun.given_s, self._came_s) + limit_s  # no layer was given longer
        if not ended(self._begun.reads(), max(until_s - monotonic(), 0.0)):
            return False
        return ended([*self._climbs.leaving, *self._copied], limit_s)

    def is_untouched(self) -> bool:
        """After `close`: whether nothing touches `outs` any more. Waits for nothing."""
        reads = self._begun.reads()
        return all(one.done for one in (*reads, *self._climbs.leaving, *self._copied))

    def _end(self) -> None:
        """All that closing does except waiting. What an exception cut off, the next call does."""
        self.give_up()
        for load in list(chain.from_iterable(self._given.values())):
            load.give_back()
        self._given.clear()
        self._begun.end()  # even those that nobody was told of
        self._hand_over()
        self._copied = self._begun.over()
        if self._climbs.leaving:
            self._r.pool.run_here(Lane.PROMOTE, self._climbs.leaving)
        self._lease.forget(self)  # last: until then its lease's end gives up what is left
        self._ended = True

    def _into(self) -> dict[int, Outs]:
        """By layer under way: the caller's memory that it is read into."""
        loads = list(self._loads.items())
        return {layer: load.into for layer, load in loads if load.into is not None}

    def give_up(self) -> None:
        """Abandon what was not taken yet: nobody will retrieve it. From any thread, at any time."""
        for loads in self._untaken:
            while loads:
                with suppress(KeyError):  # taken just now
                    loads.popitem()[1].abandon()
        self._climbs.begin()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _check_ended(self) -> None:
        """After new loads: the lease's end, on another thread, may not have seen them."""
        if not self._lease.active:
            self.give_up()

    def _check_free(self) -> None:
        """Check that nothing that was lost may still write to memory that is given again."""
        if any(ticket.given_up for ticket in self._begun.reads()):
            self._lease.check_active()  # its end gives reads up, too: nothing is late then
            self._r.counters.add("lost/late")
            raise PrefixLost("late", "a lost layer is still being read into memory given here")

    def _start(self, layer: int, outs: Outs | None) -> Load:
        where = self._begun.add, self._sources, layer, self._r.copies.chunks
        return Load(self._r, *where, (K, V), outs=outs, lane=self._lane)

    def _climb(self, load: Load) -> None:
        """Copy what a load brought one tier up."""
        self._climbs.add(load)
        if not self._lease.active:  # its end, on another thread, may have come before
            self._climbs.begin()

    def _hand_over(self) -> None:
        """The request has what it needs: what it showed is learnt afterwards."""
        looked, self._looked = self._looked, []
        if looked:
            hand_over(self._r, self._sources, looked, self.need, self._climbs.tickets)

    def _account(self, load: Load, begin_s: float) -> None:
        """Note what a layer took, and promote it."""
        self._layers.append(line_of(load, [load], (monotonic() - begin_s) * 1e3))
        self._climb(load)
        self._looked.append(Looked(None, decided=False, brought=load.brought()))
