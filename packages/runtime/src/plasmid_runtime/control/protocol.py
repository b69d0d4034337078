"""Protocol between `rl attach` and a run: newline-delimited JSON over a Unix socket in the run folder.

Only the user who started the run, and root, can open the socket. Each end checks the user id of its peer.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

SOCKET = "control.sock"
Command = Literal["watch", "pause", "resume", "checkpoint", "stop"]
COMMANDS: tuple[str, ...] = get_args(Command)
MAX_REQUEST = 1024
"""Maximum size of a request, in bytes."""
MAX_REPLY = 1 << 20
"""Maximum size of a message from the run, in bytes."""


@contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """Provide a path to the socket within the limit of socket addresses, 107 bytes, for any length of the folder's."""
    handle = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{handle}/{SOCKET}"
    finally:
        os.close(handle)


def listen(folder: Path) -> socket.socket:
    """Open the socket of a run in this folder, replacing that of a killed run. Raises `OSError`."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(folder) as path:
            if os.path.lexists(path):
                if not stat.S_ISSOCK(os.lstat(path).st_mode):
                    raise FileExistsError(f"{folder / SOCKET} exists and is not a socket")
                os.unlink(path)
            server.bind(path)
            os.chmod(path, 0o600)  # no process can connect before `listen`
        server.listen(4)
        server.setblocking(False)
    except BaseException:
        server.close()
        raise
    return server


def remove(folder: Path) -> None:
    """Remove the run's socket."""
    with contextlib.suppress(OSError), short_path(folder) as path:
        os.unlink(path)


def connect(folder: Path, *, timeout_s: float) -> socket.socket:
    """Connect to the run in this folder. Raises `OSError`, or `PermissionError` if another user answers."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.settimeout(timeout_s)
        with short_path(folder) as path:
            client.connect(path)
        check_peer(client)
    except BaseException:
        client.close()
        raise
    return client


def check_peer(connection: Any) -> None:
    """Raise `PermissionError` unless the process at the other end belongs to this user or to root."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", found)
    if user not in (0, os.geteuid()):
        raise PermissionError(f"the process at the other end belongs to user {user}, not {os.geteuid()}")


def encode(message: dict[str, Any]) -> bytes:
    """Encode a message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Decode the output of `encode`. Raises `ValueError`."""
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError("too deeply nested") from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found
