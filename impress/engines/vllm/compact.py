"""Where the rows of sparse requests go: arithmetic over a batch's metadata, on its own device.

    places vLLM counts   0 … n−1: the prefix          | n … : new rows
    places of a layer    0 … k−1: chosen | k … : new rows, all moved down by n − k

What a layer leaves out of each request, n − k rows, is one number per row of the batch; 0 for whole
requests.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from impress.engines.vllm.choosing import Shorten


class Batch:
    """The sparse requests among a batch's rows: what all layers of a step share."""

    def __init__(self, metadata: Any, block_size: int, firsts: Container[int]) -> None:
        """`firsts`: the first blocks of sparse requests. Waits once for the metadata's device."""
        self.metadata = metadata
        self._block_size = block_size
        # Shared by layers that leave out the same numbers: rows missing, int32 [n_rows]; metadata.
        self._left: dict[tuple[int, ...], torch.Tensor] = {}
        self._short: dict[tuple[int, ...], Any] = {}
        n = self.n_rows = len(metadata.seq_lens)
        first = metadata.block_table[:n, 0]
        told = torch.cat((first, metadata.seq_lens, metadata.query_start_loc)).tolist()
        self.first_blocks, lengths, starts = told[:n], told[n : 2 * n], told[2 * n :]
        self.new = [slice(a, b) for a, b in pairwise(starts)]
        self.rows = [
            i
            for i, block in enumerate(self.first_blocks)
            if block in firsts and self.new[i].stop > self.new[i].start
        ]
        self._tokens, self._row_of, self._places = self._new_rows(lengths)

    def _new_rows(self, lengths: Sequence[int]) -> torch.Tensor:
        """int64 [3, t]: for each new row its token in the batch, its batch row, its place."""
        device = self.metadata.seq_lens.device
        found = [np.empty((3, 0), dtype=np.int64)]
        for i in self.rows:
            new = self.new[i]
            tokens = np.arange(new.start, new.stop)
            found.append(
                np.stack((tokens, np.full_like(tokens, i), tokens + lengths[i] - new.stop))
            )
        return _sent(torch.from_numpy(np.concatenate(found, axis=1)), device)

    def new_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """A batch's new rows [tokens, n_kv_heads, head_dim] that belong to sparse requests."""
        return rows[self._tokens]

    def slots(self, left_out: Sequence[int]) -> torch.Tensor:
        """int64 [t]: where a layer's new rows go; a slot is block · block_size + row in the block.

        left_out: rows missing before them, by batch row.
        """
        place: torch.Tensor = self._places - self._missing(left_out)[self._row_of]
        table: torch.Tensor = self.metadata.block_table
        blocks: torch.Tensor = table[self._row_of, place // self._block_size].to(torch.int64)
        return blocks * self._block_size + place % self._block_size

    def shortened(self, left_out: Sequence[int], shorten: Shorten) -> Any:
        """The metadata with shorter lengths; layers with the same left_out share it."""
        key = tuple(left_out)
        if key not in self._short:
            self._short[key] = shorten(self.metadata, self.metadata.seq_lens - self._missing(key))
        return self._short[key]

    def _missing(self, left_out: Sequence[int]) -> torch.Tensor:
        """left_out on the metadata's device, in the dtype of its lengths."""
        key, whole = tuple(left_out), self.metadata.seq_lens
        if key not in self._left:
            self._left[key] = _sent(torch.tensor(key, dtype=whole.dtype), whole.device)
        return self._left[key]


def _sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Send numbers to a device: work launched there from now on finds them, and nothing waits.

    They are copied from pinned memory, which torch keeps until they have arrived.
    """
    there = numbers.pin_memory() if device.type == "cuda" else numbers
    return there.to(device, non_blocking=True)
