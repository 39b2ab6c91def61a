"""impress: a prefix-KV store for language models. Fast, and it never lies.

store = impress.PrefixStore.open(path, geometry, namespace=...)
with store.lease(token_ids) as lease: ...
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
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
    from impress.namespace import namespace_of
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

#: The module of each public name that is not an error.
_HOME: Final = {
    "Config": "config", "Contiguous": "policy", "Exact": "policy", "Geometry": "types",
    "Pages": "policy", "Paper": "policy", "PrefixStore": "store", "Quality": "policy",
    "Stored": "write.draft", "namespace_of": "namespace",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # On first use: importing the store takes a third of a second, the namespace needs a model's
    # files, and importers of a part of the package (a command, vLLM's plug-ins) may want neither.
    if name not in __all__:
        raise AttributeError(f"module 'impress' has no attribute {name!r}")
    found = getattr(import_module(f"impress.{_HOME.get(name, 'errors')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
