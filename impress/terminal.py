"""What people see: where it is printed, how sizes and errors read."""

from __future__ import annotations

import math
import sys
from typing import Final

import lmdb
from rich.console import Console

from impress.errors import ImpressError
from tiers.errors import MediumError

#: Tables and answers. Columns of a pipe are not known: wide enough for every table.
out: Final = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
#: Progress bars and errors, so that stdout stays what was asked for.
err: Final = Console(stderr=True, highlight=False)


def line_of(error: Exception) -> str | None:
    """What went wrong, for people; None for what nobody expected. Pure."""
    if isinstance(error, ImpressError | MediumError):
        return str(error)
    if isinstance(error, lmdb.Error):
        return f"index: {error}"
    if isinstance(error, OSError):
        what = error.strerror or str(error)
        return f"{error.filename}: {what}" if error.filename else what
    return None


def size(n_bytes: float) -> str:
    """Bytes as people read them: 1.5 GiB. Pure."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"


def number(value: float | None, form: str = ".3f") -> str:
    """A number in a format; – for what is not known. Pure."""
    return "–" if value is None or math.isnan(value) else f"{value:{form}}"
