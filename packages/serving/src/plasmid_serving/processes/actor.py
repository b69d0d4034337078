"""Actor next to each server, on the same machine: starts it, hosts its control channel, stops it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Sequence

from plasmid.errors import EngineError
from plasmid.protocols import Actor

from ..api import HttpApi, ServerAddress
from ..connection import StartedServer
from ..dialect import StartOptions
from ..weights.control import ControlServer
from .machines import OtherNodes
from .server import ServerOptions, ServerProcess, address_to_listen_on, host_and_port

log = logging.getLogger(__name__)
TRIES = 5
"""Number of ports to try. Another process may take one that is reserved, if it binds it by number."""
TAKEN = "address already in use"
BIND_ERROR = r"\[errno 98\] (error while attempting to bind on address \(.*\b{port}\b.*\): )?" + TAKEN
"""Message of uvicorn and asyncio about a port, in lower case. The process may stay alive after it."""
POLL_S = 0.5
READY_S = 10.0
"""Time limit of each readiness check, in seconds."""


class ServerActor:
    """One server. If it spans machines, this actor runs on the first of them."""

    def __init__(self, options: ServerOptions, others: Sequence[Actor] = ()) -> None:
        """``others`` hold a `NodeActor` on each of the other machines."""
        self._options = options
        self._process = ServerProcess(options)
        self._others = OtherNodes(others)
        self._control = ControlServer(options.control_key)
        self._prepared: StartOptions | None = None
        """Options of a process that `prepare` has started; None otherwise."""
        self._meeting = contextlib.ExitStack()
        """Reservation of the rendezvous of several machines, until the server is ready."""

    async def prepare(self) -> None:
        """Start the server's process, which imports modules but allocates no GPU memory before `launch`."""
        self._prepared = await self._spawn()

    async def _spawn(self) -> StartOptions:
        """Start the processes on all machines. Those on the first wait for `ServerProcess.allow_loading`."""
        host = address_to_listen_on(self._options.host)
        port, name = self._process.reserve_port(host), uuid.uuid4().hex
        meeting = self._meeting.enter_context(self._others.rendezvous())
        await self._others.start(meeting)
        start = StartOptions(host=host, port=port, name=name, nodes=self._others.nodes, rendezvous=meeting)
        self._process.spawn(start)
        return start

    async def launch(self) -> StartedServer:
        """Start or restart the server, or continue after `prepare`. Raises `EngineError` with the end of its log."""
        deadline = time.monotonic() + self._options.start_s
        for _ in range(TRIES):
            with self._meeting:
                start, self._prepared = self._prepared or await self._spawn(), None
                self._process.allow_loading()
                address = ServerAddress(f"http://{host_and_port(start.host, start.port)}", start.name)
                api = address.open(self._options.secret, timeout_s=READY_S)
                try:
                    if await self._is_ready(api, start, deadline):
                        # making the schema of its API takes a server over 10 s on a busy machine
                        left_s = max(READY_S, deadline - time.monotonic())
                        info = await self._options.dialect.describe(api.with_time_limit(left_s))
                        return StartedServer(address=address, info=info, control=self._control.address)
                finally:
                    await api.close()
                log.warning("%s: another process has taken port %d; starting it again", self._options.name, start.port)
                await self._process.kill()
                await self._others.kill()
        raise EngineError(
            f"{self._options.name}: found no free port in {TRIES} attempts; {self._process.read_last_output()}"
        )

    async def _is_ready(self, api: HttpApi, start: StartOptions, deadline: float) -> bool:
        """Wait until the server is ready. Returns False if its port was taken."""
        bind_error = re.compile(BIND_ERROR.format(port=start.port))
        while True:
            if self._process.exit_code() is not None:
                if TAKEN in self._process.log().lower():
                    return False
                raise EngineError(self._process.start_error())
            if bind_error.search(self._process.log().lower()):
                return False
            if other := await self._others.start_error():
                await self._process.kill()
                raise EngineError(other)
            if time.monotonic() > deadline:
                await self._process.kill()
                raise EngineError(
                    f"{self._options.name}: not ready within placement.start_timeout_s = "
                    f"{self._options.start_s:g}; {self._process.read_last_output()}"
                )
            with contextlib.suppress(EngineError):
                # another server may have taken the port: the name tells them apart
                if await self._options.dialect.served_name(api) == start.name:
                    return True
            await asyncio.sleep(POLL_S)

    async def exit_code(self) -> int | None:
        """Return the exit code of the server, or of its part on another machine; None while all parts run."""
        code = await self._others.exit_code()  # first, because the server itself ends soon after a part of it
        return code if code is not None else self._process.exit_code()

    async def kill(self) -> None:
        """Kill the server."""
        self._prepared = None
        self._meeting.close()
        await self._process.kill()
        await self._others.kill()

    async def close(self) -> None:
        """Kill the server."""
        await self._process.kill()
        with contextlib.suppress(EngineError):  # processes on other machines end with their actors in any case
            await self._others.kill()
        self._control.close()
