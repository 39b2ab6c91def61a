"""Sparse requests inside vLLM: each layer brings rows of the stored prefix by its own query.

vLLM counts the whole prefix, n tokens, as computed: positions are right, and its blocks are there.
In layer l only k_l of its rows are, in the first places, and everything after follows at once:

    vLLM's slots     | 0 … n−1: the prefix          | n … : new rows as vLLM would lay them |
    what layer l has | k_l rows | new rows … |        (spare)

New rows are written twice, by vLLM to its slots and here behind the k_l; the latter is what the
kernel reads. A new row's compact place is never behind vLLM's, and both are the request's own, so
neither write can hurt. What is computed on such a prefix is approximate: the scheduler's side gives
these blocks hashes that nobody looks for, and nothing of them is stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from impress.engines.vllm.blocks import BlockLayout, slots_of
from impress.engines.vllm.step import LoadSpec
from impress.errors import PrefixLost
from impress.read.session import AccessReport, Lease, Session
from impress.selection.scores import suffix_lse_of
from impress.store import PrefixStore


class SparseRequest:
    """A request whose layers choose once, in its prefill, and keep what they chose."""

    def __init__(self, store: PrefixStore, spec: LoadSpec) -> None:
        """Starts reading what does not depend on the query. `lost` says why nothing can be read."""
        assert spec.policy is not None
        self.spec = spec
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
        self._session = self._lease.session(policy=spec.policy)
        self._session.prefetch()

    def choose(
        self, layer: int, query: torch.Tensor, new_keys: torch.Tensor, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v [n_kv_heads, m, head_dim] of a layer, in position order; no row once it is lost.

        query [n_heads, q, head_dim] after RoPE; new_keys [n_kv_heads, q, head_dim].
        """
        nothing = new_keys[:, :0]
        if self._session is None:
            return nothing, nothing
        try:
            lse = (
                suffix_lse_of(query, new_keys, scaling) if self._session.needs_suffix_lse else None
            )
            k, v, _ = self._session.retrieve(layer, query, scaling, lse)
        except PrefixLost as err:
            self.lost = err.reason
            self.close()
            return nothing, nothing
        return k, v

    def close(self) -> None:
        """Give back what was read; it has been copied. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            self.report = session.report()
            session.close()
        self._lease.release()


class SparseSide:
    """The sparse requests of a worker. For its thread."""

    def __init__(
        self,
        store: PrefixStore,
        layer_of: dict[str, int],
        caches: Sequence[torch.Tensor],
        layouts: Sequence[BlockLayout],
    ) -> None:
        self._store = store
        self._layer_of = layer_of
        self._caches = caches
        self._layouts = layouts
        self._by_block: dict[int, SparseRequest] = {}  # by the first block, which is theirs alone
        self._fresh: list[SparseRequest] = []  # began in this step
        self._plans: dict[tuple[int, ...], torch.Tensor] = {}  # of this step's batch, by lengths

    def start(self, spec: LoadSpec) -> None:
        """A sparse request's prefill is in this step. Raises ImpressError."""
        request = SparseRequest(self._store, spec)
        self._fresh.append(request)
        self._by_block[spec.block_ids[0]] = request

    def end(self, request_ids: Sequence[str]) -> None:
        """Requests that are no more, or begin again."""
        gone = set(request_ids)
        for block, request in list(self._by_block.items()):
            if request.spec.request_id in gone:
                request.close()
                del self._by_block[block]

    def finish_step(self) -> list[SparseRequest]:
        """Those that began in this step, with nothing left open; lost ones are forgotten."""
        fresh, self._fresh = self._fresh, []
        self._plans.clear()
        for request in fresh:
            request.close()
            if request.lost or None in request.n_rows:
                request.lost = request.lost or "a layer ran another attention than ours"
                self.end([request.spec.request_id])
        return fresh

    # ---- one layer -------------------------------------------------------------------------

    def compact(
        self,
        layer_name: str,
        scale: float,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: Any,
    ) -> Any:
        """See attention.Chooser."""
        if not self._by_block:
            return metadata
        rows = [
            (i, self._by_block[block])
            for i, block in enumerate(metadata.block_table[: len(metadata.seq_lens), 0].tolist())
            if block in self._by_block
        ]
        if not rows:
            return metadata
        layer = self._layer_of[layer_name]
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for i, request in rows:
            new = slice(starts[i], starts[i + 1])
            q, k, v = (tensor[new].transpose(0, 1) for tensor in (query, key, value))
            lengths[i] = self._place(request, layer, scale, q, k, v, metadata, i, lengths[i])
        return dataclasses.replace(
            metadata,
            seq_lens=torch.tensor(lengths, dtype=metadata.seq_lens.dtype),
            scheduler_metadata=self._plan(layer, query, metadata, lengths),
        )

    def _place(
        self,
        request: SparseRequest,
        layer: int,
        scale: float,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: Any,
        row: int,
        length: int,
    ) -> int:
        """Lay a request's rows of a layer into its blocks; how many there are then."""
        layout, kv_cache = self._layouts[layer], self._caches[layer]
        blocks = metadata.block_table[row].to(torch.int64)
        n_chosen = request.n_rows[layer]
        if n_chosen is None:
            k, v = request.choose(layer, query, key, scale)
            n_chosen = request.n_rows[layer] = k.shape[1]
            layout.write(kv_cache, k, v, slots_of(blocks, layout.block_size, 0, n_chosen))
        left_out = request.n_tokens - n_chosen
        if left_out:
            end = length - left_out
            slots = slots_of(blocks, layout.block_size, end - key.shape[1], end)
            layout.write(kv_cache, key, value, slots)
        return length - left_out

    def _plan(
        self, layer: int, query: torch.Tensor, metadata: Any, lengths: list[int]
    ) -> torch.Tensor:
        """How the kernel divides this batch among its threads; layers of equal lengths share it."""
        from vllm import envs
        from vllm._custom_ops import cpu_attn_get_scheduler_metadata

        found = self._plans.get(tuple(lengths))
        if found is None:
            layout = self._layouts[layer]
            found = self._plans[tuple(lengths)] = cpu_attn_get_scheduler_metadata(
                num_reqs=len(lengths),
                num_heads=query.shape[1],
                num_kv_heads=layout.n_kv_heads,
                head_dim=layout.head_dim,
                seq_lens=torch.tensor(lengths, dtype=metadata.seq_lens.dtype),
                dtype=self._caches[layer].dtype,
                query_start_loc=metadata.query_start_loc,
                causal=metadata.causal,
                sliding_window_size=-1,
                isa=layout.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
                dynamic_causal=metadata.dynamic_causal,
                kv_cache_dtype="auto",
            )
        return found
