"""Threads that may not be had: what the system says then, and what to do about it."""

from __future__ import annotations

import threading
from typing import Final, TypeGuard

from tiers.errors import MediumError

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
        cut_off = err.__context__  # what a signal raises in Python's own wait for it comes out so
        if cut_off is not None and not isinstance(cut_off, Exception):
            raise cut_off from None
        raise


def started(thread: threading.Thread | None) -> TypeGuard[threading.Thread]:
    """Whether there is one that has begun: Ctrl-C may come before it does."""
    return thread is not None and thread.ident is not None
