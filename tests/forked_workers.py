"""Python processes in forks of one that has imported what most of them need, which takes each of them seven seconds.

`use_forks` has xdist start its workers by this file instead of the interpreter: it hands its arguments and standard
streams to a server, which forks, and ends with the fork. The server that forks ranks is started by `spawn`.
"""

import json
import os
import shlex
import signal
import socket
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType

MODULES = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "aiohttp",
    "fastapi",
    "math_verify",
    "megatron.core",
    "openai",
    "pyarrow.parquet",
    "ray",
    "plasmid_cli.main",
    "plasmid_megatron.backend",
    "plasmid_models.testing",
)
SERVER = "PLASMID_TESTS_SERVER"
"""Environment variable of workers with the name of their server."""
_connections = []
"""Connections to the server. It waits for a fork only while its connection is open."""


def use_forks(specs):
    """Change execnet's specifications of local workers, in place."""
    from execnet import XSpec

    command = shlex.join([sys.executable, __file__, str(os.getpid())])
    specs[:] = [XSpec(f"{spec}//python={command}") if spec.popen and not spec.python else spec for spec in specs]


def spawn(arguments, files, server=None):
    """Run the interpreter with these arguments and open files in a fork. Returns its connection and process id.

    Raises `KeyError` in a test run without xdist.
    """
    from tests import forked_rl

    name = server or os.environ[SERVER]
    connection = forked_rl.connect("tests.forked_workers", run=name)
    _connections.append(connection)
    request = {"arguments": arguments, "files": files, "cwd": os.getcwd(), "env": {**os.environ, SERVER: name}}
    socket.send_fds(connection, [json.dumps(request).encode()], files)
    return connection, int(connection.recv(forked_rl.MOST_BYTES))


def become(request, files):
    """Set up this process as if the interpreter had been started with the arguments."""
    global _code
    from tests import forked_rl

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    forked_rl.number_files(files, request["files"])
    # without closing what a fork of this process puts into their places
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False)
    arguments = request["arguments"]
    _code, *rest = arguments[arguments.index("-c") + 1 :]
    sys.argv, sys.path[0] = ["-c", *rest], ""


def run():
    sys.modules["__main__"] = main = ModuleType("__main__")
    exec(_code, main.__dict__)


def serve(listening):
    """Import the modules, then fork for each request."""
    from plasmid.plugins.registry import find_components, load_plugins

    from tests import forked_rl

    for name in MODULES:
        with suppress(ImportError), warnings.catch_warnings():  # not installed
            warnings.simplefilter("ignore")
            import_module(name)
    find_components(load_plugins())  # packages import their components when these are first used
    if forked_rl.serve(socket.socket(fileno=listening), become):
        forked_rl.run_to_end(run)
    os._exit(0)  # the interpreter would free all modules


def main(server, *arguments):
    from tests import forked_rl

    connection, _ = spawn(arguments, [0, 1, 2], server)
    for number in (0, 1):  # only the fork may keep the pipes open
        os.close(number)
    return int(connection.recv(forked_rl.MOST_BYTES))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the workers, and with them this process
    if len(sys.argv) == 2:
        serve(int(sys.argv[1]))
    else:
        sys.path[0] = str(Path(__file__).parent.parent)
        sys.exit(main(*sys.argv[1:]))
