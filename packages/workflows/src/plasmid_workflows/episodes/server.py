"""The process of an environment: opens it once, and forks for every episode.

A fork costs milliseconds, shares the data that the environment has loaded, and can be killed alone if a step hangs.
Messages are pickled, because both ends run the same user's code.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from plasmid.components.interaction import Environment
from plasmid.errors import one_line
from plasmid.plugins.module_file import load_file
from plasmid.protocols import RunContext
from plasmid_sandbox.confinement.linux import die_with_parent

LENGTH = 8
"""Size of the length prefix of each message, in bytes."""
METHODS = ("reset", "step", "close")


def encode(value: Any) -> bytes:
    """Encode a value as a message."""
    data = pickle.dumps(value)
    return len(data).to_bytes(LENGTH, "big") + data


def receive(channel: socket.socket) -> Any:
    """Receive the next message. Raises `EOFError` if the other end is closed."""
    return pickle.loads(_read(channel, int.from_bytes(_read(channel, LENGTH), "big")))


def _read(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = channel.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def main() -> None:
    """Serve until the other end closes its socket, whose descriptor is the argument."""
    die_with_parent()
    control, loop = socket.socket(fileno=int(sys.argv[2])), asyncio.new_event_loop()
    try:
        environment, context = _load(receive(control))
        loop.run_until_complete(environment.open(context))
        is_plain = not any(inspect.iscoroutinefunction(getattr(environment.episode(), name)) for name in METHODS)
    except Exception as error:  # noqa: BLE001  boundary: environments are users' code; the client reports the error
        control.sendall(encode(one_line(error)))
        return
    control.sendall(encode(is_plain))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            loop.run_until_complete(environment.close())
            return
        (descriptor,) = descriptors
        if os.fork() == 0:
            control.close()
            _play(socket.socket(fileno=descriptor), environment)
        os.close(descriptor)


def _load(setup: dict[str, Any]) -> tuple[Environment, RunContext]:
    for file in setup["plugins"]:
        load_file(Path(file))
    return pickle.loads(setup["environment"]), RunContext(seed=setup["seed"], run_dir=setup["run_dir"])


def _play(channel: socket.socket, environment: Environment) -> None:
    """Run one episode in the fork. Calls its methods on request, until the other end is closed."""
    try:
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        channel.sendall(encode(os.getpid()))
        episode = environment.episode()
        while True:
            method, given = receive(channel)
            channel.sendall(_call(episode, method, given))
    except (EOFError, OSError):
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # skip the server's cleanup


def _call(episode: Any, method: str, given: tuple[Any, ...]) -> bytes:
    """Return the result or the error of a method as a message."""
    try:
        return encode((True, getattr(episode, method)(*given)))
    except Exception as error:  # noqa: BLE001  boundary: as above; the result may also be unpicklable
        return encode((False, one_line(error)))
