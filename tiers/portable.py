"""aiofiles: plain buffered files, wherever Python runs. Slow: for where nothing else works."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

from aiofiles.threadpool import wrap

from tiers.coalesce import Run
from tiers.files import let_open
from tiers.queues import Completions, FileOf, OwnFiles, ReadQueue, SegmentFile


class AiofilesQueue(ReadQueue):
    """An event loop of this thread's own; one read after the other: the pool has more threads.

    Opens the files for itself: a file offset is shared by all who hold the descriptor.
    """

    name = "aiofiles"

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1)
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(self._executor)
        self._files = OwnFiles(_opened)

    def read(self, batches: Iterable[list[Run]], file_of: FileOf, most: int = 0) -> Completions:
        for runs in batches:
            for run in runs:
                yield run, self._loop.run_until_complete(self._read(run, file_of(run.segment)))

    async def _read(self, run: Run, segment: SegmentFile) -> bool:
        try:
            file = wrap(self._files.of(segment))
            await file.seek(run.off)
            for view in run.views:
                rest = memoryview(view)
                while rest:
                    n = await file.readinto(rest)
                    if not n:
                        return False
                    rest = rest[n:]
        except (OSError, RuntimeError):  # RuntimeError: there are no more threads
            return False
        return True

    def close(self) -> None:
        """Close without the loop: at the interpreter's end no executor takes work any more."""
        try:
            self._files.close()
        finally:
            self._executor.shutdown()
            self._loop.close()


def _opened(path: Path) -> FileIO:
    file = FileIO(path)
    let_open(file.fileno() + 1)
    return file
