"""The guard's ledger: a bound against brute force, states against a plain list, values to disk."""

from __future__ import annotations

import cmath
import logging
import math
import os
import random
import subprocess
import sys
import tempfile
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from fractions import Fraction
from functools import cached_property, lru_cache, partial, wraps
from threading import Condition
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from weakref import ref

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import impress
from impress.policy import AllHeads, Exact, Paper, Quality, Recency, StaticH2O
from impress.quality.guard import STATES, Ledger, Rerun, Weighed, upper_limit
from impress.quality.ledgers import Entry, Ledgers, decode, decoded, encode, target_of
from impress.quality.names import name_of
from impress.selection import probes
from impress.selection.identify import select

NAMESPACE = bytes(range(32))
CLEAN, OVER = Weighed(0.05, 0.05), Weighed(0.4, 0.05)


def at_most(k: int, n: int, p: Fraction) -> Fraction:
    """P(X ≤ k), summed in exact fractions."""
    return sum((math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1)), Fraction(0))


# --- the bound ------------------------------------------------------------------------------------


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_limit_is_where_so_few_would_be_seen_in_one_case_of_twenty(seen):
    k, n = seen
    limit = upper_limit(k, n)
    if k == n:
        assert limit == 1
        return
    assert k / n < limit < 1
    step = Fraction(1, 10**9)
    assert at_most(k, n, Fraction(limit) - step) > Fraction(1, 20)
    assert at_most(k, n, Fraction(limit) + step) < Fraction(1, 20)


@pytest.mark.parametrize("n", [1, 5, 300, 5000])
def test_without_an_exceedance_it_is_the_rule_of_three(n):
    assert upper_limit(0, n) == pytest.approx(1 - 0.05 ** (1 / n), rel=1e-9)
    assert upper_limit(0, 0) == 1


def test_it_covers_as_often_as_it_says():
    """Whatever share a ledger has, at least 95 % of what it may see gives a limit not below it."""
    n = 30
    limits = [upper_limit(k, n) for k in range(n + 1)]
    for p in (Fraction(i, 50) for i in range(1, 50)):
        chances = [at_most(k, n, p) - (at_most(k - 1, n, p) if k else 0) for k in range(n + 1)]
        covered = sum(
            (c for c, limit in zip(chances, limits, strict=True) if limit >= p), Fraction()
        )
        assert covered >= Fraction(95, 100)


def test_300_clean_ones_rule_out_one_in_a_hundred_and_the_second_over_ends_trust():
    ledger = Ledger(0.1, 300)
    for _ in range(300):
        assert ledger.state == "earning"
        ledger.note(CLEAN)
    assert ledger.state == "trusted" and ledger.bound < 0.01
    assert ledger.note(OVER) == "" and ledger.state == "trusted"
    assert "back to exact: 2 of the last 300" in ledger.note(OVER)


def test_trust_is_earned_by_one_in_five_of_those_that_miss_too_much_in_one_of_a_hundred():
    """It was called a 95 % limit, which it is not for any 300 in a row, looked at after each."""
    draw, n_ledgers, n_trusted = random.Random(0), 200, 0
    for _ in range(n_ledgers):
        ledger = Ledger(0.1, 300)
        for _ in range(600):
            ledger.note(OVER if draw.random() < 0.01 else CLEAN)
            if ledger.state == "trusted":
                n_trusted += 1
                break
    # a run of 300 begins with the first shadow, or after one of the next 300 that is not clean
    said = 0.99**300 * (1 + 300 * 0.01)
    assert said == pytest.approx(0.196, abs=5e-4)
    assert n_trusted / n_ledgers == pytest.approx(said, abs=0.085)  # 3 standard deviations


@pytest.mark.parametrize("n_wanted", [1, 2, 3, 4, 5, 300])
def test_trust_ends_however_few_shadows_are_wanted(n_wanted):
    """With four or fewer wanted, no share over could end it: a bound is never above 1."""
    ledger = Ledger(0.1, n_wanted)
    for _ in range(n_wanted):
        ledger.note(CLEAN)
    assert ledger.state == "trusted"
    for _ in range(n_wanted):
        ledger.note(OVER)
    assert ledger.state == "exact"


# --- the states -----------------------------------------------------------------------------------


@given(st.integers(1, 6), st.lists(st.booleans(), max_size=80))
def test_states_follow_a_plain_list(n_wanted, shadows):
    ledger = Ledger(0.1, n_wanted)
    state, recent, sent_back = "earning", [], 0
    for over in shadows:
        line = ledger.note(OVER if over else CLEAN)
        recent = [*recent, over][-n_wanted:]
        before = state
        if state != "trusted":
            if len(recent) == n_wanted and not any(recent):
                state = "trusted"
        elif upper_limit(sum(recent), len(recent)) > min(2 * upper_limit(0, n_wanted), 0.975):
            state, recent, sent_back = "exact", [], sent_back + 1
        assert (ledger.state, list(ledger.recent), ledger.n_sent_back) == (state, recent, sent_back)
        assert bool(line) == (state != before)
    assert ledger.n_shadows == len(shadows) and ledger.n_exceeded == sum(shadows)


@pytest.mark.parametrize(
    ("target", "most"), [(0.1, 0.15), (0.05, 0.075), (0.0, 0.01), (0.01, 0.02)]
)
def test_what_is_clean_has_a_tolerance(target, most):
    ledger = Ledger(target, 5)
    assert ledger.most_mass == pytest.approx(most)
    ledger.note(Weighed(most - 1e-6, most))
    assert ledger.n_exceeded == 0
    ledger.note(Weighed(most + 1e-6, most + 1e-6))
    assert (ledger.n_exceeded, ledger.n_clean, ledger.n_understated) == (1, 0, 0)


def test_what_is_not_known_is_not_clean_and_no_estimate_is_no_lie():
    ledger = Ledger(0.1, 5)
    ledger.note(Weighed(math.nan, 0.0))
    assert (ledger.n_exceeded, ledger.worst_mass, ledger.n_understated) == (1, 1.0, 1)
    ledger.note(Weighed(0.05, math.nan))
    ledger.note(Weighed(0.05, 0.01))
    assert (ledger.n_clean, ledger.n_understated) == (2, 2)


def trusted(n_wanted: int = 1) -> Ledger:
    ledger = Ledger(0.1, n_wanted)
    for _ in range(n_wanted):
        ledger.note(CLEAN)
    assert ledger.state == "trusted"
    return ledger


def test_earning_is_exact_and_every_request_a_shadow():
    ledger = Ledger(0.1, 3)
    assert {ledger.decide(0.01) for _ in range(20)} == {("exact", True, False, True)}
    assert ledger.said() == "earning: 0 of 3 clean shadows"
    for _ in range(6):  # trust will not be earned: from here on no request is slowed for it
        ledger.note(OVER)
    assert ledger.decide(0.01) == ("exact", True, False, False)
    unobserved = Ledger(0.1, 3, n_dropped=6)  # nor where shadows come to nothing
    assert not unobserved.decide(0.01).wanted


def test_what_was_sent_back_earns_anew_at_the_same_pace():
    """Shadows of its earlier life were counted as tries: where recomputing was faster, a policy
    sent back was no longer wanted at all, and hardly ever seen clean again."""
    ledger = trusted(5)
    for weighed in [CLEAN] * 10 + [OVER] * 3:
        ledger.note(weighed)
    assert ledger.state == "exact"
    ledger = decode(encode(Entry("a", ledger))).ledger
    for _ in range(10):
        assert ledger.decide(0.01).wanted
        ledger.note(OVER)
    assert not ledger.decide(0.01).wanted


@settings(max_examples=20)
@given(st.binary(max_size=80))
def test_a_share_of_trusted_requests_is_watched_the_same_every_time(salt):
    first, second = trusted(), trusted()
    ways = [first.decide(0.1, salt) for _ in range(500)]
    assert ways == [second.decide(0.1, salt) for _ in range(500)]
    assert {way.mode for way in ways} == {"sparse"}
    assert 10 <= sum(way.shadow for way in ways) <= 90  # 50 expected, 6 standard deviations
    assert all(way.shadow for way in ways if way.rerun)


def test_shares_of_none_and_all_and_one_rerun_in_twenty():
    assert not any(trusted().decide(0.0).shadow for _ in range(100))
    ledger = trusted()
    ways = [ledger.decide(1.0) for _ in range(2000)]
    assert all(way.shadow for way in ways)
    assert 40 <= sum(way.rerun for way in ways) <= 160  # 100 expected, 6 standard deviations


# --- values ---------------------------------------------------------------------------------------

COUNTS = st.integers(0, 1 << 60)
LEDGERS = st.builds(
    Ledger, st.floats(0, 1), st.integers(1, 1 << 31), st.sampled_from(STATES),
    COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, st.floats(0, 1), COUNTS, st.floats(0, 1e9),
    COUNTS, COUNTS, st.lists(st.booleans(), max_size=70).map(deque), COUNTS,
)  # fmt: skip


@settings(max_examples=30)
@given(LEDGERS, st.text(st.characters(exclude_categories=["Cs"]), max_size=50))
def test_a_value_gives_the_ledger_back_and_a_damaged_one_nothing(ledger, name):
    raw = encode(Entry(name, ledger))
    assert decode(raw) == Entry(name, ledger)
    for at in range(0, len(raw), 7):
        assert decode(raw[:at]) is None
        assert decode(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :]) is None


@pytest.mark.parametrize("ledger", [
    Ledger(0.1, 3, n_shadows=4, n_dropped=2, recent=deque([True])),
    Ledger(0.1, 3, "trusted", 900, 50, recent=deque([False] * 3)),
    Ledger(0.1, 3, "exact", 900, 50, 4, n_dropped=2, n_sent_back=1, n_before=52),
])  # fmt: skip
def test_a_value_of_before_tries_were_counted_anew_keeps_its_trust(ledger):
    """Version 1 did not say how many came before: a policy sent back has all its tries again."""
    raw = encode(Entry("a", ledger))[:-8]
    old = b"\x01\x00" + raw[2:112] + raw[120:]
    assert decode(old + xxhash.xxh3_64_intdigest(old).to_bytes(8, "little")).ledger == ledger


@given(st.binary(max_size=300))
def test_no_bytes_are_mistaken_for_a_ledger(raw):
    assert decode(raw) is None and decode(None) is None


def test_ledgers_are_kept_by_policy_and_settings_and_begin_again_under_others():
    saved, asked = {}, []
    ledgers = Ledgers(saved.get, lambda: asked.append(1))
    config = impress.Config(guard_shadows=2)
    keys = [ledgers.open(NAMESPACE, p, config) for p in (Quality(0.1), Quality(0.2), Paper())]
    assert len(set(keys)) == 3 and all(key.startswith(NAMESPACE) for key in keys)
    for _ in range(2):
        ledgers.note(keys[0], CLEAN)
    ledgers.note_rerun(keys[0], Rerun(0.5, 3, 8))
    ledgers.dropped(keys[0])
    assert asked == [1]  # trust is worth a save at once
    saved.update(ledgers.dump())
    assert list(saved) == [keys[0]] and ledgers.dump() == {}
    again = Ledgers(saved.get)
    assert again.open(NAMESPACE, Quality(0.1), config) == keys[0]
    (shown,) = again.snapshot()
    assert shown == ledgers.snapshot()[0] == decoded(saved.items())[0]
    assert (shown["state"], shown["reruns"], shown["flips"], shown["dropped"]) == (
        "trusted",
        1,
        3,
        1,
    )
    for other in (impress.Config(guard_shadows=3), impress.Config()):
        fresh = Ledgers(saved.get)
        assert fresh.said(fresh.open(NAMESPACE, Quality(0.1), other)).startswith("earning: 0 of")
    damaged = Ledgers({keys[0]: b"junk"}.get)
    assert damaged.said(damaged.open(NAMESPACE, Quality(0.1), config)).startswith("earning")


def test_a_policy_without_a_bound_has_the_operators():
    ledgers, config = Ledgers(), impress.Config(guard_missing_mass=0.3)
    for policy in (Quality(0.07), Paper(), Recency()):
        ledgers.open(NAMESPACE, policy, config)
    assert [shown["target"] for shown in ledgers.snapshot()] == [0.07, 0.3, 0.3]


def test_a_name_is_the_same_in_every_process():
    class Plain:
        name = "plain"

    assert " at 0x" not in name_of(Plain()) and name_of(Plain()).endswith("Plain plain")
    assert name_of(Paper(keep=0.5)).startswith("Paper(keep=0.5")


@pytest.mark.parametrize(
    "policy", [Quality(np.float64(0.05)), Paper(keep=0.5), Exact(), AllHeads(), StaticH2O()]
)
def test_a_name_that_trust_was_earned_under_stays(policy):
    assert name_of(policy) == repr(policy)


def test_a_setting_that_leads_back_through_a_module_is_told_at_once():
    """All of its weights were copied and digested at each turn, until Python gave up; and the name
    then went by how deep the caller was."""
    made, told = module(), []
    made[0].helper, real = Plain(made), made.state_dict
    made.state_dict = lambda: told.append(1) or real()
    one, other = name_of(Top(made)), name_of(Top(made))
    assert one != other and not told
    both = [
        name_of(Top(value)) for value in (np.mean, logging.getLogger("a"), datetime(2026, 1, 1))
    ]
    assert both == [
        name_of(Top(v)) for v in (np.mean, logging.getLogger("a"), datetime(2026, 1, 1))
    ]


def test_settings_that_cannot_be_told_in_full_are_told_as_they_say():
    turns: list[Any] = []
    turns.append(turns)
    turning = [name_of(Learned(turns)) for _ in range(2)]
    assert turning[0] != turning[1]  # a value that refers to itself may be another each time
    assert all(name.startswith("Learned ") for name in turning)
    assert name_of(Top(np.float32)).startswith(f"{__name__}.Top top keep=numpy.float32 code ")
    assert "device='meta'" in name_of(Top(torch.empty(2, device="meta")))


class Top:
    """A user's policy that is not a dataclass."""

    name = "top"

    def __init__(self, keep):
        self.keep = keep


class Slotted(Top):
    __slots__ = ("page",)

    def __init__(self, page):
        super().__init__(0.5)
        self.page = page


class Own(Recency):
    """A subclass of a dataclass, whose repr and slots it inherits."""

    def __init__(self, page, keep=0.25):
        super().__init__(keep)
        object.__setattr__(self, "page", page)


@dataclass(frozen=True)
class Learned:
    """A policy that has learnt something."""

    weights: Any
    name = "learned"


@dataclass(frozen=True, repr=False)
class Quiet:
    page: int
    name = "quiet"


@dataclass(frozen=True)
class Layered:
    """A user's policy, with a share for each layer."""

    keep: tuple[float, ...]
    name = "layered"
    needs_suffix_lse = True
    probe = None


class Pair(NamedTuple):
    weights: Any
    keep: float


@dataclass(frozen=True)
class Called:
    page: int
    lazy: Any = field(init=False, repr=False)
    name = "called"

    def __repr__(self):
        return "<called>"


def sketched(page):
    """As impress's own hold their codec: in a field that is no argument and is not shown."""

    @dataclass(frozen=True)
    class Sketched:
        name: str = "sketched"
        probe: str = field(default=f"int{page}-v1", init=False, repr=False)

    return Sketched()


@dataclass(frozen=True)
class Loaded:
    path: str = "the same"
    name = "loaded"


def loaded(page):
    """A policy that, when it is made, reads the data it chooses by."""
    made = Loaded()
    object.__setattr__(made, "table", page)
    return made


def module(keep=0.5, rows=1.0):
    made = torch.nn.Sequential(torch.nn.Identity())
    made[0].keep = keep
    made[0].register_buffer("rows", torch.tensor([rows]), persistent=False)
    return made


@dataclass(frozen=True)
class Hidden:
    weights: Any = field(repr=False)
    name = "hidden"


def weights(page, n=2048):
    made = np.zeros((n // 64, 64), dtype=np.float32)
    made[n // 128, 10] = 1 + 1e-6 * page
    return made


def learnt(page):
    made = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(made.weight, page)
    torch.nn.init.zeros_(made.bias)
    return made


class Plain:
    """Without a repr of its own: the default one gives its address."""

    def __init__(self, page):
        self.page = page


class Shares(Mapping):
    def __init__(self, rows):
        self.rows = rows

    def __getitem__(self, key):
        return self.rows[key]

    def __iter__(self):
        return iter(self.rows)

    def __len__(self):
        return len(self.rows)


class Items(list):
    def __repr__(self):
        return "Items()"


class Array(np.ndarray):
    """One that can be given attributes."""


class Marks(frozenset):
    def __init__(self, page):
        self.page = page

    def __new__(cls, page):
        return super().__new__(cls)


class Most(float):
    def __repr__(self):
        return "most"


class Kind(Enum):
    LOW, HIGH = 1, 2

    def __repr__(self):
        return "a kind"


class Page:
    """Asked for, it keeps its size: computed, and no setting."""

    def __init__(self, page):
        self.page = page

    @cached_property
    def size(self):
        return np.arange(self.page)

    @property
    def lazy(self):
        _ = self.page == 1 and self.size
        return self


class Rule(torch.nn.Linear):
    """A module that keeps a setting where no module's own are."""

    __slots__ = ("page",)


def private(page):
    made = torch.nn.Identity()
    made._page = page
    return made


def slotted(page):
    made = torch.nn.utils.skip_init(Rule, 1, 1, bias=False)
    torch.nn.init.zeros_(made.weight)
    made.page = page
    return made


def of_a_class(page, *bases):
    """A class that keeps a setting, and leads back to itself."""

    class Shared(*bases):
        keep = weights(page)

    Shared.all = [Shared]
    return Shared


def of_an_enum(page):
    class Which(Enum):
        ONE = page

    return Which


def beside(holder, page):
    """The holder, with an attribute that it has not by itself."""
    holder.page = page
    return holder


class Stateful(Plain):
    """What it saves is not what it chooses by."""

    def state_dict(self):
        return {}


def with_marked_parameter(page):
    made = learnt(1)
    made.weight.page = page
    return made


def doubled(function):
    @wraps(function)
    def twice(x):
        return 2 * function(x)

    return twice


def objects(*held):
    made = np.empty(len(held), dtype=object)
    made[:] = held
    return made


def recurrent(page):
    made = torch.nn.LSTM(2, 2)
    for parameter in made.parameters():
        torch.nn.init.constant_(parameter, page)
    return made


def in_a_file(page):
    with tempfile.NamedTemporaryFile() as file:
        np.save(file, weights(page))
        file.flush()
        return np.load(file.name, mmap_mode="r")


def compiled(rows):
    made = torch.tensor(rows)
    torch._dynamo.mark_dynamic(made, 0)
    return made


def kept_alive(value, alive=[]):  # noqa: B006
    alive.append(value)
    return value


class Said(Plain):
    """With one that shows nothing of what it holds, as a fitted estimator's."""

    def __repr__(self):
        return "Said()"


@pytest.mark.parametrize(
    "make",
    [
        Top, Slotted, Own, lambda keep: Own(1, 1 / keep),
        lambda page: Learned(weights=weights(page)),
        lambda page: Learned(weights={"of": [(torch.tensor(weights(page, 128)),)]}),
        lambda page: Top(weights(page)),
        lambda page: Top(Pair(weights(page), 0.5)),
        lambda page: Top(OrderedDict(of=Learned(weights(page)))),
        lambda page: Hidden(weights(page)), Called, Hidden, sketched, loaded,
        lambda page: Top(module(keep=page)), lambda page: Top(module(rows=page)),
        lambda page: Top(learnt(page)), lambda page: Learned(learnt(page)),
        lambda page: Learned([Plain(page)]), lambda page: Top(Plain(learnt(page))),
        lambda page: Quiet(page=page),
        lambda page: Learned(Said(page)), lambda page: Top([Said(weights(page))]),
        lambda page: Learned(loaded(page)), lambda page: Learned(Called(page)),
        lambda page: Top(sketched(page)), lambda page: Top(deque([weights(page)])),
        lambda page: Top(SimpleNamespace(rows=weights(page))),
        lambda page: Top(deque(maxlen=page)), lambda page: Top(random.Random(page)),
        lambda page: Top(Shares({"of": weights(page)})), lambda page: Top(Items([page])),
        lambda page: Top(defaultdict(lambda: page, {1: weights(1)})), lambda page: Top(Most(page)),
        lambda page: Top([math.sqrt, cmath.sqrt][page - 1]), lambda page: Top(Kind(page)),
        lambda page: Top(torch.Generator().manual_seed(page)), lambda page: Top(slice(page)),
        lambda page: Top(Page(page).lazy), lambda page: Top(lru_cache(lambda: page)),
        lambda page: Top(private(page)), lambda page: Top(slotted(page)),
        lambda page: Top(of_a_class(page, torch.nn.Module)()), lambda page: Top(Stateful(page)),
        lambda page: Top(of_a_class(page)), lambda page: Learned([of_a_class(page)()]),
        lambda page: Top(of_a_class(page, tuple)()), lambda page: Top({of_a_class(page)}),
        lambda page: Top(of_an_enum(page).ONE), lambda page: Top(of_an_enum(page)),
        lambda page: Top(beside(of_an_enum(1).ONE, page)),
        lambda page: Top(objects(weights(page), 1)),
        lambda page: Top(np.array([(weights(page),)], [("of", "f4", (32, 64))])),
        lambda page: Top(np.array([(weights(page),)], [("of", "f4", (32, 64))])[0]),
        lambda page: Top(beside(lambda x: x, page)), lambda page: Top(beside(partial(max), page)),
        lambda page: Top(doubled(beside(lambda x: x, page))),
        lambda page: Top(beside(weights(1).view(Array), page)), lambda page: Top(Marks(page)),
        lambda page: Top(beside(torch.nn.Parameter(torch.ones(1)), page)),
        lambda page: Top(with_marked_parameter(page)),
        lambda page: Top(recurrent(page)), lambda page: Top(in_a_file(page)),
        lambda page: Top(in_a_file(page)[8:]), lambda page: Top(compiled(weights(page))),
        lambda page: Top(ref(kept_alive(Plain(page)))), lambda page: Top([page, Condition()]),
    ],
)  # fmt: skip
def test_a_policy_that_is_no_dataclass_is_named_by_its_settings_too(make):
    """Trust that one policy had earned passed to any other of its class, whatever its settings;
    later, to one that differed only in an array, whose repr leaves out rows and digits, and to one
    that held another object which does not show its state. Then to one that held another class, or
    another attribute of a module, an array or a function. And an LSTM, an array in a file and a
    marked tensor were unlike themselves: their trust went with each restart."""
    assert name_of(make(1)) == name_of(make(1)) != name_of(make(2))
    ledgers, config = Ledgers(), impress.Config()
    keys = {ledgers.open(NAMESPACE, make(one), config) for one in (1, 2)}
    assert len(keys) == 2


class Ready(Page):
    """A policy, an identifier or a codec that computes its size once it is asked for it."""

    name = "ready"

    def __call__(self, policy, asked):
        return self.size[0]


def _as_policy(ready: Ready) -> object:
    return ready


def _as_identifier(ready: Ready) -> object:
    class Mine:
        name = "mine"

    select.register(Mine, ready)
    return Mine()


def _as_codec(ready: Ready) -> object:
    class Mine:
        name, probe = "mine", "ready"

    probes._CODECS["ready"] = ready
    return Mine()


@pytest.mark.parametrize("make", [_as_policy, _as_identifier, _as_codec])
@pytest.mark.usefixtures("forget")
def test_what_is_computed_when_asked_for_is_no_setting(make):
    """Once a `cached_property` of it had been used, a policy had another name, and no trust."""
    ready = Ready(3)
    policy = make(ready)
    before = name_of(policy)
    assert len(ready.size) == 3 and "size" in vars(ready)
    assert name_of(policy) == before != name_of(make(Ready(4)))


def _of_class(keep: object) -> object:
    class Mine:
        name = "mine"

    Mine.keep = keep
    return Mine()


def _of_field(keep: float) -> object:
    @dataclass(frozen=True)
    class Mine:
        keep: ClassVar[float] = 0.0
        name: str = "mine"

    Mine.keep = keep
    return Mine()


@pytest.mark.parametrize(
    "make",
    [_of_class, _of_field, lambda keep: Top(lambda x: x * keep), lambda keep: _of_class([keep]),
     lambda keep: Learned(partial(max, keep)), lambda keep: _of_class({1: int, 2: str}[keep]),
     lambda keep: Top(Top(keep).__init__)],
)  # fmt: skip
def test_settings_of_a_class_and_functions_are_settings(make):
    """A `keep` in the body of a class was edited, and the next start chose by it at once, on trust
    earned by another. A function was named by its address: trust was lost at each restart."""
    assert name_of(make(1)) == name_of(make(1)) != name_of(make(2))
    assert " at 0x" not in name_of(make(1))


@pytest.mark.parametrize(
    "name",
    ["__annotate_func__", "__annotate__", "__annotations_cache__", "__conditional_annotations__"],
)
def test_what_annotations_leave_in_a_class_is_not_in_its_name(name):
    """From Python 3.14 on, it is a function around the class's own namespace, which has that
    function in it: a policy had another name at each start, and its trust was gone."""

    def named(annotation):
        body = {"name": "mine"}
        body[name] = lambda form: (body, annotation)
        return name_of(type("Mine", (), body)())

    assert named(1) == named(1) == named(2)


def test_a_functions_sets_are_told_in_one_order():
    """A set that a function looks in is a constant of its code, in an order of that process."""
    code = (
        "from impress.quality.told import told\n"
        "print(told(lambda layer: layer in {'first', 'last', 'middle', 'another'}))"
    )
    assert len(said_by_processes(code)) == 1


def said_by_processes(code: str) -> set[str]:
    """The distinct outputs of processes that order their sets differently."""
    return {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in range(3)
    }  # fmt: skip


@pytest.fixture
def forget():
    """Forget what a test has registered."""
    registry, codecs = dict(select.registry), dict(probes._CODECS)

    def forget():
        for kind in list(select.registry):
            select.register(kind, registry.get(kind, registry[object]))
        probes._CODECS.clear()
        probes._CODECS.update(codecs)

    yield forget
    forget()


NEEDED = """
import functools
from dataclasses import dataclass
from impress.policy import AllHeads, Quality, Random, Recency
from impress.selection import probes
from impress.selection.identify import select
"""
#: Programs that end in `policy`; KEEP is the part that is edited.
PROGRAMS = {
    "identifier": """
@dataclass(frozen=True)
class Mine:
    name: str = "mine"
    probe: str | None = None
@select.register
def _(policy: Mine, asked):
    return KEEP
policy = Mine()
""",
    "identifier of impress's class": """
select.register(Recency, lambda policy, asked: KEEP)
policy = Recency()
""",
    "another of impress's": """
select.register(Recency, select.dispatch([Random, AllHeads][KEEP - 1]))
policy = Recency()
""",
    "wrapped": """
@functools.wraps(select.dispatch(Quality))
def wrapped(policy, asked):
    return KEEP
select.register(Quality, wrapped)
policy = Quality()
""",
    "object": """
class Chooser:
    def __call__(self, policy, asked):
        return KEEP
class Mine:
    name = "mine"
select.register(Mine, functools.partial(Chooser(), 1))
policy = Mine()
""",
    "object's class": """
class Chooser:
    keep = KEEP
    def choose(self, policy, asked):
        return self.keep
class Mine:
    name = "mine"
select.register(Mine, Chooser().choose)
policy = Mine()
""",
    "method": """
class Base:
    @property
    def keep(self):
        return KEEP
class Mine(Recency, Base):
    pass
policy = Mine()
""",
    "call": """
class Mine:
    name = "mine"
    @staticmethod
    def keep():
        return KEEP
policy = Mine()
""",
    "codec": """
class Sketch:
    name, group, all_heads = "sketch", 1, True
    def score(self, *asked):
        return KEEP
probes.register(Sketch())
policy = Quality(probe="sketch")
""",
    "codec's setting": """
class Sketch:
    name, group, all_heads = "sketch", 1, True
    bits = KEEP
    def __repr__(self):
        return "sketch"
probes.register(Sketch())
policy = Quality(probe="sketch")
""",
}


@pytest.mark.parametrize("of", PROGRAMS)
def test_an_identifier_that_was_edited_has_trust_of_its_own(forget, of):
    """Neither the identifier nor a policy's methods nor a codec was in the name: trust earned by
    one served the next, which nobody had weighed, from the first hit after the next start."""
    names = []
    for keep in (1, 1, 2):
        program: dict[str, Any] = {"__name__": __name__}
        forget()
        exec(NEEDED + PROGRAMS[of].replace("KEEP", str(keep)), program)
        names.append(name_of(program["policy"]))
    assert names[0] == names[1] != names[2]


def test_identifiers_of_every_kind_are_told_the_same_by_every_process():
    """Named by address, or in the order of a set, they would lose their trust at every restart."""
    code = """if True:
        import functools, math, threading
        import torch
        from impress.quality.names import name_of
        from impress.selection.identify import select

        class Chooser:
            def __init__(self):
                self.lock, self.layers = threading.Lock(), {"first", "last", "middle"}
            def __call__(self, policy, asked):
                return asked.layer in {"first", "last", "middle"}
            @functools.cached_property
            def kept(self):
                return 1

        def itself(policy, asked):
            return itself

        def other(policy, asked):
            return other

        for identifier in (
            math.sqrt, str.upper, Chooser, Chooser(), Chooser().__call__,
            functools.partial(Chooser(), {"a", "b", "c"}), lambda policy, asked: {"a", "b", "c"},
            functools.lru_cache(itself), torch.no_grad()(other), torch.compile(itself),
            torch.no_grad()(torch.compile(itself)), functools.partial(torch.compile(itself), 1),
        ):
            class Mine:
                name = "mine"
            select.register(Mine, identifier)
            print(name_of(Mine()))
    """
    (said,) = said_by_processes(code)
    assert " at 0x" not in said and len(set(said.split("\n"))) == 13


class Leading:
    """Refers back to itself."""

    name, needs_suffix_lse, probe = "leading", False, None

    def __init__(self, keep):
        self.keep, self.rule = keep, self.by_mass

    def by_mass(self, asked):
        return self.keep


class Bound:
    """Its repr shows nothing of what it holds."""

    name, needs_suffix_lse, probe = "bound", False, None

    def __init__(self, keep):
        self.rule = np.full(4, keep).dot


class Held:
    """What it chooses by is held by C code: once it was freed, another had its address."""

    name, needs_suffix_lse, probe = "held", False, None

    def __init__(self, keep):
        self.rule = [memoryview(bytes([int(100 * keep)]))]


@pytest.mark.parametrize("kind", [Leading, Bound, Held])
def test_what_cannot_be_told_is_never_taken_for_another(kind):
    """One with other settings had the same name, and so the trust that the first had earned; or the
    name was where it lay, and the next could come to lie there."""
    kept = [kind(0.9), kind(0.01)]
    assert len({*map(name_of, kept)}) == 2
    assert (name_of(kept[0]) == name_of(kind(0.9))) == (kind is Bound)  # an array's is told


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor.*deprecated")
@pytest.mark.parametrize(
    "make",
    [
        lambda page: torch.tensor(weights(page)).to_sparse(),
        lambda page: torch.quantize_per_tensor(
            torch.tensor(weights(1)) * page, 0.1, 0, torch.qint8
        ),
        lambda page: np.frompyfunc(lambda x: x * page, 1, 1),
        lambda page: objects(np.frompyfunc(lambda x: x * page, 1, 1)),
    ],
    ids=["sparse", "quantized", "ufunc", "ufunc in an array"],
)
def test_what_a_repr_abbreviates_is_not_taken_for_another(make):
    """Sparse and quantised weights were told by their repr, which leaves out values, and a function
    that NumPy calls by its name."""
    assert name_of(Top(make(1))) != name_of(Top(make(2)))


def test_what_classes_keep_is_told_once_each_though_they_lead_to_each_other():
    """A class was told by its name alone. What it keeps may lead back to it, in as many ways as
    twelve that know each other can be put in a row."""
    kinds = [type(f"Kind{i}", (Plain,), {"page": i}) for i in range(12)]
    for kind in kinds:
        kind.others = kinds
    assert name_of(Top(kinds[0](1))) == name_of(Top(kinds[0](1)))
    names = {name_of(Top({kind(1) for kind in order})) for order in (kinds, kinds[::-1])}
    assert len(names) == 1
    kinds[7].page = 0
    assert name_of(Top({kind(1) for kind in kinds})) not in names


def test_rules_of_impress_own_are_in_the_key_and_not_in_the_name(monkeypatch):
    config, keys, names = impress.Config(), [], []
    for rules in (0, 0, 1):
        monkeypatch.setattr("impress.quality.ledgers.RULES", rules)
        ledgers = Ledgers()
        keys.append(ledgers.open(NAMESPACE, Quality(), config))
        names += [shown["policy"] for shown in ledgers.snapshot()]
    assert keys[0] == keys[1] != keys[2]
    assert names == [repr(Quality())] * 3


@pytest.mark.parametrize(
    ("policy", "n_shown"), [(Quality(), 1), (Paper(), 1), (Layered((0.5,) * 99), 2)]
)
def test_a_ledger_of_other_rules_is_not_shown(monkeypatch, policy, n_shown):
    """`impress explain` said that a policy was trusted, by a ledger of rules that it had no more.
    Of a name that was cut, it cannot be told whose the ledger is."""
    config, saved = impress.Config(guard_shadows=1), {}
    for rules in (7, 8):
        monkeypatch.setattr("impress.quality.ledgers.RULES", rules)
        ledgers = Ledgers(saved.get)
        key = ledgers.open(NAMESPACE, policy, config)
        ledgers.note(key, CLEAN if rules == 7 else OVER)
        saved |= ledgers.dump()
    states = [shown["state"] for shown in decoded(saved.items())]
    assert len(saved) == 2 and states == ["trusted", "earning"][-n_shown:]


@pytest.mark.parametrize("name", ["a", "a" * 400, "a" * 401, "a" * 399 + "é", "a" * 397 + "😀"])
def test_no_ledger_of_these_rules_is_left_out(monkeypatch, name):
    """However long its name, which is cut, maybe before a letter of several bytes."""
    monkeypatch.setattr("impress.quality.ledgers.name_of", lambda policy: name)
    ledgers = Ledgers()
    ledgers.decide(ledgers.open(NAMESPACE, Quality(), impress.Config()), 0.0)
    assert decoded(ledgers.dump().items()) == ledgers.snapshot() != []


@pytest.mark.parametrize("make", [Top, Learned])
def test_a_setting_that_is_a_set_is_told_in_one_order(make):
    """It was named in the process's own order: trust was lost at every restart."""
    names = ["a", "policy", "of", "many", "layers"]
    policies = [make(frozenset(order)) for order in (names, names[::-1])] + [make({*names})]
    one, other, mutable = map(name_of, policies)
    assert one == other and "frozenset('a', 'layers', 'many', 'of', 'policy')" in one
    assert "set('a', " in mutable


def test_policies_that_are_dataclasses_keep_their_ledgers():
    policies = (Paper(), Quality(0.1), Recency())
    named = [repr(policy) for policy in policies]
    assert [name_of(policy) for policy in policies] == named
    assert name_of(Layered((0.5,))).startswith(f"{__name__}.Layered(keep=(0.5,)) ")
    assert named[0] == "Paper(keep=0.25, alpha=0.6, gate=True, fallback='layer')"


def test_policies_that_differ_behind_a_long_start_have_ledgers_of_their_own():
    """The key covered only a name's first 400 bytes: a policy never weighed had another's trust."""
    ledgers, config = Ledgers(), impress.Config()
    long, other = Layered((0.25,) * 80), Layered((0.25,) * 70 + (0.01,) * 10)
    assert ledgers.open(NAMESPACE, long, config) != ledgers.open(NAMESPACE, other, config)


def test_a_bound_is_what_the_policy_says_in_whatever_type_of_number() -> None:
    """One of NumPy's was passed over, and the operator's taken for it: five times as much."""
    config = impress.Config()
    for own, want in ((np.float32(0.02), 0.02), (Fraction(1, 50), 0.02), (None, 0.1)):
        policy = SimpleNamespace(max_missing_mass=own)
        assert target_of(policy, config) == pytest.approx(want)
