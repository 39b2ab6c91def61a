"""How long one step of vLLM may wait for the store.

Where workers are processes, as always on a CPU, vLLM ends the engine, for all its clients, when a
step takes VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS. Each layer's read is in time by itself, and a step
may wait for as many as it has layers and hits; after a restart the same requests would do it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Final

from impress.errors import PrefixLost

#: vLLM's default for a step, in seconds.
_STEP_S: Final = 300.0


def most_s() -> float:
    """Half of what a step may take: the rest is for what it computes."""
    import vllm.envs as envs

    return getattr(envs, "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", _STEP_S) / 2


class Patience:
    """A step's waits for the store, added up. For a worker's thread."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._spent_s = 0.0

    def renew(self) -> None:
        """Another step begins."""
        self._spent_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around whatever waits. Raises PrefixLost where this step has waited long enough: vLLM
        computes what is lost in steps of its own, which are shorter."""
        if self._spent_s > self._limit_s:
            raise PrefixLost("late", f"this step has waited for the store for {self._limit_s:g} s")
        begin_s = self._clock()
        try:
            yield
        finally:
            self._spent_s += self._clock() - begin_s
