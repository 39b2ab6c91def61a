"""One system of `experiments.peers`, in a process of its own, in the environment that has it.

    python -m experiments.peers_worker NAME FOLDER SEED SHAPE

JSON lines {"do": "store" | "cold" | "warm" | "end", "prefix": i} come in, and what each took goes
out. It needs only NumPy and the system. Work that is not the system's (making rows, laying them
where it takes them from, comparing them, dropping caches) is not timed.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

#: bfloat16 without the highest bit of the exponent: finite, whatever the rest is.
_FINITE = np.uint64(0xBFFF_BFFF_BFFF_BFFF)
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Shape:
    """A prefix of bfloat16 rows, and how peers cut it. Bytes: of keys and values together."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    n_tokens: int
    chunk_tokens: int

    @property
    def n_chunks(self) -> int:
        return self.n_tokens // self.chunk_tokens

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_tokens * self.n_layers * 2 * self.n_kv_heads * self.head_dim * 2

    @property
    def n_bytes(self) -> int:
        return self.n_chunks * self.chunk_bytes


class System:
    """Base of all. `children`: processes whose CPU time is the system's too."""

    version = ""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.shape = shape
        self.children: list[int] = []

    def settled(self, prefix: int) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """The process ends anyway."""


class Pooled(System):
    """A system that stores from `pool`, and restores to it: uint8 [chunks, chunk bytes]."""

    pool: npt.NDArray[np.uint8]

    def fill(self, prefix: int, rows: npt.NDArray[np.uint8]) -> None:
        self.pool[:] = rows

    def settled(self, prefix: int) -> None:
        """Clear the pool of what was stored, so that a restore that reads nothing shows."""
        self.pool[:] = 0

    def same(self, prefix: int, rows: npt.NDArray[np.uint8]) -> bool:
        same = np.array_equal(self.pool, rows)
        self.pool[:] = 0
        return same


def rows_of(shape: Shape, seed: int, prefix: int) -> npt.NDArray[np.uint8]:
    """[chunks, chunk bytes], the same in every process."""
    made = np.random.Generator(np.random.SFC64([seed, prefix])).integers(
        0, 1 << 64, shape.n_bytes // 8, dtype=np.uint64
    )
    made &= _FINITE
    return made.view(np.uint8).reshape(shape.n_chunks, shape.chunk_bytes)


def files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path


def sync(folder: Path) -> None:
    """On return every file's bytes are on its medium."""
    for path in files(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.close(fd)


def drop(folder: Path) -> None:
    """Drop the files from the page cache; those on tmpfs stay."""
    for path in files(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def cpu_s(children: list[int]) -> float:
    """CPU seconds of this process's threads and of these processes."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    total = own.ru_utime + own.ru_stime
    for pid in children:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total


def timed(system: Any, folder: Path, work: Callable[[], None], *, settle: bool) -> dict[str, Any]:
    """Seconds and CPU seconds of some work; `settle` adds those until its bytes are on the disk."""
    cpu, begin = cpu_s(system.children), time.perf_counter()
    work()
    took: dict[str, Any] = {"seconds": time.perf_counter() - begin}
    if settle:
        sync(folder)
        took["durable_s"] = time.perf_counter() - begin
    took["cpu_s"] = cpu_s(system.children) - cpu
    return took


def answer(system: Any, folder: Path, shape: Shape, seed: int, asked: dict[str, Any]) -> Any:
    """Do one thing. Raises what the system raises, ValueError where rows came back changed."""
    prefix = int(asked["prefix"])
    rows = rows_of(shape, seed, prefix)
    if asked["do"] == "store":
        system.fill(prefix, rows)
        took = timed(system, folder, lambda: system.store(prefix), settle=True)
        system.settled(prefix)
        return took
    if asked["do"] == "cold":
        drop(folder)
    took = timed(system, folder, lambda: system.restore(prefix), settle=False)
    if not system.same(prefix, rows):
        raise ValueError(f"prefix {prefix} came back changed")
    return took


def main(name: str, folder: Path, seed: int, shape: Shape) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the system prints goes to the log

    def say(what: dict[str, Any]) -> None:
        replies.write(json.dumps(what) + "\n")
        replies.flush()

    system: Any = None
    try:
        from experiments.peers_systems import SYSTEMS

        system = SYSTEMS[name](folder, shape)
        say({"ready": system.version})
        for line in sys.stdin:
            asked = json.loads(line)
            if asked["do"] == "end":
                break
            say(answer(system, folder, shape, seed, asked))
        system.close()
        system = None
        say({})
    except BaseException as err:
        for child in getattr(system, "children", ()):  # it was not closed
            with suppress(OSError):
                os.kill(child, signal.SIGTERM)
        say({"error": f"{type(err).__name__}: {err}".splitlines()[0][:200]})
        raise
    finally:
        os._exit(0)  # the system leaves threads that nothing ends


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Shape(**json.loads(sys.argv[4])))
