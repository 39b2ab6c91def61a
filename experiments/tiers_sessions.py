"""Bare sessions for experiments.tiers: GB/s from each tier, beside fio and memcpy."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import impress
from experiments import fio
from experiments.common import Options, Row, console, spread
from experiments.tiers_cells import PROBES, SHOWN, Cells, Samples, opened, rotated, warm
from impress.policy import Exact, Paper, Policy, Quality
from impress.selection.scores import suffix_lse_of
from tiers.iopool import IoPool, Lane
from tiers.slots import aligned

MIB: Final = 1 << 20
N_ROWS: Final = 16  # query rows of a session
#: Heads of synthetic rows do not agree: the gate would load everything. So it is off.
POLICIES: Final[dict[str, Policy]] = {
    "exact": Exact(), "paper": Paper(gate=False), "quality": Quality(),
}  # fmt: skip


class Bare:
    """Synthetic rows of a few layers: every head of a layer looks hard at some of the same rows."""

    def __init__(self, n_tokens: int, n_layers: int, seed: int) -> None:
        self.geometry = impress.Geometry(n_layers, 32, 32, 128, "float16")
        self.tokens = np.random.default_rng(seed).integers(0, 50_000, n_tokens, dtype=np.int32)
        self.n_bytes = n_tokens * self.geometry.token_bytes
        make = torch.Generator().manual_seed(seed)
        self.keys, self.values, self.queries = [], [], []
        for _ in range(n_layers):
            keys = torch.randn(n_tokens, 32, 128, generator=make)
            query = torch.randn(32, N_ROWS, 128, generator=make)
            looked = torch.randint(n_tokens, (n_tokens // 20,), generator=make)
            keys[looked] += 0.8 * query.mean(dim=1) * N_ROWS**0.5
            query += 2.0 * query.mean(dim=1, keepdim=True)
            self.keys.append(keys.half().transpose(0, 1))
            self.values.append(keys.half().flip(0).transpose(0, 1))
            new = torch.randn(32, N_ROWS, 128, generator=make).half()
            self.queries.append((query.half(), suffix_lse_of(query.half(), new, 128**-0.5)))
        self.samples: dict[str, Samples] = {}
        self._seen: dict[str, list[Any]] = {}
        self._outs = [(self._out(), self._out()) for _ in range(n_layers)]

    def _out(self) -> torch.Tensor:
        """[32, n, 128] as an engine holds it: token-major, page-aligned."""
        n = len(self.tokens)
        room = aligned(n * self.geometry.k_row_bytes)[: n * self.geometry.k_row_bytes]
        room[:] = 0  # its pages are there before the clock runs
        rows: torch.Tensor = torch.from_numpy(room).view(torch.float16).view(n, 32, 128)
        return rows.transpose(0, 1)

    def store(self, folder: Path) -> Path:
        """Store all rows. Returns the one segment file, little larger than its contents."""
        config = impress.Config(
            probes=PROBES, dram_bytes=0, segment_bytes=-(-self.n_bytes * 5 // 4 // MIB) * MIB,
            write_buffer_bytes=256 * MIB,
        )  # fmt: skip
        with impress.PrefixStore.open(folder, self.geometry, "bench", config) as store:
            stored = store.store(self.tokens, self.keys, self.values, wait_s=60)
            store.flush()
            assert stored.ready, f"not stored: {stored}"
        (file,) = folder.rglob("*.seg")
        return file

    def cells(self, stores: dict[str, impress.PrefixStore]) -> Cells:
        return {
            f"{name}.{tier}": self._cell(f"{name}.{tier}", store, policy, tier)
            for name, policy in POLICIES.items()
            for tier, store in stores.items()
        }

    def _cell(
        self, cell: str, store: impress.PrefixStore, policy: Policy, tier: str
    ) -> Callable[[], None]:
        samples = self.samples[cell] = Samples()

        def request() -> None:
            rows, n_bytes, wall_s = self.session(store, policy, cell.partition(".")[0])
            assert set(rows) == {tier}, f"{cell}: rows from {rows}"
            samples.ms.append(wall_s * 1e3)
            samples.gb_s.append(n_bytes / wall_s / 1e9)
            samples.moved = n_bytes
            samples.rows_share = sum(rows.values()) / len(self.tokens) / self.geometry.n_layers

        return request

    def session(
        self, store: impress.PrefixStore, policy: Policy, compare: str = ""
    ) -> tuple[dict[str, int], int, float]:
        """One prefix, all layers: (rows by tier, bytes moved, seconds). Comparing is not timed."""
        with store.lease(self.tokens) as lease:
            begin = time.perf_counter()
            with lease.session(policy) as session:
                session.prefetch(self._outs if isinstance(policy, Exact) else None)
                got = [
                    session.retrieve(layer, query, None, suffix_lse)
                    for layer, (query, suffix_lse) in enumerate(self.queries)
                ]
                wall_s = time.perf_counter() - begin
                report = session.report()
                if compare:
                    self._compare(compare, got)
        return report.rows_by_tier, sum(report.bytes_by_tier.values()), wall_s

    def _compare(self, policy: str, got: Sequence[tuple[torch.Tensor, ...]]) -> None:
        """The same positions as from every other tier, and the very rows that were stored."""
        first = self._seen.setdefault(policy, [pos.clone() for _, _, pos in got])
        for layer, (k, v, pos) in enumerate(got):
            assert torch.equal(first[layer], pos), f"{policy}: the tiers choose other rows"
            for rows, stored in ((k, self.keys), (v, self.values)):
                assert torch.equal(rows, stored[layer].index_select(1, pos)), f"{policy}: rows"


def memcpy_cell(n_bytes: int, samples: Samples, n_threads: int) -> Callable[[], None]:
    """Copy a prefix's bytes in memory, split among threads as reads are."""
    pool = IoPool(n_threads)
    source, dest = (np.ones(n_bytes, dtype=np.uint8) for _ in range(2))
    step = 2 * MIB

    def copy(at: int) -> Callable[[], None]:
        return lambda: np.copyto(dest[at : at + step], source[at : at + step])

    def cell() -> None:
        begin = time.perf_counter()
        ticket = pool.submit(Lane.DEMAND, [copy(at) for at in range(0, n_bytes, step)])
        assert ticket.wait(60.0), "memcpy is stuck"
        samples.gb_s.append(n_bytes / (time.perf_counter() - begin) / 1e9)

    return cell


def _rows_of(bare: Bare, store: impress.PrefixStore) -> dict[str, int]:
    return bare.session(store, Exact())[0]


def session_rows(options: Options) -> list[Row]:
    bare = Bare(2048, 2, options.seed) if options.quick else Bare(8192, 4, options.seed)
    folder = options.folder / "sessions"
    file = bare.store(folder)
    with opened(folder, bare.geometry, "bench", bare.n_bytes) as stores:
        if not stores["ssd"].stats()["direct_io"]:
            console.print("note: O_DIRECT is refused here; reads from ssd may come from memory")
        for tier, store in stores.items():
            warm(tier, partial(_rows_of, bare, store))
        cells = bare.cells(stores)
        floors = {"floor.memcpy": Samples()}
        cells["memcpy"] = memcpy_cell(bare.n_bytes, floors["floor.memcpy"], 8)
        if shutil.which("fio"):
            disk = floors["floor.fio"] = Samples()
            cells["fio"] = lambda: disk.gb_s.append(
                fio.read(file, "libaio", MIB, pattern="read", seed=options.seed).gb_s
            )
        else:
            console.print(f"note: no floor for ssd: {fio.MISSING}")
        rotated(cells, 1, options.seed)
        for samples in (*bare.samples.values(), *floors.values()):
            samples.ms.clear()
            samples.gb_s.clear()
        rotated(cells, 3 if options.quick else 12, options.seed)
    return [
        _session_row(cell, samples, bare.n_bytes)
        for cell, samples in {**bare.samples, **floors}.items()
    ]


def _session_row(cell: str, samples: Samples, whole: int) -> Row:
    what, _, tier = cell.partition(".")
    speed = spread(samples.gb_s)
    read: Row = {"rows": "", "moved": "", "ms": "", "prefix GB/s": ""}
    if samples.ms:
        ms = spread(samples.ms)["median"]
        read = {
            "rows": f"{samples.rows_share:.0%}", "moved": f"{samples.moved / whole:.0%}", "ms": ms,
            "prefix GB/s": whole / ms / 1e6,
        }  # fmt: skip
    return {
        "figure": cell, "read": what, "from": SHOWN.get(tier, tier), **read,
        "GB/s": speed["median"], "least": speed["min"], "most": speed["max"],
        "n": len(samples.gb_s),
    }  # fmt: skip
