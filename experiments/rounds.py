"""Rounds of a long cell, kept one by one: a run that was stopped need not begin the cell again.

They lie beside the report's state file: a line of JSON that names the cell, then one per round. A
later run measures its rounds on caches that it filled; a cell's rows say in how many runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.cells import machine, state_file
from experiments.common import named
from impress.report import commit, write_text

Round = dict[str, Any]


class Rounds:
    """`kept`: rounds of this cell that earlier runs measured, at this commit on this machine, where
    this run goes on. The file holds one cell: the rounds of another are dropped for it.

    Not synced: that would be a write during the measurement, and rounds lost in a power cut can be
    measured again.
    """

    def __init__(self, report: Path | None, params: Mapping[str, Any], *, resume: bool) -> None:
        """`report`, `resume`: as for Cells. `params`: in JSON's types."""
        self.kept: list[Round] = []
        self._runs: list[int] = []  # for each round
        self._run = 1
        state = state_file(report)
        self._path = state and state.with_name(state.name.replace(".cells.", ".rounds."))
        if self._path is None:
            return
        head = {"params": dict(params), "commit": commit(), "host": machine()}
        lines = _lines(self._path) if resume else []
        lines = lines if lines[:1] == [head] else [head]
        self.kept = [line["round"] for line in lines[1:]]
        self._runs = [line["run"] for line in lines[1:]]
        self._run = max(self._runs, default=0) + 1
        with named(self._path):
            write_text(self._path, "".join(json.dumps(line) + "\n" for line in lines))

    @property
    def n_runs(self) -> int:
        """How many runs measured some of them."""
        return len(set(self._runs))

    def add(self, one: Round) -> None:
        """Add a finished round: it is kept on return, where there is a file."""
        self._runs.append(self._run)
        if self._path is not None:
            with named(self._path), self._path.open("a") as file:
                file.write(json.dumps({"run": self._run, "round": one}) + "\n")


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
