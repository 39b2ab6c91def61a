"""Breaks a store in every way that can be made here, and counts: `python -m experiments.faults`.

lost: acknowledged by flush before the fault and not served after it, though none of its bytes were
destroyed; not counted where every prompt needs what was destroyed (index, identity), or where reads
fail. missed: honestly not served: its bytes were destroyed, its read failed or came late, or the
store was refused. wrong: an answer that is not what was stored. refused: the store would not open,
or would not take a prompt, and said so; all prompts of one that does not open are lost. ended: a
process that stores or reads ended by itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from experiments.cells import SKIPPED
from experiments.common import Row, Unable, console, print_rows
from experiments.faults.cuts import kills, power_cuts
from experiments.faults.flips import flips
from experiments.faults.media import full_disk, injections
from experiments.harness import Cell, Experiment, Figures, Options, main

Fault = Callable[[Path, int, int], list[Row]]

#: Name -> how, how often, how often with --quick, most in a cell (--resume goes on after it),
#: seconds each time.
_FAULTS: Final[dict[str, tuple[Fault, int, int, int, float]]] = {
    "kills": (kills, 500, 12, 50, 1.3),
    "power_cuts": (power_cuts, 200, 6, 50, 2.0),
    "bit_flips": (flips, 10_000, 200, 1000, 0.07),
    "full_disk": (full_disk, 20, 3, 20, 30.0),
    "injections": (injections, 60, 30, 60, 0.5),
}
_COLUMNS: Final = (
    "fault", "tried", "acknowledged", "lost", "wrong", "hangs", "missed", "refused", "ended",
)  # fmt: skip


def _cells(options: Options) -> Sequence[Cell]:
    cells = []
    for name, (fault, full, quick, most, seconds) in _FAULTS.items():
        total = quick if options.quick else full
        for part, first in enumerate(range(0, total, most)):
            n, seed = min(most, total - first), options.seed + part
            measure = partial(_measured, fault, options.folder / f"{name}{part}", name, n, seed)
            cells.append(Cell({"name": name, "n": n, "seed": seed}, measure, n * seconds))
    return cells


def _measured(fault: Fault, folder: Path, name: str, n: int, seed: int) -> list[Row]:
    logging.getLogger("impress").setLevel(logging.CRITICAL)  # every fault would say so
    folder.mkdir()
    try:
        return fault(folder, n, seed)
    except Unable as err:
        console.print(f"{name}: skipped: {err}")
        return [{SKIPPED: str(err)}]


def _figures(parts: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
    rows = _together(parts)
    shown = [{c: "–" if row.get(c) is None else row[c] for c in _COLUMNS} for row in rows]
    print_rows("Faults", shown)
    tried = dict.fromkeys(_FAULTS, 0)
    for row in rows:
        tried[row["name"]] += row["tried"]
    return {
        **{name: float(tried[name]) for name in ("power_cuts", "kills", "bit_flips")},
        **{
            name: float(sum(row.get(name) or 0 for row in rows))
            for name in ("lost", "wrong", "hangs", "ended")
        },
    }, rows


def _together(parts: list[Row]) -> list[Row]:
    """One row per fault: the counts of its cells added up; None (not counted) stays None."""
    rows: dict[str, Row] = {}
    for part in parts:
        row = rows.setdefault(part["fault"], {"name": part["name"], "fault": part["fault"]})
        for name in _COLUMNS[1:]:
            if name in part:
                counted = part[name] is not None
                row[name] = (row.get(name) or 0) + part[name] if counted else None
    return list(rows.values())


EXPERIMENT: Final = Experiment(
    "faults",
    "Kills, power cuts, bit flips, full disks and failing system calls against a store.",
    _cells,
    _figures,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
