"""Stores for the rendezvous of a run's torch process groups.

Torch's stores have no authentication, and a `TCPStore` listens on all addresses of the machine unless it is given a
socket. On one machine, processes therefore use a store in shared memory, which only the same user can open. Across
machines, they use a `TCPStore` that listens only on the address at which the other machines reach it.
"""

from __future__ import annotations

import os
import re
import socket
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from plasmid.utils.addresses import LOOPBACK

NAME = "plasmid-rendezvous"
MEMORY = re.compile(r"/proc/\d+/fd/\d+")
TIMEOUT_S = 300.0
"""Default timeout of one store operation, the same as torch's."""


class Rendezvous:
    """A store that this process opens for other processes.

    The others pass ``url`` to `connect`: ``file:///proc/PID/fd/N`` or ``tcp://HOST:PORT``.
    """

    def __init__(self, host: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Open the store; ``host`` is the IP address at which the run reaches this process. Raises `OSError`."""
        if host == LOOPBACK:
            memory = os.memfd_create(NAME)
            self.url = f"file:///proc/{os.getpid()}/fd/{memory}"
            self.store = _file_store(memory, timeout_s)
        else:
            self.store, port = listen(host, timeout_s=timeout_s)
            self.url = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def connect(url: str, host: str, *, timeout_s: float = TIMEOUT_S) -> Any:
    """Connect to the store of another process's `Rendezvous`; ``host`` is the IP address of this process.

    Raises `ValueError` if the URL cannot be from this run, `RuntimeError` if the other process has ended.
    """
    parts = urlsplit(url)
    if host == LOOPBACK and parts.scheme == "file" and MEMORY.fullmatch(parts.path):
        return _file_store(_open_memory(parts.path), timeout_s)
    if host != LOOPBACK and parts.scheme == "tcp" and parts.hostname and parts.port:
        return dist.TCPStore(  # type: ignore[attr-defined]
            parts.hostname, parts.port, is_master=False, timeout=timedelta(seconds=timeout_s)
        )
    raise ValueError(f"{url!r} is not a rendezvous of this run")


def listen(host: str, port: int = 0, *, timeout_s: float = TIMEOUT_S) -> tuple[Any, int]:
    """Open a `TCPStore` that listens on one address only; return it and its port. Raises `OSError`."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        port = int(bound.getsockname()[1])
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=bound.fileno(),
        )
        bound.detach()  # the store closes it
    return store, port


def _open_memory(path: str) -> int:
    try:
        memory = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeError(f"rendezvous {path}: {error.strerror}") from None
    if NAME not in os.readlink(f"/proc/self/fd/{memory}"):  # the process has ended, and its id has been reused
        os.close(memory)
        raise RuntimeError(f"rendezvous {path}: its process has ended")
    return memory


def _file_store(memory: int, timeout_s: float) -> Any:
    """Open a store in shared memory. The descriptor stays open, because every store operation reopens its path."""
    store: Any = dist.FileStore(f"/proc/self/fd/{memory}", -1)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=timeout_s))
    return store
