"""Counters of a running process, from its store's Prometheus endpoint (Config.metrics_port)."""

from __future__ import annotations

from collections.abc import Iterable
from http.client import HTTPException
from typing import Any, Final
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from impress.errors import StoreFailed, StoreMismatch

_TIMEOUT_S: Final = 5.0
#: Counter families, named as in `store.stats()`.
_COUNTERS: Final = (
    "lookups", "hits", "misses", "hit_tokens", "lost", "read_bytes", "stored_tokens",
    "stored_bytes", "refused", "evicted_spans", "promoted_bytes", "rows", "chunks",
)  # fmt: skip
_GAUGES: Final = (
    "spans", "nodes", "windows", "leases", "oldest_lease_s", "dead_bytes", "limbo_bytes",
    "other_shards", "ssd_read_only",
)  # fmt: skip


def live_counters(port: int, uuid: bytes) -> dict[str, Any]:
    """Counters, occupancy by tier and mean layer load of the process serving 127.0.0.1:port.

    Raises StoreFailed when nothing answers there, or what answers is not a store, StoreMismatch
    when it says that it serves a store other than that of `uuid`.
    """
    from prometheus_client.parser import text_string_to_metric_families

    text = _scrape(port)
    try:
        families = list(text_string_to_metric_families(text))
        return _read(families, port, uuid)
    except (ValueError, OverflowError) as err:  # also from a value that is not a finite number
        raise StoreFailed(f"port {port}: not Prometheus text ({err})") from None
    except KeyError as err:
        raise StoreFailed(
            f"port {port}: whatever answers there is not an impress store (no label {err})"
        ) from None


def _read(families: Iterable[Any], port: int, uuid: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {name: {} for name in (*_COUNTERS, *_GAUGES)}
    tiers: dict[str, dict[str, float]] = {}
    load = {"count": 0.0, "sum": 0.0}
    for sample in (sample for family in families for sample in family.samples):
        if not sample.name.startswith("impress_"):  # another program's
            continue
        name = sample.name.removeprefix("impress_").removesuffix("_total")
        if name.startswith("tier_"):
            state = name.removeprefix("tier_").removesuffix("_bytes")
            value = sample.value if state == "important_share" else int(sample.value)
            tiers.setdefault(sample.labels["tier"], {})[state] = value
        elif name.startswith("layer_load_seconds_") and not sample.labels:
            load[name.rpartition("_")[2]] = sample.value
        elif name == "store_info" and sample.labels["uuid"] != uuid.hex():
            raise StoreMismatch(
                f"port {port}: another store is served there, of uuid {sample.labels['uuid']}; "
                "name that one by --store, or the Config(metrics_port=...) of a process that "
                "serves this one"
            )
        elif name in found:
            label = next(iter(sample.labels.values()), "")
            if label and not sample.value:  # a possible reason that has not occurred
                continue
            found[name][label] = sample.value if name == "oldest_lease_s" else int(sample.value)
    if not tiers:
        raise StoreFailed(f"port {port}: whatever answers there is not an impress store")
    flat = {name: _flat(name, values) for name, values in found.items()}
    mean_ms = 1e3 * load["sum"] / load["count"] if load["count"] else 0.0
    return {**flat, "tiers": tiers, "layer_loads": int(load["count"]), "layer_load_ms": mean_ms}


def _flat(name: str, values: dict[str, Any]) -> Any:
    """A single number where the family has no label."""
    labelled = ("misses", "lost", "read_bytes", "refused", "promoted_bytes", "rows", "chunks")
    return values if name in labelled else values.get("", 0)


def _scrape(port: int) -> str:
    opener = build_opener(ProxyHandler({}))  # this machine's own port: never through a proxy
    try:
        with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=_TIMEOUT_S) as answer:
            text: str = answer.read().decode(errors="replace")
            return text
    except (URLError, OSError) as err:
        reason = getattr(err, "reason", err)
        if isinstance(reason, TimeoutError):  # somebody listens
            raise StoreFailed(
                f"port {port}: no answer within {_TIMEOUT_S:g} s; the process there is too busy, "
                "hangs or serves no metrics"
            ) from None
        raise StoreFailed(
            f"port {port}: nobody serves metrics there ({reason}); "
            "open the store with Config(metrics_port=...)"
        ) from None
    except HTTPException as err:  # another protocol, which may put anything into the error's text
        raise StoreFailed(
            f"port {port}: what answers there is no HTTP that can be read ({type(err).__name__}); "
            "name the port of Config(metrics_port=...)"
        ) from None
