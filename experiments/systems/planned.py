"""Choices made before the clock starts, and a policy that hands them out at the right moment.

A session under `Planned` does all that one under the real policy does: it reads the same records,
the same keys, the same rows. Only scoring takes no processor time; in its place is a wait as long
as scoring would take on the stated device. A test checks that the choices are those of the real
policy (tests/test_systems.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

from experiments.systems.generate import Knobs, Prefix
from impress.policy import Policy
from impress.selection.choices import Selection
from impress.selection.identify import Asked, reads_keys, select, shares_rows
from impress.selection.probes import ProbeCodec, codec_of
from impress.selection.scores import column_sums, key_scores
from impress.types import Geometry

#: The request that stands for the prompt's own last rows.
LAST_ROWS: Final = 2_000_000
#: (policy, prefix, request on it) -> a selection for each layer.
Choices = dict[tuple[Policy, int, int], list[Selection]]


@dataclass(frozen=True, slots=True)
class Around:
    """A policy that reads what another reads, and chooses in a way of its own."""

    inner: Policy

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def probe(self) -> str | None:
        return self.inner.probe


@dataclass(frozen=True, slots=True)
class Planned(Around):
    """What `inner` chose for one request. `spend(layer)` waits as long as scoring would."""

    selections: Sequence[Selection]
    spend: Callable[[int], None]
    needs_suffix_lse: bool = False


@select.register
def _(policy: Planned, asked: Asked) -> Selection:
    if reads_keys(policy.inner, asked.layer):
        assert asked.all_keys is not None, "a session gives the layer's keys"
        asked.all_keys()
    policy.spend(asked.layer)
    return policy.selections[asked.layer]


@reads_keys.register
def _(policy: Around, layer: int) -> bool:
    return reads_keys(policy.inner, layer)


@shares_rows.register
def _(policy: Around, layer: int) -> bool:
    return shares_rows(policy.inner, layer)


def choose(
    number: int, prefix: Prefix, policies: Iterable[Policy], requests: Iterable[int],
    geometry: Geometry, knobs: Knobs, window: int = 64,
) -> Choices:  # fmt: skip
    """What each policy chooses for these requests on prefix `number`, whole windows of it."""
    n_tokens = prefix.n_tokens // window * window
    wanted, all_policies = list(requests), list(policies)
    found: Choices = {(p, number, request): [] for p in all_policies for request in wanted}
    codecs: dict[str | None, ProbeCodec] = {
        p.probe: codec_of(p.probe) for p in all_policies if p.probe
    }
    for layer in range(geometry.n_layers):
        keys = prefix.keys(layer)[:, :n_tokens]
        given = cache(
            partial(given_importance, prefix, layer, keys, knobs)
        )  # no request changes it
        records: dict[str | None, Any] = {
            name: codec.encode(keys, geometry) for name, codec in codecs.items()
        }
        for request in wanted:
            query = prefix.query(request, layer, knobs)
            lse = prefix.suffix_lse(request, layer, query)
            for policy in all_policies:
                mine = found[policy, number, request]
                codec = codecs.get(policy.probe)
                asked = Asked(
                    layer, n_tokens, geometry, window, query, geometry.head_dim**-0.5, lse, codec,
                    records.get(policy.probe), None, partial(_this, keys), given,
                    dict(enumerate(mine)),
                )  # fmt: skip
                mine.append(select(policy, asked))
    return found


def _this(keys: Any) -> Any:
    return keys


def given_importance(prefix: Prefix, layer: int, keys: Any, knobs: Knobs) -> Any:
    """What the prompt's last rows attended to when it was stored, as a request of its own."""
    query = prefix.query(LAST_ROWS, layer, knobs)
    lse = prefix.suffix_lse(LAST_ROWS, layer, query)
    per_kv = len(query) // len(keys)

    def score(rows: Any) -> Any:
        return key_scores(rows, keys, query.shape[-1] ** -0.5, per_kv)

    return column_sums(score, query, lse).mean(axis=0)
