"""Prefixes on disk, made once and read by every system: one directory per kind of data.

    plain     rows in position order                          (AS, H2O, IMPRESS without reordering)
    packed    rows by how often the paper's identifier chose them in earlier requests
    sketched  the same for the quality selector, with its int4 sketch
    paged     rows in position order, with the least and most of each page's keys
    int8, int4  everything, quantised

A system opens a directory read-only, with caches of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from experiments.common import Unable, check_room
from experiments.systems.generate import Knobs, Prefix
from experiments.systems.planned import Choices, choose
from experiments.systems.quantised import QuantisedStore
from experiments.systems.shapes import WINDOW, Shape
from impress.config import Config
from impress.policy import Paper, Policy, Quality
from impress.read.parts import Source
from impress.store import PrefixStore
from impress.types import Geometry
from impress.write.writer import Writer

NAMESPACE: Final = "experiments"
#: Requests that a row order is learnt from; their numbers are never asked again.
N_EARLIER: Final = 8
EARLIER: Final = 1_000_000
_SEGMENT: Final = 128 << 20
#: Kind -> the probe record it carries. (`ordered_by`: who chose the rows it is ordered by.)
_PROBES: Final = {
    "plain": "heads3-v1", "packed": "heads3-v1", "sketched": "int4-v2", "paged": "pages16-v1",
}  # fmt: skip
#: Kinds of which all rows have to be put in the order of their tokens.
PACKED: Final = frozenset({"packed", "sketched"})
_BITS: Final = {"int8": 8, "int4": 4}
#: Bytes on disk per byte of full keys and values; all other kinds take at most 1.15, with records.
_SHARE: Final = {"int8": 0.6, "int4": 0.35}


def ordered_by(kind: str, keep: float) -> Policy | None:
    """Whose choices the rows of a kind are ordered by."""
    known: dict[str, Policy] = {"packed": Paper(keep, gate=False), "sketched": Quality()}
    return known.get(kind)


@dataclass(slots=True)
class Data:
    """Prefixes of a slice of a shape. `kinds` are those on disk."""

    shape: Shape
    n_layers: int
    folder: Path
    prefixes: list[Prefix]
    knobs: Knobs
    keep: float = 0.25
    kinds: set[str] = field(default_factory=set)
    sources: dict[str, dict[int, Source]] = field(default_factory=dict)  # of quantised kinds
    choices: Choices = field(default_factory=dict)  # made so far

    @classmethod
    def of(
        cls, shape: Shape, n_layers: int, n_prefixes: int, folder: Path, knobs: Knobs, seed: int,
        tokens: tuple[int, int] = (4800, 5700),
    ) -> Data:  # fmt: skip
        """Plan prefixes of whole windows in this range of tokens; nothing is written."""
        rng = np.random.default_rng([seed, 9])
        sizes = rng.integers(tokens[0] // WINDOW, tokens[1] // WINDOW + 1, n_prefixes) * WINDOW
        prefixes = [
            Prefix(shape, int(n), seed * 1000 + i, knobs.smooth) for i, n in enumerate(sizes)
        ]
        return cls(shape, n_layers, folder, prefixes, knobs)

    @property
    def geometry(self) -> Geometry:
        return self.shape.geometry(self.n_layers)

    @property
    def n_bytes(self) -> int:
        """Bytes of full keys and values."""
        return sum(p.n_tokens for p in self.prefixes) * self.n_layers * self.shape.row_bytes

    def prepare(
        self, kinds: Iterable[str], policies: Sequence[Policy], asked: Iterable[tuple[int, int]],
        knobs: Knobs,
    ) -> Choices:  # fmt: skip
        """Write the kinds that are not there yet. Returns what policies choose for these requests
        (prefix, request), and chose for earlier ones.

        Prefix by prefix, so that each layer's keys are made once.
        """
        todo = [kind for kind in sorted(set(kinds)) if kind and kind not in self.kinds]
        self._check_room(todo)
        requests: dict[int, set[int]] = {}
        for number, request in asked:
            requests.setdefault(number, set()).add(request)
        with ExitStack() as exits:
            stores: dict[str, PrefixStore | QuantisedStore] = {}
            for kind in todo:
                stores[kind] = self._writable(kind)
                exits.callback(stores[kind].close)
            for number, prefix in enumerate(self.prefixes):
                for kind, store in stores.items():
                    self._put(kind, store, number, prefix)
                mine = [
                    request for request in sorted(requests.get(number, ()))
                    if any((policy, number, request) not in self.choices for policy in policies)
                ]  # fmt: skip
                if mine:
                    self.choices |= choose(
                        number, prefix, policies, mine, self.geometry, knobs, WINDOW
                    )
                prefix.forget()
            for kind, store in stores.items():
                if isinstance(store, QuantisedStore):
                    self.sources[kind] = store.sources
                else:
                    store.flush()
        self.kinds |= set(todo)
        return self.choices

    def _check_room(self, kinds: Sequence[str]) -> None:
        """Raises Unable where the disk has no room for these kinds."""
        need = sum(int(self.n_bytes * _SHARE.get(kind, 1.15)) + _SEGMENT for kind in kinds)
        check_room(self.folder.parent, need)

    def _writable(self, kind: str) -> PrefixStore | QuantisedStore:
        if kind in _BITS:
            config = Config(window=WINDOW, dram_bytes=0, segment_bytes=_SEGMENT)
            return QuantisedStore(self.folder / kind, self.geometry, _BITS[kind], config)
        config = Config(
            window=WINDOW, dram_bytes=0, probes=(_PROBES[kind],), durable=False,
            segment_bytes=_SEGMENT, write_buffer_bytes=32 << 20,
        )  # fmt: skip
        return PrefixStore.open(self.folder / kind, self.geometry, NAMESPACE, config)

    def _put(
        self, kind: str, store: PrefixStore | QuantisedStore, number: int, prefix: Prefix
    ) -> None:
        if isinstance(store, QuantisedStore):
            store.begin(number, prefix.n_tokens)
            for layer in range(self.n_layers):
                store.put(number, layer, prefix.keys(layer), prefix.values(layer))
            return
        policy = ordered_by(kind, self.keep)
        worth = None
        if policy is not None:
            worth = average(prefix, policy, number, self.geometry, self.knobs)
        with store.writer(prefix.tokens, wait_s=60) as writer:
            for layer in range(self.n_layers):
                scores = None if worth is None else worth[layer]
                writer.put(layer, 0, prefix.keys(layer), prefix.values(layer), scores)
        stored(writer)

    def open(self, kind: str, config: Config) -> PrefixStore | QuantisedStore:
        """The data of a kind, with caches of its own."""
        if kind in _BITS:
            return QuantisedStore(
                self.folder / kind, self.geometry, _BITS[kind], config, self.sources[kind]
            )
        return PrefixStore.open(self.folder / kind, self.geometry, NAMESPACE, config, mode="r")

    def probes(self, kind: str, policy: Policy | None) -> tuple[str, ...]:
        """Records that a system keeps copies of: those its policy reads."""
        probe = _PROBES.get(kind)
        return (probe,) if policy is not None and probe and policy.probe == probe else ()

    def segments(self) -> list[Path]:
        """Files that keys and values lie in."""
        return list(self.folder.rglob("*.seg"))

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.kinds.clear()


def stored(writer: Writer) -> None:
    """Return when what it wrote is durable. Raises Unable where it was refused, or is late."""
    if not writer.stored.wait(120):
        raise Unable(f"the data was not stored: {writer.stored.refused or 'no commit in 120 s'}")


def average(
    prefix: Prefix, policy: Policy, number: int, geometry: Geometry, knobs: Knobs,
    n_requests: int = N_EARLIER,
) -> npt.NDArray[np.float32]:  # fmt: skip
    """How often each row was chosen in earlier requests: [n_layers, n_tokens]."""
    requests = range(EARLIER, EARLIER + n_requests)
    found = choose(number, prefix, [policy], requests, geometry, knobs, WINDOW)
    worth = np.zeros((geometry.n_layers, prefix.n_tokens), dtype=np.float32)
    for selections in found.values():
        for layer, selection in enumerate(selections):
            if selection.positions is not None:
                worth[layer, selection.positions] += 1 / n_requests
    return worth
