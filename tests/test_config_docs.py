"""docs/CONFIG.md is written by hand; its names, types and defaults are checked here."""

from __future__ import annotations

import json
import re
import typing
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from conftest import MIB, assert_serves, prompt, put_prompt

import impress
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
