"""What the experiments share: arguments, data that always goes away, tables, the result file."""

from __future__ import annotations

import argparse
import errno
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from impress.errors import ImpressError
from impress.report import write_report
from impress.terminal import ENDS, Out, stdout_width, stopped_as_by_ctrl_c

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of an experiment. `json`: where the result goes, or None."""

    quick: bool
    json: Path | None
    folder: Path
    seed: int


class Unable(Exception):
    """The experiment cannot run here; the text is one line that says what is missing."""


def run(
    about: str, experiment: Callable[[Options], tuple[dict[str, float], list[Row]]],
    estimate: Callable[[bool], str], **meta: Any,
) -> int:  # fmt: skip
    """Parse arguments, run in a temporary directory, write the report. The exit status."""
    command = f"python -m experiments.{Path(sys.argv[0]).stem}"  # as -m has it
    parser = argparse.ArgumentParser(prog=command, description=about)
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run, roughly")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", default=Path(),
        help="put data in a new directory here (default: the current one)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="of what is drawn (default 1)"
    )
    args = parser.parse_args()
    with beside(args.json):
        try:
            check_given(args.json, args.seed)
            console.print(f"{about} Estimated time: {estimate(args.quick)}.")
            with scratch(args.dir) as folder, named(args.dir):
                figures, rows = experiment(Options(args.quick, args.json, folder, args.seed))
            if args.json is not None:
                with named(args.json):
                    write_report(args.json, figures, rows, seed=args.seed, quick=args.quick, **meta)
        except KeyboardInterrupt:
            say_stopped("stopped; the temporary data is gone")
            return 130
        except (Unable, OSError, ImpressError) as err:
            print(f"error: {err}", file=sys.stderr)
            return 2
        return 0


def parser_of(name: str, about: str | None) -> argparse.ArgumentParser:
    """A parser for a module of experiments: its help is the module's docstring, line by line."""
    return argparse.ArgumentParser(
        prog=f"python -m experiments.{name}", description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip


def check_given(report: Path | None, seed: int) -> None:
    """Refuse what every experiment can refuse before any time is spent. Raises Unable."""
    if not 0 <= seed < 1 << 63:
        raise Unable(f"--seed must be at least 0 and below 2^63, got {seed}")
    if report is not None and not report.absolute().parent.is_dir():
        raise Unable(f"--json {report}: no such directory")
    if report is not None and report.is_dir():
        raise Unable(f"--json {report} is a directory: name a file in it")
    if report is not None and str(report) != "-":
        into = report.exists() and not report.is_file()  # as `write_report`: a file is replaced
        if not os.access(report if into else report.absolute().parent, os.W_OK):
            raise Unable(f"--json {report}: cannot be written")


@contextmanager
def beside(report: Path | None) -> Iterator[None]:
    """Messages go to stderr where the report goes to stdout, which another program may read."""
    before = console.stderr
    console.stderr = before or str(report) == "-"
    try:
        yield
    finally:
        console.stderr = before


@contextmanager
def named(path: Path) -> Iterator[None]:
    """An error for want of room may not say where: it is given this path if it has none."""
    try:
        yield
    except OSError as err:
        if err.filename is None and err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            err.filename = str(path)
        raise


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A fresh directory in `parent`, removed at the end, even on Ctrl-C, SIGTERM and SIGHUP.

    Raises Unable, OSError.
    """
    if not parent.is_dir():
        raise Unable(f"--dir {parent}: no such directory")
    with stopped_as_by_ctrl_c():
        folder = Path(tempfile.mkdtemp(prefix="impress-bench-", dir=parent)).resolve()
        try:
            yield folder
        finally:
            # A second signal must not leave data behind: gigabytes take a while to delete.
            before = [(n, signal.signal(n, signal.SIG_IGN)) for n in (signal.SIGINT, *ENDS)]
            shutil.rmtree(folder, ignore_errors=True)
            for number, handler in before:
                signal.signal(number, handler)


def say_stopped(text: str) -> None:
    """Print it where somebody can still read it: not to a terminal that was closed."""
    with suppress(OSError):
        console.print(text)


def check_rate(gb_s: float | None) -> None:
    """Raises Unable on a --disk-gb-s that no disk has."""
    if gb_s is not None and not 0 < gb_s < math.inf:
        raise Unable(f"--disk-gb-s must be a rate above 0, got {gb_s:g}")


def check_once(option: str, names: Sequence[str]) -> None:
    """Raises Unable on names of an option of which one is empty, or there more than once."""
    if "" in names:
        raise Unable(f"{option}: a name is empty")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise Unable(f"{option}: {', '.join(twice)} more than once")


def check_room(folder: Path, need: int) -> None:
    """Raises Unable where the disk under a folder has no room for so many bytes."""
    if (free := shutil.disk_usage(folder).free) < need:
        raise Unable(
            f"the data of this cell takes some {need / 1e9:.1f} GB, and {folder} "
            f"has {free / 1e9:.1f} free: name another --dir"
        )


def spread(values: Sequence[float]) -> Row:
    """Median, least and most of repeated measurements."""
    return {
        "median": float(np.median(values)), "min": float(min(values)), "max": float(max(values)),
    }  # fmt: skip


def print_rows(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of equal keys as a table, floats to three significant digits. No rows: nothing."""
    if not rows:
        return
    table = Table(title=title, title_justify="left", header_style="bold")
    for i, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


#: It prints text as it is: nothing in a path or a trace's line is taken as markup.
console = Out(width=stdout_width(120), highlight=False, markup=False, emoji=False)
