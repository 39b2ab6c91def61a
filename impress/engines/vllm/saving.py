"""Stores what vLLM computed, in the background: one thread reads blocks and fills writers.

    step ends ── offer(spec) ──> | spec | spec | … | ──> thread: blocks -> rows -> writer -> READY

A full block does not change while its request holds it, so nothing is copied in a step. A
finished request keeps its blocks until `WorkerSide.saved` names it; a preempted one is dropped
before its blocks are written again. Prompts that share more than what is stored are stored one
after the other, so that it is written once.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b

import torch

from impress.engines.vllm.blocks import Layout
from impress.engines.vllm.hanging import Disk
from impress.engines.vllm.life import Life
from impress.engines.vllm.step import SaveSpec
from impress.engines.vllm.strided import PIECE_BYTES
from impress.engines.vllm.uses import Uses
from impress.errors import ImpressError, StoreFailed
from impress.store import PrefixStore
from impress.write.draft import Stored
from impress.write.writer import NO_SLOT
from tiers.errors import MediumError
from tiers.threads import Worker

log = logging.getLogger("impress")

#: Specs that may wait; more are skipped, since the cache may forget and blocks are scarce.
MOST_WAITING = 256
#: Longest wait of one put for write buffers; then the store is refused, and what follows is skipped
#: until a write ends: each put would wait as long, while its blocks are held.
_BUFFER_WAIT_S = 5.0
#: Longest wait for an earlier store of the same beginning to be READY, or for its request's next
#: chunk, or all of them, to come; after it, what they share is written twice.
_EARLIER_WAIT_S = 10.0
_FLUSH_S = 120.0
#: Most rows copied at once; one layer's also take no more than PIECE_BYTES.
_MOST_ROWS = 2048


class Saver:
    """Stores specs in the order offered. Thread-safe."""

    def __init__(
        self, store: PrefixStore, caches: Sequence[torch.Tensor], layouts: Sequence[Layout]
    ) -> None:
        """caches: vLLM's KV cache of each layer, with its layout. Raises StoreFailed if no thread
        can be started."""
        self._store = store
        self._caches = caches
        self._layouts = layouts
        self._block_size = layouts[0].block_size
        self._specs: deque[SaveSpec] = deque()
        self._lives: dict[str, Life] = {}
        self._writing: dict[bytes, str] = {}  # root -> key of the life that stores it
        self._pending: list[tuple[str, bytes, Stored]] = []  # handed to the committer
        self._disk = Disk(store)
        self._uses = Uses(store)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._reading = threading.Lock()  # held while blocks are read
        self._closed = False
        self.n_skipped = 0  # requests, or their chunks: too many wait, the disk hangs, an error
        self.n_refused = 0  # stores that the store refused, or that failed
        self._told: set[str] = set()  # reasons logged so far
        self._thread = Worker(self._run, "impress-save")
        try:
            self._thread.start()
        except MediumError as err:
            raise StoreFailed(str(err)) from None
        atexit.register(self.close)  # before its store is closed: shared._close_all

    # ---- vLLM's thread: nothing here waits for a disk ---------------------------------------

    def offer(self, spec: SaveSpec) -> None:
        """Take a spec, or skip its request when too many wait."""
        with self._lock:
            life = self._lives.get(spec.key)
            if life is None:
                life = self._lives[spec.key] = Life(spec.request_id, self._root(spec))
            if self._hangs():
                self._skip(life)
            elif len(self._specs) >= MOST_WAITING:
                self._skip(life)
                self._tell(f"{MOST_WAITING} parts of prompts wait already", "skipped")
            if life.dropped:  # it has no turn to wait for
                return
            if not life.n_waiting:
                life.waits_since = time.monotonic()
            life.n_waiting += 1
            self._specs.append(spec)
            self._changed.notify_all()

    def _hangs(self) -> bool:
        """Whether the thread is in a call of the store that does not end. If so, all that waits is
        skipped: vLLM needs its blocks, and none is being read. With the lock held."""
        if not self._disk.keeps():
            return False
        for life in self._lives.values():
            if life.waits:
                self._skip(life)
        self._tell("the disk hangs as space is made on it", "skipped")
        return True

    def _skip(self, life: Life) -> None:
        """Read no more of this life; with the lock held."""
        self.n_skipped += not life.dropped
        life.dropped = True

    def _tell(self, why: str, count: str) -> None:
        """Log each reason once, whatever numbers follow it: a counter says how often."""
        reason = why.split(":")[0]
        if reason not in self._told:
            self._told.add(reason)
            log.warning(
                "a prompt is not stored: %s (said once; vllm:impress_%s_total counts)", why, count
            )

    def drop(self, keys: Sequence[str] | None) -> None:
        """Forget these lives, or (None) all: on return their blocks are no longer read."""
        if keys is not None and not keys:
            return  # most steps: they do not wait for a read of blocks that stay
        with self._reading, self._lock:
            for key in self._lives if keys is None else keys:
                if key in self._lives:
                    self._lives[key].dropped = True
            self._changed.notify_all()

    def give_up(self, keys: Sequence[str]) -> None:
        """Store no more of these lives: vLLM preempts requests for lack of their blocks. On return
        these blocks are no longer read."""
        if not keys:
            return
        with self._reading, self._lock:
            for life in [self._lives[key] for key in keys if key in self._lives]:
                if life.waits:
                    self._skip(life)
                    self._tell("vLLM is short of the blocks that it lies in", "skipped")
            self._changed.notify_all()

    def busy(self, request_id: str) -> bool:
        """Whether something of a request still waits to be read from its blocks."""
        with self._lock:
            self._hangs()
            lives = self._lives.values()
            return any(life.waits for life in lives if life.request_id == request_id)

    def reads(self) -> bool:
        """Whether any block is being read, or still to be."""
        with self._lock:
            self._hangs()
            return self._reading.locked() or any(life.waits for life in self._lives.values())

    def end(self, request_id: str) -> None:
        """No more of a request will come: what is half stored is given up."""
        with self._lock:
            for key, life in list(self._lives.items()):
                life.ended = life.ended or life.request_id == request_id
                over = life.ended and life.dropped and not life.n_waiting
                if over and life.writer is None:  # a hanging thread would not sweep it
                    del self._lives[key]
            self._changed.notify_all()

    def ready(self) -> list[tuple[str, int, int]]:
        """(request, tokens, new tokens) of stores that became READY since the last call."""
        found = []
        with self._lock:
            for item in list(self._pending):
                request_id, _, stored = item
                if stored.ready:
                    found.append((request_id, stored.n_tokens, stored.n_new))
                elif stored.error is not None:
                    self.n_refused += 1
                    log.warning("request %s was not stored: %s", request_id, stored.error)
                elif stored.refused:
                    self.n_refused += 1
                    self._tell(stored.refused, "refused")
                else:
                    continue
                self._pending.remove(item)
        return found

    def pause(self, seconds: float) -> None:
        """Let the thread work for a moment: for a caller with nothing else to do."""
        with self._lock:
            self._changed.wait(seconds)

    def flush(self) -> None:
        """Wait until every spec offered is done and READY. Raises StoreFailed for what failed."""
        with self._lock:
            if not self._changed.wait_for(self._idle, _FLUSH_S):
                raise StoreFailed(f"saving: {len(self._specs)} still wait after {_FLUSH_S:g} s")
        self._store.flush()

    def _idle(self) -> bool:
        return not any(life.n_waiting for life in self._lives.values())

    def close(self) -> None:
        """Finish what waits and end the thread, unless the disk hangs. Idempotent."""
        atexit.unregister(self.close)
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        while not self._thread.ended(1.0):
            if self._disk.keeps(_FLUSH_S):
                log.error("saving: the disk hangs: what waited is not stored")
                break

    # ---- the thread ------------------------------------------------------------------------

    def _root(self, spec: SaveSpec) -> bytes:
        """What no two may be storing at a time: a prompt up to the end of its first window that is
        not stored. Of what lies before it, as a system prompt that all begin with, nothing is
        written twice, and nobody need wait for another."""
        prompt = spec.prompt
        n_stored = self._store.lookup(prompt.tokens, prompt.extra, prompt.tenant)
        first = prompt.cut(n_stored + self._store.window)
        extra = b"".join(b"%d:%b" % one for one in sorted(first.extra.items()))
        return blake2b(first.tokens.tobytes() + extra + prompt.tenant.encode()).digest()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(
                    lambda: self._closed or self._sweep() or self._next(peek=True), _EARLIER_WAIT_S
                )
                spec = self._next()
                if spec is None:
                    if self._closed:
                        break
                    continue
            try:
                self._save(spec)
            except Exception as err:  # whatever it is: those that wait after it are to be stored
                log.warning("request %s is not stored: %s", spec.request_id, str(err) or repr(err))
                with self._lock:
                    self._skip(self._lives[spec.key])
            finally:
                with self._lock:
                    life = self._lives[spec.key]
                    life.n_waiting -= 1
                    self._changed.notify_all()
        for life in self._lives.values():
            self._give_up(life)

    def _next(self, *, peek: bool = False) -> SaveSpec | None:
        """The first spec whose beginning nobody else is storing, or that has waited long enough for
        that: there may be many chunks to come, or, in a pause, none. With the lock held."""
        for at, spec in enumerate(self._specs):
            life = self._lives[spec.key]
            waited = time.monotonic() - life.waits_since >= _EARLIER_WAIT_S
            if waited or self._writing.get(life.root, spec.key) == spec.key:
                if not peek:
                    del self._specs[at]
                return spec
        if self._closed and self._specs:  # nobody will finish what these wait for
            self._writing.clear()
            return self._specs[0] if peek else self._specs.popleft()
        return None

    def _sweep(self) -> bool:
        """Forget lives that are over, and free their roots; with the lock held."""
        for key, life in list(self._lives.items()):
            if (life.ended or life.dropped) and not life.n_waiting:
                try:
                    self._give_up(self._lives.pop(key))
                except Exception as err:  # as in `_run`: the others are to be stored
                    log.warning("request %s: %s", life.request_id, str(err) or repr(err))
        return False

    def _save(self, spec: SaveSpec) -> None:
        life = self._lives[spec.key]
        if not life.dropped and self._disk.hangs():
            with self._lock:
                self._skip(life)
        if life.dropped:
            self._give_up(life)
            return
        if life.writer is None or life.n_asked < len(spec.prompt.tokens):
            self._give_up(life)
            if not self._begin(life, spec):
                return
        assert life.writer is not None
        # A window that this step only began waits until it is complete: rows of half of one would
        # be copied once more, to memory of their own, in each layer.
        window = self._store.window
        wanted = min(spec.end, life.n_wanted) // window * window
        while life.n_put < wanted and not life.writer.stored.refused:
            end = self._end_of_put(life.n_put, wanted)
            if not self._put(life, spec, life.n_put, end):
                self._give_up(life)
                return
            life.n_put = end
        refused = life.writer.stored.refused
        if life.n_put >= life.n_wanted or refused:
            self._finish(life)
        if refused == NO_SLOT:
            self._disk.note_full()

    def _end_of_put(self, begin: int, wanted: int) -> int:
        """Where the next put ends: after about _MOST_ROWS, in whole windows and whole blocks."""
        unit, geometry = math.lcm(self._store.window, self._block_size), self._store.geometry
        row_bytes = geometry.k_row_bytes + geometry.v_row_bytes
        n_rows = min(_MOST_ROWS, PIECE_BYTES // row_bytes)
        return min(wanted, (begin // unit + max(1, n_rows // unit)) * unit)

    def _begin(self, life: Life, spec: SaveSpec) -> bool:
        """Open a writer for the admitted part of a spec's prompt; False: nothing is admitted."""
        life.n_asked = len(spec.prompt.tokens)
        life.n_wanted = self._uses.admitted(life.whole, spec.prompt, self._under_way)
        if not life.n_wanted:
            return False
        self._writing[life.root] = spec.key
        with self._lock:
            earlier = [stored for _, root, stored in self._pending if root == life.root]
        for stored in earlier:
            try:
                late = not stored.wait(_EARLIER_WAIT_S) and not stored.refused
            except ImpressError:
                continue
            if late:
                self._disk.note_late(stored)
                break
        cut = spec.prompt.cut(life.n_wanted)
        with self._disk.asked():
            life.writer = self._store.writer(cut.tokens, 0, cut.extra, _BUFFER_WAIT_S, cut.tenant)
        life.n_put = life.writer.stored.n_tokens - life.writer.stored.n_new
        return True

    def _under_way(self) -> set[str]:
        """Requests that may still bring more, however long it takes."""
        with self._lock:
            return {life.whole for life in self._lives.values()}

    def _put(self, life: Life, spec: SaveSpec, begin: int, end: int) -> bool:
        """Put rows begin..end-1 in every layer; False if the blocks are no longer the life's."""
        assert life.writer is not None
        # From a block's first row on; rows already stored are skipped.
        first = begin // self._block_size
        row = first * self._block_size
        blocks = spec.block_ids[first : -(-end // self._block_size)]
        for layer in range(len(self._layouts)):
            rows = self._read(life, layer, blocks)
            if rows is None or life.dropped:  # meanwhile, by `offer`, which waits for no read
                return False
            k, v = rows
            life.writer.put(layer, row, k[:, : end - row], v[:, : end - row])
        return True

    def _read(
        self, life: Life, layer: int, block_ids: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Copies of a layer's rows of these blocks; None when they are no longer the life's."""
        with self._reading:
            if life.dropped:
                return None
            return self._layouts[layer].read(self._caches[layer], block_ids)

    def _finish(self, life: Life) -> None:
        assert life.writer is not None
        writer, life.writer = life.writer, None
        with self._disk.asked():
            writer.close()
        with self._lock:
            self._pending.append((life.request_id, life.root, writer.stored))
        self._free(life)

    def _give_up(self, life: Life) -> None:
        writer, life.writer = life.writer, None
        try:
            if writer is not None:
                writer.close(keep=False)
        finally:
            self._free(life)

    def _free(self, life: Life) -> None:
        owner = self._writing.get(life.root)
        if owner is not None and self._lives.get(owner, life) is life:
            del self._writing[life.root]
