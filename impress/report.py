"""The one form of every measurement this project writes: figures, rows, and the conditions."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from impress import __version__

_ROOT = Path(__file__).resolve().parent.parent
#: What of the repository is run.
_CODE = ("impress", "tiers", "experiments", "pyproject.toml")
_PACKAGES = ("numpy", "lmdb", "torch", "transformers")


def write_report(
    path: str | os.PathLike[str],
    figures: Mapping[str, float],
    rows: Sequence[Mapping[str, Any]],
    **meta: Any,
) -> None:
    """Write {"figures", "rows", "meta"} as JSON; `meta` overrides what `conditions` knows.

    Path "-" is stdout. Raises OSError, and leaves no partial file.
    """
    meta = {**conditions(), **meta}
    write_json(path, {"figures": dict(figures), "rows": list(rows), "meta": meta})


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """One JSON object in a file; "-" is stdout. Raises OSError, and leaves no partial file."""
    text = json.dumps(plain(value), indent=1, allow_nan=False) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
    else:
        write_text(Path(path), text)


def plain(value: Any) -> Any:
    """The value for JSON, which has no nan: None stands for it. Pure."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_text(target: Path, text: str) -> None:
    """Write a file whole, or leave it as it was; a link is written through. Raises OSError."""
    # A pipe or a device cannot be replaced, and a link (/dev/stdout) should not be.
    if target.is_symlink() or (target.exists() and not target.is_file()):
        target.write_text(text)
        return
    draft = target.with_name(f".impress-{os.getpid()}-{threading.get_ident()}")
    try:
        draft.write_text(text)
        draft.replace(target)
    except OSError as err:  # which names the draft
        draft.unlink(missing_ok=True)
        raise OSError(err.errno, err.strerror, str(target)) from err


def conditions() -> dict[str, Any]:
    """What a reader needs to judge a number: code, date, machine, packages. No paths, no names."""
    return {
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": host(),
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "argv": [Path(sys.argv[0]).name, *(a for a in sys.argv[1:] if os.sep not in a)],
    }


def host() -> str:
    """The machine's kind: system and processor, no name."""
    return f"{platform.system()} {platform.release()} {platform.machine()}, {_cpu_name()}"


def commit() -> str:
    """The commit of this code, as it was when this process first asked; behind it, where files that
    are run were edited, "-dirty-" and a digest of the edits: two different ones are not one. The
    package's version outside its own git.

    Edited reports and pages are no other code: each run of `experiments.all` leaves some.
    """
    return _commit_of(_ROOT)


@lru_cache(4)
def _commit_of(root: Path) -> str:
    if not (root / ".git").exists():
        return __version__
    head = _git("describe", "--always", "--exclude=*")
    edits = _git("diff", "HEAD", "--", *_CODE)
    added = _git("ls-files", "--others", "--exclude-standard", "--", *_CODE)
    if head is None or edits is None or added is None:
        return __version__
    for name in added.splitlines():
        with suppress(OSError):
            edits += f"{name} {sha256((root / name).read_bytes()).hexdigest()}\n"
    return f"{head}-dirty-{sha256(edits.encode()).hexdigest()[:8]}" if edits else head


def _git(*asked: str) -> str | None:
    """What git says of this code; None where it says nothing."""
    command = ("git", "-C", str(_ROOT), *asked)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown CPU")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
