"""Which settings go with these rows and here: asked before an open touches its directory."""

from __future__ import annotations

from impress.cache.copies import check_budgets
from impress.config import Config, tenant_secret
from impress.errors import ConfigError, ImpressError
from impress.selection.probes import codec_of
from impress.types import Geometry
from tiers.engines import engine_named


def check_settings(config: Config, geometry: Geometry) -> None:
    """Raises ConfigError, Unsupported (no such device) or MediumError (no such I/O engine, memory).

    Here and not in Config: probe codecs may be registered until the store is opened.
    """
    for name in config.probes:
        try:
            codec_of(name)
        except ImpressError as err:
            raise ConfigError(f"config: probes: {err}") from None
    check_budgets(config, geometry, config.window)
    tenant_secret(config)
    engine_named(config.io_engine)
