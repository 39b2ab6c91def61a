"""`impress repack`: put often-chosen rows side by side, or say what that would save."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from impress.cli.options import Store, a_file, check_json, complain, store_dir
from impress.config import MIB, Config
from impress.errors import ImpressError, StoreLocked
from impress.repacking.report import NO_MEMORY, UNREADABLE, RepackReport, SpanReport
from impress.report import write_json
from impress.store import PrefixStore
from impress.terminal import count, cut, err, line_of, number, out, say_cut, show, size, table_of
from impress.write.directory import Identity, Shard, read_identity, shards_of, writing
from impress.write.jobs import Swapped
from tiers.errors import MediumError
from tiers.files import segment_paths, size_of
from tiers.segments import SEGMENTS


def repack(
    store: Store = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Say what would move and what it would save; what is stored stays as it is. "
            "Shards are opened as for writing: the right to write is needed, lock and index files "
            "change, what a crash cut off is finished, and damaged index values are deleted with "
            "what hangs from them: where impress verify names any, run impress rebuild first.",
        ),
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", parser=a_file,
            help="Also write the report to FILE; - prints it instead of the table.",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Reorder the rows of stored spans by how often requests chose them.

    A span is copied in its new order, and the copy takes its place once it is whole: nothing stored
    is edited, and an interruption leaves the old one. Spans of which neither importance nor the
    choices of two requests are known are left out, unless they have an order already: nothing tells
    which choices of one are chance. A shard that is open for writing elsewhere is named and left
    alone. One that fails (its index is damaged, say) is named with the reason, and the others are
    done.

    A copy needs room in the existing segment files: none is added, so that disk_bytes holds, and
    one that is left empty is deleted. What is written counts in daily_write_bytes of the process
    that serves next.

    What a request reads is an estimate: rows are taken to be chosen independently of each other.
    There is none (–) for a span that is rewritten in its old order, without its dead windows, nor
    for one that has an order and of which too little is known for another. In the JSON, `picked`
    counts the spans that moved or would move; `moved` only those that did.

    **Exit status**

    0 done, even where spans had no room for a copy · 1 a span does not read back (it is deleted,
    except in a dry run), there was no memory for one, a copy failed or was not committed in time,
    or a shard was open elsewhere or failed · 2 it could not run, or not in any shard

    **Examples**

    impress repack --dry-run

    impress repack --store /mnt/nvme/store --json repack.json
    """
    check_json(json_file)
    where = store_dir(store)
    identity = read_identity(where)
    shards = shards_of(where)
    report, busy, failed = _all_repacked(where, shards, identity, dry_run)
    if json_file is not None:
        write_json(json_file, _plain(where, report, busy, failed))
    left = len(busy) + len(failed)
    if left and left == len(shards):
        raise typer.Exit(2)
    if str(json_file) != "-":
        _print(where, report)
    bad = (Swapped.FAILED.value, Swapped.LATE.value, UNREADABLE, NO_MEMORY)
    if left or any(span.outcome in bad for span in report.spans):
        raise typer.Exit(1)


def _all_repacked(
    where: Path, shards: list[Shard], identity: Identity, dry_run: bool
) -> tuple[RepackReport, list[str], list[str]]:
    """The report on all shards, and the names of those that were busy and of those that failed."""
    report = RepackReport(dry_run)
    busy: list[str] = []
    failed: list[str] = []
    for shard in shards:
        try:
            with writing(shard):
                report.spans += _repacked(where, shard, identity, dry_run).spans
        except StoreLocked as taken:
            busy.append(shard.name)
            complain(f"impress: {taken}")
        except (ImpressError, MediumError, OSError) as error:  # the other shards are still done
            failed.append(shard.name)
            complain(f"impress: {line_of(error)} (shard {shard.name})")
    return report, busy, failed


def _repacked(where: Path, shard: Shard, identity: Identity, dry_run: bool) -> RepackReport:
    # Only its server knows its disk_bytes: no segment is added, and nothing is evicted.
    paths = segment_paths(shard.segments)  # a server leaves those of another folder's number alone
    n_bytes = sum(size_of(path) for path in paths if int(path.stem) // SEGMENTS == shard.number)
    config = Config(
        window=identity.window, dram_bytes=0, repack_every_s=0, shard=shard.number,
        segment_bytes=MIB, disk_bytes=max(1, -(-n_bytes // MIB)) * MIB, disk_high=1.0, disk_low=1.0,
        repack_space_bytes=max(MIB, n_bytes),  # a copy fits into what is there, or there is no room
    )  # fmt: skip
    with PrefixStore.open(where, identity.geometry, b"repack", config) as opened:
        with err.status("planning" if dry_run else "repacking"):
            report = opened.repack(dry_run=dry_run)
        if not dry_run:
            opened.ssd.trim()
        return report


def _plain(where: Path, report: RepackReport, busy: list[str], failed: list[str]) -> dict[str, Any]:
    return {
        "store": str(where), "dry_run": report.dry_run, "moved": report.moved,
        "moved_bytes": report.moved_bytes, "picked": len(report.picked),
        "picked_bytes": report.picked_bytes, "busy_shards": busy, "failed_shards": failed,
        "spans": [asdict(span) for span in report.spans],
    }  # fmt: skip


def _print(where: Path, report: RepackReport) -> None:
    table = table_of(
        "", ">span", ">tokens", ">to move", ">pieces", ">requests", ">bytes", ">saves", ">dead",
        "outcome",
    )  # fmt: skip
    for span in cut(report.spans):
        table.add_row(
            str(span.span), str(span.n_tokens), size(span.move_bytes), *_saved(span),
            number(span.gain, ".0%"), number(span.dead_share, ".0%"), span.outcome,
        )  # fmt: skip
    if report.spans:
        show(table)
        say_cut(len(report.spans), "spans")
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
