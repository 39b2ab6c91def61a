"""A line of jobs and the one thread that does them.

A signal may cut off any call of this module at any point, and leaves a line that works.
`queue.Queue` uses conditions, which are in Python: a signal just after one has taken its lock
leaves the lock taken for ever. CPython before 3.13 counts a thread whose `join` or `is_alive` was
cut off as ended; one whose `start` was cut off may run, or hang before it does.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, Generic, TypeVar

from tiers.errors import MediumError
from tiers.threads import start

log = logging.getLogger("impress")

T = TypeVar("T")

_LOOK_S: Final = 1.0  # how often to look whether the thread that is waited for is alive


class _Mark:
    """Reached once all before it in the line is done."""

    def __init__(self) -> None:
        self._is_reached = False
        self._wake = threading.Lock()
        self._wake.acquire()

    def reach(self) -> None:
        self._is_reached = True
        self._wake.release()

    def reached(self, timeout_s: float) -> bool:
        """Whether it is reached, waiting for timeout_s at most."""
        return self._is_reached or self._wake.acquire(timeout=timeout_s)


class Line(Generic[T]):
    """Does jobs in the order offered, in a thread started with the first of them."""

    def __init__(
        self, name: str, work: Callable[[T], None], limit: int,
        at_exit: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`limit`: how many jobs there is room for, besides the one that is being done.

        `at_exit`: called as the program ends, if there is a thread that nobody closed.
        """
        self.limit = limit
        self._at_exit = at_exit
        self._name = name
        self._work = work
        # The thread that came first to `_run`: of those begun, one may hang and another come late.
        self._worker: dict[str, threading.Thread] = {}
        self._jobs: deque[T | _Mark | None] = deque()  # None: no more will come
        self._wake: SimpleQueue[None] = SimpleQueue()  # at least as many items as jobs that wait
        self._at: T | None = None
        self._begun, self._end = _Mark(), _Mark()
        self._is_begun = False
        self._pid = os.getpid()

    @property
    def alive(self) -> bool:
        """Whether its thread is there; not in a fork's child."""
        return self._is_ours() and bool(self._worker)

    def held(self) -> list[T]:
        """Jobs that wait, and the one being done."""
        at = self._at
        return [*([] if at is None else [at]), *self._waiting()]

    def _waiting(self) -> list[T]:
        jobs = [*self._jobs]  # in one step
        return [job for job in jobs if job is not None and not isinstance(job, _Mark)]

    def begin(self) -> None:
        """Make sure that there is a thread. Raises MediumError."""
        if not self._worker:
            self._is_begun = True
            atexit.register(self._at_exit)  # before the start: cut off after it, nobody would
            try:
                start(threading.Thread(target=self._run, name=self._name, daemon=True))
            except MediumError:
                atexit.unregister(self._at_exit)
                raise
            self._begun.reached(_LOOK_S)

    def offer(self, job: T) -> bool:
        """Take a job, after `begin`; False where there is no room. Never waits."""
        if len(self._waiting()) >= self.limit:
            return False
        self._put(job)
        return True

    def drain(self) -> None:
        """Wait until every job offered is done."""
        mark = _Mark()
        if self._has_any():
            self._put(mark)
        while self._has_any() and not mark.reached(_LOOK_S):  # it may be closed meanwhile
            self.begin()

    def close(self) -> None:
        """Do all offered jobs and end the thread. Idempotent, even if cut off; no job follows."""
        atexit.unregister(self._at_exit)
        has_any = self._has_any()
        self._put(None)  # also for a thread that comes late
        while has_any and self._is_ours() and not self._end.reached(_LOOK_S):
            self.begin()
        for worker in self._worker.values() if self._pid == os.getpid() else ():
            worker.join()

    def _has_any(self) -> bool:
        """Whether there is a thread, or something for one to do."""
        jobs = [job for job in [*self._jobs] if job is not None]
        return self._is_ours() and bool(self._worker or jobs)

    def _is_ours(self) -> bool:
        """Whether there is a thread, or may be one, that has not ended; not in a fork's child."""
        return self._is_begun and self._pid == os.getpid() and not self._end.reached(0)

    def _put(self, job: T | _Mark | None) -> None:
        try:
            self._jobs.append(job)
        finally:
            self._wake.put(None)  # even if the append was cut off: one too many does no harm

    def _run(self) -> None:
        this = threading.current_thread()
        if self._worker.setdefault("", this) is not this:
            return
        self._begun.reach()
        try:
            while self._do_all():
                self._wake.get()
        finally:
            self._end.reach()

    def _do_all(self) -> bool:
        """Do the jobs there are now; False if no more will come."""
        while self._jobs:
            job = self._jobs.popleft()
            if job is None:
                return False
            if isinstance(job, _Mark):
                job.reach()
            else:
                self._do(job)
            del job  # else what it refers to is held until the next one comes
        return True

    def _do(self, job: T) -> None:
        self._at = job
        try:
            self._work(job)
        except Exception:  # the next job is done all the same
            log.exception("%s: a job failed", self._name)
        finally:
            self._at = None
