"""What ends or is reset at a bad moment: nothing false is stored, or found in vLLM's own cache."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM has an environment of its own: make test-vllm")

from tests.vllm.served import Served, params, words

Serve = Callable[..., Served]

PROMPT = words(300, seed=3)


def test_a_reset_leaves_blocks_alone_that_are_still_to_be_stored(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that a reset met gave its blocks back while the saver had yet to read them: what
    the next request wrote there was stored under the first one's name."""
    served = serve()
    saver, engine = served.worker.saver, served.llm.llm_engine
    go, begin = threading.Event(), saver._begin

    def stuck(*args: Any) -> Any:
        assert go.wait(60)
        return begin(*args)

    monkeypatch.setattr(saver, "_begin", stuck)
    try:
        engine.add_request("first", {"prompt_token_ids": PROMPT}, params(5))
        engine.step()
        served.scheduler.reset_prefix_cache(reset_connector=True)
        while engine.has_unfinished_requests():
            engine.step()
        assert served.used_blocks() > 0
    finally:
        go.set()
    served.settle()
    assert served.used_blocks() == 0
    assert served.store.lookup(PROMPT) == 256  # by its name from before the reset


def test_a_request_that_is_preempted_and_refused_before_it_ends_is_dropped(serve: Serve) -> None:
    """A reset that preempts takes the blocks away: the saver is told, though the request ends
    before the next step."""
    served = serve()
    saver, engine = served.worker.saver, served.llm.llm_engine
    engine.add_request("first", {"prompt_token_ids": PROMPT}, params(5))
    engine.step()
    served.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    side = served.scheduler.connector.scheduler
    key = next(iter(side._tracked.values())).key
    engine.abort_request(["first"])
    assert side._dropped == [key]
    served.settle()
    assert not saver._lives
    assert served.used_blocks() == 0
