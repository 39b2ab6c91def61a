"""Policies: what a session loads of a prefix. Data only; impress.selection says what they mean."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from impress.errors import BadInput


class Policy(Protocol):
    """How a session chooses rows."""

    @property
    def name(self) -> str:
        """As it appears in reports."""

    @property
    def needs_suffix_lse(self) -> bool:
        """Whether `retrieve` must be given the log-sum-exp over the new tokens."""

    @property
    def probe(self) -> str | None:
        """The probe codec whose records it reads, None for none."""


def _fixed(value: Any) -> Any:
    """A field that the class sets, not the caller."""
    return field(default=value, init=False, repr=False)


@dataclass(frozen=True, slots=True)
class Exact:
    """Load every row, in position order: bit-identical to continuing from what was stored."""

    name: str = "exact"
    needs_suffix_lse: bool = False
    probe: str | None = None


@dataclass(frozen=True, slots=True)
class Paper:
    """IMPRESS, section 4.3: three heads vote for `keep` of the tokens when they agree.

    They agree when the mean Jaccard index of their top tokens is at least j^alpha, where j is that
    of random sets; with alpha 0 they never agree. With `gate` False they vote in any case. Where
    they do not agree: fallback "layer" loads the layer whole, "heads" reads all its keys and takes
    the union of every KV head's own top tokens. Raises BadInput.
    """

    keep: float = 0.25
    alpha: float = 0.6
    gate: bool = True
    fallback: Literal["layer", "heads"] = "layer"
    name: str = _fixed("paper")
    needs_suffix_lse: bool = _fixed(True)
    probe: str | None = _fixed("heads3-v1")

    def __post_init__(self) -> None:
        _check_keep(self.name, self.keep)
        if not _is_number(self.alpha) or not 0 <= self.alpha <= sys.float_info.max:  # an exponent
            raise _bad("paper: alpha must be a number of at least 0", self.alpha)
        if not isinstance(self.gate, bool):
            raise _bad("paper: gate must be True or False", self.gate)
        if self.fallback not in ("layer", "heads"):
            raise _bad("paper: fallback must be 'layer' or 'heads'", self.fallback)


@dataclass(frozen=True, slots=True)
class Quality:
    """The smallest set of rows that misses at most `max_missing_mass`, by a sketch of all keys.

    The missing mass of a layer is the softmax weight (over prefix and new tokens) on prefix rows
    not loaded: its mean over query rows, and over heads (`per` "mean") or of the worst head
    ("head"). `max_bytes` caps a layer's chosen rows plus the sketch read to choose them (or the
    keys it is made from); where the cap prevents the bound, the estimate in the answer says so. If
    it leaves no room for a window of rows beside the sketch, nothing is chosen: the layer is loaded
    whole, over the cap. `probe`: a codec of every token of every KV head (int or pca). Raises
    BadInput.
    """

    max_missing_mass: float = 0.05
    max_bytes: int | None = None
    per: Literal["mean", "head"] = "mean"
    probe: str | None = "int4-v2"
    name: str = _fixed("quality")
    needs_suffix_lse: bool = _fixed(True)

    def __post_init__(self) -> None:
        mass, cap = self.max_missing_mass, self.max_bytes
        if not _is_number(mass) or not 0 <= mass <= 1:
            raise _bad("quality: max_missing_mass must be a number in [0, 1]", mass)
        if cap is not None and (not isinstance(cap, int) or isinstance(cap, bool) or cap < 1):
            raise _bad("quality: max_bytes must be None or an int of at least 1", cap)
        if self.per not in ("mean", "head"):
            raise _bad("quality: per must be 'mean' or 'head'", self.per)
        if not isinstance(self.probe, str) or not self.probe:
            raise _bad("quality: probe must name a probe codec", self.probe)


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Every row, as `Exact` brings them: among policies that choose, the one that takes all."""

    name: str = _fixed("keep_all")
    needs_suffix_lse: bool = _fixed(False)
    probe: str | None = _fixed(None)


@dataclass(frozen=True, slots=True)
class AllHeads:
    """H2O, simplified: all keys of the layer are read; the top `keep` by the column sums of all
    heads. One set for all heads, chosen once and with no share for the newest tokens, where H2O has
    a set per head, keeps the newest, and goes on while decoding."""

    keep: float = 0.25
    name: str = _fixed("all_heads")
    needs_suffix_lse: bool = _fixed(True)
    probe: str | None = _fixed(None)

    def __post_init__(self) -> None:
        _check_keep(self.name, self.keep)


@dataclass(frozen=True, slots=True)
class Random:
    """`keep` of the rows, by chance; the same for the same seed, layer and prefix length."""

    keep: float = 0.25
    seed: int = 0
    name: str = _fixed("random")
    needs_suffix_lse: bool = _fixed(False)
    probe: str | None = _fixed(None)

    def __post_init__(self) -> None:
        _check_keep(self.name, self.keep)
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            raise _bad("random: seed must be an int of at least 0", self.seed)


@dataclass(frozen=True, slots=True)
class Recency:
    """The last `keep` of the rows."""

    keep: float = 0.25
    name: str = _fixed("recency")
    needs_suffix_lse: bool = _fixed(False)
    probe: str | None = _fixed(None)

    def __post_init__(self) -> None:
        _check_keep(self.name, self.keep)


@dataclass(frozen=True, slots=True)
class StaticH2O:
    """The top `keep` by the importance given when the prefix was stored, whatever the query.

    The Transformers engine gives the attention of the prompt's last 16 rows (hf_observed; after a
    hit, of those that were computed), where H2O takes that of all rows. Simplified as `AllHeads`
    is. The same as SnapWindow(pool=1).
    """

    keep: float = 0.25
    name: str = _fixed("static_h2o")
    needs_suffix_lse: bool = _fixed(False)
    probe: str | None = _fixed(None)

    def __post_init__(self) -> None:
        _check_keep(self.name, self.keep)


@dataclass(frozen=True, slots=True)
class SnapWindow:
    """SnapKV (arXiv 2404.14469): the top `keep` by what the prompt's last rows attended to.

    That attention is the importance given when the prefix was stored; each token takes the largest
    value of its `pool` neighbours (an odd number, itself in the middle), so that a few words are
    kept, not one. Rows are chosen once for a prefix, whatever the query. Simplified: one set for
    all heads, where SnapKV has one for each; the window of those last rows may be dropped, where
    SnapKV always keeps it; a prefix stored in parts pools within its whole length. Raises BadInput.
    """

    keep: float = 0.25
    pool: int = 7
    name: str = _fixed("snap_window")
    needs_suffix_lse: bool = _fixed(False)
    probe: str | None = _fixed(None)

    def __post_init__(self) -> None:
        _check_keep(self.name, self.keep)
        if not _is_count(self.pool) or self.pool % 2 == 0:
            raise _bad("snap_window: pool must be an odd int of at least 1", self.pool)


@dataclass(frozen=True, slots=True)
class Pages:
    """Quest (arXiv 2406.10774): the top `keep` of the pages of 16 tokens, by an upper bound.

    The probe holds the minimum and maximum of each page's keys by channel; their product with the
    query bounds the score of any key in the page. Simplified: one set of pages for all heads and
    all new tokens, by the softmax of those bounds, where Quest chooses per head at each decoded
    token; no layer is exempt. Raises BadInput.
    """

    keep: float = 0.25
    name: str = _fixed("pages")
    needs_suffix_lse: bool = _fixed(True)
    probe: str | None = _fixed("pages16-v1")

    def __post_init__(self) -> None:
        _check_keep(self.name, self.keep)


@dataclass(frozen=True, slots=True)
class Contiguous:
    """ContiguousKV-like (arXiv 2601.13631): the top `keep` of units of `unit` tokens in a row.

    `period` layers in a row share the choice of the first, which reads all its keys and ranks units
    by their column sums, mean over heads. Simplified, from the paper's abstract and from notes:
    rows are read ahead only under `Config.prefetch_bytes` (0 by default), and I/O and caching use
    this store's pieces and chunks. Layers must be retrieved in order. Raises BadInput.
    """

    keep: float = 0.25
    unit: int = 16
    period: int = 8
    name: str = _fixed("contiguous")
    needs_suffix_lse: bool = _fixed(True)
    probe: str | None = _fixed(None)

    def __post_init__(self) -> None:
        _check_keep(self.name, self.keep)
        for what, value in (("unit", self.unit), ("period", self.period)):
            if not _is_count(value):
                raise _bad(f"contiguous: {what} must be an int of at least 1", value)


def _check_keep(policy: str, keep: Any) -> None:
    if not _is_number(keep) or not 0 < keep <= 1:
        raise _bad(f"{policy}: keep must be a number in (0, 1]", keep)


def _bad(said: str, value: Any) -> BadInput:
    """The error for a value that is not what was said."""
    try:
        return BadInput(f"{said}, got {value!r}")
    except ValueError:  # Python writes no int of thousands of digits
        return BadInput(f"{said}, got {type(value).__name__} of too many digits to show")


def _is_number(value: Any) -> bool:
    """True even for NaN, which is in no range. Pure."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
