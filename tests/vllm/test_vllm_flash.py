"""vLLM's FlashAttention with our backend over it: whole engines on the CPU, kernels in torch.

Only a device is missing, and with it streams and graphs: tests/vllm/test_vllm_gpu.py tests those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("vllm.version", reason="vLLM has an environment of its own: make test-vllm")

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from impress.engines import vllm as plugin
from impress.engines.vllm import settings as vllm_settings
from impress.engines.vllm.blocks import layouts_of
from impress.engines.vllm.choosing import Choosing
from impress.engines.vllm.connector import ImpressConnector
from impress.errors import Unsupported
from tests.vllm.flash_on_cpu import flash_on_cpu, strides_of
from tests.vllm.served import Served, tokens, words

Serve = Callable[..., Served]

ROUGH = {"name": "quality", "max_missing_mass": 0.3}  # k differs by layer and by request
DOCUMENT = words(700, seed=1)
QUESTIONS = [DOCUMENT + words(20 + i, seed=10 + i) for i in range(6)]
BLOCKS = {"block_size": 32}  # a size that the CPU's kernel takes too
STRIDES = {"NHD": (8192, 64, 256, 1), "HND": (8192, 2048, 64, 1)}


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with flash_on_cpu(monkeypatch):
        yield


def _stored(serve: Serve, **named: Any) -> Served:
    """An engine whose store holds the document, and whose own cache is empty."""
    served = serve(extra={"floor": ROUGH}, **BLOCKS, **named)
    served.ask(QUESTIONS[:1])
    served.forget()
    return served


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("order", STRIDES)
def test_exact_and_whole_sparse_answers_are_plain_ones(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", order)
    plain = serve(store=False, **BLOCKS)
    expected = tokens(plain.ask(QUESTIONS))
    plain.close()
    served = _stored(serve)
    assert strides_of(served) == STRIDES[order]
    exact = served.ask(QUESTIONS)
    assert exact[0].said["mode"] == "exact"
    assert tokens(exact) == expected
    served.forget()
    sparse = served.ask(QUESTIONS, policy={"name": "keep_all"})
    assert [answer.said["mode"] for answer in sparse] == ["sparse"] * 6
    assert tokens(sparse) == expected


def test_a_mixed_batch_answers_as_over_the_cpus_own_kernel(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kernels, two block layouts, one store: the same rows are chosen and the same reported."""
    policies = [ROUGH if i % 2 else None for i in range(6)]
    answers = []
    for flash in (False, True):
        with flash_on_cpu(monkeypatch) if flash else nullcontext():
            served = _stored(serve)
            answers.append(served.ask_each(QUESTIONS, 24, policies))
            served.settle()
            assert served.used_blocks() == 0 and served.store.stats()["leases"] == 0
            served.close()
    cpu, flash_answers = answers
    assert [answer.said.get("mode") for answer in flash_answers[1::2]] == ["sparse"] * 3
    shares = [answer.said["chosen_rows_share"] for answer in flash_answers[1::2]]
    assert max(shares) < 0.9 and len(set(shares)) > 1
    assert shares == [answer.said["chosen_rows_share"] for answer in cpu[1::2]]
    assert tokens(flash_answers) == tokens(cpu)


# ---- what is refused, or taken, on CUDA ----------------------------------------------------------


def test_full_graphs_are_refused_with_the_setting_to_change() -> None:
    for mode in (CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE):
        with pytest.raises(Unsupported, match=f"{mode.name}.*PIECEWISE.*or --enforce-eager"):
            vllm_settings._check_graphs(SimpleNamespace(cudagraph_mode=mode))
    for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE):
        vllm_settings._check_graphs(SimpleNamespace(cudagraph_mode=mode))


def test_a_runner_that_goes_on_behind_lost_rows_is_refused_with_the_setting_to_change() -> None:
    """vLLM's V2 runner is its choice on CUDA. Once it takes the tokens back on the device, too,
    this test fails and the runner can be served."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    staged: list[tuple[int, int]] = []  # for the device, from whose number the next step begins
    device = SimpleNamespace(stage_write_elem=lambda *write: staged.append(write))
    states = SimpleNamespace(
        req_id_to_index={"r": 0}, num_computed_tokens=device, num_computed_tokens_np=np.array([64]),
        prefill_len=SimpleNamespace(np=np.array([64])), num_computed_prefill_tokens=np.array([64]),
    )  # fmt: skip
    runner: Any = SimpleNamespace(req_states=states)
    told = SimpleNamespace(req_ids=["r"], num_computed_tokens=[0], new_block_ids=[None])
    output: Any = SimpleNamespace(
        scheduled_cached_reqs=told, new_block_ids_to_zero=[], kv_cache_block_copies=[]
    )
    GPUModelRunner.update_requests(runner, output)
    assert states.num_computed_tokens_np[0] == 0 and not staged
    config: Any = SimpleNamespace(
        parallel_config=None, scheduler_config=SimpleNamespace(async_scheduling=False),
        use_v2_model_runner=True,
    )  # fmt: skip
    with pytest.raises(Unsupported, match=r"lost.*start with VLLM_USE_V2_MODEL_RUNNER=0"):
        vllm_settings._check_features(config, cast(Any, None))


def test_attention_that_has_no_bridge_is_refused_with_the_setting_to_change() -> None:
    backend = SimpleNamespace(get_name=lambda: "FLASHINFER")
    with pytest.raises(Unsupported, match=r"model.0.*FLASHINFER.*--attention-backend FLASH_ATTN"):
        layouts_of({"model.0": None}, {"model.0": SimpleNamespace(attn_backend=backend)})


def test_blocks_not_of_the_schedulers_size_are_refused_with_the_setting_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM may split a block for a kernel: rows placed by the scheduler's block ids went to blocks
    of other requests."""
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    layers = {"model.0": SimpleNamespace(attn_backend=backend)}
    connector: Any = object.__new__(ImpressConnector)  # with only what the check looks at
    group = "impress.engines.vllm.connector.get_kv_transfer_group"
    monkeypatch.setattr(group, lambda: connector)
    connector.worker, connector._store = None, object()
    connector._served = SimpleNamespace(layer_names=("model.0",), block_size=256)
    connector._vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers)
    )
    connector.scheduler, agent = None, "vllm.distributed.kv_transfer.kv_transfer_state"
    given_back: list[object] = []
    connector.shutdown = lambda: given_back.append(connector)
    monkeypatch.setattr(f"{agent}._KV_CONNECTOR_AGENT", connector)
    said = "^vLLM keeps model.0 in blocks of 128 tokens and schedules blocks of 256: start with "
    cache = torch.zeros(16, 2, 128, 64)
    with pytest.raises(Unsupported, match=said + "--block-size 128$"):
        connector.register_kv_caches({"model.0": cache})
    # vLLM hands the process's next engine the connector that is there: it would refuse again.
    assert connector.worker is None and given_back == [connector]
    layers["model.0"].kv_cache = torch.zeros_like(cache)
    with pytest.raises(Unsupported, match="of one whose start failed earlier in this process"):
        connector.register_kv_caches({"model.0": cache})


def test_the_plug_in_takes_the_place_of_flash_attention_on_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True)
    monkeypatch.setattr("vllm.platforms.current_platform", cuda)
    kind = AttentionBackendEnum.FLASH_ATTN
    try:
        with pytest.raises(Unsupported, match="FlashAttentionBackend: install impress"):
            vllm_settings._check_backend("cuda")
        plugin.register()
        vllm_settings._check_backend("cuda")
        mine = kind.get_class()
        assert mine.get_name() == "FLASH_ATTN" and issubclass(mine, FlashAttentionBackend)
        assert issubclass(mine.get_impl_cls(), Choosing)
        assert issubclass(mine.get_impl_cls(), FlashAttentionImpl)
    finally:
        kind.clear_override()
