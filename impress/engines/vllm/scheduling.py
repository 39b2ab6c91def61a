"""The scheduler's side: what is a hit, what is to be loaded and saved, and what went wrong.

    new request ─hit?─> blocks allocated ─build_plan─> worker ─StepReport─> hear
                                              finished ─finish─┘

All of it is lookups in memory and bookkeeping: no call reads or writes a disk, except for a LoRA
request, whose adapter's files are examined, and read when they are seen first (keys.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from impress.engines.vllm.events import Events
from impress.engines.vllm.hits import Hits, privatise
from impress.engines.vllm.settings import Served, Settings
from impress.engines.vllm.shared import View
from impress.engines.vllm.step import LoadSpec, SaveSpec, StepPlan, StepReport
from impress.engines.vllm.tracked import Tracked, both, whole_of
from impress.engines.vllm.unheard import Unheard, unpublish
from impress.errors import ImpressError
from impress.policy import Exact, Policy

log = logging.getLogger("impress")

#: How long nothing is scheduled before rows that are still to be saved are let go.
_PATIENCE_S: Final = 1.0


class SchedulerSide:
    """For vLLM's scheduler thread."""

    def __init__(self, settings: Settings, served: Served, view: View, events: Events) -> None:
        self._settings = settings
        self._view = view
        self._events = events
        self._block_size = served.block_size
        self._window = settings.config.window
        self._hits = Hits(settings, served, view)
        self._tracked: dict[str, Tracked] = {}
        self._late: list[SaveSpec] = []  # of requests that have finished
        self._gone: list[list[int]] = []  # blocks of each that finished since the last plan
        self._held: dict[str, str] = {}  # finished -> key; vLLM keeps their blocks until told
        self._answers: dict[str, dict[str, Any]] = {}  # of requests of which others are to come
        self._ended: list[str] = []
        self._dropped: list[str] = []
        self.saving = False  # the worker reads blocks, or has yet to
        self._asked = False  # since a plan vLLM has asked for a hit: it wants to admit a request
        self._stalled_s: float | None = None  # since when requests wait for blocks of ended ones
        self._evicting = False  # the store has let go of something, and will again
        self._n_plans = 0
        self._heard = 0  # number of the last plan for which a report came back
        self._unheard = Unheard(served.block_size)
        self._given: dict[str, tuple[int, list[int]]] = {}  # since a plan: its number, the blocks
        self.kv_cache_manager: Any = None

    # ---- a request comes -------------------------------------------------------------------

    def add(self, request: Any) -> None:
        """A request has come."""
        self._tracked[request.request_id] = self._hits.track(request)

    def matched(self, request: Any, n_computed: int) -> int:
        """Tokens that can be loaded beyond those in vLLM's own cache. Pure except for a memo."""
        self._asked = True
        if request.request_id not in self._tracked:  # Ctrl-C came as vLLM added it
            self.add(request)
        return self._hits.matched(self._tracked[request.request_id], n_computed)

    def allocated(self, request: Any, n_external: int) -> None:
        """vLLM has allocated blocks for a request, and takes n_external tokens of the hit."""
        tracked = self._tracked[request.request_id]
        (blocks,) = self.kv_cache_manager.get_block_ids(request.request_id)
        self._given[tracked.key] = self._n_plans, list(blocks)
        tracked.n_blocks = len(blocks)
        if n_external:
            tracked.to_load = (tracked.hit[0], tracked.hit[0] + n_external)
        if tracked.private:
            privatise(request)  # what it publishes from now on is not found, not even by itself

    # ---- a step ----------------------------------------------------------------------------

    def plan(self, output: Any) -> StepPlan:
        """The worker's part in the step that vLLM has just scheduled."""
        self._note_cut(output)
        self._n_plans += 1
        plan = StepPlan(
            n_tokens=output.total_num_scheduled_tokens, number=self._n_plans, heard=self._heard
        )
        short = False
        for tracked in self._tracked.values():
            if tracked.request.num_preemptions != tracked.n_preempted:
                self._preempted(tracked, plan)
                comes = tracked.request.request_id in output.num_scheduled_tokens
                short = short or not (comes or self._has_room(tracked.request))  # as after a reset
        if self._stalled(output) or short:  # saves of ended requests go first
            plan.given_up += self._held.values()
        for request_id, n_new in output.num_scheduled_tokens.items():
            tracked = self._tracked[request_id]
            tracked.n_planned = end = tracked.request.num_computed_tokens + n_new
            if tracked.to_load[1]:
                self._load(tracked, n_new, plan)
            if not tracked.sparse:
                self._save(tracked, end, plan)
        requests = (tracked.request for tracked in self._tracked.values())
        for request_id in self._unheard.note(plan, requests, self.kv_cache_manager):
            self._tracked[request_id].sparse = False  # it is computed again, densely
        plan.sparse += [tracked.key for tracked in self._tracked.values() if tracked.sparse]
        plan.saves += self._late
        self.saving = self.saving or bool(plan.saves)
        # Held until they are freed: something may keep vLLM from that, though it was told.
        ids_of = self.kv_cache_manager.get_block_ids
        self._held = {held: key for held, key in self._held.items() if any(ids_of(held))}
        plan.held += self._held
        plan.ended += self._ended
        if self._view.current:
            self._events.check(self._view.lookup)
        plan.dropped += self._dropped
        self._late, self._ended, self._dropped, self._gone = [], [], [], []
        self._given = {}  # last: if this is cut short, they stay
        return plan

    def _note_cut(self, output: Any) -> None:
        """Note blocks that vLLM gave before its scheduling, or a plan, was cut short: they are in
        vLLM's own cache by now, and nothing was computed or loaded into them.

        vLLM's worker never learns of these blocks. It does not know a request that had just been
        admitted; one that ran, or that had been preempted, goes on in the blocks that it had. Such
        requests have to be aborted.
        """
        running = output.scheduled_cached_reqs
        told = {new.req_id for new in output.scheduled_new_reqs} | running.resumed_req_ids
        now = {self._tracked[request_id].key for request_id in told}
        given = self._given.items()
        cut = [ids for key, (number, ids) in given if key not in now or number != self._n_plans]
        cut += self._unknown(running, output.num_scheduled_tokens)
        if cut:
            self._n_plans += 1  # for the worker, which then calls no later step whole
            self._unheard.expect(set().union(*cut))

    def _unknown(self, running: Any, scheduled: Mapping[str, int]) -> Iterator[list[int]]:
        """Blocks of running requests that this step is to fill, and that vLLM's worker lacks."""
        for request_id, new in zip(running.req_ids, running.new_block_ids, strict=True):
            tracked = self._tracked[request_id]
            if request_id in running.resumed_req_ids:  # the worker is told of all of them
                continue
            n_known = tracked.n_blocks + (len(new[0]) if new else 0)
            end = tracked.request.num_computed_tokens + scheduled[request_id]
            tracked.n_blocks = max(n_known, -(-end // self._block_size))
            if tracked.n_blocks > n_known:
                yield self._blocks(request_id, end)[n_known:]

    def _has_room(self, request: Any) -> bool:
        """Whether vLLM has as many free blocks as a request takes."""
        wanted: int = -(-request.num_tokens // self._block_size)
        return wanted <= int(self.kv_cache_manager.block_pool.get_num_free_blocks())

    def _stalled(self, output: Any) -> bool:
        """Whether nothing has been scheduled for a while, as ended requests hold their blocks: with
        no request to preempt, those that wait would be served as fast as the disk takes rows.

        Of a request that it would admit vLLM asks what is a hit, in every step until there are
        blocks for it; in a pause, of none.
        """
        asked, self._asked = self._asked, False
        if not (asked and self._held) or output.total_num_scheduled_tokens:
            self._stalled_s = None
            return False
        now = time.monotonic()
        self._stalled_s = now if self._stalled_s is None else self._stalled_s
        return now - self._stalled_s >= _PATIENCE_S

    def _preempted(self, tracked: Tracked, plan: StepPlan) -> None:
        """Its blocks already belong to another. It begins again, maybe in this very step."""
        plan.dropped.append(tracked.key)
        unpublish(tracked, self._block_size, self.kv_cache_manager)
        tracked.n_preempted = tracked.request.num_preemptions
        tracked.n_saved = 0
        tracked.handed = tracked.sparse = False
        if tracked.request.num_output_tokens > tracked.n_before:
            tracked.served_before = tracked.said
        tracked.served, tracked.n_before = {}, tracked.request.num_output_tokens

    def _load(self, tracked: Tracked, n_new: int, plan: StepPlan) -> None:
        request = tracked.request
        first, end = tracked.to_load
        tracked.to_load = (0, 0)
        policy: Policy | None = tracked.policy
        # Rows are chosen by all new tokens at once, into blocks that are nobody else's.
        whole = end + n_new >= request.num_tokens
        if isinstance(policy, Exact) or not tracked.private or first or not whole:
            policy = None
        tracked.sparse = policy is not None
        assert tracked.prompt is not None, "what was matched in this step was named"
        prompt = tracked.prompt[2].cut(end)  # not named again: nothing may raise here
        blocks = self._blocks(request.request_id, end)
        plan.loads.append(
            LoadSpec(request.request_id, tracked.key, prompt, first, end, blocks, policy)
        )

    def _save(self, tracked: Tracked, end: int, plan: StepPlan) -> None:
        """Hand over what the step adds to the prompt's whole windows."""
        if tracked.refused or not self._settings.store_new:
            return
        request = tracked.request
        wanted = request.num_prompt_tokens // self._window * self._window
        upto = min(end, wanted)
        if upto <= max(tracked.n_saved, min(tracked.n_stored, wanted)):
            return
        spec = self._spec(tracked, wanted, upto, self._blocks(request.request_id, upto))
        if spec is not None:
            tracked.n_saved = upto
            plan.saves.append(spec)

    def _spec(self, tracked: Tracked, wanted: int, end: int, blocks: list[int]) -> SaveSpec | None:
        try:
            prompt = self._hits.prompt(tracked, wanted)
            self._hits.gaps.storing(tracked.request.request_id, prompt)
        except ImpressError as err:
            tracked.refused = str(err)
            return None
        request = tracked.request
        if not (tracked.private or tracked.silent):
            self._events.expect(request, prompt)
        tracked.handed = True
        return SaveSpec(request.request_id, tracked.key, prompt, end, blocks)

    def _blocks(self, request_id: str, n_tokens: int) -> list[int]:
        (ids,) = self.kv_cache_manager.get_block_ids(request_id)
        return list(ids[: -(-n_tokens // self._block_size)])

    # ---- a request goes --------------------------------------------------------------------

    def finish(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """(whether its blocks must stay until the worker says so, what the answer says)."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False, None
        self._ended.append(request.request_id)
        self._gone.append(block_ids)
        # What a cut-short scheduling was to compute or load is in vLLM's cache already, and not
        # among block_ids, which end with what it counts as computed.
        (given,) = self.kv_cache_manager.get_block_ids(request.request_id)
        filled = request.num_computed_tokens
        if tracked.to_load[1]:
            filled = min(filled, tracked.to_load[0])
        self.kv_cache_manager.evict_blocks(set(given[filled // self._block_size :]))
        said = {"impress": read} if (read := self._answer(tracked)) else None
        if request.num_preemptions != tracked.n_preempted:
            self._dropped.append(tracked.key)  # it holds no blocks any more
            unpublish(tracked, self._block_size, self.kv_cache_manager)
            return False, said
        if not (tracked.refused or tracked.sparse) and self._settings.store_new:
            self._save_late(tracked, block_ids)
        if tracked.handed:  # even if refused or lost by now: what was handed over is still read
            self._held[request.request_id] = tracked.key
        return tracked.handed, said

    def _answer(self, tracked: Tracked) -> dict[str, Any]:
        """What its answer says was read. Of several answers of one request vLLM passes on what the
        last one to end says: so each also says it of those that ended before it."""
        name = tracked.request.request_id
        if (whole := whole_of(name)) == name:
            return tracked.said
        said = self._answers[whole] = both(self._answers.get(whole, {}), tracked.said)
        if not any(whole_of(other) == whole for other in self._tracked):
            del self._answers[whole]
        return said

    def _save_late(self, tracked: Tracked, block_ids: list[int]) -> None:
        """Hand over the whole windows of a request that ends, its answer's included."""
        end = tracked.request.num_computed_tokens // self._window * self._window
        end = min(end, len(block_ids) * self._block_size)
        if end > max(tracked.n_saved, tracked.n_stored):
            spec = self._spec(tracked, end, end, block_ids[: -(-end // self._block_size)])
            if spec is not None:
                self._late.append(spec)
                tracked.n_saved = end

    # ---- the worker reports ----------------------------------------------------------------

    def hear(self, report: StepReport | None, invalid_block_ids: Iterable[int]) -> None:
        """What the worker read, stored and lost in a step."""
        if report is not None:
            self.saving = report.saving
            if report.stored or report.lost or report.evicted:
                self._view.refresh()
                self._evicting |= report.evicted
                if self._evicting:  # the view may have looked before the eviction
                    self._events.doubt()
            for request_id, what in report.served.items():
                if request_id in self._tracked:
                    self._tracked[request_id].served = what
            for gap in report.gaps:
                if not self._view.shared:  # else it has the same gaps
                    self._hits.gaps.add(gap)
            for request_id, n_tokens in report.stored.items():
                self._hits.gaps.stored(request_id, n_tokens)
                self._events.stored(request_id, n_tokens)
            for request_id in report.lost:
                if request_id in self._tracked:
                    self._lost(self._tracked[request_id])
        invalid = set(invalid_block_ids)
        if invalid:
            self._take_back(invalid)
        self._heard = self._n_plans  # last: all of it has been done

    def _lost(self, tracked: Tracked) -> None:
        """vLLM computes it again from the first block lost, densely."""
        tracked.sparse = False
        tracked.n_saved = 0
        tracked.n_stored = 0
        if not tracked.private:  # private ones were not reported; their hashes are nobody's
            self._events.lost(tracked.request, tracked.hit[1])

    def _take_back(self, invalid: set[int]) -> None:
        """Let no request build on blocks that were never filled.

        vLLM makes the first request that holds such a block compute it again, and lets others that
        share it go on. If that takes the first one several steps, the others would read it half
        done; and later requests would find its blocks in the prefix cache. The same holds for the
        blocks of a request that was aborted while the step ran.
        """
        spoilt: set[int] = set()
        for ids in self._gone:
            at = next((i for i, block in enumerate(ids) if block in invalid), len(ids))
            spoilt.update(ids[at:])
        self._late = [spec for spec in self._late if invalid.isdisjoint(spec.block_ids)]
        for request_id, tracked in self._tracked.items():
            groups = self.kv_cache_manager.get_block_ids(request_id)
            blocks = list(groups[0]) if groups else []
            first = next((i for i, block in enumerate(blocks) if block in invalid), None)
            if first is None:
                continue
            spoilt.update(blocks[first:])
            tracked.n_saved = tracked.n_stored = 0
            if tracked.served.get("hit_tokens", 0) > first * self._block_size:
                tracked.served = {}  # thrown away with what it is computed on
            request = tracked.request
            request.num_computed_tokens = min(request.num_computed_tokens, first * self._block_size)
        self.kv_cache_manager.evict_blocks(spoilt | invalid)

    # ---- the rest --------------------------------------------------------------------------

    def reset(self) -> None:
        """From now on find nothing of what was stored before: the weights may be others.

        What is stored from now on is found by this process only.
        """
        self._hits.reset()
        for request_id, tracked in self._tracked.items():
            if any(self.kv_cache_manager.get_block_ids(request_id)):  # else it has yet to begin
                tracked.refused = "the cache was reset while it ran"
            tracked.silent |= tracked.handed or tracked.request.num_preemptions > 0
        self._events.cleared()

    def close(self) -> None:
        self._view.close()
