"""All I/O threads start here: a bounded crew that serves five lanes in order of urgency."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from functools import partial
from operator import and_
from time import monotonic
from typing import Final

from tiers.threads import start
from tiers.ticket import Task, Ticket

#: Threads that copy within memory: more hold each other up, at the interpreter and in the system's
#: queues. (84 MB, two processors: 6.8 ms by two threads, 8.3 by eight.)
PROCESSORS: Final = len(os.sched_getaffinity(0))
#: Longest that threads which were started in vain are waited for.
_VAIN_S: Final = 10.0


class Lane(IntEnum):
    """Urgency, among copies and among all else; beside copies that wait for a processor nothing
    runs that nobody waits for.

    That is what there is from PROMOTE on.
    """

    DEMAND = 0
    AHEAD = 1
    STORE = 2
    PROMOTE = 3
    REPACK = 4


Job = tuple[Ticket, Task]


def _cancel(jobs: Iterable[Job]) -> None:
    for ticket, task in jobs:
        ticket.cancel()
        ticket.run(task)


class IoPool:
    """Threads that run tickets. A task is a slice of work for one thread (≤ a few MiB), so a
    demand never waits long behind a store.

    What copies within memory has as many threads as there are processors, beside those that wait
    for a medium: copies are made while reads are under way.

    `n_threads`: of those that wait for a medium, and of those that copy at most. `n_behind`: how
    many threads at once may work for nobody who waits (lanes PROMOTE and REPACK). More would share
    processors and interpreter with the next demand, which comes at any time.
    """

    def __init__(self, n_threads: int, name: str = "impress-io", n_behind: int = 1) -> None:
        """Raises MediumError where it cannot have so many."""
        self.n_threads = n_threads
        self.n_copiers = min(PROCESSORS, n_threads)
        # By lane: what copies within memory, and all else.
        self._copies, self._others = ([deque[Job]() for _ in Lane] for _ in range(2))
        # Entered bare: Condition.__enter__ is Python, and what a signal raises in it, the lock
        # just taken, would leave it taken for good.
        self._lock = threading.Lock()
        self._wake, self._quiet = (threading.Condition(self._lock) for _ in range(2))
        self._open = True
        self._n_behind = n_behind
        self._at = [0, 0]  # threads at work that somebody waits for, and at other work
        self._n_copying = 0  # of both
        n_all = n_threads + self.n_copiers  # any of them does either
        self._since = [0.0] * n_all  # when each began the task it is at; 0: idle
        self._is_copying = [False] * n_all
        self._threads: list[threading.Thread] = []
        try:
            for i in range(n_all):
                thread = threading.Thread(
                    target=self._work, args=(i,), name=f"{name}-{i}", daemon=True
                )
                start(thread)
                self._threads.append(thread)
        except BaseException:  # those that were started would wait for work for ever
            self.close(_VAIN_S)
            raise

    def submit(
        self, lane: Lane, tasks: Sequence[Task], after: Ticket | None = None,
        note: Callable[[Ticket], object] = lambda ticket: None, *, copies: bool = False,
    ) -> Ticket:  # fmt: skip
        """Queue tasks, first in first out within their lane. After close they are cancelled.

        `copies`: they copy within memory. `after`: not before that ticket is done,
        however it ends; until then they hold no thread.
        `note`: called with their ticket before they are queued. A caller that noted what this
        returns could be interrupted by a signal before it has, and then nobody would wait for
        reads that are under way. Whatever is raised from there on, the ticket ends.
        """
        ticket = Ticket(len(tasks))
        jobs = iter([(ticket, task) for task in tasks])
        queue = partial(self._queue, lane, self._copies if copies else self._others, ticket, jobs)
        try:
            note(ticket)
            if after is None:
                queue()
            else:
                after.then(queue)
        except BaseException:  # of `note`, before anything is queued; else see _queue
            _cancel(jobs)
            raise
        return ticket

    def _queue(
        self, lane: Lane, kind: list[deque[Job]], ticket: Ticket, jobs: Iterator[Job]
    ) -> None:
        """Queue a ticket's jobs. Where an exception (a signal's, say) comes in between, those not
        queued yet are cancelled, and the threads are woken for those that are."""
        try:
            with self._lock:
                if self._open:
                    queued = kind[lane]
                    queued.extend(jobs)  # all or none: no signal comes between
                    self._wake.notify(len(queued) if kind is self._others else self._n_free())
        except BaseException:
            with self._lock:
                self._wake.notify_all()
            raise
        finally:
            _cancel(jobs)

    def run_here(self, lane: Lane, tickets: Iterable[Ticket]) -> None:
        """Run on the caller's thread what no thread has begun of these: it waits for no turn.

        Where a signal raises in between, the task it came in has failed, and the rest of them stay
        queued, now at the front.
        """
        wanted, due = set(tickets), list[Ticket]()
        try:
            while (task := self._draw(lane, wanted, due)) is not None:
                due[0].run(task, due)
        except BaseException:
            for ticket in due[:]:  # drawn, and not counted as over
                ticket.cancel()
                ticket.run(lambda: None, due)
            raise

    def _draw(self, lane: Lane, wanted: set[Ticket], due: list[Ticket]) -> Task | None:
        """A task of these tickets, off its queue, its ticket noted as due; None: all have begun."""
        with self._lock:
            for kind in (self._copies, self._others):
                queued = kind[lane]
                if queued and queued[0][0] in wanted:
                    break
                if mine := [job for job in queued if job[0] in wanted]:
                    # To the front, so that each next one is found at once.
                    others = [job for job in queued if job[0] not in wanted]
                    queued = kind[lane] = deque(mine + others)
                    break
            else:
                return None
            ticket, task = queued[0]
            if len(queued) == 1:  # who waits for them to be gone
                self._wake.notify_all()
                self._quiet.notify_all()
            due += [ticket]
            del queued[0]  # no signal comes between
            return task

    def depth(self) -> list[int]:
        """Queued tasks by lane."""
        return [sum(map(len, kinds)) for kinds in zip(self._copies, self._others, strict=True)]

    def idle(self, timeout_s: float) -> bool:
        """True once nothing is queued or under way; False when timeout_s passed first."""
        with self._lock:
            return self._quiet.wait_for(
                lambda: not any(self._at) and not self._is_queued(), timeout_s
            )

    def n_stuck(self, limit_s: float) -> int:
        """Threads that have been at one task for longer than limit_s: the medium holds them."""
        return sum(self._stuck(limit_s))

    def is_stuck(self, limit_s: float) -> bool:
        """Whether all are that may read at once, or all that may copy: no read could end."""
        stuck = self._stuck(limit_s)
        n_copies: int = sum(map(and_, stuck, self._is_copying))
        return n_copies >= self.n_copiers or sum(stuck) - n_copies >= self.n_threads

    def _stuck(self, limit_s: float) -> list[bool]:
        begun_before = monotonic() - limit_s
        return [0.0 < since < begun_before for since in self._since]

    def close(self, timeout_s: float) -> bool:
        """Run what is queued, stop the threads; False when one is stuck past timeout_s."""
        with self._lock:
            self._open = False
            self._wake.notify_all()
        deadline = monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _is_queued(self) -> bool:
        return any(self._others) or any(self._copies)

    def _is_behind(self, lane: Lane) -> bool:
        """Whether something waits that nobody waits for, behind copies of this lane."""
        some = any(self._others[Lane.PROMOTE :]) or any(self._copies[Lane.PROMOTE :])
        return lane < Lane.PROMOTE and some

    def _n_free(self) -> int:
        """How many more threads may copy."""
        return self.n_copiers - self._n_copying

    def _next(self) -> tuple[Lane, bool, Ticket, Task] | None:
        with self._lock:
            while True:
                behind, may_copy = self._at[1] < self._n_behind, self._n_free() > 0
                may_read = sum(self._at) - self._n_copying < self.n_threads
                for lane in Lane if behind else _WAITED_FOR:
                    if lane >= Lane.PROMOTE and any(self._copies[: Lane.PROMOTE]):
                        break  # processors are wanted for these
                    queued, copies = self._others[lane] if may_read else None, self._copies[lane]
                    if may_copy and copies:
                        queued = copies
                    if queued:
                        job = lane, queued is copies, *queued[0]
                        if queued is copies and len(queued) == 1 and self._is_behind(lane):
                            self._wake.notify()  # its turn, once these are gone
                        queued.popleft()  # at last: behind it nothing asks for memory
                        self._at[lane >= Lane.PROMOTE] += 1
                        self._n_copying += queued is copies
                        return job
                if not self._open and not self._is_queued():
                    self._wake.notify_all()  # those who waited for their turn at what was left
                    return None
                self._wake.wait()

    def _work(self, number: int) -> None:
        working = True
        while working:
            try:
                working = self._turn(number)
            except MemoryError:  # outside of a task; what was not drawn is still queued
                continue

    def _turn(self, number: int) -> bool:
        """Run a task; False when that was the last."""
        job = self._next()
        if job is None:
            return False
        lane, copies, ticket, task = job
        try:
            self._is_copying[number], self._since[number] = copies, monotonic()
            ticket.run(task)
        finally:
            self._since[number] = 0.0
            # A waiting worker must not keep the last ticket's buffers alive.
            del job, ticket, task
            with self._lock:
                self._at[lane >= Lane.PROMOTE] -= 1
                self._n_copying -= copies
                if copies and lane >= Lane.PROMOTE:
                    self._wake.notify()  # this thread may be wanted for another copy
                if not any(self._at) and not self._is_queued():
                    self._quiet.notify_all()
        return True


_WAITED_FOR: Final = (Lane.DEMAND, Lane.AHEAD, Lane.STORE)
