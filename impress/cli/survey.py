"""What `impress inspect` shows, as plain data: gathered here, drawn in inspect.py."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from impress.blockhash import Tokens, as_tokens, is_name, key_after, labels_of
from impress.cli.options import text_of
from impress.config import Config
from impress.errors import BadInput, FormatError
from impress.spans.format import VERSION
from impress.store import PrefixStore
from impress.upkeep.shares import Share, shares_of
from impress.write.directory import Identity, Shard, read_identity, shards_of
from impress.write.env import NothingYet
from impress.write.strays import said_of_strays, strays_of

HOTTEST: Final = 5


def open_for_reading(path: Path) -> tuple[PrefixStore, Identity]:
    """A snapshot of any store, whichever model it is for. Holds up no writer.

    A shard that cannot be read is tried twice, since its index may just be in the making, and then
    left out; `store.left_out()` and the log name it.
    """
    identity = read_identity(path)
    config = Config(window=identity.window, dram_bytes=0, io_threads=1, follow_every_s=0)
    try:
        store = PrefixStore.open(path, identity.geometry, b"inspect", config, mode="r")
    except NothingYet as err:
        for said in said_of_strays(path):
            raise FormatError(f"{err}; {said}") from None
        raise
    except FormatError as err:
        raise FormatError(f"{err} (impress verify says what else)") from None
    if store.left_out():
        store.follow()
    store.absent()  # no rows are read: a full store's writers need not wait for this reader
    return store, identity


def unread(store: PrefixStore) -> list[str]:
    """Shards that are not seen in full: unreadable, not to be listed, renamed or copied."""
    names = [*store.left_out(), *strays_of(store.path)]
    return names + [s.name for s in shards_of(store.path) if s.name not in names and _is_strange(s)]


def _is_strange(shard: Shard) -> bool:
    try:
        return bool(shard.n_misnamed())
    except OSError:
        return True


def survey(store: PrefixStore, identity: Identity) -> dict[str, Any]:
    """Identity, occupancy, spans, namespaces, hottest prefixes. Ready for JSON."""
    shares = shares_of(store.path, store.catalog)
    if any(share.missing for share in shares):  # a writer may have evicted it meanwhile
        store.follow()
        shares = shares_of(store.path, store.catalog)
    counts = store.catalog.counts()
    g = identity.geometry
    return {
        "store": str(store.path),
        "format": identity.format,
        "reads_formats_up_to": VERSION,
        "window": identity.window,
        "geometry": {
            "n_layers": g.n_layers, "n_heads": g.n_heads, "n_kv_heads": g.n_kv_heads,
            "head_dim": g.head_dim, "v_head_dim": g.v_dim, "dtype": g.dtype,
            "token_bytes": g.token_bytes,
        },
        "shards": [asdict(share) for share in shares],
        "failed_shards": unread(store),
        "damaged_index_values": store.counters["damaged_spans"],
        "tiers": {"hbm": None, "dram": None, "ssd": _ssd(store, shares)},
        "spans": counts["spans"],
        "nodes": counts["nodes"],
        "windows": counts["windows"],
        "tokens": counts["windows"] * identity.window,
        "namespaces": _namespaces(store),
        "hottest": _hottest(store),
    }  # fmt: skip


def called(namespace: bytes, name: str) -> str:
    """What a namespace is shown as, and purged by: one that an engine derives from the model has no
    name, and one that was cut off in a header, or damaged in an index, is not its own. Pure."""
    return name if is_name(name, namespace) else f"model {namespace.hex()[:12]}"


def known_of(store: PrefixStore, span: int) -> tuple[float | None, float | None]:
    """(mean score of a span's chunks, share of its rows that mattered); None: not known yet.

    A chunk's score, by which caches decide, is uses × share of rows that requests needed; the share
    returned here is of the rows they chose, and needs a sparse request.
    """
    found = store.history.summary(span)
    if found is None:
        return None, None
    score, important = found
    return score, None if math.isnan(important) else important


def _ssd(store: PrefixStore, shares: Sequence[Share]) -> dict[str, Any]:
    """Bytes of the segments; what spans own is used. A writer's unfinished stores count as free.

    `missing`: bytes that spans own but no segment has. `dead_bytes`: of windows that another span
    has too, or that were evicted; `behind_bytes`: of spans behind windows that are not stored, or
    cannot be read. Shards that cannot be read do not count.
    """
    left_out = unread(store)
    shares = [share for share in shares if share.name not in left_out]
    total, used = sum(share.total for share in shares), sum(share.used for share in shares)
    missing, repeated = sum(s.missing for s in shares), sum(s.repeated for s in shares)
    runs = [(record.span_id, record.n_windows) for record in store.catalog.records()]
    n_windows = store.catalog.counts()["windows"]
    return {
        "total": total, "used": used, "free": max(0, total - (used - missing)),
        "missing": missing,
        "dead_bytes": sum(dead.n_bytes for dead in store.catalog.dead()) + repeated,
        "behind_bytes": sum(share.behind for share in shares),
        "chunks": n_windows * store.geometry.n_layers,
        "important_share": mean_known(store, runs)[1],
    }  # fmt: skip


def _namespaces(store: PrefixStore) -> list[dict[str, Any]]:
    """One row per root, which is a namespace and a tenant; the most stored first."""
    names = store.names()
    dead = {dead.span: dead.n_dead for dead in store.catalog.dead()}
    rows: dict[bytes, dict[str, Any]] = {}
    for record in store.catalog.records():
        new = {
            "root": record.root.hex(), "namespace": record.namespace.hex(),
            "name": called(record.namespace, names.get(record.root, "")),
            "spans": 0, "tokens": 0, "bytes": 0,
        }  # fmt: skip
        row = rows.setdefault(record.root, new)
        row["spans"] += 1
        row["tokens"] += (record.n_windows - dead.get(record.span_id, 0)) * record.window
        row["bytes"] += record.owned_bytes
    return sorted(rows.values(), key=lambda row: -int(row["tokens"]))


def _hottest(store: PrefixStore) -> list[dict[str, Any]]:
    """Whole prompts, most leased first. `key` is that of the last window: it names the prompt."""
    rows = []
    for p in store.catalog.hottest(HOTTEST):
        steps = store.catalog.traces([p.root], p.labels)[p.root].steps
        runs = [(step.view.span, step.view.n_windows) for step in steps]
        score, important = mean_known(store, runs)
        rows.append({
            "tokens": p.n_windows * store.window, "leases": p.hits, "score": score,
            "important_share": important, "chunks": p.n_windows * store.geometry.n_layers,
            "root": p.root.hex(), "key": key_after(p.root, p.labels, store.window).hex(),
        })  # fmt: skip
    return rows


def mean_known(
    store: PrefixStore, runs: Iterable[tuple[int, int]]
) -> tuple[float | None, float | None]:
    """`known_of` for the (span, windows) of a prefix: means over the windows with a known value."""
    sums, weights = [0.0, 0.0], [0, 0]
    for span, n_windows in runs:
        for i, value in enumerate(known_of(store, span)):
            if value is not None:
                sums[i] += value * n_windows
                weights[i] += n_windows
    score, important = (s / w if w else None for s, w in zip(sums, weights, strict=True))
    return score, important


def tree_of(store: PrefixStore) -> list[dict[str, Any]]:
    """Every node, parents before children: its depth, its windows in the prompt, where they lie."""
    rows = []
    for depth, view, root, n_windows, hits in store.catalog.walk():
        rows.append(
            {
                "depth": depth,
                "root": root.hex(),
                "first_window": n_windows - view.n_windows,
                "n_windows": view.n_windows,
                "tokens": view.n_windows * store.window,
                "span": view.span,
                "span_first_window": view.first,
                "leases": hits,
            }
        )
    return rows


def stored_prefixes(store: PrefixStore, tokens: Tokens) -> list[dict[str, Any]]:
    """How much of a prompt is stored, in each namespace that has any of it, longest first."""
    labels = labels_of(tokens, store.window)
    names = store.names()
    found = []
    for root, namespace in {(r.root, r.namespace) for r in store.catalog.records()}:
        held = store.catalog.hold(root, labels, count=False)
        store.catalog.release([*held])
        at, spans = 0, []
        for h in held:
            spans.append({
                "span": h.record.span_id, "first_window": at, "n_windows": h.count,
                "span_first_window": h.first,
            })  # fmt: skip
            at += h.count
        if held:
            found.append({
                "root": root.hex(), "namespace": namespace.hex(),
                "name": called(namespace, names.get(root, "")),
                "tokens": at * store.window, "spans": spans,
            })  # fmt: skip
    return sorted(found, key=lambda row: (-int(row["tokens"]), row["root"]))


def read_token_file(path: Path) -> Tokens:
    """Token ids from a file: a JSON list, integers separated by white space, or .npy."""
    try:
        is_array = path.suffix == ".npy"  # some editors begin a text with a mark
        found = _array(path) if is_array else text_of(path).removeprefix("\ufeff")
    except ValueError as err:
        raise BadInput(f"{path}: not token ids: {err}") from None
    return tokens_in(found, path)


def tokens_in(found: Any, path: Path) -> Tokens:
    """Token ids from a file's text or array. Raises BadInput, which names the file. Pure."""
    try:
        ids = _ids(found) if isinstance(found, str) else found
    except ValueError as err:
        raise BadInput(f"{path}: not token ids: {err}") from None
    odd = [each for each in ids if type(each) is not int] if isinstance(ids, list) else []
    if odd:  # NumPy takes true for 1
        raise BadInput(f"{path}: not token ids: {repr(odd[0])[:80]}")
    try:
        return as_tokens(ids)
    except BadInput as err:
        raise BadInput(f"{path}: {err}") from None


def _ids(text: str) -> Any:
    if not text.strip():
        raise ValueError("empty")
    return from_json(text) if text.lstrip().startswith("[") else _integers(text)


def from_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError if it is not JSON, or nested too deep to read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _array(path: Path) -> Any:
    """Raises OSError, and ValueError for all else NumPy raises: it parses a header as Python."""
    with path.open("rb") as file:
        if file.read(6) != b"\x93NUMPY":
            raise ValueError("no .npy array")
    try:
        return np.load(path, allow_pickle=False)
    except OSError:
        raise
    except Exception as err:  # TokenError, MemoryError, OverflowError …
        raise ValueError(f"no .npy array that can be read: {err}") from None


def _integers(text: str) -> Sequence[int]:
    numbers: list[int] = []
    for word in text.split():
        try:
            numbers.append(int(word))
        except ValueError:  # or of thousands of digits
            raise ValueError(f"{word[:20]!r} is no number") from None
    return numbers
