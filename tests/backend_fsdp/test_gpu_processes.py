"""Processes of ranks on GPUs, checked without a GPU."""

import asyncio
import os
import sys

from fsdp_processes import ProcessCluster, Processes
from plasmid.protocols import Bundle, Resources


class Rank:
    def describe(self):
        return os.getpid(), os.getppid(), os.environ["CUDA_VISIBLE_DEVICES"], "megatron" in sys.modules


def test_processes_on_gpus_are_spawned_with_one_gpu_each_and_reused(monkeypatch):
    """A process that is forked after CUDA was initialized, as by the import of Megatron, cannot use it."""
    monkeypatch.setattr("fsdp_processes.MAX_THREADS", 0)
    processes = Processes.on_gpus(2)

    async def run():
        visible = await processes.run(1, os.getenv, "CUDA_VISIBLE_DEVICES")  # before a rank chooses its GPU
        found = []
        for _ in range(2):
            cluster = ProcessCluster(processes)
            resources = Resources(bundles=(Bundle(gpu=0),))
            actor = await cluster.start(Rank, name="trainer-0", resources=resources)
            found.append(await actor.call("describe", timeout_s=60))
            processes.tidy(0)
        return visible, found

    visible, found = asyncio.run(run())
    processes.shutdown()
    assert visible == "1"
    assert found[0] == found[1] and found[0][1:] == (os.getpid(), "0", False)
