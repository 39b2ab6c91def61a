"""A disk that fills up, and one whose system calls fail, fall short or take their time."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

from experiments.common import Row, Unable
from experiments.faults.content import counts_of, judge, open_store, put
from experiments.faults.cuts import SILENCE_S
from impress.errors import ImpressError
from impress.store import PrefixStore
from impress.upkeep.rebuild import rebuild_store
from impress.write.health import RETRY_S

#: Faults that strace injects into the worker: names, and rules for calls of segments and the index.
INJECTIONS = (
    ("fdatasync: EIO", "fdatasync:error=EIO:when=7+23"),
    ("pwrite64: EIO", "pwrite64:error=EIO:when=5+37"),  # per thread; an open makes four
    ("pwrite64: ENOSPC", "pwrite64:error=ENOSPC:when=5+37"),
    ("pwrite64 claims 4,096 bytes and writes none", "pwrite64:retval=4096:when=40+31"),
    ("preadv: EIO", "preadv2:error=EIO:when=3+2"),
    ("preadv claims 4,096 bytes and reads none", "preadv2:retval=4096:when=3+4"),
    ("preadv: 2 s late, the limit is .5 s", "preadv2:delay_enter=2000000:when=3+6"),
)


def full_disk(folder: Path, n: int, _seed: int) -> list[Row]:
    """A small tmpfs: store until refused, have a file fill it, store again; n times."""
    total = counts_of("disk full (tmpfs)", 0)
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
                first, promised = _fill(store, mount, first, kept, total)
                before = judge(store, promised)
            with open_store(mount / "store") as store:  # and what a restart finds
                total["wrong"] += judge(store, kept).wrong + before.wrong
                total["lost"] += max(before.missed, judge(store, promised).missed)
                store.check()
    finally:
        subprocess.run(("umount", "-l", str(mount)), check=False, capture_output=True)
    return [total]


def _fill(
    store: PrefixStore, mount: Path, first: int, kept: list[int], total: Row
) -> tuple[int, list[int]]:
    """One round. Returns the next one's first seed, and the prompts promised last. `kept`: prompts
    of which, the disk being full, some may be gone by now; none may be wrong."""
    seed, filler = first, mount / "filler"
    while True:  # until the store itself has no room: then it evicts, and goes on
        with contextlib.suppress(ImpressError):
            if put(store, seed).refused:
                total["refused"] += 1
                break
            store.flush()
        seed += 1
        if seed - first == 40:
            with contextlib.suppress(OSError), filler.open("wb") as file:
                file.write(bytes(24 << 20))  # now nothing else fits either
        if seed - first >= 60:
            break
    filler.unlink(missing_ok=True)
    kept[:] = range(max(0, seed - 20), seed)
    total["wrong"] += judge(store, kept).wrong
    with contextlib.suppress(ImpressError):
        store.flush()
    promised = _stored(store, seed + 1)
    total["acknowledged"] += len(promised)
    total["refused"] += not promised
    return seed + 2, promised


def _stored(store: PrefixStore, seed: int) -> list[int]:
    """[seed], once flush has returned for it: a full store looks for room every RETRY_S. [] where
    it is refused for good."""
    end_s = monotonic() + 2 * RETRY_S
    try:
        while put(store, seed).refused:
            if monotonic() > end_s:
                return []
            sleep(1.0)
        store.flush()
    except ImpressError:
        return []
    return [seed]


def injections(folder: Path, n: int, _seed: int) -> list[Row]:
    """Each fault of INJECTIONS, n prompts stored and read under it."""
    if shutil.which("strace") is None:
        raise Unable("strace is not installed (apt install strace)")
    rows, why = list[Row](), ""
    for i, (what, rule) in enumerate(INJECTIONS):
        try:
            rows.append(_injected(folder / f"i{i}", what, rule, n))
        except Unable as err:  # this one says nothing; the others do
            why = str(err)
            print(why, file=sys.stderr)
    if not rows:
        raise Unable(why)
    return rows


def _injected(where: Path, what: str, rule: str, n: int) -> Row:
    total = counts_of(what, 1) | {"missing": []}
    reading = rule.startswith("preadv2")
    if reading or "claims" in what:  # the read failed, or the bytes themselves were never written
        total["lost"] = None
    if reading:
        with open_store(where) as store:
            for seed in range(n):
                put(store, seed)
            store.flush()
    call = rule.split(":")[0]
    strace = ("strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}",
              "-e", f"inject={rule}")  # fmt: skip
    try:
        if reading:
            total["acknowledged"] = n
            _judge(total, where, n, *strace, limit_s=0.5)
            del total["missing"]
            return total
        status, lines = _lines(*strace, *_python("worker", where, n), "preadv", "0")
    except subprocess.TimeoutExpired:
        total["hangs"] += 1
        return total
    kept = {int(seed) for line in lines if line.startswith("kept") for seed in line.split()[1:]}
    total["ended"] += status != 0  # strace ends as what it traces did
    total["acknowledged"] = len(kept)
    total["refused"] = sum(line.startswith("refused") for line in lines)
    if total["lost"] is not None and not _goes_on(lines):
        raise Unable(f"{what}: nothing was acknowledged behind a fault, so it says nothing of that")
    if not _judge(total, where, n):  # the calls of the index failed too; segments alone must do
        total["rebuilt"] = 1
        rebuild_store(where)
        assert _judge(total, where, n), "a rebuilt index is not sound"
    if total["lost"] is not None:
        total["lost"] = len(kept & set(total["missing"]))
    del total["missing"]
    return total


def _goes_on(lines: list[str]) -> bool:
    """Whether prompts were acknowledged after one that was refused."""
    words = [line.split() for line in lines]
    first = next((i for i, said in enumerate(words) if said[:1] == ["refused"]), len(words))
    return any(said[:1] == ["kept"] and len(said) > 1 for said in words[first:])


def _judge(total: Row, where: Path, n: int, *before: str, limit_s: float = 5.0) -> bool:
    """Count what a process of its own says. False, with nothing counted, if the index is unusable.

    LMDB ends a process over some damage: damage that it did not notice until it wrote again.
    """
    _, lines = _lines(*before, *_python("reader", where, n), "preadv", f"{limit_s:g}")
    judged = [line.split()[1:] for line in lines if line.startswith("judged")]
    if judged:
        missing = next(line for line in lines if line.startswith("missing"))
        total["missing"] = [int(seed) for seed in missing.split()[1:]]
        total["missed"], total["wrong"] = (int(word) for word in judged[-1])
    elif not lines:
        total["ended"] += 1
    return bool(judged)


def _python(module: str, where: Path, n: int) -> tuple[str, ...]:
    return (sys.executable, "-m", f"experiments.faults.{module}", str(where), "0", str(n))


def _lines(*command: str) -> tuple[int, list[str]]:
    """A process's exit status, and what it said until it ended. Raises TimeoutExpired.

    In a session of its own: killed alone, strace lets what it traces run on.
    """
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=4 * SILENCE_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, said.splitlines()
