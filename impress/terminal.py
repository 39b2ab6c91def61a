"""What people see: where it is printed, how sizes and errors read."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import lmdb
from rich.console import Console
from rich.markup import escape
from rich.segment import Segments
from rich.table import Table
from rich.tree import Tree

from impress.errors import ImpressError
from tiers.errors import MediumError
from tiers.threads import MORE_THREADS, no_more_threads

if os.environ.get("COLUMNS") == "0":  # not known: rich would print nothing, not even a help text
    del os.environ["COLUMNS"]


def stdout_width(piped: int) -> int | None:
    """None: a terminal's own; a pipe has none."""
    return None if sys.stdout is not None and sys.stdout.isatty() else piped


class Out(Console):
    """A console for stdout."""

    def print(self, *objects: Any, **how: Any) -> None:
        """An error says that it is stdout's: else it would pass for another file's."""
        try:
            super().print(*objects, **how)
        except BrokenPipeError:
            raise
        except OSError as error:
            error.filename = error.filename or "stdout"
            raise


class _Out(Out):
    def on_broken_pipe(self) -> None:
        """The reader has seen enough: the exit status says so, which rich would make 1."""
        raise BrokenPipeError


#: Tables and answers. No emoji: a name with ":key:" in it is asked for as it is spelt.
out: Final = _Out(highlight=False, emoji=False, width=stdout_width(110))
#: Progress bars and errors, so that stdout stays what was asked for.
err: Final = Console(stderr=True, highlight=False, emoji=False)

#: Largest number of rows of a table or drawn tree that are printed; nobody reads more.
MOST_LINES: Final = 500
T = TypeVar("T")


def show(drawing: Table | Tree) -> None:
    """Print all cells or branches, even where the terminal is too narrow and wraps lines."""
    needed = out.measure(drawing, options=out.options.update(width=1 << 12)).maximum
    wide = out.options.update(width=max(needed, out.width))
    out.print(Segments(out.render(drawing, wide)), crop=False)


def cut(rows: list[T]) -> list[T]:
    """The rows that a table shows: laying out a million would take minutes, and gigabytes."""
    return rows[:MOST_LINES]


def say_cut(n: int, what: str) -> None:
    """Say how many of n rows a table leaves to --json, if any."""
    if n > MOST_LINES:
        out.print(f"… and {n - MOST_LINES:,} more {what}: --json lists all")


def table_of(title: str, *columns: str) -> Table:
    """An empty table; columns called with a leading ">" hold numbers. No title: none is printed."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in columns:
        made.add_column(name.lstrip(">"), justify="right" if name[0] == ">" else "left")
    return made


def printable(text: str) -> str:
    """The text, what cannot be printed as escapes: nobody's name writes to a terminal. Pure."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def literal(text: str) -> str:
    """For markup, a `printable` text as it is: nothing in it is taken as markup. Pure."""
    return escape(f"{printable(text)} ")[:-1]  # a final backslash would be doubled


def line_of(error: Exception) -> str | None:
    """What went wrong, for people; None for an unexpected error. Pure."""
    if isinstance(error, ImpressError | MediumError):
        return str(error)
    if isinstance(error, lmdb.Error):
        return f"index: {error}"
    if isinstance(error, MemoryError):
        return "not enough memory"
    if no_more_threads(error):  # a progress bar's, an engine's
        return MORE_THREADS
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


def count(n: int, what: str) -> str:
    """1 span, 2 spans. Pure."""
    return f"{n:,} {what}{'s' * (n != 1)}"


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"


def number(value: float | None, form: str = ".3f") -> str:
    """A number in a format; – for what is not known. Pure."""
    return "–" if value is None or math.isnan(value) else f"{value:{form}}"


#: Signals that end a command; a closed terminal sends SIGHUP.
ENDS: Final = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stopped_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM, and SIGHUP unless it is ignored (nohup), end a command as Ctrl-C does: what it
    removes at its end, test data or processes of its own, does not stay behind. What is printed
    then may fail: the terminal may be closed."""

    def stop(_signal: int, _frame: object) -> None:
        for number in stops:  # a second signal must not interrupt the clean-up
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    stops = [number for number in ENDS if signal.getsignal(number) == signal.SIG_DFL]
    for number in stops:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in stops:
            signal.signal(number, signal.SIG_DFL)
