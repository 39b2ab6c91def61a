"""Every kind of bad input that can be handed in, and the one-line error it gets."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import (
    MIB,
    SMALL,
    as_the_service,
    assert_serves,
    kv_of,
    prompt,
    put_prompt,
    said_by_a_child,
    wait_for_promotions,
)

import impress
from impress.config import cache_dir, default_store_dir, tenant_secret
from impress.policy import AllHeads, Pages, Paper, Policy, Quality
from impress.types import a_time

Open = Callable[..., impress.PrefixStore]
CONFIG = impress.Config(**SMALL)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([], "non-empty"),
        ([[1, 2]], "1-d"),
        ([1.5], "integers"),
        ([-1, 2], "outside"),
        ([1 << 31], "outside"),
        (["a"], "integers"),
        ([[1], [1, 2]], "token_ids"),
        (np.zeros(0, np.int32), "non-empty"),
        (torch.zeros(64, requires_grad=True), "token_ids: Can't call numpy"),
    ],
)
def test_tokens_that_are_none(
    open_store: Open, geometry: impress.Geometry, tokens: object, said: str
) -> None:
    store = open_store(geometry)
    for call in (store.lookup, store.lease, store.writer):
        with pytest.raises(impress.BadInput, match=said):
            call(tokens)
    assert store.stats()["tiers"]["ssd"]["used"] == 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"config": {"dram_bytes": 1}}, r"config: want impress.Config .*Config.load.*, got dict"),
        ({"config": {}}, r"config: .*got dict"),
        ({"config": "impress.toml"}, r"config: .*got str"),
        ({"geometry": {"n_layers": 2}}, r"geometry: want impress.Geometry, got dict"),
        ({"path": 3}, r"path: want a directory.*got int"),
        ({"path": b"store"}, r"path: want a directory.*got bytes"),
        ({"path": ""}, r"path: it is empty: name a directory"),
        ({"namespace": 3}, r"namespace: want a non-empty str or bytes"),
        ({"namespace": ""}, r"namespace: want a non-empty str or bytes"),
    ],
)
def test_arguments_of_another_type_are_one_line(
    tmp_path: Path, geometry: impress.Geometry, changed: dict[str, Any], said: str
) -> None:
    """Each raised the AttributeError or TypeError of whatever code looked at it first; an empty
    path was the current directory."""
    given = {"path": tmp_path / "s", "geometry": geometry, "namespace": "t", **changed}
    with pytest.raises(impress.BadInput, match=f"^{said}$"):
        impress.PrefixStore.open(**given)
    assert not (tmp_path / "s").exists()


def test_a_tilde_in_a_path_is_the_home_directory(
    tmp_path: Path, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a folder named `~`, and not the store that commands and vLLM's settings meant."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "secret").write_bytes(b"s" * 32)
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "impress.toml").write_text('io_threads = 3\ntenant_secret_file = "~/secret"\n')
    config = impress.Config.load("~/impress.toml")
    with impress.PrefixStore.open("~/store", geometry, "t", config) as store:
        assert store.path == tmp_path / "store" and not Path("~").exists()
    assert tenant_secret(config) == b"s" * 32
    lost = "~no-such-user/x"
    secret = impress.Config(tenant_secret_file=lost)
    said = f"{lost}: no such home directory is known; write the path in full"
    refused(f"^path {said}", impress.PrefixStore.open, lost, geometry, "t")
    refused(f"^config: {said}", impress.Config.load, lost)
    refused(f"^config: tenant_secret_file: {said}", tenant_secret, secret)


@pytest.mark.parametrize(("named", "where"), [("", "h/.cache"), ("rel", "h/.cache"), ("/c", "/c")])
def test_a_cache_directory_that_is_no_whole_path_is_ignored(
    monkeypatch: pytest.MonkeyPatch, named: str, where: str
) -> None:
    """A relative one named a different store, and a different digest cache, in each directory."""
    monkeypatch.setenv("HOME", "h")
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    assert cache_dir() == Path(where) / "impress"
    monkeypatch.delenv("IMPRESS_STORE", raising=False)
    assert default_store_dir() == Path(where) / "impress/store"


def refused(said: str, call: Callable[..., object], *args: Any, **named: Any) -> None:
    with pytest.raises(impress.ImpressError, match=said) as told:
        call(*args, **named)
    assert "\n" not in str(told.value)


def test_arguments_of_another_type_are_bad_input_wherever_they_come_in(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """Each raised the TypeError, AttributeError or RuntimeError of whatever code met it first."""
    store, tokens, later = open_store(geometry), prompt(128), prompt(128, 1)
    keys, values = kv_of(tokens, geometry)
    tensors = [torch.from_numpy(k) for k in keys]
    stored = store.store(tokens, keys, values)
    assert stored.wait(60)
    refused("dtype must be .*, got \\[\\]", impress.Geometry, 2, 4, 2, 64, [])
    refused("want a file, .*, got NoneType", impress.Config.load, None)
    refused("path: no directory has a NUL", impress.PrefixStore.open, "a\0b", geometry, "t")
    refused("extra: want positions and .*, got list", store.lookup, tokens, extra=[1])
    refused("a list of keys by layer, got NoneType", store.store, later, None, values)
    refused("a list of values by layer, got int", store.store, later, keys, 3)
    for start in ("a", None, 1.5):
        refused("start must be an int, got", store.store, later, keys, values, start=start)
        refused("start must be an int, got", store.writer, later, start)
    refused("wait_s must be a number, got None", store.writer, later, wait_s=None)
    for given in ("a", [[1], [1, 2]], torch.zeros(2, 128).to("meta"), [[1 << 2000] * 128] * 2):
        refused("importance wants", store.store, later, keys, values, importance=given)
    holed = np.full((2, 128), np.nan)  # "wants [2, 128] numbers, got [2, 128]"
    refused("got nan among them", store.store, later, keys, values, importance=holed)
    for bare in ([k.to("meta") for k in tensors], [k.to_sparse() for k in tensors]):
        refused("want a dense tensor, got", store.store, later, bare, tensors)
    refused("wait_s must be a number, got nan", store.writer, later, wait_s=float("nan"))
    for timeout_s in ("a", [1], float("nan")):
        refused("flush: timeout_s must be a number, got", store.flush, timeout_s)
        refused("wait: timeout_s must be a number, got", stored.wait, timeout_s)
    for n_bytes in ("a", None, float("nan")):
        refused("evict: n_bytes must be a number", store.evict, n_bytes)
    refused("repack: max_bytes must be an int, got '1'", store.repack, max_bytes="1")
    for digests in ("abc", b"abc", 3, ["abc"], [[1]]):
        refused("namespaces wants digests, each bytes, got", store.purge, namespaces=digests)
    assert store.lookup(tokens) == 128 and store.lookup(later) == 0
    store.flush()
    store.check()


@pytest.mark.parametrize("limit_s", [float("inf"), 1e10, 10**400, Fraction(7, 2), np.float32(3)])
def test_time_limits_are_any_numbers(
    open_store: Open, geometry: impress.Geometry, limit_s: Any
) -> None:
    """Those above what a lock accepts raised OverflowError, and only where a wait was needed."""
    taken = threading.Event()
    taken.set()
    seconds = a_time(limit_s, "")
    assert taken.wait(seconds) and threading.Lock().acquire(timeout=seconds)
    assert threading.Condition(threading.Lock()).acquire(timeout=seconds)
    store = open_store(geometry)
    stored = put_prompt(store, prompt(128), wait_s=limit_s)
    assert stored.wait(limit_s)
    store.flush(limit_s)


def test_reads_say_what_they_want(open_store: Open, geometry: impress.Geometry) -> None:
    """A suffix_lse with too few heads was accepted: rows were chosen by another head's."""
    store, tokens = open_store(geometry), prompt(128)
    assert put_prompt(store, tokens).wait(60)
    query, lse, out = torch.zeros(4, 1, 128), torch.zeros(4, 1), torch.empty(2, 128, 128)
    with store.lease(tokens) as lease:
        for first in ("a", None, 64.0):
            refused("first must be an int, got", lease.session, first=first)
        refused("policy 'paper' is not one", lease.session, "paper", first=64)
        with lease.session() as session:
            refused("query wants a tensor or None, got str", session.retrieve, 0, "q")
            refused("None, got ndarray", session.retrieve, 0, query.numpy())  # it has a device, too
            for wrong in ("ab", (out,), 3, (out, None)):
                refused("out wants a pair of tensors", session.retrieve, 0, None, out=wrong)
            refused("want 2 pairs, got int", session.prefetch, 3)
            for layers in (3, "01"):
                refused("want a list of layers", session.prefetch, layers=layers)
            for layers in ([[0]], [2], [True], [None]):
                refused("layer .* is not in 0..1", session.prefetch, layers=layers)
            refused("out wants a pair of tensors, got NoneType", session.prefetch, [None, None])
        with lease.session(impress.Quality()) as session:
            refused("and ndarray", session.retrieve, 0, query, suffix_lse=lse.numpy())
            for q, of in ((query[:3], lse), (query, lse[:3]), (query, "a")):
                refused("query and suffix_lse want tensors", session.retrieve, 0, q, suffix_lse=of)
            for name, q, of in (
                ("query", query.to("meta"), lse),
                ("suff.*", query, lse.to("meta")),
            ):
                refused(f"{name} is a meta tensor", session.retrieve, 0, q, suffix_lse=of)
            for scale in (
                "1",
                [1.0],
                torch.ones(2),
            ):  # these and the last ones: whatever torch said
                refused("scaling wants a number or None", session.retrieve, 0, query, scale, lse)
            session.retrieve(0, query, torch.ones(()), lse)
            session.retrieve(0, query, suffix_lse=lse)
    wait_for_promotions(store)
    assert store.buffers.used_bytes == 0


def test_a_closed_store_says_so(open_store: Open, geometry: impress.Geometry) -> None:
    """The words were LMDB's, which speak of operations on closed, deleted or dropped objects."""
    store = open_store(geometry)
    assert put_prompt(store, prompt(128)).wait(60)
    store.close()
    calls = (store.names, store.saved_ledgers, store.placement, store.follow, store.purge)
    for call in (*calls, store.repack):
        refused("the store is closed$", call)


def test_shapes_and_dtypes_are_checked_before_anything_is_written(
    open_store: Open, geometry: impress.Geometry
) -> None:
    store = open_store(geometry)
    tokens = prompt(128)
    keys, values = kv_of(tokens, geometry)
    for k, v, said in (
        (keys[:1], values, "2 layers of keys"),
        (keys, values + values, "2 layers of values"),
        ([k[:, :100] for k in keys], values, "128 rows"),
        ([k[:1] for k in keys], values, r"want shape \[2, rows, 128\]"),
        ([k.astype(np.float16) for k in keys], values, "float32, got float16"),
        ([k.tolist() for k in keys], values, "want shape"),
        ([torch.from_numpy(k).double() for k in keys], values, "float32, got float64"),
    ):
        with pytest.raises(impress.BadInput, match=said):
            store.store(tokens, k, v)
    for importance in (np.zeros((1, 128)), np.zeros((2, 7)), np.full((2, 128), np.nan)):
        with pytest.raises(impress.BadInput, match="importance"):
            store.store(tokens, keys, values, importance=importance)
    with pytest.raises(impress.BadInput, match="start"):
        store.writer(tokens, start=-1)
    with store.writer(tokens) as writer:
        for layer, first in ((2, 0), (-1, 0), ("0", 0), (True, 0), (0, -5)):
            with pytest.raises(impress.BadInput):
                writer.put(layer, first, keys[0], values[0])
        with pytest.raises(impress.BadInput, match="128 rows of keys, 5 of values"):
            writer.put(0, 0, keys[0], values[0][:, :5])
    store.flush()
    assert store.stats()["tiers"]["ssd"]["used"] == 0 and store.stats()["spans"] == 0


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({500: b"x"}, "position 500"),
        ({-1: b"x"}, "-1"),
        ({3: "x"}, "bytes"),
        ({3: b""}, "bytes"),
        ({"3": b"x"}, "a position must be an int, got '3'"),
        ({3.0: b"x"}, "must be an int"),
    ],
)
def test_extras_that_are_none(
    open_store: Open, geometry: impress.Geometry, extra: dict, said: str
) -> None:
    with pytest.raises(impress.BadInput, match=said):
        open_store(geometry).lookup(prompt(128), extra=extra)


def test_positions_may_be_ints_of_numpy(open_store: Open, geometry: impress.Geometry) -> None:
    """np.flatnonzero gives these: one inside the prompt was said to be outside it."""
    store, tokens = open_store(geometry), prompt(128)
    keys, values = kv_of(tokens, geometry)
    (position,) = np.flatnonzero(np.arange(128) == 70)
    with store.writer(tokens, extra={position: b"an image"}) as writer:
        for layer, first in itertools.product(range(geometry.n_layers), np.arange(0, 128, 64)):
            rows = slice(first, first + 64)
            writer.put(layer, first, keys[layer][:, rows], values[layer][:, rows])
    assert writer.stored.wait(60)
    assert_serves(store, tokens, 128, extra={70: b"an image"})
    assert_serves(store, tokens, 64)


def test_retrieve_says_what_it_wants(open_store: Open, geometry: impress.Geometry) -> None:
    store = open_store(geometry)
    put_prompt(store, prompt(128)).wait(60)
    with store.lease(prompt(128)) as lease:
        with pytest.raises(impress.ImpressError, match="policy"):
            lease.session(policy="fast")
        with lease.session() as session:
            with pytest.raises(impress.BadInput, match="layer 2"):
                session.retrieve(2, None)
            with pytest.raises(impress.BadInput, match="layer True"):  # it broke a cache's map
                session.retrieve(True, None)
            wrong = (torch.empty(2, 64, 128), torch.empty(2, 128, 128))
            with pytest.raises(impress.BadInput, match=r"\[2, 128, 128\]"):
                session.retrieve(0, None, out=wrong)
            with pytest.raises(impress.BadInput, match="2 pairs"):
                session.prefetch([wrong])
    with (
        store.lease(prompt(128, seed=5)) as lease,
        pytest.raises(impress.ImpressError, match="miss"),
    ):
        lease.session()


@pytest.mark.parametrize(
    "policy", [Paper(), Quality(), Pages(), AllHeads()], ids=lambda policy: policy.name
)
def test_a_query_of_no_rows_chooses_nothing_and_is_refused(
    open_store: Open, geometry: impress.Geometry, policy: Policy
) -> None:
    """It ended in an AssertionError, deep in the scoring code."""
    store = open_store(geometry, probes=("heads3-v1", "int4-v2", "pages16-v1"))
    put_prompt(store, prompt(128)).wait(60)
    query, lse = torch.zeros(4, 3, 128), torch.zeros(4, 3)
    with store.lease(prompt(128)) as lease, lease.session(policy) as session:
        with pytest.raises(impress.BadInput, match=r"q at least 1, got \[4, 0, 128\] and"):
            session.retrieve(0, query[:, :0], suffix_lse=lse[:, :0])
        session.retrieve(0, query, suffix_lse=lse)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint64, np.uint8])
def test_numpys_integers_are_taken_as_pythons(
    open_store: Open, geometry: impress.Geometry, kind: Callable[[int], Any]
) -> None:
    """They were let through and used as they are: a uint64 to `evict` wrapped and emptied the
    store, and a session's `first` ended in an AttributeError."""
    store, tokens = open_store(geometry, repack_every_s=0), prompt(192)
    for seed in range(3):
        assert put_prompt(store, prompt(192, seed=seed), start=kind(0)).wait(60)
    with store.lease(tokens) as lease:
        with lease.session(first=64) as plain, lease.session(first=kind(64)) as session:
            rows = zip(plain.retrieve(1, None), session.retrieve(1, None), strict=True)
            assert all(torch.equal(mine, want) for mine, want in rows)
            assert session.n_tokens == 128 and json.dumps(asdict(session.report()))
    wait_for_promotions(store)
    n_spans = store.stats()["spans"]
    gone = store.evict(kind(100))
    assert store.stats()["spans"] == n_spans - 1
    assert gone == store.evict(100) > 0


def test_a_wrong_out_leaves_what_was_read_ahead_where_it_is(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """The layer was taken before `out` was checked: its buffers and DRAM pins never came back."""
    store, tokens = open_store(geometry), prompt(128)
    put_prompt(store, tokens).wait(60)
    wrong = (torch.empty(2, 64, 128), torch.empty(2, 128, 128))
    with store.lease(tokens) as lease, lease.session() as session:
        with pytest.raises(impress.BadInput, match=r"\[2, 128, 128\]"):
            session.prefetch([wrong, wrong])
        session.prefetch()
        with pytest.raises(impress.BadInput, match=r"\[2, 128, 128\]"):
            session.retrieve(0, None, out=wrong)
        k, _, _ = session.retrieve(0, None)
        assert np.array_equal(k.numpy(), kv_of(tokens, geometry)[0][0])
    wait_for_promotions(store)
    assert store.buffers.used_bytes == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_layers": 3}, "3 layers"),
        ({"head_dim": 64}, "x 64 float32"),
        ({"dtype": "bfloat16"}, "holds float32, asked for bfloat16"),
        ({"v_head_dim": 32}, "128/32"),
    ],
)
def test_another_geometry_is_refused_with_both_values(
    open_store: Open, geometry: impress.Geometry, tmp_path: Path, change: dict, said: str
) -> None:
    open_store(geometry).close()
    fields = {name: getattr(geometry, name) for name in geometry.__dataclass_fields__}
    with pytest.raises(impress.StoreMismatch) as refused:
        impress.PrefixStore.open(tmp_path / "store", impress.Geometry(**{**fields, **change}), "t")
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_another_window_is_refused_with_both_values(
    open_store: Open, geometry: impress.Geometry
) -> None:
    open_store(geometry).close()
    with pytest.raises(impress.StoreMismatch, match="64 tokens, asked for 32"):
        open_store(geometry, window=32)


@pytest.mark.parametrize(
    "fields",
    [
        {"n_layers": 0}, {"n_heads": 3}, {"head_dim": -1}, {"dtype": "float64"},
        {"n_kv_heads": True}, {"v_head_dim": 0}, {"n_layers": 1 << 16},
    ],
)  # fmt: skip
def test_geometries_that_are_none(fields: dict) -> None:
    good = {"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64}
    with pytest.raises(impress.BadInput, match=next(iter(fields))):
        impress.Geometry(**{**good, **fields})


def test_a_store_named_by_a_relative_path_stays_itself_after_chdir(
    tmp_path: Path, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments that were opened later were looked for where the process was by then. They were not
    found there, and what they held was deleted from the index for good; or they were another
    store's, and were written to."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    monkeypatch.chdir(here)
    tokens, n_tokens = prompt(130), 128
    with impress.PrefixStore.open("store", geometry, "t", CONFIG) as store:
        assert put_prompt(store, tokens).wait(60)
    with impress.PrefixStore.open("store", geometry, "t", CONFIG) as store:
        monkeypatch.chdir(there)
        assert store.path == here / "store"
        assert_serves(store, tokens, n_tokens)  # no segment was open yet
        assert put_prompt(store, prompt(130, 1)).wait(60)
    assert list(there.iterdir()) == []


@pytest.mark.parametrize("name", ["lost+found", ".impress-doctor-x"])
def test_a_new_file_system_may_be_mounted_as_the_store(
    tmp_path: Path, geometry: impress.Geometry, name: str
) -> None:
    """Every new ext4 has a folder: `impress doctor` measured there, and then no store was made."""
    (tmp_path / "disk" / name).mkdir(parents=True)
    with impress.PrefixStore.open(tmp_path / "disk", geometry, "t", CONFIG) as store:
        assert store.lookup(prompt(130)) == 0


def test_directories_that_are_no_stores_are_left_alone(
    tmp_path: Path, geometry: impress.Geometry
) -> None:
    foreign = tmp_path / "photos"
    foreign.mkdir()
    (foreign / "cat.jpg").write_bytes(b"meow")
    with pytest.raises(impress.FormatError, match=r"holds 'cat\.jpg' and is no store"):
        impress.PrefixStore.open(foreign, geometry, "t")
    assert [p.name for p in foreign.iterdir()] == ["cat.jpg"]
    with pytest.raises(impress.FormatError, match="not a directory"):
        impress.PrefixStore.open(foreign / "cat.jpg", geometry, "t")
    with pytest.raises(impress.FormatError, match="no store here"):
        impress.PrefixStore.open(tmp_path / "nowhere", geometry, "t", mode="r")
    assert not (tmp_path / "nowhere").exists()


def test_a_newer_format_is_refused(
    open_store: Open, geometry: impress.Geometry, tmp_path: Path
) -> None:
    open_store(geometry).close()
    file = tmp_path / "store" / "impress.json"
    identity = json.loads(file.read_text())
    file.write_text(json.dumps({**identity, "format": 2}))
    with pytest.raises(impress.FormatError, match="format 2, this version reads up to 1"):
        open_store(geometry)
    file.write_text("{}")
    with pytest.raises(impress.FormatError, match="identity"):
        open_store(geometry)


def test_unknown_and_wrong_settings_name_the_nearest_known(tmp_path: Path) -> None:
    with pytest.raises(impress.ConfigError, match="'dram_byte'; the nearest known is 'dram_bytes'"):
        impress.Config(dram_byte=1)
    for wrong, said in (
        ({"window": 48}, "16, 32, 64"),
        ({"dram_bytes": -1}, "dram_bytes"),
        ({"dram_bytes": "1"}, "dram_bytes"),
        ({"segment_bytes": MIB + 1}, "multiple"),
        ({"metrics_port": 70000}, "metrics_port"),
        ({"read_timeout_s": float("inf")}, "read_timeout_s"),
        ({"lease_timeout_s": float("nan")}, "lease_timeout_s"),
        ({"repack_every_s": 1e12}, "repack_every_s"),
        ({"follow_every_s": float("inf")}, "follow_every_s"),
        ({"probes": "int4-v2"}, "probes: want a list of names, got 'int4-v2'"),
        ({"guard_shadows": 1 << 32}, "guard_shadows: .* less than or equal to 1000000"),
    ):
        with pytest.raises(impress.ConfigError, match=said) as refused:
            impress.Config(**wrong)
        assert "\n" not in str(refused.value)
    file = tmp_path / "impress.toml"
    file.write_text('dram_bytes = 1048576\nio_threads = 4\nprobes = ["int4-v2"]\n')
    assert impress.Config.load(file) == impress.Config(
        dram_bytes=MIB, io_threads=4, probes=("int4-v2",)
    )
    file.write_text("io_thread = 4\n")
    with pytest.raises(impress.ConfigError, match=r"impress\.toml.*'io_threads'"):
        impress.Config.load(file)
    file.write_text("self = 4\n")  # was a TypeError's traceback
    with pytest.raises(impress.ConfigError, match=r"impress\.toml.* unknown key 'self'"):
        impress.Config.load(file)
    with pytest.raises(impress.ConfigError, match="unknown key 'self'"):
        impress.Config(self=4)
    for wrong in ("io_threads = [", "probes = " + "[" * 100_000, "dram_bytes = " + "9" * 5000):
        file.write_text(wrong)
        with pytest.raises(impress.ConfigError, match="not TOML"):
            impress.Config.load(file)
    with pytest.raises(impress.ConfigError, match="cannot read"):
        impress.Config.load(tmp_path / "none.toml")
    with pytest.raises(Exception, match="frozen"):
        impress.Config().window = 16


SIZES = [name for name in impress.Config.model_fields if "_bytes" in name]


@pytest.mark.parametrize("name", SIZES)
def test_more_bytes_than_a_process_has_addresses_for_are_refused(tmp_path: Path, name: str) -> None:
    """2^64 of them raised OverflowError at the open or first store, with the directory made."""
    file = tmp_path / "impress.toml"
    for number in (str(1 << 64), str((1 << 56) + MIB), hex(1 << 40_000)):  # too long to print
        file.write_text(f"{name} = {number}\n")
        with pytest.raises(impress.ConfigError, match=f"{name}: .* less than or equal to") as told:
            impress.Config.load(file)
        assert "\n" not in str(told.value)
    assert getattr(impress.Config(**{name: 1 << 56}), name) == 1 << 56


def test_a_path_that_no_system_takes_is_one_line() -> None:
    for given, said in (("a\0b", ".*embedded null"), ("", "it is empty: name a file")):
        with pytest.raises(impress.ConfigError, match=f"tenant_secret_file: {said}"):
            tenant_secret(impress.Config(tenant_secret_file=given))


def test_an_error_is_one_line_whatever_a_name_has_in_it(tmp_path: Path) -> None:
    """A line break in a path came through: in a log, the rest became a line of its own."""
    (tmp_path / "a\nb.toml").write_text("windows = 16")
    with pytest.raises(impress.ConfigError, match="unknown key 'windows'") as told:
        impress.Config.load(tmp_path / "a\nb.toml")
    assert str(told.value).splitlines() == [str(told.value)]


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        ({"disk_high": 0.8}, r"disk_high 0\.8 is below disk_low 0\.9 \(its default\): set both"),
        ({"disk_low": 0.97}, r"disk_low 0\.97 is above disk_high 0\.95 \(its default\): set both"),
        ({"disk_low": 0.5, "disk_high": 0.4}, r"disk_low 0\.5 is above disk_high 0\.4"),
    ],
)
def test_marks_of_the_disk_that_are_the_wrong_way_round_are_both_named(
    marks: dict[str, float], said: str
) -> None:
    """Of whoever set one of them, the line named the other: disk_low 0.9 is above disk_high."""
    with pytest.raises(impress.ConfigError, match=f"^config: {said}$"):
        impress.Config(**marks)


def test_a_disk_budget_below_one_segment_is_refused_with_both_settings() -> None:
    """200 MB hold no segment of the default size: every store was refused, unexplained."""
    with pytest.raises(impress.ConfigError, match=r"disk_bytes 200000000 .* segment_bytes 268435"):
        impress.Config(disk_bytes=200_000_000)
    impress.Config(disk_bytes=200_000_000, segment_bytes=64 * MIB)
    impress.Config(disk_bytes=256 * MIB)


@pytest.mark.parametrize("tier", ["dram", "hbm"])
def test_memory_that_the_system_does_not_grant_is_refused_by_the_setting(
    tmp_path: Path, tier: str
) -> None:
    """And before the directory is made a store: it used to be one by the time of the refusal."""
    config = impress.Config(**{**SMALL, "hbm_device": "cpu", f"{tier}_bytes": 1 << 50})
    with pytest.raises(impress.StoreFailed, match=f"^{tier}: .*: lower {tier}_bytes$"):
        impress.PrefixStore.open(tmp_path, impress.Geometry(2, 2, 2, 32, "float32"), "t", config)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"probes": ("bogus",)}, impress.ConfigError, "probes: probe codec 'bogus' is not known"),
        ({"write_buffer_bytes": MIB}, impress.ConfigError, "write_buffer_bytes"),
        ({"hbm_bytes": 4096, "hbm_device": "cpu"}, impress.ConfigError, "hbm_bytes"),
        ({"hbm_bytes": MIB}, impress.Unsupported, "hbm_bytes: no CUDA driver"),
        ({"tenant_secret_file": "/nowhere"}, impress.ConfigError, "tenant_secret_file"),
        ({"io_engine": "kvikio"}, impress.StoreFailed, "io_engine: kvikio"),
    ],
)
def test_settings_that_do_not_go_leave_a_directory_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict, error: type, said: str
) -> None:
    """They were noticed only after the empty directory had been made a store for good."""
    lacking = {"kvikio": "no CUDA driver"}
    monkeypatch.setattr("tiers.engines.why_not", lambda name: lacking.get(name, ""))
    monkeypatch.setattr("impress.cache.copies.why_not", lambda: "no CUDA driver")
    wide, config = impress.Geometry(2, 64, 64, 256, "float32"), impress.Config(**settings)
    (tmp_path / "empty").mkdir()
    for name in ("empty", "none"):
        with pytest.raises(error, match=said) as refused:
            impress.PrefixStore.open(tmp_path / name, wide, "t", config)
        assert "\n" not in str(refused.value)
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]


def test_a_write_buffer_smaller_than_a_chunk_is_refused(tmp_path: Path) -> None:
    wide = impress.Geometry(2, 64, 64, 256, "float32")
    config = impress.Config(write_buffer_bytes=MIB)
    with pytest.raises(impress.ConfigError, match="cannot hold one chunk"):
        impress.PrefixStore.open(tmp_path / "s", wide, "t", config)
    config = impress.Config(write_buffer_bytes=16 * MIB)
    impress.PrefixStore.open(tmp_path / "s", wide, "t", config).close()  # the lock was released


def test_a_reader_neither_writes_nor_waits(open_store: Open, geometry: impress.Geometry) -> None:
    store = open_store(geometry)
    put_prompt(store, prompt(128)).wait(60)
    reader = open_store(geometry, mode="r")
    assert reader.lookup(prompt(128)) == 128
    with pytest.raises(impress.ImpressError, match='mode="r"'):
        put_prompt(reader, prompt(128, seed=1))
    with pytest.raises(impress.ImpressError, match='mode="r"'):
        reader.evict(1)
    with pytest.raises(impress.BadInput, match='"rw" or "r"'):
        open_store(geometry, mode="w")


def test_no_permission_is_one_line(place: Path, geometry: impress.Geometry) -> None:
    """It was skipped for root, as which the tests run in a container."""

    def said(path: Path) -> str:
        def opened() -> None:
            as_the_service()
            impress.PrefixStore.open(path, geometry, "t")

        return said_by_a_child(opened)

    impress.PrefixStore.open(place / "own", geometry, "t").close()  # and all is imported
    denied = r"StoreFailed: \S+: Permission denied"
    folder = place / "others"
    folder.mkdir(0o555)
    assert re.fullmatch(denied, said(folder / "s"))
    folder.chmod(0)  # may not even be looked into
    assert re.fullmatch(denied, said(folder))


@pytest.mark.parametrize("mode", ["rw", "r"])
def test_what_the_system_says_of_a_path_is_store_failed(
    tmp_path: Path, geometry: impress.Geometry, mode: str
) -> None:
    """It came as the system's own error, even where a directory may not be looked into."""
    with pytest.raises(impress.StoreFailed, match="name too long"):
        impress.PrefixStore.open(tmp_path / ("s" * 300), geometry, "t", mode=mode)


def test_a_full_file_system_refuses_stores_and_serves_on(
    geometry: impress.Geometry, tmp_path: Path
) -> None:
    """In a process whose files may not grow past 700 kB, fallocate fails as on a full disk."""
    import subprocess
    import sys

    code = (
        "import resource, signal, sys; sys.path.insert(0, sys.argv[2])\n"
        "from conftest import SMALL, assert_serves, prompt, put_prompt\n"
        "import impress\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, 700_000))\n"
        "store = impress.PrefixStore.open(sys.argv[1], impress.Geometry(2, 4, 2, 128, 'float32'),\n"
        "                                 't', impress.Config(**SMALL))\n"
        "stored = put_prompt(store, prompt(128))\n"
        "print(stored.refused, store.lookup(prompt(128)))\n"
        "store.check(); store.close()\n"
    )
    here = str(Path(__file__).parent)
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s"), here],
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.startswith("read-only: ssd: "), out.stderr
    assert out.stdout.endswith("File too large 0\n"), out.stderr
