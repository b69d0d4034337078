"""Weight updates over every wire that needs no GPU: complete and verified, or the engine does not serve."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from plasmid.errors import EngineError, SyncError
from plasmid.types import StopReason
from plasmid_models.sync import compare, make_buckets, send_weights
from plasmid_serving.weights.read_back import equals_sent
from plasmid_sglang.dialect import SGLangDialect
from plasmid_workflows.turns import join_completions
from sgl_cases import changed, make_request, plain_logprobs, plain_model, publish, started

from tests.engine_cases import check_adapter_syncs

WIRES = ["http", "disk", "broadcast"]


@pytest.mark.parametrize("wire", WIRES)
def test_an_update_makes_the_engine_the_new_model(shared, wire, tmp_path):
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


@pytest.mark.parametrize("wire", ["http", *(pytest.param(n, marks=pytest.mark.long) for n in WIRES[1:])])
def test_an_adapter_alone_makes_the_engine_the_new_model(shared, wire):
    check_adapter_syncs(shared, wire=wire, read_back_every=2)


def test_files_of_the_disk_wire_are_gone_afterwards(shared):
    async def test():
        async with shared.engine(wire="disk") as engine:
            await engine.pause("abort")
            plan = await engine.plan_sync()
            folder = Path(plan.wire.command.folder)
            weights = list(plain_model(shared.model_path).named_parameters())
            sending = asyncio.to_thread(send_weights, weights, plan=plan, version=1, rank=0)
            await asyncio.gather(sending, engine.receive(plan, 1))
            return folder

    folder = shared.run(test())
    assert folder.name.startswith("weights-") and not folder.exists()


@pytest.mark.parametrize("mode", ["abort", "in_place"])
def test_tokens_of_requests_across_an_update_have_the_version_that_drew_them(shared, mode):
    old, new = plain_model(shared.model_path), plain_model(shared.model_path)
    weights = changed(new, by=0.02)
    requests = [make_request(i, num=200, temperature=3.0, ignore_eos=True) for i in range(8)]

    async def whole(engine, request):
        """As in rollouts: aborted requests are sent again with the tokens so far."""
        parts = []
        asked = request
        while not parts or parts[-1].stop_reason is StopReason.ABORT:
            parts.append(await engine.client.generate(asked))
            so_far = np.concatenate([asked.token_ids, parts[-1].token_ids])
            asked = replace(asked, token_ids=so_far, num_generated=asked.num_generated + len(parts[-1].token_ids))
        return join_completions(parts)

    async def test():
        async with shared.engine(pause_mode=mode) as engine:
            await engine.metrics()
            tasks = [asyncio.create_task(whole(engine, request)) for request in requests]
            while not (await engine.metrics())["engine/tokens_per_s"]:  # since the last check
                await asyncio.sleep(0.02)
            await engine.pause(engine.pause_mode)
            await publish(engine, weights, 1)
            await engine.resume()
            return await asyncio.gather(*tasks)

    completions = shared.run(test())
    crossed = [(r, c) for r, c in zip(requests, completions, strict=True) if len(c.versions) == 2]
    assert crossed, [c.versions for c in completions]
    for request, completion in crossed:
        first, second = completion.versions
        assert (first.version, second.version) == (0, 1)
        assert (first.start, first.end, second.end) == (0, second.start, len(completion.token_ids))
        by_old, by_new = (plain_logprobs(model, request, completion) for model in (old, new))
        np.testing.assert_allclose(completion.logprobs[: first.end], by_old[: first.end], atol=5e-5)
        np.testing.assert_allclose(completion.logprobs[first.end :], by_new[first.end :], atol=5e-5)
        assert np.abs(by_old - by_new).max() > 1e-3


def broken_sender(kind, weights, plan):
    """Send weights incorrectly as a trainer rank; return the sender's exception."""
    sender = plan.wire.open(rank=0, version=1)
    buckets = list(make_buckets(weights, bucket_bytes=100_000))
    if kind == "corrupt":
        buckets[1].data[7] += 1
    ok = False
    try:
        for bucket in buckets[:-1] if kind == "aborted" else buckets:
            sender.send(bucket)
        ok = kind != "aborted"
    finally:
        sender.close(ok=ok)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("corrupt", "bucket 1 has checksum"),
        ("aborted", "aborted by the sender"),
        ("incomplete", "of the engine's parameters were not sent, the first is 'model.layers.1"),
        ("other name", "tensor 'model.other.weight' was loaded into none of the engine's parameters"),
    ],
)
def test_after_a_failed_update_nothing_is_served_until_one_succeeds(shared, kind, message):
    async def test():
        async with shared.engine(read_back_every=1) as engine:
            gave_up = []

            async def note(member, error):
                gave_up.append(error)

            engine.supervisor.remove_from_service = note  # the shared server must not be restarted
            weights = list(plain_model(shared.model_path).named_parameters())
            if kind == "incomplete":
                weights = [(name, tensor) for name, tensor in weights if not name.startswith("model.layers.1.mlp")]
            if kind == "other name":
                weights[3] = ("model.other.weight", weights[3][1])
            await engine.pause("abort")
            plan = await engine.plan_sync()
            sending = asyncio.to_thread(broken_sender, kind, weights, plan)
            results = await asyncio.gather(sending, engine.receive(plan, 1), return_exceptions=True)
            with pytest.raises(SyncError, match="no server has a complete version"):
                await engine.resume()
            asked = asyncio.create_task(engine.client.generate(make_request(1)))
            await asyncio.sleep(0.3)
            assert not asked.done()
            assert engine.needs_weights()
            await publish(engine, list(plain_model(shared.model_path).named_parameters()), 2)
            await engine.resume()
            return results[1], gave_up, await asked

    error, gave_up, after = shared.run(test())
    assert isinstance(error, SyncError) and message in str(error)
    assert len(gave_up) == 1 and message in gave_up[0]
    assert {span.version for span in after.versions} == {2}


def test_an_update_whose_sender_never_comes_ends_in_time(shared):
    async def test():
        async with shared.engine() as engine:
            engine.supervisor.remove_from_service = lambda member, error: asyncio.sleep(0)
            engine._planner.timeout_s = 0.5
            plan = await engine.plan_sync()
            with pytest.raises(SyncError, match=r"not finished within 0\.5 s"):
                await engine.receive(plan, 4)
            engine._planner.timeout_s = 240

    shared.run(test())


def test_stragglers_of_a_replaced_update_are_refused(shared):
    async def test():
        async with shared.engine() as engine:
            weights = list(plain_model(shared.model_path).named_parameters())
            engine.supervisor.remove_from_service = lambda member, error: asyncio.sleep(0)
            await engine.pause("abort")
            old = await engine.plan_sync()
            sender = old.wire.open(rank=0, version=1)
            receiving = asyncio.create_task(engine.receive(old, 1))
            await asyncio.sleep(0.2)
            await publish(engine, weights, 2)
            sender.send(next(make_buckets(weights, bucket_bytes=100_000)))
            with pytest.raises(SyncError, match="replaced by a later one"):
                await asyncio.to_thread(sender.close, ok=True)
            with pytest.raises(SyncError, match="replaced by a later one"):
                await receiving
            await engine.resume()
            return await engine.client.generate(make_request(1))

    assert {span.version for span in shared.run(test()).versions} == {2}


def test_the_endpoints_file_contains_the_context_length(shared):
    async def test():
        async with shared.engine() as engine:
            await engine.checksum()

    shared.run(test())
    assert json.loads(next(shared.run_dir.rglob("endpoints.json")).read_text())["context_length"] == 256


def test_a_sleeping_server_keeps_the_weights_that_nobody_sends_again(shared, monkeypatch):
    """SGLang has no copy of them: released weights are lost."""
    calls = []

    async def note(self, api, parts, *, is_held):
        calls.append(("resume" if is_held else "release", sorted(parts)))

    monkeypatch.setattr(SGLangDialect, "set_memory", note)

    async def test():
        async with shared.engine() as engine:
            engine._can_sleep = True
            for keep in (True, False):
                await engine.sleep(keep_weights=keep)
                await engine.wake(kv_cache=False)
                await engine.wake()

    shared.run(test())
    assert calls == [
        ("release", ["kv_cache"]),
        ("resume", ["kv_cache"]),
        ("release", ["kv_cache", "weights"]),
        ("resume", ["weights"]),
        ("resume", ["kv_cache"]),
    ]


def test_a_server_error_names_url_and_status(shared):
    async def test():
        async with shared.engine() as engine:
            api = engine.supervisor.all[0].connection.api
            with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:\d+/no_such_call: answered 404"):
                await api.post("/no_such_call")

    shared.run(test())


def test_a_tensor_is_found_in_fused_sharded_and_padded_parameters():
    tensor = torch.arange(24.0).view(6, 4)
    assert equals_sent(tensor.flatten(), tensor)
    assert equals_sent(tensor[3:].flatten(), tensor)
    assert equals_sent(tensor[:, 2:].flatten(), tensor)
    assert equals_sent(tensor.T.flatten(), tensor)
    assert not equals_sent(tensor.flatten() + 1, tensor)
    assert not equals_sent(tensor.flatten()[:5], tensor)


def test_the_rank_that_holds_the_end_of_a_padded_tensor_has_a_rest():
    tensor = torch.arange(57 * 4).reshape(57, 4).float()  # 57 rows, which two ranks pad to 64
    assert equals_sent(tensor[:32].flatten(), tensor) and equals_sent(tensor[32:].flatten(), tensor)
    assert equals_sent(tensor[16:32].flatten(), tensor) and equals_sent(tensor[48:].flatten(), tensor)  # four ranks
    assert not equals_sent(tensor[1:33].flatten(), tensor) and not equals_sent(tensor[31:56].flatten(), tensor)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_servers_of_two_groups_have_their_arguments_and_serve_the_same_weights(sglang, tiny_model, tmp_path):
    groups = [{"engines": 1, "server_args": {"max_total_tokens": n}} for n in (2048, 3072)]
    request = make_request(1, num=8, temperature=0.0)

    async def test():
        async with started(tiny_model, tmp_path, ranks=2, groups=groups) as engine:
            await engine.pause("abort")
            await publish(engine, changed(plain_model(tiny_model)), 1)
            await engine.resume()
            connections = [server.connection for server in engine.supervisor.all]
            found = [(await c.api.get("/get_server_info"))["max_total_tokens"] for c in connections]
            completions = []
            for connection in connections:
                asked = connection.dialect.request(request, rid="1", max_new_tokens=8)
                answer = await connection.api.post(asked.path, asked.body)
                completions.append(connection.dialect.completion(request, 200, answer))
            return found, completions

    found, (first, second) = asyncio.run(test())
    assert found == [2048, 3072]
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert [span.version for span in (*first.versions, *second.versions)] == [1, 1]
