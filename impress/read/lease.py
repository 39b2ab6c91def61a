"""A pinned prefix: what one request may read until it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from impress.errors import ImpressError, PrefixLost
from impress.policy import Exact, Policy
from impress.read.parts import Source
from impress.read.reading import Reading
from impress.tree.leases import Clock

if TYPE_CHECKING:
    from impress.read.session import Session


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
        self._clock = clock
        self._taken = False  # by the store: nobody released it in time
        self.reading = reading
        self._make_session = make_session
        self._release = release
        self._lock = threading.Lock()
        self._sessions: set[Session] = set()  # not closed yet

    def cold_bytes(self) -> int:
        """Of its keys and values: bytes of chunks that no cache holds now, so home has to."""
        n_layers, copies = self.reading.geometry.n_layers, self.reading.copies
        n_chunks = self.n_tokens // self._window * n_layers
        held = [source.held for source in self.sources]
        here = sum(copies.held_of(h.record.span_id, h.first, h.count) for h in held)
        return max(n_chunks - here, 0) * (self._window_bytes // n_layers)

    def span_bytes(self) -> list[tuple[bytes, int]]:
        """The spans it lies in, by the keys of all up to their ends, and its bytes in each."""
        held = [source.held for source in self.sources]
        return [(one.record.key_after, one.count * self._window_bytes) for one in held]

    def cache_bytes(self) -> int:
        """Bytes of keys and values that the caches hold at most."""
        return sum(one.capacity * one.chunk_bytes for one in self.reading.copies.chunks)

    def session(
        self, policy: Policy | None = None, first: int = 0, *, in_order: bool = True
    ) -> Session:
        """Reads of this prefix under a policy, from token `first` on: what is before, in whole
        windows, the caller has. Only where all rows are brought can it be above 0.

        in_order=False: for whoever puts rows where `retrieve`'s pos says, or needs them in no
        order. All rows of packed prefixes then come as they lie, with nothing to put in order.
        Raises PrefixLost when it is too old, ImpressError on a miss or after release, BadInput.
        """
        if not self.n_tokens:
            raise ImpressError("lease: a miss has nothing to read (check n_tokens first)")
        session = self._make_session(self, policy or Exact(), first, in_order)
        self._sessions.add(session)
        return session

    def forget(self, session: Session) -> None:
        """It is closed."""
        self._sessions.discard(session)

    def check_active(self) -> None:
        """Raises PrefixLost when expired, ImpressError when released."""
        self.check_age()
        if not self.active:
            raise ImpressError("session: its lease has ended before every layer was retrieved")

    def check_age(self) -> None:
        """Raises PrefixLost when expired."""
        limit_s = self.reading.config.lease_timeout_s
        if self._taken or self._clock() - self.started_s > limit_s:
            self.reading.counters.add("lost/expired")
            raise PrefixLost("expired", f"the lease is older than {limit_s:g} s")

    def expire(self) -> bool:
        """Release for a holder that has not: reads are lost from now on. False: it was released."""
        self._taken = True
        return self._end()

    def release(self) -> None:
        """Unpin. Layers that were being read ahead and were not retrieved yet are given up; those
        that were retrieved stay valid until their session closes. Idempotent."""
        self._end()

    def _end(self) -> bool:
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
