"""The order in which waiting requests are sent if a worker has more than it may send."""

import asyncio

import pytest
from plasmid.testing.virtual_time import run_virtual
from plasmid.types import Completion, StopReason
from plasmid_serving import client as module
from plasmid_serving.api import ServerAddress
from plasmid_serving.client import ClientOptions, Endpoints, EndpointsFile, ServersClient
from plasmid_serving.completions import empty_completion

from tests.engine_cases import make_request

OPEN = Endpoints(urls=(ServerAddress("http://127.0.0.1:1"),), context_length=1000)
CLOSED = Endpoints(is_open=False, context_length=1000)


class Server:
    """Records the requests that are sent, and answers them when the test says so."""

    def __init__(self, monkeypatch, folder):
        self.sent, self.answers = [], {}
        self.endpoints = EndpointsFile(folder / "endpoints.json")
        self.endpoints.write(OPEN)
        monkeypatch.setattr(module._LoopClient, "_send_once", self.send_once)
        self.client = ServersClient(ClientOptions(endpoints=self.endpoints, dialect=None, max_requests=2))

    async def send_once(self, address, request, allowed, limit_s):
        self.sent.append(request.session_id)
        self.answers[request.session_id] = asyncio.get_running_loop().create_future()
        return empty_completion(request, await self.answers[request.session_id])

    async def roll_out(self, index):
        """As in rollouts: aborted requests are sent again."""
        request = make_request(index)
        while (await self.client.generate(request)).stop_reason is StopReason.ABORT:
            pass
        await self.client.end_sessions([request.session_id])

    def answer(self, *indices, reason=StopReason.STOP):
        for index in indices:
            self.answers.pop(f"{index}/0").set_result(reason)


@pytest.fixture
def server(monkeypatch, tmp_path):
    return Server(monkeypatch, tmp_path)


def test_requests_that_a_pause_aborted_are_sent_before_those_that_wait(server):
    async def test():
        rollouts = [asyncio.create_task(server.roll_out(index)) for index in range(4)]
        await asyncio.sleep(1)
        assert server.sent == ["0/0", "1/0"]
        server.endpoints.write(CLOSED)
        server.answer(1, 0, reason=StopReason.ABORT)
        await asyncio.sleep(1)
        assert server.sent == ["0/0", "1/0"], "requests are held back while the engine pauses"
        server.endpoints.write(OPEN)
        await asyncio.sleep(1)
        assert server.sent[2:] == ["0/0", "1/0"]
        server.answer(0, 1)
        await asyncio.sleep(1)
        assert server.sent[4:] == ["2/0", "3/0"]
        server.answer(2, 3)
        await asyncio.gather(*rollouts)

    run_virtual(test())


def test_later_turns_of_a_rollout_are_sent_before_rollouts_that_wait(server):
    async def test():
        first = [asyncio.create_task(server.client.generate(make_request(index))) for index in (0, 1)]
        others = [asyncio.create_task(server.roll_out(index)) for index in (2, 3)]
        await asyncio.sleep(1)
        second = asyncio.create_task(server.client.generate(make_request(1)))
        await asyncio.sleep(1)
        server.answer(0)
        await asyncio.sleep(1)
        assert server.sent == ["0/0", "1/0", "1/0"]
        second.cancel()
        first[1].cancel()
        await asyncio.sleep(1)
        assert server.sent[3:] == ["2/0", "3/0"], "cancelled requests return their slots"
        server.answer(2, 3)
        await asyncio.gather(*others)

    run_virtual(test())


def test_a_request_that_gets_no_slot_fails_at_its_deadline_and_keeps_none(server):
    async def test():
        server.endpoints.write(CLOSED)
        late = await server.client.generate(make_request(0))
        assert isinstance(late, Completion) and late.error == "no answer within 240 s: no server is ready"
        server.endpoints.write(OPEN)
        rollouts = [asyncio.create_task(server.roll_out(index)) for index in (1, 2)]
        await asyncio.sleep(1)
        assert server.sent == ["1/0", "2/0"]
        server.answer(1, 2)
        await asyncio.gather(*rollouts)

    run_virtual(test())
