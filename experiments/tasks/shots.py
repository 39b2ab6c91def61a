"""A shared few-shot prefix, and the questions asked after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.tasks.formats import Item
from experiments.tasks.rows import Rows
from impress.errors import BadInput

#: What lm-eval puts between two questions.
_BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True)
class Drawn:
    """The prefix of all questions, and the questions. `shots_from`: the split of its shots."""

    prefix: str
    items: tuple[Item, ...]
    shots_from: str


def draw(rows: Rows, n_shots: int, seed: int, n_items: int | None = None) -> Drawn:
    """n_shots answered questions drawn from the train split, the same before every question.

    Without a train split they come from the split that is asked. Questions about the same thing as
    a shot are not asked. n_items: ask only this many, drawn. lm-eval draws other shots for each
    question; a stored prefix is the same for all. Raises BadInput where there are too few rows, or
    none are asked for.
    """
    if n_shots < 1:
        raise BadInput(f"shots: at least 1 makes a prefix, got {n_shots}")
    if n_items is not None and n_items < 1:
        raise BadInput(f"items: at least 1 is asked, got {n_items}")
    rng = np.random.default_rng(seed)
    pool, split = (rows.train, "train") if rows.train else (rows.asked, rows.split)
    most = len(pool) - (pool is rows.asked)
    if n_shots > most:
        raise BadInput(f"shots: {n_shots} asked for, the {split} split has {most} to give")
    chosen = [int(i) for i in rng.permutation(len(pool))[:n_shots]]
    about = {pool[i].about for i in chosen}  # a question about the same thing has its answer there
    left = tuple(item for item in rows.asked if item.about not in about)
    if not left:
        raise BadInput(f"shots: {n_shots} leave no question that is about something else")
    if n_items is not None and n_items < len(left):
        left = tuple(left[i] for i in sorted(rng.permutation(len(left))[:n_items]))
    return Drawn(_text([pool[i] for i in chosen]), left, split)


def _text(shots: Sequence[Item]) -> str:
    return "".join(f"{shot.context}{shot.choices[shot.gold]}{_BETWEEN}" for shot in shots)
