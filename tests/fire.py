"""Signals that strike at any point of the code they are aimed at."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable
from typing import Any

import pytest


def of_fire(test: Any) -> Any:
    """Marks a test that uses `under_fire`, which takes SIGALRM from pytest-timeout; an error raised
    by a signal in a finalizer is swallowed there."""
    test = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")(test)
    return pytest.mark.timeout(120, method="thread")(test)


def under_fire(act: Callable[[], Any], n_struck: int) -> None:
    """Call `act` again and again until signals have raised KeyboardInterrupt `n_struck` times."""
    inside = False

    def strike(*_: Any) -> None:
        if inside:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, strike)
    gc.disable()  # hypothesis hooks a callback into it
    try:
        for n in range(n_struck):
            try:
                # Repeated after a while: one may be swallowed where nobody hears of it (__del__).
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
