"""A disk that reorders, delays, fails, forgets unsynced writes, and can lose power."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

from turns import Killed, Scheduler

from tiers.base import PAGE, Bytes, Slot
from tiers.coalesce import Run
from tiers.errors import MediumError, ReadFailed
from tiers.ssd import SsdTier


class Faults:
    """How often each fault strikes a read, a write or a sync. All zero: a good disk."""

    def __init__(self, *, late: float = 0, eio: float = 0, short: float = 0, flip: float = 0,
                 write: float = 0, sync: float = 0) -> None:  # fmt: skip
        self.late, self.eio, self.short, self.flip, self.write = late, eio, short, flip, write
        self.sync = sync

    @property
    def on_reads(self) -> bool:
        """Reads can go wrong: what is stored may be taken for lost. Otherwise only stores fail."""
        return bool(self.late or self.eio or self.short or self.flip)

    @property
    def any(self) -> bool:
        return bool(self.on_reads or self.write or self.sync)


class SimSsd(SsdTier):
    """The real tier over real files, with a seeded fate for each request.

    `undo` holds what unsynced writes replaced, page by page: a power cut may bring any of it back.
    """

    sched: ClassVar[Scheduler]
    faults: ClassVar[Faults]
    on: ClassVar[bool] = True  # False: the power is off
    undo: ClassVar[dict[tuple[Path, int], bytes]]
    tiers: ClassVar[list[SimSsd]] = []  # open ones; a process that is gone closes nothing itself

    def __init__(self, *args: Any, **options: Any) -> None:
        options["engine"] = "preadv"
        super().__init__(*args, **options)
        SimSsd.tiers.append(self)

    def _write_at(self, segment: int, off: int, data: Bytes) -> None:
        self._turn()
        if self.sched.rng.random() < self.faults.write:
            raise MediumError(f"ssd: write to {self._files.path(segment)}: injected")
        path = self._files.path(segment)
        with path.open("rb") as file:
            file.seek(off)
            before = file.read(len(data))
        for at in range(0, len(data), PAGE):
            self.undo.setdefault((path, off + at), before[at : at + PAGE])
        super()._write_at(segment, off, data)
        self._turn()

    def _read_run(self, run: Run) -> None:
        self._turn()
        rng, faults = self.sched.rng, self.faults
        if rng.random() < faults.late:
            self.sched.wait_until(lambda: False, rng.choice((0.5, 3.0, 30.0)))
        if rng.random() < faults.eio:
            raise ReadFailed("io", f"ssd: {self._files.path(run.segment)}: injected")
        if rng.random() < faults.short:
            raise ReadFailed("short", f"ssd: {self._files.path(run.segment)}: injected")
        super()._read_run(run)
        if rng.random() < faults.flip:
            view = rng.choice(run.views)
            view[rng.randrange(len(view))] ^= 1 << rng.randrange(8)
        self._turn()

    def sync(self, slots: Iterable[Slot]) -> None:
        slots = list(slots)
        self._turn()
        parts = [part for slot in slots for part in slot.parts]
        if parts and self.sched.rng.random() < self.faults.sync:
            self.sync_failures += 1
            self._drop_pages({self._files.path(part.segment) for part in parts})
            raise MediumError(f"ssd: fdatasync of {self.folder}: injected")
        for part in parts:
            path = self._files.path(part.segment)
            for off in range(part.off, part.off + part.length, PAGE):
                self.undo.pop((path, off), None)
        self._turn()

    def _drop_pages(self, paths: set[Path]) -> None:
        """These files' unsynced writes are lost. No later sync reports it: it is told once."""
        for path, off in [at for at in self.undo if at[0] in paths]:
            before = self.undo.pop((path, off))
            with path.open("r+b") as file:
                file.seek(off)
                file.write(before)

    def _turn(self) -> None:
        """Perhaps give the turn away; nothing happens any more once the power is off."""
        if not SimSsd.on:
            raise Killed
        self.sched.assert_unlocked()
        if self.sched.rng.random() < 0.3:
            self.sched.pause()
        if not SimSsd.on:
            raise Killed

    @classmethod
    def power_cut(cls, rng: random.Random) -> None:
        """Each page that was not synced is now as written, or as it was before, or torn."""
        for (path, off), before in sorted(cls.undo.items()):
            fate = rng.random()
            if fate < 0.5 or not path.exists():
                continue
            keep = 0 if fate < 0.8 else 512 * rng.randrange(1, PAGE // 512)
            with path.open("r+b") as file:
                file.seek(off + keep)
                file.write(before[keep:])
        cls.undo.clear()


def flipped(path: Path, rng: random.Random) -> Callable[[], None]:
    """One bit of a file goes bad at rest; returned is what makes it good again. It leaves a page
    alone that was written since."""
    at = rng.randrange(path.stat().st_size)
    first = at - at % PAGE
    good = path.read_bytes()[first : first + PAGE]
    bad = bytearray(good)
    bad[at - first] ^= 1 << rng.randrange(8)

    def put(page: bytes, over: bytes) -> None:
        if path.exists():
            with path.open("r+b") as file:
                file.seek(first)
                if file.read(PAGE) == over:
                    file.seek(first)
                    file.write(page)

    put(bytes(bad), good)
    return lambda: put(good, bytes(bad))
