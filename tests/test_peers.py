"""The comparison with peers: rows come back as they were, and what cannot run is named."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments import peers, peers_systems
from experiments.peers import ROUNDS, SHAPE_TMPFS, SYSTEMS, Field, Worker, figures, run
from experiments.peers_worker import Pooled, Shape, answer, rows_of, timed

TINY = Shape(2, 2, 64, 256, 128)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SHAPES", {True: TINY})


def test_what_lies_in_memory_stays_about_a_gigabyte() -> None:
    """For every system, one prefix to warm up and those of the rounds."""
    n_prefixes = 1 + max(n for (medium, _), n in ROUNDS.items() if medium == "tmpfs")
    assert len(SYSTEMS) * n_prefixes * SHAPE_TMPFS.n_bytes < 1.1e9


def test_processes_end_with_the_last_round_of_a_medium(small: None, tmp_path: Path) -> None:
    exits = ExitStack()
    more = argparse.Namespace(only=("impress",), peers=tmp_path, vllm=tmp_path)
    options = argparse.Namespace(quick=True, more=more, exits=exits, folder=tmp_path, seed=1)
    field = Field("disk", options)  # type: ignore[arg-type]
    assert {row["do"] for row in field.round(0)} == {"store", "cold", "warm"}
    (worker,) = field._workers
    assert worker.process is not None
    field.end()
    assert worker.process.poll() is not None
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    exits.close()


def _cell(system: str, number: int, **more: Any) -> dict[str, Any]:
    return {"medium": "disk", "round": number, "system": system, "version": "1", **more}


def test_our_store_is_measured_and_a_missing_peer_is_named(small: None, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    status = run(
        ["--quick", "--json", str(report), "--dir", str(tmp_path), "--media", "disk",
         "--only", "impress", "sglang", "--peers", str(tmp_path / "none")]
    )  # fmt: skip
    said = json.loads(report.read_text())
    assert status == 0
    assert said["figures"]["disk.impress.cold"] > 0
    assert "restore_vs_sglang" not in said["figures"]
    ours, theirs = said["rows"]
    assert (ours["note"], ours["version"]) != ("", "")
    assert theirs["note"] == (
        f"not run: no whole environment {tmp_path / 'none' / 'sglang'}: --install makes it"
    )


@pytest.mark.parametrize(
    ("option", "name"), [("--only", "impress"), ("--media", "disk"), ("--media", "tmpfs")]
)
def test_a_name_that_is_there_twice_is_refused(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, name: str
) -> None:
    """A system's folder was there already; a medium was measured twice, and shown twice."""
    named = {"--only": ["impress"], "--media": ["disk"], option: [name, name]}
    args = ["--quick", "--dir", str(tmp_path), "--peers", str(tmp_path / "none")]
    assert run([*args, *(word for key, words in named.items() for word in (key, *words))]) == 2
    assert capsys.readouterr().err == f"error: {option}: {name} more than once\n"


def _resumed(tmp_path: Path, *only: str) -> dict[str, str]:
    """System -> note, after --resume with these systems."""
    report = tmp_path / "report.json"
    assert run(
        ["--quick", "--json", str(report), "--dir", str(tmp_path), "--media", "disk",
         "--only", *only, "--peers", str(tmp_path / "peers"), "--resume"]
    ) == 0  # fmt: skip
    return {row["system"]: row["note"] for row in json.loads(report.read_text())["rows"]}


def test_a_peer_whose_environment_was_made_since_is_measured_by_resume(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounds in which it was "not run" counted as measured: `--install --resume` ran nothing. And
    an environment that was cut off in its making, which had an interpreter, counted as there."""
    python = tmp_path / "peers" / "sglang" / "bin" / "python"

    def half_made() -> None:
        python.parent.mkdir(parents=True)
        python.symlink_to("/bin/false")

    made = (python.parents[1] / ".ready").touch
    for step, todo, says in (
        (None, 2, "no whole environment"), (None, 0, "no whole environment"),
        (half_made, 0, "no whole environment"), (made, 2, "it ended without a word"),
    ):  # fmt: skip
        if step is not None:
            step()
        assert says in _resumed(tmp_path, "sglang")["sglang"]
        assert f"({todo} of 2 cells to measure)" in capsys.readouterr().out


def test_a_system_that_failed_is_measured_by_resume(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A worker that had crashed once stayed "not run" in every later report, and its rounds counted
    as measured."""
    works = peers.python_of
    fails = lambda name, *where: (  # noqa: E731
        Path("/bin/false") if name == "impress outs" else works(name, *where)
    )
    for python_of, todo, note in (
        (fails, 2, "not run: it ended without a word"), (works, 2, ""), (fails, 0, ""),
    ):  # fmt: skip
        monkeypatch.setattr(peers, "python_of", python_of)
        assert _resumed(tmp_path, "impress", "impress outs") == {
            "impress": "", "impress outs": note,
        }  # fmt: skip
        assert f"({todo} of 2 cells to measure)" in capsys.readouterr().out


def test_rows_are_finite_and_the_same_for_whoever_makes_them() -> None:
    rows = rows_of(TINY, 1, 3)
    assert rows.shape == (TINY.n_chunks, TINY.chunk_bytes)
    exponents = rows.view(np.uint16) >> 7 & 0xFF
    assert exponents.max() < 0xFF
    assert np.array_equal(rows, rows_of(TINY, 1, 3))
    assert not np.array_equal(rows, rows_of(TINY, 1, 4))


def test_of_two_ways_of_a_peer_the_better_one_is_compared(small: None) -> None:
    both = [
        _cell(system, number, do="cold", gb_s=gb_s, cpu=cpu)
        for number in range(2)
        for system, gb_s, cpu in (("impress", 2.0, 0.3), ("lmcache", 1.0, 0.1),
                                  ("lmcache direct", 4.0, 0.2))
    ]  # fmt: skip
    said = peers._against(both)
    assert said["restore_vs_lmcache"] == 0.5
    assert said["cpu_vs_lmcache"] == pytest.approx(3.0)


def test_a_worker_that_dies_is_asked_nothing_more(tmp_path: Path) -> None:
    says = 'import sys; sys.stdin.readline(); print(\'{"error": "broken"}\')'
    pipe = subprocess.PIPE
    worker = Worker(
        "x", subprocess.Popen([sys.executable, "-c", says], stdin=pipe, stdout=pipe, text=True)
    )
    assert worker.ask(do="store", prefix=0) == {}
    assert worker.why == "broken"
    assert worker.ask(do="cold", prefix=0) == {}
    worker.end()


def test_what_a_table_has_not_is_left_empty(small: None, capsys: Any) -> None:
    more = argparse.Namespace(media=("disk",), only=("impress", "sglang"))
    options = argparse.Namespace(quick=True, more=more)
    rows = [
        _cell("impress", 0, do="cold", gb_s=1.0, cpu=0.5),
        {"medium": "disk", "round": 0, "system": "sglang", "do": "not run", "why": "no wheel"},
    ]
    said, lines = figures(rows, options)  # type: ignore[arg-type]
    assert said == {"disk.impress.cold": 1.0}
    assert [line["cold"] for line in lines] == [1.0, ""]
    assert "sglang: not run: no wheel" in capsys.readouterr().out


class _Idle(Pooled):
    """Says that it stores and restores, and does neither."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        super().__init__(folder, shape)
        self.pool = np.zeros((shape.n_chunks, shape.chunk_bytes), dtype=np.uint8)

    def store(self, prefix: int) -> None:
        """Do nothing."""

    restore = store


def _hicache(folder: Path, shape: Shape, patch: pytest.MonkeyPatch) -> Pooled:
    """SGLang's, on a backend that returns the pages it is given unchanged."""
    backend = SimpleNamespace(
        batch_set=lambda keys, pages: True, batch_get=lambda keys, pages: pages
    )  # fmt: skip
    names = {"HiCacheFile": lambda _config: backend, "HiCacheStorageConfig": dict}
    module = "sglang.srt.mem_cache.hicache_storage"
    patch.setitem(sys.modules, module, SimpleNamespace(**names))
    patch.setattr(peers_systems, "version", lambda _package: "1")
    return peers_systems.HiCacheFile(folder, shape)


def _vllm(folder: Path, shape: Shape, patch: pytest.MonkeyPatch) -> Pooled:
    """vLLM's file tier, on a manager whose jobs end at once and do nothing."""
    tier = SimpleNamespace(
        submit_store=lambda _job: None, submit_load=lambda _job: None,
        get_finished_jobs=lambda: [SimpleNamespace(success=True)],
    )  # fmt: skip
    fakes = {
        "vllm.v1.kv_offload.base": {"make_offload_key": lambda key, _group: key},
        "vllm.v1.kv_offload.tiering.base": {"TransferJob": lambda *job: job},
        "vllm.v1.kv_offload.tiering.fs.manager": {"FileSystemTierManager": lambda *_: tier},
        "vllm.version": {"__version__": "1"},
    }
    for module, names in fakes.items():
        patch.setitem(sys.modules, module, SimpleNamespace(**names))
    patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # which it sets
    return peers_systems.VllmFiles(folder, shape)


POOLED = [lambda folder, shape, _patch: _Idle(folder, shape), _hicache, _vllm]


@pytest.mark.parametrize("make", POOLED, ids=["any", "sglang", "vllm files"])
def test_a_restore_that_reads_nothing_is_found(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored rows still lay in SGLang's pool, so its cold restores could not come back changed."""
    system = make(tmp_path, TINY, monkeypatch)
    answer(system, tmp_path, TINY, 1, {"do": "store", "prefix": 0})
    with pytest.raises(ValueError, match="prefix 0 came back changed"):
        answer(system, tmp_path, TINY, 1, {"do": "cold", "prefix": 0})


@pytest.mark.parametrize("make", POOLED, ids=["any", "sglang", "vllm files"])
def test_a_store_ends_with_its_rows_in_the_pool(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clearing vLLM's pool counted in the time of its stores; others had nothing to clear."""
    system, rows = make(tmp_path, TINY, monkeypatch), rows_of(TINY, 1, 0)
    system.fill(0, rows)
    timed(system, tmp_path, lambda: system.store(0), settle=True)
    assert np.array_equal(system.pool, rows)
    system.settled(0)
    assert not system.pool.any()
