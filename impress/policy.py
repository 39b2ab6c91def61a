"""Policies: what a session loads of a prefix. One for now; others come the same way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Policy(Protocol):
    """How a session chooses rows."""

    @property
    def name(self) -> str:
        """As it appears in reports."""

    @property
    def needs_suffix_lse(self) -> bool:
        """Whether `retrieve` must be given the log-sum-exp over the new tokens."""


@dataclass(frozen=True, slots=True)
class Exact:
    """Load every row, in position order: bit-identical to continuing from what was stored."""

    name: str = "exact"
    needs_suffix_lse: bool = False
