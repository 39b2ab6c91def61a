"""What `experiments.repack` counts as beside the repacker, and how it holds the repacker."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import repack
from experiments.common import Unable
from impress.repacking.span_copy import Copier


def test_a_slowdown_is_told_with_pairs_of_turns_drawn() -> None:
    rng = np.random.default_rng(1)
    turns = [rng.lognormal(0, 0.3, repack.TURN).tolist() for _ in range(40)]
    assert repack._slowdown([(turn, turn) for turn in turns], 99) == (0.0, 0.0, 0.0)
    found, low, high = repack._slowdown(list(zip(turns, turns[::-1], strict=True)), 99)
    assert found == 0.0
    assert low < 0 < high
    slower = [(turn, [2 * seconds for seconds in turn]) for turn in turns]
    assert repack._slowdown(slower, 50) == pytest.approx((1.0, 1.0, 1.0))


def test_a_draw_without_a_turn_of_the_held_repacker_is_none() -> None:
    """One of the two pairs is after a move: both its turns count as the running repacker's."""
    found = repack._slowdown([([1.0] * 4, [2.0] * 4), ([], [2.0] * 8)], 99)
    assert found == pytest.approx((1.0, 1.0, 1.0))


def back_to_back(busy_s: float) -> Iterator[SimpleNamespace]:
    """Requests of half a second, each begun when the one before has let go of the server."""
    for n in itertools.count():
        began_s = n * (0.5 + busy_s)
        yield SimpleNamespace(ttft_s=0.5, map_s=0.05, map_cpu_s=0.01, began_s=began_s)


def test_a_request_comes_with_the_first_token_of_the_one_before() -> None:
    """Its clock began once the server was free, whatever that still did for the one before."""
    done, served = threading.Event(), back_to_back(0.25)
    report = SimpleNamespace(spans=(), moved=1, moved_bytes=1)
    server = SimpleNamespace(serve=lambda _asking: next(served), settle=done.set)
    data = SimpleNamespace(prefixes=[SimpleNamespace(tokens=())], n_bytes=1)
    looks = itertools.count()

    class Counters:
        def __getitem__(self, name: str) -> int:
            if next(looks) == 3:
                over.set()
            return 0

    over = threading.Event()
    store = SimpleNamespace(repack=lambda: over.wait(60) and report, counters=Counters())
    row = repack._phases(server, data, store, itertools.repeat((0, 0)), 4 * repack.TURN, 1.0)
    assert {row[f"p50_ms_{name}"] for name in ("held", "during")} == {750.0}
    assert row["p50_ms_after"] == 500.0  # there the server is waited for


def test_both_ways_have_the_same_requests_and_take_turns_at_being_first() -> None:
    """Each way had requests of its own, and in the tail these mattered more than the repacker."""
    asked: list[tuple[int, int]] = []
    held: list[bool] = []
    done = threading.Event()

    def serve(asking: repack.Asking) -> SimpleNamespace:
        asked.append((asking.prefix, asking.request))
        held.append(not gate.is_set())
        if len(asked) == 12 + 4 * repack.TURN:
            done.set()
        return next(served)

    served = back_to_back(0.0)
    gate = threading.Event()
    server = SimpleNamespace(serve=serve, settle=lambda: None)
    data = SimpleNamespace(prefixes=[SimpleNamespace(tokens=())] * 99, n_bytes=1)
    report = SimpleNamespace(spans=(), moved=1, moved_bytes=1)
    store = SimpleNamespace(
        repack=lambda: done.wait(60) and report, counters={"repacks/yes": 0}
    )  # fmt: skip
    queue = ((i % 99, i % 12) for i in itertools.count())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repack, "_gate", lambda: nullcontext(gate))
        repack._phases(server, data, store, queue, 2 * repack.TURN, 1.0)
    one, two, three, four = (
        slice(12 + at * repack.TURN, 12 + (at + 1) * repack.TURN) for at in range(4)
    )
    assert asked[one] == asked[two] != asked[three] == asked[four]
    ways = [set(held[turn]) for turn in (one, two, three, four)]
    assert ways == [{False}, {True}, {True}, {False}]


def test_a_turn_behind_a_move_is_the_repackers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a turn counted as held. And milliseconds were not "divided by the dilation", as said.

    A p99 is told from as many requests as elsewhere: that of a hundred was its slowest one's.
    """
    done, looks = threading.Event(), []
    served = back_to_back(0.0)

    class Counters:
        def __getitem__(self, name: str) -> int:
            """Read after each turn with the repacker held: by the second, a span has moved. The
            third time both pairs of turns are counted: a pass that ends earlier takes one away."""
            assert name == "repacks/yes"
            looks.append(name)
            if len(looks) == 3:
                done.set()
            return len(looks) - 1

    def pass_of_the_repacker() -> object:
        assert done.wait(60)
        return SimpleNamespace(spans=(), moved=1, moved_bytes=1)

    server = SimpleNamespace(serve=lambda _asking: next(served), settle=lambda: None)
    data = SimpleNamespace(prefixes=[SimpleNamespace(tokens=())], n_bytes=1)
    store = SimpleNamespace(repack=pass_of_the_repacker, counters=Counters())
    monkeypatch.setitem(repack._LEAST, 99, repack.TURN + 1)
    row = repack._phases(server, data, store, itertools.repeat((0, 0)), 2 * repack.TURN, 5.0)
    assert row["dilation"] == 5.0 and row["turns_behind"] == 1
    assert row["n_held"] == repack.TURN and row["n_during"] >= 2 * repack.TURN
    assert {row[f"p50_ms_{name}"] for name in ("held", "during", "after")} == {100.0}
    assert row["map_share_of_ttft"] == pytest.approx(0.1)
    said = repack.figures([row], None)[0]
    assert said["repack_p50_slowdown"] == 0.0 and "repack_p99_slowdown" not in said
    assert row["p99_ms_held"] is None and row["p99_ms_during"] == 100.0


@pytest.mark.parametrize(
    ("ended", "says"), [("at once", "went by with the repacker"), ("never", "the repacker failed")]
)
def test_a_pass_with_nothing_to_tell_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, ended: str, says: str
) -> None:
    """A pass that had nothing to move, or that did not come to its end, ended in a traceback."""
    report = SimpleNamespace(spans=(), moved=0, moved_bytes=0)

    class Pass:
        def __init__(self, target: Callable[[], None], daemon: bool) -> None:
            self._pass = target

        def start(self) -> None:
            if ended == "at once":
                self._pass()

        def is_alive(self) -> bool:
            return False

        def join(self, _seconds: float) -> None:
            """It is not waited for."""

    monkeypatch.setattr(repack.threading, "Thread", Pass)
    served = back_to_back(0.0)
    server = SimpleNamespace(serve=lambda _asking: next(served), settle=lambda: None)
    data = SimpleNamespace(prefixes=[SimpleNamespace(tokens=())], n_bytes=1)
    store = SimpleNamespace(repack=lambda: report, counters={"repacks/yes": 0})
    with pytest.raises(Unable, match=says):
        repack._phases(server, data, store, itertools.repeat((0, 0)), repack.TURN, 5.0)


def test_the_repacker_is_held_before_its_next_slice() -> None:
    done: list[str] = []

    class Store:  # as much of one as a copier uses
        _pace = SimpleNamespace(go=lambda _n_bytes: not done.append("paced"))
        _turn = staticmethod(lambda: True)
        do = staticmethod(lambda task: task())

    with repack._gate() as running:
        running.wait = lambda: done.append("waited")
        Copier._slice(Store(), 1, lambda: done.append("copied"))
    assert done == ["waited", "paced", "copied"]
    Copier._slice(Store(), 1, lambda: done.append("copied"))
    assert done[3:] == ["paced", "copied"]
