"""Signals that strike anywhere in what they are aimed at."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable
from typing import Any

import pytest


def of_fire(test: Any) -> Any:
    """A test that uses `under_fire`, which takes SIGALRM from pytest-timeout; what strikes in a
    finalizer is swallowed there."""
    test = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")(test)
    return pytest.mark.timeout(120, method="thread")(test)


def under_fire(act: Callable[[], Any], n_struck: int) -> None:
    """Act again and again until signals have raised KeyboardInterrupt in it so often."""
    inside = False

    def strike(*_: Any) -> None:
        if inside:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, strike)
    gc.disable()  # hypothesis has a callback there
    try:
        for n in range(n_struck):
            try:
                # Again after a while: one may be swallowed where nobody hears of it (__del__).
                signal.setitimer(signal.ITIMER_REAL, 1e-5 * (1 + n % 16), 0.05)
                inside = True
                while True:
                    act()
            except KeyboardInterrupt:
                inside = False
    finally:
        inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
