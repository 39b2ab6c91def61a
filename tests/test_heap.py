"""The lazy min-heap against a dict that is searched."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from impress.cache.heap import MinHeap

CAPACITY = 12
items = st.sets(st.integers(0, CAPACITY - 1), max_size=CAPACITY)
keys = st.tuples(st.sampled_from([-np.inf, 0.0, 0.5, 1.0, 2.5]), st.integers(0, 3))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.dictionaries(st.integers(0, CAPACITY - 1), keys)),
        st.tuples(st.just("discard"), items),
        st.tuples(st.just("take"), st.integers(0, 5)),
        st.tuples(
            st.just("beat"), st.lists(st.sampled_from([-np.inf, 0.25, 0.5, 9.0]), max_size=5)
        ),
    ),
    max_size=60,
)


@given(steps)
def test_it_gives_out_what_a_search_of_a_dict_would(done: list) -> None:
    heap, model = MinHeap(CAPACITY), {}
    for step, what in done:
        if step == "put":
            ids = np.array(list(what), dtype=np.int64)
            scores = np.array([key[0] for key in what.values()], dtype=np.float64)
            heap.put(ids, scores, np.array([key[1] for key in what.values()], dtype=np.int64))
            model.update(what)
        elif step == "discard":
            heap.discard(np.array(sorted(what), dtype=np.int64))
            for item in what:
                model.pop(item, None)
        elif step == "beat":  # those worth most, against those worth least
            below = np.array(sorted(what, reverse=True), dtype=np.float64)
            taken = [model.pop(item)[0] for item in heap.take(len(below), below).tolist()]
            assert all(score < most for score, most in zip(taken, below, strict=False))
            if len(taken) < len(below) and model:
                assert min(model.values())[0] >= below[len(taken)]
        else:
            least = sorted(model.values())[:what]  # of items with equal keys any may come first
            assert [model.pop(item) for item in heap.take(what).tolist()] == least
        heap.check()
        assert len(heap) == len(model)
        assert heap.items().tolist() == sorted(model)


def test_rises_and_comings_and_goings_file_nothing_and_falls_are_swept() -> None:
    n = 1000
    heap, ids = MinHeap(n), np.arange(n)
    heap.put(ids, np.zeros(n), ids)
    for use in range(1, 50):  # pinned, used, unpinned: what a hit does
        heap.discard(ids[::2])
        heap.put(ids[::2], np.full(n // 2, float(use)), ids[::2] + n * use)
        assert len(heap._entries) == n
    for use in range(50):
        heap.put(ids, np.full(n, -float(use)), ids)
        assert len(heap._entries) <= 3 * n + 64
        heap.check()
    assert heap.take(n).tolist() == ids.tolist() and len(heap) == 0


def test_most_of_it_goes_and_comes_back_in_parts_without_being_filed_again() -> None:
    """A request pins all layers of its prefix and gives them back one by one. Where they were most
    of a cache, the first to come back swept the others' entries out, and each chunk of the others
    was filed again: a Python loop over all of them, on the request's path, under the lock."""
    n = 1000
    heap, ids = MinHeap(n), np.arange(n)
    heap.put(ids, np.zeros(n), ids)
    filed = heap._serial
    for use in range(1, 4):
        heap.discard(ids)
        for layer in np.split(ids, 10):
            heap.put(layer, np.full(len(layer), float(use)), layer + n * use)
            assert (heap._serial, len(heap._entries)) == (filed, n)
        heap.check()
    heap.discard(ids[:500])
    assert heap.take(n).tolist() == ids[500:].tolist()
    heap.put(ids[:500], 0.0, ids[:500])
    assert heap.take(n).tolist() == ids[:500].tolist()
    heap.check()
