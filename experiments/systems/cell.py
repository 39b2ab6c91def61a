"""One cell: systems on one set of prefixes, one cache ratio, one popularity; request by request.

    requests drawn ─> choices made (no clock) ─> each warmed until its hit rates are flat ─> timed
                      (where a device computes: on the clock)

In every round each system serves the same request (or `in_a_row` of them, as a server that is kept
busy does), in an order drawn for that round, and nothing is left running between two systems.
Drawn, not rotated: systems share files, and where a disk has a cache of its own, the first system
to read a place in a round may find it slower than the systems after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from experiments.common import Row, Unable
from experiments.rounds import Rounds
from experiments.systems.catalogue import System, choosing
from experiments.systems.clock import A100, PAPER_DISK_GB_S, Clock, Compute, Roofline, dilation_of
from experiments.systems.data import Data
from experiments.systems.device import Device, Emulated
from experiments.systems.generate import Knobs, overlap_with_average
from experiments.systems.planned import Choices
from experiments.systems.serve import Asking, Memory, Served, Server
from experiments.systems.shapes import WINDOW
from experiments.systems.yardstick import Yardstick
from impress.config import Config
from impress.policy import Policy
from tiers.hbm import for_current_device

Where = Literal["cuda", "cpu"]
#: Hit rates are flat when two windows of warming differ by less than this from the two before.
FLAT: Final = 0.02
#: The windows that are compared, and the first one, in which caches fill.
LEAST_WINDOWS: Final = 5
#: The fewest choices that an average order is made from.
OFTEN: Final = 6


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked: popularity ("zipf" with an exponent, or "shuffled": each prefix in turn)."""

    ratio: int = 130  # size of the data where HBM is 10 and DRAM 32
    zipf: float | None = 0.9
    knobs: Knobs = field(default_factory=Knobs)
    n_measured: int = 40
    n_warm: int = 48  # requests of a window; there are at most `most_windows`
    most_windows: int = 8
    seed: int = 1
    in_a_row: int = 1  # requests of one system before the work they leave is waited for


class Warmed(NamedTuple):
    """How many requests filled a system's caches, and whether its hit rates were flat by then."""

    n_warmed: int
    flat: bool


def popularity(load: Load, n_prefixes: int) -> npt.NDArray[np.float64]:
    """Each prefix's share of the requests; which one is the most popular is drawn."""
    if load.zipf is None:
        return np.full(n_prefixes, 1 / n_prefixes)
    weight = np.arange(1, n_prefixes + 1, dtype=np.float64) ** -load.zipf
    rng = np.random.default_rng([load.seed, 5])
    return rng.permutation(weight / weight.sum())


def window_of(load: Load, n_prefixes: int) -> list[int]:
    """The prefixes that a window of warming asks for, in order: each by its popularity, rounded.

    The same in every window, with other requests: hit rates of two windows then differ by what the
    caches hold, not by what was asked. 48 drawn each time would by itself make several hundredths.
    """
    wanted = popularity(load, n_prefixes) * load.n_warm
    counts = np.floor(wanted).astype(np.int64)
    short = np.argsort(counts - wanted, kind="stable")[: load.n_warm - counts.sum()]
    counts[short] += 1
    rng = np.random.default_rng([load.seed, 7])
    order: list[int] = rng.permutation(np.repeat(np.arange(n_prefixes), counts)).tolist()
    return order


def drawn(load: Load, n_prefixes: int) -> list[int]:
    """The prefixes of the requests that are measured, in order."""
    rng = np.random.default_rng([load.seed, 8])
    n = load.n_measured
    if load.zipf is None:
        rounds = [rng.permutation(n_prefixes) for _ in range(-(-n // n_prefixes))]
        order: list[int] = np.array(rounds, dtype=np.int64).ravel()[:n].tolist()
    else:
        order = rng.choice(n_prefixes, n, p=popularity(load, n_prefixes)).tolist()
    return order


def order_of(load: Load, n_prefixes: int) -> list[tuple[int, int]]:
    """(prefix, request on it) of all windows of warming, then of those measured; no request is
    asked twice."""
    prefixes = window_of(load, n_prefixes) * load.most_windows + drawn(load, n_prefixes)
    seen = [0] * n_prefixes
    asked = []
    for prefix in prefixes:
        asked.append((prefix, seen[prefix]))
        seen[prefix] += 1
    return asked


def budgets(n_bytes: int, ratio: int) -> tuple[int, int]:
    """(HBM, DRAM) bytes for data of n_bytes: 10 and 32 parts where the data has `ratio`."""
    return n_bytes * 10 // ratio, n_bytes * 32 // ratio


def config_of(system: System, data: Data, ratio: int, hbm: Where = "cpu") -> Config:
    """Caches of a system: probes, maps and tables count in the DRAM budget. `hbm`: the device in
    whose memory the fast cache is."""
    hbm_bytes, dram = budgets(data.n_bytes, ratio)
    return Config(
        window=WINDOW, dram_bytes=dram, hbm_bytes=hbm_bytes, hbm_device=hbm, durable=False,
        eviction=system.eviction, probes=data.probes(system.data, system.policy),
        segment_bytes=128 << 20, lease_timeout_s=3600, prefetch_bytes=system.prefetch_bytes,
        follow_every_s=0,  # a server has one store that looks, not one a system; nobody writes
    )  # fmt: skip


class Bench:
    """Open systems over one set of data. Closing it closes their caches and stores.

    `dilation`: how many times as long compute takes here; None: by the disk's rate before each
    round, or 1 where nothing is read. `on`: the torch device that computes for real and holds the
    fast cache; "": none. With a device nothing is dilated. `disk_gb_s`: the rate noted for rows
    before which no reading was made; None: the one that the dilation implies.
    """

    def __init__(
        self, systems: Sequence[System], data: Data, load: Load, dilation: float | None,
        roofline: Roofline = A100, *, on: str = "", disk_gb_s: float | None = None,
    ) -> None:  # fmt: skip
        self.systems = list(systems)
        self.data = data
        self.load = load
        self._on = on
        self._disk_gb_s = disk_gb_s or PAPER_DISK_GB_S / (dilation or 1.0)
        self._exits = ExitStack()
        self._asked = order_of(load, len(data.prefixes))
        self.choices: Choices = {}
        least = load.n_warm * min(LEAST_WINDOWS, load.most_windows)
        self._prepare([*self._asked[:least], *self._measured])
        self.device, self._memory = self._computing(roofline, dilation)
        self.servers = [self._server(system) for system in self.systems]
        self._yardstick: Yardstick | None = None
        if (dilation is None or on == "cuda") and data.kinds:
            try:
                self._yardstick = Yardstick(data.segments())
                self._exits.callback(self._yardstick.close)
            except Unable:
                if dilation is None:  # else the rate is only noted
                    self._exits.close()
                    raise
        self.warmed: dict[str, Warmed] = {}  # by system

    def _computing(self, roofline: Roofline, dilation: float | None) -> tuple[Device, Memory]:
        """The device that computes, and memory for rows on their way to it."""
        data = self.data
        if self._on:
            from experiments.systems.cuda import Cuda

            made = Cuda(data.shape, data.n_layers, data.prefixes, self.load.knobs, self._on)
            return made, Memory(for_current_device() if self._on == "cuda" else None)
        clock = Clock(1.0 if dilation is None else dilation)
        return Emulated(Compute(data.shape, roofline), data.geometry, clock, self.choices), Memory()

    @property
    def _measured(self) -> list[tuple[int, int]]:
        return self._asked[self.load.n_warm * self.load.most_windows :]

    def _prepare(self, asked: Sequence[tuple[int, int]]) -> None:
        """Write the data, where it is not there yet, and make the choices of these requests."""
        kinds = {s.data for s in self.systems}
        policies = [] if self._on else choosing(self.systems)  # those choose as they are asked
        self.choices = self.data.prepare(kinds, policies, asked, self.load.knobs)

    def _server(self, system: System) -> Server:
        store = None
        if system.data:
            hbm: Where = "cuda" if self._on == "cuda" else "cpu"
            config = config_of(system, self.data, self.load.ratio, hbm)
            store = self.data.open(system.data, config)
        server = Server(system, self.device, self.data.geometry, store, self._memory)
        self._exits.callback(server.close)
        return server

    def _measure_disk(self) -> None:
        if self._yardstick is not None:
            self._disk_gb_s = self._yardstick.gb_s()
            self.device.pace(dilation_of(self._disk_gb_s))

    def warm(self) -> None:
        """Serve each system windows of requests until its hit rates are flat; compute takes no
        time."""
        dilation = self.device.dilation
        for server in self.servers:
            self.warmed[server.system.name] = self._warm(server, dilation)
        self.device.pace(dilation)

    def _warm(self, server: Server, dilation: float) -> Warmed:
        rates: list[float] = []
        flat, n, most = False, self.load.n_warm, self.load.most_windows
        # The first try of reading hot prefixes whole ends after some 350 requests (regime.py).
        least = most if server.system.auto else LEAST_WINDOWS
        while len(rates) < most and not (flat and len(rates) >= least):
            part = self._asked[len(rates) * n :][:n]
            if len(rates) >= LEAST_WINDOWS:
                self._prepare(part)
            rates.append(hit_rate(self._warmed(server, part, dilation)))
            flat = len(rates) >= LEAST_WINDOWS and are_flat(rates)
        return Warmed(len(rates) * n, flat)

    def _warmed(
        self, server: Server, part: Sequence[tuple[int, int]], dilation: float
    ) -> list[Served]:
        """A system that chooses its mode is warmed on the clock: what it has learnt of the machine
        is as much a part of it as what its caches hold."""
        self.device.pace(dilation if server.system.auto else 0.0)
        if server.system.auto:
            self._measure_disk()
            server.choose_modes(self.data.prefixes[0].n_tokens)
        return [self._serve(server, [one])[0] for one in part]

    def measure(self, rounds: Rounds | None = None) -> dict[str, list[Served]]:
        """Every system on the same requests, interleaved. Rounds that earlier runs served are taken
        from `rounds`, and new ones are kept there."""
        found: dict[str, list[Served]] = {s.name: [] for s in self.systems}
        kept = iter([] if rounds is None else rounds.kept)
        self._measure_disk()
        for server in self.servers:
            server.choose_modes(self.data.prefixes[0].n_tokens)  # where it was not warmed
        rng = np.random.default_rng([self.load.seed, 6])
        asked = self._measured
        for first in range(0, len(asked), self.load.in_a_row):
            some = asked[first : first + self.load.in_a_row]
            order = rng.permutation(len(self.servers)).tolist()
            served = {name: [Served(**one) for one in of] for name, of in next(kept, {}).items()}
            if not served:
                self._measure_disk()
                for server in (self.servers[at] for at in order):
                    served[server.system.name] = self._serve(server, some)
                if rounds is not None:
                    rounds.add({name: [asdict(one) for one in of] for name, of in served.items()})
            for name, of in served.items():
                found[name] += of
        return found

    def _serve(self, server: Server, some: Sequence[tuple[int, int]]) -> list[Served]:
        """Serve requests one after the other; at the end none of their work goes on any more.

        Each comes when the one before has its first token: work that must still be done before the
        server is free, such as copies out of an engine's memory, is waited for.
        """
        before = server.behind_bytes
        asking = [self.asking(*asked) for asked in some]
        questions = [server.question_of(one) for one in asking]
        served = [server.serve(*both) for both in zip(asking, questions, strict=True)]
        came = [one.began_s + one.ttft_s for one in served]
        for first_token_s, after in zip(came, served[1:], strict=False):
            after.ttft_s += after.began_s - first_token_s
        server.settle()
        for one in served:
            one.dilation, one.disk_gb_s = self.device.dilation or 1.0, self._disk_gb_s
            one.behind_bytes = (server.behind_bytes - before) / len(served)
        return served

    def overlap(self, policy: Policy | None) -> float | None:
        """How far a policy's choices follow the average order, mean over layers of prefixes that
        were asked for often; None where there are none, or rows are chosen on the clock."""
        if policy is None:
            return None
        chosen: dict[tuple[int, int], list[npt.NDArray[np.int64]]] = {}
        for prefix, request in self._measured:
            for layer, selection in enumerate(self.choices.get((policy, prefix, request), ())):
                if selection.positions is not None:
                    chosen.setdefault((prefix, layer), []).append(selection.positions)
        shares = [
            overlap_with_average(some, self.data.prefixes[prefix].n_tokens)
            for (prefix, _), some in chosen.items() if len(some) >= OFTEN
        ]  # fmt: skip
        return float(np.mean(shares)) if shares else None

    def asking(self, prefix: int, request: int) -> Asking:
        return Asking(prefix, self.data.prefixes[prefix].tokens, request)

    def close(self) -> None:
        self._exits.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def are_flat(rates: Sequence[float]) -> bool:
    """Whether windows' hit rates have stopped moving. Windows are compared in pairs: by importance,
    caches' hit rates keep swinging by several hundredths from one window to the next."""
    one, two, three, four = rates[-4:]
    return abs((three + four) - (one + two)) / 2 < FLAT


def hit_rate(served: Sequence[Served], tier: str = "") -> float:
    """Share of the bytes that came from a tier ("" from any cache)."""
    total = sum(sum(s.bytes_by_tier.values()) for s in served)
    if not total:
        return 0.0
    tiers = [tier] if tier else ["hbm", "dram"]
    return sum(s.bytes_by_tier.get(t, 0) for s in served for t in tiers) / total


def row_hit_rate(served: Sequence[Served], tier: str) -> float:
    """Share of the rows used that came from a tier."""
    total = sum(sum(s.rows_by_tier.values()) for s in served)
    return sum(s.rows_by_tier.get(tier, 0) for s in served) / total if total else 0.0


def interval(
    values: Sequence[float], q: float, seed: int = 0, in_a_row: int = 1
) -> tuple[float, float]:
    """95 % bootstrap interval of a percentile; rows are drawn whole, requests of one are alike."""
    rng = np.random.default_rng(seed)
    rows = np.asarray(values).reshape(-1, in_a_row)
    drawn = rows[rng.integers(len(rows), size=(1000, len(rows)))].reshape(1000, -1)
    low, high = np.percentile(np.percentile(drawn, q, axis=1), (2.5, 97.5))
    return float(low), float(high)


def summary(served: Sequence[Served], in_a_row: int = 1) -> Row:
    """A row of one system: milliseconds as on the paper's disk (divided by the dilation), or by the
    clock where compute was real; `emulated_ms` and `stated_ms` are then of what it waited for."""
    ms = [s.ttft_s / s.dilation * 1e3 for s in served]
    io = [s.io_s / s.dilation * 1e3 for s in served]
    low, high = interval(ms, 50, in_a_row=in_a_row)
    p90_low, p90_high = interval(ms, 90, in_a_row=in_a_row)
    disk = np.percentile([s.disk_gb_s for s in served], (50, 5, 95))
    row: dict[str, Any] = {
        "n": len(ms), "p50_ms": float(np.median(ms)), "p50_low": low, "p50_high": high,
        "p90_ms": float(np.percentile(ms, 90)), "p90_low": p90_low, "p90_high": p90_high,
        "mean_ms": float(np.mean(ms)),
        "io_ms": float(np.median(io)), "io_mean_ms": float(np.mean(io)),
        "emulated_ms": float(np.median([s.compute_s / s.dilation * 1e3 for s in served])),
        "stated_ms": float(np.median([s.stated_s / s.dilation * 1e3 for s in served])),
        "hbm": hit_rate(served, "hbm"), "dram": hit_rate(served, "dram"),
        "hbm_rows": row_hit_rate(served, "hbm"),
        "mb": float(np.mean([sum(s.bytes_by_tier.values()) for s in served])) / 1e6,
        "ssd_mb": float(np.mean([s.bytes_by_tier.get("ssd", 0) for s in served])) / 1e6,
        "ssd_floor_ms": float(np.mean([
            s.bytes_by_tier.get("ssd", 0) / s.disk_gb_s / s.dilation for s in served
        ])) / 1e6,
        "behind_mb": float(np.mean([s.behind_bytes for s in served])) / 1e6,
        "ahead_mb": float(np.mean([s.ahead_bytes for s in served])) / 1e6,
        "ahead_used_mb": float(np.mean([s.ahead_used_bytes for s in served])) / 1e6,
        "fell_back": float(np.mean([s.fell_back for s in served])),
        "recomputed": float(np.mean([s.mode == "recompute" for s in served])),
        "exact": float(np.mean([s.mode == "exact" for s in served])),
        "map_share": sum(s.map_s for s in served) / sum(s.ttft_s for s in served),
        "map_cpu_share": sum(s.map_cpu_s for s in served) / sum(s.ttft_s for s in served),
        "map_beside_share": sum(s.map_beside_s for s in served) / sum(s.ttft_s for s in served),
        "rows": float(np.mean([s.rows_share for s in served])),
        "dilation": float(np.median([s.dilation for s in served])),
        "disk_gb_s": float(disk[0]), "disk_gb_s_low": float(disk[1]),
        "disk_gb_s_high": float(disk[2]),
        "each_ms": " ".join(f"{one:.2f}" for one in ms),  # the same requests for each system
    }  # fmt: skip
    if len(ms) >= 1000:
        row["p99_ms"] = float(np.percentile(ms, 99))
    return row
