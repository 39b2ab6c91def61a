"""A store under random requests, faults and crashes, compared with what was put in it.

One run is a chain of lives of a process: open, some clients at once, then a clean close, a kill or
a power cut. What a client reads must be what was stored under those tokens; what was READY before
a crash must be served after it (unless something was evicted, purged or damaged meanwhile).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from disk import Faults, SimSsd, flipped
from turns import Killed, Scheduler, Thread

import impress
import impress.store  # and all it imports: a later import would have real threads and clocks
import impress.write.env
import impress.write.health
import impress.write.home
from impress.policy import Paper, Quality, Random, Recency
from tiers.errors import MediumError

GEOMETRY = impress.Geometry(2, 4, 2, 32, "float32")
WINDOW = 16
N_PROMPTS = 10
CLIENTS = 3
STEPS = 6  # of each client in one life
ENDS = ("close", "close", "kill", "power")  # of a life
EVICTIONS = impress.Config.model_fields["eviction"].annotation.__args__
POLICIES = (
    impress.Exact(), Recency(keep=0.3), Random(keep=0.4), Paper(keep=0.3), Quality(probe="int4-v2"),
)  # fmt: skip
FAULTS = (
    Faults(), Faults(), Faults(late=0.05), Faults(eio=0.02), Faults(flip=0.02), Faults(write=0.01),
    Faults(sync=0.1), Faults(late=0.02, sync=0.02, eio=0.01, short=0.01, flip=0.01, write=0.005),
)  # fmt: skip


class World:
    """One seed's run in a fresh directory."""

    def __init__(self, folder: Path, seed: int, patch: Any) -> None:
        self.sched = Scheduler(seed)
        self.rng = self.sched.rng
        self.path = folder / "store"
        self.prompts = self._make_prompts()
        self.excused = self.purged = (
            False  # in this life: the disk had faults, something was purged
        )
        self.unsure = False  # in this life: what is stored may be lost by a bad read
        self.mend: Callable[[], None] | None = None  # a bit is bad at rest, until this is called
        self.takings = self.taking = 0  # evictions and purges: so far, and under way
        self.must_have: set[int] = set()  # prompts that were READY and that nothing took away
        self.lives = 0
        self.seen = Counter[str]()  # in lives that were closed
        self.store: impress.PrefixStore | None = None
        SimSsd.sched, SimSsd.on, SimSsd.undo, SimSsd.faults = self.sched, True, {}, Faults()
        SimSsd.tiers.clear()
        modules = [
            m for n, m in sorted(sys.modules.items()) if n.split(".")[0] in ("impress", "tiers")
        ]
        self.sched.install([m for m in modules if "engines" not in m.__name__], patch)
        patch(impress.write.home, "SsdTier", SimSsd)
        patch(impress.write.home, "wall_clock", self.sched.clock)
        patch(impress.write.home, "boot_clock", self.sched.clock)
        patch(impress.write.health, "RETRY_S", impress.write.health.RETRY_S)

    def _make_prompts(self) -> list[np.ndarray]:
        """A few that begin alike: the tree splits, spans are seen in part."""
        made: list[np.ndarray] = []
        for _ in range(N_PROMPTS):
            n = self.rng.randrange(1, 9) * WINDOW + self.rng.randrange(WINDOW)
            tokens = np.array([self.rng.randrange(1 << 20) for _ in range(n)], dtype=np.int32)
            if made and self.rng.random() < 0.7:
                other = self.rng.choice(made)
                same = self.rng.randrange(min(len(other), n) + 1)
                tokens[:same] = other[:same]
            made.append(tokens)
        return made

    def run(self, lives: int) -> None:
        for _ in range(lives):
            self.lives += 1
            self._live()

    # ---- one life ----------------------------------------------------------------------------

    def _live(self) -> None:
        faults = self.rng.choice(FAULTS)
        SimSsd.faults = Faults()
        end = self.rng.choice(ENDS)
        rots, rotten = False, self.mend is not None
        try:
            if end != "close":
                self.sched.crash_at = self.sched.switches + self.rng.randrange(20, 1500)
            self.store = self._open()
            self._check_promises()
            SimSsd.faults = faults
            self.taking = 0
            self.excused, self.purged = faults.any or rotten, False
            self.unsure = faults.on_reads or rotten
            if faults.on_reads:
                self.must_have.clear()
            self._clients()
            SimSsd.faults = Faults()
            self._flush()
            self._wait_idle()
            self.store.check()
            assert self.store.buffers.used_bytes == 0, "a buffer was not given back"
            stats = self.store.stats()
            assert self.unsure or not stats["lost"], f"lost on a good disk: {stats['lost']}"
            self.seen.update(
                hits=stats["hits"],
                lost=sum(stats["lost"].values()),
                evicted=stats["evicted_spans"],
                moved=stats["repacks"].get("yes", 0),
            )
            self.store.close()
            self.sched.crash_at = None
            assert len(self.sched.threads) == 1, [t.name for t in self.sched.threads]
            rots = self.rng.random() < 0.1
        except Killed:
            self.crash(power=end == "power")
        if self.mend is not None:  # no later life is excused by it
            self.mend()
            self.mend = None
        if rots:
            self._rot()
        self.sched.raise_errors()

    def _open(self) -> impress.PrefixStore:
        config = impress.Config(
            window=WINDOW, segment_bytes=1 << 20, write_buffer_bytes=1 << 20, io_threads=3,
            dram_bytes=self.rng.choice((0, 1 << 18, 1 << 22)), read_timeout_s=2.0,
            hbm_bytes=self.rng.choice((0, 1 << 16)), hbm_device="cpu",
            disk_bytes=self.rng.choice((None, 3 << 20)), repack_every_s=0,
            follow_every_s=0, probes=("heads3-v1", "int4-v2"), eviction=self.rng.choice(EVICTIONS),
            prefetch_bytes=self.rng.choice((0, 10_000, 1 << 20)),
            admit=self.rng.choice(("first", "second")), disk_high=0.8, disk_low=0.6,
            daily_write_bytes=self.rng.choice((None,) * 5 + (2 << 20,)),
        )  # fmt: skip
        impress.write.health.RETRY_S = self.rng.choice((0.0, 0.0, 30.0))
        if config.disk_bytes is not None:
            self.must_have.clear()  # spans may be evicted for room
        return impress.PrefixStore.open(self.path, GEOMETRY, "sim", config)

    def _clients(self) -> None:
        threads = [Thread(self.sched, self._client, name=f"client-{i}") for i in range(CLIENTS)]
        for thread in threads:
            thread.start()
        self.sched.wait_until(lambda: not any(t.alive for t in threads), None)
        self.sched.raise_errors()

    def _flush(self) -> None:
        assert self.store is not None
        try:
            self.store.flush(1000)
        except impress.StoreFailed as err:
            self._assert_excused(err)

    def _assert_excused(self, err: impress.StoreFailed) -> None:
        """A store may fail through a fault, or because what it hangs from was purged meanwhile;
        never through a bug that the committer met."""
        expected = (impress.ImpressError, MediumError, OSError)
        cause: BaseException | None = err
        while cause is not None:  # an error that the committer met comes out as a failed store
            assert isinstance(cause, expected), f"a store failed by a bug: {cause!r}"
            cause = cause.__cause__
        assert self.excused or self.purged, "nothing went wrong, but a store failed"

    def _wait_idle(self) -> None:
        """Wait until promotions and the like have ended."""
        assert self.store is not None
        pool = self.store._pool
        idle = lambda: not any(pool.depth()) and not any(pool._since)  # noqa: E731
        self.sched.wait_until(idle, 1000)

    def crash(self, *, power: bool = False) -> None:
        """End the process; with `power`, what was not synced is lost, too."""
        SimSsd.on = False
        self.sched.kill_all()
        for shared in impress.write.env.envs.values():
            shared.env.close()
        impress.write.env.envs.clear()
        for tier in SimSsd.tiers:
            SimSsd.close(tier)
        SimSsd.tiers.clear()
        if self.store is not None:
            self.store._shard.unlock()
            self.store = None
        if power:
            SimSsd.power_cut(self.rng)
        SimSsd.undo.clear()
        SimSsd.on = True

    def _rot(self) -> None:
        """A bit of a segment goes bad while nobody looks, for as long as the next life."""
        segments = sorted((self.path / "shards/main/segments").glob("*.seg"))
        if segments:
            self.must_have.clear()
            self.mend = flipped(self.rng.choice(segments), self.rng)

    def _check_promises(self) -> None:
        assert self.store is not None
        for i in sorted(self.must_have):
            n, whole = self.store.lookup(self.prompts[i]), len(self.prompts[i]) // WINDOW * WINDOW
            assert n == whole, f"prompt {i}: {n} of {whole} tokens after a restart"
            self._read(i, impress.Exact(), may_lose=False)

    # ---- a client ----------------------------------------------------------------------------

    def _client(self) -> None:
        acts = (
            self._put, self._put, self._put_and_wait, self._get, self._get, self._get, self._get,
            self._abandon, self._evict, self._drop_caches, self._repack, self._purge, self._admit,
        )  # fmt: skip
        for _ in range(STEPS):
            try:
                self.rng.choice(acts)()
            except impress.StoreFailed as err:
                self._assert_excused(err)
            self.sched.pause()

    def _put(self) -> tuple[int, Any]:
        assert self.store is not None
        i = self.rng.randrange(N_PROMPTS)
        tokens = self.prompts[i]
        importance = None
        if self.rng.random() < 0.4:
            seed = self.rng.randrange(1 << 30)
            shape = (GEOMETRY.n_layers, len(tokens))
            importance = np.random.default_rng(seed).random(shape, dtype=np.float32)
        return i, self.store.store(tokens, *kv_of(tokens), importance=importance, wait_s=100)

    def _put_and_wait(self) -> None:
        takings, taking = self.takings, self.taking
        i, stored = self._put()
        ready = stored.wait(500)
        assert ready or stored.refused, f"prompt {i}: its store has not ended"
        assert self.store is not None
        if not ready or self.unsure or self.store.config.disk_bytes is not None:
            return
        before, n = self.takings, self.store.lookup(self.prompts[i])
        whole = n == len(self.prompts[i]) // WINDOW * WINDOW
        taken = taking or takings != self.takings
        assert whole or taken, f"prompt {i} was READY, and {n} of its tokens are found"
        if whole and before == self.takings and not self.taking:  # it has not gone meanwhile
            self.must_have.add(i)

    def _abandon(self) -> None:
        assert self.store is not None
        tokens = self.rng.choice(self.prompts)
        keys, values = kv_of(tokens)
        with self.store.writer(tokens, wait_s=100) as writer:
            half = len(tokens) // 2
            writer.put(0, 0, keys[0][:, :half], values[0][:, :half])
        assert not writer.stored.ready or not writer.stored.n_new

    def _get(self) -> None:
        self._read(self.rng.randrange(N_PROMPTS), self.rng.choice(POLICIES), may_lose=True)

    def _read(self, i: int, policy: Any, *, may_lose: bool) -> None:
        """Whatever is a hit must be what was stored."""
        assert self.store is not None
        tokens = self.prompts[i]
        keys, values = kv_of(tokens)
        whole = len(tokens) // WINDOW * WINDOW
        try:
            with self.store.lease(tokens) as lease:
                assert may_lose or lease.n_tokens == whole, (
                    f"prompt {i} was READY: {lease.n_tokens} of {whole} tokens are leased"
                )
                if not lease.n_tokens:
                    return
                with lease.session(policy) as session:
                    if self.rng.random() < 0.5:
                        session.prefetch()
                    for layer in range(GEOMETRY.n_layers):
                        k, v, pos = session.retrieve(layer, *self._question())
                        assert torch.equal(k, torch.from_numpy(keys[layer])[:, pos]), "wrong keys"
                        assert torch.equal(v, torch.from_numpy(values[layer])[:, pos]), (
                            "wrong values"
                        )
                        if isinstance(policy, impress.Exact):
                            assert pos.tolist() == [*range(lease.n_tokens)], "rows are missing"
        except impress.PrefixLost:
            assert may_lose, f"prompt {i} was READY and could not be read"

    def _question(self) -> tuple[torch.Tensor, float, torch.Tensor]:
        seed = self.rng.randrange(1 << 30)
        query = np.random.default_rng(seed).standard_normal(
            (GEOMETRY.n_heads, 3, GEOMETRY.head_dim)
        )
        return torch.from_numpy(query).float(), 0.1, torch.zeros(GEOMETRY.n_heads, 3)

    @contextmanager
    def _taking_away(self) -> Iterator[None]:
        """From here on, what is READY may go, and so may what becomes READY meanwhile."""
        self.must_have.clear()
        self.takings, self.taking = self.takings + 1, self.taking + 1
        yield
        self.taking -= 1

    def _evict(self) -> None:
        assert self.store is not None
        with self._taking_away():
            self.store.evict(self.rng.choice((1, 1 << 16, 1 << 30)))

    def _admit(self) -> None:
        """What was used once is admitted at any later use."""
        assert self.store is not None
        tokens = self.rng.choice(self.prompts)
        assert self.store.admitted(tokens) <= len(tokens) // WINDOW * WINDOW
        assert self.store.admitted(tokens) == len(tokens) // WINDOW * WINDOW

    def _drop_caches(self) -> None:
        assert self.store is not None
        self.store.drop_caches()

    def _repack(self) -> None:
        assert self.store is not None
        self.store.repack()

    def _purge(self) -> None:
        assert self.store is not None
        if self.rng.random() < 0.2:
            self.purged = True
            with self._taking_away():
                self.store.purge()


def kv_of(tokens: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Keys and values by layer: each row depends on all tokens up to it."""
    mixed = np.cumsum((tokens.astype(np.int64) + 1) * 2654435761 % 1000003) % 99991
    base = np.arange(GEOMETRY.n_kv_heads * GEOMETRY.head_dim).reshape(GEOMETRY.n_kv_heads, 1, -1)
    made = [
        ((base * 7 + mixed[None, :, None] * 13 + i * 1009) % 4093).astype(np.float32)
        for i in range(2 * GEOMETRY.n_layers)
    ]
    return made[::2], made[1::2]
