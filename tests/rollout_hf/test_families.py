"""Sliding windows, attention sinks and linear attention: log-probabilities equal those of a plain forward pass."""

import asyncio

import numpy as np
import pytest
from hf_cases import changed, generate_all, make_request, plain_logprobs, plain_model, publish, run, started
from megatron_families import LINEAR, WINDOWS, folders_of_families

FAMILIES = [*WINDOWS, *LINEAR]
LENGTHS = [2, 3, 3, 9, 17, 17, 30]
"""Prompt lengths: shorter than the convolution of linear attention, equal, and longer than the windows."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return folders_of_families(tmp_path_factory)


def requests_of(lengths):
    """Create requests that end at different times, so that rows change slots; the last one repeats a prompt."""
    made = [
        make_request(i, length=n, sampling={"temperature": 0.8, "max_new_tokens": 4 + 9 * (i % 3)})
        for i, n in enumerate(lengths)
    ]
    return [*made, make_request(len(lengths) - 1, length=lengths[-1], id_="again", session="again", seed=5)]


def assert_plain(model, requests, completions):
    for request, completion in zip(requests, completions, strict=True):
        assert len(completion.token_ids) > 0 and completion.error is None
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, request, completion), atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_a_plain_forward_pass(family, models):
    requests = requests_of(LENGTHS)

    async def test():
        async with started(models(family), max_batch=5, prefill_tokens=40) as engine:
            return await generate_all(engine, requests)

    assert_plain(plain_model(models(family)), requests, run(test()))


@pytest.mark.parametrize("family", ["gpt-oss", "Qwen3.5"])
def test_a_paused_request_continues_with_new_weights(family, models):
    model, request = plain_model(models(family)), make_request(1, length=9, sampling={"max_new_tokens": 200})

    async def test():
        async with started(models(family)) as engine:
            running = asyncio.create_task(engine.client.generate(request))
            while not (await engine.metrics())["engine/new_tokens"]:
                await asyncio.sleep(0.01)
            await engine.pause("in_place")
            await publish(engine, changed(model), 1)
            await engine.resume()
            return await running

    completion = run(test())
    second = completion.versions[-1]
    assert second.version == 1 and 0 < second.start < second.end
    expected = plain_logprobs(model, request, completion)
    np.testing.assert_allclose(completion.logprobs[second.start :], expected[second.start :], atol=2e-5)


@pytest.mark.parametrize("family", ["gpt-oss", "Qwen3-Next"])
def test_preemption_by_a_full_cache_does_not_change_samples(family, models):
    requests = [make_request(i, length=20, sampling={"max_new_tokens": 40}) for i in range(4)]

    async def test(**settings):
        async with started(models(family), max_length=64, **settings) as engine:
            return await generate_all(engine, requests)

    for one, other in zip(run(test()), run(test(kv_tokens=64 * 2)), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
