"""Reads of segments one by one, with preadv: those no queue takes, and those a queue did not do."""

from __future__ import annotations

import errno
import os
import threading
from typing import Final

import numpy as np

from tiers.base import PAGE, Bytes
from tiers.coalesce import Run
from tiers.errors import ReadFailed
from tiers.segments import SegmentFiles
from tiers.slots import aligned

#: Bytes of a thread's buffer that reads go through, where memory is not page-aligned.
BOUNCE_BYTES: Final = 1 << 20


class OneByOne:
    """Thread-safe: each thread has a bounce buffer of its own, once it needs one."""

    def __init__(self, files: SegmentFiles) -> None:
        self._files = files
        self._local = threading.local()

    def read(self, run: Run) -> None:
        """Fill its views. Raises ReadFailed."""
        try:
            got = self._preadv(run, run.views)
            if got == run.n_bytes:
                return
            if got >= 0:
                self._read_rest(run, run.views, got)
                return
            bounce = self._scratch()[: run.n_bytes]
            got = self._preadv(run, [bounce])
            if got < run.n_bytes:
                self._read_rest(run, [bounce], got)
        except OSError as err:
            raise self._files.failed(run.segment, err) from err
        at = 0
        for view in run.views:
            np.copyto(view, bounce[at : at + len(view)])
            at += len(view)

    def _preadv(self, run: Run, views: list[Bytes]) -> int:
        """Bytes read; -1 where memory is not aligned as O_DIRECT wants it.

        The kernel tells, not the views: finding out their addresses costs a tenth of a read.
        """
        try:
            return os.preadv(self._files.fd(run.segment), views, run.off)
        except OSError as err:
            if err.errno == errno.EINVAL and views is run.views:
                return -1
            raise

    def _read_rest(self, run: Run, views: list[Bytes], got: int) -> None:
        """The kernel gave less than asked: go on page by page until it gives nothing."""
        while got < run.n_bytes:
            skip, rest = got, []
            for view in views:
                if skip < len(view):
                    rest.append(view[skip:])
                skip = max(0, skip - len(view))
            more = os.preadv(self._files.fd(run.segment), rest, run.off + got)
            if more <= 0 or (self._files.direct and more % PAGE):
                path = self._files.path(run.segment)
                raise ReadFailed("short", f"ssd: {path}: {got} of {run.n_bytes} bytes at {run.off}")
            got += more

    def _scratch(self) -> Bytes:
        scratch: Bytes | None = getattr(self._local, "bounce", None)
        if scratch is None:
            scratch = self._local.bounce = aligned(BOUNCE_BYTES)
        return scratch
