"""What the guard does after an answer: shadows are weighed, and a few requests run again exactly.

generate() ── offer ──> | watch | watch | ──> thread: each layer's missing mass ─> the ledger
              full: dropped                           model again, whole ─> first token's KL, flips

One thread, which makes way: it waits a little for a request under way before each layer, and a
forward of its own ends at the next layer once a request has come to any engine on its model. Whole
rows for that forward are read first, outside the model's turn, as those reads come after all else.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakValueDictionary

import torch

from impress.engines.hf_cache import RowsCache
from impress.engines.hf_chosen import put_back
from impress.engines.hf_mode import Way
from impress.engines.hf_models import Prompt
from impress.engines.hf_modules import CACHE, bare
from impress.engines.hf_output import RawLogits
from impress.engines.hf_prefix import StoredPrefix, end_reads
from impress.engines.hf_storing import too_much
from impress.errors import ImpressError, PrefixLost, StoreMismatch, Unsupported
from impress.policy import Exact, Policy
from impress.quality.guard import Rerun, Weighed
from impress.read.session import Lease
from impress.read.shadow import RerunSession, Seen, ShadowSession
from impress.selection.scores import suffix_lse_of
from impress.store import PrefixStore
from tiers.errors import MediumError
from tiers.line import Line

log = logging.getLogger("impress")

_MOST_WAITING: Final = 2  # watches that may wait, each with a cache or a lease held back
_PATIENCE_S: Final = 0.5  # for a request under way, before each layer; then it goes on alongside


class Turn:
    """Whose turn it is at the model. Requests wait for each other, and for an audit to finish its
    layer. Belongs to one process: in a forked child the turn never comes."""

    def __init__(self, config: object = None) -> None:
        self._config = config  # held: while there is a turn, no other object has its id
        self._pid = os.getpid()
        self._lock = threading.RLock()
        # One for each; sets, not counts, as those that a signal cuts off may end in another order.
        self._wanted = set[object]()  # requests under way, or waiting
        self._inside = set[object]()  # those of the thread that has the lock, nested

    @property
    def n_wanted(self) -> int:
        """Requests under way, or waiting."""
        return len(self._wanted)

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that made it."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raises ImpressError in a child, before any lock: its holder may not have come along."""
        if self.forked:
            raise ImpressError(
                "the engine is of before a fork: close it before forking, or start this process by "
                "spawn"
            )

    @contextmanager
    def request(self, model: Any = None) -> Iterator[None]:
        """Take the turn. `model`: it then has its own attention, whatever cut an earlier request
        off; within another request it keeps that request's."""
        self.check_process()
        this = object()
        try:
            self._wanted.add(this)
            with self._lock:
                is_first = not self._inside
                try:
                    self._inside.add(this)
                    if is_first and model is not None:
                        put_back(model)
                    yield
                finally:
                    self._inside.discard(this)
        finally:
            self._wanted.discard(this)

    @contextmanager
    def audit(self) -> Iterator[None]:
        """The model, if nobody wants it; else raises Interrupted."""
        if not self._lock.acquire(blocking=False):
            raise Interrupted
        try:
            self.check()
            yield
        finally:
            self._lock.release()

    def check(self) -> None:
        """Raises Interrupted when a request has come."""
        if self._wanted:
            raise Interrupted

    def wait(self) -> None:
        """Let a request under way end, within reason."""
        if self._lock.acquire(timeout=_PATIENCE_S):
            self._lock.release()


#: By process, and the id of the config.
_turns: WeakValueDictionary[tuple[int, int], Turn] = WeakValueDictionary()
_turns_lock = threading.Lock()


def turn_of(model: Any) -> Turn:
    """The turn of all engines on a model: they share its config, which says how it attends."""
    key = os.getpid(), id(model.config)
    with _turns_lock:
        turn = _turns.get(key)
        if turn is None:
            turn = _turns[key] = Turn(model.config)
        return turn


class Interrupted(Exception):
    """A request came, or the program ends: the audit makes way."""


@dataclass(slots=True)
class Watch:
    """A request that is weighed after its answer. Owns the lease until `drop`."""

    ledger: bytes
    policy: Policy
    lease: Lease
    n_prompt: int
    seen: dict[int, Seen] | None = None  # of a sparse request
    raw: RawLogits | None = None  # of one that is run again
    cache: RowsCache | None = None  # of an exact one: its rows, observed
    sequences: torch.Tensor | None = None
    release: Callable[[], None] | None = None  # to call when the cache has served

    def drop(self) -> None:
        """Nothing of it is needed any more. Idempotent."""
        self.lease.release()
        release, self.release, self.cache = self.release, None, None
        if release is not None:
            release()

    def layer(self, layer: int) -> tuple[Seen | None, torch.Tensor | None]:
        """What a layer was asked, and its keys of the prefix where they are at hand."""
        if self.cache is None:
            return (self.seen or {}).get(layer), None
        found = self.cache.observed.rows(layer, 0) if self.cache.observed is not None else None
        if found is None:
            return None, None
        query, scaling = found
        n_prefix = self.lease.n_tokens
        keys = self.cache.layers[layer].first_keys(0, self.n_prompt)
        query = query.to(keys.device)
        suffix_lse = suffix_lse_of(query, keys[:, n_prefix:], scaling)
        return Seen(query, scaling, suffix_lse), keys[:, :n_prefix]


def watch_of(
    way: Way, prefix: StoredPrefix | None, prompt: Prompt, undo: ExitStack
) -> Watch | None:
    """The watch of a request that is to be weighed after its answer; it fills as the request runs.
    `undo` drops it."""
    if way.watched is None or prefix is None:
        return None
    watch = Watch(way.ledger, way.policy, prefix.lease, prompt.n_tokens)
    undo.callback(watch.drop)
    prefix.lend()
    if way.watched.mode == "sparse":
        watch.seen = prefix.seen = {}
        watch.raw = RawLogits() if way.watched.rerun else None
    return watch


class Auditor:
    """Weighs watches in the order offered, in one thread started by the first of them."""

    def __init__(
        self, model: Any, store: PrefixStore, turn: Turn, same: Callable[[], None],
        stored: Callable[[], list[RowsCache]],
    ) -> None:  # fmt: skip
        """`same` raises where the model is no longer the one that answered; `stored`: caches that
        are held to be stored."""
        self._model = bare(model)
        self._same = same
        self._stored = stored
        self._store = store
        self._turn = turn
        self._line = Line("impress-guard", self._weighed, _MOST_WAITING, self._end)
        self._is_closed = False
        self._is_ending = False
        self._said: set[str] = set()  # warnings of what a policy or a device cannot do

    def offer(self, watch: Watch) -> None:
        """Take a watch, or drop it at once when the line is full or closed. Never waits."""
        taken = False
        with suppress(MediumError):  # without more threads the next watch tries again
            if not self._is_closed and not self._too_much(watch):
                self._line.begin()
                taken = self._line.offer(watch)
        if not taken:
            self._store.ledgers.dropped(watch.ledger)
            watch.drop()

    def _too_much(self, watch: Watch) -> bool:
        """Whether its rows take so much of a device that the next request would lack it."""
        if watch.cache is None:
            return False
        held = [other.cache for other in self._line.held() if other.cache is not None]
        why = too_much(watch.cache, [*held, *self._stored()])
        if why:
            self._say(f"guard: no shadow under {watch.policy.name}: {why}")
        return bool(why)

    def _say(self, why: str) -> None:
        """Warn once: later lines tell nothing new, except for the numbers."""
        if (said := re.sub(r"[\d,]+", "#", why)) not in self._said:
            self._said.add(said)
            log.warning(why)

    def drain(self) -> None:
        """Wait until every watch offered has been weighed or dropped."""
        self._line.drain()

    def _end(self) -> None:
        """The program ends, and nobody closed the engine: drop what waits and end the thread.

        A thread that is inside torch when the interpreter is gone aborts the process.
        """
        if self._line.alive:
            self._is_ending = True
            self.close()

    def close(self) -> None:
        """Weigh what is waiting and end the thread. Idempotent."""
        self._is_closed = True
        self._line.close()

    def _weighed(self, watch: Watch) -> None:
        try:
            self._audit(watch)
        except Exception:  # nobody waits for it: one shadow less
            log.exception("guard: a shadow failed")
            self._store.ledgers.dropped(watch.ledger)
        finally:
            watch.drop()

    def _audit(self, watch: Watch) -> None:
        try:
            weighed = weigh(watch, self._store.geometry.n_layers, self._pause)
        except Interrupted:
            weighed = None
        except ImpressError as err:
            if not isinstance(err, PrefixLost) or err.reason == "expired":
                self._say(f"guard: no shadow under {watch.policy.name}: {err}")
            weighed = None
        if weighed is None:
            self._store.ledgers.dropped(watch.ledger)
            return
        self._store.ledgers.note(watch.ledger, weighed)
        if watch.raw is None or watch.raw.first is None:  # nothing was heard of its answer
            return
        try:
            again = rerun(self._model, self._store, watch, self._alone, self._check)
        except (Interrupted, PrefixLost, StoreMismatch, Unsupported):
            return
        except Exception:  # the shadow itself has been noted
            log.exception("guard: a request could not be run again")
            return
        self._store.ledgers.note_rerun(watch.ledger, again)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The model's turn, and the model that answered. Raises Interrupted, StoreMismatch."""
        with self._turn.audit():
            self._same()
            yield
            self._same()

    def _pause(self) -> None:
        if self._is_ending:
            raise Interrupted
        self._turn.wait()

    def _check(self) -> None:
        if self._is_ending:
            raise Interrupted
        self._turn.check()


@torch.no_grad()
def weigh(watch: Watch, n_layers: int, pause: Callable[[], None]) -> Weighed | None:
    """The worst layer's true mass and how well it was estimated; None where a layer was not seen,
    and where all are taken whole: nothing was chosen, which is no evidence.

    Raises PrefixLost, and what the policy's identifier raises.
    """
    masses = []
    session = ShadowSession(watch.lease, watch.policy)
    with session:
        for layer in range(n_layers):
            pause()
            seen, keys = watch.layer(layer)
            if seen is None:
                return None
            if (weighed := session.weigh(layer, seen, keys)) is not None:
                masses.append(weighed)
    if not masses:
        return None
    true, estimates = torch.tensor(masses, dtype=torch.float64).unbind(1)
    worst = true.amax()  # nan where one is
    return Weighed(float(worst), float(worst - (true - estimates).amax()))


@torch.no_grad()
def rerun(
    model: Any, store: PrefixStore, watch: Watch, alone: Callable[[], AbstractContextManager[None]],
    check: Callable[[], None],
) -> Rerun:  # fmt: skip
    """A sparse request's answer against what the model says over every row of the prefix.

    One forward over the tokens that were generated, up to MOST_COMPARED: a flip is a token where
    the likeliest is another. `alone`: the model's turn. `check` is called before each layer, when
    it is read and when it is computed, and may raise. Raises PrefixLost, and what those do.
    """
    raw, sequences = watch.raw, watch.sequences
    assert raw is not None and raw.first is not None and sequences is not None
    n = min(len(raw.tops), sequences.shape[1] - watch.n_prompt)
    n_tokens = watch.n_prompt + n - 1
    with alone():  # during a request its attention is another, and nothing is read
        contiguous = model.config._attn_implementation == "eager"
    prefix = StoredPrefix([watch.lease])
    cache = RowsCache(
        store.geometry, 1, n_tokens, store.buffers, n_prefix=prefix.n_tokens,
        contiguous=contiguous, on_host=model.device.type == "cpu",
    )  # fmt: skip
    with ExitStack() as undo:
        undo.callback(cache.release)
        undo.callback(end_reads, prefix, cache)
        prefix.open(Exact(), RerunSession)
        cache.load(prefix)
        for layer, rows in enumerate(cache.layers):
            check()
            prefix.wait(layer)
            rows.wait = check  # its rows are there: all that its turn waits for is the model
        with alone(), undo.pop_all():  # the next request finds the device's memory free
            ids = sequences[:, :n_tokens].to(model.device)  # prompts may be on the host
            made = model(
                ids[:, prefix.n_tokens :], attention_mask=torch.ones_like(ids),
                logits_to_keep=n, **{CACHE: cache},
            )  # fmt: skip
            logits = made.logits[0]
    exact, sparse = (row.double().log_softmax(-1) for row in (logits[0], raw.first))
    kl = float((exact.exp() * (exact - sparse)).nansum())
    flips = sum(a != b for a, b in zip(logits.argmax(-1).tolist(), raw.tops[:n], strict=True))
    return Rerun(max(kl, 0.0), flips, n)


class Shared:
    """Calls `last` when it has been called n times: the last of n users gives something back."""

    def __init__(self, n: int, last: Callable[[], None]) -> None:
        self._left = n
        self._last = last
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            left = self._left
        if left == 0:
            self._last()
