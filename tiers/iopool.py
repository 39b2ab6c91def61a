"""All I/O threads start here: a bounded crew that serves five lanes in order of urgency."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from functools import partial
from time import monotonic
from typing import Final

from tiers.threads import Worker
from tiers.ticket import Task, Ticket

#: Threads that copy within memory: more would hold up each other at the interpreter, and also any
#: thread that launches kernels on a device. (84 MB, two processors: 6.8 ms with two, 8.3 with
#: eight. On 16 beside an H200, requests that choose rows: 34 ms with two, 40 with four, 51 with
#: eight; pieces of 128 KiB are verified at 27 GB/s by two, at 22 by four, at 13 by eight.)
COPIERS: Final = min(2, len(os.sched_getaffinity(0)))
#: A write that waits beside endless reads goes ahead of one of them this often: else they would
#: hold up the stores behind it, and for two minutes look like a disk that writes nothing.
STORE_WAITS_S: Final = 0.1
#: A promotion that has waited this long goes ahead of one task; and the next once it has rested
#: _REST times as long as it took, at least _LEAST_REST_S: a tenth of one thread. Else, under
#: requests that never pause, caches would for ever hold what they held at first.
PROMOTE_WAITS_S: Final = 0.5
_REST: Final = 9
_LEAST_REST_S: Final = 0.01
#: Longest wait for threads that were started in vain.
_VAIN_S: Final = 10.0


class Lane(IntEnum):
    """Urgency, among copies and among all else. Nobody waits for the lanes from PROMOTE on: none of
    their work is begun while copies wait for a processor, but for PROMOTE_WAITS_S.
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

    Copies within memory have threads of their own: they are made while reads are under way.

    `n_threads`: as many wait for a medium, and at most as many copy. One thread at a time may do
    work that nobody waits for (lanes PROMOTE and REPACK): more would share processors and
    interpreter with the next demand, which comes at any time.
    """

    def __init__(self, n_threads: int, name: str = "impress-io") -> None:
        """Raises MediumError where it cannot have so many threads."""
        self.n_threads = n_threads
        self.n_copiers = min(COPIERS, n_threads)
        # By lane: first all else, then copies within memory. Each has threads that wake for it.
        self._queues = [[deque[Job]() for _ in Lane] for _ in range(2)]
        # Entered bare: Condition.__enter__ is Python code, and an exception that a signal raises in
        # it, with the lock just taken, would leave the lock taken for good.
        self._lock = threading.Lock()
        self._quiet, *self._wake = (threading.Condition(self._lock) for _ in range(3))
        self._open = True
        self._stored_s = 0.0  # when a write last began, or the first of those that wait came
        self._at = [0, 0]  # threads at work that somebody waits for, and at other work
        self._storing = 0  # of these, at writes
        self._promote_due_s = 0.0  # when promotions have waited, or rested, enough
        n_all = n_threads + self.n_copiers  # the copiers last
        self._since = [0.0] * n_all  # when each began the task it is at; 0: idle
        self._threads: list[Worker] = []
        try:
            for i in range(n_all):
                thread = Worker(self._work, f"{name}-{i}", i)
                thread.start()
                self._threads.append(thread)
        except BaseException:  # those that were started would wait for work for ever
            self.close(_VAIN_S)
            raise

    def submit(
        self, lane: Lane, tasks: Sequence[Task], after: Ticket | None = None,
        note: Callable[[Ticket], object] = lambda ticket: None, *, copies: bool = False,
    ) -> Ticket:  # fmt: skip
        """Queue tasks, first in first out within their lane. After close they are cancelled.

        `copies`: they copy within memory. `after`: they begin only once that ticket is done,
        however it ends; until then they hold no thread.
        `note`: called with their ticket before they are queued. A caller that noted the returned
        ticket instead could be interrupted by a signal before it had, and then nobody would wait
        for reads that are under way. Whatever is raised after `note` is called, the ticket ends.
        """
        ticket = Ticket(len(tasks))
        jobs = iter([(ticket, task) for task in tasks])
        queue = partial(self._queue, lane, copies, jobs)
        try:
            note(ticket)
            if after is None:
                queue()
            else:
                after.then(queue)
        except BaseException:  # raised by `note`, before anything is queued; else see _queue
            _cancel(jobs)
            raise
        return ticket

    def _queue(self, lane: Lane, copies: bool, jobs: Iterator[Job]) -> None:
        """Queue a ticket's jobs. Where an exception (a signal's, say) comes in between, those not
        queued yet are cancelled, and the threads are woken for those that are."""
        try:
            with self._lock:
                if self._open:
                    queued = self._queues[copies][lane]
                    if lane is Lane.STORE and not queued:
                        self._stored_s = monotonic()
                    elif lane is Lane.PROMOTE and not any(q[lane] for q in self._queues):
                        due_s = monotonic() + PROMOTE_WAITS_S
                        self._promote_due_s = max(self._promote_due_s, due_s)
                    queued.extend(jobs)  # all or none: no signal comes between
                    self._wake[copies].notify(len(queued))
        except BaseException:
            with self._lock:
                self._wake[copies].notify_all()
            raise
        finally:
            _cancel(jobs)

    def run_here(self, lane: Lane, tickets: Iterable[Ticket]) -> None:
        """Run on the caller's thread those of these tickets' tasks that no thread has begun.

        They wait for no turn. Where a signal raises in between, the task it came in has failed, and
        the rest stay queued, now at the front.
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
        """Take a task of these off its queue and note its ticket as due; None: all have begun."""
        with self._lock:
            for kind in self._queues:
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
            if len(queued) == 1:  # some wait for the queue to be empty
                self._wake_behind()
                self._quiet.notify_all()
            due += [ticket]
            del queued[0]  # no signal comes between
            return task

    @property
    def closing(self) -> bool:
        """Whether nothing that is submitted from here on is run."""
        return not self._open

    def depth(self) -> list[int]:
        """Queued tasks by lane."""
        return [sum(map(len, kinds)) for kinds in zip(*self._queues, strict=True)]

    def idle(self, timeout_s: float) -> bool:
        """True once nothing is queued or under way; False when timeout_s passed first."""
        with self._lock:
            return self._quiet.wait_for(
                lambda: not any(self._at) and not self._is_queued(), timeout_s
            )

    def n_stuck(self, limit_s: float) -> int:
        """How many threads have been at one task for longer than limit_s: the medium holds them."""
        return sum(self._stuck(limit_s))

    def is_stuck(self, limit_s: float) -> bool:
        """Whether all threads of a kind are stuck: no read of a medium, or no copy, could end."""
        stuck = self._stuck(limit_s)
        return all(stuck[: self.n_threads]) or all(stuck[self.n_threads :])

    def _stuck(self, limit_s: float) -> list[bool]:
        begun_before = monotonic() - limit_s
        return [0.0 < since < begun_before for since in self._since]

    def close(self, timeout_s: float) -> bool:
        """Run what is queued, stop the threads; False when one is stuck past timeout_s."""
        with self._lock:
            self._open = False
            for wake in self._wake:
                wake.notify_all()
        deadline = monotonic() + timeout_s
        ended = [thread.ended(max(0.0, deadline - monotonic())) for thread in self._threads]
        return all(ended)

    def _is_queued(self) -> bool:
        return any(map(any, self._queues))

    def _copies_wait(self) -> bool:
        """Whether copies are queued that somebody waits for: these need the processors."""
        return any(self._queues[True][: Lane.PROMOTE])

    def _starved(self, queues: Sequence[Sequence[Job]]) -> bool:
        """Whether a promotion is to go before all else."""
        waits = queues[Lane.PROMOTE] and not self._at[1]
        return bool(waits) and monotonic() >= self._promote_due_s

    def _wake_behind(self) -> None:
        """Work that nobody waits for may perhaps begin now: a thread of its kind is to look."""
        for queues, wake in zip(self._queues, self._wake, strict=True):
            if any(queues[Lane.PROMOTE :]):
                wake.notify()

    def _next(self, copies: bool) -> tuple[float, Lane, Ticket, Task] | None:
        """The next job for a thread of this kind, and when it begins; None: no more will come."""
        with self._lock:
            while True:
                queues = self._queues[copies]
                starved = self._starved(queues)
                for lane in (Lane.PROMOTE, *Lane) if starved else self._order(queues):
                    behind = lane >= Lane.PROMOTE
                    if behind and not starved and (self._at[1] or self._copies_wait()):
                        break
                    if queued := queues[lane]:
                        job = monotonic(), lane, *queued[0]
                        if copies and not behind and len(queued) == 1:
                            self._wake_behind()  # once these are gone
                        if lane is Lane.STORE:
                            self._stored_s = job[0]
                        queued.popleft()  # last: nothing after it asks for memory
                        self._at[behind] += 1
                        self._storing += lane is Lane.STORE
                        return job
                if not self._open and not any(queues):
                    self._wake[copies].notify_all()  # those who waited for a turn at what was left
                    return None
                self._wake[copies].wait()

    def _work(self, number: int) -> None:
        working = True
        while working:
            try:
                working = self._turn(number)
            except MemoryError:  # outside of a task; what was not drawn is still queued
                continue

    def _order(self, queues: Sequence[Sequence[Job]]) -> Iterable[Lane]:
        """Lanes, the most urgent first; but a write goes before all where writes have waited long
        and none is under way: on a slow disk they would take every thread, one after the other."""
        waits = queues[Lane.STORE] and not self._storing
        if waits and monotonic() - self._stored_s > STORE_WAITS_S:
            return Lane.STORE, *Lane
        return Lane

    def _turn(self, number: int) -> bool:
        """Run a task; False when that was the last."""
        job = self._next(number >= self.n_threads)
        if job is None:
            return False
        began, lane, ticket, task = job
        self._since[number] = began
        try:
            ticket.run(task)
        finally:
            self._since[number] = 0.0
            # A waiting worker must not keep the last ticket's buffers alive.
            del job, ticket, task
            with self._lock:
                self._at[lane >= Lane.PROMOTE] -= 1
                self._storing -= lane is Lane.STORE
                now = monotonic()
                if lane is Lane.PROMOTE:
                    rest_s = max(_REST * (now - began), _LEAST_REST_S)
                    self._promote_due_s = now + rest_s
                if lane >= Lane.PROMOTE or now >= self._promote_due_s:
                    self._wake_behind()  # this thread may be wanted for something urgent
                if not any(self._at) and not self._is_queued():
                    self._quiet.notify_all()
        return True
