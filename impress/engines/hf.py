"""Hugging Face Transformers with a prefix store under it: `attach`, then `engine.generate`.

    generate: lookup ─hit─> cache with the prefix on its way ─> model.generate ─> store the new part
                   └─miss─> empty cache ────────────────────────┘      │
                            ^── run again once, densely ── PrefixLost ─┘

A hit's logits are bit-identical to the same model continuing from the KV that was stored, cut to
the hit (same dtype, shapes and threads).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import perf_counter
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from impress.blockhash import namespace_digest
from impress.config import Config
from impress.engines import hf_models
from impress.engines.hf_cache import RowsCache
from impress.engines.hf_models import Prompt
from impress.engines.hf_prefix import StoredPrefix, find_prefix
from impress.engines.hf_storing import Job, Outcome, StoreQueue
from impress.errors import BadInput, ImpressError, PrefixLost, StoreMismatch, Unsupported
from impress.namespace import namespace_of
from impress.policy import Exact, Policy
from impress.store import PrefixStore
from tiers.slots import BufferPool

EXACT = Exact()
_STORE_WAIT_S = 30.0  # for write buffers, of one put
_MAX_WAITING = 4  # requests whose caches may be held back for storing


@dataclass(frozen=True, slots=True)
class Request:
    """What one generate() call did. Bytes and rows are those of the prefix, by tier."""

    n_tokens: int  # of the prompt, in each batch row
    hit_tokens: int  # taken from the store, in each batch row
    n_new: int  # generated
    mode: str  # "exact": a prefix was reused; "recompute": the whole prompt was computed
    ttft_ms: float  # from the call to the first token's logits
    bytes_by_tier: dict[str, int]
    rows_by_tier: dict[str, int]
    per_layer: tuple[dict[str, Any], ...]  # layer by layer, one batch row after the other
    lost: str  # why a prefix that was found could not be read, "" when nothing was lost
    stored_tokens: int = 0  # accepted by the store so far; durable after engine.flush()
    refused: str = ""  # why the store did not take the new part


def attach(
    model: Any,
    path_or_store: str | os.PathLike[str] | PrefixStore,
    policy: Policy = EXACT,
    *,
    config: Config | None = None,
    store_new: bool = True,
) -> Engine:
    """An engine for a causal LM of a supported family, over a store or a store's directory.

    Derives the namespace, geometry and dtype from the model. A directory is opened for writing with
    `config` and closed by `Engine.close`; a store given stays the caller's. `store_new` False only
    reads. Raises Unsupported naming what of the model is not served, StoreMismatch naming both
    values where the store is another model's, and whatever `PrefixStore.open` raises.
    """
    if not isinstance(policy, Exact):
        raise Unsupported(f"policy {type(policy).__name__} is not supported by this engine")
    hf_models.check_model(model)
    geometry = hf_models.geometry_of(model.config, model.dtype)
    namespace = namespace_of(model)
    if not isinstance(path_or_store, PrefixStore):
        opened = PrefixStore.open(
            path_or_store, geometry, namespace=namespace, config=config or Config(), mode="rw"
        )
        return Engine(model, opened, policy, owns_store=True, store_new=store_new)
    store = path_or_store
    if config is not None:
        raise BadInput("config is for a directory; a store that is open has its own")
    if store.geometry != geometry:
        raise StoreMismatch(f"the store holds {store.geometry}, the model has {geometry}")
    mine = namespace_digest(namespace)
    if store.namespace != mine:
        its = store.namespace.hex()[:16]
        raise StoreMismatch(f"the store's namespace is {its}…, the model's {mine.hex()[:16]}…")
    return Engine(model, store, policy, owns_store=False, store_new=store_new)


class Engine:
    """A model and its store. One request at a time; storing goes on in a thread of its own.

    Made by `attach`. A context manager: leaving closes it.
    """

    def __init__(
        self,
        model: Any,
        store: PrefixStore,
        policy: Exact,
        *,
        owns_store: bool,
        store_new: bool,
    ) -> None:
        self.model = model
        self.store = store
        self._policy = policy
        self._owns_store = owns_store
        self._store_new = store_new and store.writable
        self._weights = hf_models.weights_state(model)
        self._storing = StoreQueue(store, limit=_MAX_WAITING, wait_s=_STORE_WAIT_S)
        self._last: tuple[Request, Outcome] | None = None
        self._closed = False

    @property
    def last_request(self) -> Request | None:
        """The latest request that returned; its storing as far as it has come."""
        if self._last is None:
            return None
        request, outcome = self._last
        return replace(request, stored_tokens=outcome.n_new, refused=outcome.refused)

    @property
    def n_skipped(self) -> int:
        """Requests whose new part was not stored because too many were waiting."""
        return self._storing.n_skipped

    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int | None = None,
        *,
        streamer: Any = None,
        **options: Any,
    ) -> Any:
        """model.generate() with its own arguments and result, reusing and storing prefixes.

        input_ids [batch, n_tokens] of equal lengths, every token of them prompt. 32 new tokens
        unless the call says otherwise. Effects: stores whole windows of prompt and answer in the
        background. A prefix that cannot be read is computed instead, before any token is out.
        Raises BadInput or Unsupported, naming the argument, before anything is read.
        """
        started = perf_counter()
        self._check_usable()
        prompt = hf_models.check_request(self.model, input_ids, max_new_tokens, options)
        once = _PromptOnce(streamer) if streamer is not None else None
        first = _FirstLogits(started)
        lost = ""
        prefix = None
        try:
            prefix = find_prefix(self.store, prompt.rows, self._policy)
            result, cache = self._run(prompt, prefix, once, first)
        except PrefixLost as err:
            lost, prefix = err.reason, None
            result, cache = self._run(prompt, None, once, first)
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        n_new = int(sequences.shape[1]) - prompt.n_tokens
        request = _account(prompt, prefix, n_new, first.ttft_ms, lost)
        self._last = request, self._store(prompt, sequences, cache, request.hit_tokens)
        return result

    def flush(self) -> None:
        """Wait until everything generated so far is stored and durable. Raises what failed."""
        self._storing.drain()
        self.store.flush()

    def close(self) -> None:
        """Store what is waiting, end the thread, close the store if `attach` opened it."""
        if self._closed:
            return
        self._closed = True
        try:
            self._storing.close()
        finally:
            if self._owns_store:
                self.store.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise ImpressError("the engine is closed")
        if hf_models.weights_state(self.model) != self._weights:
            raise StoreMismatch("the model's weights changed since attach(): attach it again")

    def _run(
        self,
        prompt: Prompt,
        prefix: StoredPrefix | None,
        once: _PromptOnce | None,
        first: _FirstLogits,
    ) -> tuple[Any, RowsCache]:
        """One pass of model.generate(). On any error the prefix and the memory are given back."""
        if once is not None:
            once.begin()
        options = dict(prompt.options)
        processors = [first, *(options.pop("logits_processor", None) or [])]
        # A caller who gets past_key_values keeps the memory: it must not be rented again.
        pool = BufferPool(None) if prompt.returns_cache else self.store.buffers
        with ExitStack() as pins:
            if prefix is not None:
                pins.callback(prefix.close)
            cache = RowsCache(
                self.store.geometry,
                len(prompt.rows),
                prompt.n_tokens + prompt.n_new,
                pool,
                n_prefix=prefix.n_tokens if prefix else 0,
                contiguous=self.model.config._attn_implementation == "eager",
            )
            try:
                if prefix is not None:
                    cache.load(prefix)
                result = self.model.generate(
                    prompt.input_ids,
                    attention_mask=torch.ones_like(prompt.input_ids),
                    past_key_values=cache,
                    logits_processor=LogitsProcessorList(processors),
                    streamer=once,
                    **options,
                )
            except BaseException:
                _end_reads(prefix, cache)
                cache.release()
                raise
            _end_reads(prefix, cache)
        if prompt.returns_cache:
            result.past_key_values = cache.as_dynamic()
        return result, cache

    def _store(
        self, prompt: Prompt, sequences: torch.Tensor, cache: RowsCache, hit: int
    ) -> Outcome:
        """Hand the whole windows that are new to the storing thread, which frees the cache."""
        n_held = cache.length
        outcome = Outcome()
        rows = self._rows_to_store(prompt, sequences[:, :n_held])
        if n_held != sequences.shape[1] - 1:  # virtual tokens of a prompt-tuned model, say
            outcome.refused = f"the cache holds {n_held} rows for {sequences.shape[1]} tokens"
        if outcome.refused or not self._store_new or all(len(row) <= hit for row in rows):
            cache.release()
            return outcome
        self._storing.offer(Job(cache, rows, cache.release, outcome))
        return outcome

    def _rows_to_store(
        self, prompt: Prompt, sequences: torch.Tensor
    ) -> tuple[npt.NDArray[np.int32], ...]:
        """Of each batch row the whole windows up to its end token, without what pads it."""
        ends = hf_models.setting(self.model, prompt.options, "eos_token_id")
        rows = []
        for row in sequences.cpu().numpy().astype(np.int32):
            answer = row[prompt.n_tokens :]
            stops = np.flatnonzero(np.isin(answer, ends)) if ends is not None else np.empty(0)
            end = prompt.n_tokens + int(stops[0]) + 1 if len(stops) else len(row)
            rows.append(np.ascontiguousarray(row[: end // self.store.window * self.store.window]))
        return tuple(rows)


def _end_reads(prefix: StoredPrefix | None, cache: RowsCache) -> None:
    if prefix is not None and not prefix.close():
        cache.forsake()


def _account(
    prompt: Prompt, prefix: StoredPrefix | None, n_new: int, ttft_ms: float, lost: str
) -> Request:
    reports = prefix.reports() if prefix is not None else []
    return Request(
        n_tokens=prompt.n_tokens,
        hit_tokens=prefix.n_tokens if prefix is not None else 0,
        n_new=n_new,
        mode="exact" if prefix is not None else "recompute",
        ttft_ms=ttft_ms,
        bytes_by_tier=_total([report.bytes_by_tier for report in reports]),
        rows_by_tier=_total([report.rows_by_tier for report in reports]),
        per_layer=tuple(dict(layer) for report in reports for layer in report.per_layer),
        lost=lost,
    )


def _total(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    tiers = {tier for count in counts for tier in count}
    return {tier: sum(count.get(tier, 0) for count in counts) for tier in sorted(tiers)}


class _FirstLogits(LogitsProcessor):  # type: ignore[misc]  # the base is untyped
    """Changes nothing; notes when the first logits came."""

    def __init__(self, started: float) -> None:
        self.ttft_ms = 0.0
        self._started = started

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.ttft_ms:
            self.ttft_ms = (perf_counter() - self._started) * 1000
        return scores


class _PromptOnce:
    """The caller's streamer, which gets the prompt once although a lost prefix runs it twice.

    A second run starts before any token is out, so all that was streamed by then is the prompt.
    """

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._n_put = 0
        self._n_runs = 0

    def begin(self) -> None:
        self._n_runs += 1
        self._n_put = 0

    def put(self, value: torch.Tensor) -> None:
        self._n_put += 1
        if self._n_put > 1 or self._n_runs == 1:
            self._streamer.put(value)

    def end(self) -> None:
        self._streamer.end()
