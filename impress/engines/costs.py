"""What requests cost on this machine: seconds, by what they are made of.

Pure arithmetic: no clock is read here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

#: Ways to a prefix's keys and values: chosen rows of it, all of them, or the model.
MODES: Final = ("sparse", "exact", "recompute")
#: Those that read.
READS: Final = ("sparse", "exact")
#: The weight that is left of a sample when the next one has come.
DECAY: Final = 0.9
#: At most this many requests without a sample make older samples count for less.
MOST_AGE: Final = 16
#: The weight that each of the last _RARE samples with some of the last amount keeps for good: after
#: some 200 samples with none of it, the last one with some would else count for nothing.
_RARE: Final = 4
_KEPT: Final = 1e-3
#: Below this share of the full determinant, samples are too alike to tell their costs apart.
_LEAST_SPREAD: Final = 1e-3
#: Once this many samples are known, a new one counts as at most MOST_SURPRISE times what the fit
#: expects: a disk stalls now and then. One that has really become slow is believed some 15 requests
#: later (four times as slow) to 30 (sixteen times).
KNOWN: Final = 5
MOST_SURPRISE: Final = 2.0


class Span(NamedTuple):
    """A span that a prefix lies in: the key of everything up to its end, which stays the same when
    it is repacked, and the bytes of the prefix there."""

    key: bytes
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Stored:
    """What is known of a stored prefix before it is read. All rows of a batch together.

    `n_layers`: layers to wait for. `cold_bytes`: of its n_bytes, those that no cache holds.
    `spans`: those it lies in; `cache_bytes`: what caches hold at most.
    """

    n_tokens: int
    n_layers: int
    n_bytes: int
    cold_bytes: int
    spans: tuple[Span, ...] = ()
    cache_bytes: int = 0

    @property
    def amounts(self) -> tuple[int, int, int]:
        """What a read's seconds are fitted to."""
        return self.n_layers, self.n_bytes, self.cold_bytes


class Fit:
    """seconds = amounts · costs, fitted by least squares with no cost negative; later samples count
    for more. Where samples are too alike to tell two amounts' costs apart, the later amount gets it
    all. Fitted as a sample comes, after a request: the next has its estimate before its reads."""

    def __init__(self, n_amounts: int, decay: float = DECAY) -> None:
        self.n_samples = 0
        self._decay = decay
        self._products = np.zeros((n_amounts, n_amounts))
        self._by_seconds = np.zeros(n_amounts)
        self._squared = 0.0
        self._costs = np.zeros(n_amounts)
        self._rare = deque[tuple[npt.NDArray[np.float64], float]](maxlen=_RARE)
        self._subsets = [
            list(subset) for size in range(1, n_amounts + 1)
            for subset in sorted(combinations(range(n_amounts), size), reverse=True)
        ]  # fmt: skip

    def note(self, amounts: Sequence[float], seconds: float, *, is_sure: bool = False) -> None:
        """One sample: what was asked for, and how long it took. `is_sure`: it is no mere stall."""
        expected = self.seconds(amounts)
        x = np.asarray(amounts, dtype=np.float64)
        is_new = x[-1] and not self._rare  # nothing is known yet of what some of it costs
        if expected and self.n_samples >= KNOWN and not (is_new or is_sure):
            seconds = min(seconds, MOST_SURPRISE * expected)
        if self.n_samples == 1:  # a process's first takes longer, and may meet a disk that stalls
            self.age(MOST_AGE)
            if x[-1]:
                self._rare.clear()
        self._products = self._decay * self._products + np.outer(x, x)
        self._by_seconds = self._decay * self._by_seconds + seconds * x
        self._squared = self._decay * self._squared + seconds * seconds
        if x[-1]:
            self._rare.append((x, seconds))
        self._costs = self._fitted()
        self.n_samples += 1  # last: Ctrl-C leaves no sample counted whose costs are missing

    def age(self, n_requests: int) -> None:
        """`n_requests` went by without a sample: older samples count for less. The costs stay what
        they are until the next sample."""
        left = DECAY ** min(n_requests, MOST_AGE)
        self._products *= left
        self._by_seconds *= left
        self._squared *= left

    def seconds(self, amounts: Sequence[float]) -> float | None:
        """The estimate; None before the first sample."""
        return float(self._costs @ amounts) if self.n_samples else None

    def _fitted(self) -> npt.NDArray[np.float64]:
        """Costs of one of each amount: the nearest fit among subsets that need no negative cost."""
        products, by_seconds, squared = self._products, self._by_seconds, self._squared
        for x, seconds in self._rare:
            products = products + _KEPT * np.outer(x, x)
            by_seconds = by_seconds + _KEPT * seconds * x
            squared += _KEPT * seconds * seconds
        best, least = np.zeros_like(by_seconds), squared
        slack = 1e-9 * squared  # more costs must be worth it
        for subset in self._subsets:
            scale = np.sqrt(np.diag(products)[subset])
            if not scale.all():
                continue
            alike = products[np.ix_(subset, subset)] / np.outer(scale, scale)
            if np.linalg.det(alike) < _LEAST_SPREAD:
                continue
            costs = np.linalg.solve(alike, by_seconds[subset] / scale) / scale
            left = squared - float(costs @ by_seconds[subset])
            if (costs >= 0).all() and left < least - slack:
                best, least = np.zeros_like(best), left
                best[subset] = costs
        return best


class Costs:
    """What an engine's requests have cost. For one thread.

    A read's seconds are those spent waiting for it: the part a forward hides costs nothing.
    They are fitted to what is known before the read: the prefix's bytes, and how many of them lie
    in no cache.
    """

    def __init__(self) -> None:
        # What a request took apart from its reads. One fit per mode: in a shared one, the many
        # short forwards of hits would decide what a long one takes, and a sparse forward neither
        # plans nor lays down a whole prefix.
        self.forwards = {mode: Fit(2) for mode in MODES}
        self.reads = {mode: Fit(3) for mode in READS}

    def estimate(self, n_tokens: int, stored: Stored) -> dict[str, float | None]:
        """Seconds to the first token of n_tokens in each mode; None where too little is known."""
        known = {"recompute": self.forward("recompute", n_tokens)}
        for mode, fit in self.reads.items():
            rest = self.forward(mode, n_tokens - stored.n_tokens)
            read = fit.seconds(stored.amounts)
            known[mode] = None if rest is None or read is None else rest + read
        return known

    def forward(self, mode: str, n_tokens: int) -> float | None:
        """Seconds to compute n_tokens: by the mode's own requests; before the first, by those of
        the mode most like it."""
        for one in (mode, "exact", "sparse", "recompute"):
            if (seconds := self.forwards[one].seconds((1, n_tokens))) is not None:
                return seconds
        return None
