"""How a request is served: which policy, which mode, and what the guard says of it.

Config.mode forced ─> that mode
auto: a policy not yet trusted counts as exact (guard); then the cheapest by the rates (choice)
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from impress.engines.choice import Choice, Rates, forced
from impress.engines.costs import Stored
from impress.engines.hf_chosen import by_importance, check_policy, chooses
from impress.engines.hf_models import Prompt
from impress.engines.hf_prefix import StoredPrefix
from impress.engines.hf_request import Request
from impress.policy import Exact, KeepAll, Policy
from impress.quality.guard import Decision
from impress.store import PrefixStore

log = logging.getLogger("impress")

EXACT = Exact()


@dataclass(frozen=True, slots=True)
class Way:
    """What was decided for a request. `policy`: the one asked for."""

    policy: Policy
    choice: Choice
    stored: Stored | None = None
    """The prefix, as it was stored when this was decided; None on a miss."""
    guard: str = "off"
    watched: Decision | None = None
    """Set where the request is to be weighed after its answer."""
    ledger: bytes = b""
    lost_s: float = 0.0
    """How long after its turn the prefix was given up as lost; all was computed from there on."""
    late: str = ""
    """The mode in which it was to be read, where that came too late."""

    @property
    def reads_by(self) -> Policy:
        """The policy to read by: one that chooses rows only where the mode lets it."""
        return self.policy if self.choice.mode == "sparse" else EXACT


class Modes:
    """The modes of one engine, for one thread. `rates`: what its requests have cost."""

    def __init__(self, model: Any, store: PrefixStore, policy: Policy) -> None:
        by_last_use = store.config.eviction in ("lru", "prefix-lru")
        self.rates = Rates(on_device=model.device.type != "cpu", by_last_use=by_last_use)
        self._model = model
        self._store = store
        self._own = policy
        self.ledger: bytes | None = None
        """Key of the own policy's ledger; None where nothing is guarded."""
        self._told: set[str] = set()  # policies whose hits lacked importance, which was logged
        config, attention = store.config, model.config._attn_implementation
        unguarded = isinstance(policy, Exact | KeepAll) or config.guard == "off"
        if unguarded or config.mode != "auto":
            if by_importance(policy) and attention != "sdpa":
                log.warning(
                    "%s attention cannot be observed, so what is stored under it has no importance "
                    "and its hits under %s are exact: use sdpa", attention, policy.name,
                )  # fmt: skip
            return
        self.ledger = store.ledgers.open(store.namespace, policy, config)
        if attention != "sdpa":
            log.warning(
                "guard: %s attention cannot be observed, so %s earns no trust and hits stay exact: "
                'use sdpa, or Config.guard = "off"', attention, policy.name,
            )  # fmt: skip

    def policy_of(self, asked: Policy | None) -> Policy:
        """A call's policy, or the engine's. Raises what `check_policy` does."""
        if asked is None:
            return self._own
        check_policy(asked, self._store.geometry, self._store.window)
        return asked

    def way(
        self, prompt: Prompt, prefix: StoredPrefix | None, asked: Policy | None, missed: str = ""
    ) -> Way:
        """How to go about a request that has this prefix stored, and why; `missed`: why it has
        none.

        Effects: tells the prefix whether all its rows would be read this once.
        """
        policy = self._own if asked is None else asked
        ledger = self.ledger if asked is None else None
        if prefix is None:
            said = "off" if ledger is None else self._store.ledgers.said(ledger)
            why = missed
            if prompt.whole:
                why = f"{prompt.whole}, so none is reused"
            return Way(policy, Choice("recompute", f"recompute: {why}"), guard=said)
        stored = self._stored(prompt, prefix)
        if ledger is None:
            own = "sparse" if chooses(policy) else "exact"
            return Way(policy, self._choose(prompt, stored, own, policy, prefix), stored)
        decision, said = self._decided(ledger)
        choice = self._choose(
            prompt, stored, decision.mode, policy, prefix, own_is_wanted=decision.wanted
        )
        watched = decision if decision.shadow and choice.mode == decision.mode else None
        return Way(
            policy, Choice(choice.mode, f"{choice.why}; guard: {said}"), stored, said, watched,
            ledger,
        )  # fmt: skip

    def _decided(self, ledger: bytes) -> tuple[Decision, str]:
        """The guard's decision and line for a hit; always exact where attention is unseen."""
        attention = self._model.config._attn_implementation
        if attention != "sdpa":
            return Decision("exact", shadow=False), f"{attention} attention cannot be observed"
        return self._store.ledgers.decide(ledger, self._store.config.guard_share)

    def _lacking(self, policy: Policy, prefix: StoredPrefix) -> str:
        """A line where the policy chooses by importance and the prefix has none; else empty."""
        if not by_importance(policy) or prefix.has_importance(policy):
            return ""
        why = f"the prefix was stored without the importance that {policy.name} goes by"
        if policy.name not in self._told:
            self._told.add(policy.name)
            log.warning("a hit is exact: %s; store it under a policy that chooses rows", why)
        return why

    def _stored(self, prompt: Prompt, prefix: StoredPrefix) -> Stored:
        geometry, n_tokens = self._store.geometry, len(prompt.rows) * prefix.n_tokens
        return Stored(
            n_tokens, len(prompt.rows) * geometry.n_layers, n_tokens * geometry.token_bytes,
            prefix.cold_bytes(), prefix.spans(), prefix.cache_bytes(),
        )  # fmt: skip

    def _choose(
        self, prompt: Prompt, stored: Stored, own: str, policy: Policy, prefix: StoredPrefix, *,
        own_is_wanted: bool = False,
    ) -> Choice:  # fmt: skip
        """A policy without the importance it needs reads all rows, unless that takes longest."""
        mode, lacking = self._store.config.mode, ""
        if own == "sparse" and mode in ("auto", "sparse"):
            lacking = self._lacking(policy, prefix)
            own = "exact" if lacking else own
        if mode == "auto":
            n_tokens, wanted = len(prompt.rows) * prompt.n_tokens, own_is_wanted and not lacking
            choice = self.rates.choose(own, n_tokens, stored, own_is_wanted=wanted)
            prefix.once = choice.once
        else:
            choice = forced(mode, own)
        if lacking and choice.mode == "exact":
            return Choice("exact", f"exact: {lacking}")
        return choice

    def lose(self, way: Way, reason: str, seconds: float) -> Way:
        """The way of a request whose prefix was lost so long after its turn: computing all of it.

        Effects: a shadow counts as dropped.
        """
        if way.watched is not None:
            self._store.ledgers.dropped(way.ledger)
        late = way.choice.mode if reason == "late" else ""
        choice = Choice("recompute", f"recompute: the prefix was lost ({reason})")
        return replace(way, choice=choice, lost_s=seconds, late=late)

    def learn(
        self, request: Request, way: Way, batch: int, turn_ms: float,
        unread: StoredPrefix | None = None,
    ) -> None:  # fmt: skip
        """Learn what requests cost on this machine; `turn_ms`: from its turn to its first token.
        `unread`: a prefix that the request had, and recomputed."""
        if unread is not None:
            unread.passed_by()
        wait_s = sum(line["wait_ms"] for line in request.per_layer) / 1e3
        n_computed = batch * (request.n_tokens - request.hit_tokens)
        forward_s = max(turn_ms / 1e3 - wait_s - way.lost_s, 0.0)
        self.rates.note_forward(request.mode, n_computed, forward_s)
        if way.late and way.stored is not None:  # else a slow disk would be tried with every hit
            self.rates.note_late(way.late, way.stored, way.lost_s + forward_s)
        if request.lost:  # what it took in all says nothing: the model began twice
            return
        if request.hit_tokens and way.stored is not None:
            self.rates.note_read(request.mode, way.stored, wait_s)
        if way.stored is not None:
            self.rates.note_request(request.mode, turn_ms / 1e3)
