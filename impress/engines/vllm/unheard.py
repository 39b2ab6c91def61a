"""Blocks that were to be filled, and may not have been: by a step that was cut short, and so made
no report, or by one that a request was taken out of.

vLLM counts what it has planned as done, and finds it in its own cache from then on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from impress.engines.vllm.step import StepPlan
from impress.engines.vllm.tracked import Tracked


class Unheard:
    """For the scheduler's thread."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: set[int] = set()  # loaded by the last plan, or held since one not heard of

    def expect(self, blocks: set[int]) -> None:
        """These were to be filled, but the plan that was to say so did not come about."""
        self._blocks |= blocks

    def note(self, plan: StepPlan, requests: Iterable[Any], manager: Any) -> list[str]:
        """Mark in a plan with its loads, as not filled, blocks that earlier loads were to fill, if
        no report said so and a request builds on them. Returns the ids of these requests.

        manager: vLLM's, of KV blocks.
        """
        size = self._block_size
        fills = {block for spec in plan.loads for block in spec.block_ids[spec.first // size :]}
        if plan.heard == plan.number - 1:
            self._blocks = fills
            return []
        # What was computed on those blocks too, whoever has them by now: nobody else is to find it.
        manager.evict_blocks(set(range(manager.block_pool.num_gpu_blocks)))
        found = []
        for request in requests:
            n_blocks = -(-request.num_computed_tokens // size)  # others it has not computed yet
            (ids,) = manager.get_block_ids(request.request_id)
            unfilled = self._blocks.intersection(ids[:n_blocks]) - fills
            if unfilled:
                plan.unfilled |= unfilled
                found.append(request.request_id)
        self._blocks = fills | plan.unfilled
        return found


def unpublish(tracked: Tracked, block_size: int, manager: Any) -> None:
    """Let nobody find blocks of a preempted request beyond the tokens that plans were made for.

    With priorities vLLM takes a request out of the very step that it is scheduling, when the blocks
    of that step are in its cache already: a request that came next found, stored and served what
    others had left in them.
    """
    for name in tracked.request.block_hashes[tracked.n_planned // block_size :]:
        while found := manager.block_pool.get_cached_block(name, [0]):
            manager.evict_blocks({block.block_id for block in found})
    tracked.n_planned = 0
