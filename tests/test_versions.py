"""What torch and Transformers the engine runs on is said where an older one is installed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.version import Version
from test_engine_hf import attach, tiny

from impress.demo.stage import check_installed
from impress.engines import versions
from impress.errors import Unsupported

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("package", "there"), [("torch", "2.10.1"), ("transformers", "4.57.6")])
def test_what_is_too_old_is_said_to_be_that(tmp_path, monkeypatch, package, there):
    """Of Transformers 4.57 its own mask function was said to have been replaced."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"{package}>={versions.OLDEST[package]}" in extra["optional-dependencies"]["hf"]
    real = versions.version_of
    monkeypatch.setattr(
        versions, "version_of", lambda name: Version(there) if name == package else real(name)
    )
    with pytest.raises(Unsupported, match=f"needs {package} .* or newer, {there} is installed"):
        attach(tiny("llama"), tmp_path)
    with pytest.raises(Unsupported, match=f"needs {package}"):
        check_installed()


def test_no_name_that_an_old_transformers_lacks_is_imported_before_that_is_said():
    """4.57 has no PreTrainedConfig: importing the engine was a traceback about that."""
    files = [*(ROOT / "impress").rglob("*.py")]
    assert files and not [path for path in files if "PreTrainedConfig" in path.read_text()]
