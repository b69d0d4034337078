"""The driver's connection to Ray: a cluster of its own, or one that is there."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from plasmid.errors import PlasmidError, one_line

from .environment import DEFAULT_TOKEN_PATH, MODE

CONNECT_TIMEOUT_S = 10.0
CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""A request that every version of Ray answers, and that changes nothing."""
log = logging.getLogger(__name__)


def start_ray() -> None:
    folder = _private_folder()
    try:
        with _keep_sigterm_handler():
            ray.init(
                address="local",  # else Ray would join what `ray start` has started on this machine
                num_cpus=1,  # actors ask for none: on a laptop parts take turns on the cores
                include_dashboard=False,
                object_store_memory=_object_store_bytes(),
                logging_level=logging.ERROR,
                log_to_driver=False,
                _temp_dir=str(folder),
            )
    except Exception as error:  # boundary: what Ray raises when a process of its own does not come up is of any kind
        raise PlasmidError(
            f"ray did not start on this machine: {one_line(error)}; its logs are in {folder / 'session_latest/logs'}; "
            "if the machine is busy, try again later, or start Ray yourself with `ray start --head` and set "
            "placement.address"
        ) from error


def join_ray(address: str) -> None:
    try:
        with _keep_sigterm_handler():
            if address != "auto":
                _check_reachable(address)
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except PlasmidError:
        raise
    except Exception as error:  # boundary: as above
        raise PlasmidError(
            f"the Ray cluster at {address} cannot be joined: {one_line(error)}; it must run, this machine must be "
            "part of it, and both must have the same Ray and Python"
        ) from error


def _check_reachable(address: str) -> None:
    """Raises `OSError` if nothing listens there, `PlasmidError` without a token: Ray would retry for minutes."""
    host, port = address.rsplit(":", 1)
    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    if os.environ.get(MODE) != "token" and not _accepts_without_token(address):
        raise PlasmidError(
            f"it wants a token, and neither RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH nor ~/{DEFAULT_TOKEN_PATH} gives one"
        )


def warn_if_open() -> None:
    """Log a warning if the cluster that this process is connected to takes requests without a token."""
    address = ray.get_runtime_context().gcs_address
    if _accepts_without_token(address):
        log.warning(
            "the Ray cluster at %s runs without authentication: whoever reaches its ports can run code as the users "
            "that started it, with their files, on all of its machines; keep it in a network of its own, or start it "
            "with RAY_AUTH_MODE=token (docs/clusters.md)",
            address,
        )


def _accepts_without_token(address: str) -> bool:
    """True if the cluster answers a request without a token."""
    try:
        grpc: Any = importlib.import_module("grpc")
    except ImportError:  # a Ray without its extras: then only what this process itself used is known
        return os.environ.get(MODE, "") != "token"
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(CHECK_ALIVE)(b"", timeout=CONNECT_TIMEOUT_S)
        except grpc.RpcError as error:
            return bool(error.code() != grpc.StatusCode.UNAUTHENTICATED)
    return True


def _private_folder() -> Path:
    """For sockets and logs of Ray, which lets everybody write into its own: below one that only this user may enter.

    Its path is short, as the length of the path of a socket is bounded. Raises `PlasmidError`.
    """
    user = os.getuid()
    base = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")
    folder = base / f"plasmid-{user}"
    try:
        base.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != user:
            raise PlasmidError(f"{folder}: is no folder of this user; remove it, or set RAY_TMPDIR to another folder")
        folder.chmod(0o700)
    except OSError as error:
        raise PlasmidError(f"{folder}: cannot hold Ray's files: {one_line(error)}; set RAY_TMPDIR") from error
    return folder / "ray"


@contextlib.contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Restore the SIGTERM handler: Ray installs one that exits at once."""
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
