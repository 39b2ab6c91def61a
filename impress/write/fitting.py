"""Fits the parameters of probe codecs from what a namespace stored first, on a thread of its own.

READY spans → K planes, layer by layer, verified → codec.fit → Params.add → later spans use them

Nothing waits for it but `flush` and `close`. Rows are read unpinned: a span evicted meanwhile does
not match its sums, and the fit is tried again with the next store.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

from impress.errors import ImpressError
from impress.selection.probes import FittedCodec, ProbeCodec, fitted
from impress.selection.probes_pca import FIT_TOKENS
from impress.spans.format import SpanHeader, SpanRecord
from impress.spans.layout import K
from impress.spans.params import Params
from impress.spans.rows import Words, plane_words
from impress.spans.tables import read_header
from impress.tree.catalog import Catalog
from impress.types import Geometry
from tiers.base import Read, Slot
from tiers.errors import MediumError
from tiers.slots import aligned
from tiers.ssd import SsdTier

log = logging.getLogger("impress")

#: Tokens a fit wants; until a namespace has so many, and until they are fitted, a codec's
#: parameter-free fallback makes the records.
ENOUGH_TOKENS: Final = FIT_TOKENS


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
        self._thread: threading.Thread | None = None
        self._busy = False  # a fit is asked for or under way
        self._closing = threading.Event()
        self._n_tokens = 0
        self._not_kept: set[str] = set()  # codecs whose fit was in vain, until a restart
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
            self._n_tokens = 0  # for the next try, should this one fail
            if self._thread is None:  # one for all fits: what it reads with is kept until `close`
                thread = threading.Thread(target=self._work, name="impress-fit", daemon=True)
                try:
                    thread.start()
                except RuntimeError as err:  # no more threads: no fault of who stores
                    log.warning("no codec is fitted for now: %s", err)
                    return
                self._thread = thread
            self._busy = True
            self._state.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Return when no fit is under way, or after timeout_s."""
        with self._lock:
            self._state.wait_for(lambda: not self._busy, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Give up a fit under way, after the layer it is at; False: it reads there still."""
        with self._lock:
            self._closing.set()
            self._state.notify_all()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- inside ----------------------------------------------------------------------------

    def _missing(self) -> list[FittedCodec]:
        """Codecs without parameters, but for those of which none can be kept."""
        lacking = [c for c in self._codecs if self._params.current(self._namespace, c.name) is None]
        return [codec for codec in lacking if codec.name not in self._not_kept]

    def _records(self) -> list[SpanRecord]:
        """The namespace's spans, first stored first."""
        found = [r for r in self._catalog.records() if r.namespace == self._namespace]
        return sorted(found, key=lambda record: record.span_id)

    def _work(self) -> None:
        while not self._closing.is_set():
            with self._lock:
                self._state.wait_for(lambda: self._busy or self._closing.is_set())
            try:
                if not self._closing.is_set():
                    self._fit()
            except (ImpressError, MediumError) as err:
                log.warning("probe parameters are not fitted yet: %s", err)
            except Exception:  # a bug: nobody who waits is left waiting
                log.exception("fitting probe parameters failed")
            with self._lock:
                self._busy = False
                self._state.notify_all()

    def _fit(self) -> None:
        """Raises MediumError where a row does not read back."""
        n_forgets = self._params.n_forgets
        headers: list[tuple[SpanHeader, int]] = []  # and how many windows to read of each
        left = ENOUGH_TOKENS
        for record in self._records():
            count = min(record.n_windows, -(-left // record.window))
            headers.append((read_header(self._ssd, record), count))
            left -= count * record.window
            if left <= 0:
                break
        if left > 0:
            return
        for codec in self._missing():
            layers: list[bytes] = []
            for layer in range(self._geometry.n_layers):
                if self._closing.is_set():
                    return
                keys = np.concatenate([self._keys(h, layer, n) for h, n in headers], axis=1)
                layers.append(codec.fit(keys, self._geometry))
            if self._closing.is_set():  # the shard may be another process's by now
                return
            kept = self._params.add(self._namespace, codec.name, layers, n_forgets)
            if kept is None and n_forgets == self._params.n_forgets:
                self._not_kept.add(codec.name)

    def _keys(self, header: SpanHeader, layer: int, count: int) -> Words:
        """A layer's keys in the first `count` chunks of a span, in any order of rows."""
        g, record = self._geometry, header.record
        layout = header.layout
        shape = layout.planes[K]
        dest = aligned(count * shape.chunk_bytes)[: count * shape.chunk_bytes]
        at = layout.sums_at(layer, K, 0)
        sums = header.sums[at : at + count * shape.pieces]
        off = layout.chunk_off(layer, K, 0)
        self._ssd.read([Read(Slot(record.parts), off, dest, sums, shape.piece_bytes)])
        return plane_words(dest, shape, g.dtype, g.n_kv_heads, g.head_dim)
