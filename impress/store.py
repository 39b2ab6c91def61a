"""The store: one directory, its tree, its tiers. The only place that knows both meaning and media.

tokens ─lookup→ windows ─lease→ Session          (session.py: one request's reads)
K, V ─writer→ slots → segments ─commit→ READY → tree   (writer.py, batches.py)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from impress.blockhash import as_tokens, chain, labels_of, namespace_digest, root_key
from impress.cache.copies import Copies
from impress.config import Config, expanded, in_full, tenant_secret
from impress.errors import FORKED, BadInput, ImpressError, StoreFailed
from impress.nested import check_alone
from impress.read.parts import miss
from impress.read.placement import Placed, placed
from impress.read.reading import Reading
from impress.read.session import Lease
from impress.read.sparse import session_of
from impress.repacking.repack import Repacker
from impress.repacking.report import RepackReport
from impress.selection.probes import ProbeCodec, codec_of
from impress.settings import check_settings, check_types, digests_in
from impress.spans.params import Params
from impress.spans.rows import check_layers
from impress.spans.tables import TableCache
from impress.stats import Counters, serve_metrics
from impress.tree.catalog import Held
from impress.tree.leases import Leases
from impress.types import Geometry, a_number, a_time, an_int
from impress.upkeep.standing import standing
from impress.usage.doorkeeper import Doorkeeper
from impress.write.admission import Admission
from impress.write.directory import Identity, locked_shard, matching_identity
from impress.write.draft import Media, Stored
from impress.write.fitting import Fitter
from impress.write.home import Home
from impress.write.index import Index
from impress.write.leaving import COMMIT_TIMEOUT_S
from impress.write.writer import Writer, importance_of
from tiers.errors import MediumError
from tiers.iopool import IoPool
from tiers.slots import BufferPool


class PrefixStore:
    """Open with `PrefixStore.open`. Thread-safe, except that a Session serves one thread.

    A prompt is named by `token_ids`, a list or 1-d array of ids in 0..2^31-1; by `extra`, which
    maps a position to a digest of all else its KV there depends on (an image, an adapter); and by
    `tenant`, who alone finds it again. Methods that take these raise BadInput on anything else, and
    ImpressError in a child of the process that opened the store.
    """

    def __init__(
        self, path: Path, identity: Identity, namespace: str | bytes, config: Config, *, write: bool
    ) -> None:
        """Use `open`. Takes the shard's lock when `write`."""
        self.path, self.config = path, config
        self.geometry, self.window = identity.geometry, identity.window
        self.namespace = namespace_digest(namespace)
        self.name = namespace if isinstance(namespace, str) else ""
        self.writable, self.counters, self._identity = write, Counters(), identity
        count = partial(self.counters.add, "expired_leases")
        self._leases = Leases(config.lease_timeout_s, config.read_timeout_s, count)
        self._closed, self._pid, self._parts = False, os.getpid(), [self, self.counters]
        self._secret = tenant_secret(config)
        self._doorkeeper = Doorkeeper() if config.admit == "second" else None
        self._shard = locked_shard(path, config.shard) if write else None
        try:
            self._open()
        except BaseException:
            if self._shard is not None and not self._shard.is_kept:
                self._shard.unlock()
            raise

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], geometry: Geometry, namespace: str | bytes,
        config: Config | None = None, mode: str = "rw",
    ) -> PrefixStore:  # fmt: skip
        """Open a directory; an empty one is made a store. mode "r" stores nothing.

        Up to 120 processes may have it open: each writes its own shard (`Config.shard`) and reads
        all. Raises StoreMismatch (another geometry, dtype or window), StoreLocked (a second writer
        of a shard), FormatError (no store, a foreign directory, a newer format), StoreFailed (no
        permission, a metrics_port that is taken), BadInput (an argument of the wrong type),
        ConfigError and Unsupported (settings that do not work here).
        """
        if mode not in ("rw", "r"):
            raise BadInput(f'open: mode must be "rw" or "r", got {mode!r}')
        check_types(path, geometry, namespace, config)
        where = in_full(expanded(path, "path"))  # files opened after a chdir are this store's, too
        try:
            check_settings(config := config or Config(), geometry)  # before a directory is a store
            identity = matching_identity(where, geometry, config.window, create=mode == "rw")
            return cls(where, identity, namespace, config, write=mode == "rw")
        except MediumError as err:
            raise StoreFailed(str(err)) from None

    def _open(self) -> None:
        config = self.config
        self._end_metrics: Callable[[], None] = lambda: None
        self._admission: Admission | None = None
        self._repacker: Repacker | None = None
        self._writers: list[Admission | Repacker] = []
        self._pool = IoPool(config.io_threads)
        with ExitStack() as failed:  # else threads would go on in a shard another process holds
            failed.callback(self._pool.close, config.read_timeout_s)
            codecs = [codec_of(name) for name in config.probes]
            self._copies = Copies(config, self.geometry, self.window, codecs)
            self._home = home = Home(
                self.path, self._identity, config, self.counters, self._forget, self._shard
            )
            failed.callback(self.close)
            home.leaving.before_evict = self._leases.reap
            self._furnish(home, codecs)
            failed.pop_all()

    def _furnish(self, home: Home, codecs: Sequence[ProbeCodec]) -> None:
        config, geometry, uuid = self.config, self.geometry, self._identity.uuid
        self.tables = TableCache(home.ssd, self._pool, self._copies.tables_bytes)
        self.ssd, self.ledgers, self.purges = home.ssd, home.ledgers, home.leaving.purges
        self.left_out, self.absent = home.others.left_out, home.others.absent  # for commands
        self.catalog, self.history = home.catalog, home.history  # what requests have shown of spans
        params = Params(home.place.params, write=self.writable, others=home.others.params)
        self.buffers = self._copies.buffers()  # engines use them, too
        self._reading = Reading(
            geometry, config, home.ssd, self._copies, self._pool, self.buffers, self.counters,
            home.quarantine, home.history, home.save_history, params, home.catalog.knows,
        )  # fmt: skip
        self._parts += [self._reading, self._pool, self.ledgers]
        self.write_buffers = slots = BufferPool(config.write_buffer_bytes)
        if home.committer is not None:
            media = Media(home.ssd, self._pool, slots, geometry, codecs, self.namespace, params)
            self._parts += [media]
            fitter = Fitter(codecs, geometry, self.namespace, home.ssd, home.catalog, params)
            self._admission = Admission(
                geometry, self.window, self.namespace, self.name, home, home.committer, media,
                self.counters, self.tables, fitter,
            )  # fmt: skip
            fitter.begin()  # not earlier: nobody would close it
        home.tidy()
        self._end_metrics, self.metrics_port = serve_metrics(self.stats, uuid, config.metrics_port)
        if self.writable:  # last: it starts to work
            busy = self._leases.busy  # a request is between its lease and its first token
            self._repacker = Repacker(home, self._pool, config, self.counters, busy)
        self._writers = [w for w in (self._admission, self._repacker) if w is not None]

    def _forget(self, span: int) -> None:
        self._copies.drop_span(span)
        self.tables.drop(span)
        self._home.history.forget(span)

    @property
    def index(self) -> Index:
        return self._home.index  # do not keep it: in a reader it changes

    # ---- looking up ------------------------------------------------------------------------

    def lookup(
        self, token_ids: Any, extra: Mapping[int, bytes] | None = None, tenant: str = ""
    ) -> int:
        """How many tokens of this prompt are stored, in whole windows. Pins nothing; is counted."""
        root, labels, _ = self._names_of(token_ids, extra, tenant)
        self.counters.add("lookups")
        return self._home.catalog.lookup(root, labels) * self.window

    def lease(
        self, token_ids: Any, extra: Mapping[int, bytes] | None = None, tenant: str = ""
    ) -> Lease:
        """Pin the longest stored prefix of whole windows; reads its sums tables.

        A prefix is cut before the first table that cannot be read. Never raises for a miss; while
        all reading, or all copying, threads are stuck ("tier off"), every lease is a miss.
        """
        root, labels, _ = self._names_of(token_ids, extra, tenant)
        self._leases.reap()
        off = self._pool.is_stuck(self.config.read_timeout_s)
        held = [] if off else self._home.catalog.hold(root, labels, count=True)
        lease: Lease | None = None
        try:
            sources = self._reading.sources(held, self.tables)
            why = "" if sources else miss(off=off, lost=bool(held), short=not labels)
            make, end = partial(session_of, self._reading), partial(self._release, held)
            lease = Lease(sources, self.window, why, self._reading, make, end, self._leases.clock)
            self._leases.add(lease)
            self._home.release(held, len(sources))
            self.counters.add("hits" if sources else f"misses/{why.replace(' ', '_')}")
            self.counters.add("hit_tokens", lease.n_tokens)
            return lease
        except BaseException:  # Ctrl-C: nobody has the lease that would unpin the spans
            self._release(held, lease)
            raise

    def _release(self, held: list[Held], lease: Lease | None) -> None:
        self._home.release(held)
        if lease is not None:  # last: if an exception cuts this off, its time limit ends it
            self._leases.discard(lease)

    # ---- storing ---------------------------------------------------------------------------

    def store(
        self, token_ids: Any, keys: Sequence[Any], values: Sequence[Any], *, start: int = 0,
        extra: Mapping[int, bytes] | None = None, importance: Any = None, wait_s: float = 30,
        tenant: str = "",
    ) -> Stored:  # fmt: skip
        """Store a prompt's KV: lists over layers of [n_kv_heads, n - start, head_dim] tensors.

        Copied on return; READY later (`Stored.wait`, `flush`). `importance`, float32
        [n_layers, n - start]: rows are laid down in its order, highest first. `wait_s` is as for
        `writer`, and so are the errors, raised before anything is written.
        """
        tokens, layers = as_tokens(token_ids), self.geometry.n_layers
        n_rows = len(tokens) - an_int(start, "store: start")
        check_layers(keys, values, n_rows, self.geometry)
        given = importance_of(importance, (layers, n_rows), "store")
        w, whole = self.writer(tokens, start, extra, wait_s, tenant), False
        try:  # cut off as a `with` is entered, nobody would close it
            for layer in range(layers):
                scores = None if given is None else given[layer]
                w.put(layer, start, keys[layer], values[layer], scores)
            whole = True
        finally:
            w.close(keep=whole)
        return w.stored

    def writer(
        self, token_ids: Any, start: int = 0, extra: Mapping[int, bytes] | None = None,
        wait_s: float = 30, tenant: str = "",
    ) -> Writer:  # fmt: skip
        """Begin storing the windows of this prompt that are not stored yet.

        Rows must be put from position `start` on, not beyond what is stored. Space is reserved
        here; if there is none, the day's writes are spent or the disk accepts none,
        `writer.stored.refused` says so. `wait_s`: longest wait for each write buffer (a put takes
        one for every 4 MiB); after that the store is refused. Raises BadInput, and ImpressError
        where the store is closed or open only for reading.
        """
        if self._admission is None or self._closed:
            raise ImpressError("store: closed" if self._closed else 'store: opened with mode="r"')
        root, labels, tokens = self._names_of(token_ids, extra, tenant)
        return self._admission.writer(root, labels, tokens, start, wait_s)

    def admitted(
        self, token_ids: Any, extra: Mapping[int, bytes] | None = None, tenant: str = ""
    ) -> int:
        """Tokens of this prompt, in whole windows, that an engine is to store under `Config.admit`.

        "first": all. "second": the leading windows used at least once before; notes this use.
        """
        root, labels, _ = self._names_of(token_ids, extra, tenant)
        n_windows = len(labels) // (4 * self.window)
        if self._doorkeeper is not None:
            n_windows = self._doorkeeper.admit(chain(root, labels, self.window))
        return n_windows * self.window

    # ---- keeping house ---------------------------------------------------------------------

    def evict(self, n_bytes: int) -> int:
        """Drop what is worth least (`Config.eviction`), leaves first, none leased; returns bytes.

        At least what is above `disk_high`, and empty segments. Waits for it; 0 where it failed.
        """
        leaving = self._usable("evict").leaving  # before anything leaves the tree
        n_gone = leaving.evict(max(a_number(n_bytes, "evict: n_bytes"), leaving.surplus()))
        self._home.ssd.trim()
        return n_gone

    def purge(
        self, tenant: str | None = None, *, namespaces: Iterable[bytes] | None = None
    ) -> tuple[int, int]:
        """Erase what a tenant (None: every tenant) has stored in this store's namespace.

        Only in the shard this process writes. `namespaces`: digests of others to purge instead.
        Returns (spans, how many a lease still holds: they go when it ends, or with `close`). The
        bytes of the rest are gone from the segments on return, as is anything left in free space;
        what the index has freed is overwritten by `impress.write.env.compact`, as `impress purge`
        does. Raises StoreFailed where the disk does not erase: purge again, or it all comes back.
        """
        leaving = self._usable("purge").leaving  # before anything is erased
        digests = {self.namespace} if namespaces is None else digests_in(namespaces)
        if tenant is None:
            try:
                return leaving.purge(lambda namespace, _: namespace in digests)
            finally:  # whatever comes of the spans; a fit may have ended meanwhile
                self._reading.params.forget(digests)
        roots = {root_key(d, self.geometry, self.window, tenant, self._secret) for d in digests}
        return leaving.purge(lambda _, root: root in roots)

    def repack(self, *, dry_run: bool = False, max_bytes: int | None = None) -> RepackReport:
        """Pack often-chosen rows side by side, at most max_bytes of them (None: no bound).

        Waits for it. Raises ImpressError unless this process has the store open for writing.
        """
        if self._usable("repack") and (repacker := self._repacker) is not None:
            return repacker.run(dry_run=dry_run, max_bytes=max_bytes)
        raise ImpressError("repack: wants a store that this process has open for writing")

    def follow(self) -> bool:
        """Take over now what other processes stored or removed; returns whether there was any."""
        return self._usable("follow").follow()

    def drop_caches(self) -> None:
        """Empty HBM, DRAM and the cached tables; home keeps everything."""
        self._usable("drop_caches", closed=True)
        self._copies.clear()
        self.tables.clear()

    def flush(self, timeout_s: float = COMMIT_TIMEOUT_S) -> None:
        """Wait until all stores are READY. Raises StoreFailed for failures since the last call.

        A fit of probe parameters that storing set off has then ended too, or timeout_s has passed.
        """
        ends_s = monotonic() + (timeout_s := a_time(timeout_s, "flush: timeout_s"))
        self._usable("flush", closed=True).flush(timeout_s)
        if self._admission is not None:
            self._admission.fitter.wait(max(ends_s - monotonic(), 0.0))

    def close(self) -> None:
        """Finish queued stores, stop threads, release the lock. Idempotent, even if interrupted."""
        if os.getpid() != self._pid:  # a forked child must not touch its parent's
            return
        self._usable("close", closed=True)
        if self._closed:
            return
        self._closed, limit_s = True, self.config.read_timeout_s
        try:
            self._end_metrics()
            ended = self._admission is None or self._admission.fitter.close(limit_s)
            if self._repacker is not None:
                self._repacker.close(limit_s)
            self._home.settle()
            idle = self._pool.close(limit_s)  # a stuck thread may still use its file
            writing = not idle and any(w.writing for w in self._writers)  # and copies: they stay
            writing |= self._admission is not None and not self._admission.fitter.retired
            self._copies.close(idle=idle)
            self._home.close(files=idle and ended, writing=writing)
        except BaseException:  # Ctrl-C in a wait: the next call goes on
            self._closed = False
            raise

    # ---- answering questions ---------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters since open, occupancy now. Plain numbers, ready for JSON."""
        home, stuck = self._usable("stats", closed=True), self._pool.n_stuck
        n_stuck, ages = stuck(self.config.read_timeout_s), self._leases.ages()
        return standing(home, self._copies, self.tables, self.counters, ages, n_stuck)

    def placement(self) -> list[Placed]:
        """For every span: how many of its chunks each tier holds, and what they are worth."""
        records = self._usable("placement").catalog.records()
        return placed(records, self._copies.occupancy(), self.history.summary)

    def names(self) -> dict[bytes, str]:
        """Root key -> the name of its namespace, from all shards."""
        return self._usable("names").names()

    def saved_ledgers(self) -> list[tuple[bytes, bytes]]:
        """(key, ledger) of every guard, from all shards."""
        return self._usable("saved_ledgers").saved_ledgers()

    def check(self) -> None:
        """Assert all invariants (tree, spans, caches, space). Flush first; have no writer open."""
        home = self._usable("check", closed=True)
        self._copies.check()
        self.tables.check()
        home.check([draft for writer in self._writers for draft in writer.drafts()])

    def _usable(self, what: str, *, closed: bool = False) -> Home:
        """Home; `closed`: even of a closed store. Raises ImpressError, before any lock."""
        forked = os.getpid() != self._pid
        if forked or (self._closed and not closed):
            raise ImpressError(f"{what}: {FORKED if forked else 'the store is closed'}")
        check_alone(what, self._parts, __name__)
        return self._home

    def _names_of(
        self, token_ids: Any, extra: Mapping[int, bytes] | None, tenant: str
    ) -> tuple[bytes, bytes, Any]:
        if os.getpid() != self._pid:
            raise ImpressError(f"store: {FORKED}")
        tokens = as_tokens(token_ids)
        root = root_key(self.namespace, self.geometry, self.window, tenant, self._secret)
        return root, labels_of(tokens, self.window, extra), tokens

    def __enter__(self) -> PrefixStore:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
