"""A line of jobs: order, room, and what a signal leaves."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from tiers.line import Line


@pytest.fixture
def go() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def held_up(go: threading.Event, done: list[int], limit: int = 2) -> Line[int]:
    """One whose thread has taken the job 0 and waits in it."""
    begun = threading.Event()

    def work(job: int) -> None:
        begun.set()
        assert go.wait(60)
        done.append(job)

    line = Line("test-line", work, limit)
    assert line.begin() and not line.begin() and line.offer(0)
    assert begun.wait(60)
    return line


def test_jobs_are_done_in_order_and_what_finds_no_room_is_refused(go: threading.Event) -> None:
    done: list[int] = []
    line = held_up(go, done)
    assert [line.offer(job) for job in (1, 2, 3)] == [True, True, False]
    assert line.held() == [0, 1, 2]
    go.set()
    line.drain()
    assert done == [0, 1, 2] and not line.held()
    assert line.offer(4)
    line.close()
    assert done[-1] == 4 and not line.alive
    line.close()
    line.drain()


def test_a_job_that_fails_is_no_end(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []

    def work(job: int) -> None:
        if not job:
            raise ValueError("told to be")
        done.append(job)

    line = Line("test-line", work, 9)
    line.begin()
    assert line.offer(0) and line.offer(1)
    line.close()
    assert done == [1] and "test-line: a job failed" in caplog.text


def test_who_waits_for_a_line_that_is_closed_meanwhile_does_not_wait_for_ever() -> None:
    line: Line[int] = Line("test-line", lambda job: None, 1)
    line.begin()
    line._put(None)  # as by another thread's close, just before
    line.drain()
    line.close()
    assert not line.alive


def test_signals_leave_a_line_that_works() -> None:
    """queue.Queue: a signal just behind the taking of its lock left that taken; the thread, the
    next request and flush then hung."""
    done: list[int] = []

    def struck(*_: Any) -> None:
        raise KeyboardInterrupt

    line = Line("test-line", done.append, 1 << 30)
    line.begin()
    before = signal.signal(signal.SIGALRM, struck)
    numbers, n_struck = count(), 0
    try:
        while n_struck < 200:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 * (1 + n_struck % 7))
                while True:
                    line.offer(next(numbers))
                    line.drain()
            except KeyboardInterrupt:
                n_struck += 1
                assert line.alive
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert line.offer(-1)
    line.close()
    assert done[-1] == -1 and done[:-1] == sorted(set(done[:-1]))
