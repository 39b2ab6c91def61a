"""Whatever a client asks for in kv_transfer_params, the engine goes on serving."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM has an environment of its own: make test-vllm")

from impress.engines.vllm.events import Events
from impress.engines.vllm.scheduling import SchedulerSide
from impress.engines.vllm.settings import Settings
from impress.policy import Exact, Policy, Recency
from tests.vllm.served import Served, params, tokens, words

Serve = Callable[..., Served]

PROMPT = words(300, seed=3)
HALF = {"name": "recency", "keep": 0.5}
#: Values of a wrong shape, at every level of the JSON.
STRANGE = [
    '"exact"', "[1]", "7",
    '{"impress": "exact"}', '{"impress": true}', '{"impress": false}', '{"impress": ["policy"]}',
    '{"impress": {"polciy": {"name": "recency"}}}',
    '{"impress": {"policy": "exact"}}', '{"impress": {"policy": []}}',
    '{"impress": {"policy": {}}}', '{"impress": {"policy": {"name": ["exact"]}}}',
    '{"impress": {"policy": {"name": {}}}}', '{"impress": {"policy": {"name": null}}}',
    '{"impress": {"policy": {"name": "nonsense"}}}',
    '{"impress": {"policy": {"name": "exact", "keep": 1}}}',
    '{"impress": {"policy": {"name": "recency", "keep": NaN}}}',
    '{"impress": {"policy": {"name": "recency", "keep": true}}}',
    '{"impress": {"policy": {"name": "recency", "keep": "0.9"}}}',
    '{"impress": {"policy": {"name": "recency", "keep": [[0.9]]}}}',
    '{"impress": {"policy": {"name": "recency", "keep": 18446744073709551615}}}',
    '{"impress": {"policy": {"name": "random", "keep": 1, "seed": 1e400}}}',
    '{"impress": {"policy": {"name": "paper", "alpha": 1e400, "fallback": {}}}}',
    '{"impress": {"policy": {"name": "quality", "per": ["head"], "max_bytes": -1}}}',
]  # fmt: skip
NOTHING = [
    "null", "{}", '{"impress": null}', '{"impress": {}}', '{"impress": {"policy": null}}',
    '{"do_remote_prefill": 1}',
]  # fmt: skip


def _side(**extra: Any) -> SchedulerSide:
    """The scheduler's side, over a store that holds nothing."""
    view: Any = SimpleNamespace(lookup=lambda *names: 0, current=True, refresh=lambda: None)
    served: Any = SimpleNamespace(block_size=128, lora="", mixes_adapters=False)
    settings = Settings.of({"store": "unused", **extra})
    return SchedulerSide(settings, served, view, Events(enabled=False, block_size=128))


def _policy(side: SchedulerSide, asked: Any) -> Policy:
    """The policy that a new request with these parameters gets."""
    request = SimpleNamespace(
        request_id="r", kv_transfer_params=asked, resumable=True, pooling_params=None,
        lora_request=None,
    )  # fmt: skip
    side.add(request)
    return side._tracked["r"].policy


@pytest.mark.parametrize("body", STRANGE)
def test_what_is_not_understood_is_served_exactly_and_said(
    body: str, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM asks without a guard: one request from any client ended the engine for all of them."""
    assert _policy(_side(policy=HALF), json.loads(body)) == Exact()
    (said,) = caplog.records
    assert said.levelno == logging.WARNING and "served exactly" in said.getMessage()


@pytest.mark.parametrize("body", NOTHING)
def test_who_asks_for_nothing_gets_what_the_server_gives(
    body: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert _policy(_side(policy=HALF), json.loads(body)) == Recency(0.5)
    assert not caplog.records


def test_all_rows_asked_of_a_server_that_chooses_none_are_read(serve: Serve) -> None:
    """No layer of such a server asks for rows: the hit was thrown away, and the prompt computed."""
    served = serve()
    served.ask([PROMPT])
    served.forget()
    (exact,) = served.ask([PROMPT])
    served.forget()
    (kept,) = served.ask([PROMPT], policy={"name": "keep_all"})
    assert (kept.n_cached, kept.said["mode"], kept.tokens) == (256, "exact", exact.tokens)
    served.settle()
    assert served.worker.take_counts().get("lost", 0) == 0


@pytest.mark.parametrize("name", ["paper", "quality", "all_heads", "random", "recency"])
def test_no_policy_loosens_a_server_that_chooses_no_rows(name: str) -> None:
    assert _policy(_side(), {"impress": {"policy": {"name": name}}}) == Exact()


def test_an_engine_outlives_every_strange_request(serve: Serve) -> None:
    served = serve(extra={"policy": HALF})
    (exact,) = served.ask([PROMPT], policy={"name": "exact"})
    served.forget()
    for body in STRANGE[3:]:  # vLLM itself refuses non-objects
        asked = params(10)
        asked.extra_args = {"kv_transfer_params": json.loads(body)}
        prompt = {"prompt_token_ids": PROMPT}
        (answer,) = served._answers(served.llm.generate([prompt], asked, use_tqdm=False))
        assert (answer.said["mode"], answer.n_cached) == ("exact", 256), body
        assert tokens([answer]) == tokens([exact]), body
        served.forget()
