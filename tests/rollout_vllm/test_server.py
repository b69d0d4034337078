"""The HTTP server around vLLM's engine, and the sampler, with stand-ins for vLLM's own classes."""

import asyncio
import contextlib
import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import vllm_stub
from plasmid.errors import EngineError
from plasmid.types import StopReason, VersionSpan
from plasmid.types.routing import Routing
from plasmid_serving.api import HttpApi
from plasmid_serving.dialect import ServerInfo
from plasmid_serving.processes.ports import reserve_ports
from plasmid_vllm.completions import completion, request_body
from plasmid_vllm.dialect import VLLMDialect

from tests.engine_cases import make_request

DIALECT = VLLMDialect(arguments={}, worker="w", ranks=1, python="", environment={})
INFO = ServerInfo(release="0.32.0", context_length=256, ranks=1)


@pytest.fixture
def server_module(monkeypatch):
    vllm_stub.install(monkeypatch)
    from plasmid_vllm import server

    return server


def test_vllm_starts_its_engine_once_the_trainer_on_its_gpus_has_loaded(server_module, monkeypatch):
    from plasmid_vllm import launch

    events = []

    def from_engine_args(arguments, stat_loggers):
        events.append("loads")
        raise SystemExit

    async_llm = sys.modules["vllm.v1.engine.async_llm"]
    monkeypatch.setattr(async_llm, "AsyncLLM", SimpleNamespace(from_engine_args=from_engine_args))
    monkeypatch.setattr(launch, "wait_until_allowed", lambda: events.append("allowed"))
    with reserve_ports("127.0.0.1") as port, mock.patch.dict(os.environ), pytest.raises(SystemExit):
        launch.serve(
            {"host": "127.0.0.1", "port": port, "name": "", "api_key": "key", "engine": {}, "worker": "w", "ranks": 1}
        )
    assert events == ["allowed", "loads"]


class Engine:
    """Records its calls. Requests run until they are aborted."""

    model_config = SimpleNamespace(max_model_len=256, get_vocab_size=lambda: 100)
    sampling = None

    def __init__(self):
        self.calls, self.ended = [], {}

    def __getattr__(self, name):
        async def call(*args, **kwargs):
            self.calls.append((name, *args, *kwargs.items()))

        return call

    async def generate(self, prompt, sampling, rid):
        if sampling.temperature > 2:
            raise vllm_stub.ClientError("temperature must be in [0, 2]")
        self.sampling = sampling
        self.calls.append(("generate", prompt["prompt_token_ids"], sampling.logprobs))
        self.ended[rid] = asyncio.Event()
        await self.ended[rid].wait()
        drawn = SimpleNamespace(start_indices=[0], end_indices=[1], token_ids=[5], logprobs=[-0.5])
        spans = [SimpleNamespace(version="3", start=0, end=1)]
        one = SimpleNamespace(token_ids=[5], logprobs=drawn, weight_versions=spans, finish_reason="abort")
        yield SimpleNamespace(outputs=[one])

    async def abort(self, rids):
        for rid in rids:
            self.ended[rid].set()


@contextlib.asynccontextmanager
async def serving(server_module):
    server = server_module.Server("name", "key", ranks=1)
    with reserve_ports("127.0.0.1") as port:  # as while vLLM's modules are imported
        await server.listen("127.0.0.1", port)
    api, stranger = (HttpApi(f"http://127.0.0.1:{port}", key, timeout_s=10) for key in ("key", "other"))
    try:
        yield server, api, stranger
    finally:
        await api.close()
        await stranger.close()
        await server.close()


def test_nothing_is_answered_without_the_key_or_before_the_model_is_loaded(server_module):
    async def test():
        async with serving(server_module) as (server, api, stranger):
            with pytest.raises(EngineError, match="answered 503"):
                await DIALECT.served_name(api)
            server.engine = Engine()
            for call in (DIALECT.served_name, DIALECT.loads, DIALECT.resume, lambda a: DIALECT.abort(a, "all")):
                with pytest.raises(EngineError, match="answered 401"):
                    await call(stranger)
            assert server.engine.calls == []
            assert await DIALECT.served_name(api) == "name"
            assert await DIALECT.describe(api) == INFO
            server.load.cache_queries, server.load.cache_hits, server.load.tokens = 10, 4, 7
            (load,) = await DIALECT.loads(api)
            assert (load.tokens, load.fractions["cache_hit_rate"]) == (7, 0.4)
            assert server.engine.calls == [("collective_rpc", "check_health")]  # the workers were called

    asyncio.run(test())


def test_an_update_reaches_the_workers_then_drops_what_was_computed_then_names_the_version(server_module):
    async def test():
        async with serving(server_module) as (server, api, _):
            server.engine = engine = Engine()
            await DIALECT.pause(api, "in_place")
            await DIALECT.update(api, INFO, b"{}", version=4, flush_cache=True)
            await DIALECT.resume(api)
            assert engine.calls == [
                ("pause_generation", ("mode", "keep"), ("clear_cache", False)),
                ("collective_rpc", "run_command", ("args", (b"{}",))),
                ("reset_prefix_cache", ("reset_running_requests", True)),
                ("update_weight_version", "4"),
                ("resume_generation",),
            ]
            del engine.calls[:]
            await DIALECT.update(api, INFO, b"{}", version=None, flush_cache=False)  # reads checksums
            assert [name for name, *_ in engine.calls] == ["collective_rpc"]

    asyncio.run(test())


def test_requests_are_ended_by_the_beginning_of_their_id(server_module):
    requests = {rid: make_request(rid, tokens=(7, 8), top_k=99) for rid in (1, 10)}

    async def ask(api, rid, request):
        body = request_body(request, rid=f"{rid}~0", max_new_tokens=5)
        body["sampling"]["logprobs"] = 115
        return completion(request, 200, await api.post("/generate", body))

    async def test():
        async with serving(server_module) as (server, api, _):
            server.engine = engine = Engine()
            asked = {rid: asyncio.create_task(ask(api, rid, request)) for rid, request in requests.items()}
            while len(engine.ended) < 2:
                await asyncio.sleep(0.01)
            assert engine.calls[0] == ("generate", [7, 8], 100), "no more than there are tokens"
            await DIALECT.abort(api, ["1~"])
            cut = await asked[1]
            assert not asked[10].done()
            await DIALECT.abort(api, "all")
            await asked[10]
            assert cut.stop_reason is StopReason.ABORT and cut.token_ids.tolist() == [5]
            assert cut.versions == (VersionSpan(version=3, start=0, end=1),)
            with pytest.raises(EngineError, match=r"answered 400: .*temperature must be in"):
                await ask(api, 3, make_request(3, temperature=2.5))

    asyncio.run(test())


def test_vllm_gets_biases_by_token_and_grammars_as_an_object(server_module):
    async def test():
        async with serving(server_module) as (server, api, _):
            server.engine = engine = Engine()
            request = make_request(1, logit_bias={"5": 1.5}, json_schema={"type": "object"})
            body = request_body(request, rid="1~0", max_new_tokens=5)
            asked = asyncio.create_task(api.post("/generate", body))
            while not engine.ended:
                await asyncio.sleep(0.01)
            await DIALECT.abort(api, "all")
            await asked
            assert engine.sampling.logit_bias == {5: 1.5} and not engine.sampling.detokenize
            assert engine.sampling.structured_outputs.json == {"type": "object"}

    asyncio.run(test())


def test_experts_of_a_request_are_taken_from_the_workers_when_it_ends(server_module):
    routing = Routing(layers=1, choices=2, experts=8)
    request = replace(make_request(1, tokens=(7, 8, 9)), routing=routing, experts_from=1)
    body = request_body(request, rid="1~0", max_new_tokens=5)

    class Recording(Engine):
        async def collective_rpc(self, method, args):
            self.calls.append((method, *args))
            return [bytes([1, 2, 3, 4]), b""]

    async def test():
        async with serving(server_module) as (server, api, _):
            server.engine = engine = Recording()
            asked = asyncio.create_task(api.post("/generate", body))
            while not engine.ended:
                await asyncio.sleep(0.01)
            assert engine.sampling.extra_args == {"record_as": "1~0", "experts_from": 1}
            await DIALECT.abort(api, "all")
            found = completion(request, 200, await asked)
            assert found.experts.tolist() == [[[1, 2]], [[3, 4]]] and found.experts.dtype == np.uint8
            assert engine.calls[1:] == [("take_experts", "1~0", 2)]  # of 8 and 9: 5 was not processed
            engine.ended.clear()
            cancelled = asyncio.create_task(api.post("/generate", body))
            while not engine.ended:
                await asyncio.sleep(0.01)
            cancelled.cancel()
            while len(engine.calls) < 4:
                await asyncio.sleep(0.01)
            assert engine.calls[3] == ("take_experts", "1~0", 0), "the workers forget them"

    asyncio.run(asyncio.wait_for(test(), 60))


def test_gauges_count_the_time_while_requests_run(server_module, monkeypatch):
    times = iter([0.0, 1.0, 3.0, 8.0])
    monkeypatch.setattr(server_module.time, "monotonic", lambda: next(times))
    load = server_module.EngineLoad()
    gauges = server_module.Gauges(load)
    cache = SimpleNamespace(queries=10, hits=4)
    for running in (2, 0, 0):
        stats = SimpleNamespace(
            num_running_reqs=running, num_waiting_reqs=1, kv_cache_usage=0.5, prefix_cache_stats=cache
        )
        gauges.record(stats, SimpleNamespace(num_generation_tokens=5))
    assert (load.tokens, load.seconds, load.queued, load.cache_hits) == (15, 2.0, 1, 12)


def test_log_probabilities_are_whole_and_what_was_cut_is_minus_infinity(monkeypatch):
    vllm_stub.install(monkeypatch)
    from plasmid_vllm.worker_process.sampler import WholeSampler

    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0], [0.0, 3.0, 1.0, 2.0]])
    metadata = SimpleNamespace(temperature=torch.tensor([0.5, 2.0]), all_greedy=False, max_num_logprobs=0)
    drawn, found = WholeSampler().sample(logits.clone(), metadata)
    whole = (logits / torch.tensor([[0.5], [2.0]])).log_softmax(-1).numpy()
    assert drawn.tolist() == [0, 1]
    np.testing.assert_allclose(found[0, :2].numpy(), whole[0, :2], rtol=1e-6)
    np.testing.assert_allclose(found[1, [1, 3]].numpy(), whole[1, [1, 3]], rtol=1e-6)
    assert found.isneginf().sum(-1).tolist() == [2, 2]
    greedy = SimpleNamespace(temperature=None, all_greedy=True, max_num_logprobs=0)
    _, plain = WholeSampler().sample(logits.clone(), greedy)
    np.testing.assert_allclose(plain.numpy(), logits.log_softmax(-1).numpy(), rtol=1e-6)
