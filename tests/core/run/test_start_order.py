"""The order in which trainer and engine use the memory of GPUs that they share."""

import asyncio

import pytest
from plasmid.protocols import Node
from plasmid.testing.fakes import FakeEngineConfig, FakeTrainerConfig
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.startup import start_processes


class GpuCluster(LocalCluster):
    """A local cluster whose machine seems to have two GPUs."""

    num_gpus = 2

    async def reserve(self, shares):
        return (Node(address="127.0.0.1", cores=2),) * len(shares)


@pytest.mark.parametrize(
    ("placement", "waits"),
    [
        ({"device": "cuda", "colocated": True}, True),
        ({"device": "cuda", "colocated": False}, False),
        ({"device": "cpu", "colocated": True}, False),
    ],
    ids=str,
)
def test_an_engine_measures_memory_after_the_trainer_on_its_gpus_has_loaded(placement, waits, runner, monkeypatch):
    events, build_trainer, build_engine = [], FakeTrainerConfig.build, FakeEngineConfig.build

    async def load_trainer(self, context):
        while "engine imports" not in events:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        events.append("trainer loaded")
        return await build_trainer(self, context)

    async def load_engine(self, context):
        events.append("engine imports")
        if context.before_loading is not None:
            await context.before_loading()
        events.append("engine loads")
        return await build_engine(self, context)

    monkeypatch.setattr(FakeTrainerConfig, "build", load_trainer)
    monkeypatch.setattr(FakeEngineConfig, "build", load_engine)
    config = runner.config({"placement": placement})

    async def run():
        handles = await start_processes(config, GpuCluster(), runner.folder, with_trainer=True, with_engine=True)
        await handles.close()

    asyncio.run(run())
    loading = ["trainer loaded", "engine loads"]
    assert events == ["engine imports", *(loading if waits else reversed(loading))]
