"""Moves rows between a KV cache that strides describe, such as CUDA's, and a store's planes.

    store   rows of a layer, token-major               k, v [n_kv_heads, m, head_dim], host memory
    vLLM    one view a layer [blocks, n_kv_heads, block_size, 2·head_dim], whatever its order in
            memory (vLLM calls it NHD, HND, …); a row is a head's key, then its value

On CUDA rows travel through pinned memory on two streams of their own:

    loads   wait for what was launched before the step; the layer's attention waits for them
    reads   wait for the step that computed the blocks; the saver's thread waits for them

Its tests have passed on a GPU, without vLLM; in vLLM it has run on the CPU, where there are no
streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from impress.errors import Unsupported

#: Most bytes of a piece. At most two are under way, in pinned memory and again on the device. A
#: save reads no more than this at once, which is on the device twice.
PIECE_BYTES: Final = 16 << 20
_N_PIECES: Final = 2


class Streams:
    """Copies between host and device, alongside what vLLM computes. Loads: for one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._loads: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._reads: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._under_way: deque[Any] = deque()  # of loads: events, oldest first
        self._computed: Any = None  # the event after the last step

    def begin(self) -> None:
        """A step begins: its loads come after all that was launched before it."""
        self._loads.wait_stream(torch.cuda.current_stream(self._device))

    def mark(self) -> None:
        """A step has been launched: what is read from now on is what it computed."""
        self._computed = torch.cuda.current_stream(self._device).record_event()

    def load(self, layout: StridedLayout, kv_cache: torch.Tensor, rows: Rows) -> None:
        """Load host rows into their slots; what is launched from now on sees them there.

        Raises torch.OutOfMemoryError, with some of them perhaps already on their way.
        """
        compute = torch.cuda.current_stream(self._device)
        if torch.are_deterministic_algorithms_enabled():
            # `write` then copies the whole cache out and back: new rows would be lost meanwhile.
            self._loads.wait_stream(compute)
        try:
            with torch.cuda.stream(self._loads):
                for piece in rows.pieces(PIECE_BYTES):
                    if len(self._under_way) == _N_PIECES:
                        self._under_way.popleft().synchronize()
                    k, v, slots = (self._up(tensor) for tensor in piece)
                    layout.write(kv_cache, k, v, slots)
                    self._under_way.append(self._loads.record_event())
        finally:  # even if memory ran out midway: what is computed into these slots comes later
            compute.wait_stream(self._loads)

    def _up(self, tensor: torch.Tensor) -> torch.Tensor:
        """On its way to the device. torch keeps the pinned copy until it is there."""
        return pinned_like(tensor).copy_(tensor).to(self._device, non_blocking=True)

    def read(self, layout: StridedLayout, kv_cache: torch.Tensor, blocks: Sequence[int]) -> Any:
        """Copies of blocks in host memory: k, v, as from StridedLayout.read."""
        with torch.cuda.stream(self._reads):
            self._reads.wait_event(self._computed)
            there = layout.rows(kv_cache, torch.tensor(blocks).to(self._device))
            here = pinned_like(there).copy_(there, non_blocking=True)
            self._reads.synchronize()
        return here[0].transpose(0, 1), here[1].transpose(0, 1)


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory of the same shape and strides, which a device copies from and to by itself.

    Raises torch.OutOfMemoryError.
    """
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError as err:  # from the driver: torch has no class for it
        raise torch.OutOfMemoryError(f"no pinned memory: {err}") from None


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows k, v [n_kv_heads, m, head_dim] for slots int64 [m]."""

    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor

    def pieces(self, most_bytes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Pieces in order, none larger than most_bytes unless it is a single row. Pure."""
        n_heads, m, dim = self.k.shape
        step = max(1, most_bytes // (2 * n_heads * dim * self.k.element_size()))
        for first in range(0, m, step):
            some = slice(first, first + step)
            yield self.k[:, some], self.v[:, some], self.slots[some]


@dataclass(frozen=True, slots=True)
class StridedLayout:
    """The layout of one layer's KV cache. `streams`: None in host memory."""

    n_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    streams: Streams | None

    @classmethod
    def of(cls, kv_cache: torch.Tensor, streams: Streams | None) -> StridedLayout:
        """For a cache [blocks, n_kv_heads, block_size, 2·head_dim]. Raises Unsupported."""
        if kv_cache.ndim != 4 or kv_cache.shape[3] % 2 or kv_cache.stride(3) != 1:
            raise Unsupported(
                f"vLLM's KV cache {tuple(kv_cache.shape)}, strides {kv_cache.stride()}, is not "
                "laid out as FlashAttention's [blocks, kv heads, block size, 2 x head dim]"
            )
        _, heads, size, twice = kv_cache.shape
        return cls(heads, twice // 2, size, streams)

    def load(
        self, kv_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """See blocks.Layout, for `write` and `read` too."""
        if self.streams is None:
            self.write(kv_cache, k, v, slots)
        else:
            self.streams.load(self, kv_cache, Rows(k, v, slots))

    def write(
        self, kv_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        at = (slots // self.block_size, slots % self.block_size)
        rows = kv_cache.transpose(1, 2)  # [blocks, block_size, n_kv_heads, 2·head_dim]
        rows[..., : self.head_dim].index_put_(at, k.transpose(0, 1))
        rows[..., self.head_dim :].index_put_(at, v.transpose(0, 1))

    def read(
        self, kv_cache: torch.Tensor, block_ids: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.streams is not None:
            k, v = self.streams.read(self, kv_cache, block_ids)
        else:
            k, v = self.rows(kv_cache, torch.tensor(block_ids)).transpose(1, 2)
        return k, v

    def rows(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """Keys and values [2, rows, n_kv_heads, head_dim] of blocks int64, on their device."""
        picked = kv_cache[block_ids]  # [n, n_kv_heads, block_size, 2·head_dim]
        apart = picked.view(*picked.shape[:3], 2, self.head_dim).permute(3, 0, 2, 1, 4)
        return apart.reshape(2, -1, self.n_kv_heads, self.head_dim).contiguous()  # copied once
