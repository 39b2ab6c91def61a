"""How much of a prompt the store admits: no part of a request is a second use of another part.

A request comes to be stored again with its answer, or after it was preempted, and with each of its
answers if it has several. Windows that it noted itself do not count as used before.
"""

from __future__ import annotations

from collections.abc import Callable

from impress.engines.vllm.step import Prompt
from impress.store import PrefixStore

#: How many requests have their first notes remembered.
_MOST_NOTED = 4096


class Uses:
    """For one thread."""

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        self._noted: dict[str, set[tuple[int, int]]] = {}  # request -> its first new windows

    def admitted(self, request: str, prompt: Prompt, under_way: Callable[[], set[str]]) -> int:
        """Tokens to store according to Config.admit; this use of each window is noted.

        `under_way`: requests that may bring more, and are therefore not forgotten.
        """
        tokens, window = prompt.tokens, self._store.window
        if self._store.config.admit == "first":
            return len(tokens)
        found = self._store.admitted(tokens, prompt.extra, prompt.tenant)
        noted = self._noted.setdefault(request, set())
        # A mark is where new windows begin, and the prompt up to the end of the first.
        marks = {at: hash(tokens[: at + window].tobytes()) for at in {found, *dict(noted)}}
        admitted = min([found, *(at for at, _ in marks.items() & noted)])
        noted.add((admitted, marks[admitted]))
        if len(self._noted) > _MOST_NOTED:
            kept = under_way()
            over = [name for name in self._noted if name not in kept]
            for name in over[: len(self._noted) - _MOST_NOTED]:
                del self._noted[name]
        return admitted
