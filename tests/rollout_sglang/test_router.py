"""The SGLang router in front of a real server: it is updated about servers, monitored, and restarted."""

import asyncio
import contextlib

import pytest
from plasmid.types import StopReason
from sgl_cases import make_request


@contextlib.asynccontextmanager
async def routed(shared, **router_args):
    """Start an engine whose endpoints name the router."""
    async with shared.engine(router=True, router_args=router_args) as engine:
        try:
            await until(lambda: engine._router.address)
            yield engine
        finally:
            await engine._router.close()


async def until(what):
    async with asyncio.timeout(120):
        while not what():
            await asyncio.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["round_robin", "consistent_hashing"])
def test_requests_go_through_the_router(shared, policy):
    async def test():
        async with routed(shared, policy=policy) as engine:
            assert engine.endpoints.read().urls == (engine._router.address,)
            return await asyncio.gather(*(engine.client.generate(make_request(i)) for i in range(4)))

    for completion in shared.run(test()):
        assert completion.stop_reason in (StopReason.LENGTH, StopReason.STOP)
        assert len(completion.logprobs) == len(completion.token_ids) > 0


@pytest.mark.long
def test_a_router_that_dies_is_started_anew_and_requests_go_on(shared):
    async def test():
        async with routed(shared) as engine:
            first = engine._router.address
            engine._router._process.kill()
            answer = await engine.client.generate(make_request(1))
            await until(lambda: engine._router.address not in (None, first))
            return answer, await engine.client.generate(make_request(2))

    for completion in shared.run(test()):
        assert completion.stop_reason in (StopReason.LENGTH, StopReason.STOP)


def test_the_router_forgets_a_server_that_does_not_serve(shared):
    async def test():
        async with routed(shared) as engine:
            engine._router.route_to(())
            async with asyncio.timeout(60):
                while (await engine._router._api.get("/workers"))["workers"]:
                    await asyncio.sleep(0.1)

    shared.run(test())
