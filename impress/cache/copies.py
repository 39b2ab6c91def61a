"""Everything a store keeps in fast memory, under its budgets: chunks by tier, probe records."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from impress.cache.chunks import ChunkCache
from impress.config import Config
from impress.errors import ConfigError, Unsupported
from impress.selection.probes import ProbeCodec, codec_of, fitted
from impress.spans.layout import K, SpanLayout, V
from impress.types import Geometry
from impress.usage.history import SHARE as HISTORY_SHARE
from tiers.base import Usage, round_up
from tiers.dram import DramTier
from tiers.hbm import HbmTier, for_current_device, why_not
from tiers.slots import BufferPool

#: A sixteenth of the DRAM budget is kept for tables (8 bytes a piece: about .1 % of the KV) and
#: history.
TABLES_SHARE = 16
#: An eighth for probe records, where any are stored.
PROBES_SHARE = 8


class Copies:
    """`chunks`: caches of K and V, fastest first. `probes`: of each codec's records, by plane."""

    def __init__(
        self, config: Config, geometry: Geometry, window: int, codecs: Sequence[ProbeCodec]
    ) -> None:
        layout = SpanLayout.of(geometry, window, 1)
        planes = {plane: layout.planes[plane].chunk_bytes for plane in (K, V)}
        self.tables_bytes = config.dram_bytes // TABLES_SHARE - config.dram_bytes // HISTORY_SHARE
        probe_bytes = config.dram_bytes // PROBES_SHARE if codecs else 0
        budgets = {"dram": _dram_for_chunks(config, codecs)}
        if config.hbm_bytes:
            budgets = {"hbm": config.hbm_bytes, **budgets}
        on_device = config.hbm_device == "cuda"
        self._reached = on_device and config.hbm_bytes > 0  # whether a device reaches read buffers
        self.emulated = ("hbm",) if config.hbm_bytes and not on_device else ()
        media = {"dram": DramTier, "hbm": HbmTier if on_device else DramTier}
        self.chunks = tuple(
            ChunkCache(n, planes, geometry.n_layers, name, config.eviction, media[name])
            for name, n in budgets.items()
        )
        self.probes: dict[tuple[int, int], ChunkCache] = {}  # by plane and bytes a chunk
        sizes = {
            (plane, round_up(one.probe_bytes(geometry) * window // one.group))
            for made_by in product(*map(_with_fallback, codecs))
            # Of two that fall back to one codec a span has one record: the next are planes lower.
            for plane, one in enumerate({one.name: one for one in made_by}.values(), start=V + 1)
        }
        for plane, size in sorted(sizes):
            share = probe_bytes // len(sizes)
            self.probes[plane, size] = ChunkCache(share, {plane: size}, geometry.n_layers)

    def buffers(self) -> BufferPool:
        """Page-aligned memory for all that read: sessions and engines."""
        pool = BufferPool(None)
        if self._reached:
            pool.prepare = for_current_device()
        return pool

    def _all(self) -> list[ChunkCache]:
        return [*self.chunks, *self.probes.values()]

    def drop_span(self, span: int) -> None:
        for cache in self._all():
            cache.drop_span(span)

    def clear(self) -> None:
        """Drop everything that nobody reads."""
        for cache in self._all():
            cache.clear()

    def close(self, *, idle: bool) -> None:
        """Let go of a device's memory. `idle`: no thread is at work any more. If one is, it may
        still copy, and the memory stays."""
        for cache in self._all() if idle else ():
            cache.close()

    def usage(self) -> dict[str, Usage]:
        """By tier; DRAM's includes its probe records."""
        found = {cache.tier.name: cache.tier.usage() for cache in self.chunks}
        for cache in self.probes.values():
            more = zip(found["dram"], cache.tier.usage(), strict=True)
            found["dram"] = Usage(*(a + b for a, b in more))
        return found

    def held(self) -> dict[str, int]:
        """Chunks there are copies of, by tier."""
        return {c.tier.name: c.tier.usage().used // c.chunk_bytes for c in self.chunks}

    def held_of(self, span: int, first: int, count: int) -> int:
        """Chunks of these windows of a span, of all layers, that a tier has a copy of."""
        return sum(cache.held_of(span, first, count) for cache in self.chunks)

    def evictions(self) -> dict[str, int]:
        """Chunks dropped to make room, by tier."""
        return {cache.tier.name: cache.evictions for cache in self.chunks}

    def important_share(self) -> dict[str, float | None]:
        """By tier: the mean share of important rows of its chunks; None where none is known."""
        return {cache.tier.name: cache.important_share() for cache in self.chunks}

    def occupancy(self) -> dict[str, dict[int, int]]:
        """By tier: span -> chunks there."""
        return {cache.tier.name: cache.occupancy() for cache in self.chunks}

    def check(self) -> None:
        for cache in self._all():
            cache.check()


def _with_fallback(codec: ProbeCodec) -> list[ProbeCodec]:
    """Codecs that may make a codec's records: itself, and its stand-in until it has parameters."""
    again = fitted(codec)
    return [codec] if again is None else [codec, codec_of(again.fallback)]


def check_budgets(config: Config, geometry: Geometry, window: int) -> None:
    """Raises ConfigError where HBM, DRAM, or the write buffer, cannot hold one chunk.

    Unsupported where there is no such device, MediumError where the system grants no such memory.
    """
    chunk_bytes = SpanLayout.of(geometry, window, 1).chunk_bytes
    if config.write_buffer_bytes < chunk_bytes:
        raise ConfigError(
            f"config: write_buffer_bytes {config.write_buffer_bytes} cannot hold one chunk "
            f"of {chunk_bytes} bytes"
        )
    if config.hbm_bytes:
        _check_hbm(config, chunk_bytes)
    room = _dram_for_chunks(config, config.probes)
    if config.dram_bytes and room < chunk_bytes:
        raise ConfigError(
            f"config: dram_bytes {config.dram_bytes} cannot hold one chunk of {chunk_bytes} bytes "
            f"beside tables and probe records, which leave {room}; 0 is no copies"
        )
    emulated = config.hbm_bytes if config.hbm_device == "cpu" else 0
    for name, n_bytes in (("dram", config.dram_bytes), ("hbm", emulated)):
        DramTier(n_bytes, name)  # asked for and given back, untouched


def _dram_for_chunks(config: Config, codecs: Sequence[object]) -> int:
    """Bytes of the DRAM budget for copies of rows."""
    probes = config.dram_bytes // PROBES_SHARE if codecs else 0
    return config.dram_bytes - config.dram_bytes // TABLES_SHARE - probes


def _check_hbm(config: Config, chunk_bytes: int) -> None:
    """Raises Unsupported or ConfigError, naming the setting to change."""
    lacking = why_not() if config.hbm_device == "cuda" else ""
    if lacking:
        raise Unsupported(f'hbm_bytes: {lacking}; hbm_device = "cpu" emulates a GPU in host memory')
    if config.hbm_bytes < chunk_bytes:
        raise ConfigError(
            f"config: hbm_bytes {config.hbm_bytes} cannot hold one chunk of {chunk_bytes} bytes"
        )
