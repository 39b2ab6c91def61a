"""What the caches are for: the important rows of all prefixes, or all rows of those asked for most.
Which of the two is cheaper is found by trying.

    chosen rows of all ──a gain is likely──> hot prefixes are read whole, others as is cheapest
                       <──it is not there───

The caches follow what is read, some tens of requests later. Until then a single request that reads
everything tells little: half of a hot prefix is not there, and what was read is being copied up.

Pure arithmetic, like `choice`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from impress.engines.costs import MOST_SURPRISE, Span
from impress.usage.remembered import HALF_LIFE

#: Spans whose uses are known, and prefixes whose bytes are; beyond that, those with the fewest
#: uses, or asked for longest ago, are forgotten first.
_MOST: Final = 4096
#: Least requests for a decision; earlier ones count for less, each by a 64th.
_ENOUGH: Final = 32
_DECAY: Final = 1 - 1 / 64
#: Requests until caches that are empty have filled, and what requests take no longer falls; until
#: caches have followed a turn; and until a try may be seen to have no hope.
_FILL: Final = 160
_SETTLE: Final = 64
_GIVE_UP: Final = 16
_HOPELESS: Final = 1.25
#: Hot prefixes are read whole where that is expected to take less than this many times what
#: requests take now, the first time (what it takes to read one from the caches is not known before)
#: or after it gained, and after it failed: estimates are off by a tenth and more. This goes on
#: where it turns out to gain the share _GAIN, until it loses as much.
_FIRST_TRY: Final = 1.5
_TRY: Final = 0.9
_GAIN: Final = 0.02
#: Otherwise it is tried again after this many times as many requests, up to _MOST of them; at once
#: where it gained for _LONG requests. After _MOST requests the other is looked at again.
_AGAIN: Final = 8
_LONG: Final = 256
#: Requests that a try may take to show it, while it loses no more than this share; the fewer they
#: are, the more: n of them say it as well as one by the root of n.
_UNDECIDED: Final = 96
_DOUBT: Final = 0.05
#: Requests for a prefix whose mean is what it takes; and estimates (which follow the machine
#: themselves) whose mean says whether it has become slower.
_OWN: Final = 4
_NEWEST: Final = 4


class IfWhole:
    """What caches would hold if each request read all rows of its prefix; and whether a read that
    takes longer than recomputing is made up for by those to come."""

    def __init__(self, *, by_last_use: bool = False) -> None:
        """`by_last_use`: the least recently used goes first; else the least used."""
        self._by_last_use = by_last_use
        self._tick = 0
        self._at: dict[bytes, int] = {}  # key of a span -> its place in the arrays
        self._keys: list[bytes] = []
        self._bytes = np.zeros(_MOST)
        # log2 of uses, with what fades added back: by which spans rank; all; when last spent on.
        self._rank = np.full(_MOST, -np.inf)
        self._uses = np.full(_MOST, -np.inf)
        self._spent = np.full(_MOST, -np.inf)

    def note(self, spans: Sequence[Span]) -> None:
        """A request asked for a prefix."""
        self._tick += 1
        now = self._tick / HALF_LIFE
        for key in {span.key: None for span in spans}:
            i = self._place(key)
            self._uses[i] = np.log2(1 + 2 ** (self._uses[i] - now)) + now
            self._rank[i] = now if self._by_last_use else self._uses[i]
        for span in spans:
            if span.key in self._at:  # else its place is one of the request's own later spans
                i = self._at[span.key]
                self._bytes[i] = max(self._bytes[i], span.n_bytes)

    def cold(self, spans: Sequence[Span], cache_bytes: int) -> int:
        """Bytes of the spans that caches of `cache_bytes` would not hold. Of spans that were used
        equally, the first ones are there first."""
        n = len(self._at)
        order = self._rank[:n].argsort()
        up_to = np.concatenate(([0.0], self._bytes[:n][order].cumsum()))
        ranks = {span.key: self._rank_of(span.key) for span in spans}
        keys = sorted(ranks, key=lambda key: -ranks[key])
        beyond = up_to[-1] - up_to[self._rank[:n][order].searchsorted([*ranks.values()], "right")]
        above, sizes = dict(zip(ranks, beyond.tolist(), strict=True)), dict(spans)
        held, beside, last = dict[bytes, float](), 0.0, np.inf
        for key in keys:
            beside = beside if ranks[key] == last else 0.0  # its own, of the same rank
            held[key] = min(max(cache_bytes - above[key] - beside, 0.0), sizes[key])
            beside, last = beside + sizes[key], ranks[key]
        return sum(span.n_bytes - round(min(held[span.key], span.n_bytes)) for span in spans)

    def pays(self, key: bytes, more_s: float, saved_s: float) -> bool:
        """Whether to read what ends with this span for `more_s` longer than recomputing takes: it
        then lies in the caches, which saves each request to come `saved_s`. As many are expected as
        there were. Once `spend` was told, not before twice as many have come as are left of these.
        """
        i = self._at.get(key)
        if i is None or self._uses[i] < self._spent[i] + 1:
            return False
        return more_s < saved_s * 2 ** float(self._uses[i] - self._tick / HALF_LIFE)

    def spend(self, key: bytes) -> None:
        """It is read because that pays."""
        if (i := self._at.get(key)) is not None:
            self._spent[i] = self._uses[i]

    def _rank_of(self, key: bytes) -> float:
        i = self._at.get(key)
        return -np.inf if i is None else float(self._rank[i])

    def _place(self, key: bytes) -> int:
        """A span's place in the arrays, from now on."""
        i = self._at.get(key)
        if i is not None:
            return i
        i = len(self._at)
        if i < _MOST:
            self._keys[i:] = [key]  # not after one that Ctrl-C left without its place
        else:
            i = int(self._rank.argmin())
            del self._at[self._keys[i]]
            self._keys[i] = key
        self._bytes[i] = 0
        self._rank[i] = self._uses[i] = self._spent[i] = -np.inf
        self._at[key] = i
        return i


class Expected(NamedTuple):
    """Seconds of a request for n_bytes up to the span `last`: `so_s` as it is served now; `other_s`
    in the other regime (None: as noted there); `hoped_s` in this one, once the caches have
    followed. `rest_s`: of each, for its own tokens, which are not always as many."""

    last: Span
    n_bytes: int
    so_s: float
    other_s: float | None
    hoped_s: float
    rest_s: float = 0.0


class Regime:
    """Whether hot prefixes are read whole: by what requests take so, and would take otherwise."""

    def __init__(self) -> None:
        self.whole = False
        self._wait = _ENOUGH  # requests until it may turn
        self._n = -_FILL
        self._so_s = self._other_s = 0.0
        self._failed = False  # when last tried
        # When last tried: what was expected, in times what requests took; and where it failed, how
        # many times that they did take (or were then expected to).
        self._hoped = self._worse = 1.0
        # By prefix, while rows of all were chosen: seconds per byte, without what a request takes
        # for its own tokens; and of all of them together seconds and bytes.
        self._chosen: OrderedDict[Span, float] = OrderedDict()
        self._sum_s = self._sum_bytes = 0.0
        self._follow_anew()

    @property
    def slower(self) -> float:
        """How many times as long requests take as when the regime turned."""
        return self._times / self._times_then if self._times_then else 1.0

    def knows(self, last: Span) -> bool:
        """Whether the prefix up to this span was asked for while rows of all were chosen."""
        return last in self._chosen

    def tally(self, took_s: float, expected: Expected) -> bool:
        """A request took `took_s`. True: the regime has turned, and the next is in the other."""
        self._n += 1
        if self._n == 1:
            self._so_s = self._other_s = 0.0
        took_s = min(took_s, MOST_SURPRISE * expected.so_s)
        other_s = expected.other_s
        if other_s is None:
            mean = self._sum_s / max(self._sum_bytes, 1.0)
            rate = self._chosen.get(expected.last, mean)
            other_s = self.slower * rate * expected.n_bytes + expected.rest_s
        elif self._n > 0:  # the caches have followed
            self._note(expected.last, expected.n_bytes, max(took_s - expected.rest_s, 0.0))
        self._so_s = _DECAY * self._so_s + (took_s if self._n > 0 else expected.hoped_s)
        self._other_s = _DECAY * self._other_s + other_s
        if not self._is_over():
            return False
        times = self._so_s / max(self._other_s, 1e-9)
        if self.whole:
            self._failed = self._n < _LONG
            worse = max(times / max(self._hoped, 1e-9), 1.0)
            self._worse = worse if self._failed else 1.0
            self._wait = min(self._wait * _AGAIN, _MOST) if self._failed else _ENOUGH
        else:
            self._hoped = self._other_s / max(self._so_s, 1e-9)
        self.whole = not self.whole
        self._n, self._so_s, self._other_s = -_SETTLE, 0.0, 0.0
        self._follow_anew()
        return True

    def follow(self, times: float) -> None:
        """To read a prefix from the caches takes `times` as long as before the regime turned. What
        is off once the caches have followed was off in what was known then. (Not reads of cold
        ones: the fewer of their rows are left in the caches, the longer these take.)"""
        if 0 < self._n <= _ENOUGH:
            self._n_then += 1
            self._times_then += (times - self._times_then) / self._n_then
            self._times = self._times_then
        elif self._n_then:
            self._times += (times - self._times) / _NEWEST

    def _follow_anew(self) -> None:
        self._times = self._times_then = 0.0  # now, and once the caches had followed
        self._n_then: int = 0

    def _is_over(self) -> bool:
        if not self.whole:
            if self._n >= _MOST:  # that dates from long ago
                self._worse = 1.0
            most = _TRY if self._failed else _FIRST_TRY
            return self._n >= self._wait and self._worse * self._other_s < most * self._so_s
        lost, n = self._so_s / max(self._other_s, 1e-9), self._n
        if n <= 0:  # what can be hoped for is known better now
            return n + _SETTLE >= _GIVE_UP and lost > _HOPELESS
        if n < _UNDECIDED:
            return n >= _GIVE_UP and lost > 1 + _DOUBT * math.sqrt(_UNDECIDED / n)
        return lost > (1 - _GAIN if n == _UNDECIDED else 1 + _GAIN) or n >= _MOST

    def _note(self, last: Span, n_bytes: int, took_s: float) -> None:
        rate = took_s / n_bytes
        before = self._chosen.get(last, rate)
        self._chosen[last] = before + (rate - before) / _OWN
        self._chosen.move_to_end(last)
        if len(self._chosen) > _MOST:
            self._chosen.popitem(last=False)
        self._sum_s = _DECAY * self._sum_s + took_s
        self._sum_bytes = _DECAY * self._sum_bytes + n_bytes
