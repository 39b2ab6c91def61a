"""A disk that fills up, and one whose system calls fail, fall short or take their time."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

from experiments.common import Row, Unable
from experiments.faults.content import Judged, judge, open_store, put
from experiments.faults.cuts import SILENCE_S
from impress.errors import FormatError, ImpressError
from impress.upkeep.rebuild import rebuild_store

#: What strace does to the worker, and to whom: calls of segments and of the index.
INJECTIONS = (
    ("fdatasync: EIO", "fdatasync:error=EIO:when=7+5"),
    ("pwrite64: EIO", "pwrite64:error=EIO:when=40+23"),
    ("pwrite64: ENOSPC", "pwrite64:error=ENOSPC:when=40+23"),
    ("pwrite64 claims 4,096 bytes and writes none", "pwrite64:retval=4096:when=40+31"),
    ("preadv: EIO", "preadv2:error=EIO:when=3+2"),
    ("preadv claims 4,096 bytes and reads none", "preadv2:retval=4096:when=3+4"),
    ("preadv: 2 s late, the limit is .5 s", "preadv2:delay_enter=2000000:when=3+6"),
)


def full_disk(folder: Path, n: int, _seed: int) -> list[Row]:
    """A small tmpfs: store until refused, have a file fill it, store again; n times."""
    total = _total("disk full (tmpfs)", 0)
    mount = folder / "tmpfs"
    mount.mkdir()
    command = ("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount))
    if subprocess.run(command, check=False, capture_output=True).returncode:
        raise Unable("mounts are not allowed here")
    try:
        first, kept = 0, list[int]()
        for _ in range(n):
            total["tried"] += 1
            with open_store(mount / "store") as store:
                first = _fill(store, mount, first, kept, total)
            with open_store(mount / "store") as store:  # and what a restart finds
                total["wrong"] += judge(store, kept).wrong
                store.check()
    finally:
        subprocess.run(("umount", "-l", str(mount)), check=False, capture_output=True)
    return [total]


def _fill(store: object, mount: Path, first: int, kept: list[int], total: Row) -> int:
    """One round; what must be served in spite of the full disk is `kept`."""
    seed, filler = first, mount / "filler"
    while True:  # until the store itself has no room: then it evicts, and goes on
        with contextlib.suppress(ImpressError):
            if put(store, seed).refused:  # type: ignore[arg-type]
                break
            store.flush()  # type: ignore[attr-defined]
        seed += 1
        if seed - first == 40:
            with contextlib.suppress(OSError), filler.open("wb") as file:
                file.write(bytes(24 << 20))  # now nothing else fits either
        if seed - first >= 60:
            break
    filler.unlink(missing_ok=True)
    found = judge(store, range(max(0, seed - 20), seed))  # type: ignore[arg-type]
    total["wrong"] += found.wrong
    kept[:] = range(max(0, seed - 20), seed)
    with contextlib.suppress(ImpressError):
        store.flush()  # type: ignore[attr-defined]
    stored = put(store, seed + 1)  # type: ignore[arg-type]
    with contextlib.suppress(ImpressError):
        store.flush()  # type: ignore[attr-defined]
    total["acknowledged"] += 1
    total["lost"] += stored.ready and judge(store, [seed + 1]).missed  # type: ignore[arg-type]
    return seed + 2


def injections(folder: Path, n: int, _seed: int) -> list[Row]:
    """Each fault of INJECTIONS, n prompts stored and read under it."""
    if shutil.which("strace") is None:
        raise Unable("strace is not installed (apt install strace)")
    return [_injected(folder / f"i{i}", what, rule, n) for i, (what, rule) in enumerate(INJECTIONS)]


def _injected(where: Path, what: str, rule: str, n: int) -> Row:
    total = _total(what, 1)
    if rule.startswith("preadv2"):
        with open_store(where) as store:
            for seed in range(n):
                put(store, seed)
            store.flush()
    call = rule.split(":")[0]
    command = (
        "strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={rule}",
        sys.executable, "-m", "experiments.faults.reader" if call == "preadv2"
        else "experiments.faults.worker", str(where), "0", str(n), "preadv",
    )  # fmt: skip
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=4 * SILENCE_S
        )
    except subprocess.TimeoutExpired:
        total["hangs"] += 1
        return total
    lines = done.stdout.splitlines()
    total["acknowledged"] = sum(line.isdigit() for line in lines)
    total["refused"] = sum(line.startswith("refused") for line in lines)
    if call == "preadv2":
        judged = [line.split()[1:] for line in lines if line.startswith("judged")]
        if not judged:
            total["ended"] = 1
            return total
        total["missed"], total["wrong"] = (int(word) for word in judged[-1])
        total["acknowledged"] = n
        return total
    try:
        found = _judged(where, n)
    except FormatError:  # the calls of the index failed too; segments alone must do
        total["rebuilt"] = 1
        rebuild_store(where)
        found = _judged(where, n)
    total["wrong"], total["missed"] = found.wrong, found.missed
    return total


def _judged(where: Path, n: int) -> Judged:
    with open_store(where) as store:
        found = judge(store, range(n))
        store.check()
        return found


def _total(what: str, tried: int) -> Row:
    return {
        "fault": what, "tried": tried, "acknowledged": 0, "lost": 0, "wrong": 0, "hangs": 0,
        "missed": 0, "refused": 0,
    }  # fmt: skip
