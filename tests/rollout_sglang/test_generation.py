"""Tokens and log-probabilities of a real SGLang server, compared with one forward pass of transformers."""

import asyncio
import base64
from dataclasses import replace

import numpy as np
import pytest
from plasmid.errors import EngineError
from plasmid.types import StopReason, VersionSpan
from plasmid.types.routing import Routing
from plasmid_sglang import completions
from sgl_cases import make_request, plain_distributions, plain_logprobs, plain_model

from tests.engine_cases import check_optional_settings

SAMPLING = [
    {},
    {"temperature": 0.5, "top_p": 0.6},
    {"temperature": 0.0},
    {"temperature": 1.7, "top_k": 5},
    {"min_p": 0.05},
]


def test_log_probabilities_are_those_of_the_whole_distribution(shared):
    model = plain_model(shared.model_path)
    requests = [make_request(i, num=12, **sampling) for i, sampling in enumerate(SAMPLING)]

    async def test():
        async with shared.engine() as engine:
            return await asyncio.gather(*map(engine.client.generate, requests))

    for request, completion in zip(requests, shared.run(test()), strict=True):
        assert completion.request_id == request.id
        assert completion.stop_reason in (StopReason.LENGTH, StopReason.STOP)
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, request, completion), atol=2e-5)
        assert completion.versions == (VersionSpan(version=0, start=0, end=len(completion.token_ids)),)


def test_kept_sets_are_returned_with_their_mass(shared):
    model = plain_model(shared.model_path)
    settings = [{"temperature": 0.5, "top_p": 0.6, "top_k": 100}, {"temperature": 1.7, "top_k": 5}, {}]
    settings += [{"min_p": 0.05, "top_k": 4096}]
    settings += [{"temperature": 0.0, "top_k": 5}]
    requests = [replace(make_request(i, num=12, **s), wants_kept_set=True) for i, s in enumerate(settings)]

    async def test():
        async with shared.engine() as engine:
            return await asyncio.gather(*map(engine.client.generate, requests))

    for request, completion in zip(requests, shared.run(test()), strict=True):
        kept, sampling = completion.kept, request.sampling
        assert completion.error is None
        assert kept.num_positions == len(completion.token_ids) > 0
        if not sampling.is_restricted or sampling.temperature == 0:
            assert not kept.sizes().any() and not kept.log_mass.any()
            continue
        whole = plain_distributions(model, request, completion)
        for position, left in enumerate(np.split(kept.token_ids, kept.offsets[1:-1])):
            logprobs = whole[position]
            assert completion.token_ids[position] in left
            assert kept.log_mass[position] == pytest.approx(np.logaddexp.reduce(logprobs[left]), abs=2e-5)
            out = np.delete(logprobs, left)
            assert out.size == 0 or out.max() <= logprobs[left].min() + 1e-6
            assert len(left) <= sampling.top_k
            if sampling.top_p == 1 and sampling.min_p == 0:
                assert len(left) == sampling.top_k


def test_a_greedy_request_takes_the_most_likely_token(shared):
    model = plain_model(shared.model_path)
    request = make_request(1, temperature=0.0)

    async def test():
        async with shared.engine() as engine:
            return await engine.client.generate(request)

    import torch

    tokens = [*request.token_ids.tolist()]
    for token in shared.run(test()).token_ids.tolist():
        assert int(model(torch.tensor([tokens])).logits[0, -1].argmax()) == token
        tokens.append(token)


def test_stops_end_a_completion_and_are_kept(shared):
    async def test():
        async with shared.engine() as engine:
            whole = await engine.client.generate(make_request(1, num=20, temperature=0.0))
            third = int(whole.token_ids[2])
            by_token = make_request(2, num=20, temperature=0.0, stop_token_ids=(third,))
            return whole, await engine.client.generate(by_token)

    whole, stopped = shared.run(test())
    end = whole.token_ids.tolist().index(int(whole.token_ids[2])) + 1
    assert stopped.token_ids.tolist() == whole.token_ids[:end].tolist()
    assert stopped.stop_reason is StopReason.STOP


def test_optional_settings_do_what_they_say(shared):
    check_optional_settings(shared, {"stop_regex": {"stop_regex": (".",)}}, repeats_prompt=False)


def test_a_text_that_stops_is_kept(shared):
    from plasmid_models.tokenization.tokenizer import Tokenizer

    async def test():
        async with shared.engine() as engine:
            whole = await engine.client.generate(make_request(1, num=20, temperature=0.0))
            text = engine_text(whole.token_ids)
            again = make_request(2, num=20, temperature=0.0, stop=(text[2],))
            return whole, text, await engine.client.generate(again)

    def engine_text(token_ids):
        from plasmid.config.run import ModelConfig

        return Tokenizer.of(ModelConfig(path=str(shared.model_path))).decode(token_ids)

    _, text, stopped = shared.run(test())
    assert engine_text(stopped.token_ids) == text[: text.index(text[2]) + 1]
    assert stopped.stop_reason is StopReason.STOP


def test_a_sample_ends_where_the_model_ends(shared):
    prompt = tuple(range(7, 37)) * 8

    async def test():
        async with shared.engine() as engine:
            long = make_request(1, tokens=prompt, num=500)
            return await engine.client.generate(long), await engine.client.generate(
                make_request(2, tokens=prompt + prompt, num=5)
            )

    cut, refused = shared.run(test())
    assert cut.stop_reason in (StopReason.LENGTH, StopReason.STOP) and len(cut.token_ids) <= 16
    assert refused.stop_reason is StopReason.ERROR
    assert refused.error == "the prompt has 480 tokens, which leaves no room for a completion; raise model.max_length"


def test_a_rejected_request_gives_a_completion_with_the_error():
    answer = {"error": {"message": "Requested token count exceeds the model's maximum context length"}}
    refused = completions.completion(make_request(1), 400, answer, has_spans=False)
    assert refused.stop_reason is StopReason.ERROR and len(refused.token_ids) == 0
    assert refused.error == (
        "the server rejected the request: Requested token count exceeds the model's maximum context length"
    )


def test_a_request_that_a_pause_found_unbegun_is_to_be_asked_again():
    """SGLang 0.5.17 refuses it; later releases answer that it was aborted."""
    request = make_request(1)
    answer = {"error": {"message": f"Request {request.id}~77.3 was aborted"}}
    cut = completions.completion(request, 400, answer, has_spans=False)
    assert cut.stop_reason is StopReason.ABORT and cut.error is None and len(cut.token_ids) == 0


def test_a_deadline_ends_a_request(shared):
    request = replace(make_request(1), deadline_s=0.5)

    async def test():
        async with shared.engine() as engine:
            await engine.pause("abort")
            try:
                return await engine.client.generate(request)
            finally:
                await engine.resume()

    completion = shared.run(test())
    assert completion.stop_reason is StopReason.ERROR
    assert completion.error.startswith("no answer within 0.5 s")


def test_one_request_is_aborted_and_others_go_on(shared):
    first, second = make_request(1, num=200, temperature=5.0), make_request(11, num=20)

    async def test():
        async with shared.engine() as engine:
            tasks = [asyncio.create_task(engine.client.generate(request)) for request in (first, second)]
            await asyncio.sleep(0.2)
            await engine.client.abort([first.id])
            return await asyncio.gather(*tasks)

    aborted, other = shared.run(test())
    assert aborted.stop_reason in (StopReason.ABORT, StopReason.STOP)
    assert len(aborted.token_ids) < 200
    assert other.stop_reason in (StopReason.LENGTH, StopReason.STOP)


def test_an_ended_engine_raises_an_error(shared):
    async def test():
        async with shared.engine() as engine:
            server = engine.supervisor.all[0]
            engine.supervisor.max_restarts = 0
            await engine.supervisor._restart(server)
            with pytest.raises(EngineError, match=r"0 of 1 servers are running, but rollout\.min_engines = 1"):
                engine.needs_weights()
            with pytest.raises(EngineError, match="the engine cannot serve"):
                await engine.client.generate(make_request(1))
            server.condition = type(server.condition).SERVING

    shared.run(test())


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (np.array([3, 8], np.int32).tobytes(), "ids from 3 to 8, but the model has 8 experts per layer"),
        (np.array([-1, 2], np.int32).tobytes(), "ids from -1 to 2, but the model has 8 experts per layer"),
        (np.array([1, 2, 3], np.int32).tobytes(), "cannot reshape array of size 3"),
        (b"odd", "buffer size must be a multiple of element size"),
    ],
)
def test_experts_that_the_model_does_not_have_are_refused(sent, told):
    request = replace(make_request(1), routing=Routing(layers=1, choices=2, experts=8))
    meta = {"finish_reason": {"type": "stop"}, "weight_version": 0, "routed_experts": base64.b64encode(sent).decode()}
    found = completions.completion(request, 200, {"meta_info": meta}, has_spans=False)
    assert found.stop_reason is StopReason.ERROR and found.error is not None
    assert found.error.startswith(f"the server returned invalid experts: {told}")


def test_the_processes_of_a_server_are_those_started_early(shared):
    log = (shared.run_dir / "logs" / "engine-0-server.log").read_text()
    assert "was started early, but" not in log and "Uvicorn running" in log
