"""impress: a prefix-KV store for language models. Fast, and it never lies.

store = impress.PrefixStore.open(path, geometry, namespace=...)
with store.lease(token_ids) as lease: ...
"""

from __future__ import annotations

from typing import Any

from impress.config import Config
from impress.errors import (
    BadInput,
    ConfigError,
    FormatError,
    ImpressError,
    PrefixLost,
    StoreFailed,
    StoreLocked,
    StoreMismatch,
    Unsupported,
)
from impress.policy import Contiguous, Exact, Pages, Paper, Quality
from impress.store import PrefixStore
from impress.types import Geometry
from impress.write.draft import Stored

__version__ = "0.1.0"

__all__ = [
    "BadInput",
    "Config",
    "ConfigError",
    "Contiguous",
    "Exact",
    "FormatError",
    "Geometry",
    "ImpressError",
    "Pages",
    "Paper",
    "PrefixLost",
    "PrefixStore",
    "Quality",
    "StoreFailed",
    "StoreLocked",
    "StoreMismatch",
    "Stored",
    "Unsupported",
    "namespace_of",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the namespace needs a model's files, the engines need transformers.
    if name == "namespace_of":
        from impress.namespace import namespace_of

        return namespace_of
    raise AttributeError(f"module 'impress' has no attribute {name!r}")
