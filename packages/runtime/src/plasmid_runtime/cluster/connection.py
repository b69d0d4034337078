"""Connect the driver to Ray: start a private cluster, or join an existing one."""

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
from plasmid.errors import ClusterError, PlasmidError, one_line

from .opening import DEFAULT_TOKEN_PATH, MODE
from .watch.ray_watch import RayWatch

CONNECT_TIMEOUT_S = 10.0
CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""A request without side effects that every version of Ray supports."""
START_AT_ONCE = {"prestart_worker_first_driver": False, "worker_maximum_startup_concurrency": 16}
"""Settings of Ray: start no workers in advance, because they would lack the run's environment variables, and start
workers concurrently."""
UNUSED_DAEMONS = ("start_monitor", "start_log_monitor", "start_api_server")
"""Methods of Ray's `Node` that start the autoscaler, the reader of logs and the dashboard's server."""
START_ATTEMPTS = 2
TOO_SLOW = "node timed out during startup"
"""Part of Ray's error if its daemons have not registered within 30 s, as on a busy machine."""
log = logging.getLogger(__name__)


class _SeparateGroups:
    """A context in which each child process with a `preexec_fn`, such as Ray's daemons, gets its own process group.

    A signal to the whole group of the run, as from `timeout` or a process supervisor, would end Ray's scheduler, and
    with it all processes of the run, while the driver saves the run. Ray itself only blocks SIGINT.
    """

    def __init__(self) -> None:
        self._is_active = False
        os.register_at_fork(after_in_child=self._after_fork)

    def __enter__(self) -> None:
        self._is_active = True

    def __exit__(self, *error: object) -> None:
        self._is_active = False

    def _after_fork(self) -> None:
        if self._is_active:
            os.setpgid(0, 0)


_SEPARATE_GROUPS = _SeparateGroups()  # a function that is called after each fork cannot be unregistered


def log_ray_messages() -> None:
    """Make Ray log the messages of its daemons instead of printing them: when a scheduler dies, these are pages of its
    log."""
    worker: Any = importlib.import_module("ray._private.worker")
    worker.print_to_stdstream = lambda data, **options: log.info("Ray: %s", "\n".join(data["lines"]))


def start_ray() -> RayWatch:
    """Start a Ray cluster for this process only. Returns the watch that cleans up after it. Raises `PlasmidError`."""
    folder = _private_folder()
    log_ray_messages()
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            return _start_once(folder)
        except Exception as error:  # boundary: Ray raises errors of many types when one of its processes does not start
            if TOO_SLOW in str(error) and attempt < START_ATTEMPTS:
                log.warning("ray did not start within 30 s; starting it again (%d of %d)", attempt + 1, START_ATTEMPTS)
                continue
            raise ClusterError(
                f"ray did not start on this machine: {one_line(error)}; its logs are in "
                f"{folder / 'session_latest/logs'}; if the machine is busy, try again later, or start Ray yourself "
                "with `ray start --head` and set placement.address"
            ) from error
    raise AssertionError("the last attempt returns or raises")


def _start_once(folder: Path) -> RayWatch:
    """Start Ray. Leaves none of its processes behind if it fails."""
    watch = RayWatch(folder)
    try:
        with _keep_sigterm_handler(), _without_unused_daemons(), _SEPARATE_GROUPS:
            ray.init(
                address="local",  # otherwise Ray would join a cluster that `ray start` has started on this machine
                num_cpus=1,  # arbitrary: actors reserve no CPUs, so that all parts of a run can share few cores
                include_dashboard=False,
                object_store_memory=_object_store_bytes(),
                logging_level=logging.ERROR,
                log_to_driver=False,
                _system_config=dict(START_AT_ONCE),  # a copy, because Ray changes it
                _temp_dir=str(folder),
            )
    except Exception:
        watch.close(keep_folder=True)
        raise
    except BaseException:
        watch.close()
        raise
    return watch


def end_ray(watch: RayWatch) -> None:
    """End a Ray that `start_ray` has started."""
    try:
        ray.shutdown()
    finally:  # otherwise the watch assumes that the driver was killed
        watch.close()


def join_ray(address: str) -> None:
    log_ray_messages()
    try:
        with _keep_sigterm_handler():
            if address != "auto":
                _check_reachable(address)
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except PlasmidError:
        raise
    except Exception as error:  # boundary: as above
        raise ClusterError(
            f"cannot join the Ray cluster at {address}: {one_line(error)}; it must be running, include this machine, "
            "and have the same versions of Ray and Python"
        ) from error


def _check_reachable(address: str) -> None:
    """Raise `OSError` if nothing listens there, `PlasmidError` if only the cluster or only this process uses a token.

    If only the cluster does, Ray would retry for minutes. If only this process does, Ray would end all of its actors.
    """
    host, port = address.rsplit(":", 1)
    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    uses_token, requires_token = os.environ.get(MODE) == "token", _requires_token(address)
    if requires_token is True and not uses_token:
        raise PlasmidError(
            f"it requires a token; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, or write it to ~/{DEFAULT_TOKEN_PATH}"
        )
    if requires_token is False and uses_token:
        raise PlasmidError(
            "it runs without authentication, but this process uses a token (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or "
            f"~/{DEFAULT_TOKEN_PATH}); start it with RAY_AUTH_MODE=token, or set RAY_AUTH_MODE=disabled here"
        )


def warn_if_open() -> None:
    """Log a warning if the connected cluster accepts requests without a token."""
    address = ray.get_runtime_context().gcs_address
    requires_token = _requires_token(address)
    if requires_token is False or (requires_token is None and os.environ.get(MODE) != "token"):
        log.warning(
            "the Ray cluster at %s runs without authentication: anyone who can reach its ports can run code on all of "
            "its machines as the users that started it; keep it in a private network, or start it with "
            "RAY_AUTH_MODE=token (docs/clusters.md)",
            address,
        )


def _requires_token(address: str) -> bool | None:
    """Return True if the cluster requires a token; None if it did not answer, or the package `grpc` is missing."""
    try:
        grpc: Any = importlib.import_module("grpc")
    except ImportError:  # Ray without its extras
        return None
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(CHECK_ALIVE)(b"", timeout=CONNECT_TIMEOUT_S)
        except grpc.RpcError as error:
            return True if error.code() == grpc.StatusCode.UNAUTHENTICATED else None
    return False


def _private_folder() -> Path:
    """Return a folder for Ray's sockets and logs, inside one that only this user can access.

    Ray's own folder is writable by everyone. The path is short, because socket paths are limited to 107 bytes. Raises
    `PlasmidError`.
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
            raise PlasmidError(f"{folder}: not owned by this user; remove it, or set RAY_TMPDIR to another folder")
        folder.chmod(0o700)
    except OSError as error:
        raise PlasmidError(f"{folder}: cannot be used for Ray's files: {one_line(error)}; set RAY_TMPDIR") from error
    return folder / "ray"


@contextlib.contextmanager
def _without_unused_daemons() -> Iterator[None]:
    """Make `ray.init` start no daemons that a private cluster does not use.

    No argument prevents this. They delay the start by 3 s and need 2 s of processor time and 300 MB of memory.
    """
    node: Any = importlib.import_module("ray._private.node").Node
    before = {name: getattr(node, name) for name in UNUSED_DAEMONS if hasattr(node, name)}
    for name in before:
        setattr(node, name, lambda *args, **options: None)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(node, name, method)


@contextlib.contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Keep the SIGTERM handler, which Ray replaces by one that ends the process only when `ray.init` has finished."""
    utils: Any = importlib.import_module("ray._private.utils")
    before, set_handler = signal.getsignal(signal.SIGTERM), utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _object_store_bytes() -> int:
    """Return the size of the object store: 1/40 of the memory, between 256 MiB and 8 GiB.

    Rows of tokens are small, and weights are sent in buckets. The store never returns memory to the system.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(256 << 20, min(total // 40, 8 << 30))


def find_visible_gpus(count: int) -> tuple[str, ...]:
    """Return the physical names of the GPUs that this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(named.split(",")) if named else tuple(map(str, range(count)))
