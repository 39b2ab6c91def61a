"""fio as the yardstick: what the same file on the same disk gives a program that does nothing else.

Reads are `--readonly` and name files of exactly their size, so fio never lays one out itself
(with `--offset --size` it may rewrite the file it measures).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Final

from experiments.common import Unable, console

MISSING: Final = "fio is not installed: apt-get install fio (or dnf, brew, conda install fio)"
PSYNC_JOBS: Final = 8
ENGINES: Final = ("libaio", "psync")
#: How often a disk's rate is read; the median is taken. One run right after much else was deleted
#: once had a third of the rate, and everything emulated followed it.
PASSES: Final = 5
_TIMEOUT_S: Final = 300
#: Puts fio's memory in huge pages, as a store's buffers are. With small ones a request ends where
#: the disk's list of memory places is full, 1 MiB at best: by how scattered they were, one virtual
#: disk gave 1.3 to 2.9 GB/s instead of 2.5 to 3.9. (And aligned: else a few MiB may hold none.)
_HUGE_PAGES: Final = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclass(frozen=True, slots=True)
class FioResult:
    """One run. Seconds are fio's own clock, from its first request to its last."""

    n_bytes: int
    wall_s: float
    cpu_s: float

    @property
    def gb_s(self) -> float:
        return self.n_bytes / self.wall_s / 1e9


def version() -> str:
    """fio's version. Raises Unable with how to install it."""
    if shutil.which("fio") is None:
        raise Unable(MISSING)
    return subprocess.run(
        ["fio", "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()


def read(file: Path, engine: str, block_bytes: int, *, pattern: str, seed: int) -> FioResult:
    """Read every block of `file` once. `pattern` is "read" or "randread"; `engine` one of ENGINES.

    libaio: one job, 32 requests deep. psync: 8 jobs, an eighth of the file each.
    """
    size = file.stat().st_size
    share = size // PSYNC_JOBS if engine == "psync" else size
    jobs = ["--iodepth=32"] if engine == "libaio" else [
        f"--numjobs={PSYNC_JOBS}", f"--offset_increment={share}",
    ]  # fmt: skip
    return _run([
        "--readonly", "--allow_file_create=0", f"--filename={file}", f"--size={share}",
        f"--rw={pattern}", f"--bs={block_bytes}", f"--randseed={seed}", f"--ioengine={engine}",
        *jobs,
    ], "read")  # fmt: skip


def of_store(path: Path) -> float:
    """GB/s of a store's segments in turn, the median of PASSES: one pass of one may be half as
    fast, or as fast again. nan, with a line that says why, without fio."""
    segments = sorted(
        (path / "shards/main/segments").glob("*.seg"),
        key=lambda file: (-file.stat().st_size, file.name),
    )
    turns = islice(cycle(segments), PASSES)
    try:
        return median(read(file, "libaio", 1 << 20, pattern="read", seed=1).gb_s for file in turns)
    except Unable as err:
        console.print(f"no rate to compare with: {err}")
        return math.nan


def write(file: Path, n_bytes: int, seed: int) -> FioResult:
    """Write a new, fallocated file in order, 32 MiB in flight; the time includes a final fsync."""
    return _run([
        f"--filename={file}", f"--size={n_bytes}", "--rw=write", "--bs=1m", "--ioengine=libaio",
        "--iodepth=32", "--fallocate=posix", "--end_fsync=1", "--refill_buffers",
        f"--randseed={seed}",
    ], "write")  # fmt: skip


def _run(arguments: list[str], what: str) -> FioResult:
    command = ["fio", "--name=impress", "--direct=1", "--group_reporting", "--iomem_align=2m",
               "--output-format=json", *arguments]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False,
                              timeout=_TIMEOUT_S, env={**os.environ, **_HUGE_PAGES})  # fmt: skip
    except FileNotFoundError:
        raise Unable(MISSING) from None
    except subprocess.TimeoutExpired:
        raise Unable(f"fio took more than {_TIMEOUT_S:g} s") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise Unable(f"fio failed: {said.splitlines()[-1]}")
    job = json.loads(done.stdout)["jobs"][0]
    wall_s = job[what]["runtime"] / 1e3
    # Percent of each job's own run time; jobs of a group are averaged.
    n_jobs = PSYNC_JOBS if "--ioengine=psync" in arguments else 1
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * wall_s * n_jobs
    return FioResult(job[what]["io_bytes"], wall_s, cpu_s)
