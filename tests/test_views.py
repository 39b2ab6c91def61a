"""The accounts of who views which windows, checked against a list of all views."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impress.tree.nodes import NONE
from impress.tree.radix import View
from impress.tree.views import Views

LENGTH = 5  # windows of a span
spans = st.integers(0, 3)
numbers = st.integers(0, 99)
kinds = st.sampled_from(["add", "view", "view", "split", "unview", "give", "forget"])


class Model:
    """Every view there is, and every span that is kept."""

    def __init__(self) -> None:
        self.views: list[View] = []
        self.kept: set[int] = set()

    def viewed(self, span: int) -> set[int]:
        """The windows of a span that nodes view."""
        mine = [v for v in self.views if v.span == span]
        return {window for v in mine for window in range(v.first, v.first + v.n_windows)}

    def live(self) -> set[int]:
        return {view.span for view in self.views}

    def dead(self) -> dict[int, int]:
        n_dead = {span: LENGTH - len(self.viewed(span)) for span in self.live()}
        return {span: n for span, n in n_dead.items() if n}


def view(views: Views, model: Model, span: int, first: int, most: int) -> None:
    """View at most `most` windows of a span from `first` on, up to one viewed already."""
    seen = model.viewed(span)
    n = next((i for i in range(most) if first + i >= LENGTH or first + i in seen), most)
    if n:
        model.views.append(View(span, first, n))
        views.view(span, n, LENGTH)


def unview(views: Views, model: Model, at: int) -> None:
    gone = model.views.pop(at)
    assert views.unview(gone.span, gone.n_windows) == (gone.span not in model.live())


def step(views: Views, model: Model, kind: str, span: int, i: int, j: int) -> None:
    at = i % len(model.views) if model.views else NONE
    if kind == "add":
        model.kept.add(span)
        views.add(span)
    elif kind == "view" and span in model.kept:
        view(views, model, span, i % LENGTH, 1 + j % LENGTH)
    elif kind == "forget" and span in model.kept - model.live():
        model.kept.discard(span)
        views.forget(span)
    elif kind == "split" and at != NONE and model.views[at].n_windows > 1:
        cut, (name, first, n) = 1 + j % (model.views[at].n_windows - 1), model.views[at]
        model.views[at : at + 1] = [View(name, first, cut), View(name, first + cut, n - cut)]
        views.split(name)
    elif kind == "unview" and at != NONE:
        unview(views, model, at)
    elif kind == "give" and at != NONE and span in model.kept:  # a node changes its span
        _, first, n = model.views[at]
        if not model.viewed(span) & set(range(first, first + n)):
            view(views, model, span, first, n)
            unview(views, model, at)


@given(st.lists(st.tuples(kinds, spans, numbers, numbers), min_size=40, max_size=80))
def test_agrees_with_a_walk_over_all_views(steps: list[tuple[str, int, int, int]]) -> None:
    views, model = Views(lambda span: LENGTH), Model()
    for todo in steps:
        step(views, model, *todo)
        assert set(views) == model.live() and len(views) == len(model.live())
        assert all((span in views) == (span in model.live()) for span in range(4))
        assert views.retired == model.kept - model.live()
        assert views.dead == model.dead()
        views.check(model.views)


def test_a_check_finds_what_it_was_not_told_of() -> None:
    views = Views(lambda span: LENGTH)
    views.add(1)
    views.view(1, 3, LENGTH)
    views.split(NONE)
    views.check([View(1, 0, 3)])
    for wrong in ([], [View(1, 0, 2)], [View(1, 0, 1), View(1, 1, 2)], [View(1, 3, 3)]):
        with pytest.raises(AssertionError):
            views.check(wrong)
