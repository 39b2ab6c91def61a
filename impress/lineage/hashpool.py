"""Blocks that no request refers to, kept by hash in case the next one wants them: at most K.

    acquire ──> the leading blocks that are here, shared with other requests that have them
    release ──> what nobody refers to any more stays, unless it is among the least worth keeping

A block is worth what it is in vLLM's free queue: by its last use, then the shortest prefix. Unlike
`BlockPool` it owns no fixed memory: blocks that requests hold are theirs, and do not count here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, TypeVar

import numpy as np

from impress.cache.heap import MinHeap
from impress.errors import BadInput
from impress.usage.prefix_lru import prefix_lru

Block = TypeVar("Block")


@dataclass(slots=True)
class _Entry(Generic[Block]):
    block: Block
    refs: int
    slot: int = -1  # in the heap, while nobody refers to it


class HashPool(Generic[Block]):
    """Keys are those of blockhash.chain, a block is whatever the caller keeps. Not thread-safe."""

    def __init__(self, most_blocks: int) -> None:
        """`most_blocks`: K, the most blocks kept that nobody refers to."""
        self._most = most_blocks
        self._entries: dict[bytes, _Entry[Block]] = {}
        self._heap = MinHeap(most_blocks + 1)  # one more, for a newcomer to be weighed
        self._keys: list[bytes] = [b""] * (most_blocks + 1)  # by slot
        self._slots = list(range(most_blocks + 1))
        self._tick = 0  # requests that have ended

    def __len__(self) -> int:
        """How many blocks nobody refers to."""
        return len(self._heap)

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks are here, in use or not. Pure."""
        return sum(1 for _ in takewhile(self._entries.__contains__, keys))

    def acquire(self, keys: Sequence[bytes]) -> list[Block]:
        """The leading blocks that are here; they stay until released as often."""
        entries = [self._entries[key] for key in keys[: self.lookup(keys)]]
        idle = [entry for entry in entries if not entry.refs]
        self._heap.discard(np.array([entry.slot for entry in idle], dtype=np.int64))
        for entry in idle:
            self._slots.append(entry.slot)
            entry.slot = -1
        for entry in entries:
            entry.refs += 1
        return [entry.block for entry in entries]

    def release(self, keys: Sequence[bytes], blocks: Sequence[Block], n_acquired: int) -> None:
        """A request has ended: its blocks, in prompt order, the first n_acquired of them acquired.

        If a block is here already, the one that came first is kept. Raises BadInput, and changes
        nothing, if nobody refers to a block that is said to be acquired: it was released before, or
        in another pool.
        """
        if not 0 <= n_acquired <= len(keys) == len(blocks):
            raise BadInput(
                f"hashpool: {len(keys)} keys, {len(blocks)} blocks, {n_acquired} of them acquired"
            )
        for key in keys[:n_acquired]:
            if (found := self._entries.get(key)) is None or not found.refs:
                raise BadInput(f"hashpool: block {key.hex()} is not acquired here: released twice?")
        self._tick += 1
        for i, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(block, 0)
            elif i < n_acquired:
                entry.refs -= 1
            if not entry.refs:
                self._keep(key, entry, i + 1)

    def check(self) -> None:
        """Assert that the blocks that may go are those nobody refers to, and at most K."""
        self._heap.check()
        assert len(self) <= self._most, "over its budget"
        idle = {entry.slot: key for key, entry in self._entries.items() if not entry.refs}
        assert sorted(idle) == self._heap.items().tolist(), "free and in use"
        assert all(self._keys[slot] == key for slot, key in idle.items()), "a slot of another"
        assert sorted([*idle, *self._slots]) == list(range(self._most + 1)), "a slot is lost"

    def _keep(self, key: bytes, entry: _Entry[Block], end: int) -> None:
        """Put a block that was just used among those that may go; if full, the least one goes."""
        if entry.slot < 0:
            entry.slot = self._slots.pop()
            self._keys[entry.slot] = key
        slot = np.array([entry.slot])
        self._heap.put(slot, prefix_lru(self._tick, end), slot)
        if len(self) > self._most:
            victim = int(self._heap.take(1)[0])
            del self._entries[self._keys[victim]]
            self._slots.append(victim)
