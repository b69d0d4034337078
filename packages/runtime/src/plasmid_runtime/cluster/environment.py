"""Environment variables under which Ray is imported, started and joined: its authentication and its addresses."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from plasmid.errors import PlasmidError

MODE = "RAY_AUTH_MODE"
TOKEN = "RAY_AUTH_TOKEN"
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
DEFAULT_TOKEN_PATH = ".ray/auth_token"
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray then takes the loopback for the address of the machine, on Linux as well, and listens nowhere else."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@contextlib.contextmanager
def own_environment() -> Iterator[None]:
    """For a Ray of the run's own: a token that nobody else has, and the loopback. The processes of Ray inherit it.

    An inherited mode or token is overridden. Raises `PlasmidError` if Ray has read its environment before and keeps it.
    """
    token = _own_token()
    with _environment({**_defaults(), **LOOPBACK_ONLY, MODE: "token", TOKEN: token}):
        if "ray" in sys.modules:
            _read_again()
            if not _enforces(token):
                raise PlasmidError(
                    "ray was imported before the run could set a token for it, so that anybody who reaches this "
                    "machine could run code in it; start the run in a process of its own, with `rl train`"
                )
        yield


@contextlib.contextmanager
def joining_environment() -> Iterator[None]:
    """For a cluster of others: with the token that is there, unless `RAY_AUTH_MODE` says otherwise."""
    mode = {MODE: "token"} if not os.environ.get(MODE) and _has_token() else {}
    with _environment({**_defaults(), **mode}):
        if "ray" in sys.modules:
            _read_again()
        yield


def forget_token() -> None:
    """Remove the token from the environment of this process, so that programs that it starts do not inherit it.

    Ray has read it before: a worker cannot be reached without.
    """
    os.environ.pop(TOKEN, None)


@cache
def _own_token() -> str:
    """One for each process: Ray's libraries keep the first one that they read."""
    return secrets.token_hex(32)


def _defaults() -> dict[str, str]:
    return {name: value for name, value in QUIET.items() if name not in os.environ}


def _has_token() -> bool:
    named = os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH)
    return bool(named) or (Path.home() / DEFAULT_TOKEN_PATH).is_file()


def _read_again() -> None:
    """Let a Ray that is imported already read the environment again, as `ray.init` does."""
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
