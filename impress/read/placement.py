"""Where the chunks of a layer's read lie, and which of them it used. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from impress.cache.chunks import ChunkCache, Ids
from impress.cache.levels import levels_of
from impress.read.parts import Part, used_chunks
from impress.read.plan import Runs
from impress.spans.format import SpanRecord
from impress.spans.layout import PlaneLayout


@dataclass(frozen=True, slots=True)
class Brought:
    """What a load brought, without the bytes: from where, and where they lay in its memory.

    `entries[cache][part]`: for each of its chunks; `runs[plane][part]`: of pieces read.
    """

    layer: int
    planes: tuple[int, ...]
    parts: Sequence[Part]
    caches: Sequence[ChunkCache]
    entries: Sequence[Sequence[Ids]]
    shapes: Sequence[PlaneLayout]
    runs: Sequence[Sequence[Runs]]
    rows_by_tier: dict[str, int]

    def arrays(self) -> Iterator[Ids]:
        """What it keeps in memory; some more than once."""
        for part in self.parts:
            if part.found is not None:
                yield part.found
        yield from chain.from_iterable(self.entries)
        for by_part in self.runs:
            yield from chain.from_iterable(by_part)


class Placed(NamedTuple):
    """One span: its windows, chunks in each fast tier, mean score of its chunks, and mean share.

    Score and share (of important rows) are None where no request has shown any.
    """

    span: int
    n_windows: int
    chunks: dict[str, int]
    score: float | None
    share: float | None


def placed(
    records: Iterable[SpanRecord], occupancy: Mapping[str, Mapping[int, int]],
    summary: Callable[[int], tuple[float, float] | None],
) -> list[Placed]:  # fmt: skip
    """`occupancy`: by tier, span -> chunks; `summary`: History's."""
    found = []
    for record in records:
        chunks = {tier: by_span.get(record.span_id, 0) for tier, by_span in occupancy.items()}
        score, share = summary(record.span_id) or (None, math.nan)
        known = None if math.isnan(share) else share
        found.append(Placed(record.span_id, record.n_windows, chunks, score, known))
    return found


def whole_at(runs: Runs, shape: PlaneLayout, n_chunks: int) -> Ids:
    """[n_chunks]: the byte of dest at which each chunk's plane begins; -1: it was not read whole.

    `runs`: pieces read of the part's plane, ascending.
    """
    places = np.full(n_chunks, -1, dtype=np.int64)
    begins = -(-runs.firsts // shape.pieces)
    whole = np.maximum((runs.firsts + runs.counts) // shape.pieces - begins, 0)
    own = np.repeat(np.arange(len(whole)), whole)
    chunks = begins[own] + np.arange(len(own)) - (np.cumsum(whole) - whole)[own]
    places[chunks] = (runs.tos - runs.firsts)[own] + chunks * shape.pieces
    places[chunks] *= shape.piece_bytes
    return places


def chunks_by_tier(
    parts: Sequence[Part], cached: Sequence[Sequence[Ids]], caches: Sequence[ChunkCache]
) -> dict[str, int]:
    """How many chunks with wanted rows come from each cache, and how many from home."""
    names = [*(cache.tier.name for cache in caches), "ssd"]
    found = np.zeros(len(names), dtype=np.int64)
    for i, part in enumerate(parts):
        used = used_chunks(part)
        entries = [by_part[i] for by_part in cached]
        level = levels_of(entries) if entries else np.zeros(part.count, dtype=np.int64)
        found += np.bincount(level[used], minlength=len(names))
    return dict(zip(names, found.tolist(), strict=True))


def counts_of(every: Iterable[Brought]) -> dict[str, int]:
    """Where the rows that a request wanted were, and the chunks they lie in: by counter."""
    found: dict[str, int] = {}
    for one in every:
        chunks = chunks_by_tier(one.parts, one.entries, one.caches)
        for kind, by_tier in (("rows", one.rows_by_tier), ("chunks", chunks)):
            for tier, n in by_tier.items():
                name = f"{kind}_from/{tier}"
                found[name] = found.get(name, 0) + n
    return found
