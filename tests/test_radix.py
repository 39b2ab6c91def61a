"""The tree of prefixes against a dictionary."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impress.tree.nodes import NONE
from impress.tree.radix import RadixTree
from impress.tree.trace import traces, walk

SIZE = 8  # bytes of a window's label


def labels_of(path: tuple[int, ...]) -> bytes:
    return b"".join(bytes([kind]) * SIZE for kind in path)


paths = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from("ab"), paths, st.booleans()), max_size=25))
def test_agrees_with_a_dictionary_of_prefixes(
    steps: list[tuple[str, tuple[int, ...], bool]],
) -> None:
    tree, stored = RadixTree(SIZE), dict[tuple[str, tuple[int, ...]], tuple[int, int]]()
    for span, (root, path, remove) in enumerate(steps):
        key = root.encode()
        if remove:
            match = tree.match(key, labels_of(path))
            if match.nodes:
                node = match.nodes[-1]
                full = b"".join(tree.label(n) for n in tree.path(node))
                gone = tuple(full[i] for i in range(0, len(full), SIZE))
                for below in tree.subtree(node):
                    tree.remove(below)
                cut = tree.match(key, full).n_windows
                for known in [k for k in stored if k[0] == root and k[1][: len(gone)] == gone]:
                    del stored[known]
                for n in range(cut + 1, len(gone) + 1):
                    stored.pop((root, gone[:n]), None)
        else:
            before = tree.match(key, labels_of(path)).n_windows
            graft = tree.graft(tree.root(key), labels_of(path), span, 0)
            assert graft.added == len(path) - before
            for n in range(before + 1, len(path) + 1):
                stored[root, path[:n]] = (span, n - 1)
        tree.check()
        assert tree.n_windows == len(stored)
        assert tree.roots.keys() == {root.encode() for root, _ in stored}
        for probe_root, probe in {(r, p) for r, p, _ in steps}:
            match = tree.match(probe_root.encode(), labels_of(probe))
            want = next(
                (n for n in range(len(probe), 0, -1) if (probe_root, probe[:n]) in stored), 0
            )
            assert match.n_windows == want
            got = [
                (view.span, view.first + i)
                for view in tree.views(match)
                for i in range(view.n_windows)
            ]
            assert got == [stored[probe_root, probe[: n + 1]] for n in range(want)]


def test_a_split_makes_two_views_and_touches_no_span() -> None:
    tree = RadixTree(SIZE)
    root = tree.root(b"r")
    tree.graft(root, labels_of((0, 1, 2, 3)), 7, 0)
    graft = tree.graft(root, labels_of((0, 1, 5)), 8, 0)
    assert graft.split == 7
    views = tree.views(tree.match(b"r", labels_of((0, 1, 2, 3))))
    assert [tuple(view) for view in views] == [(7, 0, 2), (7, 2, 2)]
    assert [tuple(v) for v in tree.views(tree.match(b"r", labels_of((0, 1, 5))))] == [
        (7, 0, 2),
        (8, 2, 1),
    ]


def test_a_graft_whose_ancestors_are_missing_adds_nothing() -> None:
    tree = RadixTree(SIZE)
    assert tree.graft(tree.root(b"r"), labels_of((0, 1, 2)), 1, 2) == (NONE, 0, NONE)
    assert tree.n_windows == 0


def test_leaves_say_when_they_were_last_used() -> None:
    tree = RadixTree(SIZE)
    for kind in range(9):
        tree.graft(tree.root(b"r"), labels_of((kind,)), kind, 0)
    for tick, kind in enumerate([3, 1, 4, 8, 0, 2, 7, 6, 5]):
        tree.touch(tree.match(b"r", labels_of((kind,))), tick + 1)
    leaves = tree.leaves()
    span, _, used, _ = tree.columns(leaves)
    oldest = span[np.argsort(used)].tolist()
    assert oldest == [3, 1, 4, 8, 0, 2, 7, 6, 5]


def test_a_thousand_children_are_told_apart() -> None:
    tree, rng = RadixTree(SIZE), np.random.default_rng(0)
    labels = {rng.bytes(SIZE) for _ in range(1000)}
    for span, label in enumerate(sorted(labels)):
        tree.graft(tree.root(b"r"), label, span, 0)
    tree.check()
    assert all(
        tree.views(tree.match(b"r", label))[0].span == span
        for span, label in enumerate(sorted(labels))
    )
    assert tree.match(b"r", rng.bytes(SIZE)).n_windows == 0


def fanned() -> tuple[RadixTree, int]:
    """A tree in which 201 nodes have many children, and its topmost node, which is one of them.
    The tree also has a prompt under another root."""
    tree, spans = RadixTree(SIZE), itertools.count()

    def add(above: int, kind: int) -> int:
        return tree.graft(above, kind.to_bytes(SIZE, "little"), next(spans), 0).node

    top = add(tree.root(b"r"), 0)
    for node in [add(top, kind) for kind in range(1, 201)]:
        for kind in range(5):
            add(node, kind)
    for kind in (201, 202):  # these have few, or none
        last = add(top, kind)
    add(add(last, 1), 1)
    add(tree.root(b"other"), 0)
    return tree, top


def family(tree: RadixTree) -> dict[int, set[int]]:
    """Each node's children, and each root's."""
    children: dict[int, set[int]] = {}
    for node in tree.nodes().tolist():
        children.setdefault(tree.parent(node), set()).add(node)
    return children


@pytest.mark.parametrize("what", ["subtree", "walk", "trace"])
def test_a_walk_looks_at_all_nodes_once_however_many_of_them_have_many_children(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked once for each of these nodes: in a large tree that took minutes, and meanwhile
    nobody could look up a prompt."""
    tree, top = fanned()
    children, looks, flatnonzero = family(tree), list[int](), np.flatnonzero
    node_of = {tree.view(node).span: node for node in tree.nodes().tolist()}

    def counted(column: np.ndarray) -> np.ndarray:
        looks.append(len(column))
        return flatnonzero(column)

    monkeypatch.setattr(np, "flatnonzero", counted)
    if what == "subtree":
        found, below = tree.subtree(top), [top]
        for node in below:  # it grows
            below += children.get(node, ())
        assert sorted(found) == sorted(below) and found[-1] == top
        place = {node: at for at, node in enumerate(found)}
        assert all(place[child] < place[node] for node in below for child in children.get(node, ()))
    elif what == "walk":
        path: list[int] = []
        rows = walk(tree)
        for depth, view, root, n_windows, hits in rows:
            path[depth:] = [node_of[view.span]]
            assert path == tree.path(path[-1]), "right below its parent"
            assert tree.roots[root] == tree.parent(path[0])
            assert (view.n_windows, n_windows, hits) == (1, depth + 1, 0)
        spans = [row.view.span for row in rows]
        assert sorted(spans) == list(range(tree.n_nodes))
    else:
        near = traces(tree, [b"r"], b"\x09" * SIZE, SIZE, 0)[b"r"].near
        assert near is not None and near.n_windows == 3
    assert len(looks) == 1, "it was looked for, and once"
    monkeypatch.undo()
    if what == "subtree":
        for node in found:
            tree.remove(node)
        assert tree.roots.keys() == {b"other"} and tree.n_nodes == 1
    tree.check()


def test_one_walker_serves_several_walks_between_which_nodes_go() -> None:
    """Otherwise a purge looks through all nodes for each of the tenants that it takes out."""
    tree, top = fanned()
    below, children = family(tree), tree.walker()
    for node in (*sorted(below[top])[3:6], top):
        found = tree.subtree(node, children)
        assert sorted(found) == sorted(tree.subtree(node)) and found[-1] == node
        for one in found:
            tree.remove(one)
    tree.check()
    assert tree.roots.keys() == {b"other"} and tree.n_nodes == 1


def test_a_walk_of_a_deep_tree_takes_little_memory() -> None:
    """It held the labels of each node's whole path: GBs for `impress inspect --tree` in a store of
    long chats, with one node per turn."""
    tree, n_nodes = RadixTree(SIZE), 2000
    above = tree.root(b"r")
    for span in range(n_nodes):
        above = tree.graft(above, span.to_bytes(SIZE, "little"), span, 0).node
    tracemalloc.start()
    try:
        rows = walk(tree)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [row.n_windows for row in rows] == list(range(1, n_nodes + 1))
    assert peak < n_nodes * 1000, "the paths' labels alone would be 16 MB"
