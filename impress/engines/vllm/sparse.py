"""Sparse requests inside vLLM: each layer reads the rows of the stored prefix its query chooses.

vLLM counts the whole prefix, n tokens, as computed: positions are right, and its blocks are there.
In layer l only k_l of its rows are there, in the first places, and all else follows directly:

    vLLM's slots     | 0 … n−1: the prefix          | n … : new rows as vLLM would lay them |
    what layer l has | k_l rows | new rows … |        (spare)

New rows are written twice, by vLLM to its slots and here after the k_l rows; the kernel reads the
latter. A new row's compact place is never after vLLM's, and both belong to the request, so neither
write can do harm. What is computed on such a prefix is approximate: the scheduler's side gives
these blocks hashes that nobody looks for, and nothing in them is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from impress.engines.vllm.blocks import Layout, slots_of
from impress.engines.vllm.choosing import Call, Shorten
from impress.engines.vllm.compact import Batch
from impress.engines.vllm.patience import Patience
from impress.engines.vllm.step import LoadSpec
from impress.errors import PrefixLost
from impress.read.access import AccessReport
from impress.read.session import Lease, Session
from impress.selection.scores import suffix_lse_of
from impress.store import PrefixStore


class SparseRequest:
    """A request whose layers choose once, in its prefill, and keep what they chose."""

    def __init__(self, store: PrefixStore, spec: LoadSpec, patience: Patience) -> None:
        """Starts reading what needs no query. `lost` says why, if nothing can be read. Raises
        ImpressError if the prefix cannot be leased."""
        assert spec.policy is not None
        self.spec = spec
        self._patience = patience
        self.lost = ""
        self.n_tokens = spec.end
        self.n_rows: list[int | None] = [None] * store.geometry.n_layers  # k of each layer
        self._lease: Lease = store.lease(spec.prompt.tokens, spec.prompt.extra, spec.prompt.tenant)
        self._session: Session | None = None
        self.report: AccessReport | None = None
        if self._lease.n_tokens < spec.end:
            self.lost = f"the lease has {self._lease.n_tokens} of {spec.end} tokens"
            self.close()
            return
        try:
            self._session = self._lease.session(spec.policy, in_order=False)
            self._session.prefetch()
        except PrefixLost as err:
            self.lost = err.reason
            self.close()
        except BaseException:
            self.close()
            raise

    def choose(
        self, layer: int, query: torch.Tensor, new_keys: torch.Tensor, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Chosen k, v [n_kv_heads, m, head_dim] of a layer, in any order; no rows once it is lost.

        query [n_heads, q, head_dim] after RoPE; new_keys [n_kv_heads, q, head_dim].
        """
        nothing = new_keys[:, :0]
        if self._session is None:
            return nothing, nothing
        try:
            lse = (
                suffix_lse_of(query, new_keys, scaling) if self._session.needs_suffix_lse else None
            )
            with self._patience.waiting():
                k, v, _ = self._session.retrieve(layer, query, scaling, lse)
        except PrefixLost as err:
            self.give_up(err.reason)
            return nothing, nothing
        return k, v

    def let_go(self, layer: int) -> None:
        """A layer's chosen rows have been copied."""
        if self._session is not None:
            self._session.let_go(layer)

    def give_up(self, reason: str) -> None:
        """No layer gets any rows of the prefix from now on."""
        self.lost = reason
        self.close()

    def close(self) -> None:
        """Give back what was read; it has been copied. Idempotent."""
        session, self._session = self._session, None
        try:
            if session is not None:
                self.report = session.report()
                session.close()
        finally:
            self._lease.release()


class SparseSide:
    """The sparse requests of a worker. For its thread."""

    def __init__(
        self,
        store: PrefixStore,
        layer_of: dict[str, int],
        caches: Sequence[torch.Tensor],
        layouts: Sequence[Layout],
        patience: Patience,
    ) -> None:
        self._store = store
        self._patience = patience
        self._layer_of = layer_of
        self._caches = caches
        self._layouts = layouts
        self._by_block: dict[int, SparseRequest] = {}  # by the first block, which is theirs alone
        self._fresh: list[SparseRequest] = []  # began in this step
        self._batch: Batch | None = None  # this step's

    def start(self, spec: LoadSpec) -> None:
        """A sparse request's prefill is in this step. Raises ImpressError."""
        request = SparseRequest(self._store, spec, self._patience)
        self._fresh.append(request)
        self._by_block[spec.block_ids[0]] = request

    def keep(self, keys: Sequence[str]) -> None:
        """Forget all others: they have ended, or begin again, and their blocks are not theirs."""
        kept = set(keys)
        for block, request in list(self._by_block.items()):
            if request.spec.key not in kept:
                request.close()
                del self._by_block[block]

    def finish_step(self) -> list[SparseRequest]:
        """Requests that began in this step, now closed; lost ones are forgotten."""
        fresh, self._fresh = self._fresh, []
        self._batch = None
        for request in fresh:
            request.close()
            if request.lost or None in request.n_rows:
                request.lost = request.lost or "a layer ran another attention than ours"
                self._by_block.pop(request.spec.block_ids[0], None)
        return fresh

    # ---- one layer -------------------------------------------------------------------------

    def compact(self, call: Call, metadata: Any, shorten: Shorten) -> Any:
        """See choosing.Chooser."""
        if not self._by_block:
            return metadata
        batch = self._batch
        if batch is None or batch.metadata is not metadata:
            batch = self._batch = Batch(metadata, self._layouts[0].block_size, self._by_block)
        if not batch.rows:
            return metadata
        layer = self._layer_of[call.layer_name]
        left_out = [0] * batch.n_rows
        for i in batch.rows:
            request = self._by_block[batch.first_blocks[i]]
            left_out[i] = request.n_tokens - self._chosen(request, layer, call, batch.new[i])
        if not any(left_out):
            return metadata
        k, v = (batch.new_rows(tensor).transpose(0, 1) for tensor in (call.key, call.value))
        self._layouts[layer].write(self._caches[layer], k, v, batch.slots(left_out))
        return batch.shortened(left_out, shorten)

    def _chosen(self, request: SparseRequest, layer: int, call: Call, new: slice) -> int:
        """How many rows of its prefix a layer has, once they lie in the first places."""
        n_chosen = request.n_rows[layer]
        if n_chosen is None:
            layout = self._layouts[layer]
            # Probe records are in host memory, so the choice is made there.
            query, key = (rows[new].cpu().transpose(0, 1) for rows in (call.query, call.key))
            k, v = request.choose(layer, query, key, call.scale)
            n_chosen = request.n_rows[layer] = k.shape[1]
            slots = slots_of(request.spec.block_ids, layout.block_size, 0, n_chosen)
            try:
                layout.load(self._caches[layer], k, v, slots)
                request.let_go(layer)
            except torch.OutOfMemoryError:  # device memory beside vLLM's share
                request.give_up("shortage")
                n_chosen = request.n_rows[layer] = 0
        return n_chosen
