"""What storing does for a device's sake, on one that is played: it only says what it has."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import impress
from impress.engines.hf_cache import RowsCache
from impress.engines.hf_storing import Job, StoreQueue
from tiers.slots import BufferPool

DEVICE = torch.device("cuda", 0)


class Held:
    """A request's cache, whose rows hold so much of a device."""

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
    """Those of five requests stayed there, however large they were, and the next one's found no
    memory."""
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


def test_a_cache_tells_what_it_holds_of_each_device():
    cache = RowsCache(impress.Geometry(1, 2, 1, 8, "float32"), 1, 8, BufferPool(None))
    there = SimpleNamespace(is_cuda=True, device=DEVICE, nbytes=7)
    other = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1), nbytes=5)
    here = SimpleNamespace(is_cuda=False, device=torch.device("cpu"), nbytes=3)
    layers = [there, there], [other], [here, here]
    cache.layers = [SimpleNamespace(own_rows=lambda rows=rows: rows) for rows in layers]
    assert cache.device_bytes() == {DEVICE: 14, other.device: 5}
