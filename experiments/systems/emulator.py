"""Is the emulator right where compute is real? The small model that looks things up is asked.

Numbers of this processor are fitted on requests of two lengths: its arithmetic rate on prompts that
hit nothing; on hits, what they do before their reads begin, what a choice of rows costs, and what
is none of arithmetic, reading and choosing. Then requests of a length in between are served twice a
round: for real by the Transformers engine, and by the emulator, which waits where the engine
computes and reads the same rows from the same store. How long reads and waits take that go on
beside each other is fitted nowhere: that is the question.
Where the medians differ by more than `MOST_ERROR`, the emulated experiments withdraw.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import torch

import impress
from experiments.common import Row
from experiments.systems.catalogue import System
from experiments.systems.clock import MOST_ERROR, Clock, Compute, Roofline
from experiments.systems.device import Emulated, score_seconds
from experiments.systems.generate import N_NEW
from experiments.systems.serve import Asking, Server
from experiments.systems.shapes import Shape
from impress.demo.lookup.tasks import document
from impress.engines import hf
from impress.engines.hf_chosen import ChosenCache
from impress.policy import Exact, Paper, Policy, Quality
from impress.read.session import Session
from impress.read.sparse import SparseSession
from impress.selection.choices import Selection
from impress.selection.identify import Asked, select
from impress.store import PrefixStore

CHECKPOINT: Final = "specialised"
#: Document lengths the rates are fitted at, and the one between them that is predicted.
FITTED: Final = (512, 1536)
PREDICTED: Final = 1024
#: Rounds that only fit; and how many of the last ones a fit uses, since machines change speed.
FIRST: Final = 4
LAST: Final = 5
_POLICIES: Final[dict[str, Policy]] = {
    "recompute": Exact(), "exact": Exact(), "paper": Paper(0.25), "quality": Quality(0.1),
}  # fmt: skip
_CHOOSING: Final = ("paper", "quality")
_HITS: Final = ("exact", *_CHOOSING)
_CONFIG: Final = impress.Config(
    probes=("heads3-v1", "int4-v2"), dram_bytes=0, mode="sparse", durable=False, io_threads=2,
    segment_bytes=64 << 20, read_gap_bytes=16 << 10,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recording:
    """A policy that keeps what another chose, and how long that took."""

    inner: Policy
    kept: list[tuple[Selection, float]]
    name: str
    probe: str | None
    needs_suffix_lse: bool = True


@select.register
def _(policy: Recording, asked: Asked) -> Selection:
    begin = time.perf_counter()
    selection = select(policy.inner, asked)
    policy.kept.append((selection, time.perf_counter() - begin))
    return selection


@dataclass(frozen=True, slots=True)
class Hit:
    """What one hit's seconds were spent on, besides looking it up and reading.

    `before_s`: until its reads began; `rest_s`: from then on, all but reading and choosing, such as
    the layers' arithmetic; `choosing_s`: one layer's, including laying its rows down.
    """

    selections: list[Selection]
    before_s: float
    rest_s: float
    choosing_s: float


@dataclass(slots=True)
class Real:
    """The engine over a store that holds one document of each length."""

    engine: hf.Engine
    empty: hf.Engine  # nothing is ever stored here: every request computes
    shape: Shape

    @classmethod
    def of(cls, folder: Path) -> Real:
        from transformers import AutoModelForCausalLM

        where = Path(impress.__file__).parent / "demo" / "lookup" / CHECKPOINT
        model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval()
        engine = hf.attach(model, folder / "full", config=_CONFIG)
        empty = hf.attach(model, folder / "empty", config=_CONFIG, store_new=False)
        c = model.config
        shape = Shape(
            "lookup", c.num_hidden_layers, c.num_attention_heads, c.num_attention_heads,
            c.hidden_size // c.num_attention_heads, c.ffn_dim, dtype="float32",
        )  # fmt: skip
        for n in (*FITTED, PREDICTED):
            engine.generate(torch.tensor([_tokens(n)]), max_new_tokens=1)
        engine.flush()
        return cls(engine, empty, shape)

    def ttft_s(self, n: int, mode: str) -> float:
        """One real request: n tokens of a document and N_NEW after them."""
        engine = self.empty if mode == "recompute" else self.engine
        prompt = torch.tensor([[*_tokens(n), *_question()]])
        engine.generate(prompt, max_new_tokens=1, do_sample=False, policy=_POLICIES[mode])
        request = engine.last_request
        assert request is not None
        assert request.hit_tokens == (0 if mode == "recompute" else n), "another way was taken"
        return request.ttft_ms / 1e3

    def hit(self, n: int, mode: str) -> Hit:
        """One real hit, as in `ttft_s`, broken down."""
        policy = _POLICIES[mode]
        kept: list[tuple[Selection, float]] = []
        asked = Recording(policy, kept, policy.name, policy.probe) if mode in _CHOOSING else policy
        kind = SparseSession if mode in _CHOOSING else Session
        prompt = torch.tensor([[*_tokens(n), *_question()]])
        with (
            _timed(PrefixStore, "lease") as lookups, _timed(kind, "prefetch") as ahead,
            _timed(ChosenCache, "choose") as choices, _timed(Session, "retrieve") as reads,
        ):  # fmt: skip
            begin = time.perf_counter()
            self.engine.generate(prompt, max_new_tokens=1, do_sample=False, policy=asked)
        request = self.engine.last_request
        assert request is not None and len(ahead) == 1 and len(reads) == self.shape.n_layers
        looked_s, asked_s = _sum(lookups), _sum(ahead)
        before_s = ahead[0][0] - begin - looked_s
        waits_s = _sum(choices if mode in _CHOOSING else reads)
        return Hit(
            [selection for selection, _ in kept],
            before_s,
            request.ttft_ms / 1e3 - before_s - looked_s - asked_s - waits_s,
            (sum(took for _, took in kept) + waits_s - _sum(reads)) / self.shape.n_layers,
        )

    def close(self) -> None:
        self.engine.close()
        self.empty.close()


@contextmanager
def _timed(owner: type, name: str) -> Iterator[list[tuple[float, float]]]:
    """When each call of a method began while the block runs, and how many seconds it took."""
    real, took = getattr(owner, name), []

    def timing(*args: object, **more: object) -> object:
        begin = time.perf_counter()
        try:
            return real(*args, **more)
        finally:
            took.append((begin, time.perf_counter() - begin))

    setattr(owner, name, timing)
    try:
        yield took
    finally:
        setattr(owner, name, real)


def _sum(took: Sequence[tuple[float, float]]) -> float:
    return sum(seconds for _, seconds in took)


def _tokens(n: int) -> list[int]:
    return list(document("calibration", n, n).tokens)


def _question() -> list[int]:
    return list(document("calibration", 0, 512).tokens[:N_NEW])


@dataclass(slots=True)
class Times:
    """Seconds of what is fitted, round by round, so that a busy minute affects all."""

    dense: dict[int, list[float]] = field(default_factory=dict)
    hits: dict[tuple[str, int], list[Hit]] = field(default_factory=dict)

    def one_round(self, real: Real) -> None:
        """Each of them once more."""
        real.ttft_s(PREDICTED, "recompute")  # not counted: after the last round's waits it is slow
        for n in FITTED:
            self.dense.setdefault(n, []).append(real.ttft_s(n, "recompute"))
            for mode in _HITS:
                self.hits.setdefault((mode, n), []).append(real.hit(n, mode))

    def rooflines(self, real: Real) -> dict[str, Roofline]:
        """This processor as a roofline, for each kind of request."""
        compute = Compute(real.shape, Roofline("", 1.0, math.inf, 1.0, 1.0))
        flops = [real.shape.n_layers * compute.layer(n + N_NEW, 0) for n in FITTED]
        slope, base = np.polyfit(flops, [_lately(self.dense[n]) for n in FITTED], 1)
        device = Roofline("this processor", 1 / max(slope, 1e-15), math.inf, 1.0, 1.0)
        found = {"recompute": replace(device, request_s=max(base, 0.0))}
        compute = Compute(real.shape, device)
        for mode in _HITS:
            lines = [self._fit(real, compute, mode, n) for n in FITTED]
            before, beside, score = (
                max(float(np.interp(PREDICTED, FITTED, some)), 0.0)
                for some in zip(*lines, strict=True)
            )
            found[mode] = replace(device, request_s=before, beside_s=beside, score_s=score)
        return found

    def _fit(self, real: Real, compute: Compute, mode: str, n: int) -> tuple[float, float, float]:
        """For requests of one length: before the reads, beside them, each choice of rows."""
        hits = self.hits[mode, n]
        rows = [selection.n_rows(n) for selection in hits[-1].selections] or [n]
        forward = sum(compute.layer(N_NEW, m) for m in rows) * real.shape.n_layers / len(rows)
        scored = 0.0
        if mode in _CHOOSING:
            scored = score_seconds(compute, real.shape.geometry(1), _POLICIES[mode], n)
        return (
            _lately([hit.before_s for hit in hits]),
            _lately([hit.rest_s for hit in hits]) - forward,
            _lately([hit.choosing_s for hit in hits]) - scored,
        )


def _lately(seconds: Sequence[float]) -> float:
    return median(seconds[-LAST:])


def check(folder: Path, rounds: int) -> list[Row]:
    """Predicted and real milliseconds of each kind of request, and how far they are apart.

    Every round fits once more, then serves each kind for real, then emulated: other load on the
    machine affects all of it. Real requests follow each other, as those that are fitted do: after
    emulated ones the next took a tenth longer. The median of the rounds' ratios is taken.
    """
    torch.set_num_threads(1)
    real = Real.of(folder)
    try:
        chosen = {mode: real.hit(PREDICTED, mode).selections for mode in _HITS}
        times = Times()
        took: dict[str, list[tuple[float, float]]] = {}
        for turn in range(FIRST + rounds):
            times.one_round(real)
            if turn < FIRST:
                continue
            devices = times.rooflines(real)
            measured = {mode: real.ttft_s(PREDICTED, mode) for mode in devices}
            for mode, device in devices.items():
                server = _server(real, device, mode, chosen.get(mode, []))
                emulated = server.serve(_asking(PREDICTED)).ttft_s
                took.setdefault(mode, []).append((measured[mode], emulated))
        return [_apart(mode, some) for mode, some in took.items()]
    finally:
        real.close()


def _apart(mode: str, took: Sequence[tuple[float, float]]) -> Row:
    """`took`: real and emulated seconds, round by round."""
    return {
        "mode": mode, "real_ms": median(real for real, _ in took) * 1e3,
        "emulated_ms": median(emulated for _, emulated in took) * 1e3,
        "error": abs(median(emulated / real for real, emulated in took) - 1),
    }  # fmt: skip


def _server(real: Real, device: Roofline, mode: str, chosen: list[Selection]) -> Server:
    policy = _POLICIES[mode]
    system = System(mode, mode, "" if mode == "recompute" else "plain", policy)
    geometry = real.shape.geometry(real.shape.n_layers)
    waits = Emulated(Compute(real.shape, device), geometry, Clock(1.0), {(policy, 0, 0): chosen})
    return Server(system, waits, geometry, None if mode == "recompute" else real.engine.store)


def _asking(n: int) -> Asking:
    return Asking(0, np.array(_tokens(n), dtype=np.int32), 0)


def worst(rows: Sequence[Row]) -> float:
    return max(float(row["error"]) for row in rows)


def verdict(error: float) -> str:
    """One line for people."""
    said = f"the emulator is off by at most {error:.1%} where compute is real"
    if error <= MOST_ERROR:
        return said
    return f"withdrawn: {said}, more than {MOST_ERROR:.0%}; nothing emulated is reported"
