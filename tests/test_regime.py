"""What caches are for: what they would hold if all were read whole, and whether that is cheaper."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import wait_for_promotions
from hypothesis import given
from hypothesis import strategies as st
from masked_reference import HIT, filled, model_of, request_ids
from test_engine_hf import CONFIG

from impress.engines import hf, regime
from impress.engines.choice import Choice, Rates
from impress.engines.costs import Span, Stored
from impress.engines.regime import Expected, IfWhole, Regime
from impress.policy import Recency
from impress.usage.history import History
from impress.usage.notes import Note
from impress.usage.remembered import HALF_LIFE

SIZES = (3, 5, 7, 2, 4)

# --- what caches would hold ---------------------------------------------------------------------


def span(i: int, n_bytes: int = 10) -> Span:
    return Span(bytes([i]), n_bytes)


@given(
    st.lists(st.sets(st.integers(0, 4), min_size=1), max_size=40), st.integers(0, 25),
    st.permutations(range(5)), st.integers(1, 5),
)  # fmt: skip
def test_the_spans_that_are_used_most_would_be_held(
    asked: list[set[int]], room: int, mixed: list[int], n: int
) -> None:
    whole, uses = IfWhole(), np.zeros(5)
    for spans in asked:
        whole.note([span(i, SIZES[i]) for i in spans])
        uses *= 2 ** (-1 / HALF_LIFE)
        uses[list(spans)] += 1
    prefix = mixed[:n]
    cold = 0
    for at, i in enumerate(prefix):
        more = [j for j in range(5) if uses[j] > uses[i] * (1 + 1e-9)]
        beside = [j for j in prefix[:at] if j not in more and np.isclose(uses[j], uses[i], 1e-9)]
        left = room - sum(SIZES[j] for j in more + beside)
        cold += SIZES[i] - min(max(left, 0), SIZES[i])
    assert whole.cold([span(i, SIZES[i]) for i in prefix], room) == cold


def test_where_the_caches_go_by_last_use_so_does_what_they_would_hold() -> None:
    whole = IfWhole(by_last_use=True)
    for i in (1, 1, 1, 2, 3):
        whole.note([span(i)])
    assert [whole.cold([span(i)], 15) for i in (1, 2, 3)] == [10, 5, 0]


def test_spans_of_one_prefix_do_not_each_have_all_the_room() -> None:
    """Spans first asked for together have the same uses for ever: a prefix twenty times as large as
    the caches seemed to lie in them whole."""
    whole = IfWhole()
    prefix = [span(i) for i in range(20)]
    for _ in range(3):
        whole.note(prefix)
    assert whole.cold(prefix, 25) == 200 - 25


def test_a_prefix_is_as_cold_as_its_spans_are_and_a_batch_counts_each_row() -> None:
    whole = IfWhole()
    for _ in range(2):
        whole.note([span(1)])
    whole.note([span(1), span(2, 4), span(1, 8)])  # a batch is one request
    assert whole.cold([span(1), span(2, 4)], 12) == 2
    assert whole.cold([span(2, 4), span(2, 4), span(9, 3)], 12) == 2 * 2 + 3
    assert IfWhole().cold([span(1)], 12) == 0  # nothing else is there


def test_of_too_many_spans_those_used_least_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regime, "_MOST", 3)
    whole = IfWhole()
    for i in (1, 1, 2, 3, 3, 4):
        whole.note([span(i)])
    assert [whole.cold([span(i)], 30) for i in (1, 2, 3, 4)] == [0, 10, 0, 0]
    whole.note([span(2)])
    assert [whole.cold([span(i)], 30) for i in (1, 2, 3, 4)] == [0, 0, 0, 10]


def test_a_prefix_with_more_new_spans_than_there_is_room_for_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When all others were used more, its second span took the first one's place, and the request
    failed with a KeyError."""
    monkeypatch.setattr(regime, "_MOST", 3)
    whole = IfWhole()
    for i in (1, 1, 2, 2, 3, 3):
        whole.note([span(i)])
    whole.note([span(4), span(5)])
    assert whole.cold([span(4), span(5)], 0) == 20
    whole.note([span(i) for i in range(10)])
    assert whole.cold([span(i) for i in range(10)], 0) == 100


@pytest.mark.parametrize("by_last_use", [False, True])
def test_a_read_pays_where_as_many_follow_as_went_before_and_once_in_twice_as_many(
    by_last_use: bool,
) -> None:
    key, uses = span(1).key, IfWhole(by_last_use=by_last_use)
    assert not uses.pays(key, -1.0, 1.0)  # nobody asked for it yet
    found = []
    for i in range(1000):
        uses.note([span(1)])
        if uses.pays(key, 1.5, 1.0):
            found.append(i + 1)
            uses.spend(key)
    assert found[:3] == [2, 4, 8]
    assert not uses.pays(span(2).key, 0.1, 1.0)
    for i in range(2000):  # of every tenth request: uses no longer grow, but those spent on fade
        uses.note([span(1 if i % 10 == 0 else 2)])
        if uses.pays(key, 1.5, 1.0):
            found.append(i + 1000)
            uses.spend(key)
    assert 6 <= len(found) <= 14 and found[-1] > 2000


def test_what_was_spent_is_forgotten_with_its_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regime, "_MOST", 1)
    uses = IfWhole()
    for key in (1, 2):
        uses.note([span(key)])
        assert uses.pays(span(key).key, 0.5, 1.0)
        uses.spend(span(key).key)
        assert not uses.pays(span(key).key, 0.5, 1.0)
    uses.spend(span(1).key)  # forgotten


# --- which is cheaper ---------------------------------------------------------------------------


#: Requests to the first try: until the caches are filled, and until it is decided.
FIRST = regime._FILL + 32


def turns(
    r: Regime, n: int, took_s: float, other_s: float = 1.0, hoped_s: float | None = None
) -> list[int]:
    """At which of n requests it turned. They take what was expected; the other regime takes
    `other_s` until it turns to the second, and then what was noted in the first."""
    found = []
    for i in range(n):
        hoped = took_s if hoped_s is None else hoped_s
        other = None if r.whole else other_s
        if r.tally(took_s, Expected(span(0), 1, took_s, other, hoped)):
            found.append(i)
    return found


def test_it_turns_where_that_seems_worth_a_try_and_not_by_a_few_requests() -> None:
    """The first time, even where it seems dearer: how long it takes to read a prefix that lies in
    the caches is not known before."""
    assert turns(Regime(), 400, 1.0, 1.6) == []
    assert turns(Regime(), FIRST, 1.0, 1.4) == [FIRST - 1]


def tried(r: Regime) -> None:
    assert turns(r, FIRST, 1.0) == [FIRST - 1] and r.whole


def test_it_turns_back_where_nothing_was_gained_and_waits_the_longer_each_time() -> None:
    r = Regime()
    waits = (256, 0.7), (2048, 0.5), (4096, 0.8), (4096, 0.8)
    for n, other_s in [(FIRST, 0.9), *((64 + wait, other_s) for wait, other_s in waits)]:
        assert turns(r, n, 1.0, other_s) == [n - 1]
        assert turns(r, 160, 1.05) == [159] and not r.whole


def test_a_hope_that_came_to_nothing_is_not_had_again_before_thousands_of_requests() -> None:
    """What it would take was underestimated each time: rows of cold prefixes took twice what they
    do where some of them lie in the caches. With OPT-30B's shape every second try failed."""
    r = Regime()
    assert turns(r, FIRST, 1.0, 0.9) == [FIRST - 1]
    assert turns(r, 160, 1.05) == [159]
    assert turns(r, 64 + 4095, 1.0, 0.8) == []
    assert turns(r, 1, 1.0, 0.8) == [0]


def test_the_second_try_needs_better_hope_than_the_first() -> None:
    r = Regime()
    tried(r)
    assert turns(r, 160, 1.0) == [159] and not r.whole
    assert turns(r, 2000, 1.0, 0.95) == []
    assert turns(r, 1, 1.0, 0.0) == []  # not by one request
    assert len(turns(r, 150, 1.0, 0.85)) == 1


def test_it_gives_up_early_where_what_was_hoped_for_is_not_to_be_had() -> None:
    """After few requests that read everything, it is not known how long those take that find
    everything in the caches; soon it is."""
    r = Regime()
    tried(r)
    assert turns(r, 64, 1.0, hoped_s=1.3) == [15] and not r.whole


@pytest.mark.parametrize(("took_s", "n"), [(1.2, 16), (1.08, 38), (1.055, 80)])
def test_the_more_a_try_loses_the_sooner_it_is_given_up(took_s: float, n: int) -> None:
    r = Regime()
    tried(r)
    assert turns(r, 64 + n, took_s) == [64 + n - 1] and not r.whole


def test_a_gain_may_take_its_time_to_show() -> None:
    """Caches that had long held chosen rows had not followed after 80 requests, and the tenth by
    which requests took less from then on was given up."""
    r = Regime()
    tried(r)
    assert turns(r, 64 + 40, 1.05) == []
    assert turns(r, 400, 0.9) == [] and r.whole


def test_it_stays_while_it_gains_and_is_then_tried_again_at_once() -> None:
    r = Regime()
    tried(r)
    assert turns(r, 1000, 0.9) == []
    assert turns(r, 1000, 1.01) == []  # what is known to gain need not prove it again
    (lost,) = turns(r, 40, 1.3)  # it loses now
    assert turns(r, 64 + 32, 1.0) == [64 + 31 - (39 - lost)]


def test_after_thousands_of_requests_the_other_is_looked_at_again() -> None:
    """By then the seconds it is compared with date from long ago."""
    r, lasted = Regime(), []
    for _ in range(3):
        lasted += [turns(r, 96 if lasted else FIRST, 1.0), turns(r, 64 + 4096, 0.95)]
    assert lasted == [[FIRST - 1], [64 + 4095], *[[95], [64 + 4095]] * 2]


def test_a_stall_is_no_reason_to_turn() -> None:
    r = Regime()
    tried(r)
    assert turns(r, 300, 0.95) == []
    r.tally(1000.0, Expected(span(0), 1, 0.95, None, 0.95))
    assert turns(r, 100, 0.95) == [] and r.whole


def test_a_machine_that_became_slower_did_so_for_the_other_regime_too() -> None:
    """A ratio off from the start says only that the earlier costs are off where they are asked."""
    r = Regime()
    tried(r)
    for i in range(264):
        r.follow(9.0 if i < 64 else 0.7)  # at first the caches are not filled
        assert r.slower == pytest.approx(1.0)
        r.tally(0.95, Expected(span(0), 1, 0.95, None, 0.95))
    for i in range(200):
        r.follow(0.7 * 1.5)
        took_s = 0.95 * (1.5 if i > 32 else 1)
        assert not r.tally(took_s, Expected(span(0), 1, took_s, None, 1.0))
    assert r.slower == pytest.approx(1.5, rel=0.01)


def test_each_prefix_is_held_against_what_it_took_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one that was not asked for then, the mean is taken, by its bytes: growing conversations
    are never the same prefix again, and the regime was no longer compared with anything."""
    monkeypatch.setattr(regime, "_MOST", 2)
    r = Regime()
    for i in [0] * regime._FILL + [0, 1, 0, 2]:  # at first the caches are not filled
        r.tally(1.5 + 2 * i, Expected(span(i), 2 + i, 1.5 + 2 * i, 9.0, 1.0, 0.5))
    assert dict(r._chosen) == {span(0): 0.5, span(2): 5 / 4} and r.knows(span(2))
    r.whole = True
    for i, n_bytes, rest_s, want in ((0, 2, 0.5, 1.5), (0, 2, 2.0, 3.0), (2, 4, 0.0, 5.0)):
        before = r._other_s
        r.tally(1.0, Expected(span(i), n_bytes, 1.0, None, 1.0, rest_s))
        assert r._other_s - regime._DECAY * before == pytest.approx(want)
    before, weights = r._other_s, regime._DECAY ** np.arange(4)[::-1]
    r.tally(1.0, Expected(span(7), 100, 1.0, None, 1.0))
    mean = np.dot(weights, [1.0, 3.0, 1.0, 5.0]) / np.dot(weights, [2, 3, 2, 4])
    assert r._other_s - regime._DECAY * before == pytest.approx(100 * mean)


# --- an engine that goes by it ------------------------------------------------------------------


class Machine:
    """Caches that follow scores at once, and how many ms requests take there. Four tenths of each
    prefix are chosen."""

    CHOSEN, ROOM, SIZE = 0.4, 7.0, 1 << 20

    def __init__(self, n_prefixes: int, sparse: tuple[float, float], exact: tuple[float, float]):
        self.uses, self.whole = np.zeros(n_prefixes), np.zeros(n_prefixes)
        self.sparse, self.exact = sparse, exact

    def held(self) -> np.ndarray:
        """[prefix, its chosen part and the rest]: shares that lie in the caches."""
        scores = np.stack([self.uses, self.uses * self.whole], axis=1).ravel()
        sizes = np.tile([self.CHOSEN, 1 - self.CHOSEN], len(self.uses))
        order = np.argsort(-scores, kind="stable")
        before = np.cumsum(sizes[order]) - sizes[order]
        held = np.zeros(len(sizes))
        held[order] = np.clip((self.ROOM - before) / sizes[order], 0, 1) * (scores[order] > 0)
        return held.reshape(-1, 2)

    def stored(self, prefix: int) -> Stored:
        chosen, rest = self.held()[prefix]
        cold = 1 - self.CHOSEN * chosen - (1 - self.CHOSEN) * rest
        return Stored(
            5000, 32, self.SIZE, round(cold * self.SIZE), (span(prefix, self.SIZE),),
            round(self.ROOM * self.SIZE),
        )  # fmt: skip

    def serve(self, prefix: int, mode: str) -> float:
        """The ms that the request takes."""
        chosen, rest = self.held()[prefix]
        if mode == "recompute":
            return 500.0
        cold = (
            (1 - chosen)
            if mode == "sparse"
            else 1 - self.CHOSEN * chosen - (1 - self.CHOSEN) * rest
        )
        self.uses[prefix] += 1
        self.whole[prefix] += ((mode == "exact") - self.whole[prefix]) / 16
        fixed, read = self.sparse if mode == "sparse" else self.exact
        return fixed + read * cold


#: Where choosing costs more than reading what lies in the caches, and where it costs less. Each is
#: (sparse, exact): a request's ms with nothing to read from the SSD, and more ms to read it all.
DEAR, CHEAP = ((100, 60), (55, 110)), ((200, 250), (230, 420))


def taken(
    costs: tuple[tuple[float, float], tuple[float, float]], forced: str = "", *,
    slower: float = 1.0, seed: int = 0,
) -> float:  # fmt: skip
    """Mean ms of the last 300 of 700 requests, prefixes by Zipf's law; from the 350th on, all take
    `slower` times as long."""
    machine, rates, ms = Machine(24, *costs), Rates(), []
    rates.note_forward("recompute", 5064, 0.5)
    popularity = 1 / np.arange(1, 25) ** 0.9
    asked = np.random.default_rng(seed).choice(24, 700, p=popularity / popularity.sum())
    for prefix in asked.tolist():
        stored = machine.stored(prefix)
        mode = forced or rates.choose("sparse", 5064, stored).mode
        ms.append(machine.serve(prefix, mode) * (slower if len(ms) > 350 else 1))
        if mode == "recompute":
            rates.note_forward(mode, 5064, ms[-1] / 1e3)
        else:
            rates.note_forward(mode, 64, 0.01)
            rates.note_read(mode, stored, ms[-1] / 1e3 - 0.01)
        rates.note_request(mode, ms[-1] / 1e3)
    return float(np.mean(ms[-300:]))


def test_hot_prefixes_are_read_whole_where_choosing_costs_more_than_it_saves() -> None:
    """Estimates of reading everything assumed caches with what is important of all prefixes; that
    those asked for most could lie there whole never came out, and requests took 1.2 times as
    long as if everything had been read."""
    chosen, whole = taken(DEAR, "sparse"), taken(DEAR, "exact")
    assert whole < 0.95 * chosen
    assert taken(DEAR) < 0.99 * whole  # rows of the others are still chosen


def test_a_machine_that_has_become_slower_does_not_speak_for_what_was_before() -> None:
    """The time requests took before the change was compared with their time now: a disk that gave a
    tenth less sent them back to the dearer way."""
    for seed in range(3):
        steady = taken(DEAR, seed=seed)
        assert steady < 1.01 * taken(DEAR, "exact", seed=seed)
        assert taken(DEAR, slower=1.1, seed=seed) < 1.1 * 1.01 * steady


def test_rows_are_chosen_of_all_prefixes_where_that_is_cheaper() -> None:
    chosen, whole = taken(CHEAP, "sparse"), taken(CHEAP, "exact")
    assert chosen < 0.9 * whole
    assert taken(CHEAP) < 1.03 * chosen


def test_a_disk_that_becomes_slow_is_not_waited_for_where_hot_prefixes_are_read_whole() -> None:
    """There reads are priced by a longer memory, which knew of none that came too late: each cold
    hit waited all of the limit, for good."""
    machine, rates, late, taken = Machine(24, *DEAR), Rates(), 0, False
    rates.note_forward("recompute", 5064, 0.5)
    popularity = 1 / np.arange(1, 25) ** 0.9
    asked = np.random.default_rng(0).choice(24, 2000, p=popularity / popularity.sum())
    for at, prefix in enumerate(asked.tolist()):
        stored = machine.stored(prefix)
        mode = rates.choose("sparse", 5064, stored).mode
        is_slow = at >= 700
        taken = taken or (is_slow and rates._regime.whole)
        if is_slow and mode != "recompute" and stored.cold_bytes:
            late += 1
            rates.note_forward("recompute", 5064, 0.5)
            rates.note_late(mode, stored, 10.5)
            continue
        seconds = machine.serve(prefix, mode) / 1e3
        if mode == "recompute":
            rates.note_forward(mode, 5064, seconds)
        else:
            rates.note_forward(mode, 64, 0.01)
            rates.note_read(mode, stored, seconds - 0.01)
        rates.note_request(mode, seconds)
    assert taken and late <= 20


def test_a_request_that_went_another_way_tells_nothing() -> None:
    """A prefix that was lost and recomputed counted as a read that took so long."""
    rates = Rates()
    stored = Stored(5000, 32, 1 << 20, 1 << 20, (span(1, 1 << 20),), 1 << 22)
    rates.note_forward("recompute", 5064, 0.5)
    for mode in ("sparse", "exact"):
        rates.note_forward(mode, 64, 0.01)
        rates.note_read(mode, stored, 0.2)
    rates.choose("sparse", 5064, stored)
    begun = rates._regime._n
    rates.note_request("recompute", 0.5)
    rates.note_request("sparse", 0.21)  # for no request that had a choice
    assert rates._regime._n == begun
    rates.choose("sparse", 5064, stored)
    rates.note_request("sparse", 0.21)
    assert rates._regime._n == begun + 1


def test_what_could_gain_too_little_to_turn_for_it_is_chosen_as_before() -> None:
    """In the second regime short prefixes were read whole at twice the time, under the 20 ms from
    which on a mode is left, and as no such request counted, none could turn it back."""
    rates = Rates()
    stored = Stored(64, 32, 1 << 20, 0, (span(1, 1 << 20),), 1 << 22)
    rates.note_forward("recompute", 74, 0.04)
    for mode, read_s in (("sparse", 0.006), ("exact", 0.015)):
        for _ in range(5):
            rates.note_forward(mode, 10, 0.001)
            rates.note_read(mode, stored, read_s)
    rates._regime.whole = True
    assert rates.choose("sparse", 74, stored).mode == "sparse"


@pytest.mark.usefixtures("one_thread")
def test_an_engine_reads_whole_what_its_caches_would_hold(tmp_path: Path) -> None:
    model, ids = model_of("llama"), request_ids()
    filled(model, tmp_path).close()
    config = CONFIG.model_copy(update={"mode": "auto", "guard": "off"})
    with hf.attach(model, tmp_path, config=config, policy=Recency(), store_new=False) as engine:
        engine.generate(ids, max_new_tokens=1)
        assert engine.last_request.mode == "sparse"
        rates = engine._modes.rates
        with engine.store.lease(ids[0].numpy()) as lease:
            n_bytes = sum(n for _, n in lease.span_bytes())
            assert lease.n_tokens == HIT and n_bytes == HIT * engine.store.geometry.token_bytes
            assert 0 < lease.cache_bytes() <= config.dram_bytes
            spans = tuple(Span(*one) for one in lease.span_bytes())
            assert rates._if_whole.cold(spans, lease.cache_bytes()) == 0
        rates.note_forward("recompute", HIT, 1e6)
        for mode in ("sparse", "exact"):
            rates.note_read(mode, Stored(HIT, 3, n_bytes, n_bytes), 1e3)
        rates._regime.whole = True  # as if that was found to be cheaper
        engine.generate(ids, max_new_tokens=1)
        assert engine.last_request.mode == "exact" and engine.last_request.hit_tokens == HIT
        assert "the caches hold whole what is asked for most" in engine.last_request.why
        counted = rates._regime._n
        rates._regime.tally(1.0, Expected(spans[-1], n_bytes, 1.0, None, 1.0))  # it may count
        assert rates._regime._n == counted + 1
        engine.generate(ids.flip(1), max_new_tokens=1)  # a miss is not charged to the hit before it
        assert engine.last_request.mode == "recompute" and rates._regime._n == counted + 1


@pytest.mark.usefixtures("one_thread")
def test_an_engine_tells_the_caches_what_it_read_this_once_and_what_it_passed_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = model_of("llama"), request_ids()
    filled(model, tmp_path).close()
    config = CONFIG.model_copy(update={"mode": "auto", "guard": "off"})
    noted = list[list[Note]]()
    monkeypatch.setattr(History, "request", lambda _, notes: noted.append([*notes]))
    with hf.attach(model, tmp_path, config=config, policy=Recency(), store_new=False) as engine:
        for choice, whole in (
            (Choice("exact", "", once=True), False), (Choice("exact", ""), True),
            (Choice("recompute", ""), False),
        ):  # fmt: skip
            monkeypatch.setattr(engine._modes.rates, "choose", lambda *_, c=choice, **__: c)
            engine.generate(ids, max_new_tokens=1)
            assert engine.last_request.mode == choice.mode
            wait_for_promotions(engine.store)
            notes = noted.pop()
            n_rows = sum(note.count for note in notes)
            assert not noted and n_rows == HIT * engine.store.geometry.n_layers
            assert {(note.chosen, note.whole, note.every_layer) for note in notes} == {
                (None, whole, whole)
            }
