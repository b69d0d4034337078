"""With expected sessions, results depend only on the set of requests."""

import asyncio
import random

import pytest
from hf_cases import make_request, run, started


async def session(engine, number, turns, delays):
    """Run several turns of one session, each after a random delay."""
    parts = []
    tokens = make_request(number, length=3 + number % 11).token_ids.tolist()
    for turn in range(turns):
        await asyncio.sleep(delays.random() * 0.02)
        request = make_request(
            number,
            tokens=tokens,
            id_=f"{number}/0#{turn}",
            seed=100 * number + turn,
            sampling={"max_new_tokens": 2 + (7 * number + turn) % 17, "temperature": 1.1},
        )
        completion = await engine.client.generate(request)
        parts.append((completion.token_ids.tobytes(), completion.logprobs.tobytes()))
        tokens = [*tokens, *completion.token_ids.tolist(), 12]
    await asyncio.sleep(delays.random() * 0.02)
    await engine.client.end_sessions([f"{number}/0"])
    return parts


async def whole_run(path, seed, ranks):
    async with started(path, max_batch=5, prefill_tokens=32, ranks=ranks) as engine:
        delays = random.Random(seed)
        numbers = list(range(12))
        rounds = []
        for _ in range(2):
            await engine.expect([f"{n}/0" for n in numbers])
            shuffled = delays.sample(numbers, len(numbers))
            results = await asyncio.gather(*(session(engine, n, 1 + n % 3, delays) for n in shuffled))
            rounds.append(dict(zip(shuffled, results, strict=True)))
        return rounds


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.long)])
def test_results_are_bit_identical_whenever_requests_arrive(tiny_model, ranks):
    runs = [run(whole_run(tiny_model, seed, ranks)) for seed in range(2)]
    assert runs[0] == runs[1]
    assert runs[0][0] == runs[0][1]
    assert sum(len(parts) for parts in runs[0][0].values()) == 24


def test_no_step_is_taken_without_a_request_of_every_expected_session(tiny_model):
    async def test():
        async with started(tiny_model) as engine:
            await engine.expect(["1/0", "2/0"])
            first = asyncio.create_task(engine.client.generate(make_request(1)))
            await asyncio.sleep(0.2)
            steps = (await engine.metrics())["engine/steps"]
            second = asyncio.create_task(engine.client.generate(make_request(2)))
            done, _ = await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED, timeout=10)
            others = [t for t in (first, second) if t not in done]
            await engine.client.end_sessions(["1/0", "2/0"])
            for task in others:
                await task
            return steps, len(done)

    steps, done = run(test())
    assert steps == 0
    assert done >= 1


def test_sessions_that_were_never_expected_are_served(tiny_model):
    async def test():
        async with started(tiny_model) as engine:
            await engine.expect(["1/0"])
            await engine.client.end_sessions(["1/0"])
            return await engine.client.generate(make_request(7))

    assert len(run(test()).token_ids) > 0


def test_a_deadline_ends_requests_that_wait_for_an_expected_session(tiny_model):
    async def test():
        async with started(tiny_model) as engine:
            await engine.expect(["1/0", "2/0"])
            return await engine.client.generate(make_request(1, deadline_s=0.2))

    assert run(test()).error == "not finished within the deadline of 0.2 s"
