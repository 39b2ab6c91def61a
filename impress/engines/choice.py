"""Load or recompute: the cheapest way to a first token, by what requests cost on this machine.

    requests done ─note─> Rates ─estimate─> ms of each mode ─decide─> Choice

Pure arithmetic: no clock is read here, so the same requests lead to the same choices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

#: Ways to a prefix's keys and values: chosen rows of it, all of them, or the model.
MODES: Final = ("sparse", "exact", "recompute")
#: What a sample still counts for when the next one has come.
_DECAY: Final = 0.8
#: Choices against a mode after which its rates are too old to go by: it is then measured again.
_FORGOTTEN_AFTER: Final = 64
#: The policy's own mode is left only for a gain of both: estimates of small things are noise, and
#: a caller who named a mode is surprised by another.
_LEAST_GAIN_S: Final = 0.05
_LEAST_GAIN_SHARE: Final = 0.05
#: Below this share of the full determinant, samples are too alike to tell calls from amounts.
_LEAST_SPREAD: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Choice:
    """A mode, and one line that says why."""

    mode: str
    why: str


@dataclass(slots=True)
class Fit:
    """seconds = calls·a + amount·b, by least squares; later samples count for more."""

    n_samples: int = 0
    _sums: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def note(self, calls: float, amount: float, seconds: float) -> None:
        """One sample: what was asked for, and how long it took."""
        new = (calls * calls, calls * amount, amount * amount, calls * seconds, amount * seconds)
        cc, ca, aa, cs, as_ = (_DECAY * old + x for old, x in zip(self._sums, new, strict=True))
        self._sums = (cc, ca, aa, cs, as_)
        self.n_samples += 1

    def seconds(self, calls: float, amount: float) -> float | None:
        """The estimate; None before the first sample."""
        if not self.n_samples:
            return None
        a, b = self._costs()
        return calls * a + amount * b

    def _costs(self) -> tuple[float, float]:
        """Seconds of a call and of a unit, neither below zero.

        Samples that are all alike tell only the sum: all of it then goes to the amount.
        """
        cc, ca, aa, cs, as_ = self._sums
        spread = cc * aa - ca * ca
        if spread > _LEAST_SPREAD * cc * aa:
            a, b = (cs * aa - as_ * ca) / spread, (as_ * cc - cs * ca) / spread
            if a >= 0 and b >= 0:
                return a, b
            if b < 0:
                return max(cs / cc, 0.0), 0.0
        return (0.0, max(as_ / aa, 0.0)) if aa else (max(cs / cc, 0.0) if cc else 0.0, 0.0)


@dataclass(slots=True)
class Rates:
    """What an engine's requests have cost. For one thread.

    Reads are fitted as they were waited for, so what a forward hides of them costs nothing. Tiers
    are not told apart: the figures follow what recent reads were like.
    """

    _prefill: Fit = field(default_factory=Fit)
    _reads: dict[str, Fit] = field(default_factory=lambda: {"sparse": Fit(), "exact": Fit()})
    _moved_share: float = 1.0  # bytes a sparse request moved ÷ exact's, exponentially weighted
    _passed_over: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODES, 0))

    def note_prefill(self, n_tokens: int, seconds: float) -> None:
        """A dense forward of n_tokens took so long, without what it waited for reads."""
        self._prefill.note(1, n_tokens, seconds)

    def note_read(
        self, mode: str, n_layers: int, n_bytes: int, exact_bytes: int, seconds: float
    ) -> None:
        """A prefix of exact_bytes was read in a mode: n_bytes moved, for n_layers requests."""
        if mode == "sparse":
            share, known = n_bytes / exact_bytes, self._reads[mode].n_samples
            self._moved_share += (share - self._moved_share) * ((1 - _DECAY) if known else 1.0)
        self._reads[mode].note(n_layers, n_bytes, seconds)
        self._passed_over[mode] = 0

    def estimate(
        self, n_tokens: int, hit_tokens: int, n_layers: int, exact_bytes: int
    ) -> dict[str, float | None]:
        """Seconds to the first token in each mode; None where too little is known."""
        known: dict[str, float | None] = {"recompute": self._prefill.seconds(1, n_tokens)}
        rest = self._prefill.seconds(1, n_tokens - hit_tokens)
        for mode, share in (("sparse", self._moved_share), ("exact", 1.0)):
            read = self._reads[mode].seconds(n_layers, share * exact_bytes)
            old = self._passed_over[mode] >= _FORGOTTEN_AFTER
            known[mode] = None if rest is None or read is None or old else rest + read
        return known

    def count(self, chosen: str) -> None:
        """A mode was chosen, the others passed over."""
        for mode in MODES:
            self._passed_over[mode] += mode != chosen


def decide(own: str, allowed: Collection[str], seconds: Mapping[str, float | None]) -> Choice:
    """The cheapest of the allowed modes, where that gains enough; else the policy's own.

    The policy's own too while its cost is not known. Of equal ones the earlier in MODES.
    """
    known = {mode: s for mode in MODES if mode in allowed and (s := seconds.get(mode)) is not None}
    costs = ", ".join(f"{mode} {s * 1e3:.1f} ms" for mode, s in known.items())
    if own not in known or len(known) < 2:
        return Choice(own, f"{own}: the policy's own, not all rates are known ({costs or 'none'})")
    best = min(known, key=lambda mode: known[mode])
    gain = known[own] - known[best]
    if gain < max(_LEAST_GAIN_S, _LEAST_GAIN_SHARE * known[best]):
        return Choice(own, f"{own}: the policy's own, nothing else gains enough ({costs})")
    return Choice(best, f"{best}: cheapest by estimate ({costs})")


def forced(mode: str, own: str) -> Choice:
    """A mode set by Config, as far as the policy allows: sparse is exact where it chooses none."""
    taken = own if mode == "sparse" else mode
    return Choice(taken, f"{taken}: Config.mode is {mode!r}")
