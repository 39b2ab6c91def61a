"""Where rows of sparse requests go in vLLM's blocks, on the host or a device: without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from impress.engines.vllm.compact import Batch

SIZE = 16


@contextmanager
def nothing_waits(device: str) -> Iterator[None]:
    """Within the block, whatever waits for a device raises an error."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_layer_waits_to_learn_where_its_rows_go(device: str) -> None:
    """Each layer did, twice a step, as it copied numbers from pageable memory to the device."""

    def numbers(*rows: object) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int32, device=device)

    metadata = SimpleNamespace(
        seq_lens=numbers(40, 33, 50),  # with 1, 1 and 2 new rows
        query_start_loc=numbers(0, 1, 2, 4),
        block_table=numbers([7, 3, 9, 0], [5, 1, 2, 0], [4, 8, 6, 11]),
    )
    batch = Batch(metadata, SIZE, {7, 4})  # of which the first and the last are sparse
    layers = [20, 0, 30], [4, 0, 0], [20, 0, 30]
    with nothing_waits(device):
        found = [
            (batch.slots(left_out), batch.shortened(left_out, lambda _, lengths: lengths))
            for left_out in layers
        ]
    assert [lengths.tolist() for _, lengths in found] == [[20, 33, 20], [36, 33, 50], [20, 33, 20]]
    first = [3 * SIZE + 3, 8 * SIZE + 2, 8 * SIZE + 3]
    second = [9 * SIZE + 3, 11 * SIZE, 11 * SIZE + 1]
    assert [slots.tolist() for slots, _ in found] == [first, second, first]
    assert found[0][1] is found[2][1]
