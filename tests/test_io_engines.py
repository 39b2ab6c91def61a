"""Every way of reading segment files: one contract, and tests of the kernel queues alone."""

from __future__ import annotations

import os
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType, SimpleNamespace

import numpy as np
import pytest
from tier_contract import MIB, SsdContract, noise

from tiers import cufile
from tiers.base import PAGE, Read, sums_of
from tiers.coalesce import Run
from tiers.engines import ENGINES, engine_named, new_queue, why_not
from tiers.errors import MediumError, ReadFailed
from tiers.queues import (
    BATCH,
    DEPTH,
    MOST_UNDER_WAY,
    KernelQueue,
    ReadQueue,
    SegmentFile,
    close_all,
)
from tiers.slots import aligned
from tiers.ssd import SsdTier
from tiers.uring import UringQueue


class EngineContract(SsdContract):
    """Every way of reading files keeps the whole contract, and reads the same bytes."""

    engine = ""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[SsdTier]:
        tier = SsdTier(tmp_path / "segments", MIB, 4 * MIB, engine=self.engine)
        yield tier
        tier.close()

    def test_scattered_pieces_come_back_verified(self, tier: SsdTier) -> None:
        slot, data = tier.reserve(4 * MIB), noise(4 * MIB)
        tier.write(slot, 0, data)
        out, sums = aligned(4 * MIB), sums_of(data, PAGE)
        places = [at for at in range(0, 4 * MIB, PAGE) if at // PAGE % 3]
        for at in places:
            out[at : at + PAGE] = 0
        tier.read(
            [
                Read(slot, at, out[at : at + PAGE], sums[at // PAGE : at // PAGE + 1], PAGE)
                for at in places
            ]
        )
        assert all(np.array_equal(out[at : at + PAGE], data[at : at + PAGE]) for at in places)

    def test_a_read_past_the_end_is_short_whichever_way_it_goes(self, tier: SsdTier) -> None:
        slot, data = tier.reserve(MIB), noise(MIB)
        tier.write(slot, 0, data)
        os.truncate(tier.folder / "00000000.seg", MIB - 2 * PAGE)
        out = aligned(MIB)
        reads = [Read(slot, at, out[at : at + PAGE], None, PAGE) for at in (0, MIB - PAGE)]
        with pytest.raises(ReadFailed) as failed:
            tier.read(reads)
        assert failed.value.reason == "short"

    def test_a_segment_made_anew_is_not_read_from_the_one_before(self, tier: SsdTier) -> None:
        """Its name is the same: an engine that opens files itself must not go on with the old."""
        for seed in (1, 2):
            slot, data = tier.reserve(2 * PAGE), noise(2 * PAGE, seed)
            tier.write(slot, 0, data)
            out, sums = aligned(2 * PAGE)[: 2 * PAGE], sums_of(data, PAGE)
            tier.read([Read(slot, at, out[at:][:PAGE], sums[at // PAGE :][:1], PAGE)
                       for at in (PAGE, 0)])  # fmt: skip
            assert np.array_equal(out, data)
            tier.free(slot)
            assert tier.trim() == MIB
        open_files = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
        held = [path.stat() for path in open_files]
        gone = {file.st_ino for file in held if file.st_size == MIB and not file.st_nlink}
        assert len(gone) <= 1  # the first was let go of when the second was opened


class TestPreadv(EngineContract):
    engine = "preadv"


@pytest.mark.skipif(bool(why_not("aio")), reason=f"aio: {why_not('aio')}")
class TestAio(EngineContract):
    engine = "aio"


@pytest.mark.skipif(bool(why_not("io_uring")), reason=f"io_uring: {why_not('io_uring')}")
class TestUring(EngineContract):
    engine = "io_uring"


class TestAiofiles(EngineContract):
    engine = "aiofiles"


@pytest.mark.gpu
@pytest.mark.skipif(bool(why_not("kvikio")), reason=f"kvikio: {why_not('kvikio')}")
class TestKvikio(EngineContract):
    engine = "kvikio"


def completed(queue: ReadQueue, batches: Iterable[list[Run]], file: SegmentFile) -> list[bool]:
    """Read all batches; whether each run came. Every run is given back, in order."""
    kept = [*batches]
    found = [*queue.read(kept, lambda _: file)]
    assert [id(run) for run, _ in found] == [id(run) for runs in kept for run in runs]
    return [is_there for _, is_there in found]


@pytest.mark.parametrize("engine", ["aio", "io_uring"])
def test_a_ring_goes_round_many_times(engine: str, tmp_path: Path) -> None:
    """Heads and tails wrap: a thousand reads of one to six batches on one queue, all answers
    right."""
    if why_not(engine):
        pytest.skip(f"{engine}: {why_not(engine)}")
    data = noise(64 * PAGE)
    path = tmp_path / "file"
    path.write_bytes(data.tobytes())
    queue = new_queue(engine)
    fd = os.open(path, os.O_RDONLY)
    try:
        for turn in range(1000):
            n = turn % 400 + 1
            out = aligned(n * PAGE)
            runs = [
                Run(0, (i * 7 + turn) % 64 * PAGE, [out[i * PAGE : (i + 1) * PAGE]], PAGE, [])
                for i in range(n)
            ]
            size = turn % BATCH + 1
            batches = (runs[at : at + size] for at in range(0, n, size))
            assert completed(queue, batches, SegmentFile(fd, path)) == [True] * n
            for run in runs:
                assert np.array_equal(run.views[0], data[run.off : run.off + PAGE])
    finally:
        os.close(fd)
        queue.close()


@pytest.mark.parametrize("engine", ["aio", "io_uring"])
def test_a_queue_left_early_has_nothing_under_way(engine: str, tmp_path: Path) -> None:
    """The caller's memory is its own again once the generator is closed."""
    if why_not(engine):
        pytest.skip(f"{engine}: {why_not(engine)}")
    data = noise(64 * PAGE)
    path = tmp_path / "file"
    path.write_bytes(data.tobytes())
    queue, fd, out = new_queue(engine), os.open(path, os.O_RDONLY), aligned(64 * PAGE)
    runs = [Run(0, i * PAGE, [out[i * PAGE : (i + 1) * PAGE]], PAGE, []) for i in range(64)]
    reading = queue.read([runs[:40], runs[40:]], lambda _: SegmentFile(fd, path))
    assert next(reading) == (runs[0], True)
    reading.close()
    assert np.array_equal(out, data)  # all had been sent: all were waited for
    assert completed(queue, [runs[:5]], SegmentFile(fd, path)) == [True] * 5
    os.close(fd)
    queue.close()


@pytest.mark.parametrize("engine", ["aio", "io_uring"])
def test_a_queue_without_memory_for_what_has_ended_does_not_wait_for_it_again(
    engine: str, tmp_path: Path
) -> None:
    """The kernel had reported it, and does so once: with aio the I/O thread waited for ever."""
    if why_not(engine):
        pytest.skip(f"{engine}: {why_not(engine)}")
    path, out, failed = tmp_path / "file", aligned(64 * PAGE), list[object]()
    path.write_bytes(noise(64 * PAGE).tobytes())
    queue, fd = new_queue(engine), os.open(path, os.O_RDONLY)
    runs = [Run(0, i * PAGE, [out[i * PAGE : (i + 1) * PAGE]], PAGE, []) for i in range(64)]

    def no_memory(_frame: FrameType, event: str, of: object) -> None:
        if event == "c_call" and getattr(of, "__name__", "") == "tolist":
            sys.setprofile(None)
            raise MemoryError

    def read() -> None:
        sys.setprofile(no_memory)
        try:
            completed(queue, [runs[:40], runs[40:]], SegmentFile(fd, path))
        except MemoryError as err:
            failed.append(err)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(60)
    assert failed and not thread.is_alive()
    assert completed(queue, [runs[:5]], SegmentFile(fd, path)) == [True] * 5
    os.close(fd)
    queue.close()


@pytest.mark.skipif(bool(why_not("io_uring")), reason=f"io_uring: {why_not('io_uring')}")
@pytest.mark.parametrize("n_taken", [0, 3])
def test_what_a_ring_was_not_sent_for_want_of_memory_does_not_go_with_the_next_batch(
    n_taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unsent requests stayed in the ring, and the next batch's first ones went in their place:
    the I/O thread waited for ever for that batch's last ones. What was sent is waited for."""
    data, out, there = noise(64 * PAGE), aligned(64 * PAGE), list[list[bool]]()
    path = tmp_path / "file"
    path.write_bytes(data.tobytes())
    queue, fd = new_queue("io_uring"), os.open(path, os.O_RDONLY)
    runs = [Run(0, i * PAGE, [out[i * PAGE : (i + 1) * PAGE]], PAGE, []) for i in range(64)]
    enter, taken = UringQueue._enter, list[int]()

    def no_memory(ring: UringQueue, n_submit: int, n_wait: int) -> int:
        if not n_submit:
            return enter(ring, n_submit, n_wait)
        if sum(taken) == n_taken:
            raise MemoryError
        taken.append(enter(ring, n_taken, 0))
        return taken[-1]

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(UringQueue, "_enter", no_memory)
        completed(queue, [runs[:10]], SegmentFile(fd, path))
    assert taken == [n_taken] * bool(n_taken) and not queue._under_way
    assert np.array_equal(out[: n_taken * PAGE], data[: n_taken * PAGE])

    def read() -> None:
        there.append(completed(queue, [runs[:40], runs[40:]], SegmentFile(fd, path)))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(60)
    assert there == [[True] * 64] and np.array_equal(out, data)
    os.close(fd)
    queue.close()


class _Kernel(KernelQueue):
    """Takes at most `takes` requests at a time, and ends them all when it is waited for."""

    name = "kernel"

    def __init__(self, takes: int) -> None:
        super().__init__()
        self.takes, self.written, self.under_way = takes, [], {}
        self.sizes: dict[int, int] = {}
        self.n_sent = self.most_runs = self.most_bytes = 0

    def _write(self, rows: list[tuple[int, int, int, int, int]]) -> None:
        self.written = rows
        self.sizes |= {i: int(self._vectors[(at - self._vectors_at) // 16 :][:n, 1].sum())
                       for i, _, at, n, _ in rows}  # fmt: skip

    def _submit(self, n: int) -> int:
        taken = self.written[: min(n, self.takes)]
        self.under_way |= {i: self.sizes[i] for i, *_ in taken}
        self.n_sent += len(taken)
        self._under_way += len(taken)
        self.most_runs = max(self.most_runs, len(self.under_way))
        self.most_bytes = max(self.most_bytes, sum(self.under_way.values()))
        return len(taken)

    def _wait(self, least: int, most: int) -> list[tuple[int, int]]:
        assert 0 < least <= len(self.under_way) == most, "waits for what is not under way"
        ended, self.under_way, self._under_way = [*self.under_way.items()], {}, 0
        return ended

    def close(self) -> None: ...


@pytest.mark.parametrize("pages", [1, 64])
def test_a_queue_is_sent_more_before_it_gives_back_what_came(pages: int, tmp_path: Path) -> None:
    """Pieces verified while nothing is under way are waited for twice. Within bounds, as a medium
    shares what it gives among all it was sent."""
    queue, out = _Kernel(takes=DEPTH), aligned(pages * PAGE)
    runs = [Run(0, 0, [out], len(out), []) for _ in range(700)]
    size = min(BATCH, 256 // pages)
    batches = [runs[at : at + size] for at in range(0, len(runs), size)]
    reading = queue.read(batches, lambda _: SegmentFile(0, tmp_path))
    for n_given, run in enumerate(runs):
        assert next(reading) == (run, True)
        assert queue.n_sent == len(runs) or queue.n_sent >= n_given + 1 + size
    assert next(reading, None) is None
    assert size < queue.most_runs <= DEPTH and queue.most_bytes <= MOST_UNDER_WAY


@pytest.mark.parametrize(
    ("mib", "most"),
    [(0.5, 1), (3.5, 1.75), (40, 3)],
    ids=["little", "a layer of small rows", "much"],
)
def test_half_of_few_reads_is_under_way_while_the_other_is_verified(
    mib: float, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three MiB of 3.3 went at once. A medium that hands back together all that it was sent left
    almost all of it to be verified with next to nothing under way."""
    queue, rest = _Kernel(takes=DEPTH), aligned(int(mib * MIB))
    monkeypatch.setattr("tiers.ssd.new_queue", lambda _name: queue)
    tier = SsdTier(tmp_path / "segments", 64 * MIB, None, engine="aio")
    monkeypatch.setattr(SsdTier, "direct", True)  # as on most file systems
    slot = tier.reserve(len(rest))
    tier.read([Read(slot, at, rest[at : at + 4 * PAGE], None, PAGE)
               for at in range(0, len(rest), 4 * PAGE)])  # fmt: skip
    assert queue.n_sent == len(rest) // MIB + len(rest) % MIB // (MIB // 2)  # runs of 1 MiB, or .5
    assert most * MIB - MIB < queue.most_bytes <= most * MIB
    tier.close()


def test_what_the_kernel_does_not_take_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    queue, out = _Kernel(takes=3), aligned(PAGE)
    runs = [Run(0, 0, [out], PAGE, []) for _ in range(10)]
    there = completed(queue, [runs[:5], runs[5:7], runs[7:]], SegmentFile(0, tmp_path))
    assert there == [True] * 3 + [False] * 2 + [True] * 5


@pytest.mark.parametrize("with_threads", [True, False])
def test_a_queue_that_does_not_close_holds_up_nothing_else(
    with_threads: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end of Python 3.12.0 to 3.12.2, where no threads start, an error from one queue came
    out of the store's close too: other queues were not closed, nor was the shard unlocked."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def failing() -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    closed: list[str] = []
    queues = [
        SimpleNamespace(name="aiofiles", close=failing),
        SimpleNamespace(name="aio", close=lambda: closed.append("aio")),
    ]
    if not with_threads:
        monkeypatch.setattr(threading.Thread, "start", refused)
    close_all(queues)
    assert closed == ["aio"]
    assert "aiofiles does not close: cannot schedule" in caplog.text


class _Kvikio(types.ModuleType):
    """The library's interface, as of 26.10, over plain files: no GPU is here to run the real one.

    Its third read is refused, its fifth fails under way.
    """

    def __init__(self) -> None:
        super().__init__("kvikio")
        self.values = {"num_threads": 1, "task_size": 4 * MIB, "auto_direct_io_read": False}
        self.defaults = types.ModuleType("kvikio.defaults")
        self.defaults.get = self.values.__getitem__
        self.defaults.set = self.values.update
        self.under_way, self.n_asked = 0, 0

    def CuFile(self, path: str, _flags: str) -> SimpleNamespace:
        file = Path(path).open("rb")  # noqa: SIM115  # the queue closes it

        def pread(view: np.ndarray, size: int, off: int) -> SimpleNamespace:
            self.n_asked += 1
            if self.n_asked == 3:
                raise RuntimeError("no")
            number, self.under_way = self.n_asked, self.under_way + 1
            left = [None]

            def get() -> int:
                if left:
                    left.pop()
                    self.under_way -= 1
                if number == 5:
                    raise RuntimeError("KvikIO failure")
                return os.preadv(file.fileno(), [view[:size]], off)

            return SimpleNamespace(get=get)

        return SimpleNamespace(pread=pread, close=file.close, fileno=file.fileno)


def test_what_kvikio_refuses_or_fails_is_told_and_the_rest_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = _Kvikio()
    monkeypatch.setitem(sys.modules, "kvikio", fake)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", fake.defaults)
    path, data, out = tmp_path / "file", noise(8 * PAGE), aligned(8 * PAGE)
    path.write_bytes(data.tobytes())
    runs = [Run(0, i * PAGE, [out[i * PAGE : (i + 1) * PAGE]], PAGE, []) for i in range(8)]
    queue, fd = new_queue("kvikio"), os.open(path, os.O_RDONLY)
    try:
        there = completed(queue, [runs[:5], runs[5:]], SegmentFile(fd, path))
        assert there == [True, True, False, True, False, True, True, True]
        assert not fake.under_way
        reading = queue.read([runs], lambda _: SegmentFile(fd, path))
        assert next(reading)[1]
        reading.close()  # left early: the memory is the caller's again
        assert not fake.under_way
    finally:
        os.close(fd)
        queue.close()
    whole = [i for i in range(8) if i not in (2, 4)]
    assert all(np.array_equal(runs[i].views[0], data[i * PAGE : (i + 1) * PAGE]) for i in whole)
    assert fake.values == {"num_threads": 8, "task_size": MIB, "auto_direct_io_read": True}


def test_kvikios_proof_of_itself_runs_no_file_of_where_it_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python looks in the current directory first, before what is installed."""
    (tmp_path / "kvikio.py").write_text("open('was-run', 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)  # in this process it counts as installed
    monkeypatch.setattr(cufile, "no_device", lambda: "")
    monkeypatch.chdir(tmp_path)
    cufile.why_not()
    assert not (tmp_path / "was-run").exists()


def test_an_engine_that_does_not_go_here_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiers.engines.why_not", lambda name: "no such luck")
    with pytest.raises(MediumError, match="io_uring cannot be used here: no such luck"):
        SsdTier(tmp_path, MIB, None, engine="io_uring")
    with pytest.raises(MediumError, match="'io_ring' is none of auto, "):
        SsdTier(tmp_path, MIB, None, engine="io_ring")


def test_auto_takes_an_engine_that_goes() -> None:
    assert engine_named("auto") in ENGINES and not why_not(engine_named("auto"))


@pytest.mark.parametrize("off", [0, 8], ids=["aligned", "through a bounce buffer"])
def test_a_read_that_the_kernel_brings_in_parts_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: int
) -> None:
    """The kernel may give less than was asked; the rest may begin in the middle of a view."""
    tier = SsdTier(tmp_path / "segments", MIB, None, engine="preadv")
    slot, data = tier.reserve(8 * PAGE), noise(8 * PAGE)
    tier.write(slot, 0, data)
    real, asked = os.preadv, []

    def least(fd: int, views: Sequence[np.ndarray], at: int) -> int:
        asked.append(at)
        return real(fd, [views[0][:PAGE]], at)

    monkeypatch.setattr(os, "preadv", least)
    memory, sizes = aligned(9 * PAGE)[off:], (2, 3, 1, 2)
    cuts = np.cumsum((0, *sizes)) * PAGE
    sums = sums_of(data, PAGE)
    views = [memory[a:b] for a, b in pairwise(cuts)]
    tier.read([
        Read(slot, int(at), view, sums[at // PAGE :][: len(view) // PAGE], PAGE)
        for at, view in zip(cuts, views, strict=False)
    ])  # fmt: skip
    assert np.array_equal(memory[: 8 * PAGE], data)
    assert len(asked) >= 8
    tier.close()


def test_a_request_the_kernel_refuses_is_read_again_with_preadv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue that refuses every other run: what it did not bring is read the plain way."""
    if why_not("aio"):
        pytest.skip(f"aio: {why_not('aio')}")
    tier = SsdTier(tmp_path / "segments", 4 * MIB, None, engine="aio")
    slot, data = tier.reserve(4 * MIB), noise(4 * MIB)
    tier.write(slot, 0, data)
    real = KernelQueue.read

    def refusing(self: KernelQueue, *args: object) -> Iterator[tuple[Run, bool]]:
        for i, (run, is_there) in enumerate(real(self, *args)):
            if i % 2:
                run.views[0][:] = 0  # nothing of it counts
            yield run, is_there and not i % 2

    monkeypatch.setattr(KernelQueue, "read", refusing)
    out = aligned(4 * MIB)
    pieces = range(0, 4 * MIB, 2 * PAGE)  # every other page: runs of one page each
    sums = sums_of(data, PAGE)
    reads = [
        Read(slot, at, out[at : at + PAGE], sums[at // PAGE : at // PAGE + 1], PAGE)
        for at in pieces
    ]
    tier.read(reads)
    assert all(np.array_equal(out[at : at + PAGE], data[at : at + PAGE]) for at in pieces)
    tier.close()
