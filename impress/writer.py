"""One store under way: rows arrive in any order and leave for the disk as pieces fill.

All layers or nothing: what is incomplete, refused or failed gives its space back and was never
visible. The rows are packed into pooled slots inside `put`, so the caller may reuse its tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from impress.errors import BadInput, StoreFailed
from impress.format import ProbeRecord, SpanRecord
from impress.layout import K, SpanLayout, V
from impress.rows import Words, all_finite, check_rows, host_words, pack, plane_words
from impress.types import Geometry
from tiers.base import Slot, sums_of
from tiers.errors import MediumError
from tiers.iopool import IoPool, Lane
from tiers.slots import Buffer, BufferPool, aligned
from tiers.ssd import SsdTier

if TYPE_CHECKING:
    from types import TracebackType

    from impress.probes import ProbeCodec

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
        self._end = threading.Event()

    @property
    def ready(self) -> bool:
        """Visible and durable."""
        return self._end.is_set() and self.error is None and not self.refused

    def wait(self, timeout_s: float | None = None) -> bool:
        """True when READY, False when refused or timeout_s passed; raises what failed."""
        if not self._end.wait(timeout_s):
            return False
        if self.error is not None:
            raise self.error
        return not self.refused

    def settle(self, refused: str = "", error: Exception | None = None) -> None:
        """The store's last word; called once by the writer or the committer."""
        self.refused, self.error = refused, error
        self._end.set()

    def __repr__(self) -> str:
        state = self.refused or self.error or ("ready" if self.ready else "under way")
        return f"Stored(n_tokens={self.n_tokens}, n_new={self.n_new}, {state})"


class Media:
    """What a writer writes with; the same for all writers of a store."""

    def __init__(
        self,
        ssd: SsdTier,
        pool: IoPool,
        slots: BufferPool,
        geometry: Geometry,
        codecs: Sequence[ProbeCodec] = (),
    ) -> None:
        self.ssd = ssd
        self.codecs = tuple(codecs)  # a probe record of each goes with every span
        self.probes = tuple(
            ProbeRecord(codec.name, codec.group, codec.probe_bytes(geometry)) for codec in codecs
        )
        self.pool = pool
        self.slots = slots
        # Several slots at least, so that packing goes on while one is written.
        self.slot_bytes = min(SLOT_BYTES, (slots.budget_bytes or SLOT_BYTES) // 4)


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
    ) -> None:
        self.record = record
        self.slot = slot
        self.prefix = prefix  # labels from the root to this span's end
        self.layout = layout
        self.sums = np.zeros(self.layout.n_sums, dtype=np.uint64)
        self.importance: npt.NDArray[np.float32] | None = None
        self.probes = media.probes
        self._geometry = geometry
        self._media = media
        self._lock = threading.Condition()
        self._writing = 0
        self._error: Exception | None = None

    def write(self, layer: int, first: int, count: int, buffer: Buffer) -> None:
        """Send a slot (K pieces of `count` windows, then V pieces) to its place; takes the slot."""
        with self._lock:
            self._writing += 1
        self._media.pool.submit(Lane.STORE, [lambda: self._write(layer, first, count, buffer)])

    def _write(self, layer: int, first: int, count: int, buffer: Buffer) -> None:
        try:
            at = 0
            for plane in (K, V):
                shape = self.layout.planes[plane]
                data = buffer.array[at : at + count * shape.chunk_bytes]
                at += len(data)
                if not all_finite(data, self._geometry.dtype):
                    raise StoreFailed(f"store refused: layer {layer} holds NaN or infinite rows")
                start = self.layout.sums_at(layer, plane, first)
                self.sums[start : start + count * shape.pieces] = sums_of(data, shape.piece_bytes)
                off = self.layout.chunk_off(layer, plane, first)
                self._media.ssd.write(self.slot, off, data)
            for i, codec in enumerate(self._media.codecs):
                self._write_probe(codec, V + 1 + i, layer, first, count, buffer)
        except (StoreFailed, MediumError) as err:
            with self._lock:
                self._error = self._error or err
        finally:
            buffer.release()
            with self._lock:
                self._writing -= 1
                self._lock.notify_all()

    def _write_probe(
        self, codec: ProbeCodec, plane: int, layer: int, first: int, count: int, buffer: Buffer
    ) -> None:
        """What a codec makes of these windows' keys: a padded piece a window."""
        g, shape = self._geometry, self.layout.planes[plane]
        packed = buffer.array[: count * self.layout.planes[K].chunk_bytes]
        keys = plane_words(packed, self.layout.planes[K], g.dtype, g.n_kv_heads, g.head_dim)
        data = aligned(count * shape.chunk_bytes)
        groups = codec.encode(keys, g).reshape(count, -1)
        data.reshape(count, -1)[:, : groups.shape[1]] = groups
        start = self.layout.sums_at(layer, plane, first)
        self.sums[start : start + count] = sums_of(data, shape.piece_bytes)
        self._media.ssd.write(self.slot, self.layout.chunk_off(layer, plane, first), data)

    def settle(self, timeout_s: float) -> None:
        """Wait for its writes. Raises StoreFailed when one failed or is stuck."""
        with self._lock:
            if not self._lock.wait_for(lambda: self._writing == 0, timeout_s):
                raise StoreFailed(f"store: a write did not end within {timeout_s:g} s")
            if self._error is not None:
                raise StoreFailed(str(self._error)) from self._error


class Writer:
    """`PrefixStore.writer`: put rows of any layer in any order, then leave the with-block.

    put may be called from several threads for different layers. Leaving the block normally hands
    the span to the committer (READY comes later: `stored.wait()` or `flush`); leaving by an
    exception, or with rows missing, keeps nothing.
    """

    def __init__(
        self,
        stored: Stored,
        geometry: Geometry,
        window: int,
        draft: Draft | None,
        media: Media,
        wait_s: float,
        finish: Callable[[Writer], None],
    ) -> None:
        self.stored = stored
        self.draft = draft
        self._geometry = geometry
        self._window = window
        self._media = media
        self._wait_s = wait_s
        self._finish = finish
        self._closed = False
        n_windows = draft.record.n_windows if draft else 0
        self._first_token = draft.record.first_window * window if draft else stored.n_tokens
        self._missing = np.full((geometry.n_layers, n_windows), window, dtype=np.int32)
        self._partial: dict[tuple[int, int], _Partial] = {}

    def put(self, layer: int, first: int, k: Any, v: Any, importance: Any = None) -> None:
        """Rows of one layer from absolute position `first`: k, v [n_kv_heads, m, head_dim].

        On return the tensors may be overwritten. Rows already stored, put before, or past the
        last whole window are passed over. importance float32 [m]. Raises BadInput.
        """
        g = self._geometry
        if not isinstance(layer, int) or not 0 <= layer < g.n_layers:
            raise BadInput(f"put: layer {layer!r} is not in 0..{g.n_layers - 1}")
        if not isinstance(first, int) or first < 0:
            raise BadInput(f"put: first {first!r} is not a token position")
        m = check_rows(k, g, g.head_dim, f"put: layer {layer} keys")
        n_values = check_rows(v, g, g.v_dim, f"put: layer {layer} values")
        if n_values != m:
            raise BadInput(f"put: layer {layer}: {m} rows of keys, {n_values} of values")
        scores = importance_of(importance, (m,), "put")
        if self._closed:
            raise BadInput("put: this writer is closed")
        if self.draft is None or self.stored.refused:
            return
        begin = max(first, self._first_token)
        end = min(first + m, self.stored.n_tokens)
        if begin >= end:
            return
        rows = slice(begin - first, end - first)
        if scores is not None:
            self._note(layer, begin - self._first_token, scores[rows])
        words = (host_words(k[:, rows], g), host_words(v[:, rows], g))
        self._put_rows(layer, begin - self._first_token, *words)

    def _put_rows(self, layer: int, row: int, k: Words, v: Words) -> None:
        """Rows from span row `row` on: a ragged head, whole windows, a ragged tail."""
        size, n = self._window, k.shape[1]
        at = 0
        while at < n and not self.stored.refused:
            window, inside = divmod(row + at, size)
            whole = (n - at) // size if not inside else 0
            if whole:
                count = self._run(layer, window, whole)
                take = abs(count) * size
                if count > 0:
                    part = slice(at, at + take)
                    self._send(layer, window, count, k[:, part], v[:, part])
            else:
                take = min(size - inside, n - at)
                part = slice(at, at + take)
                self._fill(layer, window, inside, k[:, part], v[:, part])
            at += take

    def _run(self, layer: int, window: int, most: int) -> int:
        """How many of the next windows go in one slot; negative: so many are to be passed over."""
        assert self.draft is not None
        if self._missing[layer, window] == 0:
            return -1
        most = min(most, max(1, self._media.slot_bytes // self.draft.layout.chunk_bytes))
        taken = np.flatnonzero(self._missing[layer, window : window + most] == 0)
        return int(taken[0]) if taken.size else most

    def _send(self, layer: int, window: int, count: int, k: Words, v: Words) -> None:
        assert self.draft is not None
        buffer = self._acquire(count)
        if buffer is None:
            return
        cut = count * self.draft.layout.planes[K].chunk_bytes
        pack(k, buffer.array[:cut], self.draft.layout.planes[K])
        pack(v, buffer.array[cut:], self.draft.layout.planes[V])
        for w in range(window, window + count):
            partial = self._partial.pop((layer, w), None)
            if partial is not None:
                partial.buffer.release()
        self._missing[layer, window : window + count] = 0
        self.draft.write(layer, window, count, buffer)

    def _fill(self, layer: int, window: int, inside: int, k: Words, v: Words) -> None:
        """Part of a window: gathered row by row in a slot of its own until it is whole."""
        assert self.draft is not None
        if self._missing[layer, window] == 0:
            return
        partial = self._partial.get((layer, window))
        if partial is None:
            buffer = self._acquire(1)
            if buffer is None:
                return
            partial = _Partial(buffer, np.zeros(self._window, dtype=bool), k, v, self._window)
            self._partial[layer, window] = partial
        rows = slice(inside, inside + k.shape[1])
        partial.k[:, rows], partial.v[:, rows] = k, v
        partial.there[rows] = True
        if partial.there.all():
            del self._partial[layer, window]
            self._missing[layer, window] = 0
            cut = self.draft.layout.planes[K].chunk_bytes
            pack(partial.k, partial.buffer.array[:cut], self.draft.layout.planes[K])
            pack(partial.v, partial.buffer.array[cut:], self.draft.layout.planes[V])
            self.draft.write(layer, window, 1, partial.buffer)

    def _acquire(self, count: int) -> Buffer | None:
        assert self.draft is not None
        buffer = self._media.slots.acquire(count * self.draft.layout.chunk_bytes, self._wait_s)
        if buffer is None:
            self.stored.refused = "no free write slot"
        return buffer

    def _note(self, layer: int, row: int, scores: npt.NDArray[np.float32]) -> None:
        assert self.draft is not None
        if self.draft.importance is None:
            shape = (self._geometry.n_layers, self.draft.record.n_windows * self._window)
            self.draft.importance = np.full(shape, np.nan, dtype=np.float32)
        self.draft.importance[layer, row : row + len(scores)] = scores

    @property
    def complete(self) -> bool:
        return not self._missing.any()

    def close(self, *, keep: bool = True) -> None:
        """End of the with-block; `keep=False` gives everything back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for partial in self._partial.values():
            partial.buffer.release()
        self._partial.clear()
        if not self.stored.refused and not keep:
            self.stored.refused = "abandoned"
        if not self.stored.refused and self.draft is not None and not self.complete:
            layer, window = (int(i[0]) for i in np.nonzero(self._missing))
            at = self._first_token + window * self._window
            self.stored.refused = f"incomplete: rows missing from layer {layer}, token {at} on"
        self._finish(self)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close(keep=kind is None)


class _Partial:
    """A window of one layer whose rows are still coming in."""

    __slots__ = ("buffer", "k", "there", "v")

    def __init__(
        self, buffer: Buffer, there: npt.NDArray[np.bool_], k: Words, v: Words, window: int
    ) -> None:
        self.buffer = buffer
        self.there = there
        self.k = np.zeros((k.shape[0], window, k.shape[2]), dtype=k.dtype)
        self.v = np.zeros((v.shape[0], window, v.shape[2]), dtype=v.dtype)


def importance_of(values: Any, shape: tuple[int, ...], what: str) -> npt.NDArray[np.float32] | None:
    """Importance as a float32 array of this shape. Raises BadInput."""
    if values is None:
        return None
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    array = np.asarray(values, dtype=np.float32)
    if array.shape != shape or np.isnan(array).any():
        raise BadInput(f"{what}: importance wants {list(shape)} numbers, got {list(array.shape)}")
    return array
