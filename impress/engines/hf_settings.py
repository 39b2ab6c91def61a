"""Settings of a generate() call as generate() resolves them: an argument, the given config, the
model's own."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from transformers import MaxLengthCriteria

from impress.errors import BadInput

DEFAULT_NEW_TOKENS = 32


def setting(model: Any, kwargs: Mapping[str, Any], name: str) -> Any:
    """A generation setting as generate() resolves it: argument, given config, the model's own."""
    asked = _asked(kwargs, name)
    if asked is not None or name in kwargs:  # an argument of None overrides both configs
        return asked
    return getattr(model.generation_config, name, None)


def _asked(kwargs: Mapping[str, Any], name: str) -> Any:
    """A generation setting where this very call names it; else None."""
    if name in kwargs:
        return kwargs[name]
    return getattr(kwargs.get("generation_config"), name, None)


def on_host(value: Any) -> Any:
    """A setting as numpy takes it, even from a device."""
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else value


def most_new(model: Any, n_tokens: int, max_new_tokens: int | None, kwargs: dict[str, Any]) -> int:
    """Most new tokens. Adds max_new_tokens to kwargs where the call sets no length."""
    if max_new_tokens is not None:
        kwargs["max_new_tokens"] = max_new_tokens
    new, length = (_whole(_asked(kwargs, name), name) for name in ("max_new_tokens", "max_length"))
    if new is None and length is not None:
        # In generate() the model's own max_new_tokens takes precedence over a call's max_length.
        own = _whole(setting(model, kwargs, "max_new_tokens"), "max_new_tokens")
        new = length - n_tokens if own is None else own
    elif new is None:
        new = kwargs["max_new_tokens"] = DEFAULT_NEW_TOKENS
    for criterion in kwargs.get("stopping_criteria") or ():
        if type(criterion) is MaxLengthCriteria:  # in Transformers it overrides all that
            new = max(new, criterion.max_length - n_tokens)
    if new < 1:
        raise BadInput(f"at least one new token must be asked for, got {new}")
    return new


def _whole(asked: Any, name: str) -> int | None:
    """What a setting says as an int, or None."""
    try:
        return None if asked is None else operator.index(asked)
    except TypeError:
        raise BadInput(f"{name} must be a whole number, got {asked!r}") from None
