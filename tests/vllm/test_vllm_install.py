"""impress beside vLLM: what `make test-vllm` installed, and both of vLLM's process layouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, entry_points
from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="vLLM has an environment of its own: make test-vllm")

RECORD = Path(sys.prefix) / "impress.json"
ROOT = Path(__file__).parents[2]
by_make = pytest.mark.skipif(
    not RECORD.exists(), reason="not the environment that make test-vllm makes"
)


@by_make
def test_installing_impress_changes_no_package_of_vllms() -> None:
    record = json.loads(RECORD.read_text())
    before, after = record["before"], record["after"]
    assert {name: after.get(name) for name in before} == before
    assert set(record["missing"]) <= {"lmdb", "xxhash", "aiofiles"}
    assert {"impress-kv", *record["missing"]} <= set(after) - set(before)


def _installed() -> set[str]:
    """Files of the installed wheel's packages, as its RECORD names them, without compiled ones."""
    names = {str(file) for file in distribution("impress-kv").files or ()}
    return {n for n in names if n.startswith(("impress/", "tiers/")) and not n.endswith(".pyc")}


@by_make
def test_the_wheel_has_every_file_of_its_packages() -> None:
    """No test looked at the wheel: the checkout, which has every file, came first on the path."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    packages, left_out = (wheel["targets"]["wheel"][key] for key in ("packages", "exclude"))
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *packages]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a clone")
    there = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    excluded = {name for name in there if name.startswith(tuple(f"{f}/" for f in left_out))}
    assert excluded, "what pyproject.toml excludes is not there"
    assert _installed() == there - excluded, "another state is installed: make test-vllm"


_WALK = """
import importlib, json, pkgutil, sys
from pathlib import Path
names = []
for room in map(importlib.import_module, ("impress", "tiers")):
    assert Path(room.__file__).is_relative_to(sys.prefix), room.__file__
    names.append(room.__name__)
    for found in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
        importlib.import_module(found.name)
        names.append(found.name)
print("RESULT", json.dumps(names))
"""


@by_make
def test_every_module_of_the_wheel_is_imported_without_the_checkout(tmp_path: Path) -> None:
    """None is left out: vLLM brings torch and transformers, and what of CUDA's is not there is
    imported where it is used."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _WALK],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    imported = json.loads(done.stdout.partition("RESULT ")[2])
    files = {name for name in _installed() if name.endswith(".py")}
    modules = {n.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for n in files}
    assert set(imported) == modules


def test_vllm_finds_the_plugin() -> None:
    found = {e.name: e.value for e in entry_points(group="vllm.general_plugins")}
    if "impress" not in found:
        pytest.skip("impress is not installed here, only importable")
    assert found["impress"] == "impress.engines.vllm:register"


_APART = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from tests.vllm.served import params, transfer_config, words
if __name__ == "__main__":
    from vllm import LLM
    llm = LLM(
        model=sys.argv[1], dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
        max_model_len=1024, enable_prefix_caching=False,
        kv_transfer_config=transfer_config(Path(sys.argv[2])),
    )
    prompt = {"prompt_token_ids": words(500, seed=1)}
    first = llm.generate([prompt], params(6), use_tqdm=False)[0]
    deadline = time.monotonic() + 120
    while True:  # stored behind the answer: ask until the scheduler has seen it
        other = llm.generate([prompt], params(6), use_tqdm=False)[0]
        if other.num_cached_tokens or time.monotonic() > deadline:
            break
    same = other.outputs[0].token_ids == first.outputs[0].token_ids
    print("RESULT", other.num_cached_tokens, same)
"""


def test_scheduler_and_worker_in_processes_of_their_own(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """vLLM's default: the scheduler follows what the worker stores."""
    script = tmp_path / "apart.py"
    script.write_text(_APART)
    done = subprocess.run(
        [sys.executable, script, models["opt"], tmp_path / "store", ROOT],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert "RESULT 384 True" in done.stdout, done.stderr[-3000:]
