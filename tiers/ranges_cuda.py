"""Ranges on a CUDA device, by the driver's own calls. An extra (`gpu`).

    reserve: cuMemAddressReserve     back:   cuMemCreate or a page kept, cuMemMap, cuMemSetAccess
    end:     cuMemAddressFree        unback: cuMemUnmap; the page is kept for the next `back`
    trim:    cuMemRelease

Whichever thread calls, and a range may end on any, the driver is called in the device's primary
context, torch's own: a thread that has run nothing on a device has no context.

Checked against a driver emulated on the host, and on a device (tests). cuda.core has no call that
only reserves, so the driver's calls are used.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import filterfalse, tee
from operator import itemgetter
from typing import Any, Final

from tiers.errors import MediumError
from tiers.ranges import Range, RangeRefused

#: Most bytes that `unback` keeps for the next `back`, until `trim`: making memory takes longer than
#: mapping it.
MOST_KEPT: Final = 1 << 30


class CudaRanges:
    """Memory of one CUDA device."""

    def __init__(self, ordinal: int, page_bytes: int | None = None, driver: Any = None) -> None:
        """`page_bytes`: rounded up to the least the device maps, 2 MiB as a rule; None: that.

        `driver`: `cuda.bindings.driver`, or an emulation. Raises MediumError where there is none.
        """
        self.device = f"cuda:{ordinal}"
        self._driver = cuda = driver if driver is not None else _driver()
        _call(cuda.cuInit(0), "cuInit")
        device = _call(cuda.cuDeviceGet(ordinal), "cuDeviceGet")
        self._context = _call(cuda.cuDevicePrimaryCtxRetain(device), "the primary context")
        prop = cuda.CUmemAllocationProp()
        prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = ordinal
        access = cuda.CUmemAccessDesc()
        access.location = prop.location
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit = _call(cuda.cuMemGetAllocationGranularity(prop, least), "the granularity")
        self.page_bytes: int = -(-max(page_bytes or 1, 1) // unit) * unit
        self._prop, self._access = prop, access
        self._kept: list[Any] = []  # handles of one page each, mapped at no address
        end = weakref.finalize(self, _release, cuda, device, self._context, self._kept)
        end.atexit = False
        self._state: dict[int, _Backed] = {}  # by address of a range

    def reserve(self, n_bytes: int) -> Range:
        with self._entered():
            made = self._driver.cuMemAddressReserve(n_bytes, self.page_bytes, 0, 0)
        if int(made[0]):
            raise RangeRefused(n_bytes, f"the driver says {_name(made[0])}")
        address = int(made[1])
        memory = _Memory(address, n_bytes)
        backed = self._state[address] = _Backed(self._driver, address, n_bytes, self.page_bytes)
        weakref.finalize(memory, self._end, backed).atexit = False  # the driver may be gone by then
        return Range(address, n_bytes, memory)

    def back(self, at: Range, off: int, n_bytes: int) -> None:
        backed = self._state[at.address]
        with self._entered():
            try:
                self.unback(at, off, n_bytes)  # what Ctrl-C left there, mapped or not
                for here in range(off, off + n_bytes, self.page_bytes):
                    if not self._kept:
                        self._make()
                    _move(self._kept, -1, partial(backed.pages.__setitem__, here))
                    backed.map(here)
                allowed = self._driver.cuMemSetAccess(at.address + off, n_bytes, [self._access], 1)
                _call(allowed, "cuMemSetAccess")
            except BaseException:
                self.unback(at, off, n_bytes)
                raise

    def fill(self, at: Range, off: int, n_bytes: int) -> None:
        """A device's memory is there as soon as it is mapped."""

    def unback(self, at: Range, off: int, n_bytes: int) -> None:
        # Work that was queued may still read these pages: the caller has synchronised.
        backed = self._state[at.address]
        with self._entered():
            for here in range(off, off + n_bytes, self.page_bytes):
                if here in backed.pages:
                    backed.unmap(here)
                    _move(backed.pages, here, self._kept.append)
            self.trim(MOST_KEPT)

    @property
    def kept_bytes(self) -> int:
        return len(self._kept) * self.page_bytes

    def trim(self, n_bytes: int) -> None:
        if self.kept_bytes > n_bytes:
            with self._entered():
                while self.kept_bytes > n_bytes:
                    _move(self._kept, -1, self._driver.cuMemRelease)

    def _make(self) -> None:
        """Make a page, and put it among those kept. Raises MediumError."""
        # From the driver into the list by C code alone, as in `_move`; then the answer is read.
        answers, same = tee(map(self._driver.cuMemCreate, [self.page_bytes], [self._prop], [0]))
        self._kept.extend(map(itemgetter(1), filterfalse(itemgetter(0), same)))
        _call(next(answers), "cuMemCreate")

    def _entered(self) -> AbstractContextManager[None]:
        return _in_context(self._driver, self._context)

    def _end(self, backed: _Backed) -> None:
        """Nobody holds the range, but kernels that read it may still be queued: cuMemUnmap takes
        the pages at once, and those kernels would fault, which ends the context."""
        self._state.pop(backed.address)
        with self._entered():
            self._driver.cuCtxSynchronize()
            backed.end()


#: CUDA_ERROR_INVALID_VALUE: from cuMemUnmap, where nothing is mapped.
_NOT_MAPPED: Final = 1


@dataclass(slots=True)
class _Backed:
    """What is mapped into one range: handles of pages by offset."""

    driver: Any
    address: int
    n_bytes: int
    page_bytes: int
    pages: dict[int, Any] = field(default_factory=dict)

    def map(self, off: int) -> None:
        """Map the page noted there. (Noted first: Ctrl-C comes as the call returns, when it is.)"""
        where = self.address + off, self.page_bytes
        _call(self.driver.cuMemMap(*where, 0, self.pages[off], 0), "cuMemMap")

    def unmap(self, off: int) -> None:
        done = self.driver.cuMemUnmap(self.address + off, self.page_bytes)
        if int(done[0]) != _NOT_MAPPED:  # else a map, or an unmap, was cut off here
            _call(done, "cuMemUnmap")

    def end(self) -> None:
        """Let everything go: nobody holds the range."""
        for off in list(self.pages):
            self.unmap(off)
            _move(self.pages, off, self.driver.cuMemRelease)
        self.driver.cuMemAddressFree(self.address, self.n_bytes)


def _release(driver: Any, device: Any, context: Any, pages: list[Any]) -> None:
    with _in_context(driver, context):
        while pages:
            _move(pages, -1, driver.cuMemRelease)
    driver.cuDevicePrimaryCtxRelease(device)


def _move(pages: Any, at: int, to: Callable[[Any], object]) -> None:
    """Take a page out of these and hand it on, all by C code: Ctrl-C comes before that or after it.

    Otherwise the page could be in neither place, and lost, or in both: mapped twice, or released
    while it is still listed, when its handle may already be another's.
    """
    next(map(to, map(pages.pop, (at,))))


@contextmanager
def _in_context(driver: Any, context: Any) -> Iterator[None]:
    """With this context current on this thread. Raises MediumError."""
    _call(driver.cuCtxPushCurrent(context), "cuCtxPushCurrent")
    try:
        yield
    finally:
        driver.cuCtxPopCurrent()


class _Memory:
    """Device bytes [n_bytes], as torch.as_tensor takes them without a copy."""

    def __init__(self, address: int, n_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (n_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def _driver() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        raise MediumError(
            "KV buffers on CUDA need cuda-bindings: pip install '.[gpu]' in impress's clone"
        ) from None


def _call(answer: Any, what: str) -> Any:
    """The value of a driver's answer (error, value …). Raises MediumError naming the call."""
    if int(answer[0]):
        raise MediumError(f"{what}: the driver says {_name(answer[0])}")
    return answer[1] if len(answer) > 1 else None


def _name(code: Any) -> str:
    return str(getattr(code, "name", code))
