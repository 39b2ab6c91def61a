"""The bridge between vLLM's blocks and a store's rows, on every kernel this machine has."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.version", reason="vLLM has an environment of its own: make test-vllm")

import torch
import vllm._custom_ops  # noqa: F401  # the kernels that this processor has

from impress.config import Config
from impress.engines.vllm import exact
from impress.engines.vllm.blocks import BlockLayout, slots_of
from impress.engines.vllm.exact import ExactLoad
from impress.engines.vllm.patience import Patience
from impress.engines.vllm.step import LoadSpec, Prompt, StepPlan
from impress.engines.vllm.working import WorkerSide
from impress.errors import Unsupported
from impress.read.session import Session
from impress.store import PrefixStore
from impress.types import Geometry
from tests.vllm.served import SMALL


def _isas() -> list[str]:
    """The instruction sets that vLLM may choose on this processor."""
    if platform.machine() in ("aarch64", "arm64"):
        return ["neon", "vec16"]
    return ["vec", "vec16", *(["amx"] if torch.cpu._is_amx_tile_supported() else [])]


CASES = [
    pytest.param(torch.float32, 4, 32, id="opt-float32"),
    pytest.param(torch.float16, 8, 32, id="opt-float16"),
    pytest.param(torch.bfloat16, 2, 64, id="llama-gqa-bfloat16"),
    pytest.param(torch.bfloat16, 1, 80, id="odd-head-bfloat16"),
]


def _rows(heads: int, m: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Token-major k, v [heads, m, dim], as a store gives them."""
    k, v = torch.randn(2, m, heads, dim).to(dtype)
    return k.transpose(0, 1), v.transpose(0, 1)


@pytest.mark.parametrize("isa", _isas())
@pytest.mark.parametrize(("dtype", "heads", "dim"), CASES)
@pytest.mark.parametrize("size", [32, 128])
def test_rows_come_back_bit_for_bit(
    dtype: torch.dtype, heads: int, dim: int, size: int, isa: str
) -> None:
    cache = torch.randn(9, heads, size, 2 * dim).to(dtype)
    before = cache.clone()
    layout = BlockLayout.of(cache, isa)
    blocks = [7, 2, 5]
    k, v = _rows(heads, 3 * size - 5, dim, dtype)
    layout.write(cache, k, v, slots_of(blocks, size, 0, 3 * size - 5))
    got_k, got_v = layout.read(cache, blocks)
    assert torch.equal(got_k[:, : k.shape[1]], k)
    assert torch.equal(got_v[:, : v.shape[1]], v)
    others = [0, 1, 3, 4, 6, 8]
    assert torch.equal(cache[others], before[others])


@pytest.mark.parametrize("isa", _isas())
@pytest.mark.parametrize(("dtype", "heads", "dim"), CASES)
def test_what_the_kernel_reads_is_what_was_written(
    dtype: torch.dtype, heads: int, dim: int, isa: str
) -> None:
    """The attention kernel over written rows gives softmax(q k) v over those rows."""
    from vllm import _custom_ops as ops

    if isa == "amx" and dtype != torch.bfloat16:
        pytest.skip("vLLM takes the AMX kernel for bfloat16 only")
    n, size, n_heads = 150, 128, 2 * heads
    cache = torch.zeros(3, heads, size, 2 * dim, dtype=dtype)
    layout = BlockLayout.of(cache, isa)
    k, v = _rows(heads, n, dim, dtype)
    layout.write(cache, k, v, slots_of([2, 0], size, 0, n))
    query = torch.randn(4, n_heads, dim).to(dtype)
    lens, starts = torch.tensor([n], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    out = torch.empty_like(query)
    plan = ops.cpu_attn_get_scheduler_metadata(
        1, n_heads, heads, dim, lens, dtype, starts, True, -1, isa, True
    )
    halves = cache.view(3, heads, 2 * size, dim).chunk(2, dim=2)
    ops.cpu_attention_with_kv_cache(
        query, *halves, out, starts, lens, dim**-0.5, True, None, -1,
        torch.tensor([[2, 0]], dtype=torch.int32), 0.0, plan, None,
    )  # fmt: skip
    mask = torch.ones(4, n, dtype=torch.bool).tril_(n - 4)
    want = torch.nn.functional.scaled_dot_product_attention(
        query.float().transpose(0, 1), k.float().repeat_interleave(2, 0),
        v.float().repeat_interleave(2, 0), mask,
    )  # fmt: skip
    near = 1e-5 if dtype == torch.float32 else 3e-2
    assert torch.allclose(out.float().transpose(0, 1), want, atol=near)


def test_single_rows_go_to_their_slots() -> None:
    cache = torch.zeros(4, 2, 32, 64)
    layout = BlockLayout.of(cache, _isas()[0])
    k, v = _rows(2, 3, 32, torch.float32)
    layout.write(cache, k, v, torch.tensor([33, 5, 127]))
    got, _ = layout.read(cache, [0, 1, 2, 3])
    assert torch.equal(got[:, [33, 5, 127]], k)
    assert int(got.ne(0).any(-1).any(0).sum()) == 3


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "by position"])
@pytest.mark.parametrize(("first", "end"), [(0, 256), (96, 256), (0, 192), (96, 192), (256, 320)])
def test_a_prefix_comes_into_its_blocks_in_whatever_order_it_lies(
    tmp_path: Path, packed: bool, first: int, end: int
) -> None:
    """Rows that vLLM has, or has no block for, are not written; every other row goes into its slot,
    with no copy made where rows lie side by side."""
    geometry, size = Geometry(2, 2, 2, 32, "float32"), 32
    rows = [torch.randn(2, 320, 32) for _ in range(4)]
    prompt = Prompt(np.arange(320, dtype=np.int32), {}, "")
    order = np.random.default_rng(1).random((2, 320))
    caches = [torch.randn(11, 2, size, 64) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    blocks = [3, 8, 1, 6, 10, 0, 5, 2, 7, 4]
    with PrefixStore.open(tmp_path / "s", geometry, b"x" * 32, Config(**SMALL), "rw") as store:
        for n in (256, 320):
            importance = order[:, :n] if packed else None
            k, v = ([own[:, :n] for own in some] for some in (rows[:2], rows[2:]))
            assert store.store(prompt.tokens[:n], k, v, importance=importance).wait(60)
        spec = LoadSpec("a", "a#0", prompt, first, end, blocks, None)
        load = ExactLoad(store, spec, size, Patience(60))
        for layer, cache in enumerate(caches):
            load.write(layer, cache, BlockLayout.of(cache, _isas()[0]))
        load.close()
        assert (load.lost, load.end) == ("", end)
    filled = blocks[first // size : end // size]
    for layer, (cache, was) in enumerate(zip(caches, before, strict=True)):
        got = BlockLayout.of(cache, _isas()[0]).read(cache, filled)
        for plane, own in zip(got, (rows[layer], rows[2 + layer]), strict=True):
            assert torch.equal(plane, own[:, first:end])
        others = [block for block in range(11) if block not in filled]
        assert torch.equal(cache[others], was[others])


def test_a_step_has_no_more_on_its_way_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers of all of a step's hits were begun at once: eight prompts of 8,192 tokens of a
    Llama-3-8B took 8 GiB beside vLLM and the store's own tiers. And every layer of a hit came
    before the first layer of the next hit, for which the model waited."""
    geometry, size = Geometry(8, 2, 2, 32, "float32"), 32  # 128 KiB per layer and hit
    n, n_hits, hit_layer = 256, 4, 256 * 2 * 2 * 32 * 4
    prompts = [Prompt(np.arange(at, at + n, dtype=np.int32), {}, "") for at in range(n_hits)]
    rows = torch.randn(n_hits, 2, 8, 2, n, 32)
    caches = {f"{layer}": torch.zeros(32, 2, size, 64) for layer in range(8)}
    layouts = [BlockLayout.of(cache, _isas()[0]) for cache in caches.values()]
    began: list[int] = []
    begin = Session._start

    def noted(session: Session, layer: int, outs: Any) -> Any:
        began.append(layer)
        return begin(session, layer, outs)

    monkeypatch.setattr(Session, "_start", noted)
    monkeypatch.setattr(exact, "MOST_AHEAD", 3 * n_hits * hit_layer)
    with PrefixStore.open(tmp_path / "s", geometry, b"x" * 32, Config(**SMALL), "rw") as store:
        for prompt, (k, v) in zip(prompts, rows, strict=True):
            assert store.store(prompt.tokens, list(k), list(v)).wait(60)
        worker = WorkerSide(store, caches, layouts, None, store_new=False)
        loads = [
            LoadSpec(f"{i}", f"{i}#0", prompt, 0, n, list(range(8 * i, 8 * i + 8)))
            for i, prompt in enumerate(prompts)
        ]
        worker.start(StepPlan(loads=loads, number=1))
        for name in caches:
            worker.wait_for_layer(name)
            assert store.buffers.used_bytes <= 3 * n_hits * hit_layer
        worker.finish()
        assert store.buffers.used_bytes == 0
    assert began == sorted(began) and len(began) == 8 * n_hits
    for layer, (cache, layout) in enumerate(zip(caches.values(), layouts, strict=True)):
        got = layout.read(cache, list(range(8 * n_hits)))
        for plane, own in zip(got, rows.transpose(0, 1), strict=True):
            assert torch.equal(plane, own[:, layer].transpose(0, 1).reshape(2, -1, 32))


def test_another_layout_is_refused() -> None:
    with pytest.raises(Unsupported, match="not laid out as"):
        BlockLayout.of(torch.zeros(2, 4, 16, 2, 32), "vec")
