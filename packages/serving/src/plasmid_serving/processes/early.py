"""Child processes of `multiprocessing` that start before their parent needs them.

A spawned process imports the modules of its task. If a server's main process spawns it only after its own imports, the
two imports run one after the other, and the server takes about twice as long to start. `start_early` starts the child
process first. When the parent later starts its `multiprocessing.Process`, the task is sent to the waiting child.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import context, popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

from plasmid.utils.log_files import write_stacks_to_memory

from .launch import end_with_parent

log = logging.getLogger(__name__)
READ_AT_START = ("CUDA_VISIBLE_DEVICES", "LD_", "MALLOC_", "OMP_", "PYTHON", "PYTORCH_")
"""Prefixes of environment variables that only have an effect if they are set when a process starts."""


@dataclass(frozen=True, slots=True, eq=False)
class _EarlyProcess:
    """A process that imports the module of its target and waits for a task."""

    target: str
    pid: int
    task: socket.socket
    """Socket over which the task is sent. It becomes readable when the process ends, which never writes to it."""
    executable: str
    environment: Mapping[str, str]
    read_at_start: tuple[str, ...]
    before_task: Callable[[], None]

    def find_obstacle(self) -> str:
        """Return why the task cannot run in this process and needs a new one; empty if it can."""
        if os.waitpid(self.pid, os.WNOHANG) != (0, 0):
            return "it has ended"
        if os.fsdecode(spawn.get_executable()) != self.executable:
            return "another executable is used"  # for example, the parent has set numactl as the executable
        for name in sorted(self.environment.keys() | os.environ.keys()):
            is_known = name in self.environment or name.startswith(self.read_at_start)
            if is_known and os.environ.get(name) != self.environment.get(name):
                return f"{name} has changed"
        return ""

    def end(self) -> None:
        """Kill the process."""
        self.task.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


_waiting: list[_EarlyProcess] = []
_received: list[int] = []
"""File descriptors of this process's task, in the order in which its pickled objects refer to them."""


def start_early(
    *targets: str,
    imports: Sequence[str] = (),
    read_by_imports: Sequence[str] = (),
    before_task: Callable[[], None] = lambda: None,
    fork: bool = False,
) -> None:
    """Start a process for each target (``module:function``), which imports the module.

    The process then imports the modules ``imports``, which the target would only import while it runs. It skips those
    that are not installed.

    The next `multiprocessing.Process` with that target and the start method ``spawn`` runs in the early process, which
    also gets the environment variables that its parent has added in the meantime. The parent calls ``before_task``
    before it sends the task.

    It runs in a new process instead if the early process has ended, or if its parent has since changed the executable,
    changed a variable, or added one that only has an effect at the start (`READ_AT_START`, ``read_by_imports``).
    Starting a process with a target that is not waiting kills all early processes that still wait.

    With ``fork``, this process imports the module and forks, so that the import happens only once. The import must not
    initialize CUDA. If it starts a thread, new processes are started instead.
    """
    SpawnProcess._Popen = staticmethod(_popen)  # type: ignore[method-assign, assignment]
    executable, tracker = os.fsdecode(spawn.get_executable()), resource_tracker.getfd()
    assert tracker is not None
    for target in targets:
        ours, theirs = socket.socketpair()
        with theirs:
            modules = (target.partition(":")[0], *imports)
            if fork:
                import_module(modules[0])
            if fork and len(os.listdir("/proc/self/task")) == 1:
                pid = _fork(modules, ours, theirs.fileno(), tracker)
            else:
                command = _run_task_command(executable, modules, os.getpid(), theirs.fileno(), tracker)
                pid = util.spawnv_passfds(os.fsencode(executable), command, [theirs.fileno(), tracker])
        read_at_start = (*READ_AT_START, *read_by_imports)
        _waiting.append(_EarlyProcess(target, pid, ours, executable, dict(os.environ), read_at_start, before_task))


def _fork(modules: tuple[str, ...], ours: socket.socket, task_fd: int, tracker_fd: int) -> int:
    """Fork a process that runs a task, and return its id."""
    parent = os.getpid()
    _flush_output()  # the fork would write the same again
    if pid := os.fork():
        return pid
    code = 1
    try:
        gc.freeze()  # a garbage collection would visit, and therefore copy, all objects of the imports
        for socket_of_parent in (ours, *(early.task for early in _waiting)):
            socket_of_parent.close()
        _waiting.clear()
        for fd in (task_fd, tracker_fd):
            os.set_inheritable(fd, True)
        sys.argv = [sys.argv[0], "--multiprocessing-fork"]  # spawn_main expects the last argument
        end_with_parent(parent)
        _run_task(modules, parent, task_fd, tracker_fd)
    except SystemExit as end:
        code = int(end.code or 0)  # of the process, from spawn_main
    except BaseException:  # noqa: BLE001  printed as the interpreter would
        traceback.print_exc()
    finally:  # the stack below is the parent's
        try:
            _flush_output()
        finally:
            os._exit(code)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a full disk, or a pipe or file that has been closed
            stream.flush()


def _run_task_command(
    executable: str, modules: tuple[str, ...], parent: int, task_fd: int, tracker_fd: int
) -> list[str]:
    """Return the command of a process that calls `run_task`."""
    flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
    call = f"from {__name__} import run_task; run_task{(modules, parent, task_fd, tracker_fd)!r}"
    return [executable, *flags, "-c", call, "--multiprocessing-fork"]  # spawn_main expects the last argument


def run_task(modules: tuple[str, ...], parent: int, task_fd: int, tracker_fd: int) -> None:
    """Import the modules, then run the task that arrives on the socket. The main function of an early process.

    All modules but the first are optional: those that are not installed are skipped. If the import of one fails
    otherwise, the process starts again with only the first, because a partial import may have had side effects.
    """
    end_with_parent(parent)
    write_stacks_to_memory()
    _run_task(modules, parent, task_fd, tracker_fd)


def _run_task(modules: tuple[str, ...], parent: int, task_fd: int, tracker_fd: int) -> None:
    resource_tracker._resource_tracker._fd = tracker_fd  # type: ignore[attr-defined]
    environment = dict(os.environ)
    required, *optional = modules
    import_module(required)
    for module in optional:
        try:
            import_module(module)
        except ModuleNotFoundError:
            continue
        except Exception as error:  # noqa: BLE001  code of other packages
            log.warning("cannot import %s before the task: %s: %s", module, type(error).__name__, error)
            command = _run_task_command(sys.executable, (required,), parent, task_fd, tracker_fd)
            os.execve(command[0], command, environment)
    task = Connection(task_fd)
    new, count = task.recv()
    _received.extend(reduction.recv_handle(task) for _ in range(count))
    os.environ |= new
    spawn.spawn_main(pipe_handle=os.dup(task_fd), tracker_fd=tracker_fd)


class _ReceivedFd:
    """A file descriptor in a pickled task, of which the early process receives a duplicate."""

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        """Return the duplicate."""
        return _received[self._index]


class _Popen(popen_spawn_posix.Popen):
    """Runs a `multiprocessing.Process` in an early process."""

    DupFd: ClassVar[Any] = _ReceivedFd

    def __init__(self, process: BaseProcess, early: _EarlyProcess) -> None:
        self._early = early
        self._sent: list[int] = []
        super().__init__(process)

    def duplicate_for_child(self, fd: int) -> int:
        """Send a file descriptor with the task. Returns its index."""
        self._sent.append(fd)
        return len(self._sent) - 1

    def _launch(self, process: BaseProcess) -> None:
        data = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process.name), data)
            reduction.dump(process, data)
        finally:
            context.set_spawning_popen(None)
        early = self._early
        task = Connection(os.dup(early.task.fileno()))
        self.pid = early.pid
        self.sentinel = task.fileno()
        self.finalizer = util.Finalize(self, task.close)
        # send new variables only: setproctitle cannot rename a process that has set all of its variables again
        new = {name: value for name, value in os.environ.items() if name not in early.environment}
        task.send((new, len(self._sent)))
        for fd in self._sent:
            reduction.send_handle(task, fd, early.pid)
        with open(task.fileno(), "wb", closefd=False) as stream:
            stream.write(data.getbuffer())
        early.task.close()


def _popen(process: BaseProcess) -> Any:
    """Start a `multiprocessing.Process` in an early process if one waits for its target, else in a new one."""
    target = getattr(process, "_target", None)
    name = f"{getattr(target, '__module__', '')}:{getattr(target, '__qualname__', '')}"
    early = next((early for early in _waiting if early.target == name), None)
    if early is None:
        while _waiting:
            unused = _waiting.pop()
            unused.end()
            log.warning("%s was started early, but %s starts before it", unused.target, name)
        return popen_spawn_posix.Popen(process)
    _waiting.remove(early)
    early.before_task()
    obstacle = early.find_obstacle()
    if not obstacle:
        try:
            return _Popen(process, early)
        except OSError as error:
            obstacle = str(error)
    early.end()
    log.warning("%s was started early, but needs a new process: %s", name, obstacle)
    return popen_spawn_posix.Popen(process)
