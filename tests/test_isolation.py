"""Tenants, secrets, erasure, forks: what must not leak, and must not hang."""

from __future__ import annotations

import gc
import mmap
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from conftest import (
    SMALL,
    assert_serves,
    everything_in,
    kv_of,
    prompt,
    put_prompt,
    said_by_a_child,
)
from typer.testing import CliRunner

import impress
from impress.cli.main import app
from impress.write import env
from impress.write.index import Index
from tiers.base import PAGE, Slot
from tiers.dram import DramTier
from tiers.engines import ENGINES, why_not
from tiers.errors import MediumError
from tiers.ssd import SsdTier

Open = Callable[..., impress.PrefixStore]


def secret_file(folder: Path, name: str, byte: int) -> str:
    path = folder / name
    path.write_bytes(bytes([byte]) * 32)
    path.chmod(0o600)
    return str(path)


def put_for(store: impress.PrefixStore, tokens: np.ndarray, tenant: str) -> None:
    store.store(tokens, *kv_of(tokens, store.geometry), wait_s=30, tenant=tenant)


def rows_of(tokens: np.ndarray, geometry: impress.Geometry) -> bytes:
    """The first rows of these tokens' keys, as they lie on the medium."""
    return kv_of(tokens, geometry)[0][0].transpose(1, 0, 2)[:5].tobytes()


def test_tenants_never_see_each_other(open_store: Open, geometry: impress.Geometry) -> None:
    store, tokens = open_store(geometry), prompt(128)
    put_for(store, tokens, "alice")
    store.flush()
    assert store.lookup(tokens, tenant="alice") == 128
    assert store.lookup(tokens, tenant="bob") == 0 and store.lookup(tokens) == 0


def test_without_the_servers_secret_nothing_is_found(
    open_store: Open, geometry: impress.Geometry, tmp_path: Path
) -> None:
    right, wrong = secret_file(tmp_path, "right", 1), secret_file(tmp_path, "wrong", 2)
    with open_store(geometry, tenant_secret_file=right) as store:
        put_for(store, prompt(128), "alice")
        store.flush()
        assert store.lookup(prompt(128), tenant="alice") == 128
    for settings in ({"tenant_secret_file": wrong}, {}):
        with open_store(geometry, **settings) as store:
            assert store.lookup(prompt(128), tenant="alice") == 0
    held = everything_in(tmp_path / "store")
    assert bytes([1]) * 32 not in held and b"alice" not in held


@pytest.mark.parametrize(
    ("n_bytes", "mode", "said"),
    [(8, 0o600, "has 8 bytes"), (32, 0o644, "open to others"), (None, 0, "No such file")],
)
def test_a_bad_secret_file_is_one_line(
    open_store: Open, geometry: impress.Geometry, tmp_path: Path, n_bytes: int | None, mode: int,
    said: str,
) -> None:  # fmt: skip
    path = tmp_path / "secret"
    if n_bytes is not None:
        path.write_bytes(bytes(n_bytes))
        path.chmod(mode)
    with pytest.raises(impress.ConfigError, match=said):
        open_store(geometry, tenant_secret_file=str(path))


def test_purging_a_tenant_leaves_no_byte_of_it(
    open_store: Open, geometry: impress.Geometry
) -> None:
    hers, his = prompt(256, 1), prompt(256, 2)
    with open_store(geometry) as store:
        put_for(store, hers, "alice")
        put_for(store, his, "bob")
        store.flush()
        path = store.path
    marks = [hers.tobytes()[:256], rows_of(hers, geometry)]
    kept = [his.tobytes()[:256], rows_of(his, geometry)]
    held = everything_in(path)
    assert all(mark in held for mark in marks + kept)
    done = CliRunner().invoke(app, ["purge", "--store", str(path), "--tenant", "alice"])
    assert done.exit_code == 0 and "1 span erased" in done.stdout, done.output
    held = everything_in(path)
    assert not any(mark in held for mark in marks)
    assert all(mark in held for mark in kept)
    with open_store(geometry) as store:
        store.check()
        assert store.lookup(hers, tenant="alice") == 0
        assert store.lookup(his, tenant="bob") == 256


def test_a_namespace_is_purged_by_name_and_only_that(
    open_store: Open, geometry: impress.Geometry
) -> None:
    for name in ("one", "two"):
        with open_store(geometry, namespace=name) as store:
            put_prompt(store, prompt(128))
            store.flush()
            path = store.path
    run = CliRunner().invoke
    assert run(app, ["purge", "--store", str(path), "--namespace", "one"]).exit_code == 0
    with open_store(geometry, namespace="one") as store:
        assert store.lookup(prompt(128)) == 0
    with open_store(geometry, namespace="two") as store:
        assert_serves(store, prompt(128), 128)
        digest = store.namespace.hex()
    unknown = run(app, ["purge", "--store", str(path), "--namespace", "three"])
    assert unknown.exit_code == 2 and "is not stored here" in unknown.stderr
    assert run(app, ["purge", "--store", str(path)]).exit_code == 2
    assert run(app, ["purge", "--store", str(path), "--namespace", digest[:12]]).exit_code == 0
    with open_store(geometry, namespace="two") as store:
        assert store.lookup(prompt(128)) == 0


def test_what_a_lease_holds_is_erased_when_it_ends(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store, tokens = open_store(geometry, dram_bytes=0, follow_every_s=0), prompt(256, 3)
    put_prompt(store, tokens)
    store.flush()
    mark = rows_of(tokens, geometry)
    with store.lease(tokens) as lease, lease.session() as session:
        assert store.purge() == (1, 1)
        assert store.lookup(tokens) == 0
        k, _, _ = session.retrieve(0, None)
        assert np.array_equal(k.numpy(), kv_of(tokens, geometry)[0][0])
        assert mark in everything_in(store.path / "shards/main/segments")
    store.flush()  # the committer does it
    assert mark not in everything_in(store.path / "shards/main/segments")
    store.check()


def test_an_erasure_that_fails_is_said(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once ended the committer's batch: any other space to be reclaimed stayed taken."""
    store = open_store(geometry, dram_bytes=0)
    for seed in (1, 2):
        put_prompt(store, prompt(128, seed))
    store.flush()

    def failing(self: SsdTier, slot: object) -> None:
        raise MediumError("no")

    monkeypatch.setattr(SsdTier, "erase", failing)
    with pytest.raises(impress.StoreFailed, match="not all could be overwritten"):
        store.purge()
    assert store.counters["unerased_spans"] == 2
    store.check()


def no_room(*args: object, **named: object) -> None:
    raise impress.StoreFailed("index: No space left on device")


@pytest.mark.parametrize("then", ["purge", "flush", "close"])
def test_a_purge_that_the_index_did_not_take_is_not_done_yet(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """It was said to be done, as if a lease held the span, and a reopened store served it."""
    store, tokens = open_store(geometry, dram_bytes=0), prompt(256, 3)
    put_prompt(store, tokens).wait(60)
    mark = rows_of(tokens, geometry)
    with monkeypatch.context() as faulty:
        faulty.setattr(store.index, "commit", no_room)
        for _ in range(2):
            with pytest.raises(impress.StoreFailed, match=r"not purged: index: No space.*again"):
                store.purge()
        assert store.lookup(tokens) == 0
        store.check()
    if then == "purge":
        assert store.purge() == (1, 0) and store.counters["purged_spans"] == 1
    elif then == "flush":
        with pytest.raises(impress.StoreFailed, match="No space"):  # an earlier failure
            store.flush()
    if then != "close":
        assert store.ssd.usage().used == 0
        store.check()
    store.close()
    assert mark not in everything_in(store.path / "shards/main/segments")
    with open_store(geometry) as again:
        assert again.lookup(tokens) == 0


def test_a_purge_by_command_that_the_index_did_not_take_is_one_line(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(geometry) as store:
        put_prompt(store, prompt(256)).wait(60)
        path = store.path
    purge = ["purge", "--store", str(path), "--namespace", "test"]
    with monkeypatch.context() as faulty:
        faulty.setattr(Index, "commit", no_room)
        done = CliRunner().invoke(app, purge)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1, done.output
    assert "not purged: index: No space left on device" in done.stderr and not done.stdout
    again = CliRunner().invoke(app, purge)
    assert again.exit_code == 0 and "1 span erased" in again.stdout


def test_a_purge_does_not_fail_with_a_store_that_waited_with_it(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One transaction was to hold both; the store's sync failed, and the purge failed with it."""
    store, hers = open_store(geometry, dram_bytes=0), prompt(256, 1)
    put_for(store, hers, "alice")
    store.flush()
    begun, going_on, sync = threading.Event(), threading.Event(), SsdTier.sync
    (record,) = store.catalog.records()
    take_out, late = store.catalog.purge, []

    def fails_once_let_go(self: SsdTier, slots: Iterable[Slot]) -> None:
        slots = list(slots)
        if going_on.is_set() and not any(record.meta in slot.parts for slot in slots):
            raise MediumError("ssd: no")  # except for what is erased
        begun.set()
        assert going_on.wait(60)
        sync(self, slots)

    def stored_behind(root: bytes) -> list[int]:
        put_for(store, prompt(128, 2), "bob")
        assert begun.wait(60)
        rows = kv_of(prompt(128, 3), geometry)
        late.append(store.store(prompt(128, 3), *rows, wait_s=30, tenant="bob"))
        return take_out(root)

    monkeypatch.setattr(SsdTier, "sync", fails_once_let_go)
    monkeypatch.setattr(store.catalog, "purge", stored_behind)
    purged: list[tuple[int, int]] = []
    purging = threading.Thread(target=lambda: purged.append(store.purge("alice")))
    purging.start()
    while len(store._home.committer._jobs) < 3:  # type: ignore[union-attr]
        pass  # the store, the purge and what it waits for; the suite's time limit ends it
    going_on.set()
    purging.join(60)
    assert purged == [(1, 0)]
    with pytest.raises(impress.StoreFailed, match="ssd: no"):
        late[0].wait(60)
    assert rows_of(hers, geometry) not in everything_in(store.path / "shards/main/segments")


def test_everything_is_private(open_store: Open, geometry: impress.Geometry) -> None:
    store = open_store(geometry)
    put_prompt(store, prompt(128))
    store.flush()
    for path in [store.path, *store.path.rglob("*")]:
        mode = path.stat().st_mode & 0o777
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_a_forked_child_is_refused_in_one_line(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Its threads stayed in the parent: a read would wait for ever, a commit corrupt the index."""
    store = open_store(geometry)
    put_prompt(store, prompt(128))
    store.flush()
    came, go = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"nothing was refused"
        try:
            store.lease(prompt(128))
        except impress.ImpressError as err:
            said = str(err).encode()
        store.close()  # must not touch what is its parent's
        os.write(go, said)
        os._exit(0)
    os.waitpid(child, 0)
    assert b"opened before a fork" in os.read(came, 1000)
    os.close(came)
    os.close(go)
    assert_serves(store, prompt(128), 128)


@pytest.mark.parametrize(
    "call", ["flush", "evict", "purge", "follow", "stats", "check", "drop_caches"]
)
def test_what_waits_for_a_thread_is_refused_in_a_child_at_once(
    open_store: Open, geometry: impress.Geometry, call: str
) -> None:
    """It waited 150 seconds for one left in the parent; `follow` waited for its lock, for ever.
    What looks into the store or its caches waited for a lock that was taken at the fork."""
    store = open_store(geometry)
    put_prompt(store, prompt(128))
    store.flush()
    calls = {"flush": store.flush, "evict": lambda: store.evict(1), "purge": store.purge,
             "follow": store.follow, "stats": store.stats, "check": store.check,
             "drop_caches": store.drop_caches}  # fmt: skip
    assert "opened before a fork" in said_by_a_child(calls[call])
    store.check()
    assert_serves(store, prompt(128), 128)


@pytest.mark.parametrize("call", ["session", "prefetch", "retrieve"])
def test_a_session_reads_nothing_in_a_child(
    open_store: Open, geometry: impress.Geometry, call: str
) -> None:
    """The first two seemed to work, and the last waited for threads left in the parent, for as long
    as reads may take; then it said that the rows were late."""
    store = open_store(geometry, dram_bytes=0, read_timeout_s=60)
    put_prompt(store, prompt(128))
    store.flush()
    with store.lease(prompt(128)) as lease, lease.session() as session:
        calls = {"session": lease.session, "prefetch": session.prefetch,
                 "retrieve": lambda: session.retrieve(0, None)}  # fmt: skip
        assert "session: opened before a fork" in said_by_a_child(calls[call])
        session.retrieve(0, None)


def test_a_child_that_lives_on_keeps_nothing_that_its_parent_lets_go_of(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """The port of the metrics stayed taken for as long as the child lived, and the file system kept
    the blocks of the segments that its parent deleted."""
    store = open_store(geometry, metrics_port=0)
    put_prompt(store, prompt(128)).wait(60)
    assert_serves(store, prompt(128), 128)
    came, go = os.pipe()
    wait, on = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(on)
        os.write(go, b"!")
        os.read(wait, 1)  # until its parent has closed the other end
        os._exit(0)
    try:
        assert os.read(came, 1) and store.evict(1 << 30)
        assert not [*store.path.rglob("*.seg")]
        held = [str(fd.readlink()) for fd in Path(f"/proc/{child}/fd").iterdir()]
        mine = [path for path in held if path.startswith(str(store.path))]
        assert held and not [path for path in mine if ".seg" in path]
        store.close()
        again = open_store(geometry, metrics_port=store.metrics_port)
        url = f"http://127.0.0.1:{again.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert b"impress_store_info" in answer.read()
    finally:
        os.close(on)
        assert os.waitpid(child, 0)[1] == 0
        for pipe in (came, go, wait):
            os.close(pipe)


def test_the_cache_is_empty_in_a_child() -> None:
    """As its parent went on to write there, the child kept what was there before: DRAM was taken
    twice."""
    with mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        try:
            area.madvise(18)
        except OSError:
            pytest.skip("this kernel wipes nothing on a fork")
    tier = DramTier(4 * PAGE)
    slot = tier.reserve(PAGE)
    assert slot is not None
    tier.write(slot, 0, np.full(PAGE, 7, np.uint8))

    def told() -> None:
        raise ValueError(f"{tier._arena.sum()} left")

    assert said_by_a_child(told) == "ValueError: 0 left"
    assert tier._arena.sum() == 7 * PAGE


def test_an_eviction_in_a_child_waits_for_no_lock_that_came_along_taken(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """The thread that held it at the fork had stayed in the parent: one in ten hung under load."""
    store = open_store(geometry)
    put_prompt(store, prompt(128))
    store.flush()
    with store.history._lock:
        assert "opened before a fork" in said_by_a_child(lambda: store.evict(1), limit_s=10)


def test_what_was_open_at_a_fork_is_not_opened_in_the_child(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """The child was given its parent's LMDB environment, which LMDB forbids, and waited for ever if
    another thread was opening one at the fork; a refusal told it to open again."""
    store = open_store(geometry, follow_every_s=0)
    put_prompt(store, prompt(128)).wait(60)
    with env.envs_lock:
        said = said_by_a_child(lambda: open_store(geometry, "r"))
    assert said.startswith("StoreFailed: index: ") and "\n" not in said
    assert said.endswith(
        "/index: opened before a fork: close it before forking, or start this process by spawn"
    )
    # For writing, too: the child took the next shard, where nothing in the first was a hit.
    assert "opened before a fork" in said_by_a_child(lambda: open_store(geometry))
    assert not [*store.path.glob("shards/1/*/*")]
    assert_serves(store, prompt(128), 128)
    store.close()
    for mode in ("r", "rw"):
        assert said_by_a_child(lambda mode=mode: open_store(geometry, mode).close()) == "returned"


def test_a_fork_is_noticed_behind_a_link_and_not_in_another_store_in_the_same_folder(
    open_store: Open, geometry: impress.Geometry, tmp_path: Path
) -> None:
    outer = open_store(geometry, follow_every_s=0)
    path = outer.path
    put_prompt(outer, prompt(128)).wait(60)
    outer.close()
    (path / "shards").rename(tmp_path / "elsewhere")
    (path / "shards").symlink_to(tmp_path / "elsewhere")
    config = impress.Config(**SMALL)
    with open_store(geometry):
        assert "opened before a fork" in said_by_a_child(lambda: open_store(geometry))
    with impress.PrefixStore.open(path / "inner", geometry, "test", config) as inner:
        put_prompt(inner, prompt(128)).wait(60)
        assert said_by_a_child(lambda: open_store(geometry).close()) == "returned"


def test_a_closed_store_evicts_nothing(open_store: Open, geometry: impress.Geometry) -> None:
    """Spans left its tree in vain, and only then did it say that it was closed."""
    store = open_store(geometry)
    put_prompt(store, prompt(128)).wait(60)
    store.close()
    with pytest.raises(impress.ImpressError, match="evict: the store is closed"):
        store.evict(1 << 30)
    assert len(store.catalog.records()) == 1


def test_rows_stay_what_they_are_on_both_sides_of_a_fork(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Buffers were once not mapped in a child, which then unmapped what lay at their addresses."""
    store = open_store(geometry)
    for seed in range(4):
        put_prompt(store, prompt(128, seed))
    store.flush()
    with store.lease(prompt(128)) as lease, lease.session() as session:
        rows = [session.retrieve(layer, None)[0] for layer in range(geometry.n_layers)]
    came, go = os.pipe()
    wait, on = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(wait, 1)  # until the parent's pool has gone on
        keys, _ = kv_of(prompt(128), geometry)
        same = all(np.array_equal(keys[at], mine.numpy()) for at, mine in enumerate(rows))
        del store, rows
        gc.collect()
        fresh = [mmap.mmap(-1, 1 << 20) for _ in range(64)]  # where the buffers lay, perhaps
        gc.collect()
        os.write(go, b"%d %d" % (same, sum(area.write(bytes(1 << 20)) >> 20 for area in fresh)))
        os._exit(0)
    for seed in range(4):
        assert_serves(store, prompt(128, seed), 128)
    os.write(on, b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.read(came, 1000) == b"1 64"
    assert_serves(store, prompt(128), 128)
    for pipe in (came, go, wait, on):
        os.close(pipe)


_CLOSED_LAST = """
import atexit, pathlib, sys
from tiers.base import PAGE, Read
from tiers.slots import aligned
from tiers.ssd import SsdTier

tier = SsdTier(pathlib.Path(sys.argv[1]), 1 << 20, None, engine=sys.argv[2])
slot = tier.reserve(1 << 20)
tier.write(slot, 0, aligned(1 << 20))
tier.read([Read(slot, at * PAGE, aligned(PAGE), None, PAGE) for at in (0, 2, 4)])
atexit.register(lambda: (tier.close(), print("closed")))
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_closed_only_when_the_process_ends_closes(tmp_path: Path, engine: str) -> None:
    """Engines are: by then an executor takes no more work, and aiofiles closed its files by one,
    which ended in a traceback for every thread that had read."""
    if why_not(engine):
        pytest.skip(f"{engine}: {why_not(engine)}")
    command = [sys.executable, "-c", _CLOSED_LAST, str(tmp_path / "segments"), engine]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("closed\n", "")


def test_an_open_that_fails_leaves_no_thread_in_the_shard(tmp_path: Path) -> None:
    """Its lock was released, its committer and follower ran on: two writers in one shard."""
    geometry = impress.Geometry(2, 4, 4, 64, "float32")
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = impress.Config(**SMALL, metrics_port=taken.getsockname()[1])
        with pytest.raises(impress.StoreFailed, match="port"):
            impress.PrefixStore.open(tmp_path / "s", geometry, "test", config)
    assert not [t.name for t in threading.enumerate() if t not in before]
    with impress.PrefixStore.open(tmp_path / "s", geometry, "test", impress.Config(**SMALL)):
        pass
