"""`impress inspect`: what a store holds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.tree import Tree

from impress.cli.explained import say_damaged, say_unread
from impress.cli.live import live_counters
from impress.cli.options import Json, Store, a_prompt, print_json, store_dir
from impress.cli.survey import (
    open_for_reading,
    read_token_file,
    stored_prefixes,
    survey,
    tree_of,
)
from impress.errors import BadInput
from impress.terminal import count, cut, literal, number, out, say_cut, share, show, size, table_of


def inspect(
    store: Store = None,
    tree: Annotated[
        bool, typer.Option("--tree", help="Draw the radix tree: windows, tokens, spans, leases.")
    ] = False,
    prefix: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=a_prompt,
            help="How much of this prompt is stored, and in which spans. FILE holds token ids: "
            "a JSON list, integers separated by white space, or a .npy array; - is stdin.",
        ),
    ] = None,
    metrics: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", min=1, max=65535,
            help="Also ask the process that serves this store's metrics (Config.metrics_port) "
            "for its tiers and counters: hits, misses by reason, bytes by tier.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show what a store holds: tiers, spans, namespaces, hottest prefixes.

    Reads a snapshot of the indexes but no rows, needs no model and holds up no writer: it works
    while other processes write to the store, each to its shard. The SSD tier is the directory;
    copies in HBM and DRAM belong to the process that has the store open, so they are shown only
    with --metrics. Leases of a running writer are counted here as it last saved them; where prompts
    share part of a span, the leases of its most used part stand for all of it. "important" is the
    share of a tier's rows that sparse requests chose. A chunk's score is its uses, which fade,
    times that share of its rows; "score" is the mean of the chunks of a prefix's spans, as last
    saved. "–" means that no request has told yet. A partly evicted span of a running writer counts
    as whole.

    **Exit status**

    0 shown · 2 there is no store, or it cannot be read

    **Examples**

    impress inspect

    impress inspect --store demo-out/store --tree

    impress inspect --prefix prompt.json --json | jq '.prefix.stored'
    """
    try:
        tokens = read_token_file(prefix) if prefix is not None else None
    except BadInput as err:
        hint = " (for a text: impress explain --model DIR)" if "not token ids" in str(err) else ""
        raise BadInput(f"--prefix {err}{hint}") from None
    opened, identity = open_for_reading(store_dir(store))
    with opened:
        found = survey(opened, identity)
        if tokens is not None:
            stored = stored_prefixes(opened, tokens)
            found["prefix"] = {"tokens": len(tokens), "stored": stored}
        if tree:
            found["tree"] = tree_of(opened)
    if metrics is not None:
        found["live"] = live_counters(metrics, identity.uuid)
        _take_live_tiers(found)
    if as_json:
        print_json(found)
    else:
        _print(found)


def _take_live_tiers(found: dict[str, Any]) -> None:
    """Fill in the tiers as the running process has them; one it has no budget for stays None.

    It knows only its own shard of the SSD: the directory's bytes and chunks stay.
    """
    running = found["live"]["tiers"]
    for name in ("hbm", "dram"):
        found["tiers"][name] = running.get(name)
    if "important_share" in (own := running.get("ssd", {})):
        found["tiers"]["ssd"]["important_share"] = own["important_share"]


def _print(found: dict[str, Any]) -> None:
    g = found["geometry"]
    heads = f"{g['n_heads']} heads, {g['n_kv_heads']} stored, of {g['head_dim']}"
    out.print(found["store"], style="bold", markup=False, soft_wrap=True)
    out.print(
        f"format {found['format']} · {g['n_layers']} layers · {heads} · {g['dtype']} · "
        f"windows of {found['window']} tokens · {size(g['token_bytes'])} a token"
    )
    out.print(
        f"{found['tokens']:,} tokens in {count(found['spans'], 'span')}, "
        f"{count(found['nodes'], 'tree node')}\n"
    )
    say_damaged(found)
    say_unread(found)
    show(_tiers(found["tiers"], live="live" in found))
    if len(found["shards"]) > 1:
        show(_shards(found["shards"], found["failed_shards"], found["window"]))
    if found["tiers"]["ssd"]["missing"]:
        missing = size(found["tiers"]["ssd"]["missing"])
        out.print(f"{missing} of spans lie in no segment: impress verify says which")
    if found["tiers"]["ssd"]["dead_bytes"]:
        dead = size(found["tiers"]["ssd"]["dead_bytes"])
        whose = "windows that another span has too, or that were evicted"
        frees = (
            "impress repack frees them in spans of which they are more than half, but for those "
            "that another shard has: each keeps its own"
        )
        out.print(f"{dead} on the SSD are of {whose}; {frees}", soft_wrap=True)
    if found["tiers"]["ssd"]["behind_bytes"]:
        behind = size(found["tiers"]["ssd"]["behind_bytes"])
        where = "behind windows that are not stored, or cannot be read, so no prompt finds them"
        out.print(f"{behind} on the SSD lie {where}: impress verify says more", soft_wrap=True)
    if found["namespaces"]:
        show(_namespaces(cut(found["namespaces"])))
        say_cut(len(found["namespaces"]), "roots")
        show(_hottest(found["hottest"]))
    if "live" in found:
        show(_live(found["live"]))
    if "prefix" in found:
        _print_prefix(found["prefix"], _titles(found["namespaces"]))
    if "tree" in found:
        _print_tree(found)


def _tiers(tiers: dict[str, Any], *, live: bool) -> Table:
    """Three rows, however much is known: copies above the SSD belong to the process that serves."""
    table = table_of("Tiers", "tier", ">used", ">free", ">total", ">full", ">chunks", ">important")
    for name, usage in tiers.items():
        if usage is None:
            what = "none configured" if live else "see --metrics"
            table.add_row(name, what, *["–"] * 5)
            continue
        sizes = (size(usage[key]) for key in ("used", "free", "total"))
        there = usage["used"] - usage.get("missing", 0)
        table.add_row(
            f"{name} (emulated)" if usage.get("emulated") else name, *sizes,
            share(there, usage["total"]), number(usage.get("chunks"), ",.0f"),
            number(usage.get("important_share"), ".0%"),
        )  # fmt: skip
    return table


def _shards(rows: list[dict[str, Any]], failed: list[str], window: int) -> Table:
    table = table_of("\nShards", "shard", ">spans", ">tokens", ">used", ">on SSD", "written by",
                     ">readers")  # fmt: skip
    for row in rows:
        writer = "nobody" if row["writer"] is None else f"process {row['writer']}"
        held = f"{row['spans']:,}", f"{row['windows'] * window:,}", size(row["used"])
        if row["name"] in failed and not row["spans"]:
            held = "unreadable", "–", "–"
        table.add_row(row["name"], *held, size(row["total"]), writer, str(row["readers"]))
    return table


def _namespaces(rows: list[dict[str, Any]]) -> Table:
    table = table_of("\nNamespaces", "root", "name", ">spans", ">tokens", ">on SSD")
    for row in rows:
        table.add_row(
            row["root"][:12], literal(row["name"]), f"{row['spans']:,}", f"{row['tokens']:,}",
            size(row["bytes"]),
        )  # fmt: skip
    return table


def _hottest(rows: list[dict[str, Any]]) -> Table:
    table = table_of(
        "\nHottest prefixes", "key", "root", ">tokens", ">leases", ">chunks on SSD", ">score",
        ">important",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row["key"][:12], row["root"][:12], f"{row['tokens']:,}", str(row["leases"]),
            f"{row['chunks']:,}", number(row["score"], ".2f"),
            number(row["important_share"], ".0%"),
        )  # fmt: skip
    return table


def _live(live: dict[str, Any]) -> Table:
    table = table_of("\nThe running process", "counter", "value")
    for name, value in live.items():
        if name != "tiers":
            table.add_row(name.replace("_", " "), _cell(value))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{literal(label)} {n:,}" for label, n in value.items()) or "0"
    return f"{value:.2f}" if isinstance(value, float) else f"{value:,}"


def _titles(rows: list[dict[str, Any]]) -> dict[str, str]:
    """What each root is called; those that share a name (tenants, say) with their digits."""
    n_called = Counter(row["name"] for row in rows)
    return {
        row["root"]: literal(row["name"])
        + (f" {row['root'][:12]}" if n_called[row["name"]] > 1 else "")
        for row in rows
    }


def _print_prefix(prefix: dict[str, Any], titles: dict[str, str]) -> None:
    out.print(f"\n[bold]This prompt[/bold]: {prefix['tokens']:,} tokens")
    if not prefix["stored"]:
        out.print("nothing of it is stored")
    for row in prefix["stored"]:
        part = share(row["tokens"], prefix["tokens"])
        under = f"under {titles[row['root']]}, in"
        out.print(f"{row['tokens']:,} tokens stored ({part}) {under}", soft_wrap=True)
        for held in row["spans"]:
            first, last = held["first_window"], held["first_window"] + held["n_windows"] - 1
            out.print(f"  span {held['span']}: windows {first} to {last}")


def _print_tree(found: dict[str, Any]) -> None:
    """One drawing per root; the rows come parents first."""
    titles = _titles(found["namespaces"])
    drawn: dict[str, list[Tree]] = {}  # root -> the branch last drawn at each depth
    for row in cut(found["tree"]):
        root = row["root"]
        branches = drawn.setdefault(root, [Tree(f"[bold]{titles.get(root, root[:12])} [/bold]")])
        last = row["first_window"] + row["n_windows"] - 1
        branch = branches[row["depth"]].add(
            f"windows {row['first_window']}–{last} · {row['tokens']:,} tokens · "
            f"span {row['span']} · {count(row['leases'], 'lease')}"
        )
        del branches[row["depth"] + 1 :]
        branches.append(branch)
    for branches in drawn.values():
        out.print()
        show(branches[0])
    say_cut(len(found["tree"]), "nodes")
