"""What layers see of a batch in which some requests have chosen rows, against plain attention.

No engine: the sparse side over blocks and metadata of FlashAttention's shape, prefill, then decode.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM has an environment of its own: make test-vllm")

import numpy as np
import torch

from impress.engines.vllm.attention_cuda import ChoosingFlashImpl
from impress.engines.vllm.choosing import Call
from impress.engines.vllm.patience import Patience
from impress.engines.vllm.sparse import SparseSide
from impress.engines.vllm.strided import StridedLayout
from tests.paged_reference import attend, dense, write_rows

SIZE, HEADS, KV_HEADS, DIM, N_LAYERS = 16, 4, 2, 8, 3
SCALE = DIM**-0.5


@dataclasses.dataclass
class Metadata:
    """The part of vLLM's FlashAttention metadata that is used here."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    scheduler_metadata: torch.Tensor | None = None


class Chosen:
    """A sparse request whose layers choose the rows given, of a prefix of n tokens."""

    def __init__(self, blocks: list[int], n: int, kv: Any, chosen: list[np.ndarray]) -> None:
        self.spec = SimpleNamespace(block_ids=blocks, request_id=str(blocks[0]))
        self.n_tokens, self.n_rows = n, [None] * N_LAYERS
        self.kv, self.chosen = kv, chosen

    def choose(self, layer: int, query: torch.Tensor, keys: torch.Tensor, scale: float) -> Any:
        assert query.shape[0] == HEADS and keys.shape[0] == KV_HEADS and scale == SCALE
        return tuple(t[:, torch.from_numpy(self.chosen[layer])] for t in self.kv[layer])

    def let_go(self, layer: int) -> None:
        assert self.n_rows[layer] is not None, "its rows are still to be copied"


def shorten(metadata: Metadata, seq_lens: torch.Tensor) -> Metadata:
    made: Metadata = ChoosingFlashImpl.shortened(None, None, None, metadata, seq_lens)  # type: ignore[arg-type]
    return made


class World:
    """Requests with their blocks; what each layer must attend to, row by row."""

    def __init__(self, seed: int, order: tuple[int, ...]) -> None:
        self.rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        n_blocks = 64
        shape = (n_blocks, KV_HEADS, SIZE, 2 * DIM)
        memory = torch.randn([shape[axis] for axis in order])
        self.caches = [
            memory.clone().permute([order.index(axis) for axis in range(4)])
            for _ in range(N_LAYERS)
        ]
        layouts = [StridedLayout.of(cache, None) for cache in self.caches]
        names = {f"layer.{i}": i for i in range(N_LAYERS)}
        self.side = SparseSide(None, names, self.caches, layouts, Patience(60))  # type: ignore[arg-type]
        self.free = self.rng.permutation(np.arange(1, n_blocks)).tolist()  # 0 is vLLM's own
        self.blocks: list[list[int]] = []
        self.lengths: list[int] = []  # as vLLM counts
        self.seen: list[list[list[torch.Tensor]]] = []  # for each request and layer: k, v [m, …]

    def add(self, n: int, kept: list[float] | None) -> None:
        """A request with a prefix of n tokens; kept: each layer's chosen share, None for whole."""
        blocks = [self.free.pop() for _ in range(-(-n // SIZE) + 2)]
        # Token-major rows, seen in the store's shape: [kv heads, n, dim].
        kv = [torch.randn(2, n, KV_HEADS, DIM).transpose(1, 2) for _ in range(N_LAYERS)]
        everything = np.arange(n)
        chosen = [everything] * N_LAYERS
        if kept is not None:
            chosen = [np.sort(self.rng.permutation(n)[: int(share * n)]) for share in kept]
            self.side._by_block[blocks[0]] = Chosen(blocks, n, kv, chosen)  # type: ignore[assignment]
        else:
            places = torch.arange(n)
            slots = torch.tensor(blocks)[places // SIZE] * SIZE + places % SIZE
            for layer, cache in enumerate(self.caches):
                StridedLayout.of(cache, None).load(cache, *kv[layer], slots)
        self.blocks.append(blocks)
        self.lengths.append(n)
        self.seen.append(
            [[t[:, torch.from_numpy(rows)].transpose(0, 1) for t in kv[layer]]
             for layer, rows in enumerate(chosen)]
        )  # fmt: skip

    def step(self, n_new: list[int], n_padding: int = 0) -> list[Metadata]:
        """Run one step's layers; returns what each was given. Asserts what each request gets."""
        self.lengths = [n + new for n, new in zip(self.lengths, n_new, strict=True)]
        metadata = self._metadata(n_new, n_padding)
        starts, given = metadata.query_start_loc.tolist(), []
        for layer, cache in enumerate(self.caches):
            tokens = starts[-1] + n_padding
            query = torch.randn(tokens, HEADS, DIM)
            key, value = torch.randn(2, tokens, KV_HEADS, DIM)
            k_cache, v_cache = cache.transpose(1, 2).split(DIM, dim=-1)
            write_rows(key, value, k_cache, v_cache, metadata.slot_mapping)
            call = Call(f"layer.{layer}", SCALE, query, key, value)
            mine = self.side.compact(call, metadata, shorten)
            given.append(mine)
            out = torch.full_like(query, torch.nan)
            attend(query, k_cache, v_cache, out, mine.query_start_loc, mine.seq_lens,
                   mine.block_table, SCALE)  # fmt: skip
            for i, seen in enumerate(self.seen):
                new = slice(starts[i], starts[i + 1])
                rows = [
                    torch.cat((old, t[new]))
                    for old, t in zip(seen[layer], (key, value), strict=True)
                ]
                self.seen[i][layer] = rows
                k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in rows)
                assert torch.allclose(out[new], dense(query[new], k, v, SCALE), atol=1e-5), i
        self.side._fresh = []
        self.side.finish_step()
        return given

    def _metadata(self, n_new: list[int], n_padding: int) -> Metadata:
        n_rows = len(n_new) + n_padding
        starts = np.concatenate(([0], np.cumsum(n_new), [sum(n_new)] * n_padding))
        table = np.zeros((n_rows, max(map(len, self.blocks))), dtype=np.int32)
        slots = []
        for i, blocks in enumerate(self.blocks):
            table[i, : len(blocks)] = blocks
            places = np.arange(self.lengths[i] - n_new[i], self.lengths[i])
            slots.append(np.array(blocks)[places // SIZE] * SIZE + places % SIZE)
        lengths = [*self.lengths, *[0] * n_padding]
        return Metadata(
            torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32),
            torch.from_numpy(table), torch.from_numpy(np.concatenate(slots)),
            scheduler_metadata=torch.zeros(1),
        )  # fmt: skip


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 1, 2, 3)], ids=["NHD", "HND"])
@pytest.mark.parametrize("seed", range(6))
def test_each_layer_attends_to_its_chosen_rows_and_all_new_ones(
    seed: int, order: tuple[int, ...]
) -> None:
    """Whole and sparse requests, k per layer (none, some, all), a padded batch, then decode."""
    world = World(seed, order)
    world.add(48, [0.25, 1.0, 0.0])
    world.add(33, None)
    world.add(64, [0.5, 0.5, 0.9])
    world.add(16, [1.0, 1.0, 1.0])
    first = world.step([5, 7, 20, 1])
    assert [data.seq_lens.tolist() for data in first] == [
        [12 + 5, 33 + 7, 32 + 20, 17], [48 + 5, 40, 32 + 20, 17], [5, 40, 57 + 20, 17],
    ]  # fmt: skip
    assert all(data.scheduler_metadata is None for data in first), "made for other lengths"
    for _ in range(12):
        world.step([1, 1, 1, 1], n_padding=2)


def test_layers_that_keep_everything_get_the_batch_as_it_was() -> None:
    world = World(0, (0, 2, 1, 3))
    world.add(48, [1.0, 0.5, 1.0])
    first, second, third = world.step([5])
    assert first is third and first.scheduler_metadata is not None
    assert second is not first
    assert first.seq_lens.tolist() == [53] and second.seq_lens.tolist() == [29]


def test_layers_that_leave_out_as_much_share_their_metadata() -> None:
    world = World(0, (0, 2, 1, 3))
    world.add(64, [0.25, 0.25, 0.5])
    first, second, third = world.step([5])
    assert first is second and first is not third


def test_a_batch_without_sparse_requests_is_not_looked_at() -> None:
    world = World(0, (0, 2, 1, 3))
    world.add(20, None)
    given = world.step([3])
    assert given[0] is given[1] is given[2]
    assert given[0].scheduler_metadata is not None and world.side._batch is None
