"""The Transformers engine on tiny random models: the same bits, the same tokens, or a refusal."""

from __future__ import annotations

import copy
import functools
import gc
import re
import subprocess
import sys
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import said_by_a_child, wait_for_promotions

import impress
import impress.write.reclaim
from impress.cli.run import _when_stored
from impress.engines import hf, hf_models, hf_storing
from impress.engines.hf_cache import RowsCache
from impress.engines.hf_modules import CACHE, CACHES
from impress.engines.hf_prefix import StoredPrefix, end_reads
from impress.engines.hf_storing import Job, StoreQueue
from impress.engines.virtual import Virtual
from impress.errors import BadInput, PrefixLost, StoreFailed, StoreMismatch, Unsupported
from impress.policy import Exact, Recency
from impress.write.headers import Headers
from impress.write.writer import Writer
from tiers.base import PAGE
from tiers.errors import ReadFailed
from tiers.slots import BufferPool

WINDOW = 64
VOCAB = 199
CONFIG = impress.Config(
    window=WINDOW, segment_bytes=4 << 20, dram_bytes=8 << 20, io_threads=2, mode="sparse"
)  # models this small recompute faster than they load
GQA = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
SIZES = {
    "opt": {"num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 64},
    "llama": GQA,
    "qwen2": GQA,
    "qwen3": {**GQA, "head_dim": 24},
    "mistral": {**GQA, "sliding_window": 512},
    "gpt2": {"n_head": 4},
}


pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(family="llama", dtype=torch.float32, seed=0, attention="sdpa", **changes):
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = transformers.AutoConfig.for_model(family, **{**sizes, **SIZES[family], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    model.set_attn_implementation(attention)
    return model


def prompts(n_tokens, batch=1, seed=1):
    """Random prompts [batch, n_tokens]; a shorter one of the same seed is a longer one's head."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (batch, 1024), generator=draw)[:, :n_tokens]


def attach(model, path, mode="sparse", **options):
    return hf.attach(model, path, config=CONFIG.model_copy(update={"mode": mode}), **options)


def continued(model, stored, ids, hit, n_new=8, **options):
    """What the model itself gives for ids, over the stored run's cache cut to the hit."""
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(stored, **{CACHE: cache})
    cache.crop(hit - stored.shape[1])
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **{CACHE: cache},
        max_new_tokens=n_new,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


def ending(ids, token):
    """Options that make a row end at this token, and pad it."""
    return {"eos_token_id": token, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}


def assert_same_bits(mine, theirs):
    assert torch.equal(mine.sequences, theirs.sequences)
    assert len(mine.logits) == len(theirs.logits)
    for step, (a, b) in enumerate(zip(mine.logits, theirs.logits, strict=True)):
        assert (a - b).abs().max().item() == 0.0, f"step {step}"


class WithConfig(torch.nn.Module):
    """No Transformers model, though it has a config, as one written by hand does, and maybe a
    model within it, as a wrapper that adds a value head does."""

    def __init__(self, config, model=None):
        super().__init__()
        self.config, self.model = config, model

    def generate(self, *args, **options):
        return self.model.generate(*args, **options)


def test_attach_says_what_it_wants_of_arguments_of_another_type(tmp_path):
    """A model's name or a dict of settings raised the AttributeError of whatever met it first; so
    did modules with a config that are no Transformers models."""
    model, path = tiny(), tmp_path / "s"
    for given, config, said in (
        ("gpt2", None, "model: want a Transformers model .*from_pretrained.*got str"),
        (torch.nn.Linear(1, 1), None, "model: .*got Linear"),
        (WithConfig(SimpleNamespace(n_layer=2)), None, "model: .*got WithConfig"),
        (WithConfig(model.config, model), None, "model: .*got WithConfig"),
        (model, {"dram_bytes": 1}, "config: want impress.Config .*got dict"),
    ):
        with pytest.raises(impress.BadInput, match=f"^{said}$"):
            hf.attach(given, path, config=config)
    with pytest.raises(impress.BadInput, match=r"^path: want a directory.*got int$"):
        hf.attach(model, 3)
    with pytest.raises(impress.BadInput, match=r"^virtual: want Virtual\(batch=.*got bool$"):
        hf.attach(model, path, virtual=True)
    assert not path.exists()


# --- exactness ------------------------------------------------------------------------------------

MODELS = [
    ("opt", torch.float32, "sdpa"),
    ("opt", torch.bfloat16, "sdpa"),
    ("opt", torch.float32, "eager"),
    ("llama", torch.float32, "sdpa"),
    ("llama", torch.bfloat16, "sdpa"),
    ("llama", torch.float16, "sdpa"),
    ("llama", torch.float32, "eager"),
    ("qwen2", torch.float32, "sdpa"),
    ("qwen3", torch.float32, "sdpa"),
    ("mistral", torch.float32, "sdpa"),
]


@pytest.mark.parametrize(("family", "dtype", "attention"), MODELS)
def test_a_hit_has_the_bits_of_continuing_from_what_was_stored(tmp_path, family, dtype, attention):
    model = tiny(family, dtype, attention=attention)
    stored = prompts(200)
    ids = torch.cat([stored[:, :150], prompts(80, seed=2)], 1)  # shares two whole windows
    with attach(model, tmp_path) as engine:
        engine.generate(stored, max_new_tokens=1)
        engine.flush()
        mine = engine.generate(
            ids, max_new_tokens=8, output_logits=True, return_dict_in_generate=True
        )
        assert engine.last_request.hit_tokens == 128
        assert engine.last_request.mode == "exact"
    assert_same_bits(mine, continued(model, stored, ids, 128))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_a_batch_has_the_bits_of_continuing_and_is_cut_to_its_shortest_hit(
    tmp_path, family, attention
):
    model = tiny(family, attention=attention)
    stored = prompts(200, batch=2)
    with attach(model, tmp_path) as engine:
        engine.generate(stored, max_new_tokens=1)
        engine.flush()
        ids = torch.cat([stored[:, :190], prompts(40, batch=2, seed=2)], 1)
        ids[1, 130] = (ids[1, 130] + 1) % VOCAB  # the second row holds two windows only
        mine = engine.generate(
            ids, max_new_tokens=8, output_logits=True, return_dict_in_generate=True
        )
        assert engine.last_request.hit_tokens == 128
    assert_same_bits(mine, continued(model, stored, ids, 128))


def test_a_batch_cut_to_its_shortest_hit_is_counted_once(tmp_path):
    """Every row was leased whole, let go and leased again up to the shortest hit: two hits for each
    row. Where a row misses, the others count what they have."""
    ids = prompts(400, batch=3)
    with attach(tiny(), tmp_path) as engine:
        engine.generate(ids[:1, :130], max_new_tokens=1)
        engine.generate(ids[1:2], max_new_tokens=1)
        engine.flush()
        counters = engine.store.counters
        engine.generate(ids[:2], max_new_tokens=1)
        assert engine.last_request.hit_tokens == 128
        assert (counters["hits"], counters["hit_tokens"]) == (2, 2 * 128)
        assert [n for n, _ in engine.store.catalog.heat().values()] == [1, 1]
        engine.flush()
        before = counters["misses/not_stored"]
        engine.generate(ids[1:], max_new_tokens=1)
        assert engine.last_request.hit_tokens == 0
        assert (counters["hits"], counters["hit_tokens"]) == (3, 2 * 128 + 384)
        assert counters["misses/not_stored"] == before + 1


def test_a_batch_of_prompts_of_one_token_is_answered(tmp_path):
    """They cannot be stored, so they are not looked up: the store used to refuse the lookup."""
    model, ids = tiny(), prompts(1, batch=2)
    with attach(model, tmp_path) as engine:
        answer = engine.generate(ids, max_new_tokens=3)
    assert torch.equal(answer, model.generate(ids, max_new_tokens=3))


@pytest.mark.parametrize("given", ["arguments", "generation_config", "the model's own"])
@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_what_has_a_row_for_each_token_is_whole_on_a_hit_too(tmp_path, asked, given):
    """The rows of reused tokens were missing from it, without a word."""
    model, ids = tiny(attention="eager"), prompts(200)
    settings = {asked: True, "return_dict_in_generate": True}
    options = settings if given == "arguments" else {}
    if given == "generation_config":
        options = {given: transformers.GenerationConfig(max_new_tokens=2, **settings)}
    elif given == "the model's own":
        vars(model.generation_config).update(settings)
    name = asked.removeprefix("output_")
    want = getattr(model.generate(ids, max_new_tokens=2, **options), name)
    with attach(model, tmp_path) as engine:
        for _ in range(2):
            found = getattr(engine.generate(ids, max_new_tokens=2, **options), name)
            engine.flush()
            shapes = [[layer.shape for layer in step] for step in found]
            assert shapes == [[layer.shape for layer in step] for step in want]
        assert engine.last_request.hit_tokens == 0
        assert f"{asked} is of every token of the prompt" in engine.last_request.why
        vars(model.generation_config).update({asked: None})
        engine.generate(ids, max_new_tokens=2)
        assert engine.last_request.hit_tokens == 192


def test_sampling_with_a_seed_draws_the_tokens_of_continuing(tmp_path):
    model, ids = tiny("opt"), prompts(200)
    draw = {"do_sample": True, "temperature": 1.3, "top_k": 50}
    with attach(model, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        torch.manual_seed(7)
        mine = engine.generate(ids, max_new_tokens=12, **draw)
        assert engine.last_request.hit_tokens == 192
    torch.manual_seed(7)
    theirs = continued(model, ids, ids, 192, 12, **draw)
    assert torch.equal(mine, theirs.sequences)


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_miss_hit_and_the_bare_model_generate_the_same_tokens(tmp_path, family):
    model, ids = tiny(family), prompts(180)
    bare = model.generate(ids, max_new_tokens=16, do_sample=False)
    with attach(model, tmp_path) as engine:
        miss = engine.generate(ids, max_new_tokens=16, do_sample=False)
        assert engine.last_request.mode == "recompute"
        engine.flush()
        hit = engine.generate(ids, max_new_tokens=16, do_sample=False)
        assert engine.last_request.mode == "exact"
    assert torch.equal(miss, bare)
    assert torch.equal(hit, bare)


def test_a_prompt_stored_whole_still_computes_its_last_window(tmp_path):
    model, ids = tiny(), prompts(128)
    with attach(model, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        assert engine.store.lookup(ids[0].numpy().astype(np.int32)) == 128
        mine = engine.generate(
            ids, max_new_tokens=4, output_logits=True, return_dict_in_generate=True
        )
        assert engine.last_request.hit_tokens == 64
    assert_same_bits(mine, continued(model, ids, ids, 64, 4))


def test_prompts_below_a_window_pass_through(tmp_path):
    model = tiny()
    with attach(model, tmp_path) as engine:
        for n in (1, 2, 63):
            ids = prompts(n)
            out = engine.generate(ids, max_new_tokens=3)
            assert torch.equal(out, model.generate(ids, max_new_tokens=3))
            assert engine.last_request.hit_tokens == 0


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_two_threads_give_a_hit_the_bits_of_continuing_too(tmp_path, family):
    torch.set_num_threads(2)
    model, ids = tiny(family), prompts(200)
    with attach(model, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        mine = engine.generate(
            ids, max_new_tokens=4, output_logits=True, return_dict_in_generate=True
        )
    assert_same_bits(mine, continued(model, ids, ids, 192, 4))


@pytest.mark.parametrize(("head_dim", "batch"), [(10, 1), (48, 2)])
def test_rows_that_do_not_fill_their_pages_have_the_bits_of_continuing(tmp_path, head_dim, batch):
    # Rows of 40 and 192 bytes. Not 40 in a batch: torch's attention over the second prompt then
    # rounds by that prompt's offset in 64 bytes (AVX2), which stock caches change at each token.
    model = tiny("qwen3", num_attention_heads=3, num_key_value_heads=1, head_dim=head_dim)
    ids = prompts(200, batch=batch)
    with attach(model, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        mine = engine.generate(
            ids, max_new_tokens=4, output_logits=True, return_dict_in_generate=True
        )
        assert engine.last_request.hit_tokens == 192
    assert_same_bits(mine, continued(model, ids, ids, 192, 4))


def test_chunked_prefill_over_a_hit_has_the_bits_of_continuing(tmp_path):
    """Before 5.21 Transformers went over the whole prompt again, behind the rows of a hit: another
    answer came, and it passed for exact."""
    model, ids = tiny(), prompts(200)
    options = {"prefill_chunk_size": 3, "output_logits": True, "return_dict_in_generate": True}
    alone = model.generate(ids, max_new_tokens=4, do_sample=False, **options)
    with attach(model, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        mine = engine.generate(ids, max_new_tokens=4, **options)
        hit, why = engine.last_request.hit_tokens, engine.last_request.why
    assert torch.equal(mine.sequences, alone.sequences)
    assert (torch.stack(mine.logits) - torch.stack(alone.logits)).abs().max() < 1e-4
    if hf_models._VERSION < (5, 21):
        assert hit == 0 and "prefill_chunk_size wants Transformers 5.21" in why
    else:
        assert hit == 192
        assert_same_bits(mine, continued(model, ids, ids, 192, 4, prefill_chunk_size=3))


# --- storing --------------------------------------------------------------------------------------


def test_another_engine_on_the_same_directory_hits_after_a_restart(tmp_path):
    ids = prompts(200)
    with attach(tiny(), tmp_path) as engine:
        first = engine.generate(ids, max_new_tokens=8)
    with attach(tiny(), tmp_path) as engine:
        second = engine.generate(ids, max_new_tokens=8)
        request = engine.last_request
    assert torch.equal(first, second)
    assert (request.n_tokens, request.hit_tokens, request.n_new) == (200, 192, 8)
    assert sum(request.bytes_by_tier.values()) > 0
    assert sum(request.rows_by_tier.values()) > 0
    assert len(request.per_layer) == 2
    assert request.ttft_ms > 0


def test_generated_tokens_are_stored_and_found_by_the_next_turn(tmp_path):
    model, ids = tiny("opt"), prompts(100)
    with attach(model, tmp_path) as engine:
        turn = engine.generate(ids, max_new_tokens=60)
        engine.flush()
        assert engine.last_request.stored_tokens == 128
        longer = torch.cat([turn, prompts(30, seed=9)], 1)
        mine = engine.generate(
            longer, max_new_tokens=40, output_logits=True, return_dict_in_generate=True
        )
        assert engine.last_request.hit_tokens == 128  # 100 of the prompt, 28 of the answer
        engine.flush()
        assert engine.last_request.stored_tokens == 64
        assert engine.store.lookup(mine.sequences[0].numpy().astype(np.int32)) == 192
    # Continuing means after the same steps: prefill of the prompt, then token by token.
    cache = transformers.DynamicCache()
    model.generate(ids, **{CACHE: cache}, max_new_tokens=60)
    cache.crop(128 - cache.get_seq_length())
    theirs = model.generate(
        longer,
        **{CACHE: cache},
        max_new_tokens=40,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert_same_bits(mine, theirs)


def test_what_follows_the_end_token_is_not_stored(tmp_path):
    model, ids = tiny(), prompts(120, batch=2)
    free = model.generate(ids, max_new_tokens=80)
    ends = int(free[0, 125])  # row 0 ends after six tokens at most; row 1 goes on longer
    with attach(model, tmp_path) as engine:
        out = engine.generate(ids, max_new_tokens=80, **ending(ids, ends))
        engine.flush()
        for row in out.numpy().astype(np.int32):
            stops = np.flatnonzero(row[120:] == ends)
            n_held = 120 + int(stops[0]) + 1 if len(stops) else len(row) - 1
            assert engine.store.lookup(row) <= n_held // WINDOW * WINDOW


class OnDevice(torch.Tensor):
    """To numpy, it is like a tensor on a GPU."""

    def __array__(self, *_args, **_named):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def test_an_end_token_on_a_device_costs_no_answer(tmp_path):
    """generate() takes eos_token_id as a tensor, too. The answer was ready, but a TypeError was
    raised instead."""
    model, ids = tiny(), prompts(120)
    ends = torch.tensor([int(model.generate(ids, max_new_tokens=30)[0, 149])]).as_subclass(OnDevice)
    with attach(model, tmp_path) as engine:
        out = engine.generate(ids, max_new_tokens=80, **ending(ids, ends))
        engine.flush()
        assert out.shape[1] <= 150 and out[0, -1] == int(ends)
        n_held = out.shape[1] - 1
        assert engine.store.lookup(out[0].numpy().astype(np.int32)) == n_held // WINDOW * WINDOW


def test_what_a_processor_rewrites_is_stored_as_the_model_was_given_it(tmp_path):
    """Rows were stored under the rewritten tokens, which the model had never seen there."""
    model, ids = tiny(), prompts(120)

    def rewriting(so_far, scores):
        if so_far.shape[1] == 130:
            so_far[:, -5:] = 7
        return scores

    with attach(model, tmp_path) as engine:
        plain = model.generate(ids, max_new_tokens=80)
        told = engine.generate(ids, max_new_tokens=80, logits_processor=[rewriting])
        engine.flush()
        assert told[0, 125:130].tolist() == [7] * 5
        found = [engine.store.lookup(row[0].numpy().astype(np.int32)) for row in (plain, told)]
    assert found == [192, 64]


def test_what_goes_by_the_tokens_so_far_and_rewrites_them_changes_no_name(tmp_path):
    """It is called before any processor that can be given: the tokens it wrote were noted as those
    the model had been given, and named the rows of other tokens."""
    model, ids = tiny(), prompts(120)

    def allowed(_batch, so_far):
        if len(so_far) == 130:
            so_far[-5:] = 7
        return list(range(VOCAB))

    with attach(model, tmp_path) as engine:
        plain = model.generate(ids, max_new_tokens=80)
        told = engine.generate(ids, max_new_tokens=80, prefix_allowed_tokens_fn=allowed)
        engine.flush()
        assert told[0, 125:130].tolist() == [7] * 5
        found = [engine.store.lookup(row[0].numpy().astype(np.int32)) for row in (plain, told)]
    assert found == [192, 64]


def test_a_caller_that_uses_its_prompt_again_changes_no_prompt(tmp_path):
    """A streamer's first call comes before the model's: the tokens it wrote into the caller's
    tensor were computed, and stored under the prompt that had been there."""
    model, ids = tiny(), prompts(200)
    again = ids.clone()

    class Refilling:
        def put(self, _value):
            again[:] = 3

        def end(self):
            pass

    with attach(model, tmp_path) as engine:
        first = engine.generate(again, max_new_tokens=8, streamer=Refilling())
        engine.flush()
        told = engine.generate(ids, max_new_tokens=8)
        assert engine.last_request.hit_tokens == 192
        want = model.generate(ids, max_new_tokens=8)
        assert torch.equal(told, want) and torch.equal(first, want)


def test_an_engine_that_is_cut_off_as_it_is_made_leaves_its_store_to_the_next(
    tmp_path, monkeypatch
):
    """Its threads kept running and its shard stayed taken until the process ended."""
    model = tiny()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(hf, "Weights", interrupted)
        attach(model, tmp_path)
    with attach(model, tmp_path) as engine:
        assert engine.store.stats()["shard"] == "main"


def interrupted(*_args):
    raise KeyboardInterrupt


def test_a_streamer_that_writes_in_the_prompt_it_is_given_changes_no_prompt(tmp_path):
    """On a CPU it was the very tensor that the model was given next: the keys of other tokens were
    stored under the prompt's."""
    model, ids = tiny(), prompts(200)

    class Hiding:
        def put(self, value):
            value[value > 50] = 0

        def end(self):
            pass

    with attach(model, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=8, streamer=Hiding())
        engine.flush()
        told = engine.generate(ids, max_new_tokens=8)
        assert engine.last_request.hit_tokens == 192
        assert torch.equal(told, model.generate(ids, max_new_tokens=8))


def test_equal_prompts_of_a_batch_count_once_as_stored(tmp_path):
    """Every one was counted: the store does not know yet what it has just accepted."""
    with attach(tiny(), tmp_path) as engine:
        ids = torch.cat([prompts(200).repeat(3, 1), prompts(200, seed=2)])
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        assert engine.last_request.stored_tokens == engine.store.stats()["tokens"] == 2 * 192


def test_what_is_stored_in_a_row_and_begins_alike_is_written_once(tmp_path, monkeypatch):
    """Each was written whole: the next was begun before the previous one was READY."""
    ids = torch.cat([prompts(128).repeat(4, 1), prompts(72, batch=4, seed=2)], 1)
    with attach(tiny(), tmp_path) as engine:
        begun, begin = [], engine.store.writer

        def writer(*asked, **more):
            begun.append((begin(*asked, **more), [one.stored.ready for one, _ in begun]))
            return begun[-1][0]

        monkeypatch.setattr(engine.store, "writer", writer)
        engine.generate(ids[:3], max_new_tokens=1)
        engine.generate(ids[3:], max_new_tokens=1)
        engine.flush()
        assert [before for _, before in begun] == [[True] * n for n in range(4)]
        assert engine.store.stats()["stored_tokens"] == engine.store.stats()["tokens"] == 128 + 256
        assert [engine.store.lookup(row.numpy().astype(np.int32)) for row in ids] == 4 * [192]


def test_a_row_that_ends_before_its_first_window_keeps_nothing_from_being_stored(tmp_path):
    """It was offered to the store, which refused it: rows after it were lost and flush raised."""
    model, ids = tiny(), prompts(40, batch=2, seed=3)
    free = model.generate(ids, max_new_tokens=60)
    ends = next(t for t in free[0, 40:60].tolist() if t not in free[1, 40:])  # in row 0 alone
    with attach(model, tmp_path) as engine:
        out = engine.generate(ids, max_new_tokens=60, **ending(ids, ends))
        engine.flush()
        assert engine.last_request.stored_tokens == WINDOW
        assert [engine.store.lookup(row.numpy().astype(np.int32)) for row in out] == [0, WINDOW]


def test_what_the_store_accepts_and_does_not_keep_is_not_told_as_stored(tmp_path, monkeypatch):
    """Another process's eviction took the beginning of it before its commit: the request's 64 new
    tokens were told as stored, and `impress run` told them as newly stored, though none was kept.
    """
    monkeypatch.setattr(impress.write.reclaim, "YIELD_TIMEOUT_S", 0)
    ids, config = prompts(200), CONFIG.model_copy(update={"follow_every_s": 0})
    with (
        hf.attach(tiny(), tmp_path, config=config) as other,
        hf.attach(tiny(), tmp_path, config=config) as engine,
    ):
        other.generate(ids[:, :128], max_new_tokens=2)
        other.flush()
        engine.store.follow()
        begin = engine.store.writer

        def writer(*asked, **more):
            begun = begin(*asked, **more)
            assert other.store.evict(1 << 30) > 0
            engine.store.follow()
            return begun

        with monkeypatch.context() as patch:
            patch.setattr(engine.store, "writer", writer)
            engine.generate(ids, max_new_tokens=2)
            assert engine.last_request.hit_tokens == 128
            for request in (_when_stored(engine, ""), engine.last_request):
                assert request.stored_tokens == engine.store.stats()["tokens"] == 0
                assert request.refused.startswith("prefix gone: ")
        engine.generate(ids, max_new_tokens=2)
        engine.flush()
        request = engine.last_request
        assert (request.stored_tokens, request.refused) == (192, "")


def test_a_store_that_fails_at_its_commit_is_not_told_as_stored(tmp_path, monkeypatch):
    """A flush raised it, and `last_request` told its tokens as stored for ever."""
    with attach(tiny(), tmp_path) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Headers, "write", no_header)
            engine.generate(prompts(200), max_new_tokens=2)
            with pytest.raises(StoreFailed, match="no header"):
                engine.flush()
        engine.flush()
        request = engine.last_request
        assert (request.stored_tokens, request.refused) == (0, "no header")


def no_header(*_args):
    raise StoreFailed("no header")


@pytest.mark.parametrize("n_tokens", [200, 20])
def test_a_reading_engine_stores_nothing_and_calls_nothing_refused(tmp_path, n_tokens):
    """Of a prompt without a whole window, say, it told why it was not stored: whoever watched a
    reader's `refused`, as CONFIG.md says one can, heard of every such request."""
    with attach(tiny(), tmp_path, store_new=False) as engine:
        engine.generate(prompts(n_tokens), max_new_tokens=2)
        engine.flush()
        assert engine.last_request.stored_tokens == 0
        assert engine.last_request.refused == ""
        assert engine.store.lookup(prompts(n_tokens)[0].numpy().astype(np.int32)) == 0


def test_a_returned_cache_stays_whole_while_later_requests_run(tmp_path):
    model, ids = tiny(), prompts(200)
    with attach(model, tmp_path) as engine:
        kept = engine.generate(ids, max_new_tokens=2, return_dict_in_generate=True)
        before = kept[CACHE].layers[1].keys.clone()
        for seed in (2, 3):
            engine.generate(prompts(200, seed=seed), max_new_tokens=2)
        engine.flush()
        cache = kept[CACHE]
        assert isinstance(cache, transformers.DynamicCache)
        assert torch.equal(cache.layers[1].keys, before)
        with torch.no_grad():
            model(ids[:, :3], **{CACHE: cache})
        assert cache.get_seq_length() == 204


def test_the_system_may_not_take_the_pages_of_a_returned_cache(tmp_path, monkeypatch):
    """The pages came back to a pool, which marks what it keeps beyond 256 MiB as free to take: when
    memory was short, the next turn went on from zeros."""
    model, ids, marked = tiny(), prompts(200), []
    monkeypatch.setattr("tiers.slots._may_be_taken", marked.append)
    with attach(model, tmp_path) as engine:
        monkeypatch.setattr(engine.store.buffers, "_keep_bytes", 0)
        for _ in range(2):  # a miss, then a hit
            kept = engine.generate(ids, max_new_tokens=2, return_dict_in_generate=True)
            engine.flush()
            held = {t.data_ptr() for la in kept[CACHE].layers for t in (la.keys, la.values)}
            assert len(held) == 4
            assert marked
            for memory in marked:
                assert not any(0 <= at - memory.ctypes.data < len(memory) for at in held)


@pytest.mark.parametrize("virtual", [None, Virtual(batch=1, context=300)])
def test_a_returned_cache_changed_in_place_changes_nothing_of_what_is_stored(
    tmp_path, monkeypatch, virtual
):
    """It was the very memory that was being stored: a hit had what the caller had made of it."""
    model, ids, may = tiny(), prompts(200), threading.Event()
    put = StoreQueue._store_rows
    monkeypatch.setattr(StoreQueue, "_store_rows", lambda *args: may.wait() and put(*args))
    with attach(model, tmp_path, virtual=virtual) as engine:
        kept = engine.generate(ids, max_new_tokens=8, return_dict_in_generate=True)
        for layer in kept[CACHE].layers:
            layer.keys.neg_()
            layer.values.zero_()
        may.set()
        engine.flush()
        again = engine.generate(
            ids, max_new_tokens=8, output_logits=True, return_dict_in_generate=True
        )
        assert engine.last_request.hit_tokens == 192
    assert_same_bits(again, continued(model, ids, ids, 192))


class OwnCache(transformers.LlamaForCausalLM):
    """Like PEFT's prefix tuning, which puts a cache of its own in place of the given one."""

    @functools.wraps(transformers.LlamaForCausalLM.forward)
    def forward(self, *args, **named):
        if not isinstance(cache := named[CACHE], transformers.DynamicCache):
            assert cache.max_cache_len == -1  # PEFT asks this of a non-dynamic cache
            named[CACHE] = transformers.DynamicCache()
        return super().forward(*args, **named)


def test_a_model_that_answers_by_a_cache_of_its_own_costs_no_answer(tmp_path):
    """The cache it had been given was to be returned, but it was empty: an AttributeError was
    raised instead of an answer."""
    model, ids = tiny(), prompts(200)
    bare = model.generate(ids, max_new_tokens=4)
    model.__class__ = OwnCache
    with attach(model, tmp_path) as engine:
        out = engine.generate(ids, max_new_tokens=4, return_dict_in_generate=True)
        engine.flush()
        assert torch.equal(out.sequences, bare)
        assert out[CACHE].get_seq_length() == 203
        assert "the cache holds 0 rows" in engine.last_request.refused
        assert engine.store.lookup(ids[0].numpy()) == engine.store.buffers.used_bytes == 0


def test_a_model_with_fewer_layers_than_its_config_says_gives_back_their_rows(tmp_path):
    """As after pruning: the engine's own cache was handed to the caller, its memory given back."""
    model, ids = tiny(num_hidden_layers=3), prompts(100)
    model.model.layers = model.model.layers[:2].eval()
    options = {"max_new_tokens": 4, "return_dict_in_generate": True}
    bare = model.generate(ids, **options)
    with attach(model, tmp_path) as engine:
        out = engine.generate(ids, **options)
        assert type(out[CACHE]) is transformers.DynamicCache
        for mine, its in zip(out[CACHE].layers, bare[CACHE].layers, strict=True):
            assert mine.is_initialized == its.is_initialized
            if its.is_initialized:
                assert torch.equal(mine.keys, its.keys)
                assert torch.equal(mine.values, its.values)
        assert "the cache holds 0 rows" in engine.last_request.refused


class ByName(transformers.LlamaForCausalLM):
    """Like PEFT 0.18's models of prompt learning, which hand on what has a name."""

    def generate(self, *args, **named):
        return super().generate(**named)


def test_a_generate_that_hands_on_what_has_a_name_is_given_the_prompt(tmp_path):
    """The prompt came without a name and was lost: Transformers answered a lone first token."""
    model, ids = tiny(bos_token_id=0), prompts(200)
    bare = model.generate(ids, max_new_tokens=4)
    model.__class__ = ByName
    with attach(model, tmp_path) as engine:
        for hit in (0, 192):
            assert torch.equal(engine.generate(ids, max_new_tokens=4), bare)
            assert engine.last_request.hit_tokens == hit
            engine.flush()


class Elsewhere(transformers.LlamaForCausalLM):
    """Answers another prompt than it is given."""

    def generate(self, input_ids, attention_mask, **named):
        return super().generate(input_ids.flip(1), attention_mask=attention_mask, **named)


def test_an_answer_to_another_prompt_is_refused_before_a_token_is_out(tmp_path):
    """Its rows were stored under the prompt that it did not answer."""
    model, ids, heard = tiny(), prompts(100), Heard()
    model.__class__ = Elsewhere
    with attach(model, tmp_path) as engine:
        with pytest.raises(Unsupported, match=r"^the model's generate did not continue"):
            engine.generate(ids, max_new_tokens=4, streamer=heard)
        engine.flush()
        assert len(heard.parts) == 1  # the prompt
        assert engine.store.lookup(ids[0].numpy()) == engine.store.buffers.used_bytes == 0


def test_a_store_given_stays_open_and_serves_again(tmp_path):
    model, ids = tiny(), prompts(130)
    geometry = hf_models.geometry_of(model.config, model.dtype)
    namespace = impress.namespace_of(model)
    with impress.PrefixStore.open(
        tmp_path, geometry, namespace=namespace, config=CONFIG, mode="rw"
    ) as store:
        with hf.attach(model, store) as engine:
            engine.generate(ids, max_new_tokens=2)
        store.flush()
        with hf.attach(model, store) as engine:
            engine.generate(ids, max_new_tokens=2)
            assert engine.last_request.hit_tokens == 128


def test_a_store_open_for_reading_is_read_and_left_alone(tmp_path):
    model, ids = tiny(), prompts(130)
    with attach(model, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=2)
    geometry = hf_models.geometry_of(model.config, model.dtype)
    namespace = impress.namespace_of(model)
    with (
        impress.PrefixStore.open(tmp_path, geometry, namespace, CONFIG, mode="r") as store,
        hf.attach(model, store) as engine,
    ):
        longer = torch.cat([ids, prompts(100, seed=2)], 1)
        engine.generate(longer, max_new_tokens=2)
        assert engine.last_request.hit_tokens == 128
        engine.flush()


def test_a_request_that_could_not_be_stored_keeps_no_other_from_being_durable(
    tmp_path, monkeypatch
):
    """flush() ended at the first one's MemoryError, as it was: what came after it was not waited
    for, and who expected an ImpressError had none."""
    store_rows, failing = StoreQueue._store_rows, [MemoryError()]

    def store(line, job):
        if failing:
            raise failing.pop()
        store_rows(line, job)

    monkeypatch.setattr(StoreQueue, "_store_rows", store)
    flushed, flush = [], impress.PrefixStore.flush
    monkeypatch.setattr(
        impress.PrefixStore, "flush", lambda *args: flush(*args) or flushed.append(args)
    )
    with attach(tiny(), tmp_path) as engine:
        engine.generate(prompts(200), max_new_tokens=2)
        engine.generate(prompts(200, seed=2), max_new_tokens=2)
        with pytest.raises(StoreFailed, match="not all of a request is stored: not enough memory"):
            engine.flush()
        assert len(flushed) == 1
        first, second = (prompts(200, seed=seed)[0].numpy() for seed in (1, 2))
        assert (engine.store.lookup(first), engine.store.lookup(second)) == (0, 192)
        engine.flush()


def test_a_full_line_skips_and_counts_and_frees_what_it_skips(tmp_path):
    with attach(tiny(), tmp_path) as engine:
        line = StoreQueue(engine.store, limit=1, wait_s=0)
        busy, may_end, freed = threading.Event(), threading.Event(), []

        def hold():
            busy.set()
            assert may_end.wait(60)

        cache = RowsCache(engine.store.geometry, 1, 8, BufferPool(None))
        line.offer(Job(cache, (), hold))
        assert busy.wait(60)
        waiting = Job(cache, (), lambda: freed.append("waiting"))
        skipped = Job(cache, (), lambda: freed.append("skipped"))
        line.offer(waiting)
        line.offer(skipped)
        assert (line.n_skipped, freed) == (1, ["skipped"])
        assert skipped.outcome.refused
        may_end.set()
        line.close()
        assert freed == ["skipped", "waiting"]


@pytest.mark.parametrize("mode", ["exact", "recompute"])
def test_a_request_with_nothing_new_takes_no_new_prompts_place_in_the_line(
    tmp_path, monkeypatch, mode
):
    """What is stored was taken to end where reading had: a prompt that was stored up to its last
    token, or was recomputed, waited in the line with its rows, and new ones were not stored."""
    go, store_rows = threading.Event(), StoreQueue._store_rows
    go.set()

    def waits(line, job):
        assert go.wait(60)
        store_rows(line, job)

    monkeypatch.setattr(StoreQueue, "_store_rows", waits)
    stored, busy, new = (prompts(192, seed=seed) for seed in (1, 2, 3))
    said = []
    with attach(tiny(), tmp_path, mode) as engine:
        engine.generate(stored, max_new_tokens=1)
        engine.flush()
        go.clear()
        try:
            engine.generate(busy, max_new_tokens=1)
            for _ in range(6):
                engine.generate(stored, max_new_tokens=1)
                said.append((engine.last_request.mode, engine.last_request.refused))
            engine.generate(new, max_new_tokens=1)
        finally:
            go.set()
        engine.flush()
        assert said == [(mode, "")] * 6 and engine.n_skipped == 0
        assert (engine.last_request.refused, engine.last_request.stored_tokens) == ("", 192)
        assert engine.store.lookup(new[0].numpy()) == 192


def test_an_engine_tells_of_its_own_rows_that_failed_whoever_flushed_before(tmp_path, caplog):
    """Failures are the store's, and told once: beside another engine, `flush` returned as if all
    had been stored."""
    model = tiny()
    with torch.no_grad():
        model.model.embed_tokens.weight[VOCAB - 1] = float("nan")
    good = prompts(200).clamp(max=VOCAB - 2)
    bad = good.clone()
    bad[0, 100] = VOCAB - 1
    with attach(model, tmp_path) as one, hf.attach(model, one.store) as other:
        other.generate(bad, max_new_tokens=1)
        other._storing.drain()
        one.generate(good, max_new_tokens=1)
        with pytest.raises(StoreFailed, match="NaN"):
            one.flush()
        with pytest.raises(StoreFailed, match="NaN"):
            other.flush()
        for engine in (one, other):
            engine.flush()
        other.generate(bad, max_new_tokens=1)
        with pytest.raises(StoreFailed, match="NaN"):
            other.flush()  # the store's, and not once more
        other.flush()
    assert "flush:" not in caplog.text


def test_what_was_computed_before_a_purge_is_not_stored_after_it(tmp_path, monkeypatch):
    """A store began with its writer, after the answer: what waited in the line, or was still being
    answered, came back behind a purge that had been confirmed, rows of the purged prefix too."""
    go, store_rows = threading.Event(), StoreQueue._store_rows

    def waits(line, job):
        assert go.wait(60)
        store_rows(line, job)

    class Purges(transformers.generation.streamers.BaseStreamer):
        def put(self, value):
            engine.store.purge()

        def end(self):
            pass

    monkeypatch.setattr(StoreQueue, "_store_rows", waits)
    ids = prompts(200)
    with attach(tiny(), tmp_path, "exact") as engine:
        engine.generate(ids, max_new_tokens=1)  # it waits in the line
        engine.store.purge()
        go.set()
        engine.flush()
        assert (engine.last_request.refused, engine.store.lookup(ids[0].numpy())) == ("purged", 0)
        engine.generate(ids, max_new_tokens=1)  # begun after it
        engine.flush()
        assert engine.store.lookup(ids[0].numpy()) == 192
        engine.generate(ids, max_new_tokens=80, streamer=Purges())  # purged while it is answered
        engine.flush()
        assert (engine.last_request.hit_tokens, engine.last_request.refused) == (192, "purged")
        assert engine.store.lookup(ids[0].numpy()) == 0


def test_a_line_that_was_closed_frees_what_it_is_offered_and_begins_no_thread(tmp_path):
    with attach(tiny(), tmp_path) as engine:
        line, freed = StoreQueue(engine.store, limit=1, wait_s=0), []
        line.close()
        cache = RowsCache(engine.store.geometry, 1, 8, BufferPool(None))
        late = Job(cache, (), lambda: freed.append("late"))
        line.offer(late)
        line.drain()
        assert (freed, line.n_skipped) == (["late"], 0)
        assert late.outcome.refused == "the engine is closed"


def test_no_layer_is_begun_to_be_stored_while_a_request_comes_to_its_forward(tmp_path, monkeypatch):
    """Beside two processors that were storing the request before, what comes before a forward took
    twice as long, and a hit's first token came up to a tenth later."""
    may, stands, begun, puts = threading.Event(), threading.Event(), threading.Event(), []
    store_rows, find, put = StoreQueue._store_rows, hf.find_prefix, Writer.put
    embed = torch.nn.Embedding.forward

    def find_once_it_stands(*args):
        if engine.last_request is not None:
            begun.clear()
            may.set()
            assert stands.wait(60)
        return find(*args)

    monkeypatch.setattr(hf_storing, "_STANDS_BACK_S", 600.0)
    monkeypatch.setattr(hf_storing, "sleep", lambda _seconds: stands.set())
    monkeypatch.setattr(StoreQueue, "_store_rows", lambda *args: may.wait() and store_rows(*args))
    monkeypatch.setattr(hf, "find_prefix", find_once_it_stands)
    monkeypatch.setattr(Writer, "put", lambda *args: puts.append(begun.is_set()) or put(*args))
    monkeypatch.setattr(torch.nn.Embedding, "forward", lambda *args: begun.set() or embed(*args))
    with attach(tiny(), tmp_path) as engine:
        engine.generate(prompts(200), max_new_tokens=2)
        engine.generate(prompts(200, seed=2), max_new_tokens=2)
        engine.flush()
    assert puts
    assert all(puts)


def test_storing_does_not_stand_back_for_a_request_that_was_refused(tmp_path, monkeypatch):
    may, store_rows, stood = threading.Event(), StoreQueue._store_rows, []
    monkeypatch.setattr(hf_storing, "_STANDS_BACK_S", 600.0)
    monkeypatch.setattr(hf_storing, "sleep", lambda _seconds: stood.append(1) or 1 / 0)
    monkeypatch.setattr(StoreQueue, "_store_rows", lambda *args: may.wait() and store_rows(*args))
    with attach(tiny(), tmp_path) as engine:
        engine.generate(prompts(200), max_new_tokens=2)
        with pytest.raises(Unsupported, match="num_beams"):
            engine.generate(prompts(200), max_new_tokens=2, num_beams=2)
        may.set()
        engine.flush()
        assert (engine.last_request.stored_tokens, stood) == (192, [])


@pytest.fixture
def made(monkeypatch):
    """Weak references to the requests' caches, as they are made; none keeps a cache alive."""
    caches = []

    def noted(*args, **options):
        cache = RowsCache(*args, **options)
        caches.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(hf, "RowsCache", noted)
    return caches


def test_nothing_of_a_request_is_held_once_it_is_stored(tmp_path, made):
    """The thread held its last job, on a GPU with all its rows, while it waited for the next."""
    with attach(tiny(), tmp_path) as engine:
        engine.generate(prompts(200), max_new_tokens=2)
        engine.flush()
        assert engine.last_request.stored_tokens == 192
        gc.collect()
        assert [cache() for cache in made] == [None]


@pytest.mark.parametrize("n_new", [1, 3])
def test_a_hit_leaves_the_garbage_collector_nothing(tmp_path, made, n_new):
    """Its first layer referred back to its cache and so kept what lies on the device, until the
    collector's next pass over all objects, minutes later."""
    with attach(tiny(), tmp_path) as engine:
        for _ in range(2):  # stored, then hit: anything made only once exists now
            engine.generate(prompts(200), max_new_tokens=1)
            engine.flush()
        gc.collect()
        gc.disable()
        try:
            engine.generate(prompts(200), max_new_tokens=n_new)
            engine.flush()
            wait_for_promotions(engine.store)
            assert engine.last_request.hit_tokens == 192 and made[-1]() is None
        finally:
            gc.enable()


def test_rows_given_back_are_held_by_nobody():
    """Device memory is held by the tensors on it, and a layer kept the last ones it returned."""
    cache = RowsCache(impress.Geometry(1, 1, 1, 8, dtype="float32"), 1, 64, BufferPool(None))
    new = torch.zeros(1, 1, 3, 8)
    returned = [weakref.ref(rows) for rows in cache.update(new, new, 0)]
    cache.release()
    assert [rows() for rows in returned] == [None, None]


def test_rows_beyond_the_room_move_to_more_room():
    geometry = impress.Geometry(1, 2, 2, 8, dtype="float32")
    pool = BufferPool(None)
    cache = RowsCache(geometry, 2, 3, pool)
    rows = torch.arange(2 * 2 * 20 * 8, dtype=torch.float32).reshape(2, 2, 20, 8)
    for first, end in ((0, 2), (2, 3), (3, 9), (9, 20)):
        k, v = cache.update(rows[:, :, first:end], -rows[:, :, first:end], 0)
        assert torch.equal(k, rows[:, :, :end])
        assert torch.equal(v, -rows[:, :, :end])
    assert cache.get_seq_length() == cache.length == 20
    cache.release()
    assert pool.used_bytes == 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_on_their_way_to_a_device_take_no_room_for_an_answer(device):
    """For an answer of 32,768 tokens, a prefix of one window took 4 GB of host memory."""
    pool = BufferPool(None)
    geometry = impress.Geometry(1, 1, 1, 8, dtype="float32")
    cache = RowsCache(geometry, 1, 1 << 16, pool, n_prefix=64, on_host=False)
    assert pool.used_bytes == 2 * PAGE
    for view in cache.layers[0].prefix_views(0):
        view.fill_(1)
    new = torch.zeros(1, 1, 200, 8, device=device)
    k, v = cache.update(new, new, 0)
    assert k.shape == v.shape == (1, 1, 264, 8)
    if device == "cpu":  # in a model whose layers are on several devices
        assert all(bool((rows[:, :, :64] == 1).all()) for rows in (k, v))
    end_reads(None, cache)
    cache.release()
    assert pool.used_bytes == 0


@pytest.mark.parametrize(("on_host", "error"), [(False, PrefixLost), (True, StoreFailed)])
def test_a_prefix_for_which_the_host_has_no_memory_is_computed_on_a_device(on_host, error):
    """The request failed, and was told to ask for fewer new tokens, of which nothing lay there."""

    class Full:
        def acquire(self, n_bytes):
            raise ReadFailed("shortage", f"no memory for {n_bytes} bytes")

    geometry = impress.Geometry(1, 1, 1, 8, dtype="float32")
    with pytest.raises(error, match="no memory for"):
        RowsCache(geometry, 1, 128, Full(), n_prefix=64, on_host=on_host)


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [
        ((1, 2, 3, 8), torch.float16, "computes float16 keys, its store holds float32"),
        ((2, 2, 3, 8), torch.float32, "do not fit"),
        ((1, 1, 3, 8), torch.float32, "do not fit"),
        ((1, 2, 3, 1), torch.float32, "do not fit"),
    ],
)
def test_keys_that_are_not_of_the_stores_kind_are_refused(shape, dtype, said):
    """Copied into the cache's rows, they would be converted, or repeated, without a word."""
    cache = RowsCache(impress.Geometry(1, 2, 2, 8, dtype="float32"), 1, 64, BufferPool(None))
    new = torch.zeros(shape, dtype=dtype)
    with pytest.raises(Unsupported, match=said):
        cache.update(new, new, 0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_a_prefix_was_read_into_is_not_rented_again_before_its_reads_end(device):
    """A prefix is copied from there after the request, when its rows have long moved to more room
    or to another device. When it was rented meanwhile, others overwrote what was being copied."""
    pool = BufferPool(None)
    cache = RowsCache(impress.Geometry(1, 1, 1, 8, dtype="float32"), 1, 64, pool, n_prefix=64)
    views = cache.layers[0].prefix_views(0)
    for view in views:
        view.fill_(1)
    new = torch.zeros(1, 1, 1, 8, device=device)
    cache.update(new, new, 0)
    others = [pool.acquire(PAGE) for _ in views]  # as large as the memory the rows moved out of
    for other in others:
        other.array[:] = 255
    assert all(bool((view == 1).all()) for view in views)
    used_bytes = pool.used_bytes
    end_reads(None, cache)
    assert pool.used_bytes == used_bytes - 2 * PAGE
    cache.release()
    assert pool.used_bytes == 2 * PAGE


# --- what goes wrong ------------------------------------------------------------------------------


def damage(path: Path, row: bytes) -> None:
    """Flip a bit of `row` where it is found in a segment on disk."""
    n_found = 0
    for file in (file for file in path.rglob("*") if file.is_file()):
        data = file.read_bytes()
        at = data.find(row)
        if at >= 0:
            n_found += 1
            with file.open("r+b") as segment:
                segment.seek(at + 1)
                segment.write(bytes([data[at + 1] ^ 1]))
    assert n_found == 1


def last_layer_keys(model, ids, token) -> bytes:
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(ids, **{CACHE: cache})
    return cache.layers[-1].keys[0, :, token].contiguous().numpy().tobytes()


class Heard:
    """A streamer that remembers."""

    def __init__(self):
        self.parts = []
        self.ended = 0

    def put(self, value):
        self.parts.append(value.reshape(-1).tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_a_damaged_prefix_is_computed_again_and_the_answer_is_right(tmp_path, family):
    model, ids = tiny(family), prompts(200)
    bare = model.generate(ids, max_new_tokens=8)
    with attach(model, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        damage(tmp_path, last_layer_keys(model, ids, 70))
        engine.store.drop_caches()
        heard = Heard()
        out = engine.generate(ids, max_new_tokens=8, streamer=heard)
        request = engine.last_request
        assert torch.equal(out, bare)
        assert (request.lost, request.mode, request.hit_tokens) == ("checksum", "recompute", 0)
        # The prompt was run twice and streamed once.
        assert heard.parts == [ids[0].tolist(), *([token] for token in out[0, 200:].tolist())]
        assert heard.ended == 1
        engine.flush()
        again = engine.generate(ids, max_new_tokens=8)
        assert torch.equal(again, bare)
        assert engine.last_request.hit_tokens == 192  # stored again


def test_a_prefix_lost_before_the_prompt_is_streamed_leaves_it_to_be_heard(tmp_path, monkeypatch):
    """The second run withheld the prompt, which the first had not streamed: TextStreamer, told to
    skip the prompt, skipped the first token of the answer."""

    def expired(*_):
        raise PrefixLost("expired", "told to be")

    model, ids = tiny(), prompts(200)
    with attach(model, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        monkeypatch.setattr(StoredPrefix, "open", expired)
        heard = Heard()
        out = engine.generate(ids, max_new_tokens=4, streamer=heard)
        assert engine.last_request.lost == "expired"
    assert heard.parts == [ids[0].tolist(), *([token] for token in out[0, 200:].tolist())]
    assert heard.ended == 1


def test_a_streamer_hears_a_hit_as_it_hears_the_bare_model(tmp_path):
    model, ids = tiny(), prompts(200)
    bare, mine = Heard(), Heard()
    model.generate(ids, max_new_tokens=6, streamer=bare)
    with attach(model, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        engine.generate(ids, max_new_tokens=6, streamer=mine)
        assert engine.last_request.hit_tokens == 192
    assert mine.parts == bare.parts
    assert mine.ended == bare.ended == 1


@pytest.mark.parametrize("batch", [1, 2])
def test_a_prefix_is_let_go_once_it_is_there_and_not_behind_the_last_token(tmp_path, batch):
    """Its lease lasted for the whole answer: during a long one it was taken for a leak and reported
    as one; none of it could be evicted, and no later request used what it had shown."""
    leases, learnt = [], []

    def looking(_ids, scores):  # after each pass
        wait_for_promotions(engine.store)
        leases.append(engine.store.stats()["leases"])
        learnt.append(sum(engine.store.stats()["rows_from"].values()))
        return scores

    model, ids = tiny(), prompts(200, batch=batch)
    bare = model.generate(ids, max_new_tokens=4)
    with attach(model, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        engine.store.drop_caches()
        out = engine.generate(ids, max_new_tokens=4, logits_processor=[looking])
        assert torch.equal(out, bare)
        assert engine.last_request.hit_tokens == 192
    assert leases == [batch, 0, 0, 0]
    assert learnt[0] == 0 < learnt[1]


def test_a_streamer_that_raises_leaves_the_engine_usable(tmp_path):
    class Gone(Heard):
        def put(self, value):
            raise KeyboardInterrupt

    model, ids = tiny(), prompts(200)
    with attach(model, tmp_path) as engine:
        first = engine.generate(ids, max_new_tokens=4)
        engine.flush()
        with pytest.raises(KeyboardInterrupt):
            engine.generate(ids, max_new_tokens=4, streamer=Gone())
        wait_for_promotions(engine.store)
        assert engine.store.buffers.used_bytes == 0
        assert torch.equal(engine.generate(ids, max_new_tokens=4), first)
        assert engine.last_request.hit_tokens == 192


def test_rows_that_are_not_finite_are_never_found_and_raise_at_flush(tmp_path):
    model, ids = tiny("opt"), prompts(130)
    with torch.no_grad():
        model.model.decoder.layers[1].self_attn.k_proj.bias.fill_(float("nan"))
    engine = attach(model, tmp_path)
    engine.generate(ids, max_new_tokens=1)
    with pytest.raises(impress.ImpressError, match="NaN"):
        engine.flush()
    assert engine.store.lookup(ids[0].numpy().astype(np.int32)) == 0
    engine.close()


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (lambda: tiny("gpt2"), "gpt2"),
        (
            lambda: tiny(
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            "dynamic",
        ),
        (
            lambda: tiny(
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 512,
                }
            ),
            "longrope",
        ),
        (
            lambda: tiny("qwen2", layer_types=["full_attention", "chunked_attention"]),
            "chunked_attention",
        ),
        (lambda: tiny(is_causal=False), "is_causal=False"),
        (lambda: tiny().model, "LlamaModel"),
    ],
)
def test_a_model_that_is_not_served_is_refused_by_name(tmp_path, model, named):
    with pytest.raises(Unsupported, match=named):
        attach(model(), tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_model_whose_tokens_come_to_see_those_behind_them_is_refused(tmp_path):
    """The keys of a prompt's beginning then depend on its end: a hit had another prompt's keys."""
    model = tiny()
    with attach(model, tmp_path) as engine:
        model.config.is_causal = False
        with pytest.raises(Unsupported, match="is_causal=False"):
            engine.generate(prompts(10), max_new_tokens=2)


def replaced_functions():
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as attention
    from transformers.models.llama import modeling_llama

    masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    sdpa, mask = attention["sdpa"], masks["sdpa"]
    attend, see = functools.partial(sdpa), functools.partial(mask)
    return {
        "torch": (torch.nn.functional, "scaled_dot_product_attention", attend),
        "sdpa": (attention._local_mapping, "sdpa", attend),
        "all sdpa": (attention._global_mapping, "sdpa", attend),
        "eager": (attention._global_mapping, "eager", attend),
        "a mask": (masks._global_mapping, "sdpa", see),
        "a model's mask": (modeling_llama, "create_causal_mask", see),
        "a model's eager": (modeling_llama, "eager_attention_forward", attend),
    }


@pytest.mark.parametrize("which", replaced_functions())
def test_a_function_that_all_attention_calls_is_not_replaced_unseen(tmp_path, monkeypatch, which):
    """One line can put an 8-bit attention in place of torch's: its rows served the stock model."""
    where, name, other = replaced_functions()[which]

    def replace(patch):
        if not isinstance(where, dict):
            patch.setattr(where, name, other)
        else:
            patch.setitem(where, name, other)

    model = tiny()
    with attach(model, tmp_path / "late") as engine:
        with monkeypatch.context() as patch:
            replace(patch)
            with pytest.raises(Unsupported, match="was replaced, and no key tells what that"):
                engine.generate(prompts(10), max_new_tokens=2)
        engine.generate(prompts(10), max_new_tokens=2)
    replace(monkeypatch)
    with pytest.raises(Unsupported, match="was replaced"):
        attach(model, tmp_path / "store")
    assert not (tmp_path / "store").exists()


_REPLACED_FIRST = """
import sys

from transformers import masking_utils
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as attention

masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
where, name = {
    "mask": (masking_utils, "create_causal_mask"), "sdpa mask": (masking_utils, "sdpa_mask"),
    "sdpa": (sdpa_attention, "sdpa_attention_forward"),
}[sys.argv[1]]
own = getattr(where, name)

def other(*args, **named):
    return own(*args, **named)

setattr(where, name, other)
if sys.argv[1] != "mask":
    (masks if "mask" in name else attention)._global_mapping["sdpa"] = other

import torch, transformers
import impress, impress.engines.hf

tiny = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2,
)
model = transformers.LlamaForCausalLM(tiny).eval()
try:
    impress.engines.hf.attach(model, sys.argv[2]).close()
except impress.Unsupported as err:
    print(err)
"""


@pytest.mark.parametrize("which", ["mask", "sdpa mask", "sdpa"])
def test_a_function_that_was_replaced_before_impress_was_imported_is_noticed(tmp_path, which):
    """What was there at the import passed for Transformers': by a line at a script's top all tokens
    of a prompt saw each other, and the stock model was served such rows."""
    command = [sys.executable, "-c", _REPLACED_FIRST, which, str(tmp_path / "store")]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "was replaced, and no key tells what that computes" in said
    assert not (tmp_path / "store").exists()


def test_a_model_that_another_thread_made_see_what_follows_stores_nothing(tmp_path):
    """Continuous batching does so for each of its steps, through the config that all share: rows
    of such a request were stored under the model's own name."""
    model, ids = tiny(), prompts(200)

    class Meanwhile(transformers.LogitsProcessor):
        def __call__(self, _ids, scores):
            model.config.is_causal = False
            return scores

    with attach(model, tmp_path) as engine:
        with pytest.raises(Unsupported, match="is_causal=False"):
            engine.generate(ids, max_new_tokens=2, logits_processor=[Meanwhile()])
        engine.flush()
        assert engine.store.lookup(ids[0].numpy()) == 0


def test_criteria_given_one_by_one_are_kept_to(tmp_path):
    """They were looked at before their time, and then there were none left: the answer went on."""

    class Stop(transformers.StoppingCriteria):
        def __call__(self, ids, _scores, **_named):
            return torch.full((len(ids),), ids.shape[1] >= 203)

    with attach(tiny(), tmp_path) as engine:
        for criteria in ([Stop()], iter([Stop()])):
            out = engine.generate(prompts(200), max_new_tokens=30, stopping_criteria=criteria)
            assert out.shape[1] == 203


@pytest.mark.parametrize("module", ["FourOverSixLinear", "NVFP4Linear"])
def test_quantizers_that_the_config_does_not_tell_of_are_refused(tmp_path, module):
    """Put in place by their library's own function, they leave no word in the config; a pass's
    largest value scales all of it."""
    model = tiny()
    of_another_class(model, module)
    with pytest.raises(Unsupported, match=f"is a {module}: keys depend on what follows"):
        attach(model, tmp_path / "store")


@pytest.mark.parametrize("where", ["its only one", "one of two"])
def test_a_rotation_by_the_prompts_length_is_refused_whatever_the_config_says(tmp_path, where):
    model = tiny()
    rotary = model.model.rotary_emb
    if where == "one of two":
        rotary = model.model.layers[1].self_attn.rotary_emb = copy.deepcopy(rotary)
    rotary.rope_type = "dynamic"
    with pytest.raises(Unsupported, match="RoPE type 'dynamic', which rotates keys by the prompt"):
        attach(model, tmp_path / "store")


def of_dtype(*dtypes):
    """What a walk finds in a model with a matrix of each dtype."""
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False, dtype=one) for one in dtypes])
    return hf_models.modules_of(model)


def test_float32_matrices_in_a_model_of_16_bits_are_not_to_be_rounded_either(monkeypatch):
    """The first parameter's dtype spoke for all: PEFT keeps an adapter's in 32 bits, and
    bitsandbytes may compute in them."""
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    monkeypatch.setattr(hf_models, "_ANGLES_BY_PRODUCT", False)
    hf_models.check_rounding(of_dtype(torch.bfloat16), "cpu")
    computed = of_dtype(torch.bfloat16)
    computed.modules[-1].compute_dtype = torch.float32
    for found in (of_dtype(torch.bfloat16, torch.float32), computed):
        with pytest.raises(Unsupported, match="oneDNN may round float32"):
            hf_models.check_rounding(found, "cpu")


def test_float16_that_is_added_up_in_float16_is_refused(monkeypatch):
    hf_models.check_rounding(of_dtype(torch.float16), "cuda")
    monkeypatch.setattr(
        torch.backends.cuda, "matmul", SimpleNamespace(allow_fp16_accumulation=True)
    )
    hf_models.check_rounding(of_dtype(torch.float16), "cpu")
    hf_models.check_rounding(of_dtype(torch.bfloat16), "cuda")
    with pytest.raises(Unsupported, match="allow_fp16_accumulation = False"):
        hf_models.check_rounding(of_dtype(torch.float16), "cuda")


@pytest.mark.parametrize("name", ["ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"])
def test_float32_that_onednn_rounds_is_refused(monkeypatch, name):
    """torch's own setting still says "highest" then."""
    for fine in ("STRICT", ""):
        monkeypatch.setenv(name, fine)
        hf_models.check_rounding(of_dtype(torch.float32), "cpu")
    monkeypatch.setenv(name, "BF16")
    with pytest.raises(Unsupported, match=r"is bf16: oneDNN .* unset it"):
        hf_models.check_rounding(of_dtype(torch.float32), "cpu")
    hf_models.check_rounding(of_dtype(torch.float32), "cuda")


@pytest.mark.parametrize(
    ("family", "path"),
    [("llama", "model.layers.1.self_attn"), ("opt", "model.decoder.layers.1.self_attn")],
)
def test_an_attention_that_sees_what_follows_is_refused_whenever_it_comes(tmp_path, family, path):
    """Only the config was checked, but torch's sdpa follows the module where there is no mask: a
    hit had keys computed with another prompt's end."""
    model, ids = tiny(family), prompts(200)
    said = rf"^{re.escape(path)} has is_causal=False: keys depend on what follows them$"
    with attach(model, tmp_path / "late") as engine:
        model.get_submodule(path).is_causal = False
        with pytest.raises(Unsupported, match=said):
            engine.generate(ids, max_new_tokens=2)
        assert engine.last_request is None
    with pytest.raises(Unsupported, match=said):
        attach(model, tmp_path / "store")
    assert not (tmp_path / "store").exists()
    model.get_submodule(path).is_causal = True
    attach(model, tmp_path / "store").close()


def in_a_dict(**settings):
    return {"quant_method": "bitsandbytes", "load_in_8bit": True, **settings}


def in_an_object(**settings):
    return transformers.BitsAndBytesConfig(load_in_8bit=True, **settings)


@pytest.mark.parametrize("as_loaded", [False, True], ids=["in a dict", "as it is loaded"])
@pytest.mark.parametrize(
    ("method", "kind", "said"),
    [("fouroversix", "FourOverSixConfig", "Four Over Six"), ("nvfp4", "NVFP4Config", "NVFP4")],
)
def test_a_quantization_that_scales_by_all_of_a_pass_is_refused(
    tmp_path, method, kind, said, as_loaded
):
    model = tiny()
    given = {"quant_method": method}
    if as_loaded:
        given = getattr(transformers, kind, dict)(**({} if hasattr(transformers, kind) else given))
    model.config.quantization_config = given
    with pytest.raises(Unsupported, match=f"{said} is not supported"):
        attach(model, tmp_path / "store")


def of_another_class(model, name):
    """As torchao's convert_to_float8_training does with a Linear: the parameters stay the same."""
    kind = type(name, (torch.nn.Linear,), {"__module__": "else.where"})
    model.model.layers[0].self_attn.k_proj.__class__ = kind


def test_a_module_of_another_class_is_another_model(tmp_path):
    """Even over the same tensors: one model was given the rows of the other."""
    model, ids = tiny(), prompts(200)
    with attach(model, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        of_another_class(model, "Other")
        with pytest.raises(StoreMismatch, match="changed since attach"):
            engine.generate(ids, max_new_tokens=1)
    with attach(model, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=1)
        assert engine.last_request.hit_tokens == 0


class Steered(torch.nn.Module):
    """Wraps a layer, as activation steering does, and registers no tensor of its own."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args, **named):
        return self.block(*args, **named) + 0.5


def steer(model):
    model.model.layers[1] = Steered(model.model.layers[1]).eval()


def another_activation(model):
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh().eval()


def fewer_layers(model):
    model.config.num_hidden_layers = 1


@pytest.mark.parametrize("change", [steer, another_activation, fewer_layers])
def test_what_computes_otherwise_over_the_same_tensors_is_noticed(tmp_path, change):
    """Earlier rows answered it, and its own were stored under the stock model's name; with fewer
    layers, a hit that returns its cache ended in an AttributeError."""
    model, ids = tiny(), prompts(200)
    with attach(model, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        change(model)
        for tokens in (ids, prompts(210, seed=5)):
            with pytest.raises(StoreMismatch, match="changed since attach"):
                engine.generate(tokens, max_new_tokens=1, return_dict_in_generate=True)
        engine.flush()
        assert engine.store.stats()["spans"] == 1


def assert_notices(model, path, change, said):
    """After a change a model gets no hit, and stores nothing."""
    ids = prompts(200)
    with attach(model, path) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        engine.generate(ids, max_new_tokens=1)
        assert engine.last_request.hit_tokens == 192
        change()
        for tokens in (ids, prompts(210, seed=5)):
            with pytest.raises(StoreMismatch, match=said):
                engine.generate(tokens, max_new_tokens=1)
        engine.flush()
        assert engine.store.stats()["spans"] == 1


@dataclass
class Control:
    vector: torch.Tensor | None = None
    coefficient: float = 1.0


class Switches:
    """A class that is kept as it is, for what all share."""

    louder = 0.0


class Controlled(Steered):
    """Steers by a plain attribute, which is set anew at will."""

    more = 0.0

    def __init__(self, block, config):
        super().__init__(block)
        self.control = Control()
        self.switches = Switches
        self.config = config

    def forward(self, *args, **named):
        said = self.control
        more = 0.0 if said.vector is None else said.coefficient * said.vector
        more = more + self.more + self.switches.louder + getattr(self.config, "steer", 0.0)
        return self.block(*args, **named) + more


@pytest.mark.parametrize("change", [
    lambda module: setattr(module, "control", Control(torch.full((64,), 0.5))),
    lambda module: setattr(module.control, "coefficient", 2.0),
    lambda module: module.control.vector.add_(1.0),
    lambda module: setattr(module, "control", Control()),
])  # fmt: skip
def test_what_a_foreign_module_keeps_in_plain_attributes_is_another_model(tmp_path, change):
    """Only its class was looked at: rows computed under one steering vector answered under another,
    in the same engine and in any that came later."""

    def steered():
        model = tiny()
        model.model.layers[0] = Controlled(model.model.layers[0], model.config).eval()
        model.model.layers[0].control.vector = torch.arange(64) / 64
        return model

    ids, model = prompts(200), steered()
    said = r"layers\.0 .*Controlled.* keeps .* changed"
    assert_notices(model, tmp_path, lambda: change(model.model.layers[0]), said)
    for again, hit in ((model, 0), (steered(), 192)):
        with attach(again, tmp_path) as engine:
            engine.generate(ids, max_new_tokens=1)
            assert engine.last_request.hit_tokens == hit


def test_what_of_the_config_changes_no_key_is_no_other_model_beside_a_foreign_module(tmp_path):
    """Asking for attention weights counted as another model: Transformers keeps that, and the
    kernel of experts, under names of their own."""
    ids, model = prompts(200), tiny(attention="eager")
    model.model.layers[0] = Controlled(model.model.layers[0], model.config).eval()
    with attach(model, tmp_path) as engine:
        first = engine.generate(ids, max_new_tokens=2)
        engine.flush()
        before = impress.namespace_of(model)
        model.config.output_attentions = True
        model.config._experts_implementation = "batched_mm"
        assert impress.namespace_of(model) == before
        assert torch.equal(engine.generate(ids, max_new_tokens=2), first)
        assert engine.last_request.hit_tokens == 192


class Tuned(Control):
    """Of its base's name, as where a library's class is made one's own."""

    coefficient = 1.5


Tuned.__qualname__ = Control.__qualname__


@pytest.mark.parametrize("where", [Controlled, Switches, Control, Tuned, "config"])
def test_what_a_foreign_module_finds_in_a_class_or_the_config_is_another_model(
    tmp_path, monkeypatch, where
):
    """Only what its own `__dict__` had was looked at: rows of one setting answered under another,
    and of a class's in any process that came later."""
    name = {Controlled: "more", Switches: "louder", "config": "steer"}.get(where, "coefficient")

    def steered():
        torch.manual_seed(0)
        model = tiny()
        layers = model.model.layers
        layers[0] = Controlled(layers[0], model.config).eval()
        layers[0].control = Tuned() if where is Tuned else Control()
        layers[0].control.vector = torch.full((64,), 0.5)
        del layers[0].control.__dict__["coefficient"]  # its class's counts
        model.config.steer = 0.0
        return model

    ids, model = prompts(200), steered()
    owner = model.config if where == "config" else where
    change = functools.partial(monkeypatch.setattr, owner, name, 2.5)
    assert_notices(model, tmp_path, change, "changed since attach")
    with attach(model, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=1)
        assert engine.last_request.hit_tokens == 0


_OWN_MODEL = """
import sys, enum
import torch, transformers
import impress, impress.engines.hf

class Mode(enum.Flag):
    KEYS = enum.auto()
    VALUES = enum.auto()

class Mine(transformers.LlamaForCausalLM):
    modes = Mode

    def forward(self, *args, **named):
        assert self.modes.KEYS | self.modes.VALUES  # Python keeps what it is combined to
        return super().forward(*args, **named)

config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2,
)
torch.manual_seed(0)
model, ids = Mine(config).eval(), torch.arange(200)[None] % 64
with impress.engines.hf.attach(model, sys.argv[1], impress.Quality()) as engine:
    for _ in range(2):
        engine.generate(ids, max_new_tokens=2)
        engine.flush()
        print(engine.last_request.hit_tokens)
"""


def test_a_users_own_class_of_a_model_is_one_model_in_every_process(tmp_path):
    """Transformers notes in the class what it was asked, when rows are first watched: the first
    request that chose rows was refused, and the next process had another key."""
    command = [sys.executable, "-c", _OWN_MODEL, str(tmp_path)]
    for hits in (["0", "192"], ["192", "192"]):
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        assert run.stdout.split() == hits


@dataclass
class SeesAll:
    """A mask function without a hash."""

    def __call__(self, *args, **named):
        raise AssertionError("not to be asked")


def test_a_mask_function_that_cannot_be_hashed_is_refused_in_one_line(tmp_path, monkeypatch):
    from transformers import masking_utils

    masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    monkeypatch.setitem(masks._global_mapping, "sdpa", SeesAll())
    with pytest.raises(Unsupported, match="mask function sdpa was replaced"):
        attach(tiny(), tmp_path / "store")


class OwnBase(transformers.LlamaModel):
    """A user's own class of a model."""


def test_a_users_own_base_model_is_served_whatever_transformers_sets_in_it(tmp_path):
    """Transformers puts its hooks there when hidden states are first asked for, and says so in an
    attribute: from then on every request was refused."""
    model, ids = tiny(), prompts(200)
    model.model.__class__ = OwnBase
    with attach(model, tmp_path) as engine:
        for asked in ({}, {"output_hidden_states": True, "return_dict_in_generate": True}, {}):
            engine.generate(ids, max_new_tokens=1, **asked)
            engine.flush()
        assert engine.last_request.hit_tokens == 192


def test_a_linear_that_scales_by_all_of_a_pass_is_refused(tmp_path):
    model = tiny()
    of_another_class(model, "Float8Linear")
    with pytest.raises(Unsupported, match=r"k_proj is a Float8Linear"):
        attach(model, tmp_path / "store")


@pytest.mark.parametrize("given", [in_a_dict, in_an_object])
def test_int8_that_looks_for_outliers_in_all_rows_is_refused(tmp_path, given):
    """All rows of a pass, even those after a token, decide which columns it computes in float: a
    hit had keys computed with another prompt's end."""
    model = tiny()
    for settings, threshold in (({}, 6.0), ({"llm_int8_threshold": 4.5}, 4.5)):
        model.config.quantization_config = given(**settings)
        said = rf"^llm_int8_threshold={threshold} .*: load .*=0\.0 "
        with pytest.raises(Unsupported, match=said):
            attach(model, tmp_path / "store")
    assert not (tmp_path / "store").exists()
    model.config.quantization_config = given(llm_int8_threshold=0.0)
    attach(model, tmp_path / "store").close()
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    attach(model, tmp_path / "other").close()


class Linear8bitLt(torch.nn.Linear):
    """The module that bitsandbytes puts in a layer's place, as far as the engine looks at it."""

    def __init__(self, layer, threshold):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.load_state_dict(layer.state_dict())
        self.state = SimpleNamespace(threshold=threshold)


class Linear4bit(torch.nn.Linear):
    """The module that bitsandbytes puts in a layer's place: where a CPU has AVX512_BF16, a forward
    packs its weights, and state_dict() unpacks them."""

    is_packed = False

    def forward(self, x):
        if self.support_avx512bf16_for_cpu and not self.is_packed:
            self.weight.data, self.is_packed = self.weight.data.clone(), True
        return super().forward(x)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        if self.is_packed:
            self.weight.data, self.is_packed = self.weight.data.clone(), False
        super()._save_to_state_dict(destination, prefix, keep_vars)


def test_four_bits_that_each_forward_packs_anew_are_refused_before_they_are_unpacked(tmp_path):
    """The namespace unpacked the caller's model; each request was answered in full, and then ended
    in StoreMismatch, as the forward had packed it again, however often it was attached."""
    model, ids = tiny(), prompts(200)
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    layer = model.model.layers[1].self_attn.k_proj
    layer.__class__, layer.support_avx512bf16_for_cpu = Linear4bit, True
    model(ids)
    for look in (impress.namespace_of, lambda model: attach(model, tmp_path / "store")):
        with pytest.raises(
            Unsupported, match=r"model\.layers\.1\.self_attn\.k_proj is in .* 4 bit"
        ):
            look(model)
    assert layer.is_packed
    assert not (tmp_path / "store").exists()
    layer.support_avx512bf16_for_cpu = False  # as the error says, and as on any other CPU
    with attach(model, tmp_path / "store") as engine:
        for hit in (0, 192):
            engine.generate(ids, max_new_tokens=2)
            assert engine.last_request.hit_tokens == hit
            engine.flush()


def test_int8_goes_by_the_threshold_that_a_module_was_loaded_with(tmp_path):
    """The config was believed. Set there after loading, as our own error advised, the threshold
    changes no module: a hit had keys computed with another prompt's end, and such were stored."""
    model, ids = tiny(), prompts(200)
    model.config.quantization_config = in_a_dict(llm_int8_threshold=0.0)
    attention = model.model.layers[1].self_attn
    attention.k_proj = Linear8bitLt(attention.k_proj, threshold=6.0).eval()
    said = r"^model\.layers\.1\.self_attn\.k_proj has llm_int8_threshold=6\.0: .*: load .*=0\.0 "

    def late(_ids, scores):
        attention.k_proj.state.threshold = 6.0
        return scores

    with pytest.raises(Unsupported, match=said):
        attach(model, tmp_path / "store")
    assert not (tmp_path / "store").exists()
    attention.k_proj.state.threshold = 0.0
    with attach(model, tmp_path / "store") as engine:
        for options in ({"logits_processor": [late]}, {}):  # within a request, and before one
            with pytest.raises(Unsupported, match=said):
                engine.generate(ids, max_new_tokens=2, **options)
        attention.k_proj.state.threshold = 0.0
        engine.generate(ids, max_new_tokens=2)
        assert engine.last_request.hit_tokens == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"),
        ({"use_cache": False}, "use_cache"),
        ({"cache_implementation": "static"}, "static"),
        ({"cache_implementation": "quantized"}, "quantized"),
        ({"generation_config": transformers.GenerationConfig(num_beams=3)}, "num_beams"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
        ({"guidance_scale": 0}, "guidance_scale=0"),
        ({"negative_prompt_ids": torch.zeros(1, 4, dtype=torch.long)}, "negative_prompt_ids"),
        ({"negative_prompt_attention_mask": torch.zeros(1, 4)}, "negative_prompt_attention_mask"),
        *(({name: transformers.DynamicCache()}, name) for name in CACHES),
        ({"inputs_embeds": torch.zeros(1, 10, 64)}, "inputs_embeds"),
        ({"position_ids": torch.arange(10)[None]}, "position_ids"),
        ({"assistant_model": object()}, "assistant_model"),
        ({"attention_mask": torch.tensor([[0] + [1] * 9])}, "padded"),
        ({"custom_generate": "somewhere/else"}, "custom_generate"),
        ({"token_healing": True}, "token_healing"),
        ({"adapter_names": ["a"]}, "adapter_names"),
        ({"is_causal": False}, "is_causal"),
    ],
)
def test_a_request_that_is_not_served_is_refused_by_name(tmp_path, options, named):
    with attach(tiny(), tmp_path) as engine:
        with pytest.raises(Unsupported, match=named):
            engine.generate(prompts(10), max_new_tokens=2, **options)
        assert engine.last_request is None


@pytest.mark.parametrize("keep", [torch.tensor([0]), torch.tensor(0), [0], np.array([0])], ids=repr)
def test_logits_of_named_positions_are_refused(tmp_path, keep):
    """They count from the beginning of a pass, and a hit's pass begins after the stored tokens: it
    gave another token than a miss."""
    model, ids = tiny(), prompts(200)
    want = model.generate(ids, max_new_tokens=4)
    with attach(model, tmp_path) as engine:
        with pytest.raises(Unsupported, match=r"^logits_to_keep as \w+ is not supported, only an"):
            engine.generate(ids, max_new_tokens=4, logits_to_keep=keep)
        for hit in (0, 192):
            assert torch.equal(engine.generate(ids, max_new_tokens=4, logits_to_keep=3), want)
            assert engine.last_request.hit_tokens == hit
            engine.flush()


@pytest.mark.parametrize("name", [*hf_models._REFUSED, "cache_implementation", "attention_mask"])
def test_what_is_refused_may_be_none(tmp_path, name):
    """Callers that pass all arguments on give None; past_key_values=None then came twice."""
    model = tiny()
    want = model.generate(prompts(10), max_new_tokens=2)
    with attach(model, tmp_path) as engine:
        assert torch.equal(engine.generate(prompts(10), max_new_tokens=2, **{name: None}), want)


@pytest.mark.parametrize("n_new", [1 << 40, sys.maxsize])
def test_rows_that_no_memory_holds_are_refused_in_a_line(tmp_path, n_new):
    """The pool's error, one of the media's own, came through to the caller; so did the one that
    Python raises for more bytes than can be addressed."""
    with attach(tiny(), tmp_path) as engine:
        with pytest.raises(StoreFailed, match="max_new_tokens"):
            engine.generate(prompts(10), max_new_tokens=n_new)
        assert engine.store.stats()["leases"] == 0
        engine.generate(prompts(10), max_new_tokens=2)


def test_pad_tokens_without_a_mask_are_refused_as_padding(tmp_path):
    """generate() itself masks them then; the engine computed with them, without a word."""
    model, ids = tiny(), prompts(10).clone()
    ids[0, :2] = 3
    ones = torch.ones_like(ids)
    with attach(model, tmp_path) as engine:
        for pad in (3, torch.tensor(3)):
            with pytest.raises(Unsupported, match="padded prompts: token 3 pads"):
                engine.generate(ids, max_new_tokens=2, pad_token_id=pad)
        model.generation_config.pad_token_id = 3
        with pytest.raises(Unsupported, match="padded prompts: token 3 pads"):
            engine.generate(ids, max_new_tokens=2)
        assert engine.last_request is None
        # Served, as by generate(), where a mask says they are meant or where they end answers too.
        for options in ({"attention_mask": ones}, {"eos_token_id": [7, 3]}):
            want = model.generate(ids, max_new_tokens=2, **options)
            assert torch.equal(engine.generate(ids, max_new_tokens=2, **options), want)


def test_an_end_token_of_none_takes_the_models_own_away(tmp_path):
    """generate() then masks the pad tokens that would have ended answers; the engine saw them."""
    model, ids = tiny(), prompts(10).clone()
    ids[0, :2] = 3
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = 3
    want = model.generate(ids, max_new_tokens=2, pad_token_id=None)
    with attach(model, tmp_path) as engine:
        with pytest.raises(Unsupported, match="padded prompts: token 3 pads"):
            engine.generate(ids, max_new_tokens=2, eos_token_id=None)
        assert torch.equal(engine.generate(ids, max_new_tokens=2, pad_token_id=None), want)


def test_what_the_readme_says_is_not_served_is_refused_by_name(tmp_path):
    page = (Path(__file__).parent.parent / "README.md").read_text()
    limits = page.partition("Limits of this engine")[2].partition("A call that names no length")[0]
    names = set(re.findall(r"`(\w+)`", limits.partition("- Prompts:")[2])) - {"attention_mask"}
    assert len(names) >= 10
    with attach(tiny(), tmp_path) as engine:
        for name in names:
            with pytest.raises(Unsupported, match=name):
                engine.generate(prompts(10), max_new_tokens=2, **{name: 2})


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        (torch.zeros(1, 0, dtype=torch.long), "empty"),
        (torch.zeros(5, dtype=torch.long), "batch"),
        (torch.tensor([[0, VOCAB]]), str(VOCAB)),
        (torch.tensor([[-1, 0]]), "-1"),
        (torch.zeros(1, 5), "float32"),
        ([[1, 2, 3]], "list"),
    ],
)
def test_tokens_that_are_no_prompt_are_bad_input(tmp_path, ids, named):
    with attach(tiny(), tmp_path) as engine, pytest.raises(BadInput, match=named):
        engine.generate(ids, max_new_tokens=2)


@pytest.mark.parametrize(
    ("mode", "policy"), [("exact", impress.Exact()), ("sparse", impress.Paper())]
)
def test_what_outgrows_learned_positions_is_one_line(tmp_path, mode, policy):
    """It was torch's bare IndexError, with or without a hit. Stock Transformers answers as far as
    the positions go, and RoPE has no last position."""
    model, ids = tiny("opt", max_position_embeddings=200), prompts(201)
    with attach(model, tmp_path, policy=policy) as engine:
        for _ in range(2):
            for n_tokens, n_new in ((200, 1), (197, 4)):
                out = engine.generate(ids[:, :n_tokens], max_new_tokens=n_new)
                assert out.shape[1] == 201
            for n_tokens, said in ((201, "^201 tokens are more than"), (197, "^the answer goes")):
                with pytest.raises(BadInput, match=f"{said} .*the model's 200 positions: pass"):
                    engine.generate(ids[:, :n_tokens], max_new_tokens=5)
            engine.flush()
        assert (engine.last_request.mode, engine.last_request.hit_tokens) == (mode, 192)
        assert engine.store.stats()["leases"] == engine.store.buffers.used_bytes == 0
        ends = int(out[0, 198])
        ended = engine.generate(ids[:, :197], max_new_tokens=9, **ending(ids[:, :197], ends))
        assert ended.shape[1] <= 199
    with attach(tiny(max_position_embeddings=200), tmp_path / "rope") as engine:
        assert engine.generate(ids, max_new_tokens=5).shape[1] == 206


def test_the_prompt_goes_by_either_of_its_names(tmp_path):
    """Transformers' own name for it is `inputs`, which was a TypeError: input_ids was missing."""
    model, ids = tiny(), prompts(10)
    want = model.generate(inputs=ids, max_new_tokens=2)
    with attach(model, tmp_path) as engine:
        assert torch.equal(engine.generate(inputs=ids, max_new_tokens=2), want)
        assert torch.equal(engine.generate(input_ids=ids, max_new_tokens=2), want)
        assert torch.equal(engine.generate(ids, max_new_tokens=2, inputs=None), want)
        with pytest.raises(BadInput, match="inputs and input_ids are one argument: pass one"):
            engine.generate(ids, max_new_tokens=2, inputs=ids)
        with pytest.raises(BadInput, match=r"input_ids must be a tensor .* got NoneType"):
            engine.generate(max_new_tokens=2)


@pytest.mark.parametrize("name", ["dynamic", "hybrid"])
def test_the_cache_that_is_served_may_be_named_wherever_settings_are(tmp_path, name):
    """Only the keyword worked: from a config, Transformers refused it next to a cache."""
    model, ids = tiny(), prompts(10)
    want = model.generate(ids, max_new_tokens=2)
    given = transformers.GenerationConfig(max_new_tokens=2)
    given.cache_implementation = name
    with attach(model, tmp_path) as engine:
        found = [
            engine.generate(ids, max_new_tokens=2, cache_implementation=name),
            engine.generate(ids, generation_config=given),
        ]
        model.generation_config.cache_implementation = name
        found.append(engine.generate(ids, max_new_tokens=2))
    assert all(torch.equal(each, want) for each in found)
    assert given.cache_implementation == model.generation_config.cache_implementation == name


@pytest.mark.parametrize("n_new", [np.int64(3), torch.tensor(3)], ids=["numpy", "torch"])
def test_whole_numbers_of_other_libraries_count_new_tokens(tmp_path, n_new):
    model, ids = tiny(), prompts(10)
    with attach(model, tmp_path) as engine:
        found = [engine.generate(ids, n_new), engine.generate(ids, max_length=10 + n_new)]
    want = model.generate(ids, max_new_tokens=3)
    assert all(torch.equal(each, want) for each in found)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_new_tokens": 0}, "at least one new token must be asked for, got 0"),
        ({"max_new_tokens": 5.0}, "max_new_tokens must be a whole number, got 5.0"),
        ({"max_length": "20"}, "max_length must be a whole number, got '20'"),
        ({"max_length": 10}, "at least one new token must be asked for, got 0"),
        ({"attention_mask": [[1] * 10]}, r"attention_mask must be a tensor \(1, 10\), got list"),
        ({"attention_mask": torch.ones(1, 9)}, r"a tensor \(1, 10\), got \(1, 9\)"),
    ],
)
def test_arguments_of_a_wrong_kind_are_bad_input_and_say_what_was_wanted(tmp_path, options, named):
    with attach(tiny(), tmp_path) as engine, pytest.raises(BadInput, match=named):
        engine.generate(prompts(10), **options)


def test_a_length_among_the_callers_criteria_counts_as_transformers_has_it(tmp_path):
    """It takes precedence over max_new_tokens: an answer outgrew the window, which had been
    compared with the smaller of the two, and rows beyond it were attended to."""
    criteria = [transformers.MaxLengthCriteria(max_length=300)]
    with hf.attach(tiny("mistral", sliding_window=128), tmp_path / "a", config=CONFIG) as engine:
        with pytest.raises(Unsupported, match="sliding window of 128 tokens"):
            engine.generate(prompts(100), max_new_tokens=8, stopping_criteria=criteria)
    model = tiny()
    with hf.attach(model, tmp_path / "b", config=CONFIG) as engine:
        options = {"max_new_tokens": 8, "do_sample": False, "stopping_criteria": criteria}
        for _ in range(2):
            answer = engine.generate(prompts(100), **options)
            assert answer.shape[1] == 300
            assert torch.equal(answer, model.generate(prompts(100), **options))
            engine.flush()


def test_a_prefix_of_another_store_that_is_lost_in_an_answer_is_the_callers_affair(tmp_path):
    """It was taken for this store's, and the answer was begun again: tokens were streamed twice,
    and the rows of the second answer were stored under tokens of the first."""
    ids, heard = prompts(100), []

    class Lost:
        n = 0

        def __call__(self, so_far, scores):
            self.n += 1
            if self.n == 20:
                raise PrefixLost("late", "of another store, the caller's")
            return scores

    streamer = SimpleNamespace(put=lambda part: heard.extend(part.reshape(-1)), end=lambda: None)
    with hf.attach(tiny(), tmp_path / "s", config=CONFIG) as engine:
        with pytest.raises(PrefixLost, match="the caller's"):
            engine.generate(ids, max_new_tokens=60, logits_processor=[Lost()], streamer=streamer)
        engine.flush()
        assert len(heard) == 100 + 19 and engine.store.stats()["tokens"] == 0
        assert engine.store.stats()["leases"] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "mistral", "sliding_window": 100},
        {
            "family": "mistral",
            "sliding_window": 100,
            "layer_types": ["full_attention", "full_attention"],
        },
        {
            "family": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 100,
            "max_window_layers": 1,
        },
    ],
)
def test_a_sliding_window_is_refused_where_prompt_and_answer_outgrow_it(tmp_path, changes):
    """Mistral's mask follows the window alone: a config that called all layers full was let
    through, and sparse requests then saw past the window."""
    model = tiny(**changes)
    with attach(model, tmp_path) as engine:
        fits = prompts(90)
        out = engine.generate(fits, max_new_tokens=10)
        assert torch.equal(out, model.generate(fits, max_new_tokens=10))
        with pytest.raises(Unsupported, match="sliding window of 100"):
            engine.generate(fits, max_new_tokens=11)


def test_the_models_own_max_new_tokens_goes_before_a_calls_max_length(tmp_path):
    """In generate() it does. The window was compared with max_length, and a sparse answer then went
    beyond it without a word, with other tokens than the model's."""
    model = tiny("mistral", sliding_window=100)
    model.generation_config.max_new_tokens = 20
    with attach(model, tmp_path) as engine:
        with pytest.raises(Unsupported, match=r"sliding window of 100 .*\(110\)"):
            engine.generate(prompts(90), max_length=95)
        for length in (65, 20):
            want = model.generate(prompts(60), max_length=length)
            assert want.shape[1] == 80
            assert torch.equal(engine.generate(prompts(60), max_length=length), want)


@pytest.mark.parametrize(
    ("policy", "got"),
    [
        ("quality", "str"),
        (impress.Quality, "the class Quality"),
        (impress.Config(), "Config: pass it as config="),
    ],
)
def test_what_is_no_policy_is_told_what_one_is(tmp_path, policy, got):
    """It said "policy str is not supported by this engine"; for a class, "policy type is not"."""
    model, said = tiny(), re.escape(f"policy: want a policy such as impress.Quality(), got {got}")
    with pytest.raises(BadInput, match=f"^{said}$"):
        hf.attach(model, tmp_path, policy)
    with attach(model, tmp_path) as engine, pytest.raises(BadInput, match=f"^{said}$"):
        engine.generate(prompts(10), policy=policy)


def test_a_policy_that_nothing_serves_is_refused_by_name(tmp_path):
    with pytest.raises(Unsupported, match="policy SimpleNamespace is not supported"):
        attach(
            tiny(),
            tmp_path,
            policy=SimpleNamespace(name="mine", probe=None, needs_suffix_lse=False),
        )


def test_training_mode_autocast_and_other_attention_are_refused(tmp_path):
    model, ids = tiny(), prompts(10)
    with attach(model, tmp_path) as engine:
        model.train()
        with pytest.raises(Unsupported, match="training"):
            engine.generate(ids)
        model.eval()
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(Unsupported, match="autocast"):
            engine.generate(ids)
        model.set_attn_implementation("flex_attention")
        with pytest.raises(Unsupported, match="flex_attention"):
            engine.generate(ids)


def in_a_word(*_monkeypatch):
    torch.set_float32_matmul_precision("medium")


def of_one_backend():
    """torch then has no word for the precision, and raises when it is asked for one."""
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


def by_the_environment(monkeypatch):
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")


@pytest.mark.parametrize("lower", [in_a_word, of_one_backend])
def test_a_float32_model_whose_products_torch_may_round_is_refused(tmp_path, monkeypatch, lower):
    """Rows stored at one precision were a hit at the other: keys with other bits."""
    monkeypatch.setattr(hf_models, "_ANGLES_BY_PRODUCT", False)
    model, half, ids = tiny(), tiny(dtype=torch.bfloat16), prompts(10)
    said = r"set_float32_matmul_precision\('highest'\)$"
    with attach(model, tmp_path / "whole") as engine, attach(half, tmp_path / "half") as other:
        try:
            lower()
            with pytest.raises(Unsupported, match=said):
                engine.generate(ids, max_new_tokens=2)
            other.generate(ids, max_new_tokens=2)
        finally:
            torch.set_float32_matmul_precision("highest")  # what the refusal says
        engine.generate(ids, max_new_tokens=2)


@pytest.mark.parametrize("lower", [in_a_word, by_the_environment])
def test_float16_whose_scores_would_be_rounded_is_refused_where_rows_are_chosen(
    tmp_path, monkeypatch, lower
):
    """The model multiplies no float32 matrices, but scores are products of such: they were rounded
    to bfloat16 on the way, and a missing mass was weighed by them."""
    monkeypatch.setattr(hf_models, "_ANGLES_BY_PRODUCT", False)
    model, ids = tiny(dtype=torch.float16), prompts(10)
    with attach(model, tmp_path, policy=Recency(keep=0.5)) as engine:
        try:
            lower(monkeypatch)
            with pytest.raises(Unsupported, match="float16 on a CPU under policy recency"):
                engine.generate(ids, max_new_tokens=2)
            engine.generate(ids, max_new_tokens=2, policy=Exact())
        finally:
            torch.set_float32_matmul_precision("highest")
            monkeypatch.delenv("ONEDNN_DEFAULT_FPMATH_MODE", raising=False)
        engine.generate(ids, max_new_tokens=2)


def test_angles_that_are_products_are_not_rounded_in_any_model(tmp_path, monkeypatch):
    """Before Transformers 5.19 a half-precision model's angles are a float32 product, too."""
    half, ids = tiny(dtype=torch.bfloat16), prompts(10)
    monkeypatch.setattr(hf_models, "_ANGLES_BY_PRODUCT", True)
    with attach(half, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=2)
        try:
            torch.set_float32_matmul_precision("high")
            with pytest.raises(Unsupported, match="set_float32_matmul_precision"):
                engine.generate(ids, max_new_tokens=2)
        finally:
            torch.set_float32_matmul_precision("highest")


def layers_in_training(model):
    model.model.layers.train()


def an_adapters_dropout(model):
    """As when LoRA is put into a model that was set to eval() earlier."""
    model.model.layers[1].mlp.lora_dropout = torch.nn.Dropout(0.5)


@pytest.mark.parametrize("change", [layers_in_training, an_adapters_dropout])
def test_a_submodule_in_training_mode_is_refused_before_its_dropout_is_stored(tmp_path, change):
    """Only the root module was asked, and it says eval()."""
    model, ids = tiny(attention_dropout=0.5), prompts(200)
    with attach(model, tmp_path) as engine:
        change(model)
        assert not model.training
        with pytest.raises(Unsupported, match=r"layers.* training mode .*call model.eval\(\)"):
            engine.generate(ids, max_new_tokens=2)
        engine.flush()
        assert engine.store.lookup(ids[0].numpy()) == 0
        model.eval()
        if change is an_adapters_dropout:  # it is another model
            with pytest.raises(StoreMismatch, match="changed since attach"):
                engine.generate(ids, max_new_tokens=2)
            return
        engine.generate(ids, max_new_tokens=2)
        engine.flush()
        assert engine.last_request.stored_tokens == 192


def an_attention_that_sees_what_follows(model):
    model.model.layers[1].self_attn.is_causal = False


@pytest.mark.parametrize("hit", [0, 192])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (torch.nn.Module.train, "training mode"),
        (an_attention_that_sees_what_follows, r"layers\.1\.self_attn has is_causal=False"),
    ],
)
def test_a_model_that_is_set_otherwise_during_a_request_leaves_nothing_of_it(
    tmp_path, hit, change, said
):
    class Changing(Heard):
        def put(self, value):
            change(model)
            super().put(value)

    model, ids = tiny(attention_dropout=0.5), prompts(400)
    with attach(model, tmp_path) as engine:
        if hit:
            engine.generate(ids[:, :200], max_new_tokens=1)
            engine.flush()
        with pytest.raises(Unsupported, match=said):
            engine.generate(ids, max_new_tokens=2, streamer=Changing())
        engine.flush()
        assert engine.store.lookup(ids[0].numpy()) == hit


class AdaptedLinear(torch.nn.Linear):
    """Like a layer of PEFT's: which of its adapters answers is kept beside its tensors."""

    __module__ = "peft.tuners.lora.layer"

    def forward(self, x):
        rows = super().forward(x)
        return rows if self.disable_adapters else rows * self.scaling[self.active_adapters[0]]


def adapted(**changes):
    """A model with two adapters in both layers, of which the first is active."""
    model = tiny(**changes)
    for layer in model.model.layers:
        adapted = layer.self_attn.k_proj
        adapted.__class__ = AdaptedLinear
        adapted.active_adapters, adapted.disable_adapters = ["a"], False
        adapted.merged_adapters, adapted.scaling = [], {"a": 1.0, "b": 3.0}
    return model


def another_adapter(model, back):
    for layer in model.model.layers:
        layer.self_attn.k_proj.active_adapters = ["a" if back else "b"]


def no_adapter(model, back):
    for layer in model.model.layers:
        layer.self_attn.k_proj.disable_adapters = not back


def training(model, back):
    model.train(not back)


def a_mask_of_nothing(model, back):
    for module in (model.config, *(layer.self_attn for layer in model.model.layers)):
        module.is_causal = back


@pytest.mark.parametrize(("first", "last"), [(1, 2), (2, None)], ids=["the prompt", "the answer"])
@pytest.mark.parametrize("hit", [0, 64])
@pytest.mark.parametrize("change", [another_adapter, no_adapter, training, a_mask_of_nothing])
def test_a_model_that_is_set_back_before_an_answers_end_leaves_nothing_of_it(
    tmp_path, change, hit, first, last
):
    """How it was set was asked once the answer was there: another adapter's rows were stored as
    this one's, and the next prompt found them."""

    class Switching(Heard):
        def put(self, value):
            super().put(value)
            if len(self.parts) in (first, last):
                change(model, len(self.parts) == last)

        def end(self):
            change(model, True)

    model, ids = adapted(attention_dropout=0.5), prompts(100)
    with attach(model, tmp_path) as engine:
        if hit:
            engine.generate(ids, max_new_tokens=1)
            engine.flush()
        out = engine.generate(ids, max_new_tokens=80, streamer=Switching())
        engine.flush()
        assert engine.last_request.hit_tokens == hit
        assert engine.last_request.refused == "the model changed while it answered"
        assert engine.store.lookup(out[0].numpy()) == hit
        wait_for_promotions(engine.store)
        assert engine.store.buffers.used_bytes == 0
        longer = torch.cat([out, prompts(20, seed=2)], 1)
        options = {"output_logits": True, "return_dict_in_generate": True}
        mine = engine.generate(longer, max_new_tokens=8, **options)
        assert engine.last_request.hit_tokens == hit
        assert engine.last_request.refused == ""
    if hit:
        assert_same_bits(mine, continued(model, ids, longer, hit))
    else:
        assert_same_bits(mine, model.generate(longer, max_new_tokens=8, **options))


def test_another_dtype_or_geometry_than_the_directory_is_refused_naming_both(tmp_path):
    attach(tiny(), tmp_path).close()
    with pytest.raises(StoreMismatch, match=r"(?s)float32.*bfloat16|bfloat16.*float32"):
        attach(tiny(dtype=torch.bfloat16), tmp_path)
    with pytest.raises(StoreMismatch, match=r"(?s)2 layers.*3 layers|3 layers.*2 layers"):
        attach(tiny(num_hidden_layers=3), tmp_path)


def test_a_store_of_another_model_is_refused_naming_both(tmp_path):
    with attach(tiny(), tmp_path) as engine:
        with pytest.raises(StoreMismatch, match="namespace"):
            hf.attach(tiny(seed=1), engine.store)
        with pytest.raises(StoreMismatch, match=r"float32.*bfloat16"):
            hf.attach(tiny(dtype=torch.bfloat16), engine.store)


def test_other_weights_share_a_directory_and_never_a_prefix(tmp_path):
    ids = prompts(200)
    for seed in (0, 1):
        model = tiny(seed=seed)
        with attach(model, tmp_path) as engine:
            out = engine.generate(ids, max_new_tokens=4)
            assert engine.last_request.hit_tokens == 0
            assert torch.equal(out, model.generate(ids, max_new_tokens=4))


def in_place(model):
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)


def through_data(model):
    """Writes as RL weight sync and EMA swaps do: the version that autograd keeps does not move."""
    for mine, new in zip(model.parameters(), tiny(seed=1).parameters(), strict=True):
        mine.data.copy_(new)


def one_small_tensor_through_data(model):
    """Writes as into an adapter's A and B: all other tensors stay."""
    model.model.layers[1].input_layernorm.weight.data.mul_(1.5)


def a_transposed_tensor_through_data(model):
    model.model.layers[1].self_attn.o_proj.weight.data.mul_(1.5)


def rounded_angles(model):
    model.model.rotary_emb.to(torch.bfloat16)


def angles_through_data(model):
    model.model.rotary_emb.inv_freq.data.mul_(0.5)


def one_tensor_more(model):
    model.model.layers[0].mlp.register_parameter("lora_a", torch.nn.Parameter(torch.zeros(3)))


def fewer_channels(model):
    """Pruned by slices: every tensor keeps its address and version."""
    mlp = model.model.layers[0].mlp
    n = mlp.up_proj.weight.shape[0] // 2
    for layer in (mlp.gate_proj, mlp.up_proj):
        layer.weight.data = layer.weight.data[:n]
    mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, :n]


def turned_over(model):
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight.data = layer.weight.data.t()


@pytest.mark.parametrize(
    "change",
    [
        *(in_place, through_data, one_small_tensor_through_data, a_transposed_tensor_through_data),
        *(rounded_angles, angles_through_data, one_tensor_more, fewer_channels, turned_over),
    ],
)
def test_weights_changed_after_attach_are_refused_until_attached_again(tmp_path, change):
    """The old weights' prefix is not served, nor the new weights' rows stored under their name."""
    model, ids = tiny(), prompts(200)
    turned = model.model.layers[1].self_attn.o_proj
    turned.weight = torch.nn.Parameter(turned.weight.detach().clone().t())
    with attach(model, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=2)
        engine.flush()
        engine.generate(ids, max_new_tokens=2)
        assert engine.last_request.hit_tokens == 192
        change(model)
        with pytest.raises(StoreMismatch, match="changed"):
            engine.generate(ids, max_new_tokens=2)
    with attach(model, tmp_path) as engine:
        out = engine.generate(ids, max_new_tokens=4)
        assert engine.last_request.hit_tokens == 0
        assert torch.equal(out, model.generate(ids, max_new_tokens=4))


def test_of_changed_weights_nothing_is_stored_where_nothing_was_reused(tmp_path):
    """They are then checked after the answer: the request still fails, and so does the next."""
    model = tiny()
    with attach(model, tmp_path) as engine:
        in_place(model)
        for _ in range(2):
            with pytest.raises(StoreMismatch, match="changed"):
                engine.generate(prompts(200), max_new_tokens=2)
        engine.flush()
        assert engine.store.lookup(prompts(200)[0].numpy()) == 0
        assert engine.store.buffers.used_bytes == 0


def test_weights_that_change_during_a_request_leave_nothing_of_it(tmp_path):
    """Their rows were stored under the name of the model as it was at the request's start."""
    model = tiny()
    with attach(model, tmp_path) as engine:

        def change(ids, scores):
            in_place(model)
            return scores

        with pytest.raises(StoreMismatch, match="changed"):
            engine.generate(prompts(200), max_new_tokens=3, logits_processor=[change])
        engine.flush()
        assert engine.store.lookup(prompts(200)[0].numpy()) == 0


def test_weights_that_change_during_a_hit_leave_nothing_of_what_it_computed(tmp_path):
    """They were checked before the hit was read: rows computed after it were stored as theirs."""

    class Changing(Heard):
        def put(self, value):
            if not self.parts:  # the prompt: a prefix is on its way, nothing is computed yet
                in_place(model)
            super().put(value)

    model, ids = tiny(), prompts(400)
    with attach(model, tmp_path) as engine:
        engine.generate(ids[:, :200], max_new_tokens=1)
        engine.flush()
        with pytest.raises(StoreMismatch, match="changed"):
            engine.generate(ids, max_new_tokens=2, streamer=Changing())
        engine.flush()
        assert engine.store.lookup(ids[0].numpy()) == 192
        wait_for_promotions(engine.store)
        assert engine.store.buffers.used_bytes == 0


def test_weights_without_a_version_are_seen_to_change(tmp_path):
    """Tensors made in inference mode count no writes."""
    with torch.inference_mode():
        model = tiny()
    with attach(model, tmp_path) as engine:
        engine.generate(prompts(10), max_new_tokens=2)
        with torch.inference_mode():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        with pytest.raises(StoreMismatch, match="changed"):
            engine.generate(prompts(10))


def test_comparing_weights_keeps_the_interpreter(tmp_path, monkeypatch):
    """While the request before was being stored, what a hit compares first waited for that up to 60
    times: torch's is_inference() lets go of the interpreter, and so does numpy from 501 elements on
    (32 layers: 1.8 ms instead of .4)."""
    with attach(tiny(), tmp_path) as engine:
        monkeypatch.setattr(torch.Tensor, "is_inference", lambda _tensor: pytest.fail("asked"))
        engine._weights.check()
        words = [len(index) for _, index in engine._weights._host._groups]
    assert max(words) <= 500 and sum(words) > 500


@pytest.mark.parametrize("alike", [False, True], ids=["other values", "one other value"])
def test_a_tensor_that_takes_the_memory_of_another_is_seen(tmp_path, alike):
    """An adapter deleted and another loaded under its name may get the address of the first."""
    model = tiny()
    layer = model.model.layers[0].mlp.up_proj
    memory = layer.weight.detach().numpy().copy()
    layer.weight = torch.nn.Parameter(torch.from_numpy(memory))
    with attach(model, tmp_path) as engine:
        engine.generate(prompts(10), max_new_tokens=2)
        del layer.weight
        memory[0, 1] *= 1.5
        if not alike:
            memory *= 1.5
        layer.weight = torch.nn.Parameter(torch.from_numpy(memory))
        with pytest.raises(StoreMismatch, match="changed"):
            engine.generate(prompts(10))


# --- code that no key tells apart -----------------------------------------------------------------


def louder(module, args, output):
    """A hook that steers, like one that adds a vector to the residual stream."""
    return output * 1.5


class Louder:
    """Like an accelerate hook that a user has written."""

    no_grad = False

    def pre_forward(self, module, *args, **kwargs):
        return args, kwargs

    def post_forward(self, module, output):
        return output * 1.5


def a_hook(model):
    return model.model.layers[0].register_forward_hook(louder).remove


def a_hook_before(model):
    norm = model.model.layers[1].input_layernorm
    return norm.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,)).remove


def a_hook_of_every_module(model):
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 1.5 if module is model.model.layers[0] else None
    )
    return hook.remove


def a_forward_of_its_own(model):
    layer = model.model.layers[0]
    before = layer.forward
    layer.forward = lambda *args, **kwargs: before(*args, **kwargs) * 1.5
    return lambda: delattr(layer, "forward")


def a_forward_around_a_compiled_one(model):
    layer = model.model.layers[0]
    compiled = torch.compile(layer.forward, backend="eager")

    @functools.wraps(compiled)  # takes over where torch keeps what it compiled
    def around(*args, **kwargs):
        return compiled(*args, **kwargs) * 1.5

    layer.forward = around
    return lambda: delattr(layer, "forward")


def a_hook_over_a_compiled_forward(model):
    layer = model.model.layers[0]
    layer.forward = torch.compile(layer.forward, backend="eager")
    undo = a_hook_under_accelerate(model)
    return lambda: (undo(), delattr(layer, "forward"))


def a_generate_of_its_own(model):
    model.generate = functools.partial(type(model).generate, model, min_new_tokens=1)
    return lambda: delattr(model, "generate")


def shifted(model, *args, **kwargs):
    inputs = type(model).prepare_inputs_for_generation(model, *args, **kwargs)
    n = inputs[CACHE].get_seq_length()
    positions = torch.arange(n, n + inputs["input_ids"].shape[1])[None] + 7
    return {**inputs, "position_ids": positions}


def inputs_of_its_own(model):
    model.prepare_inputs_for_generation = types.MethodType(shifted, model)
    return lambda: delattr(model, "prepare_inputs_for_generation")


def a_hook_under_accelerate(model):
    return dispatched(model.model.layers[0], Louder())


def a_hook_held_by_one_of_accelerates(model):
    return dispatched(model.model.layers[0], accelerates("SequentialHook", hooks=(Louder(),)))


def a_forward_of_its_own_under_accelerate(model):
    layer = model.model.layers[0]
    a_forward_of_its_own(model)
    dispatched(layer, accelerates("AlignDevicesHook"))
    return lambda: delattr(layer, "forward")


def parameters_moved(model):
    """On a GPU this hook makes each tensor anew for a forward: every request was refused, as if the
    weights had changed, although attach had let the model through."""
    return dispatched(model.model.layers[0], accelerates("CpuOffload"))


def parameters_moved_among_others(model):
    held = accelerates("AlignDevicesHook"), accelerates("CpuOffload")
    return dispatched(model.model.layers[0], accelerates("SequentialHook", hooks=held))


def accelerates(name, **attributes):
    """A hook that changes nothing, of a class with the name of one of accelerate's."""
    body = {
        "__module__": "accelerate.hooks",
        "no_grad": False,
        "pre_forward": Louder.pre_forward,
        "post_forward": lambda self, module, output: output,
    }
    return type(name, (), {**body, **attributes})()


def dispatched(module, hook):
    """Does what accelerate's add_hook_to_module does for a device_map; returns what undoes it."""

    def new_forward(module, *args, **kwargs):
        args, kwargs = module._hf_hook.pre_forward(module, *args, **kwargs)
        return module._hf_hook.post_forward(module, module._old_forward(*args, **kwargs))

    new_forward.__module__ = "accelerate.hooks"
    before = module.forward
    module._old_forward, module._hf_hook = before, hook
    module.forward = functools.update_wrapper(functools.partial(new_forward, module), before)

    def restored():
        del module._hf_hook, module._old_forward
        module.forward = before

    return restored


CODE = [
    (a_hook, r"model\.layers\.0 has a forward hook"),
    (a_hook_before, r"model\.layers\.1\.input_layernorm has a forward hook"),
    (a_hook_of_every_module, "every module has a forward hook"),
    (a_forward_of_its_own, r"model\.layers\.0 has a forward of its own"),
    (a_forward_around_a_compiled_one, r"model\.layers\.0 has a forward of its own"),
    (a_hook_over_a_compiled_forward, r"model\.layers\.0 has a forward of its own"),
    (a_generate_of_its_own, "the model has a generate of its own"),
    (inputs_of_its_own, "the model has a prepare_inputs_for_generation of its own"),
    (a_hook_under_accelerate, r"model\.layers\.0 has a forward of its own"),
    (a_hook_held_by_one_of_accelerates, r"model\.layers\.0 has a forward of its own"),
    (a_forward_of_its_own_under_accelerate, r"model\.layers\.0 has a forward of its own"),
    (parameters_moved, r"model\.layers\.0 has a forward of its own"),
    (parameters_moved_among_others, r"model\.layers\.0 has a forward of its own"),
]


@pytest.mark.parametrize(("change", "said"), CODE)
def test_a_model_that_computes_by_code_no_key_covers_is_refused(tmp_path, change, said):
    """Rows that a steered model had once stored were hits for the bare one."""
    model = tiny()
    undo = change(model)
    try:
        with pytest.raises(Unsupported, match=rf"{said}.* remove it"):
            attach(model, tmp_path / "store")
        assert not (tmp_path / "store").exists()
    finally:
        undo()
    attach(model, tmp_path / "store").close()


@pytest.mark.parametrize("path", ["", "model.layers.1.self_attn"])
def test_a_model_of_code_that_came_with_its_files_is_refused(tmp_path, path):
    """Another forward over the same weights and config: its rows were hits for the stock model."""
    model = tiny()
    module = model.get_submodule(path)
    module.__class__ = type("Mine", (type(module),), {"__module__": "transformers_modules.my.code"})
    with pytest.raises(Unsupported, match=f"{path or 'the model'} is of code .* trust_remote_code"):
        attach(model, tmp_path)


def test_a_decoding_loop_that_came_with_a_models_files_is_refused(tmp_path, monkeypatch):
    """With trust_remote_code it takes the place of a stock model's generate(), and may pass any
    positions: the rows it had stored were hits for the model loaded without it."""
    cache = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    monkeypatch.setattr(sys, "path", list(sys.path))
    tiny().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "custom_generate").mkdir()
    (tmp_path / "model" / "custom_generate" / "generate.py").write_text(
        "def generate(model, *args, **kwargs):\n"
        "    return type(model).generate(model, *args, **kwargs)\n"
    )
    load = transformers.AutoModelForCausalLM.from_pretrained
    with_its_loop = load(tmp_path / "model", trust_remote_code=True)
    with pytest.raises(Unsupported, match=r"^generate of the model is of code .*trust_remote_code"):
        attach(with_its_loop, tmp_path / "store")
    assert not (tmp_path / "store").exists()
    attach(load(tmp_path / "model"), tmp_path / "store").close()


@pytest.mark.parametrize(("change", "said"), CODE)
def test_code_that_comes_after_attach_neither_gets_a_hit_nor_stores(tmp_path, change, said):
    model, ids, others = tiny(), prompts(200), prompts(200, seed=2)
    with attach(model, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=2)
        engine.flush()
        undo = change(model)
        try:
            for each in (ids, others):
                with pytest.raises(StoreMismatch, match=rf"{said}.* remove it"):
                    engine.generate(each, max_new_tokens=2)
        finally:
            undo()
        engine.flush()
        assert engine.store.lookup(others[0].numpy()) == 0
        engine.generate(ids, max_new_tokens=2)
        assert engine.last_request.hit_tokens == 192


ADAPTERS = [
    ({"peft_type": "LORA", "alora_invocation_tokens": [5, 6]}, "is an aLoRA"),
    ({"peft_type": "XLORA"}, "is an X-LoRA"),
    ({"peft_type": "LILY"}, "is a Lily"),
    ({"peft_type": "PVERA", "sample_at_inference": True}, "draws at random"),
    ({"peft_type": "CPT"}, "is a CPT, which writes"),
    ({"peft_type": "LORA", "target_parameters": ["k_proj.weight"]}, "has target_parameters"),
]


@pytest.mark.parametrize(("settings", "said"), ADAPTERS)
def test_an_adapter_that_cannot_be_served_is_refused_whenever_it_comes(tmp_path, settings, said):
    """No prefix tells where an activated LoRA begins or how X-LoRA mixes: a hit had keys computed
    with another prompt's end. Where a forward writes tensors, every request was answered in full
    and then ended in StoreMismatch, however often the model was attached again."""
    model, ids = tiny(), prompts(200)
    plain = SimpleNamespace(peft_type="LORA", alora_invocation_tokens=None, target_parameters=None)
    with attach(model, tmp_path / "late") as engine:
        model.peft_config = {"plain": plain}
        engine.generate(ids, max_new_tokens=2)
        engine.flush()
        model.peft_config["mine"] = SimpleNamespace(**settings)
        for each in (ids, prompts(200, seed=2)):
            with pytest.raises(Unsupported, match=rf"^adapter 'mine' {said}.*delete it"):
                engine.generate(each, max_new_tokens=2)
        engine.flush()
        assert engine.store.lookup(prompts(200, seed=2)[0].numpy()) == 0
    with pytest.raises(Unsupported, match=rf"^adapter 'mine' {said}"):
        attach(model, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def a_device_map(model):
    for module in model.modules():
        dispatched(module, accelerates("AlignDevicesHook"))


def two_hooks_of_accelerates(model):
    moving = accelerates("AlignDevicesHook"), accelerates("ModelHook")
    dispatched(model.model.layers[0], accelerates("SequentialHook", hooks=moving))


def a_device_map_taken_back(model):
    dispatched(model.model.layers[0], accelerates("AlignDevicesHook"))()


def what_peft_puts_back(model):
    """After each generate(): the model's own method, in the model or in the module around it."""
    bound = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = model.model.prepare_inputs_for_generation = bound


def outputs_captured(model):
    """From here on Transformers has hooks of its own in every layer."""
    model(prompts(4), output_hidden_states=True, output_attentions=False)
    assert any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    "change",
    [
        *(a_device_map, two_hooks_of_accelerates, a_device_map_taken_back),
        *(outputs_captured, what_peft_puts_back),
    ],
)
def test_code_that_leaves_rows_as_they_are_is_served(tmp_path, change):
    model, ids = tiny(), prompts(200)
    bare = model.generate(ids, max_new_tokens=4)
    with attach(model, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=2)
        engine.flush()
        change(model)
        assert torch.equal(engine.generate(ids, max_new_tokens=4), bare)
        assert engine.last_request.hit_tokens == 192
    with attach(model, tmp_path) as engine:
        assert torch.equal(engine.generate(ids, max_new_tokens=4), bare)
        assert engine.last_request.hit_tokens == 192


def test_a_module_that_torch_has_compiled_is_served(tmp_path):
    """The compiling wrapper around it has a forward that is no class's."""
    model, ids = tiny(), prompts(200)
    bare = model.generate(ids, max_new_tokens=4)
    model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp, backend="eager")
    with attach(model.eval(), tmp_path) as engine:
        for hit in (0, 192):
            assert torch.equal(engine.generate(ids, max_new_tokens=4), bare)
            assert engine.last_request.hit_tokens == hit
            engine.flush()


# --- forks ----------------------------------------------------------------------------------------


CALLS = {
    "generate": (lambda engine: engine.generate(prompts(200), max_new_tokens=2), "before a fork"),
    "flush": (lambda engine: engine.flush(), "before a fork"),
    "close": (lambda engine: engine.close(), "returned"),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_engine_in_a_forks_child_is_refused_and_closes_without_a_touch(tmp_path, call):
    """Its threads stayed in the parent: close waited for them for ever."""
    ask, said = CALLS[call]
    model, ids = tiny(), prompts(200)
    with attach(model, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=2)
        engine.flush()
        assert said in said_by_a_child(lambda: ask(engine))
        engine.generate(ids, max_new_tokens=2)
        assert engine.last_request.hit_tokens == 192
        engine.flush()


@pytest.mark.parametrize("call", [*CALLS, "attach"])
def test_a_child_forked_while_a_request_runs_does_not_wait_for_its_turn(tmp_path, call):
    """The lock came along, but the thread that would release it did not."""

    class Halted(Heard):
        def put(self, value):
            super().put(value)
            if len(self.parts) == 2:
                reached.set()
                assert go_on.wait(60)

    def anew(_engine):
        attach(model, tmp_path / "anew").close()

    ask, said = {**CALLS, "attach": (anew, "returned")}[call]
    reached, go_on = threading.Event(), threading.Event()
    model, ids = tiny(), prompts(200)
    with attach(model, tmp_path / "store") as engine, ThreadPoolExecutor(1) as other:
        request = other.submit(engine.generate, ids, max_new_tokens=4, streamer=Halted())
        assert reached.wait(60)
        try:
            assert said in said_by_a_child(lambda: ask(engine))
        finally:
            go_on.set()
        assert torch.equal(request.result(60), model.generate(ids, max_new_tokens=4))


def test_a_closed_engine_says_so(tmp_path):
    engine = attach(tiny(), tmp_path)
    engine.close()
    engine.close()
    with pytest.raises(impress.ImpressError, match="closed"):
        engine.generate(prompts(10))


class Closing:
    """A streamer that has its engine closed after the first token; with `beside`, by another
    thread, which then waits for the request, or has closed the engine."""

    def __init__(self, engine, beside):
        self.engine, self.beside, self.n_put, self.closer = engine, beside, 0, None

    def put(self, _value):
        self.n_put += 1
        if self.n_put == 2 and not self.beside:
            self.engine.close()
        elif self.n_put == 2:
            self.closer = threading.Thread(target=self.engine.close)
            self.closer.start()
            while self.closer.is_alive() and self.engine._turn.n_wanted < 2:
                pass

    def end(self):
        pass


def engine_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("impress")}


def closed_meanwhile(path, hit, *, beside):
    """An engine that was closed within its request's 70 tokens, and the answer, which is right."""
    model, ids, before = tiny(), prompts(200), engine_threads()
    if hit:
        with attach(model, path) as engine:
            engine.generate(ids, max_new_tokens=1)
    engine = attach(model, path)
    streamer = Closing(engine, beside=beside)
    answer = engine.generate(ids, max_new_tokens=70, streamer=streamer)
    if beside:
        streamer.closer.join(60)
    assert torch.equal(answer, model.generate(ids, max_new_tokens=70))
    assert engine_threads() <= before
    return model, engine, answer


@pytest.mark.parametrize("hit", [0, 192])
def test_close_waits_for_the_request_another_thread_is_at(tmp_path, hit):
    """The request ran on meanwhile: its rows were lost, and it began a thread that nobody ended."""
    model, engine, answer = closed_meanwhile(tmp_path, hit, beside=True)
    request = engine.last_request
    assert (request.hit_tokens, request.stored_tokens, request.refused) == (hit, 256 - hit, "")
    with attach(model, tmp_path) as engine:
        engine.generate(answer, max_new_tokens=1)
        assert engine.last_request.hit_tokens == 256


@pytest.mark.parametrize("hit", [0, 192])
def test_an_engine_closed_from_within_a_request_answers_it_and_leaves_nothing(tmp_path, hit):
    _, engine, _ = closed_meanwhile(tmp_path, hit, beside=False)
    assert engine.last_request.refused == "the engine is closed"
    assert engine.store.buffers.used_bytes == 0
