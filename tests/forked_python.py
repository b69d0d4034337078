"""`python -c` in forks of a process that has prepared rewards for calls, which takes a new worker one or two seconds.

This module takes the place of `subprocess` where workers are started. Tests of what a new process inherits, and of
attacks on it, start workers themselves.
"""

import functools
import json
import os
import socket
import sys
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from subprocess import DEVNULL, PIPE, TimeoutExpired
from types import ModuleType

from tests import forked_rl

MODULES = (
    "plasmid_rewards.plugin",
    "plasmid_sandbox.worker",
    "plasmid_workflows.tools.toolset",
    "plasmid_workflows.episodes.server",
)
WARM = ("Math", "IFEval")
"""Rewards whose workers need a second or more to prepare for calls."""


class Popen:
    """A running `python -c CODE ARGUMENTS`, used like `subprocess.Popen`."""

    server = "warm"

    def __init__(self, command, *, stdin, stdout=None, stderr=None, env=None, start_new_session, pass_fds=()):
        interpreter, option, code, *arguments = command
        assert (interpreter, option) == (sys.executable, "-c")
        assert start_new_session and {stdin, stdout, stderr} <= {PIPE, DEVNULL, None}
        request = {
            "code": code,
            "arguments": arguments,
            "cwd": os.getcwd(),
            "env": dict(os.environ if env is None else env),
        }
        request["numbers"] = [0, 1, 2, *pass_fds]
        self.returncode = self.stdin = self.stdout = None
        with ExitStack() as stack:
            nowhere = stack.enter_context(open(os.devnull, "r+b"))
            files = [nowhere if given == DEVNULL else number for number, given in enumerate((stdin, stdout, stderr))]
            if stdin == PIPE:
                files[0], self.stdin = map(open, os.pipe(), ("rb", "wb"))
                stack.enter_context(files[0])
            if stdout == PIPE:
                self.stdout, files[1] = map(open, os.pipe(), ("rb", "wb"))
                stack.enter_context(files[1])
            _keep_server(self.server)
            self._server = _connect(self.server)
            numbers = [file if isinstance(file, int) else file.fileno() for file in (*files, *pass_fds)]
            socket.send_fds(self._server, [json.dumps(request).encode()], numbers)
        self.pid = int(self._server.recv(forked_rl.MOST_BYTES))

    def wait(self, timeout=None):
        if forked_rl.Forked.wait(self, timeout) is None:
            raise TimeoutExpired("python", timeout)
        return self.returncode

    def poll(self):
        return forked_rl.Forked.wait(self, 0)

    kill = forked_rl.Forked.kill


class SmallPopen(Popen):
    """The same in a fork of a process without the libraries of rewards, which takes less time."""

    server = "small"


def _connect(server):
    return forked_rl.connect("tests.forked_python", {**os.environ, "PYTHONHASHSEED": "0"}, (server,))


@functools.cache
def _keep_server(server):
    """Keep a connection open: without any, the server ends."""
    return _connect(server)


def become(request, files):
    """Set up this process as if it had been started with the command."""
    global _code
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    forked_rl.number_files(files, request["numbers"])
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    sys.argv, _code = ["-c", *request["arguments"]], request["code"]


def run():
    exec(_code, {"__name__": "__main__"})


@contextmanager
def without_unused_libraries():
    """Import the checkers of IFEval without two libraries that take 1.3 s, and that they do not use."""
    loading = ModuleType("datasets")
    loading.load_dataset = None
    unused = {"datasets": loading, "scipy.stats": None}
    sys.modules.update(unused)
    try:
        yield
    finally:
        for name in unused:
            del sys.modules[name]


def prepare(server):
    """Import what workers need."""
    for name in MODULES:
        import_module(name)
    if server == "warm":
        for name in WARM:
            with suppress(ImportError), without_unused_libraries():  # or not installed
                getattr(import_module("plasmid_rewards"), name)().warm()
    sys.path[0] = str(Path(sys.executable).parent)


if __name__ == "__main__":
    prepare(sys.argv[2])
    if forked_rl.serve(socket.socket(fileno=int(sys.argv[1])), become):
        forked_rl.run_to_end(run)
