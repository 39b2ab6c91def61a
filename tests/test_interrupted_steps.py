"""Ctrl-C at every single step of a call: nothing stays taken.

CPython looks for signals when a function begins and after each call of a function written in C:
both are events of a profiler. And it does when a loop goes round: an opcode that a tracer is told.
"""

from __future__ import annotations

import dis
import gc
import math
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
from conftest import MIB, assert_serves, look, prompt, put_prompt
from test_ranges import PAGE as DEVICE_PAGE
from test_ranges import Played

import impress
import tiers
from impress.cache.chunks import ChunkCache, Ids
from impress.cache.heap import MinHeap
from impress.read import climb
from impress.read.tickets import nothing
from impress.repacking.drafts import Drafts
from impress.repacking.repack import Repacker
from impress.repacking.span_copy import Copier, Gone
from impress.spans.format import SpanRecord
from impress.tree.eviction import ALL
from impress.tree.merged import MergedCatalog
from impress.tree.radix import RadixTree
from impress.tree.views import Views
from impress.usage.history import History
from impress.usage.notes import Note
from impress.usage.remembered import Remembered
from impress.write.home import Home
from impress.write.reclaim import Reclaim
from impress.write.writer import Writer
from tiers import ranges_cuda
from tiers.base import PAGE, Extent, Slot
from tiers.errors import ReadFailed
from tiers.iopool import IoPool, Lane
from tiers.ranges import Range
from tiers.ranges_cuda import CudaRanges
from tiers.ssd import SsdTier
from tiers.ticket import Ticket, until

State = TypeVar("State")
HOLE = 64 << 10
TOKENS = prompt(256)


#: The code whose loops count as steps, too.
OURS = tuple(str(Path(package.__file__ or "").parent) for package in (impress, tiers))
#: Files in which no Ctrl-C comes: this one, and that of the played driver, which would be C.
NONE = (__file__, Played.cuInit.__code__.co_filename)


@cache
def turns_of(code: CodeType) -> set[int]:
    """The offsets at which its loops go round."""
    return {i.offset for i in dis.get_instructions(code) if i.opname.startswith("JUMP_BACKWARD")}


class Interrupted:
    """A with-block in which Ctrl-C comes at step n; it `came` unless the block was over before."""

    def __init__(self, n: int) -> None:
        self._left = n
        self.came = False

    def __enter__(self) -> Interrupted:
        gc.disable()  # others' callbacks are not our steps, and what is raised in them is lost
        sys.settrace(self._enter)
        sys.setprofile(self._step)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> bool:
        sys.setprofile(None)
        sys.settrace(None)
        gc.enable()
        return self.came and kind is KeyboardInterrupt

    def _step(self, frame: FrameType, event: str, of: Any) -> None:
        if event == "c_return" and of.__name__ == "__enter__":
            return  # before its block: only 3.14 lets a signal in there, and Python alone can help
        if event in ("call", "c_return") and frame.f_code.co_filename not in NONE:
            if self._left <= 0 and self._in_del(frame):
                return  # nor here: what is raised in a __del__ is lost, too
            self._left -= 1
            if self._left < 0 and not self.came:
                self.came = True
                raise KeyboardInterrupt

    def _enter(self, frame: FrameType, _event: str, _of: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        turns = turns_of(frame.f_code)

        def at(frame: FrameType, event: str, _of: Any) -> Any:
            if event == "opcode" and frame.f_lasti in turns:
                self._step(frame, "call", None)
            return at

        return at

    def _in_del(self, frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code.co_name != "__del__":
            frame = frame.f_back
        return frame is not None


def at_each_step(
    make: Callable[[], State], act: Callable[[State], object], check: Callable[[State], object],
    first: int = 0,
) -> None:  # fmt: skip
    """Interrupt `act` at its first step, then, on a new state, its second, … up to its end."""
    for n in count(first):
        state = make()
        with Interrupted(n) as interrupted:
            act(state)
        check(state)
        if not interrupted.came:
            assert n > 3
            return


@pytest.mark.parametrize("in_holes", [False, True], ids=["a new segment", "holes"])
def test_an_interrupted_reserve_takes_nothing(tmp_path: Path, in_holes: bool) -> None:
    """Nobody knew of the space it had taken: it was lost until a restart."""
    names = count()

    def make() -> tuple[SsdTier, list[Slot | None]]:
        tier = SsdTier(tmp_path / str(next(names)), 4 * HOLE, 4 * HOLE)
        slots = [tier.reserve(HOLE) for _ in range(4 * in_holes)]
        for slot in slots[::2]:
            assert slot is not None
            tier.free(slot)
        return tier, slots[1::2]

    def reserve(state: tuple[SsdTier, list[Slot | None]]) -> None:
        state[1].append(state[0].reserve(2 * HOLE, HOLE))

    def check(state: tuple[SsdTier, list[Slot | None]]) -> None:
        tier, slots = state
        tier.check()
        assert tier.usage().used == sum(slot.n_bytes for slot in slots if slot is not None)
        tier.close()

    at_each_step(make, reserve, check)


def test_an_interrupted_erasing_of_what_is_free_takes_none_of_it(tmp_path: Path) -> None:
    """Nobody gave back the space it had claimed: it was missing until a restart."""
    names = count()

    def make() -> tuple[SsdTier, list[Slot | None]]:
        tier = SsdTier(tmp_path / str(next(names)), 4 * HOLE, 4 * HOLE)
        slots = [tier.reserve(HOLE) for _ in range(4)]
        for slot in slots[::2]:
            assert slot is not None
            tier.free(slot)
        return tier, slots[1::2]

    def check(state: tuple[SsdTier, list[Slot | None]]) -> None:
        tier, _ = state
        tier.check()
        assert tier.usage().used == 2 * HOLE
        assert tier.reserve(2 * HOLE, HOLE)
        tier.close()

    at_each_step(make, lambda state: state[0].erase_free(state[0].turns()[0]), check)


def test_spans_that_are_let_go_of_step_by_step_are_noted_once_each() -> None:
    """They had left the catalog without being handed to anybody: their space was taken until a
    restart. When noted first, they came a second time, and their space was freed twice."""

    def make() -> tuple[MergedCatalog, list[SpanRecord]]:
        catalog = MergedCatalog(1, ALL)
        for span in (1, 2, 3):
            where = b"n" * 32, b"root", b"b" * 32, bytes([span]) * 32, 0, 1, 1
            record = SpanRecord(span, *where, Extent(0, 0, PAGE), (), bytes([span] * 4))
            assert catalog.publish(record, record.labels) == 1
        held = catalog.hold(b"root", bytes([2] * 4), count=True)
        for span in (1, 2, 3):
            catalog.quarantine(span)
        catalog.deleted([1, 2, 3], free := list[SpanRecord]())
        assert {record.span_id for record in free} == {1, 3}
        catalog.release(held)
        return catalog, free

    def act(state: tuple[MergedCatalog, list[SpanRecord]]) -> None:
        state[0].unheld(state[1])

    def check(state: tuple[MergedCatalog, list[SpanRecord]]) -> None:
        catalog, free = state
        catalog.unheld(free)
        assert sorted(record.span_id for record in free) == [1, 2, 3]
        assert not catalog.all_records()
        catalog.check()

    at_each_step(make, act, check)


def test_an_interrupted_look_for_a_pass_leaves_its_lock_free(store: impress.PrefixStore) -> None:
    """Every later repack waited for it for ever."""
    repacker = store._repacker
    assert repacker is not None

    def check(_: Repacker) -> None:
        assert not repacker._pass.locked()

    at_each_step(lambda: repacker, Repacker.cut_off, check)
    assert store.repack().moved == 1


def test_a_store_does_not_depend_on_entering_its_writer(
    store: impress.PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Ctrl-C came just then, its space and what it hangs from were taken until a restart."""

    def cut_off(_: Writer) -> Writer:
        raise KeyboardInterrupt

    monkeypatch.setattr(Writer, "__enter__", cut_off)
    assert put_prompt(store, prompt(128, 9)).wait(60)
    with pytest.raises(TypeError), monkeypatch.context() as patch:
        patch.setattr(Writer, "put", lambda: None)
        put_prompt(store, prompt(128, 10))
    store.flush()
    store.check()


@pytest.mark.parametrize("how", ["pin", "unpin", "unpin and drop"])
def test_an_interrupted_pin_or_unpin_leaves_no_pin(how: str) -> None:
    """A copy that stayed pinned could not be evicted until a restart."""

    def make() -> tuple[ChunkCache, list[Ids]]:
        cache = ChunkCache(8 * 8192, {0: 4096, 1: 4096}, 1)
        cache.publish(cache.admit(1, 6, 0, np.arange(4))[1])
        noted: list[Ids] = []
        if how != "pin":
            cache.pin(1, 0, 0, 6, noted=noted)
        return cache, noted

    def act(state: tuple[ChunkCache, list[Ids]]) -> None:
        cache, noted = state
        if how == "pin":
            cache.pin(1, 0, 0, 6, noted=noted)
        else:
            cache.unpin(noted[0], drop=how.endswith("drop"))

    def check(state: tuple[ChunkCache, list[Ids]]) -> None:
        cache, noted = state
        for entries in noted:  # as whoever pinned does
            cache.unpin(entries)
        cache.check()
        cache.clear()
        assert not cache.occupancy()
        assert how.endswith("drop") or cache.tier.usage().used == 0

    at_each_step(make, act, check)


@pytest.mark.parametrize("how", ["admit", "admit for others", "publish"])
def test_an_interrupted_copy_takes_no_place(how: str) -> None:
    """Until a restart nobody knew of its place in memory, or it could never be driven out; or what
    it would have driven out could not be, as the heap thought it filed where it was not."""

    def make() -> tuple[ChunkCache, list[Ids]]:
        cache = ChunkCache(8 * 8192, {0: 4096, 1: 4096}, 1)
        if how == "admit for others":
            return full_cache(), []
        if how == "admit":
            return cache, []
        return cache, [cache.admit(1, 6, 0, np.arange(4))[1]]

    def act(state: tuple[ChunkCache, list[Ids]]) -> None:
        cache, granted = state
        if how != "publish":
            granted += [cache.admit(2, 6, 0, np.arange(4))[1]]
        else:
            cache.publish(granted[0])

    def check(state: tuple[ChunkCache, list[Ids]]) -> None:
        cache, granted = state
        cache.check()
        if how != "publish" and granted:
            cache.abandon(granted[0])
        cache.clear()
        assert not cache.occupancy()
        assert cache.tier.usage().used == 0

    at_each_step(make, act, check, first=how == "publish")  # at step 0 it has not begun


@pytest.mark.parametrize("fails", [False, True], ids=["copied", "what the caller wrote to"])
def test_an_interrupted_climb_takes_no_place(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """It came between taking places and filling them, or on the way into publishing them: nobody
    found these chunks, and as they had a place they were not copied again."""

    def copy(*_: Any) -> None:
        if fails:
            raise ReadFailed("checksum", "memory a caller saw")

    monkeypatch.setattr(climb, "_copy", copy)
    counters = SimpleNamespace(add=lambda *_: None)
    load: Any = SimpleNamespace(layer=0, reading=SimpleNamespace(counters=counters))
    held = SimpleNamespace(record=SimpleNamespace(n_windows=6))
    part: Any = SimpleNamespace(span=1, first=0, source=SimpleNamespace(held=held))

    def act(cache: ChunkCache) -> None:
        climb._copy_up(load, part, 0, [np.arange(4)] * 2, None, cache, None)

    def check(cache: ChunkCache) -> None:
        assert sum(cache.occupancy().values()) in (0, 0 if fails else 4)
        assert_nothing_is_lost(cache)

    at_each_step(lambda: ChunkCache(8 * 8192, {0: 4096, 1: 4096}, 1), act, check)


def test_an_interrupted_abandoning_of_copies_can_be_repeated() -> None:
    def make() -> tuple[ChunkCache, Ids]:
        cache = ChunkCache(8 * 8192, {0: 4096, 1: 4096}, 1)
        return cache, cache.admit(1, 6, 0, np.arange(4))[1]

    def check(state: tuple[ChunkCache, Ids]) -> None:
        cache, entries = state
        cache.abandon(entries)
        assert_nothing_is_lost(cache)

    at_each_step(make, lambda state: state[0].abandon(state[1]), check)


def test_what_is_remembered_is_counted_wherever_ctrl_c_comes() -> None:
    """A span's bytes counted after it was gone: with two of these nothing was learnt any more."""
    window = 16

    def make() -> History:
        history = History(1, window, 1 << 20)
        for span in (1, 2):
            history.note(Note(span, 4 * window, 0, 0, window, np.arange(3)))
        return history

    def act(history: History) -> None:
        history.forget(1)
        history._put(3, Remembered.empty(1, 4, window))

    at_each_step(make, act, History.check)


def full_cache() -> ChunkCache:
    cache = ChunkCache(8 * 8192, {0: 4096, 1: 4096}, 2)
    for layer in (0, 1):
        cache.publish(cache.admit(1, 6, layer, np.arange(4))[1])
    return cache


def assert_nothing_is_lost(cache: ChunkCache) -> None:
    cache.check()
    cache.clear()
    assert not cache.occupancy()
    assert cache.tier.usage().used == 0


def test_what_an_interrupted_copy_would_drive_out_stays_in_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was already out of the heap: no later copy could drive it out, and `clear` left it."""
    cache = full_cache()
    with monkeypatch.context() as patch:
        patch.setattr(MinHeap, "_settle", here(MinHeap._settle, 3))
        with pytest.raises(KeyboardInterrupt):
            cache.admit(2, 6, 0, np.arange(4))
    cache.check()
    assert cache.occupancy() == {1: 8} and cache.evictions == 0
    granted, entries = cache.admit(2, 6, 0, np.arange(5))
    assert len(granted) == 5
    cache.abandon(entries)
    assert_nothing_is_lost(cache)


DROPS: dict[str, Callable[[ChunkCache], object]] = {
    "drop_span": lambda cache: cache.drop_span(1),
    "drop_windows": lambda cache: cache.drop_windows(1, 1, np.arange(3)),
    "clear": lambda cache: cache.clear(),
}


@pytest.mark.parametrize("how", [*DROPS, "admit"])
def test_what_is_dropped_is_freed_though_ctrl_c_comes_before(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It was not found any more, but its place stayed taken until a restart."""
    cache = full_cache()
    with monkeypatch.context() as patch:
        patch.setattr(ChunkCache, "_free", here(ChunkCache._free))
        with pytest.raises(KeyboardInterrupt):
            DROPS.get(how, lambda cache: cache.admit(2, 6, 0, np.arange(4)))(cache)
    n_left = sum(cache.occupancy().values())
    assert n_left < 8 and cache.tier.usage().used == n_left * 8192
    assert_nothing_is_lost(cache)


@pytest.mark.parametrize("how", DROPS)
def test_an_interrupted_drop_loses_no_place_and_frees_none_twice(how: str) -> None:
    def check(cache: ChunkCache) -> None:
        assert cache.tier.usage().used == sum(cache.occupancy().values()) * 8192
        assert_nothing_is_lost(cache)

    at_each_step(full_cache, DROPS[how], check)


def here(real: Callable[..., Any], nth: int = 1) -> Callable[..., Any]:
    """`real`, except that the nth call on this thread is interrupted before it does anything: no
    signal comes on another thread."""
    left, thread = [1] * nth, threading.current_thread()

    def interrupted(*args: Any, **named: Any) -> Any:
        if left and threading.current_thread() is thread:
            left.pop()
            if not left:
                raise KeyboardInterrupt
        return real(*args, **named)

    return interrupted


@pytest.fixture
def store(
    open_store: Callable[..., impress.PrefixStore], geometry: impress.Geometry
) -> impress.PrefixStore:
    """A store of one prompt, which a repack moves."""
    made = open_store(geometry, repack_every_s=0)
    put_prompt(made, TOKENS).wait(60)
    look(made, TOKENS)
    return made


@pytest.mark.parametrize(
    ("where", "what"),
    [
        (Ticket, "over"), (Home, "_let_go"), (Home, "release"), (Drafts, "add"),
        (Repacker, "_move"), (Repacker, "_commit"), (Drafts, "hand"), (Drafts, "give_back_rest"),
    ],
    ids=lambda of: getattr(of, "__name__", str(of)),
)  # fmt: skip
def test_an_interrupted_repack_can_be_repeated(
    store: impress.PrefixStore, where: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the wait for the pace came out as a RuntimeError, or made the next repack and the
    close hang; elsewhere the copy or the span that it replaced kept its space until a restart."""
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(where, what, here(getattr(where, what)))
        store.repack()
    store.flush()
    store.repack()
    store.flush()
    store.check()
    assert_serves(store, TOKENS, 256)
    assert store.stats()["pinned_spans"] == 0
    store.evict(1 << 30)
    assert store.ssd.usage().used == 0


@pytest.mark.parametrize(
    ("where", "what"),
    [(SsdTier, "erase"), (SsdTier, "sync"), (SsdTier, "free"), (Reclaim, "_bury")],
    ids=lambda of: getattr(of, "__name__", str(of)),
)  # fmt: skip
def test_a_copy_that_comes_to_nothing_is_given_back_though_it_is_cut_off(
    store: impress.PrefixStore, where: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy stayed among those under way for good; as it counts in repack_space_bytes, nothing
    was repacked any more."""

    def gone(*_args: Any) -> None:
        monkeypatch.setattr(where, what, here(getattr(where, what)))
        raise Gone

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(Copier, "copy", gone)
        store.repack()
    assert not store._repacker.drafts() and not store._repacker.writing
    store.check()
    assert [span.outcome for span in store.repack().spans] == ["moved"]
    assert_serves(store, TOKENS, 256)


def test_a_copy_that_is_given_back_step_by_step_is_freed_once(store: impress.PrefixStore) -> None:
    """If cut off before anybody had it, its space had no owner until a restart; if cut off once it
    was free, it was freed again: by then another store's, whose rows were erased."""
    assert store._repacker is not None and store._home.reclaimer is not None
    home, reclaimer, drafts = store._home, store._home.reclaimer, store._repacker._drafts
    home.others.stop()  # nobody else settles
    used = store.ssd.usage().used

    def make() -> SpanRecord:
        slot, meta = store.ssd.reserve(2 * PAGE), store.ssd.reserve(PAGE)
        assert slot is not None and meta is not None
        (record,) = store.catalog.records()
        made = replace(record, span_id=next(home.span_ids), meta=meta.parts[0], parts=slot.parts)
        drafts.add(made)
        return made

    def check(_made: SpanRecord) -> None:
        drafts.give_back_rest()
        assert not drafts.records() and not drafts._drafts
        reclaimer.settle()
        assert not reclaimer.limbo.records()
        assert store.ssd.usage().used == used
        store.check()

    at_each_step(make, drafts.give_back, check)
    assert_serves(store, TOKENS, 256)


def test_a_copy_that_the_committer_is_about_to_have_is_freed_once_or_is_its_own(
    store: impress.PrefixStore,
) -> None:
    """The cut comes between handing the copy over and the committer's taking it."""
    scrapped = list[int]()
    drafts = Drafts(lambda left: scrapped.append(left.pop().span_id), lambda: False)
    (record,) = store.catalog.records()

    def make() -> list[object]:
        scrapped.clear()
        drafts.add(record)
        job = SimpleNamespace(header=SimpleNamespace(record=record))
        return [drafts.hand(job), []]  # type: ignore[arg-type]

    def check(state: list[object]) -> None:
        drafts.give_back_rest()
        assert scrapped == [record.span_id] and not drafts._drafts and not drafts._handed
        assert not list(state[0])  # type: ignore[call-overload]

    at_each_step(make, lambda _state: drafts.give_back_rest(), check)
    jobs = make()[0]
    assert next(jobs) is not None  # type: ignore[call-overload]  # the committer takes it
    drafts.give_back_rest()
    assert not scrapped and drafts.records() == [record]
    drafts.over(record.span_id)


def test_no_write_of_a_repack_is_left_behind_wherever_ctrl_c_comes(
    store: impress.PrefixStore,
) -> None:
    """A write queued by a call that had not returned yet ran after its space had been given back:
    into space that was another store's by then."""
    assert store._repacker is not None
    copier, pool = store._repacker._copier, store._pool

    def make() -> list[str]:
        return []

    def act(state: list[str]) -> None:
        copier.do(lambda: state.append("written"))
        state.append("over")

    def check(state: list[str]) -> None:
        so_far = [*state]
        pool.submit(Lane.REPACK, [nothing]).wait(60)  # after whatever is queued
        assert state == so_far

    at_each_step(make, act, check)


@pytest.mark.parametrize("then", ["repack", "purge", "close"])
def test_a_copy_is_not_given_back_under_a_write_that_a_second_ctrl_c_left(
    store: impress.PrefixStore, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """The first Ctrl-C waits for the write, the second leaves that wait: its space was freed, a
    store became READY there, and then the old write landed in it. If kept for that, only the next
    pass gave it back: a purge before then said all was gone, and rows stayed on the disk."""
    assert store._repacker is not None
    begun, gate, write = threading.Event(), threading.Event(), store.ssd.write
    left, over, this = [1, 1], Ticket.over, threading.current_thread()

    def held(*args: Any) -> None:
        if threading.current_thread().name.startswith("impress-io"):
            begun.set()
            gate.wait(60)
        write(*args)

    def interrupted(ticket: Ticket, timeout_s: float) -> bool:
        if not left or threading.current_thread() is not this or timeout_s < 1:
            return over(ticket, timeout_s)
        while not over(ticket, 0.01):
            if begun.is_set():  # it is the write that is waited for
                left.pop()
                raise KeyboardInterrupt
        return True

    monkeypatch.setattr(store.ssd, "write", held)
    monkeypatch.setattr(Ticket, "over", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.repack()
    assert len(store._repacker.drafts()) == 1 and store._repacker.writing
    ((part, *_),) = [draft.parts for draft in store._repacker.drafts()]
    if then == "purge":
        assert store.purge() == (1, 1)  # it is not gone yet
    gate.set()
    monkeypatch.undo()
    assert until(lambda: not store._repacker._copier.under_way, 60)
    if then == "repack":
        assert [span.outcome for span in store.repack().spans] == ["moved"]
        assert_serves(store, TOKENS, 256)
    elif then == "purge":
        assert store.purge() == (0, 0)
    else:
        store.close()
    assert not store._repacker.drafts()
    if then == "repack":
        store.check()
        return
    for path in store.path.rglob(f"{part.segment:08}.seg"):  # gone, where nothing else was in it
        left = path.read_bytes()[part.off : part.off + part.length]
        assert not any(left)


def test_who_looks_at_rest_leaves_nothing_taken_wherever_ctrl_c_comes(
    store: impress.PrefixStore,
) -> None:
    """A lock stayed taken for good, or for as long as the traceback lived: the committer hung."""
    reclaimer = store._home.reclaimer
    assert reclaimer is not None
    kept: list[BaseException] = []  # as one that handles it does

    def act(_: None) -> None:
        try:
            reclaimer.at_rest(nothing)
        except KeyboardInterrupt as err:
            kept.append(err)
            raise

    def check(_: None) -> None:
        settled = threading.Thread(target=reclaimer.settle, daemon=True)
        settled.start()
        settled.join(60)
        assert not settled.is_alive() and not reclaimer._busy
        free: list[bool] = []
        looks = threading.Thread(target=lambda: free.append(reclaimer._lock.acquire(timeout=60)))
        looks.start()
        looks.join()
        assert free == [True]
        reclaimer._lock = threading.RLock()  # that thread has the old one

    at_each_step(lambda: None, act, check)


def test_what_an_interrupted_settle_takes_out_of_limbo_is_freed_by_the_next(
    store: impress.PrefixStore,
) -> None:
    """Its space had no owner until a restart, and as it counted as on its way out, nothing was
    evicted any more: a full store refused everything. Or a thread counted as at work for ever."""
    store._home.others.stop()  # nobody else settles
    reclaimer = store._home.reclaimer
    assert reclaimer is not None

    def make() -> SpanRecord:
        slot, meta = store.ssd.reserve(2 * PAGE), store.ssd.reserve(PAGE)
        assert slot is not None and meta is not None
        (record,) = store.catalog.records()
        span = next(store._home.span_ids)
        made = replace(record, span_id=span, meta=meta.parts[0], parts=slot.parts)
        reclaimer.limbo.add(made, 0, -math.inf)
        reclaimer.spoil([span])
        return made

    def check(made: SpanRecord) -> None:
        assert not reclaimer._busy
        reclaimer.settle()
        assert not reclaimer.limbo.records() and made.span_id not in reclaimer.spoilt
        assert store.ssd.usage().used == used
        store.ssd.check()

    used = store.ssd.usage().used
    at_each_step(make, lambda made: reclaimer.settle(), check)
    assert_serves(store, TOKENS, 256)


def test_an_interrupted_trim_leaves_the_accounts_whole(tmp_path: Path) -> None:
    """A segment was in one account and not in the other: its number could never be used again, and
    every store that wanted one more segment was refused until a restart."""
    names = count()

    def make() -> SsdTier:
        tier = SsdTier(tmp_path / str(next(names)), HOLE, 4 * HOLE)
        for slot in [tier.reserve(HOLE) for _ in range(3)]:
            assert slot is not None
            tier.free(slot)
        return tier

    def check(tier: SsdTier) -> None:
        tier.check()
        files = {int(path.stem) for path in tier.folder.glob("*.seg")}
        assert tier._space.sizes.keys() == tier._space._free.keys() == files
        assert all(tier.reserve(HOLE) is not None for _ in range(4))
        tier.close()

    at_each_step(make, lambda tier: tier.trim(), check)


def test_an_interrupted_flush_does_not_stop_the_committer(store: impress.PrefixStore) -> None:
    """The committer sets what flush waits for: its lock stayed taken, and the committer hung."""

    def flush(_: None) -> None:
        store.flush(30)

    at_each_step(lambda: None, flush, flush)


def test_a_session_that_is_cut_off_as_it_closes_leaves_nothing_taken_and_is_learnt_once(
    open_store: Callable[..., impress.PrefixStore], geometry: impress.Geometry
) -> None:
    """Layers have been begun and not taken, and some chunks climb: a buffer stayed rented until the
    session was collected, and a request was learnt twice."""
    store = open_store(geometry, dram_bytes=MIB, repack_every_s=0)
    put_prompt(store, TOKENS).wait(60)

    class Open(NamedTuple):
        lease: impress.Lease
        session: Any
        tick: int

    def make() -> Open:
        store._copies.clear()
        tick, lease = store.history.tick, store.lease(TOKENS)
        session = lease.session()
        session.retrieve(0, None)
        session.prefetch()
        return Open(lease, session, tick)

    def check(state: Open) -> None:
        state.session.close()
        state.lease.release()
        assert store._pool.idle(60)
        next_one = store.buffers.acquire(PAGE)  # finds memory that nobody has any more
        assert next_one is not None
        next_one.release()
        assert store.buffers.used_bytes == store._reading.waiting._held == 0
        assert store._reading.lessons._held == 0
        assert not any(cache._pins.any() for cache in store._copies.chunks)
        assert store.history.tick - state.tick <= 1

    at_each_step(make, lambda state: state.session.close(), check)
    assert_serves(store, TOKENS, 256)


class Waiting(NamedTuple):
    """A pool whose one thread is held; three tickets wait for it, and one of another request."""

    pool: IoPool
    gate: threading.Event
    tickets: list[Ticket]
    over: list[int]  # those that were said to be over


def test_what_waits_ends_wherever_ctrl_c_comes_as_a_caller_runs_it() -> None:
    """From taking tasks out of their queue to the end of the last, Ctrl-C lost all of them, and
    those of other requests while the queue was being refilled: closes waited to their limit."""

    def make() -> Waiting:
        pool, gate, begun, over = IoPool(1), threading.Event(), threading.Event(), list[int]()
        pool.submit(Lane.PROMOTE, [lambda: begun.set() or (gate.wait(60) and None)])
        tickets = [pool.submit(Lane.PROMOTE, [nothing] * 2) for _ in range(4)]
        for i, ticket in enumerate(tickets):
            ticket.then(partial(over.append, i))
        assert begun.wait(60)
        return Waiting(pool, gate, tickets, over)

    def act(state: Waiting) -> None:
        state.pool.run_here(Lane.PROMOTE, state.tickets[1:])

    def check(state: Waiting) -> None:
        state.gate.set()
        assert all(ticket.over(60) for ticket in state.tickets)
        assert state.pool.close(60)
        assert sorted(state.over) == [0, 1, 2, 3]
        assert state.tickets[0].wait(0)

    at_each_step(make, act, check)


@pytest.mark.parametrize("n_children", [1, 3, 9])
def test_an_interrupted_removal_leaves_the_tree_whole(n_children: int) -> None:
    """A half-removed node could not be found but was still counted: a purge looked for it, and an
    insertion took its row while another node still pointed there."""

    def make() -> RadixTree:
        tree = RadixTree(1)
        for child in range(n_children):
            tree.graft(tree.root(b"root"), bytes([child]), child, 0)
        return tree

    def check(tree: RadixTree) -> None:
        tree.check()
        for leaf in tree.leaves().tolist():
            tree.remove(leaf)
        tree.check()
        assert not tree.roots

    at_each_step(make, lambda tree: tree.remove(int(tree.leaves()[-1])), check)


@pytest.mark.parametrize("cut", [True, False], ids=["a cut", "no cut"])
@pytest.mark.parametrize("n_children", [0, 2, 4, 5])
def test_an_interrupted_insertion_leaves_the_tree_whole(n_children: int, cut: bool) -> None:
    """A half-inserted node hung from nothing: taking it out again, as the committer does after an
    error (no memory), searched for it without end, holding the lock that every request takes."""

    def make() -> RadixTree:
        tree = RadixTree(1)
        root = tree.root(b"root")
        tree.graft(root, b"stem", 99, 0)
        for child in range(n_children):
            tree.graft(root, b"stem" + bytes([child]), child, 0)
        if not cut:  # a free row is used again
            tree.graft(root, b"gone", 98, 0)
            tree.remove(tree.of_span(98)[0])
        return tree

    def insert(tree: RadixTree) -> None:
        tree.graft(tree.root(b"root"), b"step" if cut else b"stem\xff", 100, 3)

    def check(tree: RadixTree) -> None:
        tree.check()
        while len(leaves := tree.leaves().tolist()):
            for leaf in leaves:
                tree.remove(leaf)
        tree.check()

    at_each_step(make, insert, check)


@pytest.mark.parametrize("how", ["remove", "graft", "end_at", "give"])
def test_an_interrupted_change_of_a_node_is_accounted_for(how: str) -> None:
    """In an eviction Ctrl-C came between a node and its account: what was no longer in the tree
    counted as in it until a restart, and was never deleted."""

    def make() -> tuple[RadixTree, Views]:
        tree, views = RadixTree(1), Views(lambda span: 4)
        for span in (1, 2):
            views.add(span)
        views.graft(tree, tree.root(b"root"), b"stem", 1, 0, 4)
        return tree, views

    def act(state: tuple[RadixTree, Views]) -> None:
        tree, views = state
        node = tree.of_span(1)[0]
        if how == "remove":
            views.remove(tree, node)
        elif how == "graft":
            views.graft(tree, tree.root(b"root"), b"step", 2, 0, 4)
        elif how == "end_at":
            views.end_at(tree, node, 1)
        else:
            views.give(tree, node, 2, 0, 4)

    def check(state: tuple[RadixTree, Views]) -> None:
        tree, views = state
        tree.check()
        views.check(tree.view(node) for node in tree.nodes().tolist())
        assert {*views, *views.retired} == {1, 2}

    at_each_step(make, act, check)


@pytest.mark.parametrize("most_kept", [8, 2])
@pytest.mark.parametrize("how", ["made", "mapped again", "taken away", "given back"])
def test_a_page_of_a_device_is_held_once_wherever_ctrl_c_comes(
    how: str, most_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that was being made, moved or released was in no list any more: its memory was lost
    until the process ended."""
    monkeypatch.setattr(ranges_cuda, "MOST_KEPT", most_kept * DEVICE_PAGE)
    size = 4 * DEVICE_PAGE

    def make() -> tuple[CudaRanges, Range]:
        ranges = CudaRanges(0, None, Played(n_pages=5))
        at = ranges.reserve(2 * size)
        if how != "made":
            ranges.back(at, 0, size)
        if how in ("mapped again", "given back"):
            ranges.unback(at, 0, size)
        return ranges, at

    def act(state: tuple[CudaRanges, Range]) -> None:
        ranges, at = state
        if how == "taken away":
            ranges.unback(at, 0, size)
        elif how == "given back":
            ranges.trim(DEVICE_PAGE)
        else:
            ranges.back(at, 0, size)

    def check(state: tuple[CudaRanges, Range]) -> None:
        (ranges, at), driver = state, state[0]._driver
        assert sorted([*ranges._state[at.address].pages.values(), *ranges._kept]) == sorted(
            driver.alive
        )
        ranges.back(at, 0, size)
        assert len(driver.usable) == 4
        ranges.unback(at, 0, size)
        ranges.trim(0)
        assert not driver.alive and not driver.mapped

    at_each_step(make, act, check)
