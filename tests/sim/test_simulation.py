"""The whole store under a seeded scheduler, faulty disk and crashes: sixty seconds of it."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from pathlib import Path

import pytest
from simulate import simulate
from turns import Event, Hang, Scheduler, Thread

import tiers.ssd

#: `make soak` gives more.
SECONDS = float(os.environ.get("IMPRESS_SIM_SECONDS", "60"))


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


def test_a_seed_replays(tmp_path: Path) -> None:
    """The same number of turns at the same times, or a failure could not be looked at twice."""
    ends = []
    for name in ("once", "again"):
        (tmp_path / name).mkdir()
        world = simulate(tmp_path / name, 12345, 4)
        ends.append((world.sched.switches, world.sched.now, world.rng.random()))
    assert ends[0] == ends[1]


def test_it_would_notice_unverified_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums switched off: a bit that flips on the way must show as a wrong answer."""
    monkeypatch.setattr(tiers.ssd, "verify", lambda read, where: None)
    with pytest.raises(AssertionError) as found:
        for seed in range(1, 60):
            folder = tmp_path / str(seed)
            folder.mkdir()
            simulate(folder, seed)
    assert "wrong" in str(found.value)


def test_it_would_notice_a_commit_before_the_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are READY before they are durable: a power cut must show it."""
    import disk
    import world

    monkeypatch.setattr(disk.SimSsd, "sync", lambda self, slots: None)
    monkeypatch.setattr(world, "FAULTS", (disk.Faults(),))
    monkeypatch.setattr(world, "ENDS", ("power",))
    with pytest.raises(AssertionError) as found:
        for seed in range(1, 60):
            folder = tmp_path / str(seed)
            folder.mkdir()
            simulate(folder, seed)
    said = str(found.value)  # lost, or gone bad under a store that hangs from it
    assert any(words in said for words in ("READY", "after a restart", "a store failed"))


def test_it_would_notice_a_hang() -> None:
    sched = Scheduler(1)
    never = Event(sched)
    waiter = Thread(sched, never.wait, name="waiter")
    waiter.start()
    with pytest.raises(Hang, match="waiter"):
        sched.wait_until(lambda: not waiter.alive, None)
    sched.kill_all()
