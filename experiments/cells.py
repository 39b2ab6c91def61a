"""The state file of an experiment: one line of JSON for each finished cell, appended and synced."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Final

from experiments.common import Row, Unable, named
from impress.report import commit, host, write_text

#: The key of a row that says why something could not be measured here: --resume tries its cell
#: again, and until then the cell's other rows hold.
SKIPPED: Final = "skipped"


def state_file(report: Path | None) -> Path | None:
    """Where the finished cells of a report are kept; None where it is not a file (- is stdout)."""
    if report is None or str(report) == "-" or (report.exists() and not report.is_file()):
        return None
    return report.with_name(f"{report.stem}.cells.jsonl")


def rounds_file(report: Path | None) -> Path | None:
    """Where the rounds of a cell under way are kept (Rounds), beside the finished cells."""
    state = state_file(report)
    return state and state.with_name(state.name.replace(".cells.", ".rounds."))


class Cells:
    """Finished cells by their parameters: in memory, and in a file where a report is asked for.
    A check, which is measured more than once, is kept every time.

    A line that a stopped run left half written is dropped, and its cell is measured again. Raises
    Unable on any other line that is not a finished cell, and on a cell of another machine: figures
    of two machines are not put side by side.
    """

    def __init__(self, report: Path | None, *, resume: bool) -> None:
        """`resume` keeps what the file holds. Otherwise it begins empty, and its old contents are
        put aside under an unused name: hours may have gone into them."""
        self._path = state_file(report)
        self._commit = commit()  # of the code that runs: what is committed meanwhile is not
        self._done: dict[str, list[dict[str, Any]]] = {}
        if self._path is None:
            return
        if not resume:
            begin_anew(report)
        kept = _lines(self._path) if resume and self._path.exists() else []
        for cell in kept:
            if cell.get("host", machine()) != machine():
                raise Unable(
                    f"{self._path} holds cells of another machine ({cell['host']}): name another "
                    "--json FILE, or begin anew without --resume"
                )
            self._keep(cell)
        text = "".join(json.dumps(cell) + "\n" for cell in kept)
        with named(self._path):
            if not self._path.exists() or self._path.read_text(errors="replace") != text:
                write_text(self._path, text)

    def __contains__(self, params: Mapping[str, Any]) -> bool:
        return any(map(_is_whole, self._done.get(_key(params), ())))

    def __getitem__(self, params: Mapping[str, Any]) -> list[Row]:
        """Rows of every time the cell was measured, the latest last, each with its commit."""
        return [
            {**row, "commit": cell["commit"]}
            for cell in self._done[_key(params)]
            for row in cell["rows"]
        ]

    def others(self, cells: Sequence[Mapping[str, Any]]) -> int:
        """How many finished cells are not among these."""
        return len(self._done.keys() - {_key(params) for params in cells})

    def add(self, params: Mapping[str, Any], rows: Sequence[Row], took_s: float) -> None:
        """Add a finished cell; it is durable on return where there is a file."""
        cell = {
            "params": dict(params), "rows": list(rows), "took_s": round(took_s, 3),
            "commit": self._commit, "host": machine(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }  # fmt: skip
        text = json.dumps(cell, default=_plain)
        # What is reported is what would be read back: one run and a resumed one say the same.
        self._keep(json.loads(text))
        if self._path is not None:
            with named(self._path), self._path.open("a") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())

    def _keep(self, cell: dict[str, Any]) -> None:
        """It stands in place of earlier times that lacked something."""
        times = self._done.setdefault(_key(cell["params"]), [])
        times[:] = [*filter(_is_whole, times), cell]

    def commits(self, cells: Sequence[Mapping[str, Any]]) -> list[str]:
        """The commits that these cells were measured at, in order of first use."""
        times = (cell for params in cells for cell in self._done[_key(params)])
        return list(dict.fromkeys(cell["commit"] for cell in times))

    def dates(self, cells: Sequence[Mapping[str, Any]]) -> list[str]:
        """The days that these cells were measured on, in order."""
        times = (cell for params in cells for cell in self._done[_key(params)])
        return sorted({cell["date"][:10] for cell in times if "date" in cell})


def begin_anew(report: Path | None) -> None:
    """Put the cells and rounds kept beside a report aside, and say where they are."""
    for path, what in ((state_file(report), "cells"), (rounds_file(report), "rounds")):
        if path is not None and path.exists() and path.stat().st_size:
            print(
                f"without --resume all is measured anew; {what} of before: {put_aside(path)} "
                f"(renamed to {path.name}, --resume takes them up)", file=sys.stderr,
            )  # fmt: skip


def put_aside(path: Path) -> Path:
    """Rename a file to one that does not exist yet, before.NAME, before1.NAME, …: this path."""
    names = (path.with_name(f"before{n or ''}.{path.name}") for n in count())
    aside = next(name for name in names if not name.exists())
    with named(path):
        path.replace(aside)
    return aside


def kept_of(report: Path | None, *, begun: bool) -> str:
    """What a run that was stopped says. `begun`: what lies beside the report is of this run, or one
    that it goes on with."""
    if state_file(report) is None:
        return "stopped; the temporary data is gone (with --json FILE, --resume would go on)"
    kept = _kept(report)
    if kept is not None and begun:
        return f"stopped; what was measured is kept ({kept}): --resume goes on from it"
    older = f" ({kept} is of an earlier run)" if kept is not None else ""
    return f"stopped before anything was kept; the temporary data is gone{older}"


def _kept(report: Path | None) -> Path | None:
    """The file beside a report that cells, or rounds behind the line that names theirs, are in."""
    for path, n_before in ((state_file(report), 0), (rounds_file(report), 1)):
        if path is not None and path.exists() and path.read_bytes().count(b"\n") > n_before:
            return path
    return None


def machine() -> str:
    """Its kind, and how many processors this process may use. (A disk does not say what it is.)"""
    return f"{host()}, {len(os.sched_getaffinity(0))} processors"


def _key(params: Mapping[str, Any]) -> str:
    return json.dumps(params, sort_keys=True, default=_plain)


def _is_whole(cell: Mapping[str, Any]) -> bool:
    return bool(cell["rows"]) and all(SKIPPED not in row for row in cell["rows"])


def _plain(value: Any) -> Any:
    """NumPy's numbers and arrays as JSON's."""
    return value.tolist()


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(errors="replace")  # what is not text is not a finished cell either
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            cell = json.loads(line)
            rows = cell["rows"]
            if not isinstance(cell["params"], dict) or not isinstance(rows, list):
                raise ValueError
            if not all(isinstance(row, dict) for row in rows):
                raise ValueError
            cell["commit"]
        except (ValueError, KeyError, TypeError):
            if number == text.count("\n") + 1:  # the last line, cut short
                break
            raise Unable(f"{path} line {number} is no finished cell: remove that line") from None
        found.append(cell)
    return found
