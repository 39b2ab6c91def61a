"""Sessions that choose rows: what they choose, and that they bring the rows that were stored."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from conftest import SMALL, flip_a_bit, prompt, wait_for_promotions
from masked_reference import Watched

import impress
from impress.policy import (
    AllHeads,
    Contiguous,
    Exact,
    KeepAll,
    Pages,
    Paper,
    Policy,
    Quality,
    Random,
    Recency,
    SnapWindow,
    StaticH2O,
)
from impress.read.session import Lease
from impress.read.shadow import Seen, ShadowSession
from impress.read.sparse import SparseSession
from impress.selection import probes
from impress.selection.choices import Selection
from impress.selection.identify import Asked, select
from impress.selection.probes import LowBit
from impress.selection.probes_pages import MinMax
from impress.selection.scores import suffix_lse_of
from tiers.engines import why_not
from tiers.errors import MediumError

Open = Callable[..., impress.PrefixStore]

SHAPES = {
    "mha": impress.Geometry(2, 8, 8, 32, "float16"),
    "gqa": impress.Geometry(2, 8, 2, 64, "bfloat16"),
    "padded": impress.Geometry(2, 4, 4, 10, "float32"),
}
POLICIES: list[Policy] = [
    Paper(keep=0.1, gate=False),
    Paper(keep=0.25),
    Paper(keep=0.2, alpha=0.0, fallback="heads"),
    Quality(max_missing_mass=0.1),
    Quality(max_missing_mass=0.3, per="head"),
    AllHeads(keep=0.15),
    Random(keep=0.3, seed=1),
    Recency(keep=0.01),
    StaticH2O(keep=0.2),
    SnapWindow(keep=0.2, pool=3),
    Pages(keep=0.2),
    Contiguous(keep=0.2, period=2),
    KeepAll(),
]
N_TOKENS, N_QUERY = 448, 5


def kv(geometry: impress.Geometry) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator, dtype = torch.Generator().manual_seed(0), getattr(torch, geometry.dtype)
    shape = (geometry.n_layers, geometry.n_kv_heads, N_TOKENS, geometry.head_dim)
    keys = (3 * torch.randn(shape, generator=generator)).to(dtype)
    return list(keys), list(torch.randn(shape, generator=generator).to(dtype))


def asked(geometry: impress.Geometry, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A query, and the suffix_lse of what its new tokens see of each other."""
    generator, dtype = torch.Generator().manual_seed(layer + 7), getattr(torch, geometry.dtype)
    query = torch.randn(geometry.n_heads, N_QUERY, geometry.head_dim, generator=generator).to(dtype)
    new = torch.randn(geometry.n_kv_heads, N_QUERY, geometry.head_dim, generator=generator)
    return query, suffix_lse_of(query, new.to(dtype), geometry.head_dim**-0.5)


def fill(store: impress.PrefixStore) -> None:
    """One prompt in three spans, stored with importance."""
    tokens = prompt(N_TOKENS)
    keys, values = kv(store.geometry)
    scores = np.random.default_rng(0).random((len(keys), N_TOKENS), dtype=np.float32)
    for end in (192, 256, N_TOKENS):
        rows = slice(store.lookup(tokens), end)
        store.store(
            tokens[:end], [k[:, rows] for k in keys], [v[:, rows] for v in values],
            start=rows.start, importance=scores[:, rows],
        ).wait(60)  # fmt: skip
    assert store.lookup(tokens) == N_TOKENS


def retrieve_all(lease: Lease, policy: Policy, *, ahead: bool = False) -> tuple[list, list[dict]]:
    """(k, v, pos) of every layer, and the report's lines."""
    geometry = lease.reading.geometry
    with lease.session(policy) as session:
        if ahead:
            session.prefetch()
        got = []
        for layer in range(geometry.n_layers):
            query, lse = asked(geometry, layer)
            k, v, pos = session.retrieve(layer, query, suffix_lse=lse)
            got.append((k.clone(), v.clone(), pos.clone()))
        return got, session.report().per_layer


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_rows_brought_are_the_stored_rows_whatever_is_chosen(
    open_store: Open, shape: str, policy: Policy
) -> None:
    store = open_store(SHAPES[shape], probes=("heads3-v1", "int4-v2"), read_gap_bytes=4096)
    fill(store)
    keys, values = kv(store.geometry)
    with store.lease(prompt(N_TOKENS)) as lease:
        for ahead in (False, True, False):
            got, lines = retrieve_all(lease, policy, ahead=ahead)
            for layer, (k, v, pos) in enumerate(got):
                assert torch.equal(k, keys[layer][:, pos]) and torch.equal(v, values[layer][:, pos])
                assert (pos.diff() > 0).all()
                assert sum(lines[layer]["rows"].values()) == len(pos)
    store.check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "policy", [policy for policy in POLICIES if policy.needs_suffix_lse], ids=lambda p: p.name
)
def test_suffix_lse_of_another_dtype_chooses_the_same_rows(
    open_store: Open, policy: Policy, dtype: torch.dtype
) -> None:
    """That of a float64 model was refused by torch, in words about its own types."""
    store = open_store(SHAPES["gqa"], probes=("heads3-v1", "int4-v2", "pages16-v1"))
    fill(store)
    query, lse = asked(store.geometry, 0)
    lse = lse.bfloat16().float()  # every dtype here has these numbers
    with store.lease(prompt(N_TOKENS)) as lease, lease.session(policy) as session:
        _, _, want = session.retrieve(0, query, suffix_lse=lse)
        _, _, got = session.retrieve(0, query, suffix_lse=lse.to(dtype))
        assert torch.equal(got, want)
        chosen = Selection(np.arange(32), 0.1, 0.1, fell_back=False, reason="given")
        with ShadowSession(lease, policy) as shadow:
            found = [
                shadow.weigh(0, Seen(query, 0.125, given, chosen)) for given in (lse, lse.to(dtype))
            ]
        assert found[0] is not None and found[0] == found[1]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_under_autocast_the_same_rows_are_chosen(open_store: Open, policy: Policy) -> None:
    """It rounded what scores are made of, and column sums came in a type that NumPy has not."""
    store = open_store(SHAPES["padded"], probes=("heads3-v1", "int4-v2", "pages16-v1"))
    fill(store)
    with store.lease(prompt(N_TOKENS)) as lease:
        want, _ = retrieve_all(lease, policy)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, _ = retrieve_all(lease, policy)
    for had, has in zip(want, got, strict=True):
        assert all(map(torch.equal, had, has))


@pytest.mark.parametrize("shape", SHAPES)
def test_keys_that_were_all_read_come_as_they_were_read_to_who_asks_so(
    open_store: Open, shape: str
) -> None:
    """A caller that has them on a device picks the chosen ones there: picking them on the host cost
    the paper's baseline a tenth of its time, which no device would take."""
    store = open_store(SHAPES[shape], dram_bytes=0)
    fill(store)
    keys, values = kv(store.geometry)
    with store.lease(prompt(N_TOKENS)) as lease:
        for policy in (AllHeads(keep=0.2), Contiguous(keep=0.2, period=2), Paper(keep=0.2)):
            want, lines = retrieve_all(lease, policy)
            with lease.session(policy) as session:
                assert isinstance(session, SparseSession)
                session.keys_as_read = True
                got = []
                for layer in range(store.geometry.n_layers):
                    query, lse = asked(store.geometry, layer)
                    got.append(session.retrieve(layer, query, suffix_lse=lse))
                for layer, (k, v, pos) in enumerate(got):  # each is valid until the session ends
                    assert torch.equal(pos, want[layer][2])
                    assert torch.equal(v, values[layer][:, pos])
                    every = not isinstance(policy, Contiguous) or layer == 0
                    assert torch.equal(k, keys[layer] if every else keys[layer][:, pos])
                read = [line["bytes"] for line in session.report().per_layer]
                assert read == [line["bytes"] for line in lines]
    assert store._pool.idle(60) and store.buffers.used_bytes == 0
    store.check()


@dataclass(frozen=True)
class EverySecond:
    """Looks at all keys, and takes every second row."""

    name: str = "every_second"
    needs_suffix_lse: bool = False
    probe: None = None


@select.register
def _(policy: EverySecond, asked: Asked) -> Selection:
    assert asked.all_keys().shape[1] == asked.n_tokens
    chosen = np.arange(0, asked.n_tokens, 2)
    return Selection(chosen, math.nan, math.nan, fell_back=False, reason="given")


@pytest.mark.parametrize("as_read", [False, True])
def test_keys_that_a_device_has_are_not_sent_there_again(open_store: Open, as_read: bool) -> None:
    """All of a layer's keys went up a second time, on the paper's baseline's clock, and nothing
    used them there."""
    geometry = next(iter(SHAPES.values()))
    store = open_store(geometry, dram_bytes=0)
    fill(store)
    query = torch.empty(geometry.n_heads, 1, geometry.head_dim, device="meta")
    with (
        store.lease(prompt(N_TOKENS)) as lease,
        lease.session(cast("Any", EverySecond())) as session,
    ):
        assert isinstance(session, SparseSession)
        session.keys_as_read = as_read
        k, v, pos = session.retrieve(0, query)
        assert (k.device.type, k.shape[1]) == (("cpu", N_TOKENS) if as_read else ("meta", len(pos)))
        assert v.device == pos.device == query.device and v.shape[1] == len(pos)


@pytest.mark.parametrize("shape", SHAPES)
def test_all_keys_of_packed_prefixes_come_as_they_lie_to_who_asks_so(
    open_store: Open, shape: str
) -> None:
    """Ordering them on the host cost "IMPRESS without identification" a quarter of its time, which
    no other system paid: identification seemed to gain half as much again."""
    store = open_store(SHAPES[shape], dram_bytes=0)
    keys, values = kv(store.geometry)
    rng = np.random.default_rng(5)
    worth = rng.random((store.geometry.n_layers, N_TOKENS), dtype=np.float32)
    store.store(prompt(N_TOKENS), keys, values, importance=worth).wait(60)
    with store.lease(prompt(N_TOKENS)) as lease:
        for policy in (AllHeads(keep=0.2), Contiguous(keep=0.2, period=2)):
            with lease.session(policy, in_order=False) as session:
                assert isinstance(session, SparseSession)
                session.keys_as_read = True
                for layer in range(store.geometry.n_layers):
                    query, lse = asked(store.geometry, layer)
                    k, v, pos = session.retrieve(layer, query, suffix_lse=lse)
                    rows = session.key_rows
                    assert torch.equal(v, values[layer][:, pos])
                    if isinstance(policy, Contiguous) and layer:
                        assert torch.equal(k, keys[layer][:, pos])
                        continue
                    assert rows is not None and (np.diff(rows) < 0).any()
                    assert torch.equal(k, keys[layer][:, rows])
    assert store._pool.idle(60) and store.buffers.used_bytes == 0
    store.check()


@pytest.mark.parametrize(
    "policy",
    [
        AllHeads(keep=0.2),
        Contiguous(keep=0.2, period=2),
        Paper(keep=0.2, alpha=0.0, fallback="heads"),
    ],
    ids=lambda p: p.name,
)
def test_the_same_rows_are_chosen_by_keys_that_come_as_they_lie(
    open_store: Open, policy: Policy
) -> None:
    """Where a key lay was taken for its position: other rows were chosen, and nothing said so."""
    store = open_store(SHAPES["gqa"], probes=("heads3-v1",), dram_bytes=0)
    keys, values = kv(store.geometry)
    worth = np.random.default_rng(5).random((store.geometry.n_layers, N_TOKENS), dtype=np.float32)
    store.store(prompt(N_TOKENS), keys, values, importance=worth).wait(60)
    with store.lease(prompt(N_TOKENS)) as lease:
        want, _ = retrieve_all(lease, policy)
        for in_order, as_read in itertools.product((True, False), repeat=2):
            with lease.session(policy, in_order=in_order) as session:
                assert isinstance(session, SparseSession)
                session.keys_as_read = as_read
                for layer, (k, v, pos) in enumerate(want):
                    query, lse = asked(store.geometry, layer)
                    got = session.retrieve(layer, query, suffix_lse=lse)
                    assert len(pos) < N_TOKENS and torch.equal(got[2], pos)
                    assert torch.equal(got[1], v)
                    assert as_read or torch.equal(got[0], k)
                assert (session.key_rows is not None) == (as_read and not in_order)


def test_without_memory_to_read_ahead_a_layer_is_read_in_its_turn(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request was lost when there was no memory for the records of a later layer."""
    store = open_store(next(iter(SHAPES.values())), probes=("int4-v2",))
    fill(store)
    start, refused = SparseSession._start_probes, []

    def scarce(session: SparseSession, layer: int, plane: int) -> Any:
        if layer and layer not in refused:
            refused.append(layer)
            raise MediumError("no memory")
        return start(session, layer, plane)

    monkeypatch.setattr(SparseSession, "_start_probes", scarce)
    monkeypatch.setattr("impress.read.sparse.LAYERS_AHEAD", 1)
    with store.lease(prompt(N_TOKENS)) as lease:
        got, _ = retrieve_all(lease, Quality(), ahead=True)
    assert len(got) == store.geometry.n_layers and refused
    wait_for_promotions(store)
    assert store.buffers.used_bytes == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("policy", [*POLICIES[:6], *POLICIES[10:12]], ids=lambda p: p.name)
def test_a_query_that_is_to_be_differentiated_chooses_the_same_rows(
    open_store: Open, shape: str, policy: Policy
) -> None:
    """Outside of no_grad, torch said of whichever product came first that out= does not go with
    that, and nothing was chosen."""
    geometry = SHAPES[shape]
    store = open_store(geometry, probes=("heads3-v1", "int4-v2"))
    fill(store)
    with store.lease(prompt(N_TOKENS)) as lease:
        want, _ = retrieve_all(lease, policy)
        with lease.session(policy) as session:
            for layer, rows in enumerate(want):
                query, lse = asked(geometry, layer)
                lse.requires_grad_()
                got = session.retrieve(layer, query.requires_grad_(), suffix_lse=lse)
                assert all(map(torch.equal, got, rows))
                assert not any(one.requires_grad for one in got)


def test_new_keys_that_are_to_be_differentiated_have_the_same_weight() -> None:
    query, new = torch.randn(4, N_QUERY, 16), torch.randn(2, N_QUERY, 16)
    want = suffix_lse_of(query, new, 0.25)
    got = suffix_lse_of(query.requires_grad_(), new.requires_grad_(), 0.25)
    assert torch.equal(got, want) and not got.requires_grad


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("policy", [*POLICIES[:6], Pages(keep=0.2)], ids=lambda p: p.name)
def test_selections_are_the_same_from_every_tier_after_restart_and_without_records(
    open_store: Open, shape: str, policy: Policy, tmp_path: Path
) -> None:
    probes = ("heads3-v1", "int4-v2", "pages16-v1")
    store = open_store(SHAPES[shape], probes=probes)
    fill(store)
    tokens = prompt(N_TOKENS)
    with store.lease(tokens) as lease:
        first, _ = retrieve_all(lease, policy)
        retrieve_all(lease, Exact())  # brings the chunks into DRAM
        again, _ = retrieve_all(lease, policy)
    store.close()
    reopened = open_store(SHAPES[shape], probes=probes)
    with reopened.lease(tokens) as lease:
        restarted, _ = retrieve_all(lease, policy)
    config = impress.Config(**SMALL)
    bare = impress.PrefixStore.open(tmp_path / "bare", SHAPES[shape], "test", config)
    with bare:
        fill(bare)
        with bare.lease(tokens) as lease:
            rebuilt, lines = retrieve_all(lease, policy)
        keys_bytes = N_TOKENS * SHAPES[shape].k_row_bytes
        assert all(sum(line["bytes"].values()) >= keys_bytes for line in lines)
    for other in (again, restarted, rebuilt):
        for (_, _, want), (_, _, pos) in zip(first, other, strict=True):
            assert torch.equal(want, pos)


def test_the_paper_reads_little_to_know_and_then_what_it_chose(open_store: Open) -> None:
    geometry = SHAPES["mha"]
    store = open_store(geometry, probes=("heads3-v1",), dram_bytes=0, read_gap_bytes=0)
    fill(store)
    with store.lease(prompt(N_TOKENS)) as lease:
        _, lines = retrieve_all(lease, Paper(keep=0.05, gate=False))
    for line in lines:
        assert line["chosen"] == 23  # ceil(.05 · 448)
        probe_bytes = N_TOKENS * 3 * 32 * 2
        assert line["wanted_bytes"] == 23 * geometry.token_bytes // 2 + probe_bytes
        pieces = PIECES_AT_MOST * 23 * 4096
        assert probe_bytes + 23 * 2 * 512 <= line["bytes"]["ssd"] <= probe_bytes + pieces


PIECES_AT_MOST = 2  # one of K and one of V for each row, when none lie together


def test_keys_that_are_chosen_by_are_read_ahead_two_layers_at_a_time(open_store: Open) -> None:
    """All keys of a layer used to be read only in its turn, with the disk idle until then."""
    store = open_store(impress.Geometry(5, 4, 4, 64, "float32"), dram_bytes=0)  # holds no copies
    fill(store)
    of_layer = N_TOKENS * store.geometry.k_row_bytes
    with store.lease(prompt(N_TOKENS)) as lease:
        for policy, held in (
            (AllHeads(keep=0.2), [2, 2, 2, 2, 1, 0]),
            (Contiguous(keep=0.2, period=4), [1, 0, 0, 1, 1, 0]),  # layers 0 and 4
            (Paper(keep=0.2, gate=False), [2, 2, 2, 2, 1, 0]),  # stored without records
            (Recency(keep=0.2), [0, 0, 0, 0, 0, 0]),
        ):
            plain, lines = retrieve_all(lease, policy)
            assert store._pool.idle(60)
            with lease.session(policy) as session:
                session.prefetch()
                found = [store.buffers.used_bytes]
                for layer, (k, _, positions) in enumerate(plain):
                    query, lse = asked(store.geometry, layer)
                    got, _, where = session.retrieve(layer, query, suffix_lse=lse)
                    assert torch.equal(got, k) and torch.equal(where, positions)
                    assert store._pool.idle(60)
                    found.append(store.buffers.used_bytes)
                assert found == [n * of_layer for n in held], policy.name
                read = [sum(line["bytes"].values()) for line in session.report().per_layer]
                assert read == [sum(line["bytes"].values()) for line in lines]  # nothing twice
            assert store._pool.idle(60)
        with lease.session(AllHeads(keep=0.2)) as session:
            session.prefetch()
    assert store._pool.idle(60) and store.buffers.used_bytes == 0
    store.check()


def test_a_layer_that_falls_back_is_brought_whole(open_store: Open) -> None:
    store = open_store(SHAPES["mha"], probes=("heads3-v1",))
    fill(store)
    with store.lease(prompt(N_TOKENS)) as lease:
        got, lines = retrieve_all(lease, Paper(keep=0.05, alpha=0.0))
    assert all(len(pos) == N_TOKENS for _, _, pos in got)
    assert all(line["fell_back"] for line in lines)


def test_quality_loads_all_where_attention_is_diffuse_and_says_what_it_misses(
    open_store: Open,
) -> None:
    geometry = impress.Geometry(1, 8, 8, 32, "float32")
    store = open_store(geometry, probes=("int4-v2",))
    tokens, generator = prompt(256), torch.Generator().manual_seed(0)
    keys = 0.01 * torch.randn(1, 8, 256, 32, generator=generator)
    store.store(tokens, list(keys), list(keys)).wait(60)
    query = torch.randn(8, 3, 32, generator=generator)
    lse = torch.full((8, 3), -50.0)
    with store.lease(tokens) as lease:
        with lease.session(Quality(max_missing_mass=0.1)) as session:
            assert len(session.retrieve(0, query, suffix_lse=lse)[2]) == 256
        cap = 96 * geometry.token_bytes
        with lease.session(Quality(max_missing_mass=0.1, max_bytes=cap)) as session:
            assert len(session.retrieve(0, query, suffix_lse=lse)[2]) <= 96
            (line,) = session.report().per_layer
            assert line["reason"] == "capped" and line["estimated_missing_mass"] > 0.5


@pytest.mark.parametrize("probes", [("int4-v2",), ()], ids=["records", "keys"])
def test_a_cap_without_room_for_a_window_beside_what_is_read_to_choose_chooses_nothing(
    open_store: Open, probes: tuple[str, ...]
) -> None:
    """The sketch alone was over the cap, no row of the prefix was left, and the layer was answered
    without the prefix; where records had to be made, all keys were read but not counted."""
    geometry = SHAPES["mha"]
    store = open_store(geometry, probes=probes, dram_bytes=0)
    fill(store)
    k, v = geometry.k_row_bytes, geometry.v_row_bytes
    with store.lease(prompt(N_TOKENS)) as lease:  # of a policy that asks Quality, as of itself
        _, lines = retrieve_all(lease, Watched(Quality(max_bytes=64 * (k + v))))
        assert {line["reason"] for line in lines} == {"no room"}
    read = N_TOKENS * 144 + 64 * (k + v) if probes else N_TOKENS * k + 64 * v
    with store.lease(prompt(N_TOKENS)) as lease:
        with pytest.raises(impress.BadInput, match="under one window"):
            lease.session(Quality(max_bytes=64 * (k + v) - 1))
        for ahead in (False, True):
            for cap in (64 * (k + v), read - 1):
                got, lines = retrieve_all(lease, Quality(max_bytes=cap), ahead=ahead)
                for (_, _, pos), line in zip(got, lines, strict=True):
                    assert len(pos) == N_TOKENS and line["reason"] == "no room"
                    assert line["fell_back"] and line["estimated_missing_mass"] == 0
                    assert line["wanted_bytes"] == N_TOKENS * (k + v)
                    assert sum(line["bytes"].values()) == N_TOKENS * (k + v)
            got, lines = retrieve_all(lease, Quality(0.0, max_bytes=read), ahead=ahead)
            for (_, _, pos), line in zip(got, lines, strict=True):
                assert len(pos) == 64 and line["wanted_bytes"] == read
                assert line["reason"] == "capped" and line["estimated_missing_mass"] > 0.1
    wait_for_promotions(store)
    assert store.buffers.used_bytes == 0


def test_a_policy_without_an_identifier_gets_no_session(open_store: Open) -> None:
    store = open_store(SHAPES["mha"])
    fill(store)
    with store.lease(prompt(N_TOKENS)) as lease:
        with pytest.raises(impress.ImpressError, match="not one this version can serve"):
            lease.session(SimpleNamespace(name="mine", probe=None))  # type: ignore[arg-type]
        with pytest.raises(impress.ImpressError, match="not one this version can serve"):
            lease.session(object())  # type: ignore[arg-type]  # singledispatch knows it: as a refusal
        with pytest.raises(impress.ImpressError, match="'int9-v1' is not known"):
            lease.session(Quality(probe="int9-v1"))


def test_a_policy_that_can_never_be_kept_to_gets_no_session(open_store: Open) -> None:
    """Pages passed for tokens, and three heads for all; a unit failed in a hit's first layer."""
    store = open_store(SHAPES["mha"], probes=("heads3-v1", "pages16-v1"))
    fill(store)
    with store.lease(prompt(N_TOKENS)) as lease:
        for probe in ("heads3-v1", "pages16-v1"):
            with pytest.raises(impress.BadInput, match=f"'{probe}' does not look at every token"):
                lease.session(Quality(probe=probe))
        with pytest.raises(impress.BadInput, match="unit 24 does not divide the window of 64"):
            lease.session(Contiguous(unit=24))


@dataclass(frozen=True)
class Said:
    """The policy of an identifier that returns `found`, whatever it is asked."""

    found: Any
    name: str = "said"
    needs_suffix_lse: bool = False
    probe: str | None = None


@select.register
def _(policy: Said, asked: Asked) -> Any:
    return policy.found


def rows_at(*positions: Any, dtype: type = np.int64) -> Selection:
    return Selection(np.array(positions, dtype), 0.0, 0.0, False, "given")


NO_ROWS = {
    "behind the prefix": rows_at(3, N_TOKENS),
    "far behind it": rows_at(1 << 40),
    "before it": rows_at(-1, 3),
    "descending": rows_at(5, 2),
    "twice": rows_at(2, 2, 5),
    "floats": rows_at(1, 2, dtype=float),
    "two dimensions": rows_at([1, 2]),
    "a mask": rows_at(*[False, True] * (N_TOKENS // 2), dtype=bool),
    "a mask of ints": rows_at(*[0, 1] * (N_TOKENS // 2)),
    "a list": Selection([1, 2, 5], 0.0, 0.0, False, "given"),  # type: ignore[arg-type]
    "no selection": np.arange(3),
    "nothing": None,
}


@pytest.mark.parametrize("found", NO_ROWS.values(), ids=NO_ROWS)
def test_an_identifier_that_names_no_rows_of_the_prefix_is_refused(
    open_store: Open, found: Any
) -> None:
    """Fewer rows came than positions, other bytes were read, and the span was dropped as damaged; a
    mask brought rows 0 and 1 over and over."""
    store = open_store(SHAPES["mha"])
    fill(store)
    with store.lease(prompt(N_TOKENS)) as lease, lease.session(Said(found)) as session:
        for layer in range(2):
            with pytest.raises(impress.ImpressError, match="said: its identifier"):
                session.retrieve(layer, None)
    wait_for_promotions(store)
    assert store.buffers.used_bytes == 0
    assert store.lookup(prompt(N_TOKENS)) == N_TOKENS
    with store.lease(prompt(N_TOKENS)) as lease:
        retrieve_all(lease, Said(rows_at()))  # choosing no row is allowed


@pytest.mark.parametrize("group", [48, 128])
def test_a_codec_whose_groups_do_not_fill_windows_is_refused(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    """A store became READY and its first lease dropped it as unreadable, or a division failed."""
    for codec in (LowBit("wide-v1", 4, group), MinMax("none-v1", 1)):
        monkeypatch.setitem(probes._CODECS, codec.name, codec)
    monkeypatch.setattr(MinMax, "probe_bytes", lambda codec, geometry: 0)
    for name, said in (("wide-v1", f"{group} tokens"), ("none-v1", "0 bytes")):
        with pytest.raises(impress.ConfigError, match=f"'{name}' makes records of .*{said}"):
            open_store(SHAPES["mha"], probes=(name,))
    store = open_store(SHAPES["mha"])
    fill(store)
    with (
        store.lease(prompt(N_TOKENS)) as lease,
        pytest.raises(impress.BadInput, match=f"said: .*'wide-v1' makes records of {group} tokens"),
    ):
        lease.session(Said(None, probe="wide-v1"))


@pytest.mark.parametrize(
    "made",
    [np.ones((N_TOKENS // 2, 144), np.uint8), np.ones((N_TOKENS, 144), np.float32), None],
    ids=["too few", "floats", "nothing"],
)
def test_a_codec_that_makes_other_records_than_it_says_fails_the_store(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, made: Any
) -> None:
    """They were stored, and rows were chosen by other tokens' records."""
    odd = LowBit("odd-v1", 4)
    monkeypatch.setitem(probes._CODECS, odd.name, odd)
    store = open_store(SHAPES["mha"])
    fill(store)
    monkeypatch.setattr(LowBit, "encode", lambda codec, keys, geometry, params=None: made)
    query, lse = asked(store.geometry, 0)
    with (
        store.lease(prompt(N_TOKENS)) as lease,
        lease.session(Quality(probe=odd.name)) as session,
        pytest.raises(impress.ImpressError, match="'odd-v1': encode must return"),
    ):
        session.retrieve(0, query, suffix_lse=lse)  # records made from its keys
    store.close()
    again = open_store(SHAPES["mha"], probes=(odd.name,))
    keys, values = kv(again.geometry)
    with pytest.raises(impress.StoreFailed, match="'odd-v1': encode must return"):
        again.store(prompt(N_TOKENS, seed=1), keys, values).wait(60)


def test_records_of_a_codec_nobody_knows_any_more_are_passed_over(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = LowBit("int4-v9", 4)
    monkeypatch.setitem(probes._CODECS, newer.name, newer)
    store = open_store(SHAPES["mha"], probes=(newer.name,))
    fill(store)
    store.close()
    monkeypatch.delitem(probes._CODECS, newer.name)
    reopened = open_store(SHAPES["mha"], probes=("heads3-v1",))
    keys, _ = kv(SHAPES["mha"])
    with reopened.lease(prompt(N_TOKENS)) as lease:
        for policy in (Exact(), Paper(keep=0.1, gate=False), Quality()):
            got, _ = retrieve_all(lease, policy)
            assert all(torch.equal(k, keys[i][:, pos]) for i, (k, _, pos) in enumerate(got))


def test_a_sparse_session_holds_only_the_rows_it_gave(open_store: Open) -> None:
    """Staging once stayed rented until close: twice the chosen rows, for every layer at once."""
    store = open_store(SHAPES["mha"], probes=("heads3-v1",), dram_bytes=0)
    fill(store)
    query, lse = asked(store.geometry, 0)
    with store.lease(prompt(N_TOKENS)) as lease, lease.session(Paper(gate=False)) as session:
        session.retrieve(0, query, suffix_lse=lse)
        wait_for_promotions(store)
        assert store.buffers.used_bytes == 0


def test_what_a_sparse_session_cannot_do_is_said(open_store: Open) -> None:
    store = open_store(SHAPES["mha"], probes=("heads3-v1",))
    fill(store)
    query, lse = asked(store.geometry, 0)
    with store.lease(prompt(N_TOKENS)) as lease, lease.session(Paper()) as session:
        assert session.needs_suffix_lse
        with pytest.raises(impress.ImpressError, match="paper needs suffix_lse"):
            session.retrieve(0, query)
        out = (torch.empty(8, N_TOKENS, 32), torch.empty(8, N_TOKENS, 32))
        with pytest.raises(impress.BadInput, match="chooses how many rows"):
            session.retrieve(0, query, suffix_lse=lse, out=out)
        with pytest.raises(impress.BadInput, match="chooses how many rows"):
            session.prefetch([out, out])
    store.close()
    with pytest.raises(impress.ImpressError, match="probe codec 'heads4-v1' is not known"):
        open_store(SHAPES["mha"], probes=("heads4-v1",))


@pytest.mark.parametrize("at", ["probe", "rows"])
def test_a_damaged_piece_is_a_loss_in_a_sparse_session_too(open_store: Open, at: str) -> None:
    store = open_store(SHAPES["mha"], probes=("heads3-v1",), dram_bytes=0)
    fill(store)
    record = store.catalog.records()[0]
    part = record.parts[0]
    flip_a_bit(store.path, part, part.length - 100 if at == "probe" else 20_000)
    with store.lease(prompt(N_TOKENS)) as lease:
        with pytest.raises(impress.PrefixLost):
            retrieve_all(lease, Paper(keep=0.9, gate=False))
    assert store.lookup(prompt(N_TOKENS)) < N_TOKENS
    store.flush()
    store.check()
    wait_for_promotions(store)
    assert store.buffers.used_bytes == 0


@pytest.mark.parametrize(("engine", "least", "most"), [("preadv", 4, 12), ("aio", 1, 1)])
def test_scattered_rows_are_cut_for_threads_only_where_a_thread_reads_one_by_one(
    engine: str, least: int, most: int, tmp_path: Path
) -> None:
    """A queue has many requests under way at once: more slices only pass the interpreter around.
    Without a queue, requests wait for each other within a slice."""
    if why := why_not(engine):
        pytest.skip(f"io_engine {engine}: {why}")
    geometry = impress.Geometry(1, 16, 16, 64, "float16")  # rows of 2 KiB
    config = impress.Config(io_engine=engine, dram_bytes=0, read_gap_bytes=0)
    tokens, shape = prompt(2048), (16, 2048, 64)
    with impress.PrefixStore.open(tmp_path / "store", geometry, "cut", config) as store:
        if not store.ssd.direct:
            pytest.skip("this file system refuses O_DIRECT: no queue is used")
        rows = [torch.randn(shape, dtype=torch.float16) for _ in range(2)]
        store.store(tokens, [rows[0]], [rows[1]]).wait()
        store.flush()
        slices: list[int] = []
        read = store.ssd.read
        store.ssd.read = lambda reads, *then: (slices.append(len(reads)), read(reads, *then))[1]  # type: ignore[method-assign]
        with store.lease(tokens) as lease, lease.session(Random(0.125)) as session:
            k, v, positions = session.retrieve(0, None)
        assert torch.equal(k, rows[0][:, positions]) and torch.equal(v, rows[1][:, positions])
        assert sum(slices) > 100  # scattered
        assert least <= len([n for n in slices if n > 1]) <= most  # 1: sums
