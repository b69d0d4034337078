"""The process that runs functions: it imports the agent once, and forks for every rollout.

A rollout then costs milliseconds, can be killed alone, and may leak or crash. Communication uses sockets: one passes a
socket for each rollout, which carries one line of JSON in each direction.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from plasmid.plugins.functions import FunctionName, call
from plasmid_sandbox.confinement.supervisor import confine, supervise

IMPORTED_ON_USE = {"openai": ("openai.resources.chat",), "anthropic": ("anthropic.resources.messages",)}
"""Modules by package that its clients import when they are first used, which takes 0.1 s."""


def main() -> None:
    """Serve until the other side closes its socket. Arguments: the socket's descriptor, the function."""
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        name = FunctionName.parse(sys.argv[2])
        if name.module.endswith(".py"):  # allow imports from its folder, as with `python file.py`
            sys.path.insert(0, os.path.dirname(os.path.abspath(name.module)))
        function = name.load()
    except BaseException as error:  # noqa: BLE001  boundary: a module may raise anything; the other side reports it
        control.sendall(_encode_line({"error": f"{type(error).__name__}: {error}"}))
        return
    prepare_forks()
    control.sendall(_encode_line({"ready": True}))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for: their sockets signal their end
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        (descriptor,) = descriptors
        if os.fork() == 0:
            control.close()
            _supervise_agent(socket.socket(fileno=descriptor), function)
        os.close(descriptor)


def prepare_forks() -> None:
    """Do once what each fork would do again: import the modules that clients import on first use, collect garbage."""
    for package, modules in IMPORTED_ON_USE.items():
        if package in sys.modules:  # the agent uses it
            for name in modules:
                with contextlib.suppress(ImportError):  # of a version that has no such module
                    importlib.import_module(name)
    gc.collect()
    gc.freeze()  # garbage collections in forks would visit, and therefore copy, all objects


def _supervise_agent(channel: socket.socket, function: Callable[..., Any]) -> None:
    """Run the function in a child of the fork; end when the child ends or the other end of the channel closes."""
    try:
        os.setsid()  # ignore signals from the terminal
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        supervise(lambda: _run_agent(channel, function), channel.fileno())
    finally:
        os._exit(0)  # skip the fork server's cleanup


def _run_agent(channel: socket.socket, function: Callable[..., Any]) -> None:
    """Run the function, send the result and exit."""
    code = 1
    try:
        with channel.makefile("r", encoding="utf-8") as lines:
            task = json.loads(lines.readline())
        os.environ.update(task["environment"])
        confine(task["limits"], confined=task["confined"])
        _seed(task["arguments"]["seed"])
        channel.sendall(_encode_line(_call_function(function, task["arguments"])))
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _call_function(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        result = call(function, select_accepted_arguments(function, arguments))
        if not (result is None or isinstance(result, str | Mapping)):
            raise TypeError(
                f"agents must return a string, a dict with an 'answer' or None, got {type(result).__name__}"
            )
        value = {"answer": result} if isinstance(result, str) else dict(result or {})
        return {"result": json.loads(json.dumps(value))}
    except BaseException as error:  # noqa: BLE001  boundary: agents are users' code, and SystemExit is a failure, too
        import traceback

        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def select_accepted_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the function accepts."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return dict(arguments)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


def _seed(seed: int) -> None:
    """Seed random generators: forks would otherwise all draw the same, and rollouts should be reproducible."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _encode_line(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data).encode() + b"\n"


if __name__ == "__main__":
    main()
