"""The contract every tier keeps, and what is the SSD's own."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tiers.aio import AioContext
from tiers.base import PAGE, Read, Slot, Tier, sums_of
from tiers.coalesce import RUN_BYTES, coalesce, locate, slices
from tiers.dram import DramTier
from tiers.errors import MediumError, ReadFailed
from tiers.slots import aligned
from tiers.ssd import SsdTier

MIB = 1 << 20


def noise(n_bytes: int, seed: int = 0) -> np.ndarray:
    data = aligned(n_bytes)[:n_bytes]
    data[:] = np.random.default_rng(seed).integers(0, 256, n_bytes, dtype=np.uint8)
    return data


class TierContract:
    """Every tier inherits these. `tier` has 4 MiB, in whatever parts it likes."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        raise NotImplementedError

    def test_reads_back_what_was_written(self, tier: Tier) -> None:
        slot, data = tier.reserve(3 * MIB), noise(3 * MIB)
        tier.write(slot, 0, data)
        out = aligned(3 * MIB)
        tier.read([Read(slot, 0, out, sums_of(data, 8192), 8192)])
        assert np.array_equal(out, data)

    def test_reads_any_aligned_range_into_unaligned_memory(self, tier: Tier) -> None:
        slot, data = tier.reserve(2 * MIB), noise(2 * MIB)
        tier.write(slot, 0, data)
        out = np.empty(64 * 1024 + 1, dtype=np.uint8)[1:]
        tier.read([Read(slot, MIB - 32 * 1024, out, None, PAGE)])
        assert np.array_equal(out, data[MIB - 32 * 1024 : MIB + 32 * 1024])

    def test_writes_land_where_they_are_aimed(self, tier: Tier) -> None:
        slot, data = tier.reserve(MIB), noise(MIB)
        for at in (3 * PAGE, 0, PAGE, 2 * PAGE):
            tier.write(slot, at, data[at : at + PAGE])
        out = aligned(4 * PAGE)
        tier.read([Read(slot, 0, out, sums_of(data[: 4 * PAGE], PAGE), PAGE)])
        assert np.array_equal(out, data[: 4 * PAGE])

    def test_a_piece_that_does_not_match_its_sum_fails_the_read(self, tier: Tier) -> None:
        slot, data = tier.reserve(MIB), noise(MIB)
        tier.write(slot, 0, data)
        sums = sums_of(data, PAGE)
        sums[77] ^= np.uint64(1)
        with pytest.raises(ReadFailed) as failed:
            tier.read([Read(slot, 0, aligned(MIB), sums, PAGE)])
        assert failed.value.reason == "checksum"
        assert str(77 * PAGE) in str(failed.value)

    def test_space_is_taken_whole_or_not_at_all(self, tier: Tier) -> None:
        first = tier.reserve(3 * MIB)
        used = tier.usage().used
        assert tier.reserve(2 * MIB) is None
        assert tier.usage().used == used
        tier.free(first)
        assert tier.reserve(4 * MIB) is not None
        tier.check()

    def test_slots_never_overlap_and_freed_space_comes_back(self, tier: Tier) -> None:
        slots = [tier.reserve(250 * 1024) for _ in range(13)]
        assert all(slots)
        places = sorted(part for slot in slots for part in slot.parts)
        for a, b in itertools.pairwise(places):
            assert a.segment != b.segment or a.off + a.length <= b.off
        for slot in slots[::2] + slots[1::2]:
            tier.free(slot)
        tier.check()
        usage = tier.usage()
        assert usage.used == 0 and usage.free == usage.total

    def test_accounts_add_up(self, tier: Tier) -> None:
        tier.reserve(5000)
        usage = tier.usage()
        assert usage.used == 2 * PAGE
        assert usage.total == usage.used + usage.free

    def test_many_threads_share_it(self, tier: Tier) -> None:
        wrong: list[int] = []

        def work(seed: int) -> None:
            data = noise(128 * 1024, seed)
            for _ in range(20):
                slot = tier.reserve(len(data))
                tier.write(slot, 0, data)
                out = aligned(len(data))
                tier.read([Read(slot, 0, out, sums_of(data, PAGE), PAGE)])
                if not np.array_equal(out, data):
                    wrong.append(seed)
                tier.free(slot)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        tier.check()


class TestDram(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return DramTier(4 * MIB)

    def test_no_budget_no_slots(self) -> None:
        tier = DramTier(0)
        assert tier.reserve(1) is None
        tier.check()


class TestHbmEmulation(TierContract):
    """Host memory that stands for a device's: the same contract, under its own name."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return DramTier(4 * MIB, "hbm")

    def test_failures_name_the_tier(self, tier: Tier) -> None:
        slot = tier.reserve(PAGE)
        sums = np.zeros(1, dtype=np.uint64)
        with pytest.raises(ReadFailed, match="hbm"):
            tier.read([Read(slot, 0, aligned(PAGE), sums, PAGE)])


class TestSsd(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> SsdTier:
        return SsdTier(tmp_path / "segments", MIB, 4 * MIB)

    def test_files_are_private_and_fallocated_whole(self, tier: SsdTier) -> None:
        tier.reserve(PAGE)
        (path,) = tier.folder.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.stat().st_size == MIB == path.stat().st_blocks * 512
        assert tier.folder.stat().st_mode & 0o777 == 0o700

    def test_an_unwritten_extent_does_not_pass_for_data(self, tier: SsdTier) -> None:
        slot, data = tier.reserve(MIB), noise(MIB)
        with pytest.raises(ReadFailed):
            tier.read([Read(slot, 0, aligned(MIB), sums_of(data, PAGE), PAGE)])

    def test_a_file_cut_short_is_a_short_read(self, tier: SsdTier) -> None:
        slot = tier.reserve(MIB)
        tier.write(slot, 0, noise(MIB))
        os.truncate(tier.folder / "00000000.seg", MIB // 2)
        with pytest.raises(ReadFailed) as failed:
            tier.read([Read(slot, 0, aligned(MIB), None, PAGE)])
        assert failed.value.reason == "short"

    def test_a_file_that_is_gone_is_a_failed_read(self, tier: SsdTier) -> None:
        slot = tier.reserve(MIB)
        (tier.folder / "00000000.seg").unlink()
        with pytest.raises(ReadFailed) as failed:
            tier.read([Read(slot, 0, aligned(MIB), None, PAGE)])
        assert failed.value.reason == "io" and "00000000.seg" in str(failed.value)

    def test_reopened_it_knows_its_segments_and_takes_claims(self, tier: SsdTier) -> None:
        slot, data = tier.reserve(MIB + PAGE), noise(MIB + PAGE)
        tier.write(slot, 0, data)
        tier.sync([slot])
        tier.close()
        again = SsdTier(tier.folder, MIB, 4 * MIB)
        again.claim(slot.parts)
        assert again.usage().used == MIB + PAGE
        out = aligned(MIB + PAGE)
        again.read([Read(slot, 0, out, sums_of(data, PAGE), PAGE)])
        with pytest.raises(ValueError):
            again.claim([*slot.parts, slot.parts[0]])

    def test_empty_segments_are_given_back_to_the_file_system(self, tier: SsdTier) -> None:
        keep, go = tier.reserve(MIB), tier.reserve(MIB)
        tier.free(go)
        assert tier.trim() == MIB
        assert len(list(tier.folder.iterdir())) == 1
        tier.write(keep, 0, noise(MIB))
        tier.check()

    def test_buffered_where_direct_io_is_refused(
        self, tier: SsdTier, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Some file systems refuse O_DIRECT at open: the tier goes on, and says so once."""
        real_open = os.open

        def refusing(path: object, flags: int, *rest: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(22, "Invalid argument")
            return real_open(path, flags, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "open", refusing)
        slot, data = tier.reserve(2 * MIB), noise(2 * MIB)
        with caplog.at_level(logging.WARNING):
            tier.write(slot, 0, data)
            out = np.empty(2 * MIB, dtype=np.uint8)
            tier.read([Read(slot, 0, out, sums_of(data, PAGE), PAGE)])
        assert np.array_equal(out, data) and not tier.direct
        assert sum("refuses O_DIRECT" in message for message in caplog.messages) == 1

    def test_no_permission_names_the_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(MediumError, match="file"):
            SsdTier(tmp_path / "file" / "segments", MIB, None)


class TestSsdWithoutAio(TestSsd):
    """Where the kernel gives no queue (io_setup refused), every read goes through preadv."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> SsdTier:
        tier = SsdTier(tmp_path / "segments", MIB, 4 * MIB)
        tier._queues = False
        return tier


def test_a_request_the_kernel_refuses_is_read_again_with_preadv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue that refuses every other run: what it did not bring is fetched the plain way."""
    tier = SsdTier(tmp_path / "segments", 4 * MIB, None)
    slot, data = tier.reserve(4 * MIB), noise(4 * MIB)
    tier.write(slot, 0, data)
    real = AioContext.read

    def refusing(self: AioContext, runs: list, fds: list) -> Iterator[int]:
        for i in real(self, runs, fds):
            if i % 2:
                runs[i].views[0][:] = 0  # nothing of it counts
                yield ~i
            else:
                yield i

    monkeypatch.setattr(AioContext, "read", refusing)
    out = aligned(4 * MIB)
    pieces = range(0, 4 * MIB, 2 * PAGE)  # every other page: runs of one page each
    sums = sums_of(data, PAGE)
    reads = [
        Read(slot, at, out[at : at + PAGE], sums[at // PAGE : at // PAGE + 1], PAGE)
        for at in pieces
    ]
    tier.read(reads)
    assert all(np.array_equal(out[at : at + PAGE], data[at : at + PAGE]) for at in pieces)


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
        tier.read(part)  # each verifies against its own share of the sums
    assert np.array_equal(out[:n_bytes], data[:n_bytes])
    assert slices([], 4096) == []


def test_a_range_outside_its_slot_is_a_bug() -> None:
    slot = DramTier(MIB).reserve(PAGE)
    with pytest.raises(AssertionError):
        locate(slot, 0, 2 * PAGE)
