"""Random bit flips in segments, headers and the index: right answers or honest misses.

Each flip has a copy of the store to itself. The copies are read by processes forked from one that
has everything imported, some flips each, one after the other. A damaged index can end a process,
which is counted for the flip it was at; the flips after it get a new process.
"""

from __future__ import annotations

import logging
import multiprocessing as mp
import shutil
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.common import Row
from experiments.faults.content import judge, open_store, put
from impress.errors import ImpressError
from impress.spans.format import SpanRecord
from tiers.base import Extent

N_PROMPTS = 6
_HANG_S = 60.0
_AT_ONCE = 4  # a flip is mostly waiting for the kernel
_A_PROCESS = 20
_KINDS = {"rows": 0.5, "headers": 0.25, "index": 0.2, "identity": 0.05}
_OF_A_PAIR = ("rows", "headers")  # needed by one prompt, or by two that begin alike


def flips(folder: Path, n: int, seed: int) -> list[Row]:
    """n stores, each with one bit flipped, opened and read."""
    pristine, places = _make(folder / "pristine")
    rng = np.random.default_rng(seed)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "experiments.faults.flips"])
    totals = {kind: _total(kind) for kind in _KINDS}

    drawn = [_drawn(rng, places, i) for i in range(n)]
    some = [drawn[at : at + _A_PROCESS] for at in range(0, n, _A_PROCESS)]
    with ThreadPoolExecutor(_AT_ONCE) as at_once:
        for rows in at_once.map(lambda trials: _try(context, pristine, folder, trials), some):
            for kind, row in rows:
                totals[kind]["tried"] += 1
                totals[kind]["acknowledged"] += N_PROMPTS
                for name, count in row.items():
                    totals[kind][name] += count
    return list(totals.values())


class _Place(NamedTuple):
    """Bytes of one file, relative to the store. `pair`: prompts 2·pair and 2·pair + 1 begin alike,
    and only they need these bytes; None: all prompts do."""

    file: str
    first: int
    last: int
    pair: int | None = None


class _Trial(NamedTuple):
    """One bit of one file, relative to the store; `pair` as of its place."""

    number: int
    kind: str
    file: str
    bit: int
    pair: int | None


def _drawn(rng: np.random.Generator, places: dict[str, list[_Place]], number: int) -> _Trial:
    kind = str(rng.choice(list(_KINDS), p=list(_KINDS.values())))
    place = places[kind][int(rng.integers(len(places[kind])))]
    bit = int(rng.integers(place.first * 8, place.last * 8))
    return _Trial(number, kind, place.file, bit, place.pair)


def _total(kind: str) -> Row:
    """lost: None where any prompt may need what was flipped, so that lost cannot be told from
    missed; missed then also counts every prompt behind an index or identity that is refused."""
    return {
        "fault": f"bit flip in {kind}", "tried": 0, "acknowledged": 0,
        "lost": 0 if kind in _OF_A_PAIR else None, "wrong": 0, "hangs": 0,
        "missed": 0, "refused": 0, "ended": 0,
    }  # fmt: skip


def _make(path: Path) -> tuple[Path, dict[str, list[_Place]]]:
    """A store, and where each kind of byte is."""
    pairs: dict[int, int] = {}  # of each span
    with open_store(path) as store:
        for seed in range(N_PROMPTS):
            put(store, seed)
            store.flush()
            for record in store.catalog.records():
                pairs.setdefault(record.span_id, seed // 2)
        records = store.catalog.records()
    segments = "shards/main/segments"
    data = "shards/main/index/data.mdb"

    def place(at: Extent, record: SpanRecord) -> _Place:
        file = f"{segments}/{at.segment:08d}.seg"
        return _Place(file, at.off, at.off + at.length, pairs[record.span_id])

    return path, {
        "rows": [place(part, r) for r in records for part in r.parts],
        "headers": [place(r.meta, r) for r in records],
        "index": [_Place(data, 0, (path / data).stat().st_size)],
        "identity": [_Place("impress.json", 0, (path / "impress.json").stat().st_size)],
    }


def _try(
    context: mp.context.ForkServerContext, pristine: Path, folder: Path, trials: list[_Trial]
) -> list[tuple[str, Row]]:
    """What became of each flip: its kind, and counts to be added."""
    copies = [_flipped(pristine, folder, trial) for trial in trials]
    found: list[Row] = []
    try:
        while len(found) < len(copies):
            found += _looked(context, copies[len(found) :])
    finally:
        for copy in copies:
            shutil.rmtree(copy)
    return [(trial.kind, _counts(trial, row)) for trial, row in zip(trials, found, strict=True)]


def _counts(trial: _Trial, found: Row) -> Row:
    """What a look at a flip adds to its kind. Lost: missed, though neither the prompt nor the one
    it shares bytes with has the flip in its bytes."""
    counts = dict(found)
    missing = counts.pop("missing", [])
    counts["missed"] = len(missing)
    if trial.pair is not None:
        counts["lost"] = sum(seed // 2 != trial.pair for seed in missing)
    return counts


def _flipped(pristine: Path, folder: Path, trial: _Trial) -> Path:
    """A copy with the one bit flipped."""
    copy = folder / f"t{trial.number}"
    shutil.copytree(pristine, copy)
    with (copy / trial.file).open("r+b") as handle:
        handle.seek(trial.bit // 8)
        byte = handle.read(1)[0]
        handle.seek(trial.bit // 8)
        handle.write(bytes([byte ^ 1 << trial.bit % 8]))
    return copy


def _looked(context: mp.context.ForkServerContext, copies: list[Path]) -> list[Row]:
    """What one process says of the copies, up to the one it ended or hung at."""
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_look, args=([str(copy) for copy in copies], theirs))
    process.start()
    theirs.close()
    found: list[Row] = []
    try:
        for _ in copies:
            if not mine.poll(_HANG_S):
                process.kill()
                return [*found, {"hangs": 1}]
            found.append(mine.recv())
    except EOFError:
        found.append({"ended": 1})
    finally:
        process.join()
        mine.close()
    return found


def _look(paths: list[str], answer: Connection) -> None:
    """In the forked process: open each, read everything, say what is missed, wrong, refused."""
    logging.getLogger("impress").setLevel(logging.CRITICAL)
    for path in paths:
        try:
            with open_store(Path(path)) as store:
                found = {seed: judge(store, [seed]) for seed in range(N_PROMPTS)}
            missing = [seed for seed, one in found.items() if one.missed]
            answer.send({"missing": missing, "wrong": sum(one.wrong for one in found.values())})
        except ImpressError:
            answer.send({"missing": [*range(N_PROMPTS)], "refused": 1})
