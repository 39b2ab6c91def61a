"""History: averages, scores and their decay; what is kept over a restart and what is forgotten."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from conftest import prompt, put_prompt
from hypothesis import given
from hypothesis import strategies as st

import impress
from impress.errors import FormatError
from impress.policy import AllHeads, Exact, Paper, Policy, Random, Recency
from impress.read.promote import pass_by
from impress.tree.eviction import ByWorth
from impress.usage import history as usage
from impress.usage.history import SAVE_EVERY, History
from impress.usage.notes import Note
from impress.usage.remembered import HALF_LIFE, NEWEST, Remembered, decode, drawn, encode, head_of

Open = Callable[..., impress.PrefixStore]
W = 16
LAYERS, WINDOWS = 2, 4
ROWS = WINDOWS * W
MOST = round(1 / NEWEST)


def history(budget: int = 1 << 20, saved: dict[int, bytes] | None = None, tick: int = 0) -> History:
    return History(LAYERS, W, budget, (saved or {}).get, tick)


def note(
    chosen: list[int] | None, layer: int = 0, first: int = 0, count: int = ROWS, *,
    whole: bool = False, every_layer: bool = False,
) -> Note:  # fmt: skip
    rows = None if chosen is None else np.array(chosen, dtype=np.int64)
    return Note(7, ROWS, layer, first, count, rows, whole=whole, every_layer=every_layer)


def scores(h: History, span: int, layer: int, ordinals: np.ndarray | None = None) -> np.ndarray:
    """float64 [n_chunks]: uses × share of important rows, as of now."""
    worth = h.worth(span, layer, ordinals)
    assert worth is not None
    return np.exp2(worth.ranks - h.tick / HALF_LIFE)


@given(
    st.lists(
        st.tuples(
            st.integers(0, WINDOWS - 1),
            st.integers(1, WINDOWS),
            st.sets(st.integers(0, ROWS - 1)),
        ),
        max_size=60,
    )
)
def test_an_average_is_the_mean_at_first_and_then_moves(
    requests: list[tuple[int, int, set[int]]],
) -> None:
    """There are two halves: each decision goes to the one that had fewer of the window."""
    h = history()
    mean, seen = np.zeros((2, ROWS)), np.zeros((2, ROWS))
    for at, n, rows in requests:
        first, count = at * W, min(n, WINDOWS - at) * W
        looked = np.arange(first, first + count)
        chosen = sorted(rows & set(looked.tolist()))
        h.request([note(chosen, 1, first, count)])
        for row in looked:
            half = int(seen[0, row] > seen[1, row])
            if seen[:, row].min() == MOST:
                half = drawn(h.tick)
            seen[half, row] = min(seen[half, row] + 1, MOST)
            mean[half, row] += ((row in chosen) - mean[half, row]) / seen[half, row]
        h.check()
    found = h.average(7)
    if not requests:
        assert found is None
        return
    assert found is not None and found.dtype == np.float32
    want = (mean * seen).sum(axis=0) / np.maximum(seen.sum(axis=0), 1)
    assert np.allclose(found[1], want, atol=2e-3)
    assert not found[0].any()
    halves = h.halves(7)
    assert (halves is None) == (not seen.all(axis=0).any())
    both = np.where((seen > 0).all(axis=0), mean, np.nan)  # unknown where one of them is
    assert halves is None or np.allclose(halves[:, 1], both, atol=2e-3, equal_nan=True)


def test_which_half_a_request_is_of_follows_no_order_of_requests() -> None:
    ticks = np.array([drawn(tick) for tick in range(4096)])
    for period in (1, 2, 3, 4, 8, 64):
        for first in range(min(period, 4)):
            assert 0.3 < ticks[first::period].mean() < 0.7


def test_a_layer_loaded_whole_counts_as_a_use_and_leaves_averages_alone() -> None:
    h = history()
    h.request([note([0, 1])])
    before = h.average(7)
    h.request([note(None)])
    assert np.array_equal(h.average(7), before)
    # Chunk 0 was used twice, the others once; only two rows of 16 matter in it, none elsewhere.
    fade = 2 ** (-1 / HALF_LIFE)
    assert np.allclose(scores(h, 7, 0), [(1 + fade) * 2 / W, 0, 0, 0])


def test_chunks_of_a_layer_that_requests_need_every_row_of_are_worth_their_uses() -> None:
    """Where three layers of four fell back, the cache kept only what the fourth had chosen of them:
    two hits of five were lost, and the paper's system took 1.5 times as long as plain LFU."""
    h = history()
    h.request([note([0, 1])])
    before = h.average(7)
    for _ in range(3):
        h.request([note(None, whole=True)])
    assert np.array_equal(h.average(7), before)  # a request that chooses still chooses these
    uses = sum(2 ** (-i / HALF_LIFE) for i in range(3))
    # Three requests of four need all of a chunk; the one that chose, 2 rows of 16 in the first.
    first = (uses + 2 ** (-3 / HALF_LIFE)) * (3 / 4 + 1 / 4 * 2 / W)
    assert np.allclose(scores(h, 7, 0), [first, *[uses * 3 / 4] * 3], rtol=1e-3)
    worth = h.worth(7, 0)
    assert worth is not None and np.allclose(worth.shares, [2 / W, 0, 0, 0], atol=1e-3)
    assert h.summary(7)[0] == pytest.approx(scores(h, 7, 0).mean() / 2, rel=1e-3)  # mean of both
    for _ in range(2 * MOST):
        h.request([note([0, 1])])
    now = scores(h, 7, 0)
    assert now[0] > 4 * now[1]  # what is again rarely needed whole goes


def test_a_prefix_that_is_read_whole_from_now_on_is_worth_it_within_a_few_uses() -> None:
    """It took some forty uses: meanwhile a prefix at the edge of the caches was read whole and half
    cold. A layer that fell back, beside others that chose, says nothing about the next request."""
    h, fell_back = history(), history()
    for one in (h, fell_back):
        for _ in range(2 * MOST):
            one.request([note([0, 1]), note([0, 1], 1)])
    for _ in range(3):
        h.request([note(None, layer, whole=True, every_layer=True) for layer in (0, 1)])
        fell_back.request([note(None, whole=True), note([0, 1], 1)])
    for one, least, most in ((h, 0.87, 0.88), (fell_back, 0, 0.2)):
        by_uses = one.worth(7, 0, by_uses=True)
        assert by_uses is not None
        needed = scores(one, 7, 0) / np.exp2(by_uses.ranks - one.tick / HALF_LIFE)
        assert least < needed[3] < most


@pytest.mark.parametrize("then", [note([0, 1]), note(None)], ids=["chosen", "whole, once"])
def test_a_prefix_that_is_no_longer_read_whole_gives_up_its_place_within_a_few_uses(
    then: Note,
) -> None:
    """After a try of reading hot prefixes whole that failed, their rows lay in the caches for 16
    uses of each, and for good where what lay there was read whole for that: the chosen mode took
    up to 1.4 times as long as choosing rows of every prefix from the start."""
    h = history()
    for _ in range(2 * MOST):
        h.request([note([0, 1])])
    for _ in range(MOST):
        h.request([note(None, whole=True, every_layer=True)])
    needed = []
    for _ in range(4):
        by_uses = h.worth(7, 0, by_uses=True)
        assert by_uses is not None
        needed.append(scores(h, 7, 0)[3] / np.exp2(by_uses.ranks[3] - h.tick / HALF_LIFE))
        h.request([then])
    assert np.allclose(needed, [1, 1 / 2, 1 / 4, 1 / 8], atol=0.01)


def test_layers_that_fall_back_are_told_from_requests_that_read_everything() -> None:
    h = history()
    h.request([note([0, 1])])
    h.request([note(None, whole=True)])
    for _ in range(9):
        h.request([note(None, whole=True, every_layer=True)])
    for _ in range(9):
        h.request([note(None)])  # no habit, no identifier's decision: only these are forgotten
    by_uses = h.worth(7, 0, by_uses=True)
    assert by_uses is not None
    needed = scores(h, 7, 0)[3] / np.exp2(by_uses.ranks[3] - h.tick / HALF_LIFE)
    assert needed == pytest.approx(1 / 2, abs=0.01)  # of two that chose, one fell back


def test_much_history_is_saved_in_parts() -> None:
    """All that had changed was copied and compressed in one go: stores, and whoever wanted room,
    waited for a gigabyte of it."""
    h = History(LAYERS, W, 1 << 20, {}.get)
    for span in range(5):
        h.request([replace(note([0, 1]), span=span)])
    size = h.used_bytes // 5
    saved = dict[int, bytes]()
    for n in (2, 4, 5):
        assert h.unsaved
        saved |= h.dump(size + 1)
        h.check()
        assert len(saved) == n
    assert not h.unsaved and h.dump() == {}
    h.request([replace(note([0]), span=9)])
    assert set(h.dump(1)) == {9} and not h.unsaved
    h.not_saved()
    assert h.unsaved and set(h.dump()) == {9}
    h.check()


def of_three() -> tuple[History, dict[int, bytes]]:
    """Room for three spans, of which another shard's writer saves those from 100 on."""
    size = Remembered.bytes_of(LAYERS, WINDOWS, W)
    saved = dict[int, bytes]()
    return History(LAYERS, W, 3 * size, saved.get, saves=lambda span: span < 100), saved


def test_what_is_known_of_anothers_spans_is_not_compressed_to_be_thrown_away() -> None:
    """It was dumped with the rest, and passed for saved, which only its own writer does."""
    h, saved = of_three()
    for span in (100, 1, 2, 101):
        h.request([replace(note([0, 1]), span=span)])
        if span == 2:
            saved |= h.dump()
            h.saved()
            assert set(saved) == {1, 2} and not h.unsaved
        h.check()
    # One of its own went, which can be fetched; what was learnt of the others' nobody else has.
    assert {100, 101} <= h._spans.keys() and len(h._spans) == 3
    assert not h.unsaved and h.worth(1, 0) is not None


@pytest.mark.parametrize("is_saved", [True, False])
def test_what_is_on_its_way_to_the_index_is_not_dropped(is_saved: bool) -> None:
    """It passed for saved as soon as it was dumped. Pushed out before it was in the index, it was
    fetched as it had been before, and saved so; where saving failed, it was gone."""
    h, saved = of_three()
    for span in (1, 2, 3):
        h.request([replace(note([0, 1]), span=span)])
    saved |= h.dump()
    h.saved()
    h.request([replace(note([0, 1]), span=1)])
    (late,) = h.dump().items()
    for span in (2, 4):
        h.request([replace(note([0, 1]), span=span)])
    h.check()
    assert late[0] == 1 and 1 in h._spans and 3 not in h._spans
    if is_saved:
        h.saved()
    else:
        h.not_saved()
    h.check()
    assert (1 in h.dump()) is not is_saved


def test_ranks_beforehand_count_the_use_they_are_asked_for() -> None:
    h = history()
    for _ in range(3):
        h.request([note(None, whole=True)])
    h.request([note([0, 17, 18])])
    ordinals = np.arange(ROWS)[::-1].copy()
    beforehand = h.ranks_if_used(7, 0, WINDOWS, np.array([0, 2]), ordinals)
    by_uses = h.worth(7, 0, ordinals, by_uses=True)
    assert by_uses is not None
    uses = np.exp2(by_uses.ranks - h.tick / HALF_LIFE)
    needed = scores(h, 7, 0, ordinals) / uses
    then = uses * 2 ** (-1 / HALF_LIFE) + [1, 0, 1, 0]
    assert np.allclose(np.exp2(beforehand - (h.tick + 1) / HALF_LIFE), then * needed, rtol=1e-4)


def test_what_was_never_decided_about_scores_by_its_uses() -> None:
    h = history()
    assert h.worth(7, 0) is None
    h.request([note(None, first=W, count=2 * W)])
    h.request([note(None, first=W, count=W)])
    assert np.allclose(scores(h, 7, 0), [0, 1 + 2 ** (-1 / HALF_LIFE), 2 ** (-1 / HALF_LIFE), 0])
    assert h.worth(7, 0).shares is None and h.average(7) is None


def test_a_use_counts_half_after_a_half_life_of_requests() -> None:
    h = history()
    h.request([note(None)])
    for _ in range(HALF_LIFE):
        h.request([])
    assert np.allclose(scores(h, 7, 0), 0.5)


def test_what_needs_every_row_is_no_less_needed_where_none_decided_about_it() -> None:
    """It was left out of the mean by which home evicts: a prefix most of whose layers fall back
    went before one of which a fifth is chosen, and one always read whole had no share at all."""
    h = History(LAYERS, W, 1 << 20, {}.get)

    def noted(span: int, layer: int, rows: list[int] | None) -> Note:
        return replace(note(rows, layer, whole=rows is None), span=span)

    few = [*range(0, ROWS, 5)]
    h.request([noted(1, 0, None), noted(1, 1, [0])])  # a layer fell back
    h.request([noted(2, layer, few) for layer in range(LAYERS)])
    h.request([noted(3, layer, None) for layer in range(LAYERS)])  # read whole
    shares = h.known_shares()
    assert shares[3] == 1 > shares[1] > 0.5 > shares[2] == pytest.approx(len(few) / ROWS, abs=0.01)
    important = h.summary(1)
    assert important is not None and important[1] == pytest.approx(1 / ROWS, abs=0.01)
    by_worth = ByWorth(shares)(*(np.array(one) for one in ([1, 2, 3], [9] * 3, [9] * 3, [4] * 3)))
    assert by_worth.argmin() == 1


def test_ranks_are_of_fading_uses_times_shares_and_never_need_renewing() -> None:
    h = history()
    rng = np.random.default_rng(3)
    early: dict[int, np.ndarray] = {}
    uses = np.zeros((LAYERS, WINDOWS))
    for at in range(40):
        chosen = np.flatnonzero(rng.random(ROWS) < rng.random())
        h.request([note(chosen.tolist(), layer=at % 2)])
        early[at % 2] = h.worth(7, at % 2).ranks
        uses *= 2 ** (-1 / HALF_LIFE)
        uses[at % 2, np.unique(chosen // W)] += 1
    want = uses * h.average(7).reshape(LAYERS, WINDOWS, W).mean(axis=2)
    ranks = np.stack([early[layer] for layer in range(LAYERS)])
    assert np.allclose(np.exp2(ranks - h.tick / HALF_LIFE), want, rtol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_the_share_of_a_chunk_is_of_rows_that_something_was_decided_about(packed: bool) -> None:
    """Other rows count 1 in a chunk's worth, as they did in the share that people are shown."""
    h = history()
    ordinals = np.arange(ROWS)
    if packed:  # halves of the first two chunks change places
        ordinals = np.concatenate(
            [np.arange(8), np.arange(16, 24), np.arange(8, 16), ordinals[24:]]
        )
    h.request([note(None)])
    h.request([note([0, 8], first=0, count=W)])
    worth = h.worth(7, 0, ordinals)
    assert worth is not None and worth.shares is not None
    want = [1 / 8, 1 / 8, np.nan, np.nan] if packed else [1 / 8, *[np.nan] * 3]
    assert np.allclose(worth.shares, want, atol=1e-3, equal_nan=True)
    assert (worth.ranks > -np.inf).all()


def test_chunks_are_those_the_rows_lie_in() -> None:
    h = history()
    order = np.arange(ROWS).reshape(W, WINDOWS).T.reshape(-1)  # ordinals of rows 0, 1, …
    packed = np.argsort(order)[:W]  # the rows that lie in chunk 0
    chosen = np.sort(packed)
    h.request([replace(note(chosen.tolist()), ordinals=order[chosen])])
    assert np.allclose(scores(h, 7, 0, order), [1, 0, 0, 0])
    assert np.allclose(h.worth(7, 0, order).shares, [1, 0, 0, 0])
    assert np.flatnonzero(h.average(7)[0]).tolist() == chosen.tolist()


def test_a_spans_score_is_the_mean_of_its_chunks_however_its_rows_lie() -> None:
    """Uses by chunk were multiplied by shares by window: after a repack, which puts the chosen rows
    into the chunks that are used, the score was a few times too low."""
    h = history()
    order = np.arange(ROWS).reshape(W, WINDOWS).T.reshape(-1)  # ordinals of rows 0, 1, …
    chosen = np.sort(np.argsort(order)[:W])  # the rows that lie in chunk 0: some of each window
    packed = [
        replace(note(chosen.tolist(), layer), ordinals=order[chosen]) for layer in range(LAYERS)
    ]
    for _ in range(5):
        h.request(packed)
        want = np.mean([scores(h, 7, layer, order) for layer in range(LAYERS)])
        assert want > 0.2 and h.summary(7) == pytest.approx((want, 1 / WINDOWS))
    h.request([])
    want *= 2 ** (-1 / HALF_LIFE)
    saved = h.dump()
    again = history(saved=saved, tick=h.tick)
    for _ in range(2):  # from the value's head, then from the unpacked value
        assert again.summary(7) == pytest.approx((want, 1 / WINDOWS))
        assert again.average(7) is not None
    h.carry(7, 9)  # into other chunks, each of which begins with the uses of the most used one
    assert h.summary(9)[0] == pytest.approx(want)


def test_each_layer_fades_by_its_own_requests() -> None:
    """All layers faded by the newest note of any: what a layer was used for long ago was as new."""
    h = history()
    h.request([note(None, layer) for layer in range(LAYERS)])
    for _ in range(3 * HALF_LIFE):
        h.request([])
    h.request([note(None)])
    assert h.summary(7)[0] == pytest.approx((1 + 1 / 8 + 1 / 8) / LAYERS, rel=1e-2)
    assert h.summary(7)[0] == pytest.approx(np.mean([scores(h, 7, at) for at in range(LAYERS)]))


def test_averages_go_over_to_the_span_a_repack_makes() -> None:
    h = history()
    h.request([note([3, 5])])
    h.carry(7, 9)
    assert np.array_equal(h.average(9), h.average(7))
    assert scores(h, 9, 0).tolist()[0] > 0
    h.forget(7)
    assert h.average(7) is None and h.average(9) is not None
    h.carry(1234, 5678)  # nothing is known of it
    assert h.average(5678) is None


def test_its_budget_holds_and_the_span_noted_longest_ago_goes() -> None:
    size = Remembered.empty(LAYERS, WINDOWS, W).n_bytes
    h = history(budget=3 * size)
    for span in (1, 2, 3, 1, 4):
        h.request([replace(note([0]), span=span)])
        h.check()
    assert [s for s in range(1, 5) if h.average(s) is not None] == [1, 3, 4]
    assert history(budget=0).average(7) is None
    nothing = history(budget=0)
    nothing.request([note([1])])
    nothing.check()


def test_a_span_larger_than_the_budget_costs_no_other_its_history() -> None:
    """One note of it made room by forgetting all others, unsaved, and then it was forgotten too."""
    size = Remembered.empty(LAYERS, WINDOWS, W).n_bytes
    h, large = history(budget=3 * size), 4 * ROWS
    for span in (1, 2, 3):
        h.request([replace(note([0]), span=span)])
    h.request([Note(9, large, 0, 0, large, np.array([0]))])
    h.check()
    assert all(h.average(span) is not None for span in (1, 2, 3)) and h.average(9) is None
    assert set(h.dump()) == {1, 2, 3}


def test_what_a_larger_budget_saved_is_neither_unpacked_nor_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing more is learnt of such a span, but its old value still answered, unpacked again for
    each layer of each request: a prefix in use lost its place in the caches to others. In an index
    from before averages had halves, that was so of every span above half the budget."""
    size, large = Remembered.empty(LAYERS, WINDOWS, W).n_bytes, 4 * ROWS
    had = history()
    had.request([Note(9, large, 0, 0, large, np.array([0]))])
    h = history(budget=3 * size, saved=had.dump())
    for span in (1, 2, 3):
        h.request([replace(note([0]), span=span)])
    monkeypatch.setattr(usage, "decode", lambda raw: pytest.fail("unpacked"))
    assert h.worth(9, 0) is None and h.average(9) is None
    monkeypatch.undo()
    # A repack is told it, with however little memory: the command has hardly any.
    assert np.array_equal(h.average(9, of_any_size=True), had.average(9))
    (value,) = h.carry(9, 10).values()
    assert np.array_equal(decode(value).average(), had.average(9))
    h.check()
    assert set(h.dump()) == {1, 2, 3}


def test_what_is_saved_makes_room_for_what_is_not() -> None:
    """Reading old spans, as a pass over all does, pushed out what requests had just shown."""
    size = Remembered.empty(LAYERS, WINDOWS, W).n_bytes
    old = history()
    for span in range(10, 20):
        old.request([replace(note([0]), span=span)])
    h = history(budget=4 * size, saved=old.dump())
    for span in (1, 2):
        h.request([replace(note([0]), span=span)])
    for span in range(10, 20):
        assert h.average(span) is not None
        h.check()
    assert not h.due and set(h.dump()) == {1, 2}


def test_what_is_pushed_out_before_it_is_noted_is_not_begun_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between a span's recall and its note another thread's spans took its place in memory: an
    empty history was noted, and saved over the span's own."""
    size = Remembered.empty(LAYERS, WINDOWS, W).n_bytes
    old = history()
    for span in (1, 2, 7):
        old.request([replace(note([0]), span=span)])
    h = history(budget=2 * size, saved=old.dump(), tick=old.tick)
    recall = h._recall

    def crowded(span: int) -> Remembered | None:
        known = recall(span)
        for other in (1, 2):
            recall(other)
        return known

    monkeypatch.setattr(h, "_recall", crowded)
    h.request([note([1])])
    monkeypatch.undo()
    h.check()
    assert np.allclose(h.average(7)[0, :3], [0.5, 0.5, 0])
    assert history(saved=h.dump()).average(7)[0, 0] == 0.5


def test_a_save_is_due_before_what_is_unsaved_fills_the_budget() -> None:
    """Only requests were counted: many spans noted in few requests went unsaved."""
    size = Remembered.empty(LAYERS, WINDOWS, W).n_bytes
    h, saved = history(budget=8 * size), {}
    for span in range(50):
        h.request([replace(note([0]), span=span)])
        if h.due:
            saved |= h.dump()
            assert not h.due
        h.check()
    assert set(saved | h.dump()) == set(range(50))


def test_a_long_prefix_alone_is_not_saved_after_every_request() -> None:
    """Its history was more than half the budget: it was copied, compressed and committed each time.
    Nor does it wait long: the next one may push it out."""
    size = Remembered.empty(LAYERS, WINDOWS, W).n_bytes
    h = history(budget=3 * size // 2)
    due = []
    for _ in range(16):
        h.request([note([0])])
        due.append(h.due)
        if h.due:
            assert set(h.dump()) == {7}
    assert due == [False, False, False, True] * 4
    h.check()


def test_what_the_index_does_not_take_is_not_saved_after_every_request() -> None:
    """On a full disk it was compressed and refused each time, for which stores waited."""
    size = Remembered.empty(LAYERS, WINDOWS, W).n_bytes
    h, n_due = history(budget=8 * size), 0
    for i in range(SAVE_EVERY):
        h.request([replace(note([0]), span=i % 6)])
        if h.due:
            n_due += 1
            h.dump()
            h.not_saved()
    assert n_due == 1
    while not h.due:
        h.request([])
    assert len(h.dump(6 * size)) < 6  # a part may find room
    h.saved()
    assert not h.failing
    h.check()


def test_a_save_is_due_once_in_so_many_requests() -> None:
    """Requests since the last save count, in a store that has served any number before."""
    h = history(tick=10 * SAVE_EVERY)
    for _ in range(2):
        for _ in range(SAVE_EVERY):
            assert not h.due
            h.request([])
        assert h.due
        h.dump()


def test_a_repack_carries_what_is_saved_but_not_in_memory() -> None:
    """A rewrite never asks for history: if fetched only after the swap, the old value was gone."""
    old = history()
    old.request([note([3, 5])])
    saved = old.dump()
    h = history(saved=saved, tick=old.tick)
    values = h.carry(7, 9)
    del saved[7]
    assert list(values) == [9]
    again = history(saved=values, tick=old.tick)
    assert np.array_equal(again.average(9), old.average(7))
    assert np.array_equal(scores(again, 9, 0), scores(h, 9, 0))
    assert h.dump() == {} and h.carry(1234, 5678) == {}


def test_a_value_comes_back_as_it_was_saved() -> None:
    h = history()
    for chosen in ([1, 2, 40], None, [2]):
        h.request([note(chosen, whole=chosen is None), note(chosen, 1)])
    saved = h.dump()
    assert list(saved) == [7] and h.dump() == {}
    again = history(saved=saved, tick=h.tick)
    assert np.array_equal(again.average(7), h.average(7))
    for layer in range(LAYERS):
        assert np.array_equal(again.worth(7, layer).ranks, h.worth(7, layer).ranks)
    assert history(saved=saved, tick=h.tick).summary(7) == pytest.approx(h.summary(7))
    assert len(encode(decode(saved[7]))) == len(saved[7])


def test_a_value_of_version_2_has_one_half_and_gets_the_other() -> None:
    """Version 2 did not average by halves: from one half alone no order is made (packing.py)."""
    h = history()
    h.request([note([1, 20])])
    known = decode(h.dump()[7])
    planes = known.halves[0].view(np.uint8).reshape(-1, 2).T
    arrays = (known.ticks, known.uses, known.seen[0], planes, known.looks, known.whole)
    packed = zlib.compress(b"".join(a.tobytes() for a in arrays))
    old = (
        struct.pack(
            "<HHIIIQff", 2, LAYERS, WINDOWS, W, len(packed), known.tick, *known.summary()[:2]
        )
        + packed
    )
    old += xxhash.xxh3_64_intdigest(old).to_bytes(8, "little")
    again = history(saved={7: old}, tick=h.tick)
    assert np.array_equal(again.average(7), h.average(7)) and again.halves(7) is None
    again.request([note([1, 30])])
    assert again.halves(7)[:, 0, [1, 20, 30]].tolist() == [[1, 1, 0], [1, 0, 1]]


def test_a_value_of_version_1_is_read_on() -> None:
    """Version 1 did not say which requests had needed every row."""
    h = history()
    h.request([note([1, 20])])
    h.request([note(None)])
    known = decode(h.dump()[7])
    planes = known.halves[0].view(np.uint8).reshape(-1, 2).T
    body = b"".join(a.tobytes() for a in (known.ticks, known.uses, known.seen[0], planes))
    packed = zlib.compress(body)
    head = struct.pack(
        "<HHIIIQff", 1, LAYERS, WINDOWS, W, len(packed), known.tick, *known.summary()[:2]
    )
    old = head + packed
    old += xxhash.xxh3_64_intdigest(old).to_bytes(8, "little")
    again = history(saved={7: old}, tick=h.tick)
    assert np.array_equal(again.average(7), h.average(7))
    assert np.array_equal(scores(again, 7, 0), scores(h, 7, 0))
    found = head_of(old)
    assert found is not None and found.tick == known.tick
    for one in (h, again):  # one that chose before counts as much as one that needs all rows now
        one.request([note(None, whole=True)])
    assert np.array_equal(scores(again, 7, 0), scores(h, 7, 0))
    assert np.allclose(scores(h, 7, 0)[3] / (1 + 2 ** (-1 / HALF_LIFE)), 1 / 2, rtol=1e-3)
    short = zlib.compress(body[:-1])
    cut = head[:12] + len(short).to_bytes(4, "little") + head[16:] + short
    cut += xxhash.xxh3_64_intdigest(cut).to_bytes(8, "little")
    with pytest.raises(FormatError, match="wrong length"):
        decode(cut)


def test_a_damaged_newer_or_foreign_value_is_forgotten() -> None:
    h = history()
    h.request([note([1])])
    (raw,) = h.dump().values()
    for at in (0, 20, 40, len(raw) - 1):
        bad = bytearray(raw)
        bad[at] ^= 1
        with pytest.raises(FormatError):
            decode(bytes(bad))
        assert head_of(bytes(bad)) is None
        assert history(saved={7: bytes(bad)}).average(7) is None
    newer = (4).to_bytes(2, "little") + raw[2:-8]  # and intact
    newer += xxhash.xxh3_64_intdigest(newer).to_bytes(8, "little")
    with pytest.raises(FormatError, match="version 4 is newer"):
        decode(newer)
    assert head_of(newer) is None and history(saved={7: newer}).average(7) is None
    assert history(saved={7: b""}).summary(7) is None
    assert History(LAYERS + 1, W, 1 << 20, {7: raw}.get).average(7) is None


# ---- in a store ------------------------------------------------------------------------------


def ask(
    store: impress.PrefixStore, tokens: np.ndarray, policy: Policy, n: int = 1
) -> list[np.ndarray]:
    """The positions that the last of n requests chose in each layer."""
    import torch

    g = store.geometry
    for at in range(n):
        torch.manual_seed(at)
        query = torch.randn(g.n_heads, 4, g.head_dim)
        lse = torch.zeros(g.n_heads, 4)
        with store.lease(tokens) as lease, lease.session(policy) as session:
            layers = range(g.n_layers)
            found = [session.retrieve(layer, query, suffix_lse=lse)[2] for layer in layers]
            positions = [pos.numpy().copy() for pos in found]
    return positions


def test_a_store_remembers_what_its_requests_chose(open_store: Open) -> None:
    geometry = impress.Geometry(2, 4, 2, 32, "float32")
    policy = AllHeads(0.25)
    tokens = prompt(256)
    store = open_store(geometry, dram_bytes=0)
    put_prompt(store, tokens).wait(60)
    (span,) = (record.span_id for record in store.catalog.records())
    ask(store, tokens, policy, 3)
    store.close()
    again = open_store(geometry, dram_bytes=0)
    average = again.history.average(span)
    assert again.history.tick == 3
    assert average is not None and np.allclose(average.mean(axis=1), 0.25, atol=1e-3)
    ask(again, tokens, Exact())
    again.close()
    reader = open_store(geometry, "r", dram_bytes=0)
    assert reader.history.tick == 4
    assert np.array_equal(reader.history.average(span), average)
    ask(reader, tokens, policy)  # learns, and keeps it to itself


def test_each_span_of_a_prompt_learns_which_of_its_own_rows_were_chosen(open_store: Open) -> None:
    store = open_store(impress.Geometry(2, 4, 4, 32, "float32"), dram_bytes=0)
    tokens = prompt(256)
    for n in (64, 192, 256):
        put_prompt(store, tokens[:n]).wait(60)
    with store.lease(tokens) as lease:
        spans = [(source.span, source.at * 64) for source in lease.sources]
    chosen = ask(store, tokens, AllHeads(0.25))
    assert store._pool.idle(60) and [at for _, at in spans] == [0, 64, 192]
    for layer, positions in enumerate(chosen):
        learnt = [np.flatnonzero(store.history.average(span)[layer]) + at for span, at in spans]
        assert np.array_equal(np.concatenate(learnt), positions)


@pytest.mark.parametrize(
    "policy", [Recency(0.25), Random(0.25), Paper(alpha=0.0)], ids=lambda policy: policy.name
)
def test_rows_that_no_query_chose_teach_no_averages(open_store: Open, policy: Policy) -> None:
    """Such rows were chosen without a look at the query, or are all rows, as heads disagreed: if
    taken for what requests need, the newest rows would be packed and kept first."""
    tokens = prompt(256)
    store = open_store(impress.Geometry(2, 4, 4, 32, "float32"), dram_bytes=0)
    put_prompt(store, tokens).wait(60)
    (span,) = (record.span_id for record in store.catalog.records())
    ask(store, tokens, policy)
    assert store._pool.idle(60)
    assert store.history.tick == 1 and store.history.average(span) is None
    ask(store, tokens, AllHeads(0.25))
    assert store._pool.idle(60)
    assert store.history.average(span) is not None


def test_it_was_decided_to_read_everything_only_where_that_was_asked_for_and_came_about(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all four layers fell back, or a request had no more than one layer, it looked the same:
    three of ten requests to a model whose layers mostly fall back said what nobody had decided."""
    noted = list[Note]()

    def request(_: History, notes: Iterable[Note]) -> None:
        noted.extend(notes)

    monkeypatch.setattr(History, "request", request)
    tokens = prompt(256)
    store = open_store(impress.Geometry(2, 4, 4, 32, "float32"), dram_bytes=0)
    put_prompt(store, tokens).wait(60)
    for policy in (Exact(), Paper(alpha=0.0)):
        ask(store, tokens, policy)
        assert store._pool.idle(60)
    with store.lease(tokens) as lease, lease.session(Exact()) as session:
        session.retrieve(0, None)
    assert store._pool.idle(60)
    assert all(note.whole for note in noted)
    assert [note.every_layer for note in noted] == [True, True, False, False, False]


def test_what_is_read_whole_this_once_is_a_use_and_no_habit(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = list[Note]()
    monkeypatch.setattr(History, "request", lambda _, notes: noted.extend(notes))
    tokens = prompt(256)
    store = open_store(impress.Geometry(2, 4, 4, 32, "float32"), dram_bytes=0)
    put_prompt(store, tokens).wait(60)
    with store.lease(tokens) as lease, lease.session(Exact()) as session:
        session.need = "once"
        for layer in (0, 1):
            session.retrieve(layer, None)
    assert store._pool.idle(60)
    assert [(one.layer, one.chosen, one.whole, one.every_layer) for one in noted] == [
        (layer, None, False, False) for layer in (0, 1)
    ]


def test_a_prefix_that_was_passed_by_counts_as_used(open_store: Open) -> None:
    """Recomputing seemed cheaper, time after time, since it lay in no cache. When it was read after
    all, it had one use, all others had many, and it lay in no cache the next time, either."""
    tokens = prompt(256)
    store = open_store(impress.Geometry(2, 4, 4, 32, "float32"), dram_bytes=0)
    put_prompt(store, tokens).wait(60)
    (span,) = (record.span_id for record in store.catalog.records())
    with store.lease(tokens[:192]) as lease:
        n_read = lease.n_tokens // store.window
        for _ in range(2):
            pass_by(lease.reading, lease.sources)
    assert store._pool.idle(60)
    assert store.history.tick == 2 and store.history.average(span) is None
    for layer in (0, 1):
        uses = scores(store.history, span, layer)
        assert np.allclose(uses[:n_read], 1 + 2 ** (-1 / HALF_LIFE)) and not uses[n_read:].any()
    store.history.check()


def test_history_goes_with_its_span(open_store: Open, geometry: impress.Geometry) -> None:
    store = open_store(geometry, dram_bytes=0)
    tokens = prompt(128)
    put_prompt(store, tokens).wait(60)
    ask(store, tokens, Exact())
    store.close()
    store = open_store(geometry, dram_bytes=0)
    (span,) = (record.span_id for record in store.catalog.records())
    assert store.index.history(span) is not None
    store.evict(1)
    assert store.index.history(span) is None and store.history.worth(span, 0) is None


def test_history_is_saved_every_so_many_requests(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry, dram_bytes=0)
    tokens = prompt(64)
    put_prompt(store, tokens).wait(60)
    (span,) = (record.span_id for record in store.catalog.records())
    for _ in range(SAVE_EVERY - 1):
        store.history.request([])
    assert store.index.history(span) is None
    with store.lease(tokens) as lease, lease.session() as session:
        session.retrieve(0, None)
    assert store._pool.close(60)  # what follows the request has run
    store.flush()
    assert store.index.history(span) is not None
    assert store.index.history_tick() == SAVE_EVERY


def test_what_is_noted_during_a_save_waits_for_the_next(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that found anything new when it ended was followed by another at once: under requests
    that never pause, one synced commit after the other, for ever."""
    store = open_store(geometry)
    put_prompt(store, prompt(64)).wait(60)
    (span,) = (record.span_id for record in store.catalog.records())
    saved, save = list[int](), store.index.save_history

    def request() -> None:
        store.history.request([Note(span, 64, 0, 0, 64, np.arange(4))])

    def saving(values: dict[int, bytes], *others: object) -> None:
        saved.append(len(values))
        if len(saved) < 20:
            request()
        save(values, *others)  # type: ignore[arg-type]

    request()
    monkeypatch.setattr(store.index, "save_history", saving)
    store._home.save_history()
    for _ in range(20):
        store.flush()
    assert saved == [1] and store.history.unsaved


def test_a_span_is_saved_with_the_score_that_its_last_request_gave_it(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was saved between noting and judging: with one use less, which `inspect` then showed."""
    store = open_store(geometry)
    put_prompt(store, prompt(128)).wait(60)
    saved: list[dict[int, bytes]] = []
    monkeypatch.setattr(History, "due", True)
    store._reading = replace(
        store._reading, save_history=lambda: saved.append(store.history.dump())
    )
    for _ in range(2):
        with store.lease(prompt(128)) as lease, lease.session() as session:
            for layer in range(geometry.n_layers):
                session.retrieve(layer, None)
        assert store._pool.idle(60)
    ((span, value),) = saved[-1].items()
    head = head_of(value)
    assert head is not None and head.score == pytest.approx(2, rel=1e-2)
    assert store.history.summary(span) == pytest.approx((head.score, np.nan), nan_ok=True)
