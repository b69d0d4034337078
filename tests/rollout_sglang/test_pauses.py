"""Requests are aborted and new ones held back before a pause, because SGLang waits a second if any is running."""

import asyncio
import logging
from dataclasses import replace

import numpy as np
import pytest
from plasmid.errors import EngineError
from plasmid.types import StopReason
from plasmid_serving.api import HttpApi
from plasmid_sglang import dialect
from plasmid_sglang.dialect import SGLangDialect
from plasmid_workflows.turns import TurnState
from sgl_cases import make_request

REQUESTS = 8
ATTEMPTS = 4
"""Maximum number of pauses until one finds all requests running; on a busy machine some may have ended before."""


class OpenRequests:
    """Records, for each pause, the requests without an answer when SGLang was asked to pause."""

    def __init__(self, monkeypatch, engine):
        self.at_pauses, self._sent, post = [], engine.client._loop_client()._sent, HttpApi.post

        async def note(api, path, body=None):
            if path == "/pause_generation":
                self.at_pauses.append(sorted(self._sent))
            return await post(api, path, body)

        monkeypatch.setattr(HttpApi, "post", note)

    def count(self):
        return len(self._sent)


async def start_requests(engine, attempt):
    """Start rollouts of long requests that the server processes; each is sent again after an abort."""
    await engine.metrics()
    long = {"num": 200, "temperature": 3.0, "ignore_eos": True}
    turns = [TurnState(0, make_request(100 * attempt + i, **long)) for i in range(REQUESTS)]
    tasks = [asyncio.create_task(turn.draw(engine.client)) for turn in turns]
    while not (await engine.metrics())["engine/tokens_per_s"]:  # since the last check
        await asyncio.sleep(0.02)
    return turns, tasks


def test_no_request_runs_when_the_server_is_paused(shared, monkeypatch):
    async def test():
        async with shared.engine(pause_mode="abort") as engine:
            requests = OpenRequests(monkeypatch, engine)
            for attempt in range(ATTEMPTS):
                turns, tasks = await start_requests(engine, attempt)
                running = requests.count()
                await engine.pause("abort")
                await engine.resume()
                completions = await asyncio.gather(*tasks)
                if running == sum(turn.parts[0].stop_reason is StopReason.ABORT for turn in turns) == REQUESTS:
                    return requests.at_pauses[-1], turns, completions
        raise AssertionError("no pause found all requests running")

    at_pause, turns, completions = shared.run(test())
    assert at_pause == []
    for turn, completion in zip(turns, completions, strict=True):
        first = turn.parts[0]
        assert len(completion.token_ids) == 200 and len(completion.logprobs) == 200
        assert completion.token_ids[: len(first.token_ids)].tolist() == first.token_ids.tolist()
        assert np.isfinite(completion.logprobs).all()
    assert any(len(turn.parts[0].token_ids) for turn in turns)


def test_a_failed_pause_leaves_the_engine_open(shared, monkeypatch):
    async def test():
        async with shared.engine() as engine:
            is_open, removed = [], []

            async def fail(self, api, mode):
                is_open.append(engine.endpoints.read().is_open)
                raise failure

            async def note(server, error):
                removed.append(error)

            pause = SGLangDialect.pause
            engine.supervisor.remove_from_service = note  # the shared server must not be restarted
            monkeypatch.setattr(SGLangDialect, "pause", fail)
            failure = EngineError("no answer")
            await engine.pause("abort")
            failure = asyncio.CancelledError()
            with pytest.raises(asyncio.CancelledError):
                await engine.pause("abort")
            monkeypatch.setattr(SGLangDialect, "pause", pause)
            return is_open, removed, await engine.client.generate(make_request(1))

    is_open, removed, completion = shared.run(test())
    assert is_open == [False, False] and removed == ["no answer"]
    assert completion.stop_reason in (StopReason.STOP, StopReason.LENGTH)


class Api:
    """A server whose requests end after some aborts; the loads reported to each check are given."""

    url = "http://127.0.0.1:1"

    def __init__(self, *loads):
        self.loads, self.posts = list(loads), []

    async def get(self, path):
        if path != "/v1/loads":
            return {}
        running, queued = self.loads.pop(0) if len(self.loads) > 1 else self.loads[0]
        return {"loads": [{"num_running_reqs": running, "num_waiting_reqs": queued}]}

    async def post(self, path, body=None):
        self.posts.append((path, body))


ABORT, PAUSE = ("/abort_request", {"abort_all": True}), ("/pause_generation", {"mode": "abort"})


def pause(shared, api, mode):
    server = shared._servers[0].connection
    return asyncio.run(replace(server.dialect, recompute_kv=True).pause(api, mode))


def test_requests_are_aborted_until_none_ran_in_two_checks(shared):
    api = Api((3, 2), (0, 1), (0, 0), (1, 0), (0, 0), (0, 0), (7, 7))
    pause(shared, api, "abort")
    assert api.posts == [ABORT] * 6 + [PAUSE]


def test_only_an_aborting_pause_aborts(shared):
    api = Api((3, 2))
    pause(shared, api, "in_place")
    pause(shared, api, "wait")
    assert api.posts == [("/pause_generation", {"mode": "retract"}), PAUSE]


def test_requests_that_do_not_end_are_left_to_the_pause(shared, monkeypatch, caplog):
    monkeypatch.setattr(dialect, "ABORT_S", 0.0)
    api = Api((3, 2))
    with caplog.at_level(logging.WARNING, logger=dialect.__name__):
        pause(shared, api, "abort")
    assert api.posts == [ABORT, PAUSE]
    assert caplog.messages == ["http://127.0.0.1:1: 5 requests still run 0 s after they were aborted"]
