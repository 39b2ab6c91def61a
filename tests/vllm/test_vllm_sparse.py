"""Sparse prefixes inside vLLM: rows chosen by each layer's own query, beside exact requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM has an environment of its own: make test-vllm")

import torch

import impress
from impress.config import Config
from impress.demo.lookup import tasks
from impress.engines.vllm import settings as vllm_settings
from impress.engines.vllm.blocks import BlockLayout
from impress.errors import PrefixLost
from impress.namespace import namespace_of
from impress.policy import KeepAll, Paper, Quality
from impress.read.sparse import SparseSession
from tests.vllm.served import SMALL, Served, params, tokens, words

Serve = Callable[..., Served]

LOOKUP = Path(impress.__file__).parent / "demo" / "lookup" / "agreeing"
PROBES = ("heads3-v1", "int4-v2")
HALF = {"name": "recency", "keep": 0.5}  # ignores queries: easy to say what it must choose

DOCUMENT = words(700, seed=1)
QUESTIONS = [DOCUMENT + words(20 + i, seed=10 + i) for i in range(8)]
HIT = 640
N_NEW = 16


def _stored(serve: Serve, *args: Any, floor: Any = None, **named: Any) -> Served:
    """An engine whose store holds the document, and whose own cache is empty."""
    served = serve(*args, extra={"floor": floor or HALF}, **named)
    served.ask(QUESTIONS[:1])
    served.forget()
    return served


@pytest.mark.parametrize(("model", "dtype"), [("opt", "float32"), ("llama", "bfloat16")])
def test_keeping_everything_is_exact(serve: Serve, model: str, dtype: str) -> None:
    served = _stored(serve, model, dtype)
    exact = served.ask(QUESTIONS)
    served.forget()
    sparse = served.ask(QUESTIONS, policy={"name": "keep_all"})
    assert {answer.said.get("mode") for answer in exact} <= {"exact", None}
    assert [answer.said["mode"] for answer in sparse] == ["sparse"] * 8
    assert [answer.said["chosen_rows_share"] for answer in sparse] == [1.0] * 8
    assert [answer.n_cached for answer in sparse] == [HIT] * 8
    assert tokens(sparse) == tokens(exact)


def test_sparse_and_exact_requests_share_a_batch(serve: Serve) -> None:
    """Each answers as it does alone, on whichever side of the batch it stands."""
    served = _stored(serve)
    alone = [served.ask([q], policy=HALF)[0] for q in QUESTIONS]
    served.forget()
    exact = served.ask(QUESTIONS)
    served.forget()
    policies = [HALF if i % 2 else None for i in range(8)]
    mixed = served.ask_each(QUESTIONS, 10, policies)
    modes = [answer.said.get("mode") for answer in mixed]
    assert modes[1::2] == ["sparse"] * 4
    assert "sparse" not in modes[::2]
    assert tokens(mixed) == [(alone if i % 2 else exact)[i].tokens for i in range(8)]
    assert tokens(alone) != tokens(exact), "the test wants answers that differ"


def test_what_was_computed_on_a_part_is_found_by_nobody(serve: Serve) -> None:
    served = _stored(serve)
    exact = tokens(served.ask(QUESTIONS[:2], n=140))
    served.forget()
    stored = served.store.stats()["stored_tokens"]
    sparse = served.ask(QUESTIONS[:2], n=140, policy=HALF)
    assert [answer.said["mode"] for answer in sparse] == ["sparse"] * 2
    again = served.ask(QUESTIONS[:2], n=140, policy=HALF)
    assert [answer.said["mode"] for answer in again] == ["sparse"] * 2  # not from vLLM's own cache
    served.settle()
    assert served.store.stats()["stored_tokens"] == stored
    assert tokens(served.ask(QUESTIONS[:2], n=140)) == exact
    served.settle()
    assert served.used_blocks() == 0
    assert served.store.stats()["leases"] == 0


def test_a_suffix_in_several_steps_is_served_exactly(serve: Serve) -> None:
    small = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
    served = _stored(serve, **small)
    exact = tokens(served.ask(QUESTIONS[7:]))
    served.forget()
    (answer,) = served.ask(QUESTIONS[7:], policy=HALF)  # 87 tokens to compute
    assert answer.said["mode"] == "exact"
    assert answer.tokens == exact[0]


def test_requests_are_never_served_looser_than_the_floor(serve: Serve) -> None:
    served = _stored(serve)
    (asked,) = served.ask(QUESTIONS[:1], policy={"name": "recency", "keep": 0.1})
    assert asked.said["chosen_rows_share"] == 0.5
    (asked,) = served.ask(QUESTIONS[:1], policy={"name": "recency", "keep": 0.75})
    assert asked.said["chosen_rows_share"] == 0.75
    (asked,) = served.ask(QUESTIONS[:1], policy={"name": "paper", "keep": 1.0})
    assert (asked.said["policy"], asked.said["chosen_rows_share"]) == ("recency", 0.5)
    served.forget()
    (asked,) = served.ask(QUESTIONS[:1], policy={"name": "nothing known"})
    assert asked.said["mode"] == "exact"


def test_a_lost_choice_is_computed_densely(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = serve(store=False)
    expected = tokens(plain.ask(QUESTIONS))
    plain.close()
    served = _stored(serve)
    bring = SparseSession._bring

    def lose(self: Any, layer: int, *rest: Any) -> Any:
        if layer == 2:
            raise PrefixLost("io", "a test's disk")
        return bring(self, layer, *rest)

    monkeypatch.setattr(SparseSession, "_bring", lose)
    answers = served.ask(QUESTIONS, policy=HALF)
    assert tokens(answers) == expected
    served.settle()
    assert served.used_blocks() == 0
    assert served.store.stats()["leases"] == 0
    assert not served.worker.sparse._by_block


def test_a_choice_that_gets_no_memory_is_computed_densely(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a device had too little memory beside vLLM's share, the error ended the engine."""
    plain = serve(store=False)
    expected = tokens(plain.ask(QUESTIONS))
    plain.close()
    served = _stored(serve)
    load = BlockLayout.load

    def full(layout: BlockLayout, kv_cache: torch.Tensor, *rows: torch.Tensor) -> None:
        if kv_cache is served.worker.caches[1]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        load(layout, kv_cache, *rows)

    monkeypatch.setattr(BlockLayout, "load", full)
    assert tokens(served.ask(QUESTIONS, policy=HALF)) == expected
    served.settle()
    assert served.used_blocks() == 0
    assert served.store.stats()["leases"] == 0
    assert not served.worker.sparse._by_block


def test_preempted_sparse_requests_leave_nothing(serve: Serve) -> None:
    few = {"num_gpu_blocks_override": 20, "max_model_len": 1024}
    served = _stored(serve, **few)
    preempted: list[str] = []
    preempt = served.scheduler._preempt_request
    served.scheduler._preempt_request = lambda request, *rest, **named: (
        preempted.append(request.request_id),
        preempt(request, *rest, **named),
    )
    answers = served.ask(QUESTIONS[:4], n=150, policy=HALF)
    assert preempted, "the test wants preemptions"
    assert [len(answer.tokens) for answer in answers] == [150] * 4
    served.settle()
    assert served.used_blocks() == 0
    assert served.store.stats()["leases"] == 0
    assert not served.worker.sparse._by_block


def test_an_answer_that_began_on_chosen_rows_never_says_exact(serve: Serve) -> None:
    """Preempted, and served exactly from then on, it was said to be exact as a whole."""
    served = _stored(serve, max_num_batched_tokens=64, max_num_seqs=4)
    engine, scheduler = served.llm.llm_engine, served.scheduler
    prompt = {"prompt_token_ids": QUESTIONS[0][:-30]}  # with 40 tokens of answer: over a step's 64
    engine.add_request("r", prompt, params(60, HALF))
    (request,) = scheduler.waiting
    while request.num_output_tokens < 40:
        engine.step()
    served_as = served.worker._served
    modes: list[str] = []
    served.worker._served = lambda spec, report, mode, end: (
        modes.append(mode),
        served_as(spec, report, mode, end),
    )
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    (output,) = [out for _ in range(60) for out in engine.step() if out.finished]
    assert modes == ["exact"], "the test wants a second life that is served exactly"
    (answer,) = served._answers([output])
    assert (answer.said["mode"], answer.said["chosen_rows_share"]) == ("sparse", 0.5)


def test_a_backend_that_is_not_ours_is_refused_at_start(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_settings, "BACKEND", "another.Backend")
    with pytest.raises(Exception, match="need the attention backend of impress"):
        serve(extra={"policy": HALF})


# ---- beside the Transformers engine --------------------------------------------------------------


POLICIES = {
    "paper": (Paper(0.25), {"name": "paper", "keep": 0.25}),
    "quality": (Quality(0.1), {"name": "quality", "max_missing_mass": 0.1}),
}


class Asked:
    """Questions about a document of the lookup tasks, and the Transformers engine's answers."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        from impress.engines import hf

        document = tasks.document("test", 0, 1024)
        self.prompts = [
            [*document.tokens, *question.tokens]
            for task in ("rte", "copa")
            for question in tasks.questions(document, task, 4)
        ]
        model = AutoModelForCausalLM.from_pretrained(str(LOOKUP), dtype="float32").eval()
        geometry = hf.hf_models.geometry_of(model.config, model.dtype)
        # A mode chosen by cost depends on the time: on a busy machine one was read exactly.
        config = Config(**{**SMALL, "probes": PROBES}, mode="sparse")
        name = namespace_of(model, cross_engine=True)
        self.answers: dict[str, list[list[int]]] = {}
        self.fell_back: dict[str, list[float]] = {}
        with impress.PrefixStore.open(folder, geometry, name, config) as store:
            with hf.attach(model, store) as engine:
                self._ask(engine, "first", self.prompts[:1], None)
                engine.flush()
                self._ask(engine, "exact", self.prompts, None)
            with hf.attach(model, store, store_new=False) as engine:
                for named, (policy, _) in POLICIES.items():
                    self._ask(engine, named, self.prompts, policy)
                self._ask(engine, "all", self.prompts, KeepAll())

    def _ask(self, engine: Any, named: str, prompts: list[list[int]], policy: Any) -> None:
        import torch

        answers, shares = [], []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = engine.generate(ids, max_new_tokens=N_NEW, do_sample=False, policy=policy,
                                  eos_token_id=None)  # fmt: skip
            answers.append(out[0, len(prompt) :].tolist())
            shares.append(engine.last_request.fallback_share)
        self.answers[named], self.fell_back[named] = answers, shares


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    yield Asked(tmp_path / "store")


def test_answers_are_the_transformers_engines_at_the_same_selection(
    serve: Serve, asked: Asked
) -> None:
    """One store, written by Transformers; the same rows are chosen, layer by layer."""
    floor = {"name": "paper", "keep": 0.25}
    served = serve(
        str(LOOKUP), "float32",
        extra={"cross_engine": True, "store_new": False, "floor": floor,
               "config": {**SMALL, "probes": PROBES}},
    )  # fmt: skip
    exact = served.ask(asked.prompts, n=N_NEW)
    assert [answer.n_cached for answer in exact] == [1024] * 8
    assert tokens(exact) == asked.answers["exact"]
    side = served.scheduler.connector.scheduler
    for named, (_, policy) in POLICIES.items():
        side._hits._settings = vllm_settings.Settings.of(
            {"store": "unused", "policy": policy, "cross_engine": True}
        )
        answers = served.ask(asked.prompts, n=N_NEW)
        assert [answer.said["mode"] for answer in answers] == ["sparse"] * 8, named
        assert tokens(answers) == asked.answers[named], named
        assert [answer.said["fallback_share"] for answer in answers] == asked.fell_back[named]
        if named == "quality":
            assert max(answer.said["chosen_rows_share"] for answer in answers) < 0.9
    assert 0.25 in asked.fell_back["paper"], "the test wants prompts with exactly one layer whole"
