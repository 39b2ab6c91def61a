"""Ends and resets at a bad moment: nothing false is stored, or found in vLLM's own cache."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("vllm.version", reason="vLLM has an environment of its own: make test-vllm")

import torch
import vllm._custom_ops  # noqa: F401  # the kernels that this processor has
from vllm import envs
from vllm.distributed.kv_transfer import get_kv_transfer_group

from impress.config import Config
from impress.engines.vllm import hanging, saving, scheduling, uses
from impress.engines.vllm.blocks import BlockLayout, slots_of
from impress.engines.vllm.connector import ImpressConnector
from impress.engines.vllm.exact import ExactLoad, ExactSide
from impress.engines.vllm.metrics import COUNTS
from impress.engines.vllm.patience import Patience, most_s
from impress.engines.vllm.sparse import SparseRequest
from impress.engines.vllm.step import LoadSpec, Prompt, SaveSpec, StepPlan
from impress.engines.vllm.tracked import Tracked
from impress.engines.vllm.working import WorkerSide
from impress.errors import PrefixLost, StoreFailed
from impress.policy import Exact, Recency
from impress.read.access import AccessReport
from impress.read.session import Session
from impress.store import PrefixStore
from impress.types import Geometry
from impress.write.draft import Stored
from impress.write.index import Index
from impress.write.writer import Writer
from tests.vllm.served import MIB, SMALL, Served, params, tokens, words
from tests.vllm.test_vllm_blocks import _isas
from tiers.segments import SegmentFiles
from tiers.slots import BufferPool
from tiers.ssd import SsdTier

Serve = Callable[..., Served]

PROMPT = words(300, seed=3)


@contextmanager
def held_back(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The saver begins nothing while this lasts."""
    go, begin = threading.Event(), served.worker.saver._begin

    def stuck(*args: Any) -> Any:
        assert go.wait(60)
        return begin(*args)

    monkeypatch.setattr(served.worker.saver, "_begin", stuck)
    try:
        yield
    finally:
        go.set()


def test_a_reset_leaves_blocks_alone_that_are_still_to_be_stored(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request hit by a reset gave its blocks back while the saver had yet to read them: what the
    next request wrote there was stored under the first one's name."""
    served = serve()
    engine = served.llm.llm_engine
    with held_back(served, monkeypatch):
        engine.add_request("first", {"prompt_token_ids": PROMPT}, params(5))
        engine.step()
        served.scheduler.reset_prefix_cache(reset_connector=True)
        while engine.has_unfinished_requests():
            engine.step()
        assert served.used_blocks() > 0
    served.settle()
    assert served.used_blocks() == 0
    assert served.store.lookup(PROMPT) == 256  # by its name from before the reset


def with_few_blocks(
    serve: Serve, prompts: list[list[int]], n: int
) -> tuple[Served, list[list[int]]]:
    """An engine of nine blocks, with a store; and the answers that one without gives."""
    few = {"num_gpu_blocks_override": 10, "max_model_len": 1024}
    plain = serve(store=False, **few)
    expected = tokens(plain.ask(prompts, n=n))
    plain.close()
    return serve(**few), expected


def test_requests_that_ended_give_their_blocks_up_where_running_ones_are_preempted(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They kept their blocks until a slow disk had taken the rows, and running requests were
    preempted over and over for want of blocks that nobody needed."""
    prompts = [words(240, seed=40 + i) for i in range(4)]
    served, expected = with_few_blocks(serve, prompts, 40)
    with held_back(served, monkeypatch):
        assert served.ask(prompts[:1], n=40)[0].tokens == expected[0]
        (first,) = {life.request_id for life in served.worker.saver._lives.values()}
        assert served.worker.saver.busy(first) and served.used_blocks() == 3
        assert [answer.tokens for answer in served.ask(prompts[1:], n=40)] == expected[1:]
        assert not served.worker.saver.busy(first)
        assert served.worker.saver.n_skipped >= 1
    assert "vLLM is short of the blocks" in caplog.text
    served.settle()
    assert served.used_blocks() == 0
    assert served.store.lookup(prompts[0]) == 0


def test_requests_that_ended_give_their_blocks_up_where_none_is_left_to_be_preempted(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts with an answer of one token end in the step that they are computed in: with nobody to
    preempt, those that waited for blocks were served as slowly as the disk took rows."""
    monkeypatch.setattr(scheduling, "_PATIENCE_S", 0.0)
    prompts = [words(240, seed=60 + i) for i in range(8)]
    served, expected = with_few_blocks(serve, prompts, 1)
    with held_back(served, monkeypatch):  # no row is taken until all have been answered
        assert [answer.tokens for answer in served.ask(prompts, n=1)] == expected
        assert served.worker.saver.n_skipped >= 1
    assert "vLLM is short of the blocks" in caplog.text
    served.settle()
    assert served.used_blocks() == 0


def test_a_pause_is_not_over_while_blocks_are_still_to_be_read(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause that keeps running requests was over at once. `sleep` then unmaps the KV cache on
    CUDA, which the saver had yet to read. (docs/VLLM.md says it for engines in this process.)"""
    served = serve()
    engine, scheduler = served.llm.llm_engine, served.scheduler
    with held_back(served, monkeypatch):
        engine.add_request("kept", {"prompt_token_ids": PROMPT}, params(5))
        engine.step()
        served.llm.sleep(0, mode="keep")
        for _ in range(3):
            assert scheduler.has_requests()
            engine.step()
    served.worker.flush()
    engine.step()
    assert not scheduler.has_requests()
    assert served.store.lookup(PROMPT) == 256
    served.llm.sleep(1, mode="keep")
    served.llm.wake_up()
    while engine.has_unfinished_requests():
        engine.step()
    served.settle()
    assert served.used_blocks() == 0


def test_nothing_reads_blocks_that_are_about_to_be_unmapped(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sleep(1, mode="keep")` unmaps the KV cache on CUDA while blocks of running requests wait to
    be stored. vLLM 0.33 tells a connector just before; here the test does."""
    served = serve()
    engine = served.llm.llm_engine
    with held_back(served, monkeypatch):
        engine.add_request("kept", {"prompt_token_ids": PROMPT}, params(5))
        engine.step()
        assert served.worker.saver.reads()
        get_kv_transfer_group().unregister_kv_caches()
        assert not served.worker.saver.reads()
    get_kv_transfer_group().unregister_kv_caches()  # vLLM may say so twice
    while engine.has_unfinished_requests():
        engine.step()
    served.settle()
    assert served.used_blocks() == 0
    assert served.store.lookup(PROMPT) == 0


@pytest.mark.parametrize("told", [{}, {"clear_cache": False}], ids=["not told", "told not to"])
@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_a_pause_forgets_what_is_stored_unless_it_is_told_not_to(
    serve: Serve, mode: str, told: dict[str, bool]
) -> None:
    """As docs/VLLM.md says: vLLM's pause clears caches, a connector's among them."""
    served = serve()
    served.ask([PROMPT])
    served.forget()
    served.core.pause_scheduler(mode, **told)
    served.core.resume_scheduler()
    (answer,) = served.ask([PROMPT])
    assert answer.n_cached == (256 if told else 0)


def test_requests_that_a_reset_found_waiting_are_stored_under_its_names(serve: Serve) -> None:
    """In a pause for new weights all that waited, and all that vLLM had preempted for it, was
    computed afterwards, with these weights, and stored nowhere; nothing said so."""
    served = serve()
    engine, core = served.llm.llm_engine, served.core
    engine.add_request("began", {"prompt_token_ids": PROMPT}, params(5))
    engine.step()
    engine.add_request("waits", {"prompt_token_ids": words(200, seed=9)}, params(5))
    core.pause_scheduler("keep")
    engine.step()
    core.resume_scheduler()
    while engine.has_unfinished_requests():
        engine.step()
    served.forget()
    found = served.ask([PROMPT, words(200, seed=9)])
    assert [answer.n_cached for answer in found] == [256, 128]


def test_a_reset_in_a_pause_that_keeps_requests_must_take_their_blocks(serve: Serve) -> None:
    """docs/VLLM.md said to repeat such a reset until it succeeds, which it never did."""
    served = serve()
    engine, core = served.llm.llm_engine, served.core
    engine.add_request("kept", {"prompt_token_ids": PROMPT}, params(5))
    engine.step()
    core.pause_scheduler("keep", clear_cache=False)
    served.worker.flush()
    for _ in range(3):
        engine.step()
        assert not core.reset_prefix_cache(reset_connector=True)
    assert core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    core.resume_scheduler()
    while engine.has_unfinished_requests():
        engine.step()
    (answer,) = served.ask([PROMPT])
    assert answer.n_cached == 256  # computed since, in vLLM's own cache
    served.settle()
    assert served.used_blocks() == 0


def test_a_request_that_is_preempted_and_refused_before_it_ends_is_dropped(serve: Serve) -> None:
    """A reset that preempts takes the blocks away: the saver is told, though the request ends
    before the next step."""
    served = serve()
    engine = served.llm.llm_engine
    engine.add_request("first", {"prompt_token_ids": PROMPT}, params(5))
    engine.step()
    served.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    side = served.scheduler.connector.scheduler
    key = next(iter(side._tracked.values())).key
    engine.abort_request(["first"])
    assert side._dropped == [key]
    served.settle()
    assert served.forgets_all()
    assert served.used_blocks() == 0


def _abort_in_the_next_step(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running requests are aborted after the next step has run, where vLLM looks for aborts."""
    core, look = served.core, served.core._process_aborts_queue

    def process() -> None:
        core.aborts_queue.put([request.request_id for request in served.scheduler.running])
        look()
        monkeypatch.setattr(core, "_process_aborts_queue", look)

    monkeypatch.setattr(core, "_process_aborts_queue", process)


def _damage(served: Served) -> None:
    """Overwrite all rows on the disk: no checksum matches."""
    path = next((Path(served.store.path) / "shards/main/segments").glob("*.seg"))
    (record,) = served.store.catalog.records()
    with path.open("r+b") as file:
        for part in record.parts:
            file.seek(part.off)
            file.write(b"\x5a" * part.length)
    served.store.drop_caches()


def test_an_abort_in_the_step_of_a_lost_load_leaves_nothing_in_vllms_cache(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a request computed on rows that were never read stayed in vLLM's prefix cache when the
    request was aborted in that very step: later requests with its prompt were answered from it."""
    served = serve()
    served.ask([PROMPT])
    served.forget()
    _damage(served)
    longer = PROMPT[:256] + words(300, seed=5)
    _abort_in_the_next_step(served, monkeypatch)
    engine = served.llm.llm_engine
    engine.add_request("cut", {"prompt_token_ids": longer}, params(5))
    engine.step()
    engine.abort_request(["cut"])
    assert sum(served.store.stats()["lost"].values()) >= 1
    served.ask([PROMPT])  # computes the beginning again, which leads to what follows it
    (again,) = served.ask([longer])
    (alone,) = served.ask([longer], salt="shares nothing")
    assert (again.tokens, again.n_cached) == (alone.tokens, 256)
    served.settle()
    assert served.used_blocks() == 0


def test_an_abort_in_the_step_of_a_lost_load_stores_nothing_of_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that goes on after a preemption computes windows past its prompt in the step that
    loads: they were stored, though the load had failed and they were nonsense."""
    served = serve()
    served.ask([PROMPT])
    served.forget()
    _damage(served)
    engine, scheduler = served.llm.llm_engine, served.scheduler
    with monkeypatch.context() as hidden:  # at first it computes everything itself
        hidden.setattr(scheduler.connector.scheduler._view, "lookup", lambda *names: 0)
        engine.add_request("cut", {"prompt_token_ids": PROMPT}, params(200))
        for _ in range(140):
            engine.step()
    (request,) = scheduler.running
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    _abort_in_the_next_step(served, monkeypatch)
    engine.step()
    engine.abort_request(["cut"])
    assert sum(served.store.stats()["lost"].values()) >= 1
    served.settle()
    assert served.store.lookup(list(request.all_token_ids)) == 0
    assert served.used_blocks() == 0


_CUTS = [
    ("a layer", RuntimeError("broken")),
    ("a layer", KeyboardInterrupt()),
    ("before the layers", RuntimeError("broken")),
]


def _cut_a_step_short(
    served: Served, monkeypatch: pytest.MonkeyPatch, where: str, err: BaseException
) -> None:
    """The engine's next step ends in this error."""
    runner = served.core.model_executor.driver_worker.model_runner
    at: tuple[Any, str] = (runner, "_sample" if where == "sampling" else "_prepare_inputs")
    if where == "a layer":
        at = runner.get_model().model.decoder.layers[1], "forward"

    def cut(*args: Any, **named: Any) -> Any:
        raise err

    with monkeypatch.context() as once:
        once.setattr(*at, cut)
        with pytest.raises(type(err)):
            served.llm.llm_engine.step()


@pytest.mark.parametrize(("where", "err"), _CUTS, ids=["error", "Ctrl-C", "before the layers"])
def test_a_step_that_is_cut_short_is_the_last_of_which_anything_is_stored(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, where: str, err: BaseException
) -> None:
    """vLLM ends a connector's step in a `finally`, and counts its tokens as computed: what the
    layers after the error never wrote, zeros or another request's rows, was stored under the
    prompt's name, and answered from ever after."""
    served = serve(max_num_batched_tokens=128)
    engine = served.llm.llm_engine
    engine.add_request("cut", {"prompt_token_ids": PROMPT}, params(100))
    engine.step()
    _cut_a_step_short(served, monkeypatch, where, err)
    while engine.has_unfinished_requests():  # it goes on after the hole
        engine.step()
    served.settle()
    other = words(300, seed=4)
    served.ask([other])
    served.settle()
    assert [served.store.lookup(prompt) for prompt in (PROMPT, other)] == [0, 0]
    served.close()
    fresh = serve()
    (answer,) = fresh.ask([PROMPT])
    (alone,) = fresh.ask([PROMPT], salt="shares nothing")
    assert (answer.tokens, answer.n_cached) == (alone.tokens, 0)


@pytest.mark.parametrize(("where", "err"), _CUTS, ids=["error", "Ctrl-C", "before the layers"])
def test_what_had_ended_before_a_step_that_is_cut_short_gives_its_blocks_back(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, where: str, err: BaseException
) -> None:
    """Its blocks are held until a step says that they were read. That report was lost with the
    step, or never asked for: the blocks stayed, and the loop in docs/VLLM.md that steps an engine
    until it is idle never ended."""
    served = serve()
    engine = served.llm.llm_engine
    engine.add_request("ended", {"prompt_token_ids": PROMPT}, params(1))
    engine.add_request("goes on", {"prompt_token_ids": words(300, seed=4)}, params(9))
    ended = {output.request_id: output.finished for output in engine.step()}
    assert ended == {"ended": True, "goes on": False}
    _cut_a_step_short(served, monkeypatch, where, err)
    engine.abort_request(["goes on"])  # vLLM waits for a token of the step that was cut
    served.worker.flush()  # all is read: every step says so
    for _ in range(20):
        engine.step()
    assert not served.scheduler.has_requests()
    assert served.used_blocks() == 0


@pytest.mark.parametrize("where", ["as we hear", "as it frees"])
def test_what_vllm_was_told_of_and_kept_from_freeing_is_told_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A request counted as freed once a step had said that its blocks were read. After an error or
    Ctrl-C between that and vLLM's freeing them, no later step said it again: the blocks stayed, and
    the engine never became idle."""
    served = serve()
    engine, scheduler = served.llm.llm_engine, served.scheduler
    engine.add_request("ended", {"prompt_token_ids": PROMPT}, params(1))
    engine.step()
    served.worker.flush()  # all is read and durable: the next step says so
    assert served.used_blocks() > 0
    at: tuple[Any, str] = (scheduler, "_free_blocks")
    if where == "as we hear":
        at = scheduler.connector.scheduler._view, "refresh"
    with monkeypatch.context() as once:
        once.setattr(*at, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    for _ in range(20):
        engine.step()
    assert not scheduler.has_requests()
    assert served.used_blocks() == 0


@pytest.mark.parametrize("where", ["before the worker", "in the worker"])
def test_blocks_that_were_taken_away_in_a_step_that_is_cut_short_are_not_read(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A step that takes a request's blocks away tells the saver so before it writes there. When cut
    short before that it never did, and the next step did not say it again: what another request
    wrote was stored under the first one's name, and answered from ever after."""
    served = serve(
        num_gpu_blocks_override=5, max_model_len=512, max_num_batched_tokens=256,
        long_prefill_token_threshold=128,
    )  # fmt: skip
    engine, robbed = served.llm.llm_engine, words(128, seed=4)
    with held_back(served, monkeypatch):
        engine.add_request("writes", {"prompt_token_ids": words(500, seed=5)}, params(5))
        engine.add_request("robbed", {"prompt_token_ids": robbed}, params(100))
        engine.step()
        engine.step()
        assert served.used_blocks() == 4  # half of one prompt is computed, all of the other
        at: tuple[Any, str] = (served.worker.sparse, "keep")
        if where == "before the worker":
            at = ImpressConnector, "handle_preemptions"
        with monkeypatch.context() as once:
            once.setattr(*at, Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        (request,) = served.scheduler.running
        for _ in range(20):
            engine.step()
        assert request.is_finished()
    served.settle()
    assert served.store.lookup(robbed) == 0
    assert served.used_blocks() == 0


def test_a_sparse_request_that_had_ended_before_a_step_that_is_cut_short_is_forgotten(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end was told once, and lost with the step: the request that got its first block later was
    taken for it, and saw rows that were never chosen for that request."""
    few: dict[str, Any] = {"num_gpu_blocks_override": 4, "max_model_len": 384}
    prompts = [words(300, seed=60 + i) for i in range(3)]  # each takes all three blocks
    plain = serve(store=False, **few)
    expected = [plain.ask([prompt]) for prompt in prompts]
    plain.close()
    half = {"name": "recency", "keep": 0.5}
    served = serve(extra={"floor": half}, **few)
    served.ask([PROMPT])
    served.forget()
    (answer,) = served.ask([PROMPT], policy=half)
    assert answer.said["mode"] == "sparse"
    with monkeypatch.context() as once:
        once.setattr(ImpressConnector, "handle_preemptions", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            served.llm.llm_engine.step()
    found = [served.ask([prompt]) for prompt in prompts]
    assert [tokens(answers) for answers in found] == [tokens(answers) for answers in expected]


def test_a_lost_load_of_which_vllm_did_not_hear_is_the_last_thing_that_is_stored(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step tells which blocks were not filled when it is over. When sampling failed after the
    layers, nobody heard, and the step counted as whole: the next steps computed on those blocks,
    and the result was stored under the prompt's name."""
    served = serve(max_num_batched_tokens=128)
    served.ask([PROMPT])
    served.forget()
    _damage(served)
    longer = PROMPT[:256] + words(300, seed=5)
    engine = served.llm.llm_engine
    engine.add_request("lost", {"prompt_token_ids": longer}, params(5))
    with monkeypatch.context() as once:
        runner = served.core.model_executor.driver_worker.model_runner
        once.setattr(runner, "_sample", Mock(side_effect=RuntimeError("broken")))
        with pytest.raises(RuntimeError, match="broken"):
            engine.step()
    assert sum(served.store.stats()["lost"].values()) >= 1
    while engine.has_unfinished_requests():
        engine.step()
    served.settle()
    assert served.store.lookup(longer) <= 256
    served.close()
    fresh = serve()
    (answer,) = fresh.ask([longer])
    (alone,) = fresh.ask([longer], salt="shares nothing")
    assert answer.tokens == alone.tokens


def _stored_before(serve: Serve, **given: Any) -> Served:
    """An engine that is started on a store with PROMPT."""
    before = serve()
    before.ask([PROMPT])
    before.settle()
    before.close()
    return serve(**given)


@pytest.mark.parametrize(
    ("where", "store_new"),
    [("sampling", True), ("sampling", False), ("a layer", True), ("before the layers", False)],
)
def test_what_a_step_loaded_of_which_vllm_did_not_hear_is_computed_instead(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str,
    store_new: bool,
) -> None:  # fmt: skip
    """Nobody was told that the load was lost, or cut short with the step: vLLM found blocks in its
    own cache that were never filled, and the request and later ones were answered from them. With
    "store_new": false the log did not say that a step was cut short, either."""
    extra = {"store_new": store_new}
    served = _stored_before(serve, max_num_batched_tokens=128, extra=extra)
    if where == "sampling":  # after the worker's report: the layers had all that there was
        _damage(served)
    engine, longer = served.llm.llm_engine, PROMPT[:256] + words(300, seed=5)
    engine.add_request("cut", {"prompt_token_ids": longer}, params(5))
    _cut_a_step_short(served, monkeypatch, where, RuntimeError("broken"))
    found: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            found = list(output.outputs[0].token_ids)
    other = PROMPT[:256] + words(20, seed=6)
    asked = [found, *tokens(served.ask([other], 5))]
    alone = [tokens(served.ask([prompt], 5, salt="alone"))[0] for prompt in (longer, other)]
    assert asked == alone
    lines = [record.getMessage() for record in caplog.records]
    (said,) = [line for line in lines if "a step of vLLM was cut short" in line]
    assert ("nothing more is stored" in said) == store_new


def test_an_abort_behind_a_step_of_which_vllm_did_not_hear_leaves_nothing_in_its_cache(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks that such a request had computed on lost rows must go, too: a request that
    computes the beginning again would be led to them."""
    served = _stored_before(serve, max_num_batched_tokens=128)
    _damage(served)
    engine, longer = served.llm.llm_engine, PROMPT[:256] + words(300, seed=5)
    engine.add_request("cut", {"prompt_token_ids": longer}, params(5))
    _cut_a_step_short(served, monkeypatch, "sampling", RuntimeError("broken"))
    engine.abort_request(["cut"])
    (begins_alike,) = served.ask([PROMPT])
    served.ask([PROMPT])  # vLLM has the beginning again, which leads to what follows it
    (again,) = served.ask([longer])
    alone = [tokens(served.ask([prompt], salt="alone"))[0] for prompt in (PROMPT, longer)]
    assert [begins_alike.tokens, again.tokens] == alone
    served.settle()
    assert served.used_blocks() == 0


@pytest.mark.parametrize("where", ["before the plan", "in the plan"])
@pytest.mark.parametrize("stored", [False, True], ids=["to be computed", "to be loaded"])
def test_what_scheduling_that_was_cut_short_gave_out_is_in_nobodys_answer(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str,
    stored: bool,
) -> None:  # fmt: skip
    """vLLM puts a request's blocks into its own cache as it gives them out, before they are filled.
    When Ctrl-C came then, no step was missing as far as anybody knew: the next request for that
    prompt was answered from another's rows, and these were stored under the prompt's name."""
    before = _stored_before if stored else lambda serve, **given: serve(**given)
    served = before(serve, max_num_batched_tokens=512)
    engine, longer = served.llm.llm_engine, PROMPT[:256] + words(100, seed=5)
    filling = words(300, seed=7)
    served.ask([filling])  # now blocks are not zeros, which are easily right
    served.forget()
    side = served.scheduler.connector.scheduler
    engine.add_request("cut", {"prompt_token_ids": longer}, params(5))
    with monkeypatch.context() as once:
        cut = Mock(side_effect=KeyboardInterrupt)
        name = "build_connector_meta" if where == "before the plan" else "plan"
        at = (served.scheduler.connector, name) if name != "plan" else (side._unheard, "note")
        once.setattr(*at, cut)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.abort_request(["cut"])
    (again,) = served.ask([longer])
    (once_more,) = served.ask([longer])
    served.settle()
    assert served.store.lookup(longer) <= (256 if stored else 0)
    assert served.used_blocks() == 0
    assert "nothing more is stored" in caplog.text
    served.close()
    fresh = serve()
    (alone,) = fresh.ask([longer], salt="shares nothing")
    assert [again.tokens, once_more.tokens] == [alone.tokens] * 2


def test_of_blocks_that_a_running_request_got_in_scheduling_that_was_cut_short_nothing_is_stored(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's worker never hears of these blocks, and computes into others; what lay in them was
    stored under the prompt's name, as no plan was missing."""
    served = serve(max_num_batched_tokens=128)
    engine, longer = served.llm.llm_engine, words(500, seed=5)
    served.ask([words(300, seed=7)])
    served.forget()
    engine.add_request("cut", {"prompt_token_ids": longer}, params(5))
    engine.step()
    with monkeypatch.context() as once:
        cut = Mock(side_effect=KeyboardInterrupt)
        once.setattr(served.scheduler.connector, "build_connector_meta", cut)
        with pytest.raises(KeyboardInterrupt):
            engine.step()  # its second chunk
    while engine.has_unfinished_requests():
        engine.step()
    served.settle()
    assert served.store.lookup(longer) <= 128
    assert "a step of vLLM was cut short" in caplog.text
    (again,) = served.ask([longer])
    (alone,) = served.ask([longer], salt="shares nothing")
    assert again.tokens == alone.tokens


@pytest.mark.parametrize(
    ("where", "n_steps"), [("build_connector_meta", 1), ("update_state_after_alloc", 0)]
)
def test_a_request_aborted_after_its_scheduling_was_cut_short_leaves_nothing_in_vllms_cache(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, where: str, n_steps: int
) -> None:
    """At the abort vLLM names the blocks of what it counts as computed. Those it had given out
    beyond them stayed in its cache unfilled: the next request for that prompt was answered from
    what lay in them, and this was stored under the prompt's name."""
    served = serve(max_num_batched_tokens=128)
    engine, longer = served.llm.llm_engine, words(500, seed=5)
    served.ask([words(300, seed=7)])  # now blocks are not zeros, which are easily right
    served.forget()
    engine.add_request("cut", {"prompt_token_ids": longer}, params(5))
    for _ in range(n_steps):
        engine.step()
    with monkeypatch.context() as once:
        once.setattr(served.scheduler.connector, where, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.abort_request(["cut"])
    found = [served.ask([longer]) for _ in range(2)]
    alone = served.ask([longer], salt="shares nothing")
    served.settle()
    assert served.used_blocks() == 0
    assert served.store.lookup(longer) == 448
    served.close()
    found.append(serve().ask([longer]))
    assert [tokens(answers) for answers in found] == [tokens(alone)] * 3


def test_of_a_preempted_request_whose_resumption_was_cut_short_nothing_more_is_stored(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM went on with it as with one that ran, in the blocks that it had before; as its new ones
    were due in that very step, nothing was missing, and what lay in them was stored."""
    served = serve(num_gpu_blocks_override=4, max_model_len=384, max_num_batched_tokens=384)
    engine, longer = served.llm.llm_engine, words(120, seed=6)
    engine.add_request("first", {"prompt_token_ids": words(250, seed=5)}, params(20))
    engine.add_request("cut", {"prompt_token_ids": longer}, params(150))
    connector = served.scheduler.connector
    plan, answer = connector.build_connector_meta, list[int]()

    def cut_short(output: Any) -> Any:
        if output.scheduled_cached_reqs.resumed_req_ids:
            raise KeyboardInterrupt
        return plan(output)

    def steps() -> None:
        while engine.has_unfinished_requests():
            for output in engine.step():
                answer[:] = output.outputs[0].token_ids

    with monkeypatch.context() as once:
        once.setattr(connector, "build_connector_meta", cut_short)
        with pytest.raises(KeyboardInterrupt):
            steps()
    assert "a step of vLLM was cut short" not in caplog.text
    served.worker.flush()
    before = served.store.lookup(longer)
    steps()
    served.settle()
    assert len(answer) == 150
    assert served.store.lookup(longer + answer) == before
    assert "a step of vLLM was cut short" in caplog.text


def test_a_request_that_was_cut_short_as_it_came_ends_no_other(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then it waits in vLLM's queue. Nothing else knew of it, and each later step raised
    KeyError."""
    served = serve()
    engine, other = served.llm.llm_engine, words(300, seed=7)
    with monkeypatch.context() as once:
        hits = served.scheduler.connector.scheduler._hits
        once.setattr(hits, "track", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.add_request("cut", {"prompt_token_ids": PROMPT}, params(5))
    engine.add_request("other", {"prompt_token_ids": other}, params(5))
    found: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    assert [[*found["cut"]], [*found["other"]]] == tokens(
        served.ask([PROMPT, other], 5, salt="alone")
    )
    served.settle()
    assert served.used_blocks() == 0
    assert [served.store.lookup(prompt) for prompt in (PROMPT, other)] == [256, 256]


def test_a_reset_whose_request_comes_back_at_once_takes_no_stores(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has its blocks by then, and was said to lack as many again."""
    few = {"num_gpu_blocks_override": 14, "max_model_len": 1280, "max_num_batched_tokens": 1280}
    served = serve(**few)
    engine = served.llm.llm_engine
    with held_back(served, monkeypatch):
        served.ask([PROMPT], 1)
        engine.add_request("r", {"prompt_token_ids": words(1000, seed=20)}, params(20))
        engine.step()
        engine.step()
        with suppress(RuntimeError):
            served.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.step()
        assert "vLLM is short of the blocks" not in caplog.text
    while engine.has_unfinished_requests():
        engine.step()


def test_a_reset_takes_no_stores_from_requests_that_ended(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A request that a reset preempts, and that the next step has no room for, counted as short of
    blocks: requests that had ended gave theirs up, and nothing of them was stored."""
    served = serve(max_num_batched_tokens=128)
    engine = served.llm.llm_engine
    with held_back(served, monkeypatch):
        served.ask([PROMPT], 1)
        for i in range(4):
            prompt = {"prompt_token_ids": words(200, seed=20 + i)}
            engine.add_request(f"{i}", prompt, params(50))
        for _ in range(12):  # all are at their answers
            engine.step()
        with suppress(RuntimeError):  # the ended request still holds blocks
            served.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.step()  # has no room for all of them
        assert "vLLM is short of the blocks" not in caplog.text
    while engine.has_unfinished_requests():
        engine.step()
    served.settle()
    assert served.store.lookup(PROMPT) == 256


def test_a_sparse_request_of_whose_step_vllm_did_not_hear_is_computed_densely(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks hold chosen rows, which nobody knows of any more."""
    half = {"name": "recency", "keep": 0.5}
    served = _stored_before(serve, extra={"floor": half})
    engine = served.llm.llm_engine
    engine.add_request("cut", {"prompt_token_ids": PROMPT}, params(5, half))
    _cut_a_step_short(served, monkeypatch, "sampling", RuntimeError("broken"))
    found: list[int] = []
    for _ in range(20):
        for output in engine.step():
            found = list(output.outputs[0].token_ids)
    assert len(found) == 5
    assert [found] == tokens(served.ask([PROMPT], 5, salt="alone"))
    served.settle()
    assert served.used_blocks() == 0


def test_too_many_specs_while_blocks_are_read_store_nothing_of_them(tmp_path: Path) -> None:
    """A life that is dropped because too many specs wait has its blocks given away at once, even
    while the thread reads the last of them: what another request wrote there was committed."""
    geometry = Geometry(2, 2, 2, 32, "float32")
    caches = [torch.zeros(4, 2, 32, 64) for _ in range(2)]
    plain = BlockLayout.of(caches[0], _isas()[0])
    prompt = Prompt(np.arange(64, dtype=np.int32), {}, "")
    spec = SaveSpec("r", "r#0", prompt, 64, [1, 2])

    class Overrun:
        """The layout; as the last layer is read, too many specs come and blocks change hands."""

        block_size = 32

        def read(self, kv_cache: torch.Tensor, blocks: list[int]) -> Any:
            if kv_cache is caches[1] and saver.busy("r"):
                for _ in range(saving.MOST_WAITING + 1):
                    saver.offer(spec)
                assert not saver.busy("r")
                ones = torch.ones(2, 64, 32)
                plain.write(kv_cache, ones, ones, slots_of([1, 2], 32, 0, 64))
            return plain.read(kv_cache, blocks)

    with PrefixStore.open(tmp_path / "s", geometry, b"x" * 32, Config(**SMALL), "rw") as store:
        layout: Any = Overrun()
        saver = saving.Saver(store, caches, [layout, layout])
        saver.offer(spec)
        saver.flush()
        saver.close()
        assert saver.n_skipped == 1
        assert store.lookup(prompt.tokens) == 0


@pytest.mark.parametrize("err", [MemoryError(), OSError(errno.ENOMEM, "no memory"), KeyError("x")])
def test_what_fails_once_does_not_end_the_thread_that_stores(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, err: Exception
) -> None:
    """Any error that this package does not raise itself ended it: nothing was stored any more, and
    no finished request gave its blocks back."""
    geometry = Geometry(2, 2, 2, 32, "float32")
    caches = [torch.zeros(6, 2, 32, 64) for _ in range(2)]
    plain = BlockLayout.of(caches[0], _isas()[0])
    failing = [err]

    class Failing:
        """The layout; its first read fails."""

        block_size = 32

        def read(self, kv_cache: torch.Tensor, blocks: list[int]) -> Any:
            if failing:
                raise failing.pop()
            return plain.read(kv_cache, blocks)

    with PrefixStore.open(tmp_path / "s", geometry, b"x" * 32, Config(**SMALL), "rw") as store:
        layout: Any = Failing()
        saver = saving.Saver(store, caches, [layout, layout])
        prompts = [Prompt(np.arange(at, at + 64, dtype=np.int32), {}, "") for at in (0, 100)]
        for name, prompt, blocks in zip("ab", prompts, ([1, 2], [3, 4]), strict=True):
            saver.offer(SaveSpec(name, f"{name}#0", prompt, 64, blocks))
        for name in "ab":
            with saver._lock:
                assert saver._changed.wait_for(lambda name=name: not saver.busy(name), 60)
        saver.flush()
        assert [store.lookup(prompt.tokens) for prompt in prompts] == [0, 64]
        (said,) = [r.getMessage() for r in caplog.records if "is not stored" in r.getMessage()]
        assert said.startswith("request a is not stored: ") and not said.endswith(": ")
        saver.close()


class _Zeros:
    """A layout whose rows are always there."""

    block_size = 32

    def read(self, kv_cache: torch.Tensor, blocks: list[int]) -> Any:
        return (torch.zeros(2, 32 * len(blocks), 32),) * 2


def test_no_more_is_read_from_blocks_at_once_than_a_piece_of_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece was a number of rows, however large: for OPT-30B 168 MiB outside of vLLM's share."""
    geometry, asked = Geometry(1, 2, 2, 32, "float32"), []

    class Counting(_Zeros):
        def read(self, kv_cache: torch.Tensor, blocks: list[int]) -> Any:
            asked.append(len(blocks))
            return super().read(kv_cache, blocks)

    monkeypatch.setattr(saving, "PIECE_BYTES", 200 * 2 * 2 * 32 * 4)  # three windows and a bit
    prompt = Prompt(np.arange(512, dtype=np.int32), {}, "")
    with PrefixStore.open(tmp_path / "s", geometry, b"x" * 32, Config(**SMALL), "rw") as store:
        layout: Any = Counting()
        saver = saving.Saver(store, [torch.empty(0)], [layout])
        saver.offer(SaveSpec("r", "r#0", prompt, 512, list(range(16))))
        saver.flush()
        saver.close()
        assert asked == [6, 6, 4]
        assert store.lookup(prompt.tokens) == 512


def test_a_store_that_cannot_be_given_up_does_not_end_the_thread_that_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread ended or, where it did not, prompts that begin alike waited for one that was gone:
    nothing was stored any more, and no finished request gave its blocks back."""
    geometry, layout = Geometry(2, 2, 2, 32, "float32"), _Zeros()
    close, left = Writer.close, [1]

    def fails_once(writer: Writer, *, keep: bool = True) -> None:
        close(writer, keep=keep)
        if left and not keep:
            left.pop()
            raise MemoryError

    monkeypatch.setattr(Writer, "close", fails_once)
    monkeypatch.setattr(saving, "_FLUSH_S", 30)
    prompt = Prompt(np.arange(128, dtype=np.int32), {}, "")
    with PrefixStore.open(tmp_path / "s", geometry, b"x" * 32, Config(**SMALL), "rw") as store:
        saver = saving.Saver(store, [torch.empty(0)] * 2, [layout] * 2)
        saver.offer(SaveSpec("half", "half#0", prompt, 64, [1, 2]))
        saver.flush()
        saver.end("half")
        saver.offer(SaveSpec("whole", "whole#0", prompt, 128, [1, 2, 3, 4]))
        saver.flush()
        assert not left and store.lookup(prompt.tokens) == 128
        saver.close()


@pytest.mark.parametrize("policy", [None, Recency(keep=0.5)], ids=["exact", "sparse"])
def test_an_interrupted_close_of_a_load_releases_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Recency | None
) -> None:
    """It was waiting for reads: rows that the lease pinned stayed there until its time limit."""
    geometry, rows = Geometry(2, 2, 2, 32, "float32"), [torch.ones(2, 128, 32)] * 2
    prompt = Prompt(np.arange(128, dtype=np.int32), {}, "")

    def interrupted(_session: Session) -> None:
        raise KeyboardInterrupt

    with PrefixStore.open(tmp_path / "s", geometry, b"x" * 32, Config(**SMALL), "rw") as store:
        assert store.store(prompt.tokens, rows, rows).wait(60)
        spec = LoadSpec("a", "a#0", prompt, 0, 128, [1, 2], policy)
        patience = Patience(60)
        load = (
            SparseRequest(store, spec, patience) if policy else ExactLoad(store, spec, 64, patience)
        )
        assert store.stats()["leases"] == 1
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Session, "close", interrupted)
            load.close()
        assert store.stats()["leases"] == 0


def test_a_saver_without_its_thread_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a bare RuntimeError."""
    geometry, layout = Geometry(2, 2, 2, 32, "float32"), _Zeros()
    with PrefixStore.open(tmp_path / "s", geometry, b"x" * 32, Config(**SMALL), "rw") as store:
        with monkeypatch.context() as patch:
            refused = RuntimeError("can't start new thread")
            patch.setattr(threading.Thread, "start", Mock(side_effect=refused))
            with pytest.raises(StoreFailed, match="no more threads can be started"):
                saving.Saver(store, [torch.empty(0)] * 2, [layout] * 2)


def _offered(saver: saving.Saver, prompts: list[Prompt], *names: int) -> None:
    """Offer these prompts, whole, each once the one before is no longer busy."""
    for i in names:
        n = len(prompts[i].tokens)
        saver.offer(SaveSpec(f"{i}", f"{i}#0", prompts[i], n, [1] * (n // 32)))
        with saver._lock:
            assert saver._changed.wait_for(lambda i=i: not saver.busy(f"{i}"), 60)


def _beginning_alike(n: int) -> list[Prompt]:
    """Prompts of four windows, of which they share the first."""
    shared, rest = np.arange(64), np.arange(192)
    tokens = [np.concatenate([shared, 200 * (at + 1) + rest]).astype(np.int32) for at in range(n)]
    return [Prompt(each, {}, "") for each in tokens]


@contextmanager
def _saver(tmp_path: Path) -> Iterator[tuple[PrefixStore, saving.Saver]]:
    """A small store, and what saves blocks of zeros to it."""
    with PrefixStore.open(
        tmp_path / "s", Geometry(2, 2, 2, 32, "float32"), b"x" * 32, Config(**SMALL), "rw"
    ) as store:
        layout: Any = _Zeros()
        yield store, saving.Saver(store, [torch.empty(0)] * 2, [layout] * 2)


def test_behind_a_write_that_hangs_one_request_waits_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waited 5 s for a write buffer, with its blocks held: where the KV cache is small, every
    answer came 5 s late for as long as the disk hung. Once a write has ended, stores go on."""
    go, ran_out = threading.Event(), []
    write, acquire = SsdTier.write, BufferPool.acquire

    def stuck(*args: Any) -> None:
        assert go.wait(60)
        write(*args)

    def counted(pool: BufferPool, n_bytes: int, wait_s: float = 0.0) -> Any:
        buffer = acquire(pool, n_bytes, wait_s)
        if buffer is None and wait_s:
            ran_out.append(n_bytes)
        return buffer

    monkeypatch.setattr(SsdTier, "write", stuck)
    monkeypatch.setattr(BufferPool, "acquire", counted)
    monkeypatch.setattr(saving, "_BUFFER_WAIT_S", 0.01)
    prompts = [Prompt(np.arange(at, at + 2048, dtype=np.int32), {}, "") for at in range(6)]
    config = Config(**{**SMALL, "write_buffer_bytes": MIB})
    with PrefixStore.open(
        tmp_path / "s", Geometry(2, 2, 2, 32, "float32"), b"x" * 32, config, "rw"
    ) as store:
        layout: Any = _Zeros()
        saver = saving.Saver(store, [torch.empty(0)] * 2, [layout] * 2)

        offer = partial(_offered, saver, prompts)
        try:
            offer(0, 1, 2, 3, 4)
            assert (len(ran_out), saver.n_skipped) == (1, 4)
        finally:
            go.set()
        monkeypatch.setattr(saving, "_BUFFER_WAIT_S", 60.0)
        while store.write_buffers.used_bytes:
            os.sched_yield()
        offer(5)
        saver.flush()
        assert [store.lookup(prompt.tokens) for prompt in prompts] == [0, 0, 0, 0, 0, 2048]
        saver.close()


def test_a_step_that_takes_no_blocks_away_waits_for_no_read_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step stood still while the saver copied up to 16 MiB of some prompt's blocks."""
    reads, go, read = threading.Event(), threading.Event(), _Zeros.read

    def slow(layout: _Zeros, kv_cache: torch.Tensor, blocks: list[int]) -> Any:
        reads.set()
        assert go.wait(60)
        return read(layout, kv_cache, blocks)

    monkeypatch.setattr(_Zeros, "read", slow)
    (prompt,) = _beginning_alike(1)
    with _saver(tmp_path) as (store, saver):
        try:
            saver.offer(SaveSpec("r", "r#0", prompt, 256, [1] * 8))
            assert reads.wait(60)
            step = threading.Thread(target=saver.drop, args=([],), daemon=True)
            step.start()
            step.join(30)
            assert not step.is_alive()
        finally:
            go.set()
        saver.flush()
        assert store.lookup(prompt.tokens) == 256
        saver.close()


def test_behind_a_commit_that_hangs_one_request_waits_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Write buffers showed whether the disk hangs, but a commit holds none: each prompt that begins
    like the one being committed waited 10 s for it, with its blocks held."""
    go, in_vain = threading.Event(), []
    sync, wait = SsdTier.sync, Stored.wait

    def stuck(*args: Any) -> None:
        assert go.wait(60)
        sync(*args)

    def counted(stored: Stored, timeout_s: float | None = None) -> bool:
        is_ready = wait(stored, timeout_s)
        if not is_ready:
            in_vain.append(stored)
        return is_ready

    monkeypatch.setattr(SsdTier, "sync", stuck)
    monkeypatch.setattr(Stored, "wait", counted)
    monkeypatch.setattr(saving, "_EARLIER_WAIT_S", 0.01)
    prompts = _beginning_alike(6)
    with _saver(tmp_path) as (store, saver):
        offer = partial(_offered, saver, prompts)
        try:
            offer(0, 1, 2, 3, 4)
            assert (len(in_vain), saver.n_skipped) == (1, 3)
        finally:
            go.set()
        saver.flush()
        offer(5)
        saver.flush()
        assert [store.lookup(prompt.tokens) for prompt in prompts] == [256, 256, 64, 64, 64, 256]
        saver.close()
    (said,) = [r.getMessage() for r in caplog.records if "the disk hangs" in r.getMessage()]
    assert said.endswith("until an earlier store has ended")


def test_a_beginning_that_is_stored_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All prompts of a server may begin with one system prompt: while one of them was computed in
    chunks, the others waited ten seconds each, and kept their blocks."""
    monkeypatch.setattr(saving, "_EARLIER_WAIT_S", 600.0)
    prompts = _beginning_alike(3)
    with _saver(tmp_path) as (store, saver):
        _offered(saver, prompts, 0)
        saver.flush()
        assert store.lookup(prompts[1].tokens) == 64
        for end in (128, 256):  # in two chunks
            saver.offer(SaveSpec("1", "1#0", prompts[1], end, [1] * 8))
            with saver._lock:
                assert saver._changed.wait_for(lambda: not saver.busy("1"), 60)
            if end == 128:
                _offered(saver, prompts, 2)
        saver.flush()
        assert [store.lookup(prompt.tokens) for prompt in prompts] == [256, 256, 256]
        saver.close()


@pytest.mark.parametrize("full", [False, True], ids=["a new segment", "an eviction"])
def test_behind_space_that_is_never_made_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """A new segment is made on the disk, and a full store evicts after a commit: when that hung,
    every request that had ended kept its blocks, vLLM had none left for another, and its shutdown
    did not end."""
    go = threading.Event()
    limits = {"write_buffer_bytes": 8 * MIB, "segment_bytes": 4 * MIB}
    limits |= {"disk_bytes": 4 * MIB, "disk_high": 1.0, "disk_low": 1.0} if full else {}
    where, name = (Index, "commit") if full else (SegmentFiles, "make")
    real = getattr(where, name)

    def stuck(*args: Any, **named: Any) -> Any:
        assert go.wait(120)
        return real(*args, **named)

    prompts = [
        Prompt(np.arange(9999 * i, 9999 * i + 2048, dtype=np.int32), {}, "") for i in range(6)
    ]
    with PrefixStore.open(
        tmp_path / "s",
        Geometry(2, 2, 2, 32, "float32"),
        b"x" * 32,
        Config(**{**SMALL, **limits}),
        "rw",
    ) as store:
        layout: Any = _Zeros()
        saver = saving.Saver(store, [torch.empty(0)] * 2, [layout] * 2)
        if full:
            _offered(saver, prompts, 0)
            saver.flush()
        monkeypatch.setattr(where, name, stuck)
        monkeypatch.setattr(hanging, "KEEPS_S", 0.2)
        monkeypatch.setattr(saving, "_FLUSH_S", 0.2)
        try:
            for i in (1, 2, 3):
                saver.offer(SaveSpec(f"{i}", f"{i}#0", prompts[i], 2048, [1] * 64))
            while any(saver.busy(f"{i}") for i in (1, 2, 3)):
                saver.pause(0.05)
            assert saver.n_skipped == 3 and not saver.reads()
            saver.close()
            assert not saver._thread.ended(0.0)
        finally:
            go.set()
        assert saver._thread.ended(60)
        assert [store.lookup(prompt.tokens) for prompt in prompts[1:4]] == [0, 0, 0]


def test_what_comes_while_the_disk_hangs_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it was stored, and all of it was kept: gigabytes in an hour."""
    go, real = threading.Event(), SegmentFiles.make

    def stuck(*args: Any, **named: Any) -> Any:
        assert go.wait(120)
        return real(*args, **named)

    with PrefixStore.open(
        tmp_path / "s", Geometry(2, 2, 2, 32, "float32"), b"x" * 32, Config(**SMALL), "rw"
    ) as store:
        layout: Any = _Zeros()
        saver = saving.Saver(store, [torch.empty(0)] * 2, [layout] * 2)
        monkeypatch.setattr(SegmentFiles, "make", stuck)
        monkeypatch.setattr(hanging, "KEEPS_S", 0.2)

        def comes_and_ends(i: int) -> None:
            prompt = Prompt(np.arange(9999 * i, 9999 * i + 64, dtype=np.int32), {}, "")
            saver.offer(SaveSpec(f"{i}", f"{i}#0", prompt, 64, [1, 2]))
            saver.end(f"{i}")

        try:
            comes_and_ends(0)
            while saver.busy("0"):
                saver.pause(0.05)
            for i in range(1, 1000):
                comes_and_ends(i)
            assert len(saver._lives) == 1 and saver.n_skipped == 1000
        finally:
            go.set()
        saver.close()


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_loads_behind_one_whose_end_was_cut_off_are_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """They were no longer on any list: their rows could not be evicted until their time limit."""
    geometry, rows = Geometry(2, 2, 2, 32, "float32"), [torch.ones(2, 128, 32)] * 2
    closes, close = iter(range(9)), Session.close

    def interrupted(session: Session) -> None:
        if next(closes) == cut:
            raise KeyboardInterrupt
        close(session)

    with PrefixStore.open(tmp_path / "s", geometry, b"x" * 32, Config(**SMALL), "rw") as store:
        side = ExactSide(store, 64, Patience(60))
        for i in range(3):
            prompt = Prompt(np.arange(1000 * i, 1000 * i + 128, dtype=np.int32), {}, "")
            assert store.store(prompt.tokens, rows, rows).wait(60)
            side.start(LoadSpec(f"{i}", f"{i}#0", prompt, 0, 128, [2 * i, 2 * i + 1]))
        side.begin()
        monkeypatch.setattr(Session, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            for load in side.end():
                load.close()
        for load in side.end():
            load.close()
        assert store.stats()["leases"] == 0


@pytest.mark.parametrize("policy", [None, Recency(keep=0.5)], ids=["exact", "sparse"])
def test_a_step_does_not_wait_for_the_store_longer_than_vllm_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Recency | None
) -> None:
    """Each read was in time by itself. A step waits for those of all layers and hits, and vLLM ends
    the engine, for all clients, when one takes 300 s; after a restart the same requests did again.
    """
    geometry, rows = Geometry(4, 2, 2, 32, "float32"), [torch.ones(2, 128, 32)] * 4
    query, caches = torch.zeros(2, 1, 32), [torch.zeros(9, 2, 64, 64) for _ in range(4)]
    now, retrieve = [0.0], Session.retrieve

    def slow(session: Session, *args: object, **named: object) -> object:
        now[0] += 9.0  # below read_timeout_s
        return retrieve(session, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "retrieve", slow)
    patience = Patience(30.0, lambda: now[0])
    with PrefixStore.open(tmp_path / "s", geometry, b"x" * 32, Config(**SMALL), "rw") as store:
        loads = []
        for i in range(2):
            prompt = Prompt(np.arange(1000 * i, 1000 * i + 128, dtype=np.int32), {}, "")
            assert store.store(prompt.tokens, rows, rows).wait(60)
            spec = LoadSpec(f"{i}", f"{i}#0", prompt, 0, 128, [2 * i, 2 * i + 1], policy)
            loads.append(
                SparseRequest(store, spec, patience) if policy
                else ExactLoad(store, spec, 64, patience)
            )  # fmt: skip
        for layer, cache in enumerate(caches):
            for load in loads:
                if isinstance(load, SparseRequest):
                    load.choose(layer, query, query, 1.0)
                else:
                    load.write(layer, cache, BlockLayout.of(cache, _isas()[0]))
        assert [load.lost for load in loads] == ["late", "late"] and now[0] == 36.0
        for load in loads:
            load.close()
        with pytest.raises(PrefixLost, match="this step has waited for the store for 30 s"):
            with patience.waiting():
                pytest.fail("it waits")
        patience.renew()  # the next step
        load = ExactLoad(store, spec, 64, patience)
        load.write(0, caches[0], BlockLayout.of(caches[0], _isas()[0]))
        assert not load.lost
        load.close()
        assert store.stats()["leases"] == 0


def test_half_of_what_vllm_gives_a_step_is_for_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    envs.disable_envs_cache()  # of an engine that an earlier test had in this process
    monkeypatch.delenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", raising=False)
    assert most_s() == 150
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "5")
    assert most_s() == 2.5


def test_a_request_with_the_id_of_one_that_ended_is_stored_under_its_own_name(
    tmp_path: Path,
) -> None:
    """An id may come again (VLLM_DISABLE_REQUEST_ID_RANDOMIZATION) while the saver has yet to
    forget the request that had it, half of whose prompt it had read: the second one's rows became
    the first prompt's other half, and were served as such from then on."""
    first, second = (Prompt(np.arange(at, at + 128, dtype=np.int32), {}, "") for at in (0, 500))
    a, b = (Tracked(SimpleNamespace(request_id="x"), Exact()) for _ in range(2))
    inside, go = threading.Event(), threading.Event()

    class Slow(_Zeros):
        """Its first read waits."""

        def read(self, kv_cache: torch.Tensor, blocks: list[int]) -> Any:
            inside.set()
            assert go.wait(60)
            return super().read(kv_cache, blocks)

    geometry, layout = Geometry(2, 2, 2, 32, "float32"), Slow()
    with PrefixStore.open(tmp_path / "s", geometry, b"x" * 32, Config(**SMALL), "rw") as store:
        saver = saving.Saver(store, [torch.empty(0)] * 2, [layout] * 2)
        saver.offer(SaveSpec("x", a.key, first, 64, [1, 2]))
        assert inside.wait(60)
        saver.end("x")
        saver.offer(SaveSpec("x", b.key, second, 128, [3, 4, 5, 6]))
        go.set()
        saver.flush()
        assert [store.lookup(prompt.tokens) for prompt in (first, second)] == [0, 128]
        saver.close()


def test_the_answers_of_one_request_are_one_use_of_its_prompt(tmp_path: Path) -> None:
    """With "admit": "second". vLLM makes a request of each answer: the second one's counted as a
    second use, and all of a prompt that never came again was stored. Later on, the tokens after
    the prompt that answers have in common were stored."""
    asked, short, long, other = (
        np.arange(at, at + n, dtype=np.int32)
        for at, n in ((0, 128), (200, 64), (400, 128), (600, 64))
    )
    config = Config(**{**SMALL, "admit": "second"})
    with PrefixStore.open(
        tmp_path / "s", Geometry(2, 2, 2, 32, "float32"), b"x" * 32, config, "rw"
    ) as store:
        layout: Any = _Zeros()
        saver = saving.Saver(store, [torch.empty(0)] * 2, [layout] * 2)

        def stored(name: str, prompt: Any, *answer: Any) -> int:
            """How much is stored of a request's prompt, or of that and its answer."""
            tokens = np.concatenate([prompt, *answer])
            blocks = [1] * (len(tokens) // 32)
            saver.offer(SaveSpec(name, f"{name}#0", Prompt(tokens, {}, ""), len(tokens), blocks))
            saver.flush()
            return store.lookup(tokens)

        assert [stored("0_a", asked), stored("1_a", asked)] == [0, 0]
        assert [stored("0_a", asked, short), stored("1_a", asked, long)] == [0, 0]
        assert [stored("0_b", asked), stored("1_b", asked)] == [128, 128]
        # An answer is as new as it is, whatever was seen of its prompt and of other answers.
        assert [stored("0_b", asked, other), stored("1_b", asked, short)] == [128, 192]
        # Whichever answer a request goes on from was seen before.
        assert stored("0_c", np.concatenate([asked, long])) == 256
        assert stored("d", np.concatenate([asked, other])) == 192
        # The beginning that answers share was seen once: after no whole window, and after some
        # that are stored. It is stored when another request has it.
        alike, one, two = (np.arange(at, at + 128, dtype=np.int32) for at in (1000, 1200, 1400))
        assert [stored("0_e", alike), stored("1_e", alike)] == [0, 0]
        assert [stored("0_f", asked, one), stored("1_f", asked, one)] == [128, 128]
        assert [stored("0_g", asked, one), stored("1_g", asked, one, two)] == [256, 256]
        assert stored("2_g", asked, one, two) == 256
        assert stored("h", asked, one, two) == 384
        saver.close()


def test_an_answer_is_no_second_use_however_many_requests_come_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "admit": "second". A request's note was forgotten after a number of other requests: if
    its own answer took long, that was its prompt's second use, and all of it was stored."""
    monkeypatch.setattr(uses, "_MOST_NOTED", 2)
    config = Config(**{**SMALL, "admit": "second"})
    a, b, c, d, answer = (np.arange(at, at + 128, dtype=np.int32) for at in range(0, 1000, 200))
    with PrefixStore.open(
        tmp_path / "s", Geometry(2, 2, 2, 32, "float32"), b"x" * 32, config, "rw"
    ) as store:
        layout: Any = _Zeros()
        saver = saving.Saver(store, [torch.empty(0)] * 2, [layout] * 2)

        def stored(name: str, tokens: Any, *, ends: bool = False) -> int:
            blocks = [1] * (len(tokens) // 32)
            saver.offer(SaveSpec(name, f"{name}#0", Prompt(tokens, {}, ""), len(tokens), blocks))
            saver.flush()
            if ends:
                saver.end(name)
            return store.lookup(tokens)

        assert stored("a", a) == 0
        for name, new in (("b", b), ("c", c), ("d", d)):
            assert stored(name, new, ends=True) == 0
        assert stored("a", np.concatenate([a, answer])) == 0
        assert stored("b", b) == 128  # one that has ended is forgotten, in its turn
        saver.close()


def test_what_is_not_stored_is_counted_and_each_reason_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts that waited in too long a queue, and refused stores, showed up nowhere: a server
    whose store was full looked like one whose prompts never came again."""
    layout: Any = _Zeros()
    caches = {name: torch.empty(0) for name in ("one", "two")}
    config = Config(**SMALL, daily_write_bytes=1)
    with PrefixStore.open(
        tmp_path / "s", Geometry(2, 2, 2, 32, "float32"), b"x" * 32, config, "rw"
    ) as store:
        worker = WorkerSide(store, caches, [layout] * 2, None, store_new=True)
        assert worker.saver is not None

        def counted(first: int) -> dict[str, int]:
            """The counts for three more prompts, as vLLM hears them."""
            assert worker.saver is not None
            for at in range(first, first + 3):
                prompt = Prompt(np.arange(at, at + 128, dtype=np.int32), {}, "")
                worker.saver.offer(SaveSpec(f"{at}", f"{at}#0", prompt, 128, [1] * 4))
            worker.flush()
            worker.take_report()
            return worker.take_counts()

        assert counted(0) == {"refused": 3}
        monkeypatch.setattr(saving, "MOST_WAITING", 0)
        assert counted(3) == {"skipped": 3}
        worker.take_report()
        assert worker.take_counts() == {}
        worker.close()
    assert {"refused", "skipped"} <= COUNTS.keys()
    said = [r.getMessage() for r in caplog.records if "is not stored" in r.getMessage()]
    assert len(said) == 2 and "daily write budget" in said[0] and "0 parts of prompts" in said[1]


def test_bytes_out_of_anothers_read_are_counted_apart(tmp_path: Path) -> None:
    """A server's bytes "read from the SSD" were many times what it read when requests came at
    once."""
    layout: Any = _Zeros()
    caches = {name: torch.empty(0) for name in ("one", "two")}
    report = AccessReport("exact", 128, {"ssd": 256}, {"ssd": 4096}, 1024, 0.0)
    with PrefixStore.open(
        tmp_path / "s", Geometry(2, 2, 2, 32, "float32"), b"x" * 32, Config(**SMALL), "rw"
    ) as store:
        worker = WorkerSide(store, caches, [layout] * 2, None, store_new=False)
        prompt = Prompt(np.arange(128, dtype=np.int32), {}, "")
        worker._served(LoadSpec("a", "a#0", prompt, 0, 128, [1] * 4), report, "exact", 128)
        counts = worker.take_counts()
        worker.close()
    assert (counts["read_bytes_ssd"], counts["shared_bytes"]) == (4096, 1024)
    assert counts.keys() <= COUNTS.keys()


def test_what_a_plan_has_stored_of_a_request_whose_blocks_it_wants_is_given_up(
    tmp_path: Path,
) -> None:
    """The saver was told before it was offered: an answer that ended just before vLLM preempted,
    its prompt long stored, held its blocks until the disk had them, with nobody left to preempt."""
    layout: Any = _Zeros()
    caches = {name: torch.empty(0) for name in ("one", "two")}
    with PrefixStore.open(
        tmp_path / "s", Geometry(2, 2, 2, 32, "float32"), b"x" * 32, Config(**SMALL), "rw"
    ) as store:
        worker, gate = (
            WorkerSide(store, caches, [layout] * 2, None, store_new=True),
            threading.Event(),
        )
        assert worker.saver is not None
        worker.saver._save = lambda spec: gate.wait(60)  # type: ignore[method-assign]
        spec = SaveSpec("R", "R#0", Prompt(np.arange(128, dtype=np.int32), {}, ""), 128, [1] * 4)
        plan = StepPlan(saves=[spec], held=["R"], ended=["R"], given_up=["R#0"], number=1)
        worker.begin(plan)
        worker.start(plan)
        worker.finish()
        assert worker.saved() == {"R"} and worker.saver.n_skipped == 1
        gate.set()
        worker.close()
        assert store.lookup(spec.prompt.tokens) == 0


def test_a_window_that_a_step_only_began_holds_no_write_buffer(tmp_path: Path) -> None:
    """Half a window held a buffer in each layer until the request's next step, and the thread that
    should have stored that step waited for buffers: prompts that were prefilled in chunks were not
    stored, and the log blamed the disk."""
    geometry = Geometry(24, 2, 2, 32, "float32")  # 32 KiB a window: two prompts' are too many
    prompts = [Prompt(np.arange(at, at + 256, dtype=np.int32), {}, "") for at in range(2)]
    config = Config(**{**SMALL, "write_buffer_bytes": MIB})
    with PrefixStore.open(tmp_path / "s", geometry, b"x" * 32, config, "rw") as store:
        layout: Any = _Zeros()
        saver = saving.Saver(store, [torch.empty(0)] * 24, [layout] * 24)
        for end in (40, 100, 256):
            for i, prompt in enumerate(prompts):
                saver.offer(SaveSpec(f"{i}", f"{i}#0", prompt, end, [1] * -(-end // 32)))
                with saver._lock:
                    assert saver._changed.wait_for(lambda i=i: not saver.busy(f"{i}"), 60)
        saver.flush()
        assert [store.lookup(prompt.tokens) for prompt in prompts] == [256, 256]
        assert saver.n_skipped == 0
        saver.close()


def _offer(saver: saving.Saver, name: str, prompt: Prompt, end: int) -> None:
    saver.offer(SaveSpec(name, f"{name}#0", prompt, end, [1] * (end // 32)))


def _is_read(saver: saving.Saver, name: str) -> bool:
    with saver._lock:
        return saver._changed.wait_for(lambda: not saver.busy(name), 30)


def test_a_prompt_whose_next_chunk_does_not_come_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that begins like one in mid-prefill waited for that one's last chunk. In a pause
    none comes: the prompt's blocks stayed held, and vLLM's pause with mode keep never returned."""
    monkeypatch.setattr(saving, "_EARLIER_WAIT_S", 0.01)
    shared, rest = np.arange(64), np.arange(192)
    a, b = (
        Prompt(np.concatenate([shared, at + rest]).astype(np.int32), {}, "") for at in (100, 300)
    )
    geometry, layout = Geometry(2, 2, 2, 32, "float32"), _Zeros()
    with PrefixStore.open(tmp_path / "s", geometry, b"x" * 32, Config(**SMALL), "rw") as store:
        saver = saving.Saver(store, [torch.empty(0)] * 2, [layout] * 2)
        offer, is_read = partial(_offer, saver), partial(_is_read, saver)
        try:
            offer("a", a, 128)
            assert is_read("a")
            offer("b", b, 256)
            saver.end("b")
            assert is_read("b")
        finally:  # a's last chunk, which also lets b go on where it waits for it
            offer("a", a, 256)
            saver.end("a")
            saver.flush()
        assert [store.lookup(prompt.tokens) for prompt in (a, b)] == [256, 256]
        assert saver.n_skipped == 0
        saver.close()


def test_a_prompt_whose_chunks_keep_coming_holds_up_no_other_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that began like it waited for its last chunk, each new one for 10 s more: finished
    requests held their blocks for the whole prefill of another."""
    now = [0.0]
    monkeypatch.setattr(saving.time, "monotonic", lambda: now[0])
    a, b = (
        Prompt(np.concatenate([np.arange(64), at + np.arange(960)]).astype(np.int32), {}, "")
        for at in (2000, 4000)
    )
    geometry, layout = Geometry(2, 2, 2, 32, "float32"), _Zeros()
    with PrefixStore.open(tmp_path / "s", geometry, b"x" * 32, Config(**SMALL), "rw") as store:
        saver = saving.Saver(store, [torch.empty(0)] * 2, [layout] * 2)
        offer, is_read = partial(_offer, saver), partial(_is_read, saver)
        ends = iter(range(64, 1024, 64))
        try:
            offer("a", a, next(ends))
            assert is_read("a")
            offer("b", b, 1024)
            saver.end("b")
            for end in ends:
                now[0] += 2.0
                offer("a", a, end)
                assert is_read("a") or not saver.busy("b")
                if not saver.busy("b"):
                    break
            assert not saver.busy("b") and now[0] <= 12.0
        finally:
            offer("a", a, 1024)
            saver.end("a")
            saver.flush()
        assert [store.lookup(prompt.tokens) for prompt in (a, b)] == [1024, 1024]
        assert saver.n_skipped == 0
        saver.close()


_ENDS_WITHOUT_SHUTDOWN = """
import atexit, sys, threading
from pathlib import Path
from tests.vllm.served import Served, words

served = Served(Path(sys.argv[1]), "float32", Path(sys.argv[2]))
go, begin = threading.Event(), served.worker.saver._begin
served.worker.saver._begin = lambda *args: go.wait(60) and begin(*args)
served.ask([words(300, seed=3)])
assert served.store.lookup(words(300, seed=3)) == 0
atexit.register(go.set)
"""


def test_a_program_that_ends_without_shutdown_stores_what_it_computed_and_says_nothing(
    serve: Serve, models: dict[str, Path], tmp_path: Path
) -> None:
    """Every such program ended in a traceback, as vLLM shuts down after the store was closed; rows
    that waited to be stored were lost, as the store was closed under them."""
    command = [sys.executable, "-c", _ENDS_WITHOUT_SHUTDOWN, models["opt"], tmp_path / "store"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "is not stored" not in done.stderr
    (answer,) = serve().ask([PROMPT])
    assert answer.n_cached == 256
