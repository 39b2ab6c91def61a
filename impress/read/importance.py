"""The importance that was given with a prefix when it was stored, read from its spans' headers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from impress.errors import ImpressError
from impress.read.parts import Source
from impress.read.reading import Reading
from impress.spans.format import SpanHeader
from impress.spans.tables import read_header
from impress.tree.catalog import Held
from tiers.errors import ReadFailed
from tiers.iopool import Lane

if TYPE_CHECKING:
    import numpy.typing as npt


class NoImportance(ImpressError):
    """Rows of a prefix were given none."""


class Importance:
    """One session's importance, read when it is first asked for. Raises MediumError, which
    `retrieve` treats as a loss."""

    def __init__(
        self, reading: Reading, sources: Sequence[Source], lane: Lane, policy: str
    ) -> None:
        self._r = reading
        self._sources = sources
        self._lane = lane
        self._policy = policy
        self._found: npt.NDArray[np.float32] | None = None

    def is_whole(self) -> bool:
        """Whether every row was given importance."""
        return not np.isnan(self._all()).any()

    def of(self, layer: int) -> npt.NDArray[np.float32]:
        """[n_tokens]: that of a layer. Raises NoImportance where some rows have none."""
        scores: npt.NDArray[np.float32] = self._all()[layer]
        if np.isnan(scores).any():
            raise NoImportance(f"{self._policy}: this prefix was stored without importance")
        return scores

    def _all(self) -> npt.NDArray[np.float32]:
        """[n_layers, n_tokens], nan where none was given."""
        if self._found is None:
            parts = [self._of_span(source.held) for source in self._sources]
            self._found = np.concatenate(parts, axis=1)
        return self._found

    def _of_span(self, held: Held) -> npt.NDArray[np.float32]:
        given, window = self._header(held).importance, held.record.window
        if given is None:
            shape = (self._r.geometry.n_layers, held.count * window)
            return np.full(shape, np.nan, dtype=np.float32)
        return given[:, held.first * window : (held.first + held.count) * window]

    def _header(self, held: Held) -> SpanHeader:
        read = partial(read_header, self._r.ssd, held.record)
        try:
            return self._r.fetched(self._lane, read, "a header")
        except ReadFailed as err:
            if not err.harmless:  # too late, or without memory, it says nothing of the span
                self._r.quarantine(held.record.span_id)
            raise
