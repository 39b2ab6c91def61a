"""Threads that take turns: one runs at a time, a seed decides who is next, time is virtual.

Stands in for `threading` and `monotonic` in the modules under test. A thread gives its turn away
where it would wait (locks, conditions, events, I/O), and nowhere else. When all wait, time jumps to
the first deadline; if there is none, that is a hang: a failure. The same seed gives the same run.
"""

from __future__ import annotations

import random
import threading as real
import traceback
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any


class Killed(BaseException):
    """The process this thread belonged to is gone."""


class Hang(AssertionError):
    """Every thread is waiting for another."""


class Thread:
    """threading.Thread, as far as the modules under test use it."""

    def __init__(
        self, sched: Scheduler, target: Callable[..., None], args: tuple[Any, ...] = (),
        name: str = "", daemon: bool = True,
    ) -> None:  # fmt: skip
        self.name = name
        self._sched = sched
        self._target, self._args = target, args
        self.turn = real.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True  # may it run now?
        self.deadline: float | None = None  # it may run from then on, too
        self.alive = False
        self.killed = False
        self._thread = real.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self.alive = True
        self._sched.threads.append(self)
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        self._sched.wait_until(lambda: not self.alive, timeout)

    def is_alive(self) -> bool:
        return self.alive

    def _run(self) -> None:
        self.turn.acquire()
        try:
            if not self.killed:
                self._target(*self._args)
        except Killed:
            pass
        except BaseException as err:
            if not self.killed:  # an error on the way out of a dead process is no finding
                self._sched.errors.append(err)
                traceback.print_exc()
        finally:
            self.alive = False
            self._sched.threads.remove(self)
            self._sched.hand_over()


class Scheduler:
    """Owns the turn. Made and used by the main thread of one run."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 1.0
        self.switches = 0
        self.threads: list[Thread] = []
        self.main = Thread(self, lambda: None, name="main")
        self.main.alive = True
        self.threads.append(self.main)
        self.current = self.main
        self.held: dict[Lock, Thread] = {}
        self.crash_at: int | None = None  # after this number of switches
        self.hang = ""
        self.errors: list[BaseException] = []  # the errors that ended threads

    # ---- giving the turn away ----------------------------------------------------------------

    def pause(self) -> None:
        """Any thread may go next, this one too."""
        self.wait_until(lambda: True, None)

    def wait_until(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Let others run until `ready` holds (True) or the time is up (False)."""
        me = self.current
        if me.killed:
            raise Killed
        me.ready = ready
        me.deadline = None if timeout is None else self.now + max(timeout, 0.0)
        if self._next() is not me:
            self.current.turn.release()
            me.turn.acquire()
        if me.killed:
            raise Killed
        if self.hang:
            waiting, self.hang = self.hang, ""
            raise Hang(f"nobody can go on: {waiting}")
        if me is self.main and self.crash_at is not None and self.switches >= self.crash_at:
            self.crash_at = None
            raise Killed
        return ready()

    def hand_over(self) -> None:
        """The current thread has ended."""
        self._next()
        self.current.turn.release()

    def _next(self) -> Thread:
        self.switches += 1
        if self.crash_at is not None and self.switches >= self.crash_at:
            self.current = self.main
            return self.main
        while True:
            able = [t for t in self.threads if t.ready() or self._late(t)]
            if able:
                self.current = self.rng.choice(able)
                return self.current
            deadlines = [t.deadline for t in self.threads if t.deadline is not None]
            if not deadlines:  # the main thread raises Hang
                self.hang = ", ".join(t.name for t in self.threads)
                self.current = self.main
                return self.main
            self.now = max(self.now, min(deadlines))

    def _late(self, thread: Thread) -> bool:
        return thread.deadline is not None and thread.deadline <= self.now

    def raise_errors(self) -> None:
        """Raise the first error that ended a thread, a client's or one of the store's own."""
        if self.errors:
            raise self.errors[0]

    # ---- the end of a process ----------------------------------------------------------------

    def kill_all(self) -> None:
        """Every thread but the main one ends at its next step. Only the main thread calls this."""
        self.crash_at = None
        for thread in [t for t in self.threads if t is not self.main]:
            thread.killed = True
            thread.ready = lambda: True
        self.held.clear()
        self.main.ready = lambda: len(self.threads) == 1
        self.main.deadline = None
        while len(self.threads) > 1:
            thread = next(t for t in self.threads if t is not self.main)
            self.current = thread
            thread.turn.release()
            self.main.turn.acquire()
        self.current = self.main

    # ---- what the modules see ----------------------------------------------------------------

    def clock(self) -> float:
        return self.now

    def threading(self, module: str) -> Any:
        """The stand-in for `threading` in a module."""
        return SimpleNamespace(
            Thread=lambda **options: Thread(self, **options),
            Lock=lambda: Lock(self, module),
            RLock=lambda: Lock(self, module),  # never taken twice by one thread here
            Condition=lambda lock=None: Condition(self, lock or Lock(self, module)),
            Event=lambda: Event(self),
            local=real.local,
            get_ident=lambda: id(self.current),
        )

    def install(self, modules: list[ModuleType], patch: Callable[[Any, str, Any], None]) -> None:
        """Put the stand-ins into modules that have imported the real things."""
        for module in modules:
            if getattr(module, "threading", None) is real:
                patch(module, "threading", self.threading(module.__name__))
            if hasattr(module, "monotonic"):
                patch(module, "monotonic", self.clock)

    def assert_unlocked(self) -> None:
        """I/O begins: the current thread must hold no lock except those made to be held long."""
        mine = [lock for lock, owner in self.held.items() if owner is self.current]
        bad = [lock.module for lock in mine if not lock.long]
        assert not bad, f"a lock of {bad} is held across I/O"


class Lock:
    """threading.Lock. Another thread may get a turn before it is taken."""

    #: Modules with locks held, by design, for a whole pass or while a tier's files open and grow.
    LONG = ("impress.repacking.repack", "tiers.ssd", "impress.write.env", "impress.write.follow")

    def __init__(self, sched: Scheduler, module: str) -> None:
        self.module = module
        self.long = module in self.LONG
        self._sched = sched
        self._taken = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._sched.current.killed:
            raise Killed
        if self._sched.rng.random() < 0.1:
            self._sched.pause()
        if self._taken:
            if not blocking:
                return False
            limit = None if timeout < 0 else timeout
            if not self._sched.wait_until(lambda: not self._taken, limit):
                return False
        self.take()
        return True

    def take(self) -> None:
        """Take it; the caller knows that it is free."""
        self._taken = True
        self._sched.held[self] = self._sched.current

    def release(self) -> None:
        self._taken = False
        self._sched.held.pop(self, None)

    def locked(self) -> bool:
        return self._taken

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """threading.Condition; others may share its lock (never taken twice by one thread here).

    As with the real one, a waiter goes on when it is notified, not as soon as its condition holds:
    a notify that is never made, or that reaches another waiter, is a hang. The seed decides which
    of several waiters is notified.
    """

    def __init__(self, sched: Scheduler, lock: Lock) -> None:
        self.acquire, self.release = lock.acquire, lock.release
        self._sched = sched
        self._lock = lock
        self._waiting: list[list[bool]] = []  # each: whether it was notified

    def __enter__(self) -> Condition:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def wait_for(self, ready: Callable[[], Any], timeout: float | None = None) -> bool:
        end = None if timeout is None else self._sched.now + max(timeout, 0.0)
        while not ready():
            left = None if end is None else end - self._sched.now
            if left is not None and left <= 0:
                return False
            self.wait(left)
        return True

    def wait(self, timeout: float | None = None) -> bool:
        lock, me = self._lock, [False]
        self._waiting.append(me)
        self.release()
        try:
            return self._sched.wait_until(lambda: not lock.locked() and me[0], timeout)
        finally:
            self._waiting = [other for other in self._waiting if other is not me]
            if not self._sched.current.killed:
                if lock.locked():
                    self._sched.wait_until(lambda: not lock.locked(), None)
                lock.take()

    def notify(self, n: int = 1) -> None:
        left = [one for one in self._waiting if not one[0]]
        for one in self._sched.rng.sample(left, min(n, len(left))):
            one[0] = True

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """threading.Event."""

    def __init__(self, sched: Scheduler) -> None:
        self._sched = sched
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._sched.wait_until(lambda: self._set, timeout)
