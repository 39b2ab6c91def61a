"""Waiting for several tickets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic

from tiers.errors import MediumError
from tiers.iopool import Ticket


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
