"""Everything impress raises. One base class, so a caller can catch one name."""

from __future__ import annotations

from typing import Final

#: For a store in a forked child: its threads and locks did not come along, and its index may not be
#: opened there again.
FORKED: Final = "opened before a fork: close it before forking, or start this process by spawn"


class ImpressError(Exception):
    """Base of every error raised on purpose. The text is one line that says what to do."""

    def __str__(self) -> str:
        """One line, whatever a path or someone else's file contains."""
        return " ".join(super().__str__().splitlines())


class ConfigError(ImpressError):
    """A configuration key or value that is not known or not allowed."""


class BadInput(ImpressError, ValueError):
    """An argument that cannot be stored or looked up: wrong shape, dtype, token id or range."""


class StoreMismatch(ImpressError):
    """A directory's geometry, dtype, window size or namespace differs from the caller's."""


class FormatError(ImpressError):
    """A directory or file is not a store this version can read."""


class StoreLocked(ImpressError):
    """Another writer, in this or another process, holds the shard."""


class StoreFailed(ImpressError):
    """The environment failed: no permission, disk full, I/O error, a store not committed."""


class PrefixLost(ImpressError):
    """A leased prefix cannot be read: bad checksum, short, late. Recompute the prompt."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"prefix lost ({reason}): {detail}")
        # "checksum" | "short" | "late" | "io" | "shortage" | "permission" | "unmounted" | "expired"
        self.reason = reason


class Unsupported(ImpressError):
    """A model, cache or option that impress refuses by name rather than serve wrongly."""
