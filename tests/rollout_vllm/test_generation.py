"""Tokens and log-probabilities of a real vLLM server, compared with one forward pass of transformers."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from plasmid.types import StopReason, VersionSpan

from tests.engine_cases import check_optional_settings, make_request, plain_distributions, plain_logprobs, plain_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
SAMPLING = [
    {},
    {"temperature": 0.5, "top_p": 0.6},
    {"temperature": 0.0},
    {"temperature": 1.7, "top_k": 5},
    {"min_p": 0.05},
]
RESTRICTED = [
    {"temperature": 0.5, "top_p": 0.6, "top_k": 100},
    {"temperature": 1.7, "top_k": 5},
    {},
    {"min_p": 0.05, "top_k": 4096},
    {"temperature": 0.0, "top_k": 5},
]


def complete(shared, requests, **settings):
    async def test():
        async with shared.engine(**settings) as engine:
            return await asyncio.gather(*map(engine.client.generate, requests))

    return shared.run(test())


def test_log_probabilities_are_those_of_the_whole_distribution(shared):
    model = plain_model(shared.model_path)
    requests = [make_request(i, num=12, **sampling) for i, sampling in enumerate(SAMPLING)]
    for request, completion in zip(requests, complete(shared, requests), strict=True):
        assert completion.stop_reason in (StopReason.LENGTH, StopReason.STOP)
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, request, completion), atol=2e-5)
        assert completion.versions == (VersionSpan(version=0, start=0, end=len(completion.token_ids)),)


def test_kept_sets_are_returned_with_their_mass(shared):
    model = plain_model(shared.model_path)
    requests = [replace(make_request(i, num=12, **s), wants_kept_set=True) for i, s in enumerate(RESTRICTED)]
    for request, completion in zip(requests, complete(shared, requests), strict=True):
        kept, sampling = completion.kept, request.sampling
        assert completion.error is None
        assert kept.num_positions == len(completion.token_ids) > 0
        if not sampling.is_restricted:
            assert not kept.sizes().any() and not kept.log_mass.any()
            continue
        whole = plain_distributions(model, request, completion)
        for position, left in enumerate(np.split(kept.token_ids, kept.offsets[1:-1])):
            logprobs = whole[position]
            assert completion.token_ids[position] in left
            assert kept.log_mass[position] == pytest.approx(np.logaddexp.reduce(logprobs[left]), abs=2e-5)
            out = np.delete(logprobs, left)
            assert out.size == 0 or out.max() <= logprobs[left].min() + 1e-6
            if sampling.top_p == 1 and sampling.min_p == 0:
                assert len(left) == sampling.top_k


def test_a_greedy_request_takes_the_most_likely_token(shared):
    model = plain_model(shared.model_path)
    (completion,) = complete(shared, [make_request(1, temperature=0.0)])
    tokens = [7, 8, 9]
    for token in completion.token_ids.tolist():
        assert int(model(torch.tensor([tokens])).logits[0, -1].argmax()) == token
        tokens.append(token)


def test_a_seed_gives_its_draws_again_whatever_runs_beside(shared):
    request = make_request(3, num=16)
    (alone,) = complete(shared, [request])
    beside = [make_request(i, num=16) for i in range(3, 9)]
    again, *others = complete(shared, beside)
    assert again.token_ids.tolist() == alone.token_ids.tolist()
    assert len({tuple(one.token_ids.tolist()) for one in (again, *others)}) > 1


def test_stops_end_a_completion_and_are_kept(shared):
    from plasmid.config.run import ModelConfig
    from plasmid_models.tokenization.tokenizer import Tokenizer

    decode = Tokenizer.of(ModelConfig(path=str(shared.model_path))).decode
    (whole,) = complete(shared, [make_request(1, num=20, temperature=0.0)])
    text = decode(whole.token_ids)
    by_token, by_text = complete(
        shared,
        [
            make_request(2, num=20, temperature=0.0, stop_token_ids=(int(whole.token_ids[2]),)),
            make_request(3, num=20, temperature=0.0, stop=(text[2],)),
        ],
    )
    end = whole.token_ids.tolist().index(int(whole.token_ids[2])) + 1
    assert by_token.token_ids.tolist() == whole.token_ids[:end].tolist()
    assert decode(by_text.token_ids) == text[: text.index(text[2]) + 1]
    assert by_token.stop_reason is by_text.stop_reason is StopReason.STOP


def test_optional_settings_do_what_they_say(shared):
    check_optional_settings(shared, {}, repeats_prompt=True)


def test_an_invalid_grammar_is_a_failed_completion(shared):
    (refused,) = complete(shared, [make_request(1, regex="(")])
    assert refused.stop_reason is StopReason.ERROR
    assert "the server rejected the request: " in refused.error


def test_a_sample_ends_where_the_model_ends(shared):
    prompt = tuple(range(7, 37)) * 8
    cut, refused = complete(
        shared, [make_request(1, tokens=prompt, num=500), make_request(2, tokens=prompt + prompt, num=5)]
    )
    assert cut.stop_reason in (StopReason.LENGTH, StopReason.STOP) and len(cut.token_ids) <= 16
    assert refused.error == "the prompt has 480 tokens, which leaves no room for a completion; raise model.max_length"


def test_a_request_rejected_by_vllm_gives_a_failed_completion(shared):
    (refused,) = complete(shared, [make_request(1, temperature=2.5)])
    assert refused.stop_reason is StopReason.ERROR
    assert "the server rejected the request: temperature must be in [0, 2], got 2.5" in refused.error


def test_one_request_is_aborted_and_others_go_on(shared):
    first, second = make_request(1, num=240, temperature=2.0), make_request(11, num=20)

    async def test():
        async with shared.engine() as engine:
            tasks = [asyncio.create_task(engine.client.generate(request)) for request in (first, second)]
            await asyncio.sleep(0.1)
            await engine.client.abort([first.id])
            return await asyncio.gather(*tasks)

    aborted, other = shared.run(test())
    assert aborted.stop_reason in (StopReason.ABORT, StopReason.STOP)
    assert len(aborted.token_ids) < 240
    assert other.stop_reason in (StopReason.LENGTH, StopReason.STOP)


def test_gauges_count_the_tokens(shared):
    async def test():
        async with shared.engine() as engine:
            await engine.metrics()
            await asyncio.gather(*(engine.client.generate(make_request(i, num=30)) for i in range(4)))
            return await engine.metrics()

    found = shared.run(test())
    assert found["engine/tokens_per_s"] > 0 and found["engine/serving"] == 1
    assert found["engine/running"] == found["engine/queued"] == 0
    assert {"engine/kv_usage", "engine/cache_hit_rate"} <= found.keys()
