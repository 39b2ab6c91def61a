"""What is named by what: extra keys, resets, events, counters; and what is refused at start."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.version", reason="vLLM has an environment of its own: make test-vllm")

from vllm import envs

from impress.config import Config
from impress.engines.vllm import keys
from impress.engines.vllm.events import Events
from impress.engines.vllm.keys import Adapters, extras_of, vllm_keys_of
from impress.engines.vllm.loading import directory_of
from impress.engines.vllm.settings import (
    Settings,
    _check_features,
    _namespace,
    at_least,
    policy_of,
    served,
)
from impress.engines.vllm.step import Prompt
from impress.errors import ConfigError, ImpressError, Unsupported
from impress.policy import Exact, Paper, Quality
from tests.conftest import wait_for_promotions
from tests.vllm.served import MIB, SMALL, Served, params, tokens, transfer_config, words

Serve = Callable[..., Served]

PROMPT = words(300, seed=3)


def _request(**given: Any) -> Any:
    plain = {
        "mm_features": [], "lora_request": None, "cache_salt": None, "prompt_embeds": None,
        "_prompt_embeds_per_block_hashes": {}, "prompt_token_ids": None,
        "prompt_is_token_ids": None,
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **given})


def _image(name: str, offset: int, length: int) -> Any:
    place = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=name, mm_position=place)


def test_a_plain_prompt_has_no_extras_and_is_asked_about_once() -> None:
    """Each of its blocks was asked about, two or three times a request, while vLLM scheduled."""
    calls, vllms = [], vllm_keys_of()

    def keys_of(request: Any, *at: int) -> Any:
        calls.append(at)
        return vllms(request, *at)

    assert extras_of(_request(), 32_768, 16, keys_of, Adapters()) == ({}, "")
    assert calls == [(0, 32_768, 0)]


@pytest.mark.parametrize("name", ["0-image-0", "my-picture", "5f" * 32])
def test_a_request_with_images_stays_out_of_the_store(name: str) -> None:
    """vLLM names an image by a count within this process when it hashes none, and by whatever the
    client says: another image's KV was found under such a name, by another server or a day later.
    A name that looks like a digest may be the client's word, too."""
    request = _request(mm_features=[_image(name, 130, 200)])
    with pytest.raises(Unsupported, match="images have no name that lasts"):
        extras_of(request, 400, 128, vllm_keys_of(), Adapters())


def test_prompt_embeddings_are_named_by_their_digest() -> None:
    import torch

    keys_of, rows = vllm_keys_of(), torch.randn(300, 8)
    one, _ = extras_of(_request(prompt_embeds=rows), 300, 128, keys_of, Adapters())
    again, _ = extras_of(_request(prompt_embeds=rows.clone()), 300, 128, keys_of, Adapters())
    other, _ = extras_of(_request(prompt_embeds=rows + 1), 300, 128, keys_of, Adapters())
    assert one == again
    assert sorted(one) == [0, 128, 256]
    assert not set(one.values()) & set(other.values())


def test_prompt_embeddings_are_named_by_what_vllm_computes_with_them(serve: Serve) -> None:
    """vLLM's key covers their bytes alone. A vector of zeros had the name of token 0 in a prompt
    that mixes both, and float16 that of the bfloat16 with the same bits: one was answered from the
    other's KV."""
    import torch

    zeros = torch.randn(300, 128)
    zeros[10:140] = 0
    mixed = [10 <= i < 140 for i in range(300)]
    half = torch.randn(300, 128).to(torch.float16)
    prompts = [
        {"prompt_embeds": zeros},
        {"prompt_embeds": zeros, "prompt_token_ids": [0] * 300, "prompt_is_token_ids": mixed},
        {"prompt_embeds": zeros, "prompt_token_ids": [0] * 300},
        {"prompt_embeds": half},
        {"prompt_embeds": half.view(torch.bfloat16)},
    ]
    served = serve(enable_prompt_embeds=True, enable_prefix_caching=False)
    n_cached = []
    for prompt in prompts * 2:
        (out,) = served.llm.generate([prompt], params(5), use_tqdm=False)
        n_cached.append(out.num_cached_tokens)
        served.settle()
    assert n_cached == [0] * 5 + [256] * 5


def test_what_vllms_own_cache_takes_for_the_same_embeddings_is_not_stored(serve: Serve) -> None:
    """That cache goes by their bytes alone: the blocks of zeros were given to a prompt of tokens 0,
    and stored as that prompt's own."""
    import torch

    zeros = torch.randn(300, 128)
    zeros[:140] = 0
    first = {"prompt_embeds": zeros}
    mixed = [i < 140 for i in range(300)]
    second = {**first, "prompt_token_ids": [0] * 300, "prompt_is_token_ids": mixed}
    served = serve(enable_prompt_embeds=True, enable_prefix_caching=True)
    for prompt in (first, second):
        served.llm.generate([prompt], params(5), use_tqdm=False)
        served.settle()
    served.forget()
    n_cached = []
    for prompt in (first, second):
        (out,) = served.llm.generate([prompt], params(5), use_tqdm=False)
        n_cached.append(out.num_cached_tokens)
        served.forget()
    assert n_cached == [256, 0]


@pytest.mark.parametrize("name", ["hf_quant_config.json", "my_quantize_config.json"])
def test_files_that_say_how_weights_are_quantized_are_in_the_name(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """vLLM reads them where the config says nothing: after an error in one was put right, old
    prefixes were answered from KV made with the error."""
    import shutil

    from vllm.config import KernelConfig, LoadConfig, ModelConfig

    shutil.copytree(models["opt"], tmp_path / "model")
    model = ModelConfig(model=str(tmp_path / "model"), dtype="float32", skip_tokenizer_init=True)

    def named(quantization: str | None) -> bytes:
        model.quantization = quantization
        config = SimpleNamespace(
            model_config=model, load_config=LoadConfig(), kernel_config=KernelConfig()
        )
        return _namespace(config, Settings.of({"store": "x"}), "float32")

    plain, found = named(None), [named("awq")]
    for text in ('{"quantization": {"quant_algo": "A"}}', '{"quantization": {"quant_algo": "B"}}'):
        (tmp_path / "model" / name).write_text(text)
        found.append(named("awq"))
    assert len({*found}) == 3
    (tmp_path / "model" / name).unlink()
    assert named(None) == plain and named("awq") == found[0]


def test_the_salt_is_the_tenant() -> None:
    extra, tenant = extras_of(_request(cache_salt="mine"), 300, 128, vllm_keys_of(), Adapters())
    assert (extra, tenant) == ({}, "salt:mine")


def _adapter_in(folder: Path, seed: int, number: int = 1) -> Any:
    """A request for an adapter of random weights."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    save_file({"a": torch.randn(4, 4)}, str(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text('{"r": 4}')
    lora = SimpleNamespace(lora_name="x", lora_int_id=number, lora_path=str(folder))
    return _request(lora_request=lora)


def _adapter_key(request: Any, adapters: Adapters) -> bytes:
    extra, _ = extras_of(request, 300, 128, vllm_keys_of(), adapters)
    assert list(extra) == [0]
    return extra[0]


def test_an_adapter_is_named_by_its_files(tmp_path: Path) -> None:
    first = _adapter_key(_adapter_in(tmp_path / "a", 1), Adapters())
    assert _adapter_key(_adapter_in(tmp_path / "b", 1), Adapters()) == first  # elsewhere
    assert _adapter_key(_adapter_in(tmp_path / "a", 2), Adapters()) != first  # after a restart
    lora = SimpleNamespace(lora_name="x", lora_int_id=1, lora_path=str(tmp_path / "none"))
    with pytest.raises(Unsupported, match="cannot be read"):
        extras_of(_request(lora_request=lora), 300, 128, vllm_keys_of(), Adapters())


def test_an_adapter_at_home_is_read_where_vllm_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM loaded ~/a, and its requests were not reused, as there was no such folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    request = _adapter_in(tmp_path / "a", 1)
    first = _adapter_key(request, Adapters())
    request.lora_request.lora_path = "~/a"
    assert _adapter_key(request, Adapters()) == first


@pytest.mark.parametrize("beside", ["model.safetensors", "model.safetensors.index.json"])
def test_an_adapter_beside_a_models_weights_is_named_by_its_own(
    tmp_path: Path, beside: str
) -> None:
    """A merged model in its folder was taken for it: two adapters had one name, and one that was
    trained further found the KV of the adapter it had been."""
    import torch
    from safetensors.torch import save_file

    for name in "ab":
        (tmp_path / name).mkdir()
        save_file({"w": torch.ones(4)}, str(tmp_path / name / "model.safetensors"))
        if beside.endswith("json"):
            (tmp_path / name / beside).write_text('{"weight_map": {"w": "model.safetensors"}}')
    first = _adapter_key(_adapter_in(tmp_path / "a", 1), Adapters())
    assert _adapter_key(_adapter_in(tmp_path / "b", 1), Adapters()) == first
    assert _adapter_key(_adapter_in(tmp_path / "b", 2), Adapters()) != first


@pytest.mark.parametrize("kind", ["bin", "pt"])
def test_every_file_that_vllm_may_load_of_an_adapter_counts(tmp_path: Path, kind: str) -> None:
    request = _adapter_in(tmp_path / "a", 1)
    plain = _adapter_key(request, Adapters())
    other = tmp_path / "a" / f"adapter_model.{kind}"
    other.write_bytes(b"one")
    one = _adapter_key(request, Adapters())
    other.write_bytes(b"two")
    assert len({plain, one, _adapter_key(request, Adapters())}) == 3
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    alone = _adapter_key(request, Adapters())
    other.unlink()
    (tmp_path / "a" / "training_args.bin").write_bytes(b"no weights")
    with pytest.raises(Unsupported, match="holds no adapter_model file"):
        extras_of(request, 300, 128, vllm_keys_of(), Adapters())
    assert alone not in (plain, one)


def test_an_adapter_that_tensorizer_loads_is_not_named_by_files_nobody_reads(
    tmp_path: Path,
) -> None:
    """vLLM takes its settings and weights from another folder: it had the name of the adapter in
    `lora_path`, and that one found its KV."""
    adapters, request = Adapters(), _adapter_in(tmp_path / "a", 1, 2)
    request.lora_request.tensorizer_config_dict = {"tensorizer_dir": str(tmp_path / "b")}
    with pytest.raises(Unsupported, match="loaded by tensorizer, from other files"):
        extras_of(request, 300, 128, vllm_keys_of(), adapters)


def test_an_adapter_whose_files_change_is_not_reused_until_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM goes on with the adapter it loaded: KV was stored under the name of the new files, where
    the next server found it. Files that come back name nothing: vLLM may have loaded in between."""
    adapters = Adapters()
    first = _adapter_key(_adapter_in(tmp_path / "a", 1), adapters)
    assert _adapter_key(_adapter_in(tmp_path / "a", 1), adapters) == first
    for seed in (2, 1):
        with pytest.raises(Unsupported, match="other files than when it was first used"):
            _adapter_key(_adapter_in(tmp_path / "a", seed), adapters)
    assert len(caplog.records) == 1
    with pytest.raises(Unsupported, match="other files"):  # a number has one adapter
        _adapter_key(_adapter_in(tmp_path / "b", 2), adapters)
    with pytest.raises(Unsupported, match="other files"):  # in vLLM's cache under that path, too
        _adapter_key(_adapter_in(tmp_path / "b", 2, number=2), adapters)
    assert _adapter_key(_adapter_in(tmp_path / "c", 2, number=3), adapters) != first


@pytest.mark.parametrize("is_settled", [True, False], ids=["settled", "just written"])
def test_an_adapters_weights_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_settled: bool
) -> None:
    """Where no digest of them could be kept on disk (no home, a clock of whole seconds), they were
    read four times a request, and at each step in which it waited, while all others stood still."""
    reads, read = [], keys._adapter
    monkeypatch.setattr(keys, "_adapter", lambda *args: reads.append(1) or read(*args))
    monkeypatch.setattr(keys, "_SETTLED_NS", -(10**15) if is_settled else 10**15)
    adapters, request = Adapters(), _adapter_in(tmp_path / "a", 1)
    names = {_adapter_key(request, adapters) for _ in range(3)}
    assert len(names) == 1 and len(reads) == (1 if is_settled else 3)
    _adapter_in(tmp_path / "a", 2)
    later = tmp_path / "a" / "adapter_model.safetensors"
    os.utime(later, (later.stat().st_atime, later.stat().st_mtime + 1))  # a clock may be coarse
    with pytest.raises(Unsupported, match="has other files than when it was first used"):
        _adapter_key(request, adapters)


def test_an_adapter_that_was_saved_after_vllm_began_is_not_reused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server loads an adapter before any request names it. Its files were replaced in between:
    KV that the old weights had computed was stored under the new ones' name, for good."""
    request = _adapter_in(tmp_path / "a", 1)
    places = [tmp_path / "a", *(tmp_path / "a").iterdir()]
    changed_ns = max(place.stat().st_ctime_ns for place in places)
    before = Adapters(begun_ns=changed_ns)
    assert _adapter_key(request, before) == _adapter_key(request, Adapters())
    after = Adapters(begun_ns=changed_ns - 1)
    for _ in range(2):
        with pytest.raises(Unsupported, match=r"saved after vLLM began|has other files"):
            _adapter_key(request, after)
    assert [r.getMessage().partition(",")[0] for r in caplog.records] == [
        f"adapter {tmp_path / 'a'} was saved after vLLM began"
    ]


def test_an_adapter_that_was_put_in_place_of_another_after_vllm_began_is_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are old: only a link on the way to them is new. Where that cannot be looked at,
    nothing is known."""
    for seed, name in enumerate(("one", "two")):
        _adapter_in(tmp_path / name, seed)
    link, first = tmp_path / "current", tmp_path / "a"
    first.symlink_to("current")
    link.symlink_to("one")
    begun_ns = max(one.lstat().st_ctime_ns for one in tmp_path.rglob("*"))
    lora = SimpleNamespace(lora_name="x", lora_int_id=1, lora_path=str(first))
    assert _adapter_key(_request(lora_request=lora), Adapters(begun_ns=begun_ns))
    while link.lstat().st_ctime_ns <= begun_ns:  # the clock of a file system ticks in milliseconds
        link.unlink()
        link.symlink_to("two")
    with pytest.raises(Unsupported, match="saved after vLLM began"):
        _adapter_key(_request(lora_request=lora), Adapters(begun_ns=begun_ns))

    def fails(_path: str) -> int:
        raise Unsupported("cannot be read")

    monkeypatch.setattr(keys, "_changed_ns", fails)
    with pytest.raises(Unsupported, match="cannot be read"):
        _adapter_key(_request(lora_request=lora), Adapters(begun_ns=1 << 62))


def test_an_adapter_loaded_anew_from_its_path_is_not_reused_until_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Unloaded, saved again and loaded, it has another number in vLLM, and the same place in its
    prefix cache: blocks that the old weights had computed were stored under the new ones' name."""
    adapters = Adapters()
    first = _adapter_key(_adapter_in(tmp_path / "a", 1), adapters)
    assert _adapter_key(_adapter_in(tmp_path / "a", 1, number=2), adapters) == first
    for number in (3, 4):
        with pytest.raises(Unsupported, match="other files than when it was first used"):
            _adapter_key(_adapter_in(tmp_path / "a", 2, number=number), adapters)
    assert len(caplog.records) == 1


def _served(
    model: Path | str, change: Any = None, *, store_new: bool = True, **arguments: Any
) -> Any:
    """What the connector makes of vLLM's arguments for the tiny opt; no engine is started.

    `change` is called with the configuration that vLLM makes of them.
    """
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    config = EngineArgs(
        model=str(model), dtype="float32", max_model_len=512, enforce_eager=True,
        skip_tokenizer_init=True, kv_transfer_config=transfer_config(Path("unused")), **arguments,
    ).create_engine_config()  # fmt: skip
    if change is not None:
        change(config)
    names = [f"model.decoder.layers.{i}.self_attn.attn" for i in range(3)]
    spec = FullAttentionSpec(block_size=128, num_kv_heads=4, head_size=32, dtype=torch.float32)
    caches = KVCacheConfig(8, [], [KVCacheGroupSpec(names, spec)])
    return served(config, caches, Settings.of({"store": "unused", "store_new": store_new}))


def test_what_a_server_applies_of_an_adapter_is_part_of_its_name(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """A server with --lora-target-modules answered from the KV of one that applies all of them."""
    request = _adapter_in(tmp_path / "a", 1)

    def key(modules: list[str] | None, dtype: str = "auto") -> bytes:
        server = _served(
            models["opt"], enable_lora=True, lora_dtype=dtype, lora_target_modules=modules
        )
        return _adapter_key(request, Adapters(server.lora))

    two = key(["v_proj", "fc1"])
    assert len({key(None), key([]), key(["v_proj"]), two, key(None, "bfloat16")}) == 5
    assert key(["fc1", "v_proj"]) == two


def test_adapters_are_mixed_where_the_kernels_do_so(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33 mended what 0.32 did: requests without an adapter were kept from the store there,
    too, as on every server with --enable-lora on the CPU."""
    from vllm.lora.ops import torch_ops

    def kernel(*, masks: bool) -> Any:
        def expand(inputs: Any, weights: Any, output: Any, indices: Any) -> None:
            found = (inputs[:, None] * weights[indices]).sum(-1)
            output += found.masked_fill((indices == -1)[:, None], 0) if masks else found

        return expand

    for masks in (False, True):
        monkeypatch.setattr(torch_ops, "bgmv_expand", kernel(masks=masks))
        assert _served(models["opt"], enable_lora=True).mixes_adapters is not masks
        assert not _served(models["opt"]).mixes_adapters


def test_a_key_of_unknown_kind_is_refused() -> None:
    def keys_of(request: Any, first: int, end: int, at: int) -> Any:
        return (("steering", "x"),), at

    with pytest.raises(Unsupported, match="'steering' is not known"):
        extras_of(_request(), 300, 128, keys_of, Adapters())


def test_an_unknown_key_keeps_a_request_out_of_the_store(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(enable_prefix_caching=False)
    (plain,) = served.ask([PROMPT])
    served.settle()
    stored = served.store.stats()["stored_tokens"]
    hits = served.scheduler.connector.scheduler._hits
    monkeypatch.setattr(hits, "_keys_of", lambda request, *at: ((("steering", "x"),), 0))
    (refused,) = served.ask([PROMPT])
    (other,) = served.ask([words(300, seed=4)])
    served.settle()
    assert refused.tokens == plain.tokens
    assert (refused.n_cached, other.n_cached) == (0, 0)
    assert served.store.stats()["stored_tokens"] == stored


def test_salts_do_not_share(serve: Serve) -> None:
    served = serve(enable_prefix_caching=False)
    (mine,) = served.ask([PROMPT], salt="mine")
    served.settle()
    (other,) = served.ask([PROMPT], salt="other")
    (plain,) = served.ask([PROMPT])
    served.settle()
    (again,) = served.ask([PROMPT], salt="mine")
    assert [a.n_cached for a in (mine, other, plain, again)] == [0, 0, 0, 256]
    assert tokens([mine]) == tokens([other]) == tokens([plain]) == tokens([again])


def test_a_reset_forgets_what_was_stored(serve: Serve) -> None:
    served = serve()
    served.ask([PROMPT])
    served.forget()
    assert served.ask([PROMPT])[0].n_cached == 256
    served.settle()
    assert served.scheduler.reset_prefix_cache(reset_connector=True)
    assert served.ask([PROMPT])[0].n_cached == 0
    served.forget()
    assert served.ask([PROMPT])[0].n_cached == 256  # what was stored since is found


def _told(served: Served) -> tuple[list[Any], Callable[[], list[Any]]]:
    """A list that fills with the events vLLM takes, and the call that takes them."""
    events = served.scheduler.connector.scheduler._events
    told: list[Any] = []
    take = events.take
    events.take = lambda: told.extend(found := take()) or found
    return told, take


def test_hits_show_in_the_counters_and_events(serve: Serve) -> None:
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import BlockStored

    served = serve(kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"))
    told, take = _told(served)
    before = {m.name: m.value for m in served.llm.get_metrics() if hasattr(m, "value")}
    served.ask([PROMPT])
    served.forget()
    served.ask([PROMPT])
    served.settle()
    told += take()
    (stored,) = [event for event in told if isinstance(event, BlockStored)]
    assert stored.token_ids == PROMPT[:256]
    assert stored.medium == "STORAGE"
    assert len(stored.block_hashes) == 2
    now = {m.name: m.value for m in served.llm.get_metrics() if hasattr(m, "value")}
    grown = {name: now[name] - before.get(name, 0) for name in now}
    assert grown["vllm:external_prefix_cache_hits"] == 256
    assert grown["vllm:impress_requests_exact"] == 1
    assert grown["vllm:impress_stored"] >= 1
    n_bytes = 256 * served.store.geometry.token_bytes
    assert grown["vllm:impress_read_bytes_ssd"] >= n_bytes


def test_what_is_told_of_a_block_is_what_vllm_tells_of_it(serve: Serve) -> None:
    """Its extra keys were left out: routers, which make keys of tokens, salt and embeddings, took
    blocks stored under one salt for everybody's, and prompt embeddings for zeros."""
    import torch
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import BlockStored

    served = serve(
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        enable_prompt_embeds=True,
    )
    told, take = _told(served)
    vllms, pool = [], served.scheduler.kv_cache_manager
    take_vllms = pool.take_events
    pool.take_events = lambda: vllms.extend(found := take_vllms()) or found
    served.ask([PROMPT], salt="mine")
    prompt = {"prompt_embeds": torch.randn(300, 128), "cache_salt": "mine"}
    served.llm.generate([prompt], params(5), use_tqdm=False)
    served.ask([PROMPT])
    served.settle()
    told += take()

    def said(events: list[Any]) -> list[Any]:
        stored = [event for event in events if isinstance(event, BlockStored)]
        return sorted(
            (event.block_hashes, event.token_ids, event.extra_keys, event.lora_id)
            for event in stored
        )

    assert len(said(told)) == 3
    assert said(told) == said(vllms)


def test_every_tier_that_gives_rows_is_counted(serve: Serve) -> None:
    """Rows from HBM were in the answer, but in no counter."""
    tiers = {"dram_bytes": 4 * MIB, "hbm_bytes": 4 * MIB, "hbm_device": "cpu"}
    served = serve(extra={"config": {**SMALL, **tiers}})
    before = {m.name: m.value for m in served.llm.get_metrics() if hasattr(m, "value")}
    served.ask([PROMPT])
    n_rows = 0
    for _ in range(4):  # a tier further up each time
        served.forget()
        n_rows += served.ask([PROMPT])[0].said["rows"]
        wait_for_promotions(served.store)
    served.settle()
    now = {m.name: m.value for m in served.llm.get_metrics() if hasattr(m, "value")}
    read = {tier: now[name] - before.get(name, 0) for tier in ("hbm", "dram", "ssd")
            if (name := f"vllm:impress_read_rows_{tier}") in now}  # fmt: skip
    assert all(read.values()) and sum(read.values()) == n_rows == 4 * 256 * 3


def _expecting(*lengths: int) -> Events:
    """Events of a request "r" whose prompt, or answer too, of so many tokens is under way."""
    events = Events(enabled=True, block_size=16)
    for n in lengths:
        request = _request(request_id="r", block_hashes=[bytes([i]) * 32 for i in range(n // 16)])
        events.expect(request, Prompt(np.arange(n, dtype=np.int32), {}, ""))
    return events


@pytest.mark.parametrize(
    ("lengths", "ready"),
    [((128, 192), (128, 192)), ((128, 192), (192,)), ((128, 64), (128,)), ((128, 128), (128,))],
    ids=["one by one", "the prompt refused", "cut off in a second life", "in chunks"],
)
def test_an_answer_that_ends_before_its_prompt_is_stored_is_told_as_well(
    lengths: tuple[int, ...], ready: tuple[int, ...]
) -> None:
    """What was expected of the answer replaced what was expected of the prompt, and went with it:
    nobody heard of the answer."""
    events = _expecting(*lengths)
    for n_tokens in ready:
        events.stored("r", n_tokens)
    told = events.take()
    assert [len(event.block_hashes) for event in told] == [n // 16 for n in ready]
    assert [event.token_ids for event in told] == [list(range(n)) for n in ready]
    events.stored("r", max(lengths))
    assert not events.take()  # it is kept no longer


@pytest.mark.parametrize(("n_left", "n_removed"), [(320, 0), (256, 1), (64, 3), (0, 3)])
def test_of_blocks_that_end_within_a_window_those_that_are_gone_are_told(
    n_left: int, n_removed: int
) -> None:
    """The prompt was cut to its last block and looked up, which answers in whole windows: with
    windows of 64 tokens and blocks of 96, a block that was still stored was told as removed."""
    events = Events(enabled=True, block_size=96)
    hashes = [bytes([i]) * 32 for i in range(3)]
    request = _request(request_id="r", block_hashes=hashes)
    events.expect(request, Prompt(np.arange(320, dtype=np.int32), {}, ""))
    events.stored("r", 320)
    events.take()
    events.doubt()
    events.check(lambda tokens, *names: min(n_left, len(tokens) // 64 * 64))
    assert sum(len(event.block_hashes) for event in events.take()) == n_removed


def test_what_becomes_ready_after_a_reset_is_not_told() -> None:
    """Nobody looks for it by that name any more."""
    events = _expecting(128)
    events.cleared()
    events.stored("r", 128)
    assert not events.take()


def test_after_a_reset_what_was_told_is_told_as_removed_and_nothing_else() -> None:
    """All blocks were told as cleared: vLLM's own too, which it keeps where requests hold blocks.
    A router sent nobody to them any more."""
    from vllm.distributed.kv_events import BlockRemoved

    events = _expecting(64, 128)
    events.stored("r", 64)
    events.stored("r", 128)
    stored = events.take()[-1]
    events.cleared()
    (removed,) = events.take()
    assert isinstance(removed, BlockRemoved) and removed.medium == "STORAGE"
    assert removed.block_hashes == stored.block_hashes  # each of them once
    events.cleared()
    assert not events.take()


def test_what_the_store_evicts_is_told(serve: Serve) -> None:
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    served = serve(kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"))
    told, take = _told(served)
    longer = PROMPT[:256] + words(300, seed=8)
    served.ask([PROMPT])
    served.settle()
    served.ask([longer])
    served.settle()
    assert served.store.evict(1) > 0  # a leaf: the end of the longer one, or of the other
    left = served.store.lookup(longer)
    served.ask([words(20, seed=9)], n=3)
    told += take()
    stored = {block for event in told if isinstance(event, BlockStored)
              for block in event.block_hashes}  # fmt: skip
    (removed,) = [event for event in told if isinstance(event, BlockRemoved)]
    assert set(removed.block_hashes) < stored
    assert removed.medium == "STORAGE"
    assert len(removed.block_hashes) == len(longer) // 128 - left // 128
    assert served.store.evict(1 << 40) > 0
    served.ask([words(20, seed=10)], n=3)
    told += take()
    gone = [block for event in told if isinstance(event, BlockRemoved)
            for block in event.block_hashes]  # fmt: skip
    assert set(gone) == stored


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({}, 'needs "store"'),
        ({"stor": "x"}, "nearest known is 'store'"),
        ({"store": "x", "policy": {"name": "papr"}}, "a policy is"),
        ({"store": "x", "policy": {"name": "paper", "keeep": 1}}, "no setting 'keeep'"),
        ({"store": "x", "policy": {"name": "paper"}, "floor": {"name": "exact"}}, "looser"),
        ({"store": "x", "config": {"window": 63}}, "window must be"),
        ({"store": "x", "config": {"mode": "exact"}}, "'policy' and 'floor' say it"),
    ],
)
def test_bad_settings_are_refused_by_name(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Settings.of(extra)


def test_probes_of_every_policy_are_stored() -> None:
    settings = Settings.of(
        {"store": "x", "floor": {"name": "quality"}, "config": {"probes": ["heads3-v1"]}}
    )
    assert settings.config.probes == ("heads3-v1", "int4-v2")
    assert settings.sparse
    assert not Settings.of({"store": "x"}).sparse


def test_a_request_may_be_stricter_than_the_floor_never_looser() -> None:
    assert at_least(Exact(), Paper())
    assert not at_least(Paper(keep=0.5), Paper(keep=0.25))  # heads may agree where they did not
    assert at_least(Paper(keep=1.0), Paper(keep=0.25))
    assert at_least(Paper(keep=0.5), Paper(keep=0.25, gate=False))
    assert not at_least(Paper(keep=0.1), Paper(keep=0.25))
    assert not at_least(Paper(gate=False), Paper())
    assert not at_least(Paper(keep=1.0), Quality())
    assert at_least(Quality(0.05), Quality(0.1))
    assert at_least(Quality(0.1, per="head"), Quality(0.1))
    assert not at_least(Quality(0.2), Quality(0.1))
    assert not at_least(Quality(0.1, max_bytes=1 << 20), Quality(0.1))
    # Where the floor's cap leaves no room for rows, all are loaded; a larger cap may have room.
    assert not at_least(Quality(0.1), Quality(0.1, max_bytes=1 << 20))
    assert not at_least(Quality(0.1, max_bytes=2 << 20), Quality(0.1, max_bytes=1 << 20))
    capped = Quality(0.1, max_bytes=1 << 20)
    assert at_least(capped, capped) and at_least(Quality(0.05, max_bytes=1 << 20), capped)
    assert not at_least(Quality(0.1, max_bytes=1 << 20, per="head"), capped)
    assert not at_least(Paper(), Exact())
    assert policy_of({"name": "quality", "max_missing_mass": 0.05}) == Quality(0.05)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"load_format": "dummy"}, "--load-format dummy"),
    ],
)
def test_what_cannot_be_served_is_refused_at_start(
    models: dict[str, Path], tmp_path: Path, arguments: dict[str, Any], says: str
) -> None:
    from vllm import LLM
    from vllm.distributed.kv_transfer import kv_transfer_state

    given = dict(arguments)
    config = transfer_config(tmp_path / "store")
    if "kv_load_failure_policy" in given:
        config["kv_load_failure_policy"] = given.pop("kv_load_failure_policy")
    with pytest.raises((ImpressError, RuntimeError), match=says):
        LLM(
            model=str(models["opt"]), dtype="float32", kv_transfer_config=config, max_model_len=512,
            enforce_eager=True, skip_tokenizer_init=True, **given,
        )  # fmt: skip
    assert kv_transfer_state._KV_CONNECTOR_AGENT is None


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_role_that_only_reads_or_only_stores_is_refused(
    models: dict[str, Path], role: str
) -> None:
    """The role was ignored: a server started as kv_consumer kept every prompt on the disk."""

    def change(config: Any) -> None:
        config.kv_transfer_config.kv_role = role

    with pytest.raises(ConfigError, match='"kv_role": "kv_both"; to only read, "store_new": false'):
        _served(models["opt"], change)


def test_a_connector_beside_impress_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    """Under vLLM's MultiConnector, rows that another connector had failed to load were stored: vLLM
    tells load errors once the step is over, and each connector knows only its own. The next
    request with that prompt was answered from what had lain in those blocks."""
    from vllm import LLM
    from vllm.distributed.kv_transfer import kv_transfer_state

    peer = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "peer")},
    }  # fmt: skip
    config = {
        "kv_connector": "MultiConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [peer, transfer_config(tmp_path / "store")]},
    }  # fmt: skip
    try:
        with pytest.raises(Unsupported, match=r'MultiConnector: .* "ImpressConnector" alone'):
            LLM(
                model=str(models["opt"]), dtype="float32", kv_transfer_config=config,
                max_model_len=512, enforce_eager=True, skip_tokenizer_init=True,
            )  # fmt: skip
    finally:
        kv_transfer_state.ensure_kv_transfer_shutdown()


@pytest.mark.parametrize("second", ["the same directory", "another", "no store"])
def test_a_second_engine_of_a_process_is_refused_and_the_first_serves_on(
    serve: Serve, models: dict[str, Path], tmp_path: Path, second: str
) -> None:
    """vLLM gives every engine of a process the first one's connector: KV that the second computed
    was stored as the first one's, which answered from it, and the other way round."""
    from tests.vllm.served import Served

    first = serve()
    (alone,) = first.ask([PROMPT])
    first.settle()
    store = {"the same directory": tmp_path / "store", "another": tmp_path / "b", "no store": None}
    with pytest.raises(Exception, match="another engine uses it: shut that engine down first"):
        Served(models["llama"], "bfloat16", store[second])
    assert first.store.stats()["spans"] == 1
    first.forget()
    (again,) = first.ask([PROMPT])
    assert (again.tokens, again.n_cached) == (alone.tokens, 256)


def test_a_name_that_another_hub_serves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM loaded ModelScope's copy, and the store named it by Hugging Face's."""
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    model = SimpleNamespace(model="org/model", revision=None)
    with pytest.raises(Unsupported, match="give the directory it was downloaded to"):
        directory_of(model, SimpleNamespace(download_dir=None))


def test_the_namespace_covers_a_config_from_elsewhere_and_how_weights_are_quantized(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers on one directory found each other's KV though one computed it with a config from
    elsewhere, or with weights that it quantized differently."""
    import torch
    from vllm.config import KernelConfig, LoadConfig, ModelConfig

    own = (models["opt"] / "config.json").read_text()
    for name in ("same", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            own if name == "same" else own.replace('"relu"', '"gelu"')
        )

    def named(where: str | None = None, cross_engine: bool = False, **changed: Any) -> bytes:
        model = ModelConfig(
            model=str(models["opt"]), dtype="float32", skip_tokenizer_init=True,
            hf_config_path=where,
        )  # fmt: skip
        for key, value in changed.items():
            setattr(model, key, value)
        config = SimpleNamespace(
            model_config=model, load_config=LoadConfig(), kernel_config=KernelConfig(**kernels)
        )
        settings = Settings.of({"store": "x", "cross_engine": cross_engine})
        return _namespace(config, settings, "float32")

    kernels: dict[str, Any] = {}
    plain, elsewhere = named(), named(str(tmp_path / "other"))
    assert len({plain, elsewhere, named(str(tmp_path / "same"))}) == 3
    assert named(str(models["opt"])) == plain == named()
    one, two = {"ignore": ["a"]}, {"ignore": ["b"]}
    found = [named(quantization="fp8", quantization_config=given) for given in (one, two, one)]
    assert found[0] == found[2] != found[1]
    with pytest.raises(Unsupported, match="--hf-config-path must be a directory"):
        named(str(tmp_path / "same"), hf_config_path="somebody/model")
    near, far = ({"rope_theta": theta} for theta in (1e4, 1e6))
    found = [named(hf_overrides=given) for given in (near, far, near)]
    assert found[0] == found[2] and len({plain, *found}) == 3
    with pytest.raises(Unsupported, match="hf_overrides as a function cannot be named"):
        named(hf_overrides=lambda config: config)
    plain_fp8 = named(quantization="fp8")
    for name, value in (
        ("VLLM_CPU_INT4_W4A8", "0"), ("VLLM_MARLIN_INPUT_DTYPE", "int8"),
        ("VLLM_DISABLED_KERNELS", "CPUFP8W8A8BlockScaledMMKernel"),
        ("VLLM_BATCH_INVARIANT", "1"), ("VLLM_USE_DEEP_GEMM", "0"),
        ("VLLM_USE_DEEP_GEMM_E8M0", "0"), ("VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER", "0"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert named(quantization="fp8") != plain_fp8 and named() == plain
    with monkeypatch.context() as patch:  # another release may have other kernels for it
        patch.setattr("vllm.version.__version__", "0.0.1")
        assert named(quantization="fp8") != plain_fp8 and named() == plain
    kernels = {"linear_backend": "marlin"}
    assert named(quantization="fp8") != plain_fp8 and named() == plain
    kernels = {}
    with monkeypatch.context() as patch:  # what `torch.set_float32_matmul_precision` is told
        patch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "medium")
        assert named() != plain
        half = named(dtype=torch.bfloat16)
        with pytest.raises(ConfigError, match=r"not go with VLLM_FLOAT32_MATMUL_PRECISION$"):
            named(cross_engine=True)
        patch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "highest")
        assert named() == plain and named(dtype=torch.bfloat16) == half
    with monkeypatch.context() as patch:  # oneDNN's own setting, unknown to torch
        patch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
        assert named() != plain and named(dtype=torch.bfloat16) == half
        with pytest.raises(ConfigError, match=r"not go with ONEDNN_DEFAULT_FPMATH_MODE$"):
            named(cross_engine=True)
        patch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "strict")
        assert named() == plain
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_HUMMING_USE_F16_ACCUM", "1")
        with pytest.raises(Unsupported, match=r"VLLM_HUMMING_USE_F16_ACCUM .*: unset it"):
            named()
    elsewhere_too = tmp_path / "torchao.json"
    by_file = []
    for text in ("{}", '{"a": 1}'):
        elsewhere_too.write_text(text)
        by_file.append(named(hf_overrides={"quantization_config_file": str(elsewhere_too)}))
    assert len({plain, *by_file}) == 3
    elsewhere_too.unlink()
    with pytest.raises(Unsupported, match="quantization_config_file must be a file"):
        named(hf_overrides={"quantization_config_file": str(elsewhere_too)})
    for changed in ({"hf_overrides": near}, {"quantization": "fp8"}):
        (what,) = changed
        with pytest.raises(ConfigError, match=f"cross_engine does not go with {what}"):
            named(cross_engine=True, **changed)


@pytest.mark.parametrize(
    ("where", "what", "value", "said"),
    [
        ("parallel_config", "tensor_parallel_size", 2, "--tensor-parallel-size above 1"),
        ("scheduler_config", "async_scheduling", True, "start with --no-async-scheduling"),
        ("", "use_v2_model_runner", True, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ("kv_transfer_config", "kv_load_failure_policy", "fail", '"recompute" beside'),
        ("kv_transfer_config", "kv_role", "kv_consumer", '"kv_role": "kv_both"'),
        ("", "speculative_config", object(), "drop --speculative-config"),
        ("model_config", "runner_type", "pooling", "use --runner generate"),
        ("device_config", "device_type", "tpu", "vLLM on tpu is not supported"),
    ],
)
def test_what_is_not_served_is_refused_at_start(
    where: str, what: str, value: Any, said: str
) -> None:
    """Each would give wrong answers, or end vLLM, later."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        kv_transfer_config=SimpleNamespace(
            kv_load_failure_policy="recompute", kv_role="kv_both"
        ),
        model_config=SimpleNamespace(runner_type="generate", model_class_overrides=None),
        device_config=SimpleNamespace(device_type="cpu"),
        use_v2_model_runner=False, speculative_config=None,
    )  # fmt: skip
    settings = Settings.of({"store": "x"})
    _check_features(config, settings)
    setattr(getattr(config, where) if where else config, what, value)
    with pytest.raises((ConfigError, Unsupported), match=said):
        _check_features(config, settings)


def test_the_namespace_tells_transformers_code_inside_vllm_from_vllms_own(
    models: dict[str, Path],
) -> None:
    """--model-impl transformers rounds otherwise: its rows were exact hits for vLLM's own class."""
    from vllm.config import LoadConfig, ModelConfig

    def named(impl: str, *, cross_engine: bool = False, **changed: Any) -> bytes:
        model = ModelConfig(
            model=str(models["llama"]), dtype="float32", skip_tokenizer_init=True, model_impl=impl
        )
        for key, value in changed.items():
            setattr(model.hf_config if key == "auto_map" else model, key, value)
        config = SimpleNamespace(model_config=model, load_config=LoadConfig())
        settings = Settings.of({"store": "x", "cross_engine": cross_engine})
        return _namespace(config, settings, "float32")

    assert named("auto") == named("vllm") != named("transformers")
    assert named("vllm", cross_engine=True) == named("transformers", cross_engine=True)
    code = {"trust_remote_code": True, "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}
    assert named("vllm", **code) == named("vllm")  # the remote code is not run
    with pytest.raises(Unsupported, match="drop --trust-remote-code"):
        named("transformers", **code)


def test_files_that_are_replaced_while_vllm_loads_them_refuse_the_start(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connector names the model by its files once the weights are loaded: the old weights' KV
    got the new files' name, and the next server took it for its own."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    model = tmp_path / "model"
    shutil.copytree(models["llama"], model)
    real = BaseModelLoader.load_model

    def load_and_replace(self: Any, *args: Any, **named: Any) -> Any:
        loaded = real(self, *args, **named)
        shutil.copy2(model / "model.safetensors", model / "new")
        (model / "new").rename(model / "model.safetensors")
        return loaded

    with monkeypatch.context() as patched:
        patched.setattr(BaseModelLoader, "load_model", load_and_replace)
        with pytest.raises(Exception, match="were replaced while vLLM loaded them"):
            Served(model, "bfloat16", tmp_path / "store")
    served = Served(model, "bfloat16", tmp_path / "store")
    (answer,) = served.ask([PROMPT])
    assert answer.n_cached == 0
    served.close()


def test_a_start_without_the_plug_in_says_that_replaced_files_go_unnoticed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where VLLM_PLUGINS leaves impress out, nothing looks at the files before they are loaded. The
    documents said that the start is refused."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def said() -> list[str]:
        caplog.clear()
        selector._cached_get_attn_backend.cache_clear()  # vLLM chooses once per process
        with caplog.at_level("WARNING", "impress"):
            serve().close()
        lines = [record.getMessage() for record in caplog.records if record.name == "impress"]
        return [line for line in lines if "replaced while it loaded them" in line]

    assert not said()
    with monkeypatch.context() as without:
        without.setenv("VLLM_PLUGINS", "another")
        without.setattr("impress.engines.vllm.register", lambda: None)
        AttentionBackendEnum.CPU_ATTN.clear_override()
        (line,) = said()
    assert "let VLLM_PLUGINS name it" in line
    assert not said()


@pytest.mark.parametrize(
    "kind", ["tensor", "pipeline", "data", "prefill_context", "decode_context"]
)
def test_more_than_one_worker_is_refused(models: dict[str, Path], kind: str) -> None:
    """With context parallelism each worker holds a part of the rows, but it was not refused."""

    def change(config: Any) -> None:
        setattr(config.parallel_config, f"{kind}_parallel_size", 2)

    flag = kind.replace("_", "-")
    with pytest.raises(Unsupported, match=f"--{flag}-parallel-size above 1 is not tested"):
        _served(models["opt"], change)


def test_a_class_put_in_the_place_of_the_models_is_refused(models: dict[str, Path]) -> None:
    """The other class's rows were stored under the name of vLLM's own over the same weights."""

    def change(config: Any) -> None:
        config.model_config.model_class_overrides = {"OPTForCausalLM": "mine:OPTForCausalLM"}

    with pytest.raises(Unsupported, match=r"--model-class-overrides .* drop it"):
        _served(models["opt"], change)


def test_ids_that_may_come_again_are_refused_where_requests_are_stored(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM keeps a finished request until its blocks have been read, and asserts that no other
    comes with its id: a client that reused the id of its last request ended the server."""
    envs.disable_envs_cache()  # left by an engine that ran before
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    with pytest.raises(Unsupported, match=r"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION .*: unset it"):
        _served(models["opt"])
    _served(models["opt"], store_new=False)
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0")
    _served(models["opt"])


def test_weights_that_vllm_may_pass_over_are_refused(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """A directory was named by model.safetensors, but vLLM loaded consolidated.safetensors beside
    it: a model that was trained further found the KV of the one it had been."""
    import shutil

    def copy(name: str, *files: str) -> Path:
        shutil.copytree(models["opt"], tmp_path / name)
        for file in files:
            shutil.copy(models["opt"] / "model.safetensors", tmp_path / name / file)
        return tmp_path / name

    both = copy("both", "consolidated.safetensors")
    for given in ("auto", "hf", "mistral"):  # hf: it loads both, one over the other
        with pytest.raises(Unsupported, match=r"consolidated\.safetensors beside model\.safet"):
            _served(both, load_format=given)
    (both / "model.safetensors").unlink()
    _served(both)
    with pytest.raises(Unsupported, match=r"more\.safetensors beside model\.safetensors"):
        _served(copy("more", "more.safetensors"))
    sharded = copy("sharded", "part.safetensors", "consolidated-1.safetensors")
    index = '{"weight_map": {"w": "model.safetensors", "x": "part.safetensors"}}'
    (sharded / "model.safetensors.index.json").write_text(index)
    _served(sharded, load_format="hf")  # what the index does not name is not loaded
    with pytest.raises(Unsupported, match=r"consolidated-1\.safetensors beside"):
        _served(sharded, load_format="runai_streamer")  # but this loads it
    with pytest.raises(Unsupported, match=r"consolidated-1\.safetensors beside"):
        _served(sharded)
    old = copy("old")
    (old / "model.safetensors").rename(old / "a.bin")
    (old / "pytorch_model.bin.index.json").write_text('{"weight_map": {"w": "a.bin"}}')
    (old / "training_args.bin").write_bytes(b"none")
    _served(old)
    shutil.copy(old / "a.bin", old / "stray.bin")
    with pytest.raises(Unsupported, match=r"stray\.bin beside a\.bin"):
        _served(old)
    (old / "stray.bin").unlink()
    shutil.copy(old / "a.bin", old / "part.safetensors")  # which needs no index, and comes first
    with pytest.raises(Unsupported, match=r"part\.safetensors beside a\.bin"):
        _served(old)
    gguf = copy("gguf")
    (gguf / "model.safetensors").rename(gguf / "x.gguf")
    (gguf / "y.pt").write_bytes(b"none")
    with pytest.raises(Unsupported, match=r"y\.pt beside x\.gguf"):
        _served(gguf)
    for given in ("pt", "npcache", "sharded_state", "tensorizer"):
        with pytest.raises(Unsupported, match=f"--load-format {given} .*: drop it"):
            _served(models["opt"], load_format=given)
    # runai_streamer loads these, whatever the model's directory holds
    with pytest.raises(Unsupported, match=r"model_weights \(.*old\) are not those that name"):
        _served(models["opt"], load_format="runai_streamer", model_weights=str(old))


def test_mistrals_own_files_are_refused_by_a_line_to_act_on(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """vLLM takes params.json then, and the error said only that model type 'transformer' is not
    supported."""
    model = tmp_path / "model"
    shutil.copytree(models["llama"], model)
    given = {
        "dim": 256, "n_layers": 3, "n_heads": 8, "n_kv_heads": 2, "head_dim": 32, "hidden_dim": 384,
        "norm_eps": 1e-5, "vocab_size": 512, "max_position_embeddings": 2048,
    }  # fmt: skip
    (model / "params.json").write_text(json.dumps(given))
    shard = model / "model-00001-of-00001.safetensors"
    (model / "model.safetensors").rename(shard)
    index = {"weight_map": {"model.embed_tokens.weight": shard.name}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(shard, model / "consolidated.safetensors")
    with pytest.raises(Unsupported, match=r"consolidated\.safetensors beside model-0.*move away"):
        _served(model)
    shard.unlink()
    (model / "model.safetensors.index.json").unlink()
    with pytest.raises(Unsupported, match=r"params\.json, .*: start it with --config-format hf$"):
        _served(model)
    _served(model, config_format="hf")


def test_another_writer_has_a_shard_of_its_own(serve: Serve, tmp_path: Path) -> None:
    from impress.engines.vllm.shared import acquire, release
    from impress.store import PrefixStore

    served = serve()
    model = served.scheduler.connector._served
    shared = acquire(tmp_path / "store", model.geometry, model.namespace, None)
    assert shared is served.store
    release(tmp_path / "store")
    opened = (tmp_path / "store", served.store.geometry, b"x" * 32)
    with PrefixStore.open(*opened, Config(**SMALL), "rw"):
        assert (tmp_path / "store" / "shards" / "1").is_dir()
    with pytest.raises(ImpressError, match=r"holds|locked|writer"):
        PrefixStore.open(*opened, Config(shard=0, **SMALL), "rw")
