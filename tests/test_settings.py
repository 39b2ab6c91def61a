"""Settings that no other test looks at: each by what it does, through an open store."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import pytest
from conftest import MIB, assert_serves, look, prompt, put_prompt

import impress
from impress.write.budget import Pace
from tiers.engines import ENGINES, why_not
from tiers.ticket import Signal

Open = Callable[..., impress.PrefixStore]
EVERY_S = 1234.5


class Driven(Signal):
    """Its wait of EVERY_S ends when the test says so, or when it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.turns = threading.Semaphore(0), threading.Semaphore(0)

    def wait(self, timeout_s: float | None = None) -> bool:
        if timeout_s != EVERY_S:
            return super().wait(timeout_s)
        self.waits.release()
        self.turns.acquire()
        return self.is_set()

    def set(self) -> None:
        super().set()
        self.turns.release()


def test_rows_move_together_in_the_background_each_time_the_wait_is_over(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("impress.repacking.repack.Signal", Driven)
    store = open_store(geometry, repack_every_s=EVERY_S)
    assert store._repacker is not None
    stop = store._repacker._stop
    assert isinstance(stop, Driven) and stop.waits.acquire(timeout=60)
    put_prompt(store, prompt(256)).wait(60)
    look(store, prompt(256))
    for _ in range(8):
        assert_serves(store, prompt(256), 256)
    assert store.stats()["repacks"] == {}
    for _ in range(2):  # the second finds nothing to do
        stop.turns.release()
        assert stop.waits.acquire(timeout=60)
        assert store.stats()["repacks"] == {"yes": 1}
    assert_serves(store, prompt(256), 256)


def test_repacking_keeps_to_its_rate(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a Pace does with its rate is tested elsewhere (test_repack)."""
    rates, made = [], []

    class Seen(Pace):
        def __init__(self, bytes_per_s: int, *rest: object) -> None:
            super().__init__(bytes_per_s, *rest)
            rates.append(bytes_per_s)

        def go(self, n_bytes: int) -> bool:
            made.append(n_bytes)
            return super().go(n_bytes)

    monkeypatch.setattr("impress.repacking.repack.Pace", Seen)
    store = open_store(geometry, repack_every_s=0, repack_bytes_per_s=1 << 40)
    put_prompt(store, prompt(256)).wait(60)
    look(store, prompt(256))
    report = store.repack()
    assert report.moved == 1 and rates == [1 << 40]
    assert sum(made) >= 2 * report.moved_bytes - MIB // 8  # read and written; headers are small


@pytest.mark.parametrize("durable", [True, False])
def test_only_a_durable_store_waits_for_the_disk(
    open_store: Open, geometry: impress.Geometry, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    synced, fdatasync = [], os.fdatasync

    def seen(fd: int) -> None:
        synced.append(fd)
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", seen)
    store = open_store(geometry, durable=durable, repack_every_s=0)
    assert put_prompt(store, prompt(256)).wait(60)
    assert bool(synced) == durable
    assert_serves(store, prompt(256), 256)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_store_reads_with_the_engine_it_was_told(
    open_store: Open, geometry: impress.Geometry, engine: str
) -> None:
    if why_not(engine):
        pytest.skip(f"{engine}: {why_not(engine)}")
    store = open_store(geometry, io_engine=engine, dram_bytes=0)
    put_prompt(store, prompt(128)).wait(60)
    assert put_prompt(store, prompt(320)).wait(60)
    assert store.ssd.engine == engine
    assert_serves(store, prompt(320), 320)
    store.close()
    assert_serves(open_store(geometry, io_engine=engine), prompt(320), 320)


def test_metrics_are_served_on_127_0_0_1_alone(
    open_store: Open, geometry: impress.Geometry
) -> None:
    """docs/SECURITY.md says so; 127.0.0.2 is this machine as well."""
    port = open_store(geometry, metrics_port=0).metrics_port
    socket.create_connection(("127.0.0.1", port), 60).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 60)
