"""What steps without a report were to load: a step that was cut short may have loaded none of it.

vLLM counts what it has planned as done, and finds it in its own cache from then on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from impress.engines.vllm.step import StepPlan


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
