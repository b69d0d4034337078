"""The worker process: holds what does the work, warm, and answers each call in a fork of itself.

The fork is killed when its time is up, and whatever it did to its memory is gone with it. It cannot start processes or
reach a network unless the settings say so, and imports cannot either, so that none of them downloads anything.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ..errors import PlasmidError, one_line
from ..plugins import load_file
from .confinement import seccomp
from .confinement.linux import PR_SET_CHILD_SUBREAPER, die_with_parent, prctl, set_limits
from .messages import LONGEST, Closed, Late, TooLong, receive, send

ENDING_S = 2.0
"""Time that a fork which has closed its pipe has to end."""


class Work(Protocol):
    """What a worker holds. It is pickled to get there."""

    def warm(self) -> None:
        """Import and open what calls need."""
        ...

    def prepare(self, given: Any) -> None:
        """Make what other calls can share. Trusted: it runs in the worker."""
        ...

    def answer(self, given: Any) -> Any:
        """One call, in a fork of the worker; JSON types."""
        ...


def main() -> None:
    """Serve the pool that started this process, until it closes the pipe."""
    answers = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    die_with_parent()
    setup: dict[str, Any] = pickle.loads(receive(0))
    try:
        work = _open(setup)
    except PlasmidError as error:
        send(answers, json.dumps({"raised": str(error)}).encode())
        return
    except Exception as error:  # noqa: BLE001  boundary: imports and plugins of others
        send(answers, json.dumps({"raised": f"cannot be loaded: {one_line(error)}"}).encode())
        return
    send(answers, b"{}")
    with suppress(Closed):
        while True:
            call = receive(0)
            send(answers, json.dumps(_serve(work, call, setup)).encode())


def _open(setup: dict[str, Any]) -> Work:
    if sys.platform == "linux":
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    if seccomp.supported():
        seccomp.install(seccomp.compute_rules(os.getpid(), network=setup["network"], processes=True))
    for file in setup["plugins"]:
        load_file(Path(file))
    work: Work = pickle.loads(setup["work"])
    work.warm()
    return work


def _serve(work: Work, call: bytes, setup: dict[str, Any]) -> dict[str, Any]:
    given = pickle.loads(call)
    try:
        work.prepare(given)
    except Exception as error:  # noqa: BLE001  boundary: users' code
        return {"raised": _told(error)}
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _answer(work, given, writing, setup)
    os.close(writing)
    try:
        answer = json.loads(receive(reading, setup["timeout_s"], longest=LONGEST))
        return answer if isinstance(answer, dict) else {"failed": "the answer cannot be read"}
    except Late:
        return {"failed": f"no answer within call_timeout_s = {setup['timeout_s']:g}"}
    except TooLong:
        return {"failed": "its answer is too long"}
    except Closed:
        return {"failed": _why(child)}
    except (ValueError, RecursionError):
        return {"failed": "the answer cannot be read"}
    finally:
        os.close(reading)
        _end(child)


def _answer(work: Work, given: Any, pipe: int, setup: dict[str, Any]) -> None:
    """Runs in the fork: never returns."""
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        die_with_parent()
        set_limits({"AS": _address_space() + setup["memory_bytes"], "CPU": setup["cpu_s"], "CORE": 0})
        if seccomp.supported():
            rules = seccomp.compute_rules(os.getpid(), network=setup["network"], processes=setup["processes"])
            seccomp.install(rules)
        result: dict[str, Any] = {"answer": work.answer(given)}
    except MemoryError:
        result = {"failed": f"more memory than memory_mb = {setup['memory_bytes'] >> 20}"}
    except RecursionError:
        result = {"failed": "too deeply nested"}
    except Exception as error:  # noqa: BLE001  boundary: users' code
        result = {"raised": _told(error)}
    try:
        send(pipe, _encoded(result))
    finally:
        os._exit(0)


def _encoded(result: dict[str, Any]) -> bytes:
    try:
        return json.dumps(result).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return json.dumps({"failed": f"the answer is no JSON: {one_line(error)}"}).encode()


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, PlasmidError) else f"raised {one_line(error)}"


def _address_space() -> int:
    """Bytes that this process has mapped already."""
    if sys.platform != "linux":
        return 1 << 30
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _why(child: int) -> str:
    """Why a fork gave no answer before its pipe was closed."""
    descriptor = os.pidfd_open(child)
    select.select([descriptor], [], [], ENDING_S)
    os.close(descriptor)
    info = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if info is None or info.si_code == os.CLD_EXITED:
        return "its process ended without an answer"
    if info.si_status == signal.SIGSYS:
        return "tried to start a process, which it may not"
    return f"its process was killed by {signal.Signals(info.si_status).name}"


def _end(child: int) -> None:
    """Kill the fork, its process group, and all that has come to be a child of this process."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(child, 0)
        while True:
            for orphan in _children():
                os.kill(orphan, signal.SIGKILL)
            os.waitpid(-1, 0)


def _children() -> list[int]:
    file = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(number) for number in file.read_text().split()] if file.is_file() else []
