"""Contiguous virtual KV buffers: sizes, slots, memory that comes and goes, the engine in them."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace

import pytest
import torch
from conftest import Told, read_limit, soon
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_hf import (
    CONFIG,
    Closing,
    attach,
    continued,
    damage,
    last_layer_keys,
    prompts,
    tiny,
)
from test_interrupts import once
from test_ranges import Played, resident
from transformers import LogitsProcessor

import impress
from experiments.vbuffers_decode import decode
from experiments.vbuffers_memory import serve
from impress.engines import hf
from impress.engines.buffers import AHEAD_ROWS, Rental, VirtualBuffers, buffers_of
from impress.engines.hf_cache import RowsCache, RowsLayer
from impress.engines.virtual import Sizes, Slot, Use, Virtual, choose, reclaim
from impress.errors import BadInput, Unsupported
from tiers.errors import MediumError
from tiers.ranges import HostRanges
from tiers.ranges_cuda import CudaRanges
from tiers.slots import BufferPool
from tiers.ssd import SsdTier

PAGE = 4096
GEOMETRY = impress.Geometry(3, 4, 2, 8, "float32", v_head_dim=12)  # rows of 64 and 96 bytes


# --- sizes and slots: pure ------------------------------------------------------------------------


def test_yi_34b_on_two_workers_takes_twelve_terabytes_of_addresses():
    # vAttention, section 5.1: 60 layers, 8 KV heads of 128 in fp16, half of them on each worker.
    yi = impress.Geometry(60, 28, 4, 128, "float16")
    sizes = Sizes.of(yi, batch=500, context=200 * 1024, page_bytes=2 << 20)
    mb = 1 << 20
    assert sizes.n_buffers == 120
    assert sizes.row_bytes == (1024, 1024)
    assert sizes.slot_bytes == (200 * mb, 200 * mb)
    assert sizes.buffer_bytes == (100_000 * mb, 100_000 * mb)  # 100 GB
    assert sizes.total_bytes == 12_000_000 * mb  # 12 TB
    assert sizes.held_bytes(1) == 120 * (2 << 20)  # one token: a page in every buffer
    assert sizes.held_bytes(2048) == 120 * (2 << 20)
    assert sizes.held_bytes(2049) == 2 * 120 * (2 << 20)


@given(st.integers(1, 5000), st.integers(1, 900), st.integers(1, 900), st.integers(0, 5000))
def test_the_pages_behind_some_rows_are_those_behind_all_they_have_room_for(context, k, v, n):
    sizes = Sizes(2, 3, context, (k, v), PAGE)
    n = min(n, context)
    assert n <= sizes.room(n) <= context
    assert sizes.backed(sizes.room(n)) == sizes.backed(n)
    if sizes.room(n) < context:  # one row more takes a page more
        assert sizes.held_bytes(sizes.room(n) + 1) > sizes.held_bytes(n)


@pytest.mark.parametrize("field", ["n_layers", "batch", "context", "page_bytes"])
def test_sizes_must_be_positive(field):
    good = {"n_layers": 1, "batch": 1, "context": 1, "row_bytes": (1, 1), "page_bytes": 1}
    with pytest.raises(BadInput, match=field):
        Sizes(**{**good, field: 0})


def slots(*said):
    """I7: idle with memory for 7 rows; "R", "T": rented, touched. Given back left to right."""
    uses = {"I": Use.IDLE, "R": Use.RENTED, "T": Use.TOUCHED}
    return [Slot(uses[s[0]], int(s[1:] or 0), at) for at, s in enumerate(said)]


@pytest.mark.parametrize(
    ("there", "batch", "n_rows", "first"),
    [
        (("I0", "I0"), 1, 5, 0),
        (("I0", "I9", "I6", "I3"), 1, 5, 2),  # the least that suffices
        (("I0", "R9", "I3", "I4"), 1, 5, 3),  # none does: the most
        (("I0", "R9", "I3"), 2, 1, None),
        (("I1", "I1", "T9", "I0", "I3"), 2, 2, 3),
        (("I7", "I1", "I2", "I2"), 2, 2, 2),  # each of a batch has to have enough
        (("I1", "I1"), 3, 1, None),
    ],
)
def test_a_request_gets_neighbouring_idle_slots_whose_memory_fits(there, batch, n_rows, first):
    assert choose(slots(*there), batch, n_rows) == first


def test_memory_goes_from_slots_idle_longest_and_never_from_those_in_use():
    sizes = Sizes.of(GEOMETRY, 5, 100, PAGE)
    page = sizes.held_bytes(1)
    there = slots("I10", "R10", "I10", "I0", "I10")
    there[0].last_use = 9
    assert reclaim(there, sizes, 1, range(0)) == [2]
    assert reclaim(there, sizes, page + 1, range(0)) == [2, 4]
    assert reclaim(there, sizes, 99 * page, range(0)) == [2, 4, 0]
    assert reclaim(there, sizes, 99 * page, range(2, 3)) == [4, 0]
    assert reclaim(there, sizes, 0, range(0)) == []


# --- memory that comes and goes -------------------------------------------------------------------


def make(context=2000, ranges=None, **options):
    asked = Virtual(page_bytes=PAGE, **options)
    return VirtualBuffers(GEOMETRY, asked, context, ranges or HostRanges(PAGE))


def resident_bytes(buffers):
    return sum(
        resident(area, 0, area.n_bytes) for pair in buffers.areas for area in pair
    )  # fmt: skip


def fill(rental, first, end, value):
    for layer in range(GEOMETRY.n_layers):
        for plane in rental.planes(layer):
            plane[:, first:end] = value + layer


def assert_filled(rental, first, end, value):
    for layer in range(GEOMETRY.n_layers):
        for plane in rental.planes(layer):
            assert bool((plane[:, first:end] == value + layer).all())


def test_memory_is_held_for_the_rows_there_are_not_for_those_there_may_be():
    buffers = make(batch=4)
    rental = buffers.rent(1, 100, 2000)
    assert rental.reach(100)
    fill(rental, 0, 100, 1.0)
    rental.reach(600)
    fill(rental, 100, 600, 2.0)
    assert_filled(rental, 0, 100, 1.0)
    assert_filled(rental, 100, 600, 2.0)
    assert buffers.usage().held_bytes == buffers.sizes.held_bytes(600)
    assert resident_bytes(buffers) == buffers.sizes.held_bytes(600)
    buffers.close()


def test_the_next_page_is_there_before_it_is_needed():
    buffers = make()
    rental = buffers.rent(1, 10, 2000)
    for n_rows in range(10, 2001):
        buffers.settle()  # a step takes longer than a page
        assert rental.reach(n_rows)
    usage = buffers.usage()
    assert usage.n_stalls == 0
    assert usage.n_ahead > 10
    assert usage.held_bytes == buffers.sizes.held_bytes(2000)
    buffers.close()


def test_no_page_is_asked_for_that_a_request_cannot_come_to():
    buffers = make()
    room = buffers.sizes.room(1)
    rental = buffers.rent(1, room - AHEAD_ROWS // 2, room)
    rental.reach(room - 1)
    buffers.settle()
    assert (rental.room, buffers.usage().n_ahead) == (room, 0)
    buffers.close()


def test_pages_stay_behind_a_slot_for_the_next_request():
    buffers = make(batch=2)
    first = buffers.rent(1, 500, 500)
    first.release()
    held = buffers.usage().held_bytes
    second = buffers.rent(1, 400, 400)  # not the other one, which has none
    assert second.slots == first.slots
    assert buffers.usage().n_reused == 1
    assert buffers.usage().held_bytes == held
    first.release()  # idempotent: the slot is another's now
    assert buffers.rent(1, 10, 10).slots != second.slots
    buffers.close()


def test_a_budget_takes_memory_from_idle_slots_first_and_then_refuses():
    probe = make(batch=3)
    buffers = make(batch=3, budget_bytes=2 * probe.sizes.held_bytes(400))
    rentals = [buffers.rent(1, 400, 2000) for _ in range(2)]
    assert buffers.rent(1, 400, 2000) is None
    assert buffers.said == f"pooled: budget_bytes is {2 * probe.sizes.held_bytes(400):,}"
    rentals[0].release()
    fill(rentals[1], 0, 400, 3.0)
    assert rentals[1].reach(600)  # slot 0's memory is taken
    assert_filled(rentals[1], 0, 400, 3.0)
    assert buffers.usage().idle_bytes == 0
    assert resident_bytes(buffers) == buffers.sizes.held_bytes(400)  # the new rows: untouched
    assert not rentals[1].reach(2000)
    assert not rentals[1].reach(1999), "who has left does not come back"
    assert buffers.usage().held_bytes == buffers.sizes.held_bytes(600)
    assert buffers.usage().n_fallbacks == 2
    buffers.close()


def test_a_request_beyond_the_budget_takes_no_memory_and_counts_as_none():
    """All that was kept for short requests went before a long one was refused all the same, and it
    was counted among those served here."""
    buffers = make(2048, batch=3, budget_bytes=3 * make(batch=3).sizes.held_bytes(256))
    for rental in [buffers.rent(1, 256, 256) for _ in range(3)]:
        rental.release()
    before = buffers.usage()
    assert before.idle_bytes == 3 * buffers.sizes.held_bytes(256) and before.n_rented == 3
    assert buffers.rent(1, 2048, 2048) is None
    assert buffers.said.startswith("pooled: budget_bytes")
    after = buffers.usage()
    assert (after.idle_bytes, after.n_rented) == (before.idle_bytes, 3)
    assert (after.n_reused, after.n_fallbacks) == (0, 1)
    again = buffers.rent(1, 500, 500)  # takes what one other slot had
    assert again is not None and buffers.usage().n_reused == 1
    assert buffers.usage().idle_bytes == buffers.sizes.held_bytes(256)
    buffers.close()


@pytest.mark.parametrize("n", range(6))
def test_a_slot_whose_memory_is_taken_away_by_half_has_none(n, monkeypatch):
    """Ctrl-C left it with rows for which some of its buffers no longer had memory: the next request
    that took the slot ended the process."""
    held = make(batch=2).sizes.held_bytes(400)
    buffers = make(batch=2, budget_bytes=2 * held)
    for rental in [buffers.rent(1, 400, 400) for _ in range(2)]:
        rental.release()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(HostRanges, "unback", once(HostRanges.unback, n))
        buffers.rent(1, 600, 600)
    gc.collect()
    assert [slot.n_rows for slot in buffers._slots if slot.use is Use.IDLE] == [0]
    for rental in [buffers.rent(1, 300, 300) for _ in range(2)]:
        fill(rental, 0, 300, 1.0)
    buffers.close()


def behind(real, n=0):
    """As `once`, but interrupted as call n returns."""
    calls = []

    def interrupted(*args):
        done = real(*args)
        calls.append(1)
        if len(calls) == n + 1:
            raise KeyboardInterrupt
        return done

    return interrupted


@pytest.mark.parametrize("cut", [once, behind])
@pytest.mark.parametrize("n", range(12))
def test_pages_that_a_cut_off_request_had_mapped_spoil_no_slot(n, cut, monkeypatch):
    """A driver refuses to map what is mapped: every later request had ordinary memory."""

    class Strict(Played):
        def cuMemMap(self, at, *more):
            return (1,) if at in self.mapped else super().cuMemMap(at, *more)

    driver = Strict()
    buffers = on_a_device(monkeypatch, driver, batch=2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Strict, "cuMemMap", cut(Strict.cuMemMap, n))
        buffers.rent(2, 300, 300)
    gc.collect()
    rental = buffers.rent(2, 300, 300) or buffers.rent(2, 300, 300)  # torn memory goes first
    assert rental is not None and buffers.said == "virtual"
    assert len(driver.mapped) * buffers._ranges.page_bytes == buffers.usage().held_bytes
    rental.release()
    buffers.close()


def test_idle_memory_beyond_what_is_kept_goes_in_the_background():
    buffers = make(batch=2, keep_bytes=0)
    rental = buffers.rent(2, 300, 300)
    rental.release()
    buffers.settle()
    assert buffers.usage().held_bytes == resident_bytes(buffers) == 0
    buffers.close()


def test_slots_a_stuck_read_may_write_into_are_not_rented_before_it_ends():
    """They were never rented again: each such read left an engine with fewer slots."""
    buffers, stuck = make(batch=2, keep_bytes=0), [True]
    rental = buffers.rent(1, 300, 300)
    rental.untouched = lambda: not stuck
    rental.release()
    buffers.settle()
    fill(rental, 0, 300, 1.0)  # the read comes back
    other = buffers.rent(1, 10, 10)
    assert other.slots != rental.slots
    assert buffers.rent(1, 10, 10) is None
    stuck.clear()
    again = buffers.rent(1, 10, 10)
    assert again.slots == rental.slots
    assert buffers.rent(1, 10, 10) is None
    other.release()
    assert buffers.rent(1, 10, 10).slots == other.slots
    buffers.close()


def test_a_model_on_several_devices_has_no_virtual_buffers():
    """The first device's held memory for all layers, the others room for the longest answer."""
    model = tiny("llama")
    model.model.layers[1].to("meta")
    with pytest.raises(Unsupported, match="must lie on one device, it is on cpu and meta"):
        buffers_of(model, hf.geometry_of(model.config, model.dtype), Virtual())


def test_a_layer_elsewhere_than_its_slot_has_the_room_that_it_has():
    """Its room was taken to be the slot's: a row beyond its own was left out, without an error."""
    slot = SimpleNamespace(device=torch.device("cuda", 0), reach=lambda n_rows: True)
    cache = RowsCache(impress.Geometry(1, 2, 2, 8, "float32"), 1, 10, BufferPool(None), rental=slot)
    rows = torch.ones(1, 2, 10, 8)
    cache.update(rows, rows, 0)
    last = torch.full((1, 2, 1, 8), 7.0)
    k, v = cache.update(last, last, 0)
    assert k.shape[2] == v.shape[2] == 11 and (k[:, :, -1] == 7).all() and (v[:, :, -1] == 7).all()


def test_a_prefix_on_its_way_to_a_device_leaves_its_rows_their_slot():
    """On a GPU each hit took ordinary memory for its longest answer, and was said to be virtual."""
    device, asked = torch.device("meta"), []
    planes = (torch.empty(1, 1000, 2, 8, device=device),) * 2
    slot = SimpleNamespace(
        device=device, planes=lambda layer: planes, reach=lambda n_rows: not asked.append(n_rows)
    )
    geometry = impress.Geometry(1, 2, 2, 8, "float32")
    cache = RowsCache(geometry, 1, 900, BufferPool(None), n_prefix=64, rental=slot, on_host=False)
    rows = torch.empty(1, 2, 10, 8, device=device)
    cache.update(rows, rows, 0)
    assert cache.layers[0].own_rows() == [] and asked == [74]


def test_slots_that_nobody_released_and_nobody_knows_are_rented_again():
    """After as many Ctrl-Cs as there are slots, an engine had none left."""
    buffers, stuck = make(batch=2), [True]
    rental = buffers.rent(1, 300, 300)
    rental.untouched = lambda: not stuck
    other = buffers.rent(1, 10, 10)
    mine = rental.slots
    del rental
    assert buffers.rent(1, 10, 10) is None  # a read may still come back
    stuck.clear()
    again = buffers.rent(1, 10, 10)
    assert (again.slots, again.room) == (mine, 320)
    again.reach(400)  # asks the thread, which keeps the rental for a while
    del again, other
    buffers.settle()
    assert buffers.rent(2, 10, 10) is not None
    buffers.close()


def test_a_rental_cut_off_before_it_took_its_slots_takes_nobody_elses(monkeypatch):
    buffers, cut_off = make(batch=2), []
    init = Rental.__init__

    def interrupted(rental, *args):
        init(rental, *args)
        cut_off.append(rental)  # as a traceback that is looked at later keeps it
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Rental, "__init__", interrupted)
        buffers.rent(1, 10, 10)
    rental = buffers.rent(2, 10, 10)
    cut_off.clear()
    assert rental is not None
    assert buffers.rent(1, 10, 10) is None
    buffers.close()


def test_rows_may_be_looked_at_after_the_buffers_are_closed():
    buffers = make()
    rental = buffers.rent(1, 300, 2000)
    fill(rental, 0, 300, 1.0)
    k, _ = rental.planes(0)
    buffers.close()
    buffers.close()
    assert bool((k[:, :300] == 1.0).all())
    assert not rental.reach(2000)
    assert buffers.rent(1, 10, 10) is None
    rental.release()


def test_a_request_of_closed_buffers_keeps_its_rows_and_has_no_more():
    """A request that had not looked at a layer before `close` got an IndexError there."""
    buffers = make()
    rental = buffers.rent(1, 300, 2000)
    buffers.close()
    fill(rental, 0, 300, 1.0)
    assert_filled(rental, 0, 300, 1.0)
    assert rental.reach(300)
    assert not rental.reach(2000)
    assert buffers.said == "pooled: the engine is closed"
    rental.release()


class Counting(HostRanges):
    """A host that counts the memory it gave."""

    n_backed = 0

    def back(self, at, off, n_bytes):
        super().back(at, off, n_bytes)
        self.n_backed += n_bytes


def test_buffers_that_close_amid_a_growth_leave_no_room_without_memory(monkeypatch):
    """There was no memory for the room that the growth reported: a signal ended the process."""
    ranges = Counting(PAGE)
    buffers = make(ranges=ranges, budget_bytes=1 << 30)
    rental = buffers.rent(1, 40, 40)
    closers, held = [], buffers._held

    def close_beside():  # the growth has found them open, and has put no memory there yet
        if not closers:
            on = threading.Event()  # it waits for the growth, or has closed them
            monkeypatch.setattr(buffers, "_lock", Told(buffers._lock, on))
            closers.append(threading.Thread(target=lambda: (buffers.close(), on.set())))
            closers[0].start()
            assert on.wait(60)
        return held()

    monkeypatch.setattr(buffers, "_held", close_beside)
    assert rental.reach(600)
    assert ranges.n_backed == buffers.sizes.held_bytes(600)
    closers[0].join(60)
    fill(rental, 0, 600, 1.0)
    assert_filled(rental, 0, 600, 1.0)
    assert not rental.reach(2000)


class Failing(HostRanges):
    """A host that runs out of memory after some calls."""

    left = 1000

    def back(self, at, off, n_bytes):
        self.left -= 1
        if self.left < 0:
            raise MediumError("no memory behind it")
        super().back(at, off, n_bytes)


def test_memory_that_ends_midway_leaves_no_buffer_ahead_of_another():
    ranges = Failing(PAGE)
    buffers = make(ranges=ranges)
    rental = buffers.rent(1, 40, 2000)
    fill(rental, 0, 40, 1.0)
    ranges.left = 4  # of the 6 buffers
    before = buffers.usage().held_bytes
    assert not rental.reach(100)
    assert buffers.said == "pooled: no memory behind it"
    assert buffers.usage().held_bytes == resident_bytes(buffers) == before
    assert_filled(rental, 0, 40, 1.0)
    buffers.close()


def test_a_device_without_a_page_free_keeps_rows_in_ordinary_memory():
    """A range needs a page as its tensor is made; `attach` failed where there was none."""
    ranges = Failing(PAGE)
    ranges.device, ranges.left = "cuda:0", 0
    buffers = make(ranges=ranges)
    assert buffers.rent(1, 40, 2000) is None
    assert buffers.said == "pooled: no memory behind it"
    assert not buffers.planes and not buffers.areas and not buffers.usage().reserved_bytes
    buffers.close()


def on_a_device(monkeypatch, driver, **options):
    """Buffers on a simulated device: their tensors are host memory that nobody touches."""

    def as_tensor(memory, device):
        (n_bytes,) = memory.__cuda_array_interface__["shape"]
        return torch.empty(n_bytes, dtype=torch.uint8)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return make(ranges=CudaRanges(0, None, driver), **options)


def test_a_device_has_its_memory_back_where_none_is_to_be_kept(monkeypatch):
    """Pages that left their slots were kept for the next ones, up to a GiB and counted nowhere."""
    driver = Played()
    buffers = on_a_device(monkeypatch, driver, batch=2, keep_bytes=0)
    rental = buffers.rent(2, 300, 300)
    assert len(driver.alive) == len(driver.mapped) == 12
    rental.release()
    buffers.settle()
    assert not driver.alive and not buffers.usage().held_bytes
    buffers.close()


def test_what_a_device_keeps_is_counted_and_goes_with_the_engine(monkeypatch):
    """It stayed even after the engine was closed, as long as anything still referred to it."""
    driver = Played()
    page = CudaRanges(0, None, driver).page_bytes
    buffers = on_a_device(monkeypatch, driver, batch=2, keep_bytes=8 * page)
    for _ in range(2):
        rentals = [buffers.rent(1, 300, 300) for _ in range(2)]
        assert len(driver.alive) == len(driver.mapped) == 12
        for rental in rentals:
            rental.release()
        buffers.settle()
        assert len(driver.mapped) == 6
        usage = buffers.usage()
        assert usage.held_bytes == usage.idle_bytes == len(driver.alive) * page == 8 * page
    buffers.close()
    del rental, rentals
    gc.collect()
    assert not driver.alive and not driver.ranges
    assert not buffers.usage().reserved_bytes


steps = st.lists(
    st.tuples(st.sampled_from(["rent", "reach", "release", "settle"]), st.integers(0, 700)),
    max_size=30,
)


@settings(max_examples=60)
@given(steps, st.integers(0, 4))
def test_whatever_comes_and_goes_every_request_reads_what_it_wrote(steps, budget):
    most = Sizes.of(GEOMETRY, 3, 700, PAGE).held_bytes(500) * budget
    buffers = make(700, batch=3, keep_bytes=most // 3, budget_bytes=most or None)
    live = []  # [rental, rows written, value]
    for value, (step, n) in enumerate(steps):
        if step == "rent" and (rental := buffers.rent(1 + n % 2, n // 2, 700)) is not None:
            fill(rental, 0, n // 2, 10.0 * value)
            live.append([rental, n // 2, 10.0 * value])
        elif step == "reach" and live:
            rental, written, mine = live[n % len(live)]
            if rental.reach(max(n, written)):
                fill(rental, written, max(n, written), mine)
                live[n % len(live)][1] = max(n, written)
        elif step == "release" and live:
            live.pop(n % len(live))[0].release()
        elif step == "settle":
            buffers.settle()
        for rental, written, mine in live:
            assert_filled(rental, 0, written, mine)
    taken = [slot for rental, _, _ in live for slot in rental.slots]
    assert len(taken) == len(set(taken))
    buffers.settle()
    usage = buffers.usage()
    assert budget == 0 or usage.held_bytes <= most
    assert resident_bytes(buffers) <= usage.held_bytes  # memory is resident once touched
    assert usage.idle_bytes <= max(most // 3, 0)
    buffers.close()


@pytest.mark.parametrize("page_bytes", [0, 2048, 4096 + 1, 3 * 4096])
def test_page_sizes_that_cannot_be_are_refused(page_bytes):
    with pytest.raises(BadInput, match="page_bytes"):
        Virtual(page_bytes=page_bytes)


@pytest.mark.parametrize(
    ("name", "size"),
    [("batch", 2.5), ("batch", 0), ("context", "long"), ("context", 0), ("page_bytes", 4096.0),
     ("budget_bytes", -1), ("keep_bytes", -1), ("keep_bytes", None)],
)  # fmt: skip
def test_sizes_that_are_no_whole_numbers_or_too_small_are_bad_input(name, size):
    """2.5 slots ended in a TypeError from attach; a negative budget, in ordinary memory."""
    with pytest.raises(BadInput, match=f"virtual buffers: {name} must be a whole number"):
        Virtual(**{name: size})


# --- the engine in them ---------------------------------------------------------------------------

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = Virtual(batch=4, page_bytes=PAGE)  # 16 rows of OPT, 32 of Llama: answers cross borders


class Seen(LogitsProcessor):
    """The raw logits of every step."""

    def __init__(self):
        self.steps = []

    def __call__(self, input_ids, scores):
        self.steps.append(scores.clone())
        return scores


def ask(engine, ids, n_new=40):
    """Tokens and logits. Not by return_dict_in_generate, which also gives the cache away."""
    seen = Seen()
    found = engine.generate(ids, max_new_tokens=n_new, do_sample=False, logits_processor=[seen])
    return found, torch.stack(seen.steps)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_answers_have_the_bits_of_ordinary_memory_and_of_continuing(
    tmp_path, family, attention, batch
):
    model = tiny(family, attention=attention)
    stored = prompts(200, batch)
    asked = [torch.cat([stored[:, :n], prompts(80, batch, seed=n)], 1) for n in (150, 199, 30, 150)]
    found = {}
    for name, virtual in (("pooled", None), ("virtual", SMALL)):
        with attach(model, tmp_path / name, virtual=virtual, store_new=True) as engine:
            engine.generate(stored, max_new_tokens=1)
            engine.flush()
            found[name] = []
            for ids in asked:
                found[name].append(ask(engine, ids))
                assert engine.last_request.memory == name
                engine.flush()  # what waits to be stored holds its slots
            assert engine.last_request.hit_tokens == 192  # its own, stored from the buffers
        if virtual is not None:
            usage = engine.buffers.usage()
            assert usage.n_rented == 5
            assert usage.n_reused >= 1
            assert usage.n_fallbacks == 0
            assert usage.held_bytes == usage.idle_bytes > 0
    for (tokens, logits), (others, theirs) in zip(found["pooled"], found["virtual"], strict=True):
        assert torch.equal(tokens, others)
        assert torch.equal(logits, theirs)
    seen = Seen()
    continued(model, stored, asked[0], 128, 40, logits_processor=[seen], do_sample=False)
    assert torch.equal(torch.stack(seen.steps), found["virtual"][0][1])


def test_a_prefix_is_read_into_the_buffers_themselves(tmp_path, monkeypatch):
    model, ids = tiny(num_key_value_heads=4, head_dim=64), prompts(200)  # rows without padding
    config = CONFIG.model_copy(update={"dram_bytes": 0})  # promotions meanwhile rent some, too
    with hf.attach(model, tmp_path, config=config, virtual=SMALL) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        before = engine.store.buffers.used_bytes
        rows = []
        attention = type(model.model.layers[0].self_attn)
        forward = attention.forward

        def counting(self, *args, **kwargs):
            if self.layer_idx == 0:
                rows.append(engine.store.buffers.used_bytes)
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(attention, "forward", counting)
        engine.generate(ids, max_new_tokens=2)
        assert engine.last_request.hit_tokens == 192
        assert rows == [before] * 2, "no buffer was rented beside them"


@pytest.mark.parametrize(
    ("virtual", "why"),
    [
        (Virtual(batch=1, context=190, page_bytes=PAGE), "are reserved"),  # not even the prompt
        (Virtual(batch=1, context=205, page_bytes=PAGE), "are reserved"),  # the answer grows out
        (Virtual(batch=1, page_bytes=PAGE, budget_bytes=2 * 2 * 7 * PAGE), "budget_bytes"),
        (Virtual(batch=1, context=1 << 50), "were refused: a process has not so many addresses"),
        (Virtual(batch=1 << 50), "were refused: a process has not so many addresses"),
    ],
)
def test_where_buffers_do_not_reach_ordinary_memory_does(tmp_path, caplog, virtual, why):
    model, ids = tiny(), prompts(200)
    with attach(model, tmp_path / "pooled") as engine:
        expected = ask(engine, ids)
        expected = ask(engine, ids) if engine.flush() is None else expected
    with attach(model, tmp_path / "virtual", virtual=virtual) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        found = ask(engine, ids)
        assert engine.last_request.memory.startswith("pooled: ")
        assert why in engine.last_request.memory
        engine.flush()
        usage = engine.buffers.usage()
        assert usage.idle_bytes == usage.held_bytes
        assert usage.n_stalls == 0  # nobody waited for memory that was not to be had
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    if "refused" in why:
        (told,) = [r.message for r in caplog.records if "virtual KV buffers" in r.message]
        assert "bytes of addresses (4 × " in told


def test_more_prompts_than_slots_are_served_in_ordinary_memory(tmp_path):
    model, ids = tiny(), prompts(100, 3)
    with attach(model, tmp_path, virtual=Virtual(batch=2, page_bytes=PAGE)) as engine:
        found = engine.generate(ids, max_new_tokens=8, do_sample=False)
        assert engine.last_request.memory == "pooled: 3 neighbouring slots of 2 are too many"
    assert torch.equal(found, model.generate(ids, max_new_tokens=8, do_sample=False))


def test_a_prefix_that_is_lost_gives_its_buffers_back(tmp_path):
    model, ids = tiny(), prompts(200)
    row = last_layer_keys(model, ids, 70)
    with attach(model, tmp_path, virtual=SMALL) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
    damage(tmp_path, row)
    with attach(model, tmp_path, virtual=SMALL) as engine:
        found = engine.generate(ids, max_new_tokens=8, do_sample=False)
        assert engine.last_request.lost == "checksum"
        assert engine.last_request.memory == "virtual"
        engine.flush()
        usage = engine.buffers.usage()
        assert (usage.n_rented, usage.idle_bytes) == (2, usage.held_bytes)
    assert torch.equal(found, model.generate(ids, max_new_tokens=8, do_sample=False))


def test_what_a_late_read_was_to_write_into_is_rented_again_when_it_has_ended(
    tmp_path, monkeypatch
):
    model, ids, going_on, read = tiny(), prompts(200), threading.Event(), SsdTier.read

    def hangs(ssd, reads, *then):
        if any(one.sums is not None for one in reads):
            going_on.wait(60)
        read(ssd, reads, *then)

    virtual = Virtual(batch=1, page_bytes=PAGE)
    with attach(model, tmp_path, virtual=virtual) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        engine.store.drop_caches()
        engine.store.lease(ids[0].to(torch.int32).numpy()).release()  # reads its table in time
        monkeypatch.setattr(SsdTier, "read", hangs)
        with read_limit(engine.store, 0.05):
            found = engine.generate(ids, max_new_tokens=8, do_sample=False)
        assert engine.last_request.lost == "late"
        assert engine.last_request.memory == "pooled: 1 neighbouring slots of 1 are taken"
        assert torch.equal(found, model.generate(ids, max_new_tokens=8, do_sample=False))
        engine.flush()
        (rental,) = engine.buffers._touched
        going_on.set()
        assert soon(rental.untouched)
        found = engine.generate(ids, max_new_tokens=8, do_sample=False)
        assert engine.last_request.memory == "virtual"
        assert torch.equal(found, model.generate(ids, max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize("n", range(2))
@pytest.mark.parametrize("policy", [impress.Exact(), impress.Paper(0.25)], ids=["exact", "paper"])
def test_interrupted_requests_leave_every_slot_to_those_that_come(tmp_path, monkeypatch, policy, n):
    """Each Ctrl-C between renting a slot and making its cache lost one slot for good."""
    model, ids = tiny(), prompts(400)
    with attach(model, tmp_path, policy=policy, virtual=Virtual(2, page_bytes=PAGE)) as engine:
        engine.generate(ids[:, :384], max_new_tokens=1)
        engine.flush()
        want = engine.generate(ids, max_new_tokens=8, do_sample=False)
        for _ in range(3):
            with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
                new_planes = once(RowsLayer._new_planes, n)
                patched.setattr(RowsLayer, "_new_planes", new_planes)
                engine.generate(ids, max_new_tokens=8, do_sample=False)
            engine.flush()
        found = engine.generate(ids, max_new_tokens=8, do_sample=False)
        assert engine.last_request.memory == "virtual"
        assert torch.equal(found, want)


def test_a_slot_nobody_released_is_not_rented_while_a_read_may_come_back(tmp_path, monkeypatch):
    """Two Ctrl-Cs: in decoding, and in the call that was to wait for the reads."""
    model, ids, going_on, read = tiny(), prompts(200), threading.Event(), SsdTier.read

    def hangs(ssd, reads, *then):
        if any(one.sums is not None for one in reads):
            going_on.wait(60)
        read(ssd, reads, *then)

    def interrupted(*_args, **_named):
        raise KeyboardInterrupt

    with attach(model, tmp_path, virtual=Virtual(1, page_bytes=PAGE)) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        engine.store.drop_caches()
        engine.store.lease(ids[0].to(torch.int32).numpy()).release()  # reads its table in time
        with monkeypatch.context() as patched, read_limit(engine.store, 0.05):
            patched.setattr(SsdTier, "read", hangs)
            patched.setattr(hf.Engine, "_decode", interrupted)
            patched.setattr(hf, "end_reads", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.generate(ids, max_new_tokens=8)
        assert engine.buffers.rent(1, 10, 10) is None
        going_on.set()
        assert engine.store._pool.idle(60)
        assert engine.buffers.rent(1, 10, 10) is not None


def test_chosen_rows_are_laid_down_in_the_buffers_too(tmp_path):
    model, ids = tiny(), prompts(400)
    answers = {}
    for name, virtual in (("pooled", None), ("virtual", SMALL)):
        policy = impress.Paper(0.25)
        with attach(model, tmp_path / name, policy=policy, virtual=virtual) as engine:
            engine.generate(ids[:, :384], max_new_tokens=1)
            engine.flush()
            answers[name] = ask(engine, ids)
            assert engine.last_request.mode == "sparse"
            assert engine.last_request.memory == name
    assert torch.equal(answers["pooled"][0], answers["virtual"][0])
    assert torch.equal(answers["pooled"][1], answers["virtual"][1])


def test_buffers_made_in_inference_mode_serve_within_it_and_without(tmp_path):
    """Outside of inference mode, torch let nobody write into them."""
    model, ids = tiny(), prompts(200)
    with torch.inference_mode():
        engine = attach(model, tmp_path, virtual=Virtual(page_bytes=PAGE))
    with engine:
        answers = [engine.generate(ids, max_new_tokens=4)]
        with torch.inference_mode():
            answers.append(engine.generate(ids, max_new_tokens=4))
        engine.flush()
        answers.append(engine.generate(ids, max_new_tokens=4))
        assert (engine.last_request.memory, engine.last_request.hit_tokens) == ("virtual", 192)
    want = model.generate(ids, max_new_tokens=4)
    assert all(torch.equal(answer, want) for answer in answers)


def test_without_being_asked_for_there_are_none(tmp_path):
    with attach(tiny(), tmp_path) as engine:
        engine.generate(prompts(64), max_new_tokens=1)
        assert engine.buffers is None
        assert engine.last_request.memory == "pooled"
    assert hf.Virtual is Virtual


# --- what the experiment measures -----------------------------------------------------------------


def test_every_cache_the_experiment_compares_gives_the_same_bits():
    rows = {row["system"]: row for row in decode(40, 2, 3, seed=1)}
    assert [name for name, row in rows.items() if row["differs"]] == []
    assert max(rows["virtual_64k"]["stalls"], rows["virtual_64k"]["ahead"]) == 1  # 32 rows a page
    assert rows["virtual_64k_unasked"]["stalls"] == 1


def test_memory_held_is_memory_there_and_between_live_rows_and_static_reservation():
    rows = {row["system"]: row for row in serve(64 << 10, 300, seed=1)}
    virtual = rows["virtual, 64 KiB"]
    assert rows["concat"]["mib_mean"] < virtual["mib_mean"] < rows["static"]["mib_mean"]
    assert 0.9 * virtual["mib_mean"] < virtual["resident_mib"] <= virtual["mib_mean"]
    assert virtual["requests"] > 3


@pytest.mark.parametrize("beside", [False, True])
def test_an_engine_closed_before_the_last_layer_of_a_miss_answers_it(tmp_path, monkeypatch, beside):
    """The buffers were gone when the second layer asked for its own, with an IndexError."""
    model, ids = tiny(), prompts(200)
    engine = attach(model, tmp_path, virtual=Virtual(page_bytes=PAGE))
    closing = Closing(engine, beside)
    closing.n_put = 1  # the prompt: the next call closes
    update = RowsLayer.update

    def close_after(layer, *args, **options):
        rows = update(layer, *args, **options)
        closing.put(None)
        return rows

    monkeypatch.setattr(RowsLayer, "update", close_after)
    answer = engine.generate(ids, max_new_tokens=4)
    if beside:
        closing.closer.join(60)
    assert torch.equal(answer, model.generate(ids, max_new_tokens=4))
    assert engine.last_request.memory == "virtual"
