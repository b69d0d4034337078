"""The driver's connection to Ray: a cluster of its own, or one that is there."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import ray

from ...errors import PlasmidError, one_line

KNOCK_S = 10.0


def start_ray() -> None:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a private cluster on this machine's loopback
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        with _own_sigterm():
            ray.init(
                address="local",  # else Ray would join what `ray start` has started on this machine
                num_cpus=1,  # actors ask for none: on a laptop parts take turns on the cores
                include_dashboard=False,
                object_store_memory=_object_store_bytes(),
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
    except Exception as error:  # boundary: what Ray raises when a process of its own does not come up is of any kind
        raise PlasmidError(
            f"ray did not start on this machine: {one_line(error)}; its logs are in {_logs()}; if the machine is busy, "
            "try again later, or start Ray yourself with `ray start --head` and set placement.address"
        ) from error


def join_ray(address: str) -> None:
    try:
        with _own_sigterm():
            if address != "auto":
                _knock(address)
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except Exception as error:  # boundary: as above
        raise PlasmidError(
            f"the Ray cluster at {address} cannot be joined: {one_line(error)}; it must run, this machine must be "
            "part of it, and both must have the same Ray and Python"
        ) from error


def _knock(address: str) -> None:
    """Raises OSError where nobody listens: Ray itself would try for many minutes."""
    host, port = address.rsplit(":", 1)
    socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()


def _logs() -> Path:
    """Where Ray's processes log, as Ray itself finds it."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray/session_latest/logs"


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray installs a handler that leaves at once."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _object_store_bytes() -> int:
    """A fortieth of the memory, between 256 MiB and 8 GiB: rows of tokens are small, weights travel in buckets.

    The store never gives pages back that it has touched once, so a large one costs what a run could use.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(256 << 20, min(total // 40, 8 << 30))


def visible_gpus(count: int) -> tuple[str, ...]:
    """Physical names of the GPUs of this machine that this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(named.split(",")) if named else tuple(map(str, range(count)))
