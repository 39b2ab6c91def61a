"""Cache events of the store, for whatever routes requests by them (`--kv-events-config`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from impress.engines.vllm.keys import vllm_keys_of
from impress.engines.vllm.step import Prompt

_MOST_EXPECTED = 1024
#: Prefixes reported as stored, to be looked up again after an eviction: at most this many, of this
#: many tokens in all (4 bytes each). Older ones are not reported when they are evicted.
_MOST_TOLD = 4096
_MOST_TOLD_TOKENS = 8 << 20
#: Prefixes looked up in one step.
_CHECKS_A_STEP = 8

#: (tokens, extra, tenant) -> tokens that are stored
Lookup = Callable[[Any, Mapping[int, bytes], str], int]


class _Told(NamedTuple):
    """A prefix as it was reported: vLLM's hash of each block."""

    prompt: Prompt
    hashes: list[Any]


class _Expected(NamedTuple):
    """A prefix to report, and what besides tokens made each block's hash: vLLM's extra keys."""

    told: _Told
    lora: Any
    extra_keys: list[Any]


class Events:
    """Block events in vLLM's own hashes. For the scheduler's thread. Does nothing when not enabled.

    The store knows nothing of vLLM's blocks. So when it has evicted something, the prefixes that
    were reported are looked up again, a few a step, and blocks that are gone are reported then.
    """

    def __init__(self, *, enabled: bool, block_size: int) -> None:
        self._enabled = enabled
        self._block_size = block_size
        self._expected: dict[str, _Expected] = {}
        self._told: dict[Any, _Told] = {}  # by the hash of the last block
        self._n_told = 0  # tokens
        self._doubted: deque[Any] = deque()  # keys of what is to be looked up again
        self._ready: list[Any] = []

    def expect(self, request: Any, prompt: Prompt) -> None:
        """A request's prompt, or the beginning of it, is on its way into the store.

        It comes again with the request's answer, maybe before the prompt is READY: the longest one
        is used to report what is READY.
        """
        if not self._enabled:
            return
        n = len(prompt.tokens) // self._block_size
        before = self._expected.get(request.request_id)
        if before is not None and n < len(before.told.hashes):
            return
        size, keys_of = self._block_size, vllm_keys_of()
        self._expected[request.request_id] = _Expected(
            _Told(prompt, list(request.block_hashes[:n])),
            request.lora_request,
            [keys_of(request, at * size, (at + 1) * size, 0)[0] for at in range(n)],
        )
        while len(self._expected) > _MOST_EXPECTED:
            del self._expected[next(iter(self._expected))]

    def stored(self, request_id: str, n_tokens: int) -> None:
        """A request's first n_tokens are READY."""
        found = self._expected.get(request_id)
        if found is None:
            return
        if n_tokens >= len(found.told.prompt.tokens):
            del self._expected[request_id]
        from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockStored
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, to_event_extra_keys

        told, lora, extra_keys = found
        n = min(n_tokens // self._block_size, len(told.hashes))
        if not n:
            return
        hashes, end = told.hashes[:n], n * self._block_size
        self._remember(_Told(told.prompt, hashes))
        self._ready.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(block) for block in hashes],
                parent_block_hash=None,
                token_ids=told.prompt.tokens[:end].tolist(),
                block_size=self._block_size,
                lora_id=lora.adapter_id if lora else None,
                medium=MEDIUM_STORAGE,
                lora_name=lora.lora_name if lora else None,
                extra_keys=to_event_extra_keys(extra_keys[:n]),
            )
        )

    def lost(self, request: Any, n_tokens: int) -> None:
        """Rows promised to a request could not be read."""
        if self._enabled:
            self._removed(request.block_hashes[: n_tokens // self._block_size])

    def doubt(self) -> None:
        """The store let go of something: everything reported is to be looked up again."""
        self._doubted = deque(self._told)

    def check(self, lookup: Lookup) -> None:
        """Look up some of what is in doubt; report blocks that are gone."""
        for _ in range(min(_CHECKS_A_STEP, len(self._doubted))):
            told = self._forget(self._doubted.popleft())
            if told is None:
                continue
            prompt, hashes = told
            # All of it: the last block may end within a window, and whole ones are found.
            n = lookup(prompt.tokens, prompt.extra, prompt.tenant) // self._block_size
            self._removed(hashes[n:])
            self._remember(_Told(prompt, hashes[:n]))

    def _remember(self, told: _Told) -> None:
        if not told.hashes:
            return
        self._forget(told.hashes[-1])
        self._told[told.hashes[-1]] = told
        self._n_told += len(told.hashes) * self._block_size
        while len(self._told) > _MOST_TOLD or self._n_told > _MOST_TOLD_TOKENS:
            self._forget(next(iter(self._told)))

    def _forget(self, key: Any) -> _Told | None:
        told = self._told.pop(key, None)
        if told is not None:
            self._n_told -= len(told.hashes) * self._block_size
        return told

    def _removed(self, hashes: list[Any]) -> None:
        from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        known = [maybe_convert_block_hash(block) for block in hashes]
        if known:
            self._ready.append(BlockRemoved(block_hashes=known, medium=MEDIUM_STORAGE))

    def cleared(self) -> None:
        """Nothing that was reported, or is on its way, can be found any more."""
        # Not AllBlocksCleared: vLLM's own blocks stay where requests hold any.
        told = dict.fromkeys(block for one in self._told.values() for block in one.hashes)
        self._expected.clear()
        self._told.clear()
        self._doubted.clear()
        self._n_told = 0
        if told:
            self._removed([*told])

    def take(self) -> list[Any]:
        """Events since the last call."""
        taken, self._ready = self._ready, []
        return taken
