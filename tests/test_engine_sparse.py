"""Sparse requests in the Transformers engine: logits of a masked full cache, nothing stored."""

from __future__ import annotations

import copy
import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import wait_for_promotions
from masked_reference import (
    HIT,
    LOGITS,
    Given,
    Watched,
    assert_matches,
    difference,
    filled,
    full_cache,
    model_of,
    pick,
    reference,
    request_ids,
)
from test_engine_hf import (
    CONFIG,
    Heard,
    assert_same_bits,
    attach,
    continued,
    damage,
    last_layer_keys,
    prompts,
)
from transformers.models.llama.modeling_llama import LlamaAttention

import impress
from impress.engines import hf
from impress.engines.choice import Choice, Rates
from impress.engines.costs import Stored
from impress.engines.hf_chosen import ATTENTION_NAMES
from impress.engines.hf_modules import CACHE
from impress.errors import BadInput, Unsupported
from impress.policy import (
    AllHeads,
    Contiguous,
    Exact,
    KeepAll,
    Paper,
    Quality,
    Random,
    Recency,
    SnapWindow,
    StaticH2O,
)
from impress.selection.choices import Selection
from impress.selection.identify import Asked, select

FAMILIES = ("opt", "llama", "qwen3")


pytestmark = pytest.mark.usefixtures("one_thread")


# --- the same as a masked full cache --------------------------------------------------------------

SIZES = {
    "different in each layer": (pick(1, 5), pick(2, 100), pick(3, 31)),
    "one layer whole": (pick(1, 17), None, pick(3, 40)),
    "only the last layer whole": (pick(1, 1), pick(2, 1), None),
}


@pytest.mark.parametrize("rows", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sparse_hit_has_the_logits_and_tokens_of_a_masked_full_cache(tmp_path, family, rows):
    model, ids = model_of(family), request_ids()
    with filled(model, tmp_path, policy=Given(rows)) as engine:
        mine = engine.generate(ids, max_new_tokens=16, do_sample=False, **LOGITS)
        request = engine.last_request
    theirs = reference(model, ids, rows)
    assert_matches(mine, theirs)
    assert difference(mine, reference(model, ids, (None,) * 3, 16)) > 1e-3  # the rows do matter
    assert (request.mode, request.hit_tokens, request.n_new) == ("sparse", HIT, 16)
    sizes = [HIT if layer is None else len(layer) for layer in rows]
    assert [line["chosen"] for line in request.per_layer] == sizes
    assert request.chosen_rows_share == pytest.approx(sum(sizes) / (3 * HIT))
    assert request.fallback_share == sum(layer is None for layer in rows) / 3


@pytest.mark.parametrize("n_new", [1, 2, 150])
def test_any_number_of_new_tokens_matches(tmp_path, n_new):
    model, ids, rows = model_of("llama"), request_ids(n_new), SIZES["one layer whole"]
    with filled(model, tmp_path, policy=Given(rows)) as engine:
        mine = engine.generate(ids, max_new_tokens=16, do_sample=False, **LOGITS)
    assert_matches(mine, reference(model, ids, rows))


POLICIES = [
    Paper(keep=0.2, gate=False),
    Paper(keep=0.2, alpha=0.0, fallback="heads"),
    Paper(keep=0.4),
    Quality(max_missing_mass=0.4),
    Quality(max_missing_mass=0.6, per="head"),
    AllHeads(keep=0.1),
    Random(keep=0.3),
    Recency(keep=0.1),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_what_every_policy_chooses_is_what_is_attended_to(tmp_path, family, policy):
    model, ids, watched = model_of(family), request_ids(), Watched(policy)
    with filled(model, tmp_path, policy=watched) as engine:
        mine = engine.generate(ids, max_new_tokens=4, do_sample=False, **LOGITS)
        request = engine.last_request
    assert_matches(mine, reference(model, ids, watched.rows, 4))
    assert request.policy == "watched"
    assert any(rows is not None for rows in watched.rows) or policy == POLICIES[2]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_query_scaling_and_suffix_are_the_layers_own(tmp_path, family):
    """All heads, first layer: column sums of the model's own attention weights say what to keep."""
    model, ids, watched = model_of(family), request_ids(), Watched(AllHeads(keep=0.1))
    with filled(model, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=1, policy=watched)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(ids[:, HIT:], **{CACHE: full_cache(model)}, output_attentions=True)
    weights = out.attentions[0][0][..., :HIT].double()  # [heads, q, prefix]
    want = weights.sum((0, 1)).topk(13).indices.sort().values
    chosen = watched.seen[0][1]
    assert chosen.positions.tolist() == want.tolist()
    left = weights.sum(-1) - weights[..., want].sum(-1)
    assert chosen.estimated_missing_mass == pytest.approx(left.mean().item(), abs=1e-5)
    assert chosen.missing_mass_worst_head == pytest.approx(left.mean(-1).max().item(), abs=1e-5)


@pytest.mark.parametrize(
    "policy", [KeepAll(), Quality(max_missing_mass=0), Random(keep=1), Paper(alpha=0.0)],
    ids=lambda policy: policy.name,
)  # fmt: skip
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_chosen_has_the_logits_of_an_exact_hit(tmp_path, family, attention, policy):
    model, ids = model_of(family, attention=attention), request_ids()
    with filled(model, tmp_path) as engine:
        exact = engine.generate(ids, max_new_tokens=8, do_sample=False, policy=policy, **LOGITS)
        request = engine.last_request
    assert_matches(exact, continued(model, prompts(200), ids, HIT, do_sample=False))
    assert (request.mode, request.policy) == ("sparse", policy.name)
    assert request.chosen_rows_share == 1
    assert request.estimated_missing_mass == 0
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_follows_its_reference(tmp_path, family):
    model, ids, rows = model_of(family, torch.bfloat16), request_ids(), SIZES["one layer whole"]
    with filled(model, tmp_path, policy=Given(rows)) as engine:
        mine = engine.generate(ids, max_new_tokens=1, **LOGITS)
        engine.generate(ids, max_new_tokens=4, policy=Paper(gate=False))
        engine.generate(ids, max_new_tokens=4, policy=Quality(max_missing_mass=0.5))
        assert engine.last_request.mode == "sparse"
    theirs = reference(model, ids, rows, 1)
    assert (mine.logits[0] - theirs.logits[0]).abs().max() < 0.05 * theirs.logits[0].abs().max()


# --- what is stored, and what is left behind ------------------------------------------------------


def the_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")


def the_module(model):
    model.compile(backend="eager")


def the_attention(model):
    for layer in model.model.layers:
        layer.self_attn.compile(backend="eager")


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("compiled", "policy"),
    [
        (the_forward, Exact()),
        (the_module, Quality(max_missing_mass=0.4)),
        (the_attention, StaticH2O(0.25)),
    ],
    ids=lambda given: getattr(given, "name", None) or given.__name__,
)
def test_a_compiled_model_has_the_bits_of_one_that_is_not(tmp_path, compiled, policy):
    """torch traced the code that reads the rows, and every hit raised torch's error."""
    answers, requests = [], []
    for change in (lambda model: None, compiled):
        model = model_of("llama")
        change(model)
        with attach(model, tmp_path / str(len(answers)), policy=policy) as engine:
            engine.generate(prompts(200), max_new_tokens=1)
            engine.flush()
            options = {"max_new_tokens": 3, "do_sample": False, **LOGITS}
            answers.append(engine.generate(request_ids(), **options))
            requests.append(engine.last_request)
    assert requests[1].hit_tokens == HIT
    assert requests[1].mode == requests[0].mode
    assert requests[1].chosen_rows_share == requests[0].chosen_rows_share
    assert_same_bits(*answers)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("policy", [Exact(), KeepAll()], ids=lambda policy: policy.name)
def test_a_model_compiled_to_be_traced_whole_is_refused_in_a_line(tmp_path, policy):
    """Alone it answers. Each request raised many lines of torch's, with the advice to change the
    engine."""
    model, ids = model_of("llama"), request_ids()
    with attach(model, tmp_path, policy=policy) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
        model.generate(ids, max_new_tokens=2)
        for each in (ids, prompts(200, seed=5)):  # a hit and a miss
            with pytest.raises(Unsupported, match=r"^the model was compiled with fullgraph"):
                engine.generate(each, max_new_tokens=2)
        wait_for_promotions(engine.store)
        assert engine.store.buffers.used_bytes == 0


@pytest.mark.parametrize("n_tokens", [193, 200])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_layer_that_goes_by_a_config_of_its_own_is_refused_where_rows_are_chosen(
    tmp_path, layer, n_tokens
):
    """A copied layer's config is a copy, so its attention stayed the stock one. As the last layer
    it attended to new rows alone: the answer was another one, said to miss nothing, or of more than
    one new token torch's error."""
    model, ids = model_of("llama"), prompts(n_tokens)
    model.model.layers[layer] = copy.deepcopy(model.model.layers[layer])
    bare = model.generate(ids, max_new_tokens=4)
    with attach(model, tmp_path, policy=KeepAll()) as engine:
        for hit in (0, 192):
            said = rf"^layer {layer} attends by a config of its own.* policy keep_all .*Exact\(\)$"
            with pytest.raises(Unsupported, match=said):
                engine.generate(ids, max_new_tokens=4)
            assert torch.equal(engine.generate(ids, max_new_tokens=4, policy=Exact()), bare)
            assert engine.last_request.hit_tokens == hit
            engine.flush()
        model.model.layers[layer].self_attn.config = model.config  # as the line says
        assert torch.equal(engine.generate(ids, max_new_tokens=4), bare)
        assert engine.last_request.mode == "sparse"


class StockAttention(LlamaAttention):
    """Runs the stock function whatever its config says."""

    def forward(self, *args, **named):
        before, self.config = self.config, copy.copy(self.config)
        self.config._attn_implementation = "sdpa"
        try:
            return super().forward(*args, **named)
        finally:
            self.config = before


def test_a_last_layer_of_another_attention_is_noticed_before_a_token_is_out(tmp_path):
    """Whether a layer had attended to chosen rows was asked as the next layer came, so of the last
    one nobody asked."""
    model, ids, heard = model_of("llama"), prompts(193), Heard()
    model.model.layers[-1].self_attn.__class__ = StockAttention
    with attach(model, tmp_path, policy=KeepAll()) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        with pytest.raises(Unsupported, match=r"^layer 2 ran another attention than ours$"):
            engine.generate(ids, max_new_tokens=4, streamer=heard)
        assert len(heard.parts) == 1  # the prompt
        assert engine.generate(ids, max_new_tokens=1, policy=Exact()).shape == (1, 194)
        assert engine.last_request.hit_tokens == 192


def n_stored(engine, ids):
    engine.flush()
    return engine.store.lookup(ids[0].numpy().astype(np.int32))


@pytest.mark.parametrize("policy", [Recency(), KeepAll()], ids=lambda policy: policy.name)
def test_nothing_computed_on_a_sparse_prefix_is_stored_or_handed_out(tmp_path, policy):
    model, ids = model_of("llama"), request_ids()
    with filled(model, tmp_path, policy=policy) as engine:
        tokens = engine.store.stats()["tokens"]
        out = engine.generate(ids, max_new_tokens=60, **LOGITS)
        assert getattr(out, CACHE) is None
        assert CACHE not in out  # nor as an item, where it was
        assert n_stored(engine, out.sequences) == HIT
        assert engine.store.stats()["tokens"] == tokens
        assert "never stored" in engine.last_request.refused
        wait_for_promotions(engine.store)
        assert engine.store.buffers.used_bytes == 0


def test_a_miss_under_a_policy_that_chooses_is_computed_and_stored_densely(tmp_path):
    model, ids = model_of("opt"), prompts(200)
    bare = model.generate(ids, max_new_tokens=8, do_sample=False)
    with attach(model, tmp_path, policy=Paper()) as engine:
        assert torch.equal(engine.generate(ids, max_new_tokens=8, do_sample=False), bare)
        request = engine.last_request
        assert n_stored(engine, ids) == 192
    assert (request.mode, request.policy, request.chosen_rows_share) == ("recompute", "paper", 0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_models_attention_is_back_after_an_exception(tmp_path, attention):
    class Gone(Heard):
        def put(self, value):
            raise KeyboardInterrupt

    model, ids = model_of("llama", attention=attention), request_ids()
    with filled(model, tmp_path) as engine:
        failing = Given((pick(1, 5), ZeroDivisionError(), None))
        with pytest.raises(ZeroDivisionError):
            engine.generate(ids, max_new_tokens=4, policy=failing)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(ids, max_new_tokens=4, policy=Recency(), streamer=Gone())
        assert model.config._attn_implementation == attention
        wait_for_promotions(engine.store)
        assert engine.store.buffers.used_bytes == 0
        mine = engine.generate(ids, max_new_tokens=8, **LOGITS)
        engine.flush()
        engine.store.check()
    assert_same_bits(mine, continued(model, prompts(200), ids, HIT))


@pytest.mark.parametrize("policy", [Recency(keep=0.9), KeepAll()], ids=lambda policy: policy.name)
def test_a_row_lost_in_mid_forward_is_computed_densely_and_streamed_once(tmp_path, policy):
    model, ids = model_of("llama"), request_ids()
    bare = model.generate(ids, max_new_tokens=8, do_sample=False)
    with filled(model, tmp_path) as engine:
        damage(tmp_path, last_layer_keys(model, prompts(200), 70))
        engine.store.drop_caches()
        heard = Heard()
        out = engine.generate(ids, max_new_tokens=8, do_sample=False, streamer=heard, policy=policy)
        request = engine.last_request
        assert torch.equal(out, bare)
        assert (request.lost, request.mode, request.hit_tokens) == ("checksum", "recompute", 0)
        assert heard.parts == [ids[0].tolist(), *([t] for t in out[0, len(ids[0]) :].tolist())]
        assert n_stored(engine, ids) == 192  # a dense run is stored


# --- settings, numbers and refusals ---------------------------------------------------------------


def test_attach_adds_the_policys_probe_records_to_those_asked_for(tmp_path):
    model, ids = model_of("llama"), request_ids()
    config = CONFIG.model_copy(update={"probes": ("int4-v2",)})
    with hf.attach(model, tmp_path, Paper(keep=0.1, gate=False), config=config) as engine:
        assert engine.store.config.probes == ("int4-v2", "heads3-v1")
        engine.generate(prompts(200), max_new_tokens=1)
        engine.flush()
        engine.generate(ids, max_new_tokens=1)
        request = engine.last_request
    # KV heads 0 and 1, of two: all keys are half of a layer's bytes, then come a tenth of the rows.
    assert request.bytes_share == pytest.approx(0.5 + 13 / HIT)
    assert request.fallback_share == 0
    assert 0 < request.estimated_missing_mass <= request.missing_mass_worst_head <= 1


def test_a_request_sums_up_its_layers(tmp_path):
    model, ids = model_of("opt"), request_ids()
    with filled(model, tmp_path) as engine:
        engine.generate(ids, max_new_tokens=1, policy=Recency(keep=0.25))
        sparse = engine.last_request
        engine.generate(ids, max_new_tokens=1)
        exact = engine.last_request
    assert (sparse.chosen_rows_share, sparse.bytes_share) == (0.25, 0.25)
    assert sparse.rows_by_tier == {"ssd": 3 * 32}
    moved = sum(sparse.bytes_by_tier.values())
    assert sparse.transferred_share == moved / (3 * HIT * 2 * 64 * 4)
    assert math.isnan(sparse.estimated_missing_mass) and math.isnan(sparse.missing_mass_worst_head)
    assert (exact.mode, exact.policy, exact.chosen_rows_share) == ("exact", "exact", 1)
    assert (exact.fallback_share, exact.bytes_share, exact.estimated_missing_mass) == (0, 1, 0)


def test_static_importance_is_served_where_it_was_stored(tmp_path):
    model, ids = model_of("llama"), request_ids()
    cache = full_cache(model)
    scores = np.tile(np.arange(HIT, dtype=np.float32), (3, 1))
    with attach(model, tmp_path, policy=StaticH2O(keep=0.25)) as engine:
        engine.store.store(
            prompts(HIT)[0].numpy().astype(np.int32),
            [layer.keys[0] for layer in cache.layers],
            [layer.values[0] for layer in cache.layers],
            importance=scores,
        ).wait(60)
        mine = engine.generate(ids, max_new_tokens=8, do_sample=False, **LOGITS)
    last = tuple(range(96, HIT))
    assert_matches(mine, reference(model, ids, (last,) * 3, 8))


class InTurn(Rates):
    """Chooses each mode in turn, whatever requests cost."""

    def __init__(self):
        super().__init__()
        self.modes = itertools.cycle(("sparse", "exact", "recompute"))

    def choose(self, *_args, **_named):
        return Choice(next(self.modes), "in turn")


@pytest.mark.parametrize("policy", [StaticH2O(), SnapWindow()], ids=lambda policy: policy.name)
def test_a_hit_whose_policy_goes_by_importance_may_be_read_whole_all_the_same(tmp_path, policy):
    """Sessions begun to see whether the policy could choose were taken for sessions that read all:
    a BadInput each time that reading all seemed cheaper, or was to be measured."""
    model, ids = model_of("llama"), request_ids()
    config = CONFIG.model_copy(update={"mode": "auto", "guard": "off"})
    with hf.attach(model, tmp_path, policy, config=config) as engine:
        engine.generate(prompts(200), max_new_tokens=1)
        engine.flush()
        engine._modes.rates = InTurn()
        for mode in ("sparse", "exact", "recompute", "sparse", "exact"):
            engine.generate(ids, max_new_tokens=1)
            assert engine.last_request.mode == mode
            engine.flush()
        wait_for_promotions(engine.store)
        assert engine.store.stats()["leases"] == engine.store.buffers.used_bytes == 0


def test_a_hit_without_importance_is_recomputed_where_that_is_faster(tmp_path):
    """The cost of choosing rows was compared, though none can be chosen; then all were read."""
    model, ids = model_of("llama", attention="eager"), request_ids()
    config = CONFIG.model_copy(update={"mode": "auto", "guard": "off"})
    with hf.attach(model, tmp_path, StaticH2O(), config=config) as engine:
        engine.generate(prompts(200), max_new_tokens=1)
        engine.flush()
        for n_tokens in (300, 400, 500, 600, 700, 800):
            engine._modes.rates.note_forward("recompute", n_tokens, 1e-6 * n_tokens)
            engine._modes.rates.note_forward("exact", 20, 0.01)
            engine._modes.rates.note_read("exact", Stored(HIT, 2, HIT << 10, HIT << 10), 9.0)
        engine.generate(ids, max_new_tokens=1)
        assert engine.last_request.mode == "recompute", engine.last_request.why


@pytest.mark.parametrize("policy", [StaticH2O(), SnapWindow()], ids=lambda policy: policy.name)
def test_a_hit_without_the_importance_its_policy_goes_by_is_exact_and_says_so(
    tmp_path, caplog, policy
):
    """This engine stored such a prefix, and each hit on it raised."""
    model, ids = model_of("llama", attention="eager"), request_ids()  # which is never observed
    with attach(model, tmp_path, policy=policy) as engine:
        assert "eager attention cannot be observed" in caplog.text
        engine.generate(prompts(200), max_new_tokens=1)
        engine.flush()
        made = []
        for hit in (HIT, ids.shape[1] // 64 * 64):  # the second has what the first stored
            made.append(engine.generate(ids, max_new_tokens=8, **LOGITS))
            request = engine.last_request
            assert (request.mode, request.hit_tokens, request.policy) == ("exact", hit, policy.name)
            assert "stored without the importance" in request.why
            engine.flush()
        wait_for_promotions(engine.store)
        assert engine.store.stats()["leases"] == engine.store.buffers.used_bytes == 0
    assert len([r for r in caplog.records if "a hit is exact" in r.getMessage()]) == 1
    assert_same_bits(made[0], continued(model, prompts(200), ids, HIT))


def test_a_policy_that_asks_for_importance_through_another_gets_all_rows_without_it(tmp_path):
    """Engines knew of two policies that they go by it; of one that asks one of these, each hit on
    such a prefix raised in the middle of a forward."""
    model, ids = model_of("llama", attention="eager"), request_ids()
    watched = Watched(StaticH2O())
    config = CONFIG.model_copy(update={"mode": "sparse", "guard": "off"})
    with hf.attach(model, tmp_path, watched, config=config) as engine:
        engine.generate(prompts(200), max_new_tokens=1)
        engine.flush()
        engine.generate(ids, max_new_tokens=1)
        assert engine.last_request.hit_tokens == HIT
        assert engine.last_request.fallback_share == 1


@dataclass(frozen=True)
class Told:
    """A policy that needs no suffix_lse, and says whether it was given one."""

    name: str = "told"
    probe: str | None = None
    needs_suffix_lse: bool = False


@select.register
def _(policy: Told, asked: Asked) -> Selection:
    TOLD.append(asked.suffix_lse is None)
    return select(Recency(keep=0.5), asked)


TOLD: list[bool] = []


def test_what_a_policy_does_not_need_it_is_given_in_no_request_that_is_weighed(tmp_path):
    """Requests that the guard watched had it, and the others had not: a policy that looks whether
    it is there was weighed by other choices than were served."""
    model, ids = model_of("llama"), request_ids()
    TOLD.clear()
    config = CONFIG.model_copy(update={"mode": "sparse", "guard": "auto", "guard_shadows": 1})
    with hf.attach(model, tmp_path, Told(), config=config) as engine:
        engine.generate(prompts(200), max_new_tokens=1)
        engine.flush()
        for _ in range(3):
            engine.generate(ids, max_new_tokens=1)
            engine.flush()
            engine._auditor.drain()
    assert TOLD and all(TOLD)


@pytest.mark.parametrize(
    ("policy", "error", "named"),
    [
        ("sparse", BadInput, "policy: want a policy .* got str"),
        (Paper, BadInput, "policy: want a policy .* got the class Paper"),
        (object(), BadInput, "policy: want a policy .* got object"),
        (SimpleNamespace(probe=None), BadInput, "has no name and no needs_suffix_lse"),
        (Quality(probe="int9-v1"), impress.ImpressError, "int9-v1"),
        (Quality(max_bytes=100), BadInput, "under one window"),
        (Quality(probe="heads3-v1"), BadInput, "does not look at every token of every KV head"),
        (Quality(probe="pages16-v1"), BadInput, "does not look at every token of every KV head"),
        (Contiguous(unit=24), BadInput, "does not divide"),
    ],
)
def test_a_policy_that_is_not_served_is_refused_before_anything_is_opened(
    tmp_path, policy, error, named
):
    model = model_of("llama")
    with pytest.raises(error, match=named):
        attach(model, tmp_path / "store", policy=policy)
    assert not (tmp_path / "store").exists()
    with attach(model, tmp_path / "other") as engine, pytest.raises(error, match=named):
        engine.generate(prompts(10), policy=policy)


@pytest.mark.parametrize(
    ("batch", "options", "named"),
    [
        (2, {}, "batches under policy recency"),
        (1, {"prefill_chunk_size": 8}, "prefill_chunk_size under policy recency"),
        (1, {"output_attentions": True}, "output_attentions under policy recency"),
    ],
)
def test_a_request_that_cannot_choose_is_refused_in_one_line(tmp_path, batch, options, named):
    with attach(model_of("llama"), tmp_path, policy=Recency()) as engine:
        with pytest.raises(Unsupported, match=named):
            engine.generate(prompts(10, batch=batch), max_new_tokens=1, **options)
        assert engine.last_request is None


def test_another_thread_on_the_model_gets_an_error_not_an_answer(tmp_path):
    model, ids = model_of("llama"), request_ids()
    with attach(model, tmp_path) as engine:
        name = ATTENTION_NAMES["sdpa"]
        with engine._turn.request():
            model.set_attn_implementation(name)  # as it is while a sparse request runs
            with pytest.raises(impress.ImpressError, match="another thread"):
                model(ids)
            with pytest.raises(Unsupported, match=name):
                engine.generate(ids)


class Asking:
    """A streamer that asks its engine for another answer after the first token."""

    def __init__(self, engine):
        self.engine, self.n_put = engine, 0

    def put(self, _value):
        self.n_put += 1
        if self.n_put == 2:
            self.engine.generate(prompts(100, seed=5), max_new_tokens=2)

    def end(self):
        pass


@pytest.mark.parametrize("hit", [0, HIT])
def test_a_request_within_another_of_its_thread_is_refused_saying_so(tmp_path, hit):
    """The error said that the model's attention was not supported, and to set another."""
    with attach(model_of("llama"), tmp_path, policy=Quality()) as engine:
        if hit:
            engine.generate(prompts(HIT), max_new_tokens=1)
            engine.flush()
        with pytest.raises(Unsupported, match="request of this model is under way in this thread"):
            engine.generate(request_ids(), max_new_tokens=4, streamer=Asking(engine))
        engine.generate(prompts(100, seed=5), max_new_tokens=2)


class Halting(tuple):
    """Rows by layer; asking for the second layer's waits for `go`."""

    def __init__(self, _rows):
        self.reached, self.go = threading.Event(), threading.Event()

    def __getitem__(self, layer):
        if layer == 1:
            self.reached.set()
            assert self.go.wait(60)
        return super().__getitem__(layer)


def test_two_engines_on_one_model_take_turns(tmp_path):
    """While rows are chosen the model attends in another way, whoever runs it: a second engine's
    request was refused, and one begun a moment before was answered without a mask."""
    model, ids, chosen = model_of("llama"), request_ids(), SIZES["different in each layer"]
    one, other = filled(model, tmp_path / "one"), filled(model, tmp_path / "other")
    halting = Halting(chosen)
    with one, other, ThreadPoolExecutor(3) as threads:
        options = {"max_new_tokens": 16, "do_sample": False, **LOGITS}
        sparse = threads.submit(one.generate, ids, policy=Given(halting), **options)
        assert halting.reached.wait(60)
        asked = [
            threads.submit(other.generate, ids, **options),
            threads.submit(attach, model, tmp_path / "third"),
        ]
        while one._turn.n_wanted < 3 and not any(each.done() for each in asked):
            pass
        halting.go.set()
        exact, third = (each.result(60) for each in asked)
        third.close()
        sparse = sparse.result(60)
    assert_same_bits(exact, continued(model, prompts(200), ids, HIT, n_new=16, do_sample=False))
    assert_matches(sparse, reference(model, ids, chosen))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_forward_without_the_engine_keeps_its_mask_beside_a_sparse_request(tmp_path, attention):
    """Its mask was made under an attention name that makes none. Before its first layer the sparse
    request ended, and the model's own attention, back again, let it see padded tokens."""
    model = model_of("llama", attention=attention)
    chosen = Halting(SIZES["only the last layer whole"])
    ids, shown = prompts(40, batch=2), torch.ones(2, 40, dtype=torch.bool)
    shown[0, :20] = False  # padded
    alone = model(ids, attention_mask=shown.long()).logits[shown]
    is_masked, go = threading.Event(), threading.Event()

    def wait(module, args):
        is_masked.set()
        assert go.wait(60)

    with filled(model, tmp_path) as engine, ThreadPoolExecutor(2) as threads:
        options = {"max_new_tokens": 1, "policy": Given(chosen)}
        sparse = threads.submit(engine.generate, request_ids(), **options)
        assert chosen.reached.wait(60)
        model.model.layers[0].register_forward_pre_hook(wait)  # the sparse request is past it
        plain = threads.submit(model, ids, attention_mask=shown.long())
        assert is_masked.wait(60)
        chosen.go.set()
        sparse.result(60)
        go.set()
        assert torch.equal(plain.result(60).logits[shown], alone)
