"""`impress rebuild`: make the index again, from the segments alone."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from impress.cli.options import Json, Store, print_json, store_dir
from impress.errors import StoreFailed, StoreLocked
from impress.terminal import count, err, out, printable, size
from impress.upkeep.rebuild import rebuild_store
from impress.upkeep.scan import Rebuilt


def rebuild(
    store: Store = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Say what would be found; index and segments stay. Shards are locked as for "
            "writing: the right to write is needed, and lock files change.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a lost or damaged index again from the segments alone.

    Looks at every page of every segment for span headers, reads every row, drops spans that do not
    match their checksums and keeps the newest owner of each byte. What requests had shown (leases,
    scores, what they chose, the guard's trust) is in no segment and starts from nothing. The old
    index is set aside as index.old. A shard that is open for writing elsewhere, or cannot be read,
    is named and left alone.

    **Exit status**

    0 done · 1 done, but something did not read back, or a shard was open elsewhere or failed · 2 it
    could not run, or every shard was open elsewhere or failed

    **Examples**

    impress rebuild --dry-run

    impress rebuild --store /mnt/nvme/store
    """
    where = store_dir(store)
    found = Rebuilt()
    try:
        _with_progress(where, dry_run, found)
    except (StoreLocked, StoreFailed):
        if as_json and (found.busy_shards or found.failed_shards):
            _say(where, found, dry_run, as_json)
        raise
    _say(where, found, dry_run, as_json)
    left = found.busy_shards or found.failed_shards
    if found.torn or found.damaged or found.unreadable or left:
        raise typer.Exit(1)


def _say(where: Path, found: Rebuilt, dry_run: bool, as_json: bool) -> None:
    if as_json:
        print_json({"store": str(where), "dry_run": dry_run, **asdict(found)})
    else:
        _print(where, found, dry_run)


def _with_progress(where: Path, dry_run: bool, found: Rebuilt) -> None:
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("scanning", total=None)
        rebuild_store(
            where,
            dry_run=dry_run,
            found=found,
            progress=lambda what, done, of: bar.update(
                task, description=what, completed=done, total=of
            ),
        )


def _print(where: Path, found: Rebuilt, dry_run: bool) -> None:
    done = "would hold" if dry_run else "holds"
    whose = "the index"
    if found.busy_shards or found.failed_shards:
        whose = "of the shards that could be looked at, the index"
    out.print(
        f"{where}: {whose} {done} {count(found.spans, 'span')}, "
        f"{count(found.windows, 'window')}, {size(found.n_bytes)}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    for n, what in (
        (found.superseded, "older copies, or headers whose space or id is another span's now"),
        (found.purged, "spans that were still to be erased: left out"),
        (found.torn, "headers that do not read back whole: stores that were cut off"),
        (found.damaged, "spans whose rows are gone or do not match their checksums: dropped"),
        (found.foreign, "headers of another store"),
    ):
        if n:
            out.print(f"  {n} {what}", markup=False)
    if found.spans and not dry_run:
        anew = "leases, scores, what requests chose and the guard's trust begin anew"
        out.print(f"  {anew}", markup=False)
    for note in found.notes:
        out.print(f"  {printable(note)}", markup=False, soft_wrap=True)
