"""A model after a prefix of which it sees some rows, for any family the engine serves.

    prefix (chosen rows of a store | given rows) ─> Behind.feed(tokens) ─> logits; rewind; feed …

The engine's own attention and cache (impress.engines.hf_chosen) without its generate(): logits of
every token, as scoring wants them, and several continuations of one prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.common import Unable
from impress.engines.hf_chosen import ChoosingPrefix, ChosenCache, attending
from impress.engines.hf_modules import CACHE
from impress.engines.hf_prefix import StoredPrefix, find_prefix
from impress.policy import Policy
from impress.store import PrefixStore
from impress.types import Geometry
from tiers.slots import BufferPool


class GivenRows:
    """A prefix whose rows are at hand: keys, values [n_kv_heads, n, head_dim] of each layer."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.n_tokens = int(keys[0].shape[1])
        self._keys, self._values = keys, values

    def choose(
        self, layer: int, query: Tensor, new_keys: Tensor, scaling: float
    ) -> tuple[Tensor, Tensor]:
        return self._keys[layer].to(query.device), self._values[layer].to(query.device)

    def close(self) -> bool:
        return True


class Behind:
    """Tokens after a prefix. The first feed chooses the prefix's rows; later ones see the same."""

    def __init__(self, model: Any, cache: ChosenCache) -> None:
        self._model = model
        self._cache = cache

    @torch.no_grad()
    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Logits float32 [len(tokens), words], on the host. Raises PrefixLost at the first."""
        ids = torch.tensor([list(tokens)], device=self._model.device)
        with attending(self._model, self._cache):
            logits = self._model(ids, **{CACHE: self._cache}, use_cache=True).logits
        host: Tensor = logits[0].float().cpu()
        return host

    def rewind(self, n: int) -> None:
        """Forget the last n tokens fed; they may not include any of the first feed's."""
        for layer in self._cache.layers:
            layer.length -= n

    def decode(self, last: Tensor, n: int) -> list[int]:
        """Decode n tokens greedily from the logits [words] of the last token fed; forget them."""
        tokens: list[int] = []
        for _ in range(n):
            tokens.append(int(last.argmax()))
            if len(tokens) < n:
                last = self.feed(tokens[-1:])[-1]
        self.rewind(n - 1)
        return tokens

    def agreement(self, last: Tensor, wanted: Sequence[int]) -> list[bool]:
        """Whether this model, fed `wanted`, would have said each of its tokens; then forget them.

        Up to the first False, they are the tokens that it would have decoded freely.
        """
        rows = torch.cat([last[None], self.feed(wanted[:-1])])
        self.rewind(len(wanted) - 1)
        return [bool(same) for same in rows.argmax(-1) == torch.tensor(wanted)]


@contextmanager
def behind(
    model: Any, geometry: Geometry, prefix: ChoosingPrefix, n_new: int, pool: BufferPool
) -> Iterator[Behind]:
    """The model after a prefix, with room for n_new tokens; leaving frees memory and ends reads."""
    cache = ChosenCache(geometry, prefix, n_new, pool)
    try:
        yield Behind(model, cache)
    finally:
        prefix.close()
        cache.release()


def stored_prefix(store: PrefixStore, tokens: Sequence[int], policy: Policy) -> StoredPrefix:
    """The longest stored prefix of a prompt under a policy, its reads begun. Raises Unable."""
    prefix, _ = find_prefix(store, [np.array(tokens, dtype=np.int32)])
    if prefix is None:
        raise Unable("the prefix is not in the store: it needs at least one whole window")
    prefix.open(policy)
    prefix.read_ahead()
    return prefix


def stored_rows(store: PrefixStore, tokens: Sequence[int]) -> GivenRows:
    """Every row of the stored prefix of a prompt, copied."""
    with store.lease(np.array(tokens, dtype=np.int32)) as lease:
        with lease.session() as session:
            layers = [session.retrieve(i, None) for i in range(store.geometry.n_layers)]
            return GivenRows([k.clone() for k, _, _ in layers], [v.clone() for _, v, _ in layers])
