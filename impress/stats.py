"""Counters of a store from its first request on, and their Prometheus form."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from time import monotonic, thread_time
from typing import Any, Final
from weakref import WeakSet

from impress.errors import StoreFailed
from tiers.threads import MORE_THREADS, no_more_threads

#: Upper bounds of the latency buckets, milliseconds.
BUCKETS_MS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0)


class Spent:
    """Milliseconds of one thread within `with` blocks, added up.

    `ms` by the clock, `cpu_ms` on the processor: the rest was waiting, mostly for the interpreter.
    """

    __slots__ = ("_since", "cpu_ms", "ms")

    def __init__(self) -> None:
        self.ms = self.cpu_ms = 0.0
        self._since = (0.0, 0.0)

    def __enter__(self) -> None:
        cpu_s = thread_time()  # this call takes time, so it stays outside the other span
        self._since = monotonic(), cpu_s

    def __exit__(self, *_error: object) -> None:
        now_s, cpu_s = monotonic(), thread_time()
        self.ms += (now_s - self._since[0]) * 1e3
        self.cpu_ms += (cpu_s - self._since[1]) * 1e3


_PLAIN = (
    "lookups", "hits", "hit_tokens", "stored_tokens", "stored_bytes", "evicted_spans",
    "quarantined_spans", "damaged_spans", "promotions_skipped", "promotions_failed",
    "lessons_skipped", "expired_leases", "shared_bytes", "ahead_bytes", "ahead_used_bytes",
)  # fmt: skip
_GROUPED = (
    "misses", "lost", "read_bytes", "refused", "promoted_bytes", "promotions",
    "promotion_read_bytes", "rows_from", "chunks_from", "repacks",
)  # fmt: skip

#: Labels shown before anything is counted: to Prometheus, a count that begins at 1 has not grown.
REASONS: Final = {
    "misses": ("not_stored", "too_short", "lost", "tier_off"),
    "lost": (
        "checksum", "short", "io", "late", "expired", "shortage", "permission", "unmounted",
    ),
    "refused": (
        "disk_full", "segments_too_small", "daily_write_budget", "read-only",
        "no_free_write_slot", "shortage", "incomplete", "abandoned", "purged",
        "prefix_gone", "failed",
    ),
}  # fmt: skip


class Counters:
    """Named counts and one latency histogram. Thread-safe; names may carry one label, a/b."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._latency = [0] * (len(BUCKETS_MS) + 1)
        self._latency_sum_ms = 0.0

    def add(self, name: str, n: int = 1) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + n

    def load_ms(self, ms: float) -> None:
        """One layer's load took this long, from request to ready."""
        at = next((i for i, bound in enumerate(BUCKETS_MS) if ms <= bound), len(BUCKETS_MS))
        with self._lock:
            self._latency[at] += 1
            self._latency_sum_ms += ms

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._counts.get(name, 0)

    def grouped(self, name: str) -> dict[str, int]:
        """Counts called name/label, by label."""
        with self._lock:
            start = name + "/"
            return {k[len(start) :]: v for k, v in self._counts.items() if k.startswith(start)}

    def snapshot(self) -> dict[str, Any]:
        """Every count of a store, as `PrefixStore.stats` shows it."""
        counts: dict[str, Any] = {name: self[name] for name in _PLAIN}
        counts.update({name: self.grouped(name) for name in _GROUPED})
        return {**counts, "load_latency": self.latency()}

    def latency(self) -> dict[str, Any]:
        """{"count", "sum_ms", "le_ms": {bound: cumulative count}}."""
        with self._lock:
            total, cumulative = 0, {}
            bounds = [*map(str, BUCKETS_MS), "+Inf"]
            for bound, n in zip(bounds, self._latency, strict=True):
                total += n
                cumulative[bound] = total
            return {"count": total, "sum_ms": self._latency_sum_ms, "le_ms": cumulative}


def serve_metrics(
    stats: Callable[[], dict[str, Any]], uuid: bytes, port: int | None
) -> tuple[Callable[[], None], int | None]:
    """Serve Prometheus text on 127.0.0.1; returns (what ends that, the port bound).

    `port` None: no server, and None. Raises StoreFailed where port or thread cannot be had.
    """
    if port is None:
        return (lambda: None), None
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(_Collector(stats, uuid))
    started = None
    try:
        started = start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as err:
        raise StoreFailed(
            f"metrics: port {port}: {err.strerror}; name another metrics_port, or 0 for a free one"
        ) from None
    except RuntimeError as err:
        if not no_more_threads(err):
            raise
    if started is None:  # out here, where that error no longer holds the port
        raise StoreFailed(MORE_THREADS)
    server = started[0]
    _servers.add(server)

    def end() -> None:
        server.shutdown()
        server.server_close()

    return end, int(server.server_port)


_servers: WeakSet[Any] = WeakSet()


def _in_a_child() -> None:
    """After a fork: nobody answers here, and the port would stay taken when the parent lets go."""
    for server in [*_servers]:
        server.socket.close()


os.register_at_fork(after_in_child=_in_a_child)


class _Collector:
    """Turns one stats() dictionary into metric families at each scrape."""

    def __init__(self, stats: Callable[[], dict[str, Any]], uuid: bytes) -> None:
        self._stats = stats
        self._uuid = uuid

    def describe(self) -> list[Any]:
        return []

    def identity(self) -> Iterator[Any]:
        """Which store this is: two servers on a machine differ only in their port."""
        from prometheus_client.core import GaugeMetricFamily

        made = GaugeMetricFamily("impress_store_info", "the store's identity", labels=["uuid"])
        made.add_metric([self._uuid.hex()], 1)
        yield made

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        stats = self._stats()
        yield from self.identity()
        for name, help_text, key, label in _COUNTERS:
            value = stats[key]
            counter = CounterMetricFamily(name, help_text, labels=[label] if label else None)
            if label:
                value = {**dict.fromkeys(REASONS.get(key, ()), 0), **value}
            for tag, n in value.items() if label else [("", value)]:
                counter.add_metric([tag] if label else [], n)
            yield counter
        for state in ("total", "used", "free"):
            gauge = GaugeMetricFamily(
                f"impress_tier_{state}_bytes", f"{state} bytes", labels=["tier"]
            )
            for tier, usage in stats["tiers"].items():
                gauge.add_metric([tier], usage[state])
            yield gauge
        for name, help_text, values in _by_tier(stats):
            gauge = GaugeMetricFamily(name, help_text, labels=["tier"])
            for tag, n in values.items():
                gauge.add_metric([tag], n)
            yield gauge
        yield from _guards(stats["guard"])
        yield GaugeMetricFamily(
            "impress_ssd_read_only", "1 while home takes no writes",
            value=float(bool(stats["ssd_read_only"])),
        )  # fmt: skip
        if stats["writes_left_bytes"] is not None:
            yield GaugeMetricFamily(
                "impress_writes_left_bytes", "what is left of the daily write budget",
                value=stats["writes_left_bytes"],
            )  # fmt: skip
        for key in (
            "dead_bytes",
            "limbo_bytes",
            "other_shards",
            "spans",
            "nodes",
            "windows",
            "leases",
            "oldest_lease_s",
        ):
            yield GaugeMetricFamily(f"impress_{key}", key.replace("_", " "), value=stats[key])
        load = stats["load_latency"]
        yield HistogramMetricFamily(
            "impress_layer_load_seconds",
            "time from asking for a layer to having it",
            buckets=[
                (bound if bound == "+Inf" else str(float(bound) / 1e3), n)
                for bound, n in load["le_ms"].items()
            ],
            sum_value=load["sum_ms"] / 1e3,
        )


def _by_tier(stats: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, float]]]:
    """(name, help, value by tier) of gauges that not every tier has."""
    important = {tier: use["important_share"] for tier, use in stats["tiers"].items()}
    known = {tier: share for tier, share in important.items() if share is not None}
    yield "impress_tier_important_share", "share of important rows in the tier's chunks", known
    yield "impress_tier_chunks", "chunks in the tier", stats["chunks"]
    emulated = {tier: float(tier in stats["emulated"]) for tier in stats["tiers"]}
    yield "impress_tier_emulated", "1 where the tier is emulated in host memory", emulated


def _guards(ledgers: list[dict[str, Any]]) -> Iterator[Any]:
    """For each ledger of the guard: its counts, and whether its policy is trusted."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = ["namespace", "policy"]
    for family, name, help_text, key in (
        (GaugeMetricFamily, "trusted", "1 where the policy chooses rows, 0 where hits are exact",
         "trusted"),
        (CounterMetricFamily, "shadows", "requests weighed against all keys", "shadows"),
        (CounterMetricFamily, "exceeded", "shadows that missed too much", "exceeded"),
        (CounterMetricFamily, "understated", "shadows over their estimate", "understated"),
        (CounterMetricFamily, "dropped", "shadows that came to nothing", "dropped"),
        (CounterMetricFamily, "sent_back", "times a trusted policy was sent back to exact",
         "sent_back"),
        (GaugeMetricFamily, "bound", "upper limit of the share of requests that miss too much",
         "bound"),
        (GaugeMetricFamily, "worst_missing_mass", "the most a shadow missed",
         "worst_missing_mass"),
        (CounterMetricFamily, "reruns", "sparse requests run again exactly", "reruns"),
        (CounterMetricFamily, "flips", "tokens of those that exact would not give", "flips"),
    ):  # fmt: skip
        made = family(f"impress_guard_{name}", help_text, labels=labels)
        for ledger in ledgers:
            value = float(ledger["state"] == "trusted") if key == "trusted" else ledger[key]
            made.add_metric([ledger["namespace"][:16], ledger["policy"]], value)
        yield made


_COUNTERS = (
    ("impress_lookups", "lookups", "lookups", ""),
    ("impress_hits", "leases that found at least a window", "hits", ""),
    ("impress_misses", "leases that found nothing", "misses", "reason"),
    ("impress_hit_tokens", "tokens found by leases", "hit_tokens", ""),
    ("impress_lost", "reads that were lost", "lost", "reason"),
    ("impress_read_bytes", "bytes given to requests", "read_bytes", "tier"),
    ("impress_shared_bytes", "of ssd's, out of reads under way for others", "shared_bytes", ""),
    ("impress_expired_leases", "leases taken back, never released", "expired_leases", ""),
    ("impress_ahead_bytes", "bytes read ahead on a guess", "ahead_bytes", ""),
    ("impress_ahead_used_bytes", "of these, bytes that were wanted", "ahead_used_bytes", ""),
    ("impress_stored_tokens", "tokens made READY", "stored_tokens", ""),
    ("impress_stored_bytes", "bytes made READY", "stored_bytes", ""),
    ("impress_refused", "stores refused", "refused", "reason"),
    ("impress_evicted_spans", "spans evicted from home", "evicted_spans", ""),
    ("impress_quarantined_spans", "spans that did not read back", "quarantined_spans", ""),
    ("impress_damaged_spans", "index values passed over at open", "damaged_spans", ""),
    ("impress_rows", "rows that requests wanted, by where they were", "rows_from", "tier"),
    ("impress_chunks", "chunks those rows were in, by where they were", "chunks_from", "tier"),
    ("impress_promotion_read_bytes", "bytes read to promote", "promotion_read_bytes", "tier"),
    ("impress_promoted_bytes", "bytes copied to a faster tier", "promoted_bytes", "tier"),
)
