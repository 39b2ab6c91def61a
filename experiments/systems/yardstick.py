"""How fast the disk reads just now: emulated compute is stretched by it.

A shared disk gave 1.2 and 3.4 GB/s within half an hour, and the rate assumed decides whether
reading or computing wins. So the disk is measured again before every round of requests, with reads
as large as those of a system that reads everything, on the very files that the systems read.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from experiments.common import Unable, console
from tiers.slots import aligned

#: Bytes of one whole reading, and of one request in it; as many threads as a store has.
N_BYTES: Final = 128 << 20
_REQUEST: Final = 1 << 20
_THREADS: Final = 8
#: Readings whose median is the rate: one may have met another's reads.
_READINGS: Final = 9
#: Readings for which a disk that gives less than half of what it has given is taken for one that
#: stands still for somebody else: some ten minutes, where it stands nearly still. After them it is
#: taken for a slower disk.
_PATIENCE: Final = 500


def _written(file: Path) -> int:
    """Bytes before the first that were reserved and never written: no disk is asked for such bytes,
    and a store's last segment, a quarter of it such, read a third faster than the others."""
    if not file.stat().st_size:
        return 0
    fd = os.open(file, os.O_RDONLY)
    try:
        return os.lseek(fd, 0, os.SEEK_HOLE)
    finally:
        os.close(fd)


class Yardstick:
    """Sequential reads of files, one file after the other. For one thread; close it."""

    def __init__(self, files: Sequence[Path]) -> None:
        """`files`: read as far as they are written. Those in which that is a whole reading, or
        where there is none, those in which it is a quarter of one. Raises Unable without any."""
        written = {file: min(_written(file), N_BYTES) for file in sorted(files)}
        whole = {file: n for file, n in written.items() if n == N_BYTES}
        part = {file: n - n % _REQUEST for file, n in written.items() if n >= N_BYTES // 4}
        self._files = list((whole or part).items())
        if not self._files:
            raise Unable(
                f"no file of the data has {N_BYTES // 4 >> 20} MiB to measure the disk's rate "
                "with: take more prefixes or layers, or say --disk-gb-s X"
            )
        self._memory = aligned(N_BYTES)
        self._memory.fill(0)  # the first to touch a page waits for it
        self._pool = ThreadPoolExecutor(_THREADS)
        self._last: deque[float] = deque(maxlen=_READINGS)
        self._n = 0
        self._rates = list[float]()
        for _ in range(_READINGS):
            self._reading()

    def gb_s(self) -> float:
        """The rate now: the median of this reading and the last few.

        Where that is less than half of the usual, more is read first. The rate lags: a round of
        requests was once divided by what the disk gave while it stood still, some seconds earlier,
        and everything copied out of memory meanwhile appeared ten times as fast as it was.
        """
        usual = statistics.median(self._rates) if self._rates else 0.0
        for _ in range(_PATIENCE):
            self._reading()
            if (rate := statistics.median(self._last)) >= usual / 2:
                break
        else:  # else each round would read as often, until half of all were of the slower disk
            console.print(
                f"the disk gives {rate:.2f} GB/s and no longer the {usual:.2f} that it gave: after "
                f"{_PATIENCE} readings it is not waited for any more"
            )
            self._rates.clear()
        self._rates.append(rate)
        return rate

    def _reading(self) -> None:
        file, n_bytes = self._files[self._n % len(self._files)]
        self._n += 1
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
        try:
            begin = time.perf_counter()
            done = self._pool.map(lambda at: self._read(fd, at), range(0, n_bytes, _REQUEST))
            assert sum(done) == n_bytes, f"{file}: short reads"
            self._last.append(n_bytes / (time.perf_counter() - begin) / 1e9)
        finally:
            os.close(fd)

    def _read(self, fd: int, at: int) -> int:
        return os.preadv(fd, [self._memory[at : at + _REQUEST]], at)

    def close(self) -> None:
        self._pool.shutdown()
