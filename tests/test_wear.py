"""A disk that is nearly full, worn or failing: what goes, what is refused, what comes back."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import logging
import os
import re
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MIB, assert_serves, kv_of, look, prompt, put_prompt, said_by_a_child
from hypothesis import given, settings
from hypothesis import strategies as st
from test_repack import run_repack, sound
from test_sparse import POLICIES, retrieve_all

import impress
import impress.write.health
import impress.write.home
import impress.write.leaving
from impress.errors import ConfigError, StoreFailed
from impress.repacking.span_copy import Copier, SpanPart
from impress.spans.format import SpanHeader, SpanRecord
from impress.spans.tables import read_header
from impress.tree.eviction import ByWorth, by_last_use, by_prefix, by_uses, least, score_of
from impress.tree.radix import RadixTree
from impress.upkeep.rebuild import rebuild_store
from impress.upkeep.verify import verify_store
from impress.usage.notes import Note
from impress.usage.remembered import HALF_LIFE
from impress.write import leaving
from impress.write.budget import DAY_S, WriteBudget
from impress.write.commit import Committer
from impress.write.health import RETRY_S, Health
from tiers.base import PAGE, Slot
from tiers.errors import MediumError, ReadFailed
from tiers.files import punch, shares_blocks, spare_of
from tiers.slots import aligned
from tiers.ssd import SsdTier

Open = Callable[..., impress.PrefixStore]
WINDOW = 16
SIZE = 4
EVICTIONS = ("importance", "lru", "lfu", "prefix-lru")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that pass only when the test says so, for stores opened after this."""
    now = [1e9]
    monkeypatch.setattr(impress.write.home, "wall_clock", lambda: now[0])
    monkeypatch.setattr(impress.write.home, "monotonic", lambda: now[0])
    monkeypatch.setattr(impress.write.home, "boot_clock", lambda: now[0])
    return now


# ---- what goes first -----------------------------------------------------------------------


def ids(*numbers: int) -> Any:
    return np.array(numbers, dtype=np.int64)


def test_what_is_worth_least_goes_first() -> None:
    leaves = ids(1, 2, 3, 4), ids(9, 0, 3, 3), ids(1, 2, 4, 3), ids(1, 1, 1, 1)
    assert np.argsort(by_last_use(*leaves)).tolist() == [0, 1, 3, 2]
    assert np.argsort(by_uses(*leaves), kind="stable").tolist() == [1, 2, 3, 0]
    worth = ByWorth({3: 0.1, 9: 1.0})(*leaves)
    assert np.argsort(worth).tolist() == [2, 1, 3, 0]
    assert 2 ** ByWorth({})(ids(1), ids(7), ids(HALF_LIFE), ids(1))[0] == pytest.approx(16)
    newborn, leased = ByWorth({})(ids(1, 2), ids(0, 1), ids(5, 4), ids(1, 1))
    assert newborn > leased
    assert np.isfinite(ByWorth({1: 0.0})(ids(1), ids(0), ids(0), ids(1))).all()
    with pytest.raises(KeyError):
        score_of("fifo", {})


def test_what_is_known_of_a_span_is_no_reason_to_evict_it() -> None:
    """After a restart shares came back only with use: a span in use, a twentieth of whose rows
    mattered, went before one that nobody had asked for since, which counted as if all did."""
    used, idle = ByWorth({1: 0.05})(ids(1, 2), ids(30, 10), ids(1020, 1000), ids(1, 1))
    assert used > idle


@given(st.lists(st.tuples(st.integers(0, 2**33 - 1), st.integers(1, 2**20 - 1)), min_size=1))
def test_prefix_lru_is_one_number_for_last_use_then_longest_prefix(
    leaves: list[tuple[int, int]],
) -> None:
    used, end = (np.array(column) for column in zip(*leaves, strict=True))
    order = np.argsort(by_prefix(used, used, used, end), kind="stable")
    assert [leaves[i] for i in order] == sorted(leaves, key=lambda leaf: (leaf[0], -leaf[1]))


def test_of_what_one_request_brought_the_longest_prefix_goes_first() -> None:
    """Two forks of one tick; the tree gives up the deeper tail, then what it hung from."""
    tree = RadixTree(SIZE)
    root = tree.root(b"r")
    for span, path in enumerate(([0, 1], [0, 1, 2, 3], [0, 4], [5])):
        graft = tree.graft(root, np.array(path, dtype="<i4").tobytes(), span, 0)
        tree.used[graft.node] = 7 if span < 3 else 6
    gone = []
    for leaf in least(tree, (), score_of("prefix-lru", {})):
        gone.append((tree.used[leaf], tree.end[leaf]))
        tree.remove(leaf)
    assert gone == [(6, 1), (7, 4), (7, 2), (7, 2), (7, 1)]


def forest(seed: int) -> RadixTree:
    """Some chains that fork, leased at random."""
    rng, tree = np.random.default_rng(seed), RadixTree(SIZE)
    for span in range(40):
        labels = rng.integers(0, 3, rng.integers(1, 6)).astype("<i4").tobytes()
        graft = tree.graft(tree.root(b"r"), labels, span, 0)
        if graft.added:
            tree.used[graft.node] = span + 1
    for tick in range(100, 200):
        labels = rng.integers(0, 3, 5).astype("<i4").tobytes()
        tree.touch(tree.match(b"r", labels), tick)
    return tree


def simplest(tree: RadixTree, pinned: set[int], score: Any) -> Iterator[int]:
    """One at a time; all are looked at again each time."""
    while True:
        found = []
        for leaf in tree.leaves().tolist():
            span, hits, used, end = (column[0] for column in tree.columns(ids(leaf)))
            if span not in pinned:
                key = float(score(ids(span), ids(hits), ids(used), ids(end))[0])
                found.append((key, used, span, leaf))
        if not found:
            return
        yield min(found)[-1]


@settings(max_examples=40)
@given(st.integers(0, 999), st.sampled_from(EVICTIONS), st.integers(1, 9))
def test_batches_take_what_one_at_a_time_would(seed: int, eviction: str, limit: int) -> None:
    score = score_of(eviction, {3: 0.5, 7: 0.01})
    pinned = {int(s) for s in np.random.default_rng(seed).integers(0, 40, 4)}
    want, tree = [], forest(seed)
    for leaf in simplest(tree, pinned, score):
        want.append(leaf)
        tree.remove(leaf)
    got, tree = [], forest(seed)
    progress = True
    while progress:
        progress = False
        for leaf in least(tree, pinned, score, limit):
            progress = True
            got.append(leaf)
            tree.remove(leaf)
    tree.check()
    assert got == want
    assert pinned.isdisjoint(forest(seed).columns(np.array(got, dtype=np.int64))[0].tolist())


# ---- watermarks ----------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [leaving.AT_ONCE, 1], ids=["at once", "in parts"])
def test_a_store_is_kept_below_its_mark(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """A prompt is 8 windows of 64 KiB and a header: about a dozen are too many. All that lay above
    the low mark of a large store left in one turn, in which no other store became READY."""
    monkeypatch.setattr(leaving, "AT_ONCE", at_once)
    store = open_store(
        geometry, window=WINDOW, disk_bytes=8 * MIB + 5, disk_high=0.75, disk_low=0.5
    )
    for seed in range(24):
        assert put_prompt(store, prompt(128, seed)).wait(60)
        store.flush()
        assert store.ssd.usage().used <= 6 * MIB
        assert_serves(store, prompt(128, seed), 128)  # the newest never goes for itself
    stats = store.stats()
    assert stats["evicted_spans"] > 0 and not stats["refused"]
    assert store.ssd.usage().used > 3 * MIB
    sound(store)


def test_thinning_goes_on_with_each_commit_down_to_the_low_mark(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "AT_ONCE", MIB)
    with open_store(geometry, window=WINDOW) as store:
        for seed in range(12):
            assert put_prompt(store, prompt(128, seed)).wait(60)
    store = open_store(geometry, window=WINDOW, disk_bytes=8 * MIB, disk_high=0.7, disk_low=0.3)
    used = [store.ssd.usage().used]
    for seed in range(20, 26):
        assert put_prompt(store, prompt(16, seed)).wait(60)
        store.flush()
        used.append(store.ssd.usage().used)
    falls = [before - after for before, after in itertools.pairwise(used)]
    assert sum(fall > MIB for fall in falls) > 1 and max(falls) < used[0] - min(used)
    assert min(used) <= 0.3 * 8 * MIB
    sound(store)


def test_more_leaves_than_comes(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores larger than a part filled the disk: each then had to make room for itself, and the
    repacker, which evicts nothing, had none."""
    monkeypatch.setattr(leaving, "AT_ONCE", 256 << 10)
    store = open_store(geometry, window=WINDOW, disk_bytes=16 * MIB, disk_high=0.7, disk_low=0.5)
    for seed in range(40):
        assert put_prompt(store, prompt(16 if seed < 15 else 128, seed)).wait(60)
        store.flush()
        assert store.ssd.usage().used <= 0.7 * 16 * MIB + 3 * MIB // 4
    assert store.ssd.usage().used <= 0.7 * 16 * MIB
    sound(store)


@pytest.mark.parametrize("mode", ["alone", "r", "rw"])
def test_evicting_nothing_drops_what_a_lowered_limit_is_over(
    open_store: Open, geometry: impress.Geometry, mode: str
) -> None:
    """It went as a side effect of waiting for the commit: `evict` said 0 bytes, and beside another
    process the segments that it left empty stayed."""
    with open_store(geometry, window=WINDOW) as store:
        for seed in range(8):
            assert put_prompt(store, prompt(256, seed)).wait(60)
    store = open_store(geometry, window=WINDOW, disk_bytes=6 * MIB, disk_high=0.75, disk_low=0.5)
    if mode != "alone":
        open_store(geometry, mode=mode, window=WINDOW)  # it looks by itself
    used = store.ssd.usage().used
    assert used > 8 * MIB
    assert store.evict(0) == used - store.ssd.usage().used > 5 * MIB
    assert MIB < store.ssd.usage().used <= 3 * MIB
    assert store.ssd.trim() == 0, "empty segments have gone back"
    assert store.evict(0) == 0 and store.stats()["spans"] == 2
    sound(store)


def test_without_a_limit_nothing_goes(open_store: Open, geometry: impress.Geometry) -> None:
    store = open_store(geometry, window=WINDOW, disk_high=0.1, disk_low=0.1)
    for seed in range(4):
        put_prompt(store, prompt(256, seed)).wait(60)
    store.flush()
    assert store.stats()["evicted_spans"] == 0


def test_what_is_leased_stays_whatever_the_mark(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry, window=WINDOW, disk_bytes=8 * MIB, disk_high=0.5, disk_low=0.2)
    put_prompt(store, prompt(256)).wait(60)
    with store.lease(prompt(256)) as lease:
        for seed in range(1, 12):
            put_prompt(store, prompt(256, seed)).wait(60)
        store.flush()
        assert lease.n_tokens == 256
        assert_serves(store, prompt(256), 256)
    sound(store)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_scan_pushes_out_what_is_used_only_under_lru(
    open_store: Open, geometry: impress.Geometry, eviction: str
) -> None:
    store = open_store(
        geometry, window=WINDOW, disk_bytes=8 * MIB, disk_high=0.6, disk_low=0.5, eviction=eviction
    )
    hot = prompt(128, 99)
    put_prompt(store, hot).wait(60)
    for _ in range(5):
        assert_serves(store, hot, 128)
    for seed in range(12):
        with store.lease(prompt(128, seed)):
            pass
        put_prompt(store, prompt(128, seed)).wait(60)
    store.flush()
    assert store.lookup(hot) == (0 if "lru" in eviction else 128)
    sound(store)


def test_what_is_of_no_importance_goes_before_what_is(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry, window=WINDOW)
    vital, idle = prompt(128, 1), prompt(128, 2)
    for tokens, chosen in ((vital, 128), (idle, 2)):
        put_prompt(store, tokens).wait(60)
        (span,) = {r.span_id for r in store.catalog.records()} - set(store.history.known_shares())
        for layer in range(geometry.n_layers):
            store.history.note(Note(span, 128, layer, 0, 128, np.arange(chosen)))
    store.evict(1)
    assert (store.lookup(vital), store.lookup(idle)) == (128, 0)


def test_how_new_a_span_is_outlives_the_process(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry, window=WINDOW, eviction="lru")
    old, new = prompt(128, 1), prompt(128, 2)
    put_prompt(store, old).wait(60)
    assert_serves(store, old, 128)
    put_prompt(store, new).wait(60)  # never leased
    store.close()
    with open_store(geometry, window=WINDOW, eviction="lru") as store:
        store.evict(1)
        assert (store.lookup(old), store.lookup(new)) == (0, 128)


def test_marks_that_cross_are_refused() -> None:
    with pytest.raises(ConfigError, match="disk_low"):
        impress.Config(disk_high=0.5)
    with pytest.raises(ConfigError, match="disk_high"):
        impress.Config(disk_high=1.5)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many more segments the file system has room for."""
    left, fallocate = [0], os.posix_fallocate

    def full(fd: int, off: int, n_bytes: int) -> None:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1
        fallocate(fd, off, n_bytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    return left


@pytest.mark.parametrize("limit", ["disk_bytes", "a full file system"])
def test_a_prompt_that_can_never_fit_takes_nothing_with_it(
    open_store: Open, geometry: impress.Geometry, room: list[int], clock: list[float], limit: str
) -> None:
    """It emptied the store; on a full file system nothing was stored after it, until a restart."""
    room[0] = 99 if limit == "disk_bytes" else 4
    config = {"disk_bytes": 4 * MIB} if limit == "disk_bytes" else {}
    store = open_store(geometry, window=WINDOW, dram_bytes=0, disk_high=1, disk_low=1, **config)
    for seed in range(3):
        assert put_prompt(store, prompt(128, seed)).wait(60)
    for n in (1280, 1024):  # the second does not fit with its header
        refused = put_prompt(store, prompt(n, 9)).refused
        assert refused.startswith("disk full")
        assert ("No space left" in refused) == (limit != "disk_bytes")
    assert [store.lookup(prompt(128, seed)) for seed in range(3)] == [128] * 3
    assert store.stats()["evicted_spans"] == 0 and not store.stats()["ssd_read_only"]
    clock[0] += RETRY_S
    for seed in range(3, 12):
        assert put_prompt(store, prompt(128, seed)).wait(60)
    assert store.stats()["evicted_spans"] > 0
    sound(store)


def test_after_the_limit_is_lowered_a_larger_prompt_takes_nothing_with_it(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Segments of the old limit had room for it: the commit after it evicted everything else, and
    the next one the prompt itself."""
    with open_store(geometry, window=WINDOW) as store:
        for seed in range(24):
            assert put_prompt(store, prompt(64, seed)).wait(60)
    store = open_store(geometry, window=WINDOW, disk_bytes=2 * MIB)
    assert put_prompt(store, prompt(64, 30)).wait(60)
    store.flush()
    n_evicted, free = store.stats()["evicted_spans"], store.ssd.usage().free
    assert free > 3 * MIB
    assert put_prompt(store, prompt(640, 31)).refused.startswith("disk full: ")
    assert put_prompt(store, prompt(16, 32)).wait(60)
    store.flush()
    assert store.stats()["evicted_spans"] == n_evicted and store.lookup(prompt(64, 30)) == 64
    sound(store)


def test_what_could_not_stay_below_the_high_mark_takes_nothing_with_it(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """A prompt between `disk_high` and all of `disk_bytes` emptied the store, became READY, and
    went with the next commit, each time; and so did one that was this long with what is before."""
    store = open_store(geometry, window=WINDOW, disk_bytes=4 * MIB, disk_high=0.75, disk_low=0.5)
    first = prompt(384, 1)  # 4 KiB a token
    assert put_prompt(store, first).wait(60) and put_prompt(store, prompt(64, 2)).wait(60)
    for tokens in (prompt(832, 3), np.concatenate([first, prompt(416, 4)])):
        refused = put_prompt(store, tokens).refused
        assert re.fullmatch(
            r"disk full: \d+ bytes, .* disk_high \* disk_bytes = 3145728; .*", refused
        )
    assert store.stats()["refused"] == {"disk_full": 2}
    assert store.lookup(first) == 384 and store.lookup(prompt(64, 2)) == 64
    assert store.stats()["evicted_spans"] == 0
    assert put_prompt(store, prompt(704, 5)).wait(60)
    store.flush()
    assert_serves(store, prompt(704, 5), 704)
    sound(store)


@pytest.mark.parametrize("beside", ["a lease", "a store under way"])
@pytest.mark.parametrize("limit", ["disk_bytes", "a full file system"])
def test_a_prompt_that_does_not_fit_beside_what_stays_takes_nothing_with_it(
    open_store: Open, geometry: impress.Geometry, room: list[int], beside: str, limit: str
) -> None:
    """All that could go was evicted for it, in vain, and with `disk_bytes` once more each time it
    was tried."""
    room[0] = 99 if limit == "disk_bytes" else 4
    config = {"disk_bytes": 4 * MIB} if limit == "disk_bytes" else {}
    store = open_store(geometry, window=WINDOW, dram_bytes=0, disk_high=1, disk_low=1, **config)
    with ExitStack() as stack:
        if beside == "a lease":
            assert put_prompt(store, prompt(512, 1)).wait(60)
            stack.enter_context(store.lease(prompt(512, 1)))
        else:
            writer = store.writer(prompt(512, 1))
            stack.callback(writer.close, keep=False)
        for seed in range(2, 9):
            assert put_prompt(store, prompt(64, seed)).wait(60)
        for _ in range(2):
            assert put_prompt(store, prompt(512, 9)).refused.startswith(("disk full", "read-only"))
        assert store.stats()["evicted_spans"] == 0
        assert put_prompt(store, prompt(128, 10)).wait(60)  # there is something to evict for it
        assert store.stats()["evicted_spans"] > 0
    sound(store)


@pytest.fixture
def syncs_wait(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[impress.PrefixStore, Committer, threading.Event]]:
    """A store of 4 MiB whose syncs wait for the event; the test may patch its committer."""
    store = open_store(
        geometry, window=WINDOW, dram_bytes=0, disk_bytes=4 * MIB, disk_high=1, disk_low=1
    )
    committer, ends, sync = store._home.committer, threading.Event(), SsdTier.sync
    assert committer is not None

    def held_up(ssd: SsdTier, slots: Any) -> None:
        assert ends.wait(60)
        sync(ssd, slots)

    monkeypatch.setattr(SsdTier, "sync", held_up)
    try:
        yield store, committer, ends
    finally:
        ends.set()


def test_a_store_that_has_ended_makes_room_once_it_is_committed(
    syncs_wait: tuple[impress.PrefixStore, Committer, threading.Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until then it counts as under way, which nothing can be evicted of."""
    store, committer, ends = syncs_wait
    barrier = committer.barrier

    def on_time(timeout_s: float) -> bool:
        ends.set()
        return barrier(timeout_s)

    monkeypatch.setattr(committer, "barrier", on_time)
    first, second = (put_prompt(store, prompt(512, n)) for n in (1, 2))
    assert first.wait(60) and second.wait(60)
    assert store.lookup(prompt(512, 1)) == 0 and store.lookup(prompt(512, 2)) == 512
    sound(store)


def test_where_what_has_ended_is_not_committed_home_is_read_only_not_full(
    syncs_wait: tuple[impress.PrefixStore, Committer, threading.Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each store waited for a disk that hung, two and a half minutes, and was told it was full."""
    store, committer, ends = syncs_wait
    barrier, waits = committer.barrier, []

    def impatient(timeout_s: float) -> bool:
        waits.append(timeout_s)
        return barrier(0)

    with monkeypatch.context() as patch:
        patch.setattr(committer, "barrier", impatient)
        first = put_prompt(store, prompt(512, 1))
        said = [put_prompt(store, prompt(512, n)).refused for n in (2, 3)]
    ends.set()
    assert all(one.startswith("read-only: index: no commit within") for one in said), said
    assert len(waits) == 1 and first.wait(60)
    sound(store)


def full_of_short_ones(store: impress.PrefixStore, order: Callable[[int], Any]) -> int:
    """Fills 8 MiB with one-window prompts, side by side, which go in this order; returns a size."""
    n = 0
    while store.ssd.usage().used < 7.5 * MIB:
        n += 1
        assert put_prompt(store, prompt(store.window, n)).wait(60)
    for seed in sorted(range(1, n + 1), key=order):
        store.lease(prompt(store.window, seed)).release()
    return store.catalog.records()[0].owned_bytes


ONE_SEGMENT = {
    "segment_bytes": 8 * MIB, "disk_bytes": 8 * MIB, "dram_bytes": 0, "disk_high": 1, "disk_low": 1,
    "eviction": "lru",
}  # fmt: skip


@pytest.mark.parametrize("window", [64, 16])
def test_a_long_prompt_takes_the_place_of_short_ones_wherever_they_lay(
    open_store: Open, geometry: impress.Geometry, window: int
) -> None:
    """Holes below 1 MiB did not count as room: the prompt evicted its own size, leaving aside what
    was free, and was refused all the same; and so was the next."""
    store = open_store(geometry, window=window, **ONE_SEGMENT)
    one = full_of_short_ones(store, lambda seed: (seed % 3, seed))
    store.evict(MIB // 2)
    assert put_prompt(store, prompt(512)).wait(60)
    assert_serves(store, prompt(512), 512)
    new = next(record for record in store.catalog.records() if record.n_windows > 1)
    assert len(new.parts) > 5
    assert store.stats()["evicted_spans"] * one <= new.owned_bytes + 3 * one
    sound(store)


@pytest.mark.parametrize("joins", [True, False])
def test_what_went_in_vain_is_followed_by_as_much_and_no_more(
    open_store: Open, geometry: impress.Geometry, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holes of one or two short prompts are too small for parts here: a second half of what goes
    may lie between the first."""
    monkeypatch.setattr(impress.write.leaving, "SMALL_PART", 700 << 10)
    store = open_store(geometry, window=64, **ONE_SEGMENT)
    every = 2 if joins else 3
    one = full_of_short_ones(store, lambda seed: (joins and seed > 16, seed % every, seed))
    stored = put_prompt(store, prompt(512))
    assert stored.wait(60) == joins and stored.refused == ("" if joins else "disk full")
    assert 2 * MIB < store.stats()["evicted_spans"] * one < 4.5 * MIB
    sound(store)


def test_what_was_wanted_of_a_full_file_system_and_fits_no_more_keeps_nothing_smaller_out(
    open_store: Open, geometry: impress.Geometry, room: list[int], clock: list[float]
) -> None:
    """Each trial asked for as much again, and evicted what was there for it."""
    store, room[0] = open_store(geometry, window=WINDOW, dram_bytes=0), 4
    assert put_prompt(store, prompt(512, 1)).wait(60)
    with store.lease(prompt(512, 1)):
        assert put_prompt(store, prompt(512, 2)).refused.startswith("read-only")
    store.evict(1 << 30)  # its segments go back, and others take that room
    room[0] = 1
    clock[0] += RETRY_S
    assert put_prompt(store, prompt(128, 3)).wait(60)
    sound(store)


def test_a_prompt_without_room_keeps_out_none_that_has_it_and_drives_none_out(
    open_store: Open, geometry: impress.Geometry, room: list[int], clock: list[float]
) -> None:
    """Every store was refused for 30 s, although there was room; then a trial of the large one's
    size took out what was stored, in vain."""
    store, room[0] = open_store(geometry, window=WINDOW, dram_bytes=0), 6
    for seed in range(11):
        assert put_prompt(store, prompt(128, seed)).wait(60)
    large = prompt(128 * 9, 99)
    with ExitStack() as leases:
        for seed in range(5):
            leases.enter_context(store.lease(prompt(128, seed)))
        assert store._home.leaving.evict(3 * MIB) > 0
        assert put_prompt(store, large).refused.startswith("read-only")
        for seed in range(20, 24):  # there is room for these
            assert put_prompt(store, prompt(128, seed)).wait(60)
        assert put_prompt(store, large).refused.startswith("read-only")
        spans = store.stats()["spans"]
        clock[0] += RETRY_S
        assert put_prompt(store, prompt(128, 24)).wait(60)
        assert store.stats()["spans"] == spans + 1
    clock[0] += RETRY_S
    assert put_prompt(store, large).wait(60)
    sound(store)


# ---- dead space ----------------------------------------------------------------------------


def half_dead(store: impress.PrefixStore, **named: Any) -> tuple[np.ndarray, int]:
    """Stores a prompt whose first 32 tokens live on under another; returns (that one, the span)."""
    tokens, other = prompt(256), np.concatenate([prompt(256)[:32], prompt(224, 5)])
    worth = np.random.default_rng(0).random((store.geometry.n_layers, 256), dtype=np.float32)
    worth = worth if named.get("packed") else np.ones_like(worth)  # equal ones stay as put
    put_prompt(store, tokens, importance=worth).wait(60)
    (record,) = store.catalog.records()
    for tail in (prompt(64, 7), other):
        put_prompt(store, tail, importance=worth[:, : len(tail)]).wait(60)
        assert_serves(store, tail, len(tail))
    store.evict(1)
    assert store.lookup(tokens) == 32 and store.lookup(prompt(64, 7)) == 0
    return other, record.span_id


@pytest.mark.parametrize("packed", [False, True], ids=["as put", "packed"])
@pytest.mark.parametrize("shape", ["geometry", "padded"])
def test_what_is_mostly_dead_is_rewritten(
    open_store: Open, shape: str, packed: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    geometry = request.getfixturevalue(shape)
    store = open_store(geometry, window=WINDOW, probes=("heads3-v1", "int4-v2"))
    other, span = half_dead(store, packed=packed)
    (dead,) = store.catalog.dead()
    assert (dead.span, dead.n_dead, dead.n_windows) == (span, 14, 16)
    assert store.stats()["dead_bytes"] == dead.n_bytes > 0
    used, before = store.ssd.usage().used, answers(store, other)
    (planned,) = [s for s in store.repack(dry_run=True).spans if s.span == span]
    assert planned.outcome == "would rewrite" and planned.dead_share == 14 / 16
    report = store.repack()
    assert report.spans[0].outcome == "rewritten" and report.moved >= 1
    assert store.ssd.usage().used <= used - dead.n_bytes
    assert store.catalog.dead() == [] and store.stats()["dead_bytes"] == 0
    assert_serves(store, prompt(256), 32)
    assert_serves(store, other, 256)
    for one, two in zip(before, answers(store, other), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    sound(store)
    store.close()
    again = open_store(geometry, window=WINDOW, probes=("heads3-v1", "int4-v2"))
    assert again.catalog.dead() == []
    assert_serves(again, prompt(256), 32)
    assert_serves(again, other, 256)
    sound(again)
    again.close()
    assert not verify_store(tmp_path / "store").problems


def test_a_dry_run_counts_what_a_rewrite_gives_back(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """It compared every copy with what was free at first: it saw no room for spans that moved into
    the space that dead ones before them had left."""
    store = open_store(geometry, window=WINDOW, dram_bytes=0, disk_bytes=3 * MIB)
    other, _ = half_dead(store)
    look(store, other)
    rest = store.ssd.reserve(store.ssd.usage().free - 48 * geometry.token_bytes, 4096)
    assert rest is not None
    would, done = (store.repack(dry_run=dry_run) for dry_run in (True, False))
    assert [span.outcome for span in would.spans] == ["would rewrite", "would move"]
    assert [span.outcome for span in done.spans] == ["rewritten", "moved"]
    assert [s.move_bytes for s in would.spans] == [s.move_bytes for s in done.spans]
    assert_serves(store, other, 256)
    store.ssd.free(rest)
    sound(store)


def test_the_command_says_what_it_would_rewrite_and_gives_empty_segments_back(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Its dry run said "0 would move", and the run moved one; segments without rows stayed."""
    store = open_store(geometry, window=WINDOW)
    tokens, other, segments = *dead_head(store), store.ssd.folder
    store.close()
    before = sum(path.stat().st_size for path in segments.iterdir())
    would = run_repack("--store", store.path, "--dry-run").stdout
    assert "would rewrite" in would and "1 would move (2" in would, would
    assert sum(path.stat().st_size for path in segments.iterdir()) == before
    done = run_repack("--store", store.path).stdout
    assert "rewritten" in done
    assert would.splitlines()[-1].replace("would move", "moved") == done.splitlines()[-1]
    assert sum(path.stat().st_size for path in segments.iterdir()) <= before - MIB
    with open_store(geometry, window=WINDOW) as store:
        for asked in (tokens, other):
            assert_serves(store, asked, 256)
        sound(store)


def test_of_a_rewrite_it_is_said_what_is_dead_and_no_cost_of_a_request(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """It was said that requests read 0 pieces, before and after; dead space was called a saving."""
    store = open_store(geometry, window=WINDOW)
    dead_head(store, np.random.default_rng(0).random((geometry.n_layers, 256), dtype=np.float32))
    store.close()
    args = ("--store", store.path, "--dry-run")
    rewrite, other = json.loads(run_repack(*args, "--json", "-").stdout)["spans"]
    assert (rewrite["outcome"], other["outcome"]) == ("would rewrite", "would move")
    assert [rewrite[name] for name in ("before", "after", "gain")] == [None] * 3
    assert (rewrite["dead_share"], other["dead_share"]) == (12 / 16, None)
    assert other["before"]["pieces"] > 0 and other["gain"] is not None
    (line,) = [line for line in run_repack(*args).stdout.splitlines() if "would rewrite" in line]
    assert line.split()[-7:] == ["–", "–", "–", "–", "75%", "would", "rewrite"]


def test_what_stays_as_it_lies_is_copied_without_the_plane_in_memory(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read whole before the first slice was written: hundreds of MiB for a long prompt."""
    store = open_store(geometry, window=WINDOW, dram_bytes=0)
    other, _ = half_dead(store)
    sizes: list[int] = []

    def counted(n_bytes: int) -> np.ndarray:
        sizes.append(n_bytes)
        return aligned(n_bytes)

    monkeypatch.setattr("impress.repacking.span_copy.aligned", counted)
    monkeypatch.setattr("impress.repacking.span_copy.SLICE_BYTES", 1)  # slices of one window
    assert store.repack().spans[0].outcome == "rewritten"
    assert sizes == [WINDOW * geometry.token_bytes // 4] * 2 * 2 * 2  # windows, layers, K and V
    assert_serves(store, prompt(256), 32)
    assert_serves(store, other, 256)
    sound(store)


def answers(store: impress.PrefixStore, tokens: np.ndarray) -> list[tuple[torch.Tensor, ...]]:
    """What every policy brings of every layer."""
    with store.lease(tokens) as lease:
        return [layer for policy in POLICIES for layer in retrieve_all(lease, policy)[0]]


def dead_head(
    store: impress.PrefixStore, worth: np.ndarray | None = None, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Stores two prompts that begin alike, at once: the second to commit adds its end."""
    tokens = prompt(256, seed)
    other = np.concatenate([tokens[:192], prompt(64, seed + 3)])
    keys, values = kv_of(other, store.geometry)
    with store.writer(other) as late:
        put_prompt(store, tokens, importance=worth).wait(60)
        for layer in range(store.geometry.n_layers):
            given = None if worth is None else worth[layer]
            late.put(layer, 0, keys[layer], values[layer], given)
    assert late.stored.wait(60)
    return tokens, other


def test_a_dead_head_is_left_out_too(open_store: Open, geometry: impress.Geometry) -> None:
    store = open_store(geometry, window=WINDOW, dram_bytes=0)
    worth = np.random.default_rng(0).random((geometry.n_layers, 256), dtype=np.float32)
    tokens, other = dead_head(store, worth)  # packed
    (dead,) = store.catalog.dead()
    assert (dead.n_dead, dead.n_windows) == (12, 16)
    before = answers(store, other)
    look(store, other)
    assert store.repack().spans[0].outcome == "rewritten"
    for one, two in zip(before, answers(store, other), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    for asked in (tokens, other):
        assert_serves(store, asked, 256)
    sound(store)
    store.close()
    again = open_store(geometry, window=WINDOW)
    for asked in (tokens, other):
        assert_serves(again, asked, 256)
    assert again.stats()["spans"] == 2 and again.catalog.dead() == []
    sound(again)


@pytest.mark.parametrize("where", ["deciding", "copying", "mapping"])
def test_a_span_for_which_there_is_no_memory_takes_no_others_turn(
    open_store: Open, geometry: impress.Geometry, clock: list[float],
    monkeypatch: pytest.MonkeyPatch, where: str,
) -> None:  # fmt: skip
    """It ended the pass, and was the first of the next pass again: what was mostly dead after it
    stayed so. All of the day's bytes that it had been allowed were gone; and again, once the error
    was the one that `aligned` raises (where: mapping)."""
    daily = {"daily_write_bytes": 64 * MIB, "repack_every_s": 0}
    store = open_store(geometry, window=WINDOW, dram_bytes=0, **daily)
    prompts = [asked for seed in (10, 20, 30) for asked in dead_head(store, seed=seed)]
    first, *others = [dead.span for dead in store.catalog.own_dead()]
    as_it_lies, planes = SpanPart.as_it_lies, list[int]()

    def decides(header: SpanHeader, *windows: int) -> SpanPart:
        if header.record.span_id == first:
            raise MemoryError
        return as_it_lies(header, *windows)

    def copies(n_bytes: int) -> np.ndarray:
        planes.append(n_bytes)
        if len(planes) == 2:  # the first is written by then
            raise ReadFailed("shortage", "memory") if where == "mapping" else MemoryError
        return aligned(n_bytes)

    left = store.stats()["writes_left_bytes"]
    with monkeypatch.context() as patch:
        if where == "deciding":
            patch.setattr(SpanPart, "as_it_lies", decides)
        else:
            patch.setattr("impress.repacking.span_copy.aligned", copies)
        report = store.repack()
    short = "no memory" if where == "deciding" else "failed"
    assert [(span.span, span.outcome) for span in report.spans] == [
        (first, short), *((span, "rewritten") for span in others),
    ]  # fmt: skip
    left -= report.moved_bytes + sum(planes[:1])
    assert store.stats()["writes_left_bytes"] == left
    assert [span.outcome for span in store.repack().spans] == ["rewritten"]
    assert store.catalog.dead() == []
    for asked in prompts:
        assert_serves(store, asked, 256)
    sound(store)


def test_no_memory_for_a_header_says_nothing_against_the_disk(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store was read-only for half a minute, and every prompt to be stored was refused."""
    store = open_store(geometry, window=WINDOW, dram_bytes=0, repack_every_s=0)
    dead_head(store, seed=10)

    def none(n_bytes: int) -> np.ndarray:
        raise ReadFailed("shortage", f"memory: no {n_bytes:,} bytes more")

    with monkeypatch.context() as patch:
        patch.setattr("impress.write.headers.aligned", none)
        assert [span.outcome for span in store.repack().spans] == ["failed"]
        stored = put_prompt(store, prompt(64, 77), wait_s=30)
        with pytest.raises(StoreFailed, match="memory"):
            stored.wait(60)
        with pytest.raises(StoreFailed, match="memory"):
            store.flush()
    assert put_prompt(store, prompt(64, 78), wait_s=30).wait(60)
    sound(store)


def test_a_lease_from_before_reads_to_its_end(open_store: Open, geometry: impress.Geometry) -> None:
    store = open_store(geometry, window=WINDOW, dram_bytes=0)
    other, span = half_dead(store)
    heat = store.catalog.heat_of(span)
    with store.lease(other) as lease, lease.session() as session:
        assert store.repack().spans[0].outcome == "rewritten"
        for layer in range(geometry.n_layers):
            assert session.retrieve(layer, None)[0].shape[1] == 256
    store.flush()
    (new,) = [r for r in store.catalog.records() if r.first_window == 0]
    assert new.span_id != span and new.n_windows == 2
    now = store.catalog.heat_of(new.span_id)
    assert heat is not None and now is not None and now[0] == heat[0] + 1
    assert read_header(store.ssd, new).order is None
    sound(store)


def test_a_fault_while_it_is_rewritten_changes_nothing(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(geometry, window=WINDOW, dram_bytes=0)
    other, span = half_dead(store)
    used = store.ssd.usage().used
    for where, name, error in (
        (store.ssd, "write", MediumError("ssd: injected")),
        (store.ssd, "sync", MediumError("ssd: injected")),
        (store.index, "commit", StoreFailed("index: injected")),
    ):
        with monkeypatch.context() as faulty:
            faulty.setattr(where, name, failing(error))
            store._home.health.reason = ""
            assert store.repack().spans[0].outcome == "failed"
        assert [d.span for d in store.catalog.dead()] == [span]
        assert store.ssd.usage().used == used
        assert_serves(store, other, 256)
        sound(store)
    crashed = store.path.parent / "crashed"
    shutil.copytree(store.path, crashed)
    config = impress.Config(window=WINDOW, segment_bytes=MIB)
    with impress.PrefixStore.open(crashed, geometry, "test", config) as after:
        assert_serves(after, other, 256)
        after.check()
    store._home.health.reason = ""
    assert store.repack().spans[0].outcome == "rewritten"
    shutil.rmtree(crashed)
    shutil.copytree(store.path, crashed)
    with impress.PrefixStore.open(crashed, geometry, "test", config) as after:
        assert_serves(after, other, 256)
        assert_serves(after, prompt(256), 32)
        after.check()


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*args: Any, **named: Any) -> Any:
        raise error

    return fail


# ---- a day's writes ------------------------------------------------------------------------


def test_a_budget_goes_on_after_a_restart() -> None:
    now = [5.0]
    one = WriteBudget(1000, lambda: now[0])
    assert one.allow(900) and one.left_bytes == 100
    one.refund(100)
    saved = one.dump()
    now[0] += DAY_S / 10
    two = WriteBudget(1000, lambda: now[0], saved)
    assert two.left_bytes == 300
    assert WriteBudget(2000, lambda: now[0], saved).left_bytes == 1400
    now[0] -= DAY_S  # the clock was set back
    assert WriteBudget(1000, lambda: now[0], saved).left_bytes == 200
    assert WriteBudget(1000, lambda: now[0], b"damaged").left_bytes == 1000
    nothing = WriteBudget(None, lambda: now[0], saved)
    assert nothing.left_bytes is None and nothing.allow(1 << 60) and len(nothing.dump()) == 16


@pytest.mark.parametrize("limit", [1000, None])
def test_a_clock_that_was_behind_for_a_while_gives_no_second_day(limit: int | None) -> None:
    """Before the clock was set, what was spent was saved as of ten days ago; once it was set, ten
    days had gone by."""
    now = [100 * DAY_S]
    spent = WriteBudget(1000, lambda: now[0])
    assert spent.allow(1000)
    before = spent.dump()
    now[0] -= 10 * DAY_S
    behind = WriteBudget(limit, lambda: now[0], before)
    now[0] += DAY_S / 10  # while it runs the day goes on
    assert behind.allow(0)
    saved = behind.dump()
    now[0] += 10 * DAY_S - DAY_S / 10 + 60
    left = WriteBudget(1000, lambda: now[0], saved).left_bytes
    assert left is not None and left <= 1000 / 10 + 2


@pytest.mark.parametrize("behind_days", [3.0, 100.0, 0.5], ids=["days", "from 0", "half a day"])
def test_time_that_a_process_did_not_see_go_by_is_given_once(behind_days: float) -> None:
    """The wall clock was set right as it ran: what it spent then was saved as of before, so that a
    restart a minute later had a day's writes again."""
    wall, own = [100 * DAY_S], [(100 - behind_days) * DAY_S]
    asleep = WriteBudget(1000, lambda: own[0], wall=lambda: wall[0])
    assert asleep.allow(1000)
    saved = asleep.dump()
    wall[0] += 60
    left = WriteBudget(1000, lambda: wall[0], saved, lambda: wall[0]).left_bytes
    assert left is not None and left <= 2


@pytest.mark.parametrize("restarted", [False, True], ids=["awake", "restarted"])
def test_days_that_the_machine_slept_give_their_writes_once(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    """A suspend was seen by no clock that fills the budget: what was spent before it was refused
    for a day after it, and a restart saved all of it as spent just now."""
    slept, real = [0.0], time.clock_gettime

    def read(which: int) -> float:
        return real(which) + slept[0] * (which == time.CLOCK_BOOTTIME)

    monkeypatch.setattr(time, "clock_gettime", read)
    monkeypatch.setattr(impress.write.home, "wall_clock", lambda: time.time() + slept[0])
    config = {"window": WINDOW, "daily_write_bytes": 20 * MIB}
    store = open_store(geometry, **config)
    assert store._home.budget.allow(20 * MIB) and store.stats()["writes_left_bytes"] < MIB
    slept[0] = 3 * DAY_S
    if restarted:
        store.close()
        store = open_store(geometry, **config)
    assert store.stats()["writes_left_bytes"] == 20 * MIB
    assert store._home.budget.allow(20 * MIB)
    store.close()
    assert open_store(geometry, **config).stats()["writes_left_bytes"] < MIB


@pytest.mark.parametrize("limit", [1000, None])
def test_a_clock_that_was_far_ahead_for_a_while_does_not_stop_the_days_writes(
    limit: int | None,
) -> None:
    """The clock's time was saved, and nothing was credited between processes until the clock got
    there again: a short-lived writer was refused for years."""
    now = [4000 * DAY_S]
    ahead = WriteBudget(1000, lambda: now[0])
    assert ahead.allow(1000)
    saved = ahead.dump()
    now[0] = 100 * DAY_S
    back = WriteBudget(limit, lambda: now[0], saved)
    saved = back.dump()
    assert WriteBudget(1000, lambda: now[0], saved).left_bytes == 0  # what is spent stays
    for left in (250, 500):
        now[0] += DAY_S / 4
        each = WriteBudget(1000, lambda: now[0], saved)
        assert each.left_bytes == left
        saved = each.dump()
    now[0] += DAY_S
    assert WriteBudget(1000, lambda: now[0], saved).left_bytes == 1000
    for damaged in (float("nan"), float("inf")):
        raw = struct.pack("<ddd", 1000, 4000 * DAY_S, damaged)
        assert WriteBudget(1000, lambda: now[0], raw).left_bytes == 1000


def test_what_a_killed_process_wrote_counts_in_the_days_writes(
    open_store: Open, geometry: impress.Geometry, clock: list[float]
) -> None:
    """A store counted only once it was READY: a process that is killed in each had no limit."""
    config = {"window": WINDOW, "daily_write_bytes": 64 * MIB}
    store = open_store(geometry, **config)
    path, n_written = store.path, 0
    store.close()

    def half_a_store() -> None:
        with impress.PrefixStore.open(path, geometry, "test", impress.Config(**config)) as store:
            tokens = prompt(1024)
            keys, values = kv_of(tokens, geometry)
            writer = store.writer(tokens)
            writer.__enter__()
            writer.put(0, 0, keys[0], values[0])
            os.kill(os.getpid(), signal.SIGKILL)

    n_bytes = 1024 * geometry.token_bytes
    for _ in range(3):
        assert said_by_a_child(half_a_store).startswith("ended by -9")
        n_written += n_bytes
    left = open_store(geometry, **config).stats()["writes_left_bytes"]
    assert left <= 64 * MIB - n_written + MIB


def test_an_index_is_synced_by_the_call_that_commits(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """A power cut shows it, and to try one takes root (experiments.faults): an environment that was
    opened with sync=False passed every test."""
    flags = open_store(geometry)._home.index._env.flags()
    assert flags["sync"] and flags["metasync"] and not flags["map_async"]


def test_every_segment_that_a_span_lies_in_is_synced(tmp_path: Path) -> None:
    with closing(SsdTier(tmp_path, PAGE, None)) as tier:
        slots = [tier.reserve(PAGE) for _ in range(3)]
        parts = [part for slot in slots if slot is not None for part in slot.parts]
        assert len({part.segment for part in parts}) == 3
        tier.write(Slot(tuple(parts)), 0, aligned(3 * PAGE)[: 3 * PAGE])
        synced, fdatasync = set[str](), os.fdatasync

        def noted(fd: int) -> None:
            synced.add(str(Path(f"/proc/self/fd/{fd}").readlink()))
            fdatasync(fd)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fdatasync", noted)
            tier.sync([Slot(tuple(parts))])
        assert synced == {str(path) for path in tmp_path.glob("*.seg")}


def test_a_process_without_a_limit_leaves_the_next_one_what_is_spent() -> None:
    """It saved "0 spent" in the index: `impress repack` or `purge` gave a new day's bytes."""
    now = [5.0]

    def left(saved: bytes) -> int | None:
        return WriteBudget(1000, lambda: now[0], saved).left_bytes

    one = WriteBudget(1000, lambda: now[0])
    assert one.allow(600)
    now[0] += DAY_S / 10
    idle = WriteBudget(None, lambda: now[0], one.dump())
    assert left(idle.dump()) == one.left_bytes == 500
    assert idle.allow(250) and idle.allow(100)
    idle.refund(100)
    assert 150 <= (left(idle.dump()) or 0) <= 250  # as much as there is, or a little less
    assert idle.allow(1 << 40) and left(idle.dump()) == 0
    now[0] += DAY_S / 2
    assert left(idle.dump()) == 500  # and counts for a day at most
    steady = WriteBudget(None, lambda: now[0])
    for _ in range(1000):
        now[0] += DAY_S / 100
        assert steady.allow(7)
    assert 300 >= (left(steady.dump()) or 0) >= 295  # of 700 a day
    for damaged in (float("nan"), float("inf"), -1.0):
        assert left(struct.pack("<dd", damaged, now[0])) == 1000


def test_a_clock_set_back_and_forward_gives_no_second_day(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second step counted as a day gone by."""
    now = [1e9]
    monkeypatch.setattr(impress.write.home, "wall_clock", lambda: now[0])
    store = open_store(geometry, window=WINDOW, daily_write_bytes=3 * MIB)
    put_prompt(store, prompt(512, 0)).wait(60)
    left = store._home.budget.left_bytes
    for step in (-DAY_S, DAY_S):
        now[0] += step
        assert left <= store._home.budget.left_bytes < left + MIB


def test_the_days_writes_bound_stores_and_survive(
    open_store: Open, geometry: impress.Geometry, clock: list[float]
) -> None:
    config = {"window": WINDOW, "daily_write_bytes": 3 * MIB}
    store = open_store(geometry, **config)
    assert put_prompt(store, prompt(256, 1)).wait(60)
    assert put_prompt(store, prompt(256, 2)).wait(60)
    refused = put_prompt(store, prompt(256, 3))
    assert refused.refused == "daily write budget" and not refused.wait(60)
    assert store.stats()["refused"] == {"daily_write_budget": 1}
    left = store.stats()["writes_left_bytes"]
    assert 0 < left < MIB
    assert_serves(store, prompt(256, 1), 256)
    store.close()
    store = open_store(geometry, **config)
    assert store.stats()["writes_left_bytes"] == left
    assert put_prompt(store, prompt(256, 3)).refused
    clock[0] += DAY_S / 2
    assert put_prompt(store, prompt(256, 3)).wait(60)
    sound(store)


@pytest.mark.parametrize("what", ["an abandoned store", "a pass stopped by close"])
def test_what_came_to_nothing_is_spent_after_a_restart_too(
    open_store: Open, geometry: impress.Geometry, clock: list[float], what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It was saved only with a store: the last transaction said nothing of the day's writes."""
    config = {"window": WINDOW, "daily_write_bytes": 20 * MIB}
    store = open_store(geometry, **config)
    assert put_prompt(store, prompt(256)).wait(60)
    before = store.stats()["writes_left_bytes"]
    if what == "an abandoned store":
        with store.writer(prompt(256, 1)) as writer:
            pass
        assert not writer.stored.wait(60)
    else:
        look(store, prompt(256))
        real = store.ssd.write

        def write(*args: Any) -> None:
            assert store._repacker is not None
            store._repacker._stop.set()
            real(*args)

        monkeypatch.setattr(store.ssd, "write", write)
        assert store.repack().spans == []
    left = store.stats()["writes_left_bytes"]
    assert left <= before - MIB
    store.close()
    assert open_store(geometry, **config).stats()["writes_left_bytes"] == left


def test_a_rebuild_keeps_what_is_spent(
    open_store: Open, geometry: impress.Geometry, clock: list[float]
) -> None:
    with open_store(geometry, window=WINDOW, daily_write_bytes=20 * MIB) as store:
        assert put_prompt(store, prompt(256)).wait(60)
        left = store.stats()["writes_left_bytes"]
    assert rebuild_store(store.path).spans == 1
    with open_store(geometry, window=WINDOW, daily_write_bytes=20 * MIB) as store:
        assert store.stats()["writes_left_bytes"] == left < 20 * MIB
        assert_serves(store, prompt(256), 256)


# ---- a disk that fails ---------------------------------------------------------------------


def test_it_is_left_alone_and_then_tried() -> None:
    now, tried, answer = [0.0], [], [MediumError("still bad")]

    def probe() -> None:
        tried.append(now[0])
        if answer:
            raise answer[0]

    health = Health(Path("store"), probe, lambda: now[0])
    assert health.refusal(1) == "" and not tried
    health.trouble("it broke")
    assert health.refusal(1) == health.refusal(0) == "read-only: it broke" and not tried
    now[0] += RETRY_S
    assert health.refusal(1) == "read-only: still bad" == health.refusal(1)
    assert tried == [RETRY_S] and health.failing
    now[0] += RETRY_S
    answer.clear()
    assert health.refusal(1) == "" and tried == [RETRY_S, 2 * RETRY_S] and not health.reason


def test_what_goes_on_failing_puts_off_no_trial() -> None:
    """History that found no room was saved again every 20 s, and each time put the trial off by 30:
    no store was taken for as long as requests came."""
    now, tried = [0.0], []
    health = Health(Path("store"), lambda: tried.append(now[0]), lambda: now[0])
    for _ in range(5):
        health.trouble("it broke")
        now[0] += RETRY_S / 2
        if not health.refusal(1):
            break
    assert tried == [RETRY_S] and not health.reason


def test_what_has_no_room_keeps_out_what_is_as_large_and_no_more() -> None:
    now = [0.0]
    health = Health(Path("store"), lambda: pytest.fail("the medium has not failed"), lambda: now[0])
    health.trouble("full", 77)
    assert health.refusal(77) == health.refusal(99) == "read-only: full"
    assert not health.refusal(76) and not health.failing and health.reason == "full"
    health.found_room(76)
    assert health.refusal(77)
    health.trouble("full", 50)  # one of those finds none, either
    assert health.refusal(76) and not health.refusal(49)
    now[0] += RETRY_S
    assert not health.refusal(99) and health.refusal(99)  # the first finds out for itself
    health.trouble("full", 99)
    assert health.refusal(50)
    health.found_room(60)
    assert not health.reason and not health.refusal(99)
    health.trouble("full", 77)
    health.found_room(1)
    assert health.reason
    now[0] += RETRY_S  # else it would be said for ever where nothing as large comes any more
    health.found_room(1)
    assert not health.reason


def test_a_disk_that_fails_while_it_is_full_is_said(caplog: pytest.LogCaptureFixture) -> None:
    health = Health(Path("store"), lambda: None, lambda: 0.0)
    health.trouble("full", 77)
    health.trouble("full", 50)
    health.trouble("it broke")
    health.trouble("it broke")
    assert [message.split(": ")[-1].split(";")[0] for message in caplog.messages] == [
        "full",
        "it broke",
    ]
    assert health.failing and health.refusal(1)


@pytest.mark.parametrize("where", ["write", "sync", "commit"])
def test_a_failing_disk_is_read_only_until_it_takes_writes(
    open_store: Open, geometry: impress.Geometry, clock: list[float], where: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "impress")
    store = open_store(geometry, window=WINDOW, dram_bytes=0)
    put_prompt(store, prompt(256, 1)).wait(60)
    target = store.index if where == "commit" else store.ssd
    error = (StoreFailed if where == "commit" else MediumError)(f"{where}: No space left on device")
    with monkeypatch.context() as faulty:
        faulty.setattr(target, where, failing(error))
        with pytest.raises(StoreFailed, match="No space left"):
            put_prompt(store, prompt(256, 2)).wait(60)
        for seed in range(2, 5):
            stored = put_prompt(store, prompt(256, seed))
            assert stored.refused == f"read-only: {where}: No space left on device"
        clock[0] += RETRY_S
        assert put_prompt(store, prompt(256, 2)).refused.startswith("read-only")
        assert store.stats()["ssd_read_only"] == f"{where}: No space left on device"
        assert_serves(store, prompt(256, 1), 256)
        with pytest.raises(StoreFailed):
            store.flush()
    assert put_prompt(store, prompt(256, 2)).refused  # not before its time
    assert store.stats()["refused"]["read-only"] == 5
    clock[0] += RETRY_S
    assert put_prompt(store, prompt(256, 2)).wait(60)
    assert store.stats()["ssd_read_only"] == ""
    lines = [r.message for r in caplog.records if r.name == "impress"]
    assert sum("read-only from here on" in line for line in lines) == 1
    assert sum("takes writes again" in line for line in lines) == 1
    sound(store)


def test_what_the_index_does_not_let_go_is_not_followed_by_more(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look for room took live spans out of the tree, and freed nothing before a restart."""
    store = open_store(geometry, window=WINDOW, dram_bytes=0)
    for seed in range(4):
        assert put_prompt(store, prompt(128, seed)).wait(60)
    used = store.ssd.usage().used
    with monkeypatch.context() as faulty:
        faulty.setattr(store.index, "commit", failing(StoreFailed("index: No space left")))
        assert [store.evict(1) for _ in range(3)] == [0, 0, 0]
        assert store.ssd.usage().used == used and store.stats()["retired_spans"] == 1
    assert sum(store.lookup(prompt(128, seed)) for seed in range(4)) == 3 * 128
    freed = store.evict(1)
    assert freed == used - store.ssd.usage().used == used // 4
    assert sum(store.lookup(prompt(128, seed)) for seed in range(4)) == 3 * 128
    with pytest.raises(StoreFailed, match="No space left"):  # what failed since the last flush
        store.flush()
    sound(store)
    store.close()
    with open_store(geometry, window=WINDOW) as again:
        assert again.stats()["spans"] == 3


def test_a_segment_that_cannot_be_deleted_stays_one(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """`evict` ended in a bare OSError, and no new segment could be made under its name."""
    store = open_store(geometry, window=WINDOW, dram_bytes=0)
    for seed in range(3):
        assert put_prompt(store, prompt(256, seed)).wait(60)
    (first, *rest), unlink = sorted(store.ssd.folder.iterdir()), Path.unlink

    def fails(path: Path, **named: Any) -> None:
        if path == first:
            raise OSError(errno.EIO, "Input/output error")
        unlink(path, **named)

    with monkeypatch.context() as faulty:
        faulty.setattr(Path, "unlink", fails)
        assert store.evict(1 << 30) > 3 * MIB
    assert f"{first} is not deleted: Input/output error" in caplog.text
    assert len(rest) > 1 and list(store.ssd.folder.iterdir()) == [first]
    assert store.ssd.usage().total == MIB
    for seed in range(3):
        assert put_prompt(store, prompt(256, seed)).wait(60)
    sound(store)
    assert store.evict(1 << 30) and not list(store.ssd.folder.iterdir())


def test_what_a_failed_sync_may_have_lost_is_never_ready(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports a lost page once: the sync of one store may be told of another's page."""
    store = open_store(geometry, window=WINDOW, dram_bytes=0)
    keys, values = kv_of(prompt(256, 1), geometry)
    with store.writer(prompt(256, 1)) as early:
        for layer in range(geometry.n_layers):
            early.put(layer, 0, keys[layer], values[layer])
        with monkeypatch.context() as faulty:
            faulty.setattr(os, "fdatasync", failing(OSError(5, "Input/output error")))
            with pytest.raises(StoreFailed, match="Input/output error"):
                put_prompt(store, prompt(256, 2)).wait(60)
    with pytest.raises(StoreFailed, match="lost writes"):
        early.stored.wait(60)
    assert store.lookup(prompt(256, 1)) == store.lookup(prompt(256, 2)) == 0
    with pytest.raises(StoreFailed):
        store.flush()
    store._home.health.reason = ""
    assert put_prompt(store, prompt(256, 1)).wait(60)
    sound(store)


@contextmanager
def told_to_another(store: impress.PrefixStore, record: SpanRecord) -> Iterator[list[Any]]:
    """Before the next sync another thread is told that one failed; the list is filled then."""
    fdatasync, told = os.fdatasync, list[Any]()

    def erases() -> None:
        with pytest.raises(MediumError):
            store.ssd.sync([Slot(record.parts)])

    def between(fd: int) -> None:
        if threading.current_thread().name == "eraser":
            raise OSError(5, "Input/output error")
        if not told:
            told.append(threading.Thread(target=erases, name="eraser"))
            told[0].start()
            told[0].join(60)
        fdatasync(fd)

    with pytest.MonkeyPatch.context() as faulty:
        faulty.setattr(os, "fdatasync", between)
        yield told


def test_an_erasing_whose_sync_failed_on_another_thread_is_not_done(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """The kernel reports once: the purge heard that all is well; a power cut brought it back."""
    store = open_store(geometry)
    assert put_prompt(store, prompt(256, 1)).wait(60)
    (record,) = store.catalog.records()
    with told_to_another(store, record) as told:
        with pytest.raises(StoreFailed, match="not all could be overwritten"):
            store.purge()
    assert told and [*store.index.to_erase()] == [record.span_id]
    store.purge()
    assert store.stats()["spans"] == 0


@pytest.mark.parametrize("what", ["store", "repack"])
def test_a_sync_that_fails_on_another_thread_meanwhile_is_noticed(
    open_store: Open, geometry: impress.Geometry, what: str
) -> None:
    """Erasing freed space syncs too: that sync was told of the page, and the store became READY."""
    store = open_store(geometry, window=WINDOW, dram_bytes=0)
    tokens = prompt(256, 1)
    assert put_prompt(store, tokens).wait(60)
    (record,) = store.catalog.records()
    look(store, tokens)
    with told_to_another(store, record) as told:
        if what == "repack":
            assert [span.outcome for span in store.repack().spans] == ["failed"]
        else:
            with pytest.raises(StoreFailed, match="lost writes"):
                put_prompt(store, prompt(256, 2)).wait(60)
    assert told and store.stats()["spans"] == 1
    if what == "store":
        assert store.lookup(prompt(256, 2)) == 0
        with pytest.raises(StoreFailed):
            store.flush()
    assert_serves(store, tokens, 256)
    sound(store)


def test_a_sync_that_fails_while_a_span_is_copied_is_noticed(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lost page that another sync is told of may be one of the copy's."""
    store = open_store(geometry, window=WINDOW, dram_bytes=0)
    tokens = prompt(256, 1)
    assert put_prompt(store, tokens).wait(60)
    look(store, tokens)
    copy = Copier._copy_plane

    def told(self: Copier, *args: Any) -> None:
        store.ssd.sync_failures += 1
        copy(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Copier, "_copy_plane", told)
        assert [span.outcome for span in store.repack().spans] == ["failed"]
    assert_serves(store, tokens, 256)
    sound(store)


def test_a_gauge_says_so(open_store: Open, geometry: impress.Geometry) -> None:
    from impress.cli.live import live_counters
    from impress.write.directory import read_identity

    store = open_store(geometry, metrics_port=0, daily_write_bytes=MIB)
    assert store.metrics_port is not None
    uuid = read_identity(store.path).uuid
    assert live_counters(store.metrics_port, uuid)["ssd_read_only"] == 0
    store._home.health.trouble("it broke")
    assert live_counters(store.metrics_port, uuid)["ssd_read_only"] == 1


def test_a_full_file_system_is_read_only_until_there_is_room(
    small_disk: Path, geometry: impress.Geometry, clock: list[float]
) -> None:
    config = impress.Config(window=WINDOW, segment_bytes=MIB, dram_bytes=0)
    with impress.PrefixStore.open(small_disk / "store", geometry, "test", config) as store:
        seeds = iter(range(100))
        leases = []
        while not (last := put_prompt(store, prompt(128, seed := next(seeds)))).refused:
            assert last.wait(60)
            leases.append(store.lease(prompt(128, seed)))
        assert len(leases) > 3 and last.refused.startswith("read-only: ")
        assert "No space left on device" in last.refused
        assert_serves(store, prompt(128, 0), 128)
        clock[0] += RETRY_S
        assert put_prompt(store, prompt(128, seed)).refused  # all is still leased
        for lease in leases:
            lease.release()
        clock[0] += RETRY_S
        assert put_prompt(store, prompt(128, seed)).wait(60)  # by eviction
        assert_serves(store, prompt(128, seed), 128)
        sound(store)


def test_a_purge_on_a_full_file_system_is_not_done_and_can_be_done_again(
    small_disk: Path, geometry: impress.Geometry
) -> None:
    config = impress.Config(window=WINDOW, segment_bytes=MIB, dram_bytes=0)
    with impress.PrefixStore.open(small_disk / "store", geometry, "test", config) as store:
        assert put_prompt(store, prompt(128)).wait(60)
        with store.index._env.begin():  # an old reader: nothing the index freed is used again
            with (small_disk / "filler").open("wb", buffering=0) as filler:
                with pytest.raises(OSError, match="No space left"):
                    while filler.write(bytes(4096)):
                        pass
            with pytest.raises(StoreFailed, match=r"not purged: .*No space left on device"):
                store.purge()
        (small_disk / "filler").unlink()
        assert store.purge() == (1, 0)
        assert store.ssd.usage().used == 0 and store.lookup(prompt(128)) == 0
    with impress.PrefixStore.open(small_disk / "store", geometry, "test", config) as store:
        assert store.lookup(prompt(128)) == 0


def test_an_index_without_its_table_of_readers_on_a_full_file_system_is_refused_in_a_line(
    small_disk: Path, geometry: impress.Geometry
) -> None:
    """A purge leaves it so. LMDB maps a file of holes, and touching one was SIGBUS."""
    config = impress.Config(window=WINDOW, segment_bytes=MIB, dram_bytes=0)
    with impress.PrefixStore.open(small_disk / "store", geometry, "test", config) as store:
        assert put_prompt(store, prompt(128)).wait(60)
    (small_disk / "store/shards/main/index/lock.mdb").unlink()
    with (small_disk / "filler").open("wb", buffering=0) as filler:
        with pytest.raises(OSError, match="No space left"):
            while filler.write(bytes(4096)):
                pass

    def look() -> int:
        with impress.PrefixStore.open(small_disk / "store", geometry, "test", config, "r") as again:
            return again.lookup(prompt(128))

    assert "StoreFailed: index: " in (said := said_by_a_child(look)), said
    assert said.endswith("No space left on device")
    (small_disk / "filler").unlink()
    assert look() == 128


def test_where_files_are_copied_as_they_are_written_the_table_of_readers_is_not(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full btrfs the table had no room for its next copy: a running server's next lookup was
    SIGBUS. Nor had segments and the index: the store took no writes any more, and evicted nothing.
    Such a file keeps its place if it was told to while empty."""
    attributes: dict[int, int] = {}

    def ioctl(fd: int, request: int, raw: bytes) -> bytes:
        at = os.fstat(fd)
        if request == 0xC020660B:
            raise OSError(errno.ENOTTY, "of which blocks it is made, it does not say")
        if request == 0x80086601:
            return (attributes.get(at.st_ino, 0x40)).to_bytes(8, "little")
        assert request == 0x40086602 and not at.st_size
        attributes[at.st_ino] = int.from_bytes(raw, "little")
        return raw

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    store = open_store(geometry)
    put_prompt(store, prompt(128)).wait(60)
    main = store.path / "shards/main"
    kept = [main / "index/lock.mdb", main / "index/data.mdb", *(main / "segments").iterdir()]
    assert len(kept) == 3
    assert attributes == {path.stat().st_ino: 0x40 | 0x00800000 for path in kept}
    store.close()
    open_store(geometry).close()  # what is there is left alone


def test_a_copy_with_holes_is_given_its_blocks_back(
    small_disk: Path, geometry: impress.Geometry, caplog: pytest.LogCaptureFixture
) -> None:
    """`rsync -S` leaves zeros out. On a full disk such a store took no writes any more, for as long
    as there was room by its own account, and evicted nothing."""
    config = impress.Config(window=WINDOW, segment_bytes=MIB, dram_bytes=0)

    def opened() -> impress.PrefixStore:
        return impress.PrefixStore.open(small_disk / "store", geometry, "test", config)

    with opened() as store:
        put_prompt(store, prompt(128)).wait(60)
    (segment,) = (small_disk / "store/shards/main/segments").iterdir()
    for is_full in (False, True):
        with segment.open("r+b") as file:
            assert punch(file.fileno(), 3 * MIB // 4, MIB // 4)
        if is_full:
            with (small_disk / "filler").open("wb", buffering=0) as filler:
                with pytest.raises(OSError, match="No space left"):
                    while filler.write(bytes(4096)):
                        pass
        with opened() as store:
            assert_serves(store, prompt(128), 128)
        assert (segment.stat().st_blocks * 512 == MIB) is not is_full
        said = f"{segment.name} has holes, and there is no room for its blocks"
        assert (said in caplog.text) is is_full


@pytest.mark.parametrize("free", ["less than the holes", "less than holes and spare"])
def test_a_copy_with_more_holes_than_room_takes_none_of_it(
    ext4: Path, geometry: impress.Geometry, caplog: pytest.LogCaptureFixture, free: str
) -> None:
    """It took all there was, to the last byte, and kept it: a purge to make room then failed."""
    config = impress.Config(window=WINDOW, segment_bytes=4 * MIB, dram_bytes=0)

    def opened() -> impress.PrefixStore:
        return impress.PrefixStore.open(ext4 / "store", geometry, "test", config)

    with opened() as store:
        put_prompt(store, prompt(128)).wait(60)
    (segment,) = (ext4 / "store/shards/main/segments").iterdir()
    with segment.open("r+b") as file:
        assert punch(file.fileno(), MIB, 3 * MIB)
    left = 2 * MIB if free == "less than the holes" else 3 * MIB + spare_of(ext4) // 2

    def free_bytes() -> int:
        at = os.statvfs(ext4)
        return at.f_bavail * at.f_frsize

    with (ext4 / "filler").open("wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, free_bytes() - left)
    n_free = free_bytes()
    with opened() as store:
        assert free_bytes() == n_free
        assert f"{segment.name} has holes, and there is no room for its blocks" in caplog.text
        assert store.purge() == (1, 0) and store.lookup(prompt(128)) == 0


def test_a_copy_that_shares_blocks_ends_no_process_on_a_full_disk(
    xfs: Path, geometry: impress.Geometry
) -> None:
    """`cp -a` shares them where it can. The table of readers then had no room for its next write:
    on a full disk every open, and `impress verify`, ended by SIGBUS."""
    config = impress.Config(window=WINDOW, segment_bytes=MIB, dram_bytes=0)

    def look() -> int:
        with impress.PrefixStore.open(xfs / "store", geometry, "test", config) as store:
            return store.lookup(prompt(128))

    with impress.PrefixStore.open(xfs / "store", geometry, "test", config) as store:
        put_prompt(store, prompt(128)).wait(60)

    def copied() -> None:
        shutil.rmtree(xfs / "copy", ignore_errors=True)
        command = ["cp", "-a", "--reflink=always", xfs / "store", xfs / "copy"]
        subprocess.run(command, check=True)

    table = xfs / "store/shards/main/index/lock.mdb"
    copied()
    fd = os.open(table, os.O_RDWR)
    assert shares_blocks(fd)
    assert look() == 128 and not shares_blocks(fd)  # with room, it gets blocks of its own
    os.close(fd)
    copied()
    with (xfs / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No sp"):
        while filler.write(bytes(MIB)):
            pass
    with (xfs / "last").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
        while filler.write(bytes(4096)):
            pass
    said = said_by_a_child(look)
    assert said.startswith("StoreFailed: index: ") and said.endswith("No space left on device")
    shutil.rmtree(xfs / "copy")
    assert said_by_a_child(look) == "returned"


def test_a_store_that_fills_its_file_system_leaves_its_index_room(small_disk: Path) -> None:
    """It took the last byte for rows: the index could not grow any more, so nothing could be
    stored, evicted or purged ever again, nor rebuilt."""
    tiny = impress.Geometry(1, 1, 1, 8, "float16")  # much index for few rows
    config = impress.Config(window=WINDOW, segment_bytes=MIB, dram_bytes=0)
    with impress.PrefixStore.open(small_disk / "store", tiny, "test", config) as store:
        for seed in range(300):
            assert put_prompt(store, prompt(40 * WINDOW, seed)).wait(60), seed
        assert_serves(store, prompt(40 * WINDOW, 299), 40 * WINDOW)
        assert store.stats()["evicted_spans"] > 200
        sound(store)
        assert store.purge()[0] > 10 and not store.ssd.usage().used
