"""Moves rows between vLLM's paged KV cache on the CPU and a store's planes (CUDA: strided.py).

No other module knows block layouts.

    store   rows of a layer, token-major               k, v [n_kv_heads, m, head_dim]
    vLLM    one tensor a layer [blocks, n_kv_heads, block_size, 2·head_dim]; a head's part of a
            block holds its keys, then its values, each in an order that suits its instruction set

The order is not written down here: it is measured, once per geometry, by having vLLM's own kernel
write numbers and looking where they went. An order no strides describe is refused, not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from impress.engines.vllm.strided import Streams, StridedLayout
from impress.errors import Unsupported


class Layout(Protocol):
    """How rows get into and out of one layer's KV cache. A slot is block · block_size + row."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    def load(
        self, kv_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Put rows [n_kv_heads, m, head_dim] from host memory into slots int64 [m].

        They have the cache's dtype, any strides. The layer's attention, computed next, finds them.
        """

    def write(
        self, kv_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """The same for rows and slots on the cache's own device."""

    def read(
        self, kv_cache: torch.Tensor, block_ids: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of whole blocks, in the order given: k, v [n_kv_heads, rows, head_dim].

        In host memory, token-major, as a store packs them.
        """


#: Integers of this many bits are exact in every dtype of a KV cache: bfloat16 has 8 bits.
_DIGIT_BITS = 8


@dataclass(frozen=True, slots=True)
class Order:
    """How one head's keys (or values) lie in a block: dims of the row-major [tokens, head_dim]
    index, slowest first, with each one's stride in memory."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The layout of one layer's KV cache. `isa` is vLLM's name for its instruction set."""

    n_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    isa: str
    keys: Order
    values: Order

    @classmethod
    def of(cls, kv_cache: torch.Tensor, isa: str) -> BlockLayout:
        """For a cache [blocks, n_kv_heads, block_size, 2·head_dim]. Raises Unsupported."""
        if kv_cache.ndim != 4 or kv_cache.device.type != "cpu" or not kv_cache.is_contiguous():
            raise Unsupported(
                f"vLLM's KV cache {tuple(kv_cache.shape)} on {kv_cache.device} is not laid out as "
                "the CPU backend's [blocks, kv heads, block size, 2 x head dim]"
            )
        _, heads, size, twice = kv_cache.shape
        keys, values = _orders(kv_cache.dtype, size, twice // 2, isa)
        return cls(heads, twice // 2, size, isa, keys, values)

    def write(
        self, kv_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """See Layout."""
        _write(kv_cache, k.transpose(0, 1), v.transpose(0, 1), slots, self.isa)

    load = write  # the cache is in host memory

    def read(
        self, kv_cache: torch.Tensor, block_ids: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Layout."""
        n, half = len(block_ids), self.block_size * self.head_dim
        picked = kv_cache[torch.as_tensor(block_ids, dtype=torch.int64)]
        heads = picked.view(n, self.n_kv_heads, 2 * half)
        return self._rows(heads, self.keys, 0), self._rows(heads, self.values, half)

    def _rows(self, heads: torch.Tensor, order: Order, offset: int) -> torch.Tensor:
        n = len(heads)
        lying = heads.as_strided(
            (n, self.n_kv_heads, *order.sizes), (*heads.stride()[:2], *order.strides), offset
        )
        rows = lying.reshape(n, self.n_kv_heads, self.block_size, self.head_dim)
        dense = rows.transpose(1, 2).reshape(n * self.block_size, self.n_kv_heads, self.head_dim)
        return dense.transpose(0, 1)


def layouts_of(
    kv_caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]
) -> tuple[list[Layout], Streams | None]:
    """Each layer's layout, by the attention vLLM gave it, and the streams of a device.

    Both arguments are by layer name. Raises Unsupported, naming the setting to change.
    """
    made: list[Layout] = []
    streams: Streams | None = None
    for name, kv_cache in kv_caches.items():
        kind = layers[name].attn_backend.get_name()
        if kind == "CPU_ATTN":
            made.append(BlockLayout.of(kv_cache, layers[name].isa))
        elif kind == "FLASH_ATTN":
            if kv_cache.is_cuda and streams is None:
                streams = Streams(kv_cache.device)
            made.append(StridedLayout.of(kv_cache, streams))
        else:
            raise Unsupported(
                f"{name} has vLLM's attention backend {kind}: start with --attention-backend "
                "FLASH_ATTN (on CUDA), with --dtype bfloat16 or float16"
            )
    return made, streams


def slots_of(
    block_ids: Sequence[int] | torch.Tensor, block_size: int, first: int, end: int
) -> torch.Tensor:
    """Slots int64 of rows first..end-1 of a request whose blocks are block_ids."""
    rows = torch.arange(first, end, dtype=torch.int64)
    blocks = torch.as_tensor(block_ids, dtype=torch.int64)
    return blocks[rows // block_size] * block_size + rows % block_size


def _write(
    kv_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, isa: str
) -> None:
    """Have vLLM's kernel put rows k, v [m, n_kv_heads, head_dim] into their slots."""
    n_blocks, heads, size, twice = kv_cache.shape
    halves = kv_cache.view(n_blocks, heads, 2 * size, twice // 2).chunk(2, dim=2)
    _kernel()(k.contiguous(), v.contiguous(), *halves, slots, isa)


@cache
def _kernel() -> Any:
    from vllm._custom_ops import cpu_attn_reshape_and_cache

    return cpu_attn_reshape_and_cache


@cache
def _orders(dtype: torch.dtype, block_size: int, head_dim: int, isa: str) -> tuple[Order, Order]:
    """Where the kernel puts each element of one head's keys and values in a block."""
    n = block_size * head_dim
    index = torch.arange(n)
    found = torch.zeros(2, n, dtype=torch.int64)
    slots = torch.arange(block_size, dtype=torch.int64)
    for shift in range(0, n.bit_length(), _DIGIT_BITS):
        digits = ((index >> shift) & ((1 << _DIGIT_BITS) - 1)).to(dtype)
        rows = digits.view(block_size, 1, head_dim)
        block = torch.zeros(1, 1, block_size, 2 * head_dim, dtype=dtype)
        _write(block, rows, rows.clone(), slots, isa)
        found += block.view(2, n).to(torch.int64) << shift
    orders = []
    for plane, lies_at in zip(("keys", "values"), found, strict=True):
        order = _strided(torch.argsort(lies_at).tolist())
        if order is None or not torch.equal(lies_at.sort().values, index):
            raise Unsupported(
                f"vLLM's {isa!r} kernel lays {plane} of {dtype} (block size {block_size}, head "
                f"size {head_dim}) in an order this version does not know"
            )
        orders.append(order)
    return orders[0], orders[1]


def _strided(addresses: list[int]) -> Order | None:
    """The dims of a row-major index whose element i lies at addresses[i]; None if none fit."""
    sizes: list[int] = []
    strides: list[int] = []
    unit, n = 1, len(addresses)
    while unit < n:
        stride = addresses[unit] - addresses[0]
        size = 1
        while (size + 1) * unit <= n and addresses[size * unit] - addresses[0] == size * stride:
            size += 1
        while n % (size * unit):
            size -= 1
        if size == 1 or stride <= 0:
            return None
        sizes.insert(0, size)
        strides.insert(0, stride)
        unit *= size
    steps = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(sizes, strides, strict=True):
        steps = steps[..., None] + torch.arange(size) * stride
    return Order(tuple(sizes), tuple(strides)) if steps.flatten().tolist() == addresses else None
