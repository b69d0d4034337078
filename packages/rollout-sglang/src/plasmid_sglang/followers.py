"""The other machines of a server that spans several. Each runs SGLang as the first machine does, which alone serves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from plasmid.addresses import own_address
from plasmid.errors import EngineError, PlasmidError
from plasmid.protocols import Actor, Bundle

CALL_S = 30.0
DERIVED = 7
"""Ports from the one of the meeting point on that SGLang may open there; the others are for data-parallel attention."""
TRIES = 50


class Followers:
    """Handles of what runs on the other machines, as the first one sees them. There may be none."""

    def __init__(self, actors: Sequence[Actor]) -> None:
        self._actors = tuple(actors)

    @contextlib.contextmanager
    def meeting(self) -> Iterator[dict[str, Any]]:
        """Server arguments that all machines have in common. The ports in them are kept from others meanwhile."""
        if not self._actors:
            yield {}
            return
        host = own_address()
        with held_ports(host, DERIVED) as port:
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            yield {"nnodes": 1 + len(self._actors), "dist_init_addr": address}

    async def start(self, meeting: dict[str, Any]) -> None:
        """Start a process on each. Raises `EngineError`."""
        ranked = enumerate(self._actors, 1)
        await self._all(actor.call("start", {**meeting, "node_rank": i}, timeout_s=CALL_S) for i, actor in ranked)

    async def ended(self) -> str:
        """How the first of them has ended; empty while all run."""
        return next(filter(None, await self._all(actor.call("ended", timeout_s=CALL_S) for actor in self._actors)), "")

    async def exit_code(self) -> int | None:
        """Of the first that has ended; None while all run."""
        codes = await self._all(actor.call("exit_code", timeout_s=CALL_S) for actor in self._actors)
        return next((code for code in codes if code is not None), None)

    async def kill(self) -> None:
        """End all processes. Raises `EngineError` if a machine does not answer, when the others have ended."""
        await self._all(actor.call("kill", timeout_s=CALL_S) for actor in self._actors)

    async def _all(self, calls: Any) -> list[Any]:
        found = await asyncio.gather(*calls, return_exceptions=True)
        for result in found:
            if isinstance(result, PlasmidError):
                raise EngineError(f"another machine of the server: {result}") from None
            if isinstance(result, BaseException):
                raise result
        return found


@contextlib.contextmanager
def held_ports(host: str, count: int) -> Iterator[int]:
    """The first of so many ports in a row which nobody is given while this lasts, but whoever opens them by number can.

    They are bound, not listened to: then Linux lets another socket that reuses addresses have them, as torch's and
    SGLang's do, and gives them to none that asks for any free port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(TRIES):
        with contextlib.ExitStack() as stack:
            try:
                first = _bound(stack, family, host, 0)
                for port in range(first + 1, first + count):
                    _bound(stack, family, host, port)
            except (OSError, OverflowError):
                continue
            yield first
            return
    raise EngineError(f"no {count} free ports in a row on {host}")


def _bound(stack: contextlib.ExitStack, family: int, host: str, port: int) -> int:
    held = stack.enter_context(socket.socket(family))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, port))
    return int(held.getsockname()[1])


def by_machine(bundles: Sequence[Bundle]) -> list[tuple[Bundle, ...]]:
    """The bundles of one server, machine by machine."""
    return [tuple(own) for _, own in groupby(bundles, key=lambda bundle: bundle.node)]


def uneven(nodes: Sequence[int], pipeline: int) -> str:
    """Why a server whose ranks are on these machines cannot be; empty if it can."""
    parts = [len(list(own)) for _, own in groupby(nodes)]
    count = len(parts)
    if len(set(parts)) > 1:
        return f"{' + '.join(map(str, parts))} GPUs on {count} machines, and SGLang wants as many on each"
    if pipeline % count and count % pipeline:
        return f"{count} machines, over which server_args.pp_size = {pipeline} stages cannot be spread"
    return ""
