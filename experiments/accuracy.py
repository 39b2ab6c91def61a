"""How much accuracy each way of serving a prefix keeps, against the full KV on the same questions.

    python -m experiments.accuracy                                       the three lookup models
    python -m experiments.accuracy --model DIR --task rte --data DIR --shots 20      a real one

Kept shares × selectors (experiments/arms.py), our bound at several values, and all of the KV in 8
or 4 bits. Answers come from rows read from a real store. `agreement64` is over 64 tokens that the
full KV decodes greedily and that are fed to each arm; `run64` is how far an arm would get alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Final

from experiments import accuracy_lookup, accuracy_real
from experiments.accuracy_figures import all_figures, draw_accuracy, draw_kl, show
from experiments.arms import KEPT, arms
from experiments.common import Row, Unable, console
from experiments.harness import Cell, Experiment, Figures, Options, main
from experiments.tasks import FORMATS

_SHOTS: Final = 10


def _arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="NAME|DIR", help="a causal LM instead of the lookup models")
    add("--task", choices=sorted(FORMATS), help="what to ask it")
    add("--data", metavar="PATH|NAME", help="its rows: a folder, a file, or a data set's name")
    add("--shots", type=int, metavar="N", help=f"in the shared prefix (default {_SHOTS})")
    add("--items", type=int, metavar="N", help="ask so many (default: all, 20 with --quick)")
    add(
        "--documents",
        type=int,
        metavar="N",
        help="of the lookup models' (default: all; few with --quick)",
    )
    add(
        "--first", type=int, metavar="N",
        help="number of the first of these (default 0; the default bound was chosen on 0 to 251)",
    )  # fmt: skip
    add(
        "--kept", type=_percents, default=KEPT, metavar="LIST",
        help=f"percent of the rows (default {','.join(map(str, KEPT))})",
    )  # fmt: skip


def _percents(text: str) -> tuple[int, ...]:
    try:
        kept = tuple(int(part) for part in text.split(","))
    except ValueError:
        kept = (0,)
    if not all(0 < percent <= 100 for percent in kept):
        raise argparse.ArgumentTypeError(f"wants whole percents like 5,25, got {text!r}")
    return kept


def _cells(options: Options) -> Sequence[Cell]:
    more = options.more
    if more.model is None:
        if {more.task, more.data, more.items, more.shots} != {None}:
            raise Unable("--task, --data, --shots and --items go with --model")
        n_most = accuracy_lookup.N_DOCUMENTS[options.quick]
        n = n_most if more.documents is None else more.documents
        if not 0 < n <= n_most:
            raise Unable(f"--documents wants 1 to {n_most}, got {n}")
        first = more.first or 0
        if first < 0:
            raise Unable(f"--first wants a number from 0 on, got {first}")
        return accuracy_lookup.cells(options, arms(more.kept), range(first, first + n))
    if {more.documents, more.first} != {None}:
        raise Unable("--documents and --first go with the lookup models, --items with --model")
    if more.task is None or more.data is None:
        raise Unable("--model needs --task and --data")
    if more.shots is None:
        more.shots = _SHOTS
    return accuracy_real.cells(options, arms(more.kept))


def _figures(rows: list[Row], options: Options) -> tuple[Figures, list[Row]]:
    figures, lines = all_figures(rows, options.seed)
    show(lines)
    console.print(
        "bytes: rows, and probes or keys read to choose by. moved: what came from the disk, pieces "
        "and gaps counted, rows lying in the order of importance whoever reads them: unfair to "
        "arms that read runs of tokens (int8, int4: their size, read in sequence)"
    )
    return figures, lines


def _meta(options: Options) -> dict[str, Any]:
    if options.more.model is None:
        return accuracy_lookup.meta()
    return {"model": options.more.model.rstrip("/").rpartition("/")[2],
            "task": options.more.task, "shots": options.more.shots}  # fmt: skip


EXPERIMENT = Experiment(
    "accuracy", "Accuracy, KL and agreement of every selector at 5 to 50 % of the rows.",
    _cells, _figures, {"accuracy": draw_accuracy, "kl": draw_kl}, _arguments, _meta,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
