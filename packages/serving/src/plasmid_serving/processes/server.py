"""Child processes for servers: ports, start, log, end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from plasmid.utils.addresses import own_address
from plasmid.utils.log_files import last_lines
from plasmid.utils.safe_files import append_private, write_text

from ..dialect import Dialect, Program, StartOptions
from ..weights.control import KEY_VARIABLE
from .launch import API_KEY_VARIABLE

STOP_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of every start of one server."""

    name: str
    dialect: Dialect
    host: str
    """Address to listen on, or ``auto``."""
    folder: Path
    """For the file of arguments."""
    log_file: Path
    start_s: float
    """Time limit of a start."""
    env: Mapping[str, str] = field(default_factory=dict)
    api_key: str = field(repr=False)
    """Random; the server refuses requests without it."""
    control_key: bytes = field(repr=False)
    """Random; authenticates the control channel of weight syncs."""


class ServerProcess:
    """The process of a server on one machine. May be started again after its end."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def spawn(self, start: StartOptions) -> None:
        """Start the process."""
        options = self.options
        keys = {API_KEY_VARIABLE: options.api_key, KEY_VARIABLE: options.control_key.hex()}
        self._log_start = options.log_file.stat().st_size if options.log_file.exists() else 0
        self._process = spawn(
            options.dialect.launch(start),
            options.folder / "arguments.json",
            options.log_file,
            env={**options.dialect.environment, **options.env, **keys},
        )

    def exit_code(self) -> int | None:
        """Exit code of the process; None while it runs."""
        return None if self._process is None else self._process.poll()

    def start_error(self) -> str:
        """Why the process ended during its start; empty while it runs."""
        code = self.exit_code()
        name = self.options.name
        return "" if code is None else f"{name}: ended with code {code} while starting; {self.last_output()}"

    def log(self) -> str:
        """Output since the last start."""
        with self.options.log_file.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def last_output(self) -> str:
        """Last lines of the log, for messages, without the API key."""
        options = self.options
        words = last_lines(options.log_file).replace(options.api_key, "***") or "it said nothing"
        return f"its last words: {words} (its log: {options.log_file})"

    async def stop(self) -> None:
        """Ask the process to end, then kill it with all its children."""
        if self._process is not None and self.exit_code() is None:
            self._signal(signal.SIGTERM)
            for _ in range(round(STOP_S / 0.1)):
                if self.exit_code() is not None:
                    break
                await asyncio.sleep(0.1)
        await self.kill()

    async def kill(self) -> None:
        """Kill the process and all its children."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            await asyncio.to_thread(self._process.wait)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def spawn(program: Program, file: Path, log_file: Path, *, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a program that ends with this process. Its arguments go through ``file``, its output to ``log_file``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(program.arguments, indent=1))
    with append_private(log_file) as log:  # servers log their arguments, and with them the key
        return subprocess.Popen(
            [sys.executable, "-m", "plasmid_serving.processes.launch", program.function, str(os.getpid()), str(file)],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **env},
        )


def address_to_listen_on(setting: str) -> str:
    """Return this machine's address for a setting ``host``."""
    return own_address() if setting == "auto" else setting


def free_port(host: str) -> int:
    """Return a port that is free now. It may be taken before a server has started, so the caller checks who answers."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def host_and_port(host: str, port: int) -> str:
    """Return both as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
