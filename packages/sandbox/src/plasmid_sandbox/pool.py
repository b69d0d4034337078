"""Pool of worker processes: starts them on demand, and replaces those that do not respond."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from plasmid.errors import IsolationError, RaisedError, one_line
from plasmid.plugins.module_file import loaded_files
from plasmid.utils.child_environment import make_child_environment
from plasmid.utils.messages import (
    MAX_ANSWER_BYTES,
    NUMBER,
    ConnectionClosedError,
    LateMessageError,
    MessageTooLongError,
    WrongCallError,
    receive,
    send,
)
from plasmid.utils.work_clock import QueueingExecutor

from .worker import Work

BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from plasmid_sandbox.worker import main
main()
"""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONHASHSEED": "0",  # so that iteration over sets is the same in all workers
}
START_S = 120.0
"""Time limit for a worker to import what its work needs, in seconds."""
GRACE_S = 30.0
"""Time for a worker to prepare a call and to respond, in addition to the deadline of the call, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one call."""

    timeout_s: float
    memory_mb: int
    network: bool = False
    processes: bool = False
    environment: tuple[str, ...] = ()
    """Environment variables passed to workers in addition to those of `make_child_environment`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The outcome of a call."""

    value: Any = None
    """JSON types. Untrusted: validate it."""
    failed: str | None = None
    """Why there is no value: the call hung, crashed, exceeded its memory, ..."""


ENDED = Answer(failed="the worker process ended or did not answer")


class WorkerPool:
    """Runs one kind of work in worker processes, each call in its own forked process with a deadline.

    Can be used from any event loop without blocking it.
    """

    def __init__(self, work: Work, limits: Limits, *, workers: Literal["auto"] | int) -> None:
        """Configure ``workers`` processes; ``auto`` is one per core, at most 8."""
        self._setup = pickle.dumps(
            {
                "work": pickle.dumps(work),
                "plugins": list_plugin_files(),
                "timeout_s": limits.timeout_s,
                "memory_bytes": limits.memory_mb << 20,
                "cpu_s": max(1, int(limits.timeout_s) + 1),
                "network": limits.network,
                "processes": limits.processes,
            }
        )
        self._limits = limits
        self._local = threading.local()
        self._workers: set[_Worker] = set()
        self._num_workers = min(os.cpu_count() or 1, 8) if workers == "auto" else workers
        self._threads = QueueingExecutor(self._num_workers, thread_name_prefix="isolated")
        weakref.finalize(self, _stop_all, self._workers)

    async def start(self) -> None:
        """Start one worker, so that errors in the work show immediately. Raises `IsolationError`."""
        await asyncio.wrap_future(self._threads.submit(self._worker))

    async def call(self, given: Any) -> Answer:
        """Make one call. Raises `RaisedError` with the work's exception, `IsolationError` if no process can start."""
        return await asyncio.wrap_future(self._threads.submit(self._call, given))

    def close(self) -> None:
        """Stop all workers and cancel waiting calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        _stop_all(self._workers)

    def _worker(self) -> _Worker:
        worker: _Worker | None = getattr(self._local, "worker", None)
        if worker is None:
            worker = _Worker(self._setup, self._limits.environment)
            self._workers.add(worker)
            self._local.worker = worker
        return worker

    def _call(self, given: Any) -> Answer:
        try:
            message = pickle.dumps(given)
        except RecursionError:  # arguments may come from policies
            return Answer(failed="too deeply nested")
        worker = self._worker()
        try:
            worker.send(pickle.dumps([message]))
            answer = worker.receive(self._limits.timeout_s + GRACE_S)
        except (LateMessageError, ConnectionClosedError, MessageTooLongError):
            self._drop(worker)
            return ENDED
        return read_answer(answer)

    def _drop(self, worker: _Worker) -> None:
        """Stop a worker; the next call of this thread starts another one."""
        self._workers.discard(worker)
        worker.stop()
        self._local.worker = None


class _Worker:
    """One worker process, used by one thread."""

    def __init__(self, setup: bytes, environment: Sequence[str]) -> None:
        self._num_answers = 0
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**make_child_environment(environment), **ENVIRONMENT},
                start_new_session=True,
            )
        except OSError as error:  # out of processes, descriptors or memory
            raise IsolationError(f"cannot start a worker process: {one_line(error)}") from None
        try:
            self.send(setup)
            read_answer(self.receive(START_S))
        except (LateMessageError, ConnectionClosedError, MessageTooLongError):
            self.stop()
            raise IsolationError(f"a worker process did not start within {START_S:g} s") from None
        except RaisedError as error:
            self.stop()
            raise IsolationError(str(error)) from None

    def send(self, message: bytes) -> None:
        """Send one message. Raises `ConnectionClosedError`."""
        assert self._process.stdin is not None
        send(self._process.stdin.fileno(), message)

    def receive(self, timeout_s: float) -> bytes:
        """Receive the answer to the next call. Raises one of the exceptions of `plasmid.utils.messages`."""
        assert self._process.stdout is not None
        message = receive(self._process.stdout.fileno(), timeout_s, longest=NUMBER.size + MAX_ANSWER_BYTES)
        if message[: NUMBER.size] != NUMBER.pack(self._num_answers):
            raise WrongCallError
        self._num_answers += 1
        return message[NUMBER.size :]

    def stop(self) -> None:
        """Kill the process; its forks are killed with it."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()


def read_answer(answer: bytes) -> Answer:
    """Decode an answer. Raises `RaisedError` with the work's exception."""
    try:
        data: Any = json.loads(answer)
    except (ValueError, RecursionError):
        data = None
    if isinstance(data, dict) and "raised" in data:
        raise RaisedError(str(data["raised"]))
    if isinstance(data, dict) and isinstance(data.get("failed"), str):
        return Answer(failed=data["failed"])
    if isinstance(data, dict) and "answer" in data:
        return Answer(value=data["answer"])
    return Answer(failed="the answer cannot be read")


def _stop_all(workers: set[_Worker]) -> None:
    while workers:
        workers.pop().stop()


def list_plugin_files() -> list[str]:
    """Return the plugin files that this process has loaded."""
    return [file for module in loaded_files() if (file := getattr(module, "__file__", None))]
