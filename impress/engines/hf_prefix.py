"""The stored prefix of a request: leases of every batch row, and sessions that read them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from impress.engines.costs import Span
from impress.engines.hf_cache import RowsCache
from impress.policy import Exact, KeepAll, Policy
from impress.read.access import AccessReport
from impress.read.promote import pass_by
from impress.read.session import Lease, Session
from impress.read.shadow import SHADOW_ROWS, Seen
from impress.read.sparse import SparseSession
from impress.selection.scores import suffix_lse_of
from impress.store import PrefixStore
from tiers.hbm import page_lock

#: By `Lease.miss_reason`, what an engine says.
_MISSES: Final = {
    "not stored": "nothing of the prompt is stored",
    "too short": "the prompt has no whole window before its last token",
    "lost": "what is stored of the prompt could not be read",
    "tier off": "the store's disk does not answer",
}


class StoredPrefix:
    """Leases of a batch whose rows all have the same length stored.

    find_prefix → open(policy) → start, wait (all rows) | read_ahead, choose (one prompt) → close
    """

    def __init__(self, leases: Sequence[Lease]) -> None:
        self.n_tokens = leases[0].n_tokens
        self._leases = leases
        self._is_lent = False
        self._sessions: list[Session] = []
        self._begun_for: Policy | None = None  # the policy of these sessions
        self.once = False
        """Set before `open`: all rows are read, though requests to come will choose (`Need`)."""
        self.seen: dict[int, Seen] | None = None
        """A dict set here collects what each layer's `choose` was asked, to be weighed later."""

    def cold_bytes(self) -> int:
        """Bytes of all rows' keys and values that no cache holds now."""
        return sum(lease.cold_bytes() for lease in self._leases)

    def spans(self) -> tuple[Span, ...]:
        """The spans it lies in, lease by lease."""
        return tuple(Span(*span) for lease in self._leases for span in lease.span_bytes())

    def cache_bytes(self) -> int:
        """Most bytes that caches hold."""
        return self._leases[0].cache_bytes()

    def open(self, policy: Policy, begin: Callable[[Lease, Policy], Session] | None = None) -> None:
        """Begin the sessions, unless `has_importance` has begun them for this policy already.
        Raises what `Lease.session` does; close() must be called even then."""
        if self._sessions and self._begun_for == policy:
            return
        self._end()
        self._begun_for = policy
        # Attention to chosen rows needs no order of them; a cache has them by position.
        by_position = isinstance(policy, Exact | KeepAll)
        for lease in self._leases:
            if begin is None:
                self._sessions.append(lease.session(policy, in_order=by_position))
            else:
                self._sessions.append(begin(lease, policy))
        if self.once:
            for session in self._sessions:
                session.need = "once"

    def has_importance(self, policy: Policy) -> bool:
        """Whether all rows were stored with importance: begins the sessions that read by it.

        Raises PrefixLost.
        """
        self.open(policy)
        if all(isinstance(own, SparseSession) and own.has_importance() for own in self._sessions):
            return True
        self._end()
        return False

    def _end(self) -> None:
        while self._sessions:
            self._sessions.pop().close()

    def start(self, outs: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]) -> None:
        for session, layers in zip(self._sessions, outs, strict=True):
            session.prefetch(list(layers))

    def wait(self, layer: int) -> None:
        for session in self._sessions:
            session.retrieve(layer, None)

    def read_ahead(self) -> None:
        """Start reading, for every layer, what does not depend on a query."""
        (session,) = self._sessions
        session.prefetch()

    def choose(
        self, layer: int, query: torch.Tensor, new_keys: torch.Tensor, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's chosen rows, valid until close: k, v [n_kv_heads, m, head_dim]; all of them
        in any order.

        query [n_heads, q, head_dim] after RoPE; new_keys [n_kv_heads, q, head_dim]. Raises
        PrefixLost.
        """
        (session,) = self._sessions
        lse = None
        if session.needs_suffix_lse or self.seen is not None:
            lse = suffix_lse_of(query, new_keys, scaling)
        if query.is_cuda:  # else the wait for what is queued there would count as one for reads
            torch.cuda.current_stream(query.device).synchronize()
        # What it does not need it gets in no request, watched or not: it might choose by it.
        given = lse if session.needs_suffix_lse else None
        k, v, _ = session.retrieve(layer, query, scaling, given)
        if self.seen is not None and lse is not None and isinstance(session, SparseSession):
            chosen = session.chosen[layer]
            if query.shape[1] > SHADOW_ROWS:  # its estimates also cover rows that are not kept
                chosen = replace(
                    chosen, estimated_missing_mass=math.nan, missing_mass_worst_head=math.nan
                )
            self.seen[layer] = Seen(
                query[:, -SHADOW_ROWS:].clone(), scaling, lse[:, -SHADOW_ROWS:].clone(), chosen
            )
        return k, v

    @property
    def lease(self) -> Lease:
        """The lease of a prompt that came alone, not in a batch."""
        (lease,) = self._leases
        return lease

    def lend(self) -> Lease:
        """The same lease, which is the caller's to release from now on."""
        self._is_lent = True
        return self.lease

    def reports(self) -> list[AccessReport]:
        return [session.report() for session in self._sessions]

    def close(self) -> bool:
        """Unpin, once every layer is there or given up.

        True when nothing reads into the cache any more; False when a read is stuck: then its
        memory must not be used again before `is_untouched`. Idempotent.
        """
        try:
            for session in self._sessions:  # else one reads on while another is waited for
                session.give_up()
            ended = [session.close() for session in self._sessions]
        finally:  # Ctrl-C in a wait, too: they would stay pinned until their time limit
            for lease in self._leases:
                if self._is_lent:  # an answer may be longer than its time limit: that is no leak
                    lease.is_kept = True
                else:
                    lease.release()
        return all(ended)

    def passed_by(self) -> None:
        """It was closed unread, since recomputing seemed cheaper: that counts as a use."""
        for lease in self._leases:
            pass_by(lease.reading, lease.sources)

    def is_untouched(self) -> bool:
        """Once every layer is there or given up: whether nothing reads into the cache, or is copied
        up from it, any more; after `close`, followers of its reads included. Waits for nothing."""
        return all(session.is_untouched() for session in self._sessions)


def end_reads(prefix: StoredPrefix | None, cache: RowsCache) -> None:
    """Close a prefix; memory is not rented again while a stuck read may still write into it."""
    if prefix is not None and not prefix.close():
        cache.forsake(prefix.is_untouched)
    cache.release_left()


def end_early(prefix: StoredPrefix, cache: RowsCache) -> None:
    """Have a prefix closed once all layers are there and nothing is copied up any more from where
    they were read to. Held until the answer's last token, it could pass for one that nobody
    releases, could not be evicted, and was learnt from late."""
    its = weakref.ref(cache)  # else a cycle would leave it to the garbage collector

    def ended() -> bool:
        mine = its()
        if mine is None or not prefix.is_untouched():
            return False
        end_reads(prefix, mine)
        return True

    cache.layers[0].behind = ended


def find_prefix(
    store: PrefixStore, rows: Sequence[npt.NDArray[np.int32]]
) -> tuple[StoredPrefix | None, str]:
    """Lease the longest run of windows stored for every row; None is a miss, and why it is one.

    The last token is left out: the model must compute at least one.
    """
    longest, why = len(rows[0]) - 1, _MISSES["too short"]
    if len(rows) > 1 and longest >= store.window:
        # Rows of a batch share their positions: cut to the shortest, if all hit.
        found = [store.lookup(row[:longest]) for row in rows]
        longest = min(found) or longest
    while longest >= store.window:
        with ExitStack() as undo:
            leases = [undo.enter_context(store.lease(row[:longest])) for row in rows]
            shortest = min(lease.n_tokens for lease in leases)
            if shortest and all(lease.n_tokens == shortest for lease in leases):
                undo.pop_all()
                return StoredPrefix(leases), ""
            missed = next((lease.miss_reason for lease in leases if not lease.n_tokens), "")
            some = missed == "not stored" and any(lease.n_tokens for lease in leases)
            why = "not every prompt of the batch is stored" if some else _MISSES.get(missed, missed)
        longest = shortest  # something was removed between the two
    return None, why


def lock_pages(store: PrefixStore, model: Any) -> None:
    """For a model on a device: have the store read into memory that the device reaches."""
    if model.device.type == "cuda":
        store.buffers.prepare = partial(page_lock, device=model.device.index)
