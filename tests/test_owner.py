"""Who owns a store's files when root was there, and what is kept where readers are not known."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import assert_serves, prompt, put_prompt
from typer.testing import CliRunner

import impress
import impress.write.fitting
import impress.write.reclaim
from impress.cli.main import app

Open = Callable[..., impress.PrefixStore]
SERVICE = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


def given_away(path: Path) -> None:
    """The store becomes the service's, as if that had made it."""
    for each in (path, *path.rglob("*")):
        os.chown(each, SERVICE, SERVICE)


def strangers(path: Path) -> list[str]:
    """What of a store its service could not open."""
    found = [path, *path.rglob("*")]
    return [str(p) for p in found if (p.stat().st_uid, p.stat().st_gid) != (SERVICE, SERVICE)]


@root_only
@pytest.mark.parametrize(
    "command",
    [["inspect"], ["verify"], ["repack"], ["rebuild"], ["purge", "--namespace", "test"]],
    ids=lambda command: command[0],
)
def test_what_root_makes_in_a_store_is_its_owners(
    open_store: Open, geometry: impress.Geometry, command: list[str]
) -> None:
    """A service was locked out of readers/ by an inspect, and of its index by a purge."""
    with open_store(geometry) as store:
        put_prompt(store, prompt(256)).wait(60)
    lock = store.path / "shards/main/index/lock.mdb"
    lock.unlink()  # as a purge leaves it: whoever opens the index next makes it again
    given_away(store.path)
    done = CliRunner().invoke(app, [*command, "--store", str(store.path)])
    assert done.exit_code == 0, done.output
    assert command[0] != "inspect" or (store.path / "shards/main/readers").is_dir()
    assert strangers(store.path) == []


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
    """Who owns the store could else be given any file by naming it as one of the store's."""
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
    """It was taken for nobody, and space was used again under a live lease."""
    monkeypatch.setattr(impress.write.reclaim, "YIELD_TIMEOUT_S", 0)
    store = open_store(geometry, follow_every_s=0, repack_every_s=0)
    put_prompt(store, prompt(256)).wait(60)
    readers = store.path / "shards/main/readers"
    readers.symlink_to(readers)  # listed by nobody, root neither
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
