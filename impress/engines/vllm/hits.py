"""The scheduler's side: what a request may reuse, and what its prompt is called."""

from __future__ import annotations

import logging
import math
import secrets
import time
from typing import Any, Final

from impress.engines.vllm.gaps import Gaps
from impress.engines.vllm.keys import Adapters, extras_of, vllm_keys_of
from impress.engines.vllm.settings import Served, Settings, asked_of, at_least, policy_of
from impress.engines.vllm.shared import View
from impress.engines.vllm.step import Prompt
from impress.engines.vllm.tracked import Tracked
from impress.errors import ImpressError
from impress.policy import Exact, Policy

log = logging.getLogger("impress")

_HASH_BYTES: Final = 32


class Hits:
    """For vLLM's scheduler thread: lookups in memory, and looks at adapters' files (keys.py)."""

    def __init__(self, settings: Settings, served: Served, view: View) -> None:
        self._settings = settings
        self._view = view
        self._block_size = served.block_size
        self.gaps = Gaps(settings.config.window)
        self._unit = math.lcm(served.block_size, settings.config.window)  # of a hit
        self._keys_of = vllm_keys_of()
        self._adapters = Adapters(served.lora, time.time_ns())
        self._mixes_adapters = served.mixes_adapters
        if served.mixes_adapters:
            log.warning(
                "vLLM's LoRA on the CPU may mix an adapter into requests that name none: they are "
                "served without the store"
            )
        self._reset = ""  # in every key since the cache was reset

    def track(self, request: Any) -> Tracked:
        """A request has come: may it be reused, under which policy, may others share its blocks?"""
        tracked = Tracked(request, self._policy_of(request))
        if request.resumable:
            tracked.refused = "its prompt may still change"
        elif request.pooling_params is not None:
            tracked.refused = "it generates nothing"
        if request.lora_request is not None:
            try:  # even for a request that is not to be stored: vLLM loads the adapter for it
                self._adapters.digest(request.lora_request)
            except ImpressError as err:
                tracked.refused = str(err)
        elif self._mixes_adapters:
            tracked.refused = "vLLM may mix an adapter into it"
        if tracked.refused or isinstance(tracked.policy, Exact):
            return tracked
        # Before vLLM looks in its own cache: a sparse prefix is never read from there.
        if not request.skip_reading_prefix_cache and self._stored(tracked):
            tracked.private = True
            privatise(request)
        return tracked

    def _policy_of(self, request: Any) -> Policy:
        try:  # vLLM calls this unguarded: an error here ends its engine
            asked = asked_of(request.kv_transfer_params)
            if asked is None:
                return self._settings.policy
            policy = policy_of(asked)
        except ImpressError as err:
            log.warning("request %s: %s; served exactly", request.request_id, err)
            return Exact()
        floor = self._settings.floor
        if not at_least(policy, floor):
            log.warning("request %s: %r is looser than %r", request.request_id, policy, floor)
            return floor
        return policy if self._settings.sparse else Exact()  # keep_all: no layer would choose

    def prompt(self, tracked: Tracked, n: int) -> Prompt:
        """The first n tokens and their names. Raises Unsupported if a key is unknown, or no longer
        true: an adapter's files may change while its request waits."""
        memo = tracked.prompt
        if memo is not None and memo[:2] == (n, self._reset):
            if tracked.request.lora_request is not None:
                self._adapters.digest(tracked.request.lora_request)
        else:
            extra, tenant = extras_of(
                tracked.request, n, self._block_size, self._keys_of, self._adapters
            )
            memo = n, self._reset, Prompt(tracked.tokens(n), extra, tenant + self._reset)
            tracked.prompt = memo
        return memo[2]

    def _stored(self, tracked: Tracked) -> int:
        """How many stored tokens vLLM can take over: whole blocks, one token left to compute."""
        n: int = tracked.request.num_tokens
        if tracked.refused or n <= self._unit:
            return 0
        try:
            prompt = self.prompt(tracked, n)
            found = self._view.lookup(prompt.tokens, prompt.extra, prompt.tenant)
            found = self.gaps.cut(prompt, found)
        except ImpressError as err:
            tracked.refused = str(err)
            return 0
        tracked.n_stored = found
        return min(found, n - 1) // self._unit * self._unit

    def matched(self, tracked: Tracked, n_computed: int) -> int:
        """Tokens that can be loaded beyond those in vLLM's own cache. Pure except for a memo."""
        request = tracked.request
        if n_computed and request.prompt_embeds is not None and not tracked.refused:
            tracked.refused = "vLLM's own cache goes by its embeddings' bytes alone"  # keys._meant
        hit = self._stored(tracked)
        if getattr(request, "skip_reading_prefix_cache", False):  # it wants every position's logits
            hit = 0
        tracked.hit = (n_computed, hit)
        return max(hit - n_computed, 0)

    def reset(self) -> None:
        """From now on nothing goes by a name from before, and no other process has these names."""
        self._reset = f"|reset:{secrets.token_hex(16)}"


def privatise(request: Any) -> None:
    """Give a request's blocks hashes that no request has; each call gives new ones."""
    request.block_hashes[:] = [secrets.token_bytes(_HASH_BYTES) for _ in request.block_hashes]
