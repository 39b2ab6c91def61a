"""The index can always be made again from the segments, and never brings back what is not whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from conftest import (
    SMALL,
    assert_serves,
    flip_a_bit,
    look,
    prompt,
    put_prompt,
    wait_for_promotions,
)
from typer.testing import CliRunner

import impress
import impress.upkeep.scan
from impress.cli.main import app
from impress.spans.format import SpanHeader, SpanRecord, decode_header, encode_header
from impress.spans.tables import read_header
from impress.upkeep.rebuild import rebuild_store
from impress.upkeep.verify import verify_store
from impress.write.index import Index
from tiers.base import PAGE, Read, Slot
from tiers.errors import ReadFailed
from tiers.slots import aligned
from tiers.ssd import SsdTier

ROOT = Path(__file__).parent.parent
Open = Callable[..., impress.PrefixStore]


def fill(open_store: Open, geometry: impress.Geometry, n: int = 6) -> Path:
    """A store, closed, of n prompts and one that continues the first."""
    with open_store(geometry) as store:
        for seed in range(n):
            put_prompt(store, prompt(256, seed))
        store.flush()
        longer = np.concatenate([prompt(256, 0), prompt(128, 99)])
        put_prompt(store, longer)
        store.flush()
        return store.path


def longer_prompt() -> np.ndarray:
    return np.concatenate([prompt(256, 0), prompt(128, 99)])


def test_a_rebuild_that_cannot_put_its_index_in_place_leaves_the_old_one(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one had been set aside, and the new one was removed: the store did not open."""
    path, rename = fill(open_store, geometry), Path.rename

    def full(self: Path, target: Path) -> Path:
        if target.name == "index" and self.name != "index.old":
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(self, target)

    with monkeypatch.context() as patch, pytest.raises(impress.StoreFailed, match="No space left"):
        patch.setattr(Path, "rename", full)
        rebuild_store(path)
    with open_store(geometry) as store:
        assert_serves(store, longer_prompt(), 384)


def test_headers_are_not_all_held_in_memory_until_their_rows_are_read(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kept its rows' sums, scores and order: of a shard of 1 TiB, 3.5 GiB."""
    path, most = fill(open_store, geometry), [0]
    found: list[weakref.ref[np.ndarray]] = []

    def noted(raw: Any, meta: Any) -> SpanHeader:
        header = decode_header(raw, meta)
        found.append(weakref.ref(header.sums))
        return header

    def say(what: str, *_: int) -> None:
        if what == "verifying":
            most.append(sum(sums() is not None for sums in found))

    monkeypatch.setattr(impress.upkeep.scan, "decode_header", noted)
    assert rebuild_store(path, progress=say).spans == len(found) == 7
    assert max(most) <= 1


def test_a_header_that_goes_bad_after_it_was_found_is_dropped(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """It is read once more, for its rows' sums."""
    path = fill(open_store, geometry)
    with open_store(geometry, mode="r") as store:
        record = max(store.catalog.records(), key=lambda record: record.span_id)

    def say(what: str, done: int, _of: int) -> None:
        if what == "verifying" and not done:
            flip_a_bit(path, record.meta, 100)

    found = rebuild_store(path, progress=say)
    assert (found.spans, found.damaged) == (6, 1)


def test_a_lost_index_is_made_again(open_store: Open, geometry: impress.Geometry) -> None:
    path = fill(open_store, geometry)
    shutil.rmtree(path / "shards/main/index")
    with pytest.raises(impress.FormatError, match="impress rebuild"):
        open_store(geometry)
    found = rebuild_store(path)
    assert (found.spans, found.torn, found.damaged) == (7, 0, 0)
    store = open_store(geometry)
    store.check()
    for seed in range(1, 6):
        assert_serves(store, prompt(256, seed), 256)
    assert_serves(store, longer_prompt(), 384)


@pytest.mark.parametrize("lost", ["the folder", "its file", "all but one set aside before"])
def test_a_rebuild_that_cannot_know_of_a_purge_says_so(
    open_store: Open, geometry: impress.Geometry, tmp_path: Path, lost: str
) -> None:
    """Where a purge was cut off, only the index knows what is still to be erased. Without the index
    that was served again, and silently where the whole folder was gone, or where an older index
    that an earlier rebuild had set aside was asked instead."""
    store = open_store(geometry)
    put_prompt(store, prompt(128)).wait(60)
    if lost == "all but one set aside before":
        store.close()
        assert not rebuild_store(store.path).notes
        store = open_store(geometry)
    lease = store.lease(prompt(128))
    assert store.purge() == (1, 1)  # the lease still holds it
    left = tmp_path / "left by a crash"
    shutil.copytree(store.path, left)
    lease.release()
    assert not rebuild_store(shutil.copytree(left, tmp_path / "with its index")).notes
    index = left / "shards/main/index"
    if lost == "its file":
        (index / "data.mdb").unlink()
    else:
        shutil.rmtree(index)
    found = rebuild_store(left)
    assert found.spans == 1  # it was whole before the purge, and no more is known
    assert len(found.notes) == 1 and "where a purge was cut off, purge again" in found.notes[0]


@pytest.mark.parametrize("then", ["rebuilt", "opened"])
def test_a_rebuild_killed_between_its_renames_is_ended_by_whoever_writes_next(
    open_store: Open, geometry: impress.Geometry, tmp_path: Path, then: str
) -> None:
    """Neither index was in place, and whether the old one's record of a cut-off purge was found
    depended on which of their names were left."""
    store = open_store(geometry)
    for tenant in ("a", "b"):
        put_prompt(store, prompt(128), tenant=tenant).wait(60)
    lease = store.lease(prompt(128), tenant="a")
    assert store.purge(tenant="a") == (1, 1)  # the lease still holds it
    left = Path(shutil.copytree(store.path, tmp_path / "left by a crash"))
    lease.release()
    store.close()
    assert rebuild_store(left).purged == 1
    (left / "shards/main/index").rename(left / "shards/main/index.made")
    if then == "rebuilt":
        found = rebuild_store(left)
        assert (found.spans, found.purged, found.notes) == (1, 1, [])
    config = impress.Config(**SMALL, shard=0)
    with impress.PrefixStore.open(left, geometry, "test", config) as again:
        assert again.lookup(prompt(128), tenant="b") == 128
        assert again.lookup(prompt(128), tenant="a") == 0
    assert not (left / "shards/main/index.made").exists()


@pytest.mark.parametrize("fails", ["OSError", "StoreFailed"])
def test_a_rebuild_that_fails_leaves_no_half_of_an_index(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """What it had written until the disk was full stayed beside the index for good."""
    path = fill(open_store, geometry)
    folder, full = path / "shards/main", os.strerror(errno.ENOSPC)
    before = {one.name for one in folder.iterdir()}

    def commit(*_args: Any, **_named: Any) -> None:
        if fails == "OSError":
            raise OSError(errno.ENOSPC, full)
        raise impress.StoreFailed(f"index: commit: {full}")

    with monkeypatch.context() as patch, pytest.raises(impress.StoreFailed, match=full):
        patch.setattr(Index, "commit", commit)
        rebuild_store(path)
    assert {one.name for one in folder.iterdir()} == before
    assert rebuild_store(path).spans == 7
    assert_serves(open_store(geometry), longer_prompt(), 384)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_segments_that_cannot_be_listed_are_not_none(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """To an open they were missing, and the rebuild that it asked for replaced an index that names
    them all with an empty one."""
    path = fill(open_store, geometry)
    said = f"shards/main/segments: {os.strerror(number)}$"
    with monkeypatch.context() as patch:
        for name in ("listdir", "scandir"):
            patch.setattr(os, name, refusing(getattr(os, name), "segments", number))
        for mode in ("rw", "r"):
            with pytest.raises(impress.StoreFailed, match=said):
                open_store(geometry, mode)
        for dry_run in (True, False):
            with pytest.raises(impress.StoreFailed, match=said):
                rebuild_store(path, dry_run=dry_run)
    assert_serves(open_store(geometry), longer_prompt(), 384)


def refusing(real: Callable[..., Any], name: str, number: int) -> Callable[..., Any]:
    """A system call that fails for folders of this name."""

    def call(path: Any = ".") -> Any:
        if Path(os.fsdecode(path)).name == name:
            raise OSError(number, os.strerror(number), os.fsdecode(path))
        return real(path)

    return call


@pytest.mark.parametrize("name", ["00000000 (copy).seg", "0.seg"])
def test_a_file_that_somebody_left_among_the_segments_is_passed_over(
    open_store: Open, geometry: impress.Geometry, name: str
) -> None:
    """Its name was taken for a number: open and rebuild failed with a ValueError. A number written
    in another way was taken for the same segment: an AssertionError."""
    path = fill(open_store, geometry)
    segments = path / "shards/main/segments"
    shutil.copy(segments / "00000000.seg", segments / name)
    shutil.rmtree(path / "shards/main/index")
    assert rebuild_store(path).spans == 7
    store = open_store(geometry)
    store.check()
    assert_serves(store, prompt(256, 1), 256)


def test_what_a_short_process_cannot_open_is_not_taken_for_damaged(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rebuild left out spans that it had no file descriptor for, and verify called them bad."""
    path = fill(open_store, geometry)

    def short(_ssd: SsdTier, *_reads: object) -> None:
        raise ReadFailed("shortage", "Too many open files")

    with monkeypatch.context() as poor:
        poor.setattr(SsdTier, "read", short)
        for look in (rebuild_store, verify_store):
            with pytest.raises(impress.StoreFailed, match="Too many open files"):
                look(path)
    assert not verify_store(path).problems
    assert rebuild_store(path).spans == 7


def test_segments_whose_disk_is_not_mounted_do_not_make_an_empty_index(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """The open said to rebuild, and that put an empty index in the sound one's place: with the disk
    back all rows were free space, and the next rebuild deleted the sound one."""
    path = fill(open_store, geometry)
    segments, away = path / "shards/main/segments", path.with_name("away")
    segments.rename(away)
    segments.mkdir()
    with pytest.raises(impress.FormatError, match="is its disk mounted"):
        open_store(geometry)
    done = CliRunner().invoke(app, ["rebuild", "--store", str(path)])
    assert done.exit_code == 2 and "names 7 spans: mount its disk" in done.stderr
    segments.rmdir()
    away.rename(segments)
    with open_store(geometry) as store:
        assert_serves(store, longer_prompt(), 384)
    for segment in segments.iterdir():
        segment.unlink()
    with pytest.raises(impress.StoreFailed, match=f"are lost, delete {path}/shards/main$"):
        rebuild_store(path)
    shutil.rmtree(path / "shards/main")
    open_store(geometry).close()


def test_a_damaged_index_is_set_aside(open_store: Open, geometry: impress.Geometry) -> None:
    path = fill(open_store, geometry)
    data = path / "shards/main/index/data.mdb"
    data.write_bytes(data.read_bytes()[: 3 * PAGE])
    with pytest.raises(impress.FormatError, match=r"cut short.*impress rebuild"):
        open_store(geometry)  # the index once stayed open, and was found again after the rebuild
    done = CliRunner().invoke(app, ["rebuild", "--store", str(path), "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["spans"] == 7
    assert (path / "shards/main/index.old/data.mdb").exists()
    assert_serves(open_store(geometry), longer_prompt(), 384)


def test_an_index_whose_last_pages_lmdb_counted_and_never_wrote_is_whole(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """One transaction took them and gave them back: the index was refused as cut short for good."""
    with open_store(geometry) as store:
        assert put_prompt(store, prompt(256)).wait(60)
        folder = store.path / "shards/main/index"
    with lmdb.open(str(folder), map_size=1 << 30, max_dbs=8) as env:
        junk = env.open_db(b"junk")
        for _ in range(9):  # pages to be used again
            with env.begin(write=True) as txn:
                txn.put(b"key", b"", db=junk)
        with env.begin(write=True) as txn:
            txn.put(b"large", bytes(1 << 16), db=junk)
            txn.delete(b"large", db=junk)
        n_pages = env.info()["last_pgno"] + 1
    assert n_pages * 4096 > (folder / "data.mdb").stat().st_size
    with open_store(geometry) as again:
        assert_serves(again, prompt(256), 256)
        assert put_prompt(again, prompt(256, 1)).wait(60)
        assert_serves(open_store(geometry, mode="r"), prompt(256, 1), 256)


@pytest.mark.parametrize("what", ["heat", "tick"])
def test_a_flipped_count_of_uses_is_counted_anew(
    open_store: Open, geometry: impress.Geometry, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Counts have no checksum. A store did not open, or no longer learnt or promoted anything."""
    with open_store(geometry) as store:
        assert put_prompt(store, prompt(256)).wait(60)
        assert_serves(store, prompt(256), 256)
        folder, span = store.path / "shards/main/index", next(iter(store.catalog.records())).span_id
    name, key = ("heat", span.to_bytes(8, "big")) if what == "heat" else ("history", b"tick")
    with lmdb.open(str(folder), map_size=1 << 30, max_dbs=8) as env:
        db = env.open_db(name.encode(), create=False)
        with env.begin(write=True) as txn:
            value = bytearray(txn.get(key, db=db))
            value[7] ^= 0x80
            txn.put(key, bytes(value), db=db)
    with open_store(geometry) as again:
        for _ in range(2):
            assert_serves(again, prompt(256), 256)
            wait_for_promotions(again)
        assert again.stats()["promoted_bytes"]
        assert_serves(open_store(geometry, shard=1), prompt(256), 256)  # a follower reads it too
    assert not caplog.records
    assert_serves(open_store(geometry), prompt(256), 256)


def test_rows_that_do_not_match_are_left_out_with_what_hangs_from_them(
    open_store: Open, geometry: impress.Geometry
) -> None:
    path = fill(open_store, geometry)
    with open_store(geometry) as store:
        record = next(r for r in store.catalog.records() if r.first_window == 0)
    flip_a_bit(path, record.parts[0], 5000)
    found = rebuild_store(path)
    assert found.damaged == 1 and found.spans == 6
    store = open_store(geometry)
    store.check()
    served = sum(store.lookup(prompt(256, seed)) == 256 for seed in range(6))
    assert served == 5


def test_evicted_spans_stay_away_and_newer_owners_of_their_space_win(
    open_store: Open, geometry: impress.Geometry
) -> None:
    path = fill(open_store, geometry)
    with open_store(geometry) as store:
        store.evict(1)
        store.flush()
        gone = [seed for seed in range(6) if store.lookup(prompt(256, seed)) == 0]
        put_prompt(store, prompt(512, 50))
        store.flush()
        n_spans = store.stats()["spans"]
    found = rebuild_store(path)
    assert found.spans == n_spans and not found.damaged
    store = open_store(geometry)
    store.check()
    assert_serves(store, prompt(512, 50), 512)
    assert all(store.lookup(prompt(256, seed)) == 0 for seed in gone)


def test_a_header_cut_off_by_a_crash_is_torn_not_served(
    open_store: Open, geometry: impress.Geometry
) -> None:
    path = fill(open_store, geometry, n=2)
    with open_store(geometry) as store:
        meta = max(store.catalog.records(), key=lambda r: r.span_id).meta
    segment = path / f"shards/main/segments/{meta.segment:08d}.seg"
    with segment.open("r+b") as file:  # all but its first page never reached the disk
        file.seek(meta.off + PAGE)
        file.write(bytes(meta.length - PAGE))
    found = rebuild_store(path)
    assert (found.torn, found.spans) == (1, 2)
    assert_serves(open_store(geometry), longer_prompt(), 256)


@pytest.mark.parametrize("whole_file", [False, True])
def test_a_sector_that_cannot_be_read_costs_what_lies_there_and_no_more(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, whole_file: bool
) -> None:
    """One EIO ended the command, which named no file and found no span of any segment.

    Where other pages lay before it in the same read there was no error, and those after it were
    left out without a word.
    """
    path = fill(open_store, geometry)
    with open_store(geometry), open_store(geometry) as other_shard:
        put_prompt(other_shard, prompt(256, 50)).wait(60)
        records = list(other_shard.catalog.records())
    at = sorted(records, key=lambda r: r.span_id)[1].meta
    segment = path / f"shards/main/segments/{at.segment:08d}.seg"
    bad = range(segment.stat().st_size) if whole_file else range(at.off, at.off + PAGE)
    read = os.pread

    def on_a_bad_disk(fd: int, n_bytes: int, off: int) -> bytes:
        """As the kernel does: what lies before the bad place, or EIO where that is nothing."""
        if not os.path.samestat(os.fstat(fd), segment.stat()) or off >= bad.stop:
            return read(fd, n_bytes, off)
        if off >= bad.start:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, min(n_bytes, bad.start - off), off)

    monkeypatch.setattr(os, "pread", on_a_bad_disk)
    done = CliRunner().invoke(app, ["rebuild", "--store", str(path), "--json"])
    found = json.loads(done.stdout)
    lost = [r for r in records if r.meta.segment == at.segment and r.meta.off in bad]
    assert 0 < len(lost) < len(records)
    assert (found["spans"], found["torn"], found["damaged"]) == (len(records) - len(lost), 0, 0)
    n_pages = len(bad) // PAGE
    assert found["unreadable"] == n_pages
    assert found["notes"] == [f"{segment}: {n_pages} pages unreadable"]
    assert done.exit_code == 1
    open_store(geometry).check()


def test_the_identity_can_be_lost_too(open_store: Open, geometry: impress.Geometry) -> None:
    path = fill(open_store, geometry)
    before = json.loads((path / "impress.json").read_text())
    (path / "impress.json").unlink()
    found = rebuild_store(path)
    assert found.notes and found.spans == 7
    assert json.loads((path / "impress.json").read_text()) == before
    assert_serves(open_store(geometry), longer_prompt(), 384)


def test_dry_run_changes_nothing_and_a_live_writer_is_left_alone(
    open_store: Open, geometry: impress.Geometry
) -> None:
    path = fill(open_store, geometry)
    index = path / "shards/main/index/data.mdb"
    before = index.stat().st_mtime_ns
    assert rebuild_store(path, dry_run=True).spans == 7
    assert index.stat().st_mtime_ns == before
    open_store(geometry)
    with pytest.raises(impress.StoreLocked):
        rebuild_store(path)


def test_nothing_to_rebuild_is_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["rebuild", "--store", str(tmp_path)])
    assert done.exit_code == 2 and "no store here" in done.stderr


def leave_header(
    store: impress.PrefixStore, of: SpanRecord, span: int, *, rows: bool = False
) -> None:
    """What a cut-off repack leaves in free space: a copy's header, with or without its rows."""
    header = read_header(store.ssd, of)
    (meta,) = store.ssd.reserve(of.meta.length).parts
    data = store.ssd.reserve(of.data_bytes)
    if rows:
        memory = aligned(of.data_bytes)
        store.ssd.read([Read(Slot(of.parts), 0, memory, None, PAGE)])
        store.ssd.write(data, 0, memory)
    copy = replace(of, span_id=span, meta=meta, parts=data.parts, labels=header.record.labels)
    raw = np.frombuffer(encode_header(replace(header, record=copy)), dtype=np.uint8)
    memory = aligned(len(raw))
    memory[:] = raw
    store.ssd.write(Slot((meta,)), 0, memory)


@pytest.mark.parametrize("span", [2, 3, 50])
def test_a_copy_that_a_power_cut_tore_takes_nothing_with_it(
    open_store: Open, geometry: impress.Geometry, span: int
) -> None:
    """A sound span gave way to a newer header, which was only then dropped: both were gone.

    Also under the same id: an id that no commit had named was given out again.
    """
    with open_store(geometry) as store:
        for seed in (9, 1):
            put_prompt(store, prompt(64, seed)).wait(60)
        store.evict(1)
        (record,) = store.catalog.records()
        assert record.span_id == 2
        leave_header(store, record, span)  # where the first was: found before the sound one
        path = store.path
    shutil.rmtree(path / "shards/main/index")
    found = rebuild_store(path)
    assert (found.spans, found.damaged, found.superseded) == (1, 1, 0)
    store = open_store(geometry)
    assert_serves(store, prompt(64, 1), 64)
    put_prompt(store, prompt(64, 2)).wait(60)
    assert max(r.span_id for r in store.catalog.records()) > span, "an id was given out again"


def test_of_sound_copies_the_newest_is_served(open_store: Open, geometry: impress.Geometry) -> None:
    with open_store(geometry) as store:
        put_prompt(store, prompt(64, 1)).wait(60)
        (record,) = store.catalog.records()
        leave_header(store, record, 7, rows=True)
        path = store.path
    shutil.rmtree(path / "shards/main/index")
    found = rebuild_store(path)
    assert (found.spans, found.damaged, found.superseded) == (1, 0, 1)
    store = open_store(geometry)
    assert [r.span_id for r in store.catalog.records()] == [7]
    assert_serves(store, prompt(64, 1), 64)


def test_of_two_sound_spans_with_one_id_the_longer_is_kept(
    open_store: Open, geometry: impress.Geometry
) -> None:
    with open_store(geometry) as store:
        for n, seed in ((64, 1), (128, 2)):
            put_prompt(store, prompt(n, seed)).wait(60)
        path = store.path
        longer = max(store.catalog.records(), key=lambda r: r.n_windows)
        leave_header(store, longer, 1, rows=True)
        store.ssd.write(Slot((longer.meta,)), 0, aligned(PAGE))
    shutil.rmtree(path / "shards/main/index")
    found = rebuild_store(path)
    assert (found.spans, found.damaged, found.superseded) == (1, 0, 1)
    store = open_store(geometry)
    store.check()
    assert_serves(store, prompt(128, 2), 128)
    assert store.lookup(prompt(64, 1)) == 0


def test_spans_whose_rows_are_gone_with_their_segment_are_damage(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Their headers, in a segment that is there, passed for older copies, and the command said 0:
    nothing was lost."""
    path = fill(open_store, geometry)
    with open_store(geometry) as store:
        records = list(store.catalog.records())
    (gone,) = {r.parts[0].segment for r in records if r.span_id == 3}
    assert {r.meta.segment for r in records} == {0} and gone != 0
    (path / f"shards/main/segments/{gone:08d}.seg").unlink()
    done = CliRunner().invoke(app, ["rebuild", "--store", str(path), "--json"])
    found = json.loads(done.stdout)
    assert (found["spans"], found["damaged"], found["superseded"]) == (len(records) - 1, 1, 0)
    assert done.exit_code == 1
    assert sum(open_store(geometry).lookup(prompt(256, seed)) == 256 for seed in range(6)) == 5


@pytest.mark.parametrize("stored_with", ["importance", "nothing"])
def test_a_span_keeps_the_order_that_a_lost_index_had_learnt(
    open_store: Open, geometry: impress.Geometry, stored_with: str
) -> None:
    """It was written back to the order of its first store, which importance alone judged: "saves
    37 %" was said of a request that read a fifth more. Without importance it read "0 B -> 0 B"."""
    rng, importance = np.random.default_rng(9), None
    if stored_with == "importance":
        importance = rng.random((geometry.n_layers, 256)).astype(np.float32)
    store = open_store(geometry)
    put_prompt(store, prompt(256), importance=importance).wait(60)
    look(store, prompt(256), times=16)
    assert store.repack().moved == 1
    path = store.path
    store.close()
    rebuild_store(path)
    store = open_store(geometry)
    for dry_run in (True, False):
        (span,) = store.repack(dry_run=dry_run).spans
        assert (span.outcome, span.before, span.after) == ("lies well", None, None)
    assert_serves(store, prompt(256), 256)


def test_an_order_by_importance_stays_while_one_request_has_chosen(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """After a first request a table said that requests read 0 B, where it had told an estimate."""
    importance = np.random.default_rng(9).random((geometry.n_layers, 256)).astype(np.float32)
    store = open_store(geometry)
    put_prompt(store, prompt(256), importance=importance).wait(60)
    (before,) = store.repack(dry_run=True).spans
    look(store, prompt(256), times=1)
    assert store.repack(dry_run=True).spans == [before]
    assert before.outcome == "lies well" and before.before is not None
