"""Reserved ranges: one contract for the host, a CUDA driver played on the host, and a real one."""

from __future__ import annotations

import ctypes
import gc
import mmap
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tiers.errors import MediumError
from tiers.ranges import HUGE, HostRanges, RangeRefused
from tiers.ranges_cuda import CudaRanges

PAGE = 64 << 10


class Played:
    """The calls of cuda.bindings.driver that CudaRanges makes, strict about order and context.

    Emulated: it keeps the driver's books and holds no memory. `n_pages` is all the device has.
    """

    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self, n_pages=1000, most_addresses=1 << 44):
        self.n_pages = n_pages
        self.most_addresses = most_addresses
        self.ranges = {}  # address -> bytes
        self.mapped = {}  # address of a page -> handle
        self.usable = set()
        self.alive = set()
        self.n_made = 0
        self.n_users = 0  # of the primary context
        self.is_busy = False  # kernels are queued
        self._entered = threading.local()
        self._next = 1 << 40

    def in_context(self):
        return getattr(self._entered, "contexts", [])[-1:] == ["primary"]

    def CUmemAllocationProp(self):
        return SimpleNamespace(type=None, location=SimpleNamespace(type=None, id=None))

    def CUmemAccessDesc(self):
        return SimpleNamespace(location=None, flags=None)

    def cuInit(self, flags):
        return (0,)

    def cuDeviceGet(self, ordinal):
        return 0, ordinal

    def cuDevicePrimaryCtxRetain(self, device):
        self.n_users += 1
        return 0, "primary"

    def cuDevicePrimaryCtxRelease(self, device):
        self.n_users -= 1
        return (0,)

    def cuCtxPushCurrent(self, context):
        vars(self._entered).setdefault("contexts", []).append(context)
        return (0,)

    def cuCtxPopCurrent(self):
        return 0, self._entered.contexts.pop()

    def cuCtxSynchronize(self):
        assert self.in_context()
        self.is_busy = False
        return (0,)

    def cuMemGetAllocationGranularity(self, prop, option):
        assert (prop.type, prop.location.type) == (1, 1)
        return 0, PAGE

    def cuMemAddressReserve(self, size, alignment, addr, flags):
        assert size > 0 and size % PAGE == 0 and self.in_context()
        if sum(self.ranges.values()) + size > self.most_addresses:
            return 2, 0
        at, self._next = self._next, self._next + 2 * size
        self.ranges[at] = size
        return 0, at

    def cuMemAddressFree(self, at, size):
        assert self.ranges.pop(at) == size and self.in_context()
        assert not any(at <= page < at + size for page in self.mapped)
        return (0,)

    def cuMemCreate(self, size, prop, flags):
        assert size == PAGE and self.in_context()
        if len(self.alive) == self.n_pages:
            return 2, None
        self.n_made += 1
        self.alive.add(self.n_made)
        return 0, self.n_made

    def cuMemRelease(self, handle):
        assert handle not in self.mapped.values() and self.in_context()
        self.alive.remove(handle)
        return (0,)

    def cuMemMap(self, at, size, offset, handle, flags):
        assert (size, offset) == (PAGE, 0) and handle in self.alive and self.in_context()
        assert at not in self.mapped and handle not in self.mapped.values()
        assert any(a <= at and at + size <= a + n for a, n in self.ranges.items())
        self.mapped[at] = handle
        return (0,)

    def cuMemSetAccess(self, at, size, descs, count):
        assert count == len(descs) == 1 and descs[0].flags == 3 and self.in_context()
        pages = range(at, at + size, PAGE)
        assert all(page in self.mapped for page in pages)
        self.usable.update(pages)
        return (0,)

    def cuMemUnmap(self, at, size):
        assert size == PAGE and self.in_context() and not self.is_busy
        if at not in self.mapped:
            return (1,)
        del self.mapped[at]
        self.usable.discard(at)
        return (0,)


def host():
    return HostRanges(PAGE)


def played():
    return CudaRanges(0, PAGE, Played())


def cuda():
    import torch

    torch.zeros(1, device="cuda")  # makes the context
    return CudaRanges(0, PAGE)


def resident(at, off, n_bytes):
    """Bytes of memory there are behind a host range."""
    pages = (ctypes.c_ubyte * (n_bytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(at.address + off)
    assert libc.mincore(address, ctypes.c_size_t(n_bytes), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def held(ranges, at, off, n_bytes):
    """The same for any device, as far as its books say."""
    if ranges.device == "cpu":
        return resident(at, off, n_bytes)
    pages = ranges._state[at.address].pages
    return sum(off <= page < off + n_bytes for page in pages) * ranges.page_bytes


@pytest.mark.parametrize(
    "make",
    [host, played, pytest.param(cuda, marks=pytest.mark.gpu)],
    ids=lambda make: make.__name__,
)
def test_memory_is_behind_what_was_backed_and_nothing_else(make):
    ranges = make()
    page = ranges.page_bytes
    at = ranges.reserve(1000 * page)
    assert held(ranges, at, 0, 1000 * page) == 0
    ranges.back(at, 2 * page, 3 * page)
    ranges.fill(at, 2 * page, 3 * page)
    ranges.back(at, 999 * page, page)
    ranges.fill(at, 999 * page, page)
    assert held(ranges, at, 0, 1000 * page) == 4 * page
    assert held(ranges, at, 2 * page, 3 * page) == 3 * page
    ranges.unback(at, 3 * page, page)
    assert held(ranges, at, 2 * page, 3 * page) == 2 * page
    ranges.back(at, 3 * page, page)  # what was taken away can be had again
    ranges.fill(at, 3 * page, page)
    assert held(ranges, at, 0, 1000 * page) == 4 * page


@pytest.mark.gpu
def test_torch_reads_what_it_wrote_into_a_range_on_a_device():
    ranges = cuda()
    import torch

    page = ranges.page_bytes
    at = ranges.reserve(100 * page)
    ranges.back(at, 0, 2 * page)
    flat = torch.as_tensor(at.memory, device=ranges.device)
    flat[: 2 * page] = 7
    ranges.back(at, 2 * page, page)
    flat[2 * page : 3 * page] = 9
    assert int(flat[: 2 * page].sum()) == 14 * page
    assert int(flat[2 * page : 3 * page].sum()) == 9 * page


def test_twelve_terabytes_are_addresses_only():
    ranges = HostRanges(2 << 20)
    areas = [ranges.reserve(100 << 30) for _ in range(120)]
    last = areas[-1]
    ranges.back(last, (100 << 30) - HUGE, HUGE)
    last.memory[-1] = 7
    assert last.memory[-1] == 7
    assert last.address % HUGE == 0
    assert resident(last, (100 << 30) - HUGE, HUGE) in range(mmap.PAGESIZE, HUGE + 1)


def test_bytes_stay_while_more_is_backed_beside_them():
    ranges = HostRanges(PAGE)
    at = ranges.reserve(64 * PAGE)
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, 64 * PAGE, dtype=np.uint8)
    for page in rng.permutation(64).tolist():
        part = slice(page * PAGE, (page + 1) * PAGE)
        ranges.back(at, part.start, PAGE)
        at.memory[part] = data[part]
    assert np.array_equal(at.memory, data)


def test_addresses_last_as_long_as_a_view_of_them():
    ranges = HostRanges(PAGE)
    at = ranges.reserve(16 * PAGE)
    ranges.back(at, 0, PAGE)
    view = at.memory[:PAGE]
    view[:] = 5
    name = f"{at.address:x}-"
    del at, ranges
    gc.collect()
    assert int(view.sum()) == 5 * PAGE
    assert name in Path("/proc/self/maps").read_text()
    del view
    gc.collect()
    assert name not in Path("/proc/self/maps").read_text()


def child(script):
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_touching_what_is_not_backed_is_a_fault_not_a_wrong_byte():
    done = child(
        "from tiers.ranges import HostRanges; r = HostRanges(65536); a = r.reserve(1 << 20)\n"
        "r.back(a, 0, 65536); a.memory[0] = 1; r.unback(a, 0, 65536); print('here', flush=True)\n"
        "a.memory[0]"
    )
    assert (done.stdout, done.returncode) == ("here\n", -11)


def test_a_range_beyond_a_limit_of_the_process_is_refused_naming_both():
    done = child(
        "import resource, numpy\n"
        "from tiers.ranges import HostRanges, RangeRefused\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "HostRanges(65536).reserve(1 << 30)\n"
        "try: HostRanges(65536).reserve(100 << 30)\n"
        "except RangeRefused as err: print(err)"
    )
    assert "107,374,182,400 bytes" in done.stdout, done.stderr
    assert "RLIMIT_AS is 8,589,934,592 bytes (ulimit -v)" in done.stdout


def test_memory_beyond_a_limit_of_the_process_is_refused_and_nothing_is_behind():
    done = child(
        "import resource, numpy\n"
        "from tiers.errors import MediumError\n"
        "from tiers.ranges import HostRanges\n"
        "r = HostRanges(65536); a = r.reserve(100 << 30)\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))\n"
        "try: r.back(a, 0, 50 << 30)\n"
        "except MediumError as err: print(err, flush=True)\n"
        "r.back(a, 0, 65536); a.memory[0] = 1; print(a.memory[0])"
    )
    assert "RLIMIT_DATA is 4,294,967,296 bytes (ulimit -d)" in done.stdout, done.stderr
    assert done.stdout.endswith("\n1\n")


@pytest.mark.parametrize("n_bytes", [1 << 47, 1 << 62, (1 << 64) + PAGE])
def test_more_than_a_process_can_address_is_refused(n_bytes):
    with pytest.raises(RangeRefused, match="so many addresses") as told:
        HostRanges(PAGE).reserve(n_bytes)
    assert told.value.n_bytes == n_bytes


# --- the driver's calls, played -------------------------------------------------------------------


def test_pages_taken_away_are_mapped_again_before_new_ones_are_made():
    driver = Played()
    ranges = CudaRanges(0, None, driver)
    one, other = ranges.reserve(10 * PAGE), ranges.reserve(10 * PAGE)
    ranges.back(one, 0, 4 * PAGE)
    ranges.unback(one, 0, 4 * PAGE)
    ranges.back(other, 5 * PAGE, 5 * PAGE)
    assert driver.n_made == 5
    assert driver.usable == {other.address + i * PAGE for i in range(5, 10)}


def test_pages_that_are_kept_go_back_when_they_are_too_many():
    driver = Played()
    ranges = CudaRanges(0, None, driver)
    at = ranges.reserve(10 * PAGE)
    ranges.back(at, 0, 4 * PAGE)
    ranges.unback(at, 0, 4 * PAGE)
    assert ranges.kept_bytes == 4 * PAGE
    ranges.trim(3 * PAGE + 1)
    assert ranges.kept_bytes == 3 * PAGE == len(driver.alive) * PAGE
    ranges.trim(0)
    assert not ranges.kept_bytes and not driver.alive


def test_a_device_without_memory_is_told_and_keeps_nothing_behind():
    driver = Played(n_pages=3)
    ranges = CudaRanges(0, None, driver)
    at = ranges.reserve(10 * PAGE)
    with pytest.raises(MediumError, match="cuMemCreate"):
        ranges.back(at, 0, 4 * PAGE)
    assert not driver.mapped
    ranges.back(at, PAGE, 3 * PAGE)
    assert len(driver.usable) == 3


def test_a_device_that_refuses_a_range_names_its_size():
    ranges = CudaRanges(0, None, Played(most_addresses=4 * PAGE))
    with pytest.raises(RangeRefused, match=f"{5 * PAGE:,} bytes"):
        ranges.reserve(5 * PAGE)


def test_all_goes_back_to_the_device_with_the_last_view():
    driver = Played()
    ranges = CudaRanges(0, None, driver)
    at = ranges.reserve(10 * PAGE)
    ranges.back(at, 0, 4 * PAGE)
    ranges.unback(at, 0, PAGE)
    memory = at.memory
    del at, ranges
    gc.collect()
    assert driver.ranges and len(driver.mapped) == 3
    driver.is_busy = True  # kernels that read it have been launched, and its tensor is gone
    del memory
    gc.collect()
    assert not driver.ranges and not driver.mapped and not driver.alive and not driver.n_users
    assert not driver.in_context()


def test_a_thread_that_has_run_nothing_on_the_device_is_in_its_context():
    """One such thread backs memory ahead of need: the driver goes by a thread's own context."""
    driver = Played()
    ranges = CudaRanges(0, None, driver)
    at = ranges.reserve(10 * PAGE)
    thread = threading.Thread(target=ranges.back, args=(at, 0, 2 * PAGE))
    thread.start()
    thread.join()
    assert len(driver.usable) == 2


def test_pages_are_as_large_as_the_device_wants_them():
    assert CudaRanges(0, 4096, Played()).page_bytes == PAGE
    assert CudaRanges(0, PAGE + 1, Played()).page_bytes == 2 * PAGE
