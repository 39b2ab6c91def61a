"""kvikio: NVIDIA's cuFile, where there is a GPU. An extra (`gpu`), imported lazily.

Without a CUDA driver its host reads fail, and with a broken one they can hang (measured on kvikio
26.10): so the driver is probed first, and kvikio then proves itself in a process of its own. Here
it reads into host memory. Reading straight into device memory is off: rows there could not be
verified before they are used (docs/decisions/0019). On an H200 it kept the contract of reads.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterable
from typing import Any, Final

from tiers.coalesce import RUN_BYTES, Run
from tiers.cuda import no_device
from tiers.queues import Completions, FileOf, OwnFiles, ReadQueue, SegmentFile

_TEST_TIMEOUT_S: Final = 60.0
#: kvikio's own default is one thread; the disk of docs/decisions/0005 took eight.
_N_THREADS: Final = 8
_set_up = threading.Lock()
#: Writes a page, reads it back, compares.
_SELF_TEST: Final = """
import os, tempfile
import numpy as np
import kvikio, kvikio.defaults
kvikio.defaults.set({"auto_direct_io_read": True})
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
        return "kvikio is not installed: pip install '.[gpu]' in impress's clone"
    lacking = no_device()
    if lacking:
        return lacking
    try:
        command = (sys.executable, "-P", "-c", _SELF_TEST)  # -P: no imports from the cwd
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_TEST_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"its self-test hung for {_TEST_TIMEOUT_S:g} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return f"its self-test failed: {lines[-1]}"
    return ""


def _library() -> Any:
    """kvikio, told to read past the page cache and with several threads.

    Both are settings of the whole process; a kvikio without them has failed the self-test.
    """
    import kvikio
    from kvikio import defaults

    with _set_up:  # setting the number ends the threads there are: once, before any reads
        n_threads = max(_N_THREADS, defaults.get("num_threads"))
        if not defaults.get("auto_direct_io_read") or defaults.get("num_threads") < n_threads:
            defaults.set({
                "num_threads": n_threads, "task_size": RUN_BYTES, "auto_direct_io_read": True,
            })  # fmt: skip
    return kvikio


class KvikioQueue(ReadQueue):
    """Hands all reads of a batch to cuFile's threads at once."""

    name = "kvikio"

    def __init__(self) -> None:
        library = _library()
        self._files: OwnFiles[Any] = OwnFiles(lambda path: library.CuFile(str(path), "r"))

    def read(self, batches: Iterable[list[Run]], file_of: FileOf, most: int = 0) -> Completions:
        for runs in batches:
            under_way: list[list[Any]] = [[] for _ in runs]
            try:
                sent = [
                    self._start(run, file_of(run.segment), futures)
                    for run, futures in zip(runs, under_way, strict=True)
                ]
                for run, is_sent, futures in zip(runs, sent, under_way, strict=True):
                    yield run, is_sent and _sum(futures) == run.n_bytes
            finally:
                for futures in under_way:
                    _sum(futures)

    def _start(self, run: Run, segment: SegmentFile, futures: list[Any]) -> bool:
        """Send a run; `futures` gets what is under way, even if that is only part of the run."""
        off = run.off
        try:
            file = self._files.of(segment)
            for view in run.views:
                futures.append(file.pread(view, len(view), off))
                off += len(view)
        except Exception:  # whatever the library raises: the run is read again with preadv
            return False
        return True

    def close(self) -> None:
        self._files.close()


def _sum(futures: list[Any]) -> int:
    """Wait for all; the bytes they read, or -1 if one failed. Past a file's end cuFile raises."""
    total = 0
    for future in futures:
        try:
            total += int(future.get())
        except Exception:  # as above
            total = -(1 << 62)
    return max(total, -1)
