"""Random bit flips in segments, headers and the index: right answers or honest misses.

Each trial runs in a process forked from one that has everything imported: a damaged index can end
a process, and that is counted too. Some trials run at once, on copies of their own: most of a trial
is waiting for the kernel.
"""

from __future__ import annotations

import logging
import multiprocessing as mp
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.common import Row
from experiments.faults.content import judge, open_store, put
from impress.errors import ImpressError

N_PROMPTS = 6
_HANG_S = 60.0
_AT_ONCE = 4
_KINDS = {"rows": 0.5, "headers": 0.25, "index": 0.2, "identity": 0.05}


def flips(folder: Path, n: int, seed: int) -> list[Row]:
    """n stores, each with one bit flipped, opened and read."""
    pristine, places = _make(folder / "pristine")
    rng = np.random.default_rng(seed)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "experiments.faults.flips"])
    totals = {kind: _total(f"bit flip in {kind}") for kind in _KINDS}

    def tried(trial: _Trial) -> tuple[str, Row]:
        return trial.kind, _try(context, pristine, folder / f"t{trial.number}", trial)

    with ThreadPoolExecutor(_AT_ONCE) as some:
        for kind, row in some.map(tried, [_drawn(rng, places, i) for i in range(n)]):
            totals[kind]["tried"] += 1
            totals[kind]["acknowledged"] += N_PROMPTS
            for name, count in row.items():
                totals[kind][name] += count
    return list(totals.values())


class _Trial(NamedTuple):
    """One bit of one file, relative to the store."""

    number: int
    kind: str
    file: str
    bit: int


def _drawn(
    rng: np.random.Generator, places: dict[str, list[tuple[str, int, int]]], number: int
) -> _Trial:
    kind = str(rng.choice(list(_KINDS), p=list(_KINDS.values())))
    file, first, last = places[kind][int(rng.integers(len(places[kind])))]
    return _Trial(number, kind, file, int(rng.integers(first * 8, last * 8)))


def _total(what: str) -> Row:
    return {
        "fault": what, "tried": 0, "acknowledged": 0, "lost": 0, "wrong": 0, "hangs": 0,
        "missed": 0, "refused": 0, "ended": 0,
    }  # fmt: skip


def _make(path: Path) -> tuple[Path, dict[str, list[tuple[str, int, int]]]]:
    """A store, and where in which file (relative) each kind of byte is: (file, first, last)."""
    with open_store(path) as store:
        for seed in range(N_PROMPTS):
            put(store, seed)
        store.flush()
        records = store.catalog.records()
    segments = "shards/main/segments"
    data = "shards/main/index/data.mdb"
    return path, {
        "rows": [
            (f"{segments}/{p.segment:08d}.seg", p.off, p.off + p.length)
            for r in records for p in r.parts
        ],
        "headers": [
            (f"{segments}/{r.meta.segment:08d}.seg", r.meta.off, r.meta.off + r.meta.length)
            for r in records
        ],
        "index": [(data, 0, (path / data).stat().st_size)],
        "identity": [("impress.json", 0, (path / "impress.json").stat().st_size)],
    }  # fmt: skip


def _try(
    context: mp.context.ForkServerContext, pristine: Path, copy: Path, trial: _Trial
) -> Row:  # fmt: skip
    """What became of one flip: counts to be added."""
    shutil.copytree(pristine, copy)
    try:
        with (copy / trial.file).open("r+b") as handle:
            handle.seek(trial.bit // 8)
            byte = handle.read(1)[0]
            handle.seek(trial.bit // 8)
            handle.write(bytes([byte ^ 1 << trial.bit % 8]))
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_look, args=(str(copy), theirs))
        process.start()
        theirs.close()
        try:
            if not mine.poll(_HANG_S):
                process.kill()
                return {"hangs": 1}
            missed, wrong, refused = mine.recv()
            return {"missed": missed, "wrong": wrong, "refused": refused}
        except EOFError:
            return {"ended": 1}
        finally:
            process.join()
            mine.close()
    finally:
        shutil.rmtree(copy)


def _look(path: str, answer: object) -> None:
    """In the forked process: open, read everything, say (missed, wrong, refused to open)."""
    logging.getLogger("impress").setLevel(logging.CRITICAL)
    try:
        with open_store(Path(path)) as store:
            found = judge(store, range(N_PROMPTS))
        said = (found.missed, found.wrong, 0)
    except ImpressError:
        said = (N_PROMPTS, 0, 1)
    answer.send(said)  # type: ignore[attr-defined]
