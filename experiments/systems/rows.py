"""Chosen rows on the disk before and after packing: bytes, requests and seconds of a sparse read.

Also of the same requests alone, with nothing planned before and nothing verified after.

Choices are drawn: a row's worth to a request is a mix of its popularity, which is the same for all
requests, and of a part of this request's. How far choices follow the average order is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from experiments.common import Row, check_room
from experiments.systems.data import stored
from experiments.systems.generate import density, incompressible
from experiments.systems.planned import Planned
from impress.config import Config
from impress.policy import KeepAll
from impress.selection.choices import Selection, n_kept, top_k
from impress.store import PrefixStore
from impress.types import Geometry
from tiers.base import Read
from tiers.coalesce import coalesce, slices
from tiers.iopool import Lane
from tiers.slots import aligned, size_class

N_TOKENS: Final = 5120
N_LAYERS: Final = 4
HEAD_DIM: Final = 128
_SEGMENT: Final = 64 << 20
#: Requests a row order is learnt from.
N_EARLIER: Final = 32
#: Tokens that are important together.
SMOOTH: Final = 64
Positions = npt.NDArray[np.int64]
#: Reads of a layer, as each thread got its own.
Slices = list[Sequence[Read]]
_NOWHERE: Final = np.empty(0, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Plan:
    """A sparse request as the disk saw it: the bytes it wanted, and for each layer the reads with
    their lengths. The memory it read into is not kept: the next requests need it."""

    wanted: int
    layers: list[list[tuple[Read, int]]]

    @classmethod
    def of(cls, wanted: int, layers: Sequence[Slices]) -> Plan:
        return cls(wanted, [
            [(read._replace(dest=_NOWHERE, sums=None), len(read.dest))
             for some in layer for read in some]
            for layer in layers
        ])  # fmt: skip


def choices(
    n_requests: int, overlap: float, keep: float, seed: int
) -> tuple[list[list[Positions]], npt.NDArray[np.float32]]:
    """[request][layer] positions, and how often earlier requests chose each row [layers, n]."""
    rng = np.random.default_rng([seed, 11])
    k = n_kept(keep, N_TOKENS)
    popular = _smooth(rng, N_LAYERS)
    drawn = []
    for _ in range(n_requests + N_EARLIER):
        worth = overlap * popular + math.sqrt(1 - overlap**2) * _smooth(rng, N_LAYERS)
        drawn.append([np.flatnonzero(top_k(row, k)) for row in worth])
    earlier = np.zeros((N_LAYERS, N_TOKENS), dtype=np.float32)
    for request in drawn[:N_EARLIER]:
        for layer, positions in enumerate(request):
            earlier[layer, positions] += 1 / N_EARLIER
    return drawn[N_EARLIER:], earlier


def _smooth(rng: Any, n: int) -> npt.NDArray[np.float32]:
    alone = rng.standard_normal((n, N_TOKENS), dtype=np.float32)
    runs = rng.standard_normal((n, N_TOKENS // SMOOTH + 2), dtype=np.float32)
    begins = rng.integers(SMOOTH, size=(n, 1))  # not where chunks begin
    together = np.take_along_axis(runs, (np.arange(N_TOKENS) + begins) // SMOOTH, axis=1)
    mixed: npt.NDArray[np.float32] = math.sqrt(0.6) * together + math.sqrt(0.4) * alone
    return mixed


def measured_overlap(
    requests: Sequence[Sequence[Positions]], earlier: npt.NDArray[np.float32]
) -> float:
    """Mean share of a choice that is among as many top rows of the average order."""
    shares = [
        float(top_k(earlier[layer], len(positions))[positions].mean())
        for request in requests
        for layer, positions in enumerate(request)
    ]
    return float(np.mean(shares))


@dataclass(slots=True)
class Rows:
    """One prefix stored twice: rows in position order, and by how often they were chosen."""

    geometry: Geometry
    stores: dict[str, PrefixStore]
    tokens: Any
    plans: dict[str, Plan] = field(default_factory=dict)  # by store, of its last sparse request

    @classmethod
    def of(cls, folder: Path, row_bytes: int, earlier: Any, seed: int, window: int = 64) -> Rows:
        """`row_bytes`: of a row of keys; one of values has as many. Raises Unable without room."""
        check_room(folder.parent, 2 * (N_LAYERS * N_TOKENS * 2 * row_bytes + _SEGMENT))
        heads = row_bytes // (2 * HEAD_DIM)
        geometry = Geometry(N_LAYERS, heads, heads, HEAD_DIM)
        rng = np.random.default_rng([seed, 12])
        tokens = rng.integers(0, 50_000, N_TOKENS, dtype=np.int32)
        config = Config(
            window=window, dram_bytes=0, durable=False, segment_bytes=_SEGMENT,
            repack_every_s=0.0,
        )  # fmt: skip
        stores = {}
        shape = (geometry.n_kv_heads, N_TOKENS, HEAD_DIM)
        for name in ("before", "after"):
            store = PrefixStore.open(folder / name, geometry, "rows", config)
            with store.writer(tokens, wait_s=60) as writer:
                for layer in range(N_LAYERS):
                    k, v = (incompressible(rng, *shape) for _ in range(2))
                    writer.put(layer, 0, k, v, earlier[layer] if name == "after" else None)
            stored(writer)
            stores[name] = store
        return cls(geometry, stores, tokens)

    def read(self, name: str, chosen: Sequence[Positions]) -> Row:
        """One sparse request: bytes moved and selected, requests to the disk, seconds."""
        given = [Selection(p, math.nan, math.nan, False, "given") for p in chosen]
        policy = Planned(KeepAll(), given, lambda _layer: None)
        wanted = sum(len(p) for p in chosen) * 2 * self.geometry.k_row_bytes
        row, layers = self._read(name, policy)
        self.plans[name] = Plan.of(wanted, layers)
        return {"selected": wanted, **row}

    def read_all(self, name: str) -> Row:
        """Every row of every layer, layer by layer as sparse requests do."""
        return self._read(name, KeepAll())[0]

    def read_alone(self, name: str, plan: Plan, n_slices: int) -> Row:
        """Repeat what an earlier sparse request asked of the disk: layer by layer the same bytes,
        but planned beforehand and neither verified nor put in order.

        It is cut into `n_slices`, each sent by a thread, however the request was sliced: a
        yardstick cut like the thing it is held against would move with it.
        """
        store = self.stores[name]
        sizes = [sum(n_bytes for _, n_bytes in layer) for layer in plan.layers]
        memory, io_s = aligned(size_class(max(sizes))), 0.0  # as a pool's
        memory.fill(0)  # a pool's has been used before, too
        for asked, size in zip(plan.layers, sizes, strict=True):
            at, bare = 0, []
            for read, n_bytes in sorted(asked, key=lambda one: one[0].off):
                bare.append(read._replace(dest=memory[at : at + n_bytes]))
                at += n_bytes
            tasks = [partial(store.ssd.read, some) for some in slices(bare, -(-size // n_slices))]
            begin = perf_counter()
            done = store._pool.submit(Lane.DEMAND, tasks).wait(60)
            io_s += perf_counter() - begin
            assert done, "a read takes more than a minute"
        return {"selected": plan.wanted, "moved": sum(sizes), "io_s": io_s}

    def _read(self, name: str, policy: Any) -> tuple[Row, list[Slices]]:
        store = self.stores[name]
        counted = _Counted(store.ssd)
        before = store.stats()["load_latency"]["sum_ms"]
        with store.lease(self.tokens) as lease:
            # Sums and maps are read with the lease, before the clock: they stay in memory.
            with lease.session(policy) as session, counted:
                for layer in range(N_LAYERS):
                    counted.layers.append([])
                    session.retrieve(layer, None)
                lines = session.report().per_layer
        io_s = (store.stats()["load_latency"]["sum_ms"] - before) / 1e3
        moved = sum(sum(line["bytes"].values()) for line in lines)
        return {"moved": moved, "requests": counted.n, "io_s": io_s}, counted.layers

    def chunks(self, chosen: Sequence[Positions], name: str, unit: int) -> float:
        """Rows of touched chunks of `unit` rows over rows chosen: computed, nothing is read."""
        with self.stores[name].lease(self.tokens) as lease:
            (source,) = lease.sources
            shares = [
                density(np.sort(source.ordinals(layer, positions)), unit)
                for layer, positions in enumerate(chosen)
            ]
        return float(1 / np.mean(shares))

    def close(self) -> None:
        for store in self.stores.values():
            store.close()


class _Counted:
    """Counts the requests sent to a medium while it is entered: afterwards, off the clock.

    `layers`: what was asked of it; the caller begins each layer.
    """

    def __init__(self, ssd: Any) -> None:
        self.layers: list[Slices] = []
        self._ssd = ssd

    @property
    def n(self) -> int:
        return sum(len(coalesce(reads)) for slices in self.layers for reads in slices)

    def __enter__(self) -> _Counted:
        read = self._ssd.read

        def counting(reads: Any, then: Any = None) -> None:
            self.layers[-1].append(reads)
            read(reads, then)

        self._ssd.read = counting
        return self

    def __exit__(self, *_: object) -> None:
        del self._ssd.read
