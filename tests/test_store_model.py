"""A state machine of the whole store against a dictionary; every structure checked at each step."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from conftest import MIB, kv_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

import impress
from impress.read.session import Lease
from impress.usage.notes import Note

WINDOW = 16
GEOMETRY = impress.Geometry(2, 2, 1, 24, "float32", v_head_dim=16)  # K padded, V dense
CONFIG = impress.Config(
    window=WINDOW, segment_bytes=MIB, disk_bytes=2 * MIB, dram_bytes=600_000,
    write_buffer_bytes=MIB, io_threads=2, durable=False,
)  # fmt: skip

Path_ = tuple[int, ...]  # a prompt: one kind of window after another
paths = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
tails = st.integers(0, WINDOW - 1)
importances = st.one_of(st.none(), st.integers(0, 99))  # None, or the seed of what is given


def tokens_of(path: Path_, tail: int = 0) -> np.ndarray:
    kinds = [*np.repeat(path, WINDOW), *[7] * tail]
    return np.array(kinds, dtype=np.int32) * 100 + np.arange(len(kinds), dtype=np.int32) % WINDOW


def importance_of(seed: int | None, n_rows: int) -> np.ndarray | None:
    """Importance with many ties, so that a packed span is made of both."""
    shape = (GEOMETRY.n_layers, n_rows)
    return None if seed is None else np.random.default_rng(seed).integers(0, 9, shape)


class StoreMachine(RuleBasedStateMachine):
    leases: Bundle[tuple[Path_, int, Lease]] = Bundle("leases")

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.known: set[Path_] = set()  # every stored prefix, by windows
        self.ever_stored: set[Path_] = set()
        self.held: list[tuple[Path_, Lease]] = []
        self.store = self.open()
        self.gone = self.gone_so_far()

    def open(self) -> impress.PrefixStore:
        return impress.PrefixStore.open(self.folder / "s", GEOMETRY, "model", CONFIG)

    def length(self, path: Path_) -> int:
        return next((n for n in range(len(path), 0, -1) if path[:n] in self.known), 0)

    def learn(self, path: Path_) -> None:
        self.known |= {path[:n] for n in range(1, len(path) + 1)}
        self.ever_stored |= self.known

    def gone_so_far(self) -> tuple[int, int]:
        """Spans evicted since the store was opened; bytes of windows evicted from those that live
        on."""
        stats = self.store.stats()
        return stats["evicted_spans"], stats["dead_bytes"]

    def forget(self) -> None:
        """Something may have been evicted, and nothing may be gone for any other reason: what is
        left must be prefix-closed."""
        self.store.flush()
        before, self.gone = self.gone, self.gone_so_far()
        left = {p for p in self.known if self.store.lookup(tokens_of(p)) == len(p) * WINDOW}
        assert all(p[:n] in left for p in left for n in range(1, len(p)))
        for path, lease in self.held:
            assert path[: lease.n_tokens // WINDOW] in left, "a leased prefix was evicted"
        evicted = any(now > then for now, then in zip(self.gone, before, strict=True))
        assert left == self.known or evicted, f"lost: {self.known - left}"
        self.known = left

    @rule(path=paths, tail=tails, seed=importances)
    def store_prompt(self, path: Path_, tail: int, seed: int | None) -> None:
        tokens = tokens_of(path, tail)
        keys, values = kv_of(tokens, GEOMETRY)
        before = self.length(path)
        importance = importance_of(seed, len(tokens))
        stored = self.store.store(tokens, keys, values, importance=importance, wait_s=60)
        self.forget()  # reserving may have evicted
        if not stored.refused:
            assert stored.wait(60) and stored.n_new == (len(path) - before) * WINDOW
            self.learn(path)

    @rule(path=paths, tail=tails, cut=st.integers(0, 100), seed=importances)
    def store_the_rest(self, path: Path_, tail: int, cut: int, seed: int | None) -> None:
        tokens = tokens_of(path, tail)
        start = min(cut, self.length(path) * WINDOW)
        keys, values = kv_of(tokens, GEOMETRY, start)
        stored = self.store.store(
            tokens, keys, values, start=start, wait_s=60,
            importance=importance_of(seed, len(tokens) - start),
        )  # fmt: skip
        self.forget()
        if not stored.refused:
            assert stored.wait(60)
            self.learn(path)

    @rule(path=paths, rows=st.integers(0, 60), layer=st.integers(0, 1))
    def write_a_part_and_stop(self, path: Path_, rows: int, layer: int) -> None:
        tokens = tokens_of(path)
        keys, values = kv_of(tokens, GEOMETRY)
        with self.store.writer(tokens) as writer:
            writer.put(layer, 0, keys[layer][:, :rows], values[layer][:, :rows])
        assert writer.stored.refused or self.length(path) == len(path)
        self.forget()

    @rule(path=paths, tail=tails)
    def lookup(self, path: Path_, tail: int) -> None:
        assert self.store.lookup(tokens_of(path, tail)) == self.length(path) * WINDOW
        assert self.store.lookup(tokens_of(path, tail), tenant="x") == 0

    @rule(path=paths, target=leases)
    def lease(self, path: Path_) -> object:
        lease = self.store.lease(tokens_of(path))
        assert lease.n_tokens == self.length(path) * WINDOW
        if not lease.n_tokens:
            lease.release()
            return multiple()
        self.held.append((path, lease))
        return path, lease.n_tokens, lease

    @rule(item=leases, ahead=st.booleans())
    def read(self, item: tuple[Path_, int, Lease], ahead: bool) -> None:
        path, n_tokens, lease = item
        if not lease.active:
            return
        keys, values = kv_of(tokens_of(path), GEOMETRY)
        with lease.session() as session:
            if ahead:
                session.prefetch()
            for layer in range(GEOMETRY.n_layers):
                k, v, _ = session.retrieve(layer, None)
                assert np.array_equal(k.numpy(), keys[layer][:, :n_tokens])
                assert np.array_equal(v.numpy(), values[layer][:, :n_tokens])

    @rule(item=consumes(leases))
    def release(self, item: tuple[Path_, int, Lease]) -> None:
        item[2].release()
        self.held = [(path, lease) for path, lease in self.held if lease.active]

    @rule(n_bytes=st.integers(1, 200_000))
    def evict(self, n_bytes: int) -> None:
        self.store.evict(n_bytes)
        self.forget()

    @rule(path=paths, seed=st.integers(0, 99))
    def choose_rows(self, path: Path_, seed: int) -> None:
        """Requests whose identifier chose some rows: repacks use what history makes of them."""
        with self.store.lease(tokens_of(path)) as lease:
            for source in lease.sources:
                n_rows = source.held.record.n_windows * WINDOW
                first, count = source.held.first * WINDOW, source.count * WINDOW
                for layer in range(GEOMETRY.n_layers):
                    rng = np.random.default_rng([seed, layer])
                    rows = first + np.sort(rng.permutation(count)[: count // 5])
                    for _ in range(4):
                        note = Note(source.span, n_rows, layer, first, count, rows)
                        self.store.history.note(note)

    @rule(dry_run=st.booleans())
    def repack(self, dry_run: bool) -> None:
        """Moves what it finds worth moving and evicts nothing; the next pass moves nothing more."""
        self.store.repack(dry_run=dry_run)
        before = self.known
        self.forget()
        assert self.known == before
        again = self.store.repack()
        if not dry_run:
            assert again.moved == 0

    @rule()
    def drop_caches(self) -> None:
        self.store.drop_caches()

    @rule()
    def reopen(self) -> None:
        for _, lease in self.held:
            lease.release()
        self.held = []
        self.store.close()
        self.store = self.open()
        # What was evicted from a span that lives on may come back: its bytes are still true.
        for path in list(self.known):
            assert self.store.lookup(tokens_of(path)) == len(path) * WINDOW
        self.known, self.gone = self.everything(), self.gone_so_far()
        assert self.known <= self.ever_stored, "nobody stored this"

    def everything(self) -> set[Path_]:
        found: set[Path_] = set()
        for prefix in self.store.catalog.hottest(self.store.catalog.counts()["nodes"]):
            kinds = np.frombuffer(prefix.labels, dtype="<i4")[::WINDOW] // 100
            found |= {tuple(kinds[:n].tolist()) for n in range(1, len(kinds) + 1)}
        return found

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "store"):
            self.store.flush()
            self.store.check()
            assert self.store.stats()["windows"] == len(self.known)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)


TestStoreModel = StoreMachine.TestCase
TestStoreModel.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
