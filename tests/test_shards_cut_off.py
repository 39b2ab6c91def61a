"""When a look at other shards is cut off, hangs or fails, the next one makes good what it left."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from conftest import MIB, assert_serves, prompt, soon, wait_for_promotions
from conftest import look as repack_look
from test_shards import APART, Pair, check, limbo, look, pair, ready, unreadable

import impress
import impress.tree.waiting
import impress.write.env
import impress.write.follow
import impress.write.index
import impress.write.neighbours
import impress.write.reclaim
from impress.tree.merged import MergedCatalog
from impress.tree.radix import RadixTree
from impress.tree.waiting import Waiting
from impress.upkeep.rebuild import rebuild_store
from impress.write.follow import Follower
from impress.write.home import Home
from impress.write.index import Index
from impress.write.readers import present
from tiers.files import give_to_owner
from tiers.ssd import SsdTier

__all__ = ["pair"]  # the fixture
Open = Callable[..., impress.PrefixStore]


def cut_off(
    real: Callable[..., Any], error: BaseException, *, nth: int = 1, behind: bool = False
) -> Callable[..., Any]:
    """`real`, except that its nth call raises `error`: at its start or, with `behind`, its end."""
    calls: list[int] = []

    def once(*args: Any, **named: Any) -> Any:
        calls.append(1)
        mine = len(calls) == nth
        if mine and not behind:
            raise error
        found = real(*args, **named)
        if mine:
            raise error
        return found

    return once


# ---- cut off -------------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("name", ["forget_waiting", "n_heirs", "retry", "withdraw", "deleted"])
def test_what_a_look_was_taking_out_as_it_was_cut_off_goes_with_the_next(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, name: str,
    behind: bool,
) -> None:  # fmt: skip
    """The log did not report it again: it was served from memory for as long as the process lived,
    and its writer, told that nobody read it any more, used its space again."""
    monkeypatch.setattr(impress.write.reclaim, "YIELD_TIMEOUT_S", 0)
    a, b = (open_store(geometry, **{**APART, "dram_bytes": 4 * MIB}) for _ in range(2))
    ready(b, prompt(256))
    look(a, b)
    assert_serves(a, prompt(256), 256)
    wait_for_promotions(a)
    assert a.stats()["tiers"]["dram"]["used"] > 0
    b.purge()
    error = KeyboardInterrupt()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        real = getattr(MergedCatalog, name)
        patch.setattr(MergedCatalog, name, cut_off(real, error, behind=behind))
        a.follow()
    b.follow()
    assert limbo(b) > 0, "it has not been followed yet"
    a.follow()
    assert a.lookup(prompt(256)) == 0
    assert a.stats()["tiers"]["dram"]["used"] == 0
    b.follow()
    assert limbo(b) == 0
    check(a, b)


@pytest.mark.parametrize("back", [False, True], ids=["gone", "back"])
def test_what_hung_from_what_a_look_was_taking_out_as_it_was_cut_off_goes_with_the_next(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    """The next look found it in no node: its space stayed taken, and its rows, which continued a
    purged prefix, were never erased."""
    a, b = pair
    ready(b, prompt(512, 1)[:256])
    look(a)
    ready(a, prompt(512, 1), start=256)
    look(b)
    b.purge()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        cut = cut_off(MergedCatalog._cut, KeyboardInterrupt(), behind=True)
        patch.setattr(MergedCatalog, "_cut", cut)
        a.follow()
    if back:  # as in an index made anew: nothing is to be taken out any more
        follower = a._home.others
        assert isinstance(follower, Follower)
        follower._gone.clear()
        follower._take_out()
    look(a)
    a.flush()  # by then it is deleted: the other follows that, and holds nothing up
    look(b, a)
    assert a.ssd.usage().used == 0 and not [*a.index.spans()]
    check(a, b)


@pytest.mark.parametrize("how", ["log overrun", "index made anew"])
def test_what_a_look_was_comparing_as_it_was_cut_off_is_compared_by_the_next(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The index counted as followed once it had been read: spans that differed were misses for as
    long as the process lived."""
    a, b = pair
    ready(a, prompt(128, 1))
    look(b)
    if how == "log overrun":
        monkeypatch.setattr(impress.write.index, "LOG_ENTRIES", 1)
    for seed in (2, 3):
        ready(a, prompt(128, seed))
    if how == "index made anew":
        a.close()
        rebuild_store(a.path)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(MergedCatalog, "load", cut_off(MergedCatalog.load, MemoryError()))
        b.follow()
    assert b.follow()
    for seed in (1, 2, 3):
        assert_serves(b, prompt(128, seed), 128)
    assert not b.follow(), "it is read once"
    check(b)


@pytest.mark.parametrize("how", ["log", "index"])
def test_a_span_that_a_look_was_showing_as_it_was_cut_off_is_shown_by_the_next(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The span was known by then, and so passed over: a miss for as long as the process lived."""
    a, b = pair
    if how == "index":
        monkeypatch.setattr(impress.write.index, "LOG_ENTRIES", 1)
    for seed in (1, 2):
        ready(a, prompt(128, seed))
    a.flush()
    before = MergedCatalog.before

    def compared(catalog: MergedCatalog, spans: set[int]) -> Iterator[tuple[int, bytes]]:
        patch.setattr(RadixTree, "graft", cut_off(RadixTree.graft, KeyboardInterrupt()))
        return before(catalog, spans)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if how == "index":
            patch.setattr(MergedCatalog, "before", compared)
        else:
            patch.setattr(RadixTree, "graft", cut_off(RadixTree.graft, KeyboardInterrupt()))
        b.follow()
    assert b.follow()
    for seed in (1, 2):
        assert_serves(b, prompt(128, seed), 128)
    check(a, b)


def in_both_and_evicted(pair: Pair) -> list[Any]:
    """Prompts that both stored and the first evicted: the other's spans take their place."""
    made = [prompt(256, seed) for seed in (1, 2)]
    for store in pair:
        for tokens in made:
            ready(store, tokens)
    look(*pair)
    assert pair[0].evict(1 << 30) > 0
    return made


@pytest.mark.parametrize("how", ["an error", "ctrl-c"])
def test_spans_that_waited_wait_on_where_the_trying_of_one_is_cut_off(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """All spans that were to be tried with it were forgotten, and were misses until a restart."""
    a, made = pair[0], in_both_and_evicted(pair)
    error = impress.StoreFailed("no more readers") if how == "an error" else KeyboardInterrupt()
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        if how == "an error":
            patch.setattr(Index, "value", cut_off(Index.value, error))
        else:
            patch.setattr(Waiting, "forget", cut_off(Waiting.forget, error, behind=True))
        a.follow()
    a.follow()
    for tokens in made:
        assert_serves(a, tokens, 256)
    check(*pair)


def test_spans_that_waited_wait_on_where_an_index_is_damaged_for_a_while(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FormatError was taken for a fault of the spans: they were forgotten, and as the catalog knew
    them, they were not new either once the index was made again."""
    (a, b), made = pair, in_both_and_evicted(pair)
    with monkeypatch.context() as patch:
        patch.setattr(Index, "value", failing_with(impress.FormatError("a damaged page")))
        a.follow()
    assert a.lookup(made[0]) == 0
    ready(b, prompt(128, 9))  # its index can be read again, and has news
    a.follow()
    for tokens in made:
        assert_serves(a, tokens, 256)
    check(*pair)


def test_what_begins_at_the_root_waits_on_where_too_much_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a span takes no room, but went all the same, and no key could find it."""
    monkeypatch.setattr(impress.tree.waiting, "MOST_BYTES", 64)
    waiting = Waiting()
    waiting.put(1, b"", b"root")
    for span in (2, 3, 4):
        waiting.put(span, bytes(32), b"key%d" % span)
    assert [span in waiting for span in (1, 2, 3, 4)] == [True, False, True, True]
    waiting.find([b"key2"], bytes(32), 0, 32)
    assert 2 in waiting and 3 not in waiting


def failing_with(error: Exception) -> Callable[..., Any]:
    def always(*_args: Any, **_named: Any) -> Any:
        raise error

    return always


def test_all_that_waits_is_tried_however_much_it_is(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those that had waited longest were tried, and no more until something else changed."""
    monkeypatch.setattr(impress.write.follow, "RETRIES", 2)
    a, b = pair
    made = [prompt(256, seed) for seed in range(9)]
    for store in pair:
        for tokens in made:
            ready(store, tokens)
    look(a, b)
    a.follow()
    with a.lease(made[-1]) as lease:  # a bad span of its own, whose place another's may take
        a._home.leaving.quarantine(lease.sources[0].held.record.span_id)
    for _ in range(6):
        a.follow()
    for tokens in made:
        assert_serves(a, tokens, 256)
    check(*pair)


@pytest.mark.parametrize(
    "way", ["moved", "taken out, and another has it", "moved, in an index made anew"]
)
@pytest.mark.parametrize("every_s", [3600, 0])
def test_a_span_that_was_moved_behind_ones_back_does_not_take_ones_own_with_it(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, way: str,
    every_s: float,
) -> None:  # fmt: skip
    """A process that looked late read where the span had been, found it bad, and deleted the spans
    that it had stored behind it: durable, and sound. One that looks only when told (0) did so even
    after that was mended for the others; it looks as it finds the span gone. And where the index
    had been rebuilt: the old one, which it had open, knew of no move."""
    monkeypatch.setattr(impress.write.reclaim, "YIELD_TIMEOUT_S", 0)
    late = {**APART, "follow_every_s": every_s}
    a, b = open_store(geometry, **APART), open_store(geometry, **late)
    c = open_store(geometry, **APART) if way.startswith("taken out") else None
    ready(a, prompt(256))
    if c is not None:
        ready(c, prompt(256))
    look(*(store for store in (a, b, c) if store is not None))
    ready(b, prompt(512))
    assert b.lookup(prompt(512)) == 512
    if way == "moved, in an index made anew":
        a.close()
        rebuild_store(b.path)
        a = open_store(geometry, **APART, shard=0)
    if c is None:
        repack_look(a, prompt(256))
        assert a.repack().moved == 1
    else:
        a.evict(1 << 30)
    a.flush()
    a.close()  # it waits for nobody: where the span lay is erased, or another's by now
    with b.lease(prompt(512)) as lease:
        assert lease.n_tokens == 0  # its header is not there any more
    b.flush()
    if every_s:
        b.follow()
    assert_serves(b, prompt(512), 512)
    check(b)


def test_where_what_takes_a_moved_spans_place_cannot_be_read_both_stay(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old span was dropped, as it was gone, and the spans that hung from it were deleted."""
    monkeypatch.setattr(impress.write.index, "LOG_ENTRIES", 1)
    a, b = (open_store(geometry, **APART) for _ in range(2))
    ready(a, prompt(256))
    look(b)
    ready(b, prompt(512))
    repack_look(a, prompt(256))
    assert a.repack().moved == 1
    for seed in (7, 8):  # the log is overrun
        ready(a, prompt(128, seed))
    with monkeypatch.context() as patch:
        patch.setattr(Home, "_own_values", failing_with(impress.StoreFailed("no more readers")))
        b.follow()
    b.follow()
    b.flush()
    assert_serves(b, prompt(512), 512)
    check(a, b)


@pytest.mark.parametrize("during", ["open", "look"])
def test_ctrl_c_as_another_shard_is_opened_leaves_no_reader_of_it(
    pair: Pair, open_store: Open, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    """Writers waited for such a reader, each time they gave space back, until the process ended."""
    a, _ = pair
    for seed, store in enumerate(pair):
        ready(store, prompt(128, seed))
    if during == "open":
        for store in pair:
            store.close()
    nth = 2 if during == "open" else 1
    interrupted = cut_off(Index.__init__, KeyboardInterrupt(), nth=nth)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Index, "__init__", interrupted)
        if during == "open":
            open_store(a.geometry, mode="r", **APART)
        else:
            a.follow()
    assert present(a.path / "shards/1/readers") == []
    if during == "open":
        assert present(a.path / "shards/main/readers") == []
    else:
        a.follow()
        assert_serves(a, prompt(128, 1), 128)


# ---- hanging -------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["erase", "drop_deleted"])
def test_a_close_does_not_wait_for_ever_for_a_look_that_hangs(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The disk hung as the look gave back space or let go of a file."""
    a, b = pair
    for seed, store in enumerate(pair):
        ready(store, prompt(256, seed))
    look(a, b)
    a.purge()
    b.follow()
    b.evict(1 << 30)
    assert limbo(a) > 0  # to be erased by its next look
    monkeypatch.setattr(impress.write.follow, "STOP_S", 0.01)
    monkeypatch.setattr(impress.write.reclaim, "WRITE_TIMEOUT_S", 0.01)
    begun, going_on = threading.Event(), threading.Event()

    def hangs(*_args: Any, **_named: Any) -> None:
        begun.set()
        going_on.wait(120)

    with monkeypatch.context() as patch:
        patch.setattr(SsdTier, what, hangs)
        looking, closing = (threading.Thread(target=of) for of in (a.follow, a.close))
        looking.start()
        assert begun.wait(60)
        closing.start()
        closing.join(60)
        closed = not closing.is_alive()
        going_on.set()
        for thread in (looking, closing):
            thread.join(60)
    assert closed


# ---- failing -------------------------------------------------------------------------------------


def test_a_shard_with_a_damaged_page_is_not_read_by_every_look(
    pair: Pair, open_store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was read whole, every 50 ms, by every process, for as long as it was damaged. Once it had
    been read again, nobody was told of the next damaged page."""
    a, _ = pair
    monkeypatch.setattr(impress.write.index, "LOG_ENTRIES", 1)
    reader = open_store(a.geometry, mode="r", **APART)
    for times in (1, 2):
        for seed in (1, 2):
            ready(a, prompt(128, 10 * times + seed))
        read: list[str] = []
        with monkeypatch.context() as patch:
            unreadable(patch, "main")
            damaged = Index.spans

            def counted(
                index: Index, real: Any = damaged, said: list[str] = read
            ) -> Iterator[tuple[int, bytes]]:
                said.append(index._folder.parent.name)
                found: Iterator[tuple[int, bytes]] = real(index)
                return found

            patch.setattr(Index, "spans", counted)
            for _ in range(20):
                reader.follow()
        assert 0 < read.count("main") <= 3
        assert caplog.text.count("shard main is left out") == times
        ready(a, prompt(128, 10 * times + 3))
        assert reader.follow()
        for seed in (1, 2, 3):
            assert_serves(reader, prompt(128, 10 * times + seed), 128)
    check(a, reader)


@pytest.mark.parametrize("mended", ["by itself", "by chmod"])
def test_a_shard_that_could_not_be_opened_is_found_without_a_commit(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, mended: str
) -> None:
    """If files or permission were lacking, it was left out until its writer's next commit."""
    a, b = pair
    ready(b, prompt(128))
    b.flush()
    with monkeypatch.context() as patch:

        def refused(*_args: object, **_named: object) -> None:
            raise impress.StoreFailed("no more files")

        patch.setattr(Index, "__init__", refused)
        for _ in range(3):
            assert not a.follow()
    if mended == "by chmod":
        (b.path / "shards/1/index/data.mdb").chmod(0o640)
    else:
        later_s = monotonic() + impress.write.neighbours.RETRY_S
        monkeypatch.setattr(impress.write.neighbours, "monotonic", lambda: later_s)
    assert a.follow()
    assert_serves(a, prompt(128), 128)
    check(*pair)


class Raising(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise MemoryError


@pytest.fixture
def raising() -> Iterator[None]:
    """Anything that is logged raises."""
    handler = Raising()
    logging.getLogger("impress").addHandler(handler)
    yield
    logging.getLogger("impress").removeHandler(handler)


@pytest.mark.usefixtures("raising")
@pytest.mark.parametrize("where", ["look", "wait"])
def test_following_goes_on_though_the_saying_of_an_error_fails(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The thread ended, and spans that others stored were misses until a restart."""
    a = open_store(geometry, **APART)
    wait = threading.Event.wait
    lacking = cut_off(wait, MemoryError())

    def waits(event: threading.Event, timeout: float | None = None) -> bool:
        mine = threading.current_thread().name == "impress-follow"
        return bool((lacking if mine else wait)(event, timeout))

    if where == "wait":
        monkeypatch.setattr(threading.Event, "wait", waits)
    else:
        monkeypatch.setattr(Follower, "look", cut_off(Follower.look, MemoryError()))
    b = open_store(geometry, shard=1, **{**APART, "follow_every_s": 0.001})
    ready(a, prompt(128))
    assert soon(lambda: b.lookup(prompt(128)) == 128)


# ---- replaced ------------------------------------------------------------------------------------


def open_indexes(path: Path) -> set[str]:
    """A store's index files that this process has open."""
    links = [entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    found = {str(link) for link in links if "data.mdb" in str(link)}
    return {link for link in found if str(path) in link}


def test_an_index_that_is_replaced_as_it_is_opened_is_not_taken_for_the_new_one(
    pair: Pair, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A purge or a rebuild replaced it: the opened file was kept under the new file's number, so
    nobody saw the replacement, and a writer of this process wrote to a deleted file."""
    a, b = pair
    ready(b, prompt(128, 1))
    b.close()
    index = a.path / "shards/1/index"
    copy = Path(shutil.copytree(index, index.with_name("index.new")))

    def replaced(path: Path) -> None:
        monkeypatch.setattr(impress.write.env, "give_to_owner", give_to_owner)
        index.rename(index.with_name("index.gone"))
        copy.rename(index)
        shutil.rmtree(index.with_name("index.gone"))

    monkeypatch.setattr(impress.write.env, "give_to_owner", replaced)
    a.follow()
    with open_store(a.geometry, **APART, shard=1) as again:
        ready(again, prompt(128, 2))
        look(a, again)
        for seed in (1, 2):
            assert_serves(a, prompt(128, seed), 128)
        check(a)
    a.close()
    reader = open_store(a.geometry, "r", **APART)
    for seed in (1, 2):
        assert_serves(reader, prompt(128, seed), 128)


def test_an_index_that_is_replaced_as_it_is_read_is_read_to_its_end(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A purge or a rebuild replaced it, and two looks meanwhile closed it."""
    a = open_store(geometry, **APART)
    for seed in range(3):
        ready(a, prompt(128, seed))
    reader = open_store(geometry, mode="r", **APART)
    a.close()
    found = reader.index.spans()
    next(found)
    rebuild_store(a.path)
    look(reader)
    assert len(list(found)) == 2
    assert len(open_indexes(a.path)) == 2
    monkeypatch.setattr(reader._home.others, "_grace_s", 0)
    reader.follow()
    assert len(open_indexes(a.path)) == 1
    check(reader)
