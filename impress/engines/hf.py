"""Hugging Face Transformers with a prefix store under it: `attach`, then `engine.generate`.

    generate: lookup ─hit─> cache with the prefix on its way ─> model.generate ─> store the new part
                   └─miss─> empty cache ────────────────────────┘      │
                            ^── run again once, densely ── PrefixLost ─┘
    A hit that costs more to load than to compute is treated as a miss (choice).

An exact hit's logits are bit-identical to the same model continuing from the KV that was stored,
cut to the hit (same dtype, shapes and threads). Under a policy that chooses rows, once the guard
trusts it (hf_mode, hf_audit), a hit is a sparse request (hf_chosen): its logits are those of a full
cache with the other rows masked, and nothing from it is stored.
"""

from __future__ import annotations

import atexit
import os
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from typing import Any

try:
    import torch
    import transformers  # noqa: F401  # named where it lacks; what is imported below needs it
except ModuleNotFoundError as gone:
    what = f"impress.engines.hf needs {gone.name}: pip install '.[hf]' in impress's clone"
    raise ModuleNotFoundError(what, name=gone.name) from None

from impress.blockhash import namespace_digest
from impress.config import Config
from impress.engines import hf_models
from impress.engines.buffers import VirtualBuffers, buffers_of
from impress.engines.hf_audit import Auditor, Shared, Watch, turn_of, watch_of
from impress.engines.hf_cache import RowsCache, rent
from impress.engines.hf_chosen import ChosenCache, attending, check_choosing, check_policy, chooses
from impress.engines.hf_compiled import in_parts
from impress.engines.hf_lengths import within_positions
from impress.engines.hf_mode import EXACT, Modes
from impress.engines.hf_models import Prompt
from impress.engines.hf_models import geometry_of as geometry_of  # README names it here
from impress.engines.hf_modules import CACHE
from impress.engines.hf_observed import OBSERVED_ROWS, Observed, observing
from impress.engines.hf_output import FirstLogits, Given, PromptOnce, RawLogits, hearing
from impress.engines.hf_prefix import StoredPrefix, end_early, end_reads, find_prefix, lock_pages
from impress.engines.hf_request import Request, totals
from impress.engines.hf_settings import setting
from impress.engines.hf_storing import OF_CHOSEN, Outcome, StoreQueue, close_own, do_all
from impress.engines.hf_weights import Weights
from impress.engines.virtual import Virtual as Virtual  # README names it here
from impress.errors import BadInput, ImpressError, PrefixLost, StoreMismatch
from impress.namespace import namespace_of
from impress.policy import Policy
from impress.read.shadow import SHADOW_ROWS
from impress.store import PrefixStore


def attach(
    model: Any,
    path_or_store: str | os.PathLike[str] | PrefixStore,
    policy: Policy = EXACT,
    *,
    config: Config | None = None,
    store_new: bool = True,
    virtual: Virtual | None = None,
) -> Engine:
    """An engine for a causal LM of a supported family, over a store or a store's directory.

    Derives the namespace, geometry and dtype from the model. A directory is opened for writing with
    `config`, the policy's probe records added to its probes, and closed by `Engine.close`, even
    where `store_new` is False, which stores no prefixes. A store passed in stays the caller's; one
    open with mode "r" is left as it is. With a policy that chooses rows, importance is stored with
    the rows: the attention of the prompt's last rows (hf_observed). `virtual` keeps rows in
    contiguous virtual buffers (buffers.py) where available. Raises Unsupported naming what is not
    served, StoreMismatch naming both values, BadInput, and what `PrefixStore.open` raises.
    """
    hf_models.check_types(model, config)
    with turn_of(model).request(model):  # in another engine's request its attention is not its own
        hf_models.check_model(model)
    geometry = geometry_of(model.config, model.dtype)
    settings = config or Config()
    given = path_or_store if isinstance(path_or_store, PrefixStore) else settings
    check_policy(policy, geometry, given.window)
    buffers = None if virtual is None else buffers_of(model, geometry, virtual)
    namespace = namespace_of(model)
    if not isinstance(path_or_store, PrefixStore):
        if policy.probe is not None and policy.probe not in settings.probes:
            settings = settings.model_copy(update={"probes": (*settings.probes, policy.probe)})
        with ExitStack() as failed:
            opened = PrefixStore.open(path_or_store, geometry, namespace, settings)
            failed.callback(opened.close)  # Ctrl-C, no memory: nobody else would close it
            engine = Engine(model, opened, policy, buffers, owns_store=True, store_new=store_new)
            failed.pop_all()
        return engine
    store = path_or_store
    if config is not None:
        raise BadInput("config is for a directory; a store that is open has its own")
    if store.geometry != geometry:
        held = f"the store holds {store.geometry}, the model has {geometry}"
        raise StoreMismatch(f"{held}: use another directory")
    mine, its = namespace_digest(namespace), store.namespace
    # Its opener may have asked for the cross-engine one; that reads all weights again.
    if its != mine and its != namespace_digest(namespace_of(model, cross_engine=True)):
        shown = f"the store's namespace is {its.hex()[:16]}…, the model's {mine.hex()[:16]}…"
        raise StoreMismatch(f"{shown}: open it under impress.namespace_of(model)")
    return Engine(model, store, policy, buffers, owns_store=False, store_new=store_new)


class Engine:
    """A model and its store. Engines on one model take turns; storing has its own thread.

    Made by `attach`. A context manager: leaving closes it.
    """

    def __init__(
        self,
        model: Any,
        store: PrefixStore,
        policy: Policy,
        buffers: VirtualBuffers | None,
        *,
        owns_store: bool,
        store_new: bool,
    ) -> None:
        self.model = model
        self.store = store
        self.buffers = buffers
        """Virtual buffers, where they were asked for."""
        self._policy = policy
        self._owns_store = owns_store
        self._store_new = store_new and store.writable
        self._weights = Weights(model)
        self._storing = StoreQueue(store)
        lock_pages(store, model)
        self._turn = turn_of(model)
        with self._turn.request():
            self._modes = Modes(model, store, policy)
        self._auditor = Auditor(model, store, self._turn, self._weights.check, self._storing.held)
        self._last: tuple[Request, Outcome] | None = None
        self._closed = False
        if owns_store:  # for a program that ends without close: the threads end themselves first
            atexit.register(store.close)

    @property
    def last_request(self) -> Request | None:
        """The latest request that returned, with its storing as far as it has got."""
        if self._last is None:
            return None
        request, outcome = self._last
        return replace(request, **outcome.so_far())

    @property
    def n_skipped(self) -> int:
        """Requests not stored: too many waited, a device held too much, or no thread was left."""
        return self._storing.n_skipped

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        max_new_tokens: int | None = None,
        *,
        streamer: Any = None,
        policy: Policy | None = None,
        **options: Any,
    ) -> Any:
        """model.generate() with its own arguments and result, reusing and storing prefixes.

        input_ids (or inputs) [batch, n_tokens] of equal lengths, every token part of the prompt. 32
        new tokens unless the call says otherwise. Effects: stores whole windows of prompt and
        answer in the background. `policy` replaces the engine's for this call; where it chooses
        rows, a hit takes one prompt, stores nothing and returns no cache. The engine's
        own policy has to earn that first: until then hits are exact (impress.quality.guard). A
        prefix that cannot be read is computed instead, before any token is out. Raises BadInput or
        Unsupported, naming the argument, before anything is read; StoreMismatch where weights or
        hooks are not those of `attach`, before a prefix is read and, after the answer, before any
        of it is stored; StoreFailed where the system gives no memory for the request's rows;
        ImpressError once the engine is closed.
        """
        started = perf_counter()
        once = PromptOnce(streamer) if streamer is not None else None
        with self._turn.request(self.model), self._storing.standing_back():
            if self._closed:
                raise ImpressError("the engine is closed")
            asked, policy = policy, self._modes.policy_of(policy)
            prompt = hf_models.check_request(self.model, input_ids, max_new_tokens, options)
            if chooses(policy):
                check_choosing(self.model, prompt, policy)
            return self._answer(prompt, asked, once, FirstLogits(started))

    def _answer(
        self, prompt: Prompt, asked: Policy | None, once: PromptOnce | None, first: FirstLogits
    ) -> Any:
        lost, missed, prefix, watch, unread = "", "", None, None, None
        way = self._modes.way(prompt, None, asked)
        with ExitStack() as undo:  # what is given back unless it is handed on
            try:
                if not prompt.whole:
                    prefix, missed = find_prefix(self.store, prompt.rows)
                if prefix is not None:
                    undo.callback(prefix.close)
                way = self._modes.way(prompt, prefix, asked, missed)
                if prefix is not None and way.choice.mode == "recompute":
                    prefix.close()
                    unread, prefix = prefix, None
                watch = watch_of(way, prefix, prompt, undo)
                result, cache = self._run(prompt, prefix, way.reads_by, once, first, watch)
            except PrefixLost as err:
                first.check_ours(err)
                undo.close()
                lost, prefix, watch = err.reason, None, None
                way = self._modes.lose(way, lost, first.since_turn_s())
                result, cache = self._run(prompt, None, EXACT, once, first, None)
            if cache is not None:
                undo.callback(cache.release)
            sequences = result if isinstance(result, torch.Tensor) else result.sequences
            hit = prefix.n_tokens if prefix is not None else 0
            request = Request(
                n_tokens=prompt.n_tokens,
                hit_tokens=hit,
                n_new=int(sequences.shape[1]) - prompt.n_tokens,
                mode=way.choice.mode,
                ttft_ms=first.ttft_ms,
                lost=lost,
                policy=way.policy.name,
                why=way.choice.why,
                guard=way.guard,
                memory=self.buffers.said if self.buffers is not None else "pooled",
                **totals(prefix.reports() if prefix is not None else [], self.store.geometry),
            )
            self._modes.learn(request, way, len(prompt.rows), first.turn_ms, unread)
            stored = self._store(prompt, sequences, first.given, cache, hit, watch, undo)
            self._last = request, stored
        return result

    def flush(self) -> None:
        """Wait until everything generated so far is stored and durable. Raises what failed, an
        ImpressError, once all others are.

        By then the guard has also weighed what it has to weigh after the answers.
        """
        self._turn.check_process()
        wait = self._storing.drain, self._auditor.drain, self.store.flush
        do_all(*wait, self._storing.raise_failed)  # last: what Ctrl-C cuts off is raised next time

    def close(self) -> None:
        """Store what is waiting, end the threads, close the store if `attach` opened it.

        Waits for a request under way in another thread. Idempotent, even if interrupted.
        """
        if self._turn.forked:  # a child must not touch its parent's
            return
        with self._turn.request():
            self._closed = True
        with ExitStack() as steps:  # all of them, even after one that fails or is interrupted
            if self._owns_store:
                steps.callback(close_own, self.store)
            if self.buffers is not None:
                steps.callback(self.buffers.close)
            steps.callback(self._auditor.close)
            self._storing.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _run(
        self,
        prompt: Prompt,
        prefix: StoredPrefix | None,
        policy: Policy,
        once: PromptOnce | None,
        first: FirstLogits,
        watch: Watch | None,
    ) -> tuple[Any, RowsCache | None]:
        """One pass of model.generate(), and the rows it made unless they are never to be stored.

        Closes the prefix. On any error the memory is given back.
        """
        if once is not None:
            once.begin()
        with ExitStack() as pins:
            if prefix is not None:
                pins.callback(prefix.close)
                self._weights.check(prompt.found)  # what is stored is this model's
                prefix.open(policy)
            if prefix is not None and chooses(policy):
                raw = watch.raw if watch is not None else None
                return self._run_sparse(prompt, prefix, once, first, raw), None
            return self._run_dense(prompt, prefix, once, first, watched=watch is not None)

    def _run_dense(
        self,
        prompt: Prompt,
        prefix: StoredPrefix | None,
        once: PromptOnce | None,
        first: FirstLogits,
        *,
        watched: bool,
    ) -> tuple[Any, RowsCache]:
        """Every row of the prefix, if there is one, in the model's own attention."""
        cache = RowsCache(
            self.store.geometry,
            len(prompt.rows),
            prompt.n_tokens + prompt.n_new,
            self.store.buffers,
            n_prefix=prefix.n_tokens if prefix else 0,
            contiguous=self.model.config._attn_implementation == "eager",
            rental=rent(self.buffers, prompt, prompt.n_tokens),
            on_host=self.model.device.type == "cpu",
        )
        try:
            if prefix is not None:
                cache.load(prefix)
                end_early(prefix, cache)
            if watched or (self._store_new and chooses(self._policy)):
                n_rows = SHADOW_ROWS if watched else OBSERVED_ROWS
                cache.observed = Observed(prompt.n_tokens, n_rows)
            with observing(self.model, cache):
                result = self._decode(prompt, cache, once, first)
            n_whole = cache.length // self.store.window * self.store.window
            # Before storing as this model's. On a miss not earlier: so the first token is sooner.
            if prefix is None or (self._store_new and n_whole > prefix.n_tokens):
                self._weights.check()
        except BaseException:
            end_reads(prefix, cache)
            cache.release()
            raise
        end_reads(prefix, cache)
        if prompt.returns_cache and getattr(result, CACHE) is cache:  # else one of the model's own
            setattr(result, CACHE, cache.as_dynamic())
        return result, cache

    def _run_sparse(
        self,
        prompt: Prompt,
        prefix: StoredPrefix,
        once: PromptOnce | None,
        first: FirstLogits,
        raw: RawLogits | None,
    ) -> Any:
        """Chosen rows of the prefix. What is computed on them stays in here."""
        n_new = prompt.n_tokens - prefix.n_tokens + prompt.n_new
        rental = rent(self.buffers, prompt, prompt.n_tokens - prefix.n_tokens)
        cache = ChosenCache(self.store.geometry, prefix, n_new, self.store.buffers, rental)
        try:
            prefix.read_ahead()
            with attending(self.model, cache), hearing(self.model, cache, raw):
                result = self._decode(prompt, cache, once, first)
        finally:
            cache.release()
        # As an attribute alone it would stay an item of the result.
        return replace(result, **{CACHE: None}) if prompt.returns_cache else result

    def _decode(
        self, prompt: Prompt, cache: RowsCache | ChosenCache, once: PromptOnce | None,
        first: FirstLogits,
    ) -> Any:  # fmt: skip
        options = first.begin(self.model, prompt, cache)
        cache.layers[0].begun = self._storing.go_on
        with within_positions(self.model.config, cache), in_parts():
            return self.model.generate(  # by name: PEFT before 0.19 drops what has none
                input_ids=prompt.input_ids, attention_mask=torch.ones_like(prompt.input_ids),
                streamer=once, **{CACHE: cache}, **options,
            )  # fmt: skip

    def _store(
        self, prompt: Prompt, sequences: torch.Tensor, given: Given, cache: RowsCache | None,
        hit: int, watch: Watch | None, undo: ExitStack,
    ) -> Outcome:  # fmt: skip
        """Hand new whole windows to the storing thread, and the request to the auditor.

        The cache is freed when both are done with it, no longer by `undo`.
        """
        job, sequences = None, given.named(prompt.rows, sequences)
        if cache is not None:
            ends = setting(self.model, prompt.options, "eos_token_id")
            # Where nothing is stored, nobody need know what is.
            known = hit if self._store_new else sequences.shape[1]
            job = self._storing.job(cache, sequences, prompt.n_tokens, ends, known)
            job.outcome.refused = given.changed or job.outcome.refused
        if watch is not None:
            watch.cache, watch.sequences = cache, sequences
            if cache is not None and job is not None:
                watch.release = release = Shared(2, cache.release)
                job = replace(job, release=release)
        undo.pop_all()
        if watch is not None:
            self._auditor.offer(watch)
        if job is None:
            return Outcome(refused=OF_CHOSEN if self._store_new else "")
        if job.is_new and self._store_new and not job.outcome.refused:
            self._storing.offer(job)
        else:
            job.release()
        return job.outcome if self._store_new else Outcome()
