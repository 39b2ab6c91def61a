"""Calls by a signal handler or a finalizer, in the middle of another call on the same thread.

The moment at which they come is chosen here by having one call make them, under a lock.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import SMALL, assert_serves, prompt, put_prompt

import impress
from impress.tree.catalog import Catalog
from impress.write import env

Open = Callable[..., impress.PrefixStore]
TOKENS = prompt(256, 1)
CALLS: dict[str, Callable[[impress.PrefixStore], object]] = {
    "close": lambda store: store.close(),
    "stats": lambda store: store.stats(),
    "flush": lambda store: store.flush(),
    "evict": lambda store: store.evict(1),
    "follow": lambda store: store.follow(),
}


class Struck(dict[str, int]):
    """Counts under their lock; a signal comes as one is changed."""

    def __setitem__(self, name: str, n: int) -> None:
        super().__setitem__(name, n)
        signal.raise_signal(signal.SIGUSR1)


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Has SIGUSR1 make a call."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda call: signal.signal(signal.SIGUSR1, lambda *_: call()) and None
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("where", ["queue", "catalog", "counters"])
@pytest.mark.parametrize("what", CALLS)
def test_a_handlers_call_in_the_middle_of_another_is_refused(
    open_store: Open, geometry: impress.Geometry, where: str, what: str,
    on_signal: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It waited for a lock that its own thread held: a SIGTERM handler that closed the store, or a
    SIGUSR1 handler that asked for its counters, hung for good."""
    store = open_store(geometry, dram_bytes=0)
    assert put_prompt(store, TOKENS, wait_s=60).wait(60)
    on_signal(lambda: CALLS[what](store))

    def struck(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                signal.raise_signal(signal.SIGUSR1)
            return real(*args)

        return call

    said = f"{what}: called in the middle of another call of this store, on its thread"
    with monkeypatch.context() as patched, pytest.raises(impress.ImpressError, match=said):
        if where == "queue":
            patched.setattr(threading.Condition, "notify", struck(threading.Condition.notify))
        elif where == "catalog":
            patched.setattr(Catalog, "_record", struck(Catalog._record))
        else:
            patched.setattr(store.counters, "_counts", Struck())
        with store.lease(TOKENS) as lease, lease.session() as session:
            session.retrieve(0, None)
    assert_serves(store, TOKENS, 256)
    store.check()
    store.close()
    assert_serves(open_store(geometry), TOKENS, 256)


@pytest.mark.parametrize("begun", ["a put", "a flush", "a close"])
def test_a_handlers_close_is_refused_in_whatever_call(
    open_store: Open, geometry: impress.Geometry, begun: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In a close it returned at once, as if the store were closed: what was queued was lost."""
    store = open_store(geometry)
    armed = [1]
    real = threading.Condition.notify_all

    def notify_all(self: threading.Condition) -> None:
        if armed and threading.current_thread() is threading.main_thread():
            armed.clear()
            store.close()
        real(self)

    writer = store.writer(TOKENS)
    with (
        monkeypatch.context() as patched,
        pytest.raises(impress.ImpressError, match=r"^close: called in"),
    ):
        patched.setattr(threading.Condition, "notify_all", notify_all)
        if begun == "a put":
            writer.close(keep=False)
        elif begun == "a flush":
            store.flush(60)
        else:
            store.close()
    assert not armed
    writer.close(keep=False)
    assert store.stats()["spans"] == 0
    store.close()
    assert_serves(open_store(geometry), TOKENS, 0)


class Service:
    """Closes its store as it is collected; only the collector finds it."""

    def __init__(self, store: impress.PrefixStore) -> None:
        self.store, self.me = store, self

    def __del__(self) -> None:
        self.store.close()


@pytest.mark.parametrize("same", [False, True], ids=["another directory", "the same"])
def test_a_finalizer_may_close_a_store_while_another_is_opened(
    open_store: Open, geometry: impress.Geometry, same: bool, tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Both took the lock of this process's open indexes, on one thread: the open never returned."""
    where, config = tmp_path / ("store" if same else "other"), impress.Config(**SMALL)
    first = impress.PrefixStore.open(where, geometry, "test", config)
    assert put_prompt(first, TOKENS, wait_s=60).wait(60)
    gc.disable()
    try:
        Service(first)
        real, n_looks = env.inode_of, list[int]()

        def inode_of(folder: Any) -> int:
            n_looks.append(gc.collect())
            return real(folder)

        with monkeypatch.context() as patched:
            patched.setattr(env, "inode_of", inode_of)
            second = open_store(geometry)
    finally:
        gc.enable()
    assert n_looks and first._closed
    assert_serves(second, TOKENS, 256 if same else 0)
    second.check()


def test_a_finalizer_may_close_a_store_in_a_call_of_another(
    open_store: Open, geometry: impress.Geometry, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of another store holds none of its locks: refused, it would stay open for good."""
    store, config = open_store(geometry, dram_bytes=0), impress.Config(**SMALL)
    other = impress.PrefixStore.open(tmp_path / "other", geometry, "test", config)
    assert put_prompt(store, TOKENS, wait_s=60).wait(60)
    real, left = threading.Condition.notify, [other]

    def notify(self: threading.Condition, n: int = 1) -> None:
        if left and threading.current_thread() is threading.main_thread():
            left.pop().close()
        real(self, n)

    with store.lease(TOKENS) as lease, lease.session() as session:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Condition, "notify", notify)
            session.retrieve(0, None)
    assert other._closed
