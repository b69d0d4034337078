"""Client side of episodes in separate processes, used by rollout workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from typing import Any

from plasmid.components.interaction import Environment
from plasmid.errors import IsolationError
from plasmid.protocols import RunContext
from plasmid.utils.waiting import wait_within
from plasmid_sandbox.pool import list_plugin_files

from .server import LENGTH, encode

BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from plasmid_workflows.episodes.server import main
main()
"""
START_S = 120.0
"""Time limit for importing and opening an environment, in seconds."""
CLOSE_S = 2.0
"""Time limit for closing it, in seconds."""


class EpisodeProcesses:
    """The process of an environment, which forks for every episode."""

    def __init__(self, environment: Environment, context: RunContext) -> None:
        self._control, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, json.dumps(sys.path), str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._setup = {
            "plugins": list_plugin_files(),
            "environment": pickle.dumps(environment),
            "seed": context.seed,
            "run_dir": context.run_dir,
        }

    async def start(self) -> bool:
        """Open the environment in its process. Returns False for async episodes, which need this process's event loop.

        Raises `IsolationError`.
        """
        channel = await _Channel.open(self._control.dup())
        try:
            answer = await wait_within(START_S, "environment: open", channel.request(self._setup))
        except (EOFError, OSError):
            raise IsolationError("the environment process ended while opening it; see the log") from None
        finally:
            channel.close()
        if isinstance(answer, str):
            raise IsolationError(f"cannot be opened in a separate process: {answer}")
        return bool(answer)

    async def episode(self) -> ForkedEpisode:
        """Start a new episode. Raises `OSError`, `EOFError` if the process has ended."""
        own, other = socket.socketpair()
        try:
            socket.send_fds(self._control, [b"e"], [other.fileno()])
        except OSError:
            own.close()
            raise
        finally:
            other.close()
        channel = await _Channel.open(own)
        return ForkedEpisode(channel, os.pidfd_open(await channel.receive()))

    def close(self) -> None:
        """Close the environment and end its process; episodes end with it."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ForkedEpisode:
    """One episode in a process. Methods raise `IsolationError` with the episode's error."""

    def __init__(self, channel: _Channel, pidfd: int) -> None:
        self._channel, self._pidfd = channel, pidfd

    @property
    def is_killed(self) -> bool:
        """Return whether `kill` was called."""
        return self._pidfd < 0

    async def call(self, method: str, *given: Any) -> Any:
        """Call a method of the episode."""
        try:
            went_well, value = await self._channel.request((method, given))
        except (EOFError, OSError):
            self.kill()
            raise IsolationError("an error: its process has ended") from None
        if not went_well:
            raise IsolationError(value)
        return value

    def kill(self) -> None:
        """Kill the process."""
        self._channel.close()
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._pidfd = -1


class _Channel:
    """Messages over a socket, on an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @staticmethod
    async def open(own: socket.socket) -> _Channel:
        return _Channel(*await asyncio.open_connection(sock=own))

    async def request(self, value: Any) -> Any:
        self._writer.write(encode(value))
        await self._writer.drain()
        return await self.receive()

    async def receive(self) -> Any:
        try:
            size = int.from_bytes(await self._reader.readexactly(LENGTH), "big")
            return pickle.loads(await self._reader.readexactly(size))
        except asyncio.IncompleteReadError:
            raise EOFError from None

    def close(self) -> None:
        self._writer.close()
