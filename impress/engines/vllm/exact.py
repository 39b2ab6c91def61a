"""Exact requests inside vLLM: all rows of the stored prefix, layer by layer.

    layer    0   1   2   3   4   5
    hit a    w   r   r   r   .   .      w: waited for and written     r: on its way     .: not begun
    hit b    w   r   r   r   .   .

Reads on their way are bounded, whatever a step's hits add up to: once a layer of each hit has been
written, another is begun. All first layers come before any second one, as the step computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from impress.engines.vllm.blocks import Layout, slots_of
from impress.engines.vllm.patience import Patience
from impress.engines.vllm.step import LoadSpec
from impress.errors import PrefixLost
from impress.read.access import AccessReport
from impress.read.session import Lease, Session
from impress.store import PrefixStore

#: Most bytes of rows that a step reads ahead at once; a tenth of a second of a fast SSD. Two layers
#: of every hit are read ahead, however large.
MOST_AHEAD: Final = 512 << 20
_LEAST_LAYERS: Final = 2


class ExactLoad:
    """All rows of a request's prefix on their way into its blocks."""

    def __init__(
        self, store: PrefixStore, spec: LoadSpec, block_size: int, patience: Patience
    ) -> None:
        """`lost` says why, if not all of the prefix, or none of it, can be read.

        Raises ImpressError if it cannot be leased.
        """
        self.spec = spec
        self._patience = patience
        self.lost = ""
        self._lease: Lease = store.lease(spec.prompt.tokens, spec.prompt.extra, spec.prompt.tenant)
        self._session: Session | None = None
        self._placing: Placing | None = None
        self.layer_bytes = 0  # of rows on their way, a layer
        self.end = min(self._lease.n_tokens, spec.end) // block_size * block_size
        if self.end < spec.end:
            self.lost = f"the lease has {self._lease.n_tokens} of {spec.end} tokens"
        if self.end > spec.first:
            # Rows that vLLM has are not read; a window that begins before `first` is read whole.
            begin = spec.first // store.window * store.window
            try:
                self._slots = slots_of(spec.block_ids, block_size, spec.first, self.end)
                # In any order: the kernel puts each row into its slot.
                self._session = self._lease.session(first=begin, in_order=False)
                geometry = store.geometry
                row_bytes = geometry.token_bytes // geometry.n_layers
                self.layer_bytes = self._session.n_tokens * row_bytes
            except PrefixLost as err:
                self._give_up(err)
            except BaseException:
                self.close()
                raise

    def read_ahead(self, layer: int) -> None:
        """Begin reading a layer's rows."""
        if self._session is None:
            return
        try:
            self._session.prefetch(layers=[layer])
        except PrefixLost as err:
            self._give_up(err)

    def write(self, layer: int, kv_cache: torch.Tensor, layout: Layout) -> None:
        """Wait for a layer's rows and put them into its blocks."""
        if self._session is None:
            return
        try:
            with self._patience.waiting():
                k, v, at = self._session.retrieve(layer, None)
            if self._placing is None or self._placing.at is not at:  # in order: one for all layers
                self._placing = Placing(at, self.spec.first, self._slots)
            mine = self._placing
            layout.load(kv_cache, mine.of(k), mine.of(v), mine.slots)
            self._session.let_go(layer)
        except PrefixLost as err:
            self._give_up(err)
        except torch.OutOfMemoryError as err:  # device memory beside vLLM's share
            self._give_up(PrefixLost("shortage", str(err)))

    def _give_up(self, err: PrefixLost) -> None:
        """No more of the prefix is written."""
        self.lost, self.end = err.reason, self.spec.first
        self.close()

    def report(self) -> AccessReport | None:
        return self._session.report() if self._session is not None else None

    def close(self) -> None:
        """Give everything back. Idempotent."""
        session, self._session = self._session, None
        try:
            if session is not None:
                session.close()
        finally:
            self._lease.release()


class Placing:
    """Which of the rows that were read have a slot, and which slot. Pure.

    at int64: each row's token; slots int64: those of the tokens from `first` on.
    """

    def __init__(self, at: torch.Tensor, first: int, slots: torch.Tensor) -> None:
        self.at = at
        which = at - first
        mine = ((which >= 0) & (which < len(slots))).nonzero()[:, 0]
        self.slots = slots[which[mine]]
        self._mine: slice | torch.Tensor = mine
        if len(mine) and int(mine[-1] - mine[0]) == len(mine) - 1:  # side by side: never copied
            self._mine = slice(int(mine[0]), int(mine[-1]) + 1)

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Those of the rows [n_kv_heads, m, head_dim] that have a slot."""
        return rows.transpose(0, 1)[self._mine].transpose(0, 1)


class ExactSide:
    """The exact loads of a worker's step. For its thread."""

    def __init__(self, store: PrefixStore, block_size: int, patience: Patience) -> None:
        self._store = store
        self._patience = patience
        self._block_size = block_size
        self._loads: list[ExactLoad] = []
        self._n_ahead = 0  # layers

    def start(self, spec: LoadSpec) -> None:
        """Add a hit of this step. Raises ImpressError if its prefix cannot be leased."""
        self._loads.append(ExactLoad(self._store, spec, self._block_size, self._patience))

    def begin(self) -> None:
        """All hits of the step are here: begin reading their first layers."""
        n_bytes = sum(load.layer_bytes for load in self._loads)
        self._n_ahead = max(_LEAST_LAYERS, MOST_AHEAD // max(n_bytes, 1))
        for layer in range(min(self._n_ahead, self._store.geometry.n_layers)):
            self._read_ahead(layer)

    def write(self, layer: int, kv_cache: torch.Tensor, layout: Layout) -> None:
        """On return a layer's rows are in their blocks, or their loss is noted."""
        for load in self._loads:
            load.write(layer, kv_cache, layout)
        if layer + self._n_ahead < self._store.geometry.n_layers:
            self._read_ahead(layer + self._n_ahead)

    def _read_ahead(self, layer: int) -> None:
        for load in self._loads:
            load.read_ahead(layer)

    def end(self) -> Iterator[ExactLoad]:
        """The step's loads, now over. Close each; if cut off, it is still here next time."""
        while self._loads:
            yield self._loads[0]
            del self._loads[0]
