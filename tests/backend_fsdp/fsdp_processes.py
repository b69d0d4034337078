"""A cluster of processes that tests use one after another. Implements `protocols.Cluster`."""

import asyncio
import gc
import math
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import psutil
from plasmid.errors import ActorDiedError, DeadlineError
from plasmid.types.shared_groups import LocalStore

from tests.forked_processes import forked_processes

MAX_THREADS = 64
"""Maximum number of threads of a reused process; a rank of a tiny model has half as many."""
_held = {}


def _make(factory, args, kwargs, gpu):
    os.environ["CUDA_VISIBLE_DEVICES"] = "" if gpu is None else str(gpu)
    _forget_graphs()
    gc.freeze()  # the previous object collects garbage when it closes: do not visit again what it left
    _held["object"] = factory(*args, **kwargs)


def _forget_graphs():
    """Forget graphs of earlier objects: their number per function is limited, and reports would count them."""
    if dynamo := sys.modules.get("torch._dynamo"):
        counters = dynamo.utils.counters
        if counters["stats"]["unique_graphs"]:
            dynamo.reset()
        counters.clear()


def _call(method, args, kwargs):
    result = getattr(_held["object"], method)(*args, **kwargs)
    return asyncio.run(result) if asyncio.iscoroutine(result) else result


def _use_gpu(place):
    os.environ["CUDA_VISIBLE_DEVICES"] = str(place)


class Processes:
    """One executor with one process per rank. Without a `context`, the processes have imported torch and Megatron."""

    def __init__(self, count, context=None):
        self._context, self._max_threads, self._on_gpus = context or forked_processes(), MAX_THREADS, False
        self._executors = [self._new(place) for place in range(count)]

    @classmethod
    def on_gpus(cls, count):
        """Processes with one GPU each, which start when they are first used.

        They are spawned: the import of Megatron initializes CUDA, and a process that is forked afterwards cannot use
        it. CUDA and compilers start one thread per core or more, so the number of threads is not limited.
        """
        processes = cls(0, multiprocessing.get_context("spawn"))
        processes._max_threads, processes._on_gpus = math.inf, True
        processes._executors = [processes._new(place) for place in range(count)]
        return processes

    def _new(self, place):
        start = {"initializer": _use_gpu, "initargs": (place,)} if self._on_gpus else {}
        return ProcessPoolExecutor(1, mp_context=self._context, **start)

    async def run(self, place, function, *args):
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executors[place], function, *args)

    def tidy(self, place):
        """Replace a process with many threads: those of gloo outlive their groups, and poll until the process ends."""
        for process in (self._executors[place]._processes or {}).values():
            if psutil.Process(process.pid).num_threads() > self._max_threads:
                return self.replace(place)

    def replace(self, place):
        """End a process that hangs, has died or has too many threads, and start a new one in its place."""
        for process in list((self._executors[place]._processes or {}).values()):
            process.kill()
        self._executors[place].shutdown(wait=False)
        self._executors[place] = self._new(place)

    def shutdown(self):
        for executor in self._executors:
            executor.shutdown(cancel_futures=True)


class ProcessActor:
    def __init__(self, name, place, processes):
        self.name, self._place, self._processes = name, place, processes

    async def call(self, method, *args, timeout_s, **kwargs):
        return await self.run(method, timeout_s, _call, method, args, kwargs)

    async def run(self, what, timeout_s, function, *args):
        try:
            return await asyncio.wait_for(self._processes.run(self._place, function, *args), timeout_s)
        except TimeoutError:
            raise DeadlineError(f"{self.name}.{what}: no answer within {timeout_s:g} s") from None
        except BrokenProcessPool:
            raise ActorDiedError(f"{self.name} died during {what}") from None

    async def stop(self, *, grace_s=10.0):
        try:
            await self.call("close", timeout_s=grace_s)
            self._processes.tidy(self._place)
        except (DeadlineError, ActorDiedError):
            self._processes.replace(self._place)


class ProcessCluster:
    num_gpus = 0

    def __init__(self, processes):
        self._processes = processes
        self.store = LocalStore()
        self.actors = []

    async def start(self, factory, /, *args, name, resources, timeout_s=120.0, **kwargs):
        actor = ProcessActor(name, len(self.actors), self._processes)
        self.actors.append(actor)
        await actor.run("start", timeout_s, _make, factory, args, kwargs, resources.bundles[0].gpu)
        return actor

    async def close(self):
        for actor in self.actors:
            await actor.stop()
