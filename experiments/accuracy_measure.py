"""One question under every arm: the likeliest choice, and how far each arm is from the full KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from experiments.arms import EXACT, Arm, Quantised
from experiments.behind import Behind, GivenRows, behind, stored_prefix, stored_rows
from experiments.common import Row, Unable
from impress.engines.hf_request import totals
from impress.store import PrefixStore
from impress.types import DTYPES

#: Tokens over which answers are compared with the full KV's.
N_DECODED: Final = 64
_READS: Final = {"rows": "chosen_rows_share", "bytes": "bytes_share",
                 "moved": "transferred_share", "fell_back": "fallback_share"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Query:
    """A question: the whole prompt's tokens, each choice's, and which is right.

    `lengths`: those of the choices in characters, for acc_norm; empty where that means nothing.
    """

    task: str
    prompt: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    gold: int
    lengths: tuple[int, ...] = ()


def check_stored(engine: Any) -> None:
    """Check that the last request's prompt is stored by now. Raises Unable."""
    engine.flush()
    if refused := engine.last_request.refused:
        raise Unable(f"not stored: {refused}")


class Prompts:
    """Questions after one stored prefix, asked under every arm. `prompt` names the prefix."""

    def __init__(
        self, model: Any, store: PrefixStore, arms: Mapping[str, Arm], prompt: Sequence[int]
    ) -> None:
        self._model, self._store, self._arms = model, store, arms
        self._prompt = tuple(prompt)
        self._quantised = cache(self._quantise)

    def ask(self, query: Query) -> Row:
        """{"task", "arms": {name: result}}. Exact goes first: the others are compared with it."""
        done: dict[str, Row] = {}
        full: tuple[Tensor, list[int]] | None = None
        for name in sorted(self._arms, key=lambda name: name != EXACT):
            done[name], full = self._answer(query, self._arms[name], full)
        return {"task": query.task, "arms": done}

    def _answer(
        self, query: Query, arm: Arm, full: tuple[Tensor, list[int]] | None
    ) -> tuple[Row, tuple[Tensor, list[int]]]:
        g, store = self._store.geometry, self._store
        prefix: Any
        if isinstance(arm, Quantised):
            prefix = self._quantised(arm)
        else:
            prefix = stored_prefix(store, query.prompt, arm)
        new = query.prompt[prefix.n_tokens :]
        room = len(new) + max(N_DECODED, *(len(choice) for choice in query.choices))
        with behind(self._model, g, prefix, room, store.buffers) as model:
            last = model.feed(new)[-1]
            scores = [_likelihood(model, last, choice) for choice in query.choices]
            if full is None:
                full = last.log_softmax(-1), model.decode(last, N_DECODED)
            same = model.agreement(last, full[1])
        if isinstance(arm, Quantised):
            share = arm.share(g.head_dim, DTYPES[g.dtype])
            read = {"rows": 1.0, "bytes": share, "moved": share, "fell_back": 0.0}
        else:
            said = totals(prefix.reports(), g)
            read = {name: said[field] for name, field in _READS.items()}
        kl = float((full[0].exp() * (full[0] - last.log_softmax(-1))).sum())
        made = {
            **_judged(scores, query), "kl": max(kl, 0.0), "agreed": float(np.mean(same)),
            "run": _run(same), **read,
        }  # fmt: skip
        return {name: _short(value) for name, value in made.items()}, full

    def _quantise(self, arm: Quantised) -> GivenRows:
        rows = stored_rows(self._store, self._prompt)
        return arm.of(rows, self._store.geometry.n_layers)


def _likelihood(model: Behind, last: Tensor, choice: Sequence[int]) -> float:
    """Log-likelihood of a choice's tokens after the prompt, as lm-eval sums it."""
    logits = last[None]
    if len(choice) > 1:
        logits = torch.cat([logits, model.feed(choice[:-1])])
        model.rewind(len(choice) - 1)
    wanted = torch.tensor(choice)[:, None]
    return float(logits.log_softmax(-1).gather(1, wanted).sum())


def _judged(scores: Sequence[float], query: Query) -> Row:
    """The likeliest choice; with lengths, also by likelihood per character (acc_norm)."""
    chosen = int(np.argmax(scores))
    made: Row = {"chosen": chosen, "right": chosen == query.gold}
    if query.lengths:
        made["right_norm"] = int(np.argmax(np.array(scores) / query.lengths)) == query.gold
    return made


def _run(same: Sequence[bool]) -> int:
    """Tokens before the first that differs."""
    return list(same).index(False) if not all(same) else len(same)


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
