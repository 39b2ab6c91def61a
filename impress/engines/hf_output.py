"""What a request yields on its way: its first logits, the tokens it is given, those for a streamer,
and what the guard compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from impress.engines.hf_cache import RequestCache
from impress.engines.hf_models import Prompt
from impress.engines.hf_modules import CACHE, bare, switches
from impress.errors import PrefixLost, Unsupported

#: Tokens of an answer that are compared with the exact one's.
MOST_COMPARED: Final = 64


class FirstLogits(LogitsProcessor):  # type: ignore[misc]  # the base is untyped
    """Changes nothing; notes when the first logits came, and refuses those that are not of the
    prompt, or of no prefix. `given`: notes what its passes are given.

    Made when the request's turn has come. Called before the caller's own processors.
    """

    def __init__(self, called: float) -> None:
        self.ttft_ms = 0.0  # since `called`
        self.turn_ms = 0.0  # of those, without the wait for the turn
        self._called = called
        self._made = perf_counter()
        self.given = Given(list)  # until a run begins
        self._run: tuple[torch.Tensor, RequestCache] | None = None

    def begin(self, model: Any, prompt: Prompt, cache: RequestCache) -> dict[str, Any]:
        """A run of generate() over this cache begins: its options, with these two among them."""
        self._run = prompt.input_ids, cache
        self.given = Given(switches(model, prompt.found))
        options = dict(prompt.options)
        processors = [self, *(options.pop("logits_processor", None) or [])]
        criteria = [*(options.pop("stopping_criteria", None) or []), self.given]
        options["logits_processor"] = LogitsProcessorList(processors)
        options["stopping_criteria"] = StoppingCriteriaList(criteria)
        return options

    def check_ours(self, err: PrefixLost) -> None:
        """Raises the error where it comes from the caller's processors, criteria or streamer, which
        may read another store: all of a prefix is read before the first logits."""
        if self.ttft_ms:
            raise err

    def since_turn_s(self) -> float:
        """Seconds since the request's turn came."""
        return perf_counter() - self._made

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.ttft_ms:
            if scores.is_cuda:  # only launched so far; generate() waits right after this, too
                torch.cuda.synchronize(scores.device)
            now = perf_counter()
            self.ttft_ms = (now - self._called) * 1000
            self.turn_ms = (now - self._made) * 1000
            self.given.look()
            if self._run is not None:
                self._check(input_ids, *self._run)
        return scores

    def _check(self, given: torch.Tensor, prompt: torch.Tensor, cache: RequestCache) -> None:
        if not torch.equal(given, prompt.to(given)):
            raise Unsupported("the model's generate did not continue the prompt")
        cache.check_attended()


class Given(StoppingCriteria):  # type: ignore[misc]  # the base is untyped
    """Stops nothing; notes what the next pass of the model is given, and whether the model is set
    as it was. Called last: processors, criteria and others that use `input_ids` may have rewritten
    it by then, and may do so later."""

    def __init__(self, now: Callable[[], list[Any]]) -> None:
        """`now` asks how the model is set (`switches`)."""
        self.changed = ""  # that the model was set otherwise in between; "" where it was not
        self._tokens: list[torch.Tensor] = []  # after each pass, those of the next
        self._now, self._before = now, now()

    def look(self) -> None:
        if self._now() != self._before:
            self.changed = "the model changed while it answered"

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.look()
        self._tokens.append(input_ids[:, -1:].clone())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def named(self, prompt: Sequence[npt.NDArray[np.int32]], result: torch.Tensor) -> torch.Tensor:
        """The sequences of a result as the model was given them, plus the last token: these name
        its rows."""
        rows = torch.from_numpy(np.stack(prompt)).to(result)
        n_given = result.shape[1] - rows.shape[1] - 1
        return torch.cat([rows, *self._tokens[:n_given], result[:, -1:]], dim=1)


class PromptOnce:
    """The caller's streamer, which gets the prompt once although a lost prefix runs it twice.

    A second run starts before any token is out, so what was streamed by then is the prompt, if the
    first run came that far.
    """

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._is_heard = False
        self._is_prompt = True  # what comes next

    def begin(self) -> None:
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt and not self._is_heard:
            value = value.clone()  # on a CPU it is what the model is given next
        if not (self._is_prompt and self._is_heard):
            self._streamer.put(value)
        self._is_prompt, self._is_heard = False, True

    def end(self) -> None:
        self._streamer.end()


class RawLogits:
    """The model's logits at a request's last position, pass by pass, before any processor."""

    def __init__(self) -> None:
        self.first: torch.Tensor | None = None  # float32 [vocab]
        self.tops: list[int] = []

    def note(self, cache: Any, module: Any, args: Any, output: Any) -> None:
        """Skips a pass over another cache, or none: it is not the request's. Code called on the way
        (a processor, a streamer) may run the model."""
        if getattr(output, CACHE, None) is not cache:
            return
        last = output.logits[0, -1]
        if self.first is None:
            self.first = last.float().clone()
        if len(self.tops) < MOST_COMPARED:
            self.tops.append(int(last.argmax()))


@contextmanager
def hearing(model: Any, cache: Any, raw: RawLogits | None) -> Iterator[None]:
    """Note the logits of a request's passes over its cache. `raw` None: nothing is done."""
    if raw is None:
        yield
        return
    heard, note = bare(model), partial(raw.note, cache)
    try:
        heard.register_forward_hook(note)
        yield
    finally:  # by itself: Ctrl-C may come before there is a handle, and hooks are refused
        for key in [key for key, hook in heard._forward_hooks.items() if hook is note]:
            del heard._forward_hooks[key]
