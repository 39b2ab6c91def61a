"""The gate's threshold, from never agreeing to always: keys read and answers (Figs 11, 22).

On the small models that look things up, whose answers are right or wrong, with questions of the RTE
and COPA shapes: diffuse ones, which no top quarter of rows answers, are left out. alpha 0 always
falls back, a large alpha never does. All is real here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from experiments import accuracy_lookup
from experiments.arms import EXACT, Arm
from experiments.common import Row, print_rows
from experiments.harness import Cell, Experiment, Figures, Options, main
from impress.policy import Exact, Paper
from impress.selection.choices import threshold

KEEP: Final = 0.25
ALPHAS: Final = (0.0, 0.1, 0.3, 0.6, 1.0, 4.0)


def arms() -> dict[str, Arm]:
    """Exact, and the paper's identifier at every alpha."""
    return {EXACT: Exact(), **{f"{alpha:g}": Paper(KEEP, alpha) for alpha in ALPHAS}}


def jaccard(alpha: float) -> float:
    """The mean Jaccard index that three heads must reach; alpha 0: more than there is."""
    return threshold(int(1000 * KEEP), 1000, alpha) if alpha else 1.0


def cells(options: Options) -> list[Cell]:
    return accuracy_lookup.cells(options, arms())


def figures(rows: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
    said: Figures = {}
    lines: list[Row] = []
    for group in dict.fromkeys(row["group"] for row in rows):
        asked = [row["arms"] for row in rows if row["group"] == group and row["task"] != "diffuse"]
        exact = float(np.mean([one[EXACT]["right"] for one in asked]))
        for alpha in ALPHAS:
            got = [one[f"{alpha:g}"] for one in asked]
            mean = {name: float(np.mean([one[name] for one in got]))
                    for name in ("right", "rows", "bytes", "fell_back", "kl")}  # fmt: skip
            line = {"model": group, "alpha": alpha, "threshold": jaccard(alpha), **mean,
                    "exact": exact, "n": len(got)}  # fmt: skip
            lines.append(line)
            for name in ("right", "rows", "fell_back"):
                said[f"{group}.{alpha:g}.{name}"] = mean[name]
        most, least = (
            next(r for r in lines if (r["model"], r["alpha"]) == (group, alpha))
            for alpha in (ALPHAS[0], ALPHAS[-1])
        )
        said[f"{group}.rows_times_fewer"] = most["rows"] / least["rows"]
        said[f"{group}.n"] = most["n"]
        said[f"{group}.points_lost"] = 100 * (most["right"] - least["right"])
    print_rows(f"The gate at {KEEP:.0%} kept", lines)
    return said, lines


def draw(figure: Any, _said: Figures, rows: list[Row]) -> None:
    """Rows read and accuracy over the threshold."""
    left, right = figure.subplots(1, 2)
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        x = [row["threshold"] for row in mine]
        left.plot(x, [row["rows"] for row in mine], "o-", label=model)
        right.plot(x, [row["right"] for row in mine], "o-", label=model)
    left.set_ylabel("share of rows read")
    right.set_ylabel("accuracy (rte and copa shapes)")
    for axes in (left, right):
        axes.set_xlabel("threshold on the mean Jaccard index")
        axes.legend()


EXPERIMENT: Final = Experiment(
    "threshold", "The paper's gate, from always falling back to never.", cells, figures,
    {"gate": draw}, meta=lambda _options: accuracy_lookup.meta(),
)  # fmt: skip


def run(argv: Sequence[str] | None = None) -> int:
    return main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(run())
