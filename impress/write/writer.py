"""One store under way: rows arrive in any order and leave for the disk as pieces fill.

The rows are packed into pooled slots inside `put`, so the caller may reuse its tensors. A layer
put whole with its importance is written in that order, most important first (spans/order.py); any
other keeps position order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from impress.errors import BadInput, StoreFailed
from impress.spans.layout import K, V
from impress.spans.order import Rows, by_worth
from impress.spans.rows import Words, check_rows, host_words, pack
from impress.types import Geometry, an_int, check_layer
from impress.write.draft import Draft, Media, Stored
from tiers.errors import ReadFailed
from tiers.slots import Buffer

if TYPE_CHECKING:
    from types import TracebackType

#: What `Stored.refused` says where no buffer came back in time.
NO_SLOT: Final = "no free write slot"


class Writer:
    """`PrefixStore.writer`: put rows of any layer in any order, then leave the with-block.

    put may be called from several threads for different layers. Rows of a window that is not whole
    yet are kept in memory of the writer's own, beside `Config.write_buffer_bytes`. Leaving the
    block normally hands the span to the committer (READY comes later: `stored.wait()` or `flush`);
    leaving by an exception, or with rows missing, keeps nothing.
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
        self._lock = threading.Lock()  # for what puts of several layers and `close` change
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
        check_layer(layer, g.n_layers, "put")
        first = an_int(first, "put: first")
        if first < 0:
            raise BadInput(f"put: first {first} is not a token position")
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
        rows, row = slice(begin - first, end - first), begin - self._first_token
        words = (host_words(k[:, rows], g), host_words(v[:, rows], g))
        slots = None
        if scores is not None:
            self._note(layer, row, scores[rows])
            slots = self._packed_order(layer, scores[rows])
        if slots is None:
            self._put_rows(layer, row, *words)
        else:
            self._put_packed(layer, slots, *words)

    def _packed_order(self, layer: int, scores: npt.NDArray[np.float32]) -> Rows | None:
        """The row for each slot; None where these rows are to lie in position order.

        Only a layer's first and whole put can be packed: what is written stays where it is.
        """
        begun = (self._missing[layer] == 0).any() or any(
            at == layer for at, _ in list(self._partial)
        )
        if begun or len(scores) != self._missing.shape[1] * self._window:
            return None
        rows = np.arange(len(scores))
        slots = by_worth(scores, [(0, len(rows))], rows)
        return None if np.array_equal(slots, rows) else slots

    def _put_packed(self, layer: int, slots: Rows, k: Words, v: Words) -> None:
        """A whole layer, its rows as `slots` says; probe records from rows in position order.

        Whoever catches its error has a refused store: another put of the layer would have the rest
        lie in position order, under a header that says otherwise.
        """
        assert self.draft is not None
        try:
            self.draft.packed[layer] = slots
            self._send_packed(layer, slots, k, v)
        except BaseException:
            self.stored.refused = self.stored.refused or "failed: a put was cut off"
            raise

    def _send_packed(self, layer: int, slots: Rows, k: Words, v: Words) -> None:
        assert self.draft is not None
        n_windows, shape = self._missing.shape[1], self.draft.layout.planes[K]
        for window in range(0, n_windows, self._most):
            count = min(self._most, n_windows - window)
            rows = slice(window * self._window, (window + count) * self._window)
            self._send(layer, window, count, k[:, slots[rows]], v[:, slots[rows]])
            if self._media.codecs and not self.stored.refused:
                buffer = self._acquire(count * shape.chunk_bytes)
                if buffer is not None:
                    with _given_back(buffer):
                        pack(k[:, rows], buffer.array, shape)
                    self.draft.write_probes(layer, window, count, buffer)
            if self.stored.refused:
                return

    @property
    def _most(self) -> int:
        """Windows that go in one slot."""
        assert self.draft is not None
        return max(1, self._media.slot_bytes // self.draft.layout.chunk_bytes)

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
        if self._missing[layer, window] == 0:
            return -1
        most = min(most, self._most)
        taken = np.flatnonzero(self._missing[layer, window : window + most] == 0)
        return int(taken[0]) if taken.size else most

    def _send(self, layer: int, window: int, count: int, k: Words, v: Words) -> None:
        assert self.draft is not None
        buffer = self._acquire(count * self.draft.layout.chunk_bytes)
        if buffer is None:
            return
        with _given_back(buffer):
            self._pack(k, v, buffer, count)
        for w in range(window, window + count):
            self._partial.pop((layer, w), None)
        self.draft.write(layer, window, count, buffer)
        self._missing[layer, window : window + count] = 0  # only now: it may have been refused

    def _fill(self, layer: int, window: int, inside: int, k: Words, v: Words) -> None:
        """Part of a window: gathered row by row. It takes a slot only once it is whole: slots held
        for rows to come would keep these rows from coming."""
        if self._missing[layer, window] == 0:
            return
        partial = self._partial.get((layer, window))
        if partial is None:
            partial = self._partial[layer, window] = _Partial(k, v, self._window)
        rows = slice(inside, inside + k.shape[1])
        partial.k[:, rows], partial.v[:, rows] = k, v
        partial.there[rows] = True
        if partial.there.all():
            self._send(layer, window, 1, partial.k, partial.v)

    def _pack(self, k: Words, v: Words, buffer: Buffer, count: int) -> None:
        """Pack rows of so many windows as pieces: K, then V."""
        assert self.draft is not None
        planes = self.draft.layout.planes
        cut = count * planes[K].chunk_bytes
        pack(k, buffer.array[:cut], planes[K])
        pack(v, buffer.array[cut:], planes[V])

    def _acquire(self, n_bytes: int) -> Buffer | None:
        try:
            buffer = self._media.slots.acquire(n_bytes, self._wait_s)
        except ReadFailed as err:  # the system gives no more memory
            self.stored.refused = str(err)
            return None
        if buffer is None:
            self.stored.refused = NO_SLOT
        return buffer

    def _note(self, layer: int, row: int, scores: npt.NDArray[np.float32]) -> None:
        assert self.draft is not None
        if self.draft.importance is None:
            shape = (self._geometry.n_layers, self.draft.record.n_windows * self._window)
            unknown = np.full(shape, np.nan, dtype=np.float32)
            with self._lock:  # two layers may be put first at once
                if self.draft.importance is None:
                    self.draft.importance = unknown
        self.draft.importance[layer, row : row + len(scores)] = scores

    @property
    def complete(self) -> bool:
        return not self._missing.any()

    def close(self, *, keep: bool = True) -> None:
        """End of the with-block; `keep=False` gives everything back. Idempotent."""
        try:
            with self._lock:
                before, self._closed = self._closed, True
            if not before:
                self._end(keep)
        except StoreFailed:
            raise
        except BaseException:  # Ctrl-C, no memory: nobody closes it again
            self._closed = True
            self._end(keep)
            raise

    def _end(self, keep: bool) -> None:
        """What closing takes. What an exception cut off, the next call does."""
        self._partial = {}
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


@contextmanager
def _given_back(buffer: Buffer) -> Iterator[None]:
    """Release the slot where the block fails (no memory, Ctrl-C): nobody else has it yet."""
    try:
        yield
    except BaseException:
        buffer.release()
        raise


class _Partial:
    """A window of one layer whose rows are still coming in."""

    __slots__ = ("k", "there", "v")

    def __init__(self, k: Words, v: Words, window: int) -> None:
        self.there = np.zeros(window, dtype=bool)
        self.k = np.zeros((k.shape[0], window, k.shape[2]), dtype=k.dtype)
        self.v = np.zeros((v.shape[0], window, v.shape[2]), dtype=v.dtype)


def importance_of(values: Any, shape: tuple[int, ...], what: str) -> npt.NDArray[np.float32] | None:
    """Importance as a float32 array of this shape. Raises BadInput."""
    if values is None:
        return None
    try:
        if hasattr(values, "detach"):
            values = values.detach().cpu().numpy()
        array = np.asarray(values, dtype=np.float32)
    except (ValueError, TypeError, OverflowError, NotImplementedError) as err:  # meta tensors: last
        raise BadInput(f"{what}: importance wants {list(shape)} numbers: {err}") from None
    if array.shape != shape:
        raise BadInput(f"{what}: importance wants {list(shape)} numbers, got {list(array.shape)}")
    if np.isnan(array).any():
        raise BadInput(f"{what}: importance wants numbers, got nan among them")
    return array
