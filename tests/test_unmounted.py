"""Shards on a disk that is not mounted: they are unread, which is not the same as not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

import pytest
from conftest import assert_serves, prompt, put_prompt
from console import assert_refused, run, run_json
from test_shards import APART, ready

import impress
import impress.write.reclaim
from impress.write.directory import Shard, shards_of

Open = Callable[..., impress.PrefixStore]


@pytest.fixture
def path(open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two shards, closed: the second has a prompt's first half, and main what hangs from that."""
    monkeypatch.setattr(impress.write.reclaim, "YIELD_TIMEOUT_S", 0)
    main, other = (open_store(geometry, **APART) for _ in range(2))
    ready(other, prompt(256)[:128])
    main.follow()
    ready(main, prompt(256), start=128)
    main.close()
    other.close()
    return main.path


def unmount(folder: Path, how: str) -> Path:
    """Take a folder away, and leave what its disk leaves; where it is now."""
    away = folder.rename(folder.parents[2] / "away")
    if how == "link":
        folder.symlink_to(folder.parents[2] / "not mounted")
    else:
        folder.mkdir()
    return away


def mount(folder: Path, away: Path) -> None:
    folder.unlink() if folder.is_symlink() else folder.rmdir()
    away.rename(folder)


@pytest.mark.parametrize("how", ["link", "empty"])
def test_what_hangs_from_a_shard_whose_disk_is_not_mounted_is_kept(
    open_store: Open, geometry: impress.Geometry, path: Path, how: str
) -> None:
    """That shard counted as deleted: the next server on main deleted, and erased, what hung from
    it, and nothing was left of that once the disk was mounted again."""
    shard = path / "shards/1"
    away = unmount(shard, how)
    with open_store(geometry, shard=0, **APART) as store:
        assert [*store.left_out()] == ["1"] and "is its disk mounted?" in store.left_out()["1"]
        assert store.lookup(prompt(256)) == 0
    mount(shard, away)
    with open_store(geometry, shard=0, **APART) as store:
        assert_serves(store, prompt(256), 256)
        store.check()


@pytest.mark.parametrize("how", ["link", "empty"])
def test_a_server_begins_no_shard_in_the_place_of_one_whose_disk_is_not_mounted(
    open_store: Open, geometry: impress.Geometry, path: Path, how: str
) -> None:
    """It did in an empty folder: with that, nothing was unread, and the next server on main deleted
    what hung from the shard that lay on the disk. Where it was a link, it did not start at all."""
    shard = path / "shards/1"
    away = unmount(shard, how)
    with open_store(geometry, **APART), open_store(geometry, **APART):
        assert [s.name for s in shards_of(path)] == ["main", "1", "2"]
        with pytest.raises(impress.StoreFailed, match=r"is its disk mounted\?"):
            open_store(geometry, shard=1, **APART)
    mount(shard, away)  # nothing lies there
    with open_store(geometry, shard=0, **APART) as store:
        assert_serves(store, prompt(256), 256)


def test_a_disk_that_is_mounted_while_a_server_runs_is_read_from_then_on(
    open_store: Open, geometry: impress.Geometry, path: Path
) -> None:
    away = unmount(path / "shards/1", "link")
    with open_store(geometry, shard=0, **APART) as store:
        mount(path / "shards/1", away)
        store.follow()
        assert_serves(store, prompt(256), 256)
        assert not store.left_out()


def test_what_hangs_from_a_shard_that_was_deleted_goes(
    open_store: Open, geometry: impress.Geometry, path: Path
) -> None:
    (path / "shards/1").rename(path / "away")
    with open_store(geometry, shard=0, **APART) as store:
        assert not store.left_out()
        store.flush()
        assert not [*store.index.spans()]


@pytest.mark.parametrize("how", ["link", "empty"])
def test_commands_name_a_shard_whose_disk_is_not_mounted_and_begin_nothing_there(
    path: Path, how: str
) -> None:
    """`purge` said "erased" with status 0 while that shard kept all of it; `verify` said "sound",
    or that what hung from it was in vain."""
    shard = path / "shards/1"
    away = unmount(shard, how)
    said = "shards/1 is empty: is its" if how == "empty" else "1 is a link that leads to no folder"
    done = run("purge", "--store", path, "--namespace", "test")
    assert_refused(done, "nothing is purged", said, "disk mounted?")
    done, found = run_json("verify", "--store", path)
    (problem,) = found["problems"]
    assert (done.returncode, found["waiting"]) == (1, 1) and said in problem["what"]
    done, found = run_json("inspect", "--store", path)
    assert (done.returncode, found["failed_shards"]) == (0, ["1"]) and said in done.stderr
    done, found = run_json("rebuild", "--store", path)
    assert (done.returncode, found["spans"], found["failed_shards"]) == (1, 1, ["1"])
    assert any(said in note for note in found["notes"])
    done = run("repack", "--store", path)
    assert done.returncode == 1 and said in done.stderr
    assert how == "link" or not [*shard.iterdir()]
    mount(shard, away)
    assert run("verify", "--store", path).returncode == 0
    assert run("purge", "--store", path, "--namespace", "test").returncode == 0


@pytest.mark.parametrize("command", ["verify", "inspect", "rebuild", "repack", "purge"])
def test_all_shards_on_a_disk_that_is_not_mounted_are_no_empty_store(
    open_store: Open, geometry: impress.Geometry, path: Path, command: str
) -> None:
    """`verify` said "sound (0 spans)"."""
    (path / "shards").rename(path / "away")
    (path / "shards").symlink_to(path / "not mounted")
    named = ["--namespace", "test"] if command == "purge" else []
    said = "shards is a link that leads to no folder: is its disk mounted?"
    assert_refused(run(command, "--store", path, *named), said)
    for mode in ("r", "rw"):
        with pytest.raises(impress.StoreFailed, match="shards is a link that leads to no folder"):
            open_store(geometry, mode)


def test_a_shard_that_may_not_be_listed_is_not_taken_for_one_that_is_not_mounted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.iterdir

    def iterdir(folder: Path) -> object:
        if folder == path / "shards/1":
            raise PermissionError(13, "Permission denied", str(folder))
        return real(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert not Shard(path, 1).unmounted()
    assert [shard.name for shard in shards_of(path)] == ["main", "1"]


def test_a_shard_that_is_being_made_is_not_taken_for_one_that_is_not_mounted(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that looked while another began its shard, which a sync or a start that was cut off
    makes long, said that its disk was not mounted and its folder could be deleted."""
    store, real, found = open_store(geometry, **APART), os.fsync, list[dict[str, str]]()

    def looks(fd: int) -> None:
        monkeypatch.setattr(os, "fsync", real)
        store.follow()
        found.append(store.left_out())
        monkeypatch.setattr(os, "fsync", looks)
        real(fd)

    def ends(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", ends)
    with pytest.raises(KeyboardInterrupt):
        open_store(geometry, **APART)
    assert [folder.name for folder in (store.path / "shards").iterdir()] == ["main"]
    monkeypatch.setattr(os, "fsync", looks)
    with open_store(geometry, **APART) as other:
        monkeypatch.setattr(os, "fsync", real)
        assert Shard(store.path, 1).holder() == str(os.getpid())
        assert found and not any(found)
        ready(other, prompt(128))
    store.follow()
    assert_serves(store, prompt(128), 128)


def test_a_disk_that_is_mounted_and_empty_is_where_a_shard_may_begin(
    open_store: Open, geometry: impress.Geometry, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each replica has a disk of its own, those not started yet were said to lack theirs, and
    purge refused."""
    ahead, real = path / "shards/2", os.path.ismount
    ahead.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda at: at == str(ahead) or real(at))
    with open_store(geometry, shard=0, **APART) as store:
        assert not store.left_out()
    assert not Shard(path, 2).unmounted()
    with open_store(geometry, shard=2, **APART) as store:
        assert_serves(store, prompt(256), 256)


def test_nothing_is_given_up_while_the_disk_of_a_running_store_is_not_mounted(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """The files counted as deleted: each prompt that was asked for meanwhile left the index for
    good, though its rows were there again with the disk."""
    with open_store(geometry, dram_bytes=0) as store:
        for seed in (1, 2):
            ready(store, prompt(128, seed))
    store = open_store(geometry, dram_bytes=0)  # no file is open yet
    folder = store.ssd.folder
    for how in ("link", "empty"):
        away = unmount(folder, how)
        with store.lease(prompt(128, 1)) as lease:
            assert lease.miss_reason == "lost"
        mount(folder, away)
    stats = store.stats()
    assert stats["lost"] == {"unmounted": 2} and stats["quarantined_spans"] == 0
    for seed in (1, 2):
        assert_serves(store, prompt(128, seed), 128)


def test_no_segment_is_made_on_another_disk_than_the_stores(
    open_store: Open, geometry: impress.Geometry, tmp_path: Path
) -> None:
    """It was made in the folder that the disk is mounted over, and hidden once that was back."""
    elsewhere = Path(mkdtemp(dir="/dev/shm"))
    if elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system at /dev/shm")
    store = open_store(geometry, segment_bytes=1 << 20, dram_bytes=0)
    away = store.ssd.folder.rename(tmp_path / "away")
    try:
        store.ssd.folder.symlink_to(elsewhere)
        stored = put_prompt(store, prompt(128))
        assert not stored.wait(60) and "its folder is on another disk" in stored.refused
        assert not any(elsewhere.iterdir())
        mount(store.ssd.folder, away)
    finally:
        shutil.rmtree(elsewhere)
