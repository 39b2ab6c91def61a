"""What follows a request, behind its back: history learns what it chose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from impress.history import Note
from impress.load import Reading
from impress.plan import Source

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Looked:
    """One layer of one request: which rows of the lease it used, int64 ascending; None: all.

    `decided`: an identifier chose them by the request's own query.
    """

    layer: int
    positions: Ids | None
    decided: bool


def learn(reading: Reading, sources: Sequence[Source], looked: Sequence[Looked]) -> None:
    """Give history one request's notes, and ask for a save when enough have come together."""
    reading.history.request(note for one in looked for note in notes_of(sources, one))
    if reading.history.due:
        reading.save_history()


def notes_of(sources: Sequence[Source], looked: Looked) -> Iterator[Note]:
    """A layer's notes, one a span. Pure."""
    for source in sources:
        record, held = source.held.record, source.held
        window = record.window
        first, count = held.first * window, held.count * window
        if looked.positions is None:
            rows = np.arange(first, first + count, dtype=np.int64)
        else:
            begin, end = np.searchsorted(
                looked.positions, (source.at * window, source.at * window + count)
            )
            rows = looked.positions[begin:end] - source.at * window + first
        yield Note(
            source.span, record.n_windows * window, looked.layer, first, count,
            rows if looked.decided else None, source.ordinals(looked.layer, rows),
        )  # fmt: skip
