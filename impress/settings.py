"""Which arguments and settings work here, for these rows; checked before open touches anything."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from impress.blockhash import namespace_digest
from impress.cache.copies import check_budgets
from impress.config import Config, tenant_secret
from impress.errors import BadInput, ConfigError, ImpressError
from impress.selection.probes import codec_of
from impress.types import Geometry
from tiers.engines import engine_named


def check_types(path: Any, geometry: Any, namespace: Any, config: Any) -> None:
    """Raises BadInput where `PrefixStore.open` was given something other than it takes."""
    if not isinstance(path, str | os.PathLike):
        raise BadInput(f"path: want a directory, str or os.PathLike, got {type(path).__name__}")
    if not str(path):  # it would mean the current directory
        raise BadInput("path: it is empty: name a directory")
    if "\0" in str(path):
        raise BadInput(f"path: no directory has a NUL in its name, got {path!r}")
    if not isinstance(geometry, Geometry):
        raise BadInput(f"geometry: want impress.Geometry, got {type(geometry).__name__}")
    namespace_digest(namespace)
    check_config(config)


def check_config(config: Any) -> None:
    """Raises BadInput where it is neither a Config nor None."""
    if config is not None and not isinstance(config, Config):
        raise BadInput(
            "config: want impress.Config (Config(dram_bytes=...), or Config.load(path) of a file), "
            f"got {type(config).__name__}"
        )


def digests_in(namespaces: Any) -> set[bytes]:
    """The digests that `purge` was given. Raises BadInput on anything else: a str would be a list
    of its characters."""
    if isinstance(namespaces, Iterable) and not isinstance(namespaces, str | bytes):
        digests = list(namespaces)
        if all(isinstance(digest, bytes) for digest in digests):
            return set(digests)
    raise BadInput(f"purge: namespaces wants digests, each bytes, got {namespaces!r}")


def check_settings(config: Config, geometry: Geometry) -> None:
    """Raises ConfigError, Unsupported (no such device) or MediumError (no such I/O engine, memory).

    Here and not in Config: probe codecs may be registered until the store is opened.
    """
    for name in config.probes:
        try:
            codec = codec_of(name)
        except ImpressError as err:
            raise ConfigError(f"config: probes: {err}") from None
        if config.window % codec.group or codec.probe_bytes(geometry) < 1:
            raise ConfigError(
                f"config: probes: {name!r} makes records of {codec.group} tokens in "
                f"{codec.probe_bytes(geometry)} bytes: the tokens must divide the window of "
                f"{config.window}, and the bytes be some"
            )
    check_budgets(config, geometry, config.window)
    tenant_secret(config)
    engine_named(config.io_engine)
