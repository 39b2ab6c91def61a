"""What the scheduler's side tells the worker's side with each step, and what it hears back.

Plain data that survives a pipe between processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from impress.policy import Policy


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens and what else names them in the store."""

    tokens: npt.NDArray[np.int32]
    extra: dict[int, bytes]
    tenant: str

    def cut(self, end: int) -> Prompt:
        """Its first tokens, up to `end`: a whole number of blocks, since names are per block."""
        extra = {at: key for at, key in self.extra.items() if at < end}
        return Prompt(self.tokens[:end], extra, self.tenant)


class Gap(NamedTuple):
    """A window of a prompt that the worker's store has no more, by what it is found by."""

    tenant: str
    end: int  # tokens up to the window's end
    key: bytes  # of all windows up to that one


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Bring rows first..end-1 of a prompt into these blocks, before this step's layers run.

    `block_ids` are the request's, from token 0 on. `policy` None: all rows; else the layers choose.
    """

    request_id: str
    key: str  # as in SaveSpec
    prompt: Prompt  # cut to `end`
    first: int
    end: int
    block_ids: list[int]
    policy: Policy | None = None


@dataclass(frozen=True, slots=True)
class SaveSpec:
    """Rows up to `end` of a prompt are computed after this step: store them in the background.

    `key` is the request, its number and how often it was preempted: one life's blocks are not
    another's, even of a request with the same id.
    """

    request_id: str
    key: str
    prompt: Prompt  # what is to be stored in all
    end: int
    block_ids: list[int]


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]  # the base is untyped
    """One step's worth of work for the worker's side."""

    loads: list[LoadSpec] = field(default_factory=list)
    saves: list[SaveSpec] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # keys whose blocks are no longer theirs
    given_up: list[str] = field(default_factory=list)  # keys of finished requests: blocks are short
    held: list[str] = field(default_factory=list)  # finished requests whose blocks wait for saves
    ended: list[str] = field(default_factory=list)  # requests that have ended, or begin again
    sparse: list[str] = field(default_factory=list)  # keys of all whose blocks hold chosen rows
    n_tokens: int = 0  # scheduled in this step
    number: int = 0  # of this step, from 1
    heard: int = 0  # number of the last step that the scheduler's side had a report of
    unfilled: set[int] = field(default_factory=set)  # blocks of loads that no report came of


@dataclass(slots=True)
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]  # the base is untyped
    """What the worker has to tell the scheduler's side."""

    stored: dict[str, int] = field(default_factory=dict)  # request -> its tokens that are READY
    lost: list[str] = field(default_factory=list)  # requests whose load failed in this step
    gaps: list[Gap] = field(default_factory=list)  # what they lost for good
    served: dict[str, dict[str, Any]] = field(default_factory=dict)  # request -> what was read
    evicted: bool = False  # the store let go of something since the last report
    saving: bool = False  # blocks are still to be read

    def aggregate(self, other: StepReport) -> StepReport:
        """Two workers' reports as one."""
        return StepReport(
            {**self.stored, **other.stored},
            [*self.lost, *other.lost],
            [*self.gaps, *other.gaps],
            {**self.served, **other.served},
            self.evicted or other.evicted,
            self.saving or other.saving,
        )
