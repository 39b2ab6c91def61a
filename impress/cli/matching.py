"""How a prompt matches a store, as plain data: what is held, where it stops, what reading costs.

Looks at the index and at the header records of the spans that match, but at no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from impress.blockhash import Tokens, key_after, labels_of, namespace_digest, root_key
from impress.cli.survey import called, known_of, unread
from impress.config import Config
from impress.quality.ledgers import decoded
from impress.read.parts import Source, parts_of, source_of
from impress.read.plan import plan_reads, whole
from impress.spans.layout import K, V
from impress.store import PrefixStore
from impress.tree.catalog import Held
from impress.tree.trace import Near, Step, Trace
from impress.upkeep.shares import shares_of
from tiers.coalesce import TURNS, coalesce, slice_bytes, slices
from tiers.errors import ReadFailed

#: The estimate in milliseconds is modelled, for a disk that gives this. docs/BENCHMARKS.md has what
#: one disk gave; measure your own with `python -m experiments.bench_ssd`.
DISK_BYTES_PER_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class Root:
    """Where a tree begins. `mine`: whether it is the model's, None where no model was named."""

    key: bytes
    namespace: bytes
    mine: bool | None


def match_prompt(store: PrefixStore, tokens: Tokens, namespace: bytes | None) -> dict[str, Any]:
    """How much of a prompt each namespace of a store holds, longest first; ready for JSON.

    `namespace`: the model's own, whose tree then comes first whatever it holds.
    """
    labels = labels_of(tokens, store.window)
    names = store.names()
    roots = _roots(store, namespace)
    traces = store.catalog.traces([root.key for root in roots], labels)
    ledgers = decoded(store.saved_ledgers())
    rows = [
        _row(
            store, root, called(root.namespace, names.get(root.key, "")), labels, len(tokens),
            traces[root.key], [one for one in ledgers if one["namespace"] == root.namespace.hex()],
        )
        for root in roots
    ]  # fmt: skip
    rows.sort(
        key=lambda row: (not row["yours"], -row["windows"], -row["nearest_tokens"], row["root"])
    )
    return {
        "tokens": len(tokens),
        "windows": len(tokens) // store.window,
        "tail_tokens": len(tokens) % store.window,
        "damaged_index_values": store.counters["damaged_spans"],
        "failed_shards": unread(store),
        "being_written": any(s.writer is not None for s in shares_of(store.path, store.catalog)),
        "found": rows,
    }


def _roots(store: PrefixStore, namespace: bytes | None) -> list[Root]:
    """Every tree of the store, and the model's own."""
    known = {(r.root, r.namespace) for r in store.catalog.records()}
    if namespace is None:
        return [Root(root, digest, None) for root, digest in known]
    digest = namespace_digest(namespace)
    mine = root_key(digest, store.geometry, store.window, "")
    known.add((mine, digest))
    return [Root(root, of, root == mine) for root, of in known]


def _row(
    store: PrefixStore, root: Root, name: str, labels: bytes, n_tokens: int, trace: Trace,
    ledgers: list[dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """`ledgers`: what the namespace's guard knows, as last saved by the process that serves it."""
    held = store.catalog.hold(root.key, labels, count=False)
    store.catalog.release([*held])
    sources, lost = _sources(store, held)
    # Of several nodes that hold one run of a span, the first, which is leased most often. A run
    # that another process changed since the trace has none.
    steps = {(step.view.span, step.view.first): step for step in trace.steps}
    firsts = [steps.get((source.span, source.held.first)) for source in sources]
    n_windows = sum(source.count for source in sources)
    window = store.window
    stop = _stop(trace, n_tokens, window, lost, sources)
    return {
        "root": root.key.hex(),
        "namespace": root.namespace.hex(),
        "name": name,
        "yours": root.mine,
        "key": key_after(root.key, labels[: n_windows * 4 * window], window).hex(),
        "windows": n_windows,
        "tokens": n_windows * window,
        "nearest_tokens": n_windows * window + (trace.near.same_tokens if trace.near else 0),
        "stop": stop,
        "held": [
            _held(store, source, step, trace.tick)
            for source, step in zip(sources, firsts, strict=True)
        ],
        "guard": ledgers,
        "chunks": n_windows * store.geometry.n_layers,
        "cost": _cost(store, sources),
    }


# ---- where it stops ----------------------------------------------------------------------------


def _stop(
    trace: Trace, n_tokens: int, window: int, lost: dict[str, Any] | None, sources: Sequence[Source]
) -> dict[str, Any]:
    """The first window that does not match, and why: `reason` for programs, `why` for people."""
    n_windows = n_tokens // window
    if lost is not None:
        at = sum(source.count for source in sources)
        return {"reason": "lost", "window": at, "position": at * window, **lost}
    if not n_windows:
        why = f"too short: {n_tokens} tokens, and only whole windows of {window} are stored"
        return {"reason": "too short", "why": why}
    if trace.n_windows == n_windows:
        return {"reason": "end of prompt", "why": _tail(n_tokens, window)}
    found: dict[str, Any] = {"window": trace.n_windows, "position": trace.n_windows * window}
    if trace.near is None:
        why = "the stored prompt ends there" if trace.n_windows else "nothing is stored under it"
        return {"reason": "not stored", "why": why, **found}
    found["position"] += trace.near.same_tokens
    found["nearest"] = {
        "span": trace.near.span,
        "tokens": trace.near.n_windows * window,
        "leases": trace.near.hits,
        "ways": trace.n_ways,
    }
    return {"reason": _differs(trace.near), "why": _said(trace.near, found["position"]), **found}


def _tail(n_tokens: int, window: int) -> str:
    tail = n_tokens % window
    if tail:
        last = f"{tail} tokens are" if tail > 1 else "token is"
        return f"every whole window is stored; the last {last} less than one"
    return "every window is stored (asked for this and no more, an engine computes the last one)"


def _differs(near: Near) -> str:
    return "extra keys" if near.sealed else "other tokens"


def _said(near: Near, position: int) -> str:
    if near.sealed:
        return "what is stored there goes with extra keys (images, embeddings): a digest, no tokens"
    return f"every stored prompt has another token by position {position}"


# ---- what is held ------------------------------------------------------------------------------


def _sources(
    store: PrefixStore, held: Sequence[Held]
) -> tuple[list[Source], dict[str, Any] | None]:
    """Held runs with their headers, as a lease would have them; and why one cannot be read."""
    sources: list[Source] = []
    at = 0
    for h in held:
        span = h.record.span_id
        # Not on this thread: where the disk hangs, or a signal comes, that would wait for ever.
        table = store.tables.of([h.record], store.config.read_timeout_s)[span]
        if isinstance(table, ReadFailed):
            why = f"span {span} does not read back, or was evicted just now: {table}"
            return sources, {"span": span, "why": why}
        sources.append(source_of(h, table, store.geometry, at))
        at += h.count
    return sources, None


def _held(store: PrefixStore, source: Source, step: Step | None, tick: int) -> dict[str, Any]:
    """A run of a span's windows, from one node or several. `leases_ago`: None when never leased.

    Score and share are the whole span's, as last saved by the process that serves it.
    """
    g = store.geometry
    score, important = known_of(store, source.span)
    return {
        "span": source.span,
        "first_window": source.at,
        "n_windows": source.count,
        "span_first_window": source.held.first,
        "leases": step.hits if step else 0,
        "leases_ago": tick - step.used if step and step.hits else None,
        "score": score,
        "important_share": important,
        "packed": source.order is not None,
        "bytes": source.count * g.n_layers * source.layout.chunk_bytes,
        "probes": {
            probe.codec: source.count * g.n_layers * plane.chunk_bytes
            for probe, plane in zip(source.probes, source.layout.planes[V + 1 :], strict=True)
        },
    }


# ---- what it costs -----------------------------------------------------------------------------


def _cost(store: PrefixStore, sources: Sequence[Source]) -> dict[str, Any]:
    """From the SSD alone: the reads of a session that wants rows in order, planned and not made.

    Each request counts as `read_gap_bytes` more bytes, as it does when chosen rows are gathered.
    """
    n_bytes = requests = 0
    defaults = Config()
    for layer in range(store.geometry.n_layers if sources else 0):
        parts = parts_of(sources, layer, None)
        runs = [whole(parts, plane) for plane in (K, V)]
        n_chunks = sum(part.count for part in parts)
        sizes = [n_chunks * sources[0].layout.planes[plane].chunk_bytes for plane in (K, V)]
        dests = [np.broadcast_to(np.uint8(0), n) for n in sizes]  # no memory behind them
        plan = plan_reads(parts, layer, (K, V), runs, (), (), dests)
        layer_bytes = plan.n_bytes["ssd"]
        size = slice_bytes(layer_bytes, defaults.io_threads, turns=TURNS)
        n_bytes += layer_bytes
        for _, reads in plan.home:
            requests += sum(len(coalesce(part)) for part in slices(reads, size))
    counted = n_bytes + requests * defaults.read_gap_bytes
    return {
        "bytes": n_bytes,
        "requests": requests,
        "ms_cold": 1e3 * counted / DISK_BYTES_PER_S,
        "modelled": f"{DISK_BYTES_PER_S / 1e9:g} GB/s, {defaults.read_gap_bytes} bytes a request",
    }
