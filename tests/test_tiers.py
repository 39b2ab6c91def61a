"""The contract every tier keeps, and the plans of reads."""

from __future__ import annotations

import os
import resource
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import said_by_a_child
from hypothesis import given
from hypothesis import strategies as st
from tier_contract import MIB, CacheContract, fetch, noise

from tiers import segments
from tiers.base import PAGE, Extent, Pieces, Read, Slot, Tier, sums_of
from tiers.coalesce import RUN_BYTES, coalesce, locate, slices
from tiers.dram import DramTier
from tiers.errors import ReadFailed
from tiers.slots import aligned
from tiers.ssd import SsdTier


class TestDram(CacheContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return DramTier(4 * MIB)

    def test_no_budget_no_slots(self) -> None:
        tier = DramTier(0)
        assert tier.reserve(1) is None
        tier.check()


class TestHbmEmulation(CacheContract):
    """Host memory that stands in for a device's: the same contract, under its own name."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return DramTier(4 * MIB, "hbm")

    def test_failures_name_the_tier(self, tier: Tier) -> None:
        slot = tier.reserve(PAGE)
        sums = np.zeros(1, dtype=np.uint64)
        with pytest.raises(ReadFailed, match="hbm"):
            fetch(tier, slot, 0, aligned(PAGE), sums, PAGE)


def test_neighbours_merge_and_runs_stay_bounded() -> None:
    slot = Slot((DramTier(4 * MIB).reserve(4 * MIB).parts[0],))
    dest = aligned(4 * MIB)
    reads = [Read(slot, at, dest[at : at + PAGE], None, PAGE) for at in (8192, 0, 4096, 16384)]
    runs = coalesce(reads)
    assert [(run.off, run.n_bytes, len(run.views)) for run in runs] == [
        (0, 12288, 3),
        (16384, 4096, 1),
    ]
    whole = coalesce([Read(slot, 0, dest, None, PAGE)])
    assert [run.n_bytes for run in whole] == [RUN_BYTES] * 4


def test_a_long_read_is_cut_where_its_slot_is_and_reads_merge_in_each_segment() -> None:
    half, off = RUN_BYTES // 2, 8 * PAGE
    slot = Slot((Extent(0, 0, 3 * half), Extent(1, off, 3 * half)))
    dest = aligned(6 * half)
    read = Read(slot, 0, dest, None, PAGE)
    runs = coalesce([read])
    assert [(run.segment, run.off, run.n_bytes) for run in runs] == [
        (0, 0, RUN_BYTES), (0, RUN_BYTES, half),
        (1, off, RUN_BYTES), (1, off + RUN_BYTES, half),
    ]  # fmt: skip
    views = [view for run in runs for view in run.views]
    assert sum(len(view) for view in views) == len(dest)
    at = 0
    for view in views:
        assert view.ctypes.data == dest[at:].ctypes.data
        at += len(view)
    assert [run.ends for run in runs] == [[], [], [], [read]]
    begins = (0, 3 * half, PAGE, 3 * half + PAGE)  # of both segments in turn
    some = [Read(slot, at, dest[at : at + PAGE], None, PAGE) for at in begins]
    runs = coalesce(some)
    assert [(run.segment, run.off, len(run.ends)) for run in runs] == [(0, 0, 2), (1, off, 2)]


def test_pieces_are_cut_by_bytes_and_stay_in_order() -> None:
    starts, to = np.arange(7) * PAGE, np.arange(7) + 2
    one = Pieces(starts, aligned(9 * PAGE), to, np.arange(7, dtype=np.uint64), PAGE)
    cut = one.cut(3 * PAGE + 1)
    assert [some.n_bytes // PAGE for some in cut] == [3, 3, 1]
    assert np.array_equal(np.concatenate([some.to for some in cut]), to)
    assert np.array_equal(np.concatenate([some.sums for some in cut]), one.sums)
    assert all(some.straight() is not None for some in cut)


def test_slices_cut_at_piece_borders_and_keep_every_byte() -> None:
    tier = DramTier(4 * MIB)
    slot, data = tier.reserve(MIB), noise(MIB)
    tier.write(slot, 0, data)
    out, piece = aligned(MIB), 12288
    n_bytes = MIB // piece * piece
    read = Read(slot, 0, out[:n_bytes], sums_of(data[:n_bytes], piece), piece)
    parts = slices([read], 100_000)
    assert all(len(r.dest) % piece == 0 for part in parts for r in part)
    for part in parts:
        for some in part:  # each is verified against its own share of the sums
            fetch(tier, slot, some.off, some.dest, some.sums, piece)
    assert np.array_equal(out[:n_bytes], data[:n_bytes])
    assert slices([], 4096) == []


@given(st.lists(st.integers(1, 5), min_size=1, max_size=40), st.integers(1, 9))
def test_slices_of_many_small_reads_are_full_and_no_fuller(sizes: list[int], room: int) -> None:
    """Chosen rows come like this: all in one slice would be read by one thread."""
    ends = np.cumsum(sizes)
    sums, dest = np.arange(ends[-1], dtype=np.uint64), aligned(int(ends[-1]) * PAGE)
    reads = [
        Read(Slot(()), at * PAGE, dest[at * PAGE : end * PAGE], sums[at:end], PAGE)
        for at, end in pairwise([0, *ends.tolist()])
    ]
    cut = slices(reads, room * PAGE)
    filled = [sum(len(read.dest) // PAGE for read in some) for some in cut]
    assert all(n == room for n in filled[:-1]) and 0 < filled[-1] <= room
    at = 0
    for read in (read for some in cut for read in some):
        n = len(read.dest) // PAGE
        assert read.off == at * PAGE and read.sums.tolist() == list(range(at, at + n))
        assert read.dest.ctypes.data == dest[at * PAGE :].ctypes.data
        at += n
    assert at == ends[-1]


def test_a_range_outside_its_slot_is_a_bug() -> None:
    slot = DramTier(MIB).reserve(PAGE)
    with pytest.raises(AssertionError):
        locate(slot, 0, 2 * PAGE)


def test_a_late_read_of_a_deleted_segment_reads_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of its descriptor was free at once: a read that had waited for a disk, and that
    nobody waited for any more, would have read from whatever was opened next, a socket say."""
    monkeypatch.setattr(segments, "_LATE_S", 3600.0)
    files = segments.SegmentFiles(tmp_path, 0, read_only=False)
    for number in range(3):
        files.make(number, PAGE)
    late, other = files.fd(0), files.fd(1)
    files.delete(0)
    files.drop_deleted(0.0)  # others' files, that is
    with open(os.devnull, "rb", buffering=0) as opened_next:
        assert opened_next.fileno() != late
    assert os.path.samestat(os.fstat(late), Path(os.devnull).stat())
    assert os.pread(late, PAGE, 0) == b""
    monkeypatch.setattr(segments, "_LATE_S", -1.0)
    files.delete(1)  # numbers do not pile up
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(other)
    files.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(late)


def test_a_fork_of_a_fork_keeps_what_has_a_segments_descriptor_by_then(tmp_path: Path) -> None:
    """A daemon closed what it had inherited, opened a pipe, and forked: in its child the pipe was
    the null device, as it had the number of a segment."""
    files = segments.SegmentFiles(tmp_path, 0, read_only=False)
    for number in range(2):
        files.make(number, PAGE)
    numbers = [files.fd(0), files.fd(1)]
    files.delete(1)

    def inodes() -> list[int]:
        return [os.fstat(fd).st_ino for fd in numbers]

    def daemon() -> None:
        assert inodes() == [Path(os.devnull).stat().st_ino] * 2
        for fd in numbers:
            os.close(fd)
        pipe, _ = os.pipe()
        for fd in numbers:
            os.dup2(pipe, fd)
        mine = [os.fstat(pipe).st_ino] * 2
        assert mine == inodes()

        def child() -> None:
            assert mine == inodes()

        assert said_by_a_child(child) == "returned"

    assert said_by_a_child(daemon) == "returned"
    files.close()


def test_more_segments_than_a_process_may_open_are_read(tmp_path: Path) -> None:
    """Each stays open: at 1,024 files of 256 MiB, reads failed for want of file descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_open = len(list(Path("/proc/self/fd").iterdir()))
    few = 2 * n_open + 40
    if before[1] != resource.RLIM_INFINITY and before[1] < 2 * few:
        pytest.skip("this machine allows no more files: ulimit -Hn")
    ssd = SsdTier(tmp_path, 16 * PAGE, None)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
        slots = [ssd.reserve(16 * PAGE) for _ in range(few + 10)]
        for slot in slots:
            ssd.write(slot, 0, noise(PAGE))
        assert len({part.segment for slot in slots for part in slot.parts}) == few + 10
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > few
    finally:
        ssd.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
