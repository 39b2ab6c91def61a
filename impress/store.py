"""The store: one directory, its tree, its tiers. The only place that knows both meaning and media.

tokens ─lookup→ windows ─lease→ Session          (session.py: one request's reads)
K, V ─writer→ slots → segments ─commit→ READY → tree   (writer.py, commit.py)
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from impress.admission import Admission
from impress.blockhash import as_tokens, labels_of, namespace_digest, root_key
from impress.catalog import Catalog, Held
from impress.chunks import ChunkCache
from impress.commit import Committer, bury
from impress.config import Config
from impress.directory import Identity, Shard, matching_identity
from impress.errors import BadInput, ConfigError, FormatError, ImpressError, StoreFailed
from impress.format import SpanRecord
from impress.index import Index
from impress.layout import K, SpanLayout, V
from impress.load import Reading
from impress.plan import Source
from impress.rows import check_layers
from impress.session import Lease
from impress.stats import Counters, serve_metrics
from impress.tables import TableCache, Tables
from impress.types import Geometry
from impress.writer import Media, Stored, Writer, importance_of
from tiers.base import Slot
from tiers.errors import MediumError, ReadFailed
from tiers.iopool import IoPool
from tiers.slots import BufferPool
from tiers.ssd import SsdTier

if TYPE_CHECKING:
    from types import TracebackType

log = logging.getLogger("impress")

#: Share of the DRAM budget kept for sums tables (16 bytes a piece: about .2 % of the KV).
SUMS_SHARE = 16
CLOSE_TIMEOUT_S = 150.0


class PrefixStore:
    """Open with `PrefixStore.open`. Thread-safe, except that a Session serves one thread."""

    def __init__(
        self, path: Path, identity: Identity, namespace: str | bytes, config: Config, *, write: bool
    ) -> None:
        """Use `open`. Takes the shard's lock when `write`."""
        self.path = path
        self.geometry = identity.geometry
        self.window = identity.window
        self.config = config
        self.namespace = namespace_digest(namespace)
        self.name = namespace if isinstance(namespace, str) else ""
        self.writable = write
        self.counters = Counters()
        self._identity = identity
        self._leases: set[Lease] = set()
        self._leases_lock = threading.Lock()
        self._closed = False
        self._shard = Shard(path)
        if write:
            self._shard.lock()
        try:
            self._open()
        except BaseException:
            self._shard.unlock()
            raise

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        geometry: Geometry,
        namespace: str | bytes,
        config: Config | None = None,
        mode: str = "rw",
    ) -> PrefixStore:
        """Open a directory, made a store if it is empty. mode "r": a snapshot, no writes.

        Raises StoreMismatch (another geometry, dtype or window), StoreLocked (a second writer),
        FormatError (no store, a foreign directory, a newer format), StoreFailed (no permission).
        """
        if mode not in ("rw", "r"):
            raise BadInput(f'open: mode must be "rw" or "r", got {mode!r}')
        config = config or Config()
        where = Path(path)
        identity = matching_identity(where, geometry, config.window, create=mode == "rw")
        try:
            return cls(where, identity, namespace, config, write=mode == "rw")
        except MediumError as err:
            raise StoreFailed(str(err)) from None

    def _open(self) -> None:
        config, shard = self.config, self._shard
        if not self.writable and not shard.index.is_dir():
            raise FormatError(f"{self.path}: nothing has been stored here yet")
        self._ssd = SsdTier(
            shard.segments, config.segment_bytes, config.disk_bytes, read_only=not self.writable
        )
        self._index = Index(shard.index, create=self.writable)
        self._catalog = Catalog(self.window)
        superfluous, last = self._load_catalog()
        self._pool = IoPool(config.io_threads)
        sums_budget = config.dram_bytes // SUMS_SHARE
        layout = SpanLayout.of(self.geometry, self.window, 1)
        chunk_bytes = layout.chunk_bytes
        if config.write_buffer_bytes < chunk_bytes:
            raise ConfigError(
                f"config: write_buffer_bytes {config.write_buffer_bytes} cannot hold one chunk "
                f"of {chunk_bytes} bytes"
            )
        planes = {plane: layout.planes[plane].chunk_bytes for plane in (K, V)}
        self._cache = ChunkCache(config.dram_bytes - sums_budget, planes, self.geometry.n_layers)
        self._tables = TableCache(self._ssd, self._pool, sums_budget)
        slots = BufferPool(config.write_buffer_bytes)
        self._media = Media(self._ssd, self._pool, slots, self.geometry)
        self.buffers = BufferPool(None)
        """Page-aligned buffers for whoever reads: sessions and engines."""
        self._reading = Reading(
            self.geometry, config, self._ssd, self._cache, {}, self._pool, self.buffers,
            self.counters, self._quarantine,
        )  # fmt: skip
        self._committer: Committer | None = None
        self._admission: Admission | None = None
        if self.writable:
            self._committer = Committer(
                self._index, self._ssd, self._catalog, self.counters, self.geometry,
                self._identity.uuid, self._reclaim, durable=config.durable,
            )  # fmt: skip
            if superfluous:
                self._committer.delete(superfluous)
                self._committer.barrier(CLOSE_TIMEOUT_S)
            self._admission = Admission(
                self.geometry, self.window, self.namespace, self.name, last + 1, self._catalog,
                self._media, self._committer, self.counters, self._release_held, self._make_room,
            )  # fmt: skip
        self._metrics: Any = None
        self.metrics_port: int | None = None
        if config.metrics_port is not None:
            try:
                self._metrics, self.metrics_port = serve_metrics(self.stats, config.metrics_port)
            except OSError as err:
                raise StoreFailed(f"metrics: port {config.metrics_port}: {err.strerror}") from None

    def _load_catalog(self) -> tuple[list[int], int]:
        """Fill the tree and the space accounts from the index; (spans to delete, the last id)."""
        collecting = gc.isenabled()
        gc.disable()  # a million short-lived tuples would be walked again and again
        try:
            superfluous, damaged = self._catalog.load(self._index.spans(), self._index.heat())
            extents, last = self._catalog.extents()
            self._ssd.claim(extents)
        except ValueError as err:
            raise FormatError(
                f"{self._shard.index}: two spans claim the same space ({err})"
            ) from None
        finally:
            if collecting:
                gc.enable()
        if damaged:
            log.warning("%s: %d damaged index values passed over", self.path, len(damaged))
            self.counters.add("damaged_spans", len(damaged))
        return superfluous + damaged, max([last, *damaged])

    # ---- looking up ------------------------------------------------------------------------

    def lookup(
        self, token_ids: Any, extra: Mapping[int, bytes] | None = None, tenant: str = ""
    ) -> int:
        """Tokens of this prompt that are stored, in whole windows. Pure."""
        root, labels, _ = self._names_of(token_ids, extra, tenant)
        self.counters.add("lookups")
        return self._catalog.lookup(root, labels) * self.window

    def lease(
        self, token_ids: Any, extra: Mapping[int, bytes] | None = None, tenant: str = ""
    ) -> Lease:
        """Pin the longest stored prefix of whole windows; reads its sums tables.

        A prefix whose tables cannot be read is cut before them. Never raises for a miss.
        """
        root, labels, _ = self._names_of(token_ids, extra, tenant)
        held = self._catalog.hold(root, labels, count=True)
        tables = (
            self._tables.of([h.record for h in held], self.config.read_timeout_s) if held else {}
        )
        sources: list[Source] = []
        at = 0
        for h in held:
            table = tables[h.record.span_id]
            if isinstance(table, ReadFailed):
                self.counters.add(f"lost/{table.reason}")
                if table.reason != "late":
                    self._quarantine(h.record.span_id)
                break
            sources.append(self._source(h, table, at))
            at += h.count
        self._release_held(held[len(sources) :])
        reason = "" if sources else "lost" if held else "too short" if not labels else "not stored"
        self.counters.add("hits" if sources else f"misses/{reason.replace(' ', '_')}")
        self.counters.add("hit_tokens", at * self.window)
        lease = Lease(sources, self.window, reason, self._reading, self._release)
        with self._leases_lock:
            self._leases.add(lease)
        return lease

    def _source(self, held: Held, table: Tables, at: int) -> Source:
        probe_bytes = [probe.window_bytes(self.window) for probe in table.probes]
        layout = SpanLayout.of(self.geometry, self.window, held.record.n_windows, probe_bytes)
        return Source(held, layout, Slot(held.record.parts), table.sums, table.probes, at)

    def _release(self, lease: Lease) -> None:
        with self._leases_lock:
            self._leases.discard(lease)
        self._release_held(lease.held)

    def _release_held(self, held: Sequence[Held]) -> None:
        self._reclaim(self._catalog.release(h.record.span_id for h in held))

    # ---- storing ---------------------------------------------------------------------------

    def store(
        self,
        token_ids: Any,
        keys: Sequence[Any],
        values: Sequence[Any],
        *,
        start: int = 0,
        extra: Mapping[int, bytes] | None = None,
        importance: Any = None,
        wait_s: float = 0,
        tenant: str = "",
    ) -> Stored:
        """Store a prompt's KV: lists over layers of [n_kv_heads, n - start, head_dim] tensors.

        Packed on return; READY later (`Stored.wait`, `flush`). importance float32
        [n_layers, n - start], higher first. Raises BadInput before anything is written.
        """
        layers = self.geometry.n_layers
        tokens = as_tokens(token_ids)
        n_rows = len(tokens) - start
        check_layers(keys, values, n_rows, self.geometry)
        importance = importance_of(importance, (layers, n_rows), "store")
        with self.writer(tokens, start, extra, wait_s, tenant) as w:
            for layer in range(layers):
                scores = None if importance is None else importance[layer]
                w.put(layer, start, keys[layer], values[layer], scores)
        return w.stored

    def writer(
        self,
        token_ids: Any,
        start: int = 0,
        extra: Mapping[int, bytes] | None = None,
        wait_s: float = 0,
        tenant: str = "",
    ) -> Writer:
        """Begin a store of the windows of this prompt that are not stored yet.

        Rows will be put from position `start` on, which must not lie beyond what is stored.
        Space is reserved here; when there is none, `writer.stored.refused` says so.
        """
        if self._admission is None:
            raise ImpressError('store: opened with mode="r"')
        if self._closed:
            raise ImpressError("store: closed")
        root, labels, tokens = self._names_of(token_ids, extra, tenant)
        return self._admission.writer(root, labels, tokens, start, wait_s)

    # ---- keeping house ---------------------------------------------------------------------

    def evict(self, n_bytes: int) -> int:
        """Drop least recently used spans, leaves first, never leased ones; the bytes freed.

        Segments left empty go back to the file system. Waits for the commit.
        """
        freed = self._evict(n_bytes)
        self._ssd.trim()
        return freed

    def _evict(self, n_bytes: int) -> int:
        if self._committer is None:
            raise ImpressError('store: opened with mode="r"')
        spans = self._catalog.evict(n_bytes)
        freed = sum(r.data_bytes + r.meta.length for r in self._catalog.retired_records(spans))
        self.counters.add("evicted_spans", len(spans))
        self._committer.delete(spans)
        if not self._committer.barrier(CLOSE_TIMEOUT_S):
            raise StoreFailed(f"evict: not done within {CLOSE_TIMEOUT_S:g} s")
        return freed

    def _make_room(self, n_bytes: int) -> bool:
        """Evict until n_bytes more are free; False when nothing can go."""
        return self._evict(n_bytes) > 0

    def _quarantine(self, span: int) -> None:
        """A span at home went bad: never again a hit, nor what hangs from it."""
        retired = self._catalog.quarantine(span)
        if retired:
            log.warning(
                "%s: span %d does not read back; dropped, with what follows it", self.path, span
            )
            self.counters.add("quarantined_spans", len(retired))
            if self._committer is not None and not self._closed:
                self._committer.delete(retired)

    def _reclaim(self, records: Iterable[SpanRecord]) -> None:
        """Nobody views or holds these spans any more: caches and space go."""
        for record in records:
            self._cache.drop_span(record.span_id)
            self._tables.drop(record.span_id)
            if self.writable:
                bury(self._ssd, record)

    def drop_caches(self) -> None:
        """Empty the DRAM tier and the cached sums tables; home keeps everything."""
        self._cache.clear()
        self._tables.clear()

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait until all that was stored is READY. Raises StoreFailed for what failed since."""
        if self._committer is None:
            return
        if not self._committer.barrier(timeout_s):
            raise StoreFailed(f"flush: not done within {timeout_s:g} s")
        failures = self._committer.take_failures()
        if failures:
            more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
            raise StoreFailed(f"{failures[0]}{more}") from failures[0]

    def close(self) -> None:
        """Finish what is queued, stop the threads, release the lock. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._metrics is not None:
            self._metrics.shutdown()
            self._metrics.server_close()
        if self._committer is not None:
            self._committer.close(CLOSE_TIMEOUT_S)
            for error in self._committer.take_failures():
                log.warning("%s: a store failed before close: %s", self.path, error)
        # A stuck thread may still use its file: then the files stay open until the process ends.
        if self._pool.close(self.config.read_timeout_s):
            self._ssd.close()
        self._index.close()
        self._shard.unlock()

    # ---- answering questions ---------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters since open, occupancy now. Plain numbers, ready for JSON."""
        with self._leases_lock:
            started = [lease.started_s for lease in self._leases]
        media = (self._cache.tier, self._ssd)
        return {
            **self._catalog.counts(),
            "tokens": self._catalog.counts()["windows"] * self.window,
            "tiers": {tier.name: tier.usage()._asdict() for tier in media},
            "tables_bytes": self._tables.used_bytes,
            "leases": len(started),
            "oldest_lease_s": monotonic() - min(started) if started else 0.0,
            **self.counters.snapshot(),
            "dram_evictions": self._cache.evictions,
            "direct_io": self._ssd.direct,
        }

    @property
    def catalog(self) -> Catalog:
        """The tree and its spans, for commands that show them."""
        return self._catalog

    @property
    def index(self) -> Index:
        return self._index

    @property
    def ssd(self) -> SsdTier:
        return self._ssd

    def check(self) -> None:
        """Assert every invariant of tree, spans, caches and space.

        When nothing is being stored or evicted (after `flush`, no writer open).
        """
        self._catalog.check()
        self._cache.check()
        self._ssd.check()
        if self._admission is not None:
            records = [*self._catalog.all_records(), *self._admission.drafts()]
            owned = sum(r.data_bytes + r.meta.length for r in records)
            used = self._ssd.usage().used
            assert used == owned, f"ssd: {used} bytes used, spans own {owned}"

    def _names_of(
        self, token_ids: Any, extra: Mapping[int, bytes] | None, tenant: str
    ) -> tuple[bytes, bytes, Any]:
        tokens = as_tokens(token_ids)
        labels = labels_of(tokens, self.window, extra)
        return root_key(self.namespace, self.geometry, self.window, tenant), labels, tokens

    def __enter__(self) -> PrefixStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
