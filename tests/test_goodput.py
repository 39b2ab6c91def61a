"""Goodput: what counts as in time, and which cells the figures compare."""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments import common, goodput, vllm_serve, vllm_serve_server
from experiments.common import Unable
from experiments.goodput import MIXED, PEER, PLAIN, _row, figures, run
from experiments.vllm_serve_server import Server

MORE = argparse.Namespace(ttft_ms=1000.0)
QUICK: Any = argparse.Namespace(quick=True, more=MORE)


def test_a_request_is_in_time_by_its_own_arrival() -> None:
    took = [(0.2, 1.0, True), (1.0, 2.0, True), (1.5, 4.0, False), (0.9, 3.0, True)]
    row = _row(took, limit_s=1.0)
    assert row["in time"] == 0.75
    assert row["in time/s"] == 3 / 4.0
    assert row["done/s"] == 1.0
    assert row["right"] == 0.75


def test_figures_compare_the_best_rate_of_each_way() -> None:
    rows = [
        {"way": way, "at once": 8, "arrive/s": rate, "in time/s": value}
        for way, at in ((PLAIN, (6.0, 3.0)), (MIXED, (7.0, 12.0)), (PEER, (0.0, 0.0)))
        for rate, value in zip((8, 32), at, strict=True)
    ]
    said, lines = figures(rows, QUICK)
    assert said["goodput_vs_plain"] == pytest.approx(2.0)
    assert "goodput_vs_peer" not in said  # none of the peer's was in time: no ratio says how much
    assert said["goodput.example.8"] == 0.0
    assert len(lines) == 6


class _Client:
    """An OpenAI client whose one chunk holds no token."""

    def __init__(self, **_: Any) -> None:
        self.completions = self

    async def __aenter__(self) -> _Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open."""

    async def create(self, **_: Any) -> AsyncIterator[Any]:
        async def chunks() -> AsyncIterator[Any]:
            yield _CHUNK

        return chunks()


_CHUNK = SimpleNamespace(choices=[SimpleNamespace(token_ids=None)])


def test_an_answer_without_a_token_is_not_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as in time, and as having taken no time."""
    one = SimpleNamespace(completions=SimpleNamespace(create=lambda **_: [_CHUNK]))
    fake = SimpleNamespace(AsyncOpenAI=_Client, OpenAI=lambda **_: one, OpenAIError=_OpenAIError)
    monkeypatch.setitem(sys.modules, "openai", fake)
    server: Any = SimpleNamespace(base="", way=SimpleNamespace(name=PLAIN))
    asked: Any = [SimpleNamespace(prompt=[1], question=SimpleNamespace(answer=1))]
    with pytest.raises(Unable, match="plain: an answer came without a token"):
        goodput._ask(server, asked, [0.0], 1)
    with pytest.raises(Unable, match="an answer came without a token"):
        vllm_serve._ask(server, asked, 1)


class _OpenAIError(Exception):
    """As openai's: no OSError."""


class _Lost(_Client):
    """Its server has ended."""

    def create(self, **_: Any) -> Any:
        raise _OpenAIError("Connection\nerror.")


class _Ended(Server):
    """A server of which only the log is left."""

    def __enter__(self) -> Server:
        self._log.write(b"started\nEngineDeadError: no memory\n")
        self._log.flush()
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()


@pytest.mark.parametrize("name", ["goodput", "vllm_serve"])
def test_a_server_that_ends_is_told_in_a_line_with_the_last_of_its_log(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors of the OpenAI client are no OSErrors: a traceback came, and the log was gone with the
    experiment's data."""
    fake = SimpleNamespace(AsyncOpenAI=_Lost, OpenAI=_Lost, OpenAIError=_OpenAIError)
    monkeypatch.setitem(sys.modules, "openai", fake)
    monkeypatch.setitem(sys.modules, "vllm.version", SimpleNamespace(__version__="1"))
    for module in (goodput, vllm_serve_server):
        monkeypatch.setattr(module, "Server", _Ended)
        monkeypatch.setattr(module, "make_model", lambda folder, _checkpoint: folder)
    args, first = ["--quick", "--dir", str(tmp_path)], "plain"
    if name == "goodput":
        assert goodput.run(args) == 2
    else:
        monkeypatch.setattr(sys, "argv", ["vllm_serve.py", *args])
        assert common.run("It asks.", vllm_serve.experiment, vllm_serve._estimate) == 2
        first = "exact"  # plain stores nothing, and is not asked first
    said = f"error: {first}: Connection error.; its log ends: EngineDeadError: no memory\n"
    assert capsys.readouterr().err == said


def test_without_vllm_it_says_what_to_make(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.version", None)
    assert run(["--quick"]) == 2
    assert "make test-vllm" in capsys.readouterr().err
