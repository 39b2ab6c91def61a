"""What the scheduler's side knows of one request."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from impress.engines.vllm.step import Prompt
from impress.policy import Policy

#: What an answer says of its error.
_MASSES = ("estimated_missing_mass", "missing_mass_worst_head")
#: Numbers of requests, whatever their ids are.
_numbers = itertools.count()


class Tracked:
    """One request, as the scheduler's side knows it."""

    def __init__(self, request: Any, policy: Policy) -> None:
        self._number = next(_numbers)
        self.request = request
        self.policy = policy  # what it may get; sparse only if `private`
        self.refused = ""  # why neither read nor stored
        self.private = False  # no other request may share its blocks
        self.sparse = False  # its blocks hold chosen rows
        self.hit = (0, 0)  # as last asked: tokens in vLLM's own cache, and in all
        self.to_load = (0, 0)  # rows first..end-1, due in the next plan
        self.n_stored = 0  # tokens the store is known to hold
        self.n_saved = 0  # tokens handed over for saving
        self.handed = False  # anything, since it began or was preempted: its blocks may be read
        self.silent = False  # nothing of it is announced: READY may be what it was before a reset
        self.n_preempted = 0
        self.n_planned = 0  # tokens computed when the last plan made for it has been carried out
        self.n_blocks = 0  # that vLLM's worker has been told of
        self.served: dict[str, Any] = {}  # what was read since it began, or was preempted
        self.served_before: dict[str, Any] = {}  # for tokens that came before that
        self.n_before = 0  # tokens of its answer then
        self.prompt: tuple[int, str, Prompt] | None = None  # memo: its length, the reset's mark
        self._tokens: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)

    def tokens(self, n: int) -> npt.NDArray[np.int32]:
        """The first n token ids; converted once."""
        if n > len(self._tokens):
            self._tokens = np.asarray(self.request.all_token_ids[:], dtype=np.int32)
        return self._tokens[:n]

    @property
    def key(self) -> str:
        """Names its blocks until it is preempted. No other request ever has it."""
        return f"{self.request.request_id}#{self._number}.{self.n_preempted}"

    @property
    def said(self) -> dict[str, Any]:
        """What the answer says was read: it is as approximate as what any of its tokens saw."""
        return both(self.served_before, self.served)


def both(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What is said of what saw both reads: it is as approximate as either."""
    if not (before and now):
        return before or now
    if before["mode"] != now["mode"]:
        return before if before["mode"] == "sparse" else now
    if now["mode"] != "sparse":
        return now
    known = {name: {before[name], now[name]} - {None} for name in _MASSES}
    return {**now, **{name: max(masses, default=None) for name, masses in known.items()}}


def whole_of(request_id: str) -> str:
    """The request that this one answers: several answers of one come as 0_ID, 1_ID, …"""
    return re.sub(r"^\d+_", "", request_id)
