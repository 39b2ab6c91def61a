"""Contiguous virtual KV buffers: their sizes, and which slot a request gets. Pure.

    buffer of layer 0, K:  | slot 0: L rows | slot 1: L rows | ... | slot B-1 |   addresses
                            ####......       ##........                         # memory behind
    and so for V, and for every layer: 2N buffers of B × L × S bytes

As in vAttention (Prabhu et al., ASPLOS 2025): S is what a token's keys (or values) of one layer
take on this worker. A request's rows are contiguous however long it grows, so attention kernels
need not know. Memory comes by pages, for all buffers of a slot at once, as they grow in step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from operator import index
from typing import Any, SupportsIndex

from impress.errors import BadInput, Unsupported
from impress.types import Geometry
from tiers.base import PAGE, round_up


@dataclass(frozen=True, slots=True)
class Virtual:
    """How an engine's virtual buffers are made. Raises BadInput on sizes out of range."""

    batch: int = 8
    """Prompts whose rows may exist at once, those that wait to be stored included."""
    context: int | None = None
    """Most tokens of one, prompt and answer. None: the longest the model takes."""
    page_bytes: int = 64 << 10
    """Memory is added this many bytes at a time in each buffer: a power of two from 4 KiB. From
    2 MiB on the kernel is asked for huge pages. A device rounds it up to what it can map."""
    budget_bytes: int | None = None
    """Most memory behind all rows; None: no limit."""
    keep_bytes: int = 256 << 20
    """Most memory kept for later requests, behind slots nobody rents or behind none."""

    def __post_init__(self) -> None:
        least = {"batch": 1, "context": 1, "page_bytes": 0, "budget_bytes": 0, "keep_bytes": 0}
        for name, smallest in least.items():
            size = getattr(self, name)
            if size is None and name in ("context", "budget_bytes"):
                continue
            if not isinstance(size, SupportsIndex) or index(size) < smallest:
                raise BadInput(
                    f"virtual buffers: {name} must be a whole number from {smallest}, got {size!r}"
                )
        if self.page_bytes < PAGE or self.page_bytes & (self.page_bytes - 1):
            raise BadInput(
                f"virtual buffers: page_bytes must be a power of two from {PAGE}, "
                f"got {self.page_bytes}"
            )


@dataclass(frozen=True, slots=True)
class Sizes:
    """2N buffers for `batch` requests (B) of at most `context` tokens (L). Bytes, of one worker.

    `row_bytes` (S): K's and V's of one token in one layer. Raises BadInput on what is not positive.
    """

    n_layers: int
    batch: int
    context: int
    row_bytes: tuple[int, int]
    page_bytes: int

    def __post_init__(self) -> None:
        for name in ("n_layers", "batch", "context", "page_bytes"):
            if getattr(self, name) < 1:
                raise BadInput(f"virtual buffers: {name} must be at least 1")

    @classmethod
    def of(cls, geometry: Geometry, batch: int, context: int, page_bytes: int) -> Sizes:
        """Sizes for the geometry that one worker holds: under tensor parallelism, its own heads."""
        rows = geometry.k_row_bytes, geometry.v_row_bytes
        return cls(geometry.n_layers, batch, context, rows, page_bytes)

    @property
    def n_buffers(self) -> int:
        return 2 * self.n_layers

    @property
    def slot_bytes(self) -> tuple[int, int]:
        """A request's part of a K and of a V buffer: L × S, in whole pages."""
        k, v = (round_up(self.context * row, self.page_bytes) for row in self.row_bytes)
        return k, v

    @property
    def buffer_bytes(self) -> tuple[int, int]:
        """A K and a V buffer: B × L × S."""
        k, v = self.slot_bytes
        return self.batch * k, self.batch * v

    @property
    def total_bytes(self) -> int:
        """Addresses of all 2N buffers."""
        return self.n_layers * sum(self.buffer_bytes)

    def backed(self, n_rows: int) -> tuple[int, int]:
        """Bytes of whole pages that n_rows of a slot take, of a K and of a V buffer."""
        k, v = (round_up(n_rows * row, self.page_bytes) for row in self.row_bytes)
        return k, v

    def held_bytes(self, n_rows: int) -> int:
        """Memory behind n_rows of a slot, in all buffers."""
        return self.n_layers * sum(self.backed(n_rows))

    def room(self, n_rows: int) -> int:
        """Rows for which the pages behind n_rows suffice."""
        rooms = (b // row for b, row in zip(self.backed(n_rows), self.row_bytes, strict=True))
        return min(self.context, *rooms)


class Use(Enum):
    """What a slot is for now. IDLE: no request's, though memory may still be behind it."""

    IDLE = auto()
    RENTED = auto()
    TOUCHED = auto()  # no request's, but a stuck read may still write into it


@dataclass(slots=True)
class Slot:
    """One request's part of every buffer."""

    use: Use = Use.IDLE
    n_rows: int = 0  # rows that have memory, in all buffers
    last_use: int = 0  # when it was given back; larger is later
    renter: int = 0  # number of its latest rental


@dataclass(frozen=True, slots=True)
class Usage:
    """What virtual buffers hold and did."""

    reserved_bytes: int  # of addresses
    held_bytes: int  # memory behind them, or kept for them
    idle_bytes: int  # of that, kept for later requests
    n_rented: int = 0  # requests served
    n_reused: int = 0  # of those, with slots that had memory already
    n_ahead: int = 0  # growths made before they were needed
    n_stalls: int = 0  # growths that a request waited for
    stall_s: float = 0.0
    n_fallbacks: int = 0  # requests that took, or moved to, ordinary memory


def choose(slots: Sequence[Slot], batch: int, n_rows: int) -> int | None:
    """First of `batch` neighbouring idle slots for a request that begins with n_rows; None if none.

    Neighbours, since the rows of a batch are one tensor. Takes those with the least memory that
    suffices, else those with the most: a short request must not sit on what a long one left.
    """
    best: tuple[bool, int] | None = None
    found = None
    for first in range(len(slots) - batch + 1):
        run = slots[first : first + batch]
        if all(slot.use is Use.IDLE for slot in run):
            there = sum(slot.n_rows for slot in run)
            enough = all(slot.n_rows >= n_rows for slot in run)
            worth = enough, -there if enough else there
            if best is None or worth > best:
                best, found = worth, first
    return found


def reclaim(slots: Sequence[Slot], sizes: Sizes, n_bytes: int, spared: range) -> list[int]:
    """Idle slots whose memory is taken to free at least n_bytes: those idle longest first.

    All of them where they do not suffice. `spared`: slots that are being rented.
    """
    idle = [
        i for i, slot in enumerate(slots)
        if slot.use is Use.IDLE and slot.n_rows and i not in spared
    ]  # fmt: skip
    chosen, freed = [], 0
    for i in sorted(idle, key=lambda i: slots[i].last_use):
        if freed >= n_bytes:
            break
        chosen.append(i)
        freed += sizes.held_bytes(slots[i].n_rows)
    return chosen


def device_of(model: Any) -> Any:
    """The device that a model lies on. Raises Unsupported where it lies on several: slots are on
    one, and other devices' layers would take room for the longest answer beside them."""
    devices = {str(parameter.device): parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        lies_on = " and ".join(sorted(devices)) or "none"
        raise Unsupported(f"virtual buffers: the model must lie on one device, it is on {lies_on}")
    return next(iter(devices.values()))
