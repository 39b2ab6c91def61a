"""A batch of tasks under way, and those who wait for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Final

from tiers.errors import Cancelled

log = logging.getLogger("impress.io")

#: How often `until` looks.
LOOK_S: Final = 0.01

_FAILED: Final = "what was to follow a ticket failed"

Task = Callable[[], None]
Callback = Callable[[], object]


class Ticket:
    """A batch of tasks under way. Done when each has run, failed or been cancelled."""

    __slots__ = (
        "_callbacks",
        "_cancelled",
        "_error",
        "_gates",
        "_left",
        "_lock",
        "ended_s",
    )

    def __init__(self, n_tasks: int) -> None:
        self._lock = threading.Lock()
        # One for each thread that waits; released when the ticket is done. Not an Event: an
        # exception that a signal raises during its wait can leave its lock taken, and then whoever
        # sets it hangs.
        self._gates: list[threading.Lock] = []
        self._left = n_tasks
        self._error: BaseException | None = None
        self._cancelled = False
        self._callbacks: list[Callback] = []
        self.ended_s = inf if n_tasks else monotonic()  # when it was done

    @property
    def done(self) -> bool:
        return self._left == 0

    @property
    def given_up(self) -> bool:
        """Cancelled, while a task of it is still running or queued."""
        return self._cancelled and not self.done

    def wait(self, timeout_s: float) -> bool:
        """True when all tasks ran, False when timeout_s passed first.

        Raises the first error of a task, Cancelled where one did not run.
        """
        if not self.over(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def over(self, timeout_s: float) -> bool:
        """Wait as `wait` does, whatever becomes of the tasks: raises none of their errors."""
        if not self._left:
            return True
        gate = threading.Lock()
        gate.acquire()
        with self._lock:
            if self._left:
                self._gates.append(gate)
            else:
                gate.release()
        if gate.acquire(timeout=timeout_s):
            gate.release()
            return True
        with self._lock:
            if gate in self._gates:  # else it is being released
                self._gates.remove(gate)
                gate.release()
        return not self._left

    def cancel(self) -> None:
        """Tasks that have not started will not run; one under way goes on to its end."""
        with self._lock:
            self._cancelled = True

    def then(self, callback: Callback) -> None:
        """Call back once when done, from whichever thread ends it; at once if it is done.

        What a callback raises is logged: it is not that thread's affair. A callback in which a
        signal raises is called once more, as it may have done nothing yet: that must do no harm.
        """
        with self._lock:
            if self._left:
                self._callbacks.append(callback)
                return
        try:
            _call(callback)
        except BaseException:
            _call(callback)
            raise

    def run(self, task: Task, due: list[Ticket] | None = None) -> None:
        """Run one task of this ticket, on a pool thread; its error is kept for wait().

        `due`: for a thread that signals come to. It holds this ticket until the task is counted, so
        that a caller that is cut off sees whether it was; and a signal's exception is passed on.
        """
        try:
            if self._cancelled:
                raise Cancelled("the task was cancelled before it ran")
            if self._error is None:
                task()
        except BaseException as err:
            with self._lock:
                self._error = self._error or err
            if due is not None and not isinstance(err, Exception):
                raise
        finally:
            self._count([self] if due is None else due)

    def _count(self, due: list[Ticket]) -> None:
        """Count the tasks due as over. After the last, let go of those who wait and call back."""
        try:
            with self._lock:
                self._left -= len(due)
                del due[:]  # no signal comes between: Python looks for them after calls
                if self._left:
                    return
                self.ended_s = monotonic()
                while self._gates:
                    gate = self._gates[-1]
                    del self._gates[-1]
                    gate.release()
            while self._callbacks:
                callback = self._callbacks[0]
                del self._callbacks[0]  # no signal comes between: this thread calls it, no other
                try:
                    _call(callback)
                except BaseException:
                    _call(callback)
                    raise
        except BaseException:  # a signal's: do the rest all the same
            self._count(due)
            raise


def until(true: Callable[[], bool], timeout_s: float) -> bool:
    """Look now and then whether it is so, for at most timeout_s. A lock that is taken only to see
    that it is free may stay taken where a signal comes."""
    end_s = monotonic() + timeout_s
    while not true():
        if monotonic() > end_s:
            return False
        threading.Event().wait(LOOK_S)
    return True


class Signal:
    """As threading.Event, except that an exception which a signal raises during a wait leaves no
    lock taken: whoever sets the event would hang, perhaps a thread that all others wait for."""

    __slots__ = ("_lock", "_ticket")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ticket = Ticket(1)

    def is_set(self) -> bool:
        return self._ticket.done

    def set(self) -> None:
        with self._lock:
            if not self._ticket.done:
                self._ticket.run(lambda: None)

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._ticket.wait(-1 if timeout_s is None else max(timeout_s, 0.0))


def _call(callback: Callback) -> None:
    try:
        callback()
    except Exception:
        log.exception(_FAILED)
