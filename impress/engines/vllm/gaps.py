"""Prefixes that the worker's store has given up, while the scheduler's own view still has them.

A piece that does not read back is dropped by the process that read it. Where it is another
server's, or the store is only read, no log says so: the view would promise it again each time, and
each promise would be a lost load.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from impress.blockhash import KEY_BYTES, chain, labels_of
from impress.engines.vllm.step import Gap, Prompt

#: Gaps remembered; the oldest go first.
_MOST: Final = 512
#: How long one is believed where nobody here stores it again: another server may have by then.
_BELIEVED_S: Final = 30.0


def gap_of(prompt: Prompt, n_tokens: int, window: int) -> Gap | None:
    """The first window behind n_tokens that are still there; None if the prompt has none."""
    end = n_tokens // window * window + window
    if end > len(prompt.tokens):
        return None
    return Gap(prompt.tenant, end, _keys(prompt, end, window)[-1])


def _keys(prompt: Prompt, end: int, window: int) -> list[bytes]:
    cut = prompt.cut(end)
    labels = labels_of(cut.tokens, window, cut.extra)
    return list(chain(bytes(KEY_BYTES), labels, window))


class _Known(NamedTuple):
    until_s: float
    request_id: str  # the last one that is to store it; "": none


class Gaps:
    """For vLLM's scheduler thread. Bounded, and empty unless a load was lost lately."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._known: dict[Gap, _Known] = {}

    def add(self, gap: Gap) -> None:
        """A load was lost there."""
        self._known.pop(gap, None)
        self._known[gap] = _Known(time.monotonic() + _BELIEVED_S, "")
        if len(self._known) > _MOST:
            del self._known[next(iter(self._known))]

    def cut(self, prompt: Prompt, n_tokens: int) -> int:
        """How many of the n_tokens that a view has of a prompt may be promised."""
        now = time.monotonic()
        self._known = {gap: known for gap, known in self._known.items() if known.until_s > now}
        first = next(self._in(prompt, n_tokens), None)
        return n_tokens if first is None else first.end - self._window

    def storing(self, request_id: str, prompt: Prompt) -> None:
        """A prompt is handed over to be stored."""
        for gap in self._in(prompt, len(prompt.tokens)):
            self._known[gap] = self._known[gap]._replace(request_id=request_id)

    def stored(self, request_id: str, n_tokens: int) -> None:
        """A request's first n_tokens are READY."""
        for gap, known in list(self._known.items()):
            if known.request_id == request_id and gap.end <= n_tokens:
                del self._known[gap]

    def _in(self, prompt: Prompt, n_tokens: int) -> Iterator[Gap]:
        """Gaps within the first n_tokens of a prompt, the first one first."""
        longest = max((gap.end for gap in self._known if gap.tenant == prompt.tenant), default=0)
        end = min(n_tokens, longest)
        for i, key in enumerate(_keys(prompt, end, self._window)):
            gap = Gap(prompt.tenant, (i + 1) * self._window, key)
            if gap in self._known:
                yield gap
