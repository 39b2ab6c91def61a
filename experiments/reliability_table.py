"""Fills the tables of docs/RELIABILITY.md from docs/results/reliability/*.json.

A report gets there with `--json docs/results/reliability/NAME.json`; a table stands between
`<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from experiments import results_table
from experiments.common import parser_of
from experiments.results_table import Reports, rows_table

#: Table -> its report; heading of a column -> name in its rows.
_TABLES: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "faults": ("faults", {
        "fault": "fault", "tried": "tried", "acknowledged": "acknowledged", "lost": "lost",
        "wrong": "wrong", "hangs": "hangs", "missed": "missed", "refused": "refused",
        "ended": "ended",
    }),
    "load": ("load", {
        "threads": "threads", "reading processes": "processes", "engine": "engine",
        "requests/s": "requests/s", "p50 ms": "p50 ms", "p99 ms": "p99 ms",
        "GB/s from SSD": "SSD GB/s", "of fio": "of fio", "bytes from elsewhere": "elsewhere",
        "prompts stored": "written", "RSS growth MB": "RSS growth MB",
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


def _made(reports: Reports, name: str) -> str | None:
    report, columns = _TABLES[name]
    return rows_table(reports.by_name[report], columns) if report in reports.by_name else None


def fill(page: Path, folder: Path) -> None:
    """Rewrite every marked table of a page. Effects: the page."""
    results_table.fill(page, folder, _made)


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the page. Takes no options."""
    parser_of("reliability_table", __doc__).parse_args(argv)
    docs = Path(__file__).resolve().parent.parent / "docs"
    page, folder = docs / "RELIABILITY.md", docs / "results" / "reliability"
    return results_table.filled([partial(fill, page, folder)])


if __name__ == "__main__":
    sys.exit(main())
