"""Fits the parameters of probe codecs from what a namespace stored first, on a thread of its own.

READY spans → K planes, layer by layer, verified → codec.fit → Params.add → later spans use them

Only `flush` and `close` wait for it. Rows are read unpinned: a span evicted meanwhile does not
match its sums, like one that is damaged, and is left out. A fit for which something was lacking
(files, memory) is tried again with the next store; one that the disk did not take is only written
again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Final

import numpy as np

from impress.errors import ImpressError, StoreFailed
from impress.selection.probes import ProbeCodec, fitted
from impress.selection.probes_pca import FIT_TOKENS, Pca
from impress.spans.format import SpanHeader, SpanRecord
from impress.spans.layout import K
from impress.spans.params import Params
from impress.spans.rows import Words, plane_words
from impress.spans.tables import read_header
from impress.tree.catalog import Catalog
from impress.types import Geometry
from tiers.errors import MediumError, ReadFailed
from tiers.slots import aligned
from tiers.ssd import SsdTier
from tiers.threads import Worker

log = logging.getLogger("impress")

#: Tokens a fit wants; until a namespace has so many, and until they are fitted, a codec's
#: parameter-free fallback makes the records.
ENOUGH_TOKENS: Final = FIT_TOKENS
#: How long a fit that the disk did not take is left alone.
RETRY_S: Final = 30.0


class _LeftOut(Exception):
    """A span did not read back, and is now one of the unread."""


class Fitter:
    """One store's. `poke` it when a span is READY; thread-safe."""

    def __init__(
        self, codecs: Sequence[ProbeCodec], geometry: Geometry, namespace: bytes, ssd: SsdTier,
        catalog: Catalog, params: Params,
    ) -> None:  # fmt: skip
        self._codecs = [again for codec in codecs if (again := fitted(codec)) is not None]
        self._geometry = geometry
        self._namespace = namespace
        self._ssd = ssd
        self._catalog = catalog
        self._params = params
        self._lock = threading.RLock()
        self._state = threading.Condition(self._lock)
        self._thread: Worker | None = None
        self._busy = False  # a fit is asked for or under way
        self._closing = threading.Event()
        self.retired = False
        """Once closed: nothing changes the parameters any more."""
        self._n_tokens = 0  # READY, as far as the next fit is concerned
        self._unread: set[int] = set()  # spans that did not read back, left out until a restart
        self._not_kept: set[str] = set()  # codecs whose fit was in vain, until a restart
        self._unwritten: dict[str, tuple[int, list[bytes]]] = {}  # fits that the disk did not take
        self._again_s = 0.0  # when they are tried again, by monotonic

    def begin(self) -> None:
        """Fit what is missing to what is stored already, where that is enough."""
        if self._missing():
            self.poke(sum(record.n_windows * record.window for record in self._records()))

    def poke(self, n_tokens: int) -> None:
        """So many more tokens of this namespace are READY. Starts a fit when there are enough."""
        with self._lock:
            self._n_tokens += n_tokens
            if self._busy or self._n_tokens < ENOUGH_TOKENS or self._closing.is_set():
                return
            if not self._missing():
                return
            if self._thread is None:  # one for all fits: what it reads with is kept until `close`
                thread = Worker(self._work, "impress-fit")
                try:
                    thread.start()
                except (MediumError, RuntimeError) as err:  # no more threads, or Python's end
                    log.warning("no codec is fitted for now: %s", err)
                    return
                self._thread = thread
            self._n_tokens = 0
            self._busy = True
            self._state.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Return when no fit is under way or none will end any more, or after timeout_s."""
        with self._lock:
            self._state.wait_for(lambda: not self._busy or self._closing.is_set(), timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Give up a fit under way, after the layer it is at; neither it nor a purge changes the
        parameters from here on. False: it is still reading there."""
        with self._lock:
            self._closing.set()
            self._state.notify_all()
        self.retired = self._params.retire(timeout_s)
        if self._thread is None:
            return True
        return self._thread.ended(timeout_s)

    # ---- inside ----------------------------------------------------------------------------

    def _missing(self) -> list[Pca]:
        """Codecs without parameters, except those for which none can be kept."""
        lacking = [c for c in self._codecs if self._params.current(self._namespace, c.name) is None]
        waiting = self._unwritten.keys() if monotonic() < self._again_s else ()
        return [c for c in lacking if c.name not in self._not_kept and c.name not in waiting]

    def _records(self) -> list[SpanRecord]:
        """The namespace's spans, first stored first."""
        found = [r for r in self._catalog.records() if r.namespace == self._namespace]
        return sorted(found, key=lambda record: record.span_id)

    def _work(self) -> None:
        while not self._closing.is_set():
            try:
                self._turn()
            except Exception:  # it could not even be logged: a failing handler, or no memory
                continue

    def _turn(self) -> None:
        """Wait until a fit is asked for, and make it. Raises only where saying or waiting fails."""
        with self._lock:
            self._state.wait_for(lambda: self._busy or self._closing.is_set())
        n_tokens = ENOUGH_TOKENS  # to go on with: the next store tries again
        try:
            n_tokens = self._fit()
        except (ImpressError, MediumError, MemoryError) as err:
            log.warning("probe parameters are not fitted yet: %s", str(err) or "no memory")
        except Exception:  # a bug, which may come each time
            n_tokens = 0
            log.exception("fitting probe parameters failed")
        finally:  # nobody who waits is left waiting
            with self._lock:
                self._n_tokens += n_tokens
                self._busy = False
                self._state.notify_all()

    def _fit(self) -> int:
        """Fit what is missing; how many tokens the next fit has to go on with.

        Raises MediumError where this process lacks what reading takes.
        """
        n_forgets = self._params.n_forgets  # first: what is purged from here on is not kept
        records = self._records()
        while not self._closing.is_set():
            spans, n_tokens = self._spans(records)
            if n_tokens < ENOUGH_TOKENS:
                return n_tokens
            try:
                self._fit_to(spans, n_forgets)
            except _LeftOut:
                continue
            break
        return ENOUGH_TOKENS  # wanted only where a purge came between

    def _spans(self, records: Sequence[SpanRecord]) -> tuple[list[tuple[SpanHeader, int]], int]:
        """What to fit to: headers, and how many windows to read of each; the tokens of these."""
        found: list[tuple[SpanHeader, int]] = []
        n_tokens = 0
        for record in records:
            if n_tokens >= ENOUGH_TOKENS or self._closing.is_set():
                break
            if record.span_id in self._unread:
                continue
            with suppress(_LeftOut), self._reading(record.span_id):
                count = min(record.n_windows, -(-(ENOUGH_TOKENS - n_tokens) // record.window))
                found.append((read_header(self._ssd, record), count))
                n_tokens += count * record.window
        return found, n_tokens

    @contextmanager
    def _reading(self, span: int) -> Iterator[None]:
        """Raises _LeftOut where the span does not read back: a request, which would take it out of
        the tree, may never come to it. Where the process lacks something: the error as it is."""
        try:
            yield
        except ReadFailed as err:
            if err.harmless:
                raise
            self._unread.add(span)
            log.warning("span %d is left out of what probe parameters are fitted to: %s", span, err)
            raise _LeftOut from None

    def _fit_to(self, spans: Sequence[tuple[SpanHeader, int]], n_forgets: int) -> None:
        for codec in self._missing():
            fitted_at, layers = self._unwritten.pop(codec.name, (n_forgets, list[bytes]()))
            if fitted_at != n_forgets:  # purged since
                layers = []
            for layer in range(len(layers), self._geometry.n_layers):
                if self._closing.is_set():
                    return
                keys = np.concatenate([self._keys(h, layer, n) for h, n in spans], axis=1)
                layers.append(codec.fit(keys, self._geometry))
            if self._closing.is_set():  # the shard may be another process's by now
                return
            try:
                kept = self._params.add(self._namespace, codec.name, layers, n_forgets)
            except StoreFailed:
                self._unwritten[codec.name] = n_forgets, layers
                self._again_s = monotonic() + RETRY_S
                raise
            if kept is None and n_forgets == self._params.n_forgets:
                self._not_kept.add(codec.name)

    def _keys(self, header: SpanHeader, layer: int, count: int) -> Words:
        """A layer's keys in `count` chunks of a span, in any order of rows: the first ones; where
        rows lie by importance, chunks all over it, or the fit would see none but those of most."""
        g, record = self._geometry, header.record
        shape = header.layout.planes[K]
        dest = aligned(count * shape.chunk_bytes)[: count * shape.chunk_bytes]
        step = 1.0 if header.order is None else record.n_windows / count
        with self._reading(record.span_id):
            self._ssd.read([
                header.read_of(layer, K, int(i * step), chunk)
                for i, chunk in enumerate(dest.reshape(count, -1))
            ])  # fmt: skip
        return plane_words(dest, shape, g.dtype, g.n_kv_heads, g.head_dim)
