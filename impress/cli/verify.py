"""`impress verify`: every checksum and invariant of a store."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from impress.cli.options import Json, Store, print_json, store_dir
from impress.terminal import count, cut, err, literal, out, say_cut, show, size, table_of
from impress.upkeep.verify import Verdict, verify_store


def verify(store: Store = None, as_json: Json = False) -> None:
    """Read a whole store and compare everything with its checksums and invariants.

    Reads every index value, every header record and every piece of every span; checks that they
    agree with each other, that no two spans share space and that the radix tree they make is
    sound. Writes nothing, and works while another process writes to the store. A span that does
    not verify is no danger to a running model: its reads fail and the prompt is computed again.
    A span that hangs from one that another shard has evicted is counted ("orphans"), but is no
    problem: the next writer of its own shard deletes it. The same goes for one that may hang from a
    shard whose index cannot be read ("waiting"); that index is the problem.

    **Exit status**

    0 everything is sound · 1 something is wrong, and listed · 2 the store could not be read

    **Examples**

    impress verify

    impress verify --store demo-out/store --json
    """
    where = store_dir(store)
    verdict = _with_progress(where)
    if as_json:
        print_json({"store": str(where), "sound": not verdict.problems, **asdict(verdict)})
    else:
        _print(verdict, where)
    if verdict.problems:
        raise typer.Exit(1)


def _with_progress(where: Path) -> Verdict:
    columns = (
        TextColumn("verifying"), BarColumn(), DownloadColumn(binary_units=True),
        TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("verify", total=None)
        return verify_store(where, lambda done, of: bar.update(task, completed=done, total=of))


def _print(verdict: Verdict, where: Path) -> None:
    spans, pieces = count(verdict.spans, "span"), count(verdict.pieces, "piece")
    read = f"{spans}, {pieces}, {size(verdict.n_bytes)} of rows"
    if verdict.gone:
        read += f"; {verdict.gone} evicted by the store's writer meanwhile"
    if verdict.orphans:
        read += f"; {verdict.orphans} behind what another shard evicted, to go with its next writer"
    if verdict.waiting:
        read += f"; {verdict.waiting} behind what cannot be read"
    if not verdict.problems:
        out.print(f"{where}: sound ({read})", markup=False, soft_wrap=True)
        return
    table = table_of("", ">span", ">segment", "what is wrong")
    for problem in cut(verdict.problems):
        numbers = ("–" if n is None else str(n) for n in (problem.span, problem.segment))
        table.add_row(*numbers, literal(problem.what))
    show(table)
    say_cut(len(verdict.problems), "problems")
    problems = count(len(verdict.problems), "problem")
    out.print(f"{where}: {problems} ({read})", markup=False, soft_wrap=True)
