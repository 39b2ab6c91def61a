"""What a request says on its way: its first logits, what it is given, its tokens to a streamer."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import LogitsProcessor


class FirstLogits(LogitsProcessor):  # type: ignore[misc]  # the base is untyped
    """Changes nothing; notes when the first logits came, and what each pass of the model was given.

    Made when the request's turn has come. Asked before processors of the caller's.
    """

    def __init__(self, called: float) -> None:
        self.ttft_ms = 0.0  # since `called`
        self.turn_ms = 0.0  # of those, without the wait for the turn
        self._called = called
        self._made = perf_counter()
        self._given: list[torch.Tensor] = []  # the last token of each pass

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.ttft_ms:
            if scores.is_cuda:  # only launched so far; generate() waits just behind this, too
                torch.cuda.synchronize(scores.device)
            now = perf_counter()
            self.ttft_ms = (now - self._called) * 1000
            self.turn_ms = (now - self._made) * 1000
        self._given.append(input_ids[:, -1:].clone())
        return scores

    def given(self, prompt: Sequence[npt.NDArray[np.int32]], result: torch.Tensor) -> torch.Tensor:
        """The sequences of a result as the model was given them, and the last token.

        They name its rows: a processor or a criterion of the caller's may have rewritten others.
        """
        rows = torch.from_numpy(np.stack(prompt)).to(result)
        return torch.cat([rows, *self._given[1:], result[:, -1:]], dim=1)


class PromptOnce:
    """The caller's streamer, which gets the prompt once although a lost prefix runs it twice.

    A second run starts before any token is out, so all that was streamed by then is the prompt, if
    the first came so far.
    """

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._is_heard = False
        self._is_prompt = True  # what comes next

    def begin(self) -> None:
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not (self._is_prompt and self._is_heard):
            self._streamer.put(value)
        self._is_prompt, self._is_heard = False, True

    def end(self) -> None:
        self._streamer.end()
