"""Whether a span is worth repacking, and in which order. Pure: data in, data out.

What a request reads is estimated from how often each row was chosen, as if rows were chosen
independently: a piece is read when any row in it is chosen, and a run of pieces is one request to
the medium, which costs as much as reading `gap_bytes`.

What requests have shown has noise, and an order that is made from it fits that noise: judged by
the same requests it saves even where rows are chosen by chance. So it is made from half of them and
judged by the others, and the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from impress.spans.layout import PlaneLayout
from impress.spans.order import RowOrder, by_worth

Floats = npt.NDArray[np.floating[Any]]
Groups = Sequence[tuple[int, int]]  # (first, count), of windows or rows

#: A span that would save less of its reads than this is left alone: moving it costs writes.
LEAST_GAIN: Final = 0.1
#: Where only importance is known, this share of a layer's rows is taken as chosen (paper, 4.1).
KEPT_SHARE: Final = 0.25


@dataclass(frozen=True, slots=True)
class Cost:
    """What a request for a span's chosen rows reads, all layers, on average."""

    pieces: float = 0.0
    requests: float = 0.0
    n_bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.pieces + other.pieces,
            self.requests + other.requests,
            self.n_bytes + other.n_bytes,
        )

    def __mul__(self, share: float) -> Cost:
        return Cost(self.pieces * share, self.requests * share, self.n_bytes * share)


@dataclass(frozen=True, slots=True)
class Repacking:
    """A new order for a span, and what it would save. `slots` [n_layers, n_rows]: row by slot.

    `before` and `after`: None where no trial tells. `gain`: the share saved of the cost of reading
    chosen rows; or, where that is more, of the chunks read for each node whole: rows of a node
    split since lie in its sibling's chunks too.
    """

    slots: npt.NDArray[np.int64]
    before: Cost | None
    after: Cost | None
    gain: float

    @property
    def worth_it(self) -> bool:
        return self.gain >= LEAST_GAIN


def tiled(views: Groups, n_rows: int) -> list[tuple[int, int]]:
    """Runs of rows that nodes view, and those between them that nobody does: the whole span."""
    groups, end = [], 0
    for first, count in [*sorted(views), (n_rows, 0)]:
        if first > end:
            groups.append((end, first - end))
        if count:
            groups.append((first, count))
        end = first + count
    return groups


def likely_chosen(importance: Floats) -> Floats:
    """[n_layers, n_rows]: 1 for the most important rows of each layer, else 0."""
    kept = max(1, round(importance.shape[1] * KEPT_SHARE))
    chosen = np.zeros(importance.shape, dtype=np.float32)
    top = np.argpartition(-importance, kept - 1, axis=1)[:, :kept]
    np.put_along_axis(chosen, top, 1.0, axis=1)
    return chosen


def expected(chosen: Floats, plane: PlaneLayout) -> Cost:
    """The cost of one plane of one layer; `chosen` [n_rows]: how often each slot's row is."""
    missed = (1.0 - chosen.astype(np.float64).clip(0, 1)).reshape(-1, plane.piece_rows)
    read = 1.0 - missed.prod(axis=1)
    before = np.concatenate(([0.0], read[:-1]))
    pieces = float(read.sum())
    return Cost(pieces, float((read * (1.0 - before)).sum()), pieces * plane.piece_bytes)


def chunks_of(ordinals: npt.NDArray[np.int64], groups: Groups, window: int) -> tuple[int, int]:
    """Chunks read when a span's groups are read whole: the first, the first two, and so on, as by
    prompts that end or part after each; and the fewest that could be."""
    used = np.zeros(len(ordinals) // window, dtype=bool)
    n_chunks = n_rows = least = 0
    for first, count in groups:
        n_rows += count
        used[ordinals[first : first + count] // window] = True
        n_chunks += int(used.sum())
        least += n_rows // window
    return n_chunks, least


@dataclass(frozen=True, slots=True)
class Trial:
    """What an order is made from, and how often rows were chosen, by which it is judged."""

    made_by: Floats  # [n_layers, n_rows], by position; so is `chosen`
    chosen: Floats


def trials_of(halves: Floats) -> tuple[Trial, Trial]:
    """Each half of the decisions against the other. [2, n_layers, n_rows]"""
    return Trial(halves[0], halves[1]), Trial(halves[1], halves[0])


def known_of(
    average: Floats | None, halves: Floats | None, stored: Floats | None, order: RowOrder | None
) -> tuple[Floats, Sequence[Trial]] | None:
    """What a span's rows are worth, and the trials of an order made from that: by what requests
    chose (their average, and in halves: nan where only one of them is known), else by the
    importance it was stored with, unless it was moved since, as a rule by what requests chose, of
    which an index that was rebuilt knows nothing; None where too little is known for any."""
    if average is not None and halves is not None:  # a window without both keeps its order
        worth = np.where(np.isnan(halves).any(axis=0), np.float32(0), average)
        return worth, trials_of(np.nan_to_num(halves, nan=0.0))
    if stored is not None and (order is None or not order.epoch):
        worth = np.nan_to_num(stored, nan=0.0)
        return worth, [Trial(worth, likely_chosen(worth))]
    if order is not None:  # rows stay in it, except those of nodes split since
        return np.zeros(order.ordinals.shape, dtype=np.float32), ()
    return None


def plan_repack(
    worth: Floats, trials: Sequence[Trial], order: RowOrder | None, views: Groups,
    planes: Sequence[PlaneLayout], window: int, gap_bytes: int,
) -> Repacking:  # fmt: skip
    """Order rows by `worth` [n_layers, n_rows] (by position) inside each run that a node views, and
    those that none does. What that saves is the mean over the trials, of rows that some node views:
    nobody reads the others."""
    worth = np.nan_to_num(worth.astype(np.float32), nan=0.0)
    groups, alive = tiled(views, worth.shape[1]), np.zeros(worth.shape[1], dtype=np.float32)
    for first, count in views:
        alive[first : first + count] = 1
    slots = np.empty(worth.shape, dtype=np.int64)
    before, after, n_chunks, least = Cost(), Cost(), 0, 0
    for layer in range(len(worth)):
        old = np.arange(worth.shape[1]) if order is None else order.slots(layer)
        now = np.empty(len(old), dtype=np.int64)
        now[old] = np.arange(len(old))
        slots[layer] = by_worth(worth[layer], groups, now)
        read = chunks_of(now, sorted(views), window)
        n_chunks, least = n_chunks + read[0], least + read[1]
        for trial in trials:
            tried, chosen = by_worth(trial.made_by[layer], groups, now), trial.chosen[layer] * alive
            for plane in planes:
                before += expected(chosen[old], plane) * (1 / len(trials))
                after += expected(chosen[tried], plane) * (1 / len(trials))
    costs = [cost.n_bytes + cost.requests * gap_bytes for cost in (before, after)]
    gain = 1.0 - costs[1] / costs[0] if costs[0] else 0.0
    gain = max(gain, 1.0 - least / n_chunks)
    return Repacking(slots, before, after, gain) if trials else Repacking(slots, None, None, gain)
