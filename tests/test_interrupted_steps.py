"""Ctrl-C at every single step of a call: nothing stays taken.

CPython looks for signals as a function begins and behind each call of what is written in C; both
are events of a profiler. (And as a loop goes round: as a rule a call away from one of these.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import pytest

from impress.cache.chunks import ChunkCache, Ids
from tiers.base import Slot
from tiers.ssd import SsdTier

State = TypeVar("State")
HOLE = 64 << 10


class Interrupted:
    """A with-block in which Ctrl-C comes at step n; whether it `came`, as the block may be over."""

    def __init__(self, n: int) -> None:
        self._left = n
        self.came = False

    def __enter__(self) -> Interrupted:
        sys.setprofile(self._step)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> bool:
        sys.setprofile(None)
        return self.came and kind is KeyboardInterrupt

    def _step(self, frame: FrameType, event: str, _of: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename != __file__:
            self._left -= 1
            if self._left < 0 and not self.came:
                self.came = True
                raise KeyboardInterrupt


def at_each_step(
    make: Callable[[], State], act: Callable[[State], object], check: Callable[[State], object]
) -> None:
    """Interrupt `act` at its first step, then, of a new state, at its second, … up to its end."""
    for n in count():
        state = make()
        with Interrupted(n) as interrupted:
            act(state)
        check(state)
        if not interrupted.came:
            assert n > 3
            return


@pytest.mark.parametrize("in_holes", [False, True], ids=["a new segment", "holes"])
def test_an_interrupted_reserve_takes_nothing(tmp_path: Path, in_holes: bool) -> None:
    """What it had taken nobody knew of: lost until a restart."""
    names = count()

    def make() -> tuple[SsdTier, list[Slot | None]]:
        tier = SsdTier(tmp_path / str(next(names)), 4 * HOLE, 4 * HOLE)
        slots = [tier.reserve(HOLE) for _ in range(4 * in_holes)]
        for slot in slots[::2]:
            assert slot is not None
            tier.free(slot)
        return tier, slots[1::2]

    def reserve(state: tuple[SsdTier, list[Slot | None]]) -> None:
        state[1].append(state[0].reserve(2 * HOLE, HOLE))

    def check(state: tuple[SsdTier, list[Slot | None]]) -> None:
        tier, slots = state
        tier.check()
        assert tier.usage().used == sum(slot.n_bytes for slot in slots if slot is not None)
        tier.close()

    at_each_step(make, reserve, check)


@pytest.mark.parametrize("how", ["pin", "unpin", "unpin and drop"])
def test_an_interrupted_pin_or_unpin_leaves_no_pin(how: str) -> None:
    """A copy that stayed pinned could not be evicted until a restart."""

    def make() -> tuple[ChunkCache, list[Ids]]:
        cache = ChunkCache(8 * 8192, {0: 4096, 1: 4096}, 1)
        cache.publish(cache.admit(1, 6, 0, np.arange(4))[1])
        noted: list[Ids] = []
        if how != "pin":
            cache.pin(1, 0, 0, 6, noted=noted)
        return cache, noted

    def act(state: tuple[ChunkCache, list[Ids]]) -> None:
        cache, noted = state
        if how == "pin":
            cache.pin(1, 0, 0, 6, noted=noted)
        else:
            cache.unpin(noted[0], drop=how.endswith("drop"))

    def check(state: tuple[ChunkCache, list[Ids]]) -> None:
        cache, noted = state
        for entries in noted:  # as whoever pinned does
            cache.unpin(entries)
        cache.check()
        cache.clear()
        assert not cache.occupancy()
        assert how.endswith("drop") or cache.tier.usage().used == 0

    at_each_step(make, act, check)
