"""aiofiles: plain buffered files, wherever Python runs. Slow: for where nothing else goes."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from typing import Any

import aiofiles

from tiers.coalesce import Run
from tiers.queues import OwnFiles, ReadQueue, SegmentFile


class AiofilesQueue(ReadQueue):
    """An event loop of this thread's own; one read after the other, as the pool has more threads.

    Opens the files for itself: a file offset is shared by all who hold the descriptor.
    """

    name = "aiofiles"

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._files: OwnFiles[Any] = OwnFiles()

    def read(self, runs: Sequence[Run], files: Sequence[SegmentFile]) -> Generator[int, None, None]:
        for i, (run, file) in enumerate(zip(runs, files, strict=True)):
            yield i if self._loop.run_until_complete(self._read(run, file)) else ~i

    async def _read(self, run: Run, segment: SegmentFile) -> bool:
        try:
            file = self._files.get(segment)
            if file is None:
                for gone in self._files.take_gone():
                    await gone.close()
                file = await aiofiles.open(segment.path, "rb", buffering=0)
                self._files.keep(segment, file)
            await file.seek(run.off)
            for view in run.views:
                rest = memoryview(view)
                while rest:
                    n = await file.readinto(rest)
                    if not n:
                        return False
                    rest = rest[n:]
        except OSError:
            return False
        return True

    def close(self) -> None:
        if self._loop.is_closed():
            return
        for file in self._files.take_all():
            self._loop.run_until_complete(file.close())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
