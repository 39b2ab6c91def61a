"""One request on one system: from its tokens to its first token, on one clock.

    lease ─> session ─prefetch─> for each layer: project (device) · retrieve · attend (device)
                                                      └ score (device), inside a choosing session

Reads, lookups, planning, checksums and copies are real. What a device does is emulated by waits
(`clock.py`), or done by one (`cuda.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from experiments.common import Unable
from experiments.systems.catalogue import System
from experiments.systems.clock import PAPER_DISK_GB_S
from experiments.systems.data import PACKED
from experiments.systems.device import Device, Question, Rows, stood_still
from experiments.systems.generate import N_NEW
from experiments.systems.quantised import QuantisedStore
from experiments.systems.shapes import WINDOW
from impress.engines.choice import Choice, Rates
from impress.engines.costs import Span, Stored
from impress.policy import Exact
from impress.read.access import AccessReport
from impress.read.promote import pass_by
from impress.read.session import Lease
from impress.read.sparse import SparseSession
from impress.spans.rows import as_tensor
from impress.store import PrefixStore
from impress.types import Geometry
from tiers.base import Bytes
from tiers.slots import BufferPool, aligned, size_class

Outs = list[tuple[Any, Any]]
#: layer, k, v, positions
Watch = Callable[[int, Any, Any, Any], None]


@dataclass(slots=True)
class Served:
    """What one request took. Seconds of this machine's clock, emulated compute dilated.

    `io_s`: time it stood still for planning, reads and copies, without compute; `compute_s`: time
    it waited for compute; `stated_s`: where that is emulated, the time it was to wait. Bytes as
    moved, rows as used, by tier; `fell_back`: share of layers whose identifier did not decide.
    """

    ttft_s: float
    io_s: float
    compute_s: float
    bytes_by_tier: dict[str, int] = field(default_factory=dict)
    rows_by_tier: dict[str, int] = field(default_factory=dict)
    fell_back: float = 0.0
    rows_share: float = 1.0
    map_s: float = 0.0  # finding where rows lie
    map_cpu_s: float = 0.0  # of that, by the processor's clock
    map_beside_s: float = 0.0  # the same by threads that copy, while the request waits for them
    ahead_bytes: int = 0  # read on a guess
    ahead_used_bytes: int = 0  # and of these, wanted
    mode: str = "exact"
    stated_s: float = 0.0
    began_s: float = 0.0  # by the clock
    dilation: float = 1.0  # of emulated compute, when it was served
    disk_gb_s: float = PAPER_DISK_GB_S  # at the time
    behind_bytes: float = 0.0  # read from the SSD once its first token was out, for the caches


@dataclass(frozen=True, slots=True)
class Asking:
    """A request: a prefix by number, its tokens, and the request's number on it."""

    prefix: int
    tokens: Any
    request: int


class Memory:
    """Memory that systems serving by turns read into: used again, as one alone uses its own again.

    With memory of its own for each, sixteen took more than a machine of 24 GB has: pages that one
    had used were taken for the next, and its reads waited for fresh pages, small ones.
    """

    def __init__(self, prepare: Callable[[Bytes], None] | None = None) -> None:
        """`prepare`: see BufferPool."""
        self._pool = BufferPool(None)
        self._pool.prepare = prepare
        self._prepare = prepare
        self._n_bytes = 0  # of each of `_layers`
        self._layers: list[tuple[Any, Any]] = []

    def lend(self, store: PrefixStore | QuantisedStore) -> None:
        """From now on the store's sessions read into this. None may be open."""
        store._reading = replace(store._reading, buffers=self._pool)
        if isinstance(store, PrefixStore):
            store.buffers = self._pool

    def outs(self, g: Geometry, n_tokens: int) -> Outs:
        """Page-aligned memory for every layer, as an engine has it: used before, in huge pages
        where a pool's is."""
        n_bytes = n_tokens * max(g.k_row_bytes, g.v_row_bytes)
        if n_bytes > self._n_bytes or len(self._layers) < g.n_layers:
            self._n_bytes = size = size_class(n_bytes)
            self._layers = [(aligned(size), aligned(size)) for _ in range(g.n_layers)]
            for buffer in chain(*self._layers):
                buffer.fill(0)  # the first to touch a page waits for it
                if self._prepare is not None:
                    self._prepare(buffer)
        return [
            (as_tensor(k[: n_tokens * g.k_row_bytes], g, n_tokens, g.head_dim),
             as_tensor(v[: n_tokens * g.v_row_bytes], g, n_tokens, g.v_dim))
            for k, v in self._layers[: g.n_layers]
        ]  # fmt: skip


class Server:
    """A system with its open store, ready to serve. One request at a time."""

    def __init__(
        self, system: System, device: Device, geometry: Geometry,
        store: PrefixStore | QuantisedStore | None, memory: Memory | None = None,
    ) -> None:  # fmt: skip
        """`memory`: shared with those it takes turns with; None: its own, and its store's."""
        self.system = system
        self.store = store
        if store is not None and memory is not None:
            memory.lend(store)
        self._memory = Memory() if memory is None else memory
        self._device = device
        self._geometry = geometry
        self._rates: Rates | None = None  # None: it does not choose a mode yet
        self.watch: Watch | None = None  # sees what each layer brought; for tests

    def serve(self, asking: Asking, question: Question | None = None) -> Served:
        """Serve a request to its first token. `question`: what `question_of` gave for it, where
        other requests are served in a row: a device makes it by computing."""
        may_read_all = self.system.auto or isinstance(self.system.policy, Exact)
        outs = None
        if self.store is not None and may_read_all:
            outs = self._memory.outs(self.store.geometry, len(asking.tokens) // WINDOW * WINDOW)
        question = question or self.question_of(asking)
        begin = self._device.start()
        if self.store is None:
            return self._recompute(begin, len(asking.tokens))
        with self._lease(asking) as lease:
            stored = self._stored(lease) if self._rates is not None else None
            choice = self._choice(len(asking.tokens), stored)
            if choice.mode == "recompute":
                served = self._recompute(begin, len(asking.tokens))
                pass_by(lease.reading, lease.sources)
            else:
                question = Question(Exact(), _nothing) if choice.mode == "exact" else question
                served = self._read(begin, lease, choice, question, outs)
        if self._rates is not None and stored is not None:
            self._learn(self._rates, len(asking.tokens), stored, served)
        return served

    def choose_modes(self, n_tokens: int) -> None:
        """Choose modes from now on, where the system does: it knows what the prefixes cost when
        they came. Idempotent."""
        if self.system.auto and self._rates is None:
            self._rates = Rates(by_last_use=self.system.eviction == "lru")
            self._rates.note_forward("recompute", n_tokens, self._device.forward_s(n_tokens))

    @property
    def behind_bytes(self) -> int:
        """Bytes read from the SSD after requests so far, for the caches: chunks of which a request
        had some rows only. Systems that read everything have what they cache in memory by then."""
        if not isinstance(self.store, PrefixStore):
            return 0
        return self.store.counters["promotion_read_bytes/ssd"]

    def settle(self) -> None:
        """Return when the work a request left in the background is done: each finds the machine
        equally quiet."""
        if self.store is not None:
            pool = self.store._pool if isinstance(self.store, PrefixStore) else self.store.pool
            if not pool.idle(60.0):
                raise Unable("what a request left to do behind it did not end in a minute")

    def close(self) -> None:
        if self.store is not None:
            self.store.close()

    # ---- the ways to a first token ---------------------------------------------------------

    def _stored(self, lease: Lease) -> Stored:
        """What the store says of the prefix; for a slice of the layers, scaled to all of them."""
        n, shape = lease.n_tokens, self._device.shape
        cold, cache = (
            n_bytes * shape.n_layers // self._geometry.n_layers
            for n_bytes in (lease.cold_bytes(), lease.cache_bytes())
        )
        spans = tuple(
            Span(span, n_bytes * shape.n_layers // self._geometry.n_layers)
            for span, n_bytes in lease.span_bytes()
        )
        n_bytes = n * shape.row_bytes * shape.n_layers
        return Stored(n, shape.n_layers, n_bytes, cold, spans, cache)

    def _choice(self, n_tokens: int, stored: Stored | None) -> Choice:
        own = "exact" if isinstance(self.system.policy, Exact) else "sparse"
        if self._rates is None or stored is None:
            return Choice(own, f"{own}: the system's own")
        return self._rates.choose(own, n_tokens + N_NEW, stored)

    def _learn(self, rates: Rates, n_tokens: int, stored: Stored, served: Served) -> None:
        """Learn as an engine on the stated machine does, in its seconds; what a slice of the layers
        took is scaled to all of them."""
        times = self._device.shape.n_layers / self._geometry.n_layers / self._device.dilation
        hit = 0 if served.mode == "recompute" else stored.n_tokens
        forward_s = (served.ttft_s - served.io_s) * times
        rates.note_forward(served.mode, n_tokens + N_NEW - hit, forward_s)
        if served.mode != "recompute":
            rates.note_read(served.mode, stored, served.io_s * times)
        rates.note_request(served.mode, served.ttft_s * times)

    def _recompute(self, begin: float, n_tokens: int) -> Served:
        for layer in range(self._geometry.n_layers):
            self._device.forward(layer, n_tokens + N_NEW)
        self._device.finish()
        ttft_s = time.perf_counter() - begin
        spent_s, stated_s = self._device.spent_s, self._device.stated_s
        return Served(ttft_s, 0.0, spent_s, stated_s=stated_s, began_s=begin, mode="recompute")

    def _read(
        self, begin: float, lease: Lease, choice: Choice, question: Question, outs: Outs | None
    ) -> Served:
        device, policy = self._device, question.policy
        is_whole = isinstance(policy, Exact)
        to_place = is_whole and self.system.data in PACKED
        with lease.session(policy, in_order=False) as session:
            if choice.once:
                session.need = "once"
            if isinstance(session, SparseSession):
                session.keys_as_read = True  # the device has them: it scored them
                device.key_rows = lambda: session.key_rows
            waits = time.perf_counter()  # reads of everything are planned and handed over here
            session.prefetch(outs if is_whole else None)
            io_s = time.perf_counter() - waits
            device.beside()
            for layer in range(self._geometry.n_layers):
                device.project(layer)
                waits, spent = time.perf_counter(), device.spent_s
                k, v, positions = session.retrieve(layer, *question.asked(layer))
                io_s += stood_still(device, waits, spent)
                if self.watch is not None:
                    self.watch(layer, chosen_keys(k, v, positions, device.key_rows()), v, positions)
                belong = positions if to_place else None
                chosen = positions if k.shape[1] > v.shape[1] else None
                io_s += device.attend(layer, Rows(k, v, belong, self.system.bits, chosen))
            device.finish()
            ttft_s = time.perf_counter() - begin
            served = _served(ttft_s, io_s, device.spent_s, session.report(), lease.n_tokens)
            served.mode, served.stated_s, served.began_s = choice.mode, device.stated_s, begin
            return served

    def _lease(self, asking: Asking) -> Lease:
        if isinstance(self.store, QuantisedStore):
            return self.store.lease(asking.prefix)
        assert self.store is not None
        lease = self.store.lease(asking.tokens)
        assert lease.n_tokens >= len(asking.tokens) - self.store.window, "a prefix is not stored"
        return lease

    def question_of(self, asking: Asking) -> Question:
        """What the request's layers ask, made off the clock."""
        inner = self.system.policy
        if inner is None or isinstance(inner, Exact):
            return Question(Exact(), _nothing)
        return self._device.question(inner, asking.prefix, asking.request, len(asking.tokens))


def chosen_keys(k: Any, v: Any, positions: Any, rows: Any) -> Any:
    """The keys that belong to the rows of v, where all keys came. `rows`: which row each is."""
    if k.shape[1] == v.shape[1]:
        return k
    positions = positions.to(k.device)
    return k[:, positions] if rows is None else k[:, rows.argsort()[positions]]


def _nothing(_layer: int) -> tuple[None, None, None]:
    """What is asked where all rows come."""
    return None, None, None


def _served(
    ttft_s: float, io_s: float, compute_s: float, report: AccessReport, n_tokens: int
) -> Served:
    lines = report.per_layer
    return Served(
        ttft_s, io_s, compute_s, dict(report.bytes_by_tier), dict(report.rows_by_tier),
        fell_back=sum(bool(line.get("fell_back")) for line in lines) / len(lines),
        rows_share=sum(line.get("chosen", n_tokens) for line in lines) / n_tokens / len(lines),
        map_s=sum(line["map_ms"] for line in lines) / 1e3,
        map_cpu_s=sum(line["map_cpu_ms"] for line in lines) / 1e3,
        map_beside_s=sum(line["map_beside_ms"] for line in lines) / 1e3,
        ahead_bytes=sum(line.get("ahead_bytes", 0) for line in lines),
        ahead_used_bytes=sum(line.get("ahead_used_bytes", 0) for line in lines),
    )  # fmt: skip
