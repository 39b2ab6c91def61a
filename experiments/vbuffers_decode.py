"""One random model decoding over each kind of cache, a few steps each in turn. All real.

concat    Transformers' DynamicCache: every step copies all rows
paging    blocks of 16 rows by a table, gathered for the stock kernels (a paged kernel would not)
static    one tensor for the longest request
pooled    one tensor for this request, as the engine keeps rows without virtual buffers
virtual   the engine's virtual buffers, with pages of 64 KiB and 2 MiB, and without the thread
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from experiments.common import Row
from impress.engines.buffers import Rental, VirtualBuffers
from impress.engines.hf_cache import RowsCache
from impress.engines.hf_models import geometry_of
from impress.engines.hf_modules import CACHE
from impress.engines.virtual import Virtual
from impress.types import Geometry
from tiers.ranges import HostRanges
from tiers.slots import BufferPool

_SIZES: Final = {
    "vocab_size": 256, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 1 << 15,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
#: Steps of one system before the next has its turn.
BURST: Final = 8
_BLOCK_ROWS: Final = 16

#: Seconds of one step: by the clock, and of the thread's own work, which a busy machine leaves
#: unchanged.
Step = tuple[float, float]


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]  # the base is untyped
    """Rows in blocks that lie anywhere; the kernels get a gathered copy."""

    is_compileable = False

    def __init__(self, blocks: list[torch.Tensor], table: torch.Tensor) -> None:
        """blocks: k, v [n_blocks, 16, n_kv_heads, head_dim]; table [batch, n]: each sequence's."""
        super().__init__()
        self._blocks, self._table = blocks, table
        self._n = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, end = self._n, self._n + key_states.shape[2]
        rows = torch.arange(first, end)
        where = self._table[:, rows // _BLOCK_ROWS] * _BLOCK_ROWS + rows % _BLOCK_ROWS
        n_used = -(-end // _BLOCK_ROWS)
        used = self._table[:, :n_used].reshape(-1)
        found = []
        for blocks, new in zip(self._blocks, (key_states, value_states), strict=True):
            flat = blocks.view(-1, *blocks.shape[2:])
            flat[where] = new.transpose(1, 2)
            rows_of = blocks.index_select(0, used)
            found.append(rows_of.view(len(new), -1, *blocks.shape[2:])[:, :end].transpose(1, 2))
        self._n = end
        return found[0], found[1]

    def get_seq_length(self) -> int:
        return self._n

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._n + query_length, 0

    def get_max_cache_shape(self) -> int:
        return -1

    get_max_length = get_max_cache_shape


class Unasked(VirtualBuffers):
    """Without memory ahead of need."""

    def ask(self, rental: Rental) -> None:
        """Ask for nothing."""


def random_model(seed: int) -> Any:
    """A Llama of four layers; a token's keys take 2 KiB in each."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **_SIZES)).eval()


def decode(context: int, batch: int, rounds: int, seed: int) -> list[Row]:
    """Steps per second of each system from `context` tokens on, a row each."""
    torch.set_num_threads(1)
    model = random_model(seed)
    geometry = geometry_of(model.config, torch.float32)
    n_most = context + rounds * BURST + BURST
    caches, buffers = _caches(geometry, batch, context, n_most)
    rows = torch.randn(2, batch, geometry.n_kv_heads, context, geometry.head_dim)
    for cache in caches.values():
        for layer in range(geometry.n_layers):
            cache.update(rows[0], rows[1], layer)
    del rows
    times: dict[str, list[Step]] = {name: [] for name in caches}
    differs = dict.fromkeys(caches, 0.0)
    with torch.no_grad():
        for turn in range(rounds + 1):
            ids = torch.randint(0, 256, (BURST, batch, 1))
            order = [*caches][turn % len(caches) :] + [*caches][: turn % len(caches)]
            logits = {name: _burst(model, caches[name], ids, times[name]) for name in order}
            for name, found in logits.items():
                differs[name] = max(differs[name], float((found - logits["concat"]).abs().max()))
            if turn == 0:  # the first warms up
                times = {name: [] for name in caches}
    made = [_row(name, times, differs, buffers.get(name)) for name in caches]
    for cache in caches.values():
        if isinstance(cache, RowsCache):
            cache.release()
    for one in buffers.values():
        one.close()
    caches.clear()
    gc.collect()
    return made


def _burst(model: Any, cache: Any, ids: torch.Tensor, times: list[Step]) -> torch.Tensor:
    logits = []
    for token in ids:
        begin, cpu = time.perf_counter(), time.thread_time()
        logits.append(model(token, **{CACHE: cache}).logits)
        times.append((time.perf_counter() - begin, time.thread_time() - cpu))
    return torch.stack(logits)


def _row(
    name: str, times: dict[str, list[Step]], differs: dict[str, float],
    buffers: VirtualBuffers | None,
) -> Row:  # fmt: skip
    mine, cpu = np.array(times[name]).T
    concat, concat_cpu = np.array(times["concat"]).T
    usage = buffers.usage() if buffers is not None else None
    return {
        "system": name,
        "steps_s": 1 / float(np.median(mine)),
        "vs_concat": float(np.median(_bursts(concat) / _bursts(mine))),
        "cpu_ms": float(np.median(cpu)) * 1e3,
        "cpu_vs_concat": float(np.median(_bursts(concat_cpu) / _bursts(cpu))),
        "p99_ms": float(np.percentile(mine, 99)) * 1e3,
        "stalls": usage.n_stalls if usage else 0,
        "stall_us": usage.stall_s / usage.n_stalls * 1e6 if usage and usage.n_stalls else 0.0,
        "ahead": usage.n_ahead if usage else 0,
        "differs": differs[name],
        "n": len(mine),
    }


def _bursts(times: np.ndarray) -> np.ndarray:
    """Median step of each burst: bursts of one turn are set against each other."""
    medians: np.ndarray = np.median(times.reshape(-1, BURST), axis=1)
    return medians


def _caches(
    geometry: Geometry, batch: int, context: int, n_most: int
) -> tuple[dict[str, Any], dict[str, VirtualBuffers]]:
    longest = 2 * n_most
    caches: dict[str, Any] = {
        "concat": DynamicCache(),
        "paging": _paged(geometry, batch, n_most),
        "static": RowsCache(geometry, batch, longest, BufferPool(None)),
        "pooled": RowsCache(geometry, batch, n_most, BufferPool(None)),
    }
    kinds: dict[str, tuple[Callable[..., VirtualBuffers], int]] = {
        "virtual_64k": (VirtualBuffers, 64 << 10),
        "virtual_2m": (VirtualBuffers, 2 << 20),
        "virtual_64k_unasked": (Unasked, 64 << 10),
    }
    buffers = {}
    for name, (kind, page) in kinds.items():
        made = kind(geometry, Virtual(batch, longest, page), longest, HostRanges(page))
        rental = made.rent(batch, context, n_most)
        assert rental is not None, made.said
        buffers[name] = made
        caches[name] = RowsCache(geometry, batch, n_most, BufferPool(None), rental=rental)
    return caches, buffers


def _paged(geometry: Geometry, batch: int, n_most: int) -> Cache:
    n = -(-n_most // _BLOCK_ROWS)
    layers = []
    for _ in range(geometry.n_layers):
        blocks = [
            torch.empty(batch * n, _BLOCK_ROWS, geometry.n_kv_heads, dim)
            for dim in (geometry.head_dim, geometry.v_dim)
        ]
        layers.append(PagedLayer(blocks, torch.randperm(batch * n).view(batch, n)))
    return Cache(layers=layers)
