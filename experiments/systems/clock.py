"""Compute that is not there, as timed waits on the clock that real reads run on.

On a machine without an accelerator everything a GPU would do (forward, scoring, top-k,
dequantising) is *emulated*: a wait as long as one stated roofline says, multiplied by how much
slower this disk is than the paper's. Reads, planning, the index and copies are real. Because both
run on one clock, what overlaps in a real engine overlaps here.

Choosing rows is computed for real, but before the clock starts (`planned.py`): its processor time
here says nothing about a GPU's.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass
from typing import Final

from experiments.systems.shapes import Shape

#: The paper's disk, sequential reads.
PAPER_DISK_GB_S: Final = 5.0
#: Largest share a prediction of the emulator may be off by where compute is real.
MOST_ERROR: Final = 0.15
#: What a wait spins on: some 20 microseconds.
_SPUN: Final = bytes(64 << 10)


@dataclass(frozen=True, slots=True)
class Roofline:
    """A device: the larger of arithmetic and memory time, each at a stated efficiency.

    `step_s`: what every layer costs besides (launches, and on a CPU the interpreter); `score_s`:
    the same for each choice of rows; `request_s`: for each request, before anything is read;
    `beside_s`: for each request, beside its first reads.
    """

    name: str
    flop_s: float
    memory_b_s: float
    efficiency: float
    memory_efficiency: float
    step_s: float = 0.0
    score_s: float = 0.0
    request_s: float = 0.0
    beside_s: float = 0.0

    def seconds(self, flops: float, n_bytes: float) -> float:
        arithmetic = flops / (self.flop_s * self.efficiency)
        return max(arithmetic, n_bytes / (self.memory_b_s * self.memory_efficiency))


#: NVIDIA A100-80G (SXM): dense 16-bit tensor cores, HBM2e. Half of peak is a good prefill.
A100: Final = Roofline("A100-80G", 312e12, 2.039e12, 0.5, 0.7, step_s=60e-6, score_s=60e-6)


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds of the parts of a shape's forward on a device. Pure arithmetic; one prompt."""

    shape: Shape
    device: Roofline

    def layer(self, n_new: int, n_rows: int) -> float:
        """One layer's forward: n_new tokens that attend to n_rows before them and to themselves."""
        s = self.shape
        weights = 2 * s.layer_params
        flops = 2.0 * n_new * s.layer_params
        flops += 4.0 * n_new * (n_rows + n_new / 2) * s.hidden
        return self.device.step_s + self.device.seconds(flops, weights + n_rows * s.row_bytes)

    def attend(self, n_new: int, n_rows: int) -> float:
        """The part of `layer` that needs n_rows rows to be there: attention and all after it."""
        s = self.shape
        before = s.hidden * (s.hidden + 2 * s.n_kv_heads * s.head_dim)
        return self.layer(n_new, n_rows) - self.device.seconds(2.0 * n_new * before, 2 * before)

    def project(self, n_new: int) -> float:
        """The query, key and value of the new tokens: the part of `layer` before that."""
        return self.layer(n_new, 0) - self.attend(n_new, 0)

    def score(self, n_new: int, n_tokens: int, n_heads: int, n_bytes: float) -> float:
        """Scores of `n_heads` query heads on keys or sketches of n_bytes, softmax, top-k.

        The scores in float32 are written, read for the softmax and once more for the sums.
        """
        s = self.shape
        flops = 2.0 * n_heads * n_new * n_tokens * s.head_dim
        passes = 3 * 4.0 * n_heads * n_new * n_tokens
        # A radix top-k reads its input about four times.
        top = 4 * 4.0 * n_heads * n_tokens
        return self.device.score_s + self.device.seconds(flops, n_bytes + passes + top)

    def dequantise(self, n_rows: int, bits: int) -> float:
        """Low-bit rows of a layer to 16 bits: read once, written once."""
        elements = n_rows * self.shape.row_bytes / 2
        return self.device.seconds(elements, elements * (bits / 8 + 2))

    def place(self, n_rows: int) -> float:
        """Rows of a layer to the places of their tokens: read once, written once."""
        return self.device.seconds(0.0, 2.0 * n_rows * self.shape.row_bytes)


class Clock:
    """Waits of emulated compute. `dilation` stretches them; 0 lets them pass at once (warming).

    They spin, as CUDA's do by default, and keep a processor as busy as computing does: one that
    sleeps goes idle, and what is read and planned after the wait then comes late
    (docs/decisions/0027).
    """

    def __init__(self, dilation: float) -> None:
        self.dilation = dilation
        self.spent_s = 0.0  # since `start`
        self.stated_s = 0.0  # of these, those asked for: threads that read hold the interpreter

    def start(self) -> float:
        self.spent_s = self.stated_s = 0.0
        return time.perf_counter()

    def spend(self, seconds: float) -> None:
        """Emulated compute of so many seconds of the stated device."""
        begin = time.perf_counter()
        until = begin + seconds * self.dilation
        while (left := until - time.perf_counter()) > 0:
            if left > 50e-6:
                zlib.crc32(_SPUN)  # releases the interpreter, as computing does
        self.stated_s += seconds * self.dilation
        self.spent_s += time.perf_counter() - begin


def dilation_of(disk_gb_s: float) -> float:
    """How much longer compute takes here, so that compute is to disk what it is in the paper."""
    return PAPER_DISK_GB_S / disk_gb_s
