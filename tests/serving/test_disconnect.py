"""A client that has been disconnected opens no connections again, although rollouts still use it."""

import asyncio
import gc

import pytest
from aiohttp import web
from plasmid.errors import EngineError
from plasmid_serving.api import ServerAddress
from plasmid_serving.client import ClientOptions, Endpoints, EndpointsFile, ServersClient

from tests.engine_cases import make_request


class Dialect:
    """API of a server that never finishes a request."""

    def request(self, request, *, rid, max_new_tokens):
        return "/generate", {}, {}

    async def abort(self, api, ids):
        await api.post("/abort", {})


async def serve(calls):
    async def answer(request):
        calls.append(request.path)
        if request.path == "/generate":
            await asyncio.Event().wait()
        return web.json_response({})

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
        rollouts[1].cancel()  # would let the server drop the request
        await client.disconnect()
        with pytest.raises(EngineError, match=r"cannot send a request, because the client is closed$"):
            await asyncio.wait_for(rollouts[0], 10)  # would send the request again
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(rollouts[1], 10)
        endpoints.write(Endpoints(urls=(ServerAddress(url, "restarted"),), servers=(address,), context_length=1000))
        with pytest.raises(EngineError, match=r"cannot send a request, because the client is closed$"):
            await asyncio.wait_for(client.generate(make_request(2)), 10)
        await client.abort(["0/0"])
        await client.disconnect()
        assert calls == ["/generate"] * 2
        await runner.cleanup()

    asyncio.run(test())
    gc.collect()  # an unclosed session is an error
