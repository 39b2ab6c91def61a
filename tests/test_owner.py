"""Who owns a store's files once root was there, where links in it may lead, and what is kept where
readers are not known."""

from __future__ import annotations

import json
import logging
import os
import pwd
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SERVICE, assert_serves, prompt, put_prompt, said_by_a_child
from console import assert_refused, run, run_json, two_prompts

import impress
import impress.write.fitting
import impress.write.reclaim
from impress.cli import owner
from impress.errors import StoreFailed
from impress.upkeep.rebuild import rebuild_store
from impress.write.env import compact

Open = Callable[..., impress.PrefixStore]
UNKNOWN = 54321  # a container's user, say
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


def given_away(path: Path, uid: int = SERVICE) -> None:
    """Give the store to the service, as if that had made it."""
    for each in (path, *path.rglob("*")):
        os.chown(each, uid, uid, follow_symlinks=False)


def strangers(path: Path) -> list[str]:
    """Paths of a store that its service could not open."""
    found = [path, *path.rglob("*")]
    return [str(p) for p in found if (p.stat().st_uid, p.stat().st_gid) != (SERVICE, SERVICE)]


def service_may(*command: str) -> bool:
    try:
        done = subprocess.run(
            command, user=SERVICE, group=SERVICE, extra_groups=[], capture_output=True, check=False
        )
    except OSError:
        return False
    return done.returncode == 0


@root_only
@pytest.mark.parametrize(
    "command",
    [["inspect"], ["verify"], ["repack"], ["rebuild"], ["purge", "--namespace", "a test"]],
    ids=lambda command: command[0],
)
def test_what_root_makes_in_a_store_is_its_owners(place: Path, command: list[str]) -> None:
    """A service was locked out of readers/ by an inspect, and of its index by a purge."""
    if command[0] == "rebuild" and not service_may(sys.executable, "-c", ""):
        pytest.skip("another user cannot run this Python, by which a rebuild asks the old index")
    store = two_prompts(place / "store")
    lock = store / "shards/main/index/lock.mdb"
    lock.unlink()  # as a purge leaves it: whoever opens the index next makes it again
    given_away(store)
    done = run(*command, "--store", store)
    assert done.returncode == 0, done.stderr
    assert command[0] != "inspect" or (store / "shards/main/readers").is_dir()
    assert strangers(store) == []


@root_only
@pytest.mark.parametrize(
    "name, command",
    [
        ("lock", ["rebuild", "--dry-run"]),
        ("index/lock.mdb", ["inspect"]),
        ("index/data.mdb", ["inspect"]),
        ("segments/00000000.seg", ["purge", "--namespace", "a test"]),
        ("segments/00000000.seg", ["repack"]),
    ],
)
def test_root_writes_through_no_link_of_the_stores_owner(
    place: Path, name: str, command: list[str]
) -> None:
    """A store's owner could have root empty or overwrite any file in an `impress inspect`, by a
    link to it in the place of a lock or a table of readers, or of a segment for a purge."""
    store = two_prompts(place / "store")
    planted = store / "shards/main" / name
    victim = place / "victim"
    planted.rename(victim)
    victim.chmod(0o600)
    before = victim.read_bytes()
    planted.symlink_to(victim)
    given_away(store)
    done = run(*command, "--store", store)
    assert done.returncode and "Traceback" not in done.stderr, done
    assert victim.read_bytes() == before
    assert (victim.stat().st_uid, victim.stat().st_mode & 0o777) == (0, 0o600)
    if not name.startswith("segments"):
        assert_refused(done, f"{planted.name} is a symbolic link", "whose the store is")


@root_only
@pytest.mark.parametrize("uid", [SERVICE, UNKNOWN])
def test_root_becomes_the_stores_owner_for_good(place: Path, uid: int) -> None:
    """Where root made the folder and gave it away, its group is still root's: do not take that."""
    os.chown(place, uid, 0)
    try:
        known = pwd.getpwuid(uid)
        group, groups = known.pw_gid, {*os.getgrouplist(known.pw_name, known.pw_gid)}
    except KeyError:
        group, groups = 65534, set[int]()

    def become() -> None:
        owner.become_owner(place)
        assert os.getresuid() == (uid,) * 3 and os.getresgid() == (group,) * 3
        assert set(os.getgroups()) == groups
        with pytest.raises(PermissionError):
            os.setuid(0)
        assert "whose the store is" in owner.whose()

    assert said_by_a_child(become) == "returned"
    assert os.geteuid() == 0 and not owner.whose()


@root_only
def test_in_whose_name_root_works(place: Path) -> None:
    """A store that is not there yet is made for the folder's owner; in a folder of root's where
    others write, the files there tell whose store it is, and a link does not hide that."""
    (mine := place / "mine").mkdir()
    (theirs := place / "theirs").mkdir()
    os.chown(theirs, SERVICE, SERVICE)
    (place / "link").symlink_to(theirs)
    (place / "gone").symlink_to(theirs / "nothing")
    (place / "loop").symlink_to(place / "loop")
    for store, uid in (
        (mine, 0), (mine / "new/store", 0), (theirs, SERVICE), (theirs / "new/store", SERVICE),
        (place / "link", SERVICE), (place / "link/new", SERVICE), (place / "gone", 0),
        (place / "loop", 0), (place / ("x" * 300), 0),
    ):  # fmt: skip
        assert owner._owner_of(store) == uid, store
    (mine / "shards").symlink_to("/")
    assert owner._owner_of(mine) == 0
    os.chown(mine / "shards", SERVICE, SERVICE, follow_symlinks=False)
    assert owner._owner_of(mine) == SERVICE
    assert owner._owner_of(mine / "new") == 0


@root_only
def test_what_a_command_writes_elsewhere_is_the_owners_too(place: Path) -> None:
    """It reads as the owner, too: where that user may not, it says in whose name it asked."""
    store = two_prompts(place / "store")
    given_away(store)
    (theirs := place / "theirs").mkdir()
    os.chown(theirs, SERVICE, SERVICE)
    args = ["repack", "--dry-run", "--store", store, "--json"]
    assert run(*args, theirs / "report.json").returncode == 0
    assert strangers(theirs) == []
    assert_refused(run(*args, place / "report.json"), "cannot be written", "whose the store is")
    done, found = run_json("inspect", "--store", store)
    assert done.returncode == 0 and found["spans"] == 2
    (prompt_file := place / "prompt.json").write_text(json.dumps([1, 2, 3]))
    prompt_file.chmod(0o600)
    done = run("inspect", "--store", store, "--prefix", prompt_file)
    assert_refused(done, "Permission denied", "whose the store is")
    prompt_file.chmod(0o644)  # from here on others may read it
    for given, said in ((prompt_file, ""), ("-", "[1, 2, 3]")):
        done = run("inspect", "--store", store, "--prefix", given, input=said)
        assert done.returncode == 0, done.stderr


def test_a_root_that_may_become_nobody_else_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(groups: list[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(owner, "_owner_of", lambda store: UNKNOWN)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "setgroups", refused)
    with pytest.raises(StoreFailed, match=f"it is user {UNKNOWN}'s, and root cannot act as that"):
        owner.become_owner(tmp_path)
    assert not owner.whose()


@pytest.mark.parametrize("mode", ["rw", "r"])
@pytest.mark.parametrize("name", ["lock", "index/lock.mdb", "index/data.mdb"])
def test_a_link_in_the_place_of_a_file_that_is_written_is_refused(
    open_store: Open, geometry: impress.Geometry, tmp_path: Path, name: str, mode: str
) -> None:
    """The file it led to was emptied, or written over."""
    with open_store(geometry) as store:
        put_prompt(store, prompt(256)).wait(60)
    path = store.path / "shards/main" / name
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    before = elsewhere.read_bytes()
    path.symlink_to(elsewhere)
    if (name, mode) == ("lock", "r"):  # a reader locks no shard
        assert_serves(open_store(geometry, "r"), prompt(256), 256)
    else:
        with pytest.raises(StoreFailed, match=f"{path.name} is a symbolic link"):
            open_store(geometry, mode, shard=0 if mode == "rw" else None)
    assert elsewhere.read_bytes() == before


def test_links_to_folders_are_followed(
    open_store: Open, geometry: impress.Geometry, tmp_path: Path
) -> None:
    """A store, or its segments, may lie on another disk than its path says."""
    with open_store(geometry) as store:
        put_prompt(store, prompt(256)).wait(60)
    main = store.path / "shards/main"
    for folder in (main / "segments", main, store.path):
        there = folder.rename(tmp_path / f"{folder.name} on another disk")
        folder.symlink_to(there)
    with open_store(geometry) as store:
        assert_serves(store, prompt(256), 256)
        assert store.purge() == (1, 0)


def test_a_link_in_the_place_of_an_index_is_refused(
    open_store: Open, geometry: impress.Geometry, tmp_path: Path
) -> None:
    """It was followed. But a purge deleted what lay beside the folder it led to under the names of
    its own, a rebuild put the new index beside the link, and from then on neither worked."""
    with open_store(geometry) as store:
        put_prompt(store, prompt(256)).wait(60)
    index, there = store.path / "shards/main/index", tmp_path / "fast"
    (there / "index.old").mkdir(parents=True)
    index.rename(there / "index")
    index.symlink_to(there / "index")
    for call in (
        lambda: open_store(geometry), lambda: open_store(geometry, "r"),
        lambda: compact(index), lambda: rebuild_store(store.path),
    ):  # fmt: skip
        with pytest.raises(StoreFailed, match=r"index is a symbolic link.* put the folder itself"):
            call()
    assert len([*there.iterdir()]) == 2 and index.is_symlink()


@root_only
def test_what_a_process_of_roots_stores_beside_a_service_is_the_services(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(impress.write.fitting, "ENOUGH_TOKENS", 256)
    probes = ("pca25-v1",)
    with open_store(geometry, probes=probes) as store:
        put_prompt(store, prompt(256)).wait(60)
    given_away(store.path)
    with open_store(geometry, namespace="other", shard=1, probes=probes) as beside:
        for seed in range(2):
            assert put_prompt(beside, prompt(256, seed)).wait(60)
        beside.flush()
    assert (store.path / "shards/1/params").is_dir()
    assert strangers(store.path) == []


@root_only
def test_a_roots_file_that_is_linked_elsewhere_stays_roots(
    open_store: Open, geometry: impress.Geometry, tmp_path: Path
) -> None:
    """Otherwise the store's owner could get any file by naming it as one of the store's."""
    with open_store(geometry) as store:
        put_prompt(store, prompt(256)).wait(60)
    given_away(store.path)
    secret = tmp_path / "secret"
    secret.write_text("")
    lock = store.path / "shards/main/lock"
    lock.unlink()
    lock.hardlink_to(secret)
    open_store(geometry).close()
    assert secret.stat().st_uid == 0


def test_where_readers_cannot_be_listed_somebody_may_be_reading(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """This was taken for no reader at all, and space was used again under a live lease."""
    monkeypatch.setattr(impress.write.reclaim, "YIELD_TIMEOUT_S", 0)
    store = open_store(geometry, follow_every_s=0, repack_every_s=0)
    put_prompt(store, prompt(256)).wait(60)
    readers = store.path / "shards/main/readers"
    readers.symlink_to(readers)  # nobody can list it, not even root
    with caplog.at_level(logging.WARNING, "impress"):
        assert store.evict(1 << 30) > 0
        for seed in range(1, 4):
            put_prompt(store, prompt(256, seed)).wait(60)
        assert store.stats()["limbo_bytes"] > 0
        assert caplog.text.count(str(readers)) == 1
        readers.unlink()
        store.follow()
    assert store.stats()["limbo_bytes"] == 0
    store.check()


def test_a_reader_that_cannot_say_so_reads_on_and_tells_it_once(
    open_store: Open, geometry: impress.Geometry, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(geometry)
    put_prompt(store, prompt(256)).wait(60)
    readers = store.path / "shards/main/readers"
    readers.symlink_to(readers)
    with caplog.at_level(logging.WARNING, "impress"):
        reader = open_store(geometry, "r", follow_every_s=0)
        reader.follow()
        assert_serves(reader, prompt(256), 256)
    assert caplog.text.count("is not waited for") == 1
    reader.close()
    readers.unlink()
