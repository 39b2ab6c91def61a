"""Importance that the engine hands to the store: the attention of the prompt's last rows. Observing
it changes no bit of the answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from test_engine_hf import MODELS, assert_same_bits, attach, continued, prompts, tiny

from impress.engines import hf_models
from impress.engines.hf_observed import ATTENTION_NAME, OBSERVED_ROWS
from impress.errors import Unsupported
from impress.policy import Exact, Quality, SnapWindow, StaticH2O
from impress.spans.tables import read_header

GREEDY = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}


pytestmark = pytest.mark.usefixtures("one_thread")


def stored_importance(engine):
    """The importance of every span, in the order stored: float32 [n_layers, rows], or None."""
    store = engine.store
    return [read_header(store.ssd, record).importance for record in store.catalog.records()]


def attention_of_last_rows(model, ids, n_asked=OBSERVED_ROWS):
    """The model's own weights, [batch, n_layers, n]: mean over heads and the last rows."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    model.set_attn_implementation(before)
    return torch.stack([a[:, :, -n_asked:].float().mean((1, 2)) for a in attentions], 1).numpy()


@pytest.mark.parametrize(("family", "dtype", "attention"), MODELS)
def test_observing_changes_no_bit(tmp_path, family, dtype, attention):
    model, ids = tiny(family, dtype, attention=attention), prompts(200)
    bare = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, **GREEDY)
    with attach(model, tmp_path / "exact") as engine:
        exact = engine.generate(ids, max_new_tokens=8, **GREEDY)
        engine.flush()
        assert stored_importance(engine) == [None]
    with attach(model, tmp_path / "chooses", policy=Quality(0.1)) as engine:
        miss = engine.generate(ids, max_new_tokens=8, **GREEDY)
        assert engine.last_request.mode == "recompute"
        assert model.config._attn_implementation == attention
        engine.flush()
        assert (stored_importance(engine)[0] is None) is (attention == "eager")
    assert torch.equal(miss.sequences, bare.sequences)
    assert_same_bits(miss, exact)
    if attention == "sdpa":  # the stock cache and ours are bit-identical there
        assert_same_bits(miss, bare)


@pytest.mark.parametrize("family", ["opt", "llama", "qwen3", "mistral"])
@pytest.mark.parametrize("n_tokens", [200, 192, 70])
def test_importance_is_the_models_own_attention(tmp_path, family, n_tokens):
    model, ids = tiny(family), prompts(n_tokens, batch=2)
    with attach(model, tmp_path, policy=Quality(0.1)) as engine:
        engine.generate(ids, max_new_tokens=1, policy=Exact())  # the policy that takes batches
        engine.flush()
        found = stored_importance(engine)
    want = attention_of_last_rows(model, ids)
    whole = n_tokens // 64 * 64
    assert len(found) == 2
    for mine, theirs in zip(found, want, strict=True):
        np.testing.assert_allclose(mine, theirs[:, :whole], rtol=1e-4, atol=1e-7)


def test_a_longer_prompt_gives_its_own_rows_theirs(tmp_path):
    """The rows after an exact hit are told apart by the longer prompt's end; no bit changes."""
    model, ids = tiny("llama"), prompts(300)
    with attach(model, tmp_path, policy=Quality(0.1)) as engine:
        engine.generate(ids[:, :130], max_new_tokens=1)
        engine.flush()
    with attach(model, tmp_path, policy=Quality(0.1), mode="exact") as engine:
        out = engine.generate(ids, max_new_tokens=1, **GREEDY)
        assert engine.last_request.mode == "exact" and engine.last_request.hit_tokens == 128
        engine.flush()
        first, second = stored_importance(engine)
    assert_same_bits(out, continued(model, ids[:, :130], ids, 128, 1))
    assert first.shape[1] == 128 and second.shape[1] == 128
    np.testing.assert_allclose(
        second, attention_of_last_rows(model, ids)[0, :, 128:256], rtol=1e-4, atol=1e-7
    )


def test_generated_rows_get_the_mean_and_a_chunked_prefill_is_seen(tmp_path):
    model, ids = tiny("opt"), prompts(100)
    with attach(model, tmp_path, policy=Quality(0.1)) as engine:
        engine.generate(ids, max_new_tokens=40, policy=Exact(), prefill_chunk_size=60)
        engine.flush()
        (found,) = stored_importance(engine)
    want = attention_of_last_rows(model, ids)[0]
    np.testing.assert_allclose(found[:, :100], want, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(found[:, 100:], want.mean(1)[:, None].repeat(28, 1), rtol=1e-4)


@pytest.mark.parametrize("chunk", [64, 7, 1])
def test_the_last_rows_may_come_in_several_chunks(tmp_path, chunk):
    """Rows of the last chunk alone were asked what matters: of 193 tokens in chunks of 64, one."""
    model, ids = tiny("llama"), prompts(193)
    with attach(model, tmp_path, policy=SnapWindow(0.25)) as engine:
        engine.generate(ids, max_new_tokens=1, policy=Exact(), prefill_chunk_size=chunk)
        engine.flush()
        (found,) = stored_importance(engine)
    want = attention_of_last_rows(model, ids)[0, :, :192]
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-7)


def test_after_a_hit_the_rows_that_were_computed_are_asked(tmp_path):
    """Fewer than 16, where the prompt goes on for less: the others' queries are not to be had."""
    model, ids = tiny("llama"), prompts(133)
    chunks = {} if hf_models._VERSION < (5, 21) else {"prefill_chunk_size": 2}
    with attach(model, tmp_path, policy=Quality(0.1), mode="exact") as engine:
        engine.generate(ids[:, :128], max_new_tokens=1)
        engine.flush()
        engine.generate(ids, max_new_tokens=60, policy=Exact(), **chunks)
        assert engine.last_request.hit_tokens == 128
        engine.flush()
        _, found = stored_importance(engine)
    want = attention_of_last_rows(model, ids, 5)[0]
    np.testing.assert_allclose(found[:, :5], want[:, 128:], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("policy", [StaticH2O(0.25), SnapWindow(0.25)])
def test_policies_that_choose_by_importance_are_served(tmp_path, policy):
    model, ids = tiny("llama"), prompts(200)
    with attach(model, tmp_path, policy=policy) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        engine.generate(ids, max_new_tokens=1)
        assert engine.last_request.mode == "sparse"
        assert engine.last_request.chosen_rows_share == 0.25
        engine.generate(ids, max_new_tokens=1, policy=StaticH2O(1.0))
        assert engine.last_request.chosen_rows_share == 1.0


@pytest.fixture
def default_dtype():
    """A function that sets the dtype torch gives to tensors that are made without one."""
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("policy", [Quality(0.1), StaticH2O(0.25)], ids=lambda policy: policy.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_torchs_default_dtype_changes_no_bit(tmp_path, default_dtype, policy, dtype):
    """Under one of them rows were not stored; under all, hits failed on a processor with VNNI."""
    answers, found = [], []
    for kind in (torch.float32, dtype):
        model, ids = tiny("llama"), prompts(200)
        default_dtype(kind)
        with attach(model, tmp_path / str(kind), policy=policy) as engine:
            engine.generate(ids, max_new_tokens=1)
            engine.flush()
            answers.append(engine.generate(ids, max_new_tokens=4, **GREEDY))
            assert (engine.last_request.mode, engine.last_request.hit_tokens) == ("sparse", 192)
            found.append(stored_importance(engine)[0])
        default_dtype(torch.float32)
    assert_same_bits(answers[1], answers[0])
    assert np.array_equal(found[1], found[0])


@pytest.mark.parametrize("probe", ["int4-v2", "int3-v2"])
def test_torchs_default_device_is_not_where_a_hits_rows_are_chosen(tmp_path, probe):
    """A short question to a model on the host was a RuntimeError, which exact hits answered."""
    model, ids = tiny("llama"), prompts(197)
    policy = Quality(0.05, probe=probe)
    with attach(model, tmp_path, policy=policy) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        want = engine.generate(ids, max_new_tokens=4, policy=policy, **GREEDY)
        with torch.device("meta"):  # stands for a GPU's
            got = engine.generate(ids, max_new_tokens=4, policy=policy, **GREEDY)
        assert engine.last_request.mode == "sparse"
    assert_same_bits(got, want)


def test_the_models_attention_is_back_after_an_error(tmp_path):
    model, ids = tiny("opt"), prompts(100)

    def broken(*_args, **_options):
        assert model.config._attn_implementation == ATTENTION_NAME
        raise RuntimeError("of the caller")

    stop = transformers.StoppingCriteriaList([broken])
    with attach(model, tmp_path, policy=Quality(0.1)) as engine:
        with pytest.raises(RuntimeError, match="of the caller"):
            engine.generate(ids, max_new_tokens=4, stopping_criteria=stop)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("policy", [Quality(0.1), Exact()], ids=lambda policy: policy.name)
def test_guidance_is_refused_before_its_second_prompt_is_taken_for_the_prompt(tmp_path, policy):
    """Guidance's pass over another prompt once ran with this prompt's attention: that prompt's rows
    said what was important in this one, and tokens that its mask hid were seen."""
    model, ids = tiny("llama"), prompts(100)
    model.generation_config.guidance_scale = 1.5  # what a checkpoint may bring
    with attach(model, tmp_path, policy=policy) as engine:
        with pytest.raises(Unsupported, match=r"guidance_scale=1.5 is not supported"):
            engine.generate(ids, max_new_tokens=2)
        assert engine.last_request is None
        engine.generate(ids, max_new_tokens=2, guidance_scale=1)
        engine.flush()
        (found,) = stored_importance(engine)
    if policy.name != "exact":
        want = attention_of_last_rows(model, ids)[0, :, :64]
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-7)
