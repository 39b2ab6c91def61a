"""Whether home takes writes: a medium that failed or is full is left alone, then tried again.

writes ok ──trouble──> read-only ──RETRY_S──> one store tries ──ok──> writes ok
                          ^──────────────────────────┘ not yet
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
    """Thread-safe. `probe`: write so many bytes' worth of proof, or raise what is in the way."""

    def __init__(self, path: Path, probe: Callable[[int], None], clock: Clock) -> None:
        self.reason = ""
        """Why nothing is written; empty while all is well."""
        self._path = path
        self._probe = probe
        self._clock = clock
        self._lock = threading.Lock()
        self._retry_at_s = 0.0
        self._wanted = 0

    def trouble(self, reason: str, n_bytes: int = 0) -> None:
        """A write failed, or no room was found for n_bytes: no more of them for a while."""
        with self._lock:
            begins = not self.reason
            self.reason, self._wanted = reason, n_bytes
            self._retry_at_s = self._clock() + RETRY_S
        if begins:
            log.warning(
                "%s: read-only from here on: %s; tried again in %g s", self._path, reason, RETRY_S
            )

    def refusal(self) -> str:
        """Why a store may not write now; empty where it may. Once in RETRY_S this tries."""
        with self._lock:
            if not self.reason or self._clock() < self._retry_at_s:
                return self._said()
            self._retry_at_s = self._clock() + RETRY_S  # others need not wait for this one
            wanted = self._wanted
        try:
            self._probe(wanted)
        except (MediumError, StoreFailed) as err:
            self.trouble(str(err), wanted)
            return self._said()
        with self._lock:
            self.reason = ""
        log.warning("%s: takes writes again", self._path)
        return ""

    def _said(self) -> str:
        return f"read-only: {self.reason}" if self.reason else ""
