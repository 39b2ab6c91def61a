"""Fills tables of docs/RESULTS.md and LINEAGE.md from docs/results/*.json, none copied by hand.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. `paper` is every figure beside the
paper's; any other name is a report, whose rows are printed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from experiments.common import Unable, named, parser_of
from experiments.results_lines import LINES, Line, Ours
from experiments.systems.clock import MOST_ERROR, PAPER_DISK_GB_S
from experiments.systems.paired import Times, end_of, times, worst_of
from experiments.systems.sizes import checks
from experiments.systems.sweep import by_cell
from impress.report import write_text

_MARK: Final = re.compile(r"(<!-- table: ([\w.]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_NOT_RUN: Final = "not yet run"
#: The pages under docs/ that have tables.
PAGES: Final = ("RESULTS.md", "LINEAGE.md")


def _report(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as err:
        raise Unable(f"{path} is no report ({err}): remove it, or measure it again") from None
    if not isinstance(found, dict):
        raise Unable(f"{path} is no report: remove it, or measure it again")
    return found


@dataclass(frozen=True, slots=True)
class Reports:
    """What experiments reported, by name."""

    by_name: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, folder: Path) -> Reports:
        """Raises Unable where a file is not a report."""
        found = {path.stem: _report(path) for path in sorted(folder.glob("*.json"))}
        return cls({name: report for name, report in found.items() if "figures" in report})

    def figure(self, ours: Ours) -> str:
        """One figure as text."""
        report = self.by_name.get(ours.report)
        if report is None:
            return _NOT_RUN
        value = ours.of(report) if ours.of else report["figures"].get(ours.figure)
        if value is None:
            withdrawn = report["figures"].get("emulator_error", 0.0) > MOST_ERROR
            return "withdrawn" if withdrawn else _NOT_RUN
        text = ours.form.format(value)
        said = report["figures"]
        names = [(end_of(ours.figure, end), f"{ours.figure}_{end}") for end in ("low", "high")]
        ends = [said.get(one, said.get(other)) for one, other in names]
        if ours.within and None not in ends:
            text += f" [{', '.join(ours.form.format(end) for end in ends)}]"
        return text

    def when(self) -> str:
        """One line for each report: date, commit, size, machine."""
        lines = [
            "| experiment | date | commit | size | machine | emulator off by |",
            "|---|---|---|---|---|---|",
        ]
        for name, report in self.by_name.items():
            meta = report["meta"]
            error = report["figures"].get("emulator_error")
            off = "not checked" if "emulated" in meta else ""
            if error is not None:
                off = f"{error:.1%}{_failed(report['rows'])}"
            size = "quick" if meta.get("quick") else "full"
            measured = meta.get("cells", {}).get("commits", [meta["commit"]])
            days = meta.get("cells", {}).get("dates") or [meta["date"][:10]]
            commits = ", ".join(f"`{one}`" for one in measured)
            machine = _processor(meta["host"])
            date = ", ".join(days)
            lines.append(f"| {name} | {date} | {commits} | {size} | {machine} | {off} |")
        return "\n".join(lines) + "\n"


def _failed(rows: Sequence[Mapping[str, Any]]) -> str:
    """The checks that failed and were measured again: no cell was measured after those."""
    errors = checks(rows)
    failed = [error for error in errors if error > MOST_ERROR]
    if not failed:
        return ""
    return f" ({len(failed)} of {len(errors)} checks failed, by {max(failed):.1%} at most)"


def _processor(host: str) -> str:
    """The processor of a report's machine, without what its maker adds to the name."""
    return re.sub(r"\(\w+\)| Processor$", "", host.partition(", ")[2])


def paper_table(reports: Reports) -> str:
    """Every figure of the paper's, ours beside it."""
    made = [
        "| paper | what | paper's | ours | how | why they differ |",
        "|---|---|---|---|---|---|",
    ]
    for line in LINES:
        made.append(f"| {line.where} | {line.what} | {line.paper} | {_ours(line, reports)} | "
                    f"{line.how} | {line.why} |")  # fmt: skip
    return "\n".join(made) + "\n"


def _ours(line: Line, reports: Reports) -> str:
    return "; ".join(f"{o.label}{reports.figure(o)}" for o in line.ours) or "not measured"


#: Keys that rows of older reports lack, and the values they had; None: unknown.
_BEFORE: Final = {
    "policy": "exact", "layers": 4, "emulated_ms": None, "stated_ms": None, "before_share": None,
    "hit_share": None, "mode": None,
}  # fmt: skip


def rows_table(
    report: Mapping[str, Any], columns: Mapping[str, str],
    only: Callable[[Mapping[str, Any]], bool] = lambda row: True,
) -> str:  # fmt: skip
    """Some columns of a report's rows for which `only` holds. Rows of other tables lack columns.

    Empty where no row has them all: that part was not run, or a column has another name.
    """
    made = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    whole = [row for row in ({**_BEFORE, **row} for row in report["rows"])
             if all(name in row for name in columns.values())]  # fmt: skip
    if not whole:
        return ""
    for row in whole:
        if only(row):
            made.append(f"| {' | '.join(_cell(row[name]) for name in columns.values())} |")
    return "\n".join(dict.fromkeys(made)) + "\n"  # equal rows of two cells appear once


#: What a table across cells sets side by side.
_ACROSS: Final = (
    "recompute", "as", "as_h2o_lfu", "impress", "as_int4", "snapkv", "quality", "exact", "auto",
)  # fmt: skip
#: And the times that their ratios are taken from.
_BY: Final = ("p50_ms", "mean_ms")


def across_table(report: Mapping[str, Any]) -> str:
    """p50 of some systems, a line for each cell, with the measured fallback share, the rate of the
    disk that compute was stretched by and fio's before it, and the commit where rows say it."""
    cells = by_cell(report["rows"])
    across = [name for name in _ACROSS if any(name in systems for systems in cells.values())]
    pair = ["AS+H2O+LFU ÷ impress", "by the mean"] if {"as_h2o_lfu", "impress"} <= {*across} else []
    fell_back = ["fell back"] if "impress" in across else []
    barred = ["auto ÷ best of three", "by the mean"]
    heads = ["cell", *fell_back, "disk GB/s", "fio GB/s", "commit", *across, *pair, *barred]
    made = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for label, systems in cells.items():
        p50 = {name: row["p50_ms"] for name, row in systems.items()}
        lfu, ours = (systems.get(name, {}) for name in ("as_h2o_lfu", "impress"))
        ratios = [times(lfu, ours, of) if of in lfu and of in ours else None for of in _BY]
        fell = systems["impress"]["fell_back"] if "impress" in systems else ""
        commits = dict.fromkeys(row.get("commit", "") for row in systems.values())
        rates = [
            row.get("disk_gb_s", PAPER_DISK_GB_S / row["dilation"])
            for row in systems.values() if "dilation" in row
        ]  # fmt: skip
        by_fio = [row["fio_gb_s"] for row in systems.values() if "fio_gb_s" in row]
        values = [
            *([fell] if fell_back else []),
            rates[0] if rates else "",
            by_fio[0] if by_fio else "",
            " ".join(commits),
            *(p50.get(name, "") for name in across),
            *(_with_interval(found, 3) for found in ratios if pair),
            # Four digits: a bar of 1.05 may lie within 1.0533.
            *(_with_interval(worst_of(systems, of), 4) for of in _BY),
        ]
        made.append(f"| {label} | {' | '.join(_cell(value) for value in values)} |")
    return "\n".join(made) + "\n"


def _with_interval(found: Times | None, digits: int) -> str:
    if found is None:
        return ""
    shown = [f"{end:.{digits}g}" for end in found if end is not None]
    return shown[0] + (f" [{', '.join(shown[1:])}]" if shown[1:] else "")


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


#: Report, or REPORT.PART of one with several tables -> heading of a column -> name in its rows.
_COLUMNS: Final[Mapping[str, Mapping[str, str]]] = {
    "ttft": {
        "cell": "cell", "system": "system", "p50 ms": "p50_ms", "p90 ms": "p90_ms",
        "mean ms": "mean_ms", "I/O ms": "io_ms", "waits ms": "emulated_ms",
        "stated ms": "stated_ms", "SSD floor ms": "ssd_floor_ms", "MB moved": "mb",
        "MB from SSD": "ssd_mb", "and behind": "behind_mb", "HBM": "hbm", "DRAM": "dram",
        "rows": "rows",
        "fell back": "fell_back",
    },
    "ttft_cuda": {
        "cell": "cell", "system": "system", "p50 ms": "p50_ms", "p90 ms": "p90_ms",
        "mean ms": "mean_ms", "I/O ms": "io_ms", "device ms": "emulated_ms",
        "SSD floor ms": "ssd_floor_ms", "MB moved": "mb", "MB from SSD": "ssd_mb", "HBM": "hbm",
        "DRAM": "dram", "fell back": "fell_back", "map": "map_share",
    },
    "accuracy": {
        "model": "group", "way": "arm", "questions": "n", "right": "accuracy",
        "points lost": "lost_points", "from": "lost_points_low", "to": "lost_points_high",
        "KL": "kl", "agreement over 64 fed tokens": "agreement64",
        "same tokens if left alone": "run64", "bytes": "bytes_share",
    },
    "ablation": {"cell": "cell", "system": "system", "p50 ms": "p50_ms", "I/O ms": "io_ms",
                 "MB moved": "mb", "HBM": "hbm", "DRAM": "dram", "fell back": "fell_back"},
    "scale": {"cell": "cell", "system": "system", "p50 ms": "p50_ms", "I/O ms": "io_ms",
              "MB moved": "mb", "fell back": "fell_back"},
    "chunks": {"row KiB": "row_kib", "overlap": "overlap",
               "moved ÷ chosen before": "amplification_before", "after": "amplification_after",
               "requests before": "requests_before", "requests after": "requests_after",
               "I/O ÷ floor before": "io_vs_floor_before",
               "I/O ÷ floor after": "io_vs_floor_after", "disk alone": "io_vs_floor_alone"},
    "hits": {"ratio": "ratio", "Zipf": "zipf", "eviction": "eviction", "HBM rows": "hbm_rows",
             "DRAM rows": "dram_rows", "HBM chunks": "hbm_chunks", "DRAM chunks": "dram_chunks"},
    "threshold": {"model": "model", "threshold": "threshold", "rows": "rows", "right": "right",
                  "exact": "exact", "fell back": "fell_back"},
    "zero_hit": {"layers": "layers", "hit": "hit_share", "mode": "mode", "storing": "storing",
                 "policy": "policy",
                 "TTFT ms": "ttft_ms", "without a store": "plain_ttft_ms",
                 "checks, lookup and mode": "share", "all before the forward": "before_share",
                 "TTFT ÷ without": "ttft_ratio", "throughput": "throughput_share"},
    "vbuffers.memory": {"system": "system", "MiB, mean": "mib_mean", "most": "mib_most",
                        "÷ static": "vs_static", "fragmentation": "fragmentation",
                        "resident MiB": "resident_mib", "idle": "idle_share"},
    "vbuffers.decode": {"tokens": "context", "batch": "batch", "system": "system",
                        "steps/s": "steps_s", "÷ concat": "vs_concat",
                        "CPU ms a step": "cpu_ms", "÷ concat by CPU": "cpu_vs_concat",
                        "stalls": "stalls", "µs each": "stall_us", "ahead": "ahead", "n": "n"},
    "vbuffers.hit": {"tokens": "n_tokens", "pooled ms": "pooled_ms", "virtual ms": "virtual_ms",
                     "virtual ÷ pooled": "ttft_vs_pooled", "by CPU": "cpu_vs_pooled", "n": "n"},
    "hashpool": {"p": "p", "arm": "arm", "blocks found": "hit",
                 "requests a second of a core": "items_per_s", "÷ no cache": "vs_no_cache",
                 "same next word": "same_word"},
    "trace": {"trace": "trace", "blocks": "size", "policy": "policy", "found": "hit",
              "HBM TiB": "hbm_tib", "DRAM TiB": "dram_tib", "SSD TiB": "ssd_tib",
              "pool TiB": "pool_tib", "computed TiB": "computed_tib"},
}  # fmt: skip


#: Ways of serving a prefix in `accuracy`'s table: at a quarter of the rows, and those without one.
_ARMS: Final = (
    "exact", "int8", "int4", "quality05", "25.paper", "25.all_heads", "25.pages", "25.snap",
    "25.contiguous", "25.static_h2o",
)  # fmt: skip
#: Tables of some of their report's rows; the others are in a table of their own, or in none.
_ONLY: Final[Mapping[str, Callable[[Mapping[str, Any]], bool]]] = {
    "ttft": lambda row: row.get("cell") == "base",
    "accuracy": lambda row: row["task"] == "all" and row["arm"] in _ARMS,
}


def _made(reports: Reports, name: str) -> str | None:
    """A table of docs/RESULTS.md or LINEAGE.md; None where its report is not there."""
    if name == "paper":
        return paper_table(reports)
    report, _, part = name.partition(".")
    if report not in reports.by_name:
        return None
    if part == "cells":
        return across_table(reports.by_name[report])
    if name not in _COLUMNS:
        return None
    return rows_table(reports.by_name[report], _COLUMNS[name], *filter(None, [_ONLY.get(name)]))


def fill(page: Path, folder: Path, make: Callable[[Reports, str], str | None] = _made) -> None:
    """Rewrite every marked table of a page, each by its name. Effects: the page."""
    reports = Reports.of(folder)

    def table(found: re.Match[str]) -> str:
        text = reports.when() if found[2] == "runs" else make(reports, found[2])
        return found[1] + (text or f"{_NOT_RUN}\n") + found[3]

    with named(page):
        write_text(page, _MARK.sub(table, page.read_text()))


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the pages. Takes no options."""
    parser_of("results_table", __doc__).parse_args(argv)
    return fill_all(Path(__file__).resolve().parent.parent / "docs")


def fill_all(docs: Path) -> int:
    """Fill this folder's pages from the reports in its `results`. 2 where one is none, else 0."""
    return filled([partial(fill, docs / page, docs / "results") for page in PAGES])


def filled(pages: Sequence[Callable[[], None]]) -> int:
    """Fill them. 2, and a line, where a report is none or there is no room; else 0."""
    try:
        for page in pages:
            page()
    except (Unable, OSError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
