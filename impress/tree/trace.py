"""How far a prompt matches what is stored, and what lies where it stops. Pure, over the tree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from impress.tree.nodes import NONE
from impress.tree.radix import RadixTree, View, Walker
from impress.types import Prefix


@dataclass(frozen=True, slots=True)
class Step:
    """One node of the match: the windows it holds, its leases, the lease counter at the last."""

    view: View
    hits: int
    used: int


@dataclass(frozen=True, slots=True)
class Near:
    """What is stored after the match instead of the prompt's next window.

    `same_tokens`: how many of that window's tokens agree before one differs; also 0 where either
    window is known by a digest alone (`sealed`). `n_windows`: of the whole stored prompt, taking
    the most leased way on at every fork; `hits`: leases through its last node.
    """

    span: int
    same_tokens: int
    sealed: bool
    n_windows: int
    hits: int


@dataclass(frozen=True, slots=True)
class Trace:
    """`n_ways`: different windows stored after the match; `near` is the nearest of them, if there
    are any and the prompt goes on there. `tick`: the lease counter now."""

    steps: tuple[Step, ...]
    n_windows: int
    n_ways: int
    near: Near | None
    tick: int


class Branch(NamedTuple):
    """A node of the tree, as `walk` shows it. Without labels: for all paths together they would be
    as many times the tree's own as it is deep.

    `n_windows`: from the root to its end; `hits`: leases through it.
    """

    depth: int
    view: View
    root: bytes
    n_windows: int
    hits: int


def traces(
    tree: RadixTree, roots: Iterable[bytes], labels: bytes, size: int, tick: int
) -> dict[bytes, Trace]:
    """Follow whole windows of `size` bytes from each root. Changes nothing."""
    children = tree.walker()  # shared: where nodes have many children it looks at the whole tree
    return {root: _trace(tree, root, labels, size, tick, children) for root in roots}


def _trace(
    tree: RadixTree, root: bytes, labels: bytes, size: int, tick: int, children: Walker
) -> Trace:
    match = tree.match(root, labels)
    steps = tuple(
        Step(view, tree.hits[node], tree.used[node])
        for node, view in zip(match.nodes, tree.views(match), strict=True)
    )
    ways = _ways(tree, root, match.nodes, match.last_count * size, children)
    wanted = labels[match.n_windows * size : (match.n_windows + 1) * size]
    near = _nearest(tree, ways, wanted, match.n_windows, children) if ways and wanted else None
    return Trace(steps, match.n_windows, len(ways), near, tick)


def _ways(
    tree: RadixTree, root: bytes, nodes: list[int], cut: int, children: Walker
) -> list[tuple[int, int]]:
    """(node, where its label goes on) for everything stored right after a match."""
    if nodes and cut < len(tree.label(nodes[-1])):
        return [(nodes[-1], cut)]
    above = nodes[-1] if nodes else tree.roots.get(root, NONE)
    return [] if above == NONE else [(child, 0) for child in children(above)]


def _nearest(
    tree: RadixTree, ways: list[tuple[int, int]], wanted: bytes, n_before: int, children_of: Walker
) -> Near:
    size = len(wanted)
    ours = np.frombuffer(wanted, dtype="<i4")
    windows = b"".join(tree.label(node)[at : at + size] for node, at in ways)
    theirs = np.frombuffer(windows, dtype="<i4").reshape(len(ways), -1)
    sealed = (theirs[:, 0] < 0) | (ours[0] < 0)
    same = np.where(sealed, 0, np.argmax(theirs != ours, axis=1))  # an equal one would match
    best = int(np.argmax(same - sealed))
    node, at = ways[best]
    span = tree.view(node).span
    n_bytes = len(tree.label(node)) - at
    while children := children_of(node):
        node = max(children, key=lambda child: tree.hits[child])
        n_bytes += len(tree.label(node))
    n_windows = n_before + n_bytes // size
    return Near(span, int(same[best]), bool(sealed[best]), n_windows, tree.hits[node])


def path_of(tree: RadixTree, node: int, size: int) -> Prefix:
    """The prompt that ends with this node."""
    path = tree.path(node)
    labels = b"".join(tree.label(n) for n in path)
    root = tree.label(tree.parent(path[0]))
    return Prefix(root, len(labels) // size, tree.hits[node], labels)


def walk(tree: RadixTree) -> list[Branch]:
    """Every node, parents before children."""
    rows, children = [], tree.walker()
    for root, top in tree.roots.items():
        todo = [(0, child) for child in children(top)]
        while todo:
            depth, node = todo.pop()
            rows.append(Branch(depth, tree.view(node), root, tree.end[node], tree.hits[node]))
            todo += [(depth + 1, child) for child in children(node)]
    return rows
