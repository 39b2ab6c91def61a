"""The rivals' selectors against what their papers say, on inputs small enough to do by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impress import BadInput, Geometry, ImpressError
from impress.policy import Contiguous, Pages, Policy, SnapWindow, StaticH2O
from impress.selection.choices import pooled, unit_choice
from impress.selection.identify import Asked, select
from impress.selection.probes import codec_of
from impress.selection.probes_pages import MinMax

WINDOW = 32


def drawn(geometry: Geometry, n_tokens: int, seed: int, spread: float = 1.0) -> Any:
    draw = torch.Generator().manual_seed(seed)
    shape = (geometry.n_kv_heads, n_tokens, geometry.head_dim)
    return (spread * torch.randn(shape, generator=draw)).to(getattr(torch, geometry.dtype))


def asked(geometry: Geometry, keys: Any, query: Any, layer: int = 0, **more: Any) -> Asked:
    lse = torch.full(query.shape[:2], -20.0)
    return Asked(
        layer, keys.shape[1], geometry, WINDOW, query, 0.5, lse, all_keys=lambda: keys, **more
    )


# ---- pages -------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    heads=st.sampled_from([(2, 2), (4, 2), (4, 1)]),
    spread=st.sampled_from([1e-6, 1.0, 300.0]),
    seed=st.integers(0, 999),
)
def test_no_key_of_a_page_scores_above_its_bound(
    dtype: str, heads: tuple[int, int], spread: float, seed: int
) -> None:
    geometry = Geometry(1, *heads, 8, dtype)
    codec = codec_of("pages16-v1")
    keys = drawn(geometry, 48, seed, spread)
    query = torch.randn(heads[0], 3, 8, generator=torch.Generator().manual_seed(seed + 1))
    records = codec.encode(keys, geometry)
    assert records.shape == (3, codec.probe_bytes(geometry))
    bounds = torch.cat([part.scores for part in codec.score(records, query, geometry, 0.5)])
    wide = keys.to(torch.float64).repeat_interleave(heads[0] // heads[1], 0)
    scores = 0.5 * query.to(torch.float64) @ wide.transpose(1, 2)
    most = scores.view(heads[0], 3, 3, 16).amax(-1)
    assert (bounds >= most - 1e-5 * bounds.abs().amax()).all()
    # and no looser than the corner of the page's box
    low, high = (getattr(wide.view(heads[0], 3, 16, 8), name)(2) for name in ("amin", "amax"))
    q = query.to(torch.float64)[:, :, None]
    corner = 0.5 * torch.maximum(q * low[:, None], q * high[:, None]).sum(-1)
    assert (bounds <= corner + 2e-3 * spread * q.abs().sum(-1) + 1e-6).all()


def test_keys_that_float16_cannot_hold_load_the_layer_whole() -> None:
    geometry = Geometry(1, 2, 2, 4, "float32")
    keys = drawn(geometry, 64, 0)
    keys[0, 5] = 1e6
    query = torch.ones(2, 1, 4)
    codec = codec_of("pages16-v1")
    got = select(
        Pages(0.25),
        asked(geometry, keys, query, codec=codec, records=codec.encode(keys, geometry)),
    )
    assert got.positions is None and got.fell_back and got.reason == "not finite"


def test_the_page_that_holds_what_is_looked_at_is_brought_whole() -> None:
    geometry = Geometry(1, 2, 2, 4, "float32")
    keys = 0.01 * drawn(geometry, 64, 0)
    keys[:, 37] = 8.0
    query = torch.ones(2, 2, 4)
    codec = codec_of("pages16-v1")
    given_to = asked(geometry, keys, query, codec=codec, records=codec.encode(keys, geometry))
    got = select(Pages(0.25), given_to)
    assert got.positions is not None and got.positions.tolist() == list(range(32, 48))
    assert select(Pages(1.0), given_to).positions is None
    assert isinstance(codec, MinMax) and codec.probe_bytes(geometry) == 2 * 2 * 4 * 2


# ---- contiguous --------------------------------------------------------------------------------


def test_a_period_shares_the_units_its_first_layer_chose() -> None:
    geometry = Geometry(4, 2, 1, 4, "float32")
    keys = 0.01 * drawn(geometry, 64, 0)
    keys[:, 3] = keys[:, 50] = 6.0
    query = torch.ones(2, 1, 4)
    policy = Contiguous(0.5, unit=16, period=2)
    first = select(policy, asked(geometry, keys, query, 2))
    assert first.positions is not None
    assert first.positions.tolist() == [*range(16), *range(48, 64)]

    def unread() -> Any:
        raise AssertionError("a layer that shares reads no keys to choose by")

    shared = Asked(3, 64, geometry, WINDOW, query, all_keys=unread, earlier={2: first})
    assert select(policy, shared) is first
    with pytest.raises(ImpressError, match="layer 3 shares the rows of layer 2"):
        select(policy, Asked(3, 64, geometry, WINDOW, query))
    with pytest.raises(ImpressError, match="does not divide"):
        select(Contiguous(0.5, unit=24), asked(geometry, keys, query))


# ---- snap window -------------------------------------------------------------------------------


@given(
    st.lists(st.floats(0, 1, width=32), min_size=1, max_size=30),
    st.sampled_from([1, 3, 7, 9, 31, 101]),
)
def test_pooling_takes_the_largest_of_the_neighbours(values: list[float], width: int) -> None:
    half = width // 2
    want = [max(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
    assert pooled(np.array(values, dtype=np.float32), width).tolist() == want


def test_a_pool_that_is_wider_than_any_prefix_takes_the_largest_of_all() -> None:
    """Its whole width was padded: a million took minutes per hit, and a width beyond 64 bits
    raised TypeError out of generate()."""
    values = np.random.default_rng(0).random(100, dtype=np.float32)
    for width in (2 * len(values) - 1, 10**30 + 1, 10**9 + 1):
        assert pooled(values, width).tolist() == [values.max()] * len(values)


def test_a_word_is_kept_with_its_neighbours() -> None:
    geometry = Geometry(1, 2, 2, 4, "float32")
    importance = np.zeros(64, dtype=np.float32)
    importance[[20, 40]] = 1.0, 0.5
    got = select(
        SnapWindow(3 / 64, pool=3),
        asked(geometry, drawn(geometry, 64, 0), torch.ones(2, 1, 4), importance=lambda: importance),
    )
    assert got.positions is not None and got.positions.tolist() == [19, 20, 21]


@given(
    st.lists(st.floats(0, 1, width=32), min_size=1, max_size=64),
    st.sampled_from([0.01, 0.25, 0.5, 1.0]),
)
def test_a_pool_of_one_is_static_h2o(values: list[float], keep: float) -> None:
    """The Transformers engine gives both the same importance, so one stands for the other there."""
    importance = np.array(values, dtype=np.float32)
    asked_of = Asked(
        0, len(values), Geometry(1, 2, 2, 4, "float32"), WINDOW, importance=lambda: importance
    )
    static, snap = (select(policy, asked_of) for policy in (StaticH2O(keep), SnapWindow(keep, 1)))
    np.testing.assert_equal(snap.positions, static.positions)


# ---- all ---------------------------------------------------------------------------------------


def test_units_that_are_all_kept_are_the_whole_layer() -> None:
    got = unit_choice(np.ones(4, dtype=np.float32), 64, 0.99)
    assert got.positions is None and not got.fell_back


def test_one_unit_of_a_score_without_order_loads_the_layer_whole() -> None:
    for score in (np.nan, np.inf):
        got = unit_choice(np.array([1, score, 0, 0], dtype=np.float32), 64, 0.25)
        assert got.positions is None and got.fell_back and got.reason == "not finite"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Pages(0), "pages: keep"),
        (lambda: Contiguous(2.0), "contiguous: keep"),
        (lambda: Contiguous(unit=0), "unit must be an int"),
        (lambda: Contiguous(period=True), "period must be an int"),
        (lambda: SnapWindow(pool=4), "odd int"),
        (lambda: SnapWindow(keep=float("nan")), "snap_window: keep"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: Any, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        made: Policy = make()
        del made
