"""Load or recompute: what is chosen from given rates, and that an engine follows the choice."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import perf_counter
from types import SimpleNamespace

import pytest
import torch
from conftest import wait_for_promotions
from masked_reference import HIT, filled, model_of, request_ids
from test_engine_hf import CONFIG

import impress
from impress.engines import hf, hf_output
from impress.engines.choice import Rates, decide, forced
from impress.engines.costs import KNOWN, MODES, Fit, Span, Stored
from impress.engines.hf_mode import Modes
from impress.engines.hf_output import FirstLogits
from impress.engines.hf_prefix import StoredPrefix
from impress.policy import Exact, Paper, Recency
from tiers.errors import ReadFailed

pytestmark = pytest.mark.usefixtures("one_thread")


# --- fitting --------------------------------------------------------------------------------------


def test_the_own_mode_is_left_only_for_a_gain_worth_it() -> None:
    """A tiny model recomputes in less time than a read takes to plan: no reason to switch."""
    allowed = ("exact", "recompute")
    small = decide("exact", allowed, {"exact": 0.020, "recompute": 0.005})
    assert small.mode == "exact" and "nothing else gains enough" in small.why
    assert decide("exact", allowed, {"exact": 0.40, "recompute": 0.37}).mode == "recompute"
    assert decide("exact", allowed, {"exact": 10.0, "recompute": 9.7}).mode == "exact"
    assert decide("exact", allowed, {"exact": 10.0, "recompute": 9.0}).mode == "recompute"


def test_a_fit_finds_the_cost_of_each_amount():
    fit = Fit(3)
    assert fit.seconds((1, 1, 1)) is None
    for amounts in ((2, 100, 0), (2, 900, 300), (7, 300, 300), (1, 50, 9), (3, 400, 0)):
        fit.note(amounts, 0.25 * amounts[0] + 0.01 * amounts[1] + 0.1 * amounts[2])
    assert fit.seconds((3, 500, 70)) == pytest.approx(0.75 + 5 + 7)


def test_a_choice_solves_nothing(monkeypatch):
    """Every estimate fitted the costs again, before a request's reads: milliseconds per request."""
    rates, stored = Rates(), Stored(1000, 4, 1 << 20, 1 << 19)
    for i in range(6):
        for mode in MODES:
            rates.note_forward(mode, 1000 + i, 0.5)
        for mode in ("sparse", "exact"):
            rates.note_read(mode, Stored(1000, 4, (1 << 20) + i, i << 10), 0.01)
    expected = rates.estimate(1064, stored)
    monkeypatch.setattr("numpy.linalg.solve", None)
    monkeypatch.setattr("numpy.linalg.det", None)
    assert rates.choose("sparse", 1064, stored).mode == "sparse"
    assert rates.estimate(1064, stored) == expected


def test_a_sample_that_is_cut_off_says_nothing(monkeypatch):
    """The sample counted before its costs were fitted: everything then seemed to cost nothing."""

    def cut(*_args):
        raise KeyboardInterrupt

    fit = Fit(2)
    with monkeypatch.context() as patched:
        patched.setattr("numpy.linalg.solve", cut)
        with pytest.raises(KeyboardInterrupt):
            fit.note((1, 200), 4.0)
    assert fit.seconds((1, 200)) is None


def test_samples_that_are_all_alike_give_a_rate():
    fit = Fit(2)
    for _ in range(5):
        fit.note((1, 200), 4.0)
    assert fit.seconds((1, 400)) == pytest.approx(8.0)


def test_costs_are_never_negative():
    falling, free = Fit(2), Fit(2)
    for amount, seconds in ((10, 5.0), (1000, 1.0)):
        falling.note((1, amount), seconds)
    assert 1.0 <= falling.seconds((1, 100_000)) <= 5.0
    steep = Fit(2)
    for amount, seconds in ((10, 0.0), (1000, 5.0)):
        steep.note((1, amount), seconds)
    assert steep.seconds((1, 1)) >= 0
    free.note((2, 0), 0.0)
    assert free.seconds((2, 100)) == 0.0


def test_later_samples_count_for_more():
    fit = Fit(2)
    fit.note((1, 100), 10.0)
    for _ in range(30):
        fit.note((1, 100), 1.0)
    assert fit.seconds((1, 100)) == pytest.approx(1.0, rel=0.15)


def test_one_stall_is_not_believed_and_a_disk_that_stays_slow_is():
    fit = Fit(2)
    for _ in range(10):
        fit.note((1, 100), 1.0)
    fit.note((1, 100), 50.0)
    assert fit.seconds((1, 100)) < 1.25
    for _ in range(60):
        fit.note((1, 100), 50.0)
    assert fit.seconds((1, 100)) == pytest.approx(50.0, rel=0.15)


def test_the_first_sample_of_all_counts_for_little_once_there_is_another():
    """The first read of a process met a disk that stood still: prefixes that lay in no cache were
    recomputed a hundred times, at what it takes to read two of them."""
    fit = Fit(3)
    fit.note((1, 100, 100), 8.0)
    assert fit.seconds((1, 100, 100)) == pytest.approx(8.0)
    for most in (2.1, 1.6, 1.4):
        fit.note((1, 100, 100), 1.0)
        assert fit.seconds((1, 100, 100)) < most


def test_a_cold_read_that_came_first_is_not_forgotten_for_warm_ones():
    fit = Fit(3)
    fit.note((1, 100, 100), 8.0)
    for _ in range(250):
        fit.note((1, 100, 0), 1.0)
    assert fit.seconds((1, 100, 100)) > 4.0


def test_the_first_cold_read_of_all_is_believed_however_many_warm_ones_went_before():
    """It counted as twice a warm one, so some ten cold prefixes were read at three times what
    computing them took."""
    fit = Fit(3)
    for _ in range(300):
        fit.note((1, 100, 0), 0.01)
    fit.note((1, 100, 100), 0.4)
    assert fit.seconds((1, 100, 100)) == pytest.approx(0.4, rel=0.05)
    fit.note((1, 100, 100), 4.0)  # a stall, now that it is known
    assert fit.seconds((1, 100, 100)) < 0.8


# --- deciding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", ["sparse", "exact"])
def test_the_policys_own_mode_is_taken_until_rates_are_known(own):
    for seconds in ({}, {"recompute": 0.001}, {own: 5.0}, dict.fromkeys(MODES)):
        choice = decide(own, MODES, seconds)
        said = "not all rates are known (" if any(seconds.values()) else "no rates are known yet"
        assert choice.mode == own and said in choice.why


@pytest.mark.parametrize("best", MODES)
def test_the_cheapest_is_taken_and_every_estimate_is_said(best):
    seconds = {mode: 0.002 if mode == best else 0.5 for mode in MODES}
    choice = decide("sparse", MODES, seconds)
    assert choice.mode == best and "\n" not in choice.why
    assert all(mode in choice.why for mode in MODES)
    assert "500.0 ms" in choice.why and f"{best} 2.0 ms" in choice.why


def test_what_the_policy_does_not_allow_is_never_taken():
    seconds = {"sparse": 0.001, "exact": 0.2, "recompute": 0.1}
    assert decide("exact", ("exact", "recompute"), seconds).mode == "recompute"


def test_a_mode_is_forced_as_far_as_the_policy_allows():
    assert forced("sparse", "sparse").mode == "sparse"
    assert forced("sparse", "exact").mode == "exact"
    for own in ("sparse", "exact"):
        assert forced("exact", own).mode == "exact"
        assert forced("recompute", own).mode == "recompute"


def stored(n_tokens=64, n_layers=2, n_bytes=1000, cold_bytes=1000):
    return Stored(n_tokens, n_layers, n_bytes, cold_bytes)


def test_each_mode_is_estimated_by_its_own_reads():
    rates = Rates()
    rates.note_forward("recompute", 1000, 10.0)
    rates.note_forward("recompute", 10, 0.1)
    for _ in range(2):
        rates.note_read("sparse", stored(), 0.25)
    rates.note_read("exact", stored(), 1.0)
    found = rates.estimate(2000, stored(1900, 2, 4000, 4000))
    assert found["recompute"] == pytest.approx(20.0)
    assert found["exact"] == pytest.approx(1.0 + 4.0)
    assert found["sparse"] == pytest.approx(1.0 + 1.0)


def test_many_short_forwards_do_not_say_what_a_long_one_takes():
    """An engine whose prompts all hit computes a few tokens each: their time per token is many
    times that of a whole prompt, and by it a prompt would never be recomputed again."""
    rates = Rates()
    rates.note_forward("recompute", 1000, 1.0)
    for _ in range(50):
        rates.note_forward("exact", 10, 0.5)
        rates.note_read("exact", stored(990), 0.1)
    found = rates.estimate(1000, stored(990))
    assert found["recompute"] == pytest.approx(1.0)
    assert found["exact"] == pytest.approx(0.6)


def test_what_a_sparse_request_does_beside_its_reads_is_its_own():
    """An exact request, tried now and then, charged its planning and copying of a whole prefix to
    the sparse ones too: where that was a third of recomputing, a fifth of these were recomputed.
    """
    rates = Rates()
    rates.note_forward("recompute", 1000, 0.063)
    rates.note_read("sparse", stored(990), 0.042)
    rates.note_forward("exact", 10, 0.023)  # exact's, used until there is a sparse one
    assert rates.estimate(1000, stored(990))["sparse"] == pytest.approx(0.065)
    for _ in range(10):
        rates.note_forward("sparse", 10, 0.005)
        rates.note_read("sparse", stored(990), 0.042)
    rates.note_forward("exact", 10, 0.023)
    rates.note_read("exact", stored(990), 0.062)
    found = rates.estimate(1000, stored(990))
    assert found["sparse"] == pytest.approx(0.047)
    assert found["exact"] == pytest.approx(0.085)


def test_a_prefix_in_the_caches_is_read_and_one_at_home_recomputed():
    """Estimates once followed the last few reads, whether or not these had found rows in the
    caches: after some cold reads, prefixes that lay in memory were recomputed too."""
    rates = Rates()
    rates.note_forward("recompute", 1000, 2.0)
    for cold in (0, 1000, 500, 1000, 0, 1000, 1000, 1000):
        rates.note_read("exact", stored(990, cold_bytes=cold), 0.5 + cold / 250)
    modes = [rates.choose("exact", 1000, stored(990, cold_bytes=c)).mode for c in (0, 1000, 100)]
    assert modes == ["exact", "recompute", "exact"]


@pytest.mark.parametrize("own", ["exact", "sparse"])
def test_a_cold_prefix_that_is_asked_for_again_is_read_though_recomputing_is_quicker(own):
    """Where one cold read takes longer than recomputing, nothing was read after a restart: prefixes
    asked for all the time lay in no cache, and were recomputed at three times what it takes to
    read them from there."""
    rates, modes, cold = Rates(), [], dict.fromkeys((b"hot", b"too"), 1000)
    rates.note_forward("recompute", 1000, 0.47)
    rates.note_forward("exact", 10, 0.01)
    for _ in range(KNOWN):
        rates.note_read(own, stored(990), 0.6)
    for key in [b"hot", b"too"] * 40:
        prefix = replace(stored(990, cold_bytes=cold[key]), spans=(Span(key, 1000),))
        choice = rates.choose(own, 1000, replace(prefix, cache_bytes=4000))
        modes.append(choice.mode if "measured again" not in choice.why else "")
        if choice.mode != "recompute":
            rates.note_read(choice.mode, prefix, 0.6 if cold[key] else 0.15)
            cold[key] = 0
    assert modes[:2] == ["recompute"] * 2  # nobody had asked for them before
    assert own in modes[2:6]
    assert modes[8:].count("recompute") == 0 and modes.count("") < 8


def test_a_cold_prefix_that_never_stays_in_the_caches_is_not_read_for_that_each_time():
    rates, modes = Rates(), []
    prefix = replace(stored(990), spans=(Span(b"x", 1000),), cache_bytes=4000)
    rates.note_forward("recompute", 1000, 0.47)
    for _ in range(KNOWN):
        rates.note_read("exact", prefix, 0.6)
    for _ in range(200):
        choice = rates.choose("exact", 1000, prefix)
        modes.append(choice)
        if choice.mode == "exact":
            rates.note_read("exact", prefix, 0.6)
    read = [choice.why for choice in modes if choice.mode == "exact"]
    assert 4 <= sum("it pays" in why for why in read) <= 8  # of 200
    assert len(read) <= 16


def test_only_a_habit_of_reading_everything_is_told_to_the_caches():
    """What was read whole to measure it, or because it happened to lie there, stayed whole in the
    caches at the cost of others' chosen rows; and was so read whole again."""
    rates = Rates()
    prefix = replace(stored(990, cold_bytes=0), spans=(Span(b"x", 1000),), cache_bytes=4000)
    rates.note_forward("recompute", 1000, 2.0)
    for mode, seconds in (("sparse", 0.4), ("exact", 0.1)) * KNOWN:
        rates.note_forward(mode, 10, 0.01)
        rates.note_read(mode, prefix, seconds)
    assert [rates.choose("exact", 1000, prefix).once for _ in range(3)] == [False] * 3
    found = [rates.choose("sparse", 1000, prefix) for _ in range(80)]
    by_mode = [choice for choice in found if choice.mode == "exact"]
    assert {choice.mode for choice in found} == {"exact", "sparse"}
    assert [choice.once for choice in by_mode[:32]] == [True] * 32
    assert not by_mode[-1].once  # by then nearly all requests read everything
    assert not any(choice.once for choice in found if choice.mode != "exact")
    for _ in range(5):
        rates.note_read("exact", prefix, 3.0)
    looks = [c for _ in range(200) if "measured" in (c := rates.choose("sparse", 1000, prefix)).why]
    assert looks and all(choice.once for choice in looks if choice.mode == "exact")


def test_a_way_long_passed_over_is_measured_again_and_less_often_each_time():
    rates = Rates()
    rates.note_forward("recompute", 100, 4.0)
    looked = []
    for at in range(400):
        choice = rates.choose("exact", 100, stored())
        if choice.mode == "exact":
            rates.note_read("exact", stored(), 9.0)
            looked.append(at)
    assert looked == [0, 17, 50, 115, 244, 373]
    assert "measured again" not in choice.why
    while (choice := rates.choose("exact", 100, stored())).mode != "exact":
        pass
    assert choice.why == "exact: measured again, not taken for 128 requests"
    for _ in range(60):  # reading has become fast
        rates.note_read("exact", stored(), 0.0)
    assert rates.choose("exact", 100, stored()).mode == "exact"


def test_looking_again_at_a_way_that_is_many_times_slower_costs_little():
    """It was measured again after 128 requests at the latest, whatever it cost: on a disk where
    reading takes twenty times as long as recomputing, requests took 1.15 of the best for ever."""
    rates, seconds = Rates(), []
    rates.note_forward("recompute", 4020, 0.5)
    for _ in range(6000):
        if rates.choose("exact", 4020, stored(4000)).mode == "exact":
            rates.note_forward("exact", 20, 0.0)
            rates.note_read("exact", stored(4000), 10.0)
            seconds.append(10.0)
        else:
            rates.note_forward("recompute", 4020, 0.5)
            seconds.append(0.5)
    late = seconds[2000:]
    assert max(late) == 10.0  # exact is still looked at
    assert sum(late) / len(late) <= 1.03 * 0.5
    # On a GPU, where reading a prefix took fifteen times as long as recomputing it, looks were
    # still 16, 32, 64 and 128 requests apart: a third of the time that the first hundred took.
    looked = [at for at, one in enumerate(seconds[:600]) if one == 10.0]
    assert looked == [0, 17, 255]


@pytest.mark.parametrize("computing_s", [0.5, 11.0])
@pytest.mark.parametrize("n_fast", [0, 30])
def test_a_read_that_came_too_late_is_not_waited_for_with_each_hit(n_fast, computing_s):
    """It told nothing, so a disk that had become slow was waited for in vain with every hit: for
    all of `read_timeout_s`, here 10 s, and then the prompt was computed. Told as these 10 s alone,
    it was so where computing takes longer."""
    rates, late, fast = Rates(), [], []
    rates.note_forward("recompute", 4020, computing_s)
    for _ in range(n_fast):
        rates.note_forward("exact", 20, 0.0)
        rates.note_read("exact", stored(4000), 0.01)
    for at in range(1000):  # prompts
        was_late = rates.choose("exact", 4020, stored(4000)).mode == "exact"
        rates.note_forward("recompute", 4020, computing_s)
        if was_late:
            rates.note_late("exact", stored(4000), 10.0 + computing_s)
            late.append(at)
    assert len(late) <= 12
    for at in range(2000):  # the disk is what it was
        if rates.choose("exact", 4020, stored(4000)).mode == "exact":
            rates.note_read("exact", stored(4000), 0.01)
            fast.append(at)
    assert fast[-100:] == [*range(1900, 2000)]


def test_a_first_read_that_stalled_does_not_keep_the_next_looks_away():
    """The wait until the next look was set by the very estimate that the look was to correct."""
    rates, looked = Rates(), []
    rates.note_forward("recompute", 4020, 0.5)
    for at in range(260):
        if rates.choose("exact", 4020, stored(4000)).mode == "exact":
            rates.note_forward("exact", 20, 0.0)
            rates.note_read("exact", stored(4000), 30.0 if not looked else 0.6)
            looked.append(at)
        else:
            rates.note_forward("recompute", 4020, 0.5)
    assert looked[:2] == [0, 17] and looked[2] - looked[1] <= 129


def modes_of(rates, seconds, recompute_s=0.48):
    """The modes of requests for one stored prefix, one after the other; `seconds` is what reading
    chosen rows takes in each; reading all rows takes two seconds."""
    modes = []
    for read_s in seconds:
        modes.append(rates.choose("sparse", 4020, stored(4000)).mode)
        if modes[-1] != "recompute":
            rates.note_forward(modes[-1], 20, 0.0)
            rates.note_read(modes[-1], stored(4000), read_s if modes[-1] == "sparse" else 2.0)
        else:
            rates.note_forward("recompute", 4020, recompute_s)
    return modes


def test_a_first_read_that_stalled_does_not_send_the_next_ones_away():
    """Forty requests and more were then recomputed, though reading was faster by a quarter."""
    rates = Rates()
    rates.note_forward("recompute", 4020, 0.48)
    assert modes_of(rates, [0.85] + [0.36] * 39)[:16] == ["sparse"] * 16


@pytest.mark.parametrize(("slower", "n_reads"), [(1.1, 5), (1.4, 3), (1.6, 2), (2.5, 1)])
def test_the_own_mode_is_left_the_sooner_the_slower_it_is(slower, n_reads):
    rates = Rates()
    rates.note_forward("recompute", 4020, 0.48)
    modes = modes_of(rates, [slower * 0.48] * 12)
    assert modes == ["sparse"] * n_reads + ["recompute"] * (12 - n_reads)


def test_a_way_that_has_become_fast_is_taken_when_that_was_seen_twice():
    """Its old cost counted as much as if it came from the last requests: a disk that was slow for
    an hour was not read for hundreds of requests after."""
    rates = Rates()
    rates.note_forward("recompute", 4020, 0.48)
    for _ in range(12):
        rates.note_read("sparse", stored(4000), 0.9)
    modes = modes_of(rates, [0.3] * 60)
    assert modes.index("sparse") == 17 and modes[-9:] == ["sparse"] * 9


def test_what_is_wanted_for_more_than_its_time_is_taken_every_fourth_time():
    """Where recomputing was faster, a guarded policy got one exact answer in 128 hits to earn trust
    by: 300 of them took 38,000 hits.
    """
    rates = Rates()
    rates.note_forward("recompute", 100, 0.001)
    looked = []
    for at in range(40):
        if rates.choose("exact", 100, stored(), own_is_wanted=True).mode == "exact":
            rates.note_read("exact", stored(), 9.0)
            looked.append(at)
    assert looked == [0, *range(4, 40, 4)]


def test_a_slow_first_forward_is_not_believed_for_good():
    """The first prompt of a process took ten times as long as the next would have; from then on
    all prompts hit, so reading is never compared with what computing costs by now.
    """
    rates = Rates()
    rates.note_forward("recompute", 100, 6.0)
    modes = []
    for _ in range(300):
        modes.append(rates.choose("exact", 100, stored(99)).mode)
        if modes[-1] == "exact":
            rates.note_forward("exact", 1, 0.01)
            rates.note_read("exact", stored(99), 2.0)
        else:
            rates.note_forward("recompute", 100, 0.6)
    assert modes[17] == "recompute" and modes[200:].count("exact") <= 1


def modes_asked(rates, n, recompute_s):
    """The modes of n requests for one stored prefix: .625 s to read, recompute_s to compute."""
    prefix, modes = stored(4000), []
    for _ in range(n):
        modes.append(rates.choose("exact", 4020, prefix).mode)
        if modes[-1] == "exact":
            rates.note_forward("exact", 20, 0.025)
            rates.note_read("exact", prefix, 0.6)
        else:
            rates.note_forward("recompute", 4020, recompute_s)
    return modes


def test_recomputing_is_tried_once_where_every_prompt_so_far_has_hit():
    """After a restart over a warm store its cost came from the 20 tokens that each hit computes:
    eight times that of a hit on paper, half of it in truth, and it was never tried."""
    modes = modes_asked(Rates(), 300, recompute_s=0.3)
    assert modes[:18] == ["exact"] * 17 + ["recompute"] and modes[200:].count("exact") <= 1


def asked_once(rates, n_tokens, prefix, read_s, recompute_s):
    """The mode chosen for a request, which then takes `read_s` or `recompute_s`."""
    mode = rates.choose("exact", n_tokens, prefix).mode
    if mode == "exact":
        rates.note_forward("exact", n_tokens - prefix.n_tokens, 0.03)
        rates.note_read("exact", prefix, read_s)
    else:
        rates.note_forward("recompute", n_tokens, recompute_s)
    return mode


def test_short_prompts_do_not_say_what_a_long_one_takes_to_compute():
    """After five health checks of 8 tokens, each token of a prompt of 8,256 seemed to take as long
    as each of theirs: 26 seconds in all, so it was never tried; in truth it took .4."""
    rates, modes = Rates(on_device=True), []
    for _ in range(10):
        rates.note_forward("recompute", 8, 0.025)
    long = Stored(8192, 32, 8192 << 17, 8192 << 17)
    for _ in range(200):
        rates.note_forward("recompute", 8, 0.025)
        modes.append(asked_once(rates, 8256, long, 1.2, 0.41))
    assert modes[:18].count("recompute") == 1 and modes[40:].count("exact") <= 3


def test_a_disk_that_was_slow_for_cold_reads_is_asked_again_beside_warm_ones():
    """The cost of cold bytes outlasts warm reads, but warm reads also counted as reads of cold
    bytes: no cold read was made any more."""
    rates, cold, warm = Rates(), stored(4000), stored(4000, cold_bytes=0)
    for _ in range(5):
        rates.note_forward("recompute", 4020, 0.12)
    modes = []
    for i in range(1600):
        prefix, read_s = (warm, 0.004) if i % 16 else (cold, 0.4 if i < 160 else 0.03)
        mode = asked_once(rates, 4020, prefix, read_s, 0.12)
        modes += [mode] if prefix is cold else []
    assert modes[5:10] == ["recompute"] * 5 and modes[60:].count("exact") > 35


def test_short_hits_do_not_keep_long_prompts_from_being_computed_once():
    rates, modes = Rates(), []
    short, long = Stored(64, 32, 64 << 17, 0), Stored(8192, 32, 8192 << 17, 8192 << 17)
    for _ in range(5):
        rates.note_forward("recompute", 100, 0.03)
    for i in range(300):
        n, prefix, read_s = (100, short, 0.001) if i % 2 else (8256, long, 1.2)
        mode = asked_once(rates, n, prefix, read_s, 5e-5 * n)
        modes += [] if i % 2 else [mode]
    assert modes[40:].count("recompute") > 100


def test_what_cold_bytes_cost_is_known_after_any_number_of_warm_reads():
    """After 240 warm reads a cold prefix seemed to cost what a warm one does, so each one was read,
    at four times the cost of computing it: a surprise each time, and not believed."""
    rates, cold, warm = Rates(), stored(4000), stored(4000, cold_bytes=0)

    def ask(prefix, read_s):
        return asked_once(rates, 4020, prefix, read_s, 0.12)

    for i in range(20):
        rates.note_forward("recompute", 4020, 0.12)
        ask(*((cold, 0.4) if i % 2 else (warm, 0.004)))
    modes = []
    for _ in range(40):
        assert [ask(warm, 0.004) for _ in range(300)].count("exact") > 290
        assert rates.estimate(4020, cold)["exact"] > 0.3
        modes.append(ask(cold, 0.4))
    assert modes.count("exact") <= 2  # to be measured again


def test_what_a_device_does_first_in_a_mode_says_nothing_of_what_it_does_next():
    """A device's first forward loads every kernel: when a process's first prompt took two seconds,
    hits of 80 ms seemed so much faster that recomputing, by then 30 ms, was not tried again."""
    rates, choices = Rates(on_device=True), []
    rates.note_forward("recompute", 4020, 2.0)
    for _ in range(300):
        choices.append(rates.choose("exact", 4020, stored(4000)))
        if choices[-1].mode == "exact":
            rates.note_forward("exact", 20, 0.02)
            rates.note_read("exact", stored(4000), 0.06)
        else:
            rates.note_forward("recompute", 4020, 0.03)
    modes = [choice.mode for choice in choices]
    assert modes.index("recompute") == 18  # one of the first two hits takes an unknown time
    assert choices[18].why == "recompute: measured again, not taken for 16 requests"
    assert modes[18:].count("exact") <= 5


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_engine_learns_from_its_first_forward_on_the_host_only(device):
    config = SimpleNamespace(_attn_implementation="sdpa")
    model = SimpleNamespace(device=torch.device(device), config=config)
    rates = Modes(model, SimpleNamespace(config=impress.Config()), Exact()).rates
    rates.note_forward("recompute", 100, 2.0)
    known = rates.estimate(100, stored())["recompute"]
    assert known == (pytest.approx(2.0) if device == "cpu" else None)


def test_recomputing_that_is_slow_indeed_is_tried_once():
    assert modes_asked(Rates(), 300, recompute_s=9.0).count("recompute") == 1


def test_recomputing_some_times_slower_than_reading_is_tried_once_more():
    """It was tried until five forwards had said so: five requests of 3.4 times the time."""
    rates = Rates()
    rates.note_forward("recompute", 4020, 2.1)
    assert modes_asked(rates, 600, recompute_s=2.1).count("recompute") == 1


def test_recomputing_far_slower_than_reading_is_not_tried_again():
    rates = Rates()
    rates.note_forward("recompute", 100, 9.0)
    for _ in range(300):
        assert rates.choose("exact", 100, stored(99)).mode == "exact"
        rates.note_forward("exact", 1, 0.01)
        rates.note_read("exact", stored(99), 2.0)


def test_what_the_policy_does_not_allow_is_not_measured_either():
    rates = Rates()
    rates.note_forward("recompute", 100, 9.0)
    assert {rates.choose("exact", 100, stored()).mode for _ in range(300)} == {"exact"}


# --- an engine ------------------------------------------------------------------------------------


def attach_in(mode, model, path, **options):
    config = CONFIG.model_copy(update={"mode": mode, "guard": "off"})
    return hf.attach(model, path, config=config, **options)


@pytest.mark.parametrize("policy", [Exact(), Recency()], ids=lambda policy: policy.name)
@pytest.mark.parametrize("mode", MODES)
def test_config_forces_a_mode(tmp_path, mode, policy):
    model, ids = model_of("llama"), request_ids()
    filled(model, tmp_path).close()
    with attach_in(mode, model, tmp_path, policy=policy) as engine:
        engine.generate(ids, max_new_tokens=2)
        request = engine.last_request
    assert request.mode == ("exact" if (mode, policy) == ("sparse", Exact()) else mode)
    assert request.hit_tokens == (0 if mode == "recompute" else HIT)
    assert request.why == f"{request.mode}: Config.mode is {mode!r}"


@pytest.mark.parametrize("policy", [Exact(), Paper()], ids=lambda policy: policy.name)
def test_auto_takes_the_policys_own_mode_first_and_then_the_cheapest(tmp_path, policy):
    model, ids = model_of("llama"), request_ids()
    filled(model, tmp_path).close()
    with attach_in("auto", model, tmp_path, policy=policy, store_new=False) as engine:
        bare = model.generate(ids, max_new_tokens=2, do_sample=False)
        engine.generate(ids, max_new_tokens=2)
        own = "exact" if policy == Exact() else "sparse"
        assert engine.last_request.mode == own
        # As if computing had become slow, then reading.
        engine._modes.rates.note_forward("recompute", 100_000, 1e6)
        engine.generate(ids, max_new_tokens=2)
        assert engine.last_request.mode != "recompute"
        for _ in range(60):
            engine._modes.rates.note_forward("recompute", 10_000, 1e-9)
        engine._modes.rates.note_read(own, stored(HIT, 3, 1000, 1000), 1e6)
        out = engine.generate(ids, max_new_tokens=2, do_sample=False)
        request = engine.last_request
        assert (request.mode, request.hit_tokens, request.lost) == ("recompute", 0, "")
        assert request.why.startswith("recompute: cheapest by estimate (")
        assert torch.equal(out, bare)
        wait_for_promotions(engine.store)
        assert engine.store.buffers.used_bytes == 0


def test_an_engine_does_not_wait_for_a_disk_that_stays_slow_with_each_hit(tmp_path, monkeypatch):
    opened, told, note_late = [], [], Rates.note_late

    def late(prefix, policy):
        opened.append(prefix)
        raise impress.PrefixLost("late", "told to be")

    def noted(rates, mode, stored, seconds):
        told.append(seconds)
        note_late(rates, mode, stored, 10.0 + seconds)

    model, ids = model_of("llama"), request_ids()
    filled(model, tmp_path).close()
    with attach_in("auto", model, tmp_path, store_new=False) as engine:
        monkeypatch.setattr(StoredPrefix, "open", late)
        monkeypatch.setattr(FirstLogits, "since_turn_s", lambda first: 0.0)
        monkeypatch.setattr(Rates, "note_late", noted)
        requests = []
        for _ in range(10):
            engine.generate(ids, max_new_tokens=1)
            requests.append(engine.last_request)
    assert len(opened) == 1
    assert [request.lost for request in requests] == ["late"] + [""] * 9
    assert told[0] > 0  # what it took to compute is of the trial's cost, too
    assert all(request.mode == "recompute" for request in requests)


def test_a_miss_says_so(tmp_path):
    with attach_in("auto", model_of("llama"), tmp_path) as engine:
        engine.generate(request_ids(), max_new_tokens=1)
        assert engine.last_request.why == "recompute: nothing of the prompt is stored"


def test_a_miss_says_which_it_was(tmp_path, monkeypatch):
    """All of these said that nothing of the prompt was stored."""
    ids = request_ids()
    with hf.attach(model_of("llama"), tmp_path, config=CONFIG) as engine:

        def why(asked):
            engine.generate(asked, max_new_tokens=1)
            assert engine.last_request.hit_tokens == 0
            return engine.last_request.why

        assert why(ids[:, :64]) == "recompute: the prompt has no whole window before its last token"
        assert why(ids) == "recompute: nothing of the prompt is stored"
        engine.flush()
        both = torch.cat([ids, ids.flip(1)])
        assert why(both) == "recompute: not every prompt of the batch is stored"
        engine.flush()
        with monkeypatch.context() as patched:
            patched.setattr(engine.store._pool, "is_stuck", lambda _limit_s: True)
            assert why(ids) == "recompute: the store's disk does not answer"
        failed = {span: ReadFailed("eio", "no") for span in range(100)}
        monkeypatch.setattr(engine.store.tables, "of", lambda *_args: failed)
        assert why(ids) == "recompute: what is stored of the prompt could not be read"


def test_the_wait_for_a_turn_is_in_the_ttft_and_in_no_estimate(tmp_path, monkeypatch):
    """Under load hits seemed as slow as the requests before them, and were recomputed."""
    held_s, late_s, called = 3600.0, [0.0], threading.Event()

    def clock():
        now = perf_counter() + late_s[0]
        called.set()
        return now

    for module in (hf, hf_output):
        monkeypatch.setattr(module, "perf_counter", clock)
    with filled(model_of("llama"), tmp_path, mode="auto") as engine, ThreadPoolExecutor(1) as other:
        with engine._turn.request():
            called.clear()
            hit = other.submit(engine.generate, request_ids(), max_new_tokens=1)
            assert called.wait(60)
            late_s[0] += held_s
        hit.result(60)
        assert engine.last_request.mode == "exact"
        assert engine.last_request.ttft_ms > held_s * 1e3
        estimates = engine._modes.rates.estimate(HIT + 80, stored(HIT, 3, 1, 0))
        assert estimates["exact"] < held_s / 2
        assert estimates["recompute"] < held_s / 2


class OnDevice:
    """Scores that a device has yet to compute."""

    is_cuda, device = True, torch.device("cuda", 0)


def test_the_first_token_is_there_when_the_device_has_computed_it(monkeypatch):
    """The clock was read when the work was launched: recomputing seemed to cost next to nothing."""
    now = [10.0]

    def synchronize(device):
        assert device == OnDevice.device
        now[0] += 2

    monkeypatch.setattr(hf_output, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    first = hf_output.FirstLogits(called=9.0)
    for _ in range(3):  # for later tokens it does not wait
        assert isinstance(first(torch.zeros(1, 1), OnDevice()), OnDevice)
    assert (first.ttft_ms, first.turn_ms, now) == (3000, 2000, [12.0])


def test_an_unknown_mode_is_refused():
    with pytest.raises(impress.ImpressError, match="mode"):
        impress.Config(mode="fastest")
