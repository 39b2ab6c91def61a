"""What a purge leaves in the index: nothing, even after a purge that was cut off."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import everything_in, kv_of, prompt, put_prompt
from test_shards import unreadable
from typer.testing import CliRunner

import impress
import impress.write.reclaim
from impress.cli.main import app
from impress.upkeep.rebuild import rebuild_store
from impress.write.draft import Draft
from impress.write.headers import Headers

Open = Callable[..., impress.PrefixStore]


def test_a_purge_that_was_killed_between_two_renames_is_finished_by_the_same_again(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """With no segment left, no shard was seen: the token ids stayed for good."""
    with open_store(geometry) as store:
        put_prompt(store, prompt(256, 1)).wait(60)
        path = store.path
        assert store.purge() == (1, 0)
    index, mark = path / "shards/main/index", prompt(256, 1).tobytes()[:256]
    index.rename(index.with_name("index.gone"))
    assert mark in everything_in(path) and not list(path.rglob("*.seg"))
    with pytest.raises(impress.FormatError, match="a purge of shard main was cut off: repeat it"):
        open_store(geometry, mode="r")
    done = CliRunner().invoke(app, ["purge", "--store", str(path), "--namespace", "test"])
    assert done.exit_code == 2 and "is not stored here" in done.stderr
    assert mark not in everything_in(path)


def names_shown(path: Path) -> list[str]:
    done = CliRunner().invoke(app, ["inspect", "--store", str(path), "--json"])
    assert done.exit_code == 0, done.output
    return [row["name"] for row in json.loads(done.stdout)["namespaces"]]


@pytest.mark.parametrize("evicted", [False, True])
def test_what_a_purged_namespace_was_called_goes_with_it(
    open_store: Open, geometry: impress.Geometry, evicted: bool
) -> None:
    """A customer's name stayed in the index for good. Of a customer whose spans had been evicted,
    purge said that it is not stored here."""
    with open_store(geometry, namespace="somebody-else") as store:
        put_prompt(store, prompt(128, 2)).wait(60)
    with open_store(geometry, namespace="customer-x") as store:
        put_prompt(store, prompt(128, 1)).wait(60)
        if evicted:
            store.evict(1 << 30)
        path = store.path
    assert b"customer-x" in everything_in(path)
    purge = ["purge", "--store", str(path), "--namespace", "customer-x"]
    done = CliRunner().invoke(app, purge)
    assert done.exit_code == 0, done.output
    left = everything_in(path)
    assert b"customer-x" not in left and b"somebody-else" in left
    assert CliRunner().invoke(app, purge).exit_code == 2
    with open_store(geometry, namespace="customer-x") as store:
        put_prompt(store, prompt(128, 1)).wait(60)
    assert "customer-x" in names_shown(path)


def erased_by_what_is_shown(path: Path) -> bool:
    """Whether the prompt goes with a purge by its namespace's name in inspect."""
    mark = prompt(256, 1).tobytes()[:256]
    assert mark in everything_in(path)
    (name,) = names_shown(path)
    done = CliRunner().invoke(app, ["purge", "--store", str(path), "--namespace", name])
    assert done.exit_code == 0 and "1 span erased" in done.stdout, done.output
    return mark not in everything_in(path)


@pytest.mark.parametrize("name", ["n" * 300, "é" * 128 + "e", "e" + "é" * 128])
def test_a_name_that_a_header_cuts_off_is_no_name_to_purge_by(
    open_store: Open, geometry: impress.Geometry, name: str
) -> None:
    """A rebuild called the namespace by the 256 bytes that a header keeps of it. A purge by that
    name said "0 spans erased" and ended with 0, and the prompt stayed."""
    with open_store(geometry, namespace=name) as store:
        put_prompt(store, prompt(256, 1)).wait(60)
        path = store.path
    assert names_shown(path) == [name]
    rebuild_store(path)
    assert names_shown(path)[0].startswith("model ")
    cut = name.encode()[:256].decode(errors="replace")
    done = CliRunner().invoke(app, ["purge", "--store", str(path), "--namespace", cut])
    assert done.exit_code == 2 and "is not stored here" in done.stderr
    assert erased_by_what_is_shown(path)


@pytest.mark.parametrize("bit", [0, 7])
def test_a_name_with_a_flipped_bit_is_no_name_to_purge_by(
    open_store: Open, geometry: impress.Geometry, bit: int
) -> None:
    """LMDB has no checksums. A purge by the name that inspect showed ended with 0 and erased
    nothing."""
    with open_store(geometry, namespace="customer-x") as store:
        put_prompt(store, prompt(256, 1)).wait(60)
        path = store.path
    data = path / "shards/main/index/data.mdb"
    flipped = bytes([b"c"[0] ^ 1 << bit]) + b"ustomer-x"
    data.write_bytes(data.read_bytes().replace(b"customer-x", flipped))
    name = flipped.decode(errors="replace")
    done = CliRunner().invoke(app, ["purge", "--store", str(path), "--namespace", name])
    assert done.exit_code == 2 and "is not stored here" in done.stderr
    assert erased_by_what_is_shown(path) and flipped not in everything_in(path)


def test_users_who_come_once_leave_nothing_behind(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Every salt that a prompt ever came with was kept, evicted or not: its root in the tree, its
    namespace's name in the index. One name stays, so that a purge by that name finds it."""
    store = open_store(geometry, namespace="model-y")
    for seed in range(6):
        put_prompt(store, prompt(128, seed), tenant=f"user {seed}").wait(60)
    store.evict(1 << 30)
    store.flush()
    assert list(store.names().values()) == ["model-y"]
    assert not store.catalog._tree.roots
    put_prompt(store, prompt(128, 7), tenant="user 7").wait(60)
    assert list(store.names().values()) == ["model-y"] * 2
    names, path = store.names(), store.path
    store.check()
    store.close()
    with open_store(geometry, namespace="model-y") as store:
        assert store.names() == names
        assert store.lease(prompt(128, 7), tenant="user 7").n_tokens == 128
        store.evict(1 << 30)
    done = CliRunner().invoke(app, ["purge", "--store", str(path), "--namespace", "model-y"])
    assert done.exit_code == 0, done.output
    assert b"model-y" not in everything_in(path)


def test_of_users_who_come_once_each_between_two_restarts_one_name_stays(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """The next process did not know which root keeps the name, so each process kept one more."""
    for user in (0, 1, 0, 2):
        with open_store(geometry, namespace="model-y") as store:
            put_prompt(store, prompt(128, user), tenant=f"user {user}").wait(60)
            store.evict(1 << 30)
            assert list(store.names().values()) == ["model-y"]
            assert list(store.index.names().values()) == ["model-y"]


def stored_by_both(a: impress.PrefixStore, b: impress.PrefixStore, n_users: int) -> None:
    """For each user, a prompt that a stores, and its continuation, which b stores."""
    for user in range(n_users):
        tokens, tenant = prompt(256, user), f"user {user}"
        put_prompt(a, tokens[:128], tenant=tenant).wait(60)
        b.follow()
        put_prompt(b, tokens, start=128, tenant=tenant).wait(60)


def test_users_whose_prompts_two_processes_stored_leave_one_name_each(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What b had stored went first, while a's was still there; then b had no delete of its own left
    by which to see the users go. Their names stayed in its index for good."""
    monkeypatch.setattr(impress.write.reclaim, "YIELD_TIMEOUT_S", 0)
    settings = {"namespace": "model-y", "follow_every_s": 0, "repack_every_s": 0}
    a, b = open_store(geometry, **settings), open_store(geometry, **settings)
    stored_by_both(a, b, 5)
    b.evict(1 << 30)
    a.follow()
    a.evict(1 << 30)
    assert b.follow() and not b.catalog.roots()
    assert list(a.index.names().values()) == ["model-y"]
    b.close()
    with open_store(geometry, shard=1, **settings) as b:
        put_prompt(b, prompt(128, 5), tenant="user 5").wait(60)
        assert list(b.index.names().values()) == ["model-y"] * 2
        b.evict(1 << 30)
        assert list(b.index.names().values()) == ["model-y"]
        b.check()


def test_the_names_of_users_whose_prompts_hang_from_what_cannot_be_read_stay(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile nothing of theirs is in the tree, just as with users who have gone."""
    settings = {"namespace": "model-y", "follow_every_s": 0, "repack_every_s": 0}
    a, b = open_store(geometry, **settings), open_store(geometry, **settings)
    stored_by_both(a, b, 2)
    for store in (a, b):
        store.close()
    unreadable(monkeypatch, "main")
    with open_store(geometry, shard=1, **settings) as b:
        assert not b.catalog.roots()
        put_prompt(b, prompt(128, 5), tenant="user 5").wait(60)
        assert list(b.index.names().values()) == ["model-y"] * 3
        b.check()


@pytest.mark.parametrize("when", ["while rows are put", "as its header is written"])
def test_a_user_whose_prefix_goes_bad_under_a_store_leaves_nothing_behind(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A root was made for a span that no longer hung from anything: it kept its name in the index,
    and in memory, for good."""
    store, tokens = open_store(geometry, namespace="model-y"), prompt(256)
    put_prompt(store, prompt(128, 1), tenant="first").wait(60)
    store.evict(1 << 30)  # the first user's name is the one that stays
    store.flush()
    names = store.names()
    put_prompt(store, tokens[:128], tenant="hers").wait(60)
    (record,) = store.catalog.records()
    keys, values = kv_of(tokens, geometry)
    write = Headers.write

    def last_look(headers: Headers, draft: Draft, name: str) -> None:
        write(headers, draft, name)
        store._home.leaving.quarantine(record.span_id)

    with store.writer(tokens, 128, tenant="hers") as writer:
        if when == "while rows are put":
            store._home.leaving.quarantine(record.span_id)
            store.flush()
        else:
            monkeypatch.setattr(Headers, "write", last_look)
        for layer in range(geometry.n_layers):
            writer.put(layer, 128, keys[layer][:, 128:], values[layer][:, 128:])
    assert not writer.stored.wait(60) and writer.stored.refused.startswith("prefix gone: ")
    store.flush()
    assert store.names() == names and not store.catalog._tree.roots
    store.check()


def test_a_name_goes_with_the_tenant_purged_and_comes_back_with_its_next_store(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """A store that stayed open thought that the index still had the name."""
    store = open_store(geometry, namespace="customer-x")
    for seed, tenant in enumerate(("hers", "his")):
        put_prompt(store, prompt(128, seed), tenant=tenant).wait(60)
    assert list(store.names().values()) == ["customer-x"] * 2
    store.purge("hers")
    assert list(store.names().values()) == ["customer-x"]
    store.purge()
    assert not store.names()
    put_prompt(store, prompt(128, 0), tenant="hers").wait(60)
    assert list(store.names().values()) == ["customer-x"]
    store.check()
