"""The experts chosen by the engine, from prefill and decoding to samples of several turns, aborts and versions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hf_cases import generate_all, make_request, plain_model, publish, run, started
from megatron_families import folders_of_families
from plasmid.testing.rewards import make_prompt
from plasmid.types import SamplingParams, StopReason
from plasmid_models.routing import read_routing
from plasmid_runtime.rollout.in_flight import read_turns, write_turns
from plasmid_workflows.execution import Execution
from plasmid_workflows.testing import Digits
from safetensors.torch import load_file

FAMILIES = ["Qwen3-MoE", "GLM-4.5", "DeepSeek-V3"]
UNKNOWN = 255
PROMPT = np.array([9, 21, 33, 12], np.int32)
REPLY = np.array([40, 41, 42], np.int32)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return folders_of_families(tmp_path_factory)


def experts_of(model, tokens):
    """Return experts [tokens - 1, layers, choices] by transformers in one pass, in increasing order; 0 without
    experts."""
    lm, chosen = plain_model(model), {}
    for index, layer in enumerate(lm.model.layers):
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.register_forward_pre_hook(lambda _, a, i=index: chosen.__setitem__(i, a[1]))
    with torch.no_grad():
        lm(torch.from_numpy(np.asarray(tokens)).long()[None])
    none = torch.zeros_like(next(iter(chosen.values())))
    return np.sort(torch.stack([chosen.get(i, none) for i in range(len(lm.model.layers))], 1).numpy(), -1)[:-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_completion_has_the_experts_of_all_tokens_that_were_processed(family, models):
    """For prompts that share a prefill, equal prompts, and rows that are decoded together."""
    routing = read_routing(models(family))
    requests = [replace(make_request(i, length=3 + 4 * (i // 2), seed=i), routing=routing) for i in range(4)]
    requests[1] = replace(requests[1], token_ids=requests[0].token_ids, routing=None)

    async def test():
        async with started(models(family), max_batch=3, prefill_tokens=24) as engine:
            return await generate_all(engine, requests)

    completions = run(test())
    assert completions[1].experts is None
    for request, completion in zip(requests, completions, strict=True):
        if request.routing is not None:
            expected = experts_of(models(family), np.concatenate([request.token_ids, completion.token_ids]))
            assert completion.experts.dtype == np.uint8
            assert np.sort(completion.experts, -1).tolist() == expected.tolist()


class Splitting:
    """Implements `EngineClient`: aborts each turn after ``stops`` of its tokens, and then calls ``between``."""

    def __init__(self, client, stops=(), between=None):
        self._client, self._stops, self._between = client, list(stops), between
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        if not self._stops:
            return await self._client.generate(request)
        end = request.num_generated + self._stops.pop(0)
        sampling = request.sampling.model_copy(update={"max_new_tokens": end})
        part = await self._client.generate(replace(request, sampling=sampling))
        if self._between is not None:
            await self._between()
        return replace(part, stop_reason=StopReason.ABORT)

    async def abort(self, request_ids):
        return None

    async def end_sessions(self, session_ids):
        return None


def execution(client, routing):
    sampling = SamplingParams(max_new_tokens=7)
    named = {"id": "0/0", "group_id": 0, "sampling": sampling, "client": client, "codec": Digits(), "seed": 3}
    return Execution(**named, deadline_s=30.0, routing=routing)


async def two_turns(rollout):
    prompt = make_prompt(token_ids=PROMPT)
    first = await rollout.generate(PROMPT)
    second = await rollout.generate(np.concatenate([PROMPT, first.token_ids, REPLY]))
    return rollout.sample(prompt, [first, REPLY, second])


@pytest.mark.parametrize("stops", [[], [3], [2, 0, 3]])
def test_multi_turn_samples_and_aborted_requests_have_routed_experts(stops, models):
    model = models("Qwen3-MoE")
    routing = read_routing(model)

    async def test():
        async with started(model) as engine:
            client = Splitting(engine.client, stops)
            return await two_turns(execution(client, routing)), client.requests

    sample, requests = run(test())
    assert np.sort(sample.experts, -1)[:-1].tolist() == experts_of(model, sample.token_ids).tolist()
    assert (sample.experts[-1] == UNKNOWN).all()
    assert requests[0].experts_from == 0
    assert all(r.experts_from > 0 for r in requests[1:]), "known experts are not requested again"


def test_tokens_of_two_policy_versions_have_the_experts_of_the_version_that_sampled_them(models):
    model = models("Qwen3-MoE")
    routing = read_routing(model)
    draw = torch.Generator().manual_seed(1)
    tensors = {
        n: t + 0.3 * torch.randn(t.shape, generator=draw) for n, t in load_file(model / "model.safetensors").items()
    }

    async def test():
        async with started(model) as engine:

            async def between():
                await engine.pause("in_place")
                await publish(engine, list(tensors.items()), 1)
                await engine.resume()

            rollout = execution(Splitting(engine.client, [3], between), routing)
            completion = await rollout.generate(PROMPT)
            return rollout.sample(make_prompt(token_ids=PROMPT), [completion])

    sample = run(test())
    assert [span.version for span in sample.versions] == [0, 1]
    old = experts_of(model, sample.token_ids)
    first = len(PROMPT) + 3 - 1  # the new policy processes the last token before the abort
    assert np.sort(sample.experts, -1)[:first].tolist() == old[:first].tolist()
    assert np.sort(sample.experts, -1)[first:-1].tolist() != old[first:].tolist()


def test_a_recorded_rollout_contains_routed_experts(models, tmp_path):
    model = models("Qwen3-MoE")
    routing = read_routing(model)

    async def test():
        async with started(model) as engine:
            whole = execution(Splitting(engine.client, [3]), routing)
            sample = await two_turns(whole)
            turns = whole.ended_turns
            cut = turns[0].completion
            half = replace(
                cut,
                token_ids=cut.token_ids[:3],
                logprobs=cut.logprobs[:3],
                versions=(replace(cut.versions[0], end=3),),
                experts=cut.experts[: len(PROMPT) + 2],
                stop_reason=StopReason.ABORT,
            )
            write_turns(tmp_path / "turns.parquet", {"0": [replace(turns[0], completion=half)]})
            resumed = execution(Splitting(engine.client), routing)
            resumed.resumed = {turn.number: turn for turn in read_turns(tmp_path / "turns.parquet")["0"]}
            again = await two_turns(resumed)
            return sample, again, resumed.client.requests

    sample, again, requests = run(test())
    assert again.token_ids.tolist() == sample.token_ids.tolist()
    assert np.sort(again.experts, -1).tolist() == np.sort(sample.experts, -1).tolist()
    assert (requests[0].num_generated, requests[0].experts_from) == (3, len(PROMPT) + 2)
