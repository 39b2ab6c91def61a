"""The oldest torch and Transformers that the engine runs on: an install without the extra `hf`, or
without dependencies, asks for none."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from packaging.version import Version

from impress.errors import Unsupported

#: As in pyproject.toml.
OLDEST: Final = {"torch": "2.11", "transformers": "5.17"}


def version_of(package: str) -> Version:
    """Of a package that is installed."""
    try:
        return Version(version(package))
    except PackageNotFoundError:  # it lies on the path, and nobody installed it
        return Version(importlib.import_module(package).__version__)


def check_versions() -> None:
    """Raises Unsupported where one is older: what it lacks, or does otherwise, would be found to be
    somebody's change."""
    for package, oldest in OLDEST.items():
        if (found := version_of(package)) < Version(oldest):
            raise Unsupported(
                f"impress.engines.hf needs {package} {oldest} or newer, {found} is installed: "
                "pip install '.[hf]' in impress's clone"
            )
