"""The guard in the engine: trust is earned by exact answers, watched, lost, and kept on disk."""

from __future__ import annotations

import gc
import json
import logging
import math
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import wait_for_promotions
from fire import of_fire, under_fire
from masked_reference import HIT, LOGITS, Watched, model_of, request_ids
from test_config_docs import PAGE
from test_engine_hf import (
    CONFIG,
    Closing,
    assert_same_bits,
    attach,
    damage,
    engine_threads,
    last_layer_keys,
    prompts,
)

import impress
from impress.cli.explain import explain
from impress.demo.lookup import tasks
from impress.demo.lookup.tasks import TASKS, document, questions
from impress.engines import hf, hf_audit, hf_storing
from impress.engines.choice import Rates
from impress.engines.hf_audit import Interrupted, Turn, Watch, weigh
from impress.engines.hf_output import hearing
from impress.engines.hf_prefix import find_prefix
from impress.errors import PrefixLost
from impress.policy import AllHeads, Exact, Quality, StaticH2O
from impress.quality import guard
from impress.quality.guard import Weighed
from impress.quality.names import name_of
from impress.read.reading import MOST_LESSONS, MOST_WAITING
from impress.read.shadow import SHADOW_ROWS, RerunSession
from impress.selection.choices import Selection
from impress.selection.identify import Asked, select
from impress.selection.scores import suffix_lse_of, true_missing_mass

N = 5  # shadows that earn trust here
#: What docs/CONFIG.md says of memory, in one line.
PLANNED = " ".join(re.findall(r"\nPlan with (.*?)\n## ", PAGE, re.DOTALL)[0].split())


pytestmark = pytest.mark.usefixtures("one_thread")


class NoRates(Rates):
    """Costs are unknown: the mode is the policy's own, or what the guard makes of it."""

    def estimate(self, *_):
        return {}


def guarded(model, path, policy, **options):
    changes = {"mode": "auto", "guard_shadows": N, "guard_share": 1.0, **options}
    engine = hf.attach(model, path, policy, config=CONFIG.model_copy(update=changes))
    engine._modes.rates = NoRates()
    return engine


def filled(model, path, policy, **options):
    engine = guarded(model, path, policy, **options)
    engine.generate(prompts(200), max_new_tokens=1, policy=Exact())
    engine.flush()
    return engine


def ask(engine, seed=2, n_new=1, **options):
    """A hit of HIT tokens, weighed when this returns; its result and the request."""
    ids = torch.cat([prompts(200)[:, :HIT], prompts(20, seed=seed)], 1)
    out = engine.generate(ids, max_new_tokens=n_new, do_sample=False, **options)
    engine.flush()
    return out, engine.last_request


def ledger_of(engine):
    (ledger,) = engine.store.stats()["guard"]
    return ledger


@dataclass(frozen=True)
class Liar:
    """Chooses every row but one while honest; when it lies, one row, with the same estimate."""

    lies: list[bool] = field(default_factory=list, init=False, repr=False)
    name: str = field(default="liar", init=False, repr=False)
    needs_suffix_lse: bool = field(default=False, init=False, repr=False)
    probe: str | None = field(default=None, init=False, repr=False)


@select.register
def _(policy: Liar, asked: Asked) -> Selection:
    rows = np.arange(1 if policy.lies else asked.n_tokens - 1)
    return Selection(rows, 0.05, 0.05, False, "given")


# --- earning --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lookup():
    import transformers

    where = Path(tasks.__file__).parent / "agreeing"
    return transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval()


def test_a_selector_earns_trust_by_exact_answers_and_goes_sparse(tmp_path, lookup, caplog):
    doc = document("test", 0, 512)
    asked = [q for task in TASKS for q in questions(doc, task, 3)]
    ids = [torch.tensor([[*doc.tokens, *q.tokens]]) for q in asked]
    with guarded(lookup, tmp_path, Quality(0.1), guard_share=0.0) as engine:
        engine.generate(torch.tensor([doc.tokens]), max_new_tokens=1)
        assert engine.last_request.guard == f"earning: 0 of {N} clean shadows"
        engine.flush()
        for n, prompt in enumerate(ids[:N]):
            mine = engine.generate(prompt, max_new_tokens=4, **LOGITS)
            engine.flush()
            assert engine.last_request.mode == "exact"
            assert engine.last_request.guard == f"earning: {n} of {N} clean shadows"
            exact = engine.generate(prompt, max_new_tokens=4, policy=Exact(), **LOGITS)
            assert_same_bits(mine, exact)
        with caplog.at_level(logging.INFO, "impress"):
            engine.generate(ids[N], max_new_tokens=4)
        request = engine.last_request
        assert (request.mode, request.guard) == ("sparse", "trusted")
        assert request.chosen_rows_share < 0.5
        ledger = ledger_of(engine)
        assert (ledger["state"], ledger["shadows"], ledger["exceeded"]) == ("trusted", N, 0)
        assert 0.02 < ledger["worst_missing_mass"] < 0.15  # it does choose, and is weighed
        assert engine.store.stats()["leases"] == 0
        assert engine.store.buffers.used_bytes == 0


def test_hits_that_take_every_row_earn_no_trust(tmp_path, lookup):
    """They left nothing out and so were clean: after N hits of one window, too short for a choice,
    a hit of eight was answered by a selector that had never been weighed."""
    doc = document("test", 0, 512)
    (question,) = questions(doc, TASKS[0], 1)
    short = torch.tensor([[*doc.tokens[:64], *question.tokens[:20]]])
    with guarded(lookup, tmp_path, Quality(0.1)) as engine:
        engine.generate(torch.tensor([doc.tokens]), max_new_tokens=1)
        engine.flush()
        for _ in range(N):
            engine.generate(short, max_new_tokens=1)
            engine.flush()
            assert (engine.last_request.mode, engine.last_request.hit_tokens) == ("exact", 64)
        engine.generate(torch.tensor([[*doc.tokens, *question.tokens]]), max_new_tokens=1)
        request = engine.last_request
        assert (request.mode, request.hit_tokens) == ("exact", 512)
        assert request.guard == f"earning: 0 of {N} clean shadows"
        engine.flush()
        ledger = ledger_of(engine)
        assert (ledger["shadows"], ledger["dropped"]) == (1, N)


def left_out(model, ids, chosen):
    """The softmax weight of the request's rows on prefix rows not chosen, by layer: [heads]."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    masses = []
    for weights, rows in zip(attentions, chosen, strict=True):
        hidden = torch.ones(HIT, dtype=torch.bool)
        hidden[slice(None) if rows is None else torch.from_numpy(np.array(rows))] = False
        masses.append(weights[0, :, HIT:, :HIT][..., hidden].sum(-1).mean(-1))
    return masses


@pytest.mark.parametrize("per", ["mean", "head"])
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_a_shadow_of_an_exact_request_weighs_what_would_have_been_left_out(tmp_path, family, per):
    @dataclass(frozen=True)
    class Bound(Watched):
        per: str = "mean"

    select.register(Bound, select.dispatch(Watched))
    model = model_of(family)
    policy = Bound(AllHeads(0.3), per=per)
    with filled(model, tmp_path, policy) as engine:
        weighed = []
        engine.store.ledgers.note = lambda key, found: weighed.append(found)
        _, request = ask(engine)
        assert request.mode == "exact"
        chosen = policy.rows
    ids = torch.cat([prompts(200)[:, :HIT], prompts(20, seed=2)], 1)
    masses = left_out(model, ids, chosen)
    assert [len(rows) for rows in chosen] == [39] * 3
    ((true, estimate),) = weighed
    fold = torch.Tensor.amax if per == "head" else torch.Tensor.mean
    assert true == pytest.approx(max(float(fold(mass)) for mass in masses), rel=1e-3)
    assert estimate == pytest.approx(true, rel=1e-3)  # both from the same keys


def test_a_request_longer_than_what_is_kept_is_judged_by_its_last_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("impress.engines.hf_prefix.SHADOW_ROWS", 16)
    monkeypatch.setattr("impress.engines.hf.SHADOW_ROWS", 16)
    with filled(model_of("llama"), tmp_path, Liar()) as engine:
        for n in range(N + 3):
            engine.generate(request_ids(80), max_new_tokens=1)
            engine.flush()
            assert engine.last_request.mode == ("exact" if n < N else "sparse")
        assert ledger_of(engine)["shadows"] == N + 3


@pytest.mark.parametrize("watched", [False, True], ids=["alone", "guarded"])
def test_memory_is_planned_for_all_requests_whose_rows_are_held(tmp_path, monkeypatch, watched):
    """The page spoke of the request that is being read for: on a CPU the rows of those before it,
    which waited to be stored or weighed, took several times what was planned."""
    go, stored, weighed, used = threading.Event(), threading.Event(), threading.Event(), []

    def held(real, begun):
        return lambda *args: begun.set() or (go.wait(60) and real(*args))

    def look(_ids, scores):
        wait_for_promotions(engine.store)
        used.append(engine.store.buffers.used_bytes)
        return scores

    with filled(model_of("llama"), tmp_path, Liar() if watched else Exact()) as engine:
        assert engine.store.buffers.used_bytes == 0
        monkeypatch.setattr(
            hf_storing.StoreQueue, "_store_rows", held(hf_storing.StoreQueue._store_rows, stored)
        )
        monkeypatch.setattr(hf_audit.Auditor, "_audit", held(hf_audit.Auditor._audit, weighed))
        try:
            for n in range(12):  # first hits with nothing new to store, then misses
                ids = prompts(200, seed=1 if n < 4 else n)
                engine.generate(ids, max_new_tokens=1, logits_processor=[look])
                assert n or not watched or weighed.wait(60)
                assert n != 4 or stored.wait(60)
        finally:
            go.set()
    n_most = hf_storing._MOST_WAITING + 2 + watched * (hf_audit._MOST_WAITING + 1)
    assert engine.n_skipped == 12 - 4 - hf_storing._MOST_WAITING - 1
    one = used[5] - used[4]  # of a miss: it holds nothing that it reads into besides
    assert max(used) == n_most * one > 0
    settings, rows = impress.Config(), 8192 * impress.Geometry(32, 32, 8, 128).token_bytes
    planned = settings.dram_bytes + settings.write_buffer_bytes + MOST_LESSONS
    for n in (1, n_most):
        n_bytes = planned + 2 * (MOST_WAITING + n * rows)
        assert f" {n_bytes / 2**30:.1f} GiB" in PLANNED
    assert f"rows of up to {n_most} requests" in PLANNED


# --- watching -------------------------------------------------------------------------------------


def test_a_policy_that_begins_to_lie_is_sent_back_and_earns_its_way_again(tmp_path, caplog):
    policy = Liar()
    with filled(model_of("llama"), tmp_path, policy) as engine:
        for seed in range(N):
            assert ask(engine, seed)[1].mode == "exact"
        assert ask(engine)[1].mode == "sparse"
        policy.lies.append(True)
        n_sparse = 0
        while ask(engine)[1].mode == "sparse":
            n_sparse += 1
            assert n_sparse < 10
        assert n_sparse == 3  # of the last 5: with 3 over, the bound is above twice that of 0
        (warned,) = [r.message for r in caplog.records if "back to exact" in r.message]
        assert "Liar()" in warned and "3 of the last 5" in warned
        ledger = ledger_of(engine)
        assert (ledger["state"], ledger["exceeded"], ledger["sent_back"]) == ("exact", 4, 1)
        assert ledger["understated"] == 4 and ledger["worst_missing_mass"] > 0.3
        policy.lies.clear()
        for seed in range(N):
            assert ask(engine, seed)[1].mode == "exact"
        assert ask(engine)[1].mode == "sparse"


@pytest.mark.parametrize("mode", ["Exact", "exact", "sparse"])
def test_an_answer_longer_than_the_time_limit_leaks_no_lease(tmp_path, caplog, mode):
    """What is to be weighed kept its lease behind the first token: of a long answer it was taken
    back as one that nobody had released, and until then background work stood back for it."""
    now, leases, store = [1000.0], [], None

    def slow(_ids, scores):  # behind each pass
        wait_for_promotions(store)
        store._leases.reap()
        stats = store.stats()
        leases.append((store._leases.busy(), stats["leases"], stats["pinned_spans"]))
        now[0] += 32.0
        return scores

    policy = Exact() if mode == "Exact" else Liar()
    options = {"lease_timeout_s": 60.0, "read_timeout_s": 5.0, "guard_shadows": 1}
    with filled(model_of("llama"), tmp_path, policy, **options) as engine:
        store = engine.store
        if mode == "sparse":  # a clean shadow earns that
            ask(engine)
        store._leases.clock = lambda: now[0]
        ask(engine, n_new=4, logits_processor=[slow])
        assert engine.last_request.mode == mode.lower()
        kept = int(mode != "Exact")
        assert leases[0][:2] == (True, 1)
        assert leases[1:] == [(False, kept, kept), (False, kept, kept), (False, 0, 0)]
        stats = store.stats()
        assert (stats["leases"], stats["expired_leases"]) == (0, 0)
        assert mode == "Exact" or ledger_of(engine)["dropped"] == 1
    assert "never released" not in caplog.text


def test_a_sparse_shadow_weighs_the_answers_own_selection(tmp_path):
    policy = Liar()
    with filled(model_of("llama"), tmp_path, policy, guard_shadows=1) as engine:
        ask(engine)
        policy.lies.append(True)
        ids = torch.cat([prompts(200)[:, :HIT], prompts(20, seed=2)], 1)
        engine._auditor.offer = lambda watch: (policy.lies.clear(), offer(watch))
        offer = type(engine._auditor).offer.__get__(engine._auditor)
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        assert engine.last_request.mode == "sparse"
        assert ledger_of(engine)["worst_missing_mass"] > 0.3  # not that of a new selection


def test_a_long_sparse_request_is_weighed_by_what_it_was_served(open_store):
    """With more query rows than are kept, the shadow chose again by the kept ones. Here the last 30
    of 1,280, say a question, look at rows that the request left out, as 30 are few; of the last 256
    they are many, so the shadow chose those rows and called the request clean."""
    store = open_store(impress.Geometry(1, 2, 2, 16, "float32"))
    tokens, n_new, n_question = np.arange(129, dtype=np.int32), 1280, 30
    keys, new_keys = torch.zeros(2, 128, 16), torch.zeros(2, n_new, 16)
    keys[:, :8, 0] = keys[:, 64:72, 1] = 3.0
    query = torch.zeros(2, n_new, 16)
    query[:, :-n_question, 0] = query[:, -n_question:, 1] = 4.0
    store.store(tokens[:128], [keys], [keys]).wait(60)
    policy = Quality()
    prefix, _ = find_prefix(store, [tokens])
    prefix.open(policy)
    prefix.seen = {}
    served, _ = prefix.choose(0, query, new_keys, 1.0)
    assert torch.equal(served, keys[:, :8])
    watch = Watch(b"", policy, prefix.lend(), 128 + n_new, prefix.seen)
    assert prefix.close()
    weighed = weigh(watch, 1, lambda: None)
    watch.drop()
    kept = slice(-SHADOW_ROWS, None)
    suffix_lse = suffix_lse_of(query, new_keys, 1.0)
    true = true_missing_mass(query[:, kept], keys, 1.0, suffix_lse[:, kept], np.arange(8)).mean()
    assert true == pytest.approx(n_question / SHADOW_ROWS, rel=0.01)
    assert weighed.true_mass == pytest.approx(true)
    ledger = guard.Ledger(policy.max_missing_mass, 300)
    ledger.note(weighed)
    # its estimate is for all 1,280 rows, and right for them
    assert (ledger.n_exceeded, ledger.n_understated) == (1, 0)


def test_nothing_of_a_request_is_held_once_it_is_weighed(tmp_path):
    """The thread held its last watch, on a GPU with all query rows, as it waited for the next."""
    with filled(model_of("llama"), tmp_path, Liar(), guard_shadows=1) as engine:
        ask(engine)
        offer, held = engine._auditor.offer, []

        def noted(watch):
            held.extend(weakref.ref(seen.query) for seen in watch.seen.values())
            offer(watch)

        engine._auditor.offer = noted
        assert ask(engine)[1].mode == "sparse"
        gc.collect()
        assert [query() for query in held] == [None] * 3


def test_some_shadows_are_run_again_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "RERUN_EVERY", 1)
    model, policy = model_of("llama"), Liar()
    with filled(model, tmp_path, policy, guard_shadows=1) as engine:
        ask(engine)
        policy.lies.append(True)
        sparse, request = ask(engine, n_new=12, **LOGITS)
        assert request.mode == "sparse"
        ledger = ledger_of(engine)
        exact, _ = ask(engine, policy=Exact(), **LOGITS)
        assert engine.store.buffers.used_bytes == 0 and engine.store.stats()["leases"] == 0
    p, q = (out.logits[0][0].double().log_softmax(-1) for out in (exact, sparse))
    assert ledger["worst_kl"] == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-3)
    with torch.no_grad():  # for each token that came, whether the full model would have given it
        logits = model(sparse.sequences[:, :-1]).logits[0, -12:]
    flips = int((logits.argmax(-1) != sparse.sequences[0, -12:]).sum())
    assert (ledger["reruns"], ledger["compared"], ledger["flips"]) == (1, 12, flips)
    assert flips > 0


def test_what_is_run_again_is_no_use_of_the_prefix(tmp_path, monkeypatch):
    """Each rerun taught the history a use of every chunk, counted the rows as given to a request,
    and made the whole prefix climb. Later its bytes were still counted as given to a request, and
    caches that go by the latest use took it for one."""
    monkeypatch.setattr(guard, "RERUN_EVERY", 1)
    policy, shown = Liar(), []

    def state(store):
        assert store._pool.idle(60)
        stats = store.stats()
        used = store._copies.chunks[0]._used.tolist()
        return (
            store.history.tick,
            used,
            *(stats[name] for name in ("rows_from", "promotions", "read_bytes")),
        )

    def watched(model, store, *rest):
        shown.append(state(store))
        again = real(model, store, *rest)
        shown.append(state(store))
        return again

    real = hf_audit.rerun
    monkeypatch.setattr(hf_audit, "rerun", watched)
    with filled(model_of("llama"), tmp_path, policy, guard_shadows=1) as engine:
        ask(engine)
        policy.lies.append(True)
        engine.store.drop_caches()
        assert ask(engine)[1].mode == "sparse"
        assert ledger_of(engine)["reruns"] == 1
    before, after = shown
    assert after == before


def test_what_is_run_again_gives_its_rows_back_within_its_turn(tmp_path, monkeypatch):
    """Otherwise the next request finds them on the device beside its own."""
    monkeypatch.setattr(guard, "RERUN_EVERY", 1)
    with filled(model_of("llama"), tmp_path, Liar(), guard_shadows=1) as engine:
        ask(engine)
        held = []  # at the start and the end of each turn
        monkeypatch.setattr(
            engine._auditor, "_same", lambda: held.append(engine.store.buffers.used_bytes > 0)
        )
        assert ask(engine)[1].mode == "sparse"
        assert ledger_of(engine)["reruns"] == 1 and held == [False, False, True, False]


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_models_answers_are_run_again_too(tmp_path, monkeypatch, caplog):
    """torch.compile's wrapper passes generate on, so a hook on the wrapper heard nothing: each
    rerun was a traceback, and its shadow was also counted as dropped."""
    monkeypatch.setattr(guard, "RERUN_EVERY", 1)
    counts = []
    for model in (model_of("llama"), torch.compile(model_of("llama"), backend="eager")):
        with filled(model, tmp_path / str(len(counts)), Liar(), guard_shadows=1) as engine:
            ask(engine)
            assert ask(engine, n_new=4)[1].mode == "sparse"
            ledger = ledger_of(engine)
            counts.append([ledger[name] for name in ("shadows", "dropped", "reruns", "compared")])
    assert counts == [[2, 0, 1, 4]] * 2 and not caplog.records


@pytest.mark.parametrize("heard", [True, False])
def test_an_answer_that_cannot_be_run_again_stays_one_shadow(tmp_path, monkeypatch, heard):
    def fails(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(guard, "RERUN_EVERY", 1)
    monkeypatch.setattr(hf_audit, "rerun", fails)
    if not heard:
        monkeypatch.setattr(hf_audit.RawLogits, "note", lambda *_: None)
    with filled(model_of("llama"), tmp_path, Liar(), guard_shadows=1) as engine:
        ask(engine)
        assert ask(engine)[1].mode == "sparse"
        ledger = ledger_of(engine)
    assert (ledger["shadows"], ledger["dropped"], ledger["reruns"]) == (2, 0, 0)


def test_an_interrupt_as_a_rerun_is_to_be_heard_leaves_no_hook(monkeypatch):
    """There was no handle yet to remove it by: every later request was refused for a hook that the
    caller had never set."""
    model, register = model_of("llama"), torch.nn.Module.register_forward_hook

    def interrupted(module, hook):
        register(module, hook)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.nn.Module, "register_forward_hook", interrupted)
    with pytest.raises(KeyboardInterrupt), hearing(model, None, hf_audit.RawLogits()):
        pass
    assert not model._forward_hooks


def trained_on(model):
    with torch.no_grad():
        model.lm_head.weight.mul_(2)


@pytest.mark.parametrize("change", [torch.nn.Module.train, trained_on])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_model_that_changed_since_its_answer_is_not_compared_with_it(
    tmp_path, monkeypatch, change, when
):
    """The KL between two models was charged to the policy, and kept on disk."""
    monkeypatch.setattr(guard, "RERUN_EVERY", 1)
    model, rerun, answered = model_of("llama"), hf_audit.rerun, threading.Event()

    def held(self):
        assert answered.wait(60)

    def run(*given):
        if when == "meanwhile":
            change(model)
        return rerun(*given)

    with filled(model, tmp_path, Liar(), guard_shadows=1) as engine:
        ask(engine)
        monkeypatch.setattr(Turn, "wait", held)
        monkeypatch.setattr(hf_audit, "rerun", run)
        engine.generate(request_ids(20), max_new_tokens=4)
        assert engine.last_request.mode == "sparse"
        if when == "before":
            change(model)
        answered.set()
        engine.flush()
        ledger = ledger_of(engine)
        assert (ledger["shadows"], ledger["dropped"], ledger["reruns"]) == (2, 0, 0)
        assert ledger["worst_kl"] == 0


#: When an audit of three layers asks whether a request has come: at its first turn, before it reads
#: each layer, at its second turn, before it computes each layer.
ASKS = range(1, 9)
AT_THE_SECOND_LAYER = ASKS[6]


@pytest.mark.parametrize("when", ASKS)
def test_what_is_run_again_makes_way_for_a_request(tmp_path, monkeypatch, when):
    monkeypatch.setattr(guard, "RERUN_EVERY", 1)
    with filled(model_of("llama"), tmp_path, Liar(), guard_shadows=1) as engine:
        ask(engine)
        seen, ended, end_reads = [], [], hf_audit.end_reads

        def come(self):
            seen.append(1)
            if len(seen) == when:
                raise Interrupted

        monkeypatch.setattr(Turn, "check", come)
        monkeypatch.setattr(hf_audit, "end_reads", lambda *of: (ended.append(1), end_reads(*of)))
        assert ask(engine)[1].mode == "sparse"
        ledger = ledger_of(engine)
        assert (ledger["shadows"], ledger["reruns"], len(seen)) == (2, 0, when)
        assert len(ended) == (when > 1)  # before its first turn it reads nothing
        assert engine.store.buffers.used_bytes == 0 and engine.store.stats()["leases"] == 0


def test_a_request_does_not_wait_for_what_is_read_to_be_run_again(tmp_path, monkeypatch):
    """An audit held the model's turn while its rows came after everybody else's: a request, even
    one with nothing stored, waited for up to read_timeout_s per layer."""
    monkeypatch.setattr(guard, "RERUN_EVERY", 1)
    model, retrieve, answered = model_of("llama"), RerunSession.retrieve, []
    with filled(model, tmp_path, Liar(), guard_shadows=1) as engine:
        ask(engine)
        with ThreadPoolExecutor(1) as threads:

            def slowly(session, layer, *given):
                one = threads.submit(engine.generate, prompts(10, seed=9), max_new_tokens=1)
                answered.append(one.result(60))
                return retrieve(session, layer, *given)

            monkeypatch.setattr(RerunSession, "retrieve", slowly)
            engine.generate(request_ids(20), max_new_tokens=2)
            assert engine.last_request.mode == "sparse"
            engine.flush()
        assert len(answered) == 3 and ledger_of(engine)["reruns"] == 1


def test_an_audit_never_begins_beside_a_request():
    turn = Turn()
    with turn.audit():
        turn.check()
    entered = []
    with turn.request():
        with pytest.raises(Interrupted):
            turn.check()
        with pytest.raises(Interrupted), turn.audit():
            entered.append(1)
    assert not entered
    with turn.audit():
        turn.check()


def test_a_request_that_waits_is_not_forgotten_when_another_ends():
    """An audit between two requests went on for a whole forward, and the waiting one waited."""
    turn = Turn()

    def request():
        with turn.request():
            pass

    waiting = threading.Thread(target=request)
    with turn.audit():
        waiting.start()
        while not turn.n_wanted:
            pass
        request()  # in the audit's own thread, which is allowed
        with pytest.raises(Interrupted):
            turn.check()
    waiting.join(60)
    turn.check()


@of_fire
def test_signals_leave_a_turn_that_works():
    """An Event's condition is in Python: a signal just after its lock was taken left it taken, and
    the next request hung. Or a request stayed counted, and no audit ever had its turn."""
    turn = Turn()

    def act():
        with turn.request(), turn.request():
            pass

    under_fire(act, 300)
    assert (turn.n_wanted, turn._inside) == (0, set())
    with ThreadPoolExecutor(1) as threads, turn.audit():
        turn.check()
        assert not threads.submit(turn._lock.acquire, blocking=False).result(60)
    with ThreadPoolExecutor(1) as threads:  # nobody holds the lock any more
        assert threads.submit(turn._lock.acquire, blocking=False).result(60)


@pytest.mark.parametrize(
    ("layers", "estimate"),
    [
        ([(0.07, 0.05), (0.01, 0.09)], 0.05),  # the first is over by .02, whatever the second says
        ([(0.07, 0.08), (0.01, 0.0)], 0.06),
        ([(0.07, math.nan), (0.01, 0.0)], math.nan),
    ],
)
def test_a_layer_that_was_understated_is_not_hidden_by_another(monkeypatch, layers, estimate):
    """The largest true mass was compared with the largest estimate, of whichever layers."""

    class Session:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def weigh(self, layer, *_):
            return Weighed(*layers[layer])

    monkeypatch.setattr(hf_audit, "ShadowSession", Session)
    watch = SimpleNamespace(lease=None, policy=None, layer=lambda layer: (True, None))
    weighed = hf_audit.weigh(watch, len(layers), lambda: None)
    assert weighed == pytest.approx(Weighed(0.07, estimate), nan_ok=True)


def test_an_audit_makes_way_for_another_engine_on_its_model(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "RERUN_EVERY", 1)
    model, ids, check = model_of("llama"), prompts(100), Turn.check
    engine = filled(model, tmp_path / "guarded", Liar(), guard_shadows=1)
    with engine, attach(model, tmp_path / "other") as other, ThreadPoolExecutor(1) as threads:
        ask(engine)
        seen, asked = [], []

        def come(turn):
            seen.append(1)
            if len(seen) == AT_THE_SECOND_LAYER:
                asked.append(threads.submit(other.generate, ids, max_new_tokens=4))
                while not turn.n_wanted and not asked[0].done():
                    pass
            check(turn)

        monkeypatch.setattr(Turn, "check", come)
        assert ask(engine)[1].mode == "sparse"
        assert (ledger_of(engine)["reruns"], len(seen)) == (0, AT_THE_SECOND_LAYER)
        found = asked[0].result(60)
    assert torch.equal(found, model.generate(ids, max_new_tokens=4))


def test_watches_that_find_no_room_or_no_rows_are_dropped_and_leave_nothing(tmp_path, monkeypatch):
    def lost(*_):
        raise PrefixLost("late", "told to be")

    with filled(model_of("llama"), tmp_path, Liar()) as engine:
        ask(engine)
        with monkeypatch.context() as patched:
            patched.setattr(hf_audit, "weigh", lost)
            ask(engine)
        with monkeypatch.context() as patched:
            patched.setattr(engine._auditor._line, "limit", 0)
            engine.generate(request_ids(), max_new_tokens=1)
        engine.flush()
        ledger = ledger_of(engine)
        assert (ledger["shadows"], ledger["dropped"]) == (1, 2)
        assert engine.store.buffers.used_bytes == 0 and engine.store.stats()["leases"] == 0


def test_a_watch_of_a_request_that_closes_its_engine_is_dropped_and_leaves_nothing(tmp_path):
    before = engine_threads()
    engine = filled(model_of("llama"), tmp_path, Liar())
    engine.generate(request_ids(), max_new_tokens=2, streamer=Closing(engine, beside=False))
    assert engine.last_request.hit_tokens == HIT and engine_threads() <= before
    assert engine.store.buffers.used_bytes == 0 and engine.store.stats()["leases"] == 0


def test_a_prefix_lost_under_watch_is_computed_and_leaves_nothing(tmp_path):
    model = model_of("llama")
    with filled(model, tmp_path, Liar(), dram_bytes=0) as engine:
        damage(tmp_path, last_layer_keys(model, prompts(200), HIT - 1))
        _, request = ask(engine)
        assert (request.mode, request.hit_tokens) == ("recompute", 0) and request.lost
        # Not counted, such tries had no end.
        assert (ledger_of(engine)["shadows"], ledger_of(engine)["dropped"]) == (0, 1)
        assert engine.store.buffers.used_bytes == 0 and engine.store.stats()["leases"] == 0


# --- where it is on -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "call"),
    [({"guard": "off"}, {}), ({"mode": "sparse"}, {}), ({}, {"policy": Liar()})],
)
def test_it_is_off_where_the_mode_or_the_policy_is_named(tmp_path, config, call):
    with filled(model_of("llama"), tmp_path, Liar(), **config) as engine:
        _, request = ask(engine, **call)
        assert (request.mode, request.guard) == ("sparse", "off")
        assert all(not ledger["requests"] for ledger in engine.store.stats()["guard"])


def test_a_policy_of_every_row_needs_no_trust(tmp_path):
    with filled(model_of("llama"), tmp_path, Exact()) as engine:
        assert ask(engine)[1].guard == "off" and engine.store.stats()["guard"] == []


def test_attention_that_cannot_be_observed_stays_exact_and_says_so(tmp_path, caplog):
    model = model_of("llama")
    model.set_attn_implementation("eager")
    with filled(model, tmp_path, Liar(), guard_shadows=1) as engine:
        assert "eager attention cannot be observed" in caplog.text
        for _ in range(3):
            assert ask(engine)[1].mode == "exact"
        ledger = ledger_of(engine)
        assert (ledger["requests"], ledger["shadows"], ledger["dropped"]) == (0, 0, 0)


def test_trust_earned_where_attention_is_seen_chooses_nothing_where_it_is_not(tmp_path):
    """The log said that hits stay exact, but a ledger saved earlier made them sparse."""
    model = model_of("llama")
    with filled(model, tmp_path, Liar(), guard_shadows=1) as engine:
        ask(engine)
        assert ask(engine)[1].mode == "sparse"
    model.set_attn_implementation("eager")
    with guarded(model, tmp_path, Liar(), guard_shadows=1) as engine:
        kept = ledger_of(engine)
        assert kept["state"] == "trusted"
        for _ in range(2):
            _, request = ask(engine)
            assert (request.mode, request.hit_tokens) == ("exact", HIT)
            assert request.guard == "eager attention cannot be observed"
        assert ledger_of(engine) == kept
        model.set_attn_implementation("sdpa")
        assert ask(engine)[1].mode == "sparse"


def test_what_a_policy_cannot_do_is_no_shadow(tmp_path, caplog):
    model = model_of("llama")
    with guarded(model, tmp_path, Exact()) as engine:  # stores no importance
        engine.generate(prompts(200), max_new_tokens=1)
    with guarded(model, tmp_path, StaticH2O(), guard_shadows=1) as engine:
        assert ask(engine)[1].mode == ask(engine)[1].mode == "exact"
        assert ledger_of(engine)["dropped"] == 2
    assert caplog.text.count("stored without importance") == 1  # not once per request


# --- keeping and showing --------------------------------------------------------------------------


def test_a_restart_keeps_the_ledger_and_a_damaged_one_begins_again(tmp_path):
    model = model_of("llama")
    with filled(model, tmp_path, Liar()) as engine:
        for seed in range(N - 1):
            ask(engine, seed)
    with guarded(model, tmp_path, Liar()) as engine:
        assert ask(engine)[1].guard == f"earning: {N - 1} of {N} clean shadows"
        kept = ledger_of(engine)
    with guarded(model, tmp_path, Liar()) as engine:
        assert ledger_of(engine) == kept and kept["state"] == "trusted"
        assert ask(engine)[1].mode == "sparse"
    with guarded(model, tmp_path, Liar(), guard_missing_mass=0.2) as engine:
        assert ask(engine)[1].guard.startswith("earning: 0 of")  # trust under another target
    with guarded(model, tmp_path, Exact()) as engine:
        ((key, _),) = engine.store.index.ledgers()
        engine.store.index.save_history({}, 0, {key: b"damaged"}, {})
    with guarded(model, tmp_path, Liar()) as engine:
        assert ask(engine)[1].guard.startswith("earning: 0 of")


def test_an_identifier_that_was_edited_earns_its_own_trust(tmp_path):
    """The old identifier had earned the trust, and the edited one was served from its first hit."""
    model = model_of("llama")

    @dataclass(frozen=True)
    class Mine:
        name: str = "mine"
        needs_suffix_lse: bool = False
        probe: str | None = None

    def all_but_one(policy, asked):
        return Selection(np.arange(asked.n_tokens - 1), 0.05, 0.05, False, "given")

    def one(policy, asked):
        return Selection(np.arange(1), 0.05, 0.05, False, "given")

    modes = []
    for identifier in (all_but_one, all_but_one, one):
        select.register(Mine, identifier)
        start = filled if not modes else guarded
        with start(model, tmp_path, Mine(), guard_shadows=2) as engine:
            modes += [ask(engine)[1].mode for _ in range(3)]
    assert modes == ["exact"] * 2 + ["sparse"] * 4 + ["exact"] * 3


def test_metrics_and_explain_show_the_ledger(tmp_path, capsys):
    import urllib.request

    model, ids = model_of("llama"), tmp_path / "ids.json"
    ids.write_text(json.dumps(prompts(200)[0].tolist()))

    def told():
        explain(prefix=ids, store=tmp_path / "store", json_file=tmp_path / "told.json")
        return json.loads((tmp_path / "told.json").read_text())["found"][0]["guard"]

    with filled(model, tmp_path / "store", Exact()):
        pass
    assert told() == [] and "guard: –" in capsys.readouterr().out
    with guarded(model, tmp_path / "store", Liar(), metrics_port=0) as engine:
        ask(engine)
        with urllib.request.urlopen(f"http://127.0.0.1:{engine.store.metrics_port}") as answer:
            lines = answer.read().decode().splitlines()
        name = name_of(Liar())
        label = f'{{namespace="{engine.store.namespace.hex()[:16]}",policy="{name}"}}'
        assert f"impress_guard_shadows_total{label} 1.0" in lines
        assert f"impress_guard_trusted{label} 0.0" in lines
        shown = engine.store.stats()["guard"]
    assert told() == shown
    said = capsys.readouterr().out
    assert f"guard: {name} is earning: 1 of {N} clean shadows; of 1 shadows 0 missed" in said
