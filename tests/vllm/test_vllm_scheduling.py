"""The scheduler's side alone: what becomes of a request between its arrival and its step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM has an environment of its own: make test-vllm")

from impress.engines.vllm import gaps, scheduling
from impress.engines.vllm.events import Events
from impress.engines.vllm.gaps import gap_of
from impress.engines.vllm.scheduling import SchedulerSide
from impress.engines.vllm.settings import Settings
from impress.engines.vllm.step import StepPlan, StepReport
from impress.errors import BadInput
from tests.vllm.test_vllm_keys import _adapter_in, _request

N_TOKENS = 300


def _side(*, mixes_adapters: bool = False) -> SchedulerSide:
    """The side of a store that holds the whole windows of every prompt; a request has 3 blocks."""
    view: Any = SimpleNamespace(
        lookup=lambda tokens, *names: len(tokens) // 64 * 64,
        current=True,
        refresh=lambda: None,
        shared=False,
    )
    served: Any = SimpleNamespace(block_size=128, lora="", mixes_adapters=mixes_adapters)
    events = Events(enabled=False, block_size=128)
    side = SchedulerSide(Settings.of({"store": "unused"}), served, view, events)
    pool = SimpleNamespace(num_gpu_blocks=9, get_num_free_blocks=lambda: 0)
    side.kv_cache_manager = SimpleNamespace(
        get_block_ids=lambda request_id: ([1, 2, 3],), evict_blocks=lambda blocks: None,
        block_pool=pool,
    )  # fmt: skip
    return side


def _arrives(
    side: SchedulerSide, n_tokens: int = N_TOKENS, name: str = "r", **given: Any
) -> Any:  # fmt: skip
    """A request of `n_tokens` tokens that has arrived."""
    request = _request(
        request_id=name, kv_transfer_params=None, resumable=False, pooling_params=None,
        num_tokens=n_tokens, num_prompt_tokens=n_tokens, all_token_ids=list(range(n_tokens)),
        num_computed_tokens=0, num_preemptions=0, num_output_tokens=0,
        skip_reading_prefix_cache=False, block_hashes=[], **given,
    )  # fmt: skip
    side.add(request)
    return request


def _step(side: SchedulerSide, request: Any, hit: int) -> StepPlan:
    """The plan of the step that computes a request's prompt, except for a hit."""
    side.allocated(request, hit)
    n_new = request.num_tokens - hit
    request.num_computed_tokens = hit
    return side.plan(_scheduled({"r": n_new}, ["r"]))


def _scheduled(
    n_new: dict[str, int], admitted: Sequence[str] = (), **new_blocks: list[int]
) -> Any:  # fmt: skip
    """What vLLM has scheduled; `new_blocks` are those of running requests."""
    running = SimpleNamespace(
        req_ids=[*new_blocks], new_block_ids=[(ids,) for ids in new_blocks.values()],
        resumed_req_ids=set(),
    )  # fmt: skip
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(n_new.values()), num_scheduled_tokens=n_new,
        scheduled_cached_reqs=running,
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in admitted],
    )  # fmt: skip


@pytest.mark.parametrize("n_tokens", [N_TOKENS, 320], ids=["a ragged end", "whole windows"])
def test_an_adapter_saved_again_while_its_request_waits_for_room_is_a_miss(
    tmp_path: Path, n_tokens: int
) -> None:
    """The step that had room for the request asked for its keys again, and what was raised there
    ended the server. For whole windows it did not ask: vLLM loaded the new adapter, and its KV was
    stored under the old one's name."""
    adapter = _adapter_in(tmp_path / "a", 1).lora_request
    side = _side()
    request = _arrives(side, n_tokens, lora_request=adapter)
    assert side.matched(request, 0) == 256
    _adapter_in(tmp_path / "a", 2)
    assert side.matched(request, 0) == 0
    plan = _step(side, request, 0)
    assert (plan.loads, plan.saves) == ([], [])
    assert side.finish(request, [1, 2, 3]) == (False, None)


def test_an_adapter_saved_again_in_a_requests_own_step_ends_nothing(tmp_path: Path) -> None:
    adapter = _adapter_in(tmp_path / "a", 1).lora_request
    side = _side()
    request = _arrives(side, lora_request=adapter, cache_salt="mine")
    assert side.matched(request, 0) == 256
    _adapter_in(tmp_path / "a", 2)
    plan = _step(side, request, 256)
    (load,) = plan.loads
    assert load.prompt.tokens.tolist() == list(range(256))
    assert (list(load.prompt.extra), load.prompt.tenant) == ([0], "salt:mine")
    assert plan.saves == []


def test_a_request_for_log_probabilities_of_its_prompt_reads_nothing() -> None:
    """vLLM 0.32 gives such a hit up by itself; another might leave out the logits of its rows."""
    side = _side()
    request = _arrives(side, 320)
    request.skip_reading_prefix_cache = True
    assert side.matched(request, 0) == 0
    assert _step(side, request, 0).loads == []
    request.skip_reading_prefix_cache = False
    assert side.matched(request, 0) == 256


def test_blocks_of_a_prompt_that_was_lost_as_it_was_handed_over_are_held_to_its_end() -> None:
    """The step that computed them was cut short, and the next took its rows back: then nothing of
    the request counted as handed over, an abort freed its blocks, and another request's rows in
    them were stored under its name."""
    side = _side()
    request = _arrives(side, 320)
    assert side.matched(request, 0) == 256
    side._tracked["r"].n_stored = 0  # what it was told of is no longer stored
    assert _step(side, request, 256).saves
    side.hear(StepReport(), [1])
    assert (request.num_computed_tokens, side._tracked["r"].n_saved) == (0, 0)
    assert side.finish(request, [1, 2, 3])[0]


def test_a_sparse_life_is_not_found_by_the_lives_after_it() -> None:
    """After a preemption a request that had got chosen rows was admitted without a load, as the
    store had lost its prefix, and kept the names of its earlier blocks: preempted again, it built
    on rows that were computed on chosen ones, and they were stored as exact."""
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    size = 64
    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=32, dtype=torch.float32)
    config = KVCacheConfig(64, [], [KVCacheGroupSpec(["l"], spec)])
    manager = KVCacheManager(
        config, max_model_len=2048, scheduler_block_size=size, hash_block_size=size
    )
    found = [128]
    view: Any = SimpleNamespace(lookup=lambda *_: found[0], current=True)
    served: Any = SimpleNamespace(block_size=size, lora="", mixes_adapters=False)
    settings = Settings.of({"store": "unused", "policy": {"name": "random", "keep": 0.3}})
    side = SchedulerSide(settings, served, view, Events(enabled=False, block_size=size))
    side.kv_cache_manager = manager
    hasher = get_request_block_hasher(size, sha256)
    request = Request("r", [*range(140)], SamplingParams(max_tokens=400), None, block_hasher=hasher)
    side.add(request)
    assert side._tracked["r"].private

    def lives() -> tuple[int, list[int]]:
        """Admits it, decodes, preempts it; returns (what it found of its own, its blocks)."""
        blocks, n_local, _ = manager.get_computed_blocks(request)
        n = side.matched(request, n_local)
        n_new = request.num_tokens - n_local - n
        assert manager.allocate_slots(
            request, n_new, n_local, blocks, num_external_computed_tokens=n
        )
        side.allocated(request, n)
        request.num_computed_tokens = n_local + n
        side.plan(_scheduled({"r": n_new}, ["r"]))
        side.hear(StepReport(), [])
        request.num_computed_tokens = request.num_tokens
        for token in range(70):
            request.append_output_token_ids(1000 + token)
            manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1
        (ids,) = manager.get_block_ids("r")
        manager.free(request)
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        return n_local, [*ids]

    n_local, sparse = lives()
    assert n_local == 0 and side._tracked["r"].sparse
    found[0] = 0
    assert lives()[0] == 0
    n_local, ids = lives()
    assert n_local == 0 or not {*ids[: n_local // size]} & {*sparse}


def test_what_vllm_may_mix_an_adapter_into_is_served_without_the_store(tmp_path: Path) -> None:
    """Beside a request with an adapter, vLLM used the adapter for one without, too, and what came
    of that was stored under the name of the model alone."""
    adapter = _adapter_in(tmp_path / "a", 1).lora_request
    side = _side(mixes_adapters=True)
    request = _arrives(side)
    assert side.matched(request, 0) == 0
    assert _step(side, request, 0).saves == []
    assert side.finish(request, [1, 2, 3]) == (False, None)
    request = _arrives(side, lora_request=adapter)
    assert side.matched(request, 0) == 256
    assert len(_step(side, request, 256).loads) == 1


def test_what_is_loaded_is_named_up_to_its_end() -> None:
    """Keys of later blocks are not among its names: a lease would refuse them."""
    import torch

    side = _side()
    request = _arrives(side, prompt_embeds=torch.randn(N_TOKENS, 8))
    assert side.matched(request, 0) == 256
    (load,) = _step(side, request, 256).loads
    assert (len(load.prompt.tokens), sorted(load.prompt.extra)) == (256, [0, 128])


@pytest.mark.parametrize("n_tokens", [20, N_TOKENS], ids=["short", "long"])
@pytest.mark.parametrize("salt", ["\ud800", 7, b"mine"], ids=["half a letter", "number", "bytes"])
def test_a_salt_that_is_no_text_is_served_without_the_store(n_tokens: int, salt: Any) -> None:
    """The store refuses such a tenant: its error was raised while vLLM scheduled, or while it
    handed over what was to be stored, and vLLM's engine never took a step again."""
    side = _side()
    request = _arrives(side, n_tokens, cache_salt=salt)
    assert side.matched(request, 0) == 0
    assert _step(side, request, 0).saves == []
    request.num_tokens = request.num_computed_tokens = 384  # an answer fills its blocks
    request.all_token_ids = list(range(384))
    assert side.finish(request, [1, 2, 3]) == (False, None)
    assert side.plan(_scheduled({})) == StepPlan(ended=["r"], number=2)


def test_what_the_store_refuses_to_look_up_is_served_without_it() -> None:
    side, refusal = _side(), BadInput("tokens: want one dimension")

    def lookup(*names: Any) -> int:
        raise refusal

    side._view.lookup = lookup  # type: ignore[method-assign]
    request = _arrives(side)
    assert side.matched(request, 0) == 0
    assert side._tracked["r"].refused == str(refusal)
    assert _step(side, request, 0).saves == []


def _lost(side: SchedulerSide, request: Any, n_left: int) -> None:
    """A request's load is lost: of its first 256 tokens the worker's store has n_left."""
    prompt = side._hits.prompt(side._tracked[request.request_id], 256)
    gap = gap_of(prompt, n_left, 64)
    assert gap is not None
    side.hear(StepReport(lost=[request.request_id], gaps=[gap]), ())


def test_what_was_lost_is_promised_again_once_it_is_stored_again() -> None:
    """Until then it is promised to no prompt that goes through it, only what comes before it."""
    side = _side()
    request = _arrives(side)
    assert side.matched(request, 0) == 256
    _lost(side, request, 128)
    assert side.matched(request, 0) == 128
    assert side.matched(_arrives(side, 512, name="longer"), 0) == 128
    assert side.matched(_arrives(side, name="salted", cache_salt="mine"), 0) == 256
    assert _step(side, request, 128).saves
    side.hear(StepReport(stored={"r": 128}), ())
    assert side.matched(request, 0) == 128
    side.hear(StepReport(stored={"r": 256}), ())
    assert side.matched(request, 0) == 256


def test_what_was_lost_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server may have stored it meanwhile, which this one that only reads is not told."""
    side, now = _side(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    request = _arrives(side)
    _lost(side, request, 0)
    assert side.matched(request, 0) == 0
    now[0] = gaps._BELIEVED_S
    assert side.matched(request, 0) == 256


def test_no_more_gaps_are_remembered_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaps, "_MOST", 2)
    side = _side()
    requests = [_arrives(side, name=f"{i}", cache_salt=f"{i}") for i in range(3)]
    for request in requests:
        _lost(side, request, 0)
    assert [side.matched(request, 0) for request in requests] == [256, 0, 0]


def _read(mass: float | None, worst: float | None = None) -> dict[str, Any]:
    """What the worker says of a request whose layers chose rows."""
    return {"mode": "sparse", "estimated_missing_mass": mass, "missing_mass_worst_head": worst}


EXACT = {"mode": "exact", "hit_tokens": 256}


@pytest.mark.parametrize(
    ("lives", "said"),
    [
        ([(_read(0.04, 0.2), 3), (EXACT, 2)], _read(0.04, 0.2)),
        ([(_read(0.04, 0.2), 3), (None, 2)], _read(0.04, 0.2)),
        ([(_read(0.04, 0.1), 3), (_read(0.01, 0.3), 2)], _read(0.04, 0.3)),
        ([(_read(0.04, None), 3), (_read(None, None), 2)], _read(0.04, None)),
        ([(_read(0.04), 3), (_read(0.01), 2), (EXACT, 2)], _read(0.04)),
        ([(EXACT, 3), (_read(0.01), 2)], _read(0.01)),
        ([(EXACT, 3), ({**EXACT, "hit_tokens": 128}, 2)], {**EXACT, "hit_tokens": 128}),
        ([(_read(0.04), 0), (EXACT, 2)], EXACT),
        ([(EXACT, 3), (_read(0.04), 0), (EXACT, 2)], EXACT),
        ([(_read(0.04), 0), (None, 2)], None),
    ],
)
def test_an_answer_is_as_approximate_as_any_of_its_tokens(
    lives: list[tuple[dict[str, Any] | None, int]], said: dict[str, Any] | None
) -> None:
    """For a preempted request only its last read was reported: an answer that began on chosen rows
    was said to be exact, or to miss less than it did."""
    side = _side()
    request = _arrives(side)
    output = _scheduled({})
    for i, (read, n_tokens) in enumerate(lives):
        request.num_preemptions = i
        side.plan(output)
        if read is not None:
            side.hear(StepReport(served={"r": read}), ())
        request.num_output_tokens += n_tokens
    assert side.finish(request, [1, 2, 3])[1] == (said and {"impress": said})


def test_several_answers_are_as_approximate_as_any_of_them() -> None:
    """The last one to end was said to be exact, and so was the first one, which was not."""
    side = _side()
    first, second, other = (_arrives(side, name=name) for name in ("0_r", "1_r", "0_s"))
    side.hear(StepReport(served={"0_r": _read(0.04), "1_r": EXACT, "0_s": EXACT}), ())
    assert side.finish(first, [1, 2, 3])[1] == {"impress": _read(0.04)}
    assert side.finish(other, [1, 2, 3])[1] == {"impress": EXACT}
    assert side.finish(second, [1, 2, 3])[1] == {"impress": _read(0.04)}
    assert not side._answers


def test_what_becomes_ready_after_a_reset_is_not_announced_under_the_names_after_it() -> None:
    """A request that had been handed over was computed again after a reset. Its old rows became
    READY then, and a router was told of a prefix that was not there."""
    side = _side()
    side._events = Events(enabled=True, block_size=128)
    request = _arrives(side)
    request.block_hashes = [b"0" * 32, b"1" * 32]
    _step(side, request, 0)
    side.kv_cache_manager.get_block_ids = lambda request_id: ([],)
    request.num_preemptions = 1
    side.reset()
    side._events.take()
    side.kv_cache_manager.get_block_ids = lambda request_id: ([1, 2, 3],)
    assert _step(side, request, 0).saves
    side.hear(StepReport(stored={"r": 256}), ())
    assert side._events.take() == []


def test_what_was_read_behind_blocks_that_were_lost_is_no_hit() -> None:
    """A request that shared a block with one whose load failed was computed again, and so was what
    it had read itself; but its answer said that this was a hit. What an earlier life read stays."""
    side = _side()
    evicted: set[int] = set()
    side.kv_cache_manager.evict_blocks = evicted.update
    request = _arrives(side)
    _step(side, request, 0)
    request.num_computed_tokens = N_TOKENS
    side.hear(StepReport(served={"r": EXACT}), {2})  # the second half of what was read
    assert (request.num_computed_tokens, evicted) == (128, {2, 3})
    assert side.finish(request, [1, 2, 3])[1] is None
    request = _arrives(side)
    side.hear(StepReport(served={"r": _read(0.04)}), ())
    request.num_output_tokens, request.num_preemptions = 3, 1
    _step(side, request, 0)
    side.hear(StepReport(served={"r": EXACT}), {1})
    assert side.finish(request, [1, 2, 3])[1] == {"impress": _read(0.04)}


def test_a_short_prompt_behind_a_long_one_does_not_make_both_wait_for_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM admits in order. As there was room for the second, the blocks that ended requests hold
    were not what all waited for, it seemed: they were not given up."""
    monkeypatch.setattr(scheduling, "_PATIENCE_S", 0.0)
    side = _side()
    side.kv_cache_manager.get_block_ids = lambda request_id: ([],)
    side.kv_cache_manager.block_pool.get_num_free_blocks = lambda: 3
    long, _ = _arrives(side, 1024), _arrives(side, 256, name="short")
    side._held = {"ended": "ended#1.0"}
    for _ in range(2):
        side.matched(long, 0)
        assert side._stalled(_scheduled({}))


@pytest.mark.parametrize("asks", [False, True])
def test_a_paused_request_is_not_short_of_blocks(
    monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    """In a pause nothing is scheduled either: what had ended before it was not stored."""
    monkeypatch.setattr(scheduling, "_PATIENCE_S", 0.0)
    side = _side()
    request = _arrives(side)
    side._held = {"ended": "ended#1.0"}
    side.matched(request, 0)  # before the pause
    side._stalled(_scheduled({}))
    if asks:
        side.matched(request, 0)
    assert side._stalled(_scheduled({})) is asks
    side.matched(request, 0)
    assert not side._stalled(_scheduled({"r": N_TOKENS}))
