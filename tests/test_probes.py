"""Probe codecs: what is stored comes back as scores, within the error each codec claims."""

from __future__ import annotations

import itertools
import subprocess
import sys
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impress.errors import BadInput, ImpressError
from impress.selection import products
from impress.selection.probes import Heads3, LowBit, codec_of, fitted, register
from impress.selection.probes_pca import Pca
from impress.selection.quant import (
    dequantise,
    pack_codes,
    packed_bytes,
    quantise,
    turns_of,
    unpack_codes,
)
from impress.selection.scratch import MOST_BYTES, _free, _stream, drop_scratch, scratch
from impress.spans.rows import host_words
from impress.types import Geometry

pytestmark = pytest.mark.usefixtures("one_thread")

LOW_BIT = ["int4-v2", "int3-v2", "int2-v2", "int1-v1"]
PCA = ["pca37-v1", "pca25-v1", "pca12-v1"]


def keys_and_query(
    geometry: Geometry, n: int = 128, q: int = 3, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [n_kv_heads, n, dim] as token-major memory, and a query [n_heads, q, dim]."""
    make = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, geometry.dtype)
    rows = torch.randn(n, geometry.n_kv_heads, geometry.head_dim, generator=make)
    query = torch.randn(geometry.n_heads, q, geometry.head_dim, generator=make)
    return rows.to(dtype).transpose(0, 1), query.to(dtype)


def plain_scores(keys: torch.Tensor, query: torch.Tensor, scaling: float) -> np.ndarray:
    """[n_heads, q, n] in float64, head by head."""
    k, q = keys.to(torch.float64).numpy(), query.to(torch.float64).numpy()
    per_kv = len(q) // len(k)
    return np.stack([q[h] @ k[h // per_kv].T * scaling for h in range(len(q))])


def scored(
    codec: Any, records: Any, query: torch.Tensor, geometry: Geometry, params: bytes | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    scores, noise = [], []
    for part in codec.score(records, query, geometry, 0.25, params):
        scores.append(part.scores.clone())
        if part.noise is not None:
            noise.append(part.noise.clone())
    return torch.cat(scores).numpy(), torch.cat(noise).numpy() if noise else None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("n_heads", "n_kv", "stored"), [(8, 8, 3), (8, 4, 2), (8, 2, 1), (2, 1, 1)]
)
def test_heads3_holds_the_kv_heads_of_the_first_query_heads(
    dtype: str, n_heads: int, n_kv: int, stored: int
) -> None:
    geometry = Geometry(1, n_heads, n_kv, 16, dtype)
    keys, query = keys_and_query(geometry)
    codec = Heads3()
    records = codec.encode(keys, geometry)
    assert records.shape == (128, codec.probe_bytes(geometry))
    back = codec.keys(records, geometry, keys.device)
    assert torch.equal(back, keys[:stored])
    scores, noise = scored(codec, records, query, geometry)
    assert noise is None and len(scores) == min(3, n_heads)
    loose = {"float16": 4e-3, "bfloat16": 4e-2, "float32": 1e-5}[dtype]
    want = plain_scores(keys, query, 0.25)[: len(scores)]
    np.testing.assert_allclose(scores, want, atol=loose, rtol=loose)


@pytest.mark.parametrize("name", ["heads3-v1", *LOW_BIT])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_words_arrays_and_tensors_encode_alike(name: str, dtype: str) -> None:
    geometry = Geometry(1, 4, 2, 24, dtype)
    keys, _ = keys_and_query(geometry)
    codec = codec_of(name)
    records = codec.encode(keys, geometry)
    assert np.array_equal(records, codec.encode(host_words(keys, geometry).copy(), geometry))
    if dtype != "bfloat16":
        assert np.array_equal(records, codec.encode(keys.numpy(), geometry))


@pytest.mark.parametrize("name", ["heads3-v1", *LOW_BIT])
def test_windows_encode_one_by_one_as_together(name: str) -> None:
    geometry = Geometry(1, 4, 4, 32, "float16")
    keys, _ = keys_and_query(geometry, n=640)
    codec = codec_of(name)
    parts = [codec.encode(keys[:, at : at + 64], geometry) for at in range(0, 640, 64)]
    assert np.array_equal(np.concatenate(parts), codec.encode(keys, geometry))


@given(
    bits=st.integers(1, 4), length=st.integers(1, 70), n=st.integers(1, 5), seed=st.integers(0, 99)
)
@settings(max_examples=60)
def test_codes_come_back_from_their_bytes(bits: int, length: int, n: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (n, length), dtype=np.uint8)
    packed = np.full((n, packed_bytes(length, bits)), 0xAA, dtype=np.uint8)
    pack_codes(codes, bits, packed)
    out = torch.zeros(n, length, dtype=torch.uint8)
    unpack_codes(torch.from_numpy(packed), length, bits, out)
    assert np.array_equal(out.numpy(), codes)


@given(
    bits=st.sampled_from([2, 3, 4, 8]), length=st.integers(1, 40),
    group=st.sampled_from([8, 32, 64]), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60)
def test_codes_err_by_at_most_half_a_step_and_hardly_at_the_largest_value(
    bits: int, length: int, group: int, scale: float, seed: int
) -> None:
    values = np.random.default_rng(seed).normal(size=(2, length)).astype(np.float32) * scale
    codes, scales = quantise(values.astype(np.float32), bits, group)
    back = dequantise(torch.from_numpy(codes), torch.from_numpy(scales), bits, group).numpy()
    steps = np.repeat(scales.astype(np.float32), group, axis=1)[:, :length]
    half = 1 << (bits - 1)
    # A scale is rounded: by this much at the outermost level, and below float16's normal range.
    rounding = steps * half * 2.0**-11 + np.where(steps < 2.0**-14, half * 2.0**-25, 0.0)
    assert (np.abs(back - values) <= steps * 0.501 + rounding).all()
    for first in range(0, length, group):
        part = slice(first, first + group)
        rows = np.arange(2), np.abs(values[:, part]).argmax(axis=1)
        err = np.abs(back[:, part] - values[:, part])[rows]
        assert (err <= rounding[:, part][rows]).all()


def test_turns_are_part_of_the_format() -> None:
    """Records on disk mean what they do by these numbers; each column has the same sixteen."""
    turns = turns_of(128)
    assert (turns[:4, :3] * 32).tolist() == [
        [11, -5, -11], [-3, 3, -15], [-15, -15, 13], [15, 5, 5],
    ]  # fmt: skip
    all_sixteen = blake2b((turns * 32).astype(np.int8).tobytes(), digest_size=16)
    assert all_sixteen.hexdigest() == "5ac2357a53405937801391314a0ce026"
    assert np.array_equal(np.sort(turns, axis=0), np.tile(np.sort(turns[:, :1], axis=0), 128))
    assert np.array_equal(turns_of(64), turns[:, :64]) and not turns.flags.writeable


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_with_turns_values_smaller_than_a_step_come_back_in_the_mean(bits: int) -> None:
    values = np.full((64, 40), 0.01, dtype=np.float32)
    values[:, 7] = 20
    codes, scales = quantise(values, bits, 40, turns_of(40))
    back = (codes + 0.5 - (1 << (bits - 1)) - np.tile(turns_of(40), (4, 1))) * scales
    assert (np.abs(back - values) <= scales * 0.501).all()
    assert (np.abs((back - values).mean(axis=0)) <= scales.mean() / 31).all()


def test_zeros_and_huge_values_stay_finite() -> None:
    values = np.array([[0.0, 0.0], [1e30, -1e30], [1e-30, 0.0]], dtype=np.float32)
    codes, scales = quantise(values, 4, 2)
    back = dequantise(torch.from_numpy(codes), torch.from_numpy(scales), 4, 2)
    assert torch.isfinite(back).all()
    assert back[[0, 2]].abs().max() < 1e-6


@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize("name", LOW_BIT)
@pytest.mark.parametrize("shape", [(4, 4, 32), (8, 2, 64), (3, 3, 5), (2, 1, 6)])
def test_low_bit_scores_err_by_about_the_noise_they_state(
    name: str, shape: tuple[int, int, int], integers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if integers and not products.integer_products("cpu"):
        pytest.skip("this processor has no int8 products")
    monkeypatch.setattr(products, "integer_products", lambda device: integers)
    geometry = Geometry(1, *shape, "float32")
    keys, query = keys_and_query(geometry, n=256)
    codec = codec_of(name)
    records = codec.encode(keys, geometry)
    assert records.shape == (256, codec.probe_bytes(geometry))
    scores, noise = scored(codec, records, query, geometry)
    assert noise is not None and noise.shape == scores.shape[:2]
    error = np.square(scores - plain_scores(keys, query, 0.25)).mean()
    assert 0.25 * noise.mean() < error < 4 * noise.mean()


@pytest.mark.parametrize("name", ["int4-v2", "int3-v2"])
@pytest.mark.parametrize("n_rows", [2, 40])
def test_a_small_row_of_a_query_beside_a_large_one_errs_by_no_more(name: str, n_rows: int) -> None:
    """All rows of a head were rounded by the largest, and the stated noise did not know of that."""
    geometry = Geometry(1, 4, 2, 64, "float32")
    keys, query = keys_and_query(geometry, n=256, q=n_rows)
    query[:, 0] *= 1000
    codec = codec_of(name)
    scores, noise = scored(codec, codec.encode(keys, geometry), query, geometry)
    assert noise is not None
    error = np.square(scores - plain_scores(keys, query, 0.25)).mean(axis=2)
    assert (error < 4 * noise).all()


@pytest.mark.parametrize("name", ["int4-v1", "int1-v1"])
@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5])
def test_heads_of_few_dimensions_score_as_their_codes_say(name: str, dim: int) -> None:
    """With one dimension, or two halves of one, scores were whatever lay in memory."""
    codec, g = codec_of(name), Geometry(1, 4, 2, dim, "float32")
    rng = np.random.default_rng(3)
    keys = np.sign(rng.standard_normal((2, 64, dim))).astype(np.float32)
    query = torch.from_numpy(rng.standard_normal((4, 5, dim)).astype(np.float32))
    found = [scored.scores.clone() for scored in codec.score(codec.encode(keys, g), query, g, 1.0)]
    level = {"int4-v1": 1.0, "int1-v1": 0.5 * 0.6}[name]  # for keys that are all 1 or −1
    want = torch.einsum("hqd,hnd->hqn", query, torch.from_numpy(keys).repeat_interleave(2, 0))
    assert torch.allclose(torch.cat(found), want * level, atol=0.03 * float(want.abs().max()))


def test_int4_error_is_a_tenth_of_the_scores() -> None:
    geometry = Geometry(1, 8, 8, 64, "float16")
    keys, query = keys_and_query(geometry, n=512)
    want = plain_scores(keys, query, 0.25)
    got, _ = scored(
        codec_of("int4-v2"), codec_of("int4-v2").encode(keys, geometry), query, geometry
    )
    assert np.square(got - want).mean() < 0.12**2 * np.square(want).mean()


@pytest.mark.parametrize("empty", ["low", "high", "all"])
def test_queries_with_half_their_dimensions_zero_score_right(empty: str) -> None:
    geometry = Geometry(1, 2, 2, 32, "float32")
    keys, query = keys_and_query(geometry)
    if empty != "high":
        query[..., :16] = 0
    if empty != "low":
        query[..., 16:] = 0
    codec = codec_of("int4-v2")
    scores, noise = scored(codec, codec.encode(keys, geometry), query, geometry)
    assert noise is not None
    error = np.square(scores - plain_scores(keys, query, 0.25)).mean()
    assert error <= 4 * noise.mean() + 1e-12


def low_rank_keys(geometry: Geometry, n: int, rank: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    dims = geometry.n_kv_heads * geometry.head_dim
    mean = rng.normal(size=dims) * 3
    rows = rng.normal(size=(n, rank)) @ rng.normal(size=(rank, dims)) / np.sqrt(rank) + mean
    flat = torch.from_numpy(rows.astype(np.float32)).to(getattr(torch, geometry.dtype))
    return flat.view(n, geometry.n_kv_heads, geometry.head_dim).transpose(0, 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(4, 4, 32), (8, 2, 32), (10, 10, 64)])
def test_pca_keeps_keys_of_low_rank(shape: tuple[int, int, int], dtype: str) -> None:
    geometry = Geometry(1, *shape, dtype)  # the last: blocks of 8 and 2 heads
    keys = low_rank_keys(geometry, 600, rank=6)
    _, query = keys_and_query(geometry)
    codec = fitted(codec_of("pca25-v1"))
    assert codec is not None and codec.fallback == "int4-v2"
    params = codec.fit(keys, geometry)
    records = codec.encode(keys, geometry, params)
    assert records.shape == (600, codec.probe_bytes(geometry))
    want = plain_scores(keys, query, 0.25)
    got, noise = scored(codec, records, query, geometry, params)
    assert noise is not None and noise.shape == want.shape[:2]
    spread = (want - want.mean(axis=-1, keepdims=True)).std()
    assert np.sqrt(np.square(got - want).mean()) < 0.2 * spread


@pytest.mark.parametrize("name", PCA)
def test_pca_states_its_noise_and_costs_what_it_says(name: str) -> None:
    geometry = Geometry(1, 8, 8, 32, "float16")
    keys, query = keys_and_query(geometry, n=1024)
    codec = fitted(codec_of(name))
    assert codec is not None
    share = codec.probe_bytes(geometry) / (2 * geometry.k_row_bytes)
    assert share == pytest.approx({"pca37-v1": 0.053, "pca25-v1": 0.035, "pca12-v1": 0.018}[name],
                                  abs=6e-4)  # fmt: skip
    params = codec.fit(keys, geometry)
    got, noise = scored(codec, codec.encode(keys, geometry, params), query, geometry, params)
    assert noise is not None
    error = np.square(got - plain_scores(keys, query, 0.25)).mean()
    assert 0.5 * noise.mean() < error < 2 * noise.mean()


def test_a_fit_is_deterministic_and_its_bytes_are_no_other_codecs() -> None:
    geometry = Geometry(1, 4, 4, 16, "float16")
    keys, _ = keys_and_query(geometry)
    codec = Pca("pca25-v1", 1, 4)
    params = codec.fit(keys, geometry)
    assert params == codec.fit(keys.clone(), geometry)
    with pytest.raises(ImpressError, match="another codec"):
        codec.encode(keys, geometry, Pca("pca12-v1", 1, 8).fit(keys, geometry))
    with pytest.raises(ImpressError, match="no parameters"):
        codec.encode(keys, geometry)
    with pytest.raises(BadInput, match="no keys"):
        codec.fit(keys[:, :0], geometry)


def test_names_find_their_codecs() -> None:
    for name in ["heads3-v1", *LOW_BIT, *PCA]:
        assert codec_of(name).name == name
        assert 64 % codec_of(name).group == 0
        assert (fitted(codec_of(name)) is not None) == (name in PCA)
    with pytest.raises(ImpressError, match="'int5-v1' is not known"):
        codec_of("int5-v1")
    with pytest.raises(ImpressError, match="already"):
        register(LowBit("int4-v2", 4))


@pytest.mark.parametrize("name", ["", "a-name-that-a-header-would-cut-off-v1", "clé-v1"])
def test_a_name_that_no_header_takes_is_refused(name: str) -> None:
    """Cut off in the header, it was never found again: records were always made from keys."""
    with pytest.raises(ImpressError, match="1 to 32 ASCII"):
        register(LowBit(name, 4))
    with pytest.raises(ImpressError, match="at least 1 token"):
        register(LowBit("none-v1", 4, group=0))


def test_importing_and_encoding_need_no_torch() -> None:
    code = (
        "import sys, numpy as np\n"
        "import impress.selection.identify, impress.policy\n"
        "from impress.selection.probes import codec_of\n"
        "from impress.types import Geometry\n"
        "g = Geometry(1, 2, 2, 8, 'float16')\n"
        "codec_of('int4-v2').encode(np.ones((2, 64, 8), np.float16), g)\n"
        "codec_of('heads3-v1').encode(np.ones((2, 64, 8), np.float16), g)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_streams_of_a_device_share_no_memory_to_work_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer is given back once the work on it is launched: an audit, on a stream other than that
    of a caller's request, wrote over scores that were still to be made."""
    streams = iter((7, 9, 7))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=next(streams))
    )
    places = [_stream(torch.device("cuda", 0)) for _ in range(3)]
    assert places[0] == places[2] != places[1]
    assert _stream(torch.device("cpu")) == 0


def test_what_is_kept_is_bounded_for_all_streams_of_a_device_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each stream kept as much: a server that takes one of its own for each request kept a GiB."""
    drop_scratch()
    streams = itertools.count()
    monkeypatch.setattr("impress.selection.scratch._stream", lambda device: next(streams))
    for _ in range(8):
        with scratch(torch.device("cpu")) as take:
            take((MOST_BYTES // 3,), torch.uint8)
    assert sum(len(flat) for kept in _free.values() for flat in kept) == MOST_BYTES // 3 * 3
    drop_scratch()


def test_what_was_worked_in_under_inference_mode_serves_everyone() -> None:
    """By torch's version only requests in that mode could have written there again."""
    drop_scratch()
    with torch.inference_mode(), scratch(torch.device("cpu")) as take:
        take((8,), torch.uint8).fill_(1)
    (kept,) = _free["cpu", 0]
    assert not kept.is_inference()
