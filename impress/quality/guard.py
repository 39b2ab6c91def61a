"""Whether a policy has earned the right to choose rows: a ledger of requests whose true missing
mass is known.

    earning ─n clean shadows in a row→ trusted ─bound over the last n too high→ exact ─n clean…→ …
    exact answers, each a shadow       a share of requests a shadow             as earning

A *shadow* is a request whose chosen rows were weighed against all keys; it is *clean* when the
softmax weight left out, in the worst layer, is within the target plus a tolerance. That is over the
prompt's new tokens, not the answer's, which attend to the same rows. Pure: counts and masses in,
decisions out; no clock and no chance, so the same requests leave the same ledger.

The statistic is the share of requests that are not clean, its upper limit the one-sided 95 %
Clopper-Pearson bound. Not the mean mass: a selector told to miss at most a tenth misses nearly
that, and a bound on the mean of 300 (empirical Bernstein's adds .04) would never be under a target
that the mean is aimed at. Not Wilson's or a normal approximation: they are worst where it matters,
at no or few exceedances. The exact limit needs no model of the masses, only requests that are
alike. 300 clean ones in a row rule out shares above 1 %; trust ends when the bound over the last
300 is above twice that: at the second that is not clean, not at the first.

The confidence is in the 300, not in being trusted: any 300 in a row will do, and each shadow may
complete such a row. A policy with 1 % of requests not clean is trusted within its first 600 shadows
in one case of five, and after 1,939 on average; at 2 %, after 21,400. Such policies are left to the
watch. Nor is it known whether requests are alike: 300 repeats of one prompt count as 300.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

State = Literal["earning", "trusted", "exact"]
STATES: Final[tuple[State, ...]] = ("earning", "trusted", "exact")

#: One in this many shadows of trusted requests is run again exactly, whole.
RERUN_EVERY: Final = 20
#: 1 − confidence of the bound.
_DOUBT: Final = 0.05
#: The bound that ends trust ÷ the bound that n clean shadows in a row give.
_SLACK: Final = 2.0
#: Trust not earned in this many times the shadows needed may never be: no request is slowed for it.
_TRIES: Final = 2
#: Allowed over the target, as a share of it: a sketch has an error (measured in docs/SELECTION.md),
#: and bfloat16 rows round.
_TOLERANCE: Final = 0.5
_LEAST_TOLERANCE: Final = 0.01
#: A true mass this far over its estimate is more than rounding.
_ROUNDING: Final = 1e-3


class Decision(NamedTuple):
    """How a guarded request is served. `rerun` only for a sparse shadow.

    `wanted`: for its shadow this mode is taken now and then even where another is faster.
    """

    mode: Literal["exact", "sparse"]
    shadow: bool
    rerun: bool = False
    wanted: bool = False


class Weighed(NamedTuple):
    """A shadow: the true missing mass of its worst layer, and what its selector made of it.

    Both for the mean head or for the worst one, as the policy bounds it. `estimate`: the true mass
    less the most by which a layer was over its own estimate; nan if a layer has none.
    """

    true_mass: float
    estimate: float


class Rerun(NamedTuple):
    """A sparse answer against the exact one: nats between first tokens, tokens that differ."""

    kl: float
    n_flips: int
    n_compared: int


@dataclass(slots=True)
class Ledger:
    """The ledger of one policy in one namespace. Not thread-safe."""

    target: float
    """Missing mass that a request may have, mean over its query rows."""
    n_wanted: int
    """Clean shadows that earn trust; also how many of the last ones the bound is taken over."""
    state: State = "earning"
    n_requests: int = 0
    n_shadows: int = 0
    n_exceeded: int = 0
    n_understated: int = 0  # the truth was over the estimate, where that is of the same rows
    n_dropped: int = 0  # came to nothing: machine busy, device full, prefix gone, all rows taken
    n_sent_back: int = 0
    worst_mass: float = 0.0
    n_reruns: int = 0
    worst_kl: float = 0.0
    n_flips: int = 0
    n_compared: int = 0
    recent: deque[bool] = field(default_factory=deque)
    """Whether each of the last shadows in this state was over; at most n_wanted."""
    n_before: int = 0
    """Shadows and dropped ones before it was last sent back: tries are counted from there."""

    @property
    def most_mass(self) -> float:
        """A shadow with more missing mass is not clean."""
        return self.target + max(_TOLERANCE * self.target, _LEAST_TOLERANCE)

    @property
    def n_clean(self) -> int:
        """Clean shadows since the last one that was not."""
        return next((i for i, over in enumerate(reversed(self.recent)) if over), len(self.recent))

    @property
    def bound(self) -> float:
        """Upper limit of the share of requests that are not clean, over the recent shadows."""
        return upper_limit(sum(self.recent), len(self.recent))

    @property
    def most_bound(self) -> float:
        """Trust ends when `bound` is above it. It is below 1, however few shadows are wanted."""
        return min(_SLACK * upper_limit(0, self.n_wanted), 1 - _DOUBT / 2)

    def decide(self, share: float, salt: bytes = b"") -> Decision:
        """How to serve the next request. A `share` of trusted ones are shadows, drawn by a hash."""
        self.n_requests += 1
        if self.state != "trusted":
            n_tries = self.n_shadows + self.n_dropped - self.n_before
            wanted = n_tries < _TRIES * self.n_wanted
            return Decision("exact", shadow=True, wanted=wanted)
        shadow, again = _drawn(self.n_requests, salt)
        watched = shadow < share
        return Decision("sparse", watched, watched and again < 1 / RERUN_EVERY)

    def note(self, weighed: Weighed) -> str:
        """Count one shadow. Returns one line if it changed the state, else ""."""
        mass, estimate = weighed
        over = not mass <= self.most_mass  # nan: not known is not clean
        self.n_shadows += 1
        self.n_exceeded += over
        self.n_understated += not math.isnan(estimate) and not mass <= estimate + _ROUNDING
        self.worst_mass = max(self.worst_mass, 1.0 if math.isnan(mass) else mass)
        self.recent.append(over)
        while len(self.recent) > self.n_wanted:
            self.recent.popleft()
        if self.state != "trusted":
            return self._trust() if self.n_clean >= self.n_wanted else ""
        return self._send_back() if self.bound > self.most_bound else ""

    def note_rerun(self, rerun: Rerun) -> None:
        """What the exact answer says about a sparse one. It is shown but decides nothing: a bound
        on missing mass is not one on answers."""
        self.n_reruns += 1
        self.worst_kl = max(self.worst_kl, rerun.kl)
        self.n_flips += rerun.n_flips
        self.n_compared += rerun.n_compared

    def said(self) -> str:
        """The state, in a few words."""
        if self.state == "trusted":
            return "trusted"
        what = "earning" if self.state == "earning" else "sent back to exact, earning"
        return f"{what}: {self.n_clean} of {self.n_wanted} clean shadows"

    def _trust(self) -> str:
        self.state = "trusted"
        return (
            f"trusted after {self.n_wanted} clean shadows in a row: sparse from now on; up to "
            f"{self.bound:.2%} of requests miss more than {self.most_mass:g} (95 % limit of these "
            f"{self.n_wanted})"
        )

    def _send_back(self) -> str:
        n_over, n, bound = sum(self.recent), len(self.recent), self.bound
        self.state = "exact"
        self.n_sent_back += 1
        self.n_before = self.n_shadows + self.n_dropped
        self.recent.clear()
        return (
            f"back to exact: {n_over} of the last {n} shadows missed more than {self.most_mass:g} "
            f"(up to {bound:.2%} of requests do, allowed are {self.most_bound:.2%}); "
            f"sparse again after {self.n_wanted} clean ones in a row"
        )


def upper_limit(n_over: int, n: int) -> float:
    """The one-sided 95 % Clopper-Pearson limit of a share seen n_over times in n; 1 where n is 0.

    The largest p under which n_over or fewer would be seen in one case of twenty.
    """
    if n_over >= n:
        return 1.0
    low, high = n_over / n, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _at_most(n_over, n, middle) > _DOUBT:
            low = middle
        else:
            high = middle
    return high


def _at_most(k: int, n: int, p: float) -> float:
    """P(X ≤ k) for X binomial(n, p), 0 < p < 1."""
    total, log_p, log_q = 0.0, math.log(p), math.log1p(-p)
    for i in range(k + 1):
        ways = math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1)
        total += math.exp(ways + i * log_p + (n - i) * log_q)
    return total


def _drawn(number: int, salt: bytes) -> tuple[float, float]:
    """Two numbers in [0, 1), the same for the same request of the same ledger."""
    raw = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16, key=salt[:64]).digest()
    first, second = (int.from_bytes(raw[at : at + 8], "little") for at in (0, 8))
    return first / 2**64, second / 2**64
