"""Open the cluster of a run. Sets the environment before importing Ray, which reads parts of it on import."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plasmid.config.placement import PlacementConfig, check_address
from plasmid.errors import ConfigError, PlasmidError

if TYPE_CHECKING:
    from .ray_cluster import RayCluster
    from .watch.ray_watch import RayWatch


MODE = "RAY_AUTH_MODE"
TOKEN = "RAY_AUTH_TOKEN"
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
DEFAULT_TOKEN_PATH = ".ray/auth_token"
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Makes Ray use the loopback address as the machine's address, and listen only there."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@contextlib.contextmanager
def set_private_environment() -> Iterator[None]:
    """Set a new token and the loopback address for a private Ray cluster, whose processes inherit them.

    Overrides an inherited mode or token. Raises `PlasmidError` if Ray has already read its environment.
    """
    token = _get_token()
    with _environment({**_defaults(), **LOOPBACK_ONLY, MODE: "token", TOKEN: token}):
        if "ray" in sys.modules:
            _read_again()
            if not _enforces(token):
                raise PlasmidError(
                    "ray was imported before the run could set an authentication token, without which others on this "
                    "machine could run code in the run; start the run in a separate process, with `rl train`"
                )
        yield


@contextlib.contextmanager
def set_joining_environment() -> Iterator[None]:
    """Use an available token to join an existing cluster, unless `RAY_AUTH_MODE` disables it."""
    mode = {MODE: "token"} if not os.environ.get(MODE) and _has_token() else {}
    with _environment({**_defaults(), **mode}):
        if "ray" in sys.modules:
            _read_again()
        yield


def forget_token() -> None:
    """Remove the token from the environment of this process, so that its subprocesses do not inherit it.

    Call it after Ray has read the token.
    """
    os.environ.pop(TOKEN, None)


@cache
def _get_token() -> str:
    """Return the token of this process, always the same one, because Ray's libraries cache the first."""
    return secrets.token_hex(32)


def _defaults() -> dict[str, str]:
    return {name: value for name, value in QUIET.items() if name not in os.environ}


def _has_token() -> bool:
    named = os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH)
    return bool(named) or (Path.home() / DEFAULT_TOKEN_PATH).is_file()


def _read_again() -> None:
    """Make an imported Ray read the environment again, as `ray.init` does."""
    raylet: Any = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def _enforces(token: str) -> bool:
    raylet: Any = importlib.import_module("ray._raylet")
    if raylet.get_authentication_mode() != raylet.AuthenticationMode.TOKEN:
        return False
    return bool(raylet.AuthenticationTokenLoader.instance().get_raw_token() == token)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


VARIABLE = "RAY_ADDRESS"
"""Environment variable with the cluster's address, which Ray sets for jobs."""


def cluster_address(place: PlacementConfig) -> str | None:
    """Return the cluster's address; None if the run starts its own cluster. Raises `ConfigError`."""
    if place.address != "auto":
        return None if place.address == "local" else place.address
    address = os.environ.get(VARIABLE, "")
    if address in ("", "local"):
        return None
    if address != "auto":  # for Ray, "auto" is the cluster that was started on this machine last
        try:
            check_address(address)
        except ValueError as error:
            raise ConfigError(f"{VARIABLE}: {error}") from None
    return address


class EarlyRay:
    """Starts a private Ray instance before `open_cluster` needs it.

    Leaving the context ends the instance, unless a cluster has taken it over.
    """

    def __init__(self, place: PlacementConfig) -> None:
        self._place = place
        self._watch: RayWatch | None = None
        self._error: PlasmidError | None = None

    def start(self) -> None:
        """Start Ray, unless the run joins a cluster, this process is connected already, or it was called before.

        If Ray does not start, `take` raises the error: other errors of the recipe come first.
        """
        if self._watch or self._error or cluster_address(self._place) is not None or _is_connected():
            return
        try:
            with set_private_environment():
                from .connection import start_ray

                self._watch = start_ray()
        except PlasmidError as error:
            self._error = error

    def take(self) -> RayWatch | None:
        """Return the watch of the started Ray, whose caller now ends it; None if it was not started."""
        watch, error = self._watch, self._error
        self._watch = self._error = None
        if error is not None:
            raise error
        return watch

    def __enter__(self) -> EarlyRay:
        return self

    def __exit__(self, *error: object) -> None:
        if self._watch is not None:
            from .connection import end_ray

            end_ray(self._watch)
            self._watch = None


def _is_connected() -> bool:
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def open_cluster(
    *, log_dir: Path, address: str | None = None, wait_s: float = 600.0, started: RayWatch | None = None
) -> RayCluster:
    """Start a private Ray cluster on this machine, or join the cluster at an address.

    A process that is already connected to a cluster keeps using it; the cluster owns a Ray that `EarlyRay` has
    ``started``, and ends it. Raises `PlasmidError` if Ray does not start, cannot be joined, or has read its environment
    before the token was set.
    """
    environment: contextlib.AbstractContextManager[None]
    if _is_connected():
        environment = contextlib.nullcontext()
    else:
        environment = set_private_environment() if address is None else set_joining_environment()
    with environment:
        from .ray_cluster import RayCluster

        return RayCluster(log_dir=log_dir, address=address, wait_s=wait_s, started=started)
