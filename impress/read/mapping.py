"""How the wanted rows of a layer are found: by chunks, by rows, or all as they lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from impress.read.direct import Direct
from impress.read.early import Early
from impress.read.parts import Part
from impress.read.plan import Gather, gather, gather_chunks, gather_whole
from impress.read.takes import promised
from impress.read.whole import Whole
from impress.spans.layout import PlaneLayout


def gathers_of(
    parts: Sequence[Part], planes: Sequence[int], shapes: Sequence[PlaneLayout], gap_bytes: int, *,
    chosen: bool, direct: Direct | Whole | None, ahead: Early | None,
) -> list[Gather]:  # fmt: skip
    """Where the wanted rows of these parts lie, by plane; with `direct`, only those home gives.

    `chosen`: not all rows are wanted. `ahead`: what was read of them ahead. Pure.
    """
    one = gather if chosen or direct is not None else gather_whole
    if direct is not None:
        parts = direct.left
        if isinstance(direct, Whole):
            one = partial(gather_chunks, direct.chunks)
    gathers: list[Gather] = []
    for i, (plane, shape) in enumerate(zip(planes, shapes, strict=True)):
        alike = shapes.index(shape)
        if alike < i and ahead is None:  # the same pieces: they lie alike
            gathers.append(gathers[alike])
        else:
            gathers.append(one(parts, plane, gap_bytes, promised(ahead, parts, plane)))
    return gathers
