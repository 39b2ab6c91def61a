"""One span's history as arrays, and as a value in the index (docs/FORMAT.md, database `history`).

0   2 version = 3       12  4 length of the compressed part
2   2 layers            16  8 request counter when it was last noted
4   4 windows           24  4 mean score of its chunks then, float32
8   4 window, tokens    28  4 mean share of important rows, float32, NaN: nothing was decided
32  … zlib of: tick i64 [layers] ‖ uses f32 [layers, windows] ‖ seen u8 [2, layers, windows] ‖
    halves f16 [2, layers, rows], all low bytes before all high ones ‖ looks u8 [layers, windows] ‖
    whole f32 [layers, windows]; versions 1 and 2 had one half, 1 ended with it
-8  8 xxh3_64 of all before
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from impress.errors import FormatError

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_HEAD: Final = struct.Struct("<HHIIIQff")
_VERSION: Final = 3
_ONE_HALF: Final = 2  # can be read, too
_NO_WHOLE: Final = 1  # and this
_MOST_BYTES: Final = 1 << 30
#: A use counts half after this many requests.
HALF_LIFE: Final = 512
#: Weight of the newest request in its half's averages, once there have been 1 / NEWEST of them;
#: until then they are plain means.
NEWEST: Final = 1 / 16
#: Weight of the newest request in `every`: who decided to read every row will again.
WHOLE: Final = 1 / 2


class Summary(NamedTuple):
    """A span's means: the scores of its chunks; the share of its rows that was important, and the
    share that requests needed, nan where nothing was decided."""

    score: float
    important: float
    needed: float


@dataclass(slots=True)
class Remembered:
    """What is known of one span. Rows in position order, chunks in the order they lie in.

    Each half of every window's decisions is averaged apart from the other: what an order made by
    one half would save is counted by the other, which has not made it (repacking/packing.py).
    """

    halves: npt.NDArray[np.float16]  # [2, n_layers, n_rows] how often each was chosen
    seen: npt.NDArray[np.uint8]  # [2, n_layers, n_windows] decisions, as far as they matter
    uses: npt.NDArray[np.float32]  # [n_layers, n_chunks] as of `ticks`
    ticks: npt.NDArray[np.int64]  # [n_layers] request of the last note
    scores: npt.NDArray[np.float64]  # [n_layers] mean of its chunks', as of the last of `ticks`
    """NaN: to be counted by window. Where rows lie in another order, `History.worth` sets it."""
    looks: npt.NDArray[np.uint8]  # [n_layers, n_windows] decisions, and uses of every row; as seen
    tries: npt.NDArray[np.uint8]  # [n_layers, n_windows] these without `every`; not saved: as many
    whole: npt.NDArray[np.float32]  # [n_layers, n_windows] share of `tries` that fell back
    every: npt.NDArray[np.float32]  # [n_layers, n_windows] was to have every row; not saved
    window: int
    summed: Summary | None = None  # what `summary` found; any change sets it to None

    @classmethod
    def empty(cls, n_layers: int, n_windows: int, window: int) -> Remembered:
        return cls(
            np.zeros((2, n_layers, n_windows * window), dtype=np.float16),
            np.zeros((2, n_layers, n_windows), dtype=np.uint8),
            np.zeros((n_layers, n_windows), dtype=np.float32),
            np.zeros(n_layers, dtype=np.int64),
            np.full(n_layers, np.nan),
            np.zeros((n_layers, n_windows), dtype=np.uint8),
            np.zeros((n_layers, n_windows), dtype=np.uint8),
            np.zeros((n_layers, n_windows), dtype=np.float32),
            np.zeros((n_layers, n_windows), dtype=np.float32),
            window,
        )

    @property
    def tick(self) -> int:
        """The last request that was noted."""
        return int(self.ticks.max())

    @property
    def n_rows(self) -> int:
        return int(self.halves.shape[2])

    @property
    def n_windows(self) -> int:
        return int(self.seen.shape[2])

    @property
    def n_bytes(self) -> int:
        _, n_layers, n_windows = self.seen.shape
        return self.bytes_of(n_layers, n_windows, self.window)

    @staticmethod
    def bytes_of(n_layers: int, n_windows: int, window: int) -> int:
        """What a span takes in memory: averages of its rows, seven numbers a window, ticks,
        scores."""
        return n_layers * (n_windows * (2 * 2 * window + 4 * 1 + 3 * 4) + 16)

    def copy(self) -> Remembered:
        return Remembered(
            self.halves.copy(), self.seen.copy(), self.uses.copy(), self.ticks.copy(),
            self.scores.copy(), self.looks.copy(), self.tries.copy(), self.whole.copy(),
            self.every.copy(), self.window,
        )  # fmt: skip

    def part(self, first: int, count: int) -> Remembered:
        """What is known of windows [first, first + count), as if a span of their own.

        Its chunks may hold other rows: each begins with the uses of its layer's most used one.
        """
        rows = slice(first * self.window, (first + count) * self.window)
        windows = slice(first, first + count)
        return Remembered(
            self.halves[..., rows].copy(), self.seen[..., windows].copy(),
            np.repeat(self.uses.max(axis=1, keepdims=True), count, axis=1),
            self.ticks.copy(), np.full(len(self.ticks), np.nan),
            self.looks[:, windows].copy(), self.tries[:, windows].copy(),
            self.whole[:, windows].copy(), self.every[:, windows].copy(), self.window,
        )  # fmt: skip

    def chose(self, layer: int, first: int, rows: npt.NDArray[np.bool_], tick: int) -> None:
        """Move the averages of rows from `first` on towards which of them a request chose: for each
        window in the half that has had fewer decisions, after that in one drawn by lot."""
        chosen = rows.reshape(-1, self.window).astype(np.float32)
        windows = slice(first // self.window, first // self.window + len(chosen))
        seen = self.seen[:, layer, windows]
        half = (seen[0] > seen[1]).astype(np.int64)
        half[seen.min(axis=0) >= 1 / NEWEST] = drawn(tick)
        for i in (0, 1):
            which = np.flatnonzero(half == i)
            n = seen[i, which] + (seen[i, which] < 1 / NEWEST)
            seen[i, which] = n
            average = self.halves[i, layer, first : first + len(rows)].reshape(-1, self.window)
            average[which] += (chosen[which] - average[which]) / n[:, None]

    def look(self, layer: int, windows: slice, chose: bool, whole: bool, every_layer: bool) -> None:
        """Move the shares of requests that needed every row of these windows; arguments as in
        Note. Of one that neither chose nor is `whole` no more is known than that it was not to have
        every row."""
        every = self.every[layer, windows]
        every += (every_layer - every) * WHOLE
        if not (chose or whole):
            return
        looks, tries = self.looks[layer, windows], self.tries[layer, windows]
        np.add(looks, 1, out=looks, where=looks < 1 / NEWEST)
        if not every_layer:
            np.add(tries, 1, out=tries, where=tries < 1 / NEWEST)
            fell_back = self.whole[layer, windows]
            fell_back += (whole - fell_back) / tries

    def average(self, layers: slice = slice(None)) -> Floats:
        """float32 [n_layers, n_rows]: how often each row was chosen, by all decisions."""
        seen = self.seen[:, layers].astype(np.float32)
        share = np.repeat(seen / np.maximum(seen.sum(axis=0), 1), self.window, axis=2)
        return np.asarray((self.halves[:, layers] * share).sum(axis=0))

    def compared(self) -> Floats | None:
        """float32 [2, n_layers, n_rows]: averages of both halves, nan in windows without a decision
        for each; None where all are."""
        twice = self.seen.all(axis=0)
        if not twice.any():
            return None
        rows = np.repeat(twice, self.window, axis=1)
        return np.where(rows, self.halves.astype(np.float32), np.float32(np.nan))

    def decided(self, layer: int) -> npt.NDArray[np.bool_]:
        """[n_windows]: whether anything was decided."""
        return np.asarray(self.seen[:, layer].any(axis=0))

    def shares(self, layer: int, ordinals: Ids | None) -> Floats:
        """[n_chunks]: means of the rows' averages; a row nothing was decided about counts 1.

        `ordinals`: where each row lies in the order of chunks; None: in position order.
        """
        if not self.decided(layer).any():  # as where all is read: row by row, 1 everywhere
            return np.ones(self.seen.shape[2], dtype=np.float32)
        return self._by_chunk(self._rows(layer), ordinals)

    def needed(self, layer: int, ordinals: Ids | None, shares: Floats) -> Floats:
        """[n_chunks]: the share of its rows that a request needs. `shares`: for requests that
        choose; others need every row, as often as they were seen."""
        whole = self._needed_whole(layer)
        if not whole.any() or not self.decided(layer).any():
            return shares
        rows = self._rows(layer)
        by_window = rows.reshape(-1, self.window)
        by_window += whole[:, None] * (1 - by_window)
        return self._by_chunk(rows, ordinals)

    def _needed_whole(self, layers: int | slice = slice(None)) -> Floats:
        """[n_windows] of a layer, [n_layers, n_windows] of several: the share of requests that need
        every row."""
        whole = self.whole[layers]
        return np.asarray(whole + self.every[layers] * (1 - whole))

    def known_shares(self, shares: Floats, layer: int, ordinals: Ids | None) -> Floats | None:
        """`shares` without undecided rows (1 each); nan: a chunk has no others, None: none has."""
        seen = self.decided(layer)
        if seen.all() or not seen.any():
            return shares if seen.any() else None
        part = self._by_chunk(np.repeat(seen, self.window).astype(np.float32), ordinals)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(part > 0, (shares - (1 - part)) / part, np.float32(np.nan))

    def _rows(self, layer: int) -> Floats:
        (rows,) = self.average(slice(layer, layer + 1))
        rows.reshape(-1, self.window)[~self.decided(layer)] = 1
        return np.asarray(rows)

    def _by_chunk(self, rows: Floats, ordinals: Ids | None) -> Floats:
        if ordinals is not None:
            placed = np.empty_like(rows)
            placed[ordinals] = rows
            rows = placed
        return np.asarray(rows.reshape(-1, self.window).mean(axis=1))

    def summary(self) -> Summary:
        """As of the span's last note."""
        if self.summed is None:
            self.summed = self._summary()
        return self.summed

    def _summary(self) -> Summary:
        share = np.zeros(self.seen.shape[1:], dtype=np.float32)
        if self.seen.any():
            share = self.average().reshape(*share.shape, self.window).mean(axis=2)
        decided = self.seen.any(axis=0)
        # Right where a chunk holds its window's rows, or all chunks have the same uses.
        needed = np.where(decided, share + self._needed_whole() * (1 - share), 1)
        in_place = (self.uses * needed).mean(axis=1, dtype=np.float64)
        in_place *= np.exp2((self.ticks - self.tick) / HALF_LIFE)
        score = float(np.where(np.isnan(self.scores), in_place, self.scores).mean())
        used = self.looks > 0  # also by requests that need every row, where nothing is decided
        return Summary(score, *(
            float(some.mean()) if len(some) else math.nan
            for some in (share[decided], needed[used])
        ))  # fmt: skip


def drawn(tick: int) -> int:
    """0 or 1, by request: no order that requests come in matches it."""
    return (tick * 0x9E3779B97F4A7C15 & (1 << 64) - 1) >> 63


class Head(NamedTuple):
    """What a value tells without being unpacked."""

    tick: int
    score: float
    share: float
    n_bytes: int  # that it takes in memory


def encode(known: Remembered) -> bytes:
    """The value; see above."""
    planes = known.halves.view(np.uint8).reshape(-1, 2).T  # low bytes, high bytes: compress better
    body = b"".join(
        np.ascontiguousarray(array).tobytes()
        for array in (known.ticks, known.uses, known.seen, planes, known.looks, known.whole)
    )
    packed = zlib.compress(body, 1)
    _, n_layers, n_windows = known.seen.shape
    head = _HEAD.pack(
        _VERSION, n_layers, n_windows, known.window, len(packed), known.tick,
        *known.summary()[:2],
    )  # fmt: skip
    return head + packed + _sum(head + packed)


def decode(raw: bytes) -> Remembered:
    """The inverse. Raises FormatError on a value that is damaged or newer."""
    if len(raw) < _HEAD.size + 8 or _sum(raw[:-8]) != raw[-8:]:
        raise FormatError("history: a damaged value")
    version, n_layers, n_windows, window, length, _, score, _ = _HEAD.unpack_from(raw)
    if version not in (_VERSION, _ONE_HALF, _NO_WHOLE):
        raise FormatError(f"history: version {version} is newer than this program")
    n, n_halves = n_layers * n_windows, 2 if version == _VERSION else 1
    sizes = [8 * n_layers, 4 * n, n_halves * n, n_halves * 2 * n * window, n, 4 * n]
    n_bytes = sum(sizes[:4] if version == _NO_WHOLE else sizes)
    body = _unpacked(raw[_HEAD.size : _HEAD.size + length], n_bytes)
    if not n or len(body) != n_bytes:
        raise FormatError("history: a value of the wrong length")
    if version == _NO_WHOLE:  # of the requests that looked, none is known to have needed every row
        body += body[sum(sizes[:2]) : sum(sizes[:3])] + bytes(sizes[-1])
    ticks, uses, seen, planes, looks, whole = (
        np.frombuffer(body[end - size : end], dtype=np.uint8)
        for end, size in zip(accumulate(sizes), sizes, strict=True)
    )
    halves = np.zeros((2, n_layers, n_windows * window), dtype=np.float16)
    filled = np.ascontiguousarray(planes.reshape(2, -1).T).view(np.float16)
    halves[:n_halves] = filled.reshape(n_halves, n_layers, -1)
    both = np.zeros((2, n_layers, n_windows), dtype=np.uint8)  # the other half comes with requests
    both[:n_halves] = seen.reshape(n_halves, n_layers, n_windows)
    return Remembered(
        halves,
        both,
        uses.view(np.float32).reshape(n_layers, n_windows).copy(),
        ticks.view(np.int64).copy(),
        np.full(n_layers, score, dtype=np.float64),
        looks.reshape(n_layers, n_windows).copy(),
        looks.reshape(n_layers, n_windows).copy(),
        whole.view(np.float32).reshape(n_layers, n_windows).copy(),
        np.zeros((n_layers, n_windows), dtype=np.float32),
        window,
    )


def _unpacked(packed: bytes, n_bytes: int) -> bytes:
    """At most a byte more than wanted, however much a value unpacks to."""
    try:
        return zlib.decompressobj().decompress(packed, min(n_bytes, _MOST_BYTES) + 1)
    except zlib.error as err:
        raise FormatError(f"history: {err}") from err


def head_of(raw: bytes | None) -> Head | None:
    """A value's head; None if it is damaged or of another version."""
    if raw is None or len(raw) < _HEAD.size + 8 or _sum(raw[:-8]) != raw[-8:]:
        return None
    version, n_layers, n_windows, window, _, tick, score, share = _HEAD.unpack_from(raw)
    known = version in (_VERSION, _ONE_HALF, _NO_WHOLE)
    n_bytes = Remembered.bytes_of(n_layers, n_windows, window)
    return Head(tick, score, share, n_bytes) if known else None


def _sum(raw: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(raw).to_bytes(8, "little")


def faded(requests: int) -> float:
    """How much a use this many requests ago counts."""
    return math.exp2(-max(requests, 0) / HALF_LIFE)


def ranks_of(scores: Floats, tick: int) -> npt.NDArray[np.float64]:
    """Ranks of scores as of `tick`."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log2(scores.astype(np.float64)) + tick / HALF_LIFE)
