"""Stores by which the processes of a run find each other for torch's process groups.

Torch's stores authenticate nobody, and a `TCPStore` listens on every address of the machine unless it is given a
socket. Processes on one machine therefore meet in memory that only processes of the same user can open; those of
several machines meet at a port of the address by which the machines of the run reach each other, and of no other.
"""

from __future__ import annotations

import os
import re
import socket
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

LOOPBACK = "127.0.0.1"
"""Address of every process in a run on one machine."""
NAME = "plasmid-rendezvous"
MEMORY = re.compile(r"/proc/\d+/fd/\d+")
TIMEOUT_S = 300.0
"""Of one operation of a store, if the caller says nothing; torch's own."""


class Rendezvous:
    """A store that this process opens for others.

    ``url`` is what they pass to `connect`: ``file:///proc/PID/fd/N`` or ``tcp://HOST:PORT``.
    """

    def __init__(self, host: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """``host`` is the IP address by which the run reaches this process. Raises `OSError`."""
        if host == LOOPBACK:
            memory = os.memfd_create(NAME)
            self.url = f"file:///proc/{os.getpid()}/fd/{memory}"
            self.store = _file_store(memory, timeout_s)
        else:
            self.store, port = listen(host, timeout_s=timeout_s)
            self.url = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def connect(url: str, host: str, *, timeout_s: float = TIMEOUT_S) -> Any:
    """The store of another process's `Rendezvous`; ``host`` is the IP address of this one.

    Raises `ValueError` if the URL is none that a process of this run would name, `RuntimeError` if nobody is there.
    """
    parts = urlsplit(url)
    if host == LOOPBACK and parts.scheme == "file" and MEMORY.fullmatch(parts.path):
        return _file_store(_open_memory(parts.path), timeout_s)
    if host != LOOPBACK and parts.scheme == "tcp" and parts.hostname and parts.port:
        return dist.TCPStore(  # type: ignore[attr-defined]
            parts.hostname, parts.port, is_master=False, timeout=timedelta(seconds=timeout_s)
        )
    raise ValueError(f"{url!r} is no rendezvous of this run")


def listen(host: str, port: int = 0, *, timeout_s: float = TIMEOUT_S) -> tuple[Any, int]:
    """A `TCPStore` that listens on one address only, and its port. Raises `OSError`."""
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
    if NAME not in os.readlink(f"/proc/self/fd/{memory}"):  # the process that opened it has ended, and this is another
        os.close(memory)
        raise RuntimeError(f"rendezvous {path}: its process has ended")
    return memory


def _file_store(memory: int, timeout_s: float) -> Any:
    """A store in shared memory. The descriptor stays open: the store opens its path until after the last group ends."""
    store: Any = dist.FileStore(f"/proc/self/fd/{memory}", -1)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=timeout_s))
    return store
