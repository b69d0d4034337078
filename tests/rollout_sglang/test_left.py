"""A weight broadcast during which one of the servers dies."""

import asyncio
import os
import signal

import numpy as np
import pytest
from plasmid.errors import EngineLostError
from plasmid_models.sync import send_weights
from plasmid_serving.supervisor import Condition
from sgl_cases import changed, make_request, plain_logprobs, plain_model, publish, started


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_server_that_dies_in_a_broadcast_does_not_hold_the_others(sglang, servers, tiny_model, tmp_path):
    model = plain_model(tiny_model)
    request = make_request(3, num=12)

    async def test():
        settings = {"ranks": 2, "wire": "broadcast", "bucket_bytes": 100_000, "health_interval_s": 60.0}
        async with started(tiny_model, tmp_path, **settings) as engine:
            weights = changed(model)
            await engine.pause("abort")
            await publish(engine, weights, 1)  # they have joined the group
            plan = await engine.plan_sync()
            os.killpg(servers()[0].pid, signal.SIGKILL)
            sending = asyncio.to_thread(send_weights, weights, plan=plan, version=2, rank=0)
            found = await asyncio.gather(sending, engine.receive(plan, 2), return_exceptions=True)
            assert [type(error) for error in found] == [EngineLostError, EngineLostError], found
            (left,) = (member for member in engine.supervisor.all if member.error)
            (other,) = (member for member in engine.supervisor.all if member is not left)
            assert left.condition is not Condition.STOPPED and "aborted by" not in left.error
            assert other.condition is Condition.WAITING and other.restarts == 0
            await publish(engine, weights, 2)  # as the loop does then
            await engine.resume()
            assert other.condition is Condition.SERVING and other.restarts == 0
            return await engine.client.generate(request)

    after = asyncio.run(test())
    assert {span.version for span in after.versions} == {2}
    np.testing.assert_allclose(after.logprobs, plain_logprobs(model, request, after), atol=2e-5)
