"""Opens the cluster of a run. Ray reads parts of its environment as it is imported: that is set here before."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from plasmid.config.placement import PlacementConfig, check_address
from plasmid.errors import ConfigError

from .environment import joining_environment, own_environment

if TYPE_CHECKING:
    from .ray_cluster import RayCluster


VARIABLE = "RAY_ADDRESS"
"""Ray sets it for what it runs as a job."""


def cluster_address(place: PlacementConfig) -> str | None:
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


def open_cluster(*, log_dir: Path, address: str | None = None, wait_s: float = 600.0) -> RayCluster:
    """Start a Ray on this machine that only this run can use, or join the cluster at an address.

    A process that is connected to a cluster already stays with that one. Raises `PlasmidError` if Ray does not start,
    cannot be joined, or could not be given a token.
    """
    environment: contextlib.AbstractContextManager[None]
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        environment = contextlib.nullcontext()
    else:
        environment = own_environment() if address is None else joining_environment()
    with environment:
        from .ray_cluster import RayCluster  # here: Ray is to see this environment

        return RayCluster(log_dir=log_dir, address=address, wait_s=wait_s)
