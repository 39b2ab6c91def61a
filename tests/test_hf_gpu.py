"""The Transformers engine on a CUDA device, which holds the keys but nothing that is stored.

Tiny random models: nothing is downloaded. experiments/gpu_recipe.md has the command.
"""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from masked_reference import (
    HIT,
    LOGITS,
    Watched,
    assert_matches,
    filled,
    model_of,
    reference,
    request_ids,
)
from test_engine_guard import guarded, ledger_of
from test_engine_hf import CONFIG, MODELS, assert_same_bits, attach, continued, prompts, tiny
from test_virtual import ask

from impress.engines import hf
from impress.engines.hf_modules import CACHE
from impress.engines.hf_output import FirstLogits
from impress.engines.hf_storing import StoreQueue
from impress.engines.virtual import Virtual
from impress.policy import (
    AllHeads,
    Contiguous,
    Exact,
    KeepAll,
    Paper,
    Quality,
    Random,
    SnapWindow,
    StaticH2O,
)
from impress.quality import guard

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_thread")]

MOST = 1e-4  # in float32, between kernels of other shapes
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}  # rows of 4 KiB
ROOMY = CONFIG.model_copy(update={"segment_bytes": 64 << 20, "dram_bytes": 64 << 20})


# --- every row ------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["opt", "llama", "qwen3"])
def test_a_hit_answers_as_the_model_that_continues(tmp_path, family, attention):
    model, ids = model_of(family, attention=attention).cuda(), request_ids().cuda()
    with filled(model, tmp_path):
        pass
    with attach(model, tmp_path) as engine:  # from the disk
        mine = engine.generate(ids, max_new_tokens=8, do_sample=False, **LOGITS)
        request = engine.last_request
    assert (request.mode, request.hit_tokens, request.lost) == ("exact", HIT, "")
    assert mine.sequences.is_cuda
    stored = prompts(200).cuda()
    assert_matches(mine, continued(model, stored, ids, HIT, do_sample=False), MOST)


@pytest.mark.parametrize(("family", "dtype", "attention"), MODELS)
def test_a_hit_has_the_bits_of_continuing(tmp_path, family, dtype, attention):
    """This is promised everywhere, but shown only on the CPU: a GPU may take another kernel."""
    model, ids = tiny(family, dtype, attention=attention).cuda(), request_ids().cuda()
    with filled(model, tmp_path) as engine:
        mine = engine.generate(ids, max_new_tokens=8, **LOGITS)
        assert (engine.last_request.mode, engine.last_request.hit_tokens) == ("exact", HIT)
    assert_same_bits(mine, continued(model, prompts(200).cuda(), ids, HIT))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_miss_hit_and_the_bare_model_generate_the_same_tokens(tmp_path, family, batch):
    model, ids = model_of(family).cuda(), prompts(180, batch).cuda()
    bare = model.generate(ids, max_new_tokens=16, do_sample=False)
    with attach(model, tmp_path) as engine:
        modes, answers = [], []
        for _ in range(2):
            answers.append(engine.generate(ids, max_new_tokens=16, do_sample=False))
            modes.append(engine.last_request.mode)
            engine.flush()
    assert modes == ["recompute", "exact"]
    assert all(torch.equal(answer, bare) for answer in answers)


# --- chosen rows ----------------------------------------------------------------------------------

POLICIES = [
    Paper(keep=0.2, gate=False),
    Paper(keep=0.2, alpha=0.0, fallback="heads"),
    Quality(max_missing_mass=0.4),
    Quality(max_missing_mass=0.6, per="head"),
    AllHeads(keep=0.1),
    Contiguous(keep=0.25),
    Random(keep=0.3),
    StaticH2O(0.25),
    SnapWindow(0.25),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_what_every_policy_chooses_is_what_is_attended_to(tmp_path, policy):
    """Keys are looked at in host memory, records on the device: the query has to be on both."""
    model, ids, watched = model_of("llama").cuda(), request_ids().cuda(), Watched(policy)
    with filled(model, tmp_path, policy=watched) as engine:
        mine = engine.generate(ids, max_new_tokens=4, do_sample=False, **LOGITS)
        request = engine.last_request
    assert (request.mode, request.hit_tokens) == ("sparse", HIT)
    assert any(rows is not None for rows in watched.rows)
    assert_matches(mine, reference(model, ids, watched.rows, 4), MOST)


@pytest.mark.parametrize(
    "policy", [KeepAll(), Quality(max_missing_mass=0), AllHeads(keep=1), Random(keep=1)],
    ids=lambda policy: policy.name,
)  # fmt: skip
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_every_row_chosen_answers_as_an_exact_hit(tmp_path, family, policy):
    model, ids = model_of(family).cuda(), request_ids().cuda()
    with filled(model, tmp_path, policy=policy) as engine:
        mine = engine.generate(ids, max_new_tokens=8, do_sample=False, **LOGITS)
        assert engine.last_request.mode == "sparse"
        assert engine.last_request.chosen_rows_share == 1
    stored = prompts(200).cuda()
    assert_matches(mine, continued(model, stored, ids, HIT, do_sample=False), MOST)


WEIGHED = [Paper(keep=0.2, gate=False), AllHeads(keep=0.5)]  # by records, and by all keys


@pytest.mark.parametrize("policy", WEIGHED, ids=lambda policy: policy.name)
def test_requests_are_weighed_and_run_again(tmp_path, monkeypatch, policy):
    """Exact ones are weighed by their cache's rows, sparse ones by what their layers were asked."""
    monkeypatch.setattr(guard, "RERUN_EVERY", 1)
    for module in ("hf", "hf_prefix"):  # longer requests: the selection is made anew
        monkeypatch.setattr(f"impress.engines.{module}.SHADOW_ROWS", 16)
    model, modes = model_of("llama").cuda(), []
    settings = {"guard_shadows": 2, "guard_missing_mass": 1.0}
    with guarded(model, tmp_path, policy, **settings) as engine:
        engine.generate(prompts(200).cuda(), max_new_tokens=1, policy=Exact())
        engine.flush()
        for seed in range(10, 14):
            ids = torch.cat([prompts(200)[:, :HIT], prompts(80, seed=seed)], 1).cuda()
            engine.generate(ids, max_new_tokens=2)
            engine.flush()
            modes.append(engine.last_request.mode)
        ledger = ledger_of(engine)
    assert (ledger["shadows"], ledger["dropped"]) == (4, 0)
    assert modes == ["exact"] * 2 + ["sparse"] * 2 and ledger["reruns"] == 2


# --- memory ---------------------------------------------------------------------------------------


def test_virtual_buffers_give_the_bits_of_ordinary_memory(tmp_path):
    pytest.importorskip("cuda.bindings.driver", reason="pip install '.[gpu]'")
    model, stored = tiny("llama", **WIDE).cuda(), prompts(500)
    ids = torch.cat([stored[:, :150], prompts(350, seed=2)], 1).cuda()
    found = {}
    for name, virtual in (("pooled", None), ("virtual", Virtual(batch=2))):
        with hf.attach(model, tmp_path / name, config=ROOMY, virtual=virtual) as engine:
            engine.generate(stored.cuda(), max_new_tokens=1)
            engine.flush()
            found[name] = ask(engine, ids)  # 40 new ones: past a page's 512 rows
            assert engine.last_request.hit_tokens == HIT
            assert engine.last_request.memory == name
            engine.flush()
            if virtual is not None:
                usage = engine.buffers.usage()
    assert (usage.n_rented, usage.n_fallbacks) == (2, 0)
    assert usage.n_ahead + usage.n_stalls > 0
    assert torch.equal(found["virtual"][0], found["pooled"][0])
    assert torch.equal(found["virtual"][1], found["pooled"][1])


def test_what_has_been_stored_has_left_the_device(tmp_path):
    """The last request's keys and values stayed there until the next one was stored."""
    model, ids = tiny("llama", **WIDE).cuda(), prompts(1000).cuda()
    with hf.attach(model, tmp_path, config=ROOMY, store_new=False) as engine:
        engine.generate(ids, max_new_tokens=2)  # now torch and its libraries have what they keep
    gc.collect()
    before = torch.cuda.memory_allocated()
    with hf.attach(model, tmp_path, config=ROOMY) as engine:
        engine.generate(ids, max_new_tokens=2)
        engine.flush()
        assert engine.last_request.stored_tokens == 960
        gc.collect()
        kept = torch.cuda.memory_allocated() - before
        assert kept < 960 * engine.store.geometry.token_bytes // 10


def test_rows_are_stored_while_a_device_computes_for_others(tmp_path, monkeypatch):
    """They used to be copied only after the next request's kernels."""
    model, put, may = tiny("llama", **WIDE).cuda(), StoreQueue._store_rows, threading.Event()
    with hf.attach(model, tmp_path, config=ROOMY) as engine:
        engine.generate(prompts(1000).cuda(), max_new_tokens=2)
        engine.flush()
        monkeypatch.setattr(StoreQueue, "_store_rows", lambda *args: may.wait(60) and put(*args))
        engine.generate(prompts(1000, seed=2).cuda(), max_new_tokens=2)
        torch.cuda._sleep(20_000_000_000)  # many times as long as storing takes
        computed = torch.cuda.current_stream().record_event()
        may.set()
        engine.flush()
        assert engine.last_request.stored_tokens == 960 and not computed.query()
        again = engine.generate(prompts(1000, seed=2).cuda(), max_new_tokens=2)
        assert engine.last_request.hit_tokens == 960 and again.is_cuda


def test_rows_wait_to_be_stored_only_where_the_device_has_room(tmp_path, monkeypatch):
    with attach(tiny().cuda(), tmp_path) as engine:
        with monkeypatch.context() as full:
            full.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1))
            full.setattr(torch.cuda, "memory_reserved", torch.cuda.memory_allocated)
            engine.generate(prompts(200).cuda(), max_new_tokens=2)
        assert "bytes of cuda:0" in engine.last_request.refused and engine.n_skipped == 1
        engine.generate(prompts(200).cuda(), max_new_tokens=2)
        engine.flush()
        assert engine.last_request.stored_tokens == 192


def test_a_returned_cache_stays_whole_when_its_rows_have_been_stored(tmp_path):
    model, ids = tiny().cuda(), prompts(200).cuda()
    with attach(model, tmp_path) as engine:
        kept = engine.generate(ids, max_new_tokens=2, return_dict_in_generate=True)
        before = kept[CACHE].layers[1].keys.clone()
        engine.flush()
        engine.generate(prompts(200, seed=2).cuda(), max_new_tokens=2)
        engine.flush()
        assert torch.equal(kept[CACHE].layers[1].keys, before)


# --- the clock ------------------------------------------------------------------------------------


def test_the_first_token_is_there_when_the_device_has_computed_it():
    scores = torch.zeros(1, 8, device="cuda")
    first = FirstLogits(0.0)
    torch.cuda._sleep(200_000_000)
    computed = torch.cuda.current_stream().record_event()
    assert not computed.query()
    first(torch.zeros(1, 1, dtype=torch.int64), scores)
    assert computed.query() and first.ttft_ms > 0
