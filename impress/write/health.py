"""Whether home takes writes: a medium that failed or is full is left alone, then tried again.

writes ok ──trouble──> read-only ──RETRY_S──> one store tries ──ok──> writes ok
                          ^──────────────────────────┘ not yet
A medium that failed is tried with a page. Where there was no room for a store, one as large tries
for itself; smaller ones need not wait for that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from impress.errors import StoreFailed
from impress.write.budget import Clock
from tiers.errors import MediumError

log = logging.getLogger("impress")

#: How long a medium in trouble is left alone.
RETRY_S: Final = 30.0


class Health:
    """Thread-safe. `probe`: write a page as a proof, or raise what is in the way."""

    def __init__(self, path: Path, probe: Callable[[], None], clock: Clock) -> None:
        self.reason = ""
        """Why nothing is written; empty while all is well."""
        self._path = path
        self._probe = probe
        self._clock = clock
        self._lock = threading.Lock()
        self._retry_at_s = 0.0
        self._wanted = 0  # bytes for which there was no room; 0: the medium failed

    @property
    def failing(self) -> str:
        """Why nothing is written, however small; empty where only room is lacking."""
        return "" if self._wanted else self.reason

    def trouble(self, reason: str, n_bytes: int = 0) -> None:
        """A write failed, or no room was found for n_bytes: no more such writes for a while."""
        with self._lock:
            begins = not self.reason or (self._wanted > 0 and not n_bytes)  # now nothing fits
            if self.reason:
                n_bytes = min(n_bytes, self._wanted)
            self.reason, self._wanted = reason, n_bytes
            if begins:  # else what fails again and again would put off the trial for ever
                self._retry_at_s = self._clock() + RETRY_S
        if begins:
            log.warning(
                "%s: read-only from here on: %s; tried again in %g s", self._path, reason, RETRY_S
            )

    def found_room(self, n_bytes: int) -> None:
        """There was room for n_bytes. After a while that is enough, however few they are: a larger
        store finds out for itself."""
        with self._lock:
            soon = self._clock() < self._retry_at_s
            if not self._wanted or (n_bytes < self._wanted and soon):
                return
            self.reason, self._wanted = "", 0
        log.warning("%s: takes writes again", self._path)

    def refusal(self, n_bytes: int) -> str:
        """Why a store of so many bytes may not write now; empty where it may. Once every RETRY_S
        this tries the medium, or lets the store try."""
        with self._lock:
            if not self.reason or n_bytes < self._wanted:
                return ""
            if self._clock() < self._retry_at_s:
                return self._said()
            self._retry_at_s = self._clock() + RETRY_S  # others need not wait for this one
            if self._wanted:  # it finds out for itself: what is evicted for it is put to use
                return ""
        try:
            self._probe()
        except (MediumError, StoreFailed) as err:
            self.trouble(str(err))
            return self._said()
        with self._lock:
            self.reason = ""
        log.warning("%s: takes writes again", self._path)
        return ""

    def _said(self) -> str:
        return f"read-only: {self.reason}" if self.reason else ""
