"""The demo from end to end, its figures, and its store under the other commands."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import prompt, put_prompt
from rich.console import Console

import impress

pytest.importorskip("torch")
pytest.importorskip("transformers")

from impress.demo import CHECKPOINTS, SIZES, n_asked, story
from impress.demo.checkpoints import make_tokenizer, unseen
from impress.demo.documents import documents
from impress.demo.figures import figures_of, moved_share
from impress.demo.lookup.tokenizer import decode
from impress.demo.reuse import stored
from impress.demo.stage import MARKER, prepared
from impress.report import write_report

SCRIPT = Path(sys.executable).parent / "impress"
MODES = ("recompute", "exact", "paper", "quality")
#: The figures given for each model and for both together.
STORY = ("paper.accuracy", "quality.accuracy", "recompute.accuracy", "exact.accuracy",
         "exact.agreement", "paper.fallback_share", "paper.bytes_share", "quality.bytes_share",
         "paper.transferred_share", "quality.transferred_share", "quality.ttft_ratio",
         "exact.ttft_ratio", "paper.ttft_ratio")  # fmt: skip


def run(*args):
    command = [str(SCRIPT), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """(folder, what it printed, its report) of one quick run."""
    folder = tmp_path_factory.mktemp("demo")
    done = run("demo", "--quick", "--dir", folder / "out", "--json", folder / "report.json")
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return folder / "out", done.stdout, json.loads((folder / "report.json").read_text())


def of_act(report, act):
    return [row for row in report["rows"] if row["act"] == act]


def test_every_answer_from_ssd_and_dram_agrees_with_recomputing(demo):
    _, shown, report = demo
    assert report["figures"]["exact.agreement"] == 1.0
    assert {"ssd.ttft_ratio", "dram.ttft_ratio"} <= report["figures"].keys()
    rows = of_act(report, "reuse")
    assert len(rows) == 12 and all(row["agrees"] for row in rows)
    assert shown.count("4 of 4") >= 2


def test_each_way_of_answering_read_the_document_from_its_own_tier(demo):
    for row in of_act(demo[2], "reuse"):
        if row["mode"] == "recompute":
            assert row["hit_tokens"] == 0 and not row["bytes"]
            continue
        assert 1280 <= row["hit_tokens"] < row["prompt_tokens"] and row["hit_tokens"] % 64 == 0
        assert list(row["bytes"]) == [row["mode"]]


def test_the_rows_that_are_read_decide_the_answers(demo):
    assert demo[2]["figures"]["control.changes_without_prefix"] == 1.0


def test_each_model_answers_the_same_questions_in_every_mode(demo):
    rows = of_act(demo[2], "choice")
    asked = {
        mode: [(r["checkpoint"], r["document"], r["question"]) for r in rows if r["mode"] == mode]
        for mode in MODES
    }
    assert all(
        len(asked[mode]) == n_asked(SIZES["quick"], SIZES["quick"].questions) for mode in MODES
    )
    assert len({frozenset(questions) for questions in asked.values()}) == 1
    firsts = {rows[i]["mode"] for i in range(0, len(rows), len(MODES))}
    assert firsts == set(MODES), "each mode comes first in its turn"


def test_every_hit_was_cold_whole_and_in_the_mode_it_says(demo):
    for row in of_act(demo[2], "choice"):
        if row["mode"] == "recompute":
            continue
        assert row["hit_tokens"] == 1024 and list(row["bytes"]) == ["ssd"]
        if row["mode"] == "exact":
            assert row["agrees"] and row["transferred_share"] == row["rows_share"] == 1.0
        if row["mode"] == "quality":
            assert 0 < row["estimated_missing_mass"] <= 0.1 and row["rows_share"] < 1


def test_the_figures_are_told_of_both_models_and_of_each(demo):
    figures = demo[2]["figures"]
    for where in ("", *(f"{checkpoint}." for checkpoint in CHECKPOINTS)):
        assert {f"{where}{name}" for name in STORY} <= figures.keys()
        assert figures[f"{where}exact.agreement"] == 1.0
        assert figures[f"{where}exact.accuracy"] == figures[f"{where}recompute.accuracy"] > 0.8
        assert figures[f"{where}quality.bytes_share"] < 0.5
        # The cost of the three heads is counted: the paper can move more than everything.
        assert figures[f"{where}paper.transferred_share"] > figures[f"{where}paper.bytes_share"]
    assert figures["agreeing.rte.quality.accuracy"] > 0.5


def test_repacking_moves_fewer_bytes_for_other_questions_and_changes_no_exact_answer(demo):
    _, shown, report = demo
    rows = of_act(report, "repacked")
    before = {(r["checkpoint"], r["document"], r["question"]) for r in of_act(report, "choice")}
    looked_up = [row for row in rows if row["task"] != "diffuse"]
    assert not any((r["checkpoint"], r["document"], r["question"]) in before for r in looked_up)
    assert all(row["agrees"] for row in rows if row["mode"] == "exact")
    figures = report["figures"]
    for where in ("", *(f"{checkpoint}." for checkpoint in CHECKPOINTS)):
        # Of as many questions of each task: a diffuse one moves twice as much, and fewer are asked.
        before, after = (
            moved_share(figures, mode, where.rstrip("."))
            for mode in ("quality", "repacked.quality")
        )
        assert after < before
        assert f"{where}repacked.paper.transferred_share" in figures
        assert f"{where}repacked.quality.ttft_ratio" in figures
    # Of four: one stays that would save less than a tenth on questions its order was not made from.
    assert re.search(r"\b[1-4] prefixes rewritten", shown)


def test_shares_are_means_and_ratios_are_of_medians():
    def row(mode, ttft_ms, right, share):
        return {
            "act": "choice", "checkpoint": "agreeing", "task": "rte", "mode": mode,
            "ttft_ms": ttft_ms, "right": right, "agrees": right, "rows_share": share,
            "fallback_share": share, "bytes_share": share, "transferred_share": share,
            "estimated_missing_mass": None, "missing_mass_worst_head": 0.5,
        }  # fmt: skip

    rows = [row("recompute", ms, True, None) for ms in (10.0, 20.0, 90.0)]
    rows += [row("exact", 5.0, True, 1.0) for _ in range(3)]
    rows += [row("quality", ms, ms != 6.0, ms / 10) for ms in (2.0, 4.0, 6.0)]
    figures = figures_of(rows)
    assert figures["agreeing.rte.quality.ttft_ratio"] == 0.2
    assert figures["quality.accuracy"] == pytest.approx(2 / 3)
    assert figures["agreeing.quality.bytes_share"] == pytest.approx(0.4)
    assert figures["quality.missing_mass_worst_head"] == 0.5
    assert "quality.estimated_missing_mass" not in figures, "unknown is not a number"
    rows[3]["agrees"] = False
    assert figures_of(rows)["exact.agreement"] == pytest.approx(2 / 3)


def test_tables_are_whole_where_a_terminal_is_narrower(demo, monkeypatch):
    """On a terminal of 80 columns figures ended in "…", and headings were cut off."""
    _, _, report = demo
    narrow, asked = Console(width=80, file=io.StringIO()), of_act(report, "choice")
    for where in ("impress.terminal.out", "impress.demo.story.out"):
        monkeypatch.setattr(where, narrow)
    done = {"stored_bytes": 1, "seconds": 1.0, "rows": asked}
    monkeypatch.setattr(story, "run_step", lambda *_: done)
    assert story._choice(Path(), "quick") is asked
    shown = narrow.file.getvalue()
    assert "…" not in shown
    assert "diffuse" in shown and "wanted" in shown


def test_the_words_of_a_document_are_its_tokens():
    doc = unseen(1)[0]
    tokenizer = make_tokenizer()
    assert tokenizer(decode(doc.tokens))["input_ids"] == list(doc.tokens)


def test_the_report_names_its_conditions_and_no_path(demo):
    folder, _, report = demo
    meta = report["meta"]
    for key in ("commit", "date", "host", "seed", "cpus", "packages", "direct_io", "quick"):
        assert key in meta
    assert str(folder) not in json.dumps(report)


@pytest.mark.parametrize(("given", "said"), [("ACTIVE", "ACTIVE"), (None, "PASSIVE")])
def test_the_report_says_how_idle_threads_waited(demo, tmp_path, monkeypatch, given, said):
    """It said PASSIVE even where the caller's own environment had them spin."""
    acts = {act: of_act(demo[2], act) for act in ("reuse", "choice", "repacked")}
    size = {"seconds": 1.0, "stored_bytes": 1}
    found = {
        "compute": {**size, "tokens": [1], "stored_tokens": 1, "weights": "some"},
        "answer": {"rows": acts["reuse"], "direct_io": True, "torch_threads": 1, "tiers": {}},
        "store": size,
        "ask": {"rows": acts["choice"]},
        "ask_again": {"rows": acts["repacked"], "moved": {"spans": 1, "bytes": 1, "seconds": 1.0}},
    }
    monkeypatch.setattr(story, "run_step", lambda step, *_: found[step])
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    report = tmp_path / "report.json"
    assert story.tell(tmp_path / "out", quick=True, json_file=report)
    assert json.loads(report.read_text())["meta"]["OMP_WAIT_POLICY"] == said


def test_the_store_it_leaves_can_be_inspected_and_verified(demo):
    folder, shown, _ = demo
    for command in ("inspect", "verify"):
        assert f"impress {command} --store {folder / 'store'}" in shown
    found = json.loads(run("inspect", "--store", folder / "store", "--json").stdout)
    assert found["spans"] == 2 and found["hottest"][0]["leases"] == 4
    assert run("verify", "--store", folder / "store").returncode == 0


def test_run_answers_on_the_demos_model_from_its_store(demo):
    folder, _, _ = demo
    text = folder / "documents" / "json.txt"
    args = ["--model", folder / "model", "--prefix", text, "--query", "What is it?"]
    done = run("run", *args, "--store", folder / "store", "--max-new-tokens", 2, "--json")
    assert done.returncode == 0 and not done.stderr, done.stderr
    found = json.loads(done.stdout)
    assert (found["mode"], found["new_tokens"]) == ("exact", 2)
    assert found["hit_tokens"] >= 1280 and list(found["bytes_by_tier"]) == ["ssd"]
    args += ["--store", folder / "store", "--max-new-tokens", 1, "--disk-gib", 1, "--json"]
    done = run("run", *args, "--policy", "quality", "--max-missing-mass", 0.5)
    found = json.loads(done.stdout)
    assert (found["mode"], found["policy"]) == ("sparse", "quality")
    assert 0 < found["chosen_rows_share"] < 1 and found["estimated_missing_mass"] <= 0.5


def test_commands_it_shows_are_called_as_it_was(monkeypatch):
    """`make demo` puts nothing on the path: the first command one copied was not found."""
    monkeypatch.setattr("sys.argv", [".venv/bin/impress", "demo"])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert story.command() == ".venv/bin/impress"
    monkeypatch.setattr("sys.argv", ["/a b/impress/__main__.py", "demo"])
    monkeypatch.setattr("sys.executable", "/a b/python")
    assert story.command() == "'/a b/python' -m impress"  # it was impress, which was not found
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert story.command() == "impress"


def test_commands_it_shows_can_be_copied_whatever_the_folder_is_called(tmp_path, capsys):
    story._say_where(tmp_path / "a b's")
    said = capsys.readouterr().out.partition("\n  ")[2].replace("\\\n", " ")
    words = shlex.split(said)
    for place in ("store", "lookup/specialised/model", "lookup/specialised/documents/0.txt"):
        assert str(tmp_path / "a b's" / place) in words


def test_run_looks_things_up_in_a_store_the_demo_left(demo):
    folder, shown, _ = demo
    place = folder / "lookup" / "specialised"
    line = shown[shown.index("impress run") :].replace("\\\n", "")
    done = run(*shlex.split(line)[1:])
    assert done.returncode == 0 and not done.stderr, done.stderr
    answer, _, rest = done.stdout.partition("\n")
    assert answer in line[line.index("choose") :].split()
    assert "sparse" in rest and f"--store {place / 'store'}" in line
    for word in ("why", "moved", "wanted", "fell back", "estimated missing mass", "worst head"):
        assert word in rest


def test_a_folder_that_is_not_the_demos_is_refused_untouched(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "mine").write_text("mine")
    done = run("demo", "--quick", "--dir", tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["store"]
    assert (tmp_path / "store" / "mine").read_text() == "mine"


def test_a_second_demo_in_the_same_folder_leaves_the_first_ones_stores(tmp_path):
    """Between two acts nobody held the stores' locks: they were removed as the first demo ran."""
    with prepared(tmp_path):
        (tmp_path / "store").mkdir()
        done = run("demo", "--quick", "--dir", tmp_path)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        assert "another impress demo" in done.stderr and (tmp_path / "store").exists()
    with prepared(tmp_path):
        assert not (tmp_path / "store").exists()


def test_a_store_that_a_killed_demos_process_has_open_yet_is_left_and_told(open_store, geometry):
    """It said to name another shard, or to open it with mode="r": a demo can do neither."""
    folder = open_store(geometry).path.parent
    (folder / MARKER).touch()
    with pytest.raises(impress.StoreLocked, match="stop that process, then repeat"):
        with prepared(folder):
            raise AssertionError("it may not begin")
    assert (folder / "store").exists()


def test_a_document_that_a_full_disk_refuses_is_told_by_the_disk(open_store, geometry, monkeypatch):
    """It was "refused (read-only)": only the log said what was full, and nothing what to do."""

    def full(fd, off, n_bytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    store = open_store(geometry)
    put_prompt(store, prompt(128))
    engine = SimpleNamespace(flush=store.flush, store=store)
    with pytest.raises(impress.StoreFailed, match=r"No space left on device.*--dir"):
        stored(engine)


def test_the_documents_are_long_and_the_same_every_time():
    texts = documents(8, 3)
    assert texts == documents(8, 3)
    assert all(len(text.text) > 6000 and len(text.questions) == 3 for text in texts)
    assert len({q for text in texts for q in text.questions}) == 24


def test_a_report_can_go_to_a_device(tmp_path):
    write_report("/dev/null", {"x": 1.0}, [])
    write_report(tmp_path / "report.json", {"x": 1.0}, [{"a": 1}], seed=3)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["figures"], report["rows"], report["meta"]["seed"]) == (
        {"x": 1.0},
        [{"a": 1}],
        3,
    )
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_a_report_can_go_to_stdout(capsys):
    write_report("-", {"x": 1.0}, [])
    assert json.loads(capsys.readouterr().out)["figures"] == {"x": 1.0}


def test_what_a_native_library_prints_is_no_message_of_a_steps():
    """oneDNN and MKL print to the process's own stdout (`ONEDNN_VERBOSE=all`, or on a processor too
    old for them): the demo ended in a traceback of the JSON that it took that for."""
    code = (
        "import os, sys; from impress.demo import worker\n"
        "worker._run = lambda *given: {'written': os.write(1, b'noise')}\n"
        "sys.argv[1:] = 'ask', 'here', 'quick'; worker.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ('{"result": {"written": 5}}\n', "noise")
