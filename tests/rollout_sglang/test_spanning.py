"""A server over two machines: real SGLang, tensor parallel over gloo, with a separate process for each machine."""

import asyncio
import json
import os
import signal
from dataclasses import replace

import numpy as np
import psutil
import pytest
from plasmid.errors import EngineError
from plasmid.protocols import Bundle
from plasmid_models.sync import compare
from plasmid_serving.supervisor import Condition
from sgl_cases import changed, make_context, make_request, plain_logprobs, plain_model, publish

OTHER = "sglang::scheduler_TP1"
"""SGLang's name of the process of the second rank, which is on the second machine."""


def spanning(model_path, run_dir, **settings):
    """Return the build context of an engine with one server over two machines."""
    context = make_context(model_path, run_dir, ranks=2, gpus_per_engine=2, **settings)
    return replace(context, bundles=(Bundle(0), Bundle(1)))


def ranks():
    """Return the processes of multi-rank servers below this process, by name; the shared server has one rank."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            found[process.cmdline()[0]] = process
        except (psutil.NoSuchProcess, IndexError):
            continue
    return {name: process for name, process in found.items() if name.startswith("sglang::scheduler_TP")}


async def until(is_so):
    while not is_so():
        await asyncio.sleep(0.2)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_server_over_two_machines_serves_takes_weights_and_is_restarted(sglang, tiny_model, tmp_path):
    model = plain_model(tiny_model)
    request = make_request(3, num=12)

    async def test():
        context = spanning(tiny_model, tmp_path, wire="broadcast", read_back_every=1, health_interval_s=0.5)
        engine = await context.config.rollout.build(context)
        try:
            (member,) = engine.supervisor.all

            async def check_again(version):
                await engine.pause("abort")
                compare(*await publish(engine, weights, version))
                await engine.resume()
                again = await engine.client.generate(request)
                assert {span.version for span in again.versions} == {version}
                np.testing.assert_allclose(again.logprobs, plain_logprobs(model, request, again), atol=2e-5)

            assert member.connection.info.ranks == 2
            assert {OTHER, "sglang::scheduler_TP0"} <= ranks().keys()
            before = await engine.client.generate(request)
            np.testing.assert_allclose(before.logprobs, plain_logprobs(model, request, before), atol=2e-5)

            weights = changed(model)
            await check_again(1)

            os.killpg(os.getpgid(ranks()[OTHER].pid), signal.SIGKILL)
            await until(lambda: member.condition is Condition.WAITING)
            assert member.restarts == 1 and "exited with code" in member.error
            await check_again(2)

            (beside,) = (actor for actor in context.cluster._actors if actor.name == "engine-0-node-1")
            await beside.stop()  # as if its machine had failed; then the whole server is restarted
            await until(lambda: member.condition is Condition.WAITING)
            assert member.restarts == 2 and "server process on another machine: engine-0-node-1 " in member.error
            await check_again(3)
        finally:
            await engine.close()
            await context.cluster.close()

    asyncio.run(test())
    assert not ranks()
    logs = {file.name: file.read_text() for file in (tmp_path / "logs").iterdir()}
    assert logs["engine-0-server.log"].count("ready to roll") == 3
    assert logs["engine-0-node-1-server.log"].count("Dummy health check server started") == 3
    told = [
        json.loads((tmp_path / f"engines/{name}/arguments.json").read_text())
        for name in ("engine-0", "engine-0-node-1")
    ]
    assert [one["nnodes"] for one in told] == [2, 2] and [one.get("node_rank", 0) for one in told] == [0, 1]
    assert told[0]["dist_init_addr"] == told[1]["dist_init_addr"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_process_that_ends_on_another_machine_while_starting_is_reported(sglang, tiny_model, tmp_path):
    async def test():
        context = spanning(tiny_model, tmp_path)
        building = asyncio.ensure_future(context.config.rollout.build(context))
        try:
            await until(lambda: OTHER in ranks() or building.done())
            os.killpg(os.getpgid(ranks()[OTHER].pid), signal.SIGKILL)
            await building
        finally:
            await context.cluster.close()

    with pytest.raises(EngineError, match=r"^engine-0-node-1: exited with code -9 while starting; last output: "):
        asyncio.run(test())
    assert not ranks()
