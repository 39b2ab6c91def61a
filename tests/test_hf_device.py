"""What storing does for a device's sake, on a mock device that only says what it has."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import impress
from impress.engines.hf_audit import Auditor, Turn, Watch
from impress.engines.hf_cache import RowsCache
from impress.engines.hf_storing import Job, StoreQueue
from impress.policy import Quality
from tiers.line import Line
from tiers.slots import BufferPool

DEVICE = torch.device("cuda", 0)


class Held:
    """A request's cache whose rows hold `n_bytes` of a device."""

    def __init__(self, n_bytes):
        self.n_bytes = n_bytes

    def device_bytes(self):
        return Counter({DEVICE: self.n_bytes}) if self.n_bytes else Counter()


@pytest.fixture
def played(monkeypatch):
    """A device with 120 bytes free, 20 of which torch keeps."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)


@pytest.mark.usefixtures("played")
def test_rows_that_wait_to_be_stored_leave_a_device_half_of_what_it_has_free():
    """The rows of five requests stayed there, however large they were, and those of the next found
    no memory."""
    line, freed = StoreQueue(None), []
    busy, may_end = threading.Event(), threading.Event()

    def hold():
        busy.set()
        assert may_end.wait(60)

    def offer(n_bytes):
        job = Job(Held(n_bytes), (), lambda: freed.append(n_bytes))
        line.offer(job)
        return job.outcome.refused

    line.offer(Job(Held(20), (), hold))
    assert busy.wait(60)
    try:
        waiting = [offer(n_bytes) for n_bytes in (40, 1, 0)]
        gone = list(freed)
    finally:
        may_end.set()
        line.drain()
    behind = [offer(60), offer(61)]
    line.close()
    assert waiting == [
        "",  # with the one that is being stored, just half
        "what waits to be stored would hold 61 bytes of cuda:0, and only 120 are free there",
        "",  # in host memory
    ]
    assert gone == [1]
    assert not behind[0] and behind[1]
    assert (line.n_skipped, sorted(freed)) == (2, [0, 1, 40, 60, 61])


@pytest.mark.usefixtures("played")
def test_what_waits_to_be_weighed_leaves_a_device_half_of_what_it_has_free(caplog):
    """Under a policy that earns trust, each hit's rows stay for the guard: beside those of three
    hits the next request found no memory."""
    freed, dropped, stored = [], [], [Held(20)]
    ledgers = SimpleNamespace(dropped=dropped.append)
    auditor = Auditor(None, SimpleNamespace(ledgers=ledgers), Turn(), lambda: None, lambda: stored)
    busy, may_end = threading.Event(), threading.Event()

    def hold(watch):
        busy.set()
        assert may_end.wait(60)
        watch.drop()

    auditor._line = Line("test", hold, 9)

    def offer(name, cache):
        lease = SimpleNamespace(release=lambda: freed.append(name))
        auditor.offer(Watch(name, Quality(), lease, 0, cache=cache))

    offer(b"first", Held(30))
    assert busy.wait(60)
    try:
        offer(b"just half", Held(10))
        offer(b"too much", Held(1))
        offer(b"stored, too", stored[0])
        offer(b"sparse", None)
        assert dropped == freed == [b"too much"]
        offer(b"again", Held(1))
        assert dropped.pop() == freed.pop() == b"again"
        (said,) = caplog.messages  # once
        assert "no shadow under quality" in said and "41 bytes of cuda:0" not in said
    finally:
        may_end.set()
        auditor.close()
    assert freed[1:] == [b"first", b"just half", b"stored, too", b"sparse"]


def test_a_cache_tells_what_it_holds_of_each_device():
    cache = RowsCache(impress.Geometry(1, 2, 1, 8, "float32"), 1, 8, BufferPool(None))
    there = SimpleNamespace(is_cuda=True, device=DEVICE, nbytes=7)
    other = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1), nbytes=5)
    here = SimpleNamespace(is_cuda=False, device=torch.device("cpu"), nbytes=3)
    layers = [there, there], [other], [here, here]
    cache.layers = [SimpleNamespace(own_rows=lambda rows=rows: rows) for rows in layers]
    assert cache.device_bytes() == {DEVICE: 14, other.device: 5}


class Noted:
    """A stream, or an event on one, that only notes what was asked of it."""

    def __init__(self, name, said):
        self.name, self.said = name, said

    def record_event(self):
        return Noted(f"{self.name} by now", self.said)

    def wait_event(self, event):
        self.said.append(f"{self.name} waits for {event.name}")


def test_rows_are_copied_from_a_device_beside_what_it_computes_for_later_requests(
    open_store, geometry, monkeypatch
):
    """They were copied in line with its computing: after the next request's kernels, and before
    those that followed."""
    said, names = [], iter(("copies",))

    @contextmanager
    def on(stream):
        said.append(f"on {stream.name}")
        yield
        said.append(f"off {stream.name}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Noted(next(names), said))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Noted("the request", said))
    monkeypatch.setattr(torch.cuda, "stream", on)

    class Layer:
        def rows(self, row, first, end):
            said.append(f"rows {first} to {end}")
            return (torch.zeros(geometry.n_kv_heads, end - first, geometry.head_dim),) * 2

    def cache():
        layers = [Layer() for _ in range(geometry.n_layers)]
        return SimpleNamespace(
            layers=layers, length=128, observed=None, release=lambda: said.append("released"),
            devices=lambda: {DEVICE}, device_bytes=Counter,
        )  # fmt: skip

    store = open_store(geometry)
    line = StoreQueue(store)
    for first in (0, 1000):
        sequences = torch.arange(first, first + 129)[None]
        job = line.job(cache(), sequences, 129, None)
        line.offer(job)
        line.drain()
        assert job.outcome.so_far() == {"stored_tokens": 128, "refused": ""}
        waits = ["copies waits for the request by now", "on copies"]
        assert said == [*waits, *["rows 0 to 128"] * 2, "off copies", "released"]
        said.clear()
    line.close()


def test_a_cache_tells_which_devices_its_rows_are_on():
    cache = RowsCache(impress.Geometry(1, 2, 1, 8, "float32"), 1, 8, BufferPool(None))
    assert not cache.devices()
    there = SimpleNamespace(is_cuda=True, device=DEVICE)
    here = SimpleNamespace(is_cuda=False, device=torch.device("cpu"))
    cache.layers = [SimpleNamespace(all_rows=lambda rows=rows: rows) for rows in ([there], [here])]
    assert cache.devices() == {DEVICE}
