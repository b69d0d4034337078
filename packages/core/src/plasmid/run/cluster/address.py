"""Which Ray cluster a run is to join."""

from __future__ import annotations

import os

from ...errors import ConfigError
from ...placement_config import PlacementConfig, check_address

VARIABLE = "RAY_ADDRESS"
"""Ray sets it for what it runs as a job."""


def address_of(place: PlacementConfig) -> str | None:
    """Its address; None if the run is to start a cluster of its own. Raises `ConfigError`."""
    if place.address != "auto":
        return None if place.address == "local" else place.address
    address = os.environ.get(VARIABLE, "")
    if address in ("", "local"):
        return None
    if address != "auto":  # Ray's word for the one that was started here last
        try:
            check_address(address)
        except ValueError as error:
            raise ConfigError(f"{VARIABLE}: {error}") from None
    return address
