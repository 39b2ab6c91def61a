"""Every experiment of the paper's figures and of what came before, each in a process of its own.

    python -m experiments.all --quick            13 to 22 minutes on two quiet cores
    python -m experiments.all --resume           the full sizes; goes on where a run stopped

Reports and plots go to docs/results, over those that are there, and the tables of docs/RESULTS.md
and docs/LINEAGE.md are filled from them; with --out DIR they go there, and no table is filled. Only
`trace` is left out where its report is of a file and no --trace names one. Each that hangs on the
disk's rate measures it, unless --disk-gb-s gives one, which then stands for the whole run. One that
fails is named at the end, and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from experiments import results_table
from experiments.cells import begin_anew
from experiments.common import Unable, check_once, check_rate, console, parser_of, say_stopped
from experiments.figures import check_plotting
from experiments.harness import check_fio, duration
from impress.terminal import stopped_as_by_ctrl_c

#: In the order in which they run: those that need a quiet disk come one after the other.
NAMES: Final = (
    "accuracy", "threshold", "zero_hit", "chunks", "hits", "repack", "ttft", "ablation", "scale",
    "vbuffers", "hashpool", "trace",
)  # fmt: skip
#: Those whose time or figures depend on the disk's rate.
_DISK: Final = ("zero_hit", "chunks", "repack", "ttft", "ablation", "scale")
#: Those whose compute a device would do where there is one: their reports are of emulated compute,
#: as docs/RESULTS.md says.
_COMPUTE: Final = ("ttft", "ablation", "scale")
_ROOT: Final = Path(__file__).resolve().parent.parent
#: Seconds after which an experiment is stopped, by `quick`; the others then go on.
_LIMIT_S: Final = {False: None, True: 900}
#: Longest an experiment may take to remove its data.
_CLEAR_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Ran:
    """How one experiment ended. `status`: its exit status, 124 when it was stopped by time."""

    name: str
    status: int
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run them. 0 when every one did, 1 when some failed, 130 when stopped."""
    parser = parser_of("all", __doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--resume", action="store_true", help="keep the cells measured before")
    parser.add_argument(
        "--only", nargs="+", choices=NAMES, metavar="NAME", default=NAMES,
        help=f"these: {', '.join(NAMES)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="DIR", default=_ROOT / "docs" / "results",
        help="reports and plots go here; it is made where its parent is there (default: "
        "docs/results, from which alone the tables are filled)",
    )  # fmt: skip
    parser.add_argument("--dir", type=Path, metavar="DIR", default=Path(), help="where data goes")
    parser.add_argument("--disk-gb-s", type=float, metavar="X", help="default: it is measured")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="for trace; default: made up")
    args = parser.parse_args(argv)
    try:
        with stopped_as_by_ctrl_c():
            ran = [one(name, args) for name in _begun(args)]
    except KeyboardInterrupt:
        say_stopped("stopped; --resume goes on")
        return 130
    except (Unable, OSError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    _say(ran)
    status = 1 if any(r.status for r in ran) else 0
    if args.out.resolve() == (_ROOT / "docs" / "results").resolve():  # however it was named
        status = results_table.fill_all(_ROOT / "docs") or status
    return status


def _begun(args: argparse.Namespace) -> list[str]:
    """Names of those to run, once nothing forbids it; without --resume nothing of before is left
    for them to go on with. Raises Unable, OSError."""
    check_once("--only", args.only)
    if not args.dir.is_dir():  # each would say so, one after the other
        raise Unable(f"--dir {args.dir}: no such directory")
    if args.trace is not None and not args.trace.is_file():
        raise Unable(f"--trace {args.trace}: no such file")
    check_rate(args.disk_gb_s)
    if not args.out.absolute().parent.is_dir():
        raise Unable(f"--out {args.out}: no such directory to make it in")
    args.out.mkdir(exist_ok=True)
    names = [*args.only]
    if "trace" in names and args.trace is None and _of_a_file(args.out / "trace.json"):
        names.remove("trace")
        console.print("trace: left as it is, its report is of a file; --trace FILE replays one")
    if args.disk_gb_s is None and not {*names}.isdisjoint(_DISK):
        check_fio()
    check_plotting(args.out)
    if not args.resume:  # all now: one that a stop is before would go on from an older run
        for name in names:
            begin_anew(args.out / f"{name}.json")
    return names


def _of_a_file(report: Path) -> bool:
    """Whether there is a report of `trace` that is not of made-up conversations. Raises Unable."""
    try:
        return report.is_file() and not json.loads(report.read_text())["meta"]["synthetic"]
    except (ValueError, KeyError, TypeError):
        raise Unable(f"{report} is no report of trace: remove it") from None


def one(name: str, args: argparse.Namespace) -> Ran:
    """Run one experiment to its end, however it ends."""
    command = [
        sys.executable, "-m", f"experiments.{name}", "--json", str(args.out / f"{name}.json"),
        "--plot", str(args.out), "--dir", str(args.dir),
    ]  # fmt: skip
    command += ["--quick"] if args.quick else []
    command += ["--resume"] if args.resume else []
    command += ["--compute", "emulated"] if name in _COMPUTE else []
    if name in _DISK and args.disk_gb_s is not None:
        command += ["--disk-gb-s", str(args.disk_gb_s)]
    command += ["--trace", str(args.trace)] if name == "trace" and args.trace else []
    console.rule(name)
    begin = time.monotonic()
    with subprocess.Popen(command, cwd=Path.cwd()) as child:
        try:
            status = child.wait(_LIMIT_S[args.quick])
        except subprocess.TimeoutExpired:
            _end(child)
            status = 124
        except KeyboardInterrupt:  # Ctrl-C, that the child may have had, too
            _end(child)
            raise
    if status == 130:
        raise KeyboardInterrupt
    return Ran(name, status, time.monotonic() - begin)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Stop a child and let it remove its data; kill it when that takes too long."""
    child.terminate()
    try:
        child.wait(_CLEAR_S)
    except subprocess.TimeoutExpired:
        child.kill()


def _say(ran: Sequence[Ran]) -> None:
    console.rule("all")
    for r in ran:
        said = {0: "done", 124: "STOPPED: took too long"}.get(r.status, f"FAILED ({r.status})")
        console.print(f"{r.name:10} {duration(r.seconds):>8}  {said}")
    console.print(f"in all {duration(sum(r.seconds for r in ran))}")


if __name__ == "__main__":
    sys.exit(main())
