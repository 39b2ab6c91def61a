"""Choosing rows by column sums: the paper's vote, a bound on missing mass, and the references.

Pure NumPy. Column sums are float32 [heads, n tokens], over n_rows query rows (scores.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from impress.errors import ImpressError
from impress.policy import Paper, Quality
from impress.selection.quant import Floats

Positions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

#: A selection that would save less than this share of a layer's bytes loads the layer whole: one
#: sequential read costs less than the pieces, and the missing mass becomes zero.
LEAST_SAVED: Final = 0.1
#: Number of orders tried for the smallest set that bounds every head.
_ROUNDS: Final = 4


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows of one layer to load.

    `positions` int64 ascending, not writeable; None: all of them. The estimates are of the softmax
    weight (over prefix and new tokens) on rows not chosen, averaged over query rows: its mean over
    heads, and the worst head's; from the heads the identifier saw, nan if none. `fell_back`: the
    identifier did not decide itself. `agreement`: the paper's mean Jaccard index, else nan.
    `reason`: agree | disagree | ungated | bound | capped | no room | diffuse | units | given |
    not finite.
    """

    positions: Positions | None
    estimated_missing_mass: float
    missing_mass_worst_head: float
    fell_back: bool
    reason: str
    agreement: float = math.nan

    @property
    def by_query(self) -> bool:
        """Whether the request's own query chose these rows, so that they tell what it needed."""
        estimated = not math.isnan(self.estimated_missing_mass)
        return self.positions is not None and (estimated or self.reason == "units")

    def n_rows(self, n_tokens: int) -> int:
        """Rows chosen of a prefix of n_tokens."""
        return n_tokens if self.positions is None else len(self.positions)


def checked(found: Any, n_tokens: int, who: str) -> Selection:
    """What anybody's identifier chose from a prefix of n_tokens, once checked.

    Raises ImpressError where these are not rows of it: reading them would give another's bytes.
    """
    if not isinstance(found, Selection):
        raise ImpressError(
            f"{who}: its identifier must return a Selection, got {type(found).__name__}"
        )
    at = found.positions
    if at is None:
        return found
    whole_numbers = isinstance(at, np.ndarray) and at.dtype == np.int64 and at.ndim == 1
    ascending = whole_numbers and bool((at[1:] > at[:-1]).all())
    if not ascending or (len(at) and not 0 <= at[0] <= at[-1] < n_tokens):
        raise ImpressError(
            f"{who}: its identifier chose no rows of this prefix: positions wants an int64 array, "
            f"ascending, each once, in 0..{n_tokens - 1}; of a mask take numpy.flatnonzero"
        )
    return found


def paper_choice(
    columns: Floats,
    n_rows: int,
    policy: Paper,
    all_columns: Callable[[], Floats],
    heads_per_kv: int = 1,
) -> Selection:
    """Section 4.3 on column sums [probe heads, n] over n_rows query rows.

    A row holds all heads, so fallback "heads" loads the union of the KV heads' own top k: up to
    n_kv_heads × k rows. Query heads of one KV head are summed first.
    """
    if not np.isfinite(columns).all():
        return whole("not finite", fell_back=True)
    n = columns.shape[1]
    k = n_kept(policy.keep, n)
    tops = np.stack([top_k(head, k) for head in columns])
    agreement = mean_jaccard(tops)
    if policy.gate and (not policy.alpha or agreement < threshold(k, n, policy.alpha)):
        if policy.fallback == "layer":
            return whole("disagree", fell_back=True, agreement=agreement)
        everything = all_columns()
        if not np.isfinite(everything).all():
            return whole("not finite", fell_back=True, agreement=agreement)
        by_kv = everything.reshape(-1, heads_per_kv, n).sum(axis=1)
        union = np.any([top_k(head, k) for head in by_kv], axis=0)
        return _chosen(
            union, everything / np.float32(n_rows), "disagree", agreement, fell_back=True
        )
    reason = "agree" if policy.gate else "ungated"
    return _chosen(vote(tops, columns, k), columns / np.float32(n_rows), reason, agreement)


def quality_choice(
    columns: Floats, n_rows: int, policy: Quality, row_bytes: int, probe_bytes: int, window: int,
    room: int | None = None,
) -> Selection:  # fmt: skip
    """The smallest set that holds the wanted mass, on column sums [n_heads, n] of n_rows rows.

    At least one row, and at most the `room` a byte cap leaves (None: all). probe_bytes: of the
    whole layer. Loads the whole layer where that costs hardly more (LEAST_SAVED, or a window) and
    there is room, and where scores are not finite, room or not.
    """
    if not np.isfinite(columns).all():
        return whole("not finite", fell_back=True)
    mass = columns / np.float32(n_rows)
    n = mass.shape[1]
    if policy.per == "mean":
        order = mass.mean(axis=0)
        m = _least(order, policy.max_missing_mass)
    else:
        order, m = _least_by_head(mass, policy.max_missing_mass)
    room = n if room is None else room
    saved = (n - m) * row_bytes
    if room == n and saved < max(LEAST_SAVED * n * row_bytes + probe_bytes, window * row_bytes):
        return whole("diffuse", fell_back=False)
    more = 1
    while True:
        found = _chosen(top_k(order, min(m, room)), mass, "capped" if m > room else "bound")
        worst = policy.per == "head"
        told = found.missing_mass_worst_head if worst else found.estimated_missing_mass
        if m > room or told <= policy.max_missing_mass:
            return found
        # Sums are float32, and the estimate must keep the bound, too. Mostly one more row does;
        # twice as many each time, as a bound of 0 wants all rows whose mean over heads underflowed.
        m, more = min(n, m + more), 2 * more


def top_choice(columns: Floats, n_rows: int, keep: float) -> Selection:
    """H2O: the top k by the column sums [n_heads, n] of all heads together."""
    if not np.isfinite(columns).all():
        return whole("not finite", fell_back=True)
    k = n_kept(keep, columns.shape[1])
    return _chosen(top_k(columns.sum(axis=0), k), columns / np.float32(n_rows), "given")


def random_choice(n: int, keep: float, seed: int, layer: int) -> Selection:
    """k random rows."""
    rng = np.random.default_rng([seed, layer])
    return _blind(rng.choice(n, n_kept(keep, n), replace=False), n)


def recent_choice(n: int, keep: float) -> Selection:
    """The last k rows."""
    return _blind(np.arange(n - n_kept(keep, n), n), n)


def static_choice(importance: Floats, keep: float) -> Selection:
    """The top k by importance [n] given when the prefix was stored."""
    n = len(importance)
    values = np.nan_to_num(importance.astype(np.float32))
    return _blind(np.flatnonzero(top_k(values, n_kept(keep, n))), n)


# ---- parts -----------------------------------------------------------------------------------


def n_kept(keep: float, n: int) -> int:
    """k = max(1, ⌈keep · n⌉); a product a billionth over an integer is that integer."""
    return max(1, min(n, math.ceil(round(keep * n, 9))))


def threshold(k: int, n: int, alpha: float) -> float:
    """t = j^alpha, where j is the expected Jaccard index of two random sets of k out of n."""
    kept = k / n
    return float((kept / (2 - kept)) ** alpha)


def top_k(scores: Floats, k: int) -> Mask:
    """The k largest of scores [n]; of equal ones, those at lower positions. No NaN."""
    n = len(scores)
    if k >= n:
        return np.ones(n, dtype=bool)
    if k <= 0:
        return np.zeros(n, dtype=bool)
    least = np.partition(scores, n - k)[n - k]
    chosen: Mask = scores > least
    ties = np.flatnonzero(scores == least)
    chosen[ties[: k - int(chosen.sum())]] = True
    return chosen


def mean_jaccard(sets: Mask) -> float:
    """Mean over pairs of |A ∩ B| / |A ∪ B| of sets [heads, n]; 1 for a single head."""
    pairs = [
        np.count_nonzero(a & b) / np.count_nonzero(a | b)
        for a, b in itertools.combinations(sets, 2)
    ]
    return sum(pairs) / len(pairs) if pairs else 1.0


def vote(sets: Mask, columns: Floats, k: int) -> Mask:
    """k tokens: those in most sets first, then the larger sum over heads, then the lower position.

    sets and columns [heads, n].
    """
    votes, totals = sets.sum(axis=0, dtype=np.uint8), columns.sum(axis=0)
    chosen = np.zeros(len(votes), dtype=bool)
    for n_votes in range(len(sets), -1, -1):
        if not k:
            break
        level = np.flatnonzero(votes == n_votes)
        chosen[level[top_k(totals[level], k)]] = True
        k -= min(k, len(level))
    return chosen


def whole(reason: str, *, fell_back: bool, agreement: float = math.nan) -> Selection:
    """Every row."""
    return Selection(None, 0.0, 0.0, fell_back, reason, agreement)


def _chosen(
    chosen: Mask, mass: Floats, reason: str, agreement: float = math.nan, *, fell_back: bool = False
) -> Selection:
    """A selection, with how much of the mass [heads, n] (mean over query rows) it leaves out."""
    if chosen.all():
        return whole(reason, fell_back=fell_back, agreement=agreement)
    missing = np.minimum(mass @ (~chosen).astype(np.float32), 1.0)
    mean, worst = float(missing.mean(dtype=np.float64)), float(missing.max())
    return Selection(_frozen(np.flatnonzero(chosen)), mean, worst, fell_back, reason, agreement)


def _blind(positions: npt.NDArray[np.intp], n: int) -> Selection:
    """A selection made without a look at the query."""
    if len(positions) == n:
        return whole("given", fell_back=False)
    return Selection(_frozen(np.sort(positions)), math.nan, math.nan, False, "given")


def _frozen(positions: npt.NDArray[np.intp]) -> Positions:
    made = positions.astype(np.int64)
    made.flags.writeable = False
    return made


def _least(weight: Floats, bound: float) -> int:
    """The least m ≥ 1 such that all but the m largest of weight [n] add up to at most bound."""
    left = np.cumsum(np.sort(weight), dtype=np.float64)
    return max(1, len(weight) - int(np.searchsorted(left, bound, side="right")))


def _least_by_head(mass: Floats, bound: float) -> tuple[Floats, int]:
    """An order [n] and a small m: its first m tokens leave at most `bound` of each head [heads, n].

    Covering every head with the fewest tokens is a hard problem: orders by a weighted sum of the
    heads are tried, with weight moved to the heads that were left with most.
    """
    weights = np.ones(len(mass), dtype=np.float32)
    best: tuple[Floats, int] | None = None
    for _ in range(_ROUNDS):
        order = weights @ mass
        m = _least_order(order, mass, bound)
        if best is None or m < best[1]:
            best = (order, m)
        left = mass @ (~top_k(order, max(1, int(m * 0.9)))).astype(np.float32)
        weights *= np.sqrt(left / max(float(left.mean()), 1e-30))
    assert best is not None
    return best


def _least_order(order: Floats, mass: Floats, bound: float) -> int:
    """The least m ≥ 1 whose first m tokens by `order` leave at most bound of every head."""
    low, high = 1, len(order)
    while low < high:
        middle = (low + high) // 2
        left = mass @ (~top_k(order, middle)).astype(np.float32)
        if float(left.max()) <= bound:
            high = middle
        else:
            low = middle + 1
    return low


def unit_choice(scores: Floats, n_tokens: int, keep: float) -> Selection:
    """All tokens of the best share `keep` of the units, by scores [n units]; n_tokens in all.

    Its scores bound or stand for attention, so nothing is said of the mass left out.
    """
    if not np.isfinite(scores).all():
        return whole("not finite", fell_back=True)
    n_units = len(scores)
    kept = top_k(scores, n_kept(keep, n_units))
    if kept.all():
        return whole("given", fell_back=False)
    positions = np.flatnonzero(np.repeat(kept, n_tokens // n_units)).astype(np.int64)
    positions.flags.writeable = False
    return Selection(positions, math.nan, math.nan, False, "units")


def pooled(values: Floats, width: int) -> Floats:
    """For each of values [n] the largest of the `width` (odd) around it; fewer at the ends."""
    half = min(width // 2, len(values) - 1)  # one that reaches past both ends is as wide as any
    width = 2 * half + 1
    most = np.pad(values.astype(np.float32), half, constant_values=-np.inf)
    span = 1  # most[i] is the largest of `span` values from i on
    while 2 * span <= width:
        most = np.maximum(most[:-span], most[span:])
        span *= 2
    found: Floats = np.maximum(most[: len(values)], most[width - span :])
    return found
