"""What never lying costs: checksums and durability, each on and off, in turns, in one run.

A store is filled and read back cold, four ways in each round: as it is; with no piece verified
(patched out here: there is no such setting, and there must not be); with `Config.durable` off; with
neither. Rounds rotate the order. Beside it the digest alone, a core, for several sizes of piece.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

import impress
import tiers.ssd
from experiments.common import Row, Unable, print_rows, spread
from experiments.harness import Cell, Experiment, Figures, Options, main
from impress.config import MIB
from tiers.base import Read, Slot, sums_of, verify
from tiers.slots import aligned

WAYS: Final = ("as it is", "no checksums", "not durable", "neither")
PIECES: Final = (4 << 10, 8 << 10, 12 << 10, 28 << 10, 64 << 10)
#: 1/31.8 GB/s, the digest with nothing around it.
FLOOR_S_PER_GB: Final = 0.031
#: OPT-6.7B's rows (pieces of 8 KiB) in fewer layers.
GEOMETRY: Final = impress.Geometry(8, 32, 32, 128, "float16")
_N_TOKENS: Final = {False: 4096, True: 1024}


@contextmanager
def unverified(yes: bool) -> Iterator[None]:
    """Pieces from the SSD are believed, if `yes`. Only ever here."""
    before = tiers.ssd.verify
    if yes:
        tiers.ssd.verify = lambda read, where: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        tiers.ssd.verify = before  # type: ignore[attr-defined]


@contextmanager
def timed() -> Iterator[list[float]]:
    """CPU seconds of each verification on the way, where it happens: bytes just read."""
    before, taken = tiers.ssd.verify, []

    def timed_verify(read: Read, where: str) -> None:
        begin_s = time.thread_time()
        before(read, where)
        taken.append(time.thread_time() - begin_s)

    tiers.ssd.verify = timed_verify
    try:
        yield taken
    finally:
        tiers.ssd.verify = before


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


def _store(folder: Path, way: str) -> impress.PrefixStore:
    config = impress.Config(
        dram_bytes=0, repack_every_s=0, durable=way in ("as it is", "no checksums")
    )
    return impress.PrefixStore.open(folder, GEOMETRY, "overhead", config)


def _fill(store: impress.PrefixStore, rows: Rows) -> tuple[float, float]:
    """Wall and CPU seconds of storing and flushing prompt by prompt."""
    cpu_s, begin_s = time.process_time(), time.perf_counter()
    for tokens in rows.prompts:
        stored = store.store(tokens, list(rows.keys), list(rows.values), wait_s=60)
        assert not stored.refused, stored
        store.flush()
    return time.perf_counter() - begin_s, time.process_time() - cpu_s


def _read(store: impress.PrefixStore, rows: Rows) -> tuple[float, float]:
    """Wall and CPU seconds of reading everything back; the last prompt's keys are compared."""
    cpu_s, begin_s = time.process_time(), time.perf_counter()
    last = None
    for tokens in rows.prompts:
        with store.lease(tokens) as lease, lease.session() as session:
            assert lease.n_tokens == len(tokens), lease.miss_reason
            session.prefetch()
            for layer in range(GEOMETRY.n_layers):
                last, _, _ = session.retrieve(layer, None)
            wall_s, cpu = time.perf_counter() - begin_s, time.process_time() - cpu_s
            got = last.numpy().view(np.uint16)
            assert np.array_equal(got, rows.keys[-1].view(np.uint16)), "rows differ"
            begin_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu
    return wall_s, cpu


def _one_way(folder: Path, rows: Rows, way: str) -> Row:
    """One store, made and read one way, and gone."""
    verify_s = 0.0
    try:
        with _store(folder, way) as store, unverified(way in ("no checksums", "neither")):
            wrote, read = _fill(store, rows), _read(store, rows)
            if way == WAYS[0]:  # once more with a clock in it
                with timed() as taken:
                    _read(store, rows)
                verify_s = sum(taken)
        gb = rows.n_bytes / 1e9
        return {
            "way": way, "write_s": wrote[0], "read_s": read[0], "read_cpu_s": read[1],
            "write_gb_s": gb / wrote[0], "read_gb_s": gb / read[0],
            "read_cpu_s_per_gb": read[1] / gb, "verify_s_per_gb": verify_s / gb, "gb": gb,
        }  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rounds(options: Options, n_rounds: int) -> list[Row]:
    rows = Rows(_N_TOKENS[options.quick], options.seed)
    if shutil.disk_usage(options.folder).free < 3 * rows.n_bytes:
        raise Unable(f"{options.folder}: wants {3 * rows.n_bytes >> 20} MiB free")
    found = []
    for i in range(n_rounds + 1):
        order = WAYS[i % 4 :] + WAYS[: i % 4]
        found += [{**_one_way(options.folder / "store", rows, way), "round": i} for way in order]
    return [row for row in found if row["round"]]  # the first warms everything up


def _digests(options: Options, n_bytes: int) -> list[Row]:
    """CPU seconds a GB of `tiers.base.verify` alone, memory cold in the caches, by piece size."""
    data = aligned(n_bytes)[:n_bytes]
    data.view(np.uint64)[:] = np.random.default_rng(options.seed).integers(
        0, 1 << 64, n_bytes // 8, dtype=np.uint64
    )
    rows = []
    for piece in PIECES:
        sums = sums_of(data, piece)
        size = (1 << 20) // piece * piece  # of one read, as the store makes them
        reads = [
            Read(Slot(()), at, data[at : at + size], sums[at // piece :][: size // piece], piece)
            for at in range(0, n_bytes - size + 1, size)
        ]
        taken = []
        for _ in range(5):
            begin_s = time.process_time()
            for read in reads:
                verify(read, "memory")
            taken.append((time.process_time() - begin_s) / (len(reads) * size) * 1e9)
        cost = spread(taken)
        rows.append({
            "piece": f"{piece >> 10} KiB", "CPU s/GB": cost["median"], "least": cost["min"],
            "most": cost["max"], "floor": FLOOR_S_PER_GB,
        })  # fmt: skip
    return rows


def _cells(options: Options) -> list[Cell]:
    n_rounds, n_bytes = (3, 64 * MIB) if options.quick else (9, 512 * MIB)
    seconds = 4 * n_rounds * (1.0 if options.quick else 4.0)
    base = {"seed": options.seed, "quick": options.quick}
    return [
        Cell({"part": "ways", "n": n_rounds, **base}, partial(_rounds, options, n_rounds), seconds),
        Cell({"part": "digest", "n": n_bytes, **base}, partial(_digests, options, n_bytes), 5.0),
    ]


def _figures(rows: list[Row], _options: Options) -> tuple[Figures, list[Row]]:
    digests = [row for row in rows if row["part"] == "digest"]
    ways = [row for row in rows if row["part"] == "ways"]
    by_round: dict[int, dict[str, Row]] = {}
    for row in ways:
        by_round.setdefault(row["round"], {})[row["way"]] = row
    table = [_way(way, list(by_round.values())) for way in WAYS]
    print_rows("Stores written and read cold, medians; shares of the same round", table)
    shown = ("piece", "CPU s/GB", "least", "most", "floor")
    print_rows("The digest alone, one core", [{key: row[key] for key in shown} for row in digests])
    costs = spread([each[WAYS[0]]["verify_s_per_gb"] for each in by_round.values()])
    shares = spread(
        [1 - each[WAYS[1]]["read_s"] / each[WAYS[0]]["read_s"] for each in by_round.values()]
    )
    print_rows("Verification of cold reads, pieces of 8 KiB", [
        {"": "CPU s/GB, where it happens", **costs, "wanted": 0.06},
        {"": "share of wall, by leaving it out", **shares, "wanted": 0.02},
    ])  # fmt: skip
    return {
        "checksum_cpu_s_per_gb": costs["median"], "checksum_wall_share": shares["median"],
        "durability_wall_share": table[2]["write saved"],
    }, [*table, *digests, *ways]  # fmt: skip


def _way(way: str, rounds: list[dict[str, Row]]) -> dict[str, Any]:
    def median(key: str) -> float:
        return spread([each[way][key] for each in rounds])["median"]

    def saved(key: str) -> Row:
        return spread([1 - each[way][key] / each[WAYS[0]][key] for each in rounds])

    read, write = saved("read_s"), saved("write_s")
    return {
        "way": way, "write GB/s": median("write_gb_s"), "write saved": write["median"],
        "read GB/s": median("read_gb_s"), "read saved": read["median"], "least": read["min"],
        "most": read["max"], "read CPU s/GB": median("read_cpu_s_per_gb"),
    }  # fmt: skip


_MEANING: Final = {
    "checksum_cpu_s_per_gb": "thread CPU time inside tiers.base.verify in cold reads, median of "
    "rounds; pieces of 8 KiB",
    "checksum_wall_share": "1 - wall of the cold read without verification / with, in the same "
    "round, median: noise where the disk is the limit",
    "durability_wall_share": "the same for storing and flushing without fdatasync",
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
