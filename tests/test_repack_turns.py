"""What `experiments.repack` counts as beside the repacker, and how it holds it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import repack
from experiments.common import Unable
from impress.repacking.span_copy import Copier


def test_a_slowdown_is_told_with_whole_turns_drawn() -> None:
    rng = np.random.default_rng(1)
    alike = rng.lognormal(0, 0.3, 40 * repack.TURN).tolist()
    found, low, high = repack._slowdown({"held": alike, "during": alike[::-1]}, 99)
    assert found == 0.0
    assert low < 0 < high
    slower = [2 * seconds for seconds in alike]
    found, low, high = repack._slowdown({"held": alike, "during": slower}, 50)
    assert found == pytest.approx(1.0)
    assert 0.8 < low < 1 < high < 1.2


def test_a_turn_behind_a_move_is_the_repackers() -> None:
    """It counted as one without. And milliseconds were not "divided by the dilation", as said."""
    done, looks = threading.Event(), []
    served = SimpleNamespace(ttft_s=0.5, map_s=0.05, map_cpu_s=0.01)

    class Counters:
        def __getitem__(self, name: str) -> int:
            """Looked at behind each turn with the repacker held: by the second a span has moved."""
            assert name == "repacks/yes"
            looks.append(name)
            if len(looks) == 2:
                done.set()
            return len(looks) - 1

    def pass_of_the_repacker() -> object:
        assert done.wait(60)
        return SimpleNamespace(spans=(), moved=1, moved_bytes=1)

    server = SimpleNamespace(serve=lambda _asking: served, settle=lambda: None)
    data = SimpleNamespace(prefixes=[SimpleNamespace(tokens=())], n_bytes=1)
    store = SimpleNamespace(repack=pass_of_the_repacker, counters=Counters())
    row = repack._phases(server, data, store, itertools.repeat((0, 0)), 2 * repack.TURN, 5.0)
    assert row["dilation"] == 5.0 and row["turns_behind"] == 1
    assert row["n_held"] == repack.TURN and row["n_during"] >= 2 * repack.TURN
    assert {row[f"p50_ms_{name}"] for name in ("held", "during", "after")} == {100.0}
    assert row["map_share_of_ttft"] == pytest.approx(0.1)
    assert repack.figures([row], None)[0]["repack_p99_slowdown"] == 0.0


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
    served = SimpleNamespace(ttft_s=0.5, map_s=0.05, map_cpu_s=0.01)
    server = SimpleNamespace(serve=lambda _asking: served, settle=lambda: None)
    data = SimpleNamespace(prefixes=[SimpleNamespace(tokens=())], n_bytes=1)
    store = SimpleNamespace(repack=lambda: report, counters={"repacks/yes": 0})
    with pytest.raises(Unable, match=says):
        repack._phases(server, data, store, itertools.repeat((0, 0)), repack.TURN, 5.0)


def test_the_repacker_is_held_before_its_next_slice() -> None:
    done: list[str] = []

    class Store:  # what a copier has of one
        _pace = SimpleNamespace(go=lambda _n_bytes: not done.append("paced"))
        _turn = staticmethod(lambda: True)
        do = staticmethod(lambda task: task())

    with repack._gate() as running:
        running.wait = lambda: done.append("waited")
        Copier._slice(Store(), 1, lambda: done.append("copied"))
    assert done == ["waited", "paced", "copied"]
    Copier._slice(Store(), 1, lambda: done.append("copied"))
    assert done[3:] == ["paced", "copied"]
