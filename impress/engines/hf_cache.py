"""The cache of one generate() call: token-major rows, the stored prefix read straight into them.

    batch row 0: | prefix, read by the store | appended by update() | room |  <- page boundary
    batch row 1: | prefix ...

Memory is rented from a pool, for as many tokens as the request may come to, or in virtual buffers
(buffers.py), where it comes as the request grows; rows that cannot grow there move to the pool.

Keys and values are presented to the model as [batch, n_kv_heads, length, head_dim] views, so that
its stock attention runs unchanged; measured bit-identical to contiguous ones under sdpa. Eager
attention gets contiguous copies, since its batched product was seen to differ by 1e-7 on views.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from impress.engines.buffers import Rental, VirtualBuffers
from impress.engines.hf_compiled import untraced
from impress.engines.hf_models import Prompt
from impress.engines.hf_observed import Observed
from impress.errors import PrefixLost, StoreFailed, Unsupported
from impress.types import Geometry
from tiers.base import round_up
from tiers.errors import MediumError
from tiers.slots import Buffer, BufferPool


class Prefix(Protocol):
    """The stored rows of every batch row, on their way into a cache."""

    def start(self, outs: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]) -> None:
        """Begin reading. outs: for each batch row, for each layer, (k, v) to fill."""

    def wait(self, layer: int) -> None:
        """Return when a layer's rows are in every batch row. Raises PrefixLost."""

    def is_untouched(self) -> bool:
        """Once it is closed: whether no read writes into the cache any more."""


class _Plane:
    """Keys or values of one layer: `rows` is [batch, capacity, n_kv_heads, head_dim].

    On the host every batch row starts at a page, which is what direct reads need. On any other
    device it is an ordinary tensor.
    """

    __slots__ = ("buffer", "rows")

    def __init__(
        self,
        pool: BufferPool,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.buffer: Buffer | None = None
        batch, capacity, n_heads, head_dim = shape
        row_bytes = round_up(capacity * n_heads * head_dim * dtype.itemsize)
        try:
            if device.type != "cpu":
                self.rows = torch.empty(shape, dtype=dtype, device=device)
                return
            self.buffer = pool.acquire(batch * row_bytes)
        except (MediumError, torch.OutOfMemoryError) as err:
            raise StoreFailed(
                f"rows of {capacity:,} tokens, prompt and answer: {err}; ask for fewer by "
                "max_new_tokens, have them grow by virtual=, or raise the process's memory limit"
            ) from None
        assert self.buffer is not None, "the engine's pool has no budget, so it never refuses"
        strides = (row_bytes // dtype.itemsize, n_heads * head_dim, head_dim, 1)
        self.rows = torch.from_numpy(self.buffer.array).view(dtype).as_strided(shape, strides)

    def release(self) -> None:
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            buffer.release()

    def forsake(self) -> None:
        """Never give the memory back: a stuck read may still write into it."""
        self.buffer = None


class _Lent:
    """Keys or values of one layer in virtual buffers: the rental's to give back."""

    __slots__ = ("rows",)

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def release(self) -> None:
        """Its memory goes with the rental."""

    forsake = release


class RowsLayer(CacheLayerMixin):  # type: ignore[misc]  # the base is untyped
    """One layer. Appends in place; the first update() waits for the stored prefix.

    Raises PrefixLost from update() when a read of the prefix fails, and Unsupported when the model
    computes keys of another shape or dtype than its geometry says.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(
        self, geometry: Geometry, batch: int, capacity: int, pool: BufferPool, *, n_prefix: int,
        contiguous: bool, rental: Rental | None = None, index: int = 0, on_host: bool = True,
    ) -> None:  # fmt: skip
        """rental: virtual buffers to use, as layer `index`; `n_prefix` rows have memory.
        on_host: False where the model computes elsewhere. Raises StoreFailed without memory for
        its rows, PrefixLost without memory for a prefix alone."""
        super().__init__()
        self.keys: torch.Tensor | None
        self.values: torch.Tensor | None
        self.geometry = geometry
        self.batch = batch
        self.length = n_prefix
        self._capacity = capacity
        self._pool = pool
        self.wait: Callable[[], None] | None = None  # for the prefix, set by the cache's load
        self.behind: Callable[[], bool] | None = None  # asked once it is there, until it is True
        self.begun: Callable[[], None] | None = None  # called as its first rows come
        self._contiguous = contiguous
        self._rental = rental
        self._index = index
        # K and V; nothing before the first update of a miss.
        self._planes: Sequence[_Plane | _Lent] = ()
        self._left: list[_Plane | _Lent] = []  # by the rows; the prefix may be copied from here yet
        self._on_host = on_host
        if n_prefix:  # a device's rows only land here on their way
            self._planes = self._new_planes(torch.device("cpu"), None if on_host else n_prefix)

    def prefix_views(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the store writes a batch row's prefix: k, v [n_kv_heads, n_prefix, head_dim]."""
        k, v = (plane.rows[row, : self.length].transpose(0, 1) for plane in self._planes)
        return k, v

    def rows(self, row: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [first, end) of a batch row, on the host: k, v [n_kv_heads, n, head_dim]."""
        k, v = (plane.rows[row, first:end].transpose(0, 1).cpu() for plane in self._planes)
        return k, v

    def all_rows(self) -> list[torch.Tensor]:
        """Its keys and values."""
        return [plane.rows for plane in self._planes]

    def own_rows(self) -> list[torch.Tensor]:
        """Its keys and values, except those in virtual buffers, which have bounds of their own."""
        return [plane.rows for plane in self._planes if isinstance(plane, _Plane)]

    def first_keys(self, row: int, n: int) -> torch.Tensor:
        """Only the keys of a batch row's first n `rows`: values need not come from a device."""
        return self._planes[0].rows[row, :n].transpose(0, 1).cpu()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._check(key_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        if self.begun is not None:
            self.begun()
        if self.wait is not None:
            self.wait()
            self.wait = None
        if not self._planes:
            self._planes = self._new_planes(self.device)
        elif self.device.type != "cpu" or not self._on_host:
            # Simple and correct: the prefix lands in host memory and is copied over.
            self._move(self._new_planes(self.device), self.length)
        self.is_initialized = True

    @untraced
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [batch, n_kv_heads, n, head_dim]; returns all keys and values up to here."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.behind is not None and self.behind():
            self.behind = None
        first, end = self.length, self.length + key_states.shape[-2]
        if not self._has_room(end):
            self._capacity = max(end, self._capacity if self._rental else 2 * self._capacity)
            self._rental = None
            self._move(self._new_planes(self.device), first)
        for plane, new in zip(self._planes, (key_states, value_states), strict=True):
            plane.rows[:, first:end].copy_(new.transpose(1, 2))
        self.length = end
        k, v = (plane.rows[:, :end].transpose(1, 2) for plane in self._planes)
        self.keys, self.values = k, v
        return (k.contiguous(), v.contiguous()) if self._contiguous else (k, v)

    def owns(self, key: torch.Tensor) -> bool:
        """Whether these keys, as an attention was given them, are those `update` returned last.

        Not asked where it is `contiguous`: attention is then given copies.
        """
        return self.keys is not None and key.data_ptr() == self.keys.data_ptr()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1  # grows

    def reset(self) -> None:
        raise Unsupported("a request's cache cannot be reset")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise Unsupported("a request's cache cannot be reordered")

    def release(self) -> None:
        """Give the memory back. Idempotent."""
        self.release_left()
        for plane in self._planes:
            plane.release()
        self._planes = ()
        self.keys = self.values = None  # views, which would keep a device's memory

    def release_left(self) -> None:
        """Give back what rows moved out of: no read of the prefix touches it any more."""
        for plane in self._left:
            plane.release()
        self._left.clear()

    def forsake(self) -> None:
        for plane in (*self._planes, *self._left):
            plane.forsake()

    def _check(self, key_states: torch.Tensor) -> None:
        geometry = self.geometry
        name = str(key_states.dtype).removeprefix("torch.")
        if name != geometry.dtype:
            raise Unsupported(f"the model computes {name} keys, its store holds {geometry.dtype}")
        batch, n_heads, _, head_dim = key_states.shape
        if (batch, n_heads, head_dim) != (self.batch, geometry.n_kv_heads, geometry.head_dim):
            raise Unsupported(f"keys of shape {tuple(key_states.shape)} do not fit {geometry}")

    def _has_room(self, n_rows: int) -> bool:
        return n_rows <= self._capacity if self._rental is None else self._rental.reach(n_rows)

    def _new_planes(
        self, device: torch.device, n_rows: int | None = None
    ) -> Sequence[_Plane | _Lent]:  # fmt: skip
        if self._rental is not None and self._rental.device == device:
            return [_Lent(rows) for rows in self._rental.planes(self._index)]
        if n_rows is None:  # else a prefix only passes through this memory
            self._rental = None  # of another device, it says nothing of the room here
        geometry, dtype = self.geometry, getattr(torch, self.geometry.dtype)
        shape = self.batch, n_rows or self._capacity, geometry.n_kv_heads
        dims = geometry.head_dim, geometry.v_dim
        try:
            return [_Plane(self._pool, (*shape, dim), dtype, device) for dim in dims]
        except StoreFailed as err:
            if n_rows is None:
                raise
            raise PrefixLost("shortage", str(err)) from None  # to be computed without it

    def _move(self, planes: Sequence[_Plane | _Lent], n_rows: int) -> None:
        for old, new in zip(self._planes, planes, strict=True):
            new.rows[:, :n_rows].copy_(old.rows[:, :n_rows])
        self._left += self._planes  # copies of the prefix are made from there until it is closed
        self._planes = planes


class RequestCache(Cache):  # type: ignore[misc]  # the base is untyped
    """The layers of one request, as an attention asks for them."""

    @untraced
    def layer_of(self, index: int, key: torch.Tensor) -> Any:
        """Its layer `index` where these are that layer's keys, else None.

        While a request runs, the caller's code may run the model over keys of its own, or
        another model, which may have more layers.
        """
        layer = self.layers[index] if index < len(self.layers) else None
        return layer if layer is not None and layer.owns(key) else None

    def check_attended(self) -> None:
        """Raises Unsupported after a first pass that did not attend as the request wants it."""


class RowsCache(RequestCache):
    """The layers of one request. Serves one generate() call, then storing, then release()."""

    max_cache_len: Final = -1  # it grows; PEFT's prefix tuning asks before it brings its own cache

    def __init__(
        self,
        geometry: Geometry,
        batch: int,
        capacity: int,
        pool: BufferPool,
        *,
        n_prefix: int = 0,
        contiguous: bool = False,
        rental: Rental | None = None,
        on_host: bool = True,
    ) -> None:
        """Rent room for `capacity` tokens, of which the first `n_prefix` will come by `load`.

        `rental`: room in virtual buffers, the cache's to give back. `on_host`: the model is there.
        """
        assert n_prefix <= capacity
        self.observed: Observed | None = None  # what will tell which of these rows matter
        self._batch = batch
        self._rental = rental
        super().__init__(
            layers=[
                RowsLayer(
                    geometry, batch, capacity, pool, n_prefix=n_prefix, contiguous=contiguous,
                    rental=rental, index=index, on_host=on_host,
                )
                for index in range(geometry.n_layers)
            ]
        )  # fmt: skip

    def load(self, prefix: Prefix) -> None:
        """Start reading a prefix of `n_prefix` tokens; each layer's first update() waits for it."""
        for index, layer in enumerate(self.layers):
            layer.wait = partial(prefix.wait, index)
        if self._rental is not None:  # before the first read: `forsake` may never be called
            self._rental.untouched = prefix.is_untouched
        views = [[layer.prefix_views(row) for layer in self.layers] for row in range(self._batch)]
        prefix.start(views)

    @property
    def length(self) -> int:
        """Tokens whose keys and values every layer holds."""
        return min(int(layer.length) for layer in self.layers)

    def devices(self) -> set[torch.device]:
        """CUDA devices that its rows are on, in virtual buffers or not."""
        return {rows.device for layer in self.layers for rows in layer.all_rows() if rows.is_cuda}

    def device_bytes(self) -> Counter[torch.device]:
        """Memory that its rows hold on each CUDA device."""
        held = Counter[torch.device]()
        for rows in (rows for layer in self.layers for rows in layer.own_rows()):
            if rows.is_cuda:
                held[rows.device] += rows.nbytes
        return held

    def as_dynamic(self) -> DynamicCache:
        """Copies of the rows in a stock cache, for a caller who asked for past_key_values.

        Changing them in place does not change what is being stored under the request's tokens. A
        layer that the model left out is empty, as it is in a stock cache.
        """
        stock = DynamicCache()
        for rows in self.layers:
            layer = DynamicLayer()
            if rows.keys is not None:
                layer.lazy_initialization(rows.keys, rows.values)
                layer.keys, layer.values = rows.keys.clone(), rows.values.clone()
            stock.layers.append(layer)
        return stock

    def forsake(self, untouched: Callable[[], bool]) -> None:
        """Keep this memory from being rented again while a stuck read may still write into it.

        `untouched`: whether none may now. Pooled memory is never rented again; reads keep it alive.
        """
        for layer in self.layers:
            layer.forsake()
        if self._rental is not None:
            self._rental.untouched = untouched

    def release_left(self) -> None:
        """The prefix has been closed: give back memory that rows moved out of."""
        for layer in self.layers:
            layer.release_left()

    def release(self) -> None:
        """Give all memory back. Nobody may look at the rows afterwards. Idempotent."""
        for layer in self.layers:
            layer.release()
        if self._rental is not None:
            self._rental.release()


def rent(buffers: VirtualBuffers | None, prompt: Prompt, n_rows: int) -> Rental | None:
    """Virtual buffers with memory behind a request's first n_rows rows, where there are any."""
    if buffers is None:
        return None
    return buffers.rent(len(prompt.rows), n_rows, prompt.n_tokens + prompt.n_new)
