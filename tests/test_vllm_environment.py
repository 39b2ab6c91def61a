"""`make test-vllm`'s environment: when it is made anew, and what each run installs in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.vllm import install

ROOT = Path(__file__).resolve().parent.parent


class _Environment:
    """Stands in for pip: a package is no more than the metadata that says its name and version."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.site = folder, folder.with_name("site")
        self.needs = ["made-up-vllms>=1.0", "made-up-ours>=1.4"]
        self.n_made = 0

    def make(self, folder: Path, python: Path, vllm: str) -> bool:
        for old in (self.folder, self.site):
            shutil.rmtree(old, ignore_errors=True)
            old.mkdir()
        self.add("made-up-vllms", "2.0")
        self.n_made += 1
        return True

    def add(self, name: str, version: str) -> None:
        self.drop(name)
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        needs = self.needs if name == "impress-kv" else []
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {n}" for n in needs)]
        (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines, ""]))

    def drop(self, name: str) -> None:
        for old in self.site.glob(f"{name.replace('-', '_')}-*.dist-info"):
            shutil.rmtree(old)

    def packages(self) -> dict[str, str]:
        found = (path.name.removesuffix(".dist-info").split("-") for path in self.site.iterdir())
        return {name.replace("_", "-"): version for name, version in found}

    def run(self, *command: str | Path) -> str:
        words = [str(word) for word in command]
        if words[1] == "-c":
            path = {**os.environ, "PYTHONPATH": str(self.site)}
            return subprocess.run(
                [sys.executable, *words[1:]],
                env=path,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            ).stdout
        if "list" in words:
            return json.dumps([{"name": n, "version": v} for n, v in self.packages().items()])
        if "uninstall" in words:
            for name in words[words.index("--yes") + 1 :]:
                self.drop(name)
        elif "wheel" in words:
            Path(words[words.index("--wheel-dir") + 1], "impress_kv-0.1.0.whl").touch()
        else:
            for asked in words[words.index("--no-deps") + 1 :]:
                name, _, floor = asked.partition(">=")
                self.add(*((name, floor) if floor else ("impress-kv", "0.1.0")))
        return ""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Environment:
    environment = _Environment(tmp_path / "environment")
    monkeypatch.setattr(install, "_run", environment.run)
    monkeypatch.setattr(install, "_make", environment.make)
    return environment


def _another_python(monkeypatch: pytest.MonkeyPatch, *version: int) -> None:
    monkeypatch.setattr(install, "sys", SimpleNamespace(version_info=version, exit=sys.exit))


def test_another_python_or_another_vllm_makes_the_environment_anew(
    there: _Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make test-vllm PYTHON=python3.12` over an environment of 3.11 went on testing 3.11."""
    n_made = []
    for version, vllm in [
        ((3, 11, 7), "vllm"), ((3, 11, 9), "vllm"), ((3, 12, 1), "vllm"), ((3, 12, 1), "other"),
    ]:  # fmt: skip
        _another_python(monkeypatch, *version)
        install.main(there.folder, vllm)
        n_made.append(there.n_made)
    assert n_made == [1, 1, 2, 3]
    (there.folder / ".vllm").write_text("other")  # as written before the Python was in it
    install.main(there.folder, "other")
    assert there.n_made == 4


def test_a_raised_floor_installs_what_was_added_for_impress_anew(there: _Environment) -> None:
    """What an earlier run had added stayed, so that a floor raised above it failed every run."""
    install.main(there.folder)
    assert there.packages()["made-up-ours"] == "1.4"
    there.needs[1] = "made-up-ours>=3.0"
    install.main(there.folder)
    assert there.packages()["made-up-ours"] == "3.0"
    del there.needs[1]
    install.main(there.folder)
    assert there.packages() == {"made-up-vllms": "2.0", "impress-kv": "0.1.0"}
    assert there.n_made == 1


def test_each_run_compares_with_the_packages_as_vllm_brought_them(there: _Environment) -> None:
    """A later run compared with what an earlier one had left, and so no longer saw its changes."""
    install.main(there.folder)
    there.add("made-up-vllms", "3.0")
    install.main(there.folder)
    record = json.loads((there.folder / "impress.json").read_text())
    assert record["before"] == {"made-up-vllms": "2.0"}
    assert record["after"]["made-up-vllms"] == "3.0"
    assert record["missing"] == ["made-up-ours"]


def test_a_floor_above_vllms_own_package_is_told_in_a_line(there: _Environment) -> None:
    """It was a traceback of the command that had found it."""
    there.needs[0] = "made-up-vllms>=3.0"
    with pytest.raises(SystemExit, match=r"needs made-up-vllms>=3\.0, and 2\.0 is there$"):
        install.main(there.folder, "vllm")
    assert not (there.folder / "impress.json").exists()


def test_a_python_too_old_is_told_before_anything_is_made(
    there: _Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Python 3.10 vLLM's 3.5 GB were installed, and then impress's wheel was refused."""
    _another_python(monkeypatch, 3, 10, 14)
    with pytest.raises(SystemExit, match=r"^impress needs Python 3\.11 or newer: make test-vllm"):
        install.main(there.folder)
    assert there.n_made == 0


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
def test_make_runs_this_checkouts_file_beside_another_package_named_tests(tmp_path: Path) -> None:
    """A distribution's package `tests` was taken for the one here, which has no __init__.py."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    done = subprocess.run(
        ["make", "test-vllm", f"PYTHON={sys.executable}", "VLLM_VENV="],  # no folder: only usage
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode
    assert re.search("^usage: python tests/vllm/install.py", done.stderr, re.MULTILINE), done.stderr
