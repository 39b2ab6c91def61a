"""What never lying costs: checksums and durability, each on and off in turn, in one run.

Reads: one store, read back cold again and again, in three ways by turns: with every piece verified,
as always; believed (verification is patched out: there is no such setting, and there must not be);
and *loaded*, where NumPy brings every byte to the core once, and nothing is made of it. No checksum
that looks at every byte costs less than that. Writes: stores filled and flushed with
`Config.durable` on and off. Also the digest alone, on one core, on memory in its caches and not.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np

import impress
import tiers.ssd
from experiments import fio
from experiments.common import Row, check_room, print_rows, spread
from experiments.harness import Cell, Experiment, Figures, Options, main
from experiments.overhead_others import Others
from impress.config import MIB
from tiers.base import Read, Slot, sums_of, verify
from tiers.slots import aligned

PIECES: Final = (4 << 10, 8 << 10, 12 << 10, 28 << 10, 64 << 10)
#: 1/31.8 GB/s, the digest with nothing around it.
FLOOR_S_PER_GB: Final = 0.031
#: OPT-6.7B's rows (pieces of 8 KiB) in fewer layers.
GEOMETRY: Final = impress.Geometry(8, 32, 32, 128, "float16")
_PIECE_BYTES: Final = 8 << 10
_N_TOKENS: Final = {False: 4096, True: 1024}

Where = Callable[[Slot, int], str]
Verify = Callable[[Read, Where], None]


def _believed(_read: Read, _where: Where) -> None:
    """Verify nothing. Used only here."""


def _loaded(read: Read, _where: Where) -> None:
    """Bring every byte to the core, and do no more."""
    np.bitwise_or.reduce(read.dest.view(np.uint64))


def _memory(_slot: Slot, _off: int) -> str:
    return "memory"


WAYS: Final[dict[str, Verify]] = {"verified": verify, "believed": _believed, "loaded": _loaded}


@contextmanager
def looked_at(verify: Verify) -> Iterator[list[float]]:
    """Let the SSD tier check its reads with `verify`; yields each call's CPU seconds."""
    taken: list[float] = []

    def timed(read: Read, where: Where) -> None:
        begin_s = time.thread_time()
        verify(read, where)
        taken.append(time.thread_time() - begin_s)

    with patch.object(tiers.ssd, "verify", timed):
        yield taken


class Rows:
    """Keys and values of some prompts, random and finite."""

    def __init__(self, n_tokens: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.prompts = [rng.integers(0, 50_000, n_tokens, dtype=np.int32) for _ in range(4)]
        shape = (2, GEOMETRY.n_layers, GEOMETRY.n_kv_heads, n_tokens, GEOMETRY.head_dim)
        words = rng.integers(0, 1 << 64, int(np.prod(shape)) // 4, dtype=np.uint64)
        words &= np.uint64(0xBFFF_BFFF_BFFF_BFFF)  # neither NaN nor infinite
        self.keys, self.values = words.view(np.float16).reshape(shape)
        self.n_bytes = words.nbytes * len(self.prompts)


def _store(folder: Path, *, durable: bool = True) -> impress.PrefixStore:
    config = impress.Config(dram_bytes=0, repack_every_s=0, durable=durable)
    return impress.PrefixStore.open(folder, GEOMETRY, "overhead", config)


def _fill(store: impress.PrefixStore, rows: Rows) -> float:
    """Wall seconds of storing and flushing prompt by prompt."""
    begin_s = time.perf_counter()
    for tokens in rows.prompts:
        stored = store.store(tokens, list(rows.keys), list(rows.values), wait_s=60)
        assert not stored.refused, stored
        store.flush()
    return time.perf_counter() - begin_s


def _read(store: impress.PrefixStore, rows: Rows) -> tuple[float, float]:
    """Wall and CPU seconds of reading everything back; the last layer's keys are compared."""
    wall_s = cpu_s = 0.0
    for tokens in rows.prompts:
        begin = time.perf_counter(), time.process_time()
        with store.lease(tokens) as lease, lease.session() as session:
            assert lease.n_tokens == len(tokens), lease.miss_reason
            session.prefetch()
            for layer in range(GEOMETRY.n_layers):
                last, _, _ = session.retrieve(layer, None)
            wall_s += time.perf_counter() - begin[0]
            cpu_s += time.process_time() - begin[1]
            got = last.numpy().view(np.uint16)
            assert np.array_equal(got, rows.keys[-1].view(np.uint16)), "rows differ"
    return wall_s, cpu_s


def _rows(options: Options, stores: int) -> Rows:
    rows = Rows(_N_TOKENS[options.quick], options.seed)
    check_room(options.folder, stores * 2 * rows.n_bytes)
    return rows


def _reads(options: Options, n_rounds: int) -> list[Row]:
    """One store; in each round it is read each way, the order rotated; fio beside it."""
    rows, found = _rows(options, 1), list[Row]()
    folder, names = options.folder / "reads", list(WAYS)
    gb = rows.n_bytes / 1e9
    try:
        with _store(folder) as store:
            _fill(store, rows)
            _read(store, rows)  # warms everything up
            disk_gb_s = fio.of_store(folder)
            for i in range(n_rounds):
                for way in names[i % 3 :] + names[: i % 3]:
                    with looked_at(WAYS[way]) as taken:
                        others = Others()
                        wall_s, cpu_s = _read(store, rows)
                    found.append({
                        "round": i, "way": way, "wall_s": wall_s, "gb_s": gb / wall_s,
                        "cpu_s_per_gb": cpu_s / gb, "inside_s_per_gb": sum(taken) / gb,
                        "others_cores": others.cores(),
                    })  # fmt: skip
            disk_gb_s = (disk_gb_s + fio.of_store(folder)) / 2
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [{**row, "fio_gb_s": disk_gb_s} for row in found]


def _writes(options: Options, n_rounds: int) -> list[Row]:
    """A store made durably, and one not, in each round."""
    rows, found = _rows(options, 1), list[Row]()
    for i in range(n_rounds + 1):
        for durable in (i % 2 == 0, i % 2 != 0):
            folder = options.folder / "writes"
            try:
                with _store(folder, durable=durable) as store:
                    wall_s = _fill(store, rows)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            found.append({
                "round": i, "way": "durable" if durable else "not durable", "wall_s": wall_s,
                "gb_s": rows.n_bytes / 1e9 / wall_s,
            })  # fmt: skip
    return [row for row in found if row["round"]]  # the first warms everything up


def _digests(options: Options, n_bytes: int) -> list[Row]:
    """CPU seconds a GB of `tiers.base.verify` alone, by piece size; and of only loading bytes."""
    data = aligned(n_bytes)[:n_bytes]
    data.view(np.uint64)[:] = np.random.default_rng(options.seed).integers(
        0, 1 << 64, n_bytes // 8, dtype=np.uint64
    )
    loads = _chunked(data, 1 << 20, sums_of(data, 1 << 20))
    rows = [{"piece": "loaded only", **_cost(loads, _loaded)}]
    for piece in PIECES:
        sums = sums_of(data, piece)
        rows.append({"piece": f"{piece >> 10} KiB", **_cost(_chunked(data, piece, sums), verify)})
        if piece == _PIECE_BYTES:
            alone = _chunked(data, piece, sums, piece)
            rows.append({"piece": f"{piece >> 10} KiB, one a read", **_cost(alone, verify)})
    return rows


def _chunked(data: Any, piece: int, sums: Any, about: int = 1 << 20) -> list[Read]:
    """Reads of about 1 MiB, as the store makes them for whole prefixes; or of `about` bytes."""
    size = about // piece * piece
    return [
        Read(Slot(()), at, data[at : at + size], sums[at // piece :][: size // piece], piece)
        for at in range(0, len(data) - size + 1, size)
    ]


def _cost(reads: list[Read], look: Verify) -> Row:
    """CPU seconds a GB: of all reads, one after the other; and of the first again and again."""

    def taken(some: list[Read]) -> Row:
        times = []
        for _ in range(5):
            begin_s = time.thread_time()
            for read in some:
                look(read, _memory)
            times.append(time.thread_time() - begin_s)
        n_bytes = sum(len(read.dest) for read in some)
        return spread([time_s / n_bytes * 1e9 for time_s in times])

    fresh = taken(reads)
    return {
        "CPU s/GB": fresh["median"], "least": fresh["min"], "most": fresh["max"],
        "in cache": taken(_first(reads) * 64)["median"], "floor": FLOOR_S_PER_GB,
    }  # fmt: skip


def _first(reads: list[Read]) -> list[Read]:
    """The first reads, as many as make 1 MiB."""
    return reads[: max(1, (1 << 20) // len(reads[0].dest))]


def _cells(options: Options) -> list[Cell]:
    n_reads, n_writes, n_bytes = (6, 3, 64 * MIB) if options.quick else (24, 9, 512 * MIB)
    pass_s = 0.6 if options.quick else 2.0
    base = {"seed": options.seed, "quick": options.quick}
    return [
        Cell({"part": "reads", "n": n_reads, **base}, partial(_reads, options, n_reads),
             3 * n_reads * pass_s),
        Cell({"part": "writes", "n": n_writes, **base}, partial(_writes, options, n_writes),
             2 * n_writes * 2 * pass_s),
        Cell({"part": "digest", "n": n_bytes, **base}, partial(_digests, options, n_bytes), 5.0),
    ]  # fmt: skip


def _figures(rows: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
    """Figures of each part that was measured: --cells may leave out the others."""
    said: Figures = {}
    tables: list[Row] = []
    for part, figures in (("reads", _of_reads), ("writes", _of_writes), ("digest", _of_digests)):
        if mine := [row for row in rows if row["part"] == part]:
            more, lines = figures(mine)
            said |= more
            tables += lines
    return said, [*tables, *(row for row in rows if row["part"] != "digest")]


def _of_reads(rows: list[Row]) -> tuple[Figures, list[Row]]:
    lines = _table(rows, "verified", "believed")
    print_rows("Read cold; wall: what believing saves in the same round", lines)
    verified, _, loaded = lines
    share = float(np.median(_saved(rows, "verified", "believed")))
    print_rows("Verification of cold reads, pieces of 8 KiB", [
        {"": "CPU s/GB, where it happens", "measured": verified["inside s/GB"], "wanted": 0.06},
        {"": "of which loading the bytes", "measured": loaded["inside s/GB"], "wanted": 0.0},
        {"": "share of wall", "measured": share, "wanted": 0.02},
    ])  # fmt: skip
    return {
        "checksum_cpu_s_per_gb": verified["inside s/GB"],
        "checksum_wall_share": share,
        "load_cpu_s_per_gb": loaded["inside s/GB"],
    }, lines


def _of_writes(rows: list[Row]) -> tuple[Figures, list[Row]]:
    lines = _table(rows, "durable", "not durable")
    print_rows("Stored and flushed", lines)
    share = float(np.median(_saved(rows, "durable", "not durable")))
    return {"durability_wall_share": share}, lines


def _of_digests(rows: list[Row]) -> tuple[Figures, list[Row]]:
    shown = ("piece", "CPU s/GB", "least", "most", "in cache", "floor")
    print_rows("The digest alone, one core", [{key: row[key] for key in shown} for row in rows])
    return {}, rows


def _saved(rows: list[Row], full: str, less: str) -> list[float]:
    """For each round, the share of `full`'s wall time that `less` saves."""
    wall = {(row["round"], row["way"]): row["wall_s"] for row in rows}
    return [1 - wall[i, less] / s for (i, way), s in wall.items() if way == full]


def _table(rows: list[Row], full: str, less: str) -> list[Row]:
    """One line per way: medians over rounds; `wall saved` against `full`, with its quartiles."""
    lines = []
    for way in dict.fromkeys((full, less, *sorted({row["way"] for row in rows}))):
        mine = [row for row in rows if row["way"] == way]
        low, middle, high = np.percentile(_saved(rows, full, way), (25, 50, 75)).tolist()
        rate = f"{mine[0]['part'].removesuffix('s')} GB/s"
        line: Row = {"way": way, "rounds": len(mine), rate: _median(mine, "gb_s")}
        if "inside_s_per_gb" in mine[0]:
            line |= {
                "fio GB/s": mine[0]["fio_gb_s"], "CPU s/GB": _median(mine, "cpu_s_per_gb"),
                "inside s/GB": _median(mine, "inside_s_per_gb"),
                "others, cores": _median(mine, "others_cores"),
            }  # fmt: skip
        lines.append({**line, "wall saved": middle, "25 %": low, "75 %": high})
    return lines


def _median(rows: list[Row], key: str) -> float:
    return float(np.median([row[key] for row in rows]))


_MEANING: Final = {
    "checksum_cpu_s_per_gb": "thread CPU time inside tiers.base.verify in cold reads, median of "
    "rounds; pieces of 8 KiB",
    "checksum_wall_share": "1 - wall of the cold read believed / verified, in the same round, "
    "median of rounds",
    "load_cpu_s_per_gb": "the same thread CPU time where each byte is loaded once by NumPy and "
    "nothing is computed that could be compared",
    "durability_wall_share": "1 - wall of storing and flushing without fdatasync / with, in the "
    "same round, median",
    "others, cores": "processor time others took meanwhile, in cores",
    "geometry": str(GEOMETRY),
}

EXPERIMENT: Final = Experiment(
    "overhead",
    "Checksums and durability, each on and off.",
    _cells,
    _figures,
    meta=lambda _options: {"definitions": _MEANING},
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
