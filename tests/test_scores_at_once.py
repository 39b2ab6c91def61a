"""Scores of several heads at once, as devices make them, equal those of one head after another."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from impress.selection import probes, scores
from impress.selection.probes import codec_of
from impress.selection.scores import column_sums, key_scores, suffix_lse_of, true_missing_mass
from impress.types import Geometry

N = 192
ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def made(geometry: Geometry, q: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """keys, query, suffix_lse"""
    some = torch.Generator().manual_seed(3)
    dtype = getattr(torch, geometry.dtype)
    keys = torch.randn(geometry.n_kv_heads, N, geometry.head_dim, generator=some)
    query = torch.randn(geometry.n_heads, q, geometry.head_dim, generator=some) * 2
    lse = torch.randn(geometry.n_heads, q, generator=some)
    return keys.to(dtype), query.to(dtype), lse


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("n_bytes", [1, 4 * 2 * 5 * N * 3, 1 << 30], ids=["one", "three", "all"])
@pytest.mark.parametrize("codec", ["", "heads3-v1", "int4-v2", "int3-v2", "int1-v1"])
@pytest.mark.parametrize(
    "geometry",
    [Geometry(1, 8, 4, 32, "float32"), Geometry(1, 8, 4, 32, "float16"),
     Geometry(1, 4, 4, 64, "bfloat16")],
    ids=["grouped", "half", "brain"],
)  # fmt: skip
def test_heads_at_once_choose_as_one_after_the_other(
    geometry: Geometry, codec: str, n_bytes: int, on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device a layer's choice took 15 to 30 ms, with one launch per step of each head."""
    keys, query, lse = made(geometry)
    heads_per_kv = geometry.n_heads // geometry.n_kv_heads
    record = codec_of(codec).encode(keys, geometry) if codec else None

    def sums(device: str) -> np.ndarray:
        def score(rows: torch.Tensor):
            if record is not None:
                return codec_of(codec).score(record, rows, geometry, 0.17)
            return key_scores(rows, keys.to(device), 0.17, heads_per_kv)

        return column_sums(score, query.to(device), lse.to(device))

    want = sums("cpu")
    asked: list[int] = []

    def at_once(device: torch.device, n_scores: int) -> int:
        asked.append(max(1, n_bytes // (4 * n_scores)))
        return asked[-1]

    for module in (scores, probes):
        monkeypatch.setattr(module, "heads_at_once", at_once)
    got = sums(on)
    assert asked and got.shape == want.shape
    most = 1e-4 if geometry.dtype == "float32" and "int" not in codec else 3e-2
    assert np.abs(got - want).max() <= most * want.max()


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("codec", ["", "int4-v2", "pages16-v1"])
def test_heads_at_once_are_not_rounded_under_autocast(
    codec: str, on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What new tokens weigh was made of scores rounded to 16 bits, and nothing said so."""
    geometry = Geometry(1, 8, 4, 32, "float32")
    keys, query, lse = (each.to(on) for each in made(geometry))
    records = codec_of(codec).encode(keys.cpu(), geometry) if codec else None
    for module in (scores, probes):
        monkeypatch.setattr(module, "heads_at_once", lambda device, n_scores: 2)

    def score(rows: torch.Tensor):
        if records is not None:
            return codec_of(codec).score(records, rows, geometry, 0.17)
        return key_scores(rows, keys, 0.17, 2)

    def told() -> list[np.ndarray]:
        positions = range(N // 2)
        return [
            column_sums(score, query, lse),
            suffix_lse_of(query, keys, 0.17).cpu().numpy(),
            true_missing_mass(query, keys, 0.17, lse, positions),
        ]

    want = told()
    with torch.autocast(on, dtype=torch.bfloat16):
        got = told()
    assert all(map(np.array_equal, want, got))


def test_how_many_heads_fit() -> None:
    device = torch.device("meta")
    assert scores.heads_at_once(torch.device("cpu"), 1) == 1
    assert scores.heads_at_once(device, scores.MOST_BYTES // 16) == 4
    assert scores.heads_at_once(device, scores.MOST_BYTES) == 1
