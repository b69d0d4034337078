"""`rl` in forks of a process that has imported its modules, because a new interpreter takes most of a second each time.

For tests of what the command prints and refuses. Tests of its start, of signals and of processes of a run start `rl`
itself.
"""

import atexit
import faulthandler
import fcntl
import functools
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMMAND = Path(sys.executable).with_name("rl")
MODULES = (
    "matplotlib.backends.backend_agg",
    "transformers",
    "plasmid_cli.commands.arguments",
    "plasmid_cli.display.dry_run",
    "plasmid_cli.display.scores",
    "plasmid_cli.main",
    "plasmid_cli.reports.view",
    "plasmid_runtime.lifecycle.sample",
    "plasmid_runtime.rollout.scored.rescoring",
)
MOST_BYTES = 1 << 18
"""Fields of a request: arguments and environment."""
MOST_FILES = 8
UNUSED = 500
"""File descriptors from this number on are free in forks."""
READY = b"ready"
_started: list[subprocess.Popen] = []


class Forked:
    """A running `rl`, used like `subprocess.Popen`."""

    def __init__(self, server, pid):
        self._server, self.pid, self.returncode = server, pid, None

    def poll(self):
        return self.wait(0)

    def wait(self, timeout=None):
        """Return the exit code; None if it has not ended within the timeout."""
        if self.returncode is None and select.select([self._server], [], [], timeout)[0]:
            self.returncode = int(self._server.recv(MOST_BYTES))
        return self.returncode

    def kill(self):
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@functools.cache
def _server():
    return connect("tests.forked_rl")


def connect(module, env=None, arguments=(), run=None):
    """Connect to the server of a module, shared by all processes of this test run. The first user starts it."""
    run = run or os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    address = f"\0{'-'.join((module, *arguments))}-{run}"
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with suppress(ConnectionError):
            connection.connect(address)
            if user_of(connection) != os.getuid():
                raise RuntimeError(f"another user listens on {address!r}")
            if connection.recv(MOST_BYTES) == READY:
                return connection
        connection.close()  # it has not been started yet, or all its users have just ended
        if failed := [process.returncode for process in _started if process.poll()]:
            raise RuntimeError(f"a server that forks processes ended with code {failed[0]}; its error is above")
        # binding fails if another process was quicker
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening, suppress(OSError):
            listening.bind(address)
            listening.listen()
            command = [sys.executable, "-m", module, str(listening.fileno()), *arguments]
            _started.append(subprocess.Popen(command, cwd=ROOT, env=env, pass_fds=[listening.fileno()]))


def start_rl(
    *arguments,
    stdin=None,
    stdout,
    stderr,
    cwd=None,
    env=None,
    address_space=resource.RLIM_INFINITY,
    told_pid=None,
    program="rl",
):
    """Start `rl` with these open files and at most this much address space, in bytes. Only one may run at a time.

    In the file ``told_pid``, the text PID_OF_RL is replaced by its process id before it begins. ``program`` is the
    name of another one of `PROGRAMS`.
    """
    request = {"arguments": list(map(str, arguments)), "cwd": str(cwd or Path.cwd()), "env": dict(env or os.environ)}
    request["program"] = program
    request |= {"address_space": address_space, "told_pid": str(told_pid or "")}
    server = _server()
    with open(os.devnull) as nothing:
        files = [file.fileno() for file in (stdin or nothing, stdout, stderr)]
        socket.send_fds(server, [json.dumps(request).encode()], files)
    return Forked(server, int(server.recv(MOST_BYTES)))


def run_rl(*arguments, timeout=120, **options):
    """Run `rl` to its end, like `subprocess.run`."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = start_rl(*arguments, stdout=out, stderr=err, **options)
        if process.wait(timeout) is None:
            process.kill()
            process.wait()
            raise subprocess.TimeoutExpired(arguments, timeout)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, process.returncode, out.read(), err.read())


def user_of(connection):
    """Return the user id of the process at the other end."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]


def prepare():
    """Import what `rl` needs."""
    from plasmid.plugins.registry import find_components, load_plugins
    from plasmid_cli.main import build_command

    for name in MODULES:
        import_module(name)
    build_command()
    sys.path[0] = str(COMMAND.parent)  # as in forks, which find the same plugins while this does not change
    find_components(load_plugins())  # packages import their components when these are first used


def serve(listening, become):
    """Fork for each process of the tests, until all of them have ended. Returns True in forks for a request."""
    gc.collect()
    gc.freeze()  # garbage collections in forks would visit, and therefore copy, all objects
    assert threading.active_count() == 1, "a fork has only the thread that forks"
    forks = {}  # descriptor to process
    while True:
        for ready in select.select([listening, *forks], [], [], None if forks else 60)[0]:
            if ready is not listening:
                os.waitpid(forks.pop(ready), 0)
                os.close(ready)
                continue
            requests = listening.accept()[0]
            if user_of(requests) == os.getuid():
                if (child := os.fork()) == 0:
                    listening.close()
                    for descriptor in forks:
                        os.close(descriptor)
                    return answer(requests, become)
                forks[os.pidfd_open(child)] = child
            requests.close()
        if not forks:
            return False


def answer(requests, become):
    """Fork for each request of a process; returns in the forks, and when that process has ended."""
    requests.send(READY)
    while True:
        data, files, _, _ = socket.recv_fds(requests, MOST_BYTES, MOST_FILES)
        if not data:
            return False
        if (child := os.fork()) == 0:
            requests.close()
            become(json.loads(data), files)
            return True
        for file in files:
            os.close(file)
        requests.send(str(child).encode())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with suppress(BrokenPipeError):  # that process has ended
            requests.send(str(code).encode())


def number_files(files, numbers):
    """Give received open files these numbers."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, UNUSED) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def become(request, files):
    """Set up this process as if a shell had started it."""
    global _program
    _program = request["program"]
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    # after the folder of the command, as in a new interpreter
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in added if path and path not in sys.path]
    if request["told_pid"]:
        file = Path(request["told_pid"])
        file.write_text(file.read_text().replace("PID_OF_RL", str(os.getpid())))
    resource.setrlimit(resource.RLIMIT_AS, (request["address_space"],) * 2)
    number_files(files, range(len(files)))
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace")
    sys.argv = [str(COMMAND), *request["arguments"]]
    tempfile.tempdir = None  # depends on the environment
    if request["env"].get("PYTHONFAULTHANDLER"):
        faulthandler.enable(sys.stderr)
    main = sys.modules["__main__"]  # imported by the processes that it spawns
    main.__spec__, main.__file__ = None, str(COMMAND)


def run_to_end(program):
    """Run a program and end this process, without freeing all modules first: that takes longer than most commands."""
    code = None
    try:
        program()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    threading._shutdown()  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def run_rl_command():
    import_module("plasmid_cli.main").app()


def run_rl_in_threads():
    """Run `rl` with threads instead of the processes that Ray starts."""
    local = import_module("plasmid_runtime.cluster.local").LocalCluster
    import_module("plasmid_cli.main").app(make_cluster=lambda _: local())


def run_rl_with_hub():
    """Run `rl` with the Hugging Face Hub that the environment names. Its library reads the environment on import."""
    constants = importlib.reload(import_module("huggingface_hub.constants"))
    import_module("huggingface_hub.hf_api").api.endpoint = constants.ENDPOINT
    run_rl_command()


def run_code():
    """Run `python -c CODE ARGUMENTS`."""
    _, code, *arguments = sys.argv
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})


PROGRAMS = {
    "rl": run_rl_command,
    "rl in threads": run_rl_in_threads,
    "rl with hub": run_rl_with_hub,
    "python -c": run_code,
}


if __name__ == "__main__":
    prepare()
    if serve(socket.socket(fileno=int(sys.argv[1])), become):
        run_to_end(PROGRAMS[_program])
