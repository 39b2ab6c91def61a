"""`ImpressConnector`: vLLM's KV connector interface over the two sides. Glue, no decisions."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from impress.engines.vllm import choosing
from impress.engines.vllm.blocks import layouts_of
from impress.engines.vllm.events import Events
from impress.engines.vllm.metrics import ImpressProm, ImpressStats
from impress.engines.vllm.scheduling import SchedulerSide
from impress.engines.vllm.settings import Settings, served
from impress.engines.vllm.shared import View, acquire, opened, release
from impress.engines.vllm.step import StepPlan, StepReport
from impress.engines.vllm.working import WorkerSide
from impress.errors import Unsupported
from impress.policy import Exact, KeepAll
from impress.store import PrefixStore

log = logging.getLogger("impress")


class ImpressConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # untyped bases
    """A store under vLLM. Named in --kv-transfer-config; `impress vllm-config` prints that setting.

    Raises at start, naming the setting to change: Unsupported (vLLM's settings), ConfigError and
    BadInput (the extra config), and what `PrefixStore.open` raises: StoreMismatch, StoreLocked,
    StoreFailed, and FormatError, also if "store_new" is false and nothing is stored yet.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = Settings.of(self._kv_transfer_config.kv_connector_extra_config)
        self._served = served(vllm_config, kv_cache_config, self._settings)
        self.scheduler: SchedulerSide | None = None
        self.worker: WorkerSide | None = None
        self._store: PrefixStore | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = self._scheduler_side()
        else:
            model = self._served
            self._store = acquire(self._settings.store, model.geometry, model.namespace, self._open)
            policy = self._settings.policy
            if not isinstance(policy, Exact | KeepAll) and self._settings.config.guard != "off":
                log.warning(
                    "guard: not at work inside vLLM; every request that asks for nothing else gets "
                    "%r from its first hit on (docs/VLLM.md, Sparse prefixes)", policy,
                )  # fmt: skip

    def _open(self) -> PrefixStore:
        model, settings = self._served, self._settings
        return opened(
            settings.store, model.geometry, model.namespace, settings.config,
            store_new=settings.store_new,
        )  # fmt: skip

    def _scheduler_side(self) -> SchedulerSide:
        model, settings = self._served, self._settings
        events = self._vllm_config.kv_events_config
        view = View(settings.store, model.geometry, model.namespace, settings.config)
        told = Events(
            enabled=events is not None and events.enable_kv_cache_events,
            block_size=model.block_size,
        )
        return SchedulerSide(settings, model, view, told)

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save only makes a later miss."""
        return False

    # ---- the worker's side -----------------------------------------------------------------

    def _worker(self) -> WorkerSide:
        assert self.worker is not None, "vLLM registers its KV caches before the first step"
        return self.worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self.worker is not None:  # vLLM hands an engine the connector its process already has
            raise Unsupported(
                "vLLM has one KV connector in a process, and another engine uses it: shut that "
                "engine down first (llm.llm_engine.engine_core.shutdown()), or start this one in "
                "a process of its own"
            )
        if get_kv_transfer_group() is not self:  # nobody tells us of rows that another loads
            raise Unsupported(
                f"{type(get_kv_transfer_group()).__name__}: what a connector beside impress loads, "
                'or fails to, would be stored as computed: name "ImpressConnector" alone'
            )
        try:
            self._begin(kv_caches)
        except BaseException:  # else the next engine of this process gets this connector
            ensure_kv_transfer_shutdown()
            raise

    def _begin(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make the worker's side. Raises Unsupported."""
        layers = self._vllm_config.compilation_config.static_forward_context
        names = self._served.layer_names
        assert self._store is not None
        caches = {name: kv_caches[name] for name in names}
        for name, cache in caches.items():  # vLLM bound them to its engine's layers
            bound = getattr(layers[name], "kv_cache", cache)
            if not isinstance(bound, torch.Tensor) or bound.data_ptr() != cache.data_ptr():
                raise Unsupported(
                    "vLLM hands this engine the KV connector of one whose start failed earlier in "
                    "this process: start it again, or in a new process"
                )
        layouts, streams = layouts_of(caches, layers)
        for name, layout in zip(names, layouts, strict=True):
            if layout.block_size != self._served.block_size:  # block ids are the scheduler's
                raise Unsupported(
                    f"vLLM keeps {name} in blocks of {layout.block_size} tokens and schedules "
                    f"blocks of {self._served.block_size}: start with "
                    f"--block-size {layout.block_size}"
                )
        self.worker = WorkerSide(
            self._store, caches, layouts, streams, store_new=self._settings.store_new
        )
        self._check_attention({name: layers[name] for name in names})
        if self._settings.sparse:
            choosing.serve(self.worker.sparse)

    def _check_attention(self, layers: dict[str, Any]) -> None:
        """Raises Unsupported if a layer's attention is not ours and may have to choose rows. If it
        need not, logs what then goes unnoticed (loading.begins)."""
        for name, layer in layers.items():
            if isinstance(layer.impl, choosing.Choosing):
                continue
            kind = type(layer.impl).__name__
            if self._settings.sparse:
                raise Unsupported(
                    f"sparse policies need vLLM's CPU_ATTN, or FLASH_ATTN on CUDA, and {name} "
                    f"has {kind}: drop --attention-backend, or use policy exact"
                )
            log.warning(
                "vLLM did not load the plug-in impress (attention is its own %s), so nothing tells "
                "whether the model's files were replaced while it loaded them: if they were, start "
                "it again; to have it noticed, install impress in vLLM's environment and let "
                "VLLM_PLUGINS name it", kind,
            )  # fmt: skip
            return

    def unregister_kv_caches(self) -> None:
        """vLLM (from 0.33 on) is about to unmap the KV cache: nothing reads it from here on."""
        if self.worker is not None:
            self.worker.let_go()

    def handle_preemptions(self, kv_connector_metadata: StepPlan) -> None:
        self._worker().begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker().start(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._worker().wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Notes that the layer ran: a thread of its own reads the blocks when the step is over."""
        self._worker().note_layer(layer_name)

    def wait_for_save(self) -> None:
        self._worker().finish()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._worker().saved() or None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker().take_invalid()

    def build_connector_worker_meta(self) -> StepReport:
        return self._worker().take_report()

    def get_kv_connector_stats(self) -> ImpressStats | None:
        if self.worker is None:
            return None
        counts = self.worker.take_counts()
        return ImpressStats(data=counts) if counts else None

    def flush(self) -> None:
        """Wait until everything computed so far is stored and READY."""
        self._worker().flush()

    # ---- the scheduler's side --------------------------------------------------------------

    def _scheduler(self) -> SchedulerSide:
        assert self.scheduler is not None, "asked of the worker's side"
        return self.scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler().kv_cache_manager = kv_cache_manager

    def on_new_request(self, request: Any) -> None:
        self._scheduler().add(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler().matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler().allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        return self._scheduler().plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler().hear(
            connector_output.kv_connector_worker_meta,
            connector_output.invalid_block_ids or (),
        )

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler().finish(request, block_ids[0] if block_ids else [])

    def take_events(self) -> Iterable[Any]:
        return self._scheduler()._events.take()

    def has_pending_push_work(self) -> bool:
        """vLLM keeps stepping while this is true: a pause must not complete before blocks have
        been read, as vLLM may then sleep and unmap them."""
        return self._scheduler().saving

    def reset_cache(self) -> bool | None:
        self._scheduler().reset()
        return True

    # ---- both ------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Finish what is being stored; give the store back. Idempotent."""
        if self.worker is not None:
            self.worker.close()
            choosing.serve(None)
        if self.scheduler is not None:
            self.scheduler.close()
        store, self._store = self._store, None
        if store is not None:
            release(self._settings.store)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ImpressStats:
        return ImpressStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ImpressProm:
        return ImpressProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are waited for in Python, between pieces of a graph."""
        return True
