"""What this machine can do for a store: which engines work here, how fast the disk is with each.

No torch, no store needed. Data goes to a new directory on the store's disk and is removed again.
"""

from __future__ import annotations

import os
import platform
import resource
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np

from impress.errors import StoreFailed
from tiers.base import PAGE, Bytes, Read, Slot, sums_of
from tiers.coalesce import slices
from tiers.engines import ENGINES, engine_named, why_not
from tiers.errors import MediumError
from tiers.files import make_full
from tiers.iopool import IoPool, Lane
from tiers.slots import aligned
from tiers.ssd import SsdTier

#: Read by every engine, every byte at most once a turn; enough for half a second of a good SSD.
TEST_BYTES: Final = 256 << 20
EXTENT_BYTES: Final = 64 << 10
_PIECE_BYTES: Final = 16 << 10
_SLICE_BYTES: Final = 2 << 20
_THREADS: Final = 8
_TURN_S: Final = 2.0  # each of two kinds of reads
_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One engine. Rates are of verified reads past the page cache where `direct`.

    GB/s, and CPU seconds (of the whole process) per GB. None: not measured.
    """

    name: str
    why_not: str  # "" when it goes here
    direct: bool | None = None
    random_gbps: float | None = None
    sequential_gbps: float | None = None
    cpu_s_per_gb: float | None = None


def machine(folder: Path) -> dict[str, str | int]:
    """Facts a report on speed needs."""
    stat = os.statvfs(folder)
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "disk_free_bytes": stat.f_bavail * stat.f_frsize,
        "auto_engine": engine_named("auto"),
    }


def examine(folder: Path, *, measure: bool) -> Generator[Finding, None, None]:
    """One finding per engine, each as it is made. Raises StoreFailed where the folder does not take
    the test data, MediumError where there are no threads."""
    usable = [name for name in ENGINES if not why_not(name)]
    for name in ENGINES:
        if name not in usable:
            yield Finding(name, why_not(name))
    if not measure:
        yield from (Finding(name, "") for name in usable)
        return
    try:
        with _test_data(folder) as (where, slot, data):
            for name in usable:
                yield _measured(name, where, slot, data)
    except (OSError, MediumError) as err:
        cause = err if isinstance(err, OSError) else err.__cause__
        if not isinstance(cause, OSError):
            raise
        # Without the name of a folder that is gone by the time this is read.
        raise StoreFailed(
            f"test data cannot be written and read in {folder}: {cause.strerror}; "
            "name another --store, or --no-measure"
        ) from None


@contextmanager
def _test_data(folder: Path) -> Iterator[tuple[Path, Slot, Bytes]]:
    """A segment of incompressible bytes that were written, in a directory that goes away."""
    where = Path(tempfile.mkdtemp(prefix=".impress-doctor-", dir=folder))
    segment = where / "00000000.seg"
    try:
        make_full(segment, TEST_BYTES)
        data = aligned(TEST_BYTES)
        data.view(np.uint64)[:] = np.random.default_rng(1).integers(
            0, 1 << 64, TEST_BYTES // 8, dtype=np.uint64
        )
        tier = SsdTier(where, TEST_BYTES, None)
        slot = tier.reserve(TEST_BYTES)
        assert slot is not None
        try:
            tier.write(slot, 0, data)
            tier.sync([slot])
        finally:
            tier.close()
        yield where, slot, data
    finally:  # by name: listing a folder opens a file, and there may be none left
        with suppress(OSError):
            segment.unlink(missing_ok=True)
            where.rmdir()


def _measured(name: str, where: Path, slot: Slot, data: Bytes) -> Finding:
    tier = SsdTier(where, TEST_BYTES, None, read_only=True, engine=name)
    pool = IoPool(_THREADS, "impress-doctor")
    turns = []
    try:
        for extent in (EXTENT_BYTES, TEST_BYTES):
            _make_cold(where)
            turns.append(_read(tier, pool, slot, data, extent))
    finally:
        if pool.close(1.0):  # a read that hangs would hold whoever closes its queue
            tier.close()
    rates = [turn.n_bytes / turn.seconds / 1e9 for turn in turns]
    cpu_s_per_gb = sum(turn.cpu_s for turn in turns) / sum(turn.n_bytes for turn in turns) * 1e9
    direct = tier.direct and name != "aiofiles"
    return Finding(name, "", direct, rates[0], rates[1], cpu_s_per_gb)


class _Turn(NamedTuple):
    seconds: float
    cpu_s: float
    n_bytes: int


def _read(tier: SsdTier, pool: IoPool, slot: Slot, data: Bytes, extent: int) -> _Turn:
    """The extents in random order, each once, until the turn is over."""
    order = np.arange(TEST_BYTES // extent)
    np.random.default_rng(2).shuffle(order)
    dest = aligned(TEST_BYTES)
    dest[::PAGE] = 0  # pages are there before the clock runs
    sums = sums_of(data, _PIECE_BYTES)
    n_pieces = extent // _PIECE_BYTES
    reads = [
        Read(slot, i * extent, dest[i * extent : (i + 1) * extent],
             sums[i * n_pieces : (i + 1) * n_pieces], _PIECE_BYTES)
        for i in order.tolist()
    ]  # fmt: skip
    parts = slices(reads, _SLICE_BYTES)
    done, started, cpu_s = 0, perf_counter(), _cpu_s()
    for at in range(0, len(parts), pool.n_threads):
        some = parts[at : at + pool.n_threads]
        ticket = pool.submit(Lane.DEMAND, [partial(tier.read, part) for part in some])
        if not ticket.wait(_TIMEOUT_S):
            raise OSError(5, f"reads did not end within {_TIMEOUT_S:g} s", str(tier.folder))
        done += sum(len(read.dest) for part in some for read in part)
        if perf_counter() - started > _TURN_S:
            break
    return _Turn(perf_counter() - started, _cpu_s() - cpu_s, done)


def _make_cold(where: Path) -> None:
    for path in where.glob("*.seg"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
