"""The demo's figures for people to read: one table per act. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from impress.demo import CHECKPOINTS
from impress.demo.figures import REUSE_TITLES, Row
from impress.terminal import size

_TASKS: Final = {"rte": "RTE", "copa": "COPA", "diffuse": "diffuse"}
_SHARES: Final = {
    "agreement": "as full\nKV",
    "fallback_share": "layers\nfell back",
    "rows_share": "rows\nchosen",
    "bytes_share": "bytes\nwanted",
    "transferred_share": "bytes\nmoved",
}


def reuse_table(rows: Sequence[Row], figures: Mapping[str, float]) -> Table:
    """The first act: one line for each way of answering."""
    table = _table("Time to the first token (TTFT)")
    for column in ("p50 ms", "p95 ms", "÷ recompute", "answers that agree", "SSD", "DRAM"):
        table.add_column(column, justify="right")
    for mode, title in REUSE_TITLES.items():
        name = f"reuse.{mode}" if mode == "recompute" else mode
        cells = [f"{figures[f'{name}.ttft_ms_{p}']:,.0f}" for p in ("p50", "p95")]
        own = [row for row in rows if row["mode"] == mode]
        if mode == "recompute":
            table.add_row(title, *cells, "1.00", "–", "0 B", "0 B")
            continue
        agree = sum(row["agrees"] for row in own)
        read = [sum(row["bytes"].get(tier, 0) for row in own) for tier in ("ssd", "dram")]
        table.add_row(
            title, *cells, f"{figures[f'{mode}.ttft_ratio']:.2f}", f"{agree} of {len(own)}",
            *map(size, read),
        )  # fmt: skip
    return table


def choice_table(figures: Mapping[str, float], modes: Sequence[str], prefix: str = "") -> Table:
    """A later act: one line for each mode, for each checkpoint and for both. Shares in percent."""
    table = _table("What was answered, and what was read for it (shares in %)")
    titles = (
        "TTFT\np50 ms",
        "\np95 ms",
        "÷ re-\ncompute",
        *(f"right\n{t}" for t in _TASKS.values()),
    )
    for column in (*titles, *_SHARES.values()):
        table.add_column(column, justify="right")
    for checkpoint in (*CHECKPOINTS, ""):
        table.add_row(f"[bold]{checkpoint or 'both'}[/bold]")
        where = f"{checkpoint}." if checkpoint else ""
        for mode in modes:
            named = f"{where}{prefix}{mode}"
            times = [f"{figures[f'{named}.ttft_ms_{p}']:,.0f}" for p in ("p50", "p95")]
            ratio = f"{figures[f'{named}.ttft_ratio']:.2f}"
            right = [figures[f"{where}{task}.{prefix}{mode}.accuracy"] for task in _TASKS]
            shares = [figures.get(f"{named}.{share}") for share in _SHARES]
            table.add_row(f"  {mode}", *times, ratio, *map(_percent, (*right, *shares)))
    return table


def _table(title: str) -> Table:
    table = Table(
        title=f"\n{title}", title_style="bold", title_justify="left", box=SIMPLE_HEAD,
        show_edge=False, pad_edge=False, collapse_padding=True,
    )  # fmt: skip
    table.add_column("", no_wrap=True)
    return table


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"
