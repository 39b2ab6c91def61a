"""Waiting for several tickets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic

from tiers.errors import MediumError
from tiers.iopool import IoPool, Lane, Task, Ticket


def submit(
    pool: IoPool, lane: Lane, tasks: Sequence[Task], note: Callable[[Ticket], object],
    after: Ticket | None = None,
) -> None:  # fmt: skip
    """Queue tasks once their ticket is noted. Whatever comes between the two (Ctrl-C), who waits
    for what is noted sees it end."""
    ticket = Ticket(len(tasks))
    try:
        note(ticket)
        pool.submit(lane, tasks, after, ticket)
    except BaseException:
        if not ticket.handed:
            ticket.cancel()
            for task in tasks:
                ticket.run(task)
        raise


def when_all(tickets: Sequence[Ticket], callback: Callable[[], object]) -> None:
    """Call back once, when every ticket is done."""
    left = Ticket(len(tickets))
    left.then(callback)
    for ticket in tickets:
        ticket.then(partial(left.run, nothing))


def nothing() -> None:
    """A task of tickets that are waited for and stand for no work."""


def ended(tickets: Sequence[Ticket], timeout_s: float) -> bool:
    """Wait for tickets whatever their outcome; False when one outlasts timeout_s."""
    deadline = monotonic() + timeout_s
    for ticket in tickets:
        try:
            if not ticket.wait(max(0.0, deadline - monotonic())):
                return False
        except MediumError:
            continue
    return True
