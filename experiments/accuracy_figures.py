"""What `accuracy` says of its rows: figures by GROUP.TASK.ARM, tables, plots.

Intervals are bootstrapped over documents, as questions on one are not independent; flips and lost
points are paired with the full KV on the same question. Where no answer flipped, no resample has a
flip and the interval would have no width. The upper end for lost points is therefore never below
the exact one-sided 95 % bound on the share of documents with a flip, given that none has one: 1.2
points for 252 documents. The same holds for an arm that lost an answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from experiments.arms import EXACT
from experiments.common import Row, print_rows
from experiments.harness import Figures

N_RESAMPLES: Final = 2000
#: How often the bound that is used where nothing flipped may be wrong.
_MISSED: Final = 0.05
#: The name for every task of a group, and for every group.
ALL: Final = "all"
_MEANS: Final = {"kl": "kl", "agreed": "agreement64", "run": "run64", "rows": "rows_share",
                 "bytes": "bytes_share", "moved": "transferred_share",
                 "fell_back": "fallback_share"}  # fmt: skip
#: Colours and markers, so that a series looks the same in every plot; others cycle.
_LOOKS: Final = {
    "exact": ("black", "*"), "int8": ("tab:gray", "P"), "int4": ("black", "P"),
    "quality": ("tab:red", "o"), "quality10_head": ("tab:pink", "D"),
    "paper": ("tab:blue", "s"), "paper_ungated": ("lightskyblue", "s"),
    "all_heads": ("tab:purple", "^"), "pages": ("tab:green", "v"),
    "contiguous": ("tab:olive", "h"), "snap": ("tab:cyan", "<"), "static_h2o": ("teal", ">"),
    "random": ("tab:brown", "x"), "recency": ("tab:orange", "x"),
}  # fmt: skip


def all_figures(rows: list[Row], seed: int) -> tuple[Figures, list[Row]]:
    """Figures GROUP.TASK.ARM.WHAT, and one report row for each GROUP.TASK.ARM."""
    figures: Figures = {}
    lines: list[Row] = []
    for group, task, some in _splits(rows):
        documents = [row["document"] for row in some]
        drawn = _drawn(documents, seed)
        for arm in some[0]["arms"]:
            said = _figures_of([row["arms"][arm] for row in some],
                               [row["arms"][EXACT] for row in some], drawn)  # fmt: skip
            if arm != EXACT:
                least = most_unseen(len(set(documents)))
                said["lost_points_high"] = max(said["lost_points_high"], least)
            figures |= {f"{group}.{task}.{arm}.{what}": value for what, value in said.items()}
            lines.append({"group": group, "task": task, "arm": arm, **said})
    return figures, lines


def _splits(rows: list[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """(group, task, its rows); also a group's tasks pooled, and all rows if groups are several."""
    groups = list(dict.fromkeys(row["group"] for row in rows))
    for group in groups:
        own = [row for row in rows if row["group"] == group]
        tasks = list(dict.fromkeys(row["task"] for row in own))
        for task in [*tasks, *([ALL] if len(tasks) > 1 else [])]:
            yield group, task, [row for row in own if task in (row["task"], ALL)]
    if len(groups) > 1:
        yield ALL, ALL, rows


def _drawn(documents: list[int], seed: int) -> npt.NDArray[np.float64]:
    """How often each question is drawn in each resample of documents: [N_RESAMPLES, questions].

    A document that is in two groups counts as one document.
    """
    names, of = np.unique(np.array(documents), return_inverse=True)
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=N_RESAMPLES)
    weights: npt.NDArray[np.float64] = counts[:, of].astype(np.float64)
    return weights


def most_unseen(n_documents: int) -> float:
    """The most points that may be lost where none of this many documents had a flip."""
    return float(f"{100 * (1 - _MISSED ** (1 / n_documents)):.5g}")


def _figures_of(some: list[Row], exact: list[Row], drawn: npt.NDArray[np.float64]) -> Figures:
    right = np.array([one["right"] for one in some], dtype=float)
    full = np.array([one["right"] for one in exact], dtype=float)
    n_drawn = drawn.sum(axis=1)
    accuracy, lost = drawn @ right / n_drawn, drawn @ (full - right) / n_drawn
    kl = np.array([one["kl"] for one in some])
    made = {
        "n": len(some), "accuracy": right.mean(),
        "accuracy_low": np.percentile(accuracy, 2.5),
        "accuracy_high": np.percentile(accuracy, 97.5),
        "lost_points": 100 * (full - right).mean(),
        "lost_points_low": 100 * np.percentile(lost, 2.5),
        "lost_points_high": 100 * np.percentile(lost, 97.5),
        "flips": (right != full).sum(), "flips_to_wrong": (full > right).sum(),
        "flips_to_right": (right > full).sum(),
        "same_choice": np.mean([a["chosen"] == b["chosen"]
                                for a, b in zip(some, exact, strict=True)]),
        "kl_p99": np.percentile(kl, 99),
        **{name: np.mean([one[field] for one in some]) for field, name in _MEANS.items()},
    }  # fmt: skip
    if "right_norm" in some[0]:
        made["accuracy_norm"] = np.mean([one["right_norm"] for one in some])
    return {name: float(f"{value:.5g}") for name, value in made.items()}


# ---- tables ------------------------------------------------------------------------------------


def show(lines: list[Row]) -> None:
    """Two tables for each group: answers, by task; then likeness and reads, over all its tasks."""
    for group in dict.fromkeys(line["group"] for line in lines):
        own = [line for line in lines if line["group"] == group]
        tasks = list(dict.fromkeys(line["task"] for line in own))
        accuracy = {(line["task"], line["arm"]): f"{line['accuracy']:.3f}" for line in own}
        pooled = [line for line in own if line["task"] == tasks[-1]]
        title = f"{group}, {pooled[0]['n']:.0f} questions"
        print_rows(f"{title}: accuracy by task", [
            {"arm": line["arm"], **{task: accuracy[task, line["arm"]] for task in tasks},
             **_paired(line)} for line in pooled
        ])  # fmt: skip
        print_rows(f"{title}: likeness to the full KV, and what was read", [
            {"arm": line["arm"], **_likeness(line)} for line in pooled
        ])  # fmt: skip


def _paired(line: Row) -> Row:
    low, high = line["lost_points_low"], line["lost_points_high"]
    return {
        "points lost [95 %]": f"{line['lost_points']:.1f} [{low:.1f}, {high:.1f}]",
        "to wrong": int(line["flips_to_wrong"]), "to right": int(line["flips_to_right"]),
    }  # fmt: skip


def _likeness(line: Row) -> Row:
    return {
        "KL": f"{line['kl']:.2g}", "KL p99": f"{line['kl_p99']:.2g}",
        "agree64": f"{line['agreement64']:.3f}", "run64": f"{line['run64']:.1f}",
        "bytes": f"{line['bytes_share']:.3f}", "moved": f"{line['transferred_share']:.2f}",
        "fell back": f"{line['fallback_share']:.2f}",
    }  # fmt: skip


# ---- plots -------------------------------------------------------------------------------------


def draw_accuracy(figure: Any, _figures: Figures, lines: list[Row]) -> None:
    """Accuracy against the share of the KV's bytes."""
    _grid(figure, lines, "accuracy", "accuracy")


def draw_kl(figure: Any, _figures: Figures, lines: list[Row]) -> None:
    """KL's 99th percentile against the share of the KV's bytes."""
    _grid(figure, lines, "kl_p99", "KL to full KV, p99, nats", log=True)


def _grid(figure: Any, lines: list[Row], what: str, label: str, *, log: bool = False) -> None:
    """One panel for each group and task; a line for each selector, over what is kept."""
    groups = [group for group in dict.fromkeys(line["group"] for line in lines) if group != ALL]
    tasks = [task for task in dict.fromkeys(line["task"] for line in lines) if task != ALL]
    figure.set_size_inches(4.2 * len(tasks), 3.4 * len(groups) + 0.8)
    panels = figure.subplots(len(groups), len(tasks), squeeze=False, sharex=True, sharey=True)
    for row, group in zip(panels, groups, strict=True):
        for panel, task in zip(row, tasks, strict=True):
            own = [line for line in lines if (line["group"], line["task"]) == (group, task)]
            _panel(panel, own, what, log)
            panel.set_title(f"{group}, {task}", fontsize=9)
    for panel in panels[-1]:
        panel.set_xlabel("share of the KV's bytes, probes counted")
    panels[0, 0].set_ylabel(label)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center",
                  ncols=6, fontsize=7)  # fmt: skip


def _panel(panel: Any, own: list[Row], what: str, log: bool) -> None:
    series: dict[str, list[Row]] = {}
    for line in own:
        name = line["arm"].rpartition(".")[2]
        name = "quality" if name.startswith("quality") and "head" not in name else name
        series.setdefault(name, []).append(line)
    for name, points in series.items():
        points.sort(key=lambda line: line["bytes_share"])
        colour, marker = _LOOKS.get(name, (None, "."))
        y = [max(line[what], 1e-9) if log else line[what] for line in points]
        panel.plot([line["bytes_share"] for line in points], y, label=name, color=colour,
                   marker=marker, markersize=5 if len(points) > 1 else 9,
                   linewidth=2.5 if name == "quality" else 1)  # fmt: skip
    panel.set_xlim(0, 1.3)
    if log:
        panel.set_yscale("log")
