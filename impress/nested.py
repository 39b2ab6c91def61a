"""Calls that interrupt others on their own thread: a signal handler's, a finalizer's.

Such a call may wait for a lock that only the call which it interrupts gives back, and that one
goes on when it has returned: never. Who is interrupted is read off the thread's stack. There it is
for certain, whichever lock is held, and neither takes time in a request nor is left behind by an
exception.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import FrameType
from typing import Final

from impress.errors import ImpressError

#: What is a store's; and of that, what only calls it, as any program may.
_OURS: Final = ("impress.", "tiers.")
_CALLERS: Final = ("impress.cli.", "impress.demo.", "impress.engines.")


def check_alone(what: str, parts: Collection[object], asking: str) -> None:
    """Raises ImpressError where the calling thread is in a method of one of a store's parts, or of
    an object that has one as an attribute; but for the call that asks, in the module `asking`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _module(frame) in (asking, "contextlib"):
        frame = frame.f_back
    mine = set(map(id, parts))
    while frame is not None:
        if _module(frame).startswith(_OURS) and not _module(frame).startswith(_CALLERS):
            called = frame.f_locals.get("self")
            if not mine.isdisjoint(map(id, [called, *getattr(called, "__dict__", {}).values()])):
                raise ImpressError(
                    f"{what}: called in the middle of another call of this store, on its thread, "
                    "by a signal handler, a finalizer or a callback: call it afterwards (a handler "
                    "may raise SystemExit)"
                )
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
