"""Transformers engines that nobody closes, and requests that are broken off: what they leave."""

from __future__ import annotations

import atexit
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from test_engine_guard import Liar, NoRates, ask, filled, ledger_of
from test_engine_hf import CONFIG, prompts, tiny
from test_threads import Threads

from impress.engines import hf
from impress.engines.choice import Rates
from impress.engines.hf_audit import Auditor
from impress.engines.hf_mode import Modes
from impress.engines.hf_storing import StoreQueue
from impress.errors import ImpressError, StoreFailed
from impress.policy import Exact, Paper, Recency
from impress.store import PrefixStore
from tiers.ssd import SsdTier

pytestmark = pytest.mark.usefixtures("one_thread")

_ENDS_WITHOUT_CLOSE = """
import atexit, sys, threading
sys.path.insert(0, sys.argv[2])
from test_engine_guard import NoRates
from test_engine_hf import CONFIG, prompts, tiny
from impress.engines import hf, hf_audit
from impress.policy import Quality

def threads():  # called after the engine's own: that is registered later
    print(sorted(t.name for t in threading.enumerate() if t.name.startswith("impress")))

atexit.register(threads)
config = CONFIG.model_copy(update={"mode": "auto", "guard_shadows": 1})
engine = hf.attach(tiny(), sys.argv[1], Quality(), config=config)
engine._modes.rates = NoRates()
weighing, go = threading.Event(), threading.Event()
engine.generate(prompts(200), max_new_tokens=1)
engine.flush()

def halted(watch, n_layers, pause):
    weighing.set()
    while True:
        pause()

hf_audit.weigh = halted
store = engine._storing._store_rows
engine._storing._store_rows = lambda job: go.wait(60) and store(job)
for seed in (2, 3):
    engine.generate(prompts(200, seed=seed), max_new_tokens=1)
for _ in range(2):
    engine.generate(prompts(200), max_new_tokens=1)
assert weighing.wait(60)
atexit.register(go.set)
if sys.argv[3] == "gone":
    del engine
"""


@pytest.mark.parametrize("engine", ["there", "gone"])
def test_a_program_that_ends_without_close_stores_what_waits_and_ends_its_threads(tmp_path, engine):
    """A thread inside torch as the interpreter went aborted the process: signal 6, and what waited
    to be stored was lost."""
    command = [sys.executable, "-c", _ENDS_WITHOUT_CLOSE, tmp_path, Path(__file__).parent, engine]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    assert "Traceback" not in done.stderr and "not stored" not in done.stderr
    with hf.attach(tiny(), tmp_path, config=CONFIG) as again:
        for seed in (1, 2, 3):
            assert again.store.lookup(prompts(200, seed=seed)[0].numpy().astype(np.int32)) == 192


def test_a_store_whose_close_was_refused_is_still_closed_at_exit(tmp_path, monkeypatch):
    """A signal handler's close may be refused. After that nobody but a second one closed it."""
    engine, given_up = hf.attach(tiny(), tmp_path, config=CONFIG), []
    monkeypatch.setattr(atexit, "unregister", given_up.append)

    def refused(*_):
        raise ImpressError("close: called by a signal handler")

    with monkeypatch.context() as patched, pytest.raises(ImpressError, match="handler"):
        patched.setattr("impress.store.check_alone", refused)
        engine.close()
    assert engine.store.close not in given_up
    engine.close()
    assert engine.store.close in given_up


BROKEN_OFF = [
    (Rates, "choose", "exact"),  # before the prefix is read
    (Rates, "choose", "sparse"),
    (Modes, "learn", "exact"),  # after the answer
    (Modes, "learn", "sparse"),
    (Modes, "learn", "miss"),
    (PrefixStore, "admitted", "exact"),  # before anything is handed on
    (PrefixStore, "admitted", "miss"),
]


@pytest.mark.parametrize(("owner", "name", "kind"), BROKEN_OFF)
def test_a_request_broken_off_beside_its_run_gives_back_prefix_and_memory(
    tmp_path, monkeypatch, owner, name, kind
):
    """Ctrl-C there kept its lease, what that pinned and its rows until the engine was closed."""

    def broken(*_args, **_options):
        raise KeyboardInterrupt

    ids = prompts(200, seed=2 if kind == "miss" else 1)
    with filled(tiny(), tmp_path, Liar(), guard_shadows=1) as engine:
        if kind == "sparse":  # a clean shadow earns that
            engine.generate(ids, max_new_tokens=1)
            engine.flush()
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(owner, name, broken)
            engine.generate(ids, max_new_tokens=1)
        engine.flush()
        assert engine.store.stats()["leases"] == 0
        assert engine.store.buffers.used_bytes == 0
        engine.generate(ids, max_new_tokens=1)
        assert engine.last_request.mode == ("recompute" if kind == "miss" else kind)


@pytest.mark.parametrize("policy", [Exact(), Recency(keep=0.9)], ids=lambda policy: policy.name)
def test_a_read_without_memory_costs_its_prefix_and_holds_no_lease(tmp_path, monkeypatch, policy):
    """The MemoryError came out of generate(), and out of each close: the lease stayed until its
    time limit, and what it pinned could not be evicted."""
    model, ids = tiny(), prompts(200)
    bare = model.generate(ids, max_new_tokens=4, do_sample=False)
    first, read = threading.Lock(), SsdTier.read

    def short(ssd, reads, *then):
        if reads[0].sums is not None and first.acquire(blocking=False):  # rows, not a table
            raise MemoryError
        read(ssd, reads, *then)

    with hf.attach(model, tmp_path, config=CONFIG) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        engine.store.drop_caches()
        monkeypatch.setattr(SsdTier, "read", short)
        out = engine.generate(ids, max_new_tokens=4, do_sample=False, policy=policy)
        request = engine.last_request
        assert torch.equal(out, bare)
        assert (request.lost, request.mode, request.hit_tokens) == ("shortage", "recompute", 0)
        engine.flush()
        assert engine.store.stats()["leases"] == 0
        engine.store.evict(1 << 30)
        assert engine.store.ssd.usage().used == 0


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


@pytest.mark.parametrize("virtual", [None, hf.Virtual(batch=1)], ids=["pooled", "virtual"])
def test_an_engine_without_threads_answers_and_stores_when_there_are_some(
    tmp_path, threads, virtual
):
    """The answer was lost to a RuntimeError. Then what was to be stored waited for a thread that
    had never begun: `flush` did not return, and `close` failed."""
    ids = prompts(200)
    with hf.attach(tiny(), tmp_path, config=CONFIG, virtual=virtual) as engine:
        threads.left = 0
        without = engine.generate(ids, max_new_tokens=40, do_sample=False)
        assert engine.last_request.refused.startswith("no more threads can be started")
        engine.flush()
        assert (engine.n_skipped, engine.last_request.stored_tokens) == (1, 0)
        threads.left = 2  # one to store, one for memory ahead of need
        assert torch.equal(engine.generate(ids, max_new_tokens=40, do_sample=False), without)
        engine.flush()
        assert (engine.n_skipped, engine.last_request.stored_tokens) == (1, 192)


def test_a_guard_without_a_thread_drops_its_shadow(tmp_path, threads):
    """The hit's answer was lost, and no later shadow was weighed."""
    with filled(tiny(), tmp_path, Liar()) as engine:
        threads.left = 0
        ask(engine)
        assert engine.last_request.hit_tokens
        assert ledger_of(engine)["dropped"] == 1
        threads.left = 1
        ask(engine, seed=3)
        assert threads.left == 0 and ledger_of(engine)["dropped"] == 1


@pytest.mark.parametrize("name", ["impress-store", "impress-guard"])
def test_a_close_that_was_cut_off_is_finished_by_the_next(tmp_path, monkeypatch, name):
    """The next one returned at once: the store stayed open, its shard locked until the process
    ended. And after a close cut off in its wait for a thread, that thread was told to end twice:
    what drained its line then waited for ever."""
    config = CONFIG.model_copy(update={"mode": "auto"})
    engine = hf.attach(tiny(), tmp_path, Liar(), config=config)
    engine._modes.rates = NoRates()
    for _ in range(2):  # the second is a hit, and is weighed
        engine.generate(prompts(200), max_new_tokens=1)
        engine.flush()
    join = threading.Thread.join

    def interrupted(thread, timeout=None):
        if thread.name == name:
            raise KeyboardInterrupt
        join(thread, timeout)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "join", interrupted)
        engine.close()
    engine.close()
    assert not any(thread.name == name for thread in threading.enumerate())
    engine._storing.drain()
    engine._auditor.drain()
    hf.attach(tiny(), tmp_path, config=CONFIG).close()


@pytest.mark.parametrize("which", ["chosen", "observed"])
def test_a_model_that_ctrl_c_left_with_an_attention_of_ours_is_served_again(
    tmp_path, monkeypatch, which
):
    """Every later request, and every attach, was told that its thread had a request under way."""
    model, ids = tiny(), prompts(200)
    want = model.generate(ids, max_new_tokens=2)
    put = type(model).set_attn_implementation

    def interrupted(self, name):
        if name == "sdpa":
            raise KeyboardInterrupt
        put(self, name)

    config = CONFIG.model_copy(update={"probes": ("heads3-v1",)})
    with hf.attach(model, tmp_path, Paper(), config=config) as engine:
        if which == "chosen":
            engine.generate(ids, max_new_tokens=2)
            engine.flush()
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(type(model), "set_attn_implementation", interrupted)
            engine.generate(ids, max_new_tokens=2, policy=Paper())
        assert model.config._attn_implementation.startswith("impress_")
        with hf.attach(model, tmp_path / "other", config=config) as other:
            assert torch.equal(other.generate(ids, max_new_tokens=2), want)
        assert model.config._attn_implementation == "sdpa"
        assert torch.equal(engine.generate(ids, max_new_tokens=2), want)


@pytest.mark.parametrize("name", ["impress-store", "impress-guard", "impress-rows"])
def test_ctrl_c_before_a_thread_begins_leaves_the_next_request_to_begin_one(
    tmp_path, monkeypatch, name
):
    """A thread that had never begun counted as running: `close` raised, and what was handed to it
    later was waited for without end."""
    ids, begin = prompts(200), threading.Thread.start

    def interrupted(thread):
        if thread.name == name:
            raise KeyboardInterrupt
        begin(thread)

    def broken_off(path):
        config = CONFIG.model_copy(update={"mode": "auto"})
        virtual = hf.Virtual(batch=1, page_bytes=4096)
        engine = hf.attach(tiny(), path, Liar(), config=config, virtual=virtual)
        engine._modes.rates = NoRates()
        if name == "impress-guard":  # its first work is a hit
            engine.generate(ids, max_new_tokens=1)
            engine.flush()
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(threading.Thread, "start", interrupted)
            engine.generate(ids, max_new_tokens=40)
        return engine

    broken_off(tmp_path / "closed").close()
    with broken_off(tmp_path / "asked") as engine:
        engine.generate(ids, max_new_tokens=40)
        engine.flush()
        names = [thread.name for thread in threading.enumerate()]
        assert name in names and engine.store.lookup(ids[0].numpy().astype(np.int32)) == 192


@pytest.mark.parametrize(
    "step", [(Auditor, "drain"), (PrefixStore, "flush")], ids=["guard", "store"]
)
def test_what_is_not_stored_is_told_by_the_flush_after_one_that_ctrl_c_ended(
    tmp_path, monkeypatch, step
):
    """The one that was ended had been told, and told nobody: the next said that all was stored."""

    def fails(*_args):
        raise OSError("worn out")

    def interrupted(*_args):
        raise KeyboardInterrupt

    with hf.attach(tiny(), tmp_path, config=CONFIG) as engine:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(StoreQueue, "_store_rows", fails)
            patched.setattr(*step, interrupted)
            engine.generate(prompts(200), max_new_tokens=1)
            engine.flush()
        with pytest.raises(StoreFailed, match=r"not all of a request is stored.*worn out"):
            engine.flush()
        engine.flush()
