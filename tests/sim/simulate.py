"""One seed, from start to end, with everything put back after it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from world import World

from impress.errors import ImpressError, StoreFailed
from impress.write import batches, swap
from impress.write.swap import failed
from tiers.errors import MediumError

LIVES = 8


def simulate(folder: Path, seed: int, lives: int = LIVES) -> World:
    """Run one seed; raises AssertionError (or whatever broke) where a promise was broken."""
    with ExitStack() as stack:

        def patch(target: Any, name: str, value: Any) -> None:
            stack.callback(setattr, target, name, getattr(target, name))
            setattr(target, name, value)

        logging.disable(logging.CRITICAL)  # every fault would be logged
        stack.callback(logging.disable, logging.NOTSET)
        bugs: list[Exception] = []

        def noted(err: Exception, what: str = "") -> StoreFailed:
            """The committer carries on after a bug; here its seed does not. (A thread killed as it
            counts a task off retries up to the limit of its stack: that is not a finding.)"""
            if not (isinstance(err, ImpressError | MediumError) or world.sched.current.killed):
                bugs.append(err)
            return failed(err, what)

        for module in (swap, batches):
            patch(module, "failed", noted)
        world = World(folder, seed, patch)
        try:
            world.run(lives)
            if bugs:
                raise bugs[0]
        except Exception:
            world.crash()  # else its threads stay parked for good and its index stays open
            raise
        return world


Simulate = Callable[[Path, int, int], World]
