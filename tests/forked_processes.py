"""Processes forked from a server that has imported what ranks need, because importing it in each takes seconds."""

import fcntl
import json
import multiprocessing
import os
import sys
import tempfile
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path

import pytest

from tests import forked_workers

IMPORTED = ["tests.rank_imports"]
"""Modules that the server imports before it forks."""
_shared = None
"""File with the place of the server, if several processes run the tests."""


def share_server(folder):
    """Use one server for all processes of a test run; all of them name this folder."""
    global _shared
    _shared = Path(folder) / "rank_server.json"


def forked_processes():
    """Return a `multiprocessing` context. Its processes share no state with this one, as if they were spawned."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    server = forkserver._forkserver
    if server._forkserver_address is not None and server._forkserver_pid is None:
        server.ensure_running = _ensure_running  # the server has forked this process, which would start another
    elif _shared is not None and sys.version_info < (3, 14):  # whose servers also ask for a key
        with _locked(_shared) as file:
            _join_server(file)
    return context


def start_server():
    """Start the server if it does not run yet. In Python 3.11, it imports nothing in another folder than this one."""
    forked_processes()
    forkserver._forkserver.ensure_running()


@contextmanager
def _locked(path):
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _join_server(file):
    """Connect to the server of another process, or start one and write down where it is.

    A server ends when no process has its pipe open.
    """
    server = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        return
    file.seek(0)
    for line in file:
        place = json.loads(line)
        with suppress(OSError):  # that process has ended
            server._forkserver_alive_fd = os.open(f"/proc/{place['pid']}/fd/{place['pipe']}", os.O_WRONLY)
            server._forkserver_address = place["address"]
            server.ensure_running = _ensure_running
            return
    _start_server(server)
    place = {"pid": os.getpid(), "pipe": server._forkserver_alive_fd, "address": server._forkserver_address}
    file.write(json.dumps(place) + "\n")


def _start_server(server):
    """Start the server, in a fork if this process has a server of forks."""
    if forked_workers.SERVER not in os.environ:
        return server.ensure_running()
    resource_tracker.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(util, "spawnv_passfds", _spawn)
        server.ensure_running()
    server.ensure_running = _ensure_running  # the server is no child of this process


def _spawn(path, arguments, files):
    _, pid = forked_workers.spawn([os.fsdecode(one) for one in arguments[1:]], [0, 1, 2, *files])
    return pid


def _ensure_running():
    """Start a server of this process if the process that started the shared one has ended."""
    server = forkserver._forkserver
    if os.path.exists(server._forkserver_address):  # the process removes it when it ends
        return resource_tracker.ensure_running()
    os.close(server._forkserver_alive_fd)
    del server.ensure_running  # which the class still has
    server._forkserver_alive_fd = server._forkserver_address = None
    server.ensure_running()


def run_pytest(*arguments, env, cwd):
    """Run pytest in a process that has imported torch. Returns the exit code and the output."""
    with tempfile.NamedTemporaryFile("r") as output:
        process = forked_processes().Process(target=_run_pytest, args=(arguments, dict(env), str(cwd), output.name))
        process.start()
        process.join()
        return process.exitcode, output.read()


def _run_pytest(arguments, env, cwd, output):
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(import_module("pytest").main(list(arguments)))
