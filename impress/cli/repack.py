"""`impress repack`: move rows that are chosen often together, or say what that would save."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from impress.cli.options import Store, check_json, store_dir, write_json
from impress.config import MIB, Config
from impress.errors import StoreLocked
from impress.repacking.report import NO_MEMORY, UNREADABLE, RepackReport, SpanReport
from impress.store import PrefixStore
from impress.terminal import count, err, number, out, show, size, table_of
from impress.write.directory import Identity, Shard, read_identity, shards_of, writing
from impress.write.jobs import Swapped
from tiers.files import segment_paths, size_of


def repack(
    store: Store = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would move and what it would save.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", readable=False,
            help="Write the report to FILE too; - prints it instead of the table.",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Reorder the rows of stored spans by how often requests chose them.

    A span is copied in its new order, and the copy takes its place when it is whole: nothing that
    is stored is edited, and an interruption leaves the old one. Spans of which nothing is known,
    neither choices nor importance, are left out. A shard that is open for writing elsewhere is
    named and left alone.

    A copy wants room in the segment files there are: none is added, so that disk_bytes holds, and
    one that is left empty goes. What is written counts in daily_write_bytes of whoever serves next.

    What a request reads is an estimate: rows are taken to be chosen independently of each other.
    There is none (–) of a span that is rewritten as it lies, without its dead windows.

    **Exit status**

    0 done, also where spans had no room for a copy · 1 a span does not read back (it goes, but for
    a dry run), there was no memory for one, a copy failed or was not committed in time, or a shard
    was open elsewhere · 2 it could not run, or every shard was

    **Examples**

    impress repack --dry-run

    impress repack --store /mnt/nvme/store --json repack.json
    """
    where = store_dir(store)
    identity = read_identity(where)
    check_json(json_file)
    report, busy, shards = RepackReport(dry_run), [], shards_of(where)
    for shard in shards:
        try:
            with writing(shard):
                report.spans += _repacked(where, shard, identity, dry_run).spans
        except StoreLocked as taken:
            busy.append(shard.name)
            err.print(str(taken), markup=False, soft_wrap=True)
    if json_file is not None:
        write_json(json_file, _plain(where, report, busy))
    if busy and len(busy) == len(shards):
        raise typer.Exit(2)
    if str(json_file) != "-":
        _print(where, report)
    failed = (Swapped.FAILED.value, Swapped.LATE.value, UNREADABLE, NO_MEMORY)
    if busy or any(span.outcome in failed for span in report.spans):
        raise typer.Exit(1)


def _repacked(where: Path, shard: Shard, identity: Identity, dry_run: bool) -> RepackReport:
    # Its disk_bytes is known to its server alone: no segment is added, and nothing is evicted.
    n_bytes = sum(size_of(path) for path in segment_paths(shard.segments))
    config = Config(
        window=identity.window, dram_bytes=0, repack_every_s=0, shard=shard.number,
        segment_bytes=MIB, disk_bytes=max(1, -(-n_bytes // MIB)) * MIB, disk_high=1.0, disk_low=1.0,
    )  # fmt: skip
    with PrefixStore.open(where, identity.geometry, b"repack", config) as opened:
        with err.status("planning" if dry_run else "repacking"):
            report = opened.repack(dry_run=dry_run)
        if not dry_run:
            opened.ssd.trim()
        return report


def _plain(where: Path, report: RepackReport, busy: list[str]) -> dict[str, Any]:
    return {
        "store": str(where), "dry_run": report.dry_run, "moved": report.moved,
        "moved_bytes": report.moved_bytes, "busy_shards": busy,
        "spans": [asdict(span) for span in report.spans],
    }  # fmt: skip


def _print(where: Path, report: RepackReport) -> None:
    table = table_of(
        "", ">span", ">tokens", ">to move", ">pieces", ">requests", ">bytes", ">saves", ">dead",
        "outcome",
    )  # fmt: skip
    for span in report.spans:
        table.add_row(
            str(span.span), str(span.n_tokens), size(span.move_bytes), *_saved(span),
            number(span.gain, ".0%"), number(span.dead_share, ".0%"), span.outcome,
        )  # fmt: skip
    if report.spans:
        show(table)
    done = f"{len(report.picked)} {'would move' if report.dry_run else 'moved'}"
    what = f"{count(len(report.spans), 'span')} looked at, {done} ({size(report.picked_bytes)})"
    out.print(f"{where}: {what}", markup=False, soft_wrap=True)


def _saved(span: SpanReport) -> tuple[str, str, str]:
    """Pieces, requests and bytes that a request reads, before and after."""
    before, after = span.before, span.after
    if before is None or after is None:
        return "–", "–", "–"
    return (
        f"{before.pieces:.0f} → {after.pieces:.0f}",
        f"{before.requests:.0f} → {after.requests:.0f}",
        f"{size(int(before.n_bytes))} → {size(int(after.n_bytes))}",
    )
