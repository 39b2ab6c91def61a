"""Whether the disk hangs, judged by what the storing thread has waited for in vain."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from impress.store import PrefixStore
from impress.write.draft import Stored

log = logging.getLogger("impress")

#: Limit for a call of the store that makes space, for a segment or after a commit: the call has
#: none of its own. (The wait of rows for write buffers has one.)
KEEPS_S = 10.0


class Disk:
    """For the thread that stores, except `keeps`."""

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        self._full_bytes = 0  # in write buffers, when a wait for them ran out
        self._late: Stored | None = None  # a store waited for in vain: a commit may hang
        self._asked_s: float | None = None  # when the call in progress began

    def note_full(self) -> None:
        """A wait for write buffers ran out."""
        self._full_bytes = self._store.write_buffers.used_bytes
        if self._full_bytes:
            log.warning("the disk hangs: nothing is stored until a write ends")

    def note_late(self, stored: Stored) -> None:
        """A wait for this store ran out."""
        self._late = stored
        log.warning("the disk hangs: nothing is stored until an earlier store has ended")

    def hangs(self) -> bool:
        """Whether an overdue store still runs, or no write has ended since buffers ran out."""
        if self._store.write_buffers.used_bytes < self._full_bytes:
            self._full_bytes = 0
        late = self._late
        if late is not None and (late.ready or late.refused or late.error is not None):
            self._late = None
        return self._full_bytes > 0 or self._late is not None

    @contextmanager
    def asked(self) -> Iterator[None]:
        """A call of the store that may make space."""
        self._asked_s = monotonic()
        try:
            yield
        finally:
            self._asked_s = None

    def keeps(self, limit_s: float | None = None) -> bool:
        """Whether the call in `asked` has lasted limit_s (None: KEEPS_S). For any thread."""
        since = self._asked_s
        return since is not None and monotonic() - since >= (limit_s or KEEPS_S)
