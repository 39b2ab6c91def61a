"""What a session has begun to read: its loads, each noted before it takes anything.

Whatever cuts a load off from its taker (Ctrl-C), the end of the session finds the load here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiers.ticket import Ticket

if TYPE_CHECKING:
    from impress.read.load import Load


class Begun:
    """The loads that one session has begun, for that session's thread."""

    def __init__(self) -> None:
        self._loads: list[Load] = []

    def add(self, load: Load) -> None:
        """Note a load that begins. Loads that are over are forgotten, except those into the
        caller's memory, which may be looked at until the end."""
        left = [one for one in self._loads if one.into is not None or not one.is_over]
        self._loads = [*left, load]

    def end(self) -> None:
        """Abandon them all: nobody takes them any more."""
        for load in self._loads:
            load.abandon()

    def reads(self) -> list[Ticket]:
        """Tickets of what may still read into the caller's memory."""
        return [ticket for load in self._given() for ticket in load.tickets.values()]

    @property
    def given_s(self) -> float:
        """When the last read into the caller's memory began; 0: none did."""
        return max((load.started_s for load in self._given()), default=0.0)

    def over(self) -> list[Ticket]:
        """Take the caller's memory back from others who copy from it. The tickets are done when
        those who are copying have ended."""
        return [load.flight.over() for load in self._given() if load.flight is not None]

    def _given(self) -> list[Load]:
        """Those that read into the caller's memory."""
        return [load for load in self._loads if load.into is not None]
