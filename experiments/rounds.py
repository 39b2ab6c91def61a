"""Rounds of a long cell, kept one by one: a run that was stopped need not begin the cell again.

They lie beside the report's state file: a line of JSON that names the cell, then one per round. A
later run measures its rounds on caches that it filled; a cell's rows say in how many runs, and what
each run knew of its machine is kept with its rounds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.cells import machine, put_aside, rounds_file
from experiments.common import console, named
from impress.report import commit, write_text

Round = dict[str, Any]


class Rounds:
    """`kept`: rounds of this cell that earlier runs measured, at this commit on this machine, where
    this run goes on. The file holds one cell: rounds that it does not go on with are put aside.

    Not synced: that would be a write during the measurement, and rounds lost in a power cut can be
    measured again.
    """

    def __init__(
        self, report: Path | None, params: Mapping[str, Any], *, resume: bool,
        knows: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`report`, `resume`: as for Cells. `params`: in JSON's types, as is what this run `knows`
        of its machine."""
        self.kept: list[Round] = []
        self._run, self._knows = 1, dict(knows or {})
        self._of: list[tuple[int, dict[str, Any]]] = []  # for each round: its run, what that knew
        self._path = rounds_file(report)
        if self._path is None:
            return
        head = {"params": dict(params), "commit": commit(), "host": machine()}
        lines = _lines(self._path) if resume else []
        if lines[:1] != [head]:
            _put_aside(self._path, lines, head)
            lines = [head]
        self.kept = [line["round"] for line in lines[1:]]
        self._of = [(line["run"], line["knows"]) for line in lines[1:]]
        self._run = max((run for run, _ in self._of), default=0) + 1
        with named(self._path):
            write_text(self._path, "".join(json.dumps(line) + "\n" for line in lines))

    @property
    def n_runs(self) -> int:
        """How many runs measured some of them."""
        return len({run for run, _ in self._of})

    def known(self, name: str) -> list[Any]:
        """What the run that measured it knew by that name, for each round; None: it did not."""
        return [knew.get(name) for _, knew in self._of]

    def add(self, one: Round) -> None:
        """Add a finished round: it is kept on return, where there is a file."""
        self._of.append((self._run, self._knows))
        if self._path is not None:
            line = {"run": self._run, "knows": self._knows, "round": one}
            with named(self._path), self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def _put_aside(path: Path, lines: list[Any], head: Mapping[str, Any]) -> None:
    """Put rounds aside that another run may go on with, and say where: hours may be in them."""
    n, old = len(lines) - 1, lines[0] if lines else {}
    its, where = old.get("params", {}), ""
    if n < 1:
        return
    if its == head["params"]:
        other = "commit" if old.get("commit") != head["commit"] else "machine"
        said = f"{n} rounds of another {other} are measured again"
        where = f" with that {other}"
    elif n * its.get("in_a_row", 1) < its.get("n", 0):
        said = f"{n} rounds of {its.get('cell', 'another cell')}, begun before, are put aside"
    else:  # that cell is whole, and kept
        return
    console.print(
        f"{said}: {put_aside(path)} (renamed to {path.name}, --resume takes them up{where})",
        soft_wrap=True,
    )


def _lines(path: Path) -> list[Any]:
    """Values up to the first line that is not JSON: a stopped run leaves one half written."""
    found: list[Any] = []
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
    return found
