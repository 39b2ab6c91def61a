"""kvikio: NVIDIA's cuFile, where there is a GPU. An extra (`impress-kv[gpu]`), imported lazily.

Without a CUDA driver its host reads fail, and with a broken one they can hang (measured on kvikio
26.10): so it is probed first, and then proves itself in a process of its own. It reads into host
memory here. Straight into device memory stays off until the second sum of a piece, one that a GPU
can compute, is written: rows that were not verified are never used.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final

from tiers.coalesce import Run
from tiers.queues import ReadQueue, SegmentFile

_TEST_TIMEOUT_S: Final = 60.0
#: Writes a page, reads it back, compares.
_SELF_TEST: Final = """
import os, tempfile
import numpy as np
import kvikio, kvikio.defaults
data = np.frombuffer(os.urandom(4096), dtype=np.uint8).copy()
with tempfile.NamedTemporaryFile() as file:
    file.write(data.tobytes()); file.flush()
    out = np.zeros(4096, dtype=np.uint8)
    with kvikio.CuFile(file.name, "r") as handle:
        assert handle.pread(out, 4096, 0).get() == 4096
    assert (out == data).all()
"""


def why_not() -> str:
    """Why kvikio cannot be used here, in one line; "" when it proved that it can."""
    if importlib.util.find_spec("kvikio") is None:
        return "kvikio is not installed: pip install 'impress-kv[gpu]'"
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver (libcuda.so.1)"
    count = ctypes.c_int(0)
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the CUDA driver finds no device"
    try:
        command = (sys.executable, "-c", _SELF_TEST)
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_TEST_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"its self-test hung for {_TEST_TIMEOUT_S:g} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return f"its self-test failed: {lines[-1]}"
    return ""


class KvikioQueue(ReadQueue):
    """All reads of a batch handed to cuFile's threads at once."""

    name = "kvikio"

    def __init__(self) -> None:
        import kvikio
        import kvikio.defaults

        self._kvikio: Any = kvikio
        self._files: dict[Path, Any] = {}

    def read(self, runs: Sequence[Run], files: Sequence[SegmentFile]) -> Generator[int, None, None]:
        under_way = [self._start(run, file.path) for run, file in zip(runs, files, strict=True)]
        try:
            for i, run in enumerate(runs):
                yield i if _sum(under_way[i]) == run.n_bytes else ~i
        finally:
            for futures in under_way:
                _sum(futures)

    def _start(self, run: Run, path: Path) -> list[Any]:
        if path not in self._files:
            self._files[path] = self._kvikio.CuFile(str(path), "r")
        off, futures = run.off, []
        for view in run.views:
            futures.append(self._files[path].pread(view, len(view), off))
            off += len(view)
        return futures

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


def _sum(futures: list[Any]) -> int:
    """Bytes read by all of them; -1 when one failed. Past a file's end cuFile raises."""
    total = 0
    for future in futures:
        try:
            total += int(future.get())
        except Exception:  # whatever the library raises: it is read again with preadv
            total = -(1 << 62)
    return max(total, -1)
