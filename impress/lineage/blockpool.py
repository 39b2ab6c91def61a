"""Physical blocks found by chained hashes, as vLLM V1's prefix caching keeps them (its PR 9668).

    hash ──> blocks that hold it, oldest first       free: blocks nobody refers to, in the order
    request ──> its blocks, in order                       in which they are given to others

Metadata only: what lies in a block is the caller's business. A free block keeps its hash until it
is given to another request, so a later request may still find it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from impress.blockhash import Extra, Tokens, as_tokens, chain, labels_of
from impress.cache.heap import MinHeap
from impress.errors import BadInput
from impress.usage.prefix_lru import prefix_lru


class Granted(NamedTuple):
    """A request's blocks in prompt order; the KV of the first n_computed tokens is there."""

    blocks: list[int]
    n_computed: int


@dataclass(slots=True)
class _Table:
    """One request: its blocks, the key after each whole one; the tokens of the last block, if it is
    partial, and their extras by place in it."""

    blocks: list[int]
    keys: list[bytes]
    tail: Tokens
    extra: Extra


class BlockPool:
    """n_blocks blocks of block_tokens tokens. Not thread-safe. Raises BadInput for a request that
    has blocks already where it should have none, or none where it should have some.

    Whole blocks are shared by reference; partial ones belong to one request. A request's table
    only grows: if it computes a block that another one holds too, both stay (duplicates).
    """

    def __init__(self, n_blocks: int, block_tokens: int, root: bytes) -> None:
        """`root`: the key before any token, made from namespace and tenant (blockhash.root_key)."""
        self.block_tokens = block_tokens
        self._root = root
        self._tables: dict[Hashable, _Table] = {}
        self._found: dict[bytes, dict[int, None]] = {}  # key -> blocks, oldest first
        self._key_of: list[bytes | None] = [None] * n_blocks
        self._refs = np.zeros(n_blocks, dtype=np.int64)
        self._free = MinHeap(n_blocks)
        self._free.put(np.arange(n_blocks), 0.0, np.arange(n_blocks))
        self._tick = 0  # requests that have ended

    @property
    def n_free(self) -> int:
        """How many blocks nobody refers to, those that still hold something included."""
        return len(self._free)

    def computed(self, token_ids: Any, extra: Extra | None = None) -> list[int]:
        """The blocks of the longest prefix that is there, short of the prompt's last token. Pure.

        The last has to be computed for its logits, so a prompt found whole gives all but one block.
        """
        tokens = as_tokens(token_ids)
        return self._hit(tokens, self._keys(self._root, tokens, extra))

    def allocate(
        self, request: Hashable, token_ids: Any, extra: Extra | None = None
    ) -> Granted | None:
        """Blocks for a request's prompt: those of `computed`, now referred to, and new ones after.

        None, and nothing changed, if too few are free. Free blocks that are part of the hit are no
        room for the rest. New whole blocks are found from now on: whoever asks is computed after.
        """
        if request in self._tables:
            raise BadInput(f"blockpool: {request!r} has blocks already: append to them or free it")
        tokens = as_tokens(token_ids)
        keys = self._keys(self._root, tokens, extra)
        hit = self._hit(tokens, keys)
        n_new = -(-len(tokens) // self.block_tokens) - len(hit)
        idle = [block for block in hit if not self._refs[block]]
        if n_new > self.n_free - len(idle):
            return None
        self._free.discard(np.array(idle, dtype=np.int64))
        self._refs[hit] += 1
        blocks = hit + self._fresh(n_new)
        self._remember(blocks[len(hit) :], keys[len(hit) :])
        cut = len(keys) * self.block_tokens
        tail = tokens[cut:].copy()  # the caller may reuse its array for another prompt
        self._tables[request] = _Table(blocks, keys, tail, _from(cut, extra or {}))
        return Granted(list(blocks), len(hit) * self.block_tokens)

    def append(self, request: Hashable, token_ids: Any) -> list[int] | None:
        """Add tokens to a request: the blocks taken for them, empty if the last one has room.

        Blocks they fill are found from now on. None, and nothing changed, if too few are free.
        """
        table = self._table(request)
        tokens = np.concatenate([table.tail, as_tokens(token_ids)])
        n_new = len(table.keys) - (-len(tokens) // self.block_tokens) - len(table.blocks)
        if n_new > self.n_free:
            return None
        new = self._fresh(n_new)
        table.blocks += new
        keys = self._keys(table.keys[-1] if table.keys else self._root, tokens, table.extra)
        self._remember(table.blocks[len(table.keys) :], keys)
        table.keys += keys
        cut = len(keys) * self.block_tokens
        table.tail, table.extra = tokens[cut:], _from(cut, table.extra)
        return new

    def free(self, request: Hashable) -> None:
        """The request has ended. Blocks nobody refers to any more are reused last block first."""
        blocks = np.array(self._table(request).blocks, dtype=np.int64)
        del self._tables[request]
        self._tick += 1
        self._refs[blocks] -= 1
        ends = 1 + np.flatnonzero(self._refs[blocks] == 0)
        idle = blocks[ends - 1]
        self._free.put(idle, prefix_lru(self._tick, ends), idle)

    def check(self) -> None:
        """Assert that references, free blocks and what is found agree."""
        self._free.check()
        refs = np.zeros_like(self._refs)
        for table in self._tables.values():
            assert len(set(table.blocks)) == len(table.blocks), "a block twice in a table"
            refs[table.blocks] += 1
        assert np.array_equal(refs, self._refs), "references miscounted"
        assert np.array_equal(self._free.items(), np.flatnonzero(refs == 0)), "free and in use"
        found = {block: key for key, blocks in self._found.items() for block in blocks}
        assert found == {b: key for b, key in enumerate(self._key_of) if key is not None}
        assert all(self._found.values()), "a key of nothing"

    # ---- inside ----------------------------------------------------------------------------

    def _table(self, request: Hashable) -> _Table:
        table = self._tables.get(request)
        if table is None:
            raise BadInput(f"blockpool: {request!r} has no blocks here: it is freed, or came never")
        return table

    def _keys(self, before: bytes, tokens: Tokens, extra: Extra | None) -> list[bytes]:
        """The key after each whole block."""
        labels = labels_of(tokens, self.block_tokens, extra)
        return list(chain(before, labels, self.block_tokens))

    def _hit(self, tokens: Tokens, keys: Sequence[bytes]) -> list[int]:
        there = takewhile(self._found.__contains__, keys[: (len(tokens) - 1) // self.block_tokens])
        return [next(iter(self._found[key])) for key in there]

    def _fresh(self, n: int) -> list[int]:
        """Take n free blocks to write to; what they held is no longer found."""
        blocks: list[int] = self._free.take(n).tolist()
        self._refs[blocks] = 1
        for block in blocks:
            key = self._key_of[block]
            if key is not None:
                del self._found[key][block]
                if not self._found[key]:
                    del self._found[key]
                self._key_of[block] = None
        return blocks

    def _remember(self, blocks: Iterable[int], keys: Iterable[bytes]) -> None:
        """Have whole blocks found by their keys; blocks beyond the keys are partial, not shared."""
        for block, key in zip(blocks, keys, strict=False):
            self._found.setdefault(key, {})[block] = None
            self._key_of[block] = key


def _from(cut: int, extra: Extra) -> Extra:
    """The extras from a position on, counted from there."""
    return {position - cut: digest for position, digest in extra.items() if position >= cut}
