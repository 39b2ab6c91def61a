"""The chosen mode, with caches that follow what is read: how far it is from the best of one mode.

Real are `Rates`, which choose, and `History`, by which chunks are worth a place; simulated are the
caches (one level, chunks by their rank), how requests choose rows, and what a request takes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from impress.engines.choice import Choice, Rates
from impress.engines.costs import Span, Stored
from impress.usage.history import History
from impress.usage.notes import Note

W, CHUNKS, LAYERS = 64, 80, 32
ROWS = W * CHUNKS
PREFIX_BYTES = 2_600_000_000
OWN_S = 0.012  # for a request's own tokens
LEAST = 380  # requests until caches have settled, and whether to read hot prefixes whole


class Shape(NamedTuple):
    """Seconds to recompute a prefix; to read all of it, or rows of it, from the caches; and more
    where all of that lies in none. As measured in `ttft`, on the paper's machine."""

    recompute: float = 0.47
    exact: float = 0.155
    exact_cold: float = 0.44
    sparse: float = 0.16
    sparse_cold: float = 0.33


class Machine:
    """Serves requests for prefixes in one mode, or as `Rates` choose ("auto")."""

    def __init__(
        self, mode: str, *, room: float, n_prefixes: int = 5, zipf: float = 0.9,
        fell_back: float = 0.0, shape: Shape | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        """`room`: of the caches, in prefixes. `fell_back`: share of layers that are read whole
        where rows are chosen. The first cold read takes six times as long as others, and one in a
        hundred three times."""
        self.mode, self.room, self.fell_back = mode, round(room * CHUNKS), fell_back
        self.shape = Shape() if shape is None else shape
        asked, sizes = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
        weights = np.arange(1, n_prefixes + 1) ** -zipf
        popularity = sizes.permutation(weights / weights.sum())
        self.asked: list[int] = asked.choice(n_prefixes, 800, p=popularity).tolist()
        self.size = sizes.uniform(0.9, 1.1, n_prefixes)
        self.noise = np.random.default_rng([seed, 2])
        self.ranks = np.full((n_prefixes, CHUNKS), -np.inf)
        self.held = np.zeros((n_prefixes, CHUNKS), dtype=bool)
        self.history = History(1, W, 1 << 30)
        self.n_cold = 0
        self.rates = Rates()
        self.rates.note_forward("recompute", ROWS, self.shape.recompute)

    def mean_s(self) -> float:
        """Of requests after the first LEAST."""
        return float(np.mean([self._serve(prefix) for prefix in self.asked][LEAST:]))

    def _serve(self, prefix: int) -> float:
        size, cold = float(self.size[prefix]), 1 - float(self.held[prefix].mean())
        if self.mode == "recompute":  # caches stay as they are, and nobody asks what was learnt
            return self.shape.recompute * size
        n_tokens, n_bytes = int(ROWS * size), int(PREFIX_BYTES * size)
        stored = Stored(
            n_tokens, LAYERS, n_bytes, int(cold * n_bytes), (Span(bytes([prefix]), n_bytes),),
            int(self.room / CHUNKS * PREFIX_BYTES),
        )  # fmt: skip
        choice = Choice(self.mode, "the only one")
        if self.mode == "auto":
            choice = self.rates.choose("sparse", n_tokens + 30, stored)
        rows, own_s = self._rows(), OWN_S
        fell_back = choice.mode == "sparse" and self.noise.random() < self.fell_back
        if choice.mode == "recompute":
            own_s, read_s = self.shape.recompute * size, 0.0
        else:
            read_s = size * self._read_s(choice.mode, prefix, cold, rows)
        if self.mode == "auto":
            n_own = n_tokens + 30 - (n_tokens if read_s else 0)
            self.rates.note_forward(choice.mode, n_own, own_s)
            if read_s:
                self.rates.note_read(choice.mode, stored, read_s)
            self.rates.note_request(choice.mode, own_s + read_s)
        chosen = rows if choice.mode == "sparse" and not fell_back else None
        self._learn(prefix, choice, chosen)
        return own_s + read_s

    def _rows(self) -> np.ndarray:
        """A quarter of the rows; eight tenths of them among those chosen most often, which lie in
        the first chunks."""
        n = ROWS // 4
        often = self.noise.choice(n, n * 8 // 10, replace=False)
        others = n + self.noise.choice(ROWS - n, n - len(often), replace=False)
        return np.sort(np.concatenate([often, others])).astype(np.int64)

    def _read_s(self, mode: str, prefix: int, cold: float, rows: np.ndarray) -> float:
        shape = self.shape
        whole = shape.exact - OWN_S + shape.exact_cold * cold
        missed = float((~self.held[prefix][rows // W]).mean())
        some = shape.sparse - OWN_S + shape.sparse_cold * missed
        some += self.fell_back * (whole + 0.03 - some)
        seconds = (whole if mode == "exact" else some) * self.noise.lognormal(0, 0.15)
        if cold > 0.05:
            seconds *= 6 if not self.n_cold else 3 if self.noise.random() < 0.01 else 1
            self.n_cold += 1
        return float(seconds)

    def _learn(self, prefix: int, choice: Choice, chosen: np.ndarray | None) -> None:
        """Notes as a session gives them, and the caches follow."""
        read_all = choice.mode == "exact" and not choice.once
        whole = read_all or (choice.mode == "sparse" and chosen is None)
        note = Note(prefix, ROWS, 0, 0, ROWS, chosen, None, whole, read_all)
        self.history.request([note])
        if choice.mode == "recompute":
            return
        worth = self.history.worth(prefix, 0)
        assert worth is not None
        self.ranks[prefix] = worth.ranks
        used = np.arange(CHUNKS) if chosen is None else np.unique(chosen // W)
        wanted = used[~self.held[prefix][used]]
        for chunk in wanted[np.argsort(-self.ranks[prefix][wanted], kind="stable")].tolist():
            if self.held.sum() >= self.room:
                ranks = np.where(self.held, self.ranks, np.inf)
                least = np.unravel_index(ranks.argmin(), ranks.shape)
                if ranks[least] >= self.ranks[prefix, chunk]:
                    break
                self.held[least] = False
            self.held[prefix, chunk] = True


CASES = {
    "much room": {"room": 2.2, "n_prefixes": 4},
    "as in the base cell": {"room": 1.37},
    "little room": {"room": 0.96, "n_prefixes": 7},
    "one prefix is most of it": {"room": 1.37, "zipf": 1.2},
    "a quarter falls back": {"room": 1.37, "fell_back": 0.25},
    "nearly all falls back": {"room": 1.37, "fell_back": 0.9},
    "30b": {"room": 1.1, "n_prefixes": 4, "shape": Shape(1.37, 0.2, 0.9, 0.33, 0.7)},
    "grouped queries": {
        "room": 6.0, "n_prefixes": 22, "shape": Shape(0.48, 0.055, 0.075, 0.1, 0.07),
    },
    "a slow disk": {"room": 1.37, "shape": Shape(0.47, 0.16, 0.9, 0.15, 0.7)},
    "recomputing is quick": {"room": 1.37, "shape": Shape(0.2, 0.16, 0.435, 0.15, 0.35)},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_chosen_mode_is_near_the_best_of_one_mode(case: str) -> None:
    """Up to 1.39 times it, and 1.2 in most of these, where a read that was measured again, a try of
    reading hot prefixes whole, or recomputing what was cold left caches that nothing emptied or
    filled again. The bar is 1.05, of the mean over what is measured in `ttft`."""
    ratios = []
    for seed in range(3):
        best = min(
            Machine(mode, seed=seed, **CASES[case]).mean_s()  # type: ignore[arg-type]
            for mode in ("sparse", "exact", "recompute")
        )
        ratios.append(Machine("auto", seed=seed, **CASES[case]).mean_s() / best)  # type: ignore[arg-type]
    assert np.mean(ratios) < 1.05 and max(ratios) < 1.1, ratios
