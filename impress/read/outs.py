"""What a caller gives to be read into: whether it fits, and each layer's lies apart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from impress.errors import BadInput
from impress.spans.rows import dense_bytes
from impress.types import Geometry

if TYPE_CHECKING:
    from impress.read.load import Tensors


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
            places.append((memory.__array_interface__["data"][0], len(memory)))
    for (at, n_bytes), (after, _) in pairwise(sorted(places)):
        if at + n_bytes > after:
            raise BadInput(
                "prefetch: two tensors of outs share memory: K and V of each layer want their own"
            )
