"""Servers that span several machines: the first machine serves, and controls the processes on the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from plasmid.errors import EngineError, PlasmidError
from plasmid.protocols import Actor, Bundle, call
from plasmid.utils.addresses import find_own_address

from ..dialect import StartOptions
from .ports import reserve_ports
from .server import ServerProcess, address_to_listen_on, host_and_port

CALL_S = 30.0
RENDEZVOUS_PORTS = 7
"""Number of consecutive ports, from the rendezvous on, that a multi-machine server may open."""


class NodeActor(ServerProcess):
    """Part of a server on a machine other than its first. Exposes only its own health. Ends with the first."""

    async def start(self, nodes: int, node_rank: int, rendezvous: str) -> None:
        """Start or restart the process. Returns immediately."""
        await self.kill()
        host = address_to_listen_on(self.options.host)
        port = self.reserve_port(host)
        self.spawn(StartOptions(host=host, port=port, nodes=nodes, node_rank=node_rank, rendezvous=rendezvous))
        self.allow_loading()  # it meets the first machine's process before it measures the free GPU memory

    async def close(self) -> None:
        """Kill the process."""
        await self.kill()


class OtherNodes:
    """The `NodeActor`s of a server, held by its first machine. There may be none."""

    def __init__(self, actors: Sequence[Actor]) -> None:
        self._actors = tuple(actors)
        self.nodes = 1 + len(self._actors)

    @contextlib.contextmanager
    def rendezvous(self) -> Iterator[str]:
        """Yield the host and port at which all processes meet, reserved within the context; empty on one machine."""
        if not self._actors:
            yield ""
            return
        host = find_own_address()
        with reserve_ports(host, RENDEZVOUS_PORTS) as port:
            yield host_and_port(host, port)

    async def start(self, rendezvous: str) -> None:
        """Start a process on each machine. Raises `EngineError`."""
        ranked = enumerate(self._actors, 1)
        await self._all(call(actor, CALL_S, NodeActor.start, self.nodes, i, rendezvous) for i, actor in ranked)

    async def start_error(self) -> str:
        """Return why the first ended process ended; empty while all run."""
        return next(filter(None, await self._all(call(a, CALL_S, NodeActor.start_error) for a in self._actors)), "")

    async def exit_code(self) -> int | None:
        """Return the exit code of the first ended process; None while all run."""
        codes = await self._all(call(actor, CALL_S, NodeActor.exit_code) for actor in self._actors)
        return next((code for code in codes if code is not None), None)

    async def kill(self) -> None:
        """Kill all processes. Raises `EngineError` if a machine does not respond, after the others have ended."""
        await self._all(call(actor, CALL_S, NodeActor.kill) for actor in self._actors)

    async def _all(self, calls: Any) -> list[Any]:
        found = await asyncio.gather(*calls, return_exceptions=True)
        for result in found:
            if isinstance(result, PlasmidError):
                raise EngineError(f"server process on another machine: {result}") from None
            if isinstance(result, BaseException):
                raise result
        return found


def group_by_machine(bundles: Sequence[Bundle]) -> list[tuple[Bundle, ...]]:
    """Split the bundles of one server by machine."""
    return [tuple(own) for _, own in groupby(bundles, key=lambda bundle: bundle.node)]
