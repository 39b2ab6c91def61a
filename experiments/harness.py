"""What the paper's experiments share: cells that are measured once and kept, then figures of them.

    Experiment.cells ─> [Cell …] ─measure─> rows ──append──> FILE.cells.jsonl   (--resume skips)
                                             └─> Experiment.figures ─> report, tables, plots

A cell is the least that is measured as a whole; it holds everything that must be interleaved. The
state file has the cells that were finished when a run stopped, and `--resume` goes on from there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from experiments import fio
from experiments.cells import SKIPPED, Cells, kept_of, state_file
from experiments.common import (
    Row,
    Unable,
    beside,
    check_given,
    check_rate,
    console,
    named,
    say_stopped,
    scratch,
)
from experiments.figures import check_plotting, plot_all
from impress.errors import ImpressError
from impress.report import write_report

#: Bytes that fio reads to say how fast the disk is, by `quick`.
_DISK_BYTES = {False: 1 << 30, True: 256 << 20}
#: How many of the words that --cells knows are listed.
_MOST_WORDS: Final = 30
#: Where fio's rate and the rounds' differ by more than this factor, it matters which one is taken.
_ONE_RATE = 1.15


@dataclass(frozen=True, slots=True)
class Disk:
    """Sequential read rate of the disk under `--dir`, and its source; None where nobody asked."""

    gb_s: float | None
    by: str  # "fio" | "given" | "not measured"
    runs_gb_s: tuple[float, ...] = ()  # of fio; gb_s is their median

    def said(self) -> str:
        """Text for the end of a sentence; empty where there is no rate."""
        if not self.gb_s:
            return ""
        runs = ", ".join(f"{rate:.2f}" for rate in sorted(self.runs_gb_s))
        return f"; the disk reads {self.gb_s:.2f} GB/s ({self.by}{runs and ': ' + runs})"

    def apart(self, other: Disk) -> bool:
        """Whether the two rates are a quarter apart: no longer the disk that was measured."""
        if not self.gb_s or not other.gb_s:
            return False
        return max(self.gb_s, other.gb_s) > 1.25 * min(self.gb_s, other.gb_s)


@dataclass(frozen=True, slots=True)
class Options:
    """The command line. `folder`: scratch space, gone at the end; `more`: the experiment's options.

    What a cell opens and later cells share is closed by `exits` after the last cell.
    """

    quick: bool
    json: Path | None
    plot: Path | None
    resume: bool
    folder: Path
    seed: int
    disk: Disk
    more: argparse.Namespace
    exits: ExitStack


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement. `params`, in JSON's types, identify it: all of it that the command line
    decides. Where `--resume` is given, none is measured twice with equal params, unless it gave no
    rows, or one that says why something could not be measured (SKIPPED).
    `seconds`: about how long `measure` takes. `again`: it says whether this run's other cells can
    be believed, so it is measured with them, and what it said of other runs is kept.
    """

    params: Mapping[str, Any]
    measure: Callable[[], Sequence[Row]]
    seconds: float = 1.0
    again: bool = False

    def words(self) -> list[str]:
        """Words that people know it by: its parameters, except lists."""
        return [str(value) for value in self.params.values() if not isinstance(value, list)]


Figures = dict[str, float]
#: Draws on a matplotlib Figure from the report's figures and rows.
Draw = Callable[[Any, Figures, list[Row]], None]


def _no_arguments(_parser: argparse.ArgumentParser) -> None:
    """An experiment without options of its own."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """What one experiment is.

    `cells` plans, and opens nothing that takes long. `figures` gets every cell's rows, each with
    its cell's params, and returns the report's figures and rows; it prints its tables. `meta` may
    add to the report's `meta`. `uses_disk`: the disk's rate is measured first, unless it was given.
    """

    name: str
    about: str
    cells: Callable[[Options], Sequence[Cell]]
    figures: Callable[[list[Row], Options], tuple[Figures, list[Row]]]
    plots: Mapping[str, Draw] = field(default_factory=dict)
    arguments: Callable[[argparse.ArgumentParser], None] = _no_arguments
    meta: Callable[[Options], Mapping[str, Any]] = lambda _options: {}
    uses_disk: bool = False


def main(experiment: Experiment, argv: Sequence[str] | None = None) -> int:
    """Run an experiment from a command line. Returns the exit status: 0; 1 where cells gave no
    rows; 2 on an error; 130 when stopped.

    Effects: the state file beside `--json`, the report, the plots. Data goes to a directory that
    is removed at the end.
    """
    args = _parser(experiment).parse_args(argv)
    begun = args.resume  # whether what lies beside the report is of this run, or gone on with
    with beside(args.json):
        try:
            _check(experiment, args)
            with scratch(args.dir) as folder, ExitStack() as exits, named(args.dir):
                options, chosen = _planned(experiment, args, folder, exits)
                done = Cells(args.json, resume=args.resume)  # refused commands leave its file
                begun = True
                return 1 if _run(experiment, options, chosen, done) else 0
        except KeyboardInterrupt:
            say_stopped(kept_of(args.json, begun=begun))
            return 130
        except (Unable, OSError, ImpressError) as err:
            print(f"error: {err}", file=sys.stderr)
            return 2


def _parser(experiment: Experiment) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.{experiment.name}", description=experiment.about
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="small sizes: does it run, roughly")
    add("--json", type=Path, metavar="FILE", help="write the figures here")
    add("--plot", type=Path, metavar="DIR", help="write plots here (needs matplotlib)")
    add("--resume", action="store_true", help="keep what was measured before; needs --json")
    add(
        "--cells", nargs="+", metavar="WORD",
        help="only those of whose parameters a WORD is one (default: all)",
    )  # fmt: skip
    add(
        "--dir", type=Path, metavar="DIR", default=Path(),
        help="put data in a new directory here (default: the current one)",
    )  # fmt: skip
    add("--seed", type=int, default=1, metavar="N", help="of what is drawn (default 1)")
    parser.set_defaults(disk_gb_s=None)
    if experiment.uses_disk:
        add(
            "--disk-gb-s", type=float, metavar="X",
            help="sequential read rate of the disk under --dir, GB/s (default: fio measures it)",
        )  # fmt: skip
    experiment.arguments(parser)
    return parser


def _check(experiment: Experiment, args: argparse.Namespace) -> None:
    """Refuse everything that can be refused before any time is spent. Raises Unable."""
    check_given(args.json, args.seed)
    if args.resume and state_file(args.json) is None:
        raise Unable("--resume goes on from what lies beside --json FILE: name that file")
    check_rate(args.disk_gb_s)
    if args.plot is not None and not experiment.plots:
        console.print(f"--plot: {experiment.name} draws nothing")
        args.plot = None
    if args.plot is not None:
        check_plotting(args.plot)


def _planned(
    experiment: Experiment, args: argparse.Namespace, folder: Path, exits: ExitStack
) -> tuple[Options, list[Cell]]:  # fmt: skip
    """The command line with the disk's rate, and the cells asked for."""
    disk = _disk(args, folder, experiment.uses_disk)
    options = Options(
        args.quick, args.json, args.plot, args.resume, folder, args.seed, disk, args, exits
    )
    return options, _chosen(experiment.cells(options), args.cells)


def _run(experiment: Experiment, options: Options, chosen: Sequence[Cell], done: Cells) -> int:
    """Measure and report. Returns how many cells gave no rows."""
    args, disk = options.more, options.disk
    common: dict[str, Any] = {
        "experiment": experiment.name, "seed": args.seed, "quick": args.quick,
    }  # fmt: skip
    if experiment.uses_disk and disk.by == "given":  # another rate stretches differently
        common["disk_gb_s"] = disk.gb_s
    cells = [(common | dict(cell.params), cell) for cell in chosen]
    missing = any(params not in done for params, cell in cells if not cell.again)
    todo = [
        (params, cell) for params, cell in cells
        if params not in done or (cell.again and missing)
    ]  # fmt: skip
    seconds = sum(cell.seconds for _, cell in todo)
    console.print(
        f"{experiment.about} Estimated time: {duration(seconds)} "
        f"({len(todo)} of {len(cells)} cells to measure){disk.said()}."
    )
    whys = _measure(experiment.name, todo, done, disk)
    after = _disk_after(args, options.folder, experiment.uses_disk) if todo else disk
    keys = [params for params, _ in cells]
    if after.apart(disk):
        console.print(f"the disk gave {disk.gb_s:.2f} GB/s before and {after.gb_s:.2f} after: what "
                      "is set against its rate is as uncertain as that")  # fmt: skip
    if others := done.others(keys):
        console.print(f"{others} finished cells are not among these: the report leaves them out")
    for params, cell in cells:
        _say_rates(cell, done[params])
    if n_empty := sum(not done[params] for params, cell in cells if not cell.again):
        again = "" if state_file(args.json) is None else ": --resume measures them again"
        console.print(f"{n_empty} of {len(cells)} cells gave nothing{again}")
    rows = [
        {**cell.params, **row}
        for params, cell in cells for row in done[params] if SKIPPED not in row
    ]  # fmt: skip
    if whys and all(row.get("part") == "check" for row in rows):
        raise Unable(whys[0])
    try:
        figures, lines = experiment.figures(rows, options)
    except KeyError as err:
        if whys:
            raise Unable(f"without the cells that are left out there is no {err}") from None
        if not len(cells) - len(todo):
            raise
        raise Unable(
            f"a cell that was kept has no {err}: it is of another version; measure without --resume"
        ) from None
    if args.json is not None:
        with named(args.json):
            write_report(
                args.json, figures, lines, experiment=experiment.name, seed=args.seed,
                quick=args.quick,
                # Where nothing was left to measure, fio ran on another day than the cells.
                disk={**asdict(disk), "after_gb_s": after.gb_s} if todo else {"by": "the cells"},
                cells={"n": len(cells), "kept": len(cells) - len(todo), "empty": n_empty,
                       "commits": done.commits(keys), "dates": done.dates(keys)},
                **experiment.meta(options),
            )  # fmt: skip
    if args.plot is not None:
        with named(args.plot):
            plot_all(args.plot, experiment.name, experiment.plots, figures, lines)
    return n_empty


def _chosen(cells: Sequence[Cell], words: Sequence[str] | None) -> list[Cell]:
    """Cells that have one of these words among their parameters, and the checks that say whether
    those can be believed; None: all. Raises Unable."""
    if words is None:
        return list(cells)
    values = [cell.words() for cell in cells]
    for word in words:
        if not any(word in said for said in values):
            raise Unable(f"--cells {word}: no cell has that; there are: {_telling(values)}")
    return [
        cell
        for cell, said in zip(cells, values, strict=True)
        if cell.again or not set(words).isdisjoint(said)
    ]


def _telling(values: Sequence[Sequence[str]]) -> str:
    """Words that tell cells apart, then numbers that do so. Pure."""
    n_with = Counter(word for said in values for word in dict.fromkeys(said))
    some = [word for word in n_with if n_with[word] < len(values)] or [*n_with]
    found, more = sorted(some, key=str.isdecimal), len(some) - _MOST_WORDS
    return ", ".join(found[:_MOST_WORDS]) + (f" and {more} more" if more > 0 else "")


def _measure(
    name: str, todo: Sequence[tuple[dict[str, Any], Cell]], done: Cells, disk: Disk
) -> list[str]:  # fmt: skip
    """Measure cells in order; each is kept as soon as it is whole, with fio's rate of the disk (a
    run that goes on later has another), unless it says itself which. Returns why cells could not be
    measured."""
    whys: list[str] = []
    by_fio = {"fio_gb_s": disk.gb_s} if disk.by == "fio" else {}
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(name, total=len(todo))
        for params, cell in todo:
            progress.update(bar, description=" ".join([name, *cell.words()])[:70])
            begin_s = time.monotonic()
            try:
                rows = [{**by_fio, **row} for row in cell.measure()]
            except Unable as err:  # no room for its data, say: others may have room
                if cell.again:
                    raise
                console.print(f"{' '.join(cell.words()[:2])} is left out: {err}")
                rows, whys = [], [*whys, str(err)]
            done.add(params, rows, time.monotonic() - begin_s)
            progress.advance(bar)
    return whys


def _say_rates(cell: Cell, rows: Sequence[Row]) -> None:
    """Print a line where a cell's rounds, whose disk rate stretched its compute, found another
    rate than fio before it. None where nothing was read, or where the rows are older than fio's."""
    if cell.params.get("compute") == "real":  # nothing is stretched
        return
    both = {"disk_gb_s", "fio_gb_s"}
    found = next((row for row in rows if both <= row.keys() and row["mb"]), None)
    if found is None:
        return
    rounds, by_fio = found["disk_gb_s"], found["fio_gb_s"]
    if max(rounds, by_fio) > _ONE_RATE * min(rounds, by_fio):
        console.print(
            f"{' '.join(cell.words()[:2])}: the disk gave {rounds:.2f} GB/s before the rounds and "
            f"{by_fio:.2f} by fio: of what only reads, ratios to recompute would be "
            f"{by_fio / rounds:.2f} times as large by fio's"
        )


def _disk(args: argparse.Namespace, folder: Path, uses_disk: bool) -> Disk:
    if args.disk_gb_s is not None:
        return Disk(args.disk_gb_s, "given")
    if not uses_disk:
        return Disk(None, "not measured")
    check_fio()
    file = folder / "fio.bin"
    fio.write(file, _DISK_BYTES[args.quick], args.seed)
    runs = [
        fio.read(file, "libaio", 1 << 20, pattern="read", seed=args.seed).gb_s
        for _ in range(fio.PASSES)
    ]
    file.unlink()
    return Disk(median(runs), "fio", tuple(runs))


def _disk_after(args: argparse.Namespace, folder: Path, uses_disk: bool) -> Disk:
    """fio's rate once all is measured; none where it finds no room by then."""
    try:
        return _disk(args, folder, uses_disk)
    except (Unable, OSError) as err:
        console.print(f"the disk's rate was not measured again: {err}")
        return Disk(None, "not measured")


def check_fio() -> None:
    """Check that fio is there to measure the disk. Raises Unable."""
    try:
        fio.version()
    except Unable as err:
        raise Unable(f"{err}; or say --disk-gb-s X") from None


def duration(seconds: float) -> str:
    """A time in words: "40 s", "12 min", "3.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
