"""The experiment on sparse reads before and after packing."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections import Counter
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import chunks
from experiments.common import Unable
from experiments.harness import Disk, Options
from experiments.systems.rows import Rows, choices, measured_overlap


def test_one_overlap_speaks_for_the_curve() -> None:
    """Figs 20 and 23 took two different means over the same grid."""
    units = {f"{when}_unit_{unit}": n for unit in chunks.UNITS
             for when, n in (("before", 3.0), ("after", 2.0))}  # fmt: skip
    names = ("amplification", "requests", "io_ms", "io_vs_floor")
    row = {f"{name}_{when}": 1.0 for name in names for when in ("before", "after", "alone")}
    rows = [{"row_kib": 4, "overlap": 0.6, **row, **dict.fromkeys(units, 1.0)},
            {"row_kib": 4, "overlap": 0.84, **row, **units}]  # fmt: skip
    said, _ = chunks.figures(rows, None)
    assert said["overlap"] == 0.84
    assert {said[f"chunks_times_fewer.{unit}"] for unit in chunks.UNITS} == {1.5}


def test_packed_rows_cost_less_and_are_the_same(tmp_path: Path) -> None:
    asked, earlier = choices(3, 0.98, 0.25, 1)
    assert measured_overlap(asked, earlier) > 0.8
    rows = Rows.of(tmp_path, 1 << 10, earlier, 1)
    try:
        before, after = (
            [rows.read(name, chosen) for chosen in asked] for name in ("before", "after")
        )
        for one, other in zip(before, after, strict=True):
            assert one["selected"] == other["selected"]
            assert other["moved"] < one["moved"]
            assert other["requests"] < one["requests"]
        alone = rows.read_alone("after", rows.plans["after"], 8)
        assert [alone[key] for key in ("selected", "moved")] == [
            after[-1][key] for key in ("selected", "moved")
        ]
        assert rows.chunks(asked[0], "after", 64) < rows.chunks(asked[0], "before", 64)
    finally:
        rows.close()


def test_a_disk_without_room_is_said_before_rows_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store refused the rows, and the run ended with "a miss has nothing to read"."""
    used = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: used._replace(free=200_000_000))
    _, earlier = choices(1, 0.9, 0.25, 1)
    with pytest.raises(Unable, match=r"some 0.2 GB, and .* has 0.2 free: name another --dir"):
        Rows.of(tmp_path / "rows", 1 << 10, earlier, 1)
    assert not any(tmp_path.iterdir())


def test_a_choice_by_popularity_alone_follows_the_average_order() -> None:
    for mix, least, most in ((1.0, 0.999, 1.0), (0.0, 0.15, 0.4)):
        asked, earlier = choices(4, mix, 0.25, 2)
        assert least <= measured_overlap(asked, earlier) <= most
    assert max(chunks.MIXES[True]) < 1


def test_no_way_follows_another_for_good_or_asks_for_what_was_just_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ways took turns in a ring: the read sent by one thread mostly came after the one sent by
    eight, which had read the same bytes, as had the packed read before both."""
    plans: dict[str, int] = {}
    asked: list[tuple[str, int | None]] = []  # a way, and the packed read whose bytes it asks for

    def note(way: str, of: int | None = None) -> dict[str, float]:
        asked.append((way, of))
        return {"selected": 1, "moved": 1, "requests": 1, "io_s": 1.0}

    def read(name: str, _chosen: object) -> dict[str, float]:
        if name == "after":
            plans[name] = sum(way == name for way, _ in asked)
        return note(name, plans[name] if name == "after" else None)

    fake = SimpleNamespace(
        plans=plans, read=read, read_all=lambda _: note("all"), chunks=lambda *_: 1.0,
        read_alone=lambda _, plan, n_threads: note(f"alone {n_threads}", plan), close=lambda: None,
    )  # fmt: skip
    monkeypatch.setattr(chunks, "Rows", SimpleNamespace(of=lambda *_: fake))
    options = Options(False, None, None, False, tmp_path, 1, Disk(2.0, "given"), Namespace(),
                      ExitStack())  # fmt: skip
    (row,) = chunks.measure(options, 4, 0.9)
    assert row["n"] == plans["after"] + 1 == 24
    times = Counter(way for way, _ in asked)
    assert times == {"before": 24, "after": 24, "all": 24, "alone 8": 22, "alone 1": 20}
    follows = Counter(pairwise(way for way, _ in asked))
    assert all(n <= times[way] / 2 for (_, way), n in follows.items())
    last_read: dict[int, int] = {}
    for at, (way, plan) in enumerate(asked):
        if plan is not None:
            assert at - last_read.get(plan, -len(asked)) > 3, f"{way} of what was just read"
            last_read[plan] = at
