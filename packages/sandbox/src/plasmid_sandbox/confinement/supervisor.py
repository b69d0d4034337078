"""The parent process of one program, which kills everything that the program leaves behind.

As a subreaper it adopts every descendant that loses its parent, even in a different session. It kills them when the
program ends, when its own parent ends, or when the other end of a pipe or socket is closed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from . import landlock
from .linux import PR_SET_CHILD_SUBREAPER, die_with_parent, drop_tracing, end_children, prctl, set_limits

END_S = 10.0
"""Time limit for killing descendants, in seconds."""
NOT_STARTED = 127
"""Exit code for a program that cannot be started, as in shells."""
BOOT = """import sys, types
package = types.ModuleType("confinement")
package.__path__ = [sys.argv[1]]
sys.modules["confinement"] = package
from confinement.supervisor import main
main()
"""
"""Starts the supervisor without the package's other imports, which would take longer than most programs."""


def supervisor_command(command: Sequence[str], stop: int, *, limits: Mapping[str, int], confined: bool) -> list[str]:
    """Return the command line of a supervisor with this program, which inherits ``stop``.

    It ends as the program does: with its exit code, or killed by the same signal.
    """
    settings = json.dumps({"stop": stop, "limits": limits, "confined": confined})
    return [sys.executable, "-I", "-S", "-c", BOOT, os.path.dirname(__file__), settings, *command]


def main() -> None:
    """Run the program of `supervisor_command`."""
    settings = json.loads(sys.argv[2])
    command = sys.argv[3:]

    def start() -> None:
        os.set_inheritable(settings["stop"], False)
        for name in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these signals
            signal.signal(name, signal.SIG_DFL)
        confine(settings["limits"], confined=settings["confined"])
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
        os._exit(NOT_STARTED)

    code = supervise(start, settings["stop"])
    if code < 0:
        set_limits({"CORE": 0})
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def confine(limits: Mapping[str, int], *, confined: bool) -> None:
    """Lower the resource limits of this process and its children; with ``confined`` enter a Landlock domain, too."""
    set_limits(limits)
    if confined and landlock.enter_domain():
        drop_tracing()


def supervise(start: Callable[[], object], stop: int) -> int:
    """Run ``start`` in a child process, and return the child's exit code, negative for a signal.

    The child is killed when the other end of ``stop``, a pipe or socket, is closed or this process's parent ends. In
    either case all its descendants are killed.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    parent = os.pidfd_open(os.getppid())
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            die_with_parent()
            os.close(parent)
            start()
        finally:
            os._exit(1)
    ended = os.pidfd_open(child)
    events = select.poll()
    events.register(ended, select.POLLIN)
    events.register(parent, select.POLLIN)
    events.register(stop, select.POLLRDHUP)
    if ended not in [descriptor for descriptor, _ in events.poll()]:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    end_children(END_S)
    return os.waitstatus_to_exitcode(status)
