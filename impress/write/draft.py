"""A span in the making: its space, its sums, its writes on their way. Nothing of it is visible.

All layers or nothing: what is incomplete, refused or failed gives its space back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from impress.errors import StoreFailed
from impress.selection.probes import ProbeCodec, codec_of, encoded, fitted
from impress.spans.format import ProbeRecord, SpanRecord
from impress.spans.layout import K, SpanLayout, V
from impress.spans.order import RowOrder, Rows
from impress.spans.params import NONE, Layers, Params
from impress.spans.rows import all_finite, plane_words
from impress.types import Geometry, a_time
from tiers.base import Bytes, Slot, sums_of
from tiers.iopool import IoPool, Lane
from tiers.slots import Buffer, BufferPool, aligned
from tiers.ssd import SsdTier
from tiers.ticket import Signal

#: Rows of at most this many bytes share a slot: large enough to write well, small enough to pool.
SLOT_BYTES = 4 << 20


class Stored:
    """What became of a store. `refused` says why nothing will be kept; else wait or flush.

    n_tokens: tokens of this prompt the store holds once it is READY, in whole windows.
    n_new: those that this store adds.
    """

    def __init__(self, n_tokens: int, n_new: int) -> None:
        self.n_tokens = n_tokens
        self.n_new = n_new
        self.refused = ""
        self.error: Exception | None = None
        self._end = Signal()

    @property
    def ready(self) -> bool:
        """Visible and durable."""
        return self._end.is_set() and self.error is None and not self.refused

    def wait(self, timeout_s: float | None = None) -> bool:
        """True when READY, False when refused or timeout_s passed; raises what failed."""
        if timeout_s is not None:
            timeout_s = a_time(timeout_s, "wait: timeout_s")
        if not self._end.wait(timeout_s):
            return False
        if self.error is not None:
            raise self.error
        return not self.refused

    def settle(self, refused: str = "", error: Exception | None = None) -> bool:
        """The store's outcome, from the writer or the committer; any after the first is ignored.
        Returns whether it was the first."""
        if self._end.is_set():
            return False
        self.refused, self.error = refused, error
        self._end.set()
        return True

    def __repr__(self) -> str:
        state = self.refused or self.error or ("ready" if self.ready else "under way")
        return f"Stored(n_tokens={self.n_tokens}, n_new={self.n_new}, {state})"


def label_of(refused: str) -> str:
    """The reason that `impress_refused_total` counts by, of `Stored.refused`: what is before the
    colon. Pure."""
    return refused.split(":")[0].replace(" ", "_")


@dataclass(frozen=True, slots=True)
class Sketch:
    """A codec as one span uses it: its record in the header, and its parameters by layer."""

    codec: ProbeCodec
    record: ProbeRecord
    layers: Layers | None = None

    def encode(self, keys: Any, geometry: Geometry, layer: int) -> Bytes:
        """Records of some keys of a layer."""
        params = self.layers[layer] if self.layers else None
        return encoded(self.codec, keys, geometry, params)


class Media:
    """What a writer writes with; the same for all writers of a store."""

    def __init__(
        self,
        ssd: SsdTier,
        pool: IoPool,
        slots: BufferPool,
        geometry: Geometry,
        codecs: Sequence[ProbeCodec],
        namespace: bytes,
        params: Params,
    ) -> None:
        self.ssd = ssd
        self.codecs = tuple(codecs)  # a probe record of each goes with every span
        self._geometry = geometry
        self._namespace = namespace
        self._params = params
        self.pool = pool
        self.slots = slots
        # Several slots at least, so that packing goes on while one is written.
        self.slot_bytes = min(SLOT_BYTES, (slots.budget_bytes or SLOT_BYTES) // 4)

    @property
    def fits(self) -> bool:
        """Whether some codec has parameters to fit."""
        return any(fitted(codec) is not None for codec in self.codecs)

    def sketches(self, before: Sequence[ProbeRecord] = ()) -> tuple[Sketch, ...]:
        """What a new span's records are made with; `before`: those of the span it hangs from.

        A fitted codec goes on as in the span before, so that one prefix is scored alike from end
        to end; else it takes the newest parameters, or its fallback until there are any.
        """
        made: dict[str, Sketch] = {}
        for codec in self.codecs:
            sketch = self._sketch(codec, {record.codec: record.params for record in before})
            made.setdefault(sketch.codec.name, sketch)
        return tuple(made.values())

    def _sketch(self, codec: ProbeCodec, before: dict[str, bytes]) -> Sketch:
        again, digest, layers = fitted(codec), NONE, None
        if again is not None:
            fallback = codec_of(again.fallback)
            found = before.get(codec.name)
            if found is None and fallback.name not in before:
                found = self._params.current(self._namespace, codec.name)
            layers = None if found is None else self._params.layers(found)
            codec, digest = (fallback, NONE) if found is None or not layers else (codec, found)
        size = codec.probe_bytes(self._geometry)
        return Sketch(codec, ProbeRecord(codec.name, codec.group, size, digest), layers)


class Draft:
    """A span in the making: its space, its sums, what has arrived of it. Thread-safe."""

    def __init__(
        self,
        record: SpanRecord,
        geometry: Geometry,
        layout: SpanLayout,
        slot: Slot,
        prefix: bytes,
        media: Media,
        sketches: Sequence[Sketch] = (),
    ) -> None:
        self.record = record
        self.slot = slot
        self.sync_failures = media.ssd.sync_failures  # as of its first byte
        self.prefix = prefix  # labels from the root to this span's end
        self.layout = layout
        self.sums = np.zeros(self.layout.n_sums, dtype=np.uint64)
        self.importance: npt.NDArray[np.float32] | None = None
        self.packed: list[Rows | None] = [None] * geometry.n_layers
        """For each layer the row in each slot; None: rows in position order. Set before writing."""
        self.probes = tuple(sketch.record for sketch in sketches)
        self._sketches = sketches
        self._geometry = geometry
        self._media = media
        self._lock = threading.RLock()
        self._fewer = threading.Condition(self._lock)
        self._writing = 0
        self._then: Callable[[], None] | None = None  # given up: call it when no write is under way
        self._error: Exception | None = None

    @property
    def writing(self) -> bool:
        """Whether one of its writes is under way."""
        return self._writing > 0

    def order(self) -> RowOrder | None:
        """How its rows lie; None when every layer is in position order. FormatError: a bug."""
        if all(slots is None for slots in self.packed):
            return None
        rows = np.arange(self.record.n_windows * self.record.window)
        return RowOrder.of(np.stack([rows if slots is None else slots for slots in self.packed]))

    def write(self, layer: int, first: int, count: int, buffer: Buffer) -> None:
        """Send a slot (K pieces of `count` windows, then V pieces) to its place; takes the slot.

        Probe records go with it, unless the layer is packed: then `write_probes` sends them.
        """
        self._submit(partial(self._write, layer, first, count, buffer.array), buffer)

    def write_probes(self, layer: int, first: int, count: int, buffer: Buffer) -> None:
        """Make records of windows whose K pieces, in position order, are in this slot; takes it."""
        self._submit(partial(self._write_probes, layer, first, count, buffer.array), buffer)

    def _submit(self, task: Callable[[], None], buffer: Buffer) -> None:
        taken: list[bool] = []
        counted = False
        try:
            with self._lock:
                if self._then is not None:  # given up on the way: no longer its place
                    buffer.release()
                    return
                self._writing += 1
                counted = True  # no signal comes between
            ticket = self._media.pool.submit(Lane.STORE, [partial(self._run, task, buffer, taken)])
            ticket.then(partial(self._cancelled, buffer, taken))
        except BaseException:  # no memory, Ctrl-C: if it was not queued, `settle` would wait for it
            if counted and self._take(taken):
                self._ended(buffer)
            raise

    def _take(self, taken: list[bool]) -> bool:
        """Whether the caller is the first: a write is run, or given up, once."""
        with self._lock:
            taken.append(True)
            return len(taken) == 1

    def _run(self, task: Callable[[], None], buffer: Buffer, taken: list[bool]) -> None:
        if not self._take(taken):
            return
        try:
            task()
        except Exception as err:  # whatever it is: it must not pass for written
            with self._lock:
                self._error = self._error or err
        finally:
            self._ended(buffer)

    def _cancelled(self, buffer: Buffer, taken: list[bool]) -> None:
        """Called once a write's turn is over. Where the threads had ended before, nobody has run
        it: whoever waits for a buffer, or for the last write, would wait in vain."""
        if self._take(taken):
            with self._lock:
                self._error = self._error or StoreFailed("the store is closed")
            self._ended(buffer)

    def _ended(self, buffer: Buffer) -> None:
        """A write is over; after the last one, whoever gave up is told."""
        try:
            buffer.release()
        finally:  # it may have found no memory: whoever waits for the last write waits all the same
            with self._lock:
                self._writing -= 1
                self._fewer.notify_all()
                then = None if self._writing else self._then
            if then is not None:
                then()

    def _write(self, layer: int, first: int, count: int, slot: Bytes) -> None:
        at = 0
        for plane in (K, V):
            shape = self.layout.planes[plane]
            data = slot[at : at + count * shape.chunk_bytes]
            at += len(data)
            if not all_finite(data, self._geometry.dtype):
                raise StoreFailed(f"store refused: layer {layer} holds NaN or infinite rows")
            self._put(plane, layer, first, count, data)
        if self.packed[layer] is None:
            self._write_probes(layer, first, count, slot)

    def _write_probes(self, layer: int, first: int, count: int, slot: Bytes) -> None:
        """Write each codec's records of these windows' keys: one padded piece per window."""
        g, plane = self._geometry, self.layout.planes[K]
        packed = slot[: count * plane.chunk_bytes]
        keys = plane_words(packed, plane, g.dtype, g.n_kv_heads, g.head_dim)
        for i, sketch in enumerate(self._sketches, start=V + 1):
            data = aligned(count * self.layout.planes[i].chunk_bytes)
            groups = sketch.encode(keys, g, layer).reshape(count, -1)
            data.reshape(count, -1)[:, : groups.shape[1]] = groups
            self._put(i, layer, first, count, data)

    def _put(self, plane: int, layer: int, first: int, count: int, data: Bytes) -> None:
        """Write chunks of a plane to their place, and note their sums."""
        shape = self.layout.planes[plane]
        start = self.layout.sums_at(layer, plane, first)
        self.sums[start : start + count * shape.pieces] = sums_of(data, shape.piece_bytes)
        self._media.ssd.write(self.slot, self.layout.chunk_off(layer, plane, first), data)

    def settle(self, timeout_s: float) -> None:
        """Wait for its writes. Raises StoreFailed when one failed or is stuck."""
        with self._lock:
            if not self._fewer.wait_for(lambda: self._writing == 0, timeout_s):
                late = TimeoutError(f"ssd: a write did not end within {timeout_s:g} s")
                raise StoreFailed(f"store: {late}") from late
            if self._error is not None:
                raise StoreFailed(str(self._error) or repr(self._error)) from self._error

    def give_up(self, then: Callable[[], None]) -> None:
        """`then` is called once nothing can land in its space any more: now, or from the thread of
        its last write, however long that hangs."""
        with self._lock:
            self._then = then
            if self._writing:
                return
        then()
