"""Worker processes on the pool's side: started when needed, replaced when they do not answer."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from plasmid.errors import RewardError
from plasmid.types import Prompt, Sample, Score

from .messages import Closed, Late, TooLong, receive, send, unpack_scores
from .worker import Judge

BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from plasmid_rewards.isolation.worker import main
main()
"""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONHASHSEED": "0",  # what goes through sets is then the same in all workers
}
START_S = 120.0
"""Time that a worker has to import what its reward needs."""
GRACE_S = 30.0
"""Time beyond its deadline that a worker has to answer, and to prepare a prompt."""
PLUGIN = "plasmid_plugin_"
"""How modules begin that plugin files are loaded as; a worker has to load them, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one call may use."""

    timeout_s: float
    memory_mb: int
    network: bool = False
    processes: bool = False


class WorkerPool:
    """Scores samples in worker processes. Safe to use from any event loop; none of them is blocked."""

    def __init__(self, judge: Judge, limits: Limits, *, workers: int) -> None:
        self._setup = pickle.dumps(
            {
                "judge": pickle.dumps(judge),
                "plugins": _plugin_files(),
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
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward-worker")
        weakref.finalize(self, _stop_all, self._workers)

    async def start(self) -> None:
        """Start one worker, so that what is wrong with the reward shows at once. Raises `RewardError`."""
        await asyncio.wrap_future(self._threads.submit(self._worker))

    async def score(self, prompt: Prompt, samples: list[Sample]) -> list[Score] | str:
        """Scores of samples of one prompt, or why there are none. Raises `RewardError` if the reward raises."""
        return await asyncio.wrap_future(self._threads.submit(self._score, prompt, samples))

    def close(self) -> None:
        """Stop all workers; calls that still wait are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        _stop_all(self._workers)

    def _worker(self) -> _Worker:
        worker: _Worker | None = getattr(self._local, "worker", None)
        if worker is None:
            worker = _Worker(self._setup)
            self._workers.add(worker)
            self._local.worker = worker
        return worker

    def _score(self, prompt: Prompt, samples: list[Sample]) -> list[Score] | str:
        worker = self._worker()
        try:
            answer = worker.call(pickle.dumps((prompt, samples)), self._limits.timeout_s + GRACE_S)
        except (Late, Closed, TooLong):
            self._workers.discard(worker)
            worker.stop()
            self._local.worker = None
            return "the worker process ended or did not answer"
        return unpack_scores(_unless_raised(answer), len(samples))


class _Worker:
    """One worker process, used by one thread."""

    def __init__(self, setup: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )
        try:
            _unless_raised(self.call(setup, START_S))
        except (Late, Closed):
            self.stop()
            raise RewardError(f"a worker process did not start within {START_S:g} s") from None
        except RewardError:
            self.stop()
            raise

    def call(self, message: bytes, timeout_s: float) -> bytes:
        """Send and receive one message. Raises `Late` or `Closed`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        send(self._process.stdin.fileno(), message)
        return receive(self._process.stdout.fileno(), timeout_s)

    def stop(self) -> None:
        """Kill the process; its forks die with it."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()


def _unless_raised(answer: bytes) -> bytes:
    try:
        data: Any = json.loads(answer)
    except (ValueError, RecursionError):
        return answer
    if isinstance(data, dict) and "raised" in data:
        raise RewardError(str(data["raised"]))
    return answer


def _stop_all(workers: set[_Worker]) -> None:
    while workers:
        workers.pop().stop()


def _plugin_files() -> list[str]:
    found = (getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if name.startswith(PLUGIN))
    return [file for file in found if file]
