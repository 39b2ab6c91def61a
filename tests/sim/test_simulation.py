"""The whole store under a seeded scheduler, faulty disk and crashes: twenty seconds of it."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import disk
import pytest
import world
from simulate import simulate
from turns import Condition, Event, Hang, Lock, Scheduler, Thread

import impress
import tiers.ssd
from impress.spans.format import SpanRecord
from impress.tree.merged import MergedCatalog
from impress.write.headers import Headers
from impress.write.index import Index
from tiers.base import Slot

#: `make soak` allows more.
SECONDS = float(os.environ.get("IMPRESS_SIM_SECONDS", "20"))
#: What failures say when something READY turns out not to be there.
BROKEN = ("READY", "after a restart", "lost on a good disk", "but a store failed")


def test_nothing_is_lost_wrong_or_stuck(tmp_path: Path) -> None:
    """A failing seed is replayed by `python tests/sim/run.py --seed N`."""
    started = time.monotonic()
    for seed in itertools.count(1):
        if seed > 1 and time.monotonic() - started > SECONDS:
            break
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            simulate(folder, seed)
        except BaseException as err:
            err.add_note(f"replay: python tests/sim/run.py --seed {seed}")
            raise
        shutil.rmtree(folder)


def test_what_it_is_about_happens(tmp_path: Path) -> None:
    seen, missing = Counter[str](), {"hits", "lost", "evicted", "moved"}
    for seed in range(1, 30):
        (tmp_path / str(seed)).mkdir()
        seen += simulate(tmp_path / str(seed), seed).seen
        if not missing - seen.keys():
            return
    pytest.fail(f"of thirty seeds none has {missing - seen.keys()}")


def test_a_seed_replays(tmp_path: Path) -> None:
    """As many turns at the same times: otherwise a failure could not be looked at twice."""
    ends = []
    for name in ("once", "again"):
        (tmp_path / name).mkdir()
        world = simulate(tmp_path / name, 12345, 4)
        ends.append((world.sched.switches, world.sched.now, world.rng.random()))
    assert ends[0] == ends[1]


def test_a_bit_that_went_bad_excuses_one_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It excused all that came after it: in a quarter of all lives less was checked."""
    excused, wanted = list[bool](), list[bool]()
    rot, clients = world.World._rot, world.World._clients

    def rots(self: world.World) -> None:
        wanted[-1] = True  # the next life
        rot(self)

    def noted(self: world.World) -> None:
        excused.append(self.excused and self.unsure)
        wanted.append(False)
        clients(self)

    monkeypatch.setattr(world.World, "_rot", rots)
    monkeypatch.setattr(world.World, "_clients", noted)
    monkeypatch.setattr(world, "FAULTS", (disk.Faults(),))
    monkeypatch.setattr(world, "ENDS", ("close",))
    for seed in itertools.count(1):
        excused.clear()
        wanted[:] = [False]
        (tmp_path / str(seed)).mkdir()
        simulate(tmp_path / str(seed), seed)
        assert excused == wanted[:-1], seed
        if True in excused and not excused[-1]:
            return


def try_seeds(tmp_path: Path) -> None:
    """Run seeds until one shows what a test has broken."""
    for seed in range(1, 60):
        folder = tmp_path / str(seed)
        folder.mkdir()
        simulate(folder, seed)


def test_it_would_notice_unverified_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums switched off: a bit that flips on the way must show as a wrong answer."""
    monkeypatch.setattr(tiers.ssd, "verify", lambda read, where: None)
    with pytest.raises(AssertionError) as found:
        try_seeds(tmp_path)
    assert "wrong" in str(found.value)


def test_it_would_notice_a_commit_before_the_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are READY before they are durable: a power cut must show it."""
    monkeypatch.setattr(disk.SimSsd, "sync", lambda self, slots: None)
    monkeypatch.setattr(world, "FAULTS", (disk.Faults(),))
    monkeypatch.setattr(world, "ENDS", ("power",))
    with pytest.raises(AssertionError) as found:
        try_seeds(tmp_path)
    said = str(found.value)  # lost, or gone bad beneath a store that continues it
    assert any(words in said for words in BROKEN), said


def test_it_would_notice_a_header_that_was_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index named the span, and any of it that could not be leased was taken for a miss."""

    def rows_alone(self: Headers, spans: Iterable[tuple[SpanRecord, int]]) -> None:
        self._ssd.sync([Slot(record.parts) for record, _ in spans])

    monkeypatch.setattr(Headers, "sync", rows_alone)
    monkeypatch.setattr(world, "FAULTS", (disk.Faults(),))
    monkeypatch.setattr(world, "ENDS", ("power",))
    with pytest.raises(AssertionError) as found:
        try_seeds(tmp_path)
    said = str(found.value)  # at the next open, at a request, or at a store that continues it
    assert any(words in said for words in BROKEN), said


def test_it_would_notice_a_bug_behind_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug met by the committer is reported as a failed store, which a bad disk excused; and a
    store that never ended was taken for one that was not READY."""

    def broken(self: MergedCatalog, record: object, prefix: bytes) -> int:
        raise KeyError("a bug")

    monkeypatch.setattr(MergedCatalog, "publish", broken)
    monkeypatch.setattr(world, "FAULTS", (disk.Faults(write=1e-6),))
    monkeypatch.setattr(world, "ENDS", ("close",))
    with pytest.raises(AssertionError, match=r"has not ended|failed by a bug"):
        try_seeds(tmp_path)


def test_it_would_notice_what_is_ready_and_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only spans that were found were remembered as READY: one never found was not missed."""
    before = set(threading.enumerate())
    monkeypatch.setattr(impress.PrefixStore, "lookup", lambda self, tokens: 0)
    with pytest.raises(AssertionError, match="was READY, and 0 of its tokens"):
        try_seeds(tmp_path)
    for thread in set(threading.enumerate()) - before:  # those of the life that failed
        thread.join(60)
        assert not thread.is_alive(), thread.name


def test_it_would_notice_a_thread_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that ended one of the store's threads was printed, and the seed passed."""
    commit = Index.commit

    def at_last(self: Index, *args: Any, last: bool = False, **named: Any) -> None:
        if last:
            raise KeyError("a bug")
        commit(self, *args, **named)

    monkeypatch.setattr(Index, "commit", at_last)
    monkeypatch.setattr(world, "ENDS", ("close",))
    with pytest.raises(KeyError, match="a bug"):
        simulate(tmp_path, 1, 1)


def test_it_would_notice_a_hang() -> None:
    sched = Scheduler(1)
    never = Event(sched)
    waiter = Thread(sched, never.wait, name="waiter")
    waiter.start()
    with pytest.raises(Hang, match="waiter"):
        sched.wait_until(lambda: not waiter.alive, None)
    sched.kill_all()


@pytest.mark.parametrize("called", [False, True])
def test_it_would_notice_a_lost_wake_up(*, called: bool) -> None:
    """A waiter went on once its condition was true, whether or not anybody had notified it."""
    sched = Scheduler(1)
    cond, flag = Condition(sched, Lock(sched, "a test")), list[int]()

    def waits() -> None:
        with cond:
            cond.wait_for(lambda: flag)

    waiter = Thread(sched, waits, name="waiter")
    waiter.start()
    sched.wait_until(lambda: bool(cond._waiting), None)
    with cond:
        flag.append(1)
        if called:
            cond.notify()
    if called:
        sched.wait_until(lambda: not waiter.alive, None)
        return
    with pytest.raises(Hang, match="waiter"):
        sched.wait_until(lambda: not waiter.alive, None)
    sched.kill_all()
