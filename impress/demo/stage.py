"""Where the demo plays: its folder, and the processes that run its steps. Imports no torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from impress.demo import CHECKPOINTS
from impress.errors import BadInput, ImpressError, Unsupported
from impress.terminal import err
from impress.write.directory import Shard, shards_of, writing
from tiers.files import lock_file, unlock_file

MARKER: Final = "impress-demo.json"  # marks a folder that the demo made
LOG: Final = "worker.log"
#: Idle OpenMP threads sleep. Where other work shares the cores, spinning threads made recomputing
#: twice and a hit several times as slow (measured on two cores, load 3).
THREADS: Final = {"OMP_WAIT_POLICY": "PASSIVE"}


def check_installed() -> None:
    """Raises Unsupported naming what is missing, or too old."""
    for name in ("torch", "transformers", "tokenizers", "safetensors"):
        if find_spec(name) is None:
            raise Unsupported(
                f"the demo runs a model and needs {name}: pip install '.[hf]' in impress's clone"
            )
    from impress.engines.versions import check_versions  # it needs packaging, which came with those

    check_versions()


def lookup_place(folder: Path, checkpoint: str) -> Path:
    """Where a checkpoint's model, documents and store are."""
    return folder / "lookup" / checkpoint


@contextmanager
def prepared(folder: Path) -> Iterator[None]:
    """Takes an empty or new folder, or one the demo made, from which it removes only the stores. No
    other demo runs there until the block ends."""
    marker = folder / MARKER
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"--dir {folder}: not a directory")
    folder.mkdir(parents=True, exist_ok=True)
    if not marker.exists():
        if any(folder.iterdir()):
            raise BadInput(
                f"--dir {folder}: not empty, and not made by impress demo; name another directory"
            )
        marker.write_text(json.dumps({"made_by": "impress demo"}) + "\n")
    fd = lock_file(marker)
    if fd is None:
        raise BadInput(f"--dir {folder}: another impress demo plays there; name another directory")
    try:
        for place in (folder, *(lookup_place(folder, name) for name in CHECKPOINTS)):
            if (place / "store").exists():
                _remove(place / "store")
        yield
    finally:
        unlock_file(fd)


def _remove(store: Path) -> None:
    shards = shards_of(store) or [Shard(store)]
    try:
        for shard in shards:
            with writing(shard):  # refused while somebody writes to it
                shard.lock()
        shutil.rmtree(store)
    finally:
        for shard in shards:
            shard.unlock()


def run_step(step: str, folder: Path, size: str) -> dict[str, Any]:
    """Run one process to its end, showing its progress; return its result. Raises ImpressError."""
    command = (sys.executable, "-P", "-m", "impress.demo.worker", step, str(folder), size)
    columns = (TextColumn("   {task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    found: dict[str, Any] = {}
    with (
        (folder / LOG).open("w") as log,
        Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar,
        subprocess.Popen(
            command, env={**THREADS, **os.environ}, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        task = bar.add_task("starting", total=None)
        assert process.stdout is not None, "asked for a pipe"
        try:
            for line in process.stdout:
                found = json.loads(line)
                if "step" in found:
                    bar.update(task, description=found["step"], completed=found["done"],
                               total=found["of"])  # fmt: skip
        except BaseException:
            process.kill()
            raise
    if "error" in found:
        raise ImpressError(found["error"])
    if "result" not in found:
        raise ImpressError(
            f"demo: the process ended with status {process.returncode}; see {folder / LOG}"
        )
    result: dict[str, Any] = found["result"]
    return result
