"""Pause, resume, abort and sleep: which requests are held or end, and that results do not change."""

import asyncio

import numpy as np
import pytest
from hf_cases import generate_all, make_request, run, started
from plasmid.types import StopReason

LONG = {"max_new_tokens": 230, "temperature": 1.0}


def long_requests(count=4):
    """Create requests that do not end soon: with these seeds the end of text is sampled late."""
    return [make_request(i, seed=seed, sampling=LONG) for i, seed in enumerate(range(40, 40 + count))]


async def started_requests(engine, requests):
    """Return the requests as tasks, once all of them have started generating."""
    tasks = [asyncio.create_task(engine.client.generate(request)) for request in requests]
    while (await engine.metrics())["engine/new_tokens"] < 3 * len(requests):
        await asyncio.sleep(0.002)
    return tasks


def test_requests_paused_in_place_continue_unchanged(tiny_model):
    async def test():
        async with started(tiny_model) as engine:
            undisturbed = await generate_all(engine, long_requests())
        async with started(tiny_model) as engine:
            tasks = await started_requests(engine, long_requests())
            await engine.pause("in_place")
            before = (await engine.metrics())["engine/steps"]
            await asyncio.sleep(0.1)
            after = (await engine.metrics())["engine/steps"]
            await engine.resume()
            return undisturbed, await asyncio.gather(*tasks), after - before

    undisturbed, held, steps = run(test())
    assert steps == 0
    for one, other in zip(undisturbed, held, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()


def test_sleep_drops_the_cache_and_held_requests_go_on_unchanged(tiny_model):
    async def test():
        async with started(tiny_model) as engine:
            undisturbed = await generate_all(engine, long_requests())
            tasks = await started_requests(engine, long_requests())
            await engine.pause("in_place")
            await engine.sleep()
            asleep = await engine.metrics()
            await engine.resume()
            await engine.wake(kv_cache=False)
            await asyncio.sleep(0.05)
            half = await engine.metrics()
            await engine.wake()
            return undisturbed, await asyncio.gather(*tasks), asleep, half

    undisturbed, held, asleep, half = run(test())
    assert asleep["engine/kv_bytes"] == asleep["engine/running"] == 0
    assert half["engine/steps"] == asleep["engine/steps"]
    for one, other in zip(undisturbed, held, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)


def test_abort_mode_ends_running_requests_with_their_tokens(tiny_model):
    async def test():
        async with started(tiny_model) as engine:
            tasks = await started_requests(engine, long_requests())
            await engine.pause("abort")
            cut = await asyncio.gather(*tasks)
            waits = asyncio.create_task(engine.client.generate(make_request(9)))
            await asyncio.sleep(0.1)
            is_held = not waits.done()
            await engine.resume()
            return cut, is_held, await waits

    cut, is_held, later = run(test())
    assert is_held and later.stop_reason is not StopReason.ABORT
    aborted = [completion for completion in cut if completion.stop_reason is StopReason.ABORT]
    assert aborted
    for completion in aborted:
        assert len(completion.token_ids) == len(completion.logprobs) > 0
        assert completion.versions[-1].end == len(completion.token_ids)


def test_wait_mode_lets_running_requests_end_and_admits_no_others(tiny_model):
    async def test():
        async with started(tiny_model, max_batch=2) as engine:
            tasks = await started_requests(engine, long_requests(2))
            queued = asyncio.create_task(engine.client.generate(make_request(9)))
            await asyncio.sleep(0.01)
            await engine.pause("wait")
            await asyncio.sleep(0.05)
            ended, is_held = [task.done() for task in tasks], not queued.done()
            await engine.resume()
            await queued
            return ended, is_held, [task.result().stop_reason for task in tasks]

    ended, is_held, reasons = run(test())
    assert ended == [True, True] and is_held
    assert StopReason.ABORT not in reasons


@pytest.mark.parametrize("ranks", [1, 2])
def test_abort_ends_named_requests_or_all(tiny_model, ranks):
    async def test():
        async with started(tiny_model, ranks=ranks) as engine:
            tasks = await started_requests(engine, long_requests())
            await engine.pause("in_place")
            await engine.client.abort(["1/0#0", "unknown"])
            one = await tasks[1]
            others = [task.done() for i, task in enumerate(tasks) if i != 1]
            await engine.client.abort("all")
            return one, others, await asyncio.gather(*tasks)

    one, others, everything = run(test())
    assert one.stop_reason is StopReason.ABORT
    assert others.count(False) >= 2
    assert sum(completion.stop_reason is StopReason.ABORT for completion in everything) >= 3


def test_sessions_are_shared_out_over_the_engines(tiny_model):
    async def test():
        async with started(tiny_model, ranks=2) as engine:
            completions = await generate_all(engine, [make_request(i) for i in range(6)])
            each = [(await actor.call("metrics", timeout_s=5))["engine/requests"] for actor in engine._actors]
            return completions, each, await engine.metrics()

    completions, each, metrics = run(test())
    assert len(completions) == 6 and each == [3.0, 3.0]
    assert metrics["engine/requests"] == 6


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_sampled_tokens_can_be_fetched_from_running_requests(tiny_model, ranks):
    async def test():
        async with started(tiny_model) as engine:
            undisturbed = await generate_all(engine, long_requests())
        async with started(tiny_model, ranks=ranks) as engine:
            tasks = await started_requests(engine, long_requests())
            ids = [request.id for request in long_requests()]
            await engine.pause("in_place")  # so that none ends meanwhile, however busy the machine
            parts = await engine.client.fetch_partial([*ids, "unknown"])
            await engine.resume()
            completions = await asyncio.gather(*tasks)
            return undisturbed, parts, completions, await engine.client.fetch_partial(ids)

    undisturbed, parts, completions, after = run(test())
    found = {part.request_id: part for part in parts}
    assert len(found.pop("unknown").token_ids) == 0 and [len(part.token_ids) for part in after] == [0] * 4
    assert sum(len(part.token_ids) for part in found.values()) > 0
    for alone, completion in zip(undisturbed, completions, strict=True):
        assert completion.token_ids.tolist() == alone.token_ids.tolist()
        if (part := found.get(completion.request_id)) is None:
            continue  # it had ended: on a busy machine one process may be far behind the other
        count = len(part.token_ids)
        assert part.stop_reason is StopReason.ABORT and count < len(completion.token_ids)
        assert completion.token_ids[:count].tolist() == part.token_ids.tolist()
        assert completion.logprobs[:count].tolist() == part.logprobs.tolist()
        assert [(span.start, span.end) for span in part.versions] == [(0, count)] * (count > 0)
