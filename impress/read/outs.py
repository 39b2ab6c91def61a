"""What a caller gives to be read into: whether it fits, lies apart, and has its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from impress.errors import BadInput
from impress.spans.rows import address_of, dense_bytes
from impress.types import Geometry

if TYPE_CHECKING:
    import torch

    from tiers.base import Bytes

    Tensors = tuple[torch.Tensor, torch.Tensor]


_SHARED: Final = "two tensors of outs share memory: K and V of each layer want their own"


class Outs:
    """One layer's tensors of a caller's. `memory`: of each, where rows as they lie in a tier fill
    it; else None."""

    __slots__ = ("_tensors", "memory")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self.memory = [dense_bytes(out) for out in tensors]

    def filled(self, i: int, data: Bytes, as_rows: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Tensor number i with the rows of `data`: as they were read into it, or copied."""
        out, memory = self._tensors[i], self.memory[i]
        is_there = address_of(data) == out.data_ptr()
        if is_there and memory is not None:
            return out
        rows = as_rows()
        if is_there:  # by another view of it, of another order
            rows = rows.clone()
        return out.copy_(rows)


def outs_of_all(given: Sequence[Tensors], geometry: Geometry, n_tokens: int) -> list[Outs]:
    """A pair for each layer, each of which fits; they lie apart. Raises BadInput."""
    n = len(given) if hasattr(given, "__len__") else type(given).__name__
    if n != geometry.n_layers:
        raise BadInput(f"prefetch: want {geometry.n_layers} pairs, got {n}")
    outs = [_fitting(pair, geometry, n_tokens) for pair in given]
    _check_apart(outs)
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
    if pair[0].data_ptr() == pair[1].data_ptr():  # also where they are copied to
        raise BadInput(_SHARED)
    return Outs(pair)


def _check_apart(outs: Sequence[Outs]) -> None:
    """That no two of those that are read straight into share memory. Raises BadInput.

    A layer that is there would be overwritten by one that comes later, and be valid rows of that.
    """
    dense = (memory for pair in outs for memory in pair.memory if memory is not None)
    places = sorted((address_of(memory), len(memory)) for memory in dense)
    for (at, n_bytes), (after, _) in pairwise(places):
        if at + n_bytes > after:
            raise BadInput(_SHARED)
