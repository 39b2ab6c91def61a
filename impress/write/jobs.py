"""The committer's jobs, and the duties it has besides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from impress.spans.format import SpanHeader, SpanRecord
from impress.tree.catalog import Leave
from impress.write.draft import Draft, Stored
from tiers.base import Slot
from tiers.ticket import Signal


@dataclass(slots=True)
class StoreJob:
    """A complete draft on its way to READY; `done` gives back what its writer held."""

    draft: Draft
    stored: Stored
    name: str
    done: Callable[[], None]


@dataclass(slots=True)
class GiveUp:
    """A refused store: its space is free again when its last write has ended."""

    draft: Draft
    done: Callable[[], None]


@dataclass(slots=True)
class Erase:
    """Retired spans of which nothing may be left: out of the index, and out of its log.

    `roots`: the names of their namespaces go too. `records`: spans that the index no longer, or not
    yet, names, to be erased all the same: noted in the index, so that a crash does not prevent it.
    """

    spans: list[int]
    roots: Collection[bytes]
    records: list[SpanRecord]


@dataclass(slots=True)
class SwapJob:
    """A written copy of span `old`, its rows in another order, that is to take its place.

    `header`: the new span's, with its reserved record. `done`: called once, with what came of it.
    """

    old: int
    header: SpanHeader
    done: Callable[[Swapped], None]
    skip: int  # windows of `old` before the copy's first; they are in no node any more
    sync_failures: int  # the tier's, as of the copy's first byte


class Swapped(Enum):
    """What came of a SwapJob. Except for YES the new span's space is free again, or soon will be.

    LATE: it is not known yet, and nobody waits any more.
    """

    YES = "moved"
    GONE = "the span left the tree meanwhile"
    FAILED = "failed"
    LATE = "not committed yet"


@dataclass(slots=True, kw_only=True)
class Asked:
    """Somebody waits for it to be `ended`. `error`: why it came to nothing."""

    ended: Signal = field(default_factory=Signal)
    error: Exception | None = None


@dataclass(slots=True)
class Trial(Asked):
    """Write a page to this slot, sync it, commit: does home take writes?"""

    slot: Slot


@dataclass(slots=True)
class SaveWear(Asked):
    """Save what the write budget says of itself."""


@dataclass(slots=True)
class Intent(Asked):
    """A copy that is about to be written: note it as to be erased, until it is in the index."""

    record: SpanRecord


@dataclass(frozen=True, slots=True)
class Duties:
    """What else there is to do, and whom to tell; all called by the committer's thread.

    `reclaim`: gives back space of what a call takes out of the catalog, as nobody here holds it;
    `scrap`: that of spans that never were visible. `overfull`: where home is too full, takes spans
    out of the tree, except those just stored, and returns them. `trouble`: a write failed, and why.
    `wear`: the write budget as it is to be saved. `spoilt`: spans whose bytes are to be erased when
    they are deleted; `spoil` adds to them.
    """

    reclaim: Callable[[Leave], None]
    scrap: Callable[[list[SpanRecord]], None]
    overfull: Callable[[Sequence[SpanRecord]], list[int]]
    trouble: Callable[[str], None]
    wear: Callable[[], bytes]
    spoilt: Container[int]
    spoil: Callable[[Iterable[int]], None]


Job = StoreJob | GiveUp | Erase | Intent | SaveWear | SwapJob | Trial | list[int] | Signal


@dataclass(slots=True)
class Batch:
    """Jobs that were waiting together, by kind."""

    stores: list[StoreJob] = field(default_factory=list)
    deletes: list[int] = field(default_factory=list)
    forget: bool = False  # nothing of what was before may be left in the log
    roots: set[bytes] = field(default_factory=set)  # whose names go
    records: list[SpanRecord] = field(default_factory=list)  # that are noted as to be erased
    given_up: list[GiveUp] = field(default_factory=list)
    intents: list[Intent] = field(default_factory=list)
    swaps: list[SwapJob] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    wears: list[SaveWear] = field(default_factory=list)
    barriers: list[Signal] = field(default_factory=list)

    def add(self, job: Job) -> None:
        match job:
            case StoreJob():
                self.stores.append(job)
            case list():
                self.deletes += job
            case Erase():
                self.deletes += job.spans
                self.forget = True
                self.roots.update(job.roots)
                self.records += job.records
            case GiveUp():
                self.given_up.append(job)
            case Intent():
                self.intents.append(job)
            case SwapJob():
                self.swaps.append(job)
            case Trial():
                self.trials.append(job)
            case SaveWear():
                self.wears.append(job)
            case _:
                self.barriers.append(job)
