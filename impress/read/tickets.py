"""Waiting for several tickets, and for none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic, sleep

from tiers.errors import ReadFailed
from tiers.ticket import Task, Ticket


def when_all(tickets: Sequence[Ticket], callback: Callable[[], object]) -> None:
    """Call back once, when every ticket is done; see `Ticket.then`."""
    left = Ticket(len(tickets))
    left.then(callback)
    for ticket in tickets:
        ticket.then(partial(left.run, nothing, [left]))  # counted once, however often it is called


def nothing() -> None:
    """The task of tickets that are only waited for and stand for no work."""


def within_memory(task: Task) -> None:
    """Run a task that reads. If Python has no memory for it, raise ReadFailed as where a buffer
    cannot be had: a miss, which says nothing against what is stored."""
    try:
        task()
    except MemoryError:
        raise ReadFailed("shortage", "memory: too little to read with") from None


def give_way() -> None:
    """Between two plans: let the threads that read have the interpreter; else they would wait for
    it until all is planned, or for 5 ms (measured: 128 MiB of 32 layers in 42.8 ms, not 44.9)."""
    sleep(0)


def ended(tickets: Sequence[Ticket], timeout_s: float) -> bool:
    """Wait for tickets whatever their outcome; False when one outlasts timeout_s."""
    deadline = monotonic() + timeout_s
    return all(ticket.over(max(0.0, deadline - monotonic())) for ticket in tickets)
