"""The stored prefix of a request: leases of every batch row, and sessions that read them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt
import torch

from impress.policy import Policy
from impress.scores import suffix_lse_of
from impress.session import AccessReport, Lease, Session
from impress.store import PrefixStore


class StoredPrefix:
    """Leases of a batch whose rows share the length of what is stored of them.

    find_prefix → open(policy) → start, wait (all rows) | read_ahead, choose (one prompt) → close
    """

    def __init__(self, leases: Sequence[Lease]) -> None:
        self.n_tokens = leases[0].n_tokens
        self._leases = leases
        self._sessions: list[Session] = []

    def open(self, policy: Policy) -> None:
        """Begin the sessions. Raises what `Lease.session` does; close() is due all the same."""
        for lease in self._leases:
            self._sessions.append(lease.session(policy=policy))

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
        """A layer's chosen rows, valid until close: k, v [n_kv_heads, m, head_dim].

        query [n_heads, q, head_dim] after RoPE; new_keys [n_kv_heads, q, head_dim]. Raises
        PrefixLost.
        """
        (session,) = self._sessions
        suffix_lse = suffix_lse_of(query, new_keys, scaling) if session.needs_suffix_lse else None
        k, v, _ = session.retrieve(layer, query, scaling, suffix_lse)
        return k, v

    def reports(self) -> list[AccessReport]:
        return [session.report() for session in self._sessions]

    def close(self) -> bool:
        """Unpin, once every layer is there or given up.

        True when nothing reads into the cache any more; False when a read is stuck: then its
        memory must never be used again. Idempotent.
        """
        ended = [session.close() for session in self._sessions]
        for lease in self._leases:
            lease.release()
        return all(ended)


def find_prefix(store: PrefixStore, rows: Sequence[npt.NDArray[np.int32]]) -> StoredPrefix | None:
    """Lease the longest run of windows stored of every row; None is a miss.

    The last token is left out: the model must compute at least one.
    """
    longest = len(rows[0]) - 1
    while longest >= store.window:
        with ExitStack() as undo:
            leases = [undo.enter_context(store.lease(row[:longest])) for row in rows]
            shortest = min(lease.n_tokens for lease in leases)
            if shortest and all(lease.n_tokens == shortest for lease in leases):
                undo.pop_all()
                return StoredPrefix(leases)
        longest = shortest  # rows of a batch share their positions: cut to the shortest
    return None
