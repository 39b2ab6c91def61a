"""Dense store and restore of the same rows: this store beside LMCache, vLLM, SGLang and Mooncake.

    python -m experiments.peers --install      makes the peers' environments (about 3 GB), then runs

Every system is a process in its own environment and has the same prefixes of bfloat16 rows; peers
cut them into chunks of 256 tokens, all layers in one. A round stores one prefix, reads it cold and
reads it once more, system after system, in an order that rotates from round to round. Before a cold
read the page cache is dropped for that system's files. Only "impress dram" has a tier in memory;
"impress outs" reads into its caller's tensors. A system that cannot run is named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from experiments.cells import SKIPPED
from experiments.common import Row, Unable, check_once, console, print_rows, scratch
from experiments.harness import Cell, Experiment, Figures, Options, main
from experiments.peers_install import ENVIRONMENTS, PEERS, ROOT, VLLM, install, is_made, python_of
from experiments.peers_worker import Shape

OURS: Final = "impress"
SYSTEMS: Final = (OURS, "impress outs", "impress dram", *ENVIRONMENTS)
MEDIA: Final = ("disk", "tmpfs")
#: Llama-3.1-8B's rows: 128 KiB a token, 32 MiB a chunk.
SHAPES: Final = {False: Shape(32, 8, 128, 1024, 256), True: Shape(32, 8, 128, 512, 256)}
#: On tmpfs every file is memory: one chunk a prefix and few rounds keep the total near 1 GB.
SHAPE_TMPFS: Final = Shape(32, 8, 128, 256, 256)
ROUNDS: Final = {("disk", False): 5, ("disk", True): 2, ("tmpfs", False): 3, ("tmpfs", True): 1}
#: A prefix of no round: with it each process does beforehand what it does once.
_WARM_UP: Final = 1000
#: What was done, which value of it is shown, and the value's name in the table.
_COLUMNS: Final = (
    ("store", "gb_s", "store"), ("store", "durable_gb_s", "durable"), ("store", "cpu", "CPU"),
    ("cold", "gb_s", "cold"), ("cold", "cpu", "cold CPU"),
    ("warm", "gb_s", "warm"), ("warm", "cpu", "warm CPU"),
)  # fmt: skip
_TMPFS: Final = Path("/dev/shm")


@dataclass
class Worker:
    """A system's process. `why`: why it cannot run, or what went wrong on the way."""

    name: str
    process: subprocess.Popen[str] | None = None
    version: str = ""
    why: str = ""

    def ask(self, **what: Any) -> dict[str, Any]:
        """One answer; {} once it has failed."""
        if self.process is None or self.why:
            return {}
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()
        except OSError:
            pass  # its answer says why
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline()
        said: dict[str, Any] = json.loads(line) if line else {"error": "it ended without a word"}
        self.why = str(said.get("error", self.why))
        return {} if self.why else said

    def end(self) -> None:
        if self.process is not None:
            self.ask(do="end")
            self.process.communicate()


def shape_on(medium: str, *, quick: bool) -> Shape:
    return SHAPES[quick] if medium == "disk" else SHAPE_TMPFS


class Field:
    """The systems on one medium; started by the first round there, ended by `end`."""

    def __init__(self, medium: str, options: Options) -> None:
        self._medium = medium
        self._options = options
        self._shape = shape_on(medium, quick=options.quick)
        self._workers: list[Worker] = []
        self._exits = ExitStack()

    def round(self, number: int) -> list[Row]:
        """One prefix through every system: one row per system and step."""
        if not self._workers:
            self._start()
        shift = number % len(self._workers)
        turn = self._workers[shift:] + self._workers[:shift]
        rows: list[Row] = []
        gb = self._shape.n_bytes / 1e9
        for do in ("store", "cold", "warm"):
            for worker in turn:
                took = worker.ask(do=do, prefix=number)
                if took:
                    rows.append(
                        {"system": worker.name, "version": worker.version, "do": do,
                         "gb_s": gb / took["seconds"], "cpu": took["cpu_s"] / gb,
                         "durable_gb_s": gb / took.get("durable_s", took["seconds"])}
                    )  # fmt: skip
        for worker in turn:
            if worker.why:
                rows.append({"system": worker.name, "do": "not run", "why": worker.why})
            if worker.why and worker.process is not None:  # it can be had: --resume tries it again
                rows.append({SKIPPED: worker.why})
        return rows

    def end(self) -> None:
        """End its processes and remove its data. Idempotent."""
        self._workers = []
        self._exits.close()

    def _start(self) -> None:
        self._options.exits.callback(self.end)
        folder = self._exits.enter_context(
            scratch(_TMPFS if self._medium == "tmpfs" else self._options.folder)
        )
        more = self._options.more
        for name in more.only:
            worker = self._worker(name, folder / name)
            self._exits.callback(worker.end)
            self._workers.append(worker)
            for do in ("store", "cold", "warm"):
                worker.ask(do=do, prefix=_WARM_UP)

    def _worker(self, name: str, folder: Path) -> Worker:
        more = self._options.more
        python = python_of(name, more.peers, more.vllm)
        if not is_made(name, more.peers, more.vllm):
            made = "make test-vllm makes it" if name == "vllm files" else "--install makes it"
            return Worker(name, why=f"no whole environment {python.parents[1]}: {made}")
        folder.mkdir(parents=True)
        shape = json.dumps(asdict(self._shape))
        with (self._options.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [python, "-m", "experiments.peers_worker", name, folder,
                 str(self._options.seed), shape],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        worker = Worker(name, process)
        worker.version = worker.answer().get("ready", "")
        return worker


def cells(options: Options) -> list[Cell]:
    check_once("--only", options.more.only)
    check_once("--media", options.more.media)
    if options.more.install:
        install(options.more.peers)
    if not _TMPFS.is_dir() and "tmpfs" in options.more.media:
        raise Unable(f"there is no {_TMPFS}: --media disk")
    more, made = options.more, []
    # With `there` in the params, --resume measures systems whose environments were made since.
    there = [name for name in more.only if is_made(name, more.peers, more.vllm)]
    for medium in more.media:
        field = Field(medium, options)
        n_rounds = ROUNDS[medium, options.quick]
        for number in range(n_rounds):
            params = {
                "medium": medium, "round": number, "only": list(more.only), "there": there,
            }  # fmt: skip
            last = number == n_rounds - 1
            made.append(Cell(params, partial(_round, field, number, last), 25))
    return made


def _round(field: Field, number: int, last: bool) -> list[Row]:
    rows = field.round(number)
    if last:
        field.end()
    return rows


def figures(rows: list[Row], options: Options) -> tuple[Figures, list[Row]]:
    lines = []
    for medium in options.more.media:
        for system in options.more.only:
            mine = [row for row in rows if (row["medium"], row["system"]) == (medium, system)]
            lines.append(_line(medium, system, mine))
    for medium in options.more.media:
        n_bytes = shape_on(medium, quick=options.quick).n_bytes
        size = f"{n_bytes >> 20} MiB a prefix, medians of {ROUNDS[medium, options.quick]}"
        shown = [
            {key: line[key] for key in line if key not in ("on", "version", "note")}
            for line in lines if line["on"] == medium
        ]  # fmt: skip
        print_rows(f"{medium}: GB/s, and CPU seconds a GB ({size})", shown)
    for line in lines:
        if line["note"]:
            console.print(f"{line['on']}, {line['system']}: {line['note']}")
    said = {
        f"{medium}.{system.replace(' ', '_')}.{do}": value
        for medium in options.more.media
        for system in options.more.only
        for do in ("store", "cold", "warm")
        if (value := _median(rows, medium, system, do, "gb_s")) is not None
    }
    return said | _against(rows), lines


def _line(medium: str, system: str, rows: Sequence[Row]) -> Row:
    line: Row = {"on": medium, "system": system}
    line["version"] = next((row["version"] for row in rows if row.get("version")), "")
    for do, key, name in _COLUMNS:
        found = [row[key] for row in rows if row["do"] == do]
        line[name] = float(np.median(found)) if found else ""
    why = next((row["why"] for row in rows if row["do"] == "not run"), "")
    line["note"] = f"not run: {why}" if why else ""
    return line


def _median(rows: Sequence[Row], medium: str, system: str, do: str, key: str) -> float | None:
    found = [
        row[key] for row in rows
        if (row["medium"], row["system"], row["do"]) == (medium, system, do)
    ]  # fmt: skip
    return float(np.median(found)) if found else None


def _against(rows: Sequence[Row]) -> Figures:
    """Ours ÷ a peer's, cold from the disk: rates (above 1 is faster), CPU (below 1 is cheaper).

    Medians of each round's ratio. Of LMCache's two ways, the better one for each figure.
    """
    said: Figures = {}
    for name, systems in (("lmcache", ("lmcache", "lmcache direct")), ("vllm_fs", ("vllm files",)),
                          ("sglang", ("sglang",)), ("mooncake", ("mooncake",))):  # fmt: skip
        for figure, key, worst in (("restore", "gb_s", min), ("cpu", "cpu", max)):
            ratios = [_ratio(rows, system, key) for system in systems]
            known = [ratio for ratio in ratios if ratio is not None]
            if known:
                said[f"{figure}_vs_{name}"] = worst(known)
    return said


def _ratio(rows: Sequence[Row], system: str, key: str) -> float | None:
    of = {
        (row["system"], row["round"]): row[key] for row in rows
        if row["medium"] == "disk" and row["do"] == "cold"
    }  # fmt: skip
    both = [n for name, n in of if name == OURS and (system, n) in of]
    return float(np.median([of[OURS, n] / of[system, n] for n in both])) if both else None


def draw(figure: Any, _said: Figures, rows: list[Row]) -> None:
    """Cold restores of every system."""
    axes = figure.subplots()
    for i, medium in enumerate(dict.fromkeys(row["on"] for row in rows)):
        mine = [row for row in rows if row["on"] == medium]
        at = np.arange(len(mine)) + 0.4 * i
        axes.bar(at, [row["cold"] or 0.0 for row in mine], 0.4, label=medium)
        axes.set_xticks(at, [row["system"] for row in mine])
    axes.set_ylabel("restore, caches dropped, GB/s")
    axes.legend()


def _arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--install", action="store_true", help="make the environments that are missing")
    add("--peers", type=Path, metavar="DIR", default=PEERS, help=f"of peers (default {PEERS.name})")
    add("--vllm", type=Path, metavar="DIR", default=VLLM, help=f"of vLLM (default {VLLM.name})")
    add("--only", nargs="+", choices=SYSTEMS, default=SYSTEMS, metavar="NAME", help="these systems")
    add("--media", nargs="+", choices=MEDIA, default=MEDIA, help="these media")


EXPERIMENT: Final = Experiment(
    "peers", "Dense store and restore of the same rows, beside peers.", cells, figures,
    {"restore": draw}, _arguments,
    lambda options: {"dtype": "bfloat16", "shape": asdict(SHAPES[options.quick])},
)  # fmt: skip


def run(argv: Sequence[str] | None = None) -> int:
    return main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(run())
