"""Which reads bring a layer's rows where they are wanted, checked with dictionaries of pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import impress
from impress.read.copying import ChunksOf, PiecesOf
from impress.read.parts import Part, Source, parts_of
from impress.read.plan import (
    Gather,
    Runs,
    _apart,
    _cut,
    gather,
    rows_of_whole,
)  # fmt: skip
from impress.spans.layout import PlaneLayout, SpanLayout
from impress.spans.order import RowOrder
from impress.tree.catalog import Held
from tiers.base import Extent, Slot


def places(runs: Runs) -> dict[int, int]:
    """Each piece of runs, and where it goes."""
    return {run.first + i: run.to + i for run in runs.each() for i in range(run.n_pieces)}


def assert_divided(
    found: Gather, parts: Sequence[Part], ahead: Sequence[np.ndarray], shape: PlaneLayout, gap: int
) -> None:
    """What was read ahead is taken, the rest read, with gaps of at most `gap` pieces."""
    for i, part in enumerate(parts):
        read, taken = places(found.read[i]), places(found.taken[i])
        assert not read.keys() & taken.keys()
        assert read | taken == places(found.runs[i])
        wanted = set((part.ordinals // shape.piece_rows).tolist())
        there = set(np.flatnonzero(ahead[i]).tolist())
        missing = sorted(wanted - there)
        assert taken.keys() <= wanted & there
        filled = {p for a, b in pairwise(missing) if b - a <= gap + 1 for p in range(a, b)}
        assert read.keys() == filled | set(missing)


@settings(max_examples=80)
@given(st.data())
def test_a_plan_brings_each_wanted_row_to_its_place(data: st.DataObject) -> None:
    """Checked against a dictionary: rows are numbers, pieces are looked up one by one."""
    window, geometry = 16, impress.Geometry(1, 1, 1, 4, "float32")
    row_bytes = data.draw(st.sampled_from([1024, 2048, 8192]))
    shape = PlaneLayout.of(row_bytes, window)
    sources, at = [], 0
    for span in range(data.draw(st.integers(1, 3))):
        n_windows = data.draw(st.integers(1, 4))
        first = data.draw(st.integers(0, n_windows - 1))
        count = data.draw(st.integers(1, n_windows - first))
        record = impress.spans.format.SpanRecord(
            span, b"", b"", b"", b"", 0, n_windows, window, Extent(0, 0, 4096), ()
        )
        order = None
        if data.draw(st.booleans()):
            rng = np.random.default_rng(data.draw(st.integers(0, 99)))
            order = RowOrder.of(rng.permutation(n_windows * window)[None])
        layout = replace(SpanLayout.of(geometry, window, n_windows), planes=(shape, shape))
        held = Held(record, first, count)
        sources.append(Source(held, layout, Slot(()), np.empty(0, np.uint64), (), at, order))
        at += count
    chosen = data.draw(st.one_of(st.none(), st.sets(st.integers(0, at * window - 1))))
    positions = None if chosen is None else np.array(sorted(chosen), dtype=np.int64)

    def truth(pos: int) -> tuple[int, int]:
        """(span, slot) of a position."""
        source = [s for s in sources if s.at * window <= pos][-1]
        row = pos - source.at * window + source.held.first * window
        return source.span, row if source.order is None else int(source.order.ordinals[0, row])

    parts = parts_of(sources, 0, positions)
    dest: dict[int, tuple[int, int]] = {}
    if positions is None:
        positions = np.arange(at * window)
        for part in parts:
            for i in range(part.count * window):
                dest[part.to * window + i] = (part.span, part.first * window + i)
        rows = rows_of_whole(parts)
        rows = positions if rows is None else rows
    else:
        gap_bytes, ahead = data.draw(st.sampled_from([0, 4096, 20_000])), None
        if data.draw(st.booleans()):
            rng = np.random.default_rng(data.draw(st.integers(0, 99)))
            ahead = [rng.random(part.count * shape.pieces) < 0.5 for part in parts]
        found = gather(parts, 0, gap_bytes, ahead)
        if ahead is not None:
            assert_divided(found, parts, ahead, shape, gap_bytes // shape.piece_bytes)
        rows, end = found.rows, 0
        for part, runs in zip(parts, found.runs, strict=True):
            for run in runs.each():
                assert run.to == end and run.first >= 0
                assert run.first + run.n_pieces <= part.count * shape.pieces
                end += run.n_pieces
                for i in range(run.n_pieces * shape.piece_rows):
                    slot = part.first * window + run.first * shape.piece_rows + i
                    dest[run.to * shape.piece_rows + i] = (part.span, slot)
        assert end == found.n_pieces
    assert [dest[row] for row in rows.tolist()] == [truth(pos) for pos in positions.tolist()]


@settings(max_examples=120)
@given(st.data())
def test_runs_are_cut_where_their_bytes_lie_apart(data: st.DataObject) -> None:
    """Every piece of a run is in one part, in its place; a copy's parts end with their chunk."""
    pieces = data.draw(st.sampled_from([1, 2, 8]))
    level = np.array(data.draw(st.lists(st.sampled_from([-1, 0, 1]), min_size=1, max_size=8)))
    cached = [np.where(level == i, 7, -1) for i in range(data.draw(st.integers(1, 2)))]
    at_home = np.array([all(by[w] < 0 for by in cached) for w in range(len(level))])
    n = len(level) * pieces
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    runs = Runs.of(wanted, 100)
    cut, levels = _cut(runs, pieces, cached)
    found = []
    for run, where in zip(cut.each(), levels.tolist(), strict=True):
        some = np.arange(run.first, run.first + run.n_pieces)
        assert run.n_pieces > 0 and run.to == run.first + 100
        windows = some // pieces
        if where < 0:
            assert at_home[windows].all()
        else:
            assert len(set(windows.tolist())) == 1 and cached[where][windows[0]] >= 0
        found += some.tolist()
    assert found == np.flatnonzero(wanted).tolist()
    if at_home.all():
        assert [*cut.each()] == [*runs.each()]  # and no cut where none is due


@settings(max_examples=120)
@given(st.data())
def test_pieces_come_from_whoever_has_their_chunk(data: st.DataObject) -> None:
    """A whole part as it lies, which is copied by chunks, and pieces from all over."""
    n = data.draw(st.sampled_from([1, 2, 8]))
    level = np.array(data.draw(st.lists(st.sampled_from([-1, 0, 1]), min_size=1, max_size=8)))
    cached = [np.where(level == i, 7, -1) for i in range(2)]
    to = data.draw(st.integers(0, 100))
    size = len(level) * n
    wanted = np.ones(size, dtype=bool)
    if data.draw(st.booleans()):
        wanted = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    runs = Runs.of(wanted, to)
    at_home, copied, kind = _apart(runs, len(level), n, cached)
    assert kind in (ChunksOf, PiecesOf)
    want = places(runs)
    if kind is ChunksOf:  # whole ones, which begin where a chunk does
        assert wanted.all() and to % n == 0
    of_each = np.arange(n if kind is ChunksOf else 1)
    for i, found in enumerate(copied):
        pieces, where = (
            (column[:, None] * len(of_each) + of_each).ravel().tolist() for column in found
        )
        mine = {piece: at for piece, at in want.items() if level[piece // n] == i}
        assert dict(zip(pieces, where, strict=True)) == mine
    home = {piece: at for piece, at in want.items() if level[piece // n] < 0}
    assert places(at_home) == home
    if wanted.all():  # neighbours are one read
        assert [*at_home.each()] == [*Runs.of(np.repeat(level < 0, n), to).each()]
