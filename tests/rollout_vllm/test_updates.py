"""Weight updates of a real vLLM server: complete and verified, or the engine does not serve."""

import asyncio
import os

import numpy as np
import psutil
import pytest
import torch
from plasmid.errors import SyncError
from plasmid_models.sync import compare
from plasmid_serving.supervisor import Condition
from vllm_cases import make_context

from tests.engine_cases import (
    adapted_layers,
    changed,
    check_adapter_syncs,
    drawn,
    make_request,
    merged,
    plain_logprobs,
    plain_model,
    publish,
    update,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def leaders():
    """Return the servers: child processes that lead a process group."""
    return {p for p in psutil.Process().children() if os.getpgid(p.pid) == p.pid}


@pytest.mark.parametrize("wire", ["http", "disk", "broadcast"])
def test_an_update_makes_the_engine_the_new_model(shared, wire):
    model = plain_model(shared.model_path)
    request = make_request(3, num=12)

    async def test():
        async with shared.engine(wire=wire, bucket_bytes=100_000, read_back_every=1) as engine:
            before = await engine.checksum()
            weights = changed(model)
            await engine.pause(engine.pause_mode)
            sent, received = await publish(engine, weights, 5)
            await engine.resume()
            return before, sent, received, await engine.checksum(), await engine.client.generate(request)

    before, sent, received, sums, after = shared.run(test())
    compare(sent, received)
    assert len(received.buckets) > 3 and received.version == 5
    assert sums.keys() == before.keys() and all(sums[name] != before[name] for name in sums)
    assert {span.version for span in after.versions} == {5}
    np.testing.assert_allclose(after.logprobs, plain_logprobs(model, request, after), atol=2e-5)


@pytest.mark.parametrize("wire", ["http", "disk", "broadcast"])
def test_an_adapter_alone_makes_the_engine_the_new_model(shared, wire):
    check_adapter_syncs(shared, wire=wire, read_back_every=2)


def test_a_tensor_of_another_shape_or_none_at_all_is_refused(shared):
    weights = dict(plain_model(shared.model_path).named_parameters())
    name = "model.layers.1.mlp.down_proj.weight"
    missing = {key: value for key, value in weights.items() if key != name}

    async def test():
        async with shared.engine(read_back_every=1) as engine:
            engine.supervisor.remove_from_service = lambda server, error: asyncio.sleep(0)
            for sent, why in (
                (missing, f"1 of the engine's parameters were not sent, the first is '{name}'"),
                ({**weights, name: torch.zeros(3, 3)}, ""),
            ):
                await engine.pause("abort")
                with pytest.raises(SyncError) as refused:
                    await publish(engine, list(sent.items()), 7)
                assert why in str(refused.value)
                assert engine.supervisor.all[0].condition is Condition.WAITING

    shared.run(test())


def test_a_killed_server_leaves_no_process_and_is_replaced(vllm_python, wide_model, tmp_path):
    before_us = leaders()

    async def test():
        context = make_context(wide_model, tmp_path, health_interval_s=1.0, health_timeout_s=120.0)
        engine = await context.config.rollout.build(context)
        try:
            before = await engine.client.generate(make_request(1))
            (leader,) = leaders() - before_us
            parts = leader.children(recursive=True)
            assert len(parts) >= 2, "vLLM's scheduler and worker"
            leader.kill()
            assert not psutil.wait_procs(parts, timeout=60)[1]
            while engine.supervisor.all[0].restarts == 0 or not engine.supervisor.list_running():
                await asyncio.sleep(0.5)
            after = await engine.client.generate(make_request(1))
            assert after.token_ids.tolist() == before.token_ids.tolist()
        finally:
            await engine.close()
            await context.cluster.close()

    asyncio.run(test())
    assert leaders() == before_us


def test_two_processes_of_a_server_each_hold_their_part(vllm_python, wide_model, tmp_path):
    model, request = plain_model(wide_model), make_request(3, num=12)

    async def test():
        context = make_context(wide_model, tmp_path, ranks=2, gpus_per_engine=2, read_back_every=1, wire="http")
        engine = await context.config.rollout.build(context)
        try:
            weights = changed(model)
            await engine.pause(engine.pause_mode)
            sent, received = await publish(engine, weights, 5)
            await engine.resume()
            compare(sent, received)
            names = {name.rpartition("@")[2] for name in await engine.checksum()}
            return names, await engine.client.generate(request)
        finally:
            await engine.close()
            await context.cluster.close()

    ranks, completion = asyncio.run(test())
    assert ranks == {"0", "1"}
    np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, request, completion), atol=2e-5)
    assert {span.version for span in completion.versions} == {5}


def test_two_processes_of_a_server_each_merge_their_part_of_an_adapter(vllm_python, wide_model, tmp_path):
    base, layers = dict(plain_model(wide_model).named_parameters()), adapted_layers(wide_model)
    first, second, request = drawn(layers, 1), drawn(layers, 2), make_request(3, num=12)

    async def test():
        settings = {"trainer": "adapter-trainer", "read_back_every": 1, "wire": "http"}
        context = make_context(wide_model, tmp_path, ranks=2, gpus_per_engine=2, **settings)
        engine = await context.config.rollout.build(context)
        try:
            modes = [(await update(engine, {**first, **base}, 1))[0], (await update(engine, second, 2))[0]]
            return modes, await engine.client.generate(request)
        finally:
            await engine.close()
            await context.cluster.close()

    modes, completion = asyncio.run(test())
    assert modes == ["with_base", "alone"]
    expected = plain_logprobs(merged(wide_model, second), request, completion)
    np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)
