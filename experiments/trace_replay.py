"""A trace through the real tree, caches, history and evictions, without a byte of KV.

    request ─hold─> views ─pin─> which tier has each block ─climb─> one tier up (promote.py's rules)
            ─publish─> the blocks it lacked, as a span; what is worth least leaves home for it
            ─release, note, judge─> what its blocks are worth now

One window of the tree is one block of the trace; one layer stands for all, since nothing here
chooses rows: every use is of whole blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from experiments.trace_file import Request
from impress.blockhash import labels_of, namespace_digest, root_key
from impress.cache.chunks import ChunkCache
from impress.cache.levels import levels_of
from impress.config import Config
from impress.read.parts import Source
from impress.read.worth import judge, ranks_if_used
from impress.spans.format import SpanRecord
from impress.tree.catalog import Held, Leave
from impress.tree.eviction import ALL, score_of
from impress.tree.merged import MergedCatalog
from impress.types import Geometry
from impress.usage.history import History
from impress.usage.notes import Note
from tiers.base import PAGE, Extent

#: A window of the tree: one number of the trace.
_WINDOW: Final = 1
_NOWHERE: Final = Extent(0, 0, 0)
_NAMESPACE: Final = namespace_digest("trace")
_ROOT: Final = root_key(_NAMESPACE, Geometry(1, 1, 1, 1), _WINDOW, "")


@dataclass(slots=True)
class Tally:
    """Blocks asked for, and where they were; ssd is home. The rest was computed."""

    asked: int = 0
    found: dict[str, int] = field(default_factory=dict)
    evicted: int = 0  # spans
    refused: int = 0  # requests whose blocks found no room


class Replay:
    """One store under one policy. `capacity`: blocks at home, None: no limit; `fast`: blocks of the
    tiers above it, fastest first."""

    def __init__(self, eviction: str, capacity: int | None, fast: Mapping[str, int]) -> None:
        self._score = score_of(eviction, {})  # no request shows which rows matter
        self._capacity = capacity
        self._catalog = MergedCatalog(_WINDOW, ALL)
        self._history = History(1, _WINDOW, 1 << 40)
        self._caches = [
            ChunkCache(n * PAGE, {0: PAGE}, 1, tier, eviction) for tier, n in fast.items()
        ]
        # The parts of a store's Reading that `worth` looks at.
        self._reading: Any = SimpleNamespace(
            history=self._history, config=Config(eviction=eviction),
            copies=SimpleNamespace(chunks=self._caches),
        )  # fmt: skip
        self._used = self._last_span = 0
        self.tally = Tally(found=dict.fromkeys([*fast, "ssd"], 0))

    def serve(self, request: Request) -> int:
        """Serve one request from lease to release. Returns the blocks that were found."""
        labels = labels_of(request.blocks, _WINDOW)
        held = self._catalog.hold(_ROOT, labels, count=True)
        sources = [_source(one) for one in held]
        self._climb([self._look(source) for source in sources], sources)
        n_found, n_blocks = sum(one.count for one in held), len(request.blocks)
        self.tally.asked += n_blocks
        if n_found < n_blocks:
            self._store(labels, n_found, n_blocks)
        self._catalog.release(held)
        self._reclaim(self._catalog.unheld)
        self._history.request(_note(source) for source in sources)
        for source in sources:
            judge(self._reading, source, 0, _chunks(source))
        return n_found

    def check(self) -> None:
        """Assert what the store asserts of its parts, and that home is not overfull."""
        self._catalog.check()
        for cache in self._caches:
            cache.check()
        self._history.check()
        owned = sum(_n_blocks(record) for record in self._catalog.all_records())
        assert owned == self._used, "home: blocks miscounted"
        assert self._capacity is None or owned <= self._capacity, "home: overfull"

    # ---- reading ---------------------------------------------------------------------------

    def _look(self, source: Source) -> np.ndarray:
        """The tier of each block held: the first that has it. It is counted, and used there."""
        first, count = source.held.first, source.held.count
        entries = [cache.pin(source.span, 0, first, count) for cache in self._caches]
        at = levels_of(entries) if entries else np.zeros(count, dtype=np.int64)
        names = list(self.tally.found)
        for tier, n in zip(names, np.bincount(at, minlength=len(names)).tolist(), strict=True):
            self.tally.found[tier] += n
        for cache, pinned in zip(self._caches, entries, strict=True):
            cache.unpin(pinned)
        return at

    def _climb(self, levels: Sequence[np.ndarray], sources: Sequence[Source]) -> None:
        """Copy what was found one tier up, after the request."""
        for source, at in zip(sources, levels, strict=True):
            for level, upper in enumerate(self._caches):
                chunks = source.held.first + np.flatnonzero(at == level + 1)
                below = self._caches[level + 1] if level + 1 < len(self._caches) else None
                if len(chunks):
                    self._copy_up(source, chunks, upper, below)

    def _copy_up(
        self, source: Source, chunks: np.ndarray, upper: ChunkCache, below: ChunkCache | None
    ) -> None:
        ranks = ranks_if_used(self._reading, source, 0, chunks) if upper.by_rank else None
        n_windows = source.held.record.n_windows
        granted, taken = upper.admit(source.span, n_windows, 0, chunks, ranks)
        if below is not None:
            below.drop_windows(source.span, 0, granted)
        upper.publish(taken)

    # ---- storing ---------------------------------------------------------------------------

    def _store(self, labels: bytes, first: int, end: int) -> None:
        if not self._make_room(end - first):
            self.tally.refused += 1
            return
        own = labels[4 * _WINDOW * first :]
        record = self._record(first, end - first, own)
        self._catalog.publish(record, labels)

    def _record(self, first: int, n_blocks: int, labels: bytes) -> SpanRecord:
        self._last_span += 1
        self._used += n_blocks
        return SpanRecord(
            self._last_span, _NAMESPACE, _ROOT, bytes(32), bytes(32), first, n_blocks, _WINDOW,
            _NOWHERE, (Extent(0, 0, n_blocks * PAGE),), labels,
        )  # fmt: skip

    def _make_room(self, n_blocks: int) -> bool:
        """Evict until n_blocks more fit; False when nothing can go."""
        while self._capacity is not None and self._used + n_blocks > self._capacity:
            over = self._used + n_blocks - self._capacity
            used = self._used
            spans = self._catalog.evict(over * PAGE, self._score)
            self.tally.evicted += len(spans)
            self._reclaim(partial(self._catalog.deleted, spans))
            self._rewrite()
            if self._used == used:
                return False
        return True

    def _rewrite(self) -> None:
        """Do at once what the repacker does later: cut spans over half dead to their live part."""
        for dead in self._catalog.dead():
            if 2 * dead.n_dead > dead.n_windows:
                held, old = list[Held](), dead.span
                views = self._catalog.hold_span(old, held)
                whole = held[0]
                skip = min(view.first for view in views)
                count = max(view.first + view.n_windows for view in views) - skip
                new = self._record(whole.record.first_window + skip, count, b"")
                new = replace(new, labels=bytes(4 * _WINDOW * count))
                self._history.carry(old, new.span_id, skip, count)
                self._catalog.replace(old, new)
                self._reclaim(partial(self._catalog.deleted, [old]))
                self._catalog.release(held)
                self._reclaim(self._catalog.unheld)

    def _reclaim(self, leave: Leave) -> None:
        free: list[SpanRecord] = []
        leave(free)
        for record in free:
            self._used -= _n_blocks(record)
            self._history.forget(record.span_id)
            for cache in self._caches:
                cache.drop_span(record.span_id)


def _n_blocks(record: SpanRecord) -> int:
    return record.data_bytes // PAGE


def _source(held: Held) -> Any:
    """The parts of a Source that `worth` looks at."""
    return SimpleNamespace(held=held, span=held.record.span_id, order=None)


def _chunks(source: Source) -> np.ndarray:
    return source.held.first + np.arange(source.held.count)


def _note(source: Source) -> Note:
    """All blocks held were used, and nothing was decided about their rows."""
    held = source.held
    return Note(held.record.span_id, held.record.n_windows, 0, held.first, held.count, None)
