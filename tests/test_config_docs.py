"""docs/CONFIG.md is written by hand; its names, types and defaults are checked here."""

from __future__ import annotations

import itertools
import json
import re
import typing
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import MIB, assert_serves, prompt, put_prompt
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import impress
import impress.cli.live
from impress.stats import BUCKETS_MS, REASONS, _Collector
from tiers.ssd import SsdTier
from tiers.ticket import Ticket

PAGE = (Path(__file__).parent.parent / "docs" / "CONFIG.md").read_text()
FIELDS = impress.Config.model_fields
TOML = {int: "integer", float: "number", bool: "boolean", str: "text", tuple: "list of text"}


def rows(title: str) -> list[list[str]]:
    """Cells of every table row under a heading of the second level, column titles left out."""
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    tables = re.findall(r"^\|.*\n\|(?:---\|)+\n((?:\|.*\n)+)", section, re.MULTILINE)
    lines = "".join(tables).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def type_of(name: str) -> str:
    """The type as the page says it."""
    kind = FIELDS[name].annotation
    args = [type(arg) if isinstance(arg, str) else arg for arg in typing.get_args(kind)]
    return next(TOML[k] for k in (kind, typing.get_origin(kind), *args) if k in TOML)


def said(name: str, default: object) -> str:
    """A default as the page says it."""
    if default is None or default == ():
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int) and default and name.endswith(("_bytes", "_bytes_per_s")):
        return f"{default // MIB} MiB" if default >= MIB else f"{default >> 10} KiB"
    return f"{default:g}" if isinstance(default, int | float) else str(default)


def test_every_setting_is_on_the_page_with_its_type_and_default() -> None:
    table = {row[0].strip("`"): row[1:] for row in rows("Settings")}
    assert sorted(table) == sorted(FIELDS)
    for name, (kind, default, meaning) in table.items():
        assert (kind, default) == (type_of(name), said(name, FIELDS[name].default)), name
        for choice in typing.get_args(FIELDS[name].annotation):
            assert not isinstance(choice, str) or f"`{choice}`" in meaning, (name, choice)


def test_the_example_file_is_one(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "impress.toml").write_text(example)
    assert impress.Config.load(tmp_path / "impress.toml") != impress.Config()


def test_sizes_of_models_on_the_page_are_right() -> None:
    table = rows("Sizing")
    assert len(table) >= 4
    for _, layers, heads, dim, size, tokens in table:
        n_bytes = impress.Geometry(int(layers), int(heads), int(heads), int(dim)).token_bytes
        assert size == f"{n_bytes // 1024} KiB" and n_bytes % 1024 == 0
        assert tokens.replace(",", "") == str((100 << 30) // n_bytes)


def test_every_metric_is_on_the_page_with_its_kind(
    open_store: Callable[..., impress.PrefixStore], geometry: impress.Geometry
) -> None:
    store = open_store(geometry, metrics_port=0, daily_write_bytes=MIB)
    with urllib.request.urlopen(f"http://127.0.0.1:{store.metrics_port}") as answer:
        served = re.findall(r"^# TYPE (\w+) (\w+)$", answer.read().decode(), re.MULTILINE)
    assert sorted((row[0].strip("`"), row[1]) for row in rows("Metrics")) == sorted(served)


def test_every_reason_on_the_page_is_served_before_it_is_counted(
    open_store: Callable[..., impress.PrefixStore], geometry: impress.Geometry
) -> None:
    """A series that begins at 1 has not grown: the first bad checksum raised no alert."""
    store = open_store(geometry, metrics_port=0)
    with urllib.request.urlopen(f"http://127.0.0.1:{store.metrics_port}") as answer:
        text = answer.read().decode()
    for name in ("misses", "lost", "refused"):
        served = re.findall(rf'^impress_{name}_total{{reason="(.*)"}} 0.0$', text, re.MULTILINE)
        ((*_, meaning),) = [row for row in rows("Metrics") if f"impress_{name}_" in row[0]]
        named = re.findall(r"`([\w-]+)`", meaning.partition(". ")[0])
        assert [word for word in named if word != "segment_bytes"] == served, name


UUID = bytes(range(16))
TIERS = ("hbm", "dram", "ssd")


def key_of(metric: str) -> str:
    """Its key in stats(), as the page has it: some have another name or lie deeper there."""
    key = metric.strip("`").removeprefix("impress_").removesuffix("_total")
    return {"rows": "rows_from", "chunks": "chunks_from"}.get(key, key)


def numbered() -> dict[str, Any]:
    """A stats() in which no two numbers are alike: the histogram's count is that of all buckets."""
    numbers = itertools.count(11)
    stats: dict[str, Any] = {
        "tiers": {
            tier: {name: next(numbers) for name in ("total", "used", "free", "important_share")}
            for tier in TIERS
        },
        "chunks": {tier: next(numbers) for tier in TIERS},
        "emulated": ["hbm"],
        "load_latency": {
            "le_ms": {bound: next(numbers) for bound in (*map(str, BUCKETS_MS), "+Inf")},
            "sum_ms": next(numbers),
        },
        "guard": [{"namespace": name, "policy": f"of {name}"} for name in ("one", "two")],
    }
    stats["load_latency"]["count"] = stats["load_latency"]["le_ms"]["+Inf"]
    stats["guard"][0]["state"], stats["guard"][1]["state"] = "learning", "trusted"
    for metric, _, labels, _ in rows("Metrics"):
        key = key_of(metric)
        if labels == "namespace, policy":
            for ledger in stats["guard"]:
                ledger[key.removeprefix("guard_")] = next(numbers)
        elif labels in ("reason", "tier") and not key.startswith("tier_"):
            stats[key] = {label: next(numbers) for label in REASONS.get(key, TIERS)}
        elif not labels:
            stats[key] = next(numbers)
    stats["ssd_read_only"] = "the disk is full"
    return stats


def samples_of(metric: str, stats: dict[str, Any]) -> dict[str, dict[tuple[str, ...], float]]:
    """What a row of the page promises of stats(): values by labels, by the name of a sample."""
    name, key = metric.strip("`"), key_of(metric)
    what = key.removeprefix("guard_").removeprefix("tier_").removesuffix("_bytes")
    if key == "store_info":
        values = {(UUID.hex(),): 1}
    elif key == "ssd_read_only":
        values = {(): 1}
    elif key == "layer_load_seconds":
        load = stats["load_latency"]
        bounds = {b if b == "+Inf" else str(float(b) / 1e3): n for b, n in load["le_ms"].items()}
        return {
            f"{name}_bucket": {(bound,): n for bound, n in bounds.items()},
            f"{name}_count": {(): load["count"]},
            f"{name}_sum": {(): load["sum_ms"] / 1e3},
        }
    elif key.startswith("guard_"):
        values = {
            (one["namespace"], one["policy"]): one["state"] == "trusted"
            if what == "trusted"
            else one[what]
            for one in stats["guard"]
        }
    elif key == "tier_emulated":
        values = {(tier,): tier in stats["emulated"] for tier in TIERS}
    elif key.startswith("tier_"):
        values = {
            (tier,): stats["chunks"][tier] if what == "chunks" else use[what]
            for tier, use in stats["tiers"].items()
        }
    elif isinstance(stats[key], dict):
        values = {(label,): n for label, n in stats[key].items()}
    else:
        values = {(): stats[key]}
    return {name: values}


def scraped(stats: dict[str, Any]) -> str:
    registry = CollectorRegistry()
    registry.register(_Collector(lambda: stats, UUID))
    return generate_latest(registry).decode()


def test_every_metric_on_the_page_has_the_number_of_its_own_key() -> None:
    """Only names and kinds were compared: two counters could tell each other's numbers."""
    stats, promised, found = numbered(), {}, {}
    for metric, *_ in rows("Metrics"):
        promised.update(samples_of(metric, stats))
    for family in text_string_to_metric_families(scraped(stats)):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    assert found == promised


def test_what_inspect_shows_of_a_running_process_is_its_own_key_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats = numbered()
    monkeypatch.setattr(impress.cli.live, "_scrape", lambda port: scraped(stats))
    live = impress.cli.live.live_counters(9400, UUID)
    load, tiers = stats["load_latency"], live.pop("tiers")
    assert live.pop("layer_loads") == load["count"]
    assert live.pop("layer_load_ms") == pytest.approx(load["sum_ms"] / load["count"])
    assert live.pop("ssd_read_only") == 1
    assert live == {name: stats[key_of(name)] for name in live} and len(live) > 15
    for tier, use in stats["tiers"].items():
        also = {"chunks": stats["chunks"][tier], "emulated": tier in stats["emulated"]}
        assert tiers[tier] == {**use, **also}


def test_every_number_of_stats_is_on_the_page(
    open_store: Callable[..., impress.PrefixStore], geometry: impress.Geometry
) -> None:
    """The page said "the same numbers and more", and named none of the more."""
    store = open_store(geometry)
    put_prompt(store, prompt(128)).wait(60)
    assert_serves(store, prompt(128), 128)
    store.repack()
    keys = set(json.loads(json.dumps(store.stats())))
    metrics = {row[0].strip("`").removeprefix("impress_") for row in rows("Metrics")}
    served = {name.removesuffix("_total") for name in metrics}
    alone = {key for row in rows("More in stats") for key in re.findall(r"`(\w+)`", row[0])}
    assert keys - served <= alone <= keys


def test_every_call_of_a_store_is_on_the_page() -> None:
    public = {name: what for name, what in vars(impress.PrefixStore).items() if name[0] != "_"}
    calls = [n for n, what in public.items() if callable(what) or isinstance(what, classmethod)]
    assert sorted(row[0].strip("`") for row in rows("Calls of a store")) == sorted(calls)


def test_the_loggers_on_the_page_are_the_disks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (line,) = re.findall(r"^- \*\*The log\*\*.*", PAGE, re.MULTILINE)
    with closing(SsdTier(tmp_path, MIB, None)) as tier:
        tier.reserve(MIB)
    SsdTier(tmp_path, MIB, None, number=1).close()  # to it, the file is another folder's
    Ticket(0).then(lambda: 1 / 0)
    said = {record.name for record in caplog.records}
    assert said == set(re.findall(r"`(impress\.\w+)`", line)) and len(said) == 2


@pytest.mark.parametrize("page", ["README.md", "docs/VLLM.md"])
def test_the_page_is_linked(page: str) -> None:
    assert "CONFIG.md)" in (Path(__file__).parent.parent / page).read_text()
