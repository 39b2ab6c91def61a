"""What the caches are for: what is important of all prefixes, or the whole of those that are asked
for most. Which of the two is cheaper is found by trying.

    chosen rows of all ──a gain is likely──> hot prefixes are read whole, others as is cheapest
                       <──it is not there───

The caches follow what is read, some tens of requests later. Until then a single request that reads
everything tells little: of a hot prefix half is not there, and what was read is being copied up.

Pure arithmetic, as `choice`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np

from impress.engines.costs import Span
from impress.usage.remembered import HALF_LIFE

#: Spans of which uses are known, and prefixes whose bytes are; others are forgotten, those of the
#: fewest uses first, or asked for longest ago.
_MOST: Final = 4096
#: Requests by which it is decided, at least; those before count for less, each by a 64th.
_ENOUGH: Final = 32
_DECAY: Final = 1 - 1 / 64
#: Requests until the caches have followed; and until it may be seen that there is no hope.
_SETTLE: Final = 48
_GIVE_UP: Final = 16
_TRY: Final = 1.1
_GAIN: Final = 0.02
#: Else it is tried again after so many times as many requests.
_AGAIN: Final = 8


class IfWhole:
    """What caches would hold if each request read all rows of its prefix."""

    def __init__(self, *, by_last_use: bool = False) -> None:
        """`by_last_use`: what was not used for longest goes first; else what is used least."""
        self._by_last_use = by_last_use
        self._tick = 0
        self._at: dict[int, int] = {}  # span -> its place in the arrays
        self._ids = np.zeros(_MOST, dtype=np.int64)
        self._bytes = np.zeros(_MOST)
        self._rank = np.full(_MOST, -np.inf)  # log2 of uses, what fades added back

    def note(self, spans: Sequence[Span]) -> None:
        """A request asked for a prefix."""
        self._tick += 1
        now = self._tick / HALF_LIFE
        for span_id, n_bytes in dict(spans).items():
            i = self._place(span_id)
            uses = 1.0 if self._by_last_use else 1 + 2 ** (self._rank[i] - now)
            self._rank[i] = np.log2(uses) + now
            self._bytes[i] = max(self._bytes[i], n_bytes)

    def cold(self, spans: Sequence[Span], cache_bytes: int) -> int:
        """Of their bytes: those that caches of so many would not hold."""
        cold, n = 0, len(self._at)
        for span in spans:
            i = self._at.get(span.id)
            rank = -np.inf if i is None else self._rank[i]
            above = int(self._bytes[:n] @ (self._rank[:n] > rank))
            cold += span.n_bytes - min(max(cache_bytes - above, 0), span.n_bytes)
        return cold

    def _place(self, span_id: int) -> int:
        """Where a span stands in the arrays, from now on."""
        i = self._at.get(span_id)
        if i is not None:
            return i
        i = len(self._at)
        if i == _MOST:
            i = int(self._rank.argmin())
            del self._at[int(self._ids[i])]
        self._ids[i], self._bytes[i], self._rank[i] = span_id, 0, -np.inf
        self._at[span_id] = i
        return i


class Regime:
    """Whether hot prefixes are read whole: by what requests cost so, and would otherwise."""

    def __init__(self) -> None:
        self.whole = False
        self._wait = _ENOUGH  # requests until it may turn
        self._n = 0
        self._so_s = self._other_s = 0.0
        self._chosen: OrderedDict[tuple[Span, ...], int] = OrderedDict()

    def tally(self, so_s: float, other_s: float, hoped_s: float) -> bool:
        """A request takes `so_s` now, and would take `other_s` in the other regime; `hoped_s`: in
        this one, once the caches have followed. True: it has turned, and the next is for the other.
        """
        self._n += 1
        if self._n == 1:
            self._so_s = self._other_s = 0.0
        self._so_s = _DECAY * self._so_s + (so_s if self._n > 0 else hoped_s)
        self._other_s = _DECAY * self._other_s + other_s
        if not self._is_over():
            return False
        if self.whole:
            self._wait *= _AGAIN
        self.whole = not self.whole
        self._n, self._so_s, self._other_s = -_SETTLE, 0.0, 0.0
        return True

    def _is_over(self) -> bool:
        if not self.whole:
            return self._n >= self._wait and self._other_s < _TRY * self._so_s
        n = self._n if self._n > 0 else self._n + _SETTLE
        if n < _ENOUGH or self._n <= 0:  # what was hoped for is known better by now
            return n >= _GIVE_UP and self._so_s > _TRY * self._other_s
        gain = _GAIN if n == _ENOUGH else 0.0
        return self._so_s > (1 - gain) * self._other_s

    def note_chosen(self, spans: tuple[Span, ...], cold_bytes: int) -> None:
        """So much of a prefix no cache holds while rows of all are chosen."""
        self._chosen[spans] = cold_bytes
        self._chosen.move_to_end(spans)
        if len(self._chosen) > _MOST:
            self._chosen.popitem(last=False)

    def chosen(self, spans: tuple[Span, ...]) -> int | None:
        """What was noted of it last; None: nothing."""
        return self._chosen.get(spans)
