"""--json FILE of repack, explain and demo: - is stdout; an unwritable file is said at once."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from console import (
    CONFIG,
    GEOMETRY,
    PROMPT,
    assert_refused,
    opened,
    put,
    rows_of,
    run,
    run_json,
    two_prompts,
)

import impress
from impress.write.directory import SPANS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return two_prompts(tmp_path / "store")


def test_repack_prints_its_report_and_nothing_else(path: Path) -> None:
    """- was taken for the name of a file."""
    done = run("repack", "--store", path, "--dry-run", "--json", "-", cwd=path.parent)
    assert done.returncode == 0 and not (path.parent / "-").exists()
    found = json.loads(done.stdout)
    assert (found["dry_run"], found["moved"], found["busy_shards"]) == (True, 0, [])


@pytest.mark.parametrize(
    "args",
    [("repack", "--json", "--dry-run"), ("demo", "--json", "--quick"),
     ("explain", "--prefix", "ids", "--json", "--query")],
)  # fmt: skip
def test_an_option_is_not_taken_for_the_file(path: Path, args: tuple[str, ...]) -> None:
    """`repack --json --dry-run` rewrote rows, and left a file called --dry-run."""
    index = path / "shards/main/index/data.mdb"
    before = index.read_bytes()
    store = () if args[0] == "demo" else ("--store", path)
    done = run(*args, *store, cwd=path.parent)
    words = " ".join(done.stderr.split())
    assert done.returncode == 2 and "--json wants a FILE before --" in words, done
    assert index.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == ["store"]


def test_a_shard_that_repack_leaves_alone_is_in_its_report_and_status(path: Path) -> None:
    """The report had only the other shards, and the status was 0."""
    args = ("repack", "--store", path, "--json", "-")
    with opened(path):
        with impress.PrefixStore.open(path, GEOMETRY, "a test", CONFIG) as second:
            put(second, [*PROMPT, *range(64)])
            done = run(*args)
            assert done.returncode == 2 and json.loads(done.stdout)["busy_shards"] == ["main", "1"]
        done = run(*args)
        assert done.returncode == 1 and json.loads(done.stdout)["busy_shards"] == ["main"]
        assert f"process {os.getpid()}: stop that process" in done.stderr
        assert done.stderr.startswith("impress: ")  # as with purge and rebuild
    done = run(*args)
    assert done.returncode == 0 and json.loads(done.stdout)["busy_shards"] == []


def test_a_shard_that_fails_keeps_repack_from_no_other(tmp_path: Path) -> None:
    """The shards before it were not reported, and those after it were not looked at."""
    worth = np.ones((GEOMETRY.n_layers, len(PROMPT)), dtype=np.float32)
    path, report = tmp_path / "store", tmp_path / "report.json"
    with ExitStack() as stack:
        for shard in range(3):
            tokens, rows = [shard, *PROMPT[1:]], rows_of(len(PROMPT))
            store = stack.enter_context(opened(path))
            assert store.store(tokens, rows, rows, importance=worth).wait(60)
    shutil.rmtree(path / "shards/1/index")
    done = run("repack", "--store", path, "--json", report)
    assert done.returncode == 1 and "2 spans looked at" in done.stdout, done
    (said,) = [line for line in done.stderr.splitlines() if line.endswith("(shard 1)")]
    assert "impress rebuild makes it again" in said
    found = json.loads(report.read_text())
    assert [span["span"] // SPANS for span in found["spans"]] == [0, 2]
    assert (found["busy_shards"], found["failed_shards"]) == ([], ["1"])
    for shard in ("main", "2"):
        shutil.rmtree(path / "shards" / shard / "index")
    done = run("repack", "--store", path, "--json", report)
    assert (done.returncode, done.stdout) == (2, "")
    assert json.loads(report.read_text())["failed_shards"] == ["main", "1", "2"]


def test_a_shard_that_rebuild_leaves_alone_is_in_its_report_and_status(path: Path) -> None:
    """Its status was 0: done. And its advice about the shard named no options of this command."""
    with opened(path):
        done = run("rebuild", "--store", path)
        assert_refused(done, f"shard main is open for writing by process {os.getpid()}: stop that")
        done, found = run_json("rebuild", "--store", path)  # it said so to people alone
        assert (done.returncode, found["busy_shards"], found["spans"]) == (2, ["main"], 0)
        assert f"{path}: shard main is open" in done.stderr
        with impress.PrefixStore.open(path, GEOMETRY, "a test", CONFIG) as second:
            put(second, [*PROMPT, *range(64)])
        done, found = run_json("rebuild", "--store", path)
        assert (done.returncode, found["busy_shards"], found["spans"]) == (1, ["main"], 1)
        done = run("rebuild", "--store", path)
        assert done.returncode == 1 and "left alone" in done.stdout
        assert f"process {os.getpid()}: stop that process, then repeat" in done.stdout
        assert "another shard" not in done.stdout
    done, found = run_json("rebuild", "--store", path)
    assert (done.returncode, found["busy_shards"], found["spans"]) == (0, [], 3)


@pytest.mark.parametrize("command", ["repack", "explain", "demo"])
def test_a_file_that_cannot_be_written_is_said_before_the_work(
    path: Path, tmp_path: Path, command: str
) -> None:
    """The error came once the work was done: after minutes of a demo, or with the rows moved."""
    if command == "demo":
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
    of = {
        "repack": ["--store", path],
        "explain": ["--store", path, "--prefix", tmp_path / "none"],  # its next error otherwise
        "demo": ["--dir", tmp_path / "out"],
    }[command]
    (tmp_path / "closed").mkdir(0o500)
    cases = [
        (tmp_path / "no" / "report", "no such folder"),
        (tmp_path, "a directory"),
        (tmp_path / "closed" / "report", "cannot be written"),
    ]
    for file, said in cases[: 2 if os.geteuid() == 0 else 3]:  # root may write everywhere
        done = run(command, *of, "--json", file)
        assert_refused(done, f"--json {file}: {said}")
        assert not done.stdout and not (tmp_path / "out").exists()
