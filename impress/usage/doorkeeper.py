"""Which windows were used before: a sketch of bounded size that forgets what is old.

Most prompts of a server never return. Written only at their second use, they cost the disk nothing;
what does return is computed once more.

Two Bloom filters over window keys, a new one and the one before it. A window is noted in the new
one; when that is full it takes the old one's place. So a window is remembered while the next
CAPACITY different ones are noted, and for at most twice as many.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from impress.blockhash import KEY_BYTES

#: Different windows per filter: a million one-window prompts, or 67 M tokens in windows of 64.
CAPACITY: Final = 1 << 20
#: Bits per filter: 2 MiB, so 4 MiB in all. Sixteen a window: a full filter takes .2 % of new
#: windows for known, .5 % with the other.
BITS: Final = 1 << 24
#: A key's words, eight bytes each: uniform already, as keys are digests.
_WORDS: Final = KEY_BYTES // 8


class Doorkeeper:
    """Thread-safe; in memory only: after a restart everything is new once more."""

    def __init__(self, capacity: int = CAPACITY, bits: int = BITS) -> None:
        """`bits`: per filter, of which there are two; a power of two of at least 8."""
        assert bits >= 8 and bits & (bits - 1) == 0, "a power of two"
        self._capacity = capacity
        self._mask = np.uint64(bits - 1)
        self._lock = threading.Lock()
        self._new = np.zeros(bits // 8, dtype=np.uint8)
        self._old = np.zeros(bits // 8, dtype=np.uint8)
        self._n_new = 0

    @property
    def n_bytes(self) -> int:
        return self._new.nbytes + self._old.nbytes

    def admit(self, keys: Iterable[bytes]) -> int:
        """How many of the leading keys were noted before; notes all of them."""
        words = np.frombuffer(b"".join(keys), dtype="<u8").reshape(-1, _WORDS) & self._mask
        with self._lock:
            fresh = ~_holds(self._new, words)
            known = ~fresh | _holds(self._old, words)
            _note(self._new, words[fresh])
            self._n_new += int(fresh.sum())  # over the capacity by one prompt's at most
            if self._n_new >= self._capacity:
                self._old, self._new, self._n_new = self._new, np.zeros_like(self._new), 0
        return len(words) if known.all() else int(np.argmin(known))


def _holds(bits: npt.NDArray[np.uint8], words: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    set_ = bits[words >> np.uint64(3)] >> (words & np.uint64(7)).astype(np.uint8) & 1
    return np.asarray(set_.all(axis=1))


def _note(bits: npt.NDArray[np.uint8], words: npt.NDArray[np.uint64]) -> None:
    one = np.uint8(1) << (words & np.uint64(7)).astype(np.uint8)
    np.bitwise_or.at(bits, (words >> np.uint64(3)).ravel(), one.ravel())
