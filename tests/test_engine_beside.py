"""A caller's code that runs the model within a request: neither answer knows of the other.

A processor, a criterion and a streamer are called by generate(), in the request's own thread, while
the model attends as the engine makes it.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import transformers
from masked_reference import LOGITS, Given, filled, model_of, pick, request_ids
from test_engine_guard import ask, guarded, ledger_of
from test_engine_hf import Heard, assert_same_bits, attach, prompts, tiny
from test_engine_observed import stored_importance
from transformers.generation import UnbatchedClassifierFreeGuidanceLogitsProcessor as Guidance

from impress.policy import Exact, Quality
from impress.quality import guard
from impress.selection.choices import Selection
from impress.selection.identify import Asked, select

ROWS = (pick(1, 5), pick(2, 100), pick(3, 31))
GREEDY = {"do_sample": False, **LOGITS}


pytestmark = pytest.mark.usefixtures("one_thread")


def two_padded():
    """Two prompts, the first padded on the left, and the mask of the tokens that are shown."""
    shown = torch.ones(2, 40, dtype=torch.long)
    shown[0, :20] = 0
    return prompts(40, batch=2, seed=7), shown


class Running(transformers.LogitsProcessor):
    """Changes nothing; runs the model on other prompts in each pass and keeps what it said."""

    def __init__(self, model):
        self.model, self.said = model, []
        self.ids, self.shown = two_padded()

    def __call__(self, input_ids, scores):
        self.run()
        return scores

    def run(self):
        logits = self.model(self.ids, attention_mask=self.shown).logits
        self.said.append(logits[self.shown == 1])


class RunningStreamer(Heard):
    """The same, as a streamer, which is called before the prompt's own pass, too."""

    def __init__(self, running):
        super().__init__()
        self.running = running

    def put(self, value):
        self.running.run()
        super().put(value)


def beside(running, kind):
    """`running` as an argument of generate()."""
    if kind == "streamer":
        return {"streamer": RunningStreamer(running)}
    return {"logits_processor": transformers.LogitsProcessorList([running])}


@pytest.mark.parametrize("kind", ["processor", "streamer"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_a_model_run_within_a_sparse_request_sees_its_own_mask(tmp_path, family, attention, kind):
    """The run got no mask: padded prompts attended to their pads, and wrong tokens came of it."""
    model, ids = model_of(family, attention=attention), request_ids()
    running = Running(model)
    with torch.no_grad():
        running.run()
    alone = running.said.pop()
    with filled(model, tmp_path, policy=Given(ROWS)) as engine:
        want = engine.generate(ids, max_new_tokens=6, **GREEDY)
        mine = engine.generate(ids, max_new_tokens=6, **beside(running, kind), **GREEDY)
        assert engine.last_request.mode == "sparse"
    assert len(running.said) == 6 + (kind == "streamer")  # a streamer gets the prompt, too
    for said in running.said:
        assert torch.equal(said, alone)
    assert_same_bits(mine, want)


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_a_model_run_within_a_sparse_request_gives_its_attention_weights(tmp_path, family):
    """Under eager attention a model does; here it gave none, as it ran the request's sdpa."""
    model, seen = model_of(family, attention="eager"), []
    ids, shown = two_padded()

    def looking(_ids, scores):
        with torch.no_grad():
            seen.append(model(ids, attention_mask=shown, output_attentions=True).attentions)
        return scores

    looking(None, None)
    alone = seen.pop()
    assert len(alone) == 3
    with filled(model, tmp_path, policy=Given(ROWS)) as engine:
        engine.generate(request_ids(), max_new_tokens=2, logits_processor=[looking])
        assert engine.last_request.mode == "sparse"
    assert len(seen) == 2
    for found in seen:
        for mine, theirs in zip(found, alone, strict=True):
            assert torch.equal(mine, theirs)


def test_guidance_by_a_processor_of_the_callers_is_that_of_a_masked_prompt(tmp_path):
    """Guidance's second prompt grows token by token, in its own cache: its pads were seen."""
    model, ids = model_of("llama"), request_ids()
    other, shown = two_padded()

    def guiding():
        return Guidance(1.5, model, other[:1], shown[:1])

    def by_hand(input_ids, scores):
        """The same from the whole second prompt, each time, outside any request."""
        n_new = input_ids.shape[1] - ids.shape[1]
        second = torch.cat([other[:1], input_ids[:, input_ids.shape[1] - n_new :]], 1)
        mask = torch.cat([shown[:1], torch.ones(1, n_new, dtype=torch.long)], 1)
        with torch.no_grad():
            says = model(second, attention_mask=mask).logits[:, -1].log_softmax(-1)
        return says + 1.5 * (scores.log_softmax(-1) - says)

    with filled(model, tmp_path, policy=Given(ROWS)) as engine:
        mine = engine.generate(
            ids, max_new_tokens=12, logits_processor=[guiding()], output_scores=True, **GREEDY
        )
        assert engine.last_request.mode == "sparse"
    for n, (logits, scores) in enumerate(zip(mine.logits, mine.scores, strict=True)):
        want = by_hand(mine.sequences[:, : ids.shape[1] + n], logits)
        torch.testing.assert_close(scores, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_what_another_run_of_the_model_asks_is_not_a_prompts_importance(tmp_path, batch):
    """The other run's rows were taken for the prompt's: wrong ones were important for good, and
    with a batch larger than the other run's the storing thread raised IndexError."""
    found = []
    for name in ("alone", "beside"):
        model, ids = tiny("llama"), prompts(200, batch=batch)
        options = beside(Running(model), "processor") if name == "beside" else {}
        with attach(model, tmp_path / name, policy=Quality(0.1)) as engine:
            engine.generate(ids, max_new_tokens=3, policy=Exact(), do_sample=False, **options)
            engine.flush()
            found.append(stored_importance(engine))
    assert len(found[0]) == len(found[1]) == batch
    for alone, other in zip(*found, strict=True):
        assert np.array_equal(other, alone)


class Parked(Heard):
    """A streamer that holds its request when the prompt comes, before the model's first pass."""

    def __init__(self):
        super().__init__()
        self.came, self.let_go = threading.Event(), threading.Event()

    def put(self, value):
        self.came.set()
        assert self.let_go.wait(60)
        super().put(value)


@pytest.mark.parametrize("mode", ["recompute", "sparse"])
def test_a_model_with_more_layers_may_be_run_within_a_request(tmp_path, mode):
    """If the deeper model also had a request under way in another thread, its later layers were
    looked for in this request's cache: generate() raised IndexError."""
    small, deep = tiny("llama"), tiny("llama", num_hidden_layers=4)
    ids = request_ids() if mode == "sparse" else prompts(150, seed=9)
    running, parked, found = Running(deep), Parked(), []
    with torch.no_grad():
        running.run()
    alone = running.said.pop()
    with (
        filled(deep, tmp_path / "deep", policy=Given((*ROWS, None))) as other,
        ThreadPoolExecutor(1) as thread,
    ):
        held = thread.submit(other.generate, ids, max_new_tokens=2, streamer=parked)
        try:
            assert parked.came.wait(60)
            for name in ("alone", "beside"):
                options = beside(running, "processor") if name == "beside" else {}
                with filled(small, tmp_path / name, policy=Given(ROWS[:2])) as engine:
                    out = engine.generate(ids, max_new_tokens=4, **options, **GREEDY)
                    assert engine.last_request.mode == mode
                    engine.flush()
                    found.append((out, stored_importance(engine)))
        finally:
            parked.let_go.set()
        held.result()
        assert other.last_request.mode == mode
    assert len(running.said) == 4
    for said in running.said:
        assert torch.equal(said, alone)
    (want, was), (mine, now) = found
    assert_same_bits(mine, want)
    assert len(now) == len(was) == (2 if mode == "recompute" else 1)
    for one, other_one in zip(now, was, strict=True):
        assert np.array_equal(one, other_one)


@dataclass(frozen=True)
class AllButOne:
    """Leaves out one row, so that there is a choice to be weighed, and hardly anything changes."""

    name: str = field(default="all_but_one", repr=False)
    needs_suffix_lse: bool = field(default=False, repr=False)
    probe: str | None = field(default=None, repr=False)


@select.register
def _(policy: AllButOne, asked: Asked) -> Selection:
    return Selection(np.arange(1, asked.n_tokens), 0.01, 0.01, False, "given")


def test_another_run_of_the_model_is_no_part_of_an_answer_that_is_run_again(tmp_path, monkeypatch):
    """The guard took the run for passes of the request: tokens were said to have flipped."""
    monkeypatch.setattr(guard, "RERUN_EVERY", 1)
    model = model_of("llama")
    with guarded(model, tmp_path, AllButOne(), guard_shadows=1) as engine:
        engine.generate(prompts(200), max_new_tokens=1, policy=Exact())
        engine.flush()
        ask(engine)
        _, request = ask(engine, n_new=8, **beside(Running(model), "processor"))
        assert request.mode == "sparse"
        ledger = ledger_of(engine)
    assert (ledger["reruns"], ledger["compared"], ledger["flips"]) == (1, 8, 0)
    assert ledger["worst_kl"] < 1e-3  # of the row that is left out
