"""What a session has begun to read: its loads, each from before it takes anything.

Whatever comes between a load and who was to have it (Ctrl-C), its end finds it here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiers.ticket import Ticket

if TYPE_CHECKING:
    from impress.read.load import Load


class Begun:
    """Of one session, for its thread."""

    def __init__(self) -> None:
        self._loads: list[Load] = []

    def add(self, load: Load) -> None:
        """One that begins. Those that are over are forgotten, but for what lies in memory of the
        caller's: it may be looked at until the end."""
        left = [one for one in self._loads if one.into is not None or not one.is_over]
        self._loads = [*left, load]

    def end(self) -> None:
        """Nobody takes any of them any more."""
        for load in self._loads:
            load.abandon()

    def reads(self) -> list[Ticket]:
        """What may still read into memory of the caller's."""
        return [ticket for load in self._given() for ticket in load.tickets.values()]

    @property
    def given_s(self) -> float:
        """When the last read into memory of the caller's began; 0: none did."""
        return max((load.started_s for load in self._given()), default=0.0)

    def over(self) -> list[Ticket]:
        """Memory of the caller's is taken back from others who copy from it: done when those who
        do have ended."""
        return [load.flight.over() for load in self._given() if load.flight is not None]

    def _given(self) -> list[Load]:
        """Those of the caller's memory."""
        return [load for load in self._loads if load.into is not None]
