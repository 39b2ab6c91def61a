"""The demo from end to end, its figures, and its store under the other commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from impress.demo.documents import documents
from impress.report import write_report

SCRIPT = Path(sys.executable).parent / "impress"


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


def test_every_answer_from_ssd_and_dram_agrees_with_recomputing(demo):
    _, shown, report = demo
    assert report["figures"]["exact.agreement"] == 1.0
    assert {"ssd.ttft_ratio", "dram.ttft_ratio"} <= report["figures"].keys()
    assert len(report["rows"]) == 4
    assert shown.count("4 of 4") >= 2


def test_each_way_of_answering_read_the_document_from_its_own_tier(demo):
    _, _, report = demo
    for row in report["rows"]:
        tokens = row["hit_tokens"]["ssd"]
        assert tokens == row["hit_tokens"]["dram"] and 1280 <= tokens < row["prompt_tokens"]
        assert tokens % 64 == 0
        assert list(row["bytes"]["ssd"]) == ["ssd"] and list(row["bytes"]["dram"]) == ["dram"]


def test_the_rows_that_are_read_decide_the_answers(demo):
    assert demo[2]["figures"]["control.changes_without_prefix"] == 1.0


def test_the_report_names_its_conditions_and_no_path(demo):
    folder, _, report = demo
    meta = report["meta"]
    for key in ("commit", "date", "host", "seed", "cpus", "packages", "direct_io", "quick"):
        assert key in meta
    assert str(folder) not in json.dumps(report)


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
    args += ["--store", folder / "store", "--max-new-tokens", 1, "--json"]
    done = run("run", *args, "--policy", "quality", "--max-missing-mass", 0.5)
    found = json.loads(done.stdout)
    assert (found["mode"], found["policy"]) == ("sparse", "quality")
    assert 0 < found["chosen_rows_share"] < 1 and found["estimated_missing_mass"] <= 0.5


def test_a_folder_that_is_not_the_demos_is_refused_untouched(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "mine").write_text("mine")
    done = run("demo", "--quick", "--dir", tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["store"]
    assert (tmp_path / "store" / "mine").read_text() == "mine"


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
