"""What requests have shown of a span: how often each row was chosen, how often each chunk was used.

    request ends ─notes→ History ─> average (order of a repack) · worth (which copies stay)
                            │ committer, now and then
                            └─> index, database `history`

Time is the number of requests noted, never a clock: the same requests leave the same history.
Before a request's first token only averages are asked for, by a session that reads ahead.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt

from impress.errors import FormatError, StoreFailed
from impress.usage.notes import Floats, Ids, Note, Worth
from impress.usage.remembered import Remembered, decode, encode, faded, head_of, ranks_of

#: Requests between two saves in the background.
SAVE_EVERY: Final = 256
MOST_DUMPED: Final = 32 << 20  # bytes that one `dump` compresses, for which stores wait
#: A sixty-fourth of the DRAM budget, at least 4 MiB: four bytes a row and layer are .1 % of the KV
#: where a row has 4 KiB.
SHARE: Final = 64
LEAST_BYTES: Final = 4 << 20


class History:
    """Thread-safe. Holds at most budget_bytes; of spans that are saved, those noted longest ago go
    first. Nothing is learnt of a span that is larger than the whole budget.
    """

    def __init__(
        self, n_layers: int, window: int, budget_bytes: int,
        fetch: Callable[[int], bytes | None] = lambda span: None, tick: int = 0,
        ahead: Callable[[int], int] = lambda span: 0,
        saves: Callable[[int], bool] = lambda span: True,
    ) -> None:  # fmt: skip
        """`fetch`: a span's saved value, or None; asked when the span is first wanted.
        `ahead`: how many requests ahead this is of the shard that saved it: each counts its own.
        `saves`: whether a span's value is saved by this process, not by the writer of its shard.
        """
        self.tick = tick
        """Requests noted so far, by this process and those before it."""
        self.used_bytes = 0
        self._n_layers, self._window = self._shape = n_layers, window
        self._budget_bytes = budget_bytes
        self._fetch = fetch
        self._ahead = ahead
        self._saves = saves
        self._lock = threading.Lock()
        self._spans: OrderedDict[int, Remembered] = OrderedDict()
        self._changed: set[int] = set()  # since the last dump
        self._dumped: set[int] = set()  # by it, and on their way to the index
        self._theirs: set[int] = set()  # of other shards: what was learnt here is saved nowhere
        self._unsaved_bytes = 0  # of `_changed`
        self._saved_tick = tick
        self.more = False  # whether the last dump left some
        self.failing = False  # whether it was not saved

    # ---- learning --------------------------------------------------------------------------

    def request(self, notes: Iterable[Note]) -> None:
        """One request's notes: time goes on by one."""
        with self._lock:
            self.tick += 1
        for note in notes:
            self.note(note)

    def note(self, note: Note) -> None:
        """Where nothing was decided, uses are counted and averages stay."""
        span, layer, chosen, ordinals = note.span, note.layer, note.chosen, note.ordinals
        shape = (self._n_layers, note.n_rows // self._window, self._window)
        if Remembered.bytes_of(*shape) > self._budget_bytes:
            return
        recalled = self._recall(span)
        with self._lock:
            known = self._spans.get(span, recalled)  # other spans may have pushed it out since
            if known is None or known.n_rows != note.n_rows:
                known = Remembered.empty(*shape)
            if self._spans.get(span) is not known:
                self._put(span, known)
            self._spans.move_to_end(span)
            if not self._saves(span):
                self._theirs.add(span)
            elif span not in self._changed:
                self._changed.add(span)
                self._unsaved_bytes += known.n_bytes
            known.scores *= faded(self.tick - known.tick)  # `worth` tells of this use
            if ordinals is None:
                known.scores[layer] = np.nan
                every = np.arange(note.first, note.first + note.count)
                ordinals = every if chosen is None else chosen
            uses = known.uses[layer]
            uses *= np.float32(faded(self.tick - int(known.ticks[layer])))
            used = np.zeros(len(uses), dtype=bool)
            used[ordinals // self._window] = True
            uses += used
            known.ticks[layer] = self.tick
            known.summed = None
            looked = slice(note.first // self._window, (note.first + note.count) // self._window)
            known.look(layer, looked, chosen is not None, note.whole, note.every_layer)
            if chosen is not None:
                was = np.zeros(note.count, dtype=bool)
                was[chosen - note.first] = True
                known.chose(layer, note.first, was, self.tick)
            self._shrink()

    def carry(
        self, old_span: int, new_span: int, first: int = 0, count: int | None = None
    ) -> dict[int, bytes]:
        """Windows [first, first + count) will soon be in a new span, rows maybe in another order.

        Averages go with their rows. Which chunks are used has to be learnt again: each begins
        with the uses of its layer's most used one. Returns new span -> value, for the transaction
        that deletes the old one's: from then on it is the only one. Empty: nothing is known.
        """
        known = self._recall(old_span, of_any_size=True)
        if known is None:
            return {}
        with self._lock:
            copy = known.part(first, known.n_windows - first if count is None else count)
        value = encode(copy)
        with self._lock:
            self._keep(new_span, copy)
        return {new_span: value}

    def forget(self, span_id: int) -> None:
        """The span is gone; the committer deletes its saved value."""
        with self._lock:
            self._take_out(span_id)

    # ---- answering -------------------------------------------------------------------------

    def average(self, span_id: int, *, of_any_size: bool = False) -> Floats | None:
        """float32 [n_layers, n_rows] in position order: how often each row was chosen, in 0..1.

        A moving average over requests that looked; 0 where none has, None where none ever decided.
        `of_any_size`: even if a process with a larger budget saved it.
        """
        known = self._recall(span_id, of_any_size=of_any_size)
        if known is None:
            return None
        with self._lock:
            return known.average() if known.seen.any() else None

    def halves(self, span_id: int) -> Floats | None:
        """float32 [2, n_layers, n_rows]: the same, for a span of any size, by two halves of the
        decisions, neither of which knows the other's; nan in windows without two; None: in all."""
        known = self._recall(span_id, of_any_size=True)
        if known is None:
            return None
        with self._lock:
            return known.compared()

    def worth(
        self, span_id: int, layer: int, ordinals: Ids | None = None, *, by_uses: bool = False
    ) -> Worth | None:
        """What a layer's chunks are worth; None: nothing is known of the span.

        `ordinals` [n_rows]: where each row, in position order, lies in the order of chunks.
        `by_uses`: rank by uses alone, whatever the shares. `summary` has its score from here.
        """
        known = self._recall(span_id)
        if known is None:
            return None
        with self._lock:
            shares = known.shares(layer, ordinals)
            uses, tick = known.uses[layer], int(known.ticks[layer])
            scores = uses * known.needed(layer, ordinals, shares)
            ranks = ranks_of(uses if by_uses else scores, tick)
            known.scores[layer] = float(scores.mean()) * faded(known.tick - tick)
            known.summed = None
            return Worth(ranks, known.known_shares(shares, layer, ordinals))

    def ranks_if_used(
        self, span_id: int, layer: int, n_chunks: int, used: Ids, ordinals: Ids | None = None,
        *, by_uses: bool = False,
    ) -> npt.NDArray[np.float64]:  # fmt: skip
        """float64 [n_chunks]: ranks as they will be when a use of these chunks has been noted."""
        known = self._recall(span_id)
        with self._lock:
            now = self.tick + 1
            uses, needed = np.zeros(n_chunks, dtype=np.float32), np.ones(n_chunks, dtype=np.float32)
            if known is not None and known.n_windows == n_chunks:
                uses += known.uses[layer] * np.float32(faded(now - int(known.ticks[layer])))
                if not by_uses:
                    needed = known.needed(layer, ordinals, known.shares(layer, ordinals))
            uses[used] += 1
            return ranks_of(uses * needed, now)

    def summary(self, span_id: int) -> tuple[float, float] | None:
        """(mean score of the span's chunks now, mean share of important rows or nan); cheap.

        None: nothing is known of it. Where notes had ordinals the score is `worth`'s last, faded.
        """
        with self._lock:
            known = self._spans.get(span_id)
            if known is not None:
                score, share, _ = known.summary()
                return score * faded(self.tick - known.tick), share
        raw, ahead = self._fetched(span_id)
        head = head_of(raw)
        if head is None:
            return None
        return head.score * faded(self.tick - ahead - head.tick), head.share

    def important_share(self) -> float | None:
        """Mean share of important rows over the spans in memory; None if none is known."""
        with self._lock:
            known = self._spans.values()
            found = [(one.summary().important, int(one.seen.any(axis=0).sum())) for one in known]
        total = sum(n for _, n in found)
        return sum(share * n for share, n in found if n) / total if total else None

    def known_shares(self) -> dict[int, float]:
        """Span -> mean share of rows needed, of the spans in memory where any is known."""
        with self._lock:
            shares = {span: known.summary().needed for span, known in self._spans.items()}
        return {span: share for span, share in shares.items() if not math.isnan(share)}

    # ---- keeping ---------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether enough requests, or bytes of the budget, were noted since the last `dump`. Where
        one span alone has so many, it waits for a few: each time all of it is saved again. While
        the index takes none of it, what is unsaved only grows."""
        n = self.tick - self._saved_tick
        full = 2 * self._unsaved_bytes > self._budget_bytes and not self.failing
        return n >= SAVE_EVERY or (full and (n >= SAVE_EVERY // 64 or len(self._changed) > 1))

    @property
    def unsaved(self) -> bool:
        """Whether anything changed that no `dump` has given since."""
        return bool(self._changed)

    def dump(self, most_bytes: int = MOST_DUMPED) -> dict[int, bytes]:
        """Span -> value, of those that changed since the last dump; what goes beyond `most_bytes`
        (a part of that where the last was not saved: it may find room) is for the next (`more`).
        Compresses outside the lock."""
        most_bytes //= 16 if self.failing else 1
        with self._lock:
            copies, n_bytes = dict[int, Remembered](), 0
            for span in self._changed:
                if n_bytes < most_bytes:
                    copies[span] = self._spans[span].copy()
                    n_bytes += copies[span].n_bytes
            self._changed, self._dumped = self._changed - copies.keys(), set(copies)
            self.more = self.unsaved
            self._unsaved_bytes -= n_bytes
            self._saved_tick = self.tick
        return {span: encode(known) for span, known in copies.items()}

    def saved(self) -> None:
        """The last dump is in the index, from which it can be fetched."""
        with self._lock:
            self._dumped, self.failing = set(), False

    def not_saved(self) -> None:
        """The last dump did not reach the index: the next one gives it again."""
        with self._lock:
            again, self._dumped = (self._dumped & self._spans.keys()) - self._changed, set()
            self.failing = True
            self._changed |= again
            self._unsaved_bytes += sum(self._spans[span].n_bytes for span in again)

    def check(self) -> None:
        """Assert that the accounts agree."""
        with self._lock:
            assert self.used_bytes == sum(known.n_bytes for known in self._spans.values())
            assert self.used_bytes <= self._budget_bytes, "history: over its budget"
            assert self._changed <= set(self._spans), "history: a change to nothing"
            assert self._unsaved_bytes == sum(self._spans[span].n_bytes for span in self._changed)

    # ---- inside ----------------------------------------------------------------------------

    def _recall(self, span: int, *, of_any_size: bool = False) -> Remembered | None:
        """What is known of a span; a saved value is brought back, with no lock held. To be looked
        at under the lock, and only to answer: it may not be kept here (any more)."""
        with self._lock:
            known = self._spans.get(span)
        if known is None:
            known = self._saved(span, of_any_size=of_any_size)
            if known is not None:
                with self._lock:
                    known = self._spans.get(span) or self._keep(span, known)
        return known

    def _saved(self, span: int, *, of_any_size: bool) -> Remembered | None:
        """A saved value, by the clock here. None also if it is damaged, newer, or of another shape:
        it is forgotten. One with no room here, of which nothing is learnt, is for repacks alone:
        each layer of each request would unpack it, only to be told what was true once."""
        raw, ahead = self._fetched(span)
        head = head_of(raw)
        most = math.inf if of_any_size else self._budget_bytes
        if raw is None or head is None or head.n_bytes > most:
            return None
        try:
            known = decode(raw)
        except FormatError:
            return None
        if (known.seen.shape[1], known.window) != self._shape:
            return None
        known.ticks += ahead
        return known

    def _fetched(self, span: int) -> tuple[bytes | None, int]:
        """A saved value, and how far its clock is behind. None also if the index is damaged, or
        given up: what requests showed can be done without."""
        try:
            raw = self._fetch(span)
            return raw, 0 if raw is None else self._ahead(span)
        except (FormatError, StoreFailed):
            return None, 0

    def _keep(self, span: int, known: Remembered) -> Remembered:
        """Keep what is saved, or will be at once; not if it is larger than the whole budget."""
        if known.n_bytes <= self._budget_bytes:
            self._put(span, known)
            self._shrink()
        return known

    def _put(self, span: int, known: Remembered) -> Remembered:
        self._take_out(span)
        n_bytes = known.n_bytes
        self._spans[span] = known
        self.used_bytes += n_bytes  # no signal comes between
        return known

    def _take_out(self, span: int) -> None:
        if (known := self._spans.get(span)) is not None:
            n_bytes = known.n_bytes
            del self._spans[span]  # from here on no signal comes between
            self.used_bytes -= n_bytes
            self._theirs -= {span}
            if span in self._changed:
                self._changed -= {span}
                self._unsaved_bytes -= n_bytes

    def _shrink(self) -> None:
        """Forget spans until the rest is within the budget, those noted longest ago first.

        What is saved goes before what is not, since it can be fetched again. But if nearly all
        is unsaved, nobody saves, or not soon enough: then that makes no difference.
        """
        while self.used_bytes > self._budget_bytes and self._spans:
            spare = self._changed | self._dumped | self._theirs
            n_bytes = sum(self._spans[span].n_bytes for span in spare & self._spans.keys())
            spare = spare if 4 * n_bytes <= 3 * self._budget_bytes else set()
            others = islice(self._spans, len(self._spans) - 1)  # never the last
            oldest = next(iter(self._spans))
            self._take_out(next((span for span in others if span not in spare), oldest))


def budget_of(dram_bytes: int) -> int:
    """Bytes a store's history may hold."""
    return max(dram_bytes // SHARE, LEAST_BYTES)
