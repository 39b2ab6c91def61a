"""The engine's code in a model that torch has compiled: it is run as it is, never traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def untraced(function: _F) -> _F:
    """A function that torch.compile runs as it is: traced, code that reads the rows would fail."""
    kept: _F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return kept
