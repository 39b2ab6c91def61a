"""A line of jobs: order, room, and what a signal leaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count

import pytest
from fire import of_fire, under_fire

from tiers.errors import MediumError
from tiers.line import Line


@pytest.fixture
def go() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def held_up(go: threading.Event, done: list[int], limit: int = 2) -> Line[int]:
    """A line whose thread has taken the job 0 and waits in it."""
    begun = threading.Event()

    def work(job: int) -> None:
        begun.set()
        assert go.wait(60)
        done.append(job)

    line = Line("test-line", work, limit)
    line.begin()
    assert line.offer(0)
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


def test_a_line_that_gets_no_thread_has_nothing_to_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closing it, with nothing offered, raised an error that no more threads can be started."""

    def refuse(thread: threading.Thread) -> None:
        raise MediumError("no more threads")

    line: Line[int] = Line("test-line", lambda job: None, 1)
    monkeypatch.setattr("tiers.line.start", refuse)
    with pytest.raises(MediumError):
        line.begin()
    line.drain()
    line.close()
    line.drain()
    line.close()
    assert not line.alive


@of_fire
def test_signals_leave_a_line_that_works() -> None:
    """With queue.Queue, a signal just after its lock was taken left the lock taken; the thread, the
    next request and flush then hung."""
    done: list[int] = []
    line, numbers = Line("test-line", done.append, 1 << 30), count()
    line.begin()

    def act() -> None:
        line.offer(next(numbers))
        line.drain()

    under_fire(act, 200)
    assert line.alive and line.offer(-1)
    line.close()
    assert done[-1] == -1 and done[:-1] == sorted(set(done[:-1]))


@of_fire
def test_signals_at_the_start_of_a_line_leave_one_thread() -> None:
    """Thread.start waits in Python code: cut off there, it left a second thread started beside the
    first, or one that hung before it began; and closing waited for ever."""
    left: list[tuple[Line[threading.Thread], list[threading.Thread]]] = []

    def act() -> None:
        seen: list[threading.Thread] = []
        line: Line[threading.Thread] = Line(
            "test-line", lambda _: seen.append(threading.current_thread()), 9
        )
        left.append((line, seen))
        line.begin()

    under_fire(act, 100)
    for line, seen in left[:: max(1, len(left) // 100)]:
        line.begin()
        for _ in range(3):
            assert line.offer(threading.current_thread())
        line.drain()
        assert len(seen) == 3 and len(set(seen)) == 1
    for line, _ in left:
        line.close()


def test_who_waits_takes_no_room(go: threading.Event) -> None:
    """With two threads in flush, no watch of the guard found room."""
    done: list[int] = []
    line = held_up(go, done)
    waiting = [threading.Thread(target=line.drain) for _ in range(2)]
    for thread in waiting:
        thread.start()
    while len(line._jobs) < 2:
        pass
    assert line.offer(1) and line.held() == [0, 1]
    go.set()
    for thread in waiting:
        thread.join(60)
    line.close()
    assert done == [0, 1]
