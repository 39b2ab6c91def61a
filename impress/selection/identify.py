"""Identifiers: which rows of a layer a request needs. Pure: scores and numbers in, a Selection out.

    policy + Asked ─select→ Selection

A new identifier is a policy with a function registered for it (`select.register`), and, if it
wants one, a probe codec of its own (probes.register). Column sums are made where the query is, or,
by all keys, where those are; from there on it is NumPy on the host, the same from every tier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import singledispatch
from typing import TYPE_CHECKING, Any, Final

from impress.errors import BadInput, ImpressError
from impress.policy import (
    AllHeads,
    Contiguous,
    Exact,
    KeepAll,
    Pages,
    Paper,
    Quality,
    Random,
    Recency,
    SnapWindow,
    StaticH2O,
)
from impress.selection.choices import (
    Positions,
    Selection,
    paper_choice,
    pooled,
    quality_choice,
    random_choice,
    recent_choice,
    static_choice,
    top_choice,
    unit_choice,
    whole,
)
from impress.selection.probes import PROBE_HEADS, ProbeCodec, codec_of
from impress.selection.quant import Floats
from impress.selection.scores import Scorer, column_sums, key_scores
from impress.types import Geometry

if TYPE_CHECKING:
    import torch

#: Version of the rules: raised by hand when impress's own identifiers, codecs or the arithmetic
#: under them come to choose other rows for the same settings. Trust is then earned again.
RULES: Final = 2


@dataclass(frozen=True, slots=True)
class Asked:
    """What an identifier may look at: one layer of one request.

    query [n_heads, q, head_dim] after RoPE; suffix_lse float32 [n_heads, q]. `records`: the probe
    codec's, uint8 [groups, probe_bytes] of the whole prefix, contiguous; `from_keys`: they are made
    from all keys, read for that. `all_keys` reads the keys [n_kv_heads, n_tokens, head_dim] of the
    layer: the caller accounts for what it reads. `key_rows`, asked after it: int64 [n_tokens],
    which row of the prefix each of these is, where they come as they lie; None: in order.
    `importance` reads what was given when the prefix was stored, float32 [n_tokens]; ImpressError
    if nothing was. `earlier`: what was chosen in this request's layers so far, by layer.
    """

    layer: int
    n_tokens: int
    geometry: Geometry
    window: int
    query: torch.Tensor | None = None
    scaling: float = 1.0
    suffix_lse: torch.Tensor | None = None
    codec: ProbeCodec | None = None
    records: Any = None
    params: bytes | None = None
    all_keys: Callable[[], torch.Tensor] | None = None
    importance: Callable[[], Floats] | None = None
    earlier: Mapping[int, Selection] = field(default_factory=dict)
    from_keys: bool = False
    key_rows: Callable[[], Positions | None] | None = None

    @property
    def heads_per_kv(self) -> int:
        return self.geometry.n_heads // self.geometry.n_kv_heads

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in the layer, keys and values."""
        return self.geometry.k_row_bytes + self.geometry.v_row_bytes

    @property
    def probe_bytes(self) -> int:
        """Bytes of the layer's probe records."""
        if self.codec is None:
            return 0
        return self.n_tokens // self.codec.group * self.codec.probe_bytes(self.geometry)

    def room(self, max_bytes: int | None) -> int:
        """Most rows that fit under a cap on a layer's bytes beside what is read to choose them."""
        if max_bytes is None:
            return self.n_tokens
        read, each = self.probe_bytes, self.row_bytes
        if self.from_keys:  # a chosen row's K is there already
            read, each = self.n_tokens * self.geometry.k_row_bytes, self.geometry.v_row_bytes
        return max(0, min(self.n_tokens, (max_bytes - read) // each))


@singledispatch
def select(policy: Any, asked: Asked) -> Selection:
    """The rows a policy wants. Raises ImpressError on a policy without an identifier."""
    raise ImpressError(f"policy {policy!r} has no identifier (identify.select.register)")


@singledispatch
def reads_keys(policy: Any, layer: int) -> bool:
    """Whether a policy looks at all keys of this layer whatever the query, so that they can be read
    ahead. One that does but is not registered here gets them when it asks."""
    return isinstance(policy, AllHeads)


@reads_keys.register
def _(policy: Contiguous, layer: int) -> bool:
    return layer % policy.period == 0


@singledispatch
def shares_rows(policy: Any, layer: int) -> bool:
    """Whether this layer's rows are those of the layer before, whatever the query, so that reading
    them ahead is not a guess."""
    return False


@shares_rows.register
def _(policy: Contiguous, layer: int) -> bool:
    return layer % policy.period > 0


@select.register
def _(policy: Exact | KeepAll, asked: Asked) -> Selection:
    return whole("given", fell_back=False)


@select.register
def _(policy: Paper, asked: Asked) -> Selection:
    query, suffix_lse = _seen(asked)
    columns = column_sums(_scorer(asked), query, suffix_lse[:PROBE_HEADS])

    def all_columns() -> Floats:
        return _all_columns(asked, "paper: fallback 'heads'")

    return paper_choice(columns, query.shape[1], policy, all_columns, asked.heads_per_kv)


@select.register
def _(policy: Quality, asked: Asked) -> Selection:
    query, suffix_lse = _seen(asked)
    if not leaves_room(policy, asked):  # under a policy that asks this one: a session asks before
        return whole("no room", fell_back=True)
    columns = column_sums(_scorer(asked), query, suffix_lse)
    seen = (asked.geometry.n_heads, asked.n_tokens)
    if columns.shape != seen:  # a column is one token's, and the bound covers every head
        raise ImpressError(
            f"quality: probe codec {policy.probe!r} scored {columns.shape} heads and tokens of "
            f"{seen}: use one that scores all"
        )
    return quality_choice(
        columns, query.shape[1], policy, asked.row_bytes, asked.probe_bytes, asked.window,
        asked.room(policy.max_bytes),
    )  # fmt: skip


@select.register
def _(policy: AllHeads, asked: Asked) -> Selection:
    columns = _all_columns(asked, "all_heads")
    query, _ = _seen(asked)
    return top_choice(columns, query.shape[1], policy.keep)


@select.register
def _(policy: Random, asked: Asked) -> Selection:
    return random_choice(asked.n_tokens, policy.keep, policy.seed, asked.layer)


@select.register
def _(policy: Recency, asked: Asked) -> Selection:
    return recent_choice(asked.n_tokens, policy.keep)


@select.register
def _(policy: StaticH2O, asked: Asked) -> Selection:
    return static_choice(_importance(asked, policy.name), policy.keep)


@select.register
def _(policy: SnapWindow, asked: Asked) -> Selection:
    return static_choice(pooled(_importance(asked, policy.name), policy.pool), policy.keep)


@select.register
def _(policy: Pages, asked: Asked) -> Selection:
    query, suffix_lse = _seen(asked)
    columns = column_sums(_scorer(asked), query, suffix_lse)
    return unit_choice(columns.sum(axis=0), asked.n_tokens, policy.keep)


@select.register
def _(policy: Contiguous, asked: Asked) -> Selection:
    first = asked.layer - asked.layer % policy.period
    if asked.layer != first:
        if first not in asked.earlier:
            raise ImpressError(
                f"contiguous: layer {asked.layer} shares the rows of layer {first}, "
                "which was not retrieved before it"
            )
        return asked.earlier[first]
    _check_unit(policy, asked.window)
    columns = _all_columns(asked, policy.name).mean(axis=0)
    return unit_choice(columns.reshape(-1, policy.unit).sum(axis=1), asked.n_tokens, policy.keep)


#: Impress's own identifiers by class of policy, before anybody registers others.
OWN: Final = dict(select.registry)


def check_fits(policy: Any, geometry: Geometry, window: int) -> None:
    """Raises BadInput on a policy that can never be followed with such rows and windows."""
    if isinstance(policy, Contiguous):
        _check_unit(policy, window)
    codec = None if policy.probe is None else codec_of(policy.probe)
    if codec is not None and window % codec.group:
        raise BadInput(
            f"{policy.name}: probe codec {codec.name!r} makes records of {codec.group} tokens, "
            f"which do not divide the window of {window}"
        )
    if not isinstance(policy, Quality):
        return
    assert codec is not None, "Quality has one"
    if codec.group != 1 or not codec.all_heads:
        raise BadInput(
            f"quality: probe codec {codec.name!r} does not look at every token of every KV head: "
            "use one that does, as int4-v2"
        )
    least = window * (geometry.k_row_bytes + geometry.v_row_bytes)
    if policy.max_bytes is not None and policy.max_bytes < least:
        raise BadInput(
            f"quality: max_bytes {policy.max_bytes} is under one window of a layer: {least} bytes"
        )


def _check_unit(policy: Contiguous, window: int) -> None:
    if window % policy.unit:
        raise BadInput(
            f"contiguous: unit {policy.unit} does not divide the window of {window} tokens"
        )


def leaves_room(policy: Any, asked: Asked) -> bool:
    """Whether a byte cap leaves room to choose rows: at least a window, beside what that reads."""
    return not isinstance(policy, Quality) or asked.room(policy.max_bytes) >= asked.window


def _seen(asked: Asked) -> tuple[torch.Tensor, torch.Tensor]:
    if asked.query is None or asked.suffix_lse is None:
        raise ImpressError("this policy needs the query and suffix_lse")
    g, shape = asked.geometry, tuple(getattr(asked.query, "shape", ()))
    tensors = all(hasattr(given, "to") for given in (asked.query, asked.suffix_lse))
    fits = len(shape) == 3 and (shape[0], shape[2]) == (g.n_heads, g.head_dim)
    if not tensors or not fits or not shape[1] or tuple(asked.suffix_lse.shape) != shape[:2]:
        raise BadInput(
            f"retrieve: query and suffix_lse want tensors, [{g.n_heads}, q, {g.head_dim}] and "
            f"[{g.n_heads}, q], q at least 1, got {_given(asked.query)} and "
            f"{_given(asked.suffix_lse)}"
        )
    for name, given in (("query", asked.query), ("suffix_lse", asked.suffix_lse)):
        if getattr(given, "is_meta", False):
            raise BadInput(f"retrieve: {name} is a meta tensor, which holds no numbers")
    return asked.query, asked.suffix_lse


def _given(value: Any) -> str:
    """A tensor's shape, else what it is."""
    is_one = hasattr(value, "to") and hasattr(value, "shape")
    return str(list(value.shape)) if is_one else type(value).__name__


def _importance(asked: Asked, who: str) -> Floats:
    if asked.importance is None:
        raise ImpressError(f"{who}: this prefix was stored without importance")
    return asked.importance()


def _scorer(asked: Asked) -> Scorer:
    """Scores from the probe records."""
    codec, geometry = asked.codec, asked.geometry
    if codec is None or asked.records is None:
        raise ImpressError("this policy needs probe records")
    return lambda rows: codec.score(asked.records, rows, geometry, asked.scaling, asked.params)


def _all_columns(asked: Asked, who: str) -> Floats:
    """Column sums [n_heads, n] by the stored keys of all heads, in order wherever these lie."""
    query, suffix_lse = _seen(asked)
    if asked.all_keys is None:
        raise ImpressError(f"{who} needs the layer's keys")
    keys = asked.all_keys()  # in host memory, wherever the query is
    score = _on(keys, asked.scaling, asked.heads_per_kv)
    columns = column_sums(score, query.to(keys.device), suffix_lse)
    rows = None if asked.key_rows is None else asked.key_rows()
    if rows is not None:
        columns[:, rows] = columns.copy()
    return columns


def _on(keys: torch.Tensor, scaling: float, heads_per_kv: int) -> Scorer:
    return lambda rows: key_scores(rows, keys, scaling, heads_per_kv)
