"""Storing what a request computed, off the request's path: one thread, a bounded line.

generate() ── offer ──> | job | job | ... | ──> thread: writer, put every layer, release
      │       full: skipped and counted                       │
      └─ until its forward begins, no layer's put ────────────┘

Rows on a device are copied from there on a separate stream, beside what later requests compute.
"""

from __future__ import annotations

import atexit
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from impress.engines.hf_cache import RowsCache
from impress.engines.hf_settings import on_host
from impress.errors import ImpressError, StoreFailed
from impress.store import PrefixStore
from impress.write.draft import Stored
from tiers.errors import MediumError
from tiers.line import Line

log = logging.getLogger("impress")

_WAIT_S: Final = 30.0  # of one put, for write buffers
_EARLIER_WAIT_S: Final = 10.0  # for an earlier store that begins alike to be READY
_MOST_WAITING: Final = 4  # requests whose caches may be held back for storing
#: Longest that storing stands back for a request, and how often it looks whether it may go on: the
#: request takes no lock for it, which a signal could leave taken.
_STANDS_BACK_S: Final = 0.05
_LOOK_S: Final = 0.0005
OF_CHOSEN: Final = "rows computed on a part of the prefix are never stored"
_MOST_OF_FREE: Final = 0.5  # of a device's memory: the rest is for the next requests


@dataclass(slots=True)
class Outcome:
    """What became of a request's storing. Written by the storing thread, read by anyone."""

    refused: str = ""  # why the line, or its thread, gave it up
    stored: list[Stored] = field(default_factory=list)  # of batch rows handed to the store

    def so_far(self) -> dict[str, Any]:
        """The fields of a Request that tell of it. A store may come to nothing long after it was
        accepted, as when what it follows is evicted before its commit: then it no longer counts."""
        n_tokens, refused = 0, self.refused
        for stored in self.stored:
            why = stored.refused or str(stored.error or "")
            n_tokens += 0 if why else stored.n_new
            refused = refused or why
        return {"stored_tokens": n_tokens, "refused": refused}


@dataclass(frozen=True, slots=True)
class Job:
    """Rows to store. `tokens` are whole windows, one array for each batch row."""

    cache: RowsCache  # holds every row of `tokens`, a reused prefix too
    tokens: tuple[npt.NDArray[np.int32], ...]
    release: Callable[[], None]  # gives the cache's memory back
    outcome: Outcome = field(default_factory=Outcome)
    is_new: bool = True  # whether the store lacks some of them
    n_purges: int = 0  # as its request began
    computed: dict[torch.device, Any] = field(default_factory=dict)  # the event after its rows


class StoreQueue:
    """Stores jobs in the order offered, in one thread started by the first of them.

    Thread-safe. A job that fails leaves its error for `raise_failed`; those after it go on.
    """

    def __init__(
        self, store: PrefixStore, *, limit: int = _MOST_WAITING, wait_s: float = _WAIT_S
    ) -> None:
        """Room for `limit` jobs; a put waits at most `wait_s` for the store's write buffers."""
        self.n_skipped = 0
        self._store = store
        self._wait_s = wait_s
        self._line = Line("impress-store", self._done, limit, self._end)
        self._streams: dict[torch.device, Any] = {}
        self._failed: ImpressError | None = None
        self._stored: dict[bytes, Stored] = {}  # of the last job, by first window
        self._given = deque[Stored]()  # nothing is known of yet
        self._later: ImpressError | None = None  # the first of these that failed
        self._is_closed = False
        self._back_until_s = 0.0  # requests' own: no layer is begun before
        self._n_purges = 0  # as the request under way began

    @contextmanager
    def standing_back(self) -> Iterator[None]:
        """A request's: this engine begins to store no layer until `go_on`, or the block has ended,
        and nothing of the request if a purge comes after its beginning.

        What is checked, looked up and planned before a forward shares the interpreter, and maybe
        the processors, with storing (decision 39). Writes under way go on.
        """
        self._back_until_s = monotonic() + _STANDS_BACK_S
        around, self._n_purges = self._n_purges, self._store.purges()
        try:
            yield
        finally:
            self._n_purges = around  # of the request that this one was made in
            self.go_on()

    def go_on(self) -> None:
        """The forward has begun."""
        self._back_until_s = 0.0

    def _stand_back(self) -> None:
        end_s = monotonic() + _STANDS_BACK_S  # however many requests come
        while monotonic() < min(self._back_until_s, end_s):
            sleep(_LOOK_S)

    def job(
        self, cache: RowsCache, sequences: torch.Tensor, n_prompt: int, ends: Any, hit: int = 0
    ) -> Job:
        """What there is to store of a request: whole windows, those that `Config.admit` lets in.

        Effects: notes a use of each. `ends`: see `whole_windows`. `hit`: tokens known to be stored;
        there may be more, as a prompt's last token is never read and a prefix may be recomputed.
        """
        n_held, outcome = cache.length, Outcome()
        rows = whole = whole_windows(sequences[:, :n_held], n_prompt, self._store.window, ends)
        rows = tuple(row[: self._store.admitted(row)] if len(row) else row for row in rows)
        known = [hit if len(row) <= hit else self._store.lookup(row) for row in whole]
        is_new = any(len(row) > n for row, n in zip(rows, known, strict=True))
        if not any(map(len, whole)):
            outcome.refused = f"it has no whole window of {self._store.window} tokens"
        elif not is_new and any(len(row) > n for row, n in zip(whole, known, strict=True)):
            outcome.refused = 'Config.admit is "second", and this is the first use'
        if n_held != sequences.shape[1] - 1:  # virtual tokens of a prompt-tuned model, say
            outcome.refused = f"the cache holds {n_held} rows for {sequences.shape[1]} tokens"
        computed = {
            device: torch.cuda.current_stream(device).record_event() for device in cache.devices()
        }
        return Job(cache, rows, cache.release, outcome, is_new, self._n_purges, computed)

    def offer(self, job: Job) -> None:
        """Take a job, or skip it at once when the line is full or closed, or has no thread, or a
        device has too little memory for it to wait there. Never waits."""
        if self._is_closed:
            job.outcome.refused = "the engine is closed"
            job.release()
            return
        if why := too_much(job.cache, self.held()):
            self._skip(job, why)
            return
        try:
            self._line.begin()
        except MediumError as err:  # no more threads: the answer is there all the same
            self._skip(job, str(err))
            return
        if not self._line.offer(job):
            self._skip(job, "too many requests wait to be stored")

    def held(self) -> list[RowsCache]:
        """Caches that wait to be stored, or are being stored."""
        return [job.cache for job in self._line.held()]

    def _skip(self, job: Job, why: str) -> None:
        self.n_skipped += 1
        job.outcome.refused = why
        job.release()

    def drain(self) -> None:
        """Wait until every job offered is done."""
        self._line.drain()

    def raise_failed(self) -> None:
        """Raises the first failure since the last call, also of what was handed to the store. Never
        waits."""
        self._sift()
        later, self._later = self._later, None
        self._raise(later)

    def _raise(self, later: ImpressError | None = None) -> None:
        failed, self._failed = self._failed or later, None
        if failed is not None:
            raise failed

    def _sift(self) -> None:
        """Note the first that failed of what was given to the store, which tells of it only once,
        whoever asks. Of others nothing is kept: each failure holds its rows."""
        for _ in range(len(self._given)):
            with suppress(IndexError):  # another thread had the last
                stored = self._given.popleft()
                if stored.error is not None:
                    self._later = self._later or named(stored.error)
                elif not stored.ready and not stored.refused:
                    self._given.append(stored)

    def _end(self) -> None:
        """The program ends, and nobody closed the engine: close before the interpreter is gone."""
        if self._line.alive:
            try:
                self.close()
            except Exception as err:
                log.error("what was generated is not stored: %s", err)

    def close(self) -> None:
        """Finish the jobs offered and end the thread. Idempotent; raises the first failure to hand
        rows to the store."""
        self._is_closed = True
        self._line.close()
        self._line.drain()
        self._raise()

    def _done(self, job: Job) -> None:
        try:
            with self._beside(job):
                self._store_rows(job)
        except Exception as err:  # kept for raise_failed(): there is no caller here to tell
            failed = named(err)
            self._failed = self._failed or failed
            job.outcome.refused = str(failed)
        finally:
            job.release()

    @contextmanager
    def _beside(self, job: Job) -> Iterator[None]:
        """Copies from a device wait for what the request computed, and for nothing else.

        The copying thread waits on the host, so the rows are free as soon as they are released.
        """
        with ExitStack() as streams:
            for device, computed in job.computed.items():
                if device not in self._streams:
                    made = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                    self._streams[device] = made
                stream = self._streams[device]
                stream.wait_event(computed)
                streams.enter_context(torch.cuda.stream(stream))
            yield

    def _store_rows(self, job: Job) -> None:
        # Of equal rows one is stored: the store may not know yet what it has just accepted.
        rows_of = {tokens.tobytes(): row for row, tokens in enumerate(job.tokens) if len(tokens)}
        before, self._stored = self._stored, {}
        for row in rows_of.values():
            self._stand_back()
            tokens = job.tokens[row]
            head = tokens[: self._store.window].tobytes()
            earlier = self._stored.get(head) or before.get(head)
            if earlier is not None:  # else what they share is written twice
                with suppress(ImpressError):  # it failed: its error is flush's to raise
                    earlier.wait(_EARLIER_WAIT_S)
            # From the start, whatever was hit: a prefix that was evicted meanwhile is stored again.
            with self._store.writer(tokens, start=0, wait_s=self._wait_s) as writer:
                if self._store.purges() != job.n_purges:  # one that comes later finds the writer
                    writer.stored.refused = "purged"
                    job.outcome.stored.append(writer.stored)
                    return
                self._stored[head] = writer.stored
                first = writer.stored.n_tokens - writer.stored.n_new
                for layer, rows in enumerate(job.cache.layers if writer.stored.n_new else ()):
                    self._stand_back()
                    k, v = rows.rows(row, first, len(tokens))
                    scores = _importance(job.cache, layer, row, len(tokens))
                    writer.put(layer, first, k, v, None if scores is None else scores[first:])
            job.outcome.stored.append(writer.stored)
            self._sift()
            self._given.append(writer.stored)


def named(err: Exception) -> ImpressError:
    """The error itself, or where nobody raised it on purpose one that says what it was."""
    if isinstance(err, ImpressError):
        return err
    what = str(err) if isinstance(err, MediumError) else f"{type(err).__name__}: {err}"
    if isinstance(err, MemoryError):
        what = "not enough memory: raise the process's memory limit, or lower dram_bytes"
    failed = StoreFailed(f"not all of a request is stored: {what}")
    failed.__cause__ = err
    return failed


def close_own(store: PrefixStore) -> None:
    """Close a store that attach() opened: where that is refused or cut off, at exit."""
    store.close()
    atexit.unregister(store.close)


def do_all(*steps: Callable[[], None]) -> None:
    """Do each step, even after one that fails; but not after Ctrl-C, which ends the wait.

    Raises the first failure, as an ImpressError, and logs the others.
    """
    first: ImpressError | None = None
    for step in steps:
        try:
            step()
        except Exception as err:
            if first is not None and err is not first.__cause__:
                log.error("flush: %s", err)
            first = first or named(err)
    if first is not None:
        raise first


def too_much(cache: RowsCache, others: Sequence[RowsCache]) -> str:
    """Why a request's rows may not wait, beside others, on the device they are on; "" where they
    may. A cache that is among the others counts once."""
    others = list({id(one): one for one in others if one is not cache}.values())
    for device, n_bytes in cache.device_bytes().items():
        held = n_bytes + sum(one.device_bytes()[device] for one in others)
        free = _free_bytes(device)
        if held > _MOST_OF_FREE * free:
            return (
                f"what waits to be stored would hold {held:,} bytes of {device}, and only "
                f"{free:,} are free there"
            )
    return ""


def _free_bytes(device: torch.device) -> int:
    """Free bytes of a device: what nobody has, and what torch keeps for its next tensors."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def whole_windows(
    sequences: torch.Tensor, n_prompt: int, window: int, ends: Any
) -> tuple[npt.NDArray[np.int32], ...]:
    """Each batch row's whole windows up to its end token (`ends`), without its padding."""
    ends = on_host(ends)
    rows = []
    for row in sequences.cpu().numpy().astype(np.int32):
        answer = row[n_prompt:]
        stops = np.flatnonzero(np.isin(answer, ends)) if ends is not None else np.empty(0)
        end = n_prompt + int(stops[0]) + 1 if len(stops) else len(row)
        rows.append(np.ascontiguousarray(row[: end // window * window]))
    return tuple(rows)


def _importance(
    cache: RowsCache, layer: int, row: int, n_tokens: int
) -> npt.NDArray[np.float32] | None:
    """Importance of a layer's first n_tokens rows, by what the prompt's last rows attended to."""
    if cache.observed is None:
        return None
    keys = cache.layers[layer].first_keys(row, cache.observed.n_prompt)
    return cache.observed.importance(layer, row, keys, n_tokens)
