"""Ports that are chosen before a process listens on them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from plasmid.errors import EngineError

TRIES = 50


@contextlib.contextmanager
def reserve_ports(host: str, count: int = 1) -> Iterator[int]:
    """Reserve consecutive ports and yield the first. The kernel gives them neither to others nor to connections.

    The ports are bound but not listened to. Linux then lets sockets with SO_REUSEADDR bind them by number and listen,
    as torch's stores, asyncio, uvloop, aiohttp and routers do.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(TRIES):
        with contextlib.ExitStack() as stack:
            try:
                first = _bind(stack, family, host, 0)
                for port in range(first + 1, first + count):
                    _bind(stack, family, host, port)
            except (OSError, OverflowError):
                continue
            yield first
            return
    raise EngineError(f"no {count} consecutive free ports on {host}")


def _bind(stack: contextlib.ExitStack, family: int, host: str, port: int) -> int:
    bound = stack.enter_context(socket.socket(family))
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, port))
    return int(bound.getsockname()[1])
