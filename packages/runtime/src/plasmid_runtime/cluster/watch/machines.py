"""Detect the loss of a machine that a run uses in a joined cluster, or of the cluster's control process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

POLL_S = 0.5
CONNECT_S = 5.0
MAX_MISSES = 3
"""Maximum number of consecutive connection attempts without a response. If the machine refuses a connection, the
process has ended, and there is no further attempt."""
HINT = "it was switched off, cut off from the network, or Ray ended there; continue with --resume"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A port on which a daemon of Ray listens."""

    what: str
    host: str
    port: int

    async def connect(self) -> None:
        """Open and close a connection. Raises `OSError` and `TimeoutError`."""
        _, writer = await asyncio.wait_for(asyncio.open_connection(self.host, self.port), CONNECT_S)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async def failure(self) -> str:
        """Wait until nothing listens on the port, and return a description of the loss."""
        misses = 0
        while misses < MAX_MISSES:
            await asyncio.sleep(POLL_S)
            try:
                await self.connect()
                misses = 0
            except ConnectionRefusedError:
                break
            except (OSError, TimeoutError):
                misses += 1
        return self.loss

    @property
    def loss(self) -> str:
        """Description of the loss, for the error that ends the run."""
        return f"the run has ended because {self.what} was lost; {HINT}"


class Machines:
    """Monitors the machines of one run. Ray itself takes half a minute to detect the loss of a machine."""

    def __init__(self, control: str) -> None:
        """Watch the control process at an address."""
        host, port = control.rsplit(":", 1)
        self._control = Endpoint("the cluster's control process (gcs_server)", host.strip("[]"), int(port))
        self._machines: list[Endpoint] = []
        self._are_known = asyncio.Event()

    def add(self, ports: Mapping[str, int]) -> None:
        """Also watch the raylets on these ports of machines, by their addresses."""
        self._machines = [Endpoint(f"its machine {address}", address, port) for address, port in ports.items()]
        self._are_known.set()

    def control_loss(self) -> str:
        """Describe the loss of the control process; empty while it accepts connections."""
        try:
            socket.create_connection((self._control.host, self._control.port), CONNECT_S).close()
        except OSError:
            return self._control.loss
        return ""

    async def failure(self) -> str:
        """Wait until the control process or a machine is lost, and return a description of the loss."""
        return await _first(self._control.failure(), self._failure_of_machine())

    async def _failure_of_machine(self) -> str:
        await self._are_known.wait()
        return await _first(*(one.failure() for one in self._machines))


async def _first(*failures: Coroutine[Any, Any, str]) -> str:
    tasks = [asyncio.create_task(one) for one in failures]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
