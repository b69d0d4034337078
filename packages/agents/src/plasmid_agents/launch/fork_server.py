"""The process that functions run in: it imports the agent once, and forks for every rollout.

A rollout costs milliseconds that way, and yet can be killed alone, leak, or crash. It communicates through
sockets: one to hand over a socket for each rollout, and on that a line of JSON in each direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import random
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from plasmid.plugins.functions import FunctionName

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the other side closes its socket. Arguments: the socket's descriptor, the function."""
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        name = FunctionName.parse(sys.argv[2])
        if name.module.endswith(".py"):  # what lies beside it can be imported, as by `python file.py`
            sys.path.insert(0, os.path.dirname(os.path.abspath(name.module)))
        function = name.load()
    except BaseException as error:  # noqa: BLE001  boundary: a module may raise anything; the other side tells the user
        control.sendall(_encode_line({"error": f"{type(error).__name__}: {error}"}))
        return
    control.sendall(_encode_line({"ready": True}))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no child is waited for: its socket tells its end
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        (descriptor,) = descriptors
        if os.fork() == 0:
            control.close()
            _run_agent(socket.socket(fileno=descriptor), function)
        os.close(descriptor)


def _run_agent(channel: socket.socket, function: Callable[..., Any]) -> None:
    """The forked process: send the process id, run the function, send the result, end."""
    code = 1
    try:
        os.setsid()  # what it starts is killed with it
        _die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        channel.sendall(_encode_line({"pid": os.getpid()}))
        with channel.makefile("r", encoding="utf-8") as lines:
            task = json.loads(lines.readline())
        os.environ.update(task["environment"])
        _limit_files(task["max_file_bytes"])
        _seed(task["arguments"]["seed"])
        channel.sendall(_encode_line(_call_function(function, task["arguments"])))
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the clean-up of the fork server is not this process's


def _limit_files(max_bytes: int) -> None:
    """No file of this process, and of those that it starts, grows beyond this size."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    allowed = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (allowed, allowed))


def _call_function(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        result = function(**accepted_arguments(function, arguments))
        if inspect.isawaitable(result):
            result = asyncio.run(_await_result(result))
        if not (result is None or isinstance(result, str | Mapping)):
            raise TypeError(f"an agent returns a text, a dict with an 'answer', or None, got {type(result).__name__}")
        value = {"answer": result} if isinstance(result, str) else dict(result or {})
        return {"result": json.loads(json.dumps(value))}
    except BaseException as error:  # noqa: BLE001  boundary: agents are users' code, and SystemExit is a failure, too
        import traceback

        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


async def _await_result(result: Any) -> Any:
    return await result


def accepted_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments that the function takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return dict(arguments)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


def _seed(seed: int) -> None:
    """Forked processes would all draw the same; rollouts repeat their own draws instead."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _encode_line(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data).encode() + b"\n"


if __name__ == "__main__":
    main()
