"""Which reads bring a layer's rows to where they are wanted. Pure: data in, data out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from impress.catalog import Held
from impress.chunks import ChunkCache, Ids
from impress.format import ProbeRecord
from impress.layout import K, SpanLayout, V
from tiers.base import Bytes, Read, Slot, Sums


@dataclass(frozen=True, slots=True)
class Source:
    """A held run of windows with what reading it takes. `at`: its first window on the lease."""

    held: Held
    layout: SpanLayout
    slot: Slot
    sums: Sums
    probes: tuple[ProbeRecord, ...]
    at: int

    @property
    def span(self) -> int:
        return self.held.record.span_id


@dataclass(frozen=True, slots=True)
class Missing:
    """Windows [first, first + count) of a source that no cache holds; read from home."""

    source: Source
    first: int  # within the source's held run
    count: int


@dataclass(slots=True)
class ReadPlan:
    """One layer's reads by medium, and what they cost."""

    dram: list[tuple[Source, list[Read]]] = field(default_factory=list)
    ssd: list[tuple[Source, list[Read]]] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    windows_by_tier: dict[str, int] = field(default_factory=lambda: {"dram": 0, "ssd": 0})
    bytes_by_tier: dict[str, int] = field(default_factory=lambda: {"dram": 0, "ssd": 0})


def plan_layer(
    sources: Sequence[Source],
    layer: int,
    cached: Sequence[Ids],
    cache: ChunkCache,
    dests: tuple[Bytes, Bytes],
) -> ReadPlan:
    """Reads of all windows of a layer into dests (K pieces, V pieces, in lease order).

    `cached` holds the pinned DRAM entries of each source. Neighbouring windows at home become
    one read a plane; the medium merges further.
    """
    plan = ReadPlan()
    for source, entries in zip(sources, cached, strict=True):
        there = np.flatnonzero(entries >= 0)
        chunk = source.layout.chunk_bytes
        if there.size:
            reads = [
                r for i in there.tolist() for r in _cached(source, layer, i, entries, cache, dests)
            ]
            plan.dram.append((source, reads))
            plan.windows_by_tier["dram"] += len(there)
            plan.bytes_by_tier["dram"] += len(there) * chunk
        runs = _runs(entries < 0)
        if runs:
            home = []
            for first, count in runs:
                plan.missing.append(Missing(source, first, count))
                home += [_home(source, layer, p, first, count, dests[p]) for p in (K, V)]
                plan.windows_by_tier["ssd"] += count
                plan.bytes_by_tier["ssd"] += count * chunk
            plan.ssd.append((source, home))
    return plan


def _runs(wanted: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> list[tuple[int, int]]:
    """(first, count) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], wanted, [False])).astype(np.int8)))
    return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _cached(
    source: Source, layer: int, i: int, entries: Ids, cache: ChunkCache, dests: tuple[Bytes, Bytes]
) -> list[Read]:
    slot = cache.slot(int(entries[i]))
    reads, off = [], 0
    for plane in (K, V):
        dest, sums = _place(source, layer, plane, i, 1, dests[plane])
        reads.append(Read(slot, off, dest, sums, source.layout.planes[plane].piece_bytes))
        off += len(dest)
    return reads


def _home(source: Source, layer: int, plane: int, first: int, count: int, dest: Bytes) -> Read:
    part, sums = _place(source, layer, plane, first, count, dest)
    off = source.layout.chunk_off(layer, plane, source.held.first + first)
    return Read(source.slot, off, part, sums, source.layout.planes[plane].piece_bytes)


def _place(
    source: Source, layer: int, plane: int, first: int, count: int, dest: Bytes
) -> tuple[Bytes, Sums]:
    """Where windows of a source go in dest, and the sums of their pieces."""
    shape = source.layout.planes[plane]
    start = (source.at + first) * shape.chunk_bytes
    at = source.layout.sums_at(layer, plane, source.held.first + first)
    return (
        dest[start : start + count * shape.chunk_bytes],
        source.sums[at : at + count * shape.pieces],
    )
