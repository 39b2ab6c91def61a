"""The scheduler's view of a store that other processes write: at most one look behind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import SMALL, prompt, put_prompt, soon

import impress
from impress.engines.vllm import shared
from impress.engines.vllm.shared import View, acquire, opened, release
from impress.errors import FormatError, StoreFailed, StoreMismatch
from impress.write.home import Home
from impress.write.readers import present

Open = Callable[..., impress.PrefixStore]
NAMESPACE = b"n" * 32
#: The view looks only when asked to, or by itself.
WHEN_ASKED = impress.Config(**SMALL, follow_every_s=0)
BY_ITSELF = impress.Config(**SMALL, follow_every_s=0.01)


def view_of(store: impress.PrefixStore, config: impress.Config) -> View:
    return View(store.path, store.geometry, NAMESPACE, config)


@pytest.fixture
def writer(open_store: Open, geometry: impress.Geometry) -> impress.PrefixStore:
    store = open_store(geometry, namespace=NAMESPACE, repack_every_s=0)
    put_prompt(store, prompt(128, 1)).wait(60)
    return store


def test_what_was_stored_before_is_seen_at_once(writer: impress.PrefixStore) -> None:
    view = view_of(writer, WHEN_ASKED)
    assert not view.shared
    assert view.lookup(prompt(128, 1), {}, "") == 128
    view.close()


def test_a_refresh_brings_what_came_and_takes_what_went(writer: impress.PrefixStore) -> None:
    view = view_of(writer, WHEN_ASKED)
    put_prompt(writer, prompt(128, 2)).wait(60)
    assert view.lookup(prompt(128, 2), {}, "") == 0
    view.refresh()
    assert soon(lambda: view.current)
    assert view.lookup(prompt(128, 2), {}, "") == 128
    writer.evict(1 << 40)
    view.refresh()
    assert soon(lambda: view.current)
    assert view.lookup(prompt(128, 1), {}, "") == view.lookup(prompt(128, 2), {}, "") == 0
    view.close()


def test_what_another_server_stores_is_seen_without_being_told(
    writer: impress.PrefixStore, open_store: Open
) -> None:
    """It used to show when the server's own worker next reported something: maybe never."""
    view = view_of(writer, BY_ITSELF)
    other = open_store(writer.geometry, namespace=NAMESPACE, repack_every_s=0)
    put_prompt(other, prompt(128, 3)).wait(60)
    assert soon(lambda: view.lookup(prompt(128, 3), {}, "") == 128)
    view.close()


def test_a_directory_without_a_store_has_no_hits_until_it_is_one(
    tmp_path: Path, geometry: impress.Geometry
) -> None:
    view = View(tmp_path / "later", geometry, NAMESPACE, WHEN_ASKED)
    assert view.lookup(prompt(128, 1), {}, "") == 0
    with impress.PrefixStore.open(tmp_path / "later", geometry, NAMESPACE) as store:
        put_prompt(store, prompt(128, 1)).wait(60)
        view.refresh()
        assert soon(lambda: view.current)
        assert view.lookup(prompt(128, 1), {}, "") == 128
    view.close()


def test_a_look_that_fails_is_not_the_last(
    writer: impress.PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any error that this package does not raise itself ended the view's thread: the scheduler no
    longer saw what was stored."""
    view = view_of(writer, WHEN_ASKED)
    put_prompt(writer, prompt(128, 2)).wait(60)
    follow, left = impress.PrefixStore.follow, [1]

    def fails_once(store: impress.PrefixStore) -> bool:
        if left:
            left.pop()
            raise MemoryError
        return follow(store)

    monkeypatch.setattr(impress.PrefixStore, "follow", fails_once)
    for _ in range(2):
        view.refresh()
        assert soon(lambda: view.current)
    assert view.lookup(prompt(128, 2), {}, "") == 128
    view.close()


def test_a_view_without_its_thread_is_one_line_and_no_reader(
    writer: impress.PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a RuntimeError, and the store it had opened stayed open: to the writer, a reader."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "impress-view":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(StoreFailed, match="no more threads can be started: raise `ulimit -u`"):
        view_of(writer, WHEN_ASKED)
    assert present(writer.path / "shards" / "main" / "readers") == []


def test_the_writer_waits_for_no_view_that_is_closed(writer: impress.PrefixStore) -> None:
    """Space is reused once no reader can be reading it: a view counts as one while it is open."""
    readers = writer.path / "shards" / "main" / "readers"
    view = view_of(writer, WHEN_ASKED)
    assert len(present(readers)) == 1
    view.close()
    view.close()
    assert present(readers) == []
    assert view.lookup(prompt(128, 1), {}, "") == 128  # what it knew is in memory


@pytest.mark.parametrize("other", ["another model's files", "another shape"])
def test_another_model_is_not_given_the_store_of_the_first(
    tmp_path: Path, geometry: impress.Geometry, other: str
) -> None:
    """The store was found by its path alone: a process's second model was served the first's KV."""
    model = (geometry, NAMESPACE)
    if other == "another shape":
        second = (replace(geometry, n_layers=geometry.n_layers + 1), NAMESPACE)
    else:
        second = (geometry, b"m" * 32)
    where = tmp_path / "shared"
    store = acquire(where, *model, lambda: impress.PrefixStore.open(where, *model, WHEN_ASKED))
    assert store is not None
    assert acquire(where, *model, None) is store
    release(where)
    for ask in (lambda: acquire(where, *second, None), lambda: View(where, *second, WHEN_ASKED)):
        with pytest.raises(StoreMismatch, match=r"shut that engine down first.*directory of its"):
            ask()
    put_prompt(store, prompt(128, 1)).wait(60)
    release(where)  # the first model's only use is over: the refused calls hold nothing
    assert acquire(where, *second, None) is None


def test_a_release_after_all_was_closed_is_nothing(
    tmp_path: Path, geometry: impress.Geometry
) -> None:
    """At the end of a process vLLM releases stores that were closed before: that was a KeyError."""
    model = (geometry, NAMESPACE)
    where = tmp_path / "shared"
    opened = impress.PrefixStore.open(where, *model, WHEN_ASKED)
    assert acquire(where, *model, lambda: opened) is opened
    view = View(where, *model, WHEN_ASKED)
    shared._close_all()
    view.close()
    release(where)
    assert acquire(where, *model, None) is None


def test_a_store_whose_close_ctrl_c_cut_off_is_closed_by_the_next_engine(
    tmp_path: Path, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing kept track of it any more: where its shard was named, the process's next engine was
    told that the shard is locked, and what was queued was lost at exit."""
    config = impress.Config(**SMALL, shard=0)

    def opener() -> impress.PrefixStore:
        return impress.PrefixStore.open(tmp_path / "s", geometry, NAMESPACE, config)

    first = acquire(tmp_path / "s", geometry, NAMESPACE, opener)
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(Home, "settle", Mock(side_effect=KeyboardInterrupt))
        release(tmp_path / "s")
    second = acquire(tmp_path / "s", geometry, NAMESPACE, opener)
    assert second is not None and second is not first and not shared._closing
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(Home, "settle", Mock(side_effect=KeyboardInterrupt))
        release(tmp_path / "s")
    shared._close_all()  # as at exit
    opener().close()


def test_a_server_that_only_reads_says_what_to_start_first(
    tmp_path: Path, geometry: impress.Geometry
) -> None:
    """It said to name the store by --store or IMPRESS_STORE, which vLLM does not have."""
    model, where, file = (geometry, NAMESPACE, WHEN_ASKED), tmp_path / "later", tmp_path / "file"
    with pytest.raises(FormatError) as refused:
        opened(where, *model, store_new=False)
    said = str(refused.value)
    assert "start the server that writes first" in said and "IMPRESS_STORE" not in said
    assert "kv_connector_extra_config.store" in said and not where.exists()
    with opened(where, *model, store_new=True) as store:
        put_prompt(store, prompt(128, 1)).wait(60)
    with opened(where, *model, store_new=False) as reader:
        assert reader.lookup(prompt(128, 1)) == 128 and not reader.writable
    (where / "impress.json").unlink()  # other faults are reported as they are
    file.touch()
    for path, wrong in ((where, "impress rebuild"), (file, "not a directory")):
        with pytest.raises(FormatError, match=wrong):
            opened(path, *model, store_new=False)


def test_a_port_of_metrics_that_was_left_to_choose_is_told(
    tmp_path: Path, geometry: impress.Geometry, caplog: pytest.LogCaptureFixture
) -> None:
    """With --data-parallel-size 2 the first rank takes a fixed port, and the port chosen for 0 was
    told nowhere. (vLLM sets up only its own loggers: from others, Python shows warnings.)"""
    free = WHEN_ASKED.model_copy(update={"metrics_port": 0})
    model = (tmp_path / "s", geometry, NAMESPACE, free)
    with opened(*model, store_new=True) as one, opened(*model, store_new=True) as two:
        said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        said = [line for line in said if "metrics at" in line]
        assert len(said) == 2 and one.metrics_port != two.metrics_port
        for line, store in zip(said, (one, two), strict=True):
            assert line.endswith(f"metrics at http://127.0.0.1:{store.metrics_port}/metrics")
