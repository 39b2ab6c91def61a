"""Many users at once on a store that does not fit its DRAM tier: requests a second, and memory.

Threads of one process, by engine; then processes that share a directory: each also writes to a
shard of its own, and one more process's shard holds what all read. Each request takes a whole
random prompt, 16 MiB; a sample of the answers is compared. fio reads segments of the store before
and after each cell. Rates count bytes from the SSD (O_DIRECT: the page cache has no part in it).
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

import impress
from experiments import fio
from experiments.cells import SKIPPED
from experiments.common import Row, Unable, check_room, console, print_rows
from experiments.harness import Cell, Experiment, Figures, Options, main
from experiments.load_content import (
    GEOMETRY,
    NAMESPACE,
    PROMPT_BYTES,
    config,
    measured,
    put,
)
from impress.config import MIB
from impress.errors import ImpressError

_THREADS: Final = (1, 8, 32, 64)
_ENGINES: Final = ("aio", "io_uring", "preadv", "aiofiles")
_ENGINE_THREADS: Final = 8
_PROCESSES: Final = (1, 2, 4)
_OF_A_PROCESS: Final = 8  # threads
_ROOM: Final = 1.25  # for what processes store of their own, too
_LEFT_S: Final = 120.0  # longest wait for a process that should have ended


def _sizes(options: Options) -> tuple[int, int, float]:
    """(prompts stored, DRAM bytes, seconds a cell). The store is four times its DRAM tier."""
    return (32, 128 * MIB, 3.0) if options.quick else (512, 2048 * MIB, 60.0)


def _filled(options: Options) -> Path:
    """The store, made by the first cell that wants it."""
    path = options.folder / "store"
    n_prompts, _, _ = _sizes(options)
    if not path.exists():
        check_room(options.folder, int(_ROOM * n_prompts * PROMPT_BYTES))
        console.print(f"storing {n_prompts * PROMPT_BYTES >> 20} MiB")
        with impress.PrefixStore.open(path, GEOMETRY, NAMESPACE, config(0)) as store:
            for seed in range(n_prompts):
                put(store, seed)
            store.flush(600)
    return path


def _beside_fio(path: Path, row: Row, before: float) -> Row:
    disk = (before + fio.of_store(path)) / 2
    if row["missed"]:  # of fewer prompts more come from memory, and a miss takes no time
        raise Unable(f"{row['missed']} requests found no prompt: the store had no room for all")
    assert not row["wrong"] and not row["left"], row
    elsewhere = 1 - row["SSD GB/s"] / row["GB/s"] if row["GB/s"] else math.nan
    return {**row, "fio GB/s": disk, "of fio": row["SSD GB/s"] / disk, "elsewhere": elsewhere}


def _threads(options: Options, n_threads: int, engine: str) -> list[Row]:
    n_prompts, dram_bytes, seconds = _sizes(options)
    path = _filled(options)
    before = fio.of_store(path)
    try:
        store = impress.PrefixStore.open(path, GEOMETRY, NAMESPACE, config(dram_bytes, engine))
    except ImpressError as err:
        console.print(f"{engine}: skipped: {err}")
        return [{SKIPPED: str(err)}]
    row = {**measured(store, n_threads, seconds, n_prompts, options.seed), "written": 0}
    return [_beside_fio(path, row, before)]


def _processes(options: Options, n_processes: int) -> list[Row]:
    """Processes that read the common prompts and store and purge prompts in shards of their own."""
    n_prompts, _, seconds = _sizes(options)
    path = _filled(options)
    before = fio.of_store(path)
    with impress.PrefixStore.open(path, GEOMETRY, NAMESPACE, config(0)) as store:
        readers = [_reader(path, seconds, options.seed + i, n_prompts) for i in range(n_processes)]
        try:
            for reader in readers:
                _line(reader)  # it is open
            for reader in readers:
                assert reader.stdin is not None
                reader.stdin.write("go\n")
                reader.stdin.flush()
            rows = [_row(reader) for reader in readers]
        finally:
            for reader in readers:
                reader.kill()
                reader.wait()
        store.follow()
        store.check()
    total: Row = {key: sum(row[key] for row in rows) for key in rows[0]}
    for key in ("p50 ms", "p99 ms", "oldest lease s", "RSS growth MB"):
        total[key] = float(np.max([row[key] for row in rows]))
    return [_beside_fio(path, total, before)]


def _reader(path: Path, seconds: float, seed: int, n_prompts: int) -> subprocess.Popen[str]:
    numbers = (seconds, _OF_A_PROCESS, seed, n_prompts)
    command = [sys.executable, "-m", "experiments.load_content", str(path), *map(str, numbers)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip


def _line(reader: subprocess.Popen[str]) -> None:
    assert reader.stdout is not None
    if reader.stdout.readline() != "open\n":
        raise Unable("a reading process did not open the store")


def _row(reader: subprocess.Popen[str]) -> Row:
    """The row that the process printed at its end."""
    try:
        said = reader.communicate(timeout=_LEFT_S)[0]
    except subprocess.TimeoutExpired:
        raise Unable(f"a reading process did not end within {_LEFT_S:g} s") from None
    if reader.returncode:
        raise Unable(f"a reading process failed (exit status {reader.returncode})")
    row: Row = json.loads(said)
    return row


def _cells(options: Options) -> list[Cell]:
    seconds = _sizes(options)[2] + 3
    base: dict[str, Any] = {"seed": options.seed, "quick": options.quick}
    todo = [(n, "auto") for n in _THREADS] + [(_ENGINE_THREADS, engine) for engine in _ENGINES]
    cells = [
        Cell({"threads": n, "processes": 0, "engine": engine, **base},
             partial(_threads, options, n, engine), seconds)
        for n, engine in todo
    ]  # fmt: skip
    cells += [
        Cell({"threads": _OF_A_PROCESS, "processes": n, "engine": "auto", **base},
             partial(_processes, options, n), seconds)
        for n in _PROCESSES
    ]  # fmt: skip
    return cells


#: What a table shows, by the row's key.
_SHOWN: Final = {
    "threads": "threads", "processes": "proc.", "engine": "engine", "requests/s": "req/s",
    "p50 ms": "p50 ms", "p99 ms": "p99 ms", "SSD GB/s": "GB/s", "of fio": "of fio",
    "written": "written",
    "RSS growth MB": "RSS MB", "oldest lease s": "lease s", "compared": "compared",
    "lost": "lost", "missed": "missed",
}  # fmt: skip


def _figures(rows: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
    shown = [{name: row[key] for key, name in _SHOWN.items()} for row in rows]
    if shown:
        print_rows("Load; 0 processes: all in one", shown)
    most = [row for row in rows if row["threads"] == 64]
    if not most:
        return {}, rows
    return {
        "rps_64": most[0]["requests/s"], "p99_ms_64": most[0]["p99 ms"],
        "gbps_64_vs_fio": most[0]["of fio"],
        "rss_growth_mb": max(row["RSS growth MB"] for row in rows),
        "wrong": float(sum(row["wrong"] for row in rows)),
        "left": float(sum(row["left"] for row in rows)),
    }, rows  # fmt: skip


_MEANING: Final = {
    "of fio": "bytes a second from the SSD, verified, beside fio's sequential read of the segments "
    "with 32 requests of 1 MiB under way, medians of five just before and after",
    "elsewhere": "share of the bytes that came from DRAM or from a read under way for another",
    "written": "prompts that the reading processes stored meanwhile, each in a shard of its own",
    "RSS growth MB": "of all memory but the DRAM tier's, which is touched as it fills: median of "
    "the last quarter of a cell less that of its second; the largest of the processes",
    "left": "leases, pinned spans and bytes of buffers in use after the last request: must be 0",
    "geometry": str(GEOMETRY),
}

EXPERIMENT: Final = Experiment(
    "load",
    "Many threads and processes on a store larger than its DRAM tier.",
    _cells,
    _figures,
    meta=lambda _options: {"definitions": _MEANING},
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
