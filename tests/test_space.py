"""Whose space it is: after close, after a fork."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
from conftest import assert_serves, kv_of, prompt, put_prompt
from test_isolation import everything_in, rows_of

import impress
from impress.read.session import Lease
from impress.upkeep.verify import verify_store

Open = Callable[..., impress.PrefixStore]
#: Nothing goes on by itself, and every read is one of the disk.
QUIET = {"follow_every_s": 0, "repack_every_s": 0, "dram_bytes": 0, "io_threads": 4}


def assert_all_comes_back(store: impress.PrefixStore) -> None:
    store.flush()
    store.check()
    store.evict(1 << 30)
    assert store.ssd.usage().used == 0


# ---- after close, after a fork -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["purge", "quarantine"])
def test_a_lease_that_ends_after_close_touches_nothing(
    open_store: Open, geometry: impress.Geometry, how: str
) -> None:
    """It zeroed the header, and of what was purged punched the rows: by then another's."""
    before, old, new = open_store(geometry, **QUIET), prompt(256, 1), prompt(256, 2)
    assert put_prompt(before, old).wait(60)
    lease = before.lease(old)
    if how == "purge":
        assert before.purge() == (1, 1)
    else:
        before._home.quarantine(lease.held[0].record.span_id)
    before.close()
    after = open_store(geometry, **QUIET)
    assert put_prompt(after, new).wait(60)
    assert after.catalog.records()[0].parts == lease.held[0].record.parts, "not in its place"
    lease.release()
    assert_serves(after, new, 256)
    assert_all_comes_back(after)
    after.close()
    assert not verify_store(after.path).problems


@pytest.mark.parametrize("holder", ["lease", "writer"])
def test_what_was_purged_and_is_still_held_is_erased_by_close(
    open_store: Open, geometry: impress.Geometry, holder: str
) -> None:
    """It was left to the holder, who may never let go: a rebuild found the purged span again."""
    store, tokens = open_store(geometry, **QUIET), prompt(256, 3)
    assert put_prompt(store, tokens[:128]).wait(60)
    held = store.lease(tokens) if holder == "lease" else store.writer(tokens, start=128)
    assert store.purge() == (1, 1)
    mark = rows_of(tokens, geometry)
    assert mark in everything_in(store.path / "shards/main/segments")
    store.close()
    left = everything_in(store.path / "shards/main/segments")
    assert mark not in left and tokens[:64].tobytes() not in left
    if isinstance(held, Lease):
        with held.session() as session, pytest.raises(impress.PrefixLost):
            session.retrieve(0, None)
        held.release()


def test_a_forked_child_that_lets_go_of_a_lease_touches_nothing(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """It erased what its parent was reading."""
    store, tokens = open_store(geometry, **QUIET), prompt(256, 4)
    assert put_prompt(store, tokens).wait(60)
    with store.lease(tokens) as lease:
        assert store.purge() == (1, 1)
        child = os.fork()
        if child == 0:
            try:
                lease.release()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        with lease.session() as session:
            k, _, _ = session.retrieve(0, None)
            assert np.array_equal(k.numpy(), kv_of(tokens, geometry)[0][0])
    assert rows_of(tokens, geometry) not in everything_in(store.path / "shards/main/segments")
    store.check()
