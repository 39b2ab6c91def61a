"""Exact reuse inside vLLM: the tokens of plain vLLM, whatever happens on the way."""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM has an environment of its own: make test-vllm")

import torch

from impress.engines.vllm import shared
from impress.engines.vllm.blocks import BlockLayout
from impress.write.index import Index
from tests.vllm.served import MIB, SMALL, Served, params, tokens, words
from tiers.iopool import IoPool
from tiers.ssd import SsdTier
from tiers.ticket import Signal, Ticket

Serve = Callable[..., Served]

DOCUMENT = words(700, seed=1)  # five blocks of 128, ten windows of 64 and a bit
QUESTIONS = [DOCUMENT + words(20 + i, seed=10 + i) for i in range(8)]
HIT = 640


def _plain(serve: Serve, *args: Any, ask: Any = None, **named: Any) -> list[list[int]]:
    served = serve(*args, store=False, **named)
    answers = tokens(served.ask(ask or QUESTIONS))
    served.close()
    return answers


def _stored(serve: Serve, *args: Any, **named: Any) -> Served:
    """An engine whose store holds the document, and whose own cache is empty."""
    served = serve(*args, **named)
    served.ask(QUESTIONS[:1])
    served.forget()
    return served


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["opt", "llama"])
def test_answers_are_those_of_plain_vllm_across_a_restart(
    serve: Serve, model: str, dtype: str
) -> None:
    plain = serve(model, dtype, store=False)
    alone = tokens(plain.ask(QUESTIONS[:1]))
    together = tokens(plain.ask(QUESTIONS))
    plain.close()
    first = serve(model, dtype)
    assert tokens(first.ask(QUESTIONS[:1])) == alone
    first.settle()
    assert first.store.stats()["tokens"] >= HIT
    first.close()
    second = serve(model, dtype)
    answers = second.ask(QUESTIONS[:1])
    assert tokens(answers) == alone
    assert answers[0].n_cached == HIT
    assert answers[0].said["mode"] == "exact"
    second.forget()
    answers = second.ask(QUESTIONS)
    assert tokens(answers) == together
    assert [answer.n_cached for answer in answers] == [HIT] * 8
    second.settle()
    assert second.used_blocks() == 0
    assert second.store.stats()["leases"] == 0
    second.store.check()


def test_without_vllms_own_prefix_cache_every_request_reads_the_store(serve: Serve) -> None:
    plain = _plain(serve)
    served = serve(enable_prefix_caching=False)
    served.ask(QUESTIONS[:1])
    served.settle()
    answers = served.ask(QUESTIONS)
    assert tokens(answers) == plain
    assert [answer.said["hit_tokens"] for answer in answers] == [HIT] * 8
    rows = served.store.geometry.n_layers * HIT
    assert all(answer.said["rows"] == rows for answer in answers)


def test_of_a_prefix_that_vllm_has_in_part_only_the_rest_is_read(serve: Serve) -> None:
    plain = _plain(serve)
    served = serve()
    served.ask(QUESTIONS[:1])
    served.forget()
    (short,) = served.ask([QUESTIONS[0][:140]], n=1)  # one block is vLLM's own again
    assert short.n_cached == 128
    (answer,) = served.ask(QUESTIONS[:1])
    assert answer.tokens == plain[0]
    assert answer.n_cached == HIT
    assert answer.said["rows"] == served.store.geometry.n_layers * (HIT - 128)


def test_admission_at_second_use_stores_what_came_before(serve: Serve) -> None:
    served = serve(extra={"config": {**SMALL, "admit": "second"}}, max_num_batched_tokens=256)
    prompt = QUESTIONS[0]
    n = len(prompt) // 64 * 64
    (first,) = served.ask([prompt], n=130)  # in chunks, and once more with its answer
    served.forget()
    assert served.store.lookup(prompt) == 0
    (second,) = served.ask([prompt])
    served.forget()
    assert served.store.lookup(prompt) == n
    (third,) = served.ask([[*prompt, *first.tokens[:-1]]])
    assert third.n_cached == n // 128 * 128
    served.settle()
    grown = [*prompt, *first.tokens[:-1]]  # its windows were seen with the first answer
    assert served.store.lookup(grown) == len(grown) // 64 * 64
    assert first.tokens[:10] == second.tokens


def test_several_answers_of_one_request_are_one_use(serve: Serve) -> None:
    """vLLM makes a request of each answer, and from their ids the saver tells that they are one."""
    from vllm import SamplingParams

    served = serve(extra={"config": {**SMALL, "admit": "second"}})
    two = SamplingParams(n=2, seed=1, max_tokens=5, ignore_eos=True, detokenize=False)
    prompt = QUESTIONS[0]
    for stored in (0, len(prompt) // 64 * 64):
        served.llm.generate([{"prompt_token_ids": prompt}], two, use_tqdm=False)
        served.forget()
        assert served.store.lookup(prompt) == stored


def test_what_any_of_several_answers_read_is_said(serve: Serve) -> None:
    """vLLM passes on what the last one to end says, and that one had found the first one's blocks
    in vLLM's own cache: nothing seemed to have been read."""
    from vllm import SamplingParams

    served = serve()
    served.ask(QUESTIONS[:1])
    served.forget()
    two = SamplingParams(n=2, seed=1, max_tokens=5, ignore_eos=True, detokenize=False)
    (out,) = served.llm.generate([{"prompt_token_ids": QUESTIONS[0]}], two, use_tqdm=False)
    assert out.kv_transfer_params["impress"]["hit_tokens"] == len(QUESTIONS[0]) // 128 * 128


def test_what_prompts_share_is_stored_once(serve: Serve) -> None:
    served = serve()
    served.ask(QUESTIONS)
    served.settle()
    windows = {tuple(q[: 64 * (i + 1)]) for q in QUESTIONS for i in range(len(q) // 64)}
    assert served.store.stats()["windows"] == len(windows)
    assert sum(r.n_windows for r in served.store.catalog.records()) == len(windows)


def test_a_store_that_others_did_already_is_not_counted(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight equal prompts at once, one is stored, but `vllm:impress_stored_total` said eight."""
    served = serve()
    monkeypatch.setattr(served.worker, "take_counts", dict)  # the counts stay
    served.ask(QUESTIONS[:1] * 8)
    served.settle()
    served.worker.take_report()
    assert served.worker.counts["stored"] == 1


def test_the_answer_is_stored_too(serve: Serve) -> None:
    served = serve()
    (answer,) = served.ask(QUESTIONS[:1], n=130)
    served.settle()
    conversation = QUESTIONS[0] + answer.tokens[:-1]
    assert served.store.lookup(conversation) == len(conversation) // 64 * 64


def test_prefills_in_chunks_are_stored_and_served(serve: Serve) -> None:
    small = {"max_num_batched_tokens": 192, "max_num_seqs": 4}
    plain = _plain(serve, **small)
    served = _stored(serve, **small)
    answers = served.ask(QUESTIONS)
    assert tokens(answers) == plain
    assert answers[0].n_cached == HIT


def test_preempted_requests_answer_the_same_and_leave_nothing(serve: Serve) -> None:
    few = {"num_gpu_blocks_override": 10, "max_model_len": 1024}
    prompts = [words(240 + 4 * i, seed=40 + i) for i in range(4)]
    want = 40
    plain = serve(store=False, **few)
    expected = tokens(plain.ask(prompts, n=want))
    plain.close()
    served = serve(**few)
    preempted: list[str] = []
    preempt = served.scheduler._preempt_request
    served.scheduler._preempt_request = lambda request, *rest, **named: (
        preempted.append(request.request_id),
        preempt(request, *rest, **named),
    )
    for _ in range(2):
        assert tokens(served.ask(prompts, n=want)) == expected
        served.settle()
    assert preempted, "the test wants preemptions"
    assert served.used_blocks() == 0
    assert served.store.stats()["leases"] == 0
    served.store.check()


def test_a_request_taken_out_of_its_step_leaves_nothing_to_be_found(serve: Serve) -> None:
    """With priorities vLLM preempts a request that it has just scheduled, whose new blocks it can
    find by then: the request went on from rows that another prompt had left in one of them, and
    stored all of it, for every server that reads the store."""
    few = {
        "num_gpu_blocks_override": 11, "max_model_len": 1280, "scheduling_policy": "priority",
        "long_prefill_token_threshold": 384, "max_num_batched_tokens": 2048,
    }  # fmt: skip
    long, small = words(1024, seed=70), {"num_gpu_blocks_override": 20}
    plain = serve(store=False, **small)
    expected = tokens(plain.ask([long]))
    plain.close()
    served = serve(**few)
    served.ask([words(1200, seed=71)], n=1)  # every block has rows of this one
    served.forget()
    engine, outs = served.llm.llm_engine, {}

    def step() -> None:
        for out in engine.step():
            outs[out.request_id] = list(out.outputs[0].token_ids)

    taken_out, preempt = list[str](), served.scheduler._preempt_request
    pool = served.scheduler.kv_cache_manager.block_pool

    def noted(request: Any, *rest: Any, **named: Any) -> None:
        names = request.block_hashes[6:7]  # of what this step was to compute
        if any(pool.get_cached_block(name, [0]) for name in names):
            taken_out.append(request.request_id)
        preempt(request, *rest, **named)

    served.scheduler._preempt_request = noted
    engine.add_request("decodes", {"prompt_token_ids": words(100, 72)}, params(20), priority=0)
    step()
    engine.add_request("long", {"prompt_token_ids": long}, params(10), priority=5)
    step()
    engine.add_request("short", {"prompt_token_ids": words(128, 73)}, params(2), priority=0)
    while engine.has_unfinished_requests():
        step()
    assert taken_out and taken_out[0].startswith("long"), "the test wants it taken out of its step"
    (preempted,) = (out for name, out in outs.items() if name.startswith("long"))
    assert preempted == expected[0]
    served.settle()
    served.close()
    assert tokens(serve(**small).ask([long])) == expected


# ---- when reads fail -----------------------------------------------------------------------------


def _damage(served: Served) -> None:
    """Overwrite rows of the last layer on the disk: its checksums no longer match."""
    path = next((Path(served.store.path) / "shards/main/segments").glob("*.seg"))
    (record,) = served.store.catalog.records()
    part = record.parts[0]
    with path.open("r+b") as file:
        file.seek(part.off + part.length - part.length // 8)
        file.write(b"\x5a" * (part.length // 8))
    served.store.drop_caches()


@pytest.mark.parametrize("budget", [192, 2048], ids=["in-chunks", "in-one-step"])
def test_a_damaged_prefix_is_computed_again(serve: Serve, budget: int) -> None:
    small = {"max_num_batched_tokens": budget, "max_num_seqs": 8}
    plain = _plain(serve, **small)
    served = _stored(serve, **small)
    _damage(served)
    answers = served.ask(QUESTIONS)
    assert tokens(answers) == plain
    assert sum(served.store.stats()["lost"].values()) >= 1
    assert served.store.stats()["leases"] == 0
    again = served.ask(QUESTIONS)  # nothing of the lost load is found in vLLM's own cache
    assert tokens(again) == plain
    served.settle()
    assert served.used_blocks() == 0


def test_a_prefix_that_the_worker_has_given_up_is_not_promised_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that stores nothing drops what does not read back for itself alone. A scheduler with
    a view of its own promised it to every later request, and each was a lost load."""
    plain = _plain(serve, ask=QUESTIONS[:1])
    served = _stored(serve)
    _damage(served)
    served.close()
    acquire = shared.acquire  # of the view; the connector has the worker's
    monkeypatch.setattr(shared, "acquire", lambda *names: names[-1] and acquire(*names))
    served = serve(extra={"store_new": False})
    assert not served.scheduler.connector.scheduler._view.shared
    before = served.counted()
    for _ in range(3):
        assert tokens(served.ask(QUESTIONS[:1])) == plain
        served.forget()
    grown = {name: n - before.get(name, 0) for name, n in served.counted().items()}
    assert grown["vllm:impress_lost"] == 1
    assert grown["vllm:external_prefix_cache_hits"] == HIT


def test_a_load_that_gets_no_memory_is_computed_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a device had too little memory beside vLLM's share, its error ended the engine."""
    plain = _plain(serve)
    served = _stored(serve)
    load, take_invalid, invalid = BlockLayout.load, served.worker.take_invalid, set[int]()

    def full(layout: BlockLayout, kv_cache: torch.Tensor, *rows: torch.Tensor) -> None:
        if kv_cache is served.worker.caches[1]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        load(layout, kv_cache, *rows)

    def told() -> set[int]:
        found: set[int] = take_invalid()
        invalid.update(found)
        return found

    monkeypatch.setattr(BlockLayout, "load", full)
    monkeypatch.setattr(served.worker, "take_invalid", told)
    assert tokens(served.ask(QUESTIONS)) == plain
    assert len(invalid) >= HIT // 128
    served.settle()
    assert served.used_blocks() == 0
    assert served.store.stats()["leases"] == 0


def test_a_lease_shorter_than_promised_is_computed_from_there(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read of it is kept, and was in no answer and no counter."""
    longer = QUESTIONS[0][:384] + words(400, seed=99)
    plain, expected = _plain(serve), _plain(serve, ask=[longer])
    served = _stored(serve)
    view = served.scheduler.connector.scheduler._view
    real, promised = view.lookup, []

    def lookup(prompt: Any, *names: Any) -> int:
        found = real(prompt, *names)
        if len(prompt) == len(longer) and not promised:
            promised.append(found)
            return 768  # stands for a span evicted between lookup and lease
        return int(found)

    monkeypatch.setattr(view, "lookup", lookup)
    before = served.counted()
    (answer,) = served.ask([longer])
    assert (answer.tokens, promised) == (expected[0], [384])
    assert (answer.said["hit_tokens"], answer.said["rows"]) == (384, 384 * 3)
    grown = {name: n - before.get(name, 0) for name, n in served.counted().items()}
    assert grown["vllm:impress_read_rows_ssd"] == 384 * 3
    assert grown["vllm:impress_lost"] == grown["vllm:impress_requests_exact"] == 1
    assert tokens(served.ask(QUESTIONS)) == plain


# ---- never in the way ----------------------------------------------------------------------------


def test_the_scheduler_starts_no_io_and_waits_for_none(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = _stored(serve)
    inside = threading.local()
    calls: list[str] = []

    def watched(name: str) -> None:
        method = getattr(served.scheduler, name)

        def call(*args: Any, **named: Any) -> Any:
            inside.name = name
            calls.append(name)
            try:
                return method(*args, **named)
            finally:
                inside.name = ""

        monkeypatch.setattr(served.scheduler, name, call)

    for name in ("add_request", "schedule", "update_from_output", "finish_requests"):
        watched(name)

    def guarded(where: Any, what: str) -> None:
        real = getattr(where, what)

        def call(*args: Any, **named: Any) -> Any:
            assert not getattr(inside, "name", ""), f"{inside.name} comes to {what}"
            return real(*args, **named)

        monkeypatch.setattr(where, what, call)

    for where, what in (
        (IoPool, "submit"), (SsdTier, "read"), (SsdTier, "write"), (Index, "_read"),
        (Index, "_write"), (Ticket, "wait"), (Ticket, "over"), (Signal, "wait"),
    ):  # fmt: skip
        guarded(where, what)
    answers = served.ask(QUESTIONS)
    assert answers[0].n_cached == HIT
    assert {"add_request", "schedule", "update_from_output"} <= set(calls)


def test_a_disk_that_hangs_stops_no_answer(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()
    go = threading.Event()
    write = SsdTier.write

    def stuck(self: Any, *args: Any) -> Any:
        assert go.wait(60)
        return write(self, *args)

    monkeypatch.setattr(SsdTier, "write", stuck)
    try:
        answers = served.ask(QUESTIONS[:2])
        assert all(len(answer.tokens) == 10 for answer in answers)
        assert served.store.stats()["tokens"] == 0
    finally:
        go.set()
    served.settle()
    assert served.store.stats()["tokens"] >= HIT


def test_an_engine_that_is_stepped_until_it_is_idle_can_be_reset_and_sleep(serve: Serve) -> None:
    """As docs/VLLM.md says of engines in this process: nobody else steps them. Sleep is a reset."""
    served = serve()

    def step_until_idle() -> None:
        while served.scheduler.has_requests():
            served.llm.llm_engine.step()

    served.ask(QUESTIONS[:1])
    step_until_idle()
    assert served.used_blocks() == 0
    served.worker.flush()  # its blocks are given back once they are read, before they are durable
    assert served.llm.reset_prefix_cache()
    assert served.ask(QUESTIONS[:1])[0].n_cached == HIT
    step_until_idle()
    served.llm.sleep(1)
    served.llm.wake_up()
    assert served.ask(QUESTIONS[:1])[0].n_cached == 0


def _ours_bytes() -> int:
    """Bytes that this package's lines have allocated and still hold. vLLM alone grows by more."""
    lines = [tracemalloc.Filter(True, f"*/{name}/*") for name in ("impress", "tiers")]
    found = tracemalloc.take_snapshot().filter_traces(lines).statistics("filename")
    return sum(line.size for line in found)


def test_aborted_requests_leak_nothing(serve: Serve, request: pytest.FixtureRequest) -> None:
    """Requests come, hit, are stored and are cut off at any moment; then all is given back."""
    total = request.config.getoption("--aborts")
    served = serve(
        num_gpu_blocks_override=60, max_num_batched_tokens=512, max_model_len=1536, max_num_seqs=8,
        extra={"floor": {"name": "recency", "keep": 0.25}},
    )  # fmt: skip
    policies = [None, {"name": "recency", "keep": 0.5}, {"name": "keep_all"}]
    engine, rng = served.llm.llm_engine, random.Random(7)
    documents = [words(130 * n, seed=200 + n) for n in range(1, 9)]
    alive: list[str] = []
    held = 0
    if total >= 1000:
        tracemalloc.start()
        request.addfinalizer(tracemalloc.stop)
    for i in range(total):
        if total >= 1000 and i == total // 3:  # the first requests fill pools
            held = _ours_bytes()
        prompt = rng.choice(documents) + words(rng.randint(1, 200), seed=1000 + i)
        engine.add_request(
            str(i), {"prompt_token_ids": prompt}, params(rng.randint(1, 40), rng.choice(policies))
        )
        alive.append(str(i))
        for _ in range(rng.randint(0, 3)):
            done = {output.request_id for output in engine.step() if output.finished}
            alive = [name for name in alive if name not in done]
        if alive and rng.random() < 0.6:
            engine.abort_request([alive.pop(rng.randrange(len(alive)))])
    while engine.has_unfinished_requests():
        engine.step()
    served.settle()
    assert served.used_blocks() == 0
    assert served.store.stats()["leases"] == 0
    assert served.forgets_all()
    assert not served.worker.sparse._by_block
    assert not served.scheduler.connector.scheduler._tracked
    served.store.check()
    if total >= 1000:  # only what the index of what was stored takes
        grown = _ours_bytes() - held
        print(f"impress holds {grown / MIB:.1f} MiB more after {total - total // 3} requests")
        assert grown < 16 * MIB
    (answer,) = served.ask([documents[-1] + words(9, seed=5)])
    assert answer.n_cached >= 1024 - 128
