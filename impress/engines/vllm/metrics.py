"""The connector's counts as vLLM carries them: between processes, into its log, to Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

#: Tier -> its name in texts. These are the tiers that a request's rows may come from.
_TIERS = {"hbm": "HBM", "dram": "DRAM", "ssd": "the SSD"}

#: Count -> its meaning. `vllm:impress_<count>_total` in Prometheus.
COUNTS = {
    "requests_exact": "requests served whole prefixes",
    "requests_sparse": "requests served chosen rows of prefixes",
    "lost": "loads that failed and were computed instead",
    "stored": "stores that became READY, with something new",
    "skipped": "requests, or chunks of them, that were given up: too many waited, or it failed",
    "refused": "stores that the store refused, or that failed",
    **{
        f"read_bytes_{tier}": f"bytes given to requests from {name}"
        for tier, name in _TIERS.items()
    },
    "shared_bytes": "of read_bytes_ssd: out of reads under way for others, not read again",
    **{
        f"read_rows_{tier}": f"rows (a token in a layer) given to requests from {name}"
        for tier, name in _TIERS.items()
    },
    "fallback_layers": "layers of sparse requests whose identifier did not decide",
}


class ImpressStats(KVConnectorStats):  # type: ignore[misc]  # the base is untyped
    """Counts of one interval."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: ImpressStats) -> ImpressStats:
        for name, n in other.data.items():
            self.data[name] = self.data.get(name, 0) + n
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class ImpressProm(KVConnectorPromMetrics):  # type: ignore[misc]  # the base is untyped
    """Counters of every engine of a server."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kind = metric_types[Counter]
        self._counters = {
            name: {
                engine: made.labels(*values) for engine, values in per_engine_labelvalues.items()
            }
            for name, made in (
                (name, kind(f"vllm:impress_{name}", documentation=text, labelnames=labelnames))
                for name, text in COUNTS.items()
            )
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, n in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(n)
