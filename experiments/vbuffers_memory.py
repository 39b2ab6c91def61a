"""Requests that come, grow by a token a step and go, in virtual buffers; what others would hold."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from experiments.common import Row
from impress.engines.buffers import Rental, VirtualBuffers
from impress.engines.virtual import Virtual
from impress.types import Geometry
from tiers.ranges import HostRanges

#: Rows of 2 KiB, as of 8 KV heads of 128 in fp16.
GEOMETRY: Final = Geometry(4, 8, 8, 128, "float16")
BATCH: Final = 16
CONTEXT: Final = 4096
#: New tokens a caller allows for, of which most requests use a part.
MOST_NEW: Final = 1024
N_STEPS: Final = {False: 6000, True: 1200}
_SAMPLE_EVERY: Final = 32
_BLOCK_ROWS: Final = 16  # of paging: vLLM's


@dataclass(slots=True)
class Live:
    """A request under way."""

    rental: Rental
    n_rows: int
    n_end: int
    n_most: int


def serve(page_bytes: int, n_steps: int, seed: int) -> list[Row]:
    """Mean and most bytes held over a run, by system. Rows are written as a model would."""
    settings = Virtual(BATCH, CONTEXT, page_bytes)
    buffers = VirtualBuffers(GEOMETRY, settings, CONTEXT, HostRanges(page_bytes))
    samples: list[dict[str, int]] = []
    for step, live in enumerate(_requests(buffers, n_steps, seed)):
        if step % _SAMPLE_EVERY == 0 and step > n_steps // 10:
            buffers.settle()
            samples.append({"resident": _resident(buffers), **_held(live, buffers)})
    usage = buffers.usage()
    buffers.close()
    live_mean = float(np.mean([sample["live"] for sample in samples]))
    static = GEOMETRY.token_bytes * BATCH * CONTEXT
    rows: list[Row] = []
    for name in ("static", "request", "paging", "concat", "virtual"):
        mean = float(np.mean([sample[name] for sample in samples]))
        real = name == "virtual"
        rows.append({
            "system": f"virtual, {page_bytes >> 10} KiB" if real else name,
            "by": "real" if real else "arithmetic",
            "mib_mean": mean / 2**20, "mib_most": max(s[name] for s in samples) / 2**20,
            "vs_static": mean / static, "fragmentation": 1 - live_mean / mean,
        })  # fmt: skip
    virtual = rows[-1]
    virtual["resident_mib"] = float(np.mean([sample["resident"] for sample in samples])) / 2**20
    virtual |= {
        "idle_share": float(np.mean([s["idle"] / s["virtual"] for s in samples])),
        "requests": usage.n_rented, "reused": usage.n_reused, "no_room": usage.n_fallbacks,
    }  # fmt: skip
    for row in rows:
        for name in ("resident_mib", "idle_share", "requests", "reused", "no_room"):
            row.setdefault(name, "")
    return rows


def _requests(buffers: VirtualBuffers, n_steps: int, seed: int) -> Iterator[list[Live]]:
    """The requests under way, step by step; about half of the slots are taken."""
    rng = np.random.default_rng(seed)
    live: list[Live] = []
    for _ in range(n_steps):
        if rng.random() < BATCH / 2 / 200:  # answers are 200 tokens long, on average
            n_rows = int(np.clip(rng.lognormal(np.log(512), 0.9), 16, CONTEXT - MOST_NEW))
            n_new = int(min(1 + rng.geometric(1 / 200), MOST_NEW))
            rental = buffers.rent(1, n_rows, n_rows + MOST_NEW)
            if rental is not None:
                _write(rental, 0, n_rows)
                live.append(Live(rental, n_rows, n_rows + n_new, n_rows + MOST_NEW))
        for request in live:
            assert request.rental.reach(request.n_rows + 1), buffers.said
            _write(request.rental, request.n_rows, request.n_rows + 1)
            request.n_rows += 1
        yield live
        for request in [one for one in live if one.n_rows >= one.n_end]:
            request.rental.release()
            live.remove(request)


def _write(rental: Rental, first: int, end: int) -> None:
    for layer in range(GEOMETRY.n_layers):
        for plane in rental.planes(layer):
            plane[:, first:end] = 1.0


def _held(live: list[Live], buffers: VirtualBuffers) -> dict[str, int]:
    one, usage = GEOMETRY.token_bytes, buffers.usage()
    blocks = (-(-request.n_rows // _BLOCK_ROWS) for request in live)
    return {
        "live": one * sum(request.n_rows for request in live),
        "static": one * BATCH * CONTEXT,
        "request": one * sum(request.n_most for request in live),
        "paging": one * _BLOCK_ROWS * sum(blocks),
        "concat": one * sum(request.n_rows for request in live),  # and a plane more while copying
        "virtual": usage.held_bytes,
        "idle": usage.idle_bytes,
    }


def _resident(buffers: VirtualBuffers) -> int:
    """Bytes of memory the kernel has behind the buffers."""
    libc = ctypes.CDLL(None, use_errno=True)
    total = 0
    for pair in buffers.areas:
        for area in pair:
            pages = np.zeros(-(-area.n_bytes // mmap.PAGESIZE), dtype=np.uint8)
            libc.mincore(
                ctypes.c_void_p(area.address), ctypes.c_size_t(area.n_bytes),
                ctypes.c_void_p(pages.ctypes.data),
            )  # fmt: skip
            total += int((pages & 1).sum()) * mmap.PAGESIZE
    return total
