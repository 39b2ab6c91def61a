"""The worker's side: rows into vLLM's blocks before each layer needs them, and back out after it.

    start ── lease, first layers on their way ──> layer 0 … n: wait, write ──> finish: release, save

Loads last one step: whatever ends the step ends them. A lease that is shorter than what was
promised, or a read that is lost, is reported as load errors: vLLM computes those blocks again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isnan

import torch

from impress.engines.hf_request import totals
from impress.engines.vllm.blocks import Layout
from impress.engines.vllm.exact import ExactSide
from impress.engines.vllm.gaps import gap_of
from impress.engines.vllm.patience import Patience, most_s
from impress.engines.vllm.saving import Saver
from impress.engines.vllm.sparse import SparseSide
from impress.engines.vllm.step import LoadSpec, StepPlan, StepReport
from impress.engines.vllm.strided import Streams
from impress.errors import ImpressError
from impress.read.access import AccessReport
from impress.store import PrefixStore

log = logging.getLogger("impress")

#: What a sparse answer says of its selection: see hf_request.Request.
_SPARSE_SUMS = (
    "chosen_rows_share", "fallback_share", "bytes_share", "transferred_share",
    "estimated_missing_mass", "missing_mass_worst_head",
)  # fmt: skip
_GONE = ("evicted_spans", "quarantined_spans")
#: How long a step with nothing to compute leaves the processor to the saver.
_IDLE_S = 0.005


class WorkerSide:
    """For vLLM's worker thread."""

    def __init__(
        self,
        store: PrefixStore,
        kv_caches: Mapping[str, torch.Tensor],
        layouts: Sequence[Layout],
        streams: Streams | None,
        *,
        store_new: bool,
    ) -> None:
        """kv_caches by layer name, and their layouts, in the order of the layers."""
        self.store = store
        self.layer_of = {name: i for i, name in enumerate(kv_caches)}
        self.caches = list(kv_caches.values())
        self.layouts = layouts
        self._streams = streams
        self.block_size = self.layouts[0].block_size
        self._patience = Patience(most_s())
        self.exact = ExactSide(store, self.block_size, self._patience)
        self.sparse = SparseSide(store, self.layer_of, self.caches, self.layouts, self._patience)
        self.saver = Saver(store, self.caches, self.layouts) if store_new else None
        self.counts: Counter[str] = Counter()
        self._plan = StepPlan()
        self._ran = -1  # the last layer of this step that has run
        self._begun = 0  # the last plan whose lost blocks the saver knows of
        self._n_whole = 0  # steps, all of which did what their plans say; -1 once one did not
        self._invalid: set[int] = set()
        self._held: set[str] = set()
        self._report = StepReport()
        self._n_gone = self._gone()
        self._unstored: Counter[str] = Counter()  # by reason, as last counted

    # ---- a step ----------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """First thing in a step, before any block is written."""
        if self.saver is not None:  # before all that may fail: these blocks are others' already
            # So are those of a plan that was lost on its way here, but which ones is not known.
            self.saver.drop(plan.dropped if plan.number == self._begun + 1 else None)
        if plan.heard != plan.number - 1:  # vLLM does not know how much of it was done
            self._cut_short()
        self._begun = plan.number
        self._end_loads()  # of a step that an error cut short
        self._invalid = set(plan.unfilled)  # of what it lost, only these still matter
        self.sparse.keep(plan.sparse)
        self._held = set(plan.held)
        self._ran = -1

    def start(self, plan: StepPlan) -> None:
        """Begin reading what the step's layers will wait for."""
        self._plan = plan
        self._patience.renew()
        if self._streams is not None:
            self._streams.begin()
        for spec in plan.loads:
            try:
                with self._patience.waiting():  # for its lease
                    if spec.policy is not None:
                        self.sparse.start(spec)
                    else:
                        self.exact.start(spec)
            except ImpressError as err:
                self._lose(spec, spec.first, str(err))
        self.exact.begin()

    def wait_for_layer(self, name: str) -> None:
        """On return a layer's rows are in their blocks, or their loss is noted."""
        layer = self.layer_of[name]
        self.exact.write(layer, self.caches[layer], self.layouts[layer])

    def note_layer(self, name: str) -> None:
        """A layer's attention has run, or was launched: its new rows are in their blocks."""
        self._ran = self.layer_of[name]

    def finish(self) -> None:
        """The layers have run: release what was read, hand over what is to be saved."""
        self._end_loads()
        if self._streams is not None:
            self._streams.mark()
        if self.saver is None:
            return
        if self._is_whole(self._plan):
            for spec in self._plan.saves:
                # A request that shares a block that was not filled has computed nonsense on it.
                if self._invalid.isdisjoint(spec.block_ids):
                    self.saver.offer(spec)
        else:
            self.saver.drop([spec.key for spec in self._plan.saves])
        for request_id in self._plan.ended:
            self.saver.end(request_id)
        self.saver.give_up(self._plan.given_up)  # after what the same plan has them store
        if not self._plan.n_tokens and (self._held or self.saver.reads()):
            self.saver.pause(_IDLE_S)

    def _is_whole(self, plan: StepPlan) -> bool:
        """Whether this step and all before it have computed what their plans say.

        An error or a signal may end a step anywhere. vLLM then still comes to `finish` (it is in a
        `finally`), or does not, or does not hear what the step has to report; it counts the step's
        tokens as computed, and finds their blocks in its own cache. So what it computes from then
        on may build on rows that were never filled.
        """
        if plan.number == self._n_whole + 1 and (
            not plan.n_tokens or self._ran == len(self.caches) - 1
        ):
            self._n_whole = plan.number
            return True
        self._cut_short()
        return False

    def _cut_short(self) -> None:
        """From here on no step is whole."""
        if self._n_whole >= 0:
            self._n_whole = -1
            log.warning(
                "a step of vLLM was cut short: %s",
                "start it again, as it takes for computed what was not"
                if self.saver is None
                else "nothing more is stored until it is started again",
            )

    def _end_loads(self) -> None:
        for load in self.exact.end():
            report = load.report()
            load.close()
            if load.lost:
                self._lose(load.spec, load.end, load.lost)
            if report is not None:  # what was read before a loss stays
                self._served(load.spec, report, "exact", load.end)
        for request in self.sparse.finish_step():
            if request.lost:
                self._lose(request.spec, 0, request.lost)
            elif request.report is not None:
                self._served(request.spec, request.report, "sparse", request.spec.end)

    def _served(self, spec: LoadSpec, report: AccessReport, mode: str, end: int) -> None:
        """Note what a request read of its prompt up to `end`."""
        self.counts[f"requests_{mode}"] += 1
        for tier, n in report.bytes_by_tier.items():
            self.counts[f"read_bytes_{tier}"] += n
        self.counts["shared_bytes"] += report.shared_bytes
        for tier, n in report.rows_by_tier.items():
            self.counts[f"read_rows_{tier}"] += n
        sums = totals([report], self.store.geometry)
        said = {
            "mode": mode,
            "policy": report.policy,
            "hit_tokens": end,
            "rows": sum(report.rows_by_tier.values()),
            "bytes": sum(report.bytes_by_tier.values()),
            "wait_ms": round(report.wait_ms, 3),
        }
        if mode == "sparse":
            fell_back = sum(bool(line.get("fell_back")) for line in report.per_layer)
            self.counts["fallback_layers"] += fell_back
            # A missing estimate is NaN, which JSON has no word for.
            said |= {name: None if isnan(sums[name]) else sums[name] for name in _SPARSE_SUMS}
        self._report.served[spec.request_id] = said

    def _lose(self, spec: LoadSpec, end: int, why: str) -> None:
        """Blocks of rows from `end` on hold nothing."""
        log.warning("request %s: %s; it is computed instead", spec.request_id, why)
        self.counts["lost"] += 1
        self._report.lost.append(spec.request_id)
        with suppress(ImpressError):  # the store is being closed
            n_left = self.store.lookup(spec.prompt.tokens, spec.prompt.extra, spec.prompt.tenant)
            gap = gap_of(spec.prompt, n_left, self.store.window)
            self._report.gaps += [gap] if gap is not None else []
        first = max(end, spec.first) // self.block_size
        self._invalid.update(spec.block_ids[first:])

    # ---- what vLLM asks after a step -------------------------------------------------------

    def saved(self) -> set[str]:
        """Finished requests whose blocks may be freed. If vLLM does not hear of them, because an
        error cut the step short, the next plan names them again."""
        return {
            request_id
            for request_id in self._held
            if self.saver is None or not self.saver.busy(request_id)
        }

    def take_invalid(self) -> set[int]:
        """Blocks whose load failed in this step."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> StepReport:
        """For the scheduler's side."""
        report, self._report = self._report, StepReport()
        if self.saver is not None:
            report.saving = self.saver.reads()
            for request_id, n_tokens, n_new in self.saver.ready():
                report.stored[request_id] = n_tokens
                if n_new:  # else another request had stored it all before its turn came
                    self.counts["stored"] += 1
            unstored = Counter(skipped=self.saver.n_skipped, refused=self.saver.n_refused)
            self.counts += unstored - self._unstored
            self._unstored = unstored
        gone = self._gone()
        report.evicted, self._n_gone = gone != self._n_gone, gone
        return report

    def _gone(self) -> int:
        """How many spans the store let go of by itself, so far."""
        return sum(self.store.counters[name] for name in _GONE)

    def take_counts(self) -> dict[str, int]:
        """Counts since the last call."""
        counts, self.counts = self.counts, Counter()
        return dict(counts)

    def flush(self) -> None:
        """Wait until everything handed over is READY."""
        if self.saver is not None:
            self.saver.flush()

    def let_go(self) -> None:
        """On return no block is being read, and what waited to be stored is forgotten."""
        if self.saver is not None:
            self.saver.drop(None)

    def close(self) -> None:
        """Finish what is being saved, give up what is being read. Idempotent."""
        self._end_loads()
        if self.saver is not None:
            self.saver.close()
