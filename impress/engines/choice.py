"""Load or recompute: the cheapest way to a first token, by what requests cost on this machine.

    requests done ─note─> Rates ─estimate─> ms of each mode ─decide─> Choice

Pure arithmetic: no clock is read here, so the same requests lead to the same choices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt

#: Ways to a prefix's keys and values: chosen rows of it, all of them, or the model.
MODES: Final = ("sparse", "exact", "recompute")
#: Those that read.
_READS: Final = ("sparse", "exact")
#: What a sample still counts for when the next one has come.
_DECAY: Final = 0.9
#: A mode that seems slower is measured again after it was passed over so many times: 16 at first,
#: then twice as many each time it still is slower, up to 128; or up to more, where measuring it
#: every 128 requests would add more than _LOOK_SHARE to what these take.
_LOOK_AGAIN: Final = (16, 128)
_LOOK_SHARE: Final = 0.02
#: After so many where the policy's own mode is wanted for more than its time (decision 0011).
_WANTED: Final = 3
#: A process's first forward may take so many times as long as a later one. On a device, where it
#: loads what later ones run, it may be tens of times: there `Rates` does not learn from it.
_FIRST_IS_SLOWER: Final = 4.0
#: The policy's own mode is left for another only where that gains at least so many seconds and at
#: least this share of the other's time: estimates of small things are noise, and a caller who named
#: a mode is surprised by another.
_LEAST_GAIN_S: Final = 0.02
_LEAST_GAIN_SHARE: Final = 0.05
#: The share instead while only n reads of the own mode are known, n below _KNOWN: this ÷ n. Else a
#: first read that happened to meet a stall would decide until the mode is measured again.
_FIRST_GAIN_SHARE: Final = 1.0
#: Below this share of the full determinant, samples are too alike to tell their costs apart.
_LEAST_SPREAD: Final = 1e-3
#: Once so many samples are known, a new one counts as at most _MOST_SURPRISE times what the fit
#: expects: a disk stalls now and then. One that has really become slow is believed some 15 requests
#: later (four times as slow) to 30 (sixteen times).
_KNOWN: Final = 5
_MOST_SURPRISE: Final = 2.0


@dataclass(frozen=True, slots=True)
class Choice:
    """A mode, and one line that says why."""

    mode: str
    why: str


@dataclass(frozen=True, slots=True)
class Stored:
    """What is known of a stored prefix before it is read. Of all rows of a batch together.

    `n_layers`: layers to wait for. `cold_bytes`: of its n_bytes, those that no cache holds.
    """

    n_tokens: int
    n_layers: int
    n_bytes: int
    cold_bytes: int


class Fit:
    """seconds = amounts · costs, fitted by least squares with no cost negative; later samples count
    for more. Where samples are too alike to tell two amounts' costs apart, the later amount gets it
    all. Fitted as a sample comes, behind a request: the next has its estimate before its reads."""

    def __init__(self, n_amounts: int) -> None:
        self.n_samples = 0
        self._products = np.zeros((n_amounts, n_amounts))
        self._by_seconds = np.zeros(n_amounts)
        self._squared = 0.0
        self._costs = np.zeros(n_amounts)
        self._subsets = [
            list(subset) for size in range(1, n_amounts + 1)
            for subset in sorted(combinations(range(n_amounts), size), reverse=True)
        ]  # fmt: skip

    def note(self, amounts: Sequence[float], seconds: float) -> None:
        """One sample: what was asked for, and how long it took."""
        expected = self.seconds(amounts)
        if expected and self.n_samples >= _KNOWN:
            seconds = min(seconds, _MOST_SURPRISE * expected)
        x = np.asarray(amounts, dtype=np.float64)
        self._products = _DECAY * self._products + np.outer(x, x)
        self._by_seconds = _DECAY * self._by_seconds + seconds * x
        self._squared = _DECAY * self._squared + seconds * seconds
        self._costs = self._fitted()
        self.n_samples += 1  # at last: Ctrl-C leaves no sample whose costs are not there

    def age(self, n_requests: int) -> None:
        """So many requests went by without a sample: older samples count for less. The costs stay
        what they are until the next."""
        left = _DECAY ** min(n_requests, _LOOK_AGAIN[0])
        self._products *= left
        self._by_seconds *= left
        self._squared *= left

    def seconds(self, amounts: Sequence[float]) -> float | None:
        """The estimate; None before the first sample."""
        return float(self._costs @ amounts) if self.n_samples else None

    def _fitted(self) -> npt.NDArray[np.float64]:
        """Of one of each amount: of all subsets that need no negative cost the nearest fit."""
        best, least = np.zeros_like(self._by_seconds), self._squared
        slack = 1e-9 * self._squared  # more costs must be worth it
        for subset in self._subsets:
            scale = np.sqrt(np.diag(self._products)[subset])
            if not scale.all():
                continue
            alike = self._products[np.ix_(subset, subset)] / np.outer(scale, scale)
            if np.linalg.det(alike) < _LEAST_SPREAD:
                continue
            costs = np.linalg.solve(alike, self._by_seconds[subset] / scale) / scale
            left = self._squared - float(costs @ self._by_seconds[subset])
            if (costs >= 0).all() and left < least - slack:
                best, least = np.zeros_like(best), left
                best[subset] = costs
        return best


@dataclass(slots=True)
class Rates:
    """What an engine's requests have cost. For one thread.

    A read's seconds are those that were waited for it: what a forward hides of it costs nothing.
    They are fitted to what is known before the read: the prefix's bytes, and how many of them lie
    in no cache.
    """

    on_device: bool = False
    # What a request took apart from its reads. One fit a mode: together, the many short forwards of
    # hits would decide what a long one takes, and a sparse forward neither plans nor lays down a
    # whole prefix.
    _forwards: dict[str, Fit] = field(default_factory=lambda: {mode: Fit(2) for mode in MODES})
    _reads: dict[str, Fit] = field(default_factory=lambda: {mode: Fit(3) for mode in _READS})
    _passed_over: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODES, 0))
    _patience: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODES, _LOOK_AGAIN[0]))
    _begun: set[str] = field(default_factory=set)  # modes that ran on the device

    def note_forward(self, mode: str, n_tokens: int, seconds: float) -> None:
        """A request computed n_tokens, and took so long, reads not counted.

        On a device the first in each mode tells nothing: it loads kernels and makes their libraries
        ready.
        """
        if self.on_device and mode not in self._begun:
            self._begun.add(mode)
            return
        self._forwards[mode].note((1, n_tokens), seconds)

    def note_read(self, mode: str, stored: Stored, seconds: float) -> None:
        """A prefix was read in a mode, and so long was waited for it."""
        self._reads[mode].note((stored.n_layers, stored.n_bytes, stored.cold_bytes), seconds)

    def estimate(self, n_tokens: int, stored: Stored) -> dict[str, float | None]:
        """Seconds to the first token of n_tokens in each mode; None where too little is known."""
        known = {"recompute": self._forward("recompute", n_tokens)}
        for mode, fit in self._reads.items():
            rest = self._forward(mode, n_tokens - stored.n_tokens)
            read = fit.seconds((stored.n_layers, stored.n_bytes, stored.cold_bytes))
            known[mode] = None if rest is None or read is None else rest + read
        return known

    def _forward(self, mode: str, n_tokens: int) -> float | None:
        """By the mode's own requests; before the first, by those of the mode most like it."""
        for one in (mode, "exact", "sparse", "recompute"):
            if (seconds := self._forwards[one].seconds((1, n_tokens))) is not None:
                return seconds
        return None

    def choose(
        self, own: str, n_tokens: int, stored: Stored, *, own_is_wanted: bool = False
    ) -> Choice:
        """The mode for a request, as `decide` says, except that one that was passed over for long
        is taken to be measured again. Effects: counts who was passed over. `own_is_wanted`: the
        policy's own mode is wanted for more than its time, so it waits for _WANTED at most.
        """
        allowed = {own, "exact", "recompute"}
        seconds = self.estimate(n_tokens, stored)
        reads = self._reads.get(own)
        choice = decide(own, allowed, seconds, n_reads=reads.n_samples if reads else _KNOWN)
        for mode in sorted(allowed):
            patience = self._patience[mode]
            if own_is_wanted and mode == own:
                patience = _WANTED
            if mode == choice.mode:
                self._passed_over[mode], self._patience[mode] = 0, _LOOK_AGAIN[0]
            elif mode == "recompute" and not self._doubted(seconds, choice.mode):
                self._passed_over[mode] = 0
            elif self._passed_over[mode] < patience:
                self._passed_over[mode] += 1
            else:
                n = self._passed_over[mode]
                most = _most_patience(seconds[mode], seconds[choice.mode])
                self._passed_over[mode], self._patience[mode] = 0, min(2 * n, most)
                if mode in self._reads:
                    self._reads[mode].age(n)
                return Choice(mode, f"{mode}: measured again, not taken for {n} requests")
        return choice

    def _doubted(self, seconds: Mapping[str, float | None], chosen: str) -> bool:
        """Whether recomputing may be the cheapest after all, because few forwards have told what it
        costs: prompts that hit do not measure it, and a process's first forward is a slow one.
        Before the first, its cost is derived from the few tokens that hits compute, which gives
        many times too much a token."""
        cost, best = seconds.get("recompute"), seconds.get(chosen)
        n_samples = self._forwards["recompute"].n_samples
        if n_samples >= _KNOWN or not cost or not best:
            return False
        return n_samples == 0 or cost < _too_much(n_samples) * best


def _most_patience(seconds: float | None, best: float | None) -> int:
    """How many times a mode may be passed over before it is measured again, at most."""
    if not seconds or not best:
        return _LOOK_AGAIN[1]
    return max(_LOOK_AGAIN[1], round((seconds / best - 1) / _LOOK_SHARE))


def _too_much(n_samples: int) -> float:
    """How many times the true cost so many forwards may suggest, the first of which was slow."""
    weights = _DECAY ** np.arange(n_samples)
    return float(1 + (_FIRST_IS_SLOWER - 1) * weights[-1] / weights.sum())


def decide(
    own: str, allowed: Collection[str], seconds: Mapping[str, float | None], *,
    n_reads: int = _KNOWN,
) -> Choice:  # fmt: skip
    """The cheapest of the allowed modes, where that gains enough; else the policy's own.

    The policy's own too while its cost is not known; `n_reads` of it are. Of equal ones the earlier
    in MODES.
    """
    known = {mode: s for mode in MODES if mode in allowed and (s := seconds.get(mode)) is not None}
    costs = ", ".join(f"{mode} {s * 1e3:.1f} ms" for mode, s in known.items())
    if own not in known or len(known) < 2:
        why = f"not all rates are known ({costs})" if costs else "no rates are known yet"
        return Choice(own, f"{own}: the policy's own, {why}")
    best = min(known, key=lambda mode: known[mode])
    gain = known[own] - known[best]
    share = _LEAST_GAIN_SHARE if n_reads >= _KNOWN else _FIRST_GAIN_SHARE / max(n_reads, 1)
    if gain < max(_LEAST_GAIN_S, share * known[best]):
        return Choice(own, f"{own}: the policy's own, nothing else gains enough ({costs})")
    return Choice(best, f"{best}: cheapest by estimate ({costs})")


def forced(mode: str, own: str) -> Choice:
    """A mode set by Config, as far as the policy allows: sparse is exact where it chooses none."""
    taken = own if mode == "sparse" else mode
    return Choice(taken, f"{taken}: Config.mode is {mode!r}")
