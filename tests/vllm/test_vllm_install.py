"""impress beside vLLM: what `make test-vllm` installed, and both of vLLM's process layouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="vLLM has an environment of its own: make test-vllm")

RECORD = Path(sys.prefix) / "impress.json"


@pytest.mark.skipif(not RECORD.exists(), reason="not the environment that make test-vllm makes")
def test_installing_impress_changes_no_package_of_vllms() -> None:
    record = json.loads(RECORD.read_text())
    before, after = record["before"], record["after"]
    assert {name: after.get(name) for name in before} == before
    added = set(after) - set(before)
    assert added <= {"impress-kv", "lmdb", "xxhash", "aiofiles"}
    assert "impress-kv" in added


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
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, script, models["opt"], tmp_path / "store", root],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": str(root)},
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert "RESULT 384 True" in done.stdout, done.stderr[-3000:]
