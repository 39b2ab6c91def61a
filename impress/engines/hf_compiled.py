"""The engine's code in a model that torch has compiled: it is run as it is, never traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._dynamo.exc import Unsupported as Untraceable  # `disable`, below, imports it anyway

from impress.errors import Unsupported

_F = TypeVar("_F", bound=Callable[..., Any])


def untraced(function: _F) -> _F:
    """A function that torch.compile runs as it is: traced, code that reads the rows would fail."""
    kept: _F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return kept


@contextmanager
def in_parts() -> Iterator[None]:
    """Raises impress's Unsupported, in one line, where a model was compiled to be traced whole:
    torch's own error names a function of the engine's, and tells the caller to change that."""
    try:
        yield
    except Untraceable as err:
        if "torch.compiler.disable" not in str(err):
            raise
        raise Unsupported(
            "the model was compiled with fullgraph=True, and a request's cache is not traced: "
            "compile it without fullgraph"
        ) from err
