"""The errors a medium can fail with. Their text names the medium, the slot and the path."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

HARMLESS: Final = ("late", "shortage", "permission", "unmounted")


class MediumError(Exception):
    """The environment failed: no permission, an I/O error, a file that is gone."""

    reason = "io"

    @property
    def harmless(self) -> bool:
        """Whether it says nothing against what is stored: the medium is slow or away, the process
        is short of files or memory, or may not read. Nothing is given up because of it."""
        return self.reason in HARMLESS


class Cancelled(MediumError):
    """A task that never ran: whatever it should have brought is not there."""


class ReadFailed(MediumError):
    """A read that did not give back what was written; nothing of its destination may be used.

    `reason` is one of "checksum", "short", "io", "late", "shortage", "permission", "unmounted".
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def read_failed(path: Path, err: OSError) -> ReadFailed:
    """The error of a failed read. The process may lack something the medium is not to blame for."""
    reason = "io"
    # EFAULT: the memory to read into cannot be written, or its pages are gone.
    if err.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFAULT):
        reason = "shortage"
    elif err.errno in (errno.EACCES, errno.EPERM):
        reason = "permission"
    return ReadFailed(reason, f"ssd: {path}: {err.strerror}")
