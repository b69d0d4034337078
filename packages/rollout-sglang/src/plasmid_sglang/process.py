"""One SGLang server as a child process: its port, its start with a deadline, its log, its end.

If it spans machines, this is the process on the first of them, which serves; those on the others do as it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plasmid.addresses import own_address
from plasmid.errors import EngineError
from plasmid.log_files import last_lines
from plasmid.safe_files import append_private, write_text

from .api import Api
from .control import KEY_VARIABLE
from .followers import Followers
from .launch import API_KEY_VARIABLE

TRIES = 5
"""Ports to try: somebody may take one between our look and the server's start."""
TAKEN = "address already in use"
LOOK_S = 0.5
STOP_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What one server is started with."""

    name: str
    arguments: Mapping[str, Any]
    """Fields of SGLang's ``ServerArgs``, without those that each start chooses."""
    host: str
    """Address to listen on, or ``auto``."""
    folder: Path
    """Where its arguments lie."""
    log_file: Path
    start_s: float
    """Longest time to come up."""
    env: Mapping[str, str] = field(default_factory=dict)
    api_key: str = field(repr=False)
    """Random; the server refuses requests without it."""
    control_key: bytes = field(repr=False)
    """Random; authenticates the control channel of weight syncs."""


class Server:
    """The process. `start` may be called again after `stop`."""

    def __init__(self, options: ServerOptions, followers: Followers) -> None:
        self._options, self._followers = options, followers
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    async def start(self) -> str:
        """Bring it up; returns its address. Raises `EngineError` with the last lines of its log."""
        deadline = time.monotonic() + self._options.start_s
        for _ in range(TRIES):
            host = address_to_listen_on(self._options.host)
            port, name = free_port(host), uuid.uuid4().hex
            with self._followers.meeting() as meeting:
                await self._followers.start(meeting)
                self.spawn({**meeting, "host": host, "port": port, "served_model_name": name})
                if await self._ready(f"http://{_bracketed(host)}:{port}", name, deadline):
                    return self.url
                await self._followers.kill()
        raise EngineError(f"{self._options.name}: no port of {TRIES} tried could be had; {self._last_words()}")

    def follow(self, meeting: Mapping[str, Any]) -> None:
        """Bring up the process on another machine than the first, which serves nothing but its health."""
        host = address_to_listen_on(self._options.host)
        self.spawn({**meeting, "host": host, "port": free_port(host)})

    def spawn(self, chosen: Mapping[str, Any]) -> None:
        """Begin, with arguments that are of this start alone."""
        options = self._options
        options.folder.mkdir(parents=True, exist_ok=True)
        options.log_file.parent.mkdir(parents=True, exist_ok=True)
        file = options.folder / "arguments.json"
        write_text(file, json.dumps({**options.arguments, **chosen}, indent=1))
        keys = {API_KEY_VARIABLE: options.api_key, KEY_VARIABLE: options.control_key.hex()}
        with append_private(options.log_file) as log:  # SGLang logs its arguments, and with them the key
            self._begin = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "plasmid_sglang.launch", "server", str(os.getpid()), str(file)],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **options.env, **keys},
            )

    async def _ready(self, url: str, name: str, deadline: float) -> bool:
        """True once the server that we started answers; False if its port was taken."""
        api = Api(url, self._options.api_key)
        try:
            while True:
                if self.exit_code() is not None:
                    if TAKEN in self._log().lower():
                        return False
                    raise EngineError(self.ended())
                if other := await self._followers.ended():
                    self.kill()
                    raise EngineError(other)
                if time.monotonic() > deadline:
                    self.kill()
                    raise EngineError(
                        f"{self._options.name}: not up within {self._options.start_s:g} s "
                        f"(placement.start_timeout_s); {self._last_words()}"
                    )
                with contextlib.suppress(EngineError):
                    # another server may sit on the port that ours wanted: the name tells them apart
                    if (await api.info(timeout_s=10)).get("served_model_name") == name:
                        self.url = url
                        return True
                await asyncio.sleep(LOOK_S)
        finally:
            await api.close()

    def exit_code(self) -> int | None:
        """How the process ended; None while it runs."""
        return None if self._process is None else self._process.poll()

    def ended(self) -> str:
        """How the process ended while the server was starting; empty while it runs."""
        code = self.exit_code()
        return (
            "" if code is None else f"{self._options.name}: ended with code {code} while starting; {self._last_words()}"
        )

    def _log(self) -> str:
        with self._options.log_file.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")

    def _last_words(self) -> str:
        words = last_lines(self._options.log_file).replace(self._options.api_key, "***") or "it said nothing"
        return f"its last words: {words} (its log: {self._options.log_file})"

    async def stop(self) -> None:
        """Ask the server to end, then end it and all its processes."""
        if self._process is not None and self.exit_code() is None:
            self._signal(signal.SIGTERM)
            for _ in range(round(STOP_S / 0.1)):
                if self.exit_code() is not None:
                    break
                await asyncio.sleep(0.1)
        self.kill()

    def kill(self) -> None:
        """End the server and all its processes now."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def address_to_listen_on(setting: str) -> str:
    """On this machine, out of `SGLang.host`."""
    return own_address() if setting == "auto" else setting


def free_port(host: str) -> int:
    """A port that is free now. Whoever asks has 30 s of SGLang's imports to lose it, so `Server` checks who answers."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
