"""Threads that the system may refuse, and when one has ended."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from tiers.errors import MediumError
from tiers.ticket import Ticket

#: What to do where the system starts no more of them.
MORE_THREADS: Final = (
    "no more threads can be started: raise `ulimit -u`, `ulimit -v` or the container's limit of "
    "processes, or lower Config.io_threads"
)


def no_more_threads(err: Exception) -> bool:
    """Whether it says that the system starts no more threads: Python has no class for that."""
    return isinstance(err, RuntimeError) and "can't start new thread" in str(err)


def start(thread: threading.Thread) -> None:
    """Raises MediumError where the system starts no more threads."""
    try:
        thread.start()
    except RuntimeError as err:
        if no_more_threads(err):
            raise MediumError(MORE_THREADS) from None
        cut_off = err.__context__  # a signal's exception in Python's own wait comes out like this
        if cut_off is not None and not isinstance(cut_off, Exception):
            raise cut_off from None
        raise


class Worker:
    """A daemon thread that tells for sure whether it has ended.

    CPython before 3.13 takes a thread for ended once a signal has cut off a `join` of it: a caller
    that asked again closed files that the thread still wrote to.
    """

    def __init__(self, target: Callable[..., None], name: str, *args: Any) -> None:
        self._target = target
        self._ended = Ticket(1)
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, args=args, name=name, daemon=True)

    def start(self) -> None:
        """Raises MediumError where the system starts no more threads."""
        start(self._thread)

    @property
    def begun(self) -> bool:
        """Whether it has begun: Ctrl-C may come before."""
        return self._thread.ident is not None

    def ended(self, timeout_s: float) -> bool:
        """Whether it has ended, waiting for timeout_s at most (below 0: as long as it takes). True
        in a fork's child, which has none, and as the interpreter ends: it has stopped there."""
        if self._pid != os.getpid() or sys.is_finalizing():
            return True
        if not self._ended.over(timeout_s):
            return False
        self._thread.join()  # what is left of it is Python's own
        return True

    def _run(self, *args: Any) -> None:
        try:
            self._target(*args)
        finally:
            self._ended.run(lambda: None)
