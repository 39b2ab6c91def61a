"""An identity or an index lost from beside segments, made again from several shards or from one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import assert_serves, flip_a_bit, prompt, put_prompt
from console import assert_refused, run, run_json

import impress
from impress.upkeep.rebuild import rebuild_store
from impress.upkeep.verify import verify_store
from impress.write.directory import Shard

Open = Callable[..., impress.PrefixStore]


def two_shards(open_store: Open, geometry: impress.Geometry, full: int | None) -> Path:
    """A store with two shards and one prompt, in shard `full` (None: in neither); closed."""
    shards = [open_store(geometry, shard=n, follow_every_s=0) for n in (0, 1)]
    if full is not None:
        assert put_prompt(shards[full], prompt(256)).wait(60)
    for shard in shards:
        shard.close()
    return shards[0].path


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("full", [0, 1])
def test_a_lost_identity_is_found_whatever_shard_has_a_span(
    open_store: Open, geometry: impress.Geometry, full: int, dry_run: bool
) -> None:
    """A shard without any span ended the rebuild: "no store here"."""
    path = two_shards(open_store, geometry, full)
    file = path / "impress.json"
    said = file.read_text()
    file.unlink()
    for mode in ("rw", "r"):  # not "nothing is stored here" or "some other folder"
        with pytest.raises(impress.FormatError, match=r"json is missing; impress rebuild makes"):
            open_store(geometry, mode=mode)
    found = rebuild_store(path, dry_run=dry_run)
    assert (found.spans, len(found.notes), found.busy_shards) == (1, 1, [])
    assert file.exists() != dry_run
    if not dry_run:
        assert file.read_text() == said
        assert_serves(open_store(geometry), prompt(256), 256)


def test_without_an_identity_and_any_span_there_is_nothing_to_rebuild(
    open_store: Open, geometry: impress.Geometry
) -> None:
    path = two_shards(open_store, geometry, None)
    (path / "impress.json").unlink()
    with pytest.raises(impress.FormatError, match="no store here"):
        rebuild_store(path)
    assert not (path / "shards/main/index.old").exists()  # its index was not replaced


@pytest.mark.parametrize("lost", ["emptied", "unlinked"])
def test_an_index_whose_file_holds_nothing_is_not_begun_anew(
    open_store: Open, geometry: impress.Geometry, lost: str
) -> None:
    """Its segments counted as free: a wrong purge, or the next store, took what a rebuild finds."""
    store = open_store(geometry)
    assert put_prompt(store, prompt(256)).wait(60)
    store.close()
    path = store.path
    data = path / "shards/main/index/data.mdb"
    if lost == "emptied":
        data.write_bytes(b"")
    else:
        data.unlink()
    for mode in ("rw", "r"):
        with pytest.raises(impress.FormatError, match=r"main is missing; impress rebuild"):
            open_store(geometry, mode=mode)
    assert any("missing" in problem.what for problem in verify_store(path).problems)
    assert not data.exists() or not data.stat().st_size  # no look made one either
    assert rebuild_store(path).spans == 1
    assert_serves(open_store(geometry), prompt(256), 256)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_shard_that_cannot_be_read_is_named_and_the_others_are_rebuilt(
    open_store: Open, geometry: impress.Geometry, bad: int
) -> None:
    """One file that could not be opened ended it for all: of two shards that lost their indexes
    neither was served, or one was made again without a word."""
    shards = [open_store(geometry, shard=n, follow_every_s=0) for n in (0, 1)]
    for n, store in enumerate(shards):
        assert put_prompt(store, prompt(256, n)).wait(60)
    for store in shards:
        store.close()
    path, names = shards[0].path, ["main", "1"]
    segment = next((path / "shards" / names[bad] / "segments").iterdir())
    aside = segment.rename(path / "aside")
    segment.symlink_to(path / "gone")
    shutil.rmtree(path / "shards" / names[1 - bad] / "index")
    done, said = run_json("rebuild", "--store", path)
    assert (done.returncode, said["spans"], said["failed_shards"]) == (1, 1, [names[bad]])
    failed = f"shard {names[bad]} failed: {segment}: No such file or directory"
    (other,) = {*said["notes"]} - {failed}
    assert other.startswith(f"there is no index of shard {names[1 - bad]} ")
    segment.unlink()
    aside.rename(segment)  # and that shard is as it was
    store = open_store(geometry)
    store.follow()
    for n in (0, 1):
        assert_serves(store, prompt(256, n), 256)


@pytest.mark.parametrize("how", ["link", "loop", "file", "empty"])
def test_a_shard_whose_segments_are_not_mounted_is_named_and_the_others_are_rebuilt(
    open_store: Open, geometry: impress.Geometry, how: str
) -> None:
    """It was passed over without a word, with status 0. A process that leased through it took its
    rows for gone, and its own spans behind them out of the tree for good. So it did where the place
    of the mount was an empty folder, and a purge began by erasing another shard."""
    main, other = (open_store(geometry, shard=n, follow_every_s=0) for n in (0, 1))
    assert put_prompt(other, prompt(256)[:128]).wait(60)
    main.follow()
    assert put_prompt(main, prompt(256), start=128).wait(60)
    main.close()
    other.close()
    path, segments = main.path, main.path / "shards/1/segments"
    aside = segments.rename(path / "aside")
    if how == "file":
        segments.touch()
    elif how == "empty":
        segments.mkdir()
    else:
        segments.symlink_to(segments if how == "loop" else path / "gone")
    done, said = run_json("rebuild", "--store", path)
    assert (done.returncode, said["spans"], said["failed_shards"]) == (1, 1, ["1"])
    why = f"{segments} is a link that leads to no folder: is its disk mounted?"
    if how == "file":
        why = f"{segments} is a file where a folder is to be"
    elif how == "empty":
        why = (
            f"{segments} is empty, but the index beside it names 1 spans: mount its disk, or if "
            f"its files are lost, delete {segments.parent}"
        )
    assert f"shard 1 failed: {why}" in said["notes"]
    assert_refused(run("purge", "--store", path, "--namespace", "test"), "nothing is purged", why)
    with open_store(geometry, shard=0, follow_every_s=0) as store:
        assert store.left_out() == {"1": why}
        assert_serves(store, prompt(256), 0)
    error = impress.FormatError if how == "empty" else impress.StoreFailed
    with pytest.raises(error, match="is its disk mounted" if how == "empty" else re.escape(why)):
        open_store(geometry, shard=1)
    segments.rmdir() if how == "empty" else segments.unlink()
    aside.rename(segments)
    with open_store(geometry, shard=0, follow_every_s=0) as store:
        assert_serves(store, prompt(256), 256)


def test_a_lost_identity_is_found_beside_a_shard_that_cannot_be_read(
    open_store: Open, geometry: impress.Geometry
) -> None:
    path = two_shards(open_store, geometry, 1)
    (path / "impress.json").unlink()
    segment = path / "shards/main/segments/00000000.seg"
    segment.unlink(missing_ok=True)
    segment.symlink_to(path / "gone")
    found = rebuild_store(path)
    assert (found.spans, found.failed_shards) == (1, ["main"])
    assert (path / "impress.json").exists()


def test_where_no_shard_can_be_read_a_rebuild_fails(
    open_store: Open, geometry: impress.Geometry
) -> None:
    path = two_shards(open_store, geometry, 0)
    for segments in path.glob("shards/*/segments"):
        shutil.rmtree(segments)
        segments.mkdir()
        (segments / f"{2**20 * (segments.parent.name == '1'):08d}.seg").symlink_to(path / "gone")
    with pytest.raises(impress.StoreFailed, match=r"00000000\.seg: No such file"):
        rebuild_store(path)


def test_segments_that_hold_no_span_are_not_sent_to_a_rebuild_by_the_rebuild(
    open_store: Open, geometry: impress.Geometry
) -> None:
    path = two_shards(open_store, geometry, 0)
    (path / "impress.json").unlink()
    for segment in path.glob("shards/*/segments/*.seg"):
        segment.write_bytes(bytes(segment.stat().st_size))
    with pytest.raises(impress.FormatError, match="no span to make it from"):
        rebuild_store(path)


def test_a_segment_that_is_gone_is_called_so(open_store: Open, geometry: impress.Geometry) -> None:
    """An open for writing said "two spans claim the same space" of a store with one span."""
    path = two_shards(open_store, geometry, 0)
    (path / "shards/main/segments/00000000.seg").unlink()
    with pytest.raises(
        impress.FormatError, match=r"do not agree \(segment 0 is missing: is its disk"
    ):
        open_store(geometry)


def test_of_what_is_noted_to_be_erased_another_shards_ids_are_none_that_a_rebuild_goes_on_from(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """In a renamed folder the highest id was theirs, so its own ids counted for nothing, and
    another span got the id of one whose header still lies there."""
    with open_store(geometry, shard=0, repack_every_s=0) as store:
        for seed in (1, 2):
            assert put_prompt(store, prompt(128, seed)).wait(60)
        kept, lost = sorted(store.catalog.records(), key=lambda record: record.span_id)
        slot = store.ssd.reserve(kept.data_bytes)
        assert slot is not None
        theirs = replace(kept, span_id=Shard(store.path, 1).spans.start + 7, parts=slot.parts)
        store.index.commit({}, intend=[theirs])
        store.ssd.free(slot)
    flip_a_bit(store.path, lost.parts[0])
    found = rebuild_store(store.path)
    assert (found.spans, found.damaged) == (1, 1)
    with open_store(geometry, shard=0) as again:
        assert put_prompt(again, prompt(128, 3)).wait(60)
        assert max(record.span_id for record in again.catalog.records()) > lost.span_id
        assert [*again.index.to_erase()] == [theirs.span_id]  # under its own name it is erased
        again.check()
