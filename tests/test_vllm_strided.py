"""The bridge between a KV cache of any stride, such as CUDA's, and a store's rows: without vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from impress.engines.vllm import strided
from impress.engines.vllm.strided import Rows, Streams, StridedLayout
from impress.errors import Unsupported

#: vLLM's names: which of [layers, blocks, heads, rows, K|V] lies outermost in memory, and so on.
ORDERS = {
    "LBNHC, called NHD": (0, 1, 3, 2, 4),
    "LBHNC, called HND": (0, 1, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
SIZE, N_BLOCKS = 16, 12
SHAPES = [
    pytest.param(torch.float16, 4, 32, id="opt-float16"),
    pytest.param(torch.bfloat16, 2, 64, id="llama-gqa-bfloat16"),
    pytest.param(torch.bfloat16, 1, 80, id="one-head-bfloat16"),
]


def caches(order: str, dtype: torch.dtype, heads: int, dim: int, device: str = "cpu") -> Any:
    """[3 layers, blocks, heads, rows, 2·dim] of noise, over memory in the order named."""
    shape = (3, N_BLOCKS, heads, SIZE, 2 * dim)
    axes = ORDERS[order]
    memory = torch.randn([shape[axis] for axis in axes]).to(device, dtype)
    return memory.permute([axes.index(axis) for axis in range(5)])


def rows(heads: int, m: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Token-major k, v [heads, m, dim], as a store gives them."""
    k, v = torch.randn(2, m, heads, dim).to(dtype)
    return k.transpose(0, 1), v.transpose(0, 1)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("dtype", "heads", "dim"), SHAPES)
def test_rows_come_back_bit_for_bit(order: str, dtype: torch.dtype, heads: int, dim: int) -> None:
    whole = caches(order, dtype, heads, dim)
    before, cache = whole.clone(), whole[1]
    layout = StridedLayout.of(cache, None)
    blocks, n = [7, 2, 5], 3 * SIZE - 5
    k, v = rows(heads, n, dim, dtype)
    layout.load(cache, k, v, slots_of(blocks, n))
    got_k, got_v = layout.read(cache, blocks)
    assert torch.equal(got_k[:, :n], k) and torch.equal(got_v[:, :n], v)
    assert got_k.transpose(0, 1).is_contiguous() and got_v.transpose(0, 1).is_contiguous()
    # As FlashAttention's kernels see it: a row is a head's key, then its value.
    row, head = 2 * SIZE + 3, heads - 1
    assert torch.equal(cache[5, head, 3], torch.cat((k[head, row], v[head, row])))
    others = [block for block in range(N_BLOCKS) if block not in blocks]
    assert torch.equal(whole[1, others], before[1, others])
    assert torch.equal(whole[[0, 2]], before[[0, 2]])


def slots_of(blocks: list[int], n: int) -> torch.Tensor:
    places = torch.arange(n)
    return torch.tensor(blocks)[places // SIZE] * SIZE + places % SIZE


def test_another_layout_is_refused() -> None:
    for cache in (torch.zeros(2, 4, 16, 2, 32), torch.zeros(4, 2, 64, 16).transpose(2, 3)):
        with pytest.raises(Unsupported, match="not laid out as"):
            StridedLayout.of(cache, None)


def test_pieces_are_bounded_and_keep_every_row() -> None:
    k, v = rows(2, 100, 8, torch.float32)
    pieces = list(Rows(k, v, torch.arange(100)).pieces(16 * 2 * 2 * 8 * 4))
    assert [piece[0].shape[1] for piece in pieces] == [16] * 6 + [4]
    assert torch.equal(torch.cat([piece[1] for piece in pieces], 1), v)
    assert torch.equal(torch.cat([piece[2] for piece in pieces]), torch.arange(100))
    assert len(list(Rows(k, v, torch.arange(100)).pieces(1))) == 100
    assert not list(Rows(k[:, :0], v[:, :0], torch.arange(0)).pieces(1 << 20))


# ---- copies on a device --------------------------------------------------------------------------


class Noted:
    """A stream, or an event on one, that only notes what was asked of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Noted) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Noted) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Noted:
        return Noted(f"{self.name}@{len(self.log)}", self.log)

    def synchronize(self) -> None:
        self.log.append(f"the host waits for {self.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CUDA's streams, replaced by ones that only note what waits for what: there is no device."""
    said: list[str] = []
    names = iter(("loads", "reads"))

    @contextmanager
    def on(stream: Noted) -> Iterator[None]:
        said.append(f"on {stream.name}:")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Noted(next(names), said))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Noted("compute", said))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(strided, "pinned_like", torch.empty_like)
    return said


def test_a_load_waits_for_steps_before_it_and_the_layer_for_the_load(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strided, "PIECE_BYTES", SIZE * 2 * 4 * 32 * 2)
    cache = caches("LBNHC, called NHD", torch.float16, 4, 32)[1]
    streams = Streams(torch.device("cpu"))
    layout = StridedLayout.of(cache, streams)
    k, v = rows(4, 4 * SIZE, 32, torch.float16)
    streams.begin()
    layout.load(cache, k, v, slots_of([7, 2, 5, 0], 4 * SIZE))
    assert log[:2] == ["loads waits for compute", "on loads:"]
    assert log[-1] == "compute waits for loads"
    assert sum("the host waits" in line for line in log) == 2, "two pieces on their way at most"
    streams.mark()
    del log[:]
    got_k, got_v = layout.read(cache, [7, 2, 5, 0])
    assert log[0] == "on reads:" and "reads waits for compute@" in log[1]
    assert log[2:] == ["the host waits for reads"]
    assert torch.equal(got_k, k) and torch.equal(got_v, v)


def test_where_a_write_copies_the_whole_cache_a_load_waits_for_all_that_was_launched(
    log: list[str],
) -> None:
    """Under torch.use_deterministic_algorithms CUDA copies the cache out and back: rows that the
    step wrote there in between were lost."""
    cache = caches("LBNHC, called NHD", torch.float16, 4, 32)[1]
    streams = Streams(torch.device("cpu"))
    layout = StridedLayout.of(cache, streams)
    k, v = rows(4, SIZE, 32, torch.float16)
    streams.begin()
    for mode in (False, True):
        del log[:]
        torch.use_deterministic_algorithms(mode)
        try:
            layout.load(cache, k, v, slots_of([7], SIZE))
        finally:
            torch.use_deterministic_algorithms(False)
        waits = ["loads waits for compute"] * mode
        assert log == [*waits, "on loads:", "compute waits for loads"]


def test_what_is_on_its_way_when_memory_ends_is_waited_for_all_the_same(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy landed whenever it did: over rows that were computed in its place."""
    monkeypatch.setattr(strided, "PIECE_BYTES", SIZE * 2 * 4 * 32 * 2)
    left = [None] * 4  # tensors that get pinned: a piece's k, v and slots, the next one's k

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        if not left:
            raise torch.OutOfMemoryError("no pinned memory")
        left.pop()
        return torch.empty_like(tensor)

    monkeypatch.setattr(strided, "pinned_like", pinned)
    cache = caches("LBNHC, called NHD", torch.float16, 4, 32)[1]
    layout = StridedLayout.of(cache, Streams(torch.device("cpu")))
    k, v = rows(4, 2 * SIZE, 32, torch.float16)
    with pytest.raises(torch.OutOfMemoryError):
        layout.load(cache, k, v, slots_of([7, 2], 2 * SIZE))
    assert torch.equal(cache[7, ..., :32], k[:, :SIZE])
    assert log == ["on loads:", "compute waits for loads"]


def test_pinned_memory_that_is_not_to_be_had_is_memory_that_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was the driver's own error, of no class that a load could be given up on."""

    def refused(*_args: Any, **_named: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty_like", refused)
    with pytest.raises(torch.OutOfMemoryError, match="no pinned memory: CUDA error"):
        strided.pinned_like(torch.zeros(1))


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("dtype", "heads", "dim"), SHAPES)
def test_rows_come_back_from_a_device(
    order: str, dtype: torch.dtype, heads: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strided, "PIECE_BYTES", 7 * 2 * heads * dim * 2)
    whole = caches(order, dtype, heads, dim, "cuda")
    before, cache = whole.clone(), whole[1]
    streams = Streams(cache.device)
    layout = StridedLayout.of(cache, streams)
    blocks, n = [7, 2, 5], 3 * SIZE - 5
    k, v = rows(heads, n, dim, dtype)
    streams.begin()
    layout.load(cache, k, v, slots_of(blocks, n))
    streams.mark()
    got_k, got_v = layout.read(cache, blocks)
    assert not got_k.is_cuda
    assert torch.equal(got_k[:, :n], k) and torch.equal(got_v[:, :n], v)
    others = [block for block in range(N_BLOCKS) if block not in blocks]
    assert torch.equal(whole[1, others], before[1, others])
    assert torch.equal(whole[[0, 2]], before[[0, 2]])


@pytest.mark.gpu
def test_copies_keep_their_place_among_slow_kernels() -> None:
    """An earlier step writes late: the load must still come after it, and a read after its step."""
    cache = caches("LBNHC, called NHD", torch.bfloat16, 2, 64, "cuda")[1]
    streams = Streams(cache.device)
    layout = StridedLayout.of(cache, streams)
    k, v = rows(2, SIZE, 64, torch.bfloat16)
    slow: Callable[[int], None] = torch.cuda._sleep
    slow(200_000_000)
    cache[3].fill_(7)  # by the step before, which had block 3
    streams.begin()
    layout.load(cache, k, v, slots_of([3], SIZE))
    seen = cache[3].clone()  # what the layer's attention sees
    slow(200_000_000)
    cache[4].fill_(9)
    streams.mark()
    got_k, _ = layout.read(cache, [4])
    assert torch.equal(got_k, torch.full_like(got_k, 9))
    assert torch.equal(seen.transpose(0, 1)[..., :64].cpu(), k.transpose(0, 1))
