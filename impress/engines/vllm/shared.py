"""This process's stores, one per directory: vLLM's two sides may live in one process or two.

A store here serves one model, though a directory may hold more: another model needs its own.

one process     the worker's store is the scheduler's too: what was stored is found at once
two processes   the scheduler has a reader of its own (mode "r"), which follows every shard's log
                in the background, and at once when the worker says that something was stored or
                lost; what it does not know yet makes misses and load errors, never a wrong answer
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from impress.blockhash import namespace_digest
from impress.config import Config
from impress.errors import FormatError, ImpressError, StoreFailed, StoreMismatch
from impress.store import PrefixStore
from impress.types import Geometry
from impress.write.directory import IDENTITY, shards_of
from tiers.errors import MediumError
from tiers.threads import Worker

log = logging.getLogger("impress")

Opener = Callable[[], PrefixStore]

_stores: dict[Path, tuple[PrefixStore, int]] = {}
_closing: list[PrefixStore] = []  # and those whose closing Ctrl-C cut off
_lock = threading.Lock()
_ending = threading.RLock()  # `close` returns at once to whoever comes while another is at it


def opened(
    path: Path, geometry: Geometry, namespace: bytes, config: Config, *, store_new: bool
) -> PrefixStore:
    """A worker's store of a directory, for writing or read-only. Raises what `PrefixStore.open`
    does; if there is nothing to read yet, its message says what to tell vLLM.

    Effects: logs the metrics port, if the choice was left to the store.
    """
    try:
        store = PrefixStore.open(path, geometry, namespace, config, "rw" if store_new else "r")
    except FormatError:
        if store_new or path.is_file() or (path / IDENTITY).exists() or shards_of(path):
            raise
        raise FormatError(
            f'{path}: nothing is stored here yet, and "store_new": false stores nothing: start the '
            "server that writes first, or mend kv_connector_extra_config.store"
        ) from None
    if config.metrics_port == 0:  # a warning: from loggers not its own vLLM shows no less
        log.warning("%s: metrics at http://127.0.0.1:%d/metrics", path, store.metrics_port)
    return store


def acquire(
    path: Path, geometry: Geometry, namespace: bytes, opener: Opener | None
) -> PrefixStore | None:
    """This process's store of a directory, opened if need be; None if there is none to share.

    Every acquire needs a release. Raises StoreMismatch if the store is another model's, and what
    `opener` does.
    """
    where = path.resolve()
    for left in [store for store in _closing if store.path.resolve() == where]:
        _end(left)
    with _lock:
        store, users = _stores.get(where, (None, 0))
        if store is None:
            if opener is None:
                return None
            store = opener()
        elif (store.geometry, store.namespace) != (geometry, namespace_digest(namespace)):
            raise StoreMismatch(
                f"{path}: this process serves another model from it: shut that engine down first "
                "(llm.llm_engine.engine_core.shutdown()), or give this one a directory of its own"
            )
        _stores[where] = (store, users + 1)
        return store


def release(path: Path) -> None:
    """The last release closes the store: what is queued is finished first.

    Does nothing if no store is held: at the end of a process vLLM shuts down after `_close_all`.
    """
    where = path.resolve()
    with _lock:
        store, users = _stores.get(where, (None, 0))
        if store is None:
            return
        if users > 1:
            _stores[where] = (store, users - 1)
            return
        _closing[:] = [*_closing, store]
        del _stores[where]  # no signal comes between
    _end(store)


def _end(store: PrefixStore) -> None:
    """Close a store; if that is cut off, the next call finishes it."""
    with _ending:
        store.close()
    with _lock, suppress(ValueError):  # another thread removed it
        _closing.remove(store)


@atexit.register
def _close_all() -> None:
    """A process that ends without shutting vLLM down still finishes its stores.

    Savers have ended by then: they are registered later, and the last registered is called first.
    """
    with _lock:
        left = [*(store for store, _ in _stores.values()), *_closing]
        _stores.clear()
    for store in left:
        try:
            _end(store)
        except Exception:  # the others must be closed as well
            log.exception("a store could not be closed")


class View:
    """What is stored, for the scheduler: lookups in memory only, never I/O on the caller's thread.

    For one thread. `refresh` returns at once.
    """

    def __init__(self, path: Path, geometry: Geometry, namespace: bytes, config: Config) -> None:
        self._path = path
        self._open = (geometry, namespace, config)
        self._shared = acquire(path, geometry, namespace, None)
        self._own: PrefixStore | None = None  # once something is stored
        self._asked = threading.Event()
        self._n_asked = self._n_renewed = 0  # refreshes
        self._closed = False
        self._thread: Worker | None = None
        if self._shared is None:
            self._renew()
            thread = Worker(self._work, "impress-view")
            try:
                thread.start()
            except MediumError as err:
                self.close()
                raise StoreFailed(str(err)) from None
            self._thread = thread  # last: `close` joins it

    @property
    def shared(self) -> bool:
        """Whether it is the worker's own store."""
        return self._shared is not None

    @property
    def current(self) -> bool:
        """Whether every refresh that was asked for has happened."""
        return self.shared or self._n_renewed == self._n_asked

    def lookup(self, tokens: Any, extra: Mapping[int, bytes], tenant: str) -> int:
        """Tokens of this prompt that are stored, in whole windows; 0 if nothing can be seen."""
        store = self._shared or self._own
        return store.lookup(tokens, extra, tenant) if store is not None else 0

    def refresh(self) -> None:
        """Something was stored or lost: look at once, in the background. Returns at once."""
        self._n_asked += 1
        self._asked.set()

    def close(self) -> None:
        """Idempotent, even if a call was cut off."""
        is_first, self._closed = not self._closed, True
        if is_first and self._shared is not None:
            release(self._path)
        if self._thread is not None:
            self._asked.set()
            self._thread.ended(-1)
        if self._own is not None:
            self._own.close()

    def _work(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            if self._closed:
                return
            asked = self._n_asked
            self._renew()
            self._n_renewed = asked

    def _renew(self) -> None:
        """Take over what has changed. Never raises: a view that lags behind makes misses."""
        try:
            if self._own is None:
                self._own = self._opened()
            else:
                self._own.follow()
        except FormatError:
            return  # nothing has been stored here yet
        except ImpressError as err:
            log.warning("%s: the scheduler's view is not renewed: %s", self._path, err)
        except Exception:  # no memory, a bug: the next refresh tries again
            log.exception("%s: the scheduler's view is not renewed", self._path)

    def _opened(self) -> PrefixStore:
        geometry, namespace, config = self._open
        small = config.model_copy(
            update={"dram_bytes": 0, "hbm_bytes": 0, "io_threads": 1, "metrics_port": None}
        )
        return PrefixStore.open(self._path, geometry, namespace, small, mode="r")
