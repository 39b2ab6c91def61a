"""Turns the demo's rows, one for each request, into the figures this project tracks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from impress.demo.lookup.tasks import TASKS

Row = dict[str, Any]

REUSE_TITLES: Final = {"recompute": "recompute", "ssd": "hit from SSD", "dram": "hit from DRAM"}
#: Acts with right and wrong answers, and what the names of their figures begin with.
PREFIXES: Final = {"choice": "", "repacked": "repacked."}
#: Modes that load every row: their answers must be those of full KV.
_EXACT: Final = ("ssd", "dram", "exact")
_SHARES: Final = ("rows_share", "fallback_share", "bytes_share", "transferred_share")
_MASSES: Final = ("estimated_missing_mass", "missing_mass_worst_head")


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """By checkpoint and task, checkpoint, task, and in all: [checkpoint.][task.][repacked.]mode.x.

    Times are percentiles; a ratio is a mode's median to recompute's, over the same questions;
    everything else is a mean over requests.
    """
    figures = {
        "exact.agreement": _mean(row["agrees"] for row in rows if row["mode"] in _EXACT),
        **_reuse([row for row in rows if row["act"] == "reuse"]),
    }
    for where, some in _cells([row for row in rows if row["act"] in PREFIXES]):
        for mode in _names(some, "mode"):
            for name, value in _of_mode(some, mode).items():
                figures.setdefault(f"{where}{mode}.{name}", value)
    return figures


def moved_share(figures: dict[str, float], mode: str, checkpoint: str = "") -> float:
    """Bytes moved ÷ exact's, mean of the tasks: acts ask more or fewer questions of a task, and one
    task may take twice as many bytes as another."""
    begin = f"{checkpoint}." if checkpoint else ""
    return _mean(figures[f"{begin}{task}.{mode}.transferred_share"] for task in TASKS)


def _reuse(rows: Sequence[Row]) -> dict[str, float]:
    """The first act's figures; the second act has a `recompute` of its own."""
    figures: dict[str, float] = {}
    for mode in REUSE_TITLES if rows else ():
        where = "reuse.recompute" if mode == "recompute" else mode
        figures |= {f"{where}.{name}": value for name, value in _times(rows, mode).items()}
    if rows:
        figures["control.changes_without_prefix"] = _mean(
            row["changes_without_prefix"] for row in rows
        )
    return figures


def _cells(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The beginning of a figure's name, and the rows the figure is made from."""
    for act, prefix in PREFIXES.items():
        for checkpoint in ("", *_names(rows, "checkpoint")):
            for task in ("", *_names(rows, "task")):
                some = [
                    row for row in rows
                    if row["act"] == act
                    and checkpoint in ("", row["checkpoint"]) and task in ("", row["task"])
                ]  # fmt: skip
                where = ".".join(part for part in (checkpoint, task) if part)
                yield f"{where}.{prefix}" if where else prefix, some


def _names(rows: Sequence[Row], column: str) -> list[str]:
    return list(dict.fromkeys(row[column] for row in rows))


def _of_mode(rows: Sequence[Row], mode: str) -> dict[str, float]:
    own = [row for row in rows if row["mode"] == mode]
    said = {"accuracy": "right", "agreement": "agrees"}
    if mode != "recompute":
        said |= {name: name for name in (*_SHARES, *_MASSES)}
    figures = _times(rows, mode)
    for name, column in said.items():
        if all(row[column] is not None for row in own):
            figures[name] = _mean(row[column] for row in own)
    return figures


def _times(rows: Sequence[Row], mode: str) -> dict[str, float]:
    ms = {
        who: [row["ttft_ms"] for row in rows if row["mode"] == who] for who in (mode, "recompute")
    }
    p50, p95 = np.percentile(ms[mode], (50, 95))
    return {
        "ttft_ms_p50": float(p50),
        "ttft_ms_p95": float(p95),
        "ttft_ratio": float(p50 / np.median(ms["recompute"])),
    }


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))
