"""The environments of `experiments.peers`: one a peer, made once. vLLM's is `make test-vllm`'s."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from experiments.common import console

ROOT: Final = Path(__file__).resolve().parent.parent
PEERS: Final = ROOT / ".venv-peers"
VLLM: Final = ROOT / ".venv-vllm"

_TORCH: Final = "torch>=2.11,<2.14"  # as constraints.txt: the build for the CPU
#: Arguments of `pip install`, one list per call. A peer's own requirements pull in CUDA by the
#: gigabyte, so these are the ones that its files need on a CPU.
RECIPES: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "lmcache": (
        (_TORCH, "numpy<=2.2.6"),
        ("--no-deps", "lmcache==0.5.6"),
        (
            "transformers>=5.4,<5.24", "setuptools<81", "msgspec", "pyyaml", "sortedcontainers",
            "psutil", "aiofile", "aiofiles", "aiohttp", "pyzmq", "prometheus_client<=0.24.1",
            "py-cpuinfo", "cachetools", "blake3", "nvtx", "numba", "numpy<=2.2.6", "httpx",
            "safetensors", "redis", "opentelemetry-sdk", "opentelemetry-exporter-prometheus",
            "opentelemetry-exporter-otlp", "fastapi", "requests", "cryptography",
        ),
    ),
    "sglang": (
        (_TORCH, "numpy"),
        ("--no-deps", "sglang==0.5.23"),
        (
            "orjson", "psutil", "pybase64", "msgspec", "pyzmq", "requests", "tqdm", "ipython",
            "pydantic", "starlette", "pillow", "packaging", "aiohttp", "triton",
        ),
    ),
    "mooncake": (("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"),),
}  # fmt: skip
#: System -> the peer whose environment it runs in; impress itself runs in the caller's.
ENVIRONMENTS: Final = {
    "lmcache": "lmcache",
    "lmcache direct": "lmcache",
    "sglang": "sglang",
    "mooncake": "mooncake",
    "vllm files": "vllm",
}


def python_of(system: str, peers: Path, vllm: Path) -> Path:
    """The interpreter that a system runs in; it may not be there."""
    if system not in ENVIRONMENTS:
        return Path(sys.executable)
    name = ENVIRONMENTS[system]
    return (vllm if name == "vllm" else peers / name) / "bin" / "python"


def is_made(system: str, peers: Path, vllm: Path) -> bool:
    """Whether the environment a system runs in is there whole: one whose making was cut off has an
    interpreter too."""
    if system not in ENVIRONMENTS:
        return True
    name = ENVIRONMENTS[system]
    return (vllm / "impress.json" if name == "vllm" else peers / name / ".ready").exists()


def install(peers: Path) -> None:
    """Make the missing environments. A peer that cannot be installed is named and left out."""
    for name, recipe in RECIPES.items():
        folder = peers / name
        done = folder / ".ready"
        if done.exists():
            continue
        console.print(f"installing {name} in {folder}")
        pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet")
        steps = [(sys.executable, "-m", "venv", "--clear", str(folder))]
        for step in (*steps, *((*pip, *packages) for packages in recipe)):
            asked = subprocess.run(step, check=False, capture_output=True, text=True)
            if asked.returncode:
                reason = (asked.stderr.strip().splitlines() or ["no reason given"])[-1]
                console.print(f"{name} cannot be had: {reason[:200]}")
                break
        else:
            done.touch()
