"""What a caller gives to be read into: whether it fits, lies apart, and has its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from impress.errors import BadInput
from impress.spans.rows import address_of, dense_bytes
from impress.types import Geometry

if TYPE_CHECKING:
    import torch

    from tiers.base import Bytes

    Tensors = tuple[torch.Tensor, torch.Tensor]


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


def check_all(outs: Sequence[Tensors], geometry: Geometry, n_tokens: int) -> None:
    """That they are a pair for each layer that fits, and lie apart. Raises BadInput."""
    if len(outs) != geometry.n_layers:
        raise BadInput(f"prefetch: want {geometry.n_layers} pairs, got {len(outs)}")
    for out in outs:
        check_fits(out, geometry, n_tokens)
    check_apart(outs)


def check_fits(outs: Tensors, geometry: Geometry, n_tokens: int) -> None:
    """That (k, v) have the shapes and the type of a layer's n_tokens. Raises BadInput."""
    for out, dim in zip(outs, (geometry.head_dim, geometry.v_dim), strict=True):
        want = (geometry.n_kv_heads, n_tokens, dim)
        if tuple(out.shape) != want or str(out.dtype) != f"torch.{geometry.dtype}":
            raise BadInput(
                f"retrieve: out wants {list(want)} {geometry.dtype}, "
                f"got {list(out.shape)} {out.dtype}"
            )


def check_apart(outs: Sequence[Tensors]) -> None:
    """That no two of those that are read straight into share memory. Raises BadInput.

    A layer that is there would be overwritten by one that comes later, and be valid rows of that.
    """
    places = []
    for out in (tensor for pair in outs for tensor in pair):
        if (memory := dense_bytes(out)) is not None:
            places.append((address_of(memory), len(memory)))
    for (at, n_bytes), (after, _) in pairwise(sorted(places)):
        if at + n_bytes > after:
            raise BadInput(
                "prefetch: two tensors of outs share memory: K and V of each layer want their own"
            )
