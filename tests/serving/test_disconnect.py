"""A client that has been disconnected opens no connections again, although rollouts still use it."""

import asyncio
import gc

import pytest
from aiohttp import web
from plasmid.errors import EngineError
from plasmid_serving.api import HttpApi, ServerAddress
from plasmid_serving.client import ClientOptions, Endpoints, EndpointsFile, ServersClient

from tests.engine_cases import make_request


class Dialect:
    """API of a server that never answers."""

    def request(self, request, *, rid, max_new_tokens):
        return "/generate", {}, {}

    async def abort(self, api, ids):
        await api.post("/abort", {})


async def serve(calls):
    async def answer(request):
        calls.append(request.path)
        await asyncio.Event().wait()

    runner = web.AppRunner(app := web.Application())
    app.router.add_post("/{name}", answer)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0.1).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def test_rollouts_of_a_disconnected_client_end_and_leave_no_session(tmp_path):
    async def test():
        calls = []
        runner, url = await serve(calls)
        address = ServerAddress(url)
        endpoints = EndpointsFile(tmp_path / "endpoints.json")
        endpoints.write(Endpoints(urls=(address,), servers=(address,), context_length=1000))
        client = ServersClient(ClientOptions(endpoints=endpoints, dialect=Dialect(), max_requests=2))
        rollouts = [asyncio.create_task(client.generate(make_request(index))) for index in range(2)]
        while len(calls) < 2:
            await asyncio.sleep(0.01)
        await client.disconnect()
        for rollout in rollouts:  # they would send the request again
            with pytest.raises(EngineError, match=r"the connections of this client have been closed$"):
                await asyncio.wait_for(rollout, 30)
        await client.abort(["0/0"])
        await client.disconnect()
        assert calls == ["/generate"] * 2
        await runner.cleanup()

    asyncio.run(test())
    gc.collect()  # an unclosed session is an error


def test_a_closed_api_opens_no_session():
    async def test():
        api = HttpApi("http://user:secret@127.0.0.1:1")
        api.session()
        await api.close()
        with pytest.raises(EngineError, match=r"^http://127.0.0.1:1: the connections of this client have been closed$"):
            await api.get("/health")

    asyncio.run(test())
    gc.collect()
