"""The worker process: keeps the work loaded, and answers each list of calls in a fork of itself.

A fork is killed when the time of a call is up, and its changes in memory are lost with it. It cannot start processes or
access the network unless the settings allow it. The same applies to imports in the worker, so they download nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import resource
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from plasmid.errors import PlasmidError, one_line, sample_fault
from plasmid.plugins.module_file import load_file
from plasmid.utils.messages import (
    MAX_ANSWER_BYTES,
    NUMBER,
    ConnectionClosedError,
    LateMessageError,
    MessageTooLongError,
    receive,
    send,
)

from .confinement import landlock, seccomp
from .confinement.linux import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    die_with_parent,
    drop_capabilities,
    end_children,
    prctl,
    set_limits,
)

OUT_OF_MEMORY = b'{"memory": "none left"}'
"""Answer of a fork to a call for which it lacks memory."""
ENDING_S = 2.0
"""Time limit for a fork to end after it has closed its pipe, in seconds."""
END_S = 20.0
"""Time limit for killing what a fork leaves behind, in seconds. The pool ends a worker that takes longer than 30 s."""


class Work(Protocol):
    """The work of a worker, which is pickled and sent to it."""

    def warm(self) -> None:
        """Import and open what calls need."""

    def prepare(self, given: Any) -> None:
        """Prepare what other calls can share. Trusted: it runs in the worker."""

    def answer(self, given: Any) -> Any:
        """Answer one call, in a fork of the worker, with JSON types."""


def main() -> None:
    """Serve the pool that started this process, until it closes the pipe."""
    answers = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    die_with_parent()
    if sys.platform == "linux":
        prctl(PR_SET_DUMPABLE, 0)  # so that no fork can access this process through /proc
    setup: dict[str, Any] = pickle.loads(receive(0))
    numbers = itertools.count()

    def respond(answer: bytes) -> None:
        send(answers, NUMBER.pack(next(numbers)) + answer)

    try:
        work = _open(setup)
    except PlasmidError as error:
        respond(_encode({"raised": str(error)}))
        return
    except Exception as error:  # noqa: BLE001  boundary: imports and plugins of others
        respond(_encode({"raised": f"cannot be loaded: {one_line(error)}{_environment_hint(error)}"}))
        return
    respond(b"{}")
    with suppress(ConnectionClosedError):
        while True:
            calls: list[bytes] = pickle.loads(receive(0))
            for answer in _serve(work, calls, {**setup, "answers": answers}):
                respond(answer)


def _environment_hint(error: Exception) -> str:
    if not isinstance(error, KeyError):
        return ""
    return " (a worker process has few environment variables; add others with the setting `environment`)"


def _open(setup: dict[str, Any]) -> Work:
    if sys.platform == "linux":
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    if seccomp.is_supported():
        seccomp.install(seccomp.worker_rules(network=setup["network"]))
    for file in setup["plugins"]:
        load_file(Path(file))
    work: Work = pickle.loads(setup["work"])
    work.warm()
    return work


class _Raised(Exception):
    """An exception of `Work.prepare`; such a call is not answered in a fork."""


def _serve(work: Work, calls: list[bytes], setup: dict[str, Any]) -> Iterator[bytes]:
    """Yield the answers of calls in order, all from one fork; if a call breaks it, a new fork continues."""
    left = [_prepare(work, call) for call in calls]
    while left:
        for answer in _answers(work, left, setup):
            left = left[1:]
            yield answer


def _prepare(work: Work, call: bytes) -> Any:
    given = pickle.loads(call)
    try:
        work.prepare(given)
    except Exception as error:  # noqa: BLE001  boundary: users' code
        return _Raised(_reason(error))
    return given


def _answers(work: Work, calls: list[Any], setup: dict[str, Any]) -> Iterator[bytes]:
    """Yield the answers of one fork, until all are there or the fork is no longer usable."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _close_inherited(reading, setup["answers"])
        _answer(work, calls, writing, setup)
    os.close(writing)
    try:
        for index, call in enumerate(calls):
            if isinstance(call, _Raised):
                yield _encode({"raised": str(call)})
                continue
            answer, more = _receive(reading, child, setup)
            if answer == OUT_OF_MEMORY:
                if index > 0:
                    return  # earlier calls used some of the memory, so this one gets a new fork
                failed = f"exceeded memory_mb = {setup['memory_bytes'] >> 20}"
                answer, more = _encode({"failed": failed}), False
            yield answer
            if not more:
                return
    finally:
        os.close(reading)
        _end(child)


def _receive(reading: int, child: int, setup: dict[str, Any]) -> tuple[bytes, bool]:
    """Return a fork's next answer, unvalidated (the pool validates it), and whether the fork can give more."""
    try:
        return receive(reading, setup["timeout_s"], longest=MAX_ANSWER_BYTES), True
    except LateMessageError:
        failed = f"no answer within call_timeout_s = {setup['timeout_s']:g}"
    except MessageTooLongError:
        failed = "the answer is too long"
    except ConnectionClosedError:
        failed = _exit_reason(child)
    return _encode({"failed": failed}), False


def _close_inherited(*descriptors: int) -> None:
    """Close descriptors inherited from the worker: its input, its answers, and the other end of the pipe.

    The fork's own pipe and what the work has opened for itself remain.
    """
    for descriptor in descriptors:
        os.close(descriptor)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)


def _answer(work: Work, calls: list[Any], pipe: int, setup: dict[str, Any]) -> None:
    """Answer calls in the fork. Never returns."""
    try:
        os.setsid()
        die_with_parent()
        memory = _address_space() + setup["memory_bytes"]
        set_limits({"AS": memory, "CPU": setup["cpu_s"] * len(calls), "CORE": 0})
        if sys.platform == "linux":
            landlock.enter_domain()
            drop_capabilities()
        if seccomp.is_supported() and not setup["processes"]:
            seccomp.install(seccomp.single_process_rules(os.getpid()), others="all")
        for call in calls:
            if not isinstance(call, _Raised):
                send(pipe, _result(work, call))
    finally:
        os._exit(0)


def _result(work: Work, given: Any) -> bytes:
    try:
        return _encode({"answer": work.answer(given)})
    except MemoryError:
        return OUT_OF_MEMORY
    except Exception as error:  # noqa: BLE001  boundary: users' code
        fault = sample_fault(error)
        return _encode({"raised": _reason(error)} if fault is None else {"failed": fault})


def _encode(result: dict[str, Any]) -> bytes:
    try:
        return json.dumps(result).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return json.dumps({"failed": f"the answer is not JSON: {one_line(error)}"}).encode()


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, PlasmidError) else f"raised {one_line(error)}"


def _address_space() -> int:
    """Return the number of bytes that this process has mapped already."""
    if sys.platform != "linux":
        return 1 << 30
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _exit_reason(child: int) -> str:
    """Return why a fork gave no answer before its pipe was closed."""
    descriptor = os.pidfd_open(child)
    select.select([descriptor], [], [], ENDING_S)
    os.close(descriptor)
    info = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if info is None or info.si_code == os.CLD_EXITED:
        return "the process ended without an answer"
    if info.si_status == signal.SIGSYS:
        return "tried to start a process, which is not allowed"
    return f"the process was killed by {signal.Signals(info.si_status).name}"


def _end(child: int) -> None:
    """Kill the fork, its process group, and all processes that this process has adopted."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    end_children(END_S)
