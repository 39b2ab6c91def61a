"""Tensors that a caller gives to be read into: that they fit, lie apart, and get their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from impress.errors import BadInput
from impress.spans.rows import address_of, dense_bytes
from impress.types import Geometry

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from tiers.base import Bytes

    Tensors = tuple[torch.Tensor, torch.Tensor]


_SHARED: Final = "two tensors of outs share memory: K and V of each layer want their own"


class Outs:
    """A caller's tensors for one layer. `memory`: for each, its bytes where rows as they lie in a
    tier fill it; else None."""

    __slots__ = ("_places", "_tensors", "memory")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self.memory = [dense_bytes(out) for out in tensors]
        self._places: list[npt.NDArray[Any]] = []

    @property
    def places(self) -> list[npt.NDArray[Any]]:
        """Where each lies: as arrays to compare by place, whose values are not to be looked at."""
        self._places = self._places or [_place(out) for out in self._tensors]
        return self._places

    def spoils(self, other: Outs, *, own: bool) -> bool:
        """Whether writing here would overwrite what `other` is read straight into. `own`: it is the
        same layer's, whose keys may go where its keys are."""
        return any(
            memory is not None and np.shares_memory(mine, theirs)
            for i, mine in enumerate(self.places)
            for j, (theirs, memory) in enumerate(zip(other.places, other.memory, strict=True))
            if not (own and i == j and address_of(mine) == address_of(theirs))
        )

    def filled(self, i: int, data: Bytes, as_rows: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Tensor number i with the rows of `data`: as they were read into it, or copied."""
        out, memory = self._tensors[i], self.memory[i]
        is_there = address_of(data) == out.data_ptr()
        if is_there and memory is not None:
            return out
        rows = as_rows()
        if is_there:  # through another view of it, in another order
            rows = rows.clone()
        return out.copy_(rows)


def outs_of_all(given: Sequence[Tensors], geometry: Geometry, n_tokens: int) -> list[Outs]:
    """A pair for each layer, each of which fits; they lie apart. Raises BadInput."""
    n = len(given) if hasattr(given, "__len__") else type(given).__name__
    if n != geometry.n_layers:
        raise BadInput(f"prefetch: want {geometry.n_layers} pairs, got {n}")
    outs = [_fitting(pair, geometry, n_tokens) for pair in given]
    _check_apart(outs)
    copied = {i: o for i, o in enumerate(outs) if any(m is None for m in o.memory)}
    straight = {i: o for i, o in enumerate(outs) if any(m is not None for m in o.memory)}
    check_beside(copied, straight)  # over what is there of another layer
    return outs


def outs_of(
    pair: Tensors, geometry: Geometry, n_tokens: int, others: Iterable[Outs | None]
) -> Outs:
    """(k, v) of one layer, which fit, and lie apart from each other and from those that `others`
    are on their way to. Raises BadInput."""
    outs = _fitting(pair, geometry, n_tokens)
    _check_apart([outs, *(other for other in others if other is not None)])
    return outs


def _fitting(pair: Tensors, geometry: Geometry, n_tokens: int) -> Outs:
    if not isinstance(pair, Sequence) or [hasattr(out, "data_ptr") for out in pair] != [True] * 2:
        raise BadInput(f"retrieve: out wants a pair of tensors, got {type(pair).__name__}")
    for out, dim in zip(pair, (geometry.head_dim, geometry.v_dim), strict=True):
        want = (geometry.n_kv_heads, n_tokens, dim)
        if tuple(out.shape) != want or str(out.dtype) != f"torch.{geometry.dtype}":
            raise BadInput(
                f"retrieve: out wants {list(want)} {geometry.dtype}, "
                f"got {list(out.shape)} {out.dtype}"
            )
    if not all(out.data_ptr() or not out.numel() for out in pair):
        raise BadInput("retrieve: out wants tensors with memory, got one of device meta")
    outs = Outs(pair)
    if any(memory is None for memory in outs.memory):  # copied to; else `_check_apart` sees it
        keys, values = outs.places
        if np.shares_memory(keys, values):
            raise BadInput(_SHARED)
    return outs


def _place(out: torch.Tensor) -> npt.NDArray[Any]:
    size = out.element_size()
    interface = {
        "version": 3, "typestr": f"|V{size}", "shape": tuple(out.shape),
        "strides": tuple(size * stride for stride in out.stride()),
        "data": (out.data_ptr(), True),
    }  # fmt: skip
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def check_beside(given: Mapping[int, Outs], into: Mapping[int, Outs]) -> None:
    """Check that no pair lies where a layer is being read to, except its own layer's, given again.
    Raises BadInput.

    Bytes that were read there, and verified, would be overwritten before anybody looks at them.
    """
    for layer, pair in given.items():
        for at, other in into.items():
            if pair.spoils(other, own=at == layer):
                raise BadInput(
                    f"outs of layer {layer} lie where layer {at} is being read to: give each its "
                    "own memory, and keep it to the end of the session"
                )


def _check_apart(outs: Sequence[Outs]) -> None:
    """Check that no two of those that are read straight into share memory. Raises BadInput.

    A layer that is there would be overwritten by a later one, and hold valid rows of that one.
    """
    dense = (memory for pair in outs for memory in pair.memory if memory is not None)
    places = sorted((address_of(memory), len(memory)) for memory in dense)
    for (at, n_bytes), (after, _) in pairwise(places):
        if at + n_bytes > after:
            raise BadInput(_SHARED)
