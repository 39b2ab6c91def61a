"""The contract every tier keeps, and what every way of reading segments keeps beside it."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiers.segments
from tiers.base import PAGE, Bytes, Cache, Pieces, Read, Slot, Sums, Tier, sums_of
from tiers.coalesce import locate
from tiers.errors import MediumError, ReadFailed
from tiers.segments import SEGMENTS
from tiers.slots import aligned
from tiers.ssd import SsdTier

MIB = 1 << 20


def noise(n_bytes: int, seed: int = 0) -> np.ndarray:
    data = aligned(n_bytes)[:n_bytes]
    data[:] = np.random.default_rng(seed).integers(0, 256, n_bytes, dtype=np.uint8)
    return data


def fetch(tier: Tier, slot: Slot, off: int, dest: Bytes, sums: Sums, piece: int) -> None:
    """Slot bytes [off, off + len(dest)), whole pieces, in the way this medium is read."""
    if isinstance(tier, SsdTier):
        tier.read([Read(slot, off, dest, sums, piece)])
        return
    n = len(dest) // piece
    starts = [locate(slot, off + at * piece, piece)[0].off for at in range(n)]
    tier.read_pieces(Pieces(np.array(starts), dest, np.arange(n), sums, piece))


def opened() -> set[str]:
    """Files that this process has open, as the system calls them."""
    names = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor that lists them
            names.add(str(link.readlink()))
    return names


class TierContract:
    """Every tier inherits these. `tier` has 4 MiB, in whatever parts it likes."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        raise NotImplementedError

    def test_reads_back_what_was_written(self, tier: Tier) -> None:
        slot, data = tier.reserve(3 * MIB), noise(3 * MIB)
        tier.write(slot, 0, data)
        out = aligned(3 * MIB)
        fetch(tier, slot, 0, out, sums_of(data, 8192), 8192)
        assert np.array_equal(out, data)

    def test_reads_any_aligned_range_into_unaligned_memory(self, tier: Tier) -> None:
        slot, data = tier.reserve(2 * MIB), noise(2 * MIB)
        tier.write(slot, 0, data)
        out = np.empty(64 * 1024 + 1, dtype=np.uint8)[1:]
        want = data[MIB - 32 * 1024 : MIB + 32 * 1024]
        fetch(tier, slot, MIB - 32 * 1024, out, sums_of(want, PAGE), PAGE)
        assert np.array_equal(out, want)

    def test_writes_land_where_they_are_aimed(self, tier: Tier) -> None:
        slot, data = tier.reserve(MIB), noise(MIB)
        for at in (3 * PAGE, 0, PAGE, 2 * PAGE):
            tier.write(slot, at, data[at : at + PAGE])
        out = aligned(4 * PAGE)
        fetch(tier, slot, 0, out, sums_of(data[: 4 * PAGE], PAGE), PAGE)
        assert np.array_equal(out, data[: 4 * PAGE])

    def test_a_piece_that_does_not_match_its_sum_fails_the_read(self, tier: Tier) -> None:
        slot, data = tier.reserve(MIB), noise(MIB)
        tier.write(slot, 0, data)
        sums = sums_of(data, PAGE)
        sums[77] ^= np.uint64(1)
        with pytest.raises(ReadFailed) as failed:
            fetch(tier, slot, 0, aligned(MIB), sums, PAGE)
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
                fetch(tier, slot, 0, out, sums_of(data, PAGE), PAGE)
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


class CacheContract(TierContract):
    """What tiers whose bytes lie in one arena keep beside it."""

    @pytest.mark.parametrize("piece", [PAGE, 3 * PAGE])
    @pytest.mark.parametrize("run", [1, 40, 300, 1000])
    def test_pieces_come_from_all_over_and_go_where_they_should(
        self, tier: Cache, piece: int, run: int
    ) -> None:
        slot, data = tier.reserve(3 * MIB), noise(3 * MIB)
        tier.write(slot, 0, data)
        start = slot.parts[0].off  # in one part: the arena is empty
        rows = data[: len(data) // piece * piece].reshape(-1, piece)
        chosen = np.random.default_rng(1).permutation(len(rows))[: len(rows) // 2]
        to = np.arange(5, 5 + len(chosen)) + np.arange(len(chosen)) // run
        to[-9:] += 2 * np.arange(9) * (run == 300)  # one long run, and then none
        dest = aligned((to[-1] + 3) * piece)[: (to[-1] + 3) * piece]
        dest[:] = 7
        sums = sums_of(rows.reshape(-1), piece)[chosen]
        tier.read_pieces(Pieces(start + chosen * piece, dest, to, sums, piece))
        got = dest.reshape(-1, piece)
        assert np.array_equal(got[to], rows[chosen])
        rest = np.setdiff1d(np.arange(len(got)), to)
        assert (got[rest] == 7).all()
        bad = len(chosen) // 2
        sums[bad] ^= np.uint64(1)
        with pytest.raises(ReadFailed, match=rf"1 bad piece, .*{start + chosen[bad] * piece}\b"):
            tier.read_pieces(Pieces(start + chosen * piece, dest, to, sums, piece))

    @pytest.mark.parametrize("n_pages", [96, 300])
    def test_long_pieces_are_brought_like_short_ones(self, tier: Cache, n_pages: int) -> None:
        """Whole chunks: with large models one is more than is copied at once. Their starts do not
        always have as many factors of two as their size."""
        size = n_pages * PAGE
        slot, data = tier.reserve(3 * MIB), noise(3 * MIB)
        tier.write(slot, 0, data)
        begins = np.array([5, 7 + n_pages]) * PAGE
        chunks = [data[at : at + size] for at in begins.tolist()]
        sums = np.concatenate([sums_of(chunk, size) for chunk in chunks])
        for to in (np.array([1, 2]), np.array([0, 2])):  # one after the other, and apart
            dest = aligned(3 * size + PAGE)[: 3 * size + PAGE]  # spare room, less than a piece
            tier.read_pieces(Pieces(slot.parts[0].off + begins, dest, to, sums, size))
            got = dest[: 3 * size].reshape(3, size)
            assert all(map(np.array_equal, got[to], chunks))
            with pytest.raises(ReadFailed, match=r"[12] bad piece"):
                tier.read_pieces(Pieces(slot.parts[0].off + begins, dest, to, sums[::-1], size))
        rows = np.random.default_rng(1).permutation(2 * n_pages).reshape(2, n_pages)
        dest = aligned(2 * size)[: 2 * size]
        tier.read_pieces(Pieces(slot.parts[0].off + begins, dest, rows, sums, size))
        assert np.array_equal(dest.reshape(-1, PAGE)[rows.ravel()].ravel(), np.concatenate(chunks))
        kept = np.where(rows % 3 > 0, rows, -1)  # some of them nowhere
        dest[:] = 7
        tier.read_pieces(Pieces(slot.parts[0].off + begins, dest, kept, sums, size))
        want = np.full_like(dest, 7).reshape(-1, PAGE)
        want[rows[kept >= 0]] = np.concatenate(chunks).reshape(2, n_pages, PAGE)[kept >= 0]
        assert np.array_equal(dest.reshape(-1, PAGE), want)
        with pytest.raises(ReadFailed, match="bad piece"):
            tier.read_pieces(Pieces(slot.parts[0].off + begins, dest, kept, sums[::-1], size))

    @pytest.mark.parametrize("share", [0.3, 1.0], ids=["some", "all"])
    def test_parts_of_pieces_go_each_to_a_place_of_its_own(self, tier: Cache, share: float) -> None:
        slot, data = tier.reserve(3 * MIB), noise(3 * MIB)
        tier.write(slot, 0, data)
        rng, n, k, size = np.random.default_rng(1), 500, 4, PAGE // 4
        chosen = rng.permutation(len(data) // PAGE)[:n]
        to = rng.permutation(3 * n * k)[: n * k].reshape(n, k)
        to[rng.random((n, k)) >= share] = -1
        dest = aligned(3 * n * PAGE)
        dest[:] = 7
        sums = sums_of(data, PAGE)[chosen]
        pieces = Pieces(slot.parts[0].off + chosen * PAGE, dest, to, sums, PAGE)
        tier.read_pieces(pieces)
        want = np.full_like(dest, 7).reshape(-1, size)
        for piece, places in zip(data.reshape(-1, k, size)[chosen], to, strict=True):
            want[places[places >= 0]] = piece[places >= 0]
        assert np.array_equal(dest.reshape(-1, size), want)
        assert pieces.n_bytes == n * PAGE
        pieces.sums[n // 2] ^= np.uint64(1)
        with pytest.raises(ReadFailed, match=rf"1 bad piece, first at byte {pieces.starts[250]}\b"):
            tier.read_pieces(pieces)

    def test_as_many_extents_as_there_is_room_for_are_taken_together(self, tier: Cache) -> None:
        room = tier.usage().free // (3 * PAGE)
        assert len(tier.reserve_each(2 * PAGE + 1, 2).parts) == 2
        rest = tier.reserve_each(3 * PAGE, room)
        assert {part.length for part in rest.parts} == {3 * PAGE} and len(rest.parts) == room - 2
        assert tier.reserve_each(3 * PAGE, 1).parts == () == tier.reserve_each(PAGE, 0).parts
        tier.free(Slot(rest.parts[1::2]))
        tier.check()
        again = tier.reserve_each(3 * PAGE, room)
        assert set(again.parts) == set(rest.parts[1::2])
        tier.check()

    def test_one_bad_piece_among_many_fails_the_read(self, tier: Cache) -> None:
        slot, data = tier.reserve(MIB), noise(MIB)
        tier.write(slot, 0, data)
        for to in (np.arange(256), np.arange(256) * 2):
            sums = sums_of(data, PAGE)
            sums[77] ^= np.uint64(1)
            starts = slot.parts[0].off + np.arange(256) * PAGE
            with pytest.raises(ReadFailed, match=rf"1 bad piece, first at byte {starts[77]}\b"):
                tier.read_pieces(Pieces(starts, aligned(2 * MIB), to, sums, PAGE))


class SsdContract(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[SsdTier]:
        tier = SsdTier(tmp_path / "segments", MIB, 4 * MIB)
        yield tier
        tier.close()

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

    @pytest.mark.parametrize("sound", [True, False], ids=["sound", "a bad piece"])
    def test_who_asks_is_told_how_much_is_there(self, tier: SsdTier, sound: bool) -> None:
        """It is told in the order it asked in, not the medium's, and of nothing that is bad."""
        slots = [tier.reserve(MIB) for _ in range(3)]
        data = noise(3 * MIB).reshape(3, MIB)
        for slot, its in zip(slots, data, strict=True):
            tier.write(slot, 0, its)
        rng, out, at = np.random.default_rng(1), aligned(3 * MIB)[: 3 * MIB], 0
        reads, want = [], np.empty(3 * MIB, dtype=np.uint8)
        for i in rng.permutation(3):
            sums = sums_of(data[i], PAGE)
            sums[200] ^= np.uint64(i == 1 and not sound)
            cuts = [0, *sorted(rng.permutation(np.arange(1, 256))[:40]), 256]
            for first, end in rng.permutation(list(itertools.pairwise(cuts))):
                there = slice(at, at + (end - first) * PAGE)
                want[there] = data[i][first * PAGE : end * PAGE]
                some = sums[first:end]
                reads.append(Read(slots[i], int(first) * PAGE, out[there], some, PAGE))
                at = there.stop
        told = []

        def then(n_bytes: int) -> None:
            told.append(n_bytes)
            assert np.array_equal(out[:n_bytes], want[:n_bytes])

        if sound:
            tier.read(reads, then)
            assert told == sorted(set(told)) and len(told) > 1 and told[-1] == 3 * MIB
            tier.read([], then)
            return
        with pytest.raises(ReadFailed, match="bad piece"):
            tier.read(reads, then)
        bad = next(i for i, r in enumerate(reads) if r.slot is slots[1] and r.off <= 200 * PAGE
                   < r.off + len(r.dest))  # fmt: skip
        assert max(told, default=0) <= sum(len(read.dest) for read in reads[:bad])

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

    def test_a_file_that_is_gone_fails_scattered_reads_too(self, tier: SsdTier) -> None:
        """Opening for a queue once raised the system's own error, past handlers of failed reads."""
        slot, out = tier.reserve(MIB), aligned(MIB)
        (tier.folder / "00000000.seg").unlink()
        reads = [Read(slot, at, out[at : at + PAGE], None, PAGE) for at in (0, MIB // 2)]
        with pytest.raises(ReadFailed) as failed:
            tier.read(reads)
        assert failed.value.reason == "io"

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
        again.close()

    def test_empty_segments_are_given_back_to_the_file_system(self, tier: SsdTier) -> None:
        keep, go = tier.reserve(MIB), tier.reserve(MIB)
        tier.free(go)
        assert tier.trim() == MIB
        assert len(list(tier.folder.iterdir())) == 1
        tier.write(keep, 0, noise(MIB))
        tier.check()

    @pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
    @pytest.mark.parametrize("what", ["made", "deleted"])
    def test_ctrl_c_as_a_segment_is_made_or_deleted_leaves_one_account_of_it(
        self, tier: SsdTier, what: str, behind: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A file made, or to be deleted, but in no account kept the next from its name: no store
        ever found room. Data written to a segment whose file was deleted was in no file."""
        tier.write(go := tier.reserve(MIB), 0, noise(MIB))
        tier.free(go)
        where, name = (tiers.segments, "make_full") if what == "made" else (Path, "unlink")
        real = getattr(where, name)

        def struck(*args: Any, **named: Any) -> None:
            if behind:
                real(*args, **named)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
            patched.setattr(where, name, struck)
            tier.reserve(3 * MIB) if what == "made" else tier.trim()
        tier.check()
        slot, data = tier.reserve(3 * MIB), noise(3 * MIB)
        tier.write(slot, 0, data)
        tier.check()
        names = sorted(int(path.stem) for path in tier.folder.iterdir())
        assert names == sorted({part.segment for part in slot.parts})
        there = [tier.folder / f"{part.segment:08d}.seg" for part in slot.parts]
        assert b"".join(path.read_bytes() for path in there) == data.tobytes()

    @pytest.mark.parametrize("cut_off", [False, True], ids=["to the end", "cut off"])
    def test_what_a_late_read_opens_as_its_segment_goes_is_not_written_to(
        self, tier: SsdTier, cut_off: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The deleted file stayed open, and all that was stored in the next segment of its number
        was written, synced and served there: after a restart the new file held zeros."""
        tier.write(old := tier.reserve(MIB), 0, noise(MIB))
        tier.free(old)
        unlink = Path.unlink

        def behind_a_read(path: Path, missing_ok: bool = False) -> None:
            tier.read([Read(old, 0, aligned(MIB), None, PAGE)])
            unlink(path, missing_ok=missing_ok)
            if cut_off:
                raise KeyboardInterrupt

        with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
            patched.setattr(Path, "unlink", behind_a_read)
            assert tier.trim() == MIB
        gone = f"{tier.folder}/00000000.seg (deleted)"
        if tier.engine not in ("aiofiles", "kvikio"):  # these look at their next read
            assert (gone in opened()) is cut_off  # otherwise its blocks are back
        slot, data = tier.reserve(MIB), noise(MIB, 1)
        assert slot == old
        tier.write(slot, 0, data)
        tier.sync([slot])
        with closing(SsdTier(tier.folder, MIB, None, read_only=True)) as another:
            another.read([Read(slot, 0, aligned(MIB), sums_of(data, PAGE), PAGE)])

    def test_while_a_segment_is_made_files_are_read_and_accounts_told(
        self, tier: SsdTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One lock was held while the file system made a file: reads of another waited for it. A
        thread that wants room meanwhile waits, and shares what comes."""
        slot, fallocate = tier.reserve(MIB), os.posix_fallocate
        begun, go, in_time = threading.Event(), threading.Event(), []
        slots: list[Slot | None] = []

        def slow(fd: int, off: int, n_bytes: int) -> None:
            begun.set()
            in_time.append(go.wait(60))
            fallocate(fd, off, n_bytes)

        monkeypatch.setattr(os, "posix_fallocate", slow)
        threads = [
            threading.Thread(target=lambda: slots.append(tier.reserve(MIB // 2))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        assert begun.wait(60)
        assert tier.usage().used == MIB == tier.usage().total
        tier.read([Read(slot, 0, aligned(MIB)[:MIB], None, PAGE)])  # its file is not open yet
        go.set()
        for thread in threads:
            thread.join(60)
        assert in_time == [True], "made once, and read before it was there"
        assert None not in slots and tier.usage() == (2 * MIB, 2 * MIB, 0)
        tier.check()

    def test_while_a_segment_is_deleted_files_are_read_and_accounts_told(
        self, tier: SsdTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The lock was held for that, too. A new segment waits until the old one is gone."""
        keep, go_away, unlink = tier.reserve(MIB), tier.reserve(MIB), Path.unlink
        tier.free(go_away)
        begun, go, in_time = threading.Event(), threading.Event(), []

        def slow(path: Path, missing_ok: bool = False) -> None:
            begun.set()
            in_time.append(go.wait(60))
            unlink(path, missing_ok=missing_ok)

        monkeypatch.setattr(Path, "unlink", slow)
        slots: list[Slot | None] = []
        trimming = threading.Thread(target=tier.trim)
        wanting = threading.Thread(target=lambda: slots.append(tier.reserve(MIB)))
        trimming.start()
        assert begun.wait(60)
        wanting.start()
        assert tier.usage() == (MIB, MIB, 0)
        tier.read([Read(keep, 0, aligned(MIB)[:MIB], None, PAGE)])
        go.set()
        for thread in (trimming, wanting):
            thread.join(60)
        assert in_time == [True] and slots == [go_away]
        tier.check()

    def test_files_of_another_folders_numbers_are_left_alone(
        self, tier: SsdTier, caplog: pytest.LogCaptureFixture
    ) -> None:
        """In a folder that was copied or renamed they name the other folder's files."""
        slot, data = tier.reserve(2 * MIB), noise(2 * MIB)
        tier.write(slot, 0, data)
        other = SsdTier(tier.folder.parent / "copy", MIB, 4 * MIB, number=1)
        names = sorted(path.name for path in tier.folder.iterdir())
        for name in names:
            (other.folder / name).write_bytes((tier.folder / name).read_bytes())
        other.close()
        other = SsdTier(other.folder, MIB, 4 * MIB, number=1)
        other.join(0, tier.folder)
        (said,) = [message for message in caplog.messages if "numbered" in message]
        assert str(other.folder) in said and "2 segments" in said
        assert other.trim() == 0 == other.usage().total
        mine = other.reserve(MIB)
        other.write(mine, 0, noise(MIB))
        assert [part.segment for part in mine.parts] == [SEGMENTS]
        assert set(names) < {path.name for path in other.folder.iterdir()}
        out = aligned(2 * MIB)
        for reader in (tier, other):
            reader.read([Read(slot, 0, out, sums_of(data, PAGE), PAGE)])
        other.close()

    def test_the_numbers_of_a_folder_end_where_the_next_ones_begin(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tiers.segments, "SEGMENTS", 2)
        tier = SsdTier(tmp_path / "segments", MIB, None, number=1)
        slot = tier.reserve(2 * MIB)
        assert sorted(part.segment for part in slot.parts) == [2, 3]
        assert tier.reserve(MIB) is None and "number" in tier.no_room
        assert len(list(tier.folder.iterdir())) == 2
        tier.close()

    def test_what_is_free_is_erased_and_nothing_else(
        self, tier: SsdTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It counts as free meanwhile: callers that saw it as used let others' spans go for it."""
        monkeypatch.setattr("tiers.ssd.ERASE_BYTES", 64 << 10)
        slots = [tier.reserve(96 << 10) for _ in range(8)]
        rows = [noise(96 << 10) + np.uint8(i) for i in range(8)]
        for slot, data in zip(slots, rows, strict=True):
            tier.write(slot, 0, data)
        for slot in slots[1::2]:
            tier.free(slot)
        before, erase, n_parts = tier.usage(), tier.erase, 0

        def erasing(slot: Slot) -> None:
            nonlocal n_parts
            assert tier.usage() == before and not tier.free_parts(slot.parts)
            n_parts += len(slot.parts)
            erase(slot)

        monkeypatch.setattr(tier, "erase", erasing)
        for turn in tier.turns():
            tier.erase_free(turn)
        assert n_parts > 4
        held = b"".join(path.read_bytes() for path in sorted(tier.folder.iterdir()))
        for i, (slot, data) in enumerate(zip(slots, rows, strict=True)):
            assert (data[: 4 << 10].tobytes() in held) is (i % 2 == 0)
            if i % 2 == 0:
                out = aligned(len(data))
                tier.read([Read(slot, 0, out, sums_of(data, PAGE), PAGE)])
        assert tier.usage() == before
        tier.check()

    def test_what_is_taken_while_what_is_free_is_erased_is_erased_when_it_is_given_back(
        self, tier: SsdTier
    ) -> None:
        """Except for space that is kept: its bytes are its own. Space taken later is clean."""
        data = noise(96 << 10)
        lying = tier.reserve(5 * len(data))
        for i in range(5):
            tier.write(lying, i * len(data), data + np.uint8(i))
        tier.free(lying)
        kept, taken = tier.reserve(len(data)), tier.reserve(2 * len(data))  # unwritten, both

        def lies(i: int) -> bool:
            held = b"".join(path.read_bytes() for path in sorted(tier.folder.iterdir()))
            return (data[: 4 << 10] + np.uint8(i)).tobytes() in held

        for turn in tier.turns():
            tier.erase_free(turn, sorted(kept.parts))
        assert [lies(i) for i in range(5)] == [True, True, True, False, False]
        tier.write(taken, 0, data)
        tier.free(taken)
        assert [lies(i) for i in range(5)] == [True, False, False, False, False]
        tier.free(kept)
        assert lies(0)
        tier.check()

    def test_what_segments_of_another_size_leave_over_is_no_capacity(self, tier: SsdTier) -> None:
        """Older segments kept their size, and the next one did not fit beside them: a prompt that
        could never fit had all else evicted for it, each time it came."""
        made = tier.reserve(3 * MIB)
        assert made is not None and tier.capacity_bytes == 4 * MIB
        tier.close()
        with closing(SsdTier(tier.folder, 2 * MIB, 4 * MIB)) as again:
            again.claim(made.parts)
            assert again.capacity_bytes == again.usage().total == 3 * MIB
            assert again.reserve(MIB) is None

    def test_who_finds_no_room_while_what_is_free_is_erased_waits_for_it(
        self, tier: SsdTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All free space was being erased, and the caller was told that the disk is full."""
        full = tier.reserve(tier.capacity_bytes)
        assert full is not None and tier.reserve(PAGE) is None
        tier.free(Slot(full.parts[:1]))
        erase, found = tier.erase, list[Slot | None]()
        other = threading.Thread(target=lambda: found.append(tier.reserve(PAGE)))

        def erasing(slot: Slot) -> None:
            if slot.parts:
                other.start()
                other.join(0.2)  # it can only wait: give it a moment to find nothing
                assert not found
            erase(slot)

        monkeypatch.setattr(tier, "erase", erasing)
        for turn in tier.turns():
            tier.erase_free(turn)
        other.join(60)
        assert len(found) == 1 and found[0] is not None

    def test_what_is_free_and_cannot_be_erased_stays_free(
        self, tier: SsdTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tier.free(tier.reserve(96 << 10))
        before = tier.usage()

        def failing(fd: int, off: int, n_bytes: int) -> bool:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr("tiers.ssd.emptied", failing)
        with pytest.raises(MediumError, match="Input/output error"):
            tier.erase_free(tier.turns()[0])
        assert tier.usage() == before
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

    @pytest.mark.parametrize("off", [0, 8])  # of the memory, from a page's beginning
    @pytest.mark.parametrize("refuses", ["theirs", "this one"])
    def test_a_folder_that_refuses_direct_io_is_named_and_alone_in_that(
        self, tier: SsdTier, tmp_path: Path, caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch, refuses: str, off: int,
    ) -> None:  # fmt: skip
        """The log named this one whichever it was, and both were read buffered from then on. Then
        reads of the other into memory that is not aligned failed, and its spans were given up."""
        theirs, real_open = tmp_path / "theirs", os.open
        data = noise(2 * MIB)
        with closing(SsdTier(theirs, MIB, None, number=7)) as other:
            their_slot = other.reserve(2 * MIB)
            other.write(their_slot, 0, data)
        refusing_one = theirs if refuses == "theirs" else tier.folder

        def refusing(path: Any, flags: int, *rest: int) -> int:
            if flags & os.O_DIRECT and Path(path).parent == refusing_one:
                raise OSError(22, "Invalid argument")
            return real_open(path, flags, *rest)

        monkeypatch.setattr(os, "open", refusing)
        tier.join(7, theirs)
        slot = tier.reserve(2 * MIB)
        with caplog.at_level(logging.WARNING):
            tier.write(slot, 0, data)
            for each in (slot, their_slot):
                out = aligned(2 * MIB + PAGE)[off : off + 2 * MIB]
                tier.read([Read(each, 0, out, sums_of(data, PAGE), PAGE)])
                assert np.array_equal(out, data)
        assert tier.direct == (refuses == "theirs")
        assert caplog.text.count("refuses O_DIRECT") == 1
        assert f"{refusing_one} refuses O_DIRECT" in caplog.text

    def test_no_permission_names_the_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(MediumError, match="file"):
            SsdTier(tmp_path / "file" / "segments", MIB, None)
