"""Where a request's model computes: waits that stand for a device, or a device (`cuda.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from experiments.systems.clock import Clock, Compute
from experiments.systems.generate import N_NEW
from experiments.systems.planned import Choices, Planned
from experiments.systems.shapes import Shape
from impress.policy import Policy
from impress.selection.identify import shares_rows
from impress.selection.probes import codec_of
from impress.types import Geometry


class Question(NamedTuple):
    """A policy as sessions get it, and what `retrieve` is called with in a layer: query, scaling
    and suffix_lse."""

    policy: Policy
    asked: Callable[[int], tuple[Any, float | None, Any]]


class Rows(NamedTuple):
    """What a session brought of a layer: k, v [n_kv_heads, m, head_dim], on the host or not.

    `positions`: where they belong, if not where they lie; None: they are in place. `chosen`: k then
    has all rows, which were looked at to choose, and v those at these positions of k.
    """

    k: Any
    v: Any
    positions: Any = None
    bits: int = 16
    chosen: Any = None


def in_order() -> None:
    """Which row each of a layer's keys is: None, as they come in order."""


class Device(Protocol):
    """One request at a time. `spent_s`: seconds since `start` spent standing still for it;
    `stated_s`: those asked for. `dilation`: how many times longer all takes than it should."""

    key_rows: Callable[[], Any]
    """Which row each is of the keys that a layer was last chosen by; None: in order."""

    @property
    def shape(self) -> Shape:
        """The model's shape."""

    @property
    def dilation(self) -> float:
        """See above."""

    @property
    def spent_s(self) -> float:
        """See above."""

    @property
    def stated_s(self) -> float:
        """See above."""

    def pace(self, dilation: float) -> None:
        """From now on take `dilation` times as long as stated; 0: pass at once."""

    def start(self) -> float:
        """Start a request. Returns the clock's seconds."""

    def beside(self) -> None:
        """The compute that goes on beside a request's first reads."""

    def forward(self, layer: int, n_tokens: int) -> None:
        """A layer of a prompt that hits nothing."""

    def project(self, layer: int) -> None:
        """Queries, keys and values of the new tokens."""

    def question(self, inner: Policy, prefix: int, request: int, n_tokens: int) -> Question:
        """How a request chooses rows under a policy."""

    def attend(self, layer: int, rows: Rows) -> float:
        """The rest of a layer, once its rows have come: they are first put where they belong.
        Returns the seconds that copies to the device kept this thread."""

    def finish(self) -> None:
        """Return when the first token is there."""

    def forward_s(self, n_tokens: int) -> float:
        """About the seconds that all layers take for a prompt that hits nothing."""


class Emulated:
    """Waits, as long as a stated roofline says, on the clock that real reads run on."""

    def __init__(
        self, compute: Compute, geometry: Geometry, clock: Clock, choices: Choices
    ) -> None:
        """`choices`: made in advance, for each request that will choose."""
        self.shape = compute.shape
        self.key_rows: Callable[[], Any] = in_order
        self.clock = clock
        self._compute = compute
        self._geometry = geometry
        self._choices = choices

    @property
    def dilation(self) -> float:
        return self.clock.dilation

    @property
    def spent_s(self) -> float:
        return self.clock.spent_s

    @property
    def stated_s(self) -> float:
        return self.clock.stated_s

    def pace(self, dilation: float) -> None:
        self.clock.dilation = dilation

    def start(self) -> float:
        begin = self.clock.start()
        self.clock.spend(self._compute.device.request_s)
        return begin

    def beside(self) -> None:
        self.clock.spend(self._compute.device.beside_s)

    def forward(self, layer: int, n_tokens: int) -> None:
        self.clock.spend(self._compute.layer(n_tokens, 0))

    def project(self, layer: int) -> None:
        self.clock.spend(self._compute.project(N_NEW))

    def question(self, inner: Policy, prefix: int, request: int, n_tokens: int) -> Question:
        selections = self._choices[inner, prefix, request]
        policy = Planned(inner, selections, partial(self._score, inner, n_tokens))
        return Question(policy, lambda _layer: (None, None, None))

    def attend(self, layer: int, rows: Rows) -> float:
        n_rows = rows.v.shape[1]
        if rows.chosen is not None:  # its keys are there, among all of them
            self.clock.spend(self._compute.place(n_rows) / 2)
        if rows.positions is not None:
            self.clock.spend(self._compute.place(n_rows))
        if rows.bits < 16:
            self.clock.spend(self._compute.dequantise(n_rows, rows.bits))
        self.clock.spend(self._compute.attend(N_NEW, n_rows))
        return 0.0

    def finish(self) -> None:
        """Waits are over when they return."""

    def forward_s(self, n_tokens: int) -> float:
        return self._compute.layer(n_tokens, 0) * self.shape.n_layers

    def _score(self, inner: Policy, n_tokens: int, layer: int) -> None:
        if not shares_rows(inner, layer):
            self.clock.spend(score_seconds(self._compute, self._geometry, inner, n_tokens))


def score_seconds(compute: Compute, geometry: Geometry, policy: Policy, n_tokens: int) -> float:
    """What choosing a layer's rows takes on the device: scores of what the policy looks at."""
    if not policy.needs_suffix_lse:
        return 0.0
    heads = geometry.n_heads
    if policy.probe is None:
        return compute.score(N_NEW, n_tokens, heads, n_tokens * geometry.k_row_bytes)
    codec = codec_of(policy.probe)
    if codec.name.startswith("heads3"):
        heads = min(3, heads)
    groups = n_tokens // codec.group
    return compute.score(N_NEW, groups, heads, groups * codec.probe_bytes(geometry))


def stood_still(device: Device, since_s: float, spent_s: float) -> float:
    """Seconds since then that were not spent on computing."""
    return time.perf_counter() - since_s - (device.spent_s - spent_s)
