"""One cell at the size of a whole OPT-30B, for a machine with a fast disk (gpu_recipe.md).

Six prefixes, all 48 layers, caches of 6 + 20 GB; one kind of data a command, since 64 GiB of disk
hold one. Compute is emulated (experiments/systems/clock.py). Not yet run at full size.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from experiments.common import Row, print_rows
from experiments.harness import Cell, Experiment, Figures, Options, main
from experiments.systems.catalogue import System, systems
from experiments.systems.cell import Bench, Load, summary
from experiments.systems.data import Data
from experiments.systems.generate import Knobs
from experiments.systems.shapes import SHAPES
from experiments.systems.sizes import dilation, meta
from experiments.systems.sweep import line

SHAPE: Final = SHAPES["opt-30b"]
N_PREFIXES: Final = 6
#: Layers by `quick`; the ratio of the data to caches of 10 and 32 parts that makes 6 + 20 GB.
LAYERS: Final = {False: SHAPE.n_layers, True: 2}
RATIO: Final = 65
KINDS: Final = ("packed", "plain", "int4")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=KINDS, default="packed", help="data, and its systems")
    parser.set_defaults(unchecked=True)


def cells(options: Options) -> list[Cell]:
    kind = options.more.kind
    seconds = 60.0 if options.quick else 480.0
    return [Cell({"kind": kind}, partial(measure, options, kind), seconds)]


def of_kind(kind: str) -> list[System]:
    """Systems over one kind of data; recomputing beside the first."""
    if kind == "packed":
        wanted = [s for s in systems() if s.name in ("impress", "recompute")]
    else:
        wanted = [s for s in systems() if s.data == kind and "impress" not in s.name]
    return wanted


def measure(options: Options, kind: str) -> list[Row]:
    knobs, n = Knobs(), 10 if options.quick else 40
    data = Data.of(
        SHAPE, LAYERS[options.quick], N_PREFIXES, options.folder / "data", knobs, options.seed
    )
    load = Load(RATIO, 0.9, knobs, n, 6, 3, options.seed)
    stretch = dilation(options)
    with Bench(of_kind(kind), data, load, stretch) as bench:
        bench.warm()
        found = bench.measure()
    return [{"system": name, **summary(served)} for name, served in found.items()]


def figures(rows: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
    print_rows("OPT-30B: ms to the first token, compute emulated", [line(row) for row in rows])
    return {f"p50_ms.{row['system']}": row["p50_ms"] for row in rows}, rows


def _meta(options: Options) -> dict[str, Any]:
    return {**meta(options), "layers": LAYERS[options.quick], "interleaved": "within a kind only"}


EXPERIMENT: Final = Experiment(
    "gpu_cell", "A cell at the size of a whole model; compute emulated.", cells, figures, {},
    arguments, _meta, uses_disk=True,
)  # fmt: skip


def run(argv: Sequence[str] | None = None) -> int:
    return main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(run())
