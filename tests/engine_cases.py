"""Requests to engines on real servers, and the corresponding results of plain transformers."""

import asyncio
import json
import re

import numpy as np
import pytest
import torch
from plasmid.components import AdapterSpec
from plasmid.config.run import ModelConfig
from plasmid.errors import SyncError
from plasmid.types import GenerateRequest, SamplingParams, StopReason
from plasmid_models.lora.insertion import insert_adapter
from plasmid_models.lora.layers import merge
from plasmid_models.sync import compare, send_weights
from plasmid_models.tokenization.tokenizer import Tokenizer
from plasmid_runtime.rollout.in_flight import JobProgress, record_turns
from plasmid_workflows.execution import Execution
from plasmid_workflows.testing import Digits
from transformers import AutoModelForCausalLM


def make_request(index, *, tokens=(7, 8, 9), num=8, seed=None, **sampling):
    """Create a short request."""
    return GenerateRequest(
        id=f"{index}/0#0",
        session_id=f"{index}/0",
        token_ids=np.asarray(tokens, np.int32),
        sampling=SamplingParams(max_new_tokens=num, **sampling),
        seed=index if seed is None else seed,
        deadline_s=240.0,
    )


def plain_model(path):
    """Return the model in transformers, in fp32."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


@torch.no_grad()
def plain_distributions(model, request, completion):
    """Return log-softmax [C, V] of logits / temperature at each sampled token, by one forward pass of transformers."""
    ids = torch.tensor(np.concatenate([request.token_ids, completion.token_ids]), dtype=torch.long)[None]
    logits = model(ids).logits[0, len(request.token_ids) - 1 : -1].float()
    return (logits / request.sampling.scoring_temperature).log_softmax(-1).numpy()


@torch.no_grad()
def plain_logprobs(model, request, completion):
    """Return the log-probabilities [C] of the completion's tokens."""
    return plain_distributions(model, request, completion)[range(len(completion.token_ids)), completion.token_ids]


@torch.no_grad()
def altered_logprobs(model, request, completion, texts, *, repeats_prompt):
    """Return the log-probabilities [C] of the completion's tokens with the request's bias, penalties, minimum length
    and, if it has one, the regular expression ``[0-9]{3}``. ``texts`` [V] are those of tokens.
    With ``repeats_prompt``, the repetition penalty includes the tokens of the prompt."""
    sampling, prompt = request.sampling, request.token_ids.tolist()
    drawn, found = completion.token_ids.tolist(), []
    logits = model(torch.tensor([[*prompt, *drawn]])).logits[0, len(prompt) - 1 : -1].float()
    for position, row in enumerate(logits):
        before = drawn[:position]
        for token, bias in sampling.logit_bias.items():
            row[int(token)] += bias
        seen = sorted({*(prompt if repeats_prompt else ()), *before})
        row[seen] = torch.where(
            row[seen] > 0, row[seen] / sampling.repetition_penalty, row[seen] * sampling.repetition_penalty
        )
        for token in before:
            row[token] -= sampling.frequency_penalty
        row[sorted(set(before))] -= sampling.presence_penalty
        if position < sampling.min_new_tokens:
            row[list(sampling.stop_token_ids)] = -torch.inf
            row[model.config.eos_token_id] = -torch.inf
        if sampling.regex:
            left = 3 - len("".join(texts[token] for token in before))
            row[[not re.fullmatch(f"[0-9]{{1,{left}}}", text) for text in texts]] = -torch.inf
        found.append((row / sampling.scoring_temperature).log_softmax(-1)[drawn[position]].item())
    return np.array(found)


def check_optional_settings(shared, more, *, repeats_prompt):
    """Settings of `SamplingParams.OPTIONAL` and the cases in ``more`` do what they say; log-probabilities are those of
    the distribution that tokens are sampled from."""
    decode = Tokenizer.of(ModelConfig(path=str(shared.model_path))).decode
    model = plain_model(shared.model_path)
    texts = [decode([token]) for token in range(model.config.vocab_size)]

    async def generate(engine, requests):
        return await asyncio.gather(*map(engine.client.generate, requests))

    async def test():
        async with shared.engine() as engine:
            (plain,) = await generate(engine, [make_request(0, num=12, temperature=0.0)])
            first, last = int(plain.token_ids[0]), int(plain.token_ids[-1])
            greedy = {
                "regex": {"regex": "[0-9]{3}"},
                "json_schema": {"json_schema": {"type": "integer", "minimum": 37, "maximum": 37}, "num": 60},
                "ebnf": {"ebnf": 'root ::= "abc" "d"?'},
                "logit_bias": {"logit_bias": {str(first): -100.0}},
                "frequency_penalty": {"frequency_penalty": 2.0, "num": 40},
                "presence_penalty": {"presence_penalty": 2.0, "num": 40},
                "repetition_penalty": {"repetition_penalty": 2.0, "num": 40},
                "stops": {"stop_token_ids": (last,)},
                "min_new_tokens": {"stop_token_ids": (last,), "min_new_tokens": 12},
                "ends": {"num": 200, "logit_bias": {str(model.config.eos_token_id): 100.0}},
                "ignore_eos": {"num": 20, "ignore_eos": True, "logit_bias": {str(model.config.eos_token_id): 100.0}},
                "plain": {"num": 40},
                **more,
            }
            asked = [make_request(i, **{"num": 12, "temperature": 0.0, **own}) for i, own in enumerate(greedy.values())]
            found = dict(zip(greedy, await generate(engine, asked), strict=True))
            sampled = [
                {"regex": "[0-9]{3}", "num": 3},
                {"logit_bias": {str(first): 2.0, str(last): -3.5}, "ignore_eos": True},
                {"frequency_penalty": 1.5, "ignore_eos": True},
                {"presence_penalty": -1.5, "ignore_eos": True},
                {"repetition_penalty": 1.7, "ignore_eos": True},
                {"stop_token_ids": tuple(range(40)), "min_new_tokens": 12},
            ]
            drawn = [make_request(i, **{"num": 12, "temperature": 1.3, **own}) for i, own in enumerate(sampled)]
            return first, found, list(zip(drawn, await generate(engine, drawn), strict=True))

    first, found, drawn = shared.run(test())
    assert not [name for name, completion in found.items() if completion.error]
    text = {name: decode(completion.token_ids) for name, completion in found.items()}
    assert re.fullmatch("[0-9]{3}", text["regex"])
    assert json.loads(text["json_schema"]) == 37
    assert text["ebnf"] in ("abc", "abcd")
    assert first not in found["logit_bias"].token_ids
    length = {name: len(completion.token_ids) for name, completion in found.items()}
    assert length["stops"] < length["min_new_tokens"] == 12
    assert (length["ends"], length["ignore_eos"]) == (1, 20)
    assert {length[name] for name in more} <= {1}
    distinct = {name: len(set(found[name].token_ids.tolist())) for name in found}
    for name in ("frequency_penalty", "presence_penalty", "repetition_penalty"):
        assert distinct[name] > distinct["plain"], name
    for request, completion in drawn:
        assert len(completion.token_ids) == request.sampling.max_new_tokens
        expected = altered_logprobs(model, request, completion, texts, repeats_prompt=repeats_prompt)
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)
        assert abs(expected - plain_logprobs(model, request, completion)).max() > 0.01


@torch.no_grad()
def changed(model, *, by=0.01, seed=3):
    """Change every weight slightly; return the new weights by name."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += by * torch.randn(parameter.shape, generator=generator)
    return list(model.named_parameters())


ADAPTER = AdapterSpec(rank=2, alpha=6.0, targets=("q_proj", "down_proj"))
"""The adapter of `AdapterTrainer`."""


def adapted_layers(path):
    """Return the names of the layers that get the adapter."""
    return insert_adapter(plain_model(path), ADAPTER, dtype=torch.float32)


def drawn(layers, seed):
    """Return random matrices for the adapted layers, named as by a trainer."""
    draw, named = torch.Generator().manual_seed(seed), {}
    for name, layer in layers.items():
        named[f"{name}.lora_A"] = torch.randn(layer.lora_A.shape, generator=draw)
        named[f"{name}.lora_B"] = 0.1 * torch.randn(layer.lora_B.shape, generator=draw)
    return named


def merged(path, named):
    """Return the transformers model of base and adapter, merged."""
    model = plain_model(path)
    with torch.no_grad():
        for name in {name.rpartition(".")[0] for name in named}:
            weight = model.get_parameter(f"{name}.weight")
            weight.copy_(merge(weight, named[f"{name}.lora_A"], named[f"{name}.lora_B"], ADAPTER.scale))
    return model


async def publish(engine, named_tensors, version, *, ranks=1):
    """Run one weight sync; return both results."""
    plan = await engine.plan_sync()
    sending = asyncio.to_thread(send_weights, named_tensors, plan=plan, version=version, rank=0)
    return await asyncio.gather(sending, engine.receive(plan, version))


def check_recorded_rollouts(shared):
    """Servers end their requests for a checkpoint; the rollouts continue with the tokens sampled before."""

    def rollout(client, number):
        sampling = SamplingParams(max_new_tokens=200, ignore_eos=True)
        named = {"id": f"{number}/0", "group_id": number, "seed": number}
        return Execution(sampling=sampling, client=client, codec=Digits(), deadline_s=120.0, **named)

    async def test():
        async with shared.engine() as engine:
            await engine.metrics()
            rollouts = [rollout(engine.client, number) for number in range(8)]
            drawing = [asyncio.create_task(one.generate(make_request(3).token_ids)) for one in rollouts]
            while not (await engine.metrics())["engine/tokens_per_s"]:  # since the last check
                await asyncio.sleep(0.02)
            unsent = await engine.client.fetch_partial(["unknown"])
            jobs = {str(number): JobProgress(rollouts=[one]) for number, one in enumerate(rollouts)}
            turns = await record_turns(engine.client, jobs)
            return unsent, turns, await asyncio.gather(*drawing)

    unsent, turns, completions = shared.run(test())
    assert [(part.request_id, len(part.token_ids)) for part in unsent] == [("unknown", 0)]
    cut = 0
    for number, completion in enumerate(completions):
        assert len(completion.token_ids) <= 200 and completion.stop_reason in (StopReason.STOP, StopReason.LENGTH)
        for turn in turns.get(str(number), ()):
            count = len(turn.completion.token_ids)
            assert completion.token_ids[:count].tolist() == turn.completion.token_ids.tolist()
            assert completion.logprobs[:count].tolist() == turn.completion.logprobs.tolist()
            cut += 0 < count < len(completion.token_ids) and turn.completion.stop_reason is StopReason.ABORT
    assert cut  # on a busy machine some end before the servers stop


async def update(engine, named, version):
    """Pause, publish and resume; return how the plan sends an adapter, and the result."""
    await engine.pause(engine.pause_mode)
    plan = await engine.plan_sync()
    sending = asyncio.to_thread(send_weights, named.items(), plan=plan, version=version, rank=0)
    results = await asyncio.gather(sending, engine.receive(plan, version), return_exceptions=True)
    for error in results:
        if isinstance(error, BaseException):
            raise error
    sent, received = results
    compare(sent, received)
    await engine.resume()
    return plan.adapter, received


def check_adapter_syncs(shared, **settings):
    """After syncs of the adapter alone, servers have exactly the weights of a merged sync."""
    path, request = shared.model_path, make_request(3, num=12)
    base, layers = dict(plain_model(path).named_parameters()), adapted_layers(path)
    adapters = [drawn(layers, seed) for seed in range(3)]

    async def test():
        modes, results, completions, sums = [], [], [], []
        async with shared.engine(
            trainer="adapter-trainer", adapter=adapters[0], bucket_bytes=100_000, **settings
        ) as engine:
            for version, adapter in enumerate(adapters[1:], 1):
                mode, result = await update(engine, adapter, version)
                modes.append(mode)
                results.append(result)
                completions.append(await engine.client.generate(request))
                sums.append(await engine.checksum())
            await engine.pause("abort")
            engine.supervisor.remove_from_service = lambda server, error: asyncio.sleep(0)  # the server is shared
            with pytest.raises(SyncError, match="adapted weights were not sent completely"):
                await update(engine, dict(list(adapters[0].items())[:-2]), 4)
            modes.append((await update(engine, {**adapters[1], **base}, 5))[0])
        async with shared.engine() as engine:
            for version, adapter in enumerate(adapters[1:], 1):
                modes.append((await update(engine, dict(merged(path, adapter).named_parameters()), version))[0])
                assert await engine.checksum() == sums[version - 1]
        return modes, results, completions

    modes, results, completions = shared.run(test())
    assert modes == ["alone", "alone", "with_base", "merged", "merged"]
    assert sum(tensor.nbytes for tensor in base.values()) > 10 * results[0].num_bytes
    for version, (adapter, completion) in enumerate(zip(adapters[1:], completions, strict=True), 1):
        assert {span.version for span in completion.versions} == {version}
        expected = plain_logprobs(merged(path, adapter), request, completion)
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)
