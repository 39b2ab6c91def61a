"""One cell at the size of a whole OPT-30B, for a machine with a fast disk (gpu_recipe.md).

Six prefixes, all 48 layers, caches of 6 + 20 GiB. A cell is one system: more do not fit into 10
minutes, or into 64 GiB of disk. Compute is a CUDA device's where one can be used, else emulated.
Not yet run at full size.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from experiments.common import Row, print_rows
from experiments.harness import Cell, Experiment, Figures, Options, main
from experiments.systems.catalogue import PAPERS, chosen
from experiments.systems.cell import Bench, Load, summary
from experiments.systems.data import Data
from experiments.systems.generate import Knobs
from experiments.systems.shapes import SHAPES
from experiments.systems.sizes import (
    compute_argument,
    computed_by,
    dilation,
    how,
    is_real,
    meta,
    stretch,
)
from experiments.systems.sweep import estimate, line

SHAPE: Final = SHAPES["opt-30b"]
N_PREFIXES: Final = 6
#: Layers by `quick`; the ratio of the data to caches of 10 and 32 parts that makes 6 + 20 GiB.
LAYERS: Final = {False: SHAPE.n_layers, True: 2}
RATIO: Final = 65
NAMES: Final = (*PAPERS, "as_int4")


def cells(options: Options) -> list[Cell]:
    load = load_of(options)
    computed = computed_by(options)
    return [
        Cell({"system": system.name, "n_warm": load.n_warm, **computed},
             partial(measure, options, system.name),
             estimate([system], SHAPE, LAYERS[options.quick], N_PREFIXES, load,
                      dilation(options)))
        for system in chosen(NAMES)
    ]  # fmt: skip


def load_of(options: Options) -> Load:
    # In a window of fewer requests the least popular of the 6 prefixes is not asked for.
    return Load(RATIO, 0.9, Knobs(), 10 if options.quick else 40, 9, 3, options.seed)


def measure(options: Options, name: str) -> list[Row]:
    load = load_of(options)
    data = Data.of(
        SHAPE, LAYERS[options.quick], N_PREFIXES, options.folder / "data", load.knobs, options.seed
    )
    data.remove()  # the last cell's
    real = is_real(options)
    dilated, on = (1.0, "cuda") if real else (stretch(options), "")
    rate = options.disk.gb_s if real else None
    with Bench(chosen([name]), data, load, dilated, on=on, disk_gb_s=rate) as bench:
        bench.warm()
        found = bench.measure()
    return [
        {"system": name, **summary(served), **bench.warmed[name]._asdict()}
        for name, served in found.items()
    ]


def figures(rows: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
    print_rows(f"OPT-30B: ms to the first token, {how(rows)}", [line(row) for row in rows])
    return {f"p50_ms.{row['system']}": row["p50_ms"] for row in rows}, rows


def _meta(options: Options) -> dict[str, Any]:
    said = {**meta(options), "layers": LAYERS[options.quick], "interleaved": "no"}
    return said if is_real(options) else {**said, "emulator": "not checked"}


EXPERIMENT: Final = Experiment(
    "gpu_cell", "A cell at the size of a whole model.", cells, figures, {}, compute_argument,
    meta=_meta, uses_disk=True,
)  # fmt: skip


def run(argv: Sequence[str] | None = None) -> int:
    return main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(run())
