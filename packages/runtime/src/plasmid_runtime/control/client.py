"""Client of a run's control socket, for `rl attach`."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plasmid.errors import ConfigError

from ..checkpoint.run_folder import LOCK
from .protocol import MAX_REPLY, SOCKET, Command, connect, decode, encode

TIMEOUT_S = 10.0


def send_command(folder: Path, command: Command) -> str:
    """Send a command to a run and return its answer. Raises `ConfigError` if the run refuses or does not run here."""
    with _open(folder) as connection:
        _send(connection, command)
        answer = next(_messages(folder, connection, TIMEOUT_S), {})
    text = str(answer.get("text", "no answer"))
    if answer.get("ok") is not True:
        raise ConfigError(f"{folder}: {text}")
    return text


class Watcher:
    """Receives the events of a run, starting with its current state."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._connection: socket.socket | None = None
        self.is_stopped = False

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield names and arguments of observer hooks until ``run_ended`` or `stop`.

        Raises `ConfigError` if the run is not running here, or if the connection ends before ``run_ended``.
        """
        with _open(self._folder) as self._connection:
            _send(self._connection, "watch")
            for message in _messages(self._folder, self._connection, None):
                yield message
                if message.get("event") == "run_ended":
                    return
        if not self.is_stopped:
            raise ConfigError(f"{self._folder}: the connection was lost: the run was killed, or closed it")

    def stop(self) -> None:
        """End `messages`, from a signal handler or another thread."""
        self.is_stopped = True
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)


def _send(connection: socket.socket, command: Command) -> None:
    """Send a request. Ignores a closed connection, which the missing answer reveals."""
    with contextlib.suppress(OSError):
        connection.sendall(encode({"do": command}))


@contextlib.contextmanager
def _open(folder: Path) -> Iterator[socket.socket]:
    if not (folder / "config.json").exists() and not (folder / LOCK).exists():
        raise ConfigError(f"{folder}: not the folder of a run")
    try:
        connection = connect(folder, timeout_s=TIMEOUT_S)
    except PermissionError as error:
        raise ConfigError(f"{folder / SOCKET}: {error}; only the user who started a run can attach to it") from None
    except OSError:
        raise ConfigError(f"{folder}: no run is active here{_holder(folder)}") from None
    with connection:
        yield connection


def _holder(folder: Path) -> str:
    """Describe the last holder of the folder's lock, for runs on another machine."""
    try:
        holder = (folder / LOCK).read_bytes()[:200].decode(errors="replace")
    except OSError:
        return ""
    return f"; the last one was {holder}" if holder else ""


def _messages(folder: Path, connection: socket.socket, timeout_s: float | None) -> Iterator[dict[str, Any]]:
    """Yield messages until the other end closes. Raises `ConfigError` for invalid ones, or after ``timeout_s``."""
    connection.settimeout(timeout_s)
    with connection.makefile("rb") as lines:
        while True:
            try:
                line = lines.readline(MAX_REPLY)
                if not line:
                    return
                message = decode(line)
            except TimeoutError:
                raise ConfigError(f"{folder}: the run did not answer within {timeout_s:g} s") from None
            except OSError:  # the run closed the connection
                return
            except ValueError as error:
                raise ConfigError(f"{folder / SOCKET}: the answer is not from a run: {error}") from None
            yield message
