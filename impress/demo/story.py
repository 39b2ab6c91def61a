"""The demo from outside: makes the folder, starts the two processes, prints what came out.

Imports no torch: all of that is in the processes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from impress.demo import SEED
from impress.directory import Shard
from impress.errors import BadInput, ImpressError, Unsupported
from impress.report import write_report
from impress.terminal import err, out, size

MARKER: Final = "impress-demo.json"  # stands in a folder the demo made
LOG: Final = "worker.log"
#: Idle OpenMP threads sleep. Where other work shares the cores, spinning ones made recomputing
#: twice and a hit several times as slow (measured on two cores, load 3).
THREADS: Final = {"OMP_WAIT_POLICY": "PASSIVE"}
_TITLES: Final = {"recompute": "recompute", "ssd": "hit from SSD", "dram": "hit from DRAM"}


def tell(folder: Path, *, quick: bool, json_file: Path | None) -> bool:
    """Run the whole demo under `folder`; True when every answer agreed.

    Raises ImpressError for what is missing or in the way, OSError.
    """
    _check_installed()
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise BadInput(f"--json {json_file}: no such folder")
    n_documents, n_questions = (2, 2) if quick else (8, 3)
    started = perf_counter()
    _prepare(folder)
    out.print(f"1  A process makes a model and computes and stores {n_documents} documents.")
    computed = _phase("compute", folder, n_documents, n_questions)
    out.print(
        f"   {sum(computed['tokens']):,} tokens computed in {computed['seconds']:.0f} s; stored "
        f"{computed['stored_tokens']:,} in whole windows, {size(computed['stored_bytes'])}."
    )
    out.print(f"2  A new process answers {n_documents * n_questions} questions, three ways each.")
    answered = _phase("answer", folder, n_documents, n_questions)
    rows, store = answered["rows"], answered["store"]
    figures = _figures(rows)
    _print(folder, rows, store, figures)
    if json_file is not None:
        write_report(
            json_file, figures, rows,
            seed=SEED, quick=quick, model_weights=computed["weights"], dtype="float32",
            document_tokens=computed["tokens"], torch_threads=answered["torch_threads"], **THREADS,
            direct_io=store["direct_io"], tiers=store["tiers"],
            wall_s=round(perf_counter() - started, 1),
        )  # fmt: skip
    return figures["exact.agreement"] == 1.0


def _check_installed() -> None:
    for name in ("torch", "transformers", "tokenizers", "safetensors"):
        if find_spec(name) is None:
            raise Unsupported(
                f"the demo runs a model and needs {name}: pip install 'impress-kv[hf]'"
            )


def _prepare(folder: Path) -> None:
    """An empty or new folder, or one the demo made: of that, only its store is removed."""
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
    store = folder / "store"
    if store.exists():
        shard = Shard(store)
        shard.lock()  # refused while somebody writes to it
        try:
            shutil.rmtree(store)
        finally:
            shard.unlock()


def _phase(name: str, folder: Path, n_documents: int, n_questions: int) -> dict[str, Any]:
    """Run one process to its end, showing how far it is; what it found."""
    counts = (str(n_documents), str(n_questions))
    command = (sys.executable, "-P", "-m", "impress.demo.worker", name, str(folder), *counts)
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


def _figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The figures this project tracks. Ratios are of the medians, hit ÷ recompute. Pure."""
    agree = [row["agrees"][mode] for row in rows for mode in ("ssd", "dram")]
    middle = {mode: _ttft(rows, mode, 50) for mode in _TITLES}
    return {
        "exact.agreement": sum(agree) / len(agree),
        "control.changes_without_prefix": sum(r["changes_without_prefix"] for r in rows)
        / len(rows),
        "ssd.ttft_ratio": middle["ssd"] / middle["recompute"],
        "dram.ttft_ratio": middle["dram"] / middle["recompute"],
        **{f"{mode}.ttft_ms_p50": ms for mode, ms in middle.items()},
        **{f"{mode}.ttft_ms_p95": _ttft(rows, mode, 95) for mode in _TITLES},
    }


def _ttft(rows: Sequence[dict[str, Any]], mode: str, percentile: float) -> float:
    return float(np.percentile([row["ttft_ms"][mode] for row in rows], percentile))


def _print(
    folder: Path, rows: Sequence[dict[str, Any]], store: dict[str, Any], figures: dict[str, float]
) -> None:
    out.print(_modes(rows, figures))
    tiers = "; ".join(
        f"{name.upper()} {size(usage['used'])} of {size(usage['total'])}"
        for name, usage in store["tiers"].items()
    )
    out.print(f"\nOccupancy: {tiers}. {store['tokens']:,} tokens in {store['spans']} spans.")
    if store["direct_io"]:
        out.print("SSD reads used O_DIRECT: the page cache had no part in them.")
    else:
        out.print(
            "This file system refuses O_DIRECT: reads were buffered, and the page cache may have "
            "served them."
        )
    changed = sum(row["changes_without_prefix"] for row in rows)
    out.print(
        "The weights are random, so the answers mean nothing; but without the rows read from the "
        f"store\n{changed} of {len(rows)} answers would be others."
    )
    out.print("\nLook at the store it left:", style="bold")
    for command in ("inspect", "verify"):
        out.print(f"  impress {command} --store {folder / 'store'}", markup=False, soft_wrap=True)


def _modes(rows: Sequence[dict[str, Any]], figures: dict[str, float]) -> Table:
    """One line per way of answering."""
    table = Table(title="\nTime to first token", title_style="bold", title_justify="left")
    table.add_column("")
    for column in ("p50 ms", "p95 ms", "÷ recompute", "answers that agree", "SSD", "DRAM"):
        table.add_column(column, justify="right")
    for mode, title in _TITLES.items():
        cells = [f"{figures[f'{mode}.ttft_ms_{p}']:,.0f}" for p in ("p50", "p95")]
        if mode == "recompute":
            table.add_row(title, *cells, "1.00", "–", "0 B", "0 B")
            continue
        agree = sum(row["agrees"][mode] for row in rows)
        read = [sum(row["bytes"][mode].get(tier, 0) for row in rows) for tier in ("ssd", "dram")]
        table.add_row(
            title, *cells, f"{figures[f'{mode}.ttft_ratio']:.2f}", f"{agree} of {len(rows)}",
            *map(size, read),
        )  # fmt: skip
    return table
