"""How long a prompt and its answer may get in a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from impress.errors import BadInput, Unsupported

#: Families with a learnt table of positions. RoPE turns keys by any number.
_LEARNED: Final = ("opt",)


def check_lengths(config: Any, n_tokens: int, n_new: int) -> None:
    """Raises BadInput for a prompt beyond the last position, Unsupported where a window slides."""
    most = _positions(config)
    if most is not None and n_tokens > most:
        raise BadInput(f"{n_tokens} tokens are more than the model's {most} positions: pass fewer")
    _check_window(config, n_tokens + n_new)


@contextmanager
def within_positions(config: Any, cache: Any) -> Iterator[None]:
    """Raises BadInput in place of torch's IndexError for an answer that outgrows the positions. Not
    earlier: whether a token ends it is known only when that is there. (On a GPU it is a CUDA
    assertion, as without a store, after which the process has to end.)"""
    try:
        yield
    except IndexError as err:
        most = _positions(config)
        if most is None or cache.get_seq_length() < most:
            raise
        raise BadInput(
            f"the answer goes beyond the model's {most} positions: pass a shorter prompt or a "
            "lower max_new_tokens"
        ) from err


def _positions(config: Any) -> int | None:
    return config.max_position_embeddings if config.model_type in _LEARNED else None


def _check_window(config: Any, n_tokens: int) -> None:
    """Refuses a sliding window that would hide the start of the prompt from its end."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    slides = window is not None if kinds is None else "sliding_attention" in kinds
    if config.model_type == "mistral":  # its mask uses the window alone, whatever its layers say
        slides = True
    if slides and window is not None and n_tokens > window:
        raise Unsupported(
            f"sliding window of {window} tokens is shorter than prompt and new tokens ({n_tokens})"
        )
