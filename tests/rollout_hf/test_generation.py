"""Contents of completions: log-probabilities, ends, version spans, errors."""

import asyncio
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hf_cases import generate_all, make_request, plain_logprobs, plain_model, run, started
from plasmid.types import StopReason
from plasmid_models.testing import make_tiny_model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logprobs_are_those_of_a_plain_forward_pass(tmp_path, family, tied):
    path = make_tiny_model(tmp_path / "model", family=family, tied=tied)
    requests = [
        make_request(i, length=1 + 3 * i, sampling={"temperature": 0.5 + 0.1 * i, "max_new_tokens": 3 + 7 * (i % 4)})
        for i in range(12)
    ]

    async def test():
        async with started(path, max_batch=5, prefill_tokens=40) as engine:
            return await generate_all(engine, requests)

    completions = run(test())
    model = plain_model(path)
    for request, completion in zip(requests, completions, strict=True):
        assert len(completion.token_ids) > 0
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, request, completion), atol=2e-5)


def test_a_row_does_not_depend_on_its_neighbours(tiny_model):
    requests = [make_request(i, length=4 + i % 9, sampling={"max_new_tokens": 3 + i % 10}) for i in range(16)]

    async def test(max_batch):
        async with started(tiny_model, max_batch=max_batch) as engine:
            return await generate_all(engine, requests)

    for alone, together in zip(run(test(1)), run(test(16)), strict=True):
        assert alone.token_ids.tolist() == together.token_ids.tolist()
        np.testing.assert_allclose(alone.logprobs, together.logprobs, atol=2e-5)


def test_samples_of_one_prompt_differ_by_their_seed_alone(tiny_model):
    same = [make_request(0, id_=f"{i}", session=f"{i}", seed=i % 4) for i in range(8)]

    async def test():
        async with started(tiny_model) as engine:
            return await generate_all(engine, same), await engine.metrics()

    completions, metrics = run(test())
    texts = [tuple(c.token_ids) for c in completions]
    assert texts[:4] == texts[4:]
    assert len(set(texts)) == 4
    assert metrics["engine/new_tokens"] == sum(map(len, texts))


def test_preemption_by_a_full_cache_does_not_change_samples(tiny_model):
    requests = [make_request(i, length=20, sampling={"max_new_tokens": 60, "temperature": 1.5}) for i in range(6)]

    async def test(**settings):
        async with started(tiny_model, max_length=96, **settings) as engine:
            completions = await generate_all(engine, requests)
            return completions, await engine.metrics()

    roomy, _ = run(test())
    tight, metrics = run(test(kv_tokens=96 * 2))
    assert metrics["engine/prompt_tokens"] > 6 * 20
    for one, other in zip(roomy, tight, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)


def test_greedy_takes_the_most_likely_token_and_reports_temperature_one(tiny_model):
    request = make_request(1, sampling={"temperature": 0.0, "max_new_tokens": 20})

    async def test():
        async with started(tiny_model) as engine:
            return await engine.client.generate(request)

    completion = run(test())
    model = plain_model(tiny_model)
    np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, request, completion), atol=2e-5)
    import torch

    expected = model.generate(torch.from_numpy(request.token_ids).long()[None], max_new_tokens=20, do_sample=False)
    assert completion.token_ids.tolist() == expected[0, len(request.token_ids) :].tolist()


def test_completions_end_at_stop_tokens_stop_texts_and_lengths(tiny_model):
    long = {"max_new_tokens": 100, "temperature": 1.2}

    async def test():
        async with started(tiny_model) as engine:
            free = await engine.client.generate(make_request(5, sampling=long))
            third = int(free.token_ids[2])
            first = free.token_ids.tolist().index(third)
            at_token = await engine.client.generate(make_request(5, sampling={**long, "stop_token_ids": (third,)}))
            stop = decode(tiny_model, free.token_ids[3:5])
            end = next(i for i in range(100) if stop in decode(tiny_model, free.token_ids[:i]))
            at_text = await engine.client.generate(make_request(5, sampling={**long, "stop": ("never", stop)}))
            at_length = await engine.client.generate(make_request(5, sampling={**long, "max_new_tokens": 4}))
            return free, (at_token, first), (at_text, end), at_length

    free, (at_token, first), (at_text, end), at_length = run(test())
    assert at_token.stop_reason is StopReason.STOP
    assert at_token.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    assert at_text.stop_reason is StopReason.STOP
    assert at_text.token_ids.tolist() == free.token_ids[:end].tolist()
    assert at_length.stop_reason is StopReason.LENGTH
    assert at_length.token_ids.tolist() == free.token_ids[:4].tolist()


def decode(path, token_ids):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path / "tokenizer.json")).decode(list(token_ids), skip_special_tokens=False)


def test_the_models_end_of_text_ends_a_completion(tiny_model):
    requests = [make_request(i, sampling={"max_new_tokens": 200, "temperature": 1.5}) for i in range(8)]

    async def test():
        async with started(tiny_model) as engine:
            return await generate_all(engine, requests)

    stopped = [c for c in run(test()) if c.stop_reason is StopReason.STOP]
    assert stopped
    for completion in stopped:
        assert completion.token_ids[-1] == 2
        assert 2 not in completion.token_ids[:-1]


def test_the_context_ends_a_completion_and_longer_prompts_are_refused(tiny_model):
    async def test():
        async with started(tiny_model, max_length=30) as engine:
            sampling = {"max_new_tokens": 500, "stop_token_ids": ()}
            ids = [make_request(i, length=n, sampling=sampling) for i, n in enumerate((25, 30, 31))]
            return await generate_all(engine, ids)

    ends, full, refused = run(test())
    assert ends.stop_reason is StopReason.LENGTH and len(ends.token_ids) == 5
    assert full.stop_reason is StopReason.LENGTH and len(full.token_ids) == 0
    assert refused.stop_reason is StopReason.ERROR
    assert refused.error == "the prompt has 31 tokens, the maximum is 30"


def test_requests_that_cannot_be_served_are_completions_with_an_error(tiny_model):
    async def test():
        async with started(tiny_model) as engine:
            bad = [make_request(0, tokens=[]), make_request(1, tokens=[5, 9999]), make_request(2, tokens=[-1])]
            late = make_request(3, sampling={"max_new_tokens": 240, "temperature": 5.0}, deadline_s=0.0)
            return await generate_all(engine, [*bad, late])

    assert [c.error for c in run(test())] == [
        "the prompt is empty",
        "the prompt contains token 9999, outside of the vocabulary of 57 tokens",
        "the prompt contains token -1, outside of the vocabulary of 57 tokens",
        "not finished within the deadline of 0 s",
    ]


def test_a_continued_request_samples_the_same_tokens_as_an_uninterrupted_one(tiny_model):
    request = make_request(9, sampling={"max_new_tokens": 60, "temperature": 1.0, "stop": ("zz9",)})

    async def test():
        async with started(tiny_model) as engine:
            whole = await engine.client.generate(request)
            cut = len(whole.token_ids) // 2
            so_far = np.concatenate([request.token_ids, whole.token_ids[:cut]])
            rest = await engine.client.generate(replace(request, token_ids=so_far, num_generated=cut))
            return whole, rest, cut

    whole, rest, cut = run(test())
    assert cut > 2
    assert rest.token_ids.tolist() == whole.token_ids[cut:].tolist()
    assert rest.stop_reason is whole.stop_reason
    np.testing.assert_allclose(rest.logprobs, whole.logprobs[cut:], atol=2e-5)


def test_kept_sets_name_the_tokens_that_were_left_to_draw_from_and_their_mass(tiny_model):
    settings = [{"top_k": 5}, {"top_p": 0.6}, {"temperature": 0.0}, {}]
    requests = [
        make_request(i, sampling={"max_new_tokens": 9, **s}, wants_kept_set=True) for i, s in enumerate(settings)
    ]

    async def test():
        async with started(tiny_model) as engine:
            return await generate_all(engine, requests), await engine.client.generate(make_request(9))

    completions, plain = run(test())
    assert plain.kept is None
    for completion in completions:
        offsets = completion.kept.offsets
        assert len(offsets) == len(completion.token_ids) + 1
        for i, token in enumerate(completion.token_ids):
            left = completion.kept.token_ids[offsets[i] : offsets[i + 1]]
            assert token in left or not len(left)
            assert completion.logprobs[i] <= completion.kept.log_mass[i] + 1e-6
    greedy = completions[2]
    np.testing.assert_allclose(greedy.kept.log_mass, greedy.logprobs)
    assert completions[0].kept.log_mass.max() < 0
    sizes = [np.diff(completion.kept.offsets) for completion in completions]
    assert set(sizes[0]) == {5} and set(sizes[2]) == {1} and set(sizes[3]) == {0}
    assert sizes[1].min() >= 1 and sizes[1].max() < 57


def test_the_client_works_after_pickling_and_refuses_a_second_request_of_one_id(tiny_model):
    async def test():
        async with started(tiny_model) as engine:
            request = make_request(4)
            one = await engine.client.generate(request)
            twice = await asyncio.gather(
                engine.client.generate(request), engine.client.generate(request), return_exceptions=True
            )
            await engine.client.end_sessions([request.session_id])
            return one, twice

    one, twice = run(test())
    assert one.token_ids.tolist() == twice[0].token_ids.tolist()
    assert str(twice[1]) == "request 4/0#0: already running; request ids must be unique"
    assert pickle.loads(pickle.dumps(one)).request_id == "4/0#0"
