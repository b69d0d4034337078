"""Child processes of servers: ports, start, log and end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from plasmid.utils.addresses import find_own_address
from plasmid.utils.log_files import read_exit_cause
from plasmid.utils.safe_files import append_private, write_text

from ..api import start_key
from ..dialect import Dialect, Program, StartOptions
from ..weights.control import KEY_VARIABLE
from .launch import API_KEY_VARIABLE
from .ports import reserve_ports

LISTENING = "0A"
"""State of a socket in the kernel's tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options that stay the same for every start of one server."""

    name: str
    dialect: Dialect
    host: str
    """Address to listen on, or ``auto``."""
    folder: Path
    """Folder for the arguments file."""
    log_file: Path
    start_s: float
    """Time limit of a start, in seconds."""
    env: Mapping[str, str] = field(default_factory=dict)
    secret: str = field(repr=False)
    """Random secret from which each start gets the API key that requests must carry (`start_key`)."""
    control_key: bytes = field(repr=False)
    """Random key that authenticates the control channel of weight syncs."""


class ServerProcess:
    """The process of a server on one machine. Can be restarted after it ended."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._key = ""
        self._ports = contextlib.ExitStack()

    def reserve_port(self, host: str) -> int:
        """Reserve a port for the next start, until the process is killed.

        A server listens only after it has imported modules and loaded the model, which may take minutes.
        """
        self._ports.close()
        return self._ports.enter_context(reserve_ports(host))

    def spawn(self, start: StartOptions) -> None:
        """Start the process, which loads no model before `allow_loading`."""
        options = self.options
        self._key = start_key(options.secret, start.name)
        keys = {API_KEY_VARIABLE: self._key, KEY_VARIABLE: options.control_key.hex()}
        self._log_start = options.log_file.stat().st_size if options.log_file.exists() else 0
        self._process = spawn(
            options.dialect.launch(start),
            options.folder / "arguments.json",
            options.log_file,
            env={**options.dialect.environment, **options.env, **keys},
            stdin=subprocess.PIPE,
        )

    def allow_loading(self) -> None:
        """Let the process load its model. Ends `launch.wait_until_allowed` there."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def exit_code(self) -> int | None:
        """Return the exit code of the process; None while it runs."""
        return None if self._process is None else self._process.poll()

    def start_error(self) -> str:
        """Return why the process ended during its start; empty while it runs."""
        code = self.exit_code()
        name = self.options.name
        return "" if code is None else f"{name}: exited with code {code} while starting; {self.read_last_output()}"

    def log(self) -> str:
        """Return the output since the last start."""
        with self.options.log_file.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def read_last_output(self) -> str:
        """Return the last lines of the log, for messages, without the API key."""
        options = self.options
        lines = read_exit_cause(options.log_file).replace(self._key, "***") or "none"
        return f"last output: {lines} (log: {options.log_file})"

    async def kill(self) -> None:
        """Kill the process and all its children.

        They lose nothing that a run needs, and would end seconds after SIGTERM: some servers look for the signal every
        5 s, or take the end of their children for a crash and write diagnostics.
        """
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self.allow_loading()  # closes the pipe
            await asyncio.to_thread(self._process.wait)
        self._ports.close()


def spawn(
    program: Program, file: Path, log_file: Path, *, env: Mapping[str, str], stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a program that ends with this process. Arguments go through ``file``, output to ``log_file``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(program.arguments, indent=1))
    with append_private(log_file) as log:  # private, because servers log their arguments, including the key
        return subprocess.Popen(
            [
                program.python or sys.executable,
                "-m",
                "plasmid_serving.processes.launch",
                program.function,
                str(os.getpid()),
                str(file),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=stdin,
            start_new_session=True,
            env={**os.environ, **env},
        )


def address_to_listen_on(setting: str) -> str:
    """Return this machine's address for a setting ``host``."""
    return find_own_address() if setting == "auto" else setting


def listens_as_this_user(host: str, port: int) -> bool:
    """Return True if only processes of this user listen on the port of this machine, and at least one. Linux only."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    places = {_format_address(family, address, port) for address in (host, "::" if ":" in host else "0.0.0.0")}
    lines = Path("/proc/net/tcp6" if ":" in host else "/proc/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    return {row[7] for row in rows if row[3] == LISTENING and row[1] in places} == {str(os.getuid())}


def _format_address(family: int, address: str, port: int) -> str:
    """Format an address as in ``/proc/net/tcp``: 32-bit words in the machine's byte order, and the port, in hex."""
    packed = socket.inet_pton(family, address)
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed)) + f":{port:04X}"


def host_and_port(host: str, port: int) -> str:
    """Join host and port as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
