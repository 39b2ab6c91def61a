"""Load or recompute: the cheapest way to a first token, by what requests cost on this machine.

    requests done ─note─> Rates ─estimate─> ms of each mode ─decide─> Choice

Pure arithmetic: no clock is read here, so the same requests lead to the same choices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from impress.engines.costs import DECAY, KNOWN, MODES, MOST_AGE, READS, Costs, Fit, Stored
from impress.engines.regime import Expected, IfWhole, Regime

#: A mode that seems slower is measured again after it was passed over this many times: 16 at first,
#: then twice as many each time it still is slower, up to 128; or further, where measuring it
#: every 128 requests would add more than _LOOK_SHARE to what these take. From the second time on
#: it may add _EARLY times that share.
_LOOK_AGAIN: Final = (16, 128)
_LOOK_SHARE: Final = 0.02
_EARLY: Final = 4
#: Times passed over, where the policy's own mode is wanted for more than its time (decision 0011).
_WANTED: Final = 3
#: A prompt over this many times as long as any recomputed one may take what no forward has shown.
_LONGER: Final = 2
#: A process's first forward may take this many times as long as a later one. On a device, where it
#: loads what later ones run, it may be tens of times: there `Rates` does not learn from it.
_FIRST_IS_SLOWER: Final = 4.0
#: The policy's own mode is left for another only where that gains at least this many seconds and at
#: least this share of the other's time: estimates of small things are noise, and a caller who named
#: a mode is surprised by another.
_LEAST_GAIN_S: Final = 0.02
_LEAST_GAIN_SHARE: Final = 0.05
#: The share while only n reads of the own mode are known, n below KNOWN, is this ÷ n instead. Else
#: a first read that happened to meet a stall would decide until the mode is measured again.
_FIRST_GAIN_SHARE: Final = 1.0
#: The shares of requests that read everything above which it is what they do, and below which it no
#: longer is; and the weight of the newest in it.
_NEARLY_ALL: Final = 0.75
_FEWER: Final = 0.5
_NEWEST_SHARE: Final = 1 / 32
#: Reads of everything that are remembered, to know what they take whatever the caches hold.
_WHOLE_READS: Final = 50


@dataclass(frozen=True, slots=True)
class Choice:
    """A mode, and one line that says why. `once`: all rows are read, though requests to come will
    choose again, so that the caches should not keep every row for them."""

    mode: str
    why: str
    once: bool = False


class Rates:
    """What an engine's requests have cost, and how the next ones are served. For one thread."""

    def __init__(self, *, on_device: bool = False, by_last_use: bool = False) -> None:
        """`by_last_use`: the caches drop what was least recently used first."""
        self._on_device = on_device
        self._costs = Costs()
        self._longest = 0  # tokens of the longest prompt that was recomputed
        # By mode, and whether the prefix was cold.
        self._passed_over: dict[tuple[str, bool], int] = {}
        self._patience: dict[tuple[str, bool], int] = {}
        self._begun = set[str]()  # modes that ran on the device
        self._regime = Regime()
        self._if_whole = IfWhole(by_last_use=by_last_use)
        # Fits reads of everything, with a longer memory: the few made while rows are chosen are too
        # alike to tell what a read takes that finds all of it in the caches.
        self._whole_reads = Fit(3, 1 - 1 / _WHOLE_READS)
        self._before = self._costs  # as they were when the regime turned
        # Of requests lately, in the first regime; and whether it is what they do.
        self._exact_share, self._all_exact = 0.0, False
        # The mode of the request under way and its costs, where it counts in the regime.
        self._expected: tuple[str, Expected] | None = None

    def note_forward(self, mode: str, n_tokens: int, seconds: float) -> None:
        """A request computed n_tokens and took `seconds`, reads not counted.

        On a device the first request in each mode tells nothing: it loads kernels and makes their
        libraries ready.
        """
        if self._on_device and mode not in self._begun:
            self._begun.add(mode)
            self._expected = None
            return
        self._costs.forwards[mode].note((1, n_tokens), seconds)
        if mode == "recompute":
            self._longest = max(self._longest, n_tokens)

    def note_read(self, mode: str, stored: Stored, seconds: float) -> None:
        """A prefix was read in a mode, and the request waited `seconds` for it."""
        self._costs.reads[mode].note(stored.amounts, seconds)
        if mode == "exact":
            self._whole_reads.note(stored.amounts, seconds)

    def note_late(self, mode: str, stored: Stored, seconds: float) -> None:
        """A read came too late: trying it took so many seconds, until all was computed instead. It
        is believed without waiting for others: where the disk stays slow, each takes as long."""
        for fit in (self._costs.reads[mode], *([self._whole_reads] if mode == "exact" else ())):
            fit.age(MOST_AGE)
            fit.note(stored.amounts, seconds, is_sure=True)

    def note_request(self, mode: str, seconds: float) -> None:
        """The last request that was chosen for took `seconds` to its first token; to be noted after
        its forward and its read. Where it was served in another mode, it tells nothing."""
        noted, self._expected = self._expected, None
        if noted is None or noted[0] != mode:
            return
        if self._regime.tally(seconds, noted[1]):
            self._exact_share, self._all_exact = 0.0, False
            if self._regime.whole:
                self._before = deepcopy(self._costs)

    def estimate(self, n_tokens: int, stored: Stored) -> dict[str, float | None]:
        """Seconds to the first token of n_tokens in each mode; None where too little is known."""
        return self._costs.estimate(n_tokens, stored)

    def choose(
        self, own: str, n_tokens: int, stored: Stored, *, own_is_wanted: bool = False
    ) -> Choice:
        """The mode for a request, as `decide` says, or as the regime does where hot prefixes are
        read whole; except that a mode passed over for long is taken, to be measured again.

        Effects: counts modes passed over, and what the caches would hold. `own_is_wanted`: the
        policy's own mode is wanted for more than its time, so it waits for _WANTED at most.
        """
        self._expected = None
        allowed = {own, "exact", "recompute"}
        seconds = self.estimate(n_tokens, stored)
        reads = self._costs.reads.get(own)
        choice = decide(own, allowed, seconds, n_reads=reads.n_samples if reads else KNOWN)
        pays = choice.mode == "recompute" and self._pays(own, n_tokens, stored, seconds)
        if pays:
            choice = Choice(own, f"{own}: it pays to have it in the caches ({choice.why})")
        if stored.spans and stored.cache_bytes:
            if own == "sparse":
                choice = self._by_regime(choice, n_tokens, stored, seconds)
            self._if_whole.note(stored.spans)
        for mode in sorted(allowed):
            # Reads of cold prefixes apart: a warm one says nothing about what they take.
            key = mode, mode in READS and stored.cold_bytes > 0
            wait = self._patience.get(key, _LOOK_AGAIN[0])
            patience = _patience(wait, seconds.get(mode), seconds.get(choice.mode))
            if own_is_wanted and mode == own:
                patience = _WANTED
            if mode == choice.mode:
                self._passed_over[key], self._patience[key] = 0, _LOOK_AGAIN[0]
            elif mode == "recompute" and not self._doubted(n_tokens, seconds, choice.mode):
                continue
            elif (n := self._passed_over.get(key, 0)) < patience:
                self._passed_over[key] = n + 1
            else:
                self._passed_over[key], self._patience[key] = 0, 2 * n
                if mode in self._costs.reads:
                    self._costs.reads[mode].age(n)
                self._expected = None  # tells nothing about how requests are served
                once = mode == "exact" != own
                return Choice(mode, f"{mode}: measured again, not taken for {n} requests", once)
        if pays:
            self._if_whole.spend(stored.spans[-1].key)
        return choice

    def _pays(
        self, own: str, n_tokens: int, stored: Stored, seconds: Mapping[str, float | None]
    ) -> bool:
        """Whether to read a cold prefix in the own mode though recomputing takes less: it would be
        recomputed time and again, since what is not read never comes to lie in the caches. In the
        second regime that goes by what the caches would hold."""
        read_s, recompute_s = seconds.get(own), seconds.get("recompute")
        if read_s is None or recompute_s is None or not (stored.spans and stored.cache_bytes):
            return False
        if own == "sparse" and self._regime.whole:
            return False
        warm_s = self.estimate(n_tokens, replace(stored, cold_bytes=0))[own] or 0.0
        key = stored.spans[-1].key
        return self._if_whole.pays(key, read_s - recompute_s, recompute_s - warm_s)

    def _by_caches(self, choice: Choice) -> Choice:
        """The choice in the first regime. What is read whole there is so `once`: it would else stay
        in the caches whole, at the cost of others' chosen rows, and so be read whole again. But
        what nearly all requests do is done for those to come, too.

        Effects: counts it.
        """
        is_exact = choice.mode == "exact"
        self._exact_share += (is_exact - self._exact_share) * _NEWEST_SHARE
        self._all_exact = self._exact_share > (_FEWER if self._all_exact else _NEARLY_ALL)
        return replace(choice, once=is_exact and not self._all_exact)

    def _by_regime(
        self, choice: Choice, n_tokens: int, stored: Stored, seconds: Mapping[str, float | None]
    ) -> Choice:
        """The choice as it is, made by what the caches hold; in the regime where hot prefixes are
        read whole, the cheapest mode under it.

        Effects: notes what is expected of it in this regime, and would be in the other.
        """
        now, regime = _known(seconds), self._regime
        if not regime.whole:
            choice = self._by_caches(choice)
        if len(now) < len(MODES):
            return choice
        if not regime.whole and (self._all_exact or now[choice.mode] < _LEAST_GAIN_S):
            return choice  # it is as in the other, or so much cannot be gained
        cold = self._if_whole.cold(stored.spans, stored.cache_bytes)
        costs = self._hoped(n_tokens, replace(stored, cold_bytes=cold))
        if hot := 2 * cold < stored.n_bytes:  # read by chosen rows, it would not be in the caches
            costs.pop("sparse", None)
            best = min(costs, key=lambda mode: costs[mode])
        else:
            best = decide("sparse", MODES, costs).mode
        last, n_bytes = stored.spans[-1], stored.n_bytes
        rest_s = self._costs.forward("exact", n_tokens - stored.n_tokens) or 0.0
        if not regime.whole:
            so_s = now[choice.mode]
            expected = Expected(last, n_bytes, so_s, costs[best], so_s, rest_s)
            self._expected = choice.mode, expected
            return choice
        if now[best] < _LEAST_GAIN_S and not regime.knows(last):
            return choice  # the other regime noted none such, and this one could gain too little
        self._expected = best, Expected(last, n_bytes, now[best], None, costs[best], rest_s)
        warm = replace(stored, cold_bytes=0)
        if best == "exact" and (before := self._before.estimate(n_tokens, warm)["exact"]):
            regime.follow((self.estimate(n_tokens, warm)["exact"] or 0.0) / before)
        told = ", ".join(f"{mode} {costs[mode] * 1e3:.1f} ms" for mode in MODES if mode in costs)
        why = f"{best}: the caches hold whole what is asked for most ({told})"
        return Choice(best, why, once=best == "exact" and not hot)

    def _hoped(self, n_tokens: int, stored: Stored) -> dict[str, float]:
        """What it would take in each mode, with `stored.cold_bytes` of it in no cache."""
        costs = _known(self.estimate(n_tokens, stored))
        late = self._costs.reads["exact"].seconds(stored.amounts)
        long = self._whole_reads.seconds(stored.amounts)
        if late is not None and long is not None:
            costs["exact"] += long - late
        return costs

    def _doubted(self, n_tokens: int, seconds: Mapping[str, float | None], chosen: str) -> bool:
        """Whether recomputing may be the cheapest after all, because few forwards have told what it
        costs: prompts that hit do not measure it, and a process's first forward is a slow one.
        Before the first, its cost is derived from the few tokens that hits compute, which gives
        many times too much per token; so do much shorter prompts that are all of one length."""
        cost, best = seconds.get("recompute"), seconds.get(chosen)
        n_samples = self._costs.forwards["recompute"].n_samples
        if not cost or not best:
            return False
        if n_samples == 0 or n_tokens > _LONGER * self._longest:
            return True
        return n_samples < KNOWN and cost < _too_much(n_samples) * best


def _known(seconds: Mapping[str, float | None]) -> dict[str, float]:
    return {mode: s for mode, s in seconds.items() if s is not None}


def _patience(n: int, seconds: float | None, best: float | None) -> int:
    """How many times a mode may be passed over before it is measured again, where `n` was due: by
    what it is known to take now, which the last look may have told."""
    if n == _LOOK_AGAIN[0]:  # a first estimate is no reason to wait
        return n
    most = _LOOK_AGAIN[1]
    if seconds and best:
        most = max(most, round((seconds / best - 1) / _LOOK_SHARE))
    return min(max(n, most // _EARLY), most)


def _too_much(n_samples: int) -> float:
    """How many times the true cost n_samples forwards may suggest, the first of which was slow."""
    weights = DECAY ** np.arange(n_samples)
    if n_samples > 1:
        weights[-1] *= DECAY**MOST_AGE
    return float(1 + (_FIRST_IS_SLOWER - 1) * weights[-1] / weights.sum())


def decide(
    own: str, allowed: Collection[str], seconds: Mapping[str, float | None], *,
    n_reads: int = KNOWN,
) -> Choice:  # fmt: skip
    """The cheapest of the allowed modes, where that gains enough; else the policy's own.

    Also the policy's own while its cost is not known; `n_reads` of its reads are known. Of equal
    ones the earlier in MODES.
    """
    known = {mode: s for mode in MODES if mode in allowed and (s := seconds.get(mode)) is not None}
    costs = ", ".join(f"{mode} {s * 1e3:.1f} ms" for mode, s in known.items())
    if own not in known or len(known) < 2:
        why = f"not all rates are known ({costs})" if costs else "no rates are known yet"
        return Choice(own, f"{own}: the policy's own, {why}")
    best = min(known, key=lambda mode: known[mode])
    gain = known[own] - known[best]
    share = _LEAST_GAIN_SHARE if n_reads >= KNOWN else _FIRST_GAIN_SHARE / max(n_reads, 1)
    if gain < max(_LEAST_GAIN_S, share * known[best]):
        return Choice(own, f"{own}: the policy's own, nothing else gains enough ({costs})")
    return Choice(best, f"{best}: cheapest by estimate ({costs})")


def forced(mode: str, own: str) -> Choice:
    """A mode set by Config, as far as the policy allows: sparse is exact if no rows are chosen."""
    taken = own if mode == "sparse" else mode
    return Choice(taken, f"{taken}: Config.mode is {mode!r}")
