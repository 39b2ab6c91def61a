"""Memory that a caller gives to be read into: what is in it once `retrieve` has returned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from conftest import kv_of, prompt, put_prompt, read_limit

import impress
from impress.errors import ImpressError
from impress.policy import Exact, Paper, Policy
from impress.read import load as loads
from tiers.iopool import Lane
from tiers.slots import aligned
from tiers.ticket import Ticket

Open = Callable[..., impress.PrefixStore]
Pair = tuple[torch.Tensor, torch.Tensor]
N = 256


def rows(geometry: impress.Geometry) -> torch.Tensor:
    """Memory for a plane, token-major, so that it is read into directly."""
    heads, dim = geometry.n_kv_heads, geometry.head_dim
    memory = torch.frombuffer(aligned(N * heads * dim * 4), dtype=torch.float32)
    return memory[: N * heads * dim].view(N, heads, dim).transpose(0, 1)


def pairs(geometry: impress.Geometry) -> list[Pair]:
    return [(rows(geometry), rows(geometry)) for _ in range(geometry.n_layers)]


def assert_in(out: Pair, layer: int, geometry: impress.Geometry) -> None:
    for found, want in zip(out, kv_of(prompt(N), geometry), strict=True):
        assert np.array_equal(found.numpy(), want[layer])


@pytest.fixture
def store(open_store: Open, geometry: impress.Geometry) -> impress.PrefixStore:
    made = open_store(geometry, dram_bytes=0)
    put_prompt(made, prompt(N)).wait(60)
    return made


class Gate:
    """Once shut, it holds reads of the SSD until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: impress.PrefixStore) -> None:
        self.opened, self.begun, self.shut = threading.Event(), threading.Event(), False
        read = store.ssd.read

        def held(reads: list, *then: object) -> None:
            if self.shut:
                self.begun.set()
                self.opened.wait(60)
            read(reads, *then)

        monkeypatch.setattr(store.ssd, "read", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, store: impress.PrefixStore) -> Iterator[Gate]:
    made = Gate(monkeypatch, store)
    yield made
    made.opened.set()


def test_layers_are_begun_when_asked_for_and_their_memory_given_back(
    store: impress.PrefixStore, geometry: impress.Geometry
) -> None:
    """For a caller that copies each layer at once: never more than two layers' memory is taken."""
    n_bytes = N * geometry.token_bytes // geometry.n_layers
    with store.lease(prompt(N)) as lease, lease.session() as session:
        session.prefetch(layers=[0])
        assert store.buffers.used_bytes == n_bytes
        for layer in range(geometry.n_layers):
            if layer + 1 < geometry.n_layers:
                session.prefetch(layers=[layer + 1])
            assert store.buffers.used_bytes <= 2 * n_bytes
            k, v, _ = session.retrieve(layer, None)
            assert_in((k, v), layer, geometry)
            session.let_go(layer)
        assert store.buffers.used_bytes == 0
        for wrong in ({"layers": [geometry.n_layers]}, {"layers": [0], "outs": pairs(geometry)}):
            with pytest.raises(impress.BadInput, match="prefetch: "):
                session.prefetch(**wrong)


@pytest.mark.parametrize("policy", [Exact(), Paper(keep=0.2)], ids=lambda policy: policy.name)
def test_a_session_that_was_closed_reads_nothing_ahead(
    open_store: Open, geometry: impress.Geometry, policy: Policy
) -> None:
    """It began loads that nobody ended: their chunks stayed pinned until the store was closed."""
    store = open_store(geometry, probes=("heads3-v1",))
    put_prompt(store, prompt(N)).wait(60)
    with store.lease(prompt(N)) as lease:
        session = lease.session(policy)
        session.close()
        with pytest.raises(ImpressError, match="closed"):
            session.prefetch()
    assert store.buffers.used_bytes == 0
    store.check()


@pytest.mark.parametrize("where", ["parts_of", "gathers_of", "plan_reads"])
def test_a_request_that_finds_no_memory_to_plan_with_is_a_miss(
    store: impress.PrefixStore, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Only a shortage in a reading thread was a miss: an engine handles a lost prefix and nothing
    else, so that a request ended with a MemoryError instead of computing."""

    def lacking(*_args: object, **_named: object) -> None:
        raise MemoryError

    monkeypatch.setattr(loads, where, lacking)
    with store.lease(prompt(N)) as lease, lease.session() as session:
        for act in (session.prefetch, lambda: session.retrieve(0, None)):
            with pytest.raises(impress.PrefixLost, match="shortage"):
                act()
    assert store.stats()["lost"] == {"shortage": 2}
    assert store.buffers.used_bytes == 0


def test_memory_given_when_reads_are_under_way_has_the_rows(
    store: impress.PrefixStore, geometry: impress.Geometry
) -> None:
    """It was left unchanged without a word: a caller that looked there computed on what it held."""
    with store.lease(prompt(N)) as lease, lease.session() as session:
        session.prefetch()
        for outs in (pairs(geometry), pairs(geometry)):  # rows go to the last ones
            session.prefetch(outs)
        for layer in range(geometry.n_layers):
            session.retrieve(layer, None)
            assert_in(outs[layer], layer, geometry)


def test_layers_that_share_memory_are_refused(
    store: impress.PrefixStore, geometry: impress.Geometry
) -> None:
    """Each layer was read into it and verified; what was retrieved as the first could be the one
    read last. In the same way keys could be values."""
    one, other, third = (rows(geometry) for _ in range(3))
    shape = geometry.n_kv_heads, N, geometry.head_dim
    k, v = torch.empty(shape), torch.empty(shape)  # copied into on retrieval
    said = "two tensors of outs share memory"
    with store.lease(prompt(N)) as lease, lease.session() as session:
        for pair in ((one, other), (one, one), (k, k)):
            with pytest.raises(impress.BadInput, match=said):
                session.prefetch([pair] * geometry.n_layers)
        for same in (one, k):
            with pytest.raises(impress.BadInput, match=said):
                session.retrieve(0, None, out=(same, same))
        session.retrieve(0, None, out=(one, other))
        session.retrieve(1, None, out=(one, other))  # what was there before has been looked at
        assert_in((one, other), 1, geometry)
        session.prefetch([(k, v)] * geometry.n_layers)
        session.close()
    with store.lease(prompt(N)) as lease, lease.session() as session:
        outs = pairs(geometry)
        session.prefetch(outs)
        with pytest.raises(impress.BadInput, match=said):  # the next layer is on its way there
            session.retrieve(0, None, out=(third, outs[1][0]))
        session.retrieve(0, None, out=(third, one))
        assert_in((third, one), 0, geometry)


def test_memory_that_a_layer_is_on_its_way_to_is_given_for_nothing_else(
    store: impress.PrefixStore, geometry: impress.Geometry
) -> None:
    """Keys and values that were swapped, or given a row further on, overwrote each other and were
    returned without a word; a second prefetch wrote where another layer was being read and
    verified, and that layer's span was dropped as bad."""
    heads, dim = geometry.n_kv_heads, geometry.head_dim
    memory = torch.frombuffer(aligned((N + 1) * heads * dim * 4), dtype=torch.float32)
    longer = memory[: (N + 1) * heads * dim].view(N + 1, heads, dim).transpose(0, 1)
    first, shifted = longer[:, :N], longer[:, 1:]
    with store.lease(prompt(N)) as lease, lease.session() as session:
        outs = pairs(geometry)
        outs[0] = (first, outs[0][1])
        session.prefetch(outs)
        others = [pair[::-1] for pair in outs], outs[1:] + outs[:1], [(shifted, rows(geometry))] * 9
        for other in others:
            with pytest.raises(impress.BadInput, match=r"is being read to|share memory"):
                session.retrieve(0, None, out=tuple(other[0]))
        for other in others[:2]:
            with pytest.raises(impress.BadInput, match="is being read to"):
                session.prefetch(other)
        session.prefetch(outs)  # the same memory again
        for layer in range(geometry.n_layers):
            session.retrieve(layer, None, out=outs[layer])
            assert_in(outs[layer], layer, geometry)
    assert not store.stats()["quarantined_spans"]


def test_no_layer_is_copied_over_another_of_the_same_call(
    store: impress.PrefixStore, geometry: impress.Geometry
) -> None:
    """One tensor as rows for a layer, and as heads for the next: the first came back, unnoticed,
    with rows of the second."""
    heads, dim = geometry.n_kv_heads, geometry.head_dim
    memory = torch.frombuffer(aligned(N * heads * dim * 4), dtype=torch.float32)[: N * heads * dim]
    as_rows, as_heads = memory.view(N, heads, dim).transpose(0, 1), memory.view(heads, N, dim)
    with store.lease(prompt(N)) as lease, lease.session() as session:
        for pair in ((as_rows, as_heads), (as_heads, as_rows)):
            outs = pairs(geometry)
            outs[:2] = [(one, other) for one, (_, other) in zip(pair, outs[:2], strict=True)]
            with pytest.raises(impress.BadInput, match="is being read to"):
                session.prefetch(outs)
        apart = as_heads, torch.empty_like(as_heads)
        session.prefetch([apart] * geometry.n_layers)  # copied when each is asked for


def test_tensors_without_memory_are_refused(
    store: impress.PrefixStore, geometry: impress.Geometry
) -> None:
    shape = geometry.n_kv_heads, N, geometry.head_dim
    nowhere, here = torch.empty(shape, device="meta"), torch.empty(shape)
    with store.lease(prompt(N)) as lease, lease.session() as session:
        for pair in ((nowhere, nowhere), (here, nowhere), (nowhere, here)):
            with pytest.raises(impress.BadInput, match="tensors with memory"):
                session.retrieve(0, None, out=pair)


@pytest.mark.parametrize("apart", [True, False])
def test_two_views_of_one_tensor_may_lie_side_by_side(
    store: impress.PrefixStore, geometry: impress.Geometry, *, apart: bool
) -> None:
    """A view shifted against the other was copied over it: keys came back as values."""
    heads, dim = geometry.n_kv_heads, geometry.head_dim
    if apart:  # token by token, as engines keep them
        both = torch.empty(N, 2, heads, dim)
        pair = both[:, 0].transpose(0, 1), both[:, 1].transpose(0, 1)
    else:
        both = torch.empty(heads, N + 100, dim)
        pair = both[:, :N], both[:, 100:]
    with store.lease(prompt(N)) as lease, lease.session() as session:
        if not apart:
            with pytest.raises(impress.BadInput, match="two tensors of outs share memory"):
                session.retrieve(0, None, out=pair)
            return
        session.retrieve(0, None, out=pair)
        assert_in(pair, 0, geometry)


def test_another_view_of_memory_that_was_read_into_has_its_own_order(
    store: impress.PrefixStore, geometry: impress.Geometry
) -> None:
    """It begins at the same byte, and so was taken for the view that was read into."""
    heads, dim = geometry.n_kv_heads, geometry.head_dim
    outs = pairs(geometry)
    with store.lease(prompt(N)) as lease, lease.session() as session:
        session.prefetch(outs)
        flat = [out.transpose(0, 1).view(-1) for out in outs[1]]
        turned = (flat[0].view(heads, N, dim), flat[1].view(heads, N, dim))
        session.retrieve(1, None, out=turned)
        assert_in(turned, 1, geometry)


@pytest.mark.parametrize("lost_by", [impress.PrefixLost, KeyboardInterrupt])
def test_memory_that_a_lost_layer_may_still_be_read_into_is_not_read_into_again(
    store: impress.PrefixStore, geometry: impress.Geometry, gate: Gate,
    lost_by: type[BaseException], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The late bytes came when another layer's were there, verified and looked at. This was so
    after a time limit and after a signal, which does not stop a read under way either. Nor are rows
    copied there that had been on their way to a buffer."""
    out = pairs(geometry)[0]

    def wait(_ticket: Ticket, _limit_s: float) -> bool:
        assert gate.begun.wait(60)
        if lost_by is KeyboardInterrupt:
            raise KeyboardInterrupt
        return False

    with store.lease(prompt(N)) as lease, lease.session() as session:
        gate.shut = True
        with monkeypatch.context() as during:
            during.setattr(Ticket, "wait", wait)
            with pytest.raises(lost_by):
                session.retrieve(0, None, out=out)
        gate.shut = False  # only the reads that are under way hang
        with pytest.raises(impress.PrefixLost, match="still being read into"):
            session.retrieve(1, None, out=out)
        session.prefetch()
        with pytest.raises(impress.PrefixLost, match="still being read into"):
            session.retrieve(1, None, out=out)
        gate.opened.set()
        assert store._pool.idle(60)
        session.retrieve(1, None, out=out)
        assert_in(out, 1, geometry)


def test_a_read_that_the_end_of_the_lease_gave_up_is_not_called_late(
    store: impress.PrefixStore, geometry: impress.Geometry, gate: Gate
) -> None:
    """Where another thread released the lease, the next layer was lost because "a lost layer is
    still being read", and was counted as late, though nothing was."""
    outs = pairs(geometry)
    lease = store.lease(prompt(N))
    with lease.session() as session:
        gate.shut = True
        session.prefetch(outs)
        assert gate.begun.wait(60)
        lease.release()
        with pytest.raises(ImpressError, match="its lease has ended") as said:
            session.retrieve(0, None, out=outs[0])
        assert not isinstance(said.value, impress.PrefixLost)
        assert not any(store.stats()["lost"].values())
        gate.opened.set()


def test_closed_again_a_session_still_says_that_a_read_is_stuck(
    store: impress.PrefixStore, geometry: impress.Geometry, gate: Gate
) -> None:
    """The with-block's own close took the answer; the caller's next close said all was over."""
    with store.lease(prompt(N)) as lease:
        gate.shut = True
        with read_limit(store, 0.05):
            session = lease.session()
            session.prefetch(pairs(geometry))
            assert gate.begun.wait(60)
            assert not session.close()
            assert not session.close()
        gate.opened.set()
        assert store._pool.idle(60)
        assert session.close()


@pytest.mark.parametrize(
    ("error", "said"),
    [(MemoryError(), impress.PrefixLost), (ValueError("not thought of"), ValueError)],
    ids=["no memory", "a bug"],
)
def test_what_a_read_failed_with_is_said_once_and_not_by_close(
    store: impress.PrefixStore, geometry: impress.Geometry, error: Exception,
    said: type[Exception], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each close raised it again, before its caller had released the lease. And where Python had no
    memory to read with, the request failed although it could have been computed."""
    first, read = threading.Lock(), store.ssd.read

    def failing(reads: list, *then: object) -> None:
        if first.acquire(blocking=False):
            raise error
        read(reads, *then)

    with store.lease(prompt(N)) as lease:
        session = lease.session()
        monkeypatch.setattr(store.ssd, "read", failing)
        session.prefetch(pairs(geometry))
        with pytest.raises(said) as lost:
            for layer in range(geometry.n_layers):
                session.retrieve(layer, None)
        assert getattr(lost.value, "reason", "shortage") == "shortage"
        assert session.close() and session.close()
    with store.lease(prompt(N)) as lease:  # nothing was given up over it
        assert lease.n_tokens == N


@pytest.mark.parametrize("direct", [True, False])
def test_a_signal_while_reads_are_queued_leaves_their_memory_to_them(
    store: impress.PrefixStore, geometry: impress.Geometry, gate: Gate, direct: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Ctrl-C, caught by a notebook, came between queueing reads and noting them: they went on in
    memory that the next request was given."""
    submit = store._pool.submit

    def interrupted(lane: Lane, *args: object, **more: object) -> None:
        submit(lane, *args, **more)
        assert gate.begun.wait(60)
        raise KeyboardInterrupt

    with store.lease(prompt(N)) as lease, read_limit(store, 0.05):
        gate.shut = True
        session = lease.session()
        with monkeypatch.context() as during:
            during.setattr(store._pool, "submit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.prefetch(pairs(geometry) if direct else None)
        over = session.close()
        assert not over if direct else store.buffers.used_bytes > 0
    gate.opened.set()
    assert store._pool.idle(60)
    assert session.close() and store.buffers.used_bytes == 0
