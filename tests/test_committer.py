"""Errors in the committer or on the way to it: whoever waits is told, and nothing leaks."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import assert_serves, kv_of, look, prompt, put_prompt, soon, wait_for_promotions

import impress
from impress.errors import StoreFailed
from impress.policy import Quality
from impress.write import admission, writer
from impress.write.commit import Committer
from impress.write.headers import Headers
from impress.write.index import Index
from impress.write.jobs import Batch, Intent, SwapJob, Swapped, Trial
from tiers.base import PAGE
from tiers.ticket import Signal

Open = Callable[..., impress.PrefixStore]


def no_memory(*_args: Any, **_options: Any) -> Any:
    raise MemoryError


@contextlib.contextmanager
def one_batch(store: impress.PrefixStore) -> Iterator[Committer]:
    """The committer is held meanwhile, and takes up all that it is given as one batch."""
    held, go = threading.Event(), threading.Event()
    committer = store._home.committer
    assert committer is not None
    deal_with = committer._batches.deal_with

    def waits(batch: Any) -> None:
        held.set()
        assert go.wait(60)
        deal_with(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(committer._batches, "deal_with", waits)
        committer._put(Signal())
        assert held.wait(60)
    try:
        yield committer
    finally:
        go.set()


def two_together(store: impress.PrefixStore) -> tuple[impress.Stored, impress.Stored]:
    """Stores that the committer takes up as one batch."""
    with one_batch(store):
        return put_prompt(store, prompt(64, 1)), put_prompt(store, prompt(64, 2))


def two_of_the_same(store: impress.PrefixStore) -> list[writer.Writer]:
    """Two writers, each with all rows of the same prompt: what one stores, the other has, too."""
    writers = [store.writer(prompt(64, 1)).__enter__() for _ in range(2)]
    for begun in writers:
        for layer in range(store.geometry.n_layers):
            begun.put(layer, 0, *(rows[layer] for rows in kv_of(prompt(64, 1), store.geometry)))
    return writers


def nothing_is_back(store: impress.PrefixStore, open_store: Open) -> None:
    """After a purge, the next open brings nothing back."""
    geometry = store.geometry
    store.close()
    again = open_store(geometry)
    assert again.ssd.usage().used == 0
    sound(again, [])


def sound(store: impress.PrefixStore, seeds: list[int]) -> None:
    """What was READY is served, what is stored now becomes READY, and all space has an owner."""
    assert store._home.committer is not None
    store._home.committer.take_failure()
    put_prompt(store, prompt(64, 9)).wait(60)
    store.flush()
    for seed in (1, 2, 9):
        assert_serves(store, prompt(64, seed), 64 if seed in (*seeds, 9) else 0)
    assert store.write_buffers.used_bytes == 0
    store.check()


def test_who_stores_together_with_one_that_fails_is_stored(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A MemoryError at one header lost the whole batch: a wait without a limit never ended."""
    store = open_store(geometry)
    write, calls = Headers.write, []

    def once(self: Headers, *args: Any) -> None:
        calls.append(1)
        no_memory() if len(calls) == 1 else write(self, *args)

    monkeypatch.setattr(Headers, "write", once)
    failed, ready = two_together(store)
    with pytest.raises(StoreFailed, match="MemoryError"):
        failed.wait(60)
    assert ready.wait(60)
    sound(store, [2])


def test_who_stores_together_with_one_that_a_failed_sync_may_have_lost_is_stored(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """A store begun after the failed sync lost nothing by it: it does not fail with those begun
    before."""
    store = open_store(geometry)
    with one_batch(store):
        early = put_prompt(store, prompt(64, 1))
        store.ssd.sync_failures += 1
        late = put_prompt(store, prompt(64, 2))
    with pytest.raises(StoreFailed, match="lost writes"):
        early.wait(60)
    assert late.wait(60)
    sound(store, [2])


def test_what_fails_behind_a_header_gives_no_space_back_twice(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a header did not need was freed before the record said so, and then freed once more."""
    store = open_store(geometry)
    with monkeypatch.context() as patch:
        patch.setattr("impress.write.headers.replace", no_memory)
        with pytest.raises(StoreFailed, match="MemoryError"):
            put_prompt(store, prompt(640, 1)).wait(60)  # its header needs two pages less
    store.check()
    assert store.ssd.usage().used == 0
    sound(store, [])


def test_a_transaction_without_memory_fails_its_stores_and_gives_their_space_back(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(geometry)
    with monkeypatch.context() as patch:
        patch.setattr(Index, "commit", no_memory)
        stored = two_together(store)
        for one in stored:
            with pytest.raises(StoreFailed, match="MemoryError"):
                one.wait(60)
    sound(store, [])


def test_a_failure_behind_the_transaction_is_told_to_all_and_takes_no_space_from_a_span(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then the index names these spans: giving their space to others would make two owners. They
    were in no tree, so a purge did not find them, and they were back with the next open."""
    store = open_store(geometry)
    assert store._home.committer is not None
    with monkeypatch.context() as patch:
        patch.setattr(store.catalog, "publish", no_memory)
        stored = two_together(store)
        for one in stored:
            with pytest.raises(StoreFailed, match="the committer failed: MemoryError"):
                one.wait(60)
    put_prompt(store, prompt(64, 9)).wait(60)
    assert_serves(store, prompt(64, 9), 64)
    assert store.purge() == (1, 0)
    assert store.ssd.usage().used == 0  # that of the spans no tree shows is free, too
    nothing_is_back(store, open_store)


def test_a_copy_that_the_tree_does_not_show_is_not_back_after_a_purge(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index named the copy, the tree its original, and a purge took out only the latter."""
    store = open_store(geometry)
    put_prompt(store, prompt(256, 1)).wait(60)
    look(store, prompt(256, 1))
    with monkeypatch.context() as patch:
        patch.setattr(store.catalog, "replace", no_memory)
        assert [span.outcome for span in store.repack().spans] == ["failed"]
    store.purge()
    assert store.ssd.usage().used == 0
    with pytest.raises(StoreFailed, match="MemoryError"):
        store.flush()
    nothing_is_back(store, open_store)


def test_what_a_copy_that_is_not_shown_was_made_of_is_given_up_too(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree went on showing the original, which the index no longer named: it was served, so not
    stored again, and gone with the next open, with all that had been stored after it."""
    store = open_store(geometry)
    for n in (256, 512):
        put_prompt(store, prompt(n, 1)).wait(60)
    look(store, prompt(256, 1))
    with monkeypatch.context() as patch:
        patch.setattr(store.catalog, "replace", no_memory)
        assert "failed" in [span.outcome for span in store.repack().spans]
    with pytest.raises(StoreFailed, match="MemoryError"):
        store.flush()
    store.flush()
    shown = {record.span_id for record in store.catalog.records()}
    assert shown == {span for span, _ in store.index.spans()}
    put_prompt(store, prompt(512, 1)).wait(60)
    store.close()
    again = open_store(geometry)
    assert_serves(again, prompt(512, 1), 512)
    again.check()


def test_what_another_was_before_is_not_back_after_an_error_and_a_purge(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index named the later copy, no tree showed it, and it was crossed off as dealt with: a
    purge took out the other one, and with the next open the prompt was served again."""
    store = open_store(geometry)
    committer = store._home.committer
    assert committer is not None
    writers = two_of_the_same(store)
    with monkeypatch.context() as patch:
        commit = committer._batches._commit

        def only_the_first(batch: Batch) -> None:
            commit(batch) if batch.stores else no_memory()

        patch.setattr(committer._batches, "_commit", only_the_first)
        with one_batch(store):
            for begun in writers:
                begun.__exit__(None, None, None)
        assert committer.barrier(60)
    assert sum(begun.stored.ready for begun in writers) == 2
    assert len([*store.index.spans()]) == 2
    store.purge()
    nothing_is_back(store, open_store)


def test_a_span_that_left_the_tree_and_was_told_to_nobody_goes_with_a_purge(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error came between its leaving the tree and its deletion."""
    store = open_store(geometry)
    put_prompt(store, prompt(64, 1)).wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(store._home.leaving, "_counters", SimpleNamespace(add=no_memory))
        with pytest.raises(MemoryError):
            store._home.leaving._take_out(1)
    assert_serves(store, prompt(64, 1), 0)
    store.purge()
    nothing_is_back(store, open_store)


def test_a_store_whose_end_fails_is_its_own_error(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores after it in the batch were not published, and were told an error not their own."""
    store = open_store(geometry)
    done, calls = admission.Admission._done, []

    def fails_once(*args: Any) -> None:
        done(*args)
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError

    monkeypatch.setattr(admission.Admission, "_done", fails_once)
    assert all(stored.wait(60) for stored in two_together(store))
    sound(store, [1, 2])


def test_no_memory_even_to_say_so_leaves_nobody_waiting_and_forgets_nothing(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error's message is made where memory is short, or a handler of the log fails: this second
    error ended the batch, its stores were waited for without end, and a purge passed for done."""
    store = open_store(geometry)
    put_prompt(store, prompt(64, 3)).wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(Index, "commit", no_memory)
        patch.setattr("impress.write.swap.log.error", no_memory)
        for stored in two_together(store):
            with pytest.raises(StoreFailed, match="could not say of what"):
                stored.wait(60)
        with pytest.raises(StoreFailed, match="not purged"):
            store.purge()
    store.purge()
    nothing_is_back(store, open_store)


def test_what_cannot_even_be_told_is_deleted_with_the_next_turn(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no memory to note the error for the next flush, either: deletes that failed are
    kept, or evicted spans would be back with the next open."""
    store = open_store(geometry)
    put_prompt(store, prompt(64, 1)).wait(60)
    committer = store._home.committer
    with monkeypatch.context() as patch:
        patch.setattr(Index, "commit", no_memory)
        patch.setattr(committer._batches, "_fail", no_memory)
        assert store.evict(1) == 0
    assert committer.undone
    put_prompt(store, prompt(64, 2)).wait(60)
    assert not committer.undone
    assert len([*store.index.spans()]) == 1
    sound(store, [2])


def test_an_error_before_the_transaction_is_told_and_forgets_no_delete(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for a store is told, and what left the tree is not back with the next open."""
    store = open_store(geometry)
    put_prompt(store, prompt(64, 1)).wait(60)
    committer = store._home.committer
    with monkeypatch.context() as patch:
        patch.setattr(store.catalog, "bare_roots", no_memory)
        with pytest.raises(StoreFailed, match="the committer failed"):
            put_prompt(store, prompt(64, 2)).wait(60)
        assert store.evict(1) == 0
        assert committer.undone
    store.close()
    again = open_store(geometry)
    assert_serves(again, prompt(64, 1), 0)
    assert_serves(again, prompt(64, 2), 0)
    put_prompt(again, prompt(64, 2)).wait(60)
    sound(again, [2])


def test_what_cannot_be_taken_back_yet_keeps_no_other_delete(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(geometry)
    put_prompt(store, prompt(64, 1)).wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(Index, "commit", no_memory)
        assert store.evict(1) == 0
    with monkeypatch.context() as patch:
        patch.setattr(store.catalog, "publish", no_memory)
        patch.setattr(store.catalog, "quarantine", no_memory)
        with pytest.raises(StoreFailed, match="the committer failed"):
            put_prompt(store, prompt(64, 2)).wait(60)
        with pytest.raises(StoreFailed):
            store.flush()
        assert len([*store.index.spans()]) == 1  # what cannot be taken back
        assert "an error came before" in store._home.committer.undone
    sound(store, [])
    assert not store._home.committer.undone


def test_a_close_saves_what_it_can(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the committer's last reclaiming ended its thread before the last transaction."""
    store = open_store(geometry)
    put_prompt(store, prompt(64, 1)).wait(60)
    assert_serves(store, prompt(64, 1), 64)
    committer = store._home.committer
    assert committer is not None
    with monkeypatch.context() as patch:
        patch.setattr(committer, "_settle", no_memory)
        committer.close(60)
    assert committer.ended
    assert [hits for hits, _ in store.index.heat().values()] == [1]
    store.close()


def test_until_what_no_tree_shows_is_out_of_the_index_a_purge_fails(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(geometry)
    with monkeypatch.context() as patch:
        patch.setattr(store.catalog, "publish", no_memory)
        patch.setattr(store.catalog, "quarantine", no_memory)
        with pytest.raises(StoreFailed, match="the committer failed"):
            put_prompt(store, prompt(64, 1)).wait(60)
        with pytest.raises(StoreFailed, match="not purged: an error came before"):
            store.purge()
    store.purge()
    store.close()
    sound(open_store(geometry), [])


def test_an_error_in_one_job_of_a_batch_leaves_nobody_of_the_others_waiting(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jobs after it were forgotten: a repacker waited for minutes, and space had no owner."""
    store = open_store(geometry)
    assert store._home.committer is not None
    put_prompt(store, prompt(64, 3)).wait(60)
    (record,) = store.catalog.records()
    slots = [store.ssd.reserve(PAGE) for _ in range(3)]
    copy = replace(
        record, span_id=record.span_id + 50, parts=slots[0].parts, meta=slots[1].parts[0]
    )
    outcomes: list[Swapped] = []
    swap = SwapJob(
        record.span_id + 1, SimpleNamespace(record=copy), outcomes.append, 0,
        store.ssd.sync_failures,
    )  # fmt: skip
    intent, trial = Intent(replace(copy, span_id=copy.span_id + 1)), Trial(slots[2])
    refused = store.writer(prompt(64, 2)).__enter__()
    refused.put(0, 0, *(rows[0] for rows in kv_of(prompt(64, 2), geometry)))
    with monkeypatch.context() as patch:
        patch.setattr(store._home.committer._batches, "_counters", SimpleNamespace(add=no_memory))
        with one_batch(store) as committer:
            stored = put_prompt(store, prompt(64, 1))
            refused.close(keep=False)
            for job in (swap, intent, trial):
                committer._put(job)
        assert committer.barrier(60)
    assert stored.wait(0)  # nothing that came after it undoes it
    assert outcomes == [Swapped.GONE]
    assert intent.ended.is_set() and trial.ended.is_set() and trial.error is None
    store.evict(1 << 30)
    assert store.ssd.usage().used == 0
    sound(store, [])


def test_a_committer_without_memory_to_draw_a_batch_goes_on_when_there_is_some(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread ended: whoever waited for a store without a limit waited for ever."""
    store = open_store(geometry)
    add, calls = Batch.add, []

    def sometimes(batch: Batch, job: Any) -> None:
        calls.append(job)
        no_memory() if len(calls) % 2 else add(batch, job)

    with monkeypatch.context() as patch:
        patch.setattr(Batch, "add", sometimes)
        for stored in two_together(store):
            assert stored.wait(60)
        store.flush()
    failing = iter([no_memory])

    def made() -> Batch:
        return next(failing, Batch)()

    with monkeypatch.context() as patch:
        patch.setattr("impress.write.commit.Batch", made)
        assert put_prompt(store, prompt(64, 3)).wait(60)
    assert next(failing, None) is None
    sound(store, [1, 2])


def test_a_delete_that_failed_for_want_of_memory_is_made_good(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(geometry)
    put_prompt(store, prompt(64, 1)).wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(Index, "commit", no_memory)
        assert store.evict(1) == 0
        assert "MemoryError" in store._home.committer.undone
    with pytest.raises(StoreFailed, match="MemoryError"):  # told once
        store.flush()
    assert not store._home.committer.undone and store.ssd.usage().used == 0
    sound(store, [])


@pytest.mark.parametrize(("where", "what"), [
    (writer, "pack"), (writer, "_Partial"), (admission, "Draft"), (admission, "Writer"),
])  # fmt: skip
def test_a_store_that_fails_on_its_way_leaves_no_slot_and_no_space_taken(
    where: Any, what: str, open_store: Open, geometry: impress.Geometry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """They were out of the pool, or reserved, with no owner until the process ended."""
    store = open_store(geometry, daily_write_bytes=64 << 20)
    left = store._home.budget.left_bytes
    with monkeypatch.context() as patch:
        patch.setattr(where, what, no_memory)
        with pytest.raises(MemoryError), store.writer(prompt(64, 1)) as begun:
            k, v = (rows[0] for rows in kv_of(prompt(64, 1), geometry))
            n = 20 if what == "_Partial" else 64  # part of a window is gathered first
            begun.put(0, 0, k[:, :n], v[:, :n])
    sound(store, [])
    if where is admission:
        assert store._home.budget.left_bytes >= left - 65 * geometry.token_bytes - 8192


def test_how_often_prefixes_were_leased_outlives_a_kill(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a clean close saved it: what a killed server had found hot was evicted first."""
    store = open_store(geometry)
    for seed in (1, 2):
        put_prompt(store, prompt(64, seed)).wait(60)
    for seed in (1, 1, 2):
        assert_serves(store, prompt(64, seed), 64)
    wait_for_promotions(store)
    store._home.save_history()
    store.flush()
    assert sorted(hits for hits, _ in store.index.heat().values()) == [1, 2]
    saved = store.index.version()
    store._home.save_history()
    store.flush()
    assert store.index.version() == saved  # nothing new, nothing written
    assert_serves(store, prompt(64, 2), 64)
    wait_for_promotions(store)
    heat = list[dict[int, tuple[int, int]]]()
    save = store.index.save_history
    monkeypatch.setattr(store.index, "save_history", lambda *a: (heat.append(a[3]), save(*a))[1])
    store._home.save_history()
    store.flush()
    (warmer,) = heat  # not all that was ever leased: of millions, each few seconds
    assert [hits for hits, _ in warmer.values()] == [2]
    assert [hits for hits, _ in store.index.heat().values()] == [2, 2]


def test_history_that_could_not_be_saved_is_saved_with_the_next(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a full disk did not take counted as saved: the history of a span that was not asked for
    again before the end was lost."""
    store = open_store(geometry)
    put_prompt(store, prompt(64, 1)).wait(60)
    look(store, prompt(64, 1))
    (record,) = store.catalog.records()

    def full(*_args: Any) -> None:
        raise StoreFailed("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Index, "save_history", full)
        store._home.save_history()
        assert store._home.committer is not None and store._home.committer.barrier(60)
        assert store.history.failing
        assert put_prompt(store, prompt(64, 2)).wait(60)  # which needs no room for that
    assert store.index.history(record.span_id) is None and not store.stats()["ssd_read_only"]
    store.history.check()
    store._home.save_history()
    store.flush()
    assert store.index.history(record.span_id) is not None
    store.history.check()


def test_a_ledger_that_cannot_be_written_down_loses_no_history_and_holds_up_no_close(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What requests had shown counted as saved but was not; `close` raised, and its shard stayed
    locked: a single guard_shadows too large for the ledger's format was enough."""
    store = open_store(geometry)
    put_prompt(store, prompt(64, 1)).wait(60)
    look(store, prompt(64, 1))
    (record,) = store.catalog.records()
    store.ledgers.dropped(store.ledgers.open(store.namespace, Quality(), store.config))

    def too_large(_entry: Any) -> bytes:
        return struct.pack("<I", 1 << 32)

    with monkeypatch.context() as patch:
        patch.setattr("impress.quality.ledgers.encode", too_large)
        store._home.save_history()
        with pytest.raises(StoreFailed, match="what requests have shown is not saved"):
            store.flush()
    assert store.index.history(record.span_id) is None
    store.history.check()
    store._home.save_history()
    store.flush()
    assert store.index.history(record.span_id) is not None and store.index.ledgers()
    look(store, prompt(64, 1))
    with monkeypatch.context() as patch:
        patch.setattr("impress.quality.ledgers.encode", too_large)
        store.ledgers.dropped(store.ledgers.open(store.namespace, Quality(), store.config))
        store.close()
    with open_store(geometry, shard=0) as again:
        sound(again, [1])


def test_what_fails_behind_a_give_back_gives_no_space_back_twice(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that another had preceded gave its space back; the step after that failed, and the
    committer gave it back once more: to two owners, had somebody reserved it meanwhile."""
    store = open_store(geometry)
    done = admission.Admission._done
    writers = two_of_the_same(store)
    writers[0].__exit__(None, None, None)
    assert writers[0].stored.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(admission.Admission, "_done", lambda *a: (done(*a), no_memory()))
        writers[1].__exit__(None, None, None)
        with pytest.raises(StoreFailed, match="MemoryError"):
            store.flush()
    store.check()
    sound(store, [1])


def test_a_check_finds_what_is_on_its_way_out_though_its_copies_are_still_going(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until all its copies had gone, a span was out of the catalog and not yet in limbo: its space
    seemed to have no owner."""
    store = open_store(geometry, follow_every_s=0, repack_every_s=0)
    for seed in (1, 2):
        put_prompt(store, prompt(64, seed)).wait(60)
    going, go_on, forget = threading.Event(), threading.Event(), store.history.forget

    def waits(span: int) -> None:
        going.set()
        assert go_on.wait(60)
        forget(span)

    monkeypatch.setattr(store.history, "forget", waits)
    evicting = threading.Thread(target=store.evict, args=(1 << 30,))
    evicting.start()
    try:
        assert going.wait(60)
        assert not store.catalog.all_records() and store.ssd.usage().used > 0
        store.check()
    finally:
        go_on.set()
        evicting.join()
    assert store.ssd.usage().used == 0
    sound(store, [])


def test_a_write_that_cannot_be_queued_is_not_waited_for(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write counted as under way: the committer waited two minutes for it with every batch, and
    its space had no owner."""
    store = open_store(geometry)
    with monkeypatch.context() as patch:
        patch.setattr(store._pool, "submit", no_memory)
        with pytest.raises(MemoryError), store.writer(prompt(64, 1)) as begun:
            k, v = (rows[0] for rows in kv_of(prompt(64, 1), geometry))
            begun.put(0, 0, k, v)
    store.flush()
    assert store.ssd.usage().used == 0
    sound(store, [])


def test_an_id_that_is_noted_to_be_erased_is_not_given_to_another(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Erasing what was noted before removed the new note under the same id: of two copies in a row
    that a kill cut off, the second was known to nobody any more."""
    store = open_store(geometry)
    put_prompt(store, prompt(64, 1)).wait(60)
    (record,) = store.catalog.records()
    slot = store.ssd.reserve(record.data_bytes)
    noted = replace(record, span_id=record.span_id + 5000, parts=slot.parts)
    store.index.commit({}, intend=[noted])
    store.ssd.free(slot)
    store.close()
    again = open_store(geometry)
    put_prompt(again, prompt(64, 2)).wait(60)
    assert max(r.span_id for r in again.catalog.records()) > noted.span_id
    sound(again, [1, 2])


def test_the_committer_outlives_a_turn_in_which_there_is_no_memory_at_all(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code to suppress the error asked for memory itself: whoever stored waited for ever."""
    left = [1, 1, 1]

    def suppress(*errors: type[BaseException]) -> Any:
        if left and threading.current_thread().name == "impress-commit":
            left.pop()
            raise MemoryError
        return contextlib.suppress(*errors)

    others = {**vars(contextlib), "suppress": suppress}
    monkeypatch.setattr("impress.write.commit.contextlib", SimpleNamespace(**others))
    store = open_store(geometry, repack_every_s=0)
    assert put_prompt(store, prompt(64, 1), wait_s=60).wait(60) and not left
    assert_serves(store, prompt(64, 1), 64)


def test_ctrl_c_as_the_committer_is_woken_does_not_cost_who_comes_next(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """The committer was woken but still listed as waiting: the next call to wake it woke nobody,
    and a flush, a wait or a close took up to its time limit."""

    class Struck(deque[Any]):
        comes = True

        def remove(self, waiter: Any) -> None:
            if self.comes:
                self.comes = False
                raise KeyboardInterrupt
            super().remove(waiter)

    store = open_store(geometry, repack_every_s=0)
    committer = store._home.committer
    assert committer is not None and committer.barrier(60)
    assert soon(lambda: len(committer._wake._waiters) == 1)
    with committer._lock:
        waiting = committer._wake._waiters = Struck(committer._wake._waiters)
    with pytest.raises(KeyboardInterrupt):
        committer._put(Signal())
    assert soon(lambda: len(waiting) == 2 and not committer._jobs), "it waits again"
    assert committer.barrier(30)


@pytest.mark.parametrize("whole", [True, False], ids=["windows", "rows"])
def test_rows_whose_write_could_not_be_queued_are_missing(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """A caller that caught the error of this put and left the block normally got a READY span in
    which these rows were never written: its first reader lost it."""
    store, tokens = open_store(geometry, repack_every_s=0), prompt(64, 1)
    keys, values = kv_of(tokens, geometry)
    with store.writer(tokens) as begun:
        if not whole:
            begun.put(0, 0, keys[0][:, :10], values[0][:, :10])
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(store._pool, "submit", no_memory)
            begun.put(0, 0 if whole else 10, *(rows[:, 0 if whole else 10 :] for rows in
                                               (keys[0], values[0])))  # fmt: skip
        begun.put(1, 0, keys[1], values[1])
    assert not begun.stored.wait(60) and begun.stored.refused.startswith("incomplete: rows missing")
    assert store.lookup(tokens) == 0 and soon(lambda: store.write_buffers.used_bytes == 0)
    assert put_prompt(store, tokens, wait_s=60).wait(60)
    assert_serves(store, tokens, 64)


@pytest.mark.parametrize("again", [None, "with importance", "without"])
@pytest.mark.parametrize("nth", [1, 3, 8], ids=["first", "in the midst", "last probes"])
def test_who_goes_on_behind_a_packed_put_that_failed_stores_nothing(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, nth: int,
    again: str | None,
) -> None:  # fmt: skip
    """When put again, the rest of the layer was written in position order under a header that said
    packed: every sum matched, and readers got rows of other positions. When cut off at the last
    block's probe records, the span was READY without them, and its first reader lost it."""
    store = open_store(geometry, repack_every_s=0, probes=("heads3-v1",))
    tokens, scores = prompt(256, 1), np.random.default_rng(0).random(256, dtype=np.float32)
    keys, values = kv_of(tokens, geometry)
    calls, submit = list[int](), store._pool.submit

    def short(*args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == nth:
            raise MemoryError
        return submit(*args, **named)

    with monkeypatch.context() as patch, store.writer(tokens) as begun:
        patch.setattr(writer.Writer, "_most", 1)  # windows per block: few, as with a large model
        with monkeypatch.context() as once, pytest.raises(MemoryError):
            once.setattr(store._pool, "submit", short)
            begun.put(0, 0, keys[0], values[0], scores)
        if again:
            begun.put(0, 0, keys[0], values[0], scores if again == "with importance" else None)
        begun.put(1, 0, keys[1], values[1])
    assert not begun.stored.wait(60) and begun.stored.refused == "failed: a put was cut off"
    assert store.lookup(tokens) == 0 and soon(lambda: store.write_buffers.used_bytes == 0)
    assert store.stats()["refused"] == {"failed": 1}
    assert put_prompt(store, tokens, wait_s=60).wait(60)
    assert_serves(store, tokens, 256)


def test_a_buffer_that_cannot_be_kept_holds_nobody_up(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write before it never counted as ended: the store failed after two minutes as by a disk
    that hangs, no other was taken for half a minute, and its space stayed taken."""
    store = open_store(geometry)
    keep, failed = store.write_buffers._keep, list[int]()

    def once(memory: Any) -> None:
        if not failed:
            failed.append(1)
            raise MemoryError
        keep(memory)

    with monkeypatch.context() as patch:
        patch.setattr(store.write_buffers, "_keep", once)
        assert put_prompt(store, prompt(64, 1)).wait(60)
    assert failed and store.write_buffers.used_bytes == 0
    sound(store, [1])
