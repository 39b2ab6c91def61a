"""kill -9 and power cuts: what was flushed before is served after, or it is counted as lost."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.common import Row, Unable
from experiments.faults.content import counts_of, judge, open_store
from impress.errors import ImpressError

#: A worker that says nothing for this long counts as hanging.
SILENCE_S = 60.0
#: Cuts before a fresh directory: the store would only grow.
_CUTS_A_STORE = 25
_SHUTDOWN = 0x8004587D  # FS_IOC_SHUTDOWN
_NO_LOG_FLUSH = 2


@contextmanager
def worker(folder: Path, first: int, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A process that stores prompts from `first` on, killed at the end."""
    command = (sys.executable, "-m", "experiments.faults.worker", str(folder), str(first), *more)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


class Heard(NamedTuple):
    """`last`: the seed that was acknowledged last, -1: none. `fate`: "hangs" or "ended", for a
    worker that said less than it was to."""

    last: int
    fate: str = ""


def acknowledged(process: subprocess.Popen[str], n: int) -> Heard:
    """Wait for n acknowledgements."""
    assert process.stdout is not None
    last = -1
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while n:
            if not selector.select(SILENCE_S):
                return Heard(last, "hangs")
            line = process.stdout.readline()
            if not line:
                return Heard(last, "ended")
            if line.strip().isdigit():
                last = int(line)
                n -= 1
    return Heard(last)


def kills(folder: Path, n: int, seed: int) -> list[Row]:
    """kill -9 at a random moment of storing, n times."""
    rng, total = np.random.default_rng(seed), counts_of("kill -9", n)
    first, where = 0, folder / "k"
    flushed: list[int] = []
    for cut in range(n):
        if cut % _CUTS_A_STORE == 0:
            first, flushed, where = 0, [], folder / f"k{cut}"
        with worker(where, first) as process:
            heard = acknowledged(process, int(rng.integers(1, 4)))
            time.sleep(float(rng.random()) * 0.05)
        first = _note(total, where, first, heard, flushed, rng)
    return [total]


def power_cuts(folder: Path, n: int, seed: int) -> list[Row]:
    """The file system under the store is shut down without flushing its log, n times."""
    rng, total = np.random.default_rng(seed), counts_of("power cut (loop ext4, FS_IOC_SHUTDOWN)", n)
    first, image, mount = 0, folder / "image", folder / "mount"
    flushed: list[int] = []
    mount.mkdir()
    try:
        for cut in range(n):
            if cut % _CUTS_A_STORE == 0:
                first, flushed = 0, []
                _fresh_file_system(image, mount)
            with worker(mount / "store", first) as process:
                heard = acknowledged(process, int(rng.integers(1, 4)))
                time.sleep(float(rng.random()) * 0.05)
                _cut_power(mount)
            _run("umount", str(mount))
            _run("mount", "-o", "loop", str(image), str(mount))
            first = _note(total, mount / "store", first, heard, flushed, rng)
    finally:
        subprocess.run(("umount", "-l", str(mount)), check=False, capture_output=True)
    return [total]


def _note(
    total: Row, where: Path, first: int, heard: Heard, flushed: list[int],
    rng: np.random.Generator,
) -> int:  # fmt: skip
    """Reopen; judge this round's prompts and some older ones. Returns the next round's first seed.
    A store that does not open has lost all of them."""
    if heard.fate:
        total[heard.fate] += 1
    last = heard.last
    new = list(range(first, last + 1)) if last >= 0 else []
    older = rng.choice(flushed, min(len(flushed), 10), replace=False).tolist() if flushed else []
    total["acknowledged"] += len(new)
    try:
        with open_store(where) as store:
            found = judge(store, new + older)
            after = judge(store, range(max(last, first) + 1, max(last, first) + 8))  # not promised
            store.check()
        total["lost"] += found.missed
        total["wrong"] += found.wrong + after.wrong
    except ImpressError:
        total["refused"] += 1
        total["lost"] += len(new) + len(older)
    flushed += new
    return max(last, first) + 10


def _fresh_file_system(image: Path, mount: Path) -> None:
    subprocess.run(("umount", "-l", str(mount)), check=False, capture_output=True)
    image.unlink(missing_ok=True)
    with image.open("wb") as file:
        file.truncate(512 << 20)
    try:
        _run("mkfs.ext4", "-q", "-F", str(image))
        _run("mount", "-o", "loop", str(image), str(mount))
    except (FileNotFoundError, subprocess.CalledProcessError) as err:
        said = getattr(err, "stderr", b"") or str(err).encode()
        raise Unable(f"mounts are not allowed here: {said.decode().strip()[:200]}") from None


def _cut_power(mount: Path) -> None:
    fd = os.open(mount, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    finally:
        os.close(fd)


def _run(*command: str) -> Any:
    for attempt in range(20):
        try:
            return subprocess.run(command, check=True, capture_output=True, timeout=120)
        except subprocess.CalledProcessError:
            if command[0] != "umount" or attempt == 19:
                raise
            time.sleep(0.1)  # the killed worker's last write still holds the mount
    return None
