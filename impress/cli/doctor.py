"""`impress doctor`: what this machine can do for a store."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from impress.cli.options import Json, Store, print_json, store_dir
from impress.config import in_full
from impress.terminal import err, literal, number, out, size
from impress.upkeep.doctor import Finding, examine, machine
from tiers.engines import ENGINES


def doctor(
    store: Store = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure/--no-measure",
            help="Read 256 MiB twice with each engine, for at most five seconds each.",
        ),
    ] = True,
    as_json: Json = False,
) -> None:
    """Say which I/O engines work here, why the others do not, and how fast the disk is with each.

    Measures verified reads on the file system of the store's directory (which need not exist yet):
    256 MiB of test data are written beside it, or inside it where it is a mount point or its parent
    folder may not be written to, and removed afterwards. Where main's segments lie on another disk
    than the store, it is that one.
    `Config.io_engine` picks an engine; "auto" takes the one marked "auto takes it".

    **Examples**

    impress doctor

    impress doctor --store /mnt/nvme/store --json
    """
    folder = _nearest(store_dir(store))
    facts = machine(folder)
    findings = _with_progress(folder, measure)
    if as_json:
        print_json({"folder": str(folder), **facts, "engines": [asdict(f) for f in findings]})
        return
    _print(folder, facts, findings, measure)


def _nearest(path: Path) -> Path:
    """The store's parent, or the nearest directory above it that exists; the store itself where it
    is on another file system than its parent (a mount point, say), or only it may be written to.
    The same of the folder of main's segments, where these are on another disk than the store."""
    path = in_full(path)
    segments = path / "shards/main/segments"
    if segments.is_dir() and segments.stat().st_dev != path.stat().st_dev:
        path = segments.resolve()
    if path.is_dir():
        apart = path.stat().st_dev != path.parent.stat().st_dev
        if apart or (os.access(path, os.W_OK) and not os.access(path.parent, os.W_OK)):
            return path
    path = path.parent
    while not path.is_dir():
        path = path.parent
    return path


def _with_progress(folder: Path, measure: bool) -> list[Finding]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("examining", total=len(ENGINES))
        found = []
        with closing(examine(folder, measure=measure)) as findings:  # removes its data in any case
            for finding in findings:
                found.append(finding)
                bar.update(task, advance=1)
    return sorted(found, key=lambda finding: ENGINES.index(finding.name))


def _print(
    folder: Path, facts: dict[str, str | int], findings: list[Finding], measured: bool
) -> None:
    out.print(
        f"{facts['system']}, {facts['cores']} cores, {size(int(facts['memory_bytes']))}; "
        f"{size(int(facts['disk_free_bytes']))} free at {folder}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    table = Table(box=None, pad_edge=False)
    table.add_column("engine")
    if measured:
        for column in ("64 KiB, GB/s", "in sequence, GB/s", "CPU s/GB"):
            table.add_column(column, justify="right")
    table.add_column("", overflow="fold")
    for finding in findings:
        rates = (finding.random_gbps, finding.sequential_gbps, finding.cpu_s_per_gb)
        cells = [number(rate, ".2f") for rate in rates]
        table.add_row(
            finding.name, *(cells if measured else []), literal(_note(finding, facts, measured))
        )
    out.print(table)


def _note(finding: Finding, facts: dict[str, str | int], measured: bool) -> str:
    if finding.why_not:
        return f"not here: {finding.why_not}"
    notes = ["auto takes it"] if finding.name == facts["auto_engine"] else []
    if measured and not finding.direct:
        notes.append("buffered: the page cache has a part in it")
    return "; ".join(notes)
