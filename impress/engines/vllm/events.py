"""Cache events of the store, for those who route requests by them (`--kv-events-config`)."""

from __future__ import annotations

from typing import Any

_MOST_EXPECTED = 1024


class Events:
    """Block events in vLLM's own hashes. For the scheduler's thread. Does nothing when not enabled.

    Spans that the store evicts are not told: a subscriber learns of it by a miss.
    """

    def __init__(self, *, enabled: bool, block_size: int) -> None:
        self._enabled = enabled
        self._block_size = block_size
        self._expected: dict[str, tuple[Any, list[Any], list[int]]] = {}
        self._ready: list[Any] = []

    def expect(self, request: Any, n_tokens: int) -> None:
        """A request's first n_tokens are on their way into the store."""
        if not self._enabled:
            return
        n = n_tokens // self._block_size
        tokens = list(request.all_token_ids[: n * self._block_size])
        self._expected[request.request_id] = (
            request.lora_request,
            request.block_hashes[:n],
            tokens,
        )
        while len(self._expected) > _MOST_EXPECTED:
            del self._expected[next(iter(self._expected))]

    def stored(self, request_id: str, n_tokens: int) -> None:
        """They are READY."""
        found = self._expected.pop(request_id, None)
        if found is None:
            return
        from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockStored
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        lora, hashes, tokens = found
        n = min(n_tokens // self._block_size, len(hashes))
        if not n:
            return
        self._ready.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(block) for block in hashes[:n]],
                parent_block_hash=None,
                token_ids=tokens[: n * self._block_size],
                block_size=self._block_size,
                lora_id=None,
                medium=MEDIUM_STORAGE,
                lora_name=lora.lora_name if lora else None,
            )
        )

    def lost(self, request: Any, n_tokens: int) -> None:
        """What was promised of a request could not be read."""
        if not self._enabled:
            return
        from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        hashes = request.block_hashes[: n_tokens // self._block_size]
        known = [maybe_convert_block_hash(block) for block in hashes]
        if known:
            self._ready.append(BlockRemoved(block_hashes=known, medium=MEDIUM_STORAGE))

    def cleared(self) -> None:
        """Nothing of what was told can be found any more."""
        if self._enabled:
            from vllm.distributed.kv_events import AllBlocksCleared

            self._ready.append(AllBlocksCleared())

    def take(self) -> list[Any]:
        """Events since the last call."""
        taken, self._ready = self._ready, []
        return taken
