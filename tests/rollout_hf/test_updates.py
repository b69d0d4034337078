"""Weight updates: complete and verified, or the engine does not serve."""

import asyncio

import numpy as np
import pytest
import torch
from hf_cases import changed, generate_all, make_request, plain_logprobs, plain_model, publish, run, started
from plasmid.errors import EngineError, SyncError
from plasmid.types import VersionSpan
from plasmid_models.sync import checksum, compare, make_buckets
from plasmid_models.testing import make_tiny_model
from test_pausing import long_requests, started_requests


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_an_update_makes_the_engine_the_new_model(tmp_path, tied, ranks):
    path = make_tiny_model(tmp_path / "model", tied=tied)
    model = plain_model(path)
    request = make_request(3)

    async def test():
        async with started(path, ranks=ranks, bucket_bytes=20_000) as engine:
            before = await engine.client.generate(request)
            weights = changed(model)
            await engine.pause("in_place")
            sent, received = await publish(engine, weights, 5)
            await engine.resume()
            return before, sent, received, await engine.checksum(), await engine.client.generate(request)

    before, sent, received, sums, after = run(test())
    compare(sent, received)
    assert len(received.buckets) > 3 and received.version == 5
    assert sums == {name: checksum(tensor) for name, tensor in model.named_parameters()}
    assert before.versions == (VersionSpan(version=0, start=0, end=len(before.token_ids)),)
    assert after.versions == (VersionSpan(version=5, start=0, end=len(after.token_ids)),)
    np.testing.assert_allclose(after.logprobs, plain_logprobs(model, request, after), atol=2e-5)


def test_a_request_across_an_update_has_a_span_of_each_version(tiny_model):
    old, new = plain_model(tiny_model), plain_model(tiny_model)
    weights = changed(new, by=0.02)
    requests = long_requests()

    async def test():
        async with started(tiny_model) as engine:
            tasks = await started_requests(engine, requests)
            await engine.pause("in_place")
            await publish(engine, weights, 1)
            await engine.resume()
            return await asyncio.gather(*tasks)

    crossed = [(r, c) for r, c in zip(requests, run(test()), strict=True) if len(c.versions) == 2]
    assert crossed
    for request, completion in crossed:
        first, second = completion.versions
        assert (first.version, second.version) == (0, 1)
        assert (first.start, first.end, second.end) == (0, second.start, len(completion.token_ids))
        cut = first.end
        by_old, by_new = (plain_logprobs(model, request, completion) for model in (old, new))
        np.testing.assert_allclose(completion.logprobs[:cut], by_old[:cut], atol=2e-5)
        np.testing.assert_allclose(completion.logprobs[cut:], by_new[cut:], atol=2e-5)
        assert np.abs(by_old - by_new).max() > 1e-3


def broken_sender(kind, weights, plan):
    """Send weights incorrectly as a trainer rank; return the sender's exception."""
    sender = plan.wire.open(rank=0, version=1)
    buckets = list(make_buckets(weights, bucket_bytes=20_000))
    if kind == "incomplete":
        buckets = buckets[:-1]
    if kind == "corrupt":
        buckets[1].data[7] += 1
    ok = False
    try:
        for bucket in buckets:
            sender.send(bucket)
        ok = kind != "aborted"
    finally:
        sender.close(ok=ok)


def wrong(kind, weights):
    """Return the weights of another model."""
    weights = list(weights)
    if kind == "other name":
        weights[3] = ("model.other.weight", weights[3][1])
    if kind == "other shape":
        weights[3] = (weights[3][0], torch.zeros(3, 5))
    if kind == "other dtype":
        weights[3] = (weights[3][0], weights[3][1].detach().bfloat16())
    if kind == "twice":
        weights.append(weights[3])
    return weights


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("incomplete", "4 tensors were not sent, the first is 'model.layers.1.input_layernorm.weight'"),
        ("corrupt", "bucket 1 has checksum"),
        ("aborted", "aborted by the sender"),
        ("other name", "the engine's model has no tensor 'model.other.weight'"),
        ("other shape", "has torch.float32 (3, 5), expected torch.float32"),
        ("other dtype", "has torch.bfloat16"),
        ("twice", "was sent twice"),
    ],
)
def test_after_a_failed_update_the_engine_serves_nothing_until_one_succeeds(tiny_model, kind, message):
    model = plain_model(tiny_model)
    request = make_request(3)

    async def test():
        async with started(tiny_model) as engine:
            tasks = await started_requests(engine, long_requests(2))
            weights = changed(model)
            await engine.pause("in_place")
            plan = await engine.plan_sync()
            sending = asyncio.to_thread(broken_sender, kind, wrong(kind, weights), plan)
            results = await asyncio.gather(sending, engine.receive(plan, 1), return_exceptions=True)
            with pytest.raises(SyncError, match="the engine cannot resume: weight sync of version 1"):
                await engine.resume()
            with pytest.raises(EngineError, match="the engine cannot serve: weight sync of version 1"):
                await engine.client.generate(request)
            with pytest.raises(EngineError, match="the engine cannot serve"):
                await engine.health()
            await publish(engine, weights, 2)
            await engine.resume()
            await engine.health()
            held = await asyncio.gather(*tasks)
            return results, held, await engine.client.generate(request)

    (sent, received), held, after = run(test())
    assert isinstance(received, SyncError) and message in str(received)
    assert kind == "aborted" or isinstance(sent, SyncError)
    assert {span.version for completion in held for span in completion.versions} <= {0, 2}
    np.testing.assert_allclose(after.logprobs, plain_logprobs(model, request, after), atol=2e-5)


def test_an_update_whose_sender_never_comes_ends_in_time(tiny_model):
    async def test():
        async with started(tiny_model, sync_timeout_s=0.3) as engine:
            plan = await engine.plan_sync()
            with pytest.raises(SyncError, match=r"not complete within 0\.3 s"):
                await engine.receive(plan, 4)
            with pytest.raises(EngineError):
                await engine.client.generate(make_request(1))

    run(test())


def test_stragglers_of_a_replaced_update_are_refused(tiny_model):
    model = plain_model(tiny_model)

    async def test():
        async with started(tiny_model) as engine:
            old = await engine.plan_sync()
            old_sender = old.wire.open(rank=0, version=1)
            bucket = next(make_buckets(changed(plain_model(tiny_model), by=1.0), bucket_bytes=20_000))
            receiving = asyncio.create_task(engine.receive(old, 1))
            await asyncio.sleep(0.05)
            await publish(engine, list(model.named_parameters()), 2)
            old_sender.send(bucket)
            with pytest.raises(SyncError, match="replaced by a later one"):
                await asyncio.to_thread(old_sender.close, ok=True)
            with pytest.raises(SyncError, match="replaced by a later one"):
                await receiving
            await engine.health()
            return await engine.checksum()

    assert run(test()) == {name: checksum(tensor) for name, tensor in model.named_parameters()}


def test_weights_travel_in_the_engines_type(tiny_model):
    model = plain_model(tiny_model).bfloat16()

    async def test():
        async with started(tiny_model, dtype="bfloat16") as engine:
            plan = await engine.plan_sync()
            await publish(engine, changed(model), 1)
            return plan, await engine.checksum(), await generate_all(engine, long_requests(2))

    plan, sums, completions = run(test())
    assert plan.dtype == "bfloat16"
    assert sums == {name: checksum(tensor) for name, tensor in model.named_parameters()}
    for completion in completions:
        assert np.isfinite(completion.logprobs).all()
