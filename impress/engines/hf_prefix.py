"""The stored prefix of a request: leases and sessions of every batch row."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt
import torch

from impress.policy import Exact
from impress.session import AccessReport, Lease
from impress.store import PrefixStore


class StoredPrefix:
    """Leases and sessions of a batch whose rows share the length of what is stored of them."""

    def __init__(self, leases: Sequence[Lease], policy: Exact) -> None:
        self.n_tokens = leases[0].n_tokens
        self._leases = leases
        self._sessions = [lease.session(policy=policy) for lease in leases]

    def start(self, outs: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]) -> None:
        for session, layers in zip(self._sessions, outs, strict=True):
            session.prefetch(list(layers))

    def wait(self, layer: int) -> None:
        for session in self._sessions:
            session.retrieve(layer, None)

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


def find_prefix(
    store: PrefixStore, rows: Sequence[npt.NDArray[np.int32]], policy: Exact
) -> StoredPrefix | None:
    """Lease the longest run of windows stored of every row; None is a miss.

    The last token is left out: the model must compute at least one.
    """
    longest = len(rows[0]) - 1
    while longest >= store.window:
        with ExitStack() as undo:
            leases = [undo.enter_context(store.lease(row[:longest])) for row in rows]
            shortest = min(lease.n_tokens for lease in leases)
            if shortest and all(lease.n_tokens == shortest for lease in leases):
                prefix = StoredPrefix(leases, policy)
                undo.pop_all()
                return prefix
        longest = shortest  # rows of a batch share their positions: cut to the shortest
    return None
