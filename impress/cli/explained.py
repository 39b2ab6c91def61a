"""What `impress explain` prints: matches and requests, for people to read."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from impress.terminal import count, literal, number, out, share, show, size, table_of

#: Namespaces besides the first that get a line each; --json has all.
MOST_OTHERS = 5
#: Nodes of a match that get a row each.
MOST_NODES = 40


def print_match(found: dict[str, Any]) -> None:
    """The prompt against the store: the best namespace in full, the others in a line each."""
    out.print(found["store"], style="bold", markup=False, soft_wrap=True)
    tail = f" and {found['tail_tokens']} more" if found["tail_tokens"] else ""
    say(
        f"the prompt: {found['tokens']:,} tokens, {count(found['windows'], 'window')} of "
        f"{found['window']}{tail}; its file was read as {found['read_as']}"
    )
    if found["mismatch"]:
        say(f"[bold]never a hit[/bold]: {literal(found['mismatch'])}; use another directory")
    say_damaged(found)
    say_unread(found)
    if found["being_written"]:
        say(
            "a process writes to the store: its leases and scores are as last saved, and what it "
            "evicted of a span that lives on counts as stored"
        )
    if not found["found"]:
        say("[bold]miss[/bold]: the store is empty")
        return
    first, *others = found["found"]
    _print_root(first, found)
    _print_others(first, others)


def say_unread(found: dict[str, Any]) -> None:
    """Say so where a shard cannot be read, or not all of it."""
    if found["failed_shards"]:
        names = ", ".join(found["failed_shards"])
        say(
            f"[bold]only a part is looked at[/bold]: shard {literal(names)} cannot be read, or not "
            "all of it (impress verify says why), and what cannot counts as not stored here"
        )


def say_damaged(found: dict[str, Any]) -> None:
    """Say so where an index value could not be read, so that what it stands for is missing."""
    if found["damaged_index_values"]:
        n = count(found["damaged_index_values"], "damaged index value")
        say(f"[bold]passed over {n}[/bold]: impress verify lists them")


def say(line: str) -> None:
    """A line of text, wrapped by the terminal and not by a guess at its width."""
    out.print(line, soft_wrap=True)


def _print_root(row: dict[str, Any], found: dict[str, Any]) -> None:
    whose = f" (this model's, loaded in {found['assumed']['dtype']})" if row["yours"] else ""
    if [other["name"] for other in found["found"]].count(row["name"]) > 1:  # tenants of a model
        whose = f" {row['root'][:12]}{whose}"
    verdict = "hit" if row["windows"] else "miss"
    say(
        f"\n[bold]{verdict}[/bold]: {row['windows']:,} of {found['windows']:,} windows, "
        f"{row['tokens']:,} tokens ({share(row['tokens'], found['tokens'])}), "
        f"under {literal(row['name'])}{whose}"
    )
    _print_stop(row["stop"], found["window"])
    if row["yours"] and not row["windows"] and len(found["found"]) > 1:
        files = ""
        if "request" not in found:
            files = "; and so has what is stored of it where Transformers loads other tensors than "
            files += "its files have (--query TEXT loads it, and tells)"
        say(
            "looked for as the Transformers engine stores it, for no tenant and without a tenant "
            "secret: what vLLM or cross_engine, a tenant or a server with a secret stored of this "
            f"model has other keys{files}"
        )
    _print_guard(row["guard"])
    if not row["held"]:
        return
    show(_nodes(row["held"]))
    left = len(row["held"]) - MOST_NODES
    if left > 0:
        say(f"… and {left:,} more: --json lists all")
    say(
        f"\nchunks: ssd {row['chunks']:,} of {row['chunks']:,}; copies in dram and hbm belong to "
        "the process that serves"
    )
    cost = row["cost"]
    say(
        f"reading all of it from ssd: {size(cost['bytes'])} in "
        f"{count(cost['requests'], 'request')}, "
        f"about {cost['ms_cold']:,.1f} ms cold (modelled: {cost['modelled']})"
    )


def _print_stop(stop: dict[str, Any], window: int) -> None:
    if "window" not in stop:
        say(stop["why"])
        return
    at = stop["window"] * window
    say(f"window {stop['window']} (tokens {at}–{at + window - 1}): {literal(stop['why'])}")
    near = stop.get("nearest")
    if near is not None:
        ways = f", of {near['ways']} that go on from there" if near["ways"] > 1 else ""
        say(
            f"nearest: a stored prompt of {near['tokens']:,} tokens in span {near['span']}, "
            f"{count(near['leases'], 'lease')}{ways}"
        )


def _print_guard(ledgers: list[dict[str, Any]]) -> None:
    """One line for each policy that was ever guarded in the namespace, by these RULES."""
    if not ledgers:
        say("guard: –")
    for ledger in ledgers:
        reruns = ledger["reruns"]
        again = (
            f"; of {reruns:,} run again exactly, {ledger['flips']:,} of {ledger['compared']:,} "
            f"tokens would be others, first token's KL at most {ledger['worst_kl']:.2g} nats"
            if reruns
            else ""
        )
        say(
            f"guard: {literal(ledger['policy'])} is {literal(ledger['said'])}; of "
            f"{ledger['shadows']:,} shadows {ledger['exceeded']:,} missed more than "
            f"{ledger['most_mass']:.2g}, the worst {ledger['worst_missing_mass']:.2g}; sent back "
            f"{ledger['sent_back']:,} times{again}"
        )


def _nodes(held: list[dict[str, Any]]) -> Table:
    made = table_of(
        "", "windows", ">span", ">leases", "last lease", ">score", ">important", ">K and V",
        "records",
    )  # fmt: skip
    for row in held[:MOST_NODES]:
        first, last = row["first_window"], row["first_window"] + row["n_windows"] - 1
        ago = row["leases_ago"]
        since = (
            "never" if ago is None else "the latest" if not ago else f"{count(ago, 'lease')} ago"
        )
        probes = ", ".join(f"{name} {size(n)}" for name, n in row["probes"].items())
        made.add_row(
            f"{first}–{last}", str(row["span"]), f"{row['leases']:,}", since,
            number(row["score"], ".2f"), number(row["important_share"], ".0%"), size(row["bytes"]),
            literal(probes) or "none",
        )  # fmt: skip
    return made


def _print_others(first: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """Other trees that hold some of the prompt; they never serve a request to the first."""
    some = [row for row in others if row["windows"]]
    for row in some[:MOST_OTHERS]:
        tenant = row["namespace"] == first["namespace"]
        what = (
            "another tenant or key secret (which, cannot be told)"
            if tenant
            else "another namespace"
        )
        say(
            f"{what}, {literal(row['name'])} {row['root'][:12]}: "
            f"{count(row['windows'], 'window')}, {row['tokens']:,} tokens"
        )
    if len(some) > MOST_OTHERS:
        say(f"… and {len(some) - MOST_OTHERS:,} more: --json lists all")
    if some:
        say("KV of one namespace or tenant never serves another")
    if others and first["yours"] is None:
        say("which namespace a request asks in depends on its model: --model DIR tells")


# ---- a request ---------------------------------------------------------------------------------


def print_request(found: dict[str, Any]) -> None:
    """One row per layer, totals, and why the request went as it did."""
    request, held = found["request"], found["found"][0]["held"]
    say(f"\n[bold]the request[/bold] under {request['policy']}: {literal(request['why'])}")
    if request["lost"]:
        say(f"the prefix was lost while it was read: {literal(request['lost'])}; computed instead")
    lines = request["per_layer"]
    if not lines:
        say(f"TTFT {request['ttft_ms']:,.1f} ms, nothing read")
        return
    if request["mode"] == "sparse" and not all(request["probe"] in row["probes"] for row in held):
        say(f"stored without {request['probe']} records: made from its keys, all of them read")
    show(_layers(lines, request["hit_tokens"]))
    rows = _by_tier(request["rows_by_tier"], "{:,}".format)
    moved = _by_tier(request["bytes_by_tier"], size)
    say(
        f"\nall: {request['chosen_rows_share']:.0%} of {request['hit_tokens']:,} tokens' rows "
        f"({rows}) · {request['bytes_share']:.0%} of exact's bytes wanted with probe records, "
        f"{request['transferred_share']:.0%} moved ({moved})"
    )
    say(
        f"waited {sum(line['wait_ms'] for line in lines):,.1f} ms · TTFT "
        f"{request['ttft_ms']:,.1f} ms · estimated missing mass at most "
        f"{number(request['estimated_missing_mass'])}, worst head "
        f"{number(request['missing_mass_worst_head'])} · {request['fallback_share']:.0%} of the "
        "layers fell back"
    )


def _layers(lines: list[dict[str, Any]], n_tokens: int) -> Table:
    made = table_of(
        "", ">layer", ">rows", f">of {n_tokens:,}", "reason", ">agreement", ">missing",
        ">worst head", "rows by tier", "bytes by tier", ">wait ms",
    )  # fmt: skip
    for line in lines:
        chosen = line.get("chosen", n_tokens)  # exact reports no choice
        made.add_row(
            str(line["layer"]), f"{chosen:,}", share(chosen, n_tokens),
            line.get("reason", "exact"), number(line.get("agreement")),
            number(line.get("estimated_missing_mass")), number(line.get("missing_mass_worst_head")),
            _by_tier(line["rows"], "{:,}".format), _by_tier(line["bytes"], size),
            f"{line['wait_ms']:.2f}",
        )  # fmt: skip
    return made


def _by_tier(counts: dict[str, int], form: Any) -> str:
    return ", ".join(f"{tier} {form(n)}" for tier, n in counts.items()) or "–"
