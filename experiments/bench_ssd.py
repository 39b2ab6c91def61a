"""What the SSD tier gives, compared with fio on the same file of the same disk.

Cold reads go the way of a session's: each layer's Reads are cut into slices and handed to the I/O
threads, all layers before the first wait; every piece is verified; layers are waited for in order.
The clock runs from the first cut to the last layer. A pass reads every byte of the segment once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

import impress
from experiments import fio
from experiments.common import Options, Row, Unable, check_room, console, print_rows, run, spread
from impress.spans.layout import PlaneLayout
from tiers.base import PAGE, Bytes, Read, Slot, Sums, sums_of
from tiers.coalesce import TURNS, slice_bytes, slices
from tiers.iopool import IoPool, Lane
from tiers.slots import aligned
from tiers.ssd import SsdTier

MIB: Final = 1 << 20
GEOMETRY: Final = impress.Geometry(32, 32, 32, 128, "float16")  # OPT-6.7B
PIECE: Final = PlaneLayout.of(GEOMETRY.k_row_bytes, 64).piece_bytes
SHM: Final = Path("/dev/shm")
N_THREADS: Final = impress.Config().io_threads


@dataclass(frozen=True, slots=True)
class Kind:
    """A way of reading a segment: extents of `extent_bytes` in random order, or planes in order."""

    name: str
    figure: str
    extent_bytes: int  # 0: whole planes
    fio_pattern: str
    fio_block: int


KINDS: Final = (
    Kind("random 64 KiB", "random_64k_vs_fio", 64 << 10, "randread", 64 << 10),
    Kind("random 256 KiB", "random_256k_vs_fio", 256 << 10, "randread", 256 << 10),
    Kind("whole spans", "sequential_vs_fio", 0, "read", 1 << 20),
)


class Segment:
    """A tier with one segment full of random bytes, their sums, and memory to read into."""

    def __init__(self, folder: Path, n_bytes: int, seed: int) -> None:
        self.tier = SsdTier(folder, n_bytes, None)
        slot = self.tier.reserve(n_bytes)
        if slot is None:
            raise Unable(f"{folder}: no room for {n_bytes >> 20} MiB")
        self.slot: Slot = slot
        self.data: Bytes = aligned(n_bytes)[:n_bytes]
        self.data.view(np.uint64)[:] = np.random.default_rng(seed).integers(
            0, 1 << 64, n_bytes // 8, dtype=np.uint64
        )
        self.sums: Sums = sums_of(self.data, PIECE)
        self.dest: Bytes = aligned(n_bytes)[:n_bytes]
        self.dest[:] = 0
        self.tier.write(slot, 0, self.data)
        self.tier.sync([slot])
        (self.file,) = folder.glob("*.seg")

    def reads(self, kind: Kind, seed: int) -> list[list[Read]]:
        """One list per layer. Extents land one after the other, as the rows of a prefix do."""
        n_bytes, n_layers = len(self.data), GEOMETRY.n_layers
        size = kind.extent_bytes or n_bytes // (2 * n_layers)
        order = np.arange(n_bytes // size)
        if kind.extent_bytes:
            np.random.default_rng(seed).shuffle(order)
        reads = []
        for to, extent in enumerate(order.tolist()):
            at, pieces = extent * size, size // PIECE
            sums = self.sums[extent * pieces : (extent + 1) * pieces]
            reads.append(Read(self.slot, at, self.dest[to * size : (to + 1) * size], sums, PIECE))
        share = len(reads) // n_layers
        return [reads[i * share : (i + 1) * share] for i in range(n_layers)]

    def compare(self, layers: list[list[Read]]) -> None:
        """Raises AssertionError unless every extent read is what was written."""
        for read in (read for layer in layers for read in layer):
            want = self.data[read.off : read.off + len(read.dest)]
            assert np.array_equal(read.dest, want), f"bytes at {read.off} differ"

    def make_cold(self) -> None:
        """Out of the page cache; raises AssertionError when a read might not come from the disk."""
        fd = os.open(self.file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        pages = resident_pages(self.file)
        assert pages == 0, f"{pages} pages of the segment are in memory"


def resident_pages(file: Path) -> int:
    """Pages of a file in the page cache (mincore over a mapping that touches none of them)."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = file.stat().st_size
    with file.open("r+b") as handle, mmap.mmap(handle.fileno(), size) as area:
        flags = (ctypes.c_ubyte * -(-size // PAGE))()
        start = ctypes.c_char.from_buffer(area)
        failed = libc.mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), flags
        )
        del start
        assert not failed, "mincore failed"
        return int((np.frombuffer(flags, dtype=np.uint8) & 1).sum())


def read_pass(segment: Segment, pool: IoPool, layers: list[list[Read]]) -> fio.FioResult:
    """Read all layers as a session does (impress.read.load)."""

    def task(part: list[Read]) -> Callable[[], None]:
        return lambda: segment.tier.read(part)

    cpu_s, begin = time.process_time(), time.perf_counter()
    tickets = []
    for reads in layers:
        n_bytes = sum(len(read.dest) for read in reads)
        size = slice_bytes(n_bytes, pool.n_threads, turns=TURNS)
        tickets.append(pool.submit(Lane.DEMAND, [task(part) for part in slices(reads, size)]))
    for ticket in tickets:
        assert ticket.wait(60.0), "a read is stuck"
    wall_s = time.perf_counter() - begin
    n_bytes = sum(len(read.dest) for reads in layers for read in reads)
    return fio.FioResult(n_bytes, wall_s, time.process_time() - cpu_s)


def cold_pass(segment: Segment, pool: IoPool, layers: list[list[Read]]) -> fio.FioResult:
    """`read_pass` of a file that is not in memory and stays out of it; bytes are compared after."""
    segment.dest[:] = 0
    segment.make_cold()
    result = read_pass(segment, pool, layers)
    assert not segment.tier.direct or not resident_pages(segment.file), "O_DIRECT was not used"
    segment.compare(layers)
    return result


def compare_reads(segment: Segment, pool: IoPool, kind: Kind, pairs: int, seed: int) -> Row:
    """Interleaved pairs of our pass and fio's two, after one of each that does not count."""
    ours: list[fio.FioResult] = []
    theirs: dict[str, list[fio.FioResult]] = {engine: [] for engine in fio.ENGINES}
    for pair in range(pairs + 1):
        layers = segment.reads(kind, seed + pair)
        order = ["", *fio.ENGINES]
        for engine in order[pair % 3 :] + order[: pair % 3]:  # each comes first in its turn
            if engine:
                theirs[engine].append(fio.read(
                    segment.file, engine, kind.fio_block, pattern=kind.fio_pattern, seed=seed + pair
                ))  # fmt: skip
                assert theirs[engine][-1].n_bytes == len(segment.data), "fio read another size"
            else:
                ours.append(cold_pass(segment, pool, layers))
    ours, theirs = ours[1:], {engine: results[1:] for engine, results in theirs.items()}
    speeds = {name: spread([r.gb_s for r in results])["median"] for name, results in theirs.items()}
    best = theirs[max(speeds, key=lambda name: speeds[name])]
    ratios = spread([a.gb_s / b.gb_s for a, b in zip(ours, best, strict=True)])
    # Stricter: the better of fio's in each pair, so that fio's luck counts and ours does not.
    lucky = [max(pair, key=lambda r: r.gb_s) for pair in zip(*theirs.values(), strict=True)]
    return {
        "read": kind.name, "pairs": pairs, "GB/s": spread([r.gb_s for r in ours])["median"],
        **speeds,
        "ratio": ratios["median"], "least": ratios["min"], "most": ratios["max"],
        "strict": spread([a.gb_s / b.gb_s for a, b in zip(ours, lucky, strict=True)])["median"],
        "CPU s/GB": spread([r.cpu_s / r.n_bytes * 1e9 for r in ours])["median"],
        "fio's": spread([r.cpu_s / r.n_bytes * 1e9 for r in best])["median"],
    }  # fmt: skip


def pieces_in_memory(n_bytes: int, pool: IoPool, seed: int) -> list[Row]:
    """Pieces a second with the segment on tmpfs: what the tier itself costs."""
    folder = SHM / f"impress-bench-{os.getpid()}"
    try:
        segment = Segment(folder, n_bytes, seed)
        rows = []
        for name, size in (
            ("single pieces", PIECE),
            ("random 64 KiB", 64 << 10),
            ("whole spans", 0),
        ):
            kind, results = Kind(name, "", size, "", 0), []
            for i in range(4):
                layers = segment.reads(kind, seed + i)
                results.append(read_pass(segment, pool, layers))
                segment.compare(layers)
            speed = spread([r.n_bytes / PIECE / r.wall_s for r in results[1:]])
            rows.append({
                "read from tmpfs": name, "piece": f"{PIECE >> 10} KiB",
                "pieces/s": speed["median"], "least": speed["min"], "most": speed["max"],
                "CPU s/GB": spread([r.cpu_s / r.n_bytes * 1e9 for r in results[1:]])["median"],
            })  # fmt: skip
        segment.tier.close()
        return rows
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Rows:
    """Keys and values as an engine holds them: float16 [heads, n, dim] a layer, random, finite."""

    def __init__(self, n_tokens: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.tokens = rng.integers(0, 50_000, n_tokens, dtype=np.int32)
        shape = (2, GEOMETRY.n_layers, GEOMETRY.n_kv_heads, n_tokens, GEOMETRY.head_dim)
        words = rng.integers(0, 1 << 64, int(np.prod(shape)) // 4, dtype=np.uint64)
        words &= np.uint64(0xBFFF_BFFF_BFFF_BFFF)  # no exponent of all ones: neither NaN nor inf
        self.keys, self.values = words.view(np.float16).reshape(shape)
        self.n_bytes = words.nbytes


def store_pass(folder: Path, rows: Rows) -> fio.FioResult:
    """Store all rows in a new store and flush; then check some of them and remove it."""
    try:
        with impress.PrefixStore.open(folder, GEOMETRY, namespace="bench") as store:
            cpu_s, begin = time.process_time(), time.perf_counter()
            stored = store.store(rows.tokens, list(rows.keys), list(rows.values), wait_s=30)
            store.flush()
            wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_s
            assert stored.ready, f"not stored: {stored}"
            _check_stored(store, rows)
        return fio.FioResult(rows.n_bytes, wall_s, cpu_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_stored(store: impress.PrefixStore, rows: Rows) -> None:
    """The last layer's keys are on the disk, row by row."""
    with store.lease(rows.tokens) as lease:
        (source,) = lease.sources
        at = source.layout.chunk_off(GEOMETRY.n_layers - 1, 0, 0)
        dest = aligned(len(rows.tokens) * GEOMETRY.k_row_bytes)
        store.ssd.read([Read(source.slot, at, dest, None, PIECE)])
        got = dest.view(np.uint16).reshape(-1, GEOMETRY.n_kv_heads, GEOMETRY.head_dim)
        assert np.array_equal(got, rows.keys[-1].view(np.uint16).transpose(1, 0, 2)), "rows differ"


def compare_stores(folder: Path, n_tokens: int, pairs: int, seed: int) -> Row:
    """Interleaved pairs of store + flush and fio's sequential write, in the same directory."""
    rows = Rows(n_tokens, seed)
    ours, theirs = [], []
    for pair in range(pairs + 1):
        ours.append(store_pass(folder / "store", rows))
        theirs.append(fio.write(folder / "fio.bin", rows.n_bytes, seed + pair))
        (folder / "fio.bin").unlink()
    ours, theirs = ours[1:], theirs[1:]
    ratios = spread([a.gb_s / b.gb_s for a, b in zip(ours, theirs, strict=True)])
    return {
        "write": f"store + flush, {rows.n_bytes / 2**30:g} GiB", "pairs": pairs,
        "GB/s": spread([r.gb_s for r in ours])["median"],
        "fio": spread([r.gb_s for r in theirs])["median"],
        "ratio": ratios["median"], "least": ratios["min"], "most": ratios["max"],
        "CPU s/GB": spread([r.cpu_s / r.n_bytes * 1e9 for r in ours])["median"],
    }  # fmt: skip


def experiment(options: Options) -> tuple[dict[str, float], list[Row]]:
    fio.version()
    pairs, n_bytes = (3, 256 * MIB) if options.quick else (9, 1024 * MIB)
    check_room(options.folder, 2 * n_bytes)  # a segment, a store or fio's file, and some more
    pool = IoPool(N_THREADS)
    segment = Segment(options.folder / "segments", n_bytes, options.seed)
    if not segment.tier.direct:
        console.print("note: O_DIRECT is refused here; reads are buffered, ratios mean little")
    reads = [compare_reads(segment, pool, kind, pairs, options.seed) for kind in KINDS]
    print_rows(f"Cold reads of {n_bytes >> 20} MiB, verified, {N_THREADS} threads", reads)
    segment.tier.close()
    segment.file.unlink()
    tokens = n_bytes // GEOMETRY.token_bytes
    writes = [compare_stores(options.folder, tokens, pairs, options.seed)]
    print_rows("Writes", writes)
    memory, in_memory = [], min(n_bytes, 256 * MIB)
    if SHM.is_dir() and shutil.disk_usage(SHM).free > 2 * in_memory:
        memory = pieces_in_memory(in_memory, pool, options.seed)
    else:
        console.print(f"note: {SHM} has no {2 * in_memory >> 20} MiB, the tier alone is left out")
    if memory:
        print_rows("The tier alone", memory)
    pool.close(10.0)
    figures: dict[str, float] = {
        kind.figure: row["ratio"] for kind, row in zip(KINDS, reads, strict=True)
    }
    figures["cpu_s_per_gb"] = reads[0]["CPU s/GB"]
    if memory:
        figures["pieces_per_s"] = memory[0]["pieces/s"]
    figures["store_flush_vs_fio"] = writes[0]["ratio"]
    return figures, [*reads, *writes, *memory]


_MEANING: Final[dict[str, Any]] = {
    "ratio": "speed of impress / of fio in the same pair, with the engine whose median is better; "
    "median of pairs",
    "strict": "the same, with the better engine of each pair",
    "cpu_s_per_gb": "of random 64 KiB reads, all threads, checksums included",
    "pieces_per_s": "single 8 KiB pieces in random order, file on tmpfs",
    "geometry": str(GEOMETRY),
}


def main() -> int:
    return run(
        "The SSD tier beside fio.", experiment,
        lambda quick: "20 s" if quick else "3 minutes", definitions=_MEANING,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
