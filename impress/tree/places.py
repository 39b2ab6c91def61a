"""Where the windows lie that spans begin after: by these, opening a store hangs its spans."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from impress.blockhash import chain
from impress.errors import FormatError
from impress.spans.format import place_of, split_index

#: A span that added less than all its windows: the node it begins after, its id, its labels.
Short = tuple[int, int, bytes]


class Places:
    """Where the windows lie that spans begin after: key -> (node, window of its span)."""

    def __init__(self, kept: Collection[bytes]) -> None:
        """From all index values: which keys are wanted, and whether any lies inside a span."""
        self.of: dict[bytes, tuple[int, int]] = {}
        self.short: list[Short] = []
        self._wanted = {before for first, _, before, _ in map(place_of, kept) if first}
        ends = {after for _, _, _, after in map(place_of, kept) if after in self._wanted}
        self._inside = len(ends) < len(self._wanted)  # else only a span's last key is needed

    def lacks(self, key: bytes) -> bool:
        """Whether a span begins after this key, and no place is noted for it."""
        return key in self._wanted and key not in self.of

    def note(self, node: int, before: bytes, labels: bytes, after: bytes, window: int) -> None:
        """Note the places of the wanted windows of a span just grafted as `node`."""
        last = len(labels) // (4 * window) - 1
        if self._inside:
            for i, key in enumerate(chain(before, labels[: last * 4 * window], window)):
                if key in self._wanted:
                    self.of.setdefault(key, (node, i))
        if after in self._wanted:
            self.of.setdefault(after, (node, last))


def split_all(
    values: Iterable[tuple[int, bytes]], window: int
) -> tuple[dict[int, bytes], list[bytes], list[int]]:
    """Index values taken apart: span -> value without labels, their labels, ids of damaged ones."""
    kept: dict[int, bytes] = {}
    labels, damaged = [], []
    for span, value in values:
        if span in kept:
            raise FormatError(
                f"index: span {span} is there twice: it is damaged; "
                "impress rebuild makes it again from the segments"
            )
        try:
            if span >> 62:
                raise FormatError(f"index: span {span} is beyond all that are given out")
            kept[span], own = split_index(value, window)
            labels.append(own)
        except FormatError:
            damaged.append(span)
    return kept, labels, damaged
