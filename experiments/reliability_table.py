"""Fills the tables of docs/RELIABILITY.md from docs/results/reliability/*.json.

A report gets there with `--json docs/results/reliability/NAME.json`; a table stands between
`<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from experiments.results_table import Reports, rows_table

_MARK: Final = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

#: Table -> its report; heading of a column -> name in its rows.
_TABLES: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "faults": ("faults", {
        "fault": "fault", "tried": "tried", "acknowledged": "acknowledged", "lost": "lost",
        "wrong": "wrong", "hangs": "hangs", "missed": "missed",
    }),
    "load": ("load", {
        "threads": "threads", "reading processes": "processes", "engine": "engine",
        "requests/s": "requests/s", "p50 ms": "p50 ms", "p99 ms": "p99 ms",
        "GB/s from SSD": "SSD GB/s", "of fio": "of fio", "RSS growth MB": "RSS growth MB",
        "oldest lease s": "oldest lease s", "compared": "compared", "wrong": "wrong",
        "lost": "lost", "left": "left",
    }),
    "overhead": ("overhead", {
        "way": "way", "GB/s": "read GB/s", "fio GB/s": "fio GB/s", "CPU s/GB": "CPU s/GB",
        "of it looking at bytes": "inside s/GB", "others kept busy, cores": "others, cores",
        "wall saved": "wall saved", "middle half from": "25 %", "to": "75 %",
    }),
    "durability": ("overhead", {
        "way": "way", "GB/s": "write GB/s", "wall saved": "wall saved",
        "middle half from": "25 %", "to": "75 %",
    }),
    "digest": ("overhead", {
        "piece": "piece", "CPU s/GB": "CPU s/GB", "least": "least", "most": "most",
        "in cache": "in cache", "floor": "floor",
    }),
}  # fmt: skip


def fill(page: Path, folder: Path) -> None:
    """Rewrite every marked table of a page. Effects: the page."""
    reports = Reports.of(folder)

    def table(found: re.Match[str]) -> str:
        name = found[2]
        if name == "runs":
            return found[1] + reports.when() + found[3]
        report, columns = _TABLES[name]
        if report not in reports.by_name:
            return found[1] + "not yet run\n" + found[3]
        return found[1] + _text(reports, report, columns) + found[3]

    page.write_text(_MARK.sub(table, page.read_text()))


def _text(reports: Reports, report: str, columns: Mapping[str, str]) -> str:
    return rows_table(reports.by_name[report], columns)


if __name__ == "__main__":
    docs = Path(__file__).resolve().parent.parent / "docs"
    fill(docs / "RELIABILITY.md", docs / "results" / "reliability")
    sys.exit(0)
