"""Which leaves are evicted from the tree first. Pure.

all leaves ─score─> a batch of the least ─pop─> gone; its parent, if a leaf now, joins the batch
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from impress.spans.format import SpanRecord
from impress.tree.nodes import Ids
from impress.tree.radix import RadixTree, Walker
from impress.usage.prefix_lru import prefix_lru
from impress.usage.remembered import HALF_LIFE

Floats = npt.NDArray[np.floating[Any]]

#: (span, hits, used, end) of some leaves -> a number each; the least goes first.
Score = Callable[[Ids, Ids, Ids, Ids], Floats]
#: What a leaf is sorted by: its score, its last use, its span's age; then the node itself.
Key = tuple[float, int, int, int]
#: Leaves looked at in one go.
BATCH: Final = 1024
#: Every span id there can be.
ALL: Final = range(1 << 62)
#: Smaller shares of needed rows count as this: a span that is used is worth something.
LEAST_SHARE: Final = 1 / 1024


class Leaves(NamedTuple):
    """Nodes without children, in arrays of one length. `used`: as in the tree.

    `end`: windows from the root to the leaf's end.
    """

    node: Ids
    span: Ids
    hits: Ids
    used: Ids
    end: Ids


@dataclass(frozen=True, slots=True)
class Dead:
    """A span of n_windows, n_dead of which are in no node any more; n_bytes is what those own."""

    span: int
    n_dead: int
    n_windows: int
    n_bytes: int

    @classmethod
    def of(cls, record: SpanRecord, n_dead: int) -> Dead:
        n_bytes = record.data_bytes * n_dead // record.n_windows
        return cls(record.span_id, n_dead, record.n_windows, n_bytes)


def by_last_use(span: Ids, hits: Ids, used: Ids, end: Ids) -> Floats:
    """LRU."""
    return used.astype(np.float64)


def by_uses(span: Ids, hits: Ids, used: Ids, end: Ids) -> Floats:
    """LFU."""
    return hits.astype(np.float64)


def by_prefix(span: Ids, hits: Ids, used: Ids, end: Ids) -> Floats:
    """LRU; of those last used at the same time, the longest prefix first."""
    return prefix_lru(used, end)


class ByWorth:
    """Uses × mean share of rows that requests needed, fading with age; in log2.

    Being stored counts as one use; a span nobody has leased yet counts as leased once, or it would
    go before all that were. Uses fade from the last one on, by half every HALF_LIFE leases, so that
    the order of two spans that are left alone never changes. `shares`: span -> mean share of rows
    needed; a span without one gets the mean of theirs: given the best, spans that have not been in
    memory since the store was opened would outlive spans in use.
    """

    def __init__(self, shares: Mapping[int, float]) -> None:
        self._spans = np.array(sorted(shares), dtype=np.int64)
        self._log2 = np.log2([max(shares[s], LEAST_SHARE) for s in self._spans.tolist()])
        self._other = float(self._log2.mean()) if shares else 0.0

    def __call__(self, span: Ids, hits: Ids, used: Ids, end: Ids) -> Floats:
        worth = np.log2(np.maximum(hits, 1) + 1.0) + used / HALF_LIFE
        if len(self._spans):
            at = np.minimum(np.searchsorted(self._spans, span), len(self._spans) - 1)
            worth += np.where(self._spans[at] == span, self._log2[at], self._other)
        return np.asarray(worth)


def score_of(eviction: str, shares: Mapping[int, float]) -> Score:
    """The score that `Config.eviction` names. Raises KeyError for a name that is not known."""
    scores: dict[str, Score]
    scores = {
        "lru": by_last_use, "lfu": by_uses, "prefix-lru": by_prefix, "importance": ByWorth(shares),
    }  # fmt: skip
    return scores[eviction]


def least(
    tree: RadixTree,
    pinned: Collection[int],
    score: Score,
    limit: int = BATCH,
    own: range = ALL,
) -> Iterator[int]:
    """Leaves to take out, least score first, never of a span that is held or not in `own`.

    At most about `limit`.

    The caller removes each before asking for the next, so that its parent may become one. Ends
    where a leaf not looked at might score less: call again for more. Vectorised.
    """
    nodes = tree.leaves()
    leaves = Leaves(nodes, *tree.columns(nodes))
    mine = (leaves.span >= own.start) & (leaves.span < own.stop)
    if not mine.all():
        leaves = Leaves(*(column[mine] for column in leaves))
    queue, bound = _queue(leaves, pinned, score, limit)
    while queue and queue[0] <= bound:
        *_, leaf = heappop(queue)
        above = tree.parent(leaf)
        yield leaf
        if tree.is_leaf(above):
            span = tree.view(above).span
            if span not in pinned and span in own:
                row = (span, tree.hits[above], tree.used[above], tree.end[above])
                heappush(queue, _key(score, above, *row))


def _queue(
    leaves: Leaves, pinned: Collection[int], score: Score, limit: int
) -> tuple[list[Key], Key]:
    """At most `limit` keys, ascending, and a bound: no leaf left out has a lesser key."""
    if pinned:
        free = ~np.isin(leaves.span, np.fromiter(pinned, dtype=np.int64, count=len(pinned)))
        leaves = Leaves(*(column[free] for column in leaves))
    columns = (score(*leaves[1:]), leaves.used, leaves.span, leaves.node)
    best = _least_rows(columns, limit)
    keys = sorted(zip(*(column[best].tolist() for column in columns), strict=True))
    return keys, keys[-1] if len(keys) < len(leaves.node) else (np.inf, 0, 0, 0)


def _least_rows(columns: Sequence[npt.NDArray[Any]], n: int) -> Ids:
    """The n rows that come first by the first column, of equals by the next, and so on. By the
    first alone, of a thousand stored at once and used equally the newest may go before the oldest.
    """
    found, left = [], np.arange(len(columns[0]))
    for column in columns:
        if n >= len(left):
            break
        values = column[left]
        at = np.partition(values, n - 1)[n - 1]
        found.append(left[values < at])
        n -= len(found[-1])
        left = left[values == at]
    return np.concatenate((*found, left[:n]))


def _key(score: Score, node: int, span: int, hits: int, used: int, end: int) -> Key:
    value = score(*(np.array([n], dtype=np.int64) for n in (span, hits, used, end)))
    return float(value[0]), used, span, node


def crowned(
    tree: RadixTree, held: Collection[int], score: Score, own: range, children: Walker
) -> Iterator[int]:
    """Own nodes from which only others' spans hang, none of them held; least score first."""
    nodes = tree.nodes()
    spans = tree.columns(nodes)[0]
    theirs = nodes[(spans < own.start) | (spans >= own.stop)]
    above = {tree.parent(node) for node in theirs.tolist()}
    mine = {node for node in above if tree.view(node).span in own}
    found = np.fromiter(mine, dtype=np.int64, count=len(mine))
    for i in np.argsort(score(*tree.columns(found)), kind="stable").tolist():
        node = int(found[i])
        below = {tree.view(n).span for n in tree.subtree(node, children)[:-1]}
        kept = below.intersection(held) or any(span in own for span in below)
        if not kept and tree.view(node).span not in held:
            yield node
